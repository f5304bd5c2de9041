//! Membership of workers that join over the network: they are neither launched nor replaced.

use std::time::{Duration, Instant};

use super::super::membership::{Action, Membership, Message, Reason, Rules, Verdict};
use super::{SimulatedJob, closed, formed, rules, sent, spawned, three_joined};

#[test]
fn a_job_without_launched_workers_waits_for_its_minimum() {
    let mut job = SimulatedJob::listening(3, 2);
    assert!(job.pass(Duration::from_secs(120), &[]).is_empty());
    assert_eq!(job.membership.missing(), 2);
    let first = job.admit(1).unwrap();
    assert!(job.arrive(first, 0, Reason::Fresh).is_empty());
    assert!(job.pass(Duration::from_secs(120), &[first]).is_empty());
    assert_eq!(job.membership.missing(), 1);
    let second = job.admit(2).unwrap();
    assert_eq!(job.membership.missing(), 0);
    let actions = job.arrive(second, 0, Reason::Fresh);
    assert_eq!(formed(&actions), [(first, 1, 0, 2), (second, 1, 1, 2)]);
    assert_eq!(job.membership.describe(1, 1).unwrap().to_string(), "process 2 on b (b.example.org:2)");
    assert!(job.membership.describe(2, 1).is_none());
}

#[test]
fn a_joined_worker_that_dies_frees_its_place_and_is_not_replaced() {
    let mut job = SimulatedJob::listening(2, 1);
    let first = job.admit(1).unwrap();
    job.arrive(first, 0, Reason::Fresh);
    let second = job.admit(2).unwrap();
    assert!(job.admit(3).is_none());
    job.arrive(second, 0, Reason::Fresh);
    assert_eq!(formed(&job.arrive(first, 5, Reason::Left)), [(first, 2, 0, 2), (second, 2, 1, 2)]);

    job.membership.lost(second, "fell silent", job.now);
    let actions = job.membership.take_actions();
    let closed = Action::Close { member: second, reason: "fell silent".into(), lost: true };
    assert!(actions.contains(&closed), "{actions:?}");
    assert_eq!(job.membership.lost_total(), 1);
    assert_eq!(formed(&job.arrive(first, 6, Reason::Broken)), [(first, 3, 0, 1)]);
    assert!(spawned(&job.pass(Duration::from_secs(60), &[first])).is_empty());
    let third = job.admit(3).unwrap();
    assert_eq!(sent(&job.arrive(third, 0, Reason::Fresh), &Message::Reform { epoch: 3 }), [first]);
    assert_eq!(job.membership.admitted_total(), 3);
}

#[test]
fn a_worker_that_leaves_in_order_is_not_lost() {
    let mut job = SimulatedJob::listening(2, 1);
    let first = job.admit(1).unwrap();
    job.arrive(first, 0, Reason::Fresh);
    let second = job.admit(2).unwrap();
    job.arrive(second, 0, Reason::Fresh);
    job.arrive(first, 5, Reason::Left);
    assert!(job.arrive(second, 9, Reason::Left).is_empty());
    job.membership.left(first, job.now);
    let actions = job.membership.take_actions();
    assert!(matches!(actions[0], Action::Close { lost: false, .. }), "{actions:?}");
    assert_eq!(formed(&actions), [(second, 3, 0, 1)]);
    assert_eq!(job.membership.lost_total(), 0);
    // The last one leaves: the job waits for others.
    job.arrive(second, 12, Reason::Left);
    job.membership.left(second, job.now);
    job.membership.take_actions();
    assert!(job.pass(Duration::from_secs(600), &[]).is_empty());
    assert_eq!(job.membership.missing(), 1);
    let third = job.admit(3).unwrap();
    assert_eq!(formed(&job.arrive(third, 12, Reason::Fresh)).len(), 1);
}

