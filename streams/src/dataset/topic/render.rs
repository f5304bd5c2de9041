//! Records as rows of JSON lines: partition, offset and timestamp in front of the fields of the value.

use std::io::Write;

use crate::feed::source::check_row;
use crate::topic::Record;

/// Longest row, in bytes.
const ROW_BYTES_MAX: usize = 64 << 20;

/// Appends the row of a record, with a line feed. On an error, `lines` is as it was.
///
/// With `check`, the row is one that the JSON lines source takes.
///
/// # Errors
/// Why the record is no row.
pub(super) fn render(
    lines: &mut Vec<u8>,
    partition: i32,
    record: &Record<'_>,
    check: bool,
) -> Result<(), String> {
    let start = lines.len();
    let rendered = append(lines, partition, record).and_then(|()| match check {
        true => check_row(&lines[start..]),
        false => Ok(()),
    });
    if rendered.is_err() {
        lines.truncate(start);
    }
    rendered
}

fn append(lines: &mut Vec<u8>, partition: i32, record: &Record<'_>) -> Result<(), String> {
    let value = record.value.ok_or("the record has no value (a tombstone)")?;
    if value.len() > ROW_BYTES_MAX - 256 {
        return Err(format!("the value has more than {} bytes", ROW_BYTES_MAX - 256));
    }
    let fields = value.trim_ascii().strip_prefix(b"{").ok_or("the value is no JSON object")?;
    let timestamp = record.timestamp_ms.map_or_else(|| "null".to_owned(), |time| time.to_string());
    let offset = record.offset;
    // Writing into memory cannot fail.
    write!(lines, "{{\"_partition\":{partition},\"_offset\":{offset},\"_timestamp\":{timestamp}")
        .map_err(|error| error.to_string())?;
    if !fields.trim_ascii_start().starts_with(b"}") {
        lines.push(b',');
    }
    // Line ends are white space in JSON. In a text they are not allowed, so a tab, which is not either, keeps it wrong.
    lines.extend(fields.iter().map(|byte| if matches!(byte, b'\n' | b'\r') { b'\t' } else { *byte }));
    lines.push(b'\n');
    Ok(())
}
