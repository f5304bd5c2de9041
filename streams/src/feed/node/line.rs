//! Connections between the processes of a node: messages with at most one descriptor, and the check of the peer.
//!
//! A socket is shut down when it is dropped. A fork that Python does not know of copies descriptors into its child, and
//! without the shutdown a socket would stay open for as long as that child lives.

use std::future::Future;
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::path::Path;
use std::sync::LazyLock;
use std::time::Duration;

use nix::sys::socket::{Shutdown, shutdown};
use nix::unistd::geteuid;
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;

use super::budget::Held;
use super::memory::{self, MESSAGE_BYTES};

/// The beginning of each message.
const MAGIC: [u8; 4] = *b"mrf3";
/// The id that the kernel shows for users without a number in this namespace, unless it tells another one.
const OVERFLOW_UID: u32 = 65_534;

/// A nonce or a proof. A message has two of them, zeros where it needs none.
pub(super) type Half = [u8; 32];

/// Where they begin.
const HALVES_AT: [usize; 2] = [12, 44];

/// The kinds of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Kind {
    /// Asks for a row group.
    Get = 1,
    /// Asks again, after another process's claim has ended.
    GetAgain = 2,
    /// The row group, with its file.
    Hit = 3,
    /// Another process decodes it.
    Wait = 4,
    /// That process is done; the receiver asks again.
    Done = 5,
    /// The receiver has the claim.
    Decode = 6,
    /// The receiver decodes it without a claim.
    Alone = 7,
    /// The decoded row group of a claim, with its file.
    Put = 8,
    /// The server keeps it.
    Kept = 9,
    /// The nonce of the client, which begins a connection.
    Hello = 10,
    /// The nonce and the proof of the server.
    ServerProof = 11,
    /// The proof of the client.
    ClientProof = 12,
}

impl Kind {
    const ALL: [Kind; 12] = [
        Kind::Get,
        Kind::GetAgain,
        Kind::Hit,
        Kind::Wait,
        Kind::Done,
        Kind::Decode,
        Kind::Alone,
        Kind::Put,
        Kind::Kept,
        Kind::Hello,
        Kind::ServerProof,
        Kind::ClientProof,
    ];
}

/// A message.
pub(super) struct Message {
    pub(super) kind: Kind,
    pub(super) group: u32,
    pub(super) halves: [Half; 2],
    pub(super) file: Option<OwnedFd>,
}

/// A connection.
pub(super) struct Line {
    stream: UnixStream,
    /// Given back after the stream is closed.
    _held: Option<Held>,
}

impl Drop for Line {
    fn drop(&mut self) {
        // Fails where the other end is gone.
        shutdown(self.stream.as_raw_fd(), Shutdown::Both).ok();
    }
}

/// A bound socket.
pub(super) struct Listener(UnixListener);

impl Drop for Listener {
    fn drop(&mut self) {
        shutdown(self.0.as_raw_fd(), Shutdown::Both).ok();
    }
}

impl Listener {
    pub(super) fn bind(address: &Path) -> io::Result<Self> {
        UnixListener::bind(address).map(Self)
    }

    pub(super) async fn accept(&self) -> io::Result<Line> {
        Ok(Line { stream: self.0.accept().await?.0, _held: None })
    }

    #[cfg(test)]
    pub(super) fn inherited(&self) -> nix::Result<OwnedFd> {
        nix::unistd::dup(&self.0)
    }
}

impl Line {
    pub(super) async fn connect(address: &Path) -> io::Result<Self> {
        Ok(Self { stream: UnixStream::connect(address).await?, _held: None })
    }

    /// This connection, as one of a budget.
    pub(super) fn holding(mut self, held: Held) -> Self {
        self._held = Some(held);
        self
    }

    /// Tells a process that has just connected that there is no connection to spare, without a wait.
    pub(super) fn refuse(&self) -> io::Result<()> {
        memory::send(self.stream.as_raw_fd(), &message(Kind::Alone, 0, None), None)
    }

    /// Refuses processes of other users: abstract addresses have no permissions. Those of this user prove that they can
    /// read the home.
    pub(super) fn check_peer(&self) -> io::Result<()> {
        if is_own_user(self.stream.peer_cred()?.uid(), geteuid().as_raw(), overflow_uid()) {
            return Ok(());
        }
        Err(nonsense("the process at the other end may be of another user"))
    }

    pub(super) async fn send(
        &self,
        limit: Duration,
        kind: Kind,
        group: u32,
        file: Option<&OwnedFd>,
    ) -> io::Result<()> {
        self.send_bytes(limit, &message(kind, group, None), file.map(|file| file.as_raw_fd())).await
    }

    /// Sends a message of the proofs.
    pub(super) async fn send_halves(&self, limit: Duration, kind: Kind, halves: [Half; 2]) -> io::Result<()> {
        self.send_bytes(limit, &message(kind, 0, Some(&halves)), None).await
    }

    async fn send_bytes(
        &self,
        limit: Duration,
        bytes: &[u8; MESSAGE_BYTES],
        file: Option<RawFd>,
    ) -> io::Result<()> {
        let send = || memory::send(self.stream.as_raw_fd(), bytes, file);
        within(limit, self.stream.async_io(Interest::WRITABLE, send)).await
    }

    pub(super) async fn receive(&self) -> io::Result<Message> {
        let receive = || memory::receive(self.stream.as_raw_fd());
        let (bytes, file) = self.stream.async_io(Interest::READABLE, receive).await?;
        let number = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let kind = Kind::ALL.into_iter().find(|kind| *kind as u32 == number(4));
        let Some(kind) = kind.filter(|_| bytes[..4] == MAGIC) else {
            return Err(nonsense("a message of another version"));
        };
        let halves = HALVES_AT.map(|at| std::array::from_fn(|index| bytes[at + index]));
        Ok(Message { kind, group: number(8), halves, file })
    }
}

/// The bytes of a message.
fn message(kind: Kind, group: u32, halves: Option<&[Half; 2]>) -> [u8; MESSAGE_BYTES] {
    let mut bytes = [0u8; MESSAGE_BYTES];
    bytes[..4].copy_from_slice(&MAGIC);
    bytes[4..8].copy_from_slice(&(kind as u32).to_le_bytes());
    bytes[8..12].copy_from_slice(&group.to_le_bytes());
    for (at, half) in HALVES_AT.into_iter().zip(halves.into_iter().flatten()) {
        bytes[at..at + half.len()].copy_from_slice(half);
    }
    bytes
}

/// Whether a peer is a process of this user. The overflow id stands for all users without a number in this namespace.
pub(super) fn is_own_user(peer: u32, own: u32, overflow: u32) -> bool {
    peer == own && peer != overflow
}

/// The id that the kernel shows for users without a number in this namespace.
pub(super) fn overflow_uid() -> u32 {
    static FOUND: LazyLock<u32> = LazyLock::new(|| {
        let text = std::fs::read_to_string("/proc/sys/kernel/overflowuid").ok();
        text.and_then(|text| text.trim().parse().ok()).unwrap_or(OVERFLOW_UID)
    });
    *FOUND
}

pub(super) fn nonsense(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what.to_owned())
}

/// The result of work that ends within a limit.
pub(super) async fn within<T>(limit: Duration, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(limit, work).await.unwrap_or_else(|_| Err(ErrorKind::TimedOut.into()))
}
