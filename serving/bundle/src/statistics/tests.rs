//! Tests of features from arbitrary values, and of invalid files.
use serde_json::{Value, json};

use super::*;

fn feature(values: &[f64]) -> Feature {
    let mut moments = Moments::default();
    values.iter().for_each(|value| moments.add(*value));
    Feature::new("x", 3, &moments, values.to_vec()).unwrap()
}

/// Pseudorandom numbers, determined by the seed.
fn numbers(count: usize, seed: u64) -> Vec<f64> {
    let mut state = seed;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as f64 / f64::from(1u32 << 31)
        })
        .collect()
}

#[test]
fn each_value_is_in_the_part_that_counts_it() {
    for seed in 0..200 {
        let count = 1 + (seed as usize * 7) % 300;
        // Few distinct values in every second one, so that edges coincide.
        let coarse = if seed % 2 == 0 { 1e9 } else { 5.0 };
        let values: Vec<f64> = numbers(count, seed).iter().map(|v| (v * coarse).floor() - 2.0).collect();
        let feature = feature(&values);
        feature.check().unwrap();
        assert!(feature.shares.len() <= PARTS);
        let mut counted = vec![0.0; feature.bins()];
        values.iter().for_each(|value| counted[feature.bin(*value)] += 1.0 / count as f64);
        for (bin, share) in counted.iter().enumerate() {
            assert!((share - feature.share(bin)).abs() < 1e-9, "{bin}: {counted:?} {feature:?}");
        }
        assert_eq!((counted[0], counted[feature.bins() - 1]), (0.0, 0.0));
        let mean = values.iter().sum::<f64>() / count as f64;
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / count as f64;
        let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * (1.0 + a.abs().max(b.abs()));
        assert!(close(feature.mean, mean) && close(feature.variance, variance), "{feature:?}");
        let statistics = Statistics::new("c", count as u64, vec![feature]);
        assert_eq!(Statistics::read(&statistics.written()).unwrap(), statistics);
    }
}

#[test]
fn many_values_fill_parts_of_equal_size() {
    let feature = feature(&numbers(16_000, 5));
    assert_eq!(feature.shares.len(), PARTS);
    assert!(feature.shares.iter().all(|share| (share - 1.0 / 16.0).abs() < 1e-3), "{:?}", feature.shares);
}

#[test]
fn constant_feature_has_one_bin_and_all_other_values_are_outside() {
    for values in [vec![2.5], vec![2.5; 100]] {
        let feature = feature(&values);
        assert_eq!((feature.edges.len(), feature.shares.clone(), feature.variance), (0, vec![1.0], 0.0));
        let bins: Vec<usize> = [2.5, 2.4, f64::NEG_INFINITY, 2.6, f64::INFINITY, f64::NAN]
            .map(|value| feature.bin(value))
            .to_vec();
        assert_eq!(bins, [1, 0, 0, 2, 2, 2]);
    }
    // Zero is one value, whatever its sign.
    let zeros = feature(&[0.0, -0.0, 0.0, -0.0]);
    zeros.check().unwrap();
    assert_eq!((zeros.shares.len(), zeros.bin(0.0), zeros.bin(-0.0)), (1, 1, 1));
    assert_eq!(Feature::new("x", 0, &Moments::default(), vec![]), None);
}

#[test]
fn invalid_statistics_files_are_refused_with_a_reason() {
    let good = serde_json::to_value(Statistics::new("c", 4, vec![feature(&[1.0, 2.0, 3.0, 4.0])])).unwrap();
    let read = |value: &Value| Statistics::read(value.to_string().as_bytes());
    read(&good).unwrap();
    let refused = |change: &dyn Fn(&mut Value), says: &str| {
        let mut value = good.clone();
        change(&mut value);
        let reason = read(&value).unwrap_err();
        assert!(reason.contains(says), "{reason}");
    };
    let of =
        |key: &'static str, value: Value| move |file: &mut Value| file["features"][0][key] = value.clone();
    refused(&|file| file["format_version"] = json!(2), "format_version 2");
    refused(&|file| file["features"] = json!([]), "0 features");
    refused(&|file| file["features"] = vec![file["features"][0].clone(); 65].into(), "65 features");
    refused(&|file| file["features"] = vec![file["features"][0].clone(); 2].into(), "twice");
    refused(&of("input", json!("")), "0 bytes");
    refused(&of("input", json!("x".repeat(2000))), "2000 bytes");
    refused(&of("mean", json!(null)), "null");
    refused(&of("min", json!(9.0)), "range");
    refused(&of("variance", json!(-1.0)), "variance");
    refused(&of("shares", json!([])), "0 shares");
    refused(&of("edges", json!([3.0, 2.0, 1.0])), "ascend");
    refused(&of("edges", json!([1.0, 2.0, 4.0])), "ascend");
    refused(&of("edges", json!([0.5, 2.0, 3.0])), "ascend");
    refused(&of("shares", json!([0.5, 0.5, 0.5, 0.5])), "do not sum to 1");
    refused(&of("shares", json!([1.5, -0.5, 0.0, 0.0])), "do not sum to 1");
    refused(&of("element", json!(-1)), "usize");
    assert!(Statistics::read(b"{").is_err());
    assert!(Statistics::read(&vec![b' '; (1 << 20) + 1]).unwrap_err().contains("the limit"));
    // Keys that a later program adds are ignored.
    let mut more = good.clone();
    more["features"][0]["skew"] = json!(1);
    read(&more).unwrap();
}
