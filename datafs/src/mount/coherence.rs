//! Cache coherence between the kernel and a live volume. A record holds what the kernel caches; notifications
//! revoke it after changes by other mounts.
//!
//! The kernel may cache attributes without limit and names for a while. When others change something, the mount
//! revokes it by a notification soon after their commit. Names are expired, which makes the kernel look them up
//! again. An invalidation would remove a directory from the kernel's tree, with the mounts on it and the
//! working directories of processes in it. A kernel that cannot expire names (before Linux 6.2) caches nothing.
//!
//! A notification may be too late for a program that opens a file, so an open checks the record. A file is
//! stale if it has lost a name since the kernel was told. So is one whose owner, permissions or access control
//! list have changed since. The mount then first drops attributes and pages of other versions and returns
//! ESTALE. The kernel looks the path up again and checks access.
//!
//! A file found under a new name stays in doubt: the kernel may still reach it by the older name. An open walks
//! its path again until the lifetime of that name is over.
//!
//! The same holds for changes of names: the kernel moves and removes the node that it knows under a name. Where
//! the name leads elsewhere by now, the mount refuses the change inside its transaction
//! ([`Coherence::is_told`]). It refuses a change of attributes by path where the file has lost a name
//! ([`Coherence::has_lost_name`]).
//!
//! A name that the kernel told another thread a moment ago is in doubt: the kernel may have decided a change of
//! it by its previous meaning. The mount refuses such a change once as well. Where the doubt remains on the
//! retry, the mount expires the resulting names.
//!
//! A notification may overtake the reply that it revokes, and the kernel then keeps the reply. So the mount
//! repeats the notification a little later for recent replies.
//!
//! When the mount cannot tell all that others have changed, it revokes all attributes. Names of which it was not
//! told stay for the rest of their lifetime. It is short for directories, on which every path below depends.

mod checks;
pub(super) mod inode_table;
pub(super) mod lifetime;
pub(super) mod removed;
pub(super) mod stale_retry;

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Write as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fuser::{INodeNo, Notifier};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::convert::Inodes;
use crate::error::Result;
use crate::fs::View;
use crate::fs::watch::Watch;
use crate::meta::changes::Changed;
use crate::meta::keys;
use crate::node::{Attr, Node};
use inode_table::{EVERY_THREAD, InodeTable, name_stamp, stamp};
use lifetime::IN_FLIGHT;
use removed::Removed;
use stale_retry::StaleRetries;

/// After an unknown change the kernel may cache no attributes for this time. A stream of unknown changes then
/// costs no more than a request for each access.
const DISTRUST: Duration = Duration::from_secs(1);
/// Most queued notifications. With more, the mount treats everything as changed.
const QUEUE_MAX: usize = 65_536;
/// Delay, and most delays, of a notification while a thread walks a path to refresh a size.
const PUT_OFF: Duration = Duration::from_millis(5);
const PUT_OFF_TIMES: u32 = 40;
/// Longest wait for a notification in progress. A notification of contents waits for reads in progress.
const NOTIFIED_MAX: Duration = Duration::from_millis(100);
/// The FUSE notification code of a name, and its flag that expires the name instead of invalidating it.
const NOTIFY_INVAL_ENTRY: i32 = 3;
const EXPIRE_ONLY: u32 = 1;

/// The record of what the kernel of one mount caches, and the thread that revokes it.
#[derive(Debug)]
pub(super) struct Coherence {
    inodes: Inodes,
    volume: u64,
    writer: u64,
    /// Nodes of the live tree that the kernel knows.
    known: Mutex<InodeTable>,
    /// Signals that the kernel has processed a notification.
    notified: Condvar,
    /// Threads that walk a path a second time.
    pub(super) retries: StaleRetries,
    /// Whether the kernel can expire names.
    expires: AtomicBool,
    /// Whether the kernel may cache replies now.
    trusted: AtomicBool,
    /// Counts changes by others. The kernel must not cache a reply whose data was read before the last change.
    changes: AtomicU64,
    queue: Mutex<Queue>,
    arrived: Condvar,
    notifier: OnceLock<Notifier>,
    /// The mount's FUSE device, for a notification flag that the library does not support.
    device: OnceLock<File>,
    start: Instant,
    running: Mutex<Option<(Watch, JoinHandle<()>)>>,
}

