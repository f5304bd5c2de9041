//! Targets for topics: requests to the broker, record batches, records, and plans of the feed.

use std::io::Write as _;
use std::sync::Arc;

use arrow::array::{Array as _, AsArray as _};
use arrow::datatypes::{Float64Type, Int64Type};
use bytes::{Bytes, BytesMut};
use kafka_protocol::messages::{
    ApiKey, ApiVersionsRequest, CreateTopicsRequest, DeleteTopicsRequest, FetchRequest,
    InitProducerIdRequest, ListOffsetsRequest, MetadataRequest, ProduceRequest, RequestHeader, TopicName,
    create_topics_request, fetch_request, list_offsets_request, metadata_request, produce_request,
};
use kafka_protocol::protocol::{Encodable, StrBytes};
use kafka_protocol::records::{Compression, Record, RecordBatchEncoder, RecordEncodeOptions, TimestampType};
use millrace_ingest::decode::{Columns, Decoder, Limits, Outcome, UnknownFields};
use millrace_ingest::schema::{Field, Origin, Schema};
use millrace_streams::feed::{Cursor, Plan};
use millrace_streams::fuzzing;
use serde_json::Value;

/// A frame with a request, as it follows its length.
pub(crate) fn request(input: &[u8]) {
    fuzzing::request(input);
}

/// Formats of files without a footer; the first byte of an input chooses one.
const SOURCES: [&str; 4] = ["jsonl", "csv", "tsv", "tar"];

/// A file of a dataset without a footer: each row group decodes alone to the rows that the scan has counted.
pub(crate) fn source(input: &[u8]) {
    if let Some((first, rest)) = input.split_first() {
        fuzzing::source(SOURCES[usize::from(*first) % SOURCES.len()], rest);
    }
}

/// A file of each format.
pub(crate) fn sources() -> Vec<Vec<u8>> {
    let mut tar = vec![3];
    for (name, content) in [("a.cls", &b"7"[..]), ("a.json", b"{\"x\": [1]}"), ("b.jpg", &[9; 700])] {
        let mut header = [0u8; 512];
        header[..name.len()].copy_from_slice(name.as_bytes());
        header[124..135].copy_from_slice(format!("{:011o}", content.len()).as_bytes());
        header[156] = b'0';
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        tar.extend(header);
        tar.extend(content);
        tar.resize(1 + (tar.len() - 1).next_multiple_of(512), 0);
    }
    vec![
        b"\0{\"a\": 1, \"b\": [0.5, null], \"c\": {\"d\": \"x\"}}\r\n\n{\"a\": -2, \"e\": true}\n".to_vec(),
        b"\x01\xef\xbb\xbfid,name\r\n1,\"a \"\"b\"\",\n\"\r\n\r\n2,\r\n".to_vec(),
        b"\x02id\tscore\n007\t1e3\n8\tnan\n".to_vec(),
        tar,
    ]
}

/// A JPEG file. Those of Pillow with subsampled colours and several scans are in `corpus/`.
pub(crate) fn jpeg(input: &[u8]) {
    fuzzing::jpeg(input);
}

/// A file in grey and one in colours.
pub(crate) fn jpegs() -> Vec<Vec<u8>> {
    let files = fuzzing::jpegs();
    for file in &files {
        assert!(fuzzing::jpeg(file).is_some(), "a seed is valid");
    }
    files
}

