//! The interpreter: one graph on one backend, forward and backward.

use std::marker::PhantomData;
use std::sync::Arc;

use burn_backend::tensor::{Device as BackendDevice, FloatTensor};
use burn_backend::{Backend, Element, ElementConversion};

use super::backward::{Step, add_slice, backward};
use super::buckets::{Bucket, BucketFn, Buckets};
use super::forward::forward;
use super::kernels::Kernels;
use super::order::Order;
use super::products::Product;
use super::resident::{Resident, State};
use super::tensor::{dims, download, reshape, upload};
use super::training::{Kept, mask, normalize};
use super::{Device, EngineError, ShardKey, shape_of};
use crate::graph::{Graph, Input, Node, Op, ParamSpec, Source};
use crate::precision::Half;

/// A loaded graph on a device, independent of the backend.
pub(super) trait Compute: Resident + Send + Sync {
    /// Copies the flat weights to the device; the caller has checked the length.
    fn set_weights(&mut self, weights: &[f32]) -> Result<(), EngineError>;
    /// Copies the flat states to the device; the caller has checked the length.
    fn set_states(&mut self, states: &[f32]) -> Result<(), EngineError>;
    /// Says of each normalisation whether training leaves its running statistics alone and normalises by them.
    fn set_frozen(&mut self, frozen: &[bool]);
    /// Sets the format of the products of [`Compute::gradients`]; 32 bits if none.
    fn set_half(&mut self, half: Option<Half>);
    /// The output for checked, non-empty inputs, as in evaluation.
    fn logits(&self, inputs: &[f32], rows: usize) -> Result<Vec<f32>, EngineError>;
    /// Hands over the gradient in `buckets`, each as soon as it is complete, and returns the rest of it. `loss_fn` turns
    /// the output into the gradient of the loss by the output.
    fn gradients(
        &self,
        inputs: &[f32],
        rows: usize,
        key: ShardKey,
        buckets: &Buckets,
        hand_over: &mut BucketFn<'_, f32>,
        loss_fn: &mut LossFn<'_, f32>,
    ) -> Result<Trained<f32>, EngineError>;
}

/// What a computation in training mode gives, beside the gradient in buckets.
pub(super) struct Trained<E> {
    /// The mean and variance of each channel whose running statistics move.
    pub(super) moments: Vec<[E; 2]>,
    /// The gradients that leave as factors.
    pub(super) products: Vec<Product<E>>,
}

/// Turns the output into the gradient of the loss with respect to the output.
pub(super) type LossFn<'a, E> = dyn FnMut(&[E]) -> Result<Vec<E>, EngineError> + 'a;

/// Takes the gradients of a complete bucket from those of all values.
pub(super) type TakeFn<'a, B> =
    dyn FnMut(&Bucket, &mut [Option<FloatTensor<B>>]) -> Result<(), EngineError> + 'a;

/// [`LossFn`] on the device.
pub(super) type SlopeFn<'a, B> = dyn FnMut(FloatTensor<B>) -> Result<FloatTensor<B>, EngineError> + 'a;

/// A graph with its constants and parameters as tensors with elements `E`.
pub(super) struct Interpreter<B: Backend, E> {
    pub(super) graph: Arc<Graph>,
    pub(super) device: BackendDevice<B>,
    label: Device,
    /// Constants, what they alone determine, parameters and states, by value.
    pub(super) resident: Vec<Option<FloatTensor<B>>>,
    /// For each normalisation, whether training leaves its running statistics alone.
    frozen: Vec<bool>,
    /// The format of products in training, if it is not that of all numbers.
    half: Option<Half>,
    /// In this format: the resident values that products read.
    narrowed: Vec<Option<FloatTensor<B>>>,
    /// For the backends that gain from it: the transposes of resident matrices that are right factors of products.
    turned: Vec<Option<FloatTensor<B>>>,
    /// What stays between steps beside the weights, if the device keeps it.
    pub(super) state: Option<State<B>>,
    elements: PhantomData<fn() -> E>,
}

