//! Tests of `millrace feed serve` over real sockets: several servers, kills, tokens, limits, and its end.

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::Int64Type;
use arrow_flight::decode::{DecodedPayload, FlightDataDecoder};
use arrow_flight::error::FlightError;
use arrow_flight::flight_service_client::FlightServiceClient;
use arrow_flight::{Criteria, FlightDescriptor, FlightInfo, Ticket};
use futures::{StreamExt, TryStreamExt};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::support::{Home, Service, scrape, until};

const ROWS: i64 = 4_000;

/// A home with the snapshot `v@s` of 4,000 rows of 1 KiB in `/rows`.
fn dataset() -> Home {
    let home = Home::new();
    home.ok(["volume", "create", "v"]);
    let filler = "x".repeat(1_000);
    for part in 0..4 {
        let ids = part * ROWS / 4..(part + 1) * ROWS / 4;
        let lines: String = ids.map(|id| format!("{{\"id\":{id},\"filler\":\"{filler}\"}}\n")).collect();
        let file = home.file(&format!("{part}.jsonl"), lines);
        home.ok(["cp", file.to_str().unwrap(), &format!("v:/rows/{part}.jsonl")]);
    }
    home.ok(["snapshot", "create", "v@s"]);
    home
}

/// A server on a free port, with its address and the address of its metrics.
fn serve(home: &Home, more: &[&str]) -> (Service, String, String) {
    let ports = ["feed", "serve", "--json", "--grpc", "127.0.0.1:0", "--metrics", "127.0.0.1:0"];
    let mut service = home.start([&ports[..], more].concat());
    let printed = service.object();
    let at = |key: &str| printed[key].as_str().unwrap().to_owned();
    (service, at("grpc"), at("metrics"))
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// A client of one server, with its token.
#[derive(Clone)]
struct Client {
    service: FlightServiceClient<Channel>,
    token: Option<String>,
}

async fn connect(address: &str) -> Client {
    let channel = Channel::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap();
    Client { service: FlightServiceClient::new(channel).max_decoding_message_size(64 << 20), token: None }
}

impl Client {
    fn asking<T>(&self, message: T) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        if let Some(token) = &self.token {
            request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
        }
        request
    }

    async fn info(&mut self, request: &Value) -> Result<FlightInfo, Status> {
        let request = self.asking(FlightDescriptor::new_cmd(request.to_string()));
        Ok(self.service.get_flight_info(request).await?.into_inner())
    }

    /// Begins the stream of a ticket.
    async fn stream(&mut self, ticket: &Value) -> Result<Stream, Status> {
        let request = self.asking(Ticket::new(ticket.to_string()));
        let messages = self.service.do_get(request).await?.into_inner();
        let messages = messages.map_err(|status| FlightError::Tonic(Box::new(status)));
        Ok(Stream(FlightDataDecoder::new(messages)))
    }
}

struct Stream(FlightDataDecoder);

impl Stream {
    /// The ids of the next batch, with the state after it.
    async fn next(&mut self) -> Option<Result<(Vec<i64>, Value), FlightError>> {
        loop {
            let message = match self.0.next().await? {
                Ok(message) => message,
                Err(error) => return Some(Err(error)),
            };
            let state = message.app_metadata();
            if let DecodedPayload::RecordBatch(batch) = &message.payload {
                return Some(Ok((ids(batch), serde_json::from_slice(&state).unwrap())));
            }
        }
    }

    /// The ids up to the end, batch by batch.
    async fn rest(&mut self) -> Result<Vec<Vec<i64>>, FlightError> {
        let mut batches = Vec::new();
        while let Some(batch) = self.next().await {
            batches.push(batch?.0);
        }
        Ok(batches)
    }
}

fn ids(batch: &RecordBatch) -> Vec<i64> {
    batch.column_by_name("id").unwrap().as_primitive::<Int64Type>().values().to_vec()
}

fn ticket(info: &FlightInfo, rank: usize) -> Value {
    serde_json::from_slice(&info.endpoint[rank].ticket.as_ref().unwrap().ticket).unwrap()
}

/// The order of the feed without a server.
fn expected(home: &Home) -> Vec<i64> {
    let rows = ROWS.to_string();
    let head =
        ["--json", "feed", "head", "v@s:/rows", "--batch-rows", "64", "--columns", "id", "--rows", &rows];
    let printed = home.ok(head);
    printed.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["id"].as_i64().unwrap()).collect()
}

