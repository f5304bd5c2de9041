//! The landing thread: record batches in, publishes out.
//!
//! One [`Lander`] per run. It decodes, writes staged Parquet files and collects dead letters. When a limit of
//! rows, bytes or time is reached, it commits all of it with the new offsets in one transaction.

mod dead;
mod declared;
mod file;
mod pending;
mod target;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::RecordBatch;
use millrace_datafs::{Publish, StagedFile, View};
use millrace_streams::topic::{self, Producer, Records};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};

use crate::config::Job;
use crate::decode::{Columns, Decoder, Outcome, Reject};
use crate::error::{Error, Result};
use crate::metrics;
use crate::progress::{IngestReport, Progress};
use crate::schema::{Field, Inference, Schema};
use crate::state::{JobState, LastRecord, PositionUpdate};

use dead::DeadLetters;
use declared::DeclaredCheck;
use pending::Pending;
use target::{Layout, Target};

/// Files that are written at the same time; beyond it all are completed (and published later).
const FILES_OPEN_MAX: usize = 256;
/// Memory limit of the records that wait for the schema; beyond it the schema is inferred from fewer records.
const HELD_BYTES_MAX: usize = 16 << 20;
/// Smallest sample on which a topic may be refused.
const SAMPLE_MIN: usize = 10;
/// Completed files at which a publish is due.
const FILES_PUBLISHED_MAX: usize = 1024;

/// One input from the topic, in order.
pub(crate) enum Input {
    Records(RecordBatch),
    /// Positions after offsets that hold no records, by partition.
    Passed(BTreeMap<i32, i64>),
    /// A batch that cannot be decoded: its first offset and the one after it.
    Undecodable {
        partition: i32,
        offsets: (i64, i64),
        reason: String,
    },
}

/// A completed file that the next publish makes visible.
pub(crate) struct Completed {
    path: String,
    file: StagedFile,
}

/// Turns batches of one topic into publishes of one volume.
pub(crate) struct Lander {
    job: Arc<Job>,
    view: View,
    state: JobState,
    /// Columns and decoder; `None` until the schema is known.
    layout: Option<(Layout, Decoder)>,
    /// Inputs that wait for the schema; the first one holds records.
    buffered: Vec<Input>,
    buffered_rows: usize,
    buffered_bytes: usize,
    targets: Vec<Target>,
    recent: usize,
    completed: Vec<Completed>,
    dead: DeadLetters,
    /// Next offset to take per partition.
    next: BTreeMap<i32, i64>,
    pending: Pending,
    report: IngestReport,
    progress: watch::Sender<Progress>,
    declared: DeclaredCheck,
}

impl Lander {
    /// A lander that continues at `next`, the start offsets derived from [`JobState`] and the topic.
    pub(crate) fn new(
        job: Arc<Job>,
        view: View,
        state: JobState,
        next: BTreeMap<i32, i64>,
        producer: Option<(Producer, Handle)>,
        progress: watch::Sender<Progress>,
    ) -> Result<Self> {
        let schema = job.resolve_schema(state.schema.as_ref())?;
        let dead = DeadLetters::new(&job, producer);
        let report = IngestReport { offsets: state.offsets.clone(), ..IngestReport::default() };
        let declared = DeclaredCheck::new(&job, &state);
        let mut lander = Self {
            job,
            view,
            state,
            layout: None,
            buffered: Vec::new(),
            buffered_rows: 0,
            buffered_bytes: 0,
            targets: Vec::new(),
            recent: 0,
            completed: Vec::new(),
            dead,
            next,
            pending: Pending::default(),
            report,
            progress,
            declared,
        };
        if let Some(schema) = schema {
            lander.fix_schema(Arc::new(schema));
        }
        Ok(lander)
    }

    /// Lands until the channel closes, then publishes the rest.
    pub(crate) fn run(mut self, mut inputs: mpsc::Receiver<Input>, runtime: &Handle) -> Result<IngestReport> {
        loop {
            let received = match self.time_left() {
                None => Some(runtime.block_on(inputs.recv())),
                Some(left) => {
                    runtime.block_on(async { tokio::time::timeout(left, inputs.recv()).await }).ok()
                }
            };
            match received {
                Some(Some(input)) => {
                    self.take(input)?;
                    if self.is_due() {
                        self.commit()?;
                    }
                }
                Some(None) => break,
                None => self.commit()?,
            }
        }
        self.commit()?;
        self.check_declared(true);
        Ok(self.report)
    }

