//! External scaler of KEDA: the lag of ingest jobs and pipes, and the queue time of models.
//!
//! A trigger of a ScaledObject names what to measure in its `metadata` ([`trigger`]). The lag is the ends of the topic
//! less the offsets that the volume records ([`lag`]), so no consumer has to run. The queue time comes from the metrics
//! of a model's replicas ([`queue_time`]). [`measurements`] shares measurements between calls, and [`service`] answers
//! KEDA. An error is never a lag of 0: KEDA keeps the replicas, or takes its fallback, when a call fails.
//!
//! Bounds: [`trigger::METADATA_BYTES_MAX`] of metadata, [`measurements::SOURCES_MAX`] things to measure,
//! [`measurements::AT_ONCE_MAX`] measurements at a time, [`service::STREAMS_MAX`] streams.

pub(crate) mod lag;
pub(crate) mod measurements;
pub(crate) mod queue_time;
pub(crate) mod service;
pub(crate) mod trigger;

#[allow(missing_docs, unreachable_pub, dead_code, clippy::all, clippy::pedantic)]
pub(crate) mod protocol {
    //! The generated types.
    tonic::include_proto!("externalscaler");
}
