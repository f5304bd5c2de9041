//! Seeded runs in which workers and coordinators are killed, suspended, asked to leave and replaced. The model is that
//! of one worker without interruption, and each row is part of one applied step per epoch.
#![allow(clippy::print_stdout)]

use std::time::{Duration, Instant};

use millrace_trainer::{Config, Setup, train};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore as _, SeedableRng as _};
use tokio_util::sync::CancellationToken;

use super::failover::{Coordinator, World};
use super::joined::{Worker, succeeded};
use super::{job_text, signal, wait_until};
use serde_json::Value;

/// Number of seeds; every run of the tests takes a few of them.
const ENV_SEEDS: &str = "MILLRACE_CHAOS_SEEDS";
const SEEDS: u64 = 2;
/// Blows of one seed.
const BLOWS: usize = 5;
const WORKERS_MAX: u64 = 4;
/// Machines of a run in which processes share none.
const HOSTS: usize = 4;
/// A busy machine may keep a coordinator from its renewals for longer. Then another one leads, as after a blow.
const LEASE_MS: u64 = 2_000;
/// In the error of a coordinator that was replaced.
const REPLACED: &str = "no longer the coordinator";
/// More than what a run does until its last blow.
const MORE: &str = "epochs_max = 1000\ncheckpoint_every_steps = 150";
/// Fewest and most steps between two blows.
const PAUSE: (u64, u64) = (40, 300);

/// What happens to a run.
#[derive(Debug, Clone, Copy)]
enum Blow {
    KillWorker,
    /// Longer than the heartbeat limit.
    SuspendWorker,
    AskWorkerToLeave,
    Join,
    KillCoordinator,
    /// Longer than the lease.
    SuspendCoordinator,
    HandOver,
}

impl Blow {
    const ALL: [Blow; 7] = [
        Blow::KillWorker,
        Blow::SuspendWorker,
        Blow::AskWorkerToLeave,
        Blow::Join,
        Blow::KillCoordinator,
        Blow::SuspendCoordinator,
        Blow::HandOver,
    ];
}

/// A run with its processes.
struct Run<'a> {
    world: &'a World,
    random: ChaCha8Rng,
    leader: Coordinator,
    standby: Coordinator,
    workers: Vec<Worker>,
    workers_min: usize,
}

