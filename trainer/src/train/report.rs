//! The progress and the report of a job.
use std::net::SocketAddr;

use serde::Serialize;

use super::checked::{Checked, Crew};
use crate::engine::Loss;
use crate::spent::Spent;
use crate::state::RunState;
use crate::validation::{self, Evaluation};

/// A running job, as its progress callback sees it.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Progress {
    /// Steps applied.
    pub step: u64,
    /// The step after which the last allowed epoch is complete.
    pub steps_max: u64,
    /// The step from which this call of [`train`](super::train) continues.
    pub first_step: u64,
    /// Epochs completed.
    pub epoch: u64,
    /// The last epoch the job may run.
    pub epochs_max: u64,
    /// Mean loss of the last global batch.
    pub loss: f64,
    /// The last evaluation on the validation data.
    pub evaluation: Option<Evaluation>,
    /// Rows of applied steps since this call of [`train`](super::train) began, per second of training.
    pub samples_per_second: f64,
    /// Where the time of rank 0 went during this call of [`train`](super::train).
    pub spent: Spent,
    /// Process ids of the workers in the current membership epoch, in rank order.
    pub worker_pids: Vec<u32>,
    /// The membership epoch; it grows whenever workers join or leave.
    pub membership_epoch: u64,
    /// Workers that have to join before training can go on; 0 while it does.
    pub workers_missing: usize,
    /// How long the volumes have not taken a checkpoint that is due; 0 while they do.
    #[serde(skip_serializing_if = "is_zero")]
    pub unsaved_seconds: u64,
    /// How long a worker has waited for rows that the volumes do not give; 0 while they do.
    #[serde(skip_serializing_if = "is_zero")]
    pub unread_seconds: u64,
    /// Where workers of other machines join.
    pub listening: Option<SocketAddr>,
    /// The coordinator whose lease this process waits for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waiting_for: Option<String>,
}

pub(super) fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Why [`train`](super::train) returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// An epoch's mean training loss reached the target.
    Converged,
    /// All epochs are done.
    EpochsDone,
    /// The last evaluations on the validation data brought no lower loss.
    NoImprovement,
    /// The job was cancelled; another call continues from the last checkpoint.
    Stopped,
}

/// The result of a job.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TrainReport {
    /// The job.
    pub job: String,
    /// The run: a digest of what the job computes, its data and its first model, without the budget.
    pub run: String,
    /// Why it ended.
    pub end: End,
    /// Steps applied, over all restarts.
    pub steps: u64,
    /// Epochs completed.
    pub epochs: u64,
    /// Rows that each complete epoch delivered to applied steps, counted from row ids.
    pub rows_per_epoch: Vec<u64>,
    /// Mean training loss of each complete epoch.
    pub loss_per_epoch: Vec<f64>,
    /// Mean training loss of the last complete epoch.
    pub loss: Option<f64>,
    /// Training accuracy of the last complete epoch; none for regression losses.
    pub accuracy: Option<f64>,
    /// The evaluations on the validation data, in order.
    pub validation: Vec<Evaluation>,
    /// The epoch after which the validation loss was lowest.
    pub best_epoch: Option<u64>,
    /// The model's name in the output volume.
    pub model: String,
    /// The published version; none when the job was stopped.
    pub version: Option<u64>,
    /// SHA-256 of the published `model.onnx`, in hex.
    pub model_sha256: Option<String>,
    /// Whether an earlier call had published the run.
    pub already_published: bool,
    /// The step of the checkpoint from which this call continued.
    pub resumed_from_step: Option<u64>,
    /// Requested workers of the coordinator's machine, at most the number of virtual shards.
    pub workers: usize,
    /// How often workers of other machines joined during this call.
    pub workers_joined: u32,
    /// Workers that died or stopped responding during this call.
    pub workers_lost: u32,
    /// Membership epochs formed during this call.
    pub membership_epochs: u64,
    /// Rows per second of training during this call; 0 when nothing was left to train.
    pub samples_per_second: f64,
    /// Where the time of rank 0 went during this call.
    pub spent: Spent,
    /// Duration of this call.
    pub seconds: f64,
}

impl TrainReport {
    /// The report of a job of which nothing is done.
    pub(super) fn of(checked: &Checked, crew: Crew) -> TrainReport {
        TrainReport {
            job: checked.job.name.to_string(),
            run: checked.run.clone(),
            end: End::Stopped,
            steps: 0,
            epochs: 0,
            rows_per_epoch: Vec::new(),
            loss_per_epoch: Vec::new(),
            loss: None,
            accuracy: None,
            validation: Vec::new(),
            best_epoch: None,
            model: checked.job.model_name().to_string(),
            version: None,
            model_sha256: None,
            already_published: false,
            resumed_from_step: None,
            workers: crew.local,
            workers_joined: 0,
            workers_lost: 0,
            membership_epochs: 0,
            samples_per_second: 0.0,
            spent: Spent::default(),
            seconds: 0.0,
        }
    }
}

pub(super) fn fill(report: &mut TrainReport, state: &RunState, loss: Loss) {
    let epochs = &state.ledger.epochs;
    report.steps = state.step;
    report.epochs = epochs.len() as u64;
    report.rows_per_epoch = epochs.iter().map(|epoch| epoch.rows).collect();
    report.loss_per_epoch = epochs.iter().map(|epoch| epoch.loss).collect();
    report.best_epoch = validation::best(&state.evaluations).map(|best| best.epoch);
    report.validation.clone_from(&state.evaluations);
    report.loss = epochs.last().map(|epoch| epoch.loss);
    report.accuracy = epochs.last().filter(|_| loss.counts_classes()).map(|epoch| epoch.accuracy);
}
