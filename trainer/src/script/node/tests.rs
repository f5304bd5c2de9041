//! Tests of a node with processes of `/bin/sh`.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::sync::Mutex;

use super::super::launch::Launch;
use super::super::layout::{Framework, NodeLayout, Place, Role};
use super::super::process::{GroupSet, Stream, lock};
use super::super::{keeper, program};
use super::*;

/// No test waits longer for an event.
const PATIENCE: Duration = Duration::from_secs(60);

/// A keeper, when this binary was started as one.
#[test]
fn keeper_entry() {
    if keeper::is_keeper() {
        keeper::keep().unwrap();
        std::process::exit(0);
    }
}

type Printed = Arc<Mutex<Vec<OutputLine>>>;

struct Running {
    dir: tempfile::TempDir,
    orders: mpsc::Sender<Order>,
    reports: mpsc::Receiver<Report>,
    leave: CancellationToken,
    printed: Printed,
    node: JoinHandle<Result<Ending>>,
}

impl Running {
    /// A node that is ready to run a shell script.
    async fn new(text: &str, grace_ms: u64, log_dir: bool) -> Running {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("script.sh");
        std::fs::write(&script, format!("#!/bin/sh\n{text}")).unwrap();
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
        let script = script.to_str().unwrap().to_owned();
        let program = Program {
            sha256: program::digest(&script).unwrap(),
            script,
            args: vec!["argument".into()],
            python: None,
            dataset: None,
            volume: "models".into(),
            grace_ms,
            launch: Launch { job: "f0".repeat(16), number: 7 },
        };
        let printed = Printed::default();
        let told = Arc::clone(&printed);
        let settings = NodeSettings {
            keeper: WorkerCommand::current_exe([
                "script::node::tests::keeper_entry",
                "--exact",
                "--nocapture",
            ]),
            environment: vec![("FOLDER".to_owned(), dir.path().display().to_string())],
            log_dir: log_dir.then(|| dir.path().join("logs")),
            output: Arc::new(move |line| lock(&told).push(line)),
        };
        let (orders, inbox) = mpsc::channel(8);
        let (outbox, reports) = mpsc::channel(8);
        let leave = CancellationToken::new();
        let node = tokio::spawn(serve(settings, inbox, outbox, leave.clone()));
        let mut running = Running { dir, orders, reports, leave, printed, node };
        running.tell(Order::Introduce(Box::new(program))).await;
        assert_eq!(running.report().await, Report::Ready);
        running
    }

    async fn tell(&self, order: Order) {
        self.orders.send(order).await.unwrap();
    }

    async fn report(&mut self) -> Report {
        tokio::time::timeout(PATIENCE, self.reports.recv()).await.unwrap().unwrap()
    }

    async fn start(&self, workers: u32) {
        let node =
            NodeLayout { name: "n".into(), host: "127.0.0.1".into(), workers, servers: 0, ports: vec![4711] };
        let layout = Layout {
            round: 1,
            restarts: 0,
            max_restarts: 0,
            run: "0123456789abcdef".into(),
            job: "j".into(),
            framework: Framework::Torch,
            nodes: vec![node],
        };
        self.tell(Order::Start { layout: Box::new(layout), node: 0 }).await;
    }

    /// Waits until a file has a line, which it returns.
    async fn line(&self, name: &str) -> String {
        let path = self.dir.path().join(name);
        let read = async {
            loop {
                match std::fs::read_to_string(&path) {
                    Ok(text) if text.ends_with('\n') => return text.trim().to_owned(),
                    _ => tokio::task::yield_now().await,
                }
            }
        };
        tokio::time::timeout(PATIENCE, read).await.unwrap()
    }

    async fn end(self) -> (Ending, Vec<OutputLine>) {
        let ending = tokio::time::timeout(PATIENCE, self.node).await.unwrap().unwrap().unwrap();
        let printed = lock(&self.printed).clone();
        (ending, printed)
    }
}

