//! Proof that the rows of a batch do not depend on each other, read off the graph of a model.
//!
//! Requests run together as one batch. That gives each request the answer that it would have alone only where every
//! node keeps the rows apart. A trial on some rows cannot show it: a maximum over the batch is no different while no
//! row is larger than the others. So each value of the graph is followed from the inputs, by rules for the operators
//! that are known (`table`): it is the same whatever runs together, or depends on the number of rows alone, or is
//! made of rows along one axis. What no rule covers is taken to mix rows. A wrong "independent" gives wrong answers; a
//! wrong "dependent" costs speed alone.
//!
//! Rows are followed as: the value in a run of several requests is what runs of each give, one after the other along
//! the axis. Extents are products of known numbers, the number of rows, and symbols (`extent`), so that shapes which
//! graphs compute can be followed, too.

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

/// Characters of a name that are shown.
const NAME_CHARS_MAX: usize = 80;

/// Why rows are not known to be independent: the place in the graph, and what is wrong there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, thiserror::Error)]
#[error("{}", self.shown())]
pub struct Dependence {
    /// Name of the node; empty where it has none, and where it is no node's.
    pub node: String,
    /// The node's operator, with its domain unless that is ONNX's own; empty where it is no node's.
    pub operator: String,
    /// The value from which on nothing is known.
    pub value: String,
    /// What is wrong.
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

    pub(crate) fn of_output(value: &str, reason: &str) -> Dependence {
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

/// Whether the rows of a model are independent, and how that is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rows {
    /// The graph proves it.
    Independent,
    /// The configuration says so, and the graph does not prove it.
    Declared(Dependence),
    /// It is not known.
    Dependent(Dependence),
}

impl Rows {
    /// What the graph of a model says of it.
    pub fn of(model: &ModelProto, signature: &Signature) -> Rows {
        prove(model, signature).map_or_else(Rows::Dependent, |()| Rows::Independent)
    }

    /// The same where a configuration may say so, too.
    pub(crate) fn declared(self, declared: bool) -> Rows {
        match self {
            Rows::Dependent(why) if declared => Rows::Declared(why),
            rows => rows,
        }
    }

    /// Whether requests may run together, and records go into one request.
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

/// The parameter of a model's configuration that has [`Rows`] as text.
pub const PARAMETER: &str = "rows";

/// What [`Rows`] begin with as text where they are not independent.
pub const DEPENDENT: &str = "dependent";

fn short(name: &str) -> String {
    name.chars().take(NAME_CHARS_MAX).collect()
}

/// Proves that every row of the outputs depends on the same row of the inputs alone.
///
/// # Errors
/// The first place at which that is not known.
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
