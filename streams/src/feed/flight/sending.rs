//! Stream of one rank's batches as Flight messages: a task assembles and encodes ahead of the connection, within a bound.

use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use arrow::error::ArrowError;
use arrow::ipc::writer::{DictionaryTracker, IpcDataGenerator, IpcWriteContext, IpcWriteOptions};
use arrow_flight::FlightData;
use futures::{Stream, StreamExt};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::memory::Reserved;
use super::metrics;
use super::open::OpenFeed;
use super::permission::Permission;
use super::request::State;
use super::status::status;
use crate::feed::{FeedStream, PlanId};

/// Encoded batches that wait for the connection.
pub(super) const QUEUED: usize = 2;
/// Batches beyond this size are encoded on a blocking thread.
const INLINE_BYTES_MAX: usize = 4 << 20;

/// What a stream sends, and what it holds while it runs.
pub(super) struct Sending {
    pub(super) stream: FeedStream,
    pub(super) feed: Arc<OpenFeed>,
    /// The places that the stream has still to deliver.
    pub(super) places: Range<u64>,
    pub(super) order: PlanId,
    /// Whether the end of the places is the end of an iteration.
    pub(super) ends: bool,
    /// The volumes of the datasets, which the caller must be permitted to read until the end.
    pub(super) volumes: Vec<String>,
    pub(super) permission: Permission,
    pub(super) batch_bytes_max: u64,
    /// Ends the stream with the server.
    pub(super) ending: CancellationToken,
    pub(super) _batches: Reserved,
    pub(super) _stream: OwnedSemaphorePermit,
}

/// The messages of a stream. Dropping it ends the work.
pub(super) struct Messages {
    queue: mpsc::Receiver<FlightData>,
    /// How the stream ends once the queue is empty; none for a complete stream.
    end: Arc<Mutex<Option<Status>>>,
    is_over: bool,
}

impl Stream for Messages {
    type Item = Result<FlightData, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        match ready!(self.queue.poll_recv(cx)) {
            Some(message) => Poll::Ready(Some(Ok(message))),
            None => {
                self.is_over = true;
                Poll::Ready(self.end.lock().take().map(Err))
            }
        }
    }
}

/// How a stream ended.
enum End {
    Complete,
    /// The client left.
    Left,
    Stopped,
    Failed(Status),
}

impl Sending {
    /// Starts the task of the stream.
    pub(super) fn start(self) -> Messages {
        let (sender, queue) = mpsc::channel(QUEUED);
        // A task that breaks off must not look complete.
        let broken = Status::internal("the stream broke off; ask again with the state of the last batch");
        let end = Arc::new(Mutex::new(Some(broken)));
        let outcome = Arc::clone(&end);
        tokio::spawn(async move {
            metrics::STREAMS.inc();
            let _open = OpenGuard;
            let ended = self.run(&sender).await;
            let (name, status) = match ended {
                End::Complete => ("complete", None),
                End::Left => ("left", None),
                End::Stopped => ("stopped", Some(stopping())),
                End::Failed(status) => ("failed", Some(status)),
            };
            metrics::ENDED.with_label_values(&[name]).inc();
            if let Some(status) = &status
                && name == "failed"
            {
                tracing::warn!(code = ?status.code(), error = status.message(), "a stream of a Flight client failed");
            }
            *outcome.lock() = status;
        });
        Messages { queue, end, is_over: false }
    }

