//! Sources without footers: JSON lines, CSV, tar shards and folders of files as row groups with one schema.
//!
//! A scan reads each text or tar file once, when the plan is made. It cuts the file into row groups of bounded size, each
//! a range of bytes, checks every row, and infers the columns. Later a row group is fetched and decoded alone. A file of
//! a folder is a row group of one row, and nothing of it is read for the plan.

mod columns;
mod csv;
mod cutter;
mod folder;
pub(crate) mod fuzzing;
mod json_lines;
mod lists;
mod plain;
mod shape;
mod store_reader;
mod tar;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use arrow::array::ArrayRef;
use arrow::datatypes::{Schema, SchemaRef};
use arrow::error::ArrowError;
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use object_store::ObjectStore;

use crate::dataset::{
    Compression, Conflict, DataFile, FileFormat, ListedFile, Listing, RowGroup, decode_schema, encode_schema,
};
use crate::feed::batch::processors;
use crate::feed::error::{FeedError, Result};
use crate::feed::footer::StoreFile;
use columns::Columns;
use cutter::Bounds;
use shape::{FIELDS_MAX, Place, fixed_bytes};
use store_reader::{StopOnDrop, StoreReader};

pub(crate) use folder::Classes;
pub(crate) use json_lines::check_row;

/// Longest line of JSON lines, row of CSV, and decoded member of a tar, in bytes.
const ROW_BYTES_MAX: u64 = 64 << 20;
/// Largest sample of a tar and file of a folder, in bytes.
const SAMPLE_BYTES_MAX: u64 = 1 << 30;
/// Largest compressed text file once it is decompressed, in bytes.
const PLAIN_BYTES_MAX: u64 = 256 << 20;
/// The byte order mark with which some programs begin UTF-8 texts.
const BOM: &[u8] = b"\xef\xbb\xbf";

/// The files of a dataset as a scan describes them.
pub(crate) struct Described {
    pub(crate) schema: Schema,
    pub(crate) conflicts: Vec<Conflict>,
    pub(crate) files: Vec<DataFile>,
}

/// What a scan has found in one file.
#[derive(Default)]
struct Scanned {
    row_groups: Vec<RowGroup>,
    /// Where the row groups begin, and where the last one ends.
    cuts: Vec<u64>,
    columns: Columns,
    /// Whether the file is a tar without the mark at its end.
    is_open: bool,
}

/// An error in a file that is being scanned.
#[derive(Debug)]
enum ScanError {
    Io(io::Error),
    Row { place: String, reason: String },
}

impl ScanError {
    fn line(line: u64, reason: String) -> Self {
        Self::row(format!("line {line}"), reason)
    }

    fn row(place: String, reason: String) -> Self {
        Self::Row { place, reason }
    }
}

impl From<io::Error> for ScanError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl fmt::Display for ScanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ScanError::Io(error) => error.fmt(f),
            ScanError::Row { place, reason } => write!(f, "{place}: {reason}"),
        }
    }
}

