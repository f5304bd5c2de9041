//! The steps of quickstart; each finds the work of an earlier run and does the rest.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::{Float32Type, Int32Type, Int64Type};
use millrace_datafs::{Name, View, VolumeSpec};
use millrace_home::Addresses;
use millrace_serving::client::Client;
use millrace_streams::dataset::DatasetSpec;
use millrace_streams::feed::{Feed, FeedOptions, PlanOptions};
use millrace_streams::topic::{self, Consumer, OutRecord, Producer, Records};
use millrace_trainer::job::JobFile;
use serde_json::{Map, Value};

use super::report::Figures;
use super::scaffold;
use crate::commands::train;
use crate::context::{Context, live};
use crate::failure::{Exit, fail};
use crate::inference::{Classes, Predictor};
use crate::output::bytes;
use crate::service::Service;

const VOLUME: &str = "digits";
const SNAPSHOT: &str = "quickstart";
const TRAIN_TOPIC: &str = "digits";
const TEST_TOPIC: &str = "digits-test";
const PREDICTIONS_TOPIC: &str = "digits-predictions";
/// Interval at which a step checks the progress of the service.
const LOOK: Duration = Duration::from_millis(25);
/// A part of the service without progress for this long has failed.
const PATIENCE: Duration = Duration::from_secs(60);

/// A prediction's place in the source topic: partition and offset.
type SourceOffset = (i32, i64);

/// A held-out record, with its place in its topic.
struct HeldOut {
    place: SourceOffset,
    record: Map<String, Value>,
    label: i64,
}

