//! Tests of models in files, with external weights.

use std::path::Path;

use millrace_bundle::onnx::tensor_proto::DataLocation;
use millrace_bundle::onnx::{ModelProto, StringStringEntryProto};
use prost::Message;

use super::{MODEL_BYTES_MAX, ModelFileError, read};

/// Moves the weights of a model to one file, one after the other.
fn outside(model: &mut ModelProto, file: &str) -> Vec<u8> {
    let mut weights = Vec::new();
    for tensor in &mut model.graph.as_mut().unwrap().initializer {
        let elements = match tensor.raw_data.take() {
            Some(raw) => raw,
            None => tensor.float_data.drain(..).flat_map(f32::to_le_bytes).collect(),
        };
        let entry =
            |key: &str, value: String| StringStringEntryProto { key: Some(key.into()), value: Some(value) };
        tensor.external_data = vec![
            entry("location", file.to_owned()),
            entry("offset", weights.len().to_string()),
            entry("length", elements.len().to_string()),
        ];
        tensor.data_location = Some(DataLocation::External as i32);
        weights.extend(elements);
    }
    weights
}

/// A model whose initializers all use raw data.
fn raw() -> ModelProto {
    let mut model = crate::init::mlp(5, &[4], 3, 1).unwrap();
    for tensor in &mut model.graph.as_mut().unwrap().initializer {
        if tensor.raw_data.is_none() {
            tensor.raw_data = Some(tensor.float_data.drain(..).flat_map(f32::to_le_bytes).collect());
        }
    }
    model
}

fn write(folder: &Path, model: &ModelProto) -> std::path::PathBuf {
    let path = folder.join("model.onnx");
    std::fs::write(&path, model.encode_to_vec()).unwrap();
    path
}

#[test]
fn external_weights_are_embedded_in_the_model() {
    let whole = raw();
    for file in ["model.onnx.data", "weights/part/0.bin"] {
        let folder = tempfile::tempdir().unwrap();
        let mut model = whole.clone();
        let weights = outside(&mut model, file);
        let place = folder.path().join(file);
        std::fs::create_dir_all(place.parent().unwrap()).unwrap();
        std::fs::write(&place, weights).unwrap();
        assert_eq!(read(&write(folder.path(), &model)).unwrap(), whole, "{file}");
    }
}

#[test]
fn weights_outside_the_folder_of_the_model_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let mut model = raw();
    let weights = outside(&mut model, "w.bin");
    let path = write(folder.path(), &model);
    let refused = |words: &str| {
        let reason = read(&path).unwrap_err().to_string();
        assert!(reason.contains("w.bin") && reason.contains(words), "{reason}");
    };
    refused("cannot be read");
    std::fs::write(folder.path().join("w.bin"), &weights[..7]).unwrap();
    refused("w.bin");
    std::fs::remove_file(folder.path().join("w.bin")).unwrap();
    std::fs::write(elsewhere.path().join("w.bin"), &weights).unwrap();
    std::os::unix::fs::symlink(elsewhere.path().join("w.bin"), folder.path().join("w.bin")).unwrap();
    refused("outside its folder");
    let mut model = raw();
    outside(&mut model, "../w.bin");
    let reason = read(&write(folder.path(), &model)).unwrap_err().to_string();
    assert!(reason.contains("../w.bin"), "{reason}");
}

#[test]
fn special_and_endless_files_are_refused_without_reading_them() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    for path in [&pipe, folder.path(), Path::new("/dev/zero")] {
        assert!(matches!(read(path), Err(ModelFileError::NotRegular)), "{}", path.display());
    }
    let large = folder.path().join("large");
    std::fs::File::create(&large).unwrap().set_len(MODEL_BYTES_MAX + 1).unwrap();
    assert!(matches!(read(&large), Err(ModelFileError::TooLarge)));
    assert!(matches!(read(&folder.path().join("none")), Err(ModelFileError::Io(_))));
    // Weight files have the same bounds.
    let mut model = raw();
    outside(&mut model, "pipe");
    let reason = read(&write(folder.path(), &model)).unwrap_err().to_string();
    assert!(reason.contains("pipe: is not a regular file"), "{reason}");
    std::fs::write(&large, "no model").unwrap();
    assert!(matches!(read(&large), Err(ModelFileError::NotOnnx(_))));
}
