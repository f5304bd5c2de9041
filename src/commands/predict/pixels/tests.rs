//! Tests of image conversion: layouts, sizes and value ranges.

use std::io::Cursor;

use image::{DynamicImage, GrayImage, ImageBuffer, ImageFormat, Rgb, RgbImage, Rgba};
use millrace_streams::feed::IMAGE_PIXELS_MAX;

use super::*;

fn args() -> ImageArgs {
    ImageArgs { scaling: None, mean: Vec::new(), std: Vec::new(), layout: None, size: None }
}

fn spec(datatype: Datatype, shape: &[i64]) -> TensorSpec {
    TensorSpec { name: "x".into(), datatype, shape: shape.to_vec() }
}

fn form(datatype: Datatype, shape: &[i64]) -> ImageConversion {
    ImageConversion::new(&spec(datatype, shape), &args()).unwrap()
}

/// The elements of an image file.
fn elements(form: &ImageConversion, image: impl Into<DynamicImage>) -> Result<(Vec<i64>, Data), String> {
    let mut png = Cursor::new(Vec::new());
    image.into().write_to(&mut png, ImageFormat::Png).unwrap();
    form.elements(DecodedImage::decode(png.get_ref(), form.channels(), IMAGE_PIXELS_MAX).unwrap())
}

/// Two pixels side by side.
fn pair() -> DynamicImage {
    RgbImage::from_raw(2, 1, vec![1, 2, 3, 4, 5, 6]).unwrap().into()
}

/// Shape of an input, --layout, --size.
type ConversionCase = (&'static [i64], Option<Layout>, Option<(u32, u32)>);

fn asked((shape, layout, size): ConversionCase) -> Result<ImageConversion, String> {
    ImageConversion::new(&spec(Datatype::Uint8, shape), &ImageArgs { layout, size, ..args() })
}

#[test]
fn channel_layout_follows_shape_and_flags() {
    let (planar, interleaved) = (Some(Layout::Nchw), Some(Layout::Nhwc));
    let of = |layout, channels, height, width| ImageConversion {
        layout,
        channels,
        height,
        width,
        elements: Elements::Bytes,
    };
    let cases: [(ConversionCase, ImageConversion); 12] = [
        ((&[-1, 3, 4, 5], None, None), of(planar, 3, Some(4), Some(5))),
        ((&[-1, 4, 5, 3], None, None), of(interleaved, 3, Some(4), Some(5))),
        ((&[1, 1, 28, 28], None, None), of(planar, 1, Some(28), Some(28))),
        ((&[-1, 28, 28, 1], None, None), of(interleaved, 1, Some(28), Some(28))),
        ((&[-1, 28, 20], None, None), of(None, 1, Some(28), Some(20))),
        ((&[-1, 3, -1, -1], None, None), of(planar, 3, None, None)),
        ((&[-1, -1, -1, 3], None, Some((7, 8))), of(interleaved, 3, Some(7), Some(8))),
        ((&[-1, 3, 4, 3], planar, None), of(planar, 3, Some(4), Some(3))),
        ((&[-1, 3, 4, 3], interleaved, None), of(interleaved, 3, Some(3), Some(4))),
        ((&[-1, -1, -1, -1], planar, None), of(planar, 3, None, None)),
        ((&[-1, 3, 4, -1], None, Some((4, 9))), of(planar, 3, Some(4), Some(9))),
        ((&[-1, 1, 1, 5], None, None), of(planar, 1, Some(1), Some(5))),
    ];
    for (given, expected) in cases {
        assert_eq!(asked(given), Ok(expected), "{given:?}");
    }
    let refused: [(ConversionCase, &str); 11] = [
        ((&[-1, 3, 4, 3], None, None), "does not say which extent is that of the channels: say --layout"),
        ((&[-1, -1, -1, -1], None, None), "say --layout"),
        ((&[-1, 4, 5, 6], None, None), "say --layout"),
        ((&[-1, 4, 5, 6], planar, None), "has 4 channels, images have 1 or 3"),
        ((&[-1, 5], None, None), "takes shape [5] behind the rows"),
        ((&[-1], None, None), "takes shape [] behind the rows"),
        ((&[-1, 28, 28], planar, None), "without --layout height and width"),
        ((&[-1, 3, 2, 2, 2], None, None), "takes shape [3, 2, 2, 2]"),
        ((&[-1, 3, 0, 4], None, None), "takes images of height 0"),
        ((&[-1, 3, 4, 4], None, Some((4, 5))), "--size: input \"x\" takes images of width 4, not 5"),
        ((&[-1, 3, 4, i64::MAX], None, None), "which no image has"),
    ];
    for (given, says) in refused {
        let error = asked(given).unwrap_err();
        assert!(error.contains(says), "{given:?}: {error}");
    }
}

#[test]
fn pixels_are_ordered_by_layout() {
    let bytes = |shape: &[i64], image: DynamicImage| elements(&form(Datatype::Uint8, shape), image).unwrap();
    let interleaved = |shape: &'static [i64], image: DynamicImage| {
        elements(&asked((shape, Some(Layout::Nhwc), None)).unwrap(), image).unwrap()
    };
    assert_eq!(bytes(&[-1, 3, 1, 2], pair()), (vec![3, 1, 2], Data::Uint8(vec![1, 4, 2, 5, 3, 6])));
    assert_eq!(interleaved(&[-1, 1, 2, 3], pair()).1, Data::Uint8(vec![1, 2, 3, 4, 5, 6]));
    // Gray fills all three channels; alpha is dropped; 16 bits become 8.
    let grey = GrayImage::from_raw(2, 1, vec![7, 9]).unwrap();
    assert_eq!(bytes(&[-1, 3, 1, 2], grey.clone().into()).1, Data::Uint8(vec![7, 9, 7, 9, 7, 9]));
    assert_eq!(bytes(&[-1, 1, 2], grey.into()), (vec![1, 2], Data::Uint8(vec![7, 9])));
    let clear: ImageBuffer<Rgba<u8>, _> = ImageBuffer::from_raw(1, 1, vec![1, 2, 3, 0]).unwrap();
    assert_eq!(interleaved(&[-1, 1, 1, 3], clear.into()).1, Data::Uint8(vec![1, 2, 3]));
    let deep: ImageBuffer<Rgb<u16>, _> = ImageBuffer::from_raw(1, 1, vec![257, 65_535, 0]).unwrap();
    assert_eq!(interleaved(&[-1, 1, 1, 3], deep.into()).1, Data::Uint8(vec![1, 255, 0]));
    // If the input has no fixed size, an image keeps its own.
    assert_eq!(bytes(&[-1, 3, -1, -1], pair()).0, [3, 1, 2]);
}

