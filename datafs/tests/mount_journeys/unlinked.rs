//! Journeys with files that lose their names on one mount while they are open on another.
#![allow(clippy::unwrap_used)]

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use millrace_datafs::{Config, Datafs};

use super::{Home, eventually, mount_of, pattern};
use crate::child;

const LEN: usize = 300_000;

/// A session that collects garbage without a grace period.
fn open(home: &Path) -> Datafs {
    let config = Config { garbage_grace_ms: 0, ..Config::default() };
    Datafs::open(&home.join("home"), &config).unwrap()
}

fn objects(home: &Path) -> usize {
    let folders = fs::read_dir(home.join("home/datafs/objects")).unwrap();
    let files = folders.flat_map(|folder| fs::read_dir(folder.unwrap().path()).into_iter().flatten());
    files.filter(|file| !file.as_ref().unwrap().file_name().to_string_lossy().ends_with(".sums")).count()
}

fn open_again(file: &File) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

#[test]
fn a_file_unlinked_or_replaced_on_another_mount_stays_open() {
    let Some(home) = Home::new() else { return };
    let (one, two) = (open(home.dir.path()), open(home.dir.path()));
    let (first, second) = (mount_of(&one, "data", &home.at("one")), mount_of(&two, "data", &home.at("two")));
    for name in ["removed", "replaced"] {
        fs::write(first.path().join(name), pattern(LEN, 1)).unwrap();
    }
    fs::write(first.path().join("new"), pattern(LEN, 2)).unwrap();
    let options = OpenOptions::new().read(true).write(true).clone();
    let files = ["removed", "replaced"].map(|name| options.open(second.path().join(name)).unwrap());
    fs::remove_file(first.path().join("removed")).unwrap();
    fs::rename(first.path().join("new"), first.path().join("replaced")).unwrap();
    for _ in 0..3 {
        one.gc().unwrap();
        two.gc().unwrap();
    }
    for mut file in &files {
        // No byte of the file was read before.
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).unwrap();
        assert!(bytes == pattern(LEN, 1));
        file.write_all_at(b"written without a name", 100_000).unwrap();
        file.sync_all().unwrap();
        assert_eq!(file.metadata().unwrap().nlink(), 0);
        let mut back = [0; 22];
        open_again(file).unwrap().read_exact_at(&mut back, 100_000).unwrap();
        assert_eq!(&back, b"written without a name");
    }
    assert!(fs::read(second.path().join("replaced")).unwrap() == pattern(LEN, 2));
    drop(files);
    eventually("the space comes free", || {
        one.gc().unwrap();
        two.gc().unwrap();
        objects(home.dir.path()) == 1
    });
}

/// The child: serves a mount until it is killed.
#[test]
fn mount_daemon() {
    let Some((home, _)) = child::task() else { return };
    let datafs = open(&home);
    let _mount = mount_of(&datafs, "data", &home.join("mnt-daemon"));
    io::stdout().write_all(b"mounted 1\n").unwrap();
    loop {
        std::thread::park();
    }
}

#[test]
fn what_a_killed_mount_had_open_is_reclaimed() {
    let Some(home) = Home::new() else { return };
    let datafs = open(home.dir.path());
    let mount = mount_of(&datafs, "data", &home.at("data"));
    fs::write(mount.path().join("file"), pattern(LEN, 1)).unwrap();
    let mut daemon = child::spawn("mount_journeys::unlinked::mount_daemon", home.dir.path(), 0);
    assert!(child::reports(&mut daemon).any(|(word, _)| word == "mounted"));
    let file = File::open(home.at("daemon").join("file")).unwrap();
    fs::remove_file(mount.path().join("file")).unwrap();
    // The daemon reports its open files once a second; the file must survive before that, too.
    for _ in 0..3 {
        datafs.gc().unwrap();
        let mut bytes = vec![0; LEN];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes == pattern(LEN, 1));
    }
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    eventually("the space comes free", || {
        datafs.gc().unwrap();
        objects(home.dir.path()) == 0
    });
    drop(file);
    millrace_datafs::mount::umount(&home.at("daemon")).unwrap();
}

/// The child: opens a file, and reads it on an order.
#[test]
fn file_holder() {
    let Some((home, _)) = child::task() else { return };
    let datafs = open(&home);
    let view = datafs.view(&"data".parse().unwrap()).unwrap();
    let node = view.stat("file").unwrap().node;
    let file = view.open(node, millrace_datafs::OpenFlags::READ_WRITE).unwrap();
    let mut said = io::stdin().lock().lines();
    let mut out = io::stdout();
    out.write_all(b"opened 1\n").unwrap();
    said.next();
    assert!(file.read_at(0, LEN).unwrap() == pattern(LEN, 1));
    file.write_at(0, b"still here").unwrap();
    file.fsync().unwrap();
    assert_eq!(file.read_at(0, 10).unwrap(), b"still here".as_slice());
    out.write_all(b"read 1\n").unwrap();
    said.next();
}

#[test]
fn a_process_keeps_what_it_has_open_until_it_dies() {
    let dir = tempfile::tempdir().unwrap();
    let home: PathBuf = dir.path().into();
    let datafs = open(&home);
    datafs.volume_create(&"data".parse().unwrap()).unwrap();
    let view = datafs.view(&"data".parse().unwrap()).unwrap();
    view.write_file("file", &pattern(LEN, 1)).unwrap();
    let mut command = child::command("mount_journeys::unlinked::file_holder", &home, 0);
    let mut holder = command.stdin(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(holder.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(said.any(|line| line.ends_with("opened 1")));
    view.remove_file("file").unwrap();
    // The collector's query to the holder may be in any state here.
    datafs.gc().unwrap();
    holder.stdin.as_mut().unwrap().write_all(b"read\n").unwrap();
    assert!(said.any(|line| line.ends_with("read 1")));
    holder.kill().unwrap();
    holder.wait().unwrap();
    eventually("the space comes free", || {
        datafs.gc().unwrap();
        objects(&home) == 0
    });
}
