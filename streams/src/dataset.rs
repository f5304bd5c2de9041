//! Datasets: a directory of data files of one kind, its row groups and its one schema.
//!
//! A dataset is found by listing, in a canonical order (byte order of the paths). Parquet and Arrow IPC files are
//! described by their footers alone; no row is read. JSON lines, CSV and tar files are read once, and cut into row
//! groups of bounded size. The description of a snapshot never changes, so a [`DatasetCache`] can keep it: in the
//! metadata, where all machines with the same volumes find it, and in the home.
//!
//! A bounded range of a topic is a dataset, too ([`TopicSpec`]).

mod cache;
mod column;
mod confined;
mod folder;
mod format;
mod listing;
mod pinned;
mod schema;
mod shared_cache;
mod source_spec;
mod spec;
mod topic;
mod types;
mod volume;

#[cfg(test)]
mod tests;

pub use cache::DatasetCache;
pub(crate) use format::Compression;
pub use format::FileFormat;
pub use source_spec::SourceSpec;
pub use spec::DatasetSpec;
pub use topic::{BadRecords, PartitionRange, Since, TopicRange, TopicSpec, Until as TopicUntil};
pub use volume::OpenDataset;

pub(crate) use cache::{CachedBuckets, CachedRows, CachedTokens};
pub(crate) use column::Column;
pub(crate) use schema::{Conflict, conform, decode_schema, encode_schema};

use std::sync::Arc;

use arrow::datatypes::{Schema, SchemaRef};
use futures::{StreamExt, TryStreamExt, stream};
use object_store::ObjectStore;
use serde::{Deserialize, Serialize};

use crate::feed::error::Result;
use crate::feed::source::{self, Described};
use crate::feed::{FeedError, read_footer};

pub(crate) use listing::{ListedFile, Listing};

/// Most files one dataset may have.
pub const FILES_MAX: usize = 1_000_000;
/// Most files one folder of classes may have: each is a row.
pub const FOLDER_FILES_MAX: usize = 2_000_000;
/// Most row groups one dataset may have.
pub const ROW_GROUPS_MAX: usize = 8_000_000;
/// Footers read at the same time.
const FOOTERS_CONCURRENT: usize = 16;

/// One row group of a file: the unit of reading.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowGroup {
    /// Number of rows.
    pub rows: u64,
    /// Estimated size once decoded to Arrow, all columns, in bytes.
    pub bytes: u64,
}

/// One file of a dataset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataFile {
    /// Path inside the store.
    pub path: String,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// Encoding of the file.
    pub format: FileFormat,
    /// Its row groups, in file order.
    pub row_groups: Vec<RowGroup>,
    /// Offsets in bytes at which the row groups of a file without a footer begin, then the end of the last one. Empty
    /// for files with a footer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cuts: Vec<u64>,
}

/// A described dataset: files in canonical order and the schema they share.
#[derive(Debug, Clone, PartialEq)]
pub struct Dataset {
    path: String,
    schema: SchemaRef,
    conflicts: Vec<Conflict>,
    files: Vec<DataFile>,
}

/// Content of a file's footer: schema and row groups.
pub(crate) struct Footer {
    pub(crate) schema: Schema,
    pub(crate) row_groups: Vec<RowGroup>,
}

impl Dataset {
    /// Lists the data files at or below `path` and reads their footers, sixteen at a time. Files without a footer
    /// are read whole.
    ///
    /// Files whose name (or a directory below `path`) starts with `.` or `_`, and files with other
    /// suffixes, are not data. Costs one listing and one small read per file with a footer.
    ///
    /// # Errors
    /// [`FeedError::NoFiles`], [`FeedError::NoRows`], [`FeedError::MixedFormats`]; [`FeedError::Corrupt`] and
    /// [`FeedError::Row`] naming the file; [`FeedError::Store`].
    pub async fn read(store: &Arc<dyn ObjectStore>, path: &str) -> Result<Self> {
        Self::read_as(store, path, None).await
    }

    /// As [`Dataset::read`], of files in one format, whatever their names say.
    ///
    /// # Errors
    /// Those of [`Dataset::read`].
    pub async fn read_as(
        store: &Arc<dyn ObjectStore>,
        path: &str,
        format: Option<FileFormat>,
    ) -> Result<Self> {
        let listing = Listing::read(store, path, format).await?;
        Self::from_listing(store, listing).await
    }

