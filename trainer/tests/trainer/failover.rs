//! Coordinators that are killed, stopped, cut off or asked to end, and the standbys that take their place.

use std::collections::BTreeMap;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use millrace_datafs::Datafs;
use millrace_testing::s3_server::S3Server;
use millrace_trainer::join::{Listen, Token};
use millrace_trainer::{Config, Setup, train};
use serde_json::Value;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

use super::hosts::Hosts;
use super::joined::{TOKEN, Worker, private_file, succeeded, this_program};
use super::server::Server;
use super::{fill, job_text, run, runtime, setup_with, signal, wait_until};

const ENV_COORDINATE: &str = "MILLRACE_TEST_COORDINATE";

#[derive(serde::Serialize, serde::Deserialize)]
struct Orders {
    home: PathBuf,
    datafs: millrace_datafs::Config,
    token: PathBuf,
    address: String,
    standby: bool,
    lease_ms: u64,
    feed_cache_bytes: u64,
}

/// A coordinator, when this binary was launched as one: writes progress, and how it ended, to files.
#[test]
fn coordinate_entry() {
    let Ok(orders) = std::env::var(ENV_COORDINATE) else { return };
    let orders: Orders = serde_json::from_str(&orders).unwrap();
    let usual = setup_with(&orders.home, orders.datafs);
    let setup = Setup {
        config: Config {
            lease_ms: orders.lease_ms,
            feed_cache_bytes: orders.feed_cache_bytes,
            ..usual.config.clone()
        },
        listen: Some(Listen {
            address: orders.address.parse().unwrap(),
            advertise: None,
            token: Token::read(&orders.token).unwrap(),
            tls: None,
            workers_local: Some(0),
        }),
        standby: orders.standby,
        ..usual
    };
    let job = millrace_trainer::job::JobFile::load(&orders.home.join("train.toml")).unwrap();
    let write = |name: &str, bytes: Vec<u8>| {
        std::fs::write(orders.home.join("new"), bytes).unwrap();
        std::fs::rename(orders.home.join("new"), orders.home.join(name)).unwrap();
    };
    let ended = runtime().block_on(async {
        let cancel = CancellationToken::new();
        let kind = tokio::signal::unix::SignalKind::terminate();
        let mut terminate = tokio::signal::unix::signal(kind).unwrap();
        let told = cancel.clone();
        tokio::spawn(async move {
            terminate.recv().await;
            told.cancel();
        });
        train(job, setup, cancel, |seen| write("progress", serde_json::to_vec(&seen).unwrap())).await
    });
    match ended {
        Ok(report) => write("report", serde_json::to_vec(&report).unwrap()),
        Err(error) => {
            write("error", error.one_line().into_bytes());
            std::process::exit(1);
        }
    }
}

/// The report of a job that one worker trained without interruption, under another name, in a home of its own. Tests
/// with the same job share it.
pub(super) fn plain(more: &str) -> Value {
    static REPORTS: Mutex<BTreeMap<String, Arc<OnceLock<Value>>>> = Mutex::new(BTreeMap::new());
    let report = Arc::clone(REPORTS.lock().unwrap().entry(more.to_owned()).or_default());
    let train = || {
        let home = super::home();
        let job = super::job("plain", &format!("workers = 1\n{more}"));
        serde_json::to_value(run(super::setup(home.path()), job, |_| {}).unwrap()).unwrap()
    };
    report.get_or_init(train).clone()
}

/// Volumes that several homes share, and a job.
pub(super) struct World {
    pub(super) datafs: millrace_datafs::Config,
    pub(super) job: String,
    lease_ms: u64,
    /// Rows that a worker keeps in memory.
    pub(super) feed_cache_bytes: u64,
    /// What the job adds to the usual one.
    more: String,
    _store: TempDir,
    pub(super) server: Option<Arc<Server>>,
    /// The machines on which processes run in turn, if they do not share this one, and their bucket.
    pub(super) hosts: Option<(Hosts, S3Server)>,
    /// Processes so far.
    launched: AtomicUsize,
}

