//! Tests of the Flight service by direct calls, against the feed in the same process.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::Int64Type;
use arrow_flight::decode::{DecodedPayload, FlightDataDecoder};
use arrow_flight::error::FlightError;
use arrow_flight::flight_service_server::FlightService;
use arrow_flight::{Criteria, FlightDescriptor, FlightInfo, Ticket};
use futures::{StreamExt, TryStreamExt};
use millrace_datafs::{Config, Datafs, Owner, View};
use proptest::prelude::*;
use serde_json::{Value, json};
use tonic::{Code, Extensions, Status};

use super::request::Request;
use super::{Callers, Exposure, FlightFeeds, Limits, Permission, SAME_CONNECTION};
use crate::dataset::DatasetSpec;
use crate::feed::{Feed, FeedOptions, PlanOptions, Shard};

const ROWS: usize = 600;

/// A volume `digits` with 600 rows in `/train`, and one row in `/secret`.
struct Bench {
    datafs: Datafs,
    live: View,
    _home: tempfile::TempDir,
}

fn bench() -> Bench {
    let home = tempfile::tempdir().unwrap();
    let datafs = Datafs::open(home.path(), &Config::default()).unwrap();
    let name = "digits".parse().unwrap();
    datafs.volume_create(&name).unwrap();
    let live = datafs.view(&"digits".parse().unwrap()).unwrap();
    live.create_dir_all("train").unwrap();
    live.create_dir_all("secret").unwrap();
    for (file, ids) in [0..100, 100..350, 350..ROWS].into_iter().enumerate() {
        let lines: String = ids
            .map(|id| format!("{{\"id\":{id},\"even\":{},\"name\":\"row {id}\"}}\n", id % 2 == 0))
            .collect();
        live.write_file(&format!("train/{file}.jsonl"), lines.as_bytes()).unwrap();
    }
    live.write_file("secret/0.jsonl", b"{\"id\":1}\n").unwrap();
    datafs.snapshot_create(&name, &"v1".parse().unwrap()).unwrap();
    Bench { datafs, live, _home: home }
}

fn anyone() -> Callers {
    Arc::new(|_: &Extensions| -> Permission { Arc::new(|_: &str| Ok(())) })
}

/// Fills the volume `digits` and takes its snapshot `v1`; the ids begin at `first`, which has four digits.
fn fill(datafs: &Datafs, first: usize) -> View {
    let name = "digits".parse().unwrap();
    datafs.volume_create(&name).unwrap();
    let live = datafs.view(&"digits".parse().unwrap()).unwrap();
    live.create_dir_all("train").unwrap();
    let lines: String = (first..first + ROWS).map(|id| format!("{{\"id\":{id}}}\n")).collect();
    live.write_file("train/0.jsonl", lines.as_bytes()).unwrap();
    datafs.snapshot_create(&name, &"v1".parse().unwrap()).unwrap();
    live
}

impl Bench {
    fn serve_with(&self, limits: Limits, callers: Callers) -> FlightFeeds {
        let exposure = Exposure::new(["digits:/train".parse().unwrap()]);
        let locations = ["grpc://a:1", "grpc://b:2"].map(str::to_owned).to_vec();
        FlightFeeds::new(self.datafs.clone(), exposure, locations, limits, callers).unwrap()
    }

    fn serve(&self) -> FlightFeeds {
        self.serve_with(Limits::default(), anyone())
    }

    /// The ids that the feed in this process delivers to a reader at some places, batch by batch.
    async fn expected(&self, batch_rows: usize, shard: Shard, places: std::ops::Range<u64>) -> Vec<Vec<i64>> {
        let dataset: DatasetSpec = "digits@v1:/train".parse().unwrap();
        let opened = dataset.open(&self.datafs).await.unwrap();
        let plan = opened.plan(&PlanOptions { batch_rows, seed: 3, ..PlanOptions::default() }).await.unwrap();
        let feed = Feed::open(plan, Arc::clone(opened.store()), &FeedOptions::default()).unwrap();
        let batches = feed.stream_places(shard, places, 1).unwrap();
        batches.map_ok(|batch| ids(&batch.batch)).try_collect().await.unwrap()
    }
}

fn ids(batch: &RecordBatch) -> Vec<i64> {
    batch.column_by_name("id").unwrap().as_primitive::<Int64Type>().values().to_vec()
}

fn request(more: Value) -> Value {
    let mut request = json!({ "dataset": "digits@v1:/train", "batch_rows": 32, "seed": 3 });
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    request
}

