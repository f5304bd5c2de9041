//! Metadata access for the rest of the crate: transactions, independent of the engine.
//!
//! A [`Metadata`] belongs to one process and is shared by its threads. A transaction's body may run more than
//! once and must not start another transaction.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use super::changes::{ChangeListener, Subscription};
use super::closing::Open;
use super::engine::{Durability, Engine, FileIdentity, Order, Outcome, Pair, Pairs, ReadTxn, WriteTxn};
use super::group::Group;
use super::keys;
use super::sqlite::Sqlite;
use crate::error::Result;

/// Pairs in a full page of [`Metadata::page`].
pub(crate) const PAGE: usize = 1_000;

/// The metadata of an open datafs.
pub(crate) struct Metadata(Kind);

#[derive(Debug)]
enum Kind {
    /// Passes each transaction to the engine unchanged.
    Direct(Arc<dyn Engine>),
    Group(Group),
}

impl fmt::Debug for Metadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Metadata {
    /// Metadata that passes each transaction to the engine unchanged.
    pub(crate) fn direct(engine: Arc<dyn Engine>) -> Metadata {
        Metadata(Kind::Direct(engine))
    }

    /// Metadata in a SQLite file: transactions are acknowledged from memory and committed in groups.
    pub(crate) fn grouped(engine: Sqlite) -> Result<Metadata> {
        #[cfg(test)]
        if let Some(faults) = super::faulty::at(super::faulty::Place::Around) {
            return Ok(Metadata::direct(Arc::new(super::faulty::Faulty::new(Box::new(engine), faults))));
        }
        #[cfg(test)]
        if let Some(counts) = super::counting::here() {
            let inner: Arc<dyn Engine> = Arc::new(engine);
            return Ok(Metadata::direct(Arc::new(super::counting::Counting { inner, counts })));
        }
        Ok(Metadata(Kind::Group(Group::new(Arc::new(engine))?)))
    }

    /// Runs `body` in a read transaction. It reads one consistent state, which includes everything that any
    /// process acknowledged before. `body` may run again from the start.
    pub(crate) fn view<T>(&self, mut body: impl FnMut(&mut dyn ReadTxn) -> Result<T>) -> Result<T> {
        let mut outcome = Outcome::default();
        let mut body = |txn: &mut dyn ReadTxn| outcome.keep(body(txn));
        match &self.0 {
            Kind::Direct(engine) => engine.read(&mut body)?,
            Kind::Group(group) => group.read(&mut body)?,
        }
        outcome.take()
    }

    /// [`Metadata::view`] that may miss what other processes acknowledged within the last few milliseconds,
    /// and never waits for them. It sees everything that this process acknowledged.
    pub(crate) fn view_recent<T>(&self, mut body: impl FnMut(&mut dyn ReadTxn) -> Result<T>) -> Result<T> {
        let mut outcome = Outcome::default();
        let mut body = |txn: &mut dyn ReadTxn| outcome.keep(body(txn));
        match &self.0 {
            Kind::Direct(engine) => engine.read_recent(&mut body)?,
            Kind::Group(group) => group.read_recent(&mut body)?,
        }
        outcome.take()
    }

    /// Runs `body` in a read transaction on committed data, so every object that it refers to is in the
    /// store. It sees everything that any process acknowledged before the call. It runs once, or again only
    /// if a server aborts its transaction.
    pub(crate) fn view_committed<T>(&self, mut body: impl FnMut(&mut dyn ReadTxn) -> Result<T>) -> Result<T> {
        let mut outcome = Outcome::default();
        let mut body = |txn: &mut dyn ReadTxn| outcome.keep(body(txn));
        match &self.0 {
            Kind::Direct(engine) => engine.read_once(&mut body)?,
            Kind::Group(group) => group.read_committed(&mut body)?,
        }
        outcome.take()
    }

    /// A page of the pairs under a prefix, from the start or after a key, in one transaction.
    pub(crate) fn page(&self, prefix: &[u8], after: Option<&[u8]>) -> Result<Vec<Pair>> {
        let start = after.map_or_else(|| prefix.to_vec(), |key| [key, &[0]].concat());
        let end = keys::after_prefix(prefix);
        self.view(|txn| txn.scan(&start, &end, Order::Ascending, PAGE))
    }

