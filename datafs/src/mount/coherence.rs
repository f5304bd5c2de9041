//! What the kernel keeps of a live volume, and how it is told to forget.
//!
//! Attributes are given to the kernel for good and names for a while; what others change is taken back from it by
//! notifications, soon after their commit. Names are expired, which makes the kernel look them up again: it would
//! take an invalidated directory out of its tree, with what is mounted on it and as the working directory of
//! processes. A kernel that cannot expire names (before Linux 6.2) keeps nothing.
//!
//! A notification may be too late for a program that opens a file, so opening looks for itself: a file that has lost
//! a name, or has another owner, other permissions or another access control list, since the kernel was told is refused
//! as stale. The kernel then looks the path up again and checks. Attributes and pages of other versions are dropped
//! first.
//!
//! A file that is found under a new name keeps its doubt: the older name may still lead to it in the kernel. An open
//! walks its path again until that name's lifetime is over.
//!
//! The same holds for changes. The kernel moves and removes what it takes a name for: where the name leads elsewhere
//! by now, the change is refused inside its transaction ([`Coherence::is_told`]). A change of attributes by path is
//! refused where the file has lost a name ([`Coherence::has_lost_name`]).
//!
//! A change that another thread was told the name for a moment ago is refused once as well: the kernel may still go by
//! what the name was before. Where it may do so nevertheless, the resulting names are expired.
//!
//! A notification may overtake the answer that it should take back, which the kernel then keeps. So
//! whatever was answered shortly before is taken back once more a little later.
//!
//! Where it is not known what others have changed, all attributes are taken back. Names stay for the rest of their
//! lifetime, which is short for directories: every path below one depends on it.

mod checks;

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

use super::answer::FOREVER;
use super::convert::Inodes;
use super::inode_table::{EVERY_THREAD, InodeTable, name_stamp, stamp};
use super::removed::Removed;
use super::stale_retry::StaleRetries;
use crate::error::Result;
use crate::fs::{Attr, FileKind, Node};
use crate::meta::changes::Changed;
use crate::meta::keys;
use crate::view::View;
use crate::watch::Watch;

/// An answer that is older than this has surely arrived.
pub(super) const IN_FLIGHT: Duration = Duration::from_millis(100);
/// After something unknown was changed nothing is given to the kernel for good for this long, so that a
/// stream of such news costs no more than asking each time.
const DISTRUST: Duration = Duration::from_secs(1);
/// Changes that wait to be passed on; beyond, anything is taken to be changed.
const QUEUE_MAX: usize = 65_536;
/// How long the kernel keeps the name of a directory without a look-up, which costs about 15 µs.
const DIRECTORY_NAME_LIFETIME: Duration = Duration::from_secs(2);
/// The same of anything else. An open checks whether a file has lost a name.
const NAME_LIFETIME: Duration = Duration::from_secs(60);
/// For how long, and how often, a notification is put off while a thread walks a path to bring a size.
const PUT_OFF: Duration = Duration::from_millis(5);
const PUT_OFF_TIMES: u32 = 40;
/// Longest wait for a notification under way. One of contents waits for reads under way itself.
const NOTIFIED_MAX: Duration = Duration::from_millis(100);
/// The notification of a name, and its flag that expires the name instead of invalidating it.
const NOTIFY_INVAL_ENTRY: i32 = 3;
const EXPIRE_ONLY: u32 = 1;

/// What one mount has given to the kernel.
#[derive(Debug)]
pub(super) struct Coherence {
    inodes: Inodes,
    volume: u64,
    writer: u64,
    /// Nodes of the live tree that the kernel knows.
    known: Mutex<InodeTable>,
    /// A notification has arrived there.
    notified: Condvar,
    /// Who walks a path a second time.
    pub(super) retries: StaleRetries,
    /// Whether the kernel can expire names.
    expires: AtomicBool,
    /// Whether what is answered now may be kept.
    trusted: AtomicBool,
    /// Counts changes by others: an answer that was read before one must not be kept.
    changes: AtomicU64,
    queue: Mutex<Queue>,
    arrived: Condvar,
    notifier: OnceLock<Notifier>,
    /// The mount's own device, for the flag of a notification that the library does not know.
    device: OnceLock<File>,
    start: Instant,
    running: Mutex<Option<(Watch, JoinHandle<()>)>>,
}

#[derive(Debug, Default)]
struct Queue {
    news: VecDeque<News>,
    /// To be said again, oldest first.
    again: VecDeque<(Instant, News)>,
    /// Put off so many times, oldest first: see [`Coherence::say_or_put_off`].
    later: VecDeque<(Instant, u32, News)>,
    anything: bool,
    stopped: bool,
}

