//! Tests of a mixture's identity and epochs. `tests/feed/mixture.rs` reads rows.

use arrow::datatypes::{DataType, Field, Schema};

use super::*;
use crate::dataset::{DataFile, Dataset, FileFormat, RowGroup};
use crate::feed::batch::batches_ahead;

fn source(name: &str, rows: u64, weight: &str) -> MixtureSource {
    let file = DataFile {
        path: format!("{name}.parquet"),
        bytes: rows,
        format: FileFormat::Parquet,
        row_groups: vec![RowGroup { rows, bytes: rows * 8 }],
        cuts: Vec::new(),
    };
    let schema = Arc::new(Schema::new(vec![Field::new("x", DataType::Int64, false)]));
    let dataset = Dataset::new(format!("/{name}"), schema, Vec::new(), vec![file]).unwrap();
    let plan = Plan::new(dataset, &PlanOptions { batch_rows: 64, ..PlanOptions::default() }).unwrap();
    MixtureSource { name: name.into(), plan: Arc::new(plan), weight: weight.parse().unwrap() }
}

fn mixture(sources: &[(&str, u64, &str)], batch_rows: usize, until: Until) -> Mixture {
    let sources = sources.iter().map(|(name, rows, weight)| source(name, *rows, weight)).collect();
    Mixture::new(sources, batch_rows, until).unwrap()
}

#[test]
fn epochs_end_with_the_first_or_with_every_source() {
    for (sources, first, every) in [
        // 70 rows of `a` are in 100 places; the last source comes first, so 300 rows of `b` are in 997.
        ([("a", 70, "0.7"), ("b", 300, "0.3")], 100, 997),
        ([("a", 70, "7"), ("b", 3, "3")], 7, 100),
        ([("a", 1, "1"), ("b", 1, "1")], 1, 2),
    ] {
        let until = |until| mixture(&sources, 8, until).rows();
        assert_eq!((until(Until::First), until(Until::Every)), (first, every), "{sources:?}");
        let mixed = mixture(&sources, 8, Until::First);
        let (before, after) = (mixed.counts(first - 1), mixed.counts(first));
        let is_over = |counts: &[u64]| counts.iter().zip(&sources).any(|(count, source)| *count >= source.1);
        assert!(is_over(&after) && !is_over(&before), "{before:?} {after:?}");
    }
    assert_eq!(mixture(&[("a", 9, "3")], 4, Until::Every).rows(), 9);
}

#[test]
fn the_identity_has_sources_weights_and_batch_but_no_epoch() {
    let base = [("a", 70, "0.7"), ("b", 300, "0.3")];
    let first = mixture(&base, 8, Until::First);
    assert_eq!(first.id(), mixture(&base, 8, Until::Every).id());
    assert_eq!(first.id(), mixture(&[("a", 70, "70"), ("b", 300, "30.0")], 8, Until::First).id());
    let other_batch = mixture(&base, 16, Until::First);
    assert_eq!(first.order_id(), other_batch.order_id());
    assert_ne!(first.id(), other_batch.id());
    for others in [
        [("a", 70, "0.6"), ("b", 300, "0.3")],
        [("a", 71, "0.7"), ("b", 300, "0.3")],
        [("b", 300, "0.3"), ("a", 70, "0.7")],
    ] {
        let other = mixture(&others, 8, Until::First);
        assert!(other.id() != first.id() && other.order_id() != first.order_id(), "{others:?}");
    }
    // Frozen: a cursor of an older program must find its rows.
    assert_eq!(
        first.order_id().to_string(),
        "3d58db357870ce5264e06e1a5d374463661e408bc5b54485f59e5cff47fb439a"
    );
}

#[test]
fn bounds_are_named() {
    for (text, word) in [("0", "weight"), ("-1", "weight"), ("1e3", "weight"), ("0.0000000001", "9 digits")] {
        assert!(text.parse::<Weight>().unwrap_err().to_string().contains(word), "{text}");
    }
    assert!("both".parse::<Until>().unwrap_err().to_string().contains("until"));
    let refused = |sources: Vec<MixtureSource>, batch_rows| {
        Mixture::new(sources, batch_rows, Until::First).unwrap_err().to_string()
    };
    assert!(refused(Vec::new(), 8).contains("0 sources"));
    assert!(refused((0..65).map(|i| source(&format!("s{i}"), 1, "1")).collect(), 8).contains("65 sources"));
    assert!(refused(vec![source("a", 1, "1")], 0).contains("batch_rows"));
    let endless = vec![source("a", 1000, "0.000000001"), source("b", 1, "1000000000")];
    let refused = Mixture::new(endless, 8, Until::Every).unwrap_err().to_string();
    assert!(refused.contains("weight"), "{refused}");
}

#[test]
fn a_source_has_its_working_set_of_the_cache_and_its_weight_of_the_rest() {
    let mixed = mixture(&[("a", 70, "0.75"), ("b", 300, "0.25")], 8, Until::First);
    let needs = mixed.sources().iter().map(|source| source.plan.working_set_bytes()).collect::<Vec<_>>();
    assert!(0 < needs[0] && needs[0] < needs[1], "{needs:?}");
    assert_eq!(mixed.cache_parts(mixed.working_set_bytes() + 1_000), [needs[0] + 750, needs[1] + 250]);
}

#[test]
fn sequences_ahead_of_a_reader_stay_within_the_bound_of_tensors() {
    assert_eq!(batches_ahead(0, 4), 4);
    assert_eq!(batches_ahead(128 << 20, 4), 4);
    assert_eq!(batches_ahead((128 << 20) + 1, 4), 3);
    assert_eq!(batches_ahead(512 << 20, 1024), 1);
    assert_eq!(batches_ahead(u64::MAX, 1024), 1);
}
