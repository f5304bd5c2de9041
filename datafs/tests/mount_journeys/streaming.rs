//! Journeys with a file that one program writes from front to back while others read it.
#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Home, pattern};

const PIECES: usize = 600;
const PIECE_BYTES: usize = 3_001;

#[test]
fn who_reads_a_file_that_is_being_written_sees_no_other_bytes() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let path = mount.path().join("log");
    let expected = pattern(PIECES * PIECE_BYTES, 1);
    // The second round overwrites an existing file.
    for _ in 0..2 {
        let mut file = File::create(&path).unwrap();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for again in [false, true] {
                let (path, expected, done) = (&path, &expected, &done);
                scope.spawn(move || {
                    let kept = File::open(path).unwrap();
                    while !done.load(Ordering::Acquire) {
                        let read = if again { fs::read(path).unwrap() } else { read_all(&kept) };
                        assert!(read == expected[..read.len()], "{} bytes", read.len());
                    }
                    assert!(read_all(&kept) == *expected);
                });
            }
            for piece in expected.chunks(PIECE_BYTES) {
                file.write_all(piece).unwrap();
                assert_eq!(file.metadata().unwrap().len(), fs::metadata(&path).unwrap().len());
            }
            done.store(true, Ordering::Release);
        });
        drop(file);
        assert!(fs::read(&path).unwrap() == expected);
    }
}

fn read_all(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; PIECES * PIECE_BYTES];
    let mut len = 0;
    loop {
        match file.read_at(&mut bytes[len..], len as u64).unwrap() {
            0 => break,
            n => len += n,
        }
    }
    bytes.truncate(len);
    bytes
}

#[test]
fn who_opens_a_file_that_is_being_written_may_write_it_as_well() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let path = mount.path().join("both");
    let mut first = File::create(&path).unwrap();
    first.write_all(&pattern(10_000, 1)).unwrap();
    let second = File::options().read(true).write(true).open(&path).unwrap();
    second.write_all_at(b"second", 5_000).unwrap();
    first.write_all(&pattern(10_000, 2)).unwrap();
    let mut expected = [pattern(10_000, 1), pattern(10_000, 2)].concat();
    expected[5_000..5_006].copy_from_slice(b"second");
    assert!(fs::read(&path).unwrap() == expected);
    first.write_all_at(b"first", 100).unwrap();
    expected[100..105].copy_from_slice(b"first");
    let mut read = vec![0; expected.len()];
    second.read_exact_at(&mut read, 0).unwrap();
    assert!(read == expected);
    drop(first);
    second.set_len(300).unwrap();
    assert!(fs::read(&path).unwrap() == expected[..300]);
}
