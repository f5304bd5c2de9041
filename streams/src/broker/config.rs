//! The `[streams.broker]` table.

use std::net::{Ipv4Addr, SocketAddr};

use serde::{Deserialize, Serialize};

/// When a produce request is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Flush {
    /// After its batches were handed to the operating system: a killed process loses nothing, a
    /// machine that loses power may lose the last seconds. Apache Kafka's default as well.
    Os,
    /// After its batches were forced to the disk; requests that wait together share one flush.
    /// Consumers see only what would survive a loss of power.
    Always,
}

/// Settings of the embedded broker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Address to listen on. Port 0 picks a free one, which clients of the same home find by
    /// themselves. The broker has no authentication: keep it on the loopback interface or a
    /// trusted network.
    pub listen: SocketAddr,
    /// Host name that clients are told to connect to; empty means the address through which a
    /// client reached the broker.
    pub advertised_host: String,
    /// When a produce request is answered.
    pub flush: Flush,
    /// Whether asking for a topic that does not exist creates it.
    pub auto_create_topics: bool,
    /// Partitions of a topic that is created without saying how many.
    pub partitions_default: i32,
    /// Partitions of all topics together; each keeps one file open. Creating more is refused.
    pub partitions_max: usize,
    /// A segment file is closed and the next one begun at this size, in bytes.
    pub segment_bytes_max: u64,
    /// Records older than this are removed, in milliseconds, a whole segment at a time; 0 keeps them.
    pub retention_ms: u64,
    /// The oldest segments of a partition are removed while the others hold as many bytes; 0 keeps
    /// all.
    pub retention_bytes_max: u64,
    /// Largest record batch, compressed, in bytes.
    pub message_bytes_max: usize,
    /// Largest request, in bytes; a client that announces more is disconnected.
    pub request_bytes_max: usize,
    /// Largest answer to a fetch request, in bytes (one batch larger than this still passes).
    pub fetch_bytes_max: usize,
    /// Memory for large requests, as they arrive, and fetch answers of all connections together, in
    /// bytes; further ones wait. At least twice `request_bytes_max` is sensible.
    pub memory_bytes_max: usize,
    /// Connections at the same time; further ones are closed at once.
    pub connections_max: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 9092)),
            advertised_host: String::new(),
            flush: Flush::Os,
            auto_create_topics: true,
            partitions_default: 1,
            partitions_max: 1_000,
            segment_bytes_max: 64 << 20,
            retention_ms: 0,
            retention_bytes_max: 0,
            message_bytes_max: 16 << 20,
            request_bytes_max: 100 << 20,
            fetch_bytes_max: 16 << 20,
            memory_bytes_max: 256 << 20,
            connections_max: 512,
        }
    }
}
