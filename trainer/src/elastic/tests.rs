//! Tests of the membership state machine, without processes and without a real clock.

use std::time::{Duration, Instant};

use super::membership::{
    Action, MemberId, Membership, Message, Peer, Reason, Rules, Verdict, has_state_of, source,
};

mod joined;

/// A membership with a simulated clock.
struct SimulatedJob {
    membership: Membership,
    now: Instant,
}

pub(super) fn rules(workers: usize) -> Rules {
    Rules {
        workers,
        places: 0,
        workers_min: 1,
        respawns_max: 3,
        respawn_backoff: Duration::from_millis(100),
        heartbeat_lost: Duration::from_secs(5),
        assignment_timeout: Duration::from_secs(120),
        start_timeout: Duration::from_secs(30),
        rendezvous_timeout: Duration::from_secs(20),
        stop_timeout: Duration::from_secs(10),
        step_timeout: Duration::from_secs(60),
    }
}

impl SimulatedJob {
    fn new(workers: usize) -> SimulatedJob {
        let now = Instant::now();
        SimulatedJob { membership: Membership::new(rules(workers), now), now }
    }

    /// Advances time in steps during which every member of `living` sends heartbeats.
    fn pass(&mut self, time: Duration, living: &[MemberId]) -> Vec<Action> {
        let until = self.now + time;
        while self.now < until {
            self.now += Duration::from_millis(50);
            for member in living {
                self.membership.record_contact(*member, self.now);
            }
            self.membership.tick(self.now);
        }
        self.membership.take_actions()
    }

    fn join(&mut self, slot: usize, launch: u64) -> MemberId {
        let address = format!("127.0.0.1:{}", 1000 + launch);
        self.membership.joined(slot, launch, launch as u32, address, self.now).unwrap()
    }

    fn arrive(&mut self, member: MemberId, step: u64, reason: Reason) -> Vec<Action> {
        self.membership.arrived(member, (step, Vec::new()), reason, None, self.now);
        self.membership.take_actions()
    }

    /// A member arrives because it misses that rank.
    fn suspect(&mut self, member: MemberId, step: u64, rank: u32) -> Vec<Action> {
        let suspect = Some((self.membership.epoch(), rank));
        self.membership.arrived(member, (step, Vec::new()), Reason::Broken, suspect, self.now);
        self.membership.take_actions()
    }

    /// A job whose workers have all arrived at step 0.
    fn running(workers: usize) -> (SimulatedJob, Vec<MemberId>) {
        let mut job = SimulatedJob::new(workers);
        let spawned = job.pass(Duration::from_millis(50), &[]);
        assert_eq!(spawned.len(), workers);
        let members: Vec<MemberId> = (0..workers).map(|slot| job.join(slot, slot as u64 + 1)).collect();
        for (i, member) in members.iter().enumerate() {
            let formed = formed(&job.arrive(*member, 0, Reason::Fresh));
            let wanted = if i + 1 == workers { members.clone() } else { vec![] };
            assert_eq!(formed.iter().map(|f| f.0).collect::<Vec<_>>(), wanted);
        }
        (job, members)
    }

    /// A job that launches no worker and has `places` for workers of other machines.
    fn listening(places: usize, workers_min: usize) -> SimulatedJob {
        let now = Instant::now();
        let rules = Rules { places, workers_min, ..rules(0) };
        SimulatedJob { membership: Membership::new(rules, now), now }
    }

    fn admit(&mut self, pid: u32) -> Option<MemberId> {
        self.membership.admitted(pid, format!("b.example.org:{pid}"), "b".to_owned(), self.now)
    }
}

/// The members that were told that an epoch formed: member, epoch, rank, world.
fn formed(actions: &[Action]) -> Vec<(MemberId, u64, usize, usize)> {
    actions
        .iter()
        .filter_map(|action| match action {
            Action::Send { member, message: Message::Formed { epoch, rank, peers } } => {
                Some((*member, *epoch, *rank, peers.len()))
            }
            _ => None,
        })
        .collect()
}

fn sent(actions: &[Action], wanted: &Message) -> Vec<MemberId> {
    actions
        .iter()
        .filter_map(|action| match action {
            Action::Send { member, message } if message == wanted => Some(*member),
            _ => None,
        })
        .collect()
}

