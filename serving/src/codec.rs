//! Protobuf messages of the inference service as tonic reads and writes them. A message that cannot be
//! read is the sender's fault and INVALID_ARGUMENT; tonic's own codec answers INTERNAL.

use std::fmt;
use std::marker::PhantomData;

use bytes::{Buf, BufMut as _, Bytes, BytesMut};
use prost::Message;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic_prost::ProstCodec;

use crate::error::InferError;

/// A flag and a length before each message of gRPC.
pub(crate) const PREFIX_BYTES: usize = 5;

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

impl<U: Message + Default> Decoder for MessageDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, bytes: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        decode(bytes).map(Some)
    }
}

/// Reads a message that is all that is left.
///
/// # Errors
/// INVALID_ARGUMENT.
pub(crate) fn decode<U: Message + Default>(bytes: impl Buf) -> Result<U, Status> {
    U::decode(bytes).map_err(|error| {
        Status::invalid_argument(format!("the message is not the one of this call: {error}"))
    })
}

/// A message as gRPC sends it, with its prefix, in one buffer of its size.
///
/// # Errors
/// RESOURCE_EXHAUSTED for one whose length the prefix cannot tell.
pub(crate) fn framed(message: &impl Message) -> Result<Bytes, Status> {
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
