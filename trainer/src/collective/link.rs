//! The two directions of a connection between ranks after its handshake, and the frames over them.

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

use super::frame::{Fault, Header, Received, SPAN_BYTES, Span, read_header, read_payload};
use super::seal::{Seal, TAG_BYTES};
use super::shared::{Reader, Writer};

/// The largest payload that is sent in one segment with its header, and never through shared memory.
pub(super) const INLINE_BYTES_MAX: usize = 16 << 10;

/// The direction in which this rank sends.
#[derive(Debug)]
pub(super) struct SendLink<S = TcpStream> {
    pub(super) stream: S,
    /// The cipher of its frames, in an encrypted ring.
    pub(super) seal: Option<Seal>,
    /// Takes the data of large frames, if the receiver is on this machine.
    pub(super) memory: Option<Writer>,
}

/// The direction in which this rank receives.
#[derive(Debug)]
pub(super) struct ReceiveLink<S = TcpStream> {
    pub(super) stream: S,
    /// The cipher of its frames, in an encrypted ring.
    pub(super) seal: Option<Seal>,
    /// Holds the data of large frames, if the sender is on this machine.
    pub(super) memory: Option<Reader>,
}

impl<S: AsyncWrite + Unpin> SendLink<S> {
    /// Sends a frame. Data in shared memory are not encrypted, as they stay on the machine with one user. The frame with
    /// their place is.
    pub(super) async fn send(&mut self, header: &Header, payload: &[u8]) -> Result<(), String> {
        let SendLink { stream, seal, memory } = self;
        let large = memory.as_mut().filter(|_| payload.len() > INLINE_BYTES_MAX);
        let span = large.and_then(|memory| memory.place(payload)).map(|span| span.encode());
        let is_shared = span.is_some();
        let payload = span.as_ref().map_or(payload, |span| &span[..]);
        let sealed = match seal {
            None => None,
            Some(seal) => {
                let mut sealed = Vec::with_capacity(payload.len() + TAG_BYTES);
                sealed.extend_from_slice(payload);
                seal.seal(&header.bound(payload.len() + TAG_BYTES, is_shared), &mut sealed)?;
                Some(sealed)
            }
        };
        let payload = sealed.as_deref().unwrap_or(payload);
        let head = header.encode_as(payload, is_shared);
        let send = async {
            if payload.len() <= INLINE_BYTES_MAX {
                let mut frame = Vec::with_capacity(head.len() + payload.len());
                frame.extend_from_slice(&head);
                frame.extend_from_slice(payload);
                return stream.write_all(&frame).await;
            }
            stream.write_all(&head).await?;
            stream.write_all(payload).await
        };
        send.await.map_err(|e| e.to_string())
    }
}

impl<S> ReceiveLink<S> {
    /// Bytes that encryption adds to a frame.
    pub(super) fn overhead(&self) -> usize {
        self.seal.as_ref().map_or(0, |_| TAG_BYTES)
    }
}

impl<S: AsyncRead + Unpin> ReceiveLink<S> {
    /// Reads a frame with its payload, decrypted in an encrypted ring. Leaves its data in shared memory, if they are
    /// there. Not cancel safe.
    pub(super) async fn read_frame(&mut self, into: &mut Vec<u8>) -> Result<Received, Fault> {
        let received = read_header(&mut self.stream).await?;
        self.read_rest(received, into).await
    }

    /// Reads the payload behind a header.
    pub(super) async fn read_rest(
        &mut self,
        received: Received,
        into: &mut Vec<u8>,
    ) -> Result<Received, Fault> {
        read_payload(&mut self.stream, &received, into).await?;
        if let Some(seal) = &mut self.seal {
            seal.open(&received.bound(), into).map_err(Fault::Malformed)?;
        }
        Ok(Received { bytes: into.len(), ..received })
    }

    /// Reads the data behind a header, which have to be `bytes` bytes, from the connection or from shared memory. Checks
    /// lengths before any memory is taken. Not cancel safe.
    pub(super) async fn read_data(
        &mut self,
        received: Received,
        bytes: usize,
        into: &mut Vec<u8>,
    ) -> Result<(), Fault> {
        let malformed = |reason: String| Err(Fault::Malformed(reason));
        if received.is_shared && self.memory.is_none() {
            return malformed("sent data in shared memory, which this connection lacks".to_owned());
        }
        let carried = if received.is_shared { SPAN_BYTES } else { bytes } + self.overhead();
        if received.bytes != carried {
            return malformed(format!("sent {} bytes, not {carried}", received.bytes));
        }
        let received = self.read_rest(received, into).await?;
        let (true, Some(memory)) = (received.is_shared, &mut self.memory) else { return Ok(()) };
        let Some(span) = Span::decode(into) else {
            return malformed("sent no place in shared memory".to_owned());
        };
        if span.bytes as usize != bytes {
            return malformed(format!("sent {} bytes in shared memory, not {bytes}", span.bytes));
        }
        memory.take(span, into).map_err(Fault::Malformed)
    }
}
