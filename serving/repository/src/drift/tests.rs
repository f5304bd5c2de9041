//! Tests of the figures for equal and different distributions, and of the bounds on the work.
use std::time::Duration;

use millrace_bundle::{Moments, TensorSpec};
use proptest::prelude::*;

use super::*;

/// Pseudorandom numbers from 0 to 1, determined by the seed.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u32 << 24) as f32
        })
        .collect()
}

fn feature(input: &str, element: usize, values: impl Iterator<Item = f32> + Clone) -> Feature {
    let mut moments = Moments::default();
    values.clone().for_each(|value| moments.add(f64::from(value)));
    Feature::new(input, element, &moments, values.map(f64::from).collect()).unwrap()
}

fn drift_of(training: &[f32], values: &[f32]) -> FeatureDrift {
    let feature = feature("x", 0, training.iter().copied());
    let mut histogram = Histogram::new(&feature);
    values.iter().for_each(|value| histogram.add(&feature, f64::from(*value)));
    histogram.drift(&feature).unwrap()
}

/// Watches `x`, rows of two numbers; in the training the second one was ten times the first.
fn detector(options: Options) -> Option<Drift> {
    let training = numbers(5_000, 1);
    let features = vec![
        feature("x", 0, training.iter().copied()),
        feature("x", 1, training.iter().map(|value| value * 10.0)),
    ];
    let spec = TensorSpec { name: "x".into(), datatype: Datatype::Fp32, shape: vec![-1, 2] };
    let signature = Signature { inputs: vec![spec.clone()], outputs: vec![spec] };
    Drift::new(Statistics::new("c", 5_000, features), &signature, &options)
}

/// Rows as in the training, with the second number moved by `shift`.
fn rows(count: usize, seed: u64, shift: f32) -> Vec<Tensor> {
    let values = numbers(count, seed).iter().flat_map(|value| [*value, value * 10.0 + shift]).collect();
    vec![Tensor::fp32("x", vec![count as i64, 2], values).unwrap()]
}

const ALL: Options = Options { rows_per_second_max: u32::MAX, window_rows: 1_000 };

#[test]
fn equal_values_show_no_drift_and_different_values_do() {
    let training = numbers(4_000, 1);
    let same = drift_of(&training, &numbers(2_000, 2));
    assert!(same.psi < 0.05 && same.mean_shift.unwrap().abs() < 0.1 && same.outside < 0.01, "{same:?}");
    let moved: Vec<f32> = numbers(2_000, 2).iter().map(|value| value + 0.3).collect();
    let moved = drift_of(&training, &moved);
    assert!(moved.psi > 0.25, "{moved:?}");
    // The standard deviation of uniform numbers from 0 to 1 is the root of 1/12.
    assert!((moved.mean_shift.unwrap() - 0.3 * 12f64.sqrt()).abs() < 0.1, "{moved:?}");
    assert!((moved.outside - 0.3).abs() < 0.05, "{moved:?}");
    // Same mean and range, different distribution.
    let ends: Vec<f32> =
        numbers(2_000, 2).iter().map(|value| if *value < 0.5 { 0.01 } else { 0.99 }).collect();
    let ends = drift_of(&training, &ends);
    assert!(ends.psi > 1.0 && ends.mean_shift.unwrap().abs() < 0.2 && ends.outside == 0.0, "{ends:?}");
}

#[test]
fn constant_features_and_nan_are_reported() {
    let constant = [2.5; 50];
    let same = drift_of(&constant, &[2.5; 200]);
    assert!(same.psi.abs() < 1e-6, "{same:?}");
    assert_eq!((same.mean_shift, same.outside), (None, 0.0));
    let other = drift_of(&constant, &[2.4, 2.5, 2.6, 2.5]);
    assert!(other.psi > 0.25, "{other:?}");
    assert_eq!((other.mean_shift, other.outside), (None, 0.5));
    let one = drift_of(&[1.0], &[1.0]);
    assert_eq!((one.mean_shift, one.outside), (None, 0.0));
    let training = numbers(100, 1);
    let none = drift_of(&training, &[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::NAN]);
    assert!(none.psi > 0.25 && none.psi.is_finite(), "{none:?}");
    assert_eq!((none.mean_shift, none.outside), (None, 1.0));
    // Values that are not finite do not count in the mean.
    let some = drift_of(&training, &[0.5, f32::NAN, 0.5, f32::INFINITY]);
    assert!(some.mean_shift.unwrap().abs() < 0.5, "{some:?}");
    assert_eq!(some.outside, 0.5);
    let empty = feature("x", 0, training.iter().copied());
    assert_eq!(Histogram::new(&empty).drift(&empty), None);
}

