use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::{
    ArrayRef, AsArray, Float32Array, Int16Builder, Int32Array, Int64Builder, LargeListBuilder, ListArray,
    ListBuilder, RecordBatch, UInt64Builder,
};
use arrow::datatypes::{DataType, Field, Int32Type, Int64Type};
use futures::StreamExt;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};
use parquet::arrow::ArrowWriter;

use super::*;
use crate::feed::permutation::{Permutation, derive_key};
use crate::feed::{
    Coverage, Feed, FeedBatch, FeedOptions, Mixture, MixtureFeed, MixtureSource, Plan, PlanOptions,
    Selection, Shard, Until,
};

const BOS: i64 = 1_000_001;
const EOS: i64 = 1_000_002;
const PAD: i64 = 1_000_003;

/// A document a row; none for a null list.
type Documents = Vec<Option<Vec<i64>>>;

/// Documents of a unit of reading, all tokens different, with empty, null and long ones.
fn unit(first_token: &mut i64, rows: usize, seed: u64) -> Documents {
    let document = |row: usize| {
        let draw = derive_key(&[seed, row as u64]);
        let length = match draw % 11 {
            0 => return None,
            1 => 0,
            2 => 60 + draw / 11 % 40,
            _ => 1 + draw / 11 % 12,
        };
        let tokens: Vec<i64> = (*first_token..).take(length as usize).collect();
        *first_token += length as i64;
        Some(tokens)
    };
    (0..rows).map(document).collect()
}

fn lists(documents: &[Option<Vec<i64>>]) -> ArrayRef {
    let mut builder = LargeListBuilder::new(Int64Builder::new());
    for document in documents {
        match document {
            Some(tokens) => builder.append_value(tokens.iter().map(|token| Some(*token))),
            None => builder.append_null(),
        }
    }
    Arc::new(builder.finish())
}

fn table(column: ArrayRef) -> RecordBatch {
    RecordBatch::try_from_iter_with_nullable([("ids", column, true)]).unwrap()
}

/// A file with one row group for each column.
async fn put(store: &dyn ObjectStore, path: &str, groups: &[ArrayRef]) {
    let batches: Vec<RecordBatch> = groups.iter().map(|group| table(Arc::clone(group))).collect();
    let mut writer = ArrowWriter::try_new(Vec::new(), batches[0].schema(), None).unwrap();
    for batch in &batches {
        writer.write(batch).unwrap();
        writer.flush().unwrap();
    }
    let bytes = writer.into_inner().unwrap();
    store.put(&Path::parse(path).unwrap(), PutPayload::from(bytes)).await.unwrap();
}

/// Two files with three row groups, one of them without a token.
async fn dataset(seed: u64) -> (Arc<dyn ObjectStore>, Vec<Documents>) {
    let store = InMemory::new();
    let mut token = 0;
    let units = vec![
        unit(&mut token, 90, seed),
        vec![None, Some(Vec::new())],
        unit(&mut token, 40, seed + 1),
        unit(&mut token, 7, seed + 2),
    ];
    let columns: Vec<ArrayRef> = units.iter().map(|unit| lists(unit)).collect();
    put(&store, "train/a.parquet", &columns[..3]).await;
    put(&store, "train/b.parquet", &columns[3..]).await;
    (Arc::new(store), units)
}

fn options(tokens: TokenOptions, seed: u64) -> PlanOptions {
    PlanOptions {
        tokens: Some(tokens),
        seed,
        batch_rows: 12,
        lanes: 4,
        window_rows: 16,
        ..PlanOptions::default()
    }
}

/// One packed sequence.
#[derive(Debug, Clone, PartialEq)]
struct Sequence {
    tokens: Vec<i64>,
    segments: Vec<i32>,
    positions: Vec<i32>,
    labels: Vec<i64>,
}

