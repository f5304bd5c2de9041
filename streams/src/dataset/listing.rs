//! Listing of the data files below a path, in the canonical order that all readers share.

use std::sync::Arc;

use futures::TryStreamExt;
use millrace_leaf::error_chain;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt};
use sha2::{Digest, Sha256};

use super::{FILES_MAX, FOLDER_FILES_MAX, FileFormat};
use crate::feed::FeedError;
use crate::feed::error::Result;

/// Version of the rules by which files without footers are cut and their types inferred. Another version makes kept
/// descriptions unusable.
const SCAN_RULES: u32 = 2;

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
    /// The format that was asked for.
    format: Option<FileFormat>,
}

impl Listing {
    /// Lists the data files at or below `path`; with a format, those that have its suffixes, or all of them if none has.
    ///
    /// # Errors
    /// [`FeedError::NoFiles`], [`FeedError::MixedFormats`], [`FeedError::TooLarge`], [`FeedError::Store`].
    pub(crate) async fn read(
        store: &Arc<dyn ObjectStore>,
        path: &str,
        format: Option<FileFormat>,
    ) -> Result<Self> {
        let root = Path::parse(path.trim_matches('/'))
            .map_err(|e| FeedError::invalid(format!("dataset path {path:?}: {e}")))?;
        let shown = format!("/{root}");
        let mut found = Found { format, ..Found::default() };
        // A path that names one file is a dataset of one file.
        let of_name = FileFormat::of_path(root.as_ref());
        if format != Some(FileFormat::Folder) && (of_name.is_some() || format.is_some()) {
            match store.head(&root).await {
                Ok(meta) => found.files.extend(format.or(of_name).map(|format| listed(meta, format))),
                Err(object_store::Error::NotFound { .. }) => {}
                Err(e) if is_directory(&e) => {}
                Err(e) => return Err(FeedError::store(shown, e)),
            }
        }
        if found.files.is_empty() {
            let prefix = (!root.as_ref().is_empty()).then_some(&root);
            let mut listing = store.list(prefix);
            loop {
                let meta = match listing.try_next().await {
                    Ok(Some(meta)) => meta,
                    Ok(None) | Err(object_store::Error::NotFound { .. }) => break,
                    Err(e) => return Err(FeedError::store(shown, e)),
                };
                found.add(meta, &root);
                let limit = if format == Some(FileFormat::Folder) { FOLDER_FILES_MAX } else { FILES_MAX };
                if found.files.len().max(found.others.len()) > limit {
                    let limit = limit as u64;
                    return Err(FeedError::TooLarge { path: shown, what: "the number of files", limit });
                }
            }
        }
        if found.is_nothing() && store.head(&root).await.is_ok() {
            found.ignored = 1;
        }
        let mut files = found.choose(&shown)?;
        files.sort_unstable_by(|a, b| a.path.as_bytes().cmp(b.path.as_bytes()));
        Ok(Self { path: shown, files, format })
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
        // Footers need no rules, and the digest of their files is that of earlier releases.
        let scanned = self.files.first().is_some_and(|file| !file.format.has_footer());
        if self.format.is_some() || scanned {
            let name = self.files.first().map_or("", |file| file.format.name());
            text(&format!("{name}, rules {SCAN_RULES}"));
        }
        hex::encode(hash.finalize())
    }
}

/// Files of a folder that is being listed.
#[derive(Default)]
struct Found {
    /// The format that was asked for.
    format: Option<FileFormat>,
    files: Vec<ListedFile>,
    /// Files without the suffix of the format that was asked for.
    others: Vec<ListedFile>,
    ignored: usize,
    /// Ignored files whose name, or a folder above, begins with `_`.
    underscored: usize,
    /// The first ignored file that would be data without its last suffix, and the number of such files.
    unread: Option<(String, usize)>,
}

