//! Tests of external tensor data: every place where a graph can name a file, and invalid references.
use bytes::Bytes;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use prost::Message;

use crate::external::{check, check_initializers, files, inline};
use crate::onnx::tensor_proto::{DataLocation, DataType};
use crate::onnx::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, SparseTensorProto,
    StringStringEntryProto, TensorProto, TrainingInfoProto,
};
use crate::tests::linear;
use crate::{Bundle, Error, Limits, Lineage, load, load_plain, scan};

/// Four floats in another file.
fn outside(entries: &[(&str, &str)]) -> TensorProto {
    let entry = |(key, value): &(&str, &str)| StringStringEntryProto {
        key: Some((*key).into()),
        value: Some((*value).into()),
    };
    TensorProto {
        name: Some("w".into()),
        dims: vec![2, 2],
        data_type: Some(DataType::Float as i32),
        external_data: entries.iter().map(entry).collect(),
        data_location: Some(DataLocation::External as i32),
        ..Default::default()
    }
}

/// Models with a tensor, each in another place.
fn everywhere(tensor: &TensorProto) -> Vec<(&'static str, ModelProto)> {
    let attribute = |attribute: AttributeProto| {
        vec![NodeProto { attribute: vec![attribute], op_type: Some("Constant".into()), ..Default::default() }]
    };
    let graph = |graph: GraphProto| ModelProto { graph: Some(graph), ..Default::default() };
    let of_nodes = |node: Vec<NodeProto>| GraphProto { node, ..Default::default() };
    let t = || Some(tensor.clone());
    let sparse = |values: Option<TensorProto>, indices: Option<TensorProto>| SparseTensorProto {
        values,
        indices,
        ..Default::default()
    };
    let single = attribute(AttributeProto { t: t(), ..Default::default() });
    let initialized = || GraphProto { initializer: vec![tensor.clone()], ..Default::default() };
    let function = |function: FunctionProto| ModelProto { functions: vec![function], ..Default::default() };
    let inside = AttributeProto { g: Some(initialized()), ..Default::default() };
    let deep = AttributeProto { graphs: vec![of_nodes(attribute(inside.clone()))], ..Default::default() };
    vec![
        ("initializer", graph(initialized())),
        ("attribute", graph(of_nodes(single.clone()))),
        (
            "attributes",
            graph(of_nodes(attribute(AttributeProto {
                tensors: vec![tensor.clone()],
                ..Default::default()
            }))),
        ),
        ("graph inside", graph(of_nodes(attribute(inside)))),
        ("graph inside a graph", graph(of_nodes(attribute(deep)))),
        ("values", graph(GraphProto { sparse_initializer: vec![sparse(t(), None)], ..Default::default() })),
        ("indices", graph(GraphProto { sparse_initializer: vec![sparse(None, t())], ..Default::default() })),
        (
            "sparse attribute",
            graph(of_nodes(attribute(AttributeProto {
                sparse_tensor: Some(sparse(t(), None)),
                ..Default::default()
            }))),
        ),
        (
            "sparse attributes",
            graph(of_nodes(attribute(AttributeProto {
                sparse_tensors: vec![sparse(None, t())],
                ..Default::default()
            }))),
        ),
        ("function", function(FunctionProto { node: single, ..Default::default() })),
        (
            "default of a function",
            function(FunctionProto {
                attribute_proto: vec![AttributeProto { t: t(), ..Default::default() }],
                ..Default::default()
            }),
        ),
        (
            "training",
            ModelProto {
                training_info: vec![TrainingInfoProto {
                    algorithm: Some(initialized()),
                    ..Default::default()
                }],
                ..Default::default()
            },
        ),
    ]
}

#[test]
fn a_tensor_anywhere_names_a_file_of_its_own_version() {
    for (place, mut model) in
        everywhere(&outside(&[("location", "w.bin"), ("offset", "16"), ("length", "16")]))
    {
        assert_eq!(files(&mut model).unwrap().into_iter().collect::<Vec<_>>(), ["w.bin"], "{place}");
        check(&mut model, |file| (file == "w.bin").then_some(32)).unwrap();
        let error = check(&mut model, |_| None).unwrap_err();
        assert!(error.contains("the folder of the graph has no file \"w.bin\""), "{place}: {error}");
        let error = check(&mut model, |_| Some(31)).unwrap_err();
        assert!(error.contains("its 16 bytes from 16 on are not in \"w.bin\""), "{place}: {error}");
        let inlined = inline(&mut model, |_| Some(Bytes::from(vec![7; 32]))).unwrap();
        assert_eq!(
            (inlined, files(&mut model).unwrap().is_empty()),
            (place != "initializer", place != "initializer")
        );
    }
    for location in [
        "../../etc/passwd",
        "..",
        "/etc/passwd",
        "a/../../b",
        "./w.bin",
        "a//b",
        "",
        "a\0b",
        "a\\b",
        "bundle.json",
        "*/_ORT_MEM_ADDR_/*",
    ] {
        for (place, mut model) in everywhere(&outside(&[("location", location)])) {
            let error = files(&mut model).unwrap_err();
            assert!(
                error.contains("tensor \"w\" keeps its elements in another file"),
                "{place}, {location}: {error}"
            );
        }
    }
}

