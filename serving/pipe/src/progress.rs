//! Positions of a pipe: the next offset by partition. Application keys of a volume hold them,
//! `pipe/NAME/INPUT/OUTPUT/MODEL/PARTITION`; the key `…/id` beside them holds the id of these positions.
//!
//! The id is a random number drawn with the first positions, and the pipe's answers carry it. After the
//! volume was created again, earlier answers thus do not count as this pipe's. Earlier releases wrote no id;
//! their positions have the id [`EARLIER`], which also covers answers without an id.
//!
//! Still earlier releases wrote `pipe/NAME/INPUT/PARTITION`. The first run of a pipe adopts such positions
//! and removes them, unless the ends of the output show that they belong to another model.

use std::collections::BTreeMap;

use millrace_datafs::{Publish, View};
use rand::Rng as _;

use crate::error::{Error, Result};
use millrace_serving_core::blocking::blocking;
use millrace_serving_core::config::PipeConfig;

/// The id of positions from a release without ids.
pub(super) const EARLIER: &str = "earlier";

/// Progress of one pipe on one topic. Every commit expects the values of the previous one, so a second
/// process with the same pipe is detected before it overwrites anything.
pub(super) struct Progress {
    view: View,
    keys: Keys,
    /// The id of the positions.
    pub(super) id: String,
    /// Whether this run adopted the positions of an earlier release.
    pub(super) adopted: bool,
    /// The committed offsets, by partition.
    committed: BTreeMap<i32, i64>,
}

/// The identity of a pipe, as its keys contain it.
#[derive(Clone)]
struct Keys {
    name: String,
    input: String,
    output: String,
    model: String,
}

impl Keys {
    fn of(config: &PipeConfig) -> Keys {
        Keys {
            name: config.name.clone(),
            input: config.input.clone(),
            output: config.output.clone(),
            model: config.model.clone(),
        }
    }

    /// The prefix of all keys.
    fn prefix(&self) -> String {
        format!("pipe/{}/{}/{}/{}/", self.name, self.input, self.output, self.model)
    }

    fn key(&self, partition: i32) -> String {
        format!("{}{partition}", self.prefix())
    }

    fn id_key(&self) -> String {
        format!("{}id", self.prefix())
    }

    /// The key in earlier releases.
    fn old_key(&self, partition: i32) -> String {
        format!("pipe/{}/{}/{partition}", self.name, self.input)
    }
}

/// The next offset of a pipe by partition of its input, as its last commit left them; empty before the first one.
/// Positions of releases that stored them by name and input alone do not count: the next run of the pipe adopts
/// them.
///
/// Blocks on metadata.
///
/// # Errors
/// [`Error::Datafs`]; [`Error::Server`] for a key without an offset.
pub fn offsets(view: &View, config: &PipeConfig) -> Result<BTreeMap<i32, i64>> {
    positions(view, &Keys::of(config).prefix())
}

impl Progress {
    /// Reads the positions, and draws their id if they have none. Looks for positions of an earlier release
    /// in `partitions`; `adopt` says whether the pipe may adopt them.
    pub(super) async fn read(
        view: View,
        config: &PipeConfig,
        partitions: impl Iterator<Item = &i32>,
        adopt: bool,
    ) -> Result<Progress> {
        let keys = Keys::of(config);
        let partitions: Vec<i32> = partitions.copied().collect();
        blocking("pipe progress", move || {
            let mut committed = positions(&view, &keys.prefix())?;
            let mut id = read_id(&view, &keys)?;
            let mut adopted = false;
            // A pipe with an id has run before, even if it has not committed yet.
            if adopt && id.is_none() && committed.is_empty() {
                let mut publish = Publish::new()
                    .expect_key(keys.id_key(), None)
                    .put_key(keys.id_key(), EARLIER.as_bytes().to_vec());
                for partition in &partitions {
                    let old = keys.old_key(*partition);
                    let Some(value) = view.key_get(&old)? else { continue };
                    let next = offset(&view, &old, &value)?;
                    let value = next.to_string().into_bytes();
                    publish = publish
                        .expect_key(&old, Some(value.clone()))
                        .delete_key(&old)
                        .put_key(keys.key(*partition), value);
                    committed.insert(*partition, next);
                }
                adopted = !committed.is_empty();
                if adopted {
                    view.publish(publish)?;
                    id = Some(EARLIER.to_owned());
                    tracing::info!(
                        pipe = keys.name,
                        model = keys.model,
                        output = keys.output,
                        "adopted the positions that an earlier release stored by name and input"
                    );
                }
            }
            let id = match id {
                Some(id) => id,
                None => draw_id(&view, &keys, !committed.is_empty())?,
            };
            Ok(Progress { view, keys, id, adopted, committed })
        })
        .await
    }

    /// The offset at which to resume; `None` before the first commit.
    pub(super) fn next(&self, partition: i32) -> Option<i64> {
        self.committed.get(&partition).copied()
    }

