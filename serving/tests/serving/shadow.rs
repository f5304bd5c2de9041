//! Tests of shadow traffic: copies of requests run on another version, and the outputs are compared.

use millrace_serving::ModelOptions;
use millrace_serving::config::ShadowTarget;
use tempfile::TempDir;

use crate::rollout::{answers, problems, split, versions, with_options};
use crate::support::*;
use crate::triton_layout::put;

/// The sum of a metric of the shadow version.
async fn figure(server: &Server, name: &str, labels: &[&str]) -> f64 {
    let reply = http(server.serving.addresses().metrics, "GET", "/metrics", &[], b"").await;
    let text = String::from_utf8(reply.body).unwrap();
    let lines =
        text.lines().filter(|line| line.starts_with(name) && labels.iter().all(|label| line.contains(label)));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shadow_runs_copies_and_compares_them() {
    // Versions 71 and 72 are equal; version 73 returns its rows in reverse order, under another output name.
    let dir = TempDir::new().unwrap();
    for version in [71, 72] {
        publish(dir.path(), "mlp", version, mlp()).await;
    }
    publish(dir.path(), "mlp", 73, reversed()).await;
    let shadow = |version: &str, share| Some(ShadowTarget { version: version.parse().unwrap(), share });
    let options = ModelOptions {
        labels: [("stable".to_owned(), 71)].into(),
        split: split(&[("stable", 1.0)]),
        shadow: shadow("72", 0.5),
        ..ModelOptions::default()
    };
    let server = Server::over(with_options(options), dir).await;
    let mut client = server.triton().await;
    let of_72 = ["model=\"mlp\"", "version=\"72\""];
    let outcomes = async |version: &str| {
        figure(&server, "millrace_serving_shadow_requests_total{", &[of_72[0], version]).await
    };
    for n in 0..40 {
        assert_eq!(answers(&mut client, "", "").await.unwrap(), "71");
        // Requests that name the shadow itself are not copied.
        assert_eq!(answers(&mut client, "72", "").await.unwrap(), "72");
        // Waits for the copies, so that none is dropped.
        let copies = (0..=n).filter(|n: &u64| n.wrapping_mul(0x9E37_79B9_7F4A_7C15) < 1 << 63).count();
        let all_ran = async {
            while outcomes(of_72[1]).await < copies as f64 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(60), all_ran).await.unwrap();
    }
    let compared = figure(&server, "millrace_serving_shadow_requests_total{", &[of_72[1], "compared"]).await;
    assert!((18.0..=22.0).contains(&compared), "{compared}");
    assert_eq!(outcomes(of_72[1]).await, compared);
    assert_eq!(figure(&server, "millrace_serving_shadow_difference_sum{", &of_72).await, 0.0);
    let rows = figure(&server, "millrace_serving_shadow_rows_total{", &[of_72[1], "same"]).await;
    assert_eq!(rows, compared);
    assert_eq!(figure(&server, "millrace_serving_shadow_rows_total{", &[of_72[1], "other"]).await, 0.0);

    // A shadow with other outputs affects no request, and a missing one is reported.
    put(server.dir.path(), "mlp/rollout.json", r#"{"shadow": {"version": "73", "share": 1}}"#);
    versions(&server).await;
    assert_eq!(answers(&mut client, "", "").await.unwrap(), "71");
    let unlike = async {
        while figure(&server, "millrace_serving_shadow_requests_total{", &["version=\"73\"", "unlike"]).await
            < 1.0
        {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(60), unlike).await.unwrap();
    put(server.dir.path(), "mlp/rollout.json", r#"{"shadow": {"version": "canary", "share": 1}}"#);
    versions(&server).await;
    assert!(problems(&server).contains("shadow: canary is not served"), "{}", problems(&server));
    assert_eq!(answers(&mut client, "", "").await.unwrap(), "71");
    server.stop().await;
}
