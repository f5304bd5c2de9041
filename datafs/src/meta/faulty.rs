//! Test support: faults of engines, drawn from a seed, and an engine with faults.
//!
//! Faults occur in three places. [`Faulty`] wraps an engine and acts as an unreliable client of it. It
//! repeats aborted transactions and looks up the outcome of commits whose answers were lost, so its callers
//! must tolerate bodies that run again. Group commit gets faults between itself and the file. The PostgreSQL
//! engine gets them on its connections, below its error handling. An engine takes the faults of the thread
//! that opens it, see [`with`].
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::changes::{ChangeListener, Subscription};
use super::engine::{Durability, Engine, ReadTxn, WriteTxn};
use crate::error::{Error, Result};

/// Attempts of [`Faulty`]: more than chance ever makes it need.
const ATTEMPTS_MAX: u32 = 200;

/// A fault of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Another transaction conflicted with it, and it was aborted.
    Conflict,
    /// It timed out before it began.
    Timeout,
    /// The connection broke before it took effect.
    LostBefore,
    /// The connection broke after it took effect.
    LostAfter,
    /// It was sent, and its outcome is unknown.
    Unknown,
}

impl Fault {
    /// The faults after which the outcome can be found out.
    pub(crate) const CLEAR: [Fault; 4] =
        [Fault::Conflict, Fault::Timeout, Fault::LostBefore, Fault::LostAfter];
    pub(crate) const ALL: [Fault; 5] =
        [Fault::Conflict, Fault::Timeout, Fault::LostBefore, Fault::LostAfter, Fault::Unknown];
}

/// Source of random faults.
#[derive(Debug)]
pub(crate) struct Faults {
    random: Mutex<StdRng>,
    kinds: Vec<Fault>,
    /// One call in this many fails.
    one_in: u32,
    place: Place,
    away: AtomicBool,
    full: AtomicBool,
    drawn: AtomicU64,
}

/// Where an engine meets its faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// A [`Faulty`] wraps the engine, without group commit.
    Around,
    /// In the commit of a group, or on the connections to a server.
    Inside,
}

thread_local! {
    static FAULTS: RefCell<Option<Arc<Faults>>> = const { RefCell::new(None) };
}

impl Faults {
    pub(crate) fn new(seed: u64, one_in: u32, kinds: &[Fault], place: Place) -> Arc<Faults> {
        Arc::new(Faults {
            random: Mutex::new(StdRng::seed_from_u64(seed)),
            kinds: kinds.to_vec(),
            one_in,
            place,
            away: AtomicBool::new(false),
            full: AtomicBool::new(false),
            drawn: AtomicU64::new(0),
        })
    }

    /// The fault of the next call, if any.
    pub(crate) fn draw(&self) -> Option<Fault> {
        if self.away.load(Ordering::Acquire) {
            return Some(Fault::LostBefore);
        }
        let mut random = self.random.lock();
        let fault = random
            .random_ratio(1, self.one_in)
            .then(|| self.kinds[random.random_range(0..self.kinds.len())])?;
        self.drawn.fetch_add(1, Ordering::Relaxed);
        if fault == Fault::Unknown && self.kinds.len() == 1 {
            // No call reaches the engine to find out the outcome.
            self.away.store(true, Ordering::Release);
        }
        Some(fault)
    }

    /// Sets whether a quota is used up.
    pub(crate) fn set_full(&self, full: bool) {
        self.full.store(full, Ordering::Release);
    }

    pub(crate) fn check_space(&self, place: &str) -> Result<()> {
        match self.full.load(Ordering::Acquire) {
            true => Err(Error::NoSpace { place: place.to_owned(), quota: true }),
            false => Ok(()),
        }
    }

    /// Number of faults drawn.
    pub(crate) fn drawn(&self) -> u64 {
        self.drawn.load(Ordering::Relaxed)
    }

    /// Sets whether every call fails because the engine is unreachable.
    pub(crate) fn set_away(&self, away: bool) {
        self.away.store(away, Ordering::Release);
    }
}

/// Injects faults into the engines that this thread opens while `run` runs.
pub(crate) fn with<T>(faults: &Arc<Faults>, run: impl FnOnce() -> T) -> T {
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            FAULTS.set(None);
        }
    }
    FAULTS.set(Some(Arc::clone(faults)));
    let _end = End;
    run()
}

/// The faults of this thread, if they are for `place`.
pub(crate) fn at(place: Place) -> Option<Arc<Faults>> {
    FAULTS.with_borrow(|faults| faults.clone().filter(|faults| faults.place == place))
}

fn busy() -> Error {
    Error::Busy { place: "a faulty engine".into(), waited_ms: 1 }
}

fn lost() -> Error {
    let source = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
    Error::Metadata { place: "a faulty engine".into(), source: Box::new(source) }
}

