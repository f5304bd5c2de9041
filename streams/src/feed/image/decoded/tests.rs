//! Tests of single images: the values of a feed, and bounds.

use ::image::{ImageFormat, Luma, RgbImage};

use super::*;
use crate::feed::image::testing::{claiming, encode, pattern};

const PIXELS_MAX: u64 = 1 << 20;

fn decoded(bytes: &[u8], channels: Channels) -> DecodedImage {
    DecodedImage::decode(bytes, channels, PIXELS_MAX).unwrap()
}

#[test]
fn a_single_image_has_the_values_of_pillow() {
    let png = encode(pattern(), ImageFormat::Png);
    let whole = decoded(&png, Channels::Rgb);
    assert_eq!((whole.width(), whole.height(), whole.values()), (12, 10, pattern().as_raw().as_slice()));
    assert_eq!(whole.clone().scaled(10, 12).unwrap(), whole);
    // The first row of `resize((5, 4))`, and that of `convert("L")` before it.
    let scaled = whole.scaled(4, 5).unwrap();
    assert_eq!((scaled.width(), scaled.height(), scaled.values().len()), (5, 4, 60));
    let row = [21, 31, 5, 65, 47, 16, 113, 64, 28, 161, 80, 39, 205, 96, 50];
    assert!(scaled.values().iter().zip(row).all(|(found, right)| found.abs_diff(right) <= 1), "{scaled:?}");
    let grey = decoded(&png, Channels::Grey).scaled(4, 5).unwrap();
    let row = [25, 49, 74, 100, 123];
    assert!(grey.values().iter().zip(row).all(|(found, right)| found.abs_diff(right) <= 1), "{grey:?}");
    // 255 of red are 76 of luma, not the 54 of another standard.
    let red = encode(RgbImage::from_pixel(2, 2, ::image::Rgb([255, 0, 0])), ImageFormat::Png);
    assert_eq!(decoded(&red, Channels::Grey).values(), [76; 4]);
}

#[test]
fn a_single_image_is_bounded() {
    let refused = |bytes: &[u8]| DecodedImage::decode(bytes, Channels::Rgb, PIXELS_MAX).unwrap_err();
    assert_eq!(refused(b""), ImageError::Empty);
    assert_eq!(refused(b"GIF89a"), ImageError::Unknown);
    let too_large = ImageError::TooLarge { width: 2048, height: 2048, pixels_max: PIXELS_MAX };
    assert_eq!(refused(&claiming(2048, 2048)), too_large);
    assert!(matches!(refused(&claiming(1024, 1024)), ImageError::Damaged { .. }));
    let line = encode(::image::ImageBuffer::from_pixel(1 << 20, 1, Luma([9_u8])), ImageFormat::Png);
    let wide = decoded(&line, Channels::Grey).scaled(16_384, 16).unwrap_err();
    assert_eq!(wide, ImageError::TooLong { width: 1 << 20, height: 1, out_width: 16, out_height: 16_384 });
}
