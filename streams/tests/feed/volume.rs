//! Tests of datasets in volumes: opened by name, planned once per snapshot.

use millrace_datafs::{Config, Datafs};
use millrace_streams::dataset::DatasetSpec;
use millrace_streams::feed::{Feed, FeedError, FeedOptions, PlanOptions};

use super::data::{parquet, rows};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshot_feed_ignores_later_volume_changes() {
    let home = tempfile::tempdir().unwrap();
    let datafs = Datafs::open(home.path(), &Config::default()).unwrap();
    let name = "digits".parse().unwrap();
    datafs.volume_create(&name).unwrap();
    let live = datafs.view(&"digits".parse().unwrap()).unwrap();
    live.create_dir_all("train/dt=2026-11-01").unwrap();
    for i in 0..3u64 {
        let bytes = parquet(&[rows(i * 50, 30), rows(i * 50 + 30, 20)]);
        live.write_file(&format!("train/dt=2026-11-01/{i}.parquet"), &bytes).unwrap();
    }
    datafs.snapshot_create(&name, &"v1".parse().unwrap()).unwrap();
    live.write_file("train/dt=2026-11-01/0.parquet", b"overwritten").unwrap();

    let spec: DatasetSpec = "digits@v1:/train".parse().unwrap();
    let options = PlanOptions { batch_rows: 10, ..PlanOptions::default() };
    let opened = spec.open(&datafs).await.unwrap();
    let plan = opened.plan(&options).await.unwrap();
    assert_eq!(plan.rows(), 150);
    assert_eq!(plan.source(), opened.identity());
    assert!(plan.source().starts_with("digits@v1#"), "{}", plan.source());
    assert!(live.key_scan("").unwrap().is_empty(), "feeding leaves nothing in the volume");
    assert_eq!(std::fs::read_dir(home.path().join("feed")).unwrap().count(), 1);
    let again = spec.open(&datafs).await.unwrap().plan(&options).await.unwrap();
    assert_eq!(again.id(), plan.id());

    let feed = Feed::open(plan, opened.store().clone(), &FeedOptions::default()).unwrap();
    let mut seen = Vec::new();
    for step in 0..15 {
        seen.extend(feed.batch(step, 0..10).await.unwrap().rows);
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..150).collect::<Vec<_>>());

    datafs.snapshot_delete(&name, &"v1".parse().unwrap()).unwrap();
    live.write_file("train/dt=2026-11-01/0.parquet", &parquet(&[rows(0, 50)])).unwrap();
    datafs.snapshot_create(&name, &"v1".parse().unwrap()).unwrap();
    let other = spec.open(&datafs).await.unwrap().plan(&options).await.unwrap();
    assert_ne!(other.source(), again.source());
    live.write_file("train/dt=2026-11-01/0.parquet", b"overwritten").unwrap();

    let error = "digits@v2:/train".parse::<DatasetSpec>().unwrap().open(&datafs).await.err().unwrap();
    assert!(matches!(error, FeedError::Volume { .. }), "{error}");
    assert!(error.to_string().contains("digits@v2:/train"));
    let live: DatasetSpec = "digits:/train".parse().unwrap();
    let error = live.open(&datafs).await.unwrap().plan(&options).await.unwrap_err();
    assert!(matches!(&error, FeedError::Corrupt { file, .. } if file.ends_with("0.parquet")), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn feed_removes_cache_keys_of_earlier_releases() {
    let home = tempfile::tempdir().unwrap();
    let datafs = Datafs::open(home.path(), &Config::default()).unwrap();
    let name = "digits".parse().unwrap();
    datafs.volume_create(&name).unwrap();
    let live = datafs.view(&"digits".parse().unwrap()).unwrap();
    live.write_file("0.parquet", &parquet(&[rows(0, 30)])).unwrap();
    datafs.snapshot_create(&name, &"v1".parse().unwrap()).unwrap();
    let old = millrace_datafs::Publish::new()
        .put_key("snapshot/digits@v0#1/feed/dataset/00/0000", vec![7; 1_000])
        // Of another program.
        .put_key("snapshot/digits", "value")
        .put_key("ingest/kept", "value");
    live.publish(old).unwrap();
    let spec: DatasetSpec = "digits@v1:/".parse().unwrap();
    spec.open(&datafs).await.unwrap().plan(&PlanOptions::default()).await.unwrap();
    let keys: Vec<_> = live.key_scan("").unwrap().into_iter().map(|(key, _)| key).collect();
    assert_eq!(keys, ["ingest/kept", "snapshot/digits"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_description_in_the_home_is_made_again() {
    let home = tempfile::tempdir().unwrap();
    let datafs = Datafs::open(home.path(), &Config::default()).unwrap();
    let name = "digits".parse().unwrap();
    datafs.volume_create(&name).unwrap();
    let live = datafs.view(&"digits".parse().unwrap()).unwrap();
    for (file, ids) in [("a", 0..9), ("b", 10..19)] {
        let lines: String = ids.map(|id| format!("{{\"id\":{:02}}}\n", 10 + id)).collect();
        live.write_file(&format!("{file}.jsonl"), lines.as_bytes()).unwrap();
    }
    datafs.snapshot_create(&name, &"v1".parse().unwrap()).unwrap();
    let spec: DatasetSpec = "digits@v1:/".parse().unwrap();
    let plan = async || spec.open(&datafs).await.unwrap().plan(&PlanOptions::default()).await.unwrap();
    let first = plan().await;
    for entry in std::fs::read_dir(home.path().join("feed")).unwrap() {
        let path = entry.unwrap().path();
        let mut entry = std::fs::read(&path).unwrap();
        let at = entry.windows(7).position(|part| part == b"b.jsonl").unwrap();
        entry[at] = b'a';
        std::fs::write(path, entry).unwrap();
    }
    let again = plan().await;
    assert_eq!(again.id(), first.id());
    let files: Vec<_> = again.dataset().files().iter().map(|file| file.path.as_str()).collect();
    assert_eq!(files, ["a.jsonl", "b.jsonl"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_live_feed_never_mixes_two_states_of_a_file() {
    let home = tempfile::tempdir().unwrap();
    let datafs = Datafs::open(home.path(), &Config::default()).unwrap();
    datafs.volume_create(&"digits".parse().unwrap()).unwrap();
    let live = datafs.view(&"digits".parse().unwrap()).unwrap();
    // Two states with the same shape: only the rows tell them apart.
    live.write_file("0.parquet", &parquet(&[rows(0, 30), rows(30, 30)])).unwrap();
    let spec: DatasetSpec = "digits:/".parse().unwrap();
    let options = PlanOptions { batch_rows: 10, lanes: 1, window_rows: 1, ..PlanOptions::default() };
    let opened = spec.open(&datafs).await.unwrap();
    let plan = opened.plan(&options).await.unwrap();
    let options = FeedOptions { cache_bytes_max: 1, ..FeedOptions::default() };
    let feed = Feed::open(plan, opened.store().clone(), &options).unwrap();
    feed.batch(0, 0..10).await.unwrap();
    live.write_file("0.parquet", &parquet(&[rows(1_000, 30), rows(1_030, 30)])).unwrap();
    let mut error = None;
    for step in 1..6 {
        error = error.or(feed.batch(step, 0..10).await.err());
    }
    let error = error.expect("rows of two states came out of one file");
    assert!(matches!(&error, FeedError::Changed { file, .. } if file == "0.parquet"), "{error}");
    assert!(error.to_string().contains("feed a snapshot"), "{error}");
}
