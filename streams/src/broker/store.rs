//! Topic store of the broker: the list of topics (one small file, replaced atomically) and their partitions.
//!
//! ```text
//! <dir>/lock                        holder, see lock.rs
//! <dir>/meta.json                   format version, cluster id, topics, next producer id
//! <dir>/topics/<topic>/<partition>/ segment files, checkpoint.json
//! ```
//! A topic exists when `meta.json` lists it. The store creates its folders before the entry, and removes them
//! after the entry (on a full disk before it).

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use millrace_leaf::{atomic_file, error_chain, private, random};
use parking_lot::{Mutex, RwLock};
use serde::{Deserialize, Serialize};

use super::Config;
use super::code;
use super::log::segments::Retention;
use super::log::{Partition, Refused};
use crate::error::{Error, Result};

const FORMAT_VERSION: u32 = 1;
/// Producer ids handed out per write of `meta.json`; a restart skips the rest of a block.
const PRODUCER_ID_BLOCK: i64 = 1_000;
const TOPIC_NAME_BYTES_MAX: usize = 249;

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Meta {
    format_version: u32,
    cluster_id: String,
    /// No producer id below this is assigned after a restart.
    next_producer_id: i64,
    topics: BTreeMap<String, TopicMeta>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TopicMeta {
    partitions: i32,
}

struct Written {
    meta: Meta,
    /// Next id inside of the block that `meta` has reserved.
    producer_id: i64,
}

type Topics = HashMap<String, Arc<[Arc<Partition>]>>;

/// All topics.
pub(crate) struct Store {
    dir: PathBuf,
    config: Config,
    cluster_id: String,
    /// The lock also serializes changes to the set of topics.
    written: Mutex<Written>,
    topics: RwLock<Topics>,
}

impl Store {
    /// Opens the store in `dir`, creating what is missing, and recovers every partition. Damaged ones
    /// are logged and do not keep the others from serving.
    ///
    /// # Errors
    /// [`Error::NewerFormat`], [`Error::DamagedMeta`], [`Error::Io`].
    pub(crate) fn open(dir: &Path, config: &Config) -> Result<Self> {
        let topics_dir = dir.join("topics");
        private::create_dir_all(&topics_dir).map_err(Error::io("create", &topics_dir))?;
        let meta = match read_meta(dir)? {
            Some(meta) => meta,
            None => {
                let meta = Meta {
                    format_version: FORMAT_VERSION,
                    cluster_id: new_cluster_id()?,
                    next_producer_id: 0,
                    topics: BTreeMap::new(),
                };
                write_meta(dir, &meta)?;
                meta
            }
        };
        let mut topics = Topics::new();
        for (name, topic) in &meta.topics {
            let mut partitions = Vec::new();
            for index in 0..topic.partitions {
                // The folder was created before the topic was listed, so creating it here would hide a loss.
                let dir = topics_dir.join(name).join(index.to_string());
                partitions.push(Arc::new(Partition::open(name, index, &dir, config)));
            }
            topics.insert(name.clone(), partitions.into());
        }
        Ok(Self {
            dir: dir.to_path_buf(),
            config: config.clone(),
            cluster_id: meta.cluster_id.clone(),
            written: Mutex::new(Written { producer_id: meta.next_producer_id, meta }),
            topics: RwLock::new(topics),
        })
    }

    pub(crate) fn cluster_id(&self) -> &str {
        &self.cluster_id
    }

    /// Partition counts by topic, in name order.
    pub(crate) fn list(&self) -> BTreeMap<String, usize> {
        self.topics.read().iter().map(|(name, partitions)| (name.clone(), partitions.len())).collect()
    }

    pub(crate) fn partition_count(&self, topic: &str) -> Option<usize> {
        self.topics.read().get(topic).map(|partitions| partitions.len())
    }

    pub(crate) fn partition(&self, topic: &str, index: i32) -> Option<Arc<Partition>> {
        let topics = self.topics.read();
        topics.get(topic)?.get(usize::try_from(index).ok()?).cloned()
    }

    /// Checks whether a topic can be created; `partitions` is the final count.
    pub(crate) fn check_new(&self, name: &str, partitions: i32) -> Result<(), Refused> {
        check_name(name).map_err(|reason| Refused::new(code::INVALID_TOPIC, reason))?;
        if partitions < 1 {
            return Err(Refused::new(code::INVALID_PARTITIONS, "a topic needs at least one partition"));
        }
        let topics = self.topics.read();
        if topics.contains_key(name) {
            return Err(Refused::new(code::TOPIC_ALREADY_EXISTS, format!("topic {name} exists already")));
        }
        let others: usize = topics.values().map(|partitions| partitions.len()).sum();
        if others.saturating_add(partitions as usize) > self.config.partitions_max {
            return Err(Refused::new(
                code::POLICY_VIOLATION,
                format!(
                    "{others} partitions exist, streams.broker.partitions_max is {}",
                    self.config.partitions_max
                ),
            ));
        }
        Ok(())
    }

    /// Creates a topic; durable when it returns. Blocks on the disk.
    pub(crate) fn create(&self, name: &str, partitions: i32) -> Result<(), Refused> {
        let mut written = self.written.lock();
        self.check_new(name, partitions)?;
        let opened = self.create_files(name, partitions, &mut written.meta);
        let opened = opened.map_err(|error| {
            tracing::error!(topic = name, error = error_chain::one_line(&error), "cannot create a topic");
            Refused::new(code::KAFKA_STORAGE_ERROR, error_chain::one_line(&error))
        })?;
        self.topics.write().insert(name.to_string(), opened);
        tracing::info!(topic = name, partitions, "created topic");
        Ok(())
    }

    fn create_files(&self, name: &str, partitions: i32, meta: &mut Meta) -> Result<Arc<[Arc<Partition>]>> {
        let topic_dir = self.dir.join("topics").join(name);
        if topic_dir.exists() {
            // Left from a crash between the two steps of a creation or deletion.
            fs::remove_dir_all(&topic_dir).map_err(Error::io("remove", &topic_dir))?;
        }
        let mut opened = Vec::new();
        for index in 0..partitions {
            let dir = topic_dir.join(index.to_string());
            private::create_dir_all(&dir).map_err(Error::io("create", &dir))?;
            opened.push(Arc::new(Partition::open(name, index, &dir, &self.config)));
        }
        sync_dir(&topic_dir)?;
        sync_dir(&self.dir.join("topics"))?;
        let mut next = meta.clone();
        next.topics.insert(name.to_string(), TopicMeta { partitions });
        write_meta(&self.dir, &next)?;
        *meta = next;
        Ok(opened.into())
    }

    /// Deletes a topic with its records. Blocks on the disk. On a full disk it removes the records first,
    /// which frees space for the list of topics.
    pub(crate) fn delete(&self, name: &str) -> Result<(), Refused> {
        let mut written = self.written.lock();
        if self.partition_count(name).is_none() {
            return Err(Refused::new(
                code::UNKNOWN_TOPIC_OR_PARTITION,
                format!("topic {name} does not exist"),
            ));
        }
        let mut next = written.meta.clone();
        next.topics.remove(name);
        let topic_dir = self.dir.join("topics").join(name);
        let close = || {
            for partition in self.topics.read().get(name).iter().flat_map(|partitions| partitions.iter()) {
                partition.delete();
            }
        };
        match write_meta(&self.dir, &next) {
            Err(error) if error.is_no_space() => {
                close();
                // After a crash here the topic is damaged, and can be deleted again.
                remove_folder(&topic_dir);
                write_meta(&self.dir, &next)
            }
            other => other,
        }
        .map_err(|error| {
            tracing::error!(topic = name, error = error_chain::one_line(&error), "cannot delete a topic");
            Refused::new(code::KAFKA_STORAGE_ERROR, error_chain::one_line(&error))
        })?;
        written.meta = next;
        close();
        self.topics.write().remove(name);
        remove_folder(&topic_dir);
        tracing::info!(topic = name, "deleted topic");
        Ok(())
    }

    /// Removes the records of all topics that are beyond the configured retention. Blocks on the disk.
    pub(crate) fn retain(&self) {
        let limit = |value: u64| (value > 0).then_some(value);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as i64);
        let retention = Retention {
            before_ms: limit(self.config.retention_ms).map(|kept| now.saturating_sub_unsigned(kept)),
            bytes_max: limit(self.config.retention_bytes_max),
        };
        if retention.before_ms.is_none() && retention.bytes_max.is_none() {
            return;
        }
        for partition in self.partitions() {
            partition.retain(retention);
        }
    }

    fn partitions(&self) -> Vec<Arc<Partition>> {
        self.topics.read().values().flat_map(|partitions| partitions.iter().cloned()).collect()
    }

    /// A producer id that was never assigned before, not even before a restart.
    pub(crate) fn new_producer_id(&self) -> Result<i64, Refused> {
        let mut written = self.written.lock();
        if written.producer_id >= written.meta.next_producer_id {
            let mut next = written.meta.clone();
            next.next_producer_id = written.producer_id.saturating_add(PRODUCER_ID_BLOCK);
            write_meta(&self.dir, &next)
                .map_err(|error| Refused::new(code::KAFKA_STORAGE_ERROR, error_chain::one_line(&error)))?;
            written.meta = next;
        }
        let id = written.producer_id;
        written.producer_id += 1;
        Ok(id)
    }

    /// Flushes every log to the disk and writes its checkpoint.
    ///
    /// # Errors
    /// [`Error::Io`], after all logs were tried.
    pub(crate) fn close(&self) -> Result<()> {
        let mut failed = None;
        for partition in self.partitions() {
            if let Err(error) = partition.close() {
                failed = Some(error);
            }
        }
        failed.map_or(Ok(()), |error| Err(Error::io("flush the logs in", &self.dir)(error)))
    }
}

