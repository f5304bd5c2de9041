//! `millrace serve bench`: puts load on a model server and reports its latencies.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use millrace_serving::client::Client;
use millrace_serving::load::{Closed, Measured, Open, Requests, closed_with, open_with};
use millrace_serving::record::{self, Mapping, Row};
use serde::Serialize;

use crate::cli::BenchArgs;
use crate::context::Context;
use crate::credentials::credentials;
use crate::failure::{Exit, fail, failure};
use crate::inference::server;
use crate::output::{count, duration};

/// Default numbers of clients.
const CLIENTS: [u32; 3] = [1, 8, 64];
/// Most records of a file that are sent, in rotation.
const RECORDS_MAX: usize = 65_536;
/// Largest file of records, in bytes.
const DATA_BYTES_MAX: u64 = 256 << 20;
/// The quantiles that are reported, with their names.
const QUANTILES: [(&str, f64); 4] = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999)];

/// One load.
#[derive(Debug, Clone, Copy)]
enum Load {
    Closed(Closed),
    Open(Open),
}

/// The measurements of one load, for programs. Times are in microseconds.
#[derive(Debug, Serialize)]
struct LoadReport {
    #[serde(skip_serializing_if = "Option::is_none")]
    clients: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rate: Option<f64>,
    answered_per_second: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    in_time_per_second: Option<f64>,
    answered: u64,
    failed: BTreeMap<&'static str, u64>,
    not_sent: u64,
    latency_us: BTreeMap<&'static str, f64>,
    limits: Vec<String>,
}

/// Runs the command.
pub(crate) async fn run(context: &Context, args: BenchArgs) -> Result<()> {
    let work = bench(context, args);
    tokio::select! {
        done = work => done,
        () = context.stop.cancelled() => fail(Exit::Failed, "bench was interrupted"),
    }
}

async fn bench(context: &Context, args: BenchArgs) -> Result<()> {
    if args.picture.is_some() {
        let reason =
            "--picture is refused: bench draws no plots any more; plot the figures that --json prints";
        return fail(Exit::Usage, reason);
    }
    let address = server(context, args.server.grpc.as_deref());
    let credentials = credentials(&args.server)?;
    let client = Client::connect_with(&address, &credentials).await?;
    let requests = requests(context, &args, client).await?;
    let loads = loads(&args);
    let bar = context.out.progress("bench", "loads", Some(loads.len() as u64));
    let mut done = Vec::with_capacity(loads.len());
    for load in loads {
        let measured = match &load {
            Load::Closed(load) => closed_with(&address, &credentials, &requests, load).await,
            Load::Open(load) => open_with(&address, &credentials, &requests, load).await,
        };
        done.push((load, measured?));
        bar.inc(1);
    }
    bar.finish_and_clear();
    show(context, &args, &done)?;
    if done.iter().all(|(_, measured)| measured.latency.count() == 0) {
        return fail(Exit::Failed, "no request succeeded");
    }
    Ok(())
}

/// The requests of the load; the server has answered the first one.
async fn requests(context: &Context, args: &BenchArgs, mut client: Client) -> Result<Requests> {
    let asked = args.version.map(|version| version.to_string()).unwrap_or_default();
    let signature = client.signature(&args.model, &asked).await?;
    let requests = match args.data.clone() {
        Some(path) => {
            let mapping = Mapping::new(&signature, &BTreeMap::new())?;
            let reading = mapping.clone();
            let rows = context.run_abandonable(move || read(&path, &reading)).await?;
            Requests::from_rows(&args.model, args.version, &mapping, &rows, args.rows as usize)
        }
        None => {
            let shapes = args.shape.iter().cloned().collect();
            let rows = args.rows as usize;
            Requests::generated(&args.model, args.version, &signature, rows, &shapes, args.seed)
        }
    };
    let requests = requests.map_err(|error| failure(Exit::Usage, error.to_string()))?;
    client.infer_message(requests.first()).await.context("the first request was refused")?;
    Ok(requests)
}

