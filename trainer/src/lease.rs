//! The lease of a job: it elects one coordinator at a time, through the metadata of the output volume.
//!
//! The application key `trainer/<job>/lease` holds a [`Record`]: holder, fencing number, address for workers. The
//! holder renews it several times per lease. Taking the lease also sets the key `trainer/<job>/owner`, in the same
//! transaction, to a value of the new number ([`owner_value`]). Checkpoints, the run's head and the publication of a
//! model expect that value (`checkpoint.rs`, `publish.rs`), so a deposed coordinator changes nothing.
//!
//! No clock of another machine is read, and no wall clock: a candidate takes the lease when the record has not
//! changed for its time since the candidate first saw it. The order of commits in the metadata decides everything
//! else. A holder with standbys counts its time from before the renewal, so it stops before a candidate can take
//! over. [`boot_time`] also counts the time that a machine is suspended.
//!
//! * [`Candidate`] and [`Holding`] are the protocol, one call per transaction and with the time as a parameter.
//! * [`Lease`] renews a [`Holding`] in a thread and tells when it is lost.
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use millrace_datafs::{Publish, View};
use millrace_leaf::lease::Watch;
pub(crate) use millrace_leaf::lease::boot_time;
use millrace_leaf::random;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use crate::checkpoint::Checkpoints;
use crate::error::{Error, Result};
use crate::join::host_name;
use crate::output;

#[cfg(test)]
mod tests;

const FORMAT_VERSION: u32 = 1;
/// Bounds of `lease_ms`. A record beyond them is read as if it were within.
pub(crate) const LEASE_MS_MIN: u64 = 500;
pub(crate) const LEASE_MS_MAX: u64 = 600_000;
/// Renewals within the time of a lease.
const RENEWALS: u32 = 4;
/// Attempts at a take-over that conflicts with another writer.
const ATTEMPTS: usize = 8;
/// Longest record that is parsed.
const RECORD_BYTES_MAX: usize = 64 << 10;
/// Longest error message in a record.
const FAILURE_CHARS_MAX: usize = 4_000;
/// Interval at which a holder compares the time with the end of its lease.
const CHECK: Duration = Duration::from_millis(50);

/// The value of a job's lease key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Record {
    format_version: u32,
    /// Grows by one with each holder.
    pub(crate) fence: u64,
    /// A random id of the holder.
    pub(crate) holder: String,
    /// The run that it coordinates.
    pub(crate) run: String,
    pub(crate) host: String,
    pub(crate) pid: u32,
    /// Where workers of other machines join, once it listens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) address: Option<String>,
    lease_ms: u64,
    renewals: u64,
    pub(crate) standing: Standing,
    /// The error of a run that failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    failure: Option<Failure>,
}

/// The error with which a run failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Failure {
    pub(crate) message: String,
    pub(crate) exit_code: u8,
}

/// How a lease stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Standing {
    Held,
    /// The holder has ended in order, and the run is unfinished.
    Released,
    /// The holder has ended in order, and the run is finished and published.
    Finished,
    /// The run met an error that it would meet again, and its workers have ended.
    Failed,
}

/// How a holder gives its lease up.
#[derive(Debug)]
pub(crate) enum Release {
    /// Another process may go on with the run.
    Unfinished,
    Finished,
    Failed(Failure),
}

impl Record {
    /// How long the record has to stay the same until the lease is free.
    pub(crate) fn lease(&self) -> Duration {
        Duration::from_millis(self.lease_ms.clamp(LEASE_MS_MIN, LEASE_MS_MAX))
    }

    /// The error of a run that failed.
    pub(crate) fn failure(&self, job: &str) -> Error {
        let (message, exit_code) = match &self.failure {
            Some(failure) => (failure.message.as_str(), failure.exit_code),
            None => ("the cause is in its log", 1),
        };
        // The record may hold anything.
        let message: String = message.chars().filter(|c| !c.is_control()).take(FAILURE_CHARS_MAX).collect();
        let message = format!("job {job} failed under its coordinator, {}: {message}", self.describe());
        Error::Worker { message, exit_code: exit_code.max(1) }
    }

