//! Tests of the tensors between the steps of an ensemble: every datatype, also with several consumers.

use std::fmt::Write as _;

use bytes::Bytes;
use half::{bf16, f16};
use millrace_bundle::Datatype;
use millrace_serving::Config;
use millrace_serving::client::Client;
use millrace_serving::tensor::{Data, Tensor};
use millrace_serving::wire::Form;
use tempfile::TempDir;

use crate::ensemble::put_ensemble;
use crate::response_cache::{caching, counts};
use crate::support::*;

/// Two elements of a datatype.
fn pair(datatype: Datatype) -> Data {
    match datatype {
        Datatype::Bool => Data::Bool(vec![true, false]),
        Datatype::Uint8 => Data::Uint8(vec![0, u8::MAX]),
        Datatype::Uint16 => Data::Uint16(vec![1, u16::MAX]),
        Datatype::Uint32 => Data::Uint32(vec![2, u32::MAX]),
        Datatype::Uint64 => Data::Uint64(vec![3, u64::MAX]),
        Datatype::Int8 => Data::Int8(vec![4, i8::MIN]),
        Datatype::Int16 => Data::Int16(vec![5, i16::MIN]),
        Datatype::Int32 => Data::Int32(vec![6, i32::MIN]),
        Datatype::Int64 => Data::Int64(vec![7, i64::MIN]),
        Datatype::Fp16 => Data::Fp16(vec![f16::from_f32(0.5), f16::MAX]),
        Datatype::Bf16 => Data::Bf16(vec![bf16::from_f32(0.5), bf16::MAX]),
        Datatype::Fp32 => Data::Fp32(vec![0.25, f32::MIN]),
        Datatype::Fp64 => Data::Fp64(vec![0.125, f64::MIN]),
        Datatype::Bytes => Data::Bytes(vec![Bytes::from_static(b"a text"), Bytes::new()]),
    }
}

/// An ensemble of two echo steps that also returns the output of the first.
fn twice() -> String {
    let (mut sides, mut first, mut second) = (String::new(), String::new(), String::new());
    for datatype in Datatype::ALL {
        let ty = if datatype == Datatype::Bytes { "STRING".into() } else { datatype.to_string() };
        for (side, name) in [("input", "in"), ("output", "between"), ("output", "out")] {
            writeln!(sides, "{side} {{ name: \"{name}_{datatype}\" data_type: TYPE_{ty} dims: [ -1 ] }}")
                .unwrap();
        }
        for (step, takes, makes) in [(&mut first, "in", "between"), (&mut second, "between", "out")] {
            writeln!(step, "input_map {{ key: \"in_{datatype}\" value: \"{takes}_{datatype}\" }}").unwrap();
            writeln!(step, "output_map {{ key: \"out_{datatype}\" value: \"{makes}_{datatype}\" }}").unwrap();
        }
    }
    format!(
        "platform: \"ensemble\"\n{sides}ensemble_scheduling {{\nstep {{ model_name: \"first\"\n{first} }}\n\
         step {{ model_name: \"second\"\n{second} }}\n}}\n"
    )
}

async fn ask(client: &mut Client) {
    let input = |datatype: Datatype| Tensor::new(&format!("in_{datatype}"), vec![2], pair(datatype)).unwrap();
    let inputs = Datatype::ALL.into_iter().map(input).collect();
    let outputs = client.infer("twice", None, inputs, Form::Raw).await.unwrap().outputs;
    assert_eq!(outputs.len(), 2 * Datatype::ALL.len());
    for (outputs, datatype) in outputs.chunks(2).zip(Datatype::ALL) {
        for (output, side) in outputs.iter().zip(["between", "out"]) {
            assert_eq!((output.name.as_str(), &output.shape[..]), (&*format!("{side}_{datatype}"), &[2][..]));
            assert_eq!(output.data, pair(datatype), "{datatype}");
        }
    }
}

async fn echoes(config: Config) -> Server {
    let dir = TempDir::new().unwrap();
    for model in ["first", "second"] {
        publish(dir.path(), model, 1, echo(&Datatype::ALL)).await;
    }
    put_ensemble(dir.path(), "twice", twice());
    Server::over(config, dir).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_datatype_goes_from_step_to_step_and_to_the_client() {
    let server = echoes(config()).await;
    let mut client = server.client().await;
    for _ in 0..2 {
        ask(&mut client).await;
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_of_ensemble_steps_are_cached() {
    for cached in [&["first"][..], &["second"], &["first", "second"]] {
        let server = echoes(caching(cached, 1 << 20)).await;
        let mut client = server.client().await;
        for _ in 0..3 {
            ask(&mut client).await;
        }
        for model in ["first", "second"] {
            let counts = counts(&server, model, "1").await;
            let expected = if cached.contains(&model) { (1, 2) } else { (3, 0) };
            assert_eq!((counts.answered, (counts.runs, counts.hits)), (3, expected), "{model} of {cached:?}");
        }
        server.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_clients_get_their_own_tensors() {
    const CLIENTS: i64 = 8;
    const REQUESTS: i64 = 50;
    let server = echoes(config()).await;
    let clients = (0..CLIENTS).map(async |number| {
        let mut client = server.client().await;
        for request in 0..REQUESTS {
            let rows = 1 + (number + request) % 5;
            let inputs = Datatype::ALL.into_iter().map(|datatype| {
                let data = match datatype {
                    Datatype::Int64 => Data::Int64(vec![number * REQUESTS + request; rows as usize]),
                    _ => repeated(pair(datatype), rows as usize),
                };
                Tensor::new(&format!("in_{datatype}"), vec![rows], data).unwrap()
            });
            let inputs: Vec<Tensor> = inputs.collect();
            let outputs = client.infer("twice", None, inputs.clone(), Form::Raw).await.unwrap().outputs;
            for (outputs, input) in outputs.chunks(2).zip(&inputs) {
                for output in outputs {
                    assert_eq!((&output.shape, &output.data), (&input.shape, &input.data), "{}", input.name);
                }
            }
        }
    });
    futures::future::join_all(clients).await;
    server.stop().await;
}

/// The first element, repeated.
fn repeated(data: Data, times: usize) -> Data {
    macro_rules! arms {
        ($($variant:ident),*) => {
            match data {
                $(Data::$variant(values) => Data::$variant(vec![values[0].clone(); times]),)*
            }
        };
    }
    arms!(Bool, Uint8, Uint16, Uint32, Uint64, Int8, Int16, Int32, Int64, Fp16, Bf16, Fp32, Fp64, Bytes)
}
