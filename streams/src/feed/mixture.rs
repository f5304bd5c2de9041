//! Mixtures: several datasets in one order, each with a fixed share of the rows.
//!
//! Every source keeps its own order ([`Plan`]): an endless sequence of passes over its rows. The mixture is an endless
//! sequence of places, too, and gives each place to a source. Of the first `n` places, source `i` has `n·wᵢ/W` with
//! weight `wᵢ` of `W` together, give or take fewer rows than there are sources, and it never drifts. Its places are the
//! next ones of its own order. So no row is padded, dropped or drawn by chance: each source delivers each of its rows
//! once before any of them comes again.
//!
//! An epoch is a number of places. It ends with the source that first has delivered all of its rows ([`Until::First`]), or
//! with the one that does so last ([`Until::Every`]). The next epoch goes on where it ended: a source that was half read
//! continues with its other half.
//!
//! The number of the next place is the whole state, for any number of sources, readers and rows of a batch.

mod feed;
mod memory;
mod places;
mod spec;
#[cfg(test)]
mod tests;
mod turns;

pub use feed::MixtureFeed;
pub use spec::MixedSpec;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::dataset::OpenDataset;
use crate::feed::error::{FeedError, Result};
use crate::feed::order::PLACES_MAX;
use crate::feed::permutation::derive_key;
use crate::feed::plan::Encoder;
use crate::feed::{BATCH_ROWS_MAX, Plan, PlanId, PlanOptions, decimal};
use turns::Turns;

/// Version of the rules by which sources take turns. Part of the identity.
const VERSION: u64 = 1;
/// Most sources.
pub(crate) const SOURCES_MAX: usize = 64;
/// Digits of a weight after the point.
const DIGITS: usize = 9;
/// Largest weight: with its digits it stays below 2^60.
const WEIGHT_MAX: u128 = 1_000_000_000;
/// Purpose of the seed of a source; the second word of a derived key.
const KEY_SOURCE: u64 = 3;

/// The share of a source: an exact decimal number above 0, relative to the weights of the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Weight(u64);

impl FromStr for Weight {
    type Err = FeedError;

    fn from_str(text: &str) -> Result<Self> {
        let most = WEIGHT_MAX * 10_u128.pow(DIGITS as u32);
        let units = decimal::parse(text, DIGITS).filter(|units| (1..=most).contains(units));
        let weight = units.and_then(|units| u64::try_from(units).ok()).map(Self);
        weight.ok_or_else(|| {
            FeedError::invalid(format!(
                "weight {text:?} is not a decimal number above 0 and at most {WEIGHT_MAX}, with at most {DIGITS} digits \
                 after the point; write for example 0.7"
            ))
        })
    }
}

impl fmt::Display for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&decimal::show(u128::from(self.0), DIGITS))
    }
}

impl TryFrom<String> for Weight {
    type Error = FeedError;
    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<Weight> for String {
    fn from(weight: Weight) -> String {
        weight.to_string()
    }
}

/// The end of an epoch of a mixture.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Until {
    /// The first source has delivered all of its rows.
    #[default]
    First,
    /// Every source has delivered all of its rows; smaller ones come several times meanwhile.
    Every,
}

impl FromStr for Until {
    type Err = FeedError;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "first" => Ok(Self::First),
            "every" => Ok(Self::Every),
            other => Err(FeedError::invalid(format!(
                "until is {other:?}; it must be \"first\", the end of the first source that runs out, or \"every\", the \
                 end of the last one"
            ))),
        }
    }
}

/// A source of a mixture.
#[derive(Debug, Clone)]
pub struct MixtureSource {
    /// Name for errors and people, for example `web@v1:/train`.
    pub name: String,
    /// Its rows and their order. The batch of this plan has no meaning in the mixture.
    pub plan: Arc<Plan>,
    /// Its share.
    pub weight: Weight,
}

/// Several datasets in one order. Immutable.
#[derive(Debug, Clone)]
pub struct Mixture {
    id: PlanId,
    order_id: PlanId,
    sources: Vec<MixtureSource>,
    turns: Turns,
    batch_rows: usize,
    rows: u64,
}