#[derive(Debug, Default)]
struct Queue {
    news: VecDeque<News>,
    /// Notifications to repeat, oldest first.
    again: VecDeque<(Instant, News)>,
    /// Delayed notifications with the number of their delays, oldest first: see [`Coherence::say_or_put_off`].
    later: VecDeque<(Instant, u32, News)>,
    anything: bool,
    stopped: bool,
}

/// A notification: cached data that the kernel must drop.
#[derive(Debug, Clone, PartialEq, Eq)]
enum News {
    Attributes(u64),
    Contents(u64),
    Name(u64, Vec<u8>),
}

/// An open file that another server has opened.
///
/// Without need the kernel is not told to drop its pages: that notification waits for reads in progress, and a server
/// that is killed meanwhile does not end before the next one, which waits for its end, has answered them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Doubt {
    pub(super) node: Node,
    /// The version of the contents that the kernel may have pages of.
    pub(super) data_version: u64,
}

/// The result of checking the kernel's cached data at an open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kept {
    /// The path may lead elsewhere, or the kernel has an old size, by which it bounds copies, mappings and
    /// seeks without a request. A lookup refreshes both.
    Stale,
    /// The pages are those of the file.
    Pages,
    /// The kernel's pages are outdated or of unknown version.
    Nothing,
    /// The kernel has checked access by an owner or a mode that others have changed, and the present ones deny
    /// the open.
    Denied,
}

impl Coherence {
    pub(super) fn new(view: &View, inodes: Inodes) -> Coherence {
        Coherence {
            inodes,
            volume: view.volume,
            writer: view.writer(),
            known: Mutex::default(),
            notified: Condvar::new(),
            retries: StaleRetries::default(),
            expires: AtomicBool::new(false),
            trusted: AtomicBool::new(false),
            changes: AtomicU64::new(0),
            queue: Mutex::default(),
            arrived: Condvar::new(),
            notifier: OnceLock::new(),
            device: OnceLock::new(),
            start: Instant::now(),
            running: Mutex::default(),
        }
    }

    /// Notes whether the kernel can expire names.
    pub(super) fn set_expires(&self, expires: bool) {
        self.expires.store(expires, Ordering::Relaxed);
    }

    /// Starts to listen to changes by others, and lets the kernel cache from then on. Calls `woken` at each
    /// change.
    pub(super) fn start(
        self: &Arc<Self>,
        view: &View,
        notifier: Notifier,
        device: File,
        woken: impl Fn() + Send + Sync + 'static,
    ) -> Result<()> {
        // Set only here, once.
        let _ = self.notifier.set(notifier);
        let _ = self.device.set(device);
        let to = Arc::clone(self);
        let watch = view.watch(Arc::new(move |changed| {
            to.heard(changed);
            woken();
        }))?;
        let own = Arc::clone(self);
        let thread = std::thread::Builder::new()
            .name("datafs-coherence".into())
            .spawn(move || own.run())
            .map_err(|e| crate::error::Error::io("start the thread of", "a mount", e))?;
        *self.running.lock() = Some((watch, thread));
        self.trust();
        Ok(())
    }

    /// An earlier server has told the kernel of nodes that the record does not have. To be called before
    /// [`Coherence::start`].
    pub(super) fn inherits(&self) {
        self.known.lock().inherits();
    }

