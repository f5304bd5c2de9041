//! Queue time of a model: the mean wait of its requests for a session, over all replicas and a window of time.
//!
//! Each look reads the counters of all replicas. The queue time is what they have grown by since the look at the
//! beginning of the window. Replicas that have come or started again since then count from the next look on.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::Result;
use futures::{StreamExt as _, stream};
use tokio::sync::Semaphore;

use crate::commands::serve::scrape::{metrics_lines, sample};
use crate::failure::{Exit, fail};

/// Deadline for the metrics of one replica, and for the resolution of a name.
const PATIENCE: Duration = Duration::from_secs(2);
/// Most bytes of the metrics of one replica.
const BYTES_MAX: usize = 4 << 20;
/// Replicas that a measurement asks at the same time.
const PARALLEL: usize = 32;
/// Replicas that all measurements ask at the same time. Each takes a buffer of at most half a mebibyte.
static ASKING: Semaphore = Semaphore::const_new(128);
/// Most addresses to which the endpoints of a trigger may resolve.
const ADDRESSES_MAX: usize = 256;
/// Least time between two looks that a measurement compares.
const BETWEEN: Duration = Duration::from_secs(1);
/// Looks that are kept in a window.
const LOOKS_PER_WINDOW: u32 = 8;

/// Counters of a model in one replica.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Counters {
    /// Microseconds that answered requests waited.
    queue_us: f64,
    /// Requests answered.
    answered: f64,
    /// Requests that wait now.
    pending: f64,
}

/// The counters of all replicas at a moment.
#[derive(Debug)]
struct Look {
    at: Instant,
    replicas: HashMap<SocketAddr, Counters>,
}

/// Earlier looks at one model, oldest first.
#[derive(Debug, Default)]
pub(super) struct History(VecDeque<Look>);

/// The HTTP client for metrics: no proxy, no redirections to other places.
pub(super) fn client() -> Result<reqwest::Client> {
    let client = reqwest::Client::builder().timeout(PATIENCE).no_proxy();
    Ok(client.redirect(reqwest::redirect::Policy::none()).build()?)
}

/// The mean queue time in milliseconds over the window.
///
/// # Errors
/// Names without an address, fewer than half of the replicas answering, or no replica that has the model.
pub(super) async fn measure(
    client: &reqwest::Client,
    history: &mut History,
    (model, version): (&str, Option<u64>),
    endpoints: &[String],
    window: Duration,
) -> Result<f64> {
    let addresses = resolve(model, endpoints).await?;
    history.forget(window);
    if history.0.is_empty() {
        let first = look(client, model, version, &addresses).await?;
        history.0.push_back(first);
    }
    if let Some(newest) = history.0.back()
        && newest.at.elapsed() < BETWEEN
        && history.0.len() == 1
    {
        tokio::time::sleep(BETWEEN.saturating_sub(newest.at.elapsed())).await;
    }
    let now = look(client, model, version, &addresses).await?;
    let queue_time = history.since(&now, window);
    history.keep(now, window);
    Ok(queue_time)
}

