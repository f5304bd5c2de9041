//! A worker of another machine: joins a coordinator, and joins again when it was lost.
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use millrace_datafs::{Datafs, View};
use millrace_leaf::backoff::Backoff;
use millrace_leaf::discovery;
use millrace_streams::KafkaConfig;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::{Assignment, Part, train};
use crate::checkpoint::Checkpoints;
use crate::collective::{self, Collective, Options};
use crate::elastic::joining::{self, Admission, NotAdmitted};
use crate::elastic::session::Scope;
use crate::error::{Error, Result};
use crate::join::{Join, dial, has_port, host_port, resolve};
use crate::lease::{self, Standing};
use crate::replica::{Replica, open_output};
use crate::script::NodeSettings;
use crate::script::joined::{self as script, SessionEnd};
use crate::source::Sources;
use crate::train::{Answer, Awaited, Inquiry};

/// First and longest pause before another attempt to join.
const PAUSE: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// First and longest pause after a session without a step: if this worker's network broke the rings, the others
/// train meanwhile.
const SETBACK_PAUSE: Duration = Duration::from_secs(1);
const SETBACK_PAUSE_MAX: Duration = Duration::from_secs(300);
/// Longest such pause of a worker with a state, which no other worker may have.
const HOLDER_PAUSE_MAX: Duration = Duration::from_secs(10);
/// Interval at which a pause notices the end of the process.
const POLL: Duration = Duration::from_millis(50);

/// How a worker of another machine ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JoinEnd {
    /// The job is over.
    Done,
    /// A signal asked the worker to leave, and it left in order.
    Left,
    /// The awaited job is complete, and has no coordinator any more.
    Complete,
}

/// Runs this process as a worker of a coordinator on another machine, on its own volumes, until the job is
/// over or SIGTERM (or Ctrl-C) asks it to leave. Then it finishes its step and leaves; the others go on.
///
/// A coordinator that is lost or does not answer is tried again for [`Join::wait`], at each address of
/// [`Join::coordinator`] and at the one in the run's lease. The worker keeps its state meanwhile, and goes on with it
/// under the next coordinator of the run. It never follows one whose lease is older than the newest that it has seen.
///
/// With `awaited`, a worker that has not found a coordinator yet ends with [`JoinEnd::Complete`] once the lease and the
/// checkpoints in the output volume say that this job is complete. While they cannot be read, it waits.
///
/// Blocks; must be called from a plain thread, usually the main one. The process should exit afterwards.
///
/// # Errors
/// [`Error::Access`] and [`Error::Join`] for settings that do not fit, [`Error::CoordinatorLost`] once the
/// coordinator was away for too long, and errors of the training. [`Error::Worker`] for an awaited job whose run failed
/// while this worker waited for its coordinator. `exit_code` gives the exit code with which
/// the job ends when an error would meet every other worker, too.
///
/// `kafka` are the brokers of this machine, for jobs on topics. `scripts` is what script jobs need of this machine;
/// without it, such jobs are refused.
pub fn join(
    join: &Join,
    datafs: &Datafs,
    kafka: Option<&KafkaConfig>,
    scripts: Option<&NodeSettings>,
    awaited: Option<Awaited>,
    exit_code: impl Fn(&Error) -> u8,
) -> Result<JoinEnd> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(4)
        .thread_name("worker")
        .enable_all()
        .build()
        .map_err(|e| Error::io("start the worker's runtime", e))?;
    let leave = leave_signal(&runtime, join.leaves_on_hangup)?;
    let inquiry = awaited.map(Inquiry::new);
    let result = serve(join, &Machine { datafs, kafka, scripts }, inquiry, &runtime, &leave, &exit_code);
    // Prefetches and heartbeats need no orderly end.
    runtime.shutdown_timeout(Duration::from_millis(100));
    result
}

/// What this machine has for jobs.
struct Machine<'a> {
    datafs: &'a Datafs,
    kafka: Option<&'a KafkaConfig>,
    scripts: Option<&'a NodeSettings>,
}

