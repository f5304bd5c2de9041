//! Stages of a service: parts that stop together, and the restarts of failed ones.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use millrace_leaf::backoff::Backoff;
use prometheus::{IntCounterVec, IntGauge, IntGaugeVec, Opts};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::failure::Interrupted;

/// First pause before a restart of a part; doubled for each that follows.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// Longest pause before a restart.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// After this uptime, a part's end counts as the first failure again.
const WELL_AFTER: Duration = Duration::from_secs(120);

/// Consecutive failures of a part; 0 while it runs well.
static FAILURES: LazyLock<IntGaugeVec> = LazyLock::new(|| {
    let options = Opts::new(
        "millrace_up_part_failures",
        "Consecutive failures of a part of the service; 0 while it runs",
    );
    let gauge = IntGaugeVec::new(options, &["part"]).expect("a valid metric");
    prometheus::register(Box::new(gauge.clone())).expect("registered once");
    gauge
});

/// Restarts of a part after a failure.
static RESTARTS: LazyLock<IntCounterVec> = LazyLock::new(|| {
    let options =
        Opts::new("millrace_up_part_restarts_total", "Restarts of a part of the service after a failure");
    let counter = IntCounterVec::new(options, &["part"]).expect("a valid metric");
    prometheus::register(Box::new(counter.clone())).expect("registered once");
    counter
});

/// Whether a part waits: for a snapshot, a model, brokers, or its restart.
static WAITING: LazyLock<IntGaugeVec> = LazyLock::new(|| {
    let options = Opts::new(
        "millrace_up_part_waiting",
        "1 while a part of the service waits for a snapshot, a model or brokers, or before it is started again",
    );
    let gauge = IntGaugeVec::new(options, &["part"]).expect("a valid metric");
    prometheus::register(Box::new(gauge.clone())).expect("registered once");
    gauge
});

/// The metric that shows whether a part waits; set by the part's attempts.
#[derive(Clone)]
pub(super) struct WaitGauge(IntGauge);

impl WaitGauge {
    /// The gauge of a part.
    pub(super) fn of(part: &str) -> WaitGauge {
        WaitGauge(WAITING.with_label_values(&[part]))
    }

    /// Sets whether the part waits.
    pub(super) fn set(&self, waits: bool) {
        self.0.set(waits.into());
    }
}

/// Tasks that stop together.
pub(super) struct Stage {
    pub(super) stop: CancellationToken,
    tasks: JoinSet<Result<()>>,
    pauses: [Duration; 2],
}

impl Default for Stage {
    fn default() -> Stage {
        Stage { stop: CancellationToken::new(), tasks: JoinSet::new(), pauses: [PAUSE_MIN, PAUSE_MAX] }
    }
}

impl Stage {
    /// Runs a task whose failure ends the service.
    pub(super) fn spawn(&mut self, what: String, task: impl Future<Output = Result<()>> + Send + 'static) {
        self.tasks.spawn(async move { task.await.with_context(|| what) });
    }

    /// Runs a task that is restarted with growing pauses when it fails or panics; other tasks continue.
    pub(super) fn spawn_restarting<F>(&mut self, what: String, attempt: impl Fn() -> F + Send + 'static)
    where
        F: Future<Output = Result<()>> + Send + 'static,
    {
        let (stop, [pause_min, pause_max]) = (self.stop.clone(), self.pauses);
        let (failing, restarts) =
            (FAILURES.with_label_values(&[&what]), RESTARTS.with_label_values(&[&what]));
        let waiting = WaitGauge::of(&what);
        self.tasks.spawn(async move {
            let (mut failures, mut backoff) = (0_u32, Backoff::new(pause_min, pause_max));
            loop {
                let began = Instant::now();
                let mut running = AbortOnDropHandle::new(tokio::spawn(attempt()));
                let ended = tokio::select! {
                    ended = &mut running => ended,
                    () = tokio::time::sleep(WELL_AFTER) => {
                        failing.set(0);
                        running.await
                    }
                };
                // An attempt that ended while waiting has not reset the gauge.
                waiting.set(false);
                let error = match ended.map_err(anyhow::Error::from).and_then(|result| result) {
                    Ok(()) => {
                        failing.set(0);
                        return Ok(());
                    }
                    // The service stops in order: the commits of the attempt stay.
                    Err(error) if error.chain().any(|cause| cause.is::<Interrupted>()) => return Ok(()),
                    // A part that had failed before would not have ended well either.
                    Err(error) if stop.is_cancelled() && failures > 0 => {
                        tracing::error!(
                            part = what,
                            error = format!("{error:#}"),
                            "a failing part has stopped"
                        );
                        return Ok(());
                    }
                    Err(error) if stop.is_cancelled() => return Err(error.context(what)),
                    Err(error) => error,
                };
                if began.elapsed() >= WELL_AFTER {
                    failures = 0;
                    backoff.reset();
                }
                failures = failures.saturating_add(1);
                failing.set(failures.into());
                let pause = backoff.pause();
                tracing::error!(
                    part = what,
                    error = format!("{error:#}"),
                    failures,
                    pause_ms = pause.as_millis() as u64,
                    "a part of the service failed and is restarted; the others continue"
                );
                waiting.set(true);
                let stopped = stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_none();
                waiting.set(false);
                if stopped {
                    return Ok(());
                }
                restarts.inc();
            }
        });
    }

    /// Waits for all tasks; returns the first error and logs the others.
    pub(super) async fn finish(&mut self) -> Result<()> {
        self.stop.cancel();
        let mut first = Ok(());
        while let Some(ended) = self.tasks.join_next().await {
            if let Err(error) = ended.map_err(anyhow::Error::from).and_then(|result| result) {
                if first.is_ok() {
                    first = Err(error);
                } else {
                    tracing::error!(error = format!("{error:#}"), "a task failed while stopping");
                }
            }
        }
        first
    }

    /// The error of the first task that fails; pending while all run well.
    pub(super) async fn failed(&mut self) -> anyhow::Error {
        loop {
            match self.tasks.join_next().await {
                Some(Ok(Ok(()))) => {}
                Some(Ok(Err(error))) => return error,
                Some(Err(error)) => return error.into(),
                None => std::future::pending().await,
            }
        }
    }
}

#[cfg(test)]
mod tests {

    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    fn hasty() -> Stage {
        Stage { pauses: [Duration::from_millis(1); 2], ..Stage::default() }
    }

