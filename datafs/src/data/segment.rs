//! Segments: runs of frames that were fetched, or are being fetched, from a remote store. [`Buffers`] bounds
//! the memory of all segments of a pool.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};

use super::error::{ObjectError, Result, threads_gone};

/// A segment is dropped this long after its request began, so that an idle process holds no memory.
const AGE_MAX: Duration = Duration::from_secs(20);
/// Above this count, the oldest segments are dropped together with their notes.
const NOTES_MAX: usize = 4_096;

/// A run of frames. [`Segment::wait`] blocks until it has been fetched.
#[derive(Debug)]
pub(super) struct Segment {
    frames: Range<u64>,
    state: Mutex<State>,
    done: Condvar,
    bytes: u64,
    buffers: Arc<Buffers>,
}

#[derive(Debug)]
enum State {
    OnItsWay,
    Here(Bytes),
    Failed(ObjectError),
}

impl Segment {
    pub(super) fn new(frames: Range<u64>, bytes: u64, buffers: &Arc<Buffers>) -> Arc<Segment> {
        buffers.held_bytes.fetch_add(bytes, Ordering::AcqRel);
        Arc::new(Segment {
            frames,
            state: Mutex::new(State::OnItsWay),
            done: Condvar::new(),
            bytes,
            buffers: Arc::clone(buffers),
        })
    }

    pub(super) fn frames(&self) -> &Range<u64> {
        &self.frames
    }

    /// The stored bytes of the frames, verified.
    pub(super) fn wait(&self) -> Result<Bytes> {
        let mut state = self.state.lock();
        loop {
            match &*state {
                State::OnItsWay => self.done.wait(&mut state),
                State::Here(bytes) => return Ok(bytes.clone()),
                State::Failed(error) => return Err(error.again()),
            }
        }
    }

    pub(super) fn has_failed(&self) -> bool {
        matches!(&*self.state.lock(), State::Failed(_))
    }

    /// The guard that the fetching task holds. Dropping it fails the segment, so that no reader waits forever.
    pub(super) fn promise(segment: &Arc<Segment>, place: &str) -> Promise {
        Promise { segment: Arc::clone(segment), place: place.to_owned(), kept: false }
    }

    fn settle(&self, fetched: Result<Bytes>) {
        *self.state.lock() = match fetched {
            Ok(bytes) => State::Here(bytes),
            Err(error) => State::Failed(error),
        };
        self.done.notify_all();
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        self.buffers.held_bytes.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

/// The obligation to settle a segment; dropping it without [`Promise::keep`] settles it with an error.
#[derive(Debug)]
pub(super) struct Promise {
    segment: Arc<Segment>,
    place: String,
    kept: bool,
}

impl Promise {
    pub(super) fn keep(mut self, fetched: Result<Bytes>) {
        self.kept = true;
        self.segment.settle(fetched);
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        if !self.kept {
            self.segment.settle(Err(threads_gone(&self.place)));
        }
    }
}

/// A holder of segments, by their first frames.
pub(super) trait HoldsSegments: Send + Sync + 'static {
    /// Drops the segment that begins at this frame.
    fn drop_segment(&self, first: u64);
}

/// The memory of all segments of a pool.
#[derive(Debug)]
pub(super) struct Buffers {
    bytes_max: u64,
    held_bytes: AtomicU64,
    /// Oldest first; the segments themselves belong to the objects.
    notes: Mutex<VecDeque<Note>>,
}

#[derive(Debug)]
struct Note {
    holder: Weak<dyn HoldsSegments>,
    first: u64,
    made: Instant,
}

impl Buffers {
    pub(super) fn new(bytes_max: u64) -> Buffers {
        Buffers { bytes_max, held_bytes: AtomicU64::new(0), notes: Mutex::default() }
    }

    /// The most bytes that one reader may prefetch.
    pub(super) fn window_bytes_max(&self) -> u64 {
        self.bytes_max / 4
    }

    /// Whether readers may prefetch: less than 3/4 of the memory is in use.
    pub(super) fn has_room(&self) -> bool {
        self.held_bytes.load(Ordering::Acquire) < self.bytes_max / 4 * 3
    }

    /// Records a new segment of `holder` that begins at frame `first`.
    pub(super) fn remember(&self, holder: Weak<dyn HoldsSegments>, first: u64) {
        let note = Note { holder, first, made: Instant::now() };
        self.notes.lock().push_back(note);
    }

    /// Drops the oldest segments while they exceed the bounds. The caller must not hold the lock of an
    /// object's progress.
    pub(super) fn trim(&self) {
        self.drop_while(|note, count| {
            let too_much = self.held_bytes.load(Ordering::Acquire) > self.bytes_max;
            too_much || count > NOTES_MAX || note.made.elapsed() > AGE_MAX
        });
    }

    fn drop_while(&self, goes: impl Fn(&Note, usize) -> bool) {
        loop {
            let note = {
                let mut notes = self.notes.lock();
                let count = notes.len();
                match notes.front() {
                    Some(note) if goes(note, count) => notes.pop_front(),
                    _ => None,
                }
            };
            let Some(note) = note else { return };
            if let Some(holder) = note.holder.upgrade() {
                holder.drop_segment(note.first);
            }
        }
    }

    /// Trims every 5 s for as long as the buffers exist.
    pub(super) async fn look_after(buffers: Weak<Buffers>) {
        loop {
            tokio::time::sleep(AGE_MAX / 4).await;
            let Some(buffers) = buffers.upgrade() else { return };
            buffers.trim();
        }
    }
}
