//! Ring formation: connects to the next rank, accepts the previous one and rejects all other connections. Partners of
//! recursive doubling connect in the same way, the lower rank to the higher one.
//!
//! Each side of a connection sends a nonce and proves that it knows the job's secret, so a recorded handshake is
//! of no use. The nonces are public keys, from which the key of the frames follows in an encrypted ring
//! ([`super::seal`]). The proofs also say whether the ring is encrypted, so that both sides agree on it.
//!
//! After the proofs, a rank offers shared memory to the next one, which answers whether it has mapped it
//! ([`super::offer`]). The offer is empty unless both may be on one machine.
use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use futures::stream::{FuturesUnordered, StreamExt};
use millrace_leaf::backoff::Backoff;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::AsyncWriteExt;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream, lookup_host};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::frame::{Header, Kind, read_header, read_payload};
use super::link::{ReceiveLink, SendLink};
use super::offer::{self, OFFER_BYTES, Offer, Offered};
use super::seal::{Agreement, Seal, TAG_BYTES};
use super::shared::{Reader, Writer};
use super::{Error, Formation, Options, WORLD_MAX, doubling};
use crate::join::dial;
use crate::proof::{NONCE_BYTES, PROOF_BYTES, is_valid, prove};

/// Connections that may be in their handshake at once. Of more, the oldest is closed: a neighbor needs milliseconds, and
/// a flood would otherwise hold all places.
const HANDSHAKES_MAX: usize = 64;
/// Deadline for a handshake. A connection that sends nothing is dropped after it.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the kernel may take to give memory for an offer. Under pressure that may be seconds, and the neighbor would
/// end the handshake: the connection then stays on TCP.
const MEMORY_TIMEOUT: Duration = Duration::from_secs(1);
/// Unanswered probes after which a link is gone, and the kernel's shortest interval between them.
const PROBES: u32 = 3;
const PROBE_MIN: Duration = Duration::from_secs(1);
/// First and longest pause between attempts to connect to the next rank.
const CONNECT_PAUSE: Duration = Duration::from_millis(10);
const CONNECT_PAUSE_MAX: Duration = Duration::from_millis(250);
/// Purposes of proofs.
const OF_ACCEPTING: &str = "millrace ring accepts";
const OF_CONNECTING: &str = "millrace ring connects";

/// The connection to a partner. Both sides send frames.
#[derive(Debug)]
pub(super) struct Partner {
    pub(super) rank: usize,
    pub(super) send: SendLink<OwnedWriteHalf>,
    pub(super) receive: ReceiveLink<OwnedReadHalf>,
}

/// The connections of a ring member.
#[derive(Debug)]
pub(super) struct Links {
    pub(super) next: SendLink,
    pub(super) prev: ReceiveLink,
    pub(super) partners: Vec<Partner>,
}

/// The use of a connection. Only the proofs and the first frame tell it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// From a rank to the next one.
    Ring,
    /// Between partners.
    Partner,
}

/// The other end of a connection that a rank needs.
#[derive(Debug, Clone, Copy)]
struct End {
    role: Role,
    rank: usize,
}

/// A connection after its handshake, with the ciphers of what this rank sends and receives.
struct Connection {
    stream: TcpStream,
    seals: Option<[Seal; 2]>,
    memory: Memory,
}

/// The shared memory of a connection, which has the direction of the ring.
enum Memory {
    None,
    ToNext(Writer),
    FromPrev(Reader),
}

impl Connection {
    /// The connection to the next rank.
    fn into_next(self) -> SendLink {
        let memory = match self.memory {
            Memory::ToNext(writer) => Some(writer),
            _ => None,
        };
        SendLink { stream: self.stream, seal: self.seals.map(|[sent, _]| sent), memory }
    }

    /// The connection from the previous rank.
    fn into_prev(self) -> ReceiveLink {
        let memory = match self.memory {
            Memory::FromPrev(reader) => Some(reader),
            _ => None,
        };
        ReceiveLink { stream: self.stream, seal: self.seals.map(|[_, received]| received), memory }
    }

