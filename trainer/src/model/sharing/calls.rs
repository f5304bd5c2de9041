//! Calls in PyTorch that the nodes of a model quote: which parameter an operand was.
//!
//! The default exporter writes at each node the call that it translates, for example
//! `%linear : [num_users=1] = call_function[target=torch.ops.aten.linear.default](args = (%x, %p_weight, %p_bias), kwargs = {})`.
//! Parameters begin with `p_`. Tied parameters have one name, and equal ones have two, although the model holds both
//! as one tensor.

use millrace_bundle::onnx::NodeProto;

const CALL: &str = "pkg.torch.onnx.fx_node";
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
        let text = node.metadata_props.iter().find(|entry| entry.key() == CALL)?.value();
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

    fn parameters(&self) -> impl DoubleEndedIterator<Item = Operand<'a>> {
        (0..self.arguments.len())
            .filter_map(|at| self.operand(at))
            .filter(|operand| *operand != Operand::Other)
    }

    /// The weight that the call takes.
    pub(super) fn weight(&self) -> Option<Operand<'a>> {
        match self.function {
            "addmm" => self.operand(2),
            function if takes_bias(function) => self.operand(1),
            function if function.contains("norm") => self.parameters().next(),
            _ => self.only(),
        }
    }

    /// The bias that the call takes.
    pub(super) fn bias(&self) -> Option<Operand<'a>> {
        match self.function {
            "addmm" => self.operand(0),
            function if takes_bias(function) => self.operand(2),
            function if function.contains("norm") => self.parameters().nth(1),
            _ => self.only(),
        }
    }

    /// The parameter of a call with one.
    fn only(&self) -> Option<Operand<'a>> {
        let mut found = self.parameters();
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

/// The parameter at input `at` of a node, if the call of the node tells it.
pub(super) fn parameter(node: &NodeProto, at: usize) -> Option<&str> {
    let call = Call::of(node)?;
    let operand = match (node.op_type(), at) {
        ("Add", _) | (_, 2) => call.bias(),
        ("MatMul" | "Mul", _) | (_, 1) => call.weight(),
        _ => call.only(),
    };
    match operand? {
        Operand::Parameter(name) => Some(name),
        Operand::Other => None,
    }
}
