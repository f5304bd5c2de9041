//! Versioned records: copy-on-write, so that a snapshot costs nothing.
//!
//! A volume has an epoch. A record's live version carries the epoch in which it was written. A new snapshot
//! takes the current epoch as its number and starts the next epoch. The first change of a record that a
//! snapshot holds moves the old version to the history table, keyed by the last snapshot that holds it. The
//! change also puts the version on that snapshot's dead list. A read at a snapshot takes the first version in
//! history whose last snapshot is not older, else the live one. It sees that version if it was written at or
//! before the snapshot.
//!
//! The references of objects are counted here too, because this is the one place where extents are added,
//! moved and removed (see `references.rs`).

use std::collections::BTreeMap;

use super::codec::{Decoder, Encoder};
use super::engine::{Order, Pair, ReadTxn, WriteTxn};
use super::inode::{Inode, Timestamp, stored_bytes};
use super::keys;
use super::references::ReferenceChanges;
use super::snapshot::SnapshotRow;
use crate::error::{Error, Result};
use crate::object::{Compression, ExpectedKeys, KeyIdentity};

/// Pairs that a scan reads from the engine at a time.
const PAGE: usize = 256;

/// The tree to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum At {
    Live,
    /// A snapshot, by number.
    Snapshot(u64),
}

/// A volume's row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VolumeRow {
    pub(crate) name: String,
    pub(crate) created: Timestamp,
    /// The current epoch, which new versions carry; starts at 1.
    pub(crate) epoch: u64,
    /// The newest snapshot that is not being deleted, or 0.
    pub(crate) last_snapshot: u64,
    /// The volume is being deleted: its name is free again and its records are being removed.
    pub(crate) deleting: bool,
    /// How new file data is compressed.
    pub(crate) compression: Compression,
    /// The encryption key of new file data, with the check value that tells it from others of its name.
    pub(crate) key: Option<KeyIdentity>,
    /// Earlier encryption keys. `None` if a program version that did not list them wrote the record.
    pub(crate) former_keys: Option<Vec<KeyIdentity>>,
}

/// The number of a volume by its name.
pub(crate) fn find_volume(txn: &mut dyn ReadTxn, name: &str) -> Result<u64> {
    match txn.get(&keys::volume_name(name))? {
        Some(value) => Decoder::new("volume name record", &value).u64(),
        None => Err(Error::not_found(format!("volume {name}"))),
    }
}

impl VolumeRow {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let (seconds, nanos) = self.created.parts();
        let row = Encoder::default()
            .u64(self.epoch)
            .u64(self.last_snapshot)
            .u8(u8::from(self.deleting))
            .i64(seconds)
            .u32(nanos)
            .bytes(self.name.as_bytes())
            .u8(self.compression.to_byte())
            .u8(self.compression.level())
            .bytes(self.key.as_ref().map_or(&[], |(name, _)| name.as_bytes()))
            .bytes(self.key.as_ref().map_or(&[], |(_, check)| check));
        let row = match &self.former_keys {
            Some(keys) if self.key.is_some() => {
                keys.iter().fold(row.u32(keys.len() as u32), |row, (name, check)| {
                    row.bytes(name.as_bytes()).bytes(check)
                })
            }
            _ => row,
        };
        row.finish()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<VolumeRow> {
        let mut from = Decoder::new("volume record", bytes);
        let mut row = VolumeRow {
            epoch: from.u64()?,
            last_snapshot: from.u64()?,
            deleting: from.u8()? != 0,
            created: Timestamp::from_parts(from.i64()?, from.u32()?),
            name: from.string()?,
            compression: Compression::None,
            key: None,
            former_keys: None,
        };
        let (way, level) = (from.u8()?, from.u8()?);
        row.compression = Compression::from_parts(way, level)
            .ok_or_else(|| Error::corrupt("volume record", "a compression that this build does not know"))?;
        let (key, check) = (from.string()?, from.bytes()?);
        let no_check = |_| Error::corrupt("volume record", "a key without check");
        if !key.is_empty() {
            row.key = Some((key, check.try_into().map_err(no_check)?));
        }
        if !from.is_at_end() {
            let mut keys = Vec::new();
            for _ in 0..from.u32()? {
                keys.push((from.string()?, from.bytes()?.try_into().map_err(no_check)?));
            }
            row.former_keys = Some(keys);
        }
        from.finish()?;
        Ok(row)
    }

