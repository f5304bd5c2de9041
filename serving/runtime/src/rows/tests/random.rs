//! Random test of the row proof: for accepted graphs, ONNX Runtime must give rows together the results of rows alone.

use millrace_bundle::onnx::ModelProto;
use millrace_bundle::onnx::tensor_proto::DataType;
use ort::session::Session;
use ort::value::Tensor;
use prost::Message;

use super::support::{Build, info, int, ints, text};
use crate::runtime::Runtime;

/// Number of random graphs.
const GRAPHS: u64 = 3000;
/// Minimum number of graphs that the proof must accept and ONNX Runtime must run.
const COMPARED_MIN: usize = 150;
/// Allowed difference of numbers, relative to the largest of their row.
const TOLERANCE: f32 = 1e-4;
/// Numbers of rows of the requests that run together, and the magnitudes of their elements.
const REQUESTS: [(usize, f32); 3] = [(1, 1e-3), (2, 1e4), (1, 1.0)];

/// A pseudorandom generator, reproducible by its seed, with Knuth's constants.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    fn axis(&mut self) -> i64 {
        self.of(&[0, 1, 1, 2, 2, -1, -1, -2])
    }
}

/// Adds a random node that takes an earlier value and, if needed, further random inputs.
fn grow(g: &mut Build, draw: &mut Draw, known: &[String]) -> String {
    let v = known[known.len() - 1 - draw.below(known.len().min(2))].clone();
    let w = known[draw.below(known.len())].clone();
    let axis = draw.axis();
    match draw.below(34) {
        0 => g.node(draw.of(&["Relu", "Tanh", "Sigmoid", "Neg", "Abs"]), &[&v], vec![]),
        1 => g.node(draw.of(&["Add", "Mul", "Sub", "Max"]), &[&v, &w], vec![]),
        2 => {
            let dims: &[i64] = draw.of(&[
                &[][..],
                &[1],
                &[4],
                &[3, 4],
                &[3, 1],
                &[1, 3, 4],
                &[2, 3, 4],
                &[2, 4],
                &[2, 1, 1],
            ]);
            let c = g.floats(dims);
            g.node(draw.of(&["Add", "Mul", "Max"]), &[&v, &c], vec![])
        }
        3 => {
            let dims: &[i64] =
                draw.of(&[&[4, 2][..], &[4, 4], &[3, 3], &[1, 4, 4], &[2, 4, 4], &[12, 5], &[4]]);
            let c = g.floats(dims);
            if draw.below(3) > 0 {
                g.node("MatMul", &[&v, &c], vec![])
            } else {
                g.node("MatMul", &[&c, &v], vec![])
            }
        }
        4 => g.node("MatMul", &[&v, &w], vec![]),
        5 => {
            let turned = g.node(
                "Transpose",
                &[&v],
                vec![ints("perm", draw.of(&[&[0, 2, 1][..], &[1, 2, 0], &[1, 0]]))],
            );
            g.node("MatMul", &[&v, &turned], vec![])
        }
        6 => {
            let dims: &[i64] = draw.of(&[&[4, 3][..], &[12, 3], &[2, 3]]);
            let (c, d) = (g.floats(dims), g.floats(draw.of(&[&[3][..], &[1, 3], &[2, 3], &[]])));
            g.node("Gemm", &[&v, &c, &d], vec![int("transA", i64::from(draw.below(4) == 0))])
        }
        7 => g.node(draw.of(&["Softmax", "LogSoftmax"]), &[&v], vec![int("axis", axis)]),
        8 => {
            let axes = g.list(&[axis]);
            g.node("ReduceSum", &[&v, &axes], vec![int("keepdims", draw.below(2) as i64)])
        }
        9 => {
            let operator = draw.of(&["ReduceMax", "ReduceMean", "ReduceMin", "ReduceL2"]);
            g.node(operator, &[&v], vec![ints("axes", &[axis]), int("keepdims", draw.below(2) as i64)])
        }
        10 => {
            let place = g.node(draw.of(&["ArgMax", "ArgMin"]), &[&v], vec![int("axis", axis)]);
            g.node("Cast", &[&place], vec![int("to", 1)])
        }
        11 | 12 => {
            let orders: &[&[i64]] =
                &[&[1, 0, 2], &[0, 2, 1], &[2, 1, 0], &[1, 0], &[0, 1], &[0, 2, 1, 3], &[1, 2, 0]];
            g.node("Transpose", &[&v], vec![ints("perm", draw.of(orders))])
        }
        13..=15 => {
            let shapes: &[&[i64]] = &[
                &[-1, 12],
                &[0, -1],
                &[0, 0, -1],
                &[-1, 4],
                &[-1, 3, 4],
                &[3, -1, 4],
                &[1, -1],
                &[-1],
                &[12, -1],
                &[0, 2, 2, -1],
                &[3, -1],
                &[-1, 2],
                &[0, 4, 3],
                &[0, 3, 2, 2],
                &[-1, 6],
                &[4, -1],
            ];
            let shape = g.list(draw.of(shapes));
            g.node("Reshape", &[&v, &shape], vec![])
        }
        16 => {
            let from = draw.of(&["x", v.as_str()]);
            let (shape, place) = (g.node("Shape", &[from], vec![]), g.list(&[draw.of(&[0, 0, 1])]));
            let rows = g.node("Gather", &[&shape, &place], vec![]);
            let rest = g.list(draw.of(&[&[-1][..], &[12], &[3, 4], &[4, 3], &[2, 6]]));
            let parts = if draw.below(4) > 0 { [&rows, &rest] } else { [&rest, &rows] };
            let shape = g.node("Concat", &parts.map(String::as_str), vec![int("axis", 0)]);
            g.node("Reshape", &[&v, &shape], vec![])
        }
        17 => g.node("Flatten", &[&v], vec![int("axis", draw.of(&[0, 1, 1, 2]))]),
        18 => {
            let axes = g.list(&[draw.of(&[0, 1, 2, -1])]);
            g.node("Unsqueeze", &[&v, &axes], vec![])
        }
        19 => {
            let axes = g.list(&[axis]);
            if draw.below(3) > 0 {
                g.node("Squeeze", &[&v, &axes], vec![])
            } else {
                g.node("Squeeze", &[&v], vec![])
            }
        }
        20 => g.node("Concat", &[&v, &w], vec![int("axis", axis)]),
        21 => {
            let bounds = draw.of(&[[0, 1], [1, i64::MAX], [0, i64::MAX], [-2, i64::MAX], [0, -1]]);
            let [start, end] = bounds.map(|bound| g.list(&[bound]));
            let axes = g.list(&[axis]);
            g.node("Slice", &[&v, &start, &end, &axes], vec![])
        }
        22 => {
            let place = if draw.below(2) == 0 { g.number(0) } else { g.list(&[1, 0]) };
            g.node("Gather", &[&v, &place], vec![int("axis", axis)])
        }
        23 => {
            let (shape, place) = (g.node("Shape", &["x"], vec![]), g.list(&[0]));
            let rows = g.node("Gather", &[&shape, &place], vec![]);
            let rest = g.list(draw.of(&[&[4][..], &[1, 4], &[3, 4], &[1]]));
            let shape = g.node("Concat", &[&rows, &rest], vec![int("axis", 0)]);
            let c = if draw.below(2) == 0 { g.floats(draw.of(&[&[1, 4][..], &[4], &[1, 1, 4]])) } else { v };
            g.node(draw.of(&["Expand", "Tile"]), &[&c, &shape], vec![])
        }
        24 => {
            let axis = g.number(axis);
            g.node("CumSum", &[&v, &axis], vec![])
        }
        25 => {
            let count = g.list(&[draw.of(&[1, 2])]);
            let both = g.nodes("TopK", &[&v, &count], vec![int("axis", axis)], 2);
            both[0].clone()
        }
        26 => g.nodes("Split", &[&v], vec![int("axis", axis)], draw.of(&[1, 2, 3])).remove(0),
        27 => {
            let scale = g.floats(draw.of(&[&[4][..], &[3, 4], &[1], &[2, 3, 4]]));
            g.node("LayerNormalization", &[&v, &scale], vec![int("axis", axis)])
        }
        28 => {
            let w = g.floats(&[2, 3, 2]);
            g.node("Conv", &[&v, &w], vec![])
        }
        29 => {
            let equation = draw.of(&[
                "bij,bkj->bik",
                "bij,cij->bc",
                "bij,bij->ij",
                "ij,ij->i",
                "ij,kj->ik",
                "bij,bij->b",
            ]);
            g.node("Einsum", &[&v, &w], vec![text("equation", equation)])
        }
        30 => {
            let (bound, yes) = (g.floats(&[]), v.clone());
            let larger = g.node("Greater", &[&yes, &bound], vec![]);
            g.node("Where", &[&larger, &v, &w], vec![])
        }
        31 => {
            let q = g.nodes("DynamicQuantizeLinear", &[&v], vec![], 3);
            g.node("DequantizeLinear", &[&q[0], &q[1], &q[2]], vec![])
        }
        32 => {
            let dims: &[i64] = draw.of(&[&[][..], &[4], &[3]]);
            let scale = g.constant(dims, vec![0.05; dims.iter().product::<i64>() as usize]);
            let zero = g.bytes(DataType::Uint8, dims, 100);
            let q = g.node("QuantizeLinear", &[&v, &scale, &zero], vec![int("axis", axis)]);
            g.node("DequantizeLinear", &[&q, &scale, &zero], vec![int("axis", axis)])
        }
        _ => {
            let place = g.node("ArgMax", &[&v], vec![int("axis", axis)]);
            g.node("GatherElements", &[&v, &place], vec![int("axis", draw.axis())])
        }
    }
}

