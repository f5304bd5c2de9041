//! PostgreSQL engine: one table on a server, shared by the processes of many machines.
//!
//! Transactions are optimistic. A body reads from an image in memory, or from the server, and its writes are
//! buffered. It holds no locks while it runs, so a client that dies holds none. To commit, one statement
//! takes advisory locks on the scopes of the keys read (shared) and written (exclusive), in one order
//! everywhere. It compares the values that were read with the current ones, and writes. The locks are held
//! until the commit is visible, so every transaction is as if it had run at that moment alone. A row that all
//! transactions read and few write (a volume's, with its epoch) causes a conflict only when it was written.
//!
//! Reads see a position in the order of commits. Every answer of the server and every notification moves it
//! on; [`Engine::barrier`] moves it to now. Reads wait for no other client and take no round trip when the
//! data is cached.
//!
//! Commits are asynchronous on the server: visible everywhere when they are acknowledged. Durable ones then
//! wait for a flush of the server's log, which all waiting callers share.

mod batch;
mod contact;
mod fault;
mod flush;
mod follow;
mod group;
mod pool;
mod replace;
mod replay;
mod rows;
mod schema;
pub(crate) mod target;
#[cfg(test)]
pub(crate) mod tests;
mod tls;
mod txn;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use self::contact::Contact;
use self::fault::Fault;
use self::flush::Flush;
use self::follow::Follower;
use self::group::{NAP, State};
use self::pool::{Lent, Pool, Threads, block_on, columns};
use self::rows::{Rows, Value};
use self::target::Target;
use self::txn::Txn;
use super::changes::{ChangeListener, Subscription};
use super::engine::{Durability, Engine, Order, Pair, Pairs, ReadTxn, WriteTxn};
use super::sqlite::FORMAT_VERSION;
use crate::error::{Error, Result};

/// Runs of a reading body before it gets a transaction on the server.
const READ_RUNS: u32 = 6;
/// An image that the server has not confirmed for this long is not used.
const CONFIRMED_MAX: Duration = Duration::from_secs(10);

/// Keys that changed while a request was pending, see [`Rows::changed_since`].
type Changes<'a> = Option<&'a HashSet<Arc<[u8]>>>;

/// Options to open an engine.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    /// Time limit of a call, with all attempts.
    pub(crate) wait: Duration,
    /// Limit of connections, at least 2; one more is for notifications.
    pub(crate) connections_max: usize,
    /// Limit of the cached part of the map, in bytes.
    pub(crate) cache_bytes_max: usize,
    /// Time without a renewed lease after which other processes declare this one dead.
    pub(crate) lease: Duration,
}

/// The engine.
pub(crate) struct Postgres {
    /// Dropped first: it unregisters this client.
    follower: Follower,
    shared: Arc<Shared>,
}

/// State that the threads of the engine share.
pub(crate) struct Shared {
    pool: Pool,
    /// This process among the clients of the schema, not 0.
    client: i64,
    lease: Duration,
    contact: Mutex<Contact>,
    /// Commits of this client so far.
    commits: AtomicI64,
    state: Mutex<State>,
    /// A batch has been committed, or has failed.
    landed: Condvar,
    /// Held, if available soon, by a thread that joins a batch, and by one that lost a conflict while its
    /// body runs again.
    turn: Mutex<()>,
    /// Held by a thread that found a new life of the server, until its lost commits are replayed.
    meeting: Mutex<()>,
    flush: Flush,
}

impl fmt::Debug for Postgres {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Postgres").field("place", &self.shared.place()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("place", &self.place()).finish_non_exhaustive()
    }
}

