//! The reference model: a tree in memory that knows nothing of epochs, extents or transactions. It holds what
//! every process sees when it opens a file or looks up a name, without unflushed writes.

use std::collections::BTreeMap;

use crate::error::Error;

pub(super) const NAMES: [&str; 4] = ["a", "b", "c", "d"];
pub(super) const ROOT: u64 = 0;

/// Indexes into [`NAMES`].
pub(super) type Path = Vec<u8>;

/// The kind of error that the model expects.
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
    File(Vec<u8>),
    Symlink(String),
    Fifo,
}

#[derive(Debug, Clone)]
pub(super) struct Inode {
    pub(super) body: Body,
    pub(super) nlink: u32,
    /// Set while it has never had a name; whether it may get one.
    pub(super) unnamed: Option<bool>,
    pub(super) mode: u32,
    pub(super) xattrs: BTreeMap<String, Vec<u8>>,
}

#[derive(Debug, Clone)]
pub(super) struct Tree {
    pub(super) inodes: BTreeMap<u64, Inode>,
    pub(super) keys: BTreeMap<String, Vec<u8>>,
    next: u64,
}

impl Inode {
    fn new(body: Body, mode: u32) -> Inode {
        Inode { body, nlink: 0, unnamed: None, mode, xattrs: BTreeMap::new() }
    }
}

