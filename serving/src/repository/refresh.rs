//! Looking through the source: what is new is loaded, what is gone is dropped, what is bad is named.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_bundle::{Listing, Manifest};
use tokio_util::sync::CancellationToken;

use super::{Failure, Model, Models, Repository, Versions};
use crate::blocking::blocking;
use crate::config::Control;
use crate::error::{Result, chain};
use crate::metrics::{MODELS, ModelMetrics};
use crate::model_config::max_batch_size;
use crate::session;
use crate::statistics::Statistics;

/// A version that failed to load is tried again after this time, or at once when its manifest changed.
pub(super) const RETRY_AFTER: Duration = Duration::from_secs(30);

impl Repository {
    /// Looks through the source once; only one call may run at a time.
    pub(super) async fn refresh_now(&self) -> Result<()> {
        let inner = &self.inner;
        if inner.config.control == Control::Explicit {
            return self.refresh_loaded().await;
        }
        let listing = millrace_bundle::scan(inner.source.store.as_ref(), &inner.source.root).await?;
        let before = inner.models.read().clone();
        let mut next = Models::default();
        self.settle(listing, &before, &mut next, RETRY_AFTER).await;
        self.publish(&before, next);
        Ok(())
    }

    /// Adds what was found to `next`: versions that are ready stay, new ones are loaded, and ones that
    /// failed longer ago than `retry_after`.
    pub(super) async fn settle(
        &self,
        listing: Listing,
        before: &Models,
        next: &mut Models,
        retry_after: Duration,
    ) {
        let inner = &self.inner;
        for skipped in listing.skipped {
            let reason = chain(&skipped.reason);
            match self.version_of(&skipped.path) {
                Some((model, version)) => {
                    let failures = before.models.get(&model).map(|versions| &versions.failed);
                    let known = failures.and_then(|failed| failed.get(&version));
                    if known.is_none_or(|failure| failure.reason != reason) {
                        tracing::warn!(model, version, error = reason, "a model version is not served");
                    }
                    let failure = Failure { manifest: None, reason, at: Instant::now() };
                    next.models.entry(model).or_default().failed.insert(version, failure);
                }
                None => {
                    if !before.other.iter().any(|(path, _)| *path == skipped.path) {
                        tracing::warn!(path = skipped.path, error = reason, "a directory is not served");
                    }
                    next.other.push((skipped.path, reason));
                }
            }
        }

        let mut found: BTreeMap<String, Vec<Manifest>> = BTreeMap::new();
        for version in listing.complete {
            found.entry(version.name).or_default().push(version.manifest);
        }
        for (model, mut manifests) in found {
            let old = manifests.len().saturating_sub(inner.config.limits.versions_max.max(1));
            manifests.drain(..old);
            for manifest in manifests {
                let known = before.models.get(&model);
                let ready = known.and_then(|versions| versions.ready.get(&manifest.version));
                let failed = known.and_then(|versions| versions.failed.get(&manifest.version));
                let entry = next.models.entry(model.clone()).or_default();
                match (ready, failed) {
                    (Some(ready), _) if ready.manifest == manifest => {
                        entry.ready.insert(manifest.version, ready.clone());
                        continue;
                    }
                    (_, Some(failure))
                        if failure.manifest.as_ref() == Some(&manifest)
                            && failure.at.elapsed() < retry_after =>
                    {
                        entry.failed.insert(manifest.version, failure.clone());
                        continue;
                    }
                    _ => {}
                }
                let version = manifest.version;
                match self.load(&manifest).await {
                    Ok(loaded) => {
                        tracing::info!(model, version, "a model version is ready");
                        entry.ready.insert(version, Arc::new(loaded));
                    }
                    Err(error) => {
                        let reason = chain(&error);
                        tracing::warn!(model, version, error = reason, "a model version is not served");
                        let manifest = Some(manifest);
                        let failure = Failure { manifest, reason, at: Instant::now() };
                        entry.failed.insert(version, failure);
                    }
                }
            }
        }
    }

    /// Makes `next` what is served.
    pub(super) fn publish(&self, before: &Models, next: Models) {
        let inner = &self.inner;
        let same = |a: &Models, b: &Models, model: &String, version: &u64| {
            let ready = |models: &Models| Some(Arc::as_ptr(models.models.get(model)?.ready.get(version)?));
            ready(a) == ready(b)
        };
        let mut changed = false;
        for (model, versions) in &before.models {
            for version in versions.ready.keys() {
                let kept = next.models.get(model).is_some_and(|now| now.ready.contains_key(version));
                if !kept {
                    tracing::info!(model, version, "a model version is gone");
                }
                changed |= !kept;
            }
        }
        for (model, versions) in &next.models {
            changed |= versions.ready.keys().any(|version| !same(before, &next, model, version));
        }
        let count = |f: fn(&Versions) -> usize| next.models.values().map(f).sum::<usize>() as i64;
        MODELS.with_label_values(&["ready"]).set(count(|versions| versions.ready.len()));
        MODELS.with_label_values(&["failed"]).set(count(|versions| versions.failed.len()));
        *inner.models.write() = Arc::new(next);
        if changed {
            inner.changes.send_modify(|count| *count = count.wrapping_add(1));
        }
    }

    async fn load(&self, manifest: &Manifest) -> Result<Model> {
        let inner = &self.inner;
        let _loading = self.loading(&manifest.name, manifest.version);
        let limits = millrace_bundle::Limits { model_bytes_max: inner.config.limits.model_bytes_max };
        let bundle = millrace_bundle::load_with(
            inner.source.store.as_ref(),
            &inner.source.root,
            &manifest.name,
            manifest.version,
            &limits,
        )
        .await?;
        let config = inner.config.clone();
        blocking("model loading", move || {
            let pool = session::build(&bundle, &config)?;
            let manifest = bundle.manifest().clone();
            let metrics = ModelMetrics::new(&manifest.name, manifest.version);
            let gone = CancellationToken::new();
            Ok(Model {
                max_batch_size: max_batch_size(&manifest.signature, config.limits.message_bytes_max),
                manifest,
                pool,
                metrics,
                statistics: Statistics::default(),
                _leaving: gone.clone().drop_guard(),
                gone,
            })
        })
        .await
    }

    /// Name and version of a path in the store, when it has the form of a version's path.
    pub(super) fn version_of(&self, path: &str) -> Option<(String, u64)> {
        let root = self.inner.source.root.trim_matches('/');
        let relative = path.strip_prefix(root)?.trim_start_matches('/');
        let (model, version) = relative.split_once('/')?;
        Some((model.to_owned(), version.parse().ok().filter(|version| *version > 0)?))
    }
}