struct Trace<B: Backend> {
    values: Vec<Option<FloatTensor<B>>>,
    kept: Vec<Option<Kept<B>>>,
    /// Mean and variance of each normalisation whose running statistics move.
    moments: Vec<[FloatTensor<B>; 2]>,
}

impl<B: Kernels, E: Element> Interpreter<B, E> {
    pub(super) fn new(graph: Arc<Graph>, device: BackendDevice<B>, label: Device) -> Self {
        let mut resident: Vec<Option<FloatTensor<B>>> = graph
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
        // What depends on constants alone is computed once.
        let determined = graph.determined();
        for (at, node) in graph.nodes().iter().enumerate().filter(|(_, node)| determined.is(node.output)) {
            let read: Option<Vec<FloatTensor<B>>> =
                node.inputs.iter().map(|input| resident[*input].clone()).collect();
            let dims = &graph.values()[node.output].dims;
            resident[node.output] = read.map(|read| forward::<B>(&node.op, &read, &shape_of(dims, 1)).0);
            for value in determined.dropped(at, node) {
                resident[value] = None;
            }
        }
        let frozen = vec![false; graph.normalizations().len()];
        let narrowed = vec![None; resident.len()];
        let turned = vec![None; resident.len()];
        let (half, state) = (None, None);
        Interpreter {
            graph,
            device,
            label,
            resident,
            frozen,
            half,
            narrowed,
            turned,
            state,
            elements: PhantomData,
        }
    }

    pub(super) fn failed(&self, reason: impl Into<String>) -> EngineError {
        EngineError::Execution { device: self.label, reason: reason.into() }
    }

    pub(super) fn hold(&mut self, weights: &[E]) -> Result<(), EngineError> {
        let graph = Arc::clone(&self.graph);
        self.hold_parts(graph.params(), weights, |source| match source {
            Source::Param(index) => Some(*index),
            _ => None,
        })
    }

    pub(super) fn hold_states(&mut self, states: &[E]) -> Result<(), EngineError> {
        let graph = Arc::clone(&self.graph);
        self.hold_parts(graph.states(), states, |source| match source {
            Source::State(index) => Some(*index),
            _ => None,
        })
    }

    /// Uploads the parts of a flat vector for the values whose source has an index into `specs`.
    fn hold_parts(
        &mut self,
        specs: &[ParamSpec],
        flat: &[E],
        index_of: impl Fn(&Source) -> Option<usize>,
    ) -> Result<(), EngineError> {
        let mut starts = Vec::with_capacity(specs.len());
        let mut start = 0usize;
        for spec in specs {
            starts.push(start);
            start += spec.elements();
        }
        if start != flat.len() {
            return Err(EngineError::Weights { expected: start, found: flat.len() });
        }
        for (value, resident) in self.graph.values().iter().zip(&mut self.resident) {
            if let Some(index) = index_of(&value.source) {
                let spec = &specs[index];
                let part = &flat[starts[index]..starts[index] + spec.elements()];
                *resident = Some(upload::<B, E>(part.to_vec(), &spec.shape, &self.device));
            }
        }
        self.weights_changed();
        Ok(())
    }

    /// Renews what is derived from the weights.
    pub(super) fn weights_changed(&mut self) {
        self.turn_resident();
        self.narrow_resident();
    }

