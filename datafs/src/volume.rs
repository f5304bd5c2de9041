//! Management of volumes and snapshots: create, list, show, delete, and open as a view.

use std::time::SystemTime;

use chrono::{DateTime, SecondsFormat, Utc};
use serde::{Serialize, Serializer};

use crate::datafs::Datafs;
use crate::error::{Error, Result};
use crate::fs::View;
use crate::identity;
use crate::meta::codec::Decoder;
use crate::meta::engine::{Durability, Order, ReadTxn};
use crate::meta::inode::{Inode, Timestamp};
use crate::meta::keys;
use crate::meta::snapshot::{self, NAMES_TOLD, SnapshotRow, named_some};
use crate::meta::versioned::{At, Reader, Records as _, VolumeRow, Writer, find_volume};
use crate::name::{Name, VolumeSpec};
use crate::node::{FileKind, ROOT_INO};
use crate::object::{Compression, KeyIdentity};

/// Records that [`Datafs::volume_show`] reads in one transaction.
const USAGE_PAGE: usize = 4_096;

/// The description of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VolumeInfo {
    /// Its name.
    pub name: Name,
    /// Its id; never reused in this home.
    pub id: u64,
    /// The time of its creation.
    #[serde(serialize_with = "rfc3339")]
    pub created_at: SystemTime,
    /// How many snapshots it has.
    pub snapshots: u64,
    /// The compression of its file data.
    pub compression: Compression,
    /// The name of the key that its file data is encrypted with; `None` when it is not encrypted.
    pub encryption_key: Option<String>,
    /// The content of the live tree; set only by [`Datafs::volume_show`].
    pub usage: Option<Usage>,
}

/// All volumes of a home.
#[derive(Debug, Default)]
pub struct VolumeList {
    /// The readable volumes, sorted by name.
    pub volumes: Vec<VolumeInfo>,
    /// The names of damaged volumes with their errors; `fsck` says what can be repaired.
    pub damaged: Vec<(String, Error)>,
}

/// The storage options of a volume's file data, chosen at its creation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VolumeOptions {
    /// The compression of file data.
    pub compression: Compression,
    /// The key of `[datafs.encryption_keys]` that file data is encrypted with, with AES-256-GCM. Names,
    /// attributes (sizes and times among them), extended attributes, link targets and application keys
    /// are not encrypted.
    pub encryption_key: Option<String>,
}

/// The content of a volume's live tree.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Regular files (by inode: hard links count once).
    pub files: u64,
    /// Directories, without the root.
    pub directories: u64,
    /// Links, pipes, sockets and device nodes.
    pub others: u64,
    /// Sum of the file sizes, in bytes.
    pub bytes: u64,
}

/// The description of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SnapshotInfo {
    /// Its volume.
    pub volume: Name,
    /// Its name.
    pub name: Name,
    /// Its id; grows with time, never reused in its volume.
    pub id: u64,
    /// The time of its creation.
    #[serde(serialize_with = "rfc3339")]
    pub created_at: SystemTime,
}

fn rfc3339<S: Serializer>(time: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
    let text = DateTime::<Utc>::from(*time).to_rfc3339_opts(SecondsFormat::Millis, true);
    serializer.serialize_str(&text)
}

impl Datafs {
    /// Creates an empty volume; durable when it returns. Fails with [`Error::Exists`].
    pub fn volume_create(&self, name: &Name) -> Result<VolumeInfo> {
        self.volume_create_with(name, &VolumeOptions::default())
    }