/// Something to take back.
#[derive(Debug, Clone, PartialEq, Eq)]
enum News {
    Attributes(u64),
    Contents(u64),
    Name(u64, Vec<u8>),
}

/// What an open finds out about what the kernel has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kept {
    /// A path that may lead elsewhere, or an old size, by which it bounds copies, mappings and seeks without asking. A
    /// look-up brings both.
    Stale,
    /// The pages are those of the file.
    Pages,
    /// They are not, or nobody knows.
    Nothing,
    /// It has decided by an owner or a mode that others have changed, and the present ones do not allow the open.
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

    /// Starts listening to what others change, and with that trusting the kernel's memory. `woken` is
    /// called at each change.
    pub(super) fn start(
        self: &Arc<Self>,
        view: &View,
        notifier: Notifier,
        device: File,
        woken: impl Fn() + Send + Sync + 'static,
    ) -> Result<()> {
        // Set here alone, once.
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

    fn trust(&self) {
        self.trusted.store(self.expires.load(Ordering::Relaxed), Ordering::Release);
    }

    /// Ends the thread. The kernel must be gone, or not trusted any more.
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

    /// Has the thread look when it has something to do next.
    pub(super) fn wake(&self) {
        drop(self.queue.lock());
        self.arrived.notify_all();
    }

    /// To be taken before something is read that is going to be answered.
    pub(super) fn moment(&self) -> u64 {
        self.changes.load(Ordering::SeqCst)
    }

    fn now_ms(&self) -> u32 {
        // Wraps after 49 days, which makes one old answer look fresh.
        self.start.elapsed().as_millis() as u32
    }

    /// Notes attributes that are going to be answered, read since `moment`; with a name also that the kernel knows the
    /// node by that. Returns whether it may keep them.
    pub(super) fn answers(&self, attr: &Attr, moment: u64, named: Option<Telling<'_>>) -> bool {
        self.answering(moment).note(attr, named)
    }

    /// Notes what is going to be answered together, read since `moment`.
    pub(super) fn answering(&self, moment: u64) -> Answering<'_> {
        let answered_ms = self.now_ms();
        Answering { coherence: self, known: self.known.lock(), moment, answered_ms }
    }

    /// The kernel has dropped looks-up of a node.
    pub(super) fn forget(&self, node: Node, lookups: u64) {
        self.known.lock().forget(node.ino, lookups);
    }

    /// The kernel was answered a name that it does not take note of.
    pub(super) fn untell(&self, node: Node) {
        self.known.lock().untell(node.ino);
    }

    /// Notes a node whose last name this mount has removed.
    pub(super) fn removes(&self, removed: Removed) {
        self.known.lock().remove(removed);
    }

    /// What a node was that this mount has removed, while the kernel knows it.
    pub(super) fn removed(&self, node: Node) -> Option<Removed> {
        self.known.lock().removed(node.ino).filter(|_| node.is_live())
    }

    /// The kernel has changed attributes itself: it does not drop the answer to that.
    pub(super) fn changes_attributes(&self, node: Node) {
        let mut known = self.known.lock();
        // With the mode it has dropped the access control list.
        known.drops_list(node.ino);
        if let Some(entry) = known.get_mut(node.ino) {
            let access = entry.access;
            entry.settle_access(access);
        }
    }

    /// A file that was opened with this version of its contents is closed.
    pub(super) fn closes(&self, node: Node, data_version: u64) {
        if let Some(entry) = self.known.lock().get_mut(node.ino) {
            entry.pages_settled |= entry.data_version == data_version;
        }
    }

    /// A file is new: there are no pages of it.
    pub(super) fn creates(&self, attr: &Attr) {
        if let Some(entry) = self.known.lock().get_mut(attr.node.ino) {
            (entry.data_version, entry.pages_settled) = (attr.data_version, true);
        }
    }

    /// Whether all changes of a file's contents since a version went through this mount's kernel.
    fn is_own(&self, since: u64, attr: &Attr) -> bool {
        attr.data_version == since || attr.writer == self.writer && attr.writer_since <= since
    }

    /// Whether the kernel's pages of a file are those that it has with these attributes. Other
    /// attributes are taken from it.
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

    /// Takes a file's attributes and pages from the kernel. To be called on a thread that does not serve:
    /// it waits for reads that are under way.
    pub(super) fn drops(&self, attr: &Attr) {
        self.say_or_put_off(&News::Contents(attr.node.ino), PUT_OFF_TIMES);
        if let Some(entry) = self.known.lock().get_mut(attr.node.ino) {
            (entry.data_version, entry.pages_settled) = (attr.data_version, true);
            entry.ctime = stamp(attr.ctime);
        }
    }

    /// Tells the kernel that a file is at least as long as these attributes say: `last` is its last byte.
    /// Where it was told before to ask for the attributes, it drops the answer when it is told of another
    /// change meanwhile, and then reads no further than it knew. As [`Coherence::drops`] not for a thread
    /// that serves.
    pub(super) fn reaches(&self, attr: &Attr, last: u8) {
        let Some((notifier, end)) = self.notifier.get().zip(attr.size.checked_sub(1)) else { return };
        if let Err(error) = notifier.store(self.inodes.ino(attr.node), end, &[last]) {
            tracing::debug!(%error, "telling the kernel of the length of a file");
        }
    }

    /// A change without privilege may have taken the set-user-ID and set-group-ID bits of a file. The kernel takes
    /// its size and times for outdated after most of such changes, its mode after none.
    pub(super) fn drops_privileges(&self, node: Node) {
        let had = self.known.lock().get_mut(node.ino).is_some_and(|entry| std::mem::take(&mut entry.set_id));
        if had {
            // Attributes alone: that waits for nobody, so it may be said by a thread that serves.
            self.say(&News::Attributes(node.ino));
        }
    }

    /// A file was written past the kernel's pages, of which a mapping may have got some meanwhile.
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
        // Before anything is looked at: see `answers`.
        self.changes.fetch_add(1, Ordering::SeqCst);
        let mut queue = self.queue.lock();
        match changed {
            Changed::Records(records) if queue.news.len() + records.len() <= QUEUE_MAX => {
                let own = records.iter().filter(|(volume, _)| *volume == self.volume);
                queue.news.extend(own.filter_map(|(_, record)| News::of(record)));
            }
            _ => queue.anything = true,
        }
        if queue.anything {
            // At once: what is read from now on is not to be kept for a while.
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
                // Nothing was given for good since the last time, unless that is over.
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

    /// Takes one thing back, and once more later if its answer may still be on the way.
    fn take_back(&self, news: &News, times: u32) {
        let of = match news {
            News::Attributes(ino) | News::Contents(ino) | News::Name(ino, _) => *ino,
        };
        let answered_ms = {
            let known = self.known.lock();
            match known.get(of) {
                Some(known) => known.answered_ms,
                // What the kernel was told of it, it was told to believe for no time.
                None if known.was_crowded() => {
                    drop(known);
                    return self.say_or_put_off(news, times);
                }
                // The kernel does not know it. What is answered from now on is what was changed.
                None => return,
            }
        };
        self.say_or_put_off(news, times);
        // A name is answered without its directory being so.
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

    /// Tells the kernel. What concerns a file whose size a thread fetches just now, by walking its path again, is put
    /// off for a moment, unless it was so often before: the kernel would drop the answer.
    fn say_or_put_off(&self, news: &News, times: u32) {
        let Some((notifier, device)) = self.notifier.get().zip(self.device.get()) else { return };
        let (News::Attributes(of) | News::Contents(of) | News::Name(of, _)) = news;
        let ino = self.inodes.ino(Node { snapshot: 0, ino: *of });
        let is_name = matches!(news, News::Name(..));
        if !is_name {
            let mut known = self.known.lock();
            // Under the lock: a thread that is sent to walk then waits for what was begun before.
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
            // It keeps none.
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

/// A name that the kernel is told of a node.
#[derive(Debug, Clone, Copy)]
pub(super) struct Telling<'n> {
    parent: Node,
    name: &'n OsStr,
    thread: u32,
}

impl<'n> Telling<'n> {
    /// The kernel has the directory locked until it takes note of the answer.
    pub(super) fn locked((parent, name): (Node, &'n OsStr)) -> Telling<'n> {
        Telling { parent, name, thread: EVERY_THREAD }
    }

    /// The answer to a thread that looks the name up. It may do so without the lock of the directory.
    pub(super) fn looked_up((parent, name): (Node, &'n OsStr), thread: u32) -> Telling<'n> {
        Telling { parent, name, thread }
    }
}

/// Answers that are being noted; meanwhile nothing else is.
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
            // After it was noted, so that either this sees a change or the change sees the note.
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

/// Makes the kernel look a name up before it uses it again.
fn expire(mut device: &File, parent: INodeNo, name: &[u8]) -> std::io::Result<()> {
    // At most 255 bytes.
    let name_len = name.len() as u32;
    // The header of an answer (length, code and, since it answers no request, 0), the notification, the name.
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

/// How long the kernel may keep the name of something whose attributes it may keep.
pub(super) fn name_lifetime(attr: &Attr) -> Duration {
    match attr.kind {
        _ if !attr.node.is_live() => FOREVER,
        FileKind::Directory => DIRECTORY_NAME_LIFETIME,
        _ => NAME_LIFETIME,
    }
}
