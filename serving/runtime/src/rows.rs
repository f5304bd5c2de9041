//! Proof that the rows of a batch do not depend on each other, derived from the graph of a model.
//!
//! Requests run together as one batch. Each request gets the answer that it would get alone only if every node keeps
//! the rows apart. A trial on some rows cannot show it: a maximum over the batch makes no difference while no row is
//! larger than the others. The proof therefore follows each value of the graph from the inputs, by rules for known
//! operators (`table`). A value is the same in any batch, or depends only on the number of rows, or consists of rows
//! along one axis. An operator without a rule is assumed to mix rows. A wrong "independent" gives wrong answers; a
//! wrong "dependent" costs only speed.
//!
//! A value consists of rows if a run of several requests gives the concatenation, along that axis, of its values in
//! separate runs. Extents are products of known numbers, the number of rows, and symbols (`extent`), so
//! that the proof can also follow shapes that graphs compute.

mod attention;
mod call;
mod constants;
mod elementwise;
mod extent;
mod graph;
mod integers;
mod learners;
mod matrix;
mod quantized;
mod recurrent;
mod reduce;
mod select;
mod shapes;
mod spatial;
mod table;
mod value;

use std::fmt;

use millrace_bundle::Signature;
use millrace_bundle::onnx::{ModelProto, NodeProto};
use serde::Serialize;

/// Maximum number of characters of a name in messages.
const NAME_CHARS_MAX: usize = 80;

/// Reason why rows are not known to be independent: the place in the graph, and the problem there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, thiserror::Error)]
#[error("{}", self.shown())]
pub struct Dependence {
    /// Name of the node; empty if it has none, or if the problem is not at a node.
    pub node: String,
    /// The node's operator, with its domain unless that is ONNX's own; empty if the problem is not at a node.
    pub operator: String,
    /// The first value that is not known to keep rows apart.
    pub value: String,
    /// Description of the problem.
    pub reason: String,
}

impl Dependence {
    fn of_node(node: &NodeProto, value: &str, reason: &str) -> Dependence {
        let operator = match node.domain() {
            "" | "ai.onnx" => node.op_type().to_owned(),
            domain => format!("{domain}.{}", node.op_type()),
        };
        Dependence {
            node: short(node.name()),
            operator: short(&operator),
            value: short(value),
            reason: reason.to_owned(),
        }
    }

    /// The dependence of a value, and its reason.
    pub fn of_output(value: &str, reason: &str) -> Dependence {
        let (node, operator) = (String::new(), String::new());
        Dependence { node, operator, value: short(value), reason: reason.to_owned() }
    }

    fn of_input(value: &str) -> Dependence {
        Dependence::of_output(value, "it has no first axis for rows")
    }

    fn shown(&self) -> impl fmt::Display + '_ {
        fmt::from_fn(|f| match (self.operator.is_empty(), self.node.is_empty()) {
            (true, _) => write!(f, "{:?}: {}", self.value, self.reason),
            (false, true) => write!(f, "{} that gives {:?}: {}", self.operator, self.value, self.reason),
            (false, false) => {
                write!(f, "{} {:?} that gives {:?}: {}", self.operator, self.node, self.value, self.reason)
            }
        })
    }
}

/// Row independence of a model, and how it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rows {
    /// The graph proves independence.
    Independent,
    /// The configuration declares independence; the graph does not prove it, for this reason.
    Declared(Dependence),
    /// Independence is not known, for this reason.
    Dependent(Dependence),
}

impl Rows {
    /// Result of the proof for a graph.
    pub fn of(model: &ModelProto, signature: &Signature) -> Rows {
        prove(model, signature).map_or_else(Rows::Dependent, |()| Rows::Independent)
    }

    /// The result when the configuration may also declare independence.
    pub fn declared(self, declared: bool) -> Rows {
        match self {
            Rows::Dependent(why) if declared => Rows::Declared(why),
            rows => rows,
        }
    }

    /// Whether requests may share a batch, and several records may go into one request.
    pub fn are_independent(&self) -> bool {
        !matches!(self, Rows::Dependent(_))
    }
}

impl fmt::Display for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Rows::Independent => f.write_str("independent"),
            Rows::Declared(why) => write!(f, "independent as configured, not proven: {why}"),
            Rows::Dependent(why) => write!(f, "{DEPENDENT}: {why}"),
        }
    }
}

/// The parameter of a model's configuration that contains [`Rows`] as text.
pub const PARAMETER: &str = "rows";

/// Prefix of the text form of [`Rows::Dependent`].
pub const DEPENDENT: &str = "dependent";

fn short(name: &str) -> String {
    name.chars().take(NAME_CHARS_MAX).collect()
}

/// Proves that every row of the outputs depends only on the same row of the inputs.
///
/// # Errors
/// The first place at which independence is not known.
pub fn prove(model: &ModelProto, signature: &Signature) -> Result<(), Dependence> {
    let without =
        signature.inputs.iter().chain(&signature.outputs).find(|spec| spec.shape.first() != Some(&-1));
    if let Some(spec) = without {
        return Err(Dependence::of_output(&spec.name, "its first extent is fixed"));
    }
    let outputs = graph::walk(model);
    signature
        .outputs
        .iter()
        .try_for_each(|spec| outputs.check(&spec.name))
        .map_err(|why| Dependence::clone(&why))
}

#[cfg(test)]
mod tests;
