//! Servers are killed between the commit of a change of names and its answer: the kernel sends the request again,
//! and the change is made once.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, MetadataExt as _, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use super::{Held, kills};

/// A change of names below a folder.
type Change = fn(&Path) -> io::Result<()>;

const CHANGES: [(&str, Change); 8] = [
    ("mkdir", |at| fs::create_dir(at.join("dir"))),
    ("symlink", |at| symlink("target", at.join("symlink"))),
    ("link", |at| fs::hard_link(at.join("file"), at.join("link"))),
    ("create", |at| File::create_new(at.join("new")).map(drop)),
    ("mknod", |at| Ok(mkfifo(&at.join("pipe"), Mode::S_IRUSR)?)),
    ("rename", |at| fs::rename(at.join("link"), at.join("renamed"))),
    ("unlink", |at| fs::remove_file(at.join("renamed"))),
    ("rmdir", |at| fs::remove_dir(at.join("dir"))),
];

#[test]
fn a_change_of_names_without_an_answer_is_made_once() {
    let Some(held) = Held::new() else { return };
    let at = held.at();
    let mut server = held.server("data");
    fs::write(at.join("file"), b"x").unwrap();
    for (name, change) in CHANGES {
        let fatal = held.server_with("data", "request-completed");
        server.ends();
        server = thread::scope(|scope| {
            let changed = scope.spawn(|| change(&at));
            fatal.was_killed();
            let next = held.server("data");
            changed.join().unwrap().unwrap_or_else(|error| panic!("{name}: {error}"));
            next
        });
        let links = fs::metadata(at.join("file")).unwrap().nlink();
        assert_eq!(
            links,
            if ["link", "create", "mknod", "rename"].contains(&name) { 2 } else { 1 },
            "{name}"
        );
    }
    let mut names: Vec<_> =
        fs::read_dir(&at).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["file", "new", "pipe", "symlink"]);
    assert_eq!(fs::read_link(at.join("symlink")).unwrap(), Path::new("target"));
    assert!(fs::symlink_metadata(at.join("pipe")).unwrap().file_type().is_fifo());
    // The same changes are refused when they are no repetition.
    assert_eq!(symlink("target", at.join("symlink")).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    assert_eq!(fs::remove_dir(at.join("dir")).unwrap_err().kind(), io::ErrorKind::NotFound);
    held.unmount();
    server.ends();
    let report = held.datafs.fsck(&millrace_datafs::FsckOptions::default(), &mut |_| {}).unwrap();
    assert_eq!(report.problems, 0, "{report:?}");
}

/// Bytes of a file that is read in many requests.
const LONG: usize = 2 << 20;

/// A server that is killed while the kernel copies a request into its memory must not cost the request, and one that
/// is killed while the kernel waits in a notification for a read must end.
#[test]
fn servers_killed_at_their_first_requests_lose_none() {
    let Some(held) = Held::new() else { return };
    let at = held.at();
    let mut server = held.server("data");
    let content: Vec<u8> = (0..LONG).map(|i| (i / 4096) as u8).collect();
    let file = File::create_new(at.join("long")).unwrap();
    file.write_all_at(&content, 0).unwrap();
    file.sync_all().unwrap();
    drop(file);
    let (made, ends) = (AtomicU64::new(0), AtomicBool::new(false));
    server = thread::scope(|scope| {
        let maker = scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                let name = made.load(Ordering::Relaxed).to_string();
                File::create_new(at.join(&name)).unwrap_or_else(|error| panic!("file {name}: {error}"));
                made.fetch_add(1, Ordering::Relaxed);
            }
        });
        let reader = scope.spawn(|| {
            let file = File::open(at.join("long")).unwrap();
            let mut read = vec![0; LONG];
            while !ends.load(Ordering::Relaxed) {
                posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
                file.read_exact_at(&mut read, 0).unwrap();
                assert!(read == content, "a read is wrong");
            }
        });
        for _ in 0..kills() {
            let before = made.load(Ordering::Relaxed);
            while made.load(Ordering::Relaxed) == before && !maker.is_finished() && !reader.is_finished() {
                thread::yield_now();
            }
            server.kill();
            server = held.server("data");
        }
        ends.store(true, Ordering::Relaxed);
        server
    });
    held.unmount();
    server.ends();
}
