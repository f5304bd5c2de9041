//! Tests of single runs: the memory in which outputs stay, and its lifetime.
use millrace_bundle::Datatype;
use millrace_bundle::onnx::*;
use prost::Message as _;
use tensor_proto::DataType;

use super::super::options;
use super::*;
use crate::runtime::Runtime;
use millrace_serving_core::config::Device;
use millrace_serving_core::tensor::Data;

/// A tensor type with the extents `dims`; -1 stands for any extent.
fn value(name: &str, elem_type: DataType, dims: &[i64]) -> ValueInfoProto {
    use tensor_shape_proto::{Dimension, dimension::Value};
    let dim = |(place, extent): (usize, &i64)| {
        let value = if *extent < 0 { Value::DimParam(format!("d{place}")) } else { Value::DimValue(*extent) };
        Dimension { value: Some(value), ..Default::default() }
    };
    let shape = TensorShapeProto { dim: dims.iter().enumerate().map(dim).collect() };
    let tensor = type_proto::Tensor { elem_type: Some(elem_type as i32), shape: Some(shape) };
    let r#type = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..Default::default() };
    ValueInfoProto { name: Some(name.into()), r#type: Some(r#type), ..Default::default() }
}

fn node(op: &str, inputs: &[&str], output: &str) -> NodeProto {
    NodeProto {
        op_type: Some(op.into()),
        input: inputs.iter().map(|name| (*name).to_owned()).collect(),
        output: vec![output.into()],
        ..Default::default()
    }
}

/// A session on the processor.
fn session(node: Vec<NodeProto>, input: Vec<ValueInfoProto>, output: Vec<ValueInfoProto>) -> Session {
    let runtime = Runtime::load().unwrap();
    let graph = GraphProto { name: Some("test".into()), node, input, output, ..Default::default() };
    let opset = OperatorSetIdProto { version: Some(17), ..Default::default() };
    let model = ModelProto {
        ir_version: Some(8),
        opset_import: vec![opset],
        graph: Some(graph),
        ..Default::default()
    };
    let mut builder = options::builder(runtime, Device::Cpu, 1, false).unwrap();
    Session::new(builder.commit_from_memory(&model.encode_to_vec()).unwrap(), 0, Memory::Host)
}

/// `y = x + x` and `z = x * x`, for any shape of two extents.
fn twice_and_square() -> Session {
    let float = |name| value(name, DataType::Float, &[-1, -1]);
    session(
        vec![node("Add", &["x", "x"], "y"), node("Mul", &["x", "x"], "z")],
        vec![float("x")],
        vec![float("y"), float("z")],
    )
}

fn spec(name: &str, datatype: Datatype) -> TensorSpec {
    TensorSpec { name: name.into(), datatype, shape: vec![-1, -1] }
}

fn row(values: &[f32]) -> Tensor {
    Tensor::fp32("x", vec![1, values.len() as i64], values.to_vec()).unwrap()
}

fn floats(held: &TensorHandle) -> Vec<f32> {
    match &held.read().unwrap().data {
        Data::Fp32(values) => values.clone(),
        other => panic!("{other:?}"),
    }
}

type Run = fn(
    &mut Session,
    &[View<'_>],
    &[RequestedOutput<'_>],
    Instant,
    Option<&RunOptions>,
) -> Result<(Vec<TensorHandle>, Times), InferError>;
/// `run_bound` is for GPUs; on the processor it gives the same results.
const RUNS: [Run; 2] = [run, run_bound];

#[test]
fn output_left_on_the_device_equals_its_copy_and_feeds_the_next_run() {
    let mut session = twice_and_square();
    let [y, z] = ["y", "z"].map(|name| spec(name, Datatype::Fp32));
    for run in RUNS {
        let input = row(&[1.0, -2.0, 3.0]);
        let wanted = [RequestedOutput { spec: &z, stays: true }, RequestedOutput { spec: &y, stays: false }];
        let (outputs, _) = run(&mut session, &[View::Here(&input)], &wanted, Instant::now(), None).unwrap();
        drop(input);
        let [square, twice] = outputs.try_into().unwrap();
        assert!(matches!(square, TensorHandle::Resident(..)) && matches!(twice, TensorHandle::Alone(_)));
        assert_eq!((square.view().name(), square.view().shape()), ("z", &[1, 3][..]));
        assert_eq!((square.view().elements(), square.view().bytes()), (3, 12));
        assert_eq!(floats(&twice), [2.0, -4.0, 6.0]);

        // Two runs take the output as input; each run leaves an output of its own.
        let shared = square.share().unwrap();
        let wanted = [RequestedOutput { spec: &y, stays: true }];
        let mut next = |held: &TensorHandle| {
            let mut outputs = run(&mut session, &[held.view()], &wanted, Instant::now(), None).unwrap().0;
            outputs.pop().unwrap()
        };
        let first = next(&square);
        drop(square);
        let second = next(&shared);
        let third = next(&second);
        assert_eq!(floats(&first), [2.0, 8.0, 18.0]);
        assert_eq!(floats(&second), [2.0, 8.0, 18.0]);
        assert_eq!(floats(&third), [4.0, 16.0, 36.0]);
        // Read while another handle exists, and through the last handle.
        assert_eq!(floats(&shared), [1.0, 4.0, 9.0]);
        let again = shared.share().unwrap().named("again", 1);
        assert_eq!(again.view().name(), "again");
        for held in [again, shared] {
            let name = held.view().name().to_owned();
            let tensor = held.into_tensor().unwrap();
            assert_eq!((tensor.name, tensor.shape), (name, vec![1, 3]));
            assert_eq!(tensor.data, Data::Fp32(vec![1.0, 4.0, 9.0]));
        }
    }
}

#[test]
fn output_left_on_the_device_outlives_its_session() {
    for run in RUNS {
        let mut session = twice_and_square();
        let (y, input) = (spec("y", Datatype::Fp32), row(&[0.5; 1000]));
        let wanted = [RequestedOutput { spec: &y, stays: true }];
        let (outputs, _) = run(&mut session, &[View::Here(&input)], &wanted, Instant::now(), None).unwrap();
        drop(session);
        assert_eq!(floats(&outputs[0]), [1.0; 1000]);
    }
}

#[test]
fn output_that_aliases_an_input_is_copied() {
    let float = |name| value(name, DataType::Float, &[-1, -1]);
    let shape = value("s", DataType::Int64, &[2]);
    let sessions = [
        // Unchanged, through a node without effect, and through a node that only changes the shape.
        (session(vec![node("Neg", &["x"], "y")], vec![float("x")], vec![float("x"), float("y")]), "x"),
        (session(vec![node("Identity", &["x"], "y")], vec![float("x")], vec![float("y")]), "y"),
        (session(vec![node("Reshape", &["x", "s"], "y")], vec![float("x"), shape], vec![float("y")]), "y"),
    ];
    for (mut session, name) in sessions {
        let spec = spec(name, Datatype::Fp32);
        for run in RUNS {
            let input = row(&[7.0; 4096]);
            let shape = Tensor::new("s", vec![2], Data::Int64(vec![64, 64])).unwrap();
            let both = [View::Here(&input), View::Here(&shape)];
            let inputs = &both[..session.inputs().len()];
            let wanted = [RequestedOutput { spec: &spec, stays: true }];
            let (mut outputs, _) = run(&mut session, inputs, &wanted, Instant::now(), None).unwrap();
            let output = outputs.pop().unwrap();
            drop(input);
            // Other tensors reuse the memory of the input.
            let others: Vec<Tensor> = (0..64).map(|_| row(&[9.0; 4096])).collect();
            assert!(floats(&output).iter().all(|value| *value == 7.0), "{name}");
            drop(others);
        }
    }
}

#[test]
fn texts_are_never_left_on_the_device() {
    let texts = |name| value(name, DataType::String, &[-1, -1]);
    let mut session = session(vec![node("Identity", &["x"], "y")], vec![texts("x")], vec![texts("y")]);
    let y = spec("y", Datatype::Bytes);
    let input = Tensor::new("x", vec![1, 2], Data::Bytes(vec!["a".into(), "".into()])).unwrap();
    for run in RUNS {
        let wanted = [RequestedOutput { spec: &y, stays: true }];
        let (outputs, _) = run(&mut session, &[View::Here(&input)], &wanted, Instant::now(), None).unwrap();
        assert!(matches!(&outputs[..], [TensorHandle::Alone(_)]));
        assert_eq!(outputs[0].read().unwrap().data, input.data);
    }
}

#[test]
fn inputs_and_outputs_that_do_not_fit_are_refused_by_both_runs() {
    let float = |name, width| value(name, DataType::Float, &[-1, width]);
    let mut session = session(vec![node("Add", &["x", "x"], "y")], vec![float("x", 2)], vec![float("y", 2)]);
    let [y, wrong] = [spec("y", Datatype::Fp32), spec("y", Datatype::Int32)];
    for run in RUNS {
        for stays in [false, true] {
            let wide = row(&[1.0, 2.0, 3.0]);
            let wanted = [RequestedOutput { spec: &y, stays }];
            let error = run(&mut session, &[View::Here(&wide)], &wanted, Instant::now(), None).unwrap_err();
            assert!(matches!(error, InferError::Invalid { .. }), "{error}");
            assert!(error.to_string().contains("\"x\" of shape [1, 3]"), "{error}");
            // The output does not have the datatype of the manifest.
            let wanted = [RequestedOutput { spec: &wrong, stays }];
            let fits = row(&[1.0, 2.0]);
            let error = run(&mut session, &[View::Here(&fits)], &wanted, Instant::now(), None).unwrap_err();
            assert!(matches!(error, InferError::Internal { .. }), "{error}");
            assert!(error.to_string().contains("\"y\""), "{error}");
            // The session still works.
            let wanted = [RequestedOutput { spec: &y, stays }];
            let (outputs, _) =
                run(&mut session, &[View::Here(&fits)], &wanted, Instant::now(), None).unwrap();
            assert_eq!(floats(&outputs[0]), [2.0, 4.0]);
        }
    }
}

#[test]
fn value_on_another_device_is_copied_first() {
    let mut session = twice_and_square();
    let (y, input) = (spec("y", Datatype::Fp32), row(&[2.0, 3.0]));
    let wanted = [RequestedOutput { spec: &y, stays: true }];
    let (outputs, _) = run(&mut session, &[View::Here(&input)], &wanted, Instant::now(), None).unwrap();
    let TensorHandle::Resident(_, left) = &outputs[0] else { panic!("it does not stay") };
    assert!(left.value(Memory::Host).is_some() && left.value(Memory::Gpu(0)).is_none());
    let View::There(..) = outputs[0].view() else { panic!("it is not there") };
    let value = outputs[0].view().value(Memory::Gpu(0)).unwrap();
    assert_eq!(value.try_extract_tensor::<f32>().unwrap().1, [4.0, 6.0]);
    let at = outputs[0].read().unwrap().data.range().start;
    assert_ne!(at, left.address(), "it was copied");
    assert_eq!(outputs[0].read().unwrap().data.range().start, at, "once");
}
