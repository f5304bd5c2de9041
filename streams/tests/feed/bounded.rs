//! Memory test: with a cache no larger than the plan's working set, one or several readers still read row
//! groups about once per epoch.

use std::sync::Arc;

use arrow::array::RecordBatch;
use futures::StreamExt;
use millrace_streams::feed::{Feed, FeedOptions, Plan, PlanOptions, Shard};
use object_store::ObjectStore;
use object_store::memory::InMemory;

use super::data::{CountingStore, parquet, put, rows};

const FILES: u64 = 10;
const GROUPS: u64 = 24;
const GROUP_ROWS: u64 = 500;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_groups_are_read_about_once_per_epoch_within_the_bound() {
    let memory = InMemory::new();
    for f in 0..FILES {
        let groups: Vec<RecordBatch> =
            (0..GROUPS).map(|g| rows((f * GROUPS + g) * GROUP_ROWS, GROUP_ROWS)).collect();
        put(&memory, &format!("train/{f}.parquet"), parquet(&groups)).await;
    }
    let watched = CountingStore::new(Arc::new(memory));
    let store: Arc<dyn ObjectStore> = watched.clone();
    let options = PlanOptions {
        batch_rows: 96,
        window_rows: 4096,
        working_set_bytes_max: 1_500_000,
        ..PlanOptions::default()
    };
    let plan = Arc::new(Plan::build(&store, "train", &options).await.unwrap());
    let total: u64 = plan.dataset().files().iter().flat_map(|f| &f.row_groups).map(|g| g.bytes).sum();
    assert!(total > 2 * options.working_set_bytes_max, "{total}");
    assert!(plan.working_set_bytes() <= options.working_set_bytes_max);
    assert!(plan.lanes() >= 4, "{} lanes", plan.lanes());
    let epochs = 3;
    let steps = plan.steps_for_epochs(epochs) as usize;
    for world in [1, 2, 4] {
        let before = watched.reads();
        for rank in 0..world {
            // Decoded arrays are somewhat larger than their estimate, and lanes change windows.
            let share = plan.working_set_bytes() / u64::from(world) * 3 / 2;
            let options = FeedOptions { cache_bytes_max: share, ..FeedOptions::default() };
            let feed = Feed::open(Arc::clone(&plan), Arc::clone(&store), &options).unwrap();
            let shard = Shard::new(rank, world).unwrap();
            let mut stream = feed.stream(shard, plan.cursor(0)).unwrap().take(steps);
            while let Some(batch) = stream.next().await {
                batch.unwrap();
            }
        }
        let groups = (FILES * GROUPS * epochs) as f64;
        let amplification = (watched.reads() - before) as f64 / groups;
        assert!(amplification < 1.4, "{world} readers read {amplification:.2} times what there is");
    }
}
