//! Integer bounds: the range of the integers, and of the extents, that operators produce.

use millrace_bundle::onnx::AttributeProto;
use millrace_bundle::onnx::attribute_proto::AttributeType as Is;

use super::known::{EXTENT_MAX, ValueFacts, bounds_of};
use super::{Call, types};

/// Maximum number of elements of a tensor: no address space has more bytes.
const COUNT_MAX: i64 = 1 << 47;

/// The known facts about a node's outputs; `inside` are the results of its subgraphs.
pub(super) fn results(call: &Call<'_>, inside: &[Vec<ValueFacts>]) -> Vec<ValueFacts> {
    let small = inside.is_empty() && is_small(call);
    let result = |place: usize| {
        let any = ValueFacts::of_type(types::of_output(call, place, inside), small);
        if !call.is_onnx() || any.is_integer() != Some(true) {
            return any;
        }
        match call.node.op_type() {
            "Constant" => constant(call).unwrap_or(any),
            operator if keeps_elements(operator, place) => match call.input(0) {
                Some(input) if input.datatype == any.datatype => {
                    ValueFacts { small, shape: input.shape && keeps_each_once(operator), ..input }
                }
                _ => any,
            },
            operator => {
                let result = any.within(bounds(call, operator, place, &any));
                ValueFacts {
                    shape: operator == "Shape" && call.input(0).is_some_and(|of| of.small),
                    ..result
                }
            }
        }
    };
    (0..call.node.output.len()).map(result).collect()
}

/// Whether no extent of the outputs exceeds [`EXTENT_MAX`], given that no extent of the inputs does.
fn is_small(call: &Call<'_>) -> bool {
    // Extents given by the values of an input.
    let said = |place: usize| call.input(place).is_some_and(|extents| extents.high <= EXTENT_MAX);
    let by_itself = match call.node.op_type() {
        "ConstantOfShape" => said(0),
        "Expand" | "Reshape" => said(1),
        "CenterCropPad" | "Col2Im" | "EyeLike" | "MaxUnpool" | "OneHot" | "Pad" | "RandomNormal"
        | "RandomUniform" | "Range" | "Resize" | "Tile" | "Upsample" => false,
        _ => true,
    };
    by_itself && call.is_onnx() && call.inputs.iter().flatten().all(|input| input.small)
}

/// The attribute that contains the value of a constant.
fn value_of<'b>(call: &'b Call<'_>) -> Option<&'b AttributeProto> {
    let [attribute] = call.node.attribute.as_slice() else { return None };
    call.followed(attribute)
}

/// The known facts about a constant of integers.
fn constant(call: &Call<'_>) -> Option<ValueFacts> {
    let attribute = value_of(call)?;
    let numbers = match attribute.r#type() {
        Is::Tensor => return attribute.t.as_ref().map(ValueFacts::of_tensor),
        Is::Int => vec![attribute.i()],
        _ => attribute.ints.clone(),
    };
    let bounds = Some((*numbers.iter().min()?, *numbers.iter().max()?));
    Some(ValueFacts::of_type(types::of_output(call, 0, &[]), true).within(bounds))
}

/// Whether all elements of an output are elements of the first input.
fn keeps_elements(operator: &str, place: usize) -> bool {
    match operator {
        "Compress" | "DepthToSpace" | "Expand" | "Flatten" | "Gather" | "GatherElements" | "GatherND"
        | "Identity" | "Reshape" | "ReverseSequence" | "Slice" | "SpaceToDepth" | "Split" | "Squeeze"
        | "Tile" | "Transpose" | "Unsqueeze" => true,
        "Dropout" | "TopK" | "Unique" => place == 0,
        _ => false,
    }
}

/// Whether an operator that keeps elements repeats none of them.
fn keeps_each_once(operator: &str) -> bool {
    matches!(operator, "Flatten" | "Identity" | "Reshape" | "Slice" | "Squeeze" | "Unsqueeze")
}

