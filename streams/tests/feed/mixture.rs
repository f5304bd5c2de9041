//! Tests of mixtures on random shapes, against a naive model: a list of rows for each source, taken in turns.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, Float32Array, Int64Array, LargeStringArray, RecordBatch, StringArray};
use arrow::datatypes::Int64Type;
use futures::TryStreamExt;
use millrace_streams::feed::{
    AnyFeed, EpochRows, FeedBatch, FeedError, FeedOptions, Mixture, MixtureFeed, MixtureSource, Plan,
    PlanOptions, Selection, Shard, Until,
};
use object_store::ObjectStore;
use object_store::memory::InMemory;
use proptest::prelude::*;

use super::data;

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

#[derive(Debug, Clone)]
struct Case {
    shapes: Vec<(Vec<Vec<u64>>, u64)>,
    batch_rows: usize,
    lanes: u32,
    window_rows: u64,
    seed: u64,
    until: Until,
    rows_per_epoch: Option<u64>,
    filter: bool,
    resumes: Vec<(f64, u32)>,
}

prop_compose! {
    fn cases()(
        shapes in prop::collection::vec(
            (prop::collection::vec(prop::collection::vec(1u64..40, 1..4), 1..4), 1u64..20), 1..5,
        ),
        batch_rows in 1usize..60,
        lanes in 1u32..9,
        window_rows in 1u64..50,
        seed: u64,
        until in prop::sample::select(vec![Until::First, Until::Every]),
        rows_per_epoch in prop::option::of(1u64..300),
        filter: bool,
        resumes in prop::collection::vec((0.0..1.0, 1u32..9), 1..4),
    ) -> Case {
        Case { shapes, batch_rows, lanes, window_rows, seed, until, rows_per_epoch, filter, resumes }
    }
}

/// Rows of some places by `world` readers, batch by batch in the order of the ranks.
async fn read(feed: &AnyFeed, places: std::ops::Range<u64>, world: u32) -> Vec<(usize, u64)> {
    let mut by_rank = Vec::new();
    for rank in 0..world {
        let stream = feed.stream_places(Shard::new(rank, world).unwrap(), places.clone(), 1).unwrap();
        let batches: Vec<FeedBatch> = stream.try_collect().await.unwrap();
        by_rank.push(batches);
    }
    let mut rows = Vec::new();
    for step in 0..by_rank[0].len() {
        for batches in &by_rank {
            let batch = &batches[step];
            let ids = batch.batch["id"].as_primitive::<Int64Type>().values().to_vec();
            assert_eq!(batch.batch.num_rows(), batch.sources.len());
            assert!(ids.iter().zip(&batch.rows).all(|(id, row)| *id as u64 == *row));
            rows.extend(batch.sources.iter().map(|source| *source as usize).zip(batch.rows.iter().copied()));
        }
    }
    rows
}

