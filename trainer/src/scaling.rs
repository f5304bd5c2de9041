//! Standardized labels: regression on labels of any magnitude.
//!
//! The job trains on labels that are shifted and scaled to mean 0 and deviation 1. The published model undoes that
//! after its output, with constants, so that it gives the numbers of the dataset.
use millrace_bundle::onnx::attribute_proto::AttributeType;
use millrace_bundle::onnx::tensor_proto::DataType;
use millrace_bundle::onnx::{AttributeProto, ModelProto, NodeProto, TensorProto};
use millrace_streams::dataset::OpenDataset;
use millrace_streams::feed::Selection;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::data::Columns;
use crate::error::{Error, Result};
use crate::graph::read_by;
use crate::source;

#[cfg(test)]
mod tests;

/// Mean and deviation of the labels, per output of the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct LabelScale {
    means: Vec<f64>,
    deviations: Vec<f64>,
}

/// Why labels cannot be standardized.
#[derive(Debug, Error)]
#[error(
    "standardize_labels = true: node {node:?} computes on with output {output:?}, and would get the standardized numbers; \
     set standardize_labels = false, or keep that output alone (millrace model edit --cut {output})"
)]
pub(crate) struct Reread {
    node: String,
    output: String,
}

/// Rejects a model of several outputs in which a node reads the one whose numbers [`LabelScale::undo`] changes.
pub(crate) fn check(model: &ModelProto, output: &str) -> Result<(), Reread> {
    let graph = model.graph.as_ref().filter(|graph| graph.output.len() > 1);
    let mut nodes = graph.into_iter().flat_map(|graph| &graph.node);
    match nodes.find(|node| read_by(node).contains(&output)) {
        Some(node) => Err(Reread { node: node.name().to_owned(), output: output.to_owned() }),
        None => Ok(()),
    }
}

impl LabelScale {
    #[cfg(test)]
    pub(crate) fn new(means: Vec<f64>, deviations: Vec<f64>) -> LabelScale {
        LabelScale { means, deviations }
    }

    /// Reads the labels of the selected rows, in the order of the files. Those of several datasets count alike, whatever the
    /// weights of a mixture.
    pub(crate) async fn read(
        datasets: &[OpenDataset],
        selection: Option<&Selection>,
        columns: &Columns,
    ) -> Result<LabelScale> {
        let mut spreads = vec![Spread::default(); columns.output_width];
        let width = columns.output_width.max(1);
        for dataset in datasets {
            source::read_column(dataset, selection, &columns.label, |order, batch| {
                let labels = source::label_values(order, columns, batch)?;
                let wide = columns.wide_label_values(&batch.batch)?;
                for (row, wide) in labels.chunks_exact(width).zip(wide.chunks_exact(width)) {
                    for ((spread, value), wide) in spreads.iter_mut().zip(row).zip(wide) {
                        spread.add(*value, *wide);
                    }
                }
                Ok(())
            })
            .await?;
        }
        if let Some((at, spread)) = spreads.iter().enumerate().find(|(_, spread)| spread.is_lost()) {
            let value = if width == 1 { String::new() } else { format!("value {at} of ") };
            return Err(Error::Data {
                dataset: columns.dataset.clone(),
                reason: format!(
                    "{value}column {:?} has labels with the mean {} and the deviation {}: float32 cannot tell them apart; \
                     subtract a constant from the labels",
                    columns.label,
                    spread.wide.mean,
                    spread.wide.spread()
                ),
            });
        }
        Ok(LabelScale {
            means: spreads.iter().map(|spread| spread.single.mean).collect(),
            deviations: spreads.iter().map(|spread| spread.single.deviation()).collect(),
        })
    }

    /// The deviation of each output's labels.
    pub(crate) fn deviations(&self) -> &[f64] {
        &self.deviations
    }

    /// Standardizes labels, row by row.
    pub(crate) fn apply(&self, labels: &mut [f32]) {
        for row in labels.chunks_exact_mut(self.means.len().max(1)) {
            for ((value, mean), deviation) in row.iter_mut().zip(&self.means).zip(&self.deviations) {
                *value = ((f64::from(*value) - mean) / deviation) as f32;
            }
        }
    }

