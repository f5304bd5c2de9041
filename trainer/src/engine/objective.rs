//! Training objectives: the loss function of a job and its settings.

use std::borrow::Cow;
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
    /// Kullback-Leibler divergence from the classes of a teacher, mixed with the cross-entropy with a class per
    /// row.
    Kl,
}

impl Loss {
    /// Whether an output is right or wrong, so that an accuracy exists.
    pub(crate) fn counts_classes(self) -> bool {
        matches!(self, Loss::CrossEntropy | Loss::Bce | Loss::Kl)
    }

    /// Whether the labels are classes instead of numbers.
    pub(crate) fn takes_classes(self) -> bool {
        matches!(self, Loss::CrossEntropy | Loss::Kl)
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
            Loss::Kl => "kl",
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
    /// [`Loss::Kl`].
    Kl(Distillation),
}

/// Settings of the distillation. With the temperature T, the logits z of the model and u of the teacher, the loss
/// of a row is `alpha` · T² · KL(softmax(u / T) ‖ softmax(z / T)) + (1 − `alpha`) · cross-entropy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Distillation {
    /// The model to learn from: the folder of a bundle version or an ONNX file, in a volume
    /// (`volume:/models/NAME/VERSION`) or relative to the job file. It gives as many logits as the trained model,
    /// for the same inputs. It is read when a job starts, and another content is another run.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub teacher: String,
    /// Divides the logits of both models before their softmax, 0.01 to 1000; 2.0 when absent. More makes small
    /// logits of the teacher count more.
    pub temperature: f64,
    /// Share of the divergence in the loss, 0 to 1; the labels have the rest. 0.5 when absent.
    pub alpha: f64,
}

impl Default for Distillation {
    fn default() -> Distillation {
        Distillation { teacher: String::new(), temperature: 2.0, alpha: 0.5 }
    }
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
    /// The distance from which on the loss is linear, 1e-30 to 1e30; 1.0 when absent.
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
            Loss::Kl => Objective::Kl(Distillation::default()),
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
            Objective::Kl(_) => Loss::Kl,
        }
    }

    /// Where the teacher is.
    pub(crate) fn teacher(&self) -> Option<&str> {
        match self {
            Objective::Kl(settings) => Some(&settings.teacher),
            _ => None,
        }
    }

    /// The objective without the place of its teacher, which does not decide what is computed.
    pub(crate) fn without_place(&self) -> Cow<'_, Objective> {
        match self {
            Objective::Kl(settings) => {
                Cow::Owned(Objective::Kl(Distillation { teacher: String::new(), ..settings.clone() }))
            }
            _ => Cow::Borrowed(self),
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
                    class_weights.iter().find(|weight| **weight != 0.0 && !FACTORS.contains(*weight))
                {
                    return Err(format!("loss.class_weights has {weight}: allowed are 0 and 1e-30 to 1e30"));
                }
                if !class_weights.is_empty() && class_weights.iter().all(|weight| *weight == 0.0) {
                    return Err("loss.class_weights are all 0: give at least one class a weight".to_owned());
                }
            }
            Objective::Huber(Huber { delta }) if !FACTORS.contains(delta) => {
                return Err(format!("loss.delta = {delta:?}: allowed are 1e-30 to 1e30"));
            }
            Objective::Kl(Distillation { teacher, temperature, alpha }) => {
                if teacher.is_empty() {
                    return Err(
                        "loss.teacher is missing: name the folder of a bundle, such as \"models:/models/NAME/VERSION\""
                            .to_owned(),
                    );
                }
                if !(0.01..=1e3).contains(temperature) {
                    return Err(format!("loss.temperature = {temperature}: allowed are 0.01 to 1000"));
                }
                if !(0.0..=1.0).contains(alpha) {
                    return Err(format!("loss.alpha = {alpha}: allowed are 0 to 1"));
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// Weights of classes and Huber's distance: products with losses and slopes stay within f32.
const FACTORS: std::ops::RangeInclusive<f64> = 1e-30..=1e30;

/// The table of an objective with settings.
#[derive(Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
enum Table {
    CrossEntropy(CrossEntropy),
    Mse {},
    Bce {},
    L1 {},
    Huber(Huber),
    Kl(Distillation),
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
            Objective::Kl(settings) => Table::Kl(settings),
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
                    Table::Kl(settings) => Objective::Kl(settings),
                })
            }
        }
        deserializer.deserialize_any(WordOrTable)
    }
}
