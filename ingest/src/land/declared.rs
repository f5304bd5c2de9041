//! Check of declared columns against the first records: it warns about names that no record has, and about
//! mostly dead letters.

use super::SAMPLE_MIN;
use crate::config::Job;
use crate::decode::{Decoder, Reject};
use crate::progress::IngestReport;
use crate::state::JobState;

/// Names that a warning lists.
const NAMES_MAX: usize = 5;

/// One check of the first records of a run.
pub(crate) struct DeclaredCheck {
    open: bool,
    /// Whether the job has landed nothing before: later, optional columns may be missing for a while.
    is_first: bool,
    /// Reason of the first dead letter.
    reason: Option<String>,
}

impl DeclaredCheck {
    pub(crate) fn new(job: &Job, state: &JobState) -> Self {
        Self { open: job.declared.is_some(), is_first: state.schema.is_none(), reason: None }
    }

    /// Keeps the reason of the first dead letter.
    pub(crate) fn rejected(&mut self, reject: &Reject) {
        if self.open && self.reason.is_none() {
            self.reason = Some(reject.reason.clone());
        }
    }

    /// Checks the published records, as soon as they are enough or the run has `ended`.
    pub(crate) fn check(&mut self, job: &Job, decoder: &Decoder, report: &mut IngestReport, ended: bool) {
        // Skipped tombstones say nothing about the columns.
        let records = report.records - report.tombstones_skipped;
        if !self.open || records == 0 || (!ended && records < SAMPLE_MIN as u64) {
            return;
        }
        self.open = false;
        let (name, topic) = (job.name(), job.topic());
        let unseen: Vec<&str> = decoder.unseen().collect();
        let warning = match &self.reason {
            Some(reason) if 2 * report.dead_letters > records => format!(
                "ingest job {name}: {} of the first {records} records of topic {topic} are dead letters (the \
                 first: {reason}); check the declared columns (schema)",
                report.dead_letters
            ),
            _ if self.is_first && !unseen.is_empty() => format!(
                "ingest job {name}: none of the first {records} records of topic {topic} has the declared {}; \
                 check the names (schema)",
                listed(&unseen)
            ),
            _ => return,
        };
        tracing::warn!(job = name, topic, "{warning}");
        report.warnings.push(warning);
    }
}

/// `columns "a", "b" and 3 more`
fn listed(names: &[&str]) -> String {
    let shown: Vec<String> = names.iter().take(NAMES_MAX).map(|name| format!("{name:?}")).collect();
    let more = match names.len().saturating_sub(NAMES_MAX) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let columns = if names.len() == 1 { "column" } else { "columns" };
    format!("{columns} {}{more}", shown.join(", "))
}
