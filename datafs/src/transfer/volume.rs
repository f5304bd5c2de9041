//! The volume side of a copy: a file or folder of a volume, at the level of inodes, so that names may be any
//! bytes.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::path::{Component, Path, PathBuf};

use bytes::Bytes;
use millrace_leaf::error_chain;
use parking_lot::Mutex;

use super::tree::{Attributes, CHUNK, Entry, Kind, PAGE, ReadFile, Source, Target, WriteFile, partial_name};
use crate::error::{Error, Result};
use crate::fs::{OpenFile, OpenFlags, Owner, SetAttr, SetTime, SetXattr, View};
use crate::node::{Attr, FileKind, Node};

pub(super) struct VolumeTree {
    view: View,
    root: PathBuf,
    /// Cache of the folders that were looked up or created.
    folders: Mutex<HashMap<PathBuf, Node>>,
}

impl VolumeTree {
    pub(super) fn new(view: &View, root: &Path) -> VolumeTree {
        let names = root.components().filter(|part| matches!(part, Component::Normal(_)));
        VolumeTree { view: view.clone(), root: names.collect(), folders: Mutex::default() }
    }

    fn at(&self, path: &Path) -> PathBuf {
        self.root.join(path)
    }

    /// A folder by its path from the root of the volume; created with mode `make` when it is missing.
    fn folder(&self, path: &Path, make: Option<u32>) -> Result<Node> {
        let Some(name) = path.file_name() else { return Ok(self.view.root()) };
        if let Some(node) = self.folders.lock().get(path) {
            return Ok(*node);
        }
        let parent = self.folder(path.parent().unwrap_or(Path::new("")), make.map(|_| PARENT_MODE))?;
        let node = match self.view.lookup(parent, name) {
            Ok(attr) if attr.kind == FileKind::Directory => attr.node,
            Ok(_) => return Err(Error::NotADirectory { what: path.display().to_string() }),
            Err(error) => match make.filter(|_| error.is_not_found()) {
                None => return Err(error),
                Some(mode) => match self.view.mkdir(parent, name, mode, owner()) {
                    Ok(attr) => attr.node,
                    Err(Error::Exists { .. }) => return self.folder(path, make),
                    Err(error) => return Err(error),
                },
            },
        };
        self.folders.lock().insert(path.to_owned(), node);
        Ok(node)
    }

    /// The parent folder and the name of a path below the root of the copy.
    fn place(&self, path: &Path, make: bool) -> Result<(Node, OsString)> {
        let path = self.at(path);
        let name = path.file_name().ok_or_else(|| Error::IsADirectory { what: "the root".into() })?;
        let make = make.then_some(PARENT_MODE);
        Ok((self.folder(path.parent().unwrap_or(Path::new("")), make)?, name.to_owned()))
    }

    fn find_attr(&self, path: &Path) -> Result<Attr> {
        if self.at(path).file_name().is_none() {
            return self.view.getattr(self.view.root());
        }
        let (parent, name) = self.place(path, false)?;
        self.view.lookup(parent, &name)
    }

    /// Removes an unfinished copy. A failure is logged, because the copy takes space.
    fn remove_partial(&self, parent: Node, partial: &OsStr) {
        match self.view.unlink(parent, partial) {
            Err(error) if !error.is_not_found() => {
                let name = partial.to_string_lossy();
                tracing::warn!(
                    error = error_chain::one_line(&error), volume = %self.view.spec(), %name,
                    "an unfinished copy is left behind"
                );
            }
            _ => {}
        }
    }

    /// Creates a link; replaces an existing entry of that name.
    fn replace(&self, link: impl Fn(&OsStr) -> Result<Attr>, parent: Node, name: &OsStr) -> Result<()> {
        match link(name) {
            Err(Error::Exists { .. }) => {}
            other => return other.map(drop),
        }
        let partial = partial_name();
        link(&partial)?;
        self.settle(parent, &partial, name)
    }

