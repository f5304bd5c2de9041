//! `millrace serve top`: the current activity of a model server, from its public calls and its metrics.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::Result;
use millrace_serving::client::{Client, ClientError};
use millrace_serving::wire::inference as pb;
use serde::Serialize;
use tokio::time::MissedTickBehavior;

use super::scrape::{Latencies, Scrape, Scraper};
use crate::cli::TopArgs;
use crate::context::Context;
use crate::credentials::credentials;
use crate::failure::{Exit, fail};
use crate::inference::server;
use crate::output::{count, duration, table};

/// Interval between requests for the list of versions, for which the server lists its store.
const INDEX_EVERY: Duration = Duration::from_secs(10);

/// Model and version.
type Version = (String, String);

/// Runs the command.
pub(crate) async fn run(context: &Context, args: TopArgs) -> Result<()> {
    let address = server(context, args.server.grpc.as_deref());
    let mut watched = WatchedServer {
        client: Client::connect_with(&address, &credentials(&args.server)?).await?,
        scraper: Scraper::new(&metrics(context, &args))?,
        address,
        model: args.model.clone(),
        index: Vec::new(),
        indexed: None,
    };
    let mut ticks = tokio::time::interval(Duration::from_secs_f64(args.interval));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut before: Option<Sample> = None;
    let mut shown = 0;
    loop {
        let look = async {
            ticks.tick().await;
            watched.sample().await
        };
        let look = tokio::select! {
            look = look => look?,
            () = context.stop.cancelled() => return Ok(()),
        };
        // The first measurement is only a baseline.
        if let Some(before) = &before {
            let shown_now = TopReport::new(&watched, before, &look);
            shown += 1;
            let more = args.count.is_none_or(|count| shown < count);
            let again = args.count != Some(1);
            if !context.out.sample(serde_json::to_value(&shown_now)?, || shown_now.text(), again)? || !more {
                return Ok(());
            }
        }
        before = Some(look);
    }
}

/// The metrics address: from the flag, of this home's server, or from the configuration.
fn metrics(context: &Context, args: &TopArgs) -> String {
    match (&args.metrics, &args.server.grpc) {
        (Some(address), _) => address.clone(),
        (None, None) => {
            let running = context.home.running().and_then(|running| running.metrics);
            running.unwrap_or(context.loaded.settings.serving.metrics).to_string()
        }
        // A server on another host has them at the configured port.
        (None, Some(grpc)) => {
            let host = grpc.split_once("://").map_or(grpc.as_str(), |(_, host)| host).trim_end_matches('/');
            let host = host.rsplit_once(':').map_or(host, |(host, _)| host);
            format!("{host}:{}", context.loaded.settings.serving.metrics.port())
        }
    }
}

/// The observed server.
struct WatchedServer {
    client: Client,
    scraper: Scraper,
    address: String,
    model: Option<String>,
    index: Vec<pb::repository_index_response::ModelIndex>,
    indexed: Option<Instant>,
}

/// Its counters at a moment.
struct Sample {
    at: Instant,
    ready: bool,
    statistics: HashMap<Version, pb::ModelStatistics>,
    scrape: std::result::Result<Scrape, String>,
}

impl WatchedServer {
    async fn sample(&mut self) -> Result<Sample> {
        if self.indexed.is_none_or(|at| at.elapsed() >= INDEX_EVERY) {
            self.index = match self.client.repository_index().await {
                Ok(index) => index,
                // Without the index, only versions with statistics are shown.
                Err(ClientError::Refused { code: tonic::Code::Unimplemented, .. }) => Vec::new(),
                Err(error) => return Err(error.into()),
            };
            self.indexed = Some(Instant::now());
        }
        let ready = self.client.server_ready().await?;
        let at = Instant::now();
        let statistics = self.client.statistics().await?;
        let scrape = self.scraper.scrape().await;
        let key = |of: &pb::ModelStatistics| (of.name.clone(), of.version.clone());
        let mut statistics: HashMap<_, _> = statistics.into_iter().map(|of| (key(&of), of)).collect();
        if let Some(model) = &self.model {
            statistics.retain(|(name, _), _| name == model);
            if statistics.is_empty() && !self.index.iter().any(|entry| entry.name == *model) {
                return fail(Exit::NotFound, format!("the server at {} has no model {model}", self.address));
            }
        }
        Ok(Sample { at, ready, statistics, scrape })
    }
}