fn spawned(actions: &[Action]) -> Vec<(usize, u64)> {
    actions
        .iter()
        .filter_map(|action| match action {
            Action::Spawn { slot, launch } => Some((*slot, *launch)),
            _ => None,
        })
        .collect()
}

#[test]
fn first_epoch_waits_for_all_workers() {
    let (job, members) = SimulatedJob::running(3);
    assert_eq!(members.len(), 3);
    assert_eq!(job.membership.pids(), [1, 2, 3]);
    assert_eq!(job.membership.epoch(), 1);
}

#[test]
fn first_epoch_starts_without_workers_that_never_start() {
    let mut job = SimulatedJob::new(2);
    job.pass(Duration::from_millis(50), &[]);
    let first = job.join(0, 1);
    assert!(formed(&job.arrive(first, 0, Reason::Fresh)).is_empty());
    let actions = job.pass(Duration::from_secs(31), &[first]);
    assert_eq!(formed(&actions), [(first, 1, 0, 1)]);
    assert!(actions.contains(&Action::Kill { slot: 1, launch: 2 }));
}

#[test]
fn survivors_continue_and_admit_the_replacement() {
    let (mut job, members) = SimulatedJob::running(3);
    job.membership.lost(members[1], "died", job.now);
    let actions = job.membership.take_actions();
    assert_eq!(sent(&actions, &Message::Broken { epoch: 1 }), [members[0], members[2]]);
    assert!(actions.contains(&Action::Kill { slot: 1, launch: 2 }));
    job.membership.exited(1, 2, "was killed by signal 9", job.now);

    assert!(formed(&job.arrive(members[0], 7, Reason::Broken)).is_empty());
    let actions = job.arrive(members[2], 8, Reason::Broken);
    assert_eq!(formed(&actions), [(members[0], 2, 0, 2), (members[2], 2, 1, 2)]);

    let actions = job.pass(Duration::from_millis(200), &members);
    assert_eq!(spawned(&actions), [(1, 4)]);
    let replacement = job.join(1, 4);
    let actions = job.arrive(replacement, 5, Reason::Fresh);
    assert_eq!(sent(&actions, &Message::Reform { epoch: 2 }), [members[0], members[2]]);
    // Members are asked once, not at every event.
    assert!(job.pass(Duration::from_millis(200), &[members[0], members[2], replacement]).is_empty());

    assert!(job.arrive(members[0], 20, Reason::Left).is_empty());
    let actions = job.arrive(members[2], 20, Reason::Left);
    assert_eq!(formed(&actions), [(members[0], 3, 0, 3), (replacement, 3, 1, 3), (members[2], 3, 2, 3)]);
    assert_eq!(job.membership.lost_total(), 1);
}

#[test]
fn a_silent_member_is_killed_and_replaced() {
    let (mut job, members) = SimulatedJob::running(2);
    let actions = job.pass(Duration::from_secs(6), &members[..1]);
    assert!(actions.contains(&Action::Kill { slot: 1, launch: 2 }));
    assert_eq!(sent(&actions, &Message::Broken { epoch: 1 }), [members[0]]);
    assert_eq!(formed(&job.arrive(members[0], 3, Reason::Broken)), [(members[0], 2, 0, 1)]);
}

#[test]
fn member_missing_at_the_barrier_is_killed() {
    let (mut job, members) = SimulatedJob::running(2);
    let actions = job.arrive(members[0], 4, Reason::Broken);
    assert_eq!(sent(&actions, &Message::Broken { epoch: 1 }), [members[1]]);
    let actions = job.pass(Duration::from_secs(21), &members);
    assert!(actions.contains(&Action::Kill { slot: 1, launch: 2 }));
    assert_eq!(formed(&actions), [(members[0], 2, 0, 1)]);
}

#[test]
fn respawns_are_bounded_and_slow_down() {
    let mut job = SimulatedJob::new(1);
    let mut launches = Vec::new();
    let mut pauses = Vec::new();
    loop {
        let began = job.now;
        let mut actions = job.pass(Duration::from_millis(50), &[]);
        while spawned(&actions).is_empty() && job.now < began + Duration::from_secs(3) {
            actions = job.pass(Duration::from_millis(50), &[]);
        }
        let Some((slot, launch)) = spawned(&actions).first().copied() else { break };
        pauses.push((job.now - began).as_millis());
        launches.push(launch);
        job.membership.exited(slot, launch, "exited with code 1", job.now);
        let ended = job.membership.take_actions();
        if let Some(Action::End(verdict)) = ended.last() {
            let reason = "exited with code 1".into();
            assert_eq!(*verdict, Verdict::WorkersLost { reason, exit_code: 1 });
            break;
        }
    }
    assert_eq!(launches, [1, 2, 3, 4]);
    assert_eq!(pauses, [50, 100, 200, 400]);
    assert_eq!(job.membership.respawns(), 3);
}

