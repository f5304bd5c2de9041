//! Integer evaluation: shapes and integers computed from them, with their dependence on the number of rows.

use millrace_bundle::onnx::tensor_proto::DataType;

use super::call::{Call, axis_in};
use super::extent::{Entry, Extent};
use super::value::{CONTENT_MAX, Content, Value};

/// The output of a node that computes tracked integers; `None` leaves the node to the operator's rule.
pub(super) fn evaluate(call: &Call<'_>) -> Option<Value> {
    let value = computed(call)?;
    let is_narrow = |place: usize| call.given(place).is_some_and(|value| value.narrow);
    let narrow = match call.operator() {
        "Shape" | "Size" => false,
        "Cast" => call.int("to", 0) == i64::from(DataType::Int32 as i32),
        "Gather" => is_narrow(0),
        _ => value.narrow || (0..call.inputs.len()).any(is_narrow),
    };
    Some(if narrow { value.narrowed() } else { value })
}

fn computed(call: &Call<'_>) -> Option<Value> {
    match call.operator() {
        "Shape" => shape(call),
        "Size" => {
            let size = Extent::product(call.given(0)?.dims.as_ref()?)?;
            Some(Value::integers(vec![Entry::Known(size)], 0))
        }
        "Concat" if call.opset >= 4 => concat(call),
        "ConstantOfShape" => filled(call),
        "Identity" | "Neg" | "Abs" | "Not" | "Cast" => single(call),
        "Squeeze" | "Unsqueeze" | "Reshape" | "Flatten" => reshaped(call),
        "Gather" => gather(call),
        "Slice" if call.opset >= 10 => slice(call),
        "Range" => range(call),
        "ReduceProd" => product(call),
        "Where" => choose(call),
        "Add" | "Sub" | "Mul" | "Div" | "Mod" | "Min" | "Max" | "Equal" | "Less" | "LessOrEqual"
        | "Greater" | "GreaterOrEqual" => pairs(call),
        _ => None,
    }
}

/// Entries and rank of an input.
fn followed<'a>(call: &'a Call<'_>, place: usize) -> Option<(&'a [Entry], usize)> {
    let value = call.given(place)?;
    let rank = value.dims.as_ref()?.len();
    Some((value.entries()?, rank)).filter(|_| rank <= 1)
}

fn shape(call: &Call<'_>) -> Option<Value> {
    let dims = call.given(0)?.dims.as_ref()?;
    let rank = i64::try_from(dims.len()).ok()?;
    let bound =
        |bound: i64| usize::try_from(if bound < 0 { bound + rank } else { bound }.clamp(0, rank)).ok();
    let start = bound(call.int("start", 0))?;
    let end = bound(call.int("end", rank))?;
    let entries = dims.get(start..end.max(start))?.iter().cloned().map(Entry::Known).collect();
    Some(Value::integers(entries, 1))
}

fn concat(call: &Call<'_>) -> Option<Value> {
    if axis_in(call.int("axis", 1), 1) != Ok(0) {
        return None;
    }
    let values = call.inputs.iter().map(Option::as_ref).collect::<Option<Vec<_>>>()?;
    if values.iter().any(|value| value.dims.as_ref().is_none_or(|dims| dims.len() != 1)) {
        return None;
    }
    let floats = |value: &&Value| match &value.content {
        Content::Floats(floats) => Some(floats.clone()),
        _ => None,
    };
    if let Some(parts) = values.iter().map(floats).collect::<Option<Vec<_>>>() {
        let floats: Vec<f32> = parts.concat();
        let dims = vec![Extent::known(i64::try_from(floats.len()).ok()?)];
        return (floats.len() <= CONTENT_MAX).then(|| {
            let mut value = Value::free(Some(dims));
            value.content = Content::Floats(floats);
            value
        });
    }
    let parts = values.iter().map(|value| value.entries()).collect::<Option<Vec<_>>>()?;
    let entries = parts.concat();
    (entries.len() <= CONTENT_MAX).then(|| Value::integers(entries, 1))
}

/// A short list that repeats one number.
fn filled(call: &Call<'_>) -> Option<Value> {
    let count = match call.numbers(0).ok()?[..] {
        [] => None,
        [count] => Some(usize::try_from(count).ok().filter(|count| *count <= CONTENT_MAX)?),
        _ => return None,
    };
    let fill = super::constants::value(call.tensor("value")?);
    let [entry] = fill.entries()? else { return None };
    let value = Value::integers(vec![entry.clone(); count.unwrap_or(1)], usize::from(count.is_some()));
    Some(if fill.narrow { value.narrowed() } else { value })
}

fn single(call: &Call<'_>) -> Option<Value> {
    let (entries, rank) = followed(call, 0)?;
    let known = |entry: &Entry, result: fn(i64) -> Option<i64>| {
        entry.as_number().and_then(result).map_or_else(|| Entry::unknown(&[entry]), Entry::number)
    };
    let entry = |entry: &Entry| match call.operator() {
        "Identity" => entry.clone(),
        "Neg" => Entry::combine("Mul", entry, &Entry::number(-1), &mut || call.fresh()),
        "Abs" => known(entry, i64::checked_abs),
        "Not" => known(entry, |number| Some(i64::from(number == 0))),
        _ => entry.clone(),
    };
    // Narrower integer types do not hold large extents.
    if call.operator() == "Cast" && !matches!(call.int("to", 0), 6 | 7) {
        return None;
    }
    Some(Value::integers(entries.iter().map(entry).collect(), rank))
}

