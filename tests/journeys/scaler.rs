//! Tests of `millrace scaler` with the calls that KEDA makes: lag from zero replicas, queue time, refusals, its end.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;

use millrace_bundle::{Bundle, Lineage};
use object_store::local::LocalFileSystem;
use serde_json::Value;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::support::{Home, PATIENCE, Service};

#[allow(missing_docs, unreachable_pub, dead_code, clippy::all, clippy::pedantic)]
mod protocol {
    //! The generated types.
    tonic::include_proto!("externalscaler");
}

use protocol::external_scaler_client::ExternalScalerClient;
use protocol::{GetMetricsRequest, ScaledObjectRef};

/// A scaler on a free port, with its address.
fn scaler(home: &Home, more: &[&str]) -> (Service, String) {
    let mut service = home.start([&["scaler", "--json", "--listen", "127.0.0.1:0"][..], more].concat());
    let address = service.object()["grpc"].as_str().unwrap().to_owned();
    (service, address)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// A client as KEDA has it.
#[derive(Clone)]
struct Keda(ExternalScalerClient<Channel>);

impl Keda {
    async fn connect(address: &str) -> Keda {
        Keda(ExternalScalerClient::connect(format!("http://{address}")).await.unwrap())
    }

    async fn is_active(&mut self, of: &ScaledObjectRef) -> Result<bool, Status> {
        Ok(self.0.is_active(of.clone()).await?.into_inner().result)
    }

    /// The metric's target and value.
    async fn metric(&mut self, of: &ScaledObjectRef) -> Result<(f64, f64), Status> {
        let spec = self.0.get_metric_spec(of.clone()).await?.into_inner().metric_specs.remove(0);
        let asked =
            GetMetricsRequest { scaled_object_ref: Some(of.clone()), metric_name: spec.metric_name.clone() };
        let value = self.0.get_metrics(asked).await?.into_inner().metric_values.remove(0);
        assert_eq!(
            (value.metric_name, value.metric_value),
            (spec.metric_name, value.metric_value_float.ceil() as i64)
        );
        Ok((spec.target_size_float, value.metric_value_float))
    }

    /// Asks again until a call fails, and returns the error.
    async fn error(&mut self, of: &ScaledObjectRef) -> Status {
        let waited = tokio::time::timeout(PATIENCE, async {
            loop {
                if let Err(status) = self.is_active(of).await {
                    return status;
                }
                tokio::time::sleep(std::time::Duration::from_millis(200)).await;
            }
        });
        waited.await.unwrap()
    }

    /// Asks again until the metric has a value that fits.
    async fn until(&mut self, of: &ScaledObjectRef, fits: impl Fn(f64) -> bool) {
        let waited = tokio::time::timeout(PATIENCE, async {
            // Each call measures anew after a second.
            while !self.metric(of).await.is_ok_and(|(_, value)| fits(value)) {
                tokio::time::sleep(std::time::Duration::from_millis(200)).await;
            }
        });
        waited.await.unwrap();
    }
}

fn trigger(metadata: &[(&str, &str)]) -> ScaledObjectRef {
    let pairs = metadata.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    ScaledObjectRef { name: "object".into(), namespace: "space".into(), scaler_metadata: pairs.collect() }
}

fn produce(home: &Home, topic: &str, records: usize) {
    let file = home.file("records.jsonl", "{\"x\":1}\n".repeat(records));
    home.ok(["produce", topic, file.to_str().unwrap()]);
}

#[test]
fn lag_is_known_without_a_consumer_and_ends_when_the_ingest_has_caught_up() {
    let home = Home::new();
    let (mut service, address) = scaler(&home, &[]);
    let job =
        [("kind", "ingest"), ("job", "clicks"), ("topic", "clicks"), ("volume", "v"), ("lagThreshold", "10")];
    let of = trigger(&job);
    runtime().block_on(async {
        let mut keda = Keda::connect(&address).await;
        let missing = keda.is_active(&of).await.unwrap_err();
        assert_eq!(missing.code(), Code::NotFound, "{missing}");
        assert!(missing.message().contains("topic clicks does not exist"), "{missing}");
        produce(&home, "clicks", 30);
        // A partition needs no more than one replica.
        let all = trigger(&[&job[..], &[("allowIdleConsumers", "true")]].concat());
        keda.until(&of, |value| value == 10.0).await;
        assert_eq!(keda.metric(&all).await.unwrap(), (10.0, 30.0));
        assert!(keda.is_active(&of).await.unwrap());
        let above = trigger(&[&job[..], &[("activationLagThreshold", "30")]].concat());
        assert!(!keda.is_active(&above).await.unwrap());

        let mut stream = keda.0.stream_is_active(of.clone()).await.unwrap().into_inner();
        assert!(stream.message().await.unwrap().unwrap().result);
        home.ok(["ingest", "--topic", "clicks", "--volume", "v"]);
        assert!(!stream.message().await.unwrap().unwrap().result);
        assert_eq!(keda.metric(&all).await.unwrap(), (10.0, 0.0));
        assert!(!keda.is_active(&of).await.unwrap());
        produce(&home, "clicks", 5);
        assert!(stream.message().await.unwrap().unwrap().result);
        assert_eq!(keda.metric(&all).await.unwrap(), (10.0, 5.0));

        // The job lands another topic, a pipe has its own offsets, and a pipe's volume must exist.
        produce(&home, "other", 1);
        let other = trigger(&[("kind", "ingest"), ("job", "clicks"), ("topic", "other"), ("volume", "v")]);
        let refused = keda.is_active(&other).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(refused.message().contains("lands topic clicks, not other"), "{refused}");
        let pipe = [("kind", "ingest"), ("pipe", "p"), ("topic", "clicks"), ("output", "o"), ("model", "m")];
        let known = trigger(&[&pipe[..], &[("volume", "v")]].concat());
        assert_eq!(keda.metric(&known).await.unwrap().1, 35.0);
        let unknown = trigger(&[&pipe[..], &[("volume", "none")]].concat());
        assert_eq!(keda.is_active(&unknown).await.unwrap_err().code(), Code::NotFound);

        service.signal(nix::sys::signal::Signal::SIGTERM);
        assert!(stream.message().await.unwrap().is_none());
    });
    assert_eq!(service.wait(), Some(0));
}

#[test]
fn brokers_that_do_not_answer_are_no_lag_of_zero() {
    let home = Home::new();
    home.ok(["volume", "create", "v"]);
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let config = format!(
        "[streams]\nbootstrap_servers = \"{closed}\"\n[[ingest.jobs]]\nname = \"j\"\ntopic = \"t\"\nvolume = \"v\"\npath = \"t\"\n"
    );
    let config = home.file("scaler.toml", config);
    let (service, address) = scaler(&home, &["--config", config.to_str().unwrap()]);
    runtime().block_on(async {
        let mut keda = Keda::connect(&address).await;
        // The configuration knows topic and volume of the job.
        let of = trigger(&[("kind", "ingest"), ("job", "j"), ("scalerAddress", "millrace-scaler:9300")]);
        let mut other = keda.clone();
        let (active, metric) = tokio::join!(keda.is_active(&of), other.metric(&of));
        for status in [active.unwrap_err(), metric.unwrap_err()] {
            assert_eq!(status.code(), Code::Unavailable, "{status}");
            assert!(status.message().contains("no Kafka broker answered"), "{status}");
        }
    });
    assert_eq!(service.stop(), 0);
}

#[test]
fn wrong_triggers_and_callers_are_refused() {
    let home = Home::new();
    let made: Value = home.json(["serve", "token", "keda"]);
    let tokens = home.file("tokens", format!("{}\n", made["line"].as_str().unwrap().trim()));
    let (service, address) = scaler(&home, &["--token-file", tokens.to_str().unwrap()]);
    runtime().block_on(async {
        let mut keda = Keda::connect(&address).await;
        let of = trigger(&[("kind", "cron")]);
        assert_eq!(keda.is_active(&of).await.unwrap_err().code(), Code::Unauthenticated);
        let with_token = |mut request: tonic::Request<ScaledObjectRef>| {
            let value = format!("Bearer {}", made["token"].as_str().unwrap());
            request.metadata_mut().insert("authorization", value.parse().unwrap());
            request
        };
        let asked = with_token(tonic::Request::new(of.clone()));
        let refused = keda.0.get_metric_spec(asked).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(
            refused.message().contains("ScaledObject \"space/object\": kind \"cron\" is unknown"),
            "{refused}"
        );
        let long = "x".repeat(20_000);
        let long = trigger(&[("kind", long.as_str())]);
        let refused = keda.0.stream_is_active(with_token(tonic::Request::new(long))).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    });
    assert_eq!(service.stop(), 0);
    let (code, line) = home.fails(["scaler", "--listen", "192.0.2.1:9300"]);
    assert!(code == 5 && line.contains("cannot listen on 192.0.2.1:9300"), "{code} {line}");
    assert_eq!(home.run(["scaler", "--tls-cert", "c.pem"]).status.code(), Some(2));
}

/// A model server with the model `m`, and its addresses.
fn model_server(home: &Home) -> (Service, Value) {
    let onnx = home.dir.path().join("m.onnx");
    let onnx = onnx.to_str().unwrap();
    home.ok(["model", "init", "mlp", "--inputs", "2", "--hidden", "4", "--classes", "2", onnx]);
    let models = home.dir.path().join("models");
    std::fs::create_dir(&models).unwrap();
    let store = LocalFileSystem::new_with_prefix(&models).unwrap();
    let graph = std::fs::read(onnx).unwrap();
    let bundle = Bundle::new("m", 1, graph, Lineage::default(), Default::default()).unwrap();
    runtime().block_on(bundle.write(&store, "")).unwrap();
    home.serve(["--models", models.to_str().unwrap()])
}

/// A server that answers every request with a header and endless text.
fn endless() -> String {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for mut connection in socket.incoming().flatten() {
            std::thread::spawn(move || {
                connection.read_exact(&mut [0; 16]).ok();
                connection.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n").ok();
                while connection.write_all(&[b'#'; 1 << 16]).is_ok() {}
            });
        }
    });
    address
}

