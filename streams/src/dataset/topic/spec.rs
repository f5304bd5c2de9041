//! Specification of a topic as a dataset, parsed and printed as `topic:NAME[@[SINCE..]UNTIL][?OPTIONS]`.

use std::fmt;
use std::str::FromStr;

use super::bound::{Since, Until};
use super::range::TopicRange;
use crate::feed::FeedError;

/// What a topic's specification begins with.
pub(crate) const PREFIX: &str = "topic:";
/// Longest name of a topic, as Kafka has it.
const NAME_BYTES_MAX: usize = 249;

/// What becomes of records that are no row: no JSON object, or no value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum BadRecords {
    /// The first one is an error, which names its offset.
    #[default]
    Refuse,
    /// They are left out and counted.
    Skip,
}

/// A bounded range of a topic.
///
/// ```
/// use millrace_streams::dataset::TopicSpec;
/// let spec: TopicSpec = "topic:clicks@2026-11-01..2026-11-28T06:00:00Z".parse()?;
/// assert_eq!(spec.to_string(), "topic:clicks@2026-11-01T00:00:00Z..2026-11-28T06:00:00Z");
/// let spec: TopicSpec = "topic:clicks".parse()?;
/// assert_eq!(spec.to_string(), "topic:clicks@latest");
/// # Ok::<(), millrace_streams::feed::FeedError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TopicSpec {
    /// Name of the topic.
    pub topic: String,
    /// Where the range begins.
    pub since: Since,
    /// Where the range ends.
    pub until: Until,
    /// What becomes of records that are no row.
    pub bad: BadRecords,
    /// The offsets to which the bounds were resolved; none until the topic is opened.
    pub range: Option<TopicRange>,
}

impl TopicSpec {
    /// Whether two specifications ask for the same: all but the offsets are equal.
    pub fn asks_as(&self, other: &TopicSpec) -> bool {
        let of = |spec: &TopicSpec| (spec.topic.clone(), spec.since, spec.until, spec.bad);
        of(self) == of(other)
    }
}

impl FromStr for TopicSpec {
    type Err = FeedError;

    fn from_str(text: &str) -> Result<Self, FeedError> {
        parse(text)
            .map_err(|reason| FeedError::InvalidTopicSpec { text: text.chars().take(200).collect(), reason })
    }
}

fn parse(text: &str) -> Result<TopicSpec, String> {
    let rest = text.strip_prefix(PREFIX).ok_or("it does not begin with topic:")?;
    let (rest, options) = rest.split_once('?').map_or((rest, None), |(rest, options)| (rest, Some(options)));
    let (name, bounds) = rest.split_once('@').unwrap_or((rest, "latest"));
    let is_name_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if name.is_empty()
        || matches!(name, "." | "..")
        || name.len() > NAME_BYTES_MAX
        || !name.bytes().all(is_name_byte)
    {
        return Err(format!(
            "{name:?} is no name of a topic: letters, digits, '.', '_' and '-', at most {NAME_BYTES_MAX}"
        ));
    }
    let (since, until): (Since, Until) = match bounds.split_once("..") {
        Some((since, until)) => (since.parse()?, until.parse()?),
        None => (Since::Earliest, bounds.parse()?),
    };
    let mut spec = TopicSpec { topic: name.to_owned(), since, until, bad: BadRecords::Refuse, range: None };
    for option in options.into_iter().flat_map(|options| options.split('&')) {
        match option.split_once('=') {
            Some(("bad", "skip")) => spec.bad = BadRecords::Skip,
            Some(("bad", "refuse")) => spec.bad = BadRecords::Refuse,
            Some(("offsets", offsets)) => spec.range = Some(offsets.parse()?),
            _ => {
                return Err(format!(
                    "option {option:?} is unknown; the options are bad=skip, bad=refuse and offsets=…"
                ));
            }
        }
    }
    Ok(spec)
}

impl fmt::Display for TopicSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}@", self.topic)?;
        if self.since != Since::Earliest {
            write!(f, "{}..", self.since)?;
        }
        self.until.fmt(f)?;
        let bad = (self.bad == BadRecords::Skip).then(|| "bad=skip".to_owned());
        let offsets = self.range.as_ref().map(|range| format!("offsets={range}"));
        let options: Vec<String> = bad.into_iter().chain(offsets).collect();
        if !options.is_empty() {
            write!(f, "?{}", options.join("&"))?;
        }
        Ok(())
    }
}
