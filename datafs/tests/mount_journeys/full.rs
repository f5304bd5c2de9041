//! Journeys on a full disk that holds a whole home, including the metadata.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stderr, clippy::print_stdout)]

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use millrace_datafs::mount::{self, Mount};
use millrace_datafs::{Config, Datafs, Error, FsckOptions, View};
use tempfile::TempDir;

use super::{errno, mount_of, names, pattern};
use crate::child;
use crate::small_disk::SmallDisk;

/// A file size that is stored in the metadata.
const SMALL: usize = 3_000;
/// More files than fit on the disk.
const FILES_MAX: usize = 10_000;

/// An operation that the test repeats, by number.
type Attempt<'a> = &'a dyn Fn(usize) -> io::Result<()>;

/// A home with one volume, `data`, on a small disk, and a mount point elsewhere.
struct SmallHome {
    place: TempDir,
    disk: SmallDisk,
}

impl SmallHome {
    /// `None`, and the reason on standard error, where mounting is not permitted.
    fn on(disk: impl FnOnce() -> Option<SmallDisk>) -> Option<SmallHome> {
        if let Err(reason) = mount::can_mount() {
            millrace_testing::skip(millrace_testing::Need::Fuse, reason);
            return None;
        }
        let home = SmallHome { place: tempfile::tempdir().unwrap(), disk: disk()? };
        home.open().unwrap().volume_create(&volume()).unwrap();
        Some(home)
    }

    fn path(&self) -> PathBuf {
        self.disk.path().join("home")
    }

    fn open(&self) -> Result<Datafs, Error> {
        Datafs::open(&self.path(), &config())
    }

    fn mount(&self, datafs: &Datafs) -> Mount {
        mount_of(datafs, "data", &self.place.path().join("mnt"))
    }
}

fn volume() -> millrace_datafs::Name {
    "data".parse().unwrap()
}

fn config() -> Config {
    Config { garbage_grace_ms: 0, ..Config::default() }
}

fn view(datafs: &Datafs) -> View {
    datafs.view(&"data".parse().unwrap()).unwrap()
}

fn small(i: usize) -> Vec<u8> {
    pattern(SMALL, i as u64)
}

/// Writes a small file. `fs::write` would hide an error of the close.
fn write_small(path: &Path, i: usize) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(&small(i))?;
    file.sync_all()
}

#[test]
fn a_full_disk_is_told_as_one_whatever_is_done_and_everything_goes_on_with_space() {
    let Some(home) = SmallHome::on(|| SmallDisk::new(12)) else { return };
    let datafs = home.open().unwrap();
    let mount = home.mount(&datafs);
    let at = mount.path();
    let large = pattern(600_000, 1);
    fs::write(at.join("large"), &large).unwrap();
    fs::create_dir(at.join("dir")).unwrap();
    fs::write(at.join("moved.0"), b"").unwrap();
    File::open(at).unwrap().sync_all().unwrap();

    home.disk.fill();
    let ballast = home.disk.path().join("ballast");
    let file = File::options().write(true).open(&ballast).unwrap();
    file.set_len(file.metadata().unwrap().len() - (3 << 20)).unwrap();
    drop(file);
    let mut made = 0;
    let full = loop {
        match write_small(&at.join(format!("dir/{made}")), made) {
            Ok(()) => made += 1,
            Err(error) => break error,
        }
        assert!(made < FILES_MAX);
    };
    assert_eq!(errno::<()>(Err(full)), libc::ENOSPC);
    assert!(made > 0);
    // Takes the bytes that are still free.
    home.disk.fill();
    let attempts: [(&str, Attempt<'_>); 8] = [
        ("mkdir", &|i| fs::create_dir(at.join(format!("folder.{i}")))),
        ("symlink", &|i| symlink("target", at.join(format!("symlink.{i}")))),
        ("link", &|i| fs::hard_link(at.join("large"), at.join(format!("link.{i}")))),
        ("rename", &|i| fs::rename(at.join(format!("moved.{i}")), at.join(format!("moved.{}", i + 1)))),
        ("chmod", &|i| {
            fs::set_permissions(at.join("large"), fs::Permissions::from_mode(0o600 + i as u32 % 2))
        }),
        ("truncate", &|i| {
            File::options().write(true).open(at.join("large"))?.set_len(600_000 + i as u64 % 2)
        }),
        ("write", &|i| {
            let mut file = File::create(at.join(format!("file.{i}")))?;
            file.write_all(&large)?;
            file.sync_all()
        }),
        ("unlink", &|i| fs::remove_file(at.join(format!("dir/{i}")))),
    ];
    let (mut refused, mut removed) = (0, 0);
    for (name, attempt) in attempts {
        let times = if name == "unlink" { made.min(40) } else { 40 };
        for i in 0..times {
            match attempt(i) {
                Ok(()) if name == "unlink" => removed += 1,
                Ok(()) => {}
                // The previous rename was refused.
                Err(error) if name == "rename" && error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC), "{name}: {error}");
                    refused += 1;
                }
            }
        }
    }
    assert!(refused > 0);
    // Everything can be read.
    assert!(fs::read(at.join("large")).unwrap()[..600_000] == large);
    let there = names(&at.join("dir"));
    assert!(
        there.iter().filter(|name| name.parse::<usize>().is_ok_and(|i| i < made)).count() == made - removed
    );
    for name in &there {
        let bytes = fs::read(at.join("dir").join(name)).unwrap();
        assert!(name.parse() == Ok(made) || bytes == small(name.parse().unwrap()), "{name}");
    }
    // A new session gets the same error, or finds space.
    match home.open() {
        Ok(other) => assert!(view(&other).stat("large").is_ok()),
        Err(error) => assert!(matches!(error, Error::NoSpace { .. }), "{error:?}"),
    }

    fs::remove_file(&ballast).unwrap();
    for i in 0..200 {
        write_small(&at.join(format!("after.{i}")), i).unwrap();
    }
    File::open(at).unwrap().sync_all().unwrap();
    assert_eq!(names(&at.join("dir")), there);
    let seen = names(at);
    mount.unmount().unwrap();
    drop(datafs);
    let again = home.open().unwrap();
    let view = view(&again);
    let mut listed: Vec<String> = view.list("").unwrap().into_iter().map(|entry| entry.name).collect();
    listed.sort();
    assert_eq!(listed, seen);
    assert!(view.read_file("large").unwrap()[..600_000] == large);
    assert!(view.read_file("after.199").unwrap() == small(199));
}

