//! The refresh of the repository: scans the source, loads new versions, drops deleted ones and reports bad
//! ones.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use millrace_bundle::{CONFIG_FILE, Listing, MANIFEST_FILE, MODEL_FILE, Manifest, ModelFolder, PlainVersion};

use super::model_files::{SETTLE, is_settled};
use super::versions::{Content, Failure, Origin, Ready, Versions};
use super::{Models, Repository};
use crate::model::Model;
use millrace_serving_core::config::{Control, VersionPolicy};
use millrace_serving_core::error::{Error, Result, chain};
use millrace_serving_core::metrics::MODELS;

/// A failed version is retried after this time, or at once when it changed.
pub(super) const RETRY_AFTER: Duration = Duration::from_secs(30);

/// The scan's result for one model.
#[derive(Debug, Default)]
struct ScanResult {
    versions: BTreeMap<u64, Candidate>,
    folder: Option<ModelFolder>,
}

/// A version that may be loaded.
#[derive(Debug)]
enum Candidate {
    Bundle(Box<Manifest>),
    Plain(PlainVersion),
    /// A ready version whose files are incomplete now, for example while they are replaced in place.
    Broken(Failure),
}

impl Repository {
    /// Scans the source once; the caller holds `refreshing`.
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

    /// Adds the models of `listing` to `next`: keeps ready versions, loads new ones, and retries those that
    /// failed longer ago than `retry_after`.
    pub(super) async fn settle(
        &self,
        listing: Listing,
        before: &Models,
        next: &mut Models,
        retry_after: Duration,
    ) {
        let mut found: BTreeMap<String, ScanResult> = BTreeMap::new();
        for skipped in listing.skipped {
            let reason = chain(&skipped.reason);
            match self.version_of(&skipped.path) {
                Some((model, version)) => {
                    let known = before.models.get(&model);
                    let is_ready = known.is_some_and(|known| known.ready.contains_key(&version));
                    let known = known.and_then(|known| known.failed.get(&version));
                    let is_new = known.is_none_or(|failure| failure.reason != reason);
                    let at = Instant::now();
                    let failure = Failure { origin: None, reason, at, settling: false, told: false };
                    if is_ready {
                        let versions = &mut found.entry(model).or_default().versions;
                        versions.insert(version, Candidate::Broken(failure));
                        continue;
                    }
                    if is_new {
                        tracing::warn!(
                            model,
                            version,
                            error = failure.reason,
                            "a model version is not served"
                        );
                    }
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

        for (model, reason) in listing.unread {
            let problem = format!("its folder cannot be read: {}", chain(&reason));
            let known = before.models.get(&model);
            let other = before.other.iter().any(|(path, _)| *path == model);
            if !other && known.is_none_or(|known| !known.problems.contains(&problem)) {
                tracing::warn!(model, error = problem, "a model is not served as configured");
            }
            match known {
                // Its versions stay until the folder can be read again.
                Some(known) => {
                    next.models.insert(model, Versions { problems: vec![problem], ..known.clone() });
                }
                None => next.other.push((model, problem)),
            }
        }
        for version in listing.complete {
            let candidate = Candidate::Bundle(Box::new(version.manifest));
            found.entry(version.name).or_default().versions.insert(version.version, candidate);
        }
        for version in listing.plain {
            let known = before.models.get(&version.name);
            let configured = listing
                .folders
                .iter()
                .any(|folder| folder.name == version.name && folder.files.contains_key(CONFIG_FILE));
            // A ready bundle without its manifest is being replaced; it must not be loaded as a plain graph.
            if !configured
                && known.is_some_and(|known| known.ready.get(&version.version).is_some_and(is_bundle))
            {
                let reason = format!("its {MANIFEST_FILE} was deleted");
                let at = Instant::now();
                let failure = Failure { origin: None, reason, at, settling: false, told: false };
                let versions = &mut found.entry(version.name).or_default().versions;
                versions.insert(version.version, Candidate::Broken(failure));
                continue;
            }
            let versions = &mut found.entry(version.name.clone()).or_default().versions;
            versions.insert(version.version, Candidate::Plain(version));
        }
        for folder in listing.folders {
            if let Some(found) = found.get_mut(&folder.name) {
                found.folder = Some(folder);
            }
        }
        let unknown = Versions::default();
        for (model, found) in found {
            let known = before.models.get(&model).unwrap_or(&unknown);
            let mut versions = self.settle_model(&model, found, known, retry_after).await;
            let entry = next.models.entry(model).or_default();
            versions.failed.append(&mut entry.failed);
            *entry = versions;
        }
    }

    /// The new state of a model's versions.
    async fn settle_model(
        &self,
        model: &str,
        mut found: ScanResult,
        known: &Versions,
        retry_after: Duration,
    ) -> Versions {
        let config = &self.inner.config;
        let options = config.models.get(model);
        let beside = self.read_model_files(found.folder.as_ref(), &known.beside).await;
        let declared = beside.config.as_ref().and_then(|read| read.good.clone());
        let limit = config.limits.versions_max.max(1);
        let policy = options
            .and_then(|options| options.versions.clone())
            .or_else(|| declared.and_then(|declared| declared.policy.clone()))
            .unwrap_or_else(|| newest(limit));
        let rollout = options.map(|options| options.rollout()).unwrap_or_default();
        let rollout = match beside.rollout.as_ref().and_then(|read| read.good.as_ref()) {
            Some(file) => rollout.with(file),
            None => rollout,
        };
        let problems = beside.problems().cloned().collect();
        let mut versions = Versions { policy, rollout, beside, problems, ..Versions::default() };

        let there: Vec<u64> = found.versions.keys().rev().copied().collect();
        let mut chosen: Vec<u64> = there.iter().take(limit).copied().collect();
        let mut enough = usize::MAX;
        match versions.policy.clone() {
            VersionPolicy::Latest(count) => enough = usize::try_from(count.get()).unwrap_or(usize::MAX),
            VersionPolicy::All if there.len() > limit => versions.problems.push(format!(
                "versions is \"all\", but the model has {} versions: the newest {limit} are served (limits.versions_max)",
                there.len()
            )),
            VersionPolicy::All => {}
            VersionPolicy::Specific(wanted) => {
                let missing = wanted.iter().filter(|version| !found.versions.contains_key(version));
                for version in missing {
                    let reason = format!("versions names it ({wanted:?}), and it is not in the repository");
                    let at = Instant::now();
                    let failure = Failure { origin: None, reason, at, settling: false, told: true };
                    versions.failed.insert(*version, failure);
                }
                chosen = there.iter().copied().filter(|version| wanted.contains(version)).collect();
            }
        }
        for version in chosen {
            if versions.ready.len() >= enough {
                break;
            }
            if let Some(candidate) = found.versions.remove(&version) {
                self.settle_version(model, version, candidate, known, &mut versions, retry_after).await;
            }
        }
        // Versions that a label or a share names are served whatever the policy is. The previous version of a
        // label stays ready while the label cannot move.
        let by_policy: BTreeSet<u64> = versions.ready.keys().chain(versions.failed.keys()).copied().collect();
        let mut named = versions.rollout.versions();
        for version in named.iter().copied().chain(known.labels.values().copied()) {
            if let Some(candidate) = found.versions.remove(&version) {
                self.settle_version(model, version, candidate, known, &mut versions, retry_after).await;
            }
        }
        versions.roll_out(known);
        named.extend(versions.labels.values());
        versions.ready.retain(|version, _| by_policy.contains(version) || named.contains(version));
        versions.failed.retain(|version, _| by_policy.contains(version) || named.contains(version));
        for problem in &versions.problems {
            if !known.problems.contains(problem) {
                tracing::warn!(model, error = problem, "a model is not served as configured");
            }
        }
        versions
    }

    /// Adds a version to the ready ones or to the failed ones. A ready version stays ready while its
    /// replacement is not.
    async fn settle_version(
        &self,
        model: &str,
        version: u64,
        candidate: Candidate,
        known: &Versions,
        versions: &mut Versions,
        retry_after: Duration,
    ) {
        let ready = known.ready.get(&version);
        let failed = known.failed.get(&version);
        let failure = match origin(candidate, versions) {
            Ok(origin) => {
                if let Some(ready) = ready.filter(|ready| ready.origin == origin) {
                    versions.ready.insert(version, ready.clone());
                    return;
                }
                let same = failed.filter(|failure| failure.origin.as_ref() == Some(&origin));
                match same {
                    Some(failure) if !failure.settling && failure.at.elapsed() < retry_after => {
                        failure.clone()
                    }
                    same => match self.try_version(model, version, origin.clone(), same).await {
                        Ok(loaded) => {
                            tracing::info!(model, version, "a model version is ready");
                            versions.ready.insert(version, Ready { model: Arc::new(loaded), origin });
                            return;
                        }
                        Err(failure) => failure,
                    },
                }
            }
            Err(failure) => failure,
        };
        if failed.is_none_or(|failed| failed.reason != failure.reason) {
            tracing::warn!(model, version, error = failure.reason, "a model version is not served");
        }
        versions.failed.insert(version, failure);
        // The ready version is dropped when its folder is deleted.
        if let Some(ready) = ready {
            versions.ready.insert(version, ready.clone());
        }
    }

    /// Loads a version, unless its graph may still be being written. `same` is the failure of the last
    /// attempt with the same origin.
    async fn try_version(
        &self,
        model: &str,
        version: u64,
        origin: Arc<Origin>,
        same: Option<&Failure>,
    ) -> Result<Model, Failure> {
        let settling = |origin: Arc<Origin>, reason: String| {
            let at = same.map_or_else(Instant::now, |same| same.at);
            Failure { origin: Some(origin), reason, at, settling: true, told: true }
        };
        if let Content::Plain(files) = &origin.content {
            // A file with a modification time in the future counts as complete once it is unchanged for
            // [`SETTLE`].
            let stayed = same.is_some_and(|same| same.settling && same.at.elapsed() >= SETTLE);
            if !files.values().all(is_settled) && !stayed {
                let waits = SETTLE.as_millis();
                let reason = format!("its graph was written less than {waits} ms ago, more of it may come");
                return Err(settling(origin, reason));
            }
        }
        match self.load(model, version, &origin).await {
            Ok(loaded) => Ok(loaded),
            Err(Error::Repository(error @ millrace_bundle::Error::Incomplete { .. })) => {
                Err(settling(origin, chain(&error)))
            }
            Err(error) => {
                let (reason, at) = (chain(&error), Instant::now());
                Err(Failure { origin: Some(origin), reason, at, settling: false, told: true })
            }
        }
    }

    /// Publishes `next` as the models that are served.
    pub(super) fn publish(&self, before: &Models, next: Models) {
        let inner = &self.inner;
        let same = |a: &Models, b: &Models, model: &String, version: &u64| {
            let ready = |models: &Models| Some(Arc::as_ptr(models.models.get(model)?.ready.get(version)?));
            ready(a) == ready(b)
        };
        let mut changed = false;
        for (model, versions) in &before.models {
            let now = next.models.get(model);
            for version in versions.ready.keys() {
                let kept = now.is_some_and(|now| now.ready.contains_key(version));
                if !kept {
                    tracing::info!(model, version, "unloaded a model version whose files were removed");
                }
                changed |= !kept;
            }
            changed |= now.is_some_and(|now| now.labels != versions.labels || now.split != versions.split);
        }
        for (model, versions) in &next.models {
            if before.models.get(model).is_none_or(|before| before.labels != versions.labels)
                && !versions.labels.is_empty()
            {
                tracing::info!(model, labels = ?versions.labels, "labels are in force");
            }
            changed |= versions.ready.keys().any(|version| !same(before, &next, model, version));
        }
        let count = |f: fn(&Versions) -> usize| next.models.values().map(f).sum::<usize>() as i64;
        let faulty = next.log_faults(before);
        MODELS.with_label_values(&["ready"]).set(count(|versions| versions.ready.len()) - faulty);
        MODELS.with_label_values(&["failed"]).set(count(|versions| versions.failed.len()) + faulty);
        changed |= self.note_ready(&next);
        *inner.models.write() = Arc::new(next);
        if changed {
            inner.changes.send_modify(|count| *count = count.wrapping_add(1));
        }
    }

    /// Records once that each model of the configuration has a version that can answer. Returns whether that
    /// is new. Later failures do not reset it.
    pub(super) fn note_ready(&self, models: &Models) -> bool {
        let inner = &self.inner;
        let answers = |name: &String| {
            let versions = models.models.get(name);
            versions
                .is_some_and(|versions| versions.ready.values().any(|model| models.fault(model).is_none()))
        };
        // Under explicit control, options for a model do not mean that it is to be served.
        let options = (inner.config.control == Control::Poll).then(|| inner.config.models.keys());
        let mut configured = inner.config.load.iter().chain(options.into_iter().flatten());
        !inner.ready.load(Ordering::SeqCst)
            && configured.all(answers)
            && !inner.ready.swap(true, Ordering::SeqCst)
    }

    /// Name and version of a path in the store, if it has the form of a version's path.
    pub(super) fn version_of(&self, path: &str) -> Option<(String, u64)> {
        let root = self.inner.source.root.trim_matches('/');
        let relative = path.strip_prefix(root)?.trim_start_matches('/');
        let (model, version) = relative.split_once('/')?;
        Some((model.to_owned(), version.parse().ok().filter(|version| *version > 0)?))
    }
}

fn is_bundle(ready: &Ready) -> bool {
    matches!(ready.origin.content, Content::Bundle(_))
}

/// The default policy.
fn newest(limit: usize) -> VersionPolicy {
    let count = u32::try_from(limit).ok().and_then(NonZeroU32::new).unwrap_or(NonZeroU32::MAX);
    VersionPolicy::Latest(count)
}

/// The origin of a version; an error if it cannot be loaded.
fn origin(candidate: Candidate, versions: &Versions) -> Result<Arc<Origin>, Failure> {
    let config = versions.beside.config.as_ref();
    let failure = |reason: String, told: bool| Failure {
        origin: None,
        reason,
        at: Instant::now(),
        settling: false,
        told,
    };
    if let Some(problem) = config.and_then(|read| read.problem.as_ref()) {
        return Err(failure(problem.clone(), true));
    }
    let loading = config.and_then(|read| read.good.as_ref()).map(|declared| declared.loading.clone());
    let is_ensemble = loading.as_ref().is_some_and(|loading| loading.ensemble.is_some());
    let content = match candidate {
        Candidate::Broken(failure) => return Err(failure),
        Candidate::Bundle(_) if is_ensemble => {
            let reason = "config.pbtxt has ensemble_scheduling, and this version is a bundle: an ensemble has no graph of its own";
            return Err(failure(reason.to_owned(), true));
        }
        Candidate::Plain(_) if is_ensemble => Content::Ensemble,
        Candidate::Bundle(manifest) => Content::Bundle(manifest),
        Candidate::Plain(version) => {
            let file = loading.as_ref().map_or(MODEL_FILE, |loading| loading.file.as_str());
            version.stat(file).map_err(|error| {
                let hint = if file == MODEL_FILE {
                    format!(" ({CONFIG_FILE} may name another file as default_model_filename)")
                } else {
                    String::new()
                };
                failure(format!("{}{hint}", chain(&error)), false)
            })?;
            Content::Plain(version.files)
        }
    };
    Ok(Arc::new(Origin { content, loading }))
}