impl World {
    /// Embedded metadata, which the homes of one machine share.
    pub(super) fn embedded(name: &str, more: &str, lease_ms: u64) -> World {
        let store = tempfile::tempdir().unwrap();
        let usual = millrace_datafs::Config::default();
        let datafs = millrace_datafs::Config {
            meta_file: store.path().join(&usual.meta_file),
            store_dir: store.path().join(&usual.store_dir),
            ..usual
        };
        World::new(datafs, store, None, (name, more), lease_ms)
    }

    /// PostgreSQL and a bucket for processes on machines of their own; none without a server or the rights.
    pub(super) fn on_hosts(count: usize, name: &str, more: &str, lease_ms: u64) -> Option<World> {
        let server = Server::shared()?;
        let hosts = Hosts::new(count)?;
        let bucket = S3Server::start_at(&hosts.own_address());
        let options = bucket.options().into_iter();
        let options = options.map(|(key, value)| (key.to_owned(), millrace_datafs::Secret::Text(value)));
        let datafs = millrace_datafs::Config {
            meta_url: Some(server.url().into()),
            meta_schema: server.new_schema(),
            meta_connections_max: 4,
            store_url: Some(bucket.url("objects")),
            store_options: options.collect(),
            ..millrace_datafs::Config::default()
        };
        let store = tempfile::tempdir().unwrap();
        let world = World::new(datafs, store, Some(server), (name, more), lease_ms);
        Some(World { hosts: Some((hosts, bucket)), ..world })
    }

    /// PostgreSQL; none without a server.
    pub(super) fn postgres(name: &str, more: &str, lease_ms: u64) -> Option<World> {
        let server = Server::shared()?;
        let store = tempfile::tempdir().unwrap();
        let datafs = millrace_datafs::Config {
            meta_url: Some(server.url().into()),
            meta_schema: server.new_schema(),
            meta_connections_max: 4,
            store_dir: store.path().join("objects"),
            ..millrace_datafs::Config::default()
        };
        Some(World::new(datafs, store, Some(server), (name, more), lease_ms))
    }

    fn new(
        datafs: millrace_datafs::Config,
        store: TempDir,
        server: Option<Arc<Server>>,
        (name, more): (&str, &str),
        lease_ms: u64,
    ) -> World {
        let home = tempfile::tempdir().unwrap();
        fill(&Datafs::open(home.path(), &datafs).unwrap());
        let job = job_text(name, &format!("workers_min = 2\n{more}"));
        let feed_cache_bytes = Config::default().feed_cache_bytes;
        let (more, launched) = (more.to_owned(), AtomicUsize::new(0));
        World { datafs, job, lease_ms, feed_cache_bytes, more, _store: store, server, hosts: None, launched }
    }

    /// Compares a report with the one of the uninterrupted run.
    pub(super) fn check(&self, report: &Value) {
        let plain = plain(&self.more);
        let same = ["end", "model_sha256", "loss_per_epoch", "rows_per_epoch", "validation", "best_epoch"];
        for key in same {
            assert_eq!(report[key], plain[key], "{key}: {report}");
        }
    }

