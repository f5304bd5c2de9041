//! Build script of the trainer: compiles `proto/coordinator.proto` to Rust without `protoc`.
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto/coordinator.proto");
    let files = protox::compile(["proto/coordinator.proto"], ["proto"])?;
    tonic_prost_build::configure().compile_fds(files)?;
    Ok(())
}
