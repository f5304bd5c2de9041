//! Ring formation: connects to the next rank, accepts the previous one and rejects all other connections.
use std::net::SocketAddr;
use std::time::Duration;

use futures::stream::{FuturesUnordered, StreamExt};
use millrace_leaf::backoff::Backoff;
use sha2::{Digest, Sha256};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::frame::{Header, Kind, read_header, read_payload};
use super::{Error, Formation, Options, WORLD_MAX};

/// Connections that may be in their handshake at once; more wait in the listen queue.
const HANDSHAKES_MAX: usize = 64;
/// Deadline for a handshake. A connection that sends nothing is dropped after it.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);
/// First and longest pause between attempts to connect to the next rank.
const CONNECT_PAUSE: Duration = Duration::from_millis(10);
const CONNECT_PAUSE_MAX: Duration = Duration::from_millis(250);
const PROOF_BYTES: usize = 32;

/// The two connections of a ring member.
#[derive(Debug)]
pub(crate) struct Links {
    pub(crate) next: TcpStream,
    pub(crate) prev: TcpStream,
}

pub(crate) fn check(formation: &Formation) -> Result<(), Error> {
    let world = formation.addresses.len();
    if world == 0 || world > WORLD_MAX || formation.rank >= world {
        return Err(Error::Invalid {
            reason: format!("rank {} of {world} is not a ring (1 to {WORLD_MAX} ranks)", formation.rank),
        });
    }
    Ok(())
}

pub(crate) async fn form(
    listener: &TcpListener,
    formation: &Formation,
    options: &Options,
    abort: &CancellationToken,
) -> Result<Links, Error> {
    let world = formation.addresses.len();
    let next_rank = (formation.rank + 1) % world;
    let prev_rank = (formation.rank + world - 1) % world;
    let deadline = Instant::now() + options.form_timeout;
    let connect = connect(formation, next_rank, options);
    let accept = accept(listener, formation, prev_rank, options);
    tokio::pin!(connect, accept);
    let (mut next, mut prev) = (None, None);
    while next.is_none() || prev.is_none() {
        tokio::select! {
            () = abort.cancelled() => return Err(Error::Aborted { epoch: formation.epoch }),
            stream = &mut connect, if next.is_none() => next = Some(stream),
            stream = &mut accept, if prev.is_none() => prev = Some(stream?),
            () = tokio::time::sleep_until(deadline) => {
                let rank = if prev.is_none() { prev_rank } else { next_rank };
                return Err(Error::Timeout {
                    rank,
                    address: formation.addresses[rank],
                    epoch: formation.epoch,
                    step: 0,
                    waited: options.form_timeout,
                });
            }
        }
    }
    match (next, prev) {
        (Some(next), Some(prev)) => Ok(Links { next, prev }),
        _ => Err(Error::Aborted { epoch: formation.epoch }),
    }
}

/// Proves knowledge of the secret for one edge of one epoch. A proof that an attacker observes is useless for
/// any other edge or epoch.
pub(super) fn proof(secret: &str, epoch: u64, from: usize, to: usize) -> [u8; PROOF_BYTES] {
    let mut digest = Sha256::new();
    digest.update(b"millrace ring\0");
    digest.update((secret.len() as u64).to_le_bytes());
    digest.update(secret.as_bytes());
    digest.update(epoch.to_le_bytes());
    digest.update((from as u64).to_le_bytes());
    digest.update((to as u64).to_le_bytes());
    digest.finalize().into()
}

/// Retries until the next rank accepts the connection; the caller sets the deadline.
async fn connect(formation: &Formation, to: usize, options: &Options) -> TcpStream {
    let address = formation.addresses[to];
    let header = Header {
        kind: Kind::Hello,
        rank: formation.rank as u16,
        epoch: formation.epoch,
        step: 0,
        bucket: to as u32,
        phase: formation.addresses.len() as u32,
    };
    let payload = proof(&options.secret, formation.epoch, formation.rank, to);
    let mut backoff = Backoff::new(CONNECT_PAUSE, CONNECT_PAUSE_MAX);
    loop {
        match greet(address, &header, &payload).await {
            Ok(stream) => return stream,
            Err(reason) => {
                tracing::debug!(epoch = formation.epoch, rank = to, %address, reason, "ring neighbour not ready");
            }
        }
        sleep(backoff.pause()).await;
    }
}

