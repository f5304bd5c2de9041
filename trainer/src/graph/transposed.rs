//! Transposed convolution over one to three spatial dimensions, and Col2Im, which is one with weights of 0 and 1.
//!
//! All of the transpose is computed, then the part is cut out that the pads leave. Over three dimensions it is a
//! convolution with mirrored weights over the input with zeros between its elements.

use super::builder::{Builder, Call, NodeRef};
use super::movement::{select, surround};
use super::spatial::{
    add_bias, both_sides, fixed, groups_of, restore, sizes, spatial, surround_spatial, volume,
};
use super::{Conv3Spec, ConvSpec, Dim, GraphError, Op, ValueId, shape};

/// What `N` spatial axes of a transposed convolution become.
struct Extent<const N: usize> {
    strides: [usize; N],
    dilations: [usize; N],
    /// Elements that a window reaches over.
    reach: [usize; N],
    /// Sizes of the whole transpose.
    full: [usize; N],
    /// Elements that are cut off before the output.
    before: [usize; N],
    out: [usize; N],
}

pub(super) fn conv_transpose(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let (input, weight) = (call.float(b, 0)?, call.float(b, 1)?);
    let bias = call.float_optional(b, 2)?;
    let site = call.site.clone();
    let groups = groups_of(&mut call)?;
    if b.dims(input).len() == 5 {
        let out = conv_transpose3(b, call, input, weight, groups)?;
        return with_bias(b, &site, out, bias);
    }
    let (input, [rows, channels, height, width], line) = spatial(b, &site, input)?;
    let given = b.dims(weight).to_vec();
    let (weight, kernel_dims, weight_line) = spatial(b, &site, weight)?;
    let [in_channels, group_channels, kernel_height, kernel_width] = kernel_dims.map(fixed);
    if weight_line != line || !fits(&given, in_channels, fixed(channels), groups) {
        return Err(misfit(&site, &given, fixed(channels), groups));
    }
    let (size, kernel) = ([fixed(height), fixed(width)], [kernel_height, kernel_width]);
    let extent = extent(&mut call, &given, size, kernel, line)?;
    let out_channels = group_channels.saturating_mul(groups);
    let out = plane(b, &site, [input, weight], [rows, Dim::Fixed(out_channels)], &extent, groups)?;
    let out = with_bias(b, &site, out, bias)?;
    restore(b, &site, out, line)
}

fn with_bias(
    b: &mut Builder,
    site: &NodeRef,
    value: ValueId,
    bias: Option<ValueId>,
) -> Result<ValueId, GraphError> {
    match bias {
        Some(bias) => add_bias(b, site, value, bias),
        None => Ok(value),
    }
}

/// Whether weights of this shape suit the channels of the input.
fn fits(given: &[Dim], in_channels: usize, channels: usize, groups: usize) -> bool {
    shape::rows_axis(given).is_none() && in_channels == channels && in_channels.is_multiple_of(groups)
}

fn misfit(site: &NodeRef, given: &[Dim], channels: usize, groups: usize) -> GraphError {
    site.shape(format!(
        "weights {} do not fit {channels} channels in {groups} group(s)",
        shape::display(given)
    ))
}

/// Reads the attributes of a transposed convolution.
fn extent<const N: usize>(
    call: &mut Call<'_>,
    weight: &[Dim],
    size: [usize; N],
    kernel: [usize; N],
    line: bool,
) -> Result<Extent<N>, GraphError> {
    let site = call.site.clone();
    let stated = call.ints("kernel_shape")?;
    if stated.is_some() && sizes(&site, "kernel_shape", stated, line, 1, 1)? != kernel {
        return Err(site.shape(format!("kernel_shape differs from the weights {}", shape::display(weight))));
    }
    let strides = call.ints("strides")?;
    let strides: [usize; N] = sizes(&site, "strides", strides, line, 1, 1)?;
    let dilations = call.ints("dilations")?;
    let dilations: [usize; N] = sizes(&site, "dilations", dilations, line, 1, 1)?;
    let extra = call.ints("output_padding")?;
    let extra: [usize; N] = sizes(&site, "output_padding", extra, line, 0, 0)?;
    let pads = call.ints("pads")?;
    let output = call.ints("output_shape")?;
    let mode = call.string("auto_pad")?.unwrap_or_default();
    call.finish(3)?;
    let (reach, full) = whole(&site, size, kernel, strides, dilations)?;
    let wanted: Option<[usize; N]> = match (mode.as_str(), output) {
        (_, Some(output)) => Some(sizes(&site, "output_shape", Some(output), line, 1, 1)?),
        ("SAME_UPPER" | "SAME_LOWER", None) => {
            Some(std::array::from_fn(|a| size[a].saturating_mul(strides[a])))
        }
        ("" | "NOTSET" | "VALID", None) => None,
        (mode, None) => return Err(site.form(format!("auto_pad = {mode:?} is not known"))),
    };
    let reached: [usize; N] = std::array::from_fn(|a| full[a].saturating_add(extra[a]));
    let (before, after) = match (wanted, pads) {
        (None, None) => ([0; N], [0; N]),
        (None, Some(pads)) => both_sides(&site, &pads, line)?,
        (Some(wanted), _) => {
            // An output beyond the last window holds the bias alone.
            let total: [usize; N] = std::array::from_fn(|a| reached[a].saturating_sub(wanted[a]));
            let (less, more) = (total.map(|t| t / 2), total.map(|t| t.div_ceil(2)));
            if mode == "SAME_UPPER" { (less, more) } else { (more, less) }
        }
    };
    let mut out = [0; N];
    for a in 0..N {
        let left = reached[a].saturating_sub(before[a]).saturating_sub(after[a]);
        out[a] = wanted.map_or(left, |wanted| wanted[a]);
        if out[a] == 0 {
            return Err(site.shape(format!(
                "pads of {} and {} leave nothing of {} elements",
                before[a], after[a], reached[a]
            )));
        }
    }
    Ok(Extent { strides, dilations, reach, full, before, out })
}

