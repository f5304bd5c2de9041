//! Convolution and pooling over one, two or three spatial dimensions.
//!
//! One-dimensional forms become two-dimensional ones with a width of 1. Padding that differs between the sides
//! of an axis becomes a separate operation. A pool over three dimensions is one over height and width, then one
//! over depth.

use super::arithmetic::{EXPONENT_BELOW, join_at, map};
use super::builder::{Builder, Call, NodeRef};
use super::movement::surround;
use super::rows::RowNumber;
use super::unpool::{self, Windows};
use super::{Binary, Conv3Spec, ConvSpec, Dim, GraphError, Op, PoolSpec, Unary, ValueId, shape};

/// Largest kernel, stride, padding or dilation.
const WINDOW_MAX: usize = 1 << 20;

/// The attributes that convolutions and pools share, over `N` dimensions.
#[derive(Debug, Clone, Copy)]
struct Window<const N: usize> {
    strides: [usize; N],
    dilations: [usize; N],
    before: [usize; N],
    after: [usize; N],
    /// Elements after the input that the last window reaches, also where that window is cut off.
    reached: [usize; N],
    out: [usize; N],
}

/// Rows, channels and the two spatial sizes of a value; whether it had one spatial dimension.
pub(super) fn spatial(
    b: &mut Builder,
    site: &NodeRef,
    value: ValueId,
) -> Result<(ValueId, [Dim; 4], bool), GraphError> {
    let mut dims = b.dims(value).to_vec();
    let line = dims.len() == 3;
    if line {
        dims.push(Dim::Fixed(1));
    }
    let [rows, channels, height, width] = dims[..] else {
        return Err(
            site.form(format!("{} must have one to three spatial dimensions", shape::display(b.dims(value))))
        );
    };
    for dim in [channels, height, width] {
        if matches!(dim, Dim::Rows(_)) {
            return Err(site.mixes_rows("its window covers the batch"));
        }
    }
    let dims = [rows, channels, height, width];
    Ok((b.reshape(value, dims.to_vec(), site)?, dims, line))
}

/// Rows, channels and the sizes of a value with three spatial dimensions.
pub(super) fn volume(
    b: &Builder,
    site: &NodeRef,
    value: ValueId,
) -> Result<(Dim, usize, [usize; 3]), GraphError> {
    match *b.dims(value) {
        [rows, Dim::Fixed(channels), Dim::Fixed(depth), Dim::Fixed(height), Dim::Fixed(width)] => {
            Ok((rows, channels, [depth, height, width]))
        }
        _ => Err(site.mixes_rows("its window covers the batch")),
    }
}

/// Per-axis sizes from an attribute, or `default`. A one-dimensional form gets a fixed width.
pub(super) fn sizes<const N: usize>(
    site: &NodeRef,
    name: &str,
    given: Option<Vec<i64>>,
    line: bool,
    default: usize,
    least: usize,
) -> Result<[usize; N], GraphError> {
    let Some(given) = given else {
        return Ok([default; N]);
    };
    let bad = || site.form(format!("{name} = {given:?} is not supported here"));
    let mut found = given
        .iter()
        .map(|size| {
            usize::try_from(*size).ok().filter(|size| (least..=WINDOW_MAX).contains(size)).ok_or_else(bad)
        })
        .collect::<Result<Vec<_>, _>>()?;
    if line && found.len() == 1 {
        found.push(default);
    } else if line {
        return Err(bad());
    }
    <[usize; N]>::try_from(found).map_err(|_| bad())
}

