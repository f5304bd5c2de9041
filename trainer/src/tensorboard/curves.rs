//! The curves of a training in an event file: what is written at which step, in ascending order.
use std::collections::BTreeSet;
use std::path::Path;

use super::EventFile;
use crate::error::Result;
use crate::spent::Spent;
use crate::train::{Progress, TrainReport};
use crate::validation::Evaluation;

/// Writes the curves of one start of a job. A full disk ends the file, not the training.
///
/// TensorBoard drops the values of a curve from a step on when an earlier step follows.
#[derive(Debug)]
pub struct Curves {
    events: Option<EventFile>,
    /// The last step that was written, or from which this start continues; none before the first one.
    last: Option<u64>,
    /// The time at the last report.
    spent: Spent,
    evaluated: BTreeSet<u64>,
}

impl Curves {
    /// Creates an event file in `directory`.
    ///
    /// # Errors
    /// [`crate::Error::Io`] names the directory.
    pub fn create(directory: &Path) -> Result<Curves> {
        Ok(Curves {
            events: Some(EventFile::create(directory)?),
            last: None,
            spent: Spent::default(),
            evaluated: BTreeSet::new(),
        })
    }

    /// Writes what is new in a report of the progress.
    pub fn progress(&mut self, progress: &Progress) {
        if progress.step == 0 {
            // Nothing is trained yet.
            return;
        }
        let last = match self.last {
            Some(last) => last,
            None => {
                self.write(|events| events.start(progress.first_step + 1));
                progress.first_step
            }
        };
        if progress.step > last {
            self.scalars(
                progress.step,
                &[
                    ("train/loss", progress.loss),
                    ("train/epoch", progress.epoch as f64),
                    ("train/samples_per_second", progress.samples_per_second),
                    ("train/workers", progress.worker_pids.len() as f64),
                ],
            );
            let spent = progress.spent.since(self.spent);
            self.spent = progress.spent;
            if let Some(shares) = spent.shares() {
                let shares = shares.map(|(cause, share)| (format!("time/{cause}"), share));
                let shares: Vec<(&str, f64)> =
                    shares.iter().map(|(name, share)| (name.as_str(), *share)).collect();
                self.scalars(progress.step, &shares);
            }
        }
        self.last = Some(progress.step.max(last));
        // Quick evaluations are seen at the end only.
        if let Some(evaluation) =
            progress.evaluation.filter(|found| Some(&found.epoch) > self.evaluated.last())
        {
            self.evaluated.insert(evaluation.epoch);
            self.evaluation(&evaluation);
        }
    }

    /// Writes the curves by epoch. Evaluations are repeated from the first one that was not seen.
    pub fn end(&mut self, report: &TrainReport) {
        for (epoch, loss) in (1..).zip(&report.loss_per_epoch) {
            self.scalars(epoch, &[("epoch/loss", *loss)]);
        }
        let unseen = report.validation.iter().skip_while(|found| self.evaluated.contains(&found.epoch));
        for evaluation in unseen.copied().collect::<Vec<_>>() {
            self.evaluation(&evaluation);
        }
    }

    fn evaluation(&mut self, evaluation: &Evaluation) {
        let figures: Vec<_> =
            evaluation.figures().map(|(name, value)| (format!("validation/{name}"), value)).collect();
        let values: Vec<_> = figures.iter().map(|(tag, value)| (tag.as_str(), *value)).collect();
        self.scalars(evaluation.epoch, &values);
    }

    fn scalars(&mut self, step: u64, values: &[(&str, f64)]) {
        self.write(|events| events.scalars(step, values));
    }

    fn write(&mut self, write: impl FnOnce(&mut EventFile) -> Result<()>) {
        if let Some(Err(error)) = self.events.as_mut().map(write) {
            tracing::warn!(%error, "no more events are written for TensorBoard");
            self.events = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::read;
    use super::*;
    use crate::train::End;

    fn evaluation(epoch: u64) -> Evaluation {
        Evaluation {
            epoch,
            step: 10 * epoch,
            rows: 4,
            loss: epoch as f64,
            accuracy: None,
            top_k: None,
            mae: None,
            auc: None,
            perplexity: None,
        }
    }

    fn report(evaluations: u64) -> TrainReport {
        TrainReport {
            job: "j".to_owned(),
            run: "r".to_owned(),
            end: End::EpochsDone,
            steps: 0,
            epochs: 0,
            rows_per_epoch: Vec::new(),
            loss_per_epoch: vec![0.5, 0.25],
            loss: None,
            accuracy: None,
            validation: (1..=evaluations).map(evaluation).collect(),
            best_epoch: None,
            model: "j".to_owned(),
            version: None,
            model_sha256: None,
            already_published: false,
            resumed_from_step: None,
            workers: 1,
            workers_joined: 0,
            workers_lost: 0,
            membership_epochs: 0,
            samples_per_second: 0.0,
            spent: Spent::default(),
            seconds: 0.0,
        }
    }

    #[test]
    fn curves_ascend_and_begin_at_the_first_trained_step() {
        let dir = tempfile::tempdir().unwrap();
        let mut curves = Curves::create(dir.path()).unwrap();
        let path = curves.events.as_ref().unwrap().path().to_owned();
        let at = |step, evaluated: Option<u64>| Progress {
            step,
            first_step: 40,
            loss: 1.5,
            evaluation: evaluated.map(evaluation),
            ..Progress::default()
        };
        // The coordinator listens, the resumed state is evaluated, a ring breaks and repeats a step.
        for progress in [
            at(0, None),
            at(40, None),
            at(41, None),
            at(45, Some(2)),
            at(44, Some(2)),
            at(45, Some(2)),
            at(47, Some(4)),
        ] {
            curves.progress(&progress);
        }
        curves.end(&report(4));
        let events = read(&path);
        let starts: Vec<i64> =
            events.iter().filter(|event| event.session_log.is_some()).map(|event| event.step).collect();
        assert_eq!(starts, [41]);
        assert_eq!(events[1].session_log.as_ref().unwrap().status, Some(1));
        let steps = |tag: &str| -> Vec<i64> {
            let has = |event: &&super::super::Event| {
                event.summary.as_ref().is_some_and(|summary| summary.values[0].tag == tag)
            };
            events.iter().filter(has).map(|event| event.step).collect()
        };
        assert_eq!(steps("train/loss"), [41, 45, 47]);
        assert_eq!(steps("epoch/loss"), [1, 2]);
        // 1 and 3 were not seen: a reader keeps the last ascending values, which are complete.
        assert_eq!(steps("validation/loss"), [2, 4, 1, 2, 3, 4]);
    }
}