#[test]
fn killed_server_is_replaced_without_a_missing_or_repeated_row() {
    let home = dataset();
    let (second, second_at, _) = serve(&home, &["--dataset", "v:/rows"]);
    let peer = format!("grpc://{second_at}");
    let (mut first, first_at, _) = serve(&home, &["--volume", "v", "--peer", &peer]);
    let whole = expected(&home);
    runtime().block_on(async {
        let mut clients = [connect(&first_at).await, connect(&second_at).await];
        let request = json!({ "dataset": "v@latest:/rows", "batch_rows": 64, "world": 3 });
        let info = clients[0].info(&request).await.unwrap();
        assert_eq!((info.endpoint.len(), info.total_records), (3, ROWS));
        assert_eq!(ticket(&info, 0)["dataset"], "v@s:/rows");
        let own = format!("grpc://{first_at}");
        for (rank, endpoint) in info.endpoint.iter().enumerate() {
            let locations: Vec<_> = endpoint.location.iter().map(|location| location.uri.as_str()).collect();
            let turned = if rank == 1 { [&peer, &own] } else { [&own, &peer] };
            assert_eq!(locations, turned);
        }
        let mut all: Vec<Vec<Vec<i64>>> = Vec::new();
        for rank in 0..3 {
            all.push(clients[rank % 2].stream(&ticket(&info, rank)).await.unwrap().rest().await.unwrap());
        }
        // Step by step, rank after rank, it is the order of the feed.
        let together: Vec<i64> =
            (0..all[0].len()).flat_map(|step| all.iter().flat_map(move |rank| rank[step].clone())).collect();
        assert_eq!(together, whole);

        // The first server dies while a stream runs, and the second one goes on from the last state.
        let mut ticket = ticket(&info, 1);
        // Without an end, so that the connection cannot have all of it already.
        ticket["epochs"] = Value::Null;
        let mut stream = clients[0].stream(&ticket).await.unwrap();
        let mut seen = Vec::new();
        for _ in 0..5 {
            let (ids, state) = stream.next().await.unwrap().unwrap();
            ticket["state"] = state;
            seen.push(ids);
        }
        first.signal(Signal::SIGKILL);
        first.wait();
        // What the connection still has is not needed, and the stream does not look complete.
        let broken = loop {
            match stream.next().await {
                Some(Ok(_)) => {}
                other => break other,
            }
        };
        assert!(broken.is_some_and(|end| end.is_err()));
        ticket["epochs"] = json!(1);
        seen.extend(clients[1].stream(&ticket).await.unwrap().rest().await.unwrap());
        assert_eq!(seen, all[1]);
    });
    assert_eq!(second.stop(), 0);
}

#[test]
fn tokens_permit_volumes_and_strangers_learn_nothing() {
    let home = dataset();
    home.ok(["volume", "create", "other"]);
    home.ok(["snapshot", "create", "other@s"]);
    let reader = home.json(["serve", "token", "reader", "--models", "v"]);
    let other = home.json(["serve", "token", "other", "--models", "other"]);
    let line = |token: &Value| token["line"].as_str().unwrap().to_owned();
    home.file("tokens.txt", format!("{}\n{}\n", line(&reader), line(&other)));
    home.file("millrace.toml", "[feed]\ntokens = \"tokens.txt\"\nvolumes = [\"v\", \"other\"]\n");
    let (service, address, metrics) = serve(&home, &[]);
    runtime().block_on(async {
        let client = connect(&address).await;
        let with = |token: &Value| Client {
            token: Some(token["token"].as_str().unwrap().to_owned()),
            ..client.clone()
        };
        let request = json!({ "dataset": "v@s:/rows" });
        assert_eq!(client.clone().info(&request).await.unwrap_err().code(), Code::Unauthenticated);
        let wrong = json!({ "token": "0".repeat(64) });
        assert_eq!(with(&wrong).info(&request).await.unwrap_err().code(), Code::Unauthenticated);
        let refused = with(&other).info(&request).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied);
        assert!(refused.message().contains("token \"other\" may not read volume \"v\""), "{refused}");
        let info = with(&reader).info(&request).await.unwrap();
        // A ticket is no permission.
        let refused = with(&other).stream(&ticket(&info, 0)).await.err().unwrap();
        assert_eq!(refused.code(), Code::PermissionDenied);
        let mut reader = with(&reader);
        let rows = reader.stream(&ticket(&info, 0)).await.unwrap().rest().await.unwrap().concat();
        assert_eq!(rows.len() as i64, ROWS);
        let criteria = reader.asking(Criteria::default());
        let listed: Vec<FlightInfo> =
            reader.service.list_flights(criteria).await.unwrap().into_inner().try_collect().await.unwrap();
        let names: Vec<_> = listed.into_iter().map(|info| info.flight_descriptor.unwrap().path).collect();
        assert_eq!(names, [["v@s:/"]]);
    });
    let seen = scrape(&metrics);
    assert!(seen.contains(&format!("millrace_flight_rows_total {ROWS}")), "{seen}");
    assert!(seen.contains("millrace_flight_refused_total{reason=\"permission\"} 2"), "{seen}");
    assert_eq!(service.stop(), 0);
}

