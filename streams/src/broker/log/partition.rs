//! One partition as its clients see it: appends that become visible and durable in order, reads
//! that may wait for more.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use super::batch::{self, Malformed};
use super::segments::{Appended, Damage, Retention, Segments};
use crate::broker::code;
use crate::broker::config::Flush;
use crate::metrics;

/// A protocol error with its reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refused {
    pub(crate) code: i16,
    pub(crate) reason: String,
}

impl Refused {
    pub(crate) fn new(code: i16, reason: impl Into<String>) -> Self {
        Self { code, reason: reason.into() }
    }
}

/// A partition. `visible` is the high watermark: consumers read records below it.
///
/// A value belongs to one creation of its topic. A topic that is deleted and created again uses the same
/// folder, so no call may touch a file after [`Partition::delete`]. All file access therefore goes through
/// [`Partition::log`], which checks for deletion under the lock.
#[derive(Debug)]
pub(crate) struct Partition {
    topic: String,
    index: i32,
    flush: Flush,
    batch_bytes_max: usize,
    log: Mutex<Segments>,
    damage: Option<Damage>,
    visible: watch::Sender<i64>,
    durable: AtomicI64,
    /// Held by the task that flushes the log; tasks that wait for it are covered by its flush or the next.
    flushing: tokio::sync::Mutex<()>,
    /// Held from a flush to its outcome. The kernel reports a failed write to one flush of a file only; a second flush at
    /// the same time would succeed.
    syncing: Mutex<()>,
    deleted: AtomicBool,
    storage_failed: AtomicBool,
}

impl Partition {
    /// Opens the partition in `dir`. A damaged one is logged and serves the records before the damage.
    pub(crate) fn open(topic: &str, index: i32, dir: &Path, config: &crate::broker::Config) -> Self {
        let log = Segments::open(dir, config.segment_bytes_max, config.flush == Flush::Always);
        let end = log.end_offset();
        let damage = log.damage().cloned();
        if let Some(damage) = &damage {
            tracing::error!(
                topic,
                partition = index,
                offset = damage.offset,
                error = damage.reason,
                "a partition is damaged: it is read up to this offset and takes no records; the others serve"
            );
        }
        Self {
            topic: topic.to_string(),
            index,
            flush: config.flush,
            batch_bytes_max: config.message_bytes_max,
            log: Mutex::new(log),
            damage,
            visible: watch::Sender::new(end),
            durable: AtomicI64::new(end),
            flushing: tokio::sync::Mutex::new(()),
            syncing: Mutex::new(()),
            deleted: AtomicBool::new(false),
            storage_failed: AtomicBool::new(false),
        }
    }

    /// Appends a producer's batch; returns its first offset, also for a duplicate. Answer the producer only
    /// after [`Partition::wait_durable`].
    pub(crate) fn append(&self, records: &[u8]) -> Result<i64, Refused> {
        if records.len() > self.batch_bytes_max {
            return Err(Refused::new(
                code::MESSAGE_TOO_LARGE,
                format!(
                    "the batch has {} bytes, streams.broker.message_bytes_max is {}",
                    records.len(),
                    self.batch_bytes_max
                ),
            ));
        }
        let header = batch::check_produced(records).map_err(|malformed| {
            let code = match malformed {
                Malformed::Crc | Malformed::Short | Malformed::Header | Malformed::Compressed => {
                    code::CORRUPT_MESSAGE
                }
                Malformed::Codec(_) => code::UNSUPPORTED_COMPRESSION_TYPE,
                Malformed::Large => code::MESSAGE_TOO_LARGE,
                Malformed::Magic(_) => code::UNSUPPORTED_FOR_MESSAGE_FORMAT,
                Malformed::Records | Malformed::Several | Malformed::Control => code::INVALID_RECORD,
            };
            Refused::new(code, malformed.to_string())
        })?;
        if let Some(damage) = &self.damage {
            return Err(Refused::new(code::UNKNOWN_SERVER_ERROR, &damage.reason));
        }
        let mut log = self.log()?;
        let appended = log.append(records, &header).map_err(|error| self.storage_failed(&error))?;
        self.storage_failed.store(false, Ordering::Relaxed);
        match appended {
            Appended::New { base_offset } => {
                metrics::BROKER_APPENDED_RECORDS.inc_by(header.count as u64);
                metrics::BROKER_APPENDED_BYTES.inc_by(header.bytes as u64);
                if self.flush == Flush::Os {
                    // Under the lock, so that the watermark never goes back.
                    self.visible.send_replace(log.end_offset());
                }
                Ok(base_offset)
            }
            Appended::Duplicate { base_offset } => Ok(base_offset),
            Appended::Refused(code, reason) => Err(Refused::new(code, reason)),
        }
    }

