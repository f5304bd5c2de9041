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
    Allreduce(Backend),
}

/// What sums the gradients of [`Strategy::Allreduce`]. Each rounds in an order of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Backend {
    /// The ring of TCP connections between the workers.
    #[default]
    Tcp,
    /// NVIDIA's NCCL, between GPUs. The ring still sums rows, losses and counts.
    Nccl,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Backend::Tcp => "tcp",
            Backend::Nccl => "nccl",
        })
    }
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

/// The table of a strategy.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    name: Word,
    #[serde(default)]
    collective: Option<Backend>,
}

impl From<Word> for Strategy {
    fn from(word: Word) -> Strategy {
        match word {
            Word::Strict => Strategy::Strict,
            Word::Allreduce => Strategy::Allreduce(Backend::default()),
        }
    }
}

impl Table {
    /// The strategy; otherwise why its keys do not fit together.
    fn strategy(&self) -> Result<Strategy, String> {
        match (&self.name, self.collective) {
            (Word::Strict, Some(backend)) => Err(format!(
                "strategy.collective = \"{backend}\" needs name = \"allreduce\": strict sums integers over TCP; set that \
                 name, or leave collective out"
            )),
            (Word::Strict, None) => Ok(Strategy::Strict),
            (Word::Allreduce, backend) => Ok(Strategy::Allreduce(backend.unwrap_or_default())),
        }
    }
}

// A word where all settings have their defaults: digests of jobs contain it.
impl Serialize for Strategy {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Strategy::Strict => Word::Strict.serialize(serializer),
            Strategy::Allreduce(Backend::Tcp) => Word::Allreduce.serialize(serializer),
            Strategy::Allreduce(backend) => {
                Table { name: Word::Allreduce, collective: Some(*backend) }.serialize(serializer)
            }
        }
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
                let table = Table::deserialize(MapAccessDeserializer::new(map))?;
                table.strategy().map_err(serde::de::Error::custom)
            }
        }
        deserializer.deserialize_any(WordOrTable)
    }
}
