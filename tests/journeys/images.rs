//! Tests of predictions for images: files, folders, pipes, and files that are not images.

use std::fs::File;
use std::io::{Cursor, Write};
use std::process::Stdio;

use arrow::array::{Array as _, AsArray};
use image::{DynamicImage, GrayImage, ImageBuffer, ImageFormat, Luma, Rgb, RgbImage, Rgba};
use millrace_bundle::onnx::tensor_proto::DataType;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Value, json};

use crate::support::Home;
use crate::tabular::{Inputs, serve_echoes};

fn encoded(image: impl Into<DynamicImage>, format: ImageFormat) -> Vec<u8> {
    let mut content = Cursor::new(Vec::new());
    image.into().write_to(&mut content, format).unwrap();
    content.into_inner()
}

/// Two by two pixels with distinct values.
fn picture() -> RgbImage {
    RgbImage::from_raw(2, 2, vec![0, 1, 2, 10, 11, 12, 20, 21, 22, 255, 254, 253]).unwrap()
}

const PLANAR: Inputs<'_> = &[("image", DataType::Float, &[-1, 3, 2, 2])];
const INTERLEAVED: Inputs<'_> = &[("image", DataType::Uint8, &[-1, 2, 2, 3])];
const OPEN: Inputs<'_> = &[("image", DataType::Float, &[-1, -1, -1, -1])];
const GREY: Inputs<'_> = &[("image", DataType::Uint8, &[-1, 1, 2, 2])];
const SINGLE: Inputs<'_> = &[("image", DataType::Uint8, &[1, 2, 2, 3])];
const TWO: Inputs<'_> = &[("a", DataType::Float, &[-1, 3, 2, 2]), ("b", DataType::Float, &[-1])];

#[test]
fn images_are_converted_to_the_model_input() {
    let home = Home::new();
    let models = [
        ("planar", PLANAR),
        ("interleaved", INTERLEAVED),
        ("open", OPEN),
        ("grey", GREY),
        ("single", SINGLE),
    ];
    let (service, grpc) = serve_echoes(&home, &models);
    let ask = |args: &[&str]| home.json([&["predict"][..], args, &["--grpc", &grpc]].concat());
    let values = |printed: &Value, at: usize| printed["predictions"][at]["outputs"]["image_out"].clone();
    home.file("a.png", encoded(picture(), ImageFormat::Png));

    let printed = ask(&["planar", "a.png"]);
    let planes = json!([0.0, 10.0, 20.0, 255.0, 1.0, 11.0, 21.0, 254.0, 2.0, 12.0, 22.0, 253.0]);
    assert_eq!((&values(&printed, 0), &printed["predictions"][0]["file"]), (&planes, &json!("a.png")));
    let scaled = values(&ask(&["planar", "a.png", "--scaling", "inception"]), 0);
    assert_eq!((&scaled[0], &scaled[3]), (&json!(-1.0), &json!(1.0)));
    let explicit = values(&ask(&["planar", "a.png", "--mean", "-1,0,0", "--std", "0.5"]), 0);
    assert_eq!((&explicit[0], &explicit[3]), (&json!(2.0), &json!(4.0)));
    let whole = values(&ask(&["open", "a.png", "--layout", "nhwc"]), 0);
    assert_eq!(whole, json!([0.0, 1.0, 2.0, 10.0, 11.0, 12.0, 20.0, 21.0, 22.0, 255.0, 254.0, 253.0]));
    let larger = values(&ask(&["open", "a.png", "--layout", "nchw", "--size", "4x6"]), 0);
    assert_eq!(larger.as_array().unwrap().len(), 3 * 4 * 6);

    // All images of a folder in the order of their names, of any pixel format; other files are skipped.
    let folder = home.dir.path().join("photos");
    std::fs::create_dir(&folder).unwrap();
    let grey: ImageBuffer<Luma<u16>, _> = ImageBuffer::from_raw(2, 2, vec![257 * 7; 4]).unwrap();
    let clear: ImageBuffer<Rgba<u8>, _> = ImageBuffer::from_pixel(2, 2, Rgba([1, 2, 3, 0]));
    let large = RgbImage::from_pixel(300, 200, Rgb([40, 50, 60]));
    for (name, content) in [
        ("1.png", encoded(picture(), ImageFormat::Png)),
        ("2-deep-grey.PNG", encoded(grey, ImageFormat::Png)),
        ("3-clear.png", encoded(clear, ImageFormat::Png)),
        ("4-large.png", encoded(large, ImageFormat::Png)),
        ("5-grey.jpg", encoded(GrayImage::from_pixel(16, 16, Luma([128])), ImageFormat::Jpeg)),
        ("6-not-by-its-name.jpeg", encoded(picture(), ImageFormat::Png)),
        ("notes.txt", b"none".to_vec()),
    ] {
        std::fs::write(folder.join(name), content).unwrap();
    }
    let pixels = json!([0, 1, 2, 10, 11, 12, 20, 21, 22, 255, 254, 253]);
    let expected = [
        pixels.clone(),
        json!(vec![7; 12]),
        json!([1, 2, 3].repeat(4)),
        json!([40, 50, 60].repeat(4)),
        json!(vec![128; 12]),
        pixels.clone(),
    ];
    for (model, more) in
        [("interleaved", &[][..]), ("interleaved", &["--batch-rows", "4"]), ("single", &["--in-flight", "2"])]
    {
        let printed = ask(&[&[model, "photos"][..], more].concat());
        assert_eq!(printed["predicted"], 6);
        for (at, expected) in expected.iter().enumerate() {
            assert_eq!(values(&printed, at), *expected, "{}", printed["predictions"][at]["file"]);
        }
        assert_eq!(printed["predictions"][5]["file"], "photos/6-not-by-its-name.jpeg");
    }
    assert_eq!(values(&ask(&["grey", "photos/2-deep-grey.PNG"]), 0), json!([7, 7, 7, 7]));

    // Tables, Parquet files and pipes name the file of each image.
    let shown = home.ok(["predict", "interleaved", "photos", "a.png", "--grpc", &grpc]);
    assert!(shown.contains("photos/4-large.png") && shown.contains("7 predicted by interleaved"), "{shown}");
    let written = home.dir.path().join("predictions.parquet");
    ask(&["interleaved", "photos", "-o", written.to_str().unwrap()]);
    let reader = ParquetRecordBatchReaderBuilder::try_new(File::open(&written).unwrap()).unwrap();
    let batch = reader.build().unwrap().next().unwrap().unwrap();
    let files = batch.column_by_name("file").unwrap().as_string::<i32>().clone();
    assert_eq!((files.len(), files.value(1)), (6, "photos/2-deep-grey.PNG"));
    let mut command = home.command();
    command.args(["predict", "interleaved", "--format", "image", "--json", "--grpc", &grpc]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&encoded(picture(), ImageFormat::Png)).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert_eq!(values(&serde_json::from_slice(&output.stdout).unwrap(), 0), pixels);
    assert_eq!(service.stop(), 0);
}

