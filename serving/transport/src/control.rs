//! The control calls, independent of the transport: configurations, statistics, the index of the repository,
//! loading and unloading, trace settings, the log.

use std::sync::Arc;

use crate::logging::{Change, LogSettings, Logging, Value};
use crate::shared_memory::SharedMemory;
use crate::tokens::Caller;
use crate::trace;
use millrace_serving_core::config::VersionPolicy;
use millrace_serving_core::error::{InferError, quote};
use millrace_serving_core::wire::inference as pb;
use millrace_serving_repository::infer::Inference;
use millrace_serving_repository::model_config;
use millrace_serving_repository::repository::{Entry, VersionSelector};

/// Most parameters or settings of a call; real calls have a few.
const PARAMETERS_MAX: usize = 64;

/// Name of the server in its metadata.
pub(crate) const SERVER_NAME: &str = "millrace";
/// Protocol extensions of every server, in Triton's terms. [`Controls::extensions`] and [`extensions`] add
/// those that depend on the configuration.
const EXTENSIONS: &[&str] = &[
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "sequence",
    "statistics",
];

/// Protocol extensions of this server.
pub(crate) fn extensions(controls: &Controls, memory: &SharedMemory) -> Vec<&'static str> {
    let mut extensions = controls.extensions();
    if memory.is_on() {
        extensions.push("system_shared_memory");
    }
    extensions
}

/// State of the control calls. Cheap to clone; all clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Controls {
    inference: Inference,
    logging: Option<Arc<dyn Logging>>,
}

impl Controls {
    pub(crate) fn new(inference: Inference, logging: Option<Arc<dyn Logging>>) -> Controls {
        Controls { inference, logging }
    }

