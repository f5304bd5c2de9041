//! GridSample: an image or a volume at computed places, as a sum of the elements around each one.
//!
//! Places outside become places inside (border, reflection) before the neighbours are picked. A cubic sum picks its
//! neighbours first and moves each of them inside, as PyTorch and ONNX Runtime do.

use super::arithmetic::{choose, compare_values, join_at, map};
use super::builder::{Builder, Call, NodeRef};
use super::positions::pick;
use super::read::INDEX_BELOW;
use super::{Binary, Compare, Dim, GraphError, Unary, ValueId, shape};

/// The coefficient of the cubic weights, which GridSample fixes.
const CUBIC: f32 = -0.75;

/// How the neighbours of a place are joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Nearest,
    Linear,
    Cubic,
}

/// What a place outside stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Padding {
    /// The number 0.
    Zeros,
    /// The nearest element inside.
    Border,
    /// The place mirrored at the border, as often as it takes.
    Reflection,
}

/// How an image or a volume is sampled.
struct Sampling {
    site: NodeRef,
    /// The elements, as `[rows, channels, elements]`.
    elements: ValueId,
    channels: usize,
    /// Its spatial sizes.
    size: Vec<usize>,
    padding: Padding,
    /// Whether the centres of the outer elements are the ends, or their edges are.
    aligned: bool,
}

pub(super) fn grid_sample(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let (image, grid) = (call.float(b, 0)?, call.float(b, 1)?);
    let aligned = call.int("align_corners", 0)? != 0;
    let mode = match call.string("mode")?.as_deref() {
        None | Some("linear" | "bilinear") => Mode::Linear,
        Some("nearest") => Mode::Nearest,
        Some("cubic" | "bicubic") => Mode::Cubic,
        Some(mode) => {
            return Err(call
                .site
                .form(format!("mode = {mode:?} is not known (linear, nearest and cubic are supported)")));
        }
    };
    let padding = match call.string("padding_mode")?.as_deref() {
        None | Some("zeros") => Padding::Zeros,
        Some("border") => Padding::Border,
        Some("reflection") => Padding::Reflection,
        Some(mode) => {
            return Err(call.site.form(format!(
                "padding_mode = {mode:?} is not known (zeros, border and reflection are supported)"
            )));
        }
    };
    call.finish(2)?;
    let site = call.site;
    let (rows, channels, size, out) = sizes(b, &site, image, grid)?;
    if mode == Mode::Cubic && size.len() != 2 {
        return Err(site.form("a cubic sum over three dimensions is not defined (use linear or nearest)"));
    }
    let count = size.iter().fold(1usize, |all, size| all.saturating_mul(*size));
    if count > INDEX_BELOW as usize {
        return Err(site.form(format!(
            "{count} places to pick from: positions are float32 numbers, which tell at most {INDEX_BELOW} apart"
        )));
    }
    let elements = b.reshape(image, vec![rows, Dim::Fixed(channels), Dim::Fixed(count)], &site)?;
    let places = out.iter().fold(1usize, |all, size| all.saturating_mul(*size));
    let places = vec![rows, Dim::Fixed(1), Dim::Fixed(places)];
    let sampling = Sampling { site, elements, channels, size, padding, aligned };
    let site = &sampling.site;
    let rank = sampling.size.len();
    let mut found = Vec::with_capacity(rank);
    for axis in 0..rank {
        // The grid has the last axis of the image first.
        let part = b.slice(grid, rank + 1, rank - 1 - axis, 1, site)?;
        let part = b.reshape(part, places.clone(), site)?;
        let place = sampling.place(b, part, axis)?;
        found.push(if mode == Mode::Cubic { place } else { sampling.inside(b, place, axis)? });
    }
    let found = match mode {
        Mode::Nearest => sampling.nearest(b, &found)?,
        Mode::Linear => sampling.linear(b, &found)?,
        Mode::Cubic => sampling.cubic(b, found[0], found[1])?,
    };
    let mut dims = vec![rows, Dim::Fixed(channels)];
    dims.extend(out.into_iter().map(Dim::Fixed));
    b.reshape(found, dims, site)
}

/// Rows and channels, the spatial sizes of the image, and those of the output.
fn sizes(
    b: &Builder,
    site: &NodeRef,
    image: ValueId,
    grid: ValueId,
) -> Result<(Dim, usize, Vec<usize>, Vec<usize>), GraphError> {
    let fixed = |dims: &[Dim]| {
        let size = |dim: &Dim| match dim {
            Dim::Fixed(size) => Some(*size),
            Dim::Rows(_) => None,
        };
        dims.iter().map(size).collect::<Option<Vec<_>>>()
    };
    let (image, grid) = (b.dims(image), b.dims(grid));
    if let ([rows, Dim::Fixed(channels), size @ ..], [same, out @ .., Dim::Fixed(last)]) = (image, grid)
        && rows == same
        && matches!(size.len(), 2 | 3)
        && out.len() == size.len()
        && *last == size.len()
        && let (Some(size), Some(out)) = (fixed(size), fixed(out))
    {
        return Ok((*rows, *channels, size, out));
    }
    Err(site.shape(format!(
        "an image {} at places {}; [rows, channels, height, width] at [rows, height, width, 2] and [rows, channels, \
         depth, height, width] at [rows, depth, height, width, 3] are supported",
        shape::display(image),
        shape::display(grid)
    )))
}

