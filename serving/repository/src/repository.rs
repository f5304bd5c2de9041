//! The model repository: finds model versions in a volume or a directory, loads them, and polls for new
//! versions. A version that cannot be loaded is reported and left out; it never takes the others down.

mod control;
mod declared;
mod ensemble;
mod entries;
mod load;
mod model_files;
mod refresh;
mod sequences;
mod source;
mod split;
mod versions;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::model::Model;
use crate::response_cache::ResponseCache;
use crate::shadow::Shadow;
use millrace_serving_core::blocking::blocking;
use millrace_serving_core::config::{Config, Control, VersionPolicy};
use millrace_serving_core::error::{InferError, Result, chain, quote};
use millrace_serving_core::metrics::REFRESHES;

pub use control::{Entry, problems};
pub use source::Source;
pub use versions::VersionSelector;
use versions::Versions;

/// State of a version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VersionState {
    /// It answers requests.
    Ready,
    /// It cannot be served, with the reason.
    Failed(String),
}

/// A version and its state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VersionStatus {
    /// Model name; the path, for a directory that is not a version.
    pub model: String,
    /// Version; `None` for a directory that is not a version, and for a problem with the model as a whole.
    pub version: Option<u64>,
    /// Its state.
    pub state: VersionState,
}

#[derive(Debug, Clone, Default)]
struct Models {
    models: HashMap<String, Versions>,
    /// Directories that are not versions, with the reason.
    other: Vec<(String, String)>,
    /// Models unloaded by a call, until a call loads them again.
    unloaded: BTreeSet<String>,
}

#[derive(Debug)]
struct Inner {
    source: Source,
    config: Config,
    cache: Option<Arc<ResponseCache>>,
    models: RwLock<Arc<Models>>,
    /// Set once each model of the configuration has had a version that can answer; never cleared.
    ready: AtomicBool,
    /// Serializes refreshes and model loads.
    refreshing: tokio::sync::Mutex<()>,
    /// Versions that are being loaded.
    loading: Mutex<BTreeSet<(String, u64)>>,
    /// Models that were loaded only as members of an ensemble.
    along: Mutex<BTreeSet<String>>,
    /// One listing for an index at a time, so that callers cannot overload the store with them.
    indexing: tokio::sync::Mutex<()>,
    changes: watch::Sender<u64>,
}

/// The models that are served. Cheap to clone; all clones share one state.
#[derive(Debug, Clone)]
pub struct Repository {
    inner: Arc<Inner>,
}

impl Repository {
    /// Loads every complete version once; under [`Control::Explicit`] those of the models in `load`.
    /// [`Repository::status`] lists the versions that cannot be loaded. If a graph without a manifest was
    /// just written, waits a second for the writer to finish it and tries again.
    ///
    /// # Errors
    /// [`millrace_serving_core::Error::Config`] for `load` without [`Control::Explicit`], for an invalid model name in it or
    /// in `models`, for too many sessions, for a response cache without memory, and for invalid priority
    /// levels or drift windows; [`millrace_serving_core::Error::RuntimeMissing`], [`millrace_serving_core::Error::RuntimeUnusable`],
    /// [`millrace_serving_core::Error::DeviceUnavailable`]; [`millrace_serving_core::Error::Repository`] when the source cannot be read.
    pub async fn open(source: Source, config: &Config) -> Result<Repository> {
        control::check(config)?;
        config.batching.check()?;
        config.drift.check()?;
        config.check_sessions()?;
        config.check_response_cache()?;
        let checked = config.clone();
        blocking("model loading", move || millrace_serving_runtime::session::check_device(&checked)).await?;
        let inner = Inner {
            source,
            config: config.clone(),
            cache: ResponseCache::new(config.response_cache_bytes_max).map(Arc::new),
            models: RwLock::default(),
            ready: AtomicBool::new(false),
            refreshing: tokio::sync::Mutex::new(()),
            loading: Mutex::default(),
            along: Mutex::default(),
            indexing: tokio::sync::Mutex::new(()),
            changes: watch::Sender::new(0),
        };
        let repository = Repository { inner: Arc::new(inner) };
        match config.control {
            Control::Poll => {
                repository.refresh().await?;
                if repository.is_settling(None) {
                    tokio::time::sleep(model_files::SETTLE).await;
                    repository.refresh().await?;
                }
            }
            Control::Explicit => repository.load_configured().await?,
        }
        let models = repository.inner.models.read().clone();
        repository.note_ready(&models);
        Ok(repository)
    }

    /// Scans the source: loads new versions, drops deleted ones, retries failed ones after a while; under
    /// [`Control::Explicit`] for loaded models only. The server keeps answering meanwhile. Cancel safe: the
    /// next call loads what this one did not.
    ///
    /// # Errors
    /// [`millrace_serving_core::Error::Repository`] when the source cannot be read; the models stay as they are.
    pub async fn refresh(&self) -> Result<()> {
        let _one = self.inner.refreshing.lock().await;
        let outcome = self.refresh_now().await;
        REFRESHES.with_label_values(&[if outcome.is_ok() { "ok" } else { "failed" }]).inc();
        outcome
    }

    /// Runs [`Repository::refresh`] every `poll_ms` until cancelled. Returns at once when `poll_ms` is 0, and
    /// under [`Control::Explicit`], where only calls change versions.
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

    /// Whether each model that the configuration names (`load`, `models`) has had a version that can answer.
    /// Once true, it stays true.
    pub fn is_ready(&self) -> bool {
        self.inner.ready.load(Ordering::SeqCst)
    }

