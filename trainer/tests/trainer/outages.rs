//! Workers that are cut off from the volumes or the brokers, taken for dead by other processes, or left with a state that
//! no checkpoint has.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use millrace_datafs::Datafs;
use millrace_streams::KafkaConfig;
use millrace_streams::broker::Broker;
use millrace_streams::topic::{self, OutRecord, Producer};
use millrace_trainer::job::JobFile;
use millrace_trainer::{End, Setup, TrainReport, train};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

use super::failover::{Gate, World};
use super::joined::succeeded;
use super::topics::{json_rows, serve};
use super::{ROWS, job_text, run, runtime, signal, wait_until};

/// Makes all processes that have the volumes open now dead for the others, as a lapsed lease on a server does.
fn declare_all_dead(home: &TempDir, config: &millrace_datafs::Config) {
    let mut sessions = config.meta_file.clone().into_os_string();
    sessions.push("-sessions");
    let sessions = Path::new(&sessions);
    let files: Vec<_> = sessions.read_dir().unwrap().map(|file| file.unwrap().path()).collect();
    assert!(!files.is_empty());
    files.iter().for_each(|file| std::fs::remove_file(file).unwrap());
    Datafs::open(home.path(), config).unwrap().gc().unwrap();
}

#[test]
fn processes_that_were_taken_for_dead_keep_their_state_and_go_on() {
    let world = World::embedded("dead", "epochs_max = 250\ncheckpoint_every_steps = 100", 600_000);
    let mut first = world.coordinator(false);
    wait_until("a coordinator", || first.listens());
    let mut workers = [world.worker(&first.address), world.worker(&first.address)];
    // The list of epochs is by then larger than what the metadata holds without an object.
    wait_until("a step", || first.step() >= 550);
    declare_all_dead(&tempfile::tempdir().unwrap(), &world.datafs);
    let report = first.report();
    world.check(&report);
    assert_eq!((&report["workers_lost"], &report["membership_epochs"]), (&0.into(), &1.into()), "{report}");
    for worker in &mut workers {
        assert_eq!(worker.ended(), succeeded("Done"));
    }
}

#[test]
fn a_worker_that_was_suspended_for_longer_than_its_session_lease_goes_on() {
    let more = "epochs_max = 400\ncheckpoint_every_steps = 100";
    let Some(mut world) = World::postgres("suspended", more, 600_000) else { return };
    world.job = world.job.replace("workers_min = 2", "workers_min = 1");
    world.datafs.session_lease_ms = 1_000;
    let mut first = world.coordinator(false);
    wait_until("a coordinator", || first.listens());
    let mut worker = world.worker(&first.address);
    wait_until("a step", || first.step() >= 550);
    signal("STOP", worker.pid());
    let home = tempfile::tempdir().unwrap();
    let other = Datafs::open(home.path(), &world.datafs).unwrap();
    wait_until("a lapsed session", || other.gc().unwrap().sessions > 0);
    wait_until("a lost worker", || first.trains_without(worker.pid()));
    signal("CONT", worker.pid());
    let report = first.report();
    world.check(&report);
    assert_eq!((&report["workers_joined"], &report["workers_lost"]), (&2.into(), &1.into()), "{report}");
    assert_eq!(worker.ended(), succeeded("Done"));
}

/// No checkpoint before the end: what the workers hold is all there is of a run.
const IN_MEMORY: &str = "epochs_max = 250\ncheckpoint_every_steps = 1000000";

#[test]
fn a_worker_without_a_coordinator_saves_its_state_when_it_is_asked_to_leave() {
    let world = World::embedded("saved", IN_MEMORY, 1_000);
    let mut first = world.coordinator(false);
    wait_until("a coordinator", || first.listens());
    let mut workers = [world.worker(&first.address), world.worker(&first.address)];
    wait_until("a step", || first.step() >= 150);
    first.kill();
    let at = first.step();
    for worker in &mut workers {
        signal("TERM", worker.pid());
        assert_eq!(worker.ended(), succeeded("Left"));
    }
    let mut second = world.coordinator(false);
    wait_until("a coordinator", || second.listens());
    let mut workers = [world.worker(&second.address), world.worker(&second.address)];
    let report = second.report();
    world.check(&report);
    assert!(report["resumed_from_step"].as_u64() >= Some(at), "{report}");
    for worker in &mut workers {
        assert_eq!(worker.ended(), succeeded("Done"));
    }
}

