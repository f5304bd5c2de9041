//! Tests of file uses that the kernel handles without a request. It bounds copies, mappings and seeks by the
//! size that it knows, and resolves a name from its cache.
#![allow(unsafe_code)]

use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Barrier;

use super::Scene;

const ROUNDS: usize = 150;
const SHORT: usize = 1_000;
const LONG: usize = 100_000;

/// Uses an open file, and returns how many bytes it found.
type Use<'a> = &'a dyn Fn(&File) -> usize;
/// Changes the file at a path.
type Change<'a> = &'a dyn Fn(&Path);

/// The mount points of two mounts of one volume.
fn two(scene: &Scene) -> [PathBuf; 2] {
    [0, 1].map(|mount| scene.servers[mount].at.clone())
}

#[test]
fn two_mounts_that_take_turns_append_without_loss() {
    let Some(scene) = Scene::mounted() else { return };
    let mounts = two(&scene);
    File::create(mounts[0].join("turns")).unwrap();
    let mut expected = Vec::new();
    for turn in 0..4 * ROUNDS {
        let mut file =
            OpenOptions::new().read(true).write(true).open(mounts[turn % 2].join("turns")).unwrap();
        let end = file.seek(SeekFrom::End(0)).unwrap();
        assert_eq!(end, expected.len() as u64, "turn {turn}");
        let record = format!("{turn:08}").into_bytes();
        file.write_all(&record).unwrap();
        expected.extend(record);
    }
    assert!(fs::read(mounts[1].join("turns")).unwrap() == expected);
}

/// Copies until the kernel reports the end.
fn copied(call: impl Fn(&File, &File) -> isize, from: &File, dir: &Path) -> usize {
    copied_to(call, from, &tempfile::tempfile_in(dir).unwrap())
}

fn copied_to(call: impl Fn(&File, &File) -> isize, from: &File, to: &File) -> usize {
    let mut sum = 0;
    loop {
        match call(from, to) {
            0 => return sum,
            count => sum += usize::try_from(count).unwrap(),
        }
    }
}

fn by_copy(from: &File, to: &File) -> isize {
    let none = std::ptr::null_mut();
    // SAFETY: both files are open, and null offsets make the call use the files' own.
    unsafe { libc::copy_file_range(from.as_raw_fd(), none, to.as_raw_fd(), none, 1 << 20, 0) }
}

fn by_sendfile(from: &File, to: &File) -> isize {
    // SAFETY: both files are open, and a null offset makes the call use the file's own.
    unsafe { libc::sendfile(to.as_raw_fd(), from.as_raw_fd(), std::ptr::null_mut(), 1 << 20) }
}

/// The last byte of a file, through a mapping.
fn mapped_last(file: &File) -> u8 {
    let len = file.metadata().unwrap().len() as usize;
    // SAFETY: a new mapping of an open file, which is read below its length and removed.
    unsafe {
        let flags = libc::MAP_SHARED;
        let at = libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, flags, file.as_raw_fd(), 0);
        assert_ne!(at, libc::MAP_FAILED);
        let last = std::ptr::read_volatile(at.cast::<u8>().add(len - 1));
        libc::munmap(at, len);
        last
    }
}