impl Mixture {
    /// The mixture of some sources, in batches of `batch_rows` rows. Pure.
    ///
    /// # Errors
    /// [`FeedError::Invalid`] for fewer than one or more than 64 sources, a batch out of bounds, and weights so unequal
    /// that an epoch has more than 2^61 rows.
    pub fn new(sources: Vec<MixtureSource>, batch_rows: usize, until: Until) -> Result<Self> {
        if !(1..=SOURCES_MAX).contains(&sources.len()) {
            let count = sources.len();
            return Err(FeedError::invalid(format!(
                "a mixture of {count} sources; it must have 1 to {SOURCES_MAX}"
            )));
        }
        if !(1..=BATCH_ROWS_MAX).contains(&batch_rows) {
            return Err(FeedError::invalid(format!(
                "batch_rows is {batch_rows}; it must be 1 to {BATCH_ROWS_MAX}"
            )));
        }
        let weights: Vec<u64> = sources.iter().map(|source| source.weight.0).collect();
        let turns = Turns::new(&weights);
        let sizes: Vec<u64> = sources.iter().map(|source| source.plan.rows()).collect();
        let is_over = |places: u64| {
            let taken = turns.counts(places);
            let mut done = taken.iter().zip(&sizes).map(|(taken, rows)| taken >= rows);
            match until {
                Until::First => done.any(|is_done| is_done),
                Until::Every => done.all(|is_done| is_done),
            }
        };
        if !is_over(PLACES_MAX) {
            return Err(FeedError::invalid(format!(
                "mixture: an epoch until {} source is read would have more than {PLACES_MAX} rows; raise the smallest \
                 weight",
                match until {
                    Until::First => "the first",
                    Until::Every => "every",
                }
            )));
        }
        // Counts never fall, so the first place at which the epoch is over is found by bisection.
        let (mut before, mut rows) = (0, PLACES_MAX);
        while rows - before > 1 {
            let middle = before + (rows - before) / 2;
            if is_over(middle) { rows = middle } else { before = middle }
        }
        let identity = |kind: &str, batch: Option<u64>| {
            let mut e = Encoder::new(kind);
            e.number(VERSION);
            batch.into_iter().for_each(|rows| e.number(rows));
            e.number(sources.len() as u64);
            for (source, weight) in sources.iter().zip(turns.weights()) {
                e.bytes(source.plan.order_id().as_bytes());
                e.number(weight);
            }
            e.finish()
        };
        Ok(Self {
            id: identity("millrace feed mixture", Some(batch_rows as u64)),
            order_id: identity("millrace feed mixture order", None),
            turns,
            batch_rows,
            rows,
            sources,
        })
    }

    /// Plans datasets as the sources of a mixture. `options` hold for all of them: the seed, the selection and the shape
    /// of the shuffle; they share `working_set_bytes_max` in equal parts.
    ///
    /// # Errors
    /// Those of [`OpenDataset::plan`] and [`Mixture::new`].
    pub async fn plan(
        datasets: &[(OpenDataset, Weight)],
        options: &PlanOptions,
        until: Until,
    ) -> Result<Self> {
        let mut sources = Vec::with_capacity(datasets.len());
        for (at, (dataset, weight)) in datasets.iter().enumerate() {
            let options = PlanOptions {
                // Datasets of one size must not be shuffled alike.
                seed: derive_key(&[options.seed, KEY_SOURCE, at as u64]),
                // Lanes divide the batch of a plan; a source has no batches of its own.
                batch_rows: options.lanes as usize,
                // In equal parts, whatever the weights: the bound is part of the order.
                working_set_bytes_max: options.working_set_bytes_max / datasets.len() as u64,
                ..options.clone()
            };
            let plan = Arc::new(dataset.plan(&options).await?);
            sources.push(MixtureSource { name: dataset.spec().to_string(), plan, weight: *weight });
        }
        Self::new(sources, options.batch_rows, until)
    }

    /// The hash of everything that decides the batches.
    pub fn id(&self) -> PlanId {
        self.id
    }

    /// The hash of the sequence of rows: all but the size of a batch.
    pub fn order_id(&self) -> PlanId {
        self.order_id
    }

    /// The sources, in their order.
    pub fn sources(&self) -> &[MixtureSource] {
        &self.sources
    }

    /// Rows of an epoch, at least 1.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Rows of a global batch.
    pub fn batch_rows(&self) -> usize {
        self.batch_rows
    }

    /// Rows of each source at the first `places` places, which are its places in its own order.
    pub fn counts(&self, places: u64) -> Vec<u64> {
        self.turns.counts(places.min(PLACES_MAX))
    }

    pub(crate) fn turns(&self) -> &Turns {
        &self.turns
    }
}

/// The sources with their weights.
impl fmt::Display for Mixture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, source) in self.sources.iter().enumerate() {
            write!(f, "{}{}={}", if at > 0 { ", " } else { "" }, source.name, source.weight)?;
        }
        Ok(())
    }
}
