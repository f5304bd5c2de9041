//! Values that constants alone determine: the engine computes them once, when it loads a graph.

use std::collections::HashMap;

use super::builder::{Builder, NamedValue, NodeRef};
use super::{Dim, GraphError, Node, Op, Source, ValueId, shape};

/// Which values constants determine, and how long the engine needs each of them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Determined {
    values: Vec<bool>,
    /// By value: the node after which the engine drops it. `None` if it stays.
    dropped_after: Vec<Option<usize>>,
}

impl Determined {
    /// Finds them, and refuses graphs for which the engine would hold more than the budget.
    pub(super) fn of(b: &mut Builder, output: ValueId) -> Result<Determined, GraphError> {
        let mut values: Vec<bool> =
            b.values.iter().map(|value| matches!(value.source, Source::Constant(_))).collect();
        let mut dropped_after: Vec<Option<usize>> = vec![None; values.len()];
        let mut stays: Vec<bool> = (0..values.len()).map(|value| value == output).collect();
        for (at, Node { op, inputs, output }) in b.nodes.iter().enumerate() {
            // Until a node reads it.
            dropped_after[*output] = Some(at);
            let fixed = b.values[*output].dims.iter().all(|dim| matches!(dim, Dim::Fixed(_)));
            // A dropout draws anew at each step. A search may fail on a device, which loading does not expect.
            let is_late = matches!(op, Op::Dropout(_) | Op::Rank { .. });
            values[*output] = fixed && !is_late && inputs.iter().all(|input| values[*input]);
            for input in inputs {
                dropped_after[*input] = Some(at);
                stays[*input] |= !values[*output];
            }
        }
        for (dropped, _) in dropped_after.iter_mut().zip(&stays).filter(|(_, stays)| **stays) {
            *dropped = None;
        }
        let found = Determined { values, dropped_after };
        for (at, node) in b.nodes.iter().enumerate().filter(|(_, node)| found.is(node.output)) {
            let elements = |value: ValueId| shape::elements_at(&b.values[value].dims, 1);
            b.budget.charge_at(elements(node.output), || site_of(&b.names, node.output))?;
            let computed = |value: &ValueId| matches!(b.values[*value].source, Source::Node);
            b.budget.release(found.dropped(at, node).filter(computed).map(elements).sum());
        }
        Ok(found)
    }

    /// Whether constants determine a value.
    pub(crate) fn is(&self, value: ValueId) -> bool {
        self.values[value]
    }

    /// The values that no node after `node`, which is at place `at`, needs.
    pub(crate) fn dropped(&self, at: usize, node: &Node) -> impl Iterator<Item = ValueId> {
        let touched = node.inputs.iter().chain([&node.output]).copied();
        let mut dropped: Vec<ValueId> =
            touched.filter(|value| self.dropped_after[*value] == Some(at)).collect();
        dropped.sort_unstable();
        dropped.dedup();
        dropped.into_iter()
    }
}

/// Names the tensor that has a value.
fn site_of(names: &HashMap<String, NamedValue>, value: ValueId) -> NodeRef {
    let is_it = |named: &NamedValue| matches!(named, NamedValue::Float(found) if *found == value);
    let name = names.iter().filter(|(_, named)| is_it(named)).map(|(name, _)| name.clone()).min();
    NodeRef { op: "constant".to_owned(), node: name.unwrap_or_else(|| format!("value {value}")) }
}
