//! Cache of decoded row groups that the processes of a node share.
//!
//! The processes of one user that read the same row groups and columns of one snapshot ([`Scope`]) meet at an abstract
//! Unix socket. The process that binds it serves, all of them ask. Both ends of a connection first prove that they can
//! read the home ([`proof`]), since containers may share users and sockets without sharing files. A row group is one Arrow
//! IPC stream in a sealed memory file, which every process maps. The first process that asks for a row group gets the claim
//! to decode it; others wait.
//!
//! Invariants:
//! - No process depends on another one: each wait has a limit. After an error the process decodes on its own, and asks
//!   nothing for [`Limits::quiet`], longer after each further error. Questions that began before an error add
//!   no further one. The end of a server while a process waits is no error: the process asks once more.
//! - No deadlock: a process takes its decoding permit before it asks, and gets a claim in answer to a question only. So a
//!   holder of a claim waits for its decoding and for answers that the server gives at once, never for a permit or a claim.
//!   A process that waits for the claim of another one holds neither: it gives its permit back first.
//! - A process waits for one claim at most. Where that one ends without a file, the first that asks again gets the claim,
//!   and the others decode at once.
//! - The server holds at most the limit of its own cache in bytes. A process maps at most [`MAPPINGS_MAX`] files, none
//!   below [`BYTES_MIN`]. A mapping ends with the last reference to its row group.
//! - All feeds of a process share one budget of descriptors for files and connections ([`Descriptors`]).
//! - Nothing has a name in a file system: after `kill -9` the kernel frees sockets and memory files.

mod budget;
mod line;
mod memory;
mod proof;
mod scope;
mod shelf;
#[cfg(test)]
mod tests;

pub(crate) use scope::Scope;

use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use nix::unistd::geteuid;
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::feed::cache::memory_bytes;
use crate::feed::error::Result;
use budget::{Budget, Descriptors, Held};
use line::{Kind, Line, Listener, nonsense, within};
use proof::Key;
use shelf::Shelf;

/// Size from which a row group is shared: each takes a mapping, of which the kernel allows 65,530 in a process.
const BYTES_MIN: u64 = 256 << 10;
/// Row groups of other processes that a process maps at a time.
const MAPPINGS_MAX: usize = 1_024;
/// Doublings of the quiet time: about 10 minutes after the sixth error in a row.
const DOUBLINGS_MAX: u32 = 6;
/// How long a fork waits for the end of a server.
const STOP_TIME: Duration = Duration::from_secs(1);

/// Limits of waits.
#[derive(Debug, Clone, Copy)]
struct Limits {
    /// How long the other end of a connection may take for an answer that it gives at once.
    answer: Duration,
    /// How long a process may take to decode a row group that it has claimed.
    claim: Duration,
    /// How long a process waits for a row group that another one decodes: longer than a claim.
    wait: Duration,
    /// How long a process does not ask after an error.
    quiet: Duration,
}

const LIMITS: Limits = Limits {
    answer: Duration::from_secs(2),
    claim: Duration::from_secs(30),
    wait: Duration::from_secs(45),
    quiet: Duration::from_secs(10),
};

/// A row group that a feed needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    /// Its number in the plan.
    pub(crate) group: u32,
    /// Its rows once it is decoded.
    pub(crate) rows: usize,
    /// Its estimated size once it is decoded, with all columns of the dataset.
    pub(crate) bytes: u64,
}

/// One process's end of the shared cache, and its server where it has bound the socket.
pub(crate) struct NodeCache {
    address: PathBuf,
    schema: SchemaRef,
    limits: Limits,
    key: Key,
    shelf: Arc<Shelf>,
    mappings: Arc<Budget>,
    descriptors: Descriptors,
    server: Mutex<Server>,
    quiet: Mutex<Quiet>,
    sizes: Mutex<Sizes>,
}

enum Server {
    Off,
    On {
        stop: CancellationToken,
        task: AbortOnDropHandle<()>,
    },
    /// The process is about to fork.
    Paused,
}