/// Deletes the data of earlier runs in this home: their volume, which holds ingested files, checkpoints and
/// models, and their topics. Everything else in the home stays.
pub(crate) async fn clear(context: &Context) -> Result<()> {
    let work = context.clone();
    // The volume first: without its offsets, a run ingests the topics' records again.
    let deleted = context.blocking(move || match work.datafs()?.volume_delete(&VOLUME.parse()?) {
        Ok(()) | Err(millrace_datafs::Error::NotFound { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    });
    deleted.await.context("cannot delete the volume of earlier runs")?;
    let session = context.topics().await?;
    let mut deleted = Ok(false);
    for name in [TRAIN_TOPIC, TEST_TOPIC, PREDICTIONS_TOPIC] {
        deleted = deleted.and(topic::delete_topic(&session.kafka, name).await);
    }
    drop(session);
    deleted.context("cannot delete the topics of earlier runs")?;
    Ok(())
}

/// A running quickstart.
pub(crate) struct Steps {
    context: Context,
    service: Service,
    seed: u64,
}

impl Steps {
    /// Steps on a service that was started from the scaffold.
    pub(crate) fn new(context: Context, service: Service, seed: u64) -> Steps {
        Steps { context, service, seed }
    }

    /// The addresses of the service.
    pub(crate) fn addresses(&self) -> Addresses {
        self.service.addresses.clone()
    }

    /// Returns the service, so that the caller can stop it.
    pub(crate) fn into_service(self) -> Service {
        self.service
    }

    /// The first error of the service; pending while it runs well.
    pub(crate) async fn service_failed(&mut self) -> anyhow::Error {
        self.service.failed().await
    }

    /// Runs all steps in the order of the data.
    pub(crate) async fn run(&mut self, job: &Path) -> Result<Figures> {
        let mut figures = Figures::default();
        figures.produced_train = self.produce(TRAIN_TOPIC, scaffold::TRAIN).await?;
        figures.produced_test = self.produce(TEST_TOPIC, scaffold::TEST).await?;
        figures.produced = figures.produced_train + figures.produced_test;
        self.wait_for_ingest().await?;
        let snapshot = self.snapshot().await?;
        let train_rows = self.rows(&snapshot, "/train", &["_partition", "_offset"]).await?;
        let held_out = self.held_out(&snapshot).await?;
        figures.landed = places(&train_rows)?.len() as u64 + held_out.len() as u64;
        figures.dead_letters = self.dead_letters(&snapshot).await?;
        figures.mount_note = self.mount().await?;
        self.train(job, &mut figures).await?;
        let predictions = self.predict_grpc(figures.version, &held_out).await?;
        figures.predicted_grpc = predictions.classes.len() as u64;
        figures.accuracy = predictions.accuracy.value().unwrap_or(0.0);
        self.predict_topic(&held_out, &predictions, &mut figures).await?;
        Ok(figures)
    }

    /// Runs `work` unless a part of the service fails meanwhile.
    async fn with_service<T>(service: &mut Service, work: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::select! {
            result = work => result,
            error = service.failed() => Err(error),
        }
    }

    /// Writes the records of `text` that the topic does not hold yet; returns how many it holds. Line i goes
    /// to partition i modulo the number of partitions, so the partition ends show the progress of an earlier
    /// run.
    async fn produce(&mut self, name: &str, text: &str) -> Result<u64> {
        let ends = topic::watermarks(&self.service.kafka, name).await?;
        let partitions = i32::try_from(ends.len())?;
        let mut held: BTreeMap<i32, i64> = ends.iter().map(|(p, (_, high))| (*p, *high)).collect();
        let already: i64 = held.values().sum();
        let lines: Vec<&str> = text.lines().collect();
        let bar = self.context.out.progress("produce", "records", Some(lines.len() as u64));
        let mut missing = Vec::new();
        for (i, line) in lines.iter().enumerate() {
            let partition = i32::try_from(i % ends.len())?;
            debug_assert!(partition < partitions);
            match held.get_mut(&partition) {
                Some(left) if *left > 0 => *left -= 1,
                _ => missing.push(OutRecord::new(name, (*line).to_owned()).partition(partition)),
            }
        }
        if held.values().any(|left| *left > 0) {
            return fail(
                Exit::Conflict,
                format!(
                    "topic {name} holds {already} records, more than quickstart writes: start anew with --clean"
                ),
            );
        }
        bar.set_position(lines.len() as u64 - missing.len() as u64);
        let producer = Producer::connect(&self.service.kafka).await?;
        producer.send_all(missing).await?;
        bar.finish_and_clear();
        let ends = topic::watermarks(&self.service.kafka, name).await?;
        Ok(ends.values().map(|(low, high)| u64::try_from(high - low).unwrap_or(0)).sum())
    }

    /// Waits until the volume's offsets reach the ends of both topics.
    async fn wait_for_ingest(&mut self) -> Result<()> {
        let view = self.view(None).await?;
        let kafka = self.service.kafka.clone();
        let mut ends = BTreeMap::new();
        for name in [TRAIN_TOPIC, TEST_TOPIC] {
            for (partition, (_, high)) in topic::watermarks(&kafka, name).await? {
                ends.insert((name.to_owned(), partition), high);
            }
        }
        let total: i64 = ends.values().sum();
        let bar = self.context.out.progress("ingest", "records", Some(u64::try_from(total)?));
        let context = self.context.clone();
        let work = async {
            let mut last = (-1, Instant::now());
            loop {
                let view = view.clone();
                let offsets = context.blocking(move || Ok(millrace_ingest::offsets(&view)?)).await?;
                let landed: i64 = ends
                    .iter()
                    .map(|((name, partition), high)| {
                        let next = offsets.get(name).and_then(|of| of.get(partition)).copied().unwrap_or(0);
                        next.min(*high)
                    })
                    .sum();
                bar.set_position(u64::try_from(landed)?);
                if landed == total {
                    return Ok(());
                }
                if landed != last.0 {
                    last = (landed, Instant::now());
                } else if last.1.elapsed() > PATIENCE {
                    return fail(Exit::Failed, format!("ingest stands at {landed} of {total} records"));
                }
                tokio::time::sleep(LOOK).await;
            }
        };
        let done = Self::with_service(&mut self.service, work).await;
        bar.finish_and_clear();
        done
    }

    /// Takes the snapshot, or finds the one that an earlier run took after all records had landed.
    async fn snapshot(&self) -> Result<View> {
        let datafs = self.service.datafs.clone();
        self.context
            .blocking(move || {
                let (volume, name): (Name, Name) = (VOLUME.parse()?, SNAPSHOT.parse()?);
                match datafs.snapshot_create(&volume, &name) {
                    Ok(_) | Err(millrace_datafs::Error::Exists { .. }) => {}
                    Err(error) => return Err(error.into()),
                }
                Ok(datafs.view(&VolumeSpec { volume, snapshot: Some(name) })?)
            })
            .await
    }

    async fn view(&self, snapshot: Option<Name>) -> Result<View> {
        let datafs = self.service.datafs.clone();
        let spec = VolumeSpec { volume: VOLUME.parse()?, snapshot };
        self.context.blocking(move || Ok(datafs.view(&spec)?)).await
    }

    /// Reads every row below `path` once through the feed, as a trainer would.
    async fn rows(&self, view: &View, path: &str, columns: &[&str]) -> Result<Vec<RecordBatch>> {
        let dataset = DatasetSpec { source: view.spec().clone(), path: path.to_owned(), format: None };
        let dataset = dataset.open(&self.service.datafs).await?;
        let options = PlanOptions { seed: self.seed, ..PlanOptions::default() };
        let plan = dataset.plan(&options).await?;
        let steps = plan.steps_for_epochs(1);
        let batch_rows = plan.batch_rows();
        let columns = Some(columns.iter().map(|column| (*column).to_owned()).collect());
        let feed =
            Feed::open(plan, dataset.store().clone(), &FeedOptions { columns, ..FeedOptions::default() })?;
        let mut rows = Vec::new();
        for step in 0..steps {
            let batch = feed.batch(step, 0..batch_rows).await?;
            // The last batch extends into the next epoch.
            let first: arrow::array::BooleanArray =
                batch.epochs.iter().map(|epoch| Some(*epoch == 0)).collect();
            rows.push(arrow::compute::filter_record_batch(&batch.batch, &first)?);
        }
        Ok(rows)
    }

    async fn held_out(&self, view: &View) -> Result<Vec<HeldOut>> {
        let mut records = Vec::new();
        for batch in self.rows(view, "/test", &["pixels", "label", "_partition", "_offset"]).await? {
            let pixels = batch.column(0).as_fixed_size_list();
            let labels = batch.column(1).as_primitive::<Int64Type>();
            let partitions = batch.column(2).as_primitive::<Int32Type>();
            let offsets = batch.column(3).as_primitive::<Int64Type>();
            for row in 0..batch.num_rows() {
                let pixels = pixels.value(row);
                let features = Value::from(pixels.as_primitive::<Float32Type>().values().to_vec());
                let record = Map::from_iter([("pixels".to_owned(), features)]);
                let place = (partitions.value(row), offsets.value(row));
                records.push(HeldOut { place, record, label: labels.value(row) });
            }
        }
        let distinct: BTreeSet<SourceOffset> = records.iter().map(|record| record.place).collect();
        if distinct.len() != records.len() {
            return fail(Exit::Corrupt, "a held-out record landed more than once");
        }
        Ok(records)
    }

    async fn dead_letters(&self, view: &View) -> Result<u64> {
        let mut count = 0;
        for job in [TRAIN_TOPIC, TEST_TOPIC] {
            let (view, source) = (view.clone(), view.spec().clone());
            let path = format!("/dead_letters/{job}");
            let folder = path.clone();
            let listed = self.context.blocking(move || match view.list(&folder) {
                Ok(entries) => Ok(!entries.is_empty()),
                Err(millrace_datafs::Error::NotFound { .. }) => Ok(false),
                Err(error) => Err(error.into()),
            });
            if listed.await? {
                let dataset = DatasetSpec { source, path, format: None }.open(&self.service.datafs).await?;
                count += dataset.plan(&PlanOptions::default()).await?.rows();
            }
        }
        Ok(count)
    }

    /// Mounts the volume if the machine permits it, and reads an ingested file through the mount.
    async fn mount(&mut self) -> Result<String> {
        if let Err(reason) = millrace_datafs::mount::can_mount() {
            return Ok(format!("none, went on in-process: {reason}"));
        }
        let at = self.context.home.root().join("mount");
        let path = self.service.mount(&self.context, &live(&VOLUME.parse()?), at).await?;
        let folder = path.join(".snapshots").join(SNAPSHOT).join("train");
        self.context
            .blocking(move || {
                let mut entries: Vec<_> = std::fs::read_dir(&folder)
                    .and_then(Iterator::collect::<std::io::Result<_>>)
                    .with_context(|| format!("cannot list {}", folder.display()))?;
                entries.sort_by_key(std::fs::DirEntry::file_name);
                let Some(first) = entries.first() else {
                    return fail(Exit::Failed, format!("{} is empty", folder.display()));
                };
                let content = std::fs::read(first.path())
                    .with_context(|| format!("cannot read {}", first.path().display()))?;
                if !(content.starts_with(b"PAR1") && content.ends_with(b"PAR1")) {
                    return fail(Exit::Corrupt, format!("{} is not whole", first.path().display()));
                }
                Ok(format!("a landed file ({}) read at {}", bytes(content.len() as u64), path.display()))
            })
            .await
    }

    async fn train(&mut self, path: &Path, figures: &mut Figures) -> Result<()> {
        let job = JobFile::load(path)?;
        let bar = self.context.out.progress("train", "steps", None);
        let shown = bar.clone();
        let work = train::train(&self.context, &job, self.context.stop.child_token(), move |progress| {
            shown.set_position(progress.step);
            shown.set_message(format!("train, epoch {}, loss {:.3}", progress.epoch, progress.loss));
        });
        let report = Self::with_service(&mut self.service, work).await;
        bar.finish_and_clear();
        let report = report?;
        figures.epochs = report.epochs;
        figures.steps = report.steps;
        figures.workers = report.workers as u64;
        figures.workers_lost = u64::from(report.workers_lost);
        figures.loss = report.loss.unwrap_or(f64::NAN);
        figures.samples_per_second = report.samples_per_second;
        figures.device = job.device.to_string();
        let (Some(version), Some(model_sha256)) = (report.version, report.model_sha256) else {
            return fail(Exit::Failed, "training was stopped; run quickstart again to continue");
        };
        figures.version = version;
        figures.model_sha256 = model_sha256;
        figures.rows_per_epoch = match &report.rows_per_epoch[..] {
            [first, rest @ ..] if rest.iter().all(|rows| rows == first) => *first,
            uneven => return fail(Exit::Failed, format!("epochs saw different numbers of rows: {uneven:?}")),
        };
        Ok(())
    }

    async fn predict_grpc(&mut self, version: u64, held_out: &[HeldOut]) -> Result<Classes> {
        let Some(serving) = self.service.serving() else {
            return fail(Exit::Failed, "the scaffold declares no model server");
        };
        serving.repository().refresh().await?;
        let client = Client::connect(&serving.addresses().grpc.to_string()).await?;
        let predictor = Predictor::new(client, VOLUME, Some(version), &["pixels".to_owned()], 64).await?;
        let work = predictor.classify(held_out.iter().map(|held_out| (&held_out.record, held_out.label)));
        Self::with_service(&mut self.service, work).await
    }

    /// Waits until every held-out record has a prediction in the topic, then reads all of them.
    async fn predict_topic(
        &mut self,
        held_out: &[HeldOut],
        grpc: &Classes,
        figures: &mut Figures,
    ) -> Result<()> {
        let kafka = self.service.kafka.clone();
        let expected = held_out.len() as u64;
        let work = async {
            let mut last = (0, Instant::now());
            loop {
                let ends = topic::watermarks(&kafka, PREDICTIONS_TOPIC).await?;
                let there: u64 =
                    ends.values().map(|(low, high)| u64::try_from(high - low).unwrap_or(0)).sum();
                if there >= expected {
                    return Ok(ends);
                }
                if there != last.0 {
                    last = (there, Instant::now());
                } else if last.1.elapsed() > PATIENCE {
                    return fail(
                        Exit::Failed,
                        format!("{PREDICTIONS_TOPIC} stands at {there} of {expected} predictions"),
                    );
                }
                tokio::time::sleep(LOOK).await;
            }
        };
        let ends = Self::with_service(&mut self.service, work).await?;
        let total: u64 = ends.values().map(|(low, high)| u64::try_from(high - low).unwrap_or(0)).sum();
        let start: Vec<_> =
            ends.iter().map(|(p, (low, _))| (PREDICTIONS_TOPIC.to_owned(), *p, *low)).collect();
        let mut consumer = Consumer::assign(&kafka, &start).await?;
        let mut seen: BTreeMap<SourceOffset, (String, usize)> = BTreeMap::new();
        let mut read = 0;
        let mut heard = Instant::now();
        while read < total {
            let Some(batch) = consumer.next(4096, 8 << 20, Duration::from_secs(1)).await? else {
                if heard.elapsed() > PATIENCE {
                    return fail(
                        Exit::Failed,
                        format!("{PREDICTIONS_TOPIC} gave {read} of its {total} records"),
                    );
                }
                continue;
            };
            heard = Instant::now();
            let records = Records::new(&batch)?;
            for row in 0..records.len() {
                let (place, answer) = prediction(records.value(row).unwrap_or_default())?;
                seen.insert(place, answer);
                read += 1;
            }
        }
        let wanted: BTreeSet<SourceOffset> = held_out.iter().map(|record| record.place).collect();
        figures.predicted_topic = seen.keys().filter(|place| wanted.contains(place)).count() as u64;
        figures.repeated_topic = total - seen.len() as u64;
        // An earlier version may have answered in the topic; only answers of the same version are compared.
        figures.ways_agree = held_out.iter().zip(&grpc.classes).all(|(record, over_grpc)| {
            seen.get(&record.place)
                .is_none_or(|(version, class)| *version != grpc.version || Some(*class) == *over_grpc)
        });
        Ok(())
    }
}

/// Source place, model version and class of a record in the predictions topic.
fn prediction(value: &[u8]) -> Result<(SourceOffset, (String, usize))> {
    let value: Value = serde_json::from_slice(value).context("a prediction is not JSON")?;
    let number = |at: &str| value.pointer(at).and_then(Value::as_i64);
    match (
        number("/source/partition"),
        number("/source/offset"),
        number("/argmax/logits"),
        number("/version"),
    ) {
        (Some(partition), Some(offset), Some(class), Some(version)) => {
            Ok(((i32::try_from(partition)?, offset), (version.to_string(), usize::try_from(class)?)))
        }
        _ => fail(Exit::Failed, format!("a prediction lacks its source, version or class: {value}")),
    }
}

/// The distinct places of rows; fails on a duplicate.
fn places(batches: &[RecordBatch]) -> Result<BTreeSet<SourceOffset>> {
    let mut places = BTreeSet::new();
    for batch in batches {
        let partitions = batch.column(0).as_primitive::<Int32Type>();
        let offsets = batch.column(1).as_primitive::<Int64Type>();
        for row in 0..batch.num_rows() {
            if !places.insert((partitions.value(row), offsets.value(row))) {
                return fail(Exit::Corrupt, "a record landed more than once");
            }
        }
    }
    Ok(places)
}
