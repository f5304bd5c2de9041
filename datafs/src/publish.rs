//! Atomic publishing: files become visible in one step, together with application keys.
//!
//! A writer stages a file first: its bytes go into a durable object that no path leads to. Publishing commits
//! any number of staged files, removals and application keys in one metadata transaction. A crash before it
//! leaves the volume as it was; the collection of the session deletes the objects.

use std::ffi::OsStr;
use std::io;
use std::ops::Range;

use crate::data::ObjectWriter;
use crate::error::{Error, Result};
use crate::fs::fresh_object::FreshObject;
use crate::fs::path::{components, name_it};
use crate::fs::tree::{self, Closing};
use crate::fs::{View, content};
use crate::meta::engine::Durability;
use crate::meta::inode::{Dentry, Inode};
use crate::meta::keys;
use crate::meta::versioned::{Records as _, Writer};
use crate::node::{Attr, FileKind, Node, ROOT_INO};
use crate::object::Extent;

/// Longest application key, in bytes.
pub const KEY_BYTES_MAX: usize = 1024;
/// Longest value of an application key, in bytes.
pub const VALUE_BYTES_MAX: usize = 1 << 20;
/// Most steps of one publish.
pub const PUBLISH_STEPS_MAX: usize = 100_000;

/// A file being staged. Dropping it unfinished deletes its bytes.
#[derive(Debug)]
pub struct StagedWriter {
    view: View,
    head: Vec<u8>,
    object: Option<ObjectWriter>,
}

/// A staged file: durable, and invisible until it is published. Dropping it deletes it.
#[derive(Debug)]
pub struct StagedFile {
    len: u64,
    volume: u64,
    content: Content,
}

#[derive(Debug)]
enum Content {
    Inline(Vec<u8>),
    Object(FreshObject),
}

impl StagedFile {
    /// Its size in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl StagedWriter {
    /// Bytes written so far.
    pub fn len(&self) -> u64 {
        self.object.as_ref().map_or(self.head.len() as u64, ObjectWriter::len)
    }

    /// Whether nothing was written yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends bytes; memory stays bounded whatever the size of the file.
    pub fn append(&mut self, bytes: &[u8]) -> Result<()> {
        let object = match &mut self.object {
            Some(object) => object,
            None if self.head.len() + bytes.len() <= self.view.inline_bytes_max() => {
                self.head.extend_from_slice(bytes);
                return Ok(());
            }
            none => {
                let mut object = self.view.shared.pool.writer(self.view.codec())?;
                object.append(&self.head)?;
                self.head = Vec::new();
                none.insert(object)
            }
        };
        Ok(object.append(bytes)?)
    }

    /// Completes the file; its bytes are durable when this returns.
    pub fn finish(self) -> Result<StagedFile> {
        let (len, content) = match self.object {
            None => (self.head.len() as u64, Content::Inline(self.head)),
            Some(object) => {
                let object = self.view.shared.finish(object)?;
                (object.object().len, Content::Object(object))
            }
        };
        Ok(StagedFile { len, volume: self.view.volume, content })
    }
}

impl io::Write for StagedWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.append(bytes).map_err(io::Error::other)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The steps that one [`View::publish`] commits, in order.
#[derive(Debug, Default)]
pub struct Publish {
    steps: Vec<Step>,
}

#[derive(Debug)]
enum Step {
    File { path: String, staged: StagedFile },
    Remove { path: String },
    PutKey { key: String, value: Vec<u8> },
    DeleteKey { key: String },
    ExpectKey { key: String, value: Option<Vec<u8>> },
    ExpectAbsent { path: String },
    ExpectUnchanged { path: String, attr: Box<Attr> },
}

impl Publish {
    /// A publish without steps.
    pub fn new() -> Publish {
        Publish::default()
    }

