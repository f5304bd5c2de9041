//! Kills of a process that publishes checkpoints: what it was told to be durable stays, and what is left can be read.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use super::*;

const ENV_HOME: &str = "MILLRACE_TEST_CHECKPOINT_HOME";
/// Number of kills; every run of the tests makes a few of them.
const ENV_KILLS: &str = "MILLRACE_TEST_KILLS";
const KILLS: u32 = 40;
/// What the publishing process writes before the step of each durable checkpoint.
const DURABLE: &str = "durable ";

/// The process that is killed: goes on from the newest checkpoint and publishes one per step, for ever.
#[test]
fn publishing_entry() {
    let Some(home) = std::env::var_os(ENV_HOME) else { return };
    let datafs = datafs(Path::new(&home));
    let run = checkpoints(&datafs, "r");
    run.begin(b"model", None, b"{}", |_, _| false).unwrap();
    let first = newest(&run, u64::MAX).unwrap_or_default() + 1;
    for step in first.. {
        run.write(&state(step), &layout(), None).unwrap();
        println!("{DURABLE}{step}");
    }
}

fn publishing(home: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "checkpoint::tests::kills::publishing_entry", "--nocapture", "--test-threads", "1"])
        .env(ENV_HOME, home)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn checkpoints_survive_kills_at_any_moment() {
    let kills = std::env::var(ENV_KILLS).map_or(KILLS, |text| text.parse().unwrap());
    let home = tempfile::tempdir().unwrap();
    drop(datafs(home.path()));
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let mut durable = 0;
    for kill in 0..kills {
        let mut child = publishing(home.path());
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut told = |line: std::io::Result<String>| {
            if let Some((_, step)) = line.unwrap().split_once(DURABLE) {
                durable = step.parse().unwrap();
                return true;
            }
            false
        };
        // The moment of the kill: after some checkpoints, somewhere in the publication of the next one.
        let mut checkpoints_left = random.next_u32() % 3;
        while checkpoints_left > 0 {
            let line = lines.next().expect("the process ended by itself");
            checkpoints_left -= u32::from(told(line));
        }
        std::thread::sleep(Duration::from_micros(u64::from(random.next_u32() % 30_000)));
        child.kill().unwrap();
        child.wait().unwrap();
        lines.for_each(|line| {
            told(line);
        });
        // At most the checkpoint after the last reported one may be there as well.
        let found = newest(&checkpoints(&datafs(home.path()), "r"), u64::MAX).unwrap_or_default();
        assert!(
            (durable..=durable + 1).contains(&found),
            "kill {kill}: {durable} was durable, {found} is the newest"
        );
        durable = found;
    }
    assert!(durable > 0, "no checkpoint was written");
    // A last publication removes what interrupted ones left.
    let datafs = datafs(home.path());
    let run = checkpoints(&datafs, "r");
    run.begin(b"model", None, b"{}", |_, _| false).unwrap();
    run.write(&state(durable + 1), &layout(), None).unwrap();
    datafs.gc().unwrap();
    let there = objects(home.path()).len();
    assert!(there <= run.keep, "{there} checkpoints on disk after {kills} kills");
}
