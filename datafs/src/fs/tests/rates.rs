//! Rates of operations on names through the library, one thread. Prints figures and asserts nothing:
//! `cargo test -p millrace-datafs --release --lib rates -- --ignored --nocapture`.
#![allow(clippy::print_stdout)]

use std::time::{Duration, Instant};

use super::{open, owner, volume};
use crate::fs::OpenFlags;

/// Folders and files in each: the shape of mdtest, flattened.
const FOLDERS: u64 = 250;
const FILES: u64 = 80;

fn print(figure: &str, count: u64, elapsed: Duration) {
    println!("{figure:<12} {:>9.0} /s", count as f64 / elapsed.as_secs_f64());
}

#[test]
#[ignore = "prints figures; run it alone: cargo test --release -p millrace-datafs --lib rates -- --ignored --nocapture"]
fn rates_of_names() {
    let home = tempfile::tempdir_in(".").unwrap();
    let datafs = open(home.path());
    let view = volume(&datafs);
    let all = FOLDERS * FILES;
    let begin = Instant::now();
    let folders: Vec<_> = (0..FOLDERS)
        .map(|i| view.mkdir(view.root(), format!("folder-{i}").as_ref(), 0o755, owner()).unwrap().node)
        .collect();
    let name = |i: u64| format!("file.mdtest.0.{i}");
    for folder in &folders {
        for i in 0..FILES {
            let flags = OpenFlags { exclusive: true, ..OpenFlags::READ_WRITE };
            drop(view.create(*folder, name(i).as_ref(), 0o644, owner(), flags).unwrap());
        }
    }
    print("create", all, begin.elapsed());
    let stat = |figure| {
        let begin = Instant::now();
        for folder in &folders {
            for i in 0..FILES {
                let attr = view.lookup(*folder, name(i).as_ref()).unwrap();
                view.getattr(attr.node).unwrap();
            }
        }
        print(figure, all, begin.elapsed());
    };
    stat("stat");
    let list = |figure| {
        let begin = Instant::now();
        let mut listed = 0;
        for folder in &folders {
            let mut cursor = 0;
            loop {
                let page = view.readdir_attrs(*folder, cursor, 64).unwrap();
                let Some((last, _)) = page.last() else { break };
                cursor = last.cursor;
                listed += page.len() as u64;
            }
        }
        print(figure, listed, begin.elapsed());
    };
    list("list");
    drop(view);
    drop(datafs);
    // With empty caches in memory.
    let datafs = open(home.path());
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    let stat_cold = Instant::now();
    for folder in &folders {
        for i in 0..FILES {
            view.lookup(*folder, name(i).as_ref()).unwrap();
        }
    }
    print("lookup_cold", all, stat_cold.elapsed());
    let mut times: Vec<_> = (0..100)
        .map(|i| {
            let begin = Instant::now();
            datafs.snapshot_create(&"v".parse().unwrap(), &format!("s{i}").parse().unwrap()).unwrap();
            begin.elapsed()
        })
        .collect();
    times.sort();
    println!("snapshot     p50 {:?} p99 {:?}", times[50], times[98]);
    let begin = Instant::now();
    for folder in &folders {
        for i in 0..FILES {
            view.unlink(*folder, name(i).as_ref()).unwrap();
        }
    }
    print("remove", all, begin.elapsed());
}