    /// Makes the model give the numbers of the dataset: its `output` times the deviation, plus the mean. `shape` is
    /// that of an output row.
    pub(crate) fn undo(&self, model: &mut ModelProto, output: &str, shape: &[usize]) {
        let Some(graph) = &mut model.graph else { return };
        // A name that no value of the graph has.
        let taken = |name: &str| {
            let nodes = graph.node.iter().flat_map(|node| node.input.iter().chain(&node.output));
            nodes
                .chain(graph.initializer.iter().filter_map(|tensor| tensor.name.as_ref()))
                .any(|used| used == name)
        };
        let mut stem = format!("{output}.standardized");
        while ["", ".deviation", ".scaled", ".mean"].iter().any(|end| taken(&format!("{stem}{end}"))) {
            stem.push('_');
        }
        for node in &mut graph.node {
            for name in node.input.iter_mut().chain(&mut node.output).filter(|name| **name == output) {
                name.clone_from(&stem);
            }
        }
        let part = |end: &str| format!("{stem}{end}");
        graph.node.extend([
            constant(&part(".deviation"), shape, &self.deviations),
            constant(&part(".mean"), shape, &self.means),
            binary(&part(".Mul"), "Mul", [&stem, &part(".deviation")], &part(".scaled")),
            binary(&part(".Add"), "Add", [&part(".scaled"), &part(".mean")], output),
        ]);
    }
}

fn constant(name: &str, shape: &[usize], values: &[f64]) -> NodeProto {
    let tensor = TensorProto {
        dims: shape.iter().map(|size| *size as i64).collect(),
        data_type: Some(DataType::Float as i32),
        raw_data: Some(values.iter().flat_map(|value| (*value as f32).to_le_bytes()).collect()),
        ..TensorProto::default()
    };
    NodeProto {
        name: Some(name.to_owned()),
        op_type: Some("Constant".to_owned()),
        output: vec![name.to_owned()],
        attribute: vec![AttributeProto {
            name: Some("value".to_owned()),
            r#type: Some(AttributeType::Tensor as i32),
            t: Some(tensor),
            ..AttributeProto::default()
        }],
        ..NodeProto::default()
    }
}

fn binary(name: &str, operator: &str, inputs: [&str; 2], output: &str) -> NodeProto {
    NodeProto {
        name: Some(name.to_owned()),
        op_type: Some(operator.to_owned()),
        input: inputs.map(str::to_owned).to_vec(),
        output: vec![output.to_owned()],
        ..NodeProto::default()
    }
}

/// The most that rounding of float64 makes of equal labels, relative to their mean.
const NOISE: f64 = 1e-14;
/// Most of the deviation that rounding labels to float32 may change.
const ROUNDING_MAX: f64 = 0.1;

/// The moments of labels as float32, with which the job trains, and what rounding took from them.
#[derive(Debug, Clone, Default)]
struct Spread {
    single: Moments,
    wide: Moments,
    /// Sum of the squares of what rounding changed.
    rounding: f64,
}

impl Spread {
    fn add(&mut self, single: f32, wide: f64) {
        self.single.add(f64::from(single));
        self.wide.add(wide);
        self.rounding += (f64::from(single) - wide).powi(2);
    }

    /// Whether labels that differ are nearly alike as float32, as times in seconds are. What the arithmetic of float64 adds
    /// to equal labels is no difference.
    fn is_lost(&self) -> bool {
        let spread = self.wide.spread();
        let rounding = (self.rounding / self.wide.count.max(1.0)).sqrt();
        spread > NOISE * self.wide.mean.abs() && rounding > ROUNDING_MAX * spread
    }
}

/// Running mean and sum of squared distances from it (Welford, 1962).
#[derive(Debug, Clone, Default)]
struct Moments {
    count: f64,
    mean: f64,
    squares: f64,
}

impl Moments {
    fn add(&mut self, value: f64) {
        self.count += 1.0;
        let distance = value - self.mean;
        self.mean += distance / self.count;
        self.squares += distance * (value - self.mean);
    }

    /// The standard deviation.
    fn spread(&self) -> f64 {
        (self.squares / self.count.max(1.0)).sqrt()
    }

    /// The standard deviation; 1 where all values are equal.
    fn deviation(&self) -> f64 {
        let deviation = self.spread();
        if deviation > 0.0 { deviation } else { 1.0 }
    }
}
