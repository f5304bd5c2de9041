//! Arrow IPC files: footer, blocks and dictionaries by ranged reads, so that a record batch can be
//! read alone, as a row group of Parquet is.
//!
//! The format: <https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format>.

mod decoded;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use arrow::array::ArrayRef;
use arrow::buffer::Buffer;
use arrow::datatypes::{Fields, Schema, SchemaRef};
use arrow::error::ArrowError;
use arrow::ipc::convert::fb_to_schema;
use arrow::ipc::reader::FileDecoder;
use arrow::ipc::{Block, MetadataVersion, root_as_footer};
use bytes::Bytes;
use object_store::ObjectStoreExt;

use crate::dataset::{Footer, RowGroup};
use crate::feed::error::{FeedError, Result};
use crate::feed::footer::StoreFile;
use crate::feed::reader::columns_of;
use decoded::{Message, decoded_bytes};

/// Bytes of the footer's length and the closing magic.
const TRAILER_BYTES: u64 = 10;
const MAGIC: &[u8] = b"ARROW1";
/// First bytes of an Arrow IPC stream, which has messages and no footer.
const CONTINUATION: [u8; 4] = [0xff; 4];
/// Largest accepted metadata of one message, in bytes.
const METADATA_BYTES_MAX: u64 = 64 << 20;

/// An IPC file without its record batches: schema, blocks, row counts and dictionaries.
pub(crate) struct IpcFile {
    schema: SchemaRef,
    version: MetadataVersion,
    blocks: Vec<Block>,
    rows: Vec<u64>,
    /// Dictionary blocks with their bytes; dictionaries of IPC files are shared by all batches.
    dictionaries: Vec<(Block, Buffer)>,
}

impl IpcFile {
    pub(crate) fn rows(&self) -> &[u64] {
        &self.rows
    }

    /// Memory of the dictionaries in bytes, which is nearly all that it takes.
    pub(crate) fn bytes(&self) -> u64 {
        self.dictionaries.iter().map(|(_, buffer)| buffer.len() as u64).sum()
    }

    /// Reads the footer and the heads of the record batches.
    async fn describe(file: &StoreFile, path: &str) -> Result<(Self, Vec<Block>)> {
        let what = "the Arrow IPC footer";
        let bad = |text: &str| FeedError::corrupt(path, what, ArrowError::IpcError(text.to_string()));
        if file.bytes < TRAILER_BYTES {
            return Err(bad("shorter than its closing magic"));
        }
        let end = file.bytes - TRAILER_BYTES;
        let trailer = fetch(file, path, end..file.bytes).await?;
        if trailer.get(4..) != Some(MAGIC) {
            let first = fetch(file, path, 0..CONTINUATION.len() as u64).await?;
            if *first == CONTINUATION {
                return Err(stream_for_file(path));
            }
            return Err(bad("no closing magic; the file was not finished"));
        }
        let length = trailer
            .first_chunk::<4>()
            .and_then(|b| u64::try_from(i32::from_le_bytes(*b)).ok())
            .filter(|&n| n <= end.min(METADATA_BYTES_MAX))
            .ok_or_else(|| bad("impossible length"))?;
        let bytes = fetch(file, path, end - length..end).await?;
        let footer = root_as_footer(&bytes).map_err(|e| bad(&e.to_string()))?;
        let schema = fb_to_schema(footer.schema().ok_or_else(|| bad("no schema"))?);
        let blocks: Vec<Block> =
            footer.recordBatches().map(|b| b.iter().copied().collect()).unwrap_or_default();
        let mut rows = Vec::with_capacity(blocks.len());
        for block in &blocks {
            rows.push(rows_of(file, path, block).await?);
        }
        let dictionaries = footer.dictionaries().iter().flatten().copied().collect();
        let version = footer.version();
        Ok((Self { schema: Arc::new(schema), version, blocks, rows, dictionaries: Vec::new() }, dictionaries))
    }

    /// Reads all but the record batches; refuses dictionaries of more than `bytes_max` bytes.
    pub(crate) async fn open(file: StoreFile, path: &str, bytes_max: u64) -> Result<Self> {
        let (mut ipc, blocks) = Self::describe(&file, path).await?;
        let mut left = bytes_max;
        for block in blocks {
            let range = block_range(&block, file.bytes, path)?;
            let bytes = range.end - range.start;
            left = left
                .checked_sub(bytes)
                .ok_or_else(|| oversized(path, "the dictionaries", bytes_max - left + bytes, bytes_max))?;
            ipc.dictionaries.push((block, Buffer::from(fetch(&file, path, range).await?)));
        }
        Ok(ipc)
    }

    fn schema(&self) -> &Schema {
        &self.schema
    }
}

/// Describes the file in the form of a Parquet footer.
pub(crate) async fn read_footer(file: StoreFile, path: &str) -> Result<Footer> {
    let (ipc, _) = IpcFile::describe(&file, path).await?;
    let row_groups = ipc
        .blocks
        .iter()
        .zip(&ipc.rows)
        .map(|(b, &rows)| RowGroup { rows, bytes: u64::try_from(b.bodyLength()).unwrap_or(0) })
        .collect();
    Ok(Footer { schema: ipc.schema().clone(), row_groups })
}