    /// Time until the oldest pending record must be published.
    fn time_left(&self) -> Option<Duration> {
        let since = self.pending.since?;
        Some(Duration::from_millis(self.job.config.flush_ms).saturating_sub(since.elapsed()))
    }

    fn is_due(&self) -> bool {
        let config = &self.job.config;
        self.pending.records() + self.buffered_rows as u64 >= config.flush_rows_max
            || self.pending.memory >= config.flush_bytes_max
            || self.completed.len() >= FILES_PUBLISHED_MAX
            || self.time_left() == Some(Duration::ZERO)
    }

    fn fix_schema(&mut self, schema: Arc<Schema>) {
        let layout = Layout::new(&self.job, schema.clone());
        let decoder = Decoder::new(schema, self.job.unknown, self.job.limits.clone());
        self.layout = Some((layout, decoder));
    }

    fn take(&mut self, input: Input) -> Result<()> {
        self.pending.since.get_or_insert_with(Instant::now);
        let sampled = match (&self.layout, &input) {
            (None, Input::Records(batch)) => {
                let records = self.records(batch)?;
                Some((self.sample(&records).count(), records.memory_total()))
            }
            _ => None,
        };
        match sampled {
            // Skipped tombstones alone neither decide the schema nor wait for it.
            Some((0, _)) if self.buffered.is_empty() => return self.land(input),
            Some((rows, bytes)) => {
                self.buffered_rows += rows;
                self.buffered_bytes += bytes;
            }
            None if self.layout.is_some() || self.buffered.is_empty() => return self.land(input),
            None => {}
        }
        self.buffered.push(input);
        if self.buffered_rows >= self.job.config.infer_rows || self.buffered_bytes >= HELD_BYTES_MAX {
            self.decide_schema()?;
        }
        Ok(())
    }

    fn land(&mut self, input: Input) -> Result<()> {
        match input {
            Input::Records(batch) => self.decode(&batch),
            Input::Passed(positions) => {
                for (partition, position) in positions {
                    self.advance(partition, position);
                }
                self.pending.passed = true;
                Ok(())
            }
            Input::Undecodable { partition, offsets, reason } => {
                if !self.advance(partition, offsets.1) {
                    return Ok(());
                }
                let batch = topic::blank_record(self.job.topic(), partition, offsets.0)
                    .map_err(|source| self.topic_error(source))?;
                let reject = Reject::undecodable(offsets, &reason);
                *self.pending.dead.entry(reject.class).or_default() += 1;
                self.dead.add(&self.job, &self.view, &batch, &[(0, reject)], &mut self.completed)?;
                self.progress.send_modify(|p| p.records += 1);
                Ok(())
            }
        }
    }

    /// Moves the next offset of a partition; `false` where it is not below `next`.
    fn advance(&mut self, partition: i32, next: i64) -> bool {
        let at = self.next.entry(partition).or_insert(0);
        let moves = *at < next;
        *at = next.max(*at);
        moves
    }

