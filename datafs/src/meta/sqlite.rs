//! SQLite engine: one file in WAL mode, shared by the processes of a machine.
//!
//! One connection writes, behind a mutex; a pool of connections reads. Write transactions are
//! `BEGIN IMMEDIATE`, so that none fails for a lock after it has begun. Relaxed commits run with
//! `synchronous = NORMAL`: they are in the write-ahead log, which is not synced. A power failure may undo the
//! newest, in order; the file stays whole. Durable commits run with `FULL`: SQLite syncs the log, with
//! everything before it. A commit that extends the file first allocates the space, see `file_space.rs`.

mod fault;

use std::fmt;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime};

use millrace_leaf::error_chain;
use millrace_leaf::private;
use parking_lot::Mutex;
use rusqlite::config::DbConfig;
use rusqlite::hooks::Wal;
use rusqlite::{Connection, OpenFlags, OptionalExtension as _, params};

use self::fault::{is_busy, translate};
use super::change_log;
use super::closing::Open;
use super::codec::Decoder;
use super::engine::{Durability, Engine, FileIdentity, Order, Pair, ReadTxn, WriteTxn};
use super::file_space::{FileSpace, free_bytes};
use super::keys;
use super::reserve::{self, allocate_open};
use crate::error::{Error, Result};

/// Format version of the metadata that this build reads and writes.
pub(crate) const FORMAT_VERSION: u32 = 1;
/// Reader connections that are kept for reuse, at most.
const READERS_IDLE_MAX: usize = 16;
/// Longest single wait of SQLite for a lock; [`Sqlite::locked`] repeats it up to its own limit.
const BUSY_SLICE: Duration = Duration::from_millis(2_000);
/// Longest wait of a reader, which SQLite counts in milliseconds of 31 bits.
const READ_WAIT_MAX: Duration = Duration::from_secs(24 * 3600);
/// Log length in pages at which a commit copies the log back: 16 MiB.
const CHECKPOINT_PAGES: u32 = 4_096;
/// One region of SQLite's shared memory is for 4,096 pages of the log. Regions are allocated for a log of 128
/// MiB, eight times the length at which it is copied back.
const SHARED_REGION_BYTES: u64 = 32 << 10;
const SHARED_BYTES: u64 = 8 * SHARED_REGION_BYTES;
/// With less free space only the first region is allocated.
const SHARED_ROOM_BYTES: u64 = 16 << 20;
/// Earlier versions lose commits when one process resets the log while another copies it back:
/// <https://sqlite.org/wal.html#walresetbug>.
const _: () =
    assert!(rusqlite::ffi::SQLITE_VERSION_NUMBER >= 3_051_003, "SQLite before 3.51.3 loses commits");
/// Page cache of the writer connection and of each reader connection, in KiB.
const CACHE_KIB: u32 = 16_384;

/// The engine.
pub(crate) struct Sqlite {
    path: PathBuf,
    lock_wait: Duration,
    writer: Mutex<Writer>,
    readers: Mutex<Vec<Connection>>,
    /// Connection that copies the log back.
    copier: Mutex<Option<Connection>>,
    /// Pages in the log after the newest commit of this process.
    log_pages: Arc<AtomicU32>,
    /// Whether the name of the log is durable.
    log_named: AtomicBool,
    /// Device and inode of the file.
    file: (u64, u64),
    /// The file, opened with `O_PATH`: closing it drops none of SQLite's locks.
    handle: File,
    /// Another file has replaced this one, so the log must not be copied back any more.
    replaced: AtomicBool,
    page_bytes: u64,
    /// Space that the file must leave on its disk for the log, in bytes.
    log_room: u64,
    /// Dropped after the connections: closing the file would end their locks.
    space: FileSpace,
    /// Dropped last.
    open: Open,
}

impl Drop for Sqlite {
    fn drop(&mut self) {
        // The last connection of a process copies the log back on close, into the file that has the path by
        // then.
        if self.replaced.load(Ordering::Acquire) {
            let readers = self.readers.get_mut().iter();
            let copier = self.copier.get_mut().iter();
            for connection in readers.chain(copier).chain([&self.writer.get_mut().connection]) {
                leave_log(connection);
            }
        }
    }
}

