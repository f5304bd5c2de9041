//! The handwritten digits under `examples/digits`, as batches.

use crate::engine::{Labels, ShardBatch};

/// All rows of `digits.jsonl` (1,437 to train on) or `digits-test.jsonl` (360 held out).
pub(crate) fn load(file: &str) -> ShardBatch {
    let path = format!("{}/../examples/digits/{file}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let (mut inputs, mut labels) = (Vec::new(), Vec::new());
    for line in text.lines() {
        let record: serde_json::Value = serde_json::from_str(line).unwrap();
        let pixels = record["pixels"].as_array().unwrap();
        inputs.extend(pixels.iter().map(|p| p.as_f64().unwrap() as f32));
        labels.push(record["label"].as_i64().unwrap());
    }
    ShardBatch { rows: labels.len(), inputs, labels: Labels::Class(labels) }
}

/// The rows of `data` named by `rows`, in that order.
pub(crate) fn select(data: &ShardBatch, rows: &[usize]) -> ShardBatch {
    let width = data.inputs.len() / data.rows;
    let Labels::Class(labels) = &data.labels else { panic!("the digits have classes") };
    ShardBatch {
        rows: rows.len(),
        inputs: rows
            .iter()
            .flat_map(|row| data.inputs[row * width..(row + 1) * width].iter().copied())
            .collect(),
        labels: Labels::Class(rows.iter().map(|row| labels[*row]).collect()),
    }
}
