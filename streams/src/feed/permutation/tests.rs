use proptest::prelude::*;

use super::*;

#[test]
fn golden_vectors_freeze_the_mapping() {
    let image = |n: u64, key: u64| {
        let p = Permutation::new(n, key);
        (0..n.min(16)).map(|i| p.apply(i)).collect::<Vec<_>>()
    };
    let golden: Vec<(u64, u64, Vec<u64>)> = serde_json::from_str(include_str!("golden.json")).unwrap();
    assert!(golden.len() >= 6);
    for (n, key, expected) in golden {
        assert_eq!(image(n, key), expected, "n={n} key={key}");
    }
    assert_eq!(derive_key(&[]), GOLDEN_KEYS[0]);
    assert_eq!(derive_key(&[0]), GOLDEN_KEYS[1]);
    assert_eq!(derive_key(&[1, 2, 3]), GOLDEN_KEYS[2]);
}

const GOLDEN_KEYS: [u64; 3] =
    [16_294_208_416_658_607_535, 6_755_974_106_381_971_767, 7_725_364_555_548_041_738];

#[test]
fn every_small_domain_is_permuted_whole() {
    for n in 1..=300u64 {
        for key in [0, 1, u64::MAX] {
            let p = Permutation::new(n, key);
            let mut seen = vec![false; n as usize];
            for i in 0..n {
                let j = p.apply(i);
                assert!(!std::mem::replace(&mut seen[j as usize], true), "n={n} key={key} i={i}");
                assert_eq!(p.invert(j), i);
            }
        }
    }
}

#[test]
fn tiny_domains_reach_every_arrangement_about_equally() {
    // For n = 4: 24 arrangements, 24,000 keys, 1000 each expected. Chi-square with 23 degrees of freedom is
    // below 60 in all but one of 30,000 fair draws.
    for n in [3u64, 4, 5] {
        let arrangements: usize = (1..=n as usize).product();
        let mut counts = std::collections::BTreeMap::<Vec<u64>, u64>::new();
        let draws = 1000 * arrangements as u64;
        for key in 0..draws {
            let p = Permutation::new(n, derive_key(&[key]));
            *counts.entry((0..n).map(|i| p.apply(i)).collect()).or_default() += 1;
        }
        assert_eq!(counts.len(), arrangements, "n={n}");
        let chi: f64 = counts.values().map(|&c| (c as f64 - 1000.0).powi(2) / 1000.0).sum();
        let freedom = (arrangements - 1) as f64;
        assert!(chi < freedom + 7.0 * (2.0 * freedom).sqrt(), "n={n} chi-square {chi} of {freedom}");
    }
}

#[test]
fn images_are_spread_and_uncorrelated() {
    // Mean distance between images of neighbours is n/3 for a random order.
    let n = 10_000u64;
    for key in 0..8 {
        let p = Permutation::new(n, key);
        let sum: u64 = (1..n).map(|i| p.apply(i).abs_diff(p.apply(i - 1))).sum();
        let mean = sum as f64 / (n - 1) as f64;
        assert!((mean - n as f64 / 3.0).abs() < n as f64 * 0.02, "key {key}: {mean}");
    }
}

proptest! {
    #[test]
    fn inverse_undoes_the_image(n in 1u64..=(1 << 62), key: u64, i: u64) {
        let p = Permutation::new(n, key);
        let i = i % n;
        let j = p.apply(i);
        prop_assert!(j < n);
        prop_assert_eq!(p.invert(j), i);
    }
}