/// Errors in a row, and the time until which this process does not ask.
#[derive(Default)]
struct Quiet {
    errors: u32,
    /// When the last error was noted. Errors of questions that began before say nothing new.
    noted: Option<Instant>,
    until: Option<Instant>,
}

/// Estimated and actual sizes of the row groups so far: estimates count columns that are not read.
#[derive(Default)]
struct Sizes {
    estimated: u64,
    decoded: u64,
}

enum Reply {
    /// The row group.
    Hit(OwnedFd),
    /// The claim, which ends with the connection.
    Decode(Line),
    /// Another process has the claim.
    Wait(Line),
    /// The row group is not shared now.
    Alone,
}

impl NodeCache {
    /// Binds and connects nothing yet. As a server, it holds at most `bytes_max` bytes. None for a user whose processes
    /// cannot be told from those of others.
    pub(crate) fn new(scope: &Scope<'_>, bytes_max: u64) -> Option<Arc<Self>> {
        let own = geteuid().as_raw();
        if !line::is_own_user(own, own, line::overflow_uid()) {
            tracing::debug!(uid = own, "row groups are not shared: this user stands for several");
            return None;
        }
        Some(Self::with(scope, bytes_max, LIMITS, Budget::of_mappings(), Descriptors::of_process()))
    }

    fn with(
        scope: &Scope<'_>,
        bytes_max: u64,
        limits: Limits,
        mappings: Arc<Budget>,
        descriptors: Descriptors,
    ) -> Arc<Self> {
        let key = Key::new(&scope.key());
        Arc::new(Self {
            address: scope.address(),
            schema: Arc::clone(scope.schema),
            limits,
            shelf: Shelf::new(bytes_max, scope.groups, limits, key.clone(), descriptors.clone()),
            key,
            mappings,
            descriptors,
            server: Mutex::new(Server::Off),
            quiet: Mutex::default(),
            sizes: Mutex::default(),
        })
    }

    /// A row group: that of another process, or the result of `decode`, which is shared then. Holds one of the `permits`
    /// while it decodes, and not while it waits for another process.
    pub(crate) async fn read(
        &self,
        wanted: &Wanted,
        permits: &Semaphore,
        decode: impl Future<Output = Result<RecordBatch>> + Send,
    ) -> Result<RecordBatch> {
        let (mut has_waited, mut has_failed) = (false, false);
        let (claim, permit) = loop {
            // Nothing closes the semaphore.
            let permit = permits.acquire().await.ok();
            if has_failed || !self.may_ask(wanted) {
                break (None, permit);
            }
            let Some(held) = self.mappings.hold() else { break (None, permit) };
            let began = Instant::now();
            match self.ask(wanted.group, has_waited).await {
                Ok(Reply::Hit(file)) => match self.open(file, held, wanted.rows).await {
                    Ok(batch) => {
                        self.quiet.lock().end();
                        self.note_size(wanted, &batch);
                        return Ok(batch);
                    }
                    Err(error) => {
                        self.be_quiet(began, wanted.group, &error);
                        break (None, permit);
                    }
                },
                Ok(Reply::Decode(claim)) => break (Some((claim, held, began)), permit),
                Ok(Reply::Alone) => break (None, permit),
                Ok(Reply::Wait(line)) => {
                    drop((permit, held));
                    if let Err(error) = self.wait(&line, wanted.group).await {
                        self.be_quiet(began, wanted.group, &error);
                        has_failed = true;
                    }
                    has_waited = true;
                }
                Err(error) => {
                    self.be_quiet(began, wanted.group, &error);
                    break (None, permit);
                }
            }
        };
        let batch = decode.await?;
        let bytes = self.note_size(wanted, &batch);
        let shared = match claim {
            Some((claim, held, began)) if bytes >= BYTES_MIN => {
                self.put(&claim, held, began, wanted.group, batch).await
            }
            _ => batch,
        };
        drop(permit);
        Ok(shared)
    }

