//! Attention (operator set 23), as products and a softmax.

use super::arithmetic::{choose, compare_values, join_at, map};
use super::builder::{Builder, Call, NodeRef};
use super::linear::product;
use super::reduction::{Reduction, fold};
use super::types::{self, Kind};
use super::{Binary, Compare, Dim, GraphError, Op, Unary, ValueId, shape};

pub(super) fn attention(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let site = call.site.clone();
    let inputs = [call.float(b, 0)?, call.float(b, 1)?, call.float(b, 2)?];
    let mask = if call.has(3) { Some((call.value(b, 3)?, is_truth(b, &call)?)) } else { None };
    let causal = call.int("is_causal", 0)? != 0;
    let heads = [call.int("q_num_heads", 0)?, call.int("kv_num_heads", 0)?];
    let scale = call.float_attribute("scale", 0.0)?;
    let cap = call.float_attribute("softcap", 0.0)?;
    call.int("softmax_precision", 1)?;
    call.only("qk_matmul_output_mode", 0)?;
    call.finish(4)?;
    let flat = b.dims(inputs[0]).len() == 3;
    let mut sides = Vec::with_capacity(3);
    for (input, heads) in inputs.into_iter().zip([heads[0], heads[1], heads[1]]) {
        sides.push(if flat { split_heads(b, &site, input, heads)? } else { input });
    }
    let [query, key, value] = sides[..] else { return Err(site.form("three inputs are needed")) };
    let (q, k, v) = (b.dims(query).to_vec(), b.dims(key).to_vec(), b.dims(value).to_vec());
    let ([rows, Dim::Fixed(q_heads), Dim::Fixed(length), Dim::Fixed(width)], 4, 4) =
        (&q[..], k.len(), v.len())
    else {
        return Err(site.shape(format!("{} is not [rows, heads, steps, values]", shape::display(&q))));
    };
    let (rows, q_heads, length, width) = (*rows, *q_heads, *length, *width);
    let Dim::Fixed(past) = k[2] else {
        return Err(site.mixes_rows("it attends to other rows"));
    };
    let (key, value) = (repeat_heads(b, &site, key, q_heads)?, repeat_heads(b, &site, value, q_heads)?);
    let scale = if scale == 0.0 { 1.0 / (width as f32).sqrt() } else { scale };
    let turned = b.permute(key, vec![0, 1, 3, 2], &site)?;
    let query = map(b, &site, Unary::Scale(scale), query)?;
    let mut scores = product(b, &call, query, turned)?;
    if cap != 0.0 {
        scores = map(b, &site, Unary::Scale(1.0 / cap), scores)?;
        scores = map(b, &site, Unary::Tanh, scores)?;
        scores = map(b, &site, Unary::Scale(cap), scores)?;
    }
    let hidden = b.scalar(f32::NEG_INFINITY, &site)?;
    if causal {
        super::ints::Ints::count(&[length, past], &site)?;
        let seen = (0..length).flat_map(|at| (0..past).map(move |other| if other <= at { 1.0 } else { 0.0 }));
        let seen = b.constant(&[length, past], seen.collect(), &site)?;
        scores = choose(b, &site, seen, scores, hidden)?;
    }
    let dims = b.dims(scores).to_vec();
    let shares = match mask {
        None => b.push(Op::Softmax(3), &[scores], dims, &site)?,
        Some((mask, is_truth)) => {
            // From operator set 24 on, a shorter mask hides the keys behind its end.
            if b.opset >= 24 && b.dims(mask).last() != Some(&Dim::Fixed(past)) {
                return Err(site.shape(format!(
                    "a mask {} for {past} keys: its last dimension must be {past}",
                    shape::display(b.dims(mask))
                )));
            }
            let masked = if is_truth {
                choose(b, &site, mask, scores, hidden)?
            } else {
                join_at(b, &site, Binary::Add, scores, mask)?
            };
            if b.dims(masked) != dims {
                return Err(site.shape(format!(
                    "a mask {} does not broadcast to {}",
                    shape::display(b.dims(mask)),
                    shape::display(&dims)
                )));
            }
            shares_of(b, &site, masked, hidden)?
        }
    };
    let out = product(b, &call, shares, value)?;
    if !flat {
        return Ok(out);
    }
    let joined = b.permute(out, vec![0, 2, 1, 3], &site)?;
    let inner = shape::check(&b.dims(joined)[2..], &site)?;
    b.reshape(joined, vec![rows, Dim::Fixed(length), Dim::Fixed(inner)], &site)
}

/// Whether the mask holds truth values; the others are added to the scores.
fn is_truth(b: &Builder, call: &Call<'_>) -> Result<bool, GraphError> {
    match call.element(b, 3).map(types::kind) {
        Some(Kind::Bool) => Ok(true),
        Some(Kind::Float) => Ok(false),
        _ => Err(call.site.form("its mask holds neither truth values nor floats")),
    }
}

/// Softmax of masked scores; 0 for a query that no key is visible to.
fn shares_of(
    b: &mut Builder,
    site: &NodeRef,
    scores: ValueId,
    hidden: ValueId,
) -> Result<ValueId, GraphError> {
    let dims = b.dims(scores).to_vec();
    let most = fold(b, site, Reduction::Max, scores, &[3], true)?;
    let is_empty = compare_values(b, site, Compare::Equal, most, hidden)?;
    let zero = b.scalar(0.0, site)?;
    let safe = choose(b, site, is_empty, zero, scores)?;
    let shares = b.push(Op::Softmax(3), &[safe], dims, site)?;
    choose(b, site, is_empty, zero, shares)
}

/// `[rows, steps, heads · values]` as `[rows, heads, steps, values]`.
fn split_heads(b: &mut Builder, site: &NodeRef, value: ValueId, heads: i64) -> Result<ValueId, GraphError> {
    let dims = b.dims(value).to_vec();
    let count = usize::try_from(heads).ok().filter(|heads| *heads > 0);
    match (&dims[..], count) {
        ([rows, Dim::Fixed(steps), Dim::Fixed(width)], Some(heads)) if width % heads == 0 => {
            let wide = vec![*rows, Dim::Fixed(*steps), Dim::Fixed(heads), Dim::Fixed(width / heads)];
            let wide = b.reshape(value, wide, site)?;
            b.permute(wide, vec![0, 2, 1, 3], site)
        }
        _ => Err(site.shape(format!("{heads} heads of {}", shape::display(&dims)))),
    }
}

/// Each head of a key or value serves as many heads of the query.
fn repeat_heads(
    b: &mut Builder,
    site: &NodeRef,
    value: ValueId,
    wanted: usize,
) -> Result<ValueId, GraphError> {
    let dims = b.dims(value).to_vec();
    let Dim::Fixed(heads) = dims[1] else {
        return Err(site.mixes_rows("its heads are the batch"));
    };
    if heads == wanted {
        return Ok(value);
    }
    if !wanted.is_multiple_of(heads) {
        return Err(site.shape(format!("{heads} heads of the key for {wanted} of the query")));
    }
    let mut wide = dims.clone();
    wide.insert(2, Dim::Fixed(1));
    let apart = b.reshape(value, wide.clone(), site)?;
    wide[2] = Dim::Fixed(wanted / heads);
    let repeated = b.expand(apart, wide, site)?;
    let mut dims = dims;
    dims[1] = Dim::Fixed(wanted);
    b.reshape(repeated, dims, site)
}
