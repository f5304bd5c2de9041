//! Workers that join over the network, with homes of their own that share the metadata and the store.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use millrace_datafs::Datafs;
use millrace_trainer::join::{ClientTls, Join, Listen, ServerTls, Token};
use millrace_trainer::{Progress, Setup, TrainReport};
use tempfile::TempDir;

use super::failover::plain;
use super::server::Server;
use super::{home, job, job_text, run, setup, signal, wait_until};

const ENV_JOIN: &str = "MILLRACE_TEST_JOIN";
const ENV_ORDERS: &str = "MILLRACE_TEST_JOIN_ORDERS";
const ENV_LISTEN: &str = "MILLRACE_TEST_LISTEN";
const ENV_LISTEN_TOKEN: &str = "MILLRACE_TEST_LISTEN_TOKEN";
pub(super) const TOKEN: &str = "a token of the tests";

/// A worker that joins, when this binary was launched as one: writes how it ended to a file.
#[test]
fn join_entry() {
    let Ok(coordinator) = std::env::var(ENV_JOIN) else { return };
    let orders: Orders = serde_json::from_str(&std::env::var(ENV_ORDERS).unwrap()).unwrap();
    let datafs = Datafs::open(&orders.home, &orders.datafs).unwrap();
    let ended = Token::read(&orders.token).and_then(|token| {
        let join = Join {
            coordinator,
            token,
            tls: orders.ca.map(|ca| ClientTls::read(&ca).unwrap()),
            listen_ring: None,
            advertise: orders.advertise,
            wait: Duration::from_secs(orders.wait),
            silence: Duration::from_millis(1_500),
            leaves_on_hangup: false,
        };
        millrace_trainer::worker::join(&join, &datafs, None, None, None, |_| super::WORKER_EXIT)
    });
    let text = match &ended {
        Ok(end) => format!("{end:?}"),
        Err(error) => error.one_line(),
    };
    std::fs::write(orders.home.join("ended"), text).unwrap();
    if ended.is_err() {
        std::process::exit(1);
    }
}

#[derive(serde::Serialize, serde::Deserialize)]
pub(super) struct Orders {
    home: PathBuf,
    pub(super) datafs: millrace_datafs::Config,
    token: PathBuf,
    advertise: Option<String>,
    ca: Option<PathBuf>,
    pub(super) wait: u64,
}

impl Orders {
    /// Uses the metadata and the store of another home.
    pub(super) fn share(&mut self, home: &Path) {
        let usual = millrace_datafs::Config::default();
        self.datafs.meta_file = home.join(usual.meta_file);
        self.datafs.store_dir = home.join(usual.store_dir);
    }
}

/// The port of a job process, when a test gave it one.
pub(super) fn listen_from_env() -> Option<Listen> {
    let address = std::env::var(ENV_LISTEN).ok()?.parse().unwrap();
    let token = Token::read(std::env::var(ENV_LISTEN_TOKEN).unwrap().as_ref()).unwrap();
    Some(Listen { address, advertise: None, token, tls: None, workers_local: Some(0) })
}

pub(super) fn private_file(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    path
}

fn listen(home: &Path, address: &str) -> Listen {
    let token = Token::read(&private_file(home, "token", TOKEN)).unwrap();
    let address = address.parse().unwrap();
    Listen { address, advertise: None, token, tls: None, workers_local: Some(0) }
}

/// This test binary, behind other words of a command line.
pub(super) fn this_program(prefix: &[String]) -> Command {
    let program = std::env::current_exe().unwrap();
    match prefix {
        [] => Command::new(program),
        [first, rest @ ..] => {
            let mut command = Command::new(first);
            command.args(rest).arg(program);
            command
        }
    }
}

/// A worker process with a home of its own.
pub(super) struct Worker {
    pub(super) child: Child,
    home: TempDir,
    /// Its machine, if it does not share that of the test.
    pub(super) host: Option<usize>,
}

impl Worker {
    /// With the metadata and the store of the coordinator's home `shared`.
    fn start(shared: &Path, coordinator: SocketAddr) -> Worker {
        Worker::with(coordinator, |orders| orders.share(shared))
    }

    /// With volumes of its own, unless `change` gives it others.
    fn with(coordinator: SocketAddr, change: impl FnOnce(&mut Orders)) -> Worker {
        Worker::join(&coordinator.to_string(), change)
    }

