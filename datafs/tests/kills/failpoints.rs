//! The failpoints of a debug build, found in the sources.

use std::fs;
use std::path::Path;

/// The names of all failpoints, sorted.
pub(crate) fn all() -> Vec<String> {
    let mut found = Vec::new();
    find(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut found);
    found.sort();
    found.dedup();
    found
}

fn find(directory: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            find(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            let calls = text.split("failpoint::hit(\"").skip(1);
            found.extend(calls.filter_map(|call| Some(call.split_once('"')?.0.to_owned())));
        }
    }
}

#[test]
fn there_are_failpoints_at_every_kind_of_step() {
    let all = all();
    for kind in ["group-", "write-", "object-", "pack-", "compact-", "gc-", "session-", "checkpoint-"] {
        assert!(all.iter().any(|name| name.starts_with(kind)), "none of {kind}: {all:?}");
    }
}
