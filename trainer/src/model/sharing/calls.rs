//! Calls in PyTorch that the nodes of a model quote: which parameter an operand was.
//!
//! The default exporter writes at each node the call that it translates, for example
//! `%linear : [num_users=1] = call_function[target=torch.ops.aten.linear.default](args = (%x, %p_weight, %p_bias), kwargs = {})`.
//! Parameters begin with `p_`. Tied parameters have one name, and equal ones have two, although the model holds both
//! as one tensor.

use millrace_bundle::onnx::NodeProto;

use crate::graph::QUOTED_CALL;

const PARAMETER: &str = "%p_";

/// A quoted call.
pub(super) struct Call<'a> {
    function: &'a str,
    arguments: Vec<&'a str>,
}

/// An operand of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operand<'a> {
    /// The parameter with this name among all of the model.
    Parameter(&'a str),
    /// A buffer, a constant or a computed tensor.
    Other,
}

impl<'a> Call<'a> {
    /// The call that a node quotes, if it has no keyword arguments that are tensors.
    pub(super) fn of(node: &'a NodeProto) -> Option<Call<'a>> {
        let text = node.metadata_props.iter().find(|entry| entry.key() == QUOTED_CALL)?.value();
        let (function, rest) = text.split_once("target=torch.ops.aten.")?.1.split_once('.')?;
        let (arguments, keywords) = rest.split_once("args = (")?.1.split_once("), kwargs = {")?;
        if keywords.contains('%') || !is_flat(arguments) {
            return None;
        }
        Some(Call { function, arguments: arguments.split(", ").collect() })
    }

    fn operand(&self, at: usize) -> Option<Operand<'a>> {
        let argument = self.arguments.get(at)?;
        Some(match argument.strip_prefix(PARAMETER) {
            Some(name) => Operand::Parameter(name.trim_end_matches(',')),
            None => Operand::Other,
        })
    }

    /// The parameters behind the first argument.
    fn further_parameters(&self) -> impl Iterator<Item = Operand<'a>> {
        (1..self.arguments.len())
            .filter_map(|at| self.operand(at))
            .filter(|operand| *operand != Operand::Other)
    }

    /// The factor at input `at`, 0 or 1, of the node of a product.
    fn factor(&self, at: usize) -> Option<Operand<'a>> {
        match self.function {
            "addmm" => self.operand(at + 1),
            function if takes_bias(function) => self.operand(at),
            // A normalisation was folded into the product.
            function if is_norm(function) => self.further_parameters().next().filter(|_| at == 1),
            _ => self.only(),
        }
    }

    /// The scale of a normalisation, or the parameter of another call with one.
    fn weight(&self) -> Option<Operand<'a>> {
        if is_norm(self.function) { self.further_parameters().next() } else { self.only() }
    }

    /// The bias that the call takes; [`Operand::Other`] if it takes none.
    pub(super) fn bias(&self) -> Option<Operand<'a>> {
        match self.function {
            "addmm" => self.operand(0),
            function if takes_bias(function) => Some(self.operand(2).unwrap_or(Operand::Other)),
            function if is_norm(function) => Some(self.further_parameters().nth(1).unwrap_or(Operand::Other)),
            _ => self.only(),
        }
    }

    /// The parameter of a call with one.
    fn only(&self) -> Option<Operand<'a>> {
        let first = self.operand(0).filter(|operand| *operand != Operand::Other);
        let mut found = first.into_iter().chain(self.further_parameters());
        found.next().filter(|_| found.next().is_none())
    }
}

/// Whether no list holds a tensor: every argument can be told from the next one.
fn is_flat(arguments: &str) -> bool {
    arguments.split('[').skip(1).all(|list| !list.split(']').next().unwrap_or(list).contains(PARAMETER))
}

fn takes_bias(function: &str) -> bool {
    function == "linear" || function.starts_with("conv")
}

fn is_norm(function: &str) -> bool {
    function.contains("norm")
}

/// The parameter at input `at` of a node, if the call of the node tells it.
pub(super) fn parameter(node: &NodeProto, at: usize) -> Option<&str> {
    let call = Call::of(node)?;
    let operand = match (node.op_type(), at) {
        ("Add", _) | (_, 2) => call.bias(),
        ("MatMul" | "Gemm" | "Conv" | "ConvTranspose", _) => call.factor(at),
        ("Mul", _) | (_, 1) => call.weight(),
        (_, 0) if is_norm(call.function) => call.operand(0),
        _ => call.only(),
    };
    match operand? {
        Operand::Parameter(name) => Some(name),
        Operand::Other => None,
    }
}
