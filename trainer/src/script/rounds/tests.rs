//! Tests of the rounds: single stories, and random events against the invariants.

use proptest::prelude::*;

use super::*;
use crate::script::messages::Exit;

const GRACE: Duration = Duration::from_secs(30);

fn rules(nodes: (usize, usize), max_restarts: u32) -> Rules {
    Rules {
        nodes_min: nodes.0,
        nodes_max: nodes.1,
        max_restarts,
        join_timeout: Duration::from_secs(600),
        last_call: Duration::from_secs(3),
        answer_timeout: Duration::from_secs(10),
        stop_timeout: GRACE,
        restart_on_join: false,
        framework: Framework::Torch,
        servers: 0,
        run: "ab".into(),
        job: "j".into(),
    }
}

fn node(id: NodeId, workers: u32) -> Node {
    Node { name: format!("n{id}"), host: format!("10.0.0.{id}"), workers }
}

fn end(role: Role, index: u32, exit: Exit, at_ms: u64) -> Ended {
    let place = Place { role, index };
    Ended {
        place,
        pid: 1,
        exit,
        at_ms,
        was_asked: false,
        is_final: false,
        lines: vec![format!("rank {index}")],
    }
}

/// Rounds whose nodes answer at once.
struct World {
    rounds: Rounds,
    now: Instant,
    /// The round that runs on each node, with its places.
    running: BTreeMap<NodeId, (u64, Vec<Place>)>,
    layout: Option<Layout>,
    /// Nodes that do not say that they have stopped.
    silent: BTreeSet<NodeId>,
}

impl World {
    fn new(rules: Rules) -> World {
        let now = Instant::now();
        World {
            rounds: Rounds::new(rules, now),
            now,
            running: BTreeMap::new(),
            layout: None,
            silent: BTreeSet::new(),
        }
    }

    fn settle(&mut self) {
        loop {
            let actions = self.rounds.take_actions();
            if actions.is_empty() {
                return;
            }
            for action in actions {
                match action {
                    Action::Tell(id, Order::Prepare { round, ports }) => {
                        self.rounds.prepared(id, round, vec![1; ports], self.now);
                    }
                    Action::Tell(id, Order::Start { layout, node }) => {
                        assert!(
                            self.running.values().all(|(round, _)| *round == layout.round),
                            "round {} starts beside an earlier one: {:?}",
                            layout.round,
                            self.running
                        );
                        let former = self.running.insert(id, (layout.round, layout.places(node)));
                        assert_eq!(former, None);
                        self.layout = Some(*layout);
                    }
                    Action::Tell(id, Order::Stop { round }) => {
                        if !self.silent.contains(&id) {
                            self.running.remove(&id);
                            self.rounds.stopped(id, round, self.now);
                        }
                    }
                    Action::Tell(_, order) => panic!("{order:?}"),
                    Action::Drop(id, _) => {
                        self.running.remove(&id);
                    }
                }
            }
        }
    }

    fn join(&mut self, id: NodeId, workers: u32) {
        self.rounds.join(id, node(id, workers), self.now);
        self.settle();
    }

    fn leave(&mut self, id: NodeId, in_order: bool) {
        if in_order {
            self.rounds.leaving(id, self.now);
            self.settle();
        }
        self.running.remove(&id);
        self.rounds.lose(id, "closed its connection", self.now);
        self.settle();
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.rounds.tick(self.now);
        self.settle();
    }

    fn exit(&mut self, id: NodeId, ended: Ended) {
        let Some((round, places)) = self.running.get_mut(&id) else { return };
        places.retain(|place| *place != ended.place);
        let round = *round;
        self.rounds.exited(id, round, ended, self.now);
        self.settle();
    }

    fn round(&self) -> u64 {
        self.layout.as_ref().map_or(0, |layout| layout.round)
    }
}

#[test]
fn a_job_succeeds_when_all_workers_have_ended_with_0() {
    let mut world = World::new(rules((1, 1), 0));
    world.join(0, 2);
    assert_eq!(world.layout.as_ref().unwrap().world(), 2);
    world.exit(0, end(Role::Worker, 1, Exit::Code(0), 5));
    assert_eq!(world.rounds.verdict(), None);
    world.exit(0, end(Role::Worker, 0, Exit::Code(0), 9));
    assert_eq!(world.rounds.verdict(), Some(&Verdict::Succeeded));
}

#[test]
fn servers_end_with_the_last_worker() {
    let mut world = World::new(Rules { servers: 1, framework: Framework::Tensorflow, ..rules((1, 1), 0) });
    world.join(0, 1);
    world.exit(0, end(Role::Worker, 0, Exit::Code(0), 5));
    assert_eq!(world.rounds.verdict(), Some(&Verdict::Succeeded));
    assert!(world.running.is_empty(), "a server was not stopped");
}

