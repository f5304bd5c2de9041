//! The ring of one membership epoch: sums and state transfer.
use std::future::{Future, pending};
use std::ops::Range;
use std::time::Duration;

use futures::future::join_all;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Runtime;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::doubling::Action;
use super::element::{self, Dtype, Element};
use super::form::{Links, Partner};
use super::frame::{Fault, HEADER_BYTES, Header, Kind, NOBODY, PAYLOAD_BYTES_MAX, Received, read_header};
use super::link::{ReceiveLink, SendLink};
use super::seal::TAG_BYTES;
use super::shared::{Reader, Writer};
use super::{Error, Formation, Options, doubling};

/// Size of the pieces of a state, so that every rank forwards while it receives.
const STATE_PIECE_BYTES: usize = 1 << 20;

/// The connections to the two neighbors and to the partners, and the operations over them.
///
/// Every rank must call the same operations with the same arguments (lengths, steps, source). A ring is
/// unusable after its first error; dropping it closes the connections.
#[derive(Debug)]
pub struct Ring<'a> {
    runtime: &'a Runtime,
    links: Option<Links>,
    edge: Edge,
    bucket_elements_max: usize,
    doubling_bytes_max: usize,
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
    failed: bool,
}

impl<'a> Ring<'a> {
    pub(super) fn new(
        runtime: &'a Runtime,
        links: Option<Links>,
        formation: &Formation,
        options: &Options,
        abort: CancellationToken,
    ) -> Ring<'a> {
        Ring {
            runtime,
            links,
            edge: Edge {
                formation: formation.clone(),
                timeout: options.exchange_timeout,
                grace: (options.exchange_timeout / 4).min(Duration::from_secs(1)),
                abort,
            },
            bucket_elements_max: options.bucket_elements_max.clamp(1, (PAYLOAD_BYTES_MAX - TAG_BYTES) / 8),
            doubling_bytes_max: options.doubling_bytes_max.min(PAYLOAD_BYTES_MAX - TAG_BYTES),
            outgoing: Vec::new(),
            incoming: Vec::new(),
            failed: false,
        }
    }

    /// This process's rank.
    pub fn rank(&self) -> usize {
        self.edge.formation.rank
    }

    /// How many ranks the ring has.
    pub fn world(&self) -> usize {
        self.edge.formation.addresses.len()
    }

    /// The membership epoch.
    pub fn epoch(&self) -> u64 {
        self.edge.formation.epoch
    }

    /// Bytes that this rank has sent to the next one and received from the previous one through shared memory; `None`
    /// for a direction without shared memory.
    pub fn shared_bytes(&self) -> [Option<u64>; 2] {
        let Some(Links { next, prev, .. }) = &self.links else { return [None; 2] };
        [next.memory.as_ref().map(Writer::written), prev.memory.as_ref().map(Reader::copied)]
    }

    /// An address in each mapping of shared memory, for tests.
    #[cfg(test)]
    pub(super) fn memory_addresses(&self) -> Vec<usize> {
        let Some(Links { next, prev, .. }) = &self.links else { return Vec::new() };
        let sent = next.memory.as_ref().map(Writer::address);
        sent.into_iter().chain(prev.memory.as_ref().map(Reader::address)).collect()
    }

    /// Replaces `values` by the element-wise sum over all ranks.
    ///
    /// Every rank gets the same bits, whatever the order of arrival. Sums of `i64` are exact. Sums of `f32` depend on
    /// the number of ranks, and on whether the vector is small: the order of their additions follows from both. On an
    /// error `values` is unspecified; some ranks may have completed.
    pub fn all_reduce<T: Element>(&mut self, step: u64, values: &mut [T]) -> Result<(), Error> {
        self.usable()?;
        let Some(links) = &mut self.links else { return Ok(()) };
        let (edge, outgoing, incoming) = (&self.edge, &mut self.outgoing, &mut self.incoming);
        let bucket_elements_max = self.bucket_elements_max;
        let is_small = values.len() * T::BYTES <= self.doubling_bytes_max;
        let result = self.runtime.block_on(async {
            if is_small && !values.is_empty() {
                return edge.reduce_small(links, step, values, outgoing, incoming).await;
            }
            for (bucket, part) in values.chunks_mut(bucket_elements_max).enumerate() {
                let bucket = u32::try_from(bucket).map_err(|_| Error::Invalid {
                    reason: format!("vector needs more than {} buckets", u32::MAX),
                })?;
                edge.reduce_bucket(links, step, bucket, part, outgoing, incoming).await?;
            }
            Ok(())
        });
        self.close_on_error(result)
    }

    /// Sends the source's bytes to every other rank. The rank `source` passes `Some(state)` and gets `None`;
    /// the others pass `None` and get the state.
    ///
    /// Rejects a state over `bytes_max` before allocating memory for it.
    pub fn broadcast(
        &mut self,
        step: u64,
        source: usize,
        state: Option<&[u8]>,
        bytes_max: u64,
    ) -> Result<Option<Vec<u8>>, Error> {
        self.usable()?;
        if source >= self.world() || (source == self.rank()) != state.is_some() {
            return Err(Error::Invalid {
                reason: format!("rank {} cannot broadcast from rank {source}", self.rank()),
            });
        }
        let Some(links) = &mut self.links else { return Ok(None) };
        let (edge, incoming) = (&self.edge, &mut self.incoming);
        let result = self.runtime.block_on(async {
            match state {
                Some(state) => edge.send_state(links, step, state).await.map(|()| None),
                None => edge.relay_state(links, step, source, bytes_max, incoming).await.map(Some),
            }
        });
        self.close_on_error(result)
    }

    /// Whether no operation can succeed any more: one has failed, or the membership epoch is over.
    pub fn is_over(&self) -> bool {
        self.failed || self.edge.abort.is_cancelled()
    }

    /// The error of an operation after the end.
    pub fn over(&self) -> Error {
        Error::Aborted { epoch: self.epoch() }
    }

    fn usable(&self) -> Result<(), Error> {
        if self.is_over() { Err(self.over()) } else { Ok(()) }
    }

    fn close_on_error<T>(&mut self, result: Result<T, Error>) -> Result<T, Error> {
        if result.is_err() {
            self.failed = true;
            self.links = None;
        }
        result
    }
}

