//! `millrace predict`: sends records of files to a model server and shows or writes its predictions.

mod columns;
mod csv;
mod images;
mod pixels;
mod read;
mod source;
mod write;

use std::path::PathBuf;
use std::pin::pin;
use std::time::Instant;

use anyhow::Result;
use futures::StreamExt;
use millrace_serving::client::Client;
use tokio::sync::mpsc;

use crate::cli::{PredictArgs, RecordFormat};
use crate::context::Context;
use crate::credentials::credentials;
use crate::failure::{Exit, fail, failure};
use crate::inference::{Batch, Intake, Predictor, server};

use pixels::ImageConversion;
use read::RecordConversion;
use source::Source;
use write::Predictions;

/// Runs the command.
pub(crate) async fn run(context: &Context, args: PredictArgs) -> Result<()> {
    let sources = source::open(&args)?;
    let mut predictions = Predictions::new(context, args.output.as_deref(), args.label.is_some())?;
    let server = server(context, args.server.grpc.as_deref());
    let client = Client::connect_with(&server, &credentials(&args.server)?).await?;
    let rows_max = args.batch_rows as usize;
    let predictor = Predictor::new(client, &args.model, args.version, &args.input, rows_max).await?;
    let started = Instant::now();
    let bar = context.out.progress("predict", "records", source::records(&sources));
    let images = if source::are_images(&sources) { Some(form(predictor.intake(), &args)?) } else { None };
    let conversion =
        RecordConversion { intake: predictor.intake().clone(), label: args.label.clone(), images };
    let batches = reading(sources, conversion, args.in_flight as usize)?;
    let mut answers = pin!(predictor.answers(batches, args.in_flight as usize));
    loop {
        let answer = tokio::select! {
            answer = answers.next() => answer,
            () = context.stop.cancelled() => return fail(Exit::Failed, "predict was interrupted"),
        };
        let Some(answer) = answer else { break };
        let answer = answer?;
        if !predictions.add(context, &answer)? {
            return Ok(());
        }
        bar.inc(answer.known.len() as u64);
    }
    bar.finish_and_clear();
    predictions.finish(context, &args.model, started.elapsed().as_secs_f64())
}

/// Reads the first `records_max` records of files as model inputs, and passes them to `take` in batches. The
/// last batch may exceed `records_max`.
pub(crate) fn sample(
    paths: &[PathBuf],
    format: Option<RecordFormat>,
    intake: Intake,
    records_max: u64,
    mut take: impl FnMut(&Batch) -> Result<()>,
) -> Result<()> {
    let conversion = RecordConversion { intake, label: None, images: None };
    let (mut taken, mut records) = (Ok(()), 0);
    read::all(source::of_records(paths, format)?, &conversion, |batch: Batch| {
        records += batch.records();
        taken = take(&batch);
        taken.is_ok() && records < records_max
    })?;
    taken
}

/// The conversion of images to the model's only input.
fn form(intake: &Intake, args: &PredictArgs) -> Result<ImageConversion> {
    let inputs: Vec<_> = intake.inputs().map(|(spec, _)| spec).collect();
    let [spec] = inputs[..] else {
        let names: Vec<&str> = inputs.iter().map(|spec| spec.name.as_str()).collect();
        let names = names.join(", ");
        return fail(Exit::Usage, format!("images are for models with one input, this one has {names}"));
    };
    ImageConversion::new(spec, &args.images).map_err(|reason| failure(Exit::Usage, reason))
}

/// Reads on a separate thread, since a terminal or a pipe may block forever, and at most `prefetch_batches` batches
/// ahead of the server.
fn reading(
    sources: Vec<Source>,
    conversion: RecordConversion,
    prefetch_batches: usize,
) -> Result<impl futures::Stream<Item = Result<Batch>>> {
    let (sender, receiver) = mpsc::channel(prefetch_batches.max(1));
    std::thread::Builder::new().name("reader".into()).spawn(move || {
        let read = read::all(sources, &conversion, |batch| sender.blocking_send(Ok(batch)).is_ok());
        if let Err(error) = read {
            sender.blocking_send(Err(error)).ok();
        }
    })?;
    Ok(futures::stream::unfold(receiver, |mut receiver| async {
        let batch = receiver.recv().await?;
        Some((batch, receiver))
    }))
}
