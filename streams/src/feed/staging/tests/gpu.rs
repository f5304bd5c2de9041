//! Tests of staging on a GPU: copies and their order against the feed, on a machine with a GPU.

use cudarc::driver::result::{self, stream};
use millrace_testing::{Need, skip};

use super::*;

/// The first GPU; skips the calling test otherwise.
fn gpu() -> Option<Device> {
    match Device::open("cuda:0") {
        Ok(device) => Some(device),
        Err(error) => {
            skip(Need::Gpu, error);
            None
        }
    }
}

/// The reader's work is far behind when it lets go of a batch: its stream copies each batch only after a long fill of other
/// memory. A slot that was filled again too early would show in the copies.
#[tokio::test]
async fn batches_on_a_gpu_stay_until_the_readers_stream_has_passed() {
    const DELAY_BYTES: usize = 1 << 30;
    let Some(device) = gpu() else { return };
    let Kind::Cuda(gpu) = &device.0 else { panic!("not a GPU") };
    let feed = AnyFeed::from(feed(&["id", "flag", "pixels"]).await);
    let mut staging = Staging::new(feed.schema(), BATCH_ROWS, device.clone()).unwrap();
    Arc::get_mut(&mut staging).unwrap().slots_max = AHEAD_MAX + 1;
    let slot_bytes = staging.slot_bytes;
    let places = 0..4 * ROWS as u64;
    let batches = (4 * ROWS as usize).div_ceil(BATCH_ROWS);
    // SAFETY: memory that is written before it is read; all of it is freed below.
    let (reader, delay, copies) = unsafe {
        let _bound = gpu.bind().unwrap();
        let reader = stream::create(stream::StreamKind::NonBlocking).unwrap();
        let copies = result::malloc_sync(batches * slot_bytes).unwrap();
        (reader as usize, result::malloc_sync(DELAY_BYTES).unwrap(), copies)
    };
    let mut staged = feed.stream_staged(Shard::WHOLE, places.clone(), 1, &staging).unwrap();
    let mut count = 0;
    while let Some(batch) = staged.next().await {
        let batch = batch.unwrap();
        let _bound = gpu.bind().unwrap();
        for column in &batch.columns {
            let StagedColumn::Slot(slot) = column else { panic!("a column is not on the GPU") };
            slot.read_on(ReaderStream::Handle(reader)).unwrap();
        }
        let StagedColumn::Slot(first) = &batch.columns[0] else { panic!("a column is not on the GPU") };
        let (target, source) = (copies + (count * slot_bytes) as u64, first.address() as u64);
        // SAFETY: memory and stream exist, and the slot stays behind this copy.
        unsafe {
            result::memset_d8_async(delay, count as u8, DELAY_BYTES, reader as _).unwrap();
            result::memcpy_dtod_async(target, source, slot_bytes, reader as _).unwrap();
        }
        count += 1;
    }
    assert_eq!(count, batches);
    let mut found = vec![0_u8; batches * slot_bytes];
    // SAFETY: the stream has ended when it is destroyed, and what it used is freed once.
    unsafe {
        let _bound = gpu.bind().unwrap();
        stream::synchronize(reader as _).unwrap();
        result::memcpy_dtoh_sync(&mut found, copies).unwrap();
    }
    drop(staged);
    let mut plain = feed.stream_places(Shard::WHOLE, places, 1).unwrap();
    for slot in found.chunks(slot_bytes) {
        let batch = plain.next().await.unwrap().unwrap().batch;
        for (place, column) in staging.places.iter().zip(batch.columns()) {
            let place = place.unwrap();
            assert_eq!(slot[place.offset..][..place.bytes(batch.num_rows())], expected(column).unwrap());
        }
    }
    drop(staging);
    // SAFETY: as above; no slot has the stream any more.
    unsafe {
        let _bound = gpu.bind().unwrap();
        stream::destroy(reader as _).unwrap();
        result::free_sync(delay).unwrap();
        result::free_sync(copies).unwrap();
    }
}

#[test]
fn a_gpu_that_is_not_there_and_memory_that_it_does_not_have_are_refused() {
    let Some(device) = gpu() else { return };
    let Err(error) = Device::open("cuda:999") else { panic!("there is no such GPU") };
    assert!(error.to_string().contains("GPUs, numbered from 0"), "{error}");
    let Err(error) = device.allocate(1 << 50) else { panic!("no machine has that much memory") };
    assert!(error.to_string().contains("smaller batch_rows"), "{error}");
    let Ok(mut slot) = device.allocate(100) else { panic!("there is memory for a small slot") };
    slot.host().unwrap().fill(7);
    slot.filled(100).unwrap();
    slot.read_on(ReaderStream::Unknown).unwrap();
    slot.released();
    assert_eq!(slot.host().unwrap(), [7; 100]);
}

#[tokio::test]
async fn columns_that_a_gpu_cannot_hold_are_refused() {
    let Some(device) = gpu() else { return };
    let feed = feed(&["id", "name"]).await;
    let Err(error) = Staging::new(feed.schema(), 8, device) else { panic!("texts are not staged") };
    assert!(error.to_string().contains("column \"name\" is Utf8"), "{error}");
}