/// The shape and the elements of a response.
fn run(session: &mut Session, rows: usize, elements: Vec<f32>) -> Option<(Vec<i64>, Vec<f32>)> {
    let input = Tensor::from_array((vec![rows, 3, 4], elements)).unwrap();
    let outputs = session.run(ort::inputs![input]).ok()?;
    let (shape, elements) = outputs[0].try_extract_tensor::<f32>().ok()?;
    Some((shape.to_vec(), elements.to_vec()))
}

fn session(model: &ModelProto) -> Option<Session> {
    let environment = Runtime::load().unwrap().environment();
    let builder = Session::builder(environment).unwrap().with_intra_threads(1).unwrap();
    builder
        .with_log_level(ort::logging::LogLevel::Fatal)
        .unwrap()
        .commit_from_memory(&model.encode_to_vec())
        .ok()
}

#[test]
fn accepted_graphs_give_each_row_of_a_batch_its_single_result() {
    let (mut compared, mut accepted) = (0, 0);
    for seed in 0..GRAPHS {
        let mut draw = Draw(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let mut g = Build::new(17, &[3, 4]);
        let mut known = vec!["x".to_owned()];
        for _ in 0..1 + draw.below(5) {
            let made = grow(&mut g, &mut draw, &known);
            known.push(made);
        }
        let output = known[known.len() - 1].clone();
        if g.prove(&output).is_err() {
            continue;
        }
        accepted += 1;
        g.graph().output = vec![info(&output, DataType::Float, None)];
        let Some(mut session) = session(&g.model) else { continue };
        let mut elements = |rows: usize, magnitude: f32| -> Vec<f32> {
            (0..rows * 12)
                .map(|_| (draw.below(1 << 20) as f32 / (1 << 19) as f32 - 1.0) * magnitude)
                .collect()
        };
        let requests = REQUESTS.map(|(rows, magnitude)| (rows, elements(rows, magnitude)));
        let alone: Option<Vec<_>> =
            requests.iter().map(|(rows, elements)| run(&mut session, *rows, elements.clone())).collect();
        let Some(alone) = alone else { continue };
        let all = requests.iter().flat_map(|(_, elements)| elements.clone()).collect();
        let total = requests.iter().map(|(rows, _)| rows).sum();
        // The scheduler repeats a failed batch request by request, so there is nothing to compare.
        let Some((shape, together)) = run(&mut session, total, all) else { continue };
        compared += 1;
        let shown = || format!("seed {seed}: {:#?}", g.model.graph.as_ref().map(|graph| &graph.node));
        assert_eq!(shape[0], total as i64, "{}", shown());
        let mut rest = together.as_slice();
        for ((rows, _), (own_shape, own)) in requests.iter().zip(&alone) {
            assert_eq!((own_shape[0], &own_shape[1..]), (*rows as i64, &shape[1..]), "{}", shown());
            let (part, others) = rest.split_at(own.len());
            rest = others;
            let largest = own
                .iter()
                .filter(|value| value.is_finite())
                .fold(0.0f32, |most, value| most.max(value.abs()));
            for (a, b) in own.iter().zip(part) {
                let same = a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= TOLERANCE * largest;
                assert!(same, "{a} alone and {b} together, {}", shown());
            }
        }
    }
    assert!(compared >= COMPARED_MIN, "{compared} of {accepted} accepted graphs were compared");
}
