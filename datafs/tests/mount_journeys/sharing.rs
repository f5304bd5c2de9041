//! Journeys with other writers of a mount's volume, with snapshots and with damage.
#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Home, errno, eventually, mount_of, names, pattern};

#[test]
pub(super) fn what_was_synced_is_there_for_everybody() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let path = mount.path().join("log");
    let mut file = File::create(&path).unwrap();
    let reader = home.again().view(&"data".parse().unwrap()).unwrap();
    let mut expected = Vec::new();
    for line in 0..20 {
        let text = format!("line {line}\n");
        file.write_all(text.as_bytes()).unwrap();
        file.sync_all().unwrap();
        expected.extend_from_slice(text.as_bytes());
        assert_eq!(reader.read_file("log").unwrap(), expected, "after sync {line}");
    }
    file.sync_data().unwrap();
    File::open(mount.path()).unwrap().sync_all().unwrap();
}

#[test]
fn a_name_that_one_mount_has_made_is_found_by_the_other_at_once() {
    let Some(home) = Home::new() else { return };
    let (one, other) = (home.mount("data"), mount_of(&home.again(), "data", &home.at("other")));
    for i in 0..500 {
        let (maker, finder) = if i % 50 < 25 { (&one, &other) } else { (&other, &one) };
        let (file, folder) = (format!("file.{i}"), format!("folder.{i}"));
        fs::create_dir(maker.path().join(&folder)).unwrap();
        assert!(fs::metadata(finder.path().join(&folder)).unwrap().is_dir(), "{folder}");
        fs::write(maker.path().join(&file), file.as_bytes()).unwrap();
        assert_eq!(fs::read(finder.path().join(&file)).unwrap(), file.as_bytes());
    }
}

#[test]
fn snapshots_appear_beside_the_live_tree() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let root = mount.path();
    fs::write(root.join("kept"), b"as it was").unwrap();
    fs::write(root.join("gone"), b"still here").unwrap();
    assert_eq!(names(&root.join(".snapshots")), Vec::<String>::new());
    home.snapshot("v1");
    fs::write(root.join("kept"), b"as it is").unwrap();
    fs::remove_file(root.join("gone")).unwrap();
    fs::write(root.join("new"), b"later").unwrap();

    assert_eq!(names(&root.join(".snapshots")), ["v1"]);
    let v1 = root.join(".snapshots/v1");
    assert_eq!(names(&v1), ["gone", "kept"]);
    assert_eq!(fs::read(v1.join("kept")).unwrap(), b"as it was");
    assert_eq!(fs::read(v1.join("gone")).unwrap(), b"still here");
    assert_eq!(fs::read(root.join("kept")).unwrap(), b"as it is");
    assert!(!names(root).contains(&".snapshots".to_owned()), "not in the way of cp and rm");

    for denied in [
        errno(fs::write(v1.join("kept"), b"no")),
        errno(fs::write(v1.join("more"), b"no")),
        errno(fs::remove_file(v1.join("gone"))),
        errno(fs::create_dir(v1.join("dir"))),
        errno(fs::rename(v1.join("kept"), v1.join("renamed"))),
    ] {
        assert_eq!(denied, libc::EROFS);
    }
    // Only root gets past the directory's mode.
    let denied = errno(fs::create_dir(root.join(".snapshots/v2")));
    assert!([libc::EROFS, libc::EACCES].contains(&denied), "{denied}");
    home.snapshot("v2");
    assert_eq!(names(&root.join(".snapshots")), ["v1", "v2"]);
    assert_eq!(fs::read(root.join(".snapshots/v2/kept")).unwrap(), b"as it is");
}

#[test]
fn a_mounted_snapshot_is_read_only_and_stays() {
    let Some(home) = Home::new() else { return };
    let large = pattern(6_000_003, 8);
    let live = home.mount("data");
    fs::write(live.path().join("large"), &large).unwrap();
    fs::write(live.path().join("small"), b"small").unwrap();
    home.snapshot("v1");
    let snapshot = home.mount("data@v1");
    let file = File::open(snapshot.path().join("large")).unwrap();
    fs::write(live.path().join("large"), b"replaced").unwrap();
    fs::remove_file(live.path().join("small")).unwrap();

    let mut read = vec![0; large.len()];
    file.read_exact_at(&mut read, 0).unwrap();
    assert!(read == large);
    assert_eq!(file.read_at(&mut [0; 10], large.len() as u64).unwrap(), 0, "it ends at its size");
    let second = File::open(snapshot.path().join("large")).unwrap();
    assert_eq!(second.metadata().unwrap().len(), large.len() as u64);
    assert!(fs::read(snapshot.path().join("large")).unwrap() == large);
    assert_eq!(fs::read(snapshot.path().join("small")).unwrap(), b"small");
    assert_eq!(errno(fs::write(snapshot.path().join("small"), b"no")), libc::EROFS);
    assert_eq!(errno(fs::remove_file(snapshot.path().join("small"))), libc::EROFS);
}

