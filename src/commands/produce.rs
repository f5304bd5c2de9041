//! `millrace produce`: lines of a file or of standard input become records of a topic.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result};
use millrace_streams::config::KafkaConfig;
use millrace_streams::topic::{self, OutRecord, Producer};

use crate::cli::ProduceArgs;
use crate::context::Context;
use crate::failure::{Exit, fail};
use crate::output::count;

/// Longest line that becomes a record; what is longer is refused rather than cut.
const LINE_BYTES_MAX: u64 = 16 << 20;
/// Lines that are on their way to the broker at the same time.
const CHUNK: usize = 10_000;

/// Runs the command.
pub(crate) async fn run(context: &Context, args: ProduceArgs) -> Result<()> {
    let started = Instant::now();
    let source = match &args.file {
        Some(path) => open(path)?,
        None => Box::new(BufReader::new(std::io::stdin())),
    };
    let session = context.topics().await?;
    topic::create_topic(&session.kafka, &args.topic, args.partitions).await?;
    let bar = context.out.progress("produce", "records", None);
    let produced = lines(&session.kafka, &args, source, |n| bar.inc(n)).await;
    bar.finish_and_clear();
    let produced = produced?;
    session.close().await?;
    let seconds = started.elapsed().as_secs_f64();
    context.out.table(
        &serde_json::json!({ "topic": args.topic, "produced": produced, "seconds": seconds }),
        &["topic", "produced", "seconds"],
        [vec![args.topic.clone(), count(produced), format!("{seconds:.2}")]],
    )
}

fn open(path: &Path) -> Result<Box<dyn BufRead + Send>> {
    match std::fs::File::open(path) {
        Ok(file) => Ok(Box::new(BufReader::new(file))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            fail(Exit::NotFound, format!("{} does not exist", path.display()))
        }
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

async fn lines(
    kafka: &KafkaConfig,
    args: &ProduceArgs,
    mut source: Box<dyn BufRead + Send>,
    mut progress: impl FnMut(u64),
) -> Result<u64> {
    let producer = Producer::connect(kafka).await?;
    let mut produced = 0_u64;
    let mut number = 0_u64;
    loop {
        let mut chunk = Vec::new();
        while chunk.len() < CHUNK {
            let mut line = Vec::new();
            let read = (&mut source).take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut line)?;
            if read == 0 {
                break;
            }
            number += 1;
            if line.len() as u64 > LINE_BYTES_MAX {
                return fail(
                    Exit::Usage,
                    format!("line {number} is longer than {LINE_BYTES_MAX} bytes: {produced} records before it were produced"),
                );
            }
            while line.last().is_some_and(|byte| matches!(byte, b'\n' | b'\r')) {
                line.pop();
            }
            if line.is_empty() {
                continue;
            }
            let key = match &args.key {
                Some(field) => Some(key_of(&line, field, number)?),
                None => None,
            };
            let record = OutRecord::new(&args.topic, line);
            chunk.push(match key {
                Some(key) => record.key(key),
                None => record,
            });
        }
        if chunk.is_empty() {
            break;
        }
        let n = chunk.len() as u64;
        producer.send_all(chunk).await?;
        produced += n;
        progress(n);
    }
    Ok(produced)
}

fn key_of(line: &[u8], field: &str, number: u64) -> Result<Vec<u8>> {
    let value: serde_json::Value = serde_json::from_slice(line)
        .map_err(|error| crate::failure::failure(Exit::Usage, format!("line {number} is not JSON: {error}")))?;
    match value.get(field) {
        Some(serde_json::Value::String(text)) => Ok(text.clone().into_bytes()),
        Some(serde_json::Value::Null) | None => {
            fail(Exit::Usage, format!("line {number} has no field {field:?} for the key"))
        }
        Some(other) => Ok(other.to_string().into_bytes()),
    }
}
