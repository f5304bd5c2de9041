//! State of a job in its volume: offsets, schema, owner. It consists of application keys, which change in the
//! same transaction as the files.
//!
//! | key | value |
//! |---|---|
//! | `ingest/<job>/job` | [`Identity`] as JSON: topic and folder, fixed for life |
//! | `ingest/<job>/fence` | `<owner>:<commit number>`: every commit expects and replaces it |
//! | `ingest/<job>/schema` | [`Schema`] as JSON |
//! | `ingest/<job>/<topic>/<partition>` | next offset to land, in decimal |
//! | `ingest/<job>/last` | [`LastRecord`] by partition as JSON: it identifies the topic |
//! | `ingest/claims` | folders and the jobs that own them, see [`claims`] |

mod claims;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};

use millrace_datafs::{Publish, View};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::config::Job;
use crate::error::{Error, Result};
use crate::schema::Schema;

const PREFIX: &str = "ingest/";
/// Attempts at a claim when other jobs claim at the same time, as all jobs of a service may.
const CLAIMS_MAX: usize = 100;

/// The properties that a job never changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Identity {
    format_version: u32,
    topic: String,
    path: String,
}

/// The last record of a partition that landed or became a dead letter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LastRecord {
    pub(crate) offset: i64,
    /// Digest of the record, see [`millrace_streams::topic::Records::digest`].
    pub(crate) digest: String,
}

/// Positions that a commit moves.
#[derive(Clone, Debug, Default)]
pub(crate) struct PositionUpdate {
    /// Next offset by partition.
    pub(crate) offsets: BTreeMap<i32, i64>,
    /// Last record by partition, where there is a newer one.
    pub(crate) last: BTreeMap<i32, LastRecord>,
}

/// The state of a job as committed.
#[derive(Clone, Debug)]
pub(crate) struct JobState {
    /// The fence's value, which every commit of this owner expects and replaces.
    fence: Vec<u8>,
    owner: u64,
    commits: u64,
    /// Next offset per partition, as committed.
    pub(crate) offsets: BTreeMap<i32, i64>,
    /// Last record per partition, as committed; absent for partitions that earlier releases landed.
    pub(crate) last: BTreeMap<i32, LastRecord>,
    /// Columns of the files, once there are any.
    pub(crate) schema: Option<Schema>,
}

pub(crate) fn offset_key(job: &str, topic: &str, partition: i32) -> String {
    format!("{PREFIX}{job}/{topic}/{partition}")
}

fn key(job: &str, what: &str) -> String {
    format!("{PREFIX}{job}/{what}")
}

impl JobState {
    /// Claims the job and its folders: from now on commits of any earlier owner fail as fenced.
    ///
    /// Durable when it returns. Blocks on metadata.
    pub(crate) fn claim(view: &View, job: &Job) -> Result<Self> {
        for _ in 0..CLAIMS_MAX {
            let (publish, fence, owner) = Self::prepare(view, job)?;
            match view.publish(publish) {
                Ok(()) => {}
                Err(millrace_datafs::Error::Conflict { .. }) => continue,
                Err(error) => return Err(volume_error(job, error)),
            }
            return Ok(Self {
                fence,
                owner,
                commits: 0,
                offsets: read_offsets(view, job)?,
                last: read_json(view, job, "last")?.unwrap_or_default(),
                schema: read_schema(view, job)?,
            });
        }
        Err(fenced(job))
    }

    /// The publish that claims the job, with the fence's new value and the owner in it.
    fn prepare(view: &View, job: &Job) -> Result<(Publish, Vec<u8>, u64)> {
        let identity = Identity { format_version: 1, topic: job.topic().to_owned(), path: job.path.clone() };
        let identities = identities(view, job)?;
        check_identity(job, identities.get(job.name()), &identity)?;
        let fence_key = key(job.name(), "fence");
        let before = view.key_get(&fence_key).map_err(|e| volume_error(job, e))?;
        let owner = RandomState::new().build_hasher().finish();
        let fence = fence_value(owner, 0);
        let identity_key = key(job.name(), "job");
        let identity_bytes = to_json(job, &identity_key, &identity)?;
        let publish = Publish::new()
            .expect_key(&fence_key, before)
            .put_key(&fence_key, fence.clone())
            .put_key(identity_key, identity_bytes);
        let publish = claims::add(view, job, &identities, publish)?;
        Ok((publish, fence, owner))
    }

