//! Detection of `flock` requests: the FUSE library does not pass on whether a lock request comes from `flock`.
//!
//! Without it `flock` and `fcntl` locks on a whole file would look the same. A program that takes both, which
//! Linux keeps apart, would wait for itself.
#![allow(unsafe_code)]

use fuser::Request;

/// Bytes of a request header, and of a whole lock request.
const HEADER_BYTES: usize = 40;
const REQUEST_BYTES: u32 = 88;
/// Offset of the flags, behind header, handle, owner, start, end, type and process.
const FLAGS_AT: usize = HEADER_BYTES + 40;
/// Offset of the owner.
const OWNER_AT: usize = HEADER_BYTES + 8;
/// Lock requests: GETLK, SETLK, SETLKW.
const OPCODES: std::ops::RangeInclusive<u32> = 31..=33;
/// Flag of a `flock` lock (`FUSE_LK_FLOCK`).
const FLOCK: u32 = 1;

/// Whether a request for a lock of `owner` comes from `flock`.
pub(in crate::mount) fn is_flock(request: &Request, owner: u64) -> bool {
    const { assert!(size_of::<Request>() == HEADER_BYTES) };
    let start = std::ptr::from_ref(request).cast::<u8>();
    let number = |at: usize| {
        // SAFETY: the header is present as a whole. Bytes behind it are read only after the header has said
        // that the request reaches that far (see below).
        u32::from_ne_bytes(unsafe { start.add(at).cast::<[u8; 4]>().read_unaligned() })
    };
    // `Request` is the header; its length field includes the bytes behind it.
    if number(0) < REQUEST_BYTES || !OPCODES.contains(&number(4)) {
        return false;
    }
    // SAFETY: the library parses requests in place, so the header begins the buffer with the whole request. The library
    // has checked that the buffer holds the length in the header.
    let found = u64::from_ne_bytes(unsafe { start.add(OWNER_AT).cast::<[u8; 8]>().read_unaligned() });
    found == owner && number(FLAGS_AT) & FLOCK != 0
}
