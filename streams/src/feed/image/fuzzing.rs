//! A JPEG file decoded as the feed does it, for the fuzz target.

use ::image::DynamicImage;

use super::decode::jpeg_bytes;
use super::jpeg::Jpeg;

/// Memory that the feed counts for the largest image that is decoded.
const BYTES_MAX: u64 = 8 << 20;

/// Decodes a file twice, and gives the bytes of its pixels. Panics where the results differ: pixels are no memory that was
/// there before.
pub(crate) fn jpeg(bytes: &[u8]) -> Option<usize> {
    let first = decode(bytes);
    assert!(first == decode(bytes), "a file has one result");
    first.map(|image| image.as_bytes().len())
}

fn decode(bytes: &[u8]) -> Option<DynamicImage> {
    let jpeg = Jpeg::new(bytes).ok()??;
    let (width, height) = jpeg.size();
    if jpeg_bytes(width, height) > BYTES_MAX {
        return None;
    }
    let image = jpeg.decode().ok()?;
    assert_eq!((image.width(), image.height()), (width, height), "an image has the size of its header");
    Some(image)
}
