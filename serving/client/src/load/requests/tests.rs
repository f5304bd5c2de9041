//! Tests of generated requests: they fit the model for any signature, or are refused with a reason.
use proptest::prelude::*;
use prost::Message as _;

use super::*;
use millrace_serving_core::record;
use millrace_serving_core::wire::codec::PREFIX_BYTES;
use millrace_serving_core::wire::read_inputs;

fn spec(name: &str, datatype: Datatype, shape: &[i64]) -> TensorSpec {
    TensorSpec { name: name.into(), datatype, shape: shape.to_vec() }
}

fn signature(inputs: Vec<TensorSpec>) -> Signature {
    Signature { inputs, outputs: vec![spec("y", Datatype::Fp32, &[-1, 1])] }
}

fn decoded(requests: &Requests, number: u64) -> (ModelInferRequest, Vec<Tensor>) {
    let mut request = ModelInferRequest::decode(requests.framed(number).slice(PREFIX_BYTES..)).unwrap();
    let (tensors, form) = read_inputs(&mut request, |_| Ok(None)).unwrap();
    assert_eq!(form, Form::Raw);
    (request, tensors)
}

proptest! {
    #[test]
    fn generated_inputs_have_the_models_shapes(
        datatypes in prop::collection::vec(prop::sample::select(Datatype::ALL.to_vec()), 1..5),
        shape in prop::collection::vec(-1..5i64, 0..4),
        rows in 1..9usize,
    ) {
        let specs: Vec<TensorSpec> =
            datatypes.iter().enumerate().map(|(i, datatype)| spec(&format!("x{i}"), *datatype, &shape)).collect();
        let signature = signature(specs.clone());
        let requests = Requests::generated("m", Some(3), &signature, rows, &BTreeMap::new(), 1).unwrap();
        let (request, tensors) = decoded(&requests, 5);
        prop_assert_eq!((request.model_name.as_str(), request.model_version.as_str()), ("m", "3"));
        prop_assert_eq!(tensors.len(), specs.len());
        for (tensor, spec) in tensors.iter().zip(&specs) {
            prop_assert_eq!((&tensor.name, tensor.data.datatype()), (&spec.name, spec.datatype));
            prop_assert_eq!(tensor.shape.len(), shape.len());
            for (index, (made, model)) in tensor.shape.iter().zip(&shape).enumerate() {
                let open = if index == 0 { rows as i64 } else { 1 };
                prop_assert_eq!(*made, if *model == -1 { open } else { *model });
            }
        }
    }
}

#[test]
fn shapes_of_the_user_fix_open_extents() {
    let signature = signature(vec![spec("image", Datatype::Fp32, &[-1, 3, -1, -1])]);
    let shapes = |extents: &[i64]| BTreeMap::from([("image".to_owned(), extents.to_vec())]);
    let made = Requests::generated("m", None, &signature, 2, &shapes(&[3, 4, 5]), 1).unwrap();
    assert_eq!(decoded(&made, 0).1[0].shape, [2, 3, 4, 5]);
    for wrong in [&[4, 4, 5][..], &[3, 4], &[3, 4, -1], &[3, 4, 5, 6], &[]] {
        let error = Requests::generated("m", None, &signature, 2, &shapes(wrong), 1).unwrap_err();
        assert!(error.to_string().contains("takes shape [3, -1, -1] behind the rows"), "{error}");
    }
    let other = BTreeMap::from([("picture".to_owned(), vec![3, 4, 5])]);
    let error = Requests::generated("m", None, &signature, 2, &other, 1).unwrap_err();
    assert!(error.to_string().contains("the inputs of the model are [\"image\"]"), "{error}");
}

#[test]
fn request_larger_than_a_message_is_refused_before_it_is_built() {
    let wide = signature(vec![spec("x", Datatype::Fp32, &[-1, 1 << 20])]);
    for rows in [17, usize::MAX / 8, usize::MAX] {
        let error = Requests::generated("m", None, &wide, rows, &BTreeMap::new(), 1).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("fewer rows") || error.contains("too large"), "{error}");
    }
    assert!(Requests::generated("m", None, &wide, 16, &BTreeMap::new(), 1).is_ok());
    let two = signature(vec![spec("x", Datatype::Fp32, &[-1, 1 << 20]), spec("y", Datatype::Int8, &[-1, 1])]);
    assert!(Requests::generated("m", None, &two, 16, &BTreeMap::new(), 1).is_err(), "all inputs count");
}

#[test]
fn records_become_requests_in_their_order() {
    let signature = signature(vec![spec("x", Datatype::Int32, &[-1, -1])]);
    let mapping = Mapping::new(&signature, &BTreeMap::new()).unwrap();
    let rows: Vec<Row> = [r#"{"x":[1]}"#, r#"{"x":[2]}"#, r#"{"x":[3]}"#, r#"{"x":[4,5]}"#]
        .iter()
        .map(|line| mapping.row(&record::parse(line.as_bytes()).unwrap()).unwrap())
        .collect();
    let requests = Requests::from_rows("m", None, &mapping, &rows, 2).unwrap();
    assert_eq!(requests.distinct(), 3);
    let sent: Vec<_> = (0..4).map(|number| decoded(&requests, number).1.remove(0)).collect();
    assert_eq!(sent[0].data, Data::Int32(vec![1, 2]));
    assert_eq!(sent[1].data, Data::Int32(vec![3]));
    assert_eq!((&sent[2].data, &sent[2].shape[..]), (&Data::Int32(vec![4, 5]), &[1, 2][..]));
    assert_eq!(sent[3], sent[0], "and then the first again");
    assert!(Requests::from_rows("m", None, &mapping, &[], 2).is_err());
}
