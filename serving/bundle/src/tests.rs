//! Tests of round trips, limits and every way in which a bundle can be broken.
mod broken;
mod model;

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use prost::Message;
use serde_json::json;

use crate::onnx;
use crate::{
    Bundle, Datatype, Error, Limits, Lineage, MANIFEST_FILE, MODEL_FILE, Signature, list, load, load_with,
    next_version, scan,
};
use broken::{edited, renamed};
use model::every_message;
pub(crate) use model::linear;

fn bundle(name: &str, version: u64) -> Bundle {
    let lineage = Lineage {
        volume: "digits".into(),
        snapshot: "v1".into(),
        offsets: [("digits".to_string(), [(0, 1437)].into())].into(),
        seed: u64::MAX,
        ..Lineage::default()
    };
    let metrics = [("loss".to_string(), 0.1)].into();
    Bundle::new(name, version, linear(4, 2).encode_to_vec(), lineage, metrics).unwrap()
}

async fn store_with(bundles: &[Bundle]) -> Arc<dyn ObjectStore> {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    for bundle in bundles {
        bundle.write(store.as_ref(), "models").await.unwrap();
    }
    store
}

async fn put(store: &dyn ObjectStore, path: &str, bytes: impl Into<Bytes>) {
    store.put(&Path::from(path), bytes.into().into()).await.unwrap();
}

#[test]
fn the_schema_loses_nothing() {
    let model = every_message();
    let bytes = model.encode_to_vec();
    let again = onnx::ModelProto::decode(bytes.as_slice()).unwrap();
    assert_eq!(again, model);
    assert_eq!(again.encode_to_vec(), bytes);
}

#[tokio::test]
async fn a_bundle_survives_the_store_and_names_its_tensors() {
    let bundle = bundle("digits", 3);
    let signature = &bundle.manifest().signature;
    assert_eq!(signature.inputs[0].name, "input");
    assert_eq!(signature.inputs[0].datatype, Datatype::Fp32);
    assert_eq!(signature.inputs[0].shape, [-1, 4]);
    assert_eq!(signature.outputs[0].shape, [-1, 2]);
    assert_eq!(signature.inputs.len(), 1, "initializers are no inputs");
    assert_eq!(bundle.files().last().unwrap().0, MANIFEST_FILE);
    assert_eq!(bundle.model_sha256().len(), 64);

    let store = store_with(std::slice::from_ref(&bundle)).await;
    for root in ["models", "/models/", "models/"] {
        let loaded = load(store.as_ref(), root, "digits", 3).await.unwrap();
        assert_eq!(loaded.manifest(), bundle.manifest());
        assert_eq!(loaded.model_onnx(), bundle.model_onnx());
    }
}

#[tokio::test]
async fn directory_works_as_a_store() {
    let dir = tempfile::tempdir().unwrap();
    let store = object_store::local::LocalFileSystem::new_with_prefix(dir.path()).unwrap();
    assert!(list(&store, "").await.unwrap().is_empty());
    bundle("digits", 1).write(&store, "").await.unwrap();
    assert!(dir.path().join("digits/1/model.onnx").is_file());
    assert!(dir.path().join("digits/1/bundle.json").is_file());
    assert_eq!(list(&store, "").await.unwrap().len(), 1);
    load(&store, "", "digits", 1).await.unwrap();
}

#[tokio::test]
async fn versions_are_listed_in_order_and_never_replaced() {
    let store = store_with(&[bundle("b", 10), bundle("b", 2), bundle("a", 1)]).await;
    let found: Vec<(String, u64)> = list(store.as_ref(), "models")
        .await
        .unwrap()
        .into_iter()
        .map(|version| (version.name, version.version))
        .collect();
    assert_eq!(found, [("a".into(), 1), ("b".into(), 2), ("b".into(), 10)]);
    assert_eq!(next_version(store.as_ref(), "models", "b").await.unwrap(), 11);
    assert_eq!(next_version(store.as_ref(), "models", "c").await.unwrap(), 1);
    let error = bundle("b", 2).write(store.as_ref(), "models").await.unwrap_err();
    assert!(matches!(error, Error::Exists { .. }), "{error}");
    // Another program has made a folder after which there is no next version.
    store.put(&format!("models/b/{}/x", u64::MAX).into(), "x".into()).await.unwrap();
    assert_eq!(next_version(store.as_ref(), "models", "b").await.unwrap(), 11);
}

