//! Tests of logs on disk: recovery of torn ends at every byte, damage in the middle, reads from every offset,
//! idempotent producers across a restart.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use bytes::{Bytes, BytesMut};
use indexmap::IndexMap;
use kafka_protocol::records::{
    Compression, Record, RecordBatchDecoder, RecordBatchEncoder, RecordEncodeOptions, TimestampType,
};
use proptest::prelude::*;
use tempfile::TempDir;

use super::batch::{Header, Malformed, check_produced};
use super::producers::{Producers, Verdict};
use super::segments::{Appended, Damage, Retention, Segments};
use crate::broker::code;

/// A batch as a producer sends it: offsets from 0, one record per value, timestamps from `time`.
pub(crate) fn batch((id, epoch, sequence): (i64, i16, i32), time: i64, values: &[&[u8]]) -> Bytes {
    let records: Vec<Record> = values
        .iter()
        .enumerate()
        .map(|(index, value)| Record {
            transactional: false,
            control: false,
            delete_horizon: false,
            partition_leader_epoch: -1,
            producer_id: id,
            producer_epoch: epoch,
            timestamp_type: TimestampType::Creation,
            offset: index as i64,
            sequence: if id < 0 { -1 } else { sequence.wrapping_add(index as i32) },
            timestamp: time + index as i64,
            key: None,
            value: Some(Bytes::copy_from_slice(value)),
            headers: IndexMap::new(),
        })
        .collect();
    let mut bytes = BytesMut::new();
    let options = RecordEncodeOptions { version: 2, compression: Compression::None };
    RecordBatchEncoder::encode(&mut bytes, &records, &options).unwrap();
    let mut bytes = bytes.to_vec();
    if id < 0 {
        // The codec splits batches of records whose sequence does not grow with the offset.
        bytes = single_without_producer(&records);
    }
    bytes.into()
}

fn single_without_producer(records: &[Record]) -> Vec<u8> {
    let numbered: Vec<Record> = records
        .iter()
        .enumerate()
        .map(|(i, r)| Record { producer_id: 0, producer_epoch: 0, sequence: i as i32, ..r.clone() })
        .collect();
    let mut bytes = BytesMut::new();
    let options = RecordEncodeOptions { version: 2, compression: Compression::None };
    RecordBatchEncoder::encode(&mut bytes, &numbered, &options).unwrap();
    let mut bytes = bytes.to_vec();
    bytes[43..51].copy_from_slice(&(-1i64).to_be_bytes());
    bytes[51..53].copy_from_slice(&(-1i16).to_be_bytes());
    bytes[53..57].copy_from_slice(&(-1i32).to_be_bytes());
    reseal(&mut bytes);
    bytes
}

/// Recomputes the checksum after a change.
pub(crate) fn reseal(batch: &mut [u8]) {
    let crc = crc32c::crc32c(&batch[21..]);
    batch[17..21].copy_from_slice(&crc.to_be_bytes());
}

const NOBODY: (i64, i16, i32) = (-1, -1, -1);

/// A log without damage.
fn open(dir: &Path, segment_bytes_max: u64) -> Segments {
    let log = Segments::open(dir, segment_bytes_max, false);
    assert_eq!(log.damage(), None);
    log
}

/// Reopens a log after a checkpoint.
fn reopen(dir: &Path, segment_bytes_max: u64) -> Segments {
    let mut log = open(dir, segment_bytes_max);
    log.checkpoint().unwrap();
    drop(log);
    open(dir, segment_bytes_max)
}

/// The damage of a log that has some.
fn damage(dir: &Path, segment_bytes_max: u64) -> (Segments, Damage) {
    let log = Segments::open(dir, segment_bytes_max, false);
    let damage = log.damage().expect("no damage was found").clone();
    (log, damage)
}

fn append(log: &mut Segments, batch: &[u8]) -> Appended {
    log.append(batch, &check_produced(batch).unwrap()).unwrap()
}

