//! Tests of jobs on mixtures of datasets by weight.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, ListArray, RecordBatch};
use arrow::datatypes::{Float32Type, Int64Type};
use millrace_datafs::{Datafs, Publish};
use millrace_streams::KafkaConfig;
use millrace_streams::dataset::SourceSpec;
use millrace_streams::feed::{FeedOptions, Mixture, MixtureFeed, PlanOptions, Until, Weight};
use millrace_trainer::job::JobFile;
use millrace_trainer::{End, TrainReport, train};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

use super::{
    ROWS, bundle, home, job_text, parquet_bytes, rows, run, runtime, setup, signal, versions, volume,
};

/// Rows of the second dataset.
const MORE: usize = 90;
const SOURCES: &str = "\"data@v1:/train=0.7\", \"more@latest:/train=0.30\"";

/// As [`home`], with the dataset `more@v2:/train` of other rows.
fn mixed_home() -> TempDir {
    let home = home();
    let datafs = Datafs::open(home.path(), &millrace_datafs::Config::default()).unwrap();
    datafs.volume_create(&"more".parse().unwrap()).unwrap();
    let live = volume(&datafs, "more");
    live.write_file("train/a.parquet", &parquet_bytes(&rows(ROWS..ROWS + MORE))).unwrap();
    live.publish(Publish::new().put_key("ingest/landing/others/0", "90")).unwrap();
    datafs.snapshot_create(&"more".parse().unwrap(), &"v2".parse().unwrap()).unwrap();
    home
}

pub(super) fn mixed(name: &str, sources: &str, more: &str) -> JobFile {
    let text = job_text(name, more).replacen("\"data@v1:/train\"", &format!("[{sources}]"), 1);
    JobFile::parse(&text).unwrap()
}

fn trained(home: &Path, name: &str, more: &str) -> TrainReport {
    run(setup(home), mixed(name, SOURCES, more), |_| {}).unwrap()
}

/// The identity of the feed's order for datasets with weights, and the seed and the batch of the jobs.
pub(super) fn order_of_feed(home: &Path, sources: &[(&str, &str)], kafka: Option<&KafkaConfig>) -> String {
    let datafs = Datafs::open(home, &millrace_datafs::Config::default()).unwrap();
    runtime().block_on(async {
        let mut datasets = Vec::new();
        for (spec, weight) in sources {
            let dataset = spec.parse::<SourceSpec>().unwrap().open(&datafs, kafka).await.unwrap();
            datasets.push((dataset, weight.parse::<Weight>().unwrap()));
        }
        let options = PlanOptions { seed: 11, batch_rows: 32, ..PlanOptions::default() };
        let mixture = Mixture::plan(&datasets, &options, Until::First).await.unwrap();
        let stores: Vec<_> = datasets.iter().map(|(dataset, _)| Arc::clone(dataset.store())).collect();
        let columns = ["pixels", "label"].map(str::to_owned).to_vec();
        let options = FeedOptions { columns: Some(columns), ..FeedOptions::default() };
        MixtureFeed::open(mixture, &stores, &options).unwrap().mixture().id().to_string()
    })
}

/// The identity of the order in the newest checkpoint of a run.
pub(super) fn order_of_run(home: &Path, report: &TrainReport) -> String {
    let datafs = Datafs::open(home, &millrace_datafs::Config::default()).unwrap();
    let models = volume(&datafs, "models");
    let folder = format!("checkpoints/{}/{}", report.job, &report.run[..16]);
    let steps = models.list(&folder).unwrap();
    let newest = steps.iter().map(|entry| &entry.name).filter(|name| name.starts_with('0')).max().unwrap();
    let manifest = models.read_file(&format!("{folder}/{newest}/manifest.json")).unwrap();
    let manifest: serde_json::Value = serde_json::from_slice(&manifest).unwrap();
    manifest["plan"].as_str().unwrap().to_owned()
}

#[test]
fn a_mixture_trains_the_same_model_after_a_kill_and_a_stop_and_names_its_sources() {
    let home = mixed_home();
    let more = |workers: usize| format!("workers = {workers}\nepochs_max = 30\ncheckpoint_every_steps = 20");
    let alone = trained(home.path(), "w1", &more(1));
    // The end of the 90 rows of `more`, which are in 297 places; epochs end within steps.
    assert_eq!((alone.end, &alone.rows_per_epoch[..]), (End::EpochsDone, &[297; 30][..]));
    assert_eq!(alone.steps, (30u64 * 297).div_ceil(32));
    assert!(alone.accuracy.unwrap() > 0.95, "{alone:?}");
    let sources = [("data@v1:/train", "0.7"), ("more@v2:/train", "0.3")];
    assert_eq!(order_of_run(home.path(), &alone), order_of_feed(home.path(), &sources, None));

    let published = bundle(home.path(), "w1", 1);
    let lineage = &published.manifest().lineage;
    let sources = lineage.mixture.iter().map(|source| (source.dataset.as_str(), source.weight.as_str()));
    assert_eq!(
        sources.collect::<Vec<_>>(),
        [("data@v1:/train", "0.7"), ("more@v2:/train", "0.3")],
        "the newest snapshot has its name"
    );
    assert_eq!((lineage.volume.as_str(), lineage.topic.as_str()), ("", ""));
    assert_eq!((lineage.offsets["digits"][&0], lineage.offsets["others"][&0]), (301, 90));
    assert_eq!(published.statistics().unwrap().unwrap().rows, 297);

    let mut is_killed = false;
    let battered = run(setup(home.path()), mixed("w2", SOURCES, &more(2)), |seen| {
        if seen.step >= 40 && seen.worker_pids.len() == 2 && !is_killed {
            is_killed = true;
            signal("KILL", seen.worker_pids[1]);
        }
    })
    .unwrap();
    assert_eq!((is_killed, battered.workers_lost), (true, 1));
    assert_eq!(battered.rows_per_epoch, alone.rows_per_epoch);
    assert_eq!(battered.loss_per_epoch, alone.loss_per_epoch);
    assert_eq!(battered.model_sha256, alone.model_sha256);
    assert_eq!(bundle(home.path(), "w2", 1).model_sha256(), published.model_sha256());

    // Stopped, and resumed by another number of workers.
    let stop = CancellationToken::new();
    let token = stop.clone();
    let halves = |workers: usize| mixed("halves", SOURCES, &more(workers));
    let training = train(halves(3), setup(home.path()), stop, move |seen| {
        if seen.step >= 3 {
            token.cancel();
        }
    });
    let stopped = runtime().block_on(training).unwrap();
    assert_eq!(stopped.end, End::Stopped);
    let resumed = run(setup(home.path()), halves(2), |_| {}).unwrap();
    assert_eq!(resumed.resumed_from_step, Some(stopped.steps));
    assert_eq!(resumed.model_sha256, alone.model_sha256);
}

