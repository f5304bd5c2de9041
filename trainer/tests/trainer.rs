//! Tests of whole jobs: datasets in volumes, worker processes, kills, restarts, bad input.
//!
//! Worker processes are this test binary: `worker_entry` and `job_entry` do nothing unless a test launched
//! the process.
#![allow(clippy::unwrap_used)]

#[path = "trainer/chaos.rs"]
mod chaos;
#[path = "trainer/columns.rs"]
mod columns;
#[path = "trainer/data.rs"]
mod data;
#[path = "trainer/failover.rs"]
mod failover;
#[path = "trainer/fast.rs"]
mod fast;
#[path = "trainer/goals.rs"]
mod goals;
#[path = "trainer/hosts.rs"]
mod hosts;
#[path = "trainer/joined.rs"]
mod joined;
#[path = "trainer/mixed_topics.rs"]
mod mixed_topics;
#[path = "trainer/mixtures.rs"]
mod mixtures;
#[path = "trainer/modes.rs"]
mod modes;
#[path = "trainer/objectives.rs"]
mod objectives;
#[path = "trainer/outages.rs"]
mod outages;
#[path = "trainer/precision.rs"]
mod precision;
#[path = "trainer/selection.rs"]
mod selection;
#[path = "../../datafs/tests/postgres/server.rs"]
mod server;
#[path = "trainer/topics.rs"]
mod topics;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{ArrayRef, AsArray, FixedSizeListArray, Float32Array, Int64Array, RecordBatch};
use arrow::datatypes::{DataType, Field, Float32Type, Int64Type, Schema};
use millrace_datafs::{Datafs, VolumeSpec};
use millrace_trainer::job::JobFile;
use millrace_trainer::launch::{ENV_COORDINATOR, WorkerCommand};
use millrace_trainer::{Config, End, Error, Progress, Setup, TrainReport, train};
use parquet::arrow::ArrowWriter;
use parquet::file::properties::WriterProperties;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

const ROWS: usize = 301;
const WIDTH: usize = 16;
const CLASSES: i64 = 3;
/// The exit code that [`worker_entry`] gives to any error.
const WORKER_EXIT: u8 = 42;
const ENV_HOME: &str = "MILLRACE_TEST_HOME";

/// A worker process, when this binary was launched as one.
#[test]
fn worker_entry() {
    if std::env::var_os(ENV_COORDINATOR).is_some() && millrace_trainer::worker::run(|_| WORKER_EXIT).is_err()
    {
        std::process::exit(1);
    }
}

/// A job process, when this binary was launched as one: writes progress and the report to files.
#[test]
fn job_entry() {
    let Some(home) = std::env::var_os(ENV_HOME).map(PathBuf::from) else { return };
    if std::env::var_os(ENV_COORDINATOR).is_some() {
        return;
    }
    let job = JobFile::load(&home.join("train.toml")).unwrap();
    let progress = home.join("progress.json");
    let setup = Setup { listen: joined::listen_from_env(), ..setup(&home) };
    let report = run(setup, job, |seen| {
        let written = home.join("progress.new");
        std::fs::write(&written, serde_json::to_vec(&seen).unwrap()).unwrap();
        std::fs::rename(&written, &progress).unwrap();
    });
    let report = serde_json::to_vec(&report.unwrap()).unwrap();
    std::fs::write(home.join("report.json"), report).unwrap();
}

