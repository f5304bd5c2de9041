//! The local object store: a directory whose files are the objects; durable ones are synced.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use millrace_leaf::private;

use super::access_time;
use super::durable;
use super::error::{ObjectError, Result};
use super::space::StoreSpace;
use crate::object::{Layout, ObjectId, SUMS_SUFFIX};

/// The store's directory, with 256 fan-out directories below for the objects.
#[derive(Debug)]
pub(super) struct LocalStore {
    root: PathBuf,
    place: String,
    /// Fan-out directories whose own names this process has synced.
    named: Box<[AtomicBool; 256]>,
}

impl LocalStore {
    /// Opens the directory; creates it when it is missing.
    pub(super) fn open(root: &Path) -> Result<LocalStore> {
        private::create_dir_all(root)
            .map_err(|e| ObjectError::io("create object store directory", root, e))?;
        let root =
            root.canonicalize().map_err(|e| ObjectError::io("open object store directory", root, e))?;
        access_time::leave_out(&root);
        let place = root.display().to_string();
        let named = Box::new([const { AtomicBool::new(false) }; 256]);
        Ok(LocalStore { root, place, named })
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    pub(super) fn place(&self) -> &str {
        &self.place
    }

    /// The file of a plain object.
    pub(super) fn image(&self, id: ObjectId) -> Result<File> {
        let path = self.root.join(id.data_name());
        File::open(&path).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => ObjectError::Missing { id },
            _ => ObjectError::io("open object file", path, e),
        })
    }

    /// Removes the files of an object; missing files are not an error.
    pub(super) fn delete(&self, id: ObjectId) -> Result<()> {
        self.remove(&id.data_name())?;
        if id.layout() == Layout::Plain { self.remove(&id.sums_name()) } else { Ok(()) }
    }

    fn remove(&self, name: &str) -> Result<()> {
        let path = self.root.join(name);
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(ObjectError::io("delete object file", path, e))
            }
            _ => Ok(()),
        }
    }

    /// The objects of a session; scans the whole store.
    pub(super) fn list_session(&self, session: u64) -> Result<BTreeSet<ObjectId>> {
        let mut ids = BTreeSet::new();
        self.each_file(|_, name| {
            let id = name.strip_suffix(SUMS_SUFFIX).unwrap_or(name).parse::<ObjectId>();
            ids.extend(id.ok().filter(|id| id.session() == session));
        })?;
        Ok(ids)
    }

    /// Calls `visit` for every file in the store: object, whether the file is its data, and bytes.
    pub(super) fn survey(&self, visit: &mut dyn FnMut(ObjectId, bool, u64)) -> Result<()> {
        self.each_file(|entry, name| {
            let data = name.strip_suffix(SUMS_SUFFIX);
            if let (Ok(id), Ok(file)) = (data.unwrap_or(name).parse(), entry.metadata()) {
                visit(id, data.is_none(), file.len());
            }
        })
    }

    fn each_file(&self, mut visit: impl FnMut(&fs::DirEntry, &str)) -> Result<()> {
        for fan_out in 0..=u8::MAX {
            let directory = self.root.join(format!("{fan_out:02x}"));
            let entries = match fs::read_dir(&directory) {
                Ok(entries) => entries,
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(ObjectError::io("list object directory", directory, e)),
            };
            for entry in entries {
                let entry = entry.map_err(|e| ObjectError::io("list object directory", &directory, e))?;
                if let Some(name) = entry.file_name().to_str() {
                    visit(&entry, name);
                }
            }
        }
        Ok(())
    }

    /// The space on the disk under the store.
    pub(super) fn space(&self) -> Result<StoreSpace> {
        StoreSpace::of_disk(&self.root)
    }

    /// Creates a file below the store, open for reading and writing; returns it with its path.
    pub(super) fn create(&self, name: &str) -> Result<(PathBuf, File)> {
        let path = self.root.join(name);
        let create = || private::options().read(true).write(true).create_new(true).open(&path);
        let file = match create() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let directory = path.parent().unwrap_or(&self.root);
                private::create_dir_all(directory)
                    .map_err(|e| ObjectError::io("create object directory", directory, e))?;
                create()
            }
            other => other,
        };
        match file {
            Ok(file) => Ok((path, file)),
            Err(e) => Err(ObjectError::io("create the file of an object at", path, e)),
        }
    }

    /// Makes the name of an object's file survive a power failure.
    pub(super) fn make_name_durable(&self, id: ObjectId) -> Result<()> {
        let path = self.root.join(id.data_name());
        durable::sync_directory(path.parent().unwrap_or(&self.root))?;
        let named = &self.named[usize::from(id.fan_out())];
        if !named.load(Ordering::Acquire) {
            durable::sync_directory(&self.root)?;
            named.store(true, Ordering::Release);
        }
        Ok(())
    }
}
