//! Server of shared row groups: the files that it keeps, and the claims of the processes that decode.
//!
//! It answers a process once that has proved that it can read the home. Files and connections count against the budget of
//! the process. Without a spare connection the answer is [`Kind::Alone`]. Without a spare file the server evicts its own
//! oldest ones.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use nix::libc;
use parking_lot::Mutex;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::budget::{Budget, Descriptors, Held};
use super::line::{Kind, Line, Listener, nonsense, within};
use super::proof::{self, Key};
use super::{BYTES_MIN, Limits, memory};
use crate::feed::hash::NumberMap;

/// Pause of the server when the process has no descriptor for a connection.
const PAUSE: Duration = Duration::from_millis(100);

/// Row groups that the server holds.
pub(super) struct Shelf {
    bytes_max: u64,
    groups: u32,
    limits: Limits,
    key: Key,
    descriptors: Descriptors,
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
        file: Arc<KeptFile>,
        bytes: u64,
        used: u64,
    },
    /// A process decodes it; the token is cancelled at the end of the claim.
    Claimed(CancellationToken),
}

/// A file of a server, also while it is sent.
pub(super) struct KeptFile {
    file: OwnedFd,
    /// Given back after the file is closed.
    _held: Held,
}

/// The answer to a question.
pub(super) enum Answer {
    Hit(Arc<KeptFile>),
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
    pub(super) fn new(
        bytes_max: u64,
        groups: u32,
        limits: Limits,
        key: Key,
        descriptors: Descriptors,
    ) -> Arc<Self> {
        Arc::new(Self { bytes_max, groups, limits, key, descriptors, table: Mutex::default() })
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
                // Other servers of this process keep as many files as it may have.
                if table.files == 0 && self.descriptors.files.is_spent() {
                    return Answer::Alone;
                }
                let done = CancellationToken::new();
                table.slots.insert(group, Slot::Claimed(done.clone()));
                Answer::Decode(Claim { shelf: Arc::clone(self), group, done })
            }
        }
    }

    /// Drops the files after an error from the lack of descriptors. Claims stay.
    pub(super) fn relieve(&self, error: &io::Error) {
        if !matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) {
            return;
        }
        let mut table = self.table.lock();
        table.slots.retain(|_, slot| matches!(slot, Slot::Claimed(_)));
        let files = std::mem::take(&mut table.files);
        table.bytes = 0;
        drop(table);
        if files > 0 {
            tracing::warn!(%error, files, "shared row groups were dropped; raise the limit of open files (ulimit -n)");
        }
    }

    /// Bytes that are held.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> u64 {
        self.table.lock().bytes
    }
}

impl Table {
    fn keep(&mut self, group: u32, file: KeptFile, bytes: u64) {
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

    /// The right to keep one more file. Evicts those that were asked for least recently until there is one.
    fn hold(&mut self, files: &Arc<Budget>) -> Option<Held> {
        loop {
            if let Some(held) = files.hold() {
                return Some(held);
            }
            if !self.evict_oldest() {
                return None;
            }
        }
    }

    /// Evicts the row group that was asked for least recently. False where there is none.
    fn evict_oldest(&mut self) -> bool {
        let oldest = self.slots.iter().filter_map(|(group, slot)| match slot {
            Slot::Kept { used, .. } => Some((*used, *group)),
            Slot::Claimed(_) => None,
        });
        let Some((_, group)) = oldest.min() else { return false };
        let slot = self.slots.remove(&group);
        self.forget(slot);
        true
    }
}

impl Claim {
    /// Keeps the decoded row group, and lets those that wait have it. False where the process may have no file more.
    pub(super) fn fulfil(self, file: OwnedFd, bytes: u64) -> bool {
        // Unlocked before the claim ends, which locks it again.
        let shelf = Arc::clone(&self.shelf);
        let mut table = shelf.table.lock();
        let Some(held) = table.hold(&shelf.descriptors.files) else { return false };
        table.keep(self.group, KeptFile { file, _held: held }, bytes);
        while table.bytes > shelf.bytes_max && table.evict_oldest() {}
        true
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
                Ok(line) => match shelf.descriptors.connections.hold() {
                    Some(held) => {
                        connections.spawn(answer(line.holding(held), Arc::clone(&shelf)));
                    }
                    None => refuse(&line),
                },
                Err(error) => {
                    shelf.relieve(&error);
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

/// Lets a process decode on its own, at once: silence would cost it a wait and its next questions.
fn refuse(line: &Line) {
    if let Err(error) = line.refuse() {
        tracing::debug!(%error, "a connection for shared row groups was refused without an answer");
    }
}

async fn answer(line: Line, shelf: Arc<Shelf>) {
    if let Err(error) = converse(&line, &shelf).await {
        shelf.relieve(&error);
        tracing::debug!(%error, "a connection for shared row groups ended");
    }
}

async fn converse(line: &Line, shelf: &Arc<Shelf>) -> io::Result<()> {
    let limits = shelf.limits;
    line.check_peer()?;
    proof::admit(line, &shelf.key, limits.answer).await?;
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
        Answer::Hit(file) => line.send(limits.answer, Kind::Hit, group, Some(&file.file)).await,
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
            let is_kept = claim.fulfil(file, bytes);
            say(if is_kept { Kind::Kept } else { Kind::Alone }).await
        }
    }
}
