//! Feeds that are open on a server. Requests for one plan share a feed with its cache; idle feeds make room for others.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use millrace_datafs::Datafs;
use object_store::ObjectStore;
use parking_lot::Mutex;
use tokio::sync::{OnceCell, Semaphore};
use tonic::Status;

use super::exposure::Exposure;
use super::memory::{Memory, Reserved};
use super::metrics::REFUSED;
use super::permission::Permission;
use super::request::Request;
use super::status::{exhausted, status};
use crate::dataset::{DatasetSpec, OpenDataset};
use crate::feed::error::{FeedError, Result};
use crate::feed::{AnyFeed, Feed, Mixture, MixtureFeed, Plan, PlanOptions, Until, Weight};

/// Plans that are made at a time. A plan with a selection reads columns of the whole dataset.
const PLANNED_AT_A_TIME: usize = 2;
/// Calls that wait for their plan, beyond which further ones are refused.
const PLANS_WAITING_MAX: usize = 32;
/// Feeds that are kept open. Plans of many row groups take memory, too.
const OPEN_MAX: usize = 64;
/// Least cache of a dataset, as the feed has it.
const CACHE_BYTES_MIN: u64 = 64 << 20;
/// Memory for images while they are decoded, and their files.
const IMAGE_BYTES: u64 = 640 << 20;

/// The open feeds of a server.
pub(super) struct OpenFeeds {
    datafs: Datafs,
    exposure: Exposure,
    memory: Memory,
    open: Mutex<HashMap<String, Arc<Slot>>>,
    planning: Semaphore,
    waiting: Semaphore,
    clock: AtomicU64,
}

/// The place of one feed; empty while its plan is made.
#[derive(Default)]
struct Slot {
    feed: OnceCell<Arc<OpenFeed>>,
    /// Number of its last use.
    used: AtomicU64,
}

/// A feed with the memory that its cache may take.
pub(super) struct OpenFeed {
    pub(super) feed: AnyFeed,
    _cache: Reserved,
}

/// A feed for one request.
pub(super) struct Opened {
    pub(super) shared: Arc<OpenFeed>,
    /// The request, with the names of snapshots.
    pub(super) request: Request,
}

impl OpenFeeds {
    pub(super) fn new(datafs: Datafs, exposure: Exposure, memory: Memory) -> OpenFeeds {
        OpenFeeds {
            datafs,
            exposure,
            memory,
            open: Mutex::default(),
            planning: Semaphore::new(PLANNED_AT_A_TIME),
            waiting: Semaphore::new(PLANS_WAITING_MAX),
            clock: AtomicU64::new(0),
        }
    }

    pub(super) fn exposure(&self) -> &Exposure {
        &self.exposure
    }

    pub(super) fn datafs(&self) -> &Datafs {
        &self.datafs
    }

    /// Opens the feed of a request: checks what the caller may read, then takes an open feed or makes the plan.
    ///
    /// # Errors
    /// PERMISSION_DENIED, NOT_FOUND, RESOURCE_EXHAUSTED, those of the feed.
    pub(super) async fn open(&self, request: &Request, permission: &Permission) -> Result<Opened, Status> {
        let (sources, until) = request.sources().map_err(|error| status(&error))?;
        let options = request.plan_options().map_err(|error| status(&error))?;
        for (dataset, _) in &sources {
            permission(dataset.source.volume.as_str()).inspect_err(|_| count_refused("permission"))?;
        }
        let mut datasets = Vec::with_capacity(sources.len());
        let mut resolved = Vec::with_capacity(sources.len());
        for (dataset, weight) in sources {
            let (dataset, opened) = self.open_dataset(&dataset).await?;
            resolved.push((dataset, weight));
            datasets.push((opened, weight));
        }
        let mut identities = Vec::with_capacity(datasets.len());
        for (dataset, _) in &datasets {
            // A volume that was deleted and made again has snapshots with the numbers of the former ones.
            let content = dataset.content().await.map_err(|error| status(&error))?;
            identities.push(format!("{} {}", dataset.identity(), content.unwrap_or_default()));
        }
        let request = request.with_sources(&resolved);
        // Most states count in the order that the request has without a state.
        let plain = request.without_state();
        let shared = self.share(&plain, &identities, &datasets, until, &options).await?;
        if request.state.is_none_or(|state| state.order == shared.feed.order_id()) {
            return Ok(Opened { shared, request });
        }
        drop(shared);
        let shared = self.share(&request, &identities, &datasets, until, &options).await?;
        Ok(Opened { shared, request })
    }

