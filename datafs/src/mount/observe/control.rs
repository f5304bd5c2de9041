//! Control socket of a mount: other processes request its statistics and start or end its trace. Each mount has
//! one socket in the folder `run` of the home and answers one request per connection.
//!
//! Only the owner of the folder, and root, can connect. A socket that a killed process has left refuses
//! connections; the next process that lists the mounts removes it.

use std::fs;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use millrace_leaf::{error_chain, private};
use nix::fcntl::{OFlag, open};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::Mode;
use serde::{Deserialize, Serialize};

use super::stats::MountStats;
use super::trace::TraceOptions;
use super::watch::Watch;
use crate::error::{Error, Result};

/// The folder of the sockets, below the home.
const FOLDER: &str = "run";
/// Read and write timeout of both sides.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest request.
const QUESTION_BYTES_MAX: u64 = 64 << 10;
/// Longest response.
const ANSWER_BYTES_MAX: u64 = 4 << 20;

/// A request, as JSON up to the end of the stream.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Question {
    Stats,
    Trace(TraceOptions),
    EndTrace,
}

/// A response.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Stats(Box<MountStats>),
    Done,
    Refused(String),
}

/// The control socket of a mount and the thread that serves it, until the value is dropped.
#[derive(Debug)]
pub(in crate::mount) struct Control {
    socket: PathBuf,
    /// The write end of a pipe; closing it ends the thread.
    ending: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    /// Starts to serve a socket in a home, until the value is dropped.
    pub(in crate::mount) fn start(home: &Path, watch: &Arc<Watch>) -> io::Result<Control> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let folder = home.join(FOLDER);
        private::create_dir_all(&folder)?;
        let name = format!("mount-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let (fresh, socket) = (folder.join(format!(".{name}")), folder.join(format!("{name}.sock")));
        let listener = with_short_path(&fresh, |path| match UnixListener::bind(path) {
            // Left by a killed process that had the same process ID.
            Err(e) if e.kind() == ErrorKind::AddrInUse => {
                fs::remove_file(path)?;
                UnixListener::bind(path)
            }
            bound => bound,
        })?;
        fs::set_permissions(&fresh, fs::Permissions::from_mode(0o600))?;
        // A client that finds the socket under its final name can connect while this process lives.
        fs::rename(&fresh, &socket)?;
        listener.set_nonblocking(true)?;
        let (stop, ending) = nix::unistd::pipe()?;
        let watch = Arc::clone(watch);
        let thread = std::thread::Builder::new()
            .name("datafs-control".into())
            .spawn(move || serve(&listener, &stop, &watch))?;
        Ok(Control { socket, ending: Some(ending), thread: Some(thread) })
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.socket) {
            tracing::debug!(%error, socket = %self.socket.display(), "the socket of a mount is gone");
        }
        drop(self.ending.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that answers for a mount has panicked");
        }
    }
}

/// Runs `work` with an alias of `path` that is short enough for a socket address.
fn with_short_path<T>(path: &Path, work: impl FnOnce(&Path) -> io::Result<T>) -> io::Result<T> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(ErrorKind::InvalidInput.into());
    };
    let folder = open(folder, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?;
    work(&Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name))
}

fn serve(listener: &UnixListener, stop: &OwnedFd, watch: &Watch) {
    loop {
        let mut ready =
            [PollFd::new(listener.as_fd(), PollFlags::POLLIN), PollFd::new(stop.as_fd(), PollFlags::POLLIN)];
        match poll(&mut ready, PollTimeout::NONE) {
            Err(nix::errno::Errno::EINTR) => continue,
            Err(error) => {
                tracing::warn!(error = error_chain::one_line(&error), "a mount tells nothing more of itself");
                return;
            }
            // The other end of the pipe is closed.
            Ok(_) if ready[1].revents().is_some_and(|events| !events.is_empty()) => return,
            Ok(_) => {}
        }
        match listener.accept() {
            Ok((stream, _)) => {
                if let Err(error) = answer(stream, watch) {
                    tracing::debug!(%error, "a question about a mount was not answered");
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => tracing::debug!(%error, "a question about a mount was not heard"),
        }
    }
}

fn answer(mut stream: UnixStream, watch: &Watch) -> io::Result<()> {
    let question = receive::<Question>(&mut stream, QUESTION_BYTES_MAX);
    let answer = match question {
        Ok(Question::Stats) => Answer::Stats(Box::new(watch.stats())),
        Ok(Question::Trace(options)) => match watch.trace.start(&options, watch.device()) {
            Ok(()) => Answer::Done,
            Err(error) => Answer::Refused(error_chain::one_line(&error)),
        },
        Ok(Question::EndTrace) => {
            watch.trace.stop();
            Answer::Done
        }
        Err(error) => Answer::Refused(format!("another version of millrace serves this mount ({error})")),
    };
    send(&mut stream, &answer)
}

fn send(stream: &mut UnixStream, message: &impl Serialize) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(&serde_json::to_vec(message)?)?;
    stream.shutdown(std::net::Shutdown::Write)
}

fn receive<T: for<'a> Deserialize<'a>>(stream: &mut UnixStream, bytes_max: u64) -> io::Result<T> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut bytes = Vec::new();
    stream.take(bytes_max).read_to_end(&mut bytes)?;
    Ok(serde_json::from_slice(&bytes)?)
}

