//! Model control: loading and unloading models by a call, and the index of the repository.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::model_files::SETTLE;
use super::{Models, Repository};
use millrace_serving_core::config::{Config, Control};
use millrace_serving_core::error::{Error, InferError, Result, chain, quote};

/// A version in the index of the repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Model name.
    pub model: String,
    /// Version.
    pub version: u64,
    /// `READY`, `LOADING` or `UNAVAILABLE`, Triton's names.
    pub state: &'static str,
    /// Why it is unavailable, else empty.
    pub reason: String,
}

impl Entry {
    /// Whether it answers requests.
    pub fn is_ready(&self) -> bool {
        self.state == READY
    }
}

const READY: &str = "READY";
const LOADING: &str = "LOADING";
const UNAVAILABLE: &str = "UNAVAILABLE";

/// Guard of a version that is being loaded; dropping it removes the version from that set.
pub(super) struct LoadingGuard<'a> {
    repository: &'a Repository,
    version: (String, u64),
}

impl Drop for LoadingGuard<'_> {
    fn drop(&mut self) {
        self.repository.inner.loading.lock().remove(&self.version);
    }
}

/// The settings of models that [`Repository::open`] refuses: the first error of each kind.
#[must_use]
pub fn problems(config: &Config) -> Vec<Error> {
    let checks = [
        check(config),
        config.batching.check(),
        config.drift.check(),
        config.check_sessions(),
        config.check_response_cache(),
    ];
    checks.into_iter().filter_map(Result::err).collect()
}

/// Refuses settings that contradict each other.
pub(super) fn check(config: &Config) -> Result<()> {
    if config.control == Control::Poll && !config.load.is_empty() {
        return Err(Error::Config {
            reason: format!(
                "load names models ({}) and control is \"poll\", which serves all models: set control = \"explicit\" (--control explicit), or leave load out",
                config.load.iter().take(8).map(|name| quote(name)).collect::<Vec<_>>().join(", ")
            ),
        });
    }
    for name in &config.load {
        millrace_bundle::check_name(name)
            .map_err(|error| Error::Config { reason: format!("load: {error}") })?;
    }
    for (name, options) in &config.models {
        millrace_bundle::check_name(name)
            .map_err(|error| Error::Config { reason: format!("models: {error}") })?;
        options
            .rollout()
            .check()
            .map_err(|reason| Error::Config { reason: format!("models.{name}: {reason}") })?;
    }
    Ok(())
}

impl Repository {
    /// Loads the models that the configuration names. A model that cannot be loaded is logged, and the index
    /// gives the reason.
    pub(super) async fn load_configured(&self) -> Result<()> {
        let _one = self.inner.refreshing.lock().await;
        for name in &self.inner.config.load {
            let outcome = match self.load_whole(name).await {
                Ok(outcome) => outcome.map_err(|error| error.to_string()),
                Err(error) => {
                    // Fails if the repository itself cannot be read.
                    millrace_bundle::scan(self.inner.source.store.as_ref(), &self.inner.source.root).await?;
                    Err(chain(&error))
                }
            };
            if let Err(error) = outcome {
                tracing::warn!(model = name, error, "a model that load names is not served");
            }
        }
        Ok(())
    }

    /// Refreshes the models that are loaded.
    pub(super) async fn refresh_loaded(&self) -> Result<()> {
        let loaded: Vec<String> = self.inner.models.read().models.keys().cloned().collect();
        let mut outcome = Ok(());
        for name in loaded {
            // Only a call drops a model that was deleted from the repository.
            if let Err(error) = self.load_now(&name, super::refresh::RETRY_AFTER).await {
                tracing::warn!(
                    model = name,
                    error = chain(&error),
                    "cannot search the repository for a model"
                );
                outcome = Err(error);
            }
        }
        outcome
    }

    /// Loads a model, or its new versions. For an ensemble, also loads its member models that are not loaded.
    /// Ready versions that did not change stay, with their statistics. Cancel safe: each model is loaded or
    /// unchanged.
    ///
    /// # Errors
    /// [`InferError::Unavailable`] unless `control` is `explicit`, when a version cannot be loaded, or when
    /// no version is complete; the versions that can be loaded are served even so. [`InferError::Invalid`],
    /// [`InferError::NotFound`] for the name.
    pub async fn load_model(&self, name: &str) -> Result<(), InferError> {
        self.check_call(name)?;
        let _one = self.inner.refreshing.lock().await;
        self.load_whole(name).await.map_err(|error| InferError::Unavailable {
            reason: format!("cannot search the repository for model {name:?}: {}", chain(&error)),
        })?
    }

