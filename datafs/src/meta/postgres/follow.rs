//! Follower of other clients' commits: a thread that gets notifications and asks the server for the changes,
//! and a thread that passes them to listeners. The first one also renews this client's row, flushes the log
//! and deletes old commits.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tokio_postgres::{AsyncMessage, Client};

use super::Shared;
use super::fault::Fault;
use super::pool::{GRACE, block_on};
use super::schema;
use crate::error::{Error, Result};
use crate::meta::changes::{ChangeListener, Changed, Subscription};

/// Longest time between requests to the server.
const ASK_EVERY: Duration = Duration::from_secs(3);
/// Most records that wait for slow listeners; these are told that anything may have changed beyond it.
const UNTOLD_MAX: usize = 16_384;
/// Interval of flushes when no caller flushes the log, so that few commits are kept for replay.
const FLUSH_EVERY: Duration = Duration::from_secs(1);
/// Interval at which old commits are deleted.
const TRIM_EVERY: Duration = Duration::from_secs(30);
/// Commits are kept for this long beyond the longest call; longer than an image may lag.
const KEEP: Duration = Duration::from_secs(60);

/// The threads of the follower and the signal that they share.
pub(super) struct Follower {
    signal: Arc<Signal>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Signal {
    state: Mutex<Wanted>,
    changed: Condvar,
    listeners: Mutex<Vec<(ChangeListener, Arc<AtomicBool>)>>,
}

#[derive(Default)]
struct Wanted {
    notified: bool,
    news: Changed,
    /// A connection for notifications has ended.
    deaf: bool,
    stopped: bool,
}

impl Signal {
    fn raise(&self, set: impl FnOnce(&mut Wanted)) {
        set(&mut self.state.lock());
        self.changed.notify_all();
    }
}

impl Follower {
    pub(super) fn start(shared: &Arc<Shared>) -> Result<Follower> {
        let signal = Arc::new(Signal::default());
        // The registration of this process was just before.
        let renewed = Instant::now();
        let listening =
            listen(shared, &signal, shared.pool.deadline() + GRACE).map_err(|fault| shared.error(fault))?;
        let work = Follow {
            lease: shared.lease,
            shared: Arc::downgrade(shared),
            signal: Arc::clone(&signal),
            listening: Some(listening),
            horizons: VecDeque::new(),
            renewed,
            flushed: Instant::now(),
            trimmed: Instant::now(),
        };
        let thread = std::thread::Builder::new()
            .name("datafs-follow".into())
            .spawn(move || work.run())
            .map_err(|e| Error::io("start the thread that follows", shared.place(), e))?;
        // Listeners may be slow; the lease must be renewed meanwhile.
        let told = Arc::clone(&signal);
        let teller = std::thread::Builder::new()
            .name("datafs-tell".into())
            .spawn(move || tell(&told))
            .map_err(|e| Error::io("start the thread that tells of changes", shared.place(), e))?;
        Ok(Follower { signal, threads: vec![thread, teller] })
    }

    pub(super) fn subscribe(&self, listener: ChangeListener) -> Subscription {
        let (subscription, stopped) = Subscription::new();
        self.signal.listeners.lock().push((listener, stopped));
        subscription
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.signal.raise(|wanted| wanted.stopped = true);
        for thread in self.threads.drain(..) {
            // A listener may hold the last handle.
            if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
                tracing::warn!("a thread that follows metadata commits has panicked");
            }
        }
    }
}

/// Reports changes to the listeners until the engine is dropped.
fn tell(signal: &Signal) {
    loop {
        let changed = {
            let mut wanted = signal.state.lock();
            loop {
                if wanted.stopped {
                    return;
                }
                if !wanted.news.is_empty() {
                    break std::mem::take(&mut wanted.news);
                }
                signal.changed.wait(&mut wanted);
            }
        };
        let mut listeners = signal.listeners.lock();
        listeners.retain(|(_, stopped)| !stopped.load(Ordering::Acquire));
        listeners.iter_mut().for_each(|(listener, _)| listener(&changed));
    }
}

/// Opens a connection that raises the signal for every commit of another client.
fn listen(shared: &Shared, signal: &Arc<Signal>, deadline: Instant) -> std::result::Result<Listening, Fault> {
    let own = shared.client.to_string();
    let raised = Arc::clone(signal);
    let has_ended = Arc::new(AtomicBool::new(false));
    let ended = Arc::clone(&has_ended);
    let client = shared.pool.open(deadline, |mut connection| async move {
        loop {
            match std::future::poll_fn(|context| connection.poll_message(context)).await {
                Some(Ok(AsyncMessage::Notification(note))) if note.payload() != own => {
                    raised.raise(|wanted| wanted.notified = true);
                }
                Some(Ok(_)) => {}
                _ => {
                    ended.store(true, Ordering::Release);
                    return raised.raise(|wanted| wanted.deaf = true);
                }
            }
        }
    })?;
    let channel = schema::channel(shared.pool.target().schema());
    block_on(client.batch_execute(&format!("LISTEN {channel}")), deadline)?;
    Ok(Listening { _client: client, has_ended })
}