/// The sequences of a batch.
fn sequences(batch: &RecordBatch) -> Vec<Sequence> {
    let values =
        |name: &str, row: usize| batch.column_by_name(name).map(|c| c.as_fixed_size_list().value(row));
    let longs = |array: ArrayRef| array.as_primitive::<Int64Type>().values().to_vec();
    let ints = |array: ArrayRef| array.as_primitive::<Int32Type>().values().to_vec();
    let sequence = |row| Sequence {
        tokens: longs(values("ids", row).unwrap()),
        segments: ints(values("segment_ids", row).unwrap()),
        positions: ints(values("position_ids", row).unwrap()),
        labels: values("labels", row).map(longs).unwrap_or_default(),
    };
    (0..batch.num_rows()).map(sequence).collect()
}

/// The sequences of a unit, made token by token.
fn naive(
    documents: &[Option<Vec<i64>>],
    unit: u64,
    epoch: u64,
    seed: u64,
    options: &TokenOptions,
) -> Vec<Sequence> {
    let shuffle = Permutation::new(documents.len() as u64, derive_key(&[seed, 5, epoch, unit]));
    let length = options.length as usize;
    let mut sequences: Vec<Sequence> = Vec::new();
    for place in 0..documents.len() as u64 {
        let document = documents[shuffle.apply(place) as usize].clone().unwrap_or_default();
        if document.is_empty() {
            continue;
        }
        let document: Vec<i64> = options.bos.into_iter().chain(document).chain(options.eos).collect();
        for (at, token) in document.iter().enumerate() {
            if sequences.last().is_none_or(|sequence| sequence.tokens.len() == length) {
                let (tokens, segments, positions, labels) = Default::default();
                sequences.push(Sequence { tokens, segments, positions, labels });
            }
            let last = sequences.last_mut().unwrap();
            let is_new = at == 0 || last.tokens.is_empty();
            last.segments.push(last.segments.last().copied().unwrap_or(0) + i32::from(is_new));
            last.positions.push(if is_new { 0 } else { last.positions.last().unwrap() + 1 });
            last.tokens.push(*token);
            match options.labels {
                None => {}
                Some(TokenLabels::Same) => last.labels.push(if at == 0 { IGNORED_LABEL } else { *token }),
                Some(TokenLabels::Next) => {
                    last.labels.push(document.get(at + 1).copied().unwrap_or(IGNORED_LABEL))
                }
            }
        }
    }
    if let Some(last) = sequences.last_mut() {
        let given = last.labels.len();
        last.tokens.resize(length, options.pad);
        last.segments.resize(length, 0);
        last.positions.resize(length, 0);
        last.labels.resize(if given > 0 { length } else { 0 }, IGNORED_LABEL);
    }
    sequences
}

/// What the readers of a world deliver of some places, in the order of the slots.
async fn read(feed: &Feed, world: u32, places: std::ops::Range<u64>) -> Vec<(u64, u64, Sequence)> {
    let mut streams = Vec::new();
    for rank in 0..world {
        streams.push(feed.stream_places(Shard::new(rank, world).unwrap(), places.clone(), 1).unwrap());
    }
    let mut read = Vec::new();
    loop {
        let mut ended = 0;
        for stream in &mut streams {
            let Some(batch) = stream.next().await else {
                ended += 1;
                continue;
            };
            let FeedBatch { batch, rows, epochs, .. } = batch.unwrap();
            let found = sequences(&batch);
            read.extend(
                epochs.into_iter().zip(rows).zip(found).map(|((epoch, row), found)| (epoch, row, found)),
            );
        }
        if ended == streams.len() {
            return read;
        }
    }
}

