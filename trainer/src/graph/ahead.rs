//! Distinction of tensors that PyTorch's default exporter computed ahead from those that it only rearranged.
//!
//! The exporter evaluates what depends on parameters alone and writes the result in place of the parameters. A
//! transposed weight can be trained in its place. A weight times a number cannot: it would move at another rate.
//!
//! The result of a call in PyTorch has the name of the function (`transpose_1`). A result within a call has none
//! (`val_9`): it may be a transposed weight of `linear`, or `beta · bias` of `baddbmm`. The nodes that read it quote the
//! call, and [`REARRANGING_CALLS`] lists the functions that rearrange their weights. Every other one is refused.

use std::collections::{HashMap, HashSet};

use millrace_bundle::onnx::{GraphProto, NodeProto};

use super::initializers::{entry, stem};
use super::merged::QUOTED_CALL;

/// The name of results within a call, without their number.
const UNNAMED: &str = "val";

/// Functions of PyTorch that read their weights transposed, reshaped, cut, joined or repeated, and not computed.
const REARRANGING_CALLS: &[&str] = &[
    "batch_norm",
    "bilinear",
    "cat",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "convolution",
    "expand",
    "group_norm",
    "gru",
    "instance_norm",
    "layer_norm",
    "linear",
    "lstm",
    "prelu",
    "repeat",
    "rms_norm",
    "rnn_relu",
    "rnn_tanh",
    "stack",
];

/// Functions of PyTorch whose results depend on no parameter.
const CREATED: &[&str] = &[
    "arange",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "lift_fresh_copy",
    "lifted_tensor",
    "linspace",
    "new_ones",
    "new_zeros",
    "ones",
    "ones_like",
    "scalar_tensor",
    "scalar_tensor_default",
    "zeros",
    "zeros_like",
];

/// Names of tensors whose elements are those of a parameter, each at most once, in another order or negated.
const REARRANGED: &[&str] = &[
    "alias",
    "cat",
    "clone",
    "contiguous",
    "detach",
    "embedding",
    "flatten",
    "flip",
    "getitem",
    "neg",
    "permute",
    "reshape",
    "roll",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "squeeze",
    "stack",
    "t",
    "to",
    "_to_copy",
    "transpose",
    "unbind",
    "unflatten",
    "unsqueeze",
    "val",
    "view",
];

/// Names of tensors that PyTorch computes from the elements of others.
const COMPUTED: &[&str] = &[
    "abs",
    "add",
    "addmm",
    "amax",
    "amin",
    "bmm",
    "broadcast_in_dim",
    "clamp",
    "clamp_max",
    "clamp_min",
    "cos",
    "cosh",
    "cumsum",
    "div",
    "dot",
    "einsum",
    "elu",
    "erf",
    "exp",
    "expand",
    "expm1",
    "gelu",
    "index",
    "linalg_vector_norm",
    "log",
    "log1p",
    "log_softmax",
    "logsumexp",
    "masked_fill",
    "matmul",
    "maximum",
    "mean",
    "minimum",
    "mm",
    "mul",
    "mv",
    "norm",
    "outer",
    "pow",
    "prod",
    "reciprocal",
    "relu",
    "repeat",
    "rsqrt",
    "sigmoid",
    "silu",
    "sin",
    "sinh",
    "softmax",
    "softplus",
    "sqrt",
    "square",
    "std",
    "sub",
    "sum",
    "tanh",
    "tril",
    "triu",
    "var",
    "where",
];

/// The nodes that read each tensor without a name of its own, with the place of the operand.
pub(super) fn readers(graph: &GraphProto) -> HashMap<&str, Vec<(&NodeProto, usize)>> {
    let tensors = graph.initializer.iter().map(|tensor| tensor.name());
    let unnamed: HashSet<&str> = tensors.filter(|name| is_unnamed(name)).collect();
    let mut readers: HashMap<&str, Vec<(&NodeProto, usize)>> = HashMap::new();
    for node in &graph.node {
        for (place, name) in node.input.iter().enumerate() {
            if unnamed.contains(name.as_str()) {
                readers.entry(name.as_str()).or_default().push((node, place));
            }
        }
    }
    readers
}

/// Whether `origin`, a function or a result within a call, keeps the elements of its operands or has none of them.
pub(super) fn keeps_elements(origin: &str) -> bool {
    REARRANGED.contains(&stem(origin)) || CREATED.contains(&stem(origin))
}

/// Whether a tensor is a result within a call.
pub(super) fn is_unnamed(name: &str) -> bool {
    stem(name) == UNNAMED
}

/// Whether `origin` is a function that computes.
pub(super) fn is_computed(origin: &str) -> bool {
    COMPUTED.contains(&stem(origin))
}

/// Whether the tensor `name`, which was folded from `origins` tensors, holds elements of these in another order.
/// `readers` are those of a tensor without a name of its own.
pub(super) fn is_rearranged(name: &str, origins: usize, readers: &[(&NodeProto, usize)]) -> bool {
    if name.contains('.') {
        return true;
    }
    if !is_unnamed(name) {
        return REARRANGED.contains(&stem(name));
    }
    !readers.is_empty()
        && readers.iter().all(|(node, place)| match function(node) {
            Some(function) => REARRANGING_CALLS.contains(&function),
            // A product with a number has two operands, a transposed weight has one.
            None => origins == 1 && node.op_type() == "MatMul" && *place == 1,
        })
}

/// The function of PyTorch that a node quotes: `linear` in `call_function[target=torch.ops.aten.linear.default](…`.
pub(super) fn function(node: &NodeProto) -> Option<&str> {
    let call = entry(&node.metadata_props, QUOTED_CALL)?;
    let (_, target) = call.split_once("[target=")?;
    let (path, _) = target.split_once(']')?;
    let path = path.strip_prefix("torch.ops.")?;
    path.split('.').nth(1)
}
