//! Model serving: bundles, ONNX Runtime sessions, Open Inference Protocol, topic to topic.
