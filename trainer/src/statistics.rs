//! Input statistics of a run's dataset, published with the model: servers compare live inputs with them.
//!
//! They come from a second read of the rows of the first epoch, in its order. They depend on the run alone,
//! not on its workers or on interruptions. An interruption of this read publishes nothing: the next start reads
//! again.

use std::ops::ControlFlow;

use millrace_bundle::{FEATURES_MAX, Feature, Moments, Statistics};
use millrace_streams::feed::AnyFeed;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use crate::data::Columns;
use crate::error::{Error, Result};
use crate::graph::Input;
use crate::order::Order;
use crate::source;

/// Most rows that are read. The order of an epoch is shuffled, so these rows represent all of it.
const ROWS_MAX: u64 = 1 << 20;
/// Rows sampled for the distribution of values.
const SAMPLE_ROWS: usize = 4096;
/// Seed of the sample.
const SEED: u64 = 7;

/// Collects statistics of what feeds the model's inputs; none of a dataset without rows.
/// Breaks off when `stop` fires. Blocks.
pub(crate) fn collect(
    feed: &AnyFeed,
    columns: &Columns,
    inputs: &[Input],
    runtime: &Handle,
    stop: &CancellationToken,
) -> Result<ControlFlow<(), Option<Statistics>>> {
    let (order, batch_rows) = (Order::of(feed), feed.batch_rows());
    let mut collector = Collector::new(columns.input_width());
    for step in 0..order.rows().div_ceil(batch_rows as u64) {
        if stop.is_cancelled() {
            return Ok(ControlFlow::Break(()));
        }
        let batch = runtime
            .block_on(feed.batch(step, 0..batch_rows))
            .map_err(|e| Error::feed(format!("read dataset {} for its statistics", columns.dataset), e))?;
        let rows = source::decode(&order, columns, &batch)?;
        // The last batch of an epoch may have rows of the next one.
        let places = order.places_of_step(step).of(batch.slots.clone());
        for (row, _) in rows.inputs().zip(places).filter(|(_, place)| *place < order.rows()) {
            collector.add(row);
        }
        // Rows come in the shuffled order of the training, so the first ones represent all.
        if collector.rows >= ROWS_MAX {
            break;
        }
    }
    let found = (collector.rows > 0).then(|| collector.finish(inputs, &columns.feature_names()));
    Ok(ControlFlow::Continue(found))
}

/// Accumulates rows one by one; memory does not grow with their number.
struct Collector {
    /// Indexes of the tracked elements of a row.
    elements: Vec<usize>,
    moments: Vec<Moments>,
    rows: u64,
    /// A uniform sample of the rows' tracked elements (Vitter's algorithm R).
    sample: Vec<f32>,
    random: ChaCha8Rng,
}

impl Collector {
    /// A collector for rows of `width` numbers. Of more than [`FEATURES_MAX`], it tracks that many, evenly
    /// spaced.
    fn new(width: usize) -> Collector {
        let count = width.min(FEATURES_MAX);
        let place = |feature: usize| (feature as u128 * width as u128 / count as u128) as usize;
        Collector {
            elements: (0..count).map(place).collect(),
            moments: vec![Moments::default(); count],
            rows: 0,
            sample: Vec::new(),
            random: ChaCha8Rng::seed_from_u64(SEED),
        }
    }

    /// Adds a row of finite numbers.
    fn add(&mut self, row: &[f32]) {
        let values = self.elements.iter().map(|element| row[*element]);
        for (moments, value) in self.moments.iter_mut().zip(values.clone()) {
            moments.add(f64::from(value));
        }
        if self.rows < SAMPLE_ROWS as u64 {
            self.sample.extend(values);
        } else {
            let place = self.random.next_u64() % (self.rows + 1);
            if place < SAMPLE_ROWS as u64 {
                let start = place as usize * self.elements.len();
                for (kept, value) in self.sample[start..].iter_mut().zip(values) {
                    *kept = value;
                }
            }
        }
        self.rows += 1;
    }

