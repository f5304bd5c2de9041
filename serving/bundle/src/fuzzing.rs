//! Entry points of the fuzz targets (`fuzz/`) into the parsers of this crate. Not part of the interface.

use object_store::path::Path;

use crate::repository::parse_manifest;
use crate::statistics::Statistics;

/// Parses a manifest and writes it again; `None` when it is refused.
pub fn manifest(json: &[u8]) -> Option<Vec<u8>> {
    let manifest = parse_manifest(&Path::from("manifest.json"), json).ok()?;
    serde_json::to_vec(&manifest).ok()
}

/// Parses statistics and writes them again; `None` when they are refused.
pub fn statistics(json: &[u8]) -> Option<Vec<u8>> {
    Some(Statistics::read(json).ok()?.written())
}
