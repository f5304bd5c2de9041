//! Operators on known integers, evaluated while the model is read.
//!
//! Exporters write `x.view(x.size(0), -1)` as Shape → Gather → Unsqueeze → Concat → Reshape. All of it is
//! known here except the number of rows, which stays symbolic.

use std::cmp::Ordering;

use millrace_bundle::onnx::tensor_proto::DataType;

use super::builder::{Builder, Call, NamedValue, NodeRef};
use super::ints::{Ints, Size, depends_on_rows};
use super::types::{self, Kind};
use super::{
    Compare, Dim, GraphError, Op, Source, Unary, ValueId, arithmetic, foreseen, linear, movement, shape,
    tensor,
};

type Folded = Result<NamedValue, GraphError>;

/// Evaluates an operator whose inputs are all known integers; `None` if it computes no integers.
pub(super) fn fold(b: &Builder, mut call: Call<'_>, op: &str) -> Option<Folded> {
    let found = match op {
        "Add" => zip(b, &call, Size::add),
        "Sub" => zip(b, &call, Size::sub),
        "Mul" => zip(b, &call, Size::mul),
        "Div" => zip(b, &call, Size::div),
        "Mod" => call
            .int("fmod", 0)
            .and_then(|like_c| zip(b, &call, if like_c != 0 { Size::remainder } else { Size::modulo })),
        "Pow" => zip(b, &call, Size::pow),
        "Equal" => zip(b, &call, |x, y| Some(truth(x.compare(y)?.is_eq()))),
        "Less" => zip(b, &call, |x, y| Some(truth(x.compare(y)?.is_lt()))),
        "LessOrEqual" => zip(b, &call, |x, y| Some(truth(x.compare(y)?.is_le()))),
        "Greater" => zip(b, &call, |x, y| Some(truth(x.compare(y)?.is_gt()))),
        "GreaterOrEqual" => zip(b, &call, |x, y| Some(truth(x.compare(y)?.is_ge()))),
        "And" => zip(b, &call, |x, y| Some(truth(x.known()? != 0 && y.known()? != 0))),
        "Or" => zip(b, &call, |x, y| Some(truth(x.known()? != 0 || y.known()? != 0))),
        "Xor" => zip(b, &call, |x, y| Some(truth((x.known()? != 0) != (y.known()? != 0)))),
        "Not" => map(b, &call, |x| Some(truth(x.known()? == 0))),
        "Neg" => map(b, &call, |x| x.mul(Size::plain(-1))),
        "Abs" => map(b, &call, |x| {
            if x.rows > 0 && x.plain >= 0 { Some(x) } else { x.known()?.checked_abs().map(Size::plain) }
        }),
        "Min" => extreme(b, &call, Ordering::Less),
        "Max" => extreme(b, &call, Ordering::Greater),
        "Sign" => map(b, &call, |x| Some(Size::plain(x.known()?.signum()))),
        "Clip" => clip(b, &call),
        "Where" => select(b, &call),
        "Shape" => shape_of_ints(b, call),
        "Size" => call.needed_numbers(b, 0).and_then(|ints| {
            call.finish(1)?;
            Ok(Ints::of(vec![], &[ints.elements.len() as i64]))
        }),
        "Range" => range(b, &call),
        "Gather" => gather(b, call),
        "GatherElements" => gather_elements(b, call),
        "ScatterElements" => scatter_elements(b, call),
        "Slice" => slice(b, call),
        "Concat" => concat(b, call),
        "Squeeze" => squeeze(b, call),
        "Unsqueeze" => unsqueeze(b, call),
        "Reshape" => reshape(b, call),
        "Flatten" => flatten(b, call),
        "Transpose" => transpose(b, call),
        "Tile" => tile(b, &call),
        "Trilu" => trilu(b, call),
        "ReduceProd" => {
            reduce(b, call, 18, |list| list.iter().try_fold(Size::plain(1), |all, x| all.mul(*x)))
        }
        "ReduceSum" => reduce(b, call, 13, |list| list.iter().try_fold(Size::plain(0), |all, x| all.add(*x))),
        "CumSum" => cumulate(b, call),
        _ => return None,
    };
    Some(found.map(NamedValue::Ints))
}

