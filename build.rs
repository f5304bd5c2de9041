//! Compiles the protocol of KEDA's external scalers into a tonic service, without `protoc`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=src/scaler/externalscaler.proto");
    let descriptors = protox::compile(["externalscaler.proto"], ["src/scaler"])?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