    /// Adds this commit's keys to `publish` and commits it: files, offsets and schema move in one
    /// transaction or not at all.
    pub(crate) fn commit(
        &mut self,
        view: &View,
        job: &Job,
        publish: Publish,
        moved: PositionUpdate,
        schema: Option<&Schema>,
    ) -> Result<()> {
        let fence = fence_value(self.owner, self.commits + 1);
        let publish = self.with_keys(job, publish, &fence, &moved, schema)?;
        let outcome = view.publish(publish);
        self.conclude(view, job, outcome, fence)?;
        self.offsets.extend(moved.offsets);
        self.last.extend(moved.last);
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
        moved: &PositionUpdate,
        schema: Option<&Schema>,
    ) -> Result<Publish> {
        let fence_key = key(job.name(), "fence");
        let mut publish = publish.expect_key(&fence_key, Some(self.fence.clone())).put_key(&fence_key, fence);
        for (partition, next) in &moved.offsets {
            let key = offset_key(job.name(), job.topic(), *partition);
            let before = self.offsets.get(partition).map(|next| decimal(*next));
            publish = publish.expect_key(&key, before).put_key(&key, decimal(*next));
        }
        if !moved.last.is_empty() {
            let mut last = self.last.clone();
            last.extend(moved.last.clone());
            let key = key(job.name(), "last");
            let bytes = to_json(job, &key, &last)?;
            publish = publish.put_key(key, bytes);
        }
        if let Some(schema) = schema
            && self.schema.as_ref() != Some(schema)
        {
            let key = key(job.name(), "schema");
            let bytes = to_json(job, &key, schema)?;
            publish = publish.put_key(key, bytes);
        }
        Ok(publish)
    }

    /// Determines the outcome of the commit that set `fence`. When the metadata engine cannot tell the
    /// outcome, the fence is read back: its value names this very commit.
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
                        "the outcome of a commit was unknown; the volume shows that it succeeded"
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

/// Converts an error of the volume; a full disk becomes [`Error::NoSpace`].
pub(crate) fn volume_error(job: &Job, source: millrace_datafs::Error) -> Error {
    let (job_name, volume) = (job.name().to_owned(), job.config.volume.clone());
    match source {
        millrace_datafs::Error::NoSpace { .. } | millrace_datafs::Error::NoSpaceToCommit { .. } => {
            Error::NoSpace { job: job_name, volume, source: Box::new(source) }
        }
        source => Error::Volume { job: job_name, volume, source: Box::new(source) },
    }
}

/// The jobs that the volume knows, by their names.
fn identities(view: &View, job: &Job) -> Result<BTreeMap<String, Identity>> {
    let mut identities = BTreeMap::new();
    for (key, value) in view.key_scan(PREFIX).map_err(|e| volume_error(job, e))? {
        let Some((name, "job")) = key.strip_prefix(PREFIX).and_then(|k| k.split_once('/')) else {
            continue;
        };
        let identity = serde_json::from_slice(&value).map_err(|e| corrupt(job, &key, &e))?;
        identities.insert(name.to_owned(), identity);
    }
    Ok(identities)
}

/// Refuses a job whose topic or folder differs from the stored one.
fn check_identity(job: &Job, before: Option<&Identity>, identity: &Identity) -> Result<()> {
    let Some(before) = before else { return Ok(()) };
    let what = if before.topic != identity.topic {
        format!("already lands topic {}, not {}", before.topic, identity.topic)
    } else if before.path != identity.path {
        format!("already lands in folder {}, not {}", before.path, identity.path)
    } else {
        return Ok(());
    };
    Err(Error::JobChanged { job: job.name().to_owned(), volume: job.config.volume.clone(), what })
}

fn corrupt(job: &Job, key: &str, error: &serde_json::Error) -> Error {
    Error::CorruptState { volume: job.config.volume.clone(), key: key.to_owned(), reason: error.to_string() }
}

fn to_json(job: &Job, key: &str, value: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|e| corrupt(job, key, &e))
}

/// A value of the job that is kept as JSON.
fn read_json<T: DeserializeOwned>(view: &View, job: &Job, what: &str) -> Result<Option<T>> {
    let key = key(job.name(), what);
    match view.key_get(&key).map_err(|e| volume_error(job, e))? {
        Some(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|e| corrupt(job, &key, &e)),
        None => Ok(None),
    }
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
    let Some(schema) = read_json::<Schema>(view, job, "schema")? else {
        return Ok(None);
    };
    Schema::new(schema.origin, schema.fields).map(Some).map_err(|e| Error::CorruptState {
        volume: job.config.volume.clone(),
        key: key(job.name(), "schema"),
        reason: e.to_string(),
    })
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

/// The offsets up to which topics have landed in that view, live or at a snapshot. Every record below is in
/// its files (or dead letters), none at or above is. When several jobs land one topic in the volume, the
/// smaller offset counts.
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
