//! The calls of KEDA: whether a workload is active, its metric with the target, and the value.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use millrace_serving::host::{Callers, Reader};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Interval, MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tonic::{Extensions, Request, Response, Status};

use super::measurements::{Measurement, Measurements};
use super::protocol::external_scaler_server::{ExternalScaler, ExternalScalerServer};
use super::protocol::{
    GetMetricSpecResponse, GetMetricsRequest, GetMetricsResponse, IsActiveResponse, MetricSpec, MetricValue,
    ScaledObjectRef,
};
use super::trigger::Trigger;
use crate::settings::Settings;

/// Most streams at a time.
pub(crate) const STREAMS_MAX: usize = 256;
/// Interval between two measurements of a stream.
const STREAM_INTERVAL: Duration = Duration::from_secs(2);

/// The service; clones share everything.
#[derive(Clone)]
pub(crate) struct Scaler {
    measurements: Measurements,
    settings: Arc<Settings>,
    callers: Callers,
    streams: Arc<Semaphore>,
    stop: CancellationToken,
}

impl Scaler {
    /// A service whose streams end with `stop`. What triggers leave out comes from `settings`.
    pub(crate) fn new(
        measurements: Measurements,
        settings: Settings,
        callers: Callers,
        stop: CancellationToken,
    ) -> Scaler {
        let streams = Arc::new(Semaphore::new(STREAMS_MAX));
        Scaler { measurements, settings: Arc::new(settings), callers, streams, stop }
    }

    /// The service for a gRPC server.
    pub(crate) fn server(self) -> ExternalScalerServer<Scaler> {
        ExternalScalerServer::new(self)
    }

    /// Reads the trigger of a call, and checks that the caller may read its volume.
    fn permitted(&self, extensions: &Extensions, of: ScaledObjectRef) -> Result<Permitted, Status> {
        let permitted = Permitted {
            trigger: Trigger::read(of, &self.settings)?,
            reader: self.callers.reader(extensions),
        };
        permitted.check()?;
        Ok(permitted)
    }

    async fn measure(&self, trigger: &Trigger) -> Result<Measurement, Status> {
        tokio::select! {
            found = self.measurements.measure(&trigger.source) => found,
            () = self.stop.cancelled() => Err(Status::unavailable("the scaler stops; call another one")),
        }
    }
}

/// A trigger with its caller.
struct Permitted {
    trigger: Trigger,
    reader: Reader,
}

impl Permitted {
    /// Refuses a caller whose token does not name the volume, also once the token was withdrawn.
    fn check(&self) -> Result<(), Status> {
        match self.trigger.source.volume() {
            Some(volume) => Ok(self.reader.may_read(volume.as_str())?),
            None => Ok(()),
        }
    }
}

/// A stream of changes.
struct Changes {
    scaler: Scaler,
    permitted: Permitted,
    sent: Option<bool>,
    ticks: Interval,
    _permit: OwnedSemaphorePermit,
}

impl Changes {
    /// The next message, and the stream after it; none at the end.
    async fn next(mut self) -> Option<(Result<IsActiveResponse, Status>, Option<Changes>)> {
        loop {
            let stop = self.scaler.stop.clone();
            stop.run_until_cancelled(self.ticks.tick()).await?;
            let found = match self.permitted.check() {
                Ok(()) => stop.run_until_cancelled(self.scaler.measure(&self.permitted.trigger)).await?,
                Err(refused) => Err(refused),
            };
            match found {
                // KEDA opens the stream again, later and later while the error remains.
                Err(status) => return Some((Err(status), None)),
                Ok(measurement) => {
                    let result = is_active(&self.permitted.trigger, &measurement);
                    if self.sent != Some(result) {
                        self.sent = Some(result);
                        return Some((Ok(IsActiveResponse { result }), Some(self)));
                    }
                }
            }
        }
    }
}

#[tonic::async_trait]
impl ExternalScaler for Scaler {
    type StreamIsActiveStream = BoxStream<'static, Result<IsActiveResponse, Status>>;

