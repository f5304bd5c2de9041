//! Resize and Upsample by constant factors: one constant matrix per axis, or picked positions.

use super::builder::{Builder, Call, NodeRef};
use super::movement::{along_axis, select};
use super::{Dim, GraphError, ValueId};

/// Largest size of a resized axis: its matrix is computed when the model is read.
const SIZE_MAX: usize = 4096;

/// The rule for the nearest element before operator set 11, which had no attribute for it.
const SIMPLE: &str = "simple";

/// How a position of the output maps to one of the input.
struct Mapping {
    mode: String,
    coordinates: String,
    nearest: String,
    cubic: f64,
    exclude_outside: bool,
    antialias: bool,
}

impl Mapping {
    /// The position in an axis of `from` elements for element `at` of `to`.
    fn position(&self, at: usize, from: usize, to: usize, scale: f64) -> Option<f64> {
        let (at, length) = (at as f64, to as f64);
        Some(match self.coordinates.as_str() {
            "half_pixel" => (at + 0.5) / scale - 0.5,
            "pytorch_half_pixel" if to <= 1 => 0.0,
            "pytorch_half_pixel" => (at + 0.5) / scale - 0.5,
            "half_pixel_symmetric" => {
                let adjusted = length / (scale * from as f64);
                let offset = from as f64 / 2.0 * (1.0 - adjusted);
                offset + (at + 0.5) / scale - 0.5
            }
            "align_corners" if to <= 1 => 0.0,
            "align_corners" => at * (from as f64 - 1.0) / (length - 1.0),
            "asymmetric" => at / scale,
            _ => return None,
        })
    }

    /// [`Mapping::position`] in float32, whose rounding decides which element is nearest in ONNX Runtime.
    fn narrow_position(&self, at: usize, from: usize, to: usize, scale: f32) -> Option<f32> {
        let (at, from, length) = (at as f32, from as f32, to as f32);
        Some(match self.coordinates.as_str() {
            "half_pixel" => (at + 0.5) / scale - 0.5,
            "pytorch_half_pixel" if to <= 1 => 0.0,
            "pytorch_half_pixel" => (at + 0.5) / scale - 0.5,
            "half_pixel_symmetric" => {
                let adjusted = length / (scale * from);
                from / 2.0 * (1.0 - adjusted) + (at + 0.5) / scale - 0.5
            }
            "align_corners" if to <= 1 => 0.0,
            "align_corners" => at * (from - 1.0) / (length - 1.0),
            "asymmetric" => at / scale,
            _ => return None,
        })
    }

    fn nearest(&self, position: f32, scale: f32) -> Option<f32> {
        Some(match self.nearest.as_str() {
            "round_prefer_floor" if is_half(position) => position.floor(),
            "round_prefer_ceil" if is_half(position) => position.ceil(),
            "round_prefer_floor" | "round_prefer_ceil" => position.round(),
            "floor" => position.floor(),
            "ceil" => position.ceil(),
            // Before operator set 11.
            SIMPLE if scale < 1.0 => position.ceil(),
            SIMPLE => position.trunc(),
            _ => return None,
        })
    }

    /// Weights of the four neighbours of a position with this fraction.
    fn cubic_weights(&self, fraction: f64) -> [f64; 4] {
        let a = self.cubic;
        let near = |d: f64| ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0;
        let far = |d: f64| ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a;
        [far(1.0 + fraction), near(fraction), near(1.0 - fraction), far(2.0 - fraction)]
    }

    /// The neighbours of a position and their weights, before those outside are excluded.
    fn weights(&self, position: f64, last: f64, scale: f64) -> Option<Vec<(f64, f64)>> {
        let below = position.floor();
        match self.mode.as_str() {
            "linear" | "bilinear" | "trilinear" | "cubic" if self.antialias => {
                Some(self.stretched_weights(position, scale))
            }
            "linear" | "bilinear" | "trilinear" => {
                let within = position.clamp(0.0, last);
                let share = within - within.floor();
                Some(vec![(within.floor(), 1.0 - share), (within.floor() + 1.0, share)])
            }
            "cubic" => {
                let weights = self.cubic_weights(position - below);
                Some((0..4).map(|at| f64::from(at) + below - 1.0).zip(weights).collect())
            }
            _ => None,
        }
    }

