//! Records in, predictions out: what `predict` and `quickstart` share as clients of a model server.

use anyhow::Result;
use millrace_serving::client::Client;
use millrace_serving::tensor::{Data, Tensor};
use millrace_serving::wire::Form;
use serde::Serialize;

use crate::failure::{Exit, fail};

/// One record that is to be predicted.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Example {
    /// The features, flat.
    pub(crate) features: Vec<f32>,
    /// The true class, where it is known.
    pub(crate) label: Option<i64>,
}

/// What the model said of one record.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Predicted {
    /// Index of the largest output.
    pub(crate) class: usize,
    /// Its softmax, so the model's own confidence if the outputs are logits.
    pub(crate) confidence: f64,
    /// The true class, where it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) label: Option<i64>,
}

/// Predictions of a model version.
#[derive(Debug, Clone, Default)]
pub(crate) struct Predictions {
    /// The version that answered.
    pub(crate) version: String,
    /// One entry per record, in order.
    pub(crate) rows: Vec<Predicted>,
}

impl Predictions {
    /// Part of the labelled records that were predicted right; None without labels.
    pub(crate) fn accuracy(&self) -> Option<f64> {
        let labelled: Vec<_> = self.rows.iter().filter(|row| row.label.is_some()).collect();
        let right = labelled.iter().filter(|row| row.label == i64::try_from(row.class).ok()).count();
        (!labelled.is_empty()).then(|| right as f64 / labelled.len() as f64)
    }
}

/// Sends `examples` to a model with one input and one class output, in requests of `batch_rows`.
pub(crate) async fn predict(
    client: &mut Client,
    model: &str,
    version: Option<u64>,
    examples: &[Example],
    batch_rows: usize,
    mut progress: impl FnMut(u64),
) -> Result<Predictions> {
    let asked = version.map(|v| v.to_string()).unwrap_or_default();
    let metadata = client.model_metadata(model, &asked).await?;
    let [input] = &metadata.inputs[..] else {
        return fail(
            Exit::Usage,
            format!("model {model} has {} inputs, predict feeds models with one", metadata.inputs.len()),
        );
    };
    if input.datatype != "FP32" {
        return fail(
            Exit::Usage,
            format!("input {} of model {model} takes {}, predict sends FP32", input.name, input.datatype),
        );
    }
    let mut predictions = Predictions::default();
    for (index, batch) in examples.chunks(batch_rows.max(1)).enumerate() {
        let width = batch[0].features.len();
        if let Some(at) = batch.iter().position(|example| example.features.len() != width) {
            return fail(
                Exit::Usage,
                format!(
                    "record {} has {} values, the one before it {width}",
                    index * batch_rows + at + 1,
                    batch[at].features.len()
                ),
            );
        }
        let values: Vec<f32> = batch.iter().flat_map(|example| example.features.iter().copied()).collect();
        let shape = shape(&input.shape, batch.len(), width);
        let tensor = Tensor::fp32(&input.name, shape, values)?;
        let answer = client.infer(model, version, vec![tensor], Form::Raw).await?;
        let Some(Tensor { data: Data::Fp32(outputs), .. }) = answer.outputs.first() else {
            return fail(Exit::Usage, format!("model {model} does not answer with FP32 classes"));
        };
        let classes = outputs.len() / batch.len();
        if classes == 0 || outputs.len() % batch.len() != 0 {
            return fail(
                Exit::Failed,
                format!("model {model} gave {} values for {} records", outputs.len(), batch.len()),
            );
        }
        for (example, scores) in batch.iter().zip(outputs.chunks(classes)) {
            predictions.rows.push(best(scores, example.label));
        }
        predictions.version = answer.version;
        progress(batch.len() as u64);
    }
    Ok(predictions)
}

/// The model's own shape where it fits the values, with the batch as its first dimension.
fn shape(model: &[i64], rows: usize, width: usize) -> Vec<i64> {
    let fixed = model.iter().skip(1).try_fold(1_i64, |product, d| product.checked_mul(*d));
    let mut shape = vec![rows as i64];
    match fixed {
        Some(fixed) if fixed == width as i64 && !model.is_empty() => shape.extend(&model[1..]),
        _ => shape.push(width as i64),
    }
    shape
}

fn best(scores: &[f32], label: Option<i64>) -> Predicted {
    let (class, top) = scores
        .iter()
        .enumerate()
        .fold((0, f32::NEG_INFINITY), |best, (i, s)| if *s > best.1 { (i, *s) } else { best });
    let total: f64 = scores.iter().map(|s| f64::from(s - top).exp()).sum();
    Predicted { class, confidence: 1.0 / total, label }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_best_class_has_the_softmax_of_its_score() {
        let predicted = best(&[0.0, 2.0_f32.ln(), 0.0], Some(1));
        assert_eq!(predicted.class, 1);
        assert!((predicted.confidence - 0.5).abs() < 1e-6);
    }

    #[test]
    fn shapes_follow_the_model_where_the_values_fit() {
        assert_eq!(shape(&[-1, 64], 3, 64), [3, 64]);
        assert_eq!(shape(&[-1, 1, 8, 8], 3, 64), [3, 1, 8, 8]);
        assert_eq!(shape(&[-1, 64], 3, 63), [3, 63]);
    }

    #[test]
    fn accuracy_counts_labelled_records_only() {
        let row = |class, label| Predicted { class, confidence: 1.0, label };
        let predictions =
            Predictions { version: "1".into(), rows: vec![row(1, Some(1)), row(2, Some(1)), row(3, None)] };
        assert_eq!(predictions.accuracy(), Some(0.5));
        assert_eq!(Predictions::default().accuracy(), None);
    }
}
