//! Parquet output of `millrace predict`: predictions as columns of the model's types.

use std::fs::File;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use arrow::array::{
    Array, ArrayRef, BinaryArray, BooleanArray, Int64Array, ListArray, PrimitiveArray, RecordBatch,
    StringArray,
};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{self as types, Field, Schema};
use millrace_serving::tensor::{Data, Tensor};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;

use crate::failure::{Exit, fail};
use crate::inference::Answer;

/// A Parquet file with a column for each output, `label` if the true classes are known, and `file` if each
/// record is a file. An output with one element per record becomes a plain column, any other one a column of
/// lists in row-major order.
pub(super) struct Columns {
    labelled: bool,
    file: Option<File>,
    writer: Option<ArrowWriter<File>>,
}

impl Columns {
    /// The first answer determines the columns.
    pub(super) fn new(file: File, labelled: bool) -> Columns {
        Columns { labelled, file: Some(file), writer: None }
    }

    /// Adds the rows of an answer.
    pub(super) fn write(&mut self, answer: &Answer) -> Result<()> {
        let rows = answer.known.len();
        let mut fields = Vec::new();
        let mut columns: Vec<ArrayRef> = Vec::new();
        for output in &answer.prediction.outputs {
            let column = column(output, rows)?;
            fields.push(Field::new(&output.name, column.data_type().clone(), false));
            columns.push(column);
        }
        if self.labelled {
            fields.push(Field::new("label", types::DataType::Int64, true));
            columns.push(Arc::new(answer.known.iter().map(|known| known.label).collect::<Int64Array>()));
        }
        if answer.known.iter().any(|known| known.file.is_some()) {
            fields.push(Field::new("file", types::DataType::Utf8, true));
            let files = answer.known.iter().map(|known| known.file.as_deref());
            columns.push(Arc::new(files.collect::<StringArray>()));
        }
        let batch = RecordBatch::try_new(Arc::new(Schema::new(fields)), columns)?;
        if let Some(file) = self.file.take() {
            let packed = Compression::ZSTD(ZstdLevel::default());
            let properties = WriterProperties::builder().set_compression(packed).build();
            self.writer = Some(ArrowWriter::try_new(file, batch.schema(), Some(properties))?);
        }
        match &mut self.writer {
            Some(writer) => writer.write(&batch).context("the model's outputs do not fit into one table"),
            None => Ok(()),
        }
    }

    /// Writes the end of the file.
    pub(super) fn finish(self) -> Result<()> {
        if let Some(writer) = self.writer {
            writer.close()?;
        }
        Ok(())
    }
}

/// An output of `rows` records as a column.
fn column(output: &Tensor, rows: usize) -> Result<ArrayRef> {
    let per_row = output.shape.first() == i64::try_from(rows).ok().as_ref();
    if !per_row && rows != 1 {
        let message = format!(
            "output {} has shape {:?}, one row for each of {rows} records is expected",
            output.name, output.shape
        );
        return fail(Exit::Failed, message);
    }
    let elements = elements(&output.data);
    if per_row && output.shape.len() == 1 {
        return Ok(elements);
    }
    let width = elements.len() / rows.max(1);
    let item = Arc::new(Field::new_list_field(elements.data_type().clone(), false));
    let offsets = OffsetBuffer::from_lengths(std::iter::repeat_n(width, rows));
    Ok(Arc::new(ListArray::try_new(item, offsets, elements, None)?))
}

/// The elements as an Arrow array; BF16, which Arrow lacks, as 32-bit floats.
fn elements(data: &Data) -> ArrayRef {
    macro_rules! numbers {
        ($kind:ident, $values:expr) => {
            Arc::new(PrimitiveArray::<types::$kind>::from_iter_values($values.iter().copied()))
        };
    }
    match data {
        Data::Bool(values) => Arc::new(BooleanArray::from(values.clone())),
        Data::Uint8(values) => numbers!(UInt8Type, values),
        Data::Uint16(values) => numbers!(UInt16Type, values),
        Data::Uint32(values) => numbers!(UInt32Type, values),
        Data::Uint64(values) => numbers!(UInt64Type, values),
        Data::Int8(values) => numbers!(Int8Type, values),
        Data::Int16(values) => numbers!(Int16Type, values),
        Data::Int32(values) => numbers!(Int32Type, values),
        Data::Int64(values) => numbers!(Int64Type, values),
        Data::Fp16(values) => numbers!(Float16Type, values),
        Data::Fp32(values) => numbers!(Float32Type, values),
        Data::Fp64(values) => numbers!(Float64Type, values),
        Data::Bf16(values) => {
            let values = values.iter().map(|value| value.to_f32());
            Arc::new(PrimitiveArray::<types::Float32Type>::from_iter_values(values))
        }
        Data::Bytes(values) => Arc::new(BinaryArray::from_iter_values(values)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow::array::AsArray;

    #[test]
    fn outputs_become_columns_of_their_types() {
        let scalar = Tensor::new("a", vec![2], Data::Int8(vec![-1, 2])).unwrap();
        assert_eq!(column(&scalar, 2).unwrap().as_primitive::<types::Int8Type>().values(), &[-1, 2]);
        let matrix = Tensor::new("b", vec![2, 1, 2], Data::Fp64(vec![1.0, 2.0, 3.0, 4.0])).unwrap();
        let lists = column(&matrix, 2).unwrap();
        let second = lists.as_list::<i32>().value(1);
        assert_eq!(second.as_primitive::<types::Float64Type>().values(), &[3.0, 4.0]);
        let texts = Tensor::new("c", vec![1], Data::Bytes(vec![vec![0xff, 0].into()])).unwrap();
        assert_eq!(column(&texts, 1).unwrap().as_binary::<i32>().value(0), [0xff, 0]);
        // A model without rows: the whole output belongs to the one record.
        let whole = Tensor::new("d", vec![3], Data::Bool(vec![true, false, true])).unwrap();
        assert_eq!(column(&whole, 1).unwrap().as_list::<i32>().value(0).len(), 3);
        assert!(column(&whole, 2).unwrap_err().to_string().contains("one row for each of 2 records"));
    }
}
