//! Tests of rolling updates: servers stop, start and change versions while clients send requests. No request
//! is lost, and no request is answered by two versions. `ROLLING_ROUNDS=100` runs more rounds; measurements
//! are printed.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use millrace_bundle::onnx::{ModelProto, TensorProto, tensor_proto::DataType};
use millrace_serving::client::{Client, ClientError};
use millrace_serving::tensor::{Data, Tensor};
use millrace_serving::wire::Form;
use nix::sys::signal::Signal;
use prost::Message;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use crate::support::{Home, Service, echo, until};

const CLIENTS: usize = 8;
/// Answers to wait for before and between changes of servers.
const ANSWERS: usize = 200;
/// Attempts of a client, on two replicas in turn, before it gives up.
const TRIES: usize = 4;

fn rounds() -> u64 {
    std::env::var("ROLLING_ROUNDS").map_or(3, |rounds| rounds.parse().unwrap())
}

/// A model that adds its version to four numbers.
fn model_adding_version(version: u64) -> Vec<u8> {
    let mut model = ModelProto::decode(echo(&[("x", DataType::Float, &[-1, 4])]).as_slice()).unwrap();
    let graph = model.graph.as_mut().unwrap();
    graph.node[0].op_type = Some("Add".into());
    graph.node[0].input.push("version".into());
    graph.initializer.push(TensorProto {
        name: Some("version".into()),
        dims: vec![1],
        data_type: Some(DataType::Float as i32),
        raw_data: Some((version as f32).to_le_bytes().to_vec()),
        ..Default::default()
    });
    model.encode_to_vec()
}

/// Models in a folder in Triton's layout; the server serves the newest version.
struct Models {
    home: Home,
}

impl Models {
    fn new() -> Models {
        let models = Models { home: Home::new() };
        std::fs::create_dir_all(models.folder().join("m")).unwrap();
        let config = "name: \"m\"\nmax_batch_size: 64\nversion_policy { latest { num_versions: 1 } }\n";
        std::fs::write(models.folder().join("m/config.pbtxt"), config).unwrap();
        models.home.file("millrace.toml", "[serving]\npoll_ms = 20\n");
        models.add_version(1);
        models
    }

    fn folder(&self) -> PathBuf {
        self.home.dir.path().join("models")
    }

    /// Adds a version atomically, with an old modification time, so that it counts as completely written.
    fn add_version(&self, version: u64) {
        let staged = self.home.dir.path().join("staged");
        std::fs::create_dir(&staged).unwrap();
        let graph = staged.join("model.onnx");
        std::fs::write(&graph, model_adding_version(version)).unwrap();
        let file = std::fs::File::options().write(true).open(&graph).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(60)).unwrap();
        std::fs::rename(staged, self.folder().join("m").join(version.to_string())).unwrap();
    }

    fn remove(&self, version: u64) {
        std::fs::remove_dir_all(self.folder().join("m").join(version.to_string())).unwrap();
    }

    /// Starts a server; returns it once it is ready, with its address.
    fn serve(&self) -> (Service, String) {
        let (config, models) = (self.home.dir.path().join("millrace.toml"), self.folder());
        let (service, printed) =
            self.home.serve([Path::new("--config"), &config, Path::new("--models"), &models]);
        let address = printed["grpc"].as_str().unwrap().to_owned();
        (service, address)
    }
}