/// Points around one centre per class; row `i` is the same in every home.
fn rows(range: std::ops::Range<usize>) -> RecordBatch {
    let noise = |i: usize| {
        let mut z = (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z ^= z >> 29;
        z = z.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (z >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    let class = |row: usize| row as i64 * 7 % CLASSES;
    let values: Vec<f32> = range
        .clone()
        .flat_map(|row| {
            (0..WIDTH).map(move |i| {
                let centre = if i as i64 % CLASSES == class(row) { 1.0 } else { 0.0 };
                centre + 0.8 * noise(row * WIDTH + i)
            })
        })
        .collect();
    let item = Arc::new(Field::new("item", DataType::Float32, true));
    let pixels =
        FixedSizeListArray::new(Arc::clone(&item), WIDTH as i32, Arc::new(Float32Array::from(values)), None);
    let labels = Int64Array::from_iter_values(range.map(class));
    let schema = Schema::new(vec![
        Field::new("pixels", DataType::FixedSizeList(item, WIDTH as i32), true),
        Field::new("label", DataType::Int64, true),
    ]);
    let columns: Vec<ArrayRef> = vec![Arc::new(pixels), Arc::new(labels)];
    RecordBatch::try_new(Arc::new(schema), columns).unwrap()
}

fn parquet_bytes(batch: &RecordBatch) -> Vec<u8> {
    let properties = WriterProperties::builder().set_max_row_group_row_count(Some(70)).build();
    let mut bytes = Vec::new();
    let mut writer = ArrowWriter::try_new(&mut bytes, batch.schema(), Some(properties)).unwrap();
    writer.write(batch).unwrap();
    writer.close().unwrap();
    bytes
}

fn volume(datafs: &Datafs, spec: &str) -> millrace_datafs::View {
    datafs.view(&spec.parse::<VolumeSpec>().unwrap()).unwrap()
}

/// A home with the dataset `data@v1:/train` and the empty volume `models`.
fn home() -> TempDir {
    let home = tempfile::tempdir().unwrap();
    fill(&Datafs::open(home.path(), &millrace_datafs::Config::default()).unwrap());
    home
}

fn fill(datafs: &Datafs) {
    for name in ["data", "models"] {
        datafs.volume_create(&name.parse().unwrap()).unwrap();
    }
    let live = volume(datafs, "data");
    live.write_file("train/a.parquet", &parquet_bytes(&rows(0..200))).unwrap();
    live.write_file("train/b.parquet", &parquet_bytes(&rows(200..ROWS))).unwrap();
    live.write_file("broken/a.parquet", b"PAR1 and then nothing like it PAR1").unwrap();
    live.publish(millrace_datafs::Publish::new().put_key("ingest/landing/digits/0", "301")).unwrap();
    datafs.snapshot_create(&"data".parse().unwrap(), &"v1".parse().unwrap()).unwrap();
}

fn job_text(name: &str, more: &str) -> String {
    format!(
        "name = \"{name}\"\n\
         dataset = \"data@v1:/train\"\n\
         features = \"pixels\"\n\
         label = \"label\"\n\
         model = {{ kind = \"mlp\", inputs = {WIDTH}, hidden = [12], classes = {CLASSES} }}\n\
         optimizer = {{ kind = \"adamw\", learning_rate = 0.01 }}\n\
         batch_rows = 32\n\
         seed = 11\n\
         output = {{ volume = \"models\" }}\n\
         {more}\n"
    )
}

fn job(name: &str, more: &str) -> JobFile {
    JobFile::parse(&job_text(name, more)).unwrap()
}

fn setup(home: &Path) -> Setup {
    setup_with(home, millrace_datafs::Config::default())
}

fn setup_with(home: &Path, datafs_config: millrace_datafs::Config) -> Setup {
    Setup {
        datafs: Datafs::open(home, &datafs_config).unwrap(),
        kafka: None,
        home: home.to_owned(),
        datafs_config,
        config: Config {
            heartbeat_ms: 50,
            heartbeat_lost_ms: 1_500,
            respawn_backoff_ms: 20,
            progress_ms: 2,
            ..Config::default()
        },
        worker: WorkerCommand::current_exe(["--exact", "worker_entry", "--nocapture"]),
        listen: None,
        standby: false,
        abandon_run: false,
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn run(
    setup: Setup,
    job: JobFile,
    on_progress: impl FnMut(Progress) + Send,
) -> millrace_trainer::Result<TrainReport> {
    runtime().block_on(train(job, setup, CancellationToken::new(), on_progress))
}

fn signal(name: &str, pid: u32) {
    assert!(Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status().unwrap().success());
}

/// Whether a process runs; a zombie does not.
fn runs(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| stat.rsplit(')').next().is_some_and(|rest| !rest.trim_start().starts_with('Z')))
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < deadline, "{what} took more than a minute");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn bundle(home: &Path, name: &str, version: u64) -> millrace_bundle::Bundle {
    let datafs = Datafs::open(home, &millrace_datafs::Config::default()).unwrap();
    let store = volume(&datafs, "models").object_store();
    runtime().block_on(millrace_bundle::load(store.as_ref(), "models", name, version)).unwrap()
}

fn versions(home: &Path) -> usize {
    let datafs = Datafs::open(home, &millrace_datafs::Config::default()).unwrap();
    let store = volume(&datafs, "models").object_store();
    runtime().block_on(millrace_bundle::list(store.as_ref(), "models")).unwrap().len()
}

/// Checks that the statistics cover every row of the snapshot once.
fn check_statistics(statistics: &millrace_bundle::Statistics) {
    let all = rows(0..ROWS);
    let pixels = all.column(0).as_fixed_size_list().values().as_primitive::<Float32Type>().values().to_vec();
    assert_eq!((statistics.rows, statistics.column.as_str()), (ROWS as u64, "pixels"));
    assert_eq!(statistics.features.len(), WIDTH);
    for (place, feature) in statistics.features.iter().enumerate() {
        let values: Vec<f64> =
            pixels.iter().skip(place).step_by(WIDTH).map(|value| f64::from(*value)).collect();
        assert_eq!((feature.input.as_str(), feature.element), ("input", place));
        assert_eq!(feature.min, values.iter().copied().fold(f64::MAX, f64::min));
        assert_eq!(feature.max, values.iter().copied().fold(f64::MIN, f64::max));
        let mean = values.iter().sum::<f64>() / ROWS as f64;
        assert!((feature.mean - mean).abs() < 1e-9, "{feature:?}");
        for bin in 0..feature.bins() {
            let inside = values.iter().filter(|value| feature.bin(**value) == bin).count();
            assert!((feature.share(bin) - inside as f64 / ROWS as f64).abs() < 1e-9, "{feature:?}");
        }
    }
}

#[test]
fn any_number_of_workers_gives_the_same_model() {
    let home = home();
    let mut digests = Vec::new();
    for workers in 1..=3 {
        let name = format!("w{workers}");
        let job = job(&name, &format!("workers = {workers}\nepochs_max = 12"));
        let report = run(setup(home.path()), job, |_| {}).unwrap();
        assert_eq!(report.end, End::EpochsDone);
        assert_eq!(report.rows_per_epoch, [ROWS as u64; 12]);
        assert_eq!((report.epochs, report.steps), (12, (12 * ROWS).div_ceil(32) as u64));
        assert_eq!((report.version, report.workers_lost), (Some(1), 0));
        assert!(report.accuracy.unwrap() > 0.95, "{report:?}");
        assert!(report.loss_per_epoch[11] < report.loss_per_epoch[0] / 2.0, "{report:?}");
        assert!(report.samples_per_second > 0.0);

        let bundle = bundle(home.path(), &name, 1);
        let lineage = &bundle.manifest().lineage;
        assert_eq!((lineage.volume.as_str(), lineage.snapshot.as_str()), ("data", "v1"));
        assert_eq!(lineage.offsets["digits"][&0], 301);
        assert_eq!((lineage.seed, lineage.epochs, lineage.steps), (11, 12, report.steps));
        assert_eq!(lineage.config_sha256, report.run);
        assert_eq!(bundle.manifest().metrics["train_accuracy"], report.accuracy.unwrap());
        digests.push(report.model_sha256.unwrap());
        assert_eq!(bundle.model_sha256(), digests[0]);
        check_statistics(&bundle.statistics().unwrap().unwrap());
    }
    assert_eq!(digests, vec![digests[0].clone(); 3]);

    // Another seed is another model; a loss target ends a job early.
    let other = JobFile { seed: 12, ..job("other", "epochs_max = 12\nloss_target = 0.5") };
    let report = run(setup(home.path()), other, |_| {}).unwrap();
    assert_eq!(report.end, End::Converged);
    assert!(report.epochs < 12 && report.loss.unwrap() <= 0.5, "{report:?}");
    assert_ne!(report.model_sha256.unwrap(), digests[0]);
}

#[test]
fn killed_and_frozen_workers_do_not_change_the_model() {
    let home = home();
    let more = "epochs_max = 250\ncheckpoint_every_steps = 700";
    let plain = run(setup(home.path()), job("plain", &format!("workers = 1\n{more}")), |_| {}).unwrap();

    let mut plan = vec![(150, "KILL", 1), (500, "KILL", 0), (900, "STOP", 2), (1200, "KILL", 0)];
    plan.reverse();
    // The processes that must still run: all except the victim of the last kill.
    let mut survivors: Vec<u32> = Vec::new();
    let mut epoch_of_blow = 0;
    let (mut seen_alone, mut seen_back) = (false, false);
    let report = run(setup(home.path()), job("battered", &format!("workers = 3\n{more}")), |seen| {
        if seen.membership_epoch > epoch_of_blow {
            for pid in &survivors {
                assert!(seen.worker_pids.contains(pid), "survivor {pid} restarted: {seen:?}");
            }
            seen_alone |= !survivors.is_empty() && seen.worker_pids.len() == 2;
            seen_back |= !survivors.is_empty() && seen.worker_pids.len() == 3;
        }
        let due = plan.last().is_some_and(|(step, ..)| seen.step >= *step);
        if due && seen.worker_pids.len() == 3 && seen.membership_epoch > epoch_of_blow {
            let (_, how, rank) = plan.pop().unwrap();
            let victim = seen.worker_pids[rank];
            survivors = seen.worker_pids.iter().copied().filter(|pid| *pid != victim).collect();
            epoch_of_blow = seen.membership_epoch;
            signal(how, victim);
        }
    })
    .unwrap();
    assert!(plan.is_empty(), "blows left: {plan:?}");
    assert!(seen_alone && seen_back, "alone {seen_alone}, back {seen_back}");
    assert_eq!(report.workers_lost, 4);
    assert_eq!(report.rows_per_epoch, vec![ROWS as u64; 250]);
    assert_eq!(report.loss_per_epoch, plain.loss_per_epoch);
    assert_eq!(report.model_sha256, plain.model_sha256);

    // Old checkpoints are deleted, folders included.
    let datafs = Datafs::open(home.path(), &millrace_datafs::Config::default()).unwrap();
    let folder = format!("checkpoints/battered/{}", &report.run[..16]);
    let kept = volume(&datafs, "models").list(&folder).unwrap();
    let folders: Vec<_> = kept.iter().filter(|entry| entry.name.starts_with('0')).collect();
    assert_eq!(folders.len(), Config::default().checkpoints_keep, "{kept:?}");
}

#[test]
fn killed_job_resumes_and_publishes_once() {
    let home = home();
    let text = job_text("journey", "workers = 2\nepochs_max = 120\ncheckpoint_every_steps = 50");
    std::fs::write(home.path().join("train.toml"), text).unwrap();
    let plain = run(setup(home.path()), job("plain", "workers = 1\nepochs_max = 120"), |_| {}).unwrap();

    let progress = home.path().join("progress.json");
    let read =
        || -> Option<serde_json::Value> { serde_json::from_slice(&std::fs::read(&progress).ok()?).ok() };
    let launch = || {
        let _ = std::fs::remove_file(&progress);
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "job_entry", "--nocapture"])
            .env(ENV_HOME, home.path())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap()
    };
    for step in [130u64, 420, 800] {
        let mut coordinator = launch();
        wait_until("the step", || read().is_some_and(|p| p["step"].as_u64().unwrap() >= step));
        coordinator.kill().unwrap();
        coordinator.wait().unwrap();
        for pid in read().unwrap()["worker_pids"].as_array().unwrap() {
            let pid = pid.as_u64().unwrap() as u32;
            wait_until("an orphan's exit", || !runs(pid));
        }
    }
    assert!(launch().wait().unwrap().success());
    let report: serde_json::Value =
        serde_json::from_slice(&std::fs::read(home.path().join("report.json")).unwrap()).unwrap();
    // On a slow disk, checkpoints that were due in between are left out.
    assert!(report["resumed_from_step"].as_u64().unwrap() >= 420, "{report}");
    assert_eq!(report["model_sha256"].as_str(), plain.model_sha256.as_deref());
    assert_eq!(report["rows_per_epoch"], serde_json::json!(plain.rows_per_epoch));
    assert_eq!((report["version"].as_u64(), versions(home.path())), (Some(1), 2));

    // A call after the end trains nothing and publishes nothing.
    let job = JobFile::load(&home.path().join("train.toml")).unwrap();
    let again = run(setup(home.path()), job, |_| {}).unwrap();
    assert!(again.already_published);
    assert_eq!((again.version, again.membership_epochs), (Some(1), 0));
    assert_eq!((again.model_sha256, versions(home.path())), (plain.model_sha256, 2));

    // A changed job is another run and the next version.
    let changed = JobFile { epochs_max: 3, ..job_again(home.path()) };
    let changed = run(setup(home.path()), changed, |_| {}).unwrap();
    assert_eq!((changed.version, changed.resumed_from_step), (Some(2), None));
}

/// Regression with large labels: the sums find their scale, the same for every number of workers and for a
/// run that continued from a checkpoint.
#[test]
fn large_labels_train_equally_with_any_number_of_workers() {
    let home = home();
    let datafs = Datafs::open(home.path(), &millrace_datafs::Config::default()).unwrap();
    let magnitudes = [3e5f32, 3e14];
    for (number, magnitude) in magnitudes.iter().enumerate() {
        let (columns, rows) = (rows(0..ROWS).columns().to_vec(), rows(0..ROWS));
        let prices: Vec<f32> = rows
            .column(1)
            .as_primitive::<Int64Type>()
            .values()
            .iter()
            .map(|label| magnitude * (*label as f32 + 1.0))
            .collect();
        let batch = RecordBatch::try_from_iter([
            ("pixels", Arc::clone(&columns[0])),
            ("price", Arc::new(Float32Array::from(prices)) as ArrayRef),
        ])
        .unwrap();
        let path = format!("prices-{number}/a.parquet");
        volume(&datafs, "data").write_file(&path, &parquet_bytes(&batch)).unwrap();
    }
    datafs.snapshot_create(&"data".parse().unwrap(), &"prices".parse().unwrap()).unwrap();
    for (number, magnitude) in magnitudes.iter().enumerate() {
        let train = |name: &str, workers: usize, epochs: usize| {
            let more = format!("workers = {workers}\nepochs_max = {epochs}\nloss = \"mse\"");
            let text = job_text(&format!("{name}-{number}"), &more)
                .replace("data@v1:/train", &format!("data@prices:/prices-{number}"))
                .replace("label = \"label\"", "label = \"price\"")
                // A linear model learns labels of any magnitude with one learning rate.
                .replace("hidden = [12]", "hidden = []")
                .replace(&format!("classes = {CLASSES}"), "classes = 1")
                .replace("kind = \"adamw\", learning_rate = 0.01", "kind = \"sgd\", learning_rate = 0.002");
            run(setup(home.path()), JobFile::parse(&text).unwrap(), |_| {}).unwrap()
        };
        let alone = train("alone", 1, 6);
        let losses = &alone.loss_per_epoch;
        assert!(losses[5] < losses[0] * 0.9, "labels of {magnitude}: {losses:?}");
        assert_eq!(alone.accuracy, None, "a number is not right or wrong");
        let bundle = bundle(home.path(), &format!("alone-{number}"), 1);
        let metrics = &bundle.manifest().metrics;
        assert!(metrics.contains_key("train_loss") && !metrics.contains_key("train_accuracy"), "{metrics:?}");
        for workers in [2, 3] {
            let together = train(&format!("together-{workers}"), workers, 6);
            assert_eq!((&together.model_sha256, &together.loss_per_epoch), (&alone.model_sha256, losses));
        }
        train("continued", 2, 3);
        let continued = train("continued", 1, 6);
        assert!(continued.resumed_from_step.is_some());
        assert_eq!((&continued.model_sha256, &continued.loss_per_epoch), (&alone.model_sha256, losses));
    }
}

#[test]
fn a_coordinator_that_was_stopped_keeps_its_workers() {
    let home = home();
    let text = job_text("paused", "workers = 2\nepochs_max = 100000\ncheckpoint_every_steps = 1000000");
    std::fs::write(home.path().join("train.toml"), text).unwrap();
    let progress = home.path().join("progress.json");
    let read =
        || -> Option<serde_json::Value> { serde_json::from_slice(&std::fs::read(&progress).ok()?).ok() };
    let step = || read().map_or(0, |seen| seen["step"].as_u64().unwrap());
    let mut coordinator = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "job_entry", "--nocapture"])
        .env(ENV_HOME, home.path())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    wait_until("the first steps", || step() > 50);
    let before = read().unwrap();
    signal("STOP", coordinator.id());
    // Twice the time that a worker may be silent.
    std::thread::sleep(Duration::from_secs(3));
    signal("CONT", coordinator.id());
    let stopped_at = step();
    wait_until("steps after the pause", || step() > stopped_at + 500);
    let after = read().unwrap();
    coordinator.kill().unwrap();
    coordinator.wait().unwrap();
    for pid in after["worker_pids"].as_array().unwrap() {
        let pid = pid.as_u64().unwrap() as u32;
        wait_until("an orphan's exit", || !runs(pid));
    }
    assert_eq!(after["worker_pids"], before["worker_pids"]);
    assert_eq!(after["membership_epoch"], before["membership_epoch"]);
}

