//! Ensembles in the repository. An ensemble is loaded with its members, the models of its steps, and is ready
//! while all of them fit.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};

use millrace_bundle::{MODEL_FILE, Manifest};
use tokio_util::sync::CancellationToken;

use super::versions::{Origin, VersionSelector, Versions};
use super::{Inner, Models, Repository, unknown};
use crate::model::Model;
use crate::model::ensemble::{self, Ensemble, ModelLookup, StepModels};
use millrace_serving_core::error::{InferError, Result, chain};
use millrace_serving_core::statistics::Statistics;
use millrace_serving_runtime::rows::Rows;
use millrace_serving_runtime::session;

/// Weak handle to the repository for its own models, so that they do not keep it alive.
#[derive(Debug)]
struct WeakRepository(Weak<Inner>);

impl StepModels for WeakRepository {
    fn model_lookup(&self) -> Option<Box<ModelLookup<'static>>> {
        let models = self.0.upgrade()?.models.read().clone();
        Some(Box::new(move |model: &str, version: Option<u64>| {
            let versions = models.models.get(model).ok_or_else(|| unknown(model))?;
            match version {
                // A traffic split of the member applies to steps, too.
                None => {
                    versions.split_target("").map_or_else(|| versions.find(model, VersionSelector::Any), Ok)
                }
                Some(version) => versions.find(model, VersionSelector::Version(version)),
            }
        }))
    }
}

impl Repository {
    /// Builds a version of an ensemble, whether or not its steps can run now.
    ///
    /// # Errors
    /// The error in its configuration.
    pub(super) fn load_ensemble(&self, name: &str, version: u64, origin: &Origin) -> Result<Model, String> {
        let loading = origin.loading.as_ref();
        let (Some(loading), Some(plan)) = (loading, loading.and_then(|loading| loading.ensemble.as_ref()))
        else {
            return Err("it has no steps".into());
        };
        if self.inner.config.models.get(name).is_some_and(|options| options.response_cache == Some(true)) {
            return Err(format!(
                "response_cache of [serving.models.{name}] applies to the models of its steps, which may change \
                 what it answers"
            ));
        }
        let manifest = Manifest::of_ensemble(name, version, loading.declared())
            .map_err(|error| format!("config.pbtxt: {}", chain(&error)))?;
        let max_batch_size = loading.max_batch_size.unwrap_or(0);
        let gone = CancellationToken::new();
        Ok(Model {
            max_batch_size,
            rows: Rows::Independent,
            rows_max: usize::try_from(max_batch_size).ok().filter(|rows| *rows > 0),
            file: MODEL_FILE.to_owned(),
            shadowed: AtomicBool::new(false),
            ensemble: Some(Box::new(Ensemble::new(
                plan.clone(),
                Box::new(WeakRepository(Arc::downgrade(&self.inner))),
            ))),
            pool: session::none(&manifest, &self.inner.config),
            manifest,
            // A member may change, and with it the answers.
            answers: None,
            sequences: None,
            statistics: Statistics::new(name, version),
            drift: None,
            _leaving: gone.clone().drop_guard(),
            gone,
        })
    }

    /// Whether a version can answer; an ensemble can only while all its steps can run.
    ///
    /// # Errors
    /// [`InferError::Unavailable`], with the step and its error.
    pub fn check_steps(&self, model: &Model) -> Result<(), InferError> {
        if model.ensemble().is_none() {
            return Ok(());
        }
        let models = self.inner.models.read().clone();
        models.fault(model).map_or(Ok(()), |fault| {
            Err(InferError::Unavailable { reason: format!("{}: {fault}", ensemble::name(model)) })
        })
    }

    /// Loads a model, and for an ensemble its members that are not loaded. The caller holds `refreshing`.
    pub(super) async fn load_whole(&self, name: &str) -> Result<Result<(), InferError>> {
        let former = self.inner.models.read().clone();
        let outcome = self.load_settled(name).await?;
        // The model is now wanted for itself, so no ensemble unloads it.
        self.inner.along.lock().remove(name);
        for member in self.members_to_load(name) {
            if let Err(error) = self.load_settled(&member).await? {
                tracing::warn!(model = name, member, %error, "a model of an ensemble is not served as configured");
            }
            self.inner.along.lock().insert(member);
        }
        if outcome.is_ok() {
            self.unload_former(&former, name);
        }
        let models = self.inner.models.read().clone();
        let ready = models.models.get(name).and_then(|versions| versions.ready.values().next_back());
        Ok(outcome.and_then(|()| ready.map_or(Ok(()), |model| self.check_steps(model))))
    }

