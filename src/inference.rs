//! Prediction client: converts records to requests and collects answers, for `predict` and `quickstart`.

use std::collections::BTreeMap;
use std::pin::pin;

use anyhow::{Context as _, Result};
use futures::{Stream, StreamExt, stream};
use millrace_bundle::{Signature, TensorSpec};
use millrace_serving::InferError;
use millrace_serving::client::{Client, ClientError, Prediction};
use millrace_serving::record::{self, Mapping, Row, row_outputs};
use millrace_serving::rows;
use millrace_serving::tensor::{Data, Tensor};
use millrace_serving::wire::Form;
use millrace_serving::wire::inference::ModelConfig;
use serde_json::{Map, Value};

use crate::context::Context;
use crate::failure::{Exit, fail};

/// Most bytes of a request's inputs, as far as their size is known: a usual limit of servers.
const REQUEST_BYTES_MAX: usize = 16 << 20;

/// The model server's address: named by the command, of this home's server, or from the configuration.
pub(crate) fn server(context: &Context, named: Option<&str>) -> String {
    let settings = &context.loaded.settings;
    let running = || context.home.running().and_then(|running| running.grpc);
    named
        .map(str::to_owned)
        .or_else(|| running().map(|address| address.to_string()))
        .or_else(|| settings.cluster.server.clone())
        .unwrap_or_else(|| settings.serving.grpc.to_string())
}

/// A record's properties besides its inputs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RecordInfo {
    /// The true class.
    pub(crate) label: Option<i64>,
    /// The file, if the record is a whole file.
    pub(crate) file: Option<String>,
}

/// Records of one request, or records that wait for one.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Batch {
    /// Number of the batch's first record among all records, from 1.
    first: u64,
    rows: Vec<Row>,
    known: Vec<RecordInfo>,
}

impl Batch {
    /// An empty batch that begins with the first record.
    pub(crate) fn new() -> Batch {
        Batch { first: 1, rows: Vec::new(), known: Vec::new() }
    }

    /// Adds a record.
    pub(crate) fn push(&mut self, row: Row, known: RecordInfo) {
        self.rows.push(row);
        self.known.push(known);
    }

    /// The number of records.
    pub(crate) fn records(&self) -> u64 {
        self.rows.len() as u64
    }

    /// Removes and returns the first `count` records.
    fn take(&mut self, count: usize) -> Batch {
        let rest = Batch {
            first: self.first + count as u64,
            rows: self.rows.split_off(count),
            known: self.known.split_off(count),
        };
        std::mem::replace(self, rest)
    }
}

/// The model's answer to a batch.
#[derive(Debug)]
pub(crate) struct Answer {
    /// The properties of each record.
    pub(crate) known: Vec<RecordInfo>,
    /// The version that answered, and its outputs.
    pub(crate) prediction: Prediction,
}

impl Answer {
    /// A record's predicted class: the largest element of its first output of scores.
    pub(crate) fn class(&self, argmax: &BTreeMap<String, usize>) -> Option<usize> {
        self.prediction.outputs.iter().find_map(|output| argmax.get(&output.name)).copied()
    }
}

/// The conversion of records to model inputs: the field of each input, and the rows per run.
#[derive(Debug, Clone)]
pub(crate) struct Intake {
    mapping: Mapping,
    rows_max: usize,
}

impl Intake {
    /// An intake for a signature. `fields` holds `INPUT=FIELD`, or `FIELD` for a model with one input. An
    /// input that is not named takes the fields of its training, as `trained` has them, or the field of its name.
    pub(crate) fn new(
        signature: &Signature,
        fields: &[String],
        trained: &BTreeMap<String, Vec<String>>,
        rows_max: usize,
    ) -> Result<Intake> {
        let mapping = Mapping::of_trained(signature, &columns(signature, fields)?, trained)?;
        Ok(Intake { mapping, rows_max: rows_within(signature, rows_max) })
    }

    /// The model's inputs, each with the fields that feed it.
    pub(crate) fn inputs(&self) -> impl Iterator<Item = (&TensorSpec, &[String])> {
        self.mapping.inputs()
    }

    /// The inputs of one record.
    pub(crate) fn row(&self, record: &Map<String, Value>) -> Result<Row, InferError> {
        self.mapping.row(record)
    }

    /// Converts inputs that were read elsewhere: shape without the batch dimension, and elements.
    pub(crate) fn row_of(&self, inputs: Vec<(Vec<i64>, Data)>) -> Result<Row, InferError> {
        self.mapping.row_of(inputs)
    }

    /// Removes and returns the complete batches: rows of one shape, within the size limit. With `all`, also
    /// the incomplete rest.
    pub(crate) fn batches(&self, pending: &mut Batch, all: bool) -> Vec<Batch> {
        let mut batches = Vec::new();
        while let Some(first) = pending.rows.first() {
            // The signature may leave the row size open; rows of one shape are as large as the first.
            let rows_max = self.rows_max.min(REQUEST_BYTES_MAX / first.bytes().max(1)).max(1);
            if !all && pending.rows.len() < rows_max {
                break;
            }
            batches.push(pending.take(self.mapping.fitting(&pending.rows, rows_max).max(1)));
        }
        batches
    }

