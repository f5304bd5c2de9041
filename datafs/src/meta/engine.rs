//! Metadata engine interface: an ordered map of bytes to bytes with serializable transactions.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::changes::{ChangeListener, Subscription};
use crate::error::{Error, Result};

/// A key and its value.
pub(crate) type Pair = (Vec<u8>, Vec<u8>);
/// A stream of pairs from outside the engine.
pub(crate) type Pairs<'a> = &'a mut dyn Iterator<Item = Result<Pair>>;

/// Guarantee of a commit once it has returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Durability {
    /// It is visible everywhere. Within a few milliseconds it is also safe from the death of its process. A
    /// power failure may undo it, with every later commit.
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

    /// Whether [`ReadTxn::prefetch`] has an effect, as it has for an engine on a server.
    fn prefetches(&self) -> bool {
        false
    }

    /// Announces the keys that the caller reads next, so that a remote engine fetches them in one round trip.
    fn prefetch(&mut self, keys: &[Vec<u8>]) -> Result<()> {
        let _ = keys;
        Ok(())
    }
}

/// Something outside the metadata that a commit waits for, typically the bytes of an object.
pub(crate) trait Prerequisite: fmt::Debug + Send + Sync {
    /// Makes everything durable that existed when the transaction required it; more is allowed. Runs outside
    /// of transactions, on any thread, once for all transactions of one commit. It runs again when the commit
    /// is retried after an error.
    fn make_durable(&self) -> Result<()>;

    /// How long a commit that no caller waits for may be delayed, so that more transactions share its cost.
    fn linger(&self) -> Duration {
        Duration::ZERO
    }
}

/// Reads and writes of one transaction.
pub(crate) trait WriteTxn: ReadTxn {
    /// Sets a key.
    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()>;

    /// Removes a key. Removing a missing key succeeds.
    fn delete(&mut self, key: &[u8]) -> Result<()>;

    /// Makes `prerequisite` durable before this transaction is committed, so that pairs put here may point at
    /// its data. Each prerequisite (by address) is made durable once per commit.
    fn require(&mut self, prerequisite: Arc<dyn Prerequisite>) -> Result<()> {
        prerequisite.make_durable()
    }

    /// Hint: this transaction creates a directory (volume and inode number), so no reader has seen names in
    /// it.
    fn begins(&mut self, _directory: (u64, u64)) {}

    /// Hint: the transaction frees space, so its commit may take the reserved space.
    fn makes_room(&mut self) {}

    /// The transaction as a reader.
    fn as_read(&mut self) -> &mut dyn ReadTxn;
}

/// A file, whatever its path.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct FileIdentity {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    /// The time of its creation since 1970: a later file can have the same inode number. 0 where the file system keeps none.
    pub(crate) created: Duration,
}

/// A metadata engine. The threads of a process share the engine; processes share its file or server.
pub(crate) trait Engine: fmt::Debug + Send + Sync {
    /// Runs `body` in a read transaction that sees everything that was committed before the call.
    fn read(&self, body: &mut dyn FnMut(&mut dyn ReadTxn) -> Result<()>) -> Result<()>;

    /// [`Engine::read`] that may miss commits of other processes from the last few milliseconds, where that
    /// is cheaper.
    fn read_recent(&self, body: &mut dyn FnMut(&mut dyn ReadTxn) -> Result<()>) -> Result<()> {
        self.read(body)
    }

    /// [`Engine::read`] for a body too long to be repeated. It reads committed data and runs once, or again
    /// only if a server aborts its transaction.
    fn read_once(&self, body: &mut dyn FnMut(&mut dyn ReadTxn) -> Result<()>) -> Result<()> {
        self.read(body)
    }

    /// Replaces all pairs by `pairs`, whose keys are distinct, in one durable transaction. No other process
    /// commits from before `check` until the end. Nothing is replaced when `check` fails.
    fn replace(&self, check: &mut dyn FnMut() -> Result<()>, pairs: Pairs<'_>) -> Result<()> {
        let _ = (check, pairs);
        Err(Error::Unsupported("replacing all metadata of this engine"))
    }

    /// Runs `body` in a write transaction. Commits when it returns `Ok`, otherwise rolls back. After a
    /// conflict `body` runs again from the start, so it must not keep effects of an earlier run. Must not be
    /// nested.
    fn write(
        &self,
        durability: Durability,
        body: &mut dyn FnMut(&mut dyn WriteTxn) -> Result<()>,
    ) -> Result<()>;

    /// Makes every commit durable that any process finished before the call.
    fn sync(&self) -> Result<()>;

    /// After it returns, reads of this process see everything that any process acknowledged before the call.
    fn barrier(&self) -> Result<()>;

    /// Ends the lease of a session's process if that has lapsed, in one step with the look at it: a process that
    /// renews its lease before keeps it. Returns whether the process has no lease now. `None` where the processes share a
    /// machine and file locks show which are alive.
    fn end_lapsed(&self, session: u64) -> Result<Option<bool>> {
        let _ = session;
        Ok(None)
    }

    /// Those of the sessions whose processes are alive, with one request; otherwise as
    /// [`Engine::end_lapsed`].
    fn sessions_alive(&self, sessions: &[u64]) -> Result<Option<BTreeSet<u64>>> {
        let _ = sessions;
        Ok(None)
    }

    /// What distinguishes the file of the metadata from its copies; all 0 where a server has the metadata.
    fn file_identity(&self) -> Result<FileIdentity> {
        Ok(FileIdentity::default())
    }

    /// Calls `listener` soon after another process has committed records of volumes, where the engine gets
    /// notifications.
    fn on_change(&self, listener: ChangeListener) -> Result<Subscription> {
        drop(listener);
        Err(Error::Unsupported("listening to this metadata engine"))
    }
}

/// The result of a transaction's body from its last run.
#[derive(Debug)]
pub(crate) struct Outcome<T>(Option<T>);

impl<T> Default for Outcome<T> {
    fn default() -> Outcome<T> {
        Outcome(None)
    }
}

impl<T> Outcome<T> {
    /// Keeps the result of a run.
    pub(crate) fn keep(&mut self, result: Result<T>) -> Result<()> {
        self.0 = Some(result?);
        Ok(())
    }

    /// The result, after the engine has reported success.
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
