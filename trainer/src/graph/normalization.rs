//! Normalisations, written as primitive operations.

use super::arithmetic::{choose, compare_values, join_at, map};
use super::builder::{Builder, Call, NodeRef};
use super::reduction::{Reduction, fold};
use super::{Binary, Compare, Dim, GraphError, Unary, ValueId, shape, training};

/// (x − mean) / √(variance + ε) over some axes.
fn standardize(
    b: &mut Builder,
    site: &NodeRef,
    input: ValueId,
    axes: &[usize],
    epsilon: f32,
) -> Result<ValueId, GraphError> {
    let mean = fold(b, site, Reduction::Mean, input, axes, true)?;
    let centred = join_at(b, site, Binary::Sub, input, mean)?;
    let square = join_at(b, site, Binary::Mul, centred, centred)?;
    let variance = fold(b, site, Reduction::Mean, square, axes, true)?;
    let shifted = map(b, site, Unary::Shift(epsilon), variance)?;
    let deviation = map(b, site, Unary::Sqrt, shifted)?;
    join_at(b, site, Binary::Div, centred, deviation)
}

/// The trailing axes from `axis` on, and a check that scale and bias fit them.
fn trailing(
    b: &Builder,
    call: &Call<'_>,
    input: ValueId,
    given: i64,
    factors: [Option<ValueId>; 2],
) -> Result<Vec<usize>, GraphError> {
    let dims = b.dims(input);
    let axis = shape::axis(given, dims.len(), &call.site)?;
    for factor in factors.into_iter().flatten() {
        let fits = shape::broadcast(b.dims(factor), &dims[axis..], &call.site)?;
        if fits != dims[axis..] {
            return Err(call.site.shape(format!(
                "{} does not fit the normalised dimensions {}",
                shape::display(b.dims(factor)),
                shape::display(&dims[axis..])
            )));
        }
    }
    Ok((axis..dims.len()).collect())
}

/// x · scale + bias
fn affine(
    b: &mut Builder,
    site: &NodeRef,
    value: ValueId,
    scale: ValueId,
    bias: Option<ValueId>,
) -> Result<ValueId, GraphError> {
    let scaled = join_at(b, site, Binary::Mul, value, scale)?;
    match bias {
        Some(bias) => join_at(b, site, Binary::Add, scaled, bias),
        None => Ok(scaled),
    }
}

/// A list with one value per channel, as `[channels, 1, …]` with `spatial` ones.
fn per_channel(
    b: &mut Builder,
    site: &NodeRef,
    value: ValueId,
    channels: Dim,
    spatial: usize,
) -> Result<ValueId, GraphError> {
    if b.dims(value) != [channels] {
        return Err(site.shape(format!("{} for {channels} channels", shape::display(b.dims(value)))));
    }
    let mut dims = vec![channels];
    dims.resize(spatial + 1, Dim::Fixed(1));
    b.reshape(value, dims, site)
}

/// (x − mean) / √(variance + ε) · scale + bias over the trailing dimensions.
pub(super) fn layer(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let (input, scale) = (call.float(b, 0)?, call.float(b, 1)?);
    let bias = call.float_optional(b, 2)?;
    let given = call.int("axis", -1)?;
    let epsilon = call.float_attribute("epsilon", 1e-5)?;
    call.only("stash_type", 1)?;
    call.finish(3)?;
    let axes = trailing(b, &call, input, given, [Some(scale), bias])?;
    let normal = standardize(b, &call.site, input, &axes, epsilon)?;
    affine(b, &call.site, normal, scale, bias)
}

/// x / √(mean of x² + ε) · scale over the trailing dimensions.
pub(super) fn root_mean_square(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let (input, scale) = (call.float(b, 0)?, call.float(b, 1)?);
    let given = call.int("axis", -1)?;
    let epsilon = call.float_attribute("epsilon", 1e-5)?;
    call.only("stash_type", 1)?;
    call.finish(2)?;
    let axes = trailing(b, &call, input, given, [Some(scale), None])?;
    let site = &call.site;
    let square = join_at(b, site, Binary::Mul, input, input)?;
    let mean = fold(b, site, Reduction::Mean, square, &axes, true)?;
    let shifted = map(b, site, Unary::Shift(epsilon), mean)?;
    let size = map(b, site, Unary::Sqrt, shifted)?;
    let normal = join_at(b, site, Binary::Div, input, size)?;
    affine(b, site, normal, scale, None)
}

/// Over the spatial dimensions of each channel.
pub(super) fn instance(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let input = call.float(b, 0)?;
    let (scale, bias) = (call.float(b, 1)?, call.float(b, 2)?);
    let epsilon = call.float_attribute("epsilon", 1e-5)?;
    call.finish(3)?;
    let dims = b.dims(input).to_vec();
    let site = &call.site;
    if dims.len() < 3 {
        return Err(site.shape(format!("{} has no spatial dimension", shape::display(&dims))));
    }
    let axes: Vec<usize> = (2..dims.len()).collect();
    let normal = standardize(b, site, input, &axes, epsilon)?;
    let scale = per_channel(b, site, scale, dims[1], axes.len())?;
    let bias = per_channel(b, site, bias, dims[1], axes.len())?;
    affine(b, site, normal, scale, Some(bias))
}