    /// Makes a staged file visible at a path. Creates missing parent directories; replaces an existing file.
    #[must_use]
    pub fn file(self, path: impl Into<String>, staged: StagedFile) -> Publish {
        self.step(Step::File { path: path.into(), staged })
    }

    /// Removes a file; the publish fails with [`Error::NotFound`] when there is none.
    #[must_use]
    pub fn remove(self, path: impl Into<String>) -> Publish {
        self.step(Step::Remove { path: path.into() })
    }

    /// Sets an application key: at most [`KEY_BYTES_MAX`] bytes without NUL, its value at most
    /// [`VALUE_BYTES_MAX`].
    #[must_use]
    pub fn put_key(self, key: impl Into<String>, value: impl Into<Vec<u8>>) -> Publish {
        self.step(Step::PutKey { key: key.into(), value: value.into() })
    }

    /// Removes an application key; a missing key is not an error.
    #[must_use]
    pub fn delete_key(self, key: impl Into<String>) -> Publish {
        self.step(Step::DeleteKey { key: key.into() })
    }

    /// Fails the publish with [`Error::Conflict`] unless the key has this value (`None`: does not exist).
    /// Expectations are checked before any other step of the publish.
    #[must_use]
    pub fn expect_key(self, key: impl Into<String>, value: Option<Vec<u8>>) -> Publish {
        self.step(Step::ExpectKey { key: key.into(), value })
    }

    /// Fails the publish with [`Error::Exists`] when the path exists, even as a symbolic link. Checked before
    /// any other step of the publish.
    #[must_use]
    pub fn expect_absent(self, path: impl Into<String>) -> Publish {
        self.step(Step::ExpectAbsent { path: path.into() })
    }

    /// Fails the publish with [`Error::Changed`] unless the path still has the file with these attributes,
    /// with unchanged content and attributes. Symbolic links are not followed. Unflushed writes to the file
    /// do not count. Checked before any other step of the publish.
    #[must_use]
    pub fn expect_unchanged(self, path: impl Into<String>, attr: &Attr) -> Publish {
        self.step(Step::ExpectUnchanged { path: path.into(), attr: Box::new(*attr) })
    }

    fn step(mut self, step: Step) -> Publish {
        self.steps.push(step);
        self
    }
}

impl View {
    /// Begins a file that stays invisible until it is published.
    pub fn stage(&self) -> Result<StagedWriter> {
        self.writable(self.root())?;
        self.shared.meta.check_reserve()?;
        Ok(StagedWriter { view: self.clone(), head: Vec::new(), object: None })
    }

    /// Commits all of `publish` or, on error, nothing; durable when it returns `Ok`. After
    /// [`Error::Metadata`] the outcome of the commit is unknown: check an application key that the publish
    /// sets before retrying.
    pub fn publish(&self, publish: Publish) -> Result<()> {
        self.publish_files(publish).map(drop)
    }

    /// [`View::publish`] that returns the attributes of the published files, in order.
    pub(crate) fn publish_files(&self, publish: Publish) -> Result<Vec<Attr>> {
        let mut inos = 0;
        for step in &publish.steps {
            inos += self.check(step)?;
        }
        if publish.steps.len() > PUBLISH_STEPS_MAX {
            return Err(Error::TooLarge {
                what: "number of steps of a publish",
                max: PUBLISH_STEPS_MAX as u64,
            });
        }
        let spare = self.spare_inos(inos)?;
        let result = self.write_closing(Durability::Durable, |writer, closing| {
            publish.steps.iter().try_for_each(|step| check_expected(step, writer))?;
            let (mut spare, mut files) = (spare.clone(), Vec::new());
            for step in &publish.steps {
                files.extend(self.apply(step, writer, &mut spare, closing)?);
            }
            Ok(files)
        });
        let unknown = result.as_ref().is_err_and(|error| !error.is_definite());
        if result.is_ok() || unknown {
            for step in publish.steps {
                if let Step::File {
                    staged: StagedFile { content: Content::Object(mut object), .. }, ..
                } = step
                {
                    if unknown { object.abandon() } else { object.settle() }
                }
            }
        }
        result
    }

