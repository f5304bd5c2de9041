//! A single-node broker that speaks the Kafka protocol, inside this process.
//!
//! It keeps topics in segment files, with retention by age and size. librdkafka (kcat, confluent-kafka), the
//! Java clients and [`crate::topic`] can use it with explicit assignment and with idempotent producers. It
//! has no consumer groups, no transactions and no authentication, and does not advertise them.
//!
//! Two rules for librdkafka clients. Set `enable.auto.commit=false` beside an explicit assignment; otherwise
//! closing the consumer waits `session.timeout.ms` for a group coordinator. `compression.type=lz4` falls back
//! to none, because librdkafka takes a broker without group coordinators for one too old for lz4. Other
//! clients may compress with gzip, Snappy, LZ4 or Zstandard: the broker decompresses a batch only to check or
//! search its records, and stores its records as sent.
//!
//! Durability. The broker answers a produce request after it wrote the batches to the operating system
//! ([`Flush::Os`]): `kill -9` loses nothing acknowledged. A batch that was not acknowledged is either whole
//! in the log or absent. With [`Flush::Always`] the broker answers after a flush to the disk, so that a power
//! loss loses nothing acknowledged either; waiting requests share one flush. The broker flushes a segment
//! before it begins the next one, and all logs when it stops. With [`Flush::Always`] it also flushes the last
//! segments at start, before it serves their records.
//!
//! Recovery. A broker that stops in order writes a checkpoint of each log. At start the broker reads every
//! batch header after the checkpoint, and verifies their checksums in the last segment. It verifies the other
//! checksums when it reads the batches. It cuts off a torn end and logs that. Damage followed by sound
//! batches is not a torn end: the broker logs file, position and remedy. That partition serves the records
//! before the damage and accepts no more; the other partitions are not affected.
//!
//! One process at a time holds the directory, see [`running_address`].

mod api;
mod code;
mod config;
mod connection;
pub(crate) mod fuzzing;
mod lock;
mod log;
mod memory;
mod shape;
mod store;
#[cfg(test)]
mod tests;

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use millrace_leaf::blocking::{self, Stopping};
use millrace_leaf::private;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use config::{Config, Flush};

use crate::error::{Error, Result};
use lock::DirLock;
use memory::Memory;
use store::Store;

/// Prefix of the cluster ids of this broker, by which consumers recognize it.
pub(crate) const CLUSTER_ID_PREFIX: &str = "millrace-";

/// Threads that serve connections; log files are read and written on them.
const THREADS: usize = 2;

/// Pause after an error before the broker accepts connections again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Interval of the retention pass; one more runs at start.
const RETENTION_EVERY: Duration = Duration::from_secs(60);

/// The directory in which the broker of `home` keeps its files.
pub fn dir(home: &Path) -> PathBuf {
    home.join("broker")
}

/// Address of the broker that holds `dir` now, in this process or another; `None` when none does
/// or it has just begun to start.
pub fn running_address(dir: &Path) -> Option<SocketAddr> {
    lock::holder_address(dir)
}

/// Id of the process that holds `dir` now, as that process sees itself; `None` when none does.
pub fn running_pid(dir: &Path) -> Option<u32> {
    lock::holder_pid(dir)
}

/// Whether a process holds `dir`, including a broker that does not listen yet.
pub fn is_held(dir: &Path) -> bool {
    lock::is_held(dir)
}

/// State shared by all connections.
pub(crate) struct BrokerState {
    config: Config,
    store: Store,
    stopping: CancellationToken,
    memory: Memory,
}

/// A running broker. Dropping it stops it without waiting; nothing acknowledged is lost by that.
pub struct Broker {
    address: SocketAddr,
    stopping: CancellationToken,
    stopped: Option<oneshot::Receiver<Result<()>>>,
    /// Separate threads, so that file access never blocks the caller's tasks.
    runtime: Option<Runtime>,
}

