use proptest::prelude::*;

use super::*;

fn order(rows: u64, lanes: u64, window: u64, per_lane: u64) -> Order {
    Order { seed: 7, rows, lanes, window, batch: lanes * per_lane }
}

/// Virtual row and epoch of the places of the first `steps` batches, in the order of `t`.
fn places(o: &Order, steps: u64) -> Vec<(u64, u64)> {
    let m = o.per_lane();
    (0..steps)
        .flat_map(|step| (0..m).flat_map(move |j| (0..o.lanes).map(move |lane| (step, lane * m + j))))
        .map(|(step, slot)| o.virtual_row(step, slot))
        .collect()
}

#[test]
fn an_epoch_is_a_contiguous_stretch_of_places() {
    let o = order(10, 4, 2, 3);
    let epochs: Vec<u64> = places(&o, 5).into_iter().map(|(epoch, _)| epoch).collect();
    let expected: Vec<u64> = (0..60).map(|t| t / 10).collect();
    assert_eq!(epochs, expected);
}

#[test]
fn windows_of_lanes_begin_one_after_the_other() {
    let o = order(4096, 8, 64, 1);
    let mut begins: Vec<u64> =
        (0..8).map(|lane| (1..).find(|&p| o.window_at(lane, p).index == 1).unwrap()).collect();
    begins.sort_unstable();
    assert!(begins.windows(2).all(|w| w[1] - w[0] == 8), "{begins:?}");
}

#[test]
fn slots_map_to_lanes_and_back() {
    let o = order(1000, 4, 50, 3);
    let whole: Vec<(u64, Range<u64>)> = o.lane_positions(2, 0..12).collect();
    assert_eq!(whole, vec![(0, 6..9), (1, 6..9), (2, 6..9), (3, 6..9)]);
    let part: Vec<(u64, Range<u64>)> = o.lane_positions(2, 2..7).collect();
    assert_eq!(part, vec![(0, 8..9), (1, 6..9), (2, 6..7)]);
    assert_eq!(o.lane_positions(2, 5..5).count(), 0);
}

#[test]
fn layout_finds_the_places_of_a_range() {
    let o = order(60, 1, 60, 1);
    let layout = EpochLayout::new(&o, 3, &[10, 20, 30]);
    for row in 0..60 {
        let place = layout.place_of(row);
        assert!(layout.starts[place] <= row && row < layout.starts[place + 1]);
        for rows in 1..=60 - row {
            assert_eq!(layout.places(row, rows), place..layout.place_of(row + rows - 1) + 1);
        }
    }
}

prop_compose! {
    fn orders()(
        rows in 1u64..400,
        lanes in 1u64..20,
        window in 1u64..100,
        per_lane in 1u64..6,
        seed: u64,
    ) -> Order {
        Order { seed, rows, lanes, window, batch: lanes * per_lane }
    }
}

proptest! {
    #[test]
    fn each_epoch_has_each_row_once(o in orders()) {
        let epochs = 3;
        let steps = (epochs * o.rows).div_ceil(o.batch);
        let mut seen = vec![0u32; (epochs * o.rows) as usize];
        for (epoch, row) in places(&o, steps) {
            prop_assert!(row < o.rows);
            if epoch < epochs {
                seen[(epoch * o.rows + row) as usize] += 1;
            }
        }
        prop_assert!(seen.iter().all(|&n| n == 1), "{seen:?}");
    }

    #[test]
    fn place_of_inverts_virtual_row(o in orders(), step in 0u64..1_000_000, slot: u64) {
        let slot = slot % o.batch;
        let (epoch, row) = o.virtual_row(step, slot);
        prop_assert_eq!(o.place_of(epoch, row), (step, slot));
    }

    #[test]
    fn lanes_of_an_epoch_differ_by_one_row_at_most(o in orders(), epoch in 0u64..1000) {
        let lengths: Vec<u64> =
            (0..o.lanes).map(|c| o.lane_start(epoch, c + 1) - o.lane_start(epoch, c)).collect();
        prop_assert_eq!(lengths.iter().sum::<u64>(), o.rows);
        prop_assert!(lengths.iter().max().unwrap() - lengths.iter().min().unwrap() <= 1);
        for (c, length) in lengths.iter().enumerate() {
            let c = c as u64;
            prop_assert_eq!(o.epoch_position(epoch + 1, c) - o.epoch_position(epoch, c), *length);
        }
    }

    #[test]
    fn very_large_steps_stay_in_bounds(o in orders(), back in 0u64..1000) {
        let last = PLACES_MAX / o.batch - 1;
        let (_, row) = o.virtual_row(last - back, o.batch - 1);
        prop_assert!(row < o.rows);
    }
}