#[test]
fn external_data_of_the_wrong_length_is_refused() {
    let refused = |tensor: TensorProto, words: &str| {
        let (_, mut model) = everywhere(&tensor).remove(0);
        let error = check(&mut model, |_| Some(1000)).unwrap_err();
        assert!(error.contains(words), "{error}");
    };
    let with = |more: &[(&str, &str)]| outside(&[&[("location", "w.bin")], more].concat());
    refused(outside(&[("offset", "0")]), "which one");
    refused(with(&[("location", "v.bin")]), "location appears twice");
    refused(with(&[("offset", "-1")]), "offset is not a number");
    refused(with(&[("length", "15")]), "its length is 15, and its elements have 16 bytes");
    refused(with(&[("offset", "985")]), "from 985 on are not in");
    refused(with(&[("offset", "18446744073709551615")]), "are not in");
    refused(with(&[("address", "0")]), "\"address\" is not known");
    refused(TensorProto { dims: vec![-1, 2], ..with(&[]) }, "extents");
    refused(TensorProto { dims: vec![i64::MAX, 4], ..with(&[]) }, "extents");
    refused(
        TensorProto { data_type: Some(DataType::String as i32), ..with(&[]) },
        "its type cannot be stored in another file",
    );
    // An external location without the data_location field that announces it.
    refused(
        TensorProto { data_location: None, ..outside(&[("location", "../w")]) },
        "not a plain relative path",
    );
    let (_, mut fits) = everywhere(&with(&[("offset", "984"), ("checksum", "x")])).remove(0);
    check(&mut fits, |_| Some(1000)).unwrap();
}

/// A layer whose weights, eight floats, are in a file.
fn outside_of_linear(location: &str) -> Vec<u8> {
    let mut model = linear(4, 2);
    let weight = &mut model.graph.as_mut().unwrap().initializer[0];
    let dims = std::mem::take(&mut weight.dims);
    *weight = TensorProto { name: Some("weight".into()), dims, ..outside(&[("location", location)]) };
    model.encode_to_vec()
}

#[tokio::test]
async fn a_bundle_has_its_weights_among_the_files_of_its_manifest() {
    let weights = |bytes: usize| vec![("w.bin".to_owned(), Bytes::from(vec![1u8; bytes]))];
    let new = |location: &str, weights: Vec<(String, Bytes)>| {
        let lineage = Lineage::default();
        Bundle::with_weights("m", 1, outside_of_linear(location), weights, lineage, Default::default())
    };
    for (location, weights) in
        [("w.bin", vec![]), ("w.bin", weights(31)), ("v.bin", weights(32)), ("../w.bin", weights(32))]
    {
        let error = new(location, weights).unwrap_err();
        assert!(matches!(error, Error::InvalidModel { .. }), "{location}: {error}");
    }
    let bundle = new("w.bin", weights(32)).unwrap();
    let store = InMemory::new();
    bundle.write(&store, "models").await.unwrap();
    let loaded = load(&store, "models", "m", 1).await.unwrap();
    assert_eq!(loaded.files(), bundle.files());
    assert_eq!(loaded.model_bytes(), bundle.model_onnx().len() as u64 + 32);
    let (onnx, files) = loaded.runnable().unwrap();
    assert_eq!((&onnx, files.len(), files[0].0), (bundle.model_onnx(), 1, "w.bin"));
    let (onnx, _) = loaded.runnable_with_shapes().unwrap();
    assert_eq!(&onnx, bundle.model_onnx());
    // The graph of another model, with a manifest that does not list such a file.
    let hostile = outside_of_linear("../../../etc/passwd");
    let manifest = String::from_utf8(bundle.files().pop().unwrap().1.to_vec()).unwrap();
    let digest = crate::bundle::sha256_hex(&hostile);
    let manifest = manifest.replace(bundle.model_sha256(), &digest).replace(
        &format!("\"bytes\": {}", bundle.model_onnx().len()),
        &format!("\"bytes\": {}", hostile.len()),
    );
    store.put(&Path::from("models/m/1/model.onnx"), hostile.into()).await.unwrap();
    store.put(&Path::from("models/m/1/bundle.json"), manifest.into()).await.unwrap();
    let error = load(&store, "models", "m", 1).await.unwrap_err();
    assert!(error.to_string().contains("not a plain relative path"), "{error}");
}

