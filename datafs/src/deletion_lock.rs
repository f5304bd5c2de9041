//! The lock file of a process that deletes objects: the proof of its end where sessions have leases.
//!
//! A lapsed lease does not prove that a process has ended, so its deletion records would stay (`deletion.rs`). Before its
//! first record, a process therefore locks a file in its home, and keeps it locked. The kernel drops the lock when the
//! process ends. The next process that opens the home finds the file without a lock and removes the session's records.
//!
//! A free lock is a proof only on the same machine since the same boot, and only for this file, not for a copy of it. So
//! the file contains 16 bytes boot id, `u64` device and `u64` inode of itself. It has its name only while it is locked, or
//! after its process has ended. Without a file, the records stay.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use millrace_leaf::{error_chain, private};
use nix::fcntl::{Flock, FlockArg};

use crate::data::boot_of_machine;
use crate::deletion_record;
use crate::error::{Error, Result};
use crate::meta::engine::{Durability, Order};
use crate::meta::keys;
use crate::meta::metadata::Metadata;

/// Bytes of a file.
const BYTES: usize = 32;

fn folder(home: &Path) -> PathBuf {
    home.join("datafs/deleting")
}

fn name(session: u64) -> String {
    format!("{session:016x}")
}

/// The session that a file's name tells.
fn session_of(name: &OsStr) -> Option<u64> {
    let digits = name.to_str().filter(|name| name.len() == 16)?;
    u64::from_str_radix(digits, 16).ok()
}

/// Locks the file of this process. None where file locks show the end of a process anyway, or if that fails.
pub(crate) fn take(meta: &Metadata, home: &Path, session: u64) -> Option<Flock<File>> {
    if !matches!(meta.has_leases(), Ok(true)) {
        return None;
    }
    let failed = |error: &io::Error| {
        tracing::warn!(
            folder = %folder(home).display(),
            error = error_chain::one_line(error),
            "cannot lock a file: if this process is killed, a restore may need --take-store"
        );
    };
    lock_file(&folder(home), session).inspect_err(failed).ok()
}

fn lock_file(folder: &Path, session: u64) -> io::Result<Flock<File>> {
    private::create_dir_all(folder)?;
    let (path, new) = (folder.join(name(session)), folder.join(format!("{}.new", name(session))));
    let file = private::options().read(true).write(true).create(true).truncate(true).open(&new)?;
    let locked = Flock::lock(file, FlockArg::LockExclusiveNonblock);
    let lock = locked.map_err(|(_, errno)| io::Error::from(errno))?;
    lock.write_all_at(&content(&lock)?, 0)?;
    fs::rename(&new, &path)?;
    Ok(lock)
}

/// What the file of a process of this boot contains.
fn content(file: &File) -> io::Result<[u8; BYTES]> {
    let boot = boot_of_machine().ok_or_else(|| io::Error::other("the kernel does not tell the boot id"))?;
    let own = file.metadata()?;
    let mut content = [0; BYTES];
    content[..16].copy_from_slice(&boot);
    content[16..24].copy_from_slice(&own.dev().to_le_bytes());
    content[24..].copy_from_slice(&own.ino().to_le_bytes());
    Ok(content)
}

/// Removes the deletion records of processes of this home that have ended, and their files. What fails is left for the
/// next process.
pub(crate) fn forget_ended(meta: &Metadata, home: &Path) {
    if let Err(error) = try_forget_ended(meta, &folder(home)) {
        tracing::warn!(%error, "cannot remove the deletion records of processes that have ended");
    }
}

fn try_forget_ended(meta: &Metadata, folder: &Path) -> Result<()> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(|error| Error::io("list the lock files in", folder, error))?,
    };
    for entry in entries.flatten() {
        let path = entry.path();
        let Ok(file) = private::options().read(true).write(true).open(&path) else { continue };
        // A process that has it locked may still delete objects.
        let Ok(lock) = Flock::lock(file, FlockArg::LockExclusiveNonblock) else { continue };
        if let Some(session) = session_of(&entry.file_name())
            && is_proof(&lock)
            && !forget(meta, session)?
        {
            continue;
        }
        // After the records. A file that stays is found again.
        let _ = fs::remove_file(&path);
    }
    Ok(())
}

/// Whether a free lock on this file shows the end of its process.
fn is_proof(file: &File) -> bool {
    let mut found = [0; BYTES];
    file.read_exact_at(&mut found, 0).is_ok() && content(file).is_ok_and(|expected| expected == found)
}

/// Removes the records of a session. Returns false, and removes nothing, while a restore may have read them: it writes them
/// back at its end, and needs the file then.
fn forget(meta: &Metadata, session: u64) -> Result<bool> {
    let (prefix, holds) = (keys::deletions_of(session), keys::holds());
    let has_records = meta
        .view(|txn| Ok(!txn.scan(&prefix, &keys::after_prefix(&prefix), Order::Ascending, 1)?.is_empty()))?;
    if !has_records {
        let is_held = meta.view(|txn| {
            Ok(!txn.scan(&holds, &keys::after_prefix(&holds), Order::Ascending, 1)?.is_empty())
        })?;
        return Ok(!is_held);
    }
    meta.transact_making_room(Durability::Durable, |txn| {
        if !txn.scan(&holds, &keys::after_prefix(&holds), Order::Ascending, 1)?.is_empty() {
            return Ok(false);
        }
        deletion_record::forget(txn, session)?;
        Ok(true)
    })
}

#[cfg(test)]
pub(crate) mod tests;
