//! Compressed record batches of Arrow IPC files: the feed knows their decompressed size before it decodes
//! them.

use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, RecordBatch};
use arrow::ipc::CompressionType;
use millrace_streams::feed::{Feed, FeedError, FeedOptions, Plan, PlanOptions};
use object_store::ObjectStore;
use object_store::memory::InMemory;

use super::data::put;
use super::reading::ipc_with;

const ROWS: usize = 1_000_000;
/// Bytes of one column once it is decompressed, without its validity.
const COLUMN_BYTES: u64 = 8 * ROWS as u64;

/// Two columns of zeros, which compress by a factor of a thousand and more.
fn zeros() -> RecordBatch {
    let column = || Arc::new(Int64Array::from(vec![0; ROWS])) as ArrayRef;
    RecordBatch::try_from_iter([("a", column()), ("b", column())]).unwrap()
}

async fn feed(file: Vec<u8>, options: &FeedOptions) -> Feed {
    let store = InMemory::new();
    put(&store, "t/a.arrow", file).await;
    let store: Arc<dyn ObjectStore> = Arc::new(store);
    let plan = PlanOptions { batch_rows: 8, ..PlanOptions::default() };
    Feed::open(Plan::build(&store, "t", &plan).await.unwrap(), store, options).unwrap()
}

#[tokio::test]
async fn a_record_batch_that_is_too_large_once_decompressed_is_refused() {
    for codec in [CompressionType::LZ4_FRAME, CompressionType::ZSTD] {
        let file = ipc_with(&zeros(), codec);
        assert!((file.len() as u64) < COLUMN_BYTES / 50, "{codec:?}: {} bytes", file.len());
        let small = FeedOptions { record_batch_bytes_max: 1 << 20, ..FeedOptions::default() };
        match feed(file.clone(), &small).await.batch(0, 0..8).await {
            Err(error @ FeedError::Oversized { bytes, limit: 0x10_0000, .. }) => {
                assert!((2 * COLUMN_BYTES..3 * COLUMN_BYTES).contains(&bytes), "{codec:?}: {bytes} bytes");
                let text = error.to_string();
                assert!(text.contains("t/a.arrow") && text.contains("record batch 0"), "{text}");
            }
            other => panic!("{codec:?}: {other:?}"),
        }
        // Only the delivered columns count.
        let one = FeedOptions {
            columns: Some(vec!["b".to_string()]),
            record_batch_bytes_max: COLUMN_BYTES * 3 / 2,
            ..FeedOptions::default()
        };
        for options in [one, FeedOptions::default()] {
            let batch = feed(file.clone(), &options).await.batch(0, 0..8).await.unwrap();
            assert_eq!(batch.batch.num_rows(), 8, "{codec:?}");
        }
    }
}

#[tokio::test]
async fn impossible_length_allocates_no_memory() {
    let mut file = ipc_with(&zeros(), CompressionType::ZSTD);
    let length = COLUMN_BYTES.to_le_bytes();
    let at = file.windows(8).position(|bytes| bytes == length).unwrap();
    for (said, refused) in [(1i64 << 60, true), (-2, false)] {
        file[at..at + 8].copy_from_slice(&said.to_le_bytes());
        match feed(file.clone(), &FeedOptions::default()).await.batch(0, 0..8).await {
            Err(FeedError::Oversized { .. }) if refused => {}
            Err(FeedError::Corrupt { .. }) if !refused => {}
            other => panic!("{said}: {other:?}"),
        }
    }
}