async fn check(case: Case) {
    let mut sources = Vec::new();
    let mut stores = Vec::new();
    for (at, (shape, weight)) in case.shapes.iter().enumerate() {
        let store = data::dataset(shape).await;
        let selection =
            if case.filter { Selection::new(Some("id != 0"), &[], None, &[]).unwrap() } else { None };
        let options = PlanOptions {
            source: format!("v{at}@s"),
            seed: case.seed.wrapping_add(at as u64),
            batch_rows: case.lanes as usize,
            lanes: case.lanes,
            window_rows: case.window_rows,
            selection,
            ..PlanOptions::default()
        };
        let plan = match Plan::build(&store, "/train", &options).await {
            Err(FeedError::NothingSelected { .. }) => return,
            plan => Arc::new(plan.unwrap()),
        };
        sources.push(MixtureSource {
            name: format!("v{at}@s:/train"),
            plan,
            weight: weight.to_string().parse().unwrap(),
        });
        stores.push(store);
    }
    let plans: Vec<Arc<Plan>> = sources.iter().map(|source| Arc::clone(&source.plan)).collect();
    let mixture = Arc::new(Mixture::new(sources, case.batch_rows, case.until).unwrap());
    let open =
        || AnyFeed::from(MixtureFeed::open(Arc::clone(&mixture), &stores, &FeedOptions::default()).unwrap());
    let feed = open();
    let epochs = feed.epochs(case.rows_per_epoch.map(EpochRows::Rows)).unwrap();
    let places = epochs.places(0..2);

    // One reader: the exact share of each source, and its own rows in passes.
    let whole = read(&feed, places.clone(), 1).await;
    assert_eq!(whole.len() as u64, places.end);
    let counts = mixture.counts(places.end);
    let total: u64 = case.shapes.iter().map(|(_, weight)| weight).sum();
    for (at, (plan, (_, weight))) in plans.iter().zip(&case.shapes).enumerate() {
        let own: Vec<u64> = whole.iter().filter(|(source, _)| *source == at).map(|(_, row)| *row).collect();
        assert_eq!(own.len() as u64, counts[at]);
        let exact = places.end as f64 * *weight as f64 / total as f64;
        assert!((own.len() as f64 - exact).abs() < plans.len() as f64, "{} of {exact}", own.len());
        let passes = own.len() as u64 / plan.rows();
        let mut seen: HashMap<u64, u64> = HashMap::new();
        own.iter().for_each(|row| *seen.entry(*row).or_default() += 1);
        assert!(seen.values().all(|count| (passes..=passes + 1).contains(count)), "{seen:?}");
        assert!(passes == 0 || seen.len() as u64 == plan.rows());
        // The rows are those of the source's own order.
        let (mut expected, mut sorted) = (Vec::new(), own);
        plan.visit_rows(0..counts[at], |row| expected.push(row));
        expected.sort_unstable();
        sorted.sort_unstable();
        assert_eq!(sorted, expected);
    }
    if case.rows_per_epoch.is_none() {
        let first = mixture.counts(epochs.start(1));
        let done = first.iter().zip(&plans).map(|(count, plan)| *count >= plan.rows());
        match case.until {
            Until::First => {
                assert_eq!(done.filter(|done| *done).count().min(1), 1);
                assert!(first.iter().zip(&plans).all(|(count, plan)| *count <= plan.rows()));
            }
            Until::Every => assert!(done.into_iter().all(|done| done)),
        }
    }
    // Whole batches have each source's share, give or take the number of sources.
    for step in 0..places.end / case.batch_rows as u64 {
        let (before, after) = (
            mixture.counts(step * case.batch_rows as u64),
            mixture.counts((step + 1) * case.batch_rows as u64),
        );
        for (at, (_, weight)) in case.shapes.iter().enumerate() {
            let exact = case.batch_rows as f64 * *weight as f64 / total as f64;
            assert!(((after[at] - before[at]) as f64 - exact).abs() < 2.0 * plans.len() as f64);
        }
    }

    // Any numbers of readers, which stop after some batches; others go on with separate caches.
    let batch = case.batch_rows as u64;
    let mut cuts: Vec<(u64, u32)> = case
        .resumes
        .iter()
        .map(|(at, world)| ((*at * places.end as f64) as u64 / batch * batch, *world))
        .collect();
    cuts.sort_unstable();
    cuts.push((places.end, 3));
    let (mut from, mut rows) = (0, Vec::new());
    for (to, world) in cuts {
        rows.extend(read(&open(), from..to, world).await);
        from = to;
    }
    assert_eq!(rows, whole);

    // Other batches: the same rows at the same places.
    let other = Mixture::new(mixture.sources().to_vec(), case.batch_rows * 2 + 1, case.until).unwrap();
    assert_eq!(other.order_id(), mixture.order_id());
    let other = AnyFeed::from(MixtureFeed::open(other, &stores, &FeedOptions::default()).unwrap());
    let from = places.end / 2 / batch * batch;
    let mut rest = read(&other, from..places.end, 2).await;
    let mut expected = whole[from as usize..].to_vec();
    rest.sort_unstable();
    expected.sort_unstable();
    assert_eq!(rest, expected);

    // Whole batches by their slots, as a trainer reads them: the same rows, and each epoch has those at its places.
    let mut by_epoch: HashMap<u64, Vec<(u32, u64)>> = HashMap::new();
    for step in 0..places.end.div_ceil(batch) {
        let cut = case.batch_rows / 3;
        let mut rows = Vec::new();
        for slots in [0..cut, cut..case.batch_rows].into_iter().filter(|slots| !slots.is_empty()) {
            let found = feed.batch(step, slots.clone()).await.unwrap();
            assert_eq!((found.step, &found.slots, found.rows.len()), (step, &slots, slots.len()));
            rows.extend(found.sources.into_iter().zip(found.rows));
        }
        let first = (step * batch) as usize;
        if let Some(expected) = whole.get(first..first + case.batch_rows) {
            let expected = expected.iter().map(|(source, row)| (*source as u32, *row));
            assert!(rows.iter().copied().eq(expected), "step {step}");
        }
        let at = mixture.places_of_batch(step);
        assert_eq!(at.len(), case.batch_rows);
        for (place, row) in at.into_iter().zip(rows) {
            by_epoch.entry(epochs.of_place(place)).or_default().push(row);
        }
    }
    for epoch in 0..2 {
        let mut expected = Vec::new();
        mixture.visit_rows(epochs.places(epoch..epoch + 1), |source, row| expected.push((source, row)));
        let mut found = by_epoch.remove(&epoch).unwrap();
        found.sort_unstable();
        expected.sort_unstable();
        assert_eq!(found, expected, "epoch {epoch}");
    }
    assert!(feed.batch(0, 0..case.batch_rows + 1).await.is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn mixtures_are_exact_for_any_readers_and_resumes(case in cases()) {
        runtime().block_on(check(case));
    }
}

async fn source(name: &str, columns: Vec<(&str, ArrayRef)>) -> (MixtureSource, Arc<dyn ObjectStore>) {
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    source_of_file(name, "train/0.parquet", data::parquet(&[batch])).await
}

async fn source_of_file(name: &str, path: &str, bytes: Vec<u8>) -> (MixtureSource, Arc<dyn ObjectStore>) {
    let store = InMemory::new();
    data::put(&store, path, bytes).await;
    let store: Arc<dyn ObjectStore> = Arc::new(store);
    let plan = Plan::build(&store, "/train", &PlanOptions { batch_rows: 64, ..PlanOptions::default() })
        .await
        .unwrap();
    (MixtureSource { name: name.into(), plan: Arc::new(plan), weight: "1".parse().unwrap() }, store)
}

/// A text file is decoded to its own types, which are then widened to those of the mixture.
#[tokio::test]
async fn texts_of_files_are_mixed_with_wider_types() {
    let ids = Arc::new(Int64Array::from(vec![0, 1])) as ArrayRef;
    let texts = Arc::new(LargeStringArray::from(vec!["c", "d"])) as ArrayRef;
    let wide = source("wide", vec![("id", ids), ("x", texts)]).await;
    for (path, content) in [
        ("train/0.csv", "id,x\n0,a\n1,b\n"),
        ("train/0.jsonl", "{\"id\":0,\"x\":\"a\"}\n{\"id\":1,\"x\":\"b\"}\n"),
    ] {
        let text = source_of_file("text", path, content.as_bytes().to_vec()).await;
        for sources in [[&text, &wide], [&wide, &text]] {
            let mixture =
                Mixture::new(sources.map(|(source, _)| source.clone()).to_vec(), 4, Until::First).unwrap();
            let stores = sources.map(|(_, store)| Arc::clone(store));
            let feed = AnyFeed::from(MixtureFeed::open(mixture, &stores, &FeedOptions::default()).unwrap());
            let stream = feed.stream_places(Shard::WHOLE, 0..4, 1).unwrap();
            let batches: Vec<FeedBatch> = stream.try_collect().await.unwrap();
            let mut found: Vec<String> = batches
                .iter()
                .flat_map(|batch| {
                    batch.batch["x"].as_string::<i64>().iter().map(|text| text.unwrap().to_owned())
                })
                .collect();
            found.sort();
            assert_eq!(found, ["a", "b", "c", "d"], "{path}");
        }
    }
}

#[tokio::test]
async fn columns_that_differ_are_named_with_both_sources() {
    let ids = || Arc::new(Int64Array::from(vec![0, 1])) as ArrayRef;
    let text = || Arc::new(StringArray::from(vec!["a", "b"])) as ArrayRef;
    let float = Arc::new(Float32Array::from(vec![0.5, 1.5])) as ArrayRef;
    let first = source("a", vec![("id", ids()), ("x", text())]).await;
    let open = |other: &(MixtureSource, Arc<dyn ObjectStore>), columns: Option<&[&str]>| {
        let sources = vec![first.0.clone(), other.0.clone()];
        let mixture = Mixture::new(sources, 4, Until::First).unwrap();
        let columns = columns.map(|names| names.iter().map(|name| (*name).to_owned()).collect());
        let options = FeedOptions { columns, ..FeedOptions::default() };
        MixtureFeed::open(mixture, &[Arc::clone(&first.1), Arc::clone(&other.1)], &options)
    };
    let kind = source("b", vec![("id", ids()), ("x", float)]).await;
    let missing = source("c", vec![("id", ids())]).await;
    let more = source("d", vec![("x", text()), ("more", ids()), ("id", ids())]).await;
    let columns: Option<&[&str]> = Some(&["id", "x"]);
    for (other, columns, words) in [
        (&kind, None, ["\"x\" is Utf8 in a", "Float32 in b"]),
        (&missing, None, ["\"x\" is Utf8 in a", "missing in c"]),
        (&missing, columns, ["\"x\" is Utf8 in a", "missing in c"]),
        (&more, None, ["\"more\" is missing in a", "Int64 in d"]),
    ] {
        let refused = open(other, columns).err().unwrap();
        assert!(matches!(refused, FeedError::MixedColumns { .. }), "{refused}");
        assert!(words.iter().all(|word| refused.to_string().contains(word)), "{refused}");
    }
    for other in [&kind, &missing, &more] {
        let feed = open(other, Some(&["id"])).unwrap();
        assert_eq!(feed.schema().fields().len(), 1);
    }
    let feed = AnyFeed::from(open(&more, columns).unwrap());
    assert_eq!(read(&feed, 0..4, 3).await.len(), 4);
    let fewer = MixtureFeed::open(
        Mixture::new(vec![first.0], 4, Until::First).unwrap(),
        &[],
        &FeedOptions::default(),
    );
    assert!(fewer.err().unwrap().to_string().contains("0 stores"));
}