#[tokio::test]
async fn in_tritons_layout_weights_are_files_of_the_folder_and_no_links_out_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let version = dir.path().join("models/m/1");
    std::fs::create_dir_all(&version).unwrap();
    std::fs::write(dir.path().join("models/m/config.pbtxt"), "").unwrap();
    std::fs::write(version.join("model.onnx"), outside_of_linear("w.bin")).unwrap();
    std::fs::write(dir.path().join("secret"), [1u8; 32]).unwrap();
    let store = object_store::local::LocalFileSystem::new_with_prefix(dir.path()).unwrap();
    let attempt = async |limits: Limits| {
        let listing = scan(&store as &dyn ObjectStore, "models").await.unwrap();
        load_plain(&store, "models", ("m", 1), "model.onnx", &listing.plain[0].files, &limits).await
    };
    let error = attempt(Limits::default()).await.unwrap_err();
    assert!(matches!(error, Error::Incomplete { .. }), "{error}");
    std::os::unix::fs::symlink("../../../secret", version.join("w.bin")).unwrap();
    let error = attempt(Limits::default()).await.unwrap_err();
    assert!(
        error.to_string().contains("\"w.bin\", in which the graph keeps weights, is a link out of"),
        "{error}"
    );
    std::fs::remove_file(version.join("w.bin")).unwrap();
    // The files of a mounted ConfigMap.
    std::fs::create_dir(version.join("..data")).unwrap();
    std::fs::write(version.join("..data/w.bin"), [1u8; 32]).unwrap();
    std::os::unix::fs::symlink("..data/w.bin", version.join("w.bin")).unwrap();
    let loaded = attempt(Limits::default()).await.unwrap();
    assert_eq!(loaded.manifest().files.len(), 2);
    let bytes = outside_of_linear("w.bin").len() as u64;
    let error = attempt(Limits { model_bytes_max: bytes + 31 }).await.unwrap_err();
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
}

#[test]
fn initializers_have_the_elements_that_their_extents_say() {
    let check = |tensor: TensorProto| {
        let graph = GraphProto { initializer: vec![tensor], ..Default::default() };
        check_initializers(&ModelProto { graph: Some(graph), ..Default::default() })
    };
    let tensor = |dims: &[i64], raw: Option<usize>, floats: usize| TensorProto {
        name: Some("w".into()),
        dims: dims.to_vec(),
        data_type: Some(DataType::Float as i32),
        raw_data: raw.map(|bytes| vec![0; bytes]),
        float_data: vec![0.0; floats],
        ..Default::default()
    };
    for sound in [
        tensor(&[2, 2], Some(16), 0),
        tensor(&[2, 2], None, 4),
        tensor(&[2, 2], Some(0), 4),
        tensor(&[], Some(4), 0),
        tensor(&[0, 7], None, 0),
        outside(&[("location", "w.bin")]),
    ] {
        assert_eq!(check(sound), Ok(()));
    }
    let half = |packed: usize| TensorProto {
        data_type: Some(DataType::Float16 as i32),
        int32_data: vec![0; packed],
        ..tensor(&[2, 2], None, 0)
    };
    assert_eq!(check(half(4)), Ok(()));
    assert_eq!(check(tensor(&[1 << 40, 1 << 40, 0], None, 0)), Ok(()));
    for (wrong, reason) in [
        (half(0), "0 elements instead of 4"),
        (half(3), "3 elements instead of 4"),
        (tensor(&[1 << 40, 1 << 40], Some(32), 0), "too large"),
        (tensor(&[-1, 4], Some(16), 0), "negative"),
        (tensor(&[1 << 31, 1 << 31, 2], None, 0), "0 elements instead of"),
        (tensor(&[2, 2], Some(12), 0), "12 bytes of elements instead of 16"),
        (tensor(&[2, 2], None, 3), "3 elements instead of 4"),
        (tensor(&[2, 2], None, 0), "0 elements instead of 4"),
    ] {
        let error = check(wrong).unwrap_err();
        assert!(error.contains("\"w\"") && error.contains(reason), "{error}");
    }
}
