//! The Flight service: its calls, and its end.

use std::ops::Range;
use std::sync::Arc;

use arrow::datatypes::Schema;
use arrow::ipc::writer::IpcWriteOptions;
use arrow_flight::flight_service_server::{FlightService, FlightServiceServer};
use arrow_flight::{
    Action, ActionType, Criteria, Empty, FlightData, FlightDescriptor, FlightEndpoint, FlightInfo,
    HandshakeRequest, HandshakeResponse, PollInfo, PutResult, SchemaAsIpc, SchemaResult, Ticket,
};
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use millrace_datafs::{Datafs, VolumeSpec};
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tonic::{Extensions, Response, Status, Streaming};

use super::exposure::Exposure;
use super::memory::Memory;
use super::metrics;
use super::open::{OpenFeeds, Opened};
use super::permission::{Callers, Permission};
use super::request::{Request, State};
use super::sending::{QUEUED, Sending, stopping};
use super::status::{exhausted, status};
use crate::dataset::DatasetSpec;
use crate::feed::error::{FeedError, Result};
use crate::feed::order::PLACES_MAX;
use crate::feed::{AnyFeed, Epochs, FeedOptions, Shard};

/// Most endpoints of one answer; readers beyond them name their rank.
const ENDPOINTS_MAX: u32 = 4096;
/// Most bytes of the tickets of one answer.
const TICKETS_BYTES_MAX: usize = 4 << 20;
/// Location that stands for the connection of the call, by the Flight specification.
pub const SAME_CONNECTION: &str = "arrow-flight-reuse-connection://?";
/// Batches of a stream in memory beside those that are assembled ahead and queued: one is being encoded, one sent.
const IN_PASSING: u64 = 2;

/// Bounds of a Flight service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Most streams at a time; the server refuses more with RESOURCE_EXHAUSTED.
    pub streams_max: usize,
    /// Most bytes that decoded row groups and the batches of all streams are estimated to take; the server refuses
    /// requests beyond with RESOURCE_EXHAUSTED.
    pub memory_bytes_max: u64,
    /// Largest batch of one rank, in bytes; the server refuses larger ones with INVALID_ARGUMENT. At most 1 GiB.
    pub batch_bytes_max: u64,
    /// Most open connections; the server closes further ones with a message.
    pub connections_max: usize,
    /// Longest time in milliseconds for which a client may leave a batch unread. Its stream then ends, and it can go on
    /// from its last state.
    pub unread_ms_max: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            streams_max: 64,
            memory_bytes_max: 4 << 30,
            batch_bytes_max: 256 << 20,
            connections_max: 1024,
            unread_ms_max: 600_000,
        }
    }
}

impl Limits {
    /// # Errors
    /// [`FeedError::Invalid`] for a limit out of bounds.
    pub fn check(&self) -> Result<()> {
        let within = |name: &str, value: u64, most: u64| match (1..=most).contains(&value) {
            true => Ok(()),
            false => {
                Err(FeedError::invalid(format!("feed.limits.{name} is {value}; it must be 1 to {most}")))
            }
        };
        within("streams_max", self.streams_max as u64, 1 << 16)?;
        within("memory_bytes_max", self.memory_bytes_max, 1 << 50)?;
        // A message of gRPC has less than 2 GiB.
        within("batch_bytes_max", self.batch_bytes_max, 1 << 30)?;
        within("connections_max", self.connections_max as u64, 1 << 20)?;
        within("unread_ms_max", self.unread_ms_max, 1 << 40)
    }
}

/// The feed as a Flight service. Clones share all.
#[derive(Clone)]
pub struct FlightFeeds {
    shared: Arc<Shared>,
}

struct Shared {
    feeds: OpenFeeds,
    callers: Callers,
    limits: Limits,
    /// URIs of the servers that answer tickets, this one among them.
    locations: Vec<String>,
    streams: Arc<Semaphore>,
    /// Refuses new calls.
    draining: CancellationToken,
    /// Ends streams.
    ending: CancellationToken,
}

