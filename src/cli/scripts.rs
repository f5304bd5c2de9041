//! Arguments of `millrace train --script`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use millrace_datafs::Name;
use millrace_streams::dataset::DatasetSpec;
use millrace_trainer::script::Framework;

/// A script in place of a job file.
#[derive(Debug, Args)]
#[command(next_help_heading = "A script")]
pub(crate) struct ScriptArgs {
    /// The script: a .py file for Python, or an executable file. Every node needs it at this path
    #[arg(long, value_name = "FILE")]
    pub(crate) script: Option<PathBuf>,
    /// Processes of each node
    #[arg(long, value_name = "N", default_value_t = 1, requires = "script", conflicts_with = "job",
          value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) nproc_per_node: u32,
    /// Nodes to wait for, and most nodes [default: 1, with --listen 1:256]
    #[arg(long, value_name = "MIN[:MAX]", requires = "script", conflicts_with = "job", value_parser = nodes)]
    pub(crate) nodes: Option<(u32, u32)>,
    /// New rounds that may follow a failure
    #[arg(long, value_name = "N", default_value_t = 3, requires = "script", conflicts_with = "job")]
    pub(crate) max_restarts: u32,
    /// Begin a new round at once when a node joins, not only after a failure
    #[arg(long, requires = "script", conflicts_with = "job")]
    pub(crate) restart_on_join: bool,
    /// Seconds to wait for nodes
    #[arg(long, value_name = "SECONDS", default_value_t = 600, requires = "script", conflicts_with = "job",
          value_parser = clap::value_parser!(u64).range(..=SECONDS_MAX))]
    pub(crate) join_timeout: u64,
    /// Seconds between SIGTERM and SIGKILL
    #[arg(long, value_name = "SECONDS", default_value_t = 30, requires = "script", conflicts_with = "job",
          value_parser = clap::value_parser!(u64).range(..=SECONDS_MAX))]
    pub(crate) grace: u64,
    /// The Python interpreter; MILLRACE_PYTHON of a node comes first [default: python3]
    #[arg(long, value_name = "PROGRAM", requires = "script", conflicts_with = "job")]
    pub(crate) python: Option<String>,
    /// Whose environment the processes get beside RANK, WORLD_SIZE and MASTER_ADDR
    #[arg(long, value_enum, default_value_t = FrameworkArg::Torch, requires = "script", conflicts_with = "job")]
    pub(crate) framework: FrameworkArg,
    /// Parameter servers of all nodes, beside the processes of --nproc-per-node
    #[arg(long, value_name = "N", default_value_t = 0, requires = "script", conflicts_with = "job",
          value_parser = clap::value_parser!(u32).range(..=256))]
    pub(crate) servers: u32,
    /// Write the output of each process to a file in DIR instead of the terminal
    #[arg(long, value_name = "DIR", requires = "script", conflicts_with = "job")]
    pub(crate) log_dir: Option<PathBuf>,
    /// The dataset that the script reads: checked, recorded, and passed on as MILLRACE_DATASET
    #[arg(long, value_name = "VOLUME@SNAPSHOT:/PATH", requires = "script", conflicts_with = "job")]
    pub(crate) dataset: Option<DatasetSpec>,
    /// Name of the job in `millrace runs` [default: the script's name]
    #[arg(long, requires = "script", conflicts_with = "job")]
    pub(crate) name: Option<Name>,
    /// Volume with the record of the run
    #[arg(long, default_value = "models", requires = "script", conflicts_with = "job")]
    pub(crate) volume: Name,
    /// Arguments of the script, after --
    #[arg(last = true, value_name = "ARGS", requires = "script", conflicts_with = "job")]
    pub(crate) args: Vec<String>,
}

/// Longest wait that can be set: a year.
const SECONDS_MAX: u64 = 366 * 24 * 3600;

/// The framework of a script.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FrameworkArg {
    /// PyTorch, JAX and all that read RANK: nothing more
    Torch,
    /// TF_CONFIG; servers are of the type ps
    Tensorflow,
    /// DMLC_*, with a scheduler process
    Mxnet,
}

impl From<FrameworkArg> for Framework {
    fn from(framework: FrameworkArg) -> Framework {
        match framework {
            FrameworkArg::Torch => Framework::Torch,
            FrameworkArg::Tensorflow => Framework::Tensorflow,
            FrameworkArg::Mxnet => Framework::Mxnet,
        }
    }
}

/// `MIN:MAX`, or one number for both.
fn nodes(text: &str) -> Result<(u32, u32), String> {
    let number = |text: &str| text.parse::<u32>().ok().filter(|count| (1..=10_000).contains(count));
    let (min, max) = text.split_once(':').unwrap_or((text, text));
    match (number(min), number(max)) {
        (Some(min), Some(max)) if min <= max => Ok((min, max)),
        _ => Err("expected MIN or MIN:MAX, from 1 to 10000".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_of_nodes_has_a_lower_and_an_upper_bound() {
        assert_eq!(nodes("2"), Ok((2, 2)));
        assert_eq!(nodes("1:4"), Ok((1, 4)));
        for wrong in ["", "0", "3:2", "1:", ":2", "a", "1:2:3", "-1", "1:99999999"] {
            assert!(nodes(wrong).is_err(), "{wrong}");
        }
    }
}