impl Tree {
    pub(super) fn new() -> Tree {
        let root = Inode { nlink: 2, ..Inode::new(Body::Directory(BTreeMap::new()), 0o755) };
        Tree { inodes: BTreeMap::from([(ROOT, root)]), keys: BTreeMap::new(), next: 1 }
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

    pub(super) fn find(&self, path: &[u8]) -> Result<u64, Fail> {
        path.iter().try_fold(ROOT, |at, part| {
            self.children(at)?.get(NAMES[usize::from(*part)]).copied().ok_or(Fail::NotFound)
        })
    }

    /// Finds a regular file.
    pub(super) fn find_file(&self, path: &[u8]) -> Result<u64, Fail> {
        let ino = self.find(path)?;
        match self.inodes[&ino].body {
            Body::File(_) => Ok(ino),
            Body::Directory(_) => Err(Fail::IsADirectory),
            Body::Symlink(_) | Body::Fifo => Err(Fail::Invalid),
        }
    }

    /// The parent and the name of a path; the parent must be a directory.
    pub(super) fn place(&self, path: &[u8]) -> Result<(u64, &'static str), Fail> {
        let (name, parents) = path.split_last().unwrap();
        let parent = self.find(parents)?;
        self.children(parent)?;
        Ok((parent, NAMES[usize::from(*name)]))
    }

    /// The parent and the name of a path that must not exist.
    pub(super) fn free(&self, path: &[u8]) -> Result<(u64, &'static str), Fail> {
        let place = self.place(path)?;
        match self.children(place.0)?.contains_key(place.1) {
            true => Err(Fail::Exists),
            false => Ok(place),
        }
    }

    pub(super) fn is_directory(&self, ino: u64) -> bool {
        matches!(self.inodes[&ino].body, Body::Directory(_))
    }

    pub(super) fn bytes(&self, ino: u64) -> &[u8] {
        match &self.inodes[&ino].body {
            Body::File(bytes) => bytes,
            _ => panic!("no file"),
        }
    }

    pub(super) fn bytes_mut(&mut self, ino: u64) -> &mut Vec<u8> {
        match &mut self.inodes.get_mut(&ino).unwrap().body {
            Body::File(bytes) => bytes,
            _ => panic!("no file"),
        }
    }

    /// Whether an inode is a directory or is below it.
    fn is_below(&self, ino: u64, ancestor: u64) -> bool {
        ino == ancestor
            || self.inodes.iter().any(|(parent, inode)| match &inode.body {
                Body::Directory(children) => {
                    children.values().any(|c| *c == ino) && self.is_below(*parent, ancestor)
                }
                _ => false,
            })
    }

    pub(super) fn add(&mut self, place: (u64, &str), body: Body, mode: u32) -> u64 {
        let directory = u32::from(matches!(body, Body::Directory(_)));
        let ino = self.insert(Inode { nlink: directory, ..Inode::new(body, mode) });
        self.inodes.get_mut(&place.0).unwrap().nlink += directory;
        self.link(ino, place);
        ino
    }

    /// Adds a file without a name.
    pub(super) fn add_unnamed(&mut self, may_get_one: bool, mode: u32) -> u64 {
        let file = Inode::new(Body::File(Vec::new()), mode);
        self.insert(Inode { unnamed: Some(may_get_one), ..file })
    }

    fn insert(&mut self, inode: Inode) -> u64 {
        let ino = self.next;
        self.next += 1;
        self.inodes.insert(ino, inode);
        ino
    }

    /// Adds a name of an inode.
    pub(super) fn link(&mut self, ino: u64, (parent, name): (u64, &str)) {
        self.children_mut(parent).insert(name.to_owned(), ino);
        let inode = self.inodes.get_mut(&ino).unwrap();
        inode.nlink += 1;
        inode.unnamed = None;
    }

    /// Removes a name, not the inode.
    pub(super) fn remove_name(&mut self, (parent, name): (u64, &str)) {
        self.children_mut(parent).remove(name);
    }

    pub(super) fn remove_directory(&mut self, path: &[u8]) -> Result<(), Fail> {
        let (parent, name) = self.place(path)?;
        let ino = self.find(path)?;
        if !self.children(ino)?.is_empty() {
            return Err(Fail::NotEmpty);
        }
        self.remove_name((parent, name));
        self.inodes.remove(&ino);
        self.inodes.get_mut(&parent).unwrap().nlink -= 1;
        Ok(())
    }

    /// Returns the file that loses a name, if any.
    pub(super) fn rename(&mut self, from: &[u8], to: &[u8], no_replace: bool) -> Result<Option<u64>, Fail> {
        let (parent, name) = self.place(from)?;
        let (new_parent, new_name) = self.place(to)?;
        let ino = self.find(from)?;
        let directory = self.is_directory(ino);
        if directory && self.is_below(new_parent, ino) {
            return Err(Fail::Invalid);
        }
        let mut dropped = None;
        if let Some(replaced) = self.children(new_parent)?.get(new_name).copied() {
            if no_replace {
                return Err(Fail::Exists);
            }
            if replaced == ino {
                return Ok(None);
            }
            match (directory, self.is_directory(replaced)) {
                (true, false) => return Err(Fail::NotADirectory),
                (false, true) => return Err(Fail::IsADirectory),
                (true, true) if !self.children(replaced)?.is_empty() => return Err(Fail::NotEmpty),
                (true, true) => {
                    self.inodes.remove(&replaced);
                    self.inodes.get_mut(&new_parent).unwrap().nlink -= 1;
                }
                (false, false) => dropped = Some(replaced),
            }
        }
        self.children_mut(parent).remove(name);
        self.children_mut(new_parent).insert(new_name.to_owned(), ino);
        self.inodes.get_mut(&parent).unwrap().nlink -= u32::from(directory);
        self.inodes.get_mut(&new_parent).unwrap().nlink += u32::from(directory);
        Ok(dropped)
    }

    pub(super) fn exchange(&mut self, from: &[u8], to: &[u8]) -> Result<(), Fail> {
        let (parent, name) = self.place(from)?;
        let (other, other_name) = self.place(to)?;
        let (ino, other_ino) = (self.find(from)?, self.find(to)?);
        if ino == other_ino {
            return Ok(());
        }
        for (moved, to) in [(ino, other), (other_ino, parent)] {
            if self.is_directory(moved) && self.is_below(to, moved) {
                return Err(Fail::Invalid);
            }
        }
        self.children_mut(parent).insert(name.to_owned(), other_ino);
        self.children_mut(other).insert(other_name.to_owned(), ino);
        for (place, goes, comes) in [(parent, ino, other_ino), (other, other_ino, ino)] {
            let (goes, comes) = (self.is_directory(goes), self.is_directory(comes));
            let inode = self.inodes.get_mut(&place).unwrap();
            inode.nlink = inode.nlink + u32::from(comes) - u32::from(goes);
        }
        Ok(())
    }
}