/// Over groups of channels. Scale and bias are per group before opset 21, per channel from it on.
pub(super) fn group(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let input = call.float(b, 0)?;
    let (scale, bias) = (call.float(b, 1)?, call.float(b, 2)?);
    let epsilon = call.float_attribute("epsilon", 1e-5)?;
    let groups = call.int("num_groups", 0)?;
    call.only("stash_type", 1)?;
    call.finish(3)?;
    let site = &call.site;
    let dims = b.dims(input).to_vec();
    let [rows, Dim::Fixed(channels), ref spatial @ ..] = dims[..] else {
        return Err(site.shape(format!("{} has no channels", shape::display(&dims))));
    };
    let groups = usize::try_from(groups)
        .ok()
        .filter(|groups| *groups > 0 && channels % groups == 0)
        .ok_or_else(|| site.form(format!("{groups} groups of {channels} channels")))?;
    let plane = shape::check(spatial, site)?;
    if shape::rows_axis(spatial).is_some() {
        return Err(site.mixes_rows("it normalises over the batch"));
    }
    let inner = channels / groups * plane;
    let folded = b.reshape(input, vec![rows, Dim::Fixed(groups), Dim::Fixed(inner)], site)?;
    let normal = standardize(b, site, folded, &[2], epsilon)?;
    if b.opset < 21 {
        let scale = per_channel(b, site, scale, Dim::Fixed(groups), 1)?;
        let bias = per_channel(b, site, bias, Dim::Fixed(groups), 1)?;
        let scaled = affine(b, site, normal, scale, Some(bias))?;
        return b.reshape(scaled, dims, site);
    }
    let normal = b.reshape(normal, dims.clone(), site)?;
    let scale = per_channel(b, site, scale, dims[1], dims.len() - 2)?;
    let bias = per_channel(b, site, bias, dims[1], dims.len() - 2)?;
    affine(b, site, normal, scale, Some(bias))
}

/// x divided by its norm along an axis.
pub(super) fn norm(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let input = call.float(b, 0)?;
    let given = call.int("axis", -1)?;
    let power = call.int("p", 2)?;
    call.finish(1)?;
    let axis = shape::axis(given, b.dims(input).len(), &call.site)?;
    let kind = match power {
        1 => Reduction::L1,
        2 => Reduction::L2,
        _ => return Err(call.site.form(format!("p = {power} is not supported, only 1 and 2"))),
    };
    let site = &call.site;
    let size = fold(b, site, kind, input, &[axis], true)?;
    // A vector of zeros stays, with a slope of 0.
    let (zero, one) = (b.scalar(0.0, site)?, b.scalar(1.0, site)?);
    let is_zero = compare_values(b, site, Compare::Equal, size, zero)?;
    let divisor = choose(b, site, is_zero, one, size)?;
    let normal = join_at(b, site, Binary::Div, input, divisor)?;
    choose(b, site, is_zero, zero, normal)
}

/// Normalisation by running statistics, which stay; scale and bias are trained. In training mode, see
/// [`training::normalization`].
pub(super) fn batch(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let input = call.float(b, 0)?;
    let (scale, bias) = (call.float(b, 1)?, call.float(b, 2)?);
    let epsilon = call.float_attribute("epsilon", 1e-5)?;
    let momentum = call.float_attribute("momentum", 0.9)?;
    // Before operator set 14, further outputs say that the node trains.
    let has_more = call.more_outputs().next().is_some();
    let trains = call.int("training_mode", 0)? != 0 || b.opset < 14 && has_more;
    call.only("spatial", 1)?;
    call.finish_with(5, if trains { 5 } else { 1 })?;
    let site = &call.site;
    let dims = b.dims(input).to_vec();
    let [_, Dim::Fixed(channels), ref spatial @ ..] = dims[..] else {
        return Err(site.shape(format!("{} has no channels", shape::display(&dims))));
    };
    let statistic = |b: &Builder, index: usize| match call.constant(b, index)? {
        Some((_, elements)) => Ok(elements),
        None => Err(site.form(format!("input {index} is missing"))),
    };
    if trains {
        training::check_statistics(b, &call)?;
    }
    let (mean, variance) = (statistic(b, 3)?, statistic(b, 4)?);
    if mean.len() != channels || variance.len() != channels {
        return Err(site.shape(format!(
            "{} means and {} variances for {channels} channels",
            mean.len(),
            variance.len()
        )));
    }
    if let Some(value) = variance.iter().find(|value| **value + epsilon <= 0.0) {
        return Err(site.form(format!("a variance is {value}")));
    }
    if trains {
        return training::normalization(b, &call, [input, scale, bias], [epsilon, momentum]);
    }
    let inverse = variance.iter().map(|value| 1.0 / (value + epsilon).sqrt()).collect();
    let inverse = b.constant(&[channels], inverse, site)?;
    let mean = b.constant(&[channels], mean, site)?;
    let factor = join_at(b, site, Binary::Mul, scale, inverse)?;
    let moved = join_at(b, site, Binary::Mul, factor, mean)?;
    let offset = join_at(b, site, Binary::Sub, bias, moved)?;
    let factor = per_channel(b, site, factor, dims[1], spatial.len())?;
    let offset = per_channel(b, site, offset, dims[1], spatial.len())?;
    affine(b, site, input, factor, Some(offset))
}
