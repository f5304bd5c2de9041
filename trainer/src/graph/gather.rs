//! Gather: elements at constant positions, and rows of a table at positions that the input holds or that are computed
//! from it within a known range.

use std::rc::Rc;

use super::builder::{Builder, Call};
use super::movement::select;
use super::ranges;
use super::read::INDEX_BELOW;
use super::rows;
use super::types::{self, Kind};
use super::{Dim, GraphError, Op, QUOTED_CALL, ValueId, shape};

pub(super) fn gather(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let data = call.value(b, 0)?;
    let given = call.int("axis", 0)?;
    call.finish(2)?;
    let dims = b.dims(data).to_vec();
    let axis = shape::axis(given, dims.len(), &call.site)?;
    let Dim::Fixed(size) = dims[axis] else {
        return Err(call.site.mixes_rows("it picks rows of the batch"));
    };
    if !call.is_ints(b, 1) {
        let positions = call.float(b, 1)?;
        return lookup(b, &call, data, axis, size, positions);
    }
    let positions = call.needed_numbers(b, 1)?.clone();
    let known = positions.known().ok_or_else(|| call.site.form("its positions are not constant"))?;
    let places = known
        .iter()
        .map(|position| shape::axis(*position, size, &call.site))
        .collect::<Result<Vec<_>, _>>()?;
    let picked = select(b, &call.site, data, axis, places)?;
    let mut target = dims[..axis].to_vec();
    target.extend(positions.dims.iter().copied().map(Dim::Fixed));
    target.extend(&dims[axis + 1..]);
    b.reshape(picked, target, &call.site)
}

/// Rows of a table by the whole numbers of the input, as an embedding.
fn lookup(
    b: &mut Builder,
    call: &Call<'_>,
    data: ValueId,
    axis: usize,
    size: usize,
    positions: ValueId,
) -> Result<ValueId, GraphError> {
    let is_whole = call.element(b, 1).is_some_and(|element| types::kind(element) == Kind::Integer);
    let computed = || {
        call.site.form(
            "its positions are computed, and their range is not known; constant ones, whole numbers of an int64 input, \
             and those whose range follows from such ones are supported",
        )
    };
    if !is_whole {
        return Err(computed());
    }
    if axis != 0 || shape::rows_axis(b.dims(data)).is_some() {
        return Err(call.site.form(format!(
            "positions of the input select from axis 0 of a table, not from axis {axis} of {}",
            shape::display(b.dims(data))
        )));
    }
    let bound = u32::try_from(size).ok().filter(|size| *size <= INDEX_BELOW).ok_or_else(|| {
        call.site.form(format!(
            "a table of {size} rows: positions are float32 numbers, which tell at most {INDEX_BELOW} rows apart (split the table)"
        ))
    })?;
    let positions = match b.origins.get(&positions).map(Rc::clone) {
        Some(origin) => {
            for place in origin.iter() {
                let below = &mut b.index_bounds[*place as usize];
                *below = (*below).min(bound);
            }
            positions
        }
        None => ranges::within(b, &call.site, positions, bound)?.ok_or_else(computed)?.0,
    };
    let mut target = b.dims(positions).to_vec();
    target.extend(&b.dims(data)[1..]);
    // The arguments are weight, indices, padding_idx, scale_grad_by_freq and sparse.
    let arguments: Vec<&str> =
        embedding_arguments(call).map_or_else(Vec::new, |text| text.split(", ").collect());
    if arguments.get(3) == Some(&"True") {
        return Err(call.site.form(
            "scale_grad_by_freq divides gradients by counts of the positions of a batch; export the embedding without it",
        ));
    }
    // Without a padding row, which PyTorch does not train, the call has no third argument, or −1.
    let fixed = arguments.get(2).and_then(|row| row.parse().ok()).filter(|row| *row < bound);
    b.push(Op::Lookup { fixed }, &[data, positions], target, &call.site)
}

/// The arguments of PyTorch's embedding, which the default exporter quotes.
fn embedding_arguments<'a>(call: &Call<'a>) -> Option<&'a str> {
    let (_, rest) = call.metadata(QUOTED_CALL)?.split_once("aten.embedding.default](args = (")?;
    rest.split_once(')').map(|(arguments, _)| arguments)
}

/// Rows of a table by positions of one axis.
fn rows_of_table(b: &mut Builder, call: &Call<'_>, data: ValueId) -> Result<ValueId, GraphError> {
    let positions = call.float(b, 1)?;
    let dims = b.dims(positions).to_vec();
    let (Some((Dim::Fixed(1), outer)), Some(Dim::Fixed(size))) =
        (dims.split_last(), b.dims(data).first().copied())
    else {
        return Err(call.site.form(format!(
            "positions {} of several axes are computed; constant ones are supported",
            shape::display(&dims)
        )));
    };
    let positions = b.reshape(positions, outer.to_vec(), &call.site)?;
    lookup(b, call, data, 0, size, positions)
}

/// Elements, or parts, at constant positions along the first axes.
pub(super) fn gather_nd(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let data = call.value(b, 0)?;
    let batch = call.int("batch_dims", 0)?;
    call.finish(2)?;
    match batch {
        0 => {}
        1 if matches!(b.dims(data).first(), Some(Dim::Rows(1))) => {
            let places = call.value(b, 1)?;
            return rows::own_parts(b, &call.site, data, places);
        }
        _ => {
            return Err(call.site.form(format!(
                "batch_dims = {batch} of {}: 0 is supported, and 1 where the first axis is the batch",
                shape::display(b.dims(data))
            )));
        }
    }
    if !call.is_ints(b, 1) {
        return rows_of_table(b, &call, data);
    }
    let positions = call.needed_numbers(b, 1)?.clone();
    let known = positions.known().ok_or_else(|| call.site.form("its positions are not constant"))?;
    let dims = b.dims(data).to_vec();
    let [outer @ .., depth] = &positions.dims[..] else {
        return Err(call.site.shape("its positions are a scalar"));
    };
    if *depth == 0 || *depth > dims.len() {
        return Err(call.site.shape(format!("positions of {depth} axes of {}", shape::display(&dims))));
    }
    let (picked, rest) = dims.split_at(*depth);
    if shape::rows_axis(picked).is_some() {
        return Err(call.site.mixes_rows("it picks rows of the batch"));
    }
    let places = known.chunks(*depth).map(|place| {
        place.iter().zip(picked).try_fold(0, |flat, (position, dim)| {
            let size = dim.at(1);
            Ok(flat * size + shape::axis(*position, size, &call.site)?)
        })
    });
    let places = places.collect::<Result<Vec<usize>, GraphError>>()?;
    let mut flat = vec![Dim::Fixed(shape::check(picked, &call.site)?)];
    flat.extend(rest);
    let flat = b.reshape(data, flat, &call.site)?;
    let found = select(b, &call.site, flat, 0, places)?;
    let mut target: Vec<Dim> = outer.iter().copied().map(Dim::Fixed).collect();
    target.extend(rest);
    b.reshape(found, target, &call.site)
}
