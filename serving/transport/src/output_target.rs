//! Delivery of a request's outputs: as tensors in the response, as best classes in the response, or in shared
//! memory.

use millrace_bundle::Signature;

use crate::classification::classify;
use crate::shared_memory::{SharedMemory, Span};
use millrace_serving_core::error::{InferError, quote};
use millrace_serving_core::parameters::{ParameterOwner, Parameters};
use millrace_serving_core::tensor::Tensor;
use millrace_serving_core::wire;

/// The delivery that a request asks for, for one output.
#[derive(Debug, Clone, Default)]
pub(crate) enum OutputTarget {
    /// The tensor, in the response.
    #[default]
    Message,
    /// The best classes of each row, at most this many, in the response.
    Classes(usize),
    /// The tensor, in a shared memory region.
    Region(Span),
}

/// An output of the response.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) tensor: Tensor,
    /// The shared memory for its elements, if they do not go into the response.
    pub(crate) span: Option<Span>,
}

impl Output {
    /// Its form in a response: with its elements, or with the parameters of its region.
    pub(crate) fn into_message(self) -> wire::Output {
        let Output { tensor, span } = self;
        wire::Output { region: span.map(|span| span.parameters(tensor.data.raw_len())), tensor }
    }
}

/// Reads the deliveries of the requested outputs, in their order.
///
/// # Errors
/// [`InferError::Invalid`], [`InferError::NotFound`], [`InferError::Unsupported`].
pub(crate) fn read_output_targets<'a, P: Parameters + 'a>(
    outputs: impl Iterator<Item = (&'a str, &'a P)>,
    memory: &SharedMemory,
) -> Result<Vec<OutputTarget>, InferError> {
    let mut deliveries = Vec::new();
    let mut spans = Vec::new();
    for (name, parameters) in outputs {
        let of = ParameterOwner("output", name);
        let classes = match parameters.count(&of, "classification")? {
            Some(0) => {
                return Err(InferError::invalid(format!(
                    "{of}: parameter \"classification\" takes a number of classes from 1 on, it is 0"
                )));
            }
            classes => classes.map(|count| usize::try_from(count).unwrap_or(usize::MAX)),
        };
        let span = memory.span(of, parameters)?;
        deliveries.push(match (classes, span) {
            (None, None) => OutputTarget::Message,
            (Some(count), None) => OutputTarget::Classes(count),
            (None, Some(span)) => {
                spans.push((span.place(), name));
                OutputTarget::Region(span)
            }
            (Some(_), Some(_)) => {
                return Err(InferError::invalid(format!(
                    "{of} has both classification and shared_memory_region: classes come in the reply only"
                )));
            }
        });
    }
    spans.sort_unstable();
    for pair in spans.windows(2) {
        if let [((object, _, end), one), ((other, start, _), two)] = pair
            && object == other
            && start < end
        {
            return Err(InferError::invalid(format!(
                "outputs {} and {} overlap in shared memory",
                quote(one),
                quote(two)
            )));
        }
    }
    Ok(deliveries)
}

/// Converts a model's outputs to their deliveries; writes nothing to shared memory yet. `deliveries` is in
/// the order of the outputs, or empty if all go into the response.
///
/// # Errors
/// [`InferError::Invalid`] if an output does not fit its region or cannot have classes.
pub(crate) fn deliver(
    signature: &Signature,
    outputs: Vec<Tensor>,
    deliveries: Vec<OutputTarget>,
) -> Result<Vec<Output>, InferError> {
    let mut deliveries = deliveries.into_iter();
    outputs
        .into_iter()
        .map(|tensor| match deliveries.next().unwrap_or_default() {
            OutputTarget::Message => Ok(Output { tensor, span: None }),
            OutputTarget::Classes(count) => {
                Ok(Output { tensor: classify(&tensor, count, signature.has_rows())?, span: None })
            }
            OutputTarget::Region(span) => {
                let bytes = tensor.data.raw_len();
                if bytes as u64 > span.byte_size() {
                    return Err(InferError::invalid(format!(
                        "output {} has {bytes} bytes, shared_memory_byte_size in region {} is {}",
                        quote(&tensor.name),
                        quote(span.region()),
                        span.byte_size()
                    )));
                }
                Ok(Output { tensor, span: Some(span) })
            }
        })
        .collect()
}

/// Writes the outputs that go to regions, after checking that all of them can be written. Must be the last
/// step that can fail: a refused request leaves shared memory unchanged.
///
/// # Errors
/// [`InferError::Invalid`], [`InferError::Unavailable`] if an object changed meanwhile.
pub(crate) fn write_regions(outputs: &[Output]) -> Result<(), InferError> {
    let placed = || outputs.iter().filter_map(|output| Some((output.span.as_ref()?, &output.tensor)));
    placed().try_for_each(|(span, _)| span.check_size())?;
    placed().try_for_each(|(span, tensor)| span.write(&tensor.data.to_raw()))
}
