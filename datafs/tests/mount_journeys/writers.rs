//! Journeys with several mounts that write the same files, by appends and mappings, and with a store that is
//! full for a while.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

use millrace_datafs::{Config, Datafs};

use super::{Home, errno, eventually, mount_of, pattern};
use crate::small_disk::SmallDisk;

#[test]
fn what_two_mounts_append_is_all_there() {
    const LINES: usize = 60;
    let Some(home) = Home::new() else { return };
    let other = home.again();
    let (first, second) = (home.mount("data"), mount_of(&other, "data", &home.at("second")));
    fs::write(first.path().join("log"), b"").unwrap();
    std::thread::scope(|scope| {
        for (name, mount) in [("first", &first), ("second", &second)] {
            scope.spawn(move || {
                for line in 0..LINES {
                    let mut file = OpenOptions::new().append(true).open(mount.path().join("log")).unwrap();
                    file.write_all(format!("{name} {line}\n").as_bytes()).unwrap();
                    if line % 10 == 0 {
                        file.sync_all().unwrap();
                    }
                }
            });
        }
    });
    for mount in [&first, &second] {
        let log = fs::read_to_string(mount.path().join("log")).unwrap();
        assert_eq!(log.lines().count(), 2 * LINES);
        for name in ["first", "second"] {
            let lines: Vec<_> = log.lines().filter(|line| line.starts_with(name)).collect();
            let expected: Vec<_> = (0..LINES).map(|line| format!("{name} {line}")).collect();
            assert_eq!(lines, expected);
        }
    }
}

/// A memory mapping of a file.
struct Mapping {
    at: *mut libc::c_void,
    len: usize,
}

impl Mapping {
    fn of(file: &File, len: usize, flags: i32) -> Mapping {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping of an open file.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, file.as_raw_fd(), 0) };
        assert_ne!(at, libc::MAP_FAILED, "{}", io::Error::last_os_error());
        Mapping { at, len }
    }

    fn bytes(&self) -> Vec<u8> {
        // SAFETY: the mapping is readable and as long as the file.
        unsafe { std::slice::from_raw_parts(self.at.cast::<u8>(), self.len) }.to_vec()
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.len);
        // SAFETY: the range lies in the mapping, which is writable.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at.cast::<u8>().add(offset), bytes.len());
        }
    }

    fn sync(&self) {
        // SAFETY: the range is that of the mapping.
        assert_eq!(unsafe { libc::msync(self.at, self.len, libc::MS_SYNC) }, 0);
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: no reference into the mapping exists.
        unsafe { libc::munmap(self.at, self.len) };
    }
}

fn edit(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

#[test]
fn what_was_written_through_a_mapping_is_mapped_by_who_opens_it_elsewhere() {
    const LEN: usize = 200_000;
    let Some(home) = Home::new() else { return };
    let other = home.again();
    let (first, second) = (home.mount("data"), mount_of(&other, "data", &home.at("second")));
    let mut expected = pattern(LEN, 1);
    fs::write(first.path().join("file"), &expected).unwrap();
    for round in 0..6u8 {
        let (writer, reader) = if round % 2 == 0 { (&first, &second) } else { (&second, &first) };
        let file = edit(&writer.path().join("file"));
        let mapping = Mapping::of(&file, LEN, libc::MAP_SHARED);
        assert!(mapping.bytes() == expected, "round {round}");
        let offset = 30_000 * usize::from(round);
        mapping.write(offset, &[round; 9_000]);
        expected[offset..offset + 9_000].fill(round);
        mapping.sync();
        drop((mapping, file));
        let file = edit(&reader.path().join("file"));
        let mapping = Mapping::of(&file, LEN, libc::MAP_PRIVATE);
        assert!(mapping.bytes() == expected, "round {round}");
        // Writes to a private mapping do not reach the file.
        mapping.write(0, &[99; 50]);
        mapping.sync();
        drop(mapping);
        let mut back = vec![0; LEN];
        file.read_exact_at(&mut back, 0).unwrap();
        assert!(back == expected, "round {round}");
    }
}

#[test]
fn direct_io_reads_and_writes_what_others_see() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let path = mount.path().join("file");
    fs::write(&path, pattern(100_000, 1)).unwrap();
    let mut direct = OpenOptions::new();
    let direct = direct.read(true).write(true).custom_flags(libc::O_DIRECT).open(&path).unwrap();
    let mut page = vec![0; 8_192];
    direct.read_exact_at(&mut page, 4_096).unwrap();
    assert!(page == pattern(100_000, 1)[4_096..12_288]);
    direct.write_all_at(&[7; 4_096], 8_192).unwrap();
    let mut expected = pattern(100_000, 1);
    expected[8_192..12_288].fill(7);
    assert!(fs::read(&path).unwrap() == expected);
    drop(direct);
    assert!(fs::read(&path).unwrap() == expected);
}

