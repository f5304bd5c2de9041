//! Processes of a node: started without a shell in process groups of their own, their output, and their ends.
//!
//! A process gets SIGKILL when its launcher dies (`PR_SET_PDEATHSIG`). The kernel sends that signal when the *thread*
//! dies that started the process, so one thread, which lives as long as the node, starts all of them.
#![allow(unsafe_code)]

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::{Pid, getppid};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::{Child, Command};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use super::layout::Place;
use super::messages::{Ended, Exit, LINES_MAX, last_lines};

/// Most bytes of a line of output that are kept together.
const OUTPUT_LINE_MAX: usize = 16 << 10;
/// How long the output of an ended process may take to arrive: processes that it has started may keep it open.
const DRAIN: Duration = Duration::from_millis(250);
/// Bytes at the end of a log file in which the last lines are looked for.
const LOG_TAIL_BYTES: u64 = 16 << 10;

/// The stream that a line of output came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Output,
    /// Standard error.
    Error,
}

/// A line of output of a process, with its prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputLine {
    /// The stream.
    pub stream: Stream,
    /// The text without a line end.
    pub text: String,
}

type Request = (Command, oneshot::Sender<io::Result<Child>>);

/// The thread that starts processes.
#[derive(Debug, Clone)]
pub(crate) struct Launcher(std::sync::mpsc::Sender<Request>);

impl Launcher {
    /// Starts the thread. It ends, and with it all processes, when the last handle is dropped.
    pub(crate) fn start(runtime: Handle) -> io::Result<Launcher> {
        let (requests, inbox) = std::sync::mpsc::channel::<Request>();
        std::thread::Builder::new().name("launcher".to_owned()).spawn(move || {
            let _context = runtime.enter();
            while let Ok((mut command, reply)) = inbox.recv() {
                // Without a receiver, the process is dropped and so killed.
                drop(reply.send(command.spawn()));
            }
        })?;
        Ok(Launcher(requests))
    }

    /// Starts a process in a group of its own, which the kernel kills when this program dies.
    pub(crate) async fn spawn(&self, mut command: Command) -> io::Result<Child> {
        let parent = Pid::this();
        command.process_group(0).kill_on_drop(true);
        // SAFETY: the closure runs between fork and exec. It makes two system calls and allocates nothing.
        unsafe {
            command.pre_exec(move || {
                set_pdeathsig(Signal::SIGKILL)?;
                // The parent may have died before.
                if getppid() == parent { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
            });
        }
        let (reply, started) = oneshot::channel();
        let gone = || io::Error::other("the thread that starts processes has ended");
        self.0.send((command, reply)).map_err(|_| gone())?;
        started.await.map_err(|_| gone())?
    }
}

/// Where the output of a process goes.
#[derive(Debug, Clone)]
pub(crate) enum Destination {
    /// Lines with a prefix.
    Lines(mpsc::Sender<OutputLine>),
    /// A file for both streams, in the order in which they were written.
    File(std::path::PathBuf),
}

/// The last lines of a process.
type Tail = Arc<Mutex<VecDeque<String>>>;

/// Process groups of a round.
#[derive(Debug, Default)]
pub(crate) struct GroupSet {
    /// Those whose leader has not ended.
    live: BTreeSet<i32>,
    /// Those whose leader has ended and left processes in them. The kernel gives the number of such a group to no other
    /// process, but that of an empty one.
    left: BTreeSet<i32>,
}

impl GroupSet {
    pub(super) fn start(&mut self, group: i32) {
        self.live.insert(group);
    }

    /// The leader has ended, and was waited for.
    pub(super) fn end(&mut self, group: i32) {
        self.live.remove(&group);
        if group > 1 && killpg(Pid::from_raw(group), None::<Signal>) != Err(Errno::ESRCH) {
            self.left.insert(group);
        }
    }

    /// All groups that may have processes.
    pub(crate) fn all(&self) -> impl Iterator<Item = i32> {
        self.live.iter().chain(&self.left).copied()
    }

