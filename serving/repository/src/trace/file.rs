//! Trace files: JSON lists, complete once no more traces are added.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;

/// Largest file in bytes; further traces are dropped.
const FILE_BYTES_MAX: usize = 64 << 20;
/// Most files of one setting; traces for further files are dropped.
const FILES_MAX: u32 = 1_000;

/// The file, or the sequence of files, of one setting.
#[derive(Debug)]
pub(super) struct Traces {
    path: PathBuf,
    /// Traces per file; 0 puts all into one file.
    per_file: u32,
    files: u32,
    open: Option<Open>,
    full: bool,
}

#[derive(Debug)]
struct Open {
    writer: BufWriter<File>,
    bytes: usize,
    traces: u32,
}

impl Traces {
    /// Writes to `name` in a directory or, if `per_file` is positive, to `name.0`, `name.1` and so on.
    pub(super) fn new(directory: &Path, name: &str, per_file: u32) -> Traces {
        Traces { path: directory.join(name), per_file, files: 0, open: None, full: false }
    }

    /// Adds a trace, a JSON object. After a write error all further traces are dropped, with one log line.
    pub(super) fn add(&mut self, trace: &str) {
        if self.full {
            return;
        }
        if let Err(error) = self.write(trace) {
            self.full = true;
            tracing::warn!(path = %self.path.display(), %error, "no more traces are written");
        }
    }

    fn write(&mut self, trace: &str) -> std::io::Result<()> {
        let open = match &mut self.open {
            Some(open) => open,
            None => {
                let path = self.next_path()?;
                self.open.insert(Open { writer: BufWriter::new(create(&path)?), bytes: 0, traces: 0 })
            }
        };
        let before = if open.traces == 0 { "[\n" } else { ",\n" };
        open.bytes += before.len() + trace.len();
        if open.bytes > FILE_BYTES_MAX {
            self.complete()?;
            return Err(std::io::Error::other(format!("the file has {FILE_BYTES_MAX} bytes")));
        }
        open.writer.write_all(before.as_bytes())?;
        open.writer.write_all(trace.as_bytes())?;
        open.traces += 1;
        if open.traces == self.per_file { self.complete() } else { Ok(()) }
    }

    fn next_path(&mut self) -> std::io::Result<PathBuf> {
        let index = self.files;
        if index == FILES_MAX {
            return Err(std::io::Error::other(format!("there are {FILES_MAX} files")));
        }
        self.files += 1;
        if self.per_file == 0 && index == 0 {
            return Ok(self.path.clone());
        }
        // Also used when the single file is already complete, so that its content stays.
        let mut path = self.path.clone().into_os_string();
        path.push(format!(".{index}"));
        Ok(path.into())
    }

    /// Completes the open file.
    pub(super) fn end(&mut self) {
        if let Err(error) = self.complete() {
            tracing::warn!(path = %self.path.display(), %error, "a file of traces is not complete");
        }
    }

    fn complete(&mut self) -> std::io::Result<()> {
        let Some(mut open) = self.open.take() else { return Ok(()) };
        open.writer.write_all(b"\n]\n")?;
        open.writer.flush()
    }
}

impl Drop for Traces {
    fn drop(&mut self) {
        self.end();
    }
}

/// Creates or truncates a file; never follows a symbolic link.
fn create(path: &Path) -> std::io::Result<File> {
    // Opening a FIFO without a reader must not block.
    let flags = (OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits();
    let file = OpenOptions::new().write(true).create(true).truncate(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(std::io::Error::other("this is not a regular file"));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(path: &Path) -> Vec<u64> {
        let traces: Vec<serde_json::Value> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        traces.iter().map(|trace| trace["id"].as_u64().unwrap()).collect()
    }

    #[test]
    fn every_file_is_a_list_once_it_is_complete() {
        let dir = tempfile::tempdir().unwrap();
        let mut traces = Traces::new(dir.path(), "t.json", 2);
        (0..5).for_each(|id| traces.add(&format!("{{\"id\":{id}}}")));
        drop(traces);
        let of = |name: &str| ids(&dir.path().join(name));
        assert_eq!((of("t.json.0"), of("t.json.1"), of("t.json.2")), (vec![0, 1], vec![2, 3], vec![4]));

        let mut traces = Traces::new(dir.path(), "t.json", 0);
        traces.add("{\"id\":1}");
        traces.end();
        traces.add("{\"id\":2}");
        drop(traces);
        assert_eq!((of("t.json"), of("t.json.1")), (vec![1], vec![2]));
    }

    #[test]
    fn a_file_and_their_number_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let mut traces = Traces::new(dir.path(), "t", 0);
        let trace = format!("{{\"id\":7,\"text\":\"{}\"}}", "x".repeat(FILE_BYTES_MAX / 4));
        (0..8).for_each(|_| traces.add(&trace));
        drop(traces);
        assert_eq!(ids(&dir.path().join("t")), [7, 7, 7]);
        assert!(std::fs::metadata(dir.path().join("t")).unwrap().len() <= FILE_BYTES_MAX as u64 + 4);

        let mut traces = Traces::new(dir.path(), "n", 1);
        (0..FILES_MAX + 5).for_each(|_| traces.add("{}"));
        drop(traces);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), FILES_MAX as usize + 1);
    }

    #[test]
    fn links_and_pipes_in_the_way_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (aim, link, pipe) = (dir.path().join("aim"), dir.path().join("link"), dir.path().join("pipe"));
        std::fs::write(&aim, "kept").unwrap();
        std::os::unix::fs::symlink(&aim, &link).unwrap();
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        for name in ["link", "pipe"] {
            let mut traces = Traces::new(dir.path(), name, 0);
            traces.add("{}");
            assert!(traces.full, "{name}");
        }
        assert_eq!(std::fs::read_to_string(&aim).unwrap(), "kept");
    }
}
