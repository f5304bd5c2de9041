//! The inputs of a model: which columns feed each of them, and the assembly of a row of the batch.
//!
//! A row has the values of all inputs, in the model's order. Several columns of one input stand one after another in its
//! last dimension: of an input `[rows, 60, 3]`, three columns of 60 values each become the three channels.
use std::collections::BTreeMap;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::datatypes::{DataType, Schema};

use super::{Columns, element, is_number};
use crate::error::{Error, Result};
use crate::graph::{Graph, Input};
use crate::job::{Features, JobFile};

/// The columns of one input.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct InputColumns {
    /// The model's input; `None` if it is the only one.
    pub(crate) input: Option<String>,
    /// In the order of their values.
    pub(crate) columns: Vec<String>,
    /// Values per row.
    pub(crate) width: usize,
    /// Its last dimension: values that stand together.
    pub(crate) last: usize,
    /// For whole numbers and truth values, the number that each value of a row stays below.
    pub(crate) below: Option<Vec<u32>>,
    /// Whether columns of floats are refused for whole numbers, whatever their values.
    pub(crate) is_strict: bool,
}

impl InputColumns {
    /// The columns of each input of a model, in its order.
    pub(crate) fn of(job: &JobFile, graph: &Graph) -> Result<Vec<InputColumns>> {
        let inputs = graph.inputs();
        let unfit = |reason: String| Error::Job { job: job.name.to_string(), reason };
        let listed = || {
            let each = inputs.iter().map(|input| format!("{:?} ({})", input.name, input.form));
            each.collect::<Vec<_>>().join(", ")
        };
        if job.inputs.is_empty() {
            let [only] = inputs else {
                let table = inputs.iter().map(|input| format!("{} = \"COLUMN\"", key(&input.name)));
                return Err(unfit(format!(
                    "features: the model has several inputs, {}: name the column of each, inputs = {{ {} }}",
                    listed(),
                    table.collect::<Vec<_>>().join(", ")
                )));
            };
            return Ok(vec![InputColumns::new(graph, only, &job.features, None)]);
        }
        if let Some(unknown) = job.inputs.keys().find(|name| inputs.iter().all(|input| input.name != **name))
        {
            return Err(unfit(format!(
                "inputs.{unknown}: the model has no input {unknown:?}; its inputs are {}",
                listed()
            )));
        }
        let columns = |input: &Input| {
            let columns = job.inputs.get(&input.name).ok_or_else(|| {
                unfit(format!(
                    "inputs has no columns of the model's input {:?}; its inputs are {}: add {} = \"COLUMN\"",
                    input.name,
                    listed(),
                    key(&input.name)
                ))
            })?;
            let name = (inputs.len() > 1).then(|| input.name.clone());
            Ok(InputColumns::new(graph, input, columns, name))
        };
        inputs.iter().map(columns).collect()
    }

    /// The columns of each input for the bundle; none for a job of one column in `features`.
    pub(crate) fn fields(job: &JobFile, graph: &Graph) -> BTreeMap<String, Vec<String>> {
        let only = graph.inputs().first().filter(|_| job.features.names().len() > 1);
        let features = only.map(|input| (input.name.clone(), job.features.names().to_vec()));
        let inputs = job.inputs.iter().map(|(input, columns)| (input.clone(), columns.names().to_vec()));
        features.into_iter().chain(inputs).collect()
    }

    fn new(graph: &Graph, input: &Input, columns: &Features, name: Option<String>) -> InputColumns {
        InputColumns {
            // Whole numbers in one column of floats were accepted before there could be several.
            is_strict: name.is_some() || columns.names().len() > 1,
            input: name,
            columns: columns.names().to_vec(),
            width: input.range.len(),
            last: graph.row_of(input).last().copied().unwrap_or(1),
            below: input.below.clone(),
        }
    }

    /// The columns whose values the schema does not count, if that must be known.
    pub(crate) fn open<'s>(&'s self, schema: &'s Schema) -> impl Iterator<Item = &'s str> {
        let is_open = |name: &&String| {
            schema.field_with_name(name).is_ok_and(|field| element(field.data_type()).1.is_none())
        };
        self.columns.iter().filter(|_| self.columns.len() > 1).filter(is_open).map(String::as_str)
    }

    fn takes(&self) -> String {
        match &self.input {
            Some(name) => format!("input {name:?} of the model takes"),
            None => "the model takes".to_owned(),
        }
    }

    /// Groups of values that stand together.
    fn groups(&self) -> usize {
        self.width / self.last.max(1)
    }
}

/// A key of a table in TOML.
fn key(name: &str) -> String {
    let is_bare = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    match !name.is_empty() && name.bytes().all(is_bare) {
        true => name.to_owned(),
        false => format!("{name:?}"),
    }
}

