//! The request trace of a mount: one line per request in a bounded file, while a trace is on.
//!
//! Serving threads put lines into memory and never wait for the disk; lines that do not fit are counted as
//! lost. When the file is full it is renamed to `FILE.1` and replaces the previous one.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use chrono::{DateTime, SecondsFormat, Utc};
use millrace_leaf::error_chain;
use parking_lot::{Condvar, Mutex, RwLock};
use serde::{Deserialize, Serialize};

use super::stats::{Op, TraceStats};
use crate::error::{Error, Result};
use crate::mount::outcome::Outcome;

/// Most bytes of lines that wait for the disk.
const PENDING_BYTES_MAX: usize = 8 << 20;
/// Smallest size limit of a file, so that each holds some thousand lines.
const FILE_BYTES_MIN: u64 = 1 << 16;

/// The file of a trace and its bound.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceOptions {
    /// The file; the trace appends to an existing one. Not on the traced mount.
    pub file: PathBuf,
    /// Most bytes of this file, and of the previous one (`FILE.1`). At least 64 KiB.
    pub file_bytes_max: u64,
}

/// The fields of a request in a trace line.
#[derive(Debug, Clone, Copy)]
pub(in crate::mount) struct Request<'a> {
    pub(in crate::mount) op: Op,
    pub(in crate::mount) pid: u32,
    pub(in crate::mount) ino: u64,
    pub(in crate::mount) name: Option<&'a OsStr>,
    pub(in crate::mount) to: Option<(u64, &'a OsStr)>,
    pub(in crate::mount) range: Option<(u64, u64)>,
}

/// The trace of one mount.
#[derive(Debug, Default)]
pub(in crate::mount) struct Trace {
    on: AtomicBool,
    running: RwLock<Option<Running>>,
}