/// The parameters of an exchange besides the connections.
#[derive(Debug)]
struct Edge {
    formation: Formation,
    timeout: Duration,
    grace: Duration,
    abort: CancellationToken,
}

/// The connections of an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// To the next rank, from the previous one.
    Ring,
    /// To and from the partner at this place in [`Links::partners`].
    Partner(usize),
}

/// One exchange of an operation.
#[derive(Debug, Clone, Copy)]
struct Turn {
    step: u64,
    way: Way,
    /// How long it may take.
    limit: Duration,
}

/// The cause of a failed exchange, as this rank sees it: "next" receives from it, "prev" sends to it. A partner is both.
enum Cause {
    Aborted,
    PrevLost(String),
    PrevProtocol(String),
    PrevSilent,
    NextLost(String),
    NextStuck,
    /// Rank `by` named the missing rank.
    Told {
        culprit: u32,
        by: usize,
    },
}

/// A failed exchange.
struct Broken {
    cause: Cause,
    /// Whether this rank's frame has left as a whole.
    sent: bool,
}

impl Edge {
    fn world(&self) -> usize {
        self.formation.addresses.len()
    }

    fn next_rank(&self) -> usize {
        (self.formation.rank + 1) % self.world()
    }

    fn prev_rank(&self) -> usize {
        (self.formation.rank + self.world() - 1) % self.world()
    }

    fn header(&self, kind: Kind, rank: usize, step: u64, bucket: u32, phase: usize) -> Header {
        Header { kind, rank: rank as u16, epoch: self.formation.epoch, step, bucket, phase: phase as u32 }
    }

    /// Reduce-scatter, then all-gather.
    async fn reduce_bucket<T: Element>(
        &self,
        links: &mut Links,
        step: u64,
        bucket: u32,
        values: &mut [T],
        outgoing: &mut Vec<u8>,
        incoming: &mut Vec<u8>,
    ) -> Result<(), Error> {
        let (world, rank) = (self.world(), self.formation.rank);
        let (reduce, gather) = match T::DTYPE {
            Dtype::I64 => (Kind::Reduce, Kind::Gather),
            Dtype::F32 => (Kind::ReduceF32, Kind::GatherF32),
        };
        for kind in [reduce, gather] {
            // After reduce-scatter, rank r holds the complete chunk r + 1.
            let first = if kind == reduce { rank } else { rank + 1 };
            for phase in 0..world - 1 {
                let give = chunk(values.len(), (first + world - phase) % world, world);
                let take = chunk(values.len(), (first + 2 * world - phase - 1) % world, world);
                element::write(&values[give], outgoing);
                let out = self.header(kind, rank, step, bucket, phase);
                let expected = self.header(kind, self.prev_rank(), step, bucket, phase);
                let bytes = take.len() * T::BYTES;
                self.exchange(links, step, Some((&out, outgoing)), Some((&expected, bytes)), incoming)
                    .await?;
                match kind == reduce {
                    true => element::add(&mut values[take], incoming),
                    // A complete sum replaces the local value.
                    false => element::read(&mut values[take], incoming),
                }
            }
        }
        Ok(())
    }

