//! The datasets that a Flight service exposes: folders of volumes, at all snapshots or at one.

use millrace_datafs::VolumeSpec;

use crate::dataset::DatasetSpec;

/// The folders that clients may read.
///
/// ```
/// use millrace_streams::feed::flight::Exposure;
/// let exposure = Exposure::new(["digits:/train".parse()?, "books@v3:/".parse()?]);
/// assert!(exposure.folder_of(&"digits@v1:/train/2026".parse()?).is_some());
/// assert!(exposure.folder_of(&"digits@v1:/training".parse()?).is_none());
/// assert!(exposure.folder_of(&"books@v2:/".parse()?).is_none());
/// # Ok::<(), millrace_streams::feed::FeedError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Exposure {
    entries: Vec<DatasetSpec>,
}

impl Exposure {
    /// Exposes folders and files. One without a snapshot is exposed at all snapshots of its volume. Formats have no
    /// meaning here.
    pub fn new(entries: impl IntoIterator<Item = DatasetSpec>) -> Exposure {
        Exposure { entries: entries.into_iter().collect() }
    }

    /// A whole volume, or snapshot of one.
    pub fn whole(volume: VolumeSpec) -> DatasetSpec {
        DatasetSpec { source: volume, path: "/".to_owned(), format: None }
    }

    /// The exposed folders.
    pub fn entries(&self) -> &[DatasetSpec] {
        &self.entries
    }

    /// The widest exposed folder that a dataset lies in; none if clients may not read it.
    pub fn folder_of(&self, dataset: &DatasetSpec) -> Option<&str> {
        let covers = |entry: &&DatasetSpec| {
            let is_at_snapshot = match &entry.source.snapshot {
                None => true,
                Some(snapshot) => dataset.source.snapshot.as_ref() == Some(snapshot),
            };
            is_at_snapshot
                && entry.source.volume == dataset.source.volume
                && is_within(&dataset.path, &entry.path)
        };
        let folders = self.entries.iter().filter(covers).map(|entry| entry.path.as_str());
        folders.min_by_key(|folder| folder.len())
    }
}

/// Whether a path is a folder or lies in it. Both are normalised, as [`DatasetSpec`] has them.
fn is_within(path: &str, folder: &str) -> bool {
    let folder = folder.trim_end_matches('/');
    path.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}
