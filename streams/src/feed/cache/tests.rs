use std::sync::atomic::{AtomicUsize, Ordering};

use arrow::array::{ArrayRef, Int64Array};
use tokio::sync::Semaphore;

use super::*;

fn batch(rows: usize) -> RecordBatch {
    let column: ArrayRef = Arc::new(Int64Array::from(vec![1; rows]));
    RecordBatch::try_from_iter([("x", column)]).unwrap()
}

async fn ready(lookup: Lookup) -> Result<Arc<RecordBatch>> {
    match lookup {
        Lookup::Ready(batch) => Ok(batch),
        Lookup::Loading(loading) => loading.await,
    }
}

fn immediately(_: u32) -> (u64, impl Future<Output = Result<RecordBatch>> + Send + 'static) {
    (8_000, async { Ok(batch(1000)) })
}

#[tokio::test]
async fn concurrent_lookups_share_one_decoding() {
    let cache = GroupCache::new(1 << 20, 4);
    let gate = Arc::new(Semaphore::new(0));
    let count = Arc::new(AtomicUsize::new(0));
    let mut waiters = Vec::new();
    for _ in 0..10 {
        let (gate, count) = (Arc::clone(&gate), Arc::clone(&count));
        let found = cache.demand(0, &[5], &[], move |_| {
            let (gate, count) = (Arc::clone(&gate), Arc::clone(&count));
            let reading = async move {
                count.fetch_add(1, Ordering::SeqCst);
                gate.acquire().await.unwrap().forget();
                Ok(batch(10))
            };
            (100, reading)
        });
        waiters.extend(found);
    }
    gate.add_permits(1);
    // A dropped waiter does not stop the others.
    drop(waiters.pop());
    for waiter in waiters {
        assert_eq!(ready(waiter).await.unwrap().num_rows(), 10);
    }
    assert_eq!(count.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn failures_reach_all_waiters_and_are_not_remembered() {
    let cache = GroupCache::new(1 << 20, 4);
    let failing = |_| (100, async { Err(FeedError::Stopped { file: "f".into() }) });
    let mut found = cache.demand(0, &[1], &[], failing);
    found.extend(cache.demand(0, &[1], &[], failing));
    for lookup in found {
        assert!(ready(lookup).await.is_err());
    }
    assert_eq!(cache.bytes(), 0);
    for lookup in cache.demand(0, &[1], &[], immediately) {
        assert!(ready(lookup).await.is_ok());
    }
}

#[tokio::test]
async fn cache_stays_within_limit_and_evicts_least_recent() {
    let cache = GroupCache::new(30_000, 4);
    for (step, group) in [(0u64, 0u32), (1, 1), (2, 2), (3, 0), (4, 3), (5, 4)] {
        for lookup in cache.demand(step, &[group], &[], immediately) {
            ready(lookup).await.unwrap();
        }
        assert!(cache.bytes() <= 30_000, "{}", cache.bytes());
    }
    let kept: Vec<u32> = (0..5)
        .filter(
            |&g| matches!(cache.table.lock().entries.get(&g), Some(e) if matches!(e.state, EntryState::Ready(_))),
        )
        .collect();
    assert_eq!(kept, vec![0, 3, 4]);
}

#[tokio::test]
async fn one_call_may_use_more_than_the_limit() {
    let cache = GroupCache::new(10_000, 4);
    let groups: Vec<u32> = (0..10).collect();
    for lookup in cache.demand(0, &groups, &[], immediately) {
        assert_eq!(ready(lookup).await.unwrap().num_rows(), 1000);
    }
}

#[tokio::test]
async fn prefetching_never_evicts_entries_in_use() {
    let cache = GroupCache::new(20_000, 4);
    for lookup in cache.demand(10, &[0, 1], &[], immediately) {
        ready(lookup).await.unwrap();
    }
    assert_eq!(cache.prefetch(10, &[2], immediately), 0);
    assert_eq!(cache.prefetch(11, &[0, 1], immediately), 2);
    // Many steps later, the old ones may be evicted.
    assert_eq!(cache.prefetch(20, &[2], immediately), 1);
    assert_eq!(cache.prefetch(20, &[0, 2], immediately), 2);
}

#[tokio::test]
async fn prefetching_starts_a_bounded_number_of_decodings() {
    let cache = GroupCache::new(1 << 30, 3);
    let never = |_| (10, std::future::pending::<Result<RecordBatch>>());
    assert_eq!(cache.prefetch(0, &[1, 2, 3, 4, 5], never), 3);
}
