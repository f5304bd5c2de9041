//! Elements of the vectors that a ring sums, and their bytes on the wire.

/// An element of a vector that a ring sums: `i64`, in two's complement, or `f32`.
pub trait Element: sealed::Sealed + Copy + Send {
    /// The type, as frames tell it.
    const DTYPE: Dtype;
    /// Bytes of an element on the wire.
    const BYTES: usize;

    /// The sum of two elements.
    fn plus(self, other: Self) -> Self;

    /// The sum of two elements, with the same bits for either order of them.
    fn merge(self, other: Self) -> Self;

    /// Writes the element, little-endian, into [`Element::BYTES`] bytes.
    fn put(self, bytes: &mut [u8]);

    /// Reads an element from [`Element::BYTES`] bytes; every bit pattern is one.
    fn get(bytes: &[u8]) -> Self;
}

/// The type of the elements of a frame. Frames of one type are never added to a vector of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// Integers of 64 bits.
    I64,
    /// Floating-point numbers of 32 bits.
    F32,
}

/// Bits of `f32`.
const SIGN: u32 = 1 << 31;
const INFINITY: u32 = 0x7f80_0000;
const QUIET_NAN: u32 = 0x7fc0_0000;

mod sealed {
    pub trait Sealed {}
    impl Sealed for i64 {}
    impl Sealed for f32 {}
}

impl Element for i64 {
    const DTYPE: Dtype = Dtype::I64;
    const BYTES: usize = size_of::<i64>();

    fn plus(self, other: i64) -> i64 {
        self.wrapping_add(other)
    }

    fn merge(self, other: i64) -> i64 {
        self.plus(other)
    }

    fn put(self, bytes: &mut [u8]) {
        bytes.copy_from_slice(&self.to_le_bytes());
    }

    fn get(bytes: &[u8]) -> i64 {
        let mut word = [0; size_of::<i64>()];
        word.copy_from_slice(bytes);
        i64::from_le_bytes(word)
    }
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
    const BYTES: usize = size_of::<f32>();

    fn plus(self, other: f32) -> f32 {
        self + other
    }

    fn merge(self, other: f32) -> f32 {
        let bits = (self + other).to_bits();
        // Of two NaN, processors return the first. Integers, since compilers may fold tests of floats.
        f32::from_bits(if bits & !SIGN > INFINITY { QUIET_NAN } else { bits })
    }

    fn put(self, bytes: &mut [u8]) {
        bytes.copy_from_slice(&self.to_le_bytes());
    }

    fn get(bytes: &[u8]) -> f32 {
        let mut word = [0; size_of::<f32>()];
        word.copy_from_slice(bytes);
        f32::from_le_bytes(word)
    }
}

/// Writes `values` one after another; replaces what `bytes` holds.
pub(super) fn write<T: Element>(values: &[T], bytes: &mut Vec<u8>) {
    bytes.resize(values.len() * T::BYTES, 0);
    for (bytes, value) in bytes.chunks_exact_mut(T::BYTES).zip(values) {
        value.put(bytes);
    }
}

/// Adds the elements in `bytes` to `values`.
pub(super) fn add<T: Element>(values: &mut [T], bytes: &[u8]) {
    for (value, bytes) in values.iter_mut().zip(bytes.chunks_exact(T::BYTES)) {
        *value = value.plus(T::get(bytes));
    }
}

/// Merges the elements in `bytes` into `values` ([`Element::merge`]).
pub(super) fn merge<T: Element>(values: &mut [T], bytes: &[u8]) {
    for (value, bytes) in values.iter_mut().zip(bytes.chunks_exact(T::BYTES)) {
        *value = value.merge(T::get(bytes));
    }
}

/// Replaces `values` by the elements in `bytes`.
pub(super) fn read<T: Element>(values: &mut [T], bytes: &[u8]) {
    for (value, bytes) in values.iter_mut().zip(bytes.chunks_exact(T::BYTES)) {
        *value = T::get(bytes);
    }
}
