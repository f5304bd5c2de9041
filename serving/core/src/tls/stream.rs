//! The byte stream of a connection, with or without TLS. The handshake runs within the first read or write,
//! so it blocks only its own connection.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::Accept;
use tokio_rustls::server::TlsStream;

use super::ServiceTls;
use crate::metrics::HANDSHAKES_FAILED;

/// A byte stream.
pub enum Stream {
    /// Without TLS.
    Plain(TcpStream),
    /// During the handshake.
    Greeting(Box<Accept<TcpStream>>),
    /// After the handshake.
    Secure(Box<TlsStream<TcpStream>>),
    /// After a failed handshake.
    Closed,
}

impl Stream {
    /// A connection, with TLS if the port has it.
    pub fn new(stream: TcpStream, securing: Option<&ServiceTls>) -> Stream {
        match securing {
            None => Stream::Plain(stream),
            Some(securing) => Stream::Greeting(Box::new(securing.accept(stream))),
        }
    }

    /// Whether written bytes may still be buffered in this process.
    pub fn is_buffered(&self) -> bool {
        !matches!(self, Stream::Plain(_))
    }

    /// Drives the handshake until it is done.
    fn poll_greeted(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Stream::Greeting(accept) = self else { return Poll::Ready(Ok(())) };
        match ready!(Pin::new(&mut **accept).poll(cx)) {
            Ok(stream) => *self = Stream::Secure(Box::new(stream)),
            Err(error) => {
                *self = Stream::Closed;
                HANDSHAKES_FAILED.inc();
                return Poll::Ready(Err(error));
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Stream::Plain(_) => "Plain",
            Stream::Greeting(_) => "Greeting",
            Stream::Secure(_) => "Secure",
            Stream::Closed => "Closed",
        })
    }
}

fn closed<T>() -> Poll<io::Result<T>> {
    Poll::Ready(Err(io::ErrorKind::NotConnected.into()))
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.poll_greeted(cx))?;
        match &mut *self {
            Stream::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            Stream::Secure(stream) => Pin::new(&mut **stream).poll_read(cx, buffer),
            Stream::Greeting(_) | Stream::Closed => closed(),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_greeted(cx))?;
        match &mut *self {
            Stream::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Stream::Secure(stream) => Pin::new(&mut **stream).poll_write(cx, bytes),
            Stream::Greeting(_) | Stream::Closed => closed(),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_greeted(cx))?;
        match &mut *self {
            Stream::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, bytes),
            Stream::Secure(stream) => Pin::new(&mut **stream).poll_write_vectored(cx, bytes),
            Stream::Greeting(_) | Stream::Closed => closed(),
        }
    }

    fn is_write_vectored(&self) -> bool {
        // True for both kinds of stream.
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_greeted(cx))?;
        match &mut *self {
            Stream::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Secure(stream) => Pin::new(&mut **stream).poll_flush(cx),
            Stream::Greeting(_) | Stream::Closed => closed(),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Stream::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Secure(stream) => Pin::new(&mut **stream).poll_shutdown(cx),
            Stream::Greeting(_) | Stream::Closed => {
                *self = Stream::Closed;
                Poll::Ready(Ok(()))
            }
        }
    }
}
