//! Einsum, as matrix products of one operand after another between changes of the axes' order.

use super::arithmetic::join_at;
use super::builder::{Builder, Call, NodeRef};
use super::movement::select;
use super::reduction::{Reduction, fold};
use super::{Binary, Dim, GraphError, Op, ValueId, shape};

/// Most operands.
const OPERANDS_MAX: usize = 16;
/// Stands for the axes of an ellipsis, counted from the last one. No letter of an equation is among these.
const ELLIPSIS: [char; shape::RANK_MAX] = ['⁰', '¹', '²', '³', '⁴', '⁵', '⁶', '⁷'];

/// The letters of a term whose operand has `rank` axes; `axes` of an ellipsis if that is not known.
fn letters(term: &str, rank: Option<usize>, axes: usize) -> Option<Vec<char>> {
    if !term.chars().all(|letter| letter.is_ascii_alphabetic() || letter == '.') {
        return None;
    }
    let Some((left, right)) = term.split_once("...") else {
        return (!term.contains('.')).then(|| term.chars().collect());
    };
    let own = left.chars().count() + right.chars().count();
    let axes = rank.map_or(Some(axes), |rank| rank.checked_sub(own))?;
    let ellipsis = ELLIPSIS.get(..axes)?.iter().rev();
    let all: Vec<char> = left.chars().chain(ellipsis.copied()).chain(right.chars()).collect();
    (!all.contains(&'.')).then_some(all)
}

/// The letters of the operands, which have `ranks`, and of the result.
fn terms(call: &mut Call<'_>, ranks: &[usize]) -> Result<(Vec<Vec<char>>, Vec<char>), GraphError> {
    let equation = call.string("equation")?.unwrap_or_default().replace(' ', "");
    let bad = |reason: &str| call.site.form(format!("equation {equation:?}: {reason}"));
    let (left, right) = match equation.split_once("->") {
        Some((left, right)) => (left, Some(right)),
        None => (equation.as_str(), None),
    };
    if left.split(',').count() != ranks.len() {
        return Err(bad(&format!("{} operands for {} inputs", left.split(',').count(), ranks.len())));
    }
    let inputs = left.split(',').zip(ranks).map(|(term, rank)| letters(term, Some(*rank), 0));
    let inputs: Option<Vec<Vec<char>>> = inputs.collect();
    let unfit = "a term is neither letters nor letters around one ellipsis, or its operand has fewer axes";
    let inputs = inputs.ok_or_else(|| bad(unfit))?;
    let is_dots = |letter: &char| ELLIPSIS.contains(letter);
    let dots = inputs.iter().map(|term| term.iter().filter(|letter| is_dots(letter)).count()).max();
    let dots = dots.unwrap_or(0);
    let output: Vec<char> = match right {
        Some(right) => letters(right, None, dots).ok_or_else(|| bad(unfit))?,
        None => {
            let mut once: Vec<char> = inputs.concat();
            once.retain(|letter| !is_dots(letter));
            once.sort_unstable();
            let all = once.clone();
            once.retain(|letter| all.iter().filter(|other| *other == letter).count() == 1);
            ELLIPSIS[..dots].iter().rev().copied().chain(once).collect()
        }
    };
    if dots > 0 && !output.iter().any(is_dots) {
        return Err(bad("the result lacks the ellipsis of the operands"));
    }
    if (1..output.len()).any(|at| output[..at].contains(&output[at])) {
        return Err(bad("a letter that the result has twice is not defined"));
    }
    if output.iter().any(|letter| !inputs.iter().any(|term| term.contains(letter))) {
        return Err(bad("a letter of the result is in no operand"));
    }
    Ok((inputs, output))
}