    /// Makes the kernel drop attributes of open files and of the root, and the pages of those files that were written:
    /// others may have done so while no server listened. To be called after [`Coherence::start`], which hears of later
    /// changes.
    pub(super) fn doubts(&self, view: &View, open: &[Doubt]) {
        let caught_up = view.catch_up().is_ok();
        let news: Vec<_> = open
            .iter()
            .filter(|doubt| doubt.node.is_live())
            .map(|doubt| {
                // A file that cannot be looked at has lost its name, or worse.
                let version = view.getattr(doubt.node).ok().map(|attr| attr.data_version);
                match caught_up && version == Some(doubt.data_version) {
                    true => News::Attributes(doubt.node.ino),
                    false => News::Contents(doubt.node.ino),
                }
            })
            .collect();
        let mut queue = self.queue.lock();
        queue.news.push_back(News::Attributes(Node::LIVE_ROOT.ino));
        queue.news.extend(news);
        self.arrived.notify_all();
    }

    fn trust(&self) {
        self.trusted.store(self.expires.load(Ordering::Relaxed), Ordering::Release);
    }

    /// Ends the thread. The kernel must have ended the session, or may cache nothing any more.
    pub(super) fn stop(&self) {
        self.trusted.store(false, Ordering::Release);
        let running = self.running.lock().take();
        let Some((watch, thread)) = running else { return };
        drop(watch);
        self.queue.lock().stopped = true;
        self.arrived.notify_all();
        if thread.join().is_err() {
            tracing::error!("the thread that tells the kernel of changes has panicked");
        }
        self.retries.clear();
    }

    /// Makes the thread compute its next deadline again.
    pub(super) fn wake(&self) {
        drop(self.queue.lock());
        self.arrived.notify_all();
    }

    /// The count of changes by others. To be taken before reading data for a reply.
    pub(super) fn moment(&self) -> u64 {
        self.changes.load(Ordering::SeqCst)
    }

    fn now_ms(&self) -> u32 {
        // Wraps after 49 days, which makes one old answer look fresh.
        self.start.elapsed().as_millis() as u32
    }

    /// Notes attributes of a reply, read since `moment`. With `named`, also notes that the kernel knows the
    /// node by this name. Returns whether the kernel may cache the attributes.
    pub(super) fn answers(&self, attr: &Attr, moment: u64, named: Option<Telling<'_>>) -> bool {
        self.answering(moment).note(attr, named)
    }

