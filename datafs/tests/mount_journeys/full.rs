//! A disk that holds all of a home, metadata too, and has not a byte left.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{PermissionsExt as _, symlink};

use millrace_datafs::{Config, Datafs, Error, mount};

use super::{errno, mount_of, names, pattern};
use crate::trouble::SmallDisk;

/// Small enough to be kept in the metadata.
const SMALL: usize = 3_000;
/// More of them than fit on the disk.
const FILES_MAX: usize = 5_000;

/// Something that is done again and again, by number.
type Attempt<'a> = &'a dyn Fn(usize) -> io::Result<()>;

#[test]
fn a_full_disk_is_told_as_one_whatever_is_done_and_everything_goes_on_with_space() {
    if let Err(reason) = mount::can_mount() {
        return millrace_testing::skip(millrace_testing::Need::Fuse, reason);
    }
    let Some(disk) = SmallDisk::new(12) else { return };
    let home = disk.0.path().join("home");
    let config = Config { garbage_grace_ms: 0, ..Config::default() };
    let datafs = Datafs::open(&home, &config).unwrap();
    datafs.volume_create(&"data".parse().unwrap()).unwrap();
    let place = tempfile::tempdir().unwrap();
    let mount = mount_of(&datafs, "data", &place.path().join("mnt"));
    let at = mount.path();
    let large = pattern(600_000, 1);
    fs::write(at.join("large"), &large).unwrap();
    fs::create_dir(at.join("dir")).unwrap();
    fs::write(at.join("moved.0"), b"").unwrap();
    File::open(at).unwrap().sync_all().unwrap();

    let ballast = disk.0.path().join("ballast");
    let mut file = File::create(&ballast).unwrap();
    while file.write_all(&[1; 4_096]).is_ok() {}
    drop(file);
    // What the log has room for still goes.
    let small = |i: usize| pattern(SMALL, i as u64);
    let mut made = 0;
    let full = loop {
        match fs::write(at.join(format!("dir/{made}")), small(made)) {
            Ok(()) => made += 1,
            Err(error) => break error,
        }
        assert!(made < FILES_MAX);
    };
    assert_eq!(errno::<()>(Err(full)), libc::ENOSPC);
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
                // The one before it was refused.
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
    // Who comes now is told the same, or finds room.
    match Datafs::open(&home, &config) {
        Ok(other) => assert!(other.view(&"data".parse().unwrap()).unwrap().stat("large").is_ok()),
        Err(error) => assert!(matches!(error, Error::NoSpace { .. }), "{error:?}"),
    }

    fs::remove_file(&ballast).unwrap();
    for i in 0..200 {
        fs::write(at.join(format!("after.{i}")), small(i)).unwrap();
    }
    File::open(at).unwrap().sync_all().unwrap();
    assert_eq!(names(&at.join("dir")), there);
    let seen = names(at);
    mount.unmount().unwrap();
    drop(datafs);
    let again = Datafs::open(&home, &config).unwrap();
    let view = again.view(&"data".parse().unwrap()).unwrap();
    let mut listed: Vec<String> = view.list("").unwrap().into_iter().map(|entry| entry.name).collect();
    listed.sort();
    assert_eq!(listed, seen);
    assert!(view.read_file("large").unwrap()[..600_000] == large);
    assert!(view.read_file("after.199").unwrap() == small(199));
}