/// Cancelled by the first SIGTERM or SIGINT, or the end of the terminal; another SIGTERM or SIGINT ends the process.
fn leave_signal(runtime: &Runtime, leaves_on_hangup: bool) -> Result<CancellationToken> {
    let leave = CancellationToken::new();
    let told = leave.clone();
    let _context = runtime.enter();
    let handle = |kind| signal(kind).map_err(|e| Error::io("handle signals", e));
    let (mut terminate, mut interrupt) = (handle(SignalKind::terminate())?, handle(SignalKind::interrupt())?);
    let mut hangup = if leaves_on_hangup { Some(handle(SignalKind::hangup())?) } else { None };
    runtime.spawn(async move {
        let mut was_asked = false;
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
                _ = async { hangup.as_mut()?.recv().await }, if hangup.is_some() => {
                    // The kernel and the shell may both send it, before or after SIGTERM: it never forces the end.
                    told.cancel();
                    continue;
                }
            }
            if was_asked {
                std::process::exit(EXIT_FORCED);
            }
            was_asked = true;
            tracing::info!("this worker leaves after its current step");
            told.cancel();
        }
    });
    Ok(leave)
}

/// Time for one attempt to read rows before a worker that was cut off joins again.
const READ_LIMIT: Duration = Duration::from_secs(10);

/// Exit code after a second signal.
const EXIT_FORCED: i32 = 1;

/// How one session with a coordinator ended.
enum Ended {
    Job(JoinEnd),
    /// The coordinator was lost: join again. Tells whether this worker has trained before.
    Lost(Error, bool),
    /// This worker cannot go on.
    Failed(Error),
}

/// What a worker keeps between two sessions.
#[derive(Default)]
struct Memory {
    run: Option<KnownRun>,
    /// The state after the last step of a coordinator that was lost.
    replica: Option<Replica>,
    /// Whether the last session ended because the volumes did not answer this worker.
    was_cut_off: bool,
}

/// The run that a worker trains.
struct KnownRun {
    job: String,
    run: String,
    output: View,
    /// The highest number of a coordinator's lease that this worker has seen.
    fence: u64,
}

impl Memory {
    /// The addresses to try: the one in the lease, then those of `--join`. None once the run is finished.
    ///
    /// # Errors
    /// The error with which the run failed.
    fn targets(&mut self, listed: &[String]) -> Result<Option<Vec<String>>> {
        let Some(known) = &mut self.run else { return Ok(Some(listed.to_vec())) };
        let record = match lease::read(&known.output, &known.job) {
            Ok(record) => record.filter(|record| record.fence >= known.fence),
            Err(error) => {
                tracing::debug!(error = error.one_line(), "cannot read the coordinator's lease");
                None
            }
        };
        let Some(record) = record else { return Ok(Some(listed.to_vec())) };
        known.fence = record.fence;
        if record.run == known.run {
            match record.standing {
                Standing::Finished => return Ok(None),
                Standing::Failed => return Err(record.failure(&known.job)),
                Standing::Held | Standing::Released => {}
            }
        }
        let announced = record.address.filter(|_| record.standing == Standing::Held);
        let announced = announced.filter(|address| !listed.contains(address));
        Ok(Some(announced.into_iter().chain(listed.iter().cloned()).collect()))
    }

    /// Fails if the coordinator that said that the job is over had been replaced: its word ends nothing.
    fn check_dismissal(&self) -> Result<()> {
        let Some(known) = &self.run else { return Ok(()) };
        match lease::read(&known.output, &known.job) {
            Ok(Some(record)) if known.fence > 0 && record.fence > known.fence => Err(Error::Busy {
                job: known.job.clone(),
                reason: format!("{} has taken it over from the coordinator that ended it", record.describe()),
            }),
            Ok(_) => Ok(()),
            Err(error) => {
                // The coordinator has looked as well, before it said so.
                tracing::debug!(error = error.one_line(), "cannot read the coordinator's lease");
                Ok(())
            }
        }
    }

