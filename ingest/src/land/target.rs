//! Rows gathered for one file: those of one partition, and of one hour when files are split by time.

use std::sync::Arc;

use arrow::array::{ArrayRef, Int32Array, Int64Array, RecordBatch, StringArray, TimestampMillisecondArray};
use arrow::datatypes::{DataType, Field, Schema as ArrowSchema, SchemaRef, TimeUnit};
use arrow::error::ArrowError;
use chrono::DateTime;
use millrace_datafs::View;

use super::Completed;
use super::file::ParquetFile;
use crate::config::Job;
use crate::decode::Columns;
use crate::error::{Error, Result};
use crate::schema::{LINEAGE_COLUMNS, Schema};

/// Rows and record bytes that are gathered before they are passed to the Parquet writer.
const GATHER_ROWS: usize = 8192;
const GATHER_BYTES: usize = 1 << 20;
const HOUR_MS: i64 = 3_600_000;

/// The columns of a job's files at one moment.
#[derive(Clone)]
pub(crate) struct Layout {
    job: Arc<str>,
    shared: Arc<LayoutInner>,
}

struct LayoutInner {
    job: Arc<Job>,
    schema: Arc<Schema>,
    arrow: SchemaRef,
    /// Least memory of a row in bytes: fixed lists have their width even where they are null.
    row_bytes_min: usize,
}

/// Hours since 1970 of a record; `None` without a timestamp.
pub(crate) type Hour = Option<i64>;

impl Layout {
    pub(crate) fn new(job: &Arc<Job>, schema: Arc<Schema>) -> Self {
        let mut fields = schema.arrow_fields();
        if job.config.lineage {
            let [topic, partition, offset, timestamp] = LINEAGE_COLUMNS;
            let ms = DataType::Timestamp(TimeUnit::Millisecond, Some("UTC".into()));
            fields.extend(
                [
                    Field::new(topic, DataType::Utf8, false),
                    Field::new(partition, DataType::Int32, false),
                    Field::new(offset, DataType::Int64, false),
                    Field::new(timestamp, ms, true),
                ]
                .map(Arc::new),
            );
        }
        Self {
            job: job.name().into(),
            shared: Arc::new(LayoutInner {
                job: job.clone(),
                arrow: Arc::new(ArrowSchema::new(fields)),
                row_bytes_min: schema
                    .fields
                    .iter()
                    .fold(0, |bytes: usize, f| bytes.saturating_add(f.kind.bytes_min())),
                schema,
            }),
        }
    }

    pub(crate) fn schema(&self) -> &Arc<Schema> {
        &self.shared.schema
    }

    /// Whether a file would have no column at all.
    pub(crate) fn is_empty(&self) -> bool {
        self.shared.arrow.fields().is_empty()
    }

    pub(crate) fn hour(&self, timestamp_ms: Option<i64>) -> Hour {
        if self.shared.job.config.partition_by_time {
            timestamp_ms.map(|ms| ms.div_euclid(HOUR_MS))
        } else {
            None
        }
    }

    pub(crate) fn arrow_error(&self, source: ArrowError) -> Error {
        Error::Arrow { job: self.job.to_string(), source: Box::new(source) }
    }
}

/// Rows under construction and the file that they go to.
pub(crate) struct Target {
    layout: Layout,
    partition: i32,
    hour: Hour,
    pub(crate) columns: Columns,
    offsets: Vec<i64>,
    timestamps: Vec<Option<i64>>,
    bytes: usize,
    file: Option<ParquetFile>,
}

impl Target {
    pub(crate) fn new(layout: &Layout, partition: i32, hour: Hour) -> Self {
        Self {
            layout: layout.clone(),
            partition,
            hour,
            columns: Columns::new(layout.schema()),
            offsets: Vec::new(),
            timestamps: Vec::new(),
            bytes: 0,
            file: None,
        }
    }

