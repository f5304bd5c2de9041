//! Encoded images of the tests.

use std::io::Cursor;

use ::image::{DynamicImage, ImageFormat, RgbImage};

/// An RGB image whose pixels follow from their place: Pillow's results for it are known.
pub(super) fn pattern() -> RgbImage {
    RgbImage::from_fn(12, 10, |x, y| {
        ::image::Rgb([(x * 20 + y * 3) % 256, (x * 7 + y * 25) % 256, (x * y * 5) % 256].map(|v| v as u8))
    })
}

pub(super) fn encode(image: impl Into<DynamicImage>, format: ImageFormat) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    image.into().write_to(&mut bytes, format).unwrap();
    bytes.into_inner()
}

/// The JPEG file with an EXIF segment that has an orientation, 1 to 8.
pub(super) fn oriented(jpeg: &[u8], orientation: u8) -> Vec<u8> {
    let mut exif = b"Exif\0\0MM\0\x2a\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0".to_vec();
    exif.extend([orientation, 0, 0, 0, 0, 0, 0]);
    let length = (exif.len() as u16 + 2).to_be_bytes();
    [&jpeg[..2], &[0xff, 0xe1], &length, &exif, &jpeg[2..]].concat()
}

/// A PNG file that claims a size, with nothing behind its header.
pub(super) fn claiming(width: u32, height: u32) -> Vec<u8> {
    let mut png = encode(RgbImage::new(1, 1), ImageFormat::Png);
    png[16..20].copy_from_slice(&width.to_be_bytes());
    png[20..24].copy_from_slice(&height.to_be_bytes());
    let checksum = crc(&png[12..29]).to_be_bytes();
    png[29..33].copy_from_slice(&checksum);
    png
}

/// CRC-32 as PNG has it.
fn crc(bytes: &[u8]) -> u32 {
    let step = |crc: u32| if crc & 1 == 1 { 0xedb8_8320 ^ (crc >> 1) } else { crc >> 1 };
    !bytes.iter().fold(!0u32, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc)))
}
