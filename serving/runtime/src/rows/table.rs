//! Rule table: the operators that are known to keep rows apart, by domain, each with its rule.

use super::call::Rule;
use super::{
    attention, elementwise, integers, learners, matrix, quantized, recurrent, reduce, select, shapes, spatial,
};

/// Versions of the standard ONNX operator set that the rules cover.
const ONNX: std::ops::RangeInclusive<i64> = 7..=26;
/// Versions of `ai.onnx.ml` that the rules cover.
const LEARNERS: std::ops::RangeInclusive<i64> = 1..=5;
/// Version of `com.microsoft` that the rules cover.
const MICROSOFT: i64 = 1;

/// Domain of an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Domain {
    Onnx,
    Learners,
    Microsoft,
    Other,
}

impl Domain {
    pub(super) fn of(name: &str) -> Domain {
        match name {
            "" | "ai.onnx" => Domain::Onnx,
            "ai.onnx.ml" => Domain::Learners,
            "com.microsoft" => Domain::Microsoft,
            _ => Domain::Other,
        }
    }

    /// Whether the rules cover a version of the domain's operator set.
    pub(super) fn has_rules_for(self, opset: i64) -> bool {
        match self {
            Domain::Onnx => ONNX.contains(&opset),
            Domain::Learners => LEARNERS.contains(&opset),
            Domain::Microsoft => opset == MICROSOFT,
            Domain::Other => false,
        }
    }
}

/// The rule of an operator; `None` if the operator is not known to keep rows apart.
pub(super) fn rule(domain: Domain, operator: &str) -> Option<Rule> {
    match domain {
        Domain::Onnx => of_onnx(operator),
        Domain::Learners => of_learners(operator),
        Domain::Microsoft => of_microsoft(operator),
        Domain::Other => None,
    }
}

/// Whether an operator gives the same result for the same inputs, judging by its name.
pub(super) fn is_deterministic(domain: Domain, operator: &str) -> bool {
    domain != Domain::Other
        && !["Random", "Dropout", "Sampling"].iter().any(|word| operator.contains(word))
        && !matches!(operator, "Bernoulli" | "Multinomial")
}

