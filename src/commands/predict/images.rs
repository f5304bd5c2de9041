//! Image input of `millrace predict`: finds, reads and decodes image files within bounds.

use std::io::{self, Cursor, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder as _, ImageError, ImageFormat, ImageReader, Limits};

use super::read::Records;
use super::source::Source;
use crate::failure::{Exit, fail, failure};
use crate::inference::{Batch, RecordInfo};
use crate::output::bytes;

/// Largest image file.
const FILE_BYTES_MAX: u64 = 64 << 20;
/// Longest side of an image, in pixels.
const SIDE_MAX: u32 = 16_384;
/// Most bytes of a decoded image: a small file may claim any size.
const DECODED_BYTES_MAX: u64 = 256 << 20;

/// Whether a file name is that of an image.
pub(super) fn is_image(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    ["png", "jpg", "jpeg"].iter().any(|image| extension.eq_ignore_ascii_case(image))
}

/// The images of a folder, sorted by name.
pub(super) fn of_folder(folder: &Path) -> Result<Vec<PathBuf>> {
    let shown = folder.display();
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot read {shown}"))?;
    let paths = entries.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<_>>>();
    let mut paths = paths.with_context(|| format!("cannot read {shown}"))?;
    paths.retain(|path| is_image(path) && path.is_file());
    paths.sort_unstable();
    if paths.is_empty() {
        return fail(Exit::NotFound, format!("{shown} has no images: files that end in .png, .jpg or .jpeg"));
    }
    Ok(paths)
}

impl Source {
    /// Reads one image as a record.
    pub(super) fn image<S: FnMut(Batch) -> bool>(mut self, records: &mut Records<'_, S>) -> Result<()> {
        let mut content = Vec::new();
        let read = self.reader()?.take(FILE_BYTES_MAX + 1).read_to_end(&mut content);
        let name = self.name;
        if read.with_context(|| format!("cannot read {name}"))? as u64 > FILE_BYTES_MAX {
            return fail(Exit::Usage, format!("{name} is larger than {}", bytes(FILE_BYTES_MAX)));
        }
        let conversion = records.conversion;
        // Set whenever the sources are images.
        let Some(form) = &conversion.images else { return Ok(()) };
        let image = decode(&content).map_err(|(exit, reason)| failure(exit, format!("{name} {reason}")))?;
        let row = form
            .elements(image)
            .and_then(|elements| conversion.intake.row_of(vec![elements]).map_err(|error| error.to_string()));
        match row {
            Ok(row) => records.push(row, RecordInfo { label: None, file: Some(name) }),
            Err(reason) => return fail(Exit::Usage, format!("{name}: {reason}")),
        }
        Ok(())
    }
}

/// Decodes an image and applies its orientation.
fn decode(content: &[u8]) -> Result<DynamicImage, (Exit, String)> {
    let broken = |reason: &dyn std::fmt::Display| (Exit::Corrupt, format!("cannot be decoded: {reason}"));
    let mut reader =
        ImageReader::new(Cursor::new(content)).with_guessed_format().map_err(|error| broken(&error))?;
    match reader.format() {
        Some(ImageFormat::Png) => {}
        Some(ImageFormat::Jpeg) if is_truncated_jpeg(content) => {
            return Err(broken(&"the file ends before the end of the image"));
        }
        Some(ImageFormat::Jpeg) => {}
        _ => return Err((Exit::Corrupt, "is neither PNG nor JPEG".to_owned())),
    }
    let too_large = || {
        let most = bytes(DECODED_BYTES_MAX);
        let reason = format!(
            "says that it is larger than {SIDE_MAX} pixels a side, or than {most} decoded: scale it down first"
        );
        (Exit::Usage, reason)
    };
    let refused = |error: ImageError| match error {
        ImageError::Limits(_) => too_large(),
        other => broken(&other),
    };
    let mut limits = Limits::no_limits();
    limits.max_image_width = Some(SIDE_MAX);
    limits.max_image_height = Some(SIDE_MAX);
    limits.max_alloc = Some(DECODED_BYTES_MAX);
    reader.limits(limits);
    let mut decoder = reader.into_decoder().map_err(refused)?;
    if decoder.total_bytes() > DECODED_BYTES_MAX {
        return Err(too_large());
    }
    // Unreadable metadata means no rotation.
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    let mut image = DynamicImage::from_decoder(decoder).map_err(refused)?;
    image.apply_orientation(orientation);
    Ok(image)
}

/// Whether a JPEG file is truncated: the decoder would fill the missing part with gray.
fn is_truncated_jpeg(content: &[u8]) -> bool {
    // After the start marker come segments with their lengths, up to the first scan.
    let mut at = 2_usize;
    loop {
        match content.get(at..at.saturating_add(4)) {
            Some([0xff, 0xff, ..]) => at += 1,
            Some([0xff, marker, high, low]) => {
                let begins = *marker == 0xda;
                at += 2 + usize::from(u16::from_be_bytes([*high, *low]));
                if begins {
                    break;
                }
            }
            // The decoder reports the error.
            Some(_) => return false,
            None => return true,
        }
    }
    !content.get(at..).is_some_and(|scans| scans.windows(2).any(|pair| pair == [0xff, 0xd9]))
}

#[cfg(test)]
mod tests;