    /// [`Mapping::weights`] of a filter that is as wide as the elements of a smaller output, as ONNX Runtime has it.
    fn stretched_weights(&self, position: f64, scale: f64) -> Vec<(f64, f64)> {
        let stretch = (1.0 / scale).max(1.0);
        let is_cubic = self.mode == "cubic";
        let support = stretch * if is_cubic { 2.0 } else { 1.0 };
        let (first, end) = ((position + 1.0 - support).floor(), (position + 1.0 + support).floor());
        let a = self.cubic;
        let weight = |distance: f64| match distance {
            _ if !is_cubic => (1.0 - distance).max(0.0),
            ..1.0 => ((a + 2.0) * distance - (a + 3.0)) * distance * distance + 1.0,
            ..2.0 => (((distance - 5.0) * distance + 8.0) * distance - 4.0) * a,
            _ => 0.0,
        };
        let count = (end - first) as usize;
        let places = (0..count).map(|at| first + at as f64);
        let found: Vec<(f64, f64)> =
            places.map(|place| (place, weight(((place - position) / stretch).abs()))).collect();
        let total: f64 = found.iter().map(|(_, weight)| weight).sum();
        found.into_iter().map(|(place, weight)| (place, weight / total)).collect()
    }
}

/// Whether a position lies between two elements, with the tolerance of ONNX Runtime.
fn is_half(position: f32) -> bool {
    (position - position.floor() - 0.5).abs() < 1e-6
}

pub(super) fn resize(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let mut value = call.float(b, 0)?;
    let is_upsample = call.site.op == "Upsample";
    let old = is_upsample || b.opset < 11;
    let default = if old { "asymmetric" } else { "half_pixel" };
    let mapping = Mapping {
        mode: call.string("mode")?.unwrap_or_else(|| "nearest".to_owned()),
        coordinates: call.string("coordinate_transformation_mode")?.unwrap_or_else(|| default.to_owned()),
        nearest: call
            .string("nearest_mode")?
            .unwrap_or_else(|| if old { SIMPLE } else { "round_prefer_floor" }.to_owned()),
        cubic: f64::from(call.float_attribute("cubic_coeff_a", -0.75)?),
        exclude_outside: call.int("exclude_outside", 0)? != 0,
        antialias: call.int("antialias", 0)? != 0,
    };
    call.float_attribute("extrapolation_value", 0.0)?;
    if call.string("keep_aspect_ratio_policy")?.is_some_and(|policy| policy != "stretch") {
        return Err(call.site.form("keep_aspect_ratio_policy is not supported, only stretch"));
    }
    let axes = call.ints("axes")?;
    let (scales, sizes) = if is_upsample && b.opset < 9 {
        let scales = call.floats("scales")?;
        call.finish(1)?;
        (scales, None)
    } else if old {
        call.finish(2)?;
        (call.constant(b, 1)?.map(|(_, scales)| scales), None)
    } else {
        call.finish(4)?;
        let scales = call.constant(b, 2)?.map(|(_, scales)| scales).filter(|scales| !scales.is_empty());
        (scales, call.numbers(b, 3)?.map(|sizes| sizes.elements.clone()))
    };
    let rank = b.dims(value).len();
    let axes = match axes {
        Some(axes) => axes
            .iter()
            .map(|axis| super::shape::axis(*axis, rank, &call.site))
            .collect::<Result<Vec<_>, _>>()?,
        None => (0..rank).collect(),
    };
    let count = scales.as_ref().map(Vec::len).or(sizes.as_ref().map(Vec::len));
    if count != Some(axes.len()) {
        return Err(call.site.form(format!("{count:?} factors for {} axes", axes.len())));
    }
    let mut changes = Vec::with_capacity(axes.len());
    for (at, axis) in axes.into_iter().enumerate() {
        let dim = b.dims(value)[axis];
        let factor = scales.as_ref().map(|scales| scales[at]);
        let size = sizes.as_ref().map(|sizes| sizes[at]);
        if factor == Some(1.0) || size.is_some_and(|size| size.dim() == Some(dim)) {
            continue;
        }
        let Dim::Fixed(from) = dim else {
            return Err(call.site.mixes_rows("it resizes the batch"));
        };
        let to = match (factor, size.and_then(super::ints::Size::known)) {
            (Some(factor), _) if factor > 0.0 => (from as f32 * factor) as usize,
            (None, Some(size)) => usize::try_from(size).unwrap_or(0),
            _ => 0,
        };
        if to == 0 || to > SIZE_MAX || from > SIZE_MAX {
            return Err(call.site.form(format!(
                "axis {axis} of {from} to {to}: sizes of 1 to {SIZE_MAX} by a constant factor are supported"
            )));
        }
        let narrow = factor.unwrap_or(to as f32 / from as f32);
        let scale = factor.map_or(to as f64 / from as f64, f64::from);
        changes.push((axis, [from, to], (scale, narrow)));
    }
    // A shape that stays is not resampled, whatever the factors are.
    if changes.iter().all(|(_, [from, to], _)| from == to) {
        return Ok(value);
    }
    for (axis, sizes, scales) in changes {
        value = axis_to(b, &call.site, value, &mapping, axis, sizes, scales)?;
    }
    Ok(value)
}

