//! Requests of Flight clients: the parameters of a feed as JSON, in a descriptor or in a ticket.

use std::collections::BTreeMap;
use std::fmt;

use arrow_flight::FlightDescriptor;
use arrow_flight::flight_descriptor::DescriptorType;
use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::dataset::DatasetSpec;
use crate::feed::error::{FeedError, Result};
use crate::feed::mixture::SOURCES_MAX;
use crate::feed::{
    EpochRows, FeedOptions, ImageOptions, PlanId, PlanOptions, Selection, Shard, Until, Weight,
};

/// Most bytes of a request.
pub(super) const REQUEST_BYTES_MAX: usize = 256 << 10;

/// The parameters of a feed, with the names and defaults of `millrace.Feed`.
///
/// As a descriptor it leaves out what has a default. As a ticket it has a snapshot's name, a rank and a plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Request {
    /// The dataset at a snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) dataset: Option<DatasetSpec>,
    /// In place of `dataset`, the weight of each dataset, in order.
    #[serde(default, skip_serializing_if = "Pairs::is_empty")]
    mixture: Pairs,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    until: Option<Until>,
    #[serde(default = "default_batch_rows")]
    pub(super) batch_rows: usize,
    /// Epochs of one stream; null reads without end.
    #[serde(default = "one_epoch")]
    pub(super) epochs: Option<u64>,
    #[serde(default, deserialize_with = "epoch_rows", skip_serializing_if = "Option::is_none")]
    pub(super) rows_per_epoch: Option<EpochRows>,
    #[serde(default)]
    seed: u64,
    /// The reader; a descriptor without one is answered with an endpoint for each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) rank: Option<u32>,
    #[serde(default = "one_reader")]
    pub(super) world: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    columns: Option<Vec<String>>,
    #[serde(default, rename = "where", skip_serializing_if = "Option::is_none")]
    filter: Option<String>,
    #[serde(default, skip_serializing_if = "Pairs::is_empty")]
    splits: Pairs,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    split: Option<String>,
    #[serde(default, deserialize_with = "one_or_more", skip_serializing_if = "Vec::is_empty")]
    split_by: Vec<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    images: BTreeMap<String, ImageOptions>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    keys: Option<String>,
    /// The position to go on from; the beginning by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) state: Option<State>,
    /// The plan of a ticket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) plan: Option<PlanId>,
}

/// Datasets with their weights.
pub(super) type Sources = Vec<(DatasetSpec, Weight)>;

/// A position of a feed, as `Feed.state_dict()` has it: at most 128 bytes of JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct State {
    /// The order in which rows are counted.
    pub(super) order: PlanId,
    /// Rows that all readers have taken together.
    pub(super) rows: u64,
    /// Whether these rows are the last ones of a stream.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) over: bool,
}

fn default_batch_rows() -> usize {
    128
}

fn one_epoch() -> Option<u64> {
    Some(1)
}

fn one_reader() -> u32 {
    1
}

