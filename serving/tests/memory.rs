//! Tests of a server's memory use: for several sessions of a model, after loading and unloading, and after a
//! peak of load. Each test starts a child process to measure: this program again, with the name of an ignored
//! test.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr)]

#[path = "serving/support.rs"]
#[allow(dead_code, reason = "the tests of the protocol use the rest")]
mod support;

use std::process::Command;
use std::time::{Duration, Instant};

use millrace_bundle::onnx::*;
use millrace_serving::client::Client;
use millrace_serving::tensor::Tensor;
use millrace_serving::wire::{Form, inference as pb};
use millrace_serving::{Config, Control};
use prost::Message;
use support::*;
// The same allocator as in the program.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
use tikv_jemalloc_sys as _;

/// Prefix of the line in which a child process reports values to its parent.
const MARK: &str = "measured: ";
/// Allocator settings of the child processes: free memory returns to the system within one second instead of
/// ten.
const ALLOCATOR: (&str, &str) = ("MALLOC_CONF", "dirty_decay_ms:1000");
/// Longest wait for memory to return; a passing test waits only as long as necessary.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time before the memory in use is measured.
const SHORTLY: Duration = Duration::from_secs(4);
/// Number of layers of the network, in sequence.
const LAYERS: usize = 4;
/// Extent of a layer for this many MiB of weights in total.
fn extent(mib: usize) -> usize {
    ((mib << 20) / 4 / LAYERS).isqrt()
}

/// A network of layers of the same extent: `input` FP32 [batch, extent] to `output`.
fn network(extent: usize) -> Vec<u8> {
    let mut model = ModelProto::decode(slow(1).as_slice()).unwrap();
    let graph = model.graph.as_mut().unwrap();
    graph.node.clear();
    graph.initializer.clear();
    let mut last = "input".to_owned();
    for layer in 0..LAYERS {
        let weight = (0..extent * extent).map(|index| ((index * 31 + layer) % 1009) as f32 / 1e5 - 0.005);
        graph.initializer.push(TensorProto {
            name: Some(format!("w{layer}")),
            dims: vec![extent as i64; 2],
            data_type: Some(tensor_proto::DataType::Float as i32),
            raw_data: Some(weight.flat_map(f32::to_le_bytes).collect()),
            ..Default::default()
        });
        let output = if layer + 1 == LAYERS { "output".to_owned() } else { format!("h{layer}") };
        graph.node.push(NodeProto {
            op_type: Some("MatMul".into()),
            input: vec![last, format!("w{layer}")],
            output: vec![output.clone()],
            ..Default::default()
        });
        last = output;
    }
    for side in graph.input.iter_mut().chain(&mut graph.output) {
        use tensor_shape_proto::dimension::Value;
        let Some(type_proto::Value::TensorType(tensor)) =
            side.r#type.as_mut().and_then(|it| it.value.as_mut())
        else {
            panic!("a tensor");
        };
        tensor.shape.as_mut().unwrap().dim[1].value = Some(Value::DimValue(extent as i64));
    }
    model.encode_to_vec()
}

fn status_mib(names: &[&str]) -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let kib = |name: &&str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().next().unwrap().parse::<f64>().unwrap()
    };
    names.iter().map(kib).sum::<f64>() / 1024.0
}

/// Resident memory.
fn resident_mib() -> f64 {
    status_mib(&["VmRSS:"])
}

/// Memory without file pages: how many pages of the program and its libraries are resident depends on the
/// system's readahead.
fn own_mib() -> f64 {
    status_mib(&["RssAnon:", "RssShmem:"])
}