#[test]
fn a_job_below_its_minimum_pauses_and_can_be_stopped() {
    let mut job = SimulatedJob::listening(3, 2);
    let first = job.admit(1).unwrap();
    let second = job.admit(2).unwrap();
    job.arrive(first, 0, Reason::Fresh);
    job.arrive(second, 0, Reason::Fresh);
    job.membership.lost(second, "died", job.now);
    job.membership.take_actions();
    assert!(formed(&job.arrive(first, 7, Reason::Broken)).is_empty());
    assert_eq!(job.membership.missing(), 1);
    // For the last checkpoint, one is enough.
    job.membership.stop(job.now);
    let actions = job.membership.take_actions();
    assert_eq!(formed(&actions), [(first, 2, 0, 1)]);
    assert_eq!(sent(&actions, &Message::Stop), [first]);
}

#[test]
fn a_joined_worker_that_breaks_two_rings_without_progress_is_lost() {
    let (mut job, launched) = SimulatedJob::running(2);
    let now = Instant::now();
    job.membership = Membership::new(Rules { places: 1, ..rules(2) }, now);
    job.now = now;
    job.pass(Duration::from_millis(50), &[]);
    assert_eq!([job.join(0, 1), job.join(1, 2)], launched[..]);
    let joiner = job.admit(3).unwrap();
    for member in [launched[0], launched[1], joiner] {
        job.arrive(member, 5, Reason::Fresh);
    }
    // The launched worker before the joiner and the joiner itself suspect each other.
    for epoch in [1, 2] {
        assert_eq!(job.membership.epoch(), epoch);
        job.suspect(launched[0], 5, 1);
        assert!(closed(&job.suspect(joiner, 5, 1)).is_empty());
        let actions = job.suspect(launched[1], 5, 2);
        let lost = if epoch == 2 { vec![joiner] } else { vec![] };
        assert_eq!(closed(&actions), lost, "{actions:?}");
    }
    assert_eq!(job.membership.epoch(), 3);
    assert_eq!(job.membership.pids().len(), 2);
    assert_eq!(job.membership.respawns(), 0);
}

#[test]
fn a_suspect_is_kept_after_one_broken_ring_or_progress() {
    let (mut job, [first, second, third]) = three_joined();
    for step in [5, 6, 7] {
        job.arrive(third, step, Reason::Broken);
        job.arrive(first, step, Reason::Broken);
        assert!(closed(&job.suspect(second, step, 2)).is_empty());
    }
    // An epoch that breaks for another reason begins the count again.
    for member in [first, second, third] {
        assert!(closed(&job.arrive(member, 7, Reason::Broken)).is_empty());
    }
    job.arrive(first, 7, Reason::Broken);
    job.arrive(third, 7, Reason::Broken);
    assert!(closed(&job.suspect(second, 7, 2)).is_empty());
    assert_eq!(job.membership.lost_total(), 0);
}

#[test]
fn a_worker_that_waits_for_its_rows_is_blamed_for_no_ring() {
    // Rings in which it tries in vain to read, of those that break.
    for (waits, kept) in
        [(vec![true, true, true], true), (vec![true, false, false], false), (vec![false, false], false)]
    {
        let (mut job, [first, second, third]) = three_joined();
        let mut lost = Vec::new();
        for (ring, waits) in (1..).zip(waits) {
            let unread = Duration::from_secs(30 * ring);
            if waits {
                job.membership.record_outages(third, Duration::ZERO, unread);
                assert_eq!(job.membership.unread(), unread);
                job.membership.record_outages(third, Duration::ZERO, Duration::ZERO);
            }
            job.arrive(third, 5, Reason::Broken);
            job.arrive(first, 5, Reason::Broken);
            lost.extend(closed(&job.suspect(second, 5, 2)));
        }
        assert_eq!(lost, if kept { vec![] } else { vec![third] });
    }
}