async fn info(feeds: &FlightFeeds, request: &Value) -> Result<FlightInfo, Status> {
    let descriptor = FlightDescriptor::new_cmd(request.to_string());
    Ok(feeds.get_flight_info(tonic::Request::new(descriptor)).await?.into_inner())
}

type Batches = Vec<(Vec<i64>, Value)>;

/// The ids of the batches of a ticket, each with its state, up to `most` of them.
async fn read(feeds: &FlightFeeds, ticket: impl Into<bytes::Bytes>, most: usize) -> Result<Batches, Status> {
    let answer = feeds.do_get(tonic::Request::new(Ticket::new(ticket))).await?;
    let mut decoded =
        FlightDataDecoder::new(answer.into_inner().map_err(|status| FlightError::Tonic(Box::new(status))));
    let mut batches = Batches::new();
    while batches.len() < most {
        let Some(next) = decoded.next().await else { break };
        let message = next.map_err(|error| match error {
            FlightError::Tonic(status) => *status,
            error => Status::internal(error.to_string()),
        })?;
        let metadata = message.app_metadata();
        if let DecodedPayload::RecordBatch(batch) = &message.payload {
            assert!(metadata.len() <= 128, "{metadata:?}");
            batches.push((ids(batch), serde_json::from_slice(&metadata).unwrap()));
        }
    }
    Ok(batches)
}

