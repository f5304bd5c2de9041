//! `millrace ingest`: one topic into a volume, exactly once.

use anyhow::Result;
use millrace_datafs::Name;
use millrace_ingest::{JobConfig, Progress, Until};
use tokio::sync::watch;

use crate::cli::IngestArgs;
use crate::context::{Context, ensure_volume};
use crate::failure::{Exit, fail};
use crate::output::{bytes, count};

/// Runs the command.
pub(crate) async fn run(context: &Context, args: IngestArgs) -> Result<()> {
    let job = job(context, &args)?;
    let volume: Name = job.volume.parse()?;
    let datafs = context.volumes().await?;
    {
        let datafs = datafs.clone();
        context.blocking(move || ensure_volume(&datafs, &volume)).await?;
    }
    let session = context.topics().await?;
    let until = if args.follow { Until::Forever } else { Until::CaughtUp };
    let bar = context.out.progress("ingest", "records", (!args.follow).then_some(0));
    let (sender, mut watched) = watch::channel(Progress::default());
    let drawn = bar.clone();
    let follow = args.follow;
    let drawing = tokio::spawn(async move {
        while watched.changed().await.is_ok() {
            let progress = watched.borrow_and_update().clone();
            let done = progress.landed + progress.dead_letters;
            if !follow {
                drawn.set_length(done + progress.lag());
            }
            drawn.set_position(done);
        }
    });
    let report = millrace_ingest::run_with_progress(
        &job,
        &datafs,
        &session.kafka,
        context.stop.child_token(),
        until,
        sender,
    )
    .await;
    drawing.await?;
    bar.finish_and_clear();
    drop(session);
    let report = report?;
    context.out.table(
        &serde_json::json!({ "job": job.name, "topic": job.topic, "volume": job.volume, "path": job.path, "report": report }),
        &["topic", "volume", "records", "landed", "dead letters", "files", "read"],
        [vec![
            job.topic.clone(),
            format!("{}:/{}", job.volume, job.path.trim_matches('/')),
            count(report.records),
            count(report.landed),
            count(report.dead_letters),
            count(report.files),
            bytes(report.bytes),
        ]],
    )?;
    if follow { Ok(()) } else { context.interrupted("ingest") }
}

fn job(context: &Context, args: &IngestArgs) -> Result<JobConfig> {
    let config = &context.loaded.settings.ingest;
    config.validate()?;
    match (&args.job, &args.topic, &args.volume) {
        (Some(name), _, _) => match config.job(name) {
            Some(job) => Ok(job.clone()),
            None => {
                let known: Vec<_> = config.jobs.iter().map(|job| job.name.as_str()).collect();
                fail(
                    Exit::NotFound,
                    format!("the configuration has no ingest job {name:?} (it has: {})", known.join(", ")),
                )
            }
        },
        (None, Some(topic), Some(volume)) => {
            let path = args.path.as_deref().unwrap_or(topic);
            Ok(JobConfig::new(topic, topic, volume.as_str(), path))
        }
        _ => fail(Exit::Usage, "name a job of the configuration with --job, or --topic and --volume"),
    }
}