fn window<const N: usize>(
    call: &mut Call<'_>,
    size: [usize; N],
    kernel: [usize; N],
    line: bool,
    ceil: bool,
) -> Result<Window<N>, GraphError> {
    let strides = call.ints("strides")?;
    let strides: [usize; N] = sizes(&call.site, "strides", strides, line, 1, 1)?;
    let dilations = call.ints("dilations")?;
    let dilations: [usize; N] = sizes(&call.site, "dilations", dilations, line, 1, 1)?;
    let pads = call.ints("pads")?;
    let mode = call.string("auto_pad")?.unwrap_or_default();
    let reach: [usize; N] = std::array::from_fn(|a| dilations[a] * (kernel[a] - 1) + 1);
    let (before, after) = match (mode.as_str(), pads) {
        ("" | "NOTSET", None) => ([0; N], [0; N]),
        // PyTorch's exporter writes the pads beside VALID, all of them 0.
        ("VALID", pads) if pads.as_ref().is_none_or(|pads| pads.iter().all(|pad| *pad == 0)) => {
            ([0; N], [0; N])
        }
        ("" | "NOTSET", Some(pads)) => both_sides(&call.site, &pads, line)?,
        ("SAME_UPPER" | "SAME_LOWER", pads)
            if pads.as_ref().is_none_or(|pads| pads.iter().all(|pad| *pad == 0)) =>
        {
            let total: [usize; N] = std::array::from_fn(|a| {
                let out = size[a].div_ceil(strides[a]);
                ((out - 1) * strides[a] + reach[a]).saturating_sub(size[a])
            });
            let (less, more) = (total.map(|t| t / 2), total.map(|t| t.div_ceil(2)));
            if mode == "SAME_UPPER" { (less, more) } else { (more, less) }
        }
        (mode, _) => {
            return Err(call.site.form(format!("auto_pad = {mode:?} with pads, or unknown")));
        }
    };
    let mut out = [0; N];
    let mut reached = after;
    for a in 0..N {
        let padded = size[a] + before[a] + after[a];
        let steps = padded.checked_sub(reach[a]).ok_or_else(|| {
            call.site.shape(format!("a window of {} does not fit a padded size of {padded}", reach[a]))
        })?;
        out[a] = steps / strides[a] + 1;
        // A window that is cut off at the end counts if it begins inside the input or the padding before it.
        if ceil && steps % strides[a] != 0 && out[a] * strides[a] < size[a] + before[a] {
            out[a] += 1;
            reached[a] = (out[a] - 1) * strides[a] + reach[a] - size[a] - before[a];
        }
    }
    Ok(Window { strides, dilations, before, after, reached, out })
}

/// Pads of an attribute: all sides before the input, then all sides after it.
pub(super) fn both_sides<const N: usize>(
    site: &NodeRef,
    pads: &[i64],
    line: bool,
) -> Result<([usize; N], [usize; N]), GraphError> {
    if !pads.len().is_multiple_of(2) {
        return Err(site.form(format!("pads = {pads:?}")));
    }
    let (before, after) = pads.split_at(pads.len() / 2);
    Ok((
        sizes(site, "pads", Some(before.to_vec()), line, 0, 0)?,
        sizes(site, "pads", Some(after.to_vec()), line, 0, 0)?,
    ))
}

pub(super) fn fixed(dim: Dim) -> usize {
    dim.at(1)
}

/// Restores the three dimensions of a one-dimensional form's output.
pub(super) fn restore(
    b: &mut Builder,
    site: &NodeRef,
    value: ValueId,
    line: bool,
) -> Result<ValueId, GraphError> {
    let mut dims = b.dims(value).to_vec();
    if line {
        dims.pop();
    }
    b.reshape(value, dims, site)
}

/// Appends padding on the spatial axes.
pub(super) fn surround_spatial(
    b: &mut Builder,
    site: &NodeRef,
    input: ValueId,
    before: &[usize],
    after: &[usize],
    value: f32,
) -> Result<ValueId, GraphError> {
    let all = |sides: &[usize]| [&[0, 0], sides].concat();
    surround(b, site, input, all(before), &all(after), value)
}

pub(super) fn groups_of(call: &mut Call<'_>) -> Result<usize, GraphError> {
    let groups = call.int("group", 1)?;
    usize::try_from(groups)
        .ok()
        .filter(|groups| *groups > 0)
        .ok_or_else(|| call.site.form(format!("group = {groups}")))
}