/// Describes files of one format without a footer: reads each once, some at a time.
///
/// # Errors
/// [`FeedError::Row`] and [`FeedError::Corrupt`] naming the file; [`FeedError::TooLarge`] for too many columns;
/// [`FeedError::Invalid`] for rows without any, and for those nested too deeply; [`FeedError::Store`].
pub(crate) async fn describe(store: &Arc<dyn ObjectStore>, listing: Listing) -> Result<Described> {
    let format = listing.files.first().map_or(FileFormat::Folder, |file| file.format);
    if format == FileFormat::Folder {
        let files = folder::describe(listing)?;
        return Ok(Described { schema: folder::schema(), conflicts: Vec::new(), files });
    }
    let path = listing.path.clone();
    let stop = StopOnDrop::default();
    let flag = &stop.0;
    let mut scans = stream::iter(listing.files.into_iter().zip(0u32..))
        .map(|(found, number)| async move {
            let scanned = scan(store, &found, number, Arc::clone(flag)).await?;
            Ok::<_, FeedError>((found, scanned))
        })
        .buffered(processors());
    let (mut files, mut columns) = (Vec::new(), Columns::default());
    while let Some((found, scanned)) = scans.try_next().await? {
        if scanned.is_open {
            tracing::warn!(
                file = found.path,
                "a tar file lacks the zeros that mark its end, and may have been cut off"
            );
        }
        let is_narrow = columns.unite(scanned.columns, format == FileFormat::Csv);
        if !is_narrow {
            let limit = FIELDS_MAX as u64;
            return Err(FeedError::TooLarge { path, what: "the number of columns and fields", limit });
        }
        files.push(DataFile {
            path: found.path,
            bytes: found.bytes,
            format,
            row_groups: scanned.row_groups,
            cuts: scanned.cuts,
        });
    }
    drop(scans);
    let name = |place: Place| {
        let file = files.get(place.file as usize).map_or("", |file| file.path.as_str());
        match format {
            FileFormat::Tar => format!("{file}, byte {}", place.at - 1),
            _ => format!("{file}, line {}", place.at),
        }
    };
    for column in columns.iter() {
        if let Some(place) = column.became_text {
            tracing::warn!(
                column = column.name,
                first = name(column.shape.first),
                other = name(place),
                "a column of CSV files has values of several types, and is read as texts"
            );
        }
    }
    let (schema, conflicts) = columns.schema(name);
    if schema.fields().is_empty() && conflicts.is_empty() && columns.rows > 0 {
        return Err(FeedError::invalid(format!(
            "dataset {path}: {} rows without a single column: every object is empty; nothing to feed",
            columns.rows
        )));
    }
    // The plan is stored with its schema, which a reader takes up to some depth.
    if let Err(error) = encode_schema(&schema).and_then(|text| decode_schema(&text)) {
        return Err(FeedError::invalid(format!(
            "dataset {path}: lists and objects are nested too deeply for a plan ({error}); write the inner ones as texts"
        )));
    }
    let row_bytes: u64 = schema.fields().iter().map(|field| fixed_bytes(field.data_type())).sum();
    for group in files.iter_mut().flat_map(|file| &mut file.row_groups) {
        group.bytes = group.bytes.max(group.rows.saturating_mul(row_bytes)).max(group.rows);
    }
    Ok(Described { schema, conflicts, files })
}

/// Scans one file on a thread that may block.
async fn scan(
    store: &Arc<dyn ObjectStore>,
    found: &ListedFile,
    number: u32,
    stop: Arc<AtomicBool>,
) -> Result<Scanned> {
    let (path, size, format) = (found.path.clone(), found.bytes, found.format);
    let compression = Compression::of_path(&path);
    let reader = StoreReader::new(store, &path, size, stop)?;
    let scanning = tokio::task::spawn_blocking(move || {
        let failure = reader.failure();
        let scanned = match format {
            FileFormat::Tar if compression.is_some() => Err(ScanError::row(
                "the whole file".to_owned(),
                "a compressed tar cannot be read in parts; store it without compression (gzip -d)".to_owned(),
            )),
            FileFormat::Tar => tar::scan(reader, size, number, Bounds::SAMPLES),
            _ => scan_text(reader, &path, format, size, number, Bounds::TEXT),
        };
        scanned.map_err(|error| failure.or(of_file(&path, error)))
    });
    scanning.await.map_err(|e| match e.is_panic() {
        true => FeedError::corrupt(&found.path, "the file", e),
        false => FeedError::Stopped { file: found.path.clone() },
    })?
}

fn of_file(path: &str, error: ScanError) -> FeedError {
    match error {
        ScanError::Row { place, reason } => FeedError::Row { file: path.to_owned(), place, reason },
        ScanError::Io(error) => FeedError::corrupt(path, format!("the file ({error})"), error),
    }
}

/// The beginning of a text, for errors.
fn shortened(text: &str) -> &str {
    text.char_indices().nth(40).map_or(text, |(end, _)| text.get(..end).unwrap_or_default())
}

/// Scans a text file, which is one row group if it is compressed.
fn scan_text(
    reader: impl BufRead,
    path: &str,
    format: FileFormat,
    size: u64,
    number: u32,
    bounds: Bounds,
) -> Result<Scanned, ScanError> {
    let compression = Compression::of_path(path);
    let bounds = if compression.is_some() { Bounds::NONE } else { bounds };
    let mut text = plain::reader(reader, compression)?;
    let mut scanned = match format {
        FileFormat::Csv => csv::scan(&mut text, csv::delimiter(path), number, bounds),
        _ => json_lines::scan(&mut text, number, bounds),
    }?;
    if compression.is_some() && !scanned.cuts.is_empty() {
        scanned.cuts = vec![0, size];
    }
    Ok(scanned)
}

/// The fetched bytes of a row group.
pub(crate) struct Fetched {
    /// The beginning of the file, where a row group is not decoded without it.
    head: Bytes,
    body: Bytes,
}

