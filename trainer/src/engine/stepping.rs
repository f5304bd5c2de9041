//! Steps of an interpreter whose training state stays on the device.
//!
//! A step makes new tensors and replaces the old ones once all new values are known to be finite. Therefore a step that
//! fails changes nothing. A small tensor of flags is all that comes to the host.

use std::sync::Arc;

use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

use super::buckets::{Buckets, members};
use super::kernels::Kernels;
use super::resident::{Added, Checked, Gradient, Judged, Place, Resident, State, StepError, Update};
use super::run::Interpreter;
use super::tensor::{dims, download, reshape, upload};
use super::{EngineError, device_loss, loss, multiply};
use crate::graph::ValueId;

mod finite;
mod optimizer;

use finite::{finite_flags, norm_factor};
use optimizer::{lerp, moved};

/// The part of a parameter in new values.
struct Moved<B: Backend> {
    param: usize,
    gradient: FloatTensor<B>,
    weight: FloatTensor<B>,
    slots: Vec<FloatTensor<B>>,
}

impl<B: Kernels> Interpreter<B, f32> {
    fn state(&self) -> Result<&State<B>, EngineError> {
        self.state.as_ref().ok_or_else(|| self.failed("no state was begun"))
    }

    fn state_mut(&mut self) -> Result<&mut State<B>, EngineError> {
        let missing = self.failed("no state was begun");
        self.state.as_mut().ok_or(missing)
    }

    /// The weights of a parameter, as one axis.
    fn flat_weight(&self, place: &Place) -> Result<FloatTensor<B>, EngineError> {
        let weight = self.resident[place.value].clone().ok_or_else(|| self.failed("no weights were set"))?;
        Ok(reshape::<B>(weight, &[place.range.len()]))
    }

    /// Copies of tensors, one after another.
    fn joined(&self, tensors: impl Iterator<Item = FloatTensor<B>>) -> Result<Vec<f32>, EngineError> {
        let mut flat = Vec::new();
        for tensor in tensors {
            download::<B, f32>(tensor, &mut flat).map_err(|reason| self.failed(reason))?;
        }
        Ok(flat)
    }

    /// The parts of a flat vector, for each parameter.
    fn parts(&self, flat: &[f32]) -> Result<Vec<FloatTensor<B>>, EngineError> {
        let places = &self.state()?.places;
        let expected = places.last().map_or(0, |place| place.range.end);
        if flat.len() != expected {
            return Err(EngineError::Weights { expected, found: flat.len() });
        }
        let part = |place: &Place| {
            upload::<B, f32>(flat[place.range.clone()].to_vec(), &[place.range.len()], &self.device)
        };
        Ok(places.iter().map(part).collect())
    }

    /// The place and the value of the first element that is not finite.
    fn first_bad(&self, place: &Place, tensor: &FloatTensor<B>) -> Result<(usize, f32), EngineError> {
        let values = self.joined(std::iter::once(tensor.clone()))?;
        let at = values.iter().position(|value| !value.is_finite()).unwrap_or_default();
        Ok((place.range.start + at, values.get(at).copied().unwrap_or(f32::NAN)))
    }

    /// New values of all parameters that train.
    fn moves(&self, gradient: Gradient<'_>, update: &Update) -> Result<Vec<Moved<B>>, StepError> {
        let state = self.state()?;
        let given = match gradient {
            Gradient::Mean(mean) => Some(self.parts(mean)?),
            Gradient::Kept(_) => None,
        };
        let mut moves: Vec<Moved<B>> = Vec::new();
        for (param, place) in state.places.iter().enumerate() {
            if place.decays.is_none() {
                continue;
            }
            let weight = self.flat_weight(place)?;
            let gradient = match &given {
                Some(parts) => parts[param].clone(),
                None => state.sum[param]
                    .clone()
                    .unwrap_or_else(|| B::float_mul_scalar(weight.clone(), 0.0.into())),
            };
            let slots = state.slots.iter().map(|slot| slot[param].clone()).collect();
            moves.push(Moved { param, gradient, weight, slots });
        }
        let factor = match gradient {
            Gradient::Kept(weight) => 1.0 / weight,
            Gradient::Mean(_) => 1.0,
        };
        let mean = |gradient: &FloatTensor<B>| match factor == 1.0 {
            true => gradient.clone(),
            false => B::float_mul_scalar(gradient.clone(), factor.into()),
        };
        let mut means: Vec<FloatTensor<B>> = moves.iter().map(|part| mean(&part.gradient)).collect();
        if let (Some(limit), false) = (update.clip_norm, means.is_empty()) {
            let factor = norm_factor::<B>(&means, limit);
            means = means.into_iter().map(|mean| B::float_mul(mean, factor.clone())).collect();
        }
        for (part, mean) in moves.iter_mut().zip(means) {
            let decays = state.places[part.param].decays == Some(true);
            let rule = if decays { &update.decaying } else { &update.plain };
            let (weight, slots) =
                moved::<B>(rule, part.weight.clone(), mean, std::mem::take(&mut part.slots))
                    .ok_or_else(|| self.failed("the state has the slots of another optimizer"))?;
            part.weight = weight;
            part.slots = slots;
        }
        Ok(moves)
    }

