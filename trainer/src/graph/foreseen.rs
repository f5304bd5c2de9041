//! Values that constants determine, computed while the model is read, where integers depend on them.
//!
//! Exporters write positions as float arithmetic on constants: the buckets of relative positions in T5 are the rounded
//! logarithm of a distance. Once such a value becomes integers, its elements are computed here, in float32.
//! Values that the model computes in DOUBLE, FLOAT16 or BFLOAT16 are not foreseen: float32 may round them to another
//! integer.

use std::collections::HashMap;

use super::builder::{Builder, NodeRef};
use super::ints::{step, strides};
use super::{Binary, Compare, Dim, GraphError, Op, Source, Unary, ValueId};

/// Most elements of one value.
const ELEMENTS_MAX: usize = 1 << 20;
/// Most elements of all values that one value depends on.
const COMPUTED_MAX: usize = 1 << 24;
/// Most nodes that one value may depend on, and how deep they nest.
const NODES_MAX: usize = 256;

/// The elements of a value that constants alone determine. `None` if others do, if it is too large, or if the model
/// computes it in another float type than FLOAT. What was computed is taken from the budget of integers.
pub(super) fn elements(
    b: &mut Builder,
    site: &NodeRef,
    value: ValueId,
) -> Result<Option<Vec<f32>>, GraphError> {
    let mut search = Search { b, known: HashMap::new(), visited: 0, computed: 0 };
    let found = search.compute(value).and_then(|()| search.known.remove(&value));
    let computed = search.computed;
    b.budget.charge_integers(computed, site)?;
    b.budget.release_integers(computed);
    Ok(found)
}

struct Search<'a> {
    b: &'a Builder,
    known: HashMap<ValueId, Vec<f32>>,
    visited: usize,
    computed: usize,
}

impl Search<'_> {
    /// The sizes of a value that does not depend on the rows.
    fn sizes(&self, value: ValueId) -> Option<Vec<usize>> {
        let size = |dim: &Dim| match dim {
            Dim::Fixed(size) => Some(*size),
            Dim::Rows(_) => None,
        };
        let sizes: Vec<usize> = self.b.dims(value).iter().map(size).collect::<Option<_>>()?;
        (sizes.iter().try_fold(1usize, |all, size| all.checked_mul(*size))? <= ELEMENTS_MAX).then_some(sizes)
    }

    fn compute(&mut self, value: ValueId) -> Option<()> {
        if self.known.contains_key(&value) {
            return Some(());
        }
        let to = self.sizes(value)?;
        self.computed += to.iter().product::<usize>();
        if self.computed > COMPUTED_MAX {
            return None;
        }
        let b = self.b;
        if b.other_floats.contains(&value) {
            return None;
        }
        if let Source::Constant(elements) = &b.values[value].source {
            self.known.insert(value, elements.clone());
            return Some(());
        }
        let node = b.node_of(value)?;
        self.visited += 1;
        if self.visited > NODES_MAX || !is_computed(&node.op) {
            return None;
        }
        for input in &node.inputs {
            self.compute(*input)?;
        }
        let found = match (&node.op, &node.inputs[..]) {
            (Op::Unary(kind), [input]) => {
                self.known[input].iter().map(|x| unary(*kind, *x)).collect::<Option<Vec<f32>>>()?
            }
            (Op::Binary(kind), [left, right]) => {
                let pairs = self.spread(*left, &to)?.into_iter().zip(self.spread(*right, &to)?);
                pairs.map(|(x, y)| binary(*kind, x, y)).collect::<Option<Vec<f32>>>()?
            }
            (Op::Compare(kind), [left, right]) => {
                let pairs = self.spread(*left, &to)?.into_iter().zip(self.spread(*right, &to)?);
                pairs.map(|(x, y)| f32::from(u8::from(compare(*kind, x, y)))).collect()
            }
            (Op::Where, [condition, left, right]) => {
                let sides = self.spread(*left, &to)?.into_iter().zip(self.spread(*right, &to)?);
                let all = self.spread(*condition, &to)?.into_iter().zip(sides);
                all.map(|(is_left, (x, y))| if is_left != 0.0 { x } else { y }).collect()
            }
            (Op::Reshape, [input]) => self.known[input].clone(),
            (Op::Expand, [input]) => self.spread(*input, &to)?,
            (Op::Permute(order), [input]) => {
                let from = strides(&self.sizes(*input)?);
                self.picked(*input, &to, |index| {
                    order.iter().zip(index).map(|(axis, at)| from[*axis] * at).sum()
                })?
            }
            (Op::Slice { axis, start }, [input]) => {
                let from = strides(&self.sizes(*input)?);
                self.picked(*input, &to, |index| {
                    let at = |own: usize| index[own] + if own == *axis { *start } else { 0 };
                    from.iter().enumerate().map(|(own, stride)| at(own) * stride).sum()
                })?
            }
            _ => return None,
        };
        self.known.insert(value, found);
        Some(())
    }

    /// The elements of a known value at the places that `source` finds for each index of the shape `to`.
    fn picked(&self, value: ValueId, to: &[usize], source: impl Fn(&[usize]) -> usize) -> Option<Vec<f32>> {
        let elements = self.known.get(&value)?;
        let mut index = vec![0; to.len()];
        let mut found = Vec::with_capacity(to.iter().product());
        for _ in 0..to.iter().product::<usize>() {
            found.push(*elements.get(source(&index))?);
            step(&mut index, to);
        }
        Some(found)
    }

    /// The elements of a known value, repeated to the shape `to` that it broadcasts to.
    fn spread(&self, value: ValueId, to: &[usize]) -> Option<Vec<f32>> {
        let from = self.sizes(value)?;
        let lead = to.len().checked_sub(from.len())?;
        let own = strides(&from);
        self.picked(value, to, |index| {
            (0..from.len()).filter(|axis| from[*axis] != 1).map(|axis| index[lead + axis] * own[axis]).sum()
        })
    }
}

