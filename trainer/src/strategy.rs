//! Strategies: how the gradients of a job's workers become one update of the weights.

use std::fmt;

use serde::de::value::{MapAccessDeserializer, StrDeserializer};
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// How the gradients of a job's workers become one update of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Strategy {
    /// Exact sums over fixed virtual shards: the result does not depend on the number of workers.
    #[default]
    Strict,
    /// One pass of each worker over its rows of the batch, and sums of floating-point numbers: faster, with a
    /// result that depends on the number of workers: by rounding, and by the rows of which batch normalisations in
    /// training take statistics.
    Allreduce,
}

impl Strategy {
    /// Whether a job without the key has this strategy.
    pub(crate) fn is_default(&self) -> bool {
        *self == Strategy::default()
    }
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Word {
    Strict,
    Allreduce,
}

/// The table of a strategy; none has settings yet.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    name: Word,
}

impl From<Word> for Strategy {
    fn from(word: Word) -> Strategy {
        match word {
            Word::Strict => Strategy::Strict,
            Word::Allreduce => Strategy::Allreduce,
        }
    }
}

impl From<Strategy> for Word {
    fn from(strategy: Strategy) -> Word {
        match strategy {
            Strategy::Strict => Word::Strict,
            Strategy::Allreduce => Word::Allreduce,
        }
    }
}

// A word where a strategy has no settings: digests of jobs contain it.
impl Serialize for Strategy {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Word::from(*self).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Strategy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Strategy, D::Error> {
        struct WordOrTable;
        impl<'de> Visitor<'de> for WordOrTable {
            type Value = Strategy;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"strict\", \"allreduce\" or a table such as { name = \"allreduce\" }")
            }

            fn visit_str<E: serde::de::Error>(self, word: &str) -> Result<Strategy, E> {
                Word::deserialize(StrDeserializer::new(word)).map(Strategy::from)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Strategy, A::Error> {
                Table::deserialize(MapAccessDeserializer::new(map)).map(|table| table.name.into())
            }
        }
        deserializer.deserialize_any(WordOrTable)
    }
}