fn truth(value: bool) -> Size {
    Size::plain(i64::from(value))
}

fn zip(
    b: &Builder,
    call: &Call<'_>,
    combine: impl Fn(Size, Size) -> Option<Size>,
) -> Result<Ints, GraphError> {
    call.finish(2)?;
    call.needed_numbers(b, 0)?.zip(call.needed_numbers(b, 1)?, &call.site, combine)
}

fn map(b: &Builder, call: &Call<'_>, change: impl Fn(Size) -> Option<Size>) -> Result<Ints, GraphError> {
    call.finish(1)?;
    let ints = call.needed_numbers(b, 0)?;
    let elements: Option<_> = ints.elements.iter().map(|size| change(*size)).collect();
    Ok(Ints::new(ints.dims.clone(), elements.ok_or_else(|| depends_on_rows(&call.site))?))
}

fn extreme(b: &Builder, call: &Call<'_>, wanted: Ordering) -> Result<Ints, GraphError> {
    call.finish(call.input_count())?;
    let mut found = call.needed_numbers(b, 0)?.clone();
    for index in 1..call.input_count() {
        found = found.zip(call.needed_numbers(b, index)?, &call.site, |x, y| {
            Some(if x.compare(y)? == wanted { x } else { y })
        })?;
    }
    Ok(found)
}

/// Integers within bounds, each of which may be missing. The upper bound counts where they cross.
fn clip(b: &Builder, call: &Call<'_>) -> Result<Ints, GraphError> {
    call.finish(3)?;
    let mut found = call.needed_numbers(b, 0)?.clone();
    for (index, kept) in [(1, Ordering::Greater), (2, Ordering::Less)] {
        if !call.has(index) {
            continue;
        }
        let bound = call.needed_numbers(b, index)?;
        if bound.elements.len() != 1 {
            return Err(call
                .site
                .form(format!("bound {index} holds {} integers, one is needed", bound.elements.len())));
        }
        let dims = found.dims.clone();
        found = found.zip(bound, &call.site, |x, bound| {
            Some(match x.compare(bound)? {
                Ordering::Equal => x,
                order if order == kept => x,
                _ => bound,
            })
        })?;
        found.dims = dims;
    }
    Ok(found)
}

fn select(b: &Builder, call: &Call<'_>) -> Result<Ints, GraphError> {
    call.finish(3)?;
    let (condition, left, right) =
        (call.needed_numbers(b, 0)?, call.needed_numbers(b, 1)?, call.needed_numbers(b, 2)?);
    // Pairs of a condition and a side: 0 stands for the side that was not chosen.
    let dims = super::ints::broadcast(&left.dims, &right.dims, &call.site)?;
    let dims = super::ints::broadcast(&condition.dims, &dims, &call.site)?;
    let [condition, left, right] = [condition, left, right].map(|side| side.expand(&dims, &call.site));
    let (condition, left, right) = (condition?, left?, right?);
    let elements = condition.elements.iter().zip(left.elements.iter().zip(&right.elements));
    let elements: Option<_> =
        elements.map(|(c, (x, y))| Some(if c.known()? != 0 { *x } else { *y })).collect();
    Ok(Ints::new(dims, elements.ok_or_else(|| depends_on_rows(&call.site))?))
}

/// The dimensions of a value.
pub(super) fn shape_of(b: &Builder, mut call: Call<'_>) -> Folded {
    let merged = call.merged_value(b, 0);
    let input = merged.map_or_else(|| call.float(b, 0), Ok)?;
    let sizes = b.dims(input).iter().map(|dim| match *dim {
        // The limits on a value bound it.
        Dim::Fixed(size) => Size::plain(size as i64),
        Dim::Rows(factor) => Size { rows: factor as i64, plain: 0 },
    });
    let mut sizes: Vec<Size> = sizes.collect();
    if merged.is_some() {
        let steps = sizes.remove(0);
        sizes[0] = sizes[0].mul(steps).ok_or_else(|| depends_on_rows(&call.site))?;
    }
    part_of_shape(&mut call, sizes).map(NamedValue::Ints)
}