    /// Whether to ask the other processes for a row group.
    fn may_ask(&self, wanted: &Wanted) -> bool {
        let is_quiet = self.quiet.lock().until.is_some_and(|until| Instant::now() < until);
        let bytes = self.sizes.lock().predict(wanted.bytes);
        !is_quiet
            && (BYTES_MIN..=self.shelf.bytes_max()).contains(&bytes)
            && !matches!(*self.server.lock(), Server::Paused)
    }

    /// Asks nothing for a while after the error of a question.
    fn be_quiet(&self, began: Instant, group: u32, error: &io::Error) {
        self.shelf.relieve(error);
        let time = self.quiet.lock().begin(began, self.limits.quiet);
        tracing::debug!(%error, group, ?time, "row groups are not shared for a while");
    }

    /// Notes and returns the size of a row group.
    fn note_size(&self, wanted: &Wanted, batch: &RecordBatch) -> u64 {
        let bytes = memory_bytes(batch);
        let mut sizes = self.sizes.lock();
        sizes.estimated = sizes.estimated.saturating_add(wanted.bytes);
        sizes.decoded = sizes.decoded.saturating_add(bytes);
        bytes
    }

    async fn ask(&self, group: u32, has_waited: bool) -> io::Result<Reply> {
        let Some(line) = self.connect().await? else { return Ok(Reply::Alone) };
        line.check_peer()?;
        if !proof::introduce(&line, &self.key, self.limits.answer).await? {
            return Ok(Reply::Alone);
        }
        let kind = if has_waited { Kind::GetAgain } else { Kind::Get };
        line.send(self.limits.answer, kind, group, None).await?;
        let reply = within(self.limits.answer, line.receive()).await?;
        match (reply.kind, reply.file) {
            _ if reply.group != group => Err(nonsense("an answer for another row group")),
            (Kind::Hit, Some(file)) => Ok(Reply::Hit(file)),
            (Kind::Decode, None) => Ok(Reply::Decode(line)),
            (Kind::Wait, None) if !has_waited => Ok(Reply::Wait(line)),
            (Kind::Alone, None) => Ok(Reply::Alone),
            _ => Err(nonsense("an answer of another form")),
        }
    }

    /// Waits until the claim of another process has ended, or its server has: the address is free then, or has a new one.
    async fn wait(&self, line: &Line, group: u32) -> io::Result<()> {
        let reply = match within(self.limits.wait, line.receive()).await {
            Err(error) if is_end(&error) => return Ok(()),
            reply => reply?,
        };
        match (reply.kind, reply.file) {
            (Kind::Done, None) if reply.group == group => Ok(()),
            _ => Err(nonsense("an answer of another form")),
        }
    }

