use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicU32, Ordering};

use arrow::array::{ArrayRef, Int64Array, StringArray};
use arrow::buffer::Buffer;

use super::*;

const ROWS: usize = 1_000;

fn batch(group: u32) -> RecordBatch {
    let ids: ArrayRef =
        Arc::new(Int64Array::from_iter_values((0..ROWS as i64).map(|i| i + i64::from(group))));
    let names: ArrayRef = Arc::new(StringArray::from_iter_values((0..ROWS).map(|i| format!("row {i}"))));
    RecordBatch::try_from_iter([("id", ids), ("name", names)]).unwrap()
}

/// Two ends of the cache of a home.
fn pair(home: &Path, bytes_max: u64) -> [Arc<NodeCache>; 2] {
    let plan = "ab".repeat(32).parse::<PlanId>().unwrap();
    let schema = batch(0).schema();
    let scope = Scope { home, plan, groups: 16, schema: &schema };
    [NodeCache::new(&scope, bytes_max), NodeCache::new(&scope, bytes_max)]
}

async fn read(node: &NodeCache, group: u32, decoded: &AtomicU32) -> RecordBatch {
    let decode = async {
        decoded.fetch_add(1, Ordering::SeqCst);
        Ok(batch(group))
    };
    node.read(group, ROWS, decode).await.unwrap()
}

#[tokio::test]
async fn each_row_group_is_decoded_once() {
    let home = tempfile::tempdir().unwrap();
    let [one, other] = pair(home.path(), 1 << 24);
    let decoded = AtomicU32::new(0);
    for group in 0..8 {
        let (a, b) = tokio::join!(read(&one, group, &decoded), read(&other, group, &decoded));
        assert_eq!(a, batch(group));
        assert_eq!(b, batch(group));
    }
    assert_eq!(decoded.load(Ordering::SeqCst), 8);
}

#[tokio::test]
async fn the_end_of_the_server_leaves_the_other_working() {
    let home = tempfile::tempdir().unwrap();
    let [one, other] = pair(home.path(), 1 << 24);
    let decoded = AtomicU32::new(0);
    let kept = read(&one, 0, &decoded).await;
    drop(one);
    for group in 0..4 {
        assert_eq!(read(&other, group, &decoded).await, batch(group));
    }
    // A mapping outlives its server.
    assert_eq!(kept, batch(0));
}

#[tokio::test]
async fn the_server_holds_no_more_than_its_limit() {
    let home = tempfile::tempdir().unwrap();
    let [one, other] = pair(home.path(), 100_000);
    let decoded = AtomicU32::new(0);
    for group in 0..16 {
        assert_eq!(read(&one, group, &decoded).await, batch(group));
        assert_eq!(read(&other, group, &decoded).await, batch(group));
        assert!(one.shelf.bytes() <= 100_000, "{}", one.shelf.bytes());
    }
}

#[test]
fn files_that_may_change_are_refused() {
    let file: OwnedFd = tempfile::tempfile().unwrap().into();
    assert!(memory::map(&file, 1 << 20).is_err());
    let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC | nix::sys::memfd::MFdFlags::MFD_ALLOW_SEALING;
    let open = nix::sys::memfd::memfd_create("open", flags).unwrap();
    nix::unistd::write(open.as_fd(), b"bytes").unwrap();
    assert!(memory::map(&open, 1 << 20).is_err());
    let sealed = memory::encode(&batch(0)).unwrap();
    assert!(memory::map(&sealed, 100).is_err(), "larger than the limit");
    assert!(memory::map(&sealed, 1 << 20).is_ok());
}

#[test]
fn changed_bytes_decode_to_an_error_or_to_valid_rows() {
    let whole = memory::map(&memory::encode(&batch(0)).unwrap(), 1 << 20).unwrap();
    let schema = batch(0).schema();
    assert!(memory::decode(whole.clone(), &schema, ROWS + 1).is_err());
    for at in (0..whole.len()).step_by(61) {
        let mut bytes = whole.to_vec();
        bytes[at] ^= 0xff;
        let decode = || memory::decode(Buffer::from(bytes), &schema, ROWS);
        // A panic is caught by the task that decodes.
        if let Ok(Ok(found)) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(decode)) {
            assert_eq!(found.num_rows(), ROWS);
        }
        assert!(
            memory::decode(whole.slice_with_length(0, at), &schema, ROWS).is_err() || at > whole.len() - 64
        );
    }
}

#[tokio::test]
async fn a_peer_that_sends_nonsense_is_dropped() {
    let home = tempfile::tempdir().unwrap();
    let [one, other] = pair(home.path(), 1 << 24);
    let decoded = AtomicU32::new(0);
    read(&one, 0, &decoded).await;
    let stream = one.connect().await.unwrap();
    send(&stream, GET, 99, None).await.unwrap();
    assert!(receive(&stream).await.is_err());
    // A claim whose holder goes passes to the next process.
    let stream = one.connect().await.unwrap();
    send(&stream, GET, 1, None).await.unwrap();
    assert_eq!(receive(&stream).await.unwrap().kind, DECODE);
    drop(stream);
    assert_eq!(read(&other, 1, &decoded).await, batch(1));
    assert_eq!(read(&one, 1, &decoded).await, batch(1));
    assert_eq!(decoded.load(Ordering::SeqCst), 2);
}
