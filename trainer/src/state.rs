//! The replicated state of a run: everything that a worker needs to apply the next step.
//!
//! One encoding serves checkpoints and state transfers to joining workers: safetensors with every parameter
//! under its own name (`model.NAME`, `best.NAME`, `ema.NAME`, `optimizer.SLOT.NAME`), running statistics as `state.NAME`
//! and `best_state.NAME`, and the counters as JSON in the file's metadata.
//! Nothing in it depends on the number of workers.
use std::collections::{HashMap, HashSet};

use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize};
use serde::{Deserialize, Serialize};

use crate::engine::{Param, ParamLayout};
use crate::ledger::Ledger;
use crate::optim::OptimizerState;
use crate::precision::LossScale;
use crate::validation::Evaluation;

#[cfg(test)]
mod tests;

/// The metadata entry with the counters.
const COUNTERS: &str = "millrace";
/// Bytes reserved for names, shapes and counters in a state; epochs take 64 bytes each.
const OVERHEAD_BYTES_MAX: u64 = 128 << 20;
/// Vectors an optimizer may keep.
const SLOTS_MAX: u64 = 8;
/// Most steps of a state, so that sums of counters do not overflow. No run reaches it.
const STEPS_MAX: u64 = 1 << 60;

/// A run after `step` steps.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RunState {
    pub(crate) step: u64,
    pub(crate) weights: Vec<f32>,
    pub(crate) optimizer: OptimizerState,
    pub(crate) ledger: Ledger,
    /// The scale of the last step's sum ([`crate::fixed`]); none in checkpoints of earlier programs.
    pub(crate) fraction_bits: Option<i32>,
    pub(crate) evaluations: Vec<Evaluation>,
    /// The weights of the evaluation with the lowest loss, in a run that publishes them.
    pub(crate) best: Option<Vec<f32>>,
    /// The running statistics of the model; empty if it has none that move.
    pub(crate) states: Vec<f32>,
    /// Those of `best`.
    pub(crate) best_states: Vec<f32>,
    /// The moving average of the weights, in a run that keeps one and has changed its weights.
    pub(crate) ema: Option<Vec<f32>>,
    /// The scale of the loss, in a run that has one.
    pub(crate) loss_scale: Option<LossScale>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Counters {
    step: u64,
    optimizer_step: u64,
    optimizer_slots: Vec<String>,
    ledger: Ledger,
    #[serde(default)]
    fraction_bits: Option<i32>,
    // Left out of the states of runs without evaluations, which have the bytes of earlier programs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    evaluations: Vec<Evaluation>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    best: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    ema: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    loss_scale: Option<LossScale>,
}

/// The counters that people ask for, as any program has written them.
#[derive(Debug, Deserialize)]
pub(crate) struct History {
    pub(crate) step: u64,
    pub(crate) ledger: Ledger,
    #[serde(default)]
    pub(crate) evaluations: Vec<Evaluation>,
}

/// The header of a safetensors file, without its tensors.
#[derive(Deserialize)]
struct Header {
    #[serde(rename = "__metadata__")]
    metadata: HashMap<String, String>,
}

impl History {
    /// Bytes of the header of an encoded state, which begin with their count.
    pub(crate) const LENGTH_BYTES: usize = 8;

    /// Bytes up to the end of the header, from the first [`History::LENGTH_BYTES`] of a state.
    pub(crate) fn header_end(start: &[u8]) -> Result<usize, String> {
        let length = start.first_chunk().ok_or("the state ends in its header")?;
        let length = u64::from_le_bytes(*length);
        if length > OVERHEAD_BYTES_MAX {
            return Err(format!("its header has {length} bytes, at most {OVERHEAD_BYTES_MAX} are allowed"));
        }
        Ok(Self::LENGTH_BYTES + length as usize)
    }

    /// Decodes the header of an encoded state, which is all that `bytes` must hold.
    pub(crate) fn decode(bytes: &[u8]) -> Result<History, String> {
        // The library reads a header only together with all tensors.
        let header = bytes.get(Self::LENGTH_BYTES..).unwrap_or_default();
        let header: Header = serde_json::from_slice(header).map_err(|e| e.to_string())?;
        let counters = header.metadata.get(COUNTERS).ok_or("the counters are missing")?;
        serde_json::from_str(counters).map_err(|e| e.to_string())
    }
}

impl RunState {
    /// The weights to publish.
    pub(crate) fn published(&self) -> &[f32] {
        self.best.as_ref().or(self.ema.as_ref()).unwrap_or(&self.weights)
    }

    /// The running statistics to publish.
    pub(crate) fn published_states(&self) -> &[f32] {
        if self.best.is_some() { &self.best_states } else { &self.states }
    }

    /// The largest encoding a state with this layout may have.
    pub(crate) fn bytes_max(layout: &ParamLayout) -> u64 {
        let vector = 4 * layout.elements() as u64;
        let states = 4 * layout.state_elements() as u64;
        let vectors = vector.saturating_mul(3 + SLOTS_MAX).saturating_add(states.saturating_mul(2));
        vectors.saturating_add(OVERHEAD_BYTES_MAX)
    }

