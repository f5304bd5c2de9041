//! Decompressed size of a message of an Arrow IPC file, read from its headers.
//!
//! Each compressed buffer begins with its length before compression, 8 bytes in little endian; -1 marks a
//! buffer that is not compressed (<https://arrow.apache.org/docs/format/Columnar.html#compression>). A
//! message without compression is as large as in the file, and counts as 0 here.

use arrow::array::layout;
use arrow::datatypes::{DataType, Fields};
use arrow::error::ArrowError;
use arrow::ipc::{Block, RecordBatch, root_as_message};

/// Bytes of the length at the start of a compressed buffer.
const PREFIX_BYTES: usize = 8;
/// The length of a buffer that is not compressed.
const NOT_COMPRESSED: i64 = -1;

/// The head of a record batch or dictionary, with the bytes of its buffers.
pub(super) struct Message<'a> {
    batch: RecordBatch<'a>,
    body: &'a [u8],
}

fn bad(text: impl Into<String>) -> ArrowError {
    ArrowError::IpcError(text.into())
}

/// The message whose metadata is at the start of `bytes`.
pub(super) fn message_of(bytes: &[u8]) -> Result<arrow::ipc::Message<'_>, ArrowError> {
    // A continuation marker precedes the length since version 0.15 of the format.
    let skip = if bytes.starts_with(&[0xff; 4]) { 8 } else { 4 };
    let message = bytes.get(skip..).ok_or_else(|| bad("too short"))?;
    root_as_message(message).map_err(|e| bad(e.to_string()))
}

impl<'a> Message<'a> {
    /// Reads the head of the message in a block.
    pub(super) fn parse(block: &Block, bytes: &'a [u8]) -> Result<Self, ArrowError> {
        let (head, body) = usize::try_from(block.metaDataLength())
            .ok()
            .and_then(|length| bytes.split_at_checked(length))
            .ok_or_else(|| bad("impossible length of the metadata"))?;
        let message = message_of(head)?;
        let dictionary = || message.header_as_dictionary_batch().and_then(|dictionary| dictionary.data());
        let batch = message.header_as_record_batch().or_else(dictionary);
        Ok(Self { batch: batch.ok_or_else(|| bad("neither a record batch nor a dictionary"))?, body })
    }

    /// Length of a buffer once it is decompressed.
    fn length(&self, buffer: &arrow::ipc::Buffer) -> Result<u64, ArrowError> {
        if buffer.length() == 0 {
            return Ok(0);
        }
        let range = usize::try_from(buffer.offset())
            .ok()
            .zip(usize::try_from(buffer.length()).ok())
            .and_then(|(start, length)| Some(start..start.checked_add(length)?));
        let bytes =
            range.and_then(|range| self.body.get(range)).ok_or_else(|| bad("a buffer lies outside"))?;
        let prefix = bytes.first_chunk::<PREFIX_BYTES>().ok_or_else(|| bad("a compressed buffer is cut"))?;
        match i64::from_le_bytes(*prefix) {
            NOT_COMPRESSED => Ok((bytes.len() - PREFIX_BYTES) as u64),
            length => u64::try_from(length).map_err(|_| bad("a compressed buffer has a negative length")),
        }
    }
}

/// Bytes of the wanted columns once they are decompressed; 0 for a message without compression. Without
/// `fields`, or where the buffers do not match the fields, all buffers count.
pub(super) fn decoded_bytes(
    message: &Message<'_>,
    fields: &Fields,
    is_wanted: impl Fn(usize) -> bool,
) -> Result<u64, ArrowError> {
    let (Some(_), Some(buffers)) = (message.batch.compression(), message.batch.buffers()) else {
        return Ok(0);
    };
    let counts = message.batch.variadicBufferCounts();
    let mut views = counts.iter().flatten().map(|count| usize::try_from(count).unwrap_or(usize::MAX));
    let mut wanted = Vec::with_capacity(buffers.len());
    for (column, field) in fields.iter().enumerate() {
        let of_column = buffers_of(field.data_type(), &mut views);
        // A corrupt header must not cause a large allocation.
        let room = buffers.len() - wanted.len();
        wanted.extend(std::iter::repeat_n(is_wanted(column), of_column.min(room)));
        if of_column > room {
            wanted.clear();
            break;
        }
    }
    let known = wanted.len() == buffers.len();
    let mut total = 0u64;
    for (index, buffer) in buffers.iter().enumerate() {
        if !known || wanted[index] {
            total = total.saturating_add(message.length(buffer)?);
        }
    }
    Ok(total)
}

/// Number of buffers that a column of type `kind` has in a record batch. `views` yields the number of data
/// buffers of each view column, in order.
fn buffers_of(kind: &DataType, views: &mut impl Iterator<Item = usize>) -> usize {
    let own = layout(kind);
    let mut count = own.buffers.len() + usize::from(own.can_contain_null_mask);
    if own.variadic {
        count = count.saturating_add(views.next().unwrap_or(0));
    }
    let mut add = |kind: &DataType| count = count.saturating_add(buffers_of(kind, views));
    match kind {
        DataType::List(item)
        | DataType::LargeList(item)
        | DataType::ListView(item)
        | DataType::LargeListView(item)
        | DataType::FixedSizeList(item, _)
        | DataType::Map(item, _) => add(item.data_type()),
        DataType::Struct(fields) => fields.iter().for_each(|field| add(field.data_type())),
        DataType::Union(fields, _) => fields.iter().for_each(|(_, field)| add(field.data_type())),
        DataType::RunEndEncoded(ends, values) => {
            add(ends.data_type());
            add(values.data_type());
        }
        _ => {}
    }
    count
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::datatypes::Field;

    use super::*;

    #[test]
    fn columns_have_the_buffers_of_the_format() {
        let field = |kind: DataType| Arc::new(Field::new("item", kind, true));
        let utf8 = DataType::Utf8;
        for (kind, count) in [
            (DataType::Null, 0),
            (DataType::Boolean, 2),
            (DataType::Int64, 2),
            (utf8.clone(), 3),
            (DataType::Utf8View, 2 + 7),
            (DataType::List(field(utf8.clone())), 5),
            (DataType::ListView(field(DataType::Int8)), 5),
            (DataType::FixedSizeList(field(DataType::Float32), 4), 3),
            (DataType::Struct(vec![field(DataType::Int8), field(utf8.clone())].into()), 6),
            (DataType::Dictionary(DataType::Int32.into(), utf8.into()), 2),
            (DataType::RunEndEncoded(field(DataType::Int32), field(DataType::Int64)), 4),
        ] {
            assert_eq!(buffers_of(&kind, &mut std::iter::once(7)), count, "{kind}");
        }
    }
}