/// All values of a log with their offsets, read as a consumer would.
fn values(log: &mut Segments, bytes_max: usize) -> Vec<(i64, Vec<u8>)> {
    let (mut next, end) = (log.start_offset(), log.end_offset());
    let mut found = Vec::new();
    while next < end {
        let bytes = log.read_position(next).unwrap().read(next, end, bytes_max, true).unwrap();
        assert!(!bytes.is_empty(), "nothing at {next} of {end}");
        for set in RecordBatchDecoder::decode_all(&mut Bytes::from(bytes)).unwrap() {
            for record in set.records {
                if record.offset >= next {
                    assert_eq!(record.offset, next);
                    found.push((record.offset, record.value.unwrap().to_vec()));
                    next += 1;
                }
            }
        }
    }
    found
}

fn segment_files(dir: &Path) -> Vec<std::path::PathBuf> {
    let mut files: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "log"));
    files.sort();
    files
}

#[test]
fn torn_end_is_cut_at_every_byte() {
    let dir = TempDir::new().unwrap();
    let mut log = open(dir.path(), 1 << 20);
    let mut ends = vec![0];
    for index in 0..5u8 {
        append(&mut log, &batch(NOBODY, 0, &[&[index], &[index, index]]));
        ends.push(fs::metadata(&segment_files(dir.path())[0]).unwrap().len());
    }
    let file = segment_files(dir.path()).remove(0);
    let whole = fs::read(&file).unwrap();
    for cut in 0..=whole.len() {
        fs::write(&file, &whole[..cut]).unwrap();
        let mut log = open(dir.path(), 1 << 20);
        let batches = ends.iter().filter(|end| **end > 0 && **end <= cut as u64).count();
        assert_eq!(log.end_offset(), batches as i64 * 2, "cut at {cut}");
        assert_eq!(fs::metadata(&file).unwrap().len(), ends[batches], "cut at {cut}");
        append(&mut log, &batch(NOBODY, 0, &[b"after"]));
        assert_eq!(values(&mut log, 1 << 20).len(), batches * 2 + 1);
    }
}

#[test]
fn garbage_and_zeros_after_the_end_are_cut() {
    for tail in [vec![0; 300], vec![0xff; 300], b"GET / HTTP/1.1\r\n".to_vec()] {
        let dir = TempDir::new().unwrap();
        let mut log = open(dir.path(), 1 << 20);
        append(&mut log, &batch(NOBODY, 0, &[b"one", b"two"]));
        drop(log);
        let file = segment_files(dir.path()).remove(0);
        let mut bytes = fs::read(&file).unwrap();
        let sound = bytes.len();
        bytes.extend_from_slice(&tail);
        fs::write(&file, bytes).unwrap();
        assert_eq!(open(dir.path(), 1 << 20).end_offset(), 2);
        assert_eq!(fs::metadata(&file).unwrap().len(), sound as u64);
    }
}

#[test]
fn damage_in_the_middle_ends_reading_and_names_the_offset() {
    let dir = TempDir::new().unwrap();
    let mut log = open(dir.path(), 1 << 20);
    for index in 0..3u8 {
        append(&mut log, &batch(NOBODY, 0, &[&[index; 40]]));
    }
    drop(log);
    let file = segment_files(dir.path()).remove(0);
    let whole = fs::read(&file).unwrap();
    let size = whole.len() / 3;
    for position in [size + 20, size + 70, size + 5, size + 10] {
        let mut bytes = whole.clone();
        bytes[position] ^= 0x40;
        fs::write(&file, &bytes).unwrap();
        let (mut log, damage) = damage(dir.path(), 1 << 20);
        assert_eq!((damage.offset, damage.end), (1, 3), "flipped {position}");
        assert!(damage.reason.contains(file.to_str().unwrap()), "{}", damage.reason);
        assert!(damage.reason.contains(&format!("byte {size} ")), "{}", damage.reason);
        assert_eq!(log.read_position(0).unwrap().read(0, 3, 1 << 20, true).unwrap().len(), size);
        assert_eq!(fs::read(&file).unwrap(), bytes, "opening changes nothing");
    }
    // The advice of the error works.
    OpenOptions::new().write(true).open(&file).unwrap().set_len(size as u64).unwrap();
    assert_eq!(values(&mut open(dir.path(), 1 << 20), 1 << 20).len(), 1);
}