/// Waits until the process uses at most `mib`, but no longer than `patience`. Returns the least that it used.
async fn settled(in_use: fn() -> f64, mib: f64, patience: Duration) -> f64 {
    let start = Instant::now();
    let mut least = f64::MAX;
    loop {
        least = least.min(in_use());
        if least <= mib || start.elapsed() > patience {
            return least;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Runs an ignored test of this program in a child process. Returns its measurements.
fn measured(test: &str, variables: &[(&str, usize)]) -> Vec<f64> {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env(ALLOCATOR.0, ALLOCATOR.1)
        .envs(variables.iter().map(|(name, value)| (*name, value.to_string())))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let line = text.lines().find_map(|line| line.split_once(MARK)).unwrap_or_else(|| panic!("{text}"));
    line.1.split_whitespace().map(|value| value.parse().unwrap()).collect()
}

fn variable(name: &str) -> usize {
    std::env::var(name).unwrap().parse().unwrap()
}

fn tell(values: &[f64]) {
    let values: Vec<String> = values.iter().map(|value| format!("{value:.1}")).collect();
    println!("\n{MARK}{}", values.join(" "));
}

async fn infer(client: &mut Client, extent: usize, rows: usize) -> Vec<f32> {
    let values = (0..rows * extent).map(|index| (index % 61) as f32 / 61.0).collect();
    let input = Tensor::fp32("input", vec![rows as i64, extent as i64], values).unwrap();
    let prediction = client.infer("network", None, vec![input], Form::Raw).await.unwrap();
    let millrace_serving::tensor::Data::Fp32(values) = prediction.outputs[0].data.clone() else {
        panic!("{:?}", prediction.outputs)
    };
    values
}

/// One concurrent request on each session.
async fn infer_on_all(server: &Server, sessions: usize, extent: usize, rows: usize) -> Vec<Vec<f32>> {
    let mut requests = tokio::task::JoinSet::new();
    for _ in 0..sessions {
        let mut client = server.client().await;
        requests.spawn(async move { infer(&mut client, extent, rows).await });
    }
    requests.join_all().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the child process that a test starts by itself"]
async fn child_has_sessions() {
    let (sessions, mib) = (variable("SESSIONS"), variable("MIB"));
    let server = Server::start(Config { sessions_max: sessions, ..config() }, &[]).await;
    let before = resident_mib();
    publish(server.dir.path(), "network", 1, network(extent(mib))).await;
    server.serving.repository().refresh().await.unwrap();
    for _ in 0..3 {
        infer_on_all(&server, sessions, extent(mib), 2).await;
    }
    // The memory left over from loading returns soon; otherwise it counts here. Sessions that share weights
    // keep them besides the copies that their kernels packed.
    let copies = if sessions == 1 { 1.1 } else { 2.1 };
    let after = settled(resident_mib, before + mib as f64 * copies + 16.0, PATIENCE).await;
    tell(&[before, after]);
    server.stop().await;
}

fn sessions_share(mib: usize) {
    let taken = |sessions| {
        let values = measured("child_has_sessions", &[("SESSIONS", sessions), ("MIB", mib)]);
        println!("{mib} MiB, {sessions} sessions: {values:?}");
        (values[1], values[1] - values[0])
    };
    let ((one, alone), (eight, together)) = (taken(1), taken(8));
    assert!(alone > mib as f64 * 0.9, "{alone} MiB for weights of {mib}");
    assert!(eight <= one * 2.3, "one session {one} MiB, eight {eight}");
    // Without the base memory of the process; each session has some buffers of its own.
    assert!(together <= alone * 2.3 + 24.0, "one session adds {alone} MiB, eight add {together}");
}

#[test]
fn eight_sessions_take_about_twice_the_memory_of_one() {
    sessions_share(48);
}

#[test]
#[ignore = "the same with the size that counts; takes a minute: cargo test --workspace --test memory -- --ignored --exact eight_sessions_of_100_mb_take_about_twice_the_memory_of_one"]
fn eight_sessions_of_100_mb_take_about_twice_the_memory_of_one() {
    sessions_share(100);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the child process that a test starts by itself"]
async fn child_loads_and_unloads() {
    let (cycles, mib, percent) = (variable("CYCLES"), variable("MIB"), variable("PERCENT"));
    let control = Config { control: Control::Explicit, sessions_max: 2, ..config() };
    let server = Server::start(control, &[("network", 1, network(extent(mib)))]).await;
    let mut calls = server.triton().await;
    let mut client = server.client().await;
    let name = || "network".to_owned();
    let mut first = 0.0;
    for cycle in 0..cycles {
        let load = pb::RepositoryModelLoadRequest { model_name: name(), ..Default::default() };
        calls.repository_model_load(load).await.unwrap();
        infer(&mut client, extent(mib), 2).await;
        let unload = pb::RepositoryModelUnloadRequest { model_name: name(), ..Default::default() };
        calls.repository_model_unload(unload).await.unwrap();
        if cycle == 2 {
            first = settled(own_mib, 0.0, SHORTLY).await;
        }
    }
    let last = settled(own_mib, first * (1.0 + percent as f64 / 100.0), PATIENCE).await;
    tell(&[first, last]);
    server.stop().await;
}

/// Checks that memory after these cycles is at most `percent` more than after the first three.
fn loading_leaves_little(cycles: usize, mib: usize, percent: usize) {
    let variables = [("CYCLES", cycles), ("MIB", mib), ("PERCENT", percent)];
    let values = measured("child_loads_and_unloads", &variables);
    println!("{cycles} times {mib} MiB: {values:?}");
    let most = values[0] * (1.0 + percent as f64 / 100.0);
    assert!(values[1] <= most, "{values:?} MiB after the first cycles and after the last");
}

/// The remains of cycles do not accumulate: a leak of the weights in each cycle would leave 170 MiB besides
/// the 14 MiB in use.
#[test]
fn repeated_loading_and_unloading_does_not_leak() {
    loading_leaves_little(10, 24, 20);
}

#[test]
#[ignore = "100 times with the size and the bound that count; takes minutes: cargo test --workspace --test memory -- --ignored --exact loading_and_unloading_100_mb_100_times_does_not_leak"]
fn loading_and_unloading_100_mb_100_times_does_not_leak() {
    loading_leaves_little(100, 100, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the child process that a test starts by itself"]
async fn child_has_a_peak() {
    let (sessions, rows, mib) = (4, variable("ROWS"), 16);
    let server =
        Server::start(Config { sessions_max: sessions, ..config() }, &[("network", 1, network(extent(mib)))])
            .await;
    for _ in 0..3 {
        infer_on_all(&server, sessions, extent(mib), 1).await;
    }
    let before = settled(own_mib, 0.0, SHORTLY).await;
    let mut peak = before;
    {
        let requests = infer_on_all(&server, 2 * sessions, extent(mib), rows);
        tokio::pin!(requests);
        while tokio::time::timeout(Duration::from_millis(20), &mut requests).await.is_err() {
            peak = peak.max(own_mib());
        }
    }
    let after = settled(own_mib, before * WITHIN, PATIENCE).await;
    tell(&[before, peak, after]);
    server.stop().await;
}

/// Limit of memory after a peak, relative to that before.
const WITHIN: f64 = 1.2;

#[test]
fn after_a_peak_memory_is_within_a_fifth_of_before() {
    let values = measured("child_has_a_peak", &[("ROWS", 2_000)]);
    println!("before, at and after the peak: {values:?}");
    let [before, peak, after] = values[..] else { panic!("{values:?}") };
    assert!(peak > before * 3.0, "{values:?}: this was no peak");
    assert!(after <= before * WITHIN, "{values:?} MiB");
}