proptest! {
    #[test]
    fn drift_of_any_values_is_finite(
        training in prop::collection::vec(-1e30f32..1e30, 1..50),
        values in prop::collection::vec(any::<f32>(), 1..200),
        fades in 0usize..80,
    ) {
        let feature = feature("x", 0, training.iter().copied());
        let mut histogram = Histogram::new(&feature);
        values.iter().for_each(|value| histogram.add(&feature, f64::from(*value)));
        let before = histogram.drift(&feature).unwrap();
        prop_assert!(before.psi >= 0.0 && before.psi.is_finite(), "{:?}", before);
        prop_assert!((0.0..=1.0).contains(&before.outside));
        prop_assert!(before.mean_shift.is_none_or(f64::is_finite));
        let inside = |value: &&f32| (feature.min..=feature.max).contains(&f64::from(**value));
        let outside = 1.0 - values.iter().filter(inside).count() as f64 / values.len() as f64;
        prop_assert!((before.outside - outside).abs() < 1e-9);
        // Equal weights for all values change no share.
        (0..fades).for_each(|_| histogram.fade());
        let after = histogram.drift(&feature).unwrap();
        prop_assert!((after.psi - before.psi).abs() <= 1e-9 * (1.0 + before.psi));
        prop_assert!((after.outside - before.outside).abs() < 1e-9);
    }

    #[test]
    fn rows_per_second_are_limited(
        requests in prop::collection::vec((0u64..4_000, 1usize..300), 1..60),
        limit in 1u32..200,
    ) {
        let drift = detector(Options { rows_per_second_max: limit, ..ALL }).unwrap();
        let mut at: Vec<(u64, usize)> = requests;
        at.sort_unstable();
        let mut by_second = std::collections::BTreeMap::<u64, (usize, usize)>::new();
        for (millis, rows) in at {
            let granted = drift.grant(rows, drift.began + Duration::from_millis(millis));
            let (asked, taken) = by_second.entry(millis / 1000).or_default();
            (*asked, *taken) = (*asked + rows, *taken + granted);
        }
        for (asked, taken) in by_second.into_values() {
            prop_assert_eq!(taken, asked.min(limit as usize));
        }
    }
}

#[test]
fn old_rows_leave_the_window_and_few_rows_give_no_figures() {
    let drift = detector(ALL).unwrap();
    let now = Instant::now();
    drift.observe(&rows(99, 5, 0.0), now);
    let few = drift.figures();
    assert_eq!((few.rows, few.window_rows, few.features.len()), (99, 99, 0));
    drift.observe(&rows(900, 6, 0.0), now);
    let figures = drift.figures();
    let names: Vec<&str> = figures.features.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!((figures.rows, names), (999, vec!["x[0]", "x[1]"]));
    assert!(figures.features.iter().all(|(_, drift)| drift.psi < 0.1), "{figures:?}");
    // One number of the rows moves; only its feature shows drift.
    drift.observe(&rows(10_000, 7, 5.0), now);
    let moved = drift.figures();
    assert!((1_000..2_000).contains(&moved.window_rows), "{moved:?}");
    assert!(moved.features[0].1.psi < 0.1 && moved.features[1].1.psi > 0.25, "{moved:?}");
    // After it moves back, some windows later nothing shows.
    drift.observe(&rows(12_000, 8, 0.0), now);
    let back = drift.figures();
    assert!(back.features.iter().all(|(_, drift)| drift.psi < 0.1 && drift.outside < 0.01), "{back:?}");
    assert_eq!(back.rows, 22_999);
}

#[test]
fn rows_of_a_large_request_are_taken_from_all_of_it() {
    let drift = detector(Options { rows_per_second_max: 200, ..ALL }).unwrap();
    // Sorted: the first rows alone would all be below the training's mean.
    let sorted: Vec<f32> = (0..10_000).flat_map(|i| [i as f32 / 10_000.0, i as f32 / 1_000.0]).collect();
    drift.observe(&[Tensor::fp32("x", vec![10_000, 2], sorted).unwrap()], Instant::now());
    let figures = drift.figures();
    assert_eq!(figures.rows, 200);
    assert!(figures.features.iter().all(|(_, drift)| drift.mean_shift.unwrap().abs() < 0.1), "{figures:?}");
}

#[test]
fn drift_is_not_observed_if_switched_off_or_without_its_input() {
    assert!(detector(Options { rows_per_second_max: 0, ..ALL }).is_none());
    let statistics = || Statistics::new("c", 1, vec![feature("x", 0, [1.0f32].into_iter())]);
    let signature = |name: &str, datatype| {
        let spec = TensorSpec { name: name.into(), datatype, shape: vec![-1, 1] };
        Signature { inputs: vec![spec.clone()], outputs: vec![spec] }
    };
    assert!(Drift::new(statistics(), &signature("x", Datatype::Fp32), &ALL).is_some());
    assert!(Drift::new(statistics(), &signature("y", Datatype::Fp32), &ALL).is_none());
    assert!(Drift::new(statistics(), &signature("x", Datatype::Int64), &ALL).is_none());
    // Rows narrower than in the training.
    let drift = detector(ALL).unwrap();
    drift.observe(&[Tensor::fp32("x", vec![200, 1], numbers(200, 3)).unwrap()], Instant::now());
    let figures = drift.figures();
    assert_eq!(figures.features.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["x[0]"]);
    drift.observe::<Tensor>(&[], Instant::now());
    assert_eq!(drift.figures().rows, 200);
    for (window_rows, fits) in [(0, false), (99, false), (100, true), (1 << 40, true), (u64::MAX, false)] {
        assert_eq!(Options { window_rows, ..ALL }.check().is_ok(), fits, "{window_rows}");
    }
}
