//! Requests that the kernel sends again, because an earlier server has read and not answered them.

use fuser::Request;

/// The kernel sets this bit in the number of a request that it sends again.
const RESENT: u64 = 1 << 63;

/// The number of a request; the same when it is sent again.
pub(in crate::mount) fn number_of(request: &Request) -> u64 {
    request.unique().0 & !RESENT
}

/// The number of a request that is sent again, else `None`.
pub(in crate::mount) fn resent(request: &Request) -> Option<u64> {
    let number = request.unique().0;
    (number & RESENT != 0).then_some(number & !RESENT)
}
