//! Shape checks: bounds on a request's array counts, applied before the codec decodes it.
//!
//! The codec reserves memory for as many elements as an array announces, so 4 bytes could ask for gigabytes.
//! This module walks the request by its shape first. A count must fit both the remaining bytes and the budget
//! for a whole request.

use kafka_protocol::messages::ApiKey;

/// Array elements in one request, nested ones counted.
const ELEMENTS_MAX: usize = 50_000;

/// One field of a request.
enum Field {
    /// A fixed number of bytes.
    Fixed(usize),
    /// 16-bit length, -1 for null.
    Str,
    /// 32-bit length, -1 for null.
    Bytes,
    /// 32-bit count, -1 for null.
    Array(&'static [Field]),
}
use Field::{Array, Bytes, Fixed, Str};

const NAMES: &[Field] = &[Array(&[Str])];
const PRODUCE: &[Field] = &[Str, Fixed(6), Array(&[Str, Array(&[Fixed(4), Bytes])])];
const FETCH_4: &[Field] = &[Fixed(17), Array(&[Str, Array(&[Fixed(16)])])];
const FETCH_5: &[Field] = &[Fixed(17), Array(&[Str, Array(&[Fixed(24)])])];
const FETCH_7: &[Field] = &[Fixed(25), Array(&[Str, Array(&[Fixed(24)])]), FORGOTTEN];
const FETCH_9: &[Field] = &[Fixed(25), Array(&[Str, Array(&[Fixed(28)])]), FORGOTTEN];
const FETCH_11: &[Field] = &[Fixed(25), Array(&[Str, Array(&[Fixed(28)])]), FORGOTTEN, Str];
const FORGOTTEN: Field = Array(&[Str, Array(&[Fixed(4)])]);
const LIST_OFFSETS_1: &[Field] = &[Fixed(4), Array(&[Str, Array(&[Fixed(12)])])];
const LIST_OFFSETS_2: &[Field] = &[Fixed(5), Array(&[Str, Array(&[Fixed(12)])])];
const LIST_OFFSETS_4: &[Field] = &[Fixed(5), Array(&[Str, Array(&[Fixed(16)])])];
const CREATE_TOPICS: &[Field] =
    &[Array(&[Str, Fixed(6), Array(&[Fixed(4), Array(&[Fixed(4)])]), Array(&[Str, Str])])];

/// The leading fields of a request up to its last array; the fields after it have no counts.
fn shape(key: ApiKey, version: i16) -> &'static [Field] {
    match (key, version) {
        (ApiKey::Produce, _) => PRODUCE,
        (ApiKey::Fetch, ..=4) => FETCH_4,
        (ApiKey::Fetch, 5..=6) => FETCH_5,
        (ApiKey::Fetch, 7..=8) => FETCH_7,
        (ApiKey::Fetch, 9..=10) => FETCH_9,
        (ApiKey::Fetch, _) => FETCH_11,
        (ApiKey::ListOffsets, ..=1) => LIST_OFFSETS_1,
        (ApiKey::ListOffsets, 2..=3) => LIST_OFFSETS_2,
        (ApiKey::ListOffsets, _) => LIST_OFFSETS_4,
        (ApiKey::Metadata | ApiKey::DeleteTopics, _) => NAMES,
        (ApiKey::CreateTopics, _) => CREATE_TOPICS,
        // No arrays.
        _ => &[],
    }
}

/// Refuses a request body whose counts or lengths cannot be right.
pub(crate) fn check(key: ApiKey, version: i16, body: &[u8]) -> Result<(), String> {
    let mut elements = 0;
    walk(shape(key, version), &mut { body }, &mut elements)
}

fn walk(fields: &[Field], rest: &mut &[u8], elements: &mut usize) -> Result<(), String> {
    for field in fields {
        match field {
            Fixed(bytes) => skip(rest, *bytes)?,
            Str => {
                let length = i16::from_be_bytes(take(rest)?);
                skip_counted(rest, i64::from(length))?;
            }
            Bytes => {
                let length = i32::from_be_bytes(take(rest)?);
                skip_counted(rest, i64::from(length))?;
            }
            Array(element) => {
                let count = i32::from_be_bytes(take(rest)?);
                if count == -1 {
                    continue;
                }
                let count = usize::try_from(count).map_err(|_| format!("negative count {count}"))?;
                *elements = elements.saturating_add(count);
                // Every element has at least one byte.
                if count > rest.len() || *elements > ELEMENTS_MAX {
                    return Err(format!(
                        "an array of {count} elements is more than the request can hold or is allowed"
                    ));
                }
                for _ in 0..count {
                    walk(element, rest, elements)?;
                }
            }
        }
    }
    Ok(())
}

fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], String> {
    let (head, tail) = rest.split_first_chunk().ok_or("the request is cut short")?;
    *rest = tail;
    Ok(*head)
}

fn skip_counted(rest: &mut &[u8], length: i64) -> Result<(), String> {
    match length {
        -1 => Ok(()),
        length => skip(rest, usize::try_from(length).map_err(|_| format!("negative length {length}"))?),
    }
}

fn skip(rest: &mut &[u8], bytes: usize) -> Result<(), String> {
    *rest = rest.get(bytes..).ok_or("the request is cut short")?;
    Ok(())
}
