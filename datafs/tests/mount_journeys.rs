//! Journeys through the real kernel mount: what programs see of a volume.
//!
//! Where mounting is not permitted, each journey says why in one line and ends.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use millrace_datafs::mount::{self, Mount, MountOptions};
use millrace_datafs::{Config, Datafs, Error};
use tempfile::TempDir;

/// A home with one volume, `data`, and a place to mount it.
struct Home {
    dir: TempDir,
    datafs: Datafs,
}

impl Home {
    /// `None`, and the reason on standard error, where mounting is not permitted.
    fn new() -> Option<Home> {
        if let Err(reason) = mount::can_mount() {
            eprintln!("skipped: {reason}");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let datafs = Datafs::open(&dir.path().join("home"), &Config::default()).unwrap();
        datafs.volume_create(&"data".parse().unwrap()).unwrap();
        Some(Home { dir, datafs })
    }

    fn again(&self) -> Datafs {
        Datafs::open(&self.dir.path().join("home"), &Config::default()).unwrap()
    }

    fn mount(&self, spec: &str) -> Mount {
        mount_of(&self.datafs, spec, &self.at(spec))
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("mnt-{name}"))
    }

    fn snapshot(&self, name: &str) {
        self.datafs.snapshot_create(&"data".parse().unwrap(), &name.parse().unwrap()).unwrap();
    }
}

fn mount_of(datafs: &Datafs, spec: &str, at: &Path) -> Mount {
    let view = datafs.view(&spec.parse().unwrap()).unwrap();
    mount::mount(view, at, MountOptions::default()).unwrap()
}

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64)
        .map(|i| (i.wrapping_add(seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
        .collect()
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

/// Polls until `done`; panics after ten seconds.
fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(10);
    while !done() {
        assert!(Instant::now() < until, "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn files_are_written_read_cut_and_extended() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let path = mount.path().join("file");

    fs::write(&path, b"hello").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"hello");
    let mut file = OpenOptions::new().append(true).open(&path).unwrap();
    file.write_all(b", world").unwrap();
    drop(file);
    assert_eq!(fs::read(&path).unwrap(), b"hello, world");

    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    file.write_all_at(b"J", 0).unwrap();
    file.write_all_at(b"end", 100_000).unwrap();
    let mut hole = [1; 10];
    file.read_exact_at(&mut hole, 50_000).unwrap();
    assert_eq!(hole, [0; 10], "a gap reads as zeroes");
    let mut head = [0; 5];
    file.read_exact_at(&mut head, 0).unwrap();
    assert_eq!(&head, b"Jello", "a handle reads what it wrote");
    file.set_len(5).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 5);
    file.set_len(8).unwrap();
    drop(file);
    assert_eq!(fs::read(&path).unwrap(), b"Jello\0\0\0");

    fs::write(&path, b"short").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"short", "truncation by open");
    assert_eq!(errno(OpenOptions::new().create_new(true).write(true).open(&path)), libc::EEXIST);
    assert_eq!(errno(File::open(mount.path().join("none"))), libc::ENOENT);
    mount.unmount().unwrap();

    let stored = home.datafs.view(&"data".parse().unwrap()).unwrap().read_file("file").unwrap();
    assert_eq!(stored, b"short".as_slice());
}

#[test]
fn large_files_come_back_at_any_offset() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let path = mount.path().join("large");
    let bytes = pattern(9_000_017, 3);
    let mut file = File::create(&path).unwrap();
    for chunk in bytes.chunks(333_333) {
        file.write_all(chunk).unwrap();
    }
    drop(file);
    assert!(fs::read(&path).unwrap() == bytes);
    let mut file = File::open(&path).unwrap();
    for offset in [0, 4095, 65_535, 65_536, 4_194_303, 8_999_000] {
        file.seek(SeekFrom::Start(offset)).unwrap();
        let mut read = vec![0; 1017];
        file.read_exact(&mut read).unwrap();
        assert!(read == bytes[offset as usize..offset as usize + 1017], "at {offset}");
    }
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    let patch = pattern(70_000, 99);
    file.write_all_at(&patch, 1_000_000).unwrap();
    drop(file);
    let mut expected = bytes;
    expected[1_000_000..1_070_000].copy_from_slice(&patch);
    assert!(fs::read(&path).unwrap() == expected, "an overwrite in the middle");
}

