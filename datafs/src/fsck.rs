//! Check and repair of a home (`fsck`). It compares names with inodes, extents with reference counts, those
//! with the store, and history with the lists of what deletions would free.
//!
//! The check runs beside live mounts and reads the metadata in batches, each a short transaction. Changes between two
//! batches may look like problems. So what a first pass finds is a suspicion. A second pass confirms or refutes it.
//! Only if the same suspicion is left, a last pass reads all but the trees of snapshots in one read transaction, and its
//! findings count. A sound home is never read in one transaction.
//!
//! Findings outside of the metadata (objects in the store) are checked again before they are reported. Memory is
//! bounded: records stream through external sorts, and only directories are kept, 16 bytes each. Spilled runs
//! lie beside the metadata and vanish with the process.

mod catalog;
mod fix;
mod names;
mod objects;
mod repair;
mod report;
mod scan;
mod sorter;
mod table;
#[cfg(test)]
mod tests;
mod tree;

pub use report::{FsckOptions, FsckProgress, FsckReport, Problem, ProblemKind, Remedy};

use report::{Findings, Found};
use scan::Scan;

use crate::datafs::Datafs;
use crate::error::Result;
use crate::upkeep;

/// Most passes of a repair: one repair may reveal another problem.
const PASSES_MAX: u32 = 4;

impl Datafs {
    /// Checks all volumes while other processes use them. With `options.repair`, each repair is a separate
    /// transaction that verifies its problem before it changes anything. Repairs are durable when this
    /// returns.
    ///
    /// # Errors
    /// When the metadata or the store cannot be read at all. Damage is in the report.
    pub fn fsck(&self, options: &FsckOptions, progress: &mut dyn FnMut(FsckProgress)) -> Result<FsckReport> {
        let mut found = self.fsck_confirmed(options, progress)?;
        found.report.upkeep = upkeep::report(&self.shared.meta)?;
        if !options.repair || found.fixes.is_empty() {
            return Ok(found.report);
        }
        found.report.repaired = repair::apply(&self.shared, &mut found)?;
        for _ in 1..PASSES_MAX {
            // Problems that this pass finds were hidden by those repaired before.
            let again = FsckOptions { scrub: false, repair: true };
            let mended = repair::apply(&self.shared, &mut self.fsck_pass(&again, Scan::Whole, progress)?)?;
            if mended == 0 {
                break;
            }
            found.report.problems += mended;
            found.report.repaired += mended;
        }
        self.shared.meta.sync()?;
        Ok(found.report)
    }

    /// Reads in batches, and in one transaction only when suspicions are left.
    fn fsck_confirmed(&self, options: &FsckOptions, progress: &mut dyn FnMut(FsckProgress)) -> Result<Found> {
        let mut found = self.fsck_pass(options, Scan::Batched, progress)?;
        let Some(mut suspects) = found.suspects() else {
            return self.fsck_pass(options, Scan::Whole, progress);
        };
        if !suspects.is_empty() {
            let again = FsckOptions { scrub: false, ..*options };
            // When they are too many to be compared, the last pass decides.
            if let Some(again) = self.fsck_pass(&again, Scan::Batched, progress)?.suspects() {
                suspects.retain(|suspect| again.contains(suspect));
            }
            if !suspects.is_empty() {
                return self.fsck_pass(options, Scan::Whole, progress);
            }
            found.drop_suspects();
        }
        Ok(found)
    }

    fn fsck_pass(
        &self,
        options: &FsckOptions,
        scan: Scan,
        progress: &mut dyn FnMut(FsckProgress),
    ) -> Result<Found> {
        let mut findings = Findings::new(progress);
        let directory = self.shared.sessions_dir.parent().unwrap_or(&self.shared.sessions_dir).to_owned();
        self.shared.meta.barrier()?;
        let picture = scan::take(&self.shared.meta, &directory, scan, &mut findings)?;
        // Bytes of small files reach the store with their commit, which the picture may be ahead of.
        self.shared.meta.settle()?;
        let scan::Picture { names, mut objects, volumes, sessions, hidden_extents, .. } = picture;
        names::check(names.finish()?, &volumes, &mut findings)?;
        objects::list(&self.shared, &mut objects, &mut findings)?;
        let check =
            objects::Check { sessions, hidden_extents, scrub: options.scrub, batched: scan == Scan::Batched };
        check.run(&self.shared, objects.finish()?, &mut findings)?;
        Ok(findings.found)
    }
}