    /// The open feed of a request; opened by the first call that asks for it.
    async fn share(
        &self,
        request: &Request,
        identities: &[String],
        datasets: &[(OpenDataset, Weight)],
        until: Option<Until>,
        options: &PlanOptions,
    ) -> Result<Arc<OpenFeed>, Status> {
        let key = request.feed_key(identities).map_err(|error| status(&error))?;
        let slot = self.slot(&key);
        match slot.feed.get_or_try_init(|| self.make(request, datasets, until, options)).await {
            Ok(shared) => Ok(Arc::clone(shared)),
            Err(error) => {
                self.forget(&key, &slot);
                Err(error)
            }
        }
    }

    /// Opens an exposed dataset at its snapshot, confined to what is exposed. Gives it with the snapshot's name.
    async fn open_dataset(&self, dataset: &DatasetSpec) -> Result<(DatasetSpec, OpenDataset), Status> {
        let refused = || {
            count_refused("exposure");
            Status::permission_denied(format!(
                "this server does not expose {dataset}; ListFlights lists what it exposes"
            ))
        };
        let wanted = match dataset.source.is_latest() {
            false => dataset.clone(),
            // It becomes a snapshot's name, which can be exposed or not.
            true => {
                let mut exposed = self.exposure.entries().iter();
                if !exposed.any(|entry| entry.source.volume == dataset.source.volume) {
                    return Err(refused());
                }
                let mut resolved = dataset.clone();
                let (datafs, source) = (self.datafs.clone(), dataset.source.clone());
                let found = tokio::task::spawn_blocking(move || datafs.resolve(&source));
                let found = found.await.map_err(|_| Status::unavailable("the server is stopping"))?;
                resolved.source = found.map_err(|source| volume_error(dataset, source))?.0;
                resolved
            }
        };
        let folder = self.exposure.folder_of(&wanted).ok_or_else(refused)?;
        let opened = wanted.open_confined(&self.datafs, folder).await.map_err(|error| status(&error))?;
        Ok((wanted, opened))
    }