    /// A batch as the inputs of one run, in the signature's order.
    pub(crate) fn tensors(&self, batch: &Batch) -> Result<Vec<Tensor>, InferError> {
        self.mapping.batch(&batch.rows)
    }
}

/// A model of a server, with the conversion of records to its inputs.
#[derive(Debug, Clone)]
pub(crate) struct Predictor {
    client: Client,
    model: String,
    version: Option<u64>,
    intake: Intake,
}

impl Predictor {
    /// Requests the model's signature from the server. `fields` holds `INPUT=FIELD`, or `FIELD` for a model
    /// with one input. An input that is not named takes the fields of its training, if the server tells them, or the
    /// field of its name.
    pub(crate) async fn new(
        mut client: Client,
        model: &str,
        version: Option<u64>,
        fields: &[String],
        rows_max: usize,
    ) -> Result<Predictor> {
        let asked = version.map(|version| version.to_string()).unwrap_or_default();
        let signature = client.signature(model, &asked).await?;
        let config = match client.model_config(model, &asked).await {
            Ok(config) => Some(config),
            // Not every server of the protocol has Triton's calls.
            Err(ClientError::Refused { code: tonic::Code::Unimplemented, .. }) => None,
            Err(error) => return Err(error.into()),
        };
        let batch_max = match &config {
            // Rows that depend on each other are sent one by one, whatever the batch limit.
            Some(config) if depend(config) => 1,
            Some(config) => usize::try_from(config.max_batch_size).unwrap_or(0).max(1),
            None => usize::MAX,
        };
        let trained = config.as_ref().map(trained).unwrap_or_default();
        let intake = Intake::new(&signature, fields, &trained, rows_max.min(batch_max))?;
        Ok(Predictor { client, model: model.to_owned(), version, intake })
    }

    /// The conversion of records to the model's inputs.
    pub(crate) fn intake(&self) -> &Intake {
        &self.intake
    }

    /// Sends batches, `in_flight` at a time, and returns the answers in order.
    pub(crate) fn answers(
        self,
        batches: impl Stream<Item = Result<Batch>>,
        in_flight: usize,
    ) -> impl Stream<Item = Result<Answer>> {
        batches.map(move |batch| self.clone().answer(batch)).buffered(in_flight.max(1))
    }

    /// Predicts the classes of records whose true classes are known.
    pub(crate) async fn classify<'a>(
        self,
        records: impl Iterator<Item = (&'a Map<String, Value>, i64)>,
    ) -> Result<Classes> {
        let mut pending = Batch::new();
        for (record, label) in records {
            pending.push(self.intake.row(record)?, RecordInfo { label: Some(label), file: None });
        }
        let batches = stream::iter(self.intake.batches(&mut pending, true)).map(Ok);
        let mut given = Classes::default();
        let mut answers = pin!(self.answers(batches, 1));
        while let Some(answer) = answers.next().await.transpose()? {
            let rows = answer.known.len();
            for (row, known) in answer.known.iter().enumerate() {
                let class = answer.class(&row_outputs(&answer.prediction.outputs, row, rows)?.argmax);
                given.accuracy.count(class, known.label);
                given.classes.push(class);
            }
            given.version = answer.prediction.version;
        }
        Ok(given)
    }

    async fn answer(mut self, batch: Result<Batch>) -> Result<Answer> {
        let batch = batch?;
        let inputs = self.intake.tensors(&batch)?;
        let Batch { first, rows, known } = batch;
        let asked = self.client.infer(&self.model, self.version, inputs, Form::Raw).await;
        let prediction = asked.with_context(|| match rows.len() {
            1 => known[0].file.clone().unwrap_or_else(|| format!("record {first}")),
            more => format!("records {first} to {}", first + more as u64 - 1),
        })?;
        Ok(Answer { known, prediction })
    }
}

/// Whether a server says that the rows of a request depend on each other. Other servers do not state it.
fn depend(config: &ModelConfig) -> bool {
    let said = config.parameters.get(rows::PARAMETER);
    said.is_some_and(|parameter| parameter.string_value.starts_with(rows::DEPENDENT))
}

/// The fields that fed each input in the training, if the server tells them.
fn trained(config: &ModelConfig) -> BTreeMap<String, Vec<String>> {
    let said = config.parameters.get(record::PARAMETER);
    said.and_then(|said| serde_json::from_str(&said.string_value).ok()).unwrap_or_default()
}

