//! Flags of version routing: model label, split, shadow.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use millrace_datafs::Name;
use millrace_serving::config::Target;

/// `millrace model label|split|shadow`
#[derive(Debug, Subcommand)]
pub(crate) enum RolloutCommand {
    /// Give a version of a model a name that clients can use instead of its number
    #[command(
        after_help = "The label is written to rollout.json beside the versions; servers apply it at their next scan of the\nrepository, once the version is ready, without losing a request.\n\nExamples:\n  millrace model label digits stable 4 --volume models\n  millrace model label digits canary --remove --models ./models"
    )]
    Label(LabelArgs),
    /// Split requests that name no version between versions, by weight
    #[command(
        after_help = "Weights are shares of their sum, so 95 and 5 equal 0.95 and 0.05. A split replaces the previous one as a\nwhole, also one in millrace.toml. A request with an id always goes to the same version; requests without\nan id are distributed in turn. The share of a version that is not ready goes to the others. Without\nweights, the current split is shown. It is written to rollout.json beside the versions, like labels;\nrunning servers apply it at their next scan of the repository, between two requests.\n\nExamples:\n  millrace model split digits stable=95 canary=5 --volume models\n  millrace model split digits 4=1 --models ./models\n  millrace model split digits --volume models --json\n  millrace model split digits --remove --volume models"
    )]
    Split(SplitArgs),
    /// Let a version run copies of requests that other versions answer, and compare the answers
    #[command(
        after_help = "A copy runs after its request was answered, so it delays no client, and its answer is discarded: the\nmetrics millrace_serving_shadow_… report its difference from the client's answer. A share of 0 copies\nnothing, even if millrace.toml has a shadow. Without a version, the current shadow is shown. It is\nwritten to rollout.json beside the versions, like labels; running servers apply it at their next scan.\n\nExamples:\n  millrace model shadow digits 5 0.1 --volume models\n  millrace model shadow digits canary 1 --models ./models\n  millrace model shadow digits --volume models --json\n  millrace model shadow digits --remove --volume models"
    )]
    Shadow(ShadowArgs),
}

impl RolloutCommand {
    /// Name of the command's model.
    pub(crate) fn model(&self) -> &str {
        match self {
            RolloutCommand::Label(args) => &args.model,
            RolloutCommand::Split(args) => &args.model,
            RolloutCommand::Shadow(args) => &args.model,
        }
    }

    /// The location of the model.
    pub(crate) fn place(&self) -> &ModelLocationArgs {
        match self {
            RolloutCommand::Label(args) => &args.place,
            RolloutCommand::Split(args) => &args.place,
            RolloutCommand::Shadow(args) => &args.place,
        }
    }
}

/// The location of a model
#[derive(Debug, Args)]
pub(crate) struct ModelLocationArgs {
    /// Volume that holds the model, below models/
    #[arg(long, conflicts_with = "models", required_unless_present = "models")]
    pub(crate) volume: Option<Name>,
    /// Folder that holds the model
    #[arg(long, value_name = "DIR")]
    pub(crate) models: Option<PathBuf>,
}

/// `millrace model label`
#[derive(Debug, Args)]
pub(crate) struct LabelArgs {
    /// Name of the model
    pub(crate) model: String,
    /// The label: a letter, then letters, digits, '.', '_', '-'
    pub(crate) label: String,
    /// The version, which must be complete
    #[arg(required_unless_present = "remove", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) version: Option<u64>,
    /// Remove the label
    #[arg(long, conflicts_with = "version")]
    pub(crate) remove: bool,
    /// The location of the model
    #[command(flatten)]
    pub(crate) place: ModelLocationArgs,
}

/// `millrace model split`
#[derive(Debug, Args)]
pub(crate) struct SplitArgs {
    /// Name of the model
    pub(crate) model: String,
    /// Versions or labels with their weights, as in stable=95 4=5 [default: show the current split]
    #[arg(value_name = "TARGET=WEIGHT", value_parser = weight)]
    pub(crate) weights: Vec<(Target, f64)>,
    /// Remove the split: millrace.toml's split applies again, or the newest version answers
    #[arg(long, conflicts_with = "weights")]
    pub(crate) remove: bool,
    /// The location of the model
    #[command(flatten)]
    pub(crate) place: ModelLocationArgs,
}

/// `millrace model shadow`
#[derive(Debug, Args)]
pub(crate) struct ShadowArgs {
    /// Name of the model
    pub(crate) model: String,
    /// The version that runs copies, or its label [default: show the current shadow]
    #[arg(requires = "share")]
    pub(crate) target: Option<Target>,
    /// Share of the requests to other versions to copy, from 0 to 1
    pub(crate) share: Option<f64>,
    /// Remove the shadow: millrace.toml's shadow applies again
    #[arg(long, conflicts_with = "target")]
    pub(crate) remove: bool,
    /// The location of the model
    #[command(flatten)]
    pub(crate) place: ModelLocationArgs,
}

fn weight(text: &str) -> Result<(Target, f64), String> {
    let wrong = || "a share is a version or a label and its weight, as in stable=95".to_owned();
    let (target, weight) = text.split_once('=').ok_or_else(wrong)?;
    Ok((target.parse()?, weight.parse().map_err(|_| wrong())?))
}
