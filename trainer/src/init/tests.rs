//! Tests of new models: shapes, seeds, bounds.

use prost::Message;

use super::*;
use crate::graph::Graph;

#[test]
fn equal_seeds_give_equal_bytes_and_other_seeds_do_not() {
    let model = |seed| mlp(64, &[64], 10, seed).unwrap().encode_to_vec();
    assert_eq!(model(1), model(1));
    assert_ne!(model(1), model(2));
    let spec: ModelSpec = toml::from_str("kind = \"cnn\"\nheight = 8\nwidth = 8\nclasses = 10").unwrap();
    assert_eq!(spec.build().unwrap(), cnn(8, 8, 1, 10, 0).unwrap());
    assert_ne!(spec.clone().with_seed(5).build().unwrap(), spec.build().unwrap());
}

#[test]
fn weights_are_frozen_and_spread_as_kaiming_asks() {
    let model = mlp(600, &[50], 10, 0).unwrap();
    let weights = Graph::read(&model).unwrap().initial_weights(&model).unwrap();
    let bound = (6.0f32 / 600.0).sqrt();
    let first = &weights[..30_000];
    assert!(first.iter().all(|w| w.abs() <= bound));
    let variance = first.iter().map(|w| w * w).sum::<f32>() / 30_000.0;
    assert!((variance / (2.0 / 600.0) - 1.0).abs() < 0.03, "{variance}");
    // Golden: a change here changes every seeded run.
    assert_eq!(weights[..3].iter().map(|w| w.to_bits()).collect::<Vec<_>>(), GOLDEN);
}

const GOLDEN: [u32; 3] = [1_023_243_437, 1_026_246_218, 1_027_362_611];

#[test]
fn both_kinds_take_flat_rows() {
    let graph = Graph::read(&cnn(28, 28, 3, 10, 0).unwrap()).unwrap();
    assert_eq!((graph.input_width(), graph.output_width()), (28 * 28 * 3, 10));
    assert_eq!((graph.inputs()[0].name.as_str(), graph.output_name()), ("input", "logits"));
    let graph = Graph::read(&cnn(1, 5, 1, 2, 0).unwrap()).unwrap();
    assert_eq!(graph.input_width(), 5);
}

#[test]
fn settings_out_of_bounds_are_refused() {
    assert!(mlp(0, &[], 10, 0).is_err());
    assert!(mlp(4, &[0], 10, 0).is_err());
    assert!(mlp(4, &[], 0, 0).is_err());
    assert_eq!(mlp(1 << 20, &[1 << 20], 10, 0), Err(InitError::TooLarge));
    assert_eq!(cnn(1 << 20, 1 << 20, 1, 10, 0), Err(InitError::TooLarge));
    assert!(mlp(4, &[1; 300], 10, 0).is_err());
    // A check makes no weights, and gives the same answer.
    for (text, fits) in [
        ("kind = \"mlp\"\ninputs = 32768\nhidden = [32766]\nclasses = 1", true),
        ("kind = \"mlp\"\ninputs = 32768\nhidden = [32767]\nclasses = 1", false),
        ("kind = \"cnn\"\nheight = 4096\nwidth = 4096\nfilters = [64]\nclasses = 3", true),
        ("kind = \"cnn\"\nheight = 4096\nwidth = 4096\nfilters = [64]\nclasses = 4", false),
        ("kind = \"cnn\"\nheight = 32768\nwidth = 32769\nclasses = 2", false),
    ] {
        let spec: ModelSpec = toml::from_str(text).unwrap();
        assert_eq!(spec.check(), if fits { Ok(()) } else { Err(InitError::TooLarge) }, "{text}");
    }
    let mut spec: MlpSpec = toml::from_str("inputs = 4\nclasses = 2").unwrap();
    spec.scale = f32::NAN;
    assert!(spec.build().is_err());
    assert!(toml::from_str::<ModelSpec>("kind = \"mlp\"\ninputs = 4\nclasses = 2\nwidth = 3").is_err());
}