    /// All pairs under a prefix, page by page.
    pub(crate) fn each(
        &self,
        prefix: &[u8],
        mut visit: impl FnMut(&[u8], &[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut last: Option<Vec<u8>> = None;
        loop {
            let page = self.page(prefix, last.as_deref())?;
            for (key, value) in &page {
                visit(key, value)?;
            }
            match page.last() {
                Some((key, _)) if page.len() == PAGE => last = Some(key.clone()),
                _ => return Ok(()),
            }
        }
    }

    /// See [`Engine::replace`].
    pub(crate) fn replace(&self, check: &mut dyn FnMut() -> Result<()>, pairs: Pairs<'_>) -> Result<()> {
        match &self.0 {
            Kind::Direct(engine) => engine.replace(check, pairs),
            Kind::Group(group) => group.replace(check, pairs),
        }
    }

    /// Runs `body` in a write transaction. Commits when it returns `Ok`, otherwise rolls back. After a
    /// conflict `body` runs again from the start, so it must not keep effects of an earlier run. Must not be
    /// nested.
    pub(crate) fn transact<T>(
        &self,
        durability: Durability,
        mut body: impl FnMut(&mut dyn WriteTxn) -> Result<T>,
    ) -> Result<T> {
        let mut outcome = Outcome::default();
        let mut body = |txn: &mut dyn WriteTxn| outcome.keep(body(txn));
        match &self.0 {
            Kind::Direct(engine) => engine.write(durability, &mut body)?,
            Kind::Group(group) => group.write(durability, &mut body)?,
        }
        outcome.take()
    }

    /// [`Metadata::transact`] for a transaction that frees space: on a full disk it takes the reserved space.
    pub(crate) fn transact_making_room<T>(
        &self,
        durability: Durability,
        mut body: impl FnMut(&mut dyn WriteTxn) -> Result<T>,
    ) -> Result<T> {
        self.transact(durability, |txn| {
            txn.makes_room();
            body(txn)
        })
    }

    /// Makes every commit durable that any process finished before the call.
    pub(crate) fn sync(&self) -> Result<()> {
        match &self.0 {
            Kind::Direct(engine) => engine.sync(),
            Kind::Group(group) => group.sync(),
        }
    }

    /// Waits until everything that this process acknowledged before the call is committed. It then survives
    /// the end of the process, but not yet a power failure.
    pub(crate) fn settle(&self) -> Result<()> {
        match &self.0 {
            // The engine commits before it acknowledges.
            Kind::Direct(_) => Ok(()),
            Kind::Group(group) => group.settle(),
        }
    }

    /// A mark that is part of the open metadata file. A child never uses connections to a server that it inherits.
    pub(crate) fn open_mark(&self) -> Open {
        match &self.0 {
            Kind::Direct(_) => Open::default(),
            Kind::Group(group) => group.open_mark(),
        }
    }

    /// Restores the space reserved for transactions that free space, where the metadata is on a local disk.
    pub(crate) fn restore_reserve(&self) {
        if let Kind::Group(group) = &self.0 {
            group.restore_reserve();
        }
    }

    /// Fails while the reserved space is released. For operations that take space outside of the metadata.
    pub(crate) fn check_reserve(&self) -> Result<()> {
        match &self.0 {
            Kind::Direct(_) => Ok(()),
            Kind::Group(group) => group.reserve().check(),
        }
    }

    /// How often [`Metadata::sync`] was called.
    #[cfg(test)]
    pub(crate) fn syncs(&self) -> u64 {
        match &self.0 {
            Kind::Direct(_) => 0,
            Kind::Group(group) => group.syncs(),
        }
    }

    /// After it returns, reads of this process, also by [`Metadata::view_recent`], see everything that any
    /// process acknowledged before the call.
    pub(crate) fn barrier(&self) -> Result<()> {
        match &self.0 {
            Kind::Direct(engine) => engine.barrier(),
            Kind::Group(group) => group.barrier(),
        }
    }

    /// Whether leases show which processes are alive. Otherwise file locks do, which are certain. Takes no request.
    pub(crate) fn has_leases(&self) -> Result<bool> {
        match &self.0 {
            Kind::Direct(engine) => Ok(engine.sessions_alive(&[])?.is_some()),
            Kind::Group(_) => Ok(false),
        }
    }

    /// Ends a lapsed lease, see [`Engine::end_lapsed`].
    pub(crate) fn end_lapsed(&self, session: u64) -> Result<Option<bool>> {
        match &self.0 {
            Kind::Direct(engine) => engine.end_lapsed(session),
            Kind::Group(_) => Ok(None),
        }
    }

    /// The living ones among sessions, see [`Engine::sessions_alive`].
    pub(crate) fn sessions_alive(&self, sessions: &[u64]) -> Result<Option<BTreeSet<u64>>> {
        match &self.0 {
            Kind::Direct(engine) => engine.sessions_alive(sessions),
            Kind::Group(_) => Ok(None),
        }
    }

    /// See [`Engine::file_identity`].
    pub(crate) fn file_identity(&self) -> Result<FileIdentity> {
        match &self.0 {
            Kind::Direct(engine) => engine.file_identity(),
            Kind::Group(group) => group.file_identity(),
        }
    }

    /// Calls `listener` soon after another process has committed something, until the subscription is
    /// dropped. The listener runs on a separate thread. It may read, but must not wait for writers.
    pub(crate) fn on_change(&self, listener: ChangeListener) -> Result<Subscription> {
        match &self.0 {
            Kind::Direct(engine) => engine.on_change(listener),
            Kind::Group(group) => group.on_change(listener),
        }
    }
}
