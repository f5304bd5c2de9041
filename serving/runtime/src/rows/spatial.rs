//! Row rules for convolutions, pooling and other image operators, with rows along the first axis.

use super::call::{Call, Outcome, axis_in};
use super::extent::{Entry, Extent};
use super::value::{Content, Value};

/// Requires that the rows, if any, are along the first axis.
pub(super) fn first_axis(data: &Value) -> Result<(), String> {
    match data.axis() {
        Some((rows, _)) if rows != 0 => Err("it does not read the rows from the first axis".into()),
        _ => Ok(()),
    }
}

/// An input whose rows are along its first axis, and its extents.
pub(super) fn by_row<'a>(call: &'a Call<'_>, place: usize) -> Result<(&'a Value, &'a [Extent]), String> {
    let data = call.data(place)?;
    first_axis(data)?;
    let dims = data.extents()?;
    if dims.is_empty() {
        return Err("its input is one number".into());
    }
    Ok((data, dims))
}

/// Each row keeps its shape; all further inputs are constants.
pub(super) fn keeps_shape(call: &Call<'_>) -> Outcome {
    call.free_from(1)?;
    Ok(vec![by_row(call, 0)?.0.same_shape()])
}

/// Refuses training mode, whose statistics are over all rows.
pub(super) fn batch_normalization(call: &Call<'_>) -> Outcome {
    if call.int("training_mode", 0) != 0 || call.outputs() > 1 {
        return Err("it computes mean and variance over all rows, as in training".into());
    }
    if call.opset < 9 && call.int("spatial", 1) != 1 {
        return Err("it has separate statistics for each position".into());
    }
    keeps_shape(call)
}

pub(super) fn conv(call: &Call<'_>) -> Outcome {
    call.free_from(1)?;
    convolved(call, call.free(1)?)
}

/// A convolution of quantized values, whose scales and zero points are constant.
pub(super) fn qlinear_conv(call: &Call<'_>) -> Outcome {
    call.free_from(1)?;
    convolved(call, call.free(3)?)
}

fn convolved(call: &Call<'_>, weights: &Value) -> Outcome {
    let (data, dims) = by_row(call, 0)?;
    let weights = weights.extents()?;
    if weights.len() != dims.len() || dims.len() < 3 {
        return Err("its weights do not fit its input".into());
    }
    let kernel: Vec<Option<i64>> = weights[2..].iter().map(Extent::as_known).collect();
    let places = windows(call, &dims[2..], &kernel);
    let made = [vec![dims[0].clone(), weights[0].clone()], places].concat();
    Ok(vec![data.like(0, made)])
}

pub(super) fn conv_transpose(call: &Call<'_>) -> Outcome {
    call.free_from(1)?;
    let (data, dims) = by_row(call, 0)?;
    let channels = call.free(1)?.extents()?.get(1).and_then(Extent::as_known);
    let channels = channels.and_then(|channels| channels.checked_mul(call.int("group", 1)));
    let mut made = vec![dims[0].clone(), channels.map_or_else(|| call.fresh(), Extent::known)];
    made.extend(call.unknown(dims.len().saturating_sub(2)));
    Ok(vec![data.like(0, made)])
}

pub(super) fn pool(call: &Call<'_>) -> Outcome {
    if call.operator() == "MaxPool" && call.outputs() > 1 {
        return Err("its indices count positions over all rows".into());
    }
    call.free_from(1)?;
    let (data, dims) = by_row(call, 0)?;
    if dims.len() < 3 {
        return Err("its input has no spatial axes".into());
    }
    let kernel = call.ints("kernel_shape").unwrap_or_default();
    let kernel: Vec<Option<i64>> = (0..dims.len() - 2).map(|place| kernel.get(place).copied()).collect();
    let made = [dims[..2].to_vec(), windows(call, &dims[2..], &kernel)].concat();
    Ok(vec![data.like(0, made)])
}

/// Number of window positions along each axis.
fn windows(call: &Call<'_>, dims: &[Extent], kernel: &[Option<i64>]) -> Vec<Extent> {
    let padding = call.text("auto_pad", "NOTSET");
    let of = |name: &str, place: usize, default: i64| {
        call.ints(name).and_then(|numbers| numbers.get(place).copied()).unwrap_or(default)
    };
    let along = |place: usize| -> Option<i64> {
        let extent = dims[place].as_known()?;
        let stride = of("strides", place, 1);
        if stride < 1 || call.int("ceil_mode", 0) != 0 {
            return None;
        }
        let reach = of("dilations", place, 1).checked_mul(kernel[place]?.checked_sub(1)?)?.checked_add(1)?;
        match padding.as_str() {
            "SAME_UPPER" | "SAME_LOWER" => Some(extent.checked_add(stride - 1)? / stride),
            "NOTSET" | "VALID" => {
                let (before, after) = if padding == "VALID" {
                    (0, 0)
                } else {
                    (of("pads", place, 0), of("pads", place + dims.len(), 0))
                };
                let room = extent.checked_add(before)?.checked_add(after)?.checked_sub(reach)?;
                (room / stride).checked_add(1).filter(|_| room >= 0)
            }
            _ => None,
        }
    };
    (0..dims.len()).map(|place| along(place).map_or_else(|| call.fresh(), Extent::known)).collect()
}

