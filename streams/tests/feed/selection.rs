//! Tests of plans with a selection, against a naive filter over all rows.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::{
    ArrayRef, BooleanArray, Date32Array, Float32Array, Int32Array, Int64Array, ListArray, NullArray,
    RecordBatch, StringArray, TimestampMicrosecondArray, UInt64Array,
};
use arrow::datatypes::Int64Type;
use futures::{StreamExt, TryStreamExt};
use millrace_streams::dataset::DatasetCache;
use millrace_streams::feed::{Feed, FeedBatch, FeedError, FeedOptions, Plan, PlanOptions, Selection, Shard};
use object_store::ObjectStore;
use parking_lot::Mutex;
use proptest::prelude::*;
use sha2::{Digest, Sha256};

use super::data;

const PARTS: [(&str, u64); 3] = [("train", 8), ("val", 1), ("test", 1)];

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn parts() -> Vec<(String, String)> {
    PARTS.iter().map(|(name, tenths)| ((*name).to_owned(), format!("0.{tenths}"))).collect()
}

fn selection(filter: Option<&str>, split: Option<&str>, by: &[&str]) -> Option<Selection> {
    let by: Vec<String> = by.iter().map(|name| (*name).to_owned()).collect();
    let (parts, by) = if split.is_some() { (parts(), by) } else { Default::default() };
    Selection::new(filter, &parts, split, &by).unwrap()
}

/// A condition, and what it means for a row of [`data::rows`].
type Naive = (String, Box<dyn Fn(i64) -> bool>);

type Make = fn(i64, i64) -> Naive;

fn filters() -> impl Strategy<Value = Option<Make>> {
    let filters: [Make; 5] = [
        |a, _| (format!("id < {a}"), Box::new(move |id| id < a)),
        |a, b| (format!("not (id >= {a} and id != {b})"), Box::new(move |id| !(id >= a && id != b))),
        |a, b| (format!("id in ({a}, {b}) or {a}.5 > id"), Box::new(move |id| id == a || id == b || id <= a)),
        |_, _| ("name is null".to_owned(), Box::new(|id| id % 7 == 0)),
        // Unknown where the name is null, unless the other side decides.
        |a, b| {
            let holds = move |id| {
                data::name(id)
                    .is_some_and(|name| name != format!("row {a}") && (id < b || name.as_str() > "row 2"))
            };
            (format!("not name = 'row {a}' and (id < {b} or name > 'row 2')"), Box::new(holds))
        },
    ];
    prop::option::of(prop::sample::select(filters.to_vec()))
}

fn hash(bytes: &[&[u8]]) -> u64 {
    let mut hash = Sha256::new_with_prefix("millrace split 1");
    bytes.iter().for_each(|bytes| hash.update(bytes));
    u64::from_be_bytes(*hash.finalize().first_chunk::<8>().unwrap())
}

/// The part of a row by the documented rules.
fn part_of(id: i64, by: &[&str], file: &str, row: u64) -> &'static str {
    let mut key: Vec<u8> = Vec::new();
    let text = |key: &mut Vec<u8>, text: &str| {
        key.extend((text.len() as u64).to_le_bytes());
        key.extend(text.as_bytes());
    };
    for column in by {
        match (*column, data::name(id)) {
            ("id", _) => {
                key.push(1);
                key.extend(i128::from(id).to_le_bytes());
            }
            (_, Some(name)) => {
                key.push(4);
                text(&mut key, &name);
            }
            (_, None) => key.push(0),
        }
    }
    if by.is_empty() {
        key.push(7);
        text(&mut key, file);
        key.extend(row.to_le_bytes());
    }
    let mut border = 0u128;
    for (name, tenths) in PARTS {
        border += u128::from(tenths);
        if u128::from(hash(&[&key])) < (border << 64) / 10 {
            return name;
        }
    }
    panic!("the parts are complete");
}

/// File and row number of each row.
fn places(shape: &[Vec<u64>]) -> Vec<(String, u64)> {
    let mut all = Vec::new();
    for (i, sizes) in shape.iter().enumerate() {
        let suffix = if i % 3 == 2 { "arrow" } else { "parquet" };
        all.extend((0..sizes.iter().sum()).map(|row| (format!("train/{i:03}.{suffix}"), row)));
    }
    all
}

async fn take(feed: &Feed, shard: Shard, from: u64, steps: u64) -> Vec<FeedBatch> {
    let stream = feed.stream(shard, feed.plan().cursor(from)).unwrap();
    stream.take((steps - from) as usize).try_collect().await.unwrap()
}

