//! An open topic: its range, its blocks once they are known, and their bytes.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::{fmt, ops::ControlFlow};

use bytes::Bytes;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};

use super::block::{Block, RecordsDigest};
use super::log::{KafkaLog, Log};
use super::range::TopicRange;
use super::render::render;
use super::resolve::{Resolved, rescan, resolve, verified};
use super::spec::TopicSpec;
use crate::config::KafkaConfig;
use crate::dataset::DatasetCache;
use crate::dataset::folder::FolderCache;
use crate::error::{Error, Result};
use crate::topic::blocking;

/// Bytes of blocks that are kept: a scan reads each block in several parts.
const KEPT_BYTES_MAX: usize = 64 << 20;

/// A bounded range of a topic.
pub(crate) struct OpenTopic {
    spec: TopicSpec,
    range: TopicRange,
    log: Arc<dyn Log>,
    blocks: OnceLock<Arc<Vec<Block>>>,
    kept: Mutex<Kept>,
    cache: Option<Arc<dyn DatasetCache>>,
}

/// Blocks that were read last.
#[derive(Default)]
struct Kept {
    blocks: VecDeque<(Block, Bytes)>,
    bytes: usize,
}

impl OpenTopic {
    /// Opens a topic of brokers. Bounds that are not resolved yet are resolved now, which reads the records between them.
    pub(crate) async fn open(spec: &TopicSpec, kafka: &KafkaConfig, home: &Path) -> Result<Self> {
        let log = Arc::new(KafkaLog::new(kafka.clone(), spec.topic.clone()));
        let cache = FolderCache::new(home, format!("topic/{}", spec.topic));
        Self::open_log(spec, log, Some(Arc::new(cache))).await
    }

    pub(super) async fn open_log(
        spec: &TopicSpec,
        log: Arc<dyn Log>,
        cache: Option<Arc<dyn DatasetCache>>,
    ) -> Result<Self> {
        if let Some(range) = spec.range.clone() {
            let (spec, blocks, kept) = (spec.clone(), OnceLock::new(), Mutex::default());
            return Ok(Self { spec, range, log, blocks, kept, cache });
        }
        let Resolved { range, blocks } = resolve(&log, spec).await?;
        if blocks.iter().all(|block| block.rows == 0) {
            let skipped = blocks.iter().map(|block| u64::from(block.skipped)).sum();
            return Err(Error::NoRecords { topic: spec.topic.clone(), bounds: spec.to_string(), skipped });
        }
        let spec = TopicSpec { range: Some(range.clone()), ..spec.clone() };
        let open = Self { spec, range, log, blocks: OnceLock::new(), kept: Mutex::default(), cache };
        open.remember(&blocks);
        open.report(&blocks);
        open.blocks.get_or_init(|| Arc::new(blocks));
        Ok(open)
    }

    /// The specification, with its range.
    pub(crate) fn spec(&self) -> &TopicSpec {
        &self.spec
    }

    /// The source of plans: the topic with a digest of the range.
    pub(crate) fn identity(&self) -> String {
        let digest = Sha256::digest(self.range.to_string());
        format!("topic:{}#{}", self.spec.topic, hex::encode(&digest[..16]))
    }

    pub(crate) fn cache(&self) -> Option<&Arc<dyn DatasetCache>> {
        self.cache.as_ref()
    }

    /// Finds the blocks of the range: those that were kept in the home, or with a scan of the range.
    pub(crate) async fn prepare(&self) -> Result<()> {
        self.find_blocks().await.map(drop)
    }

    async fn find_blocks(&self) -> Result<Arc<Vec<Block>>> {
        if let Some(blocks) = self.blocks.get() {
            return Ok(Arc::clone(blocks));
        }
        let blocks = match self.recall() {
            Some(blocks) => blocks,
            None => {
                let blocks = rescan(&self.log, &self.spec, &self.range).await?;
                self.remember(&blocks);
                blocks
            }
        };
        self.report(&blocks);
        Ok(Arc::clone(self.blocks.get_or_init(|| Arc::new(blocks))))
    }

    /// The blocks, once they were found.
    pub(super) fn blocks(&self) -> Option<Arc<Vec<Block>>> {
        self.blocks.get().cloned()
    }

    fn report(&self, blocks: &[Block]) {
        let skipped: u64 = blocks.iter().map(|block| u64::from(block.skipped)).sum();
        if skipped > 0 {
            tracing::warn!(
                topic = self.spec.topic,
                skipped,
                "records of the range that are no rows are left out (bad=skip)"
            );
        }
    }

    fn key(&self) -> String {
        format!("blocks 1 of {}", self.spec)
    }

    fn recall(&self) -> Option<Vec<Block>> {
        let bytes = self.cache.as_ref()?.get(&self.key()).ok()??;
        verified(&self.range, serde_json::from_slice(&bytes).ok()?)
    }

    fn remember(&self, blocks: &[Block]) {
        if let (Some(cache), Ok(bytes)) = (&self.cache, serde_json::to_vec(blocks))
            && let Err(error) = cache.put(&self.key(), &bytes)
        {
            tracing::debug!(topic = self.spec.topic, error, "cannot keep the blocks of a topic in the home");
        }
    }

    /// The rows of a block as JSON lines.
    ///
    /// # Errors
    /// [`Error::RecordsChanged`] when the records are not those of the block; those of the brokers.
    pub(super) async fn read(self: &Arc<Self>, block: Block) -> Result<Bytes> {
        let found =
            self.kept.lock().blocks.iter().find(|(kept, _)| *kept == block).map(|(_, bytes)| bytes.clone());
        if let Some(bytes) = found {
            return Ok(bytes);
        }
        let open = Arc::clone(self);
        blocking(move || {
            let bytes = open.fetch(&block)?;
            open.kept.lock().add(block, bytes.clone());
            Ok(bytes)
        })
        .await
    }

    fn fetch(&self, block: &Block) -> Result<Bytes> {
        let changed = || Error::RecordsChanged {
            topic: self.spec.topic.clone(),
            partition: block.partition,
            first: block.first,
            next: block.next,
        };
        let mut lines = Vec::with_capacity(usize::try_from(block.bytes).unwrap_or(0).min(KEPT_BYTES_MAX));
        let mut digest = RecordsDigest::default();
        let (mut rows, mut skipped) = (0u32, 0u32);
        self.log.read(block.partition, block.first..block.next, &AtomicBool::new(false), &mut |record| {
            digest.add(&record);
            // All records of a block without others were rows when it was cut, and the digest says that they are the same.
            match render(&mut lines, block.partition, &record, block.skipped > 0) {
                Ok(()) => rows += 1,
                Err(_) => skipped += 1,
            }
            let is_more = lines.len() as u64 > block.bytes || rows > block.rows || skipped > block.skipped;
            if is_more { Err(changed()) } else { Ok(ControlFlow::Continue(())) }
        })?;
        let is_same = lines.len() as u64 == block.bytes
            && (rows, skipped) == (block.rows, block.skipped)
            && digest.finish() == block.digest;
        if is_same { Ok(lines.into()) } else { Err(changed()) }
    }
}

impl Kept {
    fn add(&mut self, block: Block, bytes: Bytes) {
        self.bytes += bytes.len();
        self.blocks.push_back((block, bytes));
        while self.bytes > KEPT_BYTES_MAX
            && let Some((_, oldest)) = self.blocks.pop_front()
        {
            self.bytes -= oldest.len();
        }
    }
}

impl fmt::Debug for OpenTopic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenTopic").field("spec", &self.spec.to_string()).finish_non_exhaustive()
    }
}
