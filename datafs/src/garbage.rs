//! The garbage list: objects whose last extent is gone, deleted after a grace period.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use millrace_leaf::error_chain;
use parking_lot::Mutex;

use crate::deletion::Unneeded;
use crate::error::Result;
use crate::failpoint;
use crate::meta::codec::Decoder;
use crate::meta::inode::Timestamp;
use crate::meta::keys;
use crate::meta::metadata::PAGE;
use crate::object::ObjectId;
use crate::slice::Slice;

pub(crate) use crate::deletion::GarbageList;

/// Shortest time between two full collections that a full disk requests.
const FULL_EVERY: Duration = Duration::from_secs(1);

/// What a pass over the garbage list has done.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Deleted {
    /// Objects deleted from the store.
    pub(crate) objects: u64,
    /// Objects that stay until a running backup or restore has ended.
    pub(crate) held: u64,
}

impl GarbageList<'_> {
    /// Deletes the objects that became garbage longer than `grace` ago, as far as `slice` permits. Adds to `deleted`
    /// step by step, so that it counts even if the pass fails. A bounded pass begins after the key in `from` and sets
    /// it, to `None` at the end of the list. The error of objects that the store does not delete comes at the end.
    pub(crate) fn delete_older(
        self,
        grace: Duration,
        slice: &mut Slice<'_>,
        from: &mut Option<Vec<u8>>,
        deleted: &mut Deleted,
    ) -> Result<()> {
        let mut result = Ok(());
        while slice.deletions_left() > 0 && slice.transaction() {
            let page = self.meta.page(&keys::all_garbage(), from.as_deref())?;
            let (mut due, mut places) = (Vec::new(), Vec::new());
            for (key, value) in &page {
                let mut time = Decoder::new("garbage record", value);
                let freed = Timestamp::from_parts(time.i64()?, time.u32()?).to_system();
                if SystemTime::now().duration_since(freed).is_ok_and(|age| age >= grace) {
                    due.push(ObjectId::from_bytes(Decoder::new("garbage key", &key[1..]).array()?));
                    places.push(key);
                }
            }
            let is_cut = due.len() > slice.deletions_left();
            due.truncate(slice.deletions_left());
            failpoint::hit("gc-garbage-due");
            let done = self.delete_unneeded(&due, Unneeded::Garbage, slice)?;
            deleted.objects += done.objects as u64;
            let failed = done.refused();
            slice.count(done.objects, failed);
            result = result.and(done.failed.map_or(Ok(()), |failure| Err(failure.error)));
            if done.is_held {
                deleted.held += (due.len() - done.objects - failed) as u64;
                if slice.is_bounded() {
                    *from = None;
                    return result;
                }
            }
            if done.is_cut {
                break;
            }
            if is_cut {
                // Those that the store refuses are not the first ones of every slice.
                *from = due.len().checked_sub(1).map(|last| places[last].clone());
                break;
            }
            *from = page.into_iter().nth(PAGE - 1).map(|(key, _)| key);
            if from.is_none() {
                break;
            }
        }
        result
    }
}

/// Garbage collections for operations that found no space.
#[derive(Debug, Default)]
pub(crate) struct RoomMaker {
    /// Locked during such a collection: when a full collection was last requested.
    running: Mutex<Option<Instant>>,
    /// Number of such collections that have deleted something.
    successes: AtomicU64,
}

impl RoomMaker {
    /// Deletes garbage for an operation that found no space, without the grace period: readers in other
    /// processes look up again when an object is missing. Returns whether space was freed since the call.
    pub(crate) fn make_room(&self, garbage: GarbageList<'_>) -> bool {
        let before = self.successes.load(Ordering::Acquire);
        let mut asked = self.running.lock();
        if self.successes.load(Ordering::Acquire) > before {
            return true;
        }
        let mut deleted = Deleted::default();
        if let Err(error) =
            garbage.delete_older(Duration::ZERO, &mut Slice::unbounded(), &mut None, &mut deleted)
        {
            tracing::warn!(error = error_chain::one_line(&error), "collecting garbage on a full disk");
        }
        // The background collection does what takes longer: snapshots and volumes in deletion, and the
        // remains of dead processes.
        if asked.is_none_or(|at| at.elapsed() >= FULL_EVERY) {
            *asked = Some(Instant::now());
            garbage.collector.wake_here();
        }
        if deleted.objects > 0 {
            self.successes.fetch_add(1, Ordering::AcqRel);
        }
        deleted.objects > 0
    }
}
