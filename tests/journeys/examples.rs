//! Tests that the programs in `examples/` run successfully.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{Home, program};

/// The path of a program that `cargo test` builds beside `millrace`.
fn example(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_BIN_EXE_millrace")).with_file_name("examples").join(name);
    assert!(path.exists(), "{} is missing: cargo build --workspace --examples", path.display());
    path
}

#[test]
fn volume_shows_the_snapshot_beside_the_changed_file() {
    let home = Home::new();
    let printed = program(Command::new(example("volume")).arg(home.path()));
    assert!(printed.contains("live:   \"corrected\\n\""), "{printed}");
    assert!(
        printed.contains("monday: \"21.5\\n21.7\\n\"") && printed.contains("next:   Some(\"2\")"),
        "{printed}"
    );
}

#[test]
fn feed_gives_each_row_to_one_of_two_trainers() {
    let home = Home::new();
    let printed = program(Command::new(example("feed")).arg(home.path()));
    assert!(printed.contains("landed 1000 of 1000 records"), "{printed}");
    assert!(
        printed.contains("trainer 0 saw 500 rows") && printed.contains("trainer 1 saw 500 rows"),
        "{printed}"
    );
    assert!(printed.contains("every row once: true"), "{printed}");
}

#[test]
fn predict_queries_a_model_served_in_process() {
    let home = Home::new();
    let (file, models) = (home.dir.path().join("mlp.onnx"), home.dir.path().join("models"));
    std::fs::create_dir(&models).unwrap();
    let (file, folder) = (file.to_str().unwrap(), models.to_str().unwrap());
    home.ok(["model", "init", "mlp", "--inputs", "2", "--classes", "2", file]);
    home.ok(["model", "import", file, "--name", "m", "--models", folder]);
    let printed = program(Command::new(example("predict")).args([folder, "m"]));
    assert!(printed.contains("version 1 answered") && printed.contains("Fp32"), "{printed}");
}
