//! Tests with many files: directories with many entries, and reopening. They measure the memory of a mount that
//! has listed all entries, and of fsck and gc.
//!
//! Every run uses small sizes. The ignored tests use the promised sizes, print the figures and compare them
//! with the promised limits.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use millrace_datafs::mount::{self, MountOptions};
use millrace_datafs::{Config, Datafs, FsckOptions, Node, OpenFlags, Owner, Publish, View};

use super::child;

const OWNER: Owner = Owner { uid: 0, gid: 0 };
/// Files that one transaction of the library creates.
const PUBLISHED: u64 = 4_000;
/// Files created through the mount.
const THROUGH_MOUNT: u64 = 500;

fn open(home: &Path) -> (Datafs, View) {
    let datafs = Datafs::open(home, &Config::default()).unwrap();
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    (datafs, view)
}

fn seconds(from: Instant) -> f64 {
    from.elapsed().as_secs_f64()
}

/// Creates `folders` directories of `files` empty files.
fn generate(home: &Path, folders: u64, files: u64) {
    Datafs::open(home, &Config::default()).unwrap().volume_create(&"v".parse().unwrap()).unwrap();
    let (_datafs, view) = open(home);
    let begin = Instant::now();
    let all = folders * files;
    for first in (0..all).step_by(PUBLISHED as usize) {
        let mut publish = Publish::new();
        for i in first..all.min(first + PUBLISHED) {
            let staged = view.stage().unwrap().finish().unwrap();
            publish = publish.file(format!("folder-{}/file-{i}", i / files), staged);
        }
        view.publish(publish).unwrap();
    }
    println!("{all} files made in {:.1} s", seconds(begin));
}

/// The number of entries of a directory, listed through the library; checks that the cursor advances.
fn listed(view: &View, folder: Node) -> u64 {
    let (mut cursor, mut count) = (0, 0);
    loop {
        let page = view.readdir(folder, cursor, 1_000).unwrap();
        let Some(last) = page.last() else { return count };
        assert!(last.cursor > cursor, "the cursor does not move on");
        cursor = last.cursor;
        count += page.iter().filter(|entry| entry.name != "." && entry.name != "..").count() as u64;
    }
}

/// The child: serves a mount until its standard input ends.
#[test]
fn server() {
    let Some((home, _)) = child::task() else { return };
    let (_datafs, view) = open(&home);
    let mounted = mount::mount(view, &home.join("mnt"), MountOptions::default()).unwrap();
    println!("mounted 1");
    std::io::stdout().flush().unwrap();
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    mounted.unmount().unwrap();
}

/// The child: runs fsck and gc, and reports their time and peak memory.
#[test]
fn keeper() {
    let Some((home, files)) = child::task() else { return };
    let datafs = Datafs::open(&home, &Config::default()).unwrap();
    let begin = Instant::now();
    let report = datafs.fsck(&FsckOptions { scrub: true, repair: false }, &mut |_| {}).unwrap();
    assert_eq!(report.problems, 0);
    assert!(report.inodes > files, "{} inodes", report.inodes);
    say("fsck_ms", begin.elapsed().as_millis());
    say("fsck_kib", memory_kib("self", "VmHWM:"));
    let begin = Instant::now();
    datafs.gc().unwrap();
    say("gc_ms", begin.elapsed().as_millis());
    say("gc_kib", memory_kib("self", "VmHWM:"));
}

fn say(word: &str, number: impl std::fmt::Display) {
    println!("{word} {number}");
}

/// Runs fsck and gc in a child; returns their peak memory in MiB.
fn upkeep_mib(home: &Path, files: u64) -> f64 {
    let mut child = child::spawn("scale::keeper", home, files);
    let said: Vec<(String, u64)> = child::reports(&mut child).collect();
    assert!(child.wait().unwrap().success());
    println!("{said:?}");
    let kib = said.iter().find_map(|(word, number)| (word == "gc_kib").then_some(*number));
    kib.unwrap() as f64 / 1024.0
}

/// A line of `/proc/PROCESS/status`, in KiB.
fn memory_kib(process: &str, line: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let kib = status.lines().find_map(|text| text.strip_prefix(line)).unwrap();
    kib.trim().trim_end_matches(" kB").parse().unwrap()
}

/// The child, and its output, which the test must go on reading.
struct Server(Child, Box<dyn Iterator<Item = (String, u64)>>);

impl Server {
    fn start(home: &Path) -> Server {
        let mut child = child::command("scale::server", home, 0).stdin(Stdio::piped()).spawn().unwrap();
        let mut reports = child::reports(&mut child);
        assert!(reports.next().is_some(), "the process that serves the mount has failed");
        Server(child, Box::new(reports))
    }

    /// A line of the child's `/proc` status, in MiB.
    fn memory_mib(&self, line: &str) -> f64 {
        memory_kib(&self.0.id().to_string(), line) as f64 / 1024.0
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        self.1.by_ref().for_each(drop);
        let status = self.0.wait().unwrap();
        assert!(std::thread::panicking() || status.success(), "the process that served the mount: {status}");
    }
}

/// The measured figures.
struct Measured {
    reopened: Duration,
    /// The longest time until the mount listed the first entry of a directory.
    first: Duration,
    /// The longest time until it had listed all entries.
    folder: Duration,
    memory_mib: f64,
    /// Peak memory of fsck and gc.
    upkeep_mib: f64,
}

