//! Cache of decoded row groups that the processes of a node share.
//!
//! The processes of one user that read the same plan and columns from one home meet at an abstract Unix socket. The
//! process that binds it serves, the others ask. A row group is one Arrow IPC stream in a sealed memory file, which
//! every process maps. The first process that asks for a row group gets the claim to decode it; others wait for it.
//!
//! Invariants:
//! - No process depends on another one: each wait has a limit, and after an error the process decodes by itself.
//! - A claim ends with its connection, or after [`CLAIM_TIME`]; the next process that waits gets it.
//! - The server holds at most the limit of its own cache in bytes; processes keep what they have mapped.
//! - Nothing has a name in a file system: after `kill -9` the kernel frees sockets and memory files.

mod memory;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::future::Future;
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::geteuid;
use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::feed::error::Result;
use crate::feed::hash::NumberMap;
use crate::feed::plan::PlanId;
use memory::MESSAGE_BYTES;

/// How long a process may take to decode a row group that it has claimed.
const CLAIM_TIME: Duration = Duration::from_secs(30);
/// How long a process waits for a row group that another one decodes: longer than a claim.
const WAIT_TIME: Duration = Duration::from_secs(45);
/// How long the other end of a new connection may be silent.
const FIRST_TIME: Duration = Duration::from_secs(2);
/// How long a process does not ask after a peer was silent or sent nonsense.
const QUIET_TIME: Duration = Duration::from_secs(10);
/// Connections that a server answers at a time.
const CONNECTIONS_MAX: usize = 256;
/// Memory files that a server holds, within a quarter of its limit on descriptors.
const FILES_MAX: u64 = 512;

/// The beginning of each message, with the version of the protocol.
const MAGIC: &[u8; 4] = b"mrf1";
/// Asks for a row group.
const GET: u32 = 1;
/// The row group, with its file.
const HIT: u32 = 2;
/// Another process decodes it.
const WAIT: u32 = 3;
/// The receiver has the claim.
const DECODE: u32 = 4;
/// The decoded row group of a claim, with its file.
const PUT: u32 = 5;

/// What names a shared cache, but for the user.
pub(crate) struct Scope<'a> {
    pub(crate) home: &'a Path,
    pub(crate) plan: PlanId,
    /// Row groups of the plan.
    pub(crate) groups: u32,
    pub(crate) schema: &'a SchemaRef,
}

/// One process's end of the shared cache, and its server where it has bound the socket.
pub(crate) struct NodeCache {
    address: PathBuf,
    schema: SchemaRef,
    shelf: Arc<Shelf>,
    server: Mutex<Option<AbortOnDropHandle<()>>>,
    /// Until when this process does not ask.
    quiet_until: Mutex<Option<Instant>>,
}

struct Message {
    kind: u32,
    group: u32,
    file: Option<OwnedFd>,
}

enum Reply {
    Hit(OwnedFd),
    /// The claim, which ends with the connection.
    Decode(UnixStream),
}

impl NodeCache {
    /// Binds and connects nothing yet. As a server, it holds at most `bytes_max` bytes.
    pub(crate) fn new(scope: &Scope<'_>, bytes_max: u64) -> Arc<Self> {
        let descriptors = getrlimit(Resource::RLIMIT_NOFILE).map_or(FILES_MAX, |(soft, _)| soft / 4);
        let files_max = descriptors.clamp(1, FILES_MAX) as usize;
        Arc::new(Self {
            address: address(scope),
            schema: Arc::clone(scope.schema),
            shelf: Arc::new(Shelf { bytes_max, files_max, groups: scope.groups, table: Mutex::default() }),
            server: Mutex::default(),
            quiet_until: Mutex::default(),
        })
    }