/// Sends one request and checks the answer; returns the version that answered.
async fn ask(client: &mut Client, number: u64) -> Result<u64, ClientError> {
    let values: Vec<f32> = (0..4).map(|place| (number % 1000 + place) as f32).collect();
    let input = Tensor::fp32("x", vec![1, 4], values.clone()).unwrap();
    let prediction = client.infer("m", None, vec![input], Form::Raw).await?;
    let version: u64 = prediction.version.parse().unwrap();
    let expected: Vec<f32> = values.iter().map(|value| value + version as f32).collect();
    match &prediction.outputs[0].data {
        Data::Fp32(found) => assert_eq!(*found, expected, "version {version}"),
        other => panic!("{other:?}"),
    }
    Ok(version)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Waits for [`ANSWERS`] answers.
async fn wait_for_answers(answered: &mut mpsc::Receiver<()>) {
    for _ in 0..ANSWERS {
        answered.recv().await.expect("clients ask");
    }
}

#[test]
fn stopping_server_answers_accepted_requests() {
    let models = Models::new();
    let mut refused = 0;
    let mut starts = Vec::new();
    for _ in 0..rounds() {
        let begin = Instant::now();
        let (mut service, address) = models.serve();
        starts.push(begin.elapsed());
        runtime().block_on(async {
            let (answer, mut answered) = mpsc::channel(ANSWERS);
            let mut clients = JoinSet::new();
            for _ in 0..CLIENTS {
                let (answer, mut client) = (answer.clone(), Client::connect(&address).await.unwrap());
                clients.spawn(async move {
                    for number in 0.. {
                        match ask(&mut client, number).await {
                            Ok(version) => assert_eq!(version, 1),
                            // A lost request would fail with another code, because its connection breaks.
                            Err(error) if error.is_retryable() => return,
                            Err(error) => panic!("request {number}: {error}"),
                        }
                        // After the signal the answers are not counted.
                        let _ = answer.try_send(());
                    }
                });
            }
            wait_for_answers(&mut answered).await;
            service.signal(Signal::SIGTERM);
            while let Some(client) = clients.join_next().await {
                client.unwrap();
                refused += 1;
            }
        });
        assert_eq!(service.wait(), Some(0));
    }
    starts.sort();
    eprintln!(
        "{} servers stopped under {CLIENTS} clients, {refused} refused with UNAVAILABLE and nothing lost; started \
         and ready within {:?}, at most {:?}",
        starts.len(),
        starts[starts.len() / 2],
        starts[starts.len() - 1]
    );
}

/// A client of two replicas that tries the other one when one rejects a request.
struct RetryingClient {
    addresses: watch::Receiver<[String; 2]>,
    clients: [Option<(String, Client)>; 2],
}

impl RetryingClient {
    async fn ask(&mut self, number: u64) -> Result<usize, ClientError> {
        let mut last = None;
        for attempt in 0..TRIES {
            let replica = (number as usize + attempt) % 2;
            let address = self.addresses.borrow()[replica].clone();
            let asked = async {
                let mut client = match self.clients[replica].take() {
                    Some((known, client)) if known == address => client,
                    _ => Client::connect(&address).await?,
                };
                let answer = ask(&mut client, number).await;
                self.clients[replica] = Some((address, client));
                answer
            };
            match asked.await {
                Ok(_) => return Ok(attempt),
                Err(error) if error.is_retryable() => last = Some(error),
                Err(error) => return Err(error),
            }
        }
        Err(last.unwrap())
    }
}

#[test]
fn retrying_clients_see_no_error_during_rolling_replacement() {
    let models = Models::new();
    let mut replicas = [(); 2].map(|()| models.serve());
    let (publish, addresses) = watch::channel([replicas[0].1.clone(), replicas[1].1.clone()]);
    runtime().block_on(async {
        let (answer, mut answered) = mpsc::channel(ANSWERS);
        let (stop, again) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let mut clients = JoinSet::new();
        for _ in 0..CLIENTS {
            let mut either = RetryingClient { addresses: addresses.clone(), clients: [None, None] };
            let (answer, stop, again) = (answer.clone(), Arc::clone(&stop), Arc::clone(&again));
            clients.spawn(async move {
                for number in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        return number;
                    }
                    let tries = either.ask(number).await.unwrap_or_else(|error| panic!("{number}: {error}"));
                    again.fetch_add(tries as u64, Ordering::Relaxed);
                    let _ = answer.try_send(());
                }
                0
            });
        }
        for round in 0..rounds() {
            for replica in 0..2 {
                wait_for_answers(&mut answered).await;
                let (service, _) = std::mem::replace(&mut replicas[replica], models.serve());
                // The other replica answers meanwhile; clients get the successor's address only after this
                // one has exited.
                assert_eq!(tokio::task::spawn_blocking(|| service.stop()).await.unwrap(), 0, "round {round}");
                publish.send_modify(|addresses| addresses[replica] = replicas[replica].1.clone());
            }
        }
        stop.store(true, Ordering::Relaxed);
        let requests: u64 = clients.join_all().await.iter().sum();
        eprintln!(
            "{requests} requests of {CLIENTS} clients while two replicas were replaced {} times: none failed, {} were \
             asked again",
            2 * rounds(),
            again.load(Ordering::Relaxed)
        );
        assert!(again.load(Ordering::Relaxed) > 0, "nobody met a server that stops");
    });
}

#[test]
fn versions_change_under_load_without_an_error() {
    let models = Models::new();
    let (service, address) = models.serve();
    let seen: Arc<Vec<AtomicU64>> = Arc::new((0..CLIENTS).map(|_| AtomicU64::new(0)).collect());
    let stop = Arc::new(AtomicBool::new(false));
    let swaps = Arc::new(AtomicBool::new(false));
    let runtime = runtime();
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let (address, seen) = (address.clone(), Arc::clone(&seen));
            let (stop, swaps) = (Arc::clone(&stop), Arc::clone(&swaps));
            runtime.spawn(async move {
                let mut asking = Client::connect(&address).await.unwrap();
                let mut times = [Vec::new(), Vec::new()];
                let mut newest = 0;
                for number in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let (begin, phase) = (Instant::now(), usize::from(swaps.load(Ordering::Relaxed)));
                    let version = ask(&mut asking, number).await.unwrap();
                    times[phase].push(begin.elapsed());
                    assert!(version >= newest, "version {version} after {newest}");
                    newest = version;
                    seen[client].store(version, Ordering::Relaxed);
                }
                times
            })
        })
        .collect();
    let all_see = |version| {
        until("all clients are answered by the newest version", || {
            assert!(clients.iter().all(|client| !client.is_finished()), "a client broke off");
            seen.iter().all(|seen| seen.load(Ordering::Relaxed) == version)
        });
    };
    all_see(1);
    // About as long without swaps as with them.
    std::thread::park_timeout(Duration::from_millis(100 * rounds()));
    swaps.store(true, Ordering::Relaxed);
    for version in 2..2 + rounds() {
        models.add_version(version);
        all_see(version);
        models.remove(version - 1);
    }
    stop.store(true, Ordering::Relaxed);
    let mut times = [Vec::new(), Vec::new()];
    for client in clients {
        let [steady, changing] = runtime.block_on(client).unwrap();
        times[0].extend(steady);
        times[1].extend(changing);
    }
    let [steady, changing] = times.map(|mut times| {
        times.sort();
        (times.len(), times[times.len() / 100 * 99])
    });
    eprintln!(
        "{} versions under {CLIENTS} clients: p99 {:?} of {} requests, {:?} of {} before",
        rounds(),
        changing.1,
        changing.0,
        steady.1,
        steady.0
    );
    assert_eq!(service.stop(), 0);
}