    /// Loads a model. If another process may still be writing one of its versions, loads once more a second
    /// later.
    pub(super) async fn load_settled(&self, name: &str) -> Result<Result<(), InferError>> {
        let outcome = self.load_now(name, Duration::ZERO).await?;
        if !self.is_settling(Some(name)) {
            return Ok(outcome);
        }
        tokio::time::sleep(SETTLE).await;
        self.load_now(name, Duration::ZERO).await
    }

    /// Loads a model; the caller holds `refreshing`.
    async fn load_now(&self, name: &str, retry_after: Duration) -> Result<Result<(), InferError>> {
        let source = &self.inner.source;
        let listing = millrace_bundle::scan_model(source.store.as_ref(), &source.root, name).await?;
        let before = self.inner.models.read().clone();
        if listing.complete.is_empty() && listing.plain.is_empty() {
            let Some(skipped) = listing.skipped.last() else {
                let reason = format!("the repository has no model {}", quote(name));
                return Ok(Err(InferError::NotFound { reason }));
            };
            let reason = format!("model {name:?} has no complete version: {}", chain(&skipped.reason));
            return Ok(Err(InferError::Unavailable { reason }));
        }
        let broken = listing.skipped.iter().find(|skipped| {
            // Skips a version that is still being written, and a directory whose name is not a version.
            !matches!(
                skipped.reason,
                millrace_bundle::Error::Incomplete { .. } | millrace_bundle::Error::InvalidVersion { .. }
            )
        });
        let broken = broken.map(|skipped| chain(&skipped.reason));
        let mut next = Models::clone(&before);
        next.models.remove(name);
        next.unloaded.remove(name);
        let root = source.root.trim_matches('/');
        let of_model = |path: &str| {
            let relative = path.strip_prefix(root).unwrap_or(path).trim_start_matches('/');
            relative.split('/').next() == Some(name)
        };
        next.other.retain(|(path, _)| !of_model(path));
        self.settle(listing, &before, &mut next, retry_after).await;
        let failed = next.models.get(name).and_then(|versions| {
            let mut failed = versions.failed.iter().filter(|(_, failure)| failure.told);
            failed.next_back().map(|(version, failure)| {
                format!("model {name:?} version {version} cannot be served: {}", failure.reason)
            })
        });
        self.publish(&before, next);
        Ok(match failed.or_else(|| broken.map(|reason| format!("model {name:?}: {reason}"))) {
            Some(reason) => Err(InferError::Unavailable { reason }),
            None => Ok(()),
        })
    }

    /// Takes a model out of service; if `dependents`, also the models that were loaded only as members of
    /// this ensemble. Then waits at most `drain_ms_max` for their requests; slower requests still finish.
    /// Cancel safe: a dropped call has either taken all of them out or changed nothing.
    ///
    /// # Errors
    /// [`InferError::Unavailable`] unless `control` is `explicit`; [`InferError::Invalid`],
    /// [`InferError::NotFound`] for the name.
    pub async fn unload_model(&self, name: &str, dependents: bool) -> Result<(), InferError> {
        self.check_call(name)?;
        let leaving: Vec<CancellationToken> = {
            let _one = self.inner.refreshing.lock().await;
            let before = self.inner.models.read().clone();
            let mut next = Models::clone(&before);
            let Some(versions) = next.models.remove(name) else {
                return Err(InferError::NotFound { reason: format!("model {} is not loaded", quote(name)) });
            };
            next.unloaded.insert(name.to_owned());
            let mut leaving: Vec<_> = versions.ready.values().map(|model| model.gone.clone()).collect();
            let mut along = self.inner.along.lock();
            along.remove(name);
            if dependents {
                leaving.extend(next.unload_along(&versions, &mut along));
            }
            drop(along);
            self.publish(&before, next);
            leaving
        };
        let drained = futures::future::join_all(leaving.iter().map(CancellationToken::cancelled));
        let drain = Duration::from_millis(self.inner.config.drain_ms_max);
        if tokio::time::timeout(drain, drained).await.is_err() {
            tracing::warn!(
                model = name,
                drain_ms_max = drain.as_millis() as u64,
                "a run of an unloaded model has not ended"
            );
        }
        Ok(())
    }

    fn check_call(&self, name: &str) -> Result<(), InferError> {
        if self.inner.config.control == Control::Poll {
            return Err(InferError::Unavailable {
                reason: "explicit model load / unload is not allowed if polling is enabled: start the server with --control explicit or [serving] control = \"explicit\"".into(),
            });
        }
        millrace_bundle::check_name(name).map_err(|error| InferError::invalid(error.to_string()))
    }

