//! One column of several files or sources: its type, whether it has nulls, and its extension type.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, FieldRef};

use super::types::unite;

/// Prefix of the keys of metadata that name an extension type.
const EXTENSION_KEYS: &str = "ARROW:extension:";

/// A column of the places seen so far: files of a dataset, or sources of a mixture.
pub(crate) struct Column<'a> {
    field: Field,
    /// The first place with the column's type.
    place: &'a str,
    seen: usize,
    /// The extension type of all places; `None` while all of them have nulls only.
    extension: Option<HashMap<String, String>>,
}

impl<'a> Column<'a> {
    /// The column as its first place has it, whose values have the type `kind`; see [`plain`].
    pub(crate) fn new(field: &Field, kind: DataType, place: &'a str) -> Self {
        let extension = extension(field, &kind);
        let field = Field::new(field.name(), kind, field.is_nullable());
        Self { field, place, seen: 1, extension }
    }

    /// The name, and the type so far.
    pub(crate) fn field(&self) -> &Field {
        &self.field
    }

    /// The first place with this type.
    pub(crate) fn place(&self) -> &'a str {
        self.place
    }

    /// Adds the column of another place, whose values have the type `kind`. False if the types do not fit each other.
    pub(crate) fn add(&mut self, field: &Field, kind: &DataType, place: &'a str) -> bool {
        let known = self.field.data_type();
        let Some(common) = unite(known, kind) else { return false };
        let is_null_beside_values = is_null(known) != is_null(kind);
        let is_widened = !is_null_beside_values && !known.equals_datatype(kind);
        self.extension = match (self.extension.take(), extension(field, kind)) {
            // An extension type has one type of storage.
            (Some(_), Some(_)) if is_widened => Some(HashMap::new()),
            (Some(one), Some(other)) if one != other => Some(HashMap::new()),
            (one, other) => one.or(other),
        };
        self.seen += 1;
        if !known.equals_datatype(&common) {
            self.place = place;
        }
        if field.is_nullable() || is_null_beside_values {
            self.field.set_nullable(true);
        }
        self.field.set_data_type(common);
        true
    }

    /// The field of a dataset of that many places; one without the column has nulls.
    pub(crate) fn finish(self, places: usize) -> Field {
        let field = self.field.with_metadata(self.extension.unwrap_or_default());
        if self.seen < places { field.with_nullable(true) } else { field }
    }
}

fn is_null(kind: &DataType) -> bool {
    *kind == DataType::Null
}

/// The metadata that names the extension type of a column, whose values have the type `kind`. Empty without one, and for
/// encoded values, whose storage another type takes; `None` for nulls.
fn extension(field: &Field, kind: &DataType) -> Option<HashMap<String, String>> {
    if is_null(kind) {
        return None;
    }
    let entries = field.metadata().iter().filter(|(key, _)| key.starts_with(EXTENSION_KEYS));
    let is_stored_so = field.data_type().equals_datatype(kind);
    Some(entries.filter(|_| is_stored_so).map(|(key, value)| (key.clone(), value.clone())).collect())
}

/// The type of the values, without dictionary and run encodings.
pub(crate) fn plain(kind: &DataType) -> DataType {
    let inner = |field: &FieldRef| -> FieldRef {
        Arc::new(field.as_ref().clone().with_data_type(plain(field.data_type())))
    };
    match kind {
        DataType::Dictionary(_, values) => plain(values),
        DataType::RunEndEncoded(_, values) => plain(values.data_type()),
        DataType::List(item) => DataType::List(inner(item)),
        DataType::LargeList(item) => DataType::LargeList(inner(item)),
        DataType::FixedSizeList(item, size) => DataType::FixedSizeList(inner(item), *size),
        DataType::Struct(fields) => DataType::Struct(fields.iter().map(inner).collect()),
        DataType::Map(entries, sorted) => DataType::Map(inner(entries), *sorted),
        other => other.clone(),
    }
}