#[tokio::test]
async fn sequences_equal_those_of_a_naive_packer_in_every_epoch() {
    let (store, units) = dataset(3).await;
    let with = |length, bos, eos, labels| TokenOptions {
        length,
        bos,
        eos,
        pad: PAD,
        labels,
        ..TokenOptions::new("ids", 1)
    };
    for tokens in [
        with(1, None, None, None),
        with(7, None, Some(EOS), Some(TokenLabels::Next)),
        with(16, Some(BOS), Some(EOS), Some(TokenLabels::Same)),
        with(64, Some(BOS), None, Some(TokenLabels::Next)),
        with(5000, None, None, Some(TokenLabels::Same)),
    ] {
        let plan = Plan::build(&store, "train", &options(tokens.clone(), 9)).await.unwrap();
        let stored: Plan = serde_json::from_str(&serde_json::to_string(&plan).unwrap()).unwrap();
        assert_eq!((stored.id(), stored.order_id()), (plan.id(), plan.order_id()));
        let packing = plan.packing().unwrap();
        let (total, padding) = (packing.tokens(), packing.padding());
        assert_eq!(total + padding, plan.rows() * u64::from(tokens.length));
        let rows = plan.rows();
        let feed = Feed::open(stored, Arc::clone(&store), &FeedOptions::default()).unwrap();
        let filled: Vec<&Documents> =
            units.iter().filter(|unit| unit.iter().flatten().any(|d| !d.is_empty())).collect();
        for epoch in 0..2 {
            let expected: Vec<Sequence> = (0..)
                .zip(&filled)
                .flat_map(|(at, documents)| naive(documents, at, epoch, 9, &tokens))
                .collect();
            assert_eq!(expected.len() as u64, rows);
            let mut found = read(&feed, 1, epoch * rows..(epoch + 1) * rows).await;
            found.sort_by_key(|(_, row, _)| *row);
            for (row, (of, number, sequence)) in found.iter().enumerate() {
                assert_eq!((*of, *number), (epoch, row as u64));
                assert_eq!(sequence, &expected[row], "{tokens:?}, sequence {row}");
            }
        }
    }
}

#[tokio::test]
async fn each_token_comes_once_an_epoch_and_is_a_label_once() {
    let (store, units) = dataset(5).await;
    let labels = Some(TokenLabels::Next);
    let tokens = TokenOptions { pad: PAD, labels, ..TokenOptions::new("ids", 10) };
    let plan = Plan::build(&store, "train", &options(tokens, 1)).await.unwrap();
    let (rows, padding) = (plan.rows(), plan.packing().unwrap().padding());
    let feed = Feed::open(plan, store, &FeedOptions::default()).unwrap();
    let (mut seen, mut labelled, mut pads) = (HashMap::new(), HashMap::new(), 0);
    for (_, _, sequence) in read(&feed, 3, 0..rows).await {
        for (token, label) in sequence.tokens.into_iter().zip(sequence.labels) {
            pads += u64::from(token == PAD);
            *seen.entry(token).or_insert(0) += 1;
            *labelled.entry(label).or_insert(0) += 1;
        }
    }
    assert_eq!(pads, padding);
    for document in units.iter().flatten().flatten() {
        for (at, token) in document.iter().enumerate() {
            assert_eq!(seen.remove(token), Some(1), "token {token}");
            assert_eq!(labelled.remove(token), (at > 0).then_some(1), "label {token}");
        }
    }
    assert_eq!(seen.keys().copied().collect::<Vec<_>>(), [PAD]);
    assert_eq!(labelled.keys().copied().collect::<Vec<_>>(), [IGNORED_LABEL]);
}