#[test]
fn an_operating_system_error_of_one_worker_does_not_end_the_job() {
    let home = home();
    let more = "epochs_max = 120\ncheckpoint_every_steps = 50";
    let plain = run(setup(home.path()), job("plain", &format!("workers = 1\n{more}")), |_| {}).unwrap();
    let mut limited = false;
    let report = run(setup(home.path()), job("limited", &format!("workers = 2\n{more}")), |seen| {
        if seen.step > 100 && !limited {
            limited = true;
            // Rank 0 writes the checkpoints. From now on it can open no file.
            let pid = seen.worker_pids[0].to_string();
            let set = Command::new("prlimit").args(["--pid", &pid, "--nofile=3:3"]).status();
            assert!(set.unwrap().success());
        }
    })
    .unwrap();
    assert!(limited);
    assert_eq!(report.workers_lost, 1);
    assert_eq!(report.model_sha256, plain.model_sha256);
}

fn job_again(home: &Path) -> JobFile {
    JobFile::load(&home.join("train.toml")).unwrap()
}

#[test]
fn stopped_job_resumes_and_a_second_coordinator_is_refused() {
    let home = home();
    let more = "workers = 2\nepochs_max = 400";
    let cancel = CancellationToken::new();
    let mut last = 0;
    let busy = std::sync::Mutex::new(None);
    let stopped = runtime().block_on(async {
        let setup_again = setup(home.path());
        let second = job("stopped", more);
        let (begun, mut running) = tokio::sync::mpsc::channel(1);
        let first = train(job("stopped", more), setup(home.path()), cancel.clone(), |seen| {
            last = seen.step;
            // If the channel is full, the other task knows already.
            let _ = begun.try_send(());
        });
        let other = async {
            running.recv().await.unwrap();
            let refused = train(second, setup_again, CancellationToken::new(), |_| {}).await;
            *busy.lock().unwrap() = refused.err();
            cancel.cancel();
        };
        tokio::join!(first, other).0
    });
    let busy = busy.into_inner().unwrap().unwrap();
    assert!(matches!(busy, Error::Busy { .. }), "{busy}");
    assert!(busy.to_string().contains(&format!("process {}", std::process::id())), "{busy}");
    let stopped = stopped.unwrap();
    assert_eq!((stopped.end, stopped.version), (End::Stopped, None));
    assert!(stopped.steps >= last && stopped.steps > 0);

    let resumed = run(setup(home.path()), job("stopped", more), |_| {}).unwrap();
    assert_eq!(resumed.resumed_from_step, Some(stopped.steps));
    let plain = run(setup(home.path()), job("plain", "workers = 1\nepochs_max = 400"), |_| {}).unwrap();
    assert_eq!(resumed.model_sha256, plain.model_sha256);
    assert_eq!(resumed.rows_per_epoch, plain.rows_per_epoch);
}

