//! The report of a check: its options, the problems found, and the progress.

use std::collections::BTreeSet;

use serde::Serialize;

use super::fix::Fix;
use crate::upkeep::UpkeepReport;

/// Most problems that a report lists one by one; all are counted.
const LISTED_MAX: usize = 1_000;
/// Most repairs that one pass keeps; the next pass does the rest.
const FIXES_MAX: usize = 100_000;

/// Options of a check.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FsckOptions {
    /// Also read all data of files and snapshots, and verify it against its checksums.
    pub scrub: bool,
    /// Repair what can be repaired without losing user data.
    pub repair: bool,
}

/// The kind of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ProblemKind {
    /// A record cannot be read, or does not belong where it is.
    DamagedRecord,
    /// A name leads to no inode.
    DanglingName,
    /// An inode has links but no name, or no path leads to a directory.
    LostInode,
    /// An inode's link count is not the number of its names.
    WrongLinks,
    /// A directory has two names or records a wrong parent, or a name has the wrong kind.
    WrongName,
    /// An unlinked inode that would never be freed, or an inode with a name that would be.
    LostOrphan,
    /// A file's extents overlap or reach beyond its end.
    WrongExtents,
    /// A counter of inode numbers, volumes or epochs would assign a number twice.
    WrongCounter,
    /// The name of a volume or snapshot does not lead to it, or leads to something else.
    WrongCatalog,
    /// The history of a snapshot and the list of what its deletion frees differ.
    WrongHistory,
    /// The count of extents that reference an object is wrong.
    WrongReferences,
    /// An object in use is on the list of what may be deleted.
    GarbageInUse,
    /// Nothing references an object, and it is on no list of what may be deleted.
    LostObject,
    /// A file's data is not in the store.
    MissingObject,
    /// A file's data is damaged.
    DamagedObject,
}

impl ProblemKind {
    /// Whether a problem of this kind is looked at once more before it is reported, so that concurrent changes cannot
    /// feign it.
    pub(super) fn is_certain(self) -> bool {
        matches!(self, Self::LostObject | Self::MissingObject | Self::DamagedObject)
    }
}

/// Whether a problem was or can be repaired.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Remedy {
    /// It was repaired.
    Repaired,
    /// `--repair` would repair it.
    Repairable,
    /// It cannot be repaired; only a backup or a snapshot may have the data.
    None,
}

/// One problem.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// The kind of the problem.
    pub kind: ProblemKind,
    /// The affected inode, object or table.
    pub place: String,
    /// A description of the damage.
    pub detail: String,
    /// Whether it was or can be repaired.
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
    /// Objects that await their deletion, or that a session still has to commit or give up.
    pub unclaimed_objects: u64,
    /// Problems found; a problem that a later pass finds again counts once.
    pub problems: u64,
    /// Problems that were repaired.
    pub repaired: u64,
    /// The background work, if a process is elected for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upkeep: Option<UpkeepReport>,
    /// The first 1,000 problems.
    pub found: Vec<Problem>,
}

impl FsckReport {
    /// Whether no problem was found.
    pub fn is_sound(&self) -> bool {
        self.problems == 0
    }

    /// Whether problems remain that were not repaired.
    pub fn is_damaged(&self) -> bool {
        self.problems > self.repaired
    }
}

/// The progress of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FsckProgress {
    /// The name of the stage.
    pub stage: &'static str,
    /// Records, objects or (scrub) bytes done in this stage.
    pub done: u64,
}

impl Found {
    /// The problems that concurrent changes may have feigned; `None` when they are too many to be listed.
    pub(super) fn suspects(&self) -> Option<BTreeSet<(ProblemKind, String)>> {
        let listed = self.report.found.iter().filter(|problem| !problem.kind.is_certain());
        let listed = listed.map(|problem| (problem.kind, problem.place.clone()));
        (self.report.problems == self.report.found.len() as u64).then(|| listed.collect())
    }

    /// Drops these problems.
    pub(super) fn drop_suspects(&mut self) {
        let mut places = Vec::with_capacity(self.report.found.len());
        let mut left = 0;
        for problem in &self.report.found {
            let is_certain = problem.kind.is_certain();
            places.push(is_certain.then_some(left));
            left += usize::from(is_certain);
        }
        let moved = |(index, fix)| Some((places.get(index).copied().flatten()?, fix));
        self.fixes = std::mem::take(&mut self.fixes).into_iter().filter_map(moved).collect();
        self.report.found.retain(|problem| problem.kind.is_certain());
        self.report.problems = self.report.found.len() as u64;
    }
}

/// Collects the problems and repairs of one pass, and reports its progress.
pub(super) struct Findings<'p> {
    pub(super) found: Found,
    progress: &'p mut dyn FnMut(FsckProgress),
    stage: &'static str,
    done: u64,
}

/// The result of one pass: the report, and repairs, each with the index of its problem in the report.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) report: FsckReport,
    pub(super) fixes: Vec<(usize, Fix)>,
}

impl<'p> Findings<'p> {
    pub(super) fn new(progress: &'p mut dyn FnMut(FsckProgress)) -> Findings<'p> {
        Findings { found: Found::default(), progress, stage: "", done: 0 }
    }

    /// Drops all findings, because the picture is taken anew.
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

    /// The report so far.
    pub(super) fn report(&mut self) -> &mut FsckReport {
        &mut self.found.report
    }

    /// Adds a problem and its repair.
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

    /// Reports a record whose key does not belong to its table.
    pub(super) fn misplaced(&mut self, table: &str, key: &[u8]) {
        let detail =
            format!("a key of {} bytes, which is none of this table: {}", key.len(), key.escape_ascii());
        self.problem(ProblemKind::DamagedRecord, format!("list of {table}"), detail, None);
    }
}
