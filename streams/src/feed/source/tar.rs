//! Tar shards as WebDataset reads them: members with one name up to the first dot are one sample.
//!
//! Column `__key__` has that name; each extension is a column, in lower case. `.cls`, `.id` and their like are integers,
//! `.txt` and its like are texts, `.json` has the types of its values, and all others are bytes.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::io::{self, Read, Seek, SeekFrom};
use std::rc::Rc;
use std::sync::Arc;

use arrow::array::{ArrayRef, BinaryBuilder, Int64Builder, StringBuilder};
use arrow::datatypes::{Field, Schema};
use arrow::error::ArrowError;
use tar::{Archive, Entry, EntryType};

use super::cutter::{Bounds, Cutter};
use super::json_lines::{self, Values};
use super::shape::{FIELDS_MAX, Kind, Place, Shape};
use super::{BOM, DecodeError, ROW_BYTES_MAX, SAMPLE_BYTES_MAX, ScanError, Scanned, shortened};

/// The column with the names of samples.
const KEY: &str = "__key__";
/// Size of a block of the format.
const BLOCK: u64 = 512;
/// Most bytes of headers of one member: names, and attributes that follow POSIX.
const HEADERS_BYTES_MAX: u64 = 1 << 20;

/// How a member is decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Coding {
    Integer,
    Text,
    Json,
    Bytes,
}

impl Coding {
    /// By the last part of an extension.
    fn of(extension: &str) -> Self {
        match extension.rsplit('.').next().unwrap_or(extension) {
            "cls" | "cls2" | "class" | "count" | "index" | "inx" | "id" => Coding::Integer,
            "txt" | "text" | "transcript" => Coding::Text,
            "json" | "jsn" => Coding::Json,
            _ => Coding::Bytes,
        }
    }
}

/// Name of a sample and extension of a member; none for members that belong to no sample.
fn split(name: &str) -> Option<(&str, &str)> {
    if name.starts_with("__") && name.ends_with("__") && !name.contains('/') {
        return None;
    }
    let base = name.rfind('/').map_or(0, |slash| slash + 1);
    let dot = base + name.get(base..)?.find('.')?;
    let (key, extension) = (name.get(..dot)?, name.get(dot + 1..)?);
    (dot > base && !extension.is_empty()).then_some((key, extension))
}

/// A sample whose members are being read.
struct Sample {
    key: String,
    start: u64,
    end: u64,
    bytes: u64,
}

/// Reads the headers of a file of `size` bytes, and the members that are decoded. `file` is its index in the dataset.
pub(super) fn scan<R: Read + Seek>(
    reader: R,
    size: u64,
    file: u32,
    bounds: Bounds,
) -> Result<Scanned, ScanError> {
    let budget = Rc::new(Cell::new(HEADERS_BYTES_MAX));
    let mut archive = Archive::new(Budgeted { reader, left: Rc::clone(&budget) });
    let mut entries = archive.entries_with_seek()?;
    let mut values = Values::default();
    let mut cutter = Cutter::new(bounds);
    let mut keys = HashSet::new();
    let mut open: Option<Sample> = None;
    // End of the last member.
    let mut end = 0;
    let mut content = Vec::new();
    values.columns.index(KEY);
    loop {
        budget.set(HEADERS_BYTES_MAX);
        let Some(entry) = entries.next() else { break };
        let at = end;
        let broken = |error: io::Error| ScanError::row(format!("the member at byte {at}"), error.to_string());
        let mut entry = entry.map_err(broken)?;
        let start = end;
        let data = entry.raw_file_position();
        end = entry.size().div_ceil(BLOCK).saturating_mul(BLOCK).saturating_add(data);
        if data.saturating_add(entry.size()) > size {
            return Err(ScanError::row(
                format!("the member at byte {at}"),
                "the file ends within it".to_owned(),
            ));
        }
        // The last member may lack its padding.
        end = end.min(size);
        let Some(name) = member_name(&mut entry)
            .map_err(|reason| ScanError::row(format!("the member at byte {at}"), reason))?
        else {
            continue;
        };
        let Some((key, extension)) = split(&name) else { continue };
        let wrong = |reason: String| ScanError::row(format!("member {name:?}"), reason);
        let extension = extension.to_lowercase();
        let place = Place { file, at: start + 1 };
        if open.as_ref().is_none_or(|sample| sample.key != key) {
            if let Some(sample) = open.take() {
                cutter.add(sample.start, sample.end, sample.bytes);
            }
            if !keys.insert(key.to_owned()) {
                return Err(wrong(format!(
                    "other members of sample {key:?} are further ahead; members of one sample must follow one \
                     another, as tar --sort=name writes them"
                )));
            }
            values.columns.rows += 1;
            let bytes = key.len() as u64;
            open = Some(Sample { key: key.to_owned(), start, end, bytes });
            let column = values.columns.at(0);
            column.present += 1;
            column.take(Shape::new(Kind::Text, place), false);
        }
        let (index, is_new) = values.columns.index(&extension);
        let row = values.columns.rows;
        if index == 0 || std::mem::replace(&mut values.columns.at(index).seen, row) == row {
            return Err(wrong(format!("sample {key:?} has another member .{extension}")));
        }
        if is_new && values.columns.count() > FIELDS_MAX {
            return Err(wrong(format!(
                "the file has more than {FIELDS_MAX} extensions and fields up to here"
            )));
        }
        let coding = Coding::of(&extension);
        values.context.bytes = 8 + entry.size();
        if coding != Coding::Bytes {
            let limit = ROW_BYTES_MAX;
            if entry.size() > limit {
                return Err(wrong(format!(
                    "it has {} bytes; a .{extension} has at most {limit}",
                    entry.size()
                )));
            }
            content.clear();
            budget.set(limit);
            entry.read_to_end(&mut content)?;
        }
        values.context.place = place;
        let kind = match coding {
            Coding::Integer => Kind::integer(integer(&content).map_err(wrong)?),
            Coding::Text => text(&content).map(|_| Kind::Text).map_err(wrong)?,
            Coding::Bytes => Kind::Bytes,
            Coding::Json => {
                values.value(index, json(&content)).map_err(wrong)?;
                Kind::Null
            }
        };
        if coding != Coding::Json {
            let column = values.columns.at(index);
            column.present += 1;
            column.take(Shape::new(kind, place), false);
        }
        if let Some(sample) = &mut open {
            sample.end = end;
            sample.bytes += values.context.bytes;
            if sample.end - sample.start > SAMPLE_BYTES_MAX {
                return Err(wrong(format!("sample {key:?} has more than {SAMPLE_BYTES_MAX} bytes")));
            }
        }
    }
    if let Some(sample) = open {
        cutter.add(sample.start, sample.end, sample.bytes);
    }
    budget.set(u64::MAX);
    check_end(archive.into_inner(), end, size)?;
    let (row_groups, cuts) = cutter.finish();
    Ok(Scanned { row_groups, cuts, columns: values.columns, is_open: end == size })
}

