//! Tests of exact sums of gradients that come as factors: equal to those of gradients in memory.

use super::*;
use crate::engine::{Device, Engine, Labels, Loss, ShardBatch, ShardKey};
use crate::fixed;
use crate::probe::numbers;

const INPUTS: usize = 200;
const CLASSES: usize = 10;
/// Rows of each shard.
const SHARDS: [usize; 4] = [11, 1, 10, 0];

/// A perceptron whose first two matrices have several tiles each.
fn engine() -> Engine {
    let model = crate::init::mlp(INPUTS, &[300, 130], CLASSES, 5).unwrap();
    Engine::load(&model, Loss::CrossEntropy, Device::Cpu).unwrap()
}

fn shard(part: usize) -> ShardBatch {
    let rows = SHARDS[part];
    let labels = (0..rows).map(|row| ((row * 3 + part) % CLASSES) as i64).collect();
    ShardBatch { rows, inputs: numbers(rows * INPUTS, 7 + part as u64), labels: Labels::Class(labels) }
}

fn strict(engine: &Engine, in_factors: bool, frozen: &str) -> Strict {
    let layout = engine.layout();
    let trains = |range: &std::ops::Range<usize>| layout.name_of(range.start) != Some(frozen);
    let form = Buckets::single(engine.graph(), in_factors, trains);
    let mut strict = Strict::new(SHARDS.len(), form).unwrap();
    strict.begin();
    strict.clear(engine.layout().elements());
    strict
}

/// Adds the gradient of a part, and returns how many matrices came as factors.
fn add(engine: &Engine, strict: &mut Strict, part: usize) -> usize {
    let form = strict.form().unwrap();
    let found = engine.gradients_formed(&shard(part), ShardKey::default(), 1.0, &form).unwrap();
    let products = found.products.len();
    strict.add(part, found).unwrap();
    products
}

#[test]
fn sums_of_factors_are_those_of_whole_gradients() {
    let engine = engine();
    let sums = |in_factors: bool| {
        let mut strict = strict(&engine, in_factors, "");
        let products: Vec<usize> = (0..SHARDS.len()).map(|part| add(&engine, &mut strict, part)).collect();
        // The last matrix has 1,300 elements, too few; the last shard has no rows.
        assert_eq!(products, if in_factors { [2, 2, 2, 0] } else { [0; 4] });
        let largest = strict.finish().unwrap();
        let mut mean = Vec::new();
        strict.mean(1.0, &mut mean).unwrap();
        (mean, largest)
    };
    let ((factored, largest), (whole, expected)) = (sums(true), sums(false));
    let most = whole.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    for (index, (found, expected)) in factored.iter().zip(&whole).enumerate() {
        assert!((found - expected).abs() <= 1e-6 * most, "{index}: {found}, {expected}");
    }
    assert!(whole.iter().filter(|value| **value != 0.0).count() > whole.len() / 3);
    for ((part, found), (same, expected)) in largest.iter().zip(&expected) {
        assert_eq!(part, same);
        assert!((found - expected).abs() <= 1e-5 * expected, "part {part}: {found}, {expected}");
    }
    assert_eq!(largest[3], (3, 0.0));
}

#[test]
fn sums_of_factors_depend_on_no_grouping() {
    let engine = engine();
    let mut together = strict(&engine, true, "");
    for part in 0..SHARDS.len() {
        add(&engine, &mut together, part);
    }
    let largest = together.finish().unwrap();
    let mut apart = vec![0; engine.layout().elements()];
    for part in (0..SHARDS.len()).rev() {
        let mut alone = strict(&engine, true, "");
        add(&engine, &mut alone, part);
        assert_eq!(alone.finish().unwrap(), [largest[part]]);
        fixed::merge(&mut apart, &alone.sums).unwrap();
    }
    assert_eq!(together.sums, apart);
}

