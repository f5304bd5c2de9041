//! Tests of refused shared memory: keys, bounds, objects that change, and servers without it.

use std::os::unix::fs::symlink;
use std::process::Command;

use bytes::Bytes;
use millrace_bundle::Datatype;
use millrace_serving::Limits;
use millrace_serving::wire::inference as pb;
use pb::infer_parameter::ParameterChoice::{BoolParam, Int64Param, StringParam, Uint64Param};
use serde_json::json;
use tonic::Code::{AlreadyExists, InvalidArgument, NotFound, Ok as Done, ResourceExhausted, Unimplemented};

use crate::shared_memory::{Choices, Object, grpc, input, output, parameters, place, register};
use crate::support::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_shared_memory_objects_are_registered() {
    let server = Server::start(config(), &[]).await;
    let mut client = grpc(&server).await;
    let object = Object::new("plain", &[0; 100]);
    let link = Object(format!("{}-link", object.0));
    symlink(object.path(), link.path()).unwrap();
    let fifo = Object(format!("{}-fifo", object.0));
    assert!(Command::new("mkfifo").arg(fifo.path()).status().unwrap().success());
    let folder = Object(format!("{}-folder", object.0));
    std::fs::create_dir(folder.path()).unwrap();
    let key = object.0.as_str();
    register(&mut client, "taken", key, 0, 100).await.unwrap();
    let long = format!("/{}", "k".repeat(256));
    let cases = [
        ("twice", "taken", key, 0, 1, AlreadyExists, "registered already"),
        ("no name", "", key, 0, 1, InvalidArgument, "1 to 255 bytes"),
        ("a long name", long.as_str(), key, 0, 1, InvalidArgument, "1 to 255 bytes"),
        ("no key", "r", "", 0, 1, InvalidArgument, "it is empty"),
        ("a slash only", "r", "/", 0, 1, InvalidArgument, "it is empty"),
        ("a path", "r", "/a/b", 0, 1, InvalidArgument, "a slash inside"),
        ("a path upwards", "r", "/../etc/passwd", 0, 1, InvalidArgument, "a slash inside"),
        ("two slashes", "r", "//a", 0, 1, InvalidArgument, "a slash inside"),
        ("upwards", "r", "/..", 0, 1, InvalidArgument, "a directory"),
        ("itself", "r", ".", 0, 1, InvalidArgument, "a directory"),
        ("a NUL", "r", "/a\0b", 0, 1, InvalidArgument, "NUL"),
        ("a long key", "r", long.as_str(), 0, 1, InvalidArgument, "more than 255 bytes"),
        ("no object", "r", "/millrace-nosuch", 0, 1, InvalidArgument, "No such file"),
        ("a link", "r", link.0.as_str(), 0, 1, InvalidArgument, "symbolic link"),
        ("a FIFO", "r", fifo.0.as_str(), 0, 1, InvalidArgument, "not a regular"),
        ("a folder", "r", folder.0.as_str(), 0, 1, InvalidArgument, "cannot be registered"),
        ("nothing of it", "r", key, 0, 0, InvalidArgument, "byte_size is 0"),
        ("too long", "r", key, 0, 101, InvalidArgument, "inside its 100 bytes"),
        ("beyond it", "r", key, 100, 1, InvalidArgument, "inside its 100 bytes"),
        ("overflowing", "r", key, u64::MAX, 2, InvalidArgument, "inside its 100 bytes"),
        ("huge", "r", key, 0, u64::MAX, InvalidArgument, "inside its 100 bytes"),
        ("huge twice", "r", key, u64::MAX, u64::MAX, InvalidArgument, "inside its 100 bytes"),
    ];
    for (what, name, key, offset, byte_size, code, part) in cases {
        let status = register(&mut client, name, key, offset, byte_size).await.unwrap_err();
        assert_eq!(status.code(), code, "{what}: {status}");
        assert!(status.message().contains(part), "{what}: {part:?} is not in {:?}", status.message());
        assert!(!status.message().contains('\n'), "{what}");
    }
    register(&mut client, "overlapping", key, 50, 50).await.unwrap();
    std::fs::remove_dir(folder.path()).unwrap();
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tensor_that_does_not_fit_its_region_is_refused_and_nothing_is_written() {
    let mut config = config();
    config.limits = Limits { message_bytes_max: 4096, ..Limits::default() };
    let server = Server::start(config, &[("both", 1, echo(&[Datatype::Fp32, Datatype::Fp64]))]).await;
    let mut client = grpc(&server).await;
    let object = Object::new("fit", &[7; 8192]);
    register(&mut client, "r", &object.0, 0, 8192).await.unwrap();
    register(&mut client, "late", &object.0, 4000, 100).await.unwrap();
    let good = pb::ModelInferRequest {
        model_name: "both".into(),
        inputs: vec![
            input("in_FP32", "FP32", &[2], place("r", 0, 8)),
            input("in_FP64", "FP64", &[2], place("r", 0, 16)),
        ],
        outputs: vec![output("out_FP32", place("r", 4096, 8)), output("out_FP64", place("r", 4104, 16))],
        ..Default::default()
    };
    let with_input = |choices: Choices| {
        let mut request = good.clone();
        request.inputs[0].parameters = parameters(choices);
        request
    };
    let with_output = |choices: Choices| {
        let mut request = good.clone();
        request.outputs[1].parameters = parameters(choices);
        request
    };
    let region = || ("shared_memory_region", StringParam("r".into()));
    let size = |choice| ("shared_memory_byte_size", choice);
    let cases = [
        ("as it should be", good.clone(), Done, ""),
        ("unsigned sizes", with_input(vec![region(), size(Uint64Param(8))]), Done, ""),
        ("a stray offset", with_output(vec![("shared_memory_offset", Int64Param(-5))]), Done, ""),
        ("unknown region", with_input(place("nosuch", 0, 8)), NotFound, "\"nosuch\" is not registered"),
        ("unknown region of an output", with_output(place("", 0, 16)), NotFound, "not registered"),
        ("no size", with_input(vec![region()]), InvalidArgument, "needs shared_memory_byte_size"),
        ("a negative size", with_input(place("r", 0, -8)), InvalidArgument, "it is -8"),
        ("a negative offset", with_input(place("r", -1, 8)), InvalidArgument, "it is -1"),
        (
            "a size as text",
            with_input(vec![region(), size(StringParam("8".into()))]),
            InvalidArgument,
            "a string",
        ),
        (
            "a region as a number",
            with_input(vec![("shared_memory_region", Int64Param(1))]),
            InvalidArgument,
            "an integer",
        ),
        (
            "a region as a boolean",
            with_output(vec![("shared_memory_region", BoolParam(true))]),
            InvalidArgument,
            "a boolean",
        ),
        (
            "the largest size",
            with_input(vec![region(), size(Uint64Param(u64::MAX))]),
            InvalidArgument,
            "inside",
        ),
        (
            "an overflow",
            with_input(vec![
                region(),
                size(Uint64Param(u64::MAX)),
                ("shared_memory_offset", Uint64Param(u64::MAX)),
            ]),
            InvalidArgument,
            "inside",
        ),
        ("beyond the region", with_input(place("r", 8185, 8)), InvalidArgument, "of 8192 bytes"),
        ("beyond a window", with_input(place("late", 96, 8)), InvalidArgument, "of 100 bytes"),
        ("another size than the shape", with_input(place("r", 0, 12)), InvalidArgument, "12 bytes"),
        ("more than a message may have", with_input(place("r", 0, 4097)), ResourceExhausted, "limit is 4096"),
        ("an output that does not fit", with_output(place("r", 5000, 15)), InvalidArgument, "has 16 bytes"),
        ("overlapping outputs", with_output(place("r", 4100, 16)), InvalidArgument, "overlap"),
        ("overlapping windows", with_output(place("late", 97, 3)), InvalidArgument, "overlap"),
        (
            "classes in shared memory",
            with_output([place("r", 4104, 16), vec![("classification", Int64Param(1))]].concat()),
            InvalidArgument,
            "both classification",
        ),
        (
            "contents beside a region",
            {
                let mut request = good.clone();
                request.inputs[0].contents =
                    Some(pb::InferTensorContents { fp32_contents: vec![0.0; 2], ..Default::default() });
                request
            },
            InvalidArgument,
            "typed contents",
        ),
        (
            "raw contents too many",
            pb::ModelInferRequest { raw_input_contents: vec![Bytes::from_static(&[0; 8])], ..good.clone() },
            InvalidArgument,
            "1 entries",
        ),
    ];
    for (what, request, code, part) in cases {
        std::fs::write(object.path(), [7; 8192]).unwrap();
        let (found, message) = match client.model_infer(request).await {
            Ok(_) => (Done, String::new()),
            Err(status) => (status.code(), status.message().to_owned()),
        };
        assert_eq!(found, code, "{what}: {message}");
        assert!(message.contains(part), "{what}: {part:?} is not in {message:?}");
        if code != Done {
            assert!(object.read() == [7; 8192], "{what}");
        }
    }
    // Truncated after the inputs: the first output would fit, and is not written.
    let file = std::fs::OpenOptions::new().write(true).open(object.path()).unwrap();
    file.set_len(4110).unwrap();
    let status = client.model_infer(good.clone()).await.unwrap_err();
    assert_eq!((status.code(), object.read().len()), (InvalidArgument, 4110), "{status}");
    assert!(status.message().contains("cut to 4110"), "{status}");
    assert!(object.read() == [7; 4110]);
    file.set_len(4).unwrap();
    let status = client.model_infer(good.clone()).await.unwrap_err();
    assert!(status.message().contains("cut to 4"), "{status}");
    file.set_len(8192).unwrap();
    client.model_infer(good).await.unwrap();
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shared_memory_can_be_disabled_and_cuda_regions_are_refused() {
    let mut config = config();
    config.shared_memory = Some(false);
    let server = Server::start(config, &[]).await;
    let mut client = grpc(&server).await;
    let object = Object::new("off", &[0; 16]);
    let refused = register(&mut client, "r", &object.0, 0, 16).await.unwrap_err();
    assert_eq!(refused.code(), Unimplemented);
    assert!(refused.message().contains("[serving] shared_memory"), "{refused}");
    let request = pb::ModelInferRequest {
        model_name: "mlp".into(),
        inputs: vec![input("input", "FP32", &[1, 4], place("r", 0, 16))],
        ..Default::default()
    };
    assert_eq!(client.model_infer(request).await.unwrap_err().code(), Unimplemented);
    let status = client.system_shared_memory_status(pb::SystemSharedMemoryStatusRequest::default()).await;
    assert_eq!(status.unwrap_err().code(), Unimplemented);
    assert_eq!(server.http("GET", "/v2/systemsharedmemory/status", &[], b"").await.status, 501);
    let extensions =
        client.server_metadata(pb::ServerMetadataRequest {}).await.unwrap().into_inner().extensions;
    assert!(!extensions.iter().any(|name| name == "system_shared_memory"), "{extensions:?}");

    let all = pb::CudaSharedMemoryStatusRequest::default();
    assert!(client.cuda_shared_memory_status(all).await.unwrap().into_inner().regions.is_empty());
    let one = pb::CudaSharedMemoryStatusRequest { name: "r".into() };
    assert_eq!(client.cuda_shared_memory_status(one).await.unwrap_err().code(), NotFound);
    let region = pb::CudaSharedMemoryRegisterRequest { name: "r".into(), ..Default::default() };
    assert_eq!(client.cuda_shared_memory_register(region).await.unwrap_err().code(), Unimplemented);
    client.cuda_shared_memory_unregister(pb::CudaSharedMemoryUnregisterRequest::default()).await.unwrap();
    let path = "/v2/cudasharedmemory";
    assert_eq!(server.http("GET", &format!("{path}/status"), &[], b"").await.json(), json!([]));
    assert_eq!(server.http("GET", &format!("{path}/region/r/status"), &[], b"").await.status, 404);
    assert_eq!(server.http("POST", &format!("{path}/region/r/register"), &[], b"{}").await.status, 501);
    for at in ["unregister", "region/r/unregister"] {
        assert_eq!(server.http("POST", &format!("{path}/{at}"), &[], b"").await.status, 200);
    }
    server.stop().await;
}
