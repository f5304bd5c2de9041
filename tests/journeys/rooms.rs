//! Tests of the dependencies between crates, and of seams inside them.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use crate::support::{program, project};

/// Allowed direct dependencies of each crate on other crates, as in ARCHITECTURE.md.
const ALLOWED: [(&str, &[&str]); 8] = [
    ("testing", &[]),
    ("datafs", &[]),
    ("bundle", &[]),
    ("streams", &["datafs"]),
    ("ingest", &["streams", "datafs"]),
    ("serving", &["bundle", "streams", "datafs"]),
    ("trainer", &["bundle", "streams", "datafs"]),
    ("fuzz", &["bundle", "datafs", "streams", "ingest", "serving", "trainer"]),
];

#[test]
fn rooms_depend_on_each_other_only_as_allowed() {
    let tree = program(Command::new(env!("CARGO")).current_dir(project()).args([
        "tree",
        "--workspace",
        "--offline",
        "--locked",
        "--edges",
        "normal,build",
        "--depth",
        "1",
        "--prefix",
        "depth",
        "--format",
        "{p}",
    ]));
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut room = None;
    for line in tree.lines() {
        let Some(package) = line.trim_start_matches(|c: char| c.is_ascii_digit()).split(' ').next() else {
            continue;
        };
        let name = package.strip_prefix("millrace-").map(str::to_owned);
        if line.starts_with('0') {
            room = name;
            if let Some(room) = &room {
                found.entry(room.clone()).or_default();
            }
        } else if let (Some(room), Some(name)) = (&room, name) {
            found.entry(room.clone()).or_default().insert(name);
        }
    }
    assert_eq!(
        found.keys().map(String::as_str).collect::<BTreeSet<_>>(),
        ALLOWED.iter().map(|(room, _)| *room).collect()
    );
    for (room, allowed) in ALLOWED {
        for other in &found[room] {
            assert!(allowed.contains(&other.as_str()), "{room} must not depend on {other}");
        }
    }
}

/// Serving must not depend on Kafka except in its pipe, and volumes must not depend on Parquet.
#[test]
fn seams_hold_inside_the_rooms() {
    let forbidden = [("serving/src", "rdkafka", &["pipe"][..]), ("datafs/src", "parquet::", &[])];
    for (folder, word, except) in forbidden {
        for file in crate::support::files_below(&project().join(folder), "rs") {
            let path = file.display().to_string();
            if except.iter().any(|part| path.contains(part)) {
                continue;
            }
            let text = std::fs::read_to_string(&file).unwrap();
            let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
            assert!(!code.into_iter().any(|line| line.contains(word)), "{path} names {word}");
        }
    }
}
