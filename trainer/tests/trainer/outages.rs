//! Workers that are cut off from the volumes, taken for dead by other processes, or left with a state that no checkpoint
//! has.

use std::path::Path;

use millrace_datafs::Datafs;
use tempfile::TempDir;

use super::failover::{Gate, World};
use super::joined::succeeded;
use super::{signal, wait_until};

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
