//! Positions of a pipe: the next offset by partition, in application keys of a volume,
//! `pipe/NAME/INPUT/OUTPUT/MODEL/PARTITION`.
//!
//! Earlier releases wrote `pipe/NAME/INPUT/PARTITION`. The first run of a pipe takes such positions over
//! and removes them, unless the ends of the output show that they belong to another model.

use std::collections::BTreeMap;

use millrace_datafs::{Publish, View};

use crate::blocking::blocking;
use crate::config::PipeConfig;
use crate::error::{Error, Result};

/// Progress of one pipe on one topic. Every commit expects the values of the last one, so a second
/// process with the same pipe is found out before it overwrites anything.
pub(super) struct Progress {
    view: View,
    keys: Keys,
    /// Whether this run took over the positions of an earlier release.
    pub(super) adopted: bool,
    /// What the keys hold, by partition.
    committed: BTreeMap<i32, i64>,
}

/// The identity of a pipe, as its keys have it.
#[derive(Clone)]
struct Keys {
    name: String,
    input: String,
    output: String,
    model: String,
}

impl Keys {
    fn key(&self, partition: i32) -> String {
        format!("pipe/{}/{}/{}/{}/{partition}", self.name, self.input, self.output, self.model)
    }

    /// The key of earlier releases.
    fn old_key(&self, partition: i32) -> String {
        format!("pipe/{}/{}/{partition}", self.name, self.input)
    }
}

impl Progress {
    /// Reads the positions of the partitions; `adopt` says whether those of an earlier release may be taken
    /// over.
    pub(super) async fn read(
        view: View,
        config: &PipeConfig,
        partitions: impl Iterator<Item = &i32>,
        adopt: bool,
    ) -> Result<Progress> {
        let keys = Keys {
            name: config.name.clone(),
            input: config.input.clone(),
            output: config.output.clone(),
            model: config.model.clone(),
        };
        let partitions: Vec<i32> = partitions.copied().collect();
        blocking("pipe progress", move || {
            let mut committed = BTreeMap::new();
            for partition in &partitions {
                if let Some(next) = position(&view, &keys.key(*partition))? {
                    committed.insert(*partition, next);
                }
            }
            let mut adopted = false;
            if adopt && committed.is_empty() {
                let mut publish = Publish::new();
                for partition in &partitions {
                    let old = keys.old_key(*partition);
                    let Some(next) = position(&view, &old)? else { continue };
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
                    tracing::info!(
                        pipe = keys.name,
                        model = keys.model,
                        output = keys.output,
                        "took over the positions that an earlier release kept by name and input"
                    );
                }
            }
            Ok(Progress { view, keys, adopted, committed })
        })
        .await
    }

    /// The offset to go on from, when there was a commit.
    pub(super) fn next(&self, partition: i32) -> Option<i64> {
        self.committed.get(&partition).copied()
    }

    /// Makes the offsets durable, all or none.
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
                Err(Error::PipeFenced {
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

fn position(view: &View, key: &str) -> Result<Option<i64>> {
    let Some(value) = view.key_get(key)? else {
        return Ok(None);
    };
    let next = std::str::from_utf8(&value).ok().and_then(|text| text.parse().ok());
    let next = next.filter(|next| *next >= 0);
    let no_offset = || Error::Config { reason: format!("key {key} of volume {} is no offset", view.spec()) };
    next.map(Some).ok_or_else(no_offset)
}
