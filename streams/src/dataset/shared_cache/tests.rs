//! Tests of the two levels of the cache: what homes share, what stays at home, and failures of each level.
use std::path::Path;

use millrace_datafs::{Config, Datafs};

use super::*;

const KEY: &str = "feed/dataset/0123";

/// Two homes on one metadata, with a snapshot `v@a`.
struct Homes {
    dirs: [tempfile::TempDir; 2],
    datafs: [Datafs; 2],
}

impl Homes {
    fn new() -> Homes {
        let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let first = dirs[0].path();
        let config = Config {
            meta_file: first.join("datafs/meta.sqlite"),
            store_dir: first.join("datafs/objects"),
            gc_interval_ms: 0,
            ..Config::default()
        };
        let datafs = dirs.each_ref().map(|dir| Datafs::open(dir.path(), &config).unwrap());
        datafs[0].volume_create(&"v".parse().unwrap()).unwrap();
        datafs[0].snapshot_create(&"v".parse().unwrap(), &"a".parse().unwrap()).unwrap();
        Homes { dirs, datafs }
    }

    fn view(&self) -> View {
        self.datafs[0].view(&"v@a".parse().unwrap()).unwrap()
    }

    fn cache(&self, home: usize) -> SharedCache {
        let view = self.datafs[home].view(&"v@a".parse().unwrap()).unwrap();
        SharedCache::new(FolderCache::new(self.dirs[home].path(), "snapshot/v@a#1".to_owned()), view)
    }
}

fn entries(home: &Path) -> usize {
    std::fs::read_dir(home.join("feed")).map_or(0, Iterator::count)
}

/// Bytes that do not compress.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 7u64;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..len).map(next).collect()
}

#[test]
fn another_home_finds_an_entry_and_keeps_it() {
    let homes = Homes::new();
    let [one, other] = [0, 1].map(|home| homes.cache(home));
    assert_eq!(other.get(KEY).unwrap(), None);
    // Larger than an entry of the metadata may be, but not once it is compressed.
    let value = b"{\"rows\":1000}".repeat(200_000);
    assert!(value.len() > DERIVED_BYTES_MAX);
    one.put(KEY, &value).unwrap();
    assert_eq!(entries(homes.dirs[1].path()), 0);
    assert!(other.get(KEY).unwrap().as_ref() == Some(&value));
    assert_eq!(other.get("feed/dataset/another").unwrap(), None);
    assert_eq!(entries(homes.dirs[1].path()), 1);
    // From now on without the metadata's entry.
    homes.view().derived_put(&name(KEY), b"no entry").unwrap();
    assert!(other.get(KEY).unwrap().as_ref() == Some(&value));
}

#[test]
fn a_large_entry_stays_in_the_home() {
    let homes = Homes::new();
    let value = noise(DERIVED_BYTES_MAX + 1_000);
    homes.cache(0).put(KEY, &value).unwrap();
    assert!(homes.cache(0).get(KEY).unwrap().as_ref() == Some(&value));
    assert_eq!(homes.cache(1).get(KEY).unwrap(), None);
}

#[test]
fn foreign_contents_are_ignored_and_replaced() {
    let homes = Homes::new();
    let bomb = zstd::bulk::compress(&vec![0; ENTRY_BYTES_MAX + 1], ZSTD_LEVEL).unwrap();
    for content in [&b"{}"[..], &bomb[..]] {
        homes.view().derived_put(&name(KEY), content).unwrap();
        assert_eq!(homes.cache(1).get(KEY).unwrap(), None);
    }
    homes.cache(0).put(KEY, b"value").unwrap();
    assert_eq!(homes.cache(1).get(KEY).unwrap().as_deref(), Some(&b"value"[..]));
}

#[test]
fn metadata_that_refuses_an_entry_costs_nothing() {
    let homes = Homes::new();
    let cache = homes.cache(0);
    homes.datafs[0].snapshot_delete(&"v".parse().unwrap(), &"a".parse().unwrap()).unwrap();
    assert!(cache.share(KEY, b"value").is_err());
    cache.put(KEY, b"value").unwrap();
    assert_eq!(cache.get(KEY).unwrap().as_deref(), Some(&b"value"[..]));
}

#[test]
fn a_home_that_cannot_keep_entries_reads_those_of_the_metadata() {
    let homes = Homes::new();
    std::fs::write(homes.dirs[1].path().join("feed"), b"no folder").unwrap();
    let cache = homes.cache(1);
    assert!(cache.get(KEY).is_err());
    assert!(cache.put(KEY, b"value").is_err());
    assert_eq!(cache.get(KEY).unwrap().as_deref(), Some(&b"value"[..]));
    assert_eq!(homes.cache(0).get(KEY).unwrap().as_deref(), Some(&b"value"[..]));
}
