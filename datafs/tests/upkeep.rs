//! Tests of the election between real processes: one that is killed or stopped is replaced, and does no harm when it
//! goes on.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use millrace_datafs::{Config, Datafs, FsckOptions, UpkeepReport};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::child;
use crate::engine::{Engine, inherited};

/// Longest wait for an election on a busy machine; the lease is 3 s.
const WAIT: Duration = Duration::from_secs(60);

fn config(base: Config) -> Config {
    Config { gc_interval_ms: 200, garbage_grace_ms: 0, session_lease_ms: 2_000, ..base }
}

/// The child: has the home open until its standard input ends.
#[test]
fn process() {
    let Some((home, _)) = child::task() else { return };
    let datafs = Datafs::open(&home, &config(inherited())).unwrap();
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).unwrap();
    drop(datafs);
}

struct Process(Child);

impl Process {
    fn start(home: &Path, engine: &Engine) -> Process {
        let mut command = child::command("upkeep::process", home, 0);
        engine.tell(&mut command);
        Process(command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap())
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.0.id() as i32), signal).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until a process is elected, and returns the state.
fn elected(datafs: &Datafs, process: &Process) -> UpkeepReport {
    let deadline = Instant::now() + WAIT;
    loop {
        let report = datafs.fsck(&FsckOptions::default(), &mut |_| {}).unwrap();
        assert!(report.is_sound(), "{:?}", report.found);
        if let Some(upkeep) = report.upkeep.filter(|upkeep| upkeep.pid == process.0.id()) {
            return upkeep;
        }
        assert!(Instant::now() < deadline, "process {} is not elected", process.0.id());
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn turns_pass_on(engine: &Engine) {
    let home = tempfile::tempdir().unwrap();
    // This process does no background work.
    let datafs = Datafs::open(home.path(), &Config { gc_interval_ms: 0, ..config(engine.config()) }).unwrap();
    datafs.volume_create(&"v".parse().unwrap()).unwrap();
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    let mut stored = 0;
    let mut churn = || {
        for i in 0..20 {
            stored += 1;
            view.write_file(&format!("file-{i}"), &vec![stored as u8; 9_000]).unwrap();
        }
    };
    let first = Process::start(home.path(), engine);
    let one = elected(&datafs, &first);
    let second = Process::start(home.path(), engine);
    churn();
    // A process that was stopped is replaced once its lease is over.
    first.signal(Signal::SIGSTOP);
    let two = elected(&datafs, &second);
    assert!(two.turn > one.turn, "{one:?}, {two:?}");
    churn();
    first.signal(Signal::SIGCONT);
    churn();
    let still = elected(&datafs, &second);
    assert_eq!(still.turn, two.turn, "the process that went on has taken its turn back");
    // A process that was killed, and one that ends in order.
    second.signal(Signal::SIGKILL);
    let third = Process::start(home.path(), engine);
    drop(first);
    drop(second);
    assert!(elected(&datafs, &third).turn > two.turn);
    churn();
    // Its unlinked files are freed once it has ended. It would not answer questions about them.
    drop((view, datafs));
    let deadline = Instant::now() + WAIT;
    while objects(home.path()) > 20 {
        assert!(Instant::now() < deadline, "{} objects are left", objects(home.path()));
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(third);
    let datafs = Datafs::open(home.path(), &config(engine.config())).unwrap();
    let report = datafs.fsck(&FsckOptions { scrub: true, repair: false }, &mut |_| {}).unwrap();
    assert!(report.is_sound(), "{:?}", report.found);
    assert_eq!((report.names, report.objects), (20, 20));
}

/// Objects in the store.
fn objects(home: &Path) -> usize {
    let folders = std::fs::read_dir(home.join("datafs/objects")).unwrap();
    // Beside the folders is the marker of the store.
    folders.filter_map(|folder| std::fs::read_dir(folder.unwrap().path()).ok()).map(Iterator::count).sum()
}

#[test]
fn turns_pass_on_between_processes_of_one_machine() {
    turns_pass_on(&Engine::sqlite());
}

#[test]
fn turns_pass_on_between_processes_on_postgres() {
    let Some(engine) = Engine::postgres() else { return };
    turns_pass_on(&engine);
}
