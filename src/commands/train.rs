//! `millrace train`, and the `millrace worker` processes that it launches.

mod render;
pub(crate) mod script;

use std::net::SocketAddr;
use std::path::Path;

use anyhow::Result;
use millrace_trainer::job::JobFile;
use millrace_trainer::join::{Listen, ServerTls, Token, host_port};
use millrace_trainer::launch::WorkerCommand;
use millrace_trainer::spent::Spent;
use millrace_trainer::tensorboard::Curves;
use millrace_trainer::{End, Progress, Setup, TrainReport};
use tokio_util::sync::CancellationToken;

use crate::cli::{DeviceArg, TrainArgs};
use crate::context::Context;
use crate::exit;
use crate::failure::{Exit, fail};
use crate::output::count;

/// Runs the command.
pub(crate) async fn run(context: &Context, args: TrainArgs) -> Result<()> {
    if let Some(script) = &args.script.script {
        return script::run(context, script, &args).await;
    }
    // Clap requires a job file or a script.
    let file = args.job.clone().unwrap_or_default();
    check_job_file(&file)?;
    if args.render.render.is_some() {
        return render::run(context, &args, &file);
    }
    let mut job = job_of(&file, args.seed, args.device)?;
    if let Some(workers) = args.workers {
        job.workers = Some(workers as usize);
    }
    let mut curves = match &args.tensorboard {
        Some(directory) => Some(Curves::create(&directory.join(job.name.as_str()))?),
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
    let (mut reached, mut unsaved, mut unread) = (0, false, false);
    let (mut spent, mut recent) = (Spent::default(), Spent::default());
    let how = How { listen, standby: args.standby, abandon_run: args.abandon_run };
    let report = train_with(context, &job, how, context.stop.clone(), |progress| {
        if let Some(coordinator) = &progress.waiting_for {
            shown.suspend(|| out.note(&format!("train waits: the job has a coordinator, {coordinator}")));
            return;
        }
        if let Some(address) = progress.listening.filter(|_| listening.is_none()) {
            listening = Some(address);
            shown.suspend(|| out.note(&join_hint(host.as_deref(), address)));
        }
        if progress.workers_missing != missing {
            missing = progress.workers_missing;
            if missing > 0 {
                let workers = if missing == 1 { "worker" } else { "workers" };
                shown.suspend(|| out.note(&format!("train waits for {missing} more {workers} to join")));
            }
        }
        if (progress.unsaved_seconds > 0) != unsaved {
            unsaved = progress.unsaved_seconds > 0;
            let text = if unsaved {
                "train goes on, but the volumes take no checkpoint; see that the metadata and the store answer"
            } else {
                "train writes checkpoints again"
            };
            shown.suspend(|| out.note(text));
        }
        if (progress.unread_seconds > 0) != unread {
            unread = progress.unread_seconds > 0;
            let text = if unread {
                "train waits: the volumes or brokers give no rows; see that the metadata, the store and the brokers answer"
            } else {
                "train reads rows again"
            };
            shown.suspend(|| out.note(text));
        }
        reached = reached.max(progress.step);
        shown.set_length(progress.steps_max);
        shown.set_position(progress.step);
        let validation = progress
            .evaluation
            .map_or(String::new(), |evaluation| format!(", validation loss {:.4}", evaluation.loss));
        // Reports of other events repeat the total.
        if progress.spent != spent {
            recent = progress.spent.since(spent);
            spent = progress.spent;
        }
        shown.set_message(format!(
            "train, epoch {}, loss {:.4}{validation}, {} workers, {} samples/s{}",
            progress.epoch,
            progress.loss,
            progress.worker_pids.len(),
            count(progress.samples_per_second as u64),
            stalls(recent)
        ));
        if let Some(curves) = &mut curves {
            curves.progress(&progress);
        }
    })
    .await;
    bar.finish_and_clear();
    let report = report?;
    if let Some(curves) = &mut curves {
        curves.end(&report);
    }
    let ended = match (report.end, report.already_published) {
        (_, true) => "published by an earlier run".to_owned(),
        (End::Converged, _) => "converged".to_owned(),
        (End::EpochsDone, _) => "all epochs done".to_owned(),
        (End::NoImprovement, _) => "ended early, the validation loss fell no more".to_owned(),
        (End::Stopped, _) => stopped(report.steps, reached),
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
            "time of rank 0".to_owned(),
            report.spent.shares().map_or(String::new(), |shares| {
                let texts = shares.map(|(cause, share)| format!("{cause} {:.1} %", 100.0 * share));
                texts.join(", ")
            }),
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

/// Refuses a job file that does not exist, and a script.
fn check_job_file(file: &Path) -> Result<()> {
    if !file.exists() {
        return fail(Exit::NotFound, format!("job file {} does not exist", file.display()));
    }
    if file.extension().is_some_and(|extension| extension == "py") {
        return fail(
            Exit::Usage,
            format!(
                "{0} is a script, not a job file; run it with: millrace train --script {0}",
                file.display()
            ),
        );
    }
    Ok(())
}

/// The job of a file, with the flags that change what it computes.
pub(super) fn job_of(file: &Path, seed: Option<u64>, device: Option<DeviceArg>) -> Result<JobFile> {
    check_job_file(file)?;
    let mut job = JobFile::load(file)?;
    if let Some(seed) = seed {
        job.seed = seed;
    }
    if let Some(device) = device {
        job.device = device.as_str().parse()?;
    }
    Ok(job)
}

/// What recent steps have waited for, where that is a hundredth of their time or more.
fn stalls(recent: Spent) -> String {
    let waits =
        recent.shares().into_iter().flatten().filter(|(cause, share)| *cause != "compute" && *share >= 0.01);
    let waits: Vec<String> = waits.map(|(cause, share)| format!("{cause} {:.0} %", 100.0 * share)).collect();
    if waits.is_empty() { String::new() } else { format!(", waits: {}", waits.join(", ")) }
}

/// How a stopped training ended: `durable` is the step of its newest checkpoint, `reached` the last step that the
/// workers reported.
fn stopped(durable: u64, reached: u64) -> String {
    match durable {
        0 => "stopped without a checkpoint, run it again to begin anew".to_owned(),
        _ if durable < reached => format!(
            "stopped without a last checkpoint, run it again to continue from step {durable}, {} steps back",
            reached - durable
        ),
        _ => "stopped with a checkpoint, run it again to continue".to_owned(),
    }
}

/// How workers of other machines join a coordinator at `address`, which advertises `host`.
fn join_hint(host: Option<&str>, address: SocketAddr) -> String {
    let (place, meaning) = match host {
        Some(host) => (host_port(host, address.port()), ""),
        None if address.ip().is_unspecified() => (
            format!("NAME:{}", address.port()),
            "; NAME is a name or an address of this machine that they reach",
        ),
        None => (address.to_string(), ""),
    };
    format!("workers of other machines join with: millrace worker --join {place} --token-file FILE{meaning}")
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
    train_with(context, job, How { listen: None, standby: false, abandon_run: false }, stop, progress).await
}

/// How a job is coordinated.
struct How {
    listen: Option<Listen>,
    standby: bool,
    abandon_run: bool,
}

/// [`train`], also with workers of other machines and with standbys.
async fn train_with(
    context: &Context,
    job: &JobFile,
    how: How,
    stop: CancellationToken,
    progress: impl FnMut(Progress) + Send,
) -> Result<TrainReport> {
    let datafs = context.volumes().await?;
    let settings = &context.loaded.settings;
    // A temporary broker lives as long as the session.
    let topics = if job.reads_topic() { Some(context.topics().await?) } else { None };
    let setup = Setup {
        datafs,
        kafka: topics.as_ref().map(|topics| topics.kafka.clone()),
        home: context.home.root().to_owned(),
        datafs_config: settings.datafs.clone(),
        config: settings.trainer.clone(),
        worker: WorkerCommand::current_exe(["worker"]),
        listen: how.listen,
        standby: how.standby,
        abandon_run: how.abandon_run,
    };
    Ok(millrace_trainer::train(job.clone(), setup, stop, progress).await?)
}

/// Runs a `millrace worker` that a coordinator of this machine launched.
pub(crate) fn worker() -> Result<()> {
    if millrace_trainer::script::is_keeper() {
        return Ok(millrace_trainer::script::keep()?);
    }
    Ok(millrace_trainer::worker::run(|error| exit::of(error) as u8)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hint_to_join_can_be_typed_as_it_is() {
        let hint = |host, address: &str| join_hint(host, address.parse().unwrap());
        assert!(hint(None, "[fd00::7]:9000").contains("--join [fd00::7]:9000 --token-file FILE"));
        assert!(hint(Some("fd00::7"), "0.0.0.0:9000").contains("--join [fd00::7]:9000 "));
        assert!(hint(Some("a.example.org"), "[::]:9000").contains("--join a.example.org:9000 "));
        assert!(hint(None, "192.0.2.1:9000").ends_with("--join 192.0.2.1:9000 --token-file FILE"));
        for any in ["0.0.0.0:9000", "[::]:9000"] {
            let hint = hint(None, any);
            assert!(hint.contains("--join NAME:9000 ") && hint.contains("NAME is"), "{hint}");
        }
    }

    #[test]
    fn a_stop_tells_the_checkpoint_that_it_has() {
        assert!(stopped(120, 118).starts_with("stopped with a checkpoint"));
        let lost = stopped(100, 118);
        assert!(
            lost.contains("without a last checkpoint") && lost.contains("step 100, 18 steps back"),
            "{lost}"
        );
        assert!(stopped(0, 118).starts_with("stopped without a checkpoint"));
    }
}
