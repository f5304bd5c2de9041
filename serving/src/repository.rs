//! The models that are served: found in a volume or a directory, loaded, looked through again for new
//! versions. A bad version is named and left out; it never takes the others down.

mod control;
mod refresh;
mod source;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_bundle::{Manifest, Signature};
use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::blocking::blocking;
use crate::config::{Config, Control, Limits};
use crate::error::{InferError, Result, chain, quote};
use crate::metrics::{ModelMetrics, REFRESHES};
use crate::session::Pool;
use crate::statistics::Statistics;

pub(crate) use control::Entry;
pub use source::Source;

/// One model version that is ready. Requests hold it, so it outlives its removal from the repository.
#[derive(Debug)]
pub struct Model {
    manifest: Manifest,
    max_batch_size: i32,
    pub(crate) pool: Pool,
    pub(crate) metrics: ModelMetrics,
    pub(crate) statistics: Statistics,
    /// Fires when the last request has let the version go.
    gone: CancellationToken,
    // The last field, so that the sessions are gone before it fires.
    _leaving: DropGuard,
}

impl Model {
    /// Model name.
    pub fn name(&self) -> &str {
        &self.manifest.name
    }

    /// Version.
    pub fn version(&self) -> u64 {
        self.manifest.version
    }

    /// The manifest: digests, lineage, metrics.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Inputs and outputs.
    pub fn signature(&self) -> &Signature {
        &self.manifest.signature
    }

    /// Most rows of a request; 0 when rows are none of the model's dimensions.
    pub(crate) fn max_batch_size(&self) -> i32 {
        self.max_batch_size
    }
}

/// What became of a version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// It answers requests.
    Ready,
    /// It cannot be served, for this reason.
    Failed(String),
}

/// A version and what became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VersionStatus {
    /// Model name; for a directory that is no version, its path.
    pub model: String,
    /// Version; `None` for a directory that is none.
    pub version: Option<u64>,
    /// What became of it.
    pub state: State,
}

#[derive(Debug, Clone)]
struct Failure {
    manifest: Option<Manifest>,
    reason: String,
    at: Instant,
}

#[derive(Debug, Clone, Default)]
struct Versions {
    ready: BTreeMap<u64, Arc<Model>>,
    failed: BTreeMap<u64, Failure>,
}

#[derive(Debug, Clone, Default)]
struct Models {
    models: HashMap<String, Versions>,
    /// Directories that are no version, with the reason.
    other: Vec<(String, String)>,
    /// Models that a call unloaded, until one loads them again.
    unloaded: BTreeSet<String>,
}

#[derive(Debug)]
struct Inner {
    source: Source,
    config: Config,
    models: RwLock<Arc<Models>>,
    /// One look through at a time.
    refreshing: tokio::sync::Mutex<()>,
    /// Versions that are being loaded.
    loading: Mutex<BTreeSet<(String, u64)>>,
    /// One listing for an index at a time, so that callers cannot pile them up on the store.
    indexing: tokio::sync::Mutex<()>,
    changes: watch::Sender<u64>,
}

/// The models that are served. Cheap to clone; all clones are one.
#[derive(Debug, Clone)]
pub struct Repository {
    inner: Arc<Inner>,
}

impl Repository {
    /// Loads every complete version once; under [`Control::Explicit`] those of the models in `load`.
    /// Versions that cannot be loaded are in [`Repository::status`].
    ///
    /// # Errors
    /// [`crate::Error::Config`] for `load` without [`Control::Explicit`], for a name in it that none is, and for
    /// levels of priority that there cannot be;
    /// [`crate::Error::RuntimeMissing`], [`crate::Error::RuntimeUnusable`], [`crate::Error::DeviceUnavailable`];
    /// [`crate::Error::Repository`] when the source cannot be read.
    pub async fn open(source: Source, config: &Config) -> Result<Repository> {
        control::check(config)?;
        config.batching.check()?;
        let device = config.device;
        blocking("model loading", move || crate::session::check_device(device)).await?;
        let inner = Inner {
            source,
            config: config.clone(),
            models: RwLock::default(),
            refreshing: tokio::sync::Mutex::new(()),
            loading: Mutex::default(),
            indexing: tokio::sync::Mutex::new(()),
            changes: watch::Sender::new(0),
        };
        let repository = Repository { inner: Arc::new(inner) };
        match config.control {
            Control::Poll => repository.refresh().await?,
            Control::Explicit => repository.load_configured().await?,
        }
        Ok(repository)
    }

