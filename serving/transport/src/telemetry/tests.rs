//! Tests of sampling, of the content of spans, and of collectors that accept none.
use std::time::Duration;

use axum::http::Request;
use opentelemetry_proto::tonic::trace::v1::Span;

use super::span::Call;
use super::*;
use millrace_serving_core::error::InferError;
use millrace_serving_core::statistics::Times;
use millrace_serving_repository::outcome::failed;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

fn opened(sample_rate: f64) -> CheckedCollector {
    let endpoint = "http://127.0.0.1:4317".to_owned();
    CheckedCollector::open(&Settings { endpoint, sample_rate, ..Settings::default() }).unwrap()
}

fn request(path: &str, parent: &str) -> Request<()> {
    let mut builder = Request::post(path).header("tracestate", "a=1");
    if !parent.is_empty() {
        builder = builder.header(TRACE_PARENT, parent);
    }
    builder.body(()).unwrap()
}

fn begin(telemetry: &Arc<Telemetry>, request: &Request<()>) -> Option<OpenSpan> {
    telemetry.begin(request, || Some("[::ffff:10.0.0.7]:5000".parse().unwrap()), None)
}

fn waiting(telemetry: &Telemetry) -> u64 {
    telemetry.tally.waiting.load(Ordering::Relaxed)
}

fn ended(opened: &mut CheckedCollector) -> Box<FinishedSpan> {
    opened.exporter.queue.try_recv().unwrap()
}

fn spans(finished: Box<FinishedSpan>) -> Vec<Span> {
    let sender = message::resource("s");
    let message = message::export(&sender, &[finished], millrace_serving_core::tls::provider().secure_random);
    message.resource_spans[0].scope_spans[0].spans.clone()
}

fn attributes(span: &Span) -> Vec<(String, String)> {
    use opentelemetry_proto::tonic::common::v1::any_value::Value;
    let shown = |value: &Value| match value {
        Value::StringValue(text) => text.clone(),
        Value::IntValue(number) => number.to_string(),
        other => panic!("{other:?}"),
    };
    let of = span.attributes.iter();
    of.map(|it| (it.key.clone(), shown(it.value.as_ref().unwrap().value.as_ref().unwrap()))).collect()
}

#[test]
fn the_rate_is_that_of_requests_without_a_parent() {
    for (rate, least, most) in [(0.0, 0, 0), (0.25, 248, 252), (1.0, 1_000, 1_000)] {
        let telemetry = opened(rate).telemetry;
        let asked = request("/v2/models/m/infer", "");
        let sampled = (0..1_000).filter(|_| begin(&telemetry, &asked).is_some()).count();
        assert!((least..=most).contains(&sampled), "{rate}: {sampled}");
        for (flags, sampled) in [("01", true), ("00", false)] {
            let asked = request("/v2/models/m/infer", &format!("00-{TRACE}-00f067aa0ba902b7-{flags}"));
            assert_eq!(begin(&telemetry, &asked).is_some(), sampled, "{rate} {flags}");
        }
        assert!(begin(&telemetry, &request("/v2/health/ready", "")).is_none());
    }
}

#[test]
fn a_request_is_a_child_of_its_parent_and_the_parent_of_its_steps() {
    let mut opened = opened(0.0);
    let asked = request("/v2/models/m/infer", &format!("00-{TRACE}-00f067aa0ba902b7-01"));
    let mut open = begin(&opened.telemetry, &asked).unwrap();
    open.set_status(Some(200), None);
    drop(open);
    let mut finished = ended(&mut opened);
    let queued = finished.start.0 + Duration::from_micros(1);
    let at = |micros| queued + Duration::from_micros(micros);
    let times = Times {
        queued,
        computing: at(2),
        input_end: at(6),
        output_start: at(14),
        end: at(30),
        cached: false,
    };
    finished.outcome.times = Some(times);
    finished.outcome.model = Some(("m".into(), 3));
    finished.end = at(40);
    assert_eq!(finished.spans(), 5);
    let spans = spans(finished);
    let server = &spans[0];
    assert_eq!((hex::encode(&server.trace_id), server.trace_state.as_str()), (TRACE.into(), "a=1"));
    assert_eq!((hex::encode(&server.parent_span_id), server.span_id.len()), ("00f067aa0ba902b7".into(), 8));
    assert_eq!(
        (server.name.as_str(), server.kind, server.flags),
        ("POST /v2/models/{model}/infer", 2, 0x301)
    );
    assert_eq!(server.status, None);
    let expected = [
        ("http.request.method", "POST"),
        ("http.route", "/v2/models/{model}/infer"),
        ("url.path", "/v2/models/m/infer"),
        ("http.response.status_code", "200"),
        ("client.address", "10.0.0.7"),
        ("client.port", "5000"),
        ("millrace.model.name", "m"),
        ("millrace.model.version", "3"),
    ];
    assert_eq!(attributes(server), expected.map(|(key, value)| (key.to_owned(), value.to_owned())));
    let steps: Vec<_> = spans[1..]
        .iter()
        .map(|step| (step.name.as_str(), step.end_time_unix_nano - step.start_time_unix_nano))
        .collect();
    let expected =
        [("queue", 2_000), ("compute_input", 4_000), ("compute_infer", 8_000), ("compute_output", 16_000)];
    assert_eq!(steps, expected);
    for step in &spans[1..] {
        assert_eq!((&step.trace_id, &step.parent_span_id), (&server.trace_id, &server.span_id));
        assert_eq!((step.kind, step.flags, step.trace_state.as_str()), (1, 0x101, "a=1"));
        assert!(step.start_time_unix_nano >= server.start_time_unix_nano);
        assert!(step.end_time_unix_nano <= server.end_time_unix_nano);
    }
    let ids: std::collections::HashSet<_> = spans.iter().map(|span| &span.span_id).collect();
    assert_eq!(ids.len(), 5);
    let (start, end) = (server.start_time_unix_nano, server.end_time_unix_nano);
    assert_eq!(end - start, 41_000);
}