    pub(crate) fn matches(&self, partition: i32, hour: Hour) -> bool {
        self.partition == partition && self.hour == hour
    }

    /// Whether its columns are those of `schema`.
    pub(crate) fn has(&self, schema: &Arc<Schema>) -> bool {
        Arc::ptr_eq(self.layout.schema(), schema)
    }

    /// Records the offset, timestamp and size of the row just added to `columns`.
    pub(crate) fn record_row(&mut self, offset: i64, timestamp_ms: Option<i64>, bytes: usize) {
        self.offsets.push(offset);
        self.timestamps.push(timestamp_ms);
        self.bytes += bytes.max(self.layout.shared.row_bytes_min);
    }

    pub(crate) fn is_full(&self) -> bool {
        self.offsets.len() >= GATHER_ROWS || self.bytes >= GATHER_BYTES
    }

    /// Passes the gathered rows to the Parquet writer.
    pub(crate) fn drain(&mut self, layout: &Layout, view: &View) -> Result<()> {
        let (Some(&first), Some(&last)) = (self.offsets.first(), self.offsets.last()) else {
            return Ok(());
        };
        let batch = self.batch().map_err(|e| layout.arrow_error(e))?;
        let job = &layout.shared.job;
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(ParquetFile::create(
                view,
                job,
                self.partition,
                first,
                layout.shared.arrow.clone(),
            )?),
        };
        file.write(job, &batch, self.bytes, last)?;
        self.bytes = 0;
        Ok(())
    }

    fn batch(&mut self) -> Result<RecordBatch, ArrowError> {
        let rows = self.offsets.len();
        let mut columns: Vec<ArrayRef> = self.columns.take()?;
        let shared = &self.layout.shared;
        let offsets = std::mem::take(&mut self.offsets);
        let timestamps = std::mem::take(&mut self.timestamps);
        if shared.job.config.lineage {
            let topic = std::iter::repeat_n(shared.job.topic(), rows);
            columns.push(Arc::new(StringArray::from_iter_values(topic)));
            columns.push(Arc::new(Int32Array::from_value(self.partition, rows)));
            columns.push(Arc::new(Int64Array::from(offsets)));
            columns.push(Arc::new(TimestampMillisecondArray::from(timestamps).with_timezone("UTC")));
        }
        RecordBatch::try_new(shared.arrow.clone(), columns)
    }

    /// Completes the file, if any row landed.
    pub(crate) fn complete(mut self, view: &View) -> Result<Option<Completed>> {
        let layout = self.layout.clone();
        self.drain(&layout, view)?;
        let job = &layout.shared.job;
        let Some(file) = self.file else {
            return Ok(None);
        };
        let folder = if job.config.partition_by_time {
            format!("{}/{}", job.path, hour_folder(self.hour))
        } else {
            job.path.clone()
        };
        file.complete(job, &folder).map(Some)
    }
}

/// The Hive-style folder of an hour.
fn hour_folder(hour: Hour) -> String {
    hour.and_then(|hour| DateTime::from_timestamp_millis(hour.checked_mul(HOUR_MS)?)).map_or_else(
        || "dt=__HIVE_DEFAULT_PARTITION__/hr=__HIVE_DEFAULT_PARTITION__".to_owned(),
        |time| time.format("dt=%Y-%m-%d/hr=%H").to_string(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hours_map_to_hive_folders() {
        assert_eq!(hour_folder(Some(0)), "dt=1970-01-01/hr=00");
        assert_eq!(hour_folder(Some(490_000)), "dt=2025-11-24/hr=16");
        assert_eq!(hour_folder(Some(-1)), "dt=1969-12-31/hr=23");
        let none = "dt=__HIVE_DEFAULT_PARTITION__/hr=__HIVE_DEFAULT_PARTITION__";
        assert_eq!(hour_folder(None), none);
        assert_eq!(hour_folder(Some(i64::MAX / HOUR_MS)), none);
    }
}
