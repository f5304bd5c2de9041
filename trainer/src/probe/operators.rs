//! Test models: every supported operator in the forms that exporters write.

mod activation;
mod branches;
mod linear;
mod movement;
mod positions;
mod reduction;
mod sequence;
mod spatial;

use millrace_bundle::onnx::{AttributeProto, ModelProto, TensorProto, tensor_proto};

use super::{Probe, float, int, tensor, text};

/// A name, a model, and the shape of one input row.
pub(crate) type Case = (String, ModelProto, Vec<usize>);

fn case(name: &str, opset: i64, row: &[i64], build: impl FnOnce(&mut Probe, &str) -> String) -> Case {
    let mut probe = Probe::new(opset, row);
    let output = build(&mut probe, "x");
    let row = row.iter().map(|size| *size as usize).collect();
    (name.to_owned(), probe.finish(&output), row)
}

/// `op(x · w)`
fn after_mul(name: &str, op: &'static str, opset: i64, row: &[i64], attributes: Vec<AttributeProto>) -> Case {
    let weights = row.to_vec();
    case(name, opset, row, |p, x| {
        let w = p.param(&weights);
        let scaled = p.node("Mul", &[x, &w], vec![]);
        p.node(op, &[&scaled], attributes)
    })
}

/// All forms of all operators.
pub(crate) fn all() -> Vec<Case> {
    let mut cases = elementwise();
    cases.extend(activation::activations());
    cases.extend(activation::arithmetic());
    cases.extend(branches::branches());
    cases.extend(branches::numbers_of_rows());
    cases.extend(branches::places());
    cases.extend(linear::products());
    cases.extend(linear::movement());
    cases.extend(movement::movement());
    cases.extend(movement::shapes());
    cases.extend(positions::positions());
    cases.extend(reduction::reductions());
    cases.extend(reduction::normalizations());
    cases.extend(sequence::sequences());
    cases.extend(spatial::convolutions());
    cases.extend(spatial::pools());
    cases.extend(spatial::transposes());
    cases.extend(spatial::folds());
    cases.extend(spatial::resizes());
    cases
}

/// The value of a ConstantOfShape: 1.
fn ones() -> AttributeProto {
    let one = TensorProto {
        dims: vec![1],
        data_type: Some(tensor_proto::DataType::Float as i32),
        float_data: vec![1.0],
        ..Default::default()
    };
    tensor("value", one)
}

fn elementwise() -> Vec<Case> {
    let mut cases: Vec<Case> =
        ["Relu", "Sigmoid", "Tanh", "Erf", "Exp", "Neg", "Softmax", "LogSoftmax", "Identity"]
            .into_iter()
            .map(|op| after_mul(op, op, 17, &[6], vec![]))
            .collect();
    cases.push(after_mul("LeakyRelu", "LeakyRelu", 17, &[6], vec![float("alpha", 0.2)]));
    cases.push(after_mul("Gelu", "Gelu", 20, &[6], vec![]));
    cases.push(after_mul("Gelu tanh", "Gelu", 20, &[6], vec![text("approximate", "tanh")]));
    cases.push(after_mul("Softmax axis 1", "Softmax", 13, &[3, 4], vec![int("axis", 1)]));
    cases.push(after_mul("LogSoftmax axis -2", "LogSoftmax", 13, &[3, 4], vec![int("axis", -2)]));
    cases.push(after_mul("Softmax before 13", "Softmax", 11, &[5], vec![]));
    for op in ["Log", "Sqrt"] {
        cases.push(case(op, 17, &[6], |p, x| {
            let w = p.param(&[6]);
            let one = p.constant(&[], vec![1.0]);
            let scaled = p.node("Mul", &[x, &w], vec![]);
            let square = p.node("Mul", &[&scaled, &scaled], vec![]);
            let positive = p.node("Add", &[&square, &one], vec![]);
            p.node(op, &[&positive], vec![])
        }));
    }
    for op in ["Add", "Sub", "Mul", "Div"] {
        for dims in [&[4][..], &[1], &[3, 1], &[1, 3, 4], &[2, 3, 4], &[2, 1, 1]] {
            cases.push(case(&format!("x {op} {dims:?}"), 17, &[2, 3, 4], |p, x| {
                let w = p.param(dims);
                let away = p.node("Exp", &[&w], vec![]);
                p.node(op, &[x, &away], vec![])
            }));
            cases.push(case(&format!("{dims:?} {op} x"), 17, &[2, 3, 4], |p, x| {
                let w = p.param(dims);
                let v = p.param(&[4]);
                let turned = p.node("Mul", &[x, &v], vec![]);
                let away = p.node("Exp", &[&turned], vec![]);
                p.node(op, &[&w, &away], vec![])
            }));
        }
        for (side, dims) in [("left", &[][..]), ("right", &[]), ("left", &[4]), ("right", &[1, 1])] {
            cases.push(case(&format!("{op} constant {dims:?} {side}"), 13, &[4], |p, x| {
                let w = p.param(&[4]);
                let scaled = p.node("Mul", &[x, &w], vec![]);
                let away = p.node("Exp", &[&scaled], vec![]);
                let count = dims.iter().product::<i64>() as usize;
                let c = p.constant(dims, vec![1.5; count]);
                match side {
                    "left" => p.node(op, &[&c, &away], vec![]),
                    _ => p.node(op, &[&away, &c], vec![]),
                }
            }));
        }
    }
    cases.push(case("Gelu written with Erf", 17, &[6], |p, x| {
        let w = p.param(&[6]);
        let root = p.constant(&[], vec![std::f32::consts::SQRT_2]);
        let one = p.constant(&[], vec![1.0]);
        let half = p.constant(&[], vec![0.5]);
        let scaled = p.node("Mul", &[x, &w], vec![]);
        let divided = p.node("Div", &[&scaled, &root], vec![]);
        let erf = p.node("Erf", &[&divided], vec![]);
        let plus = p.node("Add", &[&erf, &one], vec![]);
        let times = p.node("Mul", &[&scaled, &plus], vec![]);
        p.node("Mul", &[&times, &half], vec![])
    }));
    cases.push(case("rank-0 initializer", 17, &[3], |p, x| {
        let w = p.param(&[3]);
        let c = p.param_of(&[], vec![0.25]);
        let scaled = p.node("Mul", &[x, &w], vec![]);
        p.node("Mul", &[&scaled, &c], vec![])
    }));
    cases
}
