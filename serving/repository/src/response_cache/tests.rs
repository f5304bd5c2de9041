//! Tests of keys, eviction order and memory use.
use std::collections::HashSet;
use std::time::Instant;

use millrace_bundle::{Datatype, FileEntry, Lineage, Signature, TensorSpec};
use proptest::prelude::*;

use super::*;
use millrace_serving_core::tensor::TensorHandle;

fn work(inputs: Vec<Tensor>, outputs: Vec<usize>) -> Work {
    Work {
        inputs: inputs.into_iter().map(TensorHandle::Alone).collect(),
        outputs,
        stays: Vec::new(),
        rows: 0,
        queued: Instant::now(),
        deadline: None,
        answer_by: None,
        level: 0,
        client: None,
    }
}

fn fp32(shape: &[i64], values: &[f32]) -> Tensor {
    Tensor::fp32("x", shape.to_vec(), values.to_vec()).unwrap()
}

fn text(values: &[&str]) -> Tensor {
    let values: Vec<_> = values.iter().map(|value| Bytes::copy_from_slice(value.as_bytes())).collect();
    Tensor::new("x", vec![values.len() as i64], Data::Bytes(values)).unwrap()
}

fn spec(name: &str, datatype: Datatype) -> TensorSpec {
    TensorSpec { name: name.into(), datatype, shape: vec![-1] }
}

fn manifest(name: &str, version: u64, sha256: &str) -> Manifest {
    Manifest {
        format_version: 1,
        name: name.into(),
        version,
        files: vec![FileEntry { path: "model.onnx".into(), bytes: 1, sha256: sha256.into() }],
        signature: Signature {
            inputs: vec![spec("x", Datatype::Fp32)],
            outputs: vec![spec("y", Datatype::Fp32), spec("z", Datatype::Fp32)],
        },
        lineage: Lineage::default(),
        metrics: Default::default(),
        fields: Default::default(),
        created_at: String::new(),
    }
}

fn key(number: u8) -> Key {
    Key([number; 32])
}

fn sizes(cache: &ResponseCache) -> (usize, usize) {
    let state = cache.state.lock();
    (state.bytes, state.entries.values().map(|entry| size(&entry.outputs)).sum())
}

#[test]
fn different_requests_have_different_keys() {
    let head = VersionDigest::new(&manifest("m", 1, "a"));
    let raw = |data| Tensor { name: "x".into(), shape: vec![4], data };
    let works = [
        work(vec![fp32(&[2], &[1.0, 2.0])], vec![0]),
        work(vec![fp32(&[2], &[1.0, 2.5])], vec![0]),
        work(vec![fp32(&[2], &[2.0, 1.0])], vec![0]),
        work(vec![fp32(&[1, 2], &[1.0, 2.0])], vec![0]),
        work(vec![fp32(&[2, 1], &[1.0, 2.0])], vec![0]),
        work(vec![fp32(&[2], &[1.0, 2.0])], vec![1]),
        work(vec![fp32(&[2], &[1.0, 2.0])], vec![0, 1]),
        work(vec![fp32(&[2], &[1.0, 2.0])], vec![1, 0]),
        work(vec![fp32(&[1], &[1.0]), fp32(&[1], &[2.0])], vec![0]),
        work(vec![fp32(&[1], &[2.0]), fp32(&[1], &[1.0])], vec![0]),
        work(vec![text(&["ab", "c"])], vec![0]),
        work(vec![text(&["a", "bc"])], vec![0]),
        work(vec![text(&["abc", ""])], vec![0]),
        work(vec![text(&["abc"])], vec![0]),
        work(vec![raw(Data::Bool(vec![true, false, true, true]))], vec![0]),
        work(vec![raw(Data::Bool(vec![true, true, false, true]))], vec![0]),
        work(vec![fp32(&[1], &[0.0])], vec![0]),
        work(vec![fp32(&[1], &[-0.0])], vec![0]),
    ];
    let keys: HashSet<Key> = works.iter().map(|work| head.key(work).unwrap()).collect();
    assert_eq!(keys.len(), works.len());
    // The time and the client of a request do not change its key.
    let again = Work {
        rows: 2,
        level: 3,
        client: Some("127.0.0.1:1".parse().unwrap()),
        deadline: Some(Instant::now()),
        ..work(vec![fp32(&[2], &[1.0, 2.0])], vec![0])
    };
    assert_eq!(head.key(&again).unwrap(), head.key(&works[0]).unwrap());
}

#[test]
fn all_elements_count_in_the_key_beyond_one_block() {
    let head = VersionDigest::new(&manifest("m", 1, "a"));
    let values = |at: usize| {
        let mut values = vec![0_i64; 1_300];
        values[at] = 1;
        Tensor::new("x", vec![1_300], Data::Int64(values)).unwrap()
    };
    let keys: HashSet<Key> =
        (0..1_300).map(|at| head.key(&work(vec![values(at)], vec![0])).unwrap()).collect();
    assert_eq!(keys.len(), 1_300);
}