/// Creates the files, reopens the volume, then creates more through a mount, lists and stats all. `None` where
/// mounting is not permitted.
fn measure(folders: u64, files: u64) -> Option<Measured> {
    if let Err(reason) = mount::can_mount() {
        millrace_testing::skip(millrace_testing::Need::Fuse, reason);
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path();
    generate(home, folders, files);
    let begin = Instant::now();
    let reopened = {
        let (_datafs, view) = open(home);
        view.getattr(view.root()).unwrap();
        begin.elapsed()
    };
    {
        let (_datafs, view) = open(home);
        let begin = Instant::now();
        for i in 0..folders {
            assert_eq!(listed(&view, view.stat(&format!("folder-{i}")).unwrap().node), files);
        }
        println!("all listed by the library in {:.1} s", seconds(begin));
    }
    let server = Server::start(home);
    let mnt = home.join("mnt");
    fs::create_dir(mnt.join("new")).unwrap();
    for i in 0..THROUGH_MOUNT {
        File::create_new(mnt.join(format!("new/{i}"))).unwrap();
    }
    let (mut first, mut folder) = (Duration::ZERO, Duration::ZERO);
    let begin = Instant::now();
    for i in 0..folders {
        let begin = Instant::now();
        let mut entries = fs::read_dir(mnt.join(format!("folder-{i}"))).unwrap();
        let mut count = u64::from(entries.next().is_some_and(|entry| entry.is_ok()));
        first = first.max(begin.elapsed());
        count += entries.map(Result::unwrap).count() as u64;
        folder = folder.max(begin.elapsed());
        assert_eq!(count, files, "folder {i}");
    }
    println!("all listed by the mount in {:.1} s", seconds(begin));
    let begin = Instant::now();
    for i in 0..folders * files {
        let path = mnt.join(format!("folder-{}/file-{i}", i / files));
        assert!(fs::symlink_metadata(path).unwrap().is_file(), "file {i}");
    }
    println!("all statted in {:.1} s", seconds(begin));
    assert_eq!(fs::read_dir(mnt.join("new")).unwrap().count() as u64, THROUGH_MOUNT);
    let memory_mib = server.memory_mib("VmHWM:");
    println!(
        "reopened in {:.1} ms; first entry after {:.1} ms; a folder in {:.1} ms; mount {memory_mib:.0} MiB \
         at most, {:.0} MiB now",
        reopened.as_secs_f64() * 1e3,
        first.as_secs_f64() * 1e3,
        folder.as_secs_f64() * 1e3,
        server.memory_mib("VmRSS:"),
    );
    drop(server);
    let upkeep_mib = upkeep_mib(home, folders * files);
    Some(Measured { reopened, first, folder, memory_mib, upkeep_mib })
}

#[test]
fn folders_of_many_entries_show_each_once_and_take_little_memory() {
    for (folders, files) in [(1, 10_000), (20, 100)] {
        let Some(measured) = measure(folders, files) else { return };
        assert!(measured.memory_mib < 256.0, "{} MiB", measured.memory_mib);
        assert!(measured.upkeep_mib < 256.0, "{} MiB", measured.upkeep_mib);
    }
}

#[test]
fn entries_that_come_and_go_do_not_disturb_those_that_stay() {
    let dir = tempfile::tempdir().unwrap();
    generate(dir.path(), 1, 5_000);
    let (_datafs, view) = open(dir.path());
    let folder = view.stat("folder-0").unwrap().node;
    // Entries are created and removed during the listing; each remaining one is listed once.
    let mut seen = std::collections::HashMap::new();
    let mut cursor = 0;
    let mut made = 0;
    loop {
        let page = view.readdir(folder, cursor, 64).unwrap();
        let Some(last) = page.last() else { break };
        cursor = last.cursor;
        for entry in &page {
            *seen.entry(entry.name.clone()).or_insert(0) += 1;
        }
        let name = format!("new-{made}");
        drop(view.create(folder, name.as_ref(), 0o644, OWNER, OpenFlags::READ_WRITE).unwrap());
        if made % 2 == 1 {
            view.unlink(folder, format!("new-{}", made - 1).as_ref()).unwrap();
        }
        made += 1;
    }
    assert!(seen.values().all(|count| *count == 1));
    assert!((0..5_000).all(|i| seen.contains_key(std::ffi::OsStr::new(&format!("file-{i}")))));
}

#[test]
#[ignore = "makes 10^6 files (1 GB): cargo test --release -p millrace-datafs --test datafs scale::a_million -- --ignored --nocapture"]
fn a_million_entries_in_one_folder() {
    let Some(measured) = measure(1, 1_000_000) else { return };
    assert!(measured.reopened <= Duration::from_secs(1));
    assert!(measured.first <= Duration::from_millis(10));
    assert!(measured.folder <= Duration::from_secs(3));
    assert!(measured.memory_mib <= 512.0);
}

#[test]
#[ignore = "makes 10^7 files (6 GB): cargo test --release -p millrace-datafs --test datafs scale::ten_million -- --ignored --nocapture"]
fn ten_million_files() {
    let Some(measured) = measure(10_000, 1_000) else { return };
    assert!(measured.memory_mib <= 512.0);
    assert!(measured.upkeep_mib <= 512.0);
}
