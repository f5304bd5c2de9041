//! Static facts about a value, known without running the graph: type, bounds of its integers, bounds of its extents.

use millrace_bundle::onnx::TensorProto;
use millrace_bundle::onnx::tensor_proto::{DataLocation, DataType};

/// Maximum number of elements of a constant whose elements are read.
pub(super) const ELEMENTS_MAX: usize = 1 << 20;
/// The largest extent along one axis, unless the graph itself makes larger ones: requests hold no tensors of 2 GiB.
pub(super) const EXTENT_MAX: i64 = i32::MAX as i64;

/// Known facts about a value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ValueFacts {
    /// Element type as numbered in ONNX; 0 if unknown.
    pub(super) datatype: i32,
    /// For integers, the smallest possible element.
    pub(super) low: i64,
    /// For integers, the largest possible element. Unsigned 64-bit integers may be larger if this is `i64::MAX`.
    pub(super) high: i64,
    /// Whether none of its extents exceeds [`EXTENT_MAX`].
    pub(super) small: bool,
    /// Whether its elements are extents of one tensor, each at most once.
    pub(super) shape: bool,
    /// Whether it is a constant without elements 0 and -1.
    pub(super) divides: bool,
}

impl Default for ValueFacts {
    fn default() -> ValueFacts {
        ValueFacts { datatype: 0, low: i64::MIN, high: i64::MAX, small: false, shape: false, divides: false }
    }
}

/// The smallest and largest integer of a type.
pub(super) fn bounds_of(datatype: i32) -> (i64, i64) {
    use DataType as T;
    match T::try_from(datatype) {
        Ok(T::Bool) => (0, 1),
        Ok(T::Uint8) => (0, u8::MAX.into()),
        Ok(T::Uint16) => (0, u16::MAX.into()),
        Ok(T::Uint32) => (0, u32::MAX.into()),
        Ok(T::Uint64) => (0, i64::MAX),
        Ok(T::Int8) => (i8::MIN.into(), i8::MAX.into()),
        Ok(T::Int16) => (i16::MIN.into(), i16::MAX.into()),
        Ok(T::Int32) => (i32::MIN.into(), i32::MAX.into()),
        _ => (i64::MIN, i64::MAX),
    }
}

impl ValueFacts {
    /// An unknown value of a type.
    pub(super) fn of_type(datatype: i32, small: bool) -> ValueFacts {
        let (low, high) = bounds_of(datatype);
        ValueFacts { datatype, low, high, small, shape: false, divides: false }
    }

    /// The facts about a constant.
    pub(super) fn of_tensor(tensor: &TensorProto) -> ValueFacts {
        let small = tensor.dims.iter().all(|extent| *extent <= EXTENT_MAX);
        let known = ValueFacts::of_type(tensor.data_type(), small);
        let Some(elements) = elements(tensor) else { return known };
        elements
            .fold(None, |found: Option<ValueFacts>, element| {
                let divides = !matches!(element, 0 | -1) && found.is_none_or(|found| found.divides);
                let (low, high) = found.map_or((element, element), |found| (found.low, found.high));
                Some(ValueFacts { low: low.min(element), high: high.max(element), divides, ..known })
            })
            .unwrap_or(known)
    }

    /// The same type with bounds, if the type can hold them; else any value of the type, as integers wrap around.
    pub(super) fn within(self, bounds: Option<(i64, i64)>) -> ValueFacts {
        let (least, most) = bounds_of(self.datatype);
        match bounds {
            Some((low, high)) if least <= low && high <= most => {
                ValueFacts { low, high, divides: false, ..self }
            }
            _ => ValueFacts::of_type(self.datatype, self.small),
        }
    }

    /// The facts that hold for both values.
    pub(super) fn or(self, other: ValueFacts) -> ValueFacts {
        if self.datatype != other.datatype {
            return ValueFacts::default();
        }
        ValueFacts {
            low: self.low.min(other.low),
            high: self.high.max(other.high),
            small: self.small && other.small,
            shape: false,
            divides: self.divides && other.divides,
            ..self
        }
    }

    /// Whether it may exceed the range of its bounds.
    pub(super) fn is_unbounded(&self) -> bool {
        self.datatype == DataType::Uint64 as i32 && self.high == i64::MAX
    }

    pub(super) fn bounds(&self) -> (i64, i64) {
        (self.low, self.high)
    }

    pub(super) fn has_no_type(&self) -> bool {
        self.datatype == 0
    }

    /// Whether its elements are integers; `None` if the type is unknown.
    pub(super) fn is_integer(&self) -> Option<bool> {
        use DataType as T;
        match T::try_from(self.datatype) {
            Ok(T::Undefined) | Err(_) => None,
            Ok(T::Uint8 | T::Uint16 | T::Uint32 | T::Uint64 | T::Int8 | T::Int16 | T::Int32 | T::Int64) => {
                Some(true)
            }
            Ok(_) => Some(false),
        }
    }

    /// Whether division by this value is safe, element by element: never the smallest integer of the type by -1, and
    /// never by 0 if that ends the process.
    pub(super) fn may_divide(&self, dividend: &ValueFacts, datatype: i32, zero_ends: bool) -> bool {
        let holds = |number: i64| (self.low..=self.high).contains(&number);
        let is_safe = !holds(-1) || dividend.low > bounds_of(datatype).0;
        self.divides || (is_safe && !(zero_ends && holds(0)))
    }
}

/// The elements of an integer tensor that is stored in the graph and not too long.
fn elements(tensor: &TensorProto) -> Option<Box<dyn Iterator<Item = i64> + '_>> {
    use DataType as T;
    if !tensor.external_data.is_empty() || tensor.data_location() == DataLocation::External {
        return None;
    }
    let count = tensor.dims.iter().try_fold(1usize, |count, extent| {
        usize::try_from(*extent).ok().and_then(|extent| count.checked_mul(extent))
    })?;
    let raw = tensor.raw_data.as_deref().unwrap_or_default();
    macro_rules! numbers {
        ($number:ty, $typed:expr, $as:expr) => {{
            const WIDTH: usize = size_of::<$number>();
            let has = if raw.is_empty() { $typed.len() } else { raw.len() / WIDTH };
            if has != count || count > ELEMENTS_MAX {
                return None;
            }
            let of_raw = raw.as_chunks::<WIDTH>().0.iter().map(|bytes| <$number>::from_le_bytes(*bytes));
            let of_typed = $typed.iter().map(|number| *number as $number);
            let numbers = of_raw.chain(of_typed.take(if raw.is_empty() { count } else { 0 }));
            Some(Box::new(numbers.map($as)))
        }};
    }
    match T::try_from(tensor.data_type()).ok()? {
        T::Int8 => numbers!(i8, tensor.int32_data, i64::from),
        T::Int16 => numbers!(i16, tensor.int32_data, i64::from),
        T::Int32 => numbers!(i32, tensor.int32_data, i64::from),
        T::Uint8 => numbers!(u8, tensor.int32_data, i64::from),
        T::Uint16 => numbers!(u16, tensor.int32_data, i64::from),
        T::Uint32 => numbers!(u32, tensor.uint64_data, i64::from),
        T::Int64 => numbers!(i64, tensor.int64_data, |number| number),
        T::Uint64 => {
            numbers!(u64, tensor.uint64_data, |number| i64::try_from(number).unwrap_or(i64::MAX))
        }
        _ => None,
    }
}