#[test]
fn damage_in_an_earlier_segment_or_a_missing_one_ends_reading() {
    let dir = TempDir::new().unwrap();
    let mut log = open(dir.path(), 200);
    for index in 0..4u8 {
        append(&mut log, &batch(NOBODY, 0, &[&[index; 150]]));
    }
    drop(log);
    let files = segment_files(dir.path());
    assert_eq!(files.len(), 4);
    let kept = fs::read(&files[1]).unwrap();
    OpenOptions::new().write(true).open(&files[1]).unwrap().write_all_at(&[9], 16).unwrap();
    let (mut log, found) = damage(dir.path(), 200);
    assert_eq!((found.offset, found.end, log.start_offset(), log.end_offset()), (1, 4, 0, 4));
    assert_eq!(log.read_position(0).unwrap().read(0, 4, 1 << 20, true).unwrap().len(), kept.len());
    fs::write(&files[1], &kept[..kept.len() - 1]).unwrap();
    assert_eq!(damage(dir.path(), 200).1.offset, 1);
    fs::remove_file(&files[1]).unwrap();
    assert_eq!(damage(dir.path(), 200).1.offset, 1);
    // Both remedies in the advice work: keeping the older records, and keeping the newer ones.
    fs::write(&files[1], b"").unwrap();
    let later = [fs::read(&files[2]).unwrap(), fs::read(&files[3]).unwrap()];
    fs::remove_file(&files[2]).unwrap();
    fs::remove_file(&files[3]).unwrap();
    assert_eq!(values(&mut open(dir.path(), 200), 1).len(), 1);
    fs::write(&files[2], &later[0]).unwrap();
    fs::write(&files[3], &later[1]).unwrap();
    fs::remove_file(&files[0]).unwrap();
    fs::remove_file(&files[1]).unwrap();
    let mut log = open(dir.path(), 200);
    assert_eq!((log.start_offset(), log.end_offset()), (2, 4));
    assert_eq!(values(&mut log, 1).len(), 2);
}

#[test]
fn flipped_byte_in_a_closed_segment_is_detected_on_read() {
    let dir = TempDir::new().unwrap();
    let mut log = open(dir.path(), 400);
    for index in 0..6u8 {
        append(&mut log, &batch(NOBODY, 1_000, &[&[index; 100]]));
    }
    drop(log);
    let file = segment_files(dir.path()).remove(0);
    let size = fs::metadata(&file).unwrap().len() / 2;
    // The value of the second record.
    OpenOptions::new().write(true).open(&file).unwrap().write_all_at(&[0xee], size + 90).unwrap();
    let mut log = open(dir.path(), 400);
    assert_eq!(log.read_position(0).unwrap().read(0, 6, 1 << 20, true).unwrap().len() as u64, size);
    for bytes_max in [1, 1 << 20] {
        let error = log.read_position(1).unwrap().read(1, 6, bytes_max, true).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidData);
        assert!(error.to_string().contains(file.to_str().unwrap()), "{error}");
        assert!(error.to_string().contains(&format!("byte {size}")), "{error}");
    }
    assert!(!log.read_position(2).unwrap().read(2, 6, 1 << 20, true).unwrap().is_empty());
}

#[test]
fn retention_removes_the_oldest_segments_by_age_and_size() {
    let dir = TempDir::new().unwrap();
    let mut log = open(dir.path(), 400);
    for index in 0..8 {
        append(&mut log, &batch(NOBODY, index * 1_000, &[&[0; 150]]));
    }
    assert_eq!(segment_files(dir.path()).len(), 8);
    let by_age = |before_ms| Retention { before_ms: Some(before_ms), bytes_max: None };
    assert_eq!(log.retain(by_age(0), true).unwrap(), 0);
    assert_eq!(log.retain(by_age(2_000), true).unwrap(), 2);
    assert_eq!((log.start_offset(), log.end_offset()), (2, 8));
    let bytes = fs::metadata(&segment_files(dir.path())[0]).unwrap().len();
    let by_size = Retention { before_ms: None, bytes_max: Some(3 * bytes) };
    assert_eq!(log.retain(by_size, true).unwrap(), 3);
    assert_eq!(values(&mut log, 1 << 20).first().unwrap().0, 5);
    // The last segment is removed when its records are durable; its end offset stays.
    assert_eq!(log.retain(by_age(i64::MAX), false).unwrap(), 2);
    assert_eq!(log.retain(by_age(i64::MAX), true).unwrap(), 1);
    drop(log);
    let mut log = open(dir.path(), 400);
    assert_eq!((log.start_offset(), log.end_offset()), (8, 8));
    append(&mut log, &batch(NOBODY, 0, &[b"next"]));
    assert_eq!(values(&mut log, 1 << 20), [(8, b"next".to_vec())]);
}