    /// Marks a version as being loaded until the guard is dropped.
    pub(super) fn loading(&self, model: &str, version: u64) -> LoadingGuard<'_> {
        let version = (model.to_owned(), version);
        self.inner.loading.lock().insert(version.clone());
        LoadingGuard { repository: self, version }
    }

    /// Every version and its state, by name and version. Under [`Control::Explicit`] scans the repository for
    /// versions that are not loaded; otherwise reports the result of the last refresh.
    ///
    /// # Errors
    /// [`InferError::Unavailable`] when the repository cannot be read.
    pub async fn index(&self) -> Result<Vec<Entry>, InferError> {
        let mut found: BTreeMap<(String, u64), (&'static str, String)> = BTreeMap::new();
        if self.inner.config.control == Control::Explicit {
            self.add_unloaded(&mut found).await.map_err(|error| InferError::Unavailable {
                reason: format!("the repository cannot be read: {}", chain(&error)),
            })?;
        }
        let models = self.inner.models.read().clone();
        for (model, versions) in &models.models {
            for (version, ready) in &versions.ready {
                let told = models.fault(ready).map_or((READY, String::new()), |fault| (UNAVAILABLE, fault));
                found.insert((model.clone(), *version), told);
            }
            for (version, failure) in &versions.failed {
                let entry = found.entry((model.clone(), *version)).or_insert((UNAVAILABLE, String::new()));
                // A ready version stays ready when its replacement cannot be loaded.
                if entry.0 != READY {
                    entry.0 = UNAVAILABLE;
                }
                entry.1.clone_from(&failure.reason);
            }
        }
        for version in self.inner.loading.lock().iter() {
            let entry = found.entry(version.clone()).or_insert((LOADING, String::new()));
            // A ready version stays ready while its replacement under the same number is loaded.
            if entry.0 != READY {
                *entry = (LOADING, String::new());
            }
        }
        let entry = |((model, version), (state, reason))| Entry { model, version, state, reason };
        Ok(found.into_iter().map(entry).collect())
    }

    /// Adds every version in the repository, as not loaded.
    async fn add_unloaded(&self, found: &mut BTreeMap<(String, u64), (&'static str, String)>) -> Result<()> {
        let source = &self.inner.source;
        let _one = self.inner.indexing.lock().await;
        let listing = millrace_bundle::scan(source.store.as_ref(), &source.root).await?;
        let models = self.inner.models.read().clone();
        for version in listing.complete {
            let reason = if models.unloaded.contains(&version.name) { "unloaded" } else { "not loaded" };
            found.insert((version.name, version.version), (UNAVAILABLE, reason.to_owned()));
        }
        for version in listing.plain {
            let reason = if models.unloaded.contains(&version.name) { "unloaded" } else { "not loaded" };
            found.insert((version.name, version.version), (UNAVAILABLE, reason.to_owned()));
        }
        for skipped in listing.skipped {
            if let Some(version) = self.version_of(&skipped.path) {
                found.insert(version, (UNAVAILABLE, chain(&skipped.reason)));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::{Inner, Source};
    use super::*;

    /// A repository over an empty store; needs no ONNX Runtime.
    fn empty(control: Control) -> Repository {
        let store = Arc::new(object_store::memory::InMemory::new());
        Repository {
            inner: Arc::new(Inner {
                source: Source::new(store, "models"),
                config: Config { control, ..Config::default() },
                cache: None,
                models: Default::default(),
                ready: Default::default(),
                refreshing: Default::default(),
                loading: Default::default(),
                along: Default::default(),
                indexing: Default::default(),
                changes: tokio::sync::watch::Sender::new(0),
            }),
        }
    }

    #[tokio::test]
    async fn version_is_loading_until_its_guard_is_dropped() {
        for control in [Control::Poll, Control::Explicit] {
            let repository = empty(control);
            assert!(repository.index().await.unwrap().is_empty());
            let guard = repository.loading("mlp", 3);
            let entry = Entry { model: "mlp".into(), version: 3, state: LOADING, reason: String::new() };
            assert_eq!(repository.index().await.unwrap(), [entry]);
            drop(guard);
            assert!(repository.index().await.unwrap().is_empty());
        }
    }

    #[tokio::test]
    async fn call_for_a_missing_model_changes_nothing() {
        let repository = empty(Control::Explicit);
        assert!(matches!(repository.load_model("mlp").await, Err(InferError::NotFound { .. })));
        assert!(matches!(repository.unload_model("mlp", true).await, Err(InferError::NotFound { .. })));
        assert_eq!((repository.versions("mlp"), *repository.changes().borrow()), (None, 0));
    }
}
