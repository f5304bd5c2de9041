//! `millrace train`, and the `millrace worker` processes that it launches.

use std::collections::BTreeSet;

use anyhow::Result;
use millrace_trainer::job::JobFile;
use millrace_trainer::join::{Listen, ServerTls, Token};
use millrace_trainer::launch::WorkerCommand;
use millrace_trainer::tensorboard::EventFile;
use millrace_trainer::{End, Evaluation, Progress, Setup, TrainReport};
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
    if let Some(count) = args.workers_min {
        job.workers_min = Some(count as usize);
    }
    if let Some(count) = args.workers_max {
        job.workers_max = Some(count as usize);
    }
    let listen = listen(&args)?;
    let joins = listen.is_some();
    let host = listen.as_ref().and_then(|listen| listen.advertise.clone());
    let bar = context.out.progress("train", "steps", Some(0));
    let shown = bar.clone();
    let (out, mut listening, mut missing) = (context.out, None, 0);
    let mut evaluated = BTreeSet::new();
    let report = train_with(context, &job, listen, context.stop.clone(), |progress| {
        if let Some(address) = progress.listening.filter(|_| listening.is_none()) {
            listening = Some(address);
            let host = host.clone().map_or(address.ip().to_string(), |host| host);
            let port = address.port();
            shown.suspend(|| {
                out.note(&format!(
                    "workers of other machines join with: millrace worker --join {host}:{port} --token-file FILE"
                ));
            });
        }
        if progress.workers_missing != missing {
            missing = progress.workers_missing;
            if missing > 0 {
                let workers = if missing == 1 { "worker" } else { "workers" };
                shown.suspend(|| out.note(&format!("train waits for {missing} more {workers} to join")));
            }
        }
        shown.set_length(progress.steps_max);
        shown.set_position(progress.step);
        let validation = progress
            .evaluation
            .map_or(String::new(), |evaluation| format!(", validation loss {:.4}", evaluation.loss));
        shown.set_message(format!(
            "train, epoch {}, loss {:.4}{validation}, {} workers, {} samples/s",
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
        // Quick evaluations are seen at the end only.
        if let Some(evaluation) = progress.evaluation
            && evaluated.insert(evaluation.epoch)
        {
            write_evaluation(&mut events, &evaluation);
        }
    })
    .await;
    bar.finish_and_clear();
    let report = report?;
    for (epoch, loss) in (1..).zip(&report.loss_per_epoch) {
        write_events(&mut events, epoch, &[("epoch/loss", *loss)]);
    }
    for evaluation in report.validation.iter().filter(|evaluation| !evaluated.contains(&evaluation.epoch)) {
        write_evaluation(&mut events, evaluation);
    }
    let ended = match (report.end, report.already_published) {
        (_, true) => "published by an earlier run",
        (End::Converged, _) => "converged",
        (End::EpochsDone, _) => "all epochs done",
        (End::NoImprovement, _) => "ended early, the validation loss fell no more",
        (End::Stopped, _) => "stopped with a checkpoint, run it again to continue",
    };
    let number = |value: Option<f64>| value.map_or(String::new(), |value| format!("{value:.4}"));
    let published_best =
        report.version.is_some() && job.validation.as_ref().is_some_and(|validation| validation.best);
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
        vec![
            "workers".to_owned(),
            if joins {
                format!(
                    "{} of this machine, {} joined from others, {} lost",
                    report.workers, report.workers_joined, report.workers_lost
                )
            } else {
                format!("{}, {} lost and replaced", report.workers, report.workers_lost)
            },
        ],
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

fn write_evaluation(events: &mut Option<EventFile>, evaluation: &Evaluation) {
    let figures: Vec<_> =
        evaluation.figures().map(|(name, value)| (format!("validation/{name}"), value)).collect();
    let values: Vec<_> = figures.iter().map(|(tag, value)| (tag.as_str(), *value)).collect();
    write_events(events, evaluation.epoch, &values);
}

/// Appends values to an event file. A full disk ends the file, not the training.
fn write_events(events: &mut Option<EventFile>, step: u64, values: &[(&str, f64)]) {
    let written = events.as_mut().map_or(Ok(()), |events| events.scalars(step, values));
    if let Err(error) = written {
        tracing::warn!(%error, "no more events are written for TensorBoard");
        *events = None;
    }
}

/// How workers of other machines join, as the flags say.
fn listen(args: &TrainArgs) -> Result<Option<Listen>> {
    // Clap requires the token with the address, and both TLS files or neither.
    let Some((address, token_file)) = args.listen.zip(args.token_file.as_ref()) else { return Ok(None) };
    let tls = match (&args.tls_cert, &args.tls_key) {
        (Some(certificate), Some(key)) => Some(ServerTls::read(certificate, key)?),
        _ => None,
    };
    Ok(Some(Listen {
        address,
        advertise: args.advertise.clone(),
        token: Token::read(token_file)?,
        tls,
        workers_local: args.workers_local.map(|count| count as usize),
    }))
}

/// Trains a job of this home, with worker processes of this program.
pub(crate) async fn train(
    context: &Context,
    job: &JobFile,
    stop: CancellationToken,
    progress: impl FnMut(Progress) + Send,
) -> Result<TrainReport> {
    train_with(context, job, None, stop, progress).await
}

/// [`train`], also with workers of other machines.
async fn train_with(
    context: &Context,
    job: &JobFile,
    listen: Option<Listen>,
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
        listen,
    };
    Ok(millrace_trainer::train(job.clone(), setup, stop, progress).await?)
}

/// Runs a `millrace worker` that a coordinator of this machine launched.
pub(crate) fn worker() -> Result<()> {
    Ok(millrace_trainer::worker::run(|error| exit::of(error) as u8)?)
}
