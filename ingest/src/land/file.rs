//! One Parquet file, streamed into a staged object.

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use millrace_datafs::{StagedWriter, View};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression as Codec, Encoding, ZstdLevel};
use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use parquet::schema::types::ColumnPath;

use super::Completed;
use crate::config::{Compression, Job};
use crate::error::{Error, Result, is_no_space};
use crate::state::volume_error;

/// A row group is closed at this many encoded bytes, and can exceed this by one gathered batch. So it has 4
/// to 16 MiB unless it is the last of its file.
const ROW_GROUP_BYTES: usize = 8 << 20;
/// A row group that compresses extremely well is closed at this many bytes of record values, so
/// that readers can decode it in bounded memory.
const ROW_GROUP_VALUE_BYTES: usize = 128 << 20;

/// A file under construction. Dropping it without [`ParquetFile::complete`] discards it.
pub(crate) struct ParquetFile {
    writer: ArrowWriter<StagedWriter>,
    partition: i32,
    first: i64,
    last: i64,
    group_bytes: usize,
}

impl ParquetFile {
    /// Starts a file whose first row has offset `first`.
    pub(crate) fn create(
        view: &View,
        job: &Job,
        partition: i32,
        first: i64,
        schema: SchemaRef,
    ) -> Result<Self> {
        let staged = view.stage().map_err(|e| volume_error(job, e))?;
        let writer =
            ArrowWriter::try_new(staged, schema, Some(properties(job))).map_err(|e| parquet_error(job, e))?;
        Ok(Self { writer, partition, first, last: first, group_bytes: 0 })
    }

    /// Appends rows. `last` is the offset of the last one, `value_bytes` the size of the values that they
    /// were decoded from.
    pub(crate) fn write(
        &mut self,
        job: &Job,
        batch: &RecordBatch,
        value_bytes: usize,
        last: i64,
    ) -> Result<()> {
        let write = |writer: &mut ArrowWriter<StagedWriter>| writer.write(batch);
        write(&mut self.writer).map_err(|e| parquet_error(job, e))?;
        self.last = last;
        self.group_bytes += value_bytes;
        if self.writer.in_progress_size() >= ROW_GROUP_BYTES || self.group_bytes >= ROW_GROUP_VALUE_BYTES {
            self.writer.flush().map_err(|e| parquet_error(job, e))?;
            self.group_bytes = 0;
        }
        Ok(())
    }

    /// Writes the footer and makes the object durable, still invisible.
    pub(crate) fn complete(self, job: &Job, folder: &str) -> Result<Completed> {
        let path = format!("{folder}/{}-{:020}-{:020}.parquet", self.partition, self.first, self.last);
        let staged = self.writer.into_inner().map_err(|e| parquet_error(job, e))?;
        let file = staged.finish().map_err(|e| volume_error(job, e))?;
        Ok(Completed { path, file })
    }
}

fn properties(job: &Job) -> WriterProperties {
    let codec = match job.config.compression {
        // Level 1 is the default of the type.
        Compression::Zstd => Codec::ZSTD(ZstdLevel::default()),
        Compression::Snappy => Codec::SNAPPY,
        Compression::Uncompressed => Codec::UNCOMPRESSED,
    };
    let offset = ColumnPath::from("_offset");
    let timestamp = ColumnPath::from("_timestamp");
    let mut properties = WriterProperties::builder()
        .set_compression(codec)
        .set_created_by(concat!("millrace ", env!("CARGO_PKG_VERSION")).to_owned())
        .set_key_value_metadata(Some(vec![
            KeyValue::new("millrace.job".to_owned(), job.name().to_owned()),
            KeyValue::new("millrace.topic".to_owned(), job.topic().to_owned()),
        ]));
    // Both columns only grow, a little at a time: a dictionary would be as large as the data.
    for column in [offset, timestamp] {
        properties = properties
            .set_column_dictionary_enabled(column.clone(), false)
            .set_column_encoding(column, Encoding::DELTA_BINARY_PACKED);
    }
    properties.build()
}

fn parquet_error(job: &Job, source: ParquetError) -> Error {
    let (job, volume) = (job.name().to_owned(), job.config.volume.clone());
    if is_no_space(&source) {
        return Error::NoSpace { job, volume, source: Box::new(source) };
    }
    Error::Parquet { job, volume, source: Box::new(source) }
}
