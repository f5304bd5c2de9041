//! Element types of named values, by the type rules of the operators.
//!
//! The graph computes in floats. The element type of a value says what its numbers mean: a mask of truth values hides
//! positions, a mask of floats is added, and a quotient of integers is truncated.

use millrace_bundle::onnx::attribute_proto::AttributeType;
use millrace_bundle::onnx::tensor_proto::DataType;

use super::GraphError;
use super::builder::{Builder, Call};

/// Element types that operators treat alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Bool,
    Integer,
    Float,
    /// Text and other types that no supported operator reads.
    Other,
}

pub(super) fn kind(element: DataType) -> Kind {
    match element {
        DataType::Bool => Kind::Bool,
        DataType::Float | DataType::Double | DataType::Float16 | DataType::Bfloat16 => Kind::Float,
        _ if range(element).is_some() => Kind::Integer,
        _ => Kind::Other,
    }
}

/// The smallest and largest value of an integer type.
pub(super) fn range(element: DataType) -> Option<(i128, i128)> {
    Some(match element {
        DataType::Int8 => (i8::MIN.into(), i8::MAX.into()),
        DataType::Int16 => (i16::MIN.into(), i16::MAX.into()),
        DataType::Int32 => (i32::MIN.into(), i32::MAX.into()),
        DataType::Int64 => (i64::MIN.into(), i64::MAX.into()),
        DataType::Uint8 => (0, u8::MAX.into()),
        DataType::Uint16 => (0, u16::MAX.into()),
        DataType::Uint32 => (0, u32::MAX.into()),
        DataType::Uint64 => (0, u64::MAX.into()),
        _ => return None,
    })
}

/// An integer in another integer type, wrapped around by its width. `None` if 64 signed bits do not hold the result.
pub(super) fn wrap(value: i64, to: DataType) -> Option<i64> {
    let (low, high) = range(to)?;
    let wrapped = (i128::from(value) - low).rem_euclid(high - low + 1) + low;
    i64::try_from(wrapped).ok()
}

/// The inputs of an operator that have one common type: that of its result, unless it compares.
fn common(op: &str, inputs: usize) -> Vec<usize> {
    match op {
        "Add" | "Sub" | "Mul" | "Div" | "Mod" | "Max" | "Min" | "Sum" | "Mean" | "Equal" | "Less"
        | "LessOrEqual" | "Greater" | "GreaterOrEqual" | "And" | "Or" | "Xor" | "Concat" | "MatMul"
        | "Gemm" | "Einsum" | "Clip" | "Range" | "PRelu" | "Conv" | "ConvTranspose" => (0..inputs).collect(),
        "Where" => vec![1, 2],
        "Attention" => vec![0, 1, 2],
        "LSTM" | "GRU" | "RNN" => vec![0, 1, 2, 3, 5, 6],
        "Pad" | "ScatterElements" | "ScatterND" => vec![0, 2],
        "Constant" | "ConstantOfShape" => vec![],
        _ => vec![0],
    }
}

/// Kinds of elements that an operator takes in the inputs of [`common`].
fn takes(op: &str) -> &'static [Kind] {
    use Kind::{Bool, Float, Integer};
    match op {
        "And" | "Or" | "Xor" | "Not" => &[Bool],
        "Equal" | "Where" | "Concat" | "Split" | "Slice" | "Gather" | "GatherND" | "GatherElements"
        | "ScatterElements" | "ScatterND" | "OneHot" | "Reshape" | "Flatten" | "Squeeze" | "Unsqueeze"
        | "Transpose" | "Expand" | "Tile" | "Pad" | "Identity" | "Cast" | "CastLike" | "Trilu" | "Shape"
        | "Size" | "EyeLike" | "Dropout" | "DepthToSpace" | "SpaceToDepth" | "ReduceMax" | "ReduceMin" => {
            &[Bool, Integer, Float]
        }
        "Add" | "Sub" | "Mul" | "Div" | "Mod" | "Pow" | "Neg" | "Abs" | "Sign" | "Max" | "Min" | "Less"
        | "LessOrEqual" | "Greater" | "GreaterOrEqual" | "Clip" | "Relu" | "ReduceSum" | "ReduceProd"
        | "ReduceL1" | "ReduceSumSquare" | "CumSum" | "MatMul" | "Gemm" | "Einsum" | "Range" | "ArgMax"
        | "ArgMin" | "TopK" => &[Integer, Float],
        _ => &[Float],
    }
}