    /// The holder, for messages.
    pub(crate) fn describe(&self) -> String {
        let at = self.address.as_ref().map_or(String::new(), |address| format!(" ({address})"));
        // The record may hold anything.
        let text = format!("process {} on {}{at}", self.pid, self.host);
        text.chars().filter(|c| !c.is_control()).take(300).collect()
    }
}

/// What the lease key holds.
#[derive(Debug)]
enum Seen {
    Absent,
    Record(Box<Record>),
    /// Something else: it is waited for like a record of an unknown holder.
    Unreadable(String),
}

/// The part of a record that every format has.
#[derive(Deserialize)]
struct AnyFormat {
    format_version: u32,
}

fn parse(job: &str, value: Option<&[u8]>) -> Result<Seen> {
    let Some(value) = value else { return Ok(Seen::Absent) };
    if value.len() > RECORD_BYTES_MAX {
        return Ok(Seen::Unreadable(format!("it has {} bytes", value.len())));
    }
    if let Ok(AnyFormat { format_version }) = serde_json::from_slice(value)
        && format_version != FORMAT_VERSION
    {
        let key = lease_key(job);
        return Err(lease_error(
            job,
            format!(
                "format version {format_version} of key {key} is unknown: run the version of millrace that wrote it"
            ),
        ));
    }
    Ok(match serde_json::from_slice(value) {
        Ok(record) => Seen::Record(record),
        Err(error) => Seen::Unreadable(error.to_string()),
    })
}

fn lease_error(job: &str, reason: String) -> Error {
    Error::Lease { job: job.to_owned(), reason }
}

/// The key of a job's lease.
pub(crate) fn lease_key(job: &str) -> String {
    format!("trainer/{job}/lease")
}

/// The value of the owner key: the fencing number, and a random part that proves the coordinator to its workers.
fn owner_value(fence: u64, secret: &str) -> String {
    format!("{fence:020}-{secret}")
}

/// The fencing number in an owner key. Values of earlier programs have none.
pub(crate) fn fence_of(owner: &str) -> u64 {
    owner.split_once('-').and_then(|(fence, _)| fence.parse().ok()).unwrap_or_default()
}

fn key_get(view: &View, key: &str) -> Result<Option<Vec<u8>>> {
    view.key_get(key).map_err(|e| Error::volume(format!("read key {key} of {}", view.spec()), e))
}

/// The record of a job's lease, if there is one that can be read.
pub(crate) fn read(view: &View, job: &str) -> Result<Option<Record>> {
    match parse(job, key_get(view, &lease_key(job))?.as_deref())? {
        Seen::Record(record) => Ok(Some(*record)),
        Seen::Absent | Seen::Unreadable(_) => Ok(None),
    }
}

/// The holder that a process wants to become.
#[derive(Debug, Clone)]
pub(crate) struct Terms {
    pub(crate) job: String,
    pub(crate) run: String,
    pub(crate) lease: Duration,
    /// Whether the holder gives up once it could not renew the lease in time. Otherwise it goes on until another one
    /// has taken over.
    pub(crate) strict: bool,
}

/// What a look at the lease gave.
pub(crate) enum Look {
    Taken(Box<Holding>),
    /// Another process has it. The value tells one renewal from the next.
    Held {
        by: String,
        value: Vec<u8>,
        /// How long its record has to stay the same until the lease is free.
        lease: Duration,
    },
    /// The holder for which this standby waited has ended with the run's error.
    Failed(Error),
}

/// A process that wants the lease.
pub(crate) struct Candidate {
    view: View,
    terms: Terms,
    holder: String,
    secret: String,
    watch: Watch,
    /// When the last take-over whose outcome is unknown began.
    tried: Duration,
    /// Whether another process had the lease before.
    has_waited: bool,
    /// The last record of another holder.
    pub(crate) predecessor: Option<Record>,
}