#[derive(Debug)]
struct Running {
    options: TraceOptions,
    queue: Arc<Queue>,
    thread: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct Queue {
    pending: Mutex<Pending>,
    news: Condvar,
    written: AtomicU64,
    lost: AtomicU64,
}

#[derive(Debug, Default)]
struct Pending {
    lines: Vec<u8>,
    count: u64,
    ending: bool,
}

thread_local! {
    static LINE: RefCell<String> = const { RefCell::new(String::new()) };
}

impl Trace {
    pub(in crate::mount) fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Starts a trace, in place of a running one. `device` is the device number of the mount.
    pub(in crate::mount) fn start(&self, options: &TraceOptions, device: Option<u64>) -> Result<()> {
        if options.file_bytes_max < FILE_BYTES_MIN {
            let message = format!("a trace file has at least {FILE_BYTES_MIN} bytes");
            return Err(Error::Invalid(message));
        }
        let file = std::path::absolute(&options.file)
            .map_err(|e| Error::io("find the trace file", &options.file, e))?;
        let folder = file.parent().unwrap_or(Path::new("/"));
        let there = fs::metadata(folder).map_err(|e| refused("open the folder of the trace", folder, e))?;
        if device == Some(there.dev()) {
            let message = format!("the trace {} would be on the mount that it traces", file.display());
            return Err(Error::Invalid(message));
        }
        let options = TraceOptions { file, ..options.clone() };
        let output = Output::open(&options)?;
        self.stop();
        let queue = Arc::new(Queue::default());
        let writing = Arc::clone(&queue);
        let thread = std::thread::Builder::new()
            .name("datafs-trace".into())
            .spawn(move || writing.write(output))
            .map_err(|e| refused("start the thread of the trace", &options.file, e))?;
        *self.running.write() = Some(Running { options, queue, thread });
        self.on.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Ends the trace, after all its lines are written to the file.
    pub(in crate::mount) fn stop(&self) {
        self.on.store(false, Ordering::Relaxed);
        let Some(running) = self.running.write().take() else { return };
        running.queue.pending.lock().ending = true;
        running.queue.news.notify_one();
        if running.thread.join().is_err() {
            tracing::error!("the thread that writes a trace has panicked");
        }
    }

    pub(in crate::mount) fn stats(&self) -> Option<TraceStats> {
        let running = self.running.read();
        let Running { options, queue, .. } = running.as_ref()?;
        Some(TraceStats {
            file: options.file.clone(),
            file_bytes_max: options.file_bytes_max,
            written: queue.written.load(Ordering::Relaxed),
            lost: queue.lost.load(Ordering::Relaxed),
        })
    }

    /// Traces a request that was answered just now.
    #[cold]
    pub(in crate::mount) fn note(&self, request: &Request<'_>, outcome: Outcome, took: Duration) {
        let Some(queue) = self.running.read().as_ref().map(|running| Arc::clone(&running.queue)) else {
            return;
        };
        let begun = SystemTime::now() - took;
        LINE.with_borrow_mut(|line| {
            line.clear();
            // Writing to a string does not fail.
            describe(line, begun, request, outcome, took).ok();
            queue.add(line);
        });
    }
}

fn describe(
    line: &mut String,
    begun: SystemTime,
    request: &Request<'_>,
    outcome: Outcome,
    took: Duration,
) -> std::fmt::Result {
    let time = DateTime::<Utc>::from(begun).to_rfc3339_opts(SecondsFormat::Micros, true);
    let &Request { op, pid, ino, name, to, range } = request;
    write!(line, "{time} op={} pid={pid} ino={ino}", op.name())?;
    if let Some(name) = name {
        write!(line, " name={name:?}")?;
    }
    if let Some((parent, name)) = to {
        write!(line, " to_ino={parent} to_name={name:?}")?;
    }
    if let Some((offset, size)) = range {
        write!(line, " offset={offset} size={size}")?;
    }
    match outcome.errno {
        0 if matches!(op, Op::Read | Op::Write | Op::CopyFileRange) => {
            write!(line, " result={}", outcome.bytes)?;
        }
        0 => write!(line, " result=ok")?,
        errno => write!(line, " result={:?}", nix::errno::Errno::from_raw(errno))?,
    }
    writeln!(line, " us={}", took.as_micros())
}

impl Queue {
    fn add(&self, line: &str) {
        let mut pending = self.pending.lock();
        if pending.lines.len() + line.len() > PENDING_BYTES_MAX {
            self.lost.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let wakes = pending.lines.is_empty();
        pending.lines.extend_from_slice(line.as_bytes());
        pending.count += 1;
        drop(pending);
        if wakes {
            self.news.notify_one();
        }
    }

    fn write(&self, mut output: Output) {
        let (mut lines, mut warned) = (Vec::new(), false);
        loop {
            let (count, ending) = {
                let mut pending = self.pending.lock();
                while pending.lines.is_empty() && !pending.ending {
                    self.news.wait(&mut pending);
                }
                lines.clear();
                std::mem::swap(&mut lines, &mut pending.lines);
                (std::mem::take(&mut pending.count), pending.ending)
            };
            let lost_before = self.lost.load(Ordering::Relaxed);
            match output.write(&lines, lost_before) {
                Ok(()) => {
                    self.written.fetch_add(count, Ordering::Relaxed);
                }
                Err(error) => {
                    self.lost.fetch_add(count, Ordering::Relaxed);
                    if !warned {
                        tracing::warn!(
                            error = error_chain::one_line(&error), file = %output.options.file.display(),
                            "a trace loses lines"
                        );
                        warned = true;
                    }
                }
            }
            if ending {
                return;
            }
        }
    }
}

/// The open trace file.
#[derive(Debug)]
struct Output {
    options: TraceOptions,
    file: File,
    len: u64,
    /// Lost lines that the file already reports.
    lost_told: u64,
}

impl Output {
    fn open(options: &TraceOptions) -> Result<Output> {
        let failed = |e| refused("open the trace", &options.file, e);
        let file = open(&options.file).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        if !metadata.is_file() {
            return Err(Error::Invalid(format!("the trace {} is not a file", options.file.display())));
        }
        Ok(Output { options: options.clone(), len: metadata.len(), file, lost_told: 0 })
    }

    fn write(&mut self, mut lines: &[u8], lost: u64) -> io::Result<()> {
        if lost > self.lost_told {
            let line = format!("lost={}\n", lost - self.lost_told);
            self.lost_told = lost;
            self.append(line.as_bytes())?;
        }
        while !lines.is_empty() {
            let room = self.options.file_bytes_max.saturating_sub(self.len);
            let fits = &lines[..lines.len().min(usize::try_from(room).unwrap_or(usize::MAX))];
            // Whole lines only. A line longer than the bound gets a file of its own.
            let end = match fits.iter().rposition(|byte| *byte == b'\n') {
                _ if fits.len() == lines.len() => lines.len(),
                Some(at) => at + 1,
                None if self.len > 0 => {
                    self.rotate()?;
                    continue;
                }
                None => lines.iter().position(|byte| *byte == b'\n').map_or(lines.len(), |at| at + 1),
            };
            self.append(&lines[..end])?;
            lines = &lines[end..];
        }
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.len += bytes.len() as u64;
        self.file.write_all(bytes)
    }