fn shape_of_ints(b: &Builder, mut call: Call<'_>) -> Result<Ints, GraphError> {
    let sizes = call.needed_numbers(b, 0)?.dims.iter().map(|size| Size::plain(*size as i64)).collect();
    part_of_shape(&mut call, sizes)
}

fn part_of_shape(call: &mut Call<'_>, sizes: Vec<Size>) -> Result<Ints, GraphError> {
    let rank = sizes.len() as i64;
    let place = |at: i64| if at < 0 { at.saturating_add(rank) } else { at }.clamp(0, rank) as usize;
    let start = place(call.int("start", 0)?);
    let end = place(call.int("end", rank)?);
    call.finish(1)?;
    Ok(Ints::list(sizes.get(start..end).unwrap_or_default().to_vec()))
}

/// The number of elements of a value.
pub(super) fn size_of(b: &Builder, call: Call<'_>) -> Folded {
    let input = call.float(b, 0)?;
    call.finish(1)?;
    let dims = b.dims(input);
    let count = shape::elements_at(dims, 1) as i64;
    let size = match shape::rows_axis(dims) {
        Some(_) => Size { rows: count, plain: 0 },
        None => Size::plain(count),
    };
    Ok(NamedValue::Ints(Ints::new(vec![], vec![size])))
}

fn range(b: &Builder, call: &Call<'_>) -> Result<Ints, GraphError> {
    call.finish(3)?;
    let bound = |index: usize| {
        call.int_input(b, index)?.ok_or_else(|| call.site.form(format!("input {index} is missing")))
    };
    let (start, limit, delta) = (bound(0)?, bound(1)?, bound(2)?);
    if delta == 0 {
        return Err(call.site.form("its step is 0"));
    }
    // The way in the direction of the step, in steps, rounded up.
    let step = i128::from(delta);
    let way = (i128::from(limit) - i128::from(start)) * step.signum();
    let count = ((way + step.abs() - 1) / step.abs()).max(0);
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    Ints::count(&[count], &call.site)?;
    let values: Vec<i64> = (0..count).map(|at| start.wrapping_add(delta.wrapping_mul(at as i64))).collect();
    Ok(Ints::of(vec![count], &values))
}

/// A range of constant floats, as of positions that rotate queries and keys.
pub(super) fn range_of_floats(b: &mut Builder, call: &Call<'_>) -> Result<ValueId, GraphError> {
    call.finish(3)?;
    let bound = |index: usize| {
        let found = call.constant_scalar(b, index)?;
        found.ok_or_else(|| call.site.form(format!("input {index} is missing")))
    };
    let (start, limit, delta) = (bound(0)?, bound(1)?, bound(2)?);
    let steps = ((f64::from(limit) - f64::from(start)) / f64::from(delta)).ceil();
    if !steps.is_finite() || steps < 1.0 {
        let reason = format!("the range from {start} to {limit} in steps of {delta} has no elements");
        return Err(call.site.shape(reason));
    }
    // The cast saturates.
    let count = steps as usize;
    Ints::count(&[count], &call.site)?;
    let values = (0..count).map(|at| start + delta * at as f32).collect();
    b.constant(&[count], values, &call.site)
}