/// Bounds of an integer output whose elements are not elements of the first input.
fn bounds(call: &Call<'_>, operator: &str, place: usize, any: &ValueFacts) -> Option<(i64, i64)> {
    let first = call.input(0);
    let pair = || Some((first?.bounds(), call.input(1)?.bounds()));
    let each = || call.inputs.iter().flatten();
    let extent_max = if first.is_some_and(|first| first.small) { EXTENT_MAX } else { i64::MAX };
    let computes = matches!(
        operator,
        "Add" | "Cast" | "CastLike" | "CumSum" | "Div" | "Mod" | "Mul" | "ReduceSum" | "Sub"
    );
    if computes && each().any(ValueFacts::is_unbounded) {
        return None;
    }
    match operator {
        "Shape" | "ArgMax" | "ArgMin" | "NonZero" => Some((0, extent_max)),
        "TopK" if place > 0 => Some((0, extent_max)),
        "Size" | "SequenceLength" => Some((0, COUNT_MAX)),
        "MaxPool" | "Unique" if place > 0 => Some((0, COUNT_MAX)),
        "ConstantOfShape" => {
            let value = ValueFacts::of_tensor(call.attribute("value")?.t.as_ref()?);
            Some(value.bounds())
        }
        "Cast" if first?.is_integer() == Some(false) => {
            // Booleans become 0 and 1; nothing is known of floats.
            let (low, high) = bounds_of(first?.datatype);
            (high == 1).then_some((low, high))
        }
        "Cast" | "CastLike" if first?.is_integer() == Some(true) => first.map(|input| input.bounds()),
        "Concat" | "Max" | "Min" | "Where" => {
            let values = each().skip(usize::from(operator == "Where"));
            values.map(ValueFacts::bounds).reduce(|(a, b), (c, d)| match operator {
                "Max" => (a.max(c), b.max(d)),
                "Min" => (a.min(c), b.min(d)),
                _ => (a.min(c), b.max(d)),
            })
        }
        "Clip" => {
            let (low, high) = first?.bounds();
            let least = call.input(1).map_or((i64::MIN, i64::MIN), |least| least.bounds());
            let most = call.input(2).map_or((i64::MAX, i64::MAX), |most| most.bounds());
            Some((low.max(least.0).min(most.0), high.max(least.1).min(most.1)))
        }
        "Abs" => {
            let (low, high) = first?.bounds();
            let (a, b) = (low.checked_abs()?, high.checked_abs()?);
            Some((if low <= 0 && high >= 0 { 0 } else { a.min(b) }, a.max(b)))
        }
        "Neg" => {
            let (low, high) = first?.bounds();
            Some((high.checked_neg()?, low.checked_neg()?))
        }
        "Add" => pair().and_then(|((a, b), (c, d))| Some((a.checked_add(c)?, b.checked_add(d)?))),
        "Sub" => pair().and_then(|((a, b), (c, d))| Some((a.checked_sub(d)?, b.checked_sub(c)?))),
        "Mul" => pair().and_then(|(a, b)| corners(a, b, i64::checked_mul)),
        // Division by 0 does not return a result.
        "Div" => {
            let (dividend, (low, high)) = pair().filter(|(_, (low, _))| *low >= 0)?;
            corners(dividend, (low.max(1), high.max(1)), i64::checked_div)
        }
        "Mod" if call.int("fmod").unwrap_or(0) == 0 => {
            pair().filter(|(_, (low, _))| *low >= 0).map(|(_, (_, high))| (0, high.max(1) - 1))
        }
        "ReduceSum" | "CumSum" => {
            let (low, high) = first?.bounds();
            Some((low.min(0).checked_mul(COUNT_MAX)?, high.max(0).checked_mul(COUNT_MAX)?))
        }
        // The extents of one tensor multiply to the number of its elements.
        "ReduceProd" if first?.shape && bounds_of(any.datatype).1 == i64::MAX => Some((0, i64::MAX)),
        _ => None,
    }
}

/// Bounds of an operation whose extremes are at the extremes of its operands.
fn corners(a: (i64, i64), b: (i64, i64), of: fn(i64, i64) -> Option<i64>) -> Option<(i64, i64)> {
    let all = [of(a.0, b.0)?, of(a.0, b.1)?, of(a.1, b.0)?, of(a.1, b.1)?];
    Some((*all.iter().min()?, *all.iter().max()?))
}
