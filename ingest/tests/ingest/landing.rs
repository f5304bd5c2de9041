//! Tests of landing: rows, dead letters, files, schema, offsets.

use arrow::array::{Array, AsArray};
use arrow::datatypes::{DataType, Float32Type, Int64Type};
use millrace_datafs::Name;
use millrace_ingest::config::Compression;
use millrace_ingest::schema::DeclaredSchema;
use millrace_ingest::{DeadLetter, Progress, Until, offsets, run_with_progress};
use millrace_streams::topic::{Consumer, EARLIEST, OutRecord, Records};
use parquet::arrow::arrow_reader::{ArrowReaderOptions, ParquetRecordBatchReaderBuilder};
use parquet::file::metadata::PageIndexPolicy;
use std::time::Duration;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::site::{Seeded, Site, column, contents, files, job, record, wait_for};

pub(crate) fn declared(entries: &[(&str, &str)]) -> DeclaredSchema {
    let entry = |(name, kind): &(&str, &str)| ((*name).to_owned(), (*kind).to_owned());
    DeclaredSchema(entries.iter().map(entry).collect())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_land_and_bad_ones_become_dead_letters() {
    let site = Site::start().await;
    site.topic("events", 3).await;
    site.produce((0..3000).map(|id| record("events", id, 100))).await;
    site.produce([OutRecord {
        topic: "events".to_owned(),
        partition: Some(1),
        key: Some("tomb".into()),
        ..OutRecord::default()
    }
    .header("origin", "test")])
        .await;

    let job = job("events");
    let report = site.land(&job).await.unwrap();
    assert_eq!((report.records, report.landed, report.dead_letters), (3001, 2970, 31));
    assert_eq!(report.offsets.values().sum::<i64>(), 3001);
    assert_eq!(site.prove(&job).await, (2970, 31));

    let rows = site.rows("data").await;
    let batch = rows.values().next().unwrap();
    assert_eq!(batch.schema().field(0).data_type(), &DataType::Int64);
    assert_eq!(column(batch, "_topic").as_string::<i32>().value(0), "events");
    let mut ids: Vec<i64> =
        rows.values().map(|row| column(row, "id").as_primitive::<Int64Type>().value(0)).collect();
    ids.sort_unstable();
    let good: Vec<i64> = (0..3000).filter(|id| id % 100 != 99).collect();
    assert_eq!(ids, good);

    // A dead letter is the whole record and the reason.
    let dead = site.rows("dead_letters/job").await;
    let reason = |row| column(row, "_reason").as_string::<i32>().value(0).to_owned();
    let tomb = dead.values().find(|row| column(row, "_value").is_null(0)).unwrap();
    assert_eq!(reason(tomb), "no value (a tombstone)");
    assert_eq!(column(tomb, "_key").as_binary::<i32>().value(0), b"tomb");
    assert_eq!(column(tomb, "_headers").as_list::<i32>().value(0).len(), 1);
    let broken = dead.values().find(|row| !column(row, "_value").is_null(0)).unwrap();
    assert!(reason(broken).starts_with("not JSON at byte"));
    let value = column(broken, "_value").as_binary::<i32>().value(0);
    assert!(value.ends_with(b"\"text\": "));

    // A second run finds no new records and changes nothing.
    let again = site.land(&job).await.unwrap();
    assert_eq!((again.records, again.commits, again.files), (0, 0, 0));
    site.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn declared_digits_land_as_fixed_lists() {
    let site = Site::start().await;
    site.topic("digits", 1).await;
    let pixels = |n: usize| vec!["16"; n].join(",");
    let digit = |id, n| format!("{{\"id\":{id},\"pixels\":[{}],\"label\":7}}", pixels(n));
    site.produce((0..100).map(|id| OutRecord::new("digits", digit(id, 64)))).await;
    site.produce([OutRecord::new("digits", digit(100, 63))]).await;

    let mut job = job("digits");
    job.schema = Some(declared(&[("id", "int64"), ("pixels", "fixed_list<float32,64>"), ("label", "int64")]));
    job.compression = Compression::Snappy;
    job.lineage = false;
    let report = site.land(&job).await.unwrap();
    assert_eq!((report.landed, report.dead_letters), (100, 1));
    let (path, batches) = files(&site.view(), "data").await.remove(0);
    assert_eq!(path, "data/0-00000000000000000000-00000000000000000099.parquet");
    let schema = batches[0].schema();
    assert_eq!(schema.fields().len(), 3);
    assert!(!schema.field(1).is_nullable());
    let pixels = column(&batches[0], "pixels").as_fixed_size_list();
    assert_eq!(pixels.value_length(), 64);
    let values = pixels.values().as_primitive::<Float32Type>();
    assert!(values.iter().all(|v| v == Some(16.0)));
    site.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inferred_schema_keeps_types_and_gains_columns() {
    let site = Site::start().await;
    site.topic("events", 1).await;
    let job = job("events");
    let produce = |values: &[&'static str]| {
        let records: Vec<_> = values.iter().map(|v| OutRecord::new("events", *v)).collect();
        site.produce(records)
    };
    produce(&[r#"{"id":1}"#, r#"{"id":2,"score":0.5}"#]).await;
    assert_eq!(site.land(&job).await.unwrap().landed, 2);
    // A value of another type in a known column is a dead letter; new columns may appear later.
    produce(&[
        r#"{"id":3}"#,
        r#"{"id":"four"}"#,
        r#"{"id":5,"tags":["x","y"]}"#,
        r#"{"tags":[],"id":6,"note":"n"}"#,
        r#"{"id":7}"#,
    ])
    .await;
    let report = site.land(&job).await.unwrap();
    assert_eq!((report.landed, report.dead_letters, report.files), (4, 1, 4));
    assert_eq!(site.prove(&job).await, (6, 1));
    let names: Vec<Vec<String>> = files(&site.view(), "data")
        .await
        .iter()
        .map(|(_, batches)| {
            let schema = batches[0].schema();
            let names = schema.fields().iter().map(|field| field.name().clone());
            names.filter(|name| !name.starts_with('_')).collect()
        })
        .collect();
    assert_eq!(
        names,
        [&["id", "score"][..], &["id", "score"], &["id", "score", "tags"], &["id", "score", "tags", "note"],]
    );
    site.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_are_grouped_by_hour() {
    let site = Site::start().await;
    site.topic("events", 1).await;
    let hour = 3_600_000;
    let record = |id: i64, ms: i64| OutRecord { timestamp_ms: Some(ms), ..record("events", id as usize, 0) };
    let start = 1_795_222_800_000; // 2026-11-21T01:00:00Z
    site.produce((0..60).map(|id| record(id, start + (id % 3) * hour))).await;
    let mut job = job("events");
    job.partition_by_time = true;
    site.land(&job).await.unwrap();
    let paths: Vec<String> = files(&site.view(), "data").await.into_iter().map(|(path, _)| path).collect();
    assert_eq!(
        paths,
        [
            "data/dt=2026-11-21/hr=01/0-00000000000000000000-00000000000000000057.parquet",
            "data/dt=2026-11-21/hr=02/0-00000000000000000001-00000000000000000058.parquet",
            "data/dt=2026-11-21/hr=03/0-00000000000000000002-00000000000000000059.parquet",
        ]
    );
    assert_eq!(site.prove(&job).await, (60, 0));
    site.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_groups_have_4_to_16_mib_and_pages_an_index() {
    let site = Site::start().await;
    site.topic("events", 1).await;
    let mut seeded = Seeded(7);
    let mut noise = || -> String {
        let word = |seeded: &mut Seeded| format!("{:016x}", seeded.next());
        (0..128).map(|_| word(&mut seeded)).collect()
    };
    // Hexadecimal noise halves under zstd: 40 MiB make more than two row groups of 8 MiB.
    let records: Vec<_> = (0..20_000)
        .map(|id| OutRecord::new("events", format!("{{\"id\":{id},\"noise\":\"{}\"}}", noise())))
        .collect();
    site.produce(records).await;
    let job = job("events");
    let report = site.land(&job).await.unwrap();
    assert_eq!((report.landed, report.files), (20_000, 1));
    let (_, bytes) = contents(&site.view().object_store(), "data").await.remove(0);
    let options = ArrowReaderOptions::new().with_page_index_policy(PageIndexPolicy::Required);
    let file = ParquetRecordBatchReaderBuilder::try_new_with_options(bytes, options).unwrap();
    let groups = file.metadata().row_groups();
    assert!(groups.len() >= 2, "{} row groups", groups.len());
    for group in &groups[..groups.len() - 1] {
        let mib = group.compressed_size() as f64 / f64::from(1 << 20);
        assert!((4.0..=16.0).contains(&mib), "{mib} MiB");
    }
    assert!(file.metadata().offset_index().is_some());
    assert!(file.metadata().column_index().is_some());
    site.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_topic_is_flushed_by_the_clock_and_cancellation_flushes_the_rest() {
    let site = Site::start().await;
    site.topic("events", 2).await;
    let mut job = job("events");
    job.flush_ms = 20;
    let (progress, mut watched) = watch::channel(Progress::default());
    let cancel = CancellationToken::new();
    let running = {
        let (job, datafs, kafka) = (job.clone(), site.datafs.clone(), site.kafka.clone());
        let cancel = cancel.clone();
        tokio::spawn(async move {
            run_with_progress(&job, &datafs, &kafka, cancel, Until::Forever, progress).await
        })
    };
    site.produce((0..10).map(|id| record("events", id, 0))).await;
    wait_for(&mut watched, |p| p.landed == 10).await;
    site.produce((10..20).map(|id| record("events", id, 0))).await;
    wait_for(&mut watched, |p| p.records == 20).await;
    cancel.cancel();
    let report = running.await.unwrap().unwrap();
    assert_eq!(report.landed, 20);
    assert!(report.commits >= 2);
    assert_eq!(site.prove(&job).await, (20, 0));
    site.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_letters_go_to_a_topic() {
    let site = Site::start().await;
    site.topic("events", 1).await;
    site.produce((0..30).map(|id| record("events", id, 10))).await;
    let mut job = job("events");
    job.dead_letter = DeadLetter::Topic("events-dead".to_owned());
    let report = site.land(&job).await.unwrap();
    assert_eq!((report.landed, report.dead_letters), (27, 3));

    let start = [("events-dead".to_owned(), 0, EARLIEST)];
    let mut consumer = Consumer::assign(&site.kafka, &start).await.unwrap();
    let mut keys = Vec::new();
    while keys.len() < 3 {
        let batch = consumer.next(10, 1 << 20, Duration::from_secs(30)).await.unwrap().expect("dead letters");
        let records = Records::new(&batch).unwrap();
        for row in 0..records.len() {
            keys.push(String::from_utf8(records.key(row).unwrap().to_vec()).unwrap());
            let headers = records.headers(row);
            let header = |name| {
                let (_, value) = headers.iter().find(|(key, _)| *key == name).unwrap();
                String::from_utf8(value.unwrap().to_vec()).unwrap()
            };
            assert!(header("millrace.reason").starts_with("not JSON"));
            assert!(header("millrace.key").starts_with("key-"));
            assert!(records.value(row).unwrap().starts_with(b"{\"id\""));
        }
    }
    assert_eq!(keys, ["events/0/9", "events/0/19", "events/0/29"]);
    site.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_letter_too_large_for_its_topic_names_the_record() {
    let site = Site::start().await;
    site.topic("events", 1).await;
    // The largest record that this library's producers send.
    let large = "x".repeat(999_900);
    site.produce([
        OutRecord::new("events", large.clone()).key("key"),
        record("events", 9, 10),
        record("events", 1, 0),
    ])
    .await;
    let mut job = job("events");
    job.dead_letter = DeadLetter::Topic("events-dead".to_owned());
    let report = site.land(&job).await.unwrap();
    assert_eq!((report.landed, report.dead_letters), (1, 2));

    let start = [("events-dead".to_owned(), 0, EARLIEST)];
    let mut consumer = Consumer::assign(&site.kafka, &start).await.unwrap();
    let mut letters = std::collections::BTreeMap::new();
    while letters.len() < 2 {
        let batch = consumer.next(10, 1 << 20, Duration::from_secs(30)).await.unwrap().expect("dead letters");
        let records = Records::new(&batch).unwrap();
        for row in 0..records.len() {
            let key = String::from_utf8(records.key(row).unwrap().to_vec()).unwrap();
            let headers: Vec<String> = records
                .headers(row)
                .iter()
                .map(|(key, value)| format!("{key}={}", String::from_utf8_lossy(value.unwrap())))
                .collect();
            letters.insert(key, (records.value(row).map(<[u8]>::len), headers));
        }
    }
    let (value, headers) = &letters["events/0/0"];
    assert_eq!(*value, None);
    assert!(headers[0].starts_with("millrace.reason=not JSON"), "{headers:?}");
    assert_eq!(
        headers[1..],
        ["millrace.topic=events", "millrace.partition=0", "millrace.offset=0", "millrace.value_bytes=999900"]
    );
    assert!(letters["events/0/1"].0.is_some());
    site.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_schema_is_decided_before_large_records_fill_the_memory() {
    let site = Site::start().await;
    site.topic("events", 1).await;
    let text = "x".repeat(900_000);
    let value = |id: usize| format!("{{\"id\": {id}, \"text\": \"{text}\"}}");
    site.produce((0..24).map(|id| OutRecord::new("events", value(id)))).await;
    // Of another type, and behind the records that wait for the schema.
    site.produce([OutRecord::new("events", r#"{"id": 24.5}"#)]).await;
    let job = job("events");
    let report = site.land(&job).await.unwrap();
    assert_eq!((report.landed, report.dead_letters), (24, 1));
    assert_eq!(site.prove(&job).await, (24, 1));
    site.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_keeps_its_offsets() {
    let site = Site::start().await;
    site.topic("events", 1).await;
    let job = job("events");
    site.produce((0..10).map(|id| record("events", id, 0))).await;
    site.land(&job).await.unwrap();
    let (volume, snapshot): (Name, Name) = ("records".parse().unwrap(), "v1".parse().unwrap());
    site.datafs.snapshot_create(&volume, &snapshot).unwrap();
    site.produce((10..25).map(|id| record("events", id, 0))).await;
    site.land(&job).await.unwrap();
    let then = site.datafs.view(&"records@v1".parse().unwrap()).unwrap();
    assert_eq!(offsets(&then).unwrap()["events"][&0], 10);
    assert_eq!(offsets(&site.view()).unwrap()["events"][&0], 25);
    assert_eq!(files(&then, "data").await.len(), 1);
    assert_eq!(files(&site.view(), "data").await.len(), 2);
    site.stop().await;
}
