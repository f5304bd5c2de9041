//! Test support: small models, servers on free ports, and a bare HTTP client.

use std::path::Path;
use std::time::Duration;

use millrace_bundle::onnx::*;
use millrace_bundle::{Bundle, Datatype, Lineage};
use millrace_serving::client::Client;
use millrace_serving::{Config, Serving, Source, serve};
use prost::Message;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_util::sync::CancellationToken;

/// A client with all calls of the service.
pub(crate) type Triton =
    millrace_serving::wire::inference::grpc_inference_service_client::GrpcInferenceServiceClient<
        tonic::transport::Channel,
    >;

/// Inputs of the small network.
pub(crate) const FEATURES: usize = 4;
/// Outputs of the small network.
pub(crate) const CLASSES: usize = 3;
const HIDDEN: usize = 5;

fn weight(index: usize) -> f32 {
    ((index * 7 + 3) % 11) as f32 / 11.0 - 0.45
}

pub(crate) fn floats(name: &str, dims: &[usize]) -> TensorProto {
    let count = dims.iter().product::<usize>();
    let values = (0..count).map(|index| weight(index + name.len()));
    TensorProto {
        name: Some(name.into()),
        dims: dims.iter().map(|extent| *extent as i64).collect(),
        data_type: Some(tensor_proto::DataType::Float as i32),
        raw_data: Some(values.flat_map(f32::to_le_bytes).collect()),
        ..Default::default()
    }
}

pub(crate) fn value(name: &str, elem_type: tensor_proto::DataType, shape: &[i64]) -> ValueInfoProto {
    use tensor_shape_proto::{Dimension, dimension::Value};
    let dim = |extent: &i64| Dimension {
        value: Some(match extent {
            -1 => Value::DimParam("batch".into()),
            extent => Value::DimValue(*extent),
        }),
        ..Default::default()
    };
    let tensor = type_proto::Tensor {
        elem_type: Some(elem_type as i32),
        shape: Some(TensorShapeProto { dim: shape.iter().map(dim).collect() }),
    };
    ValueInfoProto {
        name: Some(name.into()),
        r#type: Some(TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..Default::default() }),
        ..Default::default()
    }
}

pub(crate) fn node(op_type: &str, inputs: &[&str], output: &str) -> NodeProto {
    NodeProto {
        op_type: Some(op_type.into()),
        name: Some(format!("{op_type}_{output}")),
        input: inputs.iter().map(ToString::to_string).collect(),
        output: vec![output.into()],
        ..Default::default()
    }
}

pub(crate) fn model(graph: GraphProto) -> Vec<u8> {
    ModelProto {
        ir_version: Some(8),
        opset_import: vec![OperatorSetIdProto { domain: Some(String::new()), version: Some(17) }],
        graph: Some(graph),
        ..Default::default()
    }
    .encode_to_vec()
}

/// A network of two layers: `input` FP32 [batch, 4] to `logits` FP32 [batch, 3].
pub(crate) fn mlp() -> Vec<u8> {
    use tensor_proto::DataType::Float;
    model(GraphProto {
        name: Some("mlp".into()),
        node: vec![
            node("Gemm", &["input", "w1", "b1"], "h"),
            node("Relu", &["h"], "r"),
            node("Gemm", &["r", "w2", "b2"], "logits"),
        ],
        initializer: vec![
            floats("w1", &[FEATURES, HIDDEN]),
            floats("b1", &[HIDDEN]),
            floats("w2", &[HIDDEN, CLASSES]),
            floats("b2", &[CLASSES]),
        ],
        input: vec![value("input", Float, &[-1, FEATURES as i64])],
        output: vec![value("logits", Float, &[-1, CLASSES as i64])],
        ..Default::default()
    })
}

/// The result of [`mlp`] for one row, computed here.
pub(crate) fn mlp_logits(row: &[f32]) -> Vec<f32> {
    let w = |name: &str, index: usize| weight(index + name.len());
    let hidden: Vec<f32> = (0..HIDDEN)
        .map(|h| {
            let sum: f32 = row.iter().enumerate().map(|(i, x)| x * w("w1", i * HIDDEN + h)).sum::<f32>();
            (sum + w("b1", h)).max(0.0)
        })
        .collect();
    (0..CLASSES)
        .map(|c| {
            hidden.iter().enumerate().map(|(h, x)| x * w("w2", h * CLASSES + c)).sum::<f32>() + w("b2", c)
        })
        .collect()
}

