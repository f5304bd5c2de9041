//! The order of the rows that a job trains on: that of a dataset, or that of a mixture.
use std::ops::Range;
use std::sync::Arc;

use millrace_streams::feed::{
    AnyFeed, EpochRows, Epochs, FeedBatch, MixedSpec, Mixture, MixtureSource, Plan, PlanId, Selection,
};

use crate::error::{Error, Result};
use crate::job::JobFile;
use crate::ledger::RowsDigest;

/// Bits of a row's number in its dataset; the number of the dataset in a mixture, below 64, stands above.
const ROW_BITS: u32 = 58;

/// The order of the rows. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) enum Order {
    Dataset(Arc<Plan>),
    Mixture(Arc<Mixture>),
}

impl From<Arc<Plan>> for Order {
    fn from(plan: Arc<Plan>) -> Order {
        Order::Dataset(plan)
    }
}

impl Order {
    /// The order of a feed's rows.
    pub(crate) fn of(feed: &AnyFeed) -> Order {
        match feed {
            AnyFeed::Dataset(feed) => Order::Dataset(Arc::clone(feed.plan())),
            AnyFeed::Mixture(feed) => Order::Mixture(Arc::clone(feed.mixture())),
        }
    }

    /// The order of a job's rows by the plans of its datasets, as [`Order::plans`] gives them.
    pub(crate) fn of_plans(job: &JobFile, first: Plan, others: Vec<Plan>) -> Result<Order> {
        let Some(mixed) = job.dataset.mixture() else { return Ok(Order::Dataset(Arc::new(first))) };
        let plans = std::iter::once(first).chain(others);
        let source = |(plan, source): (Plan, &MixedSpec)| MixtureSource {
            name: source.dataset.to_string(),
            plan: Arc::new(plan),
            weight: source.weight,
        };
        let mixture = Mixture::new(plans.zip(mixed).map(source).collect(), job.step_rows(), job.until);
        let failed = |e| Error::feed(format!("job {}: mixture {}", job.name, job.dataset), e);
        mixture.map(|mixture| Order::Mixture(Arc::new(mixture))).map_err(failed)
    }

    /// The plan of each dataset.
    pub(crate) fn plans(&self) -> impl Iterator<Item = &Arc<Plan>> {
        let (one, mixed) = match self {
            Order::Dataset(plan) => (Some(plan), None),
            Order::Mixture(mixture) => (None, Some(mixture.sources())),
        };
        one.into_iter().chain(mixed.into_iter().flatten().map(|source| &source.plan))
    }

    /// The hash of everything that decides the batches.
    pub(crate) fn id(&self) -> PlanId {
        match self {
            Order::Dataset(plan) => plan.id(),
            Order::Mixture(mixture) => mixture.id(),
        }
    }

    /// Rows of an epoch whose length the job does not set.
    pub(crate) fn rows(&self) -> u64 {
        match self {
            Order::Dataset(plan) => plan.rows(),
            Order::Mixture(mixture) => mixture.rows(),
        }
    }

    /// Rows of a global batch.
    pub(crate) fn batch_rows(&self) -> usize {
        match self {
            Order::Dataset(plan) => plan.batch_rows(),
            Order::Mixture(mixture) => mixture.batch_rows(),
        }
    }

    /// The selection of rows, which is the same for all datasets of a mixture.
    pub(crate) fn selection(&self) -> Option<&Selection> {
        self.plans().find_map(|plan| plan.selection())
    }

    /// The decoded row groups that a reader of whole batches needs at a time, in bytes, of all datasets together.
    pub(crate) fn working_set_bytes(&self) -> u64 {
        match self {
            Order::Dataset(plan) => plan.working_set_bytes(),
            Order::Mixture(mixture) => mixture.working_set_bytes(),
        }
    }

    /// The first place of a global batch: its rows are at `[step·B, (step+1)·B)`. Saturates.
    pub(crate) fn place_of_step(&self, step: u64) -> u64 {
        step.saturating_mul(self.batch_rows() as u64)
    }