/// Reads records as inputs of a model.
fn read(path: &Path, mapping: &Mapping) -> Result<Vec<Row>> {
    let shown = path.display();
    let file = File::open(path).with_context(|| format!("cannot read {shown}"))?;
    let mut lines = BufReader::new(file.take(DATA_BYTES_MAX + 1));
    let (mut rows, mut bytes, mut number) = (Vec::new(), 0, 0);
    let mut line = Vec::new();
    while rows.len() < RECORDS_MAX {
        line.clear();
        let read = lines.read_until(b'\n', &mut line).with_context(|| format!("cannot read {shown}"))?;
        if read == 0 {
            break;
        }
        bytes += read as u64;
        number += 1;
        if bytes > DATA_BYTES_MAX {
            return fail(
                Exit::Usage,
                format!(
                    "{shown}: the first {RECORDS_MAX} records have more than {DATA_BYTES_MAX} bytes, give fewer"
                ),
            );
        }
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        match record::parse(&line).and_then(|record| mapping.row(&record)) {
            Ok(row) => rows.push(row),
            Err(error) => return fail(Exit::Usage, format!("{shown}, line {number}: {error}")),
        }
    }
    Ok(rows)
}

/// The requested loads, in order.
fn loads(args: &BenchArgs) -> Vec<Load> {
    let clients = match (&args.concurrency[..], &args.rate[..]) {
        ([], []) => &CLIENTS[..],
        (clients, _) => clients,
    };
    let (warm_up, duration) = (Duration::from_secs_f64(args.warm_up), Duration::from_secs_f64(args.duration));
    let closed = clients.iter().map(|clients| Closed { clients: *clients as usize, warm_up, duration });
    let open = args.rate.iter().map(|rate| Open {
        rate: *rate,
        connections: args.connections as usize,
        deadline: args.deadline_ms.map(Duration::from_millis),
        warm_up,
        duration,
        seed: args.seed,
    });
    closed.map(Load::Closed).chain(open.map(Load::Open)).collect()
}

impl Load {
    fn name(&self) -> String {
        match self {
            Load::Closed(load) if load.clients == 1 => "1 client".to_owned(),
            Load::Closed(load) => format!("{} clients", load.clients),
            Load::Open(load) => format!("{}/s", load.rate),
        }
    }

    fn shown(&self, measured: &Measured) -> LoadReport {
        let (clients, rate, deadline) = match self {
            Load::Closed(load) => (Some(load.clients), None, None),
            Load::Open(load) => (None, Some(load.rate), load.deadline),
        };
        let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
        let quantiles = QUANTILES.map(|(name, quantile)| (name, micros(measured.latency.quantile(quantile))));
        let others = [("mean", micros(measured.latency.mean())), ("max", micros(measured.latency.longest()))];
        LoadReport {
            clients,
            rate,
            answered_per_second: measured.rate(),
            in_time_per_second: deadline.map(|_| measured.goodput()),
            answered: measured.latency.count(),
            failed: measured.failed.clone(),
            not_sent: measured.unsent,
            latency_us: quantiles.into_iter().chain(others).collect(),
            limits: measured.limits(),
        }
    }
}

fn show(context: &Context, args: &BenchArgs, done: &[(Load, Measured)]) -> Result<()> {
    let shown: Vec<LoadReport> = done.iter().map(|(load, measured)| load.shown(measured)).collect();
    let rows = done.iter().map(|(load, measured)| {
        let latency = &measured.latency;
        let mut row = vec![load.name(), count(measured.rate().round() as u64)];
        row.extend(QUANTILES.map(|(_, quantile)| duration(latency.quantile(quantile))));
        row.push(duration(latency.longest()));
        let failed =
            measured.failed.iter().map(|(status, requests)| format!("{} {status}", count(*requests)));
        let unsent = (measured.unsent > 0).then(|| format!("{} not sent", count(measured.unsent)));
        row.push(failed.chain(unsent).collect::<Vec<_>>().join(", "));
        row
    });
    let value = serde_json::json!({
        "model": args.model, "version": args.version, "rows": args.rows, "seconds": args.duration, "loads": shown,
    });
    let headers = ["load", "answered/s", "p50", "p90", "p99", "p99.9", "max", "failed"];
    context.out.table(&value, &headers, rows)?;
    if !context.out.is_json() {
        for (load, measured) in done {
            for limit in measured.limits() {
                context.out.note(&format!("{}: limited by this client: {limit}", load.name()));
            }
        }
    }
    Ok(())
}