#[test]
fn training_time_restores_the_respawn_budget() {
    let (mut job, members) = SimulatedJob::running(2);
    let mut launch = 2;
    let mut member = members[1];
    // One death a minute, more than the limit of 3 respawns in all.
    for step in (7..19).step_by(2) {
        job.membership.exited(1, launch, "was killed by signal 9", job.now);
        assert!(!formed(&job.arrive(members[0], step, Reason::Broken)).is_empty());
        let actions = job.pass(Duration::from_secs(1), &[members[0]]);
        launch = spawned(&actions)[0].1;
        member = job.join(1, launch);
        job.arrive(member, step, Reason::Fresh);
        assert!(!formed(&job.arrive(members[0], step + 1, Reason::Left)).is_empty());
        job.pass(Duration::from_secs(60), &[members[0], member]);
    }
    // Four deaths at once: the slot is given up, and filled again after training that makes progress.
    for _ in 0..4 {
        job.membership.exited(1, launch, "was killed by signal 9", job.now);
        job.arrive(members[0], 18, Reason::Broken);
        let actions = job.pass(Duration::from_secs(2), &[members[0]]);
        let Some(next) = spawned(&actions).first().copied() else { break };
        launch = next.1;
    }
    assert!(spawned(&job.pass(Duration::from_secs(120), &[members[0]])).is_empty());
    job.membership.record_progress(100);
    assert_eq!(spawned(&job.pass(Duration::from_secs(30), &[members[0]])).len(), 1);
    assert!(member > 0);
}

#[test]
fn a_stopped_coordinator_keeps_its_workers() {
    let (mut job, members) = SimulatedJob::running(2);
    job.pass(Duration::from_secs(2), &members);
    // For ten minutes no message arrives and no decision is made.
    job.now += Duration::from_secs(600);
    job.membership.tick(job.now);
    assert!(job.membership.take_actions().is_empty());
    job.pass(Duration::from_secs(4), &[]);
    assert_eq!(job.membership.lost_total(), 0);
    // Silence after the pause counts.
    let actions = job.pass(Duration::from_secs(2), &members[..1]);
    assert!(actions.contains(&Action::Kill { slot: 1, launch: 2 }), "{actions:?}");

    // The other deadlines move, too: a starting worker, a barrier, a stop.
    let mut starting = SimulatedJob::new(1);
    starting.pass(Duration::from_millis(50), &[]);
    starting.now += Duration::from_secs(600);
    starting.membership.tick(starting.now);
    assert!(starting.membership.take_actions().is_empty());
    let (mut closing, members) = SimulatedJob::running(2);
    closing.arrive(members[0], 4, Reason::Broken);
    closing.membership.stop(closing.now);
    closing.membership.take_actions();
    closing.now += Duration::from_secs(600);
    closing.membership.tick(closing.now);
    assert!(closing.membership.take_actions().is_empty());
}

#[test]
fn a_member_alone_that_hangs_in_a_step_is_replaced() {
    let (mut job, members) = SimulatedJob::running(1);
    job.membership.computing(members[0], Duration::from_secs(59), job.now);
    assert!(job.membership.take_actions().is_empty());
    job.membership.computing(members[0], Duration::from_secs(61), job.now);
    assert_eq!(job.membership.take_actions(), [Action::Kill { slot: 0, launch: 1 }]);
    job.membership.exited(0, 1, "was killed by signal 9", job.now);
    assert_eq!(spawned(&job.pass(Duration::from_millis(200), &[])), [(0, 2)]);
    // In a ring, the rank that waits computes as long as the one that hangs; the ring finds out which it is.
    let (mut job, members) = SimulatedJob::running(2);
    job.membership.computing(members[0], Duration::from_secs(61), job.now);
    assert!(job.membership.take_actions().is_empty());
}