#[test]
fn a_mapping_shows_what_somebody_else_streams_into_the_file() {
    const LEN: usize = 200_000;
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let path = mount.path().join("file");
    let mut expected = pattern(LEN, 1);
    let mut writer = File::create(&path).unwrap();
    writer.write_all(&expected).unwrap();
    let mapping = Mapping::of(&edit(&path), LEN, libc::MAP_SHARED);
    assert!(mapping.bytes() == expected);
    writer.write_all_at(&pattern(60_000, 2), 50_001).unwrap();
    expected[50_001..110_001].copy_from_slice(&pattern(60_000, 2));
    eventually("the mapping shows it", || mapping.bytes() == expected);
    mapping.write(150_000, b"mapped");
    mapping.sync();
    expected[150_000..150_006].copy_from_slice(b"mapped");
    drop(writer);
    assert!(fs::read(&path).unwrap() == expected);
}

#[test]
fn a_file_without_a_name_is_refused_as_unsupported() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let made = OpenOptions::new().write(true).custom_flags(libc::O_TMPFILE).open(mount.path());
    assert_eq!(errno(made), libc::EOPNOTSUPP);
}

/// A session whose objects are on a small disk, as in another process.
fn open_on(disk: &SmallDisk, home: &Home) -> Datafs {
    let config = Config { store_dir: disk.path().join("objects"), ..Config::default() };
    Datafs::open(&home.dir.path().join("full"), &config).unwrap()
}

/// The same, with a new volume.
fn made_on(disk: &SmallDisk, home: &Home) -> Datafs {
    let datafs = open_on(disk, home);
    datafs.volume_create(&"data".parse().unwrap()).unwrap();
    datafs
}

#[test]
fn a_store_that_is_full_for_a_while_loses_nothing() {
    let Some(home) = Home::new() else { return };
    let Some(disk) = SmallDisk::new(12) else { return };
    let datafs = made_on(&disk, &home);
    let mount = mount_of(&datafs, "data", &home.at("full"));
    let old = pattern(1_000_000, 1);
    fs::write(mount.path().join("old"), &old).unwrap();
    let mut file = File::create(mount.path().join("new")).unwrap();
    // Another file takes the rest of the disk.
    let ballast = disk.path().join("ballast");
    let full = File::create(&ballast).and_then(|mut file| {
        let piece = vec![1; 1 << 16];
        loop {
            file.write_all(&piece)?;
        }
    });
    assert_eq!(errno::<()>(full), libc::ENOSPC);
    let new = pattern(1_500_000, 2);
    file.write_all(&new).unwrap();
    for _ in 0..2 {
        assert_eq!(errno(file.sync_all()), libc::ENOSPC);
    }
    // No partial state: other sessions see the committed file, and the writer's mount its own writes.
    let others = open_on(&disk, &home);
    let view = others.view(&"data".parse().unwrap()).unwrap();
    assert_eq!(view.read_file("new").unwrap().len(), 0);
    assert!(fs::read(mount.path().join("new")).unwrap() == new);
    assert!(fs::read(mount.path().join("old")).unwrap() == old);
    fs::remove_file(&ballast).unwrap();
    file.sync_all().unwrap();
    assert!(view.read_file("new").unwrap() == new);
    drop(file);
    fs::write(mount.path().join("more"), &old).unwrap();
    assert!(view.read_file("more").unwrap() == old);
    mount.unmount().unwrap();
}

#[test]
fn what_a_sequential_writer_was_answered_is_kept_while_the_store_is_full() {
    let Some(home) = Home::new() else { return };
    let Some(disk) = SmallDisk::new(12) else { return };
    let datafs = made_on(&disk, &home);
    let mount = mount_of(&datafs, "data", &home.at("full"));
    let mut file = File::create(mount.path().join("new")).unwrap();
    let new = pattern(20_000_000, 4);
    let mut taken = 0;
    let full = loop {
        let piece = &new[taken..new.len().min(taken + (1 << 20))];
        match file.write(piece) {
            Ok(len) => taken += len,
            Err(error) => break error,
        }
    };
    assert_eq!(errno::<()>(Err(full)), libc::ENOSPC);
    assert_eq!(errno(file.sync_all()), libc::ENOSPC);
    assert!(fs::read(mount.path().join("new")).unwrap() == new[..taken]);
    disk.grow(64);
    file.write_all(&new[taken..]).unwrap();
    file.sync_all().unwrap();
    drop(file);
    mount.unmount().unwrap();
    let others = open_on(&disk, &home);
    let view = others.view(&"data".parse().unwrap()).unwrap();
    assert!(view.read_file("new").unwrap() == new);
}