    pub(crate) fn has(&self, group: i32) -> bool {
        self.live.contains(&group) || self.left.contains(&group)
    }
}

/// See [`GroupSet`].
pub(crate) type Groups = Arc<Mutex<GroupSet>>;

/// A process that was started.
pub(crate) struct Started {
    child: Child,
    pub(crate) pid: u32,
    place: Place,
    destination: Destination,
    pumps: Vec<JoinHandle<()>>,
    tail: Tail,
}

/// Starts the process of a place.
pub(crate) async fn start(
    launcher: &Launcher,
    mut command: Command,
    place: Place,
    destination: Destination,
    groups: &Groups,
) -> io::Result<Started> {
    command.stdin(Stdio::null());
    match &destination {
        Destination::Lines(_) => {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
        }
        Destination::File(path) => {
            let file = std::fs::OpenOptions::new().create(true).append(true).open(path)?;
            command.stdout(file.try_clone()?).stderr(file);
        }
    }
    let mut child = launcher.spawn(command).await?;
    let pid = child.id().unwrap_or_default();
    lock(groups).start(pid as i32);
    let tail = Tail::default();
    let mut pumps = Vec::new();
    if let Destination::Lines(sink) = &destination {
        let label = place.label();
        let pump =
            |stream| Pump { stream, label: label.clone(), sink: sink.clone(), tail: Arc::clone(&tail) };
        pumps.extend(child.stdout.take().map(|pipe| tokio::spawn(pump(Stream::Output).run(pipe))));
        pumps.extend(child.stderr.take().map(|pipe| tokio::spawn(pump(Stream::Error).run(pipe))));
    }
    Ok(Started { child, pid, place, destination, pumps, tail })
}

impl Started {
    /// Waits for the end. `began` is when the round's processes were started, `asked` when they were asked to end.
    /// The second value passes on output that arrives later, from processes that this one has started.
    pub(crate) async fn wait(
        mut self,
        began: Instant,
        asked: Arc<OnceLock<Instant>>,
        groups: Groups,
    ) -> (Ended, Vec<JoinHandle<()>>) {
        let status = self.child.wait().await;
        let ended_at = Instant::now();
        lock(&groups).end(self.pid as i32);
        let was_asked = asked.get().is_some_and(|asked| *asked <= ended_at);
        let deadline = tokio::time::Instant::now() + DRAIN;
        for pump in &mut self.pumps {
            if tokio::time::timeout_at(deadline, pump).await.is_err() {
                break;
            }
        }
        let lines = match &self.destination {
            Destination::Lines(_) => last_lines(lock(&self.tail).iter().map(String::as_str)),
            Destination::File(path) => tail_of(path).unwrap_or_default(),
        };
        let at_ms = ended_at.saturating_duration_since(began).as_millis() as u64;
        let (place, pid) = (self.place, self.pid);
        self.pumps.retain(|pump| !pump.is_finished());
        (Ended { place, pid, exit: Exit::from(status), at_ms, was_asked, is_final: false, lines }, self.pumps)
    }
}

/// The last lines of a log file.
fn tail_of(path: &Path) -> io::Result<Vec<String>> {
    use std::io::{Read as _, Seek as _, SeekFrom};
    let mut file = std::fs::File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LOG_TAIL_BYTES)))?;
    let mut bytes = Vec::new();
    file.take(LOG_TAIL_BYTES).read_to_end(&mut bytes)?;
    Ok(last_lines(String::from_utf8_lossy(&bytes).lines()))
}

/// Passes the lines of a pipe on.
struct Pump {
    stream: Stream,
    label: String,
    sink: mpsc::Sender<OutputLine>,
    tail: Tail,
}

impl Pump {
    async fn run(self, mut pipe: impl AsyncRead + Unpin) {
        let mut buffer = vec![0; 8 << 10];
        let mut line = Vec::new();
        loop {
            let count = match pipe.read(&mut buffer).await {
                Ok(0) | Err(_) => break,
                Ok(count) => count,
            };
            for byte in &buffer[..count] {
                match byte {
                    // Progress bars return to the begin of their line.
                    b'\n' | b'\r' => self.pass(&mut line).await,
                    byte => {
                        line.push(*byte);
                        if line.len() >= OUTPUT_LINE_MAX {
                            self.pass(&mut line).await;
                        }
                    }
                }
            }
        }
        self.pass(&mut line).await;
    }

    async fn pass(&self, line: &mut Vec<u8>) {
        if line.is_empty() {
            return;
        }
        let text = String::from_utf8_lossy(line).into_owned();
        line.clear();
        {
            let mut tail = lock(&self.tail);
            if tail.len() >= 2 * LINES_MAX {
                tail.pop_front();
            }
            tail.push_back(text.clone());
        }
        let text = format!("[{}] {text}", self.label);
        // Without a printer, the process must not wait for one.
        drop(self.sink.send(OutputLine { stream: self.stream, text }).await);
    }
}

/// Sends a signal to all groups whose leader has not ended. A group that has just ended is none.
pub(crate) fn signal(groups: &Groups, signal: Signal) {
    send(&lock(groups).live, signal);
}

/// Kills what ended processes have left in their groups.
pub(crate) fn kill_left(groups: &Groups) {
    send(&lock(groups).left, Signal::SIGKILL);
}

fn send(groups: &BTreeSet<i32>, signal: Signal) {
    for group in groups.iter().filter(|group| **group > 1) {
        let _ = killpg(Pid::from_raw(*group), signal);
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
