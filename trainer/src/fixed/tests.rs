//! Property tests of exact sums: independent of order and grouping, no silent loss of range.

use super::*;
use proptest::prelude::*;

fn scale() -> Scale {
    Scale::new(40, 12).unwrap()
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
    for contributions in [1, 12, CONTRIBUTIONS_MAX] {
        let scale = Scale::new(40, contributions).unwrap();
        // The largest f32 that suits the scale, searched from below.
        let mut largest = 1.0f32;
        let mut step = 1.0f32;
        while step > 0.0 && largest + step > largest {
            if scale.suits(largest + step) {
                largest += step;
                step *= 2.0;
            } else {
                step /= 2.0;
            }
        }
        let mut sum = vec![0i64; 2];
        for _ in 0..contributions {
            assert_eq!(scale.add(&[largest, -largest], &mut sum), Ok(largest));
        }
        let mut mean = [0f32; 2];
        scale.mean_into(&sum, u64::from(contributions), &mut mean).unwrap();
        assert_eq!(mean, [largest, -largest]);
    }
}

#[test]
fn a_scale_is_found_for_every_magnitude_that_a_float_has() {
    let scale = Scale::new(FRACTION_BITS_DEFAULT, CONTRIBUTIONS_MAX).unwrap();
    for largest in [0.016, 1.0, 31.0] {
        assert!(scale.suits(largest), "{largest}");
    }
    for largest in [f32::MAX, 1e30, 1e6, 1e-3, 1e-20, f32::MIN_POSITIVE, f32::from_bits(1)] {
        assert!(!scale.suits(largest), "{largest}");
        let made = scale.for_largest(largest);
        assert!(made.suits(largest) && made == Scale::new(made.fraction_bits(), CONTRIBUTIONS_MAX).unwrap());
        let mut sum = vec![0i64; 3];
        for _ in 0..CONTRIBUTIONS_MAX {
            assert_eq!(made.add(&[largest, -largest, largest / 2.0], &mut sum), Ok(largest));
        }
        let mut mean = [0f32; 3];
        made.mean_into(&sum, u64::from(CONTRIBUTIONS_MAX), &mut mean).unwrap();
        assert_eq!(mean, [largest, -largest, largest / 2.0]);
    }
    assert!(scale.suits(0.0) && scale.for_largest(0.0).suits(0.0));
}

#[test]
fn values_that_are_not_finite_are_named() {
    for value in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut values = vec![1.0; 3000];
        values[2500] = value;
        let error = scale().encode(&values).unwrap_err();
        assert!(matches!(error, FixedError::NonFinite { index: 2500, .. }), "{error}");
        assert_eq!(error.index(), Some(2500));
    }
}

#[test]
fn unusable_scales_and_lengths_are_refused() {
    assert!(Scale::new(-101, 1).is_err());
    assert!(Scale::new(201, 1).is_err());
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

#[test]
fn large_values_are_whole_numbers_in_two_parts() {
    let mut values: Vec<f64> =
        (0..63).flat_map(|bits| [1.0, 1.5, 1.999_999_9].map(|x| x * 2f64.powi(bits))).collect();
    values.extend([0.0, 0.5, 1.5, 2.5, 1e-30, 524_288.5, 1_048_575.5, 2_251_799_813_685_247.5, 4.6e18]);
    for value in values.into_iter().flat_map(|value| [value, -value]) {
        // Numbers that reach the sum have the 24 bits of a float.
        let value = if value.abs() > NEAR { f64::from(value as f32) } else { value };
        assert_eq!(round_far(value), value.round_ties_even() as i64, "{value}");
    }
}

#[test]
fn elements_far_below_the_largest_are_counted_as_lost() {
    // A column of nanoseconds beside ordinary ones.
    let values = [1.7e18, 1.0, -3.0, 0.0, 1.7e9];
    let scale = scale().for_largest(1.7e18);
    assert_eq!(scale.encode(&values).unwrap()[1..4], [0, 0, 0]);
    assert_eq!(scale.underflow(&values), Underflow { elements: 4, lost: 2 });
    let unit = 2f32.powi(-40);
    let scale = Scale::new(40, 12).unwrap();
    let found = scale.underflow(&[unit, 0.5 * unit, 0.51 * unit, -0.5 * unit, f32::from_bits(1), -0.0]);
    assert_eq!(found, Underflow { elements: 5, lost: 3 });
    // Twelve orders of magnitude are summed.
    let values = [1e12, 1.0, -1.0];
    let scale = scale.for_largest(1e12);
    assert_eq!(scale.underflow(&values).lost, 0);
    let mut back = [0f32; 3];
    scale.mean_into(&scale.encode(&values).unwrap(), 1, &mut back).unwrap();
    assert!((back[1] - 1.0).abs() < 2e-3 && back[2] == -back[1], "{back:?}");
}

/// Every path of the division gives the bits of the plain expression.
#[test]
fn means_have_the_bits_of_one_division() {
    let mut sums: Vec<i64> =
        (0..5000).map(|i: i64| (i - 2500).wrapping_mul(0x0012_3456_789a_bcd1) >> (i % 40)).collect();
    sums.extend([0, -1, 1, (1 << 51) - 1, -(1 << 51), 1 << 51, -(1 << 51) - 1, i64::MAX, i64::MIN]);
    // Blocks of small sums alone, too.
    sums.extend((0..5000).map(|i: i64| (i * 7919 - 20_000_000) << (i % 24)));
    for fraction_bits in [-100, 0, 40, 200] {
        for weight in [1.0, 128.0, 0.125, 301.0, 0.3, 1e-30, 1e30] {
            let scale = Scale::new(fraction_bits, 12).unwrap();
            let mut means = vec![0f32; sums.len()];
            scale.weighted_mean_into(&sums, weight, &mut means).unwrap();
            let divisor = 2f64.powi(fraction_bits) * weight;
            for (sum, mean) in sums.iter().zip(means) {
                assert_eq!(mean.to_bits(), ((*sum as f64 / divisor) as f32).to_bits(), "{sum} / {divisor}");
            }
        }
    }
}
