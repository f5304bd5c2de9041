//! Dataset specification, parsed and printed as `[FORMAT:]VOLUME[@SNAPSHOT]:/PATH`.

use std::fmt;
use std::str::FromStr;

use millrace_datafs::VolumeSpec;
use serde::{Deserialize, Serialize};

use super::FileFormat;
use crate::feed::FeedError;

/// Longest path of a specification, in bytes.
const PATH_BYTES_MAX: usize = 4096;

/// A directory (or one file) of a volume, live or at a snapshot.
///
/// The names of the files tell their format. A format in front of the volume overrides them, and is needed for a folder
/// of files with one folder for each class.
///
/// ```
/// use millrace_streams::dataset::{DatasetSpec, FileFormat};
/// let spec: DatasetSpec = "digits@v1:/train/".parse()?;
/// assert_eq!(spec.to_string(), "digits@v1:/train");
/// let photos: DatasetSpec = "folder:photos@v1:/train".parse()?;
/// assert_eq!(photos.format, Some(FileFormat::Folder));
/// # Ok::<(), millrace_streams::feed::FeedError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DatasetSpec {
    /// The volume, with its snapshot unless it is read live.
    pub source: VolumeSpec,
    /// Absolute path inside the volume, without a trailing slash (`/` alone is the root).
    pub path: String,
    /// The format of the files; their names tell it without.
    pub format: Option<FileFormat>,
}

impl FromStr for DatasetSpec {
    type Err = FeedError;

    fn from_str(text: &str) -> Result<Self, FeedError> {
        let invalid = |reason: String| FeedError::InvalidSpec { text: text.to_string(), reason };
        // A path begins with a slash, so a second colon before it separates the format.
        let (format, rest) = match text.split_once(':') {
            Some((name, rest)) if !rest.starts_with('/') => match name.parse() {
                Ok(format) => (Some(format), rest),
                Err(()) if rest.contains(":/") => {
                    let names = FileFormat::names();
                    return Err(invalid(format!("format {name:?} is unknown; the formats are {names}")));
                }
                Err(()) => (None, text),
            },
            _ => (None, text),
        };
        let (source, path) = rest.split_once(':').unwrap_or((rest, "/"));
        let source: VolumeSpec = source.parse().map_err(|e| invalid(format!("{e}")))?;
        if !path.starts_with('/') {
            return Err(invalid("the path after ':' must start with '/'".into()));
        }
        if path.len() > PATH_BYTES_MAX {
            return Err(invalid(format!("the path is longer than {PATH_BYTES_MAX} bytes")));
        }
        if path.chars().any(char::is_control) {
            return Err(invalid("the path has control characters".into()));
        }
        let parts: Vec<&str> = path.split('/').filter(|p| !p.is_empty()).collect();
        if parts.iter().any(|p| matches!(*p, "." | "..")) {
            return Err(invalid("the path has '.' or '..' in it".into()));
        }
        Ok(Self { source, path: format!("/{}", parts.join("/")), format })
    }
}

impl fmt::Display for DatasetSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(format) = self.format {
            write!(f, "{}:", format.name())?;
        }
        write!(f, "{}:{}", self.source, self.path)
    }
}

impl TryFrom<String> for DatasetSpec {
    type Error = FeedError;
    fn try_from(text: String) -> Result<Self, FeedError> {
        text.parse()
    }
}

impl From<DatasetSpec> for String {
    fn from(spec: DatasetSpec) -> String {
        spec.to_string()
    }
}
