//! The text `DATASET=WEIGHT` of a source of a mixture, in commands and in job files.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::Weight;
use crate::dataset::SourceSpec;
use crate::feed::error::{FeedError, Result};

/// A source of a mixture with its weight.
///
/// ```
/// use millrace_streams::feed::MixedSpec;
/// let source: MixedSpec = "web@v1:/train=0.70".parse()?;
/// assert_eq!(source.dataset.to_string(), "web@v1:/train");
/// assert_eq!(source.to_string(), "web@v1:/train=0.7");
/// # Ok::<(), millrace_streams::feed::FeedError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MixedSpec {
    /// The dataset of a volume, or the topic.
    pub dataset: SourceSpec,
    /// Its share, relative to the weights of the others.
    pub weight: Weight,
}

impl FromStr for MixedSpec {
    type Err = FeedError;

    /// The weight follows the last `=`, since the offsets of a topic have this character, too.
    fn from_str(text: &str) -> Result<Self> {
        let (dataset, weight) = text.rsplit_once('=').ok_or_else(|| {
            FeedError::invalid(format!(
                "source {text:?} of a mixture has no weight; write DATASET=WEIGHT, for example web@v1:/train=0.7"
            ))
        })?;
        Ok(Self { dataset: dataset.parse()?, weight: weight.parse()? })
    }
}

impl fmt::Display for MixedSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.dataset, self.weight)
    }
}

impl TryFrom<String> for MixedSpec {
    type Error = FeedError;
    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<MixedSpec> for String {
    fn from(source: MixedSpec) -> String {
        source.to_string()
    }
}