#[test]
fn reads_start_at_any_offset_and_respect_sizes() {
    let dir = TempDir::new().unwrap();
    let mut log = open(dir.path(), 120_000);
    let mut expected = Vec::new();
    for index in 0..300u32 {
        let value = vec![index as u8; 50 + (index as usize * 37) % 900];
        append(&mut log, &batch(NOBODY, i64::from(index) * 10, &[&value, b"x"]));
        expected.push(value);
        expected.push(b"x".to_vec());
    }
    assert!(segment_files(dir.path()).len() > 1);
    for bytes_max in [1, 100, 5_000, 1 << 20] {
        let found = values(&mut log, bytes_max);
        assert!(found.iter().map(|(_, value)| value).eq(&expected));
    }
    for from in (0..600).step_by(7) {
        let read = log.read_position(from).unwrap().read(from, 600, 3_000, false).unwrap();
        assert!(read.len() <= 3_000);
        let first = Header::parse(&read).unwrap();
        assert!(first.base_offset <= from && from < first.next_offset());
        // A read ends at the watermark.
        let below = log.read_position(from).unwrap().read(from, first.next_offset(), 1 << 20, true).unwrap();
        assert_eq!(below.len(), first.bytes);
        assert!(
            log.read_position(from).unwrap().read(from, first.base_offset, 1 << 20, true).unwrap().is_empty()
        );
        assert!(log.read_position(from).unwrap().read(from, 600, 10, false).unwrap().is_empty());
    }
    assert_eq!(log.by_time(0).unwrap(), Some((0, 0)));
    assert_eq!(log.by_time(1).unwrap(), Some((1, 1)));
    assert_eq!(log.by_time(1_995).unwrap(), Some((400, 2_000)));
    assert_eq!(log.by_time(2_991).unwrap(), Some((599, 2_991)));
    assert_eq!(log.by_time(2_992).unwrap(), None);
    assert!(log.bytes_from(0, u64::MAX) > log.bytes_from(300, u64::MAX));
    assert_eq!(log.bytes_from(600, u64::MAX), 0);
}

#[test]
fn produced_batches_are_checked() {
    let good = batch((1, 0, 0), 0, &[b"a", b"b"]);
    assert!(check_produced(&good).is_ok());
    let changed = |at: usize, value: u8, sealed: bool| {
        let mut bytes = good.to_vec();
        bytes[at] = value;
        if sealed {
            reseal(&mut bytes);
        }
        check_produced(&bytes)
    };
    assert_eq!(changed(70, 0x55, false), Err(Malformed::Crc));
    assert_eq!(changed(16, 1, false), Err(Malformed::Magic(1)));
    assert_eq!(changed(60, 3, true), Err(Malformed::Header), "count against last offset delta");
    assert_eq!(changed(61, 2, true), Err(Malformed::Records), "a record length that is not one");
    assert_eq!(changed(22, 0x10, true), Err(Malformed::Control));
    assert_eq!(changed(22, 0x20, true), Err(Malformed::Control));
    assert_eq!(changed(8, 0xff, false), Err(Malformed::Header), "negative length");
    for cut in 0..good.len() {
        assert!(check_produced(&good[..cut]).is_err());
    }
    assert_eq!(check_produced(&[&good[..], &good[..]].concat()), Err(Malformed::Several));
}

/// A batch whose records are compressed, each codec as its clients write it.
fn compressed(codec: u8, batch: &[u8]) -> Vec<u8> {
    use std::io::Write as _;
    let (head, records) = batch.split_at(61);
    let packed = match codec {
        1 => {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
            encoder.write_all(records).unwrap();
            encoder.finish().unwrap()
        }
        2 => snap::raw::Encoder::new().compress_vec(records).unwrap(),
        3 => {
            let mut encoder = lz4_flex::frame::FrameEncoder::new(Vec::new());
            encoder.write_all(records).unwrap();
            encoder.finish().unwrap()
        }
        4 => zstd::encode_all(records, 3).unwrap(),
        _ => records.to_vec(),
    };
    with_records(head, codec, &packed)
}

