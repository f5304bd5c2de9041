//! Limits on what reading a model may compute: a few kilobytes can describe tensors of any size.

use millrace_bundle::onnx::{GraphProto, TensorProto};

use super::GraphError;
use super::builder::NodeRef;

/// Elements of 4 bytes that a graph may hold beyond a multiple of those in its file.
const HELD_BASE: usize = 1 << 27;

/// Held elements for each one in the model's file.
const HELD_PER_STORED: usize = 4;

/// Integers that reading one graph may fold.
const FOLDED_MAX: usize = 1 << 31;

/// Elements of 4 bytes that one known integer takes.
const INTEGER_ELEMENTS: usize = 4;

/// The elements that a graph holds: constants that were computed, known integers, and values that constants determine.
#[derive(Debug, Default)]
pub(super) struct Budget {
    limit: usize,
    held: usize,
    folded: usize,
}

impl Budget {
    /// The budget of a graph with these stored elements.
    pub(super) fn of(graph: &GraphProto) -> Budget {
        let size = |tensor: &TensorProto| {
            let raw = tensor.raw_data.as_ref().map_or(0, |bytes| bytes.len() / 4);
            raw + tensor.float_data.len()
                + tensor.double_data.len()
                + tensor.int32_data.len()
                + tensor.int64_data.len()
        };
        let attributes = graph.node.iter().flat_map(|node| &node.attribute);
        let constants = attributes.filter_map(|attribute| attribute.t.as_ref());
        let stored: usize = graph.initializer.iter().chain(constants).map(size).sum();
        let limit = HELD_BASE.saturating_add(stored.saturating_mul(HELD_PER_STORED));
        Budget { limit, held: 0, folded: 0 }
    }

    /// Refuses elements that would exceed the budget.
    pub(super) fn check(&self, elements: usize, site: &NodeRef) -> Result<(), GraphError> {
        self.check_at(elements, || site.clone())
    }

    /// Takes elements from the budget.
    pub(super) fn charge(&mut self, elements: usize, site: &NodeRef) -> Result<(), GraphError> {
        self.charge_at(elements, || site.clone())
    }

    /// [`Budget::charge`] for a node that is known once an error names it.
    pub(super) fn charge_at(
        &mut self,
        elements: usize,
        site: impl FnOnce() -> NodeRef,
    ) -> Result<(), GraphError> {
        self.check_at(elements, site)?;
        self.held += elements;
        Ok(())
    }

    fn check_at(&self, elements: usize, site: impl FnOnce() -> NodeRef) -> Result<(), GraphError> {
        let held = self.held.saturating_add(elements);
        if held <= self.limit {
            return Ok(());
        }
        Err(site().form(format!(
            "constants computed from the model would hold {held} elements, the limit is {} (export smaller masks and constants, or store them as initializers)",
            self.limit
        )))
    }

    /// Takes known integers from the budget.
    pub(super) fn charge_integers(&mut self, integers: usize, site: &NodeRef) -> Result<(), GraphError> {
        self.folded = self.folded.saturating_add(integers);
        if self.folded > FOLDED_MAX {
            return Err(site.form(format!(
                "the model computes more than {FOLDED_MAX} integers when it is read (simplify it, for example with onnxsim)"
            )));
        }
        self.charge(integers.saturating_mul(INTEGER_ELEMENTS), site)
    }

    /// Returns known integers that no node reads any more.
    pub(super) fn release_integers(&mut self, integers: usize) {
        self.held = self.held.saturating_sub(integers.saturating_mul(INTEGER_ELEMENTS));
    }

    /// Returns elements that no node reads any more.
    pub(super) fn release(&mut self, elements: usize) {
        self.held = self.held.saturating_sub(elements);
    }
}
