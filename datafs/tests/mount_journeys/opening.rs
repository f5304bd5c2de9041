//! Journeys with all opening modes: they give the same bytes, and files of a snapshot of small files are opened
//! without requests.
#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;

use millrace_datafs::mount::{self, MountOptions, Open};

use super::{Home, errno, names, pattern};

#[test]
fn snapshots_read_the_same_whichever_way_they_are_opened() {
    let Some(home) = Home::new() else { return };
    let live = home.datafs.view(&"data".parse().unwrap()).unwrap();
    let sizes = [0, 1, 4_095, 8_192, 300_000, 3_000_001];
    for (i, size) in sizes.iter().enumerate() {
        live.write_file(&format!("dir/{i}"), &pattern(*size, i as u64)).unwrap();
    }
    home.snapshot("v1");
    live.write_file("dir/1", b"changed since").unwrap();
    for open in [Open::Auto, Open::Passthrough, Open::Pages] {
        let view = home.datafs.view(&"data@v1".parse().unwrap()).unwrap();
        let at = home.at(&open.to_string());
        let mount = mount::mount(view, &at, MountOptions { open, ..MountOptions::default() }).unwrap();
        assert_eq!(names(&at.join("dir")), ["0", "1", "2", "3", "4", "5"]);
        // The kernel serves the second round from its cache.
        for _ in 0..2 {
            for (i, size) in sizes.iter().enumerate() {
                let path = at.join(format!("dir/{i}"));
                assert!(fs::read(&path).unwrap() == pattern(*size, i as u64), "{open} {i}");
                assert_eq!(fs::metadata(&path).unwrap().len(), *size as u64);
            }
        }
        let large = File::open(at.join("dir/5")).unwrap();
        let mut end = [0; 100];
        assert_eq!(large.read_at(&mut end, 2_999_950).unwrap(), 51);
        assert_eq!(errno(File::open(at.join("dir/none"))), libc::ENOENT);
        assert_eq!(errno(File::create(at.join("dir/1"))), libc::EROFS);
        let opening = mount.opening().clone();
        match open {
            Open::Auto => assert_eq!(opening.reason, "6 files, 540 KiB on average"),
            Open::Pages => assert_eq!(opening.way, Open::Pages),
            Open::Passthrough => {}
        }
        drop(large);
        mount.unmount().unwrap();
    }
}

#[test]
fn a_mount_of_small_files_outlives_more_of_them_than_it_remembers() {
    let Some(home) = Home::new() else { return };
    let live = home.datafs.view(&"data".parse().unwrap()).unwrap();
    const FILES: usize = 5_000;
    let mount = home.mount("data");
    for i in 0..FILES {
        fs::write(mount.path().join(i.to_string()), i.to_string()).unwrap();
    }
    drop(live);
    home.snapshot("v1");
    let snapshot = home.mount("data@v1");
    assert_eq!(snapshot.opening().way, Open::Pages);
    for i in (0..FILES).chain(0..10) {
        assert_eq!(fs::read_to_string(snapshot.path().join(i.to_string())).unwrap(), i.to_string());
    }
    snapshot.unmount().unwrap();
    mount.unmount().unwrap();
}