    /// As [`Dataset::read`], but takes the description from `cache` when the listing is unchanged (paths,
    /// sizes, tags and times), and stores it there otherwise.
    ///
    /// A cache that fails costs a warning and reading the footers, nothing else.
    pub async fn read_cached(
        store: &Arc<dyn ObjectStore>,
        path: &str,
        cache: Arc<dyn DatasetCache>,
    ) -> Result<Self> {
        Ok(Self::read_listed(store, path, None, cache).await?.0)
    }

    /// As [`Dataset::read_cached`], with the format of [`Dataset::read_as`] and the digest of the listing.
    pub(crate) async fn read_listed(
        store: &Arc<dyn ObjectStore>,
        path: &str,
        format: Option<FileFormat>,
        cache: Arc<dyn DatasetCache>,
    ) -> Result<(Self, String)> {
        let listing = Listing::read(store, path, format).await?;
        let digest = listing.digest();
        if let Some(found) = cache::lookup(&cache, &listing.path, &digest).await {
            return Ok((found, digest));
        }
        let dataset = Self::from_listing(store, listing).await?;
        cache::remember(cache, digest.clone(), &dataset).await;
        Ok((dataset, digest))
    }

    async fn from_listing(store: &Arc<dyn ObjectStore>, listing: Listing) -> Result<Self> {
        let path = listing.path.clone();
        if listing.files.first().is_some_and(|file| !file.format.has_footer()) {
            let Described { schema, conflicts, files } = source::describe(store, listing).await?;
            return Self::new(path, Arc::new(schema), conflicts, files);
        }
        let footers: Vec<(DataFile, Schema)> = stream::iter(listing.files)
            .map(|found| async move {
                let footer = read_footer(store, &found.path, found.bytes, found.format).await?;
                let file = DataFile {
                    path: found.path,
                    bytes: found.bytes,
                    format: found.format,
                    row_groups: footer.row_groups,
                    cuts: Vec::new(),
                };
                Ok::<_, FeedError>((file, footer.schema))
            })
            .buffered(FOOTERS_CONCURRENT)
            .try_collect()
            .await?;
        let (schema, conflicts) = schema::unify(footers.iter().map(|(f, s)| (f.path.as_str(), s)));
        let files = footers.into_iter().map(|(f, _)| f).collect();
        Self::new(path, Arc::new(schema), conflicts, files)
    }

    pub(crate) fn new(
        path: String,
        schema: SchemaRef,
        conflicts: Vec<Conflict>,
        files: Vec<DataFile>,
    ) -> Result<Self> {
        if files.is_empty() {
            return Err(FeedError::NoFiles { path, ignored: 0 });
        }
        let groups: usize = files.iter().map(|f| f.row_groups.len()).sum();
        if groups > ROW_GROUPS_MAX {
            let limit = ROW_GROUPS_MAX as u64;
            return Err(FeedError::TooLarge { path, what: "the number of row groups", limit });
        }
        // 2^56 rows: products with lanes and epochs stay far below 64 bits.
        let limit = 1u64 << 56;
        let rows = files
            .iter()
            .flat_map(|f| &f.row_groups)
            .try_fold(0u64, |sum, g| sum.checked_add(g.rows).filter(|&s| s <= limit));
        match rows {
            None => Err(FeedError::TooLarge { path, what: "the number of rows", limit }),
            Some(0) => Err(FeedError::NoRows { path, files: files.len() }),
            Some(_) => Ok(Self { path, schema, conflicts, files }),
        }
    }

    /// The path that was listed, inside its store.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The columns of all files together, in order of first appearance. A column that some files lack is
    /// nullable and reads as null there. A column is left out when its type differs between files, or when a
    /// file has it twice.
    pub fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// The columns that cannot be read.
    pub(crate) fn conflicts(&self) -> &[Conflict] {
        &self.conflicts
    }

    /// The files in canonical order.
    pub fn files(&self) -> &[DataFile] {
        &self.files
    }

    /// Rows of all files together; never 0.
    pub fn rows(&self) -> u64 {
        self.files.iter().flat_map(|f| &f.row_groups).map(|g| g.rows).sum()
    }
}