#[test]
fn error_of_one_worker_costs_a_respawn_but_not_the_job() {
    let (mut job, members) = SimulatedJob::running(2);
    let full = "read a.parquet: too many open files";
    job.membership.failed_alone(members[1], full, 5, job.now);
    let actions = job.membership.take_actions();
    assert!(actions.contains(&Action::Kill { slot: 1, launch: 2 }));
    assert!(!actions.iter().any(|action| matches!(action, Action::End(_))));
    job.membership.exited(1, 2, "was killed by signal 9", job.now);
    assert_eq!(formed(&job.arrive(members[0], 3, Reason::Broken)), [(members[0], 2, 0, 1)]);
    // If every worker meets the error, the job ends with its message and exit code.
    let (mut job, members) = SimulatedJob::running(1);
    let (mut member, mut launch) = (members[0], 1);
    let verdict = loop {
        job.membership.failed_alone(member, full, 5, job.now);
        job.membership.exited(0, launch, "was killed by signal 9", job.now);
        let mut actions = job.membership.take_actions();
        actions.extend(job.pass(Duration::from_secs(1), &[]));
        if let Some(Action::End(verdict)) = actions.last() {
            break verdict.clone();
        }
        launch = spawned(&actions)[0].1;
        member = job.join(0, launch);
    };
    assert_eq!(launch, 4);
    assert_eq!(verdict, Verdict::WorkersLost { reason: full.into(), exit_code: 5 });
}

#[test]
fn late_messages_of_lost_members_are_ignored() {
    let (mut job, members) = SimulatedJob::running(2);
    job.membership.lost(members[1], "died", job.now);
    job.membership.exited(1, 2, "was killed by signal 9", job.now);
    job.membership.take_actions();
    job.membership.exited(1, 2, "was killed by signal 9", job.now);
    job.membership.lost(members[1], "closed its connection", job.now);
    assert!(job.arrive(members[1], 3, Reason::Broken).is_empty());
    job.membership.finished(members[1], false, job.now);
    job.membership.failed(members[1], "no".into(), 1, job.now);
    assert!(job.membership.take_actions().is_empty());
    let address = || "127.0.0.1:1".to_owned();
    assert!(job.membership.joined(1, 2, 9, address(), job.now).is_err());
    assert!(job.membership.joined(7, 1, 9, address(), job.now).is_err());
}

#[test]
fn member_lost_at_the_end_is_replaced() {
    let (mut job, members) = SimulatedJob::running(2);
    job.membership.finished(members[1], false, job.now);
    // Rank 0 dies before its checkpoint is durable.
    job.membership.lost(members[0], "died", job.now);
    let actions = job.membership.take_actions();
    assert_eq!(sent(&actions, &Message::Broken { epoch: 1 }), [members[1]]);
    assert_eq!(formed(&job.arrive(members[1], 50, Reason::Broken)), [(members[1], 2, 0, 1)]);
    job.membership.finished(members[1], false, job.now);
    let actions = job.membership.take_actions();
    assert_eq!(sent(&actions, &Message::Done), [members[1]]);
    assert!(actions.contains(&Action::End(Verdict::Finished { stopped: false })));
}

#[test]
fn stop_reaches_all_members_and_late_joiners() {
    let (mut job, members) = SimulatedJob::running(2);
    job.membership.stop(job.now);
    assert_eq!(sent(&job.membership.take_actions(), &Message::Stop), members);
    for member in &members {
        job.membership.finished(*member, true, job.now);
    }
    assert!(job.membership.take_actions().contains(&Action::End(Verdict::Finished { stopped: true })));

    let mut starting = SimulatedJob::new(2);
    starting.pass(Duration::from_millis(50), &[]);
    starting.membership.stop(starting.now);
    let actions = starting.membership.take_actions();
    assert_eq!(actions, [Action::End(Verdict::Finished { stopped: true })]);
}

#[test]
fn stop_has_a_deadline() {
    let (mut job, members) = SimulatedJob::running(2);
    job.membership.stop(job.now);
    let actions = job.pass(Duration::from_secs(11), &members);
    assert!(actions.contains(&Action::End(Verdict::Finished { stopped: true })));
}

/// The error with which a stop ends whose state was not saved.
fn unsaved(actions: &[Action]) -> Option<&str> {
    actions.iter().find_map(|action| match action {
        Action::End(Verdict::Outage { message }) => Some(message.as_str()),
        _ => None,
    })
}

