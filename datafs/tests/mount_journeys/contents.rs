//! Journeys with basic operations on files and directories, and their errors.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used)]

use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::{Home, errno, eventually, names, pattern};

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
    // SAFETY: a new shared mapping of a file of this length, which no process truncates meanwhile.
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
    // Synced before the unmap: during an unmap no thread of this process can map memory. The threads that serve
    // the mount are in the same process, so a write-out then would block them.
    // SAFETY: the mapping has `len` bytes.
    assert_eq!(unsafe { libc::msync(map, len, libc::MS_SYNC) }, 0);
    // SAFETY: likewise.
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
fn what_is_not_there_says_so() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let path = mount.path().join("file");
    fs::write(&path, b"x").unwrap();
    let unnamed = OpenOptions::new().write(true).custom_flags(libc::O_TMPFILE).open(mount.path());
    assert_eq!(errno(unnamed), libc::EOPNOTSUPP);
    assert_eq!(fs::read(&path).unwrap(), b"x");
}
