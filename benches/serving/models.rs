//! The models that are served: perceptrons of three sizes with seeded weights.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use millrace_bundle::{Bundle, Datatype, Lineage, Signature, TensorSpec};
use millrace_serving::load::Requests;
use millrace_trainer::init;
use object_store::local::LocalFileSystem;
use prost::Message as _;

/// A perceptron.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) name: &'static str,
    pub(crate) inputs: usize,
    hidden: [usize; 2],
    classes: usize,
    /// Rows of a request.
    rows: usize,
}

/// Its run costs less than anything around it: what is measured is the server.
pub(crate) const TINY: Model = Model { name: "tiny", inputs: 16, hidden: [64, 64], classes: 4, rows: 1 };

/// Its weights (5 MiB) are read for each run, so that requests that run together take far less.
pub(crate) const MEDIUM: Model =
    Model { name: "medium", inputs: 256, hidden: [1024, 1024], classes: 16, rows: 1 };

/// Its requests take so long that most of what the cores do is its runs, although the load runs on them, too:
/// what it can do at most is the server's to say.
pub(crate) const LARGE: Model =
    Model { name: "large", inputs: 512, hidden: [2048, 2048], classes: 16, rows: 4 };

const ALL: [&Model; 3] = [&TINY, &MEDIUM, &LARGE];

/// Folder of the bundles, in the folder of [`write`].
pub(crate) const BUNDLES: &str = "bundles";

impl Model {
    fn encoded(&self) -> Vec<u8> {
        init::mlp(self.inputs, &self.hidden, self.classes, 7).unwrap().encode_to_vec()
    }

    /// File name of the graph, in the folder of [`write`].
    pub(crate) fn file(&self) -> String {
        format!("{}.onnx", self.name)
    }

    /// One request, encoded.
    pub(crate) fn requests(&self) -> Requests {
        let spec = |name: &str, width: usize| TensorSpec {
            name: name.into(),
            datatype: Datatype::Fp32,
            shape: vec![-1, width as i64],
        };
        let signature = Signature {
            inputs: vec![spec("input", self.inputs)],
            outputs: vec![spec("logits", self.classes)],
        };
        Requests::generated(self.name, None, &signature, self.rows, &BTreeMap::new(), 7).unwrap()
    }
}

/// Writes each model as a bundle and as a bare graph.
pub(crate) fn write(folder: &Path) {
    let bundles = folder.join(BUNDLES);
    fs::create_dir_all(&bundles).unwrap();
    let store = LocalFileSystem::new_with_prefix(&bundles).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for model in ALL {
        let graph = model.encoded();
        fs::write(folder.join(model.file()), &graph).unwrap();
        let bundle = Bundle::new(model.name, 1, graph, Lineage::default(), BTreeMap::new()).unwrap();
        runtime.block_on(bundle.write(&store, "")).unwrap();
    }
}

/// Writes the models that are compared in Triton's layout, set up as ours are: one thread for each run, as
/// many runs at once as there are cores, batches without a delay.
pub(crate) fn export(folder: &Path) {
    for model in [&TINY, &MEDIUM] {
        let version = folder.join(model.name).join("1");
        fs::create_dir_all(&version).unwrap();
        fs::write(version.join("model.onnx"), model.encoded()).unwrap();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let config = format!(
            "name: \"{}\"\nbackend: \"onnxruntime\"\nmax_batch_size: 64\n\
             input [ {{ name: \"input\" data_type: TYPE_FP32 dims: [ {} ] }} ]\n\
             output [ {{ name: \"logits\" data_type: TYPE_FP32 dims: [ {} ] }} ]\n\
             instance_group [ {{ kind: KIND_CPU count: {cores} }} ]\n\
             dynamic_batching {{ }}\n\
             parameters {{ key: \"intra_op_thread_count\" value: {{ string_value: \"1\" }} }}\n\
             parameters {{ key: \"inter_op_thread_count\" value: {{ string_value: \"1\" }} }}\n",
            model.name, model.inputs, model.classes
        );
        fs::write(folder.join(model.name).join("config.pbtxt"), config).unwrap();
        println!("{}", version.join("model.onnx").display());
    }
}