/// Returns every input: `in_<datatype>` [batch] to `out_<datatype>` [batch].
pub(crate) fn echo(datatypes: &[Datatype]) -> Vec<u8> {
    use tensor_proto::DataType as T;
    let elem = |datatype: &Datatype| match datatype {
        Datatype::Bool => T::Bool,
        Datatype::Uint8 => T::Uint8,
        Datatype::Uint16 => T::Uint16,
        Datatype::Uint32 => T::Uint32,
        Datatype::Uint64 => T::Uint64,
        Datatype::Int8 => T::Int8,
        Datatype::Int16 => T::Int16,
        Datatype::Int32 => T::Int32,
        Datatype::Int64 => T::Int64,
        Datatype::Fp16 => T::Float16,
        Datatype::Bf16 => T::Bfloat16,
        Datatype::Fp32 => T::Float,
        Datatype::Fp64 => T::Double,
        Datatype::Bytes => T::String,
    };
    let mut graph = GraphProto { name: Some("echo".into()), ..Default::default() };
    for datatype in datatypes {
        let (input, output) = (format!("in_{datatype}"), format!("out_{datatype}"));
        graph.input.push(value(&input, elem(datatype), &[-1]));
        graph.output.push(value(&output, elem(datatype), &[-1]));
        graph.node.push(node("Identity", &[&input], &output));
    }
    model(graph)
}

/// Returns its input: `input` INT32 [2, 3], no batch, to `output`.
pub(crate) fn fixed() -> Vec<u8> {
    use tensor_proto::DataType::Int32;
    model(GraphProto {
        name: Some("fixed".into()),
        node: vec![node("Identity", &["input"], "output")],
        input: vec![value("input", Int32, &[2, 3])],
        output: vec![value("output", Int32, &[2, 3])],
        ..Default::default()
    })
}

/// Looks up rows of a table: `index` INT64 [batch] to `row` FP32 [batch, 3], from 0 to 3.
pub(crate) fn table() -> Vec<u8> {
    use tensor_proto::DataType::{Float, Int64};
    model(GraphProto {
        name: Some("table".into()),
        node: vec![node("Gather", &["table", "index"], "row")],
        initializer: vec![floats("table", &[4, 3])],
        input: vec![value("index", Int64, &[-1])],
        output: vec![value("row", Float, &[-1, 3])],
        ..Default::default()
    })
}

/// Takes a good part of a second for 256 rows: `input` FP32 [batch, 512] through many layers.
pub(crate) fn slow(layers: usize) -> Vec<u8> {
    use tensor_proto::DataType::Float;
    let mut graph = GraphProto {
        name: Some("slow".into()),
        initializer: vec![floats("w", &[512, 512])],
        input: vec![value("input", Float, &[-1, 512])],
        output: vec![value("output", Float, &[-1, 512])],
        ..Default::default()
    };
    let mut last = "input".to_string();
    for layer in 0..layers {
        let sum = format!("m{layer}");
        let out = if layer + 1 == layers { "output".to_string() } else { format!("t{layer}") };
        graph.node.push(node("MatMul", &[&last, "w"], &sum));
        graph.node.push(node("Tanh", &[&sum], &out));
        last = out;
    }
    model(graph)
}

/// Cumulative sums of its rows: `input` FP32 [batch, 4] to `output`, each row of which adds all before it.
pub(crate) fn steps() -> Vec<u8> {
    let axis = TensorProto {
        name: Some("axis".into()),
        data_type: Some(tensor_proto::DataType::Int64 as i32),
        raw_data: Some(0i64.to_le_bytes().to_vec()),
        ..Default::default()
    };
    of_rows("steps", node("CumSum", &["input", "axis"], "output"), vec![axis])
}

/// Returns its rows in reverse order: `input` FP32 [batch, 4] to `output`.
pub(crate) fn reversed() -> Vec<u8> {
    let whole = |name: &str, value: i64| TensorProto {
        name: Some(name.into()),
        dims: vec![1],
        data_type: Some(tensor_proto::DataType::Int64 as i32),
        raw_data: Some(value.to_le_bytes().to_vec()),
        ..Default::default()
    };
    let slice = node("Slice", &["input", "from", "to", "axis", "step"], "output");
    let bounds = [("from", -1), ("to", i64::MIN), ("axis", 0), ("step", -1)];
    of_rows("reversed", slice, bounds.map(|(name, value)| whole(name, value)).into())
}

fn of_rows(name: &str, node: NodeProto, initializer: Vec<TensorProto>) -> Vec<u8> {
    use tensor_proto::DataType::Float;
    model(GraphProto {
        name: Some(name.into()),
        node: vec![node],
        initializer,
        input: vec![value("input", Float, &[-1, FEATURES as i64])],
        output: vec![value("output", Float, &[-1, FEATURES as i64])],
        ..Default::default()
    })
}

