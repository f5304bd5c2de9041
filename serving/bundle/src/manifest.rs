//! The manifest `bundle.json`: the files, signature and origin of a model version.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::signature::Signature;

/// Newest manifest format that this crate reads, and the format that it writes.
pub const FORMAT_VERSION: u64 = 1;
/// File name of the manifest inside a version's directory.
pub const MANIFEST_FILE: &str = "bundle.json";
/// Mark in a version's directory while its files are being written; the manifest supersedes it.
pub const WRITING_FILE: &str = "bundle.json.writing";
/// File name of the graph inside a version's directory.
pub const MODEL_FILE: &str = "model.onnx";
/// Largest manifest to read or write, in bytes.
pub const MANIFEST_BYTES_MAX: u64 = 1 << 20;

const FILES_MAX: usize = 64;
const FILE_PATH_BYTES_MAX: usize = 256;
const METRICS_MAX: usize = 1024;
const NAME_BYTES_MAX: usize = 128;

/// The content of `bundle.json`.
///
/// Unknown keys are ignored, so that programs may add keys within one format version.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Format of this file, [`FORMAT_VERSION`].
    pub format_version: u64,
    /// Model name, equal to the name of the directory.
    pub name: String,
    /// Model version, positive, equal to the name of the directory.
    pub version: u64,
    /// Every other file of the version, with its size and digest.
    pub files: Vec<FileEntry>,
    /// Inputs and outputs of the graph.
    pub signature: Signature,
    /// Origin of the model.
    #[serde(default)]
    pub lineage: Lineage,
    /// Metrics of the training, finite, by name (`loss`, `accuracy`).
    #[serde(default)]
    pub metrics: BTreeMap<String, f64>,
    /// The fields of a record that feed each input, in the order of their values, where the training named them by
    /// input. Absent for other models.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub fields: BTreeMap<String, Vec<String>>,
    /// Creation time of the bundle: RFC 3339, UTC.
    pub created_at: String,
}

/// One file of a model version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Path relative to the version's directory: plain segments separated by `/`.
    pub path: String,
    /// Size in bytes.
    pub bytes: u64,
    /// SHA-256 of the content, 64 lower-case hexadecimal digits.
    pub sha256: String,
}

/// Origin of a model: enough to train it again. Fields that do not apply are empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Lineage {
    /// Volume that the training data was read from.
    pub volume: String,
    /// Snapshot of that volume.
    pub snapshot: String,
    /// Path of the dataset in that snapshot; empty in versions of earlier programs.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub path: String,
    /// The topic that the training data was read from, in place of a volume, with its bounds and the first and next offset
    /// and a digest of the records of each partition: `topic:NAME@UNTIL?offsets=PARTITION:FIRST-NEXT:DIGEST,...`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub topic: String,
    /// The datasets of a mixture with their weights, in place of a volume and of a topic; empty for one dataset.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mixture: Vec<MixedDataset>,
    /// The condition and the part by which the rows to train on were selected; empty for all rows.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub selection: String,
    /// Next offset per topic and partition that had landed in the snapshot.
    pub offsets: BTreeMap<String, BTreeMap<i32, i64>>,
    /// SHA-256 of the training configuration.
    pub config_sha256: String,
    /// Seed of weights and shuffle.
    pub seed: u64,
    /// Version of the program that trained.
    pub code_version: String,
    /// Optimizer steps taken.
    pub steps: u64,
    /// Whole epochs: passes over the data, or parts of these where the job says so.
    pub epochs: u64,
    /// The file from which the model was imported, if it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub imported: Option<Imported>,
    /// The version from which the model was quantized, if it was; all other fields are those of that version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantized: Option<Quantized>,
}

/// A dataset of the mixture that a model was trained on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MixedDataset {
    /// `VOLUME@SNAPSHOT:/PATH`, or a topic as in [`Lineage::topic`].
    pub dataset: String,
    /// Its share of the rows, a decimal number relative to the weights of the others.
    pub weight: String,
}

/// The version from which a model was quantized, and the method.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Quantized {
    /// The version.
    pub version: u64,
    /// SHA-256 of its `model.onnx`.
    pub model_sha256: String,
    /// The representation of weights and inputs.
    pub method: String,
    /// Number of matrix products computed with integers.
    pub layers: u64,
    /// The data on which both versions were compared.
    pub sample: String,
}

/// The ONNX file from which a model was imported.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Imported {
    /// Name of the file, without its path.
    pub file: String,
    /// Program and version that wrote the file, as far as the file names them: `pytorch 2.6.0`.
    pub producer: String,
}

