//! Spans as OTLP messages. Names and attributes follow OpenTelemetry's semantic conventions 1.37; those
//! outside the conventions have the prefix `millrace.`.

use std::borrow::Cow;
use std::time::{Instant, SystemTime};

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span, Status};
use tokio_rustls::rustls::crypto::SecureRandom;

use super::random_id;
use super::span::{Call, FinishedSpan, SERVICE};

const SCHEMA: &str = "https://opentelemetry.io/schemas/1.37.0";
/// Bits of a span's flags: the span is sampled; the next bit is valid; the parent is in another process.
const SAMPLED: u32 = 1;
const HAS_IS_REMOTE: u32 = 0x100;
const IS_REMOTE: u32 = 0x200;

/// Names of the status codes of gRPC.
const GRPC_CODES: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];

/// The OTLP resource: this process.
pub(super) fn resource(service_name: &str) -> Resource {
    let attributes = vec![
        text("service.name", service_name),
        text("service.version", env!("CARGO_PKG_VERSION")),
        number("process.pid", std::process::id().into()),
    ];
    Resource { attributes, ..Default::default() }
}

/// An export message with the spans of requests.
pub(super) fn export(
    resource: &Resource,
    requests: &[Box<FinishedSpan>],
    random: &dyn SecureRandom,
) -> ExportTraceServiceRequest {
    let mut spans = Vec::with_capacity(requests.len() * 5);
    for request in requests {
        spans.push(of_request(request));
        steps(request, random, &mut spans);
    }
    let scope = InstrumentationScope {
        name: "millrace-serving".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..Default::default()
    };
    let scope_spans = ScopeSpans { scope: Some(scope), spans, schema_url: SCHEMA.to_owned() };
    ExportTraceServiceRequest {
        resource_spans: vec![ResourceSpans {
            resource: Some(resource.clone()),
            scope_spans: vec![scope_spans],
            schema_url: SCHEMA.to_owned(),
        }],
    }
}

/// The status of a call that was refused before inference, in its protocol's terms: `404`, `NOT_FOUND`.
fn by_status(request: &FinishedSpan) -> Option<Cow<'static, str>> {
    let code = request.status?;
    match request.call {
        Call::Http { .. } => (code >= 400).then(|| code.to_string().into()),
        Call::Grpc(_) => {
            (code > 0).then(|| GRPC_CODES.get(usize::from(code)).copied().unwrap_or("UNKNOWN").into())
        }
        Call::InStream => None,
    }
}