/// A constant of a shape: integers when it holds integers of a known shape, floats otherwise.
pub(super) fn constant_of_shape(b: &mut Builder, mut call: Call<'_>) -> Folded {
    let value = call.tensor("value")?;
    let target = call.needed_numbers(b, 0)?.clone();
    call.finish(1)?;
    let (value, whole) = match value {
        None => (0.0, None),
        Some(tensor) if tensor::is_int(tensor) => match tensor::ints(tensor)?[..] {
            [value] => (value as f32, Some(value)),
            _ => return Err(call.site.form("its value has exactly one element")),
        },
        Some(tensor) => match tensor::constants(tensor)?[..] {
            [value] => (value, None),
            _ => return Err(call.site.form("its value has exactly one element")),
        },
    };
    if let (Some(whole), Some(dims)) = (whole, target.known()) {
        let dims = dims.into_iter().map(usize::try_from).collect::<Result<Vec<_>, _>>();
        let dims = dims.map_err(|_| call.site.shape("a dimension is negative"))?;
        let count = Ints::count(&dims, &call.site)?;
        return Ok(NamedValue::Ints(Ints::new(dims, vec![Size::plain(whole); count])));
    }
    let dims = dims_of(&target, &call.site)?;
    let scalar = b.scalar(value, &call.site)?;
    Ok(NamedValue::Float(b.expand(scalar, dims, &call.site)?))
}

/// The shape that integers describe.
pub(super) fn dims_of(sizes: &Ints, site: &NodeRef) -> Result<Vec<Dim>, GraphError> {
    let dims: Option<Vec<Dim>> = sizes.elements.iter().map(|size| size.dim()).collect();
    let dims = dims.ok_or_else(|| site.shape("a dimension is not above 0, or not a multiple of the rows"))?;
    shape::check(&dims, site)?;
    Ok(dims)
}

/// A change of the element type to `to`.
pub(super) fn cast(b: &mut Builder, mut call: Call<'_>, to: DataType) -> Folded {
    call.int("saturate", 1)?;
    call.string("round_mode")?;
    call.int("to", 0)?;
    call.finish(if call.site.op == "CastLike" { 2 } else { 1 })?;
    let from = call.element(b, 0).ok_or_else(|| call.site.form("input 0 is missing"))?;
    let refuse = |reason: &str| {
        Err(call.site.form(format!(
            "casts of {} to {} are not supported{reason}",
            from.as_str_name(),
            to.as_str_name()
        )))
    };
    if types::kind(to) == Kind::Other {
        return refuse("");
    }
    if call.is_ints(b, 0) {
        let ints = call.needed_numbers(b, 0)?;
        let change = |size: &Size| match (types::kind(to), size.known()) {
            (Kind::Bool, _) => Some(truth(!size.compare(Size::plain(0))?.is_eq())),
            (_, Some(value)) => types::wrap(value, to).map(Size::plain),
            // Numbers of rows fit into these types.
            (_, None) => matches!(to, DataType::Int64 | DataType::Int32).then_some(*size),
        };
        if types::kind(to) == Kind::Float {
            return Ok(NamedValue::Float(call.value(b, 0)?));
        }
        let elements: Option<Vec<Size>> = ints.elements.iter().map(change).collect();
        return match elements {
            Some(elements) => Ok(NamedValue::Ints(Ints::new(ints.dims.clone(), elements))),
            None => refuse(" for these integers, INT64 is"),
        };
    }
    let input = call.float(b, 0)?;
    if types::kind(to) == Kind::Float || from == to {
        return Ok(NamedValue::Float(input));
    }
    let is_constant = matches!(b.values[input].source, Source::Constant(_));
    if is_constant && types::kind(to) == Kind::Integer && b.other_floats.contains(&input) {
        return refuse(
            " where the model computes the numbers from constants (compute them in FLOAT or INT64)",
        );
    }
    let elements = match &b.values[input].source {
        Source::Constant(elements) => Some(elements.clone()),
        Source::Node if types::kind(to) == Kind::Integer => foreseen::elements(b, &call.site, input)?,
        _ => None,
    };
    if let Some(elements) = elements {
        let (low, high) = types::range(to).unwrap_or((0, 1));
        let whole = |value: &f32| match to {
            DataType::Bool => Some(i64::from(*value != 0.0)),
            // The logarithm of no distance: processors of all kinds make it the smallest number.
            DataType::Int64 | DataType::Int32 if *value == f32::NEG_INFINITY => i64::try_from(low).ok(),
            // The cast saturates, hence it keeps numbers out of the range.
            _ if value.is_nan() => None,
            _ => i64::try_from(*value as i128).ok().filter(|x| (low..=high).contains(&i128::from(*x))),
        };
        let values: Option<Vec<i64>> = elements.iter().map(whole).collect();
        let dims = b.dims(input).iter().map(|dim| dim.at(1)).collect();
        match values {
            Some(values) => return Ok(NamedValue::Ints(Ints::of(dims, &values))),
            None if is_constant => return refuse(" for values that the type does not hold"),
            None => {}
        }
    }
    let found: ValueId = match (types::kind(from), to) {
        (Kind::Bool, _) => input,
        (_, DataType::Bool) => {
            let zero = b.scalar(0.0, &call.site)?;
            let equal = arithmetic::compare_values(b, &call.site, Compare::Equal, input, zero)?;
            arithmetic::not(b, &call.site, equal)?
        }
        (Kind::Integer, DataType::Int32 | DataType::Int64) => input,
        (Kind::Float, DataType::Int32 | DataType::Int64) => {
            let dims = b.dims(input).to_vec();
            b.push(Op::Unary(Unary::Trunc), &[input], dims, &call.site)?
        }
        _ => {
            return refuse(
                " where the values are not known (they may not fit the type), INT64 and INT32 are",
            );
        }
    };
    Ok(NamedValue::Float(found))
}