/// The child: creates small files until there is no space, then ends or waits to be killed.
#[test]
fn small_file_writer() {
    let Some((home, is_killed)) = child::task() else { return };
    let datafs = Datafs::open(&home, &config()).unwrap();
    let view = view(&datafs);
    let mut made = 0;
    let full = loop {
        match view.write_file(&format!("small/{made}"), &small(made)) {
            Ok(()) => made += 1,
            Err(error) => break error,
        }
        assert!(made < FILES_MAX);
    };
    assert!(matches!(full, Error::NoSpace { .. }), "{full:?}");
    println!("made {made}");
    io::stdout().flush().unwrap();
    if is_killed != 0 {
        // `park` may return spuriously.
        loop {
            std::thread::park();
        }
    }
}

/// Fills a disk with files in the metadata, in a process that ends or is killed, then empties the disk.
fn is_emptied_again(disk: impl FnOnce() -> Option<SmallDisk>, is_killed: bool) {
    let Some(home) = SmallHome::on(disk) else { return };
    let writer = "mount_journeys::full::small_file_writer";
    let mut child = child::spawn(writer, &home.path(), u64::from(is_killed));
    let mut reports = child::reports(&mut child);
    let (word, made) = reports.next().expect("the child says how many files it made");
    assert_eq!(word, "made");
    let made = made as usize;
    assert!(made > 100, "{made}");
    if is_killed {
        child.kill().unwrap();
    }
    // The child may go on to print.
    reports.for_each(drop);
    assert_eq!(child.wait().unwrap().success(), !is_killed);

    let datafs = home.open().unwrap();
    let mount = home.mount(&datafs);
    let at = mount.path();
    assert_eq!(names(&at.join("small")).len(), made);
    assert!(fs::read(at.join(format!("small/{}", made - 1))).unwrap() == small(made - 1));
    fs::remove_dir_all(at.join("small")).unwrap();
    datafs.gc().unwrap();
    // Half of the files fit again.
    fs::create_dir(at.join("again")).unwrap();
    for i in 0..made / 2 {
        write_small(&at.join(format!("again/{i}")), i).unwrap();
    }
    File::open(at).unwrap().sync_all().unwrap();
    mount.unmount().unwrap();
    drop(datafs);
    let datafs = home.open().unwrap();
    let view = view(&datafs);
    assert_eq!(view.list("again").unwrap().len(), made / 2);
    for i in 0..made / 2 {
        assert!(view.read_file(&format!("again/{i}")).unwrap() == small(i), "{i}");
    }
    let report = datafs.fsck(&FsckOptions { scrub: true, repair: false }, &mut |_| {}).unwrap();
    assert!(report.is_sound(), "{:?}", report.found);
}

#[test]
fn a_disk_that_small_files_have_filled_is_emptied_again() {
    is_emptied_again(|| SmallDisk::new(16), false);
    is_emptied_again(|| SmallDisk::with_small_blocks(24), false);
}

#[test]
fn a_disk_that_small_files_have_filled_is_emptied_again_after_a_kill() {
    is_emptied_again(|| SmallDisk::new(16), true);
    is_emptied_again(|| SmallDisk::with_small_blocks(24), true);
}
