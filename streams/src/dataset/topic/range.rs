//! A range of a topic in offsets, with a digest of its records: 32 bytes for each partition.

use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

/// Most partitions of a topic that is read as a dataset.
pub(crate) const PARTITIONS_MAX: usize = 10_000;
/// Bytes of a partition in [`TopicRange::to_bytes`].
const PARTITION_BYTES: usize = 32;

/// The records of one partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PartitionRange {
    /// The first offset.
    pub first: i64,
    /// The offset after the last one; equal to `first` where the range has no records.
    pub next: i64,
    /// The first 16 bytes of a SHA-256 of the records with their offsets and timestamps.
    pub digest: [u8; 16],
}

/// The records of all partitions of a topic, from partition 0 on.
///
/// Its text is `PARTITION:FIRST-NEXT:DIGEST` of each partition, separated by commas.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TopicRange {
    partitions: Vec<PartitionRange>,
}

impl TopicRange {
    /// None for no partition, too many of them, or offsets that are none.
    pub(crate) fn new(partitions: Vec<PartitionRange>) -> Option<Self> {
        let is_range = |range: &PartitionRange| 0 <= range.first && range.first <= range.next;
        let is_usable = (1..=PARTITIONS_MAX).contains(&partitions.len()) && partitions.iter().all(is_range);
        is_usable.then_some(Self { partitions })
    }

    /// The range of a topic without partitions, which no broker has.
    pub(crate) fn none() -> Self {
        Self { partitions: Vec::new() }
    }

    /// The ranges by partition, from 0.
    pub fn partitions(&self) -> &[PartitionRange] {
        &self.partitions
    }

    /// 32 bytes for each partition: first and next offset, little endian, and the digest.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.partitions.len() * PARTITION_BYTES);
        for PartitionRange { first, next, digest } in &self.partitions {
            bytes.extend(first.to_le_bytes());
            bytes.extend(next.to_le_bytes());
            bytes.extend(digest);
        }
        bytes
    }

    /// The range of [`TopicRange::to_bytes`]; none for other bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (chunks, rest) = bytes.as_chunks::<PARTITION_BYTES>();
        if !rest.is_empty() || chunks.len() > PARTITIONS_MAX {
            return None;
        }
        let partition = |chunk: &[u8; PARTITION_BYTES]| {
            let (first, rest) = chunk.split_first_chunk::<8>()?;
            let (next, digest) = rest.split_first_chunk::<8>()?;
            Some(PartitionRange {
                first: i64::from_le_bytes(*first),
                next: i64::from_le_bytes(*next),
                digest: digest.try_into().ok()?,
            })
        };
        Self::new(chunks.iter().map(partition).collect::<Option<_>>()?)
    }

    /// [`TopicRange::to_bytes`] as base64 for web addresses, without padding.
    pub fn to_base64(&self) -> String {
        URL_SAFE_NO_PAD.encode(self.to_bytes())
    }

    /// The range of [`TopicRange::to_base64`]; none for other texts.
    pub fn from_base64(text: &str) -> Option<Self> {
        // A third more than the most bytes.
        if text.len() > PARTITIONS_MAX * PARTITION_BYTES * 2 {
            return None;
        }
        Self::from_bytes(&URL_SAFE_NO_PAD.decode(text).ok()?)
    }
}

impl fmt::Display for TopicRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, PartitionRange { first, next, digest }) in self.partitions.iter().enumerate() {
            let comma = if number > 0 { "," } else { "" };
            write!(f, "{comma}{number}:{first}-{next}:{}", hex::encode(digest))?;
        }
        Ok(())
    }
}

impl FromStr for TopicRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut partitions = Vec::new();
        for (number, part) in text.split(',').enumerate() {
            if number >= PARTITIONS_MAX {
                return Err(format!("offsets of more than {PARTITIONS_MAX} partitions"));
            }
            let partition = partition(part, number).ok_or_else(|| {
                format!(
                    "offsets {part:?} where PARTITION:FIRST-NEXT:DIGEST of partition {number} is expected"
                )
            })?;
            partitions.push(partition);
        }
        Self::new(partitions).ok_or_else(|| "offsets that are negative or end before they begin".to_owned())
    }
}

fn partition(text: &str, number: usize) -> Option<PartitionRange> {
    let mut parts = text.split(':');
    let (of, offsets, hexed) = (parts.next()?, parts.next()?, parts.next()?);
    let (first, next) = offsets.split_once('-')?;
    let mut digest = [0; 16];
    hex::decode_to_slice(hexed, &mut digest).ok()?;
    let range = PartitionRange { first: first.parse().ok()?, next: next.parse().ok()?, digest };
    (parts.next().is_none() && of.parse::<usize>().ok()? == number).then_some(range)
}
