//! `millrace predict`: records of a file to a model server, classes back.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result};
use millrace_serving::client::Client;
use serde_json::Value;

use crate::cli::PredictArgs;
use crate::context::Context;
use crate::failure::{Exit, fail};
use crate::inference::{Example, predict};
use crate::output::count;

/// Most records of one call: they are held in memory.
const RECORDS_MAX: usize = 10_000_000;
/// Longest record.
const LINE_BYTES_MAX: u64 = 16 << 20;
/// Predictions shown to people; programs get all.
const SHOWN: usize = 10;

/// Runs the command.
pub(crate) async fn run(context: &Context, args: PredictArgs) -> Result<()> {
    let (file, input, label) = (args.file.clone(), args.input.clone(), args.label.clone());
    let examples = context.reading(move || read(file.as_deref(), &input, label.as_deref())).await?;
    let address = match (args.grpc, context.home.running().and_then(|running| running.grpc)) {
        (Some(address), _) | (None, Some(address)) => address,
        (None, None) => context.loaded.settings.serving.grpc,
    };
    let mut client = Client::connect(&address.to_string()).await?;
    let started = Instant::now();
    let bar = context.out.progress("predict", "records", Some(examples.len() as u64));
    let work =
        predict(&mut client, &args.model, args.version, &examples, args.batch_rows as usize, |n| bar.inc(n));
    let predictions = tokio::select! {
        predictions = work => predictions,
        () = context.stop.cancelled() => fail(Exit::Failed, "predict was interrupted"),
    };
    bar.finish_and_clear();
    let predictions = predictions?;
    let seconds = started.elapsed().as_secs_f64();
    let accuracy = predictions.accuracy();
    if context.out.is_json() {
        return context.out.object(&serde_json::json!({
            "model": args.model, "version": predictions.version, "predicted": predictions.rows.len(),
            "accuracy": accuracy, "seconds": seconds, "predictions": predictions.rows,
        }));
    }
    context.out.table(
        &(),
        &["record", "class", "confidence", "label"],
        predictions.rows.iter().take(SHOWN).enumerate().map(|(i, row)| {
            vec![
                (i + 1).to_string(),
                row.class.to_string(),
                format!("{:.4}", row.confidence),
                row.label.map_or(String::new(), |label| label.to_string()),
            ]
        }),
    )?;
    let right = accuracy.map_or(String::new(), |accuracy| format!(", accuracy {accuracy:.4}"));
    let more = if predictions.rows.len() > SHOWN {
        format!(" (the first {SHOWN} are shown, --json shows all)")
    } else {
        String::new()
    };
    context.out.text(&format!(
        "{} predicted by {} version {} in {seconds:.2} s{right}{more}",
        count(predictions.rows.len() as u64),
        args.model,
        predictions.version
    ))
}

fn read(file: Option<&Path>, input: &str, label: Option<&str>) -> Result<Vec<Example>> {
    let mut source: Box<dyn BufRead> = match file {
        Some(path) => match std::fs::File::open(path) {
            Ok(file) => Box::new(BufReader::new(file)),
            Err(error) => {
                let exit =
                    if error.kind() == std::io::ErrorKind::NotFound { Exit::NotFound } else { Exit::Failed };
                return fail(exit, format!("cannot read {}: {error}", path.display()));
            }
        },
        None => Box::new(BufReader::new(std::io::stdin())),
    };
    let shown = file.map_or("standard input".to_owned(), |path| path.display().to_string());
    let mut examples = Vec::new();
    let mut number = 0;
    loop {
        let mut line = Vec::new();
        let read = (&mut source).take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut line);
        if read.with_context(|| format!("cannot read {shown}"))? == 0 {
            break;
        }
        number += 1;
        if line.len() as u64 > LINE_BYTES_MAX {
            return fail(Exit::Usage, format!("line {number} is longer than {LINE_BYTES_MAX} bytes"));
        }
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        if examples.len() == RECORDS_MAX {
            return fail(Exit::Usage, format!("more than {RECORDS_MAX} records: split the file"));
        }
        match example(&line, input, label) {
            Ok(example) => examples.push(example),
            Err(reason) => return fail(Exit::Usage, format!("line {number}: {reason}")),
        }
    }
    if examples.is_empty() {
        return fail(Exit::Usage, "there are no records to predict");
    }
    Ok(examples)
}

fn example(line: &[u8], input: &str, label: Option<&str>) -> Result<Example, String> {
    let record: Value = serde_json::from_slice(line).map_err(|error| format!("not JSON: {error}"))?;
    let mut features = Vec::new();
    flatten(
        record.get(input).ok_or_else(|| format!("no field {input:?} (--input names it)"))?,
        &mut features,
    )
    .map_err(|what| format!("field {input:?} holds {what}, not numbers"))?;
    let label = match label {
        None => None,
        Some(field) => Some(
            record
                .get(field)
                .and_then(Value::as_i64)
                .ok_or_else(|| format!("field {field:?} holds no class number (--label names it)"))?,
        ),
    };
    Ok(Example { features, label })
}

/// Numbers of a nested list in order. The nesting is bounded by the JSON parser.
fn flatten(value: &Value, into: &mut Vec<f32>) -> Result<(), String> {
    match value {
        Value::Number(number) => {
            into.push(number.as_f64().unwrap_or(f64::NAN) as f32);
            Ok(())
        }
        Value::Array(values) => values.iter().try_for_each(|value| flatten(value, into)),
        Value::Null => Err("null".into()),
        Value::Bool(_) => Err("a boolean".into()),
        Value::String(_) => Err("text".into()),
        Value::Object(_) => Err("an object".into()),
    }
}