    /// Checks a step without reading the volume. Returns how many inodes it may create.
    fn check(&self, step: &Step) -> Result<u64> {
        match step {
            Step::File { path, staged } => {
                let elsewhere = match &staged.content {
                    Content::Inline(_) => false,
                    Content::Object(object) => !object.belongs_to(&self.shared),
                };
                if staged.volume != self.volume || elsewhere {
                    return Err(Error::Invalid(format!(
                        "{path} was staged for another volume or by another open home"
                    )));
                }
                Ok(check_path(path)?.len() as u64)
            }
            Step::Remove { path } | Step::ExpectAbsent { path } | Step::ExpectUnchanged { path, .. } => {
                check_path(path).map(|_| 0)
            }
            Step::DeleteKey { key } | Step::ExpectKey { key, .. } => check_key(key).map(|()| 0),
            Step::PutKey { key, value } => {
                if value.len() > VALUE_BYTES_MAX {
                    return Err(Error::TooLarge {
                        what: "value of an application key in bytes",
                        max: VALUE_BYTES_MAX as u64,
                    });
                }
                check_key(key).map(|()| 0)
            }
        }
    }

    /// Executes a step. Returns the attributes of the file that it created, if any.
    fn apply<'a>(
        &'a self,
        step: &Step,
        writer: &mut Writer<'_>,
        spare: &mut Range<u64>,
        closing: &mut Closing<'a>,
    ) -> Result<Option<Attr>> {
        match step {
            Step::ExpectKey { .. } | Step::ExpectAbsent { .. } | Step::ExpectUnchanged { .. } => Ok(None),
            Step::PutKey { key, value } => writer.put(&keys::application(key), value).map(|()| None),
            Step::DeleteKey { key } => writer.delete(&keys::application(key)).map(|()| None),
            Step::Remove { path } => {
                let parts = check_path(path)?;
                let (name, parents) = parts.split_last().ok_or_else(|| root_error(path))?;
                let parent = find_directories(writer, parents).map_err(|e| name_it(e, path))?;
                self.unlink_in(writer, parent, name, closing).map_err(|e| name_it(e, path))?;
                Ok(None)
            }
            Step::File { path, staged } => {
                let parts = check_path(path)?;
                let (name, parents) = parts.split_last().ok_or_else(|| root_error(path))?;
                let parent = make_directories(writer, parents, spare).map_err(|e| name_it(e, path))?;
                tree::check_entry(parent, name)?;
                let old = tree::child(writer, parent, name)?;
                if let Some(old) = old {
                    if old.kind == FileKind::Directory {
                        return Err(Error::IsADirectory { what: path.clone() });
                    }
                    self.unlink_in(writer, parent, name, closing)?;
                }
                let ino = take(spare)?;
                let directory = tree::directory(writer, parent)?;
                let mut inode = new_inode(&directory, FileKind::File, 0o644);
                inode.size = staged.len;
                match &staged.content {
                    Content::Inline(bytes) if bytes.is_empty() => {}
                    Content::Inline(bytes) => content::write_head(writer, ino, &inode, 0, bytes)?,
                    Content::Object(object) => {
                        let object = object.object();
                        if object.len > 0 {
                            let extent = Extent {
                                file_offset: 0,
                                len: object.len,
                                object: object.id,
                                object_offset: 0,
                            };
                            content::write_extent(writer, ino, &inode, &extent)?;
                        }
                    }
                }
                writer.settle(ino, &mut inode);
                tree::add_child(writer, (parent, directory), name, ino, &inode)?;
                Ok(Some(inode.attr(Node { snapshot: 0, ino })))
            }
        }
    }
}

