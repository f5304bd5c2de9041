//! Tests of jobs on a mixture of a topic and a dataset of a volume.

use millrace_datafs::Datafs;
use millrace_trainer::{End, Setup, train};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

use super::mixtures::{mixed, order_of_feed, order_of_run};
use super::topics::{json_rows, produce, start};
use super::{ROWS, bundle, home, run, runtime, setup, versions, volume};

/// Rows of the dataset of the volume.
const MORE: usize = 90;
const SOURCES: &str = "\"topic:points@latest=0.7\", \"more@v1:/train=0.3\"";

/// As [`home`], with the dataset `more@v1:/train`. Its columns have the types of a topic's, those of JSON.
fn mixed_home() -> TempDir {
    let home = home();
    let datafs = Datafs::open(home.path(), &millrace_datafs::Config::default()).unwrap();
    datafs.volume_create(&"more".parse().unwrap()).unwrap();
    let text = json_rows(ROWS..ROWS + MORE).join("\n");
    volume(&datafs, "more").write_file("train/a.jsonl", text.as_bytes()).unwrap();
    datafs.snapshot_create(&"more".parse().unwrap(), &"v1".parse().unwrap()).unwrap();
    home
}

#[test]
fn a_mixture_with_a_topic_trains_the_same_model_for_any_workers_and_keeps_its_offsets() {
    let (home, log) = (mixed_home(), tempfile::tempdir().unwrap());
    let serving = runtime();
    let (broker, kafka) = serving.block_on(start(log.path()));
    let setup = || Setup { kafka: Some(kafka.clone()), ..setup(home.path()) };
    let job = |name: &str, workers: usize| {
        mixed(name, SOURCES, &format!("workers = {workers}\nepochs_max = 30\ncheckpoint_every_steps = 20"))
    };
    let alone = run(setup(), job("alone", 1), |_| {}).unwrap();
    // The end of the 90 rows of `more`, which are in 297 places. The ledger has refused missing and repeated rows.
    assert_eq!((alone.end, &alone.rows_per_epoch[..]), (End::EpochsDone, &[297; 30][..]));
    assert!(alone.accuracy.unwrap() > 0.95, "{alone:?}");
    let pair = run(setup(), job("pair", 2), |_| {}).unwrap();
    assert_eq!(pair.loss_per_epoch, alone.loss_per_epoch);
    assert_eq!(pair.model_sha256, alone.model_sha256);

    let published = bundle(home.path(), "alone", 1);
    assert_eq!(bundle(home.path(), "pair", 1).model_sha256(), published.model_sha256());
    let lineage = &published.manifest().lineage;
    assert_eq!(bundle(home.path(), "pair", 1).manifest().lineage.mixture, lineage.mixture);
    assert_eq!((lineage.volume.as_str(), lineage.topic.as_str()), ("", ""));
    assert_eq!((lineage.offsets["points"][&0], lineage.offsets["points"][&1]), (151, 150));
    let sources = lineage.mixture.iter().map(|source| (source.dataset.as_str(), source.weight.as_str()));
    let sources: Vec<_> = sources.collect();
    assert!(sources[0].0.starts_with("topic:points@latest?offsets=0:0-151:"), "{sources:?}");
    assert_eq!((sources[0].1, sources[1]), ("0.7", ("more@v1:/train", "0.3")));
    // What the model names is the order that it was trained in.
    assert_eq!(order_of_run(home.path(), &alone), order_of_feed(home.path(), &sources, Some(&kafka)));

    // Stopped, and resumed by another number of workers when more records have arrived.
    let stop = CancellationToken::new();
    let token = stop.clone();
    let training = train(job("halves", 3), setup(), stop, move |seen| {
        if seen.step >= 3 {
            token.cancel();
        }
    });
    let stopped = runtime().block_on(training).unwrap();
    serving.block_on(produce(&kafka, ROWS..ROWS + 50));
    let halves = run(setup(), job("halves", 2), |_| {}).unwrap();
    assert_eq!((stopped.end, halves.resumed_from_step), (End::Stopped, Some(stopped.steps)));
    assert_eq!(halves.rows_per_epoch, [297; 30]);
    assert_eq!(halves.model_sha256, alone.model_sha256);
    // The finished run is over: the next one reads what has arrived until then.
    let next = run(setup(), job("halves", 2), |_| {}).unwrap();
    assert_eq!((next.version, &next.rows_per_epoch[..]), (Some(2), &[297; 30][..]));
    let mixture = bundle(home.path(), "halves", 2).manifest().lineage.mixture.clone();
    assert!(mixture[0].dataset.starts_with("topic:points@latest?offsets=0:0-176:"), "{mixture:?}");
    serving.block_on(broker.stop()).unwrap();
}

#[test]
fn epochs_of_a_mixture_with_a_topic_end_as_until_and_the_bound_of_the_topic_say() {
    let (home, log) = (mixed_home(), tempfile::tempdir().unwrap());
    let serving = runtime();
    let (broker, kafka) = serving.block_on(start(log.path()));
    let setup = || Setup { kafka: Some(kafka.clone()), ..setup(home.path()) };
    // 301 rows at 0.7 are in 430 places, and 100 in 143.
    let every = mixed("every", SOURCES, "workers = 2\nepochs_max = 3\nuntil = \"every\"");
    assert_eq!(run(setup(), every, |_| {}).unwrap().rows_per_epoch, [430; 3]);
    let bounded = SOURCES.replace("points@latest", "points@100");
    let bounded = mixed("bounded", &bounded, "workers = 2\nepochs_max = 3");
    assert_eq!(run(setup(), bounded, |_| {}).unwrap().rows_per_epoch, [143; 3]);

    // Two accumulated batches have the rows of one of their size.
    let accumulated = |name: &str, workers: usize| {
        let mut job = mixed(name, SOURCES, &format!("workers = {workers}\nepochs_max = 4"));
        (job.batch_rows, job.accumulate_steps) = (16, 2);
        run(setup(), job, |_| {}).unwrap()
    };
    let (alone, pair) = (accumulated("alone", 1), accumulated("pair", 2));
    assert_eq!((&alone.rows_per_epoch[..], alone.steps), (&[297; 4][..], (4u64 * 297).div_ceil(32)));
    assert_eq!(pair.model_sha256, alone.model_sha256);
    let mixture = bundle(home.path(), "alone", 1).manifest().lineage.mixture.clone();
    let sources = mixture.iter().map(|source| (source.dataset.as_str(), source.weight.as_str()));
    let order = order_of_feed(home.path(), &sources.collect::<Vec<_>>(), Some(&kafka));
    assert_eq!(order_of_run(home.path(), &alone), order);
    serving.block_on(broker.stop()).unwrap();
}

/// The numbers of a topic are those of JSON: 64 bits.
#[test]
fn a_mixture_of_a_topic_and_files_with_other_types_names_both() {
    let (home, log) = (home(), tempfile::tempdir().unwrap());
    let serving = runtime();
    let (broker, kafka) = serving.block_on(start(log.path()));
    let setup = Setup { kafka: Some(kafka.clone()), ..setup(home.path()) };
    let job = mixed("bad", "\"data@v1:/train=0.7\", \"topic:points@latest=0.3\"", "epochs_max = 1");
    let line = run(setup, job, |_| panic!("started")).unwrap_err().one_line();
    for word in ["column \"pixels\" is FixedSizeList", "in data@v1:/train", "in topic:points@latest"] {
        assert!(line.contains(word), "{line:?} lacks {word:?}");
    }
    assert_eq!(versions(home.path()), 0);
    serving.block_on(broker.stop()).unwrap();
}
