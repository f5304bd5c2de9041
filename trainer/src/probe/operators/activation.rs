//! Test models of activations, other element-wise operators, comparisons and choices.

use millrace_bundle::onnx::AttributeProto;

use super::super::{float, int};
use super::{Case, after_mul, case};

pub(super) fn activations() -> Vec<Case> {
    let forms: Vec<(&'static str, i64, Vec<AttributeProto>)> = vec![
        ("Elu", 17, vec![]),
        ("Elu", 17, vec![float("alpha", 0.7)]),
        ("Selu", 17, vec![]),
        ("Celu", 17, vec![float("alpha", 0.6)]),
        ("Softplus", 17, vec![]),
        ("Softsign", 17, vec![]),
        ("HardSigmoid", 17, vec![]),
        ("HardSigmoid", 17, vec![float("alpha", 1.3), float("beta", 0.4)]),
        ("HardSwish", 17, vec![]),
        ("Mish", 18, vec![]),
        ("Swish", 24, vec![float("alpha", 1.5)]),
        ("ThresholdedRelu", 17, vec![float("alpha", 0.1)]),
        ("Shrink", 17, vec![float("lambd", 0.2), float("bias", 0.1)]),
        ("Abs", 17, vec![]),
        ("Sin", 17, vec![]),
        ("Cos", 17, vec![]),
        ("Tan", 17, vec![]),
        ("Asin", 17, vec![]),
        ("Acos", 17, vec![]),
        ("Atan", 17, vec![]),
        ("Sinh", 17, vec![]),
        ("Cosh", 17, vec![]),
        ("Asinh", 17, vec![]),
        ("Atanh", 17, vec![]),
        ("LpNormalization", 17, vec![]),
        ("LpNormalization", 17, vec![int("p", 1), int("axis", 1)]),
    ];
    let mut cases: Vec<Case> = forms
        .into_iter()
        .map(|(op, opset, attributes)| {
            after_mul(&format!("{op} {}", attributes.len()), op, opset, &[6], attributes)
        })
        .collect();
    for op in ["Acosh", "Reciprocal"] {
        cases.push(case(op, 17, &[6], |p, x| {
            let w = p.param(&[6]);
            let two = p.constant(&[], vec![2.0]);
            let scaled = p.node("Mul", &[x, &w], vec![]);
            let away = p.node("Add", &[&scaled, &two], vec![]);
            let positive = p.node("Abs", &[&away], vec![]);
            p.node(op, &[&positive], vec![])
        }));
    }
    for op in ["Sign", "Floor", "Ceil", "Round"] {
        // The slope is 0, hence a second term for the gradient.
        cases.push(case(op, 17, &[6], |p, x| {
            let w = p.param(&[6]);
            let three = p.constant(&[], vec![3.0]);
            let scaled = p.node("Mul", &[x, &w], vec![]);
            let wide = p.node("Mul", &[&scaled, &three], vec![]);
            let step = p.node(op, &[&wide], vec![]);
            p.node("Mul", &[&step, &scaled], vec![])
        }));
    }
    for dims in [&[6][..], &[1], &[3, 1, 1]] {
        cases.push(case(&format!("PRelu {dims:?}"), 17, &[3, 2, 6], |p, x| {
            let w = p.param(&[6]);
            let slope = p.param(dims);
            let scaled = p.node("Mul", &[x, &w], vec![]);
            p.node("PRelu", &[&scaled, &slope], vec![])
        }));
    }
    cases.push(case("Swish written out", 17, &[6], |p, x| {
        let w = p.param(&[6]);
        let scaled = p.node("Mul", &[x, &w], vec![]);
        let gate = p.node("Sigmoid", &[&scaled], vec![]);
        p.node("Mul", &[&scaled, &gate], vec![])
    }));
    cases.push(after_mul("Clip attributes", "Clip", 7, &[6], vec![float("min", -0.3), float("max", 0.2)]));
    for (name, low, high) in [("both", true, true), ("low", true, false), ("high", false, true)] {
        cases.push(case(&format!("Clip inputs {name}"), 17, &[6], |p, x| {
            let w = p.param(&[6]);
            let scaled = p.node("Mul", &[x, &w], vec![]);
            let bounds =
                [low.then(|| p.constant(&[], vec![-0.2])), high.then(|| p.param_of(&[], vec![0.25]))];
            let bounds = bounds.map(Option::unwrap_or_default);
            p.node("Clip", &[&scaled, &bounds[0], &bounds[1]], vec![])
        }));
    }
    cases
}

