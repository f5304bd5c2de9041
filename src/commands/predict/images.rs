//! Image input of `millrace predict`: finds, reads and decodes image files within bounds.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use millrace_streams::feed::{Channels, DecodedImage, IMAGE_PIXELS_MAX, ImageError};

use super::read::Records;
use super::source::Source;
use crate::failure::{Exit, fail, failure};
use crate::inference::{Batch, RecordInfo};
use crate::output::bytes;

/// Largest image file.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// Whether a file name is that of an image.
pub(super) fn is_image(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    ["png", "jpg", "jpeg", "webp"].iter().any(|image| extension.eq_ignore_ascii_case(image))
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
        return fail(
            Exit::NotFound,
            format!("{shown} has no images: files that end in .png, .jpg, .jpeg or .webp"),
        );
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
        let image = decode(&content, form.channels())
            .map_err(|(exit, reason)| failure(exit, format!("{name} {reason}")))?;
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

/// Decodes an image as feeds do, so that a model sees the values that it learned from.
fn decode(content: &[u8], channels: Channels) -> Result<DecodedImage, (Exit, String)> {
    DecodedImage::decode(content, channels, IMAGE_PIXELS_MAX).map_err(|error| match error {
        ImageError::Empty | ImageError::Unknown => {
            (Exit::Corrupt, "is neither JPEG, PNG nor WebP".to_owned())
        }
        ImageError::TooLarge { width, height, pixels_max } => {
            let reason = format!(
                "says that it has {width} by {height} pixels, more than {pixels_max}: scale it down first"
            );
            (Exit::Usage, reason)
        }
        ImageError::Damaged { reason } => (Exit::Corrupt, format!("cannot be decoded: {reason}")),
        other => (Exit::Corrupt, format!("cannot be decoded: {other}")),
    })
}

#[cfg(test)]
mod tests;
