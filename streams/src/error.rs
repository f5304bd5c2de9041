//! Errors of topics and of the embedded broker: one variant for each distinct reaction of the caller.

use std::net::SocketAddr;
use std::path::PathBuf;

use rdkafka::error::KafkaError;
use rdkafka::types::RDKafkaErrorCode as Code;

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of topics and of the embedded broker.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No broker answered in time: start one, or correct the address, and try again.
    #[error(
        "no Kafka broker answered at {bootstrap_servers} within {waited_ms} ms ({reason}); \
         start it (millrace broker, millrace up) or correct streams.bootstrap_servers"
    )]
    Unreachable {
        /// The servers that were tried.
        bootstrap_servers: String,
        /// Time waited, in milliseconds.
        waited_ms: u64,
        /// The last connection error, in librdkafka's words.
        reason: String,
    },
    /// The configuration says `"embedded"`, but no broker process holds the home.
    #[error(
        "no broker runs in {}; start it with millrace up or millrace broker, \
         or name a cluster in streams.bootstrap_servers", dir.display()
    )]
    NotRunning {
        /// The broker's directory.
        dir: PathBuf,
    },
    /// The SRV records that name the brokers cannot be looked up: check the name and the name servers.
    #[error("cannot find the brokers of streams.bootstrap_servers")]
    Discovery {
        /// The lookup and its failure.
        #[source]
        source: millrace_leaf::discovery::Error,
    },
    /// The topic does not exist: create it.
    #[error(
        "topic {topic} does not exist at {bootstrap_servers} (declare it under [[streams.topics]] or produce to it first)"
    )]
    UnknownTopic {
        /// Topic name.
        topic: String,
        /// The brokers that were asked.
        bootstrap_servers: String,
    },
    /// The partition does not exist.
    #[error("topic {topic} has {partitions} partitions, so there is no partition {partition}")]
    UnknownPartition {
        /// Topic name.
        topic: String,
        /// The partition asked for.
        partition: i32,
        /// Number of partitions that the topic has.
        partitions: i32,
    },
    /// The offset, or the end that the log had when reading began, is not in the log: records were deleted or lost.
    #[error(
        "topic {topic} partition {partition}: offset {requested} is outside of {low}..={high}; \
         records were deleted or lost, or the topic was created again \
         (run again, or start from the earliest offset)"
    )]
    OffsetOutOfRange {
        /// Topic name.
        topic: String,
        /// Partition.
        partition: i32,
        /// The offset that the reader needs.
        requested: i64,
        /// First offset in the log.
        low: i64,
        /// Offset of the next record to be written.
        high: i64,
    },
    /// Records of a bounded range are not in the log any more: start a new run.
    #[error(
        "topic {topic} partition {partition}: the records from offset {first} up to before {next} are needed, and the log has \
         those from {low} up to before {high}; retention removed the others, the brokers lost them, or the topic was \
         deleted and created again: begin a new run (millrace train --abandon-run, or a feed without its offsets), or land topics and feed snapshots"
    )]
    RecordsRemoved {
        /// Topic name.
        topic: String,
        /// Partition.
        partition: i32,
        /// First offset of the range, or of the part of it that is read.
        first: i64,
        /// The offset after it.
        next: i64,
        /// First offset in the log.
        low: i64,
        /// The offset after the last record that can be read.
        high: i64,
    },
    /// The records of a bounded range are not those that were there before: start a new run.
    #[error(
        "topic {topic} partition {partition}: the records from offset {first} up to before {next} are not those of the plan; the topic \
         was deleted and created again, or compacted since: begin a new run (millrace train --abandon-run, or a feed without \
         its offsets), or land topics and feed snapshots"
    )]
    RecordsChanged {
        /// Topic name.
        topic: String,
        /// Partition.
        partition: i32,
        /// First offset of the range, or of the part of it that differs.
        first: i64,
        /// The offset after it.
        next: i64,
    },
    /// A record that is to be a row is no JSON object.
    #[error(
        "topic {topic} partition {partition} offset {offset}: {reason}, so the record is no row; leave such records out \
         with topic:{topic}@UNTIL?bad=skip, or land the topic with millrace ingest, which keeps them aside"
    )]
    BadRecord {
        /// Topic name.
        topic: String,
        /// Partition.
        partition: i32,
        /// Offset of the record.
        offset: i64,
        /// What is wrong with it.
        reason: String,
    },
    /// A topic does not have as many records yet as a range needs.
    #[error(
        "topic {topic} has {found} records that are rows, fewer than the {wanted} that were asked for; try again when \
         they have arrived, or ask for fewer"
    )]
    TooFewRecords {
        /// Topic name.
        topic: String,
        /// The rows that were asked for.
        wanted: u64,
        /// The rows that there are.
        found: u64,
    },
    /// A range has no record that is a row.
    #[error(
        "{bounds} has no record that is a row ({skipped} others were left out); produce to topic {topic}, or name other \
         bounds"
    )]
    NoRecords {
        /// Topic name.
        topic: String,
        /// The specification of the range.
        bounds: String,
        /// Records in it that are no rows.
        skipped: u64,
    },
    /// A range ends in the future, when records can still arrive.
    #[error(
        "topic {topic} cannot be read until {until}: records can arrive until then; try again after that time, or name an \
         earlier one"
    )]
    OpenRange {
        /// Topic name.
        topic: String,
        /// The end that was asked for.
        until: String,
    },
    /// Records before the end are in a transaction that may still commit them.
    #[error(
        "topic {topic} cannot be read until {until}: partition {partition} has a transaction that was still open after \
         {waited_s} s, from offset {offset} of {since}; try again later, name a time that is not after {since}, or read \
         topic:{topic}@latest, which ends there"
    )]
    OpenTransaction {
        /// Topic name.
        topic: String,
        /// The partition.
        partition: i32,
        /// The last stable offset: that of the first record of the transaction.
        offset: i64,
        /// The time of that record.
        since: String,
        /// The end that was asked for.
        until: String,
        /// Time waited for the end of the transaction, in seconds.
        waited_s: u64,
    },
    /// The brokers do not offer consumer groups: assign partitions explicitly.
    #[error(
        "the embedded broker at {bootstrap_servers} has no consumer groups; assign partitions instead of subscribing"
    )]
    GroupsUnsupported {
        /// The brokers.
        bootstrap_servers: String,
    },
    /// A record was not acknowledged. After a time-out it may or may not be in the log.
    #[error("a record for topic {topic} was not acknowledged: {reason}")]
    NotDelivered {
        /// Topic name.
        topic: String,
        /// librdkafka's message.
        reason: String,
        /// Whether a new attempt can succeed.
        retryable: bool,
    },
    /// The brokers answer, but cannot write: free space on their disk and try again.
    #[error(
        "{action}: the broker at {bootstrap_servers} cannot write to its disk ({reason}); free space \
         there (millrace topic delete, streams.broker.retention_bytes_max) and try again"
    )]
    BrokerDisk {
        /// The attempted operation.
        action: String,
        /// The brokers.
        bootstrap_servers: String,
        /// librdkafka's message.
        reason: String,
    },
    /// The producer met a fatal error: replace it by a new one.
    #[error("the producer for {bootstrap_servers} cannot continue: {reason}; connect a new one")]
    ProducerLost {
        /// The brokers.
        bootstrap_servers: String,
        /// librdkafka's message.
        reason: String,
    },
    /// The record is larger than the producer or the broker allows.
    #[error(
        "a record of {bytes} bytes for topic {topic} is too large; raise message.max.bytes (and \
         queue.buffering.max.kbytes, where it is set) under [streams.properties] and streams.broker.message_bytes_max"
    )]
    RecordTooLarge {
        /// Topic name.
        topic: String,
        /// Key and payload size.
        bytes: usize,
    },
    /// A setting is not usable.
    #[error("streams configuration: {reason}")]
    Config {
        /// The setting, and the values that it allows.
        reason: String,
    },
    /// The topic name or partition count is not allowed.
    #[error("topic {name:?} cannot be created: {reason}")]
    InvalidTopic {
        /// The name.
        name: String,
        /// The rule it breaks.
        reason: String,
    },
    /// Any other error of the client library.
    #[error("{action} at {bootstrap_servers}")]
    Client {
        /// The attempted operation.
        action: String,
        /// The brokers.
        bootstrap_servers: String,
        /// The library's error.
        #[source]
        source: Box<KafkaError>,
    },
    /// The handle was already closed.
    #[error("the {what} is closed")]
    Closed {
        /// The closed handle, for example `consumer`.
        what: &'static str,
    },
    /// Another process listens on the broker's address.
    #[error(
        "the broker cannot listen on {address}: the port is taken; stop the other process or set \
         streams.broker.listen to a free address (port 0 picks one)"
    )]
    AddressTaken {
        /// The address.
        address: SocketAddr,
    },
    /// Another process holds the broker's directory.
    #[error("the broker directory {} is held by process {pid}; stop it or use another home", dir.display())]
    HeldByAnother {
        /// The directory.
        dir: PathBuf,
        /// Process id of the holder (`unknown` when it cannot be read).
        pid: String,
    },
    /// The directory was written by a newer release.
    #[error(
        "the broker directory {} has format {found}, this release reads up to {supported}; use a newer millrace", dir.display()
    )]
    NewerFormat {
        /// The directory.
        dir: PathBuf,
        /// Its format.
        found: u32,
        /// The newest format this release knows.
        supported: u32,
    },
    /// Stored data is damaged in a place that a torn write cannot explain.
    #[error(
        "{}: damaged at byte {position} ({reason}); restore the file from a copy, or stop the \
         broker and {advice}", path.display()
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Byte position in the file.
        position: u64,
        /// What is wrong there.
        reason: String,
        /// The remedy when no copy exists.
        advice: String,
    },
    /// A partition is damaged: it can be read up to the damage.
    #[error(
        "topic {topic} partition {partition} is damaged at offset {offset}; the log of the broker \
         at {bootstrap_servers} names the file and the remedy"
    )]
    Damaged {
        /// Topic name.
        topic: String,
        /// Partition.
        partition: i32,
        /// First offset that cannot be read.
        offset: i64,
        /// The brokers.
        bootstrap_servers: String,
    },
    /// A batch cannot be decoded. The consumer skips it and continues after it.
    #[error(
        "topic {topic} partition {partition}: the batch with offsets {first} to {} cannot be decoded \
         ({reason}); look for the producer that wrote it", next - 1
    )]
    Undecodable {
        /// Topic name.
        topic: String,
        /// Partition.
        partition: i32,
        /// First offset that is skipped.
        first: i64,
        /// The offset after the batch.
        next: i64,
        /// librdkafka's message.
        reason: String,
    },
    /// The list of topics cannot be read.
    #[error("{}: not a list of topics ({reason}); restore the file from a copy", path.display())]
    DamagedMeta {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The file system failed.
    #[error("{action} {}", path.display())]
    Io {
        /// The attempted operation.
        action: &'static str,
        /// The file, directory or address.
        path: PathBuf,
        /// The operating system's error.
        #[source]
        source: std::io::Error,
    },
    /// A batch cannot be built, or does not have the schema of consumed records.
    #[error("build a record batch")]
    Arrow(#[source] arrow::error::ArrowError),
}

impl Error {
    /// Whether the same call can succeed later, once the servers have recovered, without a change by the
    /// caller.
    pub fn is_retryable(&self) -> bool {
        match self {
            Error::Unreachable { .. } | Error::BrokerDisk { .. } => true,
            Error::NotDelivered { retryable, .. } => *retryable,
            Error::Client { source, .. } => {
                source.rdkafka_error_code().is_some_and(|code| is_unanswered(code) || is_leader_change(code))
            }
            _ => false,
        }
    }

    /// Whether the disk is full.
    pub(crate) fn is_no_space(&self) -> bool {
        use std::io::ErrorKind::{QuotaExceeded, StorageFull};
        matches!(self, Error::Io { source, .. } if matches!(source.kind(), StorageFull | QuotaExceeded))
    }

    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Error::Io { action, path, source }
    }
}