    fn into_partner(self, rank: usize) -> Partner {
        let (read, write) = self.stream.into_split();
        let (sent, received) = self.seals.map(|[sent, received]| (sent, received)).unzip();
        let send = SendLink { stream: write, seal: sent, memory: None };
        Partner { rank, send, receive: ReceiveLink { stream: read, seal: received, memory: None } }
    }
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
    let (world, rank) = (formation.addresses.len(), formation.rank);
    let next = End { role: Role::Ring, rank: (rank + 1) % world };
    let prev = End { role: Role::Ring, rank: (rank + world - 1) % world };
    let partners = doubling::partners(rank, world).into_iter().map(|rank| End { role: Role::Partner, rank });
    let (lower, higher): (Vec<End>, Vec<End>) = partners.partition(|end| end.rank < rank);
    let accepting: Vec<End> = std::iter::once(prev).chain(lower).collect();
    let connecting: Vec<End> = std::iter::once(next).chain(higher).collect();
    let mut accepted: Vec<Option<Connection>> = accepting.iter().map(|_| None).collect();
    let mut connected: Vec<Option<Connection>> = connecting.iter().map(|_| None).collect();
    let accept = accept(listener, formation, &accepting, options, &mut accepted);
    let connect = connect_all(formation, &connecting, options, &mut connected);
    let both = async {
        tokio::join!(accept, connect);
    };
    tokio::select! {
        () = abort.cancelled() => return Err(Error::Aborted { epoch: formation.epoch }),
        // At the deadline, connections are missing.
        _ = timeout(options.form_timeout, both) => {}
    }
    let mut links = accepting.into_iter().zip(accepted).chain(connecting.into_iter().zip(connected));
    let (mut next, mut prev, mut partners) = (None, None, Vec::new());
    let missing = links.find_map(|(end, connection)| {
        let Some(connection) = connection else { return Some(end.rank) };
        match end.role {
            Role::Partner => partners.push(connection.into_partner(end.rank)),
            Role::Ring if prev.is_none() => prev = Some(connection.into_prev()),
            Role::Ring => next = Some(connection.into_next()),
        }
        None
    });
    match (missing, next, prev) {
        (None, Some(next), Some(prev)) => Ok(Links { next, prev, partners }),
        (missing, ..) => {
            let rank = missing.unwrap_or(rank);
            Err(Error::Timeout {
                rank,
                address: formation.addresses[rank].clone(),
                epoch: formation.epoch,
                step: 0,
                during: "the formation of the ring",
                waited: options.form_timeout,
            })
        }
    }
}