impl Candidate {
    pub(crate) fn new(view: View, terms: Terms) -> Result<Candidate> {
        let random = || random::bytes().map_err(|e| Error::io(format!("read {}", random::SOURCE), e));
        let (holder, secret): ([u8; 16], [u8; 32]) =
            (random()?[..16].try_into().unwrap_or_default(), random()?);
        Ok(Candidate {
            view,
            terms,
            holder: hex::encode(holder),
            secret: hex::encode(secret),
            watch: Watch::default(),
            tried: Duration::ZERO,
            has_waited: false,
            predecessor: None,
        })
    }

    pub(crate) fn holder(&self) -> &str {
        &self.holder
    }

    /// Takes the lease if it is free, has expired, or its holder is `dead`: a holder whose process has certainly
    /// ended. A standby that has waited for a run does not try again what failed; one that starts afterwards does.
    pub(crate) fn look(&mut self, dead: Option<&str>, now: &impl Fn() -> Duration) -> Result<Look> {
        match self.look_once(dead, now) {
            // Every later look would fail as well.
            Err(error) if error.is_declared_dead() => {
                self.view = output::reopen(&self.view)?;
                self.look_once(dead, now)
            }
            look => look,
        }
    }

    fn look_once(&mut self, dead: Option<&str>, now: &impl Fn() -> Duration) -> Result<Look> {
        let (job, lease_key) = (&self.terms.job, lease_key(&self.terms.job));
        let owner_key = Checkpoints::owner_key(job);
        for _ in 0..ATTEMPTS {
            let began = now();
            let (value, owner) = (key_get(&self.view, &lease_key)?, key_get(&self.view, &owner_key)?);
            let seen = parse(job, value.as_deref())?;
            let (by, lease, is_free) = match &seen {
                Seen::Absent => (String::new(), self.terms.lease, true),
                Seen::Record(record) if record.holder == self.holder => {
                    let owner = owner_value(record.fence, &self.secret);
                    let until = self.tried + self.terms.lease;
                    return Ok(Look::Taken(Box::new(self.holding(
                        (**record).clone(),
                        value.unwrap_or_default(),
                        owner,
                        until,
                    ))));
                }
                Seen::Record(record)
                    if record.standing == Standing::Failed
                        && record.run == self.terms.run
                        && self.terms.strict
                        && self.has_waited =>
                {
                    return Ok(Look::Failed(record.failure(job)));
                }
                Seen::Record(record) => {
                    let is_dead = dead == Some(record.holder.as_str());
                    (record.describe(), record.lease(), is_dead || record.standing != Standing::Held)
                }
                Seen::Unreadable(reason) => (
                    format!("an unknown process: key {lease_key} cannot be read ({reason})"),
                    self.terms.lease,
                    false,
                ),
            };
            if let Seen::Record(record) = &seen {
                self.predecessor = Some((**record).clone());
            }
            let times = (began, now());
            let bytes = value.clone().unwrap_or_default();
            if !is_free && !self.watch.has_expired(&bytes, lease, times) {
                self.has_waited = true;
                return Ok(Look::Held { by, value: bytes, lease });
            }
            let of_owner =
                owner.as_deref().and_then(|owner| std::str::from_utf8(owner).ok()).map_or(0, fence_of);
            let last = match &seen {
                Seen::Record(record) => record.fence.max(of_owner),
                _ => of_owner,
            };
            // A standby goes on with the run that it takes over, until it says otherwise.
            let run = match &seen {
                Seen::Record(record) if self.terms.strict => record.run.clone(),
                _ => self.terms.run.clone(),
            };
            let fence = last.checked_add(1).ok_or_else(|| {
                lease_error(job, format!("the fencing number in key {lease_key} is the largest there is: give the job another name"))
            })?;
            let record = Record {
                format_version: FORMAT_VERSION,
                fence,
                holder: self.holder.clone(),
                run,
                host: host_name(),
                pid: std::process::id(),
                address: None,
                lease_ms: u64::try_from(self.terms.lease.as_millis()).unwrap_or(LEASE_MS_MAX),
                renewals: 0,
                standing: Standing::Held,
                failure: None,
            };
            let (bytes, own) = (value_of(&record), owner_value(fence, &self.secret));
            let publish = Publish::new()
                .expect_key(lease_key.clone(), value)
                .expect_key(owner_key.clone(), owner)
                .put_key(lease_key.clone(), bytes.clone())
                .put_key(owner_key.clone(), own.clone());
            self.tried = now();
            match self.view.publish(publish) {
                Ok(()) => {
                    let until = self.tried + self.terms.lease;
                    return Ok(Look::Taken(Box::new(self.holding(record, bytes, own, until))));
                }
                // Another candidate, or a renewal at the last moment.
                Err(millrace_datafs::Error::Conflict { .. }) => {}
                Err(error) => return Err(Error::volume(format!("take the lease of job {job}"), error)),
            }
        }
        Err(Error::Busy {
            job: job.clone(),
            reason: format!(
                "other processes changed key {lease_key} during each of {ATTEMPTS} attempts; try again"
            ),
        })
    }

