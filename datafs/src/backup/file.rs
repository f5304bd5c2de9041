//! The metadata file of a backup: a SQLite file with the same key-value pairs as the metadata of the home,
//! whatever its engine, and the objects that were missing when the backup was made.

use std::fs::File;
use std::path::{Path, PathBuf};

use millrace_leaf::private;
use rusqlite::{Connection, OpenFlags, OptionalExtension as _, params};

use crate::error::{Error, Result};
use crate::meta::engine::{Order, Pair, ReadTxn};
use crate::meta::keys;
use crate::meta::sqlite::FORMAT_VERSION;
use crate::object::ObjectId;

/// Pairs in memory at a time.
const PAGE: usize = 4_096;

/// An open metadata file of a backup.
pub(super) struct BackupFile {
    connection: Connection,
    path: PathBuf,
}

impl BackupFile {
    /// Creates the file, or replaces it by an empty one.
    pub(super) fn create(path: &Path) -> Result<BackupFile> {
        let made = private::options().write(true).create(true).truncate(true).open(path);
        made.map_err(|e| Error::io("create", path, e))?;
        let file = BackupFile::connect(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        // No journal: the file is used only once it is complete and synced.
        file.run("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF")?;
        file.run(
            "CREATE TABLE kv (k BLOB PRIMARY KEY, v BLOB NOT NULL) WITHOUT ROWID; \
             CREATE TABLE missing (k BLOB PRIMARY KEY) WITHOUT ROWID",
        )?;
        Ok(file)
    }

    /// Opens a complete file read-only and checks it.
    pub(super) fn open(path: &Path) -> Result<BackupFile> {
        let file = BackupFile::connect(path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
        let check = file.connection.query_row("PRAGMA quick_check(1)", [], |row| row.get::<_, String>(0));
        let found = check.map_err(|e| file.fail(e))?;
        if found != "ok" {
            return Err(file.damaged(&found));
        }
        let format = file.get(keys::FORMAT)?.and_then(|value| value.try_into().ok()).map(u32::from_be_bytes);
        match format {
            None => Err(file.damaged("it has no format record")),
            Some(found) if found > FORMAT_VERSION => {
                Err(Error::NewerFormat { place: file.place(), found, supported: FORMAT_VERSION })
            }
            Some(_) => Ok(file),
        }
    }

    fn connect(path: &Path, flags: OpenFlags) -> Result<BackupFile> {
        let opened = Connection::open_with_flags(path, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX);
        let failed =
            |e: rusqlite::Error| Error::Metadata { place: path.display().to_string(), source: e.into() };
        Ok(BackupFile { connection: opened.map_err(failed)?, path: path.to_owned() })
    }

    fn place(&self) -> String {
        self.path.display().to_string()
    }

    fn fail(&self, error: rusqlite::Error) -> Error {
        match error.sqlite_error_code() {
            Some(rusqlite::ErrorCode::DiskFull) => Error::NoSpace { place: self.place(), quota: false },
            Some(rusqlite::ErrorCode::NotADatabase | rusqlite::ErrorCode::DatabaseCorrupt) => {
                self.damaged(&error.to_string())
            }
            _ => Error::Metadata { place: self.place(), source: error.into() },
        }
    }

    fn damaged(&self, reason: &str) -> Error {
        Error::corrupt(format!("the metadata of the backup, {}", self.place()), reason)
    }

    fn run(&self, text: &str) -> Result<()> {
        self.connection.execute_batch(text).map_err(|e| self.fail(e))
    }

    /// Copies all pairs that a transaction sees, but for derived data, which programs compute again.
    pub(super) fn fill(&self, txn: &mut dyn ReadTxn) -> Result<()> {
        // A server that was away for a moment has the transaction run again.
        if !self.connection.is_autocommit() {
            self.run("COMMIT")?;
        }
        self.run("BEGIN; DELETE FROM kv")?;
        let left_out = keys::derived();
        self.copy(txn, Vec::new(), &left_out)?;
        self.copy(txn, keys::after_prefix(&left_out), &[u8::MAX])?;
        self.run("COMMIT")
    }

    /// Copies the pairs with `start <= key < end`.
    fn copy(&self, txn: &mut dyn ReadTxn, mut start: Vec<u8>, end: &[u8]) -> Result<()> {
        loop {
            let page = txn.scan(&start, end, Order::Ascending, PAGE)?;
            for (key, value) in &page {
                self.add("INSERT INTO kv (k, v) VALUES (?1, ?2)", params![key, value])?;
            }
            match page.last() {
                Some((last, _)) if page.len() == PAGE => start = [last.as_slice(), &[0]].concat(),
                _ => return Ok(()),
            }
        }
    }

    fn add(&self, sql: &str, parameters: impl rusqlite::Params) -> Result<()> {
        let added = self.connection.prepare_cached(sql).and_then(|mut add| add.execute(parameters));
        added.map(drop).map_err(|e| self.fail(e))
    }

    /// Records an object that is missing in the store.
    pub(super) fn note_missing(&self, id: ObjectId) -> Result<()> {
        self.add("INSERT OR IGNORE INTO missing (k) VALUES (?1)", params![id.to_bytes()])
    }

    pub(super) fn was_missing(&self, id: ObjectId) -> Result<bool> {
        let found = self
            .connection
            .prepare_cached("SELECT 1 FROM missing WHERE k = ?1")
            .and_then(|mut find| find.exists(params![id.to_bytes()]));
        found.map_err(|e| self.fail(e))
    }

    pub(super) fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let found = self
            .connection
            .prepare_cached("SELECT v FROM kv WHERE k = ?1")
            .and_then(|mut find| find.query_row(params![key], |row| row.get(0)).optional());
        found.map_err(|e| self.fail(e))
    }

    /// Whether the metadata points at an object.
    pub(super) fn refers_to(&self, id: ObjectId) -> Result<bool> {
        Ok(self.get(&keys::references(id))?.is_some())
    }

    /// All pairs, in order.
    pub(super) fn pairs(&self) -> impl Iterator<Item = Result<Pair>> {
        let mut start = Some(Vec::new());
        let mut page = Vec::new().into_iter();
        std::iter::from_fn(move || {
            loop {
                if let Some(pair) = page.next() {
                    return Some(Ok(pair));
                }
                match self.page(&start.take()?, &[u8::MAX], PAGE) {
                    Ok(pairs) => {
                        let last = pairs.last().filter(|_| pairs.len() == PAGE);
                        start = last.map(|(key, _): &Pair| [key.as_slice(), &[0]].concat());
                        page = pairs.into_iter();
                    }
                    Err(error) => return Some(Err(error)),
                }
            }
        })
    }

    /// At most `limit` pairs with `start <= key < end`, in order.
    pub(super) fn page(&self, start: &[u8], end: &[u8], limit: usize) -> Result<Vec<Pair>> {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let read = || {
            self.connection
                .prepare_cached("SELECT k, v FROM kv WHERE k >= ?1 AND k < ?2 ORDER BY k LIMIT ?3")?
                .query_map(params![start, end, limit], |row| Ok((row.get(0)?, row.get(1)?)))?
                .collect::<rusqlite::Result<Vec<Pair>>>()
        };
        read().map_err(|e| self.fail(e))
    }

    /// Closes a new file and makes it durable.
    pub(super) fn finish(self) -> Result<()> {
        let path = self.path;
        let close = self.connection.close().map_err(|(_, error)| error);
        close.map_err(|e| Error::Metadata { place: path.display().to_string(), source: e.into() })?;
        File::open(&path).and_then(|file| file.sync_all()).map_err(|e| Error::io("sync", path, e))
    }
}
