//! `[serving.models.NAME]`: what is said of one model.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Config, Devices};
use crate::error::{Error, Result, quote};
use crate::repository::{Rollout, ShadowTarget, Target, VersionPolicy};

/// Most sessions of a model version: each costs memory and, beyond one per processor, brings nothing.
const SESSIONS_MAX: usize = 1024;

/// What is said of one model: which versions are served, which answer whom, and where they run. What is left
/// out is as in `[serving]`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelOptions {
    /// Which versions are served: `"latest:2"`, `"all"` or `[1, 4]`. When absent as the model's
    /// `config.pbtxt` says, else the newest `limits.versions_max`, which also bounds `"all"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub versions: Option<VersionPolicy>,
    /// Versions by label, until a `rollout.json` beside the versions says otherwise.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, u64>,
    /// Weights of the versions or labels between which requests that name no version are split, until a
    /// `rollout.json` says otherwise. The newest version answers all of them when empty.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub split: BTreeMap<Target, f64>,
    /// The version that runs copies of requests once they are answered, to compare, until a
    /// `rollout.json` says otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shadow: Option<ShadowTarget>,
    /// Where the model runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<Devices>,
    /// Whether it may run on the processor, or parts of it, that its device cannot run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_fallback: Option<bool>,
    /// Sessions per version and device, 0 as in `[serving]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sessions_max: Option<usize>,
    /// Whether requests run together whatever its graph proves of its rows. When absent as the model's
    /// `config.pbtxt` asks, else where the graph proves that they are independent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub independent_rows: Option<bool>,
    /// Whether the user vouches that -1 never divides the smallest integer in its graph, nor 0 any integer where ONNX
    /// Runtime is older than 1.25. When absent, a version is refused unless its graph shows that: the process would end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trusted_divisors: Option<bool>,
    /// Whether its answers are kept, and equal requests answered with them, for as long as
    /// `response_cache_bytes_max` has room; when absent as the model's `config.pbtxt` says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_cache: Option<bool>,
}

impl ModelOptions {
    /// Labels and shares as a `rollout.json` has them.
    pub(crate) fn rollout(&self) -> Rollout {
        Rollout { labels: self.labels.clone(), split: self.split.clone(), shadow: self.shadow.clone() }
    }
}

impl Config {
    /// The configuration as it is for a model.
    pub(crate) fn of_model(&self, name: &str) -> Config {
        let mut config = self.clone();
        let Some(settings) = self.models.get(name) else { return config };
        if let Some(device) = &settings.device {
            config.device = device.clone();
        }
        config.allow_fallback = settings.allow_fallback.unwrap_or(self.allow_fallback);
        config.sessions_max = settings.sessions_max.unwrap_or(self.sessions_max);
        config
    }

    /// Refuses answers that are to be kept where there is no room for any.
    pub(crate) fn check_response_cache(&self) -> Result<()> {
        let mut keeping = self.models.iter().filter(|(_, options)| options.response_cache == Some(true));
        match keeping.next() {
            Some((name, _)) if self.response_cache_bytes_max == 0 => Err(Error::Config {
                reason: format!(
                    "models.{}: response_cache is true, and response_cache_bytes_max is 0: say how many bytes answers may take",
                    quote(name)
                ),
            }),
            _ => Ok(()),
        }
    }

    /// Refuses numbers of sessions that none can have.
    pub(crate) fn check_sessions(&self) -> Result<()> {
        let refuse = |reason: String| Err(Error::Config { reason });
        if self.sessions_max > SESSIONS_MAX {
            return refuse(format!(
                "sessions_max is {}, at most {SESSIONS_MAX} are possible",
                self.sessions_max
            ));
        }
        for (name, settings) in &self.models {
            if let Some(sessions) = settings.sessions_max.filter(|sessions| *sessions > SESSIONS_MAX) {
                let name = quote(name);
                return refuse(format!(
                    "models.{name}: sessions_max is {sessions}, at most {SESSIONS_MAX} are possible"
                ));
            }
        }
        Ok(())
    }
}
