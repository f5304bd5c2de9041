//! What a volume knows about a job: offsets, schema, owner. All of it is application keys that
//! move in the same transaction as the files.
//!
//! | key | value |
//! |---|---|
//! | `ingest/<job>/job` | [`Identity`] as JSON: topic and folder, fixed for life |
//! | `ingest/<job>/fence` | `<owner>:<commit number>`: who may commit next |
//! | `ingest/<job>/schema` | [`Schema`] as JSON |
//! | `ingest/<job>/<topic>/<partition>` | next offset to land, in decimal |

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};

use millrace_datafs::{Publish, View};
use serde::{Deserialize, Serialize};

use crate::config::{Job, nested};
use crate::error::{Error, Result};
use crate::schema::Schema;

const PREFIX: &str = "ingest/";
/// How often a claim is tried again when others claim at the same time.
const CLAIMS_MAX: usize = 8;

/// What a job never changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Identity {
    format_version: u32,
    topic: String,
    path: String,
}

/// The state of a job as committed.
#[derive(Clone, Debug)]
pub(crate) struct State {
    /// The fence's value, which every commit of this owner expects and replaces.
    fence: Vec<u8>,
    owner: u64,
    commits: u64,
    /// Next offset per partition, as committed.
    pub(crate) offsets: BTreeMap<i32, i64>,
    /// Columns of the files, once there are any.
    pub(crate) schema: Option<Schema>,
}

pub(crate) fn offset_key(job: &str, topic: &str, partition: i32) -> String {
    format!("{PREFIX}{job}/{topic}/{partition}")
}

fn key(job: &str, what: &str) -> String {
    format!("{PREFIX}{job}/{what}")
}

impl State {
    /// Takes the job over: from now on commits of any earlier owner fail as fenced.
    ///
    /// Durable when it returns. Blocks on metadata.
    pub(crate) fn claim(view: &View, job: &Job) -> Result<Self> {
        let volume_error = |e| volume_error(job, e);
        for _ in 0..CLAIMS_MAX {
            let identity =
                Identity { format_version: 1, topic: job.topic().to_owned(), path: job.path.clone() };
            check_identity(view, job, &identity)?;
            let fence_key = key(job.name(), "fence");
            let before = view.key_get(&fence_key).map_err(volume_error)?;
            let owner = RandomState::new().build_hasher().finish();
            let fence = fence_value(owner, 0);
            let identity_bytes = serde_json::to_vec(&identity).map_err(|e| Error::CorruptState {
                volume: job.config.volume.clone(),
                key: key(job.name(), "job"),
                reason: e.to_string(),
            })?;
            let publish = Publish::new()
                .expect_key(&fence_key, before)
                .put_key(&fence_key, fence.clone())
                .put_key(key(job.name(), "job"), identity_bytes);
            match view.publish(publish) {
                Ok(()) => {}
                Err(millrace_datafs::Error::Conflict { .. }) => continue,
                Err(error) => return Err(volume_error(error)),
            }
            return Ok(Self {
                fence,
                owner,
                commits: 0,
                offsets: read_offsets(view, job)?,
                schema: read_schema(view, job)?,
            });
        }
        Err(fenced(job))
    }

    /// Adds this commit's keys to `publish` and commits it: files, offsets and schema move in one
    /// transaction or not at all.
    pub(crate) fn commit(
        &mut self,
        view: &View,
        job: &Job,
        publish: Publish,
        offsets: &BTreeMap<i32, i64>,
        schema: Option<&Schema>,
    ) -> Result<()> {
        let fence = fence_value(self.owner, self.commits + 1);
        let publish = self.with_keys(job, publish, &fence, offsets, schema)?;
        let outcome = view.publish(publish);
        self.conclude(view, job, outcome, fence)?;
        self.offsets.extend(offsets);
        if let Some(schema) = schema {
            self.schema = Some(schema.clone());
        }
        Ok(())
    }

    fn with_keys(
        &self,
        job: &Job,
        publish: Publish,
        fence: &[u8],
        offsets: &BTreeMap<i32, i64>,
        schema: Option<&Schema>,
    ) -> Result<Publish> {
        let fence_key = key(job.name(), "fence");
        let mut publish = publish.expect_key(&fence_key, Some(self.fence.clone())).put_key(&fence_key, fence);
        for (partition, next) in offsets {
            let key = offset_key(job.name(), job.topic(), *partition);
            let before = self.offsets.get(partition).map(|next| decimal(*next));
            publish = publish.expect_key(&key, before).put_key(&key, decimal(*next));
        }
        if let Some(schema) = schema
            && self.schema.as_ref() != Some(schema)
        {
            let key = key(job.name(), "schema");
            let bytes = serde_json::to_vec(schema).map_err(|e| Error::CorruptState {
                volume: job.config.volume.clone(),
                key: key.clone(),
                reason: e.to_string(),
            })?;
            publish = publish.put_key(key, bytes);
        }
        Ok(publish)
    }

    /// Learns what became of the commit that set `fence`. An outcome that the metadata engine
    /// could not tell is resolved by reading the fence back: its value names this very commit.
    fn conclude(
        &mut self,
        view: &View,
        job: &Job,
        outcome: millrace_datafs::Result<()>,
        fence: Vec<u8>,
    ) -> Result<()> {
        match outcome {
            Ok(()) => {}
            Err(millrace_datafs::Error::Conflict { .. }) => return Err(fenced(job)),
            Err(error) => match view.key_get(&key(job.name(), "fence")) {
                Ok(Some(now)) if now == fence => {
                    tracing::warn!(
                        job = job.name(),
                        %error,
                        "the outcome of a commit was unknown; the volume has it"
                    );
                }
                Ok(Some(now)) if now != self.fence => return Err(fenced(job)),
                _ => return Err(volume_error(job, error)),
            },
        }
        self.fence = fence;
        self.commits += 1;
        Ok(())
    }
}