/// The displayed data of an interval.
#[derive(Debug, Serialize)]
struct TopReport<'a> {
    server: &'a str,
    ready: bool,
    seconds: f64,
    requests_per_s: f64,
    models: Vec<Model>,
    /// Why percentiles and waiting requests are missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics_error: Option<&'a str>,
}

/// A version in an interval. Figures without measurements are absent.
#[derive(Debug, Serialize)]
struct Model {
    model: String,
    version: String,
    state: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    reason: String,
    requests_per_s: f64,
    rows_per_s: f64,
    failed_per_s: f64,
    waiting: Option<u64>,
    rows_per_run: Option<f64>,
    mean_us: Option<f64>,
    mean_queue_us: Option<f64>,
    p50_us: Option<f64>,
    p90_us: Option<f64>,
    p99_us: Option<f64>,
}

impl<'a> TopReport<'a> {
    fn new(watched: &'a WatchedServer, before: &Sample, now: &'a Sample) -> TopReport<'a> {
        let seconds = now.at.duration_since(before.at).as_secs_f64().max(1e-9);
        let mut states: Vec<(Version, String, String)> = watched
            .index
            .iter()
            .filter(|entry| watched.model.as_ref().is_none_or(|model| *model == entry.name))
            .map(|entry| {
                let key = (entry.name.clone(), entry.version.clone());
                (key, entry.state.clone(), entry.reason.clone())
            })
            .collect();
        for key in now.statistics.keys() {
            // The index may be older than a version that was just loaded.
            match states.iter_mut().find(|(known, ..)| known == key) {
                Some((_, state, reason)) => {
                    "READY".clone_into(state);
                    reason.clear();
                }
                None => states.push((key.clone(), "READY".to_owned(), String::new())),
            }
        }
        let number = |text: &str| text.parse::<u64>().unwrap_or(u64::MAX);
        states.sort_by(|((a, v), ..), ((b, w), ..)| (a, number(v), v).cmp(&(b, number(w), w)));
        let models: Vec<Model> = states
            .into_iter()
            .map(|(key, state, reason)| Model::new(key, state, reason, before, now, seconds))
            .collect();
        TopReport {
            server: &watched.address,
            ready: now.ready,
            seconds,
            requests_per_s: models.iter().map(|model| model.requests_per_s).sum(),
            models,
            metrics_error: now.scrape.as_ref().err().map(String::as_str),
        }
    }

    fn text(&self) -> String {
        let time = |micros: Option<f64>| {
            micros.map_or(String::new(), |micros| duration(Duration::from_nanos((micros * 1e3) as u64)))
        };
        let rate = |per_s: f64| match per_s {
            0.0 => String::new(),
            slow if slow < 10.0 => format!("{slow:.1}"),
            fast => count(fast.round() as u64),
        };
        let row = |model: &Model| {
            vec![
                model.model.clone(),
                model.version.clone(),
                match model.reason.as_str() {
                    "" => model.state.to_lowercase(),
                    reason => format!("{}: {reason}", model.state.to_lowercase()),
                },
                rate(model.requests_per_s),
                rate(model.rows_per_s),
                rate(model.failed_per_s),
                model.waiting.filter(|waiting| *waiting > 0).map_or(String::new(), count),
                model.rows_per_run.map_or(String::new(), |rows| format!("{rows:.1}")),
                time(model.mean_us),
                time(model.mean_queue_us),
                time(model.p50_us),
                time(model.p90_us),
                time(model.p99_us),
            ]
        };
        let state = if self.ready { "ready" } else { "not ready" };
        let all = match self.requests_per_s {
            0.0 => "0".to_owned(),
            per_s => rate(per_s),
        };
        let mut lines = vec![format!("{}, {state}, {all} requests/s in {:.1} s", self.server, self.seconds)];
        if self.models.is_empty() {
            lines.push("no models".to_owned());
        } else {
            let headers = [
                "model",
                "version",
                "state",
                "requests/s",
                "rows/s",
                "failed/s",
                "waiting",
                "rows/run",
                "mean",
                "queue",
                "p50",
                "p90",
                "p99",
            ];
            lines.push(table(&headers, self.models.iter().map(row)));
        }
        if let Some(error) = self.metrics_error {
            lines.push(format!(
                "no percentiles and no waiting requests: {error} (--metrics names the address)"
            ));
        }
        lines.join("\n")
    }
}