    /// Fails if a gradient or a new value is not finite.
    fn check(&self, moves: &[Moved<B>]) -> Result<(), StepError> {
        let state = self.state()?;
        if moves.is_empty() {
            return Ok(());
        }
        let mut tensors: Vec<(usize, &FloatTensor<B>)> = Vec::new();
        tensors.extend(moves.iter().map(|part| (part.param, &part.gradient)));
        tensors.extend(moves.iter().map(|part| (part.param, &part.weight)));
        for slot in 0..state.slots.len() {
            tensors.extend(moves.iter().map(|part| (part.param, &part.slots[slot])));
        }
        let flags = finite_flags::<B>(tensors.iter().map(|(_, tensor)| *tensor));
        let flags = self.joined(std::iter::once(flags))?;
        let Some(bad) = flags.iter().position(|flag| *flag != 0.0) else { return Ok(()) };
        let (param, tensor) = tensors[bad];
        let (index, value) = self.first_bad(&state.places[param], tensor)?;
        Err(match bad / moves.len() {
            0 => StepError::Gradient { index, value },
            1 => StepError::Weight { index, value },
            _ => StepError::Slot { index },
        })
    }

    /// Takes the new values over.
    fn take(&mut self, moves: Vec<Moved<B>>) -> Result<(), EngineError> {
        for Moved { param, weight, slots, .. } in moves {
            let state = self.state_mut()?;
            for (own, new) in state.slots.iter_mut().zip(slots) {
                own[param] = new;
            }
            let (value, weight) =
                (state.places[param].value, reshape::<B>(weight, &state.places[param].shape));
            self.resident[value] = Some(weight);
        }
        Ok(())
    }

    /// Moves the average towards the new weights. The first step sets it to them.
    fn add_to_average(&mut self, share: f32) -> Result<(), EngineError> {
        let state = self.state()?;
        let weights: Result<Vec<_>, _> = state.places.iter().map(|place| self.flat_weight(place)).collect();
        let mut weights = weights?;
        if let Some(average) = &state.average {
            for ((weight, value), place) in weights.iter_mut().zip(average).zip(&state.places) {
                let value = value.clone();
                *weight = match place.decays {
                    None => value,
                    Some(_) => lerp::<B>(value, weight.clone(), share),
                };
            }
        }
        self.state_mut()?.average = Some(weights);
        Ok(())
    }
}

impl<B: Kernels> Resident for Interpreter<B, f32> {
    fn keep(&mut self, decays: Vec<Option<bool>>, slots: usize, first: f32) -> Result<(), EngineError> {
        let graph = Arc::clone(&self.graph);
        let placed = members(&graph).into_iter().zip(graph.params()).zip(decays);
        let places: Vec<Place> = placed
            .map(|((member, spec), decays)| Place {
                value: member.value,
                shape: spec.shape.clone(),
                decays: decays.filter(|_| !member.range.is_empty()),
                range: member.range,
            })
            .collect();
        let filled = |place: &Place| {
            upload::<B, f32>(vec![first; place.range.len()], &[place.range.len()], &self.device)
        };
        let slots = (0..slots).map(|_| places.iter().map(filled).collect()).collect();
        let sum = vec![None; places.len()];
        self.state = Some(State { places, slots, average: None, sum });
        Ok(())
    }

    fn clear_sum(&mut self) -> Result<(), EngineError> {
        self.state_mut()?.sum.fill(None);
        Ok(())
    }

