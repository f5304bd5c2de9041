//! Flags of `millrace serve bench`.

use std::path::PathBuf;

use clap::Args;
use millrace_serving::load::{CLIENTS_MAX, RATE_MAX};

use super::access::ServerArgs;

/// `millrace serve bench`
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// The model
    pub(crate) model: String,
    /// Which version [default: the newest]
    #[arg(long)]
    pub(crate) version: Option<u64>,
    /// Closed loops of so many clients, each waiting for its answers [default: 1,8,64 without --rate]
    #[arg(long, value_name = "CLIENTS", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=CLIENTS_MAX as i64))]
    pub(crate) concurrency: Vec<u32>,
    /// Open loops of so many requests per second, at times that do not depend on the answers
    #[arg(long, value_name = "RATE", value_delimiter = ',', value_parser = rate)]
    pub(crate) rate: Vec<f64>,
    /// Seconds that each load is measured
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    pub(crate) duration: f64,
    /// Seconds of each load before that
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    pub(crate) warm_up: f64,
    /// Rows of a request
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) rows: u32,
    /// A file with one JSON record per line, whose fields are the inputs [default: drawn by --seed]
    #[arg(long, value_name = "FILE")]
    pub(crate) data: Option<PathBuf>,
    /// Extents behind the rows of a drawn input that the model leaves open, as in image:3,224,224
    #[arg(long, value_name = "INPUT:EXTENTS", value_parser = shape, conflicts_with = "data")]
    pub(crate) shape: Vec<(String, Vec<i64>)>,
    /// Milliseconds after which an answer of an open loop comes too late; the server is told
    #[arg(long, value_name = "MS", requires = "rate", value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    pub(crate) deadline_ms: Option<u64>,
    /// Connections of an open loop
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=CLIENTS_MAX as i64))]
    pub(crate) connections: u32,
    /// Seed of the drawn inputs and of the times
    #[arg(long, default_value_t = 7)]
    pub(crate) seed: u64,
    /// Draw latency against rate into this SVG file
    #[arg(long, value_name = "FILE")]
    pub(crate) picture: Option<PathBuf>,
    /// Who is asked
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

fn rate(text: &str) -> Result<f64, String> {
    let rate = text.parse::<f64>().ok().filter(|rate| *rate > 0.0 && *rate <= RATE_MAX);
    rate.ok_or_else(|| format!("a rate is a number of requests per second, above 0 and at most {RATE_MAX}"))
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.01..=3600.0).contains(seconds));
    seconds.ok_or_else(|| "a number of seconds is from 0.01 to 3600".to_owned())
}

fn shape(text: &str) -> Result<(String, Vec<i64>), String> {
    let wrong = || "a shape is an input's name and its extents, as in image:3,224,224".to_owned();
    // Names of inputs may have colons in them, as those of TensorFlow's do.
    let (name, extents) = text.rsplit_once(':').filter(|(name, _)| !name.is_empty()).ok_or_else(wrong)?;
    let extents = extents.split(',').map(|extent| extent.trim().parse::<u32>().map(i64::from));
    Ok((name.to_owned(), extents.collect::<Result<_, _>>().map_err(|_| wrong())?))
}