/// Refuses a file with more than zeros behind its last member: the members of a second archive would be lost.
fn check_end(mut reader: impl Read + Seek, end: u64, size: u64) -> Result<(), ScanError> {
    reader.seek(SeekFrom::Start(end))?;
    let mut block = [0; 64 << 10];
    let mut at = end;
    while at < size {
        let most = usize::try_from(size - at).unwrap_or(usize::MAX).min(block.len());
        let read = reader.read(&mut block[..most])?;
        if read == 0 {
            break;
        }
        if let Some(found) = block[..read].iter().position(|byte| *byte != 0) {
            return Err(ScanError::row(
                format!("byte {}", at + found as u64),
                "data follows the end of the archive; several archives in one file are joined with tar --concatenate"
                    .to_owned(),
            ));
        }
        at += read as u64;
    }
    Ok(())
}

/// The name of a member with data; none for folders and devices.
fn member_name<R: Read>(entry: &mut Entry<'_, R>) -> Result<Option<String>, String> {
    let kind = entry.header().entry_type();
    let name = match String::from_utf8(entry.path_bytes().into_owned()) {
        Ok(name) => name,
        Err(error) => {
            return Err(format!(
                "its name {:?} is no UTF-8 text",
                error.as_bytes().escape_ascii().to_string()
            ));
        }
    };
    let sparse_attribute = |attribute: io::Result<tar::PaxExtension<'_>>| {
        attribute.is_ok_and(|attribute| attribute.key_bytes().starts_with(b"GNU.sparse."))
    };
    let is_sparse = kind.is_gnu_sparse()
        || entry.pax_extensions().ok().flatten().is_some_and(|mut all| all.any(sparse_attribute));
    if is_sparse {
        return Err(format!("{name:?} is stored as a sparse file; write the tar without --sparse"));
    }
    match kind {
        EntryType::Regular | EntryType::Continuous => Ok(Some(name)),
        EntryType::Link | EntryType::Symlink if split(&name).is_some() => Err(format!(
            "{name:?} is a link to another member; write the tar with --dereference --hard-dereference"
        )),
        _ => Ok(None),
    }
}

fn integer(content: &[u8]) -> Result<i64, String> {
    let text = text(content)?;
    text.trim().parse().map_err(|_| format!("{:?} is no integer of 64 bits", shortened(text)))
}

fn text(content: &[u8]) -> Result<&str, String> {
    std::str::from_utf8(content)
        .map_err(|error| format!("it is no UTF-8 text (byte {})", error.valid_up_to() + 1))
}

fn json(content: &[u8]) -> &[u8] {
    content.strip_prefix(BOM).unwrap_or(content)
}