/// Picks integers by constant positions.
fn gather(b: &Builder, mut call: Call<'_>) -> Result<Ints, GraphError> {
    let data = call.needed_numbers(b, 0)?.clone();
    let positions = call.needed_numbers(b, 1)?.clone();
    let given = call.int("axis", 0)?;
    call.finish(2)?;
    let axis = shape::axis(given, data.dims.len(), &call.site)?;
    let known = positions.known().ok_or_else(|| call.site.form("its positions are not constant"))?;
    let size = data.dims[axis];
    let places = known
        .iter()
        .map(|position| shape::axis(*position, size, &call.site))
        .collect::<Result<Vec<_>, _>>()?;
    let (inner, count) = (positions.dims.len(), positions.strides());
    let mut dims = data.dims[..axis].to_vec();
    dims.extend(&positions.dims);
    dims.extend(&data.dims[axis + 1..]);
    let strides = data.strides();
    data.pick(dims, &call.site, |index| {
        let place: usize = (0..inner).map(|a| index[axis + a] * count[a]).sum();
        let before: usize = (0..axis).map(|a| index[a] * strides[a]).sum();
        let after: usize = (axis + 1..strides.len()).map(|a| index[a - 1 + inner] * strides[a]).sum();
        before + places[place] * strides[axis] + after
    })
}

/// Picks integers by constant positions, one for each element.
fn gather_elements(b: &Builder, mut call: Call<'_>) -> Result<Ints, GraphError> {
    let data = call.needed_numbers(b, 0)?.clone();
    let given = call.int("axis", 0)?;
    call.finish(2)?;
    let (dims, places) = places_of(b, &call, &data, given)?;
    let elements = places.into_iter().map(|place| data.elements[place]).collect();
    Ok(Ints::new(dims, elements))
}

/// Replaces integers at constant positions; the last one stays.
fn scatter_elements(b: &Builder, mut call: Call<'_>) -> Result<Ints, GraphError> {
    let mut data = call.needed_numbers(b, 0)?.clone();
    let updates = call.needed_numbers(b, 2)?.clone();
    let given = call.int("axis", 0)?;
    if let Some(reduction) = call.string("reduction")?.filter(|reduction| reduction != "none") {
        return Err(call.site.form(format!("reduction = {reduction:?} of integers is not supported")));
    }
    call.finish(3)?;
    let (dims, places) = places_of(b, &call, &data, given)?;
    if updates.dims != dims {
        return Err(call.site.shape(format!("{:?} integers for positions {dims:?}", updates.dims)));
    }
    for (place, element) in places.into_iter().zip(updates.elements) {
        data.elements[place] = element;
    }
    Ok(data)
}