    /// Unloads the members that only a former version of this ensemble needed.
    fn unload_former(&self, former: &Models, name: &str) {
        let Some(former) = former.models.get(name) else { return };
        let before = self.inner.models.read().clone();
        let mut next = Models::clone(&before);
        // Requests that already run on them are still answered.
        next.unload_along(former, &mut self.inner.along.lock());
        if next.models.len() < before.models.len() {
            self.publish(&before, next);
        }
    }

    /// Members of an ensemble that are not loaded.
    fn members_to_load(&self, name: &str) -> BTreeSet<String> {
        let models = self.inner.models.read().clone();
        let members = models.models.get(name).map(members).unwrap_or_default();
        members.into_iter().filter(|member| !models.models.contains_key(member)).collect()
    }
}

/// The members of an ensemble; all versions of the model are ensembles.
fn members(versions: &Versions) -> BTreeSet<String> {
    let ensembles = versions.ready.values().filter_map(|model| model.ensemble());
    ensembles.flat_map(Ensemble::models).map(str::to_owned).collect()
}

impl Models {
    /// Why an ensemble cannot answer with these models. Every version that a step may run on is checked.
    pub(super) fn fault(&self, model: &Model) -> Option<String> {
        let ensemble = model.ensemble()?;
        // `turn` is the version of one model that steps without a version get.
        let check = |turn: Option<(&str, u64)>| {
            let find = |name: &str, version: Option<u64>| {
                let versions = self.models.get(name).ok_or_else(|| unknown(name))?;
                let turn = turn.filter(|(of, _)| *of == name).map(|(_, version)| version);
                versions.find(name, version.or(turn).map_or(VersionSelector::Any, VersionSelector::Version))
            };
            ensemble.check(model, &find).err()
        };
        let turns = |name| {
            let versions = self.models.get(name)?;
            let split = versions.split.as_ref()?.versions();
            Some(
                split
                    .filter(|version| versions.ready.contains_key(version))
                    .map(move |version| (name, version)),
            )
        };
        check(None)
            .or_else(|| ensemble.models().filter_map(turns).flatten().find_map(|turn| check(Some(turn))))
    }

    fn faults(&self) -> BTreeMap<(&str, u64), String> {
        let ready = self.models.values().flat_map(|versions| versions.ready.values());
        let faults = ready.filter_map(|model| Some(((model.name(), model.version()), self.fault(model)?)));
        faults.collect()
    }

    /// Logs the ensembles that stopped or started being able to answer since `before`. Returns the number
    /// that cannot.
    pub(super) fn log_faults(&self, before: &Models) -> i64 {
        let (faults, known) = (self.faults(), before.faults());
        for (key, fault) in &faults {
            let (model, version) = *key;
            if known.get(key) != Some(fault) {
                tracing::warn!(model, version, error = fault, "an ensemble cannot answer");
            }
        }
        for key in known.keys().filter(|key| !faults.contains_key(*key)) {
            let (model, version) = *key;
            if self.models.get(model).is_some_and(|versions| versions.ready.contains_key(&version)) {
                tracing::info!(model, version, "an ensemble can answer");
            }
        }
        faults.len() as i64
    }

    /// Unloads the models in `along` that only `ensemble`, already removed or replaced, needed. Keeps members
    /// of the ensembles that remain. Returns the tokens that fire when the unloaded versions are gone.
    pub(super) fn unload_along(
        &mut self,
        ensemble: &Versions,
        along: &mut BTreeSet<String>,
    ) -> Vec<CancellationToken> {
        let kept: BTreeSet<String> = self.models.values().flat_map(members).collect();
        let mut leaving = Vec::new();
        for member in members(ensemble).difference(&kept) {
            if !along.remove(member) {
                continue;
            }
            if let Some(versions) = self.models.remove(member) {
                leaving.extend(versions.ready.values().map(|model| model.gone.clone()));
                self.unloaded.insert(member.clone());
            }
        }
        leaving
    }
}