struct Writer {
    connection: Connection,
    durability: Durability,
}

impl fmt::Debug for Sqlite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sqlite").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Sqlite {
    /// Opens the file, or creates it if it is missing; its directory exists.
    pub(crate) fn open(path: &Path, lock_wait: Duration) -> Result<Sqlite> {
        let connection = connect(path, lock_wait)?;
        let look = || {
            let handle = OpenOptions::new().read(true).custom_flags(nix::libc::O_PATH).open(path)?;
            let found = handle.metadata()?;
            Ok(((found.dev(), found.ino()), handle))
        };
        let (file, handle) = look().map_err(|e| Error::io("look at metadata file", path, e))?;
        let space = FileSpace::open(path, &handle, file);
        let mut engine = Sqlite {
            path: path.to_owned(),
            lock_wait,
            writer: Mutex::new(Writer { connection, durability: Durability::Durable }),
            readers: Mutex::new(Vec::new()),
            copier: Mutex::new(None),
            log_pages: Arc::default(),
            log_named: AtomicBool::new(false),
            file,
            handle,
            replaced: AtomicBool::new(false),
            page_bytes: 0,
            // The change log grows, too.
            log_room: reserve::share_of_disk(path) + change_log::LOG_BYTES,
            space,
            open: Open::default(),
        };
        engine.prepare()?;
        engine.page_bytes = engine.read_page_bytes()?;
        engine.allocate_shared_memory()?;
        Ok(engine)
    }

    /// Allocates blocks for SQLite's shared memory, which is a file. SQLite extends it by writing a byte in
    /// each 4 KiB, which leaves holes where blocks are smaller.
    fn allocate_shared_memory(&self) -> Result<()> {
        let mut path = self.path.clone().into_os_string();
        path.push("-shm");
        let path = PathBuf::from(path);
        let allocate = |bytes| allocate_open(&path, bytes).map_err(|e| Error::io("allocate", &path, e));
        if let Err(error @ Error::NoSpace { .. }) = allocate(SHARED_REGION_BYTES) {
            return Err(error);
        }
        let has_room = self.free_bytes().is_none_or(|free| free >= SHARED_ROOM_BYTES);
        if has_room && let Err(error) = allocate(SHARED_BYTES) {
            tracing::debug!(%error, "allocating shared memory for a long log");
        }
        Ok(())
    }

    /// Checks the format before any write, then creates what is missing.
    fn prepare(&self) -> Result<()> {
        let writer = self.writer.lock();
        let connection = &writer.connection;
        self.locked(|| {
            let table: Option<String> = connection
                .query_row("SELECT name FROM sqlite_master WHERE name = 'kv'", [], |row| row.get(0))
                .optional()?;
            Ok(table.is_some())
        })
        .and_then(|exists| if exists { self.check_format(connection) } else { Ok(()) })?;
        self.locked(|| {
            connection.pragma_update(None, "journal_mode", "WAL")?;
            connection.pragma_update(None, "synchronous", "FULL")?;
            connection.pragma_update(None, "wal_autocheckpoint", CHECKPOINT_PAGES)?;
            connection.pragma_update(None, "journal_size_limit", 64 << 20)?;
            connection.pragma_update(None, "cache_size", -i64::from(CACHE_KIB))?;
            connection.execute_batch("BEGIN IMMEDIATE")?;
            let made = connection
                .execute_batch(
                    "CREATE TABLE IF NOT EXISTS kv (k BLOB PRIMARY KEY, v BLOB NOT NULL) WITHOUT ROWID",
                )
                .and_then(|()| {
                    connection.execute(
                        "INSERT INTO kv (k, v) VALUES (?1, ?2) ON CONFLICT (k) DO NOTHING",
                        params![keys::FORMAT, &FORMAT_VERSION.to_be_bytes()[..]],
                    )
                })
                .and_then(|_| connection.execute_batch("COMMIT"));
            if made.is_err() {
                roll_back(connection);
            }
            made
        })?;
        self.check_format(connection)
    }

    fn read_page_bytes(&self) -> Result<u64> {
        let writer = self.writer.lock();
        self.locked(|| pragma(&writer.connection, "PRAGMA page_size"))
    }

    fn check_format(&self, connection: &Connection) -> Result<()> {
        let value: Option<Vec<u8>> = self.locked(|| {
            connection
                .query_row("SELECT v FROM kv WHERE k = ?1", params![keys::FORMAT], |row| row.get(0))
                .optional()
        })?;
        let Some(value) = value else { return Ok(()) };
        let found = value
            .as_slice()
            .try_into()
            .map(u32::from_be_bytes)
            .map_err(|_| Error::corrupt(self.place(), "its format record is not a number"))?;
        if found > FORMAT_VERSION {
            return Err(Error::NewerFormat { place: self.place(), found, supported: FORMAT_VERSION });
        }
        Ok(())
    }

    /// Turns off copies of the log by commits: from now on the caller calls [`Sqlite::checkpoint`] in time.
    pub(crate) fn checkpoint_elsewhere(&self) -> Result<()> {
        let mut writer = self.writer.lock();
        self.locked(|| writer.connection.pragma_update(None, "wal_autocheckpoint", 0))?;
        let log_pages = Arc::clone(&self.log_pages);
        let hook = move |_: &mut Wal, pages: i32| {
            log_pages.store(u32::try_from(pages).unwrap_or(0), Ordering::Release);
            Ok(())
        };
        let start = Instant::now();
        writer.connection.wal_hook(Some(hook)).map_err(|error| self.translate(error, start))
    }

    /// Pages in the log after the newest commit of this process.
    pub(crate) fn log_pages(&self) -> u32 {
        self.log_pages.load(Ordering::Acquire)
    }

    /// Copies the log back into the file, as far as no reader needs the older pages.
    pub(crate) fn checkpoint(&self) -> Result<()> {
        self.copy_log("PRAGMA wal_checkpoint(PASSIVE)").map(drop)
    }

    /// [`Sqlite::checkpoint`], after which the log takes no space. While a process reads from it or writes,
    /// it copies as much as possible and leaves the length of the log. Never waits. Returns whether the log
    /// is empty.
    pub(crate) fn empty_log(&self) -> Result<bool> {
        self.copy_log("PRAGMA wal_checkpoint(TRUNCATE)")
    }

    fn copy_log(&self, how: &str) -> Result<bool> {
        if self.replaced.load(Ordering::Acquire) {
            return Ok(true);
        }
        let start = Instant::now();
        let mut copier = self.copier.lock();
        let connection = match &*copier {
            Some(connection) => connection,
            None => {
                let connection = connect(&self.path, self.lock_wait)?;
                connection.busy_timeout(Duration::ZERO).map_err(|error| self.translate(error, start))?;
                copier.insert(connection)
            }
        };
        let is_blocked = connection.query_row(how, [], |row| row.get::<_, bool>(0));
        is_blocked.map(|blocked| !blocked).map_err(|error| self.translate(error, start))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Dropped with the file.
    pub(crate) fn open_mark(&self) -> Open {
        self.open.clone()
    }

    /// Whether no other file has the path of this one. While the path leads nowhere, as when a folder above
    /// it is renamed: whether the file still has a name.
    pub(crate) fn is_in_place(&self) -> bool {
        match file_at(&self.path) {
            Ok(file) => file == self.file,
            Err(_) => self.handle.metadata().is_ok_and(|file| file.nlink() > 0),
        }
    }

    /// Records that another file has replaced this one: the log is not copied back any more.
    pub(crate) fn note_replaced(&self) {
        self.replaced.store(true, Ordering::Release);
    }

    /// Free bytes on the disk of the file, if the system call succeeds.
    pub(crate) fn free_bytes(&self) -> Option<u64> {
        free_bytes(&self.path)
    }

    /// How long a write waits for other processes.
    pub(crate) fn lock_wait(&self) -> Duration {
        self.lock_wait
    }

    pub(crate) fn place(&self) -> String {
        self.path.display().to_string()
    }

    /// Repeats a call that fails because another process holds the lock, up to `lock_wait`.
    fn locked<T>(&self, mut call: impl FnMut() -> rusqlite::Result<T>) -> Result<T> {
        let start = Instant::now();
        loop {
            match call() {
                Ok(value) => return Ok(value),
                Err(error) if is_busy(&error) && start.elapsed() < self.lock_wait => {}
                Err(error) => return Err(self.translate(error, start)),
            }
        }
    }

    fn translate(&self, error: rusqlite::Error, start: Instant) -> Error {
        translate(&self.path, error, start.elapsed())
    }

    /// Syncs the log: it has all commits that are not in the synced file.
    pub(crate) fn sync_log(&self) -> Result<()> {
        let mut log = self.path.clone().into_os_string();
        log.push("-wal");
        match File::open(&log).and_then(|file| file.sync_data()) {
            // No commit was ever written to it.
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            result => result.map_err(|e| Error::io("sync", log, e))?,
        }
        if !self.log_named.load(Ordering::Acquire) {
            let folder = self.path.parent().unwrap_or(Path::new("/"));
            File::open(folder).and_then(|f| f.sync_all()).map_err(|e| Error::io("sync folder", folder, e))?;
            self.log_named.store(true, Ordering::Release);
        }
        Ok(())
    }

    fn take_reader(&self) -> Result<Connection> {
        if let Some(connection) = self.readers.lock().pop() {
            return Ok(connection);
        }
        let connection = connect(&self.path, self.lock_wait)?;
        self.locked(|| {
            // A read may meet a lock in the middle of a transaction, where it cannot be repeated.
            connection.busy_timeout(self.lock_wait.min(READ_WAIT_MAX))?;
            connection.pragma_update(None, "query_only", true)?;
            connection.pragma_update(None, "cache_size", -i64::from(CACHE_KIB))
        })?;
        Ok(connection)
    }

    fn return_reader(&self, connection: Connection) {
        if self.replaced.load(Ordering::Acquire) {
            return leave_log(&connection);
        }
        if connection.is_autocommit() {
            let mut readers = self.readers.lock();
            if readers.len() < READERS_IDLE_MAX {
                readers.push(connection);
            }
        }
    }
}