impl FlightFeeds {
    /// A service over the volumes of a home. `locations` are the URIs of all servers that expose the same, for example
    /// `grpc+tls://feed-1.example.org:8815`, or [`SAME_CONNECTION`].
    ///
    /// # Errors
    /// [`FeedError::Invalid`] for a limit out of bounds.
    pub fn new(
        datafs: Datafs,
        exposure: Exposure,
        locations: Vec<String>,
        limits: Limits,
        callers: Callers,
    ) -> Result<FlightFeeds> {
        limits.check()?;
        metrics::register_all();
        let memory = Memory::new(limits.memory_bytes_max);
        let shared = Shared {
            feeds: OpenFeeds::new(datafs, exposure, memory),
            callers,
            limits,
            locations,
            streams: Arc::new(Semaphore::new(limits.streams_max)),
            draining: CancellationToken::new(),
            ending: CancellationToken::new(),
        };
        Ok(FlightFeeds { shared: Arc::new(shared) })
    }

    /// The service for a gRPC server.
    pub fn server(&self) -> FlightServiceServer<FlightFeeds> {
        FlightServiceServer::new(self.clone())
    }

    /// Refuses new calls from now on, with UNAVAILABLE.
    pub fn drain(&self) {
        self.shared.draining.cancel();
    }

    /// Waits until no stream runs.
    pub async fn idle(&self) {
        let all = u32::try_from(self.shared.limits.streams_max).unwrap_or(u32::MAX);
        // Never closed.
        let _ = self.shared.streams.acquire_many(all).await;
    }

    /// Ends the streams that run, with UNAVAILABLE: their clients go on at another server.
    pub fn end_streams(&self) {
        self.shared.ending.cancel();
    }

    /// The permission of a caller, unless the server is stopping.
    fn admit(&self, extensions: &Extensions) -> Result<Permission, Status> {
        match self.shared.draining.is_cancelled() {
            true => Err(stopping()),
            false => Ok((self.shared.callers)(extensions)),
        }
    }

    async fn open(&self, request: &Request, permission: &Permission) -> Result<Served, Status> {
        let opened = self.shared.feeds.open(request, permission).await?;
        Served::new(opened).map_err(|error| status(&error))
    }

    /// Checks that a batch of one rank is within the limit.
    fn check_batch(&self, served: &Served) -> Result<u64, Status> {
        let bytes = served.batch_bytes();
        let most = self.shared.limits.batch_bytes_max;
        if bytes > most {
            let rows = served.feed().batch_rows();
            return Err(Status::invalid_argument(format!(
                "a batch of {rows} rows for {} ranks has about {bytes} bytes, more than {most} \
                 (feed.limits.batch_bytes_max); read smaller batches (batch_rows), or fewer columns",
                served.request.world
            )));
        }
        Ok(bytes)
    }

    async fn info(
        &self,
        descriptor: FlightDescriptor,
        permission: &Permission,
    ) -> Result<FlightInfo, Status> {
        let request = Request::of_descriptor(&descriptor).map_err(|error| status(&error))?;
        let ranks = match request.rank {
            Some(rank) => rank..rank + 1,
            None if request.world > ENDPOINTS_MAX => {
                return Err(Status::invalid_argument(format!(
                    "world is {}: an answer has at most {ENDPOINTS_MAX} endpoints; name the rank",
                    request.world
                )));
            }
            None => 0..request.world,
        };
        let served = self.open(&request, permission).await?;
        self.check_batch(&served)?;
        let plan = served.feed().id();
        let mut rows = Some(0_u64);
        let mut endpoints = Vec::with_capacity(ranks.len());
        let mut tickets_bytes = 0;
        for rank in ranks {
            let ticket = served.request.ticket(rank, plan).map_err(|error| status(&error))?;
            tickets_bytes += ticket.len();
            if tickets_bytes > TICKETS_BYTES_MAX {
                return Err(Status::invalid_argument(format!(
                    "the tickets of {} ranks have more than {TICKETS_BYTES_MAX} bytes; name the rank",
                    request.world
                )));
            }
            let shard = Shard::new(rank, request.world).map_err(|error| status(&error))?;
            rows = rows.zip(served.rows_of(shard)).map(|(sum, rows)| sum.saturating_add(rows));
            endpoints.push(self.endpoint(rank, ticket));
        }
        let rows = rows.and_then(|rows| i64::try_from(rows).ok()).unwrap_or(-1);
        let details =
            serde_json::to_vec(&served.details()).map_err(|error| Status::internal(error.to_string()))?;
        let info = FlightInfo::new()
            .with_descriptor(descriptor)
            .with_endpoints(endpoints)
            .with_total_records(rows)
            .with_app_metadata(details);
        info.try_with_schema(served.feed().schema()).map_err(|error| Status::internal(error.to_string()))
    }