/// A service manager sends SIGTERM to every process of a job at once, and a terminal that closes SIGHUP.
#[test]
fn a_stop_signal_to_the_workers_does_not_cost_the_last_checkpoint() {
    let home = home();
    let more = "workers = 2\nepochs_max = 400\ncheckpoint_every_steps = 1000000";
    let cancel = CancellationToken::new();
    let mut last = 0;
    let stopped = runtime()
        .block_on(train(job("signalled", more), setup(home.path()), cancel.clone(), |seen| {
            last = seen.step;
            if seen.step >= 50 && !cancel.is_cancelled() {
                for name in ["HUP", "TERM", "INT"] {
                    seen.worker_pids.iter().for_each(|pid| signal(name, *pid));
                }
                cancel.cancel();
            }
        }))
        .unwrap();
    assert_eq!((stopped.end, stopped.workers_lost), (End::Stopped, 0));
    assert!(stopped.steps >= last && last >= 50, "{stopped:?}");
    let resumed = run(setup(home.path()), job("signalled", more), |_| {}).unwrap();
    assert_eq!((resumed.resumed_from_step, resumed.end), (Some(stopped.steps), End::EpochsDone));
}

#[test]
fn job_with_another_budget_continues_from_checkpoints_within_it() {
    let home = home();
    let with = |name: &str, budget: &str| job(name, &format!("workers = 1\n{budget}"));
    let train = |name: &str, budget: &str| run(setup(home.path()), with(name, budget), |_| {}).unwrap();
    let steps = |epochs: usize| (epochs * ROWS).div_ceil(32) as u64;
    let plain: Vec<TrainReport> = [10, 20, 40]
        .iter()
        .map(|epochs| train(&format!("plain-{epochs}"), &format!("epochs_max = {epochs}")))
        .collect();

    let first = train("budget", "epochs_max = 20");
    assert_eq!((first.version, &first.model_sha256), (Some(1), &plain[1].model_sha256));
    let raised = train("budget", "epochs_max = 40");
    assert_eq!((raised.resumed_from_step, raised.steps), (Some(steps(20)), steps(40)));
    assert_eq!((raised.version, &raised.model_sha256), (Some(2), &plain[2].model_sha256));
    // The end of the smaller budget lies before all checkpoints, which stay.
    let lowered = train("budget", "epochs_max = 10");
    assert_eq!((lowered.resumed_from_step, lowered.steps), (None, steps(10)));
    assert_eq!((lowered.version, &lowered.model_sha256), (Some(3), &plain[0].model_sha256));
    for (budget, version, step) in [("epochs_max = 20", 1, steps(20)), ("epochs_max = 40", 2, steps(40))] {
        let again = train("budget", budget);
        assert!(again.already_published, "{again:?}");
        assert_eq!((again.version, again.resumed_from_step), (Some(version), Some(step)));
        assert_eq!(again.membership_epochs, 0);
    }
    // A loss that an earlier epoch had reached ends the job there, not at the last checkpoint.
    let target = raised.loss_per_epoch[24];
    let converged = train("budget", &format!("epochs_max = 40\nloss_target = {target}"));
    assert_eq!((converged.end, converged.resumed_from_step), (End::Converged, Some(steps(20))));
    assert!(converged.epochs <= 25 && converged.loss.unwrap() <= target, "{converged:?}");
    assert_eq!(converged.version, Some(4));
}

