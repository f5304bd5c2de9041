//! The records of the driver: which volumes and snapshots it has made, kept as application keys of one volume of the
//! home.
//!
//! A record is written before the volume or snapshot that it stands for, and removed after it. So a call that a crash
//! cut short is completed by its repetition, and nothing that the driver did not make is ever deleted by it.
//!
//! The volume is [`NAME`]. Each key is `volume/NAME` or `snapshot/NAME`, its value a JSON object with a format number.

use std::collections::BTreeMap;

use millrace_datafs::{Datafs, Error, Name, Publish, View, VolumeSpec};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The volume with the records.
pub(crate) const NAME: &str = "millrace-csi";
/// The newest format of records that this build reads.
const FORMAT: u32 = 1;

/// A volume that the driver has made, or is making.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct VolumeRecord {
    pub(crate) format: u32,
    /// Whether it is complete.
    pub(crate) ready: bool,
    /// The capacity that was promised, in bytes; nothing enforces it.
    pub(crate) capacity_bytes: i64,
    /// The snapshot that it was made from.
    pub(crate) source: Option<VolumeSpec>,
    /// Whether it is that snapshot itself, read-only, and not a copy.
    pub(crate) is_snapshot: bool,
    /// Parameters of its StorageClass that say how data is stored.
    pub(crate) parameters: BTreeMap<String, String>,
}

/// A snapshot that the driver has made, or is making.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SnapshotRecord {
    pub(crate) format: u32,
    /// Its volume.
    pub(crate) volume: Name,
}

impl SnapshotRecord {
    /// The record of a snapshot of a volume.
    pub(crate) fn new(volume: Name) -> SnapshotRecord {
        SnapshotRecord { format: FORMAT, volume }
    }
}

impl VolumeRecord {
    /// The record of a volume that is being made.
    pub(crate) fn new(
        capacity_bytes: i64,
        source: Option<VolumeSpec>,
        is_snapshot: bool,
        parameters: BTreeMap<String, String>,
    ) -> VolumeRecord {
        VolumeRecord { format: FORMAT, ready: false, capacity_bytes, source, is_snapshot, parameters }
    }

    /// What to mount for this record.
    pub(crate) fn mounts(&self, name: &Name) -> VolumeSpec {
        match &self.source {
            Some(source) if self.is_snapshot => source.clone(),
            _ => VolumeSpec::live(name.clone()),
        }
    }
}

/// A record kind: its prefix of keys.
pub(crate) trait Record: Serialize + DeserializeOwned {
    /// What its keys begin with.
    const PREFIX: &'static str;
    /// The format it was written in.
    fn format(&self) -> u32;
}

impl Record for VolumeRecord {
    const PREFIX: &'static str = "volume/";
    fn format(&self) -> u32 {
        self.format
    }
}

impl Record for SnapshotRecord {
    const PREFIX: &'static str = "snapshot/";
    fn format(&self) -> u32 {
        self.format
    }
}

/// The records of a home.
#[derive(Debug)]
pub(crate) struct Registry(View);

impl Registry {
    /// Opens the records of a home, and creates their volume when it is missing.
    pub(crate) fn open(datafs: &Datafs) -> Result<Registry, Error> {
        let name: Name = NAME.parse()?;
        match datafs.view(&VolumeSpec::live(name.clone())) {
            Err(error) if error.is_not_found() => {}
            view => return view.map(Registry),
        }
        match datafs.volume_create(&name) {
            // Another process may have created it.
            Ok(_) | Err(Error::Exists { .. }) => datafs.view(&VolumeSpec::live(name)).map(Registry),
            Err(error) => Err(error),
        }
    }

    /// The record of a name.
    pub(crate) fn get<R: Record>(&self, name: &Name) -> Result<Option<R>, Error> {
        let key = format!("{}{name}", R::PREFIX);
        self.0.key_get(&key)?.map(|value| decode(&key, &value)).transpose()
    }

    /// Writes a record, if the present one is `expected`; durable when it returns. Fails with [`Error::Conflict`].
    pub(crate) fn put<R: Record>(&self, name: &Name, record: &R, expected: Option<&R>) -> Result<(), Error> {
        let key = format!("{}{name}", R::PREFIX);
        let value = encode(record)?;
        let expected = expected.map(encode).transpose()?;
        self.0.publish(Publish::new().expect_key(key.clone(), expected).put_key(key, value))
    }

    /// Removes a record; a missing one is not an error.
    pub(crate) fn delete<R: Record>(&self, name: &Name) -> Result<(), Error> {
        self.0.publish(Publish::new().delete_key(format!("{}{name}", R::PREFIX)))
    }

    /// All records of a kind, sorted by name.
    pub(crate) fn list<R: Record>(&self) -> Result<Vec<(String, R)>, Error> {
        let found = self.0.key_scan(R::PREFIX)?;
        found
            .into_iter()
            .map(|(key, value)| {
                let record = decode(&key, &value)?;
                Ok((key[R::PREFIX.len()..].to_owned(), record))
            })
            .collect()
    }
}

fn encode<R: Record>(record: &R) -> Result<Vec<u8>, Error> {
    serde_json::to_vec(record).map_err(|error| Error::Invalid(format!("cannot write a record: {error}")))
}

fn decode<R: Record>(key: &str, value: &[u8]) -> Result<R, Error> {
    let what = || format!("record {key} of the volume {NAME}");
    let record: R = serde_json::from_slice(value)
        .map_err(|error| Error::Corrupt { what: what(), reason: error.to_string() })?;
    if record.format() > FORMAT {
        return Err(Error::NewerFormat { place: what(), found: record.format(), supported: FORMAT });
    }
    Ok(record)
}
