//! Check and repair of a home (`fsck`). It compares names with inodes, extents with reference counts, those
//! with the store, and history with the lists of what deletions would free.
//!
//! One read transaction takes a picture of the metadata, so the check may run beside live mounts. Findings
//! outside of that picture (objects in the store) are checked again before they are reported. Memory is
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

use crate::datafs::Datafs;
use crate::error::Result;

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
        let mut found = self.fsck_pass(options, progress)?;
        if !options.repair || found.fixes.is_empty() {
            return Ok(found.report);
        }
        found.report.repaired = repair::apply(&self.shared, &mut found)?;
        for _ in 1..PASSES_MAX {
            // Problems that this pass finds were hidden by those repaired before.
            let again = FsckOptions { scrub: false, repair: true };
            let mended = repair::apply(&self.shared, &mut self.fsck_pass(&again, progress)?)?;
            if mended == 0 {
                break;
            }
            found.report.problems += mended;
            found.report.repaired += mended;
        }
        self.shared.meta.sync()?;
        Ok(found.report)
    }

    fn fsck_pass(&self, options: &FsckOptions, progress: &mut dyn FnMut(FsckProgress)) -> Result<Found> {
        let mut findings = Findings::new(progress);
        let directory = self.shared.sessions_dir.parent().unwrap_or(&self.shared.sessions_dir).to_owned();
        self.shared.meta.barrier()?;
        let picture = scan::take(&self.shared.meta, &directory, &mut findings)?;
        // Bytes of small files reach the store with their commit, which the picture may be ahead of.
        self.shared.meta.settle()?;
        let scan::Picture { names, mut objects, volumes, sessions, hidden_extents } = picture;
        names::check(names.finish()?, &volumes, &mut findings)?;
        objects::list(&self.shared, &mut objects, &mut findings)?;
        let check = objects::Check { sessions, hidden_extents, scrub: options.scrub };
        check.run(&self.shared, objects.finish()?, &mut findings)?;
        Ok(findings.found)
    }
}
