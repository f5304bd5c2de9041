//! Test of the memory and the work of a resume: neither grows with the number of rows.
//!
//! Its allocator counts for the whole process, so the test is alone in its program.
#![allow(unsafe_code, clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use arrow::array::{ArrayRef, Int8Array, RecordBatch};
use bytes::Bytes;
use futures::StreamExt;
use millrace_streams::dataset::Dataset;
use millrace_streams::feed::{Feed, FeedOptions, Plan, PlanOptions, Shard};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};
use parquet::arrow::ArrowWriter;

/// The system's allocator, with counts of all threads.
struct Counted;

#[global_allocator]
static ALLOCATOR: Counted = Counted;

/// Bytes that are allocated now.
static HELD: AtomicI64 = AtomicI64::new(0);
/// Most of them since the last measurement began.
static PEAK: AtomicI64 = AtomicI64::new(0);
/// Calls that allocated or reallocated.
static CALLS: AtomicU64 = AtomicU64::new(0);

fn count(bytes: i64) {
    let held = HELD.fetch_add(bytes, Ordering::Relaxed) + bytes;
    if bytes > 0 {
        PEAK.fetch_max(held, Ordering::Relaxed);
        CALLS.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: each call goes to the system's allocator unchanged. The counters are atomic numbers; using them allocates
// nothing. A layout has at most `isize::MAX` bytes.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's promises are those of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as i64 - layout.size() as i64);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

const FILES: usize = 10_000;
const GROUPS_OF_FILE: u64 = 10;
const BATCH_ROWS: usize = 256;
/// Batches that are read after a resume.
const BATCHES: usize = 4;
/// A resume allocates at most this much beyond what is there before it.
const BYTES_MAX: i64 = 64 << 20;

/// [`FILES`] Parquet files of [`GROUPS_OF_FILE`] row groups, which are one buffer in memory.
async fn files(rows_of_group: usize) -> Arc<dyn ObjectStore> {
    let column = Arc::new(Int8Array::from(vec![7_i8; rows_of_group])) as ArrayRef;
    let group = RecordBatch::try_from_iter([("x", column)]).unwrap();
    let mut writer = ArrowWriter::try_new(Vec::new(), group.schema(), None).unwrap();
    for _ in 0..GROUPS_OF_FILE {
        writer.write(&group).unwrap();
        writer.flush().unwrap();
    }
    let file = Bytes::from(writer.into_inner().unwrap());
    let store = InMemory::new();
    for number in 0..FILES {
        let path = Path::from(format!("t/{number:05}.parquet"));
        store.put(&path, PutPayload::from(file.clone())).await.unwrap();
    }
    Arc::new(store)
}

/// A synthetic plan as text, as a worker gets it, and the store of its files.
struct Synthetic {
    store: Arc<dyn ObjectStore>,
    text: String,
    steps: u64,
}

impl Synthetic {
    fn new(rows_of_group: usize, window_rows: u64) -> Synthetic {
        runtime().block_on(async {
            let store = files(rows_of_group).await;
            let plan = Plan::build(&store, "t", &options(window_rows)).await.unwrap();
            assert_eq!(plan.rows(), FILES as u64 * GROUPS_OF_FILE * rows_of_group as u64);
            // Windows of a lane have one size, a little less than is asked for.
            assert!(
                plan.lanes() == 64 && (window_rows * 99 / 100..=window_rows).contains(&plan.window_rows())
            );
            let steps = plan.steps_for_epochs(1);
            Synthetic { store, text: serde_json::to_string(&plan).unwrap(), steps }
        })
    }
}

/// Four rows of each of 64 lanes in a batch.
fn options(window_rows: u64) -> PlanOptions {
    PlanOptions {
        source: "synthetic@v1".into(),
        seed: 5,
        batch_rows: BATCH_ROWS,
        window_rows,
        ..PlanOptions::default()
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// What a resume took.
#[derive(Debug)]
struct Cost {
    /// Most bytes that were allocated beyond those before it.
    bytes: i64,
    allocations: u64,
    groups_decoded: u64,
}

fn groups_decoded() -> u64 {
    let families = prometheus::gather();
    let name = millrace_streams::feed::metrics::FEED_ROW_GROUPS_DECODED_TOTAL;
    let found = families.iter().find(|family| family.name() == name);
    found.map_or(0, |family| family.get_metric()[0].get_counter().get_value() as u64)
}

/// Resumes at a step, from the text of the plan to the first batches.
fn resume(synthetic: &Synthetic, step: u64) -> Cost {
    let (groups, calls, held) = (groups_decoded(), CALLS.load(Ordering::SeqCst), HELD.load(Ordering::SeqCst));
    PEAK.store(held, Ordering::SeqCst);
    let runtime = runtime();
    runtime.block_on(async {
        let plan: Plan = serde_json::from_str(&synthetic.text).unwrap();
        let cursor = plan.cursor(step);
        let options = FeedOptions { decode_concurrency: 2, ..FeedOptions::default() };
        let feed = Feed::open(plan, Arc::clone(&synthetic.store), &options).unwrap();
        let mut stream = feed.stream(Shard::WHOLE, cursor).unwrap();
        for at in 0..BATCHES as u64 {
            let batch = stream.next().await.unwrap().unwrap();
            assert_eq!((batch.step, batch.batch.num_rows()), (step + at, BATCH_ROWS));
            assert!(batch.epochs.iter().all(|epoch| *epoch == 0));
        }
    });
    // Waits for decoding whose result is not needed any more.
    drop(runtime);
    Cost {
        bytes: PEAK.load(Ordering::SeqCst) - held,
        allocations: CALLS.load(Ordering::SeqCst) - calls,
        groups_decoded: groups_decoded() - groups,
    }
}

/// A plan of so many rows that work for each of them, however little, would take longer than anyone waits.
fn places_of_an_immense_plan(text: &str) {
    const ROWS_OF_GROUP: u64 = 4_000_000_000;
    let plan: Plan = serde_json::from_str(text).unwrap();
    let mut dataset = serde_json::to_value(plan.dataset()).unwrap();
    for file in dataset["files"].as_array_mut().unwrap() {
        for group in file["row_groups"].as_array_mut().unwrap() {
            group["rows"] = ROWS_OF_GROUP.into();
        }
    }
    let dataset: Dataset = serde_json::from_value(dataset).unwrap();
    let plan = Plan::new(dataset, &options(16_384)).unwrap();
    assert_eq!(plan.rows(), FILES as u64 * GROUPS_OF_FILE * ROWS_OF_GROUP);
    let step = plan.steps_for_epochs(1) / 10 * 9;
    for slot in [0, 100, BATCH_ROWS - 1] {
        let (row, epoch) = plan.row_at(step, slot).unwrap();
        assert_eq!(epoch, 0);
        assert_eq!(plan.slot_of(epoch, row).unwrap(), (step, slot));
    }
}

#[test]
fn resume_of_a_billion_rows_takes_what_a_hundredth_of_them_takes() {
    // Row groups and windows grow with the rows, so that both plans have as many of them.
    let small = Synthetic::new(100, 164);
    let large = Synthetic::new(10_000, 16_384);
    // What is made once per process.
    resume(&small, 0);
    let few_rows = resume(&small, small.steps / 10 * 9);
    let begin = resume(&large, 0);
    let late = resume(&large, large.steps / 10 * 9);
    for cost in [&few_rows, &begin, &late] {
        assert!(cost.bytes <= BYTES_MAX, "{cost:?}");
        // Each of 64 lanes stands in one window of at most three row groups, and looks at most one window ahead.
        assert!((1..=64 * 6).contains(&cost.groups_decoded), "{cost:?}");
    }
    for other in [&few_rows, &begin] {
        assert!(late.allocations <= 2 * other.allocations, "{late:?}, {other:?}");
        assert!(late.groups_decoded <= 2 * other.groups_decoded, "{late:?}, {other:?}");
    }
    places_of_an_immense_plan(&large.text);
}
