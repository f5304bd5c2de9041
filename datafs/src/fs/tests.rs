//! Tests of the file-system semantics through the library.
mod buckets;
mod edges;
mod extended;
mod faults;
mod model;
mod on_postgres;
mod protection;
mod rates;
mod reference;
mod semantics;
mod streams;

use std::path::Path;

use super::View;
use crate::config::Config;
use crate::datafs::Datafs;
use crate::fs::Owner;
use crate::meta::engine::Order;

/// Small buffers and no background work: everything happens when a test calls for it.
pub(super) fn config() -> Config {
    Config { write_buffer_bytes_max: 6_000, garbage_grace_ms: 0, gc_interval_ms: 0, ..Config::default() }
}

pub(crate) fn open(home: &Path) -> Datafs {
    open_with(home, config())
}

fn open_with(home: &Path, mut config: Config) -> Datafs {
    on_postgres::put_into(&mut config, home);
    Datafs::open(home, &config).unwrap()
}

pub(crate) fn owner() -> Owner {
    Owner { uid: 1000, gid: 100 }
}

/// A fresh volume `v`, live.
pub(crate) fn volume(datafs: &Datafs) -> View {
    datafs.volume_create(&"v".parse().unwrap()).unwrap();
    datafs.view(&"v".parse().unwrap()).unwrap()
}

/// A home and its volume `v`.
pub(crate) fn setup() -> (tempfile::TempDir, Datafs, View) {
    setup_with(config())
}

/// [`setup`] with another configuration.
pub(crate) fn setup_with(config: Config) -> (tempfile::TempDir, Datafs, View) {
    let home = tempfile::tempdir().unwrap();
    let datafs = open_with(home.path(), config);
    let view = volume(&datafs);
    (home, datafs, view)
}

/// How many metadata rows a table (first byte of the key) has.
pub(crate) fn rows(datafs: &Datafs, table: u8) -> usize {
    datafs
        .shared
        .meta
        .view(|txn| Ok(txn.scan(&[table], &[table + 1], Order::Ascending, usize::MAX)?.len()))
        .unwrap()
}

/// How many objects are on the store.
pub(crate) fn objects(home: &Path) -> usize {
    let mut count = 0;
    for directory in std::fs::read_dir(home.join("datafs/objects")).unwrap() {
        for file in std::fs::read_dir(directory.unwrap().path()).into_iter().flatten() {
            let name = file.unwrap().file_name().into_string().unwrap();
            count += usize::from(!name.ends_with(".sums"));
        }
    }
    count
}