#[test]
fn a_stop_that_saves_no_state_is_not_in_order() {
    let (mut job, members) = SimulatedJob::running(2);
    job.membership.record_progress(50);
    job.membership.stop(job.now);
    job.membership.record_outages(members[0], Duration::from_secs(40), Duration::ZERO);
    let actions = job.pass(Duration::from_secs(11), &members);
    let message = unsaved(&actions).unwrap();
    for part in ["after step 50", "10 s (stop_timeout_ms)", "no checkpoint for 40 s", "start the job again"] {
        assert!(message.contains(part), "{message}");
    }
    // The last worker that has the state dies.
    let (mut job, _) = SimulatedJob::running(1);
    job.membership.record_progress(50);
    job.membership.stop(job.now);
    job.membership.exited(0, 1, "was killed by signal 9", job.now);
    let actions = job.membership.take_actions();
    assert!(unsaved(&actions).is_some_and(|message| message.contains("signal 9")), "{actions:?}");
    // Another one has it, and saves it.
    let (mut job, members) = SimulatedJob::running(2);
    job.membership.record_progress(50);
    job.membership.stop(job.now);
    job.membership.lost(members[0], "died", job.now);
    job.arrive(members[1], 50, Reason::Broken);
    job.membership.finished(members[1], true, job.now);
    let end = Action::End(Verdict::Finished { stopped: true });
    assert_eq!(job.membership.take_actions().last(), Some(&end));
}

#[test]
fn failure_common_to_all_members_ends_the_job() {
    let (mut job, members) = SimulatedJob::running(2);
    job.membership.failed(members[1], "step 3: loss is NaN".into(), 6, job.now);
    let actions = job.membership.take_actions();
    assert_eq!(sent(&actions, &Message::Done), members);
    let verdict = Verdict::Failed { message: "step 3: loss is NaN".into(), exit_code: 6 };
    assert_eq!(actions.last(), Some(&Action::End(verdict)));
}

fn peer(step: u64, lineage: &[u8]) -> Peer {
    Peer { address: String::new(), step, lineage: lineage.to_vec(), pid: 1, host: String::new() }
}

#[test]
fn most_advanced_member_sends_its_state() {
    let peers = |steps: &[u64]| -> Vec<Peer> { steps.iter().map(|step| peer(*step, b"")).collect() };
    assert_eq!(source(&peers(&[4, 4, 4])), None);
    assert_eq!(source(&peers(&[3, 4, 4])), Some(1));
    assert_eq!(source(&peers(&[4, 3, 0])), Some(0));
    assert_eq!(source(&peers(&[9])), None);
    assert_eq!(source(&[]), None);
}

#[test]
fn members_at_the_same_step_take_the_state_of_one_lineage() {
    let source = |peers: &[(u64, &[u8])]| -> Option<usize> {
        let peers: Vec<Peer> = peers.iter().map(|(step, lineage)| peer(*step, lineage)).collect();
        let source = source(&peers)?;
        let takers = peers.iter().filter(|peer| !has_state_of(peer, &peers[source])).count();
        assert!(takers > 0 && has_state_of(&peers[source], &peers[source]));
        Some(source)
    };
    assert_eq!(source(&[(4, b"a"), (4, b"a")]), None);
    assert_eq!(source(&[(4, b"a"), (4, b"b")]), Some(0));
    // A member that is behind may have the first part of the same lineage, or another one.
    assert_eq!(source(&[(3, b"a"), (4, b"b"), (4, b"a")]), Some(1));

    // Members learn the lineages of all others with which they form a ring.
    let mut job = SimulatedJob::listening(2, 2);
    let members = [1, 2].map(|pid| job.admit(pid).unwrap());
    for (member, lineage) in members.iter().zip([b"a", b"b"]) {
        job.membership.arrived(*member, (4, lineage.to_vec()), Reason::Fresh, None, job.now);
    }
    let actions = job.membership.take_actions();
    let Some(Action::Send { message: Message::Formed { peers, .. }, .. }) = actions.last() else {
        panic!("{actions:?}")
    };
    assert_eq!(peers.iter().map(|peer| &peer.lineage[..]).collect::<Vec<_>>(), [b"a", b"b"]);
}

