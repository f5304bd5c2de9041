//! The protobuf codec of the inference service for tonic. A malformed message is the client's error and
//! yields INVALID_ARGUMENT; tonic's own codec answers INTERNAL.

use std::any::TypeId;
use std::fmt;
use std::marker::PhantomData;

use bytes::{Buf, BufMut as _, Bytes, BytesMut};
use prost::Message;
use prost::encoding::{WireType, decode_key, decode_varint};
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic_prost::ProstCodec;

use crate::blocking::{READ_BYTES, in_place};
use crate::error::InferError;
use crate::tensor::TENSORS_MAX;
use crate::wire::inference::ModelInferRequest;

/// Bytes of the flag and the length before each gRPC message.
pub const PREFIX_BYTES: usize = 5;

/// Encodes `T`, decodes `U`.
pub(crate) struct MessageCodec<T, U>(PhantomData<fn() -> (T, U)>);

impl<T, U> Default for MessageCodec<T, U> {
    fn default() -> Self {
        MessageCodec(PhantomData)
    }
}

impl<T, U> fmt::Debug for MessageCodec<T, U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MessageCodec")
    }
}

impl<T, U> Codec for MessageCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = <ProstCodec<T, U> as Codec>::Encoder;
    type Decoder = MessageDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::default().encoder()
    }

    fn decoder(&mut self) -> Self::Decoder {
        MessageDecoder(PhantomData)
    }
}

/// Decodes `U`.
pub(crate) struct MessageDecoder<U>(PhantomData<fn() -> U>);

impl<U> fmt::Debug for MessageDecoder<U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MessageDecoder")
    }
}

impl<U: Message + Default + 'static> Decoder for MessageDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, bytes: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        // Clients decode other messages, on any kind of runtime.
        if TypeId::of::<U>() != TypeId::of::<ModelInferRequest>() || !is_long(bytes.chunk())? {
            return decode(bytes).map(Some);
        }
        in_place(true, || {
            check_tensors(bytes.chunk())?;
            decode(bytes).map(Some)
        })
    }
}

/// Most fields of a large request to examine; one with more counts as slow to decode.
const FIELDS_MAX: usize = 4096;

/// Whether decoding a request takes long. Its raw contents are not copied.
///
/// # Errors
/// As [`check_tensors`].
pub fn is_long(request: &[u8]) -> Result<bool, Status> {
    if request.len() < READ_BYTES {
        return Ok(false);
    }
    let Some(fields) = Fields::of(request, FIELDS_MAX) else { return Ok(true) };
    fields.check()?;
    Ok(fields.read_bytes >= READ_BYTES)
}

/// Counts of the fields in an encoded request.
#[derive(Debug, Default, PartialEq, Eq)]
struct Fields {
    inputs: usize,
    outputs: usize,
    raw: usize,
    /// Bytes of all fields except the raw contents, which are not copied.
    read_bytes: usize,
}

impl Fields {
    /// `None` for more than `fields_max` fields, and for a malformed message.
    fn of(message: &[u8], fields_max: usize) -> Option<Fields> {
        let (mut fields, mut count, mut rest) = (Fields::default(), 0_usize, message);
        while !rest.is_empty() {
            count += 1;
            if count > fields_max {
                return None;
            }
            let before = rest.len();
            let (tag, wire) = decode_key(&mut rest).ok()?;
            let bytes = match wire {
                WireType::Varint => decode_varint(&mut rest).map(|_| 0).ok()?,
                WireType::LengthDelimited => usize::try_from(decode_varint(&mut rest).ok()?).ok()?,
                WireType::SixtyFourBit => 8,
                WireType::ThirtyTwoBit => 4,
                // The protocol has no groups.
                WireType::StartGroup | WireType::EndGroup => return None,
            };
            rest = rest.get(bytes..)?;
            // Field numbers of `proto/inference.proto`.
            match tag {
                5 => fields.inputs += 1,
                6 => fields.outputs += 1,
                7 => fields.raw += 1,
                _ => {}
            }
            if tag != 7 {
                fields.read_bytes += before - rest.len();
            }
        }
        Some(fields)
    }

    /// # Errors
    /// [`InferError::Invalid`] for more tensors than a request may have.
    fn check(&self) -> Result<(), InferError> {
        let counts =
            [(self.inputs, "inputs"), (self.outputs, "outputs"), (self.raw, "entries in raw_input_contents")];
        match counts.into_iter().find(|(count, _)| *count > TENSORS_MAX) {
            Some((count, what)) => {
                Err(InferError::invalid(format!("{count} {what}, the limit is {TENSORS_MAX}")))
            }
            None => Ok(()),
        }
    }
}