    /// [`Worker::with`] several coordinators.
    pub(super) fn join(coordinators: &str, change: impl FnOnce(&mut Orders)) -> Worker {
        Worker::join_behind(&[], coordinators, change)
    }

    /// [`Worker::join`] with words before the program.
    pub(super) fn join_behind(
        prefix: &[String],
        coordinators: &str,
        change: impl FnOnce(&mut Orders),
    ) -> Worker {
        let home = tempfile::tempdir().unwrap();
        let mut orders = Orders {
            home: home.path().to_owned(),
            datafs: millrace_datafs::Config::default(),
            token: private_file(home.path(), "token", TOKEN),
            advertise: None,
            ca: None,
            wait: 60,
        };
        change(&mut orders);
        let child = this_program(prefix)
            .args(["--exact", "joined::join_entry", "--nocapture"])
            .env(ENV_JOIN, coordinators)
            .env(ENV_ORDERS, serde_json::to_string(&orders).unwrap())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Worker { child, home, host: None }
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the end: whether it succeeded, and what it wrote.
    pub(super) fn ended(&mut self) -> (bool, String) {
        wait_until("a worker's end", || self.child.try_wait().unwrap().is_some());
        let text = std::fs::read_to_string(self.home.path().join("ended")).unwrap_or_default();
        (self.child.wait().unwrap().success(), text)
    }

    /// The error with which it ended.
    pub(super) fn error(mut self) -> String {
        let (succeeded, text) = self.ended();
        assert!(!succeeded && !text.is_empty(), "{text}");
        text
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Trains a job to which workers of other machines join.
fn run_listening(
    home: &Path,
    name: &str,
    more: &str,
    on_progress: impl FnMut(Progress) + Send,
) -> millrace_trainer::Result<TrainReport> {
    let setup = Setup { listen: Some(listen(home, "127.0.0.1:0")), ..setup(home) };
    run(setup, job(name, more), on_progress)
}

pub(super) fn succeeded(text: &str) -> (bool, String) {
    (true, text.to_owned())
}

#[test]
fn joined_workers_come_and_go_without_changing_the_model() {
    let home = home();
    come_and_go(&|| setup(home.path()), &|orders| orders.share(home.path()));
}

#[test]
fn postgres_and_a_shared_store_serve_workers_of_other_homes() {
    let Some(server) = Server::shared() else { return };
    let (home, store) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let config = millrace_datafs::Config {
        meta_url: Some(server.url().into()),
        meta_schema: server.new_schema(),
        meta_connections_max: 8,
        store_dir: store.path().join("objects"),
        ..millrace_datafs::Config::default()
    };
    super::fill(&Datafs::open(home.path(), &config).unwrap());
    let own = || super::setup_with(home.path(), config.clone());
    come_and_go(&own, &|orders| orders.datafs = config.clone());
}

/// Trains a job with workers that join, die and leave, and compares it with one worker alone.
fn come_and_go(setup: &(dyn Fn() -> Setup + Sync), share: &(dyn Fn(&mut Orders) + Sync)) {
    // Long enough for workers that start slowly.
    let more = "epochs_max = 2400\ncheckpoint_every_steps = 700";
    let plain = plain(more);

    let mut workers: Vec<Worker> = Vec::new();
    let (mut waited_for, mut killed) = (Vec::new(), false);
    let own = setup();
    let own = Setup { listen: Some(listen(&own.home, "127.0.0.1:0")), ..own };
    let report = run(own, job("joined", &format!("workers_min = 2\n{more}")), |seen| {
        let start = || Worker::with(seen.listening.unwrap(), share);
        if waited_for.last() != Some(&seen.workers_missing) {
            waited_for.push(seen.workers_missing);
        }
        let members = seen.worker_pids.len();
        match workers.len() {
            0 => workers.extend([start(), start()]),
            // The first one dies: the job is below its minimum, and pauses, until another one joins.
            2 if members == 2 && seen.step >= 150 && !killed => {
                signal("KILL", workers[0].pid());
                killed = true;
            }
            2 if killed && seen.workers_missing == 1 => workers.push(start()),
            3 if members == 2 && seen.step >= 500 && !seen.worker_pids.contains(&workers[0].pid()) => {
                workers.push(start());
            }
            // With three members, one is asked to leave.
            4 if members == 3 => {
                signal("TERM", workers[1].pid());
                workers.push(start());
            }
            _ => {}
        }
    })
    .unwrap();
    let reported = serde_json::to_value(&report).unwrap();
    for key in ["model_sha256", "loss_per_epoch", "rows_per_epoch"] {
        assert_eq!(reported[key], plain[key], "{key}");
    }
    assert_eq!((report.workers, report.workers_lost), (0, 1));
    assert_eq!(workers.len(), 5, "the job ended before the last one was started");
    assert_eq!(workers.remove(1).ended(), succeeded("Left"));
    for worker in &mut workers[1..] {
        assert_eq!(worker.ended(), succeeded("Done"));
    }
    assert!(
        waited_for.contains(&2) && waited_for.contains(&1) && waited_for.ends_with(&[0]),
        "{waited_for:?}"
    );
}

#[test]
fn workers_here_and_workers_that_join_train_together() {
    let home = home();
    let more = "epochs_max = 60";
    let plain = run(setup(home.path()), job("plain", &format!("workers = 1\n{more}")), |_| {}).unwrap();
    let listen = Listen { workers_local: None, ..listen(home.path(), "127.0.0.1:0") };
    let setup = Setup { listen: Some(listen), ..setup(home.path()) };
    let mut worker = None;
    let mut most = 0;
    let job = job("both", &format!("workers = 2\nworkers_min = 3\nworkers_max = 3\n{more}"));
    let report = run(setup, job, |seen| {
        worker.get_or_insert_with(|| Worker::start(home.path(), seen.listening.unwrap()));
        most = most.max(seen.worker_pids.len());
    })
    .unwrap();
    assert_eq!(report.model_sha256, plain.model_sha256);
    assert_eq!((report.workers, report.workers_joined, report.workers_lost, most), (2, 1, 0, 3));
    assert_eq!(worker.unwrap().ended(), succeeded("Done"));
}

#[test]
fn a_joined_worker_goes_on_with_a_coordinator_that_was_started_again() {
    let home = home();
    let more = "epochs_max = 400\ncheckpoint_every_steps = 50";
    std::fs::write(home.path().join("train.toml"), job_text("resumed", more)).unwrap();
    let plain = run(setup(home.path()), job("plain", &format!("workers = 1\n{more}")), |_| {}).unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let token = private_file(home.path(), "token", TOKEN);
    let progress = home.path().join("progress.json");
    let step = || -> Option<u64> {
        let read: serde_json::Value = serde_json::from_slice(&std::fs::read(&progress).ok()?).ok()?;
        read["step"].as_u64()
    };
    let launch = || {
        let _ = std::fs::remove_file(&progress);
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "job_entry", "--nocapture"])
            .env(super::ENV_HOME, home.path())
            .env(ENV_LISTEN, port.to_string())
            .env(ENV_LISTEN_TOKEN, &token)
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    };
    // The worker may come before its coordinator.
    let mut worker = Worker::start(home.path(), port);
    for wanted in [130, 500] {
        let mut coordinator = launch();
        wait_until("the step", || step().is_some_and(|step| step >= wanted));
        coordinator.kill().unwrap();
        coordinator.wait().unwrap();
        assert!(worker.child.try_wait().unwrap().is_none());
    }
    assert!(launch().wait().unwrap().success());
    let report: serde_json::Value =
        serde_json::from_slice(&std::fs::read(home.path().join("report.json")).unwrap()).unwrap();
    assert_eq!(report["model_sha256"].as_str(), plain.model_sha256.as_deref());
    assert_eq!(report["workers_joined"], 1, "{report}");
    assert_eq!(worker.ended(), succeeded("Done"));
}

#[test]
fn the_last_worker_that_leaves_writes_a_checkpoint() {
    let home = home();
    let more = "epochs_max = 120\ncheckpoint_every_steps = 100000";
    let plain = run(setup(home.path()), job("plain", &format!("workers = 1\n{more}")), |_| {}).unwrap();
    let mut workers: Vec<Worker> = Vec::new();
    let mut left_at = None;
    let report = run_listening(home.path(), "alone", more, |seen| {
        let address = seen.listening.unwrap();
        if workers.is_empty() || (left_at.is_some() && seen.workers_missing > 0 && workers.len() == 1) {
            workers.push(Worker::start(home.path(), address));
        }
        if seen.step >= 200 && left_at.is_none() {
            left_at = Some(seen.step);
            signal("TERM", workers[0].pid());
        }
        // The checkpoint is the only way for the state to the next worker.
        if workers.len() == 2 && seen.workers_missing == 0 {
            assert!(seen.step >= left_at.unwrap(), "{seen:?}");
        }
    })
    .unwrap();
    assert_eq!(report.model_sha256, plain.model_sha256);
    assert_eq!((report.workers_joined, report.workers_lost), (2, 0));
    assert_eq!(workers[0].ended(), succeeded("Left"));
    assert_eq!(workers[1].ended(), succeeded("Done"));
}

#[test]
fn the_state_of_a_worker_that_left_outlives_the_death_of_all_others() {
    let home = home();
    // Long enough for a worker to leave on a busy machine.
    let more = "epochs_max = 600\ncheckpoint_every_steps = 100000";
    let plain = run(setup(home.path()), job("plain", &format!("workers = 1\n{more}")), |_| {}).unwrap();
    let mut workers: Vec<Worker> = Vec::new();
    let (mut leaving, mut left_at, mut killed) = (None, 0, false);
    let report = run_listening(home.path(), "left", more, |seen| {
        let address = seen.listening.unwrap();
        let start = || Worker::start(home.path(), address);
        if workers.is_empty() {
            workers.extend([start(), start()]);
        }
        if leaving.is_none() && seen.worker_pids.len() == 2 && seen.step >= 200 {
            // Not the one that writes the checkpoints.
            leaving = workers.iter().position(|worker| worker.pid() == seen.worker_pids[1]);
            left_at = seen.step;
            signal("TERM", seen.worker_pids[1]);
        }
        if let Some(index) = leaving.filter(|_| !killed)
            && workers[index].child.try_wait().unwrap().is_some()
        {
            killed = true;
            signal("KILL", workers[1 - index].pid());
        }
        if killed && seen.workers_missing > 0 && workers.len() == 2 {
            workers.push(start());
        }
        assert!(seen.step >= left_at, "{seen:?}");
    })
    .unwrap();
    assert_eq!(report.model_sha256, plain.model_sha256);
    assert_eq!((report.workers_joined, report.workers_lost), (3, 1));
    assert_eq!(workers[leaving.unwrap()].ended(), succeeded("Left"));
    assert_eq!(workers[2].ended(), succeeded("Done"));
}

#[test]
fn workers_that_do_not_fit_are_refused_and_the_job_goes_on() {
    let home = home();
    let more = "epochs_max = 20";
    let plain = run(setup(home.path()), job("plain", &format!("workers = 1\n{more}")), |_| {}).unwrap();
    let mut refusing = None;
    let report = run_listening(home.path(), "guarded", &format!("workers_max = 2\n{more}"), |seen| {
        let address = seen.listening.unwrap();
        // The coordinator must not wait for its own callback.
        refusing.get_or_insert_with(|| {
            let shared = home.path().to_owned();
            std::thread::spawn(move || refused(&shared, address))
        });
    })
    .unwrap();
    let mut worker = refusing.unwrap().join().unwrap();
    assert_eq!(report.model_sha256, plain.model_sha256);
    assert_eq!((report.workers_joined, report.workers_lost), (2, 1), "{report:?}");
    assert_eq!(worker.ended(), succeeded("Done"));
}

/// Sends the coordinator what does not fit, then a worker that does.
fn refused(shared: &Path, address: SocketAddr) -> Worker {
    // Connections that say nothing, and others that speak something else.
    let silent: Vec<_> = (0..100).map(|_| std::net::TcpStream::connect(address).unwrap()).collect();
    let mut stranger = std::net::TcpStream::connect(address).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();

    let wrong = Worker::with(address, |orders| {
        orders.token = private_file(&orders.home, "other", "another secret of 16");
    });
    let error = wrong.error();
    assert!(error.contains("another token") && error.contains(&address.to_string()), "{error}");

    let open = Worker::with(address, |orders| {
        std::fs::set_permissions(&orders.token, std::fs::Permissions::from_mode(0o644)).unwrap();
    });
    let error = open.error();
    assert!(error.contains("chmod 600"), "{error}");

    let elsewhere = Worker::with(address, |_| {});
    let error = elsewhere.error();
    assert!(error.contains("no volume models here") && error.contains("meta_url"), "{error}");

    let nameless = Worker::with(address, |orders| orders.advertise = Some("no.such.invalid".to_owned()));
    let error = nameless.error();
    assert!(error.contains("--advertise no.such.invalid"), "{error}");
    drop(silent);
    Worker::start(shared, address)
}

#[test]
fn a_port_without_a_coordinator_is_reported() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let web = listener.local_addr().unwrap();
    let ended = Arc::new(AtomicBool::new(false));
    let over = Arc::clone(&ended);
    let server = std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let answer = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n";
            if over.load(Ordering::Relaxed) || stream.write_all(answer).is_err() {
                return;
            }
            let mut rest = Vec::new();
            let _ = stream.read_to_end(&mut rest);
        }
    });
    let error = Worker::with(web, |_| {}).error();
    assert!(error.contains("not a coordinator") && error.contains(&web.to_string()), "{error}");
    ended.store(true, Ordering::Relaxed);
    drop(std::net::TcpStream::connect(web).unwrap());
    server.join().unwrap();

    // The listener is gone.
    let began = Instant::now();
    let error = Worker::with(web, |orders| orders.wait = 1).error();
    assert!(error.contains("refused") && error.contains("--wait"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(30));

    // A listener that accepts and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let error = Worker::with(silent.local_addr().unwrap(), |orders| orders.wait = 1).error();
    assert!(error.contains("gave up"), "{error}");
}