/// The dimensions of the positions at input 1, and the place in `data` of each one along an axis.
fn places_of(
    b: &Builder,
    call: &Call<'_>,
    data: &Ints,
    given: i64,
) -> Result<(Vec<usize>, Vec<usize>), GraphError> {
    let site = &call.site;
    let positions = call.needed_numbers(b, 1)?;
    let known = positions.known().ok_or_else(|| site.form("its positions are not constant"))?;
    let axis = shape::axis(given, data.dims.len(), site)?;
    let fits = positions.dims.len() == data.dims.len()
        && (0..data.dims.len()).all(|at| at == axis || positions.dims[at] <= data.dims[at]);
    if !fits {
        return Err(site.shape(format!("positions {:?} in {:?}", positions.dims, data.dims)));
    }
    let strides = data.strides();
    let mut index = vec![0; positions.dims.len()];
    let mut places = Vec::with_capacity(known.len());
    for position in known {
        let own = shape::axis(position, data.dims[axis], site)?;
        places.push((0..index.len()).map(|at| strides[at] * if at == axis { own } else { index[at] }).sum());
        super::ints::step(&mut index, &positions.dims);
    }
    Ok((positions.dims.clone(), places))
}

fn slice(b: &Builder, mut call: Call<'_>) -> Result<Ints, GraphError> {
    let data = call.needed_numbers(b, 0)?.clone();
    let cuts = movement::slice_cuts(b, &mut call, data.dims.len())?;
    // An axis that is not cut has no list of positions.
    let mut taken: Vec<Option<Vec<usize>>> = vec![None; data.dims.len()];
    for cut in cuts {
        taken[cut.axis] = Some(cut.places(data.dims[cut.axis], &call.site)?);
    }
    let dims =
        data.dims.iter().zip(&taken).map(|(size, list)| list.as_ref().map_or(*size, Vec::len)).collect();
    let strides = data.strides();
    data.pick(dims, &call.site, |index| {
        let place = |a: usize| taken[a].as_ref().map_or(index[a], |list| list[index[a]]);
        (0..strides.len()).map(|a| place(a) * strides[a]).sum()
    })
}

/// Joins lists of integers.
fn concat(b: &Builder, mut call: Call<'_>) -> Result<Ints, GraphError> {
    let given = call.int("axis", 0)?;
    let count = call.input_count();
    call.finish(count)?;
    let parts = (0..count).map(|index| call.needed_numbers(b, index)).collect::<Result<Vec<_>, _>>()?;
    let Some(first) = parts.first() else {
        return Err(call.site.form("it has no inputs"));
    };
    let mut dims = first.dims.clone();
    let axis = shape::axis(given, dims.len(), &call.site)?;
    dims[axis] = 0;
    for part in &parts {
        let fits =
            part.dims.len() == dims.len() && (0..dims.len()).all(|a| a == axis || part.dims[a] == dims[a]);
        if !fits {
            return Err(call
                .site
                .shape(format!("{:?} and {:?} do not join at axis {axis}", first.dims, part.dims)));
        }
        dims[axis] += part.dims[axis];
    }
    Ints::count(&dims, &call.site)?;
    let outer: usize = dims[..axis].iter().product();
    let mut elements = Vec::new();
    for at in 0..outer {
        for part in &parts {
            let block: usize = part.dims[axis..].iter().product();
            elements.extend_from_slice(&part.elements[at * block..(at + 1) * block]);
        }
    }
    Ok(Ints::new(dims, elements))
}

/// A matrix of the axes before one and those from it on.
fn flatten(b: &Builder, mut call: Call<'_>) -> Result<Ints, GraphError> {
    let data = call.needed_numbers(b, 0)?.clone();
    let given = call.int("axis", 1)?;
    call.finish(1)?;
    let rank = data.dims.len();
    // Flatten may split behind the last axis.
    let axis = if given == rank as i64 { rank } else { shape::axis(given, rank, &call.site)? };
    let (outer, inner) = data.dims.split_at(axis);
    let dims = vec![outer.iter().product(), inner.iter().product()];
    Ok(Ints::new(dims, data.elements))
}

