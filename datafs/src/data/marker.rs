//! The marker of a store: a small file or object that identifies the store.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use millrace_leaf::atomic_file;

use super::backend::Backend;
use super::durable;
use super::error::{ObjectError, Result};
use super::remote::MARKER;
use super::store::Store;
use crate::object::Layout;

impl Backend {
    /// The marker of the store, if it has one.
    pub(crate) fn read_marker(&self) -> Result<Option<Vec<u8>>> {
        match self.store() {
            Store::Local(local) => match fs::read(local.root().join(MARKER)) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
                read => read.map(Some).map_err(|e| ObjectError::io("read", local.root().join(MARKER), e)),
            },
            Store::Remote(remote) => {
                let remote = Arc::clone(remote);
                self.answer(self.runtime().wait(async move { remote.read_marker().await }))
            }
        }
    }

    /// Writes the marker of the store; it is durable when this returns.
    pub(crate) fn write_marker(&self, text: &[u8]) -> Result<()> {
        match self.store() {
            // Processes that write it at the same time write the same marker.
            Store::Local(local) => write_file(local.root(), &self.new_id(Layout::Framed).to_string(), text),
            Store::Remote(remote) => {
                let (remote, text) = (Arc::clone(remote), text.to_vec());
                self.answer(self.runtime().wait(async move { remote.write_marker(text).await }))
            }
        }
    }
}

/// Replaces the marker in a directory atomically.
fn write_file(root: &Path, unique: &str, text: &[u8]) -> Result<()> {
    let fail = |e| ObjectError::io("write", root.join(MARKER), e);
    let staged = root.join(format!("{MARKER}#{unique}"));
    atomic_file::replace(&root.join(MARKER), &staged, text).map_err(fail)?;
    durable::sync_directory(root)
}
