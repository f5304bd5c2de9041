//! Object ids: the identity of an object, its layout, and its name in the store.
//!
//! An id is 16 hex digits for the session (the process) that wrote it, then 16 random ones. The first two
//! random digits name the object's directory in a local store. The three lowest bits of the id are its
//! layout, so that reading the layout needs no lookup:
//!  - *framed* (up to 1 MiB): data, checksum table, footer in one object; one file to sync;
//!  - *plain* (larger): the data alone, byte for byte the file's image, so that the mount can pass the file
//!    to the kernel; the table and footer are in a sidecar `NAME.sums`, written after the data;
//!  - *pack*: the bytes of many small files, each behind a header with its checksums (see `pack.rs`). The
//!    process that writes the pack appends to it in place;
//!  - *encoded*: compressed or encrypted frames, their table and a footer in one object (see `encoded.rs`);
//!  - *gathered*: a pack for a store that takes only whole objects: the content of a pack as the data of an
//!    encoded object, written in one request (see `remote_pack.rs`).

mod compression;
mod extent;
mod keys;

use std::fmt;
use std::str::FromStr;

pub use compression::Compression;
pub(crate) use extent::Extent;
pub(crate) use keys::{CHECK_BYTES, ExpectedKeys, KeyIdentity};

/// Ending of the sidecar that holds the checksums of a plain object.
pub(crate) const SUMS_SUFFIX: &str = ".sums";

/// Where an object keeps its checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Behind the data, in the same object.
    Framed,
    /// In a sidecar; the object is the data alone.
    Plain,
    /// In the header of each piece.
    Pack,
    /// Behind the frames, which are compressed or encrypted.
    Encoded,
    /// As in an encoded object; the data is the pieces of a pack.
    RemotePack,
}

/// The bits of an id that hold the layout.
const LAYOUT_BITS: u64 = 7;

/// The name of an object: 64 bits of session, 61 random bits, 3 bits of layout.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ObjectId(u128);

impl ObjectId {
    /// The id of a new object of a session: random bits, the three lowest replaced by the layout.
    pub(crate) fn new(session: u64, random: u64, layout: Layout) -> ObjectId {
        let bits = match layout {
            Layout::Framed => 0,
            Layout::Plain => 1,
            Layout::Pack => 2,
            Layout::Encoded => 3,
            Layout::RemotePack => 4,
        };
        ObjectId(u128::from(session) << 64 | u128::from(random & !LAYOUT_BITS | bits))
    }

    /// The session that wrote it.
    pub(crate) fn session(self) -> u64 {
        (self.0 >> 64) as u64
    }

    /// The id as 16 bytes, for metadata records.
    pub(crate) fn to_bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }

    /// The id from the bytes of [`ObjectId::to_bytes`]; every 16 bytes are an id.
    pub(crate) fn from_bytes(bytes: [u8; 16]) -> ObjectId {
        ObjectId(u128::from_be_bytes(bytes))
    }

    /// Where this object keeps its checksums.
    pub(crate) fn layout(self) -> Layout {
        match self.0 as u64 & LAYOUT_BITS {
            1 => Layout::Plain,
            2 => Layout::Pack,
            3 => Layout::Encoded,
            4 => Layout::RemotePack,
            _ => Layout::Framed,
        }
    }

    /// Whether its checksums are a separate file beside the data.
    pub(crate) fn has_sums_beside(self) -> bool {
        self.layout() == Layout::Plain
    }

    /// Whether offsets in the object equal offsets in the stored file.
    pub(crate) fn is_stored_as_it_is(self) -> bool {
        matches!(self.layout(), Layout::Plain | Layout::Pack)
    }

    /// Whether it holds the bytes of many small files.
    pub(crate) fn is_pack(self) -> bool {
        matches!(self.layout(), Layout::Pack | Layout::RemotePack)
    }

    /// Whether readers decode it frame by frame, as an encoded object.
    pub(crate) fn is_encoded(self) -> bool {
        matches!(self.layout(), Layout::Encoded | Layout::RemotePack)
    }

    /// First byte of the random half: the directory in a local store, `0..=255`.
    pub(crate) fn fan_out(self) -> u8 {
        self.to_bytes()[8]
    }

    /// Name of the data, relative to the store.
    pub(crate) fn data_name(self) -> String {
        format!("{:02x}/{self}", self.fan_out())
    }

    /// Name of the file that holds the checksums, relative to the store.
    pub(crate) fn sums_name(self) -> String {
        match self.layout() {
            Layout::Framed | Layout::Pack | Layout::Encoded | Layout::RemotePack => self.data_name(),
            Layout::Plain => self.data_name() + SUMS_SUFFIX,
        }
    }
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for ObjectId {
    type Err = ();

    /// Takes exactly what `Display` writes: 32 lower-case hex digits.
    fn from_str(s: &str) -> Result<ObjectId, ()> {
        let digits = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        if s.len() != 32 || !s.bytes().all(digits) {
            return Err(());
        }
        u128::from_str_radix(s, 16).map(ObjectId).map_err(|_| ())
    }
}

/// A complete, durable object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StoredObject {
    /// Its name.
    pub(crate) id: ObjectId,
    /// Bytes of data in it.
    pub(crate) len: u64,
}