    /// Transposes the matrices that are right factors, once for all shards: a product reads one form and its derivative the
    /// other.
    fn turn_resident(&mut self) {
        let graph = Arc::clone(&self.graph);
        let is_param = |id: usize| matches!(graph.values()[id].source, Source::Param(_));
        for node in graph.nodes() {
            match (&node.op, &node.inputs[..]) {
                // Its reader follows in the order of the graph.
                (Op::Permute(axes), [matrix]) if axes[..] == [1, 0] && is_param(*matrix) => {
                    let turned = self.resident[*matrix].as_ref().and_then(B::transpose);
                    if turned.is_some() {
                        self.turned[node.output].clone_from(&self.resident[*matrix]);
                    }
                    self.resident[node.output] = turned;
                }
                (Op::MatMul, [left, matrix]) if is_param(*matrix) && graph.values()[*left].trained => {
                    self.turned[*matrix] = self.resident[*matrix].as_ref().and_then(B::transpose);
                }
                _ => {}
            }
        }
    }

    /// Narrows the resident values that products read, once for all shards.
    fn narrow_resident(&mut self) {
        self.narrowed.fill(None);
        let Some(half) = self.half else { return };
        for node in self.graph.nodes().iter().filter(|node| node.op.is_product()) {
            for input in &node.inputs {
                if self.narrowed[*input].is_none() {
                    let value = self.resident[*input].clone();
                    self.narrowed[*input] = value.map(|value| B::narrow(value, half));
                }
            }
        }
    }

    /// The inputs of a product in the format `half`.
    fn narrow(&self, half: Half, node: &Node, inputs: Vec<FloatTensor<B>>) -> Vec<FloatTensor<B>> {
        let narrow = |(id, value): (&usize, FloatTensor<B>)| {
            self.narrowed[*id].clone().unwrap_or_else(|| B::narrow(value, half))
        };
        node.inputs.iter().zip(inputs).map(narrow).collect()
    }

    /// The format of a node's numbers in training, if they are narrower than others.
    fn half_of(&self, node: &Node) -> Option<Half> {
        self.half.filter(|_| node.op.is_product())
    }

    /// Computes every value; in training with a key.
    fn trace(
        &self,
        inputs: Vec<E>,
        rows: usize,
        training: Option<ShardKey>,
    ) -> Result<Trace<B>, EngineError> {
        let mut values = self.resident.clone();
        let place = |input: &Input| shape_of(&self.graph.values()[input.value].dims, rows);
        match self.graph.inputs() {
            [input] => values[input.value] = Some(upload::<B, E>(inputs, &place(input), &self.device)),
            several => {
                for input in several {
                    let rows = inputs.chunks_exact(self.graph.input_width().max(1));
                    let part = rows.flat_map(|row| &row[input.range.clone()]).copied().collect();
                    values[input.value] = Some(upload::<B, E>(part, &place(input), &self.device));
                }
            }
        }
        let mut all_kept = Vec::with_capacity(self.graph.nodes().len());
        let mut moments = Vec::new();
        for node in self.graph.nodes() {
            if self.resident[node.output].is_some() || self.graph.determined().is(node.output) {
                all_kept.push(None);
                continue;
            }
            let read = self.read(&values, &node.inputs)?;
            let shape = shape_of(&self.graph.values()[node.output].dims, rows);
            let (value, kept) = match (training, &node.op) {
                (Some(_), Op::BatchNorm { index, epsilon }) if !self.frozen[*index] => {
                    let found = normalize::<B>(&read, *epsilon);
                    moments.push(found.moments);
                    (found.output, Some(found.kept))
                }
                (Some(key), Op::Dropout(index)) => {
                    let count = shape.iter().product();
                    let mask = mask::<E>(key, *index, &self.graph.dropouts()[*index], count);
                    let mask = upload::<B, E>(mask, &shape, &self.device);
                    (B::float_mul(read[0].clone(), mask.clone()), Some(Kept::Mask(mask)))
                }
                (_, Op::Rank { axis, largest, last }) => {
                    let order = Order { axis: *axis, largest: *largest, last: *last };
                    let found = order.positions::<B, E>(read[0].clone(), &shape, &self.device);
                    (found.map_err(|reason| self.failed(reason))?, None)
                }
                (Some(_), op) => match self.half_of(node) {
                    Some(half) => {
                        let (output, kept) = forward::<B>(op, &self.narrow(half, node, read), &shape);
                        (B::widen(output, half), kept)
                    }
                    None => forward::<B>(op, &read, &shape),
                },
                (None, op) => forward::<B>(op, &read, &shape),
            };
            values[node.output] = Some(value);
            all_kept.push(kept);
        }
        Ok(Trace { values, kept: all_kept, moments })
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
        self.output(&self.trace(inputs, rows, None)?)
    }

