//! Scope of a shared cache: all that decides the content of its row groups, with its address and its key.
//!
//! Both are SHA-256 digests of the same values under different names. The values include the identity of the snapshot,
//! which depends on the random number of the metadata. Only a process that reads the home knows that number. Every process
//! of the network namespace sees the address, which reveals neither the identity nor the key.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use arrow::datatypes::{DataType, Field, FieldRef, SchemaRef};
use nix::unistd::geteuid;
use sha2::{Digest as _, Sha256};

use crate::feed::{Plan, PlanId};

/// Version of the messages and of the files. Processes of other versions do not meet.
const FORMAT: u32 = 3;
/// Version of what a decoded row group is. It grows with every change of the rows, columns or buffers that decoding the
/// same file gives. Two builds of one version of the program would otherwise exchange different rows.
const DECODE_RULES: u32 = 1;
/// The network namespace of this process.
const NETWORK: &str = "/proc/self/ns/net";

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
        let name = format!("\0millrace-feed-{}", hex::encode(self.words("millrace-feed-address").end()));
        PathBuf::from(OsString::from_vec(name.into_bytes()))
    }

    /// The key of the proofs between its processes.
    pub(super) fn key(&self) -> [u8; 32] {
        let mut words = self.words("millrace-feed-key");
        // An address is taken once in a namespace. So no process can pass proofs on to a server of another namespace.
        words.number(std::fs::metadata(NETWORK).map_or(0, |found| found.ino()));
        words.end()
    }

    fn words(&self, purpose: &str) -> Words {
        let mut words = Words(Sha256::new());
        words.text(purpose);
        words.number(FORMAT.into());
        words.number(DECODE_RULES.into());
        words.text(env!("CARGO_PKG_VERSION"));
        words.number(geteuid().as_raw().into());
        words.bytes(self.content);
        words.bytes(self.plan.as_bytes());
        words.text(&self.selection);
        words.number(self.groups.into());
        words.fields("columns", self.schema.fields().iter());
        words
    }
}

/// A digest of values, each after its length. Equal values give equal digests in every process.
struct Words(Sha256);

impl Words {
    fn bytes(&mut self, bytes: &[u8]) {
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    fn text(&mut self, text: &str) {
        self.bytes(text.as_bytes());
    }

    fn number(&mut self, number: u64) {
        self.bytes(&number.to_le_bytes());
    }

    fn fields<'f>(&mut self, kind: &str, fields: impl ExactSizeIterator<Item = &'f FieldRef>) {
        self.text(kind);
        self.number(fields.len() as u64);
        for field in fields {
            self.field(field);
        }
    }

    fn field(&mut self, field: &Field) {
        self.text(field.name());
        self.number(field.is_nullable().into());
        // In an order that does not depend on the process.
        let metadata: BTreeMap<&String, &String> = field.metadata().iter().collect();
        self.number(metadata.len() as u64);
        for (key, value) in metadata {
            self.text(key);
            self.text(value);
        }
        self.kind(field.data_type());
    }

    /// A type and those within it. The text of a type with fields depends on the process: it has their metadata in the
    /// order of a hash map.
    fn kind(&mut self, kind: &DataType) {
        match kind {
            DataType::List(item) => self.fields("List", [item].into_iter()),
            DataType::ListView(item) => self.fields("ListView", [item].into_iter()),
            DataType::LargeList(item) => self.fields("LargeList", [item].into_iter()),
            DataType::LargeListView(item) => self.fields("LargeListView", [item].into_iter()),
            DataType::FixedSizeList(item, size) => {
                self.fields(&format!("FixedSizeList {size}"), [item].into_iter());
            }
            DataType::Struct(fields) => self.fields("Struct", fields.iter()),
            DataType::Union(fields, mode) => {
                let (ids, fields): (Vec<i8>, Vec<&FieldRef>) = fields.iter().unzip();
                self.fields(&format!("Union {mode:?} {ids:?}"), fields.into_iter());
            }
            DataType::Map(entries, is_sorted) => {
                self.fields(&format!("Map {is_sorted}"), [entries].into_iter());
            }
            DataType::RunEndEncoded(ends, values) => {
                self.fields("RunEndEncoded", [ends, values].into_iter());
            }
            DataType::Dictionary(keys, values) => {
                self.text("Dictionary");
                self.kind(keys);
                self.kind(values);
            }
            DataType::Null
            | DataType::Boolean
            | DataType::Int8
            | DataType::Int16
            | DataType::Int32
            | DataType::Int64
            | DataType::UInt8
            | DataType::UInt16
            | DataType::UInt32
            | DataType::UInt64
            | DataType::Float16
            | DataType::Float32
            | DataType::Float64
            | DataType::Timestamp(..)
            | DataType::Date32
            | DataType::Date64
            | DataType::Time32(_)
            | DataType::Time64(_)
            | DataType::Duration(_)
            | DataType::Interval(_)
            | DataType::Binary
            | DataType::FixedSizeBinary(_)
            | DataType::LargeBinary
            | DataType::BinaryView
            | DataType::Utf8
            | DataType::LargeUtf8
            | DataType::Utf8View
            | DataType::Decimal32(..)
            | DataType::Decimal64(..)
            | DataType::Decimal128(..)
            | DataType::Decimal256(..) => self.text(&format!("{kind:?}")),
        }
    }

    fn end(self) -> [u8; 32] {
        self.0.finalize().into()
    }
}