impl std::fmt::Debug for Broker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Broker").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Broker {
    /// Starts a broker over `dir`, creating it when needed, and returns once it accepts
    /// connections. It runs until [`Broker::stop`] or until `cancel` is cancelled.
    ///
    /// # Errors
    /// [`Error::HeldByAnother`], [`Error::AddressTaken`], [`Error::DamagedMeta`],
    /// [`Error::NewerFormat`], [`Error::Config`], [`Error::Io`].
    pub async fn start(config: Config, dir: &Path, cancel: CancellationToken) -> Result<Self> {
        let dir = dir.to_path_buf();
        let stopping = cancel.child_token();
        blocking::run(move || Self::start_blocking(config, &dir, stopping))
            .await
            .unwrap_or_else(|Stopping| Err(Error::Closed { what: "runtime" }))
    }

    fn start_blocking(config: Config, dir: &Path, stopping: CancellationToken) -> Result<Self> {
        check(&config)?;
        private::create_dir_all(dir).map_err(Error::io("create", dir))?;
        let mut lock = DirLock::take(dir)?;
        let store = Store::open(dir, &config)?;
        store.retain();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("streams-broker")
            .enable_all()
            .build()
            .map_err(Error::io("start threads for", dir))?;
        let listen = config.listen;
        let listener = runtime.block_on(TcpListener::bind(listen)).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => Error::AddressTaken { address: listen },
            _ => Error::io("listen on", listen.to_string())(error),
        })?;
        let address = listener.local_addr().map_err(Error::io("listen on", listen.to_string()))?;
        let mut reachable = address;
        if reachable.ip().is_unspecified() {
            reachable.set_ip(std::net::Ipv4Addr::LOCALHOST.into());
        }
        lock.set_address(reachable)?;
        let memory = Memory::new(config.memory_bytes_max, config.request_bytes_max);
        let shared = Arc::new(BrokerState { config, store, stopping: stopping.clone(), memory });
        tracing::info!(address = %address, dir = %dir.display(), "the broker accepts connections");
        let (done, stopped) = oneshot::channel();
        runtime.spawn(async move {
            tokio::join!(accept(listener, shared.clone()), retain(&shared));
            let flushed = tokio::task::block_in_place(|| shared.store.close());
            if let Err(error) = &flushed {
                tracing::error!(error = %error, "the broker could not flush its logs while stopping");
            }
            drop(shared);
            drop(lock);
            // The receiver may be gone.
            let _ = done.send(flushed);
        });
        Ok(Self { address, stopping, stopped: Some(stopped), runtime: Some(runtime) })
    }

    /// The address that the broker listens on, with the actual port.
    pub fn addr(&self) -> SocketAddr {
        self.address
    }

    /// Stops accepting, lets started requests finish, flushes all logs to the disk and releases the
    /// directory.
    ///
    /// # Errors
    /// [`Error::Io`] when a flush failed.
    pub async fn stop(mut self) -> Result<()> {
        self.stopping.cancel();
        let flushed = match self.stopped.take() {
            Some(stopped) => stopped.await.unwrap_or(Ok(())),
            None => Ok(()),
        };
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
        flushed
    }

    /// Waits until the token of [`Broker::start`] is cancelled, then stops as [`Broker::stop`] does.
    ///
    /// # Errors
    /// As [`Broker::stop`].
    pub async fn stopped(self) -> Result<()> {
        self.stopping.clone().cancelled().await;
        self.stop().await
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.stopping.cancel();
        if let Some(runtime) = self.runtime.take() {
            // Dropping a runtime waits for its threads, which is not allowed on an async thread.
            runtime.shutdown_background();
        }
    }
}

fn check(config: &Config) -> Result<()> {
    match problems(config).into_iter().next() {
        Some(reason) => Err(Error::Config { reason }),
        None => Ok(()),
    }
}

/// The unusable settings of the table `[streams.broker]`: each begins with its key, such as `broker.connections_max`.
#[must_use]
pub fn problems(config: &Config) -> Vec<String> {
    let header = log::batch::HEADER_BYTES;
    let is_wrong = [
        (
            config.partitions_default < 1 || config.partitions_default as usize > config.partitions_max,
            "broker.partitions_default must be between 1 and broker.partitions_max",
        ),
        (
            config.message_bytes_max < header || config.message_bytes_max >= config.request_bytes_max,
            "broker.message_bytes_max must be at least 61 and below broker.request_bytes_max",
        ),
        (
            config.request_bytes_max > 1 << 30 || config.fetch_bytes_max > 1 << 30,
            "broker.request_bytes_max and broker.fetch_bytes_max must not exceed 1 GiB",
        ),
        (config.connections_max == 0, "broker.connections_max must be at least 1"),
        (
            config.segment_bytes_max < 1 << 10 || config.fetch_bytes_max < 1 << 10,
            "broker.segment_bytes_max and broker.fetch_bytes_max must be at least 1 KiB",
        ),
    ];
    is_wrong.into_iter().filter(|(wrong, _)| *wrong).map(|(_, reason)| reason.to_owned()).collect()
}

async fn retain(shared: &BrokerState) {
    while shared.stopping.run_until_cancelled(tokio::time::sleep(RETENTION_EVERY)).await.is_some() {
        tokio::task::block_in_place(|| shared.store.retain());
    }
}

async fn accept(listener: TcpListener, shared: Arc<BrokerState>) {
    let connections = TaskTracker::new();
    let mut spare = spare_descriptor();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = shared.stopping.cancelled() => break,
        };
        match accepted {
            Ok((stream, peer)) if connections.len() < shared.config.connections_max => {
                connections.spawn(connection::serve(shared.clone(), stream, peer));
            }
            Ok((stream, peer)) => {
                drop(stream);
                crate::metrics::BROKER_REFUSED.inc();
                tracing::warn!(peer = %peer, "refused a connection: streams.broker.connections_max is reached");
            }
            Err(error) if spare.is_some() && out_of_descriptors(&error) => {
                // The spare descriptor admits the waiting connection, which is then closed instead of left
                // waiting.
                drop(spare.take());
                let refused = tokio::time::timeout(ACCEPT_PAUSE, listener.accept()).await;
                tracing::warn!(error = %error, "refused a connection: raise the limit of open files");
                crate::metrics::BROKER_REFUSED.inc();
                drop(refused);
                spare = spare_descriptor();
            }
            Err(error) => {
                // An immediate retry would spin.
                tracing::error!(error = %error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                spare = spare.or_else(spare_descriptor);
            }
        }
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}

fn spare_descriptor() -> Option<fs::File> {
    fs::File::open("/dev/null").ok()
}

fn out_of_descriptors(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(nix::libc::EMFILE | nix::libc::ENFILE))
}
