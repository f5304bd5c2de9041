//! Where a pipe stands: the next offset by partition, in application keys of a volume.

use std::collections::BTreeMap;

use millrace_datafs::{Publish, View};

use crate::blocking::blocking;
use crate::error::{Error, Result};

/// Progress of one pipe on one topic. Every commit expects the values of the last one, so a second
/// process with the same pipe is found out before it overwrites anything.
pub(super) struct Progress {
    view: View,
    name: String,
    topic: String,
    /// What the keys hold, by partition.
    committed: BTreeMap<i32, i64>,
}

impl Progress {
    /// Reads the keys of the partitions.
    pub(super) async fn read(
        view: View,
        name: &str,
        topic: &str,
        partitions: impl Iterator<Item = &i32>,
    ) -> Result<Progress> {
        let (name, topic) = (name.to_owned(), topic.to_owned());
        let partitions: Vec<i32> = partitions.copied().collect();
        blocking("pipe progress", move || {
            let mut committed = BTreeMap::new();
            for partition in partitions {
                let key = key(&name, &topic, partition);
                let Some(value) = view.key_get(&key)? else {
                    continue;
                };
                let next = std::str::from_utf8(&value).ok().and_then(|text| text.parse().ok());
                let next = next.filter(|next| *next >= 0).ok_or_else(|| Error::Config {
                    reason: format!("key {key} of volume {} is no offset", view.spec()),
                })?;
                committed.insert(partition, next);
            }
            Ok(Progress { view, name, topic, committed })
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
            let key = key(&self.name, &self.topic, *partition);
            let before = self.next(*partition).map(|before| before.to_string().into_bytes());
            publish = publish.expect_key(&key, before).put_key(&key, next.to_string().into_bytes());
        }
        let view = self.view.clone();
        let outcome = blocking("pipe progress", move || Ok(view.publish(publish)?)).await;
        match outcome {
            Err(Error::Datafs(millrace_datafs::Error::Conflict { key })) => {
                let partition = key.rsplit('/').next().and_then(|number| number.parse().ok());
                Err(Error::PipeFenced {
                    name: self.name.clone(),
                    topic: self.topic.clone(),
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

fn key(name: &str, topic: &str, partition: i32) -> String {
    format!("pipe/{name}/{topic}/{partition}")
}
