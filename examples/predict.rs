//! Model server example: serves the models of a folder on free ports and sends a request to one of them.
//!
//! Run it: `cargo run --example predict -- MODELS MODEL`, where MODELS holds `MODEL/VERSION/model.onnx`.
//! `millrace model import` creates this layout.
#![allow(clippy::print_stdout)]

use std::error::Error;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use bytes::Bytes;
use millrace_serving::client::Client;
use millrace_serving::tensor::Tensor;
use millrace_serving::wire::Form;
use millrace_serving::{Config, Source, serve};
use tokio_util::sync::CancellationToken;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(models), Some(model)) = (args.next().map(PathBuf::from), args.next()) else {
        return Err("usage: predict MODELS MODEL".into());
    };
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let config = Config { grpc: any, http: any, metrics: any, ..Config::default() };
    let cancel = CancellationToken::new();
    let serving = serve(&config, Source::directory(&models)?, cancel.clone()).await?;

    let mut client = Client::connect(&serving.addresses().grpc.to_string()).await?;
    let signature = client.signature(&model, "").await?;
    let mut inputs = Vec::new();
    for input in signature.inputs {
        // One row of zeros; a dimension of -1 is the caller's choice.
        let shape: Vec<i64> = input.shape.iter().map(|extent| (*extent).max(1)).collect();
        let elements = usize::try_from(shape.iter().product::<i64>())?;
        let bytes = input.datatype.element_bytes().ok_or("this example knows no strings")? * elements;
        inputs.push(Tensor::from_raw(input.name, input.datatype, shape, &Bytes::from(vec![0; bytes]))?);
    }
    let prediction = client.infer(&model, None, inputs, Form::Raw).await?;
    println!("version {} answered", prediction.version);
    for output in signature.outputs {
        println!("{}: {:?}", output.name, prediction.output(&output.name));
    }
    cancel.cancel();
    serving.join().await?;
    Ok(())
}