    /// The places of the slots of a global batch.
    pub(crate) fn places_of_step(&self, step: u64) -> StepPlaces {
        match self {
            Order::Dataset(plan) => StepPlaces::Dataset { plan: Arc::clone(plan), step },
            Order::Mixture(mixture) => StepPlaces::Mixture(mixture.places_of_batch(step)),
        }
    }

    /// The places of the job's epochs. Those of a mixture may have any number of rows.
    pub(crate) fn epochs(&self, job: &JobFile) -> Result<Epochs> {
        let epochs = match (self, job.rows_per_epoch) {
            (Order::Mixture(_), Some(EpochRows::Rows(rows))) => Epochs::new(rows, None),
            (_, length) => Epochs::new(self.rows(), length),
        };
        epochs.map_err(|error| Error::Job { job: job.name.to_string(), reason: error.to_string() })
    }

    /// What identifies row `at` of a batch in the ledger: its number in its dataset, and the number of that dataset.
    pub(crate) fn row_id(batch: &FeedBatch, at: usize) -> u64 {
        let source = batch.sources.get(at).copied().unwrap_or_default();
        row_id(source, batch.rows.get(at).copied().unwrap_or_default())
    }

    /// The digest of the rows at some places.
    pub(crate) fn digest_of(&self, places: Range<u64>) -> RowsDigest {
        let mut digest = RowsDigest::default();
        match self {
            Order::Dataset(plan) => plan.visit_rows(places, |row| digest.add(row)),
            Order::Mixture(mixture) => {
                mixture.visit_rows(places, |source, row| digest.add(row_id(source, row)));
            }
        }
        digest
    }

    /// The digest of the rows of every epoch, if each of these is a whole pass over a dataset.
    pub(crate) fn digest_of_pass(&self, job: &JobFile) -> Option<RowsDigest> {
        match self {
            Order::Dataset(plan) if job.rows_per_epoch.is_none() => {
                let mut digest = RowsDigest::default();
                plan.visit_all_rows(|row| digest.add(row));
                Some(digest)
            }
            _ => None,
        }
    }

    /// The place of row `at` of a batch in the files of its dataset, for errors.
    pub(crate) fn row_name(&self, batch: &FeedBatch, at: usize) -> String {
        let row = batch.rows.get(at).copied().unwrap_or_default();
        let source = batch.sources.get(at).map_or(0, |source| *source as usize);
        let address = self.plans().nth(source).and_then(|plan| plan.address_of(row));
        let mut name = match address {
            Some(address) => {
                format!("row {} of row group {} of {}", address.row, address.row_group, address.file)
            }
            None => format!("row {row}"),
        };
        if let Order::Mixture(mixture) = self
            && let Some(source) = mixture.sources().get(source)
        {
            name += &format!(" of {}", source.name);
        }
        name
    }
}

/// The places of the slots of a global batch. Those of a mixture are found for all slots at once: make this once for a
/// step, whatever the number of reads of its rows.
#[derive(Debug)]
pub(crate) enum StepPlaces {
    /// Found slot by slot.
    Dataset {
        plan: Arc<Plan>,
        step: u64,
    },
    Mixture(Vec<u64>),
}

impl StepPlaces {
    /// The place of each of some slots.
    pub(crate) fn of(&self, slots: Range<usize>) -> Vec<u64> {
        match self {
            StepPlaces::Dataset { plan, step } => slots.map(|slot| plan.place_of_slot(*step, slot)).collect(),
            StepPlaces::Mixture(places) => places.get(slots).map(<[u64]>::to_vec).unwrap_or_default(),
        }
    }
}

/// The number of a row among those of all datasets of a mixture; that of its dataset without one.
fn row_id(source: u32, row: u64) -> u64 {
    row ^ (u64::from(source) << ROW_BITS)
}
