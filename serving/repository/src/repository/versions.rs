//! The versions of one model: the ready and the failed ones, and the selection of the one that answers a
//! request.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use millrace_bundle::{FileStat, Manifest};

use super::declared::LoadSettings;
use super::model_files::ModelFiles;
use super::split::Split;
use crate::model::Model;
use crate::shadow::Shadow;
use millrace_serving_core::config::{Rollout, Target, VersionPolicy, is_label};
use millrace_serving_core::error::{InferError, quote};

/// Origin of a version: while it is unchanged, the version need not be loaded again.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Origin {
    pub(super) content: Content,
    pub(super) loading: Option<LoadSettings>,
}

/// Content of a version.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Content {
    /// A bundle, identified by its manifest.
    Bundle(Box<Manifest>),
    /// A graph without a manifest, identified by the store's metadata of all files in its folder, as some may
    /// hold weights.
    Plain(BTreeMap<String, FileStat>),
    /// An ensemble, identified by the configuration alone.
    Ensemble,
}

/// Failure to serve a version in its current form.
#[derive(Debug, Clone)]
pub(super) struct Failure {
    /// The origin that could not be loaded; `None` if loading was not tried.
    pub(super) origin: Option<Arc<Origin>>,
    pub(super) reason: String,
    pub(super) at: Instant,
    /// Another process may still be writing it; retried soon.
    pub(super) settling: bool,
    /// Whether a call that loads the model returns this failure.
    pub(super) told: bool,
}

/// A version that is ready, and its origin.
#[derive(Debug, Clone)]
pub(super) struct Ready {
    pub(super) model: Arc<Model>,
    pub(super) origin: Arc<Origin>,
}

impl Deref for Ready {
    type Target = Arc<Model>;

    fn deref(&self) -> &Arc<Model> {
        &self.model
    }
}

/// The versions of a model.
#[derive(Debug, Clone)]
pub(super) struct Versions {
    /// Includes a version whose replacement failed; `failed` then holds the reason.
    pub(super) ready: BTreeMap<u64, Ready>,
    pub(super) failed: BTreeMap<u64, Failure>,
    pub(super) policy: VersionPolicy,
    /// Labels and shares from the configuration and `rollout.json`.
    pub(super) rollout: Rollout,
    /// Labels in force; their versions are ready.
    pub(super) labels: BTreeMap<String, u64>,
    pub(super) split: Option<Arc<Split>>,
    pub(super) shadow: Option<Arc<Shadow>>,
    pub(super) beside: ModelFiles,
    /// Problems of the model as a whole.
    pub(super) problems: Vec<String>,
}

impl Default for Versions {
    fn default() -> Self {
        Versions {
            ready: BTreeMap::new(),
            failed: BTreeMap::new(),
            policy: VersionPolicy::Latest(NonZeroU32::MIN),
            rollout: Rollout::default(),
            labels: BTreeMap::new(),
            split: None,
            shadow: None,
            beside: ModelFiles::default(),
            problems: Vec::new(),
        }
    }
}

/// The version that a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VersionSelector<'a> {
    /// None: the newest, or for inference the one that the split selects.
    Any,
    /// A number.
    Version(u64),
    /// A label that may or may not exist.
    Label(&'a str),
}

impl<'a> VersionSelector<'a> {
    /// Parses a version as the protocols write it.
    ///
    /// # Errors
    /// [`InferError::Invalid`] for what is neither empty, a positive integer, nor a label.
    pub fn parse(text: &'a str) -> Result<VersionSelector<'a>, InferError> {
        if text.is_empty() {
            return Ok(VersionSelector::Any);
        }
        if is_label(text) {
            return Ok(VersionSelector::Label(text));
        }
        Ok(parse_version(text)?.map_or(VersionSelector::Any, VersionSelector::Version))
    }
}

/// Parses a version in the protocols' form; empty means the latest.
///
/// # Errors
/// [`InferError::Invalid`] for text that is not a positive integer.
fn parse_version(text: &str) -> Result<Option<u64>, InferError> {
    if text.is_empty() {
        return Ok(None);
    }
    // Each version has one spelling, as in the repository: no sign, no leading zeros.
    text.parse()
        .ok()
        .filter(|version: &u64| *version > 0 && version.to_string() == text)
        .map(Some)
        .ok_or_else(|| {
            InferError::invalid(format!("model version {} is not a positive integer", quote(text)))
        })
}

impl Versions {
    /// The version that the request asks for, if it is ready.
    ///
    /// # Errors
    /// [`InferError::NotFound`]; [`InferError::Unavailable`] when the version exists and is not served;
    /// [`InferError::Invalid`] for a name that is not a label of the model.
    pub(super) fn find(&self, model: &str, asked: VersionSelector<'_>) -> Result<Arc<Model>, InferError> {
        let version = match asked {
            VersionSelector::Any => None,
            VersionSelector::Version(version) => Some(version),
            VersionSelector::Label(label) => Some(self.labelled(model, label)?),
        };
        let found = match version {
            Some(version) => self.ready.get(&version),
            None => self.ready.values().next_back(),
        };
        found.map(|ready| ready.model.clone()).ok_or_else(|| self.not_found_error(model, version))
    }