/// Reshapes to rank 0 or 1, which keep the order of the elements.
fn reshaped(call: &Call<'_>) -> Option<Value> {
    let (entries, rank) = followed(call, 0)?;
    let entries = entries.to_vec();
    match call.operator() {
        "Unsqueeze" if rank == 0 => {
            let axes = call.axes(1, 13).ok()??;
            (axes.len() == 1).then(|| Value::integers(entries, 1))
        }
        "Squeeze" if rank == 1 && entries.len() == 1 => Some(Value::integers(entries, 0)),
        "Reshape" => match call.numbers(1).ok()?[..] {
            [] if entries.len() == 1 => Some(Value::integers(entries, 0)),
            [count] if count == -1 || usize::try_from(count) == Ok(entries.len()) => {
                Some(Value::integers(entries, 1))
            }
            _ => None,
        },
        _ => None,
    }
}

fn gather(call: &Call<'_>) -> Option<Value> {
    let (entries, rank) = followed(call, 0)?;
    if rank != 1 || axis_in(call.int("axis", 0), 1) != Ok(0) {
        return None;
    }
    let (places, rank) = followed(call, 1)?;
    let pick = |place: &Entry| entries.get(axis_in(place.as_number()?, entries.len()).ok()?).cloned();
    Some(Value::integers(places.iter().map(pick).collect::<Option<_>>()?, rank))
}

fn slice(call: &Call<'_>) -> Option<Value> {
    let (entries, rank) = followed(call, 0)?;
    let one = |place: usize, default: i64| match call.given(place) {
        None => Some(default),
        Some(_) => match call.numbers(place).ok()?[..] {
            [number] => Some(number),
            _ => None,
        },
    };
    if rank != 1 || axis_in(one(3, 0)?, 1) != Ok(0) || one(4, 1)? != 1 {
        return None;
    }
    let len = i64::try_from(entries.len()).ok()?;
    let bound = |bound: i64| {
        usize::try_from((if bound < 0 { bound.saturating_add(len) } else { bound }).clamp(0, len)).ok()
    };
    let (start, end) = (bound(one(1, 0)?)?, bound(one(2, 0)?)?);
    Some(Value::integers(entries.get(start..end.max(start))?.to_vec(), 1))
}

fn range(call: &Call<'_>) -> Option<Value> {
    let one = |place: usize| Some(*call.numbers(place).ok()?.first()?);
    let (start, limit, step) = (one(0)?, one(1)?, one(2)?);
    if step <= 0 {
        return None;
    }
    let count = usize::try_from(limit.checked_sub(start)?.max(0)).ok()?.div_ceil(usize::try_from(step).ok()?);
    let number = |place: usize| start.checked_add(step.checked_mul(i64::try_from(place).ok()?)?);
    let numbers = (0..count).take(CONTENT_MAX + 1).map(number).collect::<Option<Vec<_>>>()?;
    (count <= CONTENT_MAX).then(|| Value::integers(numbers.into_iter().map(Entry::number).collect(), 1))
}

fn product(call: &Call<'_>) -> Option<Value> {
    let (entries, rank) = followed(call, 0)?;
    // An empty list of axes may mean no axes, and unknown axes may be an empty list.
    let axes = call.axes(1, 18).ok()?;
    if rank != 1
        || call.int("noop_with_empty_axes", 0) != 0
        || axes.is_some_and(|axes| axes.iter().any(|axis| axis_in(*axis, 1).is_err()))
    {
        return None;
    }
    let one = Entry::number(1);
    let product = entries
        .iter()
        .fold(one, |product, entry| Entry::combine("Mul", &product, entry, &mut || call.fresh()));
    Some(Value::integers(vec![product], usize::from(call.int("keepdims", 1) != 0)))
}

/// Broadcasts lists to one length: the entries at each position; a list of one entry repeats it.
fn stretched<'a>(lists: &[(&'a [Entry], usize)]) -> Option<(Vec<Vec<&'a Entry>>, usize)> {
    let rank = lists.iter().map(|(_, rank)| *rank).max()?;
    let count = lists.iter().map(|(entries, _)| entries.len()).max()?;
    let at = |place: usize| {
        let entry = |(entries, _): &(&'a [Entry], usize)| match entries.len() {
            1 => entries.first(),
            len if len == count => entries.get(place),
            _ => None,
        };
        lists.iter().map(entry).collect::<Option<Vec<_>>>()
    };
    Some(((0..count).map(at).collect::<Option<_>>()?, rank))
}

fn pairs(call: &Call<'_>) -> Option<Value> {
    if call.inputs.len() != 2 {
        return None;
    }
    let (pairs, rank) = stretched(&[followed(call, 0)?, followed(call, 1)?])?;
    let combine = |pair: Vec<&Entry>| Entry::combine(call.operator(), pair[0], pair[1], &mut || call.fresh());
    Some(Value::integers(pairs.into_iter().map(combine).collect(), rank))
}

fn choose(call: &Call<'_>) -> Option<Value> {
    let (triples, rank) = stretched(&[followed(call, 0)?, followed(call, 1)?, followed(call, 2)?])?;
    let choose = |triple: Vec<&Entry>| match triple[0].as_number() {
        Some(0) => triple[2].clone(),
        Some(_) => triple[1].clone(),
        None => Entry::unknown(&triple),
    };
    Some(Value::integers(triples.into_iter().map(choose).collect(), rank))
}