#[test]
fn an_open_knows_the_size_that_was_closed() {
    let Some(scene) = Scene::mounted() else { return };
    let [writer, reader] = two(&scene);
    let uses: [(&str, Use<'_>); 5] = [
        ("copy_file_range", &|file| copied(by_copy, file, &reader)),
        ("sendfile", &|file| copied(by_sendfile, file, &reader)),
        ("lseek", &|mut file| file.seek(SeekFrom::End(0)).unwrap() as usize),
        ("one read", &|mut file| {
            let mut bytes = vec![0; LONG + 1];
            let count = file.read(&mut bytes).unwrap();
            assert!(bytes[..count].iter().all(|byte| *byte == 7), "other bytes than any that were written");
            count
        }),
        ("mmap", &|file| {
            assert_eq!(mapped_last(file), 7);
            file.metadata().unwrap().len() as usize
        }),
    ];
    for (what, used) in uses {
        for round in 0..ROUNDS {
            let path = format!("{what}-{}", round % 8);
            let (before, after) = if round % 3 == 2 { (LONG, SHORT) } else { (SHORT, LONG) };
            fs::write(writer.join(&path), vec![7; before]).unwrap();
            assert_eq!(fs::read(reader.join(&path)).unwrap().len(), before);
            let file = OpenOptions::new().write(true).open(writer.join(&path)).unwrap();
            file.set_len(after as u64).unwrap();
            (&file).write_all(&vec![7; after]).unwrap();
            drop(file);
            let found = used(&File::open(reader.join(&path)).unwrap());
            assert_eq!(found, after, "{what}, round {round}: it was {before}");
        }
    }
}

#[test]
fn two_that_open_a_file_at_once_both_know_the_size_that_was_closed() {
    let Some(scene) = Scene::mounted() else { return };
    let [writer, reader] = two(&scene);
    for round in 0..4 * ROUNDS {
        let name = format!("at-once-{}", round % 8);
        let (before, after) = if round % 3 == 2 { (LONG, SHORT) } else { (SHORT, LONG) };
        fs::write(writer.join(&name), vec![7; before]).unwrap();
        assert_eq!(fs::read(reader.join(&name)).unwrap().len(), before);
        let targets = [(), ()].map(|()| tempfile::tempfile_in(&reader).unwrap());
        let file = OpenOptions::new().write(true).open(writer.join(&name)).unwrap();
        file.set_len(after as u64).unwrap();
        (&file).write_all(&vec![7; after]).unwrap();
        drop(file);
        let together = Barrier::new(2);
        let (path, together) = (&reader.join(&name), &together);
        let found = std::thread::scope(|scope| {
            let opener = |to: File| {
                scope.spawn(move || {
                    together.wait();
                    copied_to(by_copy, &File::open(path).unwrap(), &to)
                })
            };
            targets.map(opener).map(|opener| opener.join().unwrap())
        });
        assert_eq!(found, [after; 2], "round {round}: it was {before}");
    }
}

#[test]
fn a_change_by_name_reaches_what_has_the_name() {
    let Some(scene) = Scene::mounted() else { return };
    let [here, there] = two(&scene);
    let changes: [(&str, Change<'_>); 3] = [
        ("truncate", &|path| OpenOptions::new().write(true).open(path).unwrap().set_len(10).unwrap()),
        ("truncate by path", &|path| nix::unistd::truncate(path, 10).unwrap()),
        ("chmod", &|path| fs::set_permissions(path, fs::Permissions::from_mode(0o666)).unwrap()),
    ];
    for (what, change) in changes {
        for round in 0..ROUNDS {
            let [x, y, z] = ["x", "y", "z"].map(|name| format!("{what}-{round}-{name}"));
            fs::write(here.join(&x), [7; 1_000]).unwrap();
            fs::write(here.join(&y), [8; 2_000]).unwrap();
            fs::set_permissions(here.join(&y), fs::Permissions::from_mode(0o600)).unwrap();
            for mount in [&here, &there] {
                for name in [&x, &y] {
                    fs::metadata(mount.join(name)).unwrap();
                }
            }
            fs::rename(there.join(&y), there.join(&z)).unwrap();
            fs::rename(there.join(&x), there.join(&y)).unwrap();
            change(&here.join(&y));
            let spared = fs::metadata(there.join(&z)).unwrap();
            assert_eq!((spared.len(), spared.mode() & 0o777), (2_000, 0o600), "{what}, round {round}");
        }
    }
    for round in 0..ROUNDS {
        let [x, y, z, l] = ["x", "y", "z", "l"].map(|name| format!("link-{round}-{name}"));
        fs::write(here.join(&x), b"new").unwrap();
        fs::write(here.join(&y), b"old").unwrap();
        fs::metadata(here.join(&y)).unwrap();
        fs::rename(there.join(&y), there.join(&z)).unwrap();
        fs::rename(there.join(&x), there.join(&y)).unwrap();
        fs::hard_link(here.join(&y), here.join(&l)).unwrap();
        assert_eq!(fs::read(there.join(&l)).unwrap(), b"new", "link, round {round}");
    }
}
