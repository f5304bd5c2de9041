//! The key `dataset` of a job: one dataset, or a mixture of several by weight.
use std::fmt;
use std::str::FromStr;

use millrace_datafs::Name;
use millrace_streams::dataset::{DatasetSpec, SourceSpec};
use millrace_streams::feed::{FeedError, MixedSpec, Until};
use serde::de::{self, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

/// Most datasets of a mixture.
const SOURCES_MAX: usize = 64;

/// The rows that a job trains on. One dataset is a text, and a mixture is a list of texts `DATASET=WEIGHT`, whose order is
/// part of the order of the rows.
///
/// ```
/// use millrace_trainer::job::JobDataset;
/// let one: JobDataset = serde_json::from_str("\"web@v1:/train\"")?;
/// assert_eq!(one.to_string(), "web@v1:/train");
/// let mixture: JobDataset = serde_json::from_str("[\"web@v1:/train=0.7\", \"books@v2:/train=0.3\"]")?;
/// assert_eq!(mixture.sources().count(), 2);
/// # Ok::<(), serde_json::Error>(())
/// ```
// One dataset is a text, as before there were mixtures: digests of jobs contain it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum JobDataset {
    /// A dataset of a volume, or a topic.
    One(SourceSpec),
    /// Several in one order, in proportion to their weights.
    Mixture(Vec<MixedSpec>),
}

impl JobDataset {
    /// The datasets, in their order.
    pub fn sources(&self) -> impl Iterator<Item = &SourceSpec> {
        let (one, mixed) = match self {
            JobDataset::One(dataset) => (Some(dataset), None),
            JobDataset::Mixture(mixed) => (None, Some(mixed)),
        };
        one.into_iter().chain(mixed.into_iter().flatten().map(|source| &source.dataset))
    }

    /// The datasets, to be replaced by others, such as the newest snapshot by the one that it is now.
    pub fn sources_mut(&mut self) -> impl Iterator<Item = &mut SourceSpec> {
        let (one, mixed) = match self {
            JobDataset::One(dataset) => (Some(dataset), None),
            JobDataset::Mixture(mixed) => (None, Some(mixed)),
        };
        one.into_iter().chain(mixed.into_iter().flatten().map(|source| &mut source.dataset))
    }

    /// The dataset; none for a mixture.
    pub fn one(&self) -> Option<&SourceSpec> {
        match self {
            JobDataset::One(dataset) => Some(dataset),
            JobDataset::Mixture(_) => None,
        }
    }

    /// The datasets with their weights; none for one dataset.
    pub fn mixture(&self) -> Option<&[MixedSpec]> {
        match self {
            JobDataset::One(_) => None,
            JobDataset::Mixture(mixed) => Some(mixed),
        }
    }

    /// The volume of the first dataset that has one; none for topics.
    pub fn volume(&self) -> Option<&Name> {
        self.sources().find_map(SourceSpec::volume)
    }

    /// Checks the number of datasets, and that `until` has a meaning.
    pub(super) fn check(&self, until: Until) -> Result<(), String> {
        match self {
            JobDataset::One(_) if until != Until::default() => Err(format!(
                "until = \"every\" is for a mixture, but dataset = \"{self}\" is one dataset: leave until out"
            )),
            JobDataset::Mixture(mixed) if !(1..=SOURCES_MAX).contains(&mixed.len()) => Err(format!(
                "dataset is a mixture of {} datasets: allowed are 1 to {SOURCES_MAX}, such as [\"web@v1:/train=0.7\", \
                 \"books@v1:/train=0.3\"]",
                mixed.len()
            )),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for JobDataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            JobDataset::One(dataset) => dataset.fmt(f),
            JobDataset::Mixture(mixed) => {
                let mixed: Vec<String> = mixed.iter().map(ToString::to_string).collect();
                f.write_str(&mixed.join(", "))
            }
        }
    }
}

/// One dataset.
impl FromStr for JobDataset {
    type Err = FeedError;

    fn from_str(text: &str) -> Result<JobDataset, FeedError> {
        text.parse().map(JobDataset::One)
    }
}

impl From<SourceSpec> for JobDataset {
    fn from(dataset: SourceSpec) -> JobDataset {
        JobDataset::One(dataset)
    }
}

impl From<DatasetSpec> for JobDataset {
    fn from(dataset: DatasetSpec) -> JobDataset {
        JobDataset::One(dataset.into())
    }
}

impl<'de> Deserialize<'de> for JobDataset {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<JobDataset, D::Error> {
        struct OneOrMixture;
        impl<'de> Visitor<'de> for OneOrMixture {
            type Value = JobDataset;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(
                    "a dataset such as \"web@v1:/train\", or a mixture such as [\"web@v1:/train=0.7\", \
                     \"books@v1:/train=0.3\"]",
                )
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<JobDataset, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut texts: A) -> Result<JobDataset, A::Error> {
                let mut mixed = Vec::new();
                while let Some(source) = texts.next_element()? {
                    mixed.push(source);
                }
                Ok(JobDataset::Mixture(mixed))
            }
        }
        deserializer.deserialize_any(OneOrMixture)
    }
}