impl Request {
    /// The request of a descriptor: JSON as a command, or a path of which the first part names the snapshot.
    ///
    /// # Errors
    /// [`FeedError::Invalid`] and [`FeedError::InvalidSpec`].
    pub(super) fn of_descriptor(descriptor: &FlightDescriptor) -> Result<Request> {
        match descriptor.r#type() {
            DescriptorType::Cmd => {
                let request = Request::parse(&descriptor.cmd, "the command of the descriptor")?;
                match request.plan {
                    Some(_) => Err(FeedError::invalid("a descriptor has no plan; send a ticket to DoGet")),
                    None => Ok(request),
                }
            }
            DescriptorType::Path => {
                let path = descriptor.path.join("/");
                // ["digits@v1", "train"] as well as ["digits@v1:/train"].
                let text = match path.split_once('/') {
                    Some((volume, rest)) if !volume.contains(':') => format!("{volume}:/{rest}"),
                    _ => path,
                };
                let dataset: DatasetSpec = text.parse()?;
                Request::parse(serde_json::json!({ "dataset": dataset }).to_string().as_bytes(), "the path")
            }
            DescriptorType::Unknown => Err(FeedError::invalid(
                "the descriptor has neither a command nor a path; send a command with JSON, for example \
                 {\"dataset\": \"digits@v1:/train\"}",
            )),
        }
    }

    /// The request of a ticket.
    ///
    /// # Errors
    /// [`FeedError::Invalid`] for bytes that are no ticket of this service.
    pub(super) fn of_ticket(ticket: &[u8]) -> Result<Request> {
        let request = Request::parse(ticket, "the ticket")?;
        if request.plan.is_none() || request.rank.is_none() {
            return Err(FeedError::invalid(
                "the ticket has no plan or no rank; take a ticket from GetFlightInfo, and change its state alone",
            ));
        }
        Ok(request)
    }

    fn parse(bytes: &[u8], what: &str) -> Result<Request> {
        if bytes.len() > REQUEST_BYTES_MAX {
            let bytes = bytes.len();
            return Err(FeedError::invalid(format!(
                "{what} has {bytes} bytes, more than {REQUEST_BYTES_MAX}; name fewer columns"
            )));
        }
        let request: Request = serde_json::from_slice(bytes).map_err(|error| {
            FeedError::invalid(format!(
                "{what} is not the JSON of a feed: {error}; write for example {{\"dataset\": \"digits@v1:/train\"}}"
            ))
        })?;
        request.check()?;
        Ok(request)
    }

    fn check(&self) -> Result<()> {
        match (&self.dataset, self.mixture.0.is_empty()) {
            (None, true) => {
                Err(FeedError::invalid("the request names no dataset; write VOLUME@SNAPSHOT:/PATH"))
            }
            (Some(_), false) => Err(FeedError::invalid("dataset and mixture exclude each other")),
            _ => Ok(()),
        }?;
        // Each of them is opened and planned before the mixture is made.
        if self.mixture.0.len() > SOURCES_MAX {
            let count = self.mixture.0.len();
            return Err(FeedError::invalid(format!(
                "a mixture of {count} sources; it must have 1 to {SOURCES_MAX}"
            )));
        }
        if self.until.is_some() && self.mixture.0.is_empty() {
            return Err(FeedError::invalid("until needs mixture, the weight of each dataset"));
        }
        if self.epochs == Some(0) {
            return Err(FeedError::invalid(
                "epochs is 0; it must be at least 1, or null to read without end",
            ));
        }
        Shard::new(self.rank.unwrap_or(0), self.world).map(drop)
    }

    /// The datasets with their weights, and the end of an epoch if they are a mixture.
    pub(super) fn sources(&self) -> Result<(Sources, Option<Until>)> {
        if let Some(dataset) = &self.dataset {
            return Ok((vec![(dataset.clone(), "1".parse()?)], None));
        }
        let parse = |(dataset, weight): &(String, String)| Ok((dataset.parse()?, weight.parse()?));
        let sources = self.mixture.0.iter().map(parse).collect::<Result<_>>()?;
        Ok((sources, Some(self.until.unwrap_or_default())))
    }

    /// The same request with other names of its datasets: those of snapshots in the place of `@latest`.
    pub(super) fn with_sources(&self, sources: &[(DatasetSpec, Weight)]) -> Request {
        let mut request = self.clone();
        match (&mut request.dataset, sources) {
            (Some(dataset), [(resolved, _)]) => *dataset = resolved.clone(),
            _ => {
                let pairs = sources.iter().map(|(dataset, weight)| (dataset.to_string(), weight.to_string()));
                request.mixture = Pairs(pairs.collect());
            }
        }
        request
    }

    /// The same request from the beginning.
    pub(super) fn without_state(&self) -> Request {
        Request { state: None, ..self.clone() }
    }

    /// The ticket of a rank.
    pub(super) fn ticket(&self, rank: u32, plan: PlanId) -> Result<Vec<u8>> {
        let ticket = Request { rank: Some(rank), plan: Some(plan), ..self.clone() };
        serde_json::to_vec(&ticket).map_err(|error| FeedError::invalid(format!("the ticket: {error}")))
    }

    /// The options of the plan.
    pub(super) fn plan_options(&self) -> Result<PlanOptions> {
        let selection =
            Selection::new(self.filter.as_deref(), &self.splits.0, self.split.as_deref(), &self.split_by)?;
        Ok(PlanOptions { seed: self.seed, batch_rows: self.batch_rows, selection, ..PlanOptions::default() })
    }

    /// The options of the reader, with a bound for its cache.
    pub(super) fn feed_options(&self, cache_bytes_max: u64) -> FeedOptions {
        FeedOptions {
            columns: self.columns.clone(),
            images: self.images.clone(),
            key_column: self.keys.clone(),
            cache_bytes_max,
            ..FeedOptions::default()
        }
    }

    /// Whether images are decoded.
    pub(super) fn has_images(&self) -> bool {
        !self.images.is_empty()
    }

    /// What requests have in common that can share a feed: all but the reader, its epochs and its position.
    /// `identities` are those of the snapshots.
    pub(super) fn feed_key(&self, identities: &[String]) -> Result<String> {
        let state = self.state.map(|state| State { rows: 0, over: false, ..state });
        let common = Request {
            rank: None,
            world: 1,
            epochs: None,
            rows_per_epoch: None,
            state,
            plan: None,
            ..self.clone()
        };
        let key = serde_json::to_string(&(common, identities));
        key.map_err(|error| FeedError::invalid(format!("the request: {error}")))
    }
}

/// Names with decimal numbers, in the order in which the client wrote them: a JSON object, or an array of pairs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Pairs(Vec<(String, String)>);

impl Pairs {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Serialize for Pairs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // Not an object: clients that change a ticket may sort its keys, or drop one that comes twice.
        serializer.collect_seq(&self.0)
    }
}

/// A number, as the client wrote it.
#[derive(Deserialize)]
#[serde(untagged)]
enum Decimal {
    Number(serde_json::Number),
    Text(String),
}

impl From<Decimal> for String {
    fn from(decimal: Decimal) -> String {
        match decimal {
            Decimal::Number(number) => number.to_string(),
            Decimal::Text(text) => text,
        }
    }
}

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PairsVisitor;

        impl<'de> Visitor<'de> for PairsVisitor {
            type Value = Pairs;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of names with numbers")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs, A::Error> {
                let mut pairs = Vec::new();
                while let Some((name, number)) = map.next_entry::<String, Decimal>()? {
                    pairs.push((name, number.into()));
                }
                Ok(Pairs(pairs))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Pairs, A::Error> {
                let mut pairs = Vec::new();
                while let Some((name, number)) = seq.next_element::<(String, Decimal)>()? {
                    pairs.push((name, number.into()));
                }
                Ok(Pairs(pairs))
            }
        }

        deserializer.deserialize_any(PairsVisitor)
    }
}

fn epoch_rows<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<EpochRows>, D::Error> {
    let given = Option::<Decimal>::deserialize(deserializer)?;
    given.map(|given| String::from(given).parse().map_err(serde::de::Error::custom)).transpose()
}

fn one_or_more<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Columns {
        None(()),
        One(String),
        More(Vec<String>),
    }
    Ok(match Columns::deserialize(deserializer)? {
        Columns::None(()) => Vec::new(),
        Columns::One(column) => vec![column],
        Columns::More(columns) => columns,
    })
}
