//! Sealed memory files with one record batch each, and their transfer over Unix sockets.
//!
//! A file is mapped only once it carries the seals against writing, shrinking and growing, and against further seals. From
//! then on no process can change its bytes or its size, so a mapping of it is as immutable as memory that this process
//! owns. Its content is validated when it is decoded. Its columns must be the expected ones, and its buffers aligned, so
//! that decoding copies none of them.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, BufWriter, ErrorKind, IoSlice};
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use arrow::array::{RecordBatch, RecordBatchOptions};
use arrow::buffer::Buffer;
use arrow::datatypes::{FieldRef, SchemaRef};
use arrow::error::ArrowError;
use arrow::ipc::reader::StreamDecoder;
use arrow::ipc::root_as_message;
use arrow::ipc::writer::StreamWriter;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::libc;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use nix::sys::stat::fstat;
use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};

use super::budget::Held;

/// Bytes of a message.
pub(super) const MESSAGE_BYTES: usize = 76;
/// Seals without which no file is mapped: nothing can change its size or its bytes, or add a seal.
const SEALS: SealFlag = SealFlag::F_SEAL_SHRINK
    .union(SealFlag::F_SEAL_GROW)
    .union(SealFlag::F_SEAL_WRITE)
    .union(SealFlag::F_SEAL_SEAL);
/// The beginning of each Arrow message, before its length.
const MARKER: &[u8] = &[0xff; 4];
/// Bytes of the marker and the length.
const MESSAGE_HEAD_BYTES: usize = 8;
/// Bytes of the unit in which the kernel counts the memory of a file.
const BLOCK_BYTES: u64 = 512;

/// Bytes of the buffer for one descriptor.
// SAFETY: only computes.
const CONTROL_BYTES: usize = unsafe { libc::CMSG_SPACE(size_of::<RawFd>() as u32) } as usize;

/// The buffer for descriptors, aligned for the headers in it.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

/// A mapping, which ends with its last buffer.
struct Map {
    start: NonNull<u8>,
    bytes: usize,
    /// Given back after the mapping has ended.
    _held: Held,
}

// SAFETY: the mapping is read only, and nothing can change its bytes.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: this is the whole mapping, and the last buffer over it is gone.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// Writes a batch into a new sealed file.
pub(super) fn encode(batch: &RecordBatch) -> io::Result<OwnedFd> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let file = File::from(memfd_create("millrace-feed", flags)?);
    let mut writer =
        StreamWriter::try_new(BufWriter::new(file), &batch.schema()).map_err(io::Error::other)?;
    writer.write(batch).map_err(io::Error::other)?;
    let buffered = writer.into_inner().map_err(io::Error::other)?;
    let file = buffered.into_inner().map_err(io::IntoInnerError::into_error)?;
    fcntl(&file, FcntlArg::F_ADD_SEALS(SEALS))?;
    Ok(file.into())
}

/// The size of a file of this process.
pub(super) fn size(file: &OwnedFd) -> io::Result<u64> {
    u64::try_from(fstat(file)?.st_size).map_err(io::Error::other)
}

/// The size of a file that may be mapped: sealed, in memory as a whole, and of an expected size.
pub(super) fn check(file: &OwnedFd, sizes: &RangeInclusive<u64>) -> io::Result<u64> {
    let refused = |what: &str| io::Error::new(ErrorKind::InvalidData, what.to_owned());
    let seals =
        fcntl(file, FcntlArg::F_GET_SEALS).map_err(|_| refused("the descriptor is no memory file"))?;
    if !SealFlag::from_bits_truncate(seals).contains(SEALS) {
        return Err(refused("the memory file is not sealed"));
    }
    // A mapping of huge pages ends at other addresses.
    if fstatfs(file)?.filesystem_type() != TMPFS_MAGIC {
        return Err(refused("the memory file has pages of another size"));
    }
    let bytes = size(file)?;
    if !sizes.contains(&bytes) {
        return Err(refused("the memory file has an impossible size"));
    }
    // Reading a hole would take new memory.
    if u64::try_from(fstat(file)?.st_blocks).unwrap_or(0).saturating_mul(BLOCK_BYTES) < bytes {
        return Err(refused("the memory file has holes"));
    }
    Ok(bytes)
}