fn ticket(info: &FlightInfo, rank: usize) -> Value {
    serde_json::from_slice(&info.endpoint[rank].ticket.as_ref().unwrap().ticket).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_together_get_the_batches_of_the_feed() {
    let bench = bench();
    let feeds = bench.serve();
    for (world, epochs) in [(1, 1), (3, 1), (3, 2), (50, 1)] {
        let info = info(&feeds, &request(json!({ "world": world, "epochs": epochs }))).await.unwrap();
        assert_eq!((info.endpoint.len(), info.total_records), (world, (ROWS * epochs) as i64));
        let first: Vec<_> = info.endpoint.iter().map(|endpoint| endpoint.location[0].uri.as_str()).collect();
        assert!(first.iter().enumerate().all(|(at, uri)| *uri == ["grpc://a:1", "grpc://b:2"][at % 2]));
        let details: Value = serde_json::from_slice(&info.app_metadata).unwrap();
        let steps = (ROWS * epochs).div_ceil(32);
        assert_eq!((&details["batches"], &details["rows"]), (&json!(steps), &json!(ROWS)), "{details}");
        let mut seen = BTreeMap::new();
        for rank in 0..world {
            let batches = read(&feeds, ticket(&info, rank).to_string(), usize::MAX).await.unwrap();
            let shard = Shard::new(rank as u32, world as u32).unwrap();
            let expected = bench.expected(32, shard, 0..(ROWS * epochs) as u64).await;
            assert_eq!(batches.iter().map(|(ids, _)| ids.clone()).collect::<Vec<_>>(), expected);
            let over: Vec<_> = batches.iter().map(|(_, state)| state["over"] == true).collect();
            assert!(over[steps - 1] && !over[..steps - 1].contains(&true));
            batches.iter().flat_map(|(ids, _)| ids).for_each(|id| *seen.entry(*id).or_insert(0) += 1);
        }
        assert!(seen.len() == ROWS && seen.values().all(|times| *times == epochs));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_state_goes_on_at_another_server_with_any_world_and_batch() {
    let bench = bench();
    let (first, second) = (bench.serve(), bench.serve());
    let whole = bench.expected(32, Shard::WHOLE, 0..ROWS as u64).await.concat();
    let planned = info(&first, &request(json!({}))).await.unwrap();
    let begun = read(&first, ticket(&planned, 0).to_string(), 7).await.unwrap();
    let mut seen: Vec<i64> = begun.iter().flat_map(|(ids, _)| ids.clone()).collect();
    let state = begun[6].1.clone();
    assert_eq!(state["rows"], 7 * 32);

    // The ticket with the state, at a server that has never heard of it.
    let mut resumed = ticket(&planned, 0);
    resumed["state"] = state.clone();
    let rest = read(&second, resumed.to_string(), usize::MAX).await.unwrap();
    seen.extend(rest.iter().flat_map(|(ids, _)| ids));
    assert_eq!(seen, whole);

    // A descriptor with the state, for more readers of larger batches.
    let other = request(json!({ "state": state, "world": 2, "batch_rows": 64 }));
    let other = info(&second, &other).await.unwrap();
    assert_eq!(other.total_records, (ROWS - 7 * 32) as i64);
    let mut rows: Vec<i64> = Vec::new();
    for rank in 0..2 {
        let batches = read(&second, ticket(&other, rank).to_string(), usize::MAX).await.unwrap();
        rows.extend(batches.iter().flat_map(|(ids, _)| ids));
    }
    rows.sort_unstable();
    let mut left = whole[7 * 32..].to_vec();
    left.sort_unstable();
    assert_eq!(rows, left);

    // The end of an iteration is an empty stream, and the next one has the next epoch.
    let end = rest.last().unwrap().1.clone();
    resumed["state"] = end.clone();
    assert!(read(&first, resumed.to_string(), usize::MAX).await.unwrap().is_empty());
    resumed["state"].as_object_mut().unwrap().remove("over");
    let next = read(&first, resumed.to_string(), usize::MAX).await.unwrap();
    let expected = bench.expected(32, Shard::WHOLE, ROWS as u64..2 * ROWS as u64).await;
    assert_eq!(next.into_iter().map(|(ids, _)| ids).collect::<Vec<_>>(), expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_requests_are_refused_with_their_reason() {
    let bench = bench();
    let train = bench.live.stat("train").unwrap().node;
    bench.live.symlink(train, "out".as_ref(), "../secret".as_ref(), Owner { uid: 0, gid: 0 }).unwrap();
    bench.datafs.snapshot_create(&"digits".parse().unwrap(), &"v2".parse().unwrap()).unwrap();
    // Another command of this home has described what the link leads to.
    let linked: DatasetSpec = "digits@v2:/train/out".parse().unwrap();
    linked.open(&bench.datafs).await.unwrap().plan(&PlanOptions::default()).await.unwrap();
    let feeds = bench.serve();
    for (wrong, code, says) in [
        (json!({ "dataset": "digits@v1:/secret" }), Code::PermissionDenied, "does not expose"),
        (json!({ "dataset": "digits@v1:/" }), Code::PermissionDenied, "does not expose"),
        (json!({ "dataset": "digits@v1:/training" }), Code::PermissionDenied, "does not expose"),
        (json!({ "dataset": "other@v1:/train" }), Code::PermissionDenied, "does not expose"),
        (json!({ "dataset": "other@latest:/train" }), Code::PermissionDenied, "does not expose"),
        (json!({ "dataset": "digits@v1:/train/../secret" }), Code::InvalidArgument, ".."),
        (json!({ "dataset": "digits@v2:/train/out/0.jsonl" }), Code::PermissionDenied, "symbolic link"),
        (json!({ "dataset": "digits@v2:/train/out" }), Code::PermissionDenied, "symbolic link"),
        (
            json!({ "where": format!("id >= 0{}", " ".repeat(60_000)), "world": 4000 }),
            Code::InvalidArgument,
            "name the rank",
        ),
        (json!({ "dataset": "digits:/train" }), Code::InvalidArgument, "live volume"),
        (json!({ "dataset": "digits@none:/train" }), Code::NotFound, "does not exist"),
        (json!({ "dataset": "digits@v1:/train/none" }), Code::NotFound, "no data file"),
        (json!({ "world": 0 }), Code::InvalidArgument, "rank 0 of 0"),
        (json!({ "rank": 3, "world": 3 }), Code::InvalidArgument, "rank 3 of 3"),
        (json!({ "world": 5000 }), Code::InvalidArgument, "name the rank"),
        (json!({ "batch_rows": 0 }), Code::InvalidArgument, "batch_rows is 0"),
        (json!({ "epochs": 0 }), Code::InvalidArgument, "epochs is 0"),
        (json!({ "columns": ["none"] }), Code::NotFound, "none"),
        (json!({ "where": "id >" }), Code::InvalidArgument, "where"),
        (json!({ "split": "a" }), Code::InvalidArgument, "needs splits"),
        (json!({ "plan": "00" }), Code::InvalidArgument, "plan id"),
        (json!({ "home": "/" }), Code::InvalidArgument, "unknown field `home`"),
        (json!({ "state": { "order": "0".repeat(64), "rows": 0 } }), Code::FailedPrecondition, "order"),
        (json!({ "mixture": { "digits@v1:/train": 1 } }), Code::InvalidArgument, "exclude each other"),
        (json!({ "keys": "id" }), Code::InvalidArgument, "id"),
    ] {
        let status = info(&feeds, &request(wrong.clone())).await.unwrap_err();
        assert_eq!(status.code(), code, "{wrong}: {status}");
        assert!(status.message().contains(says), "{wrong}: {status}");
    }
    let good = info(&feeds, &request(json!({}))).await.unwrap();
    let mut other = ticket(&good, 0);
    other["plan"] = json!("0".repeat(64));
    for (wrong, code) in [
        (b"\xff\x00".to_vec(), Code::InvalidArgument),
        (b"{}".to_vec(), Code::InvalidArgument),
        (vec![b' '; 300 << 10], Code::InvalidArgument),
        (request(json!({})).to_string().into_bytes(), Code::InvalidArgument),
        (other.to_string().into_bytes(), Code::FailedPrecondition),
    ] {
        assert_eq!(read(&feeds, wrong, 1).await.unwrap_err().code(), code);
    }
    assert_eq!(read(&feeds, ticket(&good, 0).to_string(), 1).await.unwrap().len(), 1, "it still serves");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_and_memory_are_bounded_and_given_back() {
    let bench = bench();
    let feeds = bench.serve_with(Limits { streams_max: 1, ..Limits::default() }, anyone());
    let good = info(&feeds, &request(json!({ "epochs": null }))).await.unwrap();
    assert_eq!(good.total_records, -1);
    let begin = || feeds.do_get(tonic::Request::new(Ticket::new(ticket(&good, 0).to_string())));
    // Never read.
    let held = begin().await.unwrap();
    let refused = begin().await.err().unwrap();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(refused.message().contains("1 streams run"), "{refused}");
    drop(held);
    // Once no stream runs.
    feeds.idle().await;
    drop(begin().await.unwrap());

    let small = bench.serve_with(Limits { memory_bytes_max: 1_000, ..Limits::default() }, anyone());
    let good = info(&small, &request(json!({}))).await.unwrap();
    let refused = read(&small, ticket(&good, 0).to_string(), 1).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(refused.message().contains("memory_bytes_max"), "{refused}");
    let small = bench.serve_with(Limits { batch_bytes_max: 10, ..Limits::default() }, anyone());
    let refused = info(&small, &request(json!({}))).await.unwrap_err();
    assert!(refused.message().contains("batch_bytes_max"), "{refused}");
    assert!(Limits { streams_max: 0, ..Limits::default() }.check().is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopping_server_ends_streams_and_refuses_calls() {
    let bench = bench();
    let feeds = bench.serve();
    let good = info(&feeds, &request(json!({ "epochs": null }))).await.unwrap();
    let reading = tokio::spawn({
        let (feeds, ticket) = (feeds.clone(), ticket(&good, 0).to_string());
        async move { read(&feeds, ticket, usize::MAX).await }
    });
    feeds.end_streams();
    // The stream has no end: it ends by the stop alone, and does not look complete.
    assert_eq!(reading.await.unwrap().unwrap_err().code(), Code::Unavailable);
    feeds.drain();
    assert_eq!(info(&feeds, &request(json!({}))).await.unwrap_err().code(), Code::Unavailable);
    feeds.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn withdrawn_permission_ends_a_stream_and_hides_datasets() {
    let bench = bench();
    let permitted = Arc::new(AtomicBool::new(true));
    let callers: Callers = Arc::new({
        let permitted = Arc::clone(&permitted);
        move |_: &Extensions| -> Permission {
            let permitted = Arc::clone(&permitted);
            Arc::new(move |volume: &str| match permitted.load(Ordering::Relaxed) && volume == "digits" {
                true => Ok(()),
                false => Err(Status::permission_denied("not you")),
            })
        }
    });
    let feeds = bench.serve_with(Limits::default(), callers);
    let list = async || {
        let all = feeds.list_flights(tonic::Request::new(Criteria::default())).await.unwrap();
        let infos: Vec<FlightInfo> = all.into_inner().try_collect().await.unwrap();
        infos.into_iter().map(|info| info.flight_descriptor.unwrap()).collect::<Vec<_>>()
    };
    let listed = list().await;
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].path, ["digits@v1:/train"]);
    let described = feeds.get_flight_info(tonic::Request::new(listed[0].clone())).await.unwrap().into_inner();
    let endless = info(&feeds, &request(json!({ "epochs": null }))).await.unwrap();
    assert_eq!(described.schema, endless.schema);
    let answer =
        feeds.do_get(tonic::Request::new(Ticket::new(ticket(&endless, 0).to_string()))).await.unwrap();
    let mut messages = answer.into_inner();
    messages.next().await.unwrap().unwrap();
    permitted.store(false, Ordering::Relaxed);
    let refused = messages.try_for_each(|_| async { Ok(()) }).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert!(list().await.is_empty());
    assert_eq!(info(&feeds, &request(json!({}))).await.unwrap_err().code(), Code::PermissionDenied);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_that_was_made_again_is_not_served_from_the_open_feed_of_the_former_one() {
    let home = tempfile::tempdir().unwrap();
    let datafs = Datafs::open(home.path(), &Config::default()).unwrap();
    let live = fill(&datafs, 1000);
    let bench = Bench { datafs: datafs.clone(), live, _home: home };
    let feeds = bench.serve();
    let mut plans = Vec::new();
    for first in [1000, 5000] {
        if first > 1000 {
            datafs.volume_delete(&"digits".parse().unwrap()).unwrap();
            fill(&datafs, first as usize);
        }
        let found = info(&feeds, &request(json!({}))).await.unwrap();
        plans.push(ticket(&found, 0)["plan"].clone());
        let batches = read(&feeds, ticket(&found, 0).to_string(), usize::MAX).await.unwrap();
        let mut ids: Vec<i64> = batches.into_iter().flat_map(|(ids, _)| ids).collect();
        ids.sort_unstable();
        assert_eq!(ids, (first..first + ROWS as i64).collect::<Vec<_>>());
    }
    assert_eq!(plans[0], plans[1], "names, sizes and numbers of rows are the same");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mixtures_selections_and_keys_are_those_of_the_feed() {
    let bench = bench();
    let feeds = bench.serve();
    let rows = async |request: Value| {
        let info = info(&feeds, &request).await.unwrap();
        let batches = read(&feeds, ticket(&info, 0).to_string(), usize::MAX).await.unwrap();
        batches.into_iter().flat_map(|(ids, _)| ids).collect::<Vec<_>>()
    };
    let some = rows(request(json!({ "where": "id < 50", "columns": ["id"], "keys": "key" }))).await;
    assert!(some.len() == 50 && some.iter().all(|id| *id < 50));
    let splits = json!({ "train": 0.8, "test": "0.2" });
    let train = rows(request(json!({ "splits": splits, "split": "train", "split_by": "id" }))).await;
    let test = rows(request(json!({ "splits": splits, "split": "test", "split_by": ["id"] }))).await;
    let mut both = [train, test].concat();
    both.sort_unstable();
    assert!(both.into_iter().eq(0..ROWS as i64));
    let mixed = rows(json!({
        "mixture": { "digits@latest:/train/0.jsonl": 3, "digits@v1:/train/1.jsonl": "1" }, "batch_rows": 8
    }));
    let mixed = mixed.await;
    assert_eq!(mixed.iter().filter(|id| **id < 100).count(), 100);
    assert_eq!(rows(request(json!({ "rows_per_epoch": 0.25 }))).await.len(), ROWS / 4);
}

#[test]
fn same_connection_is_the_uri_of_the_specification() {
    assert_eq!(SAME_CONNECTION, "arrow-flight-reuse-connection://?");
}

proptest! {
    /// Any bytes are refused or read; what is read stays the same as a ticket.
    #[test]
    fn any_ticket_is_refused_or_read(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(Request::of_ticket(&bytes).is_err());
    }

    #[test]
    fn tickets_keep_what_they_say(
        seed in any::<u64>(), world in 1u32..9, rows in any::<u64>(), over in any::<bool>(),
        parts in prop::collection::vec("[a-z]{1,4}", 0..4),
    ) {
        let splits: Vec<_> = parts.iter().enumerate().map(|(at, part)| (format!("{part}{at}"), "0.1")).collect();
        let plan = "ab".repeat(32);
        let text = json!({
            "dataset": "a@b:/c", "seed": seed, "world": world, "rank": world - 1, "plan": plan, "splits": splits,
            "state": { "order": plan, "rows": rows, "over": over }, "epochs": null,
        });
        let request = Request::of_ticket(text.to_string().as_bytes()).unwrap();
        let again = request.ticket(world - 1, plan.parse().unwrap()).unwrap();
        prop_assert_eq!(Request::of_ticket(&again).unwrap(), request);
    }
}