#[test]
fn deleted_version_is_republished_under_a_new_number() {
    let home = home();
    let job = || job("deleted", "workers = 1\nepochs_max = 2");
    let first = run(setup(home.path()), job(), |_| {}).unwrap();
    assert_eq!((first.version, first.already_published), (Some(1), false));
    let datafs = Datafs::open(home.path(), &millrace_datafs::Config::default()).unwrap();
    let live = volume(&datafs, "models");
    for entry in live.list("models/deleted/1").unwrap() {
        live.remove_file(&format!("models/deleted/1/{}", entry.name)).unwrap();
    }
    live.remove_dir("models/deleted/1").unwrap();
    let again = run(setup(home.path()), job(), |_| {}).unwrap();
    assert_eq!((again.version, again.already_published, again.membership_epochs), (Some(2), false, 0));
    assert_eq!(again.model_sha256, first.model_sha256);
    assert_eq!(bundle(home.path(), "deleted", 2).model_sha256(), first.model_sha256.unwrap());
    let third = run(setup(home.path()), job(), |_| {}).unwrap();
    assert_eq!((third.version, third.already_published), (Some(2), true));
}

/// A stop while the published statistics are read leaves them whole.
#[test]
fn a_stop_before_publication_leaves_it_to_the_next_start() {
    let home = home();
    let job = || job("late", "workers = 1\nepochs_max = 2");
    let first = run(setup(home.path()), job(), |_| {}).unwrap();
    let datafs = Datafs::open(home.path(), &millrace_datafs::Config::default()).unwrap();
    let live = volume(&datafs, "models");
    for entry in live.list("models/late/1").unwrap() {
        live.remove_file(&format!("models/late/1/{}", entry.name)).unwrap();
    }
    let stopped = CancellationToken::new();
    stopped.cancel();
    let report = runtime().block_on(train(job(), setup(home.path()), stopped, |_| {})).unwrap();
    assert_eq!((report.end, report.version, report.steps), (End::Stopped, None, first.steps));
    let again = run(setup(home.path()), job(), |_| {}).unwrap();
    assert_eq!((again.end, again.version, again.membership_epochs), (End::EpochsDone, Some(2), 0));
    check_statistics(&bundle(home.path(), "late", 2).statistics().unwrap().unwrap());
}

