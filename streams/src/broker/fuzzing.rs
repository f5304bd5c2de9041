//! Entry points of the fuzz targets into the broker's decoders. Each panics where a property fails.

use std::fmt::Debug;

use bytes::{Bytes, BytesMut};
use kafka_protocol::messages::{
    ApiKey, CreateTopicsRequest, DeleteTopicsRequest, FetchRequest, InitProducerIdRequest,
    ListOffsetsRequest, MetadataRequest, ProduceRequest,
};
use kafka_protocol::protocol::{Decodable, Encodable};

use super::api::{Opened, open};
use super::log::batch::{HEADER_BYTES, Header, Malformed, check_produced, walk};
use super::shape;

/// Reads a request frame (without its length prefix) as a connection does.
pub fn request(frame: &[u8]) {
    let mut body = Bytes::copy_from_slice(frame);
    let Ok(Opened { key, version, .. }) = open(&mut body) else { return };
    match key {
        ApiKey::Produce => again::<ProduceRequest>(key, version, body),
        ApiKey::Fetch => again::<FetchRequest>(key, version, body),
        ApiKey::ListOffsets => again::<ListOffsetsRequest>(key, version, body),
        ApiKey::Metadata => again::<MetadataRequest>(key, version, body),
        // The broker does not decode the body of `ApiVersions`.
        ApiKey::CreateTopics => again::<CreateTopicsRequest>(key, version, body),
        ApiKey::DeleteTopics => again::<DeleteTopicsRequest>(key, version, body),
        ApiKey::InitProducerId => again::<InitProducerIdRequest>(key, version, body),
        _ => {}
    }
}

/// A request that decodes is the same after it was encoded, and its encoding passes the check of shapes.
fn again<R: Decodable + Encodable + PartialEq + Debug>(key: ApiKey, version: i16, mut body: Bytes) {
    let Ok(request) = R::decode(&mut body, version) else { return };
    let mut encoded = BytesMut::new();
    // Fields that this version does not have are left out, unless they have values.
    if request.encode(&mut encoded, version).is_err() {
        return;
    }
    let mut encoded = encoded.freeze();
    assert_eq!(shape::check(key, version, &encoded), Ok(()), "{key:?} {version}: {request:?}");
    assert_eq!(R::decode(&mut encoded, version).ok(), Some(request), "{key:?} {version}");
    assert!(encoded.is_empty(), "{key:?} {version}: no bytes are left");
}

/// Checks a batch as the broker checks those of producers. Returns its number of records.
pub fn batch(bytes: &[u8]) -> Option<i32> {
    let header = match check_produced(bytes) {
        Ok(header) => header,
        Err(Malformed::Crc) => {
            assert!(!Header::parse(bytes).is_ok_and(|header| header.crc_matches(bytes)));
            return None;
        }
        Err(_) => return None,
    };
    assert_eq!(header.bytes, bytes.len(), "the batch is all of the bytes");
    assert_eq!(header.next_offset(), header.base_offset.saturating_add(i64::from(header.count)));
    let mut deltas = Vec::new();
    let walked = walk(&header, bytes, |record| {
        deltas.push(record.offset_delta);
        true
    });
    assert_eq!(walked, Ok(()), "a batch that was checked can be walked");
    assert!(deltas.into_iter().eq(0..header.count), "its offsets are dense");
    Some(header.count)
}

/// The bytes with the length, the message format and the checksum of a batch.
pub fn sealed(bytes: &[u8]) -> Vec<u8> {
    let mut batch = bytes.to_vec();
    let length = batch.len().saturating_sub(12);
    if batch.len() >= HEADER_BYTES
        && let Ok(length) = i32::try_from(length)
    {
        batch[8..12].copy_from_slice(&length.to_be_bytes());
        batch[16] = 2;
        let crc = crc32c::crc32c(&batch[21..]);
        batch[17..21].copy_from_slice(&crc.to_be_bytes());
    }
    batch
}