    pub(super) fn coordinator(&self, standby: bool) -> Coordinator {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join("train.toml"), &self.job).unwrap();
        let mut address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let (prefix, host) = self.next_host();
        if let (Some(host), Some((hosts, _))) = (host, &self.hosts) {
            address.set_ip(hosts.address(host).parse().unwrap());
        }
        let address = address.to_string();
        let orders = Orders {
            home: home.path().to_owned(),
            datafs: self.datafs.clone(),
            token: private_file(home.path(), "token", TOKEN),
            address: address.clone(),
            standby,
            lease_ms: self.lease_ms,
            feed_cache_bytes: self.feed_cache_bytes,
        };
        let orders = serde_json::to_string(&orders).unwrap();
        Coordinator { child: Coordinator::launch(&prefix, &orders), home, address, prefix, orders }
    }

    pub(super) fn worker(&self, coordinators: &str) -> Worker {
        let (prefix, host) = self.next_host();
        self.worker_behind(&prefix, host, coordinators)
    }

    /// A worker on this machine of [`World::on_hosts`].
    pub(super) fn worker_on(&self, host: usize, coordinators: &str) -> Worker {
        let (hosts, _) = self.hosts.as_ref().unwrap();
        self.worker_behind(&hosts.prefix(host), Some(host), coordinators)
    }

    fn worker_behind(&self, prefix: &[String], host: Option<usize>, coordinators: &str) -> Worker {
        let mut worker =
            Worker::join_behind(prefix, coordinators, |orders| orders.datafs = self.datafs.clone());
        worker.host = host;
        worker
    }

    /// The machine of the next process, and the words before its program.
    fn next_host(&self) -> (Vec<String>, Option<usize>) {
        let Some((hosts, _)) = &self.hosts else { return (Vec::new(), None) };
        let host = self.launched.fetch_add(1, Ordering::SeqCst) % hosts.count();
        (hosts.prefix(host), Some(host))
    }
}

pub(super) struct Coordinator {
    child: Child,
    home: TempDir,
    pub(super) address: String,
    /// Words before the program.
    prefix: Vec<String>,
    orders: String,
}

impl Coordinator {
    fn launch(prefix: &[String], orders: &str) -> Child {
        this_program(prefix)
            .args(["--exact", "failover::coordinate_entry", "--nocapture"])
            .env(ENV_COORDINATE, orders)
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    }

    /// Kills it, and starts it again in its home, at its address.
    fn restart(&mut self) {
        self.kill();
        std::fs::remove_file(self.home.path().join("progress")).ok();
        self.child = Coordinator::launch(&self.prefix, &self.orders);
    }

    fn read(&self, name: &str) -> Option<Vec<u8>> {
        std::fs::read(self.home.path().join(name)).ok()
    }

    pub(super) fn progress(&self) -> Value {
        self.read("progress").map_or(Value::Null, |bytes| serde_json::from_slice(&bytes).unwrap())
    }

    pub(super) fn step(&self) -> u64 {
        self.progress()["step"].as_u64().unwrap_or_default()
    }

    pub(super) fn listens(&self) -> bool {
        self.progress()["listening"].is_string()
    }