    fn add(&mut self, shard: &Checked<'_>) -> Result<Added, EngineError> {
        let whole = Buckets::whole(&self.graph);
        let mut found: Vec<Option<FloatTensor<B>>> = Vec::new();
        let mut judged = Judged::default();
        let trained = self.train_with(
            (shard.inputs.to_vec(), shard.rows, shard.key),
            &whole,
            &mut |bucket, grads| {
                found.extend(bucket.members.iter().map(|member| grads[member.value].take()));
                Ok(())
            },
            &mut |output| {
                let (loss, slope) = self.judge(shard, output)?;
                judged = loss;
                Ok(slope)
            },
        )?;
        let unscaled = f64::from(1.0 / shard.scale);
        let state = self.state()?;
        let mut grads = Vec::with_capacity(found.len());
        for (place, grad) in state.places.iter().zip(found) {
            let grad = grad.filter(|_| place.decays.is_some());
            let grad = grad.map(|grad| reshape::<B>(grad, &[place.range.len()]));
            grads.push(grad.map(|grad| match shard.scale == 1.0 {
                true => grad,
                false => B::float_mul_scalar(grad, unscaled.into()),
            }));
        }
        let mut is_finite = true;
        if shard.may_overflow && grads.iter().any(Option::is_some) {
            let flags = finite_flags::<B>(grads.iter().flatten());
            is_finite = self.joined(std::iter::once(flags))?.iter().all(|flag| *flag == 0.0);
        }
        for (sum, grad) in self.state_mut()?.sum.iter_mut().zip(grads) {
            *sum = match (sum.take(), grad) {
                (Some(sum), Some(grad)) => Some(B::float_add(sum, grad)),
                (sum, grad) => sum.or(grad),
            };
        }
        Ok(Added { judged, moments: trained.moments, is_finite })
    }

    fn step(&mut self, gradient: Gradient<'_>, update: &Update) -> Result<(), StepError> {
        let moves = self.moves(gradient, update)?;
        self.check(&moves)?;
        self.take(moves)?;
        if let Some(share) = update.average {
            self.add_to_average(share)?;
        }
        self.clear_sum()?;
        self.weights_changed();
        Ok(())
    }

    fn weights(&self) -> Result<Vec<f32>, EngineError> {
        let members = members(&self.graph);
        let tensor =
            |value: ValueId| self.resident[value].clone().ok_or_else(|| self.failed("no weights were set"));
        let tensors: Result<Vec<_>, _> = members.iter().map(|member| tensor(member.value)).collect();
        self.joined(tensors?.into_iter())
    }

    fn slots(&self) -> Result<Vec<Vec<f32>>, EngineError> {
        self.state()?.slots.iter().map(|slot| self.joined(slot.iter().cloned())).collect()
    }

    fn set_slots(&mut self, slots: &[Vec<f32>]) -> Result<(), EngineError> {
        let parts: Result<Vec<_>, _> = slots.iter().map(|slot| self.parts(slot)).collect();
        self.state_mut()?.slots = parts?;
        Ok(())
    }

    fn average(&self) -> Result<Option<Vec<f32>>, EngineError> {
        let average = self.state()?.average.as_ref();
        average.map(|average| self.joined(average.iter().cloned())).transpose()
    }

    fn set_average(&mut self, average: Option<&[f32]>) -> Result<(), EngineError> {
        let parts = average.map(|average| self.parts(average)).transpose()?;
        self.state_mut()?.average = parts;
        Ok(())
    }

    fn exchange_average(&mut self) -> Result<(), EngineError> {
        let state = self.state()?;
        let Some(average) = &state.average else { return Ok(()) };
        let mut weights = Vec::with_capacity(average.len());
        let mut values = Vec::with_capacity(average.len());
        for (place, value) in state.places.iter().zip(average) {
            weights.push(self.flat_weight(place)?);
            values.push((place.value, reshape::<B>(value.clone(), &place.shape)));
        }
        for (value, tensor) in values {
            self.resident[value] = Some(tensor);
        }
        self.state_mut()?.average = Some(weights);
        self.weights_changed();
        Ok(())
    }
}

impl<B: Kernels> Interpreter<B, f32> {
    /// The loss of an output, and the gradient of the scaled loss by it.
    fn judge(
        &self,
        shard: &Checked<'_>,
        output: FloatTensor<B>,
    ) -> Result<(Judged, FloatTensor<B>), EngineError> {
        let found = device_loss::judge::<B>(shard.objective, shard.truth.labels, output.clone(), shard.rows);
        if let Some((judged, slope)) = found.map_err(|reason| self.failed(reason))? {
            let slope = match shard.scale == 1.0 {
                true => slope,
                false => B::float_mul_scalar(slope, f64::from(shard.scale).into()),
            };
            return Ok((judged, slope));
        }
        let shape = dims::<B>(&output);
        let logits = self.joined(std::iter::once(output))?;
        let mut found = loss::loss_and_gradient(shard.objective, &logits, shard.truth, shard.rows)?;
        multiply(&mut found.slope, shard.scale);
        let judged = Judged {
            loss_sum: found.loss_sum,
            weight: found.weight,
            correct: found.correct,
            ignored: found.ignored,
        };
        Ok((judged, upload::<B, f32>(found.slope, &shape, &self.device)))
    }
}