    /// The version that the split selects for a request with this id that names no version.
    pub(super) fn split_target(&self, id: &str) -> Option<Arc<Model>> {
        let split = self.split.as_ref()?;
        Some(self.ready.get(&split.version(id))?.model.clone())
    }

    fn labelled(&self, model: &str, label: &str) -> Result<u64, InferError> {
        if let Some(version) = self.labels.get(label) {
            return Ok(*version);
        }
        let Some(version) = self.rollout.labels.get(label) else {
            let known: Vec<&str> = self.rollout.labels.keys().take(16).map(String::as_str).collect();
            return Err(InferError::invalid(format!(
                "model version {} is not a positive integer, nor a label of model {model:?}, whose labels are {known:?}",
                quote(label)
            )));
        };
        let reason = self.failure_reason(*version);
        Err(InferError::Unavailable {
            reason: format!("model {model:?} version {version}, which label {label:?} names, {reason}"),
        })
    }

    fn failure_reason(&self, version: u64) -> String {
        match self.failed.get(&version) {
            Some(failure) => format!("cannot be served: {}", failure.reason),
            None => "is not in the repository".to_owned(),
        }
    }

    fn not_found_error(&self, model: &str, version: Option<u64>) -> InferError {
        let failed = match version {
            Some(version) => self.failed.get_key_value(&version),
            None => self.failed.iter().next_back(),
        };
        match (failed, version) {
            (Some((version, failure)), _) => InferError::Unavailable {
                reason: format!("model {model:?} version {version} cannot be served: {}", failure.reason),
            },
            (None, Some(version)) => {
                InferError::NotFound { reason: format!("model {model:?} has no version {version}") }
            }
            (None, None) => InferError::NotFound { reason: format!("model {model:?} has no version") },
        }
    }

    /// Applies labels and shares whose versions are ready. A label whose version is not ready stays on its
    /// previous version.
    pub(super) fn roll_out(&mut self, known: &Versions) {
        self.labels.clear();
        for (label, version) in &self.rollout.labels {
            if self.ready.contains_key(version) {
                self.labels.insert(label.clone(), *version);
                continue;
            }
            let old = known.labels.get(label).filter(|old| self.ready.contains_key(old));
            let stays = old.map(|old| format!(", it stays with version {old}")).unwrap_or_default();
            let reason = self.failure_reason(*version);
            self.problems.push(format!("label {label:?}: version {version} {reason}{stays}"));
            if let Some(old) = old {
                self.labels.insert(label.clone(), *old);
            }
        }
        let mut weights: BTreeMap<u64, f64> = BTreeMap::new();
        for (target, weight) in &self.rollout.split {
            match self.target(target) {
                Some(model) => *weights.entry(model.version()).or_default() += weight,
                None if *weight > 0.0 => {
                    self.problems.push(format!("split: {target} is not served, the others answer its share"));
                }
                None => {}
            }
        }
        let split = Split::new(&weights).map(Arc::new);
        // An unchanged split keeps its counter.
        self.split = if split == known.split { known.split.clone() } else { split };
        self.cast_shadow(known);
    }

    fn cast_shadow(&mut self, known: &Versions) {
        let Some(wanted) = self.rollout.shadow.clone().filter(|wanted| wanted.share > 0.0) else {
            self.set_shadow(None);
            return;
        };
        let shadow = self.target(&wanted.version).map(|model| Shadow::new(model.clone(), wanted.share));
        if shadow.is_none() {
            self.problems.push(format!("shadow: {} is not served, so no request is copied", wanted.version));
        }
        let same = match (&known.shadow, &shadow) {
            (Some(old), Some(new)) if old.is_like(new) => Some(old.clone()),
            _ => None,
        };
        self.set_shadow(same.or_else(|| shadow.map(Arc::new)));
    }

    /// Marks all versions except the shadow itself as shadowed.
    fn set_shadow(&mut self, shadow: Option<Arc<Shadow>>) {
        for (version, model) in &self.ready {
            let copied = shadow.as_ref().is_some_and(|shadow| shadow.version() != *version);
            model.shadowed.store(copied, Ordering::Relaxed);
        }
        self.shadow = shadow;
    }

    /// The version that a share or a shadow names, if it is ready.
    fn target(&self, target: &Target) -> Option<&Arc<Model>> {
        let version = match target {
            Target::Version(version) => version,
            Target::Label(label) => self.labels.get(label)?,
        };
        Some(&self.ready.get(version)?.model)
    }
}
