//! Elastic, deterministic training: ONNX in, ONNX out.
pub mod fixed;
pub mod optim;
