//! Tests of shared row groups: what is shared, between whom, and what becomes of it when a process fails.
mod descriptors;
mod files;
mod meeting;
mod peers;

use std::sync::atomic::{AtomicU32, Ordering};

use arrow::array::{ArrayRef, Int64Array, StringArray};
use arrow::datatypes::Schema;

use super::shelf::Answer;
use super::*;
use crate::feed::PlanId;

/// Rows of a row group that is large enough to be shared.
const ROWS: usize = 20_000;
/// Estimated and largest size of such a row group.
const BYTES: u64 = 500_000;
/// Descriptors of an end, more than a test needs.
const DESCRIPTORS: usize = 256;
/// No test waits longer for what must happen at once.
const DEADLINE: Duration = Duration::from_secs(60);
/// Limits that a busy machine does not reach.
const PATIENT: Limits = Limits {
    answer: DEADLINE.saturating_mul(2),
    claim: DEADLINE.saturating_mul(3),
    wait: DEADLINE.saturating_mul(4),
    quiet: DEADLINE.saturating_mul(10),
};

fn rows(group: u32, count: usize) -> RecordBatch {
    let ids: ArrayRef =
        Arc::new(Int64Array::from_iter_values((0..count as i64).map(|i| i + i64::from(group))));
    let names: ArrayRef = Arc::new(StringArray::from_iter_values((0..count).map(|i| format!("row {i}"))));
    RecordBatch::try_from_iter([("id", ids), ("name", names)]).unwrap()
}

fn batch(group: u32) -> RecordBatch {
    rows(group, ROWS)
}

/// Ends of one cache, as of several processes. Each test has a snapshot of its own, so that tests do not meet.
struct Ends {
    content: [u8; 32],
    schema: SchemaRef,
    bytes_max: u64,
    limits: Limits,
}

impl Ends {
    fn new() -> Self {
        static TESTS: AtomicU32 = AtomicU32::new(0);
        let mut content = [0; 32];
        content[..4].copy_from_slice(&std::process::id().to_le_bytes());
        content[4..8].copy_from_slice(&TESTS.fetch_add(1, Ordering::SeqCst).to_le_bytes());
        Self { content, schema: batch(0).schema(), bytes_max: 64 << 20, limits: PATIENT }
    }

    fn scope(&self) -> Scope<'_> {
        let plan = "ab".repeat(32).parse::<PlanId>().unwrap();
        Scope { content: &self.content, plan, selection: String::new(), groups: 64, schema: &self.schema }
    }

    fn with(&self, mappings: &Arc<Budget>, descriptors: &Descriptors) -> Arc<NodeCache> {
        let (mappings, descriptors) = (Arc::clone(mappings), descriptors.clone());
        NodeCache::with(&self.scope(), self.bytes_max, self.limits, mappings, descriptors)
    }

    fn mapping(&self, mappings: &Arc<Budget>) -> Arc<NodeCache> {
        self.with(mappings, &Descriptors::new(DESCRIPTORS))
    }

    /// As of a process with few descriptors.
    fn spending(&self, descriptors: &Descriptors) -> Arc<NodeCache> {
        self.with(&Budget::new(MAPPINGS_MAX), descriptors)
    }

    fn end(&self) -> Arc<NodeCache> {
        self.mapping(&Budget::new(MAPPINGS_MAX))
    }
}

fn wanted(group: u32) -> Wanted {
    Wanted { group, rows: ROWS, bytes: BYTES }
}

/// Reads a row group, and counts in `decoded` if it was decoded for that.
async fn read(node: &NodeCache, group: u32, decoded: &AtomicU32) -> RecordBatch {
    read_with(node, group, &Semaphore::new(1), decoded).await
}

async fn read_with(node: &NodeCache, group: u32, permits: &Semaphore, decoded: &AtomicU32) -> RecordBatch {
    let decode = async {
        assert_eq!(permits.available_permits(), 0, "decoding holds a permit");
        decoded.fetch_add(1, Ordering::SeqCst);
        Ok(batch(group))
    };
    timeout(DEADLINE, node.read(&wanted(group), permits, decode)).await.expect("it waits").unwrap()
}

#[tokio::test]
async fn each_row_group_is_decoded_once() {
    let ends = Ends::new();
    let (one, other) = (ends.end(), ends.end());
    let decoded = AtomicU32::new(0);
    for group in 0..8 {
        let (a, b) = tokio::join!(read(&one, group, &decoded), read(&other, group, &decoded));
        assert_eq!(a, batch(group));
        assert_eq!(b, batch(group));
    }
    assert_eq!(decoded.load(Ordering::SeqCst), 8);
}

#[tokio::test]
async fn the_end_of_the_server_leaves_the_other_working() {
    let ends = Ends::new();
    let (one, other) = (ends.end(), ends.end());
    let decoded = AtomicU32::new(0);
    let kept = read(&one, 0, &decoded).await;
    drop(one);
    for group in 0..4 {
        assert_eq!(read(&other, group, &decoded).await, batch(group));
    }
    // A mapping outlives its server.
    assert_eq!(kept, batch(0));
}

#[tokio::test]
async fn the_server_holds_no_more_than_its_limit() {
    let ends = Ends { bytes_max: 3 * BYTES, ..Ends::new() };
    let (one, other) = (ends.end(), ends.end());
    let decoded = AtomicU32::new(0);
    for group in 0..16 {
        assert_eq!(read(&one, group, &decoded).await, batch(group));
        assert_eq!(read(&other, group, &decoded).await, batch(group));
        assert!((1..=ends.bytes_max).contains(&one.shelf.bytes()), "{}", one.shelf.bytes());
    }
    assert_eq!(decoded.load(Ordering::SeqCst), 16);
}