/// Checks the element types of a node's inputs and returns that of its outputs.
pub(super) fn infer(b: &Builder, call: &mut Call<'_>) -> Result<DataType, GraphError> {
    let op = call.site.op.clone();
    let given: Vec<(usize, DataType)> = common(&op, call.input_count())
        .into_iter()
        .filter_map(|index| Some((index, call.element(b, index)?)))
        .collect();
    let allowed = takes(&op);
    for (index, element) in &given {
        if !allowed.contains(&kind(*element)) {
            return Err(call.site.form(format!(
                "input {index} holds {}, which {op} does not take here (cast it to FLOAT before)",
                element.as_str_name()
            )));
        }
    }
    if op == "Where" && call.element(b, 0).is_some_and(|element| kind(element) != Kind::Bool) {
        return Err(call.site.form("its condition holds no truth values (cast it to BOOL before)"));
    }
    let first = given.first().map_or(DataType::Float, |(_, element)| *element);
    if let Some((index, other)) = given.iter().find(|(_, other)| kind(*other) != kind(first)) {
        return Err(call.site.form(format!(
            "input {index} holds {}, the inputs before it hold {} (cast one of them)",
            other.as_str_name(),
            first.as_str_name()
        )));
    }
    Ok(match op.as_str() {
        "Equal" | "Less" | "LessOrEqual" | "Greater" | "GreaterOrEqual" | "IsNaN" | "IsInf" => DataType::Bool,
        "Shape" | "Size" | "ArgMax" | "ArgMin" => DataType::Int64,
        "OneHot" => call.element(b, 2).unwrap_or(DataType::Float),
        "Cast" => cast_to(call)?,
        "EyeLike" if call.has_attribute("dtype") => {
            let to = call.int("dtype", 0)?;
            let kind = i32::try_from(to).ok().and_then(|to| DataType::try_from(to).ok());
            kind.ok_or_else(|| call.site.form(format!("type {to} is not known")))?
        }
        "CastLike" => call.element(b, 1).unwrap_or(DataType::Float),
        "Constant" => constant(call)?,
        "ConstantOfShape" => match call.tensor("value")? {
            Some(tensor) => DataType::try_from(tensor.data_type()).unwrap_or(DataType::Undefined),
            None => DataType::Float,
        },
        _ => first,
    })
}

/// The type of one of a node's outputs, given that of the first.
pub(super) fn of_output(op: &str, output: usize, first: DataType) -> DataType {
    match (op, output) {
        ("TopK" | "MaxPool", 1) => DataType::Int64,
        _ => first,
    }
}

/// The type that a Cast names.
fn cast_to(call: &mut Call<'_>) -> Result<DataType, GraphError> {
    let to = call.int("to", 0)?;
    i32::try_from(to)
        .ok()
        .and_then(|to| DataType::try_from(to).ok())
        .ok_or_else(|| call.site.form(format!("type {to} is not known")))
}

fn constant(call: &mut Call<'_>) -> Result<DataType, GraphError> {
    if let Some(tensor) = call.tensor("value")? {
        return Ok(DataType::try_from(tensor.data_type()).unwrap_or(DataType::Undefined));
    }
    let whole = [("value_int", AttributeType::Int), ("value_ints", AttributeType::Ints)];
    let is_whole = whole.iter().any(|(name, kind)| call.has_attribute_of(name, *kind));
    Ok(if is_whole { DataType::Int64 } else { DataType::Float })
}