fn of_request(request: &FinishedSpan) -> Span {
    let mut attributes = Vec::with_capacity(12);
    let (name, failed) = match &request.call {
        Call::Grpc(method) => {
            attributes.extend([
                text("rpc.system", "grpc"),
                text("rpc.service", SERVICE),
                text("rpc.method", method),
            ]);
            attributes.extend(request.status.map(|code| number("rpc.grpc.status_code", code.into())));
            (format!("{SERVICE}/{method}"), request.status.is_some_and(is_fault))
        }
        Call::Http { path, versioned } => {
            let route = match versioned {
                true => "/v2/models/{model}/versions/{version}/infer",
                false => "/v2/models/{model}/infer",
            };
            attributes.extend([
                text("http.request.method", "POST"),
                text("http.route", route),
                text("url.path", path),
            ]);
            attributes.extend(request.status.map(|code| number("http.response.status_code", code.into())));
            (format!("POST {route}"), request.status.is_some_and(|status| status >= 500))
        }
        Call::InStream => {
            let failed = request.outcome.error.is_some_and(|error| OF_THE_SERVER.contains(&error));
            ("request".to_owned(), failed)
        }
    };
    // Requests of a stream have no status; a call without a status was abandoned by its client.
    let gone = request.status.is_none() && request.call != Call::InStream;
    let error = request
        .outcome
        .error
        .or(gone.then_some("cancelled"))
        .map(Cow::Borrowed)
        .or_else(|| by_status(request));
    attributes.extend(error.as_deref().map(|error| text("error.type", error)));
    if let Some(peer) = request.peer {
        attributes.push(text("client.address", &peer.ip().to_canonical().to_string()));
        attributes.push(number("client.port", peer.port().into()));
    }
    if let Some((model, version)) = &request.outcome.model {
        attributes.push(text("millrace.model.name", model));
        attributes.push(number("millrace.model.version", i64::try_from(*version).unwrap_or(i64::MAX)));
    }
    attributes.extend(request.request_id.as_ref().map(|id| text("millrace.request_id", id)));
    let (kind, remote) = match request.call {
        Call::InStream => (SpanKind::Internal, false),
        _ => (SpanKind::Server, request.parent.is_some()),
    };
    Span {
        trace_id: request.trace.to_vec(),
        span_id: request.span.to_vec(),
        parent_span_id: request.parent.map(Vec::from).unwrap_or_default(),
        trace_state: request.state.clone(),
        flags: SAMPLED | HAS_IS_REMOTE | if remote { IS_REMOTE } else { 0 },
        name,
        kind: kind.into(),
        start_time_unix_nano: nanos(request, request.start.0),
        end_time_unix_nano: nanos(request, request.end),
        attributes,
        status: (failed || gone).then(|| Status {
            message: error.unwrap_or_default().into_owned(),
            code: StatusCode::Error.into(),
        }),
        ..Default::default()
    }
}

/// Appends the child spans for a request's wait and computation.
fn steps(request: &FinishedSpan, random: &dyn SecureRandom, spans: &mut Vec<Span>) {
    let Some(times) = request.outcome.times else { return };
    let looked = [("response_cache", times.queued, times.end)];
    let ran = [
        ("queue", times.queued, times.computing),
        ("compute_input", times.computing, times.input_end),
        ("compute_infer", times.input_end, times.output_start),
        ("compute_output", times.output_start, times.end),
    ];
    let steps: &[(&str, Instant, Instant)] = if times.cached { &looked } else { &ran };
    for (name, start, end) in steps {
        let Some(id) = random_id::<8>(random) else { return };
        spans.push(Span {
            trace_id: request.trace.to_vec(),
            span_id: id.to_vec(),
            parent_span_id: request.span.to_vec(),
            trace_state: request.state.clone(),
            flags: SAMPLED | HAS_IS_REMOTE,
            name: (*name).to_owned(),
            kind: SpanKind::Internal.into(),
            start_time_unix_nano: nanos(request, *start),
            end_time_unix_nano: nanos(request, *end),
            ..Default::default()
        });
    }
}

/// Kinds of errors that are the server's fault.
const OF_THE_SERVER: [&str; 4] = ["deadline_exceeded", "internal", "unavailable", "unsupported"];

/// Whether a gRPC status is the server's fault by the conventions: UNKNOWN, DEADLINE_EXCEEDED, UNIMPLEMENTED,
/// INTERNAL, UNAVAILABLE, DATA_LOSS.
fn is_fault(code: u16) -> bool {
    matches!(code, 2 | 4 | 12 | 13 | 14 | 15)
}

/// Nanoseconds since the epoch, by the system clock at the request's start.
fn nanos(request: &FinishedSpan, at: Instant) -> u64 {
    let (start, clock) = request.start;
    let since = clock.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let at = since.saturating_add(at.saturating_duration_since(start));
    u64::try_from(at.as_nanos()).unwrap_or(u64::MAX)
}

fn text(key: &str, text: &str) -> KeyValue {
    attribute(key, Value::StringValue(text.to_owned()))
}

fn number(key: &str, number: i64) -> KeyValue {
    attribute(key, Value::IntValue(number))
}

fn attribute(key: &str, value: Value) -> KeyValue {
    KeyValue { key: key.to_owned(), value: Some(AnyValue { value: Some(value) }), ..Default::default() }
}
