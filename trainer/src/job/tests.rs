//! Tests of job files: keys, bounds and digests.

use std::path::PathBuf;

use super::{JobFile, ModelSource, Output, Shuffle};
use crate::engine::{Device, Loss};

const MINIMAL: &str =
    "name = \"j\"\ndataset = \"d@s:/t\"\nfeatures = \"x\"\nlabel = \"y\"\nmodel = \"m.onnx\"\n";

fn reason(text: &str) -> String {
    let line = JobFile::parse(text).unwrap_err().one_line();
    assert!(!line.contains('\n'), "{line}");
    line
}

#[test]
fn defaults_match_the_documentation() {
    let job = JobFile::parse(MINIMAL).unwrap();
    assert_eq!((job.batch_rows, job.virtual_shards, job.epochs_max), (64, 12, 20));
    assert_eq!((job.checkpoint_every_steps, job.seed, job.workers), (500, 0, None));
    assert_eq!((job.loss, job.device), (Loss::CrossEntropy, Device::Cpu));
    assert_eq!(job.output_volume().to_string(), "d");
    assert_eq!((job.model_name().to_string(), job.output.path.as_str()), ("j".into(), "models"));
    let json = serde_json::to_string(&job).unwrap();
    assert_eq!(serde_json::from_str::<JobFile>(&json).unwrap(), job);
}

#[test]
fn model_paths_are_relative_to_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("train.toml");
    std::fs::write(&path, MINIMAL).unwrap();
    let job = JobFile::load(&path).unwrap();
    assert_eq!(job.model, ModelSource::File(folder.path().join("m.onnx")));
    let error = JobFile::load(&PathBuf::from("/no/such/file.toml")).unwrap_err().to_string();
    assert!(error.contains("/no/such/file.toml"), "{error}");
}

#[test]
fn mistakes_are_named_with_their_line() {
    let with = |line: &str| format!("{MINIMAL}{line}\n");
    for (text, words) in [
        ("name = ".to_owned(), ["line 1", "string"]),
        (MINIMAL.replace("name = \"j\"\n", ""), ["missing field", "name"]),
        (MINIMAL.replace("\"m.onnx\"", "3"), ["line 5", "ONNX file"]),
        (MINIMAL.replace("\"m.onnx\"", "{ kind = \"mlp\", layers = 3 }"), ["line 5", "layers"]),
        (MINIMAL.replace("\"m.onnx\"", "{ kind = \"rnn\" }"), ["line 5", "rnn"]),
        (MINIMAL.replace("d@s:/t", "d@s:t"), ["line 2", "'/'"]),
        (with("batch_row = 3"), ["line 6", "batch_row"]),
        (with("batch_rows = 0"), ["batch_rows = 0", "1 to"]),
        (with("virtual_shards = 65"), ["virtual_shards = 65", "1 to 64"]),
        (with("epochs_max = 0"), ["epochs_max", "1 to"]),
        (with("checkpoint_every_steps = 0"), ["checkpoint_every_steps", "1 to"]),
        (with("loss_target = -1.0"), ["loss_target", "at least 0"]),
        (with("loss = \"hinge\""), ["line 6", "cross_entropy"]),
        (with("[output]\nfolder = \"m\""), ["line 7", "folder"]),
        (with("[output]\npath = \"a/../b\""), ["output.path", "models"]),
    ] {
        let line = reason(&text);
        for word in words {
            assert!(line.contains(word), "{line:?} lacks {word:?}");
        }
    }
}

#[test]
fn digest_covers_the_computation_but_not_the_budget() {
    let job = JobFile::parse(MINIMAL).unwrap();
    let digest = |job: &JobFile| job.digest("model", "plan#1");
    let same = [
        JobFile { workers: Some(3), ..job.clone() },
        JobFile { checkpoint_every_steps: 7, ..job.clone() },
        JobFile { model: ModelSource::File("elsewhere/m.onnx".into()), ..job.clone() },
        JobFile { epochs_max: 21, ..job.clone() },
        JobFile { loss_target: Some(0.1), ..job.clone() },
        JobFile { name: "other".parse().unwrap(), ..job.clone() },
        JobFile { output: Output { path: "elsewhere".into(), ..Output::default() }, ..job.clone() },
    ];
    assert!(same.iter().all(|other| digest(other) == digest(&job)));
    let others = [
        JobFile { seed: 1, ..job.clone() },
        JobFile { batch_rows: 65, ..job.clone() },
        JobFile { virtual_shards: 11, ..job.clone() },
        JobFile { device: Device::Cuda(0), ..job.clone() },
        JobFile { loss: Loss::Mse, ..job.clone() },
        JobFile { shuffle: Shuffle { lanes: 2, ..Shuffle::default() }, ..job.clone() },
    ];
    assert!(others.iter().all(|other| digest(other) != digest(&job)));
    assert_ne!(job.digest("model", "plan#2"), digest(&job));
    assert_ne!(job.digest("modelp", "lan#1"), digest(&job));
}

/// The expected ids were computed by another program. A change of either form would orphan checkpoints.
#[test]
fn digests_of_both_formats_are_frozen() {
    let job = JobFile::parse(MINIMAL).unwrap();
    assert_eq!(
        job.digest("model", "plan#1"),
        "eaa4fe602c837ac28c288b0549a21d13eb0b32ef5a527fdbcbb904f558e33e11"
    );
    assert_eq!(
        job.former_digest("model", "plan#1"),
        "7b3914cc46c65f39820e5a8d218d29465d588475d2a8e4e25206048272f5c803"
    );
    let job = JobFile::parse(
        "name = \"j\"\ndataset = \"d@s:/t\"\nfeatures = \"x\"\nlabel = \"y\"\nloss_target = 0.5\nworkers = 3\n\
         loss = \"mse\"\nmodel = { kind = \"mlp\", inputs = 4, hidden = [3], classes = 2 }\n\
         optimizer = { kind = \"sgd\", learning_rate = 0.1 }\noutput = { volume = \"v\" }\n",
    )
    .unwrap();
    assert_eq!(
        job.former_digest("model", "plan#1"),
        "12b647afa5af965e89e53805c9ad03401c47aaadd823beca89dc2e9fda0b7ad6"
    );
}
