//! Type inference: the element types of operator outputs.

use millrace_bundle::onnx::attribute_proto::AttributeType;
use millrace_bundle::onnx::tensor_proto::DataType;

use super::Call;
use super::known::ValueFacts;

const FLOAT: i32 = DataType::Float as i32;
const UINT8: i32 = DataType::Uint8 as i32;
const INT32: i32 = DataType::Int32 as i32;
const INT64: i32 = DataType::Int64 as i32;
const STRING: i32 = DataType::String as i32;
const BOOL: i32 = DataType::Bool as i32;

/// The element type of an output, as numbered in ONNX; 0 if unknown.
pub(super) fn of_output(call: &Call<'_>, place: usize, inside: &[Vec<ValueFacts>]) -> i32 {
    match call.node.domain() {
        "" | "ai.onnx" => of_onnx(call, place, inside),
        "ai.onnx.ml" => of_learners(call, place),
        _ => of_others(call, place),
    }
}

fn of_input(call: &Call<'_>, place: usize) -> i32 {
    call.input(place).map_or(0, |input| input.datatype)
}

/// A type given by an attribute.
fn said(call: &Call<'_>, name: &str, default: i32) -> i32 {
    call.int(name).map_or(default, |datatype| i32::try_from(datatype).unwrap_or(0))
}

fn of_onnx(call: &Call<'_>, place: usize, inside: &[Vec<ValueFacts>]) -> i32 {
    let first = of_input(call, 0);
    match (call.node.op_type(), place) {
        ("Cast", _) => said(call, "to", 0),
        ("CastLike" | "Where" | "DequantizeLinear", _) => of_input(call, 1),
        ("OneHot", _) => of_input(call, 2),
        ("Constant", _) => of_constant(call),
        ("ConstantOfShape", _) => {
            let value = call.attribute("value");
            value.map_or(FLOAT, |value| value.t.as_ref().map_or(0, |tensor| tensor.data_type()))
        }
        ("ArgMax" | "ArgMin" | "NonMaxSuppression" | "NonZero" | "SequenceLength" | "Shape" | "Size", _)
        | ("MaxPool" | "StringSplit" | "TopK" | "Unique", 1..) => INT64,
        (
            "And" | "Equal" | "Greater" | "GreaterOrEqual" | "IsInf" | "IsNaN" | "Less" | "LessOrEqual"
            | "Not" | "OptionalHasElement" | "Or" | "RegexFullMatch" | "Xor",
            _,
        )
        | ("Dropout", 1) => BOOL,
        ("QuantizeLinear", _) => match of_input(call, 2) {
            0 => said(call, "output_dtype", UINT8),
            datatype => datatype,
        },
        ("DynamicQuantizeLinear", 1) => FLOAT,
        ("DynamicQuantizeLinear" | "ImageDecoder", _) => UINT8,
        ("ConvInteger" | "MatMulInteger", _) => INT32,
        ("QLinearConv" | "QLinearMatMul", _) => of_input(call, 7),
        ("Bernoulli" | "EyeLike" | "RandomNormalLike" | "RandomUniformLike", _) => said(call, "dtype", first),
        ("RandomNormal" | "RandomUniform" | "SequenceEmpty", _) => said(call, "dtype", FLOAT),
        ("Multinomial", _) => said(call, "dtype", INT32),
        ("BlackmanWindow" | "HammingWindow" | "HannWindow" | "MelWeightMatrix", _) => {
            said(call, "output_datatype", FLOAT)
        }
        ("TfIdfVectorizer", _) => FLOAT,
        ("StringNormalizer" | "StringSplit", _) => STRING,
        // The first result of the loop body is the loop condition.
        ("Loop", _) => inside.first().and_then(|results| results.get(place + 1)).map_or(0, |it| it.datatype),
        ("If" | "Scan" | "SequenceMap", _) => {
            inside.first().and_then(|results| results.get(place)).map_or(0, |it| it.datatype)
        }
        _ => first,
    }
}

fn of_constant(call: &Call<'_>) -> i32 {
    let Some(attribute) = call.node.attribute.first().and_then(|attribute| call.followed(attribute)) else {
        return 0;
    };
    match attribute.r#type() {
        AttributeType::Tensor => attribute.t.as_ref().map_or(0, |tensor| tensor.data_type()),
        AttributeType::Float | AttributeType::Floats => FLOAT,
        AttributeType::Int | AttributeType::Ints => INT64,
        AttributeType::String | AttributeType::Strings => STRING,
        AttributeType::SparseTensor => {
            let sparse = attribute.sparse_tensor.as_ref();
            sparse.and_then(|sparse| sparse.values.as_ref()).map_or(0, |values| values.data_type())
        }
        _ => 0,
    }
}

fn of_learners(call: &Call<'_>, place: usize) -> i32 {
    let has = |name: &str| call.attribute(name).is_some();
    match call.node.op_type() {
        "ArrayFeatureExtractor" | "Binarizer" | "Imputer" | "TreeEnsemble" => of_input(call, 0),
        "FeatureVectorizer"
        | "LinearRegressor"
        | "Normalizer"
        | "OneHotEncoder"
        | "SVMRegressor"
        | "Scaler"
        | "TreeEnsembleRegressor" => FLOAT,
        "LinearClassifier" | "SVMClassifier" | "TreeEnsembleClassifier" => match place {
            0 if has("classlabels_ints") || has("classlabels_int64s") => INT64,
            // If the list of labels is empty, labels are integers.
            0 if call.attribute("classlabels_strings").is_some_and(|labels| !labels.strings.is_empty()) => {
                STRING
            }
            0 => 0,
            _ => FLOAT,
        },
        "CategoryMapper" => match of_input(call, 0) {
            STRING => INT64,
            INT64 => STRING,
            _ => 0,
        },
        "LabelEncoder" => {
            let tensor = call.attribute("values_tensor").and_then(|values| values.t.as_ref());
            let lists = [("values_floats", FLOAT), ("values_strings", STRING), ("values_int64s", INT64)];
            let listed = lists.into_iter().filter(|(name, _)| has(name)).map(|(_, datatype)| datatype);
            let mut all = listed.chain(tensor.map(|tensor| tensor.data_type()));
            // With several lists, it is unknown which one ONNX Runtime uses.
            all.next().filter(|_| all.next().is_none()).unwrap_or(0)
        }
        _ => 0,
    }
}

/// Other operators of `com.microsoft` return floats first if they take floats, except those whose names suggest
/// otherwise.
fn of_others(call: &Call<'_>, place: usize) -> i32 {
    const OTHER: [&str; 8] =
        ["Quant", "QLinear", "Integer", "Search", "Sampling", "Unique", "Warping", "Hash"];
    let is_float = |datatype: &i32| {
        use DataType as T;
        matches!(T::try_from(*datatype), Ok(T::Float | T::Double | T::Float16 | T::Bfloat16))
    };
    let operator = call.node.op_type();
    // Quantized operators begin like `QGemm`; further outputs may be masks and lengths.
    let is_other = operator.starts_with('Q') || OTHER.iter().any(|word| operator.contains(word));
    if call.node.domain() != "com.microsoft" || is_other || (place > 0 && !operator.starts_with("Skip")) {
        return 0;
    }
    let inputs = call.inputs.iter().flatten().map(|input| input.datatype);
    inputs.into_iter().find(is_float).unwrap_or(0)
}
