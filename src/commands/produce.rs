//! `millrace produce`: lines of a file or of standard input become records of a topic.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result};
use millrace_streams::topic::{self, OutRecord, Producer, Sent};
use tokio::sync::mpsc;

use crate::cli::ProduceArgs;
use crate::context::Context;
use crate::failure::{Exit, fail, failure};
use crate::output::count;

/// Longest line of a record; longer lines are rejected, not truncated.
const LINE_BYTES_MAX: u64 = 16 << 20;
/// The UTF-8 byte order mark that some programs write at the start of a text.
pub(crate) const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
/// Lines sent to the broker at the same time.
const CHUNK: usize = 10_000;
/// Bytes per read.
const READ_BYTES: usize = 2 << 20;

type Source = BufReader<Box<dyn Read + Send>>;

/// Runs the command.
pub(crate) async fn run(context: &Context, args: ProduceArgs) -> Result<()> {
    let started = Instant::now();
    let source = match &args.file {
        Some(path) => open(path)?,
        None => Box::new(std::io::stdin()),
    };
    let reader = Reader {
        source: BufReader::with_capacity(READ_BYTES, source),
        shown: args.file.as_deref().map_or("standard input".to_owned(), |path| path.display().to_string()),
        topic: args.topic.clone(),
        key: args.key.clone(),
        number: 0,
    };
    let session = context.topics().await?;
    let bar = context.out.progress("produce", "records", None);
    let mut acknowledged = Acknowledged::default();
    let mut empty_lines = 0;
    let work = async {
        topic::create_topic(&session.kafka, &args.topic, args.partitions).await?;
        let producer = Producer::connect(&session.kafka).await?;
        let mut chunks = reader.start()?;
        loop {
            let chunk = tokio::select! {
                chunk = chunks.recv() => chunk,
                () = context.stop.cancelled() => return fail(Exit::Failed, "interrupted"),
            };
            let Some(Chunk { lines, records, empty_lines: empty }) = chunk.transpose()? else {
                return Ok(());
            };
            empty_lines += empty;
            if records.is_empty() {
                // The lines behind the last record.
                continue;
            }
            let sent = producer.send_each(records).await;
            bar.inc(acknowledged.note(&lines, &sent));
            if let Some(error) = sent.error {
                return Err(error.into());
            }
        }
    };
    let ended = work.await;
    bar.finish_and_clear();
    drop(session);
    if acknowledged.records > 0 {
        ended.with_context(|| acknowledged.resume(&args.topic))?;
    } else {
        ended?;
    }
    match empty_lines {
        0 => {}
        1 => context.out.note("1 empty line skipped"),
        lines => context.out.note(&format!("{} empty lines skipped", count(lines))),
    }
    let produced = acknowledged.records;
    let seconds = started.elapsed().as_secs_f64();
    context.out.table(
        &serde_json::json!({
            "topic": args.topic, "produced": produced, "empty_lines": empty_lines, "seconds": seconds
        }),
        &["topic", "produced", "seconds"],
        [vec![args.topic.clone(), count(produced), format!("{seconds:.2}")]],
    )
}

/// The acknowledged lines, so that an error can name the line to continue with.
#[derive(Debug, Default)]
struct Acknowledged {
    records: u64,
    /// All lines up to this one are in the topic.
    through: u64,
    /// Records of later lines that are also in the topic.
    acknowledged_after: u64,
}

impl Acknowledged {
    /// Records the deliveries of `lines`; returns how many the broker acknowledged.
    fn note(&mut self, lines: &[u64], sent: &Sent) -> u64 {
        let delivered = || sent.deliveries.iter().map(Option::is_some);
        let first = delivered().take_while(|delivered| *delivered).count();
        let all = delivered().filter(|delivered| *delivered).count();
        if let Some(last) = first.checked_sub(1) {
            self.through = lines[last];
        }
        self.acknowledged_after = (all - first) as u64;
        self.records += all as u64;
        all as u64
    }

    fn resume(&self, topic: &str) -> String {
        let Acknowledged { records, through, acknowledged_after } = self;
        let mut text = format!(
            "topic {topic} took {} records; continue with line {}, all lines before it are in the topic",
            count(*records),
            through + 1
        );
        if *acknowledged_after > 0 {
            text.push_str(&format!(
                " (so are {} of the lines after it, which would be duplicated)",
                count(*acknowledged_after)
            ));
        }
        text
    }
}

fn open(path: &Path) -> Result<Box<dyn Read + Send>> {
    match std::fs::File::open(path) {
        Ok(file) => Ok(Box::new(file)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            fail(Exit::NotFound, format!("{} does not exist", path.display()))
        }
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

/// Records with their line numbers.
#[derive(Debug, Default)]
struct Chunk {
    lines: Vec<u64>,
    records: Vec<OutRecord>,
    /// Lines without a record among them.
    empty_lines: u64,
}

/// Splits the source into records.
struct Reader {
    source: Source,
    shown: String,
    topic: String,
    key: Option<String>,
    number: u64,
}

impl Reader {
    /// Reads on a separate thread: standard input may be silent forever, and a signal must not wait for it.
    fn start(mut self) -> Result<mpsc::Receiver<Result<Chunk>>> {
        let (sender, receiver) = mpsc::channel(1);
        std::thread::Builder::new().name("reader".into()).spawn(move || {
            loop {
                let chunk = self.chunk();
                let is_last = !matches!(&chunk, Ok(chunk) if !chunk.records.is_empty());
                if sender.blocking_send(chunk).is_err() || is_last {
                    return;
                }
            }
        })?;
        Ok(receiver)
    }

    /// The records available without waiting, at least one; none at the end.
    fn chunk(&mut self) -> Result<Chunk> {
        let mut chunk = Chunk::default();
        while chunk.records.len() < CHUNK && (chunk.records.is_empty() || !self.source.buffer().is_empty()) {
            let mut line = Vec::new();
            let read = (&mut self.source).take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut line);
            if read.with_context(|| format!("cannot read {}", self.shown))? == 0 {
                break;
            }
            self.number += 1;
            let number = self.number;
            if line.len() as u64 > LINE_BYTES_MAX {
                return fail(Exit::Usage, format!("line {number} is longer than {LINE_BYTES_MAX} bytes"));
            }
            while line.last().is_some_and(|byte| matches!(byte, b'\n' | b'\r')) {
                line.pop();
            }
            if number == 1 && line.starts_with(BYTE_ORDER_MARK) {
                line.drain(..BYTE_ORDER_MARK.len());
            }
            if line.is_empty() {
                chunk.empty_lines += 1;
                continue;
            }
            let key = match &self.key {
                Some(field) => Some(key_of(&line, field, number)?),
                None => None,
            };
            let record = OutRecord::new(&self.topic, line);
            chunk.lines.push(number);
            chunk.records.push(match key {
                Some(key) => record.key(key),
                None => record,
            });
        }
        Ok(chunk)
    }
}

fn key_of(line: &[u8], field: &str, number: u64) -> Result<Vec<u8>> {
    let value: serde_json::Value = serde_json::from_slice(line)
        .map_err(|error| failure(Exit::Usage, format!("line {number} is not JSON: {error}")))?;
    match value.get(field) {
        Some(serde_json::Value::String(text)) => Ok(text.clone().into_bytes()),
        Some(serde_json::Value::Null) | None => {
            fail(Exit::Usage, format!("line {number} has no field {field:?} for the key"))
        }
        Some(other) => Ok(other.to_string().into_bytes()),
    }
}
