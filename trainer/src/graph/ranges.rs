//! Ranges of whole numbers that a graph computes, so that positions in a table are known to lie within it.
//!
//! Exporters compute positions from tokens: the place of each token that is no padding, or the token itself unless it
//! is negative. Their range follows from those of the model's inputs, from constants, and from comparisons, which give 0
//! or 1. Only operations are followed that float32 computes without rounding, within [`EXACT`].

use std::collections::HashMap;
use std::rc::Rc;

use super::arithmetic::{choose, compare_values, map};
use super::builder::{Builder, NodeRef};
use super::read::INDEX_BELOW;
use super::{Binary, Compare, Dim, GraphError, Op, Source, Unary, ValueId};

/// Most values that one search visits, and how deep it goes.
const VISITED_MAX: usize = 256;

/// Largest magnitude of whole numbers that float32 tells apart.
const EXACT: f64 = (1u32 << 24) as f64;

/// Largest magnitude that products of matrices may reach: they are computed in 16 bits where a job asks for that.
const EXACT_PRODUCT: f64 = 256.0;

/// The smallest and the largest element of a value.
pub(super) type Range = (f64, f64);

/// The range of a value of whole numbers; `None` if nothing bounds it.
pub(super) fn range(b: &Builder, value: ValueId) -> Option<Range> {
    Search::new(b, u32::MAX, false).range(value)
}

/// Computed positions that lie in a table of `size` rows, and whether any of them may have counted from its end.
/// `None` if they may lie outside. Where that takes a bound, the inputs that the positions are computed from get the
/// largest one that keeps them within.
pub(super) fn within(
    b: &mut Builder,
    site: &NodeRef,
    positions: ValueId,
    size: u32,
) -> Result<Option<(ValueId, bool)>, GraphError> {
    let limit = f64::from(size);
    let fits = |range: &Range| range.0 >= -limit && range.1 < limit;
    let mut found = range(b, positions).filter(fits);
    if found.is_none() {
        // Ranges grow with the bound: `least` fits, `beyond` does not. An input that may be 0 alone says nothing.
        let (mut least, mut beyond) = (size.min(2), INDEX_BELOW);
        let mut search = Search::new(b, least, false);
        if search.range(positions).filter(fits).is_some() {
            while beyond - least > 1 {
                let middle = least.midpoint(beyond);
                match search.below(middle).range(positions).filter(fits) {
                    Some(_) => least = middle,
                    None => beyond = middle,
                }
            }
            found = search.below(least).range(positions).filter(fits);
        }
        if found.is_some() {
            for (origin, _) in search.origins {
                for place in origin.iter() {
                    let below = &mut b.index_bounds[*place as usize];
                    *below = (*below).min(least);
                }
            }
        }
    }
    let Some((low, _)) = found else { return Ok(None) };
    if low >= 0.0 {
        return Ok(Some((positions, false)));
    }
    let zero = b.scalar(0.0, site)?;
    let below = compare_values(b, site, Compare::Less, positions, zero)?;
    let turned = map(b, site, Unary::Shift(size as f32), positions)?;
    Ok(Some((choose(b, site, below, turned, positions)?, true)))
}

struct Search<'a> {
    b: &'a Builder,
    /// A bound that the inputs are taken to have, besides their own.
    below: u32,
    /// The search is for a side of a condition, and follows no further conditions.
    is_apart: bool,
    visited: HashMap<ValueId, Option<Range>>,
    /// Ranges that depend on no assumed bound.
    decided: HashMap<ValueId, Option<Range>>,
    /// The places of the inputs that were read, and their ranges.
    origins: Vec<(Rc<[u32]>, Range)>,
}

impl<'a> Search<'a> {
    fn new(b: &'a Builder, below: u32, is_apart: bool) -> Search<'a> {
        let (visited, decided) = (HashMap::new(), HashMap::new());
        Search { b, below, is_apart, visited, decided, origins: Vec::new() }
    }

    /// Begins the search again with another bound.
    fn below(&mut self, below: u32) -> &mut Search<'a> {
        self.below = below;
        self.visited.clear();
        self.origins.clear();
        self
    }

