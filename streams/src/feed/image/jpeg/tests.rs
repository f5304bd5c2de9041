//! Tests of the JPEG decoder against the pixels of Pillow, and on damaged files.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::fixtures::FILES;
use super::*;

fn file(name: &str) -> Vec<u8> {
    let (.., file, _) = FILES.iter().find(|(found, ..)| *found == name).unwrap();
    STANDARD.decode(file).unwrap()
}

fn decode(file: &[u8]) -> Result<DynamicImage, JpegError> {
    Jpeg::new(file)?.unwrap().decode()
}

fn refused(file: &[u8], words: &str) {
    let error = decode(file).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains(words), "{error:?} without {words:?}");
}

/// The place behind the header of the last scan.
fn last_scan(file: &[u8]) -> usize {
    file.windows(2).rposition(|marker| marker == [0xff, 0xda]).unwrap() + 10
}

#[test]
fn every_pixel_is_that_of_pillow() {
    for (name, size, file, pixels) in FILES {
        let image = decode(&STANDARD.decode(file).unwrap()).unwrap();
        assert_eq!((image.width(), image.height()), size, "{name}");
        assert_eq!(image.as_bytes(), STANDARD.decode(pixels).unwrap(), "{name}");
    }
}

#[test]
fn a_scan_that_ends_early_is_not_filled_with_grey() {
    for (_, _, file, _) in FILES {
        let mut file = STANDARD.decode(file).unwrap();
        let scan = last_scan(&file);
        // Half of the scan is gone, the end marker is there.
        file.drain(scan + (file.len() - scan) / 2..file.len() - 2);
        refused(&file, "unexpected end of data");
    }
}

#[test]
fn a_file_with_more_scans_than_encoders_write_is_refused() {
    let mut file = file("grey");
    let scan = file[last_scan(&file) - 10..file.len() - 2].to_vec();
    file.truncate(file.len() - 2);
    for _ in 0..SCANS_MAX {
        file.extend(&scan);
    }
    file.extend([0xff, 0xd9]);
    let error = Jpeg::new(&file).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("scan"), "{error}");
}

#[test]
fn other_depths_and_numbers_of_components_are_left_to_the_other_decoder() {
    let frame = |file: &[u8]| file.windows(2).position(|marker| marker == [0xff, 0xc0]).unwrap();
    let mut deep = file("whole");
    let at = frame(&deep);
    deep[at + 4] = 12;
    assert!(Jpeg::new(&deep).is_ok_and(|jpeg| jpeg.is_none()));
}
