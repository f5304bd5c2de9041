//! Checkpoint of a log: sizes and offsets of the segments, and the table of producers. The broker writes it
//! when it stops in order; the next start reads only the batches appended since.

use std::fs;
use std::io;
use std::path::Path;

use millrace_leaf::atomic_file;
use serde::{Deserialize, Serialize};

use super::producers::Producers;

/// The file beside the segments; it is replaced as a whole.
pub(crate) const FILE: &str = "checkpoint.json";
const FILE_NEW: &str = "checkpoint.json.new";
const VERSION: u32 = 1;

/// The content of the file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Checkpoint {
    version: u32,
    /// In offset order.
    pub(crate) segments: Vec<SegmentState>,
    pub(crate) producers: Producers,
}

/// State of one segment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SegmentState {
    pub(crate) base_offset: i64,
    pub(crate) next_offset: i64,
    pub(crate) bytes: u64,
    pub(crate) max_timestamp: i64,
    /// Position and checksum of the last batch, which identify the file.
    pub(crate) last: Option<(u64, u32)>,
}

/// Whether a file of the log's folder belongs to this module.
pub(crate) fn is_checkpoint_file(name: &str) -> bool {
    name == FILE || name == FILE_NEW
}

/// The checkpoint in `dir`; `None` when there is none that this release understands.
pub(crate) fn read(dir: &Path) -> Option<Checkpoint> {
    let text = fs::read(dir.join(FILE)).ok()?;
    let found: Checkpoint = serde_json::from_slice(&text).ok()?;
    (found.version == VERSION).then_some(found)
}

/// Replaces the checkpoint in `dir`. The log itself must be on the disk already.
pub(crate) fn write(dir: &Path, segments: Vec<SegmentState>, producers: &Producers) -> io::Result<()> {
    let checkpoint = Checkpoint { version: VERSION, segments, producers: producers.clone() };
    let text = serde_json::to_vec(&checkpoint)?;
    atomic_file::replace(&dir.join(FILE), &dir.join(FILE_NEW), &text)
}

/// Removes a checkpoint that does not belong to the log, before anything is appended.
pub(crate) fn remove(dir: &Path) -> io::Result<()> {
    match fs::remove_file(dir.join(FILE)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