    /// The keys that the volume's objects may be encrypted with.
    pub(crate) fn expected_keys(&self) -> ExpectedKeys {
        match (&self.key, &self.former_keys) {
            (None, _) => ExpectedKeys::None,
            (Some(_), None) => ExpectedKeys::Any,
            (Some(key), Some(former)) => ExpectedKeys::OneOf(former.iter().chain([key]).cloned().collect()),
        }
    }

    /// The row of a volume that is not being deleted.
    pub(crate) fn get(txn: &mut dyn ReadTxn, volume: u64) -> Result<VolumeRow> {
        let stale = || Error::Stale { what: format!("volume number {volume}") };
        let row = VolumeRow::decode(&txn.get(&keys::volume(volume))?.ok_or_else(stale)?)?;
        if row.deleting { Err(stale()) } else { Ok(row) }
    }
}

/// The first fields of a volume's row, which every transaction reads.
#[derive(Debug, Clone, Copy)]
struct Epochs {
    epoch: u64,
    last_snapshot: u64,
}

impl Epochs {
    /// Reads them for a volume that is not being deleted.
    fn get(txn: &mut dyn ReadTxn, volume: u64) -> Result<Epochs> {
        let stale = || Error::Stale { what: format!("volume number {volume}") };
        let row = txn.get(&keys::volume(volume))?.ok_or_else(stale)?;
        let mut from = Decoder::new("volume record", &row);
        let epochs = Epochs { epoch: from.u64()?, last_snapshot: from.u64()? };
        if from.u8()? == 0 { Ok(epochs) } else { Err(stale()) }
    }
}

/// Reads of a volume's records, live or at a snapshot.
pub(crate) trait Records {
    /// The record of a record key.
    fn get(&mut self, record: &[u8]) -> Result<Option<Vec<u8>>>;

    /// At most `limit` record keys and records with `start <= key < end`.
    fn scan(&mut self, start: &[u8], end: &[u8], order: Order, limit: usize) -> Result<Vec<Pair>>;

    /// Announces the records that the caller reads next, so that a remote engine fetches them in one round
    /// trip.
    fn prefetch(&mut self, records: &mut dyn Iterator<Item = Vec<u8>>) -> Result<()>;
}

/// Reads in one tree of a volume.
pub(crate) struct Reader<'t> {
    txn: &'t mut dyn ReadTxn,
    volume: u64,
    at: At,
}

impl<'t> Reader<'t> {
    /// Fails with [`Error::Stale`] when the volume or snapshot is gone.
    pub(crate) fn open(txn: &'t mut dyn ReadTxn, volume: u64, at: At) -> Result<Reader<'t>> {
        Epochs::get(txn, volume)?;
        if let At::Snapshot(snapshot) = at {
            SnapshotRow::get(txn, volume, snapshot)?;
        }
        Ok(Reader { txn, volume, at })
    }

    /// Scan at a snapshot for damage checks: in ascending order, with each version as it is stored. A version
    /// may be too new for the snapshot, or malformed.
    pub(crate) fn scan_stored(&mut self, start: &[u8], end: &[u8], limit: usize) -> Result<Vec<Pair>> {
        let At::Snapshot(snapshot) = self.at else {
            return Err(Error::Invalid("the live tree is scanned by its keys".into()));
        };
        let mut merge = Merge::new(self.volume, start, end, Order::Ascending);
        let mut found = Vec::new();
        while found.len() < limit
            && let Some((record, version)) = merge.next(self.txn, snapshot)?
        {
            found.extend(version.map(|version| (record, version)));
        }
        Ok(found)
    }

    fn get_at(&mut self, record: &[u8], snapshot: u64) -> Result<Option<Vec<u8>>> {
        let start = keys::history_version(self.volume, record, snapshot);
        let end = keys::after_prefix(&keys::history(self.volume, record));
        let held = self.txn.scan(&start, &end, Order::Ascending, 1)?.pop();
        let version = match held {
            Some((_, value)) => Some(value),
            None => self.txn.get(&keys::live(self.volume, record))?,
        };
        version.map_or(Ok(None), |value| visible(value, snapshot))
    }
}

impl Records for Reader<'_> {
    fn get(&mut self, record: &[u8]) -> Result<Option<Vec<u8>>> {
        match self.at {
            At::Live => get_live(self.txn, self.volume, record),
            At::Snapshot(snapshot) => self.get_at(record, snapshot),
        }
    }

