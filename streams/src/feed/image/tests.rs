//! Tests of decoding and rendering against Pillow's results, of kinds of images, and of hostile ones.

use ::image::{DynamicImage, GrayImage, ImageBuffer, ImageFormat, Luma, Rgb, RgbImage, Rgba, RgbaImage};
use fast_image_resize::Resizer;

use super::decode::{Pixels, decode};
use super::error::ImageError;
use super::geometry::Geometry;
use super::key::Draws;
use super::render::Renderer;
use super::testing::{claiming, encode, oriented, pattern};
use super::{Channels, Crop, Filter, ImageOptions, Layout, Values};

/// An 8 x 8 CMYK JPEG of Pillow, all red.
const CMYK: &str = "/9j/7gAOQWRvYmUAZAAAAAAA/9sAQwACAQEBAQECAQEBAgICAgIEAwICAgIFBAQDBAYFBgYGBQYGBgcJCAYHCQcGBggLCAkKCgoKCgYICwwLCgwJCgoK/8AAFAgACAAIBEMRAE0RAFkRAEsRAP/EAB8AAAEFAQEBAQEBAAAAAAAAAAABAgMEBQYHCAkKC//EALUQAAIBAwMCBAMFBQQEAAABfQECAwAEEQUSITFBBhNRYQcicRQygZGhCCNCscEVUtHwJDNicoIJChYXGBkaJSYnKCkqNDU2Nzg5OkNERUZHSElKU1RVVldYWVpjZGVmZ2hpanN0dXZ3eHl6g4SFhoeIiYqSk5SVlpeYmZqio6Slpqeoqaqys7S1tre4ubrCw8TFxsfIycrS09TV1tfY2drh4uPk5ebn6Onq8fLz9PX29/j5+v/aAA4EQwBNAFkASwAAPwD9/K/n/r+f+v38r//Z";
/// An animation of two frames of 4 x 3 pixels, the first one (200, 10, 20), the second one blue.
const ANIMATED: &str = "UklGRoYAAABXRUJQVlA4WAoAAAACAAAAAwAAAgAAQU5JTQYAAAAAAAAAAABBTk1GKgAAAAAAAAAAAAMAAAIAAGQAAAJWUDhMEQAAAC8DgAAAB1CFIpei/4GI6H8AAEFOTUYoAAAAAAAAAAAAAwAAAgAAZAAAAFZQOEwPAAAALwOAAAAHENH//gciov8BAA==";
/// A palette of red, green and blue in 2 x 2 pixels, red is transparent.
const PALETTE: &str = "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACAgMAAAAP2OW3AAAACVBMVEX/AAAA/wAAAP8tSs2KAAAAAXRSTlMAQObYZgAAAAxJREFUeJxjEGCYAAAAxAChFly6lgAAAABJRU5ErkJggg==";

fn render(bytes: &[u8], options: &ImageOptions) -> Result<Vec<u8>, String> {
    options.check("image").unwrap();
    let renderer = Renderer::new(options.clone());
    let pixels = pixels(bytes, options).map_err(|error| format!("{error}; {}", error.remedy_for_rows()))?;
    let geometry = Geometry::new(options, pixels.width, pixels.height, Draws::new(7, 0, 0));
    let mut out = vec![0; renderer.row_bytes()];
    renderer.render(&mut Resizer::new(), &pixels, &geometry, &mut out).map(|()| out)
}

fn pixels(bytes: &[u8], options: &ImageOptions) -> Result<Pixels, ImageError> {
    decode(bytes, options.channels, options.pixels_max, |_| Ok(())).map(|(pixels, ())| pixels)
}

fn hwc(height: u32, width: u32) -> ImageOptions {
    ImageOptions { layout: Layout::Hwc, ..ImageOptions::new(height, width) }
}

fn from_base64(text: &str) -> Vec<u8> {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.decode(text).unwrap()
}

fn assert_close(found: &[u8], expected: &[u8], most: u8) {
    assert_eq!(found.len(), expected.len());
    let off = found.iter().zip(expected).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
    assert!(off <= most, "off by {off}: {found:?}, not {expected:?}");
}

