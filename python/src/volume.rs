//! Files of volumes: lists, reads at a snapshot or live, atomic writes, snapshots.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use millrace_datafs::{
    Attr, Datafs, Error, FileKind, Name, Node, OpenFile, OpenFlags, Publish, StagedWriter, View, VolumeSpec,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::engine::{self, Engine, GivenUp, lock};
use crate::error::{Failure, Result};

/// Attempts to open a path whose file is replaced again and again before it can be opened.
const OPEN_ATTEMPTS: u32 = 100;

/// A volume, live or at a snapshot.
#[pyclass(frozen, module = "millrace")]
pub(crate) struct Volume {
    home: PathBuf,
    spec: VolumeSpec,
}

/// A file that is open for reading.
#[pyclass(frozen, module = "millrace")]
pub(crate) struct File {
    number: u64,
    home: PathBuf,
    spec: VolumeSpec,
    node: Node,
    size: u64,
}

/// A file that is being written, which appears when it is committed.
#[pyclass(frozen, module = "millrace")]
pub(crate) struct Writer {
    number: u64,
    home: PathBuf,
    spec: VolumeSpec,
    path: String,
}

/// What is told of a file or folder.
struct Entry {
    path: String,
    attr: Attr,
}

#[pymethods]
impl Volume {
    #[new]
    #[pyo3(signature = (spec, *, create, home))]
    fn new(py: Python<'_>, spec: &str, create: bool, home: Option<PathBuf>) -> PyResult<Volume> {
        engine::with(py, |engine| {
            let (home, spec) = (engine::locate(home)?, spec.parse::<VolumeSpec>()?);
            let volumes = engine.volumes(&home)?;
            if create {
                match volumes.volume_create(&spec.volume) {
                    Ok(_) | Err(Error::Exists { .. }) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            // The newest snapshot may be another one soon.
            let (spec, _) = volumes.resolve(&spec)?;
            Ok(Volume { home, spec })
        })
    }

    /// The volume, with its snapshot.
    #[getter]
    fn spec(&self) -> String {
        self.spec.to_string()
    }

    /// The home folder.
    #[getter]
    fn home(&self) -> &PathBuf {
        &self.home
    }

    /// The entries of a folder.
    fn list<'py>(&self, py: Python<'py>, path: &str) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let entries = self.with(py, |view| {
            let entries = view.list(path)?.into_iter();
            let join = |name: &str| format!("{}/{name}", path.trim_end_matches('/'));
            Ok(entries.map(|entry| Entry { path: join(&entry.name), attr: entry.stat }).collect::<Vec<_>>())
        })?;
        entries.iter().map(|entry| entry.to_dict(py)).collect()
    }

