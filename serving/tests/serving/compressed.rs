//! Tests of compressed requests and responses, over REST and gRPC.

use std::io::{Read, Write};

use bytes::{BufMut, Bytes, BytesMut};
use flate2::Compression;
use flate2::read::{GzDecoder, ZlibDecoder};
use flate2::write::{GzEncoder, ZlibEncoder};
use http_body_util::{BodyExt, Full};
use millrace_serving::tensor::Data;
use millrace_serving::wire::inference as pb;
use prost::Message;
use tonic::body::Body;
use tonic::codec::CompressionEncoding;
use tonic::codegen::{Service, http};
use tonic::transport::{Channel, Endpoint};

use crate::malformed::{MESSAGE_BYTES_MAX, as_rest, good, raw_echo, server};
use crate::support::*;

pub(crate) fn packed(encoding: &str, bytes: &[u8]) -> Vec<u8> {
    match encoding {
        "gzip" => {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        }
        "deflate" => {
            let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        }
        _ => bytes.to_vec(),
    }
}

fn unpacked(encoding: &str, bytes: &[u8]) -> Vec<u8> {
    let mut plain = Vec::new();
    match encoding {
        "gzip" => GzDecoder::new(bytes).read_to_end(&mut plain).unwrap(),
        "deflate" => ZlibDecoder::new(bytes).read_to_end(&mut plain).unwrap(),
        _ => panic!("{encoding}"),
    };
    plain
}