    /// Names of the protocol extensions that this server supports.
    pub(crate) fn extensions(&self) -> Vec<&'static str> {
        let mut extensions = EXTENSIONS.to_vec();
        if self.logging.is_some() {
            extensions.push("logging");
        }
        extensions
    }

    /// The configuration of a version, the latest when `version` is empty.
    ///
    /// # Errors
    /// [`InferError::NotFound`], [`InferError::Unavailable`]; [`InferError::Invalid`] for a version that is
    /// neither a number nor a label of the model; [`InferError::Denied`], here and below, if the caller's
    /// token does not allow the call.
    pub(crate) fn model_config(
        &self,
        caller: &Caller,
        model: &str,
        version: &str,
    ) -> Result<pb::ModelConfig, InferError> {
        caller.may_use(model)?;
        let repository = self.inference.repository();
        let model = repository.find(model, VersionSelector::parse(version)?)?;
        let policy = repository.policy(model.name()).unwrap_or(VersionPolicy::All);
        Ok(model_config::describe(&model, &policy))
    }

    /// Statistics of a version; of all ready versions of a model when `version` is empty; of all models that
    /// the caller may use when both are empty.
    ///
    /// # Errors
    /// As [`Controls::model_config`].
    pub(crate) fn statistics(
        &self,
        caller: &Caller,
        model: &str,
        version: &str,
    ) -> Result<Vec<pb::ModelStatistics>, InferError> {
        if !model.is_empty() {
            caller.may_use(model)?;
        }
        let repository = self.inference.repository();
        let models = match (model, VersionSelector::parse(version)?) {
            ("", VersionSelector::Any) => repository.ready(None),
            ("", _) => {
                return Err(InferError::invalid(format!(
                    "version {} of no model: name the model",
                    quote(version)
                )));
            }
            (model, asked @ (VersionSelector::Version(_) | VersionSelector::Label(_))) => {
                vec![repository.find(model, asked)?]
            }
            (model, VersionSelector::Any) => {
                // Reports why no version is ready.
                repository.get(model, None)?;
                repository.ready(Some(model))
            }
        };
        let seen = models.iter().filter(|model| caller.may_see(model.name()));
        Ok(seen.map(|model| model.describe()).collect())
    }

    /// Every version in the repository that the caller may use, with its state; only ready ones if `ready`.
    ///
    /// # Errors
    /// [`InferError::Unsupported`] for a repository name, as there is one repository; the errors of
    /// [`millrace_serving_repository::repository::Repository::index`].
    pub(crate) async fn index(
        &self,
        caller: &Caller,
        repository: &str,
        ready: bool,
    ) -> Result<Vec<Entry>, InferError> {
        check_repository(repository)?;
        let mut entries = self.inference.repository().index().await?;
        entries.retain(|entry| (!ready || entry.is_ready()) && caller.may_see(&entry.model));
        Ok(entries)
    }

    /// Loads a model and waits until it is ready. Loading continues if the client disconnects.
    ///
    /// # Errors
    /// [`InferError::Invalid`] for any parameter; the errors of [`millrace_serving_repository::repository::Repository::load_model`].
    pub(crate) async fn load(
        &self,
        caller: &Caller,
        repository: &str,
        model: String,
        parameters: &[&str],
    ) -> Result<(), InferError> {
        let entered = self.inference.enter()?;
        caller.may_control(&model)?;
        check_repository(repository)?;
        if let Some(name) = parameters.first() {
            return Err(match *name {
                "config" => InferError::invalid(
                    "parameter \"config\" is refused: the configuration of a model follows from its bundle, which does not change",
                ),
                name if name.starts_with("file:") => InferError::invalid(format!(
                    "parameter {} is refused: bundles do not change, publish the files as a new version",
                    quote(name)
                )),
                name => InferError::invalid(format!("load has no parameter {}", quote(name))),
            });
        }
        let repository = self.inference.repository().clone();
        finish(async move {
            let _entered = entered;
            repository.load_model(&model).await
        })
        .await
    }

    /// Unloads a model and waits for the requests that it still answers. `unload_dependents` also unloads the
    /// models of an ensemble that were loaded with it. A parameter's value is `None` if it is not a boolean.
    ///
    /// # Errors
    /// [`InferError::Invalid`] for parameters other than `unload_dependents`; the errors of
    /// [`millrace_serving_repository::repository::Repository::unload_model`].
    pub(crate) async fn unload(
        &self,
        caller: &Caller,
        repository: &str,
        model: String,
        parameters: &[(&str, Option<bool>)],
    ) -> Result<(), InferError> {
        let entered = self.inference.enter()?;
        caller.may_control(&model)?;
        check_repository(repository)?;
        let mut dependents = false;
        for (name, value) in parameters {
            match (*name, value) {
                ("unload_dependents", Some(value)) => dependents = *value,
                ("unload_dependents", None) => {
                    return Err(InferError::invalid("parameter \"unload_dependents\" is not true or false"));
                }
                (name, _) => {
                    return Err(InferError::invalid(format!(
                        "unload has no parameter {}, it has unload_dependents",
                        quote(name)
                    )));
                }
            }
        }
        let repository = self.inference.repository().clone();
        finish(async move {
            let _entered = entered;
            repository.unload_model(&model, dependents).await
        })
        .await
    }

    /// The trace settings of one model or, when `model` is empty, of all. They are fixed.
    ///
    /// # Errors
    /// [`InferError::Invalid`] for unknown settings and for changes of values; [`InferError::NotFound`],
    /// [`InferError::Unavailable`] for the model.
    pub(crate) fn trace_settings(
        &self,
        caller: &Caller,
        model: &str,
        changes: &[(&str, Vec<&str>)],
    ) -> Result<[(&'static str, Vec<String>); 6], InferError> {
        let model = (!model.is_empty()).then_some(model);
        match model {
            Some(model) if changes.is_empty() => caller.may_use(model)?,
            Some(model) => caller.may_control(model)?,
            None if changes.is_empty() => {}
            None => caller.may_control_all()?,
        }
        if let Some(model) = model {
            self.inference.repository().get(model, None)?;
        }
        if changes.len() > PARAMETERS_MAX {
            let reason = format!("{} trace settings, the limit is {PARAMETERS_MAX}", changes.len());
            return Err(InferError::Invalid { reason });
        }
        changes.iter().try_for_each(|(name, values)| trace::check(name, values))?;
        Ok(trace::settings())
    }

    /// Changes the log settings, atomically, and returns those then in force.
    ///
    /// # Errors
    /// [`InferError::Unsupported`] in a process that gave the server no [`Logging`]; [`InferError::Invalid`]
    /// for unknown settings; [`InferError::Unavailable`] if the log cannot be switched.
    pub(crate) fn log_settings<'a>(
        &self,
        caller: &Caller,
        changes: impl ExactSizeIterator<Item = (&'a str, Value)>,
    ) -> Result<LogSettings, InferError> {
        if changes.len() > 0 {
            caller.may_control_all()?;
        }
        let Some(logging) = &self.logging else {
            return Err(InferError::Unsupported {
                reason: "the process of this server does not allow changes of its log".into(),
            });
        };
        if changes.len() > PARAMETERS_MAX {
            let reason = format!("{} log settings, the limit is {PARAMETERS_MAX}", changes.len());
            return Err(InferError::Invalid { reason });
        }
        let changes: Vec<Change> =
            changes.map(|(name, value)| Change::parse(name, &value)).collect::<Result<_, _>>()?;
        if changes.is_empty() {
            return Ok(logging.settings());
        }
        let changed = logging.change(&|settings| changes.iter().for_each(|change| change.apply(settings)));
        let settings = changed.map_err(|reason| InferError::Unavailable { reason })?;
        tracing::info!(?settings, "a client switched the log");
        Ok(settings)
    }
}

/// Refuses a repository name: there is one repository, and it has no name.
fn check_repository(name: &str) -> Result<(), InferError> {
    if name.is_empty() {
        return Ok(());
    }
    Err(InferError::Unsupported {
        reason: format!("repository {}: the server has one repository, leave its name out", quote(name)),
    })
}

/// Runs work to its end, even if the call is dropped.
async fn finish(
    work: impl Future<Output = Result<(), InferError>> + Send + 'static,
) -> Result<(), InferError> {
    match tokio::spawn(work).await {
        Ok(outcome) => outcome,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Err(InferError::Unavailable { reason: "the server is stopping".into() }),
        },
    }
}
