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
    let said = program(Command::new(example("volume")).arg(home.path()));
    assert!(said.contains("live:   \"corrected\\n\""), "{said}");
    assert!(said.contains("monday: \"21.5\\n21.7\\n\"") && said.contains("next:   Some(\"2\")"), "{said}");
}

#[test]
fn feed_gives_each_row_to_one_of_two_trainers() {
    let home = Home::new();
    let said = program(Command::new(example("feed")).arg(home.path()));
    assert!(said.contains("landed 1000 of 1000 records"), "{said}");
    assert!(said.contains("trainer 0 saw 500 rows") && said.contains("trainer 1 saw 500 rows"), "{said}");
    assert!(said.contains("every row once: true"), "{said}");
}

#[test]
fn predict_asks_a_model_that_it_serves_itself() {
    let home = Home::new();
    let (file, models) = (home.dir.path().join("mlp.onnx"), home.dir.path().join("models"));
    std::fs::create_dir(&models).unwrap();
    let (file, folder) = (file.to_str().unwrap(), models.to_str().unwrap());
    home.ok(["model", "init", "mlp", "--inputs", "2", "--classes", "2", file]);
    home.ok(["model", "import", file, "--name", "m", "--models", folder]);
    let said = program(Command::new(example("predict")).args([folder, "m"]));
    assert!(said.contains("version 1 answered") && said.contains("Fp32"), "{said}");
}