/// A committed state, readable for as long as this lives.
pub(crate) struct Snapshot {
    engine: Arc<Sqlite>,
    /// `None` only while it is dropped.
    connection: Option<Connection>,
    /// The number of the newest batch in it.
    batch: u64,
}

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot").field("batch", &self.batch).finish_non_exhaustive()
    }
}

impl Snapshot {
    /// The state that is committed now.
    pub(crate) fn take(engine: &Arc<Sqlite>) -> Result<Snapshot> {
        let connection = engine.take_reader()?;
        engine.locked(|| execute(&connection, "BEGIN"))?;
        let mut snapshot = Snapshot { engine: Arc::clone(engine), connection: Some(connection), batch: 0 };
        snapshot.batch = match snapshot.get(keys::BATCH)? {
            Some(value) => Decoder::new("batch number", &value).u64()?,
            None => 0,
        };
        Ok(snapshot)
    }

    /// The number of the newest batch in it.
    pub(crate) fn batch(&self) -> u64 {
        self.batch
    }

    fn connection(&self) -> Result<&Connection> {
        self.connection
            .as_ref()
            .ok_or_else(|| Error::corrupt(self.engine.place(), "a snapshot without a connection"))
    }

    pub(crate) fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let connection = self.connection()?;
        get(connection, key).map_err(|e| self.engine.translate(e, Instant::now()))
    }

    /// Runs `body` with a function that returns the pairs with `start <= key < end` one by one, in `order`.
    pub(crate) fn pairs<T>(
        &self,
        start: &[u8],
        end: &[u8],
        order: Order,
        body: impl FnOnce(&mut dyn FnMut() -> Result<Option<Pair>>) -> Result<T>,
    ) -> Result<T> {
        let sql = match order {
            Order::Ascending => "SELECT k, v FROM kv WHERE k >= ?1 AND k < ?2 ORDER BY k",
            Order::Descending => "SELECT k, v FROM kv WHERE k >= ?1 AND k < ?2 ORDER BY k DESC",
        };
        let fail = |e| self.engine.translate(e, Instant::now());
        let mut statement = self.connection()?.prepare_cached(sql).map_err(fail)?;
        let mut rows = statement.query(params![start, end]).map_err(fail)?;
        body(&mut || {
            let Some(row) = rows.next().map_err(fail)? else { return Ok(None) };
            Ok(Some((row.get(0).map_err(fail)?, row.get(1).map_err(fail)?)))
        })
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.take() {
            roll_back(&connection);
            self.engine.return_reader(connection);
        }
    }
}

