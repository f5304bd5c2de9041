//! Tests of the order on random shapes: each row once per epoch, and the same batches for every number of
//! readers, from every cursor and by random access.

use std::sync::Arc;

use arrow::array::{AsArray, RecordBatch};
use arrow::compute::concat_batches;
use arrow::datatypes::{Float32Type, Int64Type};
use futures::{StreamExt, TryStreamExt};
use millrace_streams::feed::{
    EpochRows, Epochs, Feed, FeedBatch, FeedError, FeedOptions, Plan, PlanOptions, Shard,
};
use proptest::prelude::*;

use super::data;

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

#[derive(Debug, Clone)]
struct Case {
    shape: Vec<Vec<u64>>,
    options: PlanOptions,
    world: u32,
    cache_bytes_max: u64,
    resume: f64,
}

prop_compose! {
    fn cases()(
        shape in prop::collection::vec(prop::collection::vec(1u64..60, 1..5), 1..6),
        seed: u64,
        batch_rows in 1usize..80,
        lanes in 1u32..12,
        window_rows in 1u64..70,
        world in 1u32..10,
        // The smallest makes the feed decode row groups repeatedly; the order must not change.
        cache_bytes_max in prop::sample::select(vec![0u64, 1, 20_000]),
        resume in 0.0..1.0,
    ) -> Case {
        let options = PlanOptions {
            source: "v@s".into(), seed, batch_rows, lanes, window_rows, ..PlanOptions::default()
        };
        Case { shape, options, world, cache_bytes_max, resume }
    }
}

async fn take(feed: &Feed, shard: Shard, from: u64, steps: u64) -> Vec<FeedBatch> {
    let stream = feed.stream(shard, feed.plan().cursor(from)).unwrap();
    stream.take((steps - from) as usize).try_collect().await.unwrap()
}

fn join(batches: &[FeedBatch]) -> (RecordBatch, Vec<u64>, Vec<u64>) {
    let schema = batches[0].batch.schema();
    (
        concat_batches(&schema, batches.iter().map(|b| &b.batch)).unwrap(),
        batches.iter().flat_map(|b| b.rows.clone()).collect(),
        batches.iter().flat_map(|b| b.epochs.clone()).collect(),
    )
}

fn check_columns(batch: &RecordBatch, rows: &[u64]) {
    let ids = batch["id"].as_primitive::<Int64Type>();
    let pixels = batch["pixels"].as_fixed_size_list();
    let names = batch["name"].as_string::<i32>();
    for (i, &row) in rows.iter().enumerate() {
        let id = ids.value(i);
        assert_eq!(id as u64, row, "the id written is the global row index");
        let values: Vec<f32> = pixels.value(i).as_primitive::<Float32Type>().values().to_vec();
        assert_eq!(values, (0..4).map(|k| data::pixel(id, k)).collect::<Vec<_>>());
        let name = (!arrow::array::Array::is_null(names, i)).then(|| names.value(i).to_string());
        assert_eq!(name, data::name(id));
    }
}