/// The reach of a window, and the sizes of the whole transpose.
fn whole<const N: usize>(
    site: &NodeRef,
    size: [usize; N],
    kernel: [usize; N],
    strides: [usize; N],
    dilations: [usize; N],
) -> Result<([usize; N], [usize; N]), GraphError> {
    let (mut reach, mut full) = ([0; N], [0; N]);
    for a in 0..N {
        let sizes = (kernel[a] - 1).checked_mul(dilations[a]).and_then(|span| {
            let reach = span.checked_add(1)?;
            Some((reach, (size[a] - 1).checked_mul(strides[a])?.checked_add(reach)?))
        });
        (reach[a], full[a]) = sizes.ok_or_else(|| site.shape("its output is too large"))?;
    }
    Ok((reach, full))
}

/// Appends a transposed convolution of rank 4.
fn plane(
    b: &mut Builder,
    site: &NodeRef,
    inputs: [ValueId; 2],
    [rows, channels]: [Dim; 2],
    extent: &Extent<2>,
    groups: usize,
) -> Result<ValueId, GraphError> {
    let spec = ConvSpec { strides: extent.strides, padding: [0; 2], dilations: extent.dilations, groups };
    let [height, width] = extent.full.map(Dim::Fixed);
    let out = b.push(Op::ConvTranspose(spec), &inputs, vec![rows, channels, height, width], site)?;
    cut(b, site, out, extent)
}

/// The output in the whole transpose; what lies behind its last window is 0.
fn cut<const N: usize>(
    b: &mut Builder,
    site: &NodeRef,
    mut value: ValueId,
    extent: &Extent<N>,
) -> Result<ValueId, GraphError> {
    let mut missing = [0; N];
    for (a, missing) in missing.iter_mut().enumerate() {
        let (full, before) = (extent.full[a], extent.before[a]);
        let end = before.saturating_add(extent.out[a]);
        *missing = end.saturating_sub(full);
        let kept = end.min(full).saturating_sub(before);
        value = b.slice(value, a + 2, before.min(full), kept, site)?;
    }
    surround_spatial(b, site, value, &[0; N], &missing, 0.0)
}

fn conv_transpose3(
    b: &mut Builder,
    mut call: Call<'_>,
    input: ValueId,
    weight: ValueId,
    groups: usize,
) -> Result<ValueId, GraphError> {
    let site = call.site.clone();
    let (rows, channels, size) = volume(b, &site, input)?;
    let given = b.dims(weight).to_vec();
    let [Dim::Fixed(in_channels), Dim::Fixed(group_channels), Dim::Fixed(d), Dim::Fixed(h), Dim::Fixed(w)] =
        given[..]
    else {
        return Err(misfit(&site, &given, channels, groups));
    };
    if !fits(&given, in_channels, channels, groups) {
        return Err(misfit(&site, &given, channels, groups));
    }
    let kernel = [d, h, w];
    let extent = extent(&mut call, &given, size, kernel, false)?;
    let mut spread = input;
    let mut mirrored = weight;
    for (a, length) in kernel.into_iter().enumerate() {
        spread = with_gaps(b, &site, spread, a + 2, extent.strides[a])?;
        if length > 1 {
            mirrored = select(b, &site, mirrored, a + 2, (0..length).rev().collect())?;
        }
    }
    // The input and output channels of each group change places.
    let deep = |sizes: &[usize]| sizes.iter().copied().map(Dim::Fixed).collect::<Vec<_>>();
    let per_group = in_channels / groups;
    let out_channels = group_channels.saturating_mul(groups);
    let apart = b.reshape(mirrored, deep(&[groups, per_group, group_channels, d, h, w]), &site)?;
    let turned = b.permute(apart, vec![0, 2, 1, 3, 4, 5], &site)?;
    let turned = b.reshape(turned, deep(&[out_channels, per_group, d, h, w]), &site)?;
    let padding = extent.reach.map(|reach| reach - 1);
    let spec = Conv3Spec { strides: [1; 3], padding, dilations: extent.dilations, groups };
    let mut dims = vec![rows, Dim::Fixed(out_channels)];
    dims.extend(extent.full.map(Dim::Fixed));
    let out = b.push(Op::Conv3(spec), &[spread, turned], dims, &site)?;
    cut(b, &site, out, &extent)
}