#[test]
fn the_newest_of_two_workers_that_suspect_each_other_is_lost() {
    let (mut job, [first, second, third]) = three_joined();
    let mut lost = Vec::new();
    for _ in 0..2 {
        job.suspect(first, 5, 1);
        job.suspect(second, 5, 2);
        lost.extend(closed(&job.suspect(third, 5, 1)));
    }
    assert_eq!(lost, [third]);
    // A later member that only follows the others is not at fault.
    let (mut job, [first, second, third]) = three_joined();
    let mut lost = Vec::new();
    for _ in 0..2 {
        job.suspect(first, 5, 1);
        job.suspect(second, 5, 0);
        lost.extend(closed(&job.suspect(third, 5, 1)));
    }
    assert_eq!(lost, [second]);
}

#[test]
fn a_joined_worker_may_take_long_to_receive_its_assignment() {
    let mut job = SimulatedJob::listening(2, 1);
    let slow = job.admit(1).unwrap();
    assert!(job.pass(Duration::from_secs(119), &[]).is_empty());
    // After its first message, silence counts.
    job.membership.record_contact(slow, job.now);
    assert_eq!(closed(&job.pass(Duration::from_secs(6), &[])), [slow]);
    let silent = job.admit(2).unwrap();
    assert_eq!(closed(&job.pass(Duration::from_secs(121), &[])), [silent]);
}

#[test]
fn a_member_that_never_reaches_the_barrier_is_replaced() {
    let mut job = SimulatedJob::new(1);
    job.pass(Duration::from_millis(50), &[]);
    let hanging = job.join(0, 1);
    let actions = job.pass(Duration::from_secs(31), &[hanging]);
    assert!(actions.contains(&Action::Kill { slot: 0, launch: 1 }), "{actions:?}");
    job.membership.exited(0, 1, "was killed by signal 9", job.now);
    assert_eq!(spawned(&job.pass(Duration::from_millis(200), &[])), [(0, 2)]);
    // A replacement that hangs does not disturb the others; time at the barrier does not count.
    let (mut job, members) = SimulatedJob::running(2);
    job.membership.exited(1, 2, "was killed by signal 9", job.now);
    job.arrive(members[0], 3, Reason::Broken);
    let (slot, launch) = spawned(&job.pass(Duration::from_secs(1), &members))[0];
    let hanging = job.join(slot, launch);
    let actions = job.pass(Duration::from_secs(31), &[members[0], hanging]);
    assert!(actions.contains(&Action::Kill { slot, launch }), "{actions:?}");
    assert!(sent(&actions, &Message::Broken { epoch: 2 }).is_empty());
    // A worker of another machine may take as long as for its assignment.
    let mut job = SimulatedJob::listening(1, 1);
    let hanging = job.admit(1).unwrap();
    assert!(job.pass(Duration::from_secs(119), &[hanging]).is_empty());
    assert_eq!(closed(&job.pass(Duration::from_secs(2), &[hanging])), [hanging]);
}

/// Workers that kept their state come to a coordinator that has formed no epoch yet.
#[test]
fn state_that_workers_bring_to_a_new_coordinator_is_not_lost() {
    let mut job = SimulatedJob::listening(3, 2);
    let first = job.admit(1).unwrap();
    assert_eq!(sent(&job.arrive(first, 150, Reason::Fresh), &Message::Save), [first]);
    // A stop lets it write a checkpoint.
    job.membership.stop(job.now);
    let actions = job.membership.take_actions();
    assert_eq!(formed(&actions), [(first, 1, 0, 1)]);
    assert!(!actions.iter().any(|action| matches!(action, Action::End(_))), "{actions:?}");

    // Another worker's failure is its own.
    let mut job = SimulatedJob::listening(3, 2);
    let holder = job.admit(1).unwrap();
    job.arrive(holder, 150, Reason::Fresh);
    let broken = job.admit(2).unwrap();
    job.membership.failed(broken, "no GPU".into(), 1, job.now);
    let actions = job.membership.take_actions();
    assert!(!actions.iter().any(|action| matches!(action, Action::End(_))), "{actions:?}");

    // Without any state, both end the job at once.
    let mut job = SimulatedJob::listening(3, 2);
    let fresh = job.admit(1).unwrap();
    job.arrive(fresh, 0, Reason::Fresh);
    job.membership.stop(job.now);
    let end = Action::End(Verdict::Finished { stopped: true });
    assert_eq!(job.membership.take_actions().last(), Some(&end));
}