    async fn run(mut self, sender: &mpsc::Sender<FlightData>) -> End {
        let (mut encoder, head) = Encoder::new(self.feed.feed.schema());
        if sender.send(head).await.is_err() {
            return End::Left;
        }
        loop {
            let next = tokio::select! {
                biased;
                () = sender.closed() => return End::Left,
                () = self.ending.cancelled() => return End::Stopped,
                next = self.stream.next() => next,
            };
            let batch = match next {
                None => return End::Complete,
                Some(Ok(batch)) => batch.batch,
                Some(Err(error)) => return End::Failed(status(&error)),
            };
            for volume in &self.volumes {
                if let Err(status) = (self.permission)(volume) {
                    return End::Failed(status);
                }
            }
            let after = self.feed.feed.place_after(self.places.start, 1).min(self.places.end);
            self.places.start = after;
            let state = State { order: self.order, rows: after, over: self.ends && self.places.is_empty() };
            let rows = batch.num_rows() as u64;
            let messages;
            (encoder, messages) = match encoder.encode(batch, state).await {
                Ok(encoded) => encoded,
                Err(status) => return End::Failed(status),
            };
            let bytes = messages.iter().map(|message| message.data_body.len() as u64).sum::<u64>();
            if bytes > self.batch_bytes_max {
                return End::Failed(Status::invalid_argument(format!(
                    "a batch of {rows} rows has {bytes} bytes, more than {} (feed.limits.batch_bytes_max); read smaller \
                     batches (batch_rows), or fewer columns",
                    self.batch_bytes_max
                )));
            }
            for message in messages {
                tokio::select! {
                    biased;
                    sent = sender.send(message) => if sent.is_err() {
                        return End::Left;
                    },
                    () = self.ending.cancelled() => return End::Stopped,
                }
            }
            metrics::ROWS.inc_by(rows);
            metrics::BYTES.inc_by(bytes);
        }
    }
}

/// The status of streams that end with the server.
pub(super) fn stopping() -> Status {
    Status::unavailable("the server is stopping; go on at another server with the state of the last batch")
}

/// Counts an open stream.
struct OpenGuard;

impl Drop for OpenGuard {
    fn drop(&mut self) {
        metrics::STREAMS.dec();
    }
}

/// Encoder of batches in the Arrow IPC format.
pub(super) struct Encoder {
    generator: IpcDataGenerator,
    dictionaries: DictionaryTracker,
    options: IpcWriteOptions,
    context: IpcWriteContext,
}

impl Encoder {
    /// An encoder, and the message with the schema.
    pub(super) fn new(schema: &SchemaRef) -> (Encoder, FlightData) {
        let mut encoder = Encoder {
            generator: IpcDataGenerator::default(),
            // Each batch has the dictionary of its own rows.
            dictionaries: DictionaryTracker::new(false),
            options: IpcWriteOptions::default(),
            context: IpcWriteContext::default(),
        };
        let head = encoder.generator.schema_to_bytes_with_dictionary_tracker(
            schema,
            &mut encoder.dictionaries,
            &encoder.options,
        );
        (encoder, head.into())
    }

    /// The messages of a batch: dictionaries, then the rows with the state after them.
    async fn encode(
        mut self,
        batch: RecordBatch,
        state: State,
    ) -> Result<(Encoder, Vec<FlightData>), Status> {
        let failed = |error: ArrowError| Status::internal(format!("encode a batch: {error}"));
        if batch.get_array_memory_size() <= INLINE_BYTES_MAX {
            let messages = self.messages(&batch, state).map_err(failed)?;
            return Ok((self, messages));
        }
        let encoding = tokio::task::spawn_blocking(move || {
            let messages = self.messages(&batch, state)?;
            Ok((self, messages))
        });
        encoding.await.map_err(|_| stopping())?.map_err(failed)
    }

    fn messages(&mut self, batch: &RecordBatch, state: State) -> Result<Vec<FlightData>, ArrowError> {
        let Encoder { generator, dictionaries, options, context } = self;
        let (tables, rows) = generator.encode(batch, dictionaries, options, context)?;
        let state = serde_json::to_vec(&state).map_err(|error| ArrowError::ExternalError(Box::new(error)))?;
        let rows = FlightData::from(rows).with_app_metadata(state);
        Ok(tables.into_iter().map(FlightData::from).chain([rows]).collect())
    }
}