#[tokio::test]
async fn small_row_groups_are_not_shared() {
    let ends = Ends::new();
    let permits = Semaphore::new(1);
    let small = |node: Arc<NodeCache>, group: u32, bytes: u64| {
        let permits = &permits;
        async move {
            let wanted = Wanted { group, rows: 100, bytes };
            let decode = async { Ok(rows(group, 100)) };
            assert_eq!(node.read(&wanted, permits, decode).await.unwrap(), rows(group, 100));
        }
    };
    // By the estimate.
    small(ends.end(), 0, BYTES_MIN - 1).await;
    assert!(Listener::bind(&ends.scope().address()).is_ok(), "no server was needed");
    // By the decoded size; the next ones are expected to be as small, and not asked for.
    let node = ends.end();
    small(Arc::clone(&node), 0, BYTES).await;
    assert_eq!(node.shelf.bytes(), 0);
    assert!(!node.may_ask(&wanted(1)));
    // A much larger one of the same plan is.
    assert!(node.may_ask(&Wanted { bytes: 1_000 * BYTES, ..wanted(1) }));
}

#[tokio::test]
async fn a_row_group_beyond_the_limit_of_mappings_is_decoded_by_each_process() {
    let ends = Ends::new();
    let (mappings, decoded) = (Budget::new(2), AtomicU32::new(0));
    let (one, other) = (ends.end(), ends.mapping(&mappings));
    for group in 0..4 {
        read(&one, group, &decoded).await;
    }
    let mut held = vec![read(&other, 0, &decoded).await, read(&other, 1, &decoded).await];
    assert_eq!((mappings.held(), decoded.load(Ordering::SeqCst)), (2, 4));
    held.push(read(&other, 2, &decoded).await);
    assert_eq!((mappings.held(), decoded.load(Ordering::SeqCst)), (2, 5));
    // The end of a batch ends its mapping.
    held.remove(0);
    assert_eq!(mappings.held(), 1);
    held.push(read(&other, 3, &decoded).await);
    assert_eq!((mappings.held(), decoded.load(Ordering::SeqCst)), (2, 5));
    drop(held);
    assert_eq!(mappings.held(), 0);
}

#[tokio::test]
async fn eviction_from_the_local_cache_ends_the_mapping() {
    let ends = Ends::new();
    let (mappings, permits) = (Budget::new(8), Arc::new(Semaphore::new(1)));
    let node = ends.mapping(&mappings);
    // One row group fits.
    let cache = crate::feed::cache::GroupCache::new(BYTES + BYTES / 2, 4);
    for group in 0..4 {
        let load = |group| {
            let (node, permits) = (Arc::clone(&node), Arc::clone(&permits));
            let reading =
                async move { node.read(&wanted(group), &permits, async move { Ok(batch(group)) }).await };
            (BYTES, reading)
        };
        for lookup in cache.demand(u64::from(group), &[group], &[], load) {
            if let crate::feed::cache::Lookup::Loading(loading) = lookup {
                assert_eq!(*loading.await.unwrap(), batch(group));
            }
        }
        assert!((1..=2).contains(&mappings.held()), "{} mappings", mappings.held());
    }
}

#[tokio::test]
async fn a_process_waits_for_one_claim_at_most() {
    let key = Key::new(&[1; 32]);
    let shelf = Shelf::new(1 << 20, 8, LIMITS, key, Descriptors::new(DESCRIPTORS));
    let Answer::Decode(claim) = shelf.ask(1, false) else { panic!("the first has the claim") };
    let Answer::Wait(done) = shelf.ask(1, false) else { panic!("another one waits") };
    assert!(!done.is_cancelled());
    assert!(matches!(shelf.ask(1, true), Answer::Alone));
    drop(claim);
    assert!(done.is_cancelled(), "those that wait go on at once");
    let Answer::Decode(claim) = shelf.ask(1, true) else { panic!("the claim is free") };
    assert!(matches!(shelf.ask(1, true), Answer::Alone), "a process waits once");
    drop(claim);
}

#[tokio::test]
async fn a_paused_server_frees_its_address_before_a_fork() {
    let ends = Ends::new();
    let (node, other) = (ends.end(), ends.end());
    let decoded = AtomicU32::new(0);
    read(&node, 0, &decoded).await;
    assert!(Listener::bind(&node.address).is_err());
    node.pause_serving().await;
    assert_eq!(node.shelf.bytes(), 0);
    let listener = Listener::bind(&node.address).expect("the address is free when the server has ended");
    // Another task of the process must not serve again before the fork.
    drop(listener);
    assert_eq!(read(&node, 0, &decoded).await, batch(0));
    assert!(Listener::bind(&node.address).is_ok());
    node.resume_serving();
    assert_eq!(read(&node, 1, &decoded).await, batch(1));
    assert_eq!(read(&other, 1, &decoded).await, batch(1));
    assert_eq!(decoded.load(Ordering::SeqCst), 3);
}

#[test]
fn processes_of_unknown_users_are_refused() {
    for (peer, own, overflow, is_own) in [
        (1000, 1000, 65_534, true),
        (0, 0, 65_534, true),
        (1001, 1000, 65_534, false),
        // Two users without a number in this namespace look alike.
        (65_534, 65_534, 65_534, false),
        (65_534, 1000, 65_534, false),
        (7, 7, 7, false),
        (65_534, 65_534, 7, true),
    ] {
        assert_eq!(line::is_own_user(peer, own, overflow), is_own, "{peer} {own} {overflow}");
    }
}
