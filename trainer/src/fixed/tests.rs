//! Properties of exact sums: no order, no grouping, no silent loss of range.
#![allow(clippy::unwrap_used)]

use super::*;
use proptest::prelude::*;

fn scale() -> Scale {
    Scale::new(FRACTION_BITS_DEFAULT, 12).unwrap()
}

proptest! {
    #[test]
    fn any_order_and_grouping_gives_the_same_sum(
        shards in prop::collection::vec(prop::collection::vec(-1e4f32..1e4, 5), 1..12),
        order in prop::collection::vec(any::<prop::sample::Index>(), 12),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut forward = vec![0i64; 5];
        for shard in &shards {
            scale().add(shard, &mut forward).unwrap();
        }
        let mut shuffled = shards.clone();
        for (position, index) in order.iter().enumerate().take(shuffled.len()) {
            let other = index.index(shuffled.len());
            shuffled.swap(position, other);
        }
        let cut = cut.index(shuffled.len());
        let (left, right) = shuffled.split_at(cut);
        let mut first = vec![0i64; 5];
        let mut second = vec![0i64; 5];
        for shard in left {
            scale().add(shard, &mut first).unwrap();
        }
        for shard in right {
            scale().add(shard, &mut second).unwrap();
        }
        merge(&mut second, &first).unwrap();
        prop_assert_eq!(&forward, &second);
        let mut mean = vec![0f32; 5];
        scale().mean_into(&forward, 96, &mut mean).unwrap();
        for (column, value) in mean.iter().enumerate() {
            let exact: f64 = shards.iter().map(|s| f64::from(s[column])).sum::<f64>() / 96.0;
            prop_assert!((f64::from(*value) - exact).abs() <= exact.abs() * 6e-8 + 12.0 / 96.0 * 4.6e-13);
        }
    }

    #[test]
    fn wide_sums_have_no_order(values in prop::collection::vec(-1e9f64..1e9, 1..40)) {
        let sum = |values: &[f64]| values.iter().fold(Wide::default(), |acc, v| acc.merge(Wide::encode(*v).unwrap()));
        let mut reversed = values.clone();
        reversed.reverse();
        prop_assert_eq!(sum(&values), sum(&reversed));
        let exact: f64 = values.iter().sum();
        prop_assert!((sum(&values).decode() - exact).abs() <= 1e-4);
    }

    #[test]
    fn one_value_survives_within_half_a_unit(value in -6e5f32..6e5) {
        let coded = scale().encode(&[value]).unwrap();
        let mut back = [0f32];
        scale().mean_into(&coded, 1, &mut back).unwrap();
        prop_assert!((f64::from(back[0]) - f64::from(value)).abs() <= f64::from(value).abs() * 6e-8 + 4.6e-13);
    }
}

#[test]
fn small_gradients_keep_four_digits() {
    let coded = scale().encode(&[1e-8, -1e-8, 3e-13, 5e-13]).unwrap();
    assert_eq!(coded, vec![10995, -10995, 0, 1]);
}

#[test]
fn the_extremes_of_the_range_sum_without_overflow() {
    let scale = Scale::new(40, 12).unwrap();
    let largest = f32::from_bits((scale.limit() as f32).to_bits() - 1);
    let mut sum = vec![0i64; 2];
    for _ in 0..12 {
        scale.add(&[largest, -largest], &mut sum).unwrap();
    }
    let mut mean = [0f32; 2];
    scale.mean_into(&sum, 12, &mut mean).unwrap();
    assert_eq!(mean, [largest, -largest]);
}

#[test]
fn values_out_of_range_and_not_finite_are_named() {
    let scale = scale();
    let error = scale.encode(&[1.0, 1e6, 2.0]).unwrap_err();
    assert_eq!(error.index(), Some(1));
    assert!(matches!(error, FixedError::OutOfRange { .. }), "{error}");
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let error = scale.encode(&[1.0, 2.0, value]).unwrap_err();
        assert!(matches!(error, FixedError::NonFinite { index: 2, .. }), "{error}");
    }
    assert!(matches!(Wide::encode(f64::NAN), Err(FixedError::Loss { .. })));
    assert!(matches!(Wide::encode(1e13), Err(FixedError::Loss { .. })));
}

#[test]
fn unusable_scales_and_lengths_are_refused() {
    assert!(Scale::new(0, 1).is_err());
    assert!(Scale::new(53, 1).is_err());
    assert!(Scale::new(40, 0).is_err());
    assert!(Scale::new(40, CONTRIBUTIONS_MAX + 1).is_err());
    assert!(scale().add(&[1.0], &mut [0, 0]).is_err());
    assert!(merge(&mut [0], &[1, 2]).is_err());
    assert!(scale().mean_into(&[1], 1, &mut [0.0, 0.0]).is_err());
}

#[test]
fn rounding_does_not_depend_on_the_neighbours() {
    let scale = Scale::new(40, 12).unwrap();
    let unit = 2f32.powi(-40);
    let small = [unit, 1.5 * unit, 2.5 * unit, -1.5 * unit, 0.5 * unit, 1.0, -4000.125];
    let alone = scale.encode(&small).unwrap();
    assert_eq!(alone[..5], [1, 2, 2, -2, 0]);
    let mut mixed = small.to_vec();
    mixed.extend([6e5, -6e5, 3000.0]);
    let mixed = scale.encode(&mixed).unwrap();
    assert_eq!(mixed[..7], alone);
    assert_eq!(mixed[7..], [600_000 << 40, -600_000 << 40, 3000 << 40]);
}
