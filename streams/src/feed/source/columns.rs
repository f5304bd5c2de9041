//! Columns of files without a schema: what a scan has found in each, united over the files of a dataset.

use std::collections::HashMap;

use arrow::datatypes::{Field, Schema};

use super::shape::{Clash, FIELDS_MAX, Kind, Place, Shape};
use crate::dataset::Conflict;

/// A column with all that its values have shown.
#[derive(Debug, Clone)]
pub(crate) struct Column {
    pub(crate) name: String,
    pub(crate) shape: Shape,
    /// Rows in which it is not null.
    pub(crate) present: u64,
    /// The first two values without a common type.
    pub(crate) clash: Option<Clash>,
    /// Where values of other types made it a column of texts.
    pub(crate) became_text: Option<Place>,
    /// Number of the last row that had it.
    pub(crate) seen: u64,
}

/// The columns of one file or of many, in order of appearance.
#[derive(Debug, Default)]
pub(crate) struct Columns {
    columns: Vec<Column>,
    by_name: HashMap<String, usize>,
    pub(crate) rows: u64,
}

impl Columns {
    /// The index of a column, made if there is none, and whether it is new.
    pub(crate) fn index(&mut self, name: &str) -> (usize, bool) {
        if let Some(&index) = self.by_name.get(name) {
            return (index, false);
        }
        let index = self.columns.len();
        self.by_name.insert(name.to_owned(), index);
        self.columns.push(Column {
            name: name.to_owned(),
            shape: Shape::default(),
            present: 0,
            clash: None,
            became_text: None,
            seen: 0,
        });
        (index, true)
    }

    pub(crate) fn at(&mut self, index: usize) -> &mut Column {
        &mut self.columns[index]
    }

    pub(crate) fn iter(&self) -> std::slice::Iter<'_, Column> {
        self.columns.iter()
    }

    /// Columns, and fields of objects in them.
    pub(crate) fn count(&self) -> usize {
        self.columns.iter().map(|column| 1 + column.shape.fields()).sum()
    }

    /// Takes in the columns of the next file. With `texts`, values without a common type are texts.
    ///
    /// Returns false if there are more than [`FIELDS_MAX`].
    pub(crate) fn unite(&mut self, other: Columns, texts: bool) -> bool {
        self.rows += other.rows;
        for column in other.columns {
            let index = self.index(&column.name).0;
            let mine = self.at(index);
            mine.present += column.present;
            mine.became_text = mine.became_text.or(column.became_text);
            mine.clash = mine.clash.take().or(column.clash);
            mine.take(column.shape, texts);
        }
        self.count() <= FIELDS_MAX
    }

    /// The schema and the columns that cannot be read. `place` names a place of a file.
    pub(crate) fn schema(&self, place: impl Fn(Place) -> String) -> (Schema, Vec<Conflict>) {
        let (mut fields, mut conflicts) = (Vec::new(), Vec::new());
        for column in &self.columns {
            let Some(clash) = &column.clash else {
                let data_type = column.shape.kind.data_type();
                // A file without a column has nulls there.
                fields.push(Field::new(&column.name, data_type, column.present < self.rows));
                continue;
            };
            let kind = |kind: &str| match clash.path.is_empty() {
                true => kind.to_owned(),
                false => format!("{kind} (at {:?})", clash.path.join(".")),
            };
            conflicts.push(Conflict::of_values(
                column.name.clone(),
                (place(clash.first.0), kind(&clash.first.1)),
                (place(clash.other.0), kind(&clash.other.1)),
            ));
        }
        (Schema::new(fields), conflicts)
    }
}

impl Column {
    /// Takes in values. With `texts`, values without a common type make the column texts; otherwise the first clash
    /// is kept.
    pub(crate) fn take(&mut self, shape: Shape, texts: bool) {
        let place = shape.first;
        let Err(clash) = self.shape.unite(shape) else { return };
        match texts {
            true => {
                self.shape.kind = Kind::Text;
                self.became_text.get_or_insert(place);
            }
            false => {
                self.clash.get_or_insert(clash);
            }
        }
    }
}
