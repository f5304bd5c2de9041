//! Defects of image files.

use std::fmt;

/// Why an image file gives no pixels. The text says what is wrong; the way out depends on where the image is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// There are no bytes.
    #[error("the image has no bytes")]
    Empty,
    /// The first bytes are those of no format that is read.
    #[error("the bytes are neither JPEG, PNG nor WebP")]
    Unknown,
    /// The file is damaged, truncated, or of a kind that the decoder does not know.
    #[error("the image cannot be decoded ({reason})")]
    Damaged {
        /// What the decoder says.
        reason: String,
    },
    /// The header claims more pixels than are allowed; none was decoded.
    #[error("the image says that it has {width} x {height} pixels, more than {pixels_max}")]
    TooLarge {
        /// Pixels of a row.
        width: u32,
        /// Rows.
        height: u32,
        /// The most pixels of an image.
        pixels_max: u64,
    },
    /// Scaling would take too much memory: images of one row can be millions of pixels wide.
    #[error("the image of {width} x {height} pixels is too long to be scaled to {out_width} x {out_height}")]
    TooLong {
        /// Pixels of a row.
        width: u32,
        /// Rows.
        height: u32,
        /// Pixels of a row of the result.
        out_width: u32,
        /// Rows of the result.
        out_height: u32,
    },
}

impl ImageError {
    pub(super) fn damaged(reason: impl fmt::Display) -> ImageError {
        ImageError::Damaged { reason: reason.to_string() }
    }

    /// What to do where the image is in a row of a dataset.
    pub(super) fn remedy_for_rows(&self) -> &'static str {
        match self {
            ImageError::Empty => "write one there, or leave such rows out (where)",
            ImageError::Unknown => "convert the image, or leave the row out (where)",
            ImageError::Damaged { .. } => "write it again, or leave the row out (where)",
            ImageError::TooLarge { .. } => "scale it down, or raise pixels_max",
            ImageError::TooLong { .. } => "scale it down, or leave the row out (where)",
        }
    }
}
