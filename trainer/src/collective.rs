//! Collective operations between worker processes: a TCP ring that sums vectors of `i64` or `f32`
//! and hands one member's state to the others.
//!
//! A [`Collective`] is bound once per process; a [`Ring`] lives for one membership epoch. Every frame carries
//! the epoch, the step and the bucket, so data of an older epoch is never added to a newer one. A ring is
//! unusable after its first error: drop it and form the next one. When a rank is missing, every other rank
//! learns its number.
//!
//! `nccl` sums gradients between GPUs instead, where a job asks for it. All else stays on the ring.
//!
//! All operations block the calling thread (never call them from async code) and end early when
//! the cancellation token given to [`Collective::form`] is cancelled.

mod element;
mod error;
mod form;
pub(crate) mod frame;
mod gradients;
pub(crate) mod nccl;
mod ring;
mod seal;
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

/// Timeouts and sizes of a collective.
#[derive(Debug, Clone)]
pub struct Options {
    /// Shared secret of the job's members. A connection that does not prove that it knows it is dropped.
    pub secret: String,
    /// Encrypts what the ring carries; the same for all members. Without it, sums and states can be read and changed on
    /// their way.
    pub encrypt: bool,
    /// Deadline for forming a ring.
    pub form_timeout: Duration,
    /// Deadline for one exchange with a neighbor. It includes the neighbor's computation, so it must be
    /// longer than a step.
    pub exchange_timeout: Duration,
    /// Elements summed per bucket, at least 1; each costs its bytes in a buffer.
    pub bucket_elements_max: usize,
    /// A neighbor whose machine acknowledges nothing for about this long is lost. A process that only computes
    /// is not: its kernel acknowledges.
    pub silence: Duration,
}

impl Options {
    /// Options for ordinary use on one machine: not encrypted, 10 s to form, 60 s per exchange, 5 s of silence, buckets of 2^18 elements.
    pub fn new(secret: impl Into<String>) -> Options {
        Options {
            secret: secret.into(),
            encrypt: false,
            form_timeout: Duration::from_secs(10),
            exchange_timeout: Duration::from_secs(60),
            bucket_elements_max: 1 << 18,
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

    /// Connects to the next rank and waits for the previous one.
    ///
    /// Blocks up to `form_timeout`. Looks up a name of the next rank at each attempt to connect, and tries all of its
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