    fn scan(&mut self, start: &[u8], end: &[u8], order: Order, limit: usize) -> Result<Vec<Pair>> {
        match self.at {
            At::Live => scan_live(self.txn, self.volume, start, end, order, limit),
            At::Snapshot(snapshot) => {
                let mut merge = Merge::new(self.volume, start, end, order);
                let mut found = Vec::new();
                while found.len() < limit
                    && let Some((record, version)) = merge.next(self.txn, snapshot)?
                {
                    let value = version.map_or(Ok(None), |version| visible(version, snapshot))?;
                    found.extend(value.map(|value| (record, value)));
                }
                Ok(found)
            }
        }
    }

    fn prefetch(&mut self, records: &mut dyn Iterator<Item = Vec<u8>>) -> Result<()> {
        match self.at {
            At::Live => prefetch_live(self.txn, self.volume, records),
            // Each record needs a search among its history versions.
            At::Snapshot(_) => Ok(()),
        }
    }
}

/// Changes of the counters in an inode's attributes.
#[derive(Debug, Default, Clone, Copy)]
struct Counted {
    /// Change of a file's stored bytes.
    bytes: i64,
    xattrs: i32,
}

impl Counted {
    /// Applies the changes to attributes.
    fn settle(self, inode: &mut Inode) {
        inode.stored_bytes = inode.stored_bytes.saturating_add_signed(self.bytes);
        inode.xattrs = inode.xattrs.saturating_add_signed(self.xattrs);
    }
}

/// Reads and writes in the live tree of a volume.
pub(crate) struct Writer<'t> {
    txn: &'t mut dyn WriteTxn,
    volume: u64,
    epochs: Epochs,
    session: u64,
    references: ReferenceChanges,
    /// Counter changes per inode that its attributes do not contain yet.
    counted: BTreeMap<u64, Counted>,
    /// The writer that makes the changes: see [`crate::fs::watch`].
    writer: u64,
    /// Record keys changed so far, if a watcher needs them.
    changed: Option<Vec<Vec<u8>>>,
}

