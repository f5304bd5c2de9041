//! The final report of quickstart: counts that must agree, for people or as one JSON object.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use millrace_home::Addresses;
use serde::Serialize;

use crate::failure::{Exit, fail};
use crate::output::{Output, count, quoted};

/// The start of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Start {
    /// On an empty home.
    Clean,
    /// On the data of an earlier run.
    Continued,
}

/// The counts of the steps.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Figures {
    /// Records in both topics.
    pub(crate) produced: u64,
    /// Records for training among them.
    pub(crate) produced_train: u64,
    /// Held-out records among them.
    pub(crate) produced_test: u64,
    /// Rows in the snapshot, both parts, counted by topic, partition and offset.
    pub(crate) landed: u64,
    /// Records that did not decode.
    pub(crate) dead_letters: u64,
    /// Rows that training read in each of its epochs.
    pub(crate) rows_per_epoch: u64,
    /// Epochs until training converged.
    pub(crate) epochs: u64,
    /// Steps of all epochs.
    pub(crate) steps: u64,
    /// Training workers.
    pub(crate) workers: u64,
    /// Workers that died and were replaced.
    pub(crate) workers_lost: u64,
    /// Mean training loss of the last epoch.
    pub(crate) loss: f64,
    /// Training samples per second; 0 when the model existed already.
    pub(crate) samples_per_second: f64,
    /// The device for training and serving.
    pub(crate) device: String,
    /// Version of the published model.
    pub(crate) version: u64,
    /// SHA-256 of its graph.
    pub(crate) model_sha256: String,
    /// Held-out records predicted over gRPC.
    pub(crate) predicted_grpc: u64,
    /// Held-out records predicted through the topic, counted by their source.
    pub(crate) predicted_topic: u64,
    /// Predictions in the topic beyond one per held-out record.
    pub(crate) repeated_topic: u64,
    /// Share of the held-out records that were predicted correctly.
    pub(crate) accuracy: f64,
    /// Whether gRPC and the topic gave the same classes.
    pub(crate) ways_agree: bool,
    /// The file that was read through the mount, with its size; or why there is no mount.
    pub(crate) mount_note: String,
}

/// The complete result.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Report {
    start: Start,
    #[serde(flatten)]
    figures: Figures,
    seconds: f64,
    peak_rss_mib: u64,
    addresses: Addresses,
}

impl Report {
    /// Builds the report of a run.
    pub(crate) fn new(
        start: Start,
        figures: Figures,
        elapsed: Duration,
        peak_rss_mib: u64,
        addresses: Addresses,
    ) -> Report {
        let seconds = (elapsed.as_secs_f64() * 100.0).round() / 100.0;
        Report { start, figures, seconds, peak_rss_mib, addresses }
    }

    /// Prints it.
    pub(crate) fn show(&self, out: Output) -> Result<()> {
        let f = &self.figures;
        let row = |step: &str, records: u64, what: String| vec![step.to_owned(), count(records), what];
        out.table(
            self,
            &["step", "records", ""],
            [
                row(
                    "produced",
                    f.produced,
                    format!("{} to train on, {} held out", count(f.produced_train), count(f.produced_test)),
                ),
                row(
                    "landed",
                    f.landed,
                    format!("in digits@quickstart, {} dead letters", count(f.dead_letters)),
                ),
                row(
                    "rows per epoch",
                    f.rows_per_epoch,
                    format!(
                        "{} epochs, {} steps, {} workers on {}",
                        f.epochs,
                        count(f.steps),
                        f.workers,
                        f.device
                    ),
                ),
                row("predicted, gRPC", f.predicted_grpc, format!("model digits version {}", f.version)),
                row("predicted, topic", f.predicted_topic, "digits-test to digits-predictions".to_owned()),
                vec![
                    "accuracy".to_owned(),
                    format!("{:.4}", f.accuracy),
                    "on the held-out records".to_owned(),
                ],
                vec!["loss".to_owned(), format!("{:.4}", f.loss), "mean of the last epoch".to_owned()],
                vec!["mount".to_owned(), String::new(), f.mount_note.clone()],
                vec![
                    "model".to_owned(),
                    String::new(),
                    format!("sha256 {:.16}… (--json shows all of it)", f.model_sha256),
                ],
                vec![
                    "time, memory".to_owned(),
                    format!("{:.1} s", self.seconds),
                    format!("{} MiB at the peak, all processes", count(self.peak_rss_mib)),
                ],
            ],
        )?;
        if self.verdict().is_ok() {
            out.text(&format!(
                "nothing was lost: {} produced = {} landed, of them {} to train on = {} per epoch,\n                  {} held out = {} over gRPC = {} through the topic",
                count(f.produced), count(f.landed), count(f.produced_train), count(f.rows_per_epoch),
                count(f.produced_test), count(f.predicted_grpc), count(f.predicted_topic),
            ))?;
        }
        Ok(())
    }

    /// Fails unless all counts agree.
    pub(crate) fn verdict(&self) -> Result<()> {
        let f = &self.figures;
        let checks = [
            ("records produced", f.produced, "rows landed and dead letters", f.landed + f.dead_letters),
            ("records produced to train on", f.produced_train, "rows per epoch", f.rows_per_epoch),
            ("held-out records", f.produced_test, "predictions over gRPC", f.predicted_grpc),
            ("held-out records", f.produced_test, "predictions through the topic", f.predicted_topic),
            ("repeated predictions in the topic", f.repeated_topic, "none", 0),
        ];
        for (left, n, right, m) in checks {
            if n != m {
                return fail(Exit::Failed, format!("{left}: {n}, but {right}: {m}"));
            }
        }
        if !f.ways_agree {
            return fail(Exit::Failed, "the topic's predictions differ from those over gRPC");
        }
        Ok(())
    }

    /// Prints commands to try on a service that was kept.
    pub(crate) fn print_commands_to_try(&self, out: Output, home: &Path) -> Result<()> {
        if out.is_json() {
            return Ok(());
        }
        let a = &self.addresses;
        let home = quoted(&home.display().to_string());
        // The name as it was invoked: a fresh build is not on the path.
        let program = std::env::args_os().next().unwrap_or_else(|| "millrace".into());
        let program = quoted(&program.to_string_lossy());
        let kafka = a.kafka.clone().unwrap_or_default();
        let http = a.http.map(|http| http.to_string()).unwrap_or_default();
        out.text("\nEverything is still running. Try in another terminal:")?;
        let look = match &a.mount {
            Some(mount) => format!("ls -R {}", quoted(&mount.display().to_string())),
            None => format!("{program} --home {home} volume show digits"),
        };
        for line in [
            look,
            format!("kcat -C -b {kafka} -t digits-predictions -e"),
            format!("curl -s http://{http}/v2/models/digits"),
            format!(
                "{program} --home {home} predict digits {home}/data/digits-test.jsonl --input pixels --label label"
            ),
            format!("{program} --home {home} model show digits --volume digits"),
        ] {
            out.text(&format!("  {line}"))?;
        }
        out.text("Ctrl-C stops it; the same command again continues.")
    }
}