/// A column of samples that is being built.
enum Builder {
    Integers(Int64Builder),
    Texts(StringBuilder),
    Bytes(BinaryBuilder),
    /// A line `{"v": …}` a row.
    Json(Vec<u8>, Arc<Field>),
}

impl Builder {
    fn new(field: &Arc<Field>) -> Self {
        match (field.name().as_str(), Coding::of(field.name())) {
            (KEY, _) | (_, Coding::Text) => Builder::Texts(StringBuilder::new()),
            (_, Coding::Integer) => Builder::Integers(Int64Builder::new()),
            (_, Coding::Json) => Builder::Json(Vec::new(), Arc::clone(field)),
            (_, Coding::Bytes) => Builder::Bytes(BinaryBuilder::new()),
        }
    }

    fn add(&mut self, content: Option<&[u8]>) -> Result<(), String> {
        match self {
            Builder::Integers(values) => values.append_option(content.map(integer).transpose()?),
            Builder::Texts(values) => values.append_option(content.map(text).transpose()?),
            Builder::Bytes(values) => values.append_option(content),
            Builder::Json(lines, _) => {
                if let Some(content) = content {
                    lines.extend_from_slice(b"{\"v\":");
                    lines.extend_from_slice(json(content));
                    lines.extend_from_slice(b"}\n");
                } else {
                    lines.extend_from_slice(b"{}\n");
                }
            }
        }
        Ok(())
    }

    fn finish(self, rows: usize, bytes_max: u64) -> Result<ArrayRef, DecodeError> {
        Ok(match self {
            Builder::Integers(mut values) => Arc::new(values.finish()),
            Builder::Texts(mut values) => Arc::new(values.finish()),
            Builder::Bytes(mut values) => Arc::new(values.finish()),
            Builder::Json(lines, field) => {
                let schema = Schema::new(vec![field.as_ref().clone().with_name("v")]);
                let mut columns = json_lines::decode(&lines, rows, &schema, bytes_max)?;
                let missing = || ArrowError::JsonError(format!("no rows of {:?}", field.name()));
                columns.remove("v").ok_or_else(missing)?
            }
        })
    }
}

/// Decodes the samples of a row group, only the columns of `schema`, within `bytes_max` bytes for the items of lists.
pub(super) fn decode(
    bytes: &[u8],
    schema: &Schema,
    bytes_max: u64,
) -> Result<HashMap<String, ArrayRef>, DecodeError> {
    let bad = |error: io::Error| ArrowError::ExternalError(Box::new(error));
    let wrong = |reason: String| ArrowError::ParseError(reason);
    let names: HashMap<&str, usize> =
        schema.fields().iter().enumerate().map(|(index, field)| (field.name().as_str(), index)).collect();
    let mut builders: Vec<Builder> = schema.fields().iter().map(Builder::new).collect();
    // The members of the open sample by column.
    let mut members: Vec<Option<Vec<u8>>> = vec![None; builders.len()];
    let mut open: Option<String> = None;
    let mut rows = 0;
    // Seeking passes over the padding of the last member, which may be missing.
    let mut archive = Archive::new(io::Cursor::new(bytes));
    let mut close = |key: String, members: &mut Vec<Option<Vec<u8>>>| {
        if let Some(&index) = names.get(KEY) {
            members[index] = Some(key.into_bytes());
        }
        rows += 1;
        builders
            .iter_mut()
            .zip(members)
            .try_for_each(|(builder, member)| builder.add(member.take().as_deref()))
    };
    for entry in archive.entries_with_seek().map_err(bad)? {
        let mut entry = entry.map_err(bad)?;
        let Some(name) = member_name(&mut entry).map_err(wrong)? else { continue };
        let Some((key, extension)) = split(&name) else { continue };
        if open.as_deref() != Some(key)
            && let Some(before) = open.replace(key.to_owned())
        {
            close(before, &mut members).map_err(wrong)?;
        }
        if let Some(&index) = names.get(extension.to_lowercase().as_str()) {
            let mut content = Vec::new();
            entry.read_to_end(&mut content).map_err(bad)?;
            members[index] = Some(content);
        }
    }
    if let Some(last) = open {
        close(last, &mut members).map_err(wrong)?;
    }
    let columns = schema.fields().iter().zip(builders);
    columns.map(|(field, builder)| Ok((field.name().clone(), builder.finish(rows, bytes_max)?))).collect()
}

/// A reader that refuses to read more than is allowed: headers with impossible sizes must not fill the memory.
struct Budgeted<R> {
    reader: R,
    left: Rc<Cell<u64>>,
}

impl<R: Read> Read for Budgeted<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let left = self.left.get();
        if left == 0 {
            return Err(io::Error::other(format!("its headers are longer than {HEADERS_BYTES_MAX} bytes")));
        }
        let bytes = into.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let read = self.reader.read(&mut into[..bytes])?;
        self.left.set(left - read as u64);
        Ok(read)
    }
}

impl<R: Seek> Seek for Budgeted<R> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.reader.seek(to)
    }
}
