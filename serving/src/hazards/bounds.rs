//! Bounds of the integers that operators give, and whether what they give has elements.

use millrace_bundle::onnx::AttributeProto;
use millrace_bundle::onnx::attribute_proto::AttributeType as Is;

use super::known::{Known, bounds_of};
use super::{Call, types};

/// The largest extent that is thought of: there is no memory for more along one axis.
const EXTENT_MAX: i64 = i32::MAX as i64;

/// What a node gives; `inside` are the results of the graphs inside of it.
pub(super) fn results(call: &Call<'_>, inside: &[Vec<Known>]) -> Vec<Known> {
    let result = |place: usize| {
        let full = call.is_onnx() && is_full(call);
        let any = Known::of_type(types::of_output(call, place, inside), full);
        if !call.is_onnx() || any.is_integer() == Some(false) {
            return any;
        }
        match call.node.op_type() {
            "Constant" => constant(call).unwrap_or(any),
            operator if keeps_elements(operator, place) => match call.input(0) {
                Some(input) if input.datatype == any.datatype => Known { full, ..input },
                _ => any,
            },
            operator => any.within(bounds(call, operator, place, &any)),
        }
    };
    (0..call.node.output.len()).map(result).collect()
}

/// The attribute of a constant.
fn value_of<'b>(call: &'b Call<'_>) -> Option<&'b AttributeProto> {
    let [attribute] = call.node.attribute.as_slice() else { return None };
    call.followed(attribute)
}

/// A constant of integers.
fn constant(call: &Call<'_>) -> Option<Known> {
    let attribute = value_of(call)?;
    let numbers = match attribute.r#type() {
        Is::Tensor => return attribute.t.as_ref().map(Known::of_tensor),
        Is::Int => vec![attribute.i()],
        _ => attribute.ints.clone(),
    };
    let bounds = Some((*numbers.iter().min()?, *numbers.iter().max()?));
    Some(Known::of_type(types::of_output(call, 0, &[]), true).within(bounds))
}

fn is_constant_full(value: &AttributeProto) -> bool {
    match value.r#type() {
        Is::Tensor => value.t.as_ref().is_some_and(|tensor| Known::of_tensor(tensor).full),
        Is::Float | Is::Int | Is::String => true,
        _ => !value.floats.is_empty() || !value.ints.is_empty() || !value.strings.is_empty(),
    }
}

/// Whether windows fit into axes of any extent, by their padding.
fn fits_anywhere(call: &Call<'_>) -> bool {
    let ints = |name: &str| call.attribute(name).map_or(&[][..], |attribute| attribute.ints.as_slice());
    if call.attribute("auto_pad").is_some_and(|padding| padding.s().starts_with(b"SAME")) {
        return true;
    }
    let (kernel, pads, dilations) = (ints("kernel_shape"), ints("pads"), ints("dilations"));
    let fits = |(place, extent): (usize, &i64)| {
        let pad = |place: usize| pads.get(place).copied().unwrap_or(0);
        let reach = extent.checked_sub(1)?.checked_mul(dilations.get(place).copied().unwrap_or(1))?;
        let padding = pad(place).checked_add(pad(place + kernel.len()))?;
        let fits = if call.node.op_type() == "ConvTranspose" { padding <= reach } else { reach <= padding };
        Some(fits)
    };
    !kernel.is_empty() && kernel.iter().enumerate().all(|axis| fits(axis) == Some(true))
}

/// Whether a slice takes at least one of the elements of each axis.
fn takes_some(call: &Call<'_>) -> bool {
    let (Some(starts), Some(ends)) = (call.input(1), call.input(2)) else { return false };
    let ahead = call.input(4).is_none_or(|steps| steps.low > 0);
    let first = starts.bounds() == (0, 0) && ends.low > 0;
    let last = starts.high < 0 && ends.low >= EXTENT_MAX;
    ahead && (first || last)
}

/// Whether all elements of an output are elements of the first input.
fn keeps_elements(operator: &str, place: usize) -> bool {
    match operator {
        "Compress" | "DepthToSpace" | "Expand" | "Flatten" | "Gather" | "GatherElements" | "GatherND"
        | "Identity" | "Reshape" | "ReverseSequence" | "Slice" | "SpaceToDepth" | "Split" | "Squeeze"
        | "Tile" | "Transpose" | "Unsqueeze" => true,
        "Dropout" | "MaxPool" | "TopK" | "Unique" => place == 0,
        _ => false,
    }
}

