//! Selection of rows: the keys `where`, `splits`, `split`, `split_by` and `rows_per_epoch` of a job.
use std::collections::BTreeMap;
use std::fmt;

use millrace_streams::dataset::SourceSpec;
use millrace_streams::feed::{EpochRows, FeedError, Selection};
use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{JobDataset, JobFile, Validation};

/// Parts of a dataset with their fractions as decimal texts, in the order of the job file, which decides the rows of
/// each part.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Splits(Vec<(String, String)>);

impl Splits {
    /// The parts with their fractions.
    pub fn parts(&self) -> &[(String, String)] {
        &self.0
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Puts the parts into the order in which the text of the job file has them: a table that was parsed may be sorted.
    pub(super) fn restore_order(&mut self, text: &str) {
        #[derive(Deserialize)]
        struct Parts {
            splits: BTreeMap<String, toml::Spanned<toml::Value>>,
        }
        // Other forms of the key keep their order.
        if let Ok(Parts { splits }) = toml::from_str(text) {
            self.0.sort_by_key(|(name, _)| splits.get(name).map_or(0, |part| part.span().start));
        }
    }
}

/// Pairs, since other programs sort the keys of a table.
impl Serialize for Splits {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Splits {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Splits, D::Error> {
        struct Parts;
        impl<'de> Visitor<'de> for Parts {
            type Value = Splits;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("parts with their fractions, such as { train = 0.8, test = 0.2 }")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Splits, A::Error> {
                let mut parts = Vec::new();
                while let Some((name, Decimal(fraction))) = map.next_entry()? {
                    parts.push((name, fraction));
                }
                Ok(Splits(parts))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut pairs: A) -> Result<Splits, A::Error> {
                let mut parts = Vec::new();
                while let Some((name, Decimal(fraction))) = pairs.next_element()? {
                    parts.push((name, fraction));
                }
                Ok(Splits(parts))
            }
        }
        deserializer.deserialize_any(Parts)
    }
}

/// The digits of a number, as the file has them: 0.1 is a tenth, not the binary number beside it.
struct Decimal(String);

impl<'de> Deserialize<'de> for Decimal {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Decimal, D::Error> {
        struct Number;
        impl Visitor<'_> for Number {
            type Value = Decimal;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number such as 0.8")
            }

            fn visit_f64<E>(self, number: f64) -> Result<Decimal, E> {
                let text = number.to_string();
                // A fraction that is whole has a point, too: 1.0 is not 1 row.
                Ok(Decimal(if text.contains('.') { text } else { text + ".0" }))
            }

            fn visit_i64<E>(self, number: i64) -> Result<Decimal, E> {
                Ok(Decimal(number.to_string()))
            }

            fn visit_u64<E>(self, number: u64) -> Result<Decimal, E> {
                Ok(Decimal(number.to_string()))
            }

            fn visit_str<E>(self, text: &str) -> Result<Decimal, E> {
                Ok(Decimal(text.to_owned()))
            }
        }
        deserializer.deserialize_any(Number)
    }
}

/// Reads `rows_per_epoch`: a whole number of rows, or a fraction with a point.
pub(super) fn epoch_rows<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<EpochRows>, D::Error> {
    let rows = Option::<Decimal>::deserialize(deserializer)?;
    rows.map(|Decimal(text)| text.parse().map_err(serde::de::Error::custom)).transpose()
}

impl JobFile {
    /// The rows to train on; none for all of the dataset.
    ///
    /// # Errors
    /// [`FeedError`] that names the key that is wrong.
    pub fn selection(&self) -> Result<Option<Selection>, FeedError> {
        let JobFile { filter, splits, split, split_by, .. } = self;
        Selection::new(filter.as_deref(), splits.parts(), split.as_deref(), split_by.names())
    }

    /// The dataset to evaluate on: that of `validation`, or that of the job, which then is no mixture.
    pub fn validation_dataset(&self) -> Option<&SourceSpec> {
        self.validation.as_ref().and_then(|validation| validation.dataset.as_ref().or(self.dataset.one()))
    }