async fn check(case: Case) {
    let store = data::dataset(&case.shape).await;
    let plan = Arc::new(Plan::build(&store, "/train", &case.options).await.unwrap());
    let options = FeedOptions { cache_bytes_max: case.cache_bytes_max, ..FeedOptions::default() };
    let open = || Feed::open(Arc::clone(&plan), Arc::clone(&store), &options).unwrap();
    let epochs = 2;
    let steps = plan.steps_for_epochs(epochs).max(2);

    // Sequentially, by one reader: every row once per epoch, with the right columns.
    let whole = take(&open(), Shard::WHOLE, 0, steps).await;
    let (batch, rows, labels) = join(&whole);
    check_columns(&batch, &rows);
    let mut seen = vec![0u32; (epochs * plan.rows()) as usize];
    for (&row, &epoch) in rows.iter().zip(&labels) {
        if epoch < epochs {
            seen[(epoch * plan.rows() + row) as usize] += 1;
        }
    }
    assert!(seen.iter().all(|&n| n == 1));

    // By `world` readers, each with a separate feed: their slices side by side are the same.
    let mut parts = Vec::new();
    for rank in 0..case.world {
        parts.push(take(&open(), Shard::new(rank, case.world).unwrap(), 0, steps).await);
    }
    for (step, one) in whole.iter().enumerate() {
        let slices: Vec<FeedBatch> = parts.iter().map(|p| p[step].clone()).collect();
        let (batch, rows, labels) = join(&slices);
        assert_eq!((&batch, &rows, &labels), (&one.batch, &one.rows, &one.epochs));
    }

    // From any cursor: the identical rest.
    let from = (case.resume * steps as f64) as u64;
    let rest = take(&open(), Shard::WHOLE, from, steps).await;
    for (a, b) in rest.iter().zip(&whole[from as usize..]) {
        assert_eq!((a.step, &a.batch, &a.rows, &a.epochs), (b.step, &b.batch, &b.rows, &b.epochs));
    }

    // By random access, backwards and in odd slices.
    let feed = open();
    for one in whole.iter().rev() {
        let cut = (case.resume * case.options.batch_rows as f64) as usize;
        let low = feed.batch(one.step, 0..cut).await.unwrap();
        let high = feed.batch(one.step, cut..case.options.batch_rows).await.unwrap();
        let (batch, rows, labels) = join(&[low, high]);
        assert_eq!((&batch, &rows, &labels), (&one.batch, &one.rows, &one.epochs));
        for (slot, (&row, &epoch)) in one.rows.iter().zip(&one.epochs).enumerate() {
            assert_eq!(plan.row_at(one.step, slot).unwrap(), (row, epoch));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn order_depends_on_the_plan_alone(case in cases()) {
        runtime().block_on(check(case));
    }
}

/// Ranges of places that begin and end inside batches, as readers of whole epochs take them: `world` readers with
/// `workers` each, of which one takes every `workers`-th batch.
async fn check_places(case: Case, workers: u64) {
    let store = data::dataset(&case.shape).await;
    let plan = Arc::new(Plan::build(&store, "/train", &case.options).await.unwrap());
    let feed = Feed::open(Arc::clone(&plan), store, &FeedOptions::default()).unwrap();
    let (rows, batch_rows) = (plan.rows(), case.options.batch_rows as u64);
    let start = if case.resume < 0.7 { (case.resume * rows as f64) as u64 } else { rows };
    let places = start..2 * rows;
    let steps = places.end.div_ceil(batch_rows);
    // The rows at the places, in the order of their slots.
    let mut expected = Vec::new();
    for batch in take(&feed, Shard::WHOLE, 0, steps).await {
        for (slot, (row, pass)) in batch.rows.iter().zip(&batch.epochs).enumerate() {
            let place = plan.place_of_slot(batch.step, slot);
            assert_eq!((place / batch_rows, place / rows), (batch.step, *pass));
            if places.contains(&place) {
                expected.push(*row);
            }
        }
    }

    let mut by_step = vec![Vec::new(); (steps - places.start / batch_rows) as usize];
    for rank in 0..case.world {
        let shard = Shard::new(rank, case.world).unwrap();
        for worker in 0..workers {
            let start = match worker {
                0 => places.start,
                _ => plan.place_after(places.start, worker),
            };
            let stream = feed.stream_places(shard, start..places.end, workers).unwrap();
            let batches: Vec<FeedBatch> = stream.try_collect().await.unwrap();
            for (i, batch) in batches.iter().enumerate() {
                let step = worker + i as u64 * workers;
                assert_eq!(batch.step, places.start / batch_rows + step);
                by_step[step as usize].push(batch.rows.clone());
            }
        }
    }
    for parts in &by_step {
        assert_eq!(parts.len(), case.world as usize, "each reader gets each batch");
        let sizes = parts.iter().map(Vec::len);
        assert!(sizes.clone().max().unwrap() - sizes.min().unwrap() <= 1, "readers share evenly");
    }
    let read: Vec<u64> = by_step.concat().concat();
    assert_eq!(read, expected);
    // A pass that begins and ends inside batches has each row once, whatever the lanes.
    let mut visited: Vec<u64> = Vec::new();
    plan.visit_rows(places, |row| visited.push(row));
    let mut sorted = read;
    sorted.sort_unstable();
    visited.sort_unstable();
    assert_eq!(sorted, visited);
    assert!(start < rows || sorted.into_iter().eq(0..rows));
}

/// Epochs of any length by any readers: the places of consecutive epochs, each row once per pass.
async fn check_epochs(case: Case, length: EpochRows) {
    let store = data::dataset(&case.shape).await;
    let plan = Arc::new(Plan::build(&store, "/train", &case.options).await.unwrap());
    let Ok(epochs) = Epochs::new(plan.rows(), Some(length)) else { return };
    let feed = Feed::open(Arc::clone(&plan), store, &FeedOptions::default()).unwrap();
    let mut counts = vec![0u64; plan.rows() as usize];
    let mut read = 0;
    for epoch in 0..12 {
        let places = epochs.places(epoch..epoch + 1);
        // A reader stops after some batch, and another number of readers goes on from the number of rows.
        let cut = places.start + (case.resume * (places.end - places.start) as f64) as u64;
        let cut = match cut / plan.batch_rows() as u64 * plan.batch_rows() as u64 {
            cut if cut > places.start => cut,
            _ => places.start,
        };
        let mut rows = Vec::new();
        for (part, world) in [(places.start..cut, case.world), (cut..places.end, case.world % 8 + 1)] {
            for rank in 0..world {
                let stream = feed.stream_places(Shard::new(rank, world).unwrap(), part.clone(), 1).unwrap();
                let batches: Vec<FeedBatch> = stream.try_collect().await.unwrap();
                rows.extend(batches.into_iter().flat_map(|batch| batch.rows));
            }
        }
        let mut expected = Vec::new();
        plan.visit_rows(places.clone(), |row| expected.push(row));
        rows.sort_unstable();
        expected.sort_unstable();
        assert_eq!(rows, expected, "epoch {epoch}");
        read += rows.len() as u64;
        rows.iter().for_each(|row| counts[*row as usize] += 1);
        // No row comes a second time before every row has come.
        let passes = read / plan.rows();
        assert!(counts.iter().all(|count| (passes..=passes + 1).contains(count)), "{counts:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn shorter_epochs_rotate_through_all_rows(
        case in cases(),
        length in prop_oneof![
            (1u64..60).prop_map(EpochRows::Rows),
            (1u64..=20).prop_map(|part| EpochRows::Fraction(part * 50_000_000_000_000_000)),
        ],
    ) {
        runtime().block_on(check_epochs(case, length));
    }
}

/// A position in one plan is one in a plan with other batches, if the lanes divide them.
#[tokio::test]
async fn other_batches_go_on_at_the_same_row() {
    let store = data::dataset(&vec![vec![40; 6]; 5]).await;
    let options =
        |batch_rows| PlanOptions { batch_rows, lanes: 8, window_rows: 50, ..PlanOptions::default() };
    let build = async |batch_rows| Plan::build(&store, "/train", &options(batch_rows)).await.unwrap();
    let first = build(32).await;
    assert_eq!(first.lanes(), 8);
    for batch_rows in [8, 16, 24, 120, 4096] {
        let other = build(batch_rows).await;
        let resumed = other.in_order(first.order_id(), &options(batch_rows)).unwrap();
        assert_eq!(
            (resumed.order_id(), resumed.batch_rows(), resumed.lanes()),
            (first.order_id(), batch_rows, 8)
        );
        assert_eq!(resumed.window_rows(), first.window_rows());
        let (first, resumed) = (Arc::new(first.clone()), Arc::new(resumed));
        let (mut rows, mut others) = (Vec::new(), Vec::new());
        first.visit_rows(64..1500, |row| rows.push(row));
        let feed = Feed::open(Arc::clone(&resumed), Arc::clone(&store), &FeedOptions::default()).unwrap();
        let mut stream = feed.stream_places(Shard::WHOLE, 64..1500, 1).unwrap();
        while let Some(batch) = stream.next().await {
            others.extend(batch.unwrap().rows);
        }
        rows.sort_unstable();
        others.sort_unstable();
        assert_eq!(rows, others);
    }
    // Four lanes in one plan, eight in the other.
    let twelve = build(12).await;
    assert_eq!(twelve.lanes(), 6);
    let refused = twelve.in_order(first.order_id(), &options(12)).unwrap_err();
    assert!(refused.to_string().contains("multiple of 8"), "{refused}");
    let back = build(24).await.in_order(twelve.order_id(), &options(24)).unwrap();
    assert_eq!((back.lanes(), back.order_id()), (6, twelve.order_id()));
    let seed = PlanOptions { seed: 1, ..options(32) };
    let seed = Plan::build(&store, "/train", &seed).await.unwrap();
    let refused = first.in_order(seed.order_id(), &options(32)).unwrap_err();
    assert!(matches!(refused, FeedError::OtherOrder { .. }), "{refused}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn parts_of_readers_and_workers_are_the_places_in_order(case in cases(), workers in 1u64..5) {
        runtime().block_on(check_places(case, workers));
    }
}

#[tokio::test]
async fn places_and_strides_out_of_bounds_are_refused() {
    let store = data::dataset(&[vec![5]]).await;
    let plan = Plan::build(&store, "train", &PlanOptions::default()).await.unwrap();
    let feed = Feed::open(plan, store, &FeedOptions::default()).unwrap();
    assert!(feed.stream_places(Shard::WHOLE, 0..u64::MAX, 1).is_err());
    assert!(feed.stream_places(Shard::WHOLE, 0..5, 0).is_err());
    assert!(feed.stream_places(Shard::WHOLE, 5..5, 1).unwrap().next().await.is_none());
}

#[tokio::test]
async fn twelve_to_sixty_four_ranks_read_the_order_of_one() {
    let store = data::dataset(&vec![vec![40; 6]; 5]).await;
    for batch_rows in [50, 192] {
        let options = PlanOptions { batch_rows, window_rows: 50, ..PlanOptions::default() };
        let plan = Arc::new(Plan::build(&store, "train", &options).await.unwrap());
        let feed = Feed::open(Arc::clone(&plan), Arc::clone(&store), &FeedOptions::default()).unwrap();
        let steps = plan.steps_for_epochs(2);
        let whole = take(&feed, Shard::WHOLE, 0, steps).await;
        for world in [12, 16, 32, 64] {
            let mut parts = Vec::new();
            for rank in 0..world {
                parts.push(take(&feed, Shard::new(rank, world).unwrap(), 0, steps).await);
            }
            for (step, one) in whole.iter().enumerate() {
                let read: Vec<u64> = parts.iter().flat_map(|part| part[step].rows.clone()).collect();
                assert_eq!(read, one.rows, "{world} ranks, batches of {batch_rows}, step {step}");
            }
        }
    }
}

#[tokio::test]
async fn tiny_datasets_wrap_around_inside_a_batch() {
    for rows in [1u64, 2, 3, 5] {
        let store = data::dataset(&[vec![rows]]).await;
        let options = PlanOptions { batch_rows: 16, seed: 3, ..PlanOptions::default() };
        let plan = Plan::build(&store, "train", &options).await.unwrap();
        let feed = Feed::open(plan, store, &FeedOptions::default()).unwrap();
        let batch = feed.batch(0, 0..16).await.unwrap();
        let expected: Vec<u64> = (0..16).map(|t| t / rows).collect();
        assert_eq!(batch.epochs, expected);
        for epoch in 0..16 / rows {
            let from = (epoch * rows) as usize;
            let mut of_epoch = batch.rows[from..from + rows as usize].to_vec();
            of_epoch.sort_unstable();
            assert_eq!(of_epoch, (0..rows).collect::<Vec<_>>());
        }
    }
}

#[tokio::test]
async fn epochs_and_seeds_differ_and_rows_are_spread() {
    let store = data::dataset(&vec![vec![500; 4]; 5]).await;
    let base = PlanOptions { batch_rows: 100, window_rows: 800, ..PlanOptions::default() };
    let mut orders = Vec::new();
    for seed in 0..3 {
        let options = PlanOptions { seed, ..base.clone() };
        let plan = Plan::build(&store, "train", &options).await.unwrap();
        let feed = Feed::open(plan, Arc::clone(&store), &FeedOptions::default()).unwrap();
        let steps = feed.plan().steps_for_epochs(2);
        let batches = take(&feed, Shard::WHOLE, 0, steps).await;
        // A batch takes its rows from all over the dataset.
        for batch in &batches {
            let quarters: std::collections::BTreeSet<u64> =
                batch.rows.iter().map(|r| r * 4 / 10_000).collect();
            assert!(quarters.len() >= 3, "{:?}", batch.rows);
        }
        let (_, rows, _) = join(&batches);
        orders.push(rows[..10_000].to_vec());
        orders.push(rows[10_000..].to_vec());
    }
    for (i, a) in orders.iter().enumerate() {
        for b in &orders[..i] {
            let same = a.iter().zip(b).filter(|(x, y)| x == y).count();
            assert!(same < 30, "{same} of 10000 rows at the same place");
        }
    }
}
