//! Collective operations between worker processes: sums of vectors of `i64` or `f32` over TCP, and the hand-over of
//! one member's state to the others.
//!
//! Large vectors go around a ring: each rank sends to the next and receives from the previous one. Small vectors are
//! summed by recursive doubling between partners, in about log2(ranks) exchanges instead of 2(ranks - 1). The
//! vector's length and the number of ranks decide, so that every rank takes the same way.
//!
//! A [`Collective`] is bound once per process; a [`Ring`] lives for one membership epoch. Every frame carries
//! the epoch, the step and the bucket, so data of an older epoch is never added to a newer one. A ring is
//! unusable after its first error: drop it and form the next one. When a rank is missing, every other rank
//! learns its number.
//!
//! Between two ranks of one machine, large frames of the ring leave their data in shared memory, and only say over TCP
//! where these lie. TCP alone decides about missing ranks.
//!
//! `nccl` sums gradients between GPUs instead, where a job asks for it. All else stays on the ring.
//!
//! All operations block the calling thread (never call them from async code) and end early when
//! the cancellation token given to [`Collective::form`] is cancelled.

mod doubling;
mod element;
mod error;
mod form;
pub(crate) mod frame;
mod gradients;
mod link;
pub(crate) mod nccl;
mod offer;
mod ring;
mod seal;
mod shared;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, SocketAddr, TcpListener as StdListener};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

pub use element::{Dtype, Element};
pub use error::Error;
pub(crate) use gradients::GradientLinks;
pub use ring::Ring;

/// The most ranks a ring may have.
pub const WORLD_MAX: usize = 1024;

/// Bytes of the largest vector that is summed by recursive doubling. At 10 Gbit/s they take 52 µs, about as long as one
/// exchange of an empty message, and they fit into a socket's buffers.
pub const DOUBLING_BYTES_MAX: usize = 64 << 10;

/// Timeouts and sizes of a collective.
#[derive(Debug, Clone)]
pub struct Options {
    /// Shared secret of the job's members. A connection that does not prove that it knows it is dropped.
    pub secret: String,
    /// Encrypts what the ring carries over TCP; the same for all members. Without it, sums and states can be read and
    /// changed on their way.
    pub encrypt: bool,
    /// Deadline for forming a ring.
    pub form_timeout: Duration,
    /// Deadline for one exchange with a neighbor. It includes the neighbor's computation, so it must be
    /// longer than a step. A later exchange of recursive doubling may take several times as long, since its partner may
    /// wait for another one.
    pub exchange_timeout: Duration,
    /// Bytes of the largest vector that is summed by recursive doubling; the same for all members.
    pub doubling_bytes_max: usize,
    /// Elements summed per bucket, at least 1; each costs its bytes in a buffer.
    pub bucket_elements_max: usize,
    /// Lets large frames to and from a neighbor on this machine go through shared memory, unencrypted. A rank without it
    /// forms rings with all others.
    pub shared_memory: bool,
    /// A neighbor whose machine acknowledges nothing for about this long is lost. A process that only computes
    /// is not: its kernel acknowledges.
    pub silence: Duration,
}

impl Options {
    /// Options for ordinary use on one machine: not encrypted, 10 s to form, 60 s per exchange, 5 s of silence, buckets of 2^18 elements,
    /// shared memory.
    pub fn new(secret: impl Into<String>) -> Options {
        Options {
            secret: secret.into(),
            encrypt: false,
            form_timeout: Duration::from_secs(10),
            exchange_timeout: Duration::from_secs(60),
            doubling_bytes_max: DOUBLING_BYTES_MAX,
            bucket_elements_max: 1 << 18,
            shared_memory: true,
            silence: Duration::from_secs(5),
        }
    }
}

/// The members of a ring, for one membership epoch.
#[derive(Debug, Clone)]
pub struct Formation {
    /// The membership epoch, never used twice within a job.
    pub epoch: u64,
    /// This process's rank.
    pub rank: usize,
    /// The listening address of each rank, `HOST:PORT`, in rank order; 1 to [`WORLD_MAX`] entries.
    pub addresses: Vec<String>,
}

/// A process's endpoint for the job's rings: one listener and one single-threaded runtime, so that an
/// exchange costs no thread hop.
#[derive(Debug)]
pub struct Collective {
    runtime: Runtime,
    listener: TcpListener,
    address: SocketAddr,
    options: Options,
}

impl Collective {
    /// Listens on an ephemeral port of `ip`.
    pub fn bind(ip: IpAddr, options: Options) -> Result<Collective, Error> {
        Self::bind_to(SocketAddr::new(ip, 0), options)
    }

    /// Listens on `address`; port 0 means an ephemeral one.
    pub fn bind_to(address: SocketAddr, options: Options) -> Result<Collective, Error> {
        let io = |source| Error::Io { what: format!("listen on {address}"), source };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(io)?;
        let listener = StdListener::bind(address).map_err(io)?;
        listener.set_nonblocking(true).map_err(io)?;
        let address = listener.local_addr().map_err(io)?;
        let listener = {
            let _context = runtime.enter();
            TcpListener::from_std(listener).map_err(io)?
        };
        Ok(Collective { runtime, listener, address, options })
    }

    /// Changes the options of rings that are formed later.
    pub fn set_options(&mut self, options: Options) {
        self.options = options;
    }

    /// The options of rings that are formed later.
    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    /// The address at which this process listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Connects to the next rank and the partners of higher ranks, and waits for the previous rank and the partners of
    /// lower ranks.
    ///
    /// Blocks up to `form_timeout`. Looks up the name of a rank at each attempt to connect, and tries all of its
    /// addresses. Drops connections that do not speak the protocol, belong to another epoch or do not know the
    /// secret; they do not disturb the formation.
    pub fn form(&self, formation: &Formation, abort: CancellationToken) -> Result<Ring<'_>, Error> {
        form::check(formation)?;
        let links = match formation.addresses.len() {
            1 => None,
            _ => Some(self.runtime.block_on(form::form(&self.listener, formation, &self.options, &abort))?),
        };
        Ok(Ring::new(&self.runtime, links, formation, &self.options, abort))
    }
}