#[test]
fn cached_response_has_one_step() {
    let mut opened = opened(1.0);
    drop(begin(&opened.telemetry, &request("/v2/models/m/versions/2/infer", "")).unwrap());
    let mut finished = ended(&mut opened);
    finished.outcome.times = Some(Times::from_cache(finished.start.0));
    assert_eq!(finished.spans(), 2);
    let spans = spans(finished);
    assert_eq!(
        spans.iter().map(|span| span.name.as_str()).collect::<Vec<_>>(),
        ["POST /v2/models/{model}/versions/{version}/infer", "response_cache"]
    );
    // Without a parent there is no trace to which a tracestate could refer.
    assert_eq!(
        (spans[0].parent_span_id.len(), spans[0].trace_state.as_str(), spans[0].flags),
        (0, "", 0x101)
    );
    assert_ne!(spans[0].trace_id, [0_u8; 16]);
}

#[tokio::test]
async fn outcome_of_a_request_is_recorded_on_its_span() {
    let mut opened = opened(1.0);
    assert!(current().is_none());
    failed(None, &InferError::invalid("nobody listens"));
    let mut open =
        begin(&opened.telemetry, &request("/inference.GRPCInferenceService/ModelInfer", "")).unwrap();
    open.within(|| failed(None, &InferError::internal("it broke")));
    // The HTTP status of a gRPC call is not its outcome.
    open.set_status(Some(200), None);
    open.set_status(None, Some(13));
    drop(open);
    let span = spans(ended(&mut opened)).remove(0);
    let status = span.status.clone().unwrap();
    assert_eq!((status.code, status.message.as_str()), (2, "internal"));
    let attributes = attributes(&span);
    for (key, value) in [
        ("rpc.system", "grpc"),
        ("rpc.service", "inference.GRPCInferenceService"),
        ("rpc.method", "ModelInfer"),
        ("rpc.grpc.status_code", "13"),
        ("error.type", "internal"),
    ] {
        assert!(attributes.contains(&(key.to_owned(), value.to_owned())), "{key}: {attributes:?}");
    }

    let stream = begin(&opened.telemetry, &request("/inference.GRPCInferenceService/ModelStreamInfer", ""));
    let stream = stream.unwrap();
    let active = stream.within(current);
    nested(active.clone(), async { failed(None, &InferError::invalid("the client's")) }).await;
    nested(active, async {}).await;
    nested(None, async { assert!(current().is_none()) }).await;
    let (first, second) = (ended(&mut opened), ended(&mut opened));
    // The client drops the rest of the stream.
    drop(stream);
    let stream = ended(&mut opened);
    for child in [&first, &second] {
        assert_eq!(
            (&child.call, child.trace, child.parent),
            (&Call::InStream, stream.trace, Some(stream.span))
        );
    }
    assert_eq!((first.outcome.error, second.outcome.error), (Some("invalid"), None));
    assert!([first, second].into_iter().all(|child| spans(child)[0].status.is_none()));
    let gone = spans(stream).remove(0).status.unwrap();
    assert_eq!((gone.code, gone.message.as_str()), (2, "cancelled"));
}

#[test]
fn request_refused_by_the_transport_has_its_status_on_the_span() {
    let mut opened = opened(1.0);
    let mut named = |path: &str, http: Option<u16>, grpc: Option<u16>| {
        let mut open = begin(&opened.telemetry, &request(path, "")).unwrap();
        open.set_status(http, None);
        open.set_status(None, grpc);
        drop(open);
        let span = spans(ended(&mut opened)).remove(0);
        let of = attributes(&span).into_iter().find(|(key, _)| key == "error.type");
        (of.map(|(_, value)| value), span.status.is_some())
    };
    let error = |name: &str, failed| (Some(name.to_owned()), failed);
    let (rest, grpc) = ("/v2/models/m/infer", "/inference.GRPCInferenceService/ModelInfer");
    assert_eq!(named(rest, Some(200), None), (None, false));
    assert_eq!(named(rest, Some(413), None), error("413", false));
    assert_eq!(named(rest, Some(503), None), error("503", true));
    assert_eq!(named(grpc, Some(200), Some(0)), (None, false));
    assert_eq!(named(grpc, Some(200), Some(7)), error("PERMISSION_DENIED", false));
    assert_eq!(named(grpc, Some(200), Some(99)), error("UNKNOWN", false));
}

#[test]
fn spans_beyond_the_queue_are_dropped_without_waiting() {
    let opened = opened(1.0);
    let asked = request("/v2/models/m/infer", "");
    for _ in 0..QUEUE_MAX + 100 {
        drop(begin(&opened.telemetry, &asked).unwrap());
    }
    assert_eq!(waiting(&opened.telemetry), QUEUE_MAX as u64);
    drop(opened.exporter);
    drop(begin(&opened.telemetry, &asked).unwrap());
    assert_eq!(waiting(&opened.telemetry), QUEUE_MAX as u64);
}
