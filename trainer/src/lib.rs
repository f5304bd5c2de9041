//! Elastic, deterministic training: ONNX in, ONNX out.
//!
//! A *job* ([`job::JobFile`]) names a dataset or a mixture at snapshots, a model and a stopping rule. [`train()`] runs it
//! with a coordinator in the calling process and worker processes that sum their gradients over a TCP ring.
//! It writes checkpoints to a volume and, at the end, publishes a model bundle.
//!
//! Contents:
//! - [`graph`], [`engine`], [`init`], [`optim`]: ONNX graphs, their gradients, their updates;
//! - [`quantize`]: graphs that compute with 8-bit integers;
//! - [`strategy`], [`fixed`], [`collective`]: how the gradients of the workers are summed;
//! - [`precision`]: number formats of products, and the scale of the loss;
//! - [`job`], [`mod@train`], [`worker`], [`launch`]: jobs and the processes that run them;
//! - [`runs`]: what the checkpoints of a volume tell of its runs;
//! - [`tensorboard`]: event files for TensorBoard;
//! - [`join`]: workers that join from other machines;
//! - [`script`]: Python scripts and other programs on the processes of several machines.
//!
//! Out of scope: landing topics in volumes (`ingest`), serving, and any data format
//! except Arrow columns and ONNX.
//!
//! Invariants:
//! - The published `model.onnx` depends on the job file, the rows and the first weights alone. The number of
//!   workers, their joins and deaths, restarts and the clock do not change it. With [`strategy::Strategy::Allreduce`]
//!   the number of workers changes it by rounding.
//! - Every row is part of exactly one applied step per epoch; the counts are part of the state in checkpoints
//!   and state transfers.
//! - Survivors of a dead worker never restart.
//! - A checkpoint or a bundle is visible whole or not at all; a run is published once.
//! - One process coordinates a job at a time. A numbered lease in the output volume's metadata elects it, and every
//!   write of it and of its workers expects that number.
//!
//! ```no_run
//! use millrace_trainer::{Setup, config::Config, job::JobFile, launch::WorkerCommand, train};
//! use tokio_util::sync::CancellationToken;
//!
//! # async fn example(datafs: millrace_datafs::Datafs) -> Result<(), Box<dyn std::error::Error>> {
//! let setup = Setup {
//!     datafs,
//!     kafka: None,
//!     home: "/var/lib/millrace".into(),
//!     datafs_config: millrace_datafs::Config::default(),
//!     config: Config::default(),
//!     // Must end in `millrace_trainer::worker::run()`.
//!     worker: WorkerCommand::current_exe(["worker"]),
//!     listen: None,
//!     standby: false,
//!     abandon_run: false,
//! };
//! let job = JobFile::load("train.toml".as_ref())?;
//! let report = train(job, setup, CancellationToken::new(), |p| println!("step {}", p.step)).await?;
//! println!("version {:?} after {} epochs", report.version, report.epochs);
//! # Ok(())
//! # }
//! ```

mod checkpoint;
pub mod collective;
pub mod config;
mod data;
mod elastic;
pub mod engine;
mod error;
pub mod fixed;
#[doc(hidden)]
pub mod fuzzing;
pub mod graph;
pub mod init;
pub mod job;
pub mod join;
mod labels;
mod last_run;
pub mod launch;
mod lease;
mod ledger;
mod lineage;
mod lock;
pub mod metrics;
mod model;
pub mod optim;
mod order;
mod outage;
mod output;
pub mod precision;
mod proof;
mod publish;
pub mod quantize;
mod reader;
mod replica;
pub mod runs;
mod scaling;
pub mod script;
mod shards;
mod source;
pub mod spent;
mod state;
mod statistics;
pub mod strategy;
mod teacher;
pub mod tensorboard;
pub mod train;
mod validation;
mod wide;
pub mod worker;

pub use checkpoint::Finish;
pub use config::Config;
pub use error::{Error, Result};
pub use labels::LABELS_FILE;
pub use ledger::EpochRecord;
pub use train::{Awaited, End, Progress, Setup, TrainReport, train};
pub use validation::Evaluation;

#[cfg(test)]
mod probe;
