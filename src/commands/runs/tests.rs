//! Tests of the names of runs, of their figures, and of losses in different units.

use serde_json::json;

use super::*;

fn run(job: &str, id: &str, settings: Value) -> Run {
    let evaluations = [(1, 0.5), (2, 0.25), (3, 0.75)].map(
        |(epoch, loss)| json!({ "epoch": epoch, "step": epoch, "rows": 8, "loss": loss, "accuracy": 0.5 }),
    );
    Run {
        job: job.to_owned(),
        run: id.to_owned(),
        begun: 0,
        finished: true,
        step: 3,
        checkpoints: vec![3],
        epochs: Vec::new(),
        evaluations: serde_json::from_value(evaluations.into()).unwrap(),
        throughput: Vec::new(),
        versions: Vec::new(),
        settings,
        script: None,
    }
}

#[test]
fn each_run_has_a_name_and_none_hides_another() {
    let same = "ab".repeat(32);
    let runs = [
        run("first", &same, json!({})),
        run("second", &same, json!({})),
        run("second", &"cd".repeat(32), json!({})),
        run("abc", &"ef".repeat(32), json!({})),
        run("abab", &"12".repeat(32), json!({})),
    ];
    let volume = "v".parse().unwrap();
    let at = |name: &str| {
        let found = find(&runs, name, &volume).map_err(|error| error.to_string())?;
        Ok::<_, String>(runs.iter().position(|run| std::ptr::eq(run, found)).unwrap())
    };
    for (name, expected) in
        [("first", 0), ("second", 2), ("first/ab", 0), ("second/abab", 1), ("cd", 2), ("abc", 3), ("12", 4)]
    {
        assert_eq!(at(name), Ok(expected), "{name}");
    }
    // The full id is that of two runs, which the error names.
    let error = at(&same).unwrap_err();
    assert!(error.contains(&format!("first/{same}")) && error.contains(&format!("second/{same}")), "{error}");
    // A job has the name of other runs' first digits.
    let error = at("abab").unwrap_err();
    let names = ["first/abababababab", "second/abababababab", "abab/121212121212"];
    assert!(names.iter().all(|name| error.contains(name)), "{error}");
    for name in ["", "/", "third", "third/ab", "first/cd", "first/", "/ab"] {
        assert!(at(name).unwrap_err().contains("has no run or job"), "{name}");
    }
}

#[test]
fn evaluations_and_the_best_epoch_are_shown() {
    let run = run("j", &"ab".repeat(32), json!({ "loss": "cross_entropy" }));
    assert_eq!(summary(&run)[8..10], ["0.750000", "2"]);
    let text = shown(&run);
    assert!(
        text.contains("2, validation loss 0.250000") && text.contains("validation after epoch"),
        "{text}"
    );
    let rows = compare(&[&run, &run], &BTreeMap::new());
    let row = |name: &str| rows.iter().find(|row| row[0] == name).unwrap()[1].clone();
    assert_eq!((row("validation loss"), row("best validation loss")), ("0.750000".into(), "0.250000".into()));
    // Names from files are text.
    let hostile = super::tests::run("j", "ab", json!({ "model": "m\u{1b}[31m\nline.onnx" }));
    assert!(!shown(&hostile).contains('\x1b') && shown(&hostile).contains("\\u{1b}"));
}

#[test]
fn losses_compare_if_their_units_are_equal() {
    let with = |settings: Value| run("j", "ab", settings);
    let units = |a: Value, b: Value| different_units(&[&with(a), &with(b)]);
    assert!(units(json!({}), json!({ "loss": "cross_entropy" })).is_empty());
    assert!(units(json!({ "loss": "mse" }), json!({ "loss": { "kind": "mse" }, "dataset": "v" })).is_empty());
    assert_eq!(units(json!({ "loss": "mse" }), json!({ "loss": "l1" })), ["loss"]);
    let smoothed = json!({ "loss": { "kind": "cross_entropy", "label_smoothing": 0.1 } });
    assert_eq!(units(json!({}), smoothed), ["loss"]);
    let scaled = |data: &str| json!({ "loss": "mse", "standardize_labels": true, "dataset": data });
    assert_eq!(units(json!({ "loss": "mse" }), scaled("v")), ["standardize_labels"]);
    assert_eq!(units(scaled("v"), scaled("w")), ["dataset"]);
    assert!(units(scaled("v"), scaled("v")).is_empty());
}
