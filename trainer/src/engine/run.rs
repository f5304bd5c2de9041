//! The interpreter: one graph on one backend, forward and backward.

use std::marker::PhantomData;
use std::sync::Arc;

use burn_backend::tensor::{Device as BackendDevice, FloatTensor, IntTensor};
use burn_backend::{Backend, Element, ElementConversion};

use super::backward::{Step, backward};
use super::forward::forward;
use super::tensor::{download, upload};
use super::{Device, EngineError, shape_of};
use crate::graph::{Graph, Source};

/// A loaded graph on a device, independent of the backend.
pub(super) trait Compute: Send + Sync {
    /// Copies the flat weights to the device; the caller has checked the length.
    fn set_weights(&mut self, weights: &[f32]) -> Result<(), EngineError>;
    /// The output for checked, non-empty inputs.
    fn logits(&self, inputs: &[f32], rows: usize) -> Result<Vec<f32>, EngineError>;
    /// The flat gradient; `loss_fn` turns the output into the gradient of the loss by the output.
    fn gradients(
        &self,
        inputs: &[f32],
        rows: usize,
        loss_fn: &mut LossFn<'_, f32>,
    ) -> Result<Vec<f32>, EngineError>;
}

/// Turns the output into the gradient of the loss with respect to the output.
pub(super) type LossFn<'a, E> = dyn FnMut(&[E]) -> Result<Vec<E>, EngineError> + 'a;

/// A graph with its constants and parameters as tensors with elements `E`.
pub(super) struct Interpreter<B: Backend, E> {
    graph: Arc<Graph>,
    device: BackendDevice<B>,
    label: Device,
    /// Constants and parameters, by value.
    resident: Vec<Option<FloatTensor<B>>>,
    elements: PhantomData<fn() -> E>,
}

struct Trace<B: Backend> {
    values: Vec<Option<FloatTensor<B>>>,
    picked: Vec<Option<IntTensor<B>>>,
}

impl<B: Backend, E: Element> Interpreter<B, E> {
    pub(super) fn new(graph: Arc<Graph>, device: BackendDevice<B>, label: Device) -> Self {
        let resident = graph
            .values()
            .iter()
            .map(|value| match &value.source {
                Source::Constant(elements) => {
                    let elements: Vec<E> = elements.iter().map(|v| v.elem()).collect();
                    Some(upload::<B, E>(elements, &shape_of(&value.dims, 1), &device))
                }
                _ => None,
            })
            .collect();
        Interpreter { graph, device, label, resident, elements: PhantomData }
    }

    fn failed(&self, reason: impl Into<String>) -> EngineError {
        EngineError::Execution { device: self.label, reason: reason.into() }
    }

    pub(super) fn hold(&mut self, weights: &[E]) -> Result<(), EngineError> {
        let mut starts = Vec::with_capacity(self.graph.params().len());
        let mut start = 0usize;
        for param in self.graph.params() {
            starts.push(start);
            start += param.elements();
        }
        if start != weights.len() {
            return Err(EngineError::Weights { expected: start, found: weights.len() });
        }
        for (value, resident) in self.graph.values().iter().zip(&mut self.resident) {
            if let Source::Param(index) = value.source {
                let spec = &self.graph.params()[index];
                let part = &weights[starts[index]..starts[index] + spec.elements()];
                *resident = Some(upload::<B, E>(part.to_vec(), &spec.shape, &self.device));
            }
        }
        Ok(())
    }

    fn trace(&self, inputs: Vec<E>, rows: usize) -> Result<Trace<B>, EngineError> {
        let mut values = self.resident.clone();
        let input = self.graph.input();
        let shape = shape_of(&self.graph.values()[input].dims, rows);
        values[input] = Some(upload::<B, E>(inputs, &shape, &self.device));
        let mut picked = Vec::with_capacity(self.graph.nodes().len());
        for node in self.graph.nodes() {
            let read = self.read(&values, &node.inputs)?;
            let shape = shape_of(&self.graph.values()[node.output].dims, rows);
            let (value, indices) = forward::<B>(&node.op, &read, &shape);
            values[node.output] = Some(value);
            picked.push(indices);
        }
        Ok(Trace { values, picked })
    }