#[test]
fn names_come_and_go() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let root = mount.path();

    fs::create_dir_all(root.join("a/b/c")).unwrap();
    fs::write(root.join("a/b/one"), b"1").unwrap();
    assert_eq!(names(&root.join("a/b")), ["c", "one"]);
    assert_eq!(errno(fs::create_dir(root.join("a"))), libc::EEXIST);
    assert_eq!(errno(fs::remove_dir(root.join("a/b"))), libc::ENOTEMPTY);
    assert_eq!(errno(fs::remove_file(root.join("a/b/c"))), libc::EISDIR);
    assert_eq!(errno(fs::read_dir(root.join("a/b/one"))), libc::ENOTDIR);

    fs::rename(root.join("a/b/one"), root.join("two")).unwrap();
    assert_eq!(fs::read(root.join("two")).unwrap(), b"1");
    fs::write(root.join("three"), b"3").unwrap();
    fs::rename(root.join("two"), root.join("three")).unwrap();
    assert_eq!(fs::read(root.join("three")).unwrap(), b"1", "a rename replaces");
    assert_eq!(errno(fs::rename(root.join("a"), root.join("a/b/inside"))), libc::EINVAL);
    fs::rename(root.join("a/b"), root.join("b")).unwrap();
    assert_eq!(names(root), ["a", "b", "three"]);
    fs::remove_dir(root.join("b/c")).unwrap();
    fs::remove_dir(root.join("b")).unwrap();

    std::os::unix::fs::symlink("three", root.join("link")).unwrap();
    assert_eq!(fs::read_link(root.join("link")).unwrap(), Path::new("three"));
    assert_eq!(fs::read(root.join("link")).unwrap(), b"1");

    fs::hard_link(root.join("three"), root.join("same")).unwrap();
    assert_eq!(fs::metadata(root.join("same")).unwrap().nlink(), 2);
    let inodes = ["three", "same"].map(|n| fs::metadata(root.join(n)).unwrap().ino());
    assert_eq!(inodes[0], inodes[1]);
    fs::remove_file(root.join("three")).unwrap();
    assert_eq!(fs::read(root.join("same")).unwrap(), b"1", "the other name stays");

    let open = File::open(root.join("same")).unwrap();
    fs::remove_file(root.join("same")).unwrap();
    let mut byte = [0];
    open.read_exact_at(&mut byte, 0).unwrap();
    assert_eq!(&byte, b"1", "an open file outlives its name");
    drop(open);
    fs::remove_file(root.join("link")).unwrap();
    fs::remove_dir(root.join("a")).unwrap();
    assert_eq!(names(root), Vec::<String>::new());
}

#[test]
fn attributes_are_kept() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let path = mount.path().join("file");
    fs::write(&path, b"x").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    let time = std::time::UNIX_EPOCH + Duration::new(1_000_000_000, 123_456_789);
    File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
    let metadata = fs::metadata(&path).unwrap();
    assert_eq!(metadata.mode() & 0o7777, 0o640);
    assert_eq!(metadata.modified().unwrap(), time);
    assert_eq!(metadata.uid(), nix::unistd::geteuid().as_raw());
    let space = nix::sys::statvfs::statvfs(mount.path()).unwrap();
    assert!(space.blocks() > 0 && space.blocks_free() > 0 && space.name_max() == 255);
}

