//! The run of a job that was begun last, and whether it is over: trained to its end, with the model published.

use millrace_datafs::View;

use crate::checkpoint::{self, RunRecord};
use crate::error::{Error, Result};
use crate::job::{JobFile, ModelSource};
use crate::publish;

/// A run that is not over.
pub(crate) struct OpenRun {
    /// The run's id.
    pub(crate) run: String,
    /// The job with which it was last begun.
    pub(crate) job: JobFile,
    /// Trained to its end: only the publication of its model is left.
    pub(crate) trained: bool,
}

/// The run of a job that was begun last, if that one is not over.
pub(crate) fn open(view: &View, job: &str) -> Result<Option<OpenRun>> {
    let Some(last) = checkpoint::last_run(view, job)? else { return Ok(None) };
    let Some(job) = checkpoint::job_of_run(view, job, &last.run)? else { return Ok(None) };
    let trained = last.finished;
    if trained && is_published(view, &job, &last)? {
        return Ok(None);
    }
    Ok(Some(OpenRun { run: last.run, job, trained }))
}

/// Whether the model after one of the kept checkpoints was published. The newest may be one of a larger budget.
fn is_published(view: &View, job: &JobFile, record: &RunRecord) -> Result<bool> {
    for kept in &record.kept {
        if publish::recorded(view, &publish::key_of(job, &record.run, kept.step))?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Takes over the offsets of the job's last run if that one is not over and would be the same with them: a run that is
/// started again goes on with the records that it has begun with, also where only its model is unpublished.
pub(crate) fn keep_offsets(output: &View, job: &mut JobFile) -> Result<()> {
    if !job.reads_open_topic() {
        return Ok(());
    }
    let Some(OpenRun { job: theirs, .. }) = open(output, job.name.as_str())? else { return Ok(()) };
    let same = job.with_offsets_of(&theirs);
    let has_same_model = match (&same.model, &theirs.model) {
        (ModelSource::Init(own), ModelSource::Init(other)) => own == other,
        // The run itself compares the contents.
        (ModelSource::File(_), ModelSource::File(_)) => true,
        _ => false,
    };
    if has_same_model && !same.reads_open_topic() && same.digest("", "") == theirs.digest("", "") {
        tracing::info!(job = %job.name, dataset = %same.dataset, "going on with the offsets of the unfinished run");
        *job = same;
    }
    Ok(())
}

/// Checks that a job can leave its unfinished run behind: only bounds of a topic mean other rows in a new run.
pub(crate) fn abandon(output: &View, job: &JobFile) -> Result<()> {
    if !job.reads_open_topic() {
        let reason = format!(
            "--abandon-run is for a topic whose bounds are no offsets, for example topic:NAME@latest; {} has the same rows \
             in every run, so change the seed to begin a new one",
            job.dataset
        );
        return Err(Error::Job { job: job.name.to_string(), reason });
    }
    if let Some(OpenRun { job: theirs, .. }) = open(output, job.name.as_str())? {
        tracing::info!(job = %job.name, dataset = %theirs.dataset, "leaving the unfinished run on these records behind");
    }
    Ok(())
}