/// Fetches the bytes of one record batch.
pub(crate) async fn read_block(file: StoreFile, ipc: &IpcFile, index: usize, path: &str) -> Result<Buffer> {
    let range = block_range(&ipc.blocks[index], file.bytes, path)?;
    Ok(Buffer::from(fetch(&file, path, range).await?))
}

/// Decodes one record batch, only the columns of `schema`.
///
/// A record batch can only be decoded as a whole, and one that compresses well may be a thousand times as
/// large as in the file. Therefore the sizes that its buffers announce are checked first: beyond `bytes_max`
/// it is refused.
pub(crate) fn decode_block(
    ipc: &IpcFile,
    index: usize,
    bytes: &Buffer,
    schema: &SchemaRef,
    bytes_max: u64,
    path: &str,
) -> Result<HashMap<String, ArrayRef>> {
    let what = format!("record batch {index}");
    let corrupt = |e| FeedError::corrupt(path, &what, e);
    let wanted = ipc.schema.fields().iter().enumerate();
    let projection: Vec<usize> =
        wanted.filter(|(_, f)| schema.index_of(f.name()).is_ok()).map(|(i, _)| i).collect();
    if projection.is_empty() {
        return Ok(HashMap::new());
    }
    let is_wanted = |column: usize| projection.contains(&column);
    let head = Message::parse(&ipc.blocks[index], bytes).map_err(corrupt)?;
    let mut total = decoded_bytes(&head, ipc.schema.fields(), is_wanted).map_err(corrupt)?;
    for (block, buffer) in &ipc.dictionaries {
        let head = Message::parse(block, buffer).map_err(corrupt)?;
        total = total.saturating_add(decoded_bytes(&head, &Fields::empty(), is_wanted).map_err(corrupt)?);
    }
    if total > bytes_max {
        return Err(oversized(path, &what, total, bytes_max));
    }
    let mut decoder = FileDecoder::new(Arc::clone(&ipc.schema), ipc.version).with_projection(projection);
    for (block, buffer) in &ipc.dictionaries {
        decoder.read_dictionary(block, buffer).map_err(corrupt)?;
    }
    let batch = decoder.read_record_batch(&ipc.blocks[index], bytes).map_err(corrupt)?;
    Ok(batch.as_ref().map(columns_of).unwrap_or_default())
}

/// The error for a stream under the name of a file: without a footer, no record batch can be read alone.
fn stream_for_file(path: &str) -> FeedError {
    FeedError::Row {
        file: path.to_string(),
        place: "its first bytes".to_string(),
        reason: "this is an Arrow IPC stream, which save_to_disk of Hugging Face writes, and no Arrow IPC file; read it \
                 with pyarrow.ipc.open_stream, and write it with pyarrow.ipc.new_file or as Parquet"
            .to_string(),
    }
}

fn oversized(path: &str, what: &str, bytes: u64, limit: u64) -> FeedError {
    FeedError::Oversized { file: path.to_string(), what: what.to_string(), bytes, limit }
}

async fn rows_of(file: &StoreFile, path: &str, block: &Block) -> Result<u64> {
    let bad = |text: &str| {
        let error = ArrowError::IpcError(text.to_string());
        FeedError::corrupt(path, "a record batch header", error)
    };
    let range = block_range(block, file.bytes, path)?;
    let length = u64::try_from(block.metaDataLength()).unwrap_or(0);
    if length > METADATA_BYTES_MAX {
        return Err(bad("impossible length"));
    }
    let bytes = fetch(file, path, range.start..range.start + length).await?;
    let message = decoded::message_of(&bytes).map_err(|e| bad(&e.to_string()))?;
    let header = message.header_as_record_batch().ok_or_else(|| bad("not a record batch"))?;
    // Rows are addressed with 32 bits inside a row group.
    u32::try_from(header.length()).map(u64::from).map_err(|_| bad("impossible row count"))
}

fn block_range(block: &Block, file_bytes: u64, path: &str) -> Result<Range<u64>> {
    let start = u64::try_from(block.offset()).ok();
    let length = u64::try_from(block.metaDataLength())
        .ok()
        .zip(u64::try_from(block.bodyLength()).ok())
        .and_then(|(m, b)| m.checked_add(b));
    start
        .zip(length)
        .and_then(|(s, l)| Some(s..s.checked_add(l)?))
        .filter(|r| r.end <= file_bytes)
        .ok_or_else(|| {
            let error = ArrowError::IpcError("a block lies outside the file".into());
            FeedError::corrupt(path, "the Arrow IPC footer", error)
        })
}

async fn fetch(file: &StoreFile, path: &str, range: Range<u64>) -> Result<Bytes> {
    let wanted = range.end - range.start;
    let bytes = file.store.get_range(&file.path, range).await.map_err(|e| FeedError::store(path, e))?;
    if bytes.len() as u64 != wanted {
        return Err(FeedError::Changed {
            file: path.to_string(),
            what: format!("read {} of {wanted} bytes", bytes.len()),
        });
    }
    Ok(bytes)
}
