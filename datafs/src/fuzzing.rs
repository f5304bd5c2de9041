//! Entry points of the fuzz targets (`fuzz/`) into the decoders of this crate. Not part of the interface.

use crate::fs::acl::Acl;
use crate::fs::lock;
use crate::fs::orphan::Orphan;
use crate::identity::StoreRow;
use crate::meta::inode::{Dentry, Inode, decode_extent, encode_extent};
use crate::meta::keys;
use crate::meta::references::References;
use crate::meta::snapshot::SnapshotRow;
use crate::meta::versioned::VolumeRow;

pub use crate::data::fuzzing::{encoded, framed, objects, pack, piece, stored};

/// Decodes a record and encodes it again; `None` when the decoder refuses the bytes.
pub type Recode = fn(&[u8]) -> Option<Vec<u8>>;

/// The records of the metadata, by name.
pub const RECORDS: [(&str, Recode); 10] = [
    ("inode", |bytes| Inode::decode(bytes).ok().map(|it| it.encode())),
    ("directory entry", |bytes| Dentry::decode(bytes).ok().map(Dentry::encode)),
    ("extent", |bytes| decode_extent(0, bytes).ok().map(|it| encode_extent(&it))),
    ("volume", |bytes| VolumeRow::decode(bytes).ok().map(|it| it.encode())),
    ("snapshot", |bytes| SnapshotRow::decode(bytes).ok().map(|it| it.encode())),
    ("reference count", |bytes| References::decode(bytes).ok().map(References::encode)),
    ("store", |bytes| StoreRow::decode(bytes).ok().map(StoreRow::encode)),
    ("locks", |bytes| lock::decode(bytes).ok().map(|it| lock::encode(&it))),
    ("orphan", |bytes| Orphan::decode(bytes).ok().map(|it| it.encode())),
    ("access control list", |bytes| Acl::decode(bytes).ok().flatten().map(|it| it.encode())),
];

/// Takes a metadata key apart in each way that readers do.
pub fn key(bytes: &[u8]) {
    let _ = (keys::number(bytes), keys::scope_len(bytes), keys::node_of(bytes), keys::xattr_name(bytes));
    let _ = (keys::extent_offset(bytes), keys::child_name(bytes), keys::ino_of(bytes), keys::child_of(bytes));
    let _ = (keys::application_name(bytes), keys::live_child(bytes));
    if let Some((volume, record)) = keys::live_record(bytes) {
        assert_eq!(keys::live(volume, &record), bytes, "a live key is written as it was read");
    }
    let end = keys::after_prefix(bytes);
    assert!(end.is_empty() || end.as_slice() > bytes, "the end is above the prefix");
}

/// The password that the PostgreSQL engine finds in a metadata URL.
pub fn password(url: &str) -> Option<Vec<u8>> {
    let config: tokio_postgres::Config = url.parse().ok()?;
    config.get_password().map(<[u8]>::to_vec)
}