    /// Renames an entry from its partial to its final name.
    fn settle(&self, parent: Node, partial: &OsStr, name: &OsStr) -> Result<()> {
        let settled = self.view.rename(parent, partial, parent, name, false);
        if settled.is_err() {
            self.remove_partial(parent, partial);
        }
        settled
    }
}

/// Mode of missing parent folders of the copy.
const PARENT_MODE: u32 = 0o755;

fn owner() -> Owner {
    Owner { uid: nix::unistd::geteuid().as_raw(), gid: nix::unistd::getegid().as_raw() }
}

fn entry(name: OsString, attr: &Attr) -> Entry {
    let kind = match attr.kind {
        FileKind::File => Kind::File,
        FileKind::Directory => Kind::Folder,
        FileKind::Symlink => Kind::Symlink,
        _ => Kind::Special,
    };
    Entry {
        name,
        kind,
        size: attr.size,
        mtime: attr.mtime,
        mode: Some(attr.mode),
        owner: Some((attr.uid, attr.gid)),
        identity: (attr.nlink > 1).then_some((attr.node.snapshot, attr.node.ino)),
        node: Some(attr.node),
        version: None,
    }
}

impl Source for VolumeTree {
    fn root(&self) -> Result<Entry> {
        let attr = self.find_attr(Path::new("")).map_err(|error| match error {
            Error::NotFound { .. } => {
                Error::not_found(format!("{}:/{}", self.view.spec(), self.root.display()))
            }
            other => other,
        })?;
        Ok(entry(self.root.clone().into_os_string(), &attr))
    }

    fn list(&self, _: &Path, folder: &Entry, visit: &mut dyn FnMut(Vec<Entry>) -> bool) -> Result<()> {
        let node = folder.node.unwrap_or(self.view.root());
        let mut cursor = 0;
        loop {
            let page = self.view.readdir_attrs(node, cursor, PAGE)?;
            let Some((last, _)) = page.last() else { return Ok(()) };
            cursor = last.cursor;
            let entries = page.into_iter().filter(|(item, _)| item.name != "." && item.name != "..");
            if !visit(entries.map(|(item, attr)| entry(item.name, &attr)).collect()) {
                return Ok(());
            }
        }
    }

    fn look(&self, path: &Path) -> Result<Entry> {
        Ok(entry(OsString::new(), &self.find_attr(path)?))
    }

    fn open<'s>(&'s self, path: &Path, file: &Entry) -> Result<Box<dyn ReadFile + 's>> {
        let node = match file.node {
            Some(node) => node,
            None => self.find_attr(path)?.node,
        };
        let opened = self.view.open(node, OpenFlags::READ)?;
        Ok(Box::new(VolumeFile { tree: self, file: opened, at: 0, data_end: 0, size: file.size }))
    }

    fn target(&self, path: &Path, link: &Entry) -> Result<OsString> {
        self.view.readlink(match link.node {
            Some(node) => node,
            None => self.find_attr(path)?.node,
        })
    }

    fn attributes(&self, _: &Path, entry: &Entry) -> Result<Attributes> {
        let Some(node) = entry.node else { return Ok(Vec::new()) };
        let names = self.view.xattr_list(node)?;
        let users = names.into_iter().filter(|name| name.as_encoded_bytes().starts_with(b"user."));
        users.map(|name| self.view.xattr_get(node, &name).map(|value| (name, value))).collect()
    }
}

struct VolumeFile<'s> {
    tree: &'s VolumeTree,
    file: OpenFile,
    at: u64,
    data_end: u64,
    size: u64,
}

impl ReadFile for VolumeFile<'_> {
    fn next(&mut self) -> Result<Option<(u64, Bytes)>> {
        let view = &self.tree.view;
        if self.at >= self.size {
            return Ok(None);
        }
        if self.at >= self.data_end {
            let Some(start) = view.seek_data(self.file.node(), self.at)? else { return Ok(None) };
            let end = view.seek_hole(self.file.node(), start)?.unwrap_or(self.size);
            (self.at, self.data_end) = (start, end.max(start + 1));
        }
        let bytes = self.file.read_at(self.at, CHUNK.min((self.data_end - self.at) as usize))?;
        if bytes.is_empty() {
            return Ok(None);
        }
        let at = self.at;
        self.at += bytes.len() as u64;
        Ok(Some((at, bytes)))
    }

    fn size(&self) -> Result<u64> {
        Ok(self.file.attr()?.size)
    }
}