#[test]
pub(super) fn two_mounts_of_one_volume_see_each_others_closed_files() {
    let Some(home) = Home::new() else { return };
    let first = home.mount("data");
    let other = home.again();
    let second = mount_of(&other, "data", &home.at("second"));
    let (a, b) = (first.path().join("shared"), second.path().join("shared"));
    assert!(!b.exists());
    for round in 0..20usize {
        let (writer, reader) = if round % 2 == 0 { (&a, &b) } else { (&b, &a) };
        let bytes = pattern(1_000 + 40_000 * (round % 4), round as u64);
        fs::write(writer, &bytes).unwrap();
        assert_eq!(fs::metadata(reader).unwrap().len(), bytes.len() as u64, "round {round}");
        assert!(fs::read(reader).unwrap() == bytes, "round {round}");
    }
    // Equal lengths, so that only the contents differ.
    for round in 0..10u8 {
        fs::write(&a, [round; 5_000]).unwrap();
        assert_eq!(fs::read(&b).unwrap(), [round; 5_000]);
        let replacement = second.path().join("replacement");
        fs::write(&replacement, [round + 100; 5_000]).unwrap();
        fs::rename(&replacement, &b).unwrap();
        assert_eq!(fs::read(&a).unwrap(), [round + 100; 5_000]);
    }
    fs::remove_file(&a).unwrap();
    // The kernel may know the name until the notification.
    eventually("the removal", || !b.exists());
    assert_eq!(names(second.path()), Vec::<String>::new());
}

#[test]
fn a_damaged_object_is_an_error_and_not_wrong_bytes() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    fs::write(mount.path().join("file"), pattern(200_000, 1)).unwrap();
    fs::write(mount.path().join("other"), pattern(200_000, 2)).unwrap();
    // Closed data may be in memory for a moment.
    File::open(mount.path().join("other")).unwrap().sync_all().unwrap();
    let objects = home.dir.path().join("home/datafs/objects");
    let expected = pattern(200_000, 1);
    let mut damaged = 0;
    for fan_out in fs::read_dir(objects).unwrap() {
        for object in fs::read_dir(fan_out.unwrap().path()).into_iter().flatten() {
            let path = object.unwrap().path();
            let mut bytes = fs::read(&path).unwrap();
            // Files of this size may share an object.
            if let Some(at) = bytes.windows(1000).position(|part| *part == expected[..1000]) {
                bytes[at + 150_000] ^= 1;
                fs::write(&path, &bytes).unwrap();
                damaged += 1;
            }
        }
    }
    assert_eq!(damaged, 1);
    // The kernel of the writing mount still has the files cached.
    let other = home.again();
    let mount = mount_of(&other, "data", &home.at("other"));
    let file = File::open(mount.path().join("file")).unwrap();
    assert_eq!(errno(file.read_at(&mut [0; 1000], 149_900)), libc::EIO);
    assert!(fs::read(mount.path().join("other")).unwrap() == pattern(200_000, 2));
}

/// Applies a random operation of a program to the file at a path.
fn apply(path: &std::path::Path, step: u64, random: &mut impl FnMut(u64) -> u64) {
    let options = |append| {
        let mut options = fs::OpenOptions::new();
        options.read(true).create(true).append(append).write(true);
        options
    };
    let (offset, len) = (random(200_000), 1 + random(40_000) as usize);
    match random(6) {
        0 => options(true).open(path).unwrap().write_all(&pattern(len / 4, step)).unwrap(),
        1 => options(false).open(path).unwrap().set_len(offset).unwrap(),
        2 => fs::write(path, pattern(len, step)).unwrap(),
        3 => {
            let aside = path.with_extension("aside");
            fs::write(&aside, pattern(len, step)).unwrap();
            fs::rename(&aside, path).unwrap();
        }
        _ => {
            let file = options(false).open(path).unwrap();
            file.write_all_at(&pattern(len, step), offset).unwrap();
            let mut back = vec![0; len];
            file.read_exact_at(&mut back, offset).unwrap();
            assert!(back == pattern(len, step), "step {step}: a handle reads what it wrote");
            file.write_all_at(&pattern(len / 2, step + 1), offset / 2).unwrap();
        }
    }
}