    /// Recursive doubling, in one frame per stage.
    async fn reduce_small<T: Element>(
        &self,
        links: &mut Links,
        step: u64,
        values: &mut [T],
        outgoing: &mut Vec<u8>,
        incoming: &mut Vec<u8>,
    ) -> Result<(), Error> {
        let rank = self.formation.rank;
        let kind = match T::DTYPE {
            Dtype::I64 => Kind::Double,
            Dtype::F32 => Kind::DoubleF32,
        };
        let bytes = values.len() * T::BYTES;
        for stage in doubling::stages(rank, self.world()) {
            let at = links.partners.iter().position(|partner| partner.rank == stage.partner);
            // Two ranks are neighbors in both directions.
            let way = at.map_or(Way::Ring, Way::Partner);
            let turn = Turn { step, way, limit: self.timeout.saturating_mul(stage.patience) };
            let own = self.header(kind, rank, step, 0, stage.phase);
            let theirs = self.header(kind, stage.partner, step, 0, stage.phase);
            let (sends, receives) = (stage.action.sends(), stage.action.receives());
            if sends {
                element::write(values, outgoing);
            }
            let out = sends.then_some((&own, outgoing.as_slice()));
            let expected = receives.then_some((&theirs, bytes));
            self.exchange_in(links, turn, out, expected, incoming).await?;
            match stage.action {
                Action::Give => {}
                Action::Add | Action::Swap => element::merge(values, incoming),
                Action::Copy => element::read(values, incoming),
            }
        }
        Ok(())
    }

    async fn send_state(&self, links: &mut Links, step: u64, state: &[u8]) -> Result<(), Error> {
        let total = (state.len() as u64).to_le_bytes();
        let pieces = std::iter::once(&total[..]).chain(state.chunks(STATE_PIECE_BYTES));
        let mut unused = Vec::new();
        for (phase, piece) in pieces.enumerate() {
            let out = self.header(Kind::State, self.formation.rank, step, 0, phase);
            self.exchange(links, step, Some((&out, piece)), None, &mut unused).await?;
        }
        Ok(())
    }

    async fn relay_state(
        &self,
        links: &mut Links,
        step: u64,
        source: usize,
        bytes_max: u64,
        incoming: &mut Vec<u8>,
    ) -> Result<Vec<u8>, Error> {
        let mut unused = Vec::new();
        let mut state = Vec::new();
        let (mut total, mut phase) = (None, 0usize);
        while total.is_none_or(|total: usize| state.len() < total) {
            let bytes = total.map_or(8, |total| (total - state.len()).min(STATE_PIECE_BYTES));
            let expected = self.header(Kind::State, self.prev_rank(), step, 0, phase);
            self.exchange(links, step, None, Some((&expected, bytes)), incoming).await?;
            if self.next_rank() != source {
                let out = self.header(Kind::State, self.formation.rank, step, 0, phase);
                self.exchange(links, step, Some((&out, incoming)), None, &mut unused).await?;
            }
            if total.is_some() {
                state.extend_from_slice(incoming);
            } else {
                let mut word = [0u8; 8];
                word.copy_from_slice(incoming);
                let announced = u64::from_le_bytes(word);
                if announced > bytes_max {
                    return Err(Error::TooLarge { bytes: announced, limit: bytes_max });
                }
                total = Some(announced as usize);
                state.reserve_exact(announced as usize);
            }
            phase += 1;
        }
        Ok(state)
    }

    /// Sends one frame to the next rank and receives one from the previous rank concurrently; either may be absent.
    async fn exchange(
        &self,
        links: &mut Links,
        step: u64,
        out: Option<(&Header, &[u8])>,
        expected: Option<(&Header, usize)>,
        into: &mut Vec<u8>,
    ) -> Result<(), Error> {
        let turn = Turn { step, way: Way::Ring, limit: self.timeout };
        self.exchange_in(links, turn, out, expected, into).await
    }

