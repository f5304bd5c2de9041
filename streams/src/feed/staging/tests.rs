//! Tests of the ring against a naive model, and of staged batches against those of the feed.
#![allow(unsafe_code)]

#[cfg(feature = "cuda")]
mod gpu;

use std::future::poll_fn;
use std::sync::mpsc;
use std::task::Waker;
use std::thread;

use arrow::array::{
    Array, AsArray, BooleanArray, FixedSizeListArray, Float32Array, Float64Array, Int64Array, RecordBatch,
    StringArray,
};
use arrow::datatypes::{Field, Float32Type, Int64Type};
use futures::StreamExt;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};
use parquet::arrow::ArrowWriter;
use proptest::prelude::*;
use proptest::sample::Index;

use super::*;
use crate::feed::{Feed, FeedOptions, Plan, PlanOptions};

const ROWS: i64 = 1_000;
const BATCH_ROWS: usize = 32;
const SLOT_BYTES: usize = 64;

fn host() -> Result<Box<dyn SlotMemory>> {
    Device::CPU.allocate(SLOT_BYTES)
}

fn ring(first: usize, slots_max: usize) -> Arc<Ring> {
    Ring::new((0..first).map(|_| host()).collect::<Result<_>>().unwrap(), slots_max)
}

/// The bytes at an address that a lease keeps.
fn bytes_at(address: usize, bytes: usize) -> Vec<u8> {
    // SAFETY: the caller holds a lease of these bytes, which nothing writes meanwhile.
    unsafe { std::slice::from_raw_parts(address as *const u8, bytes) }.to_vec()
}

fn filled(mut lease: Lease, pattern: u8) -> Lease {
    let memory = lease.memory().unwrap();
    memory.host().unwrap().fill(pattern);
    memory.filled(SLOT_BYTES).unwrap();
    lease
}

proptest! {
    /// The model: a list of the batches that are held, each with its pattern and its holders.
    #[test]
    fn held_slots_keep_their_bytes_and_others_are_free(
        steps in prop::collection::vec((0_u8..4, any::<Index>()), 1..200),
        first in 1_usize..4,
        further in 0_usize..4,
    ) {
        let (slots_max, ring) = (first + further, ring(first, first + further));
        let mut held: Vec<(u8, Vec<Arc<Lease>>)> = Vec::new();
        let (mut pattern, mut most_held) = (0_u8, first);
        for (step, at) in steps {
            let held_count = held.len();
            match step {
                0 | 1 => {
                    let cx = &mut Context::from_waker(Waker::noop());
                    match ring.poll_lease(cx, host) {
                        Poll::Ready(lease) => {
                            prop_assert!(held.len() < slots_max);
                            pattern = pattern.wrapping_add(1);
                            held.push((pattern, vec![Arc::new(filled(lease, pattern))]));
                        }
                        Poll::Pending => prop_assert_eq!(held.len(), slots_max),
                    }
                    most_held = most_held.max(held.len());
                }
                _ if held_count == 0 => {}
                2 => {
                    let holders = &mut held[at.index(held_count)].1;
                    let another = Arc::clone(&holders[0]);
                    holders.push(another);
                }
                _ => {
                    let at = at.index(held_count);
                    held[at].1.pop();
                    if held[at].1.is_empty() {
                        held.remove(at);
                    }
                }
            }
            for (pattern, holders) in &held {
                prop_assert_eq!(bytes_at(holders[0].address(), SLOT_BYTES), vec![*pattern; SLOT_BYTES]);
            }
            prop_assert_eq!(ring.slots(), most_held);
        }
    }
}

#[tokio::test]
async fn slots_that_other_threads_release_come_back_to_the_waiting_task() {
    const THREADS: usize = 3;
    let ring = ring(2, 4);
    let threads: Vec<_> = (0..THREADS)
        .map(|number| {
            let (sender, receiver) = mpsc::channel::<(u8, Lease)>();
            let thread = thread::spawn(move || {
                let mut kept: Option<(u8, Lease)> = None;
                for (pattern, lease) in receiver {
                    assert_eq!(bytes_at(lease.address(), SLOT_BYTES), vec![pattern; SLOT_BYTES]);
                    // Some are held until the next comes: released in another order than that of the leases.
                    let before =
                        if number == 0 { kept.replace((pattern, lease)) } else { Some((pattern, lease)) };
                    if let Some((pattern, lease)) = before {
                        assert_eq!(bytes_at(lease.address(), SLOT_BYTES), vec![pattern; SLOT_BYTES]);
                    }
                }
            });
            (sender, thread)
        })
        .collect();
    for number in 0..2_000_usize {
        let leasing = poll_fn(|cx| ring.poll_lease(cx, host));
        let lease = tokio::time::timeout(Duration::from_secs(60), leasing).await.unwrap();
        let pattern = number as u8;
        threads[number % THREADS].0.send((pattern, filled(lease, pattern))).unwrap();
    }
    for (sender, thread) in threads {
        drop(sender);
        thread.join().unwrap();
    }
    assert!(ring.slots() <= 4);
}

