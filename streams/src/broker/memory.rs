//! Memory accounting of large requests and fetch responses over all connections.
//!
//! A request counts with the bytes received, never with its announced length. Partly received requests can
//! fill the pool while each waits for more. One request at a time may then grow beyond the pool, so that it
//! can finish.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The memory pool of all connections.
pub(crate) struct Memory {
    /// One permit per KiB.
    pool: Arc<Semaphore>,
    pool_kib: u32,
    /// Permit of the one request that may grow beyond the pool.
    oversize: Arc<Semaphore>,
}

/// Memory that one request or response holds until this is dropped.
#[derive(Debug, Default)]
pub(crate) struct MemoryReservation {
    kib: u32,
    pool: Option<OwnedSemaphorePermit>,
    oversize: Option<OwnedSemaphorePermit>,
}

impl Memory {
    /// A pool of `bytes_max` less the largest request, which may grow beyond it; at least half of
    /// `bytes_max`.
    pub(crate) fn new(bytes_max: usize, request_bytes_max: usize) -> Self {
        let pool_kib = kib(bytes_max.saturating_sub(request_bytes_max).max(bytes_max / 2));
        Self {
            pool: Arc::new(Semaphore::new(pool_kib as usize)),
            pool_kib,
            oversize: Arc::new(Semaphore::new(1)),
        }
    }

    /// Waits for memory for a response of `bytes`, capped at the size of the pool.
    pub(crate) async fn reserve(&self, bytes: usize) -> MemoryReservation {
        let kib = kib(bytes).min(self.pool_kib);
        // The semaphore is never closed.
        MemoryReservation { kib, pool: self.pool.clone().acquire_many_owned(kib).await.ok(), oversize: None }
    }

    /// Waits until `reservation` may grow to `bytes`.
    pub(crate) async fn grow(&self, reservation: &mut MemoryReservation, bytes: usize) {
        let missing = kib(bytes).saturating_sub(reservation.kib);
        if missing == 0 || reservation.oversize.is_some() {
            return;
        }
        // Neither semaphore is ever closed.
        tokio::select! {
            biased;
            Ok(more) = self.pool.clone().acquire_many_owned(missing) => {
                reservation.kib += missing;
                match &mut reservation.pool {
                    Some(pool) => pool.merge(more),
                    None => reservation.pool = Some(more),
                }
            }
            permit = self.oversize.clone().acquire_owned() => reservation.oversize = permit.ok(),
        }
    }
}

fn kib(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX)
}