/// Checks the expectation of a step; other steps pass.
fn check_expected(step: &Step, writer: &mut Writer<'_>) -> Result<()> {
    match step {
        Step::ExpectKey { key, value } if writer.get(&keys::application(key))? != *value => {
            Err(Error::Conflict { key: key.clone() })
        }
        Step::ExpectAbsent { path } if entry(writer, path)?.is_some() => {
            Err(Error::Exists { what: path.clone() })
        }
        Step::ExpectUnchanged { path, attr } => {
            let unchanged = match entry(writer, path)? {
                Some(dentry) if dentry.ino == attr.node.ino => {
                    let now = tree::inode(writer, dentry.ino)?.attr(attr.node);
                    (now.size, now.ctime, now.data_version) == (attr.size, attr.ctime, attr.data_version)
                }
                _ => false,
            };
            if unchanged { Ok(()) } else { Err(Error::Changed { what: path.clone() }) }
        }
        _ => Ok(()),
    }
}

/// The directory entry at a path, if it exists.
fn entry(writer: &mut Writer<'_>, path: &str) -> Result<Option<Dentry>> {
    let parts = check_path(path)?;
    let (name, parents) = parts.split_last().ok_or_else(|| root_error(path))?;
    match find_directories(writer, parents) {
        Ok(parent) => tree::child(writer, parent, name),
        Err(Error::NotFound { .. } | Error::NotADirectory { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Checks an application key.
pub(crate) fn check_key(key: &str) -> Result<()> {
    let invalid = |reason| Err(Error::InvalidName { name: key.chars().take(64).collect(), reason });
    match key {
        "" => invalid("an application key has at least one byte"),
        _ if key.len() > KEY_BYTES_MAX => invalid("an application key has at most 1024 bytes"),
        _ if key.contains('\0') => invalid("an application key has no NUL byte"),
        _ => Ok(()),
    }
}

fn check_path(path: &str) -> Result<Vec<&OsStr>> {
    let parts = components(path)?;
    if parts.is_empty() { Err(root_error(path)) } else { Ok(parts) }
}

fn root_error(path: &str) -> Error {
    Error::InvalidName { name: path.to_owned(), reason: "it names the root" }
}

fn take(spare: &mut Range<u64>) -> Result<u64> {
    spare.next().ok_or_else(|| Error::corrupt("inode counter", "too few numbers were set aside"))
}

/// A new inode in a directory, owned by this process (and by the directory's group if that is
/// set-group-ID).
fn new_inode(directory: &Inode, kind: FileKind, mode: u32) -> Inode {
    let (uid, gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
    tree::child_inode(directory, kind, mode, crate::fs::Owner { uid, gid })
}

/// The directory at a path. Symbolic links are not followed.
fn find_directories(writer: &mut Writer<'_>, parts: &[&OsStr]) -> Result<u64> {
    let mut parent = ROOT_INO;
    for name in parts {
        let dentry = tree::existing(writer, parent, name)?;
        if dentry.kind != FileKind::Directory {
            return Err(Error::NotADirectory { what: tree::display(name) });
        }
        parent = dentry.ino;
    }
    Ok(parent)
}

/// The directory at a path; missing ones are created. Symbolic links are not followed.
pub(crate) fn make_directories(
    writer: &mut Writer<'_>,
    parts: &[&OsStr],
    spare: &mut Range<u64>,
) -> Result<u64> {
    let mut parent = ROOT_INO;
    for name in parts {
        parent = match tree::child(writer, parent, name)? {
            Some(dentry) if dentry.kind == FileKind::Directory => dentry.ino,
            Some(_) => return Err(Error::NotADirectory { what: tree::display(name) }),
            None => {
                tree::check_entry(parent, name)?;
                let ino = take(spare)?;
                let directory = tree::directory(writer, parent)?;
                let inode = new_inode(&directory, FileKind::Directory, 0o755);
                tree::add_directory(writer, (parent, directory), name, ino, inode)?;
                ino
            }
        };
    }
    Ok(parent)
}