    async fn is_active(
        &self,
        request: Request<ScaledObjectRef>,
    ) -> Result<Response<IsActiveResponse>, Status> {
        let (_, extensions, of) = request.into_parts();
        let permitted = self.permitted(&extensions, of)?;
        let measurement = self.measure(&permitted.trigger).await?;
        Ok(Response::new(IsActiveResponse { result: is_active(&permitted.trigger, &measurement) }))
    }

    async fn stream_is_active(
        &self,
        request: Request<ScaledObjectRef>,
    ) -> Result<Response<Self::StreamIsActiveStream>, Status> {
        let (_, extensions, of) = request.into_parts();
        let permitted = self.permitted(&extensions, of)?;
        let Ok(permit) = Arc::clone(&self.streams).try_acquire_owned() else {
            return Err(Status::resource_exhausted(format!(
                "{STREAMS_MAX} streams are open; use triggers of the type external, or start another scaler"
            )));
        };
        let mut ticks = tokio::time::interval(STREAM_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let changes = Changes { scaler: self.clone(), permitted, sent: None, ticks, _permit: permit };
        let messages = stream::unfold(Some(changes), |changes| async move { changes?.next().await });
        Ok(Response::new(messages.boxed()))
    }

    async fn get_metric_spec(
        &self,
        request: Request<ScaledObjectRef>,
    ) -> Result<Response<GetMetricSpecResponse>, Status> {
        let (_, extensions, of) = request.into_parts();
        let trigger = self.permitted(&extensions, of)?.trigger;
        let spec = MetricSpec {
            metric_name: trigger.source.metric().to_owned(),
            target_size: i64::try_from(trigger.target).unwrap_or(i64::MAX),
            target_size_float: trigger.target as f64,
        };
        Ok(Response::new(GetMetricSpecResponse { metric_specs: vec![spec] }))
    }

    async fn get_metrics(
        &self,
        request: Request<GetMetricsRequest>,
    ) -> Result<Response<GetMetricsResponse>, Status> {
        let (_, extensions, asked) = request.into_parts();
        let Some(of) = asked.scaled_object_ref else {
            return Err(Status::invalid_argument("scaledObjectRef is missing; send the one of the trigger"));
        };
        let trigger = self.permitted(&extensions, of)?.trigger;
        let name = trigger.source.metric();
        if !asked.metric_name.is_empty() && asked.metric_name != name {
            let asked: String = asked.metric_name.chars().take(128).collect();
            return Err(Status::invalid_argument(format!(
                "metricName {asked:?} is not of this trigger, whose metric is {name}"
            )));
        }
        let value = metric(&trigger, &self.measure(&trigger).await?);
        let value = MetricValue {
            metric_name: name.to_owned(),
            metric_value: value.ceil() as i64,
            metric_value_float: value,
        };
        Ok(Response::new(GetMetricsResponse { metric_values: vec![value] }))
    }
}

/// Whether the workload needs a replica.
fn is_active(trigger: &Trigger, measurement: &Measurement) -> bool {
    measurement.value > trigger.activation as f64
}

/// The value of the metric: never more than the target of all partitions together, unless idle consumers are allowed.
fn metric(trigger: &Trigger, measurement: &Measurement) -> f64 {
    match measurement.partitions {
        Some(partitions) if !trigger.allow_idle_consumers => {
            measurement.value.min(partitions as f64 * trigger.target as f64)
        }
        _ => measurement.value,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scaler::trigger::Source;

    #[test]
    fn partitions_bound_the_metric_unless_idle_consumers_are_allowed() {
        let source = Source::Job { job: "j".into(), topic: "t".into(), volume: "v".parse().unwrap() };
        let mut trigger = Trigger { source, target: 100, activation: 5, allow_idle_consumers: false };
        let of = |value: f64| Measurement { value, partitions: Some(3) };
        assert_eq!([5.0, 299.0, 301.0].map(|value| metric(&trigger, &of(value))), [5.0, 299.0, 300.0]);
        assert_eq!([0.0, 5.0, 6.0].map(|value| is_active(&trigger, &of(value))), [false, false, true]);
        trigger.allow_idle_consumers = true;
        assert_eq!(metric(&trigger, &of(301.0)), 301.0);
    }
}