/// The batch of a head and a payload, marked as compressed with `codec`.
fn with_records(head: &[u8], codec: u8, payload: &[u8]) -> Vec<u8> {
    let mut batch = [head, payload].concat();
    let length = (batch.len() - 12) as i32;
    batch[8..12].copy_from_slice(&length.to_be_bytes());
    batch[22] = codec;
    reseal(&mut batch);
    batch
}

#[test]
fn compressed_batches_are_opened_and_checked() {
    let plain = batch((1, 0, 0), 1_000, &[b"one", &[7; 5_000], b"three"]);
    let head = &plain[..61];
    for codec in 1..=4 {
        let good = compressed(codec, &plain);
        assert!(check_produced(&good).is_ok(), "codec {codec}: {:?}", check_produced(&good));
        let torn = with_records(head, codec, &good[61..good.len() - 6]);
        assert!(check_produced(&torn).is_err(), "codec {codec}: a payload cut short");
        let noise = with_records(head, codec, &[0xa5; 300]);
        assert_eq!(check_produced(&noise), Err(Malformed::Compressed), "codec {codec}");
        // The head promises three records, the payload has two.
        let two = batch((1, 0, 0), 1_000, &[b"one", b"two"]);
        let short = compressed(codec, &[head, &two[61..]].concat());
        assert_eq!(check_produced(&short), Err(Malformed::Records), "codec {codec}");
        // The payload decompresses to bytes that are not a record.
        let no_record = compressed(codec, &[head, &[0x14, 0, 0, 0, 0x70]].concat());
        assert_eq!(check_produced(&no_record), Err(Malformed::Records), "codec {codec}");
    }
    assert_eq!(check_produced(&compressed(5, &plain)), Err(Malformed::Codec(5)));
    let packed = snap::raw::Encoder::new().compress_vec(&plain[61..]).unwrap();
    let mut java = b"\x82SNAPPY\0\0\0\0\x01\0\0\0\x01".to_vec();
    java.extend((packed.len() as u32).to_be_bytes());
    java.extend(packed);
    assert!(check_produced(&with_records(head, 2, &java)).is_ok());
    // 200 MB of zeros in a few kilobytes: no consumer would decompress them.
    let mut bomb = vec![0; 200_000_000];
    bomb[..6].copy_from_slice(&[0x80, 0x84, 0xaf, 0xbe, 0x01, 0]);
    for codec in [1, 4] {
        let bomb = compressed(codec, &[head, &bomb].concat());
        assert!(matches!(check_produced(&bomb), Err(Malformed::Large)), "{:?}", check_produced(&bomb));
    }
}

#[test]
fn snappy_that_announces_more_than_it_can_hold_is_refused() {
    let plain = batch((1, 0, 0), 1_000, &[&[0; 100_000]]);
    assert!(check_produced(&compressed(2, &plain)).is_ok(), "the best compression");
    // 99,999,999 bytes, for which the decompressor would reserve memory, out of one byte.
    let announced = with_records(&plain[..61], 2, &[0xff, 0xc1, 0xd7, 0x2f, 0]);
    assert_eq!(check_produced(&announced), Err(Malformed::Compressed));
}

#[test]
fn field_beyond_its_record_is_refused() {
    let good = batch((1, 0, 0), 0, &[b"abc"]);
    // Length, attributes, time, offset, key -1, value 3 bytes, no headers.
    assert_eq!(good[61..], [18, 0, 0, 0, 1, 6, b'a', b'b', b'c', 0]);
    for (at, value) in [(65, 6), (66, 8), (66, 4), (70, 2), (61, 16), (61, 20)] {
        let mut bytes = good.to_vec();
        bytes[at] = value;
        reseal(&mut bytes);
        assert_eq!(check_produced(&bytes), Err(Malformed::Records), "byte {at} is {value}");
    }
}

#[test]
fn a_time_inside_a_compressed_batch_finds_its_record() {
    let dir = TempDir::new().unwrap();
    let mut log = open(dir.path(), 1 << 20);
    for (codec, time) in [(1, 1_000), (2, 2_000), (3, 3_000), (4, 4_000)] {
        let values: Vec<&[u8]> = vec![b"value"; 100];
        append(&mut log, &compressed(codec, &batch(NOBODY, time, &values)));
    }
    assert_eq!(log.by_time(1_000).unwrap(), Some((0, 1_000)));
    assert_eq!(log.by_time(1_042).unwrap(), Some((42, 1_042)));
    assert_eq!(log.by_time(1_100).unwrap(), Some((100, 2_000)));
    assert_eq!(log.by_time(3_099).unwrap(), Some((299, 3_099)));
    assert_eq!(log.by_time(4_007).unwrap(), Some((307, 4_007)));
    assert_eq!(log.by_time(4_100).unwrap(), None);
}

