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

use super::Shared;
use super::api::{self, Reply};
use super::memory::Held;
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
enum End {
    /// The connection failed, usually because the client disconnected.
    Quiet,
    /// The broker refused the input, for this reason.
    Refused(String),
}

impl From<io::Error> for End {
    fn from(_: io::Error) -> Self {
        End::Quiet
    }
}

/// Serves a connection until either side ends it.
pub(crate) async fn serve(shared: Arc<Shared>, mut stream: TcpStream, peer: SocketAddr) {
    metrics::BROKER_CONNECTIONS.inc();
    let end = match stream.local_addr() {
        Ok(local) => requests(&shared, &mut stream, local).await.err(),
        Err(_) => None,
    };
    metrics::BROKER_CONNECTIONS.dec();
    if let Some(End::Refused(reason)) = end {
        metrics::BROKER_REFUSED.inc();
        tracing::warn!(peer = %peer, "closed a connection: {reason}");
    }
}

async fn requests(shared: &Shared, stream: &mut TcpStream, local: SocketAddr) -> Result<(), End> {
    stream.set_nodelay(true)?;
    let mut buffer = BytesMut::with_capacity(16 << 10);
    loop {
        let Some((frame, held)) = read_frame(shared, stream, &mut buffer).await? else { return Ok(()) };
        match api::answer(shared, local, frame, held).await {
            Reply::Frame { frame, held } => {
                match in_time(shared, stream.write_all(&frame)).await {
                    Some(written) => written?,
                    None => return Err(End::Refused("the client does not take its answer".to_string())),
                }
                drop(held);
            }
            Reply::Nothing => {}
            Reply::Close(reason) => return Err(End::Refused(reason)),
        }
        if shared.stopping.is_cancelled() {
            return Ok(());
        }
    }
}

/// Runs `work`; `None` when it exceeds the time limit of a frame.
async fn in_time<T>(shared: &Shared, work: impl Future<Output = T>) -> Option<T> {
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
    shared: &Shared,
    stream: &mut TcpStream,
    buffer: &mut BytesMut,
) -> Result<Option<(Bytes, Held)>, End> {
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
        None => {
            Err(End::Refused(format!("a request was not complete within {} s", FRAME_TIME_MAX.as_secs())))
        }
    }
}

async fn read_rest(
    shared: &Shared,
    stream: &mut TcpStream,
    buffer: &mut BytesMut,
) -> Result<(Bytes, Held), End> {
    let mut held = Held::default();
    fill(shared, stream, buffer, 4, &mut held).await?;
    let length = i32::from_be_bytes([buffer[0], buffer[1], buffer[2], buffer[3]]);
    let bytes_max = shared.config.request_bytes_max;
    let bytes = match usize::try_from(length) {
        Ok(bytes) if (REQUEST_BYTES_MIN..=bytes_max).contains(&bytes) => bytes,
        _ => {
            return Err(End::Refused(format!(
                "it announced a request of {length} bytes where {REQUEST_BYTES_MIN} to {bytes_max} are possible; \
                 perhaps this is no Kafka client"
            )));
        }
    };
    fill(shared, stream, buffer, 4 + bytes, &mut held).await?;
    let mut frame = buffer.split_to(4 + bytes).freeze();
    drop(frame.split_to(4));
    if bytes > SMALL_BYTES {
        // Release the allocation with the frame that it was counted for. Otherwise every connection would
        // keep a buffer as large as its largest request.
        *buffer = BytesMut::from(&buffer[..]);
    }
    Ok((frame, held))
}

/// Reads until `buffer` holds at least `bytes`; `held` grows with the received bytes.
async fn fill(
    shared: &Shared,
    stream: &mut TcpStream,
    buffer: &mut BytesMut,
    bytes: usize,
    held: &mut Held,
) -> Result<(), End> {
    while buffer.len() < bytes {
        let missing = bytes - buffer.len();
        // Doubling keeps copies few. The first step is small, whatever length was announced.
        let step = missing.min(buffer.len().max(SMALL_BYTES));
        if buffer.len() + step > 2 * SMALL_BYTES {
            shared.memory.grow(held, buffer.len() + step).await;
        }
        buffer.reserve(step);
        let Ok(read) = tokio::time::timeout(STALL_MAX, stream.read_buf(buffer)).await else {
            return Err(End::Refused(format!(
                "a request stood still for {} s, {missing} bytes before its end",
                STALL_MAX.as_secs()
            )));
        };
        if read? == 0 {
            return Err(End::Refused(format!(
                "the client went {missing} bytes before the end of its request"
            )));
        }
    }
    Ok(())
}