/// One attempt at a transaction, with a fault. If the connection is lost, the caller cannot tell whether the
/// transaction took place.
pub(crate) fn attempt(
    engine: &dyn Engine,
    fault: Option<Fault>,
    durability: Durability,
    body: &mut dyn FnMut(&mut dyn WriteTxn) -> Result<()>,
) -> Result<()> {
    let mut take_back = || {
        // This write fails on purpose; the caller gets another error.
        let _ = engine.write(durability, &mut |txn| {
            body(txn)?;
            Err(busy())
        });
    };
    match fault {
        None => engine.write(durability, body),
        Some(Fault::Timeout) => Err(busy()),
        Some(Fault::Conflict) => {
            take_back();
            Err(busy())
        }
        Some(Fault::LostBefore) => {
            take_back();
            Err(lost())
        }
        Some(Fault::LostAfter | Fault::Unknown) => {
            engine.write(durability, body)?;
            Err(lost())
        }
    }
}

/// An engine that is reached through an unreliable client.
#[derive(Debug)]
pub(crate) struct Faulty {
    inner: Box<dyn Engine>,
    faults: Arc<Faults>,
    /// With the number of a commit, the key of the record that shows whether the commit took place.
    client: u64,
    commits: AtomicU64,
    /// An outcome is unknown for good, so every call fails.
    failed: AtomicBool,
}

impl Faulty {
    pub(crate) fn new(inner: Box<dyn Engine>, faults: Arc<Faults>) -> Faulty {
        let client = crate::random::random_id().unwrap();
        Faulty { inner, faults, client, commits: AtomicU64::new(0), failed: AtomicBool::new(false) }
    }

    fn check(&self) -> Result<()> {
        if self.failed.load(Ordering::Acquire) {
            let (place, cause) = ("a faulty engine".into(), "its outcome is unknown".into());
            return Err(Error::Failed { place, cause });
        }
        Ok(())
    }

    /// Makes a read call, which may be repeated.
    fn repeat(&self, mut call: impl FnMut() -> Result<()>) -> Result<()> {
        for _ in 0..ATTEMPTS_MAX {
            self.check()?;
            match self.faults.draw() {
                None => return call(),
                Some(Fault::Timeout | Fault::Conflict | Fault::LostBefore) => {}
                Some(Fault::LostAfter | Fault::Unknown) => call()?,
            }
        }
        Err(busy())
    }
}

impl Engine for Faulty {
    fn read(&self, body: &mut dyn FnMut(&mut dyn ReadTxn) -> Result<()>) -> Result<()> {
        self.repeat(|| self.inner.read(body))
    }

    fn read_recent(&self, body: &mut dyn FnMut(&mut dyn ReadTxn) -> Result<()>) -> Result<()> {
        self.repeat(|| self.inner.read_recent(body))
    }

    fn write(
        &self,
        durability: Durability,
        body: &mut dyn FnMut(&mut dyn WriteTxn) -> Result<()>,
    ) -> Result<()> {
        for _ in 0..ATTEMPTS_MAX {
            self.check()?;
            let number = self.commits.fetch_add(1, Ordering::Relaxed);
            let record = [b"mfaulty".as_slice(), &self.client.to_be_bytes(), &number.to_be_bytes()].concat();
            let fault = self.faults.draw();
            let result = attempt(self.inner.as_ref(), fault, durability, &mut |txn| {
                body(txn)?;
                if fault.is_some() { txn.put(&record, b"") } else { Ok(()) }
            });
            match (fault, result) {
                (Some(Fault::Unknown), Err(Error::Metadata { .. })) => {
                    self.failed.store(true, Ordering::Release);
                    return self.check();
                }
                (Some(Fault::Timeout | Fault::Conflict), Err(Error::Busy { .. })) => {}
                (Some(_), Err(Error::Metadata { .. })) => {
                    let mut landed = false;
                    self.inner.read(&mut |txn| {
                        landed = txn.get(&record)?.is_some();
                        Ok(())
                    })?;
                    if landed {
                        return Ok(());
                    }
                }
                (_, result) => return result,
            }
        }
        Err(busy())
    }

    fn sync(&self) -> Result<()> {
        self.repeat(|| self.inner.sync())
    }

    fn barrier(&self) -> Result<()> {
        self.repeat(|| self.inner.barrier())
    }

    fn end_lapsed(&self, session: u64) -> Result<Option<bool>> {
        self.inner.end_lapsed(session)
    }

    fn sessions_alive(&self, sessions: &[u64]) -> Result<Option<BTreeSet<u64>>> {
        self.inner.sessions_alive(sessions)
    }

    fn on_change(&self, listener: ChangeListener) -> Result<Subscription> {
        self.inner.on_change(listener)
    }
}