/// All addresses of the endpoints.
async fn resolve(model: &str, endpoints: &[String]) -> Result<BTreeSet<SocketAddr>> {
    let mut addresses = BTreeSet::new();
    for endpoint in endpoints {
        let cause = match tokio::time::timeout(PATIENCE, tokio::net::lookup_host(endpoint.as_str())).await {
            Ok(Ok(found)) => {
                addresses.extend(found.take(ADDRESSES_MAX + 1));
                continue;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {} s", PATIENCE.as_secs()),
        };
        return fail(
            Exit::Unavailable,
            format!(
                "the queue time of model {model} is unknown: {endpoint} has no address ({cause}); keep a replica running, \
                 or correct metrics"
            ),
        );
    }
    if addresses.len() > ADDRESSES_MAX {
        return fail(
            Exit::Usage,
            format!("metrics of model {model} resolve to more than {ADDRESSES_MAX} addresses; name fewer"),
        );
    }
    if addresses.is_empty() {
        return fail(
            Exit::Unavailable,
            format!(
                "the queue time of model {model} is unknown: its metrics have no address; keep a replica running"
            ),
        );
    }
    Ok(addresses)
}

/// Reads the counters of all replicas.
async fn look(
    client: &reqwest::Client,
    model: &str,
    version: Option<u64>,
    addresses: &BTreeSet<SocketAddr>,
) -> Result<Look> {
    let at = Instant::now();
    let asked = stream::iter(addresses.iter().copied()).map(|address| async move {
        // The semaphore is never closed.
        let _asking = ASKING.acquire().await;
        let mut sum = Sum::of(model, version);
        let read = metrics_lines(client, &address.to_string(), BYTES_MAX, |line| sum.add(line)).await;
        (address, read.map(|()| sum.counters))
    });
    let answers: Vec<_> = asked.buffer_unordered(PARALLEL).collect().await;
    let mut replicas = HashMap::new();
    let (mut answered, mut failure) = (0, String::new());
    for (address, answer) in answers {
        match answer {
            Ok(found) => {
                answered += 1;
                replicas.extend(found.map(|counters| (address, counters)));
            }
            Err(reason) => failure = reason,
        }
    }
    if answered * 2 < addresses.len() {
        return fail(
            Exit::Unavailable,
            format!(
                "the queue time of model {model} is unknown: {answered} of {} replicas gave their metrics ({failure})",
                addresses.len()
            ),
        );
    }
    if replicas.is_empty() {
        let version = version.map_or(String::new(), |version| format!(" version {version}"));
        return fail(
            Exit::NotFound,
            format!(
                "the queue time of model {model}{version} is unknown: none of {answered} replicas has it loaded; correct \
                 model, or publish it"
            ),
        );
    }
    Ok(Look { at, replicas })
}

/// The sum of a model's counters over its versions, line by line.
struct Sum<'m> {
    model: &'m str,
    version: Option<String>,
    /// None while no line is of the model.
    counters: Option<Counters>,
}

impl Sum<'_> {
    fn of(model: &str, version: Option<u64>) -> Sum<'_> {
        Sum { model, version: version.map(|version| version.to_string()), counters: None }
    }

    /// Adds a line of the metrics.
    fn add(&mut self, line: &str) {
        if !line.starts_with("nv_inference_") {
            return;
        }
        let Some((name, labels, value)) = sample(line) else { return };
        let label =
            |wanted: &str| labels.iter().find(|(name, _)| name == wanted).map(|(_, value)| value.as_str());
        let is_version = self.version.is_none() || label("version") == self.version.as_deref();
        if label("model") != Some(self.model) || !is_version || !value.is_finite() || value < 0.0 {
            return;
        }
        let into = self.counters.get_or_insert_default();
        match name {
            "nv_inference_queue_duration_us" => into.queue_us += value,
            "nv_inference_request_success" => into.answered += value,
            "nv_inference_pending_request_count" => into.pending += value,
            _ => {}
        }
    }
}

impl History {
    /// Drops looks that are too old to begin a window.
    fn forget(&mut self, window: Duration) {
        while self.0.front().is_some_and(|look| look.at.elapsed() > window * 2) {
            self.0.pop_front();
        }
    }

    /// The queue time in milliseconds from the beginning of the window, or the oldest look in it, until `now`.
    fn since(&self, now: &Look, window: Duration) -> f64 {
        let is_before = |look: &&Look| now.at.saturating_duration_since(look.at) >= window;
        let Some(begin) = self.0.iter().rev().find(is_before).or_else(|| self.0.front()) else { return 0.0 };
        let (mut queue_us, mut answered, mut stuck) = (0.0, 0.0, false);
        for (address, counters) in &now.replicas {
            let Some(before) = begin.replicas.get(address) else { continue };
            let waited = counters.queue_us - before.queue_us;
            let done = counters.answered - before.answered;
            if waited < 0.0 || done < 0.0 {
                // Started again.
                continue;
            }
            queue_us += waited;
            answered += done;
            stuck |= done == 0.0 && before.pending > 0.0 && counters.pending > 0.0;
        }
        match answered > 0.0 {
            true => queue_us / answered / 1_000.0,
            // Requests wait, and none was answered: they wait for as long as that.
            false if stuck => now.at.saturating_duration_since(begin.at).as_secs_f64() * 1_000.0,
            false => 0.0,
        }
    }