/// Appends the change of one axis.
fn axis_to(
    b: &mut Builder,
    site: &NodeRef,
    value: ValueId,
    mapping: &Mapping,
    axis: usize,
    [from, to]: [usize; 2],
    (scale, narrow): (f64, f32),
) -> Result<ValueId, GraphError> {
    let mode = mapping.mode.as_str();
    let unknown = || {
        site.form(format!(
            "mode {mode:?}, {:?}, {:?} is not supported (nearest, linear and cubic are)",
            mapping.coordinates, mapping.nearest
        ))
    };
    // ONNX Runtime rounds these positions in an order of its own.
    let is_symmetric = mapping.coordinates == "half_pixel_symmetric";
    if mapping.antialias && (mode == "nearest" || is_symmetric) {
        return Err(site.form(format!(
            "antialias with mode {mode:?} and {:?} is not defined (use linear or cubic, with half_pixel)",
            mapping.coordinates
        )));
    }
    if mode == "nearest" && is_symmetric && matches!(mapping.nearest.as_str(), "floor" | "ceil") {
        return Err(unknown());
    }
    if mode == "nearest" {
        let place = |at: usize| {
            let position = mapping.narrow_position(at, from, to, narrow)?;
            Some(mapping.nearest(position, narrow)?.clamp(0.0, from as f32 - 1.0) as usize)
        };
        let picked: Option<Vec<usize>> = (0..to).map(place).collect();
        return select(b, site, value, axis, picked.ok_or_else(unknown)?);
    }
    let last = from as f64 - 1.0;
    let positions: Option<Vec<f64>> = (0..to).map(|at| mapping.position(at, from, to, scale)).collect();
    let positions = positions.ok_or_else(unknown)?;
    b.budget.check(from * to, site)?;
    // Column `at` holds the weights of the input's elements in element `at` of the output.
    let mut matrix = vec![0.0f64; from * to];
    for (at, position) in positions.iter().enumerate() {
        let weights = mapping.weights(*position, last, scale).ok_or_else(unknown)?;
        let counts = |place: f64| !mapping.exclude_outside || (0.0..=last).contains(&place);
        let total: f64 = weights.iter().filter(|(place, _)| counts(*place)).map(|(_, weight)| weight).sum();
        if mapping.exclude_outside && total == 0.0 {
            return Err(site.form("exclude_outside leaves an element without neighbours"));
        }
        for (place, weight) in weights.iter().filter(|(place, _)| counts(*place)) {
            let weight = if mapping.exclude_outside { weight / total } else { *weight };
            matrix[place.clamp(0.0, last) as usize * to + at] += weight;
        }
    }
    let matrix = matrix.into_iter().map(|weight| weight as f32).collect();
    along_axis(b, site, value, axis, [from, to], matrix)
}