#[test]
fn pictures_get_the_size_of_the_input() {
    let bytes = |shape: &[i64], image: DynamicImage| elements(&form(Datatype::Uint8, shape), image).unwrap();
    let plain = RgbImage::from_pixel(5, 7, Rgb([10, 20, 30]));
    let (shape, data) = bytes(&[-1, 2, 3, 3], plain.into());
    assert_eq!((shape, data), (vec![2, 3, 3], Data::Uint8([10, 20, 30].repeat(6))));
    let halves = GrayImage::from_raw(2, 2, vec![0, 0, 100, 100]).unwrap();
    assert_eq!(bytes(&[-1, 1, 1], halves.into()).1, Data::Uint8(vec![50]));
    let open = form(Datatype::Fp32, &[-1, 3, -1, -1]);
    let large = RgbImage::new(4_096, 2_048);
    assert!(elements(&open, large).unwrap_err().contains("100663296 bytes of a request"));
    let tall = form(Datatype::Uint8, &[-1, 1, 60_000, 2]);
    let error = elements(&tall, GrayImage::new(20_000, 1)).unwrap_err();
    assert!(error.contains("20000 x 1 pixels is too long to be scaled to 2 x 60000"), "{error}");
}

#[test]
fn values_are_scaled_as_the_flags_say() {
    let scaled = |channels: i64, given: ImageArgs| -> Result<Vec<f32>, String> {
        let form = ImageConversion::new(
            &spec(Datatype::Fp32, &[-1, 1, 2, channels]),
            &ImageArgs { layout: Some(Layout::Nhwc), ..given },
        )?;
        let ends = [[0; 3], [255; 3]].concat();
        match elements(&form, RgbImage::from_raw(2, 1, ends).unwrap())?.1 {
            Data::Fp32(values) => Ok(values),
            other => panic!("{other:?}"),
        }
    };
    let by = |scaling: Scaling| ImageArgs { scaling: Some(scaling), ..args() };
    let explicit = |mean: &[f32], std: &[f32]| ImageArgs { mean: mean.into(), std: std.into(), ..args() };
    for given in [args(), by(Scaling::None)] {
        assert_eq!(scaled(3, given).unwrap(), [0.0, 0.0, 0.0, 255.0, 255.0, 255.0]);
    }
    assert_eq!(scaled(1, by(Scaling::Unit)).unwrap(), [0.0, 1.0]);
    assert_eq!(scaled(1, by(Scaling::Inception)).unwrap(), [-1.0, 1.0]);
    assert_eq!(scaled(1, by(Scaling::Vgg)).unwrap(), [-128.0, 127.0]);
    assert_eq!(scaled(3, by(Scaling::Vgg)).unwrap(), [-123.0, -117.0, -104.0, 132.0, 138.0, 151.0]);
    let imagenet = scaled(3, by(Scaling::Imagenet)).unwrap();
    assert_eq!(imagenet, scaled(3, explicit(&[0.485, 0.456, 0.406], &[0.229, 0.224, 0.225])).unwrap());
    assert!((imagenet[0] + 2.117_904).abs() < 1e-5 && (imagenet[5] - 2.64).abs() < 1e-5, "{imagenet:?}");
    assert_eq!(scaled(1, explicit(&[], &[0.5])).unwrap(), [0.0, 2.0]);
    assert_eq!(scaled(3, explicit(&[1.0], &[])).unwrap()[..4], [-1.0, -1.0, -1.0, 0.0]);
    for (channels, given, says) in [
        (1, by(Scaling::Imagenet), "is of three channels"),
        (1, explicit(&[0.1, 0.2, 0.3], &[]), "--mean has 3 values, the model takes 1 channels"),
        (3, explicit(&[], &[0.1, 0.2]), "--std has 2 values, the model takes 3 channels"),
    ] {
        let error = scaled(channels, given).unwrap_err();
        assert!(error.contains(says), "{error}");
    }
    for (datatype, given, says) in [
        (Datatype::Uint8, by(Scaling::Unit), "takes UINT8, values from 0 to 255 as they are"),
        (Datatype::Uint8, explicit(&[0.5], &[]), "leave --scaling, --mean and --std out"),
        (Datatype::Fp16, args(), "takes FP16, images become FP32 or UINT8"),
        (Datatype::Bytes, args(), "takes BYTES"),
    ] {
        let error = ImageConversion::new(&spec(datatype, &[-1, 3, 2, 2]), &given).unwrap_err();
        assert!(error.contains(says), "{error}");
    }
}