/// One connection of one epoch, with the nonces of its two sides.
struct Edge<'a> {
    role: Role,
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
        let kind = [u8::from(self.encrypted), u8::from(self.role == Role::Partner)];
        use_parts(&[&place, self.connecting, self.accepting, &kind])
    }

    fn prove(&self, secret: &str, purpose: &str) -> [u8; PROOF_BYTES] {
        self.with_parts(|parts| prove(secret.as_bytes(), purpose, parts))
    }

    fn is_proved(&self, secret: &str, purpose: &str, proof: &[u8]) -> bool {
        self.with_parts(|parts| is_valid(secret.as_bytes(), purpose, parts, proof))
    }

    /// The ciphers of the connecting and of the accepting side, for the side with the part `own` of the key.
    fn seals(&self, own: Agreement, theirs: &[u8], secret: &str) -> Result<Option<[Seal; 2]>, String> {
        match self.encrypted {
            true => self.with_parts(|parts| own.seals(theirs, secret, parts)).map(Some),
            false => Ok(None),
        }
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

/// The first frame of a connection from rank `from` to rank `to`.
fn hello(formation: &Formation, role: Role, from: usize, to: usize) -> Header {
    let kind = match role {
        Role::Ring => Kind::Hello,
        Role::Partner => Kind::Partner,
    };
    let phase = formation.addresses.len() as u32;
    Header { kind, rank: from as u16, epoch: formation.epoch, step: 0, bucket: to as u32, phase }
}

/// Connects to all of `ends`, each at its place in `connected`.
async fn connect_all(
    formation: &Formation,
    ends: &[End],
    options: &Options,
    connected: &mut [Option<Connection>],
) {
    let start = |(at, end): (usize, &End)| {
        let end = *end;
        async move { (at, connect(formation, end, options).await) }
    };
    let mut connecting: FuturesUnordered<_> = ends.iter().enumerate().map(start).collect();
    while let Some((at, connection)) = connecting.next().await {
        connected[at] = Some(connection);
    }
}

/// Retries until the rank accepts the connection; the caller sets the deadline.
async fn connect(formation: &Formation, to: End, options: &Options) -> Connection {
    let End { role, rank: to } = to;
    let address = &formation.addresses[to];
    let header = hello(formation, role, formation.rank, to);
    let mut backoff = Backoff::new(CONNECT_PAUSE, CONNECT_PAUSE_MAX);
    let mut attempt = 0;
    loop {
        match greet(address, attempt, (&header, role), options).await {
            Ok(connection) => return connection,
            Err(reason) => {
                tracing::debug!(epoch = formation.epoch, rank = to, %address, reason, "ring neighbour not ready");
            }
        }
        attempt += 1;
        sleep(backoff.pause()).await;
    }
}

async fn greet(
    address: &str,
    attempt: usize,
    (header, role): (&Header, Role),
    options: &Options,
) -> Result<Connection, String> {
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
        role,
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
    let mut seals = edge.seals(own, theirs, &options.secret)?;
    let memory = match role {
        Role::Ring => offer_memory(&mut stream, &mut seals, header, options).await?,
        Role::Partner => Memory::None,
    };
    Ok(Connection { stream, seals, memory })
}

/// Offers shared memory to the next rank, and waits for its answer; the caller sets the deadline.
async fn offer_memory(
    stream: &mut TcpStream,
    seals: &mut Option<[Seal; 2]>,
    header: &Header,
    options: &Options,
) -> Result<Memory, String> {
    let (epoch, rank) = (header.epoch, header.bucket);
    let offered = match offer::size(options) {
        None => Err("it is off, or no frame is large enough".to_owned()),
        Some(_) if !is_local(stream) => Err("its address is not that of this rank".to_owned()),
        Some(size) => match timeout(MEMORY_TIMEOUT, spawn_blocking(move || offer::create(size))).await {
            Ok(created) => created.unwrap_or_else(|error| Err(error.to_string())),
            Err(_) => Err(format!("the kernel gave none within {} s", MEMORY_TIMEOUT.as_secs())),
        },
    };
    let offered = offered
        .inspect_err(|reason| tracing::debug!(epoch, rank, reason, "no shared memory for the next rank"))
        .ok();
    let (sent, received) = seals.as_mut().map(|[sent, received]| (sent, received)).unzip();
    let payload = offered.as_ref().map_or([0; OFFER_BYTES], |offered| offered.offer.encode());
    send_sealed(stream, sent, &Header { kind: Kind::Offer, ..*header }, payload.to_vec()).await?;
    let answer = Header { kind: Kind::Answer, rank: header.bucket as u16, ..*header };
    let is_taken = receive_sealed(stream, received, &answer, 1).await? == [1];
    Ok(match offered {
        Some(Offered { offer, writer, file }) if is_taken => {
            // Both sides have their mappings.
            drop(file);
            tracing::debug!(epoch, rank, bytes = offer.size, "next rank shares memory");
            Memory::ToNext(writer)
        }
        _ => Memory::None,
    })
}

/// Opens the shared memory that the previous rank offers, and answers whether it is open.
async fn take_memory(
    stream: &mut TcpStream,
    seals: &mut Option<[Seal; 2]>,
    (hello, answer): (&Header, &Header),
    options: &Options,
) -> Result<Memory, String> {
    let (sent, received) = seals.as_mut().map(|[sent, received]| (sent, received)).unzip();
    let payload =
        receive_sealed(stream, received, &Header { kind: Kind::Offer, ..*hello }, OFFER_BYTES).await?;
    let offer = payload.first_chunk().and_then(Offer::decode).filter(|_| options.shared_memory);
    let memory = match offer.map(|offer| offer.open()) {
        Some(Ok(reader)) => Memory::FromPrev(reader),
        Some(Err(reason)) => {
            let (epoch, rank) = (hello.epoch, hello.rank);
            tracing::debug!(epoch, rank, reason, "no shared memory with the previous rank");
            Memory::None
        }
        None => Memory::None,
    };
    let is_taken = matches!(memory, Memory::FromPrev(_));
    let answer = Header { kind: Kind::Answer, ..*answer };
    send_sealed(stream, sent, &answer, vec![u8::from(is_taken)]).await?;
    Ok(memory)
}

/// Whether both ends of a connection may be on one machine: it does not leave its address.
fn is_local(stream: &TcpStream) -> bool {
    let (own, theirs) = (stream.local_addr(), stream.peer_addr());
    // A machine's own name often leads to another address of loopback.
    let is_one = |own: IpAddr, theirs: IpAddr| own == theirs || (own.is_loopback() && theirs.is_loopback());
    own.is_ok_and(|own| theirs.is_ok_and(|theirs| is_one(own.ip(), theirs.ip())))
}

/// Sends a frame after the proofs, encrypted in an encrypted ring.
async fn send_sealed(
    stream: &mut TcpStream,
    seal: Option<&mut Seal>,
    header: &Header,
    mut payload: Vec<u8>,
) -> Result<(), String> {
    if let Some(seal) = seal {
        seal.seal(&header.bound(payload.len() + TAG_BYTES, false), &mut payload)?;
    }
    send(stream, header, &payload).await
}

/// The payload of the next frame after the proofs, which must have this header and length.
async fn receive_sealed(
    stream: &mut TcpStream,
    seal: Option<&mut Seal>,
    wanted: &Header,
    bytes: usize,
) -> Result<Vec<u8>, String> {
    let carried = bytes + seal.as_ref().map_or(0, |_| TAG_BYTES);
    let mut payload = receive_payload(stream, wanted, carried).await?;
    if let Some(seal) = seal {
        seal.open(&wanted.bound(carried, false), &mut payload)?;
    }
    Ok(payload)
}

async fn send(stream: &mut TcpStream, header: &Header, payload: &[u8]) -> Result<(), String> {
    let frame = [header.encode(payload).as_slice(), payload].concat();
    stream.write_all(&frame).await.map_err(|e| e.to_string())
}

/// The payload of the next frame, which must have this header and length.
async fn receive_payload(stream: &mut TcpStream, wanted: &Header, bytes: usize) -> Result<Vec<u8>, String> {
    let received = read_header(stream).await.map_err(|fault| format!("{fault:?}"))?;
    if received.header != *wanted || received.bytes != bytes || received.is_shared {
        return Err(format!("unexpected frame {:?}", received.header));
    }
    let mut payload = Vec::new();
    read_payload(stream, &received, &mut payload).await.map_err(|fault| format!("{fault:?}"))?;
    Ok(payload)
}

/// Accepts connections until all of `ends` have connected, each at its place in `accepted`.
async fn accept(
    listener: &TcpListener,
    formation: &Formation,
    ends: &[End],
    options: &Options,
    accepted: &mut [Option<Connection>],
) {
    let mut handshakes = FuturesUnordered::new();
    // Ends handshakes, oldest first. Those that have ended are cancelled.
    let mut oldest = VecDeque::<CancellationToken>::new();
    while accepted.iter().any(Option::is_none) {
        tokio::select! {
            // A handshake that has ended goes before new connections.
            biased;
            Some(done) = handshakes.next(), if !handshakes.is_empty() => {
                if let Some((at, connection)) = done {
                    // A rank connects again where its former connection broke.
                    accepted[at] = Some(connection);
                }
            }
            new = listener.accept() => match new {
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
                            received = timeout_at(until, receive(stream, formation, ends, options)) => match received {
                                Ok(Ok(found)) => Some(found),
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

/// The accepted connection `stream` after its handshake, and its place in `ends`.
async fn receive(
    mut stream: TcpStream,
    formation: &Formation,
    ends: &[End],
    options: &Options,
) -> Result<(usize, Connection), String> {
    stream.set_nodelay(true).map_err(|e| e.to_string())?;
    watch_link(&stream, options.silence).map_err(|e| e.to_string())?;
    let received = read_header(&mut stream).await.map_err(|fault| format!("{fault:?}"))?;
    let is_from = |end: &End| hello(formation, end.role, end.rank, formation.rank) == received.header;
    let (at, hello) = match ends.iter().position(is_from) {
        Some(at) if received.bytes == NONCE_BYTES && !received.is_shared => (at, received.header),
        _ => return Err(format!("unexpected frame {:?}", received.header)),
    };
    let mut theirs = Vec::new();
    read_payload(&mut stream, &received, &mut theirs).await.map_err(|fault| format!("{fault:?}"))?;
    let own = Agreement::new()?;
    let nonce = *own.public();
    let edge = Edge {
        role: ends[at].role,
        epoch: formation.epoch,
        from: ends[at].rank,
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
    let seals = edge.seals(own, &theirs, &options.secret)?;
    let mut seals = seals.map(|[received, sent]| [sent, received]);
    let memory = match ends[at].role {
        Role::Ring => take_memory(&mut stream, &mut seals, (&hello, &answer), options).await?,
        Role::Partner => Memory::None,
    };
    Ok((at, Connection { stream, seals, memory }))
}

/// Proofs for tests that speak the protocol themselves.
#[cfg(test)]
pub(super) mod tests_support {
    use super::{Edge, OF_ACCEPTING, OF_CONNECTING, PROOF_BYTES, Role};

    type Place = (u64, usize, usize);

    /// The proof of a partner that connects.
    pub(crate) fn partner_proof(
        secret: &str,
        place: Place,
        connecting: &[u8],
        accepting: &[u8],
    ) -> [u8; PROOF_BYTES] {
        let edge = Edge { role: Role::Partner, ..edge(place, connecting, accepting) };
        edge.prove(secret, OF_CONNECTING)
    }

    fn edge<'a>((epoch, from, to): Place, connecting: &'a [u8], accepting: &'a [u8]) -> Edge<'a> {
        Edge { role: Role::Ring, epoch, from, to, connecting, accepting, encrypted: false }
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