    /// Fails for a coordinator that another one has replaced.
    fn check_fence(&self, assignment: &Assignment) -> Result<(), NotAdmitted> {
        let job = assignment.job.name.as_str();
        match &self.run {
            Some(known)
                if known.job == job
                    && *known.output.spec() == assignment.job.output_volume()
                    && assignment.fence < known.fence =>
            {
                Err(NotAdmitted::Yet(format!(
                    "it was replaced as the coordinator of job {job} (its lease has number {}, the newest one {})",
                    assignment.fence, known.fence
                )))
            }
            _ => Ok(()),
        }
    }

    /// Makes one more attempt to save the state before it goes. Gives the step after which it is saved; none if there is
    /// none to save, or if another coordinator goes on with the run.
    ///
    /// # Errors
    /// [`Error::Outage`] names the state and the cause.
    fn save(&mut self) -> Result<Option<u64>> {
        let Some(mut replica) = self.replica.take().filter(|replica| replica.position() > 0) else {
            return Ok(None);
        };
        let (run, step) = (self.describe(), replica.step());
        match replica.save_once() {
            Ok(()) => {
                tracing::info!(run, step, "the state is saved");
                Ok(Some(step))
            }
            Err(error @ Error::Busy { .. }) => {
                let reason = error.one_line();
                tracing::warn!(
                    run,
                    step,
                    reason,
                    "the state of this worker is dropped: the run goes on without it"
                );
                Ok(None)
            }
            Err(error) => Err(Error::Outage {
                reason: format!(
                    "the state of {run} after step {step} was in the memory of this worker and could not be saved ({}): \
                     the run goes on from another worker's state or from its last checkpoint",
                    error.one_line()
                ),
            }),
        }
    }

    /// [`Memory::save`] before another error or another run, which counts more.
    fn save_or_warn(&mut self) {
        if let Err(error) = self.save() {
            tracing::error!("{}", error.one_line());
        }
    }

    /// Fails while a worker that was cut off still gets no rows: in a ring, the others would wait for it again.
    fn check_rows(&mut self) -> Result<()> {
        if let Some(replica) = self.replica.as_ref().filter(|_| self.was_cut_off) {
            replica.try_to_read(READ_LIMIT)?;
        }
        self.was_cut_off = false;
        Ok(())
    }

    /// The run, for messages.
    fn describe(&self) -> String {
        match &self.run {
            Some(known) => format!("run {:.12} of job {}", known.run, known.job),
            None => "a job".to_owned(),
        }
    }
}

/// The addresses of `--join`.
fn addresses(join: &Join) -> Result<Vec<String>> {
    let listed: Vec<String> = join.coordinator.split(',').map(|address| address.trim().to_owned()).collect();
    if !listed.iter().all(|address| discovery::is_service(address) || has_port(address)) {
        return Err(Error::Access {
            what: format!("join {:?}", join.coordinator),
            reason: "write HOST:PORT, or several of them with commas, or dnssrv+NAME".to_owned(),
        });
    }
    Ok(listed)
}

