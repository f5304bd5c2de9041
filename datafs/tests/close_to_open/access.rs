//! Access to the files of a volume through either the library or a mount.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use millrace_datafs::{Config, Datafs, Error, Node, OpenFile, OpenFlags, Owner, View};

const OWNER: Owner = Owner { uid: 0, gid: 0 };

pub(super) enum Access {
    Library(View),
    Mount(PathBuf),
}

/// The way in which a process gives a file its next content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rewrite {
    /// Truncate the file and write it again.
    Create,
    /// Write over the old content, then set the length.
    InPlace,
    /// Write a draft and rename it over the file.
    Rename,
    /// Remove the file and create it again.
    Replace,
}

impl Rewrite {
    pub(super) const ALL: [Rewrite; 4] =
        [Rewrite::Create, Rewrite::InPlace, Rewrite::Rename, Rewrite::Replace];
}

impl Access {
    pub(super) fn library(home: &Path) -> Access {
        let datafs = Datafs::open(home, &Config::default()).unwrap();
        Access::Library(datafs.view(&"v".parse().unwrap()).unwrap())
    }

    pub(super) fn mount(at: &Path) -> Access {
        Access::Mount(at.to_owned())
    }

    /// Opens and reads a whole file; `None` if it does not exist.
    pub(super) fn read(&self, name: &str) -> Option<Vec<u8>> {
        match self {
            Access::Mount(at) => match fs::read(at.join(name)) {
                Err(error) if error.kind() == ErrorKind::NotFound => None,
                read => Some(read.unwrap()),
            },
            Access::Library(view) => match view.read_file(name) {
                Err(Error::NotFound { .. }) => None,
                read => Some(read.unwrap().to_vec()),
            },
        }
    }

    /// The size of a file, without opening it; 0 if it does not exist.
    pub(super) fn size(&self, name: &str) -> u64 {
        match self {
            Access::Mount(at) => fs::metadata(at.join(name)).map_or(0, |metadata| metadata.len()),
            Access::Library(view) => view.stat(name).map_or(0, |stat| stat.size),
        }
    }

    /// Appends bytes and closes the file; creates it if it does not exist.
    pub(super) fn append(&self, name: &str, bytes: &[u8]) {
        match self {
            Access::Mount(at) => {
                let mut file = OpenOptions::new().append(true).create(true).open(at.join(name)).unwrap();
                file.write_all(bytes).unwrap();
            }
            Access::Library(view) => {
                let flags = OpenFlags { append: true, ..OpenFlags::READ_WRITE };
                let (_, file) = view.create(view.root(), name.as_ref(), 0o644, OWNER, flags).unwrap();
                file.write_at(0, bytes).unwrap();
                file.flush().unwrap();
            }
        }
    }

    /// Gives a file its next content. Only this process uses the name `draft`.
    pub(super) fn rewrite(&self, name: &str, bytes: &[u8], how: Rewrite, draft: &str) {
        match self {
            Access::Mount(at) => rewrite_mounted(&at.join(name), bytes, how, &at.join(draft)),
            Access::Library(view) => rewrite_in(view, name, bytes, how, draft),
        }
    }
}

fn rewrite_mounted(path: &Path, bytes: &[u8], how: Rewrite, draft: &Path) {
    match how {
        Rewrite::Create => fs::write(path, bytes).unwrap(),
        Rewrite::InPlace => {
            let mut file: File = OpenOptions::new().write(true).open(path).unwrap();
            file.write_all(bytes).unwrap();
            file.set_len(bytes.len() as u64).unwrap();
        }
        Rewrite::Rename => {
            fs::write(draft, bytes).unwrap();
            fs::rename(draft, path).unwrap();
        }
        Rewrite::Replace => {
            fs::remove_file(path).unwrap();
            fs::write(path, bytes).unwrap();
        }
    }
}

fn rewrite_in(view: &View, name: &str, bytes: &[u8], how: Rewrite, draft: &str) {
    let root = view.root();
    let finish = |file: OpenFile| {
        file.write_at(0, bytes).unwrap();
        file.flush().unwrap();
    };
    let make = |name: &str| {
        let flags = OpenFlags { truncate: true, ..OpenFlags::READ_WRITE };
        finish(view.create(root, name.as_ref(), 0o644, OWNER, flags).unwrap().1);
    };
    match how {
        Rewrite::Create => make(name),
        Rewrite::InPlace => {
            let node: Node = view.lookup(root, name.as_ref()).unwrap().node;
            let file = view.open(node, OpenFlags::READ_WRITE).unwrap();
            file.write_at(0, bytes).unwrap();
            file.set_len(bytes.len() as u64).unwrap();
            file.flush().unwrap();
        }
        Rewrite::Rename => {
            make(draft);
            view.rename_path(draft, name).unwrap();
        }
        Rewrite::Replace => {
            view.remove_file(name).unwrap();
            make(name);
        }
    }
}