/// A request with a large response, and the content of that response.
fn large() -> (pb::ModelInferRequest, Vec<u8>) {
    let values: Vec<i8> = (0..8000).map(|index| (index % 50) as i8).collect();
    let raw = Data::Int8(values).to_raw();
    (raw_echo("INT8", &[8000], &raw), raw.to_vec())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rest_bodies_are_compressed_as_the_headers_request() {
    let server = server().await;
    let (message, raw) = large();
    let mut request = as_rest(&message);
    let json = r#"{"inputs":[{"name":"in_INT8","shape":[8000],"datatype":"INT8","parameters":{"binary_data_size":8000}}],"parameters":{"binary_data_output":true}}"#;
    request.body = [json.as_bytes(), &raw].concat();
    let length = json.len().to_string();
    for sent in ["identity", "gzip", "deflate"] {
        // The JSON length is that before compression, as tritonclient counts it.
        let body = packed(sent, &request.body);
        for (accepted, got) in
            [("", None), ("gzip", Some("gzip")), ("deflate", Some("deflate")), ("br", None)]
        {
            let headers = [
                ("inference-header-content-length", length.as_str()),
                ("content-encoding", sent),
                ("accept-encoding", accepted),
            ];
            let reply = server.http("POST", &request.path, &headers, &body).await;
            assert_eq!(reply.status, 200, "{sent} {accepted}: {}", String::from_utf8_lossy(&reply.body));
            assert_eq!(reply.header("content-encoding"), got, "{sent} {accepted}");
            assert_eq!(reply.header("content-length").unwrap(), reply.body.len().to_string());
            let plain = got.map_or(reply.body.clone(), |encoding| unpacked(encoding, &reply.body));
            let json_bytes: usize = reply.header("inference-header-content-length").unwrap().parse().unwrap();
            assert_eq!(&plain[json_bytes..], &raw[..], "{sent} {accepted}");
            assert_eq!(got.is_some(), reply.body.len() < raw.len(), "{sent} {accepted}");
        }
    }
    // Small responses stay uncompressed unless the client accepts nothing else; errors are compressed alike.
    let small = async |accepted: &str| {
        server.http("GET", "/v2/models/mlp", &[("accept-encoding", accepted)], b"").await
    };
    assert_eq!(small("gzip").await.header("content-encoding"), None);
    // Large responses other than inference stay uncompressed: Triton's asyncio client relies on it.
    let told = server.http("GET", "/v2/models/stats", &[("accept-encoding", "gzip, deflate")], b"").await;
    assert_eq!((told.status, told.header("content-encoding")), (200, None));
    assert!(told.body.len() > 2048 && told.body.starts_with(b"{"), "{}", told.body.len());
    let only = small("identity;q=0, deflate").await;
    assert_eq!(only.header("content-encoding"), Some("deflate"));
    assert!(String::from_utf8(unpacked("deflate", &only.body)).unwrap().contains("logits"));
    let missing = server.http("GET", "/v2/nosuch", &[("accept-encoding", "gzip, *;q=0")], b"").await;
    assert_eq!((missing.status, missing.header("content-encoding")), (404, Some("gzip")));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpc_clients_that_compress_are_answered_compressed() {
    let server = server().await;
    let (message, raw) = large();
    for encoding in [CompressionEncoding::Gzip, CompressionEncoding::Deflate] {
        let channel = channel(&server).await;
        let mut client = pb::grpc_inference_service_client::GrpcInferenceServiceClient::new(channel)
            .send_compressed(encoding)
            .accept_compressed(encoding);
        for _ in 0..3 {
            let reply = client.model_infer(message.clone()).await.unwrap();
            let name = if encoding == CompressionEncoding::Gzip { "gzip" } else { "deflate" };
            assert_eq!(reply.metadata().get("grpc-encoding").unwrap(), name);
            assert_eq!(reply.into_inner().raw_output_contents[0], raw);
        }
    }
    // Accepting compressed responses does not request them.
    let mut client =
        pb::grpc_inference_service_client::GrpcInferenceServiceClient::new(channel(&server).await)
            .accept_compressed(CompressionEncoding::Gzip);
    let reply = client.model_infer(message).await.unwrap();
    assert!(reply.metadata().get("grpc-encoding").is_none());
    let channel = channel(&server).await;
    let mut health = tonic_health::pb::health_client::HealthClient::new(channel)
        .send_compressed(CompressionEncoding::Gzip);
    health.check(tonic_health::pb::HealthCheckRequest::default()).await.unwrap();
    server.stop().await;
}

async fn channel(server: &Server) -> Channel {
    let address = server.serving.addresses().grpc;
    Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap()
}

pub(crate) fn frame(flag: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = BytesMut::new();
    frame.put_u8(flag);
    frame.put_u32(payload.len() as u32);
    frame.put_slice(payload);
    frame.to_vec()
}

/// Status and message of a call with a given body.
pub(crate) async fn bare_call(
    channel: &mut Channel,
    method: &str,
    encoding: Option<&str>,
    body: Vec<u8>,
) -> (i32, String) {
    let mut request =
        http::Request::post(format!("http://localhost/inference.GRPCInferenceService/{method}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
    if let Some(encoding) = encoding {
        request = request.header("grpc-encoding", encoding);
    }
    let request = request.body(Body::new(Full::new(Bytes::from(body)))).unwrap();
    std::future::poll_fn(|cx| channel.poll_ready(cx)).await.unwrap();
    let reply = channel.call(request).await.unwrap();
    let headers = reply.headers().clone();
    let trailers = reply.into_body().collect().await.unwrap().trailers().cloned().unwrap_or_default();
    let find = |name: &str| {
        let value = headers.get(name).or_else(|| trailers.get(name));
        value.map(|value| value.to_str().unwrap().to_owned())
    };
    let status = find("grpc-status").unwrap().parse().unwrap();
    (status, find("grpc-message").unwrap_or_default().replace("%20", " "))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_grpc_messages_are_a_client_error() {
    let server = server().await;
    let good = good().encode_to_vec();
    let whole = frame(0, &good);
    let bomb = vec![0; MESSAGE_BYTES_MAX * 200];
    let gzip = packed("gzip", &good);
    let mut flipped = gzip.clone();
    let last = flipped.len() - 6;
    flipped[last] ^= 1;
    let mut channel = channel(&server).await;
    let (ok, invalid, too_large, unimplemented) = (0, 3, 8, 12);
    for (what, encoding, body, status, says) in [
        ("as it should be", None, whole.clone(), ok, ""),
        ("gzip", Some("gzip"), frame(1, &gzip), ok, ""),
        ("deflate", Some("deflate"), frame(1, &packed("deflate", &good)), ok, ""),
        ("plain although it could be compressed", Some("gzip"), whole.clone(), ok, ""),
        ("identity", Some("identity"), whole.clone(), ok, ""),
        ("no message", None, vec![], invalid, "has no message"),
        ("half a prefix", None, vec![0, 0, 0], invalid, "2 bytes of its prefix"),
        ("a prefix alone", None, whole[..5].to_vec(), invalid, "is missing"),
        ("half a message", None, whole[..20].to_vec(), invalid, "is missing"),
        ("another flag", None, frame(2, &good), invalid, "begins with 2"),
        ("compressed by no name", None, frame(1, &gzip), invalid, "grpc-encoding names no encoding"),
        ("compressed although it is identity", Some("identity"), frame(1, &gzip), invalid, "grpc-encoding"),
        ("an unknown compression", Some("zstd"), frame(1, &good), unimplemented, "zstd"),
        ("gzip that is none", Some("gzip"), frame(1, &good), invalid, "no valid gzip"),
        ("gzip of nothing", Some("gzip"), frame(1, b""), invalid, "cut off"),
        ("gzip cut off", Some("gzip"), frame(1, &gzip[..gzip.len() - 2]), invalid, "cut off"),
        ("gzip with a wrong sum", Some("gzip"), frame(1, &flipped), invalid, "no valid gzip"),
        ("deflate that is gzip", Some("deflate"), frame(1, &gzip), invalid, "no valid deflate"),
        (
            "a gzip bomb",
            Some("gzip"),
            frame(1, &packed("gzip", &bomb)),
            too_large,
            "limits.message_bytes_max",
        ),
        (
            "a deflate bomb",
            Some("deflate"),
            frame(1, &packed("deflate", &bomb)),
            too_large,
            "limits.message_bytes_max",
        ),
        (
            "too large",
            None,
            frame(0, &bomb[..MESSAGE_BYTES_MAX + 1]),
            too_large,
            "65537 bytes, the limit is 65536",
        ),
        ("a length of 4 GiB", None, vec![0, 255, 255, 255, 255], too_large, "4294967295 bytes"),
        ("no protobuf", None, frame(0, b"\xff\xff\xff"), invalid, "not the one of this call"),
        ("a name that is not UTF-8", None, frame(0, b"\x0a\x01\xff"), invalid, "UTF-8"),
        ("a field that is cut off", None, frame(0, b"\x0a\x7fabc"), invalid, "not the one of this call"),
        ("a message of nothing", None, frame(0, b""), 5, "no model"),
    ] {
        let (found, message) = bare_call(&mut channel, "ModelInfer", encoding, body).await;
        assert_eq!(found, status, "{what}: {message}");
        assert!(message.contains(says), "{what}: {says:?} is not in {message:?}");
        let (found, _) = bare_call(&mut channel, "ModelInfer", None, whole.clone()).await;
        assert_eq!(found, ok, "after {what}");
    }
    server.stop().await;
}

/// A server for large messages of the model `echo_INT8`, and a request whose response has the same bytes.
async fn roomy() -> (Server, pb::ModelInferRequest, Bytes) {
    let server = Server::start(config(), &[("echo_INT8", 1, echo(&[millrace_bundle::Datatype::Int8]))]).await;
    // Above the thresholds for decoding inline: text, compressed bytes, and copies.
    let raw =
        Data::Int8((0..1 << 20).map(|index: i32| (index.wrapping_mul(31) >> 7) as i8).collect()).to_raw();
    (server, raw_echo("INT8", &[raw.len() as i64], &raw), raw)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_bodies_of_every_form_are_answered() {
    let (server, message, raw) = roomy().await;
    let typed = {
        let mut typed = message.clone();
        typed.raw_input_contents.clear();
        let int_contents = raw.iter().map(|byte| i32::from(*byte as i8)).collect();
        typed.inputs[0].contents = Some(pb::InferTensorContents { int_contents, ..Default::default() });
        typed
    };
    let int_contents = &typed.inputs[0].contents.as_ref().unwrap().int_contents;
    for encoding in [None, Some(CompressionEncoding::Gzip), Some(CompressionEncoding::Deflate)] {
        let mut client =
            pb::grpc_inference_service_client::GrpcInferenceServiceClient::new(channel(&server).await)
                .max_decoding_message_size(usize::MAX);
        if let Some(encoding) = encoding {
            client = client.send_compressed(encoding).accept_compressed(encoding);
        }
        let reply = client.model_infer(message.clone()).await.unwrap().into_inner();
        assert!(reply.raw_output_contents[0] == raw, "{encoding:?}");
        let reply = client.model_infer(typed.clone()).await.unwrap().into_inner();
        assert!(reply.outputs[0].contents.as_ref().unwrap().int_contents == *int_contents, "{encoding:?}");
        let requests = [message.clone(), typed.clone(), message.clone()];
        let mut answers =
            client.model_stream_infer(futures::stream::iter(requests)).await.unwrap().into_inner();
        for is_typed in [false, true, false] {
            let answer = answers.message().await.unwrap().unwrap();
            assert_eq!(answer.error_message, "", "{encoding:?}");
            let reply = answer.infer_response.unwrap();
            let is_same = match is_typed {
                true => reply.outputs[0].contents.as_ref().unwrap().int_contents == *int_contents,
                false => reply.raw_output_contents[0] == raw,
            };
            assert!(is_same, "{encoding:?}");
        }
        assert!(answers.message().await.unwrap().is_none());
    }
    // As JSON, and as the bytes after it.
    let elements: Vec<String> = raw.iter().map(|byte| (*byte as i8).to_string()).collect();
    let input = |rest: String| {
        format!(
            r#"{{"inputs":[{{"name":"in_INT8","shape":[{}],"datatype":"INT8",{rest}}}],"parameters":{{"binary_data_output":true}}}}"#,
            raw.len()
        )
    };
    let text = input(format!(r#""data":[{}]"#, elements.join(",")));
    let head = input(format!(r#""parameters":{{"binary_data_size":{}}}"#, raw.len()));
    let head_length = head.len().to_string();
    for (body, length) in
        [(text.into_bytes(), None), ([head.as_bytes(), &raw].concat(), Some(head_length.as_str()))]
    {
        for encoding in ["identity", "gzip", "deflate"] {
            let mut headers = vec![("content-encoding", encoding)];
            headers.extend(length.map(|length| ("inference-header-content-length", length)));
            let reply =
                server.http("POST", "/v2/models/echo_INT8/infer", &headers, &packed(encoding, &body)).await;
            assert_eq!(reply.status, 200, "{encoding}: {}", String::from_utf8_lossy(&reply.body));
            let json: usize = reply.header("inference-header-content-length").unwrap().parse().unwrap();
            assert!(reply.body[json..] == raw[..], "{encoding}");
        }
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tensors_beyond_the_limit_are_refused_in_large_messages() {
    let (server, ..) = roomy().await;
    let mut channel = channel(&server).await;
    for (tag, what) in [(0x2a, "inputs"), (0x32, "outputs"), (0x3a, "entries in raw_input_contents")] {
        let message = [tag, 0].repeat(1 << 20);
        for (method, encoding, body) in [
            ("ModelInfer", None, frame(0, &message)),
            ("ModelInfer", Some("gzip"), frame(1, &packed("gzip", &message))),
            ("ModelStreamInfer", None, frame(0, &message)),
            ("ModelStreamInfer", Some("deflate"), frame(1, &packed("deflate", &message))),
        ] {
            let (status, said) = bare_call(&mut channel, method, encoding, body).await;
            let expected = format!("1048576 {what}, the limit is 1024");
            assert!(status == 3 && said.contains(&expected), "{method} {encoding:?}: {status} {said}");
        }
    }
    server.stop().await;
}