#[test]
fn random_writers_on_two_mounts_make_the_file_that_a_local_disk_makes() {
    let Some(home) = Home::new() else { return };
    let first = home.mount("data");
    let other = home.again();
    let second = mount_of(&other, "data", &home.at("second"));
    let local = home.dir.path().join("reference");
    for seed in 1..=3u64 {
        let _ = fs::remove_file(&local);
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let name = format!("file-{seed}");
        for step in 0..120 {
            let mut random = |below: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 33) % below
            };
            let writer = if random(2) == 0 { &first } else { &second };
            let before = random(1 << 30);
            for path in [local.clone(), writer.path().join(&name)] {
                let mut fork = before;
                apply(&path, step, &mut |below| {
                    fork = fork.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (fork >> 33) % below
                });
            }
            let expected = fs::read(&local).unwrap();
            for mount in [&first, &second] {
                let path = mount.path().join(&name);
                let open = File::open(&path).unwrap();
                assert_eq!(open.metadata().unwrap().len(), expected.len() as u64);
                assert!(fs::read(&path).unwrap() == expected, "seed {seed} step {step}");
            }
        }
    }
}

#[test]
fn a_file_that_others_replace_is_never_missing() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let other = home.again().view(&"data".parse().unwrap()).unwrap();
    other.write_file("pointer", &[0; 5_000]).unwrap();
    let path = mount.path().join("pointer");
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for i in 1u64.. {
                other.write_file("pointer", &[i as u8; 5_000]).unwrap();
                if done.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        let _done = Stop(&done);
        for _ in 0..400 {
            let bytes = fs::read(&path).unwrap();
            assert!(bytes.len() == 5_000 && bytes.iter().all(|b| *b == bytes[0]));
            assert_eq!(fs::metadata(&path).unwrap().len(), 5_000);
        }
    });
}

/// Checks that files and links that another mount replaces without a pause always exist, whole.
fn replaced_without_a_pause(rounds: usize) {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let other = home.again();
    let second = mount_of(&other, "data", &home.at("second"));
    let root = second.path();
    let replace = |i: u64| {
        fs::write(root.join("new"), vec![i as u8; 3_000 + (i % 3) as usize * 3_000]).unwrap();
        fs::rename(root.join("new"), root.join("file")).unwrap();
        std::os::unix::fs::symlink(i.to_string(), root.join("new link")).unwrap();
        fs::rename(root.join("new link"), root.join("link")).unwrap();
    };
    replace(0);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| (1..).take_while(|_| !done.load(Ordering::Relaxed)).for_each(replace));
        let _done = Stop(&done);
        let (path, link) = (mount.path().join("file"), mount.path().join("link"));
        for round in 0..rounds {
            let mut file = File::open(&path).unwrap_or_else(|error| panic!("round {round}, open: {error}"));
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes).unwrap_or_else(|error| panic!("round {round}, read: {error}"));
            assert!(bytes.iter().all(|b| *b == bytes[0]) && bytes.len() % 3_000 == 0 && !bytes.is_empty());
            let attr = fs::metadata(&path).unwrap_or_else(|error| panic!("round {round}, stat: {error}"));
            assert_eq!(attr.len() % 3_000, 0);
            let target =
                fs::read_link(&link).unwrap_or_else(|error| panic!("round {round}, readlink: {error}"));
            target.to_str().unwrap().parse::<u64>().unwrap();
        }
    });
}

#[test]
fn what_others_replace_without_a_pause_is_always_there() {
    replaced_without_a_pause(1_000);
}

#[test]
#[ignore = "takes minutes, make test runs a tenth of it: cargo test -p millrace-datafs --test datafs what_others_replace_without_a_pause_is_always_there_for_long -- --ignored"]
fn what_others_replace_without_a_pause_is_always_there_for_long() {
    replaced_without_a_pause(20_000);
}

/// Tells a thread to end on drop, also when the test fails.
pub(super) struct Stop<'a>(pub(super) &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