impl Target for VolumeTree {
    fn keeps_times(&self) -> bool {
        true
    }

    fn has_links(&self) -> bool {
        true
    }

    fn find(&self, path: &Path) -> Result<Option<Entry>> {
        match self.find_attr(path) {
            Ok(attr) => Ok(Some(entry(OsString::new(), &attr))),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn make_folder(&self, path: &Path, like: &Entry) -> Result<bool> {
        let there = self.find(path)?.is_some();
        self.folder(&self.at(path), Some(if like.mode.is_some() { 0o700 } else { PARENT_MODE }))?;
        Ok(!there)
    }

    fn finish_folder(&self, path: &Path, like: &Entry, attributes: &Attributes) -> Result<()> {
        let node = self.folder(&self.at(path), None)?;
        dress(&self.view, node, like, attributes)
    }

    fn create<'s>(&'s self, path: &Path, like: &Entry) -> Result<Box<dyn WriteFile + 's>> {
        let (parent, name) = self.place(path, true)?;
        // An unnamed file of a killed copy is removed with its session.
        let (_, file) = self.view.create_unnamed(parent, 0o600, owner(), OpenFlags::READ_WRITE)?;
        Ok(Box::new(NewFile { tree: self, file, parent, name, like: like.clone() }))
    }

    fn make_symlink(&self, path: &Path, target: OsString, like: &Entry) -> Result<()> {
        let (parent, name) = self.place(path, true)?;
        if let Ok(there) = self.view.lookup(parent, &name)
            && there.kind == FileKind::Symlink
            && self.view.readlink(there.node)? == target
        {
            return Ok(());
        }
        let partial = partial_name();
        let made = self.view.symlink(parent, &partial, &target, owner())?;
        let mtime = Some(SetTime::At(like.mtime));
        self.view.setattr(made.node, &SetAttr { mtime, ..SetAttr::default() })?;
        self.settle(parent, &partial, &name)
    }

    fn make_link(&self, existing: &Path, path: &Path) -> Result<()> {
        let node = self.find_attr(existing)?.node;
        let (parent, name) = self.place(path, true)?;
        if self.view.lookup(parent, &name).is_ok_and(|there| there.node == node) {
            return Ok(());
        }
        self.replace(|name| self.view.link(node, parent, name), parent, &name)
    }

    fn finish(&self) -> Result<()> {
        self.view.sync()
    }
}

/// Sets the mode, time and attributes of the copied entry on an inode.
fn dress(view: &View, node: Node, like: &Entry, attributes: &Attributes) -> Result<()> {
    for (name, value) in attributes {
        view.xattr_set(node, name, value, SetXattr::Any)?;
    }
    let owned = view.getattr(node)?;
    let (mode, mtime) = (like.mode_of_copy(owned.uid, owned.gid), Some(SetTime::At(like.mtime)));
    view.setattr(node, &SetAttr { mode, mtime, ..SetAttr::default() })?;
    Ok(())
}

struct NewFile<'s> {
    tree: &'s VolumeTree,
    file: OpenFile,
    parent: Node,
    name: OsString,
    like: Entry,
}

impl WriteFile for NewFile<'_> {
    fn write(&mut self, offset: u64, bytes: Bytes) -> Result<()> {
        self.file.write_at(offset, &bytes).map(drop)
    }

    fn finish(self: Box<Self>, attributes: &Attributes) -> Result<()> {
        let size = self.like.size;
        self.file.flush()?;
        if self.file.attr()?.size != size {
            self.file.set_len(size)?;
        }
        let like = Entry { mode: Some(self.like.mode.unwrap_or(0o644)), ..self.like.clone() };
        dress(&self.tree.view, self.file.node(), &like, attributes)?;
        self.tree.replace(|name| self.file.link(self.parent, name), self.parent, &self.name)
    }
}