    /// The range of a value that only decides on others: it needs no bound, and none is assumed.
    fn apart(&mut self, value: ValueId) -> Option<Range> {
        if self.is_apart {
            return None;
        }
        let b = self.b;
        *self.decided.entry(value).or_insert_with(|| Search::new(b, u32::MAX, true).range(value))
    }

    /// The range of the parts of a value joined along an axis of which `is_taken` takes elements, given the place of the
    /// first one and that behind the last one. `None` if the value is not joined along that axis.
    fn parts(
        &mut self,
        value: ValueId,
        axis: usize,
        is_taken: impl Fn(usize, usize) -> bool,
    ) -> Option<Option<Range>> {
        let b = self.b;
        let node = b.node_of(value).filter(|node| node.op == Op::Concat(axis))?;
        let (mut start, mut all): (usize, Option<Range>) = (0, None);
        for input in &node.inputs {
            let Dim::Fixed(size) = b.dims(*input)[axis] else { return None };
            if is_taken(start, start + size) {
                let Some(own) = self.range(*input) else { return Some(None) };
                all = Some(all.map_or(own, |all| union(all, own)));
            }
            start += size;
        }
        Some(all)
    }

    fn range(&mut self, value: ValueId) -> Option<Range> {
        if let Some(known) = self.visited.get(&value) {
            return *known;
        }
        if self.visited.len() >= VISITED_MAX {
            return None;
        }
        // A value that is being searched does not depend on itself.
        self.visited.insert(value, None);
        let found = self.found(value).filter(|(low, high)| low.abs() <= EXACT && high.abs() <= EXACT);
        self.visited.insert(value, found);
        found
    }

    fn found(&mut self, value: ValueId) -> Option<Range> {
        let b = self.b;
        if let Some(origin) = b.origins.get(&value) {
            if let Some((_, known)) = self.origins.iter().find(|(seen, _)| Rc::ptr_eq(seen, origin)) {
                return Some(*known);
            }
            let largest = origin.iter().map(|place| b.index_bounds[*place as usize].min(self.below)).max()?;
            let found = (0.0, f64::from(largest) - 1.0);
            self.origins.push((Rc::clone(origin), found));
            return Some(found);
        }
        if let Source::Constant(elements) = &b.values[value].source {
            return *self.decided.entry(value).or_insert_with(|| constant(elements));
        }
        let node = b.node_of(value)?;
        let inputs = &node.inputs[..];
        match &node.op {
            Op::Rank { axis, .. } => {
                let size = b.dims(inputs[0])[*axis].at(1);
                Some((0.0, size as f64 - 1.0))
            }
            Op::Compare(_) => Some(self.comparison(value)),
            Op::Where => {
                // What is never taken needs no bound.
                match self.apart(inputs[0]) {
                    Some((low, high)) if low > 0.0 || high < 0.0 => self.range(inputs[1]),
                    Some((0.0, 0.0)) => self.range(inputs[2]),
                    _ => Some(union(self.range(inputs[1])?, self.range(inputs[2])?)),
                }
            }
            Op::Binary(kind) => {
                if *kind == Binary::Sub
                    && let Some(found) = self.remainder(inputs[0], inputs[1])
                {
                    return Some(found);
                }
                let (first, second) = (self.range(inputs[0])?, self.range(inputs[1])?);
                binary(*kind, first, second)
            }
            Op::Unary(kind) => match self.quotient(*kind, inputs[0]) {
                Some(found) => Some(found),
                None => unary(*kind, self.range(inputs[0])?),
            },
            Op::Concat(_) => {
                let mut all = self.range(*inputs.first()?)?;
                for input in &inputs[1..] {
                    all = union(all, self.range(*input)?);
                }
                Some(all)
            }
            Op::Pad { value, .. } => {
                let inside = self.range(inputs[0])?;
                let around = f64::from(*value);
                (around.fract() == 0.0).then(|| union(inside, (around, around)))
            }
            Op::Sum(axes) => {
                let mut count = 1.0;
                for axis in axes {
                    let Dim::Fixed(size) = b.dims(inputs[0])[*axis] else { return None };
                    count *= size as f64;
                }
                let (low, high) = self.range(inputs[0])?;
                Some((low * count, high * count))
            }
            // A sum along an axis is a product with zeros and ones.
            Op::MatMul => {
                let Some(Dim::Fixed(size)) = b.dims(inputs[0]).last() else { return None };
                let size = *size as f64;
                let (first, second) = (self.range(inputs[0])?, self.range(inputs[1])?);
                let (low, high) = union(binary(Binary::Mul, first, second)?, (0.0, 0.0));
                let largest = [first.0, first.1, second.0, second.1, low * size, high * size];
                let is_exact = largest.iter().all(|side| side.abs() <= EXACT_PRODUCT);
                is_exact.then_some((low * size, high * size))
            }
            Op::Max(_) | Op::Pick(_) => self.range(inputs[0]),
            Op::Slice { axis, start } => {
                let end = start + b.dims(value)[*axis].at(1);
                let found = self.parts(inputs[0], *axis, |first, behind| first < end && *start < behind);
                found.unwrap_or_else(|| self.range(inputs[0]))
            }
            Op::Select { axis, positions } => {
                let is_taken =
                    |first: usize, behind: usize| positions.iter().any(|at| (first..behind).contains(at));
                let found = self.parts(inputs[0], *axis, is_taken);
                found.unwrap_or_else(|| self.range(inputs[0]))
            }
            op if op.moves() => self.range(inputs[0]),
            _ => None,
        }
    }

