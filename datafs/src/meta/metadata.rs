//! What the rest of the crate calls: transactions on the metadata, whatever engine is behind them.
//!
//! A [`Metadata`] belongs to one process and is shared by its threads. Bodies of transactions may run
//! more than once and must not nest.

use std::fmt;
use std::sync::Arc;

use super::changes::{ChangeListener, Subscription};
use super::engine::{Durability, Engine, Outcome, Pairs, ReadTxn, WriteTxn};
use super::group::Group;
use super::sqlite::Sqlite;
use crate::error::Result;

/// The metadata of an open datafs.
pub(crate) struct Metadata(Kind);

#[derive(Debug)]
enum Kind {
    /// Each transaction goes to the engine as it is.
    Direct(Arc<dyn Engine>),
    Group(Group),
}

impl fmt::Debug for Metadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Metadata {
    /// Metadata that hands each transaction to the engine as it is.
    pub(crate) fn direct(engine: Arc<dyn Engine>) -> Metadata {
        Metadata(Kind::Direct(engine))
    }

    /// Metadata in a SQLite file: transactions are answered from memory and committed in groups.
    pub(crate) fn grouped(engine: Sqlite) -> Result<Metadata> {
        #[cfg(test)]
        if let Some(faults) = super::faulty::at(super::faulty::Place::Around) {
            return Ok(Metadata::direct(Arc::new(super::faulty::Faulty::new(Box::new(engine), faults))));
        }
        Ok(Metadata(Kind::Group(Group::new(Arc::new(engine))?)))
    }

    /// Runs `body` in a read transaction: everything it reads is of one moment, and it sees whatever
    /// any process was answered before. May run `body` again from the start.
    pub(crate) fn view<T>(&self, mut body: impl FnMut(&mut dyn ReadTxn) -> Result<T>) -> Result<T> {
        let mut outcome = Outcome::default();
        let mut body = |txn: &mut dyn ReadTxn| outcome.keep(body(txn));
        match &self.0 {
            Kind::Direct(engine) => engine.read(&mut body)?,
            Kind::Group(group) => group.read(&mut body)?,
        }
        outcome.take()
    }

    /// [`Metadata::view`], which may miss what other processes were answered within the last few
    /// milliseconds, and never waits for them. What this process was answered it sees.
    pub(crate) fn view_recent<T>(&self, mut body: impl FnMut(&mut dyn ReadTxn) -> Result<T>) -> Result<T> {
        let mut outcome = Outcome::default();
        let mut body = |txn: &mut dyn ReadTxn| outcome.keep(body(txn));
        match &self.0 {
            Kind::Direct(engine) => engine.read_recent(&mut body)?,
            Kind::Group(group) => group.read_recent(&mut body)?,
        }
        outcome.take()
    }

    /// Runs `body` once, in a read transaction on what is committed: everything that it points at is in the store.
    /// What any process was answered before the call is part of it.
    pub(crate) fn view_committed<T>(&self, mut body: impl FnMut(&mut dyn ReadTxn) -> Result<T>) -> Result<T> {
        let mut outcome = Outcome::default();
        let mut body = |txn: &mut dyn ReadTxn| outcome.keep(body(txn));
        match &self.0 {
            Kind::Direct(engine) => engine.read_once(&mut body)?,
            Kind::Group(group) => group.read_committed(&mut body)?,
        }
        outcome.take()
    }

    /// See [`Engine::replace`].
    pub(crate) fn replace(&self, check: &mut dyn FnMut() -> Result<()>, pairs: Pairs<'_>) -> Result<()> {
        match &self.0 {
            Kind::Direct(engine) => engine.replace(check, pairs),
            Kind::Group(group) => group.replace(check, pairs),
        }
    }

    /// Runs `body` in a write transaction and commits when it returns `Ok`, else takes everything
    /// back. After a conflict `body` runs again from the start, so it must not keep effects of an
    /// earlier run. Not to be nested.
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

    /// [`Metadata::transact`] of what makes room: on a full disk it takes the space that is set aside.
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

    /// Makes every commit that any process has finished before the call durable.
    pub(crate) fn sync(&self) -> Result<()> {
        match &self.0 {
            Kind::Direct(engine) => engine.sync(),
            Kind::Group(group) => group.sync(),
        }
    }

    /// Waits until everything that this process was answered before the call is committed; that is not
    /// durable yet, but survives the end of the process.
    pub(crate) fn settle(&self) -> Result<()> {
        match &self.0 {
            // Commits before it answers.
            Kind::Direct(_) => Ok(()),
            Kind::Group(group) => group.settle(),
        }
    }

    /// Sees that space for changes that make room is set aside, where the metadata is on a disk of this machine.
    pub(crate) fn restore_reserve(&self) {
        if let Kind::Group(group) = &self.0 {
            group.restore_reserve();
        }
    }

    /// Sets aside again what was given up for the opening.
    pub(crate) fn take_back_reserve(&self) {
        if let Kind::Group(group) = &self.0 {
            group.reserve().take_back();
        }
    }

    /// Fails while that space is given up. For what takes space and is not in the metadata.
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

    /// From its return on, reads of this process see everything that any process was answered before
    /// the call; so do [`Metadata::view_recent`] ones.
    pub(crate) fn barrier(&self) -> Result<()> {
        match &self.0 {
            Kind::Direct(engine) => engine.barrier(),
            Kind::Group(group) => group.barrier(),
        }
    }

    /// Whether the process of a session is alive, see [`Engine::session_lives`].
    pub(crate) fn session_lives(&self, session: u64) -> Result<Option<bool>> {
        match &self.0 {
            Kind::Direct(engine) => engine.session_lives(session),
            Kind::Group(_) => Ok(None),
        }
    }

    /// Calls `listener` soon after another process has committed something, until the subscription is
    /// dropped. It runs on a thread of its own and may read, but must not wait for writers.
    pub(crate) fn on_change(&self, listener: ChangeListener) -> Result<Subscription> {
        match &self.0 {
            Kind::Direct(engine) => engine.on_change(listener),
            Kind::Group(group) => group.on_change(listener),
        }
    }
}