fn serve(
    join: &Join,
    machine: &Machine<'_>,
    mut inquiry: Option<Inquiry>,
    runtime: &Runtime,
    leave: &CancellationToken,
    exit_code: &impl Fn(&Error) -> u8,
) -> Result<JoinEnd> {
    if let Some(name) = &join.advertise {
        // Fails here rather than at the other workers.
        runtime.block_on(resolve("--advertise", &host_port(name, 1)))?;
    }
    let listed = addresses(join)?;
    let mut memory = Memory::default();
    let mut backoff = Backoff::new(PAUSE, PAUSE_MAX);
    let mut setbacks = Backoff::new(SETBACK_PAUSE, SETBACK_PAUSE_MAX);
    let mut lost_at = Instant::now();
    let mut told = false;
    loop {
        if leave.is_cancelled() {
            return memory.save().map(|_| JoinEnd::Left);
        }
        let Some(targets) = memory.targets(&listed)? else {
            tracing::info!("the run is finished");
            return Ok(JoinEnd::Done);
        };
        if memory.run.is_some() {
            // The lease of the run that this worker has joined tells from now on.
            inquiry = None;
        }
        if let Some(inquiry) = &mut inquiry
            && let Some(end) = end_of(inquiry.ask(runtime, leave))
        {
            return end;
        }
        let began = Instant::now();
        let outcome = match memory.check_rows() {
            Ok(()) => round(join, &targets, &mut memory, machine, runtime, leave, exit_code)?,
            Err(error) => Round::Nowhere(error.one_line()),
        };
        let (reason, time) = match outcome {
            Round::Ended(Ended::Job(end)) => return Ok(end),
            Round::Ended(Ended::Failed(error)) => return Err(error),
            Round::Ended(Ended::Lost(error, has_trained)) => {
                told = false;
                memory.was_cut_off = error.is_outage() || matches!(error, Error::Outage { .. });
                backoff.reset();
                if has_trained {
                    lost_at = Instant::now();
                    setbacks.reset();
                    (error.one_line(), backoff.jittered())
                } else {
                    // The wait goes on, less the time as a member.
                    lost_at += began.elapsed();
                    let pause = setbacks.jittered();
                    // No other worker may have the state.
                    (
                        error.one_line(),
                        if memory.replica.is_some() { pause.min(HOLDER_PAUSE_MAX) } else { pause },
                    )
                }
            }
            Round::Nowhere(reason) => (reason, backoff.jittered()),
        };
        let left = join.wait.saturating_sub(lost_at.elapsed());
        if left.is_zero() {
            if let Some(inquiry) = inquiry.as_mut().filter(|_| memory.run.is_none())
                && let Some(end) = end_of(inquiry.ask_finally(runtime, leave))
            {
                return end;
            }
            let (waited, run) = (join.wait.as_secs(), memory.describe());
            let state = match memory.save() {
                Ok(Some(step)) => format!("; its state after step {step} is saved"),
                Ok(None) => String::new(),
                Err(error) => format!("; {}", error.one_line()),
            };
            return Err(Error::CoordinatorLost {
                address: targets.join(", "),
                reason: format!(
                    "cannot join {run} ({reason}); gave up after {waited} s (--wait): start millrace train there, or \
                     name the right addresses with --join, then start this worker again{state}"
                ),
            });
        }
        if !told {
            let seconds = left.as_secs();
            tracing::warn!(
                coordinator = targets.join(", "),
                run = memory.describe(),
                reason,
                "waiting for the coordinator, for up to {seconds} s"
            );
            told = true;
        }
        pause(time.min(left), leave);
    }
}

/// The end of a worker that has asked for the end of its job; none while the job is open.
fn end_of(answer: Answer) -> Option<Result<JoinEnd>> {
    match answer {
        Answer::Open => None,
        Answer::Complete => Some(Ok(JoinEnd::Complete)),
        Answer::Failed(error) => Some(Err(error)),
    }
}

/// One attempt at each address.
enum Round {
    Ended(Ended),
    /// No address admits this worker yet.
    Nowhere(String),
}