#[test]
fn changed_job_keeps_old_checkpoints_and_reuses_them_when_changed_back() {
    let home = home();
    let cancel = CancellationToken::new();
    let text = "workers = 1\nepochs_max = 60";
    let stopped = runtime()
        .block_on(train(job("changed", text), setup(home.path()), cancel.clone(), |seen| {
            if seen.step >= 100 {
                cancel.cancel();
            }
        }))
        .unwrap();
    assert_eq!(stopped.end, End::Stopped);
    let other = JobFile { seed: 12, epochs_max: 2, ..job("changed", text) };
    let other = run(setup(home.path()), other, |_| {}).unwrap();
    assert_eq!((other.version, other.resumed_from_step), (Some(1), None));
    let back = run(setup(home.path()), job("changed", text), |_| {}).unwrap();
    assert_eq!((back.version, back.resumed_from_step), (Some(2), Some(stopped.steps)));
}

/// An ONNX file with one node of an unsupported operator.
fn unsupported_model(path: &Path) {
    use millrace_bundle::onnx;
    use prost::Message;
    let mut model = millrace_trainer::init::mlp(WIDTH, &[4], CLASSES as usize, 1).unwrap();
    let graph: &mut onnx::GraphProto = model.graph.as_mut().unwrap();
    let relu = graph.node.iter_mut().find(|node| node.op_type() == "Relu").unwrap();
    relu.op_type = Some("Det".to_owned());
    std::fs::write(path, model.encode_to_vec()).unwrap();
}