    /// Sends one frame and receives one frame concurrently, over the connections of `turn`; either may be absent.
    async fn exchange_in(
        &self,
        links: &mut Links,
        turn: Turn,
        out: Option<(&Header, &[u8])>,
        expected: Option<(&Header, usize)>,
        into: &mut Vec<u8>,
    ) -> Result<(), Error> {
        let deadline = Instant::now() + turn.limit;
        let Links { next, prev, partners } = &mut *links;
        let done = match turn.way {
            Way::Ring => self.transfer((next, prev), pending(), deadline, out, expected, into).await,
            Way::Partner(at) => {
                let Partner { send, receive, .. } = &mut partners[at];
                self.transfer((send, receive), self.told(prev), deadline, out, expected, into).await
            }
        };
        let Err(broken) = done else { return Ok(()) };
        let kind = out.map(|(header, _)| header.kind).or(expected.map(|(header, _)| header.kind));
        let during =
            if kind == Some(Kind::State) { "the transfer of the state" } else { "the sum of the gradients" };
        Err(self.settle(links, turn, during, broken).await)
    }

    /// The exchange itself. It ends early with the cause that `told` returns.
    async fn transfer<W: AsyncWrite + Unpin, R: AsyncRead + Unpin>(
        &self,
        (next, prev): (&mut SendLink<W>, &mut ReceiveLink<R>),
        told: impl Future<Output = Cause>,
        deadline: Instant,
        out: Option<(&Header, &[u8])>,
        expected: Option<(&Header, usize)>,
        into: &mut Vec<u8>,
    ) -> Result<(), Broken> {
        let mut sent = out.is_none();
        let mut received = expected.is_none();
        let mut next_lost = false;
        let send = send_frame(next, out);
        let receive = receive_frame(prev, expected, into);
        tokio::pin!(send, receive, told);
        let cause = loop {
            if sent && received {
                return Ok(());
            }
            tokio::select! {
                biased;
                () = self.abort.cancelled() => break Cause::Aborted,
                result = &mut receive, if !received => match result {
                    Ok(()) => received = true,
                    Err(cause) => break cause,
                },
                result = &mut send, if !sent => match result {
                    Ok(()) => sent = true,
                    // The next rank may have closed because another rank is missing. The previous rank
                    // reports that; a partner has sent its report before it closed.
                    Err(reason) => {
                        next_lost = true;
                        break match received {
                            true => Cause::NextLost(reason),
                            false => match timeout(self.grace, &mut receive).await {
                                Ok(Err(cause)) => cause,
                                _ => Cause::NextLost(reason),
                            },
                        };
                    }
                },
                cause = &mut told => break cause,
                () = sleep_until(deadline) => break match received {
                    true => Cause::NextStuck,
                    false => Cause::PrevSilent,
                },
            }
        };
        // An abort frame can only follow a complete frame.
        let upstream = !matches!(cause, Cause::Aborted | Cause::NextStuck);
        if !sent && upstream && !next_lost {
            sent = matches!(timeout(self.grace, &mut send).await, Ok(Ok(())));
        }
        Err(Broken { cause, sent })
    }

    /// Waits until the previous rank names a missing rank. While this rank exchanges with a partner, any other frame
    /// belongs to a later operation, and the end of the connection to a rank that needs no more sums: the wait then
    /// never ends, and the partner decides.
    async fn told(&self, prev: &mut ReceiveLink) -> Cause {
        let overhead = prev.overhead();
        let mut head = [0u8; HEADER_BYTES];
        let received = match prev.stream.peek(&mut head).await {
            Ok(HEADER_BYTES) => Header::decode(&head).ok(),
            _ => None,
        };
        let is_abort = received.is_some_and(|received| {
            let header = received.header;
            header.kind == Kind::Abort && header.epoch == self.formation.epoch && received.bytes == overhead
        });
        if is_abort && let Ok(received) = prev.read_frame(&mut Vec::new()).await {
            return Cause::Told { culprit: received.header.bucket, by: self.prev_rank() };
        }
        pending().await
    }

