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
    /// The version [default: by the model's split; without one the newest]
    #[arg(long)]
    pub(crate) version: Option<u64>,
    /// Numbers of clients in closed loops, each waiting for its answers [default: 1,8,64 without --rate]
    #[arg(long, value_name = "CLIENTS", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=CLIENTS_MAX as i64))]
    pub(crate) concurrency: Vec<u32>,
    /// Requests per second in open loops, at times that do not depend on the answers
    #[arg(long, value_name = "RATE", value_delimiter = ',', value_parser = rate)]
    pub(crate) rate: Vec<f64>,
    /// Seconds to measure each load
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    pub(crate) duration: f64,
    /// Seconds of each load before the measurement
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    pub(crate) warm_up: f64,
    /// Rows of a request
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) rows: u32,
    /// A file with one JSON record per line, whose fields are the inputs [default: random inputs by --seed]
    #[arg(long, value_name = "FILE")]
    pub(crate) data: Option<PathBuf>,
    /// Dimensions of a random input after the rows, if the model leaves them open, as in image:3,224,224
    #[arg(long, value_name = "INPUT:EXTENTS", value_parser = shape, conflicts_with = "data")]
    pub(crate) shape: Vec<(String, Vec<i64>)>,
    /// Deadline in milliseconds for answers of an open loop; sent to the server
    #[arg(long, value_name = "MS", requires = "rate", value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    pub(crate) deadline_ms: Option<u64>,
    /// Connections of an open loop
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=CLIENTS_MAX as i64))]
    pub(crate) connections: u32,
    /// Seed of the random inputs and of the request times
    #[arg(long, default_value_t = 7)]
    pub(crate) seed: u64,
    /// Refused: bench draws no plots any more
    #[arg(long, value_name = "FILE", hide = true)]
    pub(crate) picture: Option<PathBuf>,
    /// The model server
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
    // Input names may contain colons, as in TensorFlow.
    let (name, extents) = text.rsplit_once(':').filter(|(name, _)| !name.is_empty()).ok_or_else(wrong)?;
    let extents = extents.split(',').map(|extent| extent.trim().parse::<u32>().map(i64::from));
    Ok((name.to_owned(), extents.collect::<Result<_, _>>().map_err(|_| wrong())?))
}