    /// Begins to note the entries of one reply, read since `moment`.
    pub(super) fn answering(&self, moment: u64) -> Answering<'_> {
        let answered_ms = self.now_ms();
        Answering { coherence: self, known: self.known.lock(), moment, answered_ms }
    }

    /// The kernel has dropped lookups of a node.
    pub(super) fn forget(&self, node: Node, lookups: u64) {
        self.known.lock().forget(node.ino, lookups);
    }

    /// Reverts the note of a name that was in a reply but that the kernel ignores.
    pub(super) fn untell(&self, node: Node) {
        self.known.lock().untell(node.ino);
    }

    /// Notes a node whose last name this mount has removed.
    pub(super) fn removes(&self, removed: Removed) {
        self.known.lock().remove(removed);
    }

    /// The last state of a node that this mount has removed, while the kernel knows the node.
    pub(super) fn removed(&self, node: Node) -> Option<Removed> {
        self.known.lock().removed(node.ino).filter(|_| node.is_live())
    }

    /// The kernel has changed attributes itself, and so keeps the attributes of the reply.
    pub(super) fn changes_attributes(&self, node: Node) {
        let mut known = self.known.lock();
        // The kernel drops the access control list together with the mode.
        known.drops_list(node.ino);
        if let Some(entry) = known.get_mut(node.ino) {
            let access = entry.access;
            entry.settle_access(access);
        }
    }

    /// A program has closed a file that it opened with this version of its contents.
    pub(super) fn closes(&self, node: Node, data_version: u64) {
        if let Some(entry) = self.known.lock().get_mut(node.ino) {
            entry.pages_settled |= entry.data_version == data_version;
        }
    }

    /// A file is new, so the kernel has no pages of it.
    pub(super) fn creates(&self, attr: &Attr) {
        if let Some(entry) = self.known.lock().get_mut(attr.node.ino) {
            (entry.data_version, entry.pages_settled) = (attr.data_version, true);
        }
    }

    /// Whether all changes of a file's contents since a version went through this mount's kernel.
    fn is_own(&self, since: u64, attr: &Attr) -> bool {
        attr.data_version == since || attr.writer == self.writer && attr.writer_since <= since
    }

    /// Whether the kernel's pages of a file match these attributes. Revokes the kernel's attributes if they
    /// differ.
    pub(super) fn has_pages(&self, attr: &Attr) -> bool {
        let mut known = self.known.lock();
        let Some(entry) = known.get_mut(attr.node.ino) else { return false };
        if !entry.pages_settled || !self.is_own(entry.data_version, attr) {
            return false;
        }
        entry.data_version = attr.data_version;
        let ctime = stamp(attr.ctime);
        let outdated = std::mem::replace(&mut entry.ctime, ctime) != ctime;
        drop(known);
        if outdated {
            self.say(&News::Attributes(attr.node.ino));
        }
        true
    }

    /// Makes the kernel drop a file's attributes and pages. Not for a serving thread: the call waits for reads
    /// in progress.
    pub(super) fn drops(&self, attr: &Attr) {
        self.say_or_put_off(&News::Contents(attr.node.ino), PUT_OFF_TIMES);
        if let Some(entry) = self.known.lock().get_mut(attr.node.ino) {
            (entry.data_version, entry.pages_settled) = (attr.data_version, true);
            entry.ctime = stamp(attr.ctime);
        }
    }

    /// Tells the kernel that a file is at least as long as these attributes say; `last` is its last byte. The
    /// kernel drops an attribute reply when another notification arrives meanwhile, and then reads no further
    /// than the old size. Like [`Coherence::drops`], not for a serving thread.
    pub(super) fn reaches(&self, attr: &Attr, last: u8) {
        let Some((notifier, end)) = self.notifier.get().zip(attr.size.checked_sub(1)) else { return };
        if let Err(error) = notifier.store(self.inodes.ino(attr.node), end, &[last]) {
            tracing::debug!(%error, "telling the kernel of the length of a file");
        }
    }

    /// An unprivileged change may have cleared the set-user-ID and set-group-ID bits of a file. After most such
    /// changes the kernel refreshes size and times, but never the mode.
    pub(super) fn drops_privileges(&self, node: Node) {
        let had = self.known.lock().get_mut(node.ino).is_some_and(|entry| std::mem::take(&mut entry.set_id));
        if had {
            // A notification of attributes alone does not block, so a serving thread may send it.
            self.say(&News::Attributes(node.ino));
        }
    }

    /// A file was written with direct I/O. A mapping may have filled pages of it meanwhile.
    pub(super) fn outdates(&self, node: Node) {
        if let Some(entry) = self.known.lock().get_mut(node.ino) {
            entry.pages_settled = false;
        }
        let mut queue = self.queue.lock();
        if queue.news.len() < QUEUE_MAX {
            queue.news.push_back(News::Contents(node.ino));
            self.arrived.notify_all();
        }
    }

    pub(super) fn heard(&self, changed: &Changed) {
        // Before the record is read: see `answers`.
        self.changes.fetch_add(1, Ordering::SeqCst);
        let mut queue = self.queue.lock();
        queue.anything |= changed.anything;
        let own = changed.records.iter().filter(|(volume, _)| *volume == self.volume);
        for news in own.filter_map(|(_, record)| News::of(record)) {
            if queue.news.len() >= QUEUE_MAX {
                queue.anything = true;
                break;
            }
            queue.news.push_back(news);
        }
        if queue.anything {
            // At once: the kernel may not cache data that is read from now on.
            self.trusted.store(false, Ordering::Release);
        }
        self.arrived.notify_all();
    }

    fn run(&self) {
        let mut distrusts_until: Option<Instant> = None;
        loop {
            let (again, later, news, anything) = {
                let mut queue = self.queue.lock();
                loop {
                    if queue.stopped {
                        return;
                    }
                    let now = Instant::now();
                    let given_up = self.retries.due();
                    if !queue.news.is_empty()
                        || queue.anything
                        || queue.again.front().is_some_and(|(due, _)| *due <= now)
                        || queue.later.front().is_some_and(|(due, ..)| *due <= now)
                        || given_up.is_some_and(|due| due <= now)
                    {
                        let again = queue.again.partition_point(|(due, _)| *due <= now);
                        let again: Vec<_> = queue.again.drain(..again).collect();
                        let later = queue.later.partition_point(|(due, ..)| *due <= now);
                        let later: Vec<_> = queue.later.drain(..later).collect();
                        let news = std::mem::take(&mut queue.news);
                        break (again, later, news, std::mem::take(&mut queue.anything));
                    }
                    if distrusts_until.is_some_and(|until| until <= now) {
                        distrusts_until = None;
                        self.trust();
                    }
                    let again = queue.again.front().map(|(due, _)| *due);
                    let later = queue.later.front().map(|(due, ..)| *due);
                    match again.into_iter().chain(later).chain(distrusts_until).chain(given_up).min() {
                        Some(due) => drop(self.arrived.wait_until(&mut queue, due)),
                        None => self.arrived.wait(&mut queue),
                    }
                }
            };
            self.retries.give_up(Instant::now());
            if anything {
                // The kernel has cached nothing since the last revocation, unless that period is over.
                if distrusts_until.is_none() {
                    self.take_everything_back();
                }
                distrusts_until = Some(Instant::now() + DISTRUST);
            }
            for (_, news) in again {
                self.say(&news);
            }
            let mut last = None;
            let later = later.into_iter().map(|(_, times, news)| (times, news));
            for (times, news) in later.chain(news.into_iter().map(|news| (0, news))) {
                if last.as_ref() != Some(&news) {
                    self.take_back(&news, times);
                }
                last = Some(news);
            }
        }
    }

    /// Sends one notification, and repeats it later if the reply that it revokes may still be in flight.
    fn take_back(&self, news: &News, times: u32) {
        let of = match news {
            News::Attributes(ino) | News::Contents(ino) | News::Name(ino, _) => *ino,
        };
        let answered_ms = {
            let known = self.known.lock();
            match known.get(of) {
                Some(known) => known.answered_ms,
                // Replies about a node outside the full table had lifetime zero.
                None if known.was_crowded() => {
                    drop(known);
                    return self.say_or_put_off(news, times);
                }
                // The kernel does not know the node. Later replies already contain the change.
                None => return,
            }
        };
        self.say_or_put_off(news, times);
        // A reply with a name does not update `answered_ms` of the directory.
        let age = Duration::from_millis(u64::from(self.now_ms().wrapping_sub(answered_ms)));
        if matches!(news, News::Name(..)) || age < IN_FLIGHT {
            let mut queue = self.queue.lock();
            let again = (Instant::now() + IN_FLIGHT, news.clone());
            if !queue.again.iter().rev().take(8).any(|(_, later)| later == news)
                && queue.again.len() < QUEUE_MAX
            {
                queue.again.push_back(again);
            }
        }
    }

    fn take_everything_back(&self) {
        let all: Vec<u64> = self.known.lock().inos().collect();
        for ino in all {
            self.say(&News::Attributes(ino));
        }
    }

    fn say(&self, news: &News) {
        self.say_or_put_off(news, 0);
    }

    /// Sends a notification. Delays it while a thread walks a path to refresh the size of this file: the kernel
    /// would drop the reply with the size. The limit is [`PUT_OFF_TIMES`] delays.
    fn say_or_put_off(&self, news: &News, times: u32) {
        let Some((notifier, device)) = self.notifier.get().zip(self.device.get()) else { return };
        let (News::Attributes(of) | News::Contents(of) | News::Name(of, _)) = news;
        let ino = self.inodes.ino(Node { snapshot: 0, ino: *of });
        let is_name = matches!(news, News::Name(..));
        if !is_name {
            let mut known = self.known.lock();
            // Under the lock: a thread that is about to walk then waits for notifications that began before.
            if times < PUT_OFF_TIMES && self.retries.walks(Node { snapshot: 0, ino: *of }) {
                drop(known);
                let later = (Instant::now() + PUT_OFF, times + 1, news.clone());
                self.queue.lock().later.push_back(later);
                self.arrived.notify_all();
                return;
            }
            known.notifies(*of);
        }
        let said = match news {
            News::Attributes(_) => notifier.inval_inode(ino, -1, 0),
            News::Contents(_) => notifier.inval_inode(ino, 0, 0),
            // This kernel caches no names.
            News::Name(..) if !self.expires.load(Ordering::Relaxed) => Ok(()),
            News::Name(_, name) => expire(device, ino, name),
        };
        if let Err(error) = said {
            tracing::debug!(%error, ?news, "telling the kernel of a change");
        }
        if !is_name {
            self.known.lock().notified(*of);
            self.notified.notify_all();
        }
    }
}

