//! Tests of the model server's web page in Chromium.

use std::collections::BTreeMap;

use millrace_bundle::onnx::tensor_proto::DataType;
use millrace_bundle::{Bundle, Lineage, MixedDataset};
use object_store::local::LocalFileSystem;

use crate::clients::python;
use crate::support::{Home, echo, program};

/// Text that would be harmful if the page inserted it as HTML.
const HOSTILE: &str = "<img src=x onerror=\"document.title='taken'\"><b>&amp;</b>";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs Chromium: run make conformance"]
async fn the_page_shows_models_and_runs_them() {
    let home = Home::new();
    let models = home.dir.path().join("models");
    std::fs::create_dir(&models).unwrap();
    let graph = home.dir.path().join("mlp.onnx");
    let init = ["model", "init", "mlp", "--inputs", "4", "--hidden", "8", "--classes", "3"];
    home.ok(init.into_iter().chain([graph.to_str().unwrap()]));
    let graph = std::fs::read(&graph).unwrap();
    let lineage = Lineage {
        volume: HOSTILE.into(),
        snapshot: "monday".into(),
        path: HOSTILE.into(),
        topic: HOSTILE.into(),
        mixture: vec![MixedDataset { dataset: HOSTILE.into(), weight: HOSTILE.into() }],
        selection: HOSTILE.into(),
        offsets: BTreeMap::from([("records-topic".to_owned(), BTreeMap::from([(0, 1_437)]))]),
        config_sha256: "ab".repeat(32),
        seed: u64::MAX,
        code_version: "0.1.0".into(),
        steps: 120,
        epochs: 3,
        imported: None,
        quantized: None,
    };
    let store = LocalFileSystem::new_with_prefix(&models).unwrap();
    let kept = echo(&[("number", DataType::Int64, &[-1]), ("text", DataType::String, &[-1])]);
    let bundles = [
        Bundle::new("digits", 1, graph.clone(), Lineage::default(), BTreeMap::new()),
        Bundle::new("digits", 2, graph.clone(), lineage, BTreeMap::from([(HOSTILE.to_owned(), 0.25)])),
        Bundle::new("echo", 1, kept, Lineage::default(), BTreeMap::new()),
        Bundle::new("broken", 1, graph, Lineage::default(), BTreeMap::new()),
    ];
    for bundle in bundles {
        bundle.unwrap().write(&store, "").await.unwrap();
    }
    std::fs::write(models.join("broken/1/model.onnx"), HOSTILE).unwrap();

    let mut server =
        home.start(["serve", "--models", models.to_str().unwrap(), "--json"].into_iter().chain([
            "--grpc",
            "127.0.0.1:0",
            "--http",
            "127.0.0.1:0",
            "--metrics",
            "127.0.0.1:0",
        ]));
    let listens = server.object();
    let said = program(python("page.py").args([listens["http"].as_str().unwrap(), HOSTILE]));
    assert!(said.contains("shows 3 models and runs two"), "{said}");
    assert_eq!(server.stop(), 0);
}
