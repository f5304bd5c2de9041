//! The `[streams.broker]` table of `millrace.toml`: settings of the embedded broker.

use std::net::{Ipv4Addr, SocketAddr};

use serde::{Deserialize, Serialize};

/// The point at which the broker answers a produce request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Flush {
    /// After the operating system has its batches: a killed process loses nothing, a power loss may lose the
    /// last seconds. This is also Apache Kafka's default.
    Os,
    /// After its batches were flushed to the disk; requests that wait together share one flush. Consumers see
    /// only records that survive a power loss.
    Always,
}

/// Settings of the embedded broker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Address to listen on. Port 0 picks a free port; clients of the same home read it from the broker's
    /// lock file. The broker has no authentication: keep it on the loopback interface or a trusted network.
    pub listen: SocketAddr,
    /// Host name that the broker gives to clients; empty means the address through which a client reached the
    /// broker.
    pub advertised_host: String,
    /// The point at which the broker answers a produce request.
    pub flush: Flush,
    /// Whether a metadata request for a missing topic creates it.
    pub auto_create_topics: bool,
    /// Partitions of a new topic when the client gives no number.
    pub partitions_default: i32,
    /// Maximum number of partitions of all topics together; each keeps one or two files open. The broker
    /// refuses to create more.
    pub partitions_max: usize,
    /// Size in bytes at which a segment file is closed and the next one begins.
    pub segment_bytes_max: u64,
    /// Age in milliseconds after which records are removed, a whole segment at a time; 0 keeps them.
    pub retention_ms: u64,
    /// Bytes to keep per partition: the oldest segment is removed while the remaining ones hold at least
    /// this; 0 keeps all.
    pub retention_bytes_max: u64,
    /// Largest record batch, compressed, in bytes.
    pub message_bytes_max: usize,
    /// Largest request, in bytes; a client that announces more is disconnected.
    pub request_bytes_max: usize,
    /// Largest fetch response, in bytes (one batch larger than this still passes).
    pub fetch_bytes_max: usize,
    /// Memory in bytes for large requests and fetch responses of all connections together; further ones wait.
    /// Use at least twice `request_bytes_max`.
    pub memory_bytes_max: usize,
    /// Maximum number of open connections; the broker closes further ones at once.
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
