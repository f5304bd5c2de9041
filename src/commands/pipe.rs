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

/// The field, and the input, where neither the command line nor the model names one.
const INPUT: &str = "input";
/// Most partitions whose positions a note tells.
const PARTITIONS_SHOWN_MAX: usize = 8;

/// Runs the command.
pub(crate) async fn run(context: &Context, args: PipeArgs) -> Result<()> {
    let mut config = config(context, &args)?;
    pipe::check(&config)?;
    let mut serving = context.loaded.settings.serving.clone();
    // No client can tell this process which models to load.
    serving.control = Control::Poll;
    serving.load.clear();
    let datafs = context.volumes().await?;
    let (spec, pipe_of_positions) = (live(&args.volume), config.clone());
    let (view, stored) = context
        .blocking(move || {
            let view = datafs.view(&spec)?;
            let stored = pipe::offsets(&view, &pipe_of_positions)?;
            Ok((view, stored))
        })
        .await?;
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
    // `--input` feeds the model's only input, whatever its name. Without it, the fields of the training do. A following
    // pipe that still waits for its model keeps the default name of the input.
    if args.pipe.is_none()
        && let Ok(model) = repository.get(&config.model, None)
        && let [input] = &model.signature().inputs[..]
    {
        let is_trained = model.manifest().fields.contains_key(&input.name);
        config.columns = match &args.input {
            None if is_trained => BTreeMap::new(),
            field => BTreeMap::from([(input.name.clone(), field.as_deref().unwrap_or(INPUT).to_owned())]),
        };
    }
    let spinner = context.out.progress("pipe", "", None);
    let polling = AbortOnDropHandle::new(tokio::spawn({
        let stop = context.stop.child_token();
        async move { repository.poll(stop).await }
    }));
    let report = predict(context, &config, (inference, view), session, &args).await;
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
    if report.records == 0 && !args.follow && !context.stop.is_cancelled() {
        context.out.note(&nothing_read(&config, &stored));
    }
    if args.follow { Ok(()) } else { context.interrupted("pipe") }
}

/// The note of a run that has read no record; `stored` holds the positions before it.
fn nothing_read(config: &PipeConfig, stored: &BTreeMap<i32, i64>) -> String {
    let PipeConfig { name, input, .. } = config;
    if stored.values().all(|next| *next == 0) {
        return format!("topic {input} has no records for pipe {name}");
    }
    let mut places: Vec<String> = stored
        .iter()
        .take(PARTITIONS_SHOWN_MAX)
        .map(|(partition, next)| format!("offset {next} of partition {partition}"))
        .collect();
    if stored.len() > places.len() {
        places.push(format!("{} more partitions", stored.len() - places.len()));
    }
    format!(
        "pipe {name} has read topic {input} to its end: its stored position is {}; to predict the records again, give the \
         pipe another name (--name, or name in [[serving.pipes]]), under which it begins at the first record",
        places.join(", ")
    )
}

/// Runs the pipe. With `--follow`, continues with the successor of a lost broker.
async fn predict(
    context: &Context,
    config: &PipeConfig,
    (inference, progress): (Inference, View),
    mut session: TopicSession,
    args: &PipeArgs,
) -> Result<PipeReport> {
    let follow = args.follow;
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
            allow_unfit: args.allow_unfit,
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
        columns: args.input.iter().map(|field| (INPUT.to_owned(), field.clone())).collect(),
        ..PipeConfig::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_that_reads_nothing_names_its_position_and_the_way_back() {
        let config = PipeConfig { name: "p".into(), input: "in".into(), ..PipeConfig::default() };
        let note = |positions: &[(i32, i64)]| nothing_read(&config, &positions.iter().copied().collect());
        assert_eq!(note(&[]), "topic in has no records for pipe p");
        assert_eq!(note(&[(0, 0), (1, 0)]), "topic in has no records for pipe p");
        let read = note(&[(0, 55), (1, 0)]);
        assert!(read.contains("offset 55 of partition 0, offset 0 of partition 1;"), "{read}");
        assert!(read.contains("--name"), "{read}");
        let many: Vec<(i32, i64)> = (0..50).map(|partition| (partition, 7)).collect();
        assert!(note(&many).contains("offset 7 of partition 7, 42 more partitions;"), "{}", note(&many));
    }
}
