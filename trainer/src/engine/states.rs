//! States of an engine: the running statistics of batch normalisations, and how a step moves them.
//!
//! A step takes the statistics of each virtual shard, merges them in the order of the shards to those of the whole
//! batch, and moves each running value once: `running = momentum · running + (1 − momentum) · batch`. The variance is
//! that of the population, as ONNX defines it. All is computed in f64 from the same bits on every worker.

use super::{Engine, EngineError};

/// Statistics of one channel over the values of a shard.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ChannelMoments {
    /// Mean.
    pub mean: f32,
    /// Population variance.
    pub variance: f32,
}

impl ChannelMoments {
    /// The bits of both values.
    pub(crate) fn to_bits(self) -> u64 {
        u64::from(self.mean.to_bits()) << 32 | u64::from(self.variance.to_bits())
    }

    pub(crate) fn from_bits(bits: u64) -> ChannelMoments {
        ChannelMoments { mean: f32::from_bits((bits >> 32) as u32), variance: f32::from_bits(bits as u32) }
    }
}

/// Mean and population variance of a channel over all shards, given with their rows.
fn merged(shards: impl Iterator<Item = (usize, ChannelMoments)> + Clone) -> [f64; 2] {
    let rows: f64 = shards.clone().map(|(rows, _)| rows as f64).sum();
    let average = |value: &dyn Fn(ChannelMoments) -> f64| {
        shards.clone().map(|(rows, moments)| rows as f64 * value(moments)).sum::<f64>() / rows
    };
    let mean = average(&|moments| f64::from(moments.mean));
    let variance = average(&|moments| {
        let distance = f64::from(moments.mean) - mean;
        f64::from(moments.variance) + distance * distance
    });
    [mean, variance]
}

impl Engine {
    /// The current states, laid out by [`super::ParamLayout::states`].
    pub fn states(&self) -> &[f32] {
        &self.states
    }

    /// Replaces the states, which must be finite.
    pub fn set_states(&mut self, states: &[f32]) -> Result<(), EngineError> {
        if states.len() != self.states.len() {
            return Err(EngineError::Weights { expected: self.states.len(), found: states.len() });
        }
        if let Some(at) = states.iter().position(|value| !value.is_finite()) {
            return Err(self.not_finite_state(at, f64::from(states[at])));
        }
        self.states.copy_from_slice(states);
        self.compute.set_states(states)
    }

    fn not_finite_state(&self, at: usize, value: f64) -> EngineError {
        let state = self.layout.states.iter().find(|state| state.range.contains(&at));
        EngineError::State { name: state.map(|state| state.name.clone()).unwrap_or_default(), value }
    }

    /// Leaves states alone: `frozen` says so of each state of the layout. A batch normalisation whose statistics are
    /// both frozen normalises by them in training, too.
    ///
    /// Fails when a normalisation has only one frozen statistic.
    pub fn freeze_states(&mut self, frozen: &[bool]) -> Result<(), EngineError> {
        if frozen.len() != self.layout.states.len() {
            return Err(EngineError::Weights { expected: self.layout.states.len(), found: frozen.len() });
        }
        let mut of_nodes = Vec::with_capacity(self.frozen.len());
        for node in self.graph.normalizations() {
            let name = |state: usize| self.layout.states[state].name.clone();
            let half = |is_frozen: usize, is_not: usize| EngineError::FrozenHalf {
                node: node.node.clone(),
                frozen: name(is_frozen),
                other: name(is_not),
            };
            match (frozen[node.mean], frozen[node.variance]) {
                (true, false) => return Err(half(node.mean, node.variance)),
                (false, true) => return Err(half(node.variance, node.mean)),
                (both, _) => of_nodes.push(both),
            }
        }
        self.frozen = of_nodes;
        self.compute.set_frozen(&self.frozen);
        Ok(())
    }

    /// Channels whose running statistics move.
    pub fn moving_channels(&self) -> usize {
        self.moving().map(|node| node.channels).sum()
    }

    fn moving(&self) -> impl Iterator<Item = &crate::graph::Normalization> {
        self.graph
            .normalizations()
            .iter()
            .zip(&self.frozen)
            .filter(|(_, frozen)| !**frozen)
            .map(|(node, _)| node)
    }

    /// Refuses shards of `rows` rows in which a channel would have one value.
    pub(crate) fn check_shard_rows(&self, rows: usize) -> Result<(), EngineError> {
        match self.moving().find(|node| node.values(rows) < 2) {
            Some(node) => Err(EngineError::ShardTooSmall { node: node.node.clone(), rows }),
            None => Ok(()),
        }
    }

    /// Moves the running statistics by one step, given the rows of each shard and its
    /// [`super::ShardGradients::moments`], in the order of the shards.
    ///
    /// Fails, changing nothing, when a value becomes infinite or NaN.
    pub fn move_states(&mut self, shards: &[(usize, &[ChannelMoments])]) -> Result<(), EngineError> {
        let channels = self.moving_channels();
        if channels == 0 || shards.iter().all(|(rows, _)| *rows == 0) {
            return Ok(());
        }
        if let Some((_, moments)) = shards.iter().find(|(_, moments)| moments.len() != channels) {
            let reason = format!("{} channels for {channels} moving ones", moments.len());
            return Err(EngineError::Batch { reason });
        }
        let mut moved = self.states.clone();
        let mut first = 0;
        for node in self.moving() {
            let momentum = f64::from(node.momentum);
            let starts = [node.mean, node.variance].map(|state| self.layout.states[state].range.start);
            for channel in 0..node.channels {
                let batch = merged(shards.iter().map(|(rows, moments)| (*rows, moments[first + channel])));
                for (start, batch) in starts.into_iter().zip(batch) {
                    let running = f64::from(moved[start + channel]);
                    let next = (momentum * running + (1.0 - momentum) * batch) as f32;
                    if !next.is_finite() {
                        return Err(self.not_finite_state(start + channel, f64::from(next)));
                    }
                    moved[start + channel] = next;
                }
            }
            first += node.channels;
        }
        self.states = moved;
        self.compute.set_states(&self.states)
    }
}