/// Writes a self-signed certificate for 127.0.0.1 and its key; returns their paths.
fn certificate(folder: &Path, name: &str) -> (PathBuf, PathBuf) {
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    let certificate = certificate.self_signed(&key).unwrap().pem();
    let (of_certificate, of_key) = (format!("{name}.pem"), format!("{name}.key"));
    (private_file(folder, &of_certificate, &certificate), private_file(folder, &of_key, &key.serialize_pem()))
}

#[test]
fn a_worker_with_an_authority_joins_no_coordinator_with_another_certificate() {
    let home = home();
    let (certificate, key) = self::certificate(home.path(), "own");
    let (other, other_key) = self::certificate(home.path(), "other");
    let error = ServerTls::read(&certificate, &other_key).unwrap_err().to_string();
    assert!(error.contains("does not fit"), "{error}");
    let tls = Some(ServerTls::read(&certificate, &key).unwrap());
    let setup =
        Setup { listen: Some(Listen { tls, ..listen(home.path(), "127.0.0.1:0") }), ..setup(home.path()) };
    let mut trusting = None;
    let report = run(setup, job("secure", "epochs_max = 20"), |seen| {
        let address = seen.listening.unwrap();
        trusting.get_or_insert_with(|| {
            let (shared, other) = (home.path().to_owned(), other.clone());
            let certificate = certificate.clone();
            std::thread::spawn(move || {
                let error = Worker::with(address, |orders| orders.ca = Some(other)).error();
                assert!(error.contains("TLS fails"), "{error}");
                Worker::with(address, |orders| {
                    orders.ca = Some(certificate);
                    orders.share(&shared);
                })
            })
        });
    })
    .unwrap();
    assert_eq!((report.workers_joined, report.workers_lost), (1, 0));
    assert_eq!(trusting.unwrap().join().unwrap().ended(), succeeded("Done"));
}

/// The teacher is a file of the coordinator, which no worker of another machine can read.
#[test]
fn joined_workers_read_the_teacher_of_the_run_from_the_volume() {
    let home = home();
    let teacher = tempfile::tempdir().unwrap();
    std::fs::write(teacher.path().join("model.onnx"), super::objectives::formula_model(3, 5)).unwrap();
    let place = teacher.path().to_str().unwrap().to_owned();
    let more = format!("epochs_max = 3\nloss = {{ kind = \"kl\", teacher = \"{place}\" }}");
    let plain = run(setup(home.path()), job("plain", &format!("workers = 1\n{more}")), |_| {}).unwrap();
    let (mut worker, mut teacher) = (None, Some(teacher));
    let report = run_listening(home.path(), "joined", &more, |seen| {
        if let (Some(address), Some(teacher)) = (seen.listening, teacher.take()) {
            teacher.close().unwrap();
            worker = Some(Worker::start(home.path(), address));
        }
    })
    .unwrap();
    assert_eq!(worker.unwrap().ended(), succeeded("Done"));
    assert_eq!((report.run, report.model_sha256), (plain.run, plain.model_sha256));
}
