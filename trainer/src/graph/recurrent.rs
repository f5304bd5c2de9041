//! LSTM, GRU and RNN, written out step by step.

use super::arithmetic::{join_at, map};
use super::builder::{Builder, Call, NodeRef};
use super::linear::product;
use super::{Binary, Dim, GraphError, Op, Unary, ValueId, shape};

/// Most steps of a sequence in one direction: each becomes operations of its own.
const STEPS_MAX: usize = 2048;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cell {
    Lstm,
    Gru {
        /// Whether the reset gate is applied behind the product.
        resets_behind: bool,
    },
    Rnn(Activation),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Activation {
    Tanh,
    Relu,
}

impl Cell {
    fn gates(self) -> usize {
        match self {
            Cell::Lstm => 4,
            Cell::Gru { .. } => 3,
            Cell::Rnn(_) => 1,
        }
    }
}

/// The weights of one direction, transposed for products from the left.
struct Direction {
    /// `[inputs, gates · hidden]`
    input: ValueId,
    /// `[hidden, gates · hidden]`
    state: ValueId,
    /// `[gates · hidden]` each: of the input and of the state.
    biases: Option<[ValueId; 2]>,
    hidden: usize,
    cell: Cell,
}

/// All outputs: each step's state, the last state and, for an LSTM, the last cell.
pub(super) fn recurrent(b: &mut Builder, mut call: Call<'_>) -> Result<Vec<ValueId>, GraphError> {
    let (input, weights, recurrence) = (call.float(b, 0)?, call.float(b, 1)?, call.float(b, 2)?);
    let site = call.site.clone();
    let biases = call.float_optional(b, 3)?;
    let initial = [call.float_optional(b, 5)?, call.float_optional(b, 6)?];
    let direction = call.string("direction")?.unwrap_or_else(|| "forward".to_owned());
    let stated = call.int("hidden_size", 0)?;
    let activations = call.strings("activations")?;
    if call.ints_input(b, 4)?.is_some() || call.has(7) {
        return Err(site.form("sequence lengths and peepholes are not supported"));
    }
    call.only("layout", 0)?;
    let (cell, defaults): (Cell, &[&str]) = match site.op.as_str() {
        "LSTM" => {
            call.only("input_forget", 0)?;
            (Cell::Lstm, &["Sigmoid", "Tanh", "Tanh"])
        }
        "GRU" => {
            let resets_behind = call.int("linear_before_reset", 0)? != 0;
            (Cell::Gru { resets_behind }, &["Sigmoid", "Tanh"])
        }
        _ => {
            let relu = activations.as_ref().is_some_and(|names| names.iter().all(|name| name == "Relu"));
            if relu {
                (Cell::Rnn(Activation::Relu), &["Relu"])
            } else {
                (Cell::Rnn(Activation::Tanh), &["Tanh"])
            }
        }
    };
    call.finish_with(7, 3)?;
    let ways: &[bool] = match direction.as_str() {
        "forward" => &[false],
        "reverse" => &[true],
        "bidirectional" => &[false, true],
        _ => return Err(site.form(format!("direction = {direction:?} is not known"))),
    };
    let usual = |names: &Vec<String>| {
        names.len() == defaults.len() * ways.len()
            && names.chunks(defaults.len()).all(|part| part.iter().zip(defaults).all(|(a, d)| a == d))
    };
    if activations.as_ref().is_some_and(|names| !usual(names)) {
        return Err(site.form(format!("activations = {activations:?} is not supported, only {defaults:?}")));
    }
    let dims = b.dims(input).to_vec();
    let [Dim::Fixed(steps), rows, Dim::Fixed(inputs)] = dims[..] else {
        return Err(site.mixes_rows(format!(
            "{} is not [steps, rows, values]: the second axis holds the batch",
            shape::display(&dims)
        )));
    };
    if steps > STEPS_MAX {
        return Err(site.form(format!("{steps} steps, at most {STEPS_MAX} are supported")));
    }
    let hidden = match *b.dims(recurrence) {
        [_, _, Dim::Fixed(hidden)] => hidden,
        _ => return Err(site.shape("its weights have three axes")),
    };
    let (count, wide) = (Dim::Fixed(ways.len()), Dim::Fixed(cell.gates().saturating_mul(hidden)));
    let both = Dim::Fixed(cell.gates().saturating_mul(hidden).saturating_mul(2));
    let fits = b.dims(weights) == [count, wide, Dim::Fixed(inputs)]
        && b.dims(recurrence) == [count, wide, Dim::Fixed(hidden)]
        && biases.is_none_or(|biases| b.dims(biases) == [count, both])
        && initial.iter().flatten().all(|state| b.dims(*state) == [count, rows, Dim::Fixed(hidden)])
        && (stated == 0 || stated == hidden as i64);
    if !fits {
        return Err(site.shape(format!(
            "weights {} and {} do not fit {} with {hidden} units",
            shape::display(b.dims(weights)),
            shape::display(b.dims(recurrence)),
            shape::display(&dims)
        )));
    }
    let mut states = vec![Vec::new(); steps];
    let mut lasts = [Vec::new(), Vec::new()];
    for (way, reverse) in ways.iter().enumerate() {
        let direction = Direction {
            input: turned(b, &site, weights, way)?,
            state: turned(b, &site, recurrence, way)?,
            biases: match biases {
                None => None,
                Some(biases) => {
                    let mine = part(b, &site, biases, 0, way, 1)?;
                    let size = cell.gates() * hidden;
                    let mine = b.reshape(mine, vec![both], &site)?;
                    Some([b.slice(mine, 0, 0, size, &site)?, b.slice(mine, 0, size, size, &site)?])
                }
            },
            hidden,
            cell,
        };
        let start = |b: &mut Builder, state: Option<ValueId>| match state {
            None => Ok(None),
            Some(state) => {
                let mine = part(b, &site, state, 0, way, 1)?;
                b.reshape(mine, vec![rows, Dim::Fixed(hidden)], &site).map(Some)
            }
        };
        let (mut state, mut memory) = (start(b, initial[0])?, start(b, initial[1])?);
        for step in 0..steps {
            let at = if *reverse { steps - 1 - step } else { step };
            let now = b.slice(input, 0, at, 1, &site)?;
            let now = b.reshape(now, vec![rows, Dim::Fixed(inputs)], &site)?;
            let (next, kept) = direction.step(b, &call, now, state, memory)?;
            (state, memory) = (Some(next), kept);
            states[at].push(b.reshape(
                next,
                vec![Dim::Fixed(1), Dim::Fixed(1), rows, Dim::Fixed(hidden)],
                &site,
            )?);
        }
        for (last, found) in lasts.iter_mut().zip([state, memory]) {
            if let Some(found) = found {
                last.push(b.reshape(found, vec![Dim::Fixed(1), rows, Dim::Fixed(hidden)], &site)?);
            }
        }
    }
    let mut each = Vec::with_capacity(steps);
    for parts in states {
        each.push(joined(b, &site, parts, 1)?);
    }
    let mut outputs = vec![joined(b, &site, each, 0)?];
    for parts in lasts.into_iter().filter(|parts| !parts.is_empty()) {
        outputs.push(joined(b, &site, parts, 0)?);
    }
    Ok(outputs)
}

fn joined(b: &mut Builder, site: &NodeRef, parts: Vec<ValueId>, axis: usize) -> Result<ValueId, GraphError> {
    if let [single] = parts[..] {
        return Ok(single);
    }
    let mut dims = b.dims(parts[0]).to_vec();
    dims[axis] = Dim::Fixed(parts.len());
    b.push(Op::Concat(axis), &parts, dims, site)
}

/// Part `at` of `size` elements on an axis.
fn part(
    b: &mut Builder,
    site: &NodeRef,
    value: ValueId,
    axis: usize,
    at: usize,
    size: usize,
) -> Result<ValueId, GraphError> {
    b.slice(value, axis, at * size, size, site)
}

/// The weights of one direction with their axes exchanged.
fn turned(b: &mut Builder, site: &NodeRef, weights: ValueId, way: usize) -> Result<ValueId, GraphError> {
    let mine = part(b, site, weights, 0, way, 1)?;
    let dims = b.dims(mine)[1..].to_vec();
    let mine = b.reshape(mine, dims, site)?;
    b.permute(mine, vec![1, 0], site)
}

impl Direction {
    /// The next state and, for an LSTM, the next cell.
    fn step(
        &self,
        b: &mut Builder,
        call: &Call<'_>,
        now: ValueId,
        state: Option<ValueId>,
        memory: Option<ValueId>,
    ) -> Result<(ValueId, Option<ValueId>), GraphError> {
        let site = &call.site;
        let mut fresh = product(b, call, now, self.input)?;
        if let Some([bias, _]) = self.biases {
            fresh = join_at(b, site, Binary::Add, fresh, bias)?;
        }
        let mut past = match (state, self.cell) {
            (None, _) | (_, Cell::Gru { resets_behind: false }) => None,
            (Some(state), _) => Some(product(b, call, state, self.state)?),
        };
        if let Some([_, bias]) = self.biases {
            past = Some(match past {
                Some(past) => join_at(b, site, Binary::Add, past, bias)?,
                None => bias,
            });
        }
        match self.cell {
            Cell::Rnn(activation) => {
                let total = sum(b, site, fresh, past)?;
                let kind = if activation == Activation::Relu { Unary::Relu } else { Unary::Tanh };
                Ok((map(b, site, kind, total)?, None))
            }
            Cell::Lstm => self.lstm(b, site, fresh, past, memory),
            Cell::Gru { resets_behind } => {
                self.gru(b, call, fresh, past, state, resets_behind).map(|next| (next, None))
            }
        }
    }

    fn gate(&self, b: &mut Builder, site: &NodeRef, all: ValueId, at: usize) -> Result<ValueId, GraphError> {
        let axis = b.dims(all).len() - 1;
        part(b, site, all, axis, at, self.hidden)
    }

    /// Gates in the order input, output, forget, cell.
    fn lstm(
        &self,
        b: &mut Builder,
        site: &NodeRef,
        fresh: ValueId,
        past: Option<ValueId>,
        memory: Option<ValueId>,
    ) -> Result<(ValueId, Option<ValueId>), GraphError> {
        let all = sum(b, site, fresh, past)?;
        let axis = b.dims(all).len() - 1;
        let gates = b.slice(all, axis, 0, 3 * self.hidden, site)?;
        let gates = map(b, site, Unary::Sigmoid, gates)?;
        let candidate = self.gate(b, site, all, 3)?;
        let candidate = map(b, site, Unary::Tanh, candidate)?;
        let enters = self.gate(b, site, gates, 0)?;
        let mut cell = join_at(b, site, Binary::Mul, enters, candidate)?;
        if let Some(memory) = memory {
            let stays = self.gate(b, site, gates, 2)?;
            let kept = join_at(b, site, Binary::Mul, stays, memory)?;
            cell = join_at(b, site, Binary::Add, kept, cell)?;
        }
        let leaves = self.gate(b, site, gates, 1)?;
        let bent = map(b, site, Unary::Tanh, cell)?;
        Ok((join_at(b, site, Binary::Mul, leaves, bent)?, Some(cell)))
    }

    /// Gates in the order update, reset, candidate.
    fn gru(
        &self,
        b: &mut Builder,
        call: &Call<'_>,
        fresh: ValueId,
        past: Option<ValueId>,
        state: Option<ValueId>,
        resets_behind: bool,
    ) -> Result<ValueId, GraphError> {
        let site = &call.site;
        let width = self.hidden;
        let mut candidate = self.gate(b, site, fresh, 2)?;
        let axis = b.dims(fresh).len() - 1;
        let mut gates = b.slice(fresh, axis, 0, 2 * width, site)?;
        if let Some(past) = past {
            let axis = b.dims(past).len() - 1;
            let share = b.slice(past, axis, 0, 2 * width, site)?;
            gates = join_at(b, site, Binary::Add, gates, share)?;
        }
        if let (Some(state), false) = (state, resets_behind) {
            let weights = b.slice(self.state, 1, 0, 2 * width, site)?;
            let share = product(b, call, state, weights)?;
            gates = join_at(b, site, Binary::Add, gates, share)?;
        }
        let gates = map(b, site, Unary::Sigmoid, gates)?;
        let (update, reset) = (self.gate(b, site, gates, 0)?, self.gate(b, site, gates, 1)?);
        let late = match past {
            Some(past) => Some(self.gate(b, site, past, 2)?),
            None => None,
        };
        if resets_behind {
            if let Some(late) = late {
                let scaled = join_at(b, site, Binary::Mul, reset, late)?;
                candidate = join_at(b, site, Binary::Add, candidate, scaled)?;
            }
        } else {
            if let Some(state) = state {
                let scaled = join_at(b, site, Binary::Mul, reset, state)?;
                let weights = b.slice(self.state, 1, 2 * width, width, site)?;
                let share = product(b, call, scaled, weights)?;
                candidate = join_at(b, site, Binary::Add, candidate, share)?;
            }
            if let Some(late) = late {
                candidate = join_at(b, site, Binary::Add, candidate, late)?;
            }
        }
        let candidate = map(b, site, Unary::Tanh, candidate)?;
        // (1 − update) · candidate + update · state
        let taken = join_at(b, site, Binary::Mul, update, candidate)?;
        let mut next = join_at(b, site, Binary::Sub, candidate, taken)?;
        if let Some(state) = state {
            let kept = join_at(b, site, Binary::Mul, update, state)?;
            next = join_at(b, site, Binary::Add, next, kept)?;
        }
        Ok(next)
    }
}

fn sum(
    b: &mut Builder,
    site: &NodeRef,
    left: ValueId,
    right: Option<ValueId>,
) -> Result<ValueId, GraphError> {
    match right {
        Some(right) => join_at(b, site, Binary::Add, left, right),
        None => Ok(left),
    }
}