#[test]
fn the_process_that_failed_first_is_named_even_if_another_is_reported_before() {
    let mut world = World::new(rules((1, 1), 0));
    world.join(0, 2);
    world.silent.insert(0);
    // The victim of the first failure is reported first.
    world.exit(0, end(Role::Worker, 0, Exit::Code(1), 90));
    world.exit(0, end(Role::Worker, 1, Exit::Signal(9), 20));
    world.rounds.stopped(0, 1, world.now);
    match world.rounds.verdict() {
        Some(Verdict::Failed(failure)) => {
            let text = failure.describe();
            assert!(text.contains("rank 1 on n0") && text.contains("SIGKILL"), "{text}");
            assert_eq!(failure.lines(), ["rank 1"]);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_failure_starts_the_next_round_with_the_nodes_that_are_there() {
    let mut world = World::new(rules((1, 3), 2));
    world.join(0, 1);
    world.join(1, 2);
    assert_eq!(world.round(), 0, "more nodes may come within the last call");
    world.pass(Duration::from_secs(3));
    assert_eq!((world.round(), world.layout.as_ref().unwrap().world()), (1, 3));
    // A node that comes later waits for the next round.
    world.join(2, 4);
    assert_eq!(world.round(), 1);
    world.leave(1, false);
    world.pass(Duration::from_secs(3));
    let layout = world.layout.clone().unwrap();
    assert_eq!((layout.round, layout.restarts, layout.world()), (2, 1, 5));
    let names: Vec<_> = layout.nodes.iter().map(|node| node.name.as_str()).collect();
    assert_eq!(names, ["n0", "n2"]);
    // The second and the third failure.
    world.exit(0, end(Role::Worker, 0, Exit::Code(3), 1));
    world.pass(Duration::from_secs(3));
    assert_eq!(world.round(), 3);
    world.exit(2, end(Role::Worker, 4, Exit::Code(3), 1));
    assert!(matches!(world.rounds.verdict(), Some(Verdict::Failed(_))), "no restart is left");
}

#[test]
fn a_failure_that_no_restart_helps_ends_the_job_at_once() {
    let changed = |index| {
        let exit = Exit::Failed("could not be started: the file has changed".into());
        Ended { pid: 0, is_final: true, ..end(Role::Worker, index, exit, 0) }
    };
    // The failure may also come while the round stops for another one.
    for is_second in [false, true] {
        let mut world = World::new(rules((1, 1), 5));
        world.join(0, 2);
        world.silent.insert(0);
        if is_second {
            world.exit(0, end(Role::Worker, 0, Exit::Code(1), 90));
        }
        world.exit(0, changed(1));
        world.rounds.stopped(0, 1, world.now);
        match world.rounds.verdict() {
            Some(Verdict::Failed(failure)) => {
                assert_eq!(failure.describe(), "rank 1 on n0 could not be started: the file has changed");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(world.rounds.restarts(), 0);
    }
}

#[test]
fn nodes_that_join_or_leave_in_order_cost_no_restart() {
    let mut world = World::new(Rules { restart_on_join: true, ..rules((1, 2), 0) });
    world.join(0, 1);
    world.pass(Duration::from_secs(3));
    world.join(1, 1);
    assert_eq!((world.round(), world.layout.as_ref().unwrap().world()), (2, 2));
    world.leave(1, true);
    world.pass(Duration::from_secs(3));
    let layout = world.layout.as_ref().unwrap();
    assert_eq!((layout.round, layout.restarts, layout.world()), (3, 0, 1));
}

#[test]
fn a_node_that_leaves_has_time_for_its_checkpoint_before_the_next_round() {
    let mut world = World::new(rules((1, 2), 0));
    world.join(0, 1);
    world.join(1, 1);
    world.silent.insert(1);
    world.rounds.leaving(1, world.now);
    world.settle();
    // Its process has saved and ended with 0, which does not mean that it was done.
    let saved = Ended { was_asked: true, ..end(Role::Worker, 1, Exit::Code(0), 9) };
    world.exit(1, saved);
    world.pass(Duration::from_secs(9));
    assert_eq!(world.round(), 1, "a process of the first round still runs");
    world.running.remove(&1);
    world.rounds.stopped(1, 1, world.now);
    world.leave(1, false);
    world.pass(Duration::from_secs(3));
    let layout = world.layout.as_ref().unwrap();
    assert_eq!((layout.round, layout.restarts, layout.world()), (2, 0, 1));
}

#[test]
fn too_few_nodes_end_the_job_with_the_names_of_all_nodes() {
    let mut world = World::new(rules((3, 3), 1));
    world.join(0, 1);
    world.join(1, 1);
    world.leave(1, false);
    world.rounds.unfit("n9", "there is no such file");
    world.pass(Duration::from_secs(599));
    assert_eq!(world.rounds.verdict(), None);
    assert_eq!(world.rounds.missing(), 2);
    world.pass(Duration::from_secs(1));
    match world.rounds.verdict() {
        Some(Verdict::Missing { here, gone, causes, .. }) => {
            assert_eq!((&here[..], &gone[..]), (&["n0".to_owned()][..], &["n1".to_owned()][..]));
            assert!(causes[0].contains("n9"), "{causes:?}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_node_that_does_not_stop_in_time_is_dropped() {
    let mut world = World::new(rules((1, 2), 1));
    world.join(0, 1);
    world.join(1, 1);
    world.silent.insert(1);
    world.exit(0, end(Role::Worker, 0, Exit::Code(1), 1));
    assert_eq!(world.round(), 1);
    world.pass(GRACE);
    world.pass(Duration::from_secs(3));
    let layout = world.layout.as_ref().unwrap();
    assert_eq!((layout.round, layout.nodes.len()), (2, 1));
}

#[test]
fn a_stop_in_any_phase_ends_the_job_as_stopped() {
    let mut world = World::new(rules((2, 2), 1));
    world.rounds.stop(world.now);
    assert_eq!(world.rounds.verdict(), Some(&Verdict::Stopped));
    let mut world = World::new(rules((1, 1), 1));
    world.join(0, 1);
    world.silent.insert(0);
    world.exit(0, end(Role::Worker, 0, Exit::Code(1), 1));
    // The round stops already, after a failure.
    world.rounds.stop(world.now);
    world.rounds.stopped(0, 1, world.now);
    assert_eq!(world.rounds.verdict(), Some(&Verdict::Stopped));
}

#[derive(Debug, Clone)]
enum Step {
    Join(NodeId, u32),
    Leave(NodeId, bool),
    Exit(NodeId, usize, bool),
    Pass(u64),
    Silence(NodeId, bool),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0u64..5, 1u32..3).prop_map(|(id, workers)| Step::Join(id, workers)),
        2 => (0u64..5, any::<bool>()).prop_map(|(id, in_order)| Step::Leave(id, in_order)),
        4 => (0u64..5, 0usize..3, any::<bool>()).prop_map(|(id, at, ok)| Step::Exit(id, at, ok)),
        3 => (1u64..40).prop_map(Step::Pass),
        1 => (0u64..5, any::<bool>()).prop_map(|(id, on)| Step::Silence(id, on)),
    ]
}

proptest! {
    /// Whatever happens: no round begins before the last one has ended (checked in [`World::settle`]), restarts are
    /// bounded, node counts are kept, and after the last event the job ends within its deadlines.
    #[test]
    fn any_events_keep_the_invariants(steps in prop::collection::vec(step(), 0..60), max_restarts in 0u32..3, min in 1usize..3) {
        let mut world = World::new(rules((min, 4), max_restarts));
        for step in steps {
            match step {
                Step::Join(id, workers) if !world.rounds.nodes.contains_key(&id) => {
                    world.silent.remove(&id);
                    world.join(id, workers);
                }
                Step::Leave(id, in_order) => world.leave(id, in_order),
                Step::Exit(id, at, ok) => {
                    let place = world.running.get(&id).and_then(|(_, places)| places.get(at).copied());
                    if let Some(place) = place {
                        let exit = Exit::Code(i32::from(!ok));
                        world.exit(id, end(place.role, place.index, exit, 1));
                    }
                }
                Step::Pass(seconds) => world.pass(Duration::from_secs(seconds)),
                Step::Silence(id, true) => drop(world.silent.insert(id)),
                Step::Silence(id, false) => drop(world.silent.remove(&id)),
                Step::Join(..) => {}
            }
            prop_assert!(world.rounds.restarts() <= max_restarts);
            if let Some(layout) = &world.layout {
                prop_assert!(layout.nodes.len() >= min && layout.nodes.len() <= 4);
            }
        }
        // All processes end well, and no node joins any more.
        for _ in 0..8 {
            world.silent.clear();
            let places: Vec<_> = world.running.iter().flat_map(|(id, (_, places))| places.iter().map(|place| (*id, *place))).collect();
            for (id, place) in places {
                world.exit(id, end(place.role, place.index, Exit::Code(0), 1));
            }
            world.pass(Duration::from_secs(600));
        }
        prop_assert!(world.rounds.verdict().is_some());
    }
}