#[test]
fn queue_time_of_a_model_comes_from_its_replicas() {
    let home = Home::new();
    let (server, printed) = model_server(&home);
    let (grpc, metrics) = (printed["grpc"].as_str().unwrap(), printed["metrics"].as_str().unwrap());
    let (service, address) = scaler(&home, &[]);
    let with = |metrics: &str, more: &[(&str, &str)]| {
        let base = [("kind", "model"), ("model", "m"), ("metrics", metrics), ("windowSeconds", "1")];
        let changed = base.iter().filter(|(name, _)| more.iter().all(|(other, _)| other != name));
        trigger(&changed.chain(more).copied().collect::<Vec<_>>())
    };
    let of = with(metrics, &[("queueTimeMs", "20")]);
    runtime().block_on(async {
        let mut keda = Keda::connect(&address).await;
        assert_eq!(keda.metric(&of).await.unwrap(), (20.0, 0.0));
        assert!(!keda.is_active(&of).await.unwrap());
        let load = ["serve", "bench", "m", "--grpc", grpc, "--concurrency", "16", "--duration", "2"];
        let mut load = home.start(load);
        keda.until(&of, |value| value > 0.0).await;
        load.wait();
        // The window moves past the load.
        keda.until(&of, |value| value == 0.0).await;

        let absent = keda.is_active(&with(metrics, &[("model", "none")])).await.unwrap_err();
        assert_eq!(absent.code(), Code::NotFound, "{absent}");
        assert!(absent.message().contains("model none"), "{absent}");
        let hostile = keda.is_active(&with(&endless(), &[])).await.unwrap_err();
        assert_eq!(hostile.code(), Code::Unavailable, "{hostile}");
        assert!(hostile.message().contains("0 of 1 replicas"), "{hostile}");
        let nowhere = keda.is_active(&with("none.invalid:8002", &[])).await.unwrap_err();
        assert_eq!(nowhere.code(), Code::Unavailable, "{nowhere}");
        assert_eq!(server.stop(), 0);
        let gone = keda.error(&of).await;
        assert_eq!(gone.code(), Code::Unavailable, "{gone}");
    });
    assert_eq!(service.stop(), 0);
}
