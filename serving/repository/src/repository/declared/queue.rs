//! Priorities and queue policy of `dynamic_batching` in a `config.pbtxt`. Unsupported settings are refused
//! with a way to fix them.

use millrace_serving_core::config::{Config, PRIORITY_LEVELS_MAX};
use millrace_serving_core::wire::inference as pb;
use millrace_serving_core::wire::inference::model_config::SchedulingChoice;
use pb::model_queue_policy::TimeoutAction;

/// Queue policy; 0 means the server's own setting.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Queue {
    timeout_us: u64,
    requests_max: usize,
    priority_levels: usize,
    priority_default: usize,
}

impl Queue {
    pub(super) fn read(config: &pb::ModelConfig) -> Result<Queue, String> {
        let Some(SchedulingChoice::DynamicBatching(batching)) = &config.scheduling_choice else {
            return Ok(Queue::default());
        };
        if !batching.priority_queue_policy.is_empty() {
            return Err(
                "priority_queue_policy is not supported: default_queue_policy holds for all levels".into()
            );
        }
        let levels = usize::try_from(batching.priority_levels).unwrap_or(usize::MAX);
        let default = usize::try_from(batching.default_priority_level).unwrap_or(usize::MAX);
        if levels > PRIORITY_LEVELS_MAX {
            return Err(format!("priority_levels is {levels}, allowed are up to {PRIORITY_LEVELS_MAX}"));
        }
        if levels > 0 && !(1..=levels).contains(&default) {
            return Err(format!(
                "default_priority_level is {default}, allowed are 1 to priority_levels, which is {levels}"
            ));
        }
        let policy = batching.default_queue_policy.unwrap_or_default();
        if policy.timeout_action() == TimeoutAction::Delay && policy.default_timeout_microseconds > 0 {
            return Err(
                "timeout_action DELAY is not supported: a request whose time is over is refused here, so let it be REJECT".into(),
            );
        }
        Ok(Queue {
            timeout_us: policy.default_timeout_microseconds,
            requests_max: usize::try_from(policy.max_queue_size).unwrap_or(usize::MAX),
            priority_levels: levels,
            priority_default: default,
        })
    }

    /// Applies the policy to `config`; of two bounds the lower one holds.
    pub(super) fn apply(&self, config: &mut Config) {
        let batching = &mut config.batching;
        if self.timeout_us > 0 {
            batching.timeout_us_max = match batching.timeout_us_max {
                0 => self.timeout_us,
                bound => bound.min(self.timeout_us),
            };
        }
        if self.priority_levels > 0 {
            batching.priority_levels = self.priority_levels;
            batching.priority_default = self.priority_default;
        }
        if self.requests_max > 0 {
            config.limits.requests_waiting_max = config.limits.requests_waiting_max.min(self.requests_max);
        }
    }
}
