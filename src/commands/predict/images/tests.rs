//! Tests of image files: valid, truncated, and with false sizes.

use std::io::Cursor;

use image::{DynamicImage, GrayImage, ImageFormat, Rgb, RgbImage};

use super::*;

fn encoded(image: impl Into<DynamicImage>, format: ImageFormat) -> Vec<u8> {
    let mut content = Cursor::new(Vec::new());
    image.into().write_to(&mut content, format).unwrap();
    content.into_inner()
}

/// An image that compresses badly, so that a part of the file is a part of the image.
fn noise() -> RgbImage {
    let mut state = 1_u32;
    RgbImage::from_fn(32, 24, |_, _| {
        Rgb([0; 3].map(|_: u8| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        }))
    })
}

fn rgb(content: &[u8]) -> Result<DecodedImage, (Exit, String)> {
    decode(content, Channels::Rgb)
}

fn refused(content: &[u8]) -> String {
    rgb(content).map(drop).unwrap_err().1
}

/// A PNG file whose header claims another size.
fn resized(mut png: Vec<u8>, width: u32, height: u32) -> Vec<u8> {
    png[16..20].copy_from_slice(&width.to_be_bytes());
    png[20..24].copy_from_slice(&height.to_be_bytes());
    let crc =
        png[12..29].iter().fold(u32::MAX, |crc, byte| {
            (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
                if crc & 1 == 1 { (crc >> 1) ^ 0xEDB8_8320 } else { crc >> 1 }
            })
        });
    png[29..33].copy_from_slice(&(!crc).to_be_bytes());
    png
}

#[test]
fn image_formats_are_detected_from_content() {
    for format in [ImageFormat::Png, ImageFormat::Jpeg, ImageFormat::WebP] {
        let image = rgb(&encoded(noise(), format)).unwrap();
        assert_eq!((image.width(), image.height()), (32, 24), "{format:?}");
    }
    assert_eq!(rgb(&encoded(noise(), ImageFormat::Png)).unwrap().values(), noise().as_raw());
    let same = resized(encoded(noise(), ImageFormat::Png), 32, 24);
    assert_eq!(same, encoded(noise(), ImageFormat::Png), "the check sum is that of the format");
    for other in [&b""[..], b"no image", b"GIF89a\x01\0\x01\0", b"\xff\xd8", b"\x89PNG"] {
        let reason = refused(other);
        assert!(
            reason.contains("neither JPEG, PNG nor WebP") || reason.contains("cannot be decoded"),
            "{reason}"
        );
    }
}

#[test]
fn files_that_are_cut_are_refused() {
    let png = encoded(noise(), ImageFormat::Png);
    for length in (0..png.len()).step_by(7) {
        // The last bytes only mark the end of the file.
        assert!(rgb(&png[..length]).is_err() || length > png.len() - 32, "{length} of {}", png.len());
    }
    let jpeg = encoded(noise(), ImageFormat::Jpeg);
    for length in 0..jpeg.len() {
        assert!(rgb(&jpeg[..length]).is_err(), "{length} of {}", jpeg.len());
    }
    assert!(refused(&jpeg[..jpeg.len() / 2]).contains("the file ends before the end of the image"));
}

#[test]
fn image_sizes_in_headers_are_bounded() {
    let png = encoded(GrayImage::new(1, 1), ImageFormat::Png);
    let jpeg = encoded(noise(), ImageFormat::Jpeg);
    let frame = jpeg.windows(2).position(|pair| pair == [0xff, 0xc0]).unwrap();
    for side in [16_000_u16, 65_500] {
        let mut bomb = jpeg.clone();
        bomb[frame + 5..frame + 7].copy_from_slice(&side.to_be_bytes());
        bomb[frame + 7..frame + 9].copy_from_slice(&side.to_be_bytes());
        assert!(refused(&bomb).contains("scale it down first"), "{}", refused(&bomb));
    }
    for (width, height) in [(1 << 14, 1 << 13), (1 << 13, 1 << 15), (4_000, 0x7fff_ffff)] {
        let reason = refused(&resized(png.clone(), width, height));
        assert!(reason.contains("scale it down first"), "{reason}");
    }
    // Within the bounds, only the image data is missing.
    assert!(refused(&resized(png.clone(), 8_000, 8_000)).contains("cannot be decoded"));
    assert!(refused(&resized(png, 0, 0)).contains("cannot be decoded"));
}

#[test]
fn images_are_rotated_by_exif_orientation() {
    let jpeg = encoded(noise(), ImageFormat::Jpeg);
    // Exif with one entry: orientation 6, rotate clockwise.
    let exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0";
    let length = u16::try_from(exif.len() + 2).unwrap().to_be_bytes();
    let turned = [&jpeg[..2], &[0xff, 0xe1], &length, exif, &jpeg[2..]].concat();
    let image = rgb(&turned).unwrap();
    assert_eq!((image.width(), image.height()), (24, 32));
}
