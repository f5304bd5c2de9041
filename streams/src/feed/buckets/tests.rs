use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, Int32Array, Int64Builder, ListBuilder, RecordBatch};
use futures::StreamExt;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};
use parquet::arrow::ArrowWriter;

use super::*;
use crate::feed::permutation::derive_key;
use crate::feed::{
    Coverage, Feed, FeedOptions, Mixture, MixtureFeed, MixtureSource, Plan, PlanOptions, Selection, Shard,
    TokenOptions, Until,
};

const BOUNDS: [u32; 3] = [8, 16, 32];

/// The length of the list of a row; none for a null list.
fn length(row: u64) -> Option<usize> {
    let draw = derive_key(&[row]);
    (!draw.is_multiple_of(17)).then_some((draw / 17 % 40) as usize)
}

fn bucket(row: u64) -> usize {
    BOUNDS.iter().filter(|bound| (**bound as usize) < length(row).unwrap_or(0)).count()
}

/// Row groups of these sizes in one file, with the global row index as `id`.
async fn dataset(groups: &[u64]) -> Arc<dyn ObjectStore> {
    let mut first = 0;
    let mut batches = Vec::new();
    for rows in groups {
        let mut lists = ListBuilder::new(Int64Builder::new());
        for row in first..first + rows {
            match length(row) {
                Some(length) => lists.append_value((0..length as i64).map(Some)),
                None => lists.append_null(),
            }
        }
        let ids = Int32Array::from_iter_values((first..first + rows).map(|row| row as i32));
        let batch = RecordBatch::try_from_iter_with_nullable([
            ("id", Arc::new(ids) as ArrayRef, false),
            ("tokens", Arc::new(lists.finish()) as ArrayRef, true),
        ]);
        batches.push(batch.unwrap());
        first += rows;
    }
    let mut writer = ArrowWriter::try_new(Vec::new(), batches[0].schema(), None).unwrap();
    for batch in &batches {
        writer.write(batch).unwrap();
        writer.flush().unwrap();
    }
    let store = InMemory::new();
    let bytes = PutPayload::from(writer.into_inner().unwrap());
    store.put(&Path::parse("train/a.parquet").unwrap(), bytes).await.unwrap();
    Arc::new(store)
}

fn options(batch_rows: usize) -> PlanOptions {
    let buckets = Some(BucketOptions { column: "tokens".into(), bounds: BOUNDS.to_vec() });
    PlanOptions { buckets, seed: 3, batch_rows, lanes: 4, window_rows: 128, ..PlanOptions::default() }
}

fn open(plan: &Arc<Plan>, store: &Arc<dyn ObjectStore>) -> Feed {
    Feed::open(Arc::clone(plan), Arc::clone(store), &FeedOptions::default()).unwrap()
}

/// The rows with their epochs that the readers of a world deliver, batch by batch.
async fn read(feed: &Feed, world: u32, places: Range<u64>) -> Vec<Vec<(u64, u64)>> {
    let mut streams = Vec::new();
    for rank in 0..world {
        streams.push(feed.stream_places(Shard::new(rank, world).unwrap(), places.clone(), 1).unwrap());
    }
    let mut read = Vec::new();
    loop {
        let mut batch = Vec::new();
        for stream in &mut streams {
            let Some(part) = stream.next().await else { return read };
            let part = part.unwrap();
            let ids = part.batch.column(0).as_primitive::<arrow::datatypes::Int32Type>();
            assert!(ids.values().iter().zip(&part.rows).all(|(id, row)| *id as u64 == *row));
            batch.extend(part.epochs.into_iter().zip(part.rows));
        }
        read.push(batch);
    }
}

#[tokio::test]
async fn batches_are_full_of_like_lengths_and_each_row_comes_once() {
    for (groups, batch_rows) in
        [(&[700, 300, 1][..], 16), (&[1000][..], 7), (&[90, 30][..], 64), (&[5][..], 12)]
    {
        let store = dataset(groups).await;
        let plan = Arc::new(Plan::build(&store, "train", &options(batch_rows)).await.unwrap());
        let rows = plan.rows();
        let counts = plan.buckets().unwrap().counts();
        let expected = (0..rows).fold(vec![0; 4], |mut counts, row| {
            counts[bucket(row)] += 1;
            counts
        });
        assert_eq!(counts, expected);
        let batches = read(&open(&plan, &store), 1, 0..3 * rows).await;
        let size = |batch: &Vec<(u64, u64)>| batch.len();
        assert!(batches[..batches.len() - 1].iter().all(|batch| size(batch) == batch_rows));
        for pass in batches.concat().chunks(rows as usize) {
            let found: BTreeSet<(u64, u64)> = pass.iter().copied().collect();
            // The batch in which a pass ends lists its rows lane by lane.
            assert!(found.len() == pass.len());
        }
        let mut all: Vec<(u64, u64)> = batches.concat();
        all.sort_unstable();
        let expected: Vec<(u64, u64)> =
            (0..3).flat_map(|epoch| (0..rows).map(move |row| (epoch, row))).collect();
        assert_eq!(all, expected);
        let mixed = |batch: &&Vec<(u64, u64)>| {
            batch.iter().map(|(_, row)| bucket(*row)).collect::<BTreeSet<_>>().len() > 1
        };
        let mixed = batches.iter().filter(mixed).count();
        if rows > 20 * batch_rows as u64 {
            // Blocks of at least 17 batches, which the ends of passes cut.
            let blocks = batches.len().div_ceil(17) + 3;
            assert!(mixed <= 4 * blocks && mixed * 2 < batches.len(), "{mixed} of {}", batches.len());
        }
    }
}