#[test]
fn different_versions_have_different_keys() {
    let other = |change: fn(&mut Manifest)| {
        let mut manifest = manifest("m", 1, "a");
        change(&mut manifest);
        manifest
    };
    let manifests = [
        manifest("m", 1, "a"),
        manifest("n", 1, "a"),
        manifest("m", 2, "a"),
        manifest("m", 1, "b"),
        other(|manifest| manifest.signature.inputs[0].datatype = Datatype::Int32),
        // The indices of the outputs differ.
        other(|manifest| manifest.signature.outputs.reverse()),
        other(|manifest| drop(manifest.signature.outputs.remove(0))),
    ];
    let asked = work(vec![fp32(&[2], &[1.0, 2.0])], vec![0]);
    let keys: HashSet<Key> =
        manifests.iter().map(|manifest| VersionDigest::new(manifest).key(&asked).unwrap()).collect();
    assert_eq!(keys.len(), manifests.len());
    // Equal content is the same version, whenever it was created.
    let again = other(|manifest| manifest.created_at = "2026-11-01T00:00:00Z".into());
    assert!(keys.contains(&VersionDigest::new(&again).key(&asked).unwrap()));
}

#[test]
fn response_larger_than_the_cache_is_not_stored_and_evicts_nothing() {
    let cache = ResponseCache::new(600).unwrap();
    cache.put(key(1), &[fp32(&[1], &[1.0])]);
    cache.put(key(2), &[fp32(&[1000], &[1.0; 1000])]);
    assert!(cache.get(&key(1)).is_some());
    assert!(cache.get(&key(2)).is_none());
    assert!(ResponseCache::new(0).is_none());
    let none = ResponseCache::new(1).unwrap();
    none.put::<Tensor>(key(1), &[]);
    assert!(none.get(&key(1)).is_none());
}

#[test]
fn cached_bytes_do_not_keep_their_message_and_count_their_overhead() {
    let message = Bytes::from(vec![b'a'; 1 << 20]);
    let part = Tensor::new("x", vec![2], Data::Bytes(vec![message.slice(..2), message.slice(7..9)])).unwrap();
    let cache = ResponseCache::new(1 << 20).unwrap();
    cache.put(key(1), std::slice::from_ref(&part));
    let Data::Bytes(given) = &part.data else { unreachable!() };
    let kept = cache.get(&key(1)).unwrap();
    assert_eq!(kept[0], part);
    let Data::Bytes(kept) = &kept[0].data else { unreachable!() };
    assert_ne!(kept[0].as_ptr(), given[0].as_ptr());
    // A million empty strings still take memory.
    assert!(size(&[text(&[""; 1_000])]) >= 1_000 * size_of::<Bytes>());
}

#[test]
fn concurrent_threads_keep_the_cache_within_its_bound() {
    let cache = ResponseCache::new(4_000).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4_u8 {
            let cache = &cache;
            scope.spawn(move || {
                for round in 0..2_000_u32 {
                    let number = (round % 23) as u8;
                    match cache.get(&key(number)) {
                        Some(found) => assert_eq!(found[0].data, Data::Fp32(vec![f32::from(number); 8])),
                        None => cache.put(key(number), &[fp32(&[8], &[f32::from(number); 8])]),
                    }
                    if round % 97 == u32::from(thread) {
                        let (counted, held) = sizes(cache);
                        assert!(counted == held && held <= 4_000, "{counted} {held}");
                    }
                }
            });
        }
    });
}

proptest! {
    /// Against a list with the most recently used entry last.
    #[test]
    fn least_recently_used_entry_is_evicted_first(
        steps in prop::collection::vec((any::<bool>(), 0_u8..12, 1_usize..40), 1..200),
    ) {
        const BYTES_MAX: usize = 2_000;
        let cache = ResponseCache::new(BYTES_MAX).unwrap();
        let mut model: Vec<(u8, Vec<Tensor>)> = Vec::new();
        let total = |model: &[(u8, Vec<Tensor>)]| model.iter().map(|(_, outputs)| size(outputs)).sum::<usize>();
        for (puts, number, len) in steps {
            let known = model.iter().position(|(known, _)| *known == number).map(|at| model.remove(at));
            if puts {
                let outputs = vec![fp32(&[len as i64], &vec![f32::from(number); len])];
                cache.put(key(number), &outputs);
                model.push((number, outputs));
                while total(&model) > BYTES_MAX {
                    model.remove(0);
                }
            } else {
                let found = cache.get(&key(number)).map(|outputs| outputs.to_vec());
                prop_assert_eq!(found.as_ref(), known.as_ref().map(|(_, outputs)| outputs));
                model.extend(known);
            }
            let (counted, held) = sizes(&cache);
            prop_assert_eq!(counted, held);
            prop_assert_eq!(counted, total(&model));
        }
    }
}