#[test]
fn scaled_pixels_are_those_of_pillow() {
    let png = encode(pattern(), ImageFormat::Png);
    let bilinear = [
        21, 31, 5, 65, 47, 16, 113, 64, 28, 161, 80, 39, 205, 96, 50, 28, 87, 15, 72, 103, 50, 120, 120, 89,
        168, 136, 128, 212, 152, 153, 35, 150, 27, 79, 166, 90, 127, 183, 157, 175, 192, 159, 219, 205, 114,
        42, 206, 37, 86, 215, 124, 134, 171, 163, 182, 104, 97, 226, 85, 148,
    ];
    assert_close(&render(&png, &hwc(4, 5)).unwrap(), &bilinear, 1);
    let bicubic = [
        17, 25, 3, 63, 41, 12, 112, 59, 22, 161, 76, 32, 207, 92, 42, 25, 85, 12, 71, 101, 49, 120, 119, 88,
        169, 136, 134, 215, 153, 165, 32, 150, 22, 78, 166, 88, 127, 191, 168, 176, 204, 169, 222, 217, 106,
        40, 211, 31, 86, 224, 131, 135, 169, 170, 184, 97, 83, 230, 74, 152,
    ];
    let options = ImageOptions { filter: Filter::Bicubic, ..hwc(4, 5) };
    assert_close(&render(&png, &options).unwrap(), &bicubic, 1);
    let grey =
        [25, 49, 74, 100, 123, 62, 87, 116, 145, 170, 102, 131, 163, 183, 198, 138, 166, 158, 127, 134];
    let options = ImageOptions { channels: Channels::Grey, ..ImageOptions::new(4, 5) };
    assert_close(&render(&png, &options).unwrap(), &grey, 1);
}

#[test]
fn a_centre_crop_scales_the_shorter_side_and_cuts_the_middle_out() {
    // Pillow: resize((7, 6)), crop((1, 1, 6, 5)).
    let expected = [
        47, 64, 20, 83, 77, 39, 116, 89, 55, 149, 100, 71, 185, 113, 90, 52, 108, 39, 88, 121, 72, 121, 133,
        103, 154, 144, 134, 190, 157, 168, 57, 145, 54, 93, 158, 101, 126, 170, 145, 159, 181, 188, 195, 194,
        164, 62, 189, 72, 98, 202, 135, 131, 214, 189, 164, 207, 158, 200, 181, 72,
    ];
    let options = ImageOptions { crop: Crop::Center, resize: Some(6), ..hwc(4, 5) };
    assert_close(&render(&encode(pattern(), ImageFormat::Png), &options).unwrap(), &expected, 1);
}

#[test]
fn a_crop_before_scaling_does_not_see_the_pixels_around_it() {
    // Pillow: crop((2, 3, 9, 8)), resize((5, 4)).
    let expected = [
        57, 97, 38, 81, 106, 58, 110, 116, 81, 139, 126, 105, 163, 135, 125, 60, 126, 52, 84, 135, 79, 113,
        145, 110, 142, 155, 142, 166, 164, 169, 64, 156, 65, 88, 165, 99, 117, 175, 140, 146, 185, 180, 170,
        194, 214, 67, 185, 79, 91, 194, 120, 120, 204, 169, 149, 214, 218, 173, 223, 131,
    ];
    let options = hwc(4, 5);
    let pixels = pixels(&encode(pattern(), ImageFormat::Png), &options).unwrap();
    let source = super::geometry::Rect { x: 2, y: 3, width: 7, height: 5 };
    let geometry = Geometry { source, scaled: (5, 4), corner: (0, 0), flip: false, flip_vertical: false };
    let mut out = vec![0; 60];
    Renderer::new(options).render(&mut Resizer::new(), &pixels, &geometry, &mut out).unwrap();
    assert_close(&out, &expected, 1);
}

#[test]
fn layouts_flips_and_floats_are_those_of_the_naive_loop() {
    let image = pattern();
    let png = encode(image.clone(), ImageFormat::Png);
    for (layout, flip, flip_vertical) in
        [(Layout::Chw, 0.0, 0.0), (Layout::Chw, 1.0, 0.0), (Layout::Hwc, 0.0, 1.0), (Layout::Hwc, 1.0, 1.0)]
    {
        let bytes = ImageOptions { layout, flip, flip_vertical, ..ImageOptions::new(10, 12) };
        let (mean, std) = (vec![0.5, 0.25, 0.0], vec![0.5, 2.0, 1.0]);
        let floats = ImageOptions { mean: mean.clone(), std: std.clone(), ..bytes.clone() };
        let (bytes, floats) = (render(&png, &bytes).unwrap(), render(&png, &floats).unwrap());
        let floats: Vec<f32> =
            floats.chunks_exact(4).map(|v| f32::from_ne_bytes(v.try_into().unwrap())).collect();
        for (y, x, c) in (0..10).flat_map(|y| (0..12).flat_map(move |x| (0..3).map(move |c| (y, x, c)))) {
            let at = match layout {
                Layout::Chw => (c * 10 + y) * 12 + x,
                Layout::Hwc => (y * 12 + x) * 3 + c,
            };
            let x = if flip > 0.0 { 11 - x } else { x };
            let y = if flip_vertical > 0.0 { 9 - y } else { y };
            let value = image.get_pixel(x as u32, y as u32)[c];
            assert_eq!(bytes[at], value, "{layout:?} {x} {y} {c}");
            assert_eq!(floats[at], (f32::from(value) / 255.0 - mean[c]) / std[c]);
        }
    }
}

