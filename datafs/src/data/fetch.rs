//! The reader of large remote objects: frames are fetched in parallel in segments. A segment stays in memory
//! for a short time for all readers, and is written to the cache in the background.
//!
//! The window of prefetched segments ahead of a sequential reader grows from 4 MiB to 32 MiB, and ends with the range
//! that the reader has announced. Any other reader fetches only the frames that it needs. A reader of a frame that is
//! being fetched waits for that request instead of sending another.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Weak};

use bytes::Bytes;
use parking_lot::Mutex;

use super::cache::{Cache, Entry};
use super::error::{ObjectError, Result};
use super::index::Index;
use super::remote::RemoteStore;
use super::runtime::Io;
use super::segment::{Buffers, HoldsSegments, Segment};
use crate::metrics;
use crate::object::ObjectId;

/// Bytes of one request.
pub(super) const SEGMENT_BYTES: u64 = 4 * 1024 * 1024;
/// The largest prefetch window of a sequential reader: with the segment being read, eight concurrent requests
/// and one more.
const WINDOW_BYTES_MAX: u64 = 32 * 1024 * 1024;
/// Reads at most this far apart are one sequential reader, whose requests may arrive out of order.
const NEAR_BYTES: u64 = 1024 * 1024;
/// Most sequential readers of one object that are tracked.
const STREAMS_MAX: usize = 4;
/// After this many fetches from a pack, each further one fetches to the end of the segment.
const SINGLE_MISSES_MAX: u32 = 2;
/// Most bytes of a read that are planned at a time; the window extends beyond them.
const READ_BYTES: usize = 16 * 1024 * 1024;

/// The cache, and its entry of an object.
pub(super) type Kept = (Arc<Cache>, Arc<Entry>);

/// A large remote object that is open for reading.
#[derive(Debug)]
pub(super) struct RemoteData {
    pub(super) id: ObjectId,
    // Not a handle of the pool: the pool keeps this object, and the cycle would never be freed.
    pub(super) io: Io,
    pub(super) store: Arc<RemoteStore>,
    pub(super) index: Arc<Index>,
    pub(super) kept: Option<Kept>,
    pub(super) buffers: Arc<Buffers>,
    pub(super) progress: Mutex<Progress>,
}

/// The segments in memory or in flight, and the sequential readers.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// Disjoint, by first frame.
    segments: BTreeMap<u64, Arc<Segment>>,
    /// Most recently used last.
    streams: Vec<Stream>,
    /// Requests that reads had to wait for.
    misses: u32,
}

/// One sequential reader.
#[derive(Debug, Clone, Copy, Default)]
struct Stream {
    /// Where its last read ended.
    end: u64,
    /// Prefetch distance in bytes; 0 until a second read shows that it is sequential.
    window: u64,
    /// The frame at which its prefetch continues.
    ahead: u64,
}

/// The source of the frames of a read.
#[derive(Debug)]
enum Piece {
    Cached(Range<u64>),
    Fetched(Arc<Segment>, Range<u64>),
}

impl RemoteData {
    /// Fills `buffer` with the data from `offset` on, which lies inside the object; verified. Nothing is prefetched from
    /// `ahead_to` on, except in a pack, where other files follow.
    pub(super) fn read(self: &Arc<Self>, offset: u64, buffer: &mut [u8], ahead_to: u64) -> Result<()> {
        let ahead_to = if self.id.is_pack() { u64::MAX } else { ahead_to };
        let mut at = offset;
        for part in buffer.chunks_mut(READ_BYTES) {
            let end = at + part.len() as u64;
            let frames = self.index.frames_of(at, end);
            let pieces = self.plan(frames, at, end, ahead_to);
            self.buffers.trim();
            for piece in pieces {
                match piece {
                    Piece::Cached(frames) => self.read_cached(frames, at, part)?,
                    Piece::Fetched(segment, frames) => self.read_fetched(&segment, frames, at, part)?,
                }
            }
            at = end;
        }
        Ok(())
    }

