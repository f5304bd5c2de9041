//! Tests of the row rules: accepted and refused graphs for each, and random graphs that are run by ONNX Runtime.
mod forms;
mod idioms;
mod operators;
mod random;
mod readings;
mod support;