#[test]
fn mapped_memory_is_read_and_written() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let path = mount.path().join("mapped");
    let bytes = pattern(300_000, 5);
    fs::write(&path, &bytes).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let len = bytes.len();
    // SAFETY: a new shared mapping of a file of this length; nobody truncates it meanwhile.
    let map = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    assert_ne!(map, libc::MAP_FAILED);
    // SAFETY: the mapping has `len` bytes and only this slice refers to them.
    let mapped = unsafe { std::slice::from_raw_parts_mut(map.cast::<u8>(), len) };
    assert!(mapped == bytes);
    mapped[123_456] ^= 0xff;
    let changed = mapped[123_456];
    // SAFETY: the mapping is this test's own and not used afterwards.
    assert_eq!(unsafe { libc::munmap(map, len) }, 0);
    drop(file);
    assert_eq!(fs::read(&path).unwrap()[123_456], changed);
    let stored = home.again().view(&"data".parse().unwrap()).unwrap();
    eventually("a write through memory is committed when the file is closed", || {
        stored.read_file("mapped").unwrap()[123_456] == changed
    });
}

#[test]
fn a_copied_tree_is_the_same_tree() {
    let Some(home) = Home::new() else { return };
    let tree = home.dir.path().join("tree");
    for dir in 0..6 {
        let dir_path = tree.join(format!("d{dir}/nested {dir}"));
        fs::create_dir_all(&dir_path).unwrap();
        for file in 0..12usize {
            let len = [0, 1, 100, 4096, 4097, 70_000][file % 6] + dir;
            fs::write(dir_path.join(format!("f{file}")), pattern(len, file as u64)).unwrap();
        }
        std::os::unix::fs::symlink("f1", dir_path.join("link")).unwrap();
    }
    fs::write(tree.join("large"), pattern(5_000_000, 1)).unwrap();

    let mount = home.mount("data");
    let run = |program: &str, args: &[&Path]| {
        let options = if program == "cp" { "-a" } else { "-r" };
        let output = Command::new(program).arg(options).args(args).output().unwrap();
        assert!(output.status.success(), "{program}: {output:?}");
    };
    run("cp", &[&tree, &mount.path().join("copy")]);
    run("diff", &[&tree, &mount.path().join("copy")]);
    home.snapshot("copied");
    let snapshot = home.mount("data@copied");
    run("diff", &[&tree, &snapshot.path().join("copy")]);
    let out = home.dir.path().join("out");
    run("cp", &[&snapshot.path().join("copy"), &out]);
    run("diff", &[&tree, &out]);
    let status = Command::new("rm").arg("-r").arg(mount.path().join("copy")).status().unwrap();
    assert!(status.success());
    assert_eq!(names(mount.path()), Vec::<String>::new());
    run("diff", &[&tree, &snapshot.path().join("copy")]);
}

#[test]
fn a_directory_of_many_entries_lists_each_once() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let expected: Vec<String> = (0..2_500).map(|i| format!("entry-{i:05}")).collect();
    for name in &expected {
        File::create(mount.path().join(name)).unwrap();
    }
    assert_eq!(names(mount.path()), expected);
    let mut seen = 0;
    for entry in fs::read_dir(mount.path()).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
        seen += 1;
    }
    assert_eq!(seen, expected.len(), "entries removed while listing are not skipped");
    assert_eq!(names(mount.path()), Vec::<String>::new());
}

#[test]
fn what_was_synced_is_there_for_everybody() {
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
    // Nobody but root gets past the directory's mode.
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
fn two_mounts_of_one_volume_see_each_others_closed_files() {
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
    // Of equal length, so that only the contents can tell.
    for round in 0..10u8 {
        fs::write(&a, [round; 5_000]).unwrap();
        assert_eq!(fs::read(&b).unwrap(), [round; 5_000]);
        let replacement = second.path().join("replacement");
        fs::write(&replacement, [round + 100; 5_000]).unwrap();
        fs::rename(&replacement, &b).unwrap();
        assert_eq!(fs::read(&a).unwrap(), [round + 100; 5_000]);
    }
    fs::remove_file(&a).unwrap();
    assert!(!b.exists());
    assert_eq!(names(second.path()), Vec::<String>::new());
}

#[test]
fn what_is_not_there_says_so() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let path = mount.path().join("file");
    fs::write(&path, b"x").unwrap();
    let c_path = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: all pointers are to live, terminated strings and a buffer of the stated size.
    let set = unsafe {
        libc::setxattr(c_path.as_ptr(), c"user.key".as_ptr(), c"value".as_ptr().cast(), 5, 0)
    };
    assert_eq!((set, io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EOPNOTSUPP)));
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    // SAFETY: the descriptor is open.
    let allocated = unsafe { libc::fallocate(file.as_raw_fd(), libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, 0, 1) };
    assert_eq!((allocated, io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EOPNOTSUPP)));
    let unnamed = OpenOptions::new().write(true).custom_flags(libc::O_TMPFILE).open(mount.path());
    assert_eq!(errno(unnamed), libc::EOPNOTSUPP);
    assert_eq!(fs::read(&path).unwrap(), b"x");
}

