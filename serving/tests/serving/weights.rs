//! Tests of weights in external files: only files of the same version are accepted.

use millrace_bundle::onnx::*;
use millrace_bundle::{Bundle, Lineage};
use millrace_serving::client::Client;
use millrace_serving::tensor::{Data, Tensor};
use millrace_serving::wire::Form;
use prost::Message;
use tempfile::TempDir;

use crate::support::*;
use crate::triton_layout::put;

async fn answer(client: &mut Client, model: &str, input: Tensor) -> Data {
    client.infer(model, None, vec![input], Form::Raw).await.unwrap().outputs.remove(0).data
}

/// [`mlp`] whose first weights are in a file, and that file.
fn mlp_beside(location: &str) -> (Vec<u8>, Vec<u8>) {
    let mut model = ModelProto::decode(mlp().as_slice()).unwrap();
    let weights = &mut model.graph.as_mut().unwrap().initializer[0];
    // After other bytes, as tools align what they write.
    let file = [vec![0u8; 64], weights.raw_data.take().unwrap()].concat();
    let entry =
        |key: &str, value: &str| StringStringEntryProto { key: Some(key.into()), value: Some(value.into()) };
    weights.external_data = vec![entry("location", location), entry("offset", "64")];
    weights.data_location = Some(tensor_proto::DataLocation::External as i32);
    (model.encode_to_vec(), file)
}

fn mlp_rows() -> Tensor {
    Tensor::fp32("input", vec![1, FEATURES as i64], vec![0.5, -1.0, 2.0, 0.25]).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn weights_beside_the_graph_are_used() {
    let dir = TempDir::new().unwrap();
    let (onnx, weights) = mlp_beside("mlp.onnx.data");
    let files = vec![("mlp.onnx.data".to_owned(), weights.clone().into())];
    let bundle =
        Bundle::with_weights("bundle", 1, onnx.clone(), files, Lineage::default(), Default::default());
    let store = object_store::local::LocalFileSystem::new_with_prefix(dir.path()).unwrap();
    bundle.unwrap().write(&store, "").await.unwrap();
    put(dir.path(), "triton/config.pbtxt", "");
    put(dir.path(), "triton/1/model.onnx", &onnx);
    put(dir.path(), "triton/1/mlp.onnx.data", &weights);
    let server = Server::over(config(), dir).await;
    let expected = mlp_logits(&[0.5, -1.0, 2.0, 0.25]);
    for name in ["bundle", "triton"] {
        let Data::Fp32(found) = answer(&mut server.client().await, name, mlp_rows()).await else { panic!() };
        assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5), "{name}: {found:?}");
    }
    // Other weights make another version of the model.
    put(server.dir.path(), "triton/1/mlp.onnx.data", vec![0u8; weights.len()]);
    server.serving.repository().refresh().await.unwrap();
    let Data::Fp32(found) = answer(&mut server.client().await, "triton", mlp_rows()).await else { panic!() };
    assert!(found.iter().zip(&expected).any(|(a, b)| (a - b).abs() > 1e-3), "{found:?}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_out_of_the_version_are_never_read() {
    let dir = TempDir::new().unwrap();
    let (_, secret) = mlp_beside("");
    put(dir.path(), "secret", &secret);
    let absolute = dir.path().join("secret").to_string_lossy().into_owned();
    let locations = ["../../secret".to_owned(), absolute, "../1/../../secret".into(), "link".into()];
    for (place, location) in locations.iter().enumerate() {
        let (onnx, _) = mlp_beside(location);
        put(dir.path(), &format!("m{place}/config.pbtxt"), "");
        put(dir.path(), &format!("m{place}/1/model.onnx"), onnx);
        std::os::unix::fs::symlink("../../secret", dir.path().join(format!("m{place}/1/link"))).unwrap();
    }
    publish(dir.path(), "mlp", 1, mlp()).await;
    let server = Server::over(config(), dir).await;
    let status = server.serving.repository().status();
    for (place, location) in locations.iter().enumerate() {
        let name = format!("m{place}");
        let refused =
            server.client().await.infer(&name, None, vec![mlp_rows()], Form::Raw).await.unwrap_err();
        let words = if location == "link" { "link out of the version" } else { "not a plain relative path" };
        assert!(refused.to_string().contains(words), "{location}: {refused}");
        assert!(status.iter().any(|it| it.model == name), "{status:?}");
    }
    answer(&mut server.client().await, "mlp", mlp_rows()).await;
    server.stop().await;
}