#[test]
fn a_worker_that_was_left_by_a_replaced_coordinator_drops_its_state_in_order() {
    // A suspended process may have the embedded metadata's turn to write, for which the others wait.
    let Some(world) = World::postgres("replaced", IN_MEMORY, 1_000) else { return };
    let mut first = world.coordinator(false);
    wait_until("a coordinator", || first.listens());
    let mut workers = [world.worker(&first.address), world.worker(&first.address)];
    wait_until("a step", || first.step() >= 150);
    workers.iter().for_each(|worker| signal("STOP", worker.pid()));
    first.kill();
    // It has another address, and goes on with workers of its own.
    let mut second = world.coordinator(false);
    wait_until("a coordinator", || second.listens());
    for worker in &mut workers {
        signal("TERM", worker.pid());
        signal("CONT", worker.pid());
        assert_eq!(worker.ended(), succeeded("Left"));
    }
    let mut workers = [world.worker(&second.address), world.worker(&second.address)];
    let report = second.report();
    world.check(&report);
    for worker in &mut workers {
        assert_eq!(worker.ended(), succeeded("Done"));
    }
}

#[test]
fn workers_wait_for_rows_as_long_as_for_checkpoints() {
    let more = "epochs_max = 250\ncheckpoint_every_steps = 1000000\nshuffle = { lanes = 1, window_rows = 8 }";
    let Some(mut world) = World::postgres("unread", more, 600_000) else { return };
    // They read each row group again in each epoch.
    world.feed_cache_bytes = 0;
    let gate = Gate::new(world.server.as_ref().unwrap());
    let mut first = world.coordinator(false);
    wait_until("a coordinator", || first.listens());
    let mut workers = [gate.worker(&world, &first.address), gate.worker(&world, &first.address)];
    wait_until("a step", || first.step() >= 150);
    gate.close();
    // Longer than five attempts.
    wait_until("an outage", || first.progress()["unread_seconds"].as_u64() >= Some(5));
    let at = first.step();
    assert!(workers.iter().all(|worker| first.trains_with(worker.pid())));
    gate.open();
    let report = first.report();
    world.check(&report);
    assert!(report["steps"].as_u64() > Some(at), "{report}");
    assert_eq!((&report["workers_joined"], &report["workers_lost"]), (&2.into(), &0.into()), "{report}");
    for worker in &mut workers {
        assert_eq!(worker.ended(), succeeded("Done"));
    }
}

#[test]
fn a_stop_lets_a_worker_with_rows_save_the_state_while_another_one_is_cut_off() {
    let more = "epochs_max = 250\ncheckpoint_every_steps = 1000000\nshuffle = { lanes = 1, window_rows = 8 }";
    let Some(mut world) = World::postgres("partly", more, 600_000) else { return };
    // They read each row group again in each epoch.
    world.feed_cache_bytes = 0;
    let gate = Gate::new(world.server.as_ref().unwrap());
    let mut first = world.coordinator(false);
    wait_until("a coordinator", || first.listens());
    let mut workers = [gate.worker(&world, &first.address), world.worker(&first.address)];
    wait_until("a step", || first.step() >= 150);
    gate.close();
    wait_until("an outage", || first.progress()["unread_seconds"].as_u64() >= Some(1));
    let at = first.step();
    signal("TERM", first.pid());
    let stopped = first.report();
    assert_eq!((&stopped["end"], &stopped["workers_lost"]), (&"stopped".into(), &0.into()), "{stopped}");
    assert!(stopped["steps"].as_u64() >= Some(at), "{stopped}");
    gate.open();
    for worker in &mut workers {
        assert_eq!(worker.ended(), succeeded("Done"));
    }
    let mut second = world.coordinator(false);
    wait_until("a coordinator", || second.listens());
    let mut workers = [world.worker(&second.address), world.worker(&second.address)];
    let report = second.report();
    world.check(&report);
    assert_eq!(report["resumed_from_step"], stopped["steps"], "{report}");
    for worker in &mut workers {
        assert_eq!(worker.ended(), succeeded("Done"));
    }
}

/// Bytes that make a record so long that a read from the brokers gives the rows of a few steps only.
const PADDING: usize = 128 << 10;

/// A home, and a broker with the topic `points` that may go away and come back.
struct Site {
    home: TempDir,
    log: TempDir,
    serving: Runtime,
    address: SocketAddr,
    broker: Option<Broker>,
    kafka: KafkaConfig,
}

impl Site {
    fn new() -> Site {
        let (home, log) = (super::home(), tempfile::tempdir().unwrap());
        let serving = runtime();
        let broker = serving.block_on(serve(([127, 0, 0, 1], 0).into(), log.path()));
        let address = broker.addr();
        let kafka = KafkaConfig::new(address.to_string());
        let padding = "x".repeat(PADDING);
        let record = |(row, text): (usize, String)| {
            let text = format!("{},\"padding\":\"{padding}\"}}", text.trim_end_matches('}'));
            OutRecord::new("points", text).partition(row as i32 % 2)
        };
        let records: Vec<OutRecord> = json_rows(0..ROWS).into_iter().enumerate().map(record).collect();
        serving.block_on(async {
            topic::create_topic(&kafka, "points", 2).await.unwrap();
            Producer::connect(&kafka).await.unwrap().send_all(records).await.unwrap();
        });
        Site { home, log, serving, address, broker: Some(broker), kafka }
    }