#[test]
fn every_kind_of_image_becomes_rgb() {
    let one = |bytes: &[u8]| render(bytes, &hwc(1, 1)).unwrap();
    let grey = DynamicImage::from(GrayImage::from_pixel(3, 3, Luma([77])));
    assert_eq!(one(&encode(grey, ImageFormat::Png)), [77, 77, 77]);
    // Transparency is dropped.
    let clear = RgbaImage::from_pixel(2, 2, Rgba([9, 8, 7, 0]));
    assert_eq!(one(&encode(clear.clone(), ImageFormat::Png)), [9, 8, 7]);
    assert_eq!(one(&encode(RgbImage::from_pixel(1, 1, Rgb([1, 2, 3])), ImageFormat::Png)), [1, 2, 3]);
    assert_eq!(one(&encode(RgbImage::from_pixel(2, 3, Rgb([9, 8, 7])), ImageFormat::WebP)), [9, 8, 7]);
    let deep = ImageBuffer::<Rgb<u16>, _>::from_pixel(2, 2, Rgb([0xffff, 0x8080, 0]));
    assert_eq!(one(&encode(DynamicImage::from(deep), ImageFormat::Png)), [255, 128, 0]);
    let deep = ImageBuffer::<Luma<u16>, _>::from_pixel(2, 2, Luma([0x4242]));
    assert_eq!(one(&encode(DynamicImage::from(deep), ImageFormat::Png)), [0x42; 3]);
    assert_close(&one(&from_base64(CMYK)), &[255, 0, 0], 2);
    // The first frame.
    assert_eq!(one(&from_base64(ANIMATED)), [200, 10, 20]);
    let palette = render(&from_base64(PALETTE), &hwc(2, 2)).unwrap();
    assert_eq!(palette, [255, 0, 0, 0, 255, 0, 0, 0, 255, 0, 255, 0]);
    // 255 of red are 76 of luma.
    let red = encode(RgbImage::from_pixel(2, 2, Rgb([255, 0, 0])), ImageFormat::Png);
    assert_eq!(render(&red, &ImageOptions { channels: Channels::Grey, ..hwc(1, 1) }).unwrap(), [76]);
}

#[test]
fn the_orientation_of_a_photo_is_applied() {
    // Black on the left, white on the right. The filter mixes a seventh of the other half in.
    let image = RgbImage::from_fn(16, 8, |x, _| Rgb([if x < 8 { 0 } else { 255 }; 3]));
    let jpeg = encode(image, ImageFormat::Jpeg);
    let grey = |height, width| ImageOptions { channels: Channels::Grey, ..hwc(height, width) };
    assert_close(&render(&jpeg, &grey(1, 2)).unwrap(), &[36, 219], 4);
    assert_close(&render(&oriented(&jpeg, 3), &grey(1, 2)).unwrap(), &[219, 36], 4);
    // A quarter turn: the image is upright now, black above.
    assert_close(&render(&oriented(&jpeg, 6), &grey(2, 1)).unwrap(), &[36, 219], 4);
    assert_close(&render(&oriented(&jpeg, 8), &grey(2, 1)).unwrap(), &[219, 36], 4);
}