#[test]
fn bad_jobs_are_refused_before_any_worker_starts() {
    let home = home();
    let model = home.path().join("model.onnx");
    unsupported_model(&model);
    let narrow = format!("model = {{ kind = \"mlp\", inputs = 9, classes = {CLASSES} }}");
    let two_classes = format!("model = {{ kind = \"mlp\", inputs = {WIDTH}, classes = 2 }}");
    let onnx = format!("model = {:?}", model.display().to_string());
    let missing = format!("model = {:?}", home.path().join("no.onnx").display().to_string());
    let replace = |key: &str, line: &str| {
        job_text("bad", "")
            .lines()
            .map(|old| if old.starts_with(key) { line } else { old })
            .collect::<Vec<_>>()
            .join("\n")
    };
    let cases = [
        (job_text("bad", "epoch_max = 3"), vec!["line 10", "epoch_max", "epochs_max"]),
        (job_text("bad", "workers = 13"), vec!["workers", "12", "virtual_shards"]),
        (job_text("bad", "batch_rows = 3"), vec!["line 10", "duplicate key"]),
        (job_text("bad", "device = \"tpu\""), vec!["line 10", "tpu", "cuda"]),
        (
            replace("optimizer", "optimizer = { kind = \"adamw\", learning_rate = -1.0 }"),
            vec!["learning_rate", "1e-45 to 3e38"],
        ),
        (replace("optimizer", "optimizer = { kind = \"lamb\" }"), vec!["line 6", "lamb"]),
        (replace("name", "name = \"../up\""), vec!["line 1", "../up"]),
        (
            replace("dataset", "dataset = \"data:/train\""),
            vec!["snapshot", "millrace snapshot create data@NAME"],
        ),
        (replace("dataset", "dataset = \"nowhere@v1:/train\""), vec!["nowhere"]),
        (replace("dataset", "dataset = \"data@v9:/train\""), vec!["data@v9", "not exist"]),
        (replace("dataset", "dataset = \"data@v1:/tests\""), vec!["/tests", "no data file"]),
        (replace("dataset", "dataset = \"data@v1:/broken\""), vec!["broken/a.parquet", "corrupt"]),
        (replace("features", "features = \"image\""), vec!["data@v1:/train", "\"image\"", "pixels"]),
        (replace("label", "label = \"pixels\""), vec!["features and label"]),
        (replace("model", &narrow), vec!["pixels", "16", "9"]),
        (replace("model", &two_classes), vec!["label 2", "0 to 1", ".parquet"]),
        (replace("model", &onnx), vec!["Det"]),
        (replace("model", &missing), vec!["no.onnx", "No such file"]),
        (replace("output", "output = { volume = \"nowhere\" }"), vec!["nowhere", "not exist"]),
    ];
    for (text, words) in cases {
        // No worker can start, so an error from starting one would be a different error.
        let mut setup = setup(home.path());
        setup.worker.program = PathBuf::from("/does/not/exist");
        let error = JobFile::parse(&text).and_then(|job| run(setup, job, |_| {})).unwrap_err();
        let line = error.one_line();
        assert!(!line.contains('\n') && line.len() < 700, "{line}");
        for word in words {
            assert!(line.contains(word), "{line:?} lacks {word:?}\n{text}");
        }
    }
    assert_eq!(versions(home.path()), 0);
}

