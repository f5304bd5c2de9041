//! The rules, each with graphs that it accepts and graphs that it refuses, and ONNX Runtime's word on random ones.
#![allow(clippy::unwrap_used)]

mod forms;
mod idioms;
mod operators;
mod random;
mod readings;
mod support;