#[test]
fn a_damaged_object_is_an_error_and_not_wrong_bytes() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    fs::write(mount.path().join("file"), pattern(200_000, 1)).unwrap();
    fs::write(mount.path().join("other"), pattern(200_000, 2)).unwrap();
    let objects = home.dir.path().join("home/datafs/objects");
    let expected = pattern(200_000, 1);
    let mut damaged = 0;
    for fan_out in fs::read_dir(objects).unwrap() {
        for object in fs::read_dir(fan_out.unwrap().path()).unwrap() {
            let path = object.unwrap().path();
            let mut bytes = fs::read(&path).unwrap();
            if bytes[..1000] == expected[..1000] {
                bytes[150_000] ^= 1;
                fs::write(&path, &bytes).unwrap();
                damaged += 1;
            }
        }
    }
    assert_eq!(damaged, 1);
    let file = File::open(mount.path().join("file")).unwrap();
    assert_eq!(errno(file.read_at(&mut [0; 1000], 149_900)), libc::EIO);
    assert!(fs::read(mount.path().join("other")).unwrap() == pattern(200_000, 2));
}

#[test]
fn a_full_disk_is_said_so_and_loses_nothing_old() {
    let Some(home) = Home::new() else { return };
    let disk = home.dir.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let size = "size=12m";
    let flags = nix::mount::MsFlags::empty();
    if let Err(error) = nix::mount::mount(Some("tmpfs"), &disk, Some("tmpfs"), flags, Some(size)) {
        eprintln!("skipped: no small disk can be made ({error})");
        return;
    }
    let _disk = Detach(disk.clone());
    let datafs = Datafs::open(&disk.join("home"), &Config::default()).unwrap();
    datafs.volume_create(&"data".parse().unwrap()).unwrap();
    let mount = mount_of(&datafs, "data", &home.at("full"));
    let old = pattern(2_000_000, 1);
    fs::write(mount.path().join("old"), &old).unwrap();
    let mut file = File::create(mount.path().join("new")).unwrap();
    let full = file.write_all(&pattern(20_000_000, 2)).and_then(|()| file.sync_all());
    assert_eq!(errno(full), libc::ENOSPC);
    assert!(fs::read(mount.path().join("old")).unwrap() == old);
    drop(file);
    fs::remove_file(mount.path().join("new")).unwrap();
    // The kernel tells of the close in its own time, and it is tried once more to save the file then.
    eventually("there is room again", || {
        File::create(mount.path().join("small"))
            .and_then(|mut file| file.write_all(&pattern(100_000, 3)).and_then(|()| file.sync_all()))
            .is_ok()
    });
    assert!(fs::read(mount.path().join("small")).unwrap() == pattern(100_000, 3));
    mount.unmount().unwrap();
}

/// Takes a disk off its path at the end of a test, also of one that fails.
struct Detach(PathBuf);

impl Drop for Detach {
    fn drop(&mut self) {
        let _ = nix::mount::umount2(&self.0, nix::mount::MntFlags::MNT_DETACH);
    }
}