#[tokio::test]
async fn an_empty_or_missing_root_holds_no_models() {
    let store = InMemory::new();
    assert!(list(&store, "models").await.unwrap().is_empty());
    let error = load(&store, "models", "digits", 1).await.unwrap_err();
    assert!(matches!(error, Error::NotFound { .. }), "{error}");
}

#[test]
fn names_versions_and_metrics_are_checked() {
    let model = linear(4, 2).encode_to_vec();
    let new = |name: &str, version, metrics: BTreeMap<String, f64>| {
        Bundle::new(name, version, model.clone(), Lineage::default(), metrics).map(drop)
    };
    for name in ["", ".hidden", "-x", "a/b", "..", "ä", &"x".repeat(129)] {
        assert!(matches!(new(name, 1, BTreeMap::new()), Err(Error::InvalidName { .. })), "{name}");
    }
    assert!(matches!(new("m", 0, BTreeMap::new()), Err(Error::InvalidVersion { .. })));
    let metrics = [("loss".to_string(), f64::NAN)].into();
    assert!(matches!(new("m", 1, metrics), Err(Error::InvalidManifest { .. })));
    let many = (0..2000).map(|n| (format!("m{n}"), 0.0)).collect();
    assert!(matches!(new("m", 1, many), Err(Error::InvalidManifest { .. })));
    let long = Lineage { config_sha256: "x".repeat(2 << 20), ..Lineage::default() };
    let error = Bundle::new("m", 1, model, long, BTreeMap::new()).unwrap_err();
    assert!(matches!(error, Error::InvalidManifest { .. }), "{error}");
}

#[tokio::test]
async fn other_files_belong_to_a_version_and_are_verified() {
    let with = |path: &str| bundle("digits", 3).with_file(path, Bytes::from_static(b"{}"));
    for path in ["", "..", "/a", "a//b", "model.onnx", "bundle.json", "a b"] {
        assert!(matches!(with(path), Err(Error::InvalidManifest { .. })), "{path}");
    }
    let mut full = bundle("digits", 3);
    for number in 0..63 {
        full = full.with_file(&format!("f{number}"), Bytes::new()).unwrap();
    }
    assert!(matches!(full.with_file("one-more", Bytes::new()), Err(Error::InvalidManifest { .. })));
    let made = with("statistics.json").unwrap();
    let store = store_with(std::slice::from_ref(&made)).await;
    let read = load(store.as_ref(), "models", "digits", 3).await.unwrap();
    assert_eq!(read.files(), made.files());
    put(store.as_ref(), "models/digits/3/statistics.json", "[]").await;
    let error = load(store.as_ref(), "models", "digits", 3).await.unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
}