    /// Tells the other ranks which rank is missing and turns the cause into an error.
    async fn settle(&self, links: &mut Links, turn: Turn, during: &'static str, broken: Broken) -> Error {
        let Turn { step, way, limit } = turn;
        let Broken { cause, sent } = broken;
        let (prev_rank, next_rank) = match way {
            Way::Ring => (self.prev_rank(), self.next_rank()),
            Way::Partner(at) => (links.partners[at].rank, links.partners[at].rank),
        };
        let mut culprit = match cause {
            Cause::Aborted => NOBODY,
            Cause::PrevLost(_) | Cause::PrevProtocol(_) | Cause::PrevSilent => prev_rank as u32,
            Cause::NextLost(_) | Cause::NextStuck => next_rank as u32,
            Cause::Told { culprit, .. } => culprit,
        };
        // After a partial frame, no other frame can be sent.
        let torn = (!sent).then_some(way);
        self.warn(links, torn, step, culprit).await;
        // All ranks wait for the same missing rank, so all time out together. The rank that this one waits for may
        // itself be waiting, or have blamed a rank that was; then it sends an abort frame with the right rank. It
        // closes the connection after its last frame, so this loop waits no longer than needed.
        if matches!(cause, Cause::PrevSilent | Cause::Told { .. }) {
            // The previous rank may have told it during an exchange with a partner.
            let from = match cause {
                Cause::Told { by, .. } if by == self.prev_rank() => Way::Ring,
                _ => way,
            };
            let until = Instant::now() + self.grace;
            while let Ok(Ok(received)) = timeout_at(until, next_frame(links, from)).await {
                if received.header.kind != Kind::Abort || received.header.bucket == culprit {
                    break;
                }
                culprit = received.header.bucket;
                self.warn(links, torn, step, culprit).await;
            }
        }
        let epoch = self.formation.epoch;
        let rank = culprit as usize;
        let Some(address) = self.formation.addresses.get(rank).cloned() else {
            return Error::Aborted { epoch };
        };
        let by = match cause {
            Cause::PrevLost(reason) | Cause::NextLost(reason) => {
                return Error::PeerLost { rank, address, epoch, step, during, reason };
            }
            Cause::PrevProtocol(reason) => return Error::Protocol { rank, address, epoch, step, reason },
            Cause::PrevSilent | Cause::NextStuck => {
                return Error::Timeout { rank, address, epoch, step, during, waited: limit };
            }
            Cause::Told { by, .. } => by,
            Cause::Aborted => self.prev_rank(),
        };
        let reason = format!("reported by rank {by}");
        Error::PeerLost { rank, address, epoch, step, during, reason }
    }

    /// Sends `culprit` to the next rank and to all partners, but not behind a partial frame on the way `torn`.
    async fn warn(&self, links: &mut Links, torn: Option<Way>, step: u64, culprit: u32) {
        let header = self.header(Kind::Abort, self.formation.rank, step, culprit, 0);
        let Links { next, partners, .. } = links;
        let next = async {
            if torn != Some(Way::Ring) {
                warn_peer(next, &header).await;
            }
        };
        let partners = partners.iter_mut().enumerate().filter(|(at, _)| torn != Some(Way::Partner(*at)));
        let partners = join_all(partners.map(|(_, partner)| warn_peer(&mut partner.send, &header)));
        tokio::join!(next, partners);
    }
}

async fn warn_peer<W: AsyncWrite + Unpin>(to: &mut SendLink<W>, header: &Header) {
    // The receiver also notices the failure when the connection closes.
    let _ = timeout(Duration::from_millis(100), send_frame(to, Some((header, &[])))).await;
}

/// The elements of chunk `index` out of `count`.
fn chunk(elements: usize, index: usize, count: usize) -> Range<usize> {
    let cut = |at: usize| (elements as u128 * at as u128 / count as u128) as usize;
    cut(index)..cut(index + 1)
}

async fn send_frame<W: AsyncWrite + Unpin>(
    next: &mut SendLink<W>,
    out: Option<(&Header, &[u8])>,
) -> Result<(), String> {
    let Some((header, payload)) = out else { return Ok(()) };
    next.send(header, payload).await
}

/// Reads a frame of the previous rank, or of a partner. Not cancel safe.
async fn next_frame(links: &mut Links, from: Way) -> Result<Received, Fault> {
    let mut unused = Vec::new();
    match from {
        Way::Ring => links.prev.read_frame(&mut unused).await,
        Way::Partner(at) => links.partners[at].receive.read_frame(&mut unused).await,
    }
}

async fn receive_frame<R: AsyncRead + Unpin>(
    prev: &mut ReceiveLink<R>,
    expected: Option<(&Header, usize)>,
    into: &mut Vec<u8>,
) -> Result<(), Cause> {
    let Some((expected, bytes)) = expected else { return Ok(()) };
    let fault = |fault| match fault {
        Fault::Closed(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
            Cause::PrevLost("connection closed".to_owned())
        }
        Fault::Closed(error) => Cause::PrevLost(error.to_string()),
        Fault::Malformed(reason) => Cause::PrevProtocol(reason),
    };
    let received = read_header(&mut prev.stream).await.map_err(fault)?;
    let got = received.header;
    if got.kind == Kind::Abort && got.epoch == expected.epoch && received.bytes == prev.overhead() {
        prev.read_rest(received, into).await.map_err(fault)?;
        return Err(Cause::Told { culprit: got.bucket, by: usize::from(expected.rank) });
    }
    if got != *expected {
        return Err(Cause::PrevProtocol(format!("sent {got:?} where {expected:?} belongs")));
    }
    prev.read_data(received, bytes, into).await.map_err(fault)
}
