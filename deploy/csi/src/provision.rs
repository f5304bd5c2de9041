//! Volumes and snapshots as the controller makes and deletes them, on the opened volumes of one home.
//!
//! Each function may be repeated after a crash at any line, and has the same result as if it had run once.

use millrace_datafs::{Datafs, Error, Name, SnapshotInfo, VolumeSpec};
use sha2::{Digest as _, Sha256};
use tonic::{Code, Status};

use crate::check::{self, Parameters};
use crate::proto::csi::CapacityRange;
use crate::refusal::{invalid, of_volumes, refused};
use crate::registry::{self, Registry, SnapshotRecord, VolumeRecord};
use crate::restore;

/// Longest name of a snapshot that is used as it is. A longer one is replaced by a digest, so that the id of the
/// snapshot, with the name of its volume, keeps to the limit of 128 bytes for usual names.
const SNAPSHOT_NAME_BYTES_MAX: usize = 63;

/// A volume to make.
#[derive(Debug, Clone)]
pub(crate) struct NewVolume {
    /// Its name, with the prefix of its StorageClass.
    pub(crate) name: Name,
    /// What it holds from the start.
    pub(crate) source: Option<VolumeSpec>,
    /// Whether all uses only read.
    pub(crate) read_only: bool,
    /// The capacity asked for.
    pub(crate) range: Option<CapacityRange>,
    /// How data is stored.
    pub(crate) parameters: Parameters,
}

/// The name of a snapshot in its volume for the name in a request.
pub(crate) fn snapshot_name(text: &str) -> Result<Name, Status> {
    let name = check::name("name", text)?;
    if name.as_str() == VolumeSpec::LATEST {
        return Err(invalid("name", "`latest` stands for the newest snapshot of a volume"));
    }
    if text.len() <= SNAPSHOT_NAME_BYTES_MAX {
        return Ok(name);
    }
    check::name("name", &format!("csi-{}", &hex::encode(Sha256::digest(text))[..40]))
}

/// Makes a volume, or finds it made.
pub(crate) fn create_volume(datafs: &Datafs, new: &NewVolume) -> Result<VolumeRecord, Status> {
    let name = &new.name;
    let attempt = format!("create volume {name}");
    let failed = |error: Error| of_volumes(&attempt, &error);
    if name.as_str() == registry::NAME {
        return Err(invalid("name", format!("{name} is the volume with the records of this driver")));
    }
    let records = Registry::open(datafs).map_err(failed)?;
    let required = check::capacity(new.range.as_ref())?;
    let is_snapshot = new.source.is_some() && new.read_only;
    let wanted = VolumeRecord::new(required, new.source.clone(), is_snapshot, new.parameters.given.clone());
    let record = match records.get::<VolumeRecord>(name).map_err(failed)? {
        Some(found) => {
            check_same(name, &found, &wanted, new.range.as_ref())?;
            found
        }
        None => {
            if let Some(source) = &new.source {
                find_source(datafs, source)?;
            }
            if exists(datafs, &VolumeSpec::live(name.clone()))? {
                return Err(refused(
                    Code::AlreadyExists,
                    format!(
                        "volume {name} exists and was not made by this driver: use another name, or a static PersistentVolume"
                    ),
                ));
            }
            records.put(name, &wanted, None).map_err(failed)?;
            wanted
        }
    };
    if record.ready {
        return Ok(record);
    }
    if !record.is_snapshot {
        match datafs.volume_create_with(name, &new.parameters.options) {
            Ok(_) | Err(Error::Exists { .. }) => {}
            Err(error) => {
                // Nothing was made, and some callers do not delete what a call refused.
                records.delete::<VolumeRecord>(name).map_err(failed)?;
                return Err(failed(error));
            }
        }
        if let Some(source) = &record.source {
            restore::copy(datafs, source, &VolumeSpec::live(name.clone())).map_err(failed)?;
        }
    }
    let ready = VolumeRecord { ready: true, ..record.clone() };
    records.put(name, &ready, Some(&record)).map_err(failed)?;
    Ok(ready)
}

/// Refuses a volume that exists and differs from the one asked for.
fn check_same(
    name: &Name,
    found: &VolumeRecord,
    wanted: &VolumeRecord,
    range: Option<&CapacityRange>,
) -> Result<(), Status> {
    let differs = |what: &str| {
        Err(refused(Code::AlreadyExists, format!("volume {name} exists with {what}: use another name")))
    };
    if found.source != wanted.source {
        return differs("another volume_content_source");
    }
    if found.is_snapshot != wanted.is_snapshot {
        return differs("other volume_capabilities");
    }
    if found.parameters != wanted.parameters {
        return differs("other parameters");
    }
    if !check::fits(found.capacity_bytes, range) {
        return differs(&format!("a capacity of {} bytes", found.capacity_bytes));
    }
    Ok(())
}

