//! Formats of data files, and the names by which users and files call them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Encoding of a data file, derived from its suffix or named in front of the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileFormat {
    /// Apache Parquet: `.parquet`.
    Parquet,
    /// Arrow IPC file (random access): `.arrow`, `.ipc`, `.feather`. Each record batch counts as a row group.
    ArrowIpc,
    /// JSON lines, one object a line: `.jsonl`, `.ndjson`, also compressed (`.gz`, `.zst`).
    JsonLines,
    /// Comma-separated values with a header: `.csv`, and with tabs `.tsv`; also compressed (`.gz`, `.zst`).
    Csv,
    /// Shards as WebDataset writes them: `.tar`.
    Tar,
    /// Any file below a folder that is its class. Never derived from a suffix.
    Folder,
}

/// How a text file is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compression {
    Gzip,
    Zstd,
}

/// The formats with their names.
const NAMES: [(&str, FileFormat); 6] = [
    ("parquet", FileFormat::Parquet),
    ("arrow", FileFormat::ArrowIpc),
    ("jsonl", FileFormat::JsonLines),
    ("csv", FileFormat::Csv),
    ("tar", FileFormat::Tar),
    ("folder", FileFormat::Folder),
];

impl FileFormat {
    /// The name in front of a volume, for example `folder` in `folder:photos@v1:/train`.
    pub fn name(self) -> &'static str {
        NAMES.iter().find(|(_, format)| *format == self).map_or("", |(name, _)| name)
    }

    /// The names of all formats, for errors.
    pub(crate) fn names() -> String {
        NAMES.map(|(name, _)| name).join(", ")
    }

    /// The format that the suffix of a path stands for.
    pub(crate) fn of_path(path: &str) -> Option<Self> {
        let name = path.rsplit('/').next().unwrap_or(path).to_ascii_lowercase();
        let plain = name.strip_suffix(".gz").or_else(|| name.strip_suffix(".zst"));
        let format = match plain.unwrap_or(&name).rsplit_once('.')?.1 {
            "parquet" => FileFormat::Parquet,
            "arrow" | "ipc" | "feather" => FileFormat::ArrowIpc,
            "jsonl" | "ndjson" => FileFormat::JsonLines,
            "csv" | "tsv" => FileFormat::Csv,
            "tar" => FileFormat::Tar,
            _ => return None,
        };
        // A compressed tar is refused with a reason; of other formats such a name means nothing.
        (plain.is_none() || format.is_text() || format == FileFormat::Tar).then_some(format)
    }

    /// Whether the file says where its row groups are. The others are read once to find out.
    pub(crate) fn has_footer(self) -> bool {
        matches!(self, FileFormat::Parquet | FileFormat::ArrowIpc)
    }

    /// Whether the file has lines of text, which may be compressed.
    pub(crate) fn is_text(self) -> bool {
        matches!(self, FileFormat::JsonLines | FileFormat::Csv)
    }

    /// Number in the id of a plan.
    pub(crate) fn number(self) -> u64 {
        match self {
            FileFormat::Parquet => 1,
            FileFormat::ArrowIpc => 2,
            FileFormat::JsonLines => 3,
            FileFormat::Csv => 4,
            FileFormat::Tar => 5,
            FileFormat::Folder => 6,
        }
    }
}

impl Compression {
    /// The compression that the suffix of a path stands for.
    pub(crate) fn of_path(path: &str) -> Option<Self> {
        match path.rsplit_once('.')?.1.to_ascii_lowercase().as_str() {
            "gz" | "tgz" => Some(Compression::Gzip),
            "zst" => Some(Compression::Zstd),
            _ => None,
        }
    }
}

impl fmt::Display for FileFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FileFormat::Parquet => "Parquet",
            FileFormat::ArrowIpc => "Arrow IPC",
            FileFormat::JsonLines => "JSON lines",
            FileFormat::Csv => "CSV",
            FileFormat::Tar => "tar",
            FileFormat::Folder => "a folder of classes",
        })
    }
}

impl FromStr for FileFormat {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        NAMES.iter().find(|(name, _)| *name == text).map(|(_, format)| *format).ok_or(())
    }
}