impl Found {
    fn add(&mut self, meta: ObjectMeta, root: &Path) {
        let below = meta.location.as_ref().get(root.as_ref().len()..).unwrap_or_default();
        let is_hidden = below.split('/').any(|part| part.starts_with(['.', '_']));
        match (self.format, FileFormat::of_path(below)) {
            _ if is_hidden => {
                self.ignored += 1;
                self.underscored += usize::from(!below.split('/').any(|part| part.starts_with('.')));
            }
            (Some(FileFormat::Folder), _) => {
                // Files beside the folders of the classes have no class.
                match below.trim_start_matches('/').contains('/') {
                    true => self.files.push(listed(meta, FileFormat::Folder)),
                    false => self.ignored += 1,
                }
            }
            (Some(format), found) if found == Some(format) => self.files.push(listed(meta, format)),
            (Some(format), _) => self.others.push(listed(meta, format)),
            (None, Some(format)) => self.files.push(listed(meta, format)),
            (None, None) => {
                self.ignored += 1;
                // `.jsonl.bz2`
                let of_data =
                    below.rsplit_once('.').and_then(|(inner, _)| FileFormat::of_path(inner)).is_some();
                if of_data {
                    let first = self.unread.take().unwrap_or_else(|| (below.trim_matches('/').to_owned(), 0));
                    self.unread = Some((first.0, first.1 + 1));
                }
            }
        }
    }

    fn is_nothing(&self) -> bool {
        self.files.is_empty() && self.others.is_empty() && self.ignored == 0
    }

    /// The files of one format.
    fn choose(mut self, path: &str) -> Result<Vec<ListedFile>> {
        if self.files.is_empty() {
            self.files = std::mem::take(&mut self.others);
        }
        if self.format == Some(FileFormat::Folder) && self.underscored > 0 {
            let files = self.underscored;
            tracing::warn!(dataset = path, files, "files and classes whose names begin with _ are ignored");
        }
        if let (Some((file, files)), false) = (&self.unread, self.files.is_empty()) {
            tracing::warn!(
                dataset = path,
                file,
                files,
                "files with an unknown suffix behind that of a format are ignored"
            );
        }
        // Earlier releases knew files with footers alone: where there are some, the others stay what they were.
        if self.files.iter().any(|file| file.format.has_footer()) {
            let before = self.files.len();
            self.files.retain(|file| file.format.has_footer());
            let other = before - self.files.len();
            if other > 0 {
                tracing::warn!(
                    dataset = path,
                    files = other,
                    "files of other formats beside Parquet or Arrow IPC files are ignored"
                );
            }
        }
        let Some(first) = self.files.iter().min_by(|a, b| a.path.cmp(&b.path)) else {
            return Err(FeedError::NoFiles { path: path.to_owned(), ignored: self.ignored });
        };
        let is_other = |file: &&ListedFile| {
            file.format != first.format && !(file.format.has_footer() && first.format.has_footer())
        };
        if let Some(other) = self.files.iter().filter(is_other).min_by(|a, b| a.path.cmp(&b.path)) {
            return Err(FeedError::MixedFormats {
                path: path.to_owned(),
                first: format!("{} is {}", first.path, first.format),
                other: format!("{} is {}", other.path, other.format),
                format: first.format.name(),
            });
        }
        Ok(self.files)
    }
}

fn listed(meta: ObjectMeta, format: FileFormat) -> ListedFile {
    let tag = meta.e_tag.unwrap_or_default();
    let version = meta.version.unwrap_or_default();
    ListedFile {
        path: meta.location.to_string(),
        bytes: meta.size,
        format,
        version: format!("{tag}\n{version}\n{}", meta.last_modified.to_rfc3339()),
    }
}

/// A directory may be called `data.parquet` (Spark does so). Local stores answer `head` for it with an I/O
/// error instead of not found.
fn is_directory(error: &object_store::Error) -> bool {
    error_chain::causes(error)
        .find_map(|cause| cause.downcast_ref::<std::io::Error>())
        .is_some_and(|io| io.kind() == std::io::ErrorKind::IsADirectory)
}
