//! The plan's identity and its stored form.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest, Sha256};

use crate::dataset::Dataset;
use crate::feed::buckets::{BucketOptions, Buckets};
use crate::feed::error::{FeedError, Result};
use crate::feed::order::Order;
use crate::feed::plan::{ALGORITHM_VERSION, Plan, PlanOptions, sizing};
use crate::feed::select::{RowSet, Selected, Selection};
use crate::feed::tokens::{Packing, TokenOptions, UnitTokens};

/// SHA-256 of a plan's canonical encoding; 64 hexadecimal digits in text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PlanId([u8; 32]);

impl PlanId {
    /// The digest itself.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for PlanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for PlanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PlanId({self})")
    }
}

impl FromStr for PlanId {
    type Err = FeedError;
    fn from_str(text: &str) -> Result<Self> {
        let mut bytes = [0; 32];
        hex::decode_to_slice(text, &mut bytes).map_err(|_| {
            FeedError::invalid(format!("plan id {text:?}: 64 hexadecimal digits are expected"))
        })?;
        Ok(Self(bytes))
    }
}

impl Serialize for PlanId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PlanId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Encoder of what an identity depends on: numbers as 64 bits little endian, texts and bytes with their length.
pub(crate) struct Encoder(Sha256);

impl Encoder {
    /// Begins with the name of the kind of identity.
    pub(crate) fn new(kind: &str) -> Self {
        let mut encoder = Self(Sha256::new());
        encoder.text(kind);
        encoder
    }

    pub(crate) fn number(&mut self, n: u64) {
        self.0.update(n.to_le_bytes());
    }

    pub(crate) fn text(&mut self, text: &str) {
        self.bytes(text.as_bytes());
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.0.update(bytes);
    }

    pub(crate) fn finish(self) -> PlanId {
        PlanId(self.0.finalize().into())
    }
}

/// The rows of a plan, beside its dataset.
#[derive(Clone, Copy)]
pub(super) struct Contents<'a> {
    /// Rows of the units of reading, given when row groups are read in parts.
    pub(super) parts: Option<&'a [u32]>,
    pub(super) selected: Option<&'a Selected>,
    pub(super) packing: Option<&'a Packing>,
    pub(super) buckets: Option<&'a Buckets>,
}

/// Hashes the inputs of the order.
pub(super) fn plan_id(dataset: &Dataset, source: &str, order: &Order, rows: &Contents<'_>) -> PlanId {
    let mut e = Encoder::new("millrace feed plan");
    e.number(u64::from(ALGORITHM_VERSION));
    e.text(source);
    e.text(dataset.path());
    for n in [order.seed, order.lanes, order.window, order.batch] {
        e.number(n);
    }
    add_rows(&mut e, dataset, rows);
    e.finish()
}

/// Hashes the rows of a plan without their order, see [`plan_id`].
pub(super) fn rows_id(dataset: &Dataset, source: &str, rows: &Contents<'_>) -> PlanId {
    let mut e = Encoder::new("millrace feed rows");
    e.text(source);
    e.text(dataset.path());
    add_rows(&mut e, dataset, rows);
    e.finish()
}

/// Hashes the sequence of the rows `rows`: all of the order but the size of a batch, and that if it is given.
pub(super) fn order_id(rows: &PlanId, seed: u64, lanes: u64, window: u64, batch: Option<u64>) -> PlanId {
    let mut e = Encoder::new("millrace feed order");
    e.number(u64::from(ALGORITHM_VERSION));
    e.bytes(rows.as_bytes());
    for n in [seed, lanes, window].into_iter().chain(batch) {
        e.number(n);
    }
    e.finish()
}

fn add_rows(e: &mut Encoder, dataset: &Dataset, rows: &Contents<'_>) {
    let Contents { parts, selected, packing, buckets } = *rows;
    e.number(dataset.files().len() as u64);
    for file in dataset.files() {
        e.text(&file.path);
        e.number(file.bytes);
        e.number(file.format.number());
        e.number(file.row_groups.len() as u64);
        for group in &file.row_groups {
            e.number(group.rows);
        }
    }
    if let Some(parts) = parts {
        e.text("parts of row groups");
        for rows in parts {
            e.number(u64::from(*rows));
        }
    }
    if let Some(Selected { selection, rows }) = selected {
        e.text("selected rows");
        e.text(&selection.to_string());
        for word in rows.words() {
            e.number(*word);
        }
    }
    if let Some(packing) = packing {
        packing.encode(e);
    }
    if let Some(buckets) = buckets {
        buckets.encode(e);
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlanRecord {
    algorithm_version: u32,
    id: PlanId,
    source: String,
    seed: u64,
    lanes: u64,
    window_rows: u64,
    batch_rows: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    part_bytes: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    selected: Option<SelectedRecord>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    packing: Option<PackingRecord>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    buckets: Option<BucketsRecord>,
    dataset: Dataset,
}

/// A selection with its rows, one compressed bit for each row of the dataset.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SelectedRecord {
    selection: Selection,
    rows: String,
}

/// A packing with the tokens of each unit of reading.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PackingRecord {
    options: TokenOptions,
    units: Vec<UnitTokens>,
}