#[test]
fn producer_sequences_are_checked_as_in_kafka() {
    let mut producers = Producers::default();
    let header = |epoch, sequence, count: usize| {
        let values = vec![&b"v"[..]; count];
        check_produced(&batch((7, epoch, sequence), 0, &values)).unwrap()
    };
    let refusal = |verdict| match verdict {
        Verdict::Refuse(code, _) => code,
        other => panic!("{other:?}"),
    };
    assert_eq!(refusal(producers.check_sequence(&header(0, 5, 1))), code::UNKNOWN_PRODUCER_ID);
    let mut offset = 0;
    for sequence in (0..14).step_by(2) {
        assert_eq!(producers.check_sequence(&header(0, sequence, 2)), Verdict::Append);
        producers.record_batch(&header(0, sequence, 2), offset);
        offset += 2;
    }
    assert_eq!(producers.check_sequence(&header(0, 12, 2)), Verdict::Duplicate(12));
    assert_eq!(producers.check_sequence(&header(0, 4, 2)), Verdict::Duplicate(4));
    assert_eq!(refusal(producers.check_sequence(&header(0, 2, 2))), code::DUPLICATE_SEQUENCE_NUMBER);
    assert_eq!(refusal(producers.check_sequence(&header(0, 16, 2))), code::OUT_OF_ORDER_SEQUENCE_NUMBER);
    assert_eq!(
        refusal(producers.check_sequence(&header(0, 12, 3))),
        code::OUT_OF_ORDER_SEQUENCE_NUMBER,
        "overlap"
    );
    assert_eq!(refusal(producers.check_sequence(&header(1, 14, 1))), code::OUT_OF_ORDER_SEQUENCE_NUMBER);
    producers.record_batch(&header(1, 0, 1), offset);
    assert_eq!(refusal(producers.check_sequence(&header(0, 14, 1))), code::INVALID_PRODUCER_EPOCH);
    // Sequence numbers wrap to 0.
    producers.record_batch(&Header { base_sequence: i32::MAX - 1, ..header(1, 0, 2) }, offset + 1);
    assert_eq!(producers.check_sequence(&header(1, 0, 2)), Verdict::Append);
    assert_eq!(refusal(producers.check_sequence(&header(1, 5, 1))), code::OUT_OF_ORDER_SEQUENCE_NUMBER);
}

#[test]
fn forgotten_producers_keep_memory_bounded() {
    let mut producers = Producers::default();
    let template = check_produced(&batch((0, 0, 0), 0, &[b"v"])).unwrap();
    for id in 0..45_000 {
        producers.record_batch(&Header { producer_id: id, ..template }, id);
    }
    assert!(producers.len() <= 20_000);
    let last = Header { producer_id: 44_999, ..template };
    assert_eq!(producers.check_sequence(&last), Verdict::Duplicate(44_999));
}

#[test]
fn duplicates_are_recognised_after_a_restart() {
    let dir = TempDir::new().unwrap();
    let mut log = open(dir.path(), 300);
    for sequence in 0..8 {
        assert_eq!(
            append(&mut log, &batch((3, 2, sequence), 0, &[b"v"])),
            Appended::New { base_offset: i64::from(sequence) }
        );
    }
    drop(log);
    let mut log = open(dir.path(), 300);
    assert_eq!(append(&mut log, &batch((3, 2, 6), 0, &[b"v"])), Appended::Duplicate { base_offset: 6 });
    assert!(matches!(append(&mut log, &batch((3, 2, 9), 0, &[b"v"])), Appended::Refused(..)));
    assert_eq!(append(&mut log, &batch((3, 2, 8), 0, &[b"v"])), Appended::New { base_offset: 8 });
    assert_eq!(values(&mut log, 1 << 20).len(), 9);
}