pub(super) fn arithmetic() -> Vec<Case> {
    let mut cases = Vec::new();
    for exponent in [1.0, 2.0, 3.0, 0.5, -1.0, 1.7, 4.0] {
        cases.push(case(&format!("Pow {exponent}"), 17, &[6], |p, x| {
            let w = p.param(&[6]);
            let scaled = p.node("Mul", &[x, &w], vec![]);
            let positive = p.node("Exp", &[&scaled], vec![]);
            let exponent = p.constant(&[], vec![exponent]);
            p.node("Pow", &[&positive, &exponent], vec![])
        }));
    }
    cases.push(case("Pow of negative numbers by an integer", 17, &[6], |p, x| {
        let w = p.param(&[6]);
        let scaled = p.node("Mul", &[x, &w], vec![]);
        let exponent = p.index(2);
        p.node("Pow", &[&scaled, &exponent], vec![])
    }));
    cases.push(case("Pow of two activations", 17, &[6], |p, x| {
        let (w, v) = (p.param(&[6]), p.param(&[1, 6]));
        let scaled = p.node("Mul", &[x, &w], vec![]);
        let base = p.node("Exp", &[&scaled], vec![]);
        p.node("Pow", &[&base, &v], vec![])
    }));
    for op in ["Max", "Min", "Sum", "Mean"] {
        cases.push(case(&format!("{op} of three"), 17, &[2, 6], |p, x| {
            let (w, v) = (p.param(&[6]), p.param(&[2, 1]));
            let scaled = p.node("Mul", &[x, &w], vec![]);
            p.node(op, &[&scaled, x, &v], vec![])
        }));
        cases.push(after_mul(&format!("{op} of one"), op, 17, &[6], vec![]));
    }
    for op in ["Max", "Min"] {
        cases.push(case(&format!("{op} with a constant"), 17, &[6], |p, x| {
            let w = p.param(&[6]);
            let bound = p.constant(&[], vec![0.1]);
            let scaled = p.node("Mul", &[x, &w], vec![]);
            p.node(op, &[&scaled, &bound], vec![])
        }));
    }
    for op in ["Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"] {
        cases.push(case(&format!("Where {op}"), 17, &[2, 6], |p, x| {
            let (w, v) = (p.param(&[6]), p.param(&[2, 6]));
            let scaled = p.node("Mul", &[x, &w], vec![]);
            let bound = p.constant(&[], vec![0.05]);
            let condition = p.node(op, &[&scaled, &bound], vec![]);
            let bent = p.node("Tanh", &[&scaled], vec![]);
            p.node("Where", &[&condition, &v, &bent], vec![])
        }));
    }
    for op in ["And", "Or", "Xor"] {
        cases.push(case(&format!("Where {op}"), 17, &[6], |p, x| {
            let w = p.param(&[6]);
            let scaled = p.node("Mul", &[x, &w], vec![]);
            let (low, high) = (p.constant(&[], vec![-0.1]), p.constant(&[], vec![0.2]));
            let above = p.node("Greater", &[&scaled, &low], vec![]);
            let below = p.node("Less", &[x, &high], vec![]);
            let both = p.node(op, &[&above, &below], vec![]);
            let other = p.node("Not", &[&both], vec![]);
            let zero = p.constant(&[1], vec![0.0]);
            p.node("Where", &[&other, &scaled, &zero], vec![])
        }));
    }
    for (op, attributes) in [
        ("IsNaN", vec![]),
        ("IsInf", vec![]),
        ("IsInf", vec![int("detect_negative", 0)]),
        ("IsInf", vec![int("detect_positive", 0)]),
    ] {
        let form = attributes.first().map_or("", |attribute| attribute.name());
        cases.push(case(&format!("Where {op} {form}"), 17, &[4], |p, x| {
            let w = p.param(&[4]);
            // Logarithms of numbers below 0 are no numbers, quotients by 0 are infinite, and 0 by 0 is no number.
            let zero = p.constant(&[1], vec![0.0]);
            let odd = match (op, attributes.is_empty()) {
                ("IsNaN", _) => p.node("Log", &[x], vec![]),
                (_, true) => {
                    let positive = p.node("Relu", &[x], vec![]);
                    p.node("Div", &[&positive, &zero], vec![])
                }
                (_, false) => p.node("Div", &[x, &zero], vec![]),
            };
            let condition = p.node(op, &[&odd], attributes.clone());
            let scaled = p.node("Mul", &[x, &w], vec![]);
            p.node("Where", &[&condition, &zero, &scaled], vec![])
        }));
    }
    cases.push(case("attention mask with infinities", 17, &[3, 4], |p, x| {
        let w = p.param(&[4, 3]);
        let scores = p.node("MatMul", &[x, &w], vec![]);
        let size = p.shape(&[3, 3]);
        let ones = p.node("ConstantOfShape", &[&size], vec![super::ones()]);
        let seen = p.node("Trilu", &[&ones], vec![int("upper", 0)]);
        let zero = p.constant(&[], vec![0.0]);
        let hidden = p.node("Equal", &[&seen, &zero], vec![]);
        let low = p.constant(&[], vec![f32::NEG_INFINITY]);
        let mask = p.node("Where", &[&hidden, &low, &zero], vec![]);
        let masked = p.node("Add", &[&scores, &mask], vec![]);
        p.node("Softmax", &[&masked], vec![])
    }));
    cases.push(case("Trilu of an activation", 17, &[3, 4], |p, x| {
        let w = p.param(&[4]);
        let scaled = p.node("Mul", &[x, &w], vec![]);
        let offset = p.index(1);
        p.node("Trilu", &[&scaled, &offset], vec![])
    }));
    for (exclusive, reverse) in [(0, 0), (1, 0), (0, 1)] {
        cases.push(case(&format!("CumSum {exclusive} {reverse}"), 17, &[3, 4], |p, x| {
            let w = p.param(&[4]);
            let scaled = p.node("Mul", &[x, &w], vec![]);
            let axis = p.index(1);
            let attributes = vec![int("exclusive", exclusive), int("reverse", reverse)];
            p.node("CumSum", &[&scaled, &axis], attributes)
        }));
    }
    cases.push(case("Softmax before 13 over two axes", 11, &[2, 3], |p, x| {
        let w = p.param(&[3]);
        let scaled = p.node("Mul", &[x, &w], vec![]);
        p.node("Softmax", &[&scaled], vec![int("axis", 1)])
    }));
    for (left, right) in [(false, true), (true, false)] {
        cases.push(case(&format!("MatMul with a vector {left}"), 17, &[4, 4], |p, x| {
            let w = p.param(&[4]);
            let sides = if right { [x, w.as_str()] } else { [w.as_str(), x] };
            p.node("MatMul", &sides, vec![])
        }));
    }
    cases
}