pub(super) fn conv(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let (input, weight) = (call.float(b, 0)?, call.float(b, 1)?);
    if b.dims(input).len() == 5 {
        return conv3(b, call, input, weight);
    }
    let bias = call.float_optional(b, 2)?;
    let site = call.site.clone();
    let (mut input, [_, channels, height, width], line) = spatial(b, &site, input)?;
    let given = b.dims(weight).to_vec();
    let (weight, kernel_dims, weight_line) = spatial(b, &site, weight)?;
    let [out_channels, group_channels, kernel_height, kernel_width] = kernel_dims.map(fixed);
    let groups = groups_of(&mut call)?;
    let fits = weight_line == line
        && shape::rows_axis(&given).is_none()
        && group_channels.checked_mul(groups) == Some(fixed(channels))
        && out_channels % groups == 0;
    if !fits {
        return Err(site.shape(format!(
            "weights {} do not fit {} channels in {groups} group(s)",
            shape::display(&given),
            channels
        )));
    }
    let kernel = [kernel_height, kernel_width];
    let stated = call.ints("kernel_shape")?;
    if stated.is_some() && sizes(&site, "kernel_shape", stated, line, 1, 1)? != kernel {
        return Err(site.shape(format!("kernel_shape differs from the weights {}", shape::display(&given))));
    }
    let w = window(&mut call, [fixed(height), fixed(width)], kernel, line, false)?;
    call.finish(3)?;
    let mut padding = w.before;
    if w.before != w.after {
        input = surround_spatial(b, &site, input, &w.before, &w.after, 0.0)?;
        padding = [0; 2];
    }
    let mut inputs = vec![input, weight];
    if let Some(bias) = bias {
        check_bias(b, &site, bias, out_channels)?;
        inputs.push(bias);
    }
    let spec = ConvSpec { strides: w.strides, padding, dilations: w.dilations, groups };
    let rows = b.dims(input)[0];
    let dims = vec![rows, Dim::Fixed(out_channels), Dim::Fixed(w.out[0]), Dim::Fixed(w.out[1])];
    let out = b.push(Op::Conv(spec), &inputs, dims, &site)?;
    restore(b, &site, out, line)
}

fn check_bias(b: &Builder, site: &NodeRef, bias: ValueId, channels: usize) -> Result<(), GraphError> {
    if b.dims(bias) == [Dim::Fixed(channels)] {
        return Ok(());
    }
    Err(site.shape(format!("bias {} for {channels} channels", shape::display(b.dims(bias)))))
}

/// Adds a bias per channel.
pub(super) fn add_bias(
    b: &mut Builder,
    site: &NodeRef,
    value: ValueId,
    bias: ValueId,
) -> Result<ValueId, GraphError> {
    let channels = b.dims(value)[1];
    check_bias(b, site, bias, fixed(channels))?;
    let mut dims = vec![channels];
    dims.resize(b.dims(value).len() - 1, Dim::Fixed(1));
    let bias = b.reshape(bias, dims, site)?;
    join_at(b, site, Binary::Add, value, bias)
}

