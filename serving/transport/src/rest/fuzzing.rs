//! Entry point of the fuzz targets into the bodies of the REST protocol. Panics where a property fails.

use bytes::Bytes;
use millrace_bundle::Signature;
use serde_json::{Value, json};

use super::body::{decode, encode, head};
use millrace_serving_core::tensor::{TENSORS_MAX, Tensor, element_count};
use millrace_serving_repository::infer::Response;

use crate::shared_memory::SharedMemory;

/// Decodes the body of an inference request. Its inputs are the same after they went through a response.
pub fn body(body: &[u8], header_length: Option<usize>) {
    let body = Bytes::copy_from_slice(body);
    let memory = SharedMemory::new(false, 0);
    let _ = head(&body, header_length);
    let Ok((request, reply)) = decode(&body, header_length, &memory) else { return };
    assert!(request.inputs.len() <= TENSORS_MAX && request.outputs.len() <= TENSORS_MAX);
    for input in &request.inputs {
        let count = element_count(&input.name, &input.shape);
        assert_eq!(count.ok(), Some(input.data.len()), "input {:?} fits its shape", input.name);
    }
    let signature = Signature { inputs: Vec::new(), outputs: Vec::new() };
    let response = Response { model: "model".into(), version: 1, outputs: request.inputs.clone() };
    // JSON cannot hold each tensor, and the outputs that the request names are other ones.
    let Ok((json_length, answer)) = encode(&signature, response, reply) else { return };
    let json = &answer[..json_length.unwrap_or(answer.len())];
    let mut response: Value = serde_json::from_slice(json).expect("a response is JSON");
    let again = json!({ "inputs": response["outputs"].take() }).to_string();
    let again_length = json_length.map(|_| again.len());
    let again = [again.as_bytes(), &answer[json.len()..]].concat().into();
    let again = decode(&again, again_length, &memory).map(|(request, _)| request.inputs);
    let again = again.expect("the tensors of a response");
    assert_eq!(again.len(), request.inputs.len());
    for (input, again) in request.inputs.iter().zip(&again) {
        // Classification replaces a tensor by the texts of its best classes.
        if again.data.datatype() == input.data.datatype() {
            let raw = |tensor: &Tensor| (tensor.name.clone(), tensor.shape.clone(), tensor.data.to_raw());
            assert_eq!(raw(again), raw(input));
        }
    }
}