/// Refuses too many tensors before they are allocated: an empty one takes two bytes in a message and 300 in
/// memory. Refuses a message whose tensors it cannot count: [`decode`] skips groups, and would allocate the tensors
/// beside them.
///
/// # Errors
/// INVALID_ARGUMENT.
pub fn check_tensors(request: &[u8]) -> Result<(), Status> {
    let unreadable = || {
        Status::invalid_argument(
            "the message is not the one of this call: it is cut short, malformed or has a group",
        )
    };
    Ok(Fields::of(request, usize::MAX).ok_or_else(unreadable)?.check()?)
}

/// Decodes a message from all remaining bytes.
///
/// # Errors
/// INVALID_ARGUMENT.
pub fn decode<U: Message + Default>(bytes: impl Buf) -> Result<U, Status> {
    U::decode(bytes).map_err(|error| {
        Status::invalid_argument(format!("the message is not the one of this call: {error}"))
    })
}

/// A message with its gRPC prefix, in one buffer of its exact size.
///
/// # Errors
/// RESOURCE_EXHAUSTED for a message whose length exceeds 32 bits.
pub fn framed(message: &impl Message) -> Result<Bytes, Status> {
    let bytes = message.encoded_len();
    let length = u32::try_from(bytes).map_err(|_| {
        Status::resource_exhausted(format!(
            "a message would have {bytes} bytes, one has {} at most",
            u32::MAX
        ))
    })?;
    let mut framed = BytesMut::with_capacity(PREFIX_BYTES + bytes);
    framed.put_u8(0);
    framed.put_u32(length);
    message.encode(&mut framed).map_err(|error| InferError::internal(error.to_string()))?;
    Ok(framed.freeze())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::inference::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};

    #[test]
    fn fields_of_a_request_are_counted_before_it_is_read() {
        let request = ModelInferRequest {
            model_name: "model".into(),
            inputs: vec![
                InferInputTensor::default(),
                InferInputTensor { name: "x".into(), ..Default::default() },
            ],
            outputs: vec![InferRequestedOutputTensor::default(); 3],
            raw_input_contents: vec![Bytes::from(vec![0; 1000]); 4],
            ..Default::default()
        };
        let message = request.encode_to_vec();
        let raw = ModelInferRequest { raw_input_contents: request.raw_input_contents, ..Default::default() };
        let read_bytes = message.len() - raw.encoded_len();
        let fields = Fields { inputs: 2, outputs: 3, raw: 4, read_bytes };
        assert_eq!(Fields::of(&message, 10), Some(fields));
        assert_eq!(Fields::of(&message, 9), None, "there are ten");
        assert_eq!(Fields::of(&message[..message.len() - 1], 10), None, "the last one is cut off");
    }

    #[test]
    fn tensors_beyond_the_limit_are_refused_before_decoding() {
        for (tag, what) in [(0x2a, "inputs"), (0x32, "outputs"), (0x3a, "entries in raw_input_contents")] {
            // Decoded inputs would take 300 MiB.
            let message = [tag, 0].repeat(1 << 20);
            let refused = check_tensors(&message).unwrap_err();
            assert_eq!(refused.code(), tonic::Code::InvalidArgument);
            assert_eq!(refused.message(), format!("1048576 {what}, the limit is {TENSORS_MAX}"));
            assert!(is_long(&message).unwrap(), "it is looked at in a turn");
        }
        check_tensors(&[0x2a, 0].repeat(TENSORS_MAX)).unwrap();
    }

    #[test]
    fn tensors_beside_a_group_are_refused_before_they_are_made() {
        // Field 15 as an empty group, which the decoder skips.
        let message = [&[0x7b, 0x7c][..], &[0x2a, 0].repeat(1 << 20)].concat();
        assert_eq!(ModelInferRequest::decode(&message[..4]).unwrap().inputs.len(), 1);
        assert_eq!(check_tensors(&message).unwrap_err().code(), tonic::Code::InvalidArgument);
    }

    #[test]
    fn raw_contents_do_not_make_a_request_long() {
        let request = |raw: usize, typed: usize| {
            let contents = crate::wire::inference::InferTensorContents {
                fp32_contents: vec![0.0; typed],
                ..Default::default()
            };
            let input = InferInputTensor { contents: Some(contents), ..Default::default() };
            let raw_input_contents = vec![Bytes::from(vec![0; raw])];
            ModelInferRequest { inputs: vec![input], raw_input_contents, ..Default::default() }
                .encode_to_vec()
        };
        assert!(!is_long(&request(10 * READ_BYTES, 1)).unwrap());
        assert!(is_long(&request(1, READ_BYTES)).unwrap());
        assert!(is_long(&[0xff; READ_BYTES]).unwrap(), "what is no message is refused in a turn");
    }
}