    /// The endpoint of a rank. Ranks begin at different servers.
    fn endpoint(&self, rank: u32, ticket: Vec<u8>) -> FlightEndpoint {
        let endpoint = FlightEndpoint::new().with_ticket(Ticket::new(ticket));
        let locations = &self.shared.locations;
        let first = rank as usize % locations.len().max(1);
        let turned = locations.iter().cycle().skip(first).take(locations.len());
        turned.fold(endpoint, |endpoint, location| endpoint.with_location(location))
    }

    async fn send(&self, ticket: Ticket, permission: Permission) -> Result<Response<Messages>, Status> {
        let request = Request::of_ticket(&ticket.ticket).map_err(|error| status(&error))?;
        let permit = Arc::clone(&self.shared.streams).try_acquire_owned().map_err(|_| {
            exhausted(
                "streams",
                format!(
                    "{} streams run, the most that this server has (feed.limits.streams_max): try again later, or ask \
                     another server",
                    self.shared.limits.streams_max
                ),
            )
        })?;
        let served = self.open(&request, &permission).await?;
        let (cursor, plan) = (request.plan, served.feed().id());
        if let Some(cursor) = cursor.filter(|cursor| *cursor != plan) {
            return Err(status(&FeedError::OtherPlan { cursor, plan }));
        }
        let shard = Shard::new(request.rank.unwrap_or(0), request.world).map_err(|error| status(&error))?;
        let ahead = FeedOptions::default().prefetch_batches as u64 + QUEUED as u64 + IN_PASSING;
        let bytes = self.check_batch(&served)?.saturating_mul(ahead);
        let batches = self.shared.feeds.reserve(bytes, "the batches of this stream")?;
        let Served { opened, places, .. } = &served;
        let feed = &opened.feed;
        let stream = feed.stream_places(shard, places.clone(), 1).map_err(|error| status(&error))?;
        let (sources, _) = request.sources().map_err(|error| status(&error))?;
        let sending = Sending {
            stream,
            places: places.clone(),
            order: feed.order_id(),
            ends: request.epochs.is_some(),
            volumes: sources.into_iter().map(|(dataset, _)| dataset.source.volume.to_string()).collect(),
            permission,
            batch_bytes_max: self.shared.limits.batch_bytes_max,
            ending: self.shared.ending.clone(),
            feed: Arc::clone(opened),
            _batches: batches,
            _stream: permit,
        };
        Ok(Response::new(sending.start().boxed()))
    }
}

type Messages = BoxStream<'static, Result<FlightData, Status>>;

/// A request with its feed, and the places that it asks for.
struct Served {
    opened: Arc<super::open::OpenFeed>,
    request: Request,
    epochs: Epochs,
    places: Range<u64>,
}

/// What the answer to `GetFlightInfo` tells beside the schema, as JSON in its metadata.
#[derive(Serialize)]
struct Details {
    dataset: String,
    plan: String,
    /// Rows of a pass over the dataset.
    rows: u64,
    rows_per_epoch: u64,
    batch_rows: usize,
    world: u32,
    /// Batches that each rank gets; none without an end.
    batches: Option<u64>,
    /// The position at which the streams begin.
    state: State,
}

