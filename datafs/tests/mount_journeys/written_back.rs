//! Journeys with files that stay open, whose data the write-back timer commits for other mounts.
#![allow(clippy::unwrap_used)]

use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::time::{Duration, Instant};

use super::{Home, mount_of};

/// The timer takes five seconds; more for a busy machine.
const AT_MOST: Duration = Duration::from_secs(60);

#[test]
fn what_is_written_to_an_open_file_reaches_another_mount() {
    let Some(home) = Home::new() else { return };
    let other = home.again();
    let (one, two) = (home.mount("data"), mount_of(&other, "data", &home.at("other")));
    fs::write(one.path().join("log"), b"begun\n").unwrap();
    let mut reader = File::open(two.path().join("log")).unwrap();
    let mut seen = String::new();
    reader.read_to_string(&mut seen).unwrap();
    let mut log = OpenOptions::new().append(true).open(one.path().join("log")).unwrap();
    log.write_all(b"goes on\n").unwrap();
    let mut scattered = File::create(one.path().join("scattered")).unwrap();
    scattered.write_all(&super::pattern(1_000_000, 1)).unwrap();
    let until = Instant::now() + AT_MOST;
    while seen != "begun\ngoes on\n" || fs::metadata(two.path().join("scattered")).unwrap().len() < 1_000_000
    {
        assert!(Instant::now() < until, "{seen:?}");
        std::thread::sleep(crate::child::POLL);
        reader.read_to_string(&mut seen).unwrap();
    }
    assert!(fs::read(two.path().join("scattered")).unwrap() == super::pattern(1_000_000, 1));
    drop((log, scattered));
}
