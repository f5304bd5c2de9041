//! Listing of the data files below a path, in the canonical order that all readers share.

use std::sync::Arc;

use futures::TryStreamExt;
use millrace_leaf::error_chain;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt};
use sha2::{Digest, Sha256};

use super::{FILES_MAX, FileFormat};
use crate::feed::FeedError;
use crate::feed::error::Result;

/// A data file as the store lists it.
pub(crate) struct ListedFile {
    pub(crate) path: String,
    pub(crate) bytes: u64,
    pub(crate) format: FileFormat,
    version: String,
}

/// The data files of a dataset, sorted by the bytes of their paths.
pub(crate) struct Listing {
    pub(crate) path: String,
    pub(crate) files: Vec<ListedFile>,
}

impl Listing {
    pub(crate) async fn read(store: &Arc<dyn ObjectStore>, path: &str) -> Result<Self> {
        let root = Path::parse(path.trim_matches('/'))
            .map_err(|e| FeedError::invalid(format!("dataset path {path:?}: {e}")))?;
        let shown = format!("/{root}");
        let mut files = Vec::new();
        let mut ignored = 0usize;
        // A path that names one file is a dataset of one file.
        if let Some(format) = format_of(root.as_ref()) {
            match store.head(&root).await {
                Ok(meta) => files.push(found(meta, format)),
                Err(object_store::Error::NotFound { .. }) => {}
                Err(e) if is_directory(&e) => {}
                Err(e) => return Err(FeedError::store(shown, e)),
            }
        }
        if files.is_empty() {
            let prefix = (!root.as_ref().is_empty()).then_some(&root);
            let mut listed = store.list(prefix);
            loop {
                let meta = match listed.try_next().await {
                    Ok(Some(meta)) => meta,
                    Ok(None) | Err(object_store::Error::NotFound { .. }) => break,
                    Err(e) => return Err(FeedError::store(shown, e)),
                };
                let below = meta.location.as_ref().get(root.as_ref().len()..).unwrap_or_default();
                let hidden = below.split('/').any(|part| part.starts_with(['.', '_']));
                match format_of(below) {
                    Some(format) if !hidden => files.push(found(meta, format)),
                    _ => ignored += 1,
                }
                if files.len() > FILES_MAX {
                    let limit = FILES_MAX as u64;
                    return Err(FeedError::TooLarge { path: shown, what: "the number of files", limit });
                }
            }
        }
        if files.is_empty() {
            return Err(FeedError::NoFiles { path: shown, ignored });
        }
        files.sort_unstable_by(|a, b| a.path.as_bytes().cmp(b.path.as_bytes()));
        Ok(Self { path: shown, files })
    }

    /// Digest of this state of the listing: another file, size, tag or time changes it.
    pub(crate) fn digest(&self) -> String {
        let mut hash = Sha256::new();
        let mut text = |t: &str| {
            hash.update((t.len() as u64).to_le_bytes());
            hash.update(t.as_bytes());
        };
        text("millrace-dataset-listing-1");
        text(&self.path);
        for file in &self.files {
            text(&file.path);
            text(&file.bytes.to_string());
            text(&file.version);
        }
        hex::encode(hash.finalize())
    }
}

fn found(meta: ObjectMeta, format: FileFormat) -> ListedFile {
    let tag = meta.e_tag.unwrap_or_default();
    let version = meta.version.unwrap_or_default();
    ListedFile {
        path: meta.location.to_string(),
        bytes: meta.size,
        format,
        version: format!("{tag}\n{version}\n{}", meta.last_modified.to_rfc3339()),
    }
}

fn format_of(path: &str) -> Option<FileFormat> {
    let name = path.rsplit('/').next().unwrap_or(path);
    match name.rsplit_once('.')?.1.to_ascii_lowercase().as_str() {
        "parquet" => Some(FileFormat::Parquet),
        "arrow" | "ipc" | "feather" => Some(FileFormat::ArrowIpc),
        _ => None,
    }
}

/// A directory may be called `data.parquet` (Spark does so). Local stores answer `head` for it with an I/O
/// error instead of not found.
fn is_directory(error: &object_store::Error) -> bool {
    error_chain::causes(error)
        .find_map(|cause| cause.downcast_ref::<std::io::Error>())
        .is_some_and(|io| io.kind() == std::io::ErrorKind::IsADirectory)
}
