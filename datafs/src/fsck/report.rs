//! What a check looked at and what it found.

use serde::Serialize;

use super::repair::Fix;

/// Problems that a report lists one by one; all are counted.
const LISTED_MAX: usize = 1_000;
/// Repairs that one pass keeps; what is more is left to the next pass.
const FIXES_MAX: usize = 100_000;

/// How to check.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FsckOptions {
    /// Also read everything that files and snapshots hold, against its checksums.
    pub scrub: bool,
    /// Repair what can be repaired without losing what users have written.
    pub repair: bool,
}

/// What is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ProblemKind {
    /// A record cannot be read, or is of no use where it is.
    DamagedRecord,
    /// A name leads to no inode.
    DanglingName,
    /// An inode has links but no name, or a folder hangs in no tree.
    LostInode,
    /// An inode's link count is not the number of its names.
    WrongLinks,
    /// A folder has two names, or knows a wrong parent; a name has the wrong kind.
    WrongName,
    /// An unlinked inode that nobody would ever free.
    LostOrphan,
    /// A file's extents overlap or reach behind its end.
    WrongExtents,
    /// A counter of inode numbers, volumes or epochs would give a number out twice.
    WrongCounter,
    /// The name of a volume or snapshot does not lead to it, or leads to something else.
    WrongCatalog,
    /// The history of a snapshot and the list of what its deletion frees differ.
    WrongHistory,
    /// The count of extents that point at an object is wrong.
    WrongReferences,
    /// An object in use is on the list of what may be deleted.
    GarbageInUse,
    /// Nothing points at an object, and it is on no list of what may be deleted.
    LostObject,
    /// A file's data is not in the store.
    MissingObject,
    /// A file's data is damaged.
    DamagedObject,
}

/// What became of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Remedy {
    /// It was repaired.
    Repaired,
    /// `--repair` would repair it.
    Repairable,
    /// Nothing but a backup or a snapshot brings it back.
    None,
}

/// One problem.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// What is wrong.
    pub kind: ProblemKind,
    /// Where.
    pub place: String,
    /// How it shows.
    pub detail: String,
    /// What became of it.
    pub remedy: Remedy,
}

/// The outcome of a check.
#[derive(Debug, Clone, Default, Serialize)]
pub struct FsckReport {
    /// Volumes, without those in deletion.
    pub volumes: u64,
    /// Snapshots.
    pub snapshots: u64,
    /// Inodes of the live trees.
    pub inodes: u64,
    /// Names of the live trees.
    pub names: u64,
    /// Extents of live trees and history.
    pub extents: u64,
    /// Objects in the store.
    pub objects: u64,
    /// Their size there, in bytes.
    pub object_bytes: u64,
    /// Bytes that were read against their checksums.
    pub scrubbed_bytes: u64,
    /// Objects that wait for their deletion, or that processes still have to publish or give up.
    pub unclaimed_objects: u64,
    /// Problems found; those that a later pass found again count once.
    pub problems: u64,
    /// Of them repaired.
    pub repaired: u64,
    /// The first thousand.
    pub found: Vec<Problem>,
}

impl FsckReport {
    /// Whether nothing was wrong.
    pub fn is_sound(&self) -> bool {
        self.problems == 0
    }

    /// Whether something is wrong still.
    pub fn is_damaged(&self) -> bool {
        self.problems > self.repaired
    }
}

/// How far a check has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FsckProgress {
    /// What is being done, in words.
    pub stage: &'static str,
    /// Records, objects or (scrub) bytes done in this stage.
    pub done: u64,
}

/// Collects what is found.
pub(super) struct Findings<'p> {
    pub(super) found: Found,
    progress: &'p mut dyn FnMut(FsckProgress),
    stage: &'static str,
    done: u64,
}

/// What one pass found: the report, and repairs, each with the place of its problem in the list.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) report: FsckReport,
    pub(super) fixes: Vec<(usize, Fix)>,
}

impl<'p> Findings<'p> {
    pub(super) fn new(progress: &'p mut dyn FnMut(FsckProgress)) -> Findings<'p> {
        Findings { found: Found::default(), progress, stage: "", done: 0 }
    }

    /// The picture is taken anew.
    pub(super) fn restart(&mut self) {
        self.found = Found::default();
    }

    /// Begins a stage.
    pub(super) fn stage(&mut self, stage: &'static str) {
        (self.stage, self.done) = (stage, 0);
        (self.progress)(FsckProgress { stage, done: 0 });
    }

    /// Counts work of the stage.
    pub(super) fn step(&mut self, amount: u64) {
        self.done += amount;
        (self.progress)(FsckProgress { stage: self.stage, done: self.done });
    }

    /// What is counted.
    pub(super) fn report(&mut self) -> &mut FsckReport {
        &mut self.found.report
    }

    /// Notes a problem and how to mend it.
    pub(super) fn problem(
        &mut self,
        kind: ProblemKind,
        place: String,
        detail: impl Into<String>,
        fix: Option<Fix>,
    ) {
        let Found { report, fixes } = &mut self.found;
        report.problems += 1;
        let remedy = if fix.is_some() { Remedy::Repairable } else { Remedy::None };
        let index = report.found.len();
        if index < LISTED_MAX {
            report.found.push(Problem { kind, place, detail: detail.into(), remedy });
        }
        if let Some(fix) = fix
            && fixes.len() < FIXES_MAX
        {
            fixes.push((index, fix));
        }
    }
}