impl<'t> Writer<'t> {
    /// Runs `body` with the live tree of a volume. `session` is the caller's session, which owns the new
    /// objects that the records point at. Fails when a new object is referenced and another process has
    /// declared the session dead.
    pub(crate) fn run<T>(
        txn: &mut dyn WriteTxn,
        volume: u64,
        session: u64,
        body: impl FnOnce(&mut Writer<'_>) -> Result<T>,
    ) -> Result<T> {
        let epochs = Epochs::get(txn.as_read(), volume)?;
        let references = ReferenceChanges::default();
        let counted = BTreeMap::new();
        let mut writer =
            Writer { txn, volume, epochs, session, references, counted, writer: session, changed: None };
        let result = body(&mut writer)?;
        writer.note_counted()?;
        let Writer { txn, mut references, .. } = writer;
        references.apply(txn, |txn| check_session(txn, session))?;
        Ok(result)
    }

    /// Attributes the changes to `writer` instead of the session, and lists the changed keys if `listed`.
    pub(crate) fn act_as(&mut self, writer: u64, listed: bool) {
        self.writer = writer;
        self.changed = listed.then(Vec::new);
    }

    /// The writer that makes the changes.
    pub(crate) fn writer(&self) -> u64 {
        self.writer
    }

    /// The record keys that were changed, where they are listed.
    pub(crate) fn take_changed(&mut self) -> Vec<Vec<u8>> {
        self.changed.take().unwrap_or_default()
    }

    fn note(&mut self, record: &[u8]) {
        if let Some(changed) = &mut self.changed {
            changed.push(record.to_vec());
        }
    }

    /// The volume's number.
    pub(crate) fn volume(&self) -> u64 {
        self.volume
    }

    /// The caller's session.
    pub(crate) fn session(&self) -> u64 {
        self.session
    }

    /// The transaction, for records that are not versioned.
    pub(crate) fn txn(&mut self) -> &mut dyn WriteTxn {
        self.txn
    }

    /// Sets a record.
    pub(crate) fn put(&mut self, record: &[u8], value: &[u8]) -> Result<()> {
        self.note(record);
        let key = keys::live(self.volume, record);
        if keys::is_extent(record) {
            self.references.add(value)?;
        }
        let old = self.txn.get(&key)?;
        self.count(record, Some(value), old.as_deref())?;
        if let Some(old) = old {
            self.displace(record, old)?;
        }
        self.put_version(&key, value)
    }

    /// Sets a record that does not exist yet, as the caller knows from other records. Skips the lookup.
    pub(crate) fn put_new(&mut self, record: &[u8], value: &[u8]) -> Result<()> {
        self.note(record);
        if keys::is_extent(record) {
            self.references.add(value)?;
        }
        self.count(record, Some(value), None)?;
        if keys::is_attributes(record)
            && let Some(ino) = keys::ino_of(record)
            && Inode::is_of_directory(value)
        {
            self.txn.begins((self.volume, ino));
        }
        self.put_version(&keys::live(self.volume, record), value)
    }

    fn put_version(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let mut versioned = Vec::with_capacity(8 + value.len());
        versioned.extend_from_slice(&self.epochs.epoch.to_be_bytes());
        versioned.extend_from_slice(value);
        self.txn.put(key, &versioned)
    }

    /// Removes a record. Removing a missing record succeeds.
    pub(crate) fn delete(&mut self, record: &[u8]) -> Result<()> {
        self.note(record);
        let key = keys::live(self.volume, record);
        if let Some(old) = self.txn.get(&key)? {
            self.count(record, None, Some(&old))?;
            self.displace(record, old)?;
            self.txn.delete(&key)?;
        }
        Ok(())
    }

    /// Counts the change of a contents or xattr record, for the counters in the inode's attributes.
    fn count(&mut self, record: &[u8], new: Option<&[u8]>, old: Option<&[u8]>) -> Result<()> {
        let (contents, xattr) = (keys::is_contents(record), keys::is_xattr(record));
        let Some(ino) = keys::ino_of(record).filter(|_| contents || xattr) else { return Ok(()) };
        let counted = self.counted.entry(ino).or_default();
        if xattr {
            counted.xattrs += i32::from(new.is_some()) - i32::from(old.is_some());
            return Ok(());
        }
        let bytes = |value: Option<&[u8]>| value.map_or(Ok(0), |value| stored_bytes(record, value));
        let (new, old) = (bytes(new)?, bytes(old.map(|version| version.get(8..).unwrap_or_default()))?);
        counted.bytes += new.cast_signed() - old.cast_signed();
        Ok(())
    }

    /// Stored bytes and number of xattrs of an inode: its attributes as read, plus the changes since.
    fn counted(&self, ino: u64, inode: &Inode) -> (u64, u32) {
        let mut inode = Inode { ..*inode };
        if let Some(counted) = self.counted.get(&ino) {
            counted.settle(&mut inode);
        }
        (inode.stored_bytes, inode.xattrs)
    }

    /// The stored bytes of a file with the changes so far; `inode` holds its attributes as read.
    pub(crate) fn stored_bytes(&self, ino: u64, inode: &Inode) -> u64 {
        self.counted(ino, inode).0
    }

    /// Whether an inode has extended attributes after the changes so far; `inode` holds its attributes as
    /// read.
    pub(crate) fn has_xattrs(&self, ino: u64, inode: &Inode) -> bool {
        self.counted(ino, inode).1 > 0
    }

    /// Applies the counter changes so far to attributes that the caller is about to put.
    pub(crate) fn settle(&mut self, ino: u64, inode: &mut Inode) {
        if let Some(counted) = self.counted.remove(&ino) {
            counted.settle(inode);
        }
    }

    /// Writes the counter changes to the attributes of the inodes that still exist.
    fn note_counted(&mut self) -> Result<()> {
        for (ino, counted) in std::mem::take(&mut self.counted) {
            let record = keys::attributes(ino);
            if (counted.bytes, counted.xattrs) != (0, 0)
                && let Some(value) = self.get(&record)?
            {
                let mut inode = Inode::decode(&value)?;
                counted.settle(&mut inode);
                self.put(&record, &inode.encode())?;
            }
        }
        Ok(())
    }

    /// Handles a version that the live tree gives up: moves it to history if a snapshot holds it, else
    /// releases its object.
    fn displace(&mut self, record: &[u8], version: Vec<u8>) -> Result<()> {
        let since = since_of(&version)?;
        let last = self.epochs.last_snapshot;
        if since <= last {
            self.txn.put(&keys::history_version(self.volume, record, last), &version)?;
            return self.txn.put(&keys::dead(self.volume, last, since, record), &[]);
        }
        if keys::is_extent(record) {
            self.references.remove(version.get(8..).unwrap_or_default())?;
        }
        Ok(())
    }
}

impl Records for Writer<'_> {
    fn get(&mut self, record: &[u8]) -> Result<Option<Vec<u8>>> {
        get_live(self.txn.as_read(), self.volume, record)
    }

