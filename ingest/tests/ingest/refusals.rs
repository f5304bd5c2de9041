//! Tests of refusals: one clear error line, and no partial result.

use std::process::Command;

use millrace_datafs::Publish;
use millrace_ingest::decode::UnknownFields;
use millrace_ingest::{Config, DeadLetter, Error, JobConfig, Until, offsets, run};
use millrace_streams::topic::{self, OutRecord};
use tokio_util::sync::CancellationToken;

use crate::landing::declared;
use crate::site::{Seeded, Site, VOLUME, files, job, open, record};

fn one_line(error: &Error, parts: &[&str]) {
    let text = error.to_string();
    assert!(!text.contains('\n'), "{text}");
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_topics_and_volumes_are_named() {
    let site = Site::start().await;
    let error = site.land(&job("nowhere")).await.unwrap_err();
    assert!(matches!(error, Error::TopicMissing { .. }), "{error:?}");
    one_line(&error, &["topic nowhere does not exist", &site.kafka.bootstrap_servers]);

    site.topic("events", 1).await;
    let mut job = job("events");
    job.volume = "nothing".to_owned();
    let error = site.land(&job).await.unwrap_err();
    assert!(matches!(error, Error::VolumeMissing { .. }), "{error:?}");
    one_line(&error, &["millrace volume create nothing"]);
    site.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_keeps_its_schema_topic_and_folder() {
    let site = Site::start().await;
    site.topic("events", 1).await;
    site.topic("others", 1).await;
    site.produce([OutRecord::new("events", r#"{"id":1}"#)]).await;
    let mut first = job("events");
    first.schema = Some(declared(&[("id", "int64")]));
    site.land(&first).await.unwrap();

    let mut changed = first.clone();
    changed.schema = Some(declared(&[("id", "utf8")]));
    let error = site.land(&changed).await.unwrap_err();
    assert!(matches!(error, Error::SchemaMismatch { .. }), "{error:?}");
    one_line(&error, &["\"id\" is int64 in the volume and declared as utf8"]);

    changed.schema = Some(declared(&[("id", "int64"), ("note", "utf8?")]));
    site.produce([OutRecord::new("events", r#"{"id":2,"note":"n"}"#)]).await;
    assert_eq!(site.land(&changed).await.unwrap().landed, 1);

    for (job, what) in [
        (JobConfig { path: "else".to_owned(), ..changed.clone() }, "lands in folder data"),
        (JobConfig { topic: "others".to_owned(), ..changed.clone() }, "lands topic events"),
    ] {
        let error = site.land(&job).await.unwrap_err();
        assert!(matches!(error, Error::JobChanged { .. }), "{error:?}");
        one_line(&error, &[what]);
    }
    for (path, what) in [
        ("data", "cannot use folder data: data belongs to job job (topic events)"),
        ("data/inner", "cannot use folder data/inner: data belongs to job job"),
        ("dead_letters/job", "folder dead_letters/job: dead_letters/job belongs to job job"),
    ] {
        let job = JobConfig { name: "second".to_owned(), path: path.to_owned(), ..changed.clone() };
        let error = site.land(&job).await.unwrap_err();
        assert!(matches!(error, Error::FolderTaken { .. }), "{error:?}");
        one_line(&error, &[what, "choose another path"]);
    }
    assert_eq!(site.prove(&changed).await, (2, 0));
    site.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_offset_that_the_topic_lacks_is_refused() {
    let site = Site::start().await;
    site.topic("events", 1).await;
    site.produce((0..5).map(|id| record("events", id, 0))).await;
    // As if the topic had been longer when it landed.
    let publish = Publish::new().put_key("ingest/job/events/0", b"50".to_vec());
    site.view().publish(publish).unwrap();
    let error = site.land(&job("events")).await.unwrap_err();
    assert!(matches!(error, Error::OffsetLost { .. }), "{error:?}");
    one_line(&error, &["offsets 0 to 5", "continues at 50", "created again or truncated"]);
    assert!(!error.is_retryable());

    let publish = Publish::new().put_key("ingest/job/events/0", b"many".to_vec());
    site.view().publish(publish).unwrap();
    let error = site.land(&job("events")).await.unwrap_err();
    assert!(matches!(error, Error::CorruptState { .. }), "{error:?}");
    assert!(offsets(&site.view()).is_err());
    site.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recreated_topic_is_refused_at_any_length() {
    let site = Site::start().await;
    site.topic("events", 2).await;
    let records = |text: &str, count: usize| -> Vec<OutRecord> {
        let value = |id: usize| format!("{{\"id\": {id}, \"text\": \"{text} {id}\"}}");
        (0..count).map(|id| OutRecord::new("events", value(id)).partition(1)).collect()
    };
    site.produce(records("old", 5)).await;
    assert_eq!(site.land(&job("events")).await.unwrap().landed, 5);
    // The same topic, longer: the job continues.
    site.produce(records("more", 2)).await;
    assert_eq!(site.land(&job("events")).await.unwrap().landed, 2);

    topic::delete_topic(&site.kafka, "events").await.unwrap();
    site.topic("events", 2).await;
    // First as long as the old topic was, then longer.
    for produced in [7, 3] {
        site.produce(records("new", produced)).await;
        let error = site.land(&job("events")).await.unwrap_err();
        assert!(
            matches!(error, Error::TopicReplaced { partition: 1, offset: 6, .. }),
            "after {produced} more: {error:?}"
        );
        one_line(&error, &["topic events was deleted and created again", "new job name and path"]);
        assert!(!error.is_retryable());
    }
    assert_eq!(site.prove(&job("events")).await, (7, 0));
    let other = JobConfig { name: "again".to_owned(), path: "again".to_owned(), ..job("events") };
    assert_eq!(site.land(&other).await.unwrap().landed, 10);
    site.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_whose_records_mostly_do_not_decode_is_refused() {
    let site = Site::start().await;
    site.topic("numbers", 1).await;
    let number = |id: usize| match id {
        0 => OutRecord::new("numbers", r#"{"v": "n/a"}"#),
        id if id % 2 == 0 => OutRecord::new("numbers", format!("{{\"v\": {id}}}")),
        id => OutRecord::new("numbers", format!("{{\"v\": {id}.5}}")),
    };
    site.produce((0..1000).map(number)).await;
    let report = site.land(&job("numbers")).await.unwrap();
    assert_eq!((report.landed, report.dead_letters), (999, 1), "the first value alone decides nothing");

    site.topic("noise", 1).await;
    site.produce((0..100).map(|id| OutRecord::new("noise", format!("line {id}")))).await;
    let noise = JobConfig { name: "noise".to_owned(), path: "noise".to_owned(), ..job("noise") };
    let error = site.land(&noise).await.unwrap_err();
    assert!(matches!(error, Error::MostlyDead { records: 100, dead: 100, .. }), "{error:?}");
    one_line(
        &error,
        &[
            "100 of the first 100 records",
            "topic noise",
            "declare its columns",
            "[[ingest.jobs]]",
            "type json",
        ],
    );
    assert!(!offsets(&site.view()).unwrap().contains_key("noise"), "nothing was committed");
    // With declared columns, dead letters are accepted.
    let declared = JobConfig { schema: Some(declared(&[("v", "int64")])), ..noise };
    let report = site.land(&declared).await.unwrap();
    assert_eq!(report.dead_letters, 100);
    assert!(report.warnings[0].contains("100 of the first 100 records"), "{:?}", report.warnings);
    site.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn declared_column_missing_from_all_records_is_warned_about() {
    let site = Site::start().await;
    site.topic("events", 1).await;
    site.produce((0..20).map(|id| record("events", id, 0))).await;
    let with = |name: &str, columns: &[(&str, &str)], unknown| JobConfig {
        name: name.to_owned(),
        path: name.to_owned(),
        schema: Some(declared(columns)),
        unknown_fields: Some(unknown),
        ..job("events")
    };
    let right = with("right", &[("id", "int64"), ("text", "utf8?")], UnknownFields::Reject);
    assert_eq!(site.land(&right).await.unwrap().warnings, [""; 0]);

    let ignored = with("ignored", &[("id", "int64"), ("txet", "utf8?")], UnknownFields::Ignore);
    let report = site.land(&ignored).await.unwrap();
    assert_eq!((report.landed, report.warnings.len()), (20, 1));
    let warning = "none of the first 20 records of topic events has the declared column \"txet\"";
    assert!(report.warnings[0].contains(warning), "{:?}", report.warnings);
    // The warning comes once, not at every run.
    site.produce([record("events", 20, 0)]).await;
    assert_eq!(site.land(&ignored).await.unwrap().warnings, [""; 0]);

    let rejected = with("rejected", &[("id", "int64"), ("txet", "utf8?")], UnknownFields::Reject);
    let report = site.land(&rejected).await.unwrap();
    assert_eq!((report.landed, report.dead_letters), (0, 21));
    let warning = "21 of the first 21 records of topic events are dead letters (the first: field \"text\" is \
                   not in the schema)";
    assert!(report.warnings[0].contains(warning), "{:?}", report.warnings);
    site.stop().await;
}

#[test]
fn bad_settings_are_named() {
    let good = job("events");
    Config { jobs: vec![good.clone()] }.validate().unwrap();
    for (what, job) in [
        ("needs a name", JobConfig { name: String::new(), ..good.clone() }),
        ("invalid name", JobConfig { name: "a/b".to_owned(), ..good.clone() }),
        ("not a topic name", JobConfig { topic: "a b".to_owned(), ..good.clone() }),
        ("must name a folder", JobConfig { path: "/".to_owned(), ..good.clone() }),
        ("not a folder", JobConfig { path: "a/../b".to_owned(), ..good.clone() }),
        ("flush_ms must be", JobConfig { flush_ms: 0, ..good.clone() }),
        ("depth_max must be", JobConfig { depth_max: 1000, ..good.clone() }),
        ("record_bytes_max", JobConfig { record_bytes_max: 0, ..good.clone() }),
        (
            "cannot lie in the folder",
            JobConfig { dead_letter: DeadLetter::Directory("data".to_owned()), ..good.clone() },
        ),
        (
            "cannot go to the topic",
            JobConfig { dead_letter: DeadLetter::Topic("events".to_owned()), ..good.clone() },
        ),
        ("not a type", JobConfig { schema: Some(declared(&[("a", "int")])), ..good.clone() }),
    ] {
        let error = Config { jobs: vec![job] }.validate().unwrap_err();
        one_line(&error, &[what]);
    }
    let twice = Config { jobs: vec![good.clone(), good.clone()] };
    one_line(&twice.validate().unwrap_err(), &["same name"]);
    let inside = JobConfig { name: "b".to_owned(), path: "data/b".to_owned(), ..good.clone() };
    let nested = Config { jobs: vec![good.clone(), inside] };
    one_line(&nested.validate().unwrap_err(), &["inside each other"]);
    let other = JobConfig {
        name: "b".to_owned(),
        path: "other".to_owned(),
        dead_letter: DeadLetter::Directory("data".to_owned()),
        ..good.clone()
    };
    for jobs in [vec![good.clone(), other.clone()], vec![other, good]] {
        let error = Config { jobs }.validate().unwrap_err();
        one_line(&error, &["dead letters of job b", "files of job job"]);
    }
}

/// A mounted tmpfs; [`Tmpfs::mount`] returns `None` where mounting is not permitted.
struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    fn mount(mib: u32) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={mib}m"), "tmpfs"])
            .arg(dir.path())
            .output();
        match mounted {
            Ok(output) if output.status.success() => Some(Self(dir)),
            Ok(output) => {
                let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
                millrace_testing::skip(millrace_testing::Need::Disk, why);
                None
            }
            Err(error) => {
                millrace_testing::skip(millrace_testing::Need::Disk, error);
                None
            }
        }
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        // Lazily: the datafs of a failed test may still have open files.
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_disk_fails_run_with_one_error_and_next_run_continues() {
    const RECORDS: i64 = 12_000;
    let Some(small) = Tmpfs::mount(48) else {
        return;
    };
    let site = Site::start().await;
    site.topic("events", 1).await;
    let mut seeded = Seeded(3);
    let records: Vec<_> = (0..RECORDS)
        .map(|id| {
            let noise: String = (0..128).map(|_| format!("{:016x}", seeded.next())).collect();
            OutRecord::new("events", format!("{{\"id\":{id},\"noise\":\"{noise}\"}}"))
        })
        .collect();
    site.produce(records).await;

    let datafs = open(small.0.path());
    datafs.volume_create(&VOLUME.parse().unwrap()).unwrap();
    // The 6 MiB left hold some publishes but not all: the files have 12 MiB.
    let filler = small.0.path().join("filler");
    std::fs::write(&filler, vec![1u8; 42 << 20]).unwrap();
    let mut job = job("events");
    job.flush_rows_max = 500;
    let land = || run(&job, &datafs, &site.kafka, CancellationToken::new(), Until::CaughtUp);
    let error = land().await.unwrap_err();
    assert!(matches!(error, Error::NoSpace { .. }), "{error:?}");
    assert!(error.is_retryable());
    one_line(&error, &["no space left", "free space and run again"]);

    // The visible rows are exactly the committed records.
    let view = datafs.view(&VOLUME.parse().unwrap()).unwrap();
    let committed = offsets(&view).unwrap();
    let committed = committed.get("events").map_or(0, |p| p[&0]);
    let rows = |files: Vec<(String, Vec<arrow::array::RecordBatch>)>| -> usize {
        let batches = files.iter().flat_map(|(_, batches)| batches);
        batches.map(arrow::array::RecordBatch::num_rows).sum()
    };
    assert_eq!(rows(files(&view, "data").await) as i64, committed);
    assert!(committed < RECORDS);

    std::fs::remove_file(&filler).unwrap();
    let report = land().await.unwrap();
    assert_eq!(report.landed as i64, RECORDS - committed);
    assert_eq!(rows(files(&view, "data").await) as i64, RECORDS);
    drop((view, datafs));
    site.stop().await;
}