impl Run<'_> {
    fn begin(world: &World, random: ChaCha8Rng, workers_min: usize, workers: usize) -> Run<'_> {
        let leader = world.coordinator(true);
        wait_until("a coordinator", || leader.listens());
        let standby = world.coordinator(true);
        wait_until("a standby", || standby.waits());
        let mut run = Run { world, random, leader, standby, workers: Vec::new(), workers_min };
        (0..workers).for_each(|_| run.start_worker());
        for worker in &run.workers {
            wait_until("a member", || run.leader.trains_with(worker.pid()));
        }
        run
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random.next_u64() % limit
    }

    fn start_worker(&mut self) {
        self.workers.push(self.world.worker(&format!("{},{}", self.leader.address, self.standby.address)));
    }

    /// Starts a worker, which later finds the run by its lease alone.
    fn join(&mut self) {
        self.start_worker();
        let (worker, leader) = (&self.workers[self.workers.len() - 1], &mut self.leader);
        wait_until("a member", || leader.trains_with(worker.pid()) || leader.has_ended());
    }

    /// Takes a worker out of the run, and starts another one if there would be too few.
    fn take_worker(&mut self) -> Worker {
        let at = self.below(self.workers.len() as u64) as usize;
        let taken = self.workers.swap_remove(at);
        if self.workers.len() < self.workers_min || self.below(2) == 0 {
            self.join();
        }
        taken
    }

    /// The standby leads, and another one waits. Gives the former leader.
    fn replace_leader(&mut self) -> Coordinator {
        let standby = &mut self.standby;
        wait_until("the next coordinator", || standby.listens() || standby.has_ended());
        let mut next = self.world.coordinator(true);
        wait_until("a standby", || next.waits() || next.has_ended());
        let leader = std::mem::replace(&mut self.standby, next);
        std::mem::replace(&mut self.leader, leader)
    }

    /// The report of the run.
    fn report(&mut self) -> Value {
        loop {
            match self.leader.outcome() {
                Ok(report) => return report,
                Err(error) if error.contains(REPLACED) => drop(self.replace_leader()),
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn strike(&mut self, blow: Blow) {
        match blow {
            Blow::KillWorker => drop(self.take_worker()),
            Blow::SuspendWorker => {
                let at = self.below(self.workers.len() as u64) as usize;
                let pid = self.workers[at].pid();
                signal("STOP", pid);
                let leader = &mut self.leader;
                wait_until("a lost worker", || leader.trains_without(pid) || leader.has_ended());
                signal("CONT", pid);
            }
            Blow::AskWorkerToLeave => {
                let mut worker = self.take_worker();
                signal("TERM", worker.pid());
                let end = worker.ended();
                if end == succeeded("Done") {
                    // The run was over before the worker read the signal.
                    let leader = &mut self.leader;
                    wait_until("the end of the run", || leader.has_ended());
                } else {
                    assert_eq!(end, succeeded("Left"));
                }
            }
            Blow::Join if (self.workers.len() as u64) < WORKERS_MAX => self.join(),
            Blow::Join => {}
            Blow::KillCoordinator => {
                self.leader.kill();
                self.replace_leader();
            }
            Blow::SuspendCoordinator => {
                signal("STOP", self.leader.pid());
                let mut former = self.replace_leader();
                signal("CONT", former.pid());
                let error = former.error();
                assert!(error.contains(REPLACED), "{error}");
            }
            Blow::HandOver => {
                signal("TERM", self.leader.pid());
                match self.leader.outcome() {
                    Ok(stopped) => assert_eq!(stopped["end"], "stopped", "{stopped}"),
                    Err(error) => assert!(error.contains(REPLACED), "{error}"),
                }
                self.replace_leader();
            }
        }
    }
}

fn batter(world: &mut World, seed: u64) {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let workers = 1 + random.next_u64() % WORKERS_MAX;
    let workers_min = 1 + random.next_u64() % workers;
    world.job =
        job_text(&format!("chaos-{seed}"), &format!("workers_min = {workers_min}\nworkers_max = 8\n{MORE}"));
    let mut run = Run::begin(world, random, workers_min as usize, workers as usize);
    let mut blows = Vec::new();
    for _ in 0..BLOWS {
        let at = run.leader.step() + PAUSE.0 + run.below(PAUSE.1 - PAUSE.0);
        let leader = &mut run.leader;
        wait_until("steps", || leader.step() >= at || leader.has_ended());
        if leader.has_ended() {
            // It was replaced, or the run is over.
            if run.leader.outcome().is_ok() {
                break;
            }
            run.replace_leader();
            continue;
        }
        let blow = Blow::ALL[run.below(Blow::ALL.len() as u64) as usize];
        blows.push((at, blow));
        println!("seed {seed}: {workers} workers, at least {workers_min}, blows {blows:?}");
        run.strike(blow);
    }
    assert!(!blows.is_empty(), "the run was over before the first blow");
    let report = run.report();
    world.check(&report);
    // The worker that was started last may find no coordinator any more.
    let ends: Vec<_> = run.workers.iter_mut().map(|worker| worker.ended()).collect();
    let late = ends.iter().filter(|(_, reason)| reason.contains("cannot join a job (")).count();
    let done = ends.iter().filter(|end| **end == succeeded("Done")).count();
    assert!(late <= 1 && done + late == ends.len(), "seed {seed}, {blows:?}: {ends:?}");
}

#[test]
fn any_sequence_of_blows_gives_the_model_of_one_worker() {
    let seeds = std::env::var(ENV_SEEDS).map_or(SEEDS, |text| text.parse().unwrap());
    let mut world =
        World::postgres("chaos", MORE, LEASE_MS).unwrap_or_else(|| World::embedded("chaos", MORE, LEASE_MS));
    for seed in 0..seeds {
        batter(&mut world, seed);
    }
}

#[test]
fn blows_on_machines_with_nothing_but_postgres_and_a_bucket_in_common_change_no_model() {
    let Some(mut world) = World::on_hosts(HOSTS, "chaos", MORE, LEASE_MS) else { return };
    let seeds = std::env::var(ENV_SEEDS).map_or(1, |text| text.parse().unwrap());
    for seed in 0..seeds {
        // Other seeds than on one machine.
        batter(&mut world, 1000 + seed);
    }
}

/// The first of three workers whose machine is cut off without a reset; the other two go on.
#[test]
fn a_machine_that_falls_silent_is_missed_within_the_heartbeat_limit() {
    let Some(mut world) = World::on_hosts(HOSTS, "silent", MORE, 30_000) else { return };
    world.job = job_text("silent", &format!("workers_min = 2\nworkers_max = 8\n{MORE}"));
    // One machine for each process.
    let mut leader = world.coordinator(false);
    wait_until("a coordinator", || leader.listens());
    let mut workers: Vec<Worker> = (0..3).map(|_| world.worker(&leader.address)).collect();
    for worker in &workers {
        wait_until("a member", || leader.trains_with(worker.pid()));
    }
    let silent = workers.remove(0);
    let at = leader.step();
    wait_until("steps", || leader.step() >= at + 50);
    let (hosts, _) = world.hosts.as_ref().unwrap();
    hosts.unplug(silent.host.unwrap());
    let began = Instant::now();
    wait_until("a lost worker", || leader.trains_without(silent.pid()));
    let (noticed, at) = (began.elapsed(), leader.step());
    wait_until("the next step", || leader.step() > at);
    println!("silent machine: missed after {noticed:?}, next step after {:?}", began.elapsed());
    world.check(&leader.report());
    for worker in &mut workers {
        assert_eq!(worker.ended(), succeeded("Done"));
    }
}

/// Kills of the measurement.
const KILLS: usize = 50;

/// Prints the time from the kill of one of two workers to the report of the next applied step.
#[test]
#[ignore = "a measurement: cargo test -p millrace-trainer --test trainer kill_to -- --ignored --nocapture"]
fn kill_to_the_next_applied_step() {
    let home = super::home();
    let usual = super::setup(home.path());
    let config = Config { respawns_max: 10 * KILLS as u32, ..usual.config.clone() };
    let setup = Setup { config, ..usual };
    let job = super::job("kills", "workers = 2\nepochs_max = 100000\ncheckpoint_every_steps = 1000000");
    let cancel = CancellationToken::new();
    let mut times: Vec<Duration> = Vec::new();
    let mut killed: Option<(Instant, u64)> = None;
    let mut begun = (0, 0);
    let report = super::runtime().block_on(train(job, setup, cancel.clone(), |seen| {
        if let Some((at, epoch)) = killed {
            if seen.membership_epoch == epoch {
                return;
            }
            // The first report may be of a step before the kill.
            if begun.0 == seen.membership_epoch && seen.step > begun.1 {
                times.push(at.elapsed());
                killed = None;
            }
        }
        if begun.0 != seen.membership_epoch {
            begun = (seen.membership_epoch, seen.step);
        }
        if killed.is_some() {
            return;
        }
        // Some steps with both.
        if seen.worker_pids.len() == 2 && seen.step > begun.1 + 20 {
            if times.len() == KILLS {
                cancel.cancel();
                return;
            }
            signal("KILL", seen.worker_pids[times.len() % 2]);
            killed = Some((Instant::now(), seen.membership_epoch));
        }
    }));
    report.unwrap();
    print_times("kill to next step", times);
}

fn print_times(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
    println!("{what}: n {}, p50 {:?}, p95 {:?}, most {:?}", times.len(), at(0.5), at(0.95), at(1.0));
}

/// Prints the times from the kill of one of two workers on machines of their own to the next applied step, and from the
/// start of the next worker to its first step.
#[test]
#[ignore = "a measurement: cargo test -p millrace-trainer --test trainer kills_on_machines -- --ignored --nocapture"]
fn kills_on_machines() {
    let Some(mut world) = World::on_hosts(HOSTS, "kills", MORE, 30_000) else { return };
    let more = "workers_min = 1\nworkers_max = 8\nepochs_max = 100000\ncheckpoint_every_steps = 1000000";
    world.job = job_text("kills", more);
    let leader = world.coordinator(false);
    wait_until("a coordinator", || leader.listens());
    let (mut kills, mut joins) = (Vec::new(), Vec::new());
    let mut workers: Vec<Worker> = Vec::new();
    while kills.len() < KILLS {
        while workers.len() < 2 {
            let began = Instant::now();
            let worker = world.worker(&leader.address);
            wait_until("a member", || leader.trains_with(worker.pid()));
            joins.push(began.elapsed());
            workers.push(worker);
        }
        let at = leader.step();
        wait_until("steps", || leader.step() >= at + 20);
        // The first one is the older one.
        let mut killed = workers.remove(kills.len() % 2);
        let began = Instant::now();
        killed.child.kill().unwrap();
        wait_until("a lost worker", || leader.trains_without(killed.pid()));
        let at = leader.step();
        wait_until("the next step", || leader.step() > at);
        kills.push(began.elapsed());
    }
    print_times("kill to next step, across machines", kills);
    print_times("start of a worker to its first step", joins);
}

/// Prints the times from the moment at which one of three machines falls silent to the next applied step.
#[test]
#[ignore = "a measurement: cargo test -p millrace-trainer --test trainer silences_on -- --ignored --nocapture"]
fn silences_on_machines() {
    let Some(mut world) = World::on_hosts(HOSTS, "silences", MORE, 30_000) else { return };
    let more = "workers_min = 1\nworkers_max = 8\nepochs_max = 100000\ncheckpoint_every_steps = 1000000";
    world.job = job_text("silences", more);
    // On machine 0.
    let leader = world.coordinator(false);
    wait_until("a coordinator", || leader.listens());
    let (hosts, _) = world.hosts.as_ref().unwrap();
    let start = |host| {
        let worker = world.worker_on(host, &leader.address);
        wait_until("a member", || leader.trains_with(worker.pid()));
        worker
    };
    let mut workers: Vec<Worker> = (1..HOSTS).map(start).collect();
    let mut silences = Vec::new();
    while silences.len() < KILLS {
        let at = leader.step();
        wait_until("steps", || leader.step() >= at + 20);
        let mut silent = workers.remove(silences.len() % workers.len());
        let host = silent.host.unwrap();
        hosts.unplug(host);
        let began = Instant::now();
        wait_until("a lost worker", || leader.trains_without(silent.pid()));
        let at = leader.step();
        wait_until("the next step", || leader.step() > at);
        silences.push(began.elapsed());
        silent.child.kill().unwrap();
        silent.child.wait().unwrap();
        hosts.plug(host);
        workers.push(start(host));
    }
    print_times("silence of a machine to next step", silences);
}