/// Elements of the list in a row; `None` without a list.
pub(crate) fn list_length(column: &ArrayRef, row: usize) -> Option<usize> {
    let length = match column.data_type() {
        _ if column.is_null(row) => None,
        DataType::List(_) => Some(i64::from(column.as_list::<i32>().value_length(row))),
        DataType::LargeList(_) => Some(column.as_list::<i64>().value_length(row)),
        _ => None,
    };
    length.and_then(|length| usize::try_from(length).ok())
}

impl Columns {
    /// Values per row of all inputs.
    pub(crate) fn input_width(&self) -> usize {
        self.inputs.iter().map(|input| input.width).sum()
    }

    /// Names of the columns of the inputs, each once.
    pub(crate) fn feature_names(&self) -> String {
        let mut names: Vec<&str> = Vec::new();
        for name in self.inputs.iter().flat_map(|input| &input.columns) {
            if !names.contains(&name.as_str()) {
                names.push(name);
            }
        }
        names.join(", ")
    }

    /// Rejects columns of an input that have unsuitable types or widths.
    pub(super) fn check_input(&self, schema: &Schema, input: &InputColumns) -> Result<()> {
        for name in &input.columns {
            let column = self.field(schema, name)?;
            let (kind, width) = element(column);
            if !is_number(kind) {
                let hint = match column {
                    DataType::Binary | DataType::LargeBinary | DataType::BinaryView | DataType::Struct(_) => {
                        format!("; an image needs its size, as in images.{name} = {{ size = [224, 224] }}")
                    }
                    _ => String::new(),
                };
                return Err(self.bad(format!(
                    "column {name:?} is {column}; features are numbers, true and false, or lists of these{hint}"
                )));
            }
            if input.below.is_some() && input.is_strict && !kind.is_integer() && *kind != DataType::Boolean {
                return Err(self.bad(format!(
                    "column {name:?} is {column}; {} whole numbers: write the column as integers, or as true and false",
                    input.takes()
                )));
            }
            if input.columns.len() == 1 {
                self.check_width(name, width, input.width, &input.takes())?;
            }
        }
        self.widths(schema, input).map(drop)
    }

    /// The values per row of each column of an input.
    fn widths(&self, schema: &Schema, input: &InputColumns) -> Result<Vec<usize>> {
        if input.columns.len() == 1 {
            return Ok(vec![input.width]);
        }
        let mut widths = Vec::with_capacity(input.columns.len());
        for name in &input.columns {
            let counted = element(self.field(schema, name)?).1.or_else(|| self.lengths.get(name).copied());
            let width = counted.ok_or_else(|| {
                self.bad(format!(
                    "column {name:?} has lists without a known length; write lists of a fixed length"
                ))
            })?;
            if width == 0 {
                return Err(self.bad(format!(
                    "column {name:?} is empty: its lists have 0 values; take it out of the inputs of the job"
                )));
            }
            let groups = input.groups();
            if width % groups.max(1) != 0 {
                return Err(self.bad(format!(
                    "column {name:?} has {width} values per row; {} {groups} times {} values, so that each of its columns must \
                     have a multiple of {groups} values",
                    input.takes(),
                    input.last,
                )));
            }
            widths.push(width);
        }
        let together: usize = widths.iter().sum();
        if together == input.width {
            return Ok(widths);
        }
        let each = input.columns.iter().zip(&widths).map(|(name, width)| format!("{name} ({width})"));
        Err(self.bad(format!(
            "columns {} have {together} values per row together, {} {}",
            each.collect::<Vec<_>>().join(", "),
            input.takes(),
            input.width
        )))
    }

    /// The inputs of each row: the values of its columns, one after another.
    pub(super) fn inputs(&self, batch: &RecordBatch, row_name: &dyn Fn(usize) -> String) -> Result<Vec<f32>> {
        let mut inputs = Vec::with_capacity(self.inputs.len());
        for input in &self.inputs {
            let widths = self.widths(batch.schema_ref(), input)?;
            let mut columns = Vec::with_capacity(widths.len());
            let mut before = 0;
            for (name, width) in input.columns.iter().zip(widths) {
                let together = width / input.groups().max(1);
                let first = before;
                let below = input.below.as_deref();
                let bound = |at: usize| {
                    let place = at / together.max(1) * input.last + first + at % together.max(1);
                    below.and_then(|below| below.get(place)).copied().unwrap_or_default()
                };
                let bound = below.is_some().then_some(&bound as &dyn Fn(usize) -> u32);
                columns.push((self.numbers(batch, name, width, bound, row_name)?, width, together));
                before += together;
            }
            inputs.push((input.groups(), columns));
        }
        if let [(_, columns)] = &mut inputs[..]
            && let [(values, ..)] = &mut columns[..]
        {
            return Ok(std::mem::take(values));
        }
        let mut rows = Vec::with_capacity(batch.num_rows() * self.input_width());
        for row in 0..batch.num_rows() {
            for (groups, columns) in &inputs {
                for group in 0..*groups {
                    for (values, width, together) in columns {
                        let start = row * width + group * together;
                        rows.extend_from_slice(&values[start..start + together]);
                    }
                }
            }
        }
        Ok(rows)
    }
}
