//! Training objectives: the loss function of a job and its settings.

use std::fmt;

use serde::de::value::{MapAccessDeserializer, StrDeserializer};
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A loss function, without its settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Loss {
    /// Softmax cross-entropy between the output (logits `[rows, classes]`) and a class per row.
    CrossEntropy,
    /// Squared error, averaged over the outputs of a row, against float labels.
    Mse,
    /// Binary cross-entropy with logits, averaged over the outputs of a row, against labels from 0 to 1.
    Bce,
    /// Absolute error, averaged over the outputs of a row, against float labels.
    L1,
    /// Squared error up to a distance and absolute error beyond it, averaged over the outputs of a row.
    Huber,
}

impl Loss {
    /// Whether an output is right or wrong, so that an accuracy exists.
    pub(crate) fn counts_classes(self) -> bool {
        matches!(self, Loss::CrossEntropy | Loss::Bce)
    }

    /// Whether the labels are classes instead of numbers.
    pub(crate) fn takes_classes(self) -> bool {
        self == Loss::CrossEntropy
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Loss::CrossEntropy => "cross_entropy",
            Loss::Mse => "mse",
            Loss::Bce => "bce",
            Loss::L1 => "l1",
            Loss::Huber => "huber",
        })
    }
}

/// The training objective: a loss function with its settings.
///
/// The objective is the mean over the rows of the global batch. With class weights or ignored rows, it is the
/// sum of the weighted losses divided by the sum of the labels' weights, as in PyTorch.
#[derive(Debug, Clone, PartialEq)]
pub enum Objective {
    /// [`Loss::CrossEntropy`].
    CrossEntropy(CrossEntropy),
    /// [`Loss::Mse`].
    Mse,
    /// [`Loss::Bce`].
    Bce,
    /// [`Loss::L1`].
    L1,
    /// [`Loss::Huber`].
    Huber(Huber),
}

/// Settings of the cross-entropy; the defaults change nothing.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CrossEntropy {
    /// Share of each label that is spread evenly over all classes, 0 to 1; 0 when absent.
    #[serde(skip_serializing_if = "is_zero")]
    pub label_smoothing: f64,
    /// Weight of each class, one per output of the model, each 0 or more; equal weights when absent.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub class_weights: Vec<f64>,
    /// Rows with this label count neither for the loss nor for the accuracy. When absent, every label has to be
    /// a class. Refused where labels are texts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ignore_index: Option<i64>,
}

/// Settings of the Huber loss.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Huber {
    /// The distance from which on the loss is linear, above 0; 1.0 when absent.
    #[serde(skip_serializing_if = "is_one")]
    pub delta: f64,
}

impl Default for Huber {
    fn default() -> Huber {
        Huber { delta: 1.0 }
    }
}

fn is_zero(value: &f64) -> bool {
    *value == 0.0
}

fn is_one(value: &f64) -> bool {
    *value == 1.0
}

impl From<Loss> for Objective {
    fn from(loss: Loss) -> Objective {
        match loss {
            Loss::CrossEntropy => Objective::CrossEntropy(CrossEntropy::default()),
            Loss::Mse => Objective::Mse,
            Loss::Bce => Objective::Bce,
            Loss::L1 => Objective::L1,
            Loss::Huber => Objective::Huber(Huber::default()),
        }
    }
}

impl Objective {
    /// The loss function.
    pub fn kind(&self) -> Loss {
        match self {
            Objective::CrossEntropy(_) => Loss::CrossEntropy,
            Objective::Mse => Loss::Mse,
            Objective::Bce => Loss::Bce,
            Objective::L1 => Loss::L1,
            Objective::Huber(_) => Loss::Huber,
        }
    }

    /// The label whose rows do not count.
    pub(crate) fn ignore_index(&self) -> Option<i64> {
        match self {
            Objective::CrossEntropy(settings) => settings.ignore_index,
            _ => None,
        }
    }

    /// Checks the bounds of the settings; the error names the key.
    pub(crate) fn check(&self) -> Result<(), String> {
        match self {
            Objective::CrossEntropy(CrossEntropy { label_smoothing, class_weights, .. }) => {
                if !(0.0..=1.0).contains(label_smoothing) {
                    return Err(format!("loss.label_smoothing = {label_smoothing}: allowed are 0 to 1"));
                }
                if let Some(weight) =
                    class_weights.iter().find(|weight| **weight != 0.0 && !WEIGHTS.contains(*weight))
                {
                    return Err(format!("loss.class_weights has {weight}: allowed are 0 and 1e-30 to 1e30"));
                }
                if !class_weights.is_empty() && class_weights.iter().all(|weight| *weight == 0.0) {
                    return Err("loss.class_weights are all 0: give at least one class a weight".to_owned());
                }
            }
            Objective::Huber(Huber { delta }) if !delta.is_finite() || *delta <= 0.0 => {
                return Err(format!("loss.delta = {delta}: allowed are numbers above 0"));
            }
            _ => {}
        }
        Ok(())
    }
}

/// Weights of classes: products with losses and slopes stay within f32.
const WEIGHTS: std::ops::RangeInclusive<f64> = 1e-30..=1e30;

/// The table of an objective with settings.
#[derive(Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
enum Table {
    CrossEntropy(CrossEntropy),
    Mse {},
    Bce {},
    L1 {},
    Huber(Huber),
}

// A word where the settings have their defaults, as before there were settings: digests of jobs contain it.
impl Serialize for Objective {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if *self == Objective::from(self.kind()) {
            return self.kind().serialize(serializer);
        }
        match self.clone() {
            Objective::CrossEntropy(settings) => Table::CrossEntropy(settings),
            Objective::Mse => Table::Mse {},
            Objective::Bce => Table::Bce {},
            Objective::L1 => Table::L1 {},
            Objective::Huber(settings) => Table::Huber(settings),
        }
        .serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Objective {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Objective, D::Error> {
        struct WordOrTable;
        impl<'de> Visitor<'de> for WordOrTable {
            type Value = Objective;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(
                    "a loss such as \"cross_entropy\" or a table such as { kind = \"huber\", delta = 1.0 }",
                )
            }

            fn visit_str<E: serde::de::Error>(self, word: &str) -> Result<Objective, E> {
                Loss::deserialize(StrDeserializer::new(word)).map(Objective::from)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Objective, A::Error> {
                Ok(match Table::deserialize(MapAccessDeserializer::new(map))? {
                    Table::CrossEntropy(settings) => Objective::CrossEntropy(settings),
                    Table::Mse {} => Objective::Mse,
                    Table::Bce {} => Objective::Bce,
                    Table::L1 {} => Objective::L1,
                    Table::Huber(settings) => Objective::Huber(settings),
                })
            }
        }
        deserializer.deserialize_any(WordOrTable)
    }
}
