//! Scan of the records of one tree, live or of a snapshot, in key order. It checks each inode separately.
//! Facts that link inodes and names go to a sorter, and `names` joins them by inode.

use super::fix::{Fix, sum_of};
use super::report::{Findings, ProblemKind};
use super::sorter::Sorter;
use crate::error::Result;
use crate::fs::content::INLINE_BYTES_MAX;
use crate::meta::codec::Decoder;
use crate::meta::inode::{Dentry, Inode, decode_extent};
use crate::meta::keys;
use crate::node::FileKind;

/// A fact about an inode; the order is that in which they are joined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fact {
    /// It has attributes; `sum` is the checksum of their record.
    Inode { nlink: u32, parent: u64, folders: u32, is_folder: bool, sum: u32 },
    /// It is on the orphan list.
    Orphan,
    /// It has records, but no attributes.
    Stray,
    /// It has attributes that cannot be read, which was reported.
    Unreadable,
    /// A name leads to it: the record key of the entry.
    Name { parent: u64, is_folder: bool, record: Vec<u8> },
}

/// The tree and the inode that a fact is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Whose {
    pub(super) volume: u64,
    /// 0 for the live tree.
    pub(super) snapshot: u64,
    pub(super) ino: u64,
}

impl Whose {
    pub(super) fn is_live(self) -> bool {
        self.snapshot == 0
    }

    fn push(self, facts: &mut Sorter, fact: &Fact) -> Result<()> {
        let [volume, snapshot, ino] = [self.volume, self.snapshot, self.ino].map(u64::to_be_bytes);
        let head = [volume, snapshot, ino].concat();
        match fact {
            Fact::Inode { nlink, parent, folders, is_folder, sum } => facts.push(&[
                &head,
                &[0, u8::from(*is_folder)],
                &nlink.to_be_bytes(),
                &parent.to_be_bytes(),
                &folders.to_be_bytes(),
                &sum.to_be_bytes(),
            ]),
            Fact::Orphan => facts.push(&[&head, &[1, 0]]),
            Fact::Stray => facts.push(&[&head, &[2, 0]]),
            Fact::Unreadable => facts.push(&[&head, &[3, 0]]),
            Fact::Name { parent, is_folder, record } => {
                facts.push(&[&head, &[4, u8::from(*is_folder)], &parent.to_be_bytes(), record])
            }
        }
    }
}

/// Parses a record of the sorter.
pub(super) fn parse(record: &[u8]) -> Result<(Whose, Fact)> {
    let mut from = Decoder::new("spilled fact", record);
    let whose = Whose { volume: from.u64()?, snapshot: from.u64()?, ino: from.u64()? };
    let (tag, is_folder) = (from.u8()?, from.u8()? != 0);
    let fact = match tag {
        0 => Fact::Inode {
            nlink: from.u32()?,
            parent: from.u64()?,
            folders: from.u32()?,
            is_folder,
            sum: from.u32()?,
        },
        1 => Fact::Orphan,
        2 => Fact::Stray,
        3 => Fact::Unreadable,
        _ => Fact::Name { parent: from.u64()?, is_folder, record: record[34..].to_vec() },
    };
    Ok((whose, fact))
}

/// Adds the fact of an orphan's record.
pub(super) fn orphan(facts: &mut Sorter, volume: u64, ino: u64) -> Result<()> {
    Whose { volume, snapshot: 0, ino }.push(facts, &Fact::Orphan)
}

/// The scan of one tree.
pub(super) struct TreeScan {
    volume: u64,
    snapshot: u64,
    /// For the report: `VOLUME` or `VOLUME@SNAPSHOT`.
    name: String,
    now: Option<Current>,
}

/// The inode whose records are being read.
struct Current {
    ino: u64,
    inode: Option<(Inode, u32)>,
    /// It has attributes, which cannot be read.
    unreadable: bool,
    folders: u32,
    /// End of the last extent.
    extents_end: u64,
    /// Number of extents that begin inside an earlier one, and the lowest offset of these.
    overlaps: u64,
    overlaps_at: u64,
    head_len: u64,
    /// Bytes of its contents, head and extents.
    stored_bytes: u64,
    xattrs: u32,
    target_len: Option<u64>,
}

impl TreeScan {
    pub(super) fn new(volume: u64, snapshot: u64, name: String) -> TreeScan {
        TreeScan { volume, snapshot, name, now: None }
    }

    fn place(&self, ino: u64) -> String {
        format!("inode {ino} of {}", self.name)
    }

