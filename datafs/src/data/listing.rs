//! Listings of a store in pages, each of which begins after a position.

use std::collections::BinaryHeap;
use std::fs;
use std::future::ready;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use futures::TryStreamExt as _;
use object_store::path::Path as StorePath;

use super::error::{ObjectError, Result};
use super::local::LocalStore;
use super::pool::ObjectPool;
use super::remote::RemoteStore;
use super::retry::insist;
use super::store::Store;
use crate::object::{ObjectId, SUMS_SUFFIX};

/// Files in the answer to one request of a remote store.
const REMOTE_PAGE: usize = 1_000;

/// What a file of the store is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Part {
    /// An object's data.
    Data,
    /// The sidecar with its checksums.
    Sums,
    /// An object that is being written, or was when its writer died; only in a local store.
    Unfinished { path: PathBuf, modified: Option<SystemTime> },
}

/// A file of the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Listed {
    pub(crate) object: ObjectId,
    pub(crate) part: Part,
    pub(crate) bytes: u64,
}

/// A page of a listing.
#[derive(Debug, Default)]
pub(crate) struct ListPage {
    pub(crate) files: Vec<Listed>,
    /// The position after which the next page begins; `None` at the end.
    pub(crate) next: Option<String>,
    /// Requests that it took: of a remote store, or reads of directories.
    pub(crate) lists: u64,
}

impl ObjectPool {
    /// At most `limit` files of the store after a position, an empty one for the start. Files are in the order of
    /// their positions. A position that no page has returned is allowed.
    pub(crate) fn list_page(&self, after: &str, limit: usize) -> Result<ListPage> {
        match self.backend().store() {
            Store::Local(local) => local.list_page(after, limit),
            Store::Remote(remote) => {
                let (remote, after) = (Arc::clone(remote), after.to_owned());
                let listed = async move {
                    let after = after
                        .split_once('/')
                        .map(|(session, name)| remote.below(&["objects"]).join(session).join(name));
                    remote.list_page(remote.below(&["objects"]), after, limit).await
                };
                self.backend().answer(self.runtime().wait(listed))
            }
        }
    }

    /// [`ObjectPool::list_page`] for the objects of one session in a remote store.
    pub(crate) fn list_session_page(&self, session: u64, after: &str, limit: usize) -> Result<ListPage> {
        let (remote, after) = (self.backend().remote()?, after.to_owned());
        let listed = async move {
            let below = remote.session_path("objects", session);
            let after = after.split_once('/').map(|(_, name)| below.clone().join(name));
            remote.list_page(below, after, limit).await
        };
        self.backend().answer(self.runtime().wait(listed))
    }

    /// Aborts the unfinished uploads of a dead session. Returns how many there were: none in a local store.
    pub(crate) fn abort_uploads(&self, session: u64) -> Result<u64> {
        match self.backend().store() {
            Store::Local(_) => Ok(0),
            Store::Remote(remote) => {
                let remote = Arc::clone(remote);
                let aborted = async move { remote.take_back_session(session).await };
                self.backend().answer(self.runtime().wait(aborted))
            }
        }
    }
}

impl LocalStore {
    fn list_page(&self, after: &str, limit: usize) -> Result<ListPage> {
        let (fan_out, name) = after.split_once('/').unwrap_or_default();
        let (mut fan_out, mut name) = (u8::from_str_radix(fan_out, 16).unwrap_or(0), name.to_owned());
        let (mut page, mut left) = (ListPage::default(), limit.max(1));
        loop {
            let found = self.names_after(fan_out, &name, left)?;
            page.lists += u64::from(found.is_there);
            left -= found.names.len();
            page.files.extend(found.names.iter().filter_map(|name| self.listed(fan_out, name)));
            if found.more {
                page.next = found.names.last().map(|name| format!("{fan_out:02x}/{name}"));
                return Ok(page);
            }
            let Some(next) = fan_out.checked_add(1) else { return Ok(page) };
            (fan_out, name) = (next, String::new());
            if left == 0 {
                page.next = Some(format!("{fan_out:02x}/"));
                return Ok(page);
            }
        }
    }