fn of_onnx(operator: &str) -> Option<Rule> {
    Some(match operator {
        "Abs" | "Acos" | "Acosh" | "Asin" | "Asinh" | "Atan" | "Atanh" | "BitwiseNot" | "Cast" | "Ceil"
        | "Celu" | "Clip" | "Cos" | "Cosh" | "Elu" | "Erf" | "Exp" | "Floor" | "Gelu" | "HardSigmoid"
        | "HardSwish" | "Identity" | "IsInf" | "IsNaN" | "LeakyRelu" | "Log" | "Mish" | "Neg" | "Not"
        | "Reciprocal" | "RegexFullMatch" | "Relu" | "Round" | "Selu" | "Shrink" | "Sigmoid" | "Sign"
        | "Sin" | "Sinh" | "Softplus" | "Softsign" | "Sqrt" | "Swish" | "Tan" | "Tanh"
        | "ThresholdedRelu" => elementwise::unary,
        "CastLike" => elementwise::cast_like,
        "Dropout" => elementwise::dropout,
        "Add" | "And" | "BitShift" | "BitwiseAnd" | "BitwiseOr" | "BitwiseXor" | "Div" | "Equal"
        | "Greater" | "GreaterOrEqual" | "Less" | "LessOrEqual" | "Max" | "Mean" | "Min" | "Mod" | "Mul"
        | "Or" | "PRelu" | "Pow" | "StringConcat" | "Sub" | "Sum" | "Where" | "Xor" => {
            elementwise::broadcasting
        }
        "MatMul" => matrix::matmul,
        "MatMulInteger" => matrix::matmul_integer,
        "Gemm" => matrix::gemm,
        "Einsum" => matrix::einsum,
        "QLinearMatMul" => quantized::qlinear_matmul,
        "QuantizeLinear" | "DequantizeLinear" => quantized::linear,
        "DynamicQuantizeLinear" => quantized::dynamic,
        "Conv" | "ConvInteger" => spatial::conv,
        "QLinearConv" => spatial::qlinear_conv,
        "ConvTranspose" => spatial::conv_transpose,
        "AveragePool" | "LpPool" | "MaxPool" => spatial::pool,
        "GlobalAveragePool" | "GlobalLpPool" | "GlobalMaxPool" => spatial::global_pool,
        "BatchNormalization" => spatial::batch_normalization,
        "GroupNormalization" | "InstanceNormalization" | "LRN" => spatial::keeps_shape,
        "DepthToSpace" | "SpaceToDepth" => spatial::rearranged,
        "GridSample" => spatial::grid_sample,
        "Resize" | "Upsample" => spatial::resize,
        "STFT" => spatial::stft,
        "ReduceL1" | "ReduceL2" | "ReduceLogSum" | "ReduceLogSumExp" | "ReduceMax" | "ReduceMean"
        | "ReduceMin" | "ReduceProd" | "ReduceSum" | "ReduceSumSquare" => reduce::reduce,
        "ArgMax" | "ArgMin" => reduce::arg_extreme,
        "CumProd" | "CumSum" => reduce::cumulative,
        "Hardmax" | "LogSoftmax" | "Softmax" => reduce::softmax,
        "LpNormalization" => reduce::lp_normalization,
        "LayerNormalization" | "RMSNormalization" | "SimplifiedLayerNormalization" => {
            reduce::layer_normalization
        }
        "MeanVarianceNormalization" => reduce::mean_variance,
        "LSTM" | "GRU" | "RNN" => recurrent::recurrent,
        "Reshape" => shapes::reshape,
        "Flatten" => shapes::flatten,
        "Transpose" => shapes::transpose,
        "Squeeze" => shapes::squeeze,
        "Unsqueeze" => shapes::unsqueeze,
        "Expand" => shapes::expand,
        "ConstantOfShape" => shapes::filled,
        "Tile" => shapes::tile,
        "Concat" => select::concat,
        "Split" => select::split,
        "Slice" => select::slice,
        "Gather" => select::gather,
        "GatherElements" | "ScatterElements" => select::elements,
        "GatherND" => select::gather_nd,
        "OneHot" => select::one_hot,
        "TopK" => select::top_k,
        "Pad" => select::pad,
        "ReverseSequence" => select::reverse_sequence,
        "Range" => select::range,
        "Trilu" => select::triangle,
        "TfIdfVectorizer" => learners::tf_idf,
        "Attention" => attention::attention,
        _ => return None,
    })
}

fn of_learners(operator: &str) -> Option<Rule> {
    Some(match operator {
        "LinearClassifier" | "SVMClassifier" | "TreeEnsembleClassifier" => learners::classifier,
        "LinearRegressor" | "SVMRegressor" | "TreeEnsemble" | "TreeEnsembleRegressor" => learners::regressor,
        "Binarizer" | "Imputer" | "Normalizer" | "Scaler" => learners::keeps_shape,
        "CategoryMapper" | "LabelEncoder" => elementwise::unary,
        "FeatureVectorizer" => learners::feature_vectorizer,
        "OneHotEncoder" => learners::one_hot,
        "ArrayFeatureExtractor" => learners::feature_extractor,
        _ => return None,
    })
}

fn of_microsoft(operator: &str) -> Option<Rule> {
    Some(match operator {
        "Gelu" | "QuickGelu" => elementwise::unary,
        "FastGelu" | "BiasGelu" => attention::with_bias,
        "FusedMatMul" => matrix::fused_matmul,
        "FusedGemm" => matrix::gemm,
        "FusedConv" => spatial::conv,
        "MatMulNBits" => matrix::with_packed,
        "SkipLayerNormalization" | "SkipSimplifiedLayerNormalization" => attention::skip_normalization,
        "EmbedLayerNormalization" => attention::embeddings,
        "Attention" => attention::fused_attention,
        "MultiHeadAttention" => attention::multi_head_attention,
        "QuantizeLinear" | "DequantizeLinear" => quantized::linear,
        "QLinearAdd" | "QLinearMul" => quantized::qlinear_pair,
        "QLinearLeakyRelu" | "QLinearSigmoid" => quantized::qlinear_unary,
        "QGemm" => quantized::qgemm,
        "MatMulIntegerToFloat" => quantized::matmul_to_float,
        _ => return None,
    })
}

/// Evaluates nodes that compute tracked integers, before the rules apply.
pub(super) use integers::evaluate;