fn remove_folder(path: &Path) {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!(path = %path.display(), %error, "cannot remove the files of a deleted topic");
        }
        _ => {}
    }
}

/// Kafka's rule for topic names.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    let legal = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if name.is_empty()
        || name.len() > TOPIC_NAME_BYTES_MAX
        || name == "."
        || name == ".."
        || !name.bytes().all(legal)
    {
        return Err(format!(
            "topic names have 1 to {TOPIC_NAME_BYTES_MAX} of the characters a-z A-Z 0-9 . _ -"
        ));
    }
    Ok(())
}

fn new_cluster_id() -> Result<String> {
    let bytes: [u8; 8] = random::bytes().map_err(Error::io("read", random::SOURCE))?;
    Ok(format!("{}{}", super::CLUSTER_ID_PREFIX, hex::encode(bytes)))
}

fn read_meta(dir: &Path) -> Result<Option<Meta>> {
    let path = dir.join("meta.json");
    let text = match fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("read", path)(error)),
    };
    #[derive(Deserialize)]
    struct Version {
        format_version: u32,
    }
    let damaged =
        |error: serde_json::Error| Error::DamagedMeta { path: path.clone(), reason: error.to_string() };
    // The version first: a newer format may have fields that this one refuses.
    let version: Version = serde_json::from_slice(&text).map_err(damaged)?;
    if version.format_version > FORMAT_VERSION {
        return Err(Error::NewerFormat {
            dir: dir.to_path_buf(),
            found: version.format_version,
            supported: FORMAT_VERSION,
        });
    }
    serde_json::from_slice(&text).map(Some).map_err(damaged)
}

/// Replaces `meta.json` atomically; durable when it returns.
fn write_meta(dir: &Path, meta: &Meta) -> Result<()> {
    let (path, temporary) = (dir.join("meta.json"), dir.join("meta.json.new"));
    let text = serde_json::to_vec_pretty(meta).map_err(|error| Error::io("encode", &path)(error.into()))?;
    atomic_file::replace(&path, &temporary, &text).map_err(Error::io("replace", &path))?;
    sync_dir(dir)
}

fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(Error::io("flush", dir))
}