#[test]
fn failed_flush_leaves_nothing_durable() {
    let dir = TempDir::new().unwrap();
    let mut log = open(dir.path(), 1 << 20);
    append(&mut log, &batch((1, 0, 0), 0, &[b"one"]));
    log.refuse_writes();
    // A retry of the same batch is a duplicate; the point is that its flush fails again.
    assert!(log.sync_target().is_err());
    let next = batch((1, 0, 1), 0, &[b"two"]);
    assert!(log.append(&next, &check_produced(&next).unwrap()).is_err());
    assert_eq!(values(&mut log, 1 << 20).len(), 1, "reading goes on");
    drop(log);
    let mut log = open(dir.path(), 1 << 20);
    append(&mut log, &next);
    assert!(log.sync_target().is_ok());
}

#[test]
fn failed_segment_creation_leaves_no_gap() {
    let dir = TempDir::new().unwrap();
    let mut log = open(dir.path(), 300);
    append(&mut log, &batch(NOBODY, 0, &[&[1; 100]]));
    // A directory has the next segment's name.
    let taken = dir.path().join("00000000000000000001.log");
    fs::create_dir(&taken).unwrap();
    let large = batch(NOBODY, 0, &[&[2; 250]]);
    assert!(log.append(&large, &check_produced(&large).unwrap()).is_err());
    append(&mut log, &batch(NOBODY, 0, &[b"small"]));
    fs::remove_dir(&taken).unwrap();
    append(&mut log, &large);
    drop(log);
    let mut log = open(dir.path(), 300);
    assert_eq!(values(&mut log, 1 << 20).len(), 3);
}

#[test]
fn damage_found_on_read_is_an_error_not_end_of_log() {
    let dir = TempDir::new().unwrap();
    let mut log = open(dir.path(), 1 << 20);
    for index in 0..3u8 {
        append(&mut log, &batch(NOBODY, 0, &[&[index; 40]]));
    }
    let file = segment_files(dir.path()).remove(0);
    let size = fs::metadata(&file).unwrap().len() / 3;
    let write = |at: u64, bytes: &[u8]| {
        OpenOptions::new().write(true).open(&file).unwrap().write_all_at(bytes, at).unwrap();
    };
    let read = |log: &mut Segments, from| log.read_position(from).unwrap().read(from, 3, 1 << 20, true);
    write(size + 16, &[9]);
    assert_eq!(read(&mut log, 0).unwrap().len() as u64, size, "what is sound comes");
    assert!(read(&mut log, 1).is_err());
    assert!(read(&mut log, 2).is_err());
    write(size + 16, &[2]);
    assert_eq!(read(&mut log, 1).unwrap().len() as u64, 2 * size);
    write(2 * size + 8, &[0x7f]);
    assert!(read(&mut log, 2).is_err(), "a batch longer than the log");
}

/// Damages a header that only a start without a checkpoint reads.
fn spoil_first_header(dir: &Path) {
    let file = OpenOptions::new().write(true).open(&segment_files(dir)[0]).unwrap();
    file.write_all_at(&[9], 16).unwrap();
}

#[test]
fn checkpoint_skips_reading_covered_batches() {
    let dir = TempDir::new().unwrap();
    let mut log = open(dir.path(), 400);
    for sequence in 0..8 {
        append(&mut log, &batch((3, 2, sequence), 1_000 + i64::from(sequence), &[&[1; 100]]));
    }
    drop(log);
    let mut log = reopen(dir.path(), 400);
    assert_eq!((log.start_offset(), log.end_offset()), (0, 8));
    assert_eq!(values(&mut log, 1 << 20).len(), 8);
    assert_eq!(log.by_time(1_005).unwrap(), Some((5, 1_005)));
    assert_eq!(append(&mut log, &batch((3, 2, 7), 0, &[&[1; 100]])), Appended::Duplicate { base_offset: 7 });
    append(&mut log, &batch((3, 2, 8), 2_000, &[b"more"]));
    append(&mut log, &batch((3, 2, 9), 2_000, &[&[2; 300]]));
    drop(log);
    // The batches that the checkpoint covers are not read; later ones are.
    spoil_first_header(dir.path());
    let mut log = open(dir.path(), 400);
    assert_eq!(log.end_offset(), 10);
    assert_eq!(
        append(&mut log, &batch((3, 2, 9), 2_000, &[&[2; 300]])),
        Appended::Duplicate { base_offset: 9 }
    );
    assert_eq!(
        log.read_position(0).unwrap().read(0, 10, 1 << 20, true).unwrap_err().kind(),
        std::io::ErrorKind::InvalidData
    );
}