/// Fetches the bytes of a row group: those that its columns need, and no others.
///
/// # Errors
/// [`FeedError::Store`], [`FeedError::Changed`]; [`FeedError::Oversized`] for one that takes more than `bytes_max`.
pub(crate) async fn fetch(
    store: &Arc<dyn ObjectStore>,
    file: &DataFile,
    index: usize,
    schema: &Schema,
    bytes_max: u64,
) -> Result<Fetched> {
    let mut ranges = Vec::with_capacity(2);
    match file.format {
        FileFormat::Folder if schema.index_of(folder::DATA).is_err() => {}
        FileFormat::Folder => ranges.push(0..file.bytes),
        _ => {
            let range = file.cuts.get(index).zip(file.cuts.get(index + 1)).map(|(start, end)| *start..*end);
            let range = range.filter(|range| range.start < range.end && range.end <= file.bytes);
            let range = range.ok_or_else(|| FeedError::UnusablePlan {
                what: format!("row group {index} of {} has no range of bytes", file.path),
            })?;
            if file.format == FileFormat::Csv && range.start > 0 {
                ranges.push(0..file.cuts[0]);
            }
            ranges.push(range);
        }
    }
    ranges.retain(|range| range.start < range.end);
    let wanted: u64 = ranges.iter().map(|range| range.end - range.start).sum();
    if wanted > bytes_max {
        return Err(oversized(file, index, wanted, bytes_max));
    }
    if ranges.is_empty() {
        return Ok(Fetched { head: Bytes::new(), body: Bytes::new() });
    }
    let source = StoreFile::new(store, &file.path, file.bytes)?;
    let fetched = store.get_ranges(&source.path, &ranges).await;
    let mut fetched = fetched.map_err(|e| FeedError::store(&file.path, e))?;
    let found: u64 = fetched.iter().map(|bytes| bytes.len() as u64).sum();
    if found != wanted {
        let what = format!("read {found} of {wanted} bytes");
        return Err(FeedError::Changed { file: file.path.clone(), what });
    }
    let body = fetched.pop().unwrap_or_default();
    Ok(Fetched { head: fetched.pop().unwrap_or_default(), body })
}

fn oversized(file: &DataFile, index: usize, bytes: u64, limit: u64) -> FeedError {
    FeedError::Oversized { file: file.path.clone(), what: format!("row group {index}"), bytes, limit }
}

/// Why a row group is not decoded.
enum DecodeError {
    Arrow(ArrowError),
    /// Its rows take this many bytes, more than allowed.
    Oversized(u64),
}

impl From<ArrowError> for DecodeError {
    fn from(error: ArrowError) -> Self {
        Self::Arrow(error)
    }
}

/// Decodes a row group, only the columns of `schema`.
///
/// # Errors
/// [`FeedError::Corrupt`] where the bytes are not those that were scanned; [`FeedError::Oversized`] for rows that take
/// more than `bytes_max`.
pub(crate) fn decode(
    fetched: Fetched,
    file: &DataFile,
    index: usize,
    rows: usize,
    schema: &SchemaRef,
    classes: &Classes,
    bytes_max: u64,
) -> Result<HashMap<String, ArrayRef>> {
    let row_bytes: u64 = schema.fields().iter().map(|field| fixed_bytes(field.data_type())).sum();
    let least = row_bytes.saturating_mul(rows as u64);
    if least > bytes_max {
        return Err(oversized(file, index, least, bytes_max));
    }
    let what = || format!("row group {index}");
    let Fetched { head, body } = fetched;
    if file.format == FileFormat::Folder {
        return Ok(folder::decode(&file.path, &body, classes, schema));
    }
    let failed = |error| match error {
        DecodeError::Oversized(bytes) => oversized(file, index, bytes, bytes_max),
        DecodeError::Arrow(error) => FeedError::corrupt(&file.path, what(), error),
    };
    if file.format == FileFormat::Tar {
        return tar::decode(&body, schema, bytes_max).map_err(failed);
    }
    let body = match Compression::of_path(&file.path) {
        None if head.is_empty() => body,
        None => [head, body].concat().into(),
        compression => {
            let mut text = Vec::new();
            plain::reader(BufReader::new(&body[..]), compression)
                .and_then(|reader| reader.take(bytes_max.saturating_add(1)).read_to_end(&mut text))
                .map_err(|e| FeedError::corrupt(&file.path, what(), e))?;
            if text.len() as u64 > bytes_max {
                return Err(oversized(file, index, text.len() as u64, bytes_max));
            }
            text.into()
        }
    };
    let columns = match file.format {
        FileFormat::Csv => csv::decode(&body, csv::delimiter(&file.path), rows, schema),
        _ => json_lines::decode(&body, rows, schema, bytes_max),
    };
    columns.map_err(failed)
}
