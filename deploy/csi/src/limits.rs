//! Limits on the controller's calls: each home has a share of the threads, so that a silent server of one tenant
//! delays no call for another home.
//!
//! A call holds its share until its work ends, also when its caller has gone.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::{Code, Status};

use crate::refusal::refused;

/// Most calls that work on the driver's own home at the same time.
const OWN_RUNNING_MAX: usize = 16;
/// Most calls that work on the driver's own home or wait for that.
const OWN_CALLS_MAX: usize = 128;
/// Most calls that work on one home of a tenant at the same time.
const TENANT_RUNNING_MAX: usize = 2;
/// Most calls that work on one home of a tenant or wait for that.
const TENANT_CALLS_MAX: usize = 16;
/// Most calls that work on homes of tenants at the same time.
const TENANTS_RUNNING_MAX: usize = 32;
/// Most calls that work on homes of tenants or wait for that.
const TENANTS_CALLS_MAX: usize = 128;
/// Longest wait for a share, and longest wait for a tenant's home to open.
const WAIT_MAX: Duration = Duration::from_secs(12);

/// The running calls of a controller.
#[derive(Debug)]
pub(crate) struct Limits {
    own: Arc<Bounds>,
    /// All homes of tenants together.
    tenants: Arc<Bounds>,
    /// Homes of tenants that calls work on, by folder.
    each: Mutex<HashMap<PathBuf, Weak<Bounds>>>,
    /// Longest wait for a share, and longest wait for a tenant's home to open.
    pub(crate) wait: Duration,
}

/// The calls of one home, or of all tenants.
#[derive(Debug)]
struct Bounds {
    /// Calls that run or wait.
    calls: Arc<Semaphore>,
    /// Calls that run.
    running: Arc<Semaphore>,
}

/// The right to work on a home; dropping it gives it back.
#[derive(Debug)]
pub(crate) struct Share {
    _permits: Vec<OwnedSemaphorePermit>,
    /// Keeps the home's bounds for the calls that come next.
    _home: Arc<Bounds>,
}

impl Bounds {
    fn new(calls: usize, running: usize) -> Arc<Bounds> {
        let [calls, running] = [calls, running].map(|count| Arc::new(Semaphore::new(count)));
        Arc::new(Bounds { calls, running })
    }
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            own: Bounds::new(OWN_CALLS_MAX, OWN_RUNNING_MAX),
            tenants: Bounds::new(TENANTS_CALLS_MAX, TENANTS_RUNNING_MAX),
            each: Mutex::default(),
            wait: WAIT_MAX,
        }
    }
}

impl Limits {
    fn tenant(&self, root: &Path) -> Arc<Bounds> {
        let mut each = self.each.lock();
        if let Some(home) = each.get(root).and_then(Weak::upgrade) {
            return home;
        }
        each.retain(|_, home| home.strong_count() > 0);
        let home = Bounds::new(TENANT_CALLS_MAX, TENANT_RUNNING_MAX);
        each.insert(root.to_owned(), Arc::downgrade(&home));
        home
    }

    /// Waits for a share of the home at `root`, which is the driver's own or a tenant's.
    ///
    /// # Errors
    /// `UNAVAILABLE` when too many calls for the home wait, or when none of them ends for [`WAIT_MAX`].
    pub(crate) async fn share(&self, root: &Path, is_own: bool) -> Result<Share, Status> {
        let full = |what: &str| {
            let reason = format!("too many calls work on {what}: retry when some have ended");
            refused(Code::Unavailable, reason)
        };
        let here = format!("the home {}", root.display());
        let (home, all) = match is_own {
            true => (Arc::clone(&self.own), None),
            false => (self.tenant(root), Some(&self.tenants)),
        };
        let mut permits = Vec::with_capacity(4);
        permits.push(Arc::clone(&home.calls).try_acquire_owned().map_err(|_| full(&here))?);
        if let Some(all) = all {
            let call = Arc::clone(&all.calls).try_acquire_owned();
            permits.push(call.map_err(|_| full("homes of tenants"))?);
        }
        let running = async {
            // A semaphore is never closed.
            permits.extend(Arc::clone(&home.running).acquire_owned().await.ok());
            if let Some(all) = all {
                permits.extend(Arc::clone(&all.running).acquire_owned().await.ok());
            }
        };
        tokio::time::timeout(self.wait, running).await.map_err(|_| full(&here))?;
        Ok(Share { _permits: permits, _home: home })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_full_home_of_a_tenant_refuses_calls_and_no_other_home_does() {
        let limits = Limits { wait: Duration::from_millis(1), ..Limits::default() };
        let mut shares = Vec::new();
        for _ in 0..TENANT_RUNNING_MAX {
            shares.push(limits.share(Path::new("/a"), false).await.unwrap());
        }
        let refused = limits.share(Path::new("/a"), false).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable);
        assert!(refused.message().contains("/a"), "{refused}");
        // All tenants together leave the driver's own home alone.
        for n in shares.len()..TENANTS_RUNNING_MAX {
            shares.push(limits.share(Path::new(&format!("/{n}")), false).await.unwrap());
        }
        assert!(limits.share(Path::new("/b"), false).await.is_err());
        let own = limits.share(Path::new("/own"), true).await.unwrap();
        drop((own, shares));
        limits.share(Path::new("/a"), false).await.unwrap();
        // Homes without calls are forgotten.
        limits.share(Path::new("/c"), false).await.unwrap();
        assert_eq!(limits.each.lock().len(), 1);
    }

    #[tokio::test]
    async fn waiting_calls_of_a_home_are_bounded() {
        let limits = Arc::new(Limits::default());
        let held = [limits.share(Path::new("/a"), false).await, limits.share(Path::new("/a"), false).await];
        let waiting: Vec<_> = (TENANT_RUNNING_MAX..TENANT_CALLS_MAX)
            .map(|_| {
                let limits = Arc::clone(&limits);
                tokio::spawn(async move { limits.share(Path::new("/a"), false).await.map(drop) })
            })
            .collect();
        tokio::task::yield_now().await;
        // At once, not after the wait.
        assert_eq!(limits.tenant(Path::new("/a")).calls.available_permits(), 0);
        assert!(limits.share(Path::new("/a"), false).await.is_err());
        drop(held);
        for call in waiting {
            call.await.unwrap().unwrap();
        }
    }
}