#[test]
fn an_unmount_with_open_files_keeps_what_was_written() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let at = mount.path().to_owned();
    let mut file = File::create(at.join("open")).unwrap();
    file.write_all(b"written, not closed").unwrap();
    let unmounting = std::thread::spawn(move || mount.unmount());
    eventually("the path is free although a file is open", || names(&at).is_empty());
    drop(file);
    unmounting.join().unwrap().unwrap();
    let stored = home.datafs.view(&"data".parse().unwrap()).unwrap().read_file("open").unwrap();
    assert_eq!(stored, b"written, not closed".as_slice());
    let again = mount_of(&home.datafs, "data", &at);
    assert_eq!(names(again.path()), ["open"]);
}

#[test]
fn dropping_a_mount_and_unmounting_its_path_end_it() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let at = mount.path().to_owned();
    fs::write(at.join("file"), b"x").unwrap();
    drop(mount);
    assert_eq!(names(&at), Vec::<String>::new());

    let mount = home.mount("data");
    assert!(mount.is_serving());
    mount::umount(&at).unwrap();
    mount.join().unwrap();
    assert_eq!(names(&at), Vec::<String>::new());
    assert!(matches!(mount::umount(&at), Err(Error::NotFound { .. })));
}

#[test]
fn a_place_that_cannot_be_mounted_on_is_refused() {
    let Some(home) = Home::new() else { return };
    let view = || home.datafs.view(&"data".parse().unwrap()).unwrap();
    let mount = home.mount("data");
    let again = mount::mount(view(), mount.path(), MountOptions::default());
    assert!(matches!(again, Err(Error::Exists { .. })), "{again:?}");
    let full = home.dir.path().join("full");
    fs::create_dir(&full).unwrap();
    fs::write(full.join("file"), b"x").unwrap();
    let refused = mount::mount(view(), &full, MountOptions::default());
    assert!(matches!(refused, Err(Error::NotEmpty { .. })), "{refused:?}");
    let options = MountOptions { threads: 0, ..MountOptions::default() };
    let refused = mount::mount(view(), &home.at("none"), options);
    assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
}

/// The home that [`mounts_until_killed`] mounts, set only by the test that starts it.
const CHILD_HOME: &str = "MILLRACE_TEST_MOUNT_HOME";

#[test]
fn a_mount_whose_process_died_is_replaced() {
    let Some(home) = Home::new() else { return };
    let at = home.at("dead");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "mount_journeys::mounts_until_killed", "--nocapture"])
        .env(CHILD_HOME, home.dir.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(output.any(|line| line.unwrap().contains("is mounted")));
    assert_eq!(fs::read(at.join("file")).unwrap(), b"before the kill");
    child.kill().unwrap();
    child.wait().unwrap();
    eventually("the mount is dead", || {
        fs::metadata(&at).is_err_and(|e| e.raw_os_error() == Some(libc::ENOTCONN))
    });
    let mount = mount_of(&home.datafs, "data", &at);
    assert_eq!(fs::read(mount.path().join("file")).unwrap(), b"before the kill");
}

/// Not a test of its own: the process that the test above kills.
#[test]
#[allow(clippy::print_stdout)]
fn mounts_until_killed() {
    let Some(dir) = std::env::var_os(CHILD_HOME).map(PathBuf::from) else { return };
    let datafs = Datafs::open(&dir.join("home"), &Config::default()).unwrap();
    let mount = mount_of(&datafs, "data", &dir.join("mnt-dead"));
    fs::write(mount.path().join("file"), b"before the kill").unwrap();
    println!("is mounted");
    io::stdout().flush().unwrap();
    let _ = io::stdin().read_line(&mut String::new());
}

#[test]
fn unmounting_twice_at_once_is_harmless() {
    let Some(home) = Home::new() else { return };
    for _ in 0..5 {
        let mount = home.mount("data");
        let at = mount.path().to_owned();
        let other = std::thread::spawn(move || mount::umount(&at));
        mount.unmount().unwrap();
        let other = other.join().unwrap();
        assert!(matches!(other, Ok(()) | Err(Error::NotFound { .. })), "{other:?}");
    }
}