    /// Finds the frames of a read, fetches missing ones, and prefetches for a sequential reader.
    fn plan(self: &Arc<Self>, frames: Range<u64>, offset: u64, end: u64, ahead_to: u64) -> Vec<Piece> {
        let present = self.present(frames.clone());
        let limit = self.index.frames_of(offset, ahead_to.min(self.index.data_bytes()).max(end)).end;
        let mut progress = self.progress.lock();
        let mut stream = progress.stream(offset, end, self.buffers.window_bytes_max().min(WINDOW_BYTES_MAX));
        let mut pieces = Vec::new();
        let mut at = frames.start;
        while at < frames.end {
            if let Some(segment) = progress.covering(at) {
                let to = segment.frames().end.min(frames.end);
                pieces.push(Piece::Fetched(segment, at..to));
                at = to;
                continue;
            }
            let gap_end = progress.next_after(at).min(frames.end);
            let is_there = |frame: u64| present[(frame - frames.start) as usize];
            let there = is_there(at);
            let mut to = at + 1;
            while to < gap_end && is_there(to) == there {
                to += 1;
            }
            if there {
                pieces.push(Piece::Cached(at..to));
                at = to;
                continue;
            }
            let border = self.border_after(at);
            let mut segment_end = to.min(border);
            progress.misses += 1;
            let is_wanted = self.id.is_pack() && progress.misses > SINGLE_MISSES_MAX;
            if stream.window > 0 || is_wanted {
                segment_end = border.min(progress.next_after(at)).min(limit);
            }
            let segment = self.send_for(at..segment_end, true);
            let to = to.min(segment_end);
            progress.segments.insert(at, Arc::clone(&segment));
            pieces.push(Piece::Fetched(segment, at..to));
            at = to;
        }
        if stream.window > 0 {
            self.fetch_ahead(&mut progress, &mut stream, frames.end, limit);
            progress.forget_behind(frames.start.saturating_sub(self.segment_frames()), self.segment_frames());
        }
        progress.keep(stream);
        pieces
    }

    /// Prefetches from a frame on, up to the frame `limit`.
    fn fetch_ahead(self: &Arc<Self>, progress: &mut Progress, stream: &mut Stream, from: u64, limit: u64) {
        let window = stream.window.div_ceil(self.index.frame_bytes());
        let target = from.saturating_add(window).min(limit);
        let mut at = stream.ahead.max(from);
        while at < target && self.buffers.has_room() {
            if let Some(segment) = progress.covering(at) {
                at = segment.frames().end;
                continue;
            }
            let border = self.border_after(at).min(progress.next_after(at)).min(limit);
            if let Some(there) = self.present(at..border).iter().position(|there| !there) {
                let first = at + there as u64;
                progress.segments.insert(first, self.send_for(first..border, true));
            }
            at = border;
        }
        stream.ahead = at;
    }

    pub(super) fn segment_frames(&self) -> u64 {
        (SEGMENT_BYTES / self.index.frame_bytes()).max(1)
    }

    fn border_after(&self, frame: u64) -> u64 {
        (frame / self.segment_frames() + 1) * self.segment_frames()
    }

    /// Which of these frames are in the cache.
    pub(super) fn present(&self, frames: Range<u64>) -> Vec<bool> {
        match &self.kept {
            Some((_, entry)) => entry.present(frames),
            None => vec![false; (frames.end - frames.start) as usize],
        }
    }

    /// Starts a request for frames. With `keep`, the frames go to the cache unless it is busy.
    pub(super) fn send_for(self: &Arc<Self>, frames: Range<u64>, keep: bool) -> Arc<Segment> {
        let stored = self.index.stored(frames.clone());
        let segment = Segment::new(frames.clone(), stored.end - stored.start, &self.buffers);
        let holder: Weak<Self> = Arc::downgrade(self);
        self.buffers.remember(holder, frames.start);
        let waiting = Segment::promise(&segment, self.store.place());
        let (store, index, id) = (Arc::clone(&self.store), Arc::clone(&self.index), self.id);
        let kept = self.kept.clone().filter(|_| keep);
        self.io.start_future(async move {
            let fetched = fetch(&store, &index, id, frames.clone()).await;
            let bytes = fetched.as_ref().ok().cloned();
            waiting.keep(fetched);
            if let (Some(bytes), Some((cache, entry))) = (bytes, kept) {
                cache.put(&entry, frames, stored.start, bytes, false);
            }
        });
        segment
    }

