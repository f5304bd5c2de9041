//! The metrics of the CSI driver: those of all its mounts at one address, which it takes over from its predecessor.

use std::collections::HashMap;
use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};

use crate::support::{Home, fuse_permitted, scrape, try_scrape, until};

/// `csi.v1.NodePublishVolumeRequest`, as far as it is needed here.
#[derive(Clone, PartialEq, prost::Message)]
struct Publish {
    #[prost(string, tag = "1")]
    volume_id: String,
    #[prost(string, tag = "4")]
    target_path: String,
    #[prost(message, optional, tag = "5")]
    volume_capability: Option<Capability>,
    #[prost(map = "string, string", tag = "7")]
    secrets: HashMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Capability {
    #[prost(message, optional, tag = "2")]
    mount: Option<Empty>,
    #[prost(message, optional, tag = "3")]
    access_mode: Option<AccessMode>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct AccessMode {
    #[prost(int32, tag = "1")]
    mode: i32,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Empty {}

#[derive(Clone, PartialEq, prost::Message)]
struct Unpublish {
    #[prost(string, tag = "1")]
    volume_id: String,
    #[prost(string, tag = "2")]
    target_path: String,
}

const SINGLE_NODE_WRITER: i32 = 1;

async fn call<M: prost::Message + 'static>(channel: &Channel, method: &'static str, message: M) {
    let mut client = Grpc::new(channel.clone());
    client.ready().await.unwrap();
    let codec = tonic_prost::ProstCodec::<M, Empty>::default();
    client.unary(tonic::Request::new(message), PathAndQuery::from_static(method), codec).await.unwrap();
}

/// The process that serves a mount: the one that listens at its socket.
async fn server_of(published: &Path, volume: &str) -> Pid {
    for entry in std::fs::read_dir(published).unwrap() {
        let path = entry.unwrap().path();
        let is_record = path.extension().is_some_and(|ending| ending == "json");
        if is_record && std::fs::read_to_string(&path).unwrap().contains(&format!("\"{volume}\"")) {
            let socket = tokio::net::UnixStream::connect(path.with_extension("metrics")).await.unwrap();
            return Pid::from_raw(socket.peer_cred().unwrap().pid().unwrap());
        }
    }
    panic!("{volume} has no record");
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_of_all_mounts_stand_together_and_a_stopped_server_delays_none() {
    if !nix::unistd::geteuid().is_root() {
        return millrace_testing::skip(millrace_testing::Need::Root, "the driver's mounts need root");
    }
    if !fuse_permitted() {
        return;
    }
    let home = Home::new();
    let (endpoint, kubelet) = (home.dir.path().join("csi.sock"), home.dir.path().join("kubelet"));
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let volumes = ["one", "two"];
    for volume in volumes {
        home.ok(["volume", "create", volume]);
    }
    std::fs::create_dir(&kubelet).unwrap();
    let endpoint_url = format!("unix://{}", endpoint.display());
    let driver = home.start([
        "csi",
        "--endpoint",
        &endpoint_url,
        "--node-id",
        "node",
        "--kubelet-dir",
        kubelet.to_str().unwrap(),
        "--metrics",
        &address,
    ]);
    until("the driver serves", || endpoint.exists());
    let channel = Endpoint::from_shared(endpoint_url).unwrap().connect().await.unwrap();
    let target_of =
        |volume: &str| kubelet.join(format!("pods/pod-{volume}/volumes/kubernetes.io~csi/pv-{volume}/mount"));
    for volume in volumes {
        let target = target_of(volume);
        std::fs::create_dir_all(target.parent().unwrap()).unwrap();
        let message = Publish {
            volume_id: volume.to_owned(),
            target_path: target.to_str().unwrap().to_owned(),
            volume_capability: Some(Capability {
                mount: Some(Empty {}),
                access_mode: Some(AccessMode { mode: SINGLE_NODE_WRITER }),
            }),
            // The server takes the key from a file, which goes with the record.
            secrets: HashMap::from([(format!("encryption_keys.{volume}"), "0a".repeat(32))]),
        };
        call(&channel, "/csi.v1.Node/NodePublishVolume", message).await;
        std::fs::write(target.join("file"), volume).unwrap();
    }

    // The text before may be half a second old.
    let shows = |text: &str, volume: &str| {
        text.lines().any(|line| {
            line.starts_with("millrace_mount_operations_total{")
                && line.contains(&format!("volume_handle=\"{volume}\""))
                && line.contains(&format!("persistentvolume=\"pv-{volume}\",pod_uid=\"pod-{volume}\""))
        })
    };
    let mut text = String::new();
    until("both mounts are shown", || {
        text = scrape(&address);
        volumes.iter().all(|volume| shows(&text, volume))
    });
    assert_eq!(text.matches("# TYPE millrace_mount_operations_total counter").count(), 1, "{text}");
    assert!(text.contains("millrace_csi_volumes{state=\"serving\"} 2\n"), "{text}");
    let calls = "millrace_csi_calls_total{code=\"Ok\",method=\"NodePublishVolume\"} 2\n";
    assert!(text.contains(calls), "{text}");

    let server = server_of(&home.path().join("csi/published"), "one").await;
    kill(server, Signal::SIGSTOP).unwrap();
    until("the stopped server is left out", || {
        let before = Instant::now();
        let text = scrape(&address);
        assert!(before.elapsed() < Duration::from_secs(30), "{:?}", before.elapsed());
        assert!(shows(&text, "two"), "{text}");
        !shows(&text, "one") && text.contains("millrace_csi_servers_left_out_total{reason=\"timeout\"}")
    });
    kill(server, Signal::SIGCONT).unwrap();
    until("both mounts are shown again", || shows(&scrape(&address), "one"));

    for volume in volumes {
        let target_path = target_of(volume).to_str().unwrap().to_owned();
        let message = Unpublish { volume_id: volume.to_owned(), target_path };
        call(&channel, "/csi.v1.Node/NodeUnpublishVolume", message).await;
    }
    until("no mount is left", || scrape(&address).contains("millrace_csi_volumes{state=\"serving\"} 0\n"));
    assert_eq!(std::fs::read_dir(home.path().join("csi/published")).unwrap().count(), 0);
    assert_eq!(driver.stop(), 0);
}

#[test]
fn driver_serves_while_its_predecessor_has_the_metrics_address_and_takes_it_afterwards() {
    let home = Home::new();
    let endpoint = home.dir.path().join("csi.sock");
    let endpoint_url = format!("unix://{}", endpoint.display());
    let predecessor = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = predecessor.local_addr().unwrap().to_string();
    let arguments =
        |address| ["csi", "--endpoint", &endpoint_url, "--services", "controller", "--metrics", address];
    let driver = home.start(arguments(address.as_str()));
    until("the driver serves", || std::os::unix::net::UnixStream::connect(&endpoint).is_ok());
    drop(predecessor);
    until("the address answers", || try_scrape(&address).is_some());
    assert_eq!(driver.stop(), 0);
    // An address that no process of this machine can have is an error at once.
    let (code, line) = home.fails(arguments("192.0.2.1:1"));
    assert_eq!(code, 4, "{line}");
    assert!(line.contains("192.0.2.1:1"), "{line}");
}
