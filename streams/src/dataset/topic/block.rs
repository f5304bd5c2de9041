//! Blocks: runs of records of one partition, of bounded size. Each is a file of the dataset, and a row group.

use std::ops::ControlFlow;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::range::PartitionRange;
use super::render::render;
use super::spec::BadRecords;
use crate::error::{Error, Result};
use crate::topic::Record;

/// Bounds of a block: those of a row group of text files, so that the source does not cut it again.
const ROWS_MAX: u32 = 16_384;
const BYTES_MAX: u64 = 2 << 20;
/// Most records of a block, rows and others.
const RECORDS_MAX: u32 = 65_536;
/// Suffix of the files that blocks are.
const SUFFIX: &str = ".jsonl";

/// A run of records, with what a reader must find there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Block {
    pub(super) partition: i32,
    /// Offset of its first record.
    pub(super) first: i64,
    /// The offset after its last record.
    pub(super) next: i64,
    pub(super) rows: u32,
    /// Records that are no rows.
    pub(super) skipped: u32,
    /// Bytes of the rows as JSON lines.
    pub(super) bytes: u64,
    /// Digest of the records.
    #[serde(with = "hexed")]
    pub(super) digest: [u8; 16],
}

mod hexed {
    use serde::{Deserialize as _, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(bytes: &[u8; 16], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&hex::encode(bytes))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<[u8; 16], D::Error> {
        let text = String::deserialize(deserializer)?;
        let mut bytes = [0; 16];
        hex::decode_to_slice(text, &mut bytes).map_err(serde::de::Error::custom)?;
        Ok(bytes)
    }
}

impl Block {
    /// Its path in the dataset of a topic. Paths sort by partition and offset.
    pub(super) fn path(&self, topic: &str) -> String {
        let Block { partition, first, next, rows, skipped, bytes, digest } = self;
        let digest = hex::encode(digest);
        format!("{topic}/{partition:05}/{first:020}-{next:020}-{rows}-{skipped}-{bytes}-{digest}{SUFFIX}")
    }

    /// The block at a path in the dataset of a topic.
    pub(super) fn of_path(topic: &str, path: &str) -> Option<Block> {
        let rest = path.strip_prefix(topic)?.strip_prefix('/')?.strip_suffix(SUFFIX)?;
        let (partition, rest) = rest.split_once('/')?;
        let parts: Vec<&str> = rest.split('-').collect();
        let [first, next, rows, skipped, bytes, hexed] = parts[..] else { return None };
        let mut digest = [0; 16];
        hex::decode_to_slice(hexed, &mut digest).ok()?;
        let block = Block {
            partition: partition.parse().ok()?,
            first: first.parse().ok()?,
            next: next.parse().ok()?,
            rows: rows.parse().ok()?,
            skipped: skipped.parse().ok()?,
            bytes: bytes.parse().ok()?,
            digest,
        };
        (0 <= block.first && block.first < block.next && block.path(topic) == path).then_some(block)
    }
}

/// The range of a partition with the digest of its blocks.
pub(super) fn partition_range(first: i64, next: i64, blocks: &[Block]) -> PartitionRange {
    let mut hash = Sha256::new();
    hash.update(b"millrace topic range 1");
    for block in blocks {
        hash.update(block.first.to_le_bytes());
        hash.update(block.next.to_le_bytes());
        hash.update(block.rows.to_le_bytes());
        hash.update(block.skipped.to_le_bytes());
        hash.update(block.bytes.to_le_bytes());
        hash.update(block.digest);
    }
    PartitionRange { first, next, digest: short(hash) }
}

/// Digest of records in their order.
#[derive(Default, Clone)]
pub(super) struct RecordsDigest(Sha256);

impl RecordsDigest {
    pub(super) fn add(&mut self, record: &Record<'_>) {
        self.0.update(record.offset.to_le_bytes());
        self.0.update(record.timestamp_ms.unwrap_or(i64::MIN).to_le_bytes());
        // No value is as long as `u64::MAX`, which stands for none.
        self.0.update(record.value.map_or(u64::MAX, |value| value.len() as u64).to_le_bytes());
        self.0.update(record.value.unwrap_or_default());
    }

    pub(super) fn finish(self) -> [u8; 16] {
        short(self.0)
    }
}

fn short(hash: Sha256) -> [u8; 16] {
    let digest: [u8; 32] = hash.finalize().into();
    *digest.first_chunk().unwrap_or(&[0; 16])
}

/// Cuts the records of a partition into blocks.
pub(super) struct Cutter<'s> {
    topic: &'s str,
    partition: i32,
    bad: BadRecords,
    rows_left: u64,
    blocks: Vec<Block>,
    open: Option<(Block, RecordsDigest)>,
    row: Vec<u8>,
}

impl<'s> Cutter<'s> {
    /// Takes at most `rows_max` rows.
    pub(super) fn new(topic: &'s str, partition: i32, bad: BadRecords, rows_max: u64) -> Self {
        Self { topic, partition, bad, rows_left: rows_max, blocks: Vec::new(), open: None, row: Vec::new() }
    }

    /// Adds the next record; breaks after the last row.
    ///
    /// # Errors
    /// [`Error::BadRecord`], unless bad records are skipped.
    pub(super) fn add(&mut self, record: &Record<'_>) -> Result<ControlFlow<()>> {
        self.row.clear();
        let is_row = match render(&mut self.row, self.partition, record, true) {
            Ok(()) => true,
            Err(_) if self.bad == BadRecords::Skip => false,
            Err(reason) => {
                return Err(Error::BadRecord {
                    topic: self.topic.to_owned(),
                    partition: self.partition,
                    offset: record.offset,
                    reason,
                });
            }
        };
        let bytes = self.row.len() as u64;
        let is_full = self.open.as_ref().is_some_and(|(open, _)| {
            open.rows >= ROWS_MAX
                || open.rows + open.skipped >= RECORDS_MAX
                || (open.rows > 0 && open.bytes + bytes > BYTES_MAX)
        });
        if is_full {
            self.close();
        }
        let partition = self.partition;
        let (open, digest) = self.open.get_or_insert_with(|| {
            let (first, digest) = (record.offset, [0; 16]);
            let block = Block { partition, first, next: first, rows: 0, skipped: 0, bytes: 0, digest };
            (block, RecordsDigest::default())
        });
        open.next = record.offset.saturating_add(1);
        open.bytes += bytes;
        digest.add(record);
        match is_row {
            true => {
                open.rows += 1;
                self.rows_left = self.rows_left.saturating_sub(1);
            }
            false => open.skipped += 1,
        }
        Ok(if self.rows_left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }

    fn close(&mut self) {
        if let Some((block, digest)) = self.open.take() {
            self.blocks.push(Block { digest: digest.finish(), ..block });
        }
    }

    pub(super) fn finish(mut self) -> Vec<Block> {
        self.close();
        self.blocks
    }
}
