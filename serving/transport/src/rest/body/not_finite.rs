//! Diagnosis of requests with NaN or infinities: JSON does not allow them, but Python writes them.

use std::fmt;

use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use millrace_serving_core::error::{InferError, quote};

const WORDS: [&[u8]; 3] = [b"NaN", b"-Infinity", b"Infinity"];

/// The error for a text that is not JSON because it has a NaN or infinity outside its strings; `None` for
/// other causes.
pub(super) fn refusal(json: &[u8]) -> Option<InferError> {
    let (word, finite) = without(json)?;
    let input = serde_json::from_slice::<Request>(&finite).ok().and_then(|request| {
        request.inputs.into_iter().find(|input| input.data.is_some_and(|Data(has_null)| has_null))
    });
    let place = input.map_or_else(|| "the body".to_owned(), |input| format!("input {}", quote(&input.name)));
    Some(InferError::invalid(format!(
        "{place} has {word}, which JSON does not have: send the tensor as binary data (binary_data_size)"
    )))
}

/// The first of [`WORDS`] in the text, and the text with each of them replaced by null.
fn without(json: &[u8]) -> Option<(&'static str, Vec<u8>)> {
    let (mut first, mut finite) = (None, Vec::new());
    let (mut at, mut in_string) = (0, false);
    while let Some(byte) = json.get(at) {
        let found = WORDS.iter().find(|word| !in_string && json[at..].starts_with(word));
        if let Some(word) = found {
            first = first.or_else(|| std::str::from_utf8(word).ok());
            finite.extend_from_slice(b"null");
            at += word.len();
            continue;
        }
        // An escaped quote does not end a string.
        let bytes = if in_string && *byte == b'\\' { 2 } else { 1 };
        in_string ^= *byte == b'"';
        finite.extend_from_slice(json.get(at..at + bytes).unwrap_or(&json[at..]));
        at += bytes;
    }
    first.map(|first| (first, finite))
}

#[derive(Deserialize)]
struct Request {
    inputs: Vec<Input>,
}

#[derive(Deserialize)]
struct Input {
    name: String,
    data: Option<Data>,
}

/// Whether nested lists of elements contain a null.
#[derive(Clone, Copy)]
struct Data(bool);

impl<'de> Deserialize<'de> for Data {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Data, D::Error> {
        deserializer.deserialize_any(Elements)
    }
}

struct Elements;

impl<'de> Visitor<'de> for Elements {
    type Value = Data;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("elements")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Data, A::Error> {
        let mut has_null = false;
        while let Some(Data(null)) = list.next_element()? {
            has_null |= null;
        }
        Ok(Data(has_null))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Data, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Data(false))
    }

    fn visit_unit<E>(self) -> Result<Data, E> {
        Ok(Data(true))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Data, E> {
        Ok(Data(false))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Data, E> {
        Ok(Data(false))
    }

    fn visit_u64<E>(self, _: u64) -> Result<Data, E> {
        Ok(Data(false))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Data, E> {
        Ok(Data(false))
    }

    fn visit_str<E>(self, _: &str) -> Result<Data, E> {
        Ok(Data(false))
    }
}
