//! Event files that TensorBoard reads: scalars by step.
//!
//! Source of the format: TensorFlow's `record_writer.cc` (length, its checksum, data, its checksum) and
//! `event.proto`, of which these messages have the fields that scalars need.
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use prost::Message;

use crate::error::{Error, Result};

mod curves;

pub use curves::Curves;

/// The first event of a file names the format.
const FILE_VERSION: &str = "brain.Event:2";
/// `SessionLog.START`: a program starts, and its first step is that of the event.
const SESSION_START: i32 = 1;
/// Added to a rotated checksum, so that a checksum of data with checksums stays useful.
const MASK: u32 = 0xa282_ead8;

#[derive(Clone, PartialEq, Message)]
struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
    #[prost(message, optional, tag = "7")]
    session_log: Option<SessionLog>,
}

#[derive(Clone, PartialEq, Message)]
struct SessionLog {
    /// [`SESSION_START`], the only one that readers use.
    #[prost(int32, optional, tag = "1")]
    status: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    values: Vec<Scalar>,
}

#[derive(Clone, PartialEq, Message)]
struct Scalar {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

/// A file of events of one run of a program. Each event is written when it happens; none is buffered.
#[derive(Debug)]
pub struct EventFile {
    file: File,
    path: PathBuf,
}

impl EventFile {
    /// Creates a file in `directory`, which is created as well. Its name has the time and the process, so
    /// that TensorBoard shows the files of several starts as one curve.
    pub fn create(directory: &Path) -> Result<EventFile> {
        let failed = |e| Error::io(format!("create an event file in {}", directory.display()), e);
        fs::create_dir_all(directory).map_err(failed)?;
        let name = format!("events.out.tfevents.{:.0}.millrace.{}", now(), std::process::id());
        let path = directory.join(name);
        let file = File::options().create(true).append(true).open(&path).map_err(failed)?;
        let mut events = EventFile { file, path };
        events.append(&Event {
            wall_time: now(),
            file_version: Some(FILE_VERSION.to_owned()),
            ..Event::default()
        })?;
        Ok(events)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Tells that a program starts whose first step is `step`: readers drop what an earlier one has written from there
    /// on, as after a crash.
    pub fn start(&mut self, step: u64) -> Result<()> {
        self.append(&Event {
            wall_time: now(),
            step: i64::try_from(step).unwrap_or(i64::MAX),
            session_log: Some(SessionLog { status: Some(SESSION_START) }),
            ..Event::default()
        })
    }

    /// Appends values at a step, by tag. Tags with a common part before `/` are shown together.
    pub fn scalars(&mut self, step: u64, values: &[(&str, f64)]) -> Result<()> {
        let values = values
            .iter()
            .map(|(tag, value)| Scalar { tag: (*tag).to_owned(), simple_value: Some(*value as f32) })
            .collect();
        self.append(&Event {
            wall_time: now(),
            step: i64::try_from(step).unwrap_or(i64::MAX),
            summary: Some(Summary { values }),
            ..Event::default()
        })
    }

    fn append(&mut self, event: &Event) -> Result<()> {
        let record = record(&event.encode_to_vec());
        self.file
            .write_all(&record)
            .map_err(|e| Error::io(format!("write event file {}", self.path.display()), e))
    }
}

/// Seconds since 1970.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// A record of a TensorFlow record file.
fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(data.len() + 16);
    record.extend_from_slice(&length);
    record.extend_from_slice(&masked_crc(&length).to_le_bytes());
    record.extend_from_slice(data);
    record.extend_from_slice(&masked_crc(data).to_le_bytes());
    record
}

fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(MASK)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The events of a file; checks their checksums.
    pub(super) fn read(path: &Path) -> Vec<Event> {
        let bytes = fs::read(path).unwrap();
        let mut rest = &bytes[..];
        let mut read = Vec::new();
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            let data = &rest[12..12 + length];
            assert_eq!(rest[12 + length..16 + length], masked_crc(data).to_le_bytes());
            read.push(Event::decode(data).unwrap());
            rest = &rest[16 + length..];
        }
        read
    }

    #[test]
    fn records_match_those_of_tensorflow() {
        // The first record that TensorFlow's writer makes: version "brain.Event:2" at second 0.
        let event = Event { wall_time: 0.0, file_version: Some(FILE_VERSION.into()), ..Event::default() };
        let data = event.encode_to_vec();
        assert_eq!(data, b"\x1a\x0dbrain.Event:2");
        let record = record(&data);
        assert_eq!(&record[..8], 15u64.to_le_bytes());
        // Checksums by Castagnoli's polynomial of the length and the data, masked.
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(record[8..12], masked_crc(&15u64.to_le_bytes()).to_le_bytes());
        assert_eq!(record[27..], masked_crc(&data).to_le_bytes());
        assert_eq!(record.len(), 8 + 4 + 15 + 4);
    }

    #[test]
    fn scalars_are_appended_to_a_new_directory() {
        let dir = tempfile::tempdir().unwrap();
        let mut events = EventFile::create(&dir.path().join("runs/digits")).unwrap();
        events.scalars(3, &[("train/loss", 0.5), ("train/workers", 2.0)]).unwrap();
        let read = read(events.path());
        assert_eq!(read.len(), 2);
        assert_eq!(read[1].step, 3);
        let values = &read[1].summary.as_ref().unwrap().values;
        assert_eq!((values[0].tag.as_str(), values[0].simple_value), ("train/loss", Some(0.5)));
        assert!(EventFile::create(events.path()).is_err(), "a file is no directory");
    }
}