/// Finds the snapshot that a volume is made from.
fn find_source(datafs: &Datafs, source: &VolumeSpec) -> Result<(), Status> {
    if exists(datafs, source)? {
        return Ok(());
    }
    Err(refused(Code::NotFound, format!("volume_content_source: snapshot {source} does not exist")))
}

/// Whether a volume or snapshot exists.
pub(crate) fn exists(datafs: &Datafs, spec: &VolumeSpec) -> Result<bool, Status> {
    match datafs.resolve(spec) {
        Ok(_) => Ok(true),
        Err(error) if error.is_not_found() => Ok(false),
        Err(error) => Err(of_volumes(&format!("find {spec}"), &error)),
    }
}

/// The record of a volume id, and what it mounts. A volume that the driver has not made has no record; its id is a
/// volume or `VOLUME@SNAPSHOT`.
pub(crate) fn find_volume(
    datafs: &Datafs,
    id: &str,
) -> Result<Option<(Option<VolumeRecord>, VolumeSpec)>, Status> {
    let Ok(spec) = id.parse::<VolumeSpec>() else { return Ok(None) };
    if spec.snapshot.is_none() {
        let records = Registry::open(datafs).map_err(|error| of_volumes("read the records", &error))?;
        let record = records.get::<VolumeRecord>(&spec.volume);
        if let Some(record) = record.map_err(|error| of_volumes(&format!("find volume {id}"), &error))? {
            let mounts = record.mounts(&spec.volume);
            return Ok(Some((Some(record), mounts)));
        }
    }
    Ok(exists(datafs, &spec)?.then_some((None, spec)))
}

/// Deletes a volume that the driver has made. One that does not exist is deleted already.
pub(crate) fn delete_volume(datafs: &Datafs, id: &str) -> Result<(), Status> {
    let attempt = format!("delete volume {id}");
    let failed = |error: Error| of_volumes(&attempt, &error);
    let refuse =
        |reason: String| Err(refused(Code::FailedPrecondition, format!("cannot {attempt}: {reason}")));
    let Some((record, spec)) = find_volume(datafs, id)? else { return Ok(()) };
    let Some(record) = record else {
        return refuse(format!(
            "it was not made by this driver; delete it with `millrace volume delete {id}`"
        ));
    };
    let records = Registry::open(datafs).map_err(failed)?;
    let name = id.parse::<Name>().map_err(failed)?;
    if !record.is_snapshot {
        for (other, made) in records.list::<VolumeRecord>().map_err(failed)? {
            if made.source.as_ref().is_some_and(|source| source.volume == name)
                && (made.is_snapshot || !made.ready)
            {
                return refuse(format!("volume {other} reads one of its snapshots"));
            }
        }
        match datafs.snapshot_list(&spec.volume) {
            Ok(snapshots) if snapshots.is_empty() => {}
            Ok(snapshots) => {
                return refuse(format!(
                    "it has {} snapshots, {} among them: delete them first",
                    snapshots.len(),
                    snapshots[0].name
                ));
            }
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(failed(error)),
        }
        match datafs.volume_delete(&name) {
            Ok(()) => {}
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(failed(error)),
        }
    }
    records.delete::<VolumeRecord>(&name).map_err(failed)
}

/// Raises the capacity of a volume. Nothing enforces it: a volume grows as far as its store does.
pub(crate) fn expand_volume(datafs: &Datafs, id: &str, range: &CapacityRange) -> Result<i64, Status> {
    let failed = |error: Error| of_volumes(&format!("expand volume {id}"), &error);
    let required = check::capacity(Some(range))?;
    let Some((record, _)) = find_volume(datafs, id)? else { return Err(no_volume(id)) };
    let Some(record) = record else { return Ok(required) };
    let capacity = record.capacity_bytes.max(required);
    if !check::fits(capacity, Some(range)) {
        return Err(refused(
            Code::OutOfRange,
            format!("capacity_range: volume {id} has {capacity} bytes already, and no volume shrinks"),
        ));
    }
    if capacity != record.capacity_bytes {
        let records = Registry::open(datafs).map_err(failed)?;
        let name = id.parse::<Name>().map_err(failed)?;
        let larger = VolumeRecord { capacity_bytes: capacity, ..record.clone() };
        records.put(&name, &larger, Some(&record)).map_err(failed)?;
    }
    Ok(capacity)
}