    fn finish(self, inputs: &[Input], column: &str) -> Statistics {
        let count = self.elements.len();
        let features = (0..count).filter_map(|feature| {
            let sample = self.sample.iter().skip(feature).step_by(count).map(|value| f64::from(*value));
            let element = self.elements[feature];
            let input = inputs.iter().find(|input| input.range.contains(&element))?;
            let element = element - input.range.start;
            Feature::new(&input.name, element, &self.moments[feature], sample.collect())
        });
        Statistics::new(column, self.rows, features.collect())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::probe::numbers;

    fn inputs(widths: &[(&str, usize)]) -> Vec<Input> {
        let mut end = 0;
        let input = |(name, width): &(&str, usize)| {
            let start = end;
            end += width;
            Input { name: (*name).to_owned(), value: 0, range: start..end, below: None, form: String::new() }
        };
        widths.iter().map(input).collect()
    }

    fn collected(rows: &[Vec<f32>]) -> Statistics {
        let mut collector = Collector::new(rows[0].len());
        rows.iter().for_each(|row| collector.add(row));
        collector.finish(&inputs(&[("x", rows[0].len())]), "pixels")
    }

    proptest! {
        #[test]
        fn feature_statistics_match_the_rows(width in 1usize..5, count in 1usize..200, seed in 0u64..1000) {
            let rows: Vec<Vec<f32>> = numbers(width * count, seed).chunks(width).map(<[f32]>::to_vec).collect();
            let statistics = collected(&rows);
            prop_assert_eq!(statistics.rows, count as u64);
            prop_assert_eq!(statistics.features.len(), width);
            for (place, feature) in statistics.features.iter().enumerate() {
                let values: Vec<f64> = rows.iter().map(|row| f64::from(row[place])).collect();
                prop_assert_eq!((feature.input.as_str(), feature.element), ("x", place));
                prop_assert_eq!(feature.min, values.iter().copied().fold(f64::MAX, f64::min));
                prop_assert_eq!(feature.max, values.iter().copied().fold(f64::MIN, f64::max));
                let mean = values.iter().sum::<f64>() / count as f64;
                prop_assert!((feature.mean - mean).abs() < 1e-9);
                let inside = values.iter().filter(|value| feature.bin(**value) == 1).count() as f64;
                prop_assert!((feature.share(1) - inside / count as f64).abs() < 1e-9);
            }
        }
    }

    #[test]
    fn many_rows_are_sampled() {
        let rows: Vec<Vec<f32>> = numbers(40_000, 3).chunks(2).map(<[f32]>::to_vec).collect();
        let statistics = collected(&rows);
        assert_eq!(collected(&rows), statistics);
        assert_eq!(statistics.rows, 20_000);
        for (place, feature) in statistics.features.iter().enumerate() {
            for bin in 1..feature.bins() - 1 {
                let inside = rows.iter().filter(|row| feature.bin(f64::from(row[place])) == bin).count();
                let share = inside as f64 / rows.len() as f64;
                assert!((share - feature.share(bin)).abs() < 0.02, "{share} {bin} {feature:?}");
            }
        }
    }

    #[test]
    fn wide_rows_are_sampled() {
        let statistics = collected(&[(0..1000).map(|value| value as f32).collect()]);
        assert_eq!(statistics.features.len(), FEATURES_MAX);
        let places: Vec<usize> = statistics.features.iter().map(|feature| feature.element).collect();
        assert!(places.is_sorted_by(|a, b| a < b) && places[0] == 0 && places[63] == 984, "{places:?}");
        assert!(statistics.features.iter().all(|feature| feature.mean == feature.element as f64));
        assert!(Collector::new(0).finish(&inputs(&[("x", 0)]), "pixels").features.is_empty());
    }

    #[test]
    fn elements_belong_to_the_inputs_of_a_row() {
        let mut collector = Collector::new(3);
        collector.add(&[1.0, 2.0, 3.0]);
        let statistics = collector.finish(&inputs(&[("a", 2), ("b", 1)]), "x, y");
        let found: Vec<_> = statistics.features.iter().map(|f| (f.name(), f.mean)).collect();
        assert_eq!(found, [("a[0]".into(), 1.0), ("a[1]".into(), 2.0), ("b[0]".into(), 3.0)]);
    }
}
