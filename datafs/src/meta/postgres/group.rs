//! Group commit for PostgreSQL: threads put their transactions into a batch, and one of them commits it for
//! all.
//!
//! A body runs without locks, on top of the cache and of the uncommitted batches of the process. When it
//! ends, it joins the batch that is forming if what it has read still holds. Otherwise it runs again, while
//! other threads briefly hold back from joining. While one batch is being committed, the next one forms. The
//! server checks the reads of a batch once more, under locks, against other processes. A thread's call
//! returns when its batch is committed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_leaf::error_chain;
use tokio_postgres::types::ToSql;

use super::Shared;
use super::batch::{Batch, Outcome};
use super::fault::Fault;
use super::pool::{Lent, Link, Pause, block_on};
use super::replay::Kept;
use super::rows::{Reads, Rows, Value};
use super::txn::Txn;
use crate::error::{Error, Result};
use crate::meta::engine::Order;
use crate::metrics;

/// Size of a batch in bytes above which it takes no more transactions.
const BATCH_BYTES_MAX: usize = 4 << 20;
/// Runs of a body that lost conflicts inside this process, before it waits for the batch that is being
/// committed.
const STALE_MAX: u32 = 3;
/// Longest sleep of a waiting thread before it looks again, in case it missed the end of a batch.
pub(super) const NAP: Duration = Duration::from_millis(5);

/// State that the threads share: the image, the batch that is forming and the one that is being committed.
#[derive(Debug)]
pub(super) struct State {
    pub(super) rows: Rows,
    pub(super) forming: Batch,
    pub(super) flying: Option<Arc<Batch>>,
    /// Failed batches, whose writes other transactions may have read.
    pub(super) failures: u64,
    /// The outcome of an own commit is unknown, so the server must list own commits, too.
    pub(super) own_too: bool,
    pub(super) kept: Kept,
}

impl State {
    pub(super) fn new(rows: Rows) -> State {
        State {
            rows,
            forming: Batch::new(1),
            flying: None,
            failures: 0,
            own_too: false,
            kept: Kept::default(),
        }
    }

    /// The value that this process is about to commit for a key, if any.
    pub(super) fn coming(&self, key: &[u8]) -> Option<&Value> {
        self.forming.writes.get(key).or_else(|| self.flying.as_ref()?.writes.get(key))
    }

    /// The number of the batch that is being committed, if it writes something in `reads`.
    pub(super) fn coming_with(&self, reads: &Reads) -> Option<u64> {
        let flying = self.flying.as_ref()?;
        let writes = reads.keys.keys().any(|key| flying.writes.contains_key(key))
            || reads.ranges.iter().any(|range| flying.writes_in(range.start(), range.end()));
        writes.then_some(flying.number)
    }

    fn writes_in(&self, start: &[u8], end: &[u8]) -> bool {
        self.forming.writes_in(start, end)
            || self.flying.as_ref().is_some_and(|flying| flying.writes_in(start, end))
    }

    /// Whether something that a run has read does not hold any more.
    fn is_stale(&self, txn: &Txn<'_>) -> bool {
        self.failures != txn.failures
            || txn.reads.keys.iter().any(|(key, read)| match self.coming(key) {
                Some(coming) => coming != read,
                None => self.forming.reads.get(key).is_some_and(|other| other != read),
            })
            || txn.scans.iter().any(|scan| self.writes_in(&scan.start, &scan.end))
            || self.rows.outdated(txn.since, &txn.reads, |key| self.coming(key).cloned())
    }

    fn join(&mut self, txn: Txn<'_>) -> Arc<std::sync::OnceLock<Outcome>> {
        let forming = &mut self.forming;
        for (key, value) in txn.reads.keys {
            // The server need not check what the batch itself writes.
            if !forming.writes.contains_key(&key) {
                forming.bytes += key.len() + value.as_ref().map_or(0, |value| value.len());
                forming.reads.insert(key, value);
            }
        }
        forming.scans.extend(txn.scans);
        for (key, value) in txn.writes {
            forming.bytes += key.len() + value.as_ref().map_or(0, |value| value.len());
            forming.writes.insert(key, value);
        }
        forming.prerequisites.append(txn.prerequisites);
        metrics::TRANSACTIONS.inc();
        Arc::clone(&forming.outcome)
    }
}

impl Shared {
    /// Waits until no batch of this process writes into a range.
    pub(super) fn settled(&self, start: &[u8], end: &[u8]) -> Result<()> {
        let deadline = self.pool.deadline();
        let mut state = self.state.lock();
        while state.writes_in(start, end) {
            if Instant::now() > deadline {
                return Err(self.busy());
            }
            self.landed.wait_for(&mut state, NAP);
        }
        Ok(())
    }