/// Waits until a process has ended.
async fn ended(pid: &str) {
    let wait = async {
        while is_running(pid) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.unwrap();
}

fn is_running(pid: &str) -> bool {
    // A zombie, which waits for init, has ended.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_have_their_environment_and_their_lines_a_rank() {
    let mut running =
        Running::new("echo \"$RANK of $WORLD_SIZE: $1\"; echo trouble >&2; exit $RANK\n", 1_000, false).await;
    running.start(2).await;
    let mut ends = Vec::new();
    for _ in 0..2 {
        match running.report().await {
            Report::Exited { round: 1, ended } => ends.push(ended),
            other => panic!("{other:?}"),
        }
    }
    ends.sort_by_key(|ended| ended.place);
    for (rank, ended) in ends.iter().enumerate() {
        assert_eq!(ended.place, Place { role: Role::Worker, index: rank as u32 });
        assert_eq!(ended.exit, Exit::Code(rank as i32));
        assert!(!ended.was_asked && ended.pid > 1);
        let mut lines = ended.lines.clone();
        lines.sort();
        assert_eq!(lines, [format!("{rank} of 2: argument"), "trouble".to_owned()]);
    }
    running.tell(Order::Stop { round: 1 }).await;
    assert_eq!(running.report().await, Report::Stopped { round: 1 });
    running.tell(Order::Done { error: None }).await;
    let (ending, mut printed) = running.end().await;
    assert!(matches!(ending, Ending::Done(None)), "{ending:?}");
    printed.sort_by(|a, b| a.text.cmp(&b.text));
    let line = |stream, text: &str| OutputLine { stream, text: text.to_owned() };
    assert_eq!(
        printed,
        [
            line(Stream::Output, "[0] 0 of 2: argument"),
            line(Stream::Error, "[0] trouble"),
            line(Stream::Output, "[1] 1 of 2: argument"),
            line(Stream::Error, "[1] trouble"),
        ]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_ignores_sigterm_is_killed_with_all_that_it_started() {
    // The second process leaves the group and the session, and outlives its parent.
    let text = "trap '' TERM\n(setsid sh -c 'echo $$ > $FOLDER/far; exec sleep 600' &)\necho $$ > $FOLDER/own\n\
                while :; do sleep 600; done\n";
    let mut running = Running::new(text, 100, false).await;
    running.start(1).await;
    let (own, far) = (running.line("own").await, running.line("far").await);
    assert!(is_running(&own) && is_running(&far));
    running.tell(Order::Stop { round: 1 }).await;
    match running.report().await {
        Report::Exited { ended, .. } => {
            assert_eq!(ended.exit, Exit::Signal(9));
            assert!(ended.was_asked);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(running.report().await, Report::Stopped { round: 1 });
    assert!(!is_running(&own) && !is_running(&far), "{own} or {far} is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_ended_process_leaves_in_its_group_is_killed_without_a_mark() {
    let text = "env -i sh -c 'echo $$ > \"$0/near\"; exec sleep 600' \"$FOLDER\" > /dev/null 2>&1 &\n\
                until [ -s \"$FOLDER/near\" ]; do sleep 0.01; done\n";
    let mut running = Running::new(text, 60_000, false).await;
    running.start(1).await;
    let near = running.line("near").await;
    assert!(matches!(running.report().await, Report::Exited { ended, .. } if ended.exit == Exit::Code(0)));
    assert!(is_running(&near));
    running.tell(Order::Stop { round: 1 }).await;
    assert_eq!(running.report().await, Report::Stopped { round: 1 });
    ended(&near).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_is_known_as_long_as_it_has_a_process() {
    let mut groups = GroupSet::default();
    let sleep = |group| std::process::Command::new("sleep").arg("600").process_group(group).spawn().unwrap();
    let mut leader = sleep(0);
    let group = leader.id() as i32;
    groups.start(group);
    let mut member = sleep(group);
    leader.kill().unwrap();
    leader.wait().unwrap();
    groups.end(group);
    assert!(groups.has(group) && groups.all().eq([group]));
    let groups = Arc::new(Mutex::new(groups));
    // It was not asked to end with the leaders, and is killed with what is left.
    signal(&groups, Signal::SIGTERM);
    kill_left(&groups);
    assert_eq!(member.wait().unwrap().signal(), Some(9));
    let mut groups = GroupSet::default();
    groups.start(group);
    groups.end(group);
    assert!(!groups.has(group), "the number may be that of another program now");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_script_that_changes_between_rounds_is_refused() {
    let mut running = Running::new("exit 0\n", 1_000, false).await;
    let script = running.dir.path().join("script.sh");
    std::fs::write(&script, "#!/bin/sh\nexit 1\n").unwrap();
    running.start(2).await;
    match running.report().await {
        Report::Exited { ended, .. } => match ended.exit {
            Exit::Failed(reason) => {
                assert!(ended.is_final, "{reason}");
                assert!(reason.contains("has changed since the job began"), "{reason}");
                assert!(reason.contains("SHA-256") && reason.contains("script.sh"), "{reason}")
            }
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
    running.tell(Order::Stop { round: 1 }).await;
    assert_eq!(running.report().await, Report::Stopped { round: 1 });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_terminal_loses_no_line() {
    // More lines than the queue has, fewer bytes than a pipe holds.
    let text = "i=0\nwhile [ $i -lt 3000 ]; do echo $i; i=$((i+1)); done\n";
    let mut running = Running::new(text, 60_000, false).await;
    let printed = Arc::clone(&running.printed);
    let (hold, held) = std::sync::mpsc::channel::<()>();
    let (locked, is_locked) = std::sync::mpsc::channel::<()>();
    let terminal = std::thread::spawn(move || {
        let _stuck = lock(&printed);
        locked.send(()).unwrap();
        held.recv().unwrap_err();
    });
    is_locked.recv().unwrap();
    running.start(1).await;
    assert!(matches!(running.report().await, Report::Exited { .. }));
    running.tell(Order::Stop { round: 1 }).await;
    assert_eq!(running.report().await, Report::Stopped { round: 1 });
    drop(hold);
    terminal.join().unwrap();
    running.tell(Order::Done { error: None }).await;
    let (_, printed) = running.end().await;
    let lines: Vec<_> = printed.iter().map(|line| line.text.clone()).collect();
    assert_eq!(lines, (0..3000).map(|i| format!("[0] {i}")).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_end_when_the_coordinator_is_gone_or_the_node_leaves() {
    for is_lost in [true, false] {
        let text = "trap 'echo saved; exit 0' TERM\necho $$ > $FOLDER/own\nwhile :; do sleep 0.01; done\n";
        let mut running = Running::new(text, 60_000, false).await;
        running.start(1).await;
        let own = running.line("own").await;
        if is_lost {
            running.orders = mpsc::channel(1).0;
        } else {
            running.leave.cancel();
        }
        let drain = std::mem::replace(&mut running.reports, mpsc::channel(1).1);
        let (ending, printed) = running.end().await;
        assert!(matches!((is_lost, &ending), (true, Ending::Lost) | (false, Ending::Left)), "{ending:?}");
        assert!(!is_running(&own));
        // The shell may tell of its child first.
        assert!(printed.iter().any(|line| line.text == "[0] saved"), "{printed:?}");
        drop(drain);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_file_has_both_streams_and_gives_the_last_lines() {
    let mut running = Running::new("echo one; echo two >&2; echo three; exit 4\n", 1_000, true).await;
    running.start(1).await;
    match running.report().await {
        Report::Exited { ended, .. } => {
            assert_eq!(ended.lines, ["one", "two", "three"]);
            assert_eq!(ended.exit, Exit::Code(4));
        }
        other => panic!("{other:?}"),
    }
    let log = running.dir.path().join("logs/j-0123456789ab/round-1/0.log");
    assert_eq!(std::fs::read_to_string(log).unwrap(), "one\ntwo\nthree\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn ports_are_free_and_differ() {
    let mut running = Running::new("", 1, false).await;
    running.tell(Order::Prepare { round: 3, ports: 5 }).await;
    match running.report().await {
        Report::Prepared { round: 3, ports } => {
            let distinct: std::collections::BTreeSet<_> = ports.iter().collect();
            assert_eq!((ports.len(), distinct.len()), (5, 5));
            assert!(ports.iter().all(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()));
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_whose_log_file_cannot_be_opened_has_failed() {
    let mut running = Running::new("exit 0\n", 1_000, true).await;
    // The folder's name is taken by a file.
    std::fs::write(running.dir.path().join("logs"), "").unwrap();
    running.start(1).await;
    match running.report().await {
        Report::Exited { ended, .. } => match ended.exit {
            Exit::Failed(reason) => assert!(reason.contains("logs"), "{reason}"),
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

#[test]
fn names_of_log_files_are_those_of_places() {
    let dir = tempfile::tempdir().unwrap();
    let layout = Layout {
        round: 7,
        restarts: 0,
        max_restarts: 0,
        run: "abc".into(),
        job: "j".into(),
        framework: Framework::Mxnet,
        nodes: Vec::new(),
    };
    for (role, name) in [(Role::Worker, "2"), (Role::Server, "server-2"), (Role::Scheduler, "scheduler")] {
        let place = Place { role, index: 2 };
        let path = log_file(dir.path(), &layout, &place.label()).unwrap();
        assert_eq!(path, dir.path().join(Path::new("j-abc/round-7")).join(format!("{name}.log")));
    }
}
