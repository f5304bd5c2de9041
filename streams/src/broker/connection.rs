//! One client connection: frames in, answers out, in order, one request at a time.
//!
//! The broker closes the connection, with one log line, on any malformed request. Memory grows with the bytes
//! received, never with an announced length.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::BrokerState;
use super::api::{self, Reply};
use super::memory::MemoryReservation;
use crate::metrics;

/// Idle time after which the broker closes a connection (Kafka's default).
const IDLE_MAX: Duration = Duration::from_secs(600);
/// Time limit for reading or writing one frame.
const FRAME_TIME_MAX: Duration = Duration::from_secs(60);
/// The same limit once the broker stops, so that a stalled client does not delay the stop.
const STOP_TIME_MAX: Duration = Duration::from_secs(3);
/// Longest pause between two reads of one request.
const STALL_MAX: Duration = Duration::from_secs(10);
/// Frames up to twice this size are not counted against the memory of all connections.
const SMALL_BYTES: usize = 64 << 10;
/// Key, version and correlation id: the smallest request.
const REQUEST_BYTES_MIN: usize = 8;

/// Reasons for the end of a connection.
enum CloseReason {
    /// The connection failed, usually because the client disconnected.
    Quiet,
    /// The broker refused the input, for this reason.
    Refused(String),
}

impl From<io::Error> for CloseReason {
    fn from(_: io::Error) -> Self {
        CloseReason::Quiet
    }
}

/// Serves a connection until either side ends it.
pub(crate) async fn serve(shared: Arc<BrokerState>, mut stream: TcpStream, peer: SocketAddr) {
    metrics::BROKER_CONNECTIONS.inc();
    let end = match stream.local_addr() {
        Ok(local) => requests(&shared, &mut stream, local).await.err(),
        Err(_) => None,
    };
    metrics::BROKER_CONNECTIONS.dec();
    if let Some(CloseReason::Refused(reason)) = end {
        metrics::BROKER_REFUSED.inc();
        tracing::warn!(peer = %peer, "closed a connection: {reason}");
    }
}

async fn requests(
    shared: &BrokerState,
    stream: &mut TcpStream,
    local: SocketAddr,
) -> Result<(), CloseReason> {
    stream.set_nodelay(true)?;
    let mut buffer = BytesMut::with_capacity(16 << 10);
    loop {
        let Some((frame, reservation)) = read_frame(shared, stream, &mut buffer).await? else {
            return Ok(());
        };
        match api::answer(shared, local, frame, reservation).await {
            Reply::Frame { frame, reservation } => {
                match in_time(shared, stream.write_all(&frame)).await {
                    Some(written) => written?,
                    None => {
                        return Err(CloseReason::Refused(
                            "the client does not read its response".to_string(),
                        ));
                    }
                }
                drop(reservation);
            }
            Reply::Nothing => {}
            Reply::Close(reason) => return Err(CloseReason::Refused(reason)),
        }
        if shared.stopping.is_cancelled() {
            return Ok(());
        }
    }
}

/// Runs `work`; `None` when it exceeds the time limit of a frame.
async fn in_time<T>(shared: &BrokerState, work: impl Future<Output = T>) -> Option<T> {
    let stopped = async {
        shared.stopping.cancelled().await;
        tokio::time::sleep(STOP_TIME_MAX).await;
    };
    tokio::select! {
        biased;
        done = work => Some(done),
        () = tokio::time::sleep(FRAME_TIME_MAX) => None,
        () = stopped => None,
    }
}

/// The next request without its length prefix; `None` when the connection ends between requests.
async fn read_frame(
    shared: &BrokerState,
    stream: &mut TcpStream,
    buffer: &mut BytesMut,
) -> Result<Option<(Bytes, MemoryReservation)>, CloseReason> {
    while buffer.is_empty() {
        buffer.reserve(16 << 10);
        tokio::select! {
            read = stream.read_buf(buffer) => if read? == 0 { return Ok(None) },
            () = tokio::time::sleep(IDLE_MAX) => return Ok(None),
            () = shared.stopping.cancelled() => return Ok(None),
        }
    }
    match in_time(shared, read_rest(shared, stream, buffer)).await {
        Some(frame) => frame.map(Some),
        None => Err(CloseReason::Refused(format!(
            "a request was not complete within {} s",
            FRAME_TIME_MAX.as_secs()
        ))),
    }
}

async fn read_rest(
    shared: &BrokerState,
    stream: &mut TcpStream,
    buffer: &mut BytesMut,
) -> Result<(Bytes, MemoryReservation), CloseReason> {
    let mut reservation = MemoryReservation::default();
    fill(shared, stream, buffer, 4, &mut reservation).await?;
    let length = i32::from_be_bytes([buffer[0], buffer[1], buffer[2], buffer[3]]);
    let bytes_max = shared.config.request_bytes_max;
    let bytes = match usize::try_from(length) {
        Ok(bytes) if (REQUEST_BYTES_MIN..=bytes_max).contains(&bytes) => bytes,
        _ => {
            return Err(CloseReason::Refused(format!(
                "it announced a request of {length} bytes where {REQUEST_BYTES_MIN} to {bytes_max} are possible; \
                 perhaps this is no Kafka client"
            )));
        }
    };
    fill(shared, stream, buffer, 4 + bytes, &mut reservation).await?;
    let mut frame = buffer.split_to(4 + bytes).freeze();
    drop(frame.split_to(4));
    if bytes > SMALL_BYTES {
        // Release the allocation with the frame that it was counted for. Otherwise every connection would
        // keep a buffer as large as its largest request.
        *buffer = BytesMut::from(&buffer[..]);
    }
    Ok((frame, reservation))
}

/// Reads until `buffer` holds at least `bytes`; `reservation` grows with the received bytes.
async fn fill(
    shared: &BrokerState,
    stream: &mut TcpStream,
    buffer: &mut BytesMut,
    bytes: usize,
    reservation: &mut MemoryReservation,
) -> Result<(), CloseReason> {
    while buffer.len() < bytes {
        let missing = bytes - buffer.len();
        // Doubling keeps copies few. The first step is small, whatever length was announced.
        let step = missing.min(buffer.len().max(SMALL_BYTES));
        if buffer.len() + step > 2 * SMALL_BYTES {
            shared.memory.grow(reservation, buffer.len() + step).await;
        }
        buffer.reserve(step);
        let Ok(read) = tokio::time::timeout(STALL_MAX, stream.read_buf(buffer)).await else {
            return Err(CloseReason::Refused(format!(
                "no byte of a request arrived for {} s, {missing} bytes before its end",
                STALL_MAX.as_secs()
            )));
        };
        if read? == 0 {
            return Err(CloseReason::Refused(format!(
                "the client disconnected {missing} bytes before the end of its request"
            )));
        }
    }
    Ok(())
}