#[test]
fn a_job_that_waits_for_its_minimum_makes_its_state_durable_once() {
    let mut job = SimulatedJob::listening(4, 3);
    let members = [1, 2, 3].map(|pid| job.admit(pid).unwrap());
    let actions = members.map(|member| job.arrive(member, 0, Reason::Fresh));
    assert!(actions.iter().all(|actions| sent(actions, &Message::Save).is_empty()));
    job.membership.lost(members[2], "died", job.now);
    assert!(sent(&job.arrive(members[0], 7, Reason::Broken), &Message::Save).is_empty());
    // The one that is ahead.
    assert_eq!(sent(&job.arrive(members[1], 8, Reason::Broken), &Message::Save), [members[1]]);
    assert!(job.pass(Duration::from_secs(60), &members[..2]).is_empty());
    // When it dies, another one has the newest state.
    job.membership.lost(members[1], "died", job.now);
    assert_eq!(sent(&job.membership.take_actions(), &Message::Save), [members[0]]);
    let joined = [4, 5].map(|pid| job.admit(pid).unwrap());
    job.arrive(joined[0], 0, Reason::Fresh);
    assert_eq!(formed(&job.arrive(joined[1], 0, Reason::Fresh)).len(), 3);
}

#[test]
fn a_member_that_leaves_stays_until_its_state_is_durable_and_delays_nobody() {
    let mut job = SimulatedJob::listening(2, 1);
    let members = [1, 2].map(|pid| job.admit(pid).unwrap());
    job.arrive(members[0], 0, Reason::Fresh);
    job.arrive(members[1], 0, Reason::Fresh);
    job.arrive(members[0], 0, Reason::Left);
    let epoch = job.membership.epoch();
    job.arrive(members[0], 5, Reason::Left);
    job.membership.leaving(members[1], job.now);
    let actions = job.membership.take_actions();
    assert_eq!(formed(&actions), [(members[0], epoch + 1, 0, 1)]);
    assert!(job.admit(3).is_none(), "its place is taken until it has left");
    // A stop waits for the state of the last member.
    job.membership.lost(members[0], "died", job.now);
    job.membership.stop(job.now);
    assert!(!job.membership.take_actions().iter().any(|action| matches!(action, Action::End(_))));
    job.membership.left(members[1], job.now);
    let actions = job.membership.take_actions();
    assert!(actions.contains(&Action::End(Verdict::Finished { stopped: true })), "{actions:?}");
    assert_eq!(job.membership.lost_total(), 1);
}

#[test]
fn a_member_that_cannot_leave_is_removed_and_its_error_ends_no_job() {
    let mut job = SimulatedJob::listening(2, 1);
    let first = job.admit(1).unwrap();
    job.arrive(first, 0, Reason::Fresh);
    job.membership.leaving(first, job.now);
    job.membership.take_actions();
    assert_eq!(closed(&job.pass(Duration::from_secs(61), &[first])), [first]);
    let second = job.admit(2).unwrap();
    job.arrive(second, 0, Reason::Fresh);
    job.membership.leaving(second, job.now);
    job.membership.take_actions();
    job.membership.failed(second, "cannot write".into(), 7, job.now);
    let actions = job.membership.take_actions();
    assert_eq!(closed(&actions), [second]);
    assert!(!actions.iter().any(|action| matches!(action, Action::End(_))), "{actions:?}");
}

#[test]
fn the_loss_of_a_silent_worker_names_its_limit() {
    let mut job = SimulatedJob::listening(1, 1);
    let member = job.admit(1).unwrap();
    job.membership.record_contact(member, job.now);
    let actions = job.pass(Duration::from_secs(6), &[]);
    let reason = "did not answer for 5000 ms (heartbeat_lost_ms)".to_owned();
    assert!(actions.contains(&Action::Close { member, reason, lost: true }), "{actions:?}");
}