    pub(super) fn waits(&self) -> bool {
        self.progress()["waiting_for"].is_string()
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether a process is one of the members that trained last.
    pub(super) fn trains_with(&self, pid: u32) -> bool {
        self.progress()["worker_pids"].as_array().is_some_and(|pids| pids.contains(&pid.into()))
    }

    /// Whether the members train, or wait for others, without this process.
    pub(super) fn trains_without(&self, pid: u32) -> bool {
        self.progress()["workers_missing"].as_u64() > Some(0) || !self.trains_with(pid)
    }

    pub(super) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    pub(super) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Its report or its error, once it has ended.
    pub(super) fn outcome(&mut self) -> Result<Value, String> {
        wait_until("a coordinator's end", || self.has_ended());
        match self.read("error") {
            Some(text) => Err(String::from_utf8(text).unwrap()),
            None => Ok(serde_json::from_slice(&self.read("report").unwrap()).unwrap()),
        }
    }

    pub(super) fn report(&mut self) -> Value {
        self.outcome().unwrap()
    }

    pub(super) fn error(&mut self) -> String {
        self.outcome().unwrap_err()
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// No checkpoint before the end: what the workers hold is all there is of a run.
const IN_MEMORY: &str = "epochs_max = 600\ncheckpoint_every_steps = 1000000";
/// Evaluations, their early end and the best weights are in the workers' state as well.
const EVALUATED: &str = "epochs_max = 250\ncheckpoint_every_steps = 1000000\n[validation]\n\
    dataset = \"data@v1:/train\"\nevery_epochs = 3\nearly_stopping = 20\nbest = true";

#[test]
fn standbys_replace_killed_coordinators_and_workers_keep_their_state() {
    let Some(world) = World::postgres("killed", IN_MEMORY, 3_000) else { return };
    let mut first = world.coordinator(true);
    wait_until("a coordinator", || first.listens());
    let mut standbys = [world.coordinator(true), world.coordinator(true)];
    wait_until("two standbys", || standbys.iter().all(Coordinator::waits));
    // One worker knows the first coordinator alone, and finds the others through the lease.
    let several = format!("127.0.0.1:1,{}", first.address);
    let mut workers = [world.worker(&first.address), world.worker(&several)];
    wait_until("a step", || first.step() >= 150);
    first.kill();
    let at = first.step();
    let leads = |standby: &Coordinator| standby.step() > 0;
    wait_until("a new coordinator", || standbys.iter().any(leads));
    let leading = usize::from(leads(&standbys[1]));
    assert!(!leads(&standbys[1 - leading]), "two coordinators");
    assert!(standbys[leading].step() >= at, "the state of the workers was lost");
    wait_until("more steps", || standbys[leading].step() >= at + 150);
    standbys[leading].kill();
    let at = standbys[leading].step();

    let last = &mut standbys[1 - leading];
    let report = last.report();
    world.check(&report);
    assert_eq!(report["workers_joined"], 2, "{report}");
    // A coordinator that waits for the second worker lets the first one make its state durable.
    assert!(report["resumed_from_step"].as_u64().is_none_or(|step| step >= 150), "{report}");
    assert!(last.step() >= at);
    for worker in &mut workers {
        assert_eq!(worker.ended(), succeeded("Done"));
    }
}

#[test]
fn a_coordinator_that_was_stopped_longer_than_its_lease_ends_and_the_run_goes_on() {
    let Some(world) = World::postgres("paused", EVALUATED, 3_000) else { return };
    let mut first = world.coordinator(true);
    wait_until("a coordinator", || first.listens());
    let mut standby = world.coordinator(true);
    wait_until("a standby", || standby.waits());
    let mut workers = [world.worker(&first.address), world.worker(&first.address)];
    wait_until("a step", || first.step() >= 150);
    signal("STOP", first.child.id());
    wait_until("steps under the next coordinator", || standby.step() > 0);
    signal("CONT", first.child.id());
    let error = first.error();
    assert!(error.contains("no longer the coordinator") && error.contains("--standby"), "{error}");
    let report = standby.report();
    world.check(&report);
    for worker in &mut workers {
        assert_eq!(worker.ended(), succeeded("Done"));
    }
}

#[test]
fn a_coordinator_that_is_asked_to_end_hands_the_run_over() {
    // The lease would expire after ten minutes.
    let world = World::embedded("handed", IN_MEMORY, 600_000);
    let mut first = world.coordinator(true);
    wait_until("a coordinator", || first.listens());
    let mut standby = world.coordinator(true);
    wait_until("a standby", || standby.waits());
    let mut workers = [world.worker(&first.address), world.worker(&first.address)];
    wait_until("a step", || first.step() >= 150);
    signal("TERM", first.child.id());
    let stopped = first.report();
    assert_eq!(stopped["end"], "stopped", "{stopped}");
    let report = standby.report();
    world.check(&report);
    assert_eq!(report["resumed_from_step"], stopped["steps"], "{report}");
    for worker in &mut workers {
        assert_eq!(worker.ended(), succeeded("Done"));
    }
    // The next one finds the run finished.
    let again = world.coordinator(true).report();
    assert_eq!((&again["already_published"], &again["version"]), (&true.into(), &1.into()), "{again}");
}

#[test]
fn without_standby_a_second_coordinator_is_refused_and_a_lost_one_replaced() {
    let world = World::embedded("single", IN_MEMORY, 1_000);
    let mut first = world.coordinator(false);
    wait_until("a coordinator", || first.listens());
    let error = world.coordinator(false).error();
    let pid = first.child.id().to_string();
    assert!(error.contains(&pid) && error.contains("--standby"), "{error}");
    let mut workers = [world.worker(&first.address), world.worker(&first.address)];
    wait_until("a step", || first.step() >= 150);
    first.kill();
    // From another home, where no lock tells that the first one is dead.
    let report = world.coordinator(false).report();
    world.check(&report);
    for worker in &mut workers {
        assert_eq!(worker.ended(), succeeded("Done"));
    }
}

#[test]
fn a_worker_without_a_coordinator_gives_up_with_the_run_and_the_remedy() {
    let world = World::embedded("left", IN_MEMORY, 1_000);
    let mut first = world.coordinator(false);
    wait_until("a coordinator", || first.listens());
    let address = first.address.clone();
    let join =
        |wait| Worker::join(&address, |orders| (orders.datafs, orders.wait) = (world.datafs.clone(), wait));
    let (worker, _other) = (join(5), join(600));
    wait_until("a step", || first.step() > 0);
    first.kill();
    let error = worker.error();
    let is_saved = "its state after step ";
    for part in [address.as_str(), "run ", "of job left", "--wait", "millrace train", "--join", is_saved] {
        assert!(error.contains(part), "{part}: {error}");
    }
}

/// Puts another holder into the job's lease, as a coordinator that takes over does.
fn depose(world: &World, coordinator: &Coordinator, job: &str) {
    let datafs = Datafs::open(coordinator.home.path(), &world.datafs).unwrap();
    let models = super::volume(&datafs, "models");
    let key = format!("trainer/{job}/lease");
    let mut record: Value = serde_json::from_slice(&models.key_get(&key).unwrap().unwrap()).unwrap();
    let fence = record["fence"].as_u64().unwrap() + 1;
    (record["fence"], record["holder"]) = (fence.into(), "another".into());
    // It dies at once.
    (record["lease_ms"], record["address"]) = (500.into(), Value::Null);
    let publish = millrace_datafs::Publish::new()
        .put_key(key, serde_json::to_vec(&record).unwrap())
        .put_key(format!("trainer/{job}/owner"), format!("{fence:020}-secret"));
    models.publish(publish).unwrap();
}

#[test]
fn a_coordinator_that_was_replaced_dismisses_no_worker() {
    // So long that the first one does not find out by itself.
    let world = World::embedded("deposed", IN_MEMORY, 600_000);
    let mut first = world.coordinator(false);
    wait_until("a coordinator", || first.listens());
    let mut standby = world.coordinator(true);
    wait_until("a standby", || standby.waits());
    let several = format!("{},{}", first.address, standby.address);
    let mut worker = world.worker(&several);
    wait_until("a worker", || first.progress()["workers_missing"] == 1);
    depose(&world, &first, "deposed");
    signal("TERM", first.child.id());
    let error = first.error();
    assert!(error.contains("no longer the coordinator"), "{error}");
    let mut other = world.worker(&several);
    world.check(&standby.report());
    for worker in [&mut worker, &mut other] {
        assert_eq!(worker.ended(), succeeded("Done"));
    }
}

#[test]
fn a_standby_ends_with_the_error_of_a_job_that_failed() {
    let mut world = World::embedded("failing", IN_MEMORY, 600_000);
    world.job = world.job.replace("learning_rate = 0.01", "learning_rate = 1e30");
    let mut first = world.coordinator(true);
    wait_until("a coordinator", || first.listens());
    let mut standby = world.coordinator(true);
    wait_until("a standby", || standby.waits());
    let mut workers = [world.worker(&first.address), world.worker(&first.address)];
    let error = first.error();
    assert!(error.contains("step "), "{error}");
    let pid = first.child.id();
    let told = standby.error();
    assert!(told.contains(&error) && told.contains(&format!("process {pid}")), "{told}");
    for worker in &mut workers {
        worker.ended();
    }
    // One that starts afterwards tries again.
    let again = world.coordinator(true);
    wait_until("a coordinator", || again.listens());
}

/// Forwards connections to the server of the metadata while it is open.
pub(super) struct Gate {
    address: std::net::SocketAddr,
    is_open: Arc<AtomicBool>,
    connections: Arc<Mutex<Vec<TcpStream>>>,
}

impl Gate {
    pub(super) fn new(server: &Server) -> Gate {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let gate = Gate {
            address: listener.local_addr().unwrap(),
            is_open: Arc::new(AtomicBool::new(true)),
            connections: Arc::default(),
        };
        let (is_open, connections) = (Arc::clone(&gate.is_open), Arc::clone(&gate.connections));
        let socket = server.folder().join(format!(".s.PGSQL.{}", server.port()));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(client) = stream else { return };
                let mut known = connections.lock().unwrap();
                if !is_open.load(Ordering::Relaxed) {
                    continue;
                }
                let Ok(there) = UnixStream::connect(&socket) else { continue };
                known.push(client.try_clone().unwrap());
                let (mut to, mut from) = (there.try_clone().unwrap(), client.try_clone().unwrap());
                std::thread::spawn(move || {
                    std::io::copy(&mut from, &mut to).ok();
                    to.shutdown(Shutdown::Both).ok();
                });
                std::thread::spawn(move || {
                    let (mut there, mut client) = (there, client);
                    std::io::copy(&mut there, &mut client).ok();
                    client.shutdown(Shutdown::Both).ok();
                });
            }
        });
        gate
    }

