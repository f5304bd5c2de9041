//! Memory that the items of lists in JSON take once they are decoded.
//!
//! An item `{}` takes two bytes of text, and a value of each field of its type in memory. So a short text can stand for
//! gigabytes. The size is estimated from the length of the text; only where that is too much, the items are counted.

use std::collections::HashMap;
use std::fmt;

use arrow::datatypes::{DataType, Field, Schema};
use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::shape::fixed_bytes;

/// Least bytes of an item that is an object or null, with the comma beside it.
const ITEM_TEXT_BYTES: u64 = 3;
/// Bytes of an item that its text already bounds: a list of numbers.
const ITEM_BYTES_SMALL: u64 = 16;
/// Bytes that the decoder needs for each field of an item.
const POSITION_BYTES: u64 = 4;

/// The part of a type that has lists.
enum Node<'s> {
    /// No list.
    Plain,
    List {
        /// Bytes of an item, without those of lists in it.
        item: u64,
        inner: Box<Node<'s>>,
    },
    /// The fields that have lists.
    Object(HashMap<&'s str, Node<'s>>),
}

impl<'s> Node<'s> {
    fn of(kind: &'s DataType) -> Self {
        match kind {
            DataType::List(field) => {
                let inner = Box::new(Node::of(field.data_type()));
                Node::List { item: item_bytes(field.data_type()), inner }
            }
            DataType::Struct(fields) => Node::of_fields(fields.iter().map(AsRef::as_ref)),
            _ => Node::Plain,
        }
    }

    fn of_fields(fields: impl Iterator<Item = &'s Field>) -> Self {
        let nodes = fields.map(|field| (field.name().as_str(), Node::of(field.data_type())));
        let nodes: HashMap<&str, Node<'_>> = nodes.filter(|(_, node)| !matches!(node, Node::Plain)).collect();
        if nodes.is_empty() { Node::Plain } else { Node::Object(nodes) }
    }

    /// Bytes of the largest item.
    fn widest(&self) -> u64 {
        match self {
            Node::Plain => 0,
            Node::List { item, inner } => inner.widest().max(*item),
            Node::Object(fields) => fields.values().map(Node::widest).max().unwrap_or(0),
        }
    }
}

/// Bytes of a value of a type, without the items of lists in it.
fn item_bytes(kind: &DataType) -> u64 {
    match kind {
        DataType::Struct(fields) => {
            fields.iter().map(|field| POSITION_BYTES + item_bytes(field.data_type())).sum()
        }
        other => fixed_bytes(other),
    }
}

/// Bytes of the items of all lists in a JSON text: objects of the columns of `schema`, one after another. 0 where an
/// estimate shows that they are at most `bytes_max`.
///
/// # Errors
/// Those of the text.
pub(super) fn bytes(text: &[u8], schema: &Schema, bytes_max: u64) -> serde_json::Result<u64> {
    let row = Node::of_fields(schema.fields().iter().map(AsRef::as_ref));
    let widest = row.widest();
    if widest <= ITEM_BYTES_SMALL || (text.len() as u64 / ITEM_TEXT_BYTES).saturating_mul(widest) <= bytes_max
    {
        return Ok(0);
    }
    let mut bytes = 0;
    let mut json = serde_json::Deserializer::from_slice(text);
    while json.end().is_err() {
        Count { node: &row, bytes: &mut bytes }.deserialize(&mut json)?;
    }
    Ok(bytes)
}

/// Counts the items of a value.
struct Count<'c> {
    node: &'c Node<'c>,
    bytes: &'c mut u64,
}

impl<'de> DeserializeSeed<'de> for Count<'_> {
    type Value = ();
    fn deserialize<D: serde::Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        match self.node {
            Node::Plain => serde::Deserialize::deserialize(json).map(|IgnoredAny| ()),
            _ => json.deserialize_any(self),
        }
    }
}

impl<'de> Visitor<'de> for Count<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.node {
            Node::Plain => "a value",
            Node::List { .. } => "a list",
            Node::Object(_) => "an object",
        })
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let Node::List { item, inner } = self.node else {
            return Err(A::Error::custom("a list is not expected"));
        };
        while items.next_element_seed(Count { node: inner, bytes: &mut *self.bytes })?.is_some() {
            *self.bytes = self.bytes.saturating_add(*item);
        }
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Node::Object(fields) = self.node else {
            return Err(A::Error::custom("an object is not expected"));
        };
        while let Some(name) = map.next_key::<std::borrow::Cow<'_, str>>()? {
            match fields.get(&*name) {
                Some(node) => map.next_value_seed(Count { node, bytes: &mut *self.bytes })?,
                None => map.next_value::<IgnoredAny>().map(drop)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use arrow::datatypes::Fields;

    use super::*;

    fn list(kind: DataType) -> DataType {
        DataType::List(Field::new_list_field(kind, true).into())
    }

    #[test]
    fn items_are_counted_at_every_depth() {
        let wide: Fields = (0..10).map(|at| Field::new(format!("f{at}"), DataType::Int64, true)).collect();
        // 10 fields of 12 bytes each, with their positions; a list is 4 bytes and its position.
        let wide = DataType::Struct(wide);
        let inner = DataType::Struct(vec![Field::new("l", list(wide.clone()), true)].into());
        let schema = Schema::new(vec![
            Field::new("a", list(wide), true),
            Field::new("b", list(inner), true),
            Field::new("c", DataType::Int64, true),
        ]);
        let text = br#"{"a": [{}, null, {"f0": 1}], "c": 1}
            {"\u0062": [{"l": [{}, {}]}, {}, null], "a": null} {"c": [[1]], "d": {"a": [{}]}}"#;
        assert_eq!(bytes(text, &schema, 0).unwrap(), 5 * 120 + 3 * 8);
        assert_eq!(bytes(text, &schema, 1 << 20).unwrap(), 0);
        assert!(bytes(b"{\"a\": [{}", &schema, 0).is_err());
        assert!(bytes(b"{\"a\": {}}", &schema, 0).is_err());
        let narrow = Schema::new(vec![Field::new("a", list(list(DataType::Int64)), true)]);
        assert_eq!(bytes(b"not read", &narrow, 0).unwrap(), 0);
    }
}