#[tokio::test]
async fn any_world_and_any_resume_read_the_same_sequences() {
    let (store, _) = dataset(8).await;
    let tokens = TokenOptions { eos: Some(EOS), ..TokenOptions::new("ids", 6) };
    let plan = Arc::new(Plan::build(&store, "train", &options(tokens, 2)).await.unwrap());
    let rows = plan.rows();
    let feed = || Feed::open(Arc::clone(&plan), Arc::clone(&store), &FeedOptions::default()).unwrap();
    let whole = read(&feed(), 1, 0..2 * rows).await;
    let mut coverage = Coverage::new(Arc::clone(&plan)).unwrap();
    // A batch may have the end of one epoch and the beginning of the next one, lane by lane.
    let first = whole.iter().filter(|(epoch, ..)| *epoch == 0);
    coverage.add(&first.map(|(_, row, _)| *row).collect::<Vec<_>>());
    let report = coverage.report();
    assert!(report.is_exact(), "{report:?}");
    for world in [2, 3, 4, 5, 6, 7, 8, 12, 16] {
        assert_eq!(read(&feed(), world, 0..2 * rows).await, whole, "{world} readers");
    }
    // Any place at which a run may stop, with another world afterwards.
    for place in (0..2 * rows).step_by(37) {
        let mut parts = read(&feed(), 3, 0..place).await;
        parts.extend(read(&feed(), 5, place..2 * rows).await);
        let (mut parts, mut whole) = (parts, whole.clone());
        // A batch that is cut lists its rows in two parts.
        parts.sort_by_key(|(epoch, row, _)| (*epoch, *row));
        whole.sort_by_key(|(epoch, row, _)| (*epoch, *row));
        assert_eq!(parts, whole, "stopped at {place}");
    }
    // Random access to slots.
    let opened = feed();
    for step in [0, 3, 7] {
        let batch = opened.batch(step, 2..9).await.unwrap();
        let first = step as usize * 12 + 2;
        let expected: Vec<Sequence> = whole[first..first + 7].iter().map(|(_, _, s)| s.clone()).collect();
        assert_eq!(sequences(&batch.batch), expected);
    }
}

#[tokio::test]
async fn another_batch_goes_on_in_the_order_of_the_state() {
    let (store, _) = dataset(4).await;
    let asked = options(TokenOptions::new("ids", 9), 2);
    let plan = Plan::build(&store, "train", &asked).await.unwrap();
    let asked = PlanOptions { batch_rows: 32, ..asked };
    let other = Plan::build(&store, "train", &asked).await.unwrap();
    let resumed = other.in_order(plan.order_id(), &asked).unwrap();
    assert_eq!((resumed.order_id(), resumed.batch_rows()), (plan.order_id(), 32));
    let rows = plan.rows();
    let open = |plan: Plan| Feed::open(plan, Arc::clone(&store), &FeedOptions::default()).unwrap();
    let (feed, resumed) = (open(plan), open(resumed));
    let (mut first, mut rest) = (read(&feed, 1, 0..24).await, read(&resumed, 2, 24..rows).await);
    first.append(&mut rest);
    let mut whole = read(&feed, 1, 0..rows).await;
    first.sort_by_key(|(_, row, _)| *row);
    whole.sort_by_key(|(_, row, _)| *row);
    assert_eq!(first, whole);
}

#[tokio::test]
async fn identities_name_the_packing_but_not_its_pad_and_labels() {
    let (store, _) = dataset(4).await;
    let base = TokenOptions::new("ids", 8);
    let mut ids = Vec::new();
    for tokens in [
        base.clone(),
        TokenOptions { length: 16, ..base.clone() },
        TokenOptions { eos: Some(0), ..base.clone() },
        TokenOptions { bos: Some(0), ..base.clone() },
    ] {
        ids.push(Plan::build(&store, "train", &options(tokens, 1)).await.unwrap().order_id());
    }
    let rows = PlanOptions { tokens: None, ..options(base.clone(), 1) };
    ids.push(Plan::build(&store, "train", &rows).await.unwrap().order_id());
    let other = TokenOptions { pad: 7, labels: Some(TokenLabels::Next), ..base };
    assert_eq!(Plan::build(&store, "train", &options(other, 1)).await.unwrap().order_id(), ids[0]);
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 5);
}