    /// Takes the next record.
    pub(super) fn record(
        &mut self,
        record: &[u8],
        value: &[u8],
        facts: &mut Sorter,
        findings: &mut Findings<'_>,
    ) -> Result<()> {
        let Some((ino, tag)) = keys::node_of(record) else { return Ok(()) };
        self.come_to(ino, facts, findings)?;
        let place = self.place(ino);
        let Some(now) = &mut self.now else { return Ok(()) };
        let mut damaged = |detail: String| {
            findings.problem(ProblemKind::DamagedRecord, place.clone(), detail, None);
        };
        match tag {
            keys::NodeTag::Attributes => match Inode::decode(value) {
                Ok(inode) => now.inode = Some((inode, sum_of(value))),
                Err(error) => {
                    now.unreadable = true;
                    damaged(error.to_string());
                }
            },
            keys::NodeTag::Child => {
                let Some((hash, name)) = keys::child_name(record) else {
                    damaged("the key of an entry is damaged".into());
                    return Ok(());
                };
                let shown = String::from_utf8_lossy(name).into_owned();
                if hash != keys::name_hash(name) {
                    damaged(format!("the hash of entry {shown:?} is not that of its name"));
                }
                match Dentry::decode(value) {
                    Ok(dentry) => {
                        let is_folder = dentry.kind == FileKind::Directory;
                        now.folders += u32::from(is_folder);
                        if self.snapshot == 0 {
                            findings.report().names += 1;
                        }
                        let whose = Whose { volume: self.volume, snapshot: self.snapshot, ino: dentry.ino };
                        let record = record.to_vec();
                        whose.push(facts, &Fact::Name { parent: ino, is_folder, record })?;
                    }
                    Err(error) => damaged(format!("entry {shown:?}: {error}")),
                }
            }
            keys::NodeTag::Head => {
                now.head_len = value.len() as u64;
                now.stored_bytes = now.stored_bytes.saturating_add(now.head_len);
                if value.len() > INLINE_BYTES_MAX {
                    damaged(format!("{} bytes are kept in the metadata", value.len()));
                }
            }
            keys::NodeTag::Extent => {
                let extent = keys::extent_offset(record).map(|offset| decode_extent(offset, value));
                match extent {
                    Some(Ok(extent)) => {
                        if extent.file_offset < now.extents_end {
                            now.overlaps += 1;
                            now.overlaps_at = now.overlaps_at.min(extent.file_offset);
                        }
                        now.extents_end = now.extents_end.max(extent.end());
                        now.stored_bytes = now.stored_bytes.saturating_add(extent.len);
                    }
                    Some(Err(error)) => damaged(error.to_string()),
                    None => damaged("the key of an extent is damaged".into()),
                }
            }
            keys::NodeTag::Target => now.target_len = Some(value.len() as u64),
            keys::NodeTag::Xattr => now.xattrs += 1,
            keys::NodeTag::Other => {}
        }
        Ok(())
    }

    /// Takes a damaged record of which only the key can be read; the caller has reported it.
    pub(super) fn unreadable(
        &mut self,
        record: &[u8],
        facts: &mut Sorter,
        findings: &mut Findings<'_>,
    ) -> Result<()> {
        let Some((ino, tag)) = keys::node_of(record) else { return Ok(()) };
        self.come_to(ino, facts, findings)?;
        if let (keys::NodeTag::Attributes, Some(now)) = (tag, &mut self.now) {
            now.unreadable = true;
        }
        Ok(())
    }

    /// Begins a new inode, unless the records are of the current one.
    fn come_to(&mut self, ino: u64, facts: &mut Sorter, findings: &mut Findings<'_>) -> Result<()> {
        if self.now.as_ref().is_none_or(|now| now.ino != ino) {
            self.flush(facts, findings)?;
            self.now = Some(Current {
                ino,
                inode: None,
                unreadable: false,
                folders: 0,
                extents_end: 0,
                overlaps: 0,
                overlaps_at: u64::MAX,
                head_len: 0,
                stored_bytes: 0,
                xattrs: 0,
                target_len: None,
            });
        }
        Ok(())
    }

    /// Ends the scan after the last record.
    pub(super) fn finish(mut self, facts: &mut Sorter, findings: &mut Findings<'_>) -> Result<()> {
        self.flush(facts, findings)
    }

    fn flush(&mut self, facts: &mut Sorter, findings: &mut Findings<'_>) -> Result<()> {
        let Some(now) = self.now.take() else { return Ok(()) };
        let whose = Whose { volume: self.volume, snapshot: self.snapshot, ino: now.ino };
        if now.overlaps > 0 {
            let mut detail = format!(
                "{} extents begin inside an earlier one, the first at byte {}",
                now.overlaps, now.overlaps_at
            );
            let fix = whose.is_live().then_some(Fix::Separate { volume: self.volume, ino: now.ino });
            if !whose.is_live() {
                detail += "; a snapshot is never changed: delete it after the repair of the live file";
            }
            findings.problem(ProblemKind::WrongExtents, self.place(now.ino), detail, fix);
        }
        let Some((inode, sum)) = now.inode else {
            return whose.push(facts, if now.unreadable { &Fact::Unreadable } else { &Fact::Stray });
        };
        if whose.is_live() {
            findings.report().inodes += 1;
        }
        let is_file = inode.kind == FileKind::File;
        let stored_end = now.extents_end.max(now.head_len);
        if (!is_file && stored_end > 0) || stored_end > inode.size.max(u64::from(!is_file)) {
            let detail = format!("data up to byte {stored_end}, its size is {}", inode.size);
            findings.problem(ProblemKind::WrongExtents, self.place(now.ino), detail, None);
        }
        if (now.stored_bytes, now.xattrs) != (inode.stored_bytes, inode.xattrs) {
            let detail = format!(
                "{} bytes and {} attributes are stored, its record says {} and {}",
                now.stored_bytes, now.xattrs, inode.stored_bytes, inode.xattrs
            );
            findings.problem(ProblemKind::DamagedRecord, self.place(now.ino), detail, None);
        }
        let expected = (inode.kind == FileKind::Symlink).then_some(inode.size);
        if now.target_len != expected {
            let detail = format!("its target has {:?} bytes, {expected:?} belong there", now.target_len);
            findings.problem(ProblemKind::DamagedRecord, self.place(now.ino), detail, None);
        }
        let is_folder = inode.is_directory();
        if !is_folder && now.folders > 0 {
            let detail = "it has entries, but is no folder";
            findings.problem(ProblemKind::DamagedRecord, self.place(now.ino), detail, None);
        }
        let fact =
            Fact::Inode { nlink: inode.nlink, parent: inode.parent, folders: now.folders, is_folder, sum };
        whose.push(facts, &fact)
    }
}
