use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, Streaming};

use super::super::proto::coordinator_server::{Coordinator, CoordinatorServer};
use super::*;

#[test]
fn step_clock_counts_running_steps_but_not_a_stopped_process() {
    let every = Duration::from_millis(500);
    let mut clock = StepClock::default();
    let mut tick = |steps, passed_ms| clock.tick(steps, Duration::from_millis(passed_ms), every).as_millis();
    assert_eq!([tick(0, 500), tick(0, 500)], [0, 0]);
    assert_eq!([tick(1, 500), tick(1, 500), tick(1, 500)], [0, 500, 1_000]);
    assert_eq!([tick(1, 60_000), tick(1, 500)], [2_000, 2_500]);
    assert_eq!([tick(3, 500), tick(4, 500), tick(4, 500)], [0, 0, 0]);
}

/// A session whose stream has ended after these notices.
fn ended(told: impl IntoIterator<Item = Notice>) -> Session {
    let (outgoing, _) = mpsc::channel(1);
    with(outgoing, told).0
}

/// A session that goes on after these notices as long as the other end of its notices lives.
fn with(
    outgoing: mpsc::Sender<proto::FromWorker>,
    told: impl IntoIterator<Item = Notice>,
) -> (Session, mpsc::UnboundedSender<Notice>) {
    let (notify, notices) = mpsc::unbounded_channel();
    for notice in told {
        assert!(notify.send(notice).is_ok());
    }
    let session = Session {
        address: "127.0.0.1:1".to_owned(),
        outgoing,
        notices,
        flags: Arc::default(),
        reports: watch::channel(None).0,
        epoch: 1,
        is_done: false,
        _over: CancellationToken::new().drop_guard(),
    };
    (session, notify)
}

#[test]
fn a_failure_waits_for_no_coordinator_that_answers_nothing() {
    let limit = Duration::from_millis(20);
    let fail = |session: &mut Session| session.fail_within(limit, "full".to_owned(), 1, Scope::Job);
    let lost = |result: Result<()>| matches!(result, Err(Error::CoordinatorLost { .. }));
    // Done was read before the last checkpoint failed, so nothing follows it.
    let (outgoing, mut sent) = mpsc::channel(1);
    let (mut session, _notify) = with(outgoing, [Notice::Done]);
    assert!(matches!(session.wait(), Ok(Barrier::Done)));
    assert!(fail(&mut session).is_ok() && sent.try_recv().is_err());
    // The coordinator reads and does not answer.
    let (outgoing, mut sent) = mpsc::channel(1);
    let (mut session, _notify) = with(outgoing, []);
    assert!(lost(fail(&mut session)) && sent.try_recv().is_ok());
    // It reads nothing.
    let (outgoing, _full) = mpsc::channel(1);
    outgoing.try_send(proto::FromWorker { message: None }).unwrap();
    let (mut session, _notify) = with(outgoing, []);
    assert!(lost(fail(&mut session)));
    // The usual answer.
    let (outgoing, _sent) = mpsc::channel(1);
    let (mut session, _notify) = with(outgoing, [Notice::Broken(1), Notice::Done]);
    assert!(fail(&mut session).is_ok());
}

#[test]
fn done_before_the_end_of_the_stream_is_not_a_lost_coordinator() {
    let mut session = ended([Notice::Done]);
    assert!(matches!(session.arrive((5, Vec::new()), Reason::Left, None), Ok(Barrier::Done)));
    assert!(matches!(ended([Notice::Done]).finish(5, false), Ok(Ending::Done)));
    let mut lost = ended([Notice::Broken(1), Notice::Lost("closed the stream".to_owned())]);
    assert!(matches!(lost.arrive((5, Vec::new()), Reason::Broken, None), Err(Error::CoordinatorLost { .. })));
}

#[test]
fn the_end_of_a_session_is_found_behind_other_notices() {
    let lost = || Notice::Lost("closed the stream".to_owned());
    let now = Duration::ZERO;
    assert!(matches!(ended([Notice::Broken(1), lost()]).end_within(now), Some(Err(_))));
    assert!(matches!(ended([Notice::Broken(1), Notice::Done]).end_within(now), Some(Ok(()))));
    assert!(ended([Notice::Broken(1)]).end_within(now).is_none());
}

/// A coordinator that accepts a worker with an assignment of that many bytes.
struct AcceptingCoordinator(usize);

#[tonic::async_trait]
impl Coordinator for AcceptingCoordinator {
    type SessionStream = tokio_stream::Once<Result<proto::ToWorker, Status>>;

    async fn session(
        &self,
        _: Request<Streaming<proto::FromWorker>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let welcome = proto::Welcome { assignment: "x".repeat(self.0), ..Default::default() };
        let message = Some(to_worker::Message::Welcome(welcome));
        Ok(Response::new(tokio_stream::once(Ok(proto::ToWorker { message }))))
    }
}

#[test]
fn a_plan_beyond_16_mib_reaches_its_worker() {
    const BYTES: usize = 40 << 20;
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).expect("a port");
    let coordinator = listener.local_addr().expect("an address").to_string();
    runtime.spawn(
        tonic::transport::Server::builder()
            .add_service(CoordinatorServer::new(AcceptingCoordinator(BYTES)))
            .serve_with_incoming(TcpListenerStream::new(listener)),
    );
    let worker_env = WorkerEnv { coordinator, token: String::new(), slot: 0, launch: 1, ring: None };
    let ring = "127.0.0.1:1".to_owned();
    let (_, assignment) = Session::connect(runtime.handle(), &worker_env, ring).expect("a welcome");
    assert_eq!(assignment.len(), BYTES);
}