/// Buckets with the compressed bucket of each row.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct BucketsRecord {
    options: BucketOptions,
    rows: String,
}

impl Serialize for Plan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let selected = self.selected.as_ref().map(|selected| {
            let rows = selected.rows.encode().map_err(serde::ser::Error::custom)?;
            Ok(SelectedRecord { selection: selected.selection.clone(), rows })
        });
        let buckets = match self.buckets() {
            None => None,
            Some(buckets) => {
                let rows = Buckets::encode_rows(buckets.of_rows()).map_err(serde::ser::Error::custom)?;
                Some(BucketsRecord { options: buckets.options().clone(), rows })
            }
        };
        PlanRecord {
            algorithm_version: ALGORITHM_VERSION,
            id: self.id,
            source: self.source.clone(),
            seed: self.order.seed,
            lanes: self.order.lanes,
            window_rows: self.order.window,
            batch_rows: self.order.batch,
            part_bytes: (self.part_bytes > 0).then_some(self.part_bytes),
            selected: selected.transpose()?,
            packing: self.packing().map(|packing| PackingRecord {
                options: packing.options().clone(),
                units: packing.units().to_vec(),
            }),
            buckets,
            dataset: self.dataset.clone(),
        }
        .serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Plan {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let record = PlanRecord::deserialize(deserializer)?;
        Plan::try_from(record).map_err(serde::de::Error::custom)
    }
}

impl TryFrom<PlanRecord> for Plan {
    type Error = FeedError;

    fn try_from(r: PlanRecord) -> Result<Self> {
        let unusable = |what: String| FeedError::UnusablePlan { what };
        if r.algorithm_version != ALGORITHM_VERSION {
            return Err(unusable(format!(
                "its order has version {}, this program knows {ALGORITHM_VERSION}",
                r.algorithm_version
            )));
        }
        let lanes = u32::try_from(r.lanes).map_err(|_| unusable("too many lanes".into()))?;
        let batch_rows = usize::try_from(r.batch_rows).map_err(|_| unusable("too large batches".into()))?;
        let options = PlanOptions { lanes, batch_rows, window_rows: r.window_rows, ..PlanOptions::default() };
        options.check().map_err(|e| unusable(e.to_string()))?;
        if !r.batch_rows.is_multiple_of(r.lanes) {
            return Err(unusable("its lanes do not divide its batch".into()));
        }
        let mut groups = r.dataset.files().iter().flat_map(|f| &f.row_groups);
        if groups.any(|g| g.rows > u64::from(u32::MAX)) {
            return Err(unusable("a row group is too large".into()));
        }
        let selected = r.selected.map(|SelectedRecord { selection, rows }| {
            let rows = RowSet::decode(&rows, r.dataset.rows());
            let rows = rows.ok_or_else(|| unusable("its selected rows are damaged".into()))?;
            Selected::new(selection, rows, &r.dataset).map_err(|e| unusable(e.to_string()))
        });
        let selected = selected.transpose()?;
        let part_bytes = r.part_bytes.unwrap_or(0);
        sizing::check_count(&r.dataset, part_bytes).map_err(|e| unusable(e.to_string()))?;
        let mut units = sizing::units(&r.dataset, part_bytes, selected.as_ref());
        let packing = r.packing.map(|PackingRecord { options, units }| Packing::new(options, units));
        let packing = packing.transpose().map_err(|e| unusable(e.to_string()))?;
        let rows = match &packing {
            None => selected.as_ref().map_or(r.dataset.rows(), |selected| selected.rows.len()),
            Some(packing) if packing.units().len() != units.groups.len() => {
                return Err(unusable("it counts the tokens of other row groups".into()));
            }
            Some(packing) => {
                units.pack(packing);
                units.groups.iter().map(|group| u64::from(group.rows)).sum()
            }
        };
        let order = Order { seed: r.seed, rows, lanes: r.lanes, window: r.window_rows, batch: r.batch_rows };
        let plan = Plan::assemble(r.dataset, r.source, order, part_bytes, units, selected, packing);
        let plan = match r.buckets {
            None => plan,
            Some(_) if plan.packing().is_some() => {
                return Err(unusable("it has packed tokens and buckets".into()));
            }
            Some(BucketsRecord { options, rows }) => {
                let of_rows = Buckets::decode_rows(&rows, plan.rows());
                let of_rows = of_rows.ok_or_else(|| unusable("its buckets are damaged".into()))?;
                let buckets = Buckets::new(options, of_rows).map_err(|e| unusable(e.to_string()))?;
                plan.with_buckets(Arc::new(buckets))
            }
        };
        if plan.id != r.id {
            return Err(unusable(format!("it records id {} but hashes to {}", r.id, plan.id)));
        }
        Ok(plan)
    }
}
