//! Columns of a batch as the values of arrays and tensors, and as Arrow data.
//!
//! Numbers, times and lists of a fixed size keep the memory into which the feed has gathered them, or lie in a slot of a
//! ring. Flags are unpacked to bytes; texts and byte strings become Python objects.

use std::str::FromStr;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, GenericListArray, OffsetSizeTrait, StructArray};
use arrow::buffer::{Buffer, MutableBuffer};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field, SchemaRef, TimeUnit};
use arrow::ffi::{FFI_ArrowSchema, to_ffi};
use millrace_streams::feed::staging::{ReaderStream, SlotBytes, StagedBatch, StagedColumn};
use pyo3::exceptions::{PyAttributeError, PyBufferError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyCapsule, PyDict, PyList, PyString, PyTuple};
use serde::Deserialize;

use crate::error::{Failure, Result};
use crate::tensor;

/// The form of batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Numpy,
    Arrow,
    Torch,
    /// Objects with `__dlpack__`.
    Dlpack,
}

/// The element type of an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Element {
    /// The kind in NumPy's notation, `i`, `u`, `f`, `b` (a flag in a byte), `M` or `m`.
    pub(crate) kind: char,
    pub(crate) bytes: usize,
    /// The unit of a time.
    unit: &'static str,
}

/// The form of a column.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Form {
    /// Numbers, each row an array of this shape.
    Numbers(Element, Vec<usize>),
    /// Flags, each row an array of this shape.
    Flags(Vec<usize>),
    /// Days, which NumPy counts in 64 bits.
    Days,
    Texts,
    Bytes,
    /// Each row an array of its own length.
    Lists(Element),
    /// Repeated values by number.
    Dictionary(Box<DataType>, Box<Form>),
}

/// A batch of rows as columns, not yet Python objects.
pub(crate) struct Columns(Vec<(String, Column)>);

enum Column {
    Values(Values),
    Texts(ArrayRef),
    Bytes(ArrayRef),
    Lists { values: Values, offsets: Vec<i64>, valid: Option<Vec<bool>> },
}

/// The values of an array, which NumPy takes by the array interface and others by DLPack, without a copy.
#[pyclass(frozen, module = "millrace")]
pub(crate) struct Values {
    /// Never used again in Rust but to be freed: Python writes to it. None for values in a slot.
    _buffer: Option<MutableBuffer>,
    /// The place of values in a slot of a ring; the slot is filled again once all arrays on it are gone.
    slot: Option<SlotBytes>,
    address: usize,
    pub(crate) element: Element,
    pub(crate) shape: Vec<usize>,
}

/// A batch of rows, for the Arrow C data interface.
#[pyclass(frozen, module = "millrace")]
pub(crate) struct RecordBatch(pub(crate) arrow::array::RecordBatch);

/// A schema, for the Arrow C data interface.
#[pyclass(frozen, module = "millrace")]
pub(crate) struct Schema(pub(crate) SchemaRef);

impl FromStr for Format {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Format> {
        match text {
            "numpy" => Ok(Format::Numpy),
            "arrow" => Ok(Format::Arrow),
            "torch" => Ok(Format::Torch),
            "dlpack" => Ok(Format::Dlpack),
            other => Err(Failure::Usage(format!(
                "format is {other:?}; it must be \"numpy\", \"arrow\", \"torch\" or \"dlpack\""
            ))),
        }
    }
}

impl Format {
    /// Fails for the first column that has no form in this format.
    pub(crate) fn check(self, schema: &SchemaRef) -> Result<()> {
        for field in schema.fields() {
            let form = Form::of_field(field);
            let (has_form, format) = match self {
                Format::Arrow => (true, "arrow"),
                Format::Numpy => (form.is_some(), "numpy"),
                Format::Torch => (form.is_some_and(|form| form.is_tensor()), "torch"),
                Format::Dlpack => (form.is_some_and(|form| form.is_array()), "dlpack"),
            };
            if !has_form {
                return Err(Failure::NoForm {
                    column: field.name().clone(),
                    data_type: field.data_type().to_string(),
                    format,
                });
            }
        }
        Ok(())
    }
}

impl Element {
    const BYTE: Element = Element { kind: 'u', bytes: 1, unit: "" };
    const FLAG: Element = Element { kind: 'b', bytes: 1, unit: "" };