/// One number for each channel.
pub(super) fn global_pool(call: &Call<'_>) -> Outcome {
    call.free_from(1)?;
    let (data, dims) = by_row(call, 0)?;
    let mut made = dims.to_vec();
    made.iter_mut().skip(2).for_each(|extent| *extent = Extent::known(1));
    Ok(vec![data.like(0, made)])
}

/// Moves elements between channels and positions.
pub(super) fn rearranged(call: &Call<'_>) -> Outcome {
    let (data, dims) = by_row(call, 0)?;
    let made = [vec![dims[0].clone()], call.unknown(dims.len() - 1)].concat();
    Ok(vec![data.like(0, made)])
}

/// Samples an image at the positions of a grid, for each row.
pub(super) fn grid_sample(call: &Call<'_>) -> Outcome {
    let (data, dims) = by_row(call, 0)?;
    let (grid, places) = by_row(call, 1)?;
    if data.is_free() != grid.is_free()
        || data.axis() != grid.axis()
        || dims[0] != places[0]
        || dims.len() < 3
    {
        return Err("its images and coordinates do not have the same rows".into());
    }
    let inner = places.get(1..places.len() - 1).unwrap_or_default();
    Ok(vec![data.like(0, [&dims[..2], inner].concat())])
}

/// Resizes every axis except the axis of the rows.
pub(super) fn resize(call: &Call<'_>) -> Outcome {
    let data = call.data(0)?;
    let dims = data.extents()?;
    // ONNX Runtime interpolates along every axis of rank 2 or 3, and along all but the first two axes of rank 4 or 5.
    // It adds neighbors with weight 0 at scale 1, and 0 times infinity is NaN.
    let is_interpolated = call.text("mode", "nearest") != "nearest";
    if is_interpolated && data.axis().is_some_and(|(rows, _)| rows != 0 || dims.len() < 4) {
        return Err("it interpolates between rows".into());
    }
    if call.text("coordinate_transformation_mode", "") == "tf_crop_and_resize"
        || !matches!(call.text("keep_aspect_ratio_policy", "stretch").as_str(), "" | "stretch")
    {
        return Err("its sizes depend on each other".into());
    }
    let axes = match call.ints("axes") {
        // An empty list means the same as no list.
        Some(axes) if !axes.is_empty() => {
            axes.iter().map(|axis| axis_in(*axis, dims.len())).collect::<Result<Vec<_>, _>>()?
        }
        _ => (0..dims.len()).collect(),
    };
    let (scales, sizes) =
        if call.operator() == "Upsample" || call.opset < 11 { (1, usize::MAX) } else { (2, 3) };
    let has_sizes =
        call.given(sizes).is_some_and(|sizes| sizes.entries().is_none_or(|sizes| !sizes.is_empty()));
    let mut made = dims.to_vec();
    for (place, axis) in axes.iter().enumerate() {
        let is_rows = data.axis().is_some_and(|(rows, _)| rows == *axis);
        let size = call.given(sizes).and_then(Value::entries).and_then(|sizes| sizes.get(place));
        let scale = match call.given(scales).map(|scales| &scales.content) {
            // Sizes take precedence over scales.
            _ if has_sizes => None,
            Some(Content::Floats(scales)) => scales.get(place).copied(),
            Some(_) => None,
            None => call.floats("scales").and_then(|scales| scales.get(place)).copied(),
        };
        let same = scale == Some(1.0) && size.is_none()
            || matches!(size, Some(Entry::Known(size)) if *size == dims[*axis]);
        if is_rows && !same {
            return Err("it changes the number of rows, or its output size is not known".into());
        }
        if !same {
            made[*axis] = match size {
                Some(Entry::Known(size)) if size.batches() == 0 && size.is_natural() => size.clone(),
                Some(size) if size.is_of_rows() => return Err("a size depends on the number of rows".into()),
                _ => call.fresh(),
            };
        }
    }
    for place in 1..call.inputs.len() {
        if place != sizes {
            call.free_if_given(place)?;
        }
    }
    Ok(vec![data.like(data.axis().map_or(0, |(rows, _)| rows), made)])
}

/// Spectra of windows of a signal.
pub(super) fn stft(call: &Call<'_>) -> Outcome {
    call.free_from(1)?;
    let (data, dims) = by_row(call, 0)?;
    if dims.len() < 2 {
        return Err("its input has no signal axis".into());
    }
    let made = [vec![dims[0].clone()], call.unknown(2), vec![Extent::known(2)]].concat();
    Ok(vec![data.like(0, made)])
}