    /// All datasets that it reads.
    fn datasets(&self) -> impl Iterator<Item = &SourceSpec> {
        self.dataset.sources().chain(self.validation_dataset())
    }

    /// Whether it reads the newest snapshot, or a topic whose bounds are not offsets yet.
    pub(crate) fn is_moving(&self) -> bool {
        self.datasets().any(SourceSpec::is_moving)
    }

    /// Whether it reads a topic.
    pub fn reads_topic(&self) -> bool {
        self.datasets().any(|dataset| dataset.topic().is_some())
    }

    /// Whether it reads a topic whose bounds are not offsets yet.
    pub(crate) fn reads_open_topic(&self) -> bool {
        self.datasets().any(|dataset| dataset.topic().is_some_and(|topic| topic.range.is_none()))
    }

    /// This job with the offsets of another one, where that one asks for the same of a topic.
    pub(crate) fn with_offsets_of(&self, other: &JobFile) -> JobFile {
        let take = |own: &mut SourceSpec, other: &SourceSpec| {
            if let (SourceSpec::Topic(own), SourceSpec::Topic(other)) = (own, other)
                && own.range.is_none()
                && own.asks_as(other)
            {
                own.range.clone_from(&other.range);
            }
        };
        let mut job = self.clone();
        // Datasets in another number or with other weights are another run.
        for (own, others) in job.dataset.sources_mut().zip(other.dataset.sources()) {
            take(own, others);
        }
        let own = job.validation.as_mut().and_then(|validation| validation.dataset.as_mut());
        let others = other.validation.as_ref().and_then(|validation| validation.dataset.as_ref());
        if let (Some(own), Some(others)) = (own, others) {
            take(own, others);
        }
        job
    }

    /// The rows to evaluate on; none for all of the validation dataset.
    ///
    /// # Errors
    /// [`FeedError`] that names the key that is wrong.
    pub fn validation_selection(&self) -> Result<Option<Selection>, FeedError> {
        let Some(Validation { dataset, filter, split, .. }) = &self.validation else { return Ok(None) };
        // Another dataset may have other columns, so the condition of the job is for its own one.
        let inherited = self.filter.as_ref().filter(|_| self.trains_on(dataset.as_ref()));
        let filter = filter.as_ref().or(inherited).map(String::as_str);
        match split {
            None => Selection::new(filter, &[], None, &[]),
            split => Selection::new(filter, self.splits.parts(), split.as_deref(), self.split_by.names()),
        }
    }

    /// Whether a dataset of `[validation]` is one that the job trains on, as it is without a name.
    fn trains_on(&self, dataset: Option<&SourceSpec>) -> bool {
        dataset.is_none_or(|dataset| self.dataset.sources().any(|own| own == dataset))
    }

    pub(super) fn check_selection(&self) -> Result<(), String> {
        self.selection().map_err(|error| error.to_string())?;
        let Some(validation) = &self.validation else { return Ok(()) };
        let is_same = self.trains_on(validation.dataset.as_ref());
        match &validation.split {
            _ if validation.dataset.is_none() && matches!(self.dataset, JobDataset::Mixture(_)) => {
                return Err(
                    "[validation] of a mixture needs its dataset: name one, for example a dataset of the mixture with the \
                     split that is not trained on"
                        .to_owned(),
                );
            }
            None if validation.dataset.is_none() => {
                return Err(
                    "[validation] has no rows: name its dataset, or with split a part of splits that is not trained on"
                        .to_owned(),
                );
            }
            None if is_same && self.split.is_some() => {
                return Err(
                    "[validation] reads rows that are trained on: name with validation.split a part of splits that is \
                     not trained on"
                        .to_owned(),
                );
            }
            Some(split) if is_same && self.split.as_ref() == Some(split) => {
                return Err(format!(
                    "validation.split = {split:?} is the part that is trained on: name another part of splits"
                ));
            }
            _ => {}
        }
        self.validation_selection().map(drop).map_err(|error| format!("[validation]: {error}"))
    }
}