impl Engine for Sqlite {
    fn read(&self, body: &mut dyn FnMut(&mut dyn ReadTxn) -> Result<()>) -> Result<()> {
        let connection = self.take_reader()?;
        self.locked(|| execute(&connection, "BEGIN"))?;
        let open = OpenTxn { connection: &connection };
        let result = body(&mut Txn {
            engine: self,
            connection: &connection,
            start: Instant::now(),
            makes_room: false,
        });
        drop(open);
        self.return_reader(connection);
        result
    }

    fn write(
        &self,
        durability: Durability,
        body: &mut dyn FnMut(&mut dyn WriteTxn) -> Result<()>,
    ) -> Result<()> {
        let mut writer = self.writer.lock();
        if writer.durability != durability {
            let level = match durability {
                Durability::Relaxed => "NORMAL",
                Durability::Durable => "FULL",
            };
            self.locked(|| writer.connection.pragma_update(None, "synchronous", level))?;
            writer.durability = durability;
        }
        let connection = &writer.connection;
        self.locked(|| execute(connection, "BEGIN IMMEDIATE"))?;
        let open = OpenTxn { connection };
        let mut txn = Txn { engine: self, connection, start: Instant::now(), makes_room: false };
        body(&mut txn)?;
        let room = if txn.makes_room { 0 } else { self.log_room };
        let start = Instant::now();
        let pages = pragma(connection, "PRAGMA page_count").map_err(|error| self.translate(error, start))?;
        let bytes = pages.saturating_mul(self.page_bytes);
        self.space.ensure(bytes, room)?;
        let committed = execute(connection, "COMMIT").map_err(|error| self.translate(error, start));
        drop(open);
        // A process that copied the log back meanwhile has cut the file behind the pages of the previous
        // commit.
        if committed.is_ok()
            && let Err(error) = self.space.ensure(bytes, 0)
        {
            tracing::debug!(%error, "the space of a commit was given back and is taken; the next commit tries again");
        }
        committed
    }

