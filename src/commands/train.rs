//! `millrace train`, and the hidden `millrace worker` that it launches.

use anyhow::Result;
use millrace_trainer::job::JobFile;
use millrace_trainer::launch::WorkerCommand;
use millrace_trainer::tensorboard::EventFile;
use millrace_trainer::{End, Progress, Setup, TrainReport};
use tokio_util::sync::CancellationToken;

use crate::cli::TrainArgs;
use crate::context::Context;
use crate::exit;
use crate::failure::{Exit, fail};
use crate::output::count;

/// Runs the command.
pub(crate) async fn run(context: &Context, args: TrainArgs) -> Result<()> {
    if !args.job.exists() {
        return fail(Exit::NotFound, format!("job file {} does not exist", args.job.display()));
    }
    let mut job = JobFile::load(&args.job)?;
    if let Some(workers) = args.workers {
        job.workers = Some(workers as usize);
    }
    if let Some(seed) = args.seed {
        job.seed = seed;
    }
    if let Some(device) = args.device {
        job.device = device.as_str().parse()?;
    }
    let mut events = match &args.tensorboard {
        Some(directory) => Some(EventFile::create(&directory.join(job.name.as_str()))?),
        None => None,
    };
    let bar = context.out.progress("train", "steps", Some(0));
    let shown = bar.clone();
    let report = train(context, &job, context.stop.clone(), |progress| {
        shown.set_length(progress.steps_max);
        shown.set_position(progress.step);
        shown.set_message(format!(
            "train, epoch {}, loss {:.4}, {} workers, {} samples/s",
            progress.epoch,
            progress.loss,
            progress.worker_pids.len(),
            count(progress.samples_per_second as u64)
        ));
        let values = [
            ("train/loss", progress.loss),
            ("train/epoch", progress.epoch as f64),
            ("train/samples_per_second", progress.samples_per_second),
            ("train/workers", progress.worker_pids.len() as f64),
        ];
        write_events(&mut events, progress.step, &values);
    })
    .await;
    bar.finish_and_clear();
    let report = report?;
    for (epoch, loss) in (1..).zip(&report.loss_per_epoch) {
        write_events(&mut events, epoch, &[("epoch/loss", *loss)]);
    }
    let ended = match (report.end, report.already_published) {
        (_, true) => "published by an earlier run",
        (End::Converged, _) => "converged",
        (End::EpochsDone, _) => "all epochs done",
        (End::Stopped, _) => "stopped with a checkpoint, run it again to continue",
    };
    let number = |value: Option<f64>| value.map_or(String::new(), |value| format!("{value:.4}"));
    context.out.table(
        &report,
        &["job", &report.job],
        [
            vec!["ended".to_owned(), ended.to_owned()],
            vec!["steps, epochs".to_owned(), format!("{}, {}", count(report.steps), count(report.epochs))],
            vec![
                "rows per epoch".to_owned(),
                report.rows_per_epoch.last().map_or(String::new(), |rows| count(*rows)),
            ],
            match report.accuracy {
                Some(accuracy) => vec![
                    "loss, accuracy".to_owned(),
                    format!("{}, {accuracy:.4} on the training rows", number(report.loss)),
                ],
                None => vec!["loss".to_owned(), number(report.loss)],
            },
            vec![
                "workers".to_owned(),
                format!("{}, {} lost and replaced", report.workers, report.workers_lost),
            ],
            vec![
                "samples/s".to_owned(),
                if report.already_published {
                    String::new()
                } else {
                    count(report.samples_per_second as u64)
                },
            ],
            vec![
                "model".to_owned(),
                report
                    .version
                    .map_or("none yet".to_owned(), |version| format!("{} version {version}", report.model)),
            ],
            vec!["sha256".to_owned(), report.model_sha256.clone().unwrap_or_default()],
        ],
    )?;
    if report.end == End::Stopped { context.interrupted("train") } else { Ok(()) }
}

/// Appends values to an event file. A full disk ends the file, not the training.
fn write_events(events: &mut Option<EventFile>, step: u64, values: &[(&str, f64)]) {
    let written = events.as_mut().map_or(Ok(()), |events| events.scalars(step, values));
    if let Err(error) = written {
        tracing::warn!(%error, "no more events are written for TensorBoard");
        *events = None;
    }
}

/// Trains a job of this home, with worker processes of this program.
pub(crate) async fn train(
    context: &Context,
    job: &JobFile,
    stop: CancellationToken,
    progress: impl FnMut(Progress) + Send,
) -> Result<TrainReport> {
    let datafs = context.volumes().await?;
    let settings = &context.loaded.settings;
    let setup = Setup {
        datafs,
        home: context.home.root().to_owned(),
        datafs_config: settings.datafs.clone(),
        config: settings.trainer.clone(),
        worker: WorkerCommand::current_exe(["worker"]),
    };
    Ok(millrace_trainer::train(job.clone(), setup, stop, progress).await?)
}

/// Runs `millrace worker`.
pub(crate) fn worker() -> Result<()> {
    Ok(millrace_trainer::worker::run(|error| exit::of(error) as u8)?)
}