    /// A file or folder.
    fn info<'py>(&self, py: Python<'py>, path: &str) -> PyResult<Bound<'py, PyDict>> {
        let attr = self.with(py, |view| Ok(view.stat(path)?))?;
        Entry { path: path.to_owned(), attr }.to_dict(py)
    }

    /// Opens a file for reading.
    fn open(&self, py: Python<'_>, path: &str) -> PyResult<File> {
        engine::with(py, |engine| {
            let view = self.view(engine)?;
            for _ in 0..OPEN_ATTEMPTS {
                let attr = view.stat(path)?;
                if attr.kind == FileKind::Directory {
                    return Err(Error::IsADirectory { what: path.to_owned() }.into());
                }
                let file = match view.open(attr.node, OpenFlags::READ) {
                    // Replaced since.
                    Err(Error::NotFound { .. }) => continue,
                    opened => opened?,
                };
                let (number, size) = (engine::number(), file.attr()?.size);
                engine.files.put(number, file);
                let (home, spec) = (self.home.clone(), self.spec.clone());
                return Ok(File { number, home, spec, node: attr.node, size });
            }
            Err(Error::Stale { what: format!("each version of {path} that was looked up") }.into())
        })
    }

    /// Begins to write a file.
    fn write(&self, py: Python<'_>, path: String) -> PyResult<Writer> {
        self.writer(py, path)
    }

    /// The value of an application key.
    fn key<'py>(&self, py: Python<'py>, key: &str) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let value = self.with(py, |view| Ok(view.key_get(key)?))?;
        Ok(value.map(|value| PyBytes::new(py, &value)))
    }

    /// The application keys with a prefix, and their values.
    fn keys<'py>(&self, py: Python<'py>, prefix: &str) -> PyResult<Vec<(String, Bound<'py, PyBytes>)>> {
        let found = self.with(py, |view| Ok(view.key_scan(prefix)?))?;
        Ok(found.into_iter().map(|(key, value)| (key, PyBytes::new(py, &value))).collect())
    }

    /// Makes files visible and changes application keys, all in one step or nothing; durable when it returns. Fails
    /// unless each key of `expect` has its value (none: does not exist), and each path of `absent` does not exist.
    #[pyo3(signature = (files, *, put, delete, expect, absent))]
    fn publish(
        &self,
        py: Python<'_>,
        files: Vec<Py<Writer>>,
        put: Vec<(String, Vec<u8>)>,
        delete: Vec<String>,
        expect: Vec<(String, Option<Vec<u8>>)>,
        absent: Vec<String>,
    ) -> PyResult<()> {
        let files: Vec<&Writer> = files.iter().map(Py::get).collect();
        engine::with(py, |engine| {
            let mut publish = Publish::new();
            for (key, value) in expect {
                publish = publish.expect_key(key, value);
            }
            for path in absent {
                publish = publish.expect_absent(path);
            }
            for file in files {
                publish = publish.file(&file.path, file.take(engine)?.finish()?);
            }
            for (key, value) in put {
                publish = publish.put_key(key, value);
            }
            for key in delete {
                publish = publish.delete_key(key);
            }
            Ok(self.view(engine)?.publish(publish)?)
        })
    }

    /// Removes a file.
    fn remove(&self, py: Python<'_>, path: &str) -> PyResult<()> {
        self.change(py, |view| Ok(view.remove_file(path)?))
    }

    /// Removes an empty folder.
    fn remove_dir(&self, py: Python<'_>, path: &str) -> PyResult<()> {
        self.change(py, |view| Ok(view.remove_dir(path)?))
    }

    /// Moves a file or folder, replacing a file.
    fn rename(&self, py: Python<'_>, from: &str, to: &str) -> PyResult<()> {
        self.change(py, |view| Ok(view.rename_path(from, to)?))
    }

    /// Creates a folder and its missing parents.
    fn make_dirs(&self, py: Python<'_>, path: &str) -> PyResult<()> {
        self.change(py, |view| Ok(view.create_dir_all(path)?))
    }

    /// Takes a snapshot of the live volume.
    fn snapshot(&self, py: Python<'_>, name: &str) -> PyResult<(String, f64)> {
        self.with_volumes(py, |volumes| {
            let taken = volumes.snapshot_create(&self.spec.volume, &name.parse::<Name>()?)?;
            Ok((taken.name.to_string(), seconds(taken.created_at)))
        })
    }

    /// The snapshots, oldest first, with their times.
    fn snapshots(&self, py: Python<'_>) -> PyResult<Vec<(String, f64)>> {
        self.with_volumes(py, |volumes| {
            let listed = volumes.snapshot_list(&self.spec.volume)?.into_iter();
            Ok(listed.map(|found| (found.name.to_string(), seconds(found.created_at))).collect())
        })
    }
}

impl Volume {
    fn view(&self, engine: &Engine) -> Result<View> {
        Ok(engine.volumes(&self.home)?.view(&self.spec)?)
    }

    fn with<T: Send>(&self, py: Python<'_>, call: impl FnOnce(&View) -> Result<T> + Send) -> PyResult<T> {
        engine::with(py, |engine| call(&self.view(engine)?))
    }