impl Sampling {
    /// Places from −1 to 1 in elements of an axis.
    fn place(&self, b: &mut Builder, place: ValueId, axis: usize) -> Result<ValueId, GraphError> {
        let size = self.size[axis] as f32;
        let last = size - 1.0;
        let factor = if self.aligned { last / 2.0 } else { size / 2.0 };
        // ONNX Runtime takes a place that is not finite for the first end. Such a place differs from itself.
        let (zero, end) = (b.scalar(0.0, &self.site)?, b.scalar(-1.0, &self.site)?);
        let difference = join_at(b, &self.site, Binary::Sub, place, place)?;
        let is_finite = compare_values(b, &self.site, Compare::Equal, difference, zero)?;
        let place = choose(b, &self.site, is_finite, place, end)?;
        let scaled = map(b, &self.site, Unary::Scale(factor), place)?;
        map(b, &self.site, Unary::Shift(last / 2.0), scaled)
    }

    /// Places of an axis, moved inside unless what is outside is 0.
    fn inside(&self, b: &mut Builder, place: ValueId, axis: usize) -> Result<ValueId, GraphError> {
        let last = self.size[axis] as f32 - 1.0;
        let place = match self.padding {
            Padding::Zeros => return Ok(place),
            Padding::Border => place,
            Padding::Reflection => self.reflected(b, place, axis)?,
        };
        map(b, &self.site, Unary::Clip(0.0, last), place)
    }

    /// Places of an axis, mirrored at its ends: a triangle wave of the distance from its start.
    fn reflected(&self, b: &mut Builder, place: ValueId, axis: usize) -> Result<ValueId, GraphError> {
        let site = &self.site;
        let size = self.size[axis] as f32;
        let (start, span) = if self.aligned { (0.0, size - 1.0) } else { (-0.5, size) };
        if span == 0.0 {
            return map(b, site, Unary::Scale(0.0), place);
        }
        let from_start = map(b, site, Unary::Shift(-start), place)?;
        let distance = map(b, site, Unary::Abs, from_start)?;
        let turns = map(b, site, Unary::Scale(0.5 / span), distance)?;
        let turns = map(b, site, Unary::Floor, turns)?;
        let whole = map(b, site, Unary::Scale(2.0 * span), turns)?;
        let rest = join_at(b, site, Binary::Sub, distance, whole)?;
        let beyond = map(b, site, Unary::Shift(-span), rest)?;
        let from_end = map(b, site, Unary::Abs, beyond)?;
        let back = map(b, site, Unary::Neg, from_end)?;
        map(b, site, Unary::Shift(span + start), back)
    }

    fn nearest(&self, b: &mut Builder, places: &[ValueId]) -> Result<ValueId, GraphError> {
        let mut whole = Vec::with_capacity(places.len());
        for place in places {
            whole.push(map(b, &self.site, Unary::Round, *place)?);
        }
        self.at(b, &whole)
    }

    /// The elements at the corners around each place, by the distance from them.
    fn linear(&self, b: &mut Builder, places: &[ValueId]) -> Result<ValueId, GraphError> {
        let site = &self.site;
        let mut sides = Vec::with_capacity(places.len());
        for place in places {
            let first = map(b, site, Unary::Floor, *place)?;
            let second = map(b, site, Unary::Shift(1.0), first)?;
            let to_first = join_at(b, site, Binary::Sub, *place, first)?;
            let to_second = join_at(b, site, Binary::Sub, second, *place)?;
            // The nearer element weighs more.
            sides.push([(first, to_second), (second, to_first)]);
        }
        let mut sum = None;
        for corner in 0..1usize << sides.len() {
            let mut corner_at = Vec::with_capacity(sides.len());
            let mut weight = None;
            for (axis, side) in sides.iter().enumerate() {
                let (at, part) = side[(corner >> axis) & 1];
                corner_at.push(at);
                weight = Some(match weight {
                    Some(weight) => join_at(b, site, Binary::Mul, weight, part)?,
                    None => part,
                });
            }
            let weight = weight.ok_or_else(|| site.form("it has no spatial axis"))?;
            let element = self.at(b, &corner_at)?;
            let part = join_at(b, site, Binary::Mul, element, weight)?;
            sum = Some(self.plus(b, sum, part)?);
        }
        sum.ok_or_else(|| site.form("no element is near"))
    }