    fn slot(&self, key: &str) -> Arc<Slot> {
        let mut open = self.open.lock();
        if open.len() >= OPEN_MAX && !open.contains_key(key) {
            evict(&mut open);
        }
        let slot = open.entry(key.to_owned()).or_default();
        slot.used.store(self.clock.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
        Arc::clone(slot)
    }

    /// Removes a slot whose plan could not be made, unless another call fills it.
    fn forget(&self, key: &str, slot: &Arc<Slot>) {
        let mut open = self.open.lock();
        // The map and this call hold it.
        if slot.feed.get().is_none() && Arc::strong_count(slot) == 2 {
            open.remove(key);
        }
    }

    async fn make(
        &self,
        request: &Request,
        datasets: &[(OpenDataset, Weight)],
        until: Option<Until>,
        options: &PlanOptions,
    ) -> Result<Arc<OpenFeed>, Status> {
        let _waiting = self.waiting.try_acquire().map_err(|_| {
            let text = format!("{PLANS_WAITING_MAX} other calls wait for their plans; try again later");
            exhausted("plans", text)
        })?;
        let _turn =
            self.planning.acquire().await.map_err(|_| Status::unavailable("the server is stopping"))?;
        let planned = Planned::make(request, datasets, until, options).await;
        let planned = planned.map_err(|error| status(&error))?;
        let images = if request.has_images() { IMAGE_BYTES } else { 0 };
        let cache = planned.cache_bytes().min(self.memory.max() / 2);
        let reserved = self.reserve(cache.saturating_add(images), "the decoded row groups of this plan")?;
        let stores: Vec<_> = datasets.iter().map(|(dataset, _)| Arc::clone(dataset.store())).collect();
        let feed = planned.open(request, &stores, cache).map_err(|error| status(&error))?;
        Ok(Arc::new(OpenFeed { feed, _cache: reserved }))
    }

    /// Reserves memory, for which idle feeds are closed.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED.
    pub(super) fn reserve(&self, bytes: u64, what: &str) -> Result<Reserved, Status> {
        loop {
            if let Some(reserved) = self.memory.reserve(bytes) {
                return Ok(reserved);
            }
            if !evict(&mut self.open.lock()) {
                let (used, max) = (self.memory.used(), self.memory.max());
                return Err(exhausted(
                    "memory",
                    format!(
                        "{what} take {bytes} bytes; {used} of {max} are reserved (feed.limits.memory_bytes_max): try \
                         again later, ask another server, or read smaller batches"
                    ),
                ));
            }
        }
    }
}

/// Closes the feed that was not used for the longest time among those without a stream or a call. False if there is none.
fn evict(open: &mut HashMap<String, Arc<Slot>>) -> bool {
    let idle = open.iter().filter(|(_, slot)| {
        Arc::strong_count(slot) == 1 && slot.feed.get().is_none_or(|feed| Arc::strong_count(feed) == 1)
    });
    let oldest = idle.min_by_key(|(_, slot)| slot.used.load(Ordering::Relaxed)).map(|(key, _)| key.clone());
    oldest.is_some_and(|key| open.remove(&key).is_some())
}

fn count_refused(reason: &str) {
    REFUSED.with_label_values(&[reason]).inc();
}

fn volume_error(dataset: &DatasetSpec, source: millrace_datafs::Error) -> Status {
    status(&FeedError::Volume { spec: dataset.to_string(), source: Arc::new(source) })
}

/// A plan that is not open yet.
enum Planned {
    Dataset(Box<Plan>),
    Mixture(Mixture),
}

impl Planned {
    async fn make(
        request: &Request,
        datasets: &[(OpenDataset, Weight)],
        until: Option<Until>,
        options: &PlanOptions,
    ) -> Result<Planned> {
        let order = request.state.map(|state| state.order);
        match (datasets, until) {
            ([(dataset, _)], None) => {
                let plan = dataset.plan(options).await?;
                Ok(Planned::Dataset(Box::new(match order.filter(|order| *order != plan.order_id()) {
                    // Another size of a batch can mean other lanes: this feed reads the order of the state.
                    Some(order) => plan.in_order(order, options)?,
                    None => plan,
                })))
            }
            (_, until) => {
                let mixture = Mixture::plan(datasets, options, until.unwrap_or_default()).await?;
                match order.filter(|order| *order != mixture.order_id()) {
                    Some(order) => Err(FeedError::OtherOrder { order, plan: mixture.order_id() }),
                    None => Ok(Planned::Mixture(mixture)),
                }
            }
        }
    }

    /// The cache with which row groups are decoded once.
    fn cache_bytes(&self) -> u64 {
        let of_plan = |plan: &Plan| {
            let set = plan.working_set_bytes();
            set.saturating_add((set / plan.lanes()).saturating_mul(3)).max(CACHE_BYTES_MIN)
        };
        match self {
            Planned::Dataset(plan) => of_plan(plan),
            // A mixture gives each source its working set, and divides the rest by weight.
            Planned::Mixture(mixture) => {
                mixture.sources().iter().fold(0, |sum: u64, source| sum.saturating_add(of_plan(&source.plan)))
            }
        }
    }

    fn open(self, request: &Request, stores: &[Arc<dyn ObjectStore>], cache: u64) -> Result<AnyFeed> {
        let options = request.feed_options(cache.max(1));
        match (self, stores) {
            (Planned::Dataset(plan), [store]) => Ok(Feed::open(*plan, Arc::clone(store), &options)?.into()),
            (Planned::Dataset(_), _) => Err(FeedError::invalid("one dataset with several stores")),
            (Planned::Mixture(mixture), stores) => Ok(MixtureFeed::open(mixture, stores, &options)?.into()),
        }
    }
}