    /// A row group of `rows` rows: that of another process, or the result of `decode`, which is shared then.
    pub(crate) async fn read(
        &self,
        group: u32,
        rows: usize,
        decode: impl Future<Output = Result<RecordBatch>> + Send,
    ) -> Result<RecordBatch> {
        if self.quiet_until.lock().is_some_and(|until| Instant::now() < until) {
            return decode.await;
        }
        let found = match self.ask(group).await {
            Ok(Reply::Decode(claim)) => {
                let batch = decode.await?;
                return Ok(self.put(&claim, group, batch).await);
            }
            Ok(Reply::Hit(file)) => self.open(file, rows).await,
            Err(error) => Err(error),
        };
        match found {
            Ok(batch) => Ok(batch),
            Err(error) => {
                tracing::debug!(%error, group, "no row group of another process; decoding it here");
                if matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::InvalidData) {
                    *self.quiet_until.lock() = Some(Instant::now() + QUIET_TIME);
                }
                decode.await
            }
        }
    }

    async fn ask(&self, group: u32) -> io::Result<Reply> {
        let stream = self.connect().await?;
        check_peer(&stream)?;
        send(&stream, GET, group, None).await?;
        let mut reply = within(FIRST_TIME, receive(&stream)).await?;
        if reply.kind == WAIT {
            reply = within(WAIT_TIME, receive(&stream)).await?;
        }
        match (reply.kind, reply.file) {
            (HIT, Some(file)) if reply.group == group => Ok(Reply::Hit(file)),
            (DECODE, None) if reply.group == group => Ok(Reply::Decode(stream)),
            _ => Err(nonsense("an answer of another form")),
        }
    }

    /// Connects to the server, which this process becomes where there is none.
    async fn connect(&self) -> io::Result<UnixStream> {
        let first = UnixStream::connect(&self.address).await;
        if !matches!(&first, Err(error) if error.kind() == ErrorKind::ConnectionRefused) {
            return first;
        }
        self.serve();
        UnixStream::connect(&self.address).await
    }

    fn serve(&self) {
        let mut server = self.server.lock();
        // Another process may have bound it meanwhile.
        if let Ok(listener) = UnixListener::bind(&self.address) {
            *server = Some(AbortOnDropHandle::new(tokio::spawn(serve(listener, Arc::clone(&self.shelf)))));
        }
    }

    /// The batch in a file of another process.
    async fn open(&self, file: OwnedFd, rows: usize) -> io::Result<RecordBatch> {
        let (schema, bytes_max) = (Arc::clone(&self.schema), self.shelf.bytes_max);
        let opening = move || {
            let bytes = memory::map(&file, bytes_max)?;
            memory::decode(bytes, &schema, rows).map_err(|error| nonsense(&error.to_string()))
        };
        // Arrow panics on some malformed input.
        tokio::task::spawn_blocking(opening).await.map_err(|error| nonsense(&error.to_string()))?
    }

    /// Hands a decoded row group to the server. Returns it over the shared memory, or as it is.
    async fn put(&self, claim: &UnixStream, group: u32, batch: RecordBatch) -> RecordBatch {
        let (schema, bytes_max, kept) = (Arc::clone(&self.schema), self.shelf.bytes_max, batch.clone());
        let encoding = move || -> io::Result<_> {
            let file = memory::encode(&batch)?;
            let bytes = memory::map(&file, bytes_max)?;
            let shared = memory::decode(bytes, &schema, batch.num_rows()).map_err(io::Error::other)?;
            Ok((file, shared))
        };
        let encoded = tokio::task::spawn_blocking(encoding).await;
        let sent = match encoded.unwrap_or_else(|error| Err(io::Error::other(error))) {
            Ok((file, shared)) => send(claim, PUT, group, Some(&file)).await.map(|()| shared),
            Err(error) => Err(error),
        };
        sent.unwrap_or_else(|error| {
            tracing::debug!(%error, group, "the decoded row group is not shared");
            kept
        })
    }
}

/// The abstract address of a shared cache.
fn address(scope: &Scope<'_>) -> PathBuf {
    let mut digest = Sha256::new();
    digest.update(geteuid().as_raw().to_le_bytes());
    let home = scope.home.canonicalize().unwrap_or_else(|_| scope.home.to_owned());
    let home = home.as_os_str().as_bytes();
    digest.update((home.len() as u64).to_le_bytes());
    digest.update(home);
    digest.update(scope.plan.as_bytes());
    for field in scope.schema.fields() {
        // Another type only costs the sharing: columns are compared once they are decoded.
        let column = format!("{:?} {} {}", field.name(), field.data_type(), field.is_nullable());
        digest.update((column.len() as u64).to_le_bytes());
        digest.update(column);
    }
    let name = format!("\0millrace-feed-{}", hex::encode(digest.finalize()));
    PathBuf::from(OsString::from_vec(name.into_bytes()))
}

/// Row groups that the server holds.
struct Shelf {
    bytes_max: u64,
    files_max: usize,
    groups: u32,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    slots: NumberMap<u32, Slot>,
    bytes: u64,
    files: usize,
    /// Answers so far.
    uses: u64,
}

enum Slot {
    Kept {
        file: Arc<OwnedFd>,
        bytes: u64,
        used: u64,
    },
    /// A process decodes it; the token is cancelled at the end of the claim.
    Claimed(CancellationToken),
}

enum Answer {
    Hit(Arc<OwnedFd>),
    Wait(CancellationToken),
    Decode(Claim),
}

/// The exclusive right to decode a row group, until it is dropped.
struct Claim {
    shelf: Arc<Shelf>,
    group: u32,
    done: CancellationToken,
}

impl Shelf {
    fn ask(self: &Arc<Self>, group: u32) -> Answer {
        let mut table = self.table.lock();
        table.uses += 1;
        let now = table.uses;
        match table.slots.get_mut(&group) {
            Some(Slot::Kept { file, used, .. }) => {
                *used = now;
                Answer::Hit(Arc::clone(file))
            }
            Some(Slot::Claimed(done)) => Answer::Wait(done.clone()),
            None => {
                let done = CancellationToken::new();
                table.slots.insert(group, Slot::Claimed(done.clone()));
                Answer::Decode(Claim { shelf: Arc::clone(self), group, done })
            }
        }
    }