    fn setup(&self) -> Setup {
        let mut setup = Setup { kafka: Some(self.kafka.clone()), ..super::setup(self.home.path()) };
        setup.config.feed_cache_bytes = 0;
        // Longer than workers are suspended.
        setup.config.heartbeat_lost_ms = 60_000;
        setup
    }

    /// A job that writes no checkpoint before its end.
    fn job(&self, name: &str, workers: usize) -> JobFile {
        let more = format!(
            "workers = {workers}\nepochs_max = 2\ncheckpoint_every_steps = 1000000\n\
             shuffle = {{ lanes = 1, window_rows = 8 }}"
        );
        let text = job_text(name, &more).replacen("\"data@v1:/train\"", "\"topic:points@latest\"", 1);
        JobFile::parse(&text.replacen("batch_rows = 32", "batch_rows = 12", 1)).unwrap()
    }

    /// Trains a job until the brokers are away for it, then stops it, or lets its patience end. Gives the last step that it
    /// reported. The brokers are back afterwards.
    fn train_without_brokers(
        &mut self,
        job: JobFile,
        setup: Setup,
        stops: bool,
    ) -> (millrace_trainer::Result<TrainReport>, u64) {
        let stop = CancellationToken::new();
        let suspended = Arc::new(Mutex::new(Vec::<u32>::new()));
        let (is_waiting, last) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (token, pids) = (stop.clone(), Arc::clone(&suspended));
        let (waits, step) = (Arc::clone(&is_waiting), Arc::clone(&last));
        let training = std::thread::spawn(move || {
            runtime().block_on(train(job, setup, token, move |seen| {
                let mut pids = pids.lock().unwrap();
                if seen.step > 0 && pids.is_empty() {
                    // They have read the rows of the first steps only.
                    seen.worker_pids.iter().for_each(|pid| signal("STOP", *pid));
                    *pids = seen.worker_pids;
                }
                step.fetch_max(seen.step, Ordering::Relaxed);
                waits.fetch_or(seen.unread_seconds > 0, Ordering::Relaxed);
            }))
        });
        wait_until("a step", || !suspended.lock().unwrap().is_empty());
        let broker = self.broker.take().unwrap();
        self.serving.block_on(broker.stop()).unwrap();
        suspended.lock().unwrap().iter().for_each(|pid| signal("CONT", *pid));
        if stops {
            wait_until("an outage", || is_waiting.load(Ordering::Relaxed));
            stop.cancel();
        }
        let ended = training.join().unwrap();
        self.broker = Some(self.serving.block_on(serve(self.address, self.log.path())));
        (ended, last.load(Ordering::Relaxed))
    }
}

/// Compares a run that went on from a checkpoint with an undisturbed one.
fn check_same(resumed: &TrainReport, whole: &TrainReport) {
    assert_eq!(resumed.end, End::EpochsDone);
    assert_eq!(resumed.model_sha256, whole.model_sha256);
    assert_eq!(resumed.loss_per_epoch, whole.loss_per_epoch);
    assert_eq!(resumed.rows_per_epoch, whole.rows_per_epoch);
}

fn stop_without_brokers(workers: usize) {
    let mut site = Site::new();
    let whole = run(site.setup(), site.job("whole", 1), |_| {}).unwrap();
    let (job, setup) = (site.job("halves", workers), site.setup());
    let (stopped, last) = site.train_without_brokers(job, setup, true);
    let stopped = stopped.unwrap();
    assert_eq!((stopped.end, stopped.workers_lost), (End::Stopped, 0));
    assert!((last.max(1)..whole.steps).contains(&stopped.steps), "{last}: {stopped:?}");
    let resumed = run(site.setup(), site.job("halves", workers), |_| {}).unwrap();
    assert_eq!(resumed.resumed_from_step, Some(stopped.steps));
    check_same(&resumed, &whole);
}

#[test]
fn a_stop_while_the_brokers_are_away_saves_the_last_step_of_one_worker() {
    stop_without_brokers(1);
}

#[test]
fn a_stop_while_the_brokers_are_away_saves_the_last_step_of_two_workers() {
    stop_without_brokers(2);
}

#[test]
fn a_job_whose_patience_with_the_brokers_ends_has_saved_its_last_step() {
    let mut site = Site::new();
    let whole = run(site.setup(), site.job("whole", 1), |_| {}).unwrap();
    let (job, mut setup) = (site.job("impatient", 1), site.setup());
    // A patience of 60 s, and 120 s for the step: the first read fails after 10 to 30 s, the later ones after 10 s each.
    setup.config.exchange_timeout_ms = 12_000;
    let (ended, last) = site.train_without_brokers(job, setup, false);
    let error = ended.unwrap_err().one_line();
    assert!(error.contains("the brokers gave no rows for"), "{error}");
    assert!(error.contains("start the job again when they answer"), "{error}");
    let resumed = run(site.setup(), site.job("impatient", 1), |_| {}).unwrap();
    assert!(resumed.resumed_from_step >= Some(last.max(1)), "{last}: {resumed:?}");
    check_same(&resumed, &whole);
}
