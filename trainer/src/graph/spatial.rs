//! Convolution and pooling over one or two spatial dimensions.
//!
//! One-dimensional forms become two-dimensional ones with a width of 1. Unequal padding of a convolution
//! becomes a separate padding operation.

use super::builder::{Builder, Call, NodeRef};
use super::{ConvSpec, Dim, GraphError, Op, PoolSpec, ValueId, shape};

/// Largest kernel, stride, padding or dilation.
const WINDOW_MAX: usize = 1 << 20;

/// The attributes that convolutions and pools share, widened to two dimensions.
struct Window {
    strides: [usize; 2],
    dilations: [usize; 2],
    before: [usize; 2],
    after: [usize; 2],
    out: [usize; 2],
}

/// Rows, channels and the two spatial sizes of a value; whether it had one spatial dimension.
fn spatial(b: &mut Builder, site: &NodeRef, value: ValueId) -> Result<(ValueId, [Dim; 4], bool), GraphError> {
    let mut dims = b.dims(value).to_vec();
    let line = dims.len() == 3;
    if line {
        dims.push(Dim::Fixed(1));
    }
    let [rows, channels, height, width] = dims[..] else {
        return Err(
            site.form(format!("{} must have one or two spatial dimensions", shape::display(b.dims(value))))
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

/// Per-axis sizes from an attribute, or 1 (0 for pads). A one-dimensional form gets a fixed width.
fn sizes(
    site: &NodeRef,
    name: &str,
    given: Option<Vec<i64>>,
    line: bool,
    default: usize,
    least: usize,
) -> Result<[usize; 2], GraphError> {
    let Some(given) = given else {
        return Ok([default; 2]);
    };
    let bad = || site.form(format!("{name} = {given:?} is not supported here"));
    let found = given
        .iter()
        .map(|size| {
            usize::try_from(*size).ok().filter(|size| (least..=WINDOW_MAX).contains(size)).ok_or_else(bad)
        })
        .collect::<Result<Vec<_>, _>>()?;
    match (line, &found[..]) {
        (true, [height]) => Ok([*height, default]),
        (false, [height, width]) => Ok([*height, *width]),
        _ => Err(bad()),
    }
}

fn window(
    call: &mut Call<'_>,
    size: [usize; 2],
    kernel: [usize; 2],
    line: bool,
) -> Result<Window, GraphError> {
    let strides = call.ints("strides")?;
    let strides = sizes(&call.site, "strides", strides, line, 1, 1)?;
    let dilations = call.ints("dilations")?;
    let dilations = sizes(&call.site, "dilations", dilations, line, 1, 1)?;
    let pads = call.ints("pads")?;
    let mode = call.string("auto_pad")?.unwrap_or_default();
    let reach = [0, 1].map(|a| dilations[a] * (kernel[a] - 1) + 1);
    let (before, after) = match (mode.as_str(), pads) {
        ("" | "NOTSET", None) | ("VALID", None) => ([0; 2], [0; 2]),
        ("" | "NOTSET", Some(pads)) => {
            if pads.len() != if line { 2 } else { 4 } {
                return Err(call.site.form(format!("pads = {pads:?}")));
            }
            let (before, after) = pads.split_at(pads.len() / 2);
            (
                sizes(&call.site, "pads", Some(before.to_vec()), line, 0, 0)?,
                sizes(&call.site, "pads", Some(after.to_vec()), line, 0, 0)?,
            )
        }
        ("SAME_UPPER" | "SAME_LOWER", None) => {
            let total = [0, 1].map(|a| {
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
    let mut out = [0; 2];
    for a in 0..2 {
        let padded = size[a] + before[a] + after[a];
        let steps = padded.checked_sub(reach[a]).ok_or_else(|| {
            call.site.shape(format!("a window of {} does not fit a padded size of {padded}", reach[a]))
        })?;
        out[a] = steps / strides[a] + 1;
    }
    Ok(Window { strides, dilations, before, after, out })
}

fn fixed(dim: Dim) -> usize {
    dim.at(1)
}

/// Restores the three dimensions of a one-dimensional form's output.
fn restore(b: &mut Builder, site: &NodeRef, value: ValueId, line: bool) -> Result<ValueId, GraphError> {
    let mut dims = b.dims(value).to_vec();
    if line {
        dims.pop();
    }
    b.reshape(value, dims, site)
}

pub(super) fn conv(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let (input, weight) = (call.float(b, 0)?, call.float(b, 1)?);
    let bias = call.float_optional(b, 2)?;
    let site = call.site.clone();
    let (mut input, [rows, channels, height, width], line) = spatial(b, &site, input)?;
    let given = b.dims(weight).to_vec();
    let (weight, kernel_dims, weight_line) = spatial(b, &site, weight)?;
    let [out_channels, group_channels, kernel_height, kernel_width] = kernel_dims.map(fixed);
    let groups = call.int("group", 1)?;
    let groups = usize::try_from(groups)
        .ok()
        .filter(|groups| *groups > 0)
        .ok_or_else(|| site.form(format!("group = {groups}")))?;
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
    let w = window(&mut call, [fixed(height), fixed(width)], kernel, line)?;
    call.finish(3)?;
    let mut padding = w.before;
    if w.before != w.after {
        let padded = [0, 1].map(|a| [fixed(height), fixed(width)][a] + w.before[a] + w.after[a]);
        let dims = vec![rows, channels, Dim::Fixed(padded[0]), Dim::Fixed(padded[1])];
        input = b.push(Op::Pad(w.before, w.after), &[input], dims, &site)?;
        padding = [0; 2];
    }
    let mut inputs = vec![input, weight];
    if let Some(bias) = bias {
        if b.dims(bias) != [Dim::Fixed(out_channels)] {
            return Err(
                site.shape(format!("bias {} for {out_channels} channels", shape::display(b.dims(bias))))
            );
        }
        inputs.push(bias);
    }
    let spec = ConvSpec { strides: w.strides, padding, dilations: w.dilations, groups };
    let dims = vec![rows, Dim::Fixed(out_channels), Dim::Fixed(w.out[0]), Dim::Fixed(w.out[1])];
    let out = b.push(Op::Conv(spec), &inputs, dims, &site)?;
    restore(b, &site, out, line)
}

pub(super) fn pool(
    b: &mut Builder,
    mut call: Call<'_>,
    op: fn(PoolSpec) -> Op,
) -> Result<ValueId, GraphError> {
    let input = call.float(b, 0)?;
    let site = call.site.clone();
    let (input, [rows, channels, height, width], line) = spatial(b, &site, input)?;
    let kernel = call.ints("kernel_shape")?.ok_or_else(|| site.form("kernel_shape is missing"))?;
    let kernel = sizes(&site, "kernel_shape", Some(kernel), line, 1, 1)?;
    let average = site.op == "AveragePool";
    let count_include_pad = average && call.int("count_include_pad", 0)? != 0;
    if !average {
        call.only("storage_order", 0)?;
    }
    call.only("ceil_mode", 0)?;
    let w = window(&mut call, [fixed(height), fixed(width)], kernel, line)?;
    call.finish(1)?;
    if w.before != w.after {
        return Err(site.form(format!("padding differs between sides ({:?} and {:?})", w.before, w.after)));
    }
    // A window inside the padding alone would have no largest element.
    if (0..2).any(|a| w.before[a] * 2 > kernel[a]) {
        return Err(site.form(format!("pads {:?} exceed half of the window {kernel:?}", w.before)));
    }
    if average && w.dilations != [1, 1] {
        return Err(site.form("dilations of an average are not supported"));
    }
    let spec =
        PoolSpec { kernel, strides: w.strides, padding: w.before, dilations: w.dilations, count_include_pad };
    let dims = vec![rows, channels, Dim::Fixed(w.out[0]), Dim::Fixed(w.out[1])];
    let out = b.push(op(spec), &[input], dims, &site)?;
    restore(b, &site, out, line)
}