    /// Changes names, durably: the process may end without closing the volumes.
    fn change(&self, py: Python<'_>, change: impl FnOnce(&View) -> Result<()> + Send) -> PyResult<()> {
        self.with(py, |view| {
            change(view)?;
            Ok(view.sync()?)
        })
    }

    fn with_volumes<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&Datafs) -> Result<T> + Send,
    ) -> PyResult<T> {
        engine::with(py, |engine| call(&engine.volumes(&self.home)?))
    }

    fn writer(&self, py: Python<'_>, path: String) -> PyResult<Writer> {
        engine::with(py, |engine| {
            let staged = self.view(engine)?.stage()?;
            let number = engine::number();
            engine.writers.put(number, Mutex::new(staged));
            Ok(Writer { number, home: self.home.clone(), spec: self.spec.clone(), path })
        })
    }
}

#[pymethods]
impl File {
    /// Its size when it was opened.
    #[getter]
    fn size(&self) -> u64 {
        self.size
    }

    /// Reads some bytes, fewer only at the end.
    fn read_at<'py>(&self, py: Python<'py>, offset: u64, bytes: usize) -> PyResult<Bound<'py, PyBytes>> {
        let read = engine::with(py, |engine| {
            let file = match engine.files.get(self.number) {
                Some(file) => file,
                // Another process, or this one before a fork, has opened it.
                None => engine.files.put(self.number, self.reopen(engine)?),
            };
            Ok(file.read_at(offset, bytes)?)
        })?;
        Ok(PyBytes::new(py, &read))
    }

    /// Closes the file.
    fn close(&self) {
        engine::give_up(GivenUp::File(self.number));
    }
}

impl File {
    fn reopen(&self, engine: &Engine) -> Result<OpenFile> {
        let view = engine.volumes(&self.home)?.view(&self.spec)?;
        Ok(view.open(self.node, OpenFlags::READ)?)
    }
}

impl Drop for File {
    fn drop(&mut self) {
        self.close();
    }
}

#[pymethods]
impl Writer {
    /// Appends bytes.
    fn append(&self, py: Python<'_>, bytes: &[u8]) -> PyResult<()> {
        engine::with(py, |engine| {
            let writer = engine.writers.get(self.number).ok_or_else(|| self.gone())?;
            lock(&writer).append(bytes)?;
            Ok(())
        })
    }

    /// Makes the file visible, in the place of an earlier one; durable when it returns.
    fn commit(&self, py: Python<'_>) -> PyResult<()> {
        engine::with(py, |engine| {
            let staged = self.take(engine)?;
            let view = engine.volumes(&self.home)?.view(&self.spec)?;
            Ok(view.publish(Publish::new().file(&self.path, staged.finish()?))?)
        })
    }

    /// Gives up what was written.
    fn discard(&self) {
        engine::give_up(GivenUp::Writer(self.number));
    }
}

impl Writer {
    fn take(&self, engine: &Engine) -> Result<StagedWriter> {
        let writer = engine.writers.take(self.number).ok_or_else(|| self.gone())?;
        let staged = Arc::into_inner(writer).ok_or_else(|| self.gone())?;
        Ok(staged.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    fn gone(&self) -> Failure {
        Failure::Closed { path: format!("{}:{}", self.spec, self.path) }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.discard();
    }
}

impl Entry {
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        let kind = match self.attr.kind {
            FileKind::File => "file",
            FileKind::Directory => "directory",
            FileKind::Symlink => "link",
            _ => "other",
        };
        dict.set_item("name", &self.path)?;
        dict.set_item("type", kind)?;
        dict.set_item("size", self.attr.size)?;
        dict.set_item("mode", self.attr.mode)?;
        dict.set_item("mtime", seconds(self.attr.mtime))?;
        Ok(dict)
    }
}

/// Seconds since 1970; 0 for a time before.
fn seconds(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
