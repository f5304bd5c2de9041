//! Tests of drift: a model's requests against its training statistics in the bundle, as metrics.

use millrace_bundle::{Bundle, Feature, Lineage, Moments, Statistics};
use millrace_serving::config::Drift;
use millrace_serving::tensor::Tensor;
use millrace_serving::wire::Form;
use millrace_serving::{Config, Error, Source, serve};
use object_store::local::LocalFileSystem;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

use crate::support::*;

/// Rows of the network's four inputs: from 0 to 1, from 0 to 10, a constant, and from 0 to 1 again.
fn rows(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut draw = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u32 << 24) as f32
    };
    (0..count).flat_map(|_| [draw(), draw() * 10.0, 3.0, draw()]).collect()
}

fn statistics(input: &str) -> Statistics {
    let training = rows(3_000, 1);
    let features = (0..FEATURES).map(|element| {
        let values = training.iter().skip(element).step_by(FEATURES).map(|value| f64::from(*value));
        let mut moments = Moments::default();
        values.clone().for_each(|value| moments.add(value));
        Feature::new(input, element, &moments, values.collect()).unwrap()
    });
    Statistics::new("pixels", 3_000, features.collect())
}

async fn publish_with(dir: &TempDir, name: &str, change: impl FnOnce(Bundle) -> Bundle) {
    let store = LocalFileSystem::new_with_prefix(dir.path()).unwrap();
    let bundle = Bundle::new(name, 1, mlp(), Lineage::default(), Default::default()).unwrap();
    change(bundle).write(&store, "").await.unwrap();
}

async fn metrics(server: &Server) -> String {
    let reply = http(server.serving.addresses().metrics, "GET", "/metrics", &[], b"").await;
    String::from_utf8(reply.body).unwrap()
}

/// A metric of a model, and of one feature if there are several.
fn figure(metrics: &str, name: &str, model: &str, feature: &str) -> Option<f64> {
    let (model, feature) = (format!("model=\"{model}\""), format!("feature=\"{feature}\""));
    let line = metrics.lines().find(|line| {
        let of_feature = name.ends_with("rows") || name.ends_with("total") || line.contains(&feature);
        line.starts_with(&format!("{name}{{")) && line.contains(&model) && of_feature
    });
    line.map(|line| line.rsplit(' ').next().unwrap().parse().unwrap())
}

async fn ask(server: &Server, model: &str, values: Vec<f32>) {
    let rows = (values.len() / FEATURES) as i64;
    let input = Tensor::fp32("input", vec![rows, FEATURES as i64], values).unwrap();
    server.client().await.infer(model, None, vec![input], Form::Raw).await.unwrap();
}

fn with_drift(drift: Drift) -> Config {
    Config { drift, ..config() }
}

const ALL: Drift = Drift { rows_per_second_max: u32::MAX, window_rows: 1_000 };

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drifting_inputs_show_in_the_metrics() {
    let dir = TempDir::new().unwrap();
    publish_with(&dir, "watched", |bundle| bundle.with_statistics(&statistics("input")).unwrap()).await;
    publish_with(&dir, "plain", |bundle| bundle).await;
    let server = Server::over(with_drift(ALL), dir).await;
    let of = |text: &str, name: &str, feature: &str| {
        figure(text, &format!("millrace_serving_drift_{name}"), "watched", feature)
    };
    let text = metrics(&server).await;
    assert_eq!((of(&text, "rows_total", ""), of(&text, "window_rows", "")), (Some(0.0), Some(0.0)));
    assert_eq!(of(&text, "psi", "input[0]"), None);

    ask(&server, "watched", rows(900, 2)).await;
    ask(&server, "plain", rows(900, 2)).await;
    let text = metrics(&server).await;
    assert_eq!((of(&text, "rows_total", ""), of(&text, "window_rows", "")), (Some(900.0), Some(900.0)));
    for feature in ["input[0]", "input[1]", "input[2]", "input[3]"] {
        assert!(of(&text, "psi", feature).unwrap() < 0.1, "{feature}: {text}");
        assert!(of(&text, "outside_ratio", feature).unwrap() < 0.02, "{feature}: {text}");
    }
    assert!(of(&text, "mean_shift", "input[1]").unwrap().abs() < 0.2, "{text}");
    // A constant has no standard deviation.
    assert_eq!(of(&text, "mean_shift", "input[2]"), None);
    let about_others = |line: &&str| line.contains("millrace_serving_drift_") && line.contains("\"plain\"");
    assert_eq!(text.lines().filter(about_others).count(), 0);

    // The second input moves, and the constant becomes NaN.
    let mut moved = rows(5_000, 3);
    moved.chunks_exact_mut(FEATURES).for_each(|row| (row[1], row[2]) = (row[1] + 6.0, f32::NAN));
    ask(&server, "watched", moved).await;
    let text = metrics(&server).await;
    assert!(of(&text, "psi", "input[1]").unwrap() > 0.25, "{text}");
    assert!(of(&text, "mean_shift", "input[1]").unwrap() > 1.0, "{text}");
    assert!(of(&text, "outside_ratio", "input[1]").unwrap() > 0.3, "{text}");
    assert!(of(&text, "outside_ratio", "input[2]").unwrap() > 0.5, "{text}");
    assert!(of(&text, "psi", "input[0]").unwrap() < 0.1, "{text}");
    assert_eq!(of(&text, "rows_total", ""), Some(5_900.0));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn model_with_unusable_statistics_is_served() {
    let dir = TempDir::new().unwrap();
    let file = |content: &'static str| {
        move |bundle: Bundle| bundle.with_file("statistics.json", content.into()).unwrap()
    };
    publish_with(&dir, "broken", file("{\"format_version\": 1")).await;
    publish_with(
        &dir,
        "newer",
        file("{\"format_version\": 2, \"column\": \"\", \"rows\": 1, \"features\": []}"),
    )
    .await;
    publish_with(&dir, "other", |bundle| bundle.with_statistics(&statistics("elsewhere")).unwrap()).await;
    let server = Server::over(with_drift(ALL), dir).await;
    for model in ["broken", "newer", "other"] {
        ask(&server, model, rows(200, 2)).await;
    }
    assert!(!metrics(&server).await.contains("millrace_serving_drift_"));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn zero_rows_per_second_switches_drift_off() {
    let dir = TempDir::new().unwrap();
    publish_with(&dir, "watched", |bundle| bundle.with_statistics(&statistics("input")).unwrap()).await;
    let server = Server::over(with_drift(Drift { rows_per_second_max: 0, ..ALL }), dir).await;
    ask(&server, "watched", rows(200, 2)).await;
    assert!(!metrics(&server).await.contains("millrace_serving_drift_"));
    server.stop().await;

    let dir = TempDir::new().unwrap();
    let config = with_drift(Drift { window_rows: 5, ..ALL });
    let refused = serve(&config, Source::directory(dir.path()).unwrap(), CancellationToken::new()).await;
    assert!(
        matches!(&refused, Err(Error::Config { reason }) if reason.contains("window_rows")),
        "{refused:?}"
    );
}
