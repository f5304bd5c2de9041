//! A filter for HTTP/2 connections over unix sockets: the `:authority` that grpc-go makes of a socket's path becomes
//! `localhost`.
//!
//! The kubelet dials a registration socket by its path, and sends the path, with `/` as `%2F`, as authority. The
//! HTTP/2 library refuses that as malformed, as RFC 3986 asks. The filter reads the frames of the client and replaces
//! the value in the header block, which needs no table of earlier headers: each representation says its own length.
//! The replacement is never longer than the value, so that both sides agree about what their tables hold.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tonic::transport::server::Connected;

/// Bytes that a client sends before its first frame.
const PREFACE_BYTES: usize = 24;
/// Bytes of a frame's head: length, type, flags, stream.
const HEAD_BYTES: usize = 9;
/// The type of a frame with headers.
const HEADERS: u8 = 1;
/// Flags of a header frame with padding or a priority, which grpc-go does not send.
const PADDED_OR_PRIORITY: u8 = 0x28;
/// Longest header frame that is looked at, in bytes. The server refuses longer ones.
const FRAME_BYTES_MAX: usize = 16 * 1024;
/// Number of `:authority` in the static table of HPACK.
const AUTHORITY: u64 = 1;
/// The same name as a literal, as gRPC for C and Python sends it.
const AUTHORITY_NAME: &[u8] = b"\x0a:authority";
/// Shortest encoded value that is replaced. Characters of a path have 5 to 8 bits, so its text is longer than the
/// replacement.
const VALUE_BYTES_MIN: usize = 12;
/// The replacement: its length, without Huffman coding, and its text.
const LOCALHOST: &[u8] = b"\x09localhost";
/// Bytes read at a time.
const READ_BYTES: usize = 8 * 1024;

/// A connection whose client may name any authority.
#[derive(Debug)]
pub(crate) struct AnyAuthority {
    stream: UnixStream,
    filter: Filter,
    /// Filtered bytes that were not read yet, from `start` on.
    out: Vec<u8>,
    start: usize,
    ended: bool,
}

/// The filter of the bytes of a client.
#[derive(Debug)]
struct Filter {
    /// Bytes that pass unchanged before the next head.
    pass: usize,
    /// The incomplete head or header frame.
    held: Vec<u8>,
}

impl Default for Filter {
    fn default() -> Filter {
        Filter { pass: PREFACE_BYTES, held: Vec::new() }
    }
}

impl Filter {
    /// Filters bytes of the client; appends what the server reads to `out`.
    fn feed(&mut self, mut bytes: &[u8], out: &mut Vec<u8>) {
        while !bytes.is_empty() {
            if self.pass > 0 {
                let (passed, rest) = bytes.split_at(self.pass.min(bytes.len()));
                out.extend_from_slice(passed);
                self.pass -= passed.len();
                bytes = rest;
                continue;
            }
            let needed = self.needed();
            let (taken, rest) = bytes.split_at((needed - self.held.len()).min(bytes.len()));
            self.held.extend_from_slice(taken);
            bytes = rest;
            if self.held.len() < needed {
                return;
            }
            if self.is_looked_at() {
                if self.held.len() == HEAD_BYTES && self.payload() > 0 {
                    continue;
                }
                out.extend_from_slice(&with_localhost(&self.held));
            } else {
                self.pass = self.payload();
                out.extend_from_slice(&self.held);
            }
            self.held.clear();
        }
    }

    /// How many bytes to hold: a head, and the payload of a header frame.
    fn needed(&self) -> usize {
        if self.held.len() >= HEAD_BYTES && self.is_looked_at() {
            HEAD_BYTES + self.payload()
        } else {
            HEAD_BYTES
        }
    }

    fn payload(&self) -> usize {
        self.held[..3].iter().fold(0, |length, byte| length << 8 | usize::from(*byte))
    }

    fn is_looked_at(&self) -> bool {
        self.held[3] == HEADERS && self.held[4] & PADDED_OR_PRIORITY == 0 && self.payload() <= FRAME_BYTES_MAX
    }
}

/// A header frame with the long authority replaced.
fn with_localhost(frame: &[u8]) -> Vec<u8> {
    let (head, block) = frame.split_at(HEAD_BYTES);
    let Some((start, end)) = long_authority(block) else { return frame.to_vec() };
    let length = block.len() - (end - start) + LOCALHOST.len();
    let mut made = Vec::with_capacity(HEAD_BYTES + length);
    made.extend_from_slice(&(length as u32).to_be_bytes()[1..]);
    made.extend_from_slice(&head[3..]);
    made.extend_from_slice(&block[..start]);
    made.extend_from_slice(LOCALHOST);
    made.extend_from_slice(&block[end..]);
    made
}

/// Where the value of `:authority` is in a header block, with its length, if it is long.
fn long_authority(block: &[u8]) -> Option<(usize, usize)> {
    let mut at = 0;
    while at < block.len() {
        let first = block[at];
        // The bits of the number behind the kind of a representation, and whether a literal follows.
        let (bits, has_literal) = match first {
            0x80.. => (7, false),
            0x40..=0x7f => (6, true),
            0x20..=0x3f => (5, false),
            _ => (4, true),
        };
        let (name, after) = number(block, at, bits)?;
        at = after;
        if !has_literal {
            continue;
        }
        let mut is_authority = name == AUTHORITY;
        if name == 0 {
            let end = text(block, at)?;
            is_authority = &block[at..end] == AUTHORITY_NAME;
            at = end;
        }
        let end = text(block, at)?;
        if is_authority {
            return (end - at >= VALUE_BYTES_MIN).then_some((at, end));
        }
        at = end;
    }
    None
}