    fn holding(&self, record: Record, value: Vec<u8>, owner: String, valid_until: Duration) -> Holding {
        Holding { view: self.view.clone(), terms: self.terms.clone(), record, value, owner, valid_until }
    }
}

fn value_of(record: &Record) -> Vec<u8> {
    serde_json::to_vec(record).unwrap_or_default()
}

/// What a renewal gave.
#[derive(Debug)]
pub(crate) enum Renewal {
    Renewed,
    /// The metadata did not answer; the renewal may have happened.
    Unknown(Error),
    /// Another process has the lease.
    Lost(String),
}

/// A held lease.
#[derive(Debug)]
pub(crate) struct Holding {
    view: View,
    terms: Terms,
    record: Record,
    /// The record as it was last written.
    value: Vec<u8>,
    owner: String,
    valid_until: Duration,
}

impl Holding {
    /// No other process can have the lease before this time.
    pub(crate) fn valid_until(&self) -> Duration {
        self.valid_until
    }

    pub(crate) fn owner(&self) -> &str {
        &self.owner
    }

    /// Renews the lease, with a change of its record.
    pub(crate) fn renew(&mut self, change: impl Fn(&mut Record), now: &impl Fn() -> Duration) -> Renewal {
        match self.renew_once(&change, now) {
            Renewal::Unknown(error) if error.is_declared_dead() => match output::reopen(&self.view) {
                Ok(view) => {
                    self.view = view;
                    self.renew_once(&change, now)
                }
                Err(error) => Renewal::Unknown(error),
            },
            renewal => renewal,
        }
    }

    fn renew_once(&mut self, change: &impl Fn(&mut Record), now: &impl Fn() -> Duration) -> Renewal {
        let (lease_key, owner_key) = (lease_key(&self.terms.job), Checkpoints::owner_key(&self.terms.job));
        // A renewal whose outcome was unknown may be committed later than a read has missed it.
        for _ in 0..ATTEMPTS {
            let began = now();
            let mut next = self.record.clone();
            next.renewals = next.renewals.saturating_add(1);
            change(&mut next);
            let bytes = value_of(&next);
            let publish = Publish::new()
                .expect_key(owner_key.clone(), Some(self.owner.clone().into_bytes()))
                .expect_key(lease_key.clone(), Some(self.value.clone()))
                .put_key(lease_key.clone(), bytes.clone());
            match self.view.publish(publish) {
                Ok(()) => {
                    (self.record, self.value, self.valid_until) = (next, bytes, began + self.terms.lease);
                    return Renewal::Renewed;
                }
                Err(millrace_datafs::Error::Conflict { .. }) => {}
                Err(error) => {
                    let what = format!("renew the lease of job {}", self.terms.job);
                    return Renewal::Unknown(Error::volume(what, error));
                }
            }
            match self.current() {
                Ok(Ok((record, value))) => (self.record, self.value) = (record, value),
                Ok(Err(reason)) => return Renewal::Lost(reason),
                Err(error) => return Renewal::Unknown(error),
            }
        }
        Renewal::Lost(format!("other processes change key {lease_key}"))
    }