pub(super) fn einsum(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let count = call.input_count();
    if count > OPERANDS_MAX {
        return Err(call.site.form(format!("{count} inputs, at most {OPERANDS_MAX} are supported")));
    }
    let values = (0..count).map(|index| call.value(b, index)).collect::<Result<Vec<_>, _>>()?;
    let ranks: Vec<usize> = values.iter().map(|value| b.dims(*value).len()).collect();
    let (inputs, output) = terms(&mut call, &ranks)?;
    call.finish(OPERANDS_MAX)?;
    let site = call.site.clone();
    let mut operands = Vec::with_capacity(count);
    for (value, term) in values.into_iter().zip(inputs) {
        if b.dims(value).len() != term.len() {
            return Err(site.shape(format!(
                "{} for the letters {:?}",
                shape::display(b.dims(value)),
                term.iter().collect::<String>()
            )));
        }
        operands.push(diagonals(b, &site, value, term)?);
    }
    broadcast(b, &site, &mut operands)?;
    // Letters that only one operand has and the result lacks are summed first.
    for index in 0..count {
        let lone = |letter: &char| {
            !output.contains(letter)
                && !operands.iter().enumerate().any(|(o, (_, t))| o != index && t.contains(letter))
        };
        let (value, term) = operands[index].clone();
        let axes: Vec<usize> = (0..term.len()).filter(|axis| lone(&term[*axis])).collect();
        if !axes.is_empty() {
            let sum = fold(b, &site, Reduction::Sum, value, &axes, false)?;
            operands[index] = (sum, term.iter().copied().filter(|letter| !lone(letter)).collect());
        }
    }
    let mut operands = operands.into_iter();
    let Some(mut joined) = operands.next() else {
        return Err(site.form("it has no operand"));
    };
    while let Some(next) = operands.next() {
        // Letters of later operands stay until these are joined.
        let mut kept = output.clone();
        for letter in operands.as_slice().iter().flat_map(|(_, term)| term) {
            if !kept.contains(letter) {
                kept.push(*letter);
            }
        }
        joined = product(b, &site, &joined, &next, &kept)?;
    }
    let (value, term) = joined;
    order(b, &site, value, &term, &output)
}

/// The elements of an operand whose positions are equal along the axes of one letter, which then has one axis.
fn diagonals(
    b: &mut Builder,
    site: &NodeRef,
    mut value: ValueId,
    mut term: Vec<char>,
) -> Result<Operand, GraphError> {
    let twice = |term: &[char]| {
        (1..term.len())
            .find_map(|at| term[..at].iter().position(|other| *other == term[at]).map(|first| (first, at)))
    };
    while let Some((first, second)) = twice(&term) {
        let dims = b.dims(value).to_vec();
        let (Dim::Fixed(size), true) = (dims[first], dims[first] == dims[second]) else {
            return Err(site.shape(format!(
                "letter {:?} stands for axes of {} and {}, equal ones are needed",
                term[first], dims[first], dims[second]
            )));
        };
        // Both axes go last and become one, of which every (size + 1)th element is on the diagonal.
        let rest: Vec<usize> = (0..dims.len()).filter(|axis| ![first, second].contains(axis)).collect();
        let turned = b.permute(value, [&rest[..], &[first, second]].concat(), site)?;
        let mut flat: Vec<Dim> = rest.iter().map(|axis| dims[*axis]).collect();
        let area = size.checked_mul(size).ok_or_else(|| site.shape(format!("a diagonal of {size}")))?;
        flat.push(Dim::Fixed(area));
        let flat = b.reshape(turned, flat, site)?;
        let places = (0..size).map(|at| at * (size + 1)).collect();
        value = select(b, site, flat, rest.len(), places)?;
        let letter = term[first];
        term = rest.iter().map(|axis| term[*axis]).collect();
        term.push(letter);
    }
    Ok((value, term))
}

/// Removes axes of 1 of an ellipsis where another operand has a larger one: they are repeated.
fn broadcast(b: &mut Builder, site: &NodeRef, operands: &mut [Operand]) -> Result<(), GraphError> {
    let one = Dim::Fixed(1);
    for letter in ELLIPSIS {
        let dims = |b: &Builder, (value, term): &Operand| {
            term.iter().position(|other| *other == letter).map(|axis| (axis, b.dims(*value)[axis]))
        };
        if !operands.iter().filter_map(|operand| dims(b, operand)).any(|(_, dim)| dim != one) {
            continue;
        }
        for operand in operands.iter_mut() {
            if let Some((axis, dim)) = dims(b, operand)
                && dim == one
            {
                let mut kept = b.dims(operand.0).to_vec();
                kept.remove(axis);
                operand.0 = b.reshape(operand.0, kept, site)?;
                operand.1.remove(axis);
            }
        }
    }
    Ok(())
}