    fn of(data_type: &DataType) -> Option<Element> {
        let unit = |unit: &TimeUnit| match unit {
            TimeUnit::Second => "[s]",
            TimeUnit::Millisecond => "[ms]",
            TimeUnit::Microsecond => "[us]",
            TimeUnit::Nanosecond => "[ns]",
        };
        let (kind, unit) = match data_type {
            DataType::Int8 | DataType::Int16 | DataType::Int32 | DataType::Int64 => ('i', ""),
            DataType::UInt8 | DataType::UInt16 | DataType::UInt32 | DataType::UInt64 => ('u', ""),
            DataType::Float16 | DataType::Float32 | DataType::Float64 => ('f', ""),
            DataType::Date64 => ('M', "[ms]"),
            DataType::Timestamp(of, _) => ('M', unit(of)),
            DataType::Duration(of) => ('m', unit(of)),
            _ => return None,
        };
        Some(Element { kind, bytes: data_type.primitive_width()?, unit })
    }

    /// In NumPy's notation, for example `<f4`.
    fn typestr(self) -> String {
        let order = match (self.bytes, cfg!(target_endian = "little")) {
            (1, _) => '|',
            (_, true) => '<',
            (_, false) => '>',
        };
        format!("{order}{}{}{}", self.kind, self.bytes, self.unit)
    }
}

impl Form {
    /// The form of a column, with the shape that Arrow's extension type of tensors gives its lists.
    fn of_field(field: &Field) -> Option<Form> {
        match (Form::of(field.data_type())?, shape_of(field)) {
            (Form::Numbers(element, flat), Some(shape))
                if count_of(&shape).is_some_and(|count| count_of(&flat) == Some(count)) =>
            {
                Some(Form::Numbers(element, shape))
            }
            (form, _) => Some(form),
        }
    }

    fn of(data_type: &DataType) -> Option<Form> {
        if let Some(element) = Element::of(data_type) {
            return Some(Form::Numbers(element, Vec::new()));
        }
        match data_type {
            DataType::Boolean => Some(Form::Flags(Vec::new())),
            DataType::Date32 => Some(Form::Days),
            DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => Some(Form::Texts),
            DataType::Binary | DataType::LargeBinary | DataType::BinaryView => Some(Form::Bytes),
            DataType::FixedSizeBinary(width) => {
                Some(Form::Numbers(Element::BYTE, vec![usize::try_from(*width).ok()?]))
            }
            DataType::FixedSizeList(item, width) => {
                let width = usize::try_from(*width).ok()?;
                let nested = |shape: Vec<usize>| [vec![width], shape].concat();
                match Form::of(item.data_type())? {
                    Form::Numbers(element, shape) => Some(Form::Numbers(element, nested(shape))),
                    Form::Flags(shape) => Some(Form::Flags(nested(shape))),
                    _ => None,
                }
            }
            DataType::List(item) | DataType::LargeList(item) => {
                Element::of(item.data_type()).map(Form::Lists)
            }
            DataType::Dictionary(_, values) => {
                let form = Form::of(values)?;
                Some(Form::Dictionary(values.clone(), Box::new(form)))
            }
            _ => None,
        }
    }

    fn is_tensor(&self) -> bool {
        match self {
            Form::Numbers(element, _) => !matches!(element.kind, 'M' | 'm'),
            Form::Flags(_) => true,
            Form::Lists(element) => !matches!(element.kind, 'M' | 'm'),
            Form::Dictionary(_, form) => form.is_tensor(),
            Form::Days | Form::Texts | Form::Bytes => false,
        }
    }

    /// Whether a batch of it is one tensor.
    fn is_array(&self) -> bool {
        match self {
            Form::Dictionary(_, form) => form.is_array(),
            Form::Lists(_) => false,
            form => form.is_tensor(),
        }
    }

    /// Values in a slot, which holds them in this form.
    fn slotted(&self, slot: SlotBytes, rows: usize) -> Option<Values> {
        let (element, shape) = match self {
            Form::Numbers(element, shape) => (*element, shape),
            Form::Flags(shape) => (Element::FLAG, shape),
            _ => return None,
        };
        let shape = [&[rows], &shape[..]].concat();
        let bytes = shape.iter().product::<usize>() * element.bytes;
        let address = slot.address();
        (bytes == slot.bytes()).then_some(Values { _buffer: None, slot: Some(slot), address, element, shape })
    }