    /// Encodes the state; equal states have equal bytes.
    pub(crate) fn encode(&self, layout: &ParamLayout) -> Result<Vec<u8>, String> {
        let counters = Counters {
            step: self.step,
            optimizer_step: self.optimizer.step,
            optimizer_slots: self.optimizer.slots.iter().map(|(name, _)| name.clone()).collect(),
            ledger: self.ledger.clone(),
            fraction_bits: self.fraction_bits,
            evaluations: self.evaluations.clone(),
            best: self.best.is_some(),
            ema: self.ema.is_some(),
            loss_scale: self.loss_scale,
        };
        let counters = serde_json::to_string(&counters).map_err(|e| e.to_string())?;
        let mut vectors = vec![("model".to_owned(), &layout.params, &self.weights)];
        if let Some(best) = &self.best {
            vectors.push(("best".to_owned(), &layout.params, best));
            vectors.push(("best_state".to_owned(), &layout.states, &self.best_states));
        }
        if let Some(ema) = &self.ema {
            vectors.push(("ema".to_owned(), &layout.params, ema));
        }
        for (slot, values) in &self.optimizer.slots {
            vectors.push((format!("optimizer.{slot}"), &layout.params, values));
        }
        vectors.push(("state".to_owned(), &layout.states, &self.states));
        let mut tensors: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
        for (prefix, params, values) in vectors {
            for param in params {
                let part = values
                    .get(param.range.clone())
                    .ok_or_else(|| format!("{prefix} has {} elements", values.len()))?;
                let mut bytes = vec![0u8; part.len() * 4];
                for (bytes, value) in bytes.chunks_exact_mut(4).zip(part) {
                    bytes.copy_from_slice(&value.to_le_bytes());
                }
                tensors.push((format!("{prefix}.{}", param.name), param.shape.clone(), bytes));
            }
        }
        let views = tensors
            .iter()
            .map(|(name, shape, bytes)| {
                let view = TensorView::new(Dtype::F32, shape.clone(), bytes);
                view.map(|view| (name.as_str(), view)).map_err(|e| format!("{name}: {e}"))
            })
            .collect::<Result<Vec<_>, String>>()?;
        let metadata = HashMap::from([(COUNTERS.to_owned(), counters)]);
        serialize(views, Some(metadata)).map_err(|e| e.to_string())
    }

    /// Decodes a state; every parameter and state of the layout must be present with its shape.
    pub(crate) fn decode(layout: &ParamLayout, bytes: &[u8]) -> Result<RunState, String> {
        let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(|e| e.to_string())?;
        let counters = metadata
            .metadata()
            .as_ref()
            .and_then(|entries| entries.get(COUNTERS))
            .ok_or("the counters are missing")?;
        let counters: Counters = serde_json::from_str(counters).map_err(|e| e.to_string())?;
        let tensors = SafeTensors::deserialize(bytes).map_err(|e| e.to_string())?;
        let vector_of = |prefix: &str, params: &[Param]| {
            let mut values = vec![0f32; params.last().map_or(0, |param| param.range.end)];
            for param in params {
                let name = format!("{prefix}.{}", param.name);
                let tensor = tensors.tensor(&name).map_err(|e| format!("{name}: {e}"))?;
                if tensor.dtype() != Dtype::F32 || tensor.shape() != param.shape {
                    return Err(format!(
                        "{name} is {:?} {:?}, the model's is F32 {:?}",
                        tensor.dtype(),
                        tensor.shape(),
                        param.shape
                    ));
                }
                let part = &mut values[param.range.clone()];
                for (value, bytes) in part.iter_mut().zip(tensor.data().chunks_exact(4)) {
                    let mut word = [0u8; 4];
                    word.copy_from_slice(bytes);
                    *value = f32::from_le_bytes(word);
                }
            }
            Ok::<_, String>(values)
        };
        let vector = |prefix: &str| vector_of(prefix, &layout.params);
        let slots = counters.optimizer_slots.len();
        if slots as u64 > SLOTS_MAX {
            return Err(format!("it has {slots} optimizer vectors, at most {SLOTS_MAX} are allowed"));
        }
        // Tensors are told apart by the slot's name, a dot and the parameter's.
        let mut names = HashSet::new();
        if let Some(slot) =
            counters.optimizer_slots.iter().find(|slot| slot.contains('.') || !names.insert(*slot))
        {
            return Err(format!("its optimizer vector {slot:?} has a dot in its name, or is there twice"));
        }
        let evaluated =
            counters.evaluations.iter().flat_map(|evaluation| [evaluation.step, evaluation.epoch]);
        if [counters.step, counters.optimizer_step]
            .into_iter()
            .chain(evaluated)
            .any(|steps| steps > STEPS_MAX)
        {
            return Err(format!("it counts more than {STEPS_MAX} steps"));
        }
        let weights = vector("model")?;
        let best = counters.best.then(|| vector("best")).transpose()?;
        let states = vector_of("state", &layout.states)?;
        let best_states = match best {
            Some(_) => vector_of("best_state", &layout.states)?,
            None => Vec::new(),
        };
        let ema = counters.ema.then(|| vector("ema")).transpose()?;
        let slots = counters
            .optimizer_slots
            .iter()
            .map(|slot| Ok((slot.clone(), vector(&format!("optimizer.{slot}"))?)))
            .collect::<Result<Vec<_>, String>>()?;
        Ok(RunState {
            step: counters.step,
            weights,
            optimizer: OptimizerState { step: counters.optimizer_step, slots },
            ledger: counters.ledger,
            fraction_bits: counters.fraction_bits,
            evaluations: counters.evaluations,
            best,
            states,
            best_states,
            ema,
            loss_scale: counters.loss_scale,
        })
    }
}