fn conv3(
    b: &mut Builder,
    mut call: Call<'_>,
    mut input: ValueId,
    weight: ValueId,
) -> Result<ValueId, GraphError> {
    let bias = call.float_optional(b, 2)?;
    let site = call.site.clone();
    let (rows, channels, size) = volume(b, &site, input)?;
    let given = b.dims(weight).to_vec();
    let groups = groups_of(&mut call)?;
    let misfit = || {
        site.shape(format!(
            "weights {} do not fit {channels} channels in {groups} group(s)",
            shape::display(&given)
        ))
    };
    let (out_channels, group_channels, kernel) = match given[..] {
        [Dim::Fixed(out), Dim::Fixed(inner), Dim::Fixed(d), Dim::Fixed(h), Dim::Fixed(w)] => {
            (out, inner, [d, h, w])
        }
        _ => return Err(misfit()),
    };
    if group_channels.checked_mul(groups) != Some(channels) || out_channels % groups != 0 {
        return Err(misfit());
    }
    let stated = call.ints("kernel_shape")?;
    if stated.is_some() && sizes(&site, "kernel_shape", stated, false, 1, 1)? != kernel {
        return Err(site.shape(format!("kernel_shape differs from the weights {}", shape::display(&given))));
    }
    let w = window(&mut call, size, kernel, false, false)?;
    call.finish(3)?;
    let mut padding = w.before;
    if w.before != w.after {
        input = surround_spatial(b, &site, input, &w.before, &w.after, 0.0)?;
        padding = [0; 3];
    }
    let spec = Conv3Spec { strides: w.strides, padding, dilations: w.dilations, groups };
    let mut dims = vec![rows, Dim::Fixed(out_channels)];
    dims.extend(w.out.map(Dim::Fixed));
    let out = b.push(Op::Conv3(spec), &[input, weight], dims, &site)?;
    match bias {
        Some(bias) => add_bias(b, &site, out, bias),
        None => Ok(out),
    }
}

/// How a pool joins the elements of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pool {
    Max,
    Average,
}

/// One pool over two axes, with the padding that the model states.
struct Plane {
    kernel: [usize; 2],
    window: Window<2>,
    kind: Pool,
    count_include_pad: bool,
}

pub(super) fn pool(b: &mut Builder, mut call: Call<'_>, kind: Pool) -> Result<ValueId, GraphError> {
    let input = call.float(b, 0)?;
    let site = call.site.clone();
    let kernel = call.ints("kernel_shape")?.ok_or_else(|| site.form("kernel_shape is missing"))?;
    let average = kind == Pool::Average;
    let count_include_pad = average && call.int("count_include_pad", 0)? != 0;
    if !average {
        call.only("storage_order", 0)?;
    }
    let ceil = call.int("ceil_mode", 0)? != 0;
    if b.dims(input).len() == 5 {
        return pool3(b, call, input, kernel, kind, count_include_pad, ceil);
    }
    let (input, [_, _, height, width], line) = spatial(b, &site, input)?;
    let kernel = sizes(&site, "kernel_shape", Some(kernel), line, 1, 1)?;
    let window = window(&mut call, [fixed(height), fixed(width)], kernel, line, ceil)?;
    call.finish_with(1, if average { 1 } else { 2 })?;
    let plane = Plane { kernel, window, kind, count_include_pad };
    let out = pool_plane(b, &site, input, &plane)?;
    restore(b, &site, out, line)
}

/// The largest elements of windows and, if they are read, their places.
pub(super) fn max_pool(b: &mut Builder, mut call: Call<'_>) -> Result<Vec<ValueId>, GraphError> {
    if !call.more_outputs().any(|name| b.reads.contains_key(name)) {
        return Ok(vec![pool(b, call, Pool::Max)?]);
    }
    let input = call.float(b, 0)?;
    let site = call.site.clone();
    let kernel = call.ints("kernel_shape")?.ok_or_else(|| site.form("kernel_shape is missing"))?;
    call.only("storage_order", 0)?;
    let ceil = call.int("ceil_mode", 0)? != 0;
    if b.dims(input).len() == 5 {
        return Err(site.form(
            "the places of a pool over three dimensions are not supported (use its first output alone)",
        ));
    }
    let (input, [_, _, height, width], line) = spatial(b, &site, input)?;
    let kernel = sizes(&site, "kernel_shape", Some(kernel), line, 1, 1)?;
    let size = [fixed(height), fixed(width)];
    let window = window(&mut call, size, kernel, line, ceil)?;
    call.finish_with(1, 2)?;
    let plane = Plane { kernel, window, kind: Pool::Max, count_include_pad: false };
    let out = pool_plane(b, &site, input, &plane)?;
    let padded = surround_spatial(b, &site, input, &window.before, &window.reached, f32::NEG_INFINITY)?;
    let windows = Windows {
        kernel,
        strides: window.strides,
        dilations: window.dilations,
        before: window.before,
        out: window.out,
        size,
    };
    let places = unpool::places(b, &site, padded, &windows)?;
    let out = restore(b, &site, out, line)?;
    let found = restore(b, &site, places, line)?;
    b.row_numbers.insert(found, RowNumber::Plane { size, is_distinct: windows.is_distinct() });
    Ok(vec![out, found])
}