    fn sync(&self) -> Result<()> {
        match self.write(Durability::Durable, &mut |txn| txn.put(keys::BARRIER, &[])) {
            // A full disk must not stop a caller that wants to free space on it.
            Err(Error::NoSpace { .. }) => self.sync_log(),
            other => other,
        }
    }

    fn file_identity(&self) -> Result<FileIdentity> {
        let look = |e| Error::io("look at metadata file", self.path.as_path(), e);
        let created = self.handle.metadata().map_err(look)?.created().ok();
        let created = created.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
        let (device, inode) = self.file;
        Ok(FileIdentity { device, inode, created: created.unwrap_or_default() })
    }

    /// A commit is visible to every process when it returns.
    fn barrier(&self) -> Result<()> {
        Ok(())
    }
}

/// Rolls an unfinished transaction back, also when its body panics.
struct OpenTxn<'a> {
    connection: &'a Connection,
}

impl Drop for OpenTxn<'_> {
    fn drop(&mut self) {
        roll_back(self.connection);
    }
}

struct Txn<'a> {
    engine: &'a Sqlite,
    connection: &'a Connection,
    start: Instant,
    /// The transaction may extend the file without leaving space for the log.
    makes_room: bool,
}

impl Txn<'_> {
    fn fail(&self, error: rusqlite::Error) -> Error {
        self.engine.translate(error, self.start)
    }
}