impl Manifest {
    /// A manifest for a version that is made of other models, and so has no graph and no files. Sets the
    /// time.
    ///
    /// # Errors
    /// [`Error::InvalidName`], [`Error::InvalidVersion`]; [`Error::InvalidManifest`] for an invalid
    /// signature.
    pub fn of_ensemble(name: &str, version: u64, signature: Signature) -> Result<Manifest> {
        if !is_model_name(name) {
            return Err(Error::InvalidName { name: shorten(name) });
        }
        if version == 0 {
            return Err(Error::InvalidVersion { version: version.to_string() });
        }
        signature.check().map_err(|reason| Error::InvalidManifest { reason })?;
        Ok(Manifest {
            format_version: FORMAT_VERSION,
            name: name.to_owned(),
            version,
            files: Vec::new(),
            signature,
            lineage: Lineage::default(),
            metrics: BTreeMap::new(),
            fields: BTreeMap::new(),
            created_at: chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Secs, true),
        })
    }

    /// The entry of a file, by its path.
    pub fn file(&self, path: &str) -> Option<&FileEntry> {
        self.files.iter().find(|file| file.path == path)
    }

    /// SHA-256 of `model.onnx` in hexadecimal digits; empty if the manifest has no such entry, for example
    /// for an ensemble.
    pub fn model_sha256(&self) -> &str {
        self.file(MODEL_FILE).map_or("", |file| &file.sha256)
    }

    /// Checks everything that needs no files; the error names the fault.
    pub(crate) fn check(&self) -> std::result::Result<(), String> {
        if self.format_version != FORMAT_VERSION {
            return Err(format!("format_version {} is unknown", self.format_version));
        }
        if !is_model_name(&self.name) {
            return Err(format!("{:?} is not a model name", shorten(&self.name)));
        }
        if self.version == 0 {
            return Err("version 0 is not a positive integer".into());
        }
        if self.files.len() > FILES_MAX {
            return Err(format!("{} files, the limit is {FILES_MAX}", self.files.len()));
        }
        let mut paths = BTreeSet::new();
        for file in &self.files {
            check_file_path(&file.path)?;
            if !is_sha256(&file.sha256) {
                return Err(format!("{}: sha256 is not 64 lower-case hex digits", file.path));
            }
            if !paths.insert(file.path.as_str()) {
                return Err(format!("{} is listed twice", file.path));
            }
        }
        if self.file(MODEL_FILE).is_none() {
            return Err(format!("{MODEL_FILE} is not listed"));
        }
        self.signature.check()?;
        if let Some((input, _)) =
            self.fields.iter().find(|(_, names)| names.is_empty() || names.iter().any(String::is_empty))
        {
            return Err(format!("input {:?} has no field, or one without a name", shorten(input)));
        }
        if self.metrics.len() > METRICS_MAX {
            return Err(format!("{} metrics, the limit is {METRICS_MAX}", self.metrics.len()));
        }
        if let Some((name, value)) = self.metrics.iter().find(|(_, value)| !value.is_finite()) {
            return Err(format!("metric {:?} is {value}, not a finite number", shorten(name)));
        }
        Ok(())
    }
}

/// Whether a string is a valid model name; volumes have the same rule.
pub(crate) fn is_model_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= NAME_BYTES_MAX
        && !name.starts_with(['.', '-'])
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
}

/// Untrusted text for a message, at most 160 characters.
pub(crate) fn shorten(text: &str) -> String {
    text.chars().take(160).collect()
}

fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// Refuses paths that could leave the version's directory or be read as another file.
pub(crate) fn check_file_path(path: &str) -> std::result::Result<(), String> {
    if path.is_empty() || path.len() > FILE_PATH_BYTES_MAX {
        return Err(format!("file path of {} bytes, allowed are 1 to {FILE_PATH_BYTES_MAX}", path.len()));
    }
    if path == MANIFEST_FILE {
        return Err(format!("{MANIFEST_FILE} lists itself"));
    }
    if path == WRITING_FILE {
        return Err(format!(
            "{WRITING_FILE} marks a version that is being written and is deleted when the version is complete"
        ));
    }
    let plain = path.split('/').all(|segment| {
        !segment.is_empty()
            && segment != "."
            && segment != ".."
            && segment
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-' | b'+' | b'='))
    });
    if plain {
        Ok(())
    } else {
        Err(format!("file path {path:?} is not a plain relative path inside the version"))
    }
}