    /// Waits until everything appended before the call is as durable as the configuration
    /// promises. Callers that wait at the same time share one flush.
    ///
    /// Cancel safe.
    pub(crate) async fn wait_durable(&self) -> Result<(), Refused> {
        if self.flush == Flush::Os {
            return Ok(());
        }
        let end = self.log()?.end_offset();
        let _turn = self.flushing.lock().await;
        if self.durable.load(Ordering::Acquire) >= end {
            return Ok(());
        }
        let synced = tokio::task::block_in_place(|| self.sync());
        synced.map_err(|error| self.storage_failed(&error))?;
        Ok(())
    }

    /// Flushes the log to the disk; does nothing for a damaged partition or a deleted topic.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.sync_with(File::sync_data)
    }

    fn sync_with(&self, flush: impl FnOnce(&File) -> io::Result<()>) -> io::Result<()> {
        if self.damage.is_some() {
            return Ok(());
        }
        let _turn = self.syncing.lock();
        let Ok(mut log) = self.log() else { return Ok(()) };
        let (file, end) = log.sync_target()?;
        // Appends go on during the flush.
        drop(log);
        let flushed = file.map_or(Ok(()), |file| flush(&file));
        let mut log = self.log.lock();
        if let Err(error) = flushed {
            log.refuse_writes();
            return Err(error);
        }
        // A new segment may have begun meanwhile. Its flush of the same file then got the error, and this one did not.
        log.check_writes()?;
        drop(log);
        self.durable.fetch_max(end, Ordering::AcqRel);
        if self.flush == Flush::Always {
            self.visible.send_if_modified(|visible| {
                let moved = *visible < end;
                *visible = (*visible).max(end);
                moved
            });
        }
        Ok(())
    }

    /// Flushes the log to the disk and writes a checkpoint for a fast start.
    pub(crate) fn close(&self) -> io::Result<()> {
        self.sync()?;
        let Ok(mut log) = self.log() else { return Ok(()) };
        if let Err(error) = log.checkpoint() {
            tracing::warn!(
                topic = self.topic, partition = self.index, error = %error,
                "cannot write a checkpoint of a log: the next start reads all of it"
            );
        }
        Ok(())
    }

    /// Removes records beyond `retention`, except in a damaged partition or a deleted topic.
    pub(crate) fn retain(&self, retention: Retention) {
        if self.damage.is_some() {
            return;
        }
        let Ok(mut log) = self.log() else { return };
        let settled = self.high_watermark() == log.end_offset();
        match log.retain(retention, settled) {
            Ok(0) => {}
            Ok(segments) => tracing::info!(
                topic = self.topic,
                partition = self.index,
                segments,
                offset = log.start_offset(),
                "removed records beyond the retention"
            ),
            Err(error) => tracing::error!(
                topic = self.topic, partition = self.index, error = %error,
                "cannot remove records beyond the retention"
            ),
        }
    }

    /// Offset after the last record that consumers may see.
    pub(crate) fn high_watermark(&self) -> i64 {
        *self.visible.borrow()
    }

    /// First offset in the log.
    pub(crate) fn start_offset(&self) -> i64 {
        self.log.lock().start_offset()
    }

    /// A receiver that is woken by every move of the watermark and by deletion.
    pub(crate) fn watch(&self) -> watch::Receiver<i64> {
        self.visible.subscribe()
    }

    /// Approximate bytes that a read from `offset` could return; the count may end at `enough`.
    pub(crate) fn bytes_from(&self, offset: i64, enough: u64) -> Result<u64, Refused> {
        let high = self.check(offset)?;
        if offset == high {
            return Ok(0);
        }
        Ok(self.log()?.bytes_from(offset, enough))
    }

    /// Whole batches from the one that holds `offset` on.
    pub(crate) fn read(&self, offset: i64, bytes_max: usize, at_least_one: bool) -> Result<Vec<u8>, Refused> {
        let high = self.check(offset)?;
        if offset == high {
            return Ok(Vec::new());
        }
        let place = self.log()?.read_position(offset).map_err(|error| self.storage_failed(&error))?;
        place.read(offset, high, bytes_max, at_least_one).map_err(|error| self.storage_failed(&error))
    }

    /// Bytes of the batch that holds `offset`; 0 at the end of the log.
    pub(crate) fn batch_bytes(&self, offset: i64) -> Result<usize, Refused> {
        if offset == self.check(offset)? {
            return Ok(0);
        }
        let place = self.log()?.read_position(offset).map_err(|error| self.storage_failed(&error))?;
        place.batch_bytes(offset).map_err(|error| self.storage_failed(&error))
    }

    /// Offset and timestamp of the first visible record at or after `timestamp`.
    pub(crate) fn by_time(&self, timestamp: i64) -> Result<Option<(i64, i64)>, Refused> {
        let high = self.high_watermark();
        let found = self.log()?.by_time(timestamp).map_err(|error| self.storage_failed(&error))?;
        match (&found, &self.damage) {
            (None, Some(damage)) => Err(Refused::new(code::CORRUPT_MESSAGE, &damage.reason)),
            _ => Ok(found.filter(|(offset, _)| *offset < high)),
        }
    }

    /// Refuses every further call, wakes waiting readers and closes the files, so that removing them frees
    /// their space. After it returns, no call touches a file in the partition's folder.
    pub(crate) fn delete(&self) {
        self.deleted.store(true, Ordering::Release);
        // Taking the lock waits for a call that checked before.
        self.log.lock().close();
        self.visible.send_modify(|_| {});
    }

    /// The log, unless its topic was deleted: the files may then belong to a new topic of that name.
    fn log(&self) -> Result<MutexGuard<'_, Segments>, Refused> {
        let log = self.log.lock();
        if self.deleted.load(Ordering::Acquire) {
            return Err(self.topic_deleted());
        }
        Ok(log)
    }

    fn check(&self, offset: i64) -> Result<i64, Refused> {
        if self.deleted.load(Ordering::Acquire) {
            return Err(self.topic_deleted());
        }
        let (low, high) = (self.start_offset(), self.high_watermark());
        if !(low..=high).contains(&offset) {
            return Err(Refused::new(
                code::OFFSET_OUT_OF_RANGE,
                format!("offset {offset} is outside of {low}..={high}"),
            ));
        }
        match &self.damage {
            Some(damage) if offset >= damage.offset => {
                Err(Refused::new(code::CORRUPT_MESSAGE, &damage.reason))
            }
            _ => Ok(high),
        }
    }

    fn topic_deleted(&self) -> Refused {
        Refused::new(code::UNKNOWN_TOPIC_OR_PARTITION, format!("topic {} was deleted", self.topic))
    }

    /// The protocol error for a failure of the file system. Clients retry KAFKA_STORAGE_ERROR until their
    /// time-out, so only failures that can pass get it: a full disk, too few descriptors.
    fn storage_failed(&self, error: &io::Error) -> Refused {
        let code = match (error.kind(), error.raw_os_error()) {
            (io::ErrorKind::InvalidData, _) => code::CORRUPT_MESSAGE,
            (io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded, _)
            | (_, Some(nix::libc::EMFILE | nix::libc::ENFILE)) => code::KAFKA_STORAGE_ERROR,
            _ => code::UNKNOWN_SERVER_ERROR,
        };
        // One line when it begins, not one for each retry of each client.
        if !self.storage_failed.swap(true, Ordering::Relaxed) {
            tracing::error!(
                topic = self.topic, partition = self.index, error = %error,
                "the broker cannot use the log of a partition"
            );
        }
        Refused::new(code, format!("the broker's disk: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::broker::log::tests::batch;

    #[test]
    fn a_flush_that_fails_elsewhere_makes_no_record_durable() {
        let dir = TempDir::new().unwrap();
        let config = crate::broker::Config { flush: Flush::Always, ..crate::broker::Config::default() };
        let partition = Partition::open("t", 0, dir.path(), &config);
        partition.append(&batch((-1, -1, -1), 0, &[b"v"])).unwrap();
        let synced = partition.sync_with(|_| {
            // The segment ends during the flush, and its last flush gets the error of the disk.
            partition.log.lock().refuse_writes();
            Ok(())
        });
        assert!(synced.is_err());
        assert_eq!((partition.durable.load(Ordering::Acquire), partition.high_watermark()), (0, 0));
        assert!(partition.sync().is_err(), "only a restart repairs it");
        assert!(partition.append(&batch((-1, -1, -1), 0, &[b"v"])).is_err());
    }

    #[test]
    fn a_segment_that_begins_during_a_flush_does_not_fail_it() {
        let dir = TempDir::new().unwrap();
        let config = crate::broker::Config {
            flush: Flush::Always,
            segment_bytes_max: 1,
            ..crate::broker::Config::default()
        };
        let partition = Partition::open("t", 0, dir.path(), &config);
        partition.append(&batch((-1, -1, -1), 0, &[b"v"])).unwrap();
        let synced = partition.sync_with(|file| {
            partition.append(&batch((-1, -1, -1), 0, &[b"w"])).unwrap();
            file.sync_data()
        });
        synced.unwrap();
        assert_eq!(partition.high_watermark(), 1, "the second record was not flushed");
        partition.sync().unwrap();
        assert_eq!(partition.high_watermark(), 2);
    }
}