/// One request of each kind and version.
pub(crate) fn requests() -> Vec<Vec<u8>> {
    let topic = || TopicName(StrBytes::from_static_str("digits"));
    let mut all = Vec::new();
    let produced =
        produce_request::PartitionProduceData::default().with_records(Some(Bytes::from(batch_of(2, 0))));
    let produced =
        produce_request::TopicProduceData::default().with_name(topic()).with_partition_data(vec![produced]);
    let produced =
        ProduceRequest::default().with_acks(-1).with_timeout_ms(1000).with_topic_data(vec![produced]);
    frames(&mut all, ApiKey::Produce, 3..=8, &produced);
    let fetched =
        fetch_request::FetchPartition::default().with_fetch_offset(3).with_partition_max_bytes(1 << 20);
    let fetched = fetch_request::FetchTopic::default().with_topic(topic()).with_partitions(vec![fetched]);
    let fetched = FetchRequest::default().with_max_wait_ms(500).with_topics(vec![fetched]);
    frames(&mut all, ApiKey::Fetch, 4..=11, &fetched);
    let offsets = list_offsets_request::ListOffsetsPartition::default().with_timestamp(-1);
    let offsets =
        list_offsets_request::ListOffsetsTopic::default().with_name(topic()).with_partitions(vec![offsets]);
    frames(&mut all, ApiKey::ListOffsets, 1..=5, &ListOffsetsRequest::default().with_topics(vec![offsets]));
    let described = metadata_request::MetadataRequestTopic::default().with_name(Some(topic()));
    frames(&mut all, ApiKey::Metadata, 0..=8, &MetadataRequest::default().with_topics(Some(vec![described])));
    frames(&mut all, ApiKey::ApiVersions, 0..=3, &ApiVersionsRequest::default());
    let created = create_topics_request::CreatableTopic::default().with_name(topic()).with_num_partitions(2);
    let created = created.with_replication_factor(1);
    frames(&mut all, ApiKey::CreateTopics, 2..=4, &CreateTopicsRequest::default().with_topics(vec![created]));
    let deleted = DeleteTopicsRequest::default().with_topic_names(vec![topic()]);
    frames(&mut all, ApiKey::DeleteTopics, 1..=3, &deleted);
    frames(
        &mut all,
        ApiKey::InitProducerId,
        0..=1,
        &InitProducerIdRequest::default().with_transaction_timeout_ms(9),
    );
    all
}

fn frames(
    all: &mut Vec<Vec<u8>>,
    key: ApiKey,
    versions: impl Iterator<Item = i16>,
    request: &impl Encodable,
) {
    for version in versions {
        let header =
            RequestHeader::default().with_request_api_key(key as i16).with_request_api_version(version);
        let header = header.with_correlation_id(7).with_client_id(Some(StrBytes::from_static_str("client")));
        let mut frame = BytesMut::new();
        header.encode(&mut frame, key.request_header_version(version)).expect("a header");
        // Fields that a version does not have are not encoded; those that it must have, it has.
        if request.encode(&mut frame, version).is_ok() {
            all.push(frame.to_vec());
        }
    }
}

/// A record batch as it is, and with the right length and checksum.
pub(crate) fn batch(input: &[u8]) {
    fuzzing::batch(input);
    fuzzing::batch(&fuzzing::sealed(input));
}

/// A batch of each compression.
pub(crate) fn batches() -> Vec<Vec<u8>> {
    (0..=4).map(|codec| batch_of(3, codec)).collect()
}

fn batch_of(records: i32, codec: u8) -> Vec<u8> {
    let record = |at: i32| Record {
        transactional: false,
        control: false,
        delete_horizon: false,
        partition_leader_epoch: 0,
        producer_id: 5,
        producer_epoch: 0,
        timestamp_type: TimestampType::Creation,
        offset: i64::from(at),
        sequence: at,
        timestamp: 1_700_000_000_000 + i64::from(at),
        key: (at > 0).then(|| Bytes::from_static(b"key")),
        value: Some(Bytes::from(format!("{{\"id\":{at}}}"))),
        headers: [(StrBytes::from_static_str("h"), Some(Bytes::from_static(b"1")))].into_iter().collect(),
    };
    let options = RecordEncodeOptions { version: 2, compression: Compression::None };
    let records: Vec<Record> = (0..records).map(record).collect();
    let mut batch = BytesMut::new();
    RecordBatchEncoder::encode(&mut batch, &records, &options).expect("records of one batch");
    let (header, plain) = batch.split_at(61);
    let packed = match codec {
        1 => {
            let mut to = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            to.write_all(plain).and_then(|()| to.finish()).expect("memory takes all bytes")
        }
        2 => snap::raw::Encoder::new().compress_vec(plain).expect("a short batch"),
        3 => {
            let mut to = lz4_flex::frame::FrameEncoder::new(Vec::new());
            to.write_all(plain).expect("memory takes all bytes");
            to.finish().expect("memory takes all bytes")
        }
        4 => zstd::bulk::compress(plain, 3).expect("memory takes all bytes"),
        _ => plain.to_vec(),
    };
    let mut batch = [header, &packed].concat();
    batch[22] |= codec;
    let batch = fuzzing::sealed(&batch);
    assert_eq!(fuzzing::batch(&batch), Some(records.len() as i32), "a seed is valid");
    batch
}