/// Factors that are larger than the gradient are added at once, with the same sums and magnitudes.
#[test]
fn long_factors_are_not_held() {
    let range = 0..8 * 600;
    let numbers = |seed: u64| (numbers(900 * 8, seed), numbers(900 * 600, seed + 1));
    let sums = |parameters: usize| {
        let engine = engine();
        let form = Buckets::single(engine.graph(), true, |_| false);
        let mut strict = Strict::new(3, form).unwrap();
        strict.begin();
        strict.clear(parameters);
        let mut most_held = 0;
        for part in 0..3 {
            let (left, right) = numbers(part as u64);
            let products = vec![Product::of(range.clone(), 900, left, right)];
            let found = ShardGradients { products, grad: Vec::new(), ..engine.gradients(&shard(3)).unwrap() };
            strict.add(part, found).unwrap();
            most_held = most_held.max(strict.products.len());
        }
        let largest = strict.finish().unwrap();
        (strict.sums[range.clone()].to_vec(), largest, most_held)
    };
    let ((at_once, largest, held), (together, expected, all)) = (sums(8 * 600), sums(10_000_000));
    assert_eq!((held, all), (0, 3));
    assert_eq!((at_once, largest), (together, expected));
}

/// Elements in memory and in factors, beside one that is 18 orders of magnitude larger.
#[test]
fn elements_that_count_as_zero_are_counted_in_some_steps_only() {
    let engine = engine();
    let found = |in_factors: bool, steps: u64| {
        let mut strict = strict(&engine, in_factors, "");
        for _ in 1..steps {
            strict.begin();
        }
        strict.tried = strict.tried.for_largest(1e18);
        strict.clear(engine.layout().elements());
        add(&engine, &mut strict, 0);
        strict.finish().unwrap();
        strict.underflow
    };
    for in_factors in [false, true] {
        let Underflow { elements, lost } = found(in_factors, 1).unwrap();
        assert!(
            lost == elements && elements as usize > engine.layout().elements() / 3,
            "{lost} of {elements}"
        );
        assert_eq!(found(in_factors, COUNTED_STEP), None);
        assert!(found(in_factors, COUNTED_STEP + 1).is_some());
    }
}

#[test]
fn frozen_matrices_have_no_gradient() {
    let engine = engine();
    let frozen = engine.layout().params.iter().find(|param| param.range.len() == INPUTS * 300).unwrap();
    let mut strict = strict(&engine, true, &frozen.name);
    assert_eq!(add(&engine, &mut strict, 0), 1);
    strict.finish().unwrap();
    assert!(strict.sums[frozen.range.clone()].iter().all(|sum| *sum == 0));
    assert!(strict.sums.iter().any(|sum| *sum != 0));
}

#[test]
fn element_of_a_product_that_is_not_finite_is_named() {
    // 400 rows of 300 elements: tiles of 109 rows.
    let (height, width, start) = (400, 300, 1000);
    let range = start..start + height * width;
    let mut left = vec![1.0; 2 * height];
    left[height + 350] = f32::INFINITY;
    let right = vec![1.0; 2 * width];
    let mut sums = vec![0; range.end];
    let product = Product::of(range, 2, left, right);
    let scale = scale(FRACTION_BITS_DEFAULT, 1).unwrap();
    let error = add_products(scale, &mut sums, &[(0, product)], false).unwrap_err();
    assert_eq!(error, FixedError::NonFinite { index: start + 350 * width, value: f32::INFINITY });
}

#[test]
fn rows_of_a_product_are_exact_for_whole_numbers() {
    let (height, width, rows) = (300, 257, 5);
    let whole = |count: usize, seed: u64| -> Vec<f32> {
        numbers(count, seed).into_iter().map(|value| (value * 8.0).round()).collect()
    };
    let (left, right) = (whole(rows * height, 1), whole(rows * width, 2));
    let mut sums = vec![0; height * width];
    let product = Product::of(0..height * width, rows, left.clone(), right.clone());
    let scale = Scale::new(0, 2).unwrap();
    let largest = add_products(scale, &mut sums, &[(0, product.clone()), (1, product)], false).unwrap();
    let element = |row: usize, column: usize| -> i64 {
        (0..rows).map(|at| (left[at * height + row] * right[at * width + column]) as i64).sum()
    };
    for row in 0..height {
        for column in 0..width {
            assert_eq!(sums[row * width + column], 2 * element(row, column), "{row}, {column}");
        }
    }
    let most = sums.iter().map(|sum| sum.abs() / 2).max().unwrap();
    assert_eq!(largest, [(most as f32, Underflow::default()); 2]);
}
