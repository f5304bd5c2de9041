//! Ring formation: connects to the next rank, accepts the previous one and rejects all other connections.
//!
//! Each side of a connection sends a nonce and proves that it knows the job's secret, so a recorded handshake is
//! of no use. The nonces are public keys, from which the key of the frames follows in an encrypted ring
//! ([`super::seal`]). The proofs also say whether the ring is encrypted, so that both sides agree on it.
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use futures::stream::{FuturesUnordered, StreamExt};
use millrace_leaf::backoff::Backoff;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream, lookup_host};
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;

use super::frame::{Header, Kind, read_header, read_payload};
use super::seal::{Agreement, Seal};
use super::{Error, Formation, Options, WORLD_MAX};
use crate::join::dial;
use crate::proof::{NONCE_BYTES, PROOF_BYTES, is_valid, prove};

/// Connections that may be in their handshake at once. Of more, the oldest is closed: a neighbor needs milliseconds, and
/// a flood would otherwise hold all places.
const HANDSHAKES_MAX: usize = 64;
/// Deadline for a handshake. A connection that sends nothing is dropped after it.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);
/// Unanswered probes after which a link is gone, and the kernel's shortest interval between them.
const PROBES: u32 = 3;
const PROBE_MIN: Duration = Duration::from_secs(1);
/// First and longest pause between attempts to connect to the next rank.
const CONNECT_PAUSE: Duration = Duration::from_millis(10);
const CONNECT_PAUSE_MAX: Duration = Duration::from_millis(250);
/// Purposes of proofs.
const OF_ACCEPTING: &str = "millrace ring accepts";
const OF_CONNECTING: &str = "millrace ring connects";

/// A connection to a neighbor after its handshake.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) stream: TcpStream,
    /// The cipher of its frames, in an encrypted ring.
    pub(super) seal: Option<Seal>,
}

/// The two connections of a ring member.
#[derive(Debug)]
pub(super) struct Links {
    pub(super) next: Link,
    pub(super) prev: Link,
}

pub(super) fn check(formation: &Formation) -> Result<(), Error> {
    let world = formation.addresses.len();
    if world == 0 || world > WORLD_MAX || formation.rank >= world {
        return Err(Error::Invalid {
            reason: format!("rank {} of {world} is not a ring (1 to {WORLD_MAX} ranks)", formation.rank),
        });
    }
    Ok(())
}