    /// The first names in a fan-out directory after `name`, sorted. Memory is bounded by `limit`.
    fn names_after(&self, fan_out: u8, name: &str, limit: usize) -> Result<Names> {
        let directory = self.root().join(format!("{fan_out:02x}"));
        let entries = match fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Names::default()),
            Err(e) => return Err(ObjectError::io("list object directory", directory, e)),
        };
        let mut first = BinaryHeap::new();
        let mut more = false;
        for entry in entries {
            let entry = entry.map_err(|e| ObjectError::io("list object directory", &directory, e))?;
            let Ok(found) = entry.file_name().into_string() else { continue };
            if found.as_str() <= name {
                continue;
            }
            first.push(found);
            if first.len() > limit {
                first.pop();
                more = true;
            }
        }
        Ok(Names { names: first.into_sorted_vec(), more, is_there: true })
    }

    /// A file by its name; `None` when it is no part of an object, or is gone.
    fn listed(&self, fan_out: u8, name: &str) -> Option<Listed> {
        // Unfinished files are `NAME#N` until they are renamed.
        let (whole, is_unfinished) = match name.split_once('#') {
            Some((whole, _)) => (whole, true),
            None => (name, false),
        };
        let data = whole.strip_suffix(SUMS_SUFFIX);
        let object: ObjectId = data.unwrap_or(whole).parse().ok()?;
        let path = self.root().join(format!("{fan_out:02x}")).join(name);
        let file = fs::symlink_metadata(&path).ok()?;
        let part = match (is_unfinished, data) {
            (true, _) => Part::Unfinished { path, modified: file.modified().ok() },
            (false, Some(_)) => Part::Sums,
            (false, None) => Part::Data,
        };
        Some(Listed { object, part, bytes: file.len() })
    }
}

/// Names in a directory.
#[derive(Debug, Default)]
struct Names {
    names: Vec<String>,
    /// There are more after them.
    more: bool,
    is_there: bool,
}

impl RemoteStore {
    async fn list_page(&self, below: StorePath, after: Option<StorePath>, limit: usize) -> Result<ListPage> {
        let listed = insist("list", self.place(), self.timeout(), |_| {
            let listing = self.listing(&below, after.as_ref());
            futures::StreamExt::take(listing, limit.max(1)).try_fold(
                (Vec::new(), 0, None),
                |(mut files, count, _), entry| {
                    files.extend(listed(&entry));
                    ready(Ok((files, count + 1, Some(entry.location))))
                },
            )
        });
        let (files, count, last) = listed.await?;
        let next = last.filter(|_| count == limit.max(1)).map(|last| {
            let parts: Vec<String> = last.parts().map(|part| part.as_ref().to_owned()).collect();
            parts[parts.len().saturating_sub(2)..].join("/")
        });
        Ok(ListPage { files, next, lists: count.div_ceil(REMOTE_PAGE).max(1) as u64 })
    }
}

fn listed(entry: &object_store::ObjectMeta) -> Option<Listed> {
    let name = entry.location.filename()?;
    let data = name.strip_suffix(SUMS_SUFFIX);
    let part = if data.is_some() { Part::Sums } else { Part::Data };
    Some(Listed { object: data.unwrap_or(name).parse().ok()?, part, bytes: entry.size })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::Layout;

    #[test]
    fn pages_of_any_size_hold_each_file_once() {
        let dir = tempfile::tempdir().unwrap();
        let pool = ObjectPool::open_local(dir.path(), 1).unwrap();
        let mut expected = Vec::new();
        for i in 0..300_u64 {
            let object = ObjectId::new(i % 3, i.wrapping_mul(0x9e37_79b9_7f4a_7c15), Layout::Plain);
            let path = dir.path().join(object.data_name());
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, vec![0; i as usize]).unwrap();
            fs::write(dir.path().join(object.sums_name()), b"").unwrap();
            expected.push((object, i));
        }
        fs::write(dir.path().join(format!("{}#7", expected[0].0.data_name())), b"x").unwrap();
        fs::write(dir.path().join("00/no-object"), b"x").unwrap_or_default();
        expected.sort();
        for limit in [1, 7, 100, 10_000] {
            let (mut position, mut data, mut sums, mut unfinished) = (String::new(), Vec::new(), 0, 0);
            loop {
                let page = pool.list_page(&position, limit).unwrap();
                assert!(page.files.len() <= limit);
                for file in page.files {
                    match file.part {
                        Part::Data => data.push((file.object, file.bytes)),
                        Part::Sums => sums += 1,
                        Part::Unfinished { .. } => unfinished += 1,
                    }
                }
                let Some(next) = page.next else { break };
                assert!(next > position);
                position = next;
            }
            data.sort();
            assert!(data == expected, "{limit}");
            assert_eq!((sums, unfinished), (300, 1));
        }
        // Positions that metadata of another store, or a damaged record, may hold.
        for position in ["zz/", "ff/zzz", "/", "no", "é/x", "../../x"] {
            pool.list_page(position, 10).unwrap();
        }
    }
}