    /// Keeps a look for later windows, and only one look from before the current window.
    fn keep(&mut self, look: Look, window: Duration) {
        let spacing = window / LOOKS_PER_WINDOW;
        let is_soon = |last: &Look| look.at.saturating_duration_since(last.at) < spacing;
        if self.0.len() > 1 && self.0.back().is_some_and(is_soon) {
            return;
        }
        let now = look.at;
        self.0.push_back(look);
        while self.0.get(1).is_some_and(|second| now.saturating_duration_since(second.at) >= window) {
            self.0.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counters(text: &str, model: &str, version: Option<u64>) -> Option<Counters> {
        let mut sum = Sum::of(model, version);
        text.lines().for_each(|line| sum.add(line));
        sum.counters
    }

    fn at(start: Instant, seconds: u64, replicas: &[(u16, f64, f64, f64)]) -> Look {
        let replica = |(port, queue_us, answered, pending): &(u16, f64, f64, f64)| {
            let counters = Counters { queue_us: *queue_us, answered: *answered, pending: *pending };
            (SocketAddr::from(([127, 0, 0, 1], *port)), counters)
        };
        Look { at: start + Duration::from_secs(seconds), replicas: replicas.iter().map(replica).collect() }
    }

    #[test]
    fn counters_of_a_model_are_summed_over_its_versions() {
        let text = "nv_inference_queue_duration_us{model=\"m\",version=\"1\"} 5\n\
            nv_inference_queue_duration_us{model=\"m\",version=\"2\"} 7\n\
            nv_inference_queue_duration_us{model=\"n\",version=\"1\"} 100\n\
            nv_inference_request_success{model=\"m\",version=\"2\"} 3\n\
            nv_inference_pending_request_count{model=\"m\",version=\"2\"} 2\n\
            nv_inference_pending_request_count{model=\"m\",version=\"2\"} NaN\n";
        let all = Counters { queue_us: 12.0, answered: 3.0, pending: 2.0 };
        assert_eq!(counters(text, "m", None), Some(all));
        assert_eq!(counters(text, "m", Some(1)), Some(Counters { queue_us: 5.0, ..Counters::default() }));
        assert_eq!(counters(text, "m", Some(3)), None);
        assert_eq!(counters(text, "other", None), None);
    }

    #[test]
    fn queue_time_is_what_the_replicas_have_waited_since_the_window_began() {
        let (start, window) = (Instant::now(), Duration::from_secs(10));
        let mut history = History::default();
        history.keep(at(start, 0, &[(1, 0.0, 0.0, 0.0), (2, 9_000.0, 9.0, 0.0)]), window);
        // Replica 1: 10 requests of 2 ms; replica 2 started again; replica 3 is new.
        let now = at(start, 5, &[(1, 20_000.0, 10.0, 0.0), (2, 0.0, 0.0, 0.0), (3, 1e9, 1.0, 0.0)]);
        assert_eq!(history.since(&now, window), 2.0);
        history.keep(now, window);
        // The window of 10 seconds begins at second 5 now.
        let later = at(start, 15, &[(1, 20_000.0, 10.0, 0.0), (3, 1e9, 1.0, 0.0)]);
        assert_eq!(history.since(&later, window), 0.0);
    }

    #[test]
    fn requests_of_which_none_is_answered_wait_since_the_window_began() {
        let (start, window) = (Instant::now(), Duration::from_secs(10));
        let mut history = History::default();
        history.keep(at(start, 0, &[(1, 0.0, 5.0, 3.0)]), window);
        assert_eq!(history.since(&at(start, 4, &[(1, 0.0, 5.0, 3.0)]), window), 4_000.0);
        assert_eq!(history.since(&at(start, 4, &[(1, 0.0, 5.0, 0.0)]), window), 0.0);
    }

    #[test]
    fn history_stays_small() {
        let (start, window) = (Instant::now(), Duration::from_secs(8));
        let mut history = History::default();
        for second in 0..100 {
            history.keep(at(start, second, &[(1, 0.0, 0.0, 0.0)]), window);
            assert!(history.0.len() <= LOOKS_PER_WINDOW as usize + 2, "{}", history.0.len());
        }
    }
}