    fn rotate(&mut self) -> io::Result<()> {
        let mut older = self.options.file.clone().into_os_string();
        older.push(".1");
        fs::rename(&self.options.file, older)?;
        self.file = open(&self.options.file)?;
        self.len = 0;
        Ok(())
    }
}

/// Mode 0600: only the owner may see the names of files.
fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).custom_flags(libc::O_NONBLOCK).open(path)
}

/// Not [`Error::io`], whose advice is about the home folder.
fn refused(operation: &'static str, path: &Path, source: io::Error) -> Error {
    Error::Io { operation, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn request(name: &OsStr) -> Request<'_> {
        let (to, range) = (Some((9, OsStr::new("new"))), Some((4096, 10)));
        Request { op: Op::Rename, pid: 7, ino: 5, name: Some(name), to, range }
    }

    #[test]
    fn a_line_tells_what_was_asked_and_answered() {
        let mut line = String::new();
        let outcome = Outcome { errno: libc::ENOENT, ..Outcome::default() };
        let at = SystemTime::UNIX_EPOCH + Duration::from_millis(1_500);
        let took = Duration::from_micros(31);
        describe(&mut line, at, &request(OsStr::new("a \"b\"\n")), outcome, took).unwrap();
        let expected = "1970-01-01T00:00:01.500000Z op=rename pid=7 ino=5 name=\"a \\\"b\\\"\\n\" to_ino=9 \
                        to_name=\"new\" offset=4096 size=10 result=ENOENT us=31\n";
        assert_eq!(line, expected);
    }

    #[test]
    fn files_are_bounded_and_every_line_is_there_or_counted() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("trace");
        let options = TraceOptions { file: file.clone(), file_bytes_max: FILE_BYTES_MIN };
        let trace = Trace::default();
        assert!(!trace.is_on() && trace.stats().is_none());
        let too_small = TraceOptions { file_bytes_max: 10, ..options.clone() };
        assert!(trace.start(&too_small, None).is_err());
        let device = fs::metadata(folder.path()).unwrap().dev();
        assert!(trace.start(&options, Some(device)).is_err());
        trace.start(&options, None).unwrap();
        assert!(trace.is_on());
        for i in 0..2_000 {
            trace.note(&request(OsStr::new(&i.to_string())), Outcome::default(), Duration::ZERO);
        }
        let queue = Arc::clone(&trace.running.read().as_ref().unwrap().queue);
        trace.stop();
        let (written, lost) = (queue.written.load(Ordering::Relaxed), queue.lost.load(Ordering::Relaxed));
        assert_eq!((written, lost), (2_000, 0));
        assert!(!trace.is_on() && trace.stats().is_none());
        let (now, before) = (fs::read(&file).unwrap(), fs::read(folder.path().join("trace.1")).unwrap());
        assert!(now.len() as u64 <= FILE_BYTES_MIN && before.len() as u64 <= FILE_BYTES_MIN);
        assert!(before.len() as u64 > FILE_BYTES_MIN / 2);
        let text = String::from_utf8([before, now].concat()).unwrap();
        assert!(text.lines().last().unwrap().contains("name=\"1999\""));
        assert!(text.lines().all(|line| line.contains(" op=rename pid=7 ") && line.ends_with(" us=0")));
    }

    #[test]
    fn lines_that_cannot_be_written_are_counted() {
        let queue = Queue::default();
        let long = format!("{}\n", "x".repeat(1 << 20));
        (0..10).for_each(|_| queue.add(&long));
        assert_eq!((queue.pending.lock().count, queue.lost.load(Ordering::Relaxed)), (7, 3));
        let folder = tempfile::tempdir().unwrap();
        let options = TraceOptions { file: folder.path().join("t"), file_bytes_max: FILE_BYTES_MIN };
        let mut output = Output::open(&options).unwrap();
        output.write(b"a line\n", 3).unwrap();
        assert_eq!(fs::read_to_string(&options.file).unwrap(), "lost=3\na line\n");
        queue.pending.lock().ending = true;
        // The folder is gone: a full file cannot make room.
        drop(folder);
        queue.write(Output { len: FILE_BYTES_MIN, ..output });
        assert_eq!(queue.lost.load(Ordering::Relaxed), 10);
    }
}