#[test]
fn predict_names_the_defect_of_an_image() {
    let home = Home::new();
    let models = [("planar", PLANAR), ("interleaved", INTERLEAVED), ("open", OPEN), ("two", TWO)];
    let (service, grpc) = serve_echoes(&home, &models);
    let png = encoded(picture(), ImageFormat::Png);
    let jpeg = encoded(RgbImage::from_pixel(64, 64, Rgb([9, 90, 200])), ImageFormat::Jpeg);
    home.file("good.png", &png);
    home.file("cut.png", &png[..png.len() / 2]);
    home.file("cut.jpg", &jpeg[..jpeg.len() - 2]);
    home.file("text.png", "no image");
    home.file("empty.png", "");
    home.file("wide.png", encoded(GrayImage::new(1 << 24, 1), ImageFormat::Png));
    home.file("many.png", encoded(GrayImage::new(1 << 13, (1 << 13) + 1), ImageFormat::Png));
    home.file("rows.csv", "x\n1\n");
    let kept = home.file("predictions.jsonl", "from before");
    std::fs::create_dir(home.dir.path().join("none")).unwrap();
    let cases: [(&[&str], i32, &str); 20] = [
        (&["planar", "cut.png"], 6, "cut.png cannot be decoded"),
        (&["planar", "good.png", "cut.png"], 6, "cut.png cannot be decoded"),
        (&["planar", "cut.jpg"], 6, "cut.jpg cannot be decoded: the file ends"),
        (&["planar", "text.png"], 6, "text.png is neither JPEG, PNG nor WebP"),
        (&["planar", "empty.png"], 6, "empty.png is neither JPEG, PNG nor WebP"),
        (&["planar", "many.png"], 2, "many.png says that it has 8192 by 8193 pixels, more than 67108864"),
        (
            &["planar", "wide.png"],
            2,
            "16777216 x 1 pixels is too long to be scaled to 2 x 2: scale it down first",
        ),
        (&["planar", "good.png", "missing.png"], 3, "missing.png"),
        (&["planar", "none"], 3, "none has no images"),
        (&["planar", "good.png", "rows.csv"], 2, "images and records go to the model by two commands"),
        (&["planar", "rows.csv", "--scaling", "unit"], 2, "--scaling is for images"),
        (&["planar", "good.png", "--label", "y"], 2, "--label names a field"),
        (&["planar", "good.png", "--input", "image=x"], 2, "--input names a field"),
        (&["planar", "good.png", "--size", "4x4"], 2, "takes images of height 2, not 4"),
        (&["planar", "good.png", "--mean", "0.1,0.2"], 2, "--mean has 2 values, the model takes 3"),
        (&["interleaved", "good.png", "--scaling", "vgg"], 2, "takes UINT8"),
        (&["open", "good.png"], 2, "say --layout nchw or nhwc"),
        (&["open", "wide.png", "--layout", "nchw"], 2, "bytes of a request"),
        (&["two", "good.png"], 2, "models with one input, this one has a, b"),
        (&["nosuch", "good.png"], 3, "no model \"nosuch\""),
    ];
    for (args, code, says) in cases {
        let output = ["-o", "predictions.jsonl", "--grpc", &grpc];
        let (found, line) = home.fails([&["predict"][..], args, &output].concat());
        assert_eq!(found, code, "{line}");
        assert!(line.contains(says), "{says} is missing in {line}");
        assert_eq!(std::fs::read(&kept).unwrap(), b"from before");
    }
    for (flags, says) in [
        (["--size", "4"], "224x224"),
        (["--size", "0x4"], "224x224"),
        (["--std", "0"], "above 0"),
        (["--mean", "nan"], "0.485,0.456,0.406"),
        (["--scaling", "other"], "inception"),
        (["--layout", "chw"], "nchw"),
    ] {
        let output = home.run([&["predict", "planar", "good.png"][..], &flags].concat());
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && error.contains(says), "{flags:?}: {error}");
    }
    assert_eq!(service.stop(), 0);
}