#[test]
fn failures_of_workers_end_the_job_with_one_line() {
    let home = home();
    let text = job_text("diverges", "workers = 2")
        .replace("kind = \"adamw\", learning_rate = 0.01", "kind = \"sgd\", learning_rate = 1e30");
    let error = run(setup(home.path()), JobFile::parse(&text).unwrap(), |_| {}).unwrap_err();
    assert!(matches!(error, Error::Worker { exit_code: WORKER_EXIT, .. }), "{error:?}");
    let line = error.one_line();
    assert!(line.contains("step ") && line.contains("learning rate") && !line.contains('\n'), "{line}");

    // The loss of the only step is finite, the weights after it are not.
    let text = job_text("overflows", "workers = 1\nepochs_max = 1\nvirtual_shards = 1")
        .replace(
            "kind = \"adamw\", learning_rate = 0.01",
            "kind = \"sgd\", learning_rate = 3e38, weight_decay = 1e9",
        )
        .replace("batch_rows = 32", &format!("batch_rows = {ROWS}"));
    let error = run(setup(home.path()), JobFile::parse(&text).unwrap(), |_| {}).unwrap_err();
    let line = error.one_line();
    assert!(line.contains("step 0: a weight of parameter") && line.contains("learning rate"), "{line}");

    let mut broken = setup(home.path());
    broken.worker.program = PathBuf::from("/does/not/exist");
    broken.config.respawns_max = 1;
    let error = run(broken, job("unstartable", "workers = 2"), |_| {}).unwrap_err();
    assert!(matches!(error, Error::WorkersLost { respawns: 1, .. }), "{error:?}");
    assert!(error.to_string().contains("/does/not/exist"), "{error}");
    assert_eq!(versions(home.path()), 0);
}
