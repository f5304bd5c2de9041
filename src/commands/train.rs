//! `millrace train`, and the hidden `millrace worker` that it launches.

use anyhow::Result;
use millrace_trainer::job::JobFile;
use millrace_trainer::launch::WorkerCommand;
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
    let bar = context.out.progress("train", "steps", Some(0));
    let shown = bar.clone();
    let report = train(context, &job, context.stop.clone(), move |progress| {
        shown.set_length(progress.steps_max);
        shown.set_position(progress.step);
        let validation = progress
            .evaluation
            .map_or(String::new(), |evaluation| format!(", validation loss {:.4}", evaluation.loss));
        shown.set_message(format!("train, epoch {}, loss {:.4}{validation}", progress.epoch, progress.loss));
    })
    .await;
    bar.finish_and_clear();
    let report = report?;
    let ended = match (report.end, report.already_published) {
        (_, true) => "published by an earlier run",
        (End::Converged, _) => "converged",
        (End::EpochsDone, _) => "all epochs done",
        (End::NoImprovement, _) => "ended early, the validation loss fell no more",
        (End::Stopped, _) => "stopped with a checkpoint, run it again to continue",
    };
    let number = |value: Option<f64>| value.map_or(String::new(), |value| format!("{value:.4}"));
    let published_best = job.validation.as_ref().is_some_and(|validation| validation.best);
    let last = report.validation.last().map(|last| {
        let names: Vec<&str> = last.figures().map(|(name, _)| name).collect();
        let values: Vec<String> = last.figures().map(|(_, value)| format!("{value:.4}")).collect();
        vec![
            format!("validation {}", names.join(", ")),
            format!("{} after epoch {}", values.join(", "), last.epoch),
        ]
    });
    let best = report.validation.iter().find(|found| Some(found.epoch) == report.best_epoch).map(|best| {
        let published = if published_best { ", published" } else { "" };
        vec![
            "lowest validation loss".to_owned(),
            format!("{:.4} after epoch {}{published}", best.loss, best.epoch),
        ]
    });
    let mut rows = vec![
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
        vec!["workers".to_owned(), format!("{}, {} lost and replaced", report.workers, report.workers_lost)],
        vec![
            "samples/s".to_owned(),
            if report.already_published { String::new() } else { count(report.samples_per_second as u64) },
        ],
        vec![
            "model".to_owned(),
            report
                .version
                .map_or("none yet".to_owned(), |version| format!("{} version {version}", report.model)),
        ],
        vec!["sha256".to_owned(), report.model_sha256.clone().unwrap_or_default()],
    ];
    // Behind the figures of the training.
    rows.splice(4..4, last.into_iter().chain(best));
    context.out.table(&report, &["job", &report.job], rows)?;
    if report.end == End::Stopped { context.interrupted("train") } else { Ok(()) }
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