    /// Compares the positions with the input; `marks` holds the first and the next offset by partition.
    ///
    /// # Errors
    /// [`Error::InputChanged`] if the pipe cannot resume at one of them.
    pub(super) fn check(&self, marks: &BTreeMap<i32, (i64, i64)>) -> Result<()> {
        for (&partition, &next) in &self.committed {
            let Some(reason) = obstacle(next, marks.get(&partition).copied()) else { continue };
            return Err(Error::InputChanged {
                name: self.keys.name.clone(),
                topic: self.keys.input.clone(),
                partition,
                reason,
            });
        }
        Ok(())
    }

    /// Makes the offsets durable, in one transaction.
    pub(super) async fn commit(&mut self, positions: BTreeMap<i32, i64>) -> Result<()> {
        let moved: Vec<(i32, i64)> = positions
            .into_iter()
            .filter(|(partition, next)| *next >= 0 && self.next(*partition) != Some(*next))
            .collect();
        if moved.is_empty() {
            return Ok(());
        }
        let mut publish = Publish::new();
        for (partition, next) in &moved {
            let key = self.keys.key(*partition);
            let before = self.next(*partition).map(|before| before.to_string().into_bytes());
            publish = publish.expect_key(&key, before).put_key(&key, next.to_string().into_bytes());
        }
        let view = self.view.clone();
        let outcome = blocking("pipe progress", move || Ok(view.publish(publish)?)).await;
        match outcome {
            Err(Error::Datafs(millrace_datafs::Error::Conflict { key })) => {
                let partition = key.rsplit('/').next().and_then(|number| number.parse().ok());
                Err(Error::Fenced {
                    name: self.keys.name.clone(),
                    topic: self.keys.input.clone(),
                    partition: partition.unwrap_or(-1),
                })
            }
            Err(error) => Err(error),
            Ok(()) => {
                self.committed.extend(moved);
                Ok(())
            }
        }
    }
}

/// Why a pipe cannot resume at an offset of a partition; `mark` holds the first and the next offset.
fn obstacle(next: i64, mark: Option<(i64, i64)>) -> Option<String> {
    match mark {
        None if next > 0 => Some("the topic no longer has this partition".to_owned()),
        Some((_, high)) if next > high => {
            Some(format!("the pipe has read up to offset {next}, and the partition ends at {high}"))
        }
        Some((low, _)) if next < low => {
            let last = low - 1;
            Some(format!("the records from {next} to {last} were removed before the pipe has read them"))
        }
        _ => None,
    }
}

/// All positions below a prefix, by partition.
fn positions(view: &View, prefix: &str) -> Result<BTreeMap<i32, i64>> {
    let mut found = BTreeMap::new();
    for (key, value) in view.key_scan(prefix)? {
        // Skips the id, and keys of a model whose name begins with this model's name and a slash.
        let Some(partition) = key.strip_prefix(prefix).and_then(|number| number.parse().ok()) else {
            continue;
        };
        found.insert(partition, offset(view, &key, &value)?);
    }
    Ok(found)
}

fn offset(view: &View, key: &str, value: &[u8]) -> Result<i64> {
    let next = std::str::from_utf8(value).ok().and_then(|text| text.parse::<i64>().ok());
    let no_offset = || Error::config(format!("key {key} of volume {} is no offset", view.spec()));
    next.filter(|next| *next >= 0).ok_or_else(no_offset)
}

fn read_id(view: &View, keys: &Keys) -> Result<Option<String>> {
    let value = view.key_get(&keys.id_key())?;
    Ok(value.map(|id| String::from_utf8_lossy(&id).into_owned()))
}

/// Stores an id for positions that have none; `known` says whether there are positions already.
fn draw_id(view: &View, keys: &Keys, known: bool) -> Result<String> {
    let id = match known {
        true => EARLIER.to_owned(),
        false => hex::encode(rand::rng().random::<[u8; 16]>()),
    };
    let publish =
        Publish::new().expect_key(keys.id_key(), None).put_key(keys.id_key(), id.clone().into_bytes());
    match view.publish(publish) {
        Ok(()) => Ok(id),
        // Another process has begun the same pipe; the first commit that conflicts fences one of the two.
        Err(millrace_datafs::Error::Conflict { key }) => {
            read_id(view, keys)?.ok_or(Error::Datafs(millrace_datafs::Error::Conflict { key }))
        }
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::obstacle;

    #[test]
    fn pipe_resumes_only_if_the_partition_has_its_next_record() {
        for (next, mark, says) in [
            (7, Some((0, 7)), None),
            (0, Some((0, 0)), None),
            (0, None, None),
            (3, None, Some("no longer has this partition")),
            (8, Some((0, 7)), Some("up to offset 8, and the partition ends at 7")),
            (3, Some((5, 9)), Some("from 3 to 4 were removed")),
        ] {
            let found = obstacle(next, mark);
            let as_wanted = match (&found, says) {
                (Some(reason), Some(words)) => reason.contains(words),
                (found, says) => found.is_none() && says.is_none(),
            };
            assert!(as_wanted, "{next} {mark:?}: {found:?}");
        }
    }
}
