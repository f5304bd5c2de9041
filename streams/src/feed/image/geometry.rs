//! Crops and flips of an image: which of its pixels become the tensor. Pure.
//!
//! The rules are torchvision's: `Resize` of the shorter side, `CenterCrop`, `RandomCrop`, `RandomResizedCrop` and the
//! flips. Rounding is half to even, as in Python.

use super::key::Draws;
use super::{Crop, ImageOptions};

/// Attempts of a random resized crop, before the middle is taken.
const ATTEMPTS: u64 = 10;

/// Numbers of the draws. The n-th attempt of a random resized crop has two of its own behind these.
const DRAW_FLIP: u64 = 0;
const DRAW_FLIP_VERTICAL: u64 = 1;
const DRAW_X: u64 = 2;
const DRAW_Y: u64 = 3;
const DRAW_ATTEMPT: u64 = 4;

/// A rectangle of whole pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rect {
    pub(crate) x: u32,
    pub(crate) y: u32,
    pub(crate) width: u32,
    pub(crate) height: u32,
}

/// What happens to the pixels of one image, in this order.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Geometry {
    /// The pixels that are looked at.
    pub(crate) source: Rect,
    /// The size to which they are scaled, width and height.
    pub(crate) scaled: (u64, u64),
    /// The corner of the tensor inside of the scaled pixels.
    pub(crate) corner: (u64, u64),
    /// From left to right.
    pub(crate) flip: bool,
    /// From top to bottom.
    pub(crate) flip_vertical: bool,
}

impl Geometry {
    /// The geometry of an image of a width and a height, both positive.
    pub(crate) fn new(options: &ImageOptions, width: u32, height: u32, draws: Draws) -> Self {
        let [out_height, out_width] = options.size;
        let whole = Rect { x: 0, y: 0, width, height };
        let out = (u64::from(out_width), u64::from(out_height));
        let (source, scaled, corner) = match options.crop {
            Crop::Whole => (whole, out, (0, 0)),
            Crop::RandomResized => (resized_crop(options, width, height, draws), out, (0, 0)),
            Crop::Center | Crop::Random => {
                let scaled = match options.resize {
                    Some(side) => shorter_side(width, height, side),
                    None => cover(width, height, out),
                };
                let room = (scaled.0 - out.0, scaled.1 - out.1);
                let corner = match options.crop {
                    Crop::Random => (draws.below(DRAW_X, room.0 + 1), draws.below(DRAW_Y, room.1 + 1)),
                    _ => (half(room.0), half(room.1)),
                };
                (whole, scaled, corner)
            }
        };
        Self {
            source,
            scaled,
            corner,
            flip: draws.unit(DRAW_FLIP) < options.flip,
            flip_vertical: draws.unit(DRAW_FLIP_VERTICAL) < options.flip_vertical,
        }
    }
}

/// The size whose shorter side is `side`.
fn shorter_side(width: u32, height: u32, side: u32) -> (u64, u64) {
    let (w, h, side) = (u64::from(width), u64::from(height), u64::from(side));
    if w <= h { (side, side * h / w) } else { (side * w / h, side) }
}

/// The least size with the image's aspect ratio that covers `out`.
fn cover(width: u32, height: u32, out: (u64, u64)) -> (u64, u64) {
    let (w, h) = (u64::from(width), u64::from(height));
    if w * out.1 <= h * out.0 {
        (out.0, (out.0 * h / w).max(out.1))
    } else {
        ((out.1 * w / h).max(out.0), out.1)
    }
}

/// Half of a number, rounded half to even.
fn half(n: u64) -> u64 {
    n / 2 + u64::from(n % 4 == 3)
}

fn resized_crop(options: &ImageOptions, width: u32, height: u32, draws: Draws) -> Rect {
    let area = f64::from(width) * f64::from(height);
    let between = |[least, most]: [f64; 2], unit: f64| least + (most - least) * unit;
    for attempt in 0..ATTEMPTS {
        let draw = DRAW_ATTEMPT + 4 * attempt;
        let target = area * between(options.scale, draws.unit(draw));
        let ratio = between(options.ratio.map(f64::ln), draws.unit(draw + 1)).exp();
        let w = (target * ratio).sqrt().round_ties_even();
        let h = (target / ratio).sqrt().round_ties_even();
        if (1.0..=f64::from(width)).contains(&w) && (1.0..=f64::from(height)).contains(&h) {
            let (w, h) = (w as u32, h as u32);
            return Rect {
                x: draws.below(draw + 2, u64::from(width - w) + 1) as u32,
                y: draws.below(draw + 3, u64::from(height - h) + 1) as u32,
                width: w,
                height: h,
            };
        }
    }
    let found = f64::from(width) / f64::from(height);
    let [least, most] = options.ratio;
    let (w, h) = if found < least {
        (width, (f64::from(width) / least).round_ties_even().clamp(1.0, f64::from(height)) as u32)
    } else if found > most {
        ((f64::from(height) * most).round_ties_even().clamp(1.0, f64::from(width)) as u32, height)
    } else {
        (width, height)
    };
    Rect { x: (width - w) / 2, y: (height - h) / 2, width: w, height: h }
}

#[cfg(test)]
mod tests;
