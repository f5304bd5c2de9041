//! Property tests of crops against their definition, in floating point as torchvision computes it.

use proptest::prelude::*;

use super::{Geometry, Rect};
use crate::feed::image::key::Draws;
use crate::feed::image::{Crop, ImageOptions};

fn crop() -> impl Strategy<Value = Crop> {
    prop_oneof![Just(Crop::Whole), Just(Crop::Center), Just(Crop::Random), Just(Crop::RandomResized)]
}

proptest! {
    #[test]
    fn every_crop_lies_inside_of_its_image(
        crop in crop(),
        (width, height) in (1u32..70_000, 1u32..70_000),
        (out_height, out_width) in (1u32..400, 1u32..400),
        more in proptest::option::of(0u32..50),
        seed: u64,
    ) {
        let resize = more.filter(|_| matches!(crop, Crop::Center | Crop::Random));
        let options = ImageOptions {
            crop,
            resize: resize.map(|more| out_height.max(out_width) + more),
            ..ImageOptions::new(out_height, out_width)
        };
        options.check("image").unwrap();
        let found = Geometry::new(&options, width, height, Draws::new(seed, 1, 2));
        let Rect { x, y, width: w, height: h } = found.source;
        prop_assert!(w >= 1 && h >= 1 && x + w <= width && y + h <= height, "{found:?}");
        prop_assert!(found.corner.0 + u64::from(out_width) <= found.scaled.0, "{found:?}");
        prop_assert!(found.corner.1 + u64::from(out_height) <= found.scaled.1, "{found:?}");
        prop_assert!(!found.flip && !found.flip_vertical);
    }

    #[test]
    fn a_centre_crop_is_that_of_torchvision((width, height) in (1u32..3000, 1u32..3000), side in 1u32..300) {
        let options = ImageOptions { crop: Crop::Center, resize: Some(side + 7), ..ImageOptions::new(side, side) };
        let found = Geometry::new(&options, width, height, Draws::new(0, 0, 0));
        let (short, long) = (f64::from(width.min(height)), f64::from(width.max(height)));
        let long = (f64::from(side + 7) * long / short) as u64;
        let short = u64::from(side + 7);
        let scaled = if width <= height { (short, long) } else { (long, short) };
        prop_assert_eq!(found.scaled, scaled);
        let middle = |scaled: u64| ((scaled - u64::from(side)) as f64 / 2.0).round_ties_even() as u64;
        prop_assert_eq!(found.corner, (middle(scaled.0), middle(scaled.1)));
    }

    #[test]
    fn a_random_resized_crop_keeps_area_and_ratio((width, height) in (40u32..2000, 40u32..2000), seed: u64) {
        let options = ImageOptions { crop: Crop::RandomResized, ..ImageOptions::new(8, 8) };
        let found = Geometry::new(&options, width, height, Draws::new(seed, 0, 0)).source;
        let (w, h) = (f64::from(found.width), f64::from(found.height));
        // Sides are rounded to whole pixels.
        prop_assert!((w + 0.5) / (h - 0.5) >= 0.75 && (w - 0.5) / (h + 0.5) <= 4.0 / 3.0, "{found:?}");
        let part = |by: f64| (w + by) * (h + by) / (f64::from(width) * f64::from(height));
        // Ten attempts fail for long images only, where the middle may be smaller.
        let long = f64::from(width.max(height)) / f64::from(width.min(height)) > 2.0;
        prop_assert!(long || (part(0.5) >= 0.08 && part(-0.5) <= 1.0), "{found:?} of {width} x {height}");
    }
}

#[test]
fn the_whole_image_is_covered_by_random_crops() {
    let options = ImageOptions { crop: Crop::Random, flip: 0.5, ..ImageOptions::new(8, 8) };
    let mut corners = std::collections::BTreeMap::new();
    let mut flips = 0;
    for row in 0..3_000 {
        let found = Geometry::new(&options, 12, 8, Draws::new(1, 0, row));
        assert_eq!(found.scaled, (12, 8));
        *corners.entry(found.corner).or_insert(0u32) += 1;
        flips += u32::from(found.flip);
    }
    // Five places with 600 rows each, give or take five deviations of 22; half of the rows flipped, of 27.
    assert_eq!(corners.len(), 5);
    assert!(corners.values().all(|count| count.abs_diff(600) < 110), "{corners:?}");
    assert!(flips.abs_diff(1_500) < 140, "{flips}");
}

/// The numbers were computed by another program. A change would give running jobs other pixels.
#[test]
fn draws_are_frozen() {
    let draws = Draws::new(7, 1, 42);
    let unit = |number| (draws.unit(number) * (1u64 << 53) as f64) as u64;
    assert_eq!((unit(0), unit(1)), (3_748_627_795_470_496, 7_082_383_070_750_302));
    assert_eq!((draws.below(2, 1000), draws.below(3, 1000)), (442, 246));
    let options = ImageOptions { crop: Crop::RandomResized, ..ImageOptions::new(8, 8) };
    let crops = (0..64).map(|row| Geometry::new(&options, 640, 480, Draws::new(7, 2, row)).source);
    let different: std::collections::BTreeSet<(u32, u32)> = crops.map(|rect| (rect.x, rect.y)).collect();
    assert!(different.len() > 50, "{different:?}");
}