/// Bounds of an output of integers that are none of the first input's.
fn bounds(call: &Call<'_>, operator: &str, place: usize, any: &Known) -> Option<(i64, i64)> {
    let first = call.input(0);
    let pair = || Some((first?.bounds(), call.input(1)?.bounds()));
    let each = || call.inputs.iter().flatten();
    match operator {
        "Shape" => Some((first?.full.into(), EXTENT_MAX)),
        "Size" => Some((first?.full.into(), i64::MAX)),
        "ArgMax" | "ArgMin" | "NonZero" | "SequenceLength" => Some((0, EXTENT_MAX)),
        "TopK" | "MaxPool" | "Unique" if place > 0 => Some((0, EXTENT_MAX)),
        "ConstantOfShape" => {
            let value = Known::of_tensor(call.attribute("value")?.t.as_ref()?);
            Some(value.bounds())
        }
        "Cast" if first?.is_integer() == Some(false) => {
            // Truths become 0 and 1; of floats nothing is known.
            let (low, high) = bounds_of(first?.datatype);
            (high == 1).then_some((low, high))
        }
        "Cast" | "CastLike" if first?.is_integer() == Some(true) => first.map(|input| input.bounds()),
        "Concat" | "Max" | "Min" | "Where" => {
            let values = each().skip(usize::from(operator == "Where"));
            values.map(Known::bounds).reduce(|(a, b), (c, d)| match operator {
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
        "Div" => pair().filter(|(_, (low, _))| *low > 0).and_then(|(a, b)| corners(a, b, i64::checked_div)),
        "Mod" if call.int("fmod").unwrap_or(0) == 0 => {
            pair().filter(|(_, (low, _))| *low > 0).map(|(_, (_, high))| (0, high - 1))
        }
        "ReduceMax" | "ReduceMin" if first?.full => first.map(|input| input.bounds()),
        // Of extents: a product of larger numbers might be beyond the type.
        "ReduceProd" if first?.low > 0 && first?.high <= EXTENT_MAX => {
            (bounds_of(any.datatype).1 == i64::MAX).then_some((1, i64::MAX))
        }
        _ => None,
    }
}

/// Bounds of an operation that has its extremes where its operands have theirs.
fn corners(a: (i64, i64), b: (i64, i64), of: fn(i64, i64) -> Option<i64>) -> Option<(i64, i64)> {
    let all = [of(a.0, b.0)?, of(a.0, b.1)?, of(a.1, b.0)?, of(a.1, b.1)?];
    Some((*all.iter().min()?, *all.iter().max()?))
}

/// Whether all outputs have elements, as far as is known of operators of ONNX.
fn is_full(call: &Call<'_>) -> bool {
    let full = |place: usize| call.input(place).is_some_and(|input| input.full);
    let all_full = || call.inputs.iter().flatten().all(|input| input.full);
    let positive = |place: usize| call.input(place).is_some_and(|input| input.low > 0);
    match call.node.op_type() {
        "Constant" => value_of(call).is_some_and(is_constant_full),
        // Other inputs may be lists of axes, which may be empty.
        "ArgMax"
        | "ArgMin"
        | "Attention"
        | "BatchNormalization"
        | "Cast"
        | "CastLike"
        | "Celu"
        | "Clip"
        | "CumSum"
        | "DepthToSpace"
        | "DequantizeLinear"
        | "Dropout"
        | "DynamicQuantizeLinear"
        | "Flatten"
        | "GRU"
        | "Gemm"
        | "GlobalAveragePool"
        | "GlobalMaxPool"
        | "GroupNormalization"
        | "Hardmax"
        | "Identity"
        | "InstanceNormalization"
        | "LRN"
        | "LSTM"
        | "LayerNormalization"
        | "LeakyRelu"
        | "LogSoftmax"
        | "LpNormalization"
        | "MeanVarianceNormalization"
        | "PRelu"
        | "QuantizeLinear"
        | "RMSNormalization"
        | "RNN"
        | "ReduceL1"
        | "ReduceL2"
        | "ReduceLogSum"
        | "ReduceLogSumExp"
        | "ReduceMax"
        | "ReduceMean"
        | "ReduceMin"
        | "ReduceProd"
        | "ReduceSum"
        | "ReduceSumSquare"
        | "Reshape"
        | "ReverseSequence"
        | "Softmax"
        | "SpaceToDepth"
        | "Squeeze"
        | "Transpose"
        | "Trilu"
        | "Unsqueeze"
        | "Abs"
        | "Ceil"
        | "Cos"
        | "Elu"
        | "Erf"
        | "Exp"
        | "Floor"
        | "Gelu"
        | "HardSigmoid"
        | "HardSwish"
        | "IsInf"
        | "IsNaN"
        | "Log"
        | "Mish"
        | "Neg"
        | "Not"
        | "Reciprocal"
        | "Relu"
        | "Round"
        | "Selu"
        | "Sigmoid"
        | "Sign"
        | "Sin"
        | "Softplus"
        | "Softsign"
        | "Sqrt"
        | "Swish"
        | "Tan"
        | "Tanh"
        | "ThresholdedRelu" => full(0),
        "Add" | "And" | "BitShift" | "Div" | "Einsum" | "Equal" | "Gather" | "GatherND" | "Greater"
        | "GreaterOrEqual" | "Less" | "LessOrEqual" | "MatMul" | "MatMulInteger" | "Max" | "Mean" | "Min"
        | "Mod" | "Mul" | "Or" | "Pow" | "Sub" | "Sum" | "Where" | "Xor" => all_full(),
        "AveragePool" | "Conv" | "ConvInteger" | "ConvTranspose" | "LpPool" | "MaxPool" | "QLinearConv" => {
            full(0) && fits_anywhere(call)
        }
        "GatherElements" => full(1),
        "Concat" => call.inputs.iter().flatten().any(|input| input.full),
        "Shape" => full(0) && call.attribute("start").is_none() && call.attribute("end").is_none(),
        "Size" => true,
        "ConstantOfShape" => positive(0),
        "Expand" | "OneHot" | "Tile" | "TopK" => full(0) && positive(1),
        "Pad" => full(0) && call.input(1).is_some_and(|pads| pads.low >= 0),
        "Resize" => full(0) && positive(3),
        "Slice" => full(0) && takes_some(call),
        "Split" => {
            let sizes = call.attribute("split");
            full(0)
                && match (call.input(1), sizes) {
                    (Some(sizes), _) => sizes.low > 0,
                    (None, Some(sizes)) => !sizes.ints.is_empty() && sizes.ints.iter().all(|size| *size > 0),
                    (None, None) => call.attribute("num_outputs").is_none(),
                }
        }
        _ => false,
    }
}