    /// Runs a body until its outcome has a place in the order of commits. An error of the body is checked
    /// like a success: what it has read must hold.
    pub(super) fn commit<T>(&self, body: &mut dyn FnMut(&mut Txn<'_>) -> Result<T>) -> Result<T> {
        let deadline = self.pool.deadline();
        let (mut stale, mut pause) = (0, Pause::default());
        loop {
            // Only a short wait: a body may need something that another thread holds until that thread's
            // transaction, which must join a batch, is committed.
            let turn = if stale > 0 { self.turn.try_lock_for(NAP) } else { None };
            let mut txn = Txn::writing(self);
            let result = body(&mut txn);
            if matches!(result, Err(Error::Metadata { .. } | Error::Busy { .. })) {
                return result;
            }
            if result.is_err() {
                txn.writes.clear();
            }
            let turn = turn.or_else(|| self.turn.try_lock_for(NAP));
            let joined = {
                let mut state = self.state.lock();
                while state.forming.bytes > BATCH_BYTES_MAX {
                    self.landed.wait_for(&mut state, NAP);
                }
                if state.is_stale(&txn) { None } else { Some(state.join(txn)) }
            };
            drop(turn);
            let Some(outcome) = joined else {
                stale += 1;
                if Instant::now() > deadline {
                    return Err(self.busy());
                }
                if stale > STALE_MAX {
                    let mut state = self.state.lock();
                    if state.flying.is_some() {
                        self.landed.wait_for(&mut state, NAP);
                    }
                }
                continue;
            };
            match self.wait_for(&outcome) {
                Outcome::Landed => return result,
                Outcome::Again => {
                    stale += 1;
                    if !pause.before(deadline) {
                        return Err(self.busy());
                    }
                }
                Outcome::Failed(fault) => {
                    return Err(fault.into_error(self.place(), self.pool.wait()));
                }
            }
        }
    }

    /// Waits for the outcome of a batch, or commits the batch if it is next.
    fn wait_for(&self, outcome: &Arc<std::sync::OnceLock<Outcome>>) -> Outcome {
        let mut state = self.state.lock();
        loop {
            if let Some(outcome) = outcome.get() {
                return outcome.clone();
            }
            if state.flying.is_none() && Arc::ptr_eq(&state.forming.outcome, outcome) {
                let next = Batch::new(state.forming.number + 1);
                let batch = Arc::new(std::mem::replace(&mut state.forming, next));
                state.flying = Some(Arc::clone(&batch));
                let since = state.rows.clock();
                drop(state);
                let mut landing = Landing { shared: self, batch: &batch, since, outcome: None };
                let begun = Instant::now();
                landing.outcome = Some(self.send(&batch));
                metrics::COMMITS.inc();
                metrics::COMMIT_NANOS.inc_by(begun.elapsed().as_nanos() as u64);
                metrics::COMMITTED_RECORDS.inc_by(batch.writes.len() as u64);
                drop(landing);
                state = self.state.lock();
                continue;
            }
            self.landed.wait(&mut state);
        }
    }

    /// Commits a batch, with retries over broken connections.
    fn send(&self, batch: &Arc<Batch>) -> Outcome {
        if let Err(error) = batch.prerequisites.run() {
            return Outcome::Failed(match error {
                Error::NoSpace { place, quota } => Fault::NoSpace { store: Some(place), quota },
                Error::StoreAway { place, operation, tried_ms, source } => {
                    Fault::Store { place, operation, tried_ms, cause: error_chain::one_line(source.as_ref()) }
                }
                other => Fault::Refused(format!(
                    "what the commit waits for failed: {}",
                    error_chain::one_line(&other)
                )),
            });
        }
        let deadline = self.pool.deadline();
        if self.state.lock().kept.is_full()
            && let Err(error) = self.flush()
        {
            tracing::warn!(
                error = error_chain::one_line(&error),
                "flushing the metadata server's log before more is committed"
            );
        }
        let mut pause = Pause::default();
        loop {
            let number = self.next_commit();
            let fault = match self.pool.take(deadline) {
                Err(fault) => fault,
                Ok(lent) => match lent
                    .call(deadline, |link, until| Ok((self.apply(link, until, batch, number)?, link.life)))
                {
                    Ok((0, life)) if self.state.lock().kept.keep(batch, number, life) => {
                        return Outcome::Landed;
                    }
                    Ok((0, _)) => match self.settle(batch, number, deadline) {
                        Ok(true) => return Outcome::Landed,
                        Ok(false) => Fault::Lost("the server has crashed".into()),
                        Err(fault) => return self.unknown(fault),
                    },
                    Ok(_) => {
                        // Something in the cache was wrong, so drop all that the batch has read.
                        self.state.lock().rows.forget_all(batch.reads.keys().map(Vec::as_slice));
                        return match self.poll(deadline) {
                            Ok(()) => Outcome::Again,
                            Err(fault) => Outcome::Failed(fault),
                        };
                    }
                    Err(Fault::Lost(text)) => match self.settle(batch, number, deadline) {
                        Ok(true) => return Outcome::Landed,
                        Ok(false) => Fault::Lost(text),
                        Err(fault) => return self.unknown(fault),
                    },
                    Err(fault) => fault,
                },
            };
            if !fault.is_passing() || !pause.before(deadline) {
                return Outcome::Failed(fault);
            }
        }
    }

    /// Whether a commit without an answer took place. If not, it never will.
    fn settle(&self, batch: &Arc<Batch>, number: i64, deadline: Instant) -> Result<bool, Fault> {
        let client = self.client;
        loop {
            let (landed, life) = self.pool.repeat(deadline, |link, until| {
                let rows = block_on(link.client.query(&link.settle, &[&client, &number]), until)?;
                Ok((rows.is_empty(), link.life))
            })?;
            // An answer from a life of the server that has ended proves nothing.
            if !landed || self.state.lock().kept.keep(batch, number, life) {
                return Ok(landed);
            }
        }
    }

    /// Handles a commit with an unknown outcome: the cache may be wrong, now and later.
    fn unknown(&self, fault: Fault) -> Outcome {
        let mut state = self.state.lock();
        state.own_too = true;
        state.rows.start_over();
        tracing::error!(place = self.place(), ?fault, "a commit whose outcome is unknown");
        Outcome::Failed(match fault {
            Fault::Lost(text) | Fault::TakenBack(text) | Fault::Refused(text) => Fault::Unknown(text),
            other => other,
        })
    }

    fn busy(&self) -> Error {
        Fault::TakenBack(String::new()).into_error(self.place(), self.pool.wait())
    }

    pub(super) fn apply(
        &self,
        link: &Link,
        until: Instant,
        batch: &Batch,
        number: i64,
    ) -> Result<i32, Fault> {
        let (locks, exclusive) = batch.locks(self.pool.target().schema());
        let (read_keys, read_values): (Vec<&[u8]>, Vec<Option<&[u8]>>) =
            batch.reads.iter().map(|(key, value)| (key.as_slice(), value.as_deref())).unzip();
        let starts: Vec<&[u8]> = batch.scans.iter().map(|scan| scan.start.as_slice()).collect();
        let ends: Vec<&[u8]> = batch.scans.iter().map(|scan| scan.end.as_slice()).collect();
        let descending: Vec<bool> = batch.scans.iter().map(|scan| scan.order == Order::Descending).collect();
        let limits: Vec<i64> =
            batch.scans.iter().map(|scan| i64::try_from(scan.limit).unwrap_or(i64::MAX)).collect();
        let sums: Vec<&[u8]> = batch.scans.iter().map(|scan| scan.sum.as_slice()).collect();
        let (keys, values): (Vec<&[u8]>, Vec<&[u8]>) =
            batch.writes.iter().filter_map(|(key, value)| Some((key.as_slice(), value.as_deref()?))).unzip();
        let deletes: Vec<&[u8]> = batch
            .writes
            .iter()
            .filter_map(|(key, value)| value.is_none().then_some(key.as_slice()))
            .collect();
        let parameters: [&(dyn ToSql + Sync); 14] = [
            &self.client,
            &number,
            &locks,
            &exclusive,
            &read_keys,
            &read_values,
            &starts,
            &ends,
            &descending,
            &limits,
            &sums,
            &keys,
            &values,
            &deletes,
        ];
        let row = block_on(link.client.query_one(&link.apply, &parameters), until)?;
        row.try_get(0).map_err(|error| Fault::from_postgres(&error))
    }

    /// Begins a transaction on the server in which all reads see one moment.
    pub(super) fn moment(&self, deadline: Instant) -> Result<Lent<'_>, Fault> {
        let mut pause = Pause::default();
        loop {
            let lent = self.pool.take(deadline)?;
            let begin = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";
            match lent.hold(deadline, |link, until| block_on(link.client.batch_execute(begin), until)) {
                Ok(()) => return Ok(lent),
                Err(fault) => {
                    lent.discard();
                    if !fault.is_passing() || !pause.before(deadline) {
                        return Err(fault);
                    }
                }
            }
        }
    }
}

/// Ends the commit of a batch, also when its thread panics.
struct Landing<'a> {
    shared: &'a Shared,
    batch: &'a Arc<Batch>,
    since: u64,
    outcome: Option<Outcome>,
}

impl Drop for Landing<'_> {
    fn drop(&mut self) {
        let outcome = self
            .outcome
            .take()
            .unwrap_or_else(|| Outcome::Failed(Fault::Refused("the commit panicked".into())));
        let mut state = self.shared.state.lock();
        state.flying = None;
        if matches!(outcome, Outcome::Landed) {
            state.rows.land(self.since, self.batch.writes.iter());
        } else {
            // Transactions that joined meanwhile may have read what this batch was going to write.
            state.failures += 1;
            let next = Batch::new(state.forming.number + 1);
            let forming = std::mem::replace(&mut state.forming, next);
            // Only this function sets outcomes, so the batch has none yet.
            let _ = forming.outcome.set(Outcome::Again);
        }
        let _ = self.batch.outcome.set(outcome);
        drop(state);
        self.shared.landed.notify_all();
    }
}
