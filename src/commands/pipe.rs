//! `millrace pipe`: records of one topic become predictions in another, without a server.

use std::collections::BTreeMap;

use anyhow::Result;
use millrace_datafs::View;
use millrace_serving::pipe::{self, Deps, Faults, PipeReport, Until, Waiting};
use millrace_serving::{Control, Inference, PipeConfig, Repository, Source};
use tokio_util::task::AbortOnDropHandle;

use crate::cli::PipeArgs;
use crate::context::{Context, TopicSession, live};
use crate::failure::{Exit, fail};
use crate::output::count;
use crate::settings::instead;

/// Runs the command.
pub(crate) async fn run(context: &Context, args: PipeArgs) -> Result<()> {
    let mut config = config(context, &args)?;
    let mut serving = context.loaded.settings.serving.clone();
    // No client can tell this process which models to load.
    serving.control = Control::Poll;
    serving.load.clear();
    let datafs = context.volumes().await?;
    let spec = live(&args.volume);
    let view = context.blocking(move || Ok(datafs.view(&spec)?)).await?;
    // Loading a model and waiting for a broker can take long; a signal ends both.
    let opening = async {
        let repository = Repository::open(Source::volume(&view), &serving).await?;
        Ok::<_, anyhow::Error>((repository, context.topics().await?))
    };
    let Some(opened) = context.stop.run_until_cancelled(opening).await else {
        return if args.follow { Ok(()) } else { context.interrupted("pipe") };
    };
    let (repository, session) = opened?;
    let inference = Inference::new(repository.clone());
    // `--input` feeds the model's only input, whatever its name. A following pipe that still waits for its
    // model keeps the default name.
    if args.pipe.is_none()
        && let Ok(model) = repository.get(&config.model, None)
        && let [input] = &model.signature().inputs[..]
    {
        config.columns = BTreeMap::from([(input.name.clone(), args.input.clone())]);
    }
    let spinner = context.out.progress("pipe", "", None);
    let polling = AbortOnDropHandle::new(tokio::spawn({
        let stop = context.stop.child_token();
        async move { repository.poll(stop).await }
    }));
    let report = predict(context, &config, (inference, view), session, args.follow).await;
    drop(polling);
    spinner.finish_and_clear();
    let report = report?;
    context.out.table(
        &serde_json::json!({
            "pipe": config.name, "from": config.input, "to": config.output, "model": config.model,
            "records": report.records, "predicted": report.predicted,
            "dead_letters": report.dead_letters, "offsets": report.offsets,
        }),
        &["from", "to", "model", "records", "predicted", "dead letters"],
        [vec![
            config.input.clone(),
            config.output.clone(),
            config.model.clone(),
            count(report.records),
            count(report.predicted),
            count(report.dead_letters),
        ]],
    )?;
    if report.dead_letters > 0 {
        context.out.note(&format!(
            "{} of {} records could not be predicted; topic {} has them with the reasons",
            count(report.dead_letters),
            count(report.records),
            config.dead_letter_topic()
        ));
    }
    if args.follow { Ok(()) } else { context.interrupted("pipe") }
}

/// Runs the pipe. With `follow`, continues with the successor of a lost broker.
async fn predict(
    context: &Context,
    config: &PipeConfig,
    (inference, progress): (Inference, View),
    mut session: TopicSession,
    follow: bool,
) -> Result<PipeReport> {
    let until = if follow { Until::Forever } else { Until::CaughtUp };
    let mut report = PipeReport::default();
    let faults = Faults::default();
    loop {
        let deps = Deps {
            kafka: session.kafka.clone(),
            inference: inference.clone(),
            progress: progress.clone(),
            waiting: Waiting::default(),
            faults: faults.clone(),
        };
        let stop = context.stop.child_token();
        let mut running = std::pin::pin!(pipe::run(config, deps, until, stop.clone()));
        let (ended, lost) = tokio::select! {
            ended = &mut running => (ended, false),
            // Without --follow, the pipe ends when no broker answers.
            () = session.wait_until_lost(), if follow => {
                stop.cancel();
                (running.await, true)
            }
        };
        let again = follow && (lost || session.is_lost());
        match ended {
            Ok(part) => {
                report.records += part.records;
                report.predicted += part.predicted;
                report.dead_letters += part.dead_letters;
                report.offsets.extend(part.offsets);
            }
            Err(error) if again && error.is_retryable() => {
                tracing::warn!(pipe = config.name, error = %error, "the pipe has lost the broker of this home");
            }
            Err(error) => return Err(error.into()),
        }
        if context.stop.is_cancelled() || !again {
            return Ok(report);
        }
        context.out.note(
            "the broker of this home ended or stops for a service: the pipe continues with its successor",
        );
        if !context.rejoin(&mut session).await? {
            return Ok(report);
        }
    }
}

fn config(context: &Context, args: &PipeArgs) -> Result<PipeConfig> {
    if let Some(name) = &args.pipe {
        let pipes = &context.loaded.settings.serving.pipes;
        return match pipes.iter().find(|pipe| pipe.name == *name) {
            Some(pipe) => Ok(pipe.clone()),
            None => {
                let known: Vec<_> = pipes.iter().map(|pipe| pipe.name.as_str()).collect();
                fail(
                    Exit::NotFound,
                    format!(
                        "the configuration has no pipe {name:?}: {}",
                        instead(&known, "[[serving.pipes]]")
                    ),
                )
            }
        };
    }
    let (Some(input), Some(output), Some(model)) = (&args.from, &args.to, &args.model) else {
        return fail(
            Exit::Usage,
            "name a pipe of the configuration with --pipe, or --from, --to and --model",
        );
    };
    Ok(PipeConfig {
        name: args.name.clone().unwrap_or_else(|| format!("{input}-to-{output}")),
        input: input.clone(),
        output: output.clone(),
        model: model.clone(),
        columns: BTreeMap::from([("input".to_owned(), args.input.clone())]),
        ..PipeConfig::default()
    })
}