/// Whether [`Search::compute`] has a rule for an operation.
fn is_computed(op: &Op) -> bool {
    matches!(
        op,
        Op::Unary(_)
            | Op::Binary(_)
            | Op::Compare(_)
            | Op::Where
            | Op::Reshape
            | Op::Expand
            | Op::Permute(_)
            | Op::Slice { .. }
    )
}

fn unary(kind: Unary, x: f32) -> Option<f32> {
    Some(match kind {
        Unary::Scale(factor) => x * factor,
        Unary::Shift(offset) => x + offset,
        Unary::Neg => -x,
        Unary::Abs => x.abs(),
        Unary::Relu => x.max(0.0),
        Unary::Clip(low, high) => x.max(low).min(high),
        Unary::Log => x.ln(),
        Unary::Exp => x.exp(),
        Unary::Sqrt => x.sqrt(),
        Unary::Reciprocal => 1.0 / x,
        Unary::Floor => x.floor(),
        Unary::Ceil => x.ceil(),
        Unary::Round => x.round_ties_even(),
        Unary::Trunc => x.trunc(),
        Unary::Sign if x > 0.0 => 1.0,
        Unary::Sign if x < 0.0 => -1.0,
        Unary::Sign => 0.0,
        _ => return None,
    })
}

fn binary(kind: Binary, x: f32, y: f32) -> Option<f32> {
    Some(match kind {
        Binary::Add => x + y,
        Binary::Sub => x - y,
        Binary::Mul => x * y,
        Binary::Div => x / y,
        Binary::Max => x.max(y),
        Binary::Min => x.min(y),
        Binary::Pow => return None,
    })
}

fn compare(kind: Compare, x: f32, y: f32) -> bool {
    match kind {
        Compare::Equal => x == y,
        Compare::Less => x < y,
        Compare::LessOrEqual => x <= y,
    }
}
