//! The Kafka protocol by hand: one blocking connection with the requests and batches that a test builds.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use kafka_protocol::messages::produce_request::{PartitionProduceData, TopicProduceData};
use kafka_protocol::messages::produce_response::PartitionProduceResponse;
use kafka_protocol::messages::{
    ApiKey, ProduceRequest, ProduceResponse, RequestHeader, ResponseHeader, TopicName,
};
use kafka_protocol::protocol::{Decodable, Encodable, StrBytes};

pub(super) struct Wire(pub(super) TcpStream);

impl Wire {
    pub(super) fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        Self(stream)
    }

    pub(super) fn send(&mut self, key: ApiKey, version: i16, request: &impl Encodable) {
        let header = RequestHeader::default()
            .with_request_api_key(key as i16)
            .with_request_api_version(version)
            .with_correlation_id(5);
        let mut frame = BytesMut::new();
        frame.put_i32(0);
        header.encode(&mut frame, key.request_header_version(version)).unwrap();
        request.encode(&mut frame, version).unwrap();
        let length = frame.len() as i32 - 4;
        frame[..4].copy_from_slice(&length.to_be_bytes());
        self.0.write_all(&frame).unwrap();
    }

    pub(super) fn receive<R: Decodable>(&mut self, key: ApiKey, version: i16) -> R {
        let mut length = [0; 4];
        self.0.read_exact(&mut length).unwrap();
        let mut frame = vec![0; i32::from_be_bytes(length) as usize];
        self.0.read_exact(&mut frame).unwrap();
        let mut frame = Bytes::from(frame);
        let header = ResponseHeader::decode(&mut frame, key.response_header_version(version)).unwrap();
        assert_eq!(header.correlation_id, 5);
        let response = R::decode(&mut frame, version).unwrap();
        assert!(frame.is_empty(), "{} bytes too many", frame.len());
        response
    }

    pub(super) fn ask<R: Decodable>(&mut self, key: ApiKey, version: i16, request: &impl Encodable) -> R {
        self.send(key, version, request);
        self.receive(key, version)
    }

    pub(super) fn produce(&mut self, topic: &str, records: Bytes) -> PartitionProduceResponse {
        let mut response: ProduceResponse =
            self.ask(ApiKey::Produce, 8, &produce_request(topic, -1, records));
        response.responses.remove(0).partition_responses.remove(0)
    }

    /// Whether the broker closed the connection.
    pub(super) fn is_closed(&mut self) -> bool {
        matches!(self.0.read(&mut [0; 64]), Ok(0) | Err(_))
    }
}

pub(super) fn name(topic: &str) -> TopicName {
    TopicName(StrBytes::from_string(topic.to_string()))
}

pub(super) fn produce_request(topic: &str, acks: i16, records: Bytes) -> ProduceRequest {
    let data = PartitionProduceData::default().with_index(0).with_records(Some(records));
    ProduceRequest::default().with_acks(acks).with_timeout_ms(1_000).with_topic_data(vec![
        TopicProduceData::default().with_name(name(topic)).with_partition_data(vec![data]),
    ])
}

/// Records of a batch in the form that is compressed: values only.
pub(super) fn records(values: &[&[u8]]) -> Vec<u8> {
    let zigzag = |value: usize| {
        let (mut value, mut bytes) = (value << 1, Vec::new());
        while value >= 0x80 {
            bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        bytes.push(value as u8);
        bytes
    };
    let mut all = Vec::new();
    for (index, value) in values.iter().enumerate() {
        // Attributes, timestamp delta, offset delta, no key, value, no headers.
        let mut record = vec![0, 0];
        record.extend(zigzag(index));
        record.push(1);
        record.extend(zigzag(value.len()));
        record.extend_from_slice(value);
        record.push(0);
        all.extend(zigzag(record.len()));
        all.extend(record);
    }
    all
}

/// A batch of `count` records that were encoded (and compressed as `codec`) already.
pub(super) fn batch((id, epoch, sequence): (i64, i16, i32), codec: i16, count: i32, records: &[u8]) -> Bytes {
    let mut checked = BytesMut::new();
    checked.put_i16(codec);
    checked.put_i32(count - 1);
    checked.put_i64(1_000);
    checked.put_i64(1_000);
    checked.put_i64(id);
    checked.put_i16(epoch);
    checked.put_i32(sequence);
    checked.put_i32(count);
    checked.extend_from_slice(records);
    let mut batch = BytesMut::new();
    batch.put_i64(0);
    batch.put_i32(checked.len() as i32 + 9);
    batch.put_i32(-1);
    batch.put_u8(2);
    batch.put_u32(crc32c::crc32c(&checked));
    batch.extend_from_slice(&checked);
    batch.freeze()
}

/// A plain batch of one record.
pub(super) fn single(producer: (i64, i16, i32), value: &[u8]) -> Bytes {
    batch(producer, 0, 1, &records(&[value]))
}