    fn column(&self, array: ArrayRef) -> Result<Column, Refusal> {
        match self {
            Form::Numbers(element, shape) => numbers(array, *element, shape).map(Column::Values),
            Form::Flags(shape) => flags(array, shape).map(Column::Values),
            Form::Days => {
                let days = cast(&array, &DataType::Int64)?;
                drop(array);
                let element = Element { kind: 'M', bytes: 8, unit: "[D]" };
                numbers(days, element, &[]).map(Column::Values)
            }
            Form::Texts => Ok(Column::Texts(cast(&array, &DataType::LargeUtf8)?)),
            Form::Bytes => Ok(Column::Bytes(cast(&array, &DataType::LargeBinary)?)),
            Form::Lists(element) => match array.data_type() {
                DataType::LargeList(_) => lists::<i64>(array.as_list(), *element),
                _ => lists::<i32>(array.as_list(), *element),
            },
            Form::Dictionary(values, form) => {
                let plain = cast(&array, values)?;
                drop(array);
                form.column(plain)
            }
        }
    }
}

/// Why a column has no values.
enum Refusal {
    /// This row is null, or has a null in it.
    Null(usize),
    Arrow(arrow::error::ArrowError),
}

impl From<arrow::error::ArrowError> for Refusal {
    fn from(error: arrow::error::ArrowError) -> Refusal {
        Refusal::Arrow(error)
    }
}

impl Columns {
    pub(crate) fn new(batch: arrow::array::RecordBatch, step: u64) -> Result<Columns> {
        // Nothing else may share the arrays, so that Python gets their memory.
        let (schema, arrays, _) = batch.into_parts();
        let columns = schema.fields().iter().zip(arrays).map(|(field, array)| {
            let name = field.name().clone();
            let Some(form) = Form::of_field(field) else {
                let data_type = field.data_type().to_string();
                return Err(Failure::NoForm { column: name, data_type, format: "numpy" });
            };
            match form.column(array) {
                Ok(column) => Ok((name, column)),
                Err(Refusal::Null(row)) => Err(Failure::Null { column: name, row, step }),
                Err(Refusal::Arrow(error)) => Err(error.into()),
            }
        });
        columns.collect::<Result<_>>().map(Columns)
    }

    /// The columns of a batch in a slot. `schema` is that of the feed.
    pub(crate) fn staged(batch: StagedBatch, schema: &SchemaRef) -> Result<Columns> {
        let StagedBatch { step, rows, columns } = batch;
        let columns =
            schema.fields().iter().zip(columns).map(|(field, column)| -> Result<(String, Column)> {
                let name = field.name().clone();
                let no_form = || {
                    let data_type = field.data_type().to_string();
                    Failure::NoForm { column: field.name().clone(), data_type, format: "numpy" }
                };
                let form = Form::of_field(field).ok_or_else(no_form)?;
                let column = match column {
                    StagedColumn::Slot(slot) => {
                        return form
                            .slotted(slot, rows)
                            .map(|values| (name, Column::Values(values)))
                            .ok_or_else(no_form);
                    }
                    StagedColumn::Array(array) => form.column(array),
                };
                match column {
                    Ok(column) => Ok((name, column)),
                    Err(Refusal::Null(row)) => Err(Failure::Null { column: name, row, step }),
                    Err(Refusal::Arrow(error)) => Err(error.into()),
                }
            });
        columns.collect::<Result<_>>().map(Columns)
    }

    /// A dictionary by column: [`Values`], a list of texts or byte strings, or a tuple of the values, offsets and
    /// validity of lists.
    pub(crate) fn into_dict(self, py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
        let dict = PyDict::new(py);
        for (name, column) in self.0 {
            match column {
                Column::Values(values) => dict.set_item(name, Bound::new(py, values)?)?,
                Column::Texts(array) => {
                    let texts = array.as_string::<i64>().iter();
                    dict.set_item(
                        name,
                        PyList::new(py, texts.map(|text| text.map(|text| PyString::new(py, text))))?,
                    )?;
                }
                Column::Bytes(array) => {
                    let bytes = array.as_binary::<i64>().iter();
                    dict.set_item(
                        name,
                        PyList::new(py, bytes.map(|bytes| bytes.map(|bytes| PyBytes::new(py, bytes))))?,
                    )?;
                }
                Column::Lists { values, offsets, valid } => {
                    dict.set_item(name, (Bound::new(py, values)?, offsets, valid))?;
                }
            }
        }
        Ok(dict)
    }
}