    /// [`Datafs::volume_create`] for a volume whose file data is compressed or encrypted. Fails with
    /// [`Error::WrongKey`] when the configuration lacks the key.
    pub fn volume_create_with(&self, name: &Name, options: &VolumeOptions) -> Result<VolumeInfo> {
        let key = options.encryption_key.as_deref().map(|key| self.key_of(name, key)).transpose()?;
        let session = self.shared.session.id();
        let (uid, gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
        self.shared.meta.transact(Durability::Durable, |txn| {
            let name_key = keys::volume_name(name.as_str());
            if txn.get(&name_key)?.is_some() {
                return Err(Error::Exists { what: format!("volume {name}") });
            }
            let last = match txn.get(keys::LAST_VOLUME)? {
                Some(value) => Decoder::new("volume counter", &value).u64()?,
                None => 0,
            };
            let id =
                last.checked_add(1).ok_or(Error::TooLarge { what: "number of volumes", max: u64::MAX })?;
            let row = VolumeRow {
                name: name.to_string(),
                created: Timestamp::now(),
                epoch: 1,
                last_snapshot: 0,
                deleting: false,
                compression: options.compression,
                key: key.clone(),
                former_keys: Some(Vec::new()),
            };
            if let Some((name, check)) = &key {
                identity::note_key(txn, name, check)?;
            }
            txn.put(keys::LAST_VOLUME, &id.to_be_bytes())?;
            txn.put(&name_key, &id.to_be_bytes())?;
            txn.put(&keys::volume(id), &row.encode())?;
            let mut root = Inode::new(FileKind::Directory, 0o755, uid, gid);
            root.nlink = 2;
            root.parent = ROOT_INO;
            Writer::run(txn, id, session, |writer| writer.put(&keys::attributes(ROOT_INO), &root.encode()))?;
            info(txn.as_read(), id, &row)
        })
    }

    /// Changes the key for new data of an encrypted volume; durable when it returns. Open views continue to
    /// write with the old key. Existing data keeps its key, which must stay in the configuration as long as
    /// the data is needed.
    pub fn volume_set_key(&self, name: &Name, key: &str) -> Result<()> {
        let new = self.key_of(name, key)?;
        self.shared.meta.transact(Durability::Durable, |txn| {
            let id = self.find(txn.as_read(), name)?;
            let mut row = VolumeRow::get(txn.as_read(), id)?;
            if row.key.is_none() {
                // Small files may be in the metadata, which is not encrypted.
                return Err(Error::Invalid(format!(
                    "volume {name} is not encrypted: make an encrypted one and copy the files"
                )));
            }
            identity::note_key(txn, &new.0, &new.1)?;
            let old = row.key.replace(new.clone());
            if let (Some(former), Some(old)) = (&mut row.former_keys, old)
                && old != new
                && !former.contains(&old)
            {
                former.push(old);
            }
            txn.put(&keys::volume(id), &row.encode())
        })
    }

    /// The identity of a key by its name.
    fn key_of(&self, volume: &Name, key: &str) -> Result<KeyIdentity> {
        let found = self.shared.pool.keys().get(key);
        let found = found.ok_or_else(|| Error::wrong_key(format!("volume {volume}"), key, true))?;
        Ok(found.identity())
    }

    /// All volumes. A volume whose record or snapshot record is damaged or missing is listed as damaged.
    pub fn volume_list(&self) -> Result<VolumeList> {
        self.shared.meta.view(|txn| {
            let prefix = keys::volume_names();
            let mut list = VolumeList::default();
            for (key, value) in
                txn.scan(&prefix, &keys::after_prefix(&prefix), Order::Ascending, usize::MAX)?
            {
                match named(txn, &value) {
                    Ok(volume) => list.volumes.push(volume),
                    Err(
                        error @ (Error::Corrupt { .. } | Error::Stale { .. } | Error::InvalidName { .. }),
                    ) => {
                        let name = String::from_utf8_lossy(&key[prefix.len()..]).into_owned();
                        list.damaged.push((name, error));
                    }
                    Err(error) => return Err(error),
                }
            }
            Ok(list)
        })
    }

    /// One volume with its usage. Counting takes time in proportion to the number of files.
    pub fn volume_show(&self, name: &Name) -> Result<VolumeInfo> {
        let (id, mut volume) = self.shared.meta.view(|txn| {
            let id = self.find(txn, name)?;
            let row = VolumeRow::get(txn, id)?;
            Ok((id, info(txn, id, &row)?))
        })?;
        volume.usage = Some(self.usage(id)?);
        Ok(volume)
    }

    /// Deletes a volume with its snapshots. Its removal from view is durable when this returns; its records
    /// and objects are freed in the background.
    pub fn volume_delete(&self, name: &Name) -> Result<()> {
        self.shared.meta.transact_making_room(Durability::Durable, |txn| {
            let id = self.find(txn.as_read(), name)?;
            let mut row = VolumeRow::get(txn.as_read(), id)?;
            row.deleting = true;
            txn.put(&keys::volume(id), &row.encode())?;
            txn.delete(&keys::volume_name(name.as_str()))
        })?;
        self.shared.collector.wake();
        Ok(())
    }

    /// Creates a snapshot of everything committed in the volume; durable when it returns. Unflushed writes
    /// through open files are not part of it. The cost does not depend on the size of the volume.
    ///
    /// # Errors
    /// [`Error::InvalidName`] for [`VolumeSpec::LATEST`], [`Error::Exists`], [`Error::NotFound`].
    pub fn snapshot_create(&self, volume: &Name, snapshot: &Name) -> Result<SnapshotInfo> {
        if snapshot.as_str() == VolumeSpec::LATEST {
            let reason = "`latest` stands for the newest snapshot of a volume";
            return Err(Error::InvalidName { name: snapshot.to_string(), reason });
        }
        self.shared.meta.transact(Durability::Durable, |txn| {
            let id = self.find(txn.as_read(), volume)?;
            let (number, row) = snapshot::create(txn, id, snapshot.as_str())?;
            snapshot_info(volume, number, &row)
        })
    }

    /// The snapshots of a volume, oldest first.
    pub fn snapshot_list(&self, volume: &Name) -> Result<Vec<SnapshotInfo>> {
        self.shared.meta.view(|txn| {
            let id = self.find(txn, volume)?;
            let rows = snapshot::list(txn, id)?;
            rows.iter().map(|(number, row)| snapshot_info(volume, *number, row)).collect()
        })
    }

    /// Deletes a snapshot. Its removal from view is durable when this returns; data that only it referenced
    /// is freed in the background. Its views return [`Error::Stale`] from now on.
    pub fn snapshot_delete(&self, volume: &Name, snapshot: &Name) -> Result<()> {
        self.shared.meta.transact_making_room(Durability::Durable, |txn| {
            let id = self.find(txn.as_read(), volume)?;
            snapshot::begin_delete(txn, id, snapshot.as_str())
        })?;
        self.shared.collector.wake();
        Ok(())
    }

    /// Opens a view of a volume, live (read and write) or at a snapshot (read only). [`VolumeSpec::LATEST`] opens the newest
    /// snapshot; [`View::spec`] then has its name. Fails with [`Error::WrongKey`] when the volume is encrypted and its
    /// key not at hand.
    pub fn view(&self, spec: &VolumeSpec) -> Result<View> {
        let (id, (spec, at), row) = self.shared.meta.view(|txn| {
            let id = self.find(txn, &spec.volume)?;
            let row = VolumeRow::get(txn, id)?;
            Ok((id, resolve(txn, id, spec)?, row))
        })?;
        let codec = self.shared.codec_of(&row)?;
        self.shared.expect_keys(id, &row);
        Ok(View::new(&self.in_use, &self.shared, spec, id, at, codec))
    }

    /// The volume and snapshot that a spec stands for at present: itself, unless it asks for the newest snapshot. With
    /// it the number of the snapshot, which grows with time and is never used again.
    ///
    /// # Errors
    /// [`Error::NotFound`] for a volume or snapshot that does not exist, also where a volume has no snapshot yet.
    pub fn resolve(&self, spec: &VolumeSpec) -> Result<(VolumeSpec, Option<u64>)> {
        self.shared.meta.view(|txn| {
            let id = self.find(txn, &spec.volume)?;
            let (spec, at) = resolve(txn, id, spec)?;
            let number = match at {
                At::Live => None,
                At::Snapshot(number) => Some(number),
            };
            Ok((spec, number))
        })
    }

    /// The number of a volume. The error names the home and the volumes that it has.
    pub(crate) fn find(&self, txn: &mut dyn ReadTxn, name: &Name) -> Result<u64> {
        let what = match find_volume(txn, name.as_str()) {
            Err(Error::NotFound { what, .. }) => what,
            found => return found,
        };
        let prefix = keys::volume_names();
        let records = txn.scan(&prefix, &keys::after_prefix(&prefix), Order::Ascending, NAMES_TOLD + 1)?;
        let names = records.iter().map(|(key, _)| String::from_utf8_lossy(&key[prefix.len()..]).into_owned());
        let has = match named_some(names.collect()) {
            Some(names) => format!("which has {names}"),
            None => "which has no volumes; --home or MILLRACE_HOME names another home".to_owned(),
        };
        Err(Error::not_found_hinted(what, format!(" in the home {}, {has}", self.shared.home.display())))
    }

    fn usage(&self, volume: u64) -> Result<Usage> {
        let mut usage = Usage::default();
        let mut start = keys::nodes();
        let end = keys::after_prefix(&start);
        loop {
            let page = self.shared.meta.view(|txn| {
                Reader::open(txn, volume, At::Live)?.scan(&start, &end, Order::Ascending, USAGE_PAGE)
            })?;
            for (record, value) in &page {
                if keys::is_attributes(record) && *record != keys::attributes(ROOT_INO) {
                    let inode = Inode::decode(value)?;
                    match inode.kind {
                        FileKind::File => {
                            usage.files += 1;
                            usage.bytes = usage.bytes.saturating_add(inode.size);
                        }
                        FileKind::Directory => usage.directories += 1,
                        _ => usage.others += 1,
                    }
                }
            }
            match page.last() {
                Some((last, _)) if page.len() == USAGE_PAGE => {
                    start = last.clone();
                    start.push(0);
                }
                _ => return Ok(usage),
            }
        }
    }
}

impl View {
    /// The same volume or snapshot through a new registration of this process: for a process that others declared dead
    /// ([`Error::Stale`]), or whose commit failed for good ([`Error::Failed`]). This view stays as it is; what it has
    /// staged cannot be published through the new one.
    ///
    /// # Errors
    /// [`Error::NotFound`] when the volume or the snapshot is gone, [`Error::Stale`] when another one has its name, and
    /// what [`Datafs::open`] fails with.
    pub fn reopen(&self) -> Result<View> {
        let datafs = Datafs::open(&self.shared.home, &self.shared.config)?;
        let view = datafs.view(self.spec())?;
        if (view.volume, view.root()) != (self.volume, self.root()) {
            return Err(Error::Stale {
                what: format!("the former {}, whose name another one has now,", self.spec()),
            });
        }
        Ok(view)
    }
}

/// The volume that a name record points at.
fn named(txn: &mut dyn ReadTxn, record: &[u8]) -> Result<VolumeInfo> {
    let id = Decoder::new("volume name record", record).u64()?;
    let row = VolumeRow::get(txn, id)?;
    info(txn, id, &row)
}

fn info(txn: &mut dyn ReadTxn, id: u64, row: &VolumeRow) -> Result<VolumeInfo> {
    Ok(VolumeInfo {
        name: row.name.parse()?,
        id,
        created_at: row.created.to_system(),
        snapshots: snapshot::list(txn, id)?.len() as u64,
        compression: row.compression,
        encryption_key: row.key.as_ref().map(|(name, _)| name.clone()),
        usage: None,
    })
}

/// The spec with the name of a snapshot that exists, and the tree that it stands for.
fn resolve(txn: &mut dyn ReadTxn, volume: u64, spec: &VolumeSpec) -> Result<(VolumeSpec, At)> {
    let Some(name) = &spec.snapshot else { return Ok((spec.clone(), At::Live)) };
    if let Some(number) = snapshot::find(txn, volume, name.as_str())? {
        return Ok((spec.clone(), At::Snapshot(number)));
    }
    if name.as_str() != VolumeSpec::LATEST {
        return Err(snapshot::not_found(txn, volume, spec.volume.as_str(), name.as_str())?);
    }
    match snapshot::list(txn, volume)?.pop() {
        Some((number, row)) => {
            let newest = VolumeSpec::at(spec.volume.clone(), row.name.parse()?);
            Ok((newest, At::Snapshot(number)))
        }
        None => Err(Error::not_found_hinted(
            format!("a snapshot of volume {}", spec.volume),
            format!("; take one with: millrace snapshot create {}@NAME", spec.volume),
        )),
    }
}

fn snapshot_info(volume: &Name, number: u64, row: &SnapshotRow) -> Result<SnapshotInfo> {
    Ok(SnapshotInfo {
        volume: volume.clone(),
        name: row.name.parse()?,
        id: number,
        created_at: row.created.to_system(),
    })
}