/// Tries the addresses in turn until one admits this worker, and trains there. Fails if none of them ever will.
fn round(
    join: &Join,
    targets: &[String],
    memory: &mut Memory,
    machine: &Machine<'_>,
    runtime: &Runtime,
    leave: &CancellationToken,
    exit_code: &impl Fn(&Error) -> u8,
) -> Result<Round> {
    let (mut reasons, mut refusals) = (Vec::new(), Vec::new());
    let mut servers = Vec::new();
    for target in targets {
        match discovery::servers(target) {
            Ok(found) => {
                for server in found {
                    if !servers.contains(&server) {
                        servers.push(server);
                    }
                }
            }
            Err(error) => reasons.push((target.clone(), error.to_string())),
        }
    }
    let tried = servers.len() + reasons.len();
    for target in servers {
        let join = Join { coordinator: target.clone(), ..join.clone() };
        match attempt(&join, memory, machine, runtime, leave, exit_code) {
            Ok(ended) => return Ok(Round::Ended(ended)),
            Err(NotAdmitted::Yet(reason)) => reasons.push((target, reason)),
            Err(NotAdmitted::Ever(error)) => {
                reasons.push((target, error.one_line()));
                refusals.push(error);
            }
        }
        if leave.is_cancelled() {
            break;
        }
    }
    // A worker with a state goes on until `--wait` ends: what answers during a failover may not be the coordinator.
    if refusals.len() == tried
        && memory.replica.is_none()
        && let Some(error) = refusals.into_iter().next()
    {
        return Err(error);
    }
    Ok(Round::Nowhere(match &reasons[..] {
        [(_, reason)] => reason.clone(),
        _ => reasons.iter().map(|(at, reason)| format!("{at}: {reason}")).collect::<Vec<_>>().join("; "),
    }))
}

fn pause(time: Duration, leave: &CancellationToken) {
    let until = Instant::now() + time;
    while !leave.is_cancelled() && Instant::now() < until {
        std::thread::sleep(POLL.min(time));
    }
}

