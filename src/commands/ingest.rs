//! `millrace ingest`: writes one topic to a volume, exactly once.

use anyhow::Result;
use millrace_datafs::{Datafs, Name};
use millrace_ingest::{IngestReport, JobConfig, Progress, Tombstones, Until};
use tokio::sync::watch;

use crate::cli::IngestArgs;
use crate::context::{Context, TopicSession, ensure_volume};
use crate::failure::{Exit, fail};
use crate::output::{bytes, count};
use crate::settings::instead;

/// Runs the command.
pub(crate) async fn run(context: &Context, args: IngestArgs) -> Result<()> {
    let job = job(context, &args)?;
    let volume: Name = job.volume.parse()?;
    let datafs = context.volumes().await?;
    {
        let datafs = datafs.clone();
        context.blocking(move || ensure_volume(&datafs, &volume)).await?;
    }
    let mut session = context.topics().await?;
    let mut report = IngestReport::default();
    loop {
        let (ended, lost) = land(context, &job, &datafs, &session, args.follow, report.records).await?;
        let again = args.follow && (lost || session.is_lost());
        match ended {
            Ok(part) => report.add(part),
            Err(error) if again && error.is_retryable() => {
                tracing::warn!(job = job.name, error = %error, "ingest has lost the broker of this home");
            }
            Err(error) => return Err(error.into()),
        }
        if context.stop.is_cancelled() || !again {
            break;
        }
        context.out.note(
            "the broker of this home ended or stops for a service: ingest continues with its successor",
        );
        if !context.rejoin(&mut session).await? {
            break;
        }
    }
    drop(session);
    let mut headers = vec!["topic", "volume", "records", "landed", "dead letters", "files", "read"];
    let mut row = vec![
        job.topic.clone(),
        format!("{}:/{}", job.volume, job.path.trim_matches('/')),
        count(report.records),
        count(report.landed),
        count(report.dead_letters),
        count(report.files),
        bytes(report.bytes),
    ];
    if job.tombstones == Tombstones::Skip {
        headers.insert(5, "tombstones skipped");
        row.insert(5, count(report.tombstones_skipped));
    }
    context.out.table(
        &serde_json::json!({ "job": job.name, "topic": job.topic, "volume": job.volume, "path": job.path, "report": report }),
        &headers,
        [row],
    )?;
    if args.follow { Ok(()) } else { context.interrupted("ingest") }
}

/// Runs the ingest with one session; returns its outcome and whether the session was lost.
async fn land(
    context: &Context,
    job: &JobConfig,
    datafs: &Datafs,
    session: &TopicSession,
    follow: bool,
    before: u64,
) -> Result<(millrace_ingest::Result<IngestReport>, bool)> {
    let bar = context.out.progress("ingest", "records", (!follow).then_some(0));
    let (sender, mut watched) = watch::channel(Progress::default());
    let drawn = bar.clone();
    let drawing = tokio::spawn(async move {
        while watched.changed().await.is_ok() {
            let progress = watched.borrow_and_update().clone();
            let done = before + progress.landed + progress.dead_letters + progress.tombstones_skipped;
            if !follow {
                drawn.set_length(done + progress.lag());
            }
            drawn.set_position(done);
        }
    });
    let until = if follow { Until::Forever } else { Until::CaughtUp };
    let stop = context.stop.child_token();
    let mut landing = std::pin::pin!(millrace_ingest::run_with_progress(
        job,
        datafs,
        &session.kafka,
        stop.clone(),
        until,
        sender,
    ));
    let ended = tokio::select! {
        ended = &mut landing => (ended, false),
        // Without --follow, the ingest ends when no broker answers.
        () = session.wait_until_lost(), if follow => {
            stop.cancel();
            (landing.await, true)
        }
    };
    drawing.await?;
    bar.finish_and_clear();
    Ok(ended)
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
                    format!(
                        "the configuration has no ingest job {name:?}: {}",
                        instead(&known, "[[ingest.jobs]]")
                    ),
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