fn ids(batch: &FeedBatch) -> Vec<u64> {
    ids_of(&batch.batch)
}

fn ids_of(batch: &RecordBatch) -> Vec<u64> {
    use arrow::array::AsArray;
    batch["id"].as_primitive::<Int64Type>().values().iter().map(|id| *id as u64).collect()
}

struct Case {
    shape: Vec<Vec<u64>>,
    options: PlanOptions,
    filter: Option<Naive>,
    by: Vec<&'static str>,
    part: Option<&'static str>,
    resume: f64,
}

async fn check(case: Case) {
    let store = data::dataset(&case.shape).await;
    let rows: u64 = case.shape.iter().flatten().sum();
    let places = places(&case.shape);
    let expected: Vec<u64> = (0..rows)
        .filter(|row| case.filter.as_ref().is_none_or(|(_, holds)| holds(*row as i64)))
        .filter(|row| {
            let (file, number) = &places[*row as usize];
            case.part.is_none_or(|part| part_of(*row as i64, &case.by, file, *number) == part)
        })
        .collect();
    let selection = selection(case.filter.as_ref().map(|(text, _)| text.as_str()), case.part, &case.by);
    let options = PlanOptions { selection, ..case.options };
    let plan = match Plan::build(&store, "/train", &options).await {
        Err(FeedError::NothingSelected { .. }) if expected.is_empty() => return,
        plan => Arc::new(plan.unwrap()),
    };
    assert_eq!(plan.rows(), expected.len() as u64);
    assert_eq!(plan.dataset().rows(), rows);
    let open = || Feed::open(Arc::clone(&plan), Arc::clone(&store), &FeedOptions::default()).unwrap();
    let epochs = 2;
    let steps = plan.steps_for_epochs(epochs);
    let whole = take(&open(), Shard::WHOLE, 0, steps).await;
    let mut seen: HashMap<(u64, u64), u32> = HashMap::new();
    for batch in &whole {
        // The id that was written is the global row index, selected or not.
        assert_eq!(ids(batch), batch.rows);
        for (slot, (&row, &epoch)) in batch.rows.iter().zip(&batch.epochs).enumerate() {
            assert_eq!(plan.row_at(batch.step, slot).unwrap(), (row, epoch));
            assert_eq!(plan.slot_of(epoch, row).unwrap(), (batch.step, slot));
            let (file, number) = &places[row as usize];
            assert_eq!(plan.address_of(row).unwrap().file, *file, "row {number}");
            if epoch < epochs {
                *seen.entry((epoch, row)).or_default() += 1;
            }
        }
    }
    assert_eq!(seen.len(), expected.len() * epochs as usize);
    assert!(seen.values().all(|times| *times == 1));
    assert!(expected.iter().all(|row| seen.contains_key(&(0, *row)) && seen.contains_key(&(1, *row))));

    // Input groups together have the same rows, in the order of the files.
    let (feed, groups) = (open(), plan.input_groups());
    let mut grouped = Vec::new();
    for number in 0..groups {
        let group = plan.input_group(number).unwrap();
        let found = ids_of(&feed.read_group(number).await.unwrap());
        assert_eq!(found.len(), group.rows as usize);
        assert!(found.iter().all(|row| places[*row as usize].0 == group.file), "{group:?}: {found:?}");
        grouped.extend(found);
    }
    assert_eq!(grouped, expected);
    assert_eq!(plan.input_group(groups), None);
    assert!(matches!(feed.read_group(groups).await, Err(FeedError::Invalid { .. })));

    // A stored plan is the same; so are any number of readers, side by side.
    let text = serde_json::to_string(&*plan).unwrap();
    let stored: Arc<Plan> = Arc::new(serde_json::from_str(&text).unwrap());
    assert_eq!(stored.id(), plan.id());
    for world in 1..=8 {
        let mut readers = Vec::new();
        for rank in 0..world {
            let feed = Feed::open(Arc::clone(&stored), Arc::clone(&store), &FeedOptions::default()).unwrap();
            readers.push(take(&feed, Shard::new(rank, world).unwrap(), 0, steps).await);
        }
        for (step, one) in whole.iter().enumerate() {
            let joined: Vec<u64> = readers.iter().flat_map(|batches| batches[step].rows.clone()).collect();
            assert_eq!(joined, one.rows, "world {world}, step {step}");
        }
    }
    let from = (case.resume * steps as f64) as u64;
    for (a, b) in take(&open(), Shard::WHOLE, from, steps).await.iter().zip(&whole[from as usize..]) {
        assert_eq!((a.step, &a.batch, &a.rows, &a.epochs), (b.step, &b.batch, &b.rows, &b.epochs));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn selected_rows_come_once_per_epoch_in_one_order(
        shape in prop::collection::vec(prop::collection::vec(1u64..90, 1..5), 1..5),
        seed: u64,
        batch_rows in 1usize..60,
        lanes in 1u32..12,
        window_rows in 1u64..70,
        filter in filters(),
        (a, b) in (0i64..400, 0i64..400),
        by in prop::sample::select(vec![vec![], vec!["id"], vec!["name"], vec!["name", "id"]]),
        part in prop::sample::select(vec![None, Some("train"), Some("val"), Some("test")]),
        // The smallest splits row groups into parts.
        working_set_bytes_max in prop::sample::select(vec![512u64 << 20, 8192]),
        resume in 0.0..1.0,
    ) {
        let options = PlanOptions {
            source: "v@s".into(), seed, batch_rows, lanes, window_rows, working_set_bytes_max,
            ..PlanOptions::default()
        };
        let filter = filter.map(|make| make(a, b));
        runtime().block_on(check(Case { shape, options, filter, by, part, resume }));
    }
}

#[tokio::test]
async fn parts_of_a_split_do_not_depend_on_the_files() {
    let one = data::dataset(&[vec![500, 500]]).await;
    let many = data::dataset(&[vec![100; 3], vec![50, 150], vec![500]]).await;
    let mut all = Vec::new();
    for (part, _) in PARTS {
        let mut found = Vec::new();
        for store in [&one, &many] {
            let options =
                PlanOptions { selection: selection(None, Some(part), &["id"]), ..PlanOptions::default() };
            let plan = Plan::build(store, "/train", &options).await.unwrap();
            let steps = plan.steps_for_epochs(1);
            let feed = Feed::open(plan, Arc::clone(store), &FeedOptions::default()).unwrap();
            let batches = take(&feed, Shard::WHOLE, 0, steps).await;
            let mut rows: Vec<u64> = batches
                .iter()
                .flat_map(|batch| ids(batch).into_iter().zip(batch.epochs.clone()))
                .filter_map(|(id, epoch)| (epoch == 0).then_some(id))
                .collect();
            rows.sort_unstable();
            found.push(rows);
        }
        assert_eq!(found[0], found[1]);
        all.extend(found.remove(0));
    }
    all.sort_unstable();
    assert_eq!(all, (0..1000).collect::<Vec<_>>());
}

fn typed() -> RecordBatch {
    let lists =
        ListArray::from_iter_primitive::<Int64Type, _, _>([Some(vec![Some(1)]), None, Some(vec![]), None]);
    let columns: [(&str, ArrayRef); 9] = [
        ("small", Arc::new(Int32Array::from(vec![Some(-1), Some(0), None, Some(7)]))),
        ("large", Arc::new(UInt64Array::from(vec![0, 1, 7, u64::MAX]))),
        ("score", Arc::new(Float32Array::from(vec![0.1, f32::NAN, -0.0, 2.5]))),
        ("flag", Arc::new(BooleanArray::from(vec![Some(true), Some(false), None, Some(true)]))),
        ("text", Arc::new(StringArray::from(vec![Some("a"), Some("it's"), Some(""), None]))),
        ("day", Arc::new(Date32Array::from(vec![0, 1, 2, 20_000]))),
        ("time", Arc::new(TimestampMicrosecondArray::from(vec![0, 1, 86_400_000_000, -1]))),
        ("list", Arc::new(lists)),
        ("nothing", Arc::new(NullArray::new(4))),
    ];
    RecordBatch::try_from_iter(columns).unwrap()
}

async fn plan_of(store: &Arc<dyn ObjectStore>, filter: &str) -> Result<Plan, FeedError> {
    let options = PlanOptions { selection: selection(Some(filter), None, &[]), ..PlanOptions::default() };
    Plan::build(store, "t", &options).await
}

#[tokio::test]
async fn conditions_follow_sql_on_every_kind_of_column() {
    let store: Arc<dyn ObjectStore> = Arc::new(object_store::memory::InMemory::new());
    data::put(&*store, "t/0.parquet", data::parquet(&[typed()])).await;
    for (filter, expected) in [
        ("small != 0", &[0, 3][..]),
        ("nothing is null", &[0, 1, 2, 3]),
        ("nothing is not null", &[]),
        ("not small != 0", &[1]),
        ("small < 0.5", &[0, 1]),
        ("small <= -1 or large >= 7", &[0, 2, 3]),
        ("large = 18446744073709551615", &[3]),
        ("large > -1", &[0, 1, 2, 3]),
        ("large = small", &[]),
        ("small < large", &[0, 1, 3]),
        ("score = 0.1", &[0]),
        ("score = 0", &[2]),
        ("score != 0", &[0, 1, 3]),
        ("score > 2", &[3]),
        ("score >= small", &[0]),
        ("flag", &[0, 3]),
        ("not flag", &[1]),
        ("flag = false or flag is null", &[1, 2]),
        ("text in ('a', 'it''s')", &[0, 1]),
        ("text not in ('a')", &[1, 2]),
        ("text >= 'b'", &[1]),
        ("day >= '1970-01-03'", &[2, 3]),
        ("day < '2024-10-05' and day > '1970-01-02'", &[2, 3]),
        ("time = '1970-01-02T01:00:00+01:00'", &[2]),
        ("time < day", &[1, 2, 3]),
        ("list is null", &[1, 3]),
        ("list is not null and small is not null", &[0]),
    ] {
        match plan_of(&store, filter).await {
            Ok(plan) => {
                let mut rows: Vec<u64> =
                    (0..plan.rows()).map(|slot| plan.row_at(0, slot as usize).unwrap().0).collect();
                rows.sort_unstable();
                assert_eq!(rows, expected, "{filter}");
            }
            Err(FeedError::NothingSelected { rows: 4, .. }) => assert!(expected.is_empty(), "{filter}"),
            Err(error) => panic!("{filter}: {error}"),
        }
    }
}

#[tokio::test]
async fn conditions_and_keys_that_do_not_fit_the_columns_are_named() {
    let store: Arc<dyn ObjectStore> = Arc::new(object_store::memory::InMemory::new());
    data::put(&*store, "t/0.parquet", data::parquet(&[typed()])).await;
    for (filter, texts) in [
        ("labels != 3", &["column \"labels\"", "small, large"][..]),
        ("small = '3'", &["\"small\" is Int32", "'3'", "quotes make a text"]),
        ("text = 3", &["\"text\" is Utf8", "single quotes"]),
        ("flag < true", &["\"flag\" is Boolean", "use = or !="]),
        ("small", &["\"small\" is Int32, not a condition"]),
        ("day > 'yesterday'", &["\"day\" is Date32", "'2026-01-31'"]),
        ("list = 3", &["\"list\" is List", "only `is null`"]),
        ("small = text", &["\"small\" is Int32", "column \"text\" of Utf8"]),
        ("small in (1, 'x')", &["\"small\" is Int32", "'x'"]),
    ] {
        let error = plan_of(&store, filter).await.unwrap_err();
        assert!(matches!(error, FeedError::Invalid { .. } | FeedError::NoColumn { .. }), "{error:?}");
        for text in texts {
            assert!(error.to_string().contains(text), "{filter}: {error}");
        }
    }
    for (key, text) in [("list", "column \"list\" is List"), ("no", "column \"no\" is not in the dataset")] {
        let options =
            PlanOptions { selection: selection(None, Some("val"), &[key]), ..PlanOptions::default() };
        let error = Plan::build(&store, "t", &options).await.unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
    let error = plan_of(&store, "small = 12345").await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "dataset /t: none of its 4 rows is selected by where \"small\" = 12345; check the condition and the part"
    );
}

#[tokio::test]
async fn equal_keys_of_other_widths_are_in_one_part() {
    let columns: [ArrayRef; 3] = [
        Arc::new(Int64Array::from_iter_values(0..200)),
        Arc::new(Int32Array::from_iter_values(0..200)),
        Arc::new(UInt64Array::from_iter_values(0..200)),
    ];
    let mut found = Vec::new();
    for column in columns {
        let store: Arc<dyn ObjectStore> = Arc::new(object_store::memory::InMemory::new());
        let batch = RecordBatch::try_from_iter([("key", column)]).unwrap();
        data::put(&*store, "t/0.parquet", data::parquet(&[batch])).await;
        let selection = selection(None, Some("val"), &["key"]);
        let plan =
            Plan::build(&store, "t", &PlanOptions { selection, ..PlanOptions::default() }).await.unwrap();
        let rows: Vec<u64> = (0..plan.rows()).map(|slot| plan.row_at(0, slot as usize).unwrap().0).collect();
        found.push(rows);
    }
    assert!(found[0].len() > 5 && found.iter().all(|rows| *rows == found[0]), "{found:?}");
}

#[derive(Default)]
struct Memory(Mutex<HashMap<String, Vec<u8>>>);

impl DatasetCache for Memory {
    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, String> {
        Ok(self.0.lock().get(key).cloned())
    }
    fn put(&self, key: &str, value: &[u8]) -> Result<(), String> {
        self.0.lock().insert(key.to_owned(), value.to_vec());
        Ok(())
    }
}

#[tokio::test]
async fn units_without_selected_rows_are_not_read_and_selected_rows_are_remembered() {
    let inner = data::dataset(&[vec![100; 4], vec![100; 4]]).await;
    let counting = data::CountingStore::new(inner);
    let store: Arc<dyn ObjectStore> = Arc::clone(&counting) as _;
    let cache: Arc<dyn DatasetCache> = Arc::new(Memory::default());
    let options =
        PlanOptions { selection: selection(Some("id >= 650"), None, &[]), ..PlanOptions::default() };
    let build = || Plan::build_cached(&store, "/train", &options, Arc::clone(&cache));
    let plan = build().await.unwrap();
    let reads = counting.reads();
    let again = build().await.unwrap();
    assert_eq!((again.id(), counting.reads()), (plan.id(), reads));
    // Another condition is another entry, and another plan.
    let other = PlanOptions { selection: selection(Some("id >= 651"), None, &[]), ..options.clone() };
    let other = Plan::build_cached(&store, "/train", &other, Arc::clone(&cache)).await.unwrap();
    assert_ne!(other.id(), plan.id());

    let before = counting.reads();
    let steps = plan.steps_for_epochs(1);
    let feed = Feed::open(plan, Arc::clone(&store), &FeedOptions::default()).unwrap();
    let rows: usize = take(&feed, Shard::WHOLE, 0, steps).await.iter().map(|batch| batch.rows.len()).sum();
    assert!(rows >= 150);
    // The footer of the second file, and two of the eight row groups.
    assert!(counting.reads() - before <= 3, "{} reads", counting.reads() - before);

    // A file that changed is scanned again.
    data::put(&*store, "train/001.parquet", data::parquet(&[data::rows(650, 7)])).await;
    assert_eq!(build().await.unwrap().rows(), 7);
}

#[tokio::test]
async fn a_selection_is_part_of_the_plan_and_of_its_stored_form() {
    let store = data::dataset(&[vec![100, 50]]).await;
    let with = async |selection| {
        Plan::build(&store, "/train", &PlanOptions { selection, ..PlanOptions::default() }).await.unwrap()
    };
    let all = with(None).await;
    let stored = serde_json::to_string(&all).unwrap();
    assert!(!stored.contains("select"), "{stored}");
    assert!(!serde_json::to_string(&PlanOptions::default()).unwrap().contains("selection"));
    let some = with(selection(Some("id<10"), Some("train"), &["id"])).await;
    assert_ne!(some.id(), all.id());
    assert_eq!(some.id(), with(selection(Some("(id < 10)"), Some("train"), &["id"])).await.id());
    assert!(
        some.slot_of(0, 149)
            .unwrap_err()
            .to_string()
            .contains("row 149 is not selected by where \"id\" < 10")
    );

    let stored = serde_json::to_value(&some).unwrap();
    let read = |change: fn(&mut serde_json::Value)| {
        let mut value = stored.clone();
        change(&mut value);
        serde_json::from_value::<Plan>(value).map(|plan| plan.id()).map_err(|error| error.to_string())
    };
    assert_eq!(read(|_| ()).unwrap(), some.id());
    assert_eq!(stored["selected"]["selection"]["where"], "\"id\" < 10");
    assert!(read(|plan| plan["selected"]["rows"] = "AAAA".into()).unwrap_err().contains("damaged"));
    assert!(
        read(|plan| plan["selected"]["selection"]["where"] = "id < 11".into())
            .unwrap_err()
            .contains("hashes to")
    );
    assert!(read(|plan| plan["selected"]["selection"] = serde_json::json!({})).is_err());
    assert!(read(|plan| plan["selected"] = serde_json::Value::Null).unwrap_err().contains("hashes to"));
}