/// Elements divided by a power of the mean square of their neighbours in the channels.
pub(super) fn local_response(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let input = call.float(b, 0)?;
    let site = call.site.clone();
    let alpha = call.float_attribute("alpha", 0.0001)?;
    let beta = call.float_attribute("beta", 0.75)?;
    let bias = call.float_attribute("bias", 1.0)?;
    let size = call.int("size", 0)?;
    call.finish(1)?;
    if beta.abs() >= EXPONENT_BELOW {
        return Err(site.form(format!("its exponent beta is {beta}, less than 2^31 is supported")));
    }
    let dims = b.dims(input).to_vec();
    let [rows @ Dim::Rows(_), Dim::Fixed(channels), ref rest @ ..] = dims[..] else {
        return Err(site.shape(format!("{} has no channels behind its rows", shape::display(&dims))));
    };
    let size = usize::try_from(size).ok().filter(|size| (1..=WINDOW_MAX).contains(size));
    let size = size.ok_or_else(|| site.form("size must be the number of channels in a window, from 1 on"))?;
    let rest = shape::check(rest, &site)?;
    let square = join_at(b, &site, Binary::Mul, input, input)?;
    // The channels become the height of one image for each row.
    let image = vec![rows, Dim::Fixed(1), Dim::Fixed(channels), Dim::Fixed(rest)];
    let image = b.reshape(square, image, &site)?;
    let (before, after) = ((size - 1) / 2, size / 2);
    let window = Window {
        strides: [1; 2],
        dilations: [1; 2],
        before: [before, 0],
        after: [after, 0],
        reached: [after, 0],
        out: [channels, rest],
    };
    let plane = Plane { kernel: [size, 1], window, kind: Pool::Average, count_include_pad: true };
    let mean = pool_plane(b, &site, image, &plane)?;
    let mean = b.reshape(mean, dims, &site)?;
    let scaled = map(b, &site, Unary::Scale(alpha), mean)?;
    let base = map(b, &site, Unary::Shift(bias), scaled)?;
    let divisor = map(b, &site, Unary::Pow(beta), base)?;
    join_at(b, &site, Binary::Div, input, divisor)
}

fn pool3(
    b: &mut Builder,
    mut call: Call<'_>,
    input: ValueId,
    kernel: Vec<i64>,
    kind: Pool,
    count_include_pad: bool,
    ceil: bool,
) -> Result<ValueId, GraphError> {
    let site = call.site.clone();
    let (rows, channels, [depth, height, width]) = volume(b, &site, input)?;
    let kernel: [usize; 3] = sizes(&site, "kernel_shape", Some(kernel), false, 1, 1)?;
    let w = window(&mut call, [depth, height, width], kernel, false, ceil)?;
    call.finish_with(1, if kind == Pool::Max { 2 } else { 1 })?;
    let [_, down, across] = w.out;
    let part = |axes: [Option<usize>; 2]| {
        let of = |all: [usize; 3], default: usize| axes.map(|axis| axis.map_or(default, |axis| all[axis]));
        Plane {
            kernel: of(kernel, 1),
            window: Window {
                strides: of(w.strides, 1),
                dilations: of(w.dilations, 1),
                before: of(w.before, 0),
                after: of(w.after, 0),
                reached: of(w.reached, 0),
                out: of(w.out, down * across),
            },
            kind,
            count_include_pad,
        }
    };
    let dims = |sizes: &[usize]| {
        std::iter::once(rows).chain(sizes.iter().copied().map(Dim::Fixed)).collect::<Vec<_>>()
    };
    let deep = channels
        .checked_mul(depth)
        .ok_or_else(|| site.shape(format!("{channels} channels of depth {depth}")))?;
    let planes = b.reshape(input, dims(&[deep, height, width]), &site)?;
    let planes = pool_plane(b, &site, planes, &part([Some(1), Some(2)]))?;
    let lines = b.reshape(planes, dims(&[channels, depth, down * across]), &site)?;
    let lines = pool_plane(b, &site, lines, &part([Some(0), None]))?;
    b.reshape(lines, dims(&[channels, w.out[0], down, across]), &site)
}