#[tokio::test]
async fn any_world_and_any_resume_read_the_same_batches() {
    let store = dataset(&[150, 57]).await;
    let plan = Arc::new(Plan::build(&store, "train", &options(12)).await.unwrap());
    let stored: Plan = serde_json::from_str(&serde_json::to_string(&*plan).unwrap()).unwrap();
    assert_eq!((stored.id(), stored.order_id()), (plan.id(), plan.order_id()));
    let plan = Arc::new(stored);
    let end = 2 * plan.rows();
    let whole = read(&open(&plan, &store), 1, 0..end).await;
    for world in [2, 3, 4, 5, 6, 7, 8, 12, 16] {
        assert_eq!(read(&open(&plan, &store), world, 0..end).await, whole, "{world} readers");
    }
    for step in 0..whole.len() as u64 {
        let rest = read(&open(&plan, &store), 1 + step as u32 % 5, step * 12..end).await;
        assert_eq!(rest, whole[step as usize..], "from step {step}");
        let batch = open(&plan, &store).batch(step, 3..9).await.unwrap();
        if step + 1 < whole.len() as u64 {
            let rows: Vec<(u64, u64)> = batch.epochs.into_iter().zip(batch.rows).collect();
            assert_eq!(rows, whole[step as usize][3..9]);
        }
    }
    // Any place inside a batch, too.
    for place in (1..end).step_by(31) {
        let feed = open(&plan, &store);
        let mut parts = [read(&feed, 3, 0..place).await, read(&feed, 2, place..end).await].concat().concat();
        let mut whole = whole.concat();
        parts.sort_unstable();
        whole.sort_unstable();
        assert_eq!(parts, whole);
    }
    let mut coverage = Coverage::new(Arc::clone(&plan)).unwrap();
    let pass: Vec<u64> =
        whole.concat().into_iter().filter(|(epoch, _)| *epoch == 1).map(|(_, row)| row).collect();
    coverage.add(&pass);
    assert!(coverage.report().is_exact());
}

#[tokio::test]
async fn selected_rows_have_their_own_buckets() {
    let store = dataset(&[200, 100]).await;
    let selection = Selection::new(Some("id >= 50 and id < 260"), &[], None, &[]).unwrap();
    let plan = Plan::build(&store, "train", &PlanOptions { selection, ..options(8) }).await.unwrap();
    let plan = Arc::new(plan);
    let counts = plan.buckets().unwrap().counts();
    assert_eq!(counts.iter().sum::<u64>(), 210);
    assert_eq!(counts[3], (50..260).filter(|row| bucket(*row) == 3).count() as u64);
    let mut rows: Vec<u64> =
        read(&open(&plan, &store), 2, 0..210).await.concat().iter().map(|(_, row)| *row).collect();
    rows.sort_unstable();
    assert_eq!(rows, (50..260).collect::<Vec<_>>());
}

#[tokio::test]
async fn states_of_other_batches_and_wrong_options_are_refused() {
    let store = dataset(&[100]).await;
    let plan = Plan::build(&store, "train", &options(8)).await.unwrap();
    let other = Plan::build(&store, "train", &options(16)).await.unwrap();
    let error = other.in_order(plan.order_id(), &options(16)).unwrap_err().to_string();
    assert!(error.contains("same batch_rows"), "{error}");
    assert!(plan.row_at(0, 0).is_err());

    let with = |column: &str, bounds: &[u32]| {
        let buckets = Some(BucketOptions { column: column.into(), bounds: bounds.to_vec() });
        PlanOptions { buckets, ..options(8) }
    };
    let tokens = PlanOptions { tokens: Some(TokenOptions::new("tokens", 8)), ..options(8) };
    for (options, part) in [
        (with("tokens", &[]), "give 1 to 64 lengths"),
        (with("tokens", &[8, 8]), "each greater than the one before"),
        (with("tokens", &[0]), "from 1 to 2147483647"),
        (with("id", &[8]), "it is Int32; buckets are for lists"),
        (with("text", &[8]), "column \"text\" is not in the dataset"),
        (tokens, "tokens have one length"),
    ] {
        let error = Plan::build(&store, "train", &options).await.unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    let source = MixtureSource { name: "s".into(), plan: Arc::new(plan), weight: "1".parse().unwrap() };
    let mixture = Mixture::new(vec![source], 8, Until::First).unwrap();
    let error = MixtureFeed::open(mixture, &[store], &FeedOptions::default()).err().unwrap().to_string();
    assert!(error.contains("buckets are for one dataset"), "{error}");
    assert_eq!(Buckets::decode_rows("damaged", 10), None);
}