/// A name of a node in a reply to the kernel.
#[derive(Debug, Clone, Copy)]
pub(super) struct Telling<'n> {
    parent: Node,
    name: &'n OsStr,
    thread: u32,
}

impl<'n> Telling<'n> {
    /// The kernel holds the directory lock until it has processed the reply.
    pub(super) fn locked((parent, name): (Node, &'n OsStr)) -> Telling<'n> {
        Telling { parent, name, thread: EVERY_THREAD }
    }

    /// A reply to a lookup by a thread. The kernel may process it without the directory lock.
    pub(super) fn looked_up((parent, name): (Node, &'n OsStr), thread: u32) -> Telling<'n> {
        Telling { parent, name, thread }
    }
}

/// The entries of one reply while they are noted. Holds the lock of the record.
pub(super) struct Answering<'a> {
    coherence: &'a Coherence,
    known: MutexGuard<'a, InodeTable>,
    moment: u64,
    answered_ms: u32,
}

impl Answering<'_> {
    /// See [`Coherence::answers`].
    pub(super) fn note(&mut self, attr: &Attr, named: Option<Telling<'_>>) -> bool {
        let coherence = self.coherence;
        let named =
            named.map(|told| (name_stamp(told.parent.ino, told.name, attr.names_version), told.thread));
        self.known.note(attr, named, self.answered_ms)
            // After the note, so that either this load sees a change or the change's notification sees the
            // note.
            && coherence.trusted.load(Ordering::Acquire)
            && coherence.changes.load(Ordering::SeqCst) == self.moment
    }
}

impl News {
    fn of(record: &[u8]) -> Option<News> {
        if let Some((parent, name)) = keys::child_of(record) {
            return Some(News::Name(parent, name.to_vec()));
        }
        let ino = keys::ino_of(record)?;
        Some(if keys::is_contents(record) { News::Contents(ino) } else { News::Attributes(ino) })
    }
}

/// Expires a name: the kernel looks it up before it uses it again.
fn expire(mut device: &File, parent: INodeNo, name: &[u8]) -> std::io::Result<()> {
    // At most 255 bytes.
    let name_len = name.len() as u32;
    // The header of a reply (length, code, and request 0, because it answers no request), the notification, the
    // name.
    let len = 16 + 16 + name_len + 1;
    let mut message = Vec::with_capacity(len as usize);
    message.extend_from_slice(&len.to_ne_bytes());
    message.extend_from_slice(&NOTIFY_INVAL_ENTRY.to_ne_bytes());
    message.extend_from_slice(&0u64.to_ne_bytes());
    message.extend_from_slice(&parent.0.to_ne_bytes());
    message.extend_from_slice(&name_len.to_ne_bytes());
    message.extend_from_slice(&EXPIRE_ONLY.to_ne_bytes());
    message.extend_from_slice(name);
    message.push(0);
    match device.write_all(&message) {
        // The kernel does not know the name.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        written => written,
    }
}