fn squeeze(b: &Builder, mut call: Call<'_>) -> Result<Ints, GraphError> {
    let data = call.needed_numbers(b, 0)?.clone();
    let (given, inputs) = linear::axes_of(b, &mut call)?;
    call.finish(inputs)?;
    let rank = data.dims.len();
    let axes = match given {
        Some(given) => shape::axes(&given, rank, &call.site)?,
        None => (0..rank).filter(|axis| data.dims[*axis] == 1).collect(),
    };
    if let Some(axis) = axes.iter().find(|axis| data.dims[**axis] != 1) {
        return Err(call.site.shape(format!("axis {axis} of {:?} is not 1", data.dims)));
    }
    let dims = (0..rank).filter(|axis| !axes.contains(axis)).map(|axis| data.dims[axis]).collect();
    Ok(Ints::new(dims, data.elements))
}

fn unsqueeze(b: &Builder, mut call: Call<'_>) -> Result<Ints, GraphError> {
    let data = call.needed_numbers(b, 0)?.clone();
    let (given, inputs) = linear::axes_of(b, &mut call)?;
    call.finish(inputs)?;
    let given = given.ok_or_else(|| call.site.form("its axes are missing"))?;
    let rank = data.dims.len().saturating_add(given.len());
    if rank > shape::RANK_MAX {
        return Err(call.site.shape(format!("{rank} dimensions")));
    }
    let axes = shape::axes(&given, rank, &call.site)?;
    let mut rest = data.dims.iter();
    let dims = (0..rank)
        .map(|axis| if axes.contains(&axis) { 1 } else { rest.next().copied().unwrap_or(1) })
        .collect();
    Ok(Ints::new(dims, data.elements))
}

fn reshape(b: &Builder, mut call: Call<'_>) -> Result<Ints, GraphError> {
    let data = call.needed_numbers(b, 0)?.clone();
    let target = call.ints_input(b, 1)?.ok_or_else(|| call.site.form("the target shape is not constant"))?;
    call.int("allowzero", 0)?;
    call.finish(2)?;
    let bad = || call.site.shape(format!("{:?} cannot take the shape {target:?}", data.dims));
    let mut dims = Vec::with_capacity(target.len());
    let mut open = None;
    for (axis, size) in target.iter().enumerate() {
        dims.push(match *size {
            0 => *data.dims.get(axis).ok_or_else(bad)?,
            -1 if open.is_none() => {
                open = Some(axis);
                1
            }
            size => usize::try_from(size).map_err(|_| bad())?,
        });
    }
    if let Some(axis) = open {
        dims[axis] = data.elements.len().checked_div(Ints::count(&dims, &call.site)?).ok_or_else(bad)?;
    }
    if Ints::count(&dims, &call.site)? != data.elements.len() || dims.len() > shape::RANK_MAX {
        return Err(bad());
    }
    Ok(Ints::new(dims, data.elements))
}

fn transpose(b: &Builder, mut call: Call<'_>) -> Result<Ints, GraphError> {
    let data = call.needed_numbers(b, 0)?.clone();
    let order = linear::order_of(&mut call, data.dims.len())?;
    let strides = data.strides();
    let dims = order.iter().map(|axis| data.dims[*axis]).collect();
    data.pick(dims, &call.site, |index| order.iter().zip(index).map(|(axis, at)| strides[*axis] * at).sum())
}

fn tile(b: &Builder, call: &Call<'_>) -> Result<Ints, GraphError> {
    let data = call.needed_numbers(b, 0)?;
    let repeats = call.ints_input(b, 1)?.unwrap_or_default();
    call.finish(2)?;
    let bad = || call.site.shape(format!("repeats {repeats:?} of {:?}", data.dims));
    if repeats.len() != data.dims.len() {
        return Err(bad());
    }
    let dims = data
        .dims
        .iter()
        .zip(&repeats)
        .map(|(size, times)| usize::try_from(*times).ok().and_then(|times| size.checked_mul(times)))
        .collect::<Option<Vec<_>>>()
        .ok_or_else(bad)?;
    let strides = data.strides();
    data.pick(dims, &call.site, |index| {
        index.iter().enumerate().map(|(a, at)| at % data.dims[a] * strides[a]).sum()
    })
}