    /// The range of a quotient that `kind` makes whole. A quotient of whole numbers below [`EXACT`] is no whole number
    /// unless it is exact, hence its rounding to float32 passes none, and its ends are those of the corners.
    fn quotient(&mut self, kind: Unary, value: ValueId) -> Option<Range> {
        let round: fn(f32) -> f32 = match kind {
            Unary::Trunc => f32::trunc,
            Unary::Floor => f32::floor,
            Unary::Ceil => f32::ceil,
            Unary::Round => f32::round_ties_even,
            _ => return None,
        };
        let node = self.b.node_of(value).filter(|node| node.op == Op::Binary(Binary::Div))?;
        let ((a, c), (d, e)) = (self.range(node.inputs[0])?, self.range(node.inputs[1])?);
        if d <= 0.0 && e >= 0.0 || a.abs().max(c.abs()) >= EXACT {
            return None;
        }
        let corner = |x: f64, y: f64| f64::from(round(x as f32 / y as f32));
        let corners = [(a, d), (a, e), (c, d), (c, e)].map(|(x, y)| corner(x, y));
        corners.into_iter().map(|corner| (corner, corner)).reduce(union)
    }

    /// The range of `dividend` − whole quotient · divisor, if `reached` is that product with a constant divisor.
    fn remainder(&mut self, dividend: ValueId, reached: ValueId) -> Option<Range> {
        let b = self.b;
        let product = b.node_of(reached)?;
        let (whole, divisor) = match (&product.op, &product.inputs[..]) {
            (Op::Unary(Unary::Scale(divisor)), [whole]) => (*whole, *divisor),
            (Op::Binary(Binary::Mul), [whole, divisor]) => (*whole, number(b, *divisor)?),
            _ => return None,
        };
        let rounded = b.node_of(whole)?;
        let is_floor = match rounded.op {
            Op::Unary(Unary::Floor) => true,
            Op::Unary(Unary::Trunc) => false,
            _ => return None,
        };
        let quotient = b.node_of(rounded.inputs[0]).filter(|node| node.op == Op::Binary(Binary::Div))?;
        let is_same = quotient.inputs[0] == dividend && number(b, quotient.inputs[1]) == Some(divisor);
        if !is_same || divisor < 1.0 || divisor.fract() != 0.0 {
            return None;
        }
        let (low, high) = self.range(dividend)?;
        if low.abs().max(high.abs()) >= EXACT {
            return None;
        }
        let last = f64::from(divisor) - 1.0;
        Some(match (low < 0.0, is_floor) {
            (false, _) => (0.0, high.min(last)),
            (true, true) => (0.0, last),
            (true, false) => (low.max(-last), high.clamp(0.0, last)),
        })
    }