    /// The sixteen pixels around each place, by cubic weights of the distance from them.
    fn cubic(&self, b: &mut Builder, y: ValueId, x: ValueId) -> Result<ValueId, GraphError> {
        let (rows, columns) = (self.neighbours(b, y, 0)?, self.neighbours(b, x, 1)?);
        let mut sum = None;
        for (row, above) in rows {
            let mut line = None;
            for (column, beside) in columns {
                let pixel = self.at(b, &[row, column])?;
                let part = join_at(b, &self.site, Binary::Mul, pixel, beside)?;
                line = Some(self.plus(b, line, part)?);
            }
            let line = line.ok_or_else(|| self.site.form("no pixel is near"))?;
            let part = join_at(b, &self.site, Binary::Mul, line, above)?;
            sum = Some(self.plus(b, sum, part)?);
        }
        sum.ok_or_else(|| self.site.form("no pixel is near"))
    }

    /// The positions of the four neighbours of places on an axis, and their weights.
    fn neighbours(
        &self,
        b: &mut Builder,
        place: ValueId,
        axis: usize,
    ) -> Result<[(ValueId, ValueId); 4], GraphError> {
        let site = &self.site;
        let below = map(b, site, Unary::Floor, place)?;
        let fraction = join_at(b, site, Binary::Sub, place, below)?;
        let negative = map(b, site, Unary::Neg, fraction)?;
        let mut found = [(below, fraction); 4];
        for (at, (position, weight)) in found.iter_mut().enumerate() {
            let moved = map(b, site, Unary::Shift(at as f32 - 1.0), below)?;
            *position = self.inside(b, moved, axis)?;
            // The distances are 1 + f, f, 1 − f and 2 − f.
            let distance = match at {
                0 => map(b, site, Unary::Shift(1.0), fraction)?,
                1 => fraction,
                _ => map(b, site, Unary::Shift(at as f32 - 1.0), negative)?,
            };
            let coefficients = match at {
                1 | 2 => [CUBIC + 2.0, -(CUBIC + 3.0), 0.0, 1.0],
                _ => [CUBIC, -5.0 * CUBIC, 8.0 * CUBIC, -4.0 * CUBIC],
            };
            *weight = self.polynomial(b, distance, coefficients)?;
        }
        Ok(found)
    }

    /// A polynomial of degree 3, its leading coefficient first.
    fn polynomial(
        &self,
        b: &mut Builder,
        x: ValueId,
        [lead, rest @ ..]: [f32; 4],
    ) -> Result<ValueId, GraphError> {
        let mut found = map(b, &self.site, Unary::Scale(lead), x)?;
        for (at, coefficient) in rest.into_iter().enumerate() {
            if at > 0 {
                found = join_at(b, &self.site, Binary::Mul, found, x)?;
            }
            found = map(b, &self.site, Unary::Shift(coefficient), found)?;
        }
        Ok(found)
    }

    fn plus(&self, b: &mut Builder, sum: Option<ValueId>, part: ValueId) -> Result<ValueId, GraphError> {
        match sum {
            Some(sum) => join_at(b, &self.site, Binary::Add, sum, part),
            None => Ok(part),
        }
    }

    /// The elements at whole positions, one for each spatial axis.
    fn at(&self, b: &mut Builder, positions: &[ValueId]) -> Result<ValueId, GraphError> {
        let site = &self.site;
        let mut place = None;
        let mut is_inside = None;
        for (position, size) in positions.iter().zip(&self.size) {
            let inner = map(b, site, Unary::Clip(0.0, *size as f32 - 1.0), *position)?;
            place = Some(match place {
                Some(place) => {
                    let start = map(b, site, Unary::Scale(*size as f32), place)?;
                    join_at(b, site, Binary::Add, start, inner)?
                }
                None => inner,
            });
            if self.padding == Padding::Zeros {
                let same = compare_values(b, site, Compare::Equal, *position, inner)?;
                is_inside = Some(match is_inside {
                    Some(others) => join_at(b, site, Binary::Mul, others, same)?,
                    None => same,
                });
            }
        }
        let place = place.ok_or_else(|| site.form("it has no spatial axis"))?;
        // What is no number is no position.
        let zero = b.scalar(0.0, site)?;
        let is_place = compare_values(b, site, Compare::LessOrEqual, zero, place)?;
        let place = choose(b, site, is_place, place, zero)?;
        let mut dims = b.dims(place).to_vec();
        dims[1] = Dim::Fixed(self.channels);
        let place = b.expand(place, dims, site)?;
        let found = pick(b, site, self.elements, 2, place)?;
        match is_inside {
            Some(is_inside) => choose(b, site, is_inside, found, zero),
            None => Ok(found),
        }
    }
}