/// Joins once and trains until the job is over or the coordinator is lost.
fn attempt(
    join: &Join,
    memory: &mut Memory,
    machine: &Machine<'_>,
    runtime: &Runtime,
    leave: &CancellationToken,
    exit_code: &impl Fn(&Error) -> u8,
) -> Result<Ended, NotAdmitted> {
    // A name server that does not know the coordinator yet is as one that does not answer.
    let coordinator = match runtime.block_on(resolve("--join", &join.coordinator)) {
        Ok(addresses) => addresses,
        Err(error) if join.wait.is_zero() => return Err(error.into()),
        Err(error) => return Err(NotAdmitted::Yet(error.one_line())),
    };
    let mut collective = match join.listen_ring {
        Some(address) => Collective::bind_to(address, Options::new("")),
        None => {
            let own = runtime.block_on(dial(&coordinator)).and_then(|stream| stream.local_addr());
            let own = own.map_err(|e| NotAdmitted::Yet(format!("cannot connect to it ({e})")))?;
            let advertised = match &join.advertise {
                Some(name) => runtime
                    .block_on(resolve("--advertise", &host_port(name, 1)))
                    .map_err(|error| NotAdmitted::Yet(error.one_line()))?,
                None => Vec::new(),
            };
            bind_ring(own.ip(), &advertised)
        }
    }
    .map_err(|error| NotAdmitted::Ever(error.into()))?;
    let ring = ring_address(join, collective.address())?;
    let Admission { session, assignment, secret } = joining::connect(runtime.handle(), join, &ring)?;
    if script::is_script(&assignment) {
        drop(collective);
        let Some(settings) = machine.scripts else {
            let reason = "it runs a script, and this worker runs native jobs only".to_owned();
            return Err(Error::Join { coordinator: join.coordinator.clone(), reason }.into());
        };
        tracing::info!(coordinator = join.coordinator, "joined a script job");
        let ended = script::serve(runtime.handle(), session, settings.clone(), leave)?;
        return Ok(match ended {
            SessionEnd::Done => Ended::Job(JoinEnd::Done),
            SessionEnd::Left => Ended::Job(JoinEnd::Left),
            SessionEnd::Lost(error) => Ended::Lost(error, true),
            SessionEnd::Failed(error) => Ended::Failed(error),
        });
    }
    let assignment = Assignment::read(&assignment)?;
    memory.check_fence(&assignment)?;
    let timing = assignment.apply(Options::new(secret), &mut collective, true);
    let mut session = session.start(runtime.handle(), timing, leave.clone());
    tracing::info!(coordinator = join.coordinator, ring, "joined");
    let datafs = machine.datafs;
    let loaded = check_volumes(datafs, &assignment).and_then(|output| {
        // A state of another run goes first: both may not fit.
        if let Some(former) = memory.replica.as_mut().filter(|former| !former.continues(&assignment)) {
            former.write_for(&assignment);
            memory.save_or_warn();
        }
        let (job, run) = (assignment.job.name.to_string(), assignment.run.clone());
        memory.run = Some(KnownRun { job, run, output, fence: assignment.fence });
        match memory.replica.take() {
            Some(former) => Ok(former.follow(assignment)),
            None => {
                let sources = Sources { datafs: datafs.clone(), kafka: machine.kafka.cloned() };
                Replica::load(assignment, sources, runtime.handle().clone())
            }
        }
    });
    let (mut replica, result) = match loaded {
        Ok(mut replica) => {
            let result = train(&mut replica, &mut session, &collective);
            (Some(replica), result)
        }
        Err(error) => (None, Err(error)),
    };
    let result = result.and_then(|part| match part {
        Part::Done => memory.check_dismissal().map(|()| part),
        Part::Left => Ok(part),
    });
    let error = match result {
        Ok(Part::Done) => return Ok(Ended::Job(JoinEnd::Done)),
        Ok(Part::Left) => return Ok(Ended::Job(JoinEnd::Left)),
        Err(error) => error,
    };
    let is_loaded = replica.is_some();
    if leaves_state(&error) {
        memory.replica = replica.take().or(memory.replica.take());
    }
    // Another coordinator runs the job now, and this one will end. Or the volumes do not answer a worker that
    // comes back: no other place has its state.
    let is_away = !is_loaded && memory.replica.is_some() && error.is_outage();
    if is_away || matches!(error, Error::CoordinatorLost { .. } | Error::Busy { .. }) {
        return Ok(Ended::Lost(error, session.has_trained()));
    }
    // The error may follow from the coordinator's loss: another one writes to the volumes. Before the first
    // step, the loss may not be noticed yet.
    let end = session.end_within(if is_loaded { Duration::ZERO } else { join.silence });
    if let Some(Err(lost)) = end {
        return Ok(Ended::Lost(lost, session.has_trained()));
    }
    // Before its first step, a worker of another machine may have settings that are wrong here alone.
    let scope = if !is_loaded || is_own_place(&error) { Scope::Worker } else { Scope::of(&error) };
    if end.is_none() {
        if scope == Scope::Worker {
            // Whether others have it is not known here.
            memory.save_or_warn();
        }
        // The answer is the end of the stream.
        let _ = session.fail(error.one_line(), exit_code(&error), scope);
    }
    match error {
        // The state waits for the volumes in this process.
        Error::Outage { .. } => Ok(Ended::Lost(error, false)),
        error => Ok(Ended::Failed(error)),
    }
}

/// Whether the state that a worker has after this error is that of its last complete step.
fn leaves_state(error: &Error) -> bool {
    match error {
        Error::CoordinatorLost { .. } | Error::Busy { .. } | Error::Collective(_) | Error::Outage { .. } => {
            true
        }
        Error::Volume { .. } | Error::Feed { .. } => error.is_local(),
        _ => false,
    }
}

/// Listens where the addresses of the advertised name lead: on `own`, the address that leads to the coordinator, or
/// on all if the name has another one.
fn bind_ring(own: IpAddr, advertised: &[SocketAddr]) -> Result<Collective, collective::Error> {
    let mut places = match advertised.iter().all(|address| address.ip() == own) {
        true => vec![own],
        // The first one accepts IPv4 as well. It fails where IPv6 is turned off.
        false => vec![Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()],
    };
    let last = places.pop().unwrap_or(own);
    let mut bound = places.into_iter().filter_map(|ip| Collective::bind(ip, Options::new("")).ok());
    bound.next().map_or_else(|| Collective::bind(last, Options::new("")), Ok)
}