    /// Waits for [`Repository::is_ready`]. Cancel safe.
    pub async fn became_ready(&self) {
        let mut changes = self.changes();
        while !self.is_ready() {
            // Never fails: `self` holds the sender.
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
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
    /// [`InferError::NotFound`]; [`InferError::Unavailable`] when the version exists and failed to load.
    pub fn get(&self, model: &str, version: Option<u64>) -> Result<Arc<Model>, InferError> {
        self.find(model, version.map_or(VersionSelector::Any, VersionSelector::Version))
    }

    /// A ready version; the latest ready one when the request names none.
    ///
    /// # Errors
    /// As [`Repository::get`]; [`InferError::Invalid`] for a name that is not a label of the model.
    pub fn find(&self, model: &str, asked: VersionSelector<'_>) -> Result<Arc<Model>, InferError> {
        let models = self.inner.models.read();
        match models.models.get(model) {
            Some(versions) => versions.find(model, asked),
            None => Err(unknown(model)),
        }
    }

    /// Like [`Repository::find`]; also whether [`Repository::route`] must choose the version for each
    /// request: inference that names no version is split, or the model has sequences.
    pub fn find_split(
        &self,
        model: &str,
        asked: VersionSelector<'_>,
    ) -> Result<(Arc<Model>, bool), InferError> {
        let models = self.inner.models.read().clone();
        let Some(versions) = models.models.get(model) else { return Err(unknown(model)) };
        let by_request =
            versions.split.is_some() || versions.ready.values().any(|version| version.sequences.is_some());
        Ok((versions.find(model, asked)?, asked == VersionSelector::Any && by_request))
    }

    /// The version that answers a request with this id, which may be empty.
    ///
    /// # Errors
    /// As [`Repository::find`].
    pub fn route(&self, model: &str, asked: VersionSelector<'_>, id: &str) -> Result<Arc<Model>, InferError> {
        let models = self.inner.models.read();
        let Some(versions) = models.models.get(model) else { return Err(unknown(model)) };
        match asked {
            VersionSelector::Any => versions.split_target(id).map_or_else(|| versions.find(model, asked), Ok),
            asked => versions.find(model, asked),
        }
    }

    /// The version policy of a model.
    pub fn policy(&self, model: &str) -> Option<VersionPolicy> {
        self.inner.models.read().models.get(model).map(|versions| versions.policy.clone())
    }

    /// The shadow of a model: the version that runs copies of its requests.
    pub(crate) fn shadow(&self, model: &str) -> Option<Arc<Shadow>> {
        self.inner.models.read().models.get(model)?.shadow.clone()
    }

    /// Labels of a model that are in force, with their versions.
    pub fn labels(&self, model: &str) -> BTreeMap<String, u64> {
        let models = self.inner.models.read().clone();
        models.models.get(model).map(|versions| versions.labels.clone()).unwrap_or_default()
    }

    /// Whether another process may still be writing a version of this model, or of any model.
    fn is_settling(&self, model: Option<&str>) -> bool {
        let models = self.inner.models.read().clone();
        let mut named = models.models.iter().filter(|(name, _)| model.is_none_or(|model| model == *name));
        named.any(|(_, versions)| versions.failed.values().any(|failure| failure.settling))
    }

    /// Ready versions of a model, ascending; `None` when there is no such model.
    pub fn versions(&self, model: &str) -> Option<Vec<u64>> {
        let models = self.inner.models.read().clone();
        models.models.get(model).map(|versions| versions.ready.keys().copied().collect())
    }

    /// Ready versions of one model, or of all, by name and version.
    pub fn ready(&self, model: Option<&str>) -> Vec<Arc<Model>> {
        let models = self.inner.models.read().clone();
        let named = models.models.iter().filter(|(name, _)| model.is_none_or(|model| model == *name));
        let mut ready: Vec<_> = named
            .flat_map(|(_, versions)| versions.ready.values().map(|ready| ready.model.clone()))
            .collect();
        ready.sort_by(|a, b| (a.name(), a.version()).cmp(&(b.name(), b.version())));
        ready
    }

    /// Every version that the last refresh found, with its state, by name and version.
    pub fn status(&self) -> Vec<VersionStatus> {
        let models = self.inner.models.read().clone();
        let mut status: Vec<VersionStatus> = Vec::new();
        for (model, versions) in &models.models {
            let ready = versions.ready.iter().map(|(version, model)| {
                (*version, models.fault(model).map_or(VersionState::Ready, VersionState::Failed))
            });
            let failed = versions
                .failed
                .iter()
                .filter(|(version, _)| !versions.ready.contains_key(version))
                .map(|(version, failure)| (*version, VersionState::Failed(failure.reason.clone())));
            status.extend(ready.chain(failed).map(|(version, state)| VersionStatus {
                model: model.clone(),
                version: Some(version),
                state,
            }));
            status.extend(versions.problems.iter().map(|problem| VersionStatus {
                model: model.clone(),
                version: None,
                state: VersionState::Failed(problem.clone()),
            }));
        }
        status.extend(models.other.iter().map(|(path, reason)| VersionStatus {
            model: path.clone(),
            version: None,
            state: VersionState::Failed(reason.clone()),
        }));
        status.sort_by(|a, b| (&a.model, a.version).cmp(&(&b.model, b.version)));
        status
    }
}

fn unknown(model: &str) -> InferError {
    InferError::NotFound { reason: format!("the server has no model {}", quote(model)) }
}