impl Postgres {
    /// Connects, creates what is missing and registers this process as `session`, a number below 2⁶³ that no
    /// other process uses. Fails with [`Error::NewerFormat`] before any write.
    pub(crate) fn open(target: Target, session: u64, options: &Options) -> Result<Postgres> {
        let place = target.place().to_owned();
        let threads = Threads::start().map_err(|e| Error::io("start the threads of", place.as_str(), e))?;
        let pool = Pool::new(target, threads, options.wait, options.connections_max.max(2));
        let shared = Arc::new(Shared {
            pool,
            client: session.cast_signed(),
            lease: options.lease,
            contact: Mutex::new(Contact::new(Instant::now())),
            commits: AtomicI64::new(0),
            state: Mutex::new(State::new(Rows::new(options.cache_bytes_max))),
            landed: Condvar::new(),
            turn: Mutex::new(()),
            meeting: Mutex::new(()),
            flush: Flush::default(),
        });
        // Set only here, before the first connection.
        let _ = shared.pool.owner.set(Arc::downgrade(&shared));
        shared.prepare()?;
        shared.register().map_err(|fault| shared.error(fault))?;
        // No listener is registered yet.
        shared.state.lock().rows.take_news();
        let follower = Follower::start(&shared)?;
        Ok(Postgres { shared, follower })
    }
}

impl Shared {
    fn place(&self) -> &str {
        self.pool.target().place()
    }

    fn error(&self, fault: Fault) -> Error {
        fault.into_error(self.place(), self.pool.wait())
    }

    fn next_commit(&self) -> i64 {
        self.commits.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Checks server and format before any write, then creates what is missing.
    fn prepare(&self) -> Result<()> {
        let deadline = self.pool.deadline();
        let name = self.pool.target().schema();
        let mut pause = pool::Pause::default();
        let prepare = || -> std::result::Result<(), PrepareError> {
            let client = self.pool.connect_bare(deadline)?;
            let probe = block_on(client.query_one(&schema::probe(name), &[]), deadline)?;
            let read = |column| probe.try_get(column).map_err(|e| Fault::from_postgres(&e));
            let version: i32 = probe.try_get(0).map_err(|e| Fault::from_postgres(&e))?;
            if version < schema::SERVER_VERSION_MIN {
                let text = format!("the server has version {}, 15 or newer is needed", version / 10_000);
                return Err(Fault::Refused(text).into());
            }
            let (table, function): (bool, bool) = (read(1)?, read(2)?);
            if table {
                let rows = block_on(client.query(&schema::format(name), &[]), deadline)?;
                self.check_format(rows.first().and_then(|row| row.try_get(0).ok()))?;
            }
            if !table || !function {
                let text = schema::create(name, batch::lock_of_making(name));
                block_on(client.batch_execute(&text), deadline)?;
                let rows = block_on(client.query(&schema::format(name), &[]), deadline)?;
                self.check_format(rows.first().and_then(|row| row.try_get(0).ok()))?;
            }
            Ok(())
        };
        loop {
            match prepare() {
                Ok(()) => return Ok(()),
                Err(PrepareError::Format(error)) => return Err(error),
                Err(PrepareError::Fault(fault)) if fault.is_passing() && pause.before(deadline) => {}
                Err(PrepareError::Fault(fault)) => return Err(self.error(fault)),
            }
        }
    }

    fn check_format(&self, value: Option<Vec<u8>>) -> std::result::Result<(), PrepareError> {
        let Some(value) = value else { return Ok(()) };
        let place = || self.place().to_owned();
        let found = value.as_slice().try_into().map(u32::from_be_bytes).map_err(|_| {
            PrepareError::Format(Error::corrupt(place(), "its format record is not a number"))
        })?;
        if found > FORMAT_VERSION {
            let error = Error::NewerFormat { place: place(), found, supported: FORMAT_VERSION };
            return Err(PrepareError::Format(error));
        }
        Ok(())
    }

    /// Registers this process for notifications of commits, and drops what it cached before.
    fn register(&self) -> std::result::Result<(), Fault> {
        let name = self.pool.target().schema();
        let lease_ms = i64::try_from(self.lease.as_millis()).unwrap_or(i64::MAX / 1_000);
        let text = schema::register(name, batch::lock_of_everything(name), self.client, lease_ms);
        let deadline = self.pool.deadline();
        self.pool.repeat(deadline, |link, until| {
            // A connection that fails inside its transaction is not used again.
            block_on(link.client.batch_execute(&text), until).map_err(|fault| match fault {
                Fault::TakenBack(text) => Fault::Lost(text),
                other => other,
            })
        })?;
        self.state.lock().rows.start_over();
        self.poll(deadline)
    }

    /// The image's clock and the count of failed batches, from which on a run's reads are checked.
    fn begin(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.rows.clock(), state.failures)
    }

