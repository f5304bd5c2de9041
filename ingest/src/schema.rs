//! Schema of a job's rows: column types, declared or inferred, and the allowed changes.
//!
//! The schema of a job is fixed in the volume together with the first files and only grows: a later schema
//! may add nullable columns, never change or remove one. [`Schema::evolve`] enforces this for declared
//! schemas; an inferred schema only ever gets new nullable columns.

mod infer;
#[cfg(test)]
mod tests;
mod types;

pub(crate) use infer::{Inference, Shape, infer_value};
pub use types::{ParseTypeError, Type};

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use arrow::datatypes::{Field as ArrowField, Schema as ArrowSchema};
use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Most columns that one job's schema may have.
pub const COLUMNS_MAX: usize = 1000;
/// Longest column name, in bytes.
pub const COLUMN_NAME_BYTES_MAX: usize = 256;
/// Columns that hold the origin of a record; a record's own fields may not use these names.
pub const LINEAGE_COLUMNS: [&str; 4] = ["_topic", "_partition", "_offset", "_timestamp"];

/// One column.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Field {
    /// Name, as in the JSON object.
    pub name: String,
    /// Type of every value.
    #[serde(rename = "type")]
    pub kind: Type,
    /// Whether a record may omit the field or hold `null`.
    pub nullable: bool,
}

/// Origin of a schema, which decides whether records may extend it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// Written in the configuration.
    Declared,
    /// Derived from the first records.
    Inferred,
}

/// The columns of a job, in the order in which the files have them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schema {
    /// Declared or inferred.
    pub origin: Origin,
    /// The columns.
    pub fields: Vec<Field>,
}

/// Reason why a schema is refused, with the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SchemaError(pub(crate) String);

impl Schema {
    /// Checks names and counts.
    ///
    /// # Errors
    /// A name that is empty, too long, reserved or used twice, or too many columns.
    pub fn new(origin: Origin, fields: Vec<Field>) -> Result<Self, SchemaError> {
        if fields.len() > COLUMNS_MAX {
            return Err(SchemaError(format!("{} columns, at most {COLUMNS_MAX} are allowed", fields.len())));
        }
        let mut names = HashSet::new();
        for field in &fields {
            check_name(&field.name)?;
            if !names.insert(field.name.as_str()) {
                return Err(SchemaError(format!("column {:?} is declared twice", field.name)));
            }
        }
        Ok(Self { origin, fields })
    }

    /// The same columns for Arrow, without lineage columns.
    #[must_use]
    pub fn arrow_fields(&self) -> Vec<Arc<ArrowField>> {
        self.fields.iter().map(|f| Arc::new(ArrowField::new(&f.name, f.kind.arrow(), f.nullable))).collect()
    }

    /// An Arrow schema of these columns alone.
    #[must_use]
    pub fn arrow(&self) -> ArrowSchema {
        ArrowSchema::new(self.arrow_fields())
    }

    /// The schema that results when files already hold `self` and the job now declares `wanted`:
    /// the columns of `self` in their order, then the new ones.
    ///
    /// # Errors
    /// A column of `self` is missing, has another type or became required, or a new column is
    /// required: old files could not be read under such a schema.
    pub fn evolve(&self, wanted: &Schema) -> Result<Schema, SchemaError> {
        let mut fields = Vec::with_capacity(wanted.fields.len());
        for old in &self.fields {
            let Some(new) = wanted.fields.iter().find(|f| f.name == old.name) else {
                return Err(SchemaError(format!(
                    "column {:?} ({}) is in the volume but no longer declared: declare it again, \
                     or land under a new job name and path",
                    old.name, old.kind
                )));
            };
            if new.kind != old.kind {
                return Err(SchemaError(format!(
                    "column {:?} is {} in the volume and declared as {}: a type cannot change, \
                     land under a new job name and path",
                    old.name, old.kind, new.kind
                )));
            }
            if old.nullable && !new.nullable {
                return Err(SchemaError(format!(
                    "column {:?} is nullable in the volume and declared as required: declare it \
                     as \"{}?\"",
                    old.name, old.kind
                )));
            }
            fields.push(new.clone());
        }
        for new in &wanted.fields {
            if self.fields.iter().any(|f| f.name == new.name) {
                continue;
            }
            if !new.nullable {
                return Err(SchemaError(format!(
                    "new column {:?} must be nullable, because files without it exist: declare it \
                     as \"{}?\"",
                    new.name, new.kind
                )));
            }
            fields.push(new.clone());
        }
        Schema::new(wanted.origin, fields)
    }
}

/// Checks one column name.
///
/// # Errors
/// Empty, too long, or one of [`LINEAGE_COLUMNS`].
pub(crate) fn check_name(name: &str) -> Result<(), SchemaError> {
    if name.is_empty() {
        return Err(SchemaError("a column name is empty".to_owned()));
    }
    if name.len() > COLUMN_NAME_BYTES_MAX {
        return Err(SchemaError(format!(
            "a column name of {} bytes, at most {COLUMN_NAME_BYTES_MAX} are allowed",
            name.len()
        )));
    }
    if LINEAGE_COLUMNS.contains(&name) {
        return Err(SchemaError(format!("column name {name:?} is reserved for the source of a record")));
    }
    Ok(())
}

/// A schema as written in the configuration: `{ id = "int64", note = "utf8?" }`, where a trailing
/// `?` makes a column nullable. Keeps the order that the file format delivers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeclaredSchema(pub Vec<(String, String)>);

impl DeclaredSchema {
    /// Parses the types.
    ///
    /// # Errors
    /// An unknown type, or what [`Schema::new`] refuses.
    pub fn schema(&self) -> Result<Schema, SchemaError> {
        let mut fields = Vec::with_capacity(self.0.len());
        for (name, text) in &self.0 {
            let text = text.trim();
            let (kind, nullable) = match text.strip_suffix('?') {
                Some(kind) => (kind, true),
                None => (text, false),
            };
            let kind = kind.parse().map_err(|e| SchemaError(format!("column {name:?}: {e}")))?;
            fields.push(Field { name: name.clone(), kind, nullable });
        }
        if fields.is_empty() {
            return Err(SchemaError("a declared schema needs at least one column".to_owned()));
        }
        Schema::new(Origin::Declared, fields)
    }
}

impl Serialize for DeclaredSchema {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, kind) in &self.0 {
            map.serialize_entry(name, kind)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for DeclaredSchema {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = DeclaredSchema;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table of column name = \"type\"")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<DeclaredSchema, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(DeclaredSchema(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}
