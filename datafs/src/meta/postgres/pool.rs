//! Connection pool of the server, for synchronous threads: a limited number, opened when needed, closed when
//! broken.

use std::cell::Cell;
use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use millrace_leaf::backoff::Backoff;
use parking_lot::{Condvar, Mutex};
use tokio::runtime::{Builder, Runtime};
use tokio_postgres::{Client, Row, Statement};

use super::Shared;
use super::fault::Fault;
use super::schema;
use super::target::{Connection, Target};

/// First and longest pause between attempts to reach an unavailable server.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_millis(1_000);
/// How much later than the server the client gives up.
pub(super) const GRACE: Duration = Duration::from_secs(5);

/// A connection with its prepared statements.
pub(super) struct Link {
    pub(super) client: Client,
    pub(super) fetch: Statement,
    pub(super) scan: Statement,
    pub(super) scan_descending: Statement,
    pub(super) apply: Statement,
    pub(super) settle: Statement,
    /// The life of the server that the connection belongs to, see `replay.rs`.
    pub(super) life: i64,
}

/// Runtime threads that drive the connections; callers wait on their own threads.
pub(super) struct Threads(Option<Runtime>);

impl Threads {
    pub(super) fn start() -> std::io::Result<Threads> {
        let mut builder = Builder::new_multi_thread();
        builder
            .worker_threads(1)
            .thread_name("datafs-postgres")
            .enable_all()
            .build()
            .map(|r| Threads(Some(r)))
    }

    /// Runs a future to its end and blocks the calling thread, which may belong to a runtime. `None` if the
    /// future panicked.
    pub(super) fn wait<T: Send + 'static>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        self.0.as_ref()?.spawn(async move {
            // The receiver waits until the end.
            let _ = sender.send(future.await);
        });
        receiver.recv().ok()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            // The plain drop of a runtime panics inside an async context.
            runtime.shutdown_background();
        }
    }
}

/// The connections of one open engine.
pub(super) struct Pool {
    target: Target,
    threads: Threads,
    /// Time limit of a call, with all attempts.
    wait: Duration,
    links_max: usize,
    state: Mutex<State>,
    freed: Condvar,
    /// Checks each new connection before it is used.
    pub(super) owner: OnceLock<Weak<Shared>>,
    #[cfg(test)]
    faults: Option<Arc<crate::meta::faulty::Faults>>,
}

#[derive(Default)]
struct State {
    idle: Vec<Link>,
    /// Number of connections, idle and in use.
    open: usize,
}

impl Pool {
    pub(super) fn new(target: Target, threads: Threads, wait: Duration, links_max: usize) -> Pool {
        Pool {
            target,
            threads,
            wait,
            links_max: links_max.max(1),
            state: Mutex::default(),
            freed: Condvar::new(),
            owner: OnceLock::new(),
            #[cfg(test)]
            faults: crate::meta::faulty::at(crate::meta::faulty::Place::Inside),
        }
    }

    pub(super) fn target(&self) -> &Target {
        &self.target
    }

    pub(super) fn wait(&self) -> Duration {
        self.wait
    }

    /// The deadline of a call that begins now.
    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.wait
    }

    /// A connection for exclusive use. The tables and the function must exist.
    pub(super) fn take(&self, deadline: Instant) -> Result<Lent<'_>, Fault> {
        {
            let mut state = self.state.lock();
            loop {
                if let Some(link) = state.idle.pop() {
                    if link.client.is_closed() {
                        state.open -= 1;
                        continue;
                    }
                    return Ok(Lent { pool: self, link: Some(link), spoilt: Cell::new(false) });
                }
                if state.open < self.links_max {
                    state.open += 1;
                    break;
                }
                if self.freed.wait_until(&mut state, deadline).timed_out() {
                    return Err(Fault::TakenBack("all connections are in use".into()));
                }
            }
        }
        let mut lent = Lent { pool: self, link: None, spoilt: Cell::new(false) };
        lent.link = Some(self.connect(deadline)?);
        Ok(lent)
    }

    fn connect(&self, deadline: Instant) -> Result<Link, Fault> {
        let client = self.connect_bare(deadline)?;
        let name = self.target.schema();
        let texts = [
            schema::fetch(name),
            schema::scan(name, false),
            schema::scan(name, true),
            schema::call(name),
            schema::settle(name),
        ];
        let statements = futures::future::try_join_all(texts.iter().map(|text| client.prepare(text)));
        let [fetch, scan, scan_descending, apply, settle] = block_on(statements, deadline + GRACE)?
            .try_into()
            .map_err(|_| Fault::Refused("a statement got lost".into()))?;
        let mut link = Link { client, fetch, scan, scan_descending, apply, settle, life: 0 };
        let owner = self.owner.get().and_then(Weak::upgrade);
        let owner = owner.ok_or_else(|| Fault::Refused("the engine is closed".into()))?;
        link.life = owner.meet(&link, deadline + GRACE)?;
        Ok(link)
    }

    /// Opens a connection that works with an empty database.
    pub(super) fn connect_bare(&self, deadline: Instant) -> Result<Client, Fault> {
        // Calls on the client report the errors of the connection.
        let client = self.open(deadline + GRACE, |connection| connection)?;
        let wait_ms = u64::try_from(self.wait.as_millis()).unwrap_or(u64::MAX);
        block_on(client.batch_execute(&schema::settings(wait_ms)), deadline + GRACE)?;
        Ok(client)
    }

    /// Connects without any settings. The future from `drive` must end when the client is dropped.
    pub(super) fn open<F>(
        &self,
        deadline: Instant,
        drive: impl FnOnce(Connection) -> F + Send + 'static,
    ) -> Result<Client, Fault>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        let target = self.target.clone();
        // The library bounds the connection of the socket alone, not what the server says on it.
        let until = tokio::time::Instant::from_std(deadline);
        let connected = self.threads.wait(async move {
            let (client, connection) = tokio::time::timeout_at(until, target.connect())
                .await
                .map_err(|_| Fault::Lost("the server takes the connection and does not answer".into()))?
                .map_err(|error| Fault::from_postgres(&error))?;
            tokio::spawn(drive(connection));
            Ok(client)
        });
        connected.ok_or_else(|| Fault::Lost("the threads of the engine have stopped".into()))?
    }

    /// Runs `call` on a connection. Repeats it until the deadline while the server is unreachable or aborts
    /// it. The call must tolerate taking effect twice.
    pub(super) fn repeat<T>(
        &self,
        deadline: Instant,
        mut call: impl FnMut(&Link, Instant) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let mut pause = Pause::default();
        loop {
            let result = self.take(deadline).and_then(|lent| lent.call(deadline, &mut call));
            match result {
                Err(fault) if fault.is_passing() && pause.before(deadline) => {}
                other => return other,
            }
        }
    }

    fn put_back(&self, link: Option<Link>) {
        let mut state = self.state.lock();
        match link {
            Some(link) if !link.client.is_closed() => state.idle.push(link),
            _ => state.open -= 1,
        }
        drop(state);
        self.freed.notify_one();
    }
}