impl Served {
    fn new(opened: Opened) -> Result<Served> {
        let Opened { shared: opened, request } = opened;
        let epochs = opened.feed.epochs(request.rows_per_epoch)?;
        let place = request.state.map_or(0, |state| state.rows);
        if place >= PLACES_MAX {
            return Err(FeedError::invalid(format!("row {place} of the state is beyond the order")));
        }
        let places = match request.epochs {
            None => place..PLACES_MAX,
            Some(count) => {
                let first = epochs.of_place(place) / count * count;
                let (start, end) = (epochs.start(first), epochs.start(first.saturating_add(count)));
                let is_over = request.state.is_some_and(|state| state.over) && place == start && place > 0;
                place..if is_over { place } else { end.min(PLACES_MAX) }
            }
        };
        Ok(Served { opened, request, epochs, places })
    }

    fn feed(&self) -> &AnyFeed {
        &self.opened.feed
    }

    /// Estimated size of a rank's part of a batch.
    fn batch_bytes(&self) -> u64 {
        let rows = (self.feed().batch_rows() as u64).div_ceil(u64::from(self.request.world));
        self.feed().row_bytes().saturating_mul(rows)
    }

    /// Rows that a rank gets; none without an end.
    fn rows_of(&self, shard: Shard) -> Option<u64> {
        self.request.epochs?;
        let batch = self.feed().batch_rows() as u64;
        let part = |places: Range<u64>| {
            let rows = places.end.saturating_sub(places.start) as usize;
            shard.slots(rows).len() as u64
        };
        let Range { start, end } = self.places;
        let (first_whole, last_whole) = (start.div_ceil(batch) * batch, end / batch * batch);
        if first_whole > last_whole {
            return Some(part(start..end));
        }
        let whole = (last_whole - first_whole) / batch * shard.slots(batch as usize).len() as u64;
        Some(part(start..first_whole) + whole + part(last_whole..end))
    }

    fn details(&self) -> Details {
        let feed = self.feed();
        let batch = feed.batch_rows() as u64;
        let batches = self.places.end.div_ceil(batch).saturating_sub(self.places.start / batch);
        let is_empty = self.places.is_empty();
        let name = match &self.request.dataset {
            Some(dataset) => dataset.to_string(),
            None => feed.name(),
        };
        Details {
            dataset: name,
            plan: feed.id().to_string(),
            rows: feed.rows(),
            rows_per_epoch: self.epochs.start(1),
            batch_rows: feed.batch_rows(),
            world: self.request.world,
            batches: self.request.epochs.map(|_| if is_empty { 0 } else { batches }),
            state: State { order: feed.order_id(), rows: self.places.start, over: is_empty },
        }
    }
}