/// The refusal of a call for a volume that does not exist.
pub(crate) fn no_volume(id: &str) -> Status {
    refused(Code::NotFound, format!("volume_id: volume {id} does not exist"))
}

/// Makes a snapshot, or finds it made.
pub(crate) fn create_snapshot(datafs: &Datafs, source: &str, name: &Name) -> Result<SnapshotInfo, Status> {
    let attempt = format!("create snapshot {name} of volume {source}");
    let failed = |error: Error| of_volumes(&attempt, &error);
    let Some((_, spec)) = find_volume(datafs, source)? else {
        return Err(refused(Code::NotFound, format!("source_volume_id: volume {source} does not exist")));
    };
    if spec.snapshot.is_some() {
        return Err(invalid(
            "source_volume_id",
            format!("{source} is the snapshot {spec}, which never changes"),
        ));
    }
    let volume = spec.volume;
    let records = Registry::open(datafs).map_err(failed)?;
    match records.get::<SnapshotRecord>(name).map_err(failed)? {
        Some(found) if found.volume != volume => {
            return Err(refused(
                Code::AlreadyExists,
                format!("snapshot {name} exists, of the volume {}: use another name", found.volume),
            ));
        }
        Some(_) => {}
        None => {
            if exists(datafs, &VolumeSpec::at(volume.clone(), name.clone()))? {
                return Err(refused(
                    Code::AlreadyExists,
                    format!(
                        "snapshot {volume}@{name} exists and was not made by this driver: use another name"
                    ),
                ));
            }
            records.put(name, &SnapshotRecord::new(volume.clone()), None).map_err(failed)?;
        }
    }
    match datafs.snapshot_create(&volume, name) {
        Err(Error::Exists { .. }) => find_snapshot(datafs, &volume, name)?.ok_or_else(|| {
            // Deleted meanwhile, by another program.
            refused(Code::Aborted, format!("cannot {attempt}: it is being deleted: retry"))
        }),
        Err(error) => {
            if error.is_not_found() {
                // The volume is gone, and with it the reason for the record.
                records.delete::<SnapshotRecord>(name).map_err(failed)?;
            }
            Err(failed(error))
        }
        Ok(made) => Ok(made),
    }
}

/// The description of a snapshot.
pub(crate) fn find_snapshot(
    datafs: &Datafs,
    volume: &Name,
    name: &Name,
) -> Result<Option<SnapshotInfo>, Status> {
    match datafs.snapshot_list(volume) {
        Ok(all) => Ok(all.into_iter().find(|snapshot| snapshot.name == *name)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(of_volumes(&format!("list snapshots of volume {volume}"), &error)),
    }
}

/// Deletes a snapshot that the driver has made. One that does not exist is deleted already.
pub(crate) fn delete_snapshot(datafs: &Datafs, id: &str) -> Result<(), Status> {
    let attempt = format!("delete snapshot {id}");
    let failed = |error: Error| of_volumes(&attempt, &error);
    let refuse =
        |reason: String| Err(refused(Code::FailedPrecondition, format!("cannot {attempt}: {reason}")));
    let Ok(spec) = id.parse::<VolumeSpec>() else { return Ok(()) };
    let Some(name) = &spec.snapshot else { return Ok(()) };
    let records = Registry::open(datafs).map_err(failed)?;
    let record = records.get::<SnapshotRecord>(name).map_err(failed)?;
    if record.is_none_or(|record| record.volume != spec.volume) {
        if !spec.is_latest() && exists(datafs, &spec)? {
            return refuse(
                "it was not made by this driver; delete it with `millrace snapshot delete`".into(),
            );
        }
        return Ok(());
    }
    for (other, made) in records.list::<VolumeRecord>().map_err(failed)? {
        if made.source.as_ref() == Some(&spec) && (made.is_snapshot || !made.ready) {
            return refuse(format!("volume {other} reads it: delete that volume first"));
        }
    }
    match datafs.snapshot_delete(&spec.volume, name) {
        Ok(()) => {}
        Err(error) if error.is_not_found() => {}
        Err(error) => return Err(failed(error)),
    }
    records.delete::<SnapshotRecord>(name).map_err(failed)
}
