//! Ensembles in the repository: they are loaded with the models of their steps, and are ready while all of
//! these fit.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};

use millrace_bundle::Manifest;
use tokio_util::sync::CancellationToken;

use super::versions::{Asked, Origin, Versions};
use super::{Inner, Model, Models, Repository, unknown};
use crate::ensemble::{self, Ensemble};
use crate::error::{InferError, Result, chain};
use crate::rows::Rows;
use crate::session;
use crate::statistics::Statistics;

/// The repository as its own models have it, which it holds.
#[derive(Debug, Clone)]
pub(crate) struct WeakRepository(Weak<Inner>);

impl WeakRepository {
    /// The repository, unless it is gone.
    pub(crate) fn upgrade(&self) -> Option<Repository> {
        self.0.upgrade().map(|inner| Repository { inner })
    }
}

impl Repository {
    /// Makes a version of an ensemble, whether its steps can run now or not.
    ///
    /// # Errors
    /// What is wrong with its configuration.
    pub(super) fn load_ensemble(
        &self,
        name: &str,
        version: u64,
        origin: &Arc<Origin>,
    ) -> Result<Model, String> {
        let loading = origin.loading.as_ref();
        let (Some(loading), Some(plan)) = (loading, loading.and_then(|loading| loading.ensemble.as_ref()))
        else {
            return Err("it has no steps".into());
        };
        if self.inner.config.models.get(name).is_some_and(|options| options.response_cache == Some(true)) {
            return Err(format!(
                "response_cache of [serving.models.{name}] belongs to its steps' models, which may change and with them \
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
            origin: Arc::clone(origin),
            shadowed: AtomicBool::new(false),
            ensemble: Some(Box::new(Ensemble::new(
                plan.clone(),
                WeakRepository(Arc::downgrade(&self.inner)),
            ))),
            pool: session::none(&manifest, &self.inner.config),
            manifest,
            // Its models may change, and with them what it answers.
            answers: None,
            sequences: None,
            statistics: Statistics::new(name, version),
            drift: None,
            _leaving: gone.clone().drop_guard(),
            gone,
        })
    }

    /// Finds the models of steps, all as they are at this moment.
    pub(crate) fn finder(&self) -> impl Fn(&str, Option<u64>) -> Result<Arc<Model>, InferError> {
        let models = self.inner.models.read().clone();
        move |model: &str, version: Option<u64>| {
            let versions = models.models.get(model).ok_or_else(|| unknown(model))?;
            match version {
                // Where requests are split between versions, steps are, too.
                None => versions.turn("").map_or_else(|| versions.find(model, Asked::Any), Ok),
                Some(version) => versions.find(model, Asked::Version(version)),
            }
        }
    }

    /// Whether a version that was found can answer: an ensemble only while all its steps can run.
    ///
    /// # Errors
    /// [`InferError::Unavailable`], with the step and what is wrong with it.
    pub(crate) fn check_steps(&self, model: &Model) -> Result<(), InferError> {
        if model.ensemble().is_none() {
            return Ok(());
        }
        let models = self.inner.models.read().clone();
        models.fault(model).map_or(Ok(()), |fault| {
            Err(InferError::Unavailable { reason: format!("{}: {fault}", ensemble::name(model)) })
        })
    }

    /// Loads a model, and of an ensemble the models that are not loaded. Only one call may run at a time.
    pub(super) async fn load_whole(&self, name: &str) -> Result<Result<(), InferError>> {
        let former = self.inner.models.read().clone();
        let outcome = self.load_settled(name).await?;
        // From now on it is wanted for itself.
        self.inner.along.lock().remove(name);
        for member in self.members_to_load(name) {
            if let Err(error) = self.load_settled(&member).await? {
                tracing::warn!(model = name, member, %error, "a model of an ensemble is not served as it should be");
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

    /// Takes out what was loaded for steps that an ensemble had and has no more.
    fn unload_former(&self, former: &Models, name: &str) {
        let Some(former) = former.models.get(name) else { return };
        let before = self.inner.models.read().clone();
        let mut next = Models::clone(&before);
        // Requests that run on them still are answered.
        next.unload_along(former, &mut self.inner.along.lock());
        if next.models.len() < before.models.len() {
            self.publish(&before, next);
        }
    }

    /// Models of an ensemble's steps that are not loaded.
    fn members_to_load(&self, name: &str) -> BTreeSet<String> {
        let models = self.inner.models.read().clone();
        let members = models.models.get(name).map(members).unwrap_or_default();
        members.into_iter().filter(|member| !models.models.contains_key(member)).collect()
    }
}

/// The models of the steps of an ensemble, which is one in all its versions.
fn members(versions: &Versions) -> BTreeSet<String> {
    let ensembles = versions.ready.values().filter_map(|model| model.ensemble());
    ensembles.flat_map(Ensemble::models).map(str::to_owned).collect()
}

impl Models {
    /// Why an ensemble cannot answer with these models: none of the versions may be wrong for it that a step
    /// runs on.
    pub(super) fn fault(&self, model: &Model) -> Option<String> {
        let ensemble = model.ensemble()?;
        // `turn` is a model's version that steps get which name none.
        let check = |turn: Option<(&str, u64)>| {
            let find = |name: &str, version: Option<u64>| {
                let versions = self.models.get(name).ok_or_else(|| unknown(name))?;
                let turn = turn.filter(|(of, _)| *of == name).map(|(_, version)| version);
                versions.find(name, version.or(turn).map_or(Asked::Any, Asked::Version))
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

    /// Logs which ensembles can answer with these models and could not before, and the other way round; gives
    /// how many cannot.
    pub(super) fn tell_faults(&self, before: &Models) -> i64 {
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

    /// Takes out the models that were loaded for an ensemble alone, as it was before it was taken out or replaced,
    /// but for those that one that is there has steps of; tells what fires when they are gone.
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
