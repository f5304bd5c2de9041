//! What the FUSE library does not pass on of a request for a lock: whether it comes from `flock`.
//!
//! Without it `flock` and `fcntl` could not be told apart when they cover a whole file, and a program
//! that takes both, which Linux keeps apart, would wait for itself.
#![allow(unsafe_code)]

use fuser::Request;

/// Bytes of the header of a request, and of a lock request as a whole.
const HEADER_BYTES: usize = 40;
const REQUEST_BYTES: u32 = 88;
/// Where the flags are in it, behind header, handle, owner, start, end, type and process.
const FLAGS_AT: usize = HEADER_BYTES + 40;
/// Where the owner is in it.
const OWNER_AT: usize = HEADER_BYTES + 8;
/// Requests for locks: GETLK, SETLK, SETLKW.
const OPCODES: std::ops::RangeInclusive<u32> = 31..=33;
/// The lock is one of `flock` (`FUSE_LK_FLOCK`).
const FLOCK: u32 = 1;

/// Whether a request for a lock of `owner` comes from `flock`.
pub(super) fn is_flock(request: &Request, owner: u64) -> bool {
    const { assert!(size_of::<Request>() == HEADER_BYTES) };
    let start = std::ptr::from_ref(request).cast::<u8>();
    let number = |at: usize| {
        // SAFETY: the header is there as a whole, and what lies behind it is looked at only once the
        // header has said that the request reaches that far (see below).
        u32::from_ne_bytes(unsafe { start.add(at).cast::<[u8; 4]>().read_unaligned() })
    };
    // The header, which is what `Request` is: its length field counts the bytes behind it as well.
    if number(0) < REQUEST_BYTES || !OPCODES.contains(&number(4)) {
        return false;
    }
    // The library parses requests in place: the header lies at the front of the buffer that the whole
    // request was read into, which it has checked to hold the length that the header says.
    // SAFETY: so these eight bytes are in that buffer; it lives and stays as it is during the call.
    let found = u64::from_ne_bytes(unsafe { start.add(OWNER_AT).cast::<[u8; 8]>().read_unaligned() });
    found == owner && number(FLAGS_AT) & FLOCK != 0
}