impl ReadTxn for Txn<'_> {
    fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        get(self.connection, key).map_err(|e| self.fail(e))
    }

    fn scan(&mut self, start: &[u8], end: &[u8], order: Order, limit: usize) -> Result<Vec<Pair>> {
        let sql = match order {
            Order::Ascending => "SELECT k, v FROM kv WHERE k >= ?1 AND k < ?2 ORDER BY k LIMIT ?3",
            Order::Descending => "SELECT k, v FROM kv WHERE k >= ?1 AND k < ?2 ORDER BY k DESC LIMIT ?3",
        };
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let scan = || {
            self.connection
                .prepare_cached(sql)?
                .query_map(params![start, end, limit], |row| Ok((row.get(0)?, row.get(1)?)))?
                .collect::<rusqlite::Result<Vec<Pair>>>()
        };
        scan().map_err(|e| self.fail(e))
    }
}

impl WriteTxn for Txn<'_> {
    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let put = || {
            self.connection
                .prepare_cached("INSERT INTO kv (k, v) VALUES (?1, ?2) ON CONFLICT (k) DO UPDATE SET v = ?2")?
                .execute(params![key, value])
        };
        put().map(drop).map_err(|e| self.fail(e))
    }

    fn delete(&mut self, key: &[u8]) -> Result<()> {
        let delete = || self.connection.prepare_cached("DELETE FROM kv WHERE k = ?1")?.execute(params![key]);
        delete().map(drop).map_err(|e| self.fail(e))
    }

    fn makes_room(&mut self) {
        self.makes_room = true;
    }

    fn as_read(&mut self) -> &mut dyn ReadTxn {
        self
    }
}

/// Keeps a connection from copying the log back when it is closed.
fn leave_log(connection: &Connection) {
    if let Err(error) = connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true) {
        tracing::warn!(
            error = error_chain::one_line(&error),
            "the log of a replaced metadata file may be copied into the new one"
        );
    }
}

/// Device and inode of the file at a path.
fn file_at(path: &Path) -> std::io::Result<(u64, u64)> {
    let found = std::fs::metadata(path)?;
    Ok((found.dev(), found.ino()))
}

fn connect(path: &Path, lock_wait: Duration) -> Result<Connection> {
    let flags =
        OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    // SQLite would let other users read a file that it creates, and gives the files beside it the same mode.
    // An existing file is not even opened here: closing it would end SQLite's locks.
    private::options().write(true).create_new(true).open(path).ok();
    let open = || {
        let connection = Connection::open_with_flags(path, flags)?;
        connection.busy_timeout(BUSY_SLICE.min(lock_wait))?;
        Ok(connection)
    };
    open().map_err(|error| translate(path, error, Duration::ZERO))
}

fn get(connection: &Connection, key: &[u8]) -> rusqlite::Result<Option<Vec<u8>>> {
    connection
        .prepare_cached("SELECT v FROM kv WHERE k = ?1")?
        .query_row(params![key], |row| row.get(0))
        .optional()
}

/// The number that a pragma returns.
fn pragma(connection: &Connection, sql: &str) -> rusqlite::Result<u64> {
    let value: i64 = connection.prepare_cached(sql)?.query_row([], |row| row.get(0))?;
    Ok(u64::try_from(value).unwrap_or(0))
}

fn execute(connection: &Connection, sql: &str) -> rusqlite::Result<()> {
    connection.prepare_cached(sql)?.execute([]).map(drop)
}

fn roll_back(connection: &Connection) {
    if !connection.is_autocommit()
        && let Err(error) = execute(connection, "ROLLBACK")
    {
        tracing::warn!(error = error_chain::one_line(&error), "rolling back a metadata transaction");
    }
}
