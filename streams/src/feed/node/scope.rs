//! Scope of a shared cache: all that decides the content of its row groups, and the address that follows from it.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;

use arrow::datatypes::SchemaRef;
use nix::unistd::geteuid;
use sha2::{Digest as _, Sha256};

use crate::feed::{Plan, PlanId};

/// Version of the messages and of the files. Processes of other versions do not meet.
const FORMAT: u32 = 2;

/// What names a shared cache, but for the user and the program.
pub(crate) struct Scope<'a> {
    /// Digest of the snapshot and of its listed files.
    pub(crate) content: &'a [u8; 32],
    /// The row groups, their parts and the selected rows are part of the plan.
    pub(crate) plan: PlanId,
    /// The selection, as text.
    pub(crate) selection: String,
    /// Row groups of the plan.
    pub(crate) groups: u32,
    /// The columns that are read.
    pub(crate) schema: &'a SchemaRef,
}

impl<'a> Scope<'a> {
    /// The scope of a plan; none if its row groups are not shared.
    pub(crate) fn of(plan: &'a Plan, schema: &'a SchemaRef) -> Option<Self> {
        let selection = plan.selection().map(ToString::to_string).unwrap_or_default();
        let (id, groups) = (plan.id(), plan.units());
        plan.content().map(|content| Self { content, plan: id, selection, groups, schema })
    }

    /// The abstract address: of one user and one version of the program.
    pub(super) fn address(&self) -> PathBuf {
        let mut digest = Sha256::new();
        let mut add = |bytes: &[u8]| {
            digest.update((bytes.len() as u64).to_le_bytes());
            digest.update(bytes);
        };
        add(b"millrace shared row groups");
        add(&FORMAT.to_le_bytes());
        add(env!("CARGO_PKG_VERSION").as_bytes());
        add(&geteuid().as_raw().to_le_bytes());
        add(self.content);
        add(self.plan.as_bytes());
        add(self.selection.as_bytes());
        add(&self.groups.to_le_bytes());
        for field in self.schema.fields() {
            add(field.name().as_bytes());
            add(format!("{:?} {}", field.data_type(), field.is_nullable()).as_bytes());
        }
        let name = format!("\0millrace-feed-{}", hex::encode(digest.finalize()));
        PathBuf::from(OsString::from_vec(name.into_bytes()))
    }
}