#[test]
fn a_ring_whose_memory_ends_stops_growing() {
    let ring = ring(1, 8);
    let cx = &mut Context::from_waker(Waker::noop());
    let none = || Err(FeedError::Device { device: "cpu".to_owned(), reason: "none left".to_owned() });
    let Poll::Ready(lease) = ring.poll_lease(cx, none) else { panic!("the first slot is free") };
    assert!(ring.poll_lease(cx, none).is_pending());
    assert!(ring.poll_lease(cx, host).is_pending());
    drop(lease);
    assert!(ring.poll_lease(cx, host).is_ready());
    assert_eq!(ring.slots(), 1);
}

/// A feed of columns of all kinds in files of several row groups.
async fn feed(columns: &[&str]) -> Feed {
    let ids = Int64Array::from_iter_values(0..ROWS);
    let flags: BooleanArray = (0..ROWS).map(|id| Some(id % 3 == 0)).collect();
    let pixels = Float32Array::from_iter_values((0..ROWS * 4).map(|at| at as f32));
    let item = Arc::new(Field::new("item", DataType::Float32, true));
    let names: StringArray = (0..ROWS).map(|id| Some(format!("row {id}"))).collect();
    let scores: Float64Array = (0..ROWS).map(|id| (id != 500).then_some(id as f64)).collect();
    let batch = RecordBatch::try_from_iter([
        ("id", Arc::new(ids) as ArrayRef),
        ("flag", Arc::new(flags) as ArrayRef),
        ("pixels", Arc::new(FixedSizeListArray::new(item, 4, Arc::new(pixels), None)) as ArrayRef),
        ("name", Arc::new(names) as ArrayRef),
        ("score", Arc::new(scores) as ArrayRef),
    ])
    .unwrap();
    let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    for first in (0..ROWS as usize).step_by(150) {
        writer.write(&batch.slice(first, 150.min(ROWS as usize - first))).unwrap();
        writer.flush().unwrap();
    }
    let store = InMemory::new();
    let bytes = PutPayload::from(writer.into_inner().unwrap());
    store.put(&Path::parse("train/a.parquet").unwrap(), bytes).await.unwrap();
    let store: Arc<dyn ObjectStore> = Arc::new(store);
    let options = PlanOptions { batch_rows: BATCH_ROWS, seed: 3, ..PlanOptions::default() };
    let plan = Plan::build(&store, "/train", &options).await.unwrap();
    let columns = columns.iter().map(|name| (*name).to_owned()).collect();
    Feed::open(plan, store, &FeedOptions { columns: Some(columns), ..FeedOptions::default() }).unwrap()
}

/// The bytes of a column as they should be in a slot; none for one that is not staged.
fn expected(column: &ArrayRef) -> Option<Vec<u8>> {
    if column.null_count() > 0 {
        return None;
    }
    match column.data_type() {
        DataType::Int64 => {
            Some(column.as_primitive::<Int64Type>().values().iter().flat_map(|id| id.to_ne_bytes()).collect())
        }
        DataType::Boolean => Some(column.as_boolean().iter().map(|flag| u8::from(flag.unwrap())).collect()),
        DataType::FixedSizeList(..) => {
            let items = column.as_fixed_size_list().values();
            let items = items.as_primitive::<Float32Type>();
            Some(items.values().iter().flat_map(|item| item.to_ne_bytes()).collect())
        }
        _ => None,
    }
}

fn check(staged: &StagedBatch, batch: &RecordBatch) {
    assert_eq!(staged.rows, batch.num_rows());
    for (found, column) in staged.columns.iter().zip(batch.columns()) {
        match (found, expected(column)) {
            (StagedColumn::Slot(slot), Some(bytes)) => {
                assert_eq!(bytes_at(slot.address(), slot.bytes()), bytes);
                slot.read_on(ReaderStream::Unknown).unwrap();
            }
            (StagedColumn::Array(array), None) => assert_eq!(array, column),
            (StagedColumn::Slot(_), None) => panic!("{} is in the slot", column.data_type()),
            (StagedColumn::Array(_), Some(_)) => panic!("{} is not in the slot", column.data_type()),
        }
    }
}