/// How many values an array of a shape has; `None` beyond the address space. Files may name any shape.
fn count_of(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |count, extent| count.checked_mul(*extent))
}

/// The shape of the tensors in a column of the extension type `arrow.fixed_shape_tensor`. None for tensors whose axes are
/// stored in another order: they stay flat.
fn shape_of(field: &Field) -> Option<Vec<usize>> {
    #[derive(Deserialize)]
    struct Metadata {
        shape: Vec<usize>,
        permutation: Option<Vec<usize>>,
    }
    field.metadata().get("ARROW:extension:name").filter(|name| *name == "arrow.fixed_shape_tensor")?;
    let metadata = field.metadata().get("ARROW:extension:metadata")?;
    let Metadata { shape, permutation } = serde_json::from_str(metadata).ok()?;
    let is_in_order = permutation.is_none_or(|axes| axes.iter().copied().eq(0..shape.len()));
    is_in_order.then_some(shape)
}

/// Takes the memory of numbers.
fn numbers(mut array: ArrayRef, element: Element, shape: &[usize]) -> Result<Values, Refusal> {
    let rows = array.len();
    array = innermost(array)?;
    let data = array.to_data();
    drop(array);
    let bytes = rows * shape.iter().product::<usize>() * element.bytes;
    let unit = data.data_type().primitive_width().unwrap_or_else(|| shape.iter().product());
    let start = data.offset() * unit;
    let buffer = data.buffers().first().cloned().unwrap_or_else(|| Buffer::from(Vec::<u8>::new()));
    drop(data);
    Ok(Values::new(own(buffer, start, bytes), element, rows, shape))
}

/// Unpacks flags to bytes.
fn flags(array: ArrayRef, shape: &[usize]) -> Result<Values, Refusal> {
    let rows = array.len();
    let array = innermost(array)?;
    let bytes: Vec<u8> = array.as_boolean().values().iter().map(u8::from).collect();
    Ok(Values::new(MutableBuffer::from(bytes), Element::FLAG, rows, shape))
}

/// The items of lists of a fixed size, all rows one after the other. Fails for a row with a null.
fn innermost(mut array: ArrayRef) -> Result<ArrayRef, Refusal> {
    let rows = array.len();
    loop {
        if let Some(at) = first_null(&array) {
            return Err(Refusal::Null(at / (array.len() / rows).max(1)));
        }
        let Some(items) = array.as_fixed_size_list_opt().map(|list| Arc::clone(list.values())) else {
            return Ok(array);
        };
        array = items;
    }
}

fn lists<O: OffsetSizeTrait>(lists: &GenericListArray<O>, element: Element) -> Result<Column, Refusal> {
    let ends: Vec<i64> = lists.value_offsets().iter().map(|end| end.as_usize() as i64).collect();
    let (first, last) = (ends.first().copied().unwrap_or(0), ends.last().copied().unwrap_or(0));
    let items = lists.values().slice(first as usize, (last - first) as usize);
    let offsets: Vec<i64> = ends.iter().map(|end| end - first).collect();
    if let Some(at) = first_null(&items) {
        return Err(Refusal::Null(offsets.partition_point(|end| *end <= at as i64).saturating_sub(1)));
    }
    let valid = lists.nulls().filter(|nulls| nulls.null_count() > 0).map(|nulls| nulls.iter().collect());
    Ok(Column::Lists { values: numbers(items, element, &[])?, offsets, valid })
}

fn first_null(array: &ArrayRef) -> Option<usize> {
    (array.null_count() > 0).then(|| (0..array.len()).find(|row| array.is_null(*row))).flatten()
}

/// Some bytes of a buffer. Copies only where something else has the buffer, too, or the bytes do not begin it.
fn own(buffer: Buffer, start: usize, bytes: usize) -> MutableBuffer {
    let copy = |buffer: &Buffer| MutableBuffer::from(buffer.slice_with_length(start, bytes).to_vec());
    match start {
        0 => buffer.into_mutable().unwrap_or_else(|shared| copy(&shared)),
        _ => copy(&buffer),
    }
}