    /// Bytes that are held.
    #[cfg(test)]
    fn bytes(&self) -> u64 {
        self.table.lock().bytes
    }
}

impl Table {
    /// Evicts the row groups that were asked for least recently until the limits hold.
    fn evict(&mut self, bytes_max: u64, files_max: usize) {
        while self.bytes > bytes_max || self.files > files_max {
            let oldest = self.slots.iter().filter_map(|(group, slot)| match slot {
                Slot::Kept { used, bytes, .. } => Some((*used, *group, *bytes)),
                Slot::Claimed(_) => None,
            });
            let Some((_, group, bytes)) = oldest.min() else { return };
            self.slots.remove(&group);
            self.bytes -= bytes;
            self.files -= 1;
        }
    }
}

impl Claim {
    /// Keeps the decoded row group, and lets those that wait have it.
    fn fulfil(self, file: OwnedFd, bytes: u64) {
        let mut table = self.shelf.table.lock();
        table.uses += 1;
        let slot = Slot::Kept { file: Arc::new(file), bytes, used: table.uses };
        table.slots.insert(self.group, slot);
        table.bytes += bytes;
        table.files += 1;
        table.evict(self.shelf.bytes_max, self.shelf.files_max);
        drop(table);
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut table = self.shelf.table.lock();
        if let Some(Slot::Claimed(_)) = table.slots.get(&self.group) {
            table.slots.remove(&self.group);
        }
        drop(table);
        self.done.cancel();
    }
}

/// Answers connections until it is dropped.
async fn serve(listener: UnixListener, shelf: Arc<Shelf>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) if connections.len() < CONNECTIONS_MAX => {
                    connections.spawn(answer(stream, Arc::clone(&shelf)));
                }
                Ok(_) => {}
                Err(error) => {
                    tracing::debug!(%error, "the shared row groups have no connection to spare");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn answer(stream: UnixStream, shelf: Arc<Shelf>) {
    if let Err(error) = converse(&stream, &shelf).await {
        tracing::debug!(%error, "a connection for shared row groups ended");
    }
}

async fn converse(stream: &UnixStream, shelf: &Arc<Shelf>) -> io::Result<()> {
    check_peer(stream)?;
    let asked = within(FIRST_TIME, receive(stream)).await?;
    let group = asked.group;
    if asked.kind != GET || asked.file.is_some() || group >= shelf.groups {
        return Err(nonsense("a request of another form"));
    }
    let mut has_said_wait = false;
    loop {
        match shelf.ask(group) {
            Answer::Hit(file) => return send(stream, HIT, group, Some(&file)).await,
            Answer::Wait(done) => {
                if !has_said_wait {
                    send(stream, WAIT, group, None).await?;
                    has_said_wait = true;
                }
                done.cancelled().await;
            }
            Answer::Decode(claim) => {
                send(stream, DECODE, group, None).await?;
                let put = within(CLAIM_TIME, receive(stream)).await?;
                let file = put.file.filter(|_| put.kind == PUT && put.group == group);
                let file = file.ok_or_else(|| nonsense("a row group of another form"))?;
                let bytes = memory::check(&file, shelf.bytes_max)?;
                claim.fulfil(file, bytes);
                return Ok(());
            }
        }
    }
}

/// Refuses processes of other users: abstract addresses have no permissions.
fn check_peer(stream: &UnixStream) -> io::Result<()> {
    if stream.peer_cred()?.uid() == geteuid().as_raw() {
        return Ok(());
    }
    Err(nonsense("the process at the other end is of another user"))
}

fn nonsense(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what.to_owned())
}

async fn within<T>(limit: Duration, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(limit, work).await.unwrap_or_else(|_| Err(ErrorKind::TimedOut.into()))
}

async fn send(stream: &UnixStream, kind: u32, group: u32, file: Option<&OwnedFd>) -> io::Result<()> {
    let mut bytes = [0u8; MESSAGE_BYTES];
    bytes[..4].copy_from_slice(MAGIC);
    bytes[4..8].copy_from_slice(&kind.to_le_bytes());
    bytes[8..].copy_from_slice(&group.to_le_bytes());
    let file = file.map(|file| file.as_raw_fd());
    let sending = stream.async_io(Interest::WRITABLE, || memory::send(stream.as_raw_fd(), &bytes, file));
    within(FIRST_TIME, sending).await
}

async fn receive(stream: &UnixStream) -> io::Result<Message> {
    let receiving = stream.async_io(Interest::READABLE, || memory::receive(stream.as_raw_fd()));
    let (bytes, file) = receiving.await?;
    let [m0, m1, m2, m3, k0, k1, k2, k3, g0, g1, g2, g3] = bytes;
    if [m0, m1, m2, m3] != *MAGIC {
        return Err(nonsense("a message of another version"));
    }
    let (kind, group) = (u32::from_le_bytes([k0, k1, k2, k3]), u32::from_le_bytes([g0, g1, g2, g3]));
    Ok(Message { kind, group, file })
}