    #[tokio::test]
    async fn failed_part_restarts_until_it_succeeds() {
        let mut stage = hasty();
        let attempts = Arc::new(AtomicU32::new(0));
        let counted = attempts.clone();
        stage.spawn_restarting("first".into(), move || {
            let attempt = counted.fetch_add(1, Ordering::SeqCst);
            async move {
                match attempt {
                    0 => anyhow::bail!("one bad label"),
                    1 => panic!("a bug"),
                    _ => Ok(()),
                }
            }
        });
        while attempts.load(Ordering::SeqCst) < 3 {
            let failed = tokio::time::timeout(Duration::from_millis(5), stage.failed()).await;
            assert!(failed.is_err(), "{failed:?}");
        }
        stage.finish().await.unwrap();
        assert_eq!(attempts.load(Ordering::SeqCst), 3);
        assert_eq!(RESTARTS.with_label_values(&["first"]).get(), 2);
        assert_eq!(FAILURES.with_label_values(&["first"]).get(), 0);
        assert_eq!(WAITING.with_label_values(&["first"]).get(), 0);
    }

    #[tokio::test]
    async fn part_pauses_between_attempts_and_while_it_reports_waiting() {
        let mut stage = Stage { pauses: [Duration::from_secs(3600); 2], ..Stage::default() };
        let gauge = WaitGauge::of("waits");
        let (begin, mut begun) = tokio::sync::mpsc::unbounded_channel::<()>();
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let (attempt_gauge, ended) = (gauge.clone(), Arc::new(tokio::sync::Mutex::new(Some(ended))));
        stage.spawn_restarting("waits".into(), move || {
            let (gauge, ended, begin) = (attempt_gauge.clone(), ended.clone(), begin.clone());
            async move {
                gauge.set(true);
                begin.send(())?;
                if let Some(ended) = ended.lock().await.take() {
                    ended.await?;
                }
                gauge.set(false);
                begin.send(())?;
                anyhow::bail!("no such topic")
            }
        });
        begun.recv().await.unwrap();
        assert_eq!(gauge.0.get(), 1, "the attempt waits");
        end.send(()).unwrap();
        begun.recv().await.unwrap();
        // The pause of an hour begins as soon as the failure is counted.
        while gauge.0.get() == 0 {
            tokio::task::yield_now().await;
        }
        stage.finish().await.unwrap();
        assert_eq!(gauge.0.get(), 0, "the part has ended");
    }

    #[tokio::test]
    async fn a_part_that_always_fails_ends_with_the_service() {
        let mut stage = Stage::default();
        let (began, mut begins) = tokio::sync::mpsc::unbounded_channel();
        stage.spawn_restarting("second".into(), move || {
            began.send(()).unwrap();
            async { Err(anyhow::anyhow!("no such topic")) }
        });
        begins.recv().await.unwrap();
        // In its attempt, or in the pause after it: both end at once.
        let ended = tokio::time::timeout(Duration::from_secs(60), stage.finish()).await.unwrap();
        if let Err(error) = ended {
            assert_eq!(format!("{error:#}"), "second: no such topic");
        }
    }

    #[tokio::test]
    async fn part_interrupted_by_a_signal_is_not_a_failure() {
        let mut stage = hasty();
        stage.spawn_restarting("cut".into(), || async {
            Err(anyhow::Error::new(Interrupted).context("open volumes"))
        });
        stage.finish().await.unwrap();
    }

    #[tokio::test]
    async fn part_that_failed_before_does_not_fail_the_stop_of_the_service() {
        let mut stage = hasty();
        let (attempts, stop) = (Arc::new(AtomicU32::new(0)), stage.stop.clone());
        let counted = attempts.clone();
        stage.spawn_restarting("failing".into(), move || {
            let (attempt, stop) = (counted.fetch_add(1, Ordering::SeqCst), stop.clone());
            async move {
                if attempt > 0 {
                    stop.cancelled().await;
                }
                anyhow::bail!("one bad label")
            }
        });
        while attempts.load(Ordering::SeqCst) < 2 {
            tokio::task::yield_now().await;
        }
        stage.finish().await.unwrap();
    }
}
