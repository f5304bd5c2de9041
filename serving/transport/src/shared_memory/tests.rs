//! Tests of regions without a server: keys, bounds, and objects that change.
use std::path::PathBuf;

use serde_json::{Map, Value, json};

use super::{Inputs, SharedMemory};
use millrace_serving_core::error::InferError;
use millrace_serving_core::parameters::ParameterOwner;

/// A shared memory object for one test, removed when dropped.
struct Object(String);

impl Object {
    fn new(test: &str, bytes: &[u8]) -> Object {
        let object = Object(format!("/millrace-region-{}-{test}", std::process::id()));
        std::fs::write(object.path(), bytes).unwrap();
        object
    }

    fn path(&self) -> PathBuf {
        PathBuf::from(format!("/dev/shm{}", self.0))
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.path());
    }
}

fn place(region: &str, offset: u64, byte_size: u64) -> Map<String, Value> {
    json!({
        "shared_memory_region": region, "shared_memory_offset": offset, "shared_memory_byte_size": byte_size,
    })
    .as_object()
    .unwrap()
    .clone()
}

#[test]
fn region_shares_memory_with_its_object() {
    let object = Object::new("window", b"0123456789");
    let memory = SharedMemory::new(true, 1 << 20);
    memory.register("r", &object.0, 2, 6).unwrap();
    let read = |offset, size| Inputs::of(&memory).read("x", &place("r", offset, size));
    assert_eq!(read(0, 6).unwrap().unwrap(), "234567");
    assert_eq!(read(5, 1).unwrap().unwrap(), "7");
    assert_eq!(read(6, 0).unwrap().unwrap(), "");
    for (offset, size) in [(0, 7), (6, 1), (7, 0), (u64::MAX, 1), (1, u64::MAX), (u64::MAX, u64::MAX)] {
        assert!(matches!(read(offset, size), Err(InferError::Invalid { .. })), "{offset} {size}");
    }
    let span = memory.span(ParameterOwner("output", "y"), &place("r", 4, 2)).unwrap().unwrap();
    span.write(b"ab").unwrap();
    assert!(matches!(span.write(b"abc"), Err(InferError::Invalid { .. })));
    assert_eq!(std::fs::read(object.path()).unwrap(), b"012345ab89");
}

#[test]
fn truncated_object_is_an_error_and_is_not_extended() {
    let object = Object::new("cut", &[7; 64]);
    let memory = SharedMemory::new(true, 1 << 20);
    memory.register("r", &object.0, 0, 64).unwrap();
    let span = memory.span(ParameterOwner("output", "y"), &place("r", 32, 32)).unwrap().unwrap();
    std::fs::OpenOptions::new().write(true).open(object.path()).unwrap().set_len(40).unwrap();
    for error in [span.read().unwrap_err(), span.write(&[1; 32]).unwrap_err()] {
        assert!(matches!(error, InferError::Invalid { .. }), "{error}");
        assert!(error.to_string().contains("cut to 40"), "{error}");
    }
    assert_eq!(std::fs::read(object.path()).unwrap(), [7; 40]);
    assert_eq!(Inputs::of(&memory).read("x", &place("r", 0, 40)).unwrap().unwrap().len(), 40);
}

#[test]
fn a_region_outlives_its_key() {
    let object = Object::new("outlives", b"data");
    let memory = SharedMemory::new(true, 1 << 20);
    memory.register("r", &object.0, 0, 4).unwrap();
    std::fs::remove_file(object.path()).unwrap();
    assert_eq!(Inputs::of(&memory).read("x", &place("r", 0, 4)).unwrap().unwrap(), "data");
    memory.unregister("r").unwrap();
    memory.unregister("r").unwrap();
    let error = Inputs::of(&memory).read("x", &place("r", 0, 4)).unwrap_err();
    assert!(matches!(error, InferError::NotFound { .. }), "{error}");
    assert!(memory.register("r", &object.0, 0, 4).is_err());
}

#[test]
fn the_inputs_of_a_request_share_one_limit() {
    let object = Object::new("limit", &[0; 100]);
    let memory = SharedMemory::new(true, 100);
    memory.register("r", &object.0, 0, 100).unwrap();
    let mut inputs = Inputs::of(&memory);
    inputs.read("a", &place("r", 0, 60)).unwrap();
    inputs.read("b", &place("r", 0, 40)).unwrap();
    let error = inputs.read("c", &place("r", 0, 1)).unwrap_err();
    assert_eq!(error, InferError::TooLarge { bytes: 101, bytes_max: 100 });
    assert!(inputs.read("d", &Map::new()).unwrap().is_none());
}

#[test]
fn regions_are_bounded_in_number() {
    let object = Object::new("bounded", b"x");
    let memory = SharedMemory { regions_max: 2, ..SharedMemory::new(true, 1) };
    memory.register("a", &object.0, 0, 1).unwrap();
    memory.register("b", &object.0, 0, 1).unwrap();
    let error = memory.register("c", &object.0, 0, 1).unwrap_err();
    assert!(matches!(error, InferError::Unavailable { .. }), "{error}");
    assert!(error.to_string().contains("limit is 2"), "{error}");
    assert!(matches!(memory.register("a", &object.0, 0, 1), Err(InferError::Exists { .. })));
    memory.unregister("").unwrap();
    assert!(memory.status("").unwrap().is_empty());
    memory.register("c", &object.0, 0, 1).unwrap();
}