/// A connection for notifications.
struct Listening {
    /// The connection lasts as long as its client.
    _client: Client,
    /// Of this connection: the end of an earlier one may be noticed after this one was opened.
    has_ended: Arc<AtomicBool>,
}

struct Follow {
    lease: Duration,
    shared: Weak<Shared>,
    signal: Arc<Signal>,
    listening: Option<Listening>,
    /// Horizons of the last minutes, with their times.
    horizons: VecDeque<(Instant, i64)>,
    renewed: Instant,
    flushed: Instant,
    trimmed: Instant,
}

impl Follow {
    fn run(mut self) {
        let mut failing = false;
        loop {
            {
                let mut wanted = self.signal.state.lock();
                if !wanted.notified && !wanted.stopped && !wanted.deaf {
                    self.signal.changed.wait_for(&mut wanted, ASK_EVERY.min(self.lease / 4));
                }
                if wanted.stopped {
                    drop(wanted);
                    return self.leave();
                }
                wanted.notified = false;
                wanted.deaf = false;
                let has_ended = |listening: &Listening| listening.has_ended.load(Ordering::Acquire);
                if self.listening.as_ref().is_some_and(has_ended) {
                    self.listening = None;
                }
            }
            let Some(shared) = self.shared.upgrade() else { return };
            match self.step(&shared) {
                Ok(()) => failing = false,
                Err(fault) => {
                    if !failing {
                        tracing::warn!(
                            place = shared.place(),
                            ?fault,
                            "following metadata commits; it is tried again"
                        );
                    }
                    failing = true;
                    let mut wanted = self.signal.state.lock();
                    if !wanted.stopped {
                        self.signal.changed.wait_for(&mut wanted, Duration::from_millis(200));
                    }
                }
            }
            let news = shared.state.lock().rows.take_news();
            drop(shared);
            if !news.is_empty() {
                self.signal.raise(|wanted| {
                    wanted.news.anything |= news.anything;
                    wanted.news.add(news.records, UNTOLD_MAX);
                });
            }
        }
    }

    fn step(&mut self, shared: &Arc<Shared>) -> std::result::Result<(), Fault> {
        let soon = Instant::now() + shared.pool.wait().min(ASK_EVERY);
        let name = shared.pool.target().schema();
        // The lease comes first: it must not lapse while no connection for notifications can be opened.
        if self.renewed.elapsed() > shared.lease / 3 {
            let text = schema::renew(name, shared.client);
            let rows =
                shared.pool.repeat(soon, |link, until| block_on(link.client.query(&text, &[]), until))?;
            if rows.is_empty() {
                shared.register()?;
            }
            self.renewed = Instant::now();
        }
        // Without notifications, this process still asks for the commits of others.
        let mut listened = Ok(());
        if self.listening.is_none() {
            let until = Instant::now() + (shared.pool.wait() + GRACE).min(shared.lease / 4);
            listened = listen(shared, &self.signal, until).map(|listening| self.listening = Some(listening));
        }
        let soon = Instant::now() + shared.pool.wait().min(ASK_EVERY);
        shared.poll(soon)?;
        if self.flushed.elapsed() > FLUSH_EVERY {
            self.flushed = Instant::now();
            if !shared.state.lock().kept.is_empty() {
                shared.flush_by(soon)?;
            }
        }
        if self.trimmed.elapsed() > TRIM_EVERY {
            self.trimmed = Instant::now();
            self.horizons.push_back((Instant::now(), shared.state.lock().rows.horizon()));
            let keep = shared.pool.wait() + KEEP;
            let mut old = None;
            while self.horizons.front().is_some_and(|(at, _)| at.elapsed() > keep) {
                old = self.horizons.pop_front();
            }
            if let Some((_, horizon)) = old {
                let text = schema::trim(name, horizon);
                shared.pool.repeat(soon, |link, until| block_on(link.client.batch_execute(&text), until))?;
            }
        }
        shared.contact.lock().made(Instant::now(), shared.lease);
        listened
    }

    /// Unregisters this process, within a second.
    fn leave(&self) {
        let Some(shared) = self.shared.upgrade() else { return };
        let text = schema::unregister(shared.pool.target().schema(), shared.client);
        let soon = Instant::now() + Duration::from_secs(1).min(shared.pool.wait());
        let gone = shared.pool.repeat(soon, |link, until| block_on(link.client.batch_execute(&text), until));
        if let Err(fault) = gone {
            tracing::debug!(?fault, "signing off from the metadata server");
        }
    }
}
