//! Measurement of reopening: the time until a volume with many files is usable again after its writer was
//! killed.

use std::time::Instant;

use millrace_datafs::{Datafs, OpenFlags, Owner, VolumeSpec};

use super::{config, number, say, volume};
use crate::child;

/// Files at the time of the kill; `MILLRACE_FILES` sets another number.
const COUNT: &str = "MILLRACE_FILES";
const FILES: u64 = 1_000_000;
const FILES_IN_A_FOLDER: u64 = 1_000;

/// The child: creates files until it is killed.
#[test]
fn filler() {
    let Some((home, _)) = child::task() else { return };
    let datafs = Datafs::open(&home, &config()).unwrap();
    let view = datafs.view(&VolumeSpec::live(volume())).unwrap();
    let owner = Owner { uid: 0, gid: 0 };
    for folder in 0.. {
        let made = view.mkdir(view.root(), folder.to_string().as_ref(), 0o755, owner).unwrap();
        for file in 0..FILES_IN_A_FOLDER {
            let name = file.to_string();
            let (_, file) =
                view.create(made.node, name.as_ref(), 0o644, owner, OpenFlags::READ_WRITE).unwrap();
            file.write_at(0, name.as_bytes()).unwrap();
        }
        say("folder", folder);
    }
}

#[test]
#[ignore = "takes minutes: cargo test -p millrace-datafs --test datafs reopening -- --ignored --nocapture"]
fn reopening_is_quick_however_many_files_there_are() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path();
    Datafs::open(home, &config()).unwrap().volume_create(&volume()).unwrap();
    let mut child = child::spawn("kills::reopening::filler", home, 0);
    let folders = number(COUNT, FILES) / FILES_IN_A_FOLDER;
    assert!(child::reports(&mut child).any(|(word, n)| word == "folder" && n + 1 >= folders));
    child.kill().unwrap();
    child.wait().unwrap();
    let begin = Instant::now();
    let datafs = Datafs::open(home, &config()).unwrap();
    let view = datafs.view(&VolumeSpec::live(volume())).unwrap();
    assert_eq!(view.read_file("0/17").unwrap(), b"17"[..]);
    view.write_file("after", b"goes on").unwrap();
    println!("reopened with {} files in {:?}", folders * FILES_IN_A_FOLDER, begin.elapsed());
}