    /// This holder's record in the metadata, or the reason why there is another.
    fn current(&self) -> Result<Result<(Record, Vec<u8>), String>> {
        let job = &self.terms.job;
        let owner = key_get(&self.view, &Checkpoints::owner_key(job))?;
        let value = key_get(&self.view, &lease_key(job))?;
        let taken = "has taken the run over";
        Ok(match parse(job, value.as_deref())? {
            Seen::Record(record) if record.holder != self.record.holder => {
                Err(format!("{} {taken}", record.describe()))
            }
            _ if owner.as_deref() != Some(self.owner.as_bytes()) => Err(format!("another program {taken}")),
            Seen::Record(record) => Ok((*record, value.unwrap_or_default())),
            Seen::Absent => Err(format!("key {} was removed", lease_key(job))),
            Seen::Unreadable(reason) => Err(format!(
                "another program changed key {}, which cannot be read ({reason})",
                lease_key(job)
            )),
        })
    }
}

/// A held lease that a thread renews.
#[derive(Debug)]
pub(crate) struct Lease {
    shared: Arc<Shared>,
    /// Dropping it ends the thread.
    wake: mpsc::Sender<Change>,
    owner: String,
}

/// A change of the record that a holder makes.
#[derive(Debug)]
enum Change {
    /// Where workers join.
    Address(String),
    /// The run that the holder trains.
    Run(String),
    /// None: the lease was given up.
    Released,
}

#[derive(Debug)]
struct Shared {
    job: String,
    strict: bool,
    lease: Duration,
    holding: Mutex<Holding>,
    /// Milliseconds of [`boot_time`].
    valid_until: AtomicU64,
    lost: Mutex<Option<String>>,
    told: CancellationToken,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What a panic leaves is as valid as before: the values are replaced as a whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn lose(&self, reason: String) {
        lock(&self.lost).get_or_insert(reason);
        self.told.cancel();
    }

    /// Notes the end of a lease that had to be renewed.
    fn check_time(&self) {
        let until = Duration::from_millis(self.valid_until.load(Ordering::Acquire));
        if self.strict && boot_time() >= until {
            self.lose(format!(
                "it could not renew the lease for {} ms ([trainer] lease_ms): this process was stopped, or the \
                 metadata did not answer",
                self.lease.as_millis()
            ));
        }
    }

    /// Renews the lease; fails if the metadata did not answer. A loss is noted.
    fn renew(&self, change: impl Fn(&mut Record)) -> Result<()> {
        let mut holding = lock(&self.holding);
        if self.told.is_cancelled() {
            return Ok(());
        }
        let renewed = holding.renew(change, &boot_time);
        self.valid_until.store(holding.valid_until().as_millis() as u64, Ordering::Release);
        drop(holding);
        match renewed {
            Renewal::Renewed => return Ok(()),
            Renewal::Unknown(error) => {
                tracing::warn!(
                    job = self.job,
                    error = error.one_line(),
                    "cannot renew the coordinator's lease yet"
                );
                self.check_time();
                return Err(error);
            }
            Renewal::Lost(reason) => self.lose(reason),
        }
        Ok(())
    }

    fn run(&self, changes: &mpsc::Receiver<Change>) {
        let (mut address, mut run) = (None, None);
        loop {
            match changes.recv_timeout(self.lease / RENEWALS) {
                Ok(Change::Released) => return,
                Ok(Change::Address(changed)) => address = Some(changed),
                Ok(Change::Run(changed)) => run = Some(changed),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
            }
            // A process that was stopped has lost its lease before it renews it.
            self.check_time();
            if self.told.is_cancelled() {
                return;
            }
            // The next renewal may succeed.
            let _ = self.renew(|record| {
                record.address.clone_from(&address);
                if let Some(run) = &run {
                    record.run.clone_from(run);
                }
            });
        }
    }
}