#[tokio::test]
async fn selected_rows_alone_are_packed() {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let mut token = 0;
    let documents = unit(&mut token, 60, 1);
    let labels: ArrayRef = Arc::new(Int32Array::from_iter_values((0..60).map(|row| row % 3)));
    let batch =
        RecordBatch::try_from_iter_with_nullable([("ids", lists(&documents), true), ("kind", labels, false)]);
    let batch = batch.unwrap();
    let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    let bytes = PutPayload::from(writer.into_inner().unwrap());
    store.put(&Path::parse("train/a.parquet").unwrap(), bytes).await.unwrap();

    let selection = Selection::new(Some("kind = 1"), &[], None, &[]).unwrap();
    let asked = PlanOptions { selection, ..options(TokenOptions::new("ids", 4), 1) };
    let plan = Plan::build(&store, "train", &asked).await.unwrap();
    let rows = plan.rows();
    let feed = Feed::open(plan, store, &FeedOptions::default()).unwrap();
    let found = read(&feed, 2, 0..rows).await;
    let found = found.iter().flat_map(|(_, _, s)| s.tokens.iter().zip(&s.segments));
    let mut found: Vec<i64> = found.filter(|(_, segment)| **segment > 0).map(|(token, _)| *token).collect();
    found.sort();
    let expected: Vec<i64> = documents.iter().skip(1).step_by(3).flatten().flatten().copied().collect();
    assert_eq!(found, expected);
}

#[tokio::test]
async fn mixtures_mix_sequences_by_weight() {
    let (first, _) = dataset(1).await;
    let (second, _) = dataset(2).await;
    let mut sources = Vec::new();
    for (at, store) in [&first, &second].into_iter().enumerate() {
        let plan =
            Plan::build(store, "train", &options(TokenOptions::new("ids", 8), at as u64)).await.unwrap();
        let weight = ["3", "1"][at].parse().unwrap();
        sources.push(MixtureSource { name: format!("source {at}"), plan: Arc::new(plan), weight });
    }
    let plans: Vec<Arc<Plan>> = sources.iter().map(|source| Arc::clone(&source.plan)).collect();
    let mixture = Mixture::new(sources, 8, Until::First).unwrap();
    let stores = [Arc::clone(&first), Arc::clone(&second)];
    let feed = MixtureFeed::open(mixture, &stores, &FeedOptions::default()).unwrap();
    let mut stream = feed.stream_places(Shard::WHOLE, 0..64, 1).unwrap();
    let mut expected = HashMap::new();
    for (source, (plan, store)) in plans.into_iter().zip(stores).enumerate() {
        let rows = plan.rows();
        let alone = Feed::open(plan, store, &FeedOptions::default()).unwrap();
        for (_, row, sequence) in read(&alone, 1, 0..rows).await {
            expected.insert((source as u32, row), sequence);
        }
    }
    let mut counts = [0; 2];
    while let Some(batch) = stream.next().await {
        let batch = batch.unwrap();
        for ((source, row), found) in batch.sources.iter().zip(&batch.rows).zip(sequences(&batch.batch)) {
            counts[*source as usize] += 1;
            assert_eq!(expected[&(*source, *row)], found);
        }
    }
    assert_eq!(counts, [48, 16]);
}

async fn refused(column: ArrayRef, tokens: TokenOptions) -> String {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    put(&*store, "train/a.parquet", &[column]).await;
    let plan = match Plan::build(&store, "train", &options(tokens, 1)).await {
        Ok(plan) => plan,
        Err(error) => return error.to_string(),
    };
    Feed::open(plan, store, &FeedOptions::default()).err().map(|error| error.to_string()).unwrap_or_default()
}