#[test]
fn hostile_images_are_errors_that_say_what_to_do() {
    let options = ImageOptions { pixels_max: 1 << 20, ..hwc(2, 2) };
    let refused = |bytes: &[u8], words: &str| {
        let error = render(bytes, &options).unwrap_err();
        assert!(error.contains(words), "{error:?} without {words:?}");
    };
    refused(b"", "no bytes");
    refused(b"GIF89a\x01\0\x01\0\0\0\0", "neither JPEG, PNG nor WebP");
    refused(b"<svg/>", "neither JPEG");
    refused(&claiming(100_000, 100_000), "100000 x 100000 pixels, more than 1048576");
    refused(&claiming(1024, 1025), "raise pixels_max");
    refused(&claiming(1024, 1024), "cannot be decoded");
    let jpeg = encode(pattern(), ImageFormat::Jpeg);
    refused(&jpeg[..jpeg.len() - 2], "ends before the end");
    refused(&jpeg[..jpeg.len() / 2], "ends before the end");
    // A frame of 65535 x 65535 pixels in a file of a few hundred bytes.
    let mut bomb = jpeg.clone();
    let frame = bomb.windows(2).position(|w| w == [0xff, 0xc0]).unwrap();
    bomb[frame + 5..frame + 9].fill(0xff);
    refused(&bomb, "65535 x 65535 pixels");
    for format in [ImageFormat::Jpeg, ImageFormat::Png, ImageFormat::WebP] {
        let whole = encode(pattern(), format);
        for end in 0..whole.len() {
            // Any prefix, and any damaged byte: an error or an image, never a panic.
            let mut damaged = whole.clone();
            damaged[end] ^= 0xff;
            drop(render(&damaged, &options));
            if end < whole.len() / 2 {
                let error = render(&whole[..end], &options).unwrap_err();
                assert!(error.contains("write") || error.contains("convert"), "{error}");
            }
        }
    }
}

#[test]
fn images_too_long_to_be_scaled_are_refused_before_they_are_decoded() {
    // All columns of the image in the rows of the result: 3 GiB.
    let size = (1 << 26, 1);
    let error = Renderer::new(hwc(16, 16)).scratch_bytes(size).unwrap_err();
    assert_eq!(error, ImageError::TooLong { width: 1 << 26, height: 1, out_width: 16, out_height: 16 });
    // Strips in either direction, whose passes differ by filter.
    for filter in [Filter::Bilinear, Filter::Bicubic] {
        let upright = ImageOptions { filter, ..hwc(128, 16_384) };
        Renderer::new(upright).scratch_bytes((16_384, 128)).unwrap();
    }
    let tall = ImageOptions { filter: Filter::Bicubic, ..hwc(16, 16) };
    assert!(Renderer::new(tall).scratch_bytes((1, 1 << 26)).is_err());
    // A panorama of as many pixels.
    let bytes = Renderer::new(hwc(224, 224)).scratch_bytes((1 << 16, 1 << 10)).unwrap();
    assert!(((1 << 16) * 224 * 3..1 << 27).contains(&bytes), "{bytes}");
}

#[test]
fn options_out_of_bounds_name_the_column_and_the_option() {
    let good = ImageOptions::new(8, 8);
    let refused = |options: ImageOptions, words: &str| {
        let error = options.check("photo").unwrap_err().to_string();
        assert!(error.contains("\"photo\"") && error.contains(words), "{error:?} without {words:?}");
    };
    refused(ImageOptions { size: [0, 8], ..good.clone() }, "height in size is 0");
    refused(ImageOptions { size: [16_384, 16_384], ..good.clone() }, "values of each image");
    refused(ImageOptions { resize: Some(9), ..good.clone() }, "leave it out, or set crop");
    refused(ImageOptions { resize: Some(7), crop: Crop::Center, ..good.clone() }, "at least 8");
    refused(ImageOptions { scale: [0.0, 1.0], ..good.clone() }, "scale is 0 to 1");
    refused(ImageOptions { ratio: [2.0, 1.0], ..good.clone() }, "ratio is 2 to 1");
    refused(ImageOptions { flip: f64::NAN, ..good.clone() }, "flip is NaN");
    let bytes = Some(Values::Uint8);
    refused(ImageOptions { mean: vec![0.5], dtype: bytes, ..good.clone() }, "needs dtype float32");
    let floats = ImageOptions { dtype: Some(Values::Float32), ..good.clone() };
    refused(ImageOptions { std: vec![0.5, 0.5], ..floats.clone() }, "give 1 or 3");
    refused(ImageOptions { std: vec![0.0], ..floats }, "above 0");
    refused(ImageOptions { pixels_max: 0, ..good.clone() }, "pixels_max is 0");
    good.check("photo").unwrap();
}

/// The number was computed by another program.
#[test]
fn delivered_keys_are_frozen() {
    use arrow::array::AsArray as _;
    let keys = super::keys(&[7], &[0, 0], &[1, 1], &[42, 43]);
    let keys = keys.as_primitive::<arrow::datatypes::Int64Type>().values();
    assert_eq!(keys[0], 4_160_738_689_310_270_626);
    assert_ne!(keys[0], keys[1]);
}