    /// The values of a batch from which the schema is inferred and checked: not those that the job skips.
    fn sample<'a>(&'a self, records: &'a Records<'_>) -> impl Iterator<Item = Option<&'a [u8]>> {
        (0..records.len()).map(move |row| records.value(row)).filter(move |value| !self.job.skips(*value))
    }

    /// Infers the schema from the records held back, then decodes them.
    fn decide_schema(&mut self) -> Result<()> {
        let mut inference = Inference::default();
        let mut rows = 0;
        for input in &self.buffered {
            let Input::Records(batch) = input else { continue };
            let records = self.records(batch)?;
            for value in self.sample(&records).take(self.job.config.infer_rows - rows) {
                if let Some(value) = value {
                    inference.observe(value, &self.job.limits);
                }
                rows += 1;
            }
        }
        let schema = Arc::new(inference.finish());
        self.check_sample(&schema)?;
        tracing::info!(job = self.job.name(), columns = schema.fields.len(), rows, "inferred the schema");
        self.fix_schema(schema);
        self.buffered_rows = 0;
        self.buffered_bytes = 0;
        for input in std::mem::take(&mut self.buffered) {
            self.land(input)?;
        }
        Ok(())
    }

    /// Refuses a schema under which most records of the sample would be dead letters: it does not describe
    /// the topic, and it would be fixed for life.
    fn check_sample(&self, schema: &Arc<Schema>) -> Result<()> {
        let mut decoder = Decoder::new(Arc::clone(schema), self.job.unknown, self.job.limits.clone());
        let mut columns = Columns::new(schema);
        let (mut records, mut dead) = (0, 0);
        let mut why = None;
        for input in &self.buffered {
            let Input::Records(batch) = input else { continue };
            let batch = self.records(batch)?;
            for value in self.sample(&batch).take(self.job.config.infer_rows - records) {
                if let Outcome::Rejected(reject) = decoder.decode(value, &mut columns) {
                    dead += 1;
                    why.get_or_insert(reject.reason);
                }
                records += 1;
            }
        }
        match why {
            Some(reason) if records >= SAMPLE_MIN && 2 * dead > records => Err(Error::MostlyDead {
                job: self.job.name().to_owned(),
                topic: self.job.topic().to_owned(),
                records,
                dead,
                reason,
            }),
            _ => Ok(()),
        }
    }

    fn records<'a>(&self, batch: &'a RecordBatch) -> Result<Records<'a>> {
        Records::new(batch).map_err(|source| self.topic_error(source))
    }

    fn topic_error(&self, source: millrace_streams::Error) -> Error {
        Error::Topic {
            job: self.job.name().to_owned(),
            topic: self.job.topic().to_owned(),
            source: Box::new(source),
        }
    }

    fn decode(&mut self, batch: &RecordBatch) -> Result<()> {
        let records = self.records(batch)?;
        let mut rejected: Vec<(usize, Reject)> = Vec::new();
        let mut last: BTreeMap<i32, usize> = BTreeMap::new();
        let before = self.pending.records();
        for row in 0..records.len() {
            let (partition, offset) = (records.partition(row), records.offset(row));
            if !self.advance(partition, offset + 1) {
                continue;
            }
            last.insert(partition, row);
            let value = records.value(row);
            self.pending.bytes +=
                (value.map_or(0, <[u8]>::len) + records.key(row).map_or(0, <[u8]>::len)) as u64;
            if self.job.skips(value) {
                self.pending.skipped += 1;
                continue;
            }
            match self.decode_record(partition, offset, records.timestamp_ms(row), value)? {
                Some(reject) => {
                    *self.pending.dead.entry(reject.class).or_default() += 1;
                    self.declared.rejected(&reject);
                    rejected.push((row, reject));
                }
                None => self.pending.landed += 1,
            }
        }
        self.pending.memory += records.memory_total() as u64;
        for (partition, row) in last {
            let last = LastRecord { offset: records.offset(row), digest: records.digest(row) };
            self.pending.last.insert(partition, last);
        }
        if !rejected.is_empty() {
            let completed = &mut self.completed;
            self.dead.add(&self.job, &self.view, batch, &rejected, completed)?;
        }
        let records = self.pending.records() - before;
        self.progress.send_modify(|p| p.records += records);
        Ok(())
    }

    fn decode_record(
        &mut self,
        partition: i32,
        offset: i64,
        timestamp_ms: Option<i64>,
        value: Option<&[u8]>,
    ) -> Result<Option<Reject>> {
        loop {
            let at = self.target(partition, timestamp_ms)?;
            let Some((layout, decoder)) = &mut self.layout else {
                return Err(self.stopped());
            };
            let target = &mut self.targets[at];
            match decoder.decode(value, &mut target.columns) {
                Outcome::Landed if layout.is_empty() => {
                    target.columns.take().map_err(|e| layout.arrow_error(e))?;
                    return Ok(Some(Reject::no_columns()));
                }
                Outcome::Landed => {
                    target.record_row(offset, timestamp_ms, value.map_or(0, <[u8]>::len));
                    if target.is_full() {
                        target.drain(layout, &self.view)?;
                    }
                    return Ok(None);
                }
                Outcome::Rejected(reject) => return Ok(Some(reject)),
                Outcome::NewColumns(new) => self.extend(new)?,
            }
        }
    }

    /// Adds columns; files of the old columns are completed as their next record comes.
    fn extend(&mut self, new: Vec<Field>) -> Result<()> {
        let Some((layout, _)) = &self.layout else {
            return Err(self.stopped());
        };
        for field in &new {
            tracing::info!(job = self.job.name(), column = field.name, "new column of type {}", field.kind);
        }
        let mut schema = Schema::clone(layout.schema());
        schema.fields.extend(new);
        self.fix_schema(Arc::new(schema));
        Ok(())
    }

    /// The target of a record: its partition, and its hour when files are split by time.
    fn target(&mut self, partition: i32, timestamp_ms: Option<i64>) -> Result<usize> {
        let Some((layout, _)) = &self.layout else {
            return Err(self.stopped());
        };
        let hour = layout.hour(timestamp_ms);
        let is_it = |t: &Target| t.matches(partition, hour);
        let found = match self.targets.get(self.recent) {
            Some(target) if is_it(target) => Some(self.recent),
            _ => self.targets.iter().position(is_it),
        };
        if let Some(at) = found {
            self.recent = at;
            if self.targets[at].has(layout.schema()) {
                return Ok(at);
            }
            let old = std::mem::replace(&mut self.targets[at], Target::new(layout, partition, hour));
            self.completed.extend(old.complete(&self.view)?);
            return Ok(at);
        }
        let new = Target::new(layout, partition, hour);
        if self.targets.len() >= FILES_OPEN_MAX {
            self.complete_targets()?;
        }
        self.targets.push(new);
        self.recent = self.targets.len() - 1;
        Ok(self.recent)
    }

    fn complete_targets(&mut self) -> Result<()> {
        for target in std::mem::take(&mut self.targets) {
            self.completed.extend(target.complete(&self.view)?);
        }
        self.recent = 0;
        Ok(())
    }

    /// Publishes everything decoded so far: files, dead letters, offsets, schema.
    fn commit(&mut self) -> Result<()> {
        if self.layout.is_none() && !self.buffered.is_empty() {
            self.decide_schema()?;
        }
        let mut pending = std::mem::take(&mut self.pending);
        if pending.records() == 0 && !pending.passed {
            return Ok(());
        }
        let started = Instant::now();
        self.complete_targets()?;
        self.completed.extend(self.dead.complete(&self.job)?);
        let files = self.completed.len() as u64;
        let mut publish = Publish::new();
        for Completed { path, file } in self.completed.drain(..) {
            publish = publish.file(path, file);
        }
        let offsets = self
            .next
            .iter()
            .filter(|(partition, next)| self.state.offsets.get(partition) != Some(next))
            .map(|(partition, next)| (*partition, *next))
            .collect();
        let moved = PositionUpdate { offsets, last: std::mem::take(&mut pending.last) };
        let schema = self.layout.as_ref().map(|(layout, _)| layout.schema());
        self.state.commit(&self.view, &self.job, publish, moved, schema.map(Arc::as_ref))?;
        self.count(&pending, files, started.elapsed());
        self.check_declared(false);
        Ok(())
    }

    fn check_declared(&mut self, ended: bool) {
        let Some((_, decoder)) = &self.layout else { return };
        self.declared.check(&self.job, decoder, &mut self.report, ended);
    }

    fn count(&mut self, pending: &Pending, files: u64, elapsed: Duration) {
        self.report.offsets.clone_from(&self.state.offsets);
        pending.add_to(&mut self.report, files);
        self.progress.send_modify(|p| p.adopt(&self.report));
        pending.publish_metrics(self.job.name(), files, elapsed);
        metrics::set_lag(self.job.name(), &self.progress.borrow());
        tracing::debug!(
            job = self.job.name(),
            volume = self.job.config.volume,
            topic = self.job.topic(),
            records = pending.records(),
            files,
            bytes = pending.bytes,
            elapsed_ms = elapsed.as_millis() as u64,
            "published"
        );
    }

    fn stopped(&self) -> Error {
        Error::Stopped { job: self.job.name().to_owned() }
    }
}