/// Brings the axes of a value into the order of `wanted`, which has the same letters.
fn order(
    b: &mut Builder,
    site: &NodeRef,
    value: ValueId,
    term: &[char],
    wanted: &[char],
) -> Result<ValueId, GraphError> {
    let places: Option<Vec<usize>> =
        wanted.iter().map(|letter| term.iter().position(|other| other == letter)).collect();
    let places = places.filter(|places| places.len() == term.len());
    b.permute(value, places.ok_or_else(|| site.form("its letters do not fit each other"))?, site)
}

type Operand = (ValueId, Vec<char>);

/// The product of two operands, with the letters of its axes.
fn product(
    b: &mut Builder,
    site: &NodeRef,
    left: &Operand,
    right: &Operand,
    output: &[char],
) -> Result<Operand, GraphError> {
    let (l, r) = (&left.1, &right.1);
    let dim = |b: &Builder, operand: &Operand, letter: &char| {
        let at = operand.1.iter().position(|other| other == letter)?;
        Some(b.dims(operand.0)[at])
    };
    for letter in l.iter().filter(|letter| r.contains(letter)) {
        if dim(b, left, letter) != dim(b, right, letter) {
            return Err(site.shape(format!("axis {letter:?} differs between the operands")));
        }
    }
    let summed: Vec<char> = l.iter().copied().filter(|c| r.contains(c) && !output.contains(c)).collect();
    let is_rows = |b: &Builder, operand: &Operand, c: &char| matches!(dim(b, operand, c), Some(Dim::Rows(_)));
    if summed.iter().any(|c| is_rows(b, left, c)) {
        return Err(site.mixes_rows("it sums over the batch"));
    }
    // The rows are an axis of their own, also where only one operand has them.
    let shared: Vec<char> = output
        .iter()
        .copied()
        .filter(|c| l.contains(c) && r.contains(c) || is_rows(b, left, c) || is_rows(b, right, c))
        .collect();
    let own = |term: &[char]| -> Vec<char> {
        term.iter().copied().filter(|c| !shared.contains(c) && !summed.contains(c)).collect()
    };
    let (rows, columns) = (own(l), own(r));
    let total = |b: &Builder, operand: &Operand, letters: &[char]| {
        let dims: Vec<Dim> = letters.iter().filter_map(|c| dim(b, operand, c)).collect();
        shape::check(&dims, site).map(Dim::Fixed)
    };
    let (m, n, k) = (total(b, left, &rows)?, total(b, right, &columns)?, total(b, left, &summed)?);
    let arrange = |b: &mut Builder, operand: &Operand, inner: [&[char]; 2], sizes: [Dim; 2]| {
        let mine: Vec<char> = shared.iter().copied().filter(|c| operand.1.contains(c)).collect();
        let wanted = [&mine[..], inner[0], inner[1]].concat();
        let turned = order(b, site, operand.0, &operand.1, &wanted)?;
        let mut dims: Vec<Dim> = shared.iter().map(|c| dim(b, operand, c).unwrap_or(Dim::Fixed(1))).collect();
        dims.extend(sizes);
        b.reshape(turned, dims, site)
    };
    let a = arrange(b, left, [&rows, &summed], [m, k])?;
    let c = arrange(b, right, [&summed, &columns], [k, n])?;
    let depth = shared.len();
    let mut dims = shape::broadcast(&b.dims(a)[..depth], &b.dims(c)[..depth], site)?;
    let outer = dims.clone();
    dims.extend([m, n]);
    let out = if summed.is_empty() && (m, n) == (Dim::Fixed(1), Dim::Fixed(1)) {
        join_at(b, site, Binary::Mul, a, c)?
    } else {
        b.push(Op::MatMul, &[a, c], dims, site)?
    };
    let mut wide = outer;
    wide.extend(rows.iter().filter_map(|c| dim(b, left, c)));
    wide.extend(columns.iter().filter_map(|c| dim(b, right, c)));
    let out = b.reshape(out, wide, site)?;
    Ok((out, [shared, rows, columns].concat()))
}