#[test]
fn an_outage_ends_the_job_and_one_that_concerns_a_member_alone_costs_that_member() {
    let outage = || Action::End(Verdict::Outage { message: "cannot write".into() });
    let unsaved = |job: &mut SimulatedJob, member, is_everywhere| {
        job.membership.unsaved(member, "cannot write", 5, is_everywhere, job.now);
        job.membership.take_actions()
    };
    // The coordinator does not reach the metadata either.
    let (mut job, [first, ..]) = three_joined();
    assert_eq!(unsaved(&mut job, first, true).last(), Some(&outage()));
    assert_eq!(job.membership.lost_total(), 0);
    // It does, but nor does the next member.
    let (mut job, [first, second, third]) = three_joined();
    assert_eq!(closed(&unsaved(&mut job, first, false)), [first]);
    job.arrive(second, 6, Reason::Broken);
    job.arrive(third, 6, Reason::Broken);
    assert_eq!(unsaved(&mut job, second, false).last(), Some(&outage()));
    assert_eq!(job.membership.lost_total(), 1);
    // Another failure much later is another member's own.
    let (mut job, [first, second, third]) = three_joined();
    unsaved(&mut job, first, false);
    job.arrive(second, 6, Reason::Broken);
    job.arrive(third, 6, Reason::Broken);
    job.pass(Duration::from_secs(121), &[second, third]);
    assert_eq!(closed(&unsaved(&mut job, second, false)), [second]);
    // There is no other member.
    assert_eq!(unsaved(&mut job, third, false).last(), Some(&outage()));
    // A member that leaves ends nothing.
    let (mut job, [first, ..]) = three_joined();
    job.membership.leaving(first, job.now);
    job.membership.take_actions();
    assert_eq!(closed(&unsaved(&mut job, first, true)), [first]);
    assert_eq!(job.membership.lost_total(), 1);
}

#[test]
fn error_of_the_last_member_of_a_stopping_job_ends_the_job() {
    let (mut job, members) = SimulatedJob::running(1);
    job.membership.stop(job.now);
    job.membership.failed_alone(members[0], "cannot write the checkpoint", 7, job.now);
    let actions = job.membership.take_actions();
    let failed = Verdict::Failed { message: "cannot write the checkpoint".into(), exit_code: 7 };
    assert!(actions.contains(&Action::End(failed)), "{actions:?}");
}

#[test]
fn launched_workers_that_are_too_few_for_ever_end_the_job() {
    let now = Instant::now();
    let rules = Rules { workers_min: 2, respawns_max: 0, ..rules(2) };
    let mut job = SimulatedJob { membership: Membership::new(rules, now), now };
    job.pass(Duration::from_millis(50), &[]);
    let first = job.join(0, 1);
    job.arrive(first, 0, Reason::Fresh);
    job.membership.exited(1, 2, "exited with code 1", job.now);
    let actions = job.membership.take_actions();
    let reason = "exited with code 1; 1 left of workers_min = 2".to_owned();
    assert!(actions.contains(&Action::End(Verdict::WorkersLost { reason, exit_code: 1 })), "{actions:?}");
}

/// The members of other machines whose streams the coordinator ends.
fn closed(actions: &[Action]) -> Vec<MemberId> {
    actions
        .iter()
        .filter_map(|action| match action {
            Action::Close { member, lost: true, .. } => Some(*member),
            _ => None,
        })
        .collect()
}

/// A job of three workers of other machines that has reached step 5.
fn three_joined() -> (SimulatedJob, [MemberId; 3]) {
    let mut job = SimulatedJob::listening(3, 3);
    let members = [1, 2, 3].map(|pid| job.admit(pid).unwrap());
    for member in members {
        job.arrive(member, 5, Reason::Fresh);
    }
    assert_eq!(job.membership.epoch(), 1);
    job.membership.take_actions();
    (job, members)
}

#[test]
fn a_stop_lets_a_member_with_rows_save_the_state_and_loses_none_without_them() {
    // Rank 0 writes the last checkpoint.
    for (without_rows, ranks) in [(vec![0], [1, 0]), (vec![1], [0, 1]), (vec![0, 1], [0, 1])] {
        let (mut job, members) = SimulatedJob::running(2);
        job.membership.record_progress(50);
        job.membership.record_outages(members[0], Duration::ZERO, Duration::from_secs(3));
        job.membership.record_outages(members[0], Duration::ZERO, Duration::ZERO);
        job.membership.stop(job.now);
        assert_eq!(sent(&job.membership.take_actions(), &Message::Stop), members);
        for at in without_rows {
            job.membership.record_unread(members[at], Duration::from_millis(1));
        }
        assert!(job.pass(Duration::from_secs(1), &members).is_empty());
        // A member without rows ends its read, and so the ring.
        let actions = job.arrive(members[0], 50, Reason::Broken);
        assert_eq!(sent(&actions, &Message::Broken { epoch: 1 }), [members[1]]);
        let formed = formed(&job.arrive(members[1], 50, Reason::Broken));
        assert_eq!(formed, [(members[ranks[0]], 2, 0, 2), (members[ranks[1]], 2, 1, 2)]);
        for member in members {
            job.membership.finished(member, true, job.now);
        }
        let end = Action::End(Verdict::Finished { stopped: true });
        assert_eq!(job.membership.take_actions().last(), Some(&end));
        assert_eq!(job.membership.lost_total(), 0);
    }
}