pub(super) async fn form(
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
            link = &mut connect, if next.is_none() => next = Some(link),
            link = &mut accept, if prev.is_none() => prev = Some(link?),
            () = tokio::time::sleep_until(deadline) => {
                let rank = if prev.is_none() { prev_rank } else { next_rank };
                return Err(Error::Timeout {
                    rank,
                    address: formation.addresses[rank].clone(),
                    epoch: formation.epoch,
                    step: 0,
                    during: "the formation of the ring",
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

/// One connection of one epoch, with the nonces of its two sides.
struct Edge<'a> {
    epoch: u64,
    from: usize,
    to: usize,
    connecting: &'a [u8],
    accepting: &'a [u8],
    encrypted: bool,
}

impl Edge<'_> {
    fn with_parts<T>(&self, use_parts: impl FnOnce(&[&[u8]]) -> T) -> T {
        let place = [self.epoch, self.from as u64, self.to as u64].map(u64::to_le_bytes).concat();
        use_parts(&[&place, self.connecting, self.accepting, &[u8::from(self.encrypted)]])
    }

    fn prove(&self, secret: &str, purpose: &str) -> [u8; PROOF_BYTES] {
        self.with_parts(|parts| prove(secret.as_bytes(), purpose, parts))
    }

    fn is_proved(&self, secret: &str, purpose: &str, proof: &[u8]) -> bool {
        self.with_parts(|parts| is_valid(secret.as_bytes(), purpose, parts, proof))
    }

    /// The connection `stream` after the handshake, for the side with the part `own` of the key.
    fn link(&self, stream: TcpStream, own: Agreement, theirs: &[u8], secret: &str) -> Result<Link, String> {
        let seal = match self.encrypted {
            true => Some(self.with_parts(|parts| own.seal(theirs, secret, parts))?),
            false => None,
        };
        Ok(Link { stream, seal })
    }
}

/// Lets the kernel notice a neighbor whose machine or link is gone, while this rank waits for its data.
fn watch_link(stream: &TcpStream, silence: Duration) -> std::io::Result<()> {
    let probes = TcpKeepalive::new()
        .with_time((silence / 2).max(PROBE_MIN))
        .with_interval((silence / 2 / PROBES).max(PROBE_MIN))
        .with_retries(PROBES);
    SockRef::from(stream).set_tcp_keepalive(&probes)
}

/// Retries until the next rank accepts the connection; the caller sets the deadline.
async fn connect(formation: &Formation, to: usize, options: &Options) -> Link {
    let address = &formation.addresses[to];
    let header = Header {
        kind: Kind::Hello,
        rank: formation.rank as u16,
        epoch: formation.epoch,
        step: 0,
        bucket: to as u32,
        phase: formation.addresses.len() as u32,
    };
    let mut backoff = Backoff::new(CONNECT_PAUSE, CONNECT_PAUSE_MAX);
    let mut attempt = 0;
    loop {
        match greet(address, attempt, &header, options).await {
            Ok(link) => return link,
            Err(reason) => {
                tracing::debug!(epoch = formation.epoch, rank = to, %address, reason, "ring neighbour not ready");
            }
        }
        attempt += 1;
        sleep(backoff.pause()).await;
    }
}

async fn greet(address: &str, attempt: usize, header: &Header, options: &Options) -> Result<Link, String> {
    let found = lookup_host(address).await.map_err(|e| format!("look up its name: {e}"))?;
    let mut found: Vec<SocketAddr> = found.collect();
    // At one of them another server may answer: the next attempt begins with the next address.
    let first = attempt % found.len().max(1);
    found.rotate_left(first);
    let mut stream = dial(&found).await.map_err(|e| e.to_string())?;
    stream.set_nodelay(true).map_err(|e| e.to_string())?;
    watch_link(&stream, options.silence).map_err(|e| e.to_string())?;
    let own = Agreement::new()?;
    let nonce = *own.public();
    send(&mut stream, header, &nonce).await?;
    // No timeout here: the neighbor answers once it forms the same epoch. If it never does, the connection
    // breaks.
    let from_next = Header { rank: header.bucket as u16, ..*header };
    let challenge = Header { kind: Kind::Challenge, ..from_next };
    let answer = receive_payload(&mut stream, &challenge, NONCE_BYTES + PROOF_BYTES).await?;
    let (theirs, proof) = answer.split_at(NONCE_BYTES);
    let edge = Edge {
        epoch: header.epoch,
        from: usize::from(header.rank),
        to: header.bucket as usize,
        connecting: &nonce,
        accepting: theirs,
        encrypted: options.encrypt,
    };
    if !edge.is_proved(&options.secret, OF_ACCEPTING, proof) {
        return Err("wrong secret".to_owned());
    }
    let proof = edge.prove(&options.secret, OF_CONNECTING);
    send(&mut stream, &Header { kind: Kind::Proof, ..*header }, &proof).await?;
    receive_payload(&mut stream, &Header { kind: Kind::Welcome, ..from_next }, 0).await?;
    edge.link(stream, own, theirs, &options.secret)
}

async fn send(stream: &mut TcpStream, header: &Header, payload: &[u8]) -> Result<(), String> {
    let frame = [header.encode(payload).as_slice(), payload].concat();
    stream.write_all(&frame).await.map_err(|e| e.to_string())
}

/// The payload of the next frame, which must have this header and length.
async fn receive_payload(stream: &mut TcpStream, wanted: &Header, bytes: usize) -> Result<Vec<u8>, String> {
    let received = read_header(stream).await.map_err(|fault| format!("{fault:?}"))?;
    if received.header != *wanted || received.bytes != bytes {
        return Err(format!("unexpected frame {:?}", received.header));
    }
    let mut payload = Vec::new();
    read_payload(stream, &received, &mut payload).await.map_err(|fault| format!("{fault:?}"))?;
    Ok(payload)
}

/// Accepts connections until the expected rank has connected.
async fn accept(
    listener: &TcpListener,
    formation: &Formation,
    from: usize,
    options: &Options,
) -> Result<Link, Error> {
    let mut handshakes = FuturesUnordered::new();
    // Ends handshakes, oldest first. Those that have ended are cancelled.
    let mut oldest = VecDeque::<CancellationToken>::new();
    loop {
        tokio::select! {
            // A handshake that has ended goes before new connections.
            biased;
            Some(done) = handshakes.next(), if !handshakes.is_empty() => {
                if let Some(link) = done {
                    return Ok(link);
                }
            }
            accepted = listener.accept() => match accepted {
                Ok((stream, peer)) => {
                    oldest.retain(|handshake| !handshake.is_cancelled());
                    if oldest.len() >= HANDSHAKES_MAX
                        && let Some(handshake) = oldest.pop_front()
                    {
                        handshake.cancel();
                    }
                    let close = CancellationToken::new();
                    oldest.push_back(close.clone());
                    handshakes.push(async move {
                        let until = Instant::now() + HANDSHAKE_TIMEOUT;
                        let _ended = close.clone().drop_guard();
                        tokio::select! {
                            () = close.cancelled() => None,
                            received = timeout_at(until, receive(stream, formation, from, options)) => match received {
                                Ok(Ok(link)) => Some(link),
                                Ok(Err(reason)) => {
                                    tracing::debug!(epoch = formation.epoch, %peer, reason, "ring connection refused");
                                    None
                                }
                                Err(_) => None,
                            }
                        }
                    });
                }
                // Most likely out of file descriptors: retry, since others may be closed meanwhile.
                Err(error) => {
                    tracing::warn!(epoch = formation.epoch, %error, "ring accept failed");
                    sleep(Duration::from_millis(50)).await;
                }
            },
        }
    }
}

async fn receive(
    mut stream: TcpStream,
    formation: &Formation,
    from: usize,
    options: &Options,
) -> Result<Link, String> {
    stream.set_nodelay(true).map_err(|e| e.to_string())?;
    watch_link(&stream, options.silence).map_err(|e| e.to_string())?;
    let hello = Header {
        kind: Kind::Hello,
        rank: from as u16,
        epoch: formation.epoch,
        step: 0,
        bucket: formation.rank as u32,
        phase: formation.addresses.len() as u32,
    };
    let theirs = receive_payload(&mut stream, &hello, NONCE_BYTES).await?;
    let own = Agreement::new()?;
    let nonce = *own.public();
    let edge = Edge {
        epoch: formation.epoch,
        from,
        to: formation.rank,
        connecting: &theirs,
        accepting: &nonce,
        encrypted: options.encrypt,
    };
    let answer = Header { rank: formation.rank as u16, ..hello };
    let challenge = [nonce, edge.prove(&options.secret, OF_ACCEPTING)].concat();
    send(&mut stream, &Header { kind: Kind::Challenge, ..answer }, &challenge).await?;
    let proof = receive_payload(&mut stream, &Header { kind: Kind::Proof, ..hello }, PROOF_BYTES).await?;
    if !edge.is_proved(&options.secret, OF_CONNECTING, &proof) {
        return Err("wrong secret".to_owned());
    }
    send(&mut stream, &Header { kind: Kind::Welcome, ..answer }, &[]).await?;
    edge.link(stream, own, &theirs, &options.secret)
}

/// Proofs for tests that speak the protocol themselves.
#[cfg(test)]
pub(super) mod tests_support {
    use super::{Edge, OF_ACCEPTING, OF_CONNECTING, PROOF_BYTES};

    type Place = (u64, usize, usize);

    fn edge<'a>((epoch, from, to): Place, connecting: &'a [u8], accepting: &'a [u8]) -> Edge<'a> {
        Edge { epoch, from, to, connecting, accepting, encrypted: false }
    }

    pub(crate) fn connecting_proof(
        secret: &str,
        place: Place,
        connecting: &[u8],
        accepting: &[u8],
    ) -> [u8; PROOF_BYTES] {
        edge(place, connecting, accepting).prove(secret, OF_CONNECTING)
    }

    pub(crate) fn accepting_proof(
        secret: &str,
        place: Place,
        connecting: &[u8],
        accepting: &[u8],
    ) -> [u8; PROOF_BYTES] {
        edge(place, connecting, accepting).prove(secret, OF_ACCEPTING)
    }
}