/// Maps a file after [`check`].
pub(super) fn map(file: &OwnedFd, sizes: &RangeInclusive<u64>, held: Held) -> io::Result<Buffer> {
    let bytes = usize::try_from(check(file, sizes)?).map_err(io::Error::other)?;
    // A private mapping: before Linux 6.7 the seal against writing also refuses shared ones that only read.
    // SAFETY: a new mapping at an address of the kernel's choice.
    let start = unsafe {
        libc::mmap(ptr::null_mut(), bytes, libc::PROT_READ, libc::MAP_PRIVATE, file.as_raw_fd(), 0)
    };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let start = NonNull::new(start.cast::<u8>()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
    // SAFETY: the mapping has these bytes until `Map` is dropped. The seals exclude writes, and accesses beyond the end.
    Ok(unsafe { Buffer::from_custom_allocation(start, bytes, Arc::new(Map { start, bytes, _held: held })) })
}

/// The batch in a file, over its mapping, with the columns of `schema`. Arrow validates it.
pub(super) fn decode(bytes: &Buffer, schema: &SchemaRef, rows: usize) -> Result<RecordBatch, ArrowError> {
    let schema_end = check_messages(bytes)?;
    if schema_end >= bytes.len() {
        return Err(bad("no record batch"));
    }
    // Without this, the decoder copies each buffer that is not aligned, and many columns may name one large buffer.
    let mut decoder = StreamDecoder::new().with_require_alignment(true);
    // The first byte of the next message lets the decoder end the schema.
    decoder.decode(&mut bytes.slice_with_length(0, schema_end + 1))?;
    let columns = decoder.schema().ok_or_else(|| bad("no schema"))?;
    let kind = |field: &FieldRef| (field.name().clone(), field.data_type().clone(), field.is_nullable());
    if !columns.fields().iter().map(kind).eq(schema.fields().iter().map(kind)) {
        return Err(bad("other columns than expected"));
    }
    let found = decoder.decode(&mut bytes.slice(schema_end + 1))?;
    let found = found.ok_or_else(|| bad("no record batch"))?;
    if found.num_rows() != rows {
        return Err(bad(format!("{} rows, expected {rows}", found.num_rows())));
    }
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    RecordBatch::try_new_with_options(Arc::clone(schema), found.columns().to_vec(), &options)
}

/// The end of the first message. Refuses compressed messages, which decompress to sizes that nothing limits. Refuses
/// additions to dictionaries, each of which copies the dictionary.
fn check_messages(mut bytes: &[u8]) -> Result<usize, ArrowError> {
    let mut first_end = None;
    while let Some((head, rest)) = bytes.split_at_checked(MESSAGE_HEAD_BYTES) {
        let (marker, length) = head.split_at(MARKER.len());
        if marker != MARKER {
            return Err(bad("no message where one must begin"));
        }
        let length = length.iter().rev().fold(0, |length, byte| length << 8 | usize::from(*byte));
        if length == 0 {
            break;
        }
        let message = rest.get(..length).ok_or_else(|| bad("a message is cut"))?;
        let message = root_as_message(message).map_err(|error| bad(error.to_string()))?;
        let dictionary = message.header_as_dictionary_batch();
        if dictionary.is_some_and(|dictionary| dictionary.isDelta()) {
            return Err(bad("an addition to a dictionary"));
        }
        let of_dictionary = || dictionary.and_then(|dictionary| dictionary.data());
        let batch = message.header_as_record_batch().or_else(of_dictionary);
        if batch.is_some_and(|batch| batch.compression().is_some()) {
            return Err(bad("a compressed message"));
        }
        let body = usize::try_from(message.bodyLength()).ok().and_then(|body| body.checked_add(length));
        bytes = body.and_then(|end| rest.get(end..)).ok_or_else(|| bad("a message is cut"))?;
        first_end = first_end.or(Some(MESSAGE_HEAD_BYTES + length));
    }
    first_end.ok_or_else(|| bad("no message"))
}

fn bad(what: impl Into<String>) -> ArrowError {
    ArrowError::IpcError(what.into())
}

/// Sends a message with at most one descriptor on a socket that does not block.
pub(super) fn send(socket: RawFd, message: &[u8; MESSAGE_BYTES], file: Option<RawFd>) -> io::Result<()> {
    let raw: Vec<RawFd> = file.into_iter().collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control = if raw.is_empty() { &[][..] } else { &rights[..] };
    let sent = sendmsg::<()>(socket, &[IoSlice::new(message)], control, MsgFlags::MSG_NOSIGNAL, None)?;
    if sent != MESSAGE_BYTES {
        return Err(io::Error::new(ErrorKind::WriteZero, "a message was sent in part"));
    }
    Ok(())
}

/// Receives a message from a socket that does not block, with at most one descriptor.
pub(super) fn receive(socket: RawFd) -> io::Result<([u8; MESSAGE_BYTES], Option<OwnedFd>)> {
    let mut bytes = [0u8; MESSAGE_BYTES];
    let mut control = Control([0; CONTROL_BYTES]);
    let mut into = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: MESSAGE_BYTES };
    // SAFETY: all bits zero are a valid header without buffers.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &raw mut into;
    header.msg_iovlen = 1;
    header.msg_control = (&raw mut control).cast();
    header.msg_controllen = CONTROL_BYTES as _;
    // SAFETY: the header points to buffers of the given lengths, which outlive the call.
    let len = Errno::result(unsafe { libc::recvmsg(socket, &raw mut header, libc::MSG_CMSG_CLOEXEC) })?;
    let mut files = Vec::new();
    // SAFETY: the kernel has filled the control buffer and set its length in the header.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
    // SAFETY: null or a header within the control buffer, which is aligned for it.
    while let Some(message) = unsafe { next.as_ref() } {
        if (message.cmsg_level, message.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: only computes.
            let head = unsafe { libc::CMSG_LEN(0) } as usize;
            let whole: usize = message.cmsg_len as _;
            // SAFETY: the data follows the header.
            let data = unsafe { libc::CMSG_DATA(message) }.cast::<RawFd>();
            for index in 0..whole.saturating_sub(head) / size_of::<RawFd>() {
                // SAFETY: within the length of the message; the kernel has just installed this descriptor for this
                // process, also in a message that it has cut.
                files.push(unsafe { OwnedFd::from_raw_fd(data.add(index).read_unaligned()) });
            }
        }
        // SAFETY: as for the first.
        next = unsafe { libc::CMSG_NXTHDR(&raw const header, next) };
    }
    if len == 0 {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    // The kernel drops a descriptor for which this process has no number left.
    if header.msg_flags & libc::MSG_CTRUNC != 0 && files.is_empty() {
        return Err(Errno::EMFILE.into());
    }
    let is_cut = header.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0;
    if is_cut || len as usize != MESSAGE_BYTES || files.len() > 1 {
        return Err(io::Error::new(ErrorKind::InvalidData, "a message of another form"));
    }
    Ok((bytes, files.pop()))
}