    /// The value of a key if it is known without a request; with `coming` also from uncommitted batches.
    fn recall(&self, key: &[u8], coming: bool) -> Option<Value> {
        let mut state = self.state.lock();
        if coming && let Some(value) = state.coming(key) {
            return Some(value.clone());
        }
        state.rows.get(key)
    }

    /// Fetches the values of keys from the server, in the order of the keys.
    fn fetch(&self, keys: &[&[u8]], moment: Option<&Lent<'_>>) -> Result<Vec<Value>> {
        let found = self.ask(
            moment,
            |link, xid, client, until| {
                block_on(link.client.query(&link.fetch, &[&keys, &xid, &client]), until)
            },
            |rows, changed, pairs| {
                let found = by_key(pairs);
                rows.remember(changed, keys.iter().map(|key| (*key, found.get(key).cloned())));
            },
        );
        let found = found.map_err(|fault| self.error(fault))?;
        let found = by_key(&found);
        Ok(keys.iter().map(|key| found.get(key).cloned()).collect())
    }

    /// Reads a range from the server.
    fn scan(
        &self,
        start: &[u8],
        end: &[u8],
        order: Order,
        limit: usize,
        moment: Option<&Lent<'_>>,
    ) -> Result<Vec<Pair>> {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        self.ask(
            moment,
            |link, xid, client, until| {
                let statement = match order {
                    Order::Ascending => &link.scan,
                    Order::Descending => &link.scan_descending,
                };
                block_on(link.client.query(statement, &[&start, &end, &limit, &xid, &client]), until)
            },
            |rows, changed, pairs| {
                rows.remember(
                    changed,
                    pairs.iter().map(|(key, value)| (key.as_slice(), Some(value.as_slice().into()))),
                );
            },
        )
        .map_err(|fault| self.error(fault))
    }

    /// Moves the position to now.
    fn poll(&self, deadline: Instant) -> std::result::Result<(), Fault> {
        let none: &[&[u8]] = &[];
        self.ask_until(
            deadline,
            None,
            |link, xid, client, until| {
                block_on(link.client.query(&link.fetch, &[&none, &xid, &client]), until)
            },
            |_, _, _| {},
        )
        .map(drop)
    }