/// Whether the code says that no broker has answered in time.
pub(crate) fn is_unanswered(code: Code) -> bool {
    matches!(
        code,
        Code::AllBrokersDown
            | Code::BrokerTransportFailure
            | Code::BrokerNotAvailable
            | Code::NetworkException
            | Code::OperationTimedOut
            | Code::RequestTimedOut
            | Code::Resolve
    )
}

/// Whether the code says that the partition has another leader than the broker that was asked, or none at present. The
/// client library looks for the new leader meanwhile.
pub(crate) fn is_leader_change(code: Code) -> bool {
    matches!(
        code,
        Code::FencedLeaderEpoch
            | Code::LeaderNotAvailable
            | Code::NotLeaderForPartition
            | Code::OffsetNotAvailable
            | Code::ReplicaNotAvailable
            | Code::UnknownLeaderEpoch
    )
}

impl From<arrow::error::ArrowError> for Error {
    fn from(source: arrow::error::ArrowError) -> Self {
        Error::Arrow(source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_repeated_while_a_partition_changes_its_leader() {
        let failed = |code| Error::Client {
            action: "read topic t partition 0".to_owned(),
            bootstrap_servers: "b:9092".to_owned(),
            source: Box::new(KafkaError::MetadataFetch(code)),
        };
        for code in [
            Code::NotLeaderForPartition,
            Code::LeaderNotAvailable,
            Code::FencedLeaderEpoch,
            Code::UnknownLeaderEpoch,
            Code::ReplicaNotAvailable,
            Code::BrokerNotAvailable,
            Code::NetworkException,
        ] {
            assert!(failed(code).is_retryable(), "{code}");
        }
        assert!(!failed(Code::TopicAuthorizationFailed).is_retryable());
    }
}
