//! The feed: batches of a dataset snapshot in one global order that does not depend on the readers.
//!
//! - [`Plan`]: the dataset's row groups, the seed and the shape of the order under one hash.
//! - [`Feed`]: random access to any slots of any global batch ([`Feed::batch`]), or a stream of them
//!   ([`Feed::stream`]). Whole input groups in the order of the files ([`Feed::read_group`]).
//! - [`Shard`]: the slots that one reader takes. [`Cursor`]: the position to resume from.
//! - [`staging`]: batches in a ring of slots, on the host or on a GPU.
//! - [`ImageOptions`]: the transform of a column of images into tensors.
//! - [`TokenOptions`]: the packing of a column of tokens into sequences of one length.
//! - [`BucketOptions`]: batches of rows with lists of like length.
//! - [`crate::dataset::OpenDataset::shared`]: decoded row groups that the processes of a node share.
//! - [`Epochs`]: epochs of all rows or of a part of them. [`Mixture`]: several datasets by weight, in one order.
//!
//! The feed interprets no rows beyond that, and stores no progress. Rows are selected by the plan ([`Selection`]).
//!
//! Invariants:
//! - The plan alone decides the row in each slot of each batch. The number of readers, timing, caches and the
//!   step where reading began have no influence.
//! - Each pass over the dataset delivers each row exactly once; nothing is padded or dropped, batches are always
//!   full, and passes roll over inside a batch.
//! - Resuming replays nothing.
//!
//! ```
//! # use std::sync::Arc;
//! use futures::StreamExt;
//! use millrace_streams::feed::{Feed, FeedOptions, Plan, PlanOptions, Shard};
//!
//! # async fn example(store: Arc<dyn object_store::ObjectStore>) -> millrace_streams::feed::Result<()> {
//! let plan = Plan::build(&store, "/train", &PlanOptions { seed: 7, ..PlanOptions::default() }).await?;
//! let feed = Feed::open(plan, store, &FeedOptions::default())?;
//! let steps = feed.plan().steps_for_epochs(1) as usize;
//! let mut batches = feed.stream(Shard::new(0, 2)?, feed.plan().cursor(0))?.take(steps);
//! while let Some(batch) = batches.next().await {
//!     let batch = batch?;
//!     println!("step {}: {} rows, epochs {:?}", batch.step, batch.rows.len(), batch.epochs.last());
//! }
//! # Ok(())
//! # }
//! ```

mod any;
mod assembly;
mod batch;
pub(crate) mod buckets;
mod cache;
mod coverage;
mod cursor;
mod decimal;
mod epoch;
pub(crate) mod error;
#[cfg(feature = "flight")]
pub mod flight;
mod footer;
mod gather;
mod hash;
pub(crate) mod image;
mod ipc;
pub mod metrics;
mod mixture;
mod node;
mod order;
mod patience;
mod permutation;
mod pick;
mod places;
mod plan;
mod reader;
pub(crate) mod select;
mod shard;
pub(crate) mod source;
pub mod staging;
mod statistics;
mod stream;
pub(crate) mod tokens;

pub use any::AnyFeed;
pub use batch::{Feed, FeedBatch, FeedOptions};
pub use buckets::{BUCKETS_MAX, BucketOptions, Buckets};
pub use coverage::{Coverage, CoverageReport, Rows};
pub use cursor::Cursor;
pub use epoch::{EpochRows, Epochs};
pub use error::{FeedError, Result};
pub use image::{
    Channels, Crop, DecodedImage, Filter as ImageFilter, IMAGE_PIXELS_MAX, IMAGE_SIDE_MAX, ImageError,
    ImageOptions, Layout, Values,
};
pub use mixture::{MixedSpec, Mixture, MixtureFeed, MixtureSource, Until, Weight};
pub use permutation::{Permutation, derive_key};
pub use plan::{
    ALGORITHM_VERSION, BATCH_ROWS_MAX, InputGroup, LANES_MAX, Plan, PlanId, PlanOptions, RowAddress,
    WINDOW_ROWS_MAX,
};
pub use select::{Filter, Selection, Split};
pub use shard::Shard;
pub use statistics::{ColumnSummary, Statistics};
pub use stream::FeedStream;
pub use tokens::{
    IGNORED_LABEL, LABELS_COLUMN, POSITIONS_COLUMN, Packing, SEGMENTS_COLUMN, SEQUENCE_LENGTH_MAX,
    TokenLabels, TokenOptions,
};

pub(crate) use footer::read_footer;