/// The exposed datasets that a caller may read, one for each snapshot that has the folder.
fn list(
    feeds: &OpenFeeds,
    permission: &Permission,
    prefix: &str,
) -> millrace_datafs::Result<Vec<DatasetSpec>> {
    let mut found = Vec::new();
    for entry in feeds.exposure().entries() {
        if permission(entry.source.volume.as_str()).is_err() {
            continue;
        }
        let snapshots = match &entry.source.snapshot {
            Some(snapshot) => vec![snapshot.clone()],
            None => match feeds.datafs().snapshot_list(&entry.source.volume) {
                Ok(snapshots) => snapshots.into_iter().map(|snapshot| snapshot.name).collect(),
                // The volume can be created later.
                Err(millrace_datafs::Error::NotFound { .. }) => Vec::new(),
                Err(error) => return Err(error),
            },
        };
        for snapshot in snapshots {
            let source = VolumeSpec::at(entry.source.volume.clone(), snapshot);
            let dataset = DatasetSpec { source, path: entry.path.clone(), format: None };
            if !dataset.to_string().starts_with(prefix) || found.contains(&dataset) {
                continue;
            }
            let view = feeds.datafs().view(&dataset.source).and_then(|view| view.stat(&dataset.path));
            match view {
                Ok(_) => found.push(dataset),
                // Deleted meanwhile, or a snapshot from before the folder.
                Err(millrace_datafs::Error::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(found)
}

fn unsupported(call: &str) -> Status {
    Status::unimplemented(format!(
        "{call} is not part of this service: clients read with GetFlightInfo and DoGet"
    ))
}

#[tonic::async_trait]
impl FlightService for FlightFeeds {
    type HandshakeStream = BoxStream<'static, Result<HandshakeResponse, Status>>;
    type ListFlightsStream = BoxStream<'static, Result<FlightInfo, Status>>;
    type DoGetStream = Messages;
    type DoPutStream = BoxStream<'static, Result<PutResult, Status>>;
    type DoActionStream = BoxStream<'static, Result<arrow_flight::Result, Status>>;
    type ListActionsStream = BoxStream<'static, Result<ActionType, Status>>;
    type DoExchangeStream = Messages;

    async fn get_flight_info(
        &self,
        request: tonic::Request<FlightDescriptor>,
    ) -> Result<Response<FlightInfo>, Status> {
        let permission = self.admit(request.extensions())?;
        Ok(Response::new(self.info(request.into_inner(), &permission).await?))
    }

    async fn get_schema(
        &self,
        request: tonic::Request<FlightDescriptor>,
    ) -> Result<Response<SchemaResult>, Status> {
        let permission = self.admit(request.extensions())?;
        let wanted = Request::of_descriptor(&request.into_inner()).map_err(|error| status(&error))?;
        let served = self.open(&wanted, &permission).await?;
        let schema: &Schema = served.feed().schema();
        let options = IpcWriteOptions::default();
        let encoded = SchemaResult::try_from(SchemaAsIpc::new(schema, &options));
        encoded.map(Response::new).map_err(|error| Status::internal(error.to_string()))
    }

    async fn do_get(&self, request: tonic::Request<Ticket>) -> Result<Response<Messages>, Status> {
        let permission = self.admit(request.extensions())?;
        self.send(request.into_inner(), permission).await
    }

    async fn list_flights(
        &self,
        request: tonic::Request<Criteria>,
    ) -> Result<Response<Self::ListFlightsStream>, Status> {
        let permission = self.admit(request.extensions())?;
        let prefix = String::from_utf8(request.into_inner().expression.to_vec());
        let prefix = prefix.map_err(|_| {
            Status::invalid_argument(
                "the criteria are not UTF-8; send the beginning of a name, such as digits@",
            )
        })?;
        let shared = Arc::clone(&self.shared);
        let listing = tokio::task::spawn_blocking(move || list(&shared.feeds, &permission, &prefix));
        let listed = listing.await.map_err(|_| stopping())?;
        let listed = listed.map_err(|error| {
            status(&FeedError::Volume { spec: "list".to_owned(), source: Arc::new(error) })
        })?;
        let infos = listed.into_iter().map(|dataset| {
            let descriptor = FlightDescriptor::new_path(vec![dataset.to_string()]);
            Ok::<_, Status>(FlightInfo::new().with_descriptor(descriptor))
        });
        Ok(Response::new(stream::iter(infos.collect::<Vec<_>>()).boxed()))
    }

    async fn poll_flight_info(
        &self,
        _: tonic::Request<FlightDescriptor>,
    ) -> Result<Response<PollInfo>, Status> {
        Err(unsupported("PollFlightInfo"))
    }

    async fn handshake(
        &self,
        _: tonic::Request<Streaming<HandshakeRequest>>,
    ) -> Result<Response<Self::HandshakeStream>, Status> {
        Err(Status::unimplemented(
            "Handshake is not part of this service: send authorization: Bearer TOKEN with each call",
        ))
    }

    async fn do_put(
        &self,
        _: tonic::Request<Streaming<FlightData>>,
    ) -> Result<Response<Self::DoPutStream>, Status> {
        Err(unsupported("DoPut"))
    }

    async fn do_exchange(
        &self,
        _: tonic::Request<Streaming<FlightData>>,
    ) -> Result<Response<Self::DoExchangeStream>, Status> {
        Err(unsupported("DoExchange"))
    }

    async fn do_action(&self, _: tonic::Request<Action>) -> Result<Response<Self::DoActionStream>, Status> {
        Err(unsupported("DoAction"))
    }

    async fn list_actions(
        &self,
        _: tonic::Request<Empty>,
    ) -> Result<Response<Self::ListActionsStream>, Status> {
        Ok(Response::new(stream::empty().boxed()))
    }
}