    fn read(
        &self,
        values: &[Option<FloatTensor<B>>],
        ids: &[usize],
    ) -> Result<Vec<FloatTensor<B>>, EngineError> {
        ids.iter()
            .map(|id| {
                values[*id]
                    .clone()
                    .ok_or_else(|| self.failed(format!("value {id} was read before it was made")))
            })
            .collect()
    }

    fn output(&self, trace: &Trace<B>) -> Result<Vec<E>, EngineError> {
        let output = self.read(&trace.values, &[self.graph.output()])?;
        let mut elements = Vec::new();
        for tensor in output {
            download::<B, E>(tensor, &mut elements).map_err(|reason| self.failed(reason))?;
        }
        Ok(elements)
    }

    pub(super) fn evaluate(&self, inputs: Vec<E>, rows: usize) -> Result<Vec<E>, EngineError> {
        self.output(&self.trace(inputs, rows)?)
    }

    pub(super) fn differentiate(
        &self,
        inputs: Vec<E>,
        rows: usize,
        loss_fn: &mut LossFn<'_, E>,
    ) -> Result<Vec<E>, EngineError> {
        let mut trace = self.trace(inputs, rows)?;
        let slope = loss_fn(&self.output(&trace)?)?;
        let values = self.graph.values();
        let output = self.graph.output();
        let mut grads: Vec<Option<FloatTensor<B>>> = vec![None; values.len()];
        let shape = shape_of(&values[output].dims, rows);
        grads[output] = Some(upload::<B, E>(slope, &shape, &self.device));
        for (position, node) in self.graph.nodes().iter().enumerate().rev() {
            if !values[node.output].trained {
                continue;
            }
            // The nodes that read this output come later in the order, hence its gradient is complete.
            let Some(grad) = grads[node.output].take() else {
                continue;
            };
            let inputs = self.read(&trace.values, &node.inputs)?;
            let output = self.read(&trace.values, &[node.output])?;
            trace.values[node.output] = None;
            let needs_gradient: Vec<bool> = node.inputs.iter().map(|id| values[*id].trained).collect();
            let step = Step {
                op: &node.op,
                inputs: &inputs,
                output: &output[0],
                picked: trace.picked[position].as_ref(),
                needs_gradient: &needs_gradient,
            };
            for (id, found) in node.inputs.iter().zip(backward::<B>(&step, grad)) {
                let Some(found) = found.filter(|_| values[*id].trained) else {
                    continue;
                };
                grads[*id] = Some(match grads[*id].take() {
                    Some(sum) => B::float_add(sum, found),
                    None => found,
                });
            }
        }
        self.collect(grads)
    }

    /// The gradients of the parameters, one after another.
    fn collect(&self, mut grads: Vec<Option<FloatTensor<B>>>) -> Result<Vec<E>, EngineError> {
        let params = self.graph.params();
        let mut ids = vec![0; params.len()];
        for (id, value) in self.graph.values().iter().enumerate() {
            if let Source::Param(index) = value.source {
                ids[index] = id;
            }
        }
        let total = params.iter().map(|p| p.elements()).sum();
        let mut flat = Vec::with_capacity(total);
        for (spec, id) in params.iter().zip(ids) {
            match grads[id].take() {
                Some(grad) => {
                    download::<B, E>(grad, &mut flat).map_err(|reason| self.failed(reason))?;
                }
                None => flat.resize(flat.len() + spec.elements(), 0.0f32.elem()),
            }
        }
        if flat.len() != total {
            return Err(self.failed(format!("{} gradient elements for {total} weights", flat.len())));
        }
        Ok(flat)
    }
}

impl<B: Backend> Compute for Interpreter<B, f32> {
    fn set_weights(&mut self, weights: &[f32]) -> Result<(), EngineError> {
        self.hold(weights)
    }

    fn logits(&self, inputs: &[f32], rows: usize) -> Result<Vec<f32>, EngineError> {
        self.evaluate(inputs.to_vec(), rows)
    }

    fn gradients(
        &self,
        inputs: &[f32],
        rows: usize,
        loss_fn: &mut LossFn<'_, f32>,
    ) -> Result<Vec<f32>, EngineError> {
        self.differentiate(inputs.to_vec(), rows, loss_fn)
    }
}
