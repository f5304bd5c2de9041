//! Copies of snapshots into new volumes, with everything that a snapshot holds: files, owners, modes, times, extended
//! attributes, access control lists and application keys.
//!
//! A copy reads and writes all bytes. One that was cut short goes on where it ended when it is repeated: files of the
//! same size and time are not copied again.

use std::path::PathBuf;

use millrace_datafs::{
    Attr, CopyOptions, Datafs, Endpoint, Error, FileKind, Node, Publish, SetAttr, SetTime, SetXattr, View,
    VolumeSpec,
};

/// Entries of a folder that are read in one transaction.
const PAGE: usize = 1_024;
/// Application keys that are written in one transaction.
const KEYS: usize = 64;

/// Copies a snapshot into a volume; durable when it returns. The volume belongs to this copy alone until then.
pub(crate) fn copy(datafs: &Datafs, from: &VolumeSpec, to: &VolumeSpec) -> Result<(), Error> {
    let (source, target) = (datafs.view(from)?, datafs.view(to)?);
    let options = CopyOptions { recursive: true, ..CopyOptions::default() };
    let ends = [&source, &target].map(|view| Endpoint::Volume(view.clone(), PathBuf::new()));
    let report = datafs.copy(&ends[0], &ends[1], &options, &|_| true)?;
    if let Some((path, reason)) = report.failed.first() {
        return Err(Error::Invalid(format!("{path} of {from} was not copied: {reason}")));
    }
    if report.left_out > 0 {
        return Err(Error::Invalid(format!(
            "{from} has {} pipes, sockets or devices, which a copy cannot hold: claim it read-only",
            report.left_out
        )));
    }
    dress(&source, &target)?;
    copy_keys(&source, &target)?;
    target.sync()
}

/// Gives each entry of the copy what [`Datafs::copy`] leaves out: owners, and attributes outside of `user.`.
fn dress(source: &View, target: &View) -> Result<(), Error> {
    let (from, to) = (source.root(), target.root());
    like(source, &source.getattr(from)?, target, &target.getattr(to)?)?;
    let mut folders = vec![(from, to)];
    while let Some((from, to)) = folders.pop() {
        let mut cursor = 0;
        loop {
            let page = source.readdir_attrs(from, cursor, PAGE)?;
            let Some((last, _)) = page.last() else { break };
            cursor = last.cursor;
            for (entry, attr) in page.iter().filter(|(entry, _)| entry.name != "." && entry.name != "..") {
                let made = target.lookup(to, &entry.name)?;
                like(source, attr, target, &made)?;
                if attr.kind == FileKind::Directory {
                    folders.push((attr.node, made.node));
                }
            }
        }
    }
    Ok(())
}

fn like(source: &View, wanted: &Attr, target: &View, made: &Attr) -> Result<(), Error> {
    let node: Node = made.node;
    if (wanted.uid, wanted.gid, wanted.mode) != (made.uid, made.gid, made.mode) || wanted.mtime != made.mtime
    {
        let set = SetAttr {
            mode: (wanted.kind != FileKind::Symlink).then_some(wanted.mode),
            uid: Some(wanted.uid),
            gid: Some(wanted.gid),
            mtime: Some(SetTime::At(wanted.mtime)),
            ..SetAttr::default()
        };
        target.setattr(node, &set)?;
    }
    let names = source.xattr_list(wanted.node)?;
    for name in &names {
        let value = source.xattr_get(wanted.node, name)?;
        // The list of a directory's or file's rights follows the mode unless it is set after it.
        target.xattr_set(node, name, &value, SetXattr::Any)?;
    }
    Ok(())
}

fn copy_keys(source: &View, target: &View) -> Result<(), Error> {
    for keys in source.key_scan("")?.chunks(KEYS) {
        let publish = keys
            .iter()
            .fold(Publish::new(), |publish, (key, value)| publish.put_key(key.clone(), value.clone()));
        target.publish(publish)?;
    }
    Ok(())
}