impl Lease {
    /// Begins to renew the lease.
    pub(crate) fn start(holding: Holding) -> Result<Lease> {
        let (wake, changes) = mpsc::channel();
        let owner = holding.owner().to_owned();
        let shared = Arc::new(Shared {
            job: holding.terms.job.clone(),
            strict: holding.terms.strict,
            lease: holding.terms.lease,
            valid_until: AtomicU64::new(holding.valid_until().as_millis() as u64),
            holding: Mutex::new(holding),
            lost: Mutex::new(None),
            told: CancellationToken::new(),
        });
        let renewed = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("lease".to_owned())
            .spawn(move || renewed.run(&changes))
            .map_err(|e| Error::io("start a thread for the lease", e))?;
        Ok(Lease { shared, wake, owner })
    }

    /// The value of the owner key while this lease is held.
    pub(crate) fn owner(&self) -> &str {
        &self.owner
    }

    pub(crate) fn fence(&self) -> u64 {
        fence_of(&self.owner)
    }

    /// Writes into the record where workers join.
    pub(crate) fn announce(&self, address: String) {
        // The thread has ended if the lease is lost.
        let _ = self.wake.send(Change::Address(address));
    }

    /// Writes into the record which run this holder trains, so that a standby goes on with it.
    pub(crate) fn train(&self, run: String) {
        // As above.
        let _ = self.wake.send(Change::Run(run));
    }

    /// Waits until the lease is lost.
    pub(crate) async fn lost(&self) -> Error {
        loop {
            self.shared.check_time();
            if let Some(error) = self.error() {
                return error;
            }
            let _ = tokio::time::timeout(CHECK, self.shared.told.cancelled()).await;
        }
    }

    /// Fails if the lease is lost.
    pub(crate) fn check(&self) -> Result<()> {
        self.shared.check_time();
        self.error().map_or(Ok(()), Err)
    }

    /// Renews the lease in the metadata now. Fails if it is lost, or if the metadata does not answer: then another
    /// process may have it.
    pub(crate) fn confirm(&self) -> Result<()> {
        self.check()?;
        self.shared.renew(|_| {})?;
        self.check()
    }

    /// Whether the lease was renewed lately: the metadata answers this process.
    pub(crate) fn is_fresh(&self) -> bool {
        let until = Duration::from_millis(self.shared.valid_until.load(Ordering::Acquire));
        boot_time() + self.shared.lease / 2 < until
    }

    fn error(&self) -> Option<Error> {
        let reason = lock(&self.shared.lost).clone()?;
        Some(lease_error(
            &self.shared.job,
            format!(
                "this process is no longer the coordinator: {reason}; the run may go on without it, so start \
                     it again with --standby, to wait for its turn"
            ),
        ))
    }

    /// The loss of the lease if that is behind an error, otherwise the error. Reads the metadata.
    pub(crate) fn explain(&self, error: Error) -> Error {
        if self.error().is_none()
            && let Ok(Err(reason)) = lock(&self.shared.holding).current()
        {
            self.shared.lose(reason);
        }
        self.error().unwrap_or(error)
    }

    /// Gives the lease up, so that another process need not wait for its end. Other holders of this value find it lost.
    pub(crate) fn release(&self, how: Release) {
        let shared = &self.shared;
        if shared.told.is_cancelled() {
            // It was released, has expired or is another's, and the metadata may not answer.
            return;
        }
        let (standing, failure) = match how {
            Release::Unfinished => (Standing::Released, None),
            Release::Finished => (Standing::Finished, None),
            Release::Failed(mut failure) => {
                failure.message = failure.message.chars().take(FAILURE_CHARS_MAX).collect();
                (Standing::Failed, Some(failure))
            }
        };
        let change = |record: &mut Record| (record.standing, record.failure) = (standing, failure.clone());
        let mut holding = lock(&shared.holding);
        // The thread makes no renewal after this one.
        shared.lose("it has released the lease".to_owned());
        let released = holding.renew(change, &boot_time);
        drop(holding);
        // Without a thread, there is nothing to end.
        let _ = self.wake.send(Change::Released);
        if let Renewal::Unknown(error) = released {
            let seconds = shared.lease.as_secs();
            let error = error.one_line();
            tracing::warn!(job = shared.job, error, "cannot release the lease: it expires after {seconds} s");
        }
    }
}