impl Model {
    fn new(
        key: Version,
        state: String,
        reason: String,
        before: &Sample,
        now: &Sample,
        seconds: f64,
    ) -> Model {
        let new = now.statistics.get(&key).map(Counts::of).unwrap_or_default();
        let old = before.statistics.get(&key).map(Counts::of).unwrap_or_default();
        let done = new.since(old);
        let scrapes = now.scrape.as_ref().ok().zip(before.scrape.as_ref().ok());
        let latencies = scrapes.and_then(|(new, old)| Some(new.latencies(&key)?.since(old.latencies(&key))));
        let quantile = |q| latencies.as_ref().and_then(|latencies: &Latencies| latencies.quantile(q));
        let micros = |nanos: u64| (done.requests > 0).then(|| nanos as f64 / done.requests as f64 / 1e3);
        Model {
            requests_per_s: done.requests as f64 / seconds,
            rows_per_s: done.rows as f64 / seconds,
            failed_per_s: done.failed as f64 / seconds,
            waiting: now.scrape.as_ref().ok().and_then(|scrape| scrape.waiting(&key)),
            rows_per_run: (done.runs > 0).then(|| done.rows as f64 / done.runs as f64),
            mean_us: micros(done.nanos),
            mean_queue_us: micros(done.queue_nanos),
            p50_us: quantile(0.5).map(|seconds| seconds * 1e6),
            p90_us: quantile(0.9).map(|seconds| seconds * 1e6),
            p99_us: quantile(0.99).map(|seconds| seconds * 1e6),
            model: key.0,
            version: key.1,
            state,
            reason,
        }
    }
}

/// Counters of a version since it was loaded.
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    requests: u64,
    rows: u64,
    runs: u64,
    failed: u64,
    nanos: u64,
    queue_nanos: u64,
}

impl Counts {
    fn of(statistics: &pb::ModelStatistics) -> Counts {
        let steps = statistics.inference_stats.unwrap_or_default();
        let success = steps.success.unwrap_or_default();
        Counts {
            requests: success.count,
            rows: statistics.inference_count,
            runs: statistics.execution_count,
            failed: steps.fail.unwrap_or_default().count,
            nanos: success.ns,
            queue_nanos: steps.queue.unwrap_or_default().ns,
        }
    }

    /// The increase. Fewer requests than before mean that the version was reloaded.
    fn since(self, old: Counts) -> Counts {
        let old = if self.requests < old.requests { Counts::default() } else { old };
        Counts {
            requests: self.requests - old.requests,
            rows: self.rows.saturating_sub(old.rows),
            runs: self.runs.saturating_sub(old.runs),
            failed: self.failed.saturating_sub(old.failed),
            nanos: self.nanos.saturating_sub(old.nanos),
            queue_nanos: self.queue_nanos.saturating_sub(old.queue_nanos),
        }
    }
}
