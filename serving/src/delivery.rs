//! How the outputs of a request are handed over: in the message, as the names of the best classes, or in
//! shared memory.

use millrace_bundle::Signature;

use crate::classification::classify;
use crate::error::{InferError, quote};
use crate::parameters::{Of, Parameters};
use crate::shared_memory::{SharedMemory, Span};
use crate::tensor::Tensor;

/// What a request asks for one output.
#[derive(Debug, Clone, Default)]
pub(crate) enum Delivery {
    /// The tensor, in the reply.
    #[default]
    Message,
    /// The best classes of each row, at most so many, in the reply.
    Classes(usize),
    /// The tensor, in a region.
    Region(Span),
}

/// An output as the reply tells of it.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) tensor: Tensor,
    /// Where its elements go instead of into the reply.
    pub(crate) span: Option<Span>,
}

/// Reads what the requested outputs ask for, in their order.
///
/// # Errors
/// [`InferError::Invalid`], [`InferError::NotFound`], [`InferError::Unsupported`].
pub(crate) fn read_deliveries<'a, P: Parameters + 'a>(
    outputs: impl Iterator<Item = (&'a str, &'a P)>,
    memory: &SharedMemory,
) -> Result<Vec<Delivery>, InferError> {
    let mut deliveries = Vec::new();
    let mut spans = Vec::new();
    for (name, parameters) in outputs {
        let of = Of("output", name);
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
            (None, None) => Delivery::Message,
            (Some(count), None) => Delivery::Classes(count),
            (None, Some(span)) => {
                spans.push((span.place(), name));
                Delivery::Region(span)
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

/// Turns the outputs of a model into what was asked for; nothing is written yet. `deliveries` are in the
/// order of the outputs, or empty when all go into the message.
///
/// # Errors
/// [`InferError::Invalid`] when an output does not fit its region or has no classes.
pub(crate) fn deliver(
    signature: &Signature,
    outputs: Vec<Tensor>,
    deliveries: Vec<Delivery>,
) -> Result<Vec<Output>, InferError> {
    let mut deliveries = deliveries.into_iter();
    outputs
        .into_iter()
        .map(|tensor| match deliveries.next().unwrap_or_default() {
            Delivery::Message => Ok(Output { tensor, span: None }),
            Delivery::Classes(count) => {
                Ok(Output { tensor: classify(&tensor, count, signature.has_rows())?, span: None })
            }
            Delivery::Region(span) => {
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

/// Writes the outputs that go into regions, once all of them can be written. Comes last, when nothing
/// else can fail: a request that is refused leaves shared memory as it was.
///
/// # Errors
/// [`InferError::Invalid`], [`InferError::Unavailable`] when an object changed meanwhile.
pub(crate) fn write_regions(outputs: &[Output]) -> Result<(), InferError> {
    let placed = || outputs.iter().filter_map(|output| Some((output.span.as_ref()?, &output.tensor)));
    placed().try_for_each(|(span, _)| span.check_size())?;
    placed().try_for_each(|(span, tensor)| span.write(&tensor.data.to_raw()))
}