/// Growing pauses with random jitter, so that clients do not move in step.
#[derive(Debug)]
pub(super) struct Pause(Backoff);

impl Default for Pause {
    fn default() -> Pause {
        Pause(Backoff::new(PAUSE_MIN, PAUSE_MAX))
    }
}

impl Pause {
    /// Pauses. Returns `false`, without a pause, if the deadline would pass meanwhile.
    pub(super) fn before(&mut self, deadline: Instant) -> bool {
        let pause = self.0.jittered();
        if Instant::now() + pause >= deadline {
            return false;
        }
        std::thread::sleep(pause);
        true
    }
}

/// A borrowed connection. It returns to its pool when dropped, unless it is broken.
pub(super) struct Lent<'a> {
    pool: &'a Pool,
    link: Option<Link>,
    /// A call failed and may succeed on another connection; the transaction on this one is over.
    spoilt: Cell<bool>,
}

impl Lent<'_> {
    /// Makes one call. Closes a connection that was lost or did not answer in time.
    pub(super) fn call<T>(
        mut self,
        deadline: Instant,
        call: impl FnOnce(&Link, Instant) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let result = self.hold(deadline, call);
        if matches!(result, Err(Fault::Lost(_))) {
            self.link = None;
        }
        result
    }

    /// Makes one call and keeps the connection.
    pub(super) fn hold<T>(
        &self,
        deadline: Instant,
        call: impl FnOnce(&Link, Instant) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let link = self.link.as_ref().ok_or_else(|| Fault::Lost("the connection is closed".into()))?;
        #[cfg(test)]
        let call = |link: &Link, until| match self.pool.faults.as_ref().and_then(|faults| faults.draw()) {
            None => call(link, until),
            Some(fault) => disturb(fault, |until| call(link, until), until),
        };
        let result = call(link, deadline + GRACE);
        if result.as_ref().is_err_and(Fault::is_passing) {
            self.spoilt.set(true);
        }
        result
    }

    /// Whether a call on it failed for a transient reason.
    pub(super) fn is_spoilt(&self) -> bool {
        self.spoilt.get()
    }

    /// Closes the connection, because its state is unknown.
    pub(super) fn discard(mut self) {
        self.link = None;
    }
}

/// Makes a call with an injected fault.
#[cfg(test)]
fn disturb<T>(
    fault: crate::meta::faulty::Fault,
    call: impl FnOnce(Instant) -> Result<T, Fault>,
    until: Instant,
) -> Result<T, Fault> {
    use crate::meta::faulty::Fault as Wanted;
    match fault {
        Wanted::Conflict | Wanted::Timeout => return Err(Fault::TakenBack("as the test wants".into())),
        Wanted::LostBefore => {}
        Wanted::LostAfter => drop(call(until)?),
        // The call is sent; its answer is ignored.
        Wanted::Unknown => drop(call(Instant::now())),
    }
    Err(Fault::Lost("as the test wants".into()))
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        self.pool.put_back(self.link.take());
    }
}

/// Waits for a future of a connection, which other threads drive. Works inside async runtimes, too. A call
/// without an answer by `deadline` counts as lost.
pub(super) fn block_on<T>(
    future: impl Future<Output = Result<T, tokio_postgres::Error>>,
    deadline: Instant,
) -> Result<T, Fault> {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(result) = future.as_mut().poll(&mut context) {
            return result.map_err(|error| Fault::from_postgres(&error));
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Fault::Lost("no answer in time".into()));
        }
        std::thread::park_timeout(left);
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// A row's columns `(kind, key, value, number, keys)`.
pub(super) type Columns = (i32, Option<Vec<u8>>, Option<Vec<u8>>, Option<i64>, Option<Vec<Vec<u8>>>);

/// Decodes a row of a reading statement.
pub(super) fn columns(row: &Row) -> Result<Columns, Fault> {
    let read = || Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?, row.try_get(3)?, row.try_get(4)?));
    read().map_err(|error: tokio_postgres::Error| Fault::Refused(format!("unexpected answer: {error}")))
}
