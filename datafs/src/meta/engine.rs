//! What a metadata engine is: an ordered map of bytes to bytes with serializable transactions.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::changes::{ChangeListener, Subscription};
use crate::error::{Error, Result};

/// A key and its value.
pub(crate) type Pair = (Vec<u8>, Vec<u8>);
/// Pairs from elsewhere, one after the other.
pub(crate) type Pairs<'a> = &'a mut dyn Iterator<Item = Result<Pair>>;

/// What a commit promises once it has returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Durability {
    /// It is visible everywhere, and safe from the death of its process a few milliseconds later; a
    /// power failure may take it back, with everything committed after it.
    Relaxed,
    /// It survives a power failure, with everything committed before it.
    Durable,
}

/// Direction of a scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    Ascending,
    Descending,
}

/// Reads of one transaction: all see the same state.
pub(crate) trait ReadTxn {
    /// The value of a key.
    fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>>;

    /// At most `limit` pairs with `start <= key < end`, in `order`.
    fn scan(&mut self, start: &[u8], end: &[u8], order: Order, limit: usize) -> Result<Vec<Pair>>;

    /// Whether the engine is so far away that [`ReadTxn::prefetch`] does anything.
    fn prefetches(&self) -> bool {
        false
    }

    /// Says which keys are read next, so that an engine far away brings them in one round trip.
    fn prefetch(&mut self, keys: &[Vec<u8>]) -> Result<()> {
        let _ = keys;
        Ok(())
    }
}

/// Something outside of the metadata that a commit waits for, typically the bytes of an object.
pub(crate) trait Prerequisite: fmt::Debug + Send + Sync {
    /// Makes everything durable that was there when the transaction asked for it (more is fine). Runs
    /// outside of transactions, on any thread, once for all transactions that are committed together;
    /// again after an error, when the commit is tried again.
    fn make_durable(&self) -> Result<()>;

    /// How long a commit that nobody waits for may put it off, so that others share what it costs.
    fn linger(&self) -> Duration {
        Duration::ZERO
    }
}

/// Reads and writes of one transaction.
pub(crate) trait WriteTxn: ReadTxn {
    /// Sets a key.
    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()>;

    /// Removes a key; one that is not there is removed already.
    fn delete(&mut self, key: &[u8]) -> Result<()>;

    /// Has `prerequisite` made durable before the commit that holds this transaction, so that what is
    /// put here may point at it. The same one (by address) is made durable once per commit.
    fn require(&mut self, prerequisite: Arc<dyn Prerequisite>) -> Result<()> {
        prerequisite.make_durable()
    }

    /// Says that a directory (volume and inode number), which is made here, has no names that anybody has
    /// seen. A hint.
    fn begins(&mut self, _directory: (u64, u64)) {}

    /// Says that the transaction makes room, so that its commit may take the space that is set aside for that. A
    /// hint.
    fn makes_room(&mut self) {}

    /// The transaction as a reader.
    fn as_read(&mut self) -> &mut dyn ReadTxn;
}

/// A metadata engine. Shared by all threads of a process, and its file or server by all processes.
pub(crate) trait Engine: fmt::Debug + Send + Sync {
    /// Runs `body` in a read transaction that sees everything that was committed before the call.
    fn read(&self, body: &mut dyn FnMut(&mut dyn ReadTxn) -> Result<()>) -> Result<()>;

    /// [`Engine::read`], which may miss what other processes have committed within the last few
    /// milliseconds, where that is cheaper.
    fn read_recent(&self, body: &mut dyn FnMut(&mut dyn ReadTxn) -> Result<()>) -> Result<()> {
        self.read(body)
    }

    /// [`Engine::read`] of so much that no run of `body` may be repeated: it runs once, on what is committed.
    fn read_once(&self, body: &mut dyn FnMut(&mut dyn ReadTxn) -> Result<()>) -> Result<()> {
        self.read(body)
    }

    /// Replaces everything by other pairs, which have different keys, in one durable transaction. No other process
    /// commits from before `check` until it is done; nothing is replaced when `check` fails.
    fn replace(&self, check: &mut dyn FnMut() -> Result<()>, pairs: Pairs<'_>) -> Result<()> {
        let _ = (check, pairs);
        Err(Error::Unsupported("replacing all metadata of this engine"))
    }

    /// Runs `body` in a write transaction and commits when it returns `Ok`, else takes everything
    /// back. After a conflict `body` runs again from the start, so it must not keep effects of an
    /// earlier run. Not to be nested.
    fn write(
        &self,
        durability: Durability,
        body: &mut dyn FnMut(&mut dyn WriteTxn) -> Result<()>,
    ) -> Result<()>;

    /// Makes every commit that any process has finished before the call durable.
    fn sync(&self) -> Result<()>;

    /// From its return on, reads of this process see everything that any process was answered before
    /// the call.
    fn barrier(&self) -> Result<()>;

    /// Whether the process of a session is alive, where the engine keeps leases of processes; `None`
    /// where they share a machine, and locks tell.
    fn session_lives(&self, session: u64) -> Result<Option<bool>> {
        let _ = session;
        Ok(None)
    }

    /// Calls `listener` soon after another process has committed records of volumes, where the engine
    /// itself is told.
    fn on_change(&self, listener: ChangeListener) -> Result<Subscription> {
        drop(listener);
        Err(Error::Unsupported("listening to this metadata engine"))
    }
}

/// What the body of a transaction has returned when it last ran.
#[derive(Debug)]
pub(crate) struct Outcome<T>(Option<T>);

impl<T> Default for Outcome<T> {
    fn default() -> Outcome<T> {
        Outcome(None)
    }
}

impl<T> Outcome<T> {
    /// Notes what a run has returned.
    pub(crate) fn keep(&mut self, result: Result<T>) -> Result<()> {
        self.0 = Some(result?);
        Ok(())
    }

    /// The result, after the engine has said that the body ran.
    pub(crate) fn take(self) -> Result<T> {
        let missing = "it returned success without running the transaction";
        self.0.ok_or_else(|| Error::corrupt("metadata engine", missing))
    }
}

#[cfg(test)]
impl dyn Engine + '_ {
    /// [`Engine::read`] with a result.
    pub(crate) fn view<T>(&self, mut body: impl FnMut(&mut dyn ReadTxn) -> Result<T>) -> Result<T> {
        let mut outcome = Outcome::default();
        self.read(&mut |txn| outcome.keep(body(txn)))?;
        outcome.take()
    }

    /// [`Engine::write`] with a result.
    pub(crate) fn transact<T>(
        &self,
        durability: Durability,
        mut body: impl FnMut(&mut dyn WriteTxn) -> Result<T>,
    ) -> Result<T> {
        let mut outcome = Outcome::default();
        self.write(durability, &mut |txn| outcome.keep(body(txn)))?;
        outcome.take()
    }
}