    /// The range of a comparison, which is one number where those of its sides tell them apart.
    fn comparison(&mut self, value: ValueId) -> Range {
        let b = self.b;
        let Some(node) = b.node_of(value) else { return (0.0, 1.0) };
        let Op::Compare(kind) = node.op else { return (0.0, 1.0) };
        let (Some(first), Some(second)) = (self.apart(node.inputs[0]), self.apart(node.inputs[1])) else {
            return (0.0, 1.0);
        };
        let (always, never) = match kind {
            Compare::Equal => {
                let are_one = first.0 == first.1 && first == second;
                (are_one, first.1 < second.0 || second.1 < first.0)
            }
            Compare::Less => (first.1 < second.0, first.0 >= second.1),
            Compare::LessOrEqual => (first.1 <= second.0, first.0 > second.1),
        };
        match (always, never) {
            (true, _) => (1.0, 1.0),
            (_, true) => (0.0, 0.0),
            _ => (0.0, 1.0),
        }
    }
}

/// The element of a constant that has one.
fn number(b: &Builder, value: ValueId) -> Option<f32> {
    match &b.values[value].source {
        Source::Constant(elements) => match elements[..] {
            [element] => Some(element),
            _ => None,
        },
        _ => None,
    }
}

/// The range of constant whole numbers.
fn constant(elements: &[f32]) -> Option<Range> {
    let is_whole = |element: &f32| element.is_finite() && element.fract() == 0.0;
    if !elements.iter().all(is_whole) {
        return None;
    }
    elements.iter().map(|element| f64::from(*element)).map(|at| (at, at)).reduce(union)
}

fn union(first: Range, second: Range) -> Range {
    (first.0.min(second.0), first.1.max(second.1))
}

fn binary(kind: Binary, (a, c): Range, (d, e): Range) -> Option<Range> {
    Some(match kind {
        Binary::Add => (a + d, c + e),
        Binary::Sub => (a - e, c - d),
        Binary::Mul => {
            let sides = [a * d, a * e, c * d, c * e];
            let extreme = |start: f64, pick: fn(f64, f64) -> f64| sides.into_iter().fold(start, pick);
            (extreme(f64::INFINITY, f64::min), extreme(f64::NEG_INFINITY, f64::max))
        }
        Binary::Max => (a.max(d), c.max(e)),
        Binary::Min => (a.min(d), c.min(e)),
        Binary::Div | Binary::Pow => return None,
    })
}

fn unary(kind: Unary, (low, high): Range) -> Option<Range> {
    let is_whole = |factor: f32| factor.is_finite() && factor.fract() == 0.0;
    Some(match kind {
        Unary::Scale(factor) if is_whole(factor) => {
            return binary(Binary::Mul, (low, high), (f64::from(factor), f64::from(factor)));
        }
        Unary::Shift(offset) if is_whole(offset) => (low + f64::from(offset), high + f64::from(offset)),
        Unary::Neg => (-high, -low),
        Unary::Abs if low >= 0.0 => (low, high),
        Unary::Abs => (0.0, high.max(-low)),
        Unary::Relu => (low.max(0.0), high.max(0.0)),
        Unary::Clip(least, most) => {
            let side = |bound: f32| bound.is_infinite() || bound.fract() == 0.0;
            if !side(least) || !side(most) {
                return None;
            }
            let (least, most) = (f64::from(least), f64::from(most));
            (low.max(least).min(most), high.max(least).min(most))
        }
        Unary::Sign => (if low < 0.0 { -1.0 } else { 0.0 }, if high > 0.0 { 1.0 } else { 0.0 }),
        // They change no whole number.
        Unary::Floor | Unary::Ceil | Unary::Round | Unary::Trunc => (low, high),
        _ => return None,
    })
}
