//! Memory files of other processes: what is mapped, and what is decoded.

use std::ops::RangeInclusive;
use std::os::fd::{AsFd as _, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};

use arrow::array::Decimal128Array;
use arrow::buffer::{Buffer, MutableBuffer};
use arrow::ipc::CompressionType;
use arrow::ipc::writer::{IpcWriteOptions, StreamWriter};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

use super::*;

/// Rows whose file is small enough to change each part of it.
const FEW: usize = 100;
const SIZES: RangeInclusive<u64> = 1..=1 << 20;

fn map(file: &OwnedFd) -> io::Result<Buffer> {
    memory::map(file, &SIZES, Budget::new(1).hold().unwrap())
}

/// A memory file with some bytes and seals.
fn file(bytes: &[u8], seals: SealFlag) -> OwnedFd {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let file = memfd_create("test", flags).unwrap();
    assert_eq!(nix::unistd::write(file.as_fd(), bytes).unwrap(), bytes.len());
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).unwrap();
    file
}

#[test]
fn files_that_may_change_are_refused() {
    let named: OwnedFd = tempfile::tempfile().unwrap().into();
    assert!(map(&named).is_err());
    let all =
        SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_SEAL;
    for one in all.iter() {
        assert!(map(&file(b"bytes", all - one)).is_err(), "without {one:?}");
    }
    assert!(map(&file(b"bytes", all)).is_ok());
}

#[test]
fn files_of_other_sizes_and_with_holes_are_refused() {
    let sealed = memory::encode(&rows(0, FEW)).unwrap();
    let size = memory::size(&sealed).unwrap();
    let mappings = Budget::new(1);
    let map = |file: &OwnedFd, sizes| memory::map(file, &sizes, mappings.hold().unwrap());
    let mapped = map(&sealed, size..=size).unwrap();
    assert!(mappings.hold().is_none());
    drop(mapped);
    assert!(map(&sealed, 1..=size - 1).is_err(), "too large");
    assert!(map(&sealed, size + 1..=1 << 20).is_err(), "too small");
    let holes = memfd_create("holes", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
    nix::unistd::ftruncate(&holes, 1 << 19).unwrap();
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_WRITE;
    fcntl(&holes, FcntlArg::F_ADD_SEALS(seals | SealFlag::F_SEAL_SEAL)).unwrap();
    let error = map(&holes, SIZES).unwrap_err();
    assert!(error.to_string().contains("holes"), "{error}");
    assert_eq!(mappings.held(), 0);
}

#[test]
fn changed_bytes_decode_to_an_error_or_to_valid_rows() {
    let whole = map(&memory::encode(&rows(0, FEW)).unwrap()).unwrap();
    let schema = rows(0, FEW).schema();
    assert_eq!(memory::decode(&whole, &schema, FEW).unwrap(), rows(0, FEW));
    for at in 0..whole.len() {
        let mut bytes = whole.to_vec();
        bytes[at] ^= 0xff;
        let bytes = Buffer::from(bytes);
        let decode = || memory::decode(&bytes, &schema, FEW);
        // A panic is caught by the task that decodes.
        if let Ok(Ok(found)) = catch_unwind(AssertUnwindSafe(decode)) {
            assert_eq!((found.num_rows(), found.schema()), (FEW, Arc::clone(&schema)));
            // Reads every text and number.
            assert!(!format!("{found:?}").is_empty());
        }
        // The end of the stream follows the rows.
        let cut = whole.slice_with_length(0, at);
        assert!(memory::decode(&cut, &schema, FEW).is_err() || at + 64 > whole.len(), "cut at {at}");
    }
}

#[test]
fn other_rows_and_columns_are_refused() {
    let bytes = map(&memory::encode(&rows(0, FEW)).unwrap()).unwrap();
    let schema = rows(0, FEW).schema();
    assert!(memory::decode(&bytes, &schema, FEW + 1).is_err());
    let fewer = Arc::new(schema.project(&[0]).unwrap());
    assert!(memory::decode(&bytes, &fewer, FEW).is_err());
    let swapped = Arc::new(schema.project(&[1, 0]).unwrap());
    assert!(memory::decode(&bytes, &swapped, FEW).is_err());
    let renamed = [schema.field(0).clone().with_name("other"), schema.field(1).clone()];
    assert!(memory::decode(&bytes, &Arc::new(Schema::new(renamed.to_vec())), FEW).is_err());
}

#[test]
fn compressed_messages_are_refused() {
    let rows = rows(0, FEW);
    for compression in [None, Some(CompressionType::LZ4_FRAME), Some(CompressionType::ZSTD)] {
        let options = IpcWriteOptions::default().try_with_compression(compression).unwrap();
        let mut writer = StreamWriter::try_new_with_options(Vec::new(), &rows.schema(), options).unwrap();
        writer.write(&rows).unwrap();
        let bytes = Buffer::from(writer.into_inner().unwrap());
        let decoded = memory::decode(&bytes, &rows.schema(), FEW);
        assert_eq!(decoded.is_ok(), compression.is_none(), "{compression:?}");
    }
}

/// The bytes of a file at an address that is a multiple of 64, plus some.
fn moved(file: &OwnedFd, by: usize) -> Buffer {
    let bytes = map(file).unwrap();
    let mut buffer = MutableBuffer::new(by + bytes.len());
    buffer.extend_from_slice(&vec![0u8; by]);
    buffer.extend_from_slice(bytes.as_slice());
    Buffer::from(buffer).slice(by)
}

#[test]
fn buffers_that_decoding_would_copy_are_refused() {
    let numbers: ArrayRef = Arc::new(Decimal128Array::from_iter_values(0..FEW as i128));
    let rows = RecordBatch::try_from_iter([("number", numbers)]).unwrap();
    let file = memory::encode(&rows).unwrap();
    assert_eq!(memory::decode(&moved(&file, 64), &rows.schema(), FEW).unwrap(), rows);
    // The messages are aligned, the numbers are not.
    let error = memory::decode(&moved(&file, 8), &rows.schema(), FEW).unwrap_err();
    assert!(!error.to_string().contains("columns"), "{error}");
    // The columns are compared before the rows are decoded.
    let other = super::rows(0, FEW).schema();
    let error = memory::decode(&moved(&file, 8), &other, FEW).unwrap_err();
    assert!(error.to_string().contains("other columns"), "{error}");
}