    /// Computes in training mode and differentiates. Hands over each bucket of the gradient as soon as it is complete.
    pub(super) fn train(
        &self,
        inputs: Vec<E>,
        rows: usize,
        key: ShardKey,
        buckets: &Buckets,
        hand_over: &mut BucketFn<'_, E>,
        loss_fn: &mut LossFn<'_, E>,
    ) -> Result<Trained<E>, EngineError> {
        let mut take =
            |bucket: &Bucket, grads: &mut [Option<FloatTensor<B>>]| hand_over(self.collect(bucket, grads)?);
        self.train_with((inputs, rows, key), buckets, &mut take, &mut |output| {
            let shape = dims::<B>(&output);
            let slope = loss_fn(&self.host(&output)?)?;
            Ok(upload::<B, E>(slope, &shape, &self.device))
        })
    }

    /// [`Interpreter::train`] whose output and gradients stay on the device: `take` gets each bucket as soon as it is
    /// complete, and `slope_fn` the output.
    pub(super) fn train_with(
        &self,
        (inputs, rows, key): (Vec<E>, usize, ShardKey),
        plan: &Buckets,
        take: &mut TakeFn<'_, B>,
        slope_fn: &mut SlopeFn<'_, B>,
    ) -> Result<Trained<E>, EngineError> {
        let mut trace = self.trace(inputs, rows, Some(key))?;
        let values = self.graph.values();
        let output = self.graph.output();
        let shape = shape_of(&values[output].dims, rows);
        let mut grads: Vec<Option<FloatTensor<B>>> = vec![None; values.len()];
        let found = self.read(&trace.values, &[output])?;
        for tensor in found {
            grads[output] = Some(slope_fn(reshape::<B>(tensor, &shape))?);
        }
        let mut buckets = plan.iter().peekable();
        let mut products = Vec::new();
        for (position, node) in self.graph.nodes().iter().enumerate().rev() {
            while let Some(complete) = buckets.next_if(|bucket| bucket.first_node > position) {
                take(complete, &mut grads)?;
            }
            if !values[node.output].trained {
                continue;
            }
            // The nodes that read this output come later in the order, hence its gradient is complete.
            let Some(grad) = grads[node.output].take() else {
                continue;
            };
            // The parts of a value fill its gradient in place: a sequence is cut into many.
            if let (Op::Slice { axis, start }, [input]) = (&node.op, &node.inputs[..]) {
                let shape = shape_of(&values[*input].dims, rows);
                grads[*input] = Some(add_slice::<B>(grads[*input].take(), &shape, *axis, *start, grad));
                trace.values[node.output] = None;
                continue;
            }
            let half = self.half_of(node);
            let inputs = self.read(&trace.values, &node.inputs)?;
            let (inputs, grad) = match half {
                Some(half) => (self.narrow(half, node, inputs), B::narrow(grad, half)),
                None => (inputs, grad),
            };
            let output = self.read(&trace.values, &[node.output])?;
            trace.values[node.output] = None;
            let mut needs_gradient: Vec<bool> = node.inputs.iter().map(|id| values[*id].trained).collect();
            if let Some(matrix) = plan.factored_at(position) {
                let rows = dims::<B>(&grad)[0];
                products.push(Product::new(matrix, rows, self.host(&inputs[0])?, self.host(&grad)?));
                // The right one is the matrix.
                needs_gradient[1] = false;
            }
            let turned = node.inputs.get(1).filter(|_| half.is_none());
            let step = Step {
                op: &node.op,
                inputs: &inputs,
                turned: turned.and_then(|id| self.turned[*id].as_ref()),
                output: &output[0],
                kept: trace.kept[position].as_ref(),
                needs_gradient: &needs_gradient,
            };
            for (id, found) in node.inputs.iter().zip(backward::<B>(&step, grad)) {
                let Some(found) = found.filter(|_| values[*id].trained) else {
                    continue;
                };
                let found = match half {
                    Some(half) => B::widen(found, half),
                    None => found,
                };
                grads[*id] = Some(match grads[*id].take() {
                    Some(sum) => B::float_add(sum, found),
                    None => found,
                });
            }
        }
        for complete in buckets {
            take(complete, &mut grads)?;
        }
        Ok(Trained { moments: self.moments(trace.moments)?, products })
    }