#[tokio::test]
async fn staged_batches_have_the_bytes_of_the_feed_also_when_they_are_kept() {
    let feed = AnyFeed::from(feed(&["id", "flag", "name", "pixels"]).await);
    for world in [1, 3] {
        let shard = Shard::new(world - 1, world).unwrap();
        let rows = BATCH_ROWS.div_ceil(world as usize);
        let staging = Staging::new(feed.schema(), rows, Device::CPU).unwrap();
        let (places, mut kept) = (5..2 * ROWS as u64, Vec::new());
        let mut plain = feed.stream_places(shard, places.clone(), 1).unwrap();
        let mut staged = feed.stream_staged(shard, places, 1, &staging).unwrap();
        while let Some(batch) = plain.next().await {
            let (batch, found) = (batch.unwrap(), staged.next().await.unwrap().unwrap());
            assert_eq!(found.step, batch.step);
            check(&found, &batch.batch);
            // Every third is kept to the end, the others go at once.
            if batch.step % 3 == 0 {
                kept.push((found, batch.batch));
            }
        }
        assert!(staged.next().await.is_none());
        assert!(kept.len() > 15);
        for (found, batch) in &kept {
            check(found, batch);
        }
        assert!(staging.ring().unwrap().slots() <= kept.len() + AHEAD_MAX + 2);
    }
}

#[tokio::test]
async fn a_column_with_a_null_stays_an_array() {
    let feed = AnyFeed::from(feed(&["id", "score"]).await);
    let staging = Staging::new(feed.schema(), BATCH_ROWS, Device::CPU).unwrap();
    let mut staged = feed.stream_staged(Shard::WHOLE, 0..ROWS as u64, 1, &staging).unwrap();
    let mut with_nulls = 0;
    while let Some(batch) = staged.next().await {
        let batch = batch.unwrap();
        assert!(matches!(batch.columns[0], StagedColumn::Slot(_)));
        with_nulls += usize::from(matches!(batch.columns[1], StagedColumn::Array(_)));
    }
    assert_eq!(with_nulls, 1);
}

#[tokio::test]
async fn a_reader_that_holds_all_slots_gets_an_error_and_goes_on_once_it_lets_go() {
    let feed = AnyFeed::from(feed(&["id"]).await);
    let mut staging = Staging::new(feed.schema(), BATCH_ROWS, Device::CPU).unwrap();
    let limits = Arc::get_mut(&mut staging).unwrap();
    (limits.slots_max, limits.held_max) = (6, Duration::from_millis(20));
    let mut staged = feed.stream_staged(Shard::WHOLE, 0..ROWS as u64, 1, &staging).unwrap();
    let mut held = Vec::new();
    let error = loop {
        match staged.next().await.unwrap() {
            Ok(batch) => held.push(batch),
            Err(error) => break error,
        }
    };
    assert_eq!(held.len(), 6);
    assert!(error.to_string().contains("all 6 slots"), "{error}");
    assert!(staged.next().await.is_none());
    let again = |places| feed.stream_staged(Shard::WHOLE, places, 1, &staging).unwrap();
    let places = 6 * BATCH_ROWS as u64..ROWS as u64;
    assert!(again(places.clone()).next().await.unwrap().is_err());
    drop(held.remove(2));
    let mut staged = again(places);
    let next = staged.next().await.unwrap().unwrap();
    assert_eq!(next.step, 6);
    held.push(next);
    let mut plain = feed.stream_places(Shard::WHOLE, 0..ROWS as u64, 1).unwrap();
    let mut batches = Vec::new();
    while let Some(batch) = plain.next().await {
        batches.push(batch.unwrap());
    }
    for found in &held {
        check(found, &batches[found.step as usize].batch);
    }
}

#[tokio::test]
async fn a_dropped_stream_gives_its_slots_back() {
    let feed = AnyFeed::from(feed(&["id", "pixels"]).await);
    let mut staging = Staging::new(feed.schema(), BATCH_ROWS, Device::CPU).unwrap();
    Arc::get_mut(&mut staging).unwrap().slots_max = AHEAD_MAX + 1;
    for first in 0..50 {
        let places = first * BATCH_ROWS as u64..ROWS as u64 * 3;
        let mut staged = feed.stream_staged(Shard::WHOLE, places, 1, &staging).unwrap();
        assert_eq!(staged.next().await.unwrap().unwrap().step, first);
    }
    assert_eq!(staging.ring().unwrap().slots(), AHEAD_MAX + 1);
}

#[tokio::test]
async fn what_cannot_be_staged_is_refused() {
    let schema = |columns: &'static [&'static str]| async move { Arc::clone(feed(columns).await.schema()) };
    let refused = |schema: &SchemaRef, rows| match Staging::new(schema, rows, Device::CPU) {
        Ok(_) => panic!("{schema} was not refused"),
        Err(error) => error.to_string(),
    };
    assert!(refused(&schema(&["name"]).await, 1).contains("no column has numbers"));
    let schema = schema(&["id", "pixels"]).await;
    assert!(refused(&schema, 1 << 27).contains("at column \"pixels\""));
    assert!(refused(&schema, usize::MAX).contains("at column \"id\""));
    for name in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:65536", "cpu:0"] {
        assert!(matches!(Device::open(name), Err(FeedError::Invalid { .. })), "{name:?}");
    }
}