    fn read_fetched(
        &self,
        segment: &Segment,
        frames: Range<u64>,
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<()> {
        let bytes = segment.wait()?;
        let base = self.index.stored(segment.frames().clone()).start;
        self.deliver(frames, base, &bytes, offset, buffer)
    }

    /// Copies frames into the buffer; `stored` is the object from `base` on, already verified.
    fn deliver(
        &self,
        frames: Range<u64>,
        base: u64,
        stored: &[u8],
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<()> {
        for frame in frames {
            let at = self.index.stored(frame..frame + 1);
            let bytes = &stored[(at.start - base) as usize..(at.end - base) as usize];
            self.index.deliver(frame, bytes, offset, buffer).map_err(|reason| ObjectError::Corrupt {
                id: self.id,
                byte: self.index.data(frame).start,
                reason,
            })?;
        }
        Ok(())
    }

    /// Reads frames from the cache; damaged ones are fetched from the store.
    fn read_cached(self: &Arc<Self>, frames: Range<u64>, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let Some((_, entry)) = &self.kept else { return Ok(()) };
        let stored = self.index.stored(frames.clone());
        let data = self.index.data(frames.start).start..self.index.data(frames.end - 1).end;
        let inside = data.start >= offset && data.end <= offset + buffer.len() as u64;
        if matches!(&*self.index, Index::Plain(_)) && inside {
            // Whole unencoded frames: read straight into the caller's buffer.
            let into = &mut buffer[(data.start - offset) as usize..(data.end - offset) as usize];
            if entry.read_at(stored.start, into).is_ok()
                && self.index.first_wrong(frames.clone(), into).is_none()
            {
                metrics::CACHE_READ_BYTES.inc_by(stored.end - stored.start);
                return Ok(());
            }
        }
        let mut bytes = vec![0; (stored.end - stored.start) as usize];
        let read = entry.read_at(stored.start, &mut bytes);
        for frame in frames {
            let at = self.index.stored(frame..frame + 1);
            let inside = (at.start - stored.start) as usize..(at.end - stored.start) as usize;
            if read.is_ok() && self.index.check(frame, &bytes[inside.clone()]) {
                metrics::CACHE_READ_BYTES.inc_by(at.end - at.start);
                self.deliver(frame..frame + 1, at.start, &bytes[inside], offset, buffer)?;
            } else {
                tracing::debug!(object = %self.id, frame, "fetching again what is damaged in the cache");
                entry.forget(frame);
                self.read_fetched(&self.send_for(frame..frame + 1, true), frame..frame + 1, offset, buffer)?;
            }
        }
        Ok(())
    }

    /// Fetches into the cache every frame that it lacks; passes the stored bytes of each step to `progress`.
    /// Without a cache it does nothing.
    pub(super) fn warm(self: &Arc<Self>, progress: &mut dyn FnMut(u64)) -> Result<()> {
        let Some((cache, entry)) = &self.kept else { return Ok(()) };
        let mut on_their_way: VecDeque<Arc<Segment>> = VecDeque::new();
        let mut at = 0;
        loop {
            while on_their_way.len() < (WINDOW_BYTES_MAX / SEGMENT_BYTES) as usize && at < self.index.frames()
            {
                let border = self.border_after(at).min(self.index.frames());
                let present = self.present(at..border);
                match present.iter().position(|there| !there) {
                    Some(there) => on_their_way.push_back(self.send_for(at + there as u64..border, false)),
                    None => {
                        let there = self.index.stored(at..border);
                        progress(there.end - there.start);
                    }
                }
                at = border;
            }
            let Some(first) = on_their_way.pop_front() else { return Ok(()) };
            let bytes = first.wait()?;
            let (len, stored) = (bytes.len() as u64, self.index.stored(first.frames().clone()));
            cache.put(entry, first.frames().clone(), stored.start, bytes, true);
            progress(len);
        }
    }

    /// Verifies all frames of the cached image.
    pub(super) fn verify_image(&self) -> bool {
        let Some((_, entry)) = &self.kept else { return false };
        let mut at = 0;
        while at < self.index.frames() {
            let border = self.border_after(at).min(self.index.frames());
            let stored = self.index.stored(at..border);
            let mut bytes = vec![0; (stored.end - stored.start) as usize];
            if entry.read_at(stored.start, &mut bytes).is_err() {
                return false;
            }
            if let Some(wrong) = self.index.first_wrong(at..border, &bytes) {
                entry.forget(wrong);
                return false;
            }
            at = border;
        }
        true
    }
}

impl HoldsSegments for RemoteData {
    fn drop_segment(&self, first: u64) {
        self.progress.lock().segments.remove(&first);
    }
}

impl Progress {
    /// The segment that holds a frame. A segment whose request failed is dropped.
    fn covering(&mut self, frame: u64) -> Option<Arc<Segment>> {
        let (first, segment) = self.segments.range(..=frame).next_back()?;
        if segment.frames().end <= frame {
            return None;
        }
        let (first, segment) = (*first, Arc::clone(segment));
        if segment.has_failed() {
            self.segments.remove(&first);
            return None;
        }
        Some(segment)
    }

    /// The start of the next segment after this frame.
    fn next_after(&self, frame: u64) -> u64 {
        self.segments.range(frame + 1..).next().map_or(u64::MAX, |(first, _)| *first)
    }

    /// Removes and returns the stream that a read belongs to, updated by the read; a new one if none is near.
    fn stream(&mut self, offset: u64, end: u64, window_max: u64) -> Stream {
        let near = |stream: &Stream| offset.abs_diff(stream.end) <= NEAR_BYTES;
        let Some(at) = self.streams.iter().rposition(near) else {
            return Stream { end, window: 0, ahead: 0 };
        };
        let mut stream = self.streams.remove(at);
        if end > stream.end {
            stream.end = end;
            stream.window = (stream.window * 2).clamp(SEGMENT_BYTES, window_max.max(SEGMENT_BYTES));
        }
        stream
    }

    fn keep(&mut self, stream: Stream) {
        if self.streams.len() >= STREAMS_MAX {
            self.streams.remove(0);
        }
        self.streams.push(stream);
    }

    /// Drops the segments just behind a sequential reader; segments further back may belong to other readers.
    fn forget_behind(&mut self, frame: u64, segment_frames: u64) {
        let from = frame.saturating_sub(4 * segment_frames);
        let behind: Vec<u64> = self
            .segments
            .range(from..frame)
            .filter(|(_, segment)| segment.frames().end <= frame)
            .map(|(first, _)| *first)
            .collect();
        behind.iter().for_each(|first| drop(self.segments.remove(first)));
    }
}

/// Fetches and verifies frames. If a checksum is wrong, it fetches once more.
async fn fetch(store: &RemoteStore, index: &Index, id: ObjectId, frames: Range<u64>) -> Result<Bytes> {
    let stored = index.stored(frames.clone());
    if stored.is_empty() {
        return Ok(Bytes::new());
    }
    let path = store.data_path(id);
    let mut tries = 0;
    loop {
        let bytes = store
            .get_range(&path, stored.clone())
            .await
            .map_err(|error| if error.is_not_found() { ObjectError::Missing { id } } else { error })?;
        metrics::STORE_READ_BYTES.inc_by(bytes.len() as u64);
        if bytes.len() as u64 != stored.end - stored.start {
            let reason = "the object in the store is cut short".into();
            return Err(ObjectError::Corrupt { id, byte: index.data(frames.start).start, reason });
        }
        let Some(wrong) = index.first_wrong(frames.clone(), &bytes) else {
            metrics::OBJECT_READ_BYTES.inc_by(bytes.len() as u64);
            return Ok(bytes);
        };
        tries += 1;
        if tries == 2 {
            let reason = "checksum mismatch".into();
            return Err(ObjectError::Corrupt { id, byte: index.data(wrong).start, reason });
        }
    }
}
