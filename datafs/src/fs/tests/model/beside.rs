//! Maintenance beside the steps of the model: other sessions compact, collect and make snapshots all the
//! time. None of that may change what a step sees.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use super::world::v;
use crate::compact::Compact;
use crate::datafs::Datafs;
use crate::fs::View;
use crate::name::{Name, VolumeSpec};
use crate::node::FileKind;

/// Thresholds that make compaction rewrite everything it may.
pub(super) const ALL: Compact = Compact { extents_min: 1, extent_bytes_min: 1 << 20, live_percent_min: 100 };

/// The threads of the maintenance. Dropping it stops them.
pub(super) struct Beside {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Beside {
    /// Starts a compactor, a collector and a maker of snapshots, each with a separate datafs.
    pub(super) fn start(compactor: Datafs, collector: Datafs, snapshots: Datafs) -> Beside {
        let stop = Arc::new(AtomicBool::new(false));
        let run = |mut round: Box<dyn FnMut() + Send>| {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    round();
                }
            })
        };
        let mut number = 0;
        let threads = vec![
            run(Box::new(move || {
                compactor.compact(None, &ALL).unwrap();
            })),
            run(Box::new(move || {
                collector.gc().unwrap();
            })),
            run(Box::new(move || {
                number += 1;
                one_snapshot(&snapshots, number);
            })),
        ];
        Beside { stop, threads }
    }

    /// Ends the maintenance; panics if one of its threads has.
    pub(super) fn finish(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in std::mem::take(&mut self.threads) {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in std::mem::take(&mut self.threads) {
            let _ = thread.join();
        }
    }
}

/// A snapshot, taken at any moment, reads the same before and after a compaction and a collection.
fn one_snapshot(datafs: &Datafs, number: u64) {
    let name: Name = format!("beside-{number}").parse().unwrap();
    datafs.snapshot_create(&v(), &name).unwrap();
    let spec = VolumeSpec::at(v(), name.clone());
    let first = everything(&datafs.view(&spec).unwrap());
    datafs.compact(None, &ALL).unwrap();
    datafs.gc().unwrap();
    let second = everything(&datafs.view(&spec).unwrap());
    let differs = first.iter().find(|(path, seen)| second.get(*path) != Some(seen)).map(|(path, _)| path);
    assert!(first.len() == second.len() && differs.is_none(), "snapshot {number} has changed at {differs:?}");
    datafs.snapshot_delete(&v(), &name).unwrap();
}

/// Size, links and a checksum of each file, and the kind of everything else, by path.
fn everything(view: &View) -> BTreeMap<String, (u64, u32, u32)> {
    let mut found = BTreeMap::new();
    let mut folders = vec![String::new()];
    while let Some(folder) = folders.pop() {
        for entry in view.list(&folder).unwrap() {
            let path = if folder.is_empty() { entry.name } else { format!("{folder}/{}", entry.name) };
            // The attributes of a symbolic link itself.
            let attr = entry.stat;
            let sum = match attr.kind {
                FileKind::File => crc32c::crc32c(&view.read_file(&path).unwrap()),
                FileKind::Directory => {
                    folders.push(path.clone());
                    0
                }
                _ => 0,
            };
            found.insert(path, (attr.size, attr.nlink, sum));
        }
    }
    found
}
