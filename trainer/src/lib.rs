//! Elastic, deterministic training: ONNX in, ONNX out.