/// A mount that some process serves.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Served {
    socket: PathBuf,
}

/// The mounts of a home that processes of this machine serve now. Removes sockets that killed processes have
/// left.
///
/// # Errors
/// [`Error::Io`] when the folder cannot be read.
pub fn served(home: &Path) -> Result<Vec<Served>> {
    let folder = home.join(FOLDER);
    let failed = |e| Error::io("list the mounts in", &folder, e);
    let entries = match fs::read_dir(&folder) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let socket = entry.map_err(failed)?.path();
        if socket.extension().is_some_and(|suffix| suffix == "sock") {
            match with_short_path(&socket, |path| UnixStream::connect(path)) {
                Err(e) if e.kind() == ErrorKind::ConnectionRefused => {
                    tracing::debug!(socket = %socket.display(), "removing what a killed process has left");
                    if let Err(error) = fs::remove_file(&socket) {
                        tracing::debug!(%error, socket = %socket.display(), "somebody else has, or nobody may");
                    }
                }
                Err(e) if e.kind() == ErrorKind::NotFound => {}
                // Includes a mount that cannot be asked: a request to it reports the reason.
                _ => found.push(Served { socket }),
            }
        }
    }
    found.sort_by(|a, b| a.socket.cmp(&b.socket));
    Ok(found)
}

impl Served {
    /// The statistics since the mount began; `None` once it has ended.
    ///
    /// # Errors
    /// [`Error::Io`] when the mount does not answer within five seconds or belongs to another user.
    pub fn stats(&self) -> Result<Option<MountStats>> {
        match self.ask(&Question::Stats)? {
            None => Ok(None),
            Some(Answer::Stats(stats)) => Ok(Some(*stats)),
            Some(other) => Err(self.failed(refusal(other))),
        }
    }

    /// Starts to trace the mount's requests to a file, in place of a running trace. The process that serves the
    /// mount writes the file.
    ///
    /// # Errors
    /// [`Error::Io`] when the file cannot be opened, or as [`Served::stats`].
    pub fn trace(&self, options: &TraceOptions) -> Result<()> {
        self.done(&Question::Trace(options.clone()))
    }

    /// Ends the trace, if there is one, after all its lines are written to the file.
    ///
    /// # Errors
    /// As [`Served::stats`].
    pub fn end_trace(&self) -> Result<()> {
        self.done(&Question::EndTrace)
    }

    fn done(&self, question: &Question) -> Result<()> {
        match self.ask(question)? {
            Some(Answer::Done) => Ok(()),
            Some(Answer::Refused(reason)) => Err(Error::Invalid(reason)),
            Some(other) => Err(self.failed(refusal(other))),
            None => Err(Error::not_found("the mount: it has ended")),
        }
    }

    fn ask(&self, question: &Question) -> Result<Option<Answer>> {
        let mut stream = match with_short_path(&self.socket, |path| UnixStream::connect(path)) {
            Ok(stream) => stream,
            Err(e) if matches!(e.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound) => {
                return Ok(None);
            }
            Err(e) => return Err(self.failed(e)),
        };
        let answered = send(&mut stream, question).and_then(|()| receive(&mut stream, ANSWER_BYTES_MAX));
        match answered {
            Ok(answer) => Ok(Some(answer)),
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                Err(self.failed(io::Error::other("its process does not answer")))
            }
            // The process was killed or the mount has ended before the response.
            Err(_) if with_short_path(&self.socket, |path| UnixStream::connect(path)).is_err() => Ok(None),
            Err(e) => Err(self.failed(e)),
        }
    }

    fn failed(&self, source: io::Error) -> Error {
        Error::Io { operation: "ask the mount behind", path: self.socket.clone(), source }
    }
}

fn refusal(answer: Answer) -> io::Error {
    io::Error::other(match answer {
        Answer::Refused(reason) => reason,
        _ => "another version of millrace serves this mount".into(),
    })
}
