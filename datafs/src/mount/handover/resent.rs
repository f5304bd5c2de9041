//! Requests that the kernel sends again, because an earlier server has read and not answered them.
//!
//! Most give the same result when they run again. A change of names does not: its transaction records the request
//! (`fs/takeover.rs`), and a request that an earlier server has completed is answered without another change.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};

use fuser::Request;

use crate::fs::{RequestMark, View};
use crate::mount::handles::Handles;

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

/// The view for a request that changes names. In a held mount, the change completes the request.
pub(in crate::mount) fn completing<'h>(handles: &'h Handles, request: &Request) -> Cow<'h, View> {
    static THREADS: AtomicU64 = AtomicU64::new(0);
    thread_local! {
        static SLOT: u64 = THREADS.fetch_add(1, Ordering::Relaxed);
    }
    if !handles.is_held() {
        return Cow::Borrowed(&handles.view);
    }
    let mark = RequestMark { slot: SLOT.with(|slot| *slot), number: number_of(request) };
    Cow::Owned(handles.view.completing(mark))
}

/// Whether an earlier server has made the change of a request that the kernel sends again.
pub(in crate::mount) fn is_completed(handles: &Handles, request: &Request) -> bool {
    resent(request).is_some_and(|number| handles.has_completed(number))
}
