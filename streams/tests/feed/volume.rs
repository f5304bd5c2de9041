//! Datasets in volumes: opened by name, planned once per snapshot.

use millrace_datafs::{Config, Datafs};
use millrace_streams::dataset::DatasetSpec;
use millrace_streams::feed::{Feed, FeedError, FeedOptions, PlanOptions};

use super::data::{parquet, rows};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_is_fed_whatever_happens_to_the_volume() {
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
    let keys = live.key_scan("snapshot/digits@v1#").unwrap();
    assert_eq!(keys.len(), 2, "the description and its one part");
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
