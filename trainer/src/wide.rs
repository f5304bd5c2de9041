//! Loops compiled for the wider vectors that a processor has.
//!
//! The program is built for the oldest processors of its kind. A function in [`wide`] is compiled a second time with
//! AVX2. It does the same operations on each element, so that its results have the same bits.

/// Defines a function that runs with AVX2 where the processor has it. Its callees should be `#[inline(always)]`.
macro_rules! wide {
    ($(#[$attribute:meta])* $visible:vis fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? $body:block) => {
        $(#[$attribute])*
        #[allow(unsafe_code)]
        $visible fn $name($($argument: $type),*) $(-> $result)? {
            #[inline(always)]
            fn plain($($argument: $type),*) $(-> $result)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2")]
                fn with_avx2($($argument: $type),*) $(-> $result)? {
                    plain($($argument),*)
                }
                if std::arch::is_x86_feature_detected!("avx2") {
                    // SAFETY: the processor has AVX2, the only feature that the function needs.
                    return unsafe { with_avx2($($argument),*) };
                }
            }
            plain($($argument),*)
        }
    };
}

pub(crate) use wide;