/// Appends zeros between the elements of an axis, so that they are `stride` apart.
fn with_gaps(
    b: &mut Builder,
    site: &NodeRef,
    value: ValueId,
    axis: usize,
    stride: usize,
) -> Result<ValueId, GraphError> {
    if stride == 1 {
        return Ok(value);
    }
    let mut dims = b.dims(value).to_vec();
    let size = fixed(dims[axis]);
    let outer = shape::elements_at(&dims[1..=axis], 1);
    let inner = shape::elements_at(&dims[axis + 1..], 1);
    let apart = vec![dims[0], Dim::Fixed(outer), Dim::Fixed(1), Dim::Fixed(inner)];
    let apart = b.reshape(value, apart, site)?;
    let apart = surround(b, site, apart, vec![0; 4], &[0, 0, stride - 1, 0], 0.0)?;
    dims[axis] = Dim::Fixed(size * stride);
    let spread = b.reshape(apart, dims, site)?;
    b.slice(spread, axis, 0, (size - 1) * stride + 1, site)
}

/// Sums of blocks at their places in an image, as `torch.nn.Fold` makes them.
pub(super) fn col2im(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let input = call.float(b, 0)?;
    let site = call.site.clone();
    let stated =
        |found: Option<Vec<i64>>, name: &str| found.ok_or_else(|| site.form(format!("{name} is missing")));
    let image = stated(call.ints_input(b, 1)?, "its image_shape")?;
    let block = stated(call.ints_input(b, 2)?, "its block_shape")?;
    let line = match image.len() {
        1 => true,
        2 => false,
        rank => return Err(site.form(format!("{rank} spatial dimensions: one and two are supported"))),
    };
    let image: [usize; 2] = sizes(&site, "image_shape", Some(image), line, 1, 1)?;
    let block: [usize; 2] = sizes(&site, "block_shape", Some(block), line, 1, 1)?;
    let strides = call.ints("strides")?;
    let strides: [usize; 2] = sizes(&site, "strides", strides, line, 1, 1)?;
    let dilations = call.ints("dilations")?;
    let dilations: [usize; 2] = sizes(&site, "dilations", dilations, line, 1, 1)?;
    let (before, after) = match call.ints("pads")? {
        Some(pads) => both_sides(&site, &pads, line)?,
        None => ([0; 2], [0; 2]),
    };
    call.finish(3)?;
    let mut steps = [0; 2];
    for a in 0..2 {
        let padded = image[a] + before[a] + after[a];
        let reach = (block[a] - 1) * dilations[a] + 1;
        let span = padded.checked_sub(reach).ok_or_else(|| {
            site.shape(format!("a block that reaches over {reach} does not fit a padded size of {padded}"))
        })?;
        steps[a] = span / strides[a] + 1;
    }
    let taps = block[0] * block[1];
    let (rows, deep) = match *b.dims(input) {
        [rows @ Dim::Rows(_), Dim::Fixed(deep), Dim::Fixed(blocks)]
            if deep.is_multiple_of(taps) && blocks == steps[0] * steps[1] =>
        {
            (rows, deep)
        }
        _ => {
            return Err(site.shape(format!(
                "{} does not hold blocks of {block:?} at {steps:?} places: [rows, channels · {taps}, {}] is needed",
                shape::display(b.dims(input)),
                steps[0] * steps[1]
            )));
        }
    };
    let channels = deep / taps;
    // Each tap of a block is an input channel that has one place in the window.
    let elements = deep.saturating_mul(taps);
    b.budget.check(elements, &site)?;
    let mut weights = vec![0.0; elements];
    for channel in 0..deep {
        weights[channel * taps + channel % taps] = 1.0;
    }
    let weights = b.constant(&[deep, 1, block[0], block[1]], weights, &site)?;
    let dims = vec![rows, Dim::Fixed(deep), Dim::Fixed(steps[0]), Dim::Fixed(steps[1])];
    let input = b.reshape(input, dims, &site)?;
    let (reach, full) = whole(&site, steps, block, strides, dilations)?;
    let extent = Extent { strides, dilations, reach, full, before, out: image };
    let out = plane(b, &site, [input, weights], [rows, Dim::Fixed(channels)], &extent, channels)?;
    restore(b, &site, out, line)
}