/// A number with a prefix of some bits, and the place after it.
fn number(block: &[u8], at: usize, bits: u32) -> Option<(u64, usize)> {
    let mask = (1_u64 << bits) - 1;
    let mut value = u64::from(*block.get(at)?) & mask;
    let mut at = at + 1;
    if value < mask {
        return Some((value, at));
    }
    for shift in [0, 7, 14, 21] {
        let byte = u64::from(*block.get(at)?);
        value += (byte & 0x7f) << shift;
        at += 1;
        if byte & 0x80 == 0 {
            return Some((value, at));
        }
    }
    None
}

/// The place after a text.
fn text(block: &[u8], at: usize) -> Option<usize> {
    let (length, at) = number(block, at, 7)?;
    let end = at.checked_add(usize::try_from(length).ok()?)?;
    (end <= block.len()).then_some(end)
}

impl AnyAuthority {
    /// A filtered connection.
    pub(crate) fn new(stream: UnixStream) -> AnyAuthority {
        AnyAuthority { stream, filter: Filter::default(), out: Vec::new(), start: 0, ended: false }
    }
}

impl Connected for AnyAuthority {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for AnyAuthority {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            let left = &this.out[this.start..];
            if !left.is_empty() {
                let taken = left.len().min(buf.remaining());
                buf.put_slice(&left[..taken]);
                this.start += taken;
                return Poll::Ready(Ok(()));
            }
            if this.ended {
                return Poll::Ready(Ok(()));
            }
            this.out.clear();
            this.start = 0;
            let mut bytes = [0; READ_BYTES];
            let mut read = ReadBuf::new(&mut bytes);
            ready!(Pin::new(&mut this.stream).poll_read(cx, &mut read))?;
            if read.filled().is_empty() {
                // What was held of an incomplete frame.
                this.ended = true;
                this.out.append(&mut this.filter.held);
            }
            this.filter.feed(read.filled(), &mut this.out);
        }
    }
}

impl AsyncWrite for AnyAuthority {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = (payload.len() as u32).to_be_bytes()[1..].to_vec();
        frame.extend([kind, flags, 0, 0, 0, 1]);
        frame.extend_from_slice(payload);
        frame
    }

    fn filtered(bytes: &[u8], piece: usize) -> Vec<u8> {
        let (mut filter, mut out) = (Filter::default(), Vec::new());
        for piece in bytes.chunks(piece) {
            filter.feed(piece, &mut out);
        }
        out.append(&mut filter.held);
        out
    }

    fn block(authority: &[u8]) -> Vec<u8> {
        // :method POST, a path, then :authority, then a header with a literal name.
        let mut block = vec![0x83, 0x86, 0x44, 4, b'/', b'a', b'/', b'b', 0x41, authority.len() as u8];
        block.extend_from_slice(authority);
        block.extend([0x00, 2, b't', b'e', 0x87, 1, 2, 3, 4, 5, 6, 7]);
        block
    }

    #[test]
    fn a_path_becomes_localhost_in_pieces_of_any_size() {
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
        let bytes = |authority: &[u8]| {
            let mut bytes = preface.to_vec();
            bytes.extend(frame(4, 0, &[0; 12]));
            bytes.extend(frame(HEADERS, 4, &block(authority)));
            bytes.extend(frame(0, 1, b"data \x41\x30 of a message"));
            bytes.extend(frame(HEADERS, 4, &[]));
            bytes
        };
        let path = b"%2Fvar%2Flib%2Fkubelet%2Fplugins_registry%2Fa.sock";
        for piece in [1, 2, 7, 1_000] {
            assert_eq!(filtered(&bytes(path), piece), bytes(b"localhost"));
            assert_eq!(filtered(&bytes(b"localhost"), piece), bytes(b"localhost"));
        }
        let named = |value: &[u8]| {
            let mut block = [&[0x83, 0x40][..], AUTHORITY_NAME, &[value.len() as u8]].concat();
            block.extend_from_slice(value);
            [preface.to_vec(), frame(HEADERS, 4, &block)].concat()
        };
        assert_eq!(filtered(&named(path), 3), named(b"localhost"));
    }

    #[test]
    fn padded_frames_and_broken_blocks_pass_unchanged() {
        let mut bytes = vec![b'p'; PREFACE_BYTES];
        bytes.extend(frame(HEADERS, 0x0c, &block(&[b'x'; 40])));
        bytes.extend(frame(HEADERS, 4, &[0x41, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]));
        bytes.extend(frame(HEADERS, 4, &[0x41, 40, b'x']));
        bytes.extend(&frame(HEADERS, 4, &block(&[b'x'; 40]))[..30]);
        assert_eq!(filtered(&bytes, 5), bytes);
    }

    proptest! {
        #[test]
        fn hostile_bytes_neither_panic_nor_get_lost(bytes in prop::collection::vec(any::<u8>(), 0..400), piece in 1..50usize) {
            let out = filtered(&bytes, piece);
            prop_assert!(out.len() <= bytes.len());
            prop_assert_eq!(&out, &filtered(&bytes, 1));
        }
    }
}