/// The field of each named input.
fn columns(signature: &Signature, fields: &[String]) -> Result<BTreeMap<String, String>> {
    let mut columns = BTreeMap::new();
    for text in fields {
        let names: Vec<&str> = signature.inputs.iter().map(|spec| spec.name.as_str()).collect();
        let (input, field) = match (text.split_once('='), names.as_slice()) {
            (Some((input, field)), _) if names.contains(&input) => (input, field),
            (_, [only]) => (*only, text.as_str()),
            _ => {
                let message = format!(
                    "--input {text}: the model has the inputs {}; write INPUT=FIELD",
                    names.join(", ")
                );
                return fail(Exit::Usage, message);
            }
        };
        if columns.insert(input.to_owned(), field.to_owned()).is_some() {
            return fail(Exit::Usage, format!("--input names input {input} twice"));
        }
    }
    Ok(columns)
}

/// Rows of a request or a run: `rows_max`, or fewer to stay within the byte limit, as far as the row size is
/// known.
pub(crate) fn rows_within(signature: &Signature, rows_max: usize) -> usize {
    let bytes: usize = signature.inputs.iter().map(row_bytes).fold(0, usize::saturating_add);
    rows_max.min(REQUEST_BYTES_MAX / bytes.max(1)).max(1)
}

/// Bytes of one row of an input; open dimensions count as 1.
fn row_bytes(spec: &TensorSpec) -> usize {
    let extents = spec.shape.iter().skip(1).map(|extent| usize::try_from(*extent).unwrap_or(1));
    extents.fold(spec.datatype.element_bytes().unwrap_or(1), usize::saturating_mul)
}

/// The predicted classes of records, in their order.
#[derive(Debug, Default)]
pub(crate) struct Classes {
    /// The version that answered.
    pub(crate) version: String,
    /// The class of each record; None if the model gives none.
    pub(crate) classes: Vec<Option<usize>>,
    /// The share of correct classes.
    pub(crate) accuracy: Accuracy,
}

/// Share of the labeled records that were predicted correctly.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Accuracy {
    labelled: u64,
    right: u64,
}

impl Accuracy {
    /// Counts a record, unless it has no label.
    pub(crate) fn count(&mut self, class: Option<usize>, label: Option<i64>) {
        let Some(label) = label else { return };
        self.labelled += 1;
        self.right += u64::from(class.and_then(|class| i64::try_from(class).ok()) == Some(label));
    }

    /// From 0 to 1; None without labels.
    pub(crate) fn value(self) -> Option<f64> {
        (self.labelled > 0).then(|| self.right as f64 / self.labelled as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use millrace_bundle::Datatype;

    fn signature(names: &[&str]) -> Signature {
        let spec =
            |name: &&str| TensorSpec { name: (*name).into(), datatype: Datatype::Fp32, shape: vec![-1, 2] };
        Signature { inputs: names.iter().map(spec).collect(), outputs: Vec::new() }
    }

    #[test]
    fn fields_are_named_for_inputs() {
        let map = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            pairs.iter().map(|(input, field)| ((*input).to_owned(), (*field).to_owned())).collect()
        };
        let (one, two) = (signature(&["a"]), signature(&["a", "b"]));
        assert_eq!(columns(&one, &[]).unwrap(), map(&[]));
        assert_eq!(columns(&one, &["pixels".into()]).unwrap(), map(&[("a", "pixels")]));
        assert_eq!(columns(&one, &["x=y".into()]).unwrap(), map(&[("a", "x=y")]));
        assert_eq!(columns(&two, &["b=x".into(), "a=y=z".into()]).unwrap(), map(&[("a", "y=z"), ("b", "x")]));
        let refused = columns(&two, &["pixels".into()]).unwrap_err().to_string();
        assert!(refused.contains("a, b") && refused.contains("INPUT=FIELD"), "{refused}");
        assert!(columns(&two, &["a=x".into(), "a=y".into()]).unwrap_err().to_string().contains("twice"));
    }

    #[test]
    fn the_size_of_a_row_does_not_overflow() {
        let spec =
            |shape: &[i64]| TensorSpec { name: "a".into(), datatype: Datatype::Fp64, shape: shape.into() };
        assert_eq!(row_bytes(&spec(&[-1, 3, 4])), 96);
        assert_eq!(row_bytes(&spec(&[-1, -1, 4])), 32);
        assert_eq!(row_bytes(&spec(&[-1, i64::MAX, i64::MAX])), usize::MAX);
    }

    #[test]
    fn accuracy_counts_labelled_records_only() {
        let mut accuracy = Accuracy::default();
        assert_eq!(accuracy.value(), None);
        for (class, label) in [(Some(1), Some(1)), (Some(2), Some(1)), (Some(3), None)] {
            accuracy.count(class, label);
        }
        assert_eq!(accuracy.value(), Some(0.5));
        accuracy.count(None, Some(-1));
        accuracy.count(Some(4), Some(4));
        assert_eq!(accuracy.value(), Some(0.5));
    }
}
