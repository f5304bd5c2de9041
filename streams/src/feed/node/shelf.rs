//! Server of shared row groups: the files that it keeps, and the claims of the processes that decode.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit};
use parking_lot::Mutex;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::line::{Kind, Line, Listener, nonsense, within};
use super::{BYTES_MIN, Limits, memory};
use crate::feed::hash::NumberMap;

/// Connections that a server answers at a time, and files that it keeps, each within a quarter of its descriptors.
const CONNECTIONS_MAX: u64 = 1_024;
const FILES_MAX: u64 = 512;
/// Pause of the server when the process has no descriptor for a connection.
const PAUSE: Duration = Duration::from_millis(100);

/// Row groups that the server holds.
pub(super) struct Shelf {
    bytes_max: u64,
    files_max: usize,
    connections_max: usize,
    groups: u32,
    limits: Limits,
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

/// The answer to a question.
pub(super) enum Answer {
    Hit(Arc<OwnedFd>),
    Wait(CancellationToken),
    Decode(Claim),
    Alone,
}

/// The exclusive right to decode a row group, until it is dropped.
pub(super) struct Claim {
    shelf: Arc<Shelf>,
    group: u32,
    done: CancellationToken,
}

impl Shelf {
    pub(super) fn new(bytes_max: u64, groups: u32, limits: Limits) -> Arc<Self> {
        let descriptors = getrlimit(Resource::RLIMIT_NOFILE).map_or(FILES_MAX, |(soft, _)| soft / 4);
        Arc::new(Self {
            bytes_max,
            files_max: descriptors.clamp(1, FILES_MAX) as usize,
            connections_max: descriptors.clamp(1, CONNECTIONS_MAX) as usize,
            groups,
            limits,
            table: Mutex::default(),
        })
    }

    /// The largest file.
    pub(super) fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// Answers a process. One that has waited for a claim does not wait for another.
    pub(super) fn ask(self: &Arc<Self>, group: u32, has_waited: bool) -> Answer {
        let mut table = self.table.lock();
        table.uses += 1;
        let now = table.uses;
        match table.slots.get_mut(&group) {
            Some(Slot::Kept { file, used, .. }) => {
                *used = now;
                Answer::Hit(Arc::clone(file))
            }
            Some(Slot::Claimed(_)) if has_waited => Answer::Alone,
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
    pub(super) fn bytes(&self) -> u64 {
        self.table.lock().bytes
    }
}

impl Table {
    fn keep(&mut self, group: u32, file: OwnedFd, bytes: u64) {
        self.uses += 1;
        let slot = Slot::Kept { file: Arc::new(file), bytes, used: self.uses };
        let before = self.slots.insert(group, slot);
        self.forget(before);
        self.bytes += bytes;
        self.files += 1;
    }

    /// Accounts for a slot that was removed.
    fn forget(&mut self, slot: Option<Slot>) {
        if let Some(Slot::Kept { bytes, .. }) = slot {
            self.bytes -= bytes;
            self.files -= 1;
        }
    }

    /// Evicts the row groups that were asked for least recently until the limits hold.
    fn evict(&mut self, bytes_max: u64, files_max: usize) {
        while self.bytes > bytes_max || self.files > files_max {
            let oldest = self.slots.iter().filter_map(|(group, slot)| match slot {
                Slot::Kept { used, .. } => Some((*used, *group)),
                Slot::Claimed(_) => None,
            });
            let Some((_, group)) = oldest.min() else { return };
            let slot = self.slots.remove(&group);
            self.forget(slot);
        }
    }
}

impl Claim {
    /// Keeps the decoded row group, and lets those that wait have it.
    fn fulfil(self, file: OwnedFd, bytes: u64) {
        let mut table = self.shelf.table.lock();
        table.keep(self.group, file, bytes);
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

/// Empties the shelf at the end of its server, however that ends.
struct Emptied(Arc<Shelf>);

impl Drop for Emptied {
    fn drop(&mut self) {
        *self.0.table.lock() = Table::default();
    }
}

/// Answers connections until `stop` is cancelled, or it is dropped.
pub(super) async fn serve(listener: Listener, shelf: Arc<Shelf>, stop: CancellationToken) {
    // Dropped after the connections.
    let _emptied = Emptied(Arc::clone(&shelf));
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => match accepted {
                Ok(line) if connections.len() < shelf.connections_max => {
                    connections.spawn(answer(line, Arc::clone(&shelf)));
                }
                Ok(_) => {}
                Err(error) => {
                    tracing::debug!(%error, "the shared row groups have no connection to spare");
                    tokio::time::sleep(PAUSE).await;
                }
            },
            Some(_) = connections.join_next() => {}
        }
    }
    drop(listener);
    connections.shutdown().await;
}

async fn answer(line: Line, shelf: Arc<Shelf>) {
    if let Err(error) = converse(&line, &shelf).await {
        tracing::debug!(%error, "a connection for shared row groups ended");
    }
}

async fn converse(line: &Line, shelf: &Arc<Shelf>) -> io::Result<()> {
    let limits = shelf.limits;
    line.check_peer()?;
    let asked = within(limits.answer, line.receive()).await?;
    let has_waited = match asked.kind {
        Kind::Get => false,
        Kind::GetAgain => true,
        _ => return Err(nonsense("a request of another form")),
    };
    let group = asked.group;
    if asked.file.is_some() || group >= shelf.groups {
        return Err(nonsense("a request of another form"));
    }
    let say = |kind| line.send(limits.answer, kind, group, None);
    match shelf.ask(group, has_waited) {
        Answer::Hit(file) => line.send(limits.answer, Kind::Hit, group, Some(&file)).await,
        Answer::Alone => say(Kind::Alone).await,
        Answer::Wait(done) => {
            say(Kind::Wait).await?;
            tokio::select! {
                () = done.cancelled() => {}
                // It says nothing while it waits, so it is gone.
                gone = line.receive() => return gone.and(Err(nonsense("a message from a waiting process"))),
            }
            say(Kind::Done).await
        }
        Answer::Decode(claim) => {
            say(Kind::Decode).await?;
            let put = within(limits.claim, line.receive()).await?;
            let file = put.file.filter(|_| put.kind == Kind::Put && put.group == group);
            let file = file.ok_or_else(|| nonsense("a row group of another form"))?;
            let bytes = memory::check(&file, &(BYTES_MIN..=shelf.bytes_max))?;
            claim.fulfil(file, bytes);
            say(Kind::Kept).await
        }
    }
}
