//! The model bundle: the format shared by trainers and servers.
//!
//! A bundle is one version of one model, stored as
//!
//! ```text
//! <root>/<name>/<version>/model.onnx
//! <root>/<name>/<version>/model.onnx.data  where the graph keeps weights outside of itself
//! <root>/<name>/<version>/bundle.json      written last: signature, digests, lineage, metrics
//! ```
//!
//! which is also Triton's repository layout plus a manifest. The manifest may list further files, such as
//! [`Statistics`] of the inputs that a model was trained on. The crate works over any
//! [`object_store::ObjectStore`] and a root path: a volume, a snapshot of a volume, or a plain directory.
//!
//! The crate also reads folders in Triton's layout ([`PlainVersion`]), whose versions need no manifest if a
//! `config.pbtxt` is next to them. The server interprets that file.
//!
//! This crate is not a model server and runs no models. It reads, checks and writes bundles, and contains the
//! ONNX schema ([`onnx`]) for programs that build or read graphs.
//!
//! Invariants:
//! - a version without a complete, valid manifest does not exist for readers: [`list`] leaves it out
//!   ([`scan`] reports why) and [`load`] refuses it; versions in Triton's layout are separate
//!   ([`Listing::plain`], [`load_plain`]);
//! - every byte that [`load`] returns was compared with the SHA-256 digest in the manifest;
//! - no tensor of a graph keeps its elements in a file outside its version;
//! - versions are immutable: [`Bundle::write`] refuses to replace one;
//! - sizes, counts and paths in a manifest are bounded before any file is read ([`Limits`]).
//!
//! ```
//! # use millrace_bundle::{Bundle, Lineage, onnx};
//! # async fn example(model: onnx::ModelProto) -> Result<(), Box<dyn std::error::Error>> {
//! use prost::Message;
//!
//! let store = object_store::memory::InMemory::new();
//! let bundle = Bundle::new("digits", 1, model.encode_to_vec(), Lineage::default(), Default::default())?;
//! bundle.write(&store, "models").await?;
//!
//! let latest = millrace_bundle::list(&store, "models").await?.pop().ok_or("no model")?;
//! let bundle = millrace_bundle::load(&store, "models", &latest.name, latest.version).await?;
//! assert_eq!(bundle.manifest().signature.inputs[0].name, "input");
//! # Ok(())
//! # }
//! ```

mod bundle;
mod error;
mod external;
mod folder;
#[doc(hidden)]
pub mod fuzzing;
mod manifest;
mod outline;
mod repository;
mod signature;
mod statistics;

#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic)]
pub mod onnx {
    //! Types of the ONNX schema, generated from `proto/onnx.proto`. Scalars have explicit presence
    //! (`Option`), with accessors that return the default: `node.op_type()`.
    include!(concat!(env!("OUT_DIR"), "/onnx.rs"));
}

pub use bundle::Bundle;
pub use error::{Error, Result};
pub use folder::{
    CONFIG_FILE, FileBeside, FileStat, ModelFolder, PlainVersion, ROLLOUT_FILE, load_plain, read_model_file,
    replace_model_file,
};
pub use manifest::{
    FORMAT_VERSION, FileEntry, Imported, Lineage, MANIFEST_BYTES_MAX, MANIFEST_FILE, MODEL_FILE, Manifest,
    MixedDataset, Quantized, WRITING_FILE,
};
pub use repository::{
    Limits, Listing, ModelVersion, Skipped, VERSION_MAX, check_name, list, load, load_with, next_version,
    scan, scan_model,
};
pub use signature::{Datatype, Signature, TensorSpec};
pub use statistics::{FEATURES_MAX, Feature, Moments, STATISTICS_FILE, Statistics};

#[cfg(test)]
mod tests;