    /// The elements of a tensor, row-major.
    fn host(&self, tensor: &FloatTensor<B>) -> Result<Vec<E>, EngineError> {
        let mut elements = Vec::new();
        download::<B, E>(tensor.clone(), &mut elements).map_err(|reason| self.failed(reason))?;
        Ok(elements)
    }

    /// The mean and the variance of each channel, in one transfer.
    fn moments(&self, moments: Vec<[FloatTensor<B>; 2]>) -> Result<Vec<[E; 2]>, EngineError> {
        if moments.is_empty() {
            return Ok(Vec::new());
        }
        let (means, variances): (Vec<_>, Vec<_>) =
            moments.into_iter().map(|[mean, variance]| (mean, variance)).unzip();
        let all = B::float_cat(vec![B::float_cat(means, 1), B::float_cat(variances, 1)], 1);
        let mut flat = Vec::new();
        download::<B, E>(all, &mut flat).map_err(|reason| self.failed(reason))?;
        let (means, variances) = flat.split_at(flat.len() / 2);
        Ok(means.iter().zip(variances).map(|(mean, variance)| [*mean, *variance]).collect())
    }

    /// Takes the gradients of a bucket's parameters out of `grads`, one after another.
    fn collect(&self, bucket: &Bucket, grads: &mut [Option<FloatTensor<B>>]) -> Result<Vec<E>, EngineError> {
        let total = bucket.elements();
        let mut elements = Vec::with_capacity(total);
        for member in &bucket.members {
            match grads[member.value].take() {
                Some(grad) => {
                    download::<B, E>(grad, &mut elements).map_err(|reason| self.failed(reason))?;
                }
                None => elements.resize(elements.len() + member.range.len(), 0.0f32.elem()),
            }
        }
        if elements.len() != total {
            return Err(self.failed(format!("{} gradient elements for {total} weights", elements.len())));
        }
        Ok(elements)
    }
}

impl<B: Kernels> Compute for Interpreter<B, f32> {
    fn set_weights(&mut self, weights: &[f32]) -> Result<(), EngineError> {
        self.hold(weights)
    }

    fn set_states(&mut self, states: &[f32]) -> Result<(), EngineError> {
        self.hold_states(states)
    }

    fn set_frozen(&mut self, frozen: &[bool]) {
        self.frozen = frozen.to_vec();
    }

    fn set_half(&mut self, half: Option<Half>) {
        self.half = half;
        self.narrow_resident();
    }

    fn logits(&self, inputs: &[f32], rows: usize) -> Result<Vec<f32>, EngineError> {
        self.evaluate(inputs.to_vec(), rows)
    }

    fn gradients(
        &self,
        inputs: &[f32],
        rows: usize,
        key: ShardKey,
        buckets: &Buckets,
        hand_over: &mut BucketFn<'_, f32>,
        loss_fn: &mut LossFn<'_, f32>,
    ) -> Result<Trained<f32>, EngineError> {
        self.train(inputs.to_vec(), rows, key, buckets, hand_over, loss_fn)
    }
}