    /// Connects to the server, which this process becomes where there is none. None if it may have no connection more.
    async fn connect(&self) -> io::Result<Option<Line>> {
        let Some(held) = self.descriptors.connections.hold() else { return Ok(None) };
        let line = match Line::connect(&self.address).await {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                self.serve();
                Line::connect(&self.address).await?
            }
            connected => connected?,
        };
        Ok(Some(line.holding(held)))
    }

    fn serve(&self) {
        let mut server = self.server.lock();
        if matches!(*server, Server::Paused) {
            return;
        }
        // Fails where another process has bound it meanwhile.
        if let Ok(listener) = Listener::bind(&self.address) {
            let stop = CancellationToken::new();
            let serving = shelf::serve(listener, Arc::clone(&self.shelf), stop.clone());
            *server = Server::On { stop, task: AbortOnDropHandle::new(tokio::spawn(serving)) };
        }
    }

    /// Ends the server, and lets this process serve no more until [`NodeCache::resume_serving`]. When it returns, the
    /// socket is closed.
    pub(crate) async fn pause_serving(&self) {
        let server = std::mem::replace(&mut *self.server.lock(), Server::Paused);
        if let Server::On { stop, task } = server {
            stop.cancel();
            if timeout(STOP_TIME, task).await.is_err() {
                tracing::warn!("the server of shared row groups did not end before a fork");
            }
        }
    }

    /// Lets this process serve again.
    pub(crate) fn resume_serving(&self) {
        let mut server = self.server.lock();
        if matches!(*server, Server::Paused) {
            *server = Server::Off;
        }
    }

    /// The batch in a file of another process.
    async fn open(&self, file: OwnedFd, held: Held, rows: usize) -> io::Result<RecordBatch> {
        let schema = Arc::clone(&self.schema);
        let sizes = BYTES_MIN..=self.shelf.bytes_max();
        let opening = move || {
            let bytes = memory::map(&file, &sizes, held)?;
            memory::decode(&bytes, &schema, rows).map_err(|error| nonsense(&error.to_string()))
        };
        // Arrow panics on some malformed input.
        tokio::task::spawn_blocking(opening).await.map_err(|error| nonsense(&error.to_string()))?
    }

    /// Hands a decoded row group to the server. Returns it over the shared memory, or as it is.
    async fn put(
        &self,
        claim: &Line,
        held: Held,
        began: Instant,
        group: u32,
        batch: RecordBatch,
    ) -> RecordBatch {
        let (schema, kept) = (Arc::clone(&self.schema), batch.clone());
        let sizes = BYTES_MIN..=self.shelf.bytes_max();
        let encoding = move || -> io::Result<_> {
            let file = memory::encode(&batch)?;
            if !sizes.contains(&memory::size(&file)?) {
                return Ok(None);
            }
            let bytes = memory::map(&file, &sizes, held)?;
            let shared = memory::decode(&bytes, &schema, batch.num_rows()).map_err(io::Error::other)?;
            Ok(Some((file, shared)))
        };
        let encoded = tokio::task::spawn_blocking(encoding).await;
        let shared = match encoded.unwrap_or_else(|error| Err(io::Error::other(error))) {
            // Smaller or larger than estimated.
            Ok(None) => return kept,
            Ok(Some((file, shared))) => self.hand_over(claim, group, &file).await.map(|()| shared),
            Err(error) => Err(error),
        };
        match shared {
            Ok(shared) => {
                self.quiet.lock().end();
                shared
            }
            Err(error) => {
                self.be_quiet(began, group, &error);
                kept
            }
        }
    }

    /// Sends a file to the server, which confirms that it keeps it, or that it may keep no file more.
    async fn hand_over(&self, claim: &Line, group: u32, file: &OwnedFd) -> io::Result<()> {
        claim.send(self.limits.answer, Kind::Put, group, Some(file)).await?;
        let reply = within(self.limits.answer, claim.receive()).await?;
        match (reply.kind, reply.file) {
            (Kind::Kept | Kind::Alone, None) if reply.group == group => Ok(()),
            _ => Err(nonsense("an answer of another form")),
        }
    }
}

/// Whether the other end has closed the connection, as the kernel does for a process that has died.
fn is_end(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset)
}

impl Quiet {
    /// Notes the error of a question that began at a time. Returns the quiet time that it sets, if it sets one.
    fn begin(&mut self, began: Instant, shortest: Duration) -> Option<Duration> {
        if self.noted.is_some_and(|noted| began <= noted) {
            return None;
        }
        let time = shortest * (1 << self.errors.min(DOUBLINGS_MAX));
        let now = Instant::now();
        self.errors = self.errors.saturating_add(1);
        (self.noted, self.until) = (Some(now), Some(now + time));
        Some(time)
    }

    /// Ends the quiet time after a success.
    fn end(&mut self) {
        (self.errors, self.until) = (0, None);
    }
}

impl Sizes {
    /// The size to expect of a row group with this estimate.
    fn predict(&self, estimate: u64) -> u64 {
        let scaled = u128::from(estimate) * u128::from(self.decoded);
        let scaled = scaled.checked_div(u128::from(self.estimated)).unwrap_or(estimate.into());
        u64::try_from(scaled).unwrap_or(u64::MAX)
    }
}
