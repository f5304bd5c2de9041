//! The reference model: a tree in memory that knows nothing of epochs, extents or transactions.

use std::collections::BTreeMap;

use crate::error::Error;

pub(super) const NAMES: [&str; 4] = ["a", "b", "c", "d"];
pub(super) const ROOT: u64 = 0;

/// Indexes into [`NAMES`].
pub(super) type Path = Vec<u8>;

/// What kind of error the model expects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fail {
    NotFound,
    Exists,
    NotADirectory,
    IsADirectory,
    NotEmpty,
    Invalid,
    NotPermitted,
    NoAttribute,
}

pub(super) fn kind_of(error: &Error) -> Fail {
    match error {
        Error::NotFound { .. } => Fail::NotFound,
        Error::Exists { .. } => Fail::Exists,
        Error::NotADirectory { .. } => Fail::NotADirectory,
        Error::IsADirectory { .. } => Fail::IsADirectory,
        Error::NotEmpty { .. } => Fail::NotEmpty,
        Error::Invalid(_) => Fail::Invalid,
        Error::NotPermitted { .. } => Fail::NotPermitted,
        Error::NoAttribute { .. } => Fail::NoAttribute,
        other => panic!("unexpected error {other:?}"),
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Body {
    Directory(BTreeMap<String, u64>),
    /// What everybody sees, and what this process sees.
    File {
        committed: Vec<u8>,
        current: Vec<u8>,
    },
    Symlink(String),
}

#[derive(Debug, Clone)]
pub(super) struct Inode {
    pub(super) body: Body,
    pub(super) nlink: u32,
    pub(super) mode: u32,
    pub(super) xattrs: BTreeMap<String, Vec<u8>>,
}

#[derive(Debug, Clone)]
pub(super) struct Tree {
    pub(super) inodes: BTreeMap<u64, Inode>,
    pub(super) keys: BTreeMap<String, Vec<u8>>,
}

impl Tree {
    pub(super) fn new() -> Tree {
        let root =
            Inode { body: Body::Directory(BTreeMap::new()), nlink: 2, mode: 0o755, xattrs: BTreeMap::new() };
        Tree { inodes: BTreeMap::from([(ROOT, root)]), keys: BTreeMap::new() }
    }

    pub(super) fn children(&self, ino: u64) -> Result<&BTreeMap<String, u64>, Fail> {
        match &self.inodes[&ino].body {
            Body::Directory(children) => Ok(children),
            _ => Err(Fail::NotADirectory),
        }
    }

    pub(super) fn children_mut(&mut self, ino: u64) -> &mut BTreeMap<String, u64> {
        match &mut self.inodes.get_mut(&ino).unwrap().body {
            Body::Directory(children) => children,
            _ => panic!("no directory"),
        }
    }

    pub(super) fn find(&self, path: &Path) -> Result<u64, Fail> {
        path.iter().try_fold(ROOT, |at, part| {
            self.children(at)?.get(NAMES[usize::from(*part)]).copied().ok_or(Fail::NotFound)
        })
    }

    /// Parent and name; the parent is a directory.
    pub(super) fn place(&self, path: &Path) -> Result<(u64, &'static str), Fail> {
        let (name, parents) = path.split_last().unwrap();
        let parent = self.find(&parents.to_vec())?;
        self.children(parent)?;
        Ok((parent, NAMES[usize::from(*name)]))
    }

    pub(super) fn is_directory(&self, ino: u64) -> bool {
        matches!(self.inodes[&ino].body, Body::Directory(_))
    }

    pub(super) fn file_mut(&mut self, ino: u64) -> (&mut Vec<u8>, &mut Vec<u8>) {
        match &mut self.inodes.get_mut(&ino).unwrap().body {
            Body::File { committed, current } => (committed, current),
            _ => panic!("no file"),
        }
    }

    pub(super) fn flush(&mut self, ino: u64) {
        let (committed, current) = self.file_mut(ino);
        committed.clone_from(current);
    }

    /// Ancestors of a directory, itself included.
    pub(super) fn is_below(&self, ino: u64, ancestor: u64) -> bool {
        ino == ancestor
            || self.inodes.iter().any(|(parent, inode)| match &inode.body {
                Body::Directory(children) => {
                    children.values().any(|c| *c == ino) && self.is_below(*parent, ancestor)
                }
                _ => false,
            })
    }
}