#[tokio::test]
async fn columns_that_hold_no_documents_are_refused_with_the_row() {
    let tokens = || TokenOptions::new("ids", 4);
    let mut nested = ListBuilder::new(ListBuilder::new(Int64Builder::new()));
    nested.values().append_value([Some(1)]);
    nested.append(true);
    let floats = ListArray::new(
        Arc::new(Field::new_list_field(DataType::Float32, true)),
        arrow::buffer::OffsetBuffer::from_lengths([2]),
        Arc::new(Float32Array::from(vec![1.0, 2.0])),
        None,
    );
    let numbers: ArrayRef = Arc::new(Int32Array::from(vec![1, 2]));
    for (column, kind) in [
        (Arc::new(nested.finish()) as ArrayRef, "List(List(Int64))"),
        (Arc::new(floats) as ArrayRef, "List(Float32)"),
        (numbers, "Int32"),
    ] {
        let error = refused(column, tokens()).await;
        assert!(error.contains("\"ids\"") && error.contains("lists of integers"), "{kind}: {error}");
    }

    let negative = lists(&[None, Some(vec![1, 2]), Some(vec![3, -4])]);
    let error = refused(negative, tokens()).await;
    assert!(
        error.contains("a.parquet, row 2 of row group 0") && error.contains("token 1 of the list is -4"),
        "{error}"
    );
    let mut null = ListBuilder::new(Int64Builder::new());
    null.append_value([Some(1)]);
    null.append_value([Some(1), None]);
    let error = refused(Arc::new(null.finish()), tokens()).await;
    assert!(
        error.contains("row 1 of row group 0") && error.contains("token 1 of the list is null"),
        "{error}"
    );
    let mut large = ListBuilder::new(UInt64Builder::new());
    large.append_value([Some(1)]);
    large.append_value([Some(u64::MAX)]);
    let error = refused(Arc::new(large.finish()), tokens()).await;
    assert!(error.contains("row 1 of row group 0") && error.contains("63 bits"), "{error}");
    let error = refused(lists(&[None, Some(Vec::new())]), tokens()).await;
    assert!(error.contains("all lists of the selected rows are empty"), "{error}");
    let error = refused(lists(&[Some(vec![1])]), TokenOptions::new("text", 4)).await;
    assert!(error.contains("column \"text\" is not in the dataset; it has ids"), "{error}");
}

#[tokio::test]
async fn options_out_of_bounds_are_refused_by_name() {
    let mut short = ListBuilder::new(Int16Builder::new());
    short.append_value([Some(1), Some(2)]);
    let short: ArrayRef = Arc::new(short.finish());
    let base = TokenOptions::new("ids", 4);
    for (tokens, part) in [
        (TokenOptions { length: 0, ..base.clone() }, "length is 0; it must be 1 to 1048576"),
        (TokenOptions { length: (1 << 20) + 1, ..base.clone() }, "length is 1048577"),
        (TokenOptions { eos: Some(-1), ..base.clone() }, "eos is -1; tokens are numbers from 0"),
        (
            TokenOptions { bos: Some(i64::from(i32::MAX) + 1), ..base.clone() },
            "bos is 2147483648; tokens of List(Int16",
        ),
        (TokenOptions { pad: i64::MAX, ..base.clone() }, "pad is 9223372036854775807"),
        (TokenOptions::new("labels", 4), "rename the column"),
    ] {
        let error = refused(Arc::clone(&short), tokens).await;
        assert!(error.contains(part), "{error}");
    }
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    put(&*store, "train/a.parquet", &[short]).await;
    let asked = PlanOptions { batch_rows: 1 << 20, ..options(TokenOptions::new("ids", 1 << 20), 1) };
    let plan = Plan::build(&store, "train", &asked).await.unwrap();
    let columns = FeedOptions { columns: Some(vec!["ids".into()]), ..FeedOptions::default() };
    let error = Feed::open(plan.clone(), Arc::clone(&store), &columns).err().unwrap().to_string();
    assert!(error.contains("leave columns and images out"), "{error}");
    let feed = Feed::open(plan, store, &FeedOptions::default()).unwrap();
    let error = feed.batch(0, 0..1 << 20).await.unwrap_err().to_string();
    assert!(error.contains("lower batch_rows or length"), "{error}");
    assert!(feed.read_group(0).await.is_err());
    let batch = feed.batch(0, 0..1).await.unwrap();
    assert_eq!(batch.batch.column(0).as_fixed_size_list().value_type(), DataType::Int32);
}

#[test]
fn damaged_counts_in_stored_plans_are_refused() {
    let counts = |tokens, documents| vec![UnitTokens { documents, tokens }];
    let tokens = || TokenOptions { eos: Some(1), ..TokenOptions::new("ids", 1) };
    for units in [counts(u64::MAX, 1), counts(1 << 40, 1), counts(5, u64::MAX), counts(0, 0), Vec::new()] {
        assert!(Packing::new(tokens(), units).is_err());
    }
    assert_eq!(Packing::new(tokens(), counts(5, 2)).unwrap().sequences(0), 7);
}