    /// Looks through the source: loads new versions, drops the ones that are gone, tries failed ones
    /// again after a while; under [`Control::Explicit`] of loaded models only. Answers go on meanwhile.
    /// Cancel safe: what was not loaded is loaded by the next call.
    ///
    /// # Errors
    /// [`crate::Error::Repository`] when the source cannot be read; the models stay as they are.
    pub async fn refresh(&self) -> Result<()> {
        let _one = self.inner.refreshing.lock().await;
        let outcome = self.refresh_now().await;
        REFRESHES.with_label_values(&[if outcome.is_ok() { "ok" } else { "failed" }]).inc();
        outcome
    }

    /// Runs [`Repository::refresh`] every `poll_ms` until cancelled; returns at once when that is 0, and
    /// under [`Control::Explicit`], where versions change only by a call.
    pub async fn poll(&self, cancel: CancellationToken) {
        if self.inner.config.poll_ms == 0 || self.inner.config.control == Control::Explicit {
            return;
        }
        let period = Duration::from_millis(self.inner.config.poll_ms);
        while cancel.run_until_cancelled(tokio::time::sleep(period)).await.is_some() {
            if let Some(Err(error)) = cancel.run_until_cancelled(self.refresh()).await {
                tracing::warn!(error = %chain(&error), "the model repository cannot be read");
            }
        }
    }

    /// A receiver that wakes whenever the set of ready versions changes.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.inner.changes.subscribe()
    }

    /// A ready version; the latest ready one when `version` is `None`.
    ///
    /// # Errors
    /// [`InferError::NotFound`]; [`InferError::Unavailable`] when it is there and failed to load.
    pub fn get(&self, model: &str, version: Option<u64>) -> Result<Arc<Model>, InferError> {
        let models = self.inner.models.read().clone();
        let Some(versions) = models.models.get(model) else {
            return Err(InferError::NotFound { reason: format!("there is no model {}", quote(model)) });
        };
        let found = match version {
            Some(version) => versions.ready.get(&version),
            None => versions.ready.values().next_back(),
        };
        if let Some(model) = found {
            return Ok(model.clone());
        }
        let failed = match version {
            Some(version) => versions.failed.get_key_value(&version),
            None => versions.failed.iter().next_back(),
        };
        match (failed, version) {
            (Some((version, failure)), _) => Err(InferError::Unavailable {
                reason: format!("model {model:?} version {version} cannot be served: {}", failure.reason),
            }),
            (None, Some(version)) => {
                Err(InferError::NotFound { reason: format!("model {model:?} has no version {version}") })
            }
            (None, None) => Err(InferError::NotFound { reason: format!("model {model:?} has no version") }),
        }
    }

    /// Ready versions of a model, ascending; `None` when there is no such model.
    pub fn versions(&self, model: &str) -> Option<Vec<u64>> {
        let models = self.inner.models.read().clone();
        models.models.get(model).map(|versions| versions.ready.keys().copied().collect())
    }

    /// Ready versions of one model, or of all, by name and version.
    pub(crate) fn ready(&self, model: Option<&str>) -> Vec<Arc<Model>> {
        let models = self.inner.models.read().clone();
        let named = models.models.iter().filter(|(name, _)| model.is_none_or(|model| model == *name));
        let mut ready: Vec<_> = named.flat_map(|(_, versions)| versions.ready.values().cloned()).collect();
        ready.sort_by(|a, b| (a.name(), a.version()).cmp(&(b.name(), b.version())));
        ready
    }

    /// Where traces of requests are written.
    pub(crate) fn trace_directory(&self) -> Option<PathBuf> {
        self.inner.config.trace_directory.clone()
    }

    /// The bounds that it loads within.
    pub(crate) fn limits(&self) -> &Limits {
        &self.inner.config.limits
    }

    /// Every version that was found and what became of it, by name and version.
    pub fn status(&self) -> Vec<VersionStatus> {
        let models = self.inner.models.read().clone();
        let mut status: Vec<VersionStatus> = Vec::new();
        for (model, versions) in &models.models {
            let ready = versions.ready.keys().map(|version| (*version, State::Ready));
            let failed = versions
                .failed
                .iter()
                .map(|(version, failure)| (*version, State::Failed(failure.reason.clone())));
            status.extend(ready.chain(failed).map(|(version, state)| VersionStatus {
                model: model.clone(),
                version: Some(version),
                state,
            }));
        }
        status.extend(models.other.iter().map(|(path, reason)| VersionStatus {
            model: path.clone(),
            version: None,
            state: State::Failed(reason.clone()),
        }));
        status.sort_by(|a, b| (&a.model, a.version).cmp(&(&b.model, b.version)));
        status
    }
}