async fn greet(address: SocketAddr, header: &Header, payload: &[u8]) -> Result<TcpStream, String> {
    let mut stream = timeout(HANDSHAKE_TIMEOUT, TcpStream::connect(address))
        .await
        .map_err(|_| "connect timed out".to_owned())?
        .map_err(|e| e.to_string())?;
    stream.set_nodelay(true).map_err(|e| e.to_string())?;
    let mut hello = header.encode(payload).to_vec();
    hello.extend_from_slice(payload);
    stream.write_all(&hello).await.map_err(|e| e.to_string())?;
    // No timeout here: the neighbor answers once it forms the same epoch. If it never does, the connection
    // breaks.
    let answer = read_header(&mut stream).await.map_err(|fault| format!("{fault:?}"))?;
    let expected = Header { kind: Kind::Welcome, rank: header.bucket as u16, ..*header };
    if answer.header != expected || answer.bytes != 0 {
        return Err(format!("unexpected answer {:?}", answer.header));
    }
    Ok(stream)
}

/// Accepts connections until the expected rank has connected.
async fn accept(
    listener: &TcpListener,
    formation: &Formation,
    from: usize,
    options: &Options,
) -> Result<TcpStream, Error> {
    let mut handshakes = FuturesUnordered::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if handshakes.len() < HANDSHAKES_MAX => match accepted {
                Ok((stream, peer)) => handshakes.push(async move {
                    let until = Instant::now() + HANDSHAKE_TIMEOUT;
                    match timeout_at(until, receive(stream, formation, from, options)).await {
                        Ok(Ok(stream)) => Some(stream),
                        Ok(Err(reason)) => {
                            tracing::debug!(epoch = formation.epoch, %peer, reason, "ring connection refused");
                            None
                        }
                        Err(_) => None,
                    }
                }),
                // Most likely out of file descriptors: retry, since others may be closed meanwhile.
                Err(error) => {
                    tracing::warn!(epoch = formation.epoch, %error, "ring accept failed");
                    sleep(Duration::from_millis(50)).await;
                }
            },
            Some(done) = handshakes.next(), if !handshakes.is_empty() => {
                if let Some(stream) = done {
                    return Ok(stream);
                }
            }
        }
    }
}

async fn receive(
    mut stream: TcpStream,
    formation: &Formation,
    from: usize,
    options: &Options,
) -> Result<TcpStream, String> {
    stream.set_nodelay(true).map_err(|e| e.to_string())?;
    let hello = read_header(&mut stream).await.map_err(|fault| format!("{fault:?}"))?;
    let expected = Header {
        kind: Kind::Hello,
        rank: from as u16,
        epoch: formation.epoch,
        step: 0,
        bucket: formation.rank as u32,
        phase: formation.addresses.len() as u32,
    };
    if hello.header != expected || hello.bytes != PROOF_BYTES {
        return Err(format!("unexpected greeting {:?}", hello.header));
    }
    let mut payload = Vec::new();
    read_payload(&mut stream, &hello, &mut payload).await.map_err(|fault| format!("{fault:?}"))?;
    // Digests need no constant-time comparison: a proof is valid for one edge of one epoch only.
    if payload != proof(&options.secret, formation.epoch, from, formation.rank) {
        return Err("wrong secret".to_owned());
    }
    let welcome = Header { kind: Kind::Welcome, rank: formation.rank as u16, ..expected };
    stream.write_all(&welcome.encode(&[])).await.map_err(|e| e.to_string())?;
    Ok(stream)
}