#[test]
fn a_member_that_hangs_while_all_others_wait_at_the_end_is_replaced() {
    let (mut job, members) = SimulatedJob::running(2);
    let hangs = Duration::from_secs(61);
    job.membership.computing(members[0], hangs, job.now);
    assert!(job.membership.take_actions().is_empty());
    job.membership.finished(members[1], false, job.now);
    job.membership.computing(members[0], hangs, job.now);
    let actions = job.membership.take_actions();
    assert!(actions.contains(&Action::Kill { slot: 0, launch: 1 }), "{actions:?}");
    assert_eq!(formed(&job.arrive(members[1], 9, Reason::Broken)), [(members[1], 2, 0, 1)]);
}

#[test]
fn survivors_that_are_too_few_write_their_state_before_the_job_ends() {
    let now = Instant::now();
    let rules = Rules { workers_min: 2, respawns_max: 0, ..rules(2) };
    let begun = || {
        let mut job = SimulatedJob { membership: Membership::new(rules.clone(), now), now };
        job.pass(Duration::from_millis(50), &[]);
        let members = [job.join(0, 1), job.join(1, 2)];
        for member in members {
            job.arrive(member, 0, Reason::Fresh);
        }
        job.membership.exited(1, 2, "exited with code 1", job.now);
        let actions = job.membership.take_actions();
        assert_eq!(sent(&actions, &Message::Stop), [members[0]]);
        assert!(!actions.iter().any(|action| matches!(action, Action::End(_))), "{actions:?}");
        (job, members[0])
    };
    let reason = || "exited with code 1; 1 left of workers_min = 2".to_owned();
    let (mut job, survivor) = begun();
    assert_eq!(formed(&job.arrive(survivor, 7, Reason::Broken)), [(survivor, 2, 0, 1)]);
    job.membership.finished(survivor, true, job.now);
    let end = Action::End(Verdict::WorkersLost { reason: reason(), exit_code: 1 });
    assert_eq!(job.membership.take_actions().last(), Some(&end));
    // A survivor that hangs does not keep the job from its end.
    let (mut job, survivor) = begun();
    assert_eq!(job.pass(Duration::from_secs(11), &[survivor]).last(), Some(&end));
    // One that dies is the reason of the end.
    let (mut job, survivor) = begun();
    job.membership.exited(0, 1, "was killed by signal 9", job.now);
    assert!(job.membership.take_actions().contains(&end), "{survivor}");
}

#[test]
fn an_error_of_a_replacement_before_its_first_barrier_costs_a_respawn() {
    let (mut job, members) = SimulatedJob::running(2);
    job.membership.exited(1, 2, "was killed by signal 9", job.now);
    job.arrive(members[0], 3, Reason::Broken);
    let (slot, launch) = spawned(&job.pass(Duration::from_secs(1), &members[..1]))[0];
    let replacement = job.join(slot, launch);
    let unreadable = "read a.parquet: it does not exist";
    job.membership.failed(replacement, unreadable.into(), 4, job.now);
    let actions = job.membership.take_actions();
    assert_eq!(actions, [Action::Kill { slot, launch }]);
    job.membership.exited(slot, launch, "was killed by signal 9", job.now);
    assert_eq!(spawned(&job.pass(Duration::from_secs(1), &members[..1])).len(), 1);
    // Where no other member holds the state, the error is the job's.
    let mut job = SimulatedJob::new(1);
    job.pass(Duration::from_millis(50), &[]);
    let first = job.join(0, 1);
    job.membership.failed(first, unreadable.into(), 4, job.now);
    let failed = Verdict::Failed { message: unreadable.into(), exit_code: 4 };
    assert!(job.membership.take_actions().contains(&Action::End(failed)));
}