#[test]
fn epochs_of_a_mixture_end_as_until_and_rows_per_epoch_say() {
    let home = mixed_home();
    // 301 rows at 0.7 are in 430 places, in which the 90 others come more than once.
    let every = trained(home.path(), "every", "workers = 2\nepochs_max = 3\nuntil = \"every\"");
    assert_eq!(every.rows_per_epoch, [430; 3]);
    let first = trained(home.path(), "first", "workers = 1\nepochs_max = 1");
    assert_ne!(every.run, first.run);
    let long = trained(home.path(), "long", "workers = 1\nepochs_max = 2\nrows_per_epoch = 1000");
    assert_eq!(long.rows_per_epoch, [1000; 2]);
    // Other weights, or another order of the datasets, are another run.
    for sources in
        ["\"data@v1:/train=0.6\", \"more@v2:/train=0.4\"", "\"more@v2:/train=0.3\", \"data@v1:/train=0.7\""]
    {
        let job = mixed("first", sources, "workers = 1\nepochs_max = 1");
        let other = run(setup(home.path()), job, |_| {}).unwrap();
        assert!(other.run != first.run && other.resumed_from_step.is_none(), "{sources}");
    }
    // The validation has a dataset of its own.
    let more = "workers = 2\nepochs_max = 2\nsplits = { train = 0.75, test = 0.25 }\nsplit = \"train\"\n[validation]\n\
                dataset = \"data@v1:/train\"\nsplit = \"test\"";
    let judged = trained(home.path(), "judged", more);
    assert_eq!(judged.validation.len(), 2);
    assert!(judged.validation[0].rows < ROWS as u64 / 2, "{:?}", judged.validation);
}

#[test]
fn mixtures_that_cannot_work_are_refused_before_workers_start() {
    let home = mixed_home();
    let datafs = Datafs::open(home.path(), &millrace_datafs::Config::default()).unwrap();
    let live = volume(&datafs, "more");
    let some = rows(0..20);
    let texts: ArrayRef = Arc::new(arrow::array::StringArray::from(vec!["a"; 20]));
    let of_texts = [("pixels", Arc::clone(some.column(0))), ("label", texts)];
    let of_texts = RecordBatch::try_from_iter(of_texts).unwrap();
    live.write_file("texts/a.parquet", &parquet_bytes(&of_texts)).unwrap();
    live.write_file("empty/a.parquet", &parquet_bytes(&rows(0..0))).unwrap();
    // Lists have one type, whatever their lengths.
    let labels = some.column(1).as_primitive::<Int64Type>().clone();
    for (name, width) in [("wide", super::WIDTH), ("narrow", super::WIDTH - 1)] {
        let lists = (0..20).map(|row| Some((0..width).map(move |at| Some((row + at) as f32))));
        let lists: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Float32Type, _, _>(lists));
        let batch = RecordBatch::try_from_iter([("pixels", lists), ("label", Arc::new(labels.clone()) as _)]);
        live.write_file(&format!("{name}/a.parquet"), &parquet_bytes(&batch.unwrap())).unwrap();
    }
    datafs.snapshot_create(&"more".parse().unwrap(), &"v3".parse().unwrap()).unwrap();
    for (other, more, words) in [
        ("more@v3:/texts=1", "", vec!["\"label\" is Int64 in data@v1:/train", "Utf8 in more@v3:/texts"]),
        ("more@v3:/empty=1", "", vec!["more@v3:/empty", "hold no row"]),
        ("more@v3:/absent=1", "", vec!["absent"]),
        ("more@v9:/train=1", "", vec!["v9"]),
        ("more@v2:/train=1", "where = \"label > 3\"", vec!["data@v1:/train", "none of its 301 rows"]),
    ] {
        let job = mixed("bad", &format!("\"data@v1:/train=1\", \"{other}\""), more);
        let line = run(setup(home.path()), job, |_| panic!("{other} started")).unwrap_err().one_line();
        for word in words {
            assert!(line.contains(word), "{line:?} lacks {word:?}");
        }
    }
    // The small weight keeps the lists of another length out of the first batch.
    let sources = "\"more@v3:/wide=100\", \"more@v3:/narrow=1\"";
    let line =
        run(setup(home.path()), mixed("bad", sources, ""), |_| panic!("started")).unwrap_err().one_line();
    assert!(line.contains("more@v3:/narrow") && line.contains("\"pixels\""), "{line}");
    assert_eq!(versions(home.path()), 0);
}