    fn prefetch(&mut self, records: &mut dyn Iterator<Item = Vec<u8>>) -> Result<()> {
        prefetch_live(self.txn.as_read(), self.volume, records)
    }

    fn scan(&mut self, start: &[u8], end: &[u8], order: Order, limit: usize) -> Result<Vec<Pair>> {
        scan_live(self.txn.as_read(), self.volume, start, end, order, limit)
    }
}

/// Fails when another process has declared this one dead, and so may have deleted its new objects.
fn check_session(txn: &mut dyn ReadTxn, session: u64) -> Result<()> {
    match txn.get(&keys::session(session))? {
        Some(_) => Ok(()),
        None => Err(Error::Stale { what: "this process's registration in the metadata".into() }),
    }
}

/// The epoch in which a version was written, and the record; `None` for a version that is too short.
pub(crate) fn parts_of(version: &[u8]) -> Option<(u64, &[u8])> {
    let (since, value) = version.split_first_chunk()?;
    Some((u64::from_be_bytes(*since), value))
}

fn split(mut version: Vec<u8>) -> Result<(u64, Vec<u8>)> {
    let since = since_of(&version)?;
    version.drain(..8);
    Ok((since, version))
}

/// The epoch in which a version was written.
fn since_of(version: &[u8]) -> Result<u64> {
    Decoder::new("versioned record", version).u64()
}

fn visible(version: Vec<u8>, snapshot: u64) -> Result<Option<Vec<u8>>> {
    let (since, value) = split(version)?;
    Ok((since <= snapshot).then_some(value))
}

fn prefetch_live(
    txn: &mut dyn ReadTxn,
    volume: u64,
    records: &mut dyn Iterator<Item = Vec<u8>>,
) -> Result<()> {
    if !txn.prefetches() {
        return Ok(());
    }
    let keys: Vec<Vec<u8>> = records.map(|record| keys::live(volume, &record)).collect();
    txn.prefetch(&keys)
}

fn get_live(txn: &mut dyn ReadTxn, volume: u64, record: &[u8]) -> Result<Option<Vec<u8>>> {
    let version = keys::with_live(volume, record, |key| txn.get(key))?;
    version.map(|version| split(version).map(|(_, value)| value)).transpose()
}

