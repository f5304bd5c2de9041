//! Row concatenation of tensors, and the split back into their parts.

use millrace_serving_core::tensor::{Data, Tensor};

/// Calls a macro with the names of all datatypes.
macro_rules! with_datatypes {
    ($then:ident) => {
        $then!(Bool, Uint8, Uint16, Uint32, Uint64, Int8, Int16, Int32, Int64, Fp16, Bf16, Fp32, Fp64, Bytes)
    };
}

/// Concatenates tensors along the first dimension, in order. `None` if datatypes or the other extents differ.
pub(super) fn join<'a>(mut parts: impl Iterator<Item = &'a Tensor>) -> Option<Tensor> {
    let mut joined = parts.next()?.clone();
    for part in parts {
        if joined.shape.get(1..) != part.shape.get(1..) {
            return None;
        }
        let rows = joined.shape.first_mut()?;
        *rows = rows.checked_add(*part.shape.first()?)?;
        append(&mut joined.data, &part.data)?;
    }
    Some(joined)
}

/// Splits a tensor into parts of the given numbers of rows. `None` if the tensor has no rows or a different total.
pub(super) fn split(tensor: Tensor, rows: &[usize]) -> Option<Vec<Tensor>> {
    let total = usize::try_from(*tensor.shape.first()?).ok()?;
    if total != rows.iter().sum::<usize>() || total == 0 {
        return None;
    }
    let row_len = tensor.data.len() / total;
    let mut begin = 0;
    let parts = rows.iter().map(|rows| {
        let end = begin + rows * row_len;
        let mut shape = tensor.shape.clone();
        shape[0] = *rows as i64;
        let part = Tensor { name: tensor.name.clone(), shape, data: slice(&tensor.data, begin, end) };
        begin = end;
        part
    });
    Some(parts.collect())
}

/// The last row of a tensor. `None` if the tensor has no rows.
pub(super) fn last_row(tensor: &Tensor) -> Option<Tensor> {
    let total = usize::try_from(*tensor.shape.first()?).ok().filter(|total| *total > 0)?;
    let mut shape = tensor.shape.clone();
    shape[0] = 1;
    let end = tensor.data.len();
    Some(Tensor { name: tensor.name.clone(), shape, data: slice(&tensor.data, end - end / total, end) })
}

fn append(data: &mut Data, more: &Data) -> Option<()> {
    macro_rules! arms {
        ($($variant:ident),*) => {
            match (data, more) {
                $((Data::$variant(data), Data::$variant(more)) => data.extend_from_slice(more),)*
                _ => return None,
            }
        };
    }
    with_datatypes!(arms);
    Some(())
}

fn slice(data: &Data, begin: usize, end: usize) -> Data {
    macro_rules! arms {
        ($($variant:ident),*) => {
            match data {
                $(Data::$variant(data) => Data::$variant(data[begin..end].to_vec()),)*
            }
        };
    }
    with_datatypes!(arms)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn joined_rows_are_split_again() {
        let fp32 = |rows: i64, from: f32| {
            let values = (0..rows * 3).map(|i| from + i as f32).collect();
            Tensor::fp32("x", vec![rows, 3], values).unwrap()
        };
        let texts = |texts: &[&'static str]| {
            let data = Data::Bytes(texts.iter().map(|text| Bytes::from_static(text.as_bytes())).collect());
            Tensor::new("t", vec![texts.len() as i64], data).unwrap()
        };
        let bools =
            |bits: &[bool]| Tensor::new("b", vec![bits.len() as i64], Data::Bool(bits.to_vec())).unwrap();
        for parts in [
            vec![fp32(1, 0.0), fp32(2, 10.0), fp32(1, 90.0)],
            vec![texts(&["a", ""]), texts(&["ccc"])],
            vec![bools(&[true]), bools(&[false, true])],
        ] {
            let rows: Vec<usize> = parts.iter().map(|part| part.shape[0] as usize).collect();
            let joined = join(parts.iter()).unwrap();
            assert_eq!(joined.shape[0] as usize, rows.iter().sum::<usize>());
            let last = last_row(&joined).unwrap();
            assert_eq!(
                join([&joined, &last].into_iter()).map(|filled| filled.shape[0]),
                Some(joined.shape[0] + 1)
            );
            assert_eq!(last_row(&last), Some(last));
            assert_eq!(split(joined, &rows).unwrap(), parts);
        }
    }

    #[test]
    fn tensors_of_different_shapes_or_types_are_not_joined() {
        let narrow = Tensor::fp32("x", vec![1, 2], vec![0.0; 2]).unwrap();
        let wide = Tensor::fp32("x", vec![1, 3], vec![0.0; 3]).unwrap();
        let whole = Tensor::new("x", vec![1, 2], Data::Int32(vec![0; 2])).unwrap();
        assert_eq!(join([&narrow, &wide].into_iter()), None);
        assert_eq!(join([&narrow, &whole].into_iter()), None);
        assert_eq!(join(std::iter::empty()), None);
        assert_eq!(split(narrow.clone(), &[1, 1]), None, "one row for two");
        let scalar = Tensor::fp32("x", vec![], vec![0.0]).unwrap();
        assert_eq!(split(scalar, &[1]), None);
        let nothing = Tensor::fp32("x", vec![0, 2], vec![]).unwrap();
        assert_eq!(last_row(&nothing), None);
        assert_eq!(split(nothing, &[0]), None);
    }
}
