//! Protobuf messages of the inference service as tonic reads and writes them. A message that cannot be
//! read is the sender's fault and INVALID_ARGUMENT; tonic's own codec answers INTERNAL.

use std::fmt;
use std::marker::PhantomData;

use bytes::Buf;
use prost::Message;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic_prost::ProstCodec;

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