    /// A worker whose metadata is behind this gate.
    pub(super) fn worker(&self, world: &World, coordinators: &str) -> Worker {
        Worker::join(coordinators, |orders| {
            orders.datafs = world.datafs.clone();
            let port = self.address.port();
            let url = format!("postgres://millrace@127.0.0.1:{port}/postgres?sslmode=disable");
            orders.datafs.meta_url = Some(url.into());
            orders.datafs.lock_wait_ms = 200;
        })
    }

    pub(super) fn close(&self) {
        self.is_open.store(false, Ordering::Relaxed);
        for connection in self.connections.lock().unwrap().drain(..) {
            connection.shutdown(Shutdown::Both).ok();
        }
    }

    pub(super) fn open(&self) {
        self.is_open.store(true, Ordering::Relaxed);
    }
}

#[test]
fn an_outage_of_the_metadata_costs_no_worker_and_no_state() {
    let more = "epochs_max = 1000\ncheckpoint_every_steps = 50";
    let Some(world) = World::postgres("outage", more, 600_000) else { return };
    let gate = Gate::new(world.server.as_ref().unwrap());
    let mut first = world.coordinator(false);
    wait_until("a coordinator", || first.listens());
    let worker = || gate.worker(&world, &first.address);
    let mut workers = [worker(), worker()];
    wait_until("a step", || first.step() >= 150);
    gate.close();
    wait_until("a failed checkpoint", || first.progress()["unsaved_seconds"].as_u64() > Some(0));
    let at = first.step();
    wait_until("more steps", || first.step() >= at + 150);

    // The workers lose the coordinator as well. Without the metadata they cannot come back to it.
    first.restart();
    let missing = |coordinator: &Coordinator| coordinator.progress()["workers_missing"].as_u64();
    wait_until("a coordinator", || missing(&first) == Some(2));
    wait_until("an attempt to come back", || missing(&first) < Some(2));
    wait_until("its failure", || missing(&first) == Some(2));
    gate.open();
    wait_until("a step", || first.step() > 0);
    assert!(first.step() >= at + 150, "the state of the workers was lost");
    world.check(&first.report());
    for worker in &mut workers {
        assert_eq!(worker.ended(), succeeded("Done"));
    }
}