/// The address of this worker's ring for other workers.
fn ring_address(join: &Join, own: SocketAddr) -> Result<String> {
    match &join.advertise {
        Some(name) => Ok(host_port(name, own.port())),
        None if own.ip().is_unspecified() => Err(Error::Access {
            what: format!("listen for other workers on {own}"),
            reason: "they need an address of this machine: add --advertise NAME".to_owned(),
        }),
        None => Ok(own.to_string()),
    }
}

/// Opens the output volume. Fails unless this worker and the coordinator open the same volumes: the coordinator has
/// written a random value of this run into the output volume's metadata, and no other metadata has it.
fn check_volumes(datafs: &Datafs, assignment: &Assignment) -> Result<View> {
    let volume = assignment.job.output_volume();
    let job = assignment.job.name.as_str();
    let differs = |reason: &str| Error::Job {
        job: job.to_owned(),
        reason: format!(
            "the volumes of this worker are not those of the coordinator: {reason}; set meta_url, meta_schema and \
             store_url in [datafs] as they are there"
        ),
    };
    let view = match open_output(datafs, &assignment.job) {
        Ok(view) => view,
        Err(error) if is_missing(&error) => {
            return Err(differs(&format!("there is no volume {volume} here")));
        }
        Err(error) => return Err(error),
    };
    let key = Checkpoints::owner_key(job);
    let found = view.key_get(&key).map_err(|e| Error::volume(format!("read key {key} of {volume}"), e))?;
    if found.is_some_and(|owner| owner == assignment.owner.as_bytes()) {
        return Ok(view);
    }
    match lease::read(&view, job)? {
        Some(record) if assignment.fence > 0 && record.fence > assignment.fence => Err(Error::Busy {
            job: job.to_owned(),
            reason: format!("{} has taken it over from this coordinator", record.describe()),
        }),
        _ => Err(differs(&format!("volume {volume} here is another one"))),
    }
}

/// Whether a volume does not exist.
fn is_missing(error: &Error) -> bool {
    error.of_datafs().any(|cause| matches!(cause, millrace_datafs::Error::NotFound { .. }))
}

/// Whether this machine's home or disk, which other workers do not share, cannot take a write.
fn is_own_place(error: &Error) -> bool {
    use millrace_datafs::Error as E;
    error
        .of_datafs()
        .any(|cause| matches!(cause, E::NotWritable { .. } | E::NoSpace { .. } | E::NoSpaceToCommit { .. }))
}

#[cfg(test)]
mod tests {
    use millrace_datafs::Error as E;

    use super::*;

    #[test]
    fn a_ring_listens_where_its_advertised_name_leads() {
        let own: IpAddr = Ipv4Addr::LOCALHOST.into();
        let connects =
            |ring: &Collective, ip: &str| std::net::TcpStream::connect((ip, ring.address().port())).is_ok();
        for advertised in [vec![], vec!["127.0.0.1:1".parse().unwrap()]] {
            let ring = bind_ring(own, &advertised).unwrap();
            assert_eq!(ring.address().ip(), own);
        }
        // A name of two addresses, of which the coordinator sees one.
        let advertised = ["127.0.0.2:1".parse().unwrap(), "127.0.0.1:1".parse().unwrap()];
        let ring = bind_ring(own, &advertised).unwrap();
        assert!(connects(&ring, "127.0.0.1") && connects(&ring, "127.0.0.2"), "{}", ring.address());
    }

    #[test]
    fn a_full_disk_or_a_store_away_concerns_a_joined_worker_alone() {
        let own = |error: E| {
            let error = Error::volume("write a checkpoint", error);
            is_own_place(&error) || error.is_local()
        };
        assert!(own(E::NoSpace { place: "/home".into(), quota: false }));
        let source = std::io::Error::from(std::io::ErrorKind::PermissionDenied);
        assert!(own(E::NotWritable { place: "/home".into(), source }));
        let source = "timeout".into();
        assert!(own(E::StoreAway { place: "s3://b".into(), operation: "read", tried_ms: 1, source }));
        assert!(!own(E::Unsupported("this")));
    }
}