/// The plan or the cursor of a feed as JSON. A plan whose id is wrong gets the right one.
pub(crate) fn plan(input: &[u8]) {
    if let Ok(cursor) = serde_json::from_slice::<Cursor>(input) {
        let text = serde_json::to_vec(&cursor).expect("a cursor is JSON");
        assert_eq!(serde_json::from_slice::<Cursor>(&text).ok(), Some(cursor));
    }
    let Ok(json) = serde_json::from_slice::<Value>(input) else { return };
    // A plan may have 8,000,000 parts, for which this target would take seconds. Plans may also be written as lists.
    if !json.is_object() || parts(&json) > 50_000 {
        return;
    }
    let plan = match serde_json::from_slice::<Plan>(input) {
        Ok(plan) => Some(plan),
        Err(error) => with_right_id(json, &error.to_string()),
    };
    let Some(plan) = plan else { return };
    let text = serde_json::to_vec(&plan).expect("a plan is JSON");
    let again: Plan = serde_json::from_slice(&text).expect("a plan that was just written");
    assert_eq!((again.id(), again.rows(), again.lanes()), (plan.id(), plan.rows(), plan.lanes()));
    assert_eq!(again.working_set_bytes(), plan.working_set_bytes());
    let steps = plan.steps_for_epochs(1);
    assert!(plan.epochs_after(steps) >= 1, "{steps} steps are an epoch");
    // With buckets, a place has no row without the lengths of the rows.
    for step in [0, steps - 1, steps].into_iter().filter(|_| plan.buckets().is_none()) {
        if plan.step_of(&plan.cursor(step)).is_ok() {
            for slot in [0, plan.batch_rows() - 1] {
                let (row, epoch) = plan.row_at(step, slot).expect("a slot of the batch");
                assert_eq!(plan.slot_of(epoch, row).ok(), Some((step, slot)), "the order has an inverse");
                assert!(plan.address_of(row).is_some());
            }
        }
    }
}

/// The number of parts into which a plan splits its row groups.
fn parts(plan: &Value) -> u64 {
    let Some(part_bytes) = plan["part_bytes"].as_u64().filter(|bytes| *bytes > 0) else { return 1 };
    let files = plan["dataset"]["files"].as_array().into_iter().flatten();
    let groups = files.filter_map(|file| file["row_groups"].as_array()).flatten();
    // Row groups may be written as lists, too.
    let bytes = |group: &Value| group["bytes"].as_u64().or_else(|| group[1].as_u64()).unwrap_or(0);
    groups.map(|group| bytes(group) / part_bytes).fold(0, u64::saturating_add)
}

fn with_right_id(mut json: Value, error: &str) -> Option<Plan> {
    let (_, after) = error.split_once("it records id ")?.1.split_once("hashes to ")?;
    let id = after.get(..64).filter(|id| id.bytes().all(|byte| byte.is_ascii_hexdigit()))?;
    json["id"] = Value::from(id);
    let plan = serde_json::from_value(json);
    Some(plan.unwrap_or_else(|error| panic!("a plan with its right id is refused: {error}")))
}

/// A plan, and a cursor of it.
pub(crate) fn plans() -> Vec<Vec<u8>> {
    let plan = fuzzing::plan().expect("the plan of a small dataset");
    let cursor = serde_json::to_vec(&plan.cursor(3)).expect("a cursor is JSON");
    vec![serde_json::to_vec(&plan).expect("a plan is JSON"), cursor]
}

const KEY_OF_SERDE_JSON: &[u8] = b"$serde_json::private";

/// A record of a topic, behind one byte that says what happens to fields without a column.
pub(crate) fn record(input: &[u8]) {
    let Some((way, record)) = input.split_first() else { return };
    let unknown =
        [UnknownFields::Reject, UnknownFields::Ignore, UnknownFields::AddColumn][usize::from(way % 3)];
    let schema = schema_of(&COLUMNS.map(|(name, kind)| (name.to_owned(), kind)));
    let (outcome, columns) = decode(&schema, unknown, record);
    let json = serde_json::from_slice::<Value>(record);
    // RFC 8259 has no bounds for numbers; serde_json has those of float64, and a key with a meaning of its own.
    if record.windows(KEY_OF_SERDE_JSON.len()).any(|part| part == KEY_OF_SERDE_JSON)
        || json.as_ref().is_err_and(|error| error.to_string().starts_with("number out of range"))
    {
        return;
    }
    let json = json.ok();
    match outcome {
        Outcome::Rejected(reject) => assert!(!reject.to_string().is_empty()),
        Outcome::Landed => agree(&schema, columns, &json.expect("JSON is also JSON for serde_json")),
        Outcome::NewColumns(new) => {
            assert_eq!(unknown, UnknownFields::AddColumn);
            assert!(json.is_some(), "JSON is also JSON for serde_json");
            let fields = schema.fields.iter().cloned().chain(new).collect();
            let schema = Schema::new(Origin::Inferred, fields).expect("new columns have names of their own");
            let (outcome, columns) = decode(&Arc::new(schema.clone()), unknown, record);
            assert_eq!(outcome, Outcome::Landed, "a record fits the columns that it asked for");
            agree(&schema, columns, &json.expect("JSON is also JSON for serde_json"));
        }
    }
}