#[test]
fn manifests_without_quantization_are_read() {
    let lineage: Lineage = serde_json::from_str(r#"{"volume": "v", "steps": 3}"#).unwrap();
    assert_eq!((lineage.quantized.clone(), lineage.steps), (None, 3));
    assert!(!serde_json::to_string(&lineage).unwrap().contains("quantized"));
    let from = crate::Quantized { version: 2, layers: 4, ..Default::default() };
    let lineage = Lineage { quantized: Some(from), ..lineage };
    let again: Lineage = serde_json::from_str(&serde_json::to_string(&lineage).unwrap()).unwrap();
    assert_eq!(again, lineage);
}

#[test]
fn graphs_without_a_usable_signature_are_refused() {
    let refused = |model: Vec<u8>| {
        let error = Bundle::new("m", 1, model, Lineage::default(), BTreeMap::new()).unwrap_err();
        assert!(matches!(error, Error::InvalidModel { .. }), "{error}");
        error.to_string()
    };
    assert!(refused(b"\xff\xff not a model".to_vec()).contains("decode"));
    assert!(refused(Vec::new()).contains("no graph"));
    let change = |edit: fn(&mut onnx::GraphProto)| {
        let mut model = linear(4, 2);
        edit(model.graph.as_mut().unwrap());
        model.encode_to_vec()
    };
    assert!(refused(change(|graph| graph.input.truncate(0))).contains("0 inputs"));
    assert!(refused(change(|graph| graph.output.clear())).contains("0 outputs"));
    assert!(refused(change(|graph| graph.output[0].r#type = None)).contains("dense tensor"));
    assert!(refused(change(|graph| graph.output.push(graph.output[0].clone()))).contains("twice"));
    assert!(
        refused(change(|graph| {
            graph.initializer[0].set_data_location(onnx::tensor_proto::DataLocation::External);
        }))
        .contains("another file")
    );
}

#[tokio::test]
async fn incomplete_versions_are_not_listed_and_have_a_reason() {
    let store = store_with(&[bundle("good", 1)]).await;
    let other = bundle("half", 1);
    put(store.as_ref(), "models/half/1/model.onnx", other.model_onnx().clone()).await;
    put(store.as_ref(), "models/half/1/bundle.json.writing", "").await;
    let manifest = other.files().pop().unwrap().1;
    put(store.as_ref(), "models/gone/1/bundle.json", renamed(&manifest, "gone")).await;
    put(store.as_ref(), "models/good/v2/bundle.json", "{}").await;
    put(store.as_ref(), "models/good/02/bundle.json", "{}").await;
    put(store.as_ref(), "models/-bad/1/bundle.json", "{}").await;
    put(store.as_ref(), "models/README.md", "not a model").await;

    let listing = scan(store.as_ref(), "models").await.unwrap();
    assert_eq!(listing.complete.len(), 1);
    let why = |path: &str| {
        let found = listing.skipped.iter().find(|skipped| skipped.path == path);
        found.unwrap_or_else(|| panic!("{path} is not among {:?}", listing.skipped)).reason.to_string()
    };
    assert!(why("models/half/1").contains("no bundle.json"));
    assert!(why("models/gone/1").contains("model.onnx is missing"));
    assert!(why("models/good/v2").contains("not a positive integer"));
    assert!(why("models/good/02").contains("not a positive integer"));
    assert!(why("models/-bad").contains("not a model name"));
    let error = load(store.as_ref(), "models", "half", 1).await.unwrap_err();
    assert!(matches!(error, Error::Incomplete { .. }) && error.is_retryable(), "{error}");
}

#[tokio::test]
async fn versions_beside_a_configuration_may_be_a_graph_alone() {
    let store = store_with(&[bundle("both", 3)]).await;
    let graph = bundle("plain", 1).model_onnx().clone();
    put(store.as_ref(), "models/plain/config.pbtxt", "name: \"plain\"").await;
    put(store.as_ref(), "models/plain/other.txt", "x").await;
    put(store.as_ref(), "models/plain/2/model.onnx", graph.clone()).await;
    put(store.as_ref(), "models/plain/2/deep/model.onnx", "x").await;
    put(store.as_ref(), "models/both/config.pbtxt", "").await;

    let listing = scan(store.as_ref(), "models").await.unwrap();
    assert_eq!((listing.complete.len(), listing.plain.len()), (1, 1));
    assert!(listing.skipped.is_empty(), "{:?}", listing.skipped);
    let found = &listing.plain[0];
    assert_eq!((found.name.as_str(), found.version, found.files.len()), ("plain", 2, 1));
    let folder = listing.folders.iter().find(|folder| folder.name == "plain").unwrap();
    assert_eq!(folder.files.keys().collect::<Vec<_>>(), ["config.pbtxt"]);

    let expected = &found.files;
    let load = async |limits: Limits| {
        crate::load_plain(store.as_ref(), "models", ("plain", 2), "model.onnx", expected, &limits).await
    };
    let loaded = load(Limits::default()).await.unwrap();
    assert_eq!(loaded.model_onnx(), &graph);
    assert_eq!((loaded.manifest().name.as_str(), loaded.manifest().version), ("plain", 2));
    let error = load(Limits { model_bytes_max: 8 }).await.unwrap_err();
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
    // A file that has changed since the scan is still being written.
    put(store.as_ref(), "models/plain/2/model.onnx", graph.clone()).await;
    let error = load(Limits::default()).await.unwrap_err();
    assert!(matches!(error, Error::Incomplete { .. }), "{error}");
    let error = found.stat("net.onnx").unwrap_err();
    assert!(matches!(error, Error::Incomplete { .. }), "{error}");
}

#[tokio::test]
async fn sizes_are_limited_and_extra_files_verified() {
    let bundle = bundle("m", 1);
    let store = store_with(std::slice::from_ref(&bundle)).await;
    let limits = Limits { model_bytes_max: bundle.model_onnx().len() as u64 - 1 };
    let error = load_with(store.as_ref(), "models", "m", 1, &limits).await.unwrap_err();
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");

    let manifest = bundle.files().pop().unwrap().1;
    let labels = Bytes::from_static(b"zero\none\n");
    let json = edited(&manifest, |m| {
        m["files"].as_array_mut().unwrap().push(json!({
            "path": "extra/labels.txt",
            "bytes": labels.len(),
            "sha256": crate::bundle::sha256_hex(&labels),
        }));
    });
    put(store.as_ref(), "models/m/1/bundle.json", json).await;
    put(store.as_ref(), "models/m/1/extra/labels.txt", labels.clone()).await;
    let loaded = load(store.as_ref(), "models", "m", 1).await.unwrap();
    assert!(loaded.files().contains(&("extra/labels.txt".to_string(), labels)));
    put(store.as_ref(), "models/m/1/extra/labels.txt", "zero\nten\n\n").await;
    assert!(load(store.as_ref(), "models", "m", 1).await.is_err());
}

#[test]
fn datatypes_have_one_name_each() {
    for datatype in Datatype::ALL {
        assert_eq!(datatype.as_str().parse::<Datatype>().unwrap(), datatype);
        assert_eq!(json!(datatype), json!(datatype.as_str()));
    }
    for text in ["", "fp32", "FP31", "FLOAT"] {
        assert!(text.parse::<Datatype>().is_err());
    }
    assert_eq!(Datatype::from_onnx(0), None);
    assert_eq!(Datatype::from_onnx(14), None, "complex numbers have no datatype");
    assert_eq!(Datatype::from_onnx(999), None);
    let graph = linear(4, 2).graph.unwrap();
    assert_eq!(Signature::of_graph(&graph).unwrap().outputs[0].name, "logits");
    assert_eq!(MODEL_FILE, "model.onnx");
}

#[test]
fn shapes_that_are_declared_between_inputs_and_outputs_do_not_run() {
    let with = |shapes: bool| {
        let mut model = linear(4, 2);
        let graph = model.graph.as_mut().unwrap();
        let mut declared = graph.output[0].clone();
        declared.name = Some("hidden".into());
        if let (false, Some(onnx::type_proto::Value::TensorType(tensor))) =
            (shapes, declared.r#type.as_mut().unwrap().value.as_mut())
        {
            tensor.shape = None;
        }
        graph.value_info.push(declared);
        Bundle::new("m", 1, model.encode_to_vec(), Lineage::default(), BTreeMap::new()).unwrap()
    };
    let (declared, plain) = (with(true), with(false));
    assert_ne!(declared.model_onnx(), plain.model_onnx());
    assert_eq!(&declared.runnable().unwrap().0, plain.model_onnx());
    assert_eq!(&declared.runnable_with_shapes().unwrap().0, declared.model_onnx());
    assert_eq!(&plain.runnable().unwrap().0, plain.model_onnx());
}

#[test]
fn long_lists_left_out_of_an_outline_are_not_empty() {
    let kind = onnx::attribute_proto::AttributeType::Ints;
    let list = |name: &str, len: usize| onnx::AttributeProto {
        name: Some(name.into()),
        r#type: Some(kind as i32),
        ints: vec![1; len],
        ..Default::default()
    };
    let mut model = linear(4, 2);
    model.graph.as_mut().unwrap().node[0].attribute = vec![list("short", 512), list("long", 513)];
    let bundle = Bundle::new("m", 1, model.encode_to_vec(), Lineage::default(), BTreeMap::new()).unwrap();
    let attributes = &bundle.graph().graph.as_ref().unwrap().node[0].attribute;
    assert_eq!((attributes[0].ints.len(), attributes[0].r#type()), (512, kind));
    assert_eq!((attributes[1].ints.len(), attributes[1].r#type), (0, None));
}
