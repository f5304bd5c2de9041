//! `[serving.models.NAME]`: the settings of one model.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Config, Devices, Rollout, ShadowTarget, Target, VersionPolicy};
use crate::error::{Error, Result, quote};

/// Most sessions of a model version: each costs memory, and more than one per processor brings nothing.
const SESSIONS_MAX: usize = 1024;

/// Settings of one model: the served versions, the routing between them, and the device. Absent settings are
/// those of `[serving]`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelOptions {
    /// Versions to serve: `"latest:2"`, `"all"` or `[1, 4]`. If absent, the model's `config.pbtxt` decides,
    /// else the newest `limits.versions_max`, which also bounds `"all"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub versions: Option<VersionPolicy>,
    /// Versions by label; a `rollout.json` next to the versions overrides them.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, u64>,
    /// Split of requests that name no version: weights by version or label. A `rollout.json` overrides it. If
    /// empty, the newest version answers all of them.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub split: BTreeMap<Target, f64>,
    /// The shadow: a version that runs copies of requests after they are answered, to compare the answers. A
    /// `rollout.json` overrides it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shadow: Option<ShadowTarget>,
    /// Device of the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<Devices>,
    /// Whether the model, or a part of it, that its device cannot run may run on the processor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_fallback: Option<bool>,
    /// Sessions per version and device; 0 as in `[serving]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sessions_max: Option<usize>,
    /// Whether requests are batched regardless of the graph. If absent, the model's `config.pbtxt` decides,
    /// else batching needs proof from the graph that rows are independent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub independent_rows: Option<bool>,
    /// Whether the user guarantees that -1 never divides the smallest integer in the graph, and, with ONNX
    /// Runtime older than 1.25, that 0 never divides an integer. If absent, the server refuses a version
    /// unless its graph proves that: such a division would end the process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trusted_divisors: Option<bool>,
    /// Whether the response cache keeps the model's answers, within `response_cache_bytes_max`. If absent,
    /// the model's `config.pbtxt` decides.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_cache: Option<bool>,
}

impl ModelOptions {
    /// Labels, split and shadow, in the form of a `rollout.json`.
    pub fn rollout(&self) -> Rollout {
        Rollout { labels: self.labels.clone(), split: self.split.clone(), shadow: self.shadow.clone() }
    }
}

impl Config {
    /// The configuration with the settings of a model applied.
    pub fn of_model(&self, name: &str) -> Config {
        let mut config = self.clone();
        let Some(settings) = self.models.get(name) else { return config };
        if let Some(device) = &settings.device {
            config.device = device.clone();
        }
        config.allow_fallback = settings.allow_fallback.unwrap_or(self.allow_fallback);
        config.sessions_max = settings.sessions_max.unwrap_or(self.sessions_max);
        config
    }

    /// Refuses a model's `response_cache` if the cache has no memory.
    pub fn check_response_cache(&self) -> Result<()> {
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

    /// Refuses too large numbers of sessions.
    pub fn check_sessions(&self) -> Result<()> {
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