fn trilu(b: &Builder, mut call: Call<'_>) -> Result<Ints, GraphError> {
    let data = call.needed_numbers(b, 0)?.clone();
    let keep = movement::trilu_mask(b, &mut call)?;
    let rank = data.dims.len();
    if rank < 2 {
        return Err(call.site.shape(format!("{:?} is not a matrix", data.dims)));
    }
    let (rows, columns) = (data.dims[rank - 2], data.dims[rank - 1]);
    let mut kept = data;
    for (at, element) in kept.elements.iter_mut().enumerate() {
        let (row, column) = (at / columns % rows, at % columns);
        if !keep(row, column) {
            *element = Size::plain(0);
        }
    }
    Ok(kept)
}

fn reduce(
    b: &Builder,
    mut call: Call<'_>,
    axes_are_input_from: i64,
    join: impl Fn(&[Size]) -> Option<Size>,
) -> Result<Ints, GraphError> {
    let data = call.needed_numbers(b, 0)?.clone();
    let keep = call.int("keepdims", 1)? != 0;
    let (given, inputs) =
        if b.opset >= axes_are_input_from { (call.ints_input(b, 1)?, 2) } else { (call.ints("axes")?, 1) };
    let none_is_identity = call.int("noop_with_empty_axes", 0)? != 0;
    call.finish(inputs)?;
    if none_is_identity && given.as_ref().is_none_or(Vec::is_empty) {
        return Ok(data);
    }
    let rank = data.dims.len();
    let all = given
        .filter(|axes| !axes.is_empty())
        .map_or(Ok(true), |given| Ok(shape::axes(&given, rank, &call.site)?.len() == rank));
    if !all? {
        return Err(call.site.form("integers are reduced over all axes only"));
    }
    let found = join(&data.elements).ok_or_else(|| depends_on_rows(&call.site))?;
    Ok(Ints::new(if keep { vec![1; rank] } else { vec![] }, vec![found]))
}

fn cumulate(b: &Builder, mut call: Call<'_>) -> Result<Ints, GraphError> {
    let data = call.needed_numbers(b, 0)?.clone();
    let axis = call.int_input(b, 1)?.ok_or_else(|| call.site.form("its axis is missing"))?;
    call.only("exclusive", 0)?;
    call.only("reverse", 0)?;
    call.finish(2)?;
    let axis = shape::axis(axis, data.dims.len(), &call.site)?;
    let (stride, size) = (data.strides()[axis], data.dims[axis]);
    let mut sums = data;
    for at in 0..sums.elements.len() {
        if at / stride % size > 0 {
            let sum = sums.elements[at].add(sums.elements[at - stride]);
            sums.elements[at] = sum.ok_or_else(|| depends_on_rows(&call.site))?;
        }
    }
    Ok(sums)
}

/// The integers of an Expand target: the shape that it broadcasts a value with dimensions `dims` to.
pub(super) fn expand(b: &mut Builder, call: Call<'_>) -> Folded {
    let target = call.needed_numbers(b, 1)?.clone();
    call.finish(2)?;
    if call.is_ints(b, 0) {
        let ints = call.needed_numbers(b, 0)?;
        if let Some(known) = target.known() {
            let to = known.into_iter().map(usize::try_from).collect::<Result<Vec<_>, _>>();
            let to = to.map_err(|_| call.site.shape("a dimension is negative"))?;
            let dims = super::ints::broadcast(&ints.dims, &to, &call.site)?;
            Ints::count(&dims, &call.site)?;
            return ints.expand(&dims, &call.site).map(NamedValue::Ints);
        }
    }
    let input = call.value(b, 0)?;
    let to = dims_of(&target, &call.site)?;
    let dims = shape::broadcast(b.dims(input), &to, &call.site)?;
    Ok(NamedValue::Float(b.expand(input, dims, &call.site)?))
}
