//! Columns of a dataset that feed an input of a model.
use std::fmt;

use serde::de::value::SeqAccessDeserializer;
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// One column, or several whose values stand one after another in the input's last dimension, in this order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Features(Vec<String>);

impl Features {
    /// The columns, in order.
    pub fn names(&self) -> &[String] {
        &self.0
    }

    /// Whether no column is named.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<&str> for Features {
    fn from(name: &str) -> Features {
        Features(vec![name.to_owned()])
    }
}

impl<'a> FromIterator<&'a str> for Features {
    fn from_iter<I: IntoIterator<Item = &'a str>>(names: I) -> Features {
        Features(names.into_iter().map(str::to_owned).collect())
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(", "))
    }
}

// One column is a text, as before there could be several: digests of jobs contain it.
impl Serialize for Features {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0[..] {
            [name] => name.serialize(serializer),
            names => names.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Features {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Features, D::Error> {
        struct OneOrSeveral;
        impl<'de> Visitor<'de> for OneOrSeveral {
            type Value = Features;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a column such as \"pixels\" or a list of columns such as [\"age\", \"height\"]")
            }

            fn visit_str<E>(self, name: &str) -> Result<Features, E> {
                Ok(Features::from(name))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, names: A) -> Result<Features, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(names)).map(Features)
            }
        }
        deserializer.deserialize_any(OneOrSeveral)
    }
}