#[test]
fn client_that_never_reads_neither_blocks_others_nor_keeps_its_stream() {
    let home = dataset();
    home.file("millrace.toml", "[feed]\ndatasets = [\"v:/rows\"]\n[feed.limits]\nunread_ms_max = 300\n");
    let (service, address, metrics) = serve(&home, &["--streams", "2"]);
    // Before the first call.
    let seen = scrape(&metrics);
    for metric in ["open_streams", "rows_total", "bytes_total", "reserved_bytes"] {
        assert!(seen.contains(&format!("millrace_flight_{metric} 0\n")), "{metric}: {seen}");
    }
    assert!(seen.contains("millrace_flight_streams_total{end=\"failed\"} 0"), "{seen}");
    assert!(seen.contains("millrace_flight_refused_total{reason=\"streams\"} 0"), "{seen}");
    runtime().block_on(async {
        let mut client = connect(&address).await;
        let request = json!({ "dataset": "v@s:/rows", "batch_rows": 256, "epochs": null });
        let endless = client.info(&request).await.unwrap();
        let idle = client.stream(&ticket(&endless, 0)).await.unwrap();
        let mut other = connect(&address).await;
        let mut read = other.stream(&ticket(&endless, 0)).await.unwrap();
        let refused = other.stream(&ticket(&endless, 0)).await.err().unwrap();
        assert_eq!(refused.code(), Code::ResourceExhausted);
        assert!(refused.message().contains("2 streams run"), "{refused}");
        // The reader goes on while the other stream is ended by the server.
        let open = |metrics: &str| scrape(metrics).contains("millrace_flight_open_streams 1");
        while !open(&metrics) {
            let (ids, _) = read.next().await.unwrap().unwrap();
            assert_eq!(ids.len(), 256);
        }
        drop((idle, read));
    });
    until("no stream runs", || scrape(&metrics).contains("millrace_flight_open_streams 0"));
    let seen = scrape(&metrics);
    assert!(seen.contains("millrace_flight_refused_total{reason=\"streams\"} 1"), "{seen}");
    assert_eq!(service.stop(), 0);
}

#[test]
fn stopping_server_ends_streams_as_unavailable() {
    let home = dataset();
    home.file("millrace.toml", "[feed]\ndrain_ms_max = 50\n");
    let (mut service, address, _) = serve(&home, &["--volume", "v@s"]);
    let runtime = runtime();
    let mut stream = runtime.block_on(async {
        let mut client = connect(&address).await;
        let endless = client.info(&json!({ "dataset": "v@s:/rows", "epochs": null })).await.unwrap();
        let mut stream = client.stream(&ticket(&endless, 0)).await.unwrap();
        stream.next().await.unwrap().unwrap();
        stream
    });
    service.signal(Signal::SIGTERM);
    let ended = runtime.block_on(async {
        loop {
            match stream.next().await {
                Some(Ok(_)) => {}
                Some(Err(error)) => break error,
                None => panic!("an endless stream looks complete"),
            }
        }
    });
    let FlightError::Tonic(status) = ended else { panic!("{ended}") };
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert_eq!(service.wait(), Some(0));
}

#[test]
fn unsafe_or_wrong_settings_are_refused_at_the_start() {
    let home = Home::new();
    home.ok(["volume", "create", "v"]);
    for (flags, says) in [
        (&["--volume", "v", "--grpc", "0.0.0.0:0"][..], "set tokens or tls.client_ca in [feed]"),
        (&[][..], "no dataset to serve"),
        (&["--volume", "v", "--peer", "feed-2:8815"][..], "is no location of a Flight server"),
        (&["--volume", "v", "--streams", "0"][..], "streams_max is 0"),
    ] {
        let (code, error) = home.fails([&["feed", "serve"][..], flags].concat());
        assert!(code == 2 && error.contains(says), "{code} {error}");
    }
    let refused = home.run(["feed", "serve", "--dataset", "v:/../x"]);
    let error = String::from_utf8(refused.stderr).unwrap();
    assert!(refused.status.code() == Some(2) && error.contains("has '.' or '..' in it"), "{error}");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let (code, error) = home.fails(["feed", "serve", "--volume", "v", "--grpc", &address]);
    assert!(code == 5 && error.contains("cannot listen on"), "{code} {error}");
}