fn scan_live(
    txn: &mut dyn ReadTxn,
    volume: u64,
    start: &[u8],
    end: &[u8],
    order: Order,
    limit: usize,
) -> Result<Vec<Pair>> {
    let pairs = txn.scan(&keys::live(volume, start), &keys::live(volume, end), order, limit)?;
    let record = |(mut key, version): Pair| {
        key.drain(..keys::LIVE_PREFIX_BYTES);
        Ok((key, split(version)?.1))
    };
    pairs.into_iter().map(record).collect()
}

/// A record key, and the version chosen for it if any.
type Chosen = (Vec<u8>, Option<Vec<u8>>);

/// A scan at a snapshot: merges history and live versions, page by page.
struct Merge<'a> {
    start: &'a [u8],
    order: Order,
    live: Pages,
    history: Pages,
}

impl<'a> Merge<'a> {
    fn new(volume: u64, start: &'a [u8], end: &[u8], order: Order) -> Merge<'a> {
        let pages = |start, end| Pages { start, end, order, page: Vec::new(), done: false };
        Merge {
            start,
            order,
            live: pages(keys::live(volume, start), keys::live(volume, end)),
            history: pages(keys::history(volume, start), keys::history(volume, end)),
        }
    }

    /// The next record and its version for the snapshot; `None` at the end. That version may be newer than
    /// the snapshot, which the caller checks.
    fn next(&mut self, txn: &mut dyn ReadTxn, snapshot: u64) -> Result<Option<Chosen>> {
        loop {
            let live = self.live.peek(txn)?.map(|(key, _)| key[9..].to_vec());
            let held = self.history.peek(txn)?.map(|(key, _)| record_of(key).to_vec());
            let record = match (live, held) {
                (None, None) => return Ok(None),
                (Some(record), None) | (None, Some(record)) => record,
                (Some(live), Some(held)) => match self.order {
                    Order::Ascending => live.min(held),
                    Order::Descending => live.max(held),
                },
            };
            // The version with the smallest last snapshot that is not before this one. In descending order it
            // is the last such version.
            let mut chosen: Option<Vec<u8>> = None;
            while let Some((key, _)) = self.history.peek(txn)? {
                if record_of(key) != record {
                    break;
                }
                let until = until_of(key);
                let Some((_, version)) = self.history.page.pop() else { break };
                if until >= snapshot && (self.order == Order::Descending || chosen.is_none()) {
                    chosen = Some(version);
                }
            }
            if self.live.peek(txn)?.is_some_and(|(key, _)| key[9..] == record) {
                let live = self.live.page.pop().map(|(_, version)| version);
                chosen = chosen.or(live);
            }
            // A history key is longer than its record key, so it may sort after `start` when its record key
            // does not.
            if record.as_slice() >= self.start {
                return Ok(Some((record, chosen)));
            }
        }
    }
}

/// The record key in a history key: after table and volume (9 bytes), before the last snapshot (8 bytes).
pub(crate) fn record_of(history_key: &[u8]) -> &[u8] {
    history_key.get(9..history_key.len().saturating_sub(8)).unwrap_or_default()
}

fn until_of(history_key: &[u8]) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&history_key[history_key.len() - 8..]);
    u64::from_be_bytes(bytes)
}

/// A key range, read page by page. The page is kept reversed, so that the next pair is its last.
struct Pages {
    start: Vec<u8>,
    end: Vec<u8>,
    order: Order,
    page: Vec<Pair>,
    done: bool,
}

impl Pages {
    fn peek(&mut self, txn: &mut dyn ReadTxn) -> Result<Option<&Pair>> {
        if self.page.is_empty() && !self.done {
            self.page = txn.scan(&self.start, &self.end, self.order, PAGE)?;
            self.done = self.page.len() < PAGE;
            if let Some((last, _)) = self.page.last() {
                match self.order {
                    Order::Ascending => {
                        self.start = last.clone();
                        self.start.push(0);
                    }
                    Order::Descending => self.end = last.clone(),
                }
            }
            self.page.reverse();
        }
        Ok(self.page.last())
    }
}