    fn ask(
        &self,
        moment: Option<&Lent<'_>>,
        call: impl FnMut(&pool::Link, i64, i64, Instant) -> std::result::Result<Vec<tokio_postgres::Row>, Fault>,
        remember: impl FnMut(&mut Rows, Changes<'_>, &[Pair]),
    ) -> std::result::Result<Vec<Pair>, Fault> {
        self.ask_until(self.pool.deadline(), moment, call, remember)
    }

    /// Makes a read call and applies the changes that its answer reports.
    fn ask_until(
        &self,
        deadline: Instant,
        moment: Option<&Lent<'_>>,
        mut call: impl FnMut(
            &pool::Link,
            i64,
            i64,
            Instant,
        ) -> std::result::Result<Vec<tokio_postgres::Row>, Fault>,
        mut remember: impl FnMut(&mut Rows, Changes<'_>, &[Pair]),
    ) -> std::result::Result<Vec<Pair>, Fault> {
        let mut once = |link: &pool::Link, until: Instant| {
            let (since, xid, client) = {
                let state = self.state.lock();
                (state.rows.clock(), state.rows.horizon(), if state.own_too { 0 } else { self.client })
            };
            let life = Some(link.life);
            let (mut pairs, mut commits, mut horizon) = (Vec::new(), Vec::new(), 0);
            for row in call(link, xid, client, until)? {
                match columns(&row)? {
                    (schema::ROW_PAIR, Some(key), Some(value), ..) => pairs.push((key, value)),
                    (schema::ROW_COMMIT, _, _, Some(xid), touched) => commits.push((xid, touched)),
                    (schema::ROW_HORIZON, _, _, Some(xid), _) => horizon = xid,
                    _ => return Err(Fault::Refused("a row of an unexpected kind".into())),
                }
            }
            // In a server transaction the answer is as old as the transaction, so it is not cached.
            if moment.is_none() {
                let mut state = self.state.lock();
                if state.kept.life() != life {
                    return Err(Fault::Lost("the server has crashed".into()));
                }
                // The answer includes the commits that it lists. It may lack changes that other answers
                // brought meanwhile.
                let changed = state.rows.changed_since(since);
                state.rows.follow(commits, horizon, Instant::now());
                // Without a position the server lists no changes, so the answer is not cached.
                if xid != i64::MAX {
                    remember(&mut state.rows, changed.as_ref(), &pairs);
                }
            }
            Ok(pairs)
        };
        match moment {
            Some(lent) => lent.hold(deadline, once),
            None => self.pool.repeat(deadline, &mut once),
        }
    }

    /// Runs a reading body; with `now`, what it reads is not older than the call.
    fn view(&self, now: bool, body: &mut dyn FnMut(&mut Txn<'_>) -> Result<()>) -> Result<()> {
        let now = now || !self.is_confirmed();
        for run in 0..READ_RUNS {
            let mut txn = Txn::reading(self);
            let result = body(&mut txn);
            if matches!(result, Err(Error::Metadata { .. } | Error::Busy { .. })) {
                return result;
            }
            // Data from the cache alone is right as of now, unless the server reports a change.
            if now && run == 0 && !txn.asked {
                self.poll(self.pool.deadline()).map_err(|fault| self.error(fault))?;
            }
            if self.still_holds(&txn) {
                return result;
            }
        }
        // Other processes change the data faster than the body reads it.
        self.view_once(body)
    }

    /// Runs a reading body in a transaction on the server. Repeats it only if the server aborts the
    /// transaction.
    fn view_once(&self, body: &mut dyn FnMut(&mut Txn<'_>) -> Result<()>) -> Result<()> {
        let deadline = self.pool.deadline();
        let mut pause = pool::Pause::default();
        loop {
            let moment = self.moment(deadline).map_err(|fault| self.error(fault))?;
            let result = body(&mut Txn::reading_at(self, &moment));
            if moment.is_spoilt() {
                moment.discard();
                if pause.before(deadline) {
                    continue;
                }
                return result;
            }
            let end =
                moment.hold(deadline, |link, until| block_on(link.client.batch_execute("COMMIT"), until));
            if end.is_err() {
                moment.discard();
            }
            return result;
        }
    }

    /// Whether everything that a run has read was true at one moment.
    fn still_holds(&self, txn: &Txn<'_>) -> bool {
        let mut state = self.state.lock();
        // Answers of the server may have included the batch that is being committed; the cache did not.
        let coming = state.coming_with(&txn.reads).filter(|_| txn.asked);
        while coming.is_some() && state.flying.as_ref().map(|flying| flying.number) == coming {
            self.landed.wait_for(&mut state, NAP);
        }
        !state.rows.outdated(txn.since, &txn.reads, |_| None)
    }

    /// Whether cached data may be used: the server has confirmed it recently.
    fn is_confirmed(&self) -> bool {
        self.state.lock().rows.asked().is_some_and(|at| at.elapsed() < CONFIRMED_MAX)
    }
}

fn by_key(pairs: &[Pair]) -> HashMap<&[u8], Arc<[u8]>> {
    pairs.iter().map(|(key, value)| (key.as_slice(), value.as_slice().into())).collect()
}

/// The error of a flush that failed after its commit took place. It never says that nothing was changed: then
/// the caller would delete the objects that the commit points at.
fn of_the_flush(error: Error) -> Error {
    if !error.is_definite() {
        return error;
    }
    let place = match &error {
        Error::Busy { place, .. } | Error::NoSpace { place, .. } => place.clone(),
        _ => "the server".to_owned(),
    };
    let source = format!("it is committed, and not known to survive a crash of the server: {error}");
    Error::Metadata { place, source: source.into() }
}

enum PrepareError {
    Fault(Fault),
    Format(Error),
}

impl From<Fault> for PrepareError {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl Engine for Postgres {
    fn read(&self, body: &mut dyn FnMut(&mut dyn ReadTxn) -> Result<()>) -> Result<()> {
        self.shared.check_lost()?;
        self.shared.view(true, &mut |txn| body(txn))
    }

    fn read_recent(&self, body: &mut dyn FnMut(&mut dyn ReadTxn) -> Result<()>) -> Result<()> {
        self.shared.check_lost()?;
        self.shared.view(false, &mut |txn| body(txn))
    }

    fn read_once(&self, body: &mut dyn FnMut(&mut dyn ReadTxn) -> Result<()>) -> Result<()> {
        self.shared.check_lost()?;
        self.shared.view_once(&mut |txn| body(txn))
    }

    fn replace(&self, check: &mut dyn FnMut() -> Result<()>, pairs: Pairs<'_>) -> Result<()> {
        // Flush first: a commit that is replayed after a crash of the server must not be older than the
        // restored data.
        self.sync()?;
        let replaced = self.shared.replace(check, pairs);
        self.shared.state.lock().rows.start_over();
        replaced
    }

    fn write(
        &self,
        durability: Durability,
        body: &mut dyn FnMut(&mut dyn WriteTxn) -> Result<()>,
    ) -> Result<()> {
        self.shared.check_lost()?;
        self.shared.commit(&mut |txn| body(txn))?;
        match durability {
            Durability::Relaxed => Ok(()),
            Durability::Durable => self.sync().map_err(of_the_flush),
        }
    }

    fn sync(&self) -> Result<()> {
        self.shared.flush()?;
        // A commit that was lost meanwhile was not flushed.
        self.shared.check_lost()
    }

    fn barrier(&self) -> Result<()> {
        self.shared.check_lost()?;
        self.shared.poll(self.shared.pool.deadline()).map_err(|fault| self.shared.error(fault))
    }

    fn end_lapsed(&self, session: u64) -> Result<Option<bool>> {
        let shared = &self.shared;
        // The time for the request includes a suspension after the look at the contact.
        let deadline = shared.pool.deadline();
        if !shared.contact.lock().is_steady(Instant::now(), shared.lease) {
            return Ok(Some(false));
        }
        let text = schema::end_lapsed(shared.pool.target().schema(), session.cast_signed());
        let rows = shared
            .pool
            .repeat(deadline, |link, until| block_on(link.client.query(&text, &[]), until))
            .map_err(|fault| shared.error(fault))?;
        Ok(Some(rows.is_empty()))
    }

    fn sessions_alive(&self, sessions: &[u64]) -> Result<Option<BTreeSet<u64>>> {
        let shared = &self.shared;
        if sessions.is_empty() {
            return Ok(Some(BTreeSet::new()));
        }
        let clients: Vec<i64> = sessions.iter().map(|session| session.cast_signed()).collect();
        let text = schema::alive(shared.pool.target().schema());
        let rows = shared
            .pool
            .repeat(shared.pool.deadline(), |link, until| {
                block_on(link.client.query(&text, &[&clients]), until)
            })
            .map_err(|fault| shared.error(fault))?;
        if !shared.contact.lock().is_steady(Instant::now(), shared.lease) {
            return Ok(Some(sessions.iter().copied().collect()));
        }
        Ok(Some(
            rows.iter().filter_map(|row| row.try_get::<_, i64>(0).ok()).map(i64::cast_unsigned).collect(),
        ))
    }

    fn on_change(&self, listener: ChangeListener) -> Result<Subscription> {
        Ok(self.follower.subscribe(listener))
    }
}
