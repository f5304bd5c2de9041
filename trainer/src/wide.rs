//! Loops compiled for the wider vectors that a processor has.
//!
//! The program is built for the oldest processors of its kind. A loop over every weight in [`wide`] is compiled a
//! second time with AVX2. It does the same operations on each element, so that its results have the same bits.
#![allow(unsafe_code)]

/// Runs `work`, with AVX2 where the processor has it. Functions that `work` calls should be `#[inline(always)]`.
#[inline]
pub(crate) fn wide<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, the only feature that the function needs.
        return unsafe { with_avx2(work) };
    }
    work()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn with_avx2<R>(work: impl FnOnce() -> R) -> R {
    work()
}