fn decimal(offset: i64) -> Vec<u8> {
    offset.to_string().into_bytes()
}

fn fence_value(owner: u64, commits: u64) -> Vec<u8> {
    format!("{owner:016x}:{commits}").into_bytes()
}

fn fenced(job: &Job) -> Error {
    Error::Fenced { job: job.name().to_owned(), volume: job.config.volume.clone() }
}

/// An error of the volume, told apart by what the caller does next.
pub(crate) fn volume_error(job: &Job, source: millrace_datafs::Error) -> Error {
    let (job_name, volume) = (job.name().to_owned(), job.config.volume.clone());
    match source {
        millrace_datafs::Error::NoSpace { .. } | millrace_datafs::Error::NoSpaceToCommit { .. } => {
            Error::NoSpace { job: job_name, volume, source: Box::new(source) }
        }
        source => Error::Volume { job: job_name, volume, source: Box::new(source) },
    }
}

/// Refuses a job that moved, and a folder that belongs to another job.
fn check_identity(view: &View, job: &Job, identity: &Identity) -> Result<()> {
    for (key, value) in view.key_scan(PREFIX).map_err(|e| volume_error(job, e))? {
        let Some((name, "job")) = key.strip_prefix(PREFIX).and_then(|k| k.split_once('/')) else {
            continue;
        };
        let other: Identity = serde_json::from_slice(&value).map_err(|e| Error::CorruptState {
            volume: job.config.volume.clone(),
            key: key.clone(),
            reason: e.to_string(),
        })?;
        let changed = |what: String| Error::JobChanged {
            job: job.name().to_owned(),
            volume: job.config.volume.clone(),
            what,
        };
        if name != job.name() {
            if nested(&other.path, &identity.path) || nested(&identity.path, &other.path) {
                return Err(changed(format!(
                    "wants folder {}, but {} belongs to job {name}",
                    identity.path, other.path
                )));
            }
        } else if other.topic != identity.topic {
            return Err(changed(format!("lands topic {} there, not {}", other.topic, identity.topic)));
        } else if other.path != identity.path {
            return Err(changed(format!("lands in folder {} there, not {}", other.path, identity.path)));
        }
    }
    Ok(())
}

fn read_offsets(view: &View, job: &Job) -> Result<BTreeMap<i32, i64>> {
    let prefix = format!("{PREFIX}{}/{}/", job.name(), job.topic());
    let mut offsets = BTreeMap::new();
    for (key, value) in view.key_scan(&prefix).map_err(|e| volume_error(job, e))? {
        let partition = key.strip_prefix(&prefix).unwrap_or_default();
        let (partition, next) = parse_offset(view, &key, partition, &value)?;
        offsets.insert(partition, next);
    }
    Ok(offsets)
}

fn read_schema(view: &View, job: &Job) -> Result<Option<Schema>> {
    let key = key(job.name(), "schema");
    let Some(bytes) = view.key_get(&key).map_err(|e| volume_error(job, e))? else {
        return Ok(None);
    };
    let corrupt =
        |reason: String| Error::CorruptState { volume: job.config.volume.clone(), key: key.clone(), reason };
    let schema: Schema = serde_json::from_slice(&bytes).map_err(|e| corrupt(e.to_string()))?;
    Schema::new(schema.origin, schema.fields).map(Some).map_err(|e| corrupt(e.to_string()))
}

fn parse_offset(view: &View, key: &str, partition: &str, value: &[u8]) -> Result<(i32, i64)> {
    let parse = || {
        let partition: i32 = partition.parse().ok()?;
        let next: i64 = std::str::from_utf8(value).ok()?.parse().ok()?;
        (partition >= 0 && next >= 0).then_some((partition, next))
    };
    parse().ok_or_else(|| Error::CorruptState {
        volume: view.spec().to_string(),
        key: key.to_owned(),
        reason: format!("{:?} is not an offset", String::from_utf8_lossy(value)),
    })
}

/// Next offset to land, per topic and partition.
pub type Offsets = BTreeMap<String, BTreeMap<i32, i64>>;

/// The offsets up to which topics have landed in that view, live or at a snapshot: every record
/// below is in its files (or dead letters), none at or above is. When several jobs land one topic
/// in the volume, the smaller offset counts.
///
/// Blocks on metadata.
///
/// # Errors
/// [`Error::State`], [`Error::CorruptState`].
pub fn offsets(view: &View) -> Result<Offsets> {
    let mut all = Offsets::new();
    for topics in offsets_by_job(view)?.into_values() {
        for (topic, partitions) in topics {
            let known = all.entry(topic).or_default();
            for (partition, next) in partitions {
                known.entry(partition).and_modify(|n| *n = next.min(*n)).or_insert(next);
            }
        }
    }
    Ok(all)
}

/// As [`offsets`], for each job by its name.
///
/// # Errors
/// As [`offsets`].
pub fn offsets_by_job(view: &View) -> Result<BTreeMap<String, Offsets>> {
    let mut jobs: BTreeMap<String, Offsets> = BTreeMap::new();
    let keys = view.key_scan(PREFIX).map_err(|e| Error::State(Box::new(e)))?;
    for (key, value) in keys {
        let mut parts = key.strip_prefix(PREFIX).unwrap_or_default().split('/');
        let (Some(job), Some(topic), Some(partition), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        let (partition, next) = parse_offset(view, &key, partition, &value)?;
        jobs.entry(job.to_owned()).or_default().entry(topic.to_owned()).or_default().insert(partition, next);
    }
    Ok(jobs)
}