impl Values {
    fn new(mut buffer: MutableBuffer, element: Element, rows: usize, shape: &[usize]) -> Values {
        let address = buffer.as_mut_ptr() as usize;
        Values { _buffer: Some(buffer), slot: None, address, element, shape: [&[rows], shape].concat() }
    }

    pub(crate) fn address(&self) -> usize {
        self.address
    }

    /// The type and the number of the device in DLPack.
    pub(crate) fn device(&self) -> (i32, i32) {
        self.slot.as_ref().map_or((tensor::CPU, 0), |slot| slot.device().dlpack())
    }

    /// Makes a stream of the consumer wait for the values: none is the default stream, -1 one that is not named.
    fn hand_over(&self, py: Python<'_>, stream: Option<isize>) -> PyResult<()> {
        let Some(slot) = self.slot.as_ref().filter(|slot| !slot.device().is_cpu()) else { return Ok(()) };
        let stream = match stream {
            None => ReaderStream::Handle(1),
            Some(-1) => ReaderStream::Unknown,
            // 0 would be the default stream or that of the thread.
            Some(0) => {
                return Err(PyBufferError::new_err("stream is 0, which DLPack does not allow; pass 1 or 2"));
            }
            Some(handle) => ReaderStream::Handle(handle as usize),
        };
        py.detach(|| slot.read_on(stream)).map_err(|error| Failure::from(error).raise(py))
    }
}

#[pymethods]
impl Values {
    /// NumPy's array interface, version 3.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if self.device().0 != tensor::CPU {
            return Err(PyAttributeError::new_err(
                "the values are on a GPU, which only DLPack tells; see __dlpack__",
            ));
        }
        let dict = PyDict::new(py);
        dict.set_item("version", 3)?;
        dict.set_item("typestr", self.element.typestr())?;
        dict.set_item("shape", PyTuple::new(py, &self.shape)?)?;
        // The array is writable.
        dict.set_item("data", (self.address, false))?;
        Ok(dict)
    }

    /// Whether these are flags, which DLPack gives as bytes.
    #[getter]
    fn is_flags(&self) -> bool {
        self.element.kind == 'b'
    }

    /// The element type in NumPy's notation.
    #[getter]
    fn typestr(&self) -> String {
        self.element.typestr()
    }

    /// A DLPack capsule; its tensor keeps this object alive. On a GPU, `stream` waits for the values. It must live as long
    /// as the tensor, whose memory is used again behind all that this stream has queued when the tensor is freed.
    #[pyo3(signature = (stream=None, *, dl_device=None, copy=None, **_options))]
    fn __dlpack__<'py>(
        slf: Bound<'py, Self>,
        stream: Option<isize>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
        _options: Option<Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let values = slf.get();
        if let Some(asked) = dl_device.filter(|asked| *asked != values.device()) {
            return Err(PyBufferError::new_err(format!(
                "the values are on device {:?} of DLPack, and are not copied to {asked:?}",
                values.device()
            )));
        }
        if copy == Some(true) {
            return Err(PyBufferError::new_err(
                "the values are not copied here: copy the array of the tensor",
            ));
        }
        values.hand_over(slf.py(), stream)?;
        tensor::capsule(slf)
    }

    /// The type and the number of the device.
    fn __dlpack_device__(&self) -> (i32, i32) {
        self.device()
    }
}

#[pymethods]
impl RecordBatch {
    /// Capsules of the schema and the array.
    #[pyo3(signature = (_requested_schema=None))]
    fn __arrow_c_array__<'py>(
        &self,
        py: Python<'py>,
        _requested_schema: Option<Bound<'py, PyAny>>,
    ) -> PyResult<(Bound<'py, PyCapsule>, Bound<'py, PyCapsule>)> {
        let schema = Schema(self.0.schema()).__arrow_c_schema__(py)?;
        let (array, _) = to_ffi(&StructArray::from(self.0.clone()).to_data()).map_err(raise)?;
        Ok((schema, PyCapsule::new_with_value(py, array, c"arrow_array")?))
    }
}

#[pymethods]
impl Schema {
    /// A capsule of the schema.
    fn __arrow_c_schema__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        let schema = FFI_ArrowSchema::try_from(self.0.as_ref()).map_err(raise)?;
        PyCapsule::new_with_value(py, schema, c"arrow_schema")
    }
}

fn raise(error: arrow::error::ArrowError) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}