const COLUMNS: [(&str, &str); 9] = [
    ("id", "int64"),
    ("b", "bool?"),
    ("i", "int32?"),
    ("f", "float64?"),
    ("g", "float32?"),
    ("s", "utf8?"),
    ("j", "json?"),
    ("l", "list<float64>?"),
    ("t", "timestamp?"),
];

fn schema_of(columns: &[(String, &str)]) -> Arc<Schema> {
    let field = |(name, kind): &(String, &str)| Field {
        name: name.clone(),
        kind: kind.trim_end_matches('?').parse().expect("a type"),
        nullable: kind.ends_with('?'),
    };
    Arc::new(Schema::new(Origin::Declared, columns.iter().map(field).collect()).expect("a schema"))
}

/// Decodes a record between two others, which it leaves as they are.
fn decode(schema: &Arc<Schema>, unknown: UnknownFields, record: &[u8]) -> (Outcome, Columns) {
    let mut decoder = Decoder::new(Arc::clone(schema), unknown, Limits::default());
    let mut columns = Columns::new(schema);
    let good = Some(&b"{\"id\":7,\"s\":\"text\",\"l\":[1.5]}"[..]);
    assert_eq!(decoder.decode(good, &mut columns), Outcome::Landed);
    let outcome = decoder.decode(Some(record), &mut columns);
    let landed = usize::from(outcome == Outcome::Landed);
    assert_eq!(columns.rows(), 1 + landed);
    assert_eq!(decoder.decode(good, &mut columns), Outcome::Landed);
    assert_eq!(columns.rows(), 2 + landed);
    (outcome, columns)
}

/// The second of three rows has the values that another reader of JSON finds.
fn agree(schema: &Schema, mut columns: Columns, json: &Value) {
    let arrays = columns.take().expect("arrays of the columns");
    for (field, array) in schema.fields.iter().zip(&arrays) {
        assert_eq!(array.len(), 3, "{}", field.name);
        let value = json.get(&field.name).unwrap_or(&Value::Null);
        assert_eq!(array.is_null(1), value.is_null(), "{}", field.name);
        if value.is_null() {
            continue;
        }
        match field.kind.to_string().as_str() {
            "int64" => {
                let found = array.as_primitive::<Int64Type>().value(1);
                // `1e3` is an integer, too.
                let same =
                    value.as_i64().map_or_else(|| value.as_f64() == Some(found as f64), |it| it == found);
                assert!(same, "{value} is read as {found}");
            }
            "float64" => {
                let found = array.as_primitive::<Float64Type>().value(1);
                assert_eq!(Some(found.to_bits()), value.as_f64().map(f64::to_bits), "{value}");
            }
            "utf8" => assert_eq!(Some(array.as_string::<i32>().value(1)), value.as_str()),
            "bool" => assert_eq!(Some(array.as_boolean().value(1)), value.as_bool()),
            "json" => {
                let found = serde_json::from_str::<Value>(array.as_string::<i32>().value(1));
                assert_eq!(found.ok().as_ref(), Some(value));
            }
            _ => {}
        }
    }
}

/// Records of each outcome.
pub(crate) fn records() -> Vec<Vec<u8>> {
    let records = [
        r#"{"id":1,"b":true,"i":-5,"f":2.5e-3,"g":0.5,"s":"aé\n\u00e9\ud83d\ude00","j":{"a":[1,null]},"l":[1,2.5]}"#,
        r#"{"id":2,"t":"2024-05-01T12:00:00.5Z","new":[1,2],"other":{"x":"y"},"n":null,"e":[]}"#,
        r#"{"id":9223372036854775807,"f":1e308,"w":9007199254740993,"big":18446744073709551616,"s":""}"#,
        r#"{"id":1.0,"f":-0,"l":[],"deep":[[[[1]]]],"m":[1,"a"],"t":1714564800000}"#,
        r#"{"s":"no id"}"#,
    ];
    let ways = 0..3u8;
    ways.flat_map(|way| records.map(|record| [&[way], record.as_bytes()].concat())).collect()
}
