//! Tests of jobs that skip tombstones: what lands, what is counted, and the offsets that move past them.

use arrow::datatypes::DataType;
use millrace_ingest::{JobConfig, Progress, Tombstones, Until, offsets, run_with_progress};
use millrace_streams::topic::OutRecord;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::site::{Seeded, Site, column, files, job, record, wait_for};

fn tombstone(id: usize) -> OutRecord {
    OutRecord {
        topic: "events".to_owned(),
        partition: Some(0),
        key: Some(format!("key-{id}").into()),
        ..OutRecord::default()
    }
}

fn skipping() -> JobConfig {
    JobConfig { tombstones: Tombstones::Skip, ..job("events") }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn skipped_tombstones_are_counted_and_offsets_pass_them() {
    let site = Site::start().await;
    site.topic("events", 1).await;
    // More tombstones than values: as dead letters, they would refuse the topic.
    site.produce((0..30).map(tombstone)).await;
    site.produce((30..50).map(|id| record("events", id, 20))).await;
    let report = site.land(&skipping()).await.unwrap();
    assert_eq!((report.records, report.landed, report.dead_letters), (50, 19, 1), "{report:?}");
    assert_eq!((report.tombstones_skipped, report.offsets[&0]), (30, 50));
    assert_eq!(report.warnings, [""; 0]);

    // An interval that holds nothing else is committed once, without a file.
    site.produce((50..55).map(tombstone)).await;
    let report = site.land(&skipping()).await.unwrap();
    assert_eq!((report.records, report.tombstones_skipped, report.commits), (5, 5, 1), "{report:?}");
    assert_eq!((report.files, report.offsets[&0]), (0, 55));
    assert_eq!(offsets(&site.view()).unwrap()["events"][&0], 55);
    let again = site.land(&skipping()).await.unwrap();
    assert_eq!((again.records, again.commits, again.tombstones_skipped), (0, 0, 0), "{again:?}");

    // Without the key they are dead letters again, from the committed offset on.
    site.produce([tombstone(55)]).await;
    let report = site.land(&job("events")).await.unwrap();
    assert_eq!((report.dead_letters, report.tombstones_skipped, report.offsets[&0]), (1, 0, 56));
    assert_eq!(site.rows("data").await.len(), 19);
    let dead: Vec<_> = site.rows("dead_letters/job").await.into_keys().collect();
    assert_eq!(dead, [(0, 39), (0, 55)]);
    site.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn skipped_tombstones_alone_do_not_decide_the_schema() {
    let site = Site::start().await;
    site.topic("events", 1).await;
    site.produce((0..20).map(tombstone)).await;
    let mut job = skipping();
    job.flush_ms = 1;
    let (sender, mut progress) = watch::channel(Progress::default());
    let cancel = CancellationToken::new();
    let landing = {
        let (job, datafs, kafka, cancel) =
            (job.clone(), site.datafs.clone(), site.kafka.clone(), cancel.clone());
        tokio::spawn(
            async move { run_with_progress(&job, &datafs, &kafka, cancel, Until::Forever, sender).await },
        )
    };
    // They are committed while the job runs, before there is any column.
    wait_for(&mut progress, |p| p.tombstones_skipped == 20 && p.offsets.get(&0) == Some(&20)).await;
    cancel.cancel();
    assert_eq!(landing.await.unwrap().unwrap().files, 0);

    // The first values decide: of whole numbers and fractions, the column is float64.
    job.flush_ms = 10_000;
    let value = |v: &'static str| OutRecord::new("events", v);
    site.produce([value(r#"{"v":1}"#), tombstone(20), value(r#"{"v":0.5}"#)]).await;
    let report = site.land(&job).await.unwrap();
    assert_eq!((report.landed, report.dead_letters, report.tombstones_skipped), (2, 0, 1), "{report:?}");
    let (_, batches) = files(&site.view(), "data").await.remove(0);
    assert_eq!(column(&batches[0], "v").data_type(), &DataType::Float64);
    site.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_mix_of_records_lands_exactly_its_values() {
    let site = Site::start().await;
    site.topic("events", 1).await;
    let mut seeded = Seeded(11);
    let (mut next, mut values, mut dead, mut skipped) = (0i64, Vec::new(), Vec::new(), 0);
    for _ in 0..6 {
        let mut records = Vec::new();
        let mut found = 0;
        for _ in 0..seeded.below(40) {
            match seeded.below(4) {
                0 => {
                    records.push(OutRecord { partition: Some(0), ..OutRecord::new("events", "no JSON") });
                    dead.push((0, next));
                }
                1 => {
                    records.push(OutRecord { partition: Some(0), ..record("events", next as usize, 0) });
                    values.push((0, next));
                }
                _ => {
                    records.push(tombstone(next as usize));
                    found += 1;
                }
            }
            next += 1;
        }
        site.produce(records).await;
        // Declared columns, since half of a sample may be broken.
        let job = JobConfig {
            schema: Some(crate::landing::declared(&[("id", "int64"), ("text", "utf8")])),
            flush_rows_max: 1 + seeded.below(9),
            ..skipping()
        };
        assert_eq!(site.land(&job).await.unwrap().tombstones_skipped, found);
        skipped += found;
    }
    assert_eq!(site.rows("data").await.into_keys().collect::<Vec<_>>(), values);
    assert_eq!(site.rows("dead_letters/job").await.into_keys().collect::<Vec<_>>(), dead);
    assert_eq!((values.len() + dead.len()) as i64 + skipped as i64, next);
    if next > 0 {
        assert_eq!(offsets(&site.view()).unwrap()["events"][&0], next);
    }
    site.stop().await;
}