#[test]
fn checkpoint_of_other_files_is_ignored() {
    let dir = TempDir::new().unwrap();
    let mut log = open(dir.path(), 1 << 20);
    for index in 0..4u8 {
        append(&mut log, &batch(NOBODY, 0, &[&[index; 50]]));
    }
    drop(log);
    drop(reopen(dir.path(), 1 << 20));
    let file = segment_files(dir.path()).remove(0);
    let size = fs::metadata(&file).unwrap().len() / 4;
    let checkpoint = fs::read(dir.path().join("checkpoint.json")).unwrap();
    // The file is cut, then grows with other records beyond the size in the checkpoint.
    OpenOptions::new().write(true).open(&file).unwrap().set_len(size).unwrap();
    let mut log = open(dir.path(), 1 << 20);
    assert_eq!(log.end_offset(), 1);
    assert!(!dir.path().join("checkpoint.json").exists());
    for _ in 0..9 {
        append(&mut log, &batch(NOBODY, 0, &[&[9; 47]]));
    }
    drop(log);
    fs::write(dir.path().join("checkpoint.json"), checkpoint).unwrap();
    assert_eq!(open(dir.path(), 1 << 20).end_offset(), 10);
    // A checkpoint that is not JSON is ignored.
    fs::write(dir.path().join("checkpoint.json"), b"{").unwrap();
    assert_eq!(values(&mut open(dir.path(), 1 << 20), 1_000).len(), 10);
}

#[derive(Debug, Clone)]
enum Step {
    Append(Vec<u16>),
    Reopen,
    /// As a broker that stops in order.
    Stop,
    TearEnd(u8),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => prop::collection::vec(0u16..700, 1..5).prop_map(Step::Append),
        1 => Just(Step::Reopen),
        1 => Just(Step::Stop),
        1 => any::<u8>().prop_map(Step::TearEnd),
    ];
    prop::collection::vec(step, 1..25)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// After any sequence of appends, reopens and torn ends, a log holds a prefix of the appended records,
    /// and all of them but at most the torn batches.
    #[test]
    fn random_appends_are_read_back(steps in steps(), segment_bytes in 300u64..3_000) {
        let dir = TempDir::new().unwrap();
        let mut log = open(dir.path(), segment_bytes);
        let mut model: Vec<Vec<Vec<u8>>> = Vec::new();
        let mut counter = 0u8;
        for step in steps {
            match step {
                Step::Append(sizes) => {
                    counter = counter.wrapping_add(1);
                    let batch_values: Vec<Vec<u8>> = sizes.iter().map(|size| vec![counter; *size as usize]).collect();
                    let slices: Vec<&[u8]> = batch_values.iter().map(Vec::as_slice).collect();
                    append(&mut log, &batch(NOBODY, 0, &slices));
                    model.push(batch_values);
                }
                Step::Reopen => {
                    drop(log);
                    log = open(dir.path(), segment_bytes);
                }
                Step::Stop => {
                    log.checkpoint().unwrap();
                    drop(log);
                    log = open(dir.path(), segment_bytes);
                }
                Step::TearEnd(bytes) => {
                    drop(log);
                    let mut cut = 0;
                    if let Some(last) = segment_files(dir.path()).pop() {
                        let held = fs::metadata(&last).unwrap().len();
                        cut = u64::from(bytes).min(held);
                        OpenOptions::new().write(true).open(&last).unwrap().set_len(held - cut).unwrap();
                    }
                    log = open(dir.path(), segment_bytes);
                    let mut torn = cut;
                    while torn > 0 {
                        let Some(gone) = model.pop() else { break };
                        let slices: Vec<&[u8]> = gone.iter().map(Vec::as_slice).collect();
                        torn = torn.saturating_sub(batch(NOBODY, 0, &slices).len() as u64);
                    }
                }
            }
            let expected: Vec<&Vec<u8>> = model.iter().flatten().collect();
            let found = values(&mut log, 1_000);
            prop_assert!(found.iter().map(|(_, value)| value).eq(expected));
        }
    }
}
