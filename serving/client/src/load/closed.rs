//! Closed-loop load: a number of clients, each of which sends its next request when it has its response.

use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::client::{Connection, Server, status};
use super::requests::Requests;
use super::{CLIENTS_MAX, LoadError, Measured, processor_time};
use crate::client::Credentials;

/// Pause of a client after a failure: without it, a load would only measure how fast a server fails.
const PAUSE: Duration = Duration::from_millis(1);

/// Parameters of a closed-loop load.
#[derive(Debug, Clone, Copy)]
pub struct Closed {
    /// Number of clients, each with its own connection.
    pub clients: usize,
    /// Duration of the warm-up, which is not counted.
    pub warm_up: Duration,
    /// Duration of the measurement.
    pub duration: Duration,
}

/// Runs the load on the server at `address`, without credentials.
///
/// # Errors
/// As [`closed_with`].
pub async fn closed(address: &str, requests: &Requests, load: &Closed) -> Result<Measured, LoadError> {
    closed_with(address, &Credentials::default(), requests, load).await
}

/// Runs the load on the server at `address`, with credentials. Dropping the future ends the load.
///
/// # Errors
/// [`LoadError::Load`] for no clients or too many; [`LoadError::Client`] when the server cannot be reached, or the
/// credentials cannot be used. Error responses are counted in the result.
pub async fn closed_with(
    address: &str,
    credentials: &Credentials,
    requests: &Requests,
    load: &Closed,
) -> Result<Measured, LoadError> {
    if load.clients == 0 || load.clients > CLIENTS_MAX {
        return Err(LoadError::Load(format!("{} clients: from 1 to {CLIENTS_MAX} can call", load.clients)));
    }
    let connections = Connection::open(address, credentials, requests, load.clients).await?;
    let begin = Instant::now() + load.warm_up;
    let mut clients = JoinSet::new();
    for (index, connection) in connections.into_iter().enumerate() {
        // Each client starts with a different request.
        clients.spawn(client(connection, index as u64, begin, begin + load.duration));
    }
    tokio::time::sleep_until(begin.into()).await;
    let processor = processor_time();
    let mut measured = Measured { elapsed: load.duration, ..Measured::default() };
    while let Some(client) = clients.join_next().await {
        match client {
            Ok(client) => measured.merge(&client),
            // No task aborts a client, so this is a panic.
            Err(error) => {
                if let Ok(panic) = error.try_into_panic() {
                    std::panic::resume_unwind(panic);
                }
            }
        }
    }
    measured.processor = processor_time().saturating_sub(processor);
    Ok(measured)
}

/// Counts the responses between `begin` and `end`.
async fn client<S: Server>(mut server: S, first: u64, begin: Instant, end: Instant) -> Measured {
    let mut measured = Measured::default();
    let mut sent = Instant::now();
    let mut number = first;
    while sent < end {
        let answer = server.call(number, None).await;
        number += 1;
        let answered = Instant::now();
        let counts = answered >= begin && answered < end;
        match answer {
            Ok(()) if counts => {
                measured.latency.record(answered - sent);
                measured.in_time += 1;
            }
            Ok(()) => {}
            Err(code) => {
                if counts {
                    *measured.failed.entry(status(code)).or_default() += 1;
                }
                tokio::time::sleep(PAUSE).await;
                sent = Instant::now();
                continue;
            }
        }
        sent = answered;
    }
    measured
}