/// Returns its row in another shape: `input` FP32 [batch, 4] and `shape` INT64 [batch, 2] to `memory`. Unless
/// `mended`, it fails on a row whose `shape` has not four elements. The error names the output, so it counts as one
/// of the device's memory.
pub(crate) fn picky(mended: bool) -> Vec<u8> {
    use tensor_proto::DataType::{Float, Int64};
    let flat = TensorProto {
        name: Some("flat".into()),
        dims: vec![1],
        data_type: Some(Int64 as i32),
        raw_data: Some((-1i64).to_le_bytes().to_vec()),
        ..Default::default()
    };
    let reshape = vec![
        node("Reshape", &["shape", "flat"], "extents"),
        node("Reshape", &["input", "extents"], "memory"),
    ];
    model(GraphProto {
        name: Some("picky".into()),
        node: if mended { vec![node("Identity", &["input"], "memory")] } else { reshape },
        initializer: if mended { Vec::new() } else { vec![flat] },
        input: vec![value("input", Float, &[-1, FEATURES as i64]), value("shape", Int64, &[-1, 2])],
        output: vec![value("memory", Float, &[-1, FEATURES as i64])],
        ..Default::default()
    })
}

/// Adds its inputs: `a` and `b` FP32 [batch, 4] to `output`.
pub(crate) fn sum() -> Vec<u8> {
    use tensor_proto::DataType::Float;
    let shape = [-1, FEATURES as i64];
    model(GraphProto {
        name: Some("sum".into()),
        node: vec![node("Add", &["a", "b"], "output")],
        input: vec![value("a", Float, &shape), value("b", Float, &shape)],
        output: vec![value("output", Float, &shape)],
        ..Default::default()
    })
}

/// Writes a version into a directory of models.
pub(crate) async fn publish(dir: &Path, name: &str, version: u64, onnx: Vec<u8>) -> Bundle {
    let store = object_store::local::LocalFileSystem::new_with_prefix(dir).unwrap();
    let bundle = Bundle::new(name, version, onnx, Lineage::default(), Default::default()).unwrap();
    bundle.write(&store, "").await.unwrap();
    bundle
}

/// A configuration with free ports that scans the repository only on request.
pub(crate) fn config() -> Config {
    let free = "127.0.0.1:0".parse().unwrap();
    Config { grpc: free, http: free, metrics: free, poll_ms: 0, ..Config::default() }
}

/// A server over a directory of models.
pub(crate) struct Server {
    pub(crate) dir: TempDir,
    pub(crate) serving: Serving,
    pub(crate) cancel: CancellationToken,
}

impl Server {
    /// Starts a server with `mlp` version 1 and the models in `more`.
    pub(crate) async fn start(config: Config, more: &[(&str, u64, Vec<u8>)]) -> Server {
        let dir = tempfile::tempdir().unwrap();
        publish(dir.path(), "mlp", 1, mlp()).await;
        for (name, version, onnx) in more {
            publish(dir.path(), name, *version, onnx.clone()).await;
        }
        Server::over(config, dir).await
    }

    /// Starts a server over existing models.
    pub(crate) async fn over(config: Config, dir: TempDir) -> Server {
        let cancel = CancellationToken::new();
        let source = Source::directory(dir.path()).unwrap();
        let serving = serve(&config, source, cancel.clone()).await.unwrap();
        Server { dir, serving, cancel }
    }

    /// A client from generated code, for calls that [`Client`] lacks.
    pub(crate) async fn triton(&self) -> Triton {
        Triton::connect(format!("http://{}", self.serving.addresses().grpc)).await.unwrap()
    }

    pub(crate) async fn client(&self) -> Client {
        Client::connect(&self.serving.addresses().grpc.to_string()).await.unwrap()
    }

    pub(crate) async fn http(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Reply {
        http(self.serving.addresses().http, method, path, headers, body).await
    }

    /// Like [`Server::http`] with another host header.
    pub(crate) async fn http_of(
        &self,
        host: &str,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Reply {
        http_of(self.serving.addresses().http, host, method, path, headers, body).await
    }

    pub(crate) async fn stop(self) {
        self.cancel.cancel();
        tokio::time::timeout(Duration::from_secs(20), self.serving.join()).await.unwrap().unwrap();
    }
}

/// An HTTP response.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Reply {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| {
            panic!("{error}: {} {}", self.status, String::from_utf8_lossy(&self.body))
        })
    }
}

/// One request over a new connection.
pub(crate) async fn http(
    address: std::net::SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Reply {
    http_of(address, &address.to_string(), method, path, headers, body).await
}

/// One request for a host over a new connection.
pub(crate) async fn http_of(
    address: std::net::SocketAddr,
    host: &str,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Reply {
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let mut head = format!(
        "{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-length: {}\r\n",
        body.len()
    );
    for (key, value) in headers {
        head.push_str(&format!("{key}: {value}\r\n"));
    }
    head.push_str("\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    // A server that refuses because of the headers may close before it has read the body.
    let _ = stream.write_all(body).await;
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    let split = answer.windows(4).position(|window| window == b"\r\n\r\n").unwrap();
    let head = String::from_utf8(answer[..split].to_vec()).unwrap();
    let status = head.split_whitespace().nth(1).unwrap().parse().unwrap();
    Reply { status, head, body: answer[split + 4..].to_vec() }
}