/// Appends a pool over the last two axes of a value of rank 4.
fn pool_plane(
    b: &mut Builder,
    site: &NodeRef,
    mut input: ValueId,
    plane: &Plane,
) -> Result<ValueId, GraphError> {
    let (kernel, w) = (plane.kernel, plane.window);
    let size = [2, 3].map(|axis| fixed(b.dims(input)[axis]));
    // A window inside the padding alone would have no largest element.
    for pads in [w.before, w.after] {
        if (0..2).any(|a| pads[a] * 2 > kernel[a]) {
            return Err(site.form(format!("pads {pads:?} exceed half of the window {kernel:?}")));
        }
    }
    let average = plane.kind == Pool::Average;
    if average && w.dilations != [1, 1] {
        return Err(site.form("dilations of an average are not supported"));
    }
    let mut spec = PoolSpec {
        kernel,
        strides: w.strides,
        padding: w.before,
        dilations: w.dilations,
        count_include_pad: plane.count_include_pad,
    };
    let mut dims = b.dims(input)[..2].to_vec();
    dims.extend(w.out.map(Dim::Fixed));
    let op = match plane.kind {
        Pool::Max => Op::MaxPool,
        Pool::Average => Op::AveragePool,
    };
    // Elements that a cut window reaches behind the padding do not count, and the pool would count them as padding.
    if w.before == w.reached && (w.reached == w.after || !plane.count_include_pad) {
        return b.push(op(spec), &[input], dims, site);
    }
    shape::check(&dims, site)?;
    // Elements of window `at` on axis `a` that count.
    let inside = |a: usize, at: usize| {
        let (from, to) = match plane.count_include_pad {
            true => (0, w.before[a] + size[a] + w.after[a]),
            false => (w.before[a], w.before[a] + size[a]),
        };
        // Elements of the window that lie before a place of the padded input.
        let before =
            |place: usize| place.saturating_sub(at * w.strides[a]).div_ceil(w.dilations[a]).min(kernel[a]);
        before(to) - before(from)
    };
    if (0..2).any(|a| (0..w.out[a]).any(|at| inside(a, at) == 0)) {
        return Err(site.form("a window holds padding alone"));
    }
    let value = if average { 0.0 } else { f32::NEG_INFINITY };
    input = surround_spatial(b, site, input, &w.before, &w.reached, value)?;
    (spec.padding, spec.count_include_pad) = ([0; 2], true);
    let out = b.push(op(spec), &[input], dims, site)?;
    if !average {
        return Ok(out);
    }
    // The mean of a whole window becomes that of the elements that count.
    let area = (kernel[0] * kernel[1]) as f32;
    b.budget.check(w.out[0] * w.out[1], site)?;
    let across: Vec<usize> = (0..w.out[1]).map(|at| inside(1, at)).collect();
    let factors = (0..w.out[0])
        .map(|at| inside(0, at))
        .flat_map(|down| across.iter().map(move |across| area / (down * across) as f32))
        .collect();
    let factors = b.constant(&w.out, factors, site)?;
    join_at(b, site, Binary::Mul, out, factors)
}
