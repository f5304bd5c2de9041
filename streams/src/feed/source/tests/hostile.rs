//! Hostile text files: refused with their line, or read right.

use std::io::Write;

use arrow::array::AsArray;
use arrow::datatypes::Int64Type;
use serde_json::json;

use super::*;

fn refused(path: &str, bytes: &[u8], parts: &[&str]) {
    let error = refusal(path, bytes);
    assert!(error.contains(path), "{error}");
    for part in parts {
        assert!(error.contains(part), "{part:?} in {error}");
    }
}

#[test]
fn lines_that_are_no_objects_are_refused_with_their_number() {
    refused("a.jsonl", b"{\"a\":1}\n[1,2]\n", &["line 2", "a JSON object"]);
    refused("a.jsonl", b"{\"a\":1}\r\n\r\n{\"a\":\r\n", &["line 3", "EOF"]);
    refused("a.jsonl", b"{\"a\":1} {\"a\":2}\n", &["line 1", "trailing"]);
    refused("a.jsonl", b"{\"a\":1,\"a\":2}\n", &["line 1", "\"a\" twice"]);
    refused("a.jsonl", b"{\"o\":{\"a\":1,\"a\":2}}\n", &["line 1", "\"a\" twice"]);
    refused("a.jsonl", b"{\"a\":\"\xff\"}\n", &["line 1", "unicode"]);
    refused("a.jsonl", b"{\"a\":\"\\ud800\"}\n", &["line 1"]);
    refused("a.jsonl", b"{\"a\":1e999}\n", &["line 1", "out of range"]);
    refused("a.jsonl", b"{\"a\":NaN}\n", &["line 1"]);
    let deep = format!("{{\"a\":{}1{}}}", "[".repeat(500), "]".repeat(500));
    refused("a.jsonl", deep.as_bytes(), &["line 1", "recursion"]);
    // A pretty-printed document is no JSON lines.
    refused("a.jsonl", b"{\n  \"a\": 1\n}\n", &["line 1"]);
    // A clash inside of a value does not hide what is wrong behind it.
    refused("a.jsonl", b"{\"a\":1}\n{\"a\":[\"\xff\"]}\n", &["line 2"]);
}

#[test]
fn columns_without_bound_are_refused() {
    let wide: String = (0..5000).map(|i| format!("{{\"c{i}\": 1}}\n")).collect();
    refused("a.jsonl", wide.as_bytes(), &["line 4097", "4096 columns"]);
    let nested: Vec<String> = (0..5000).map(|i| format!("\"c{i}\": 1")).collect();
    refused("a.jsonl", format!("{{\"a\": {{{}}}}}", nested.join(",")).as_bytes(), &["line 1", "4096"]);
    let header: Vec<String> = (0..5000).map(|i| format!("c{i}")).collect();
    refused("a.csv", header.join(",").as_bytes(), &["line 1", "4096"]);
}

#[test]
fn ragged_and_unfinished_csv_is_refused_with_its_line() {
    refused("a.csv", b"a,b\n1,2\n3\n", &["line 3", "1 fields", "header has 2"]);
    refused("a.csv", b"a,b\n\"x\ny\",2\n\n3,4,5\n", &["line 5", "3 fields"]);
    refused("a.csv", b"a,b\n1,2\n3,\"open\n4,5\n", &["line 3", "quotes"]);
    refused("a.csv", b"a,b\n1,\xff\n", &["line 2", "\"b\"", "UTF-8"]);
    refused("a.csv", b"a,\n1,2\n", &["line 1", "column 2", "no name"]);
    refused("a.csv", b"a,b,a\n", &["line 1", "column 3", "\"a\""]);
    let blank = [&b"a\n"[..], &vec![b'\n'; 1 << 20][..], b"1\n"].concat();
    refused("a.csv", &blank, &["line 1048578", "empty lines"]);
}

#[test]
fn endless_lines_take_no_memory_beyond_the_limit() {
    let mut endless = io::repeat(b'x');
    let mut reader = BufReader::new(&mut endless);
    let error = json_lines::scan(&mut reader, 0, Bounds::TEXT).unwrap_err().to_string();
    assert!(error.contains("line 1") && error.contains("longer than"), "{error}");
    let mut reader = BufReader::new(io::Cursor::new(b"a,b\n\"").chain(io::repeat(b'x')));
    let error = csv::scan(&mut reader, b',', 0, Bounds::TEXT).unwrap_err().to_string();
    assert!(error.contains("line 2") && error.contains("longer than"), "{error}");
}

#[test]
fn damaged_compression_is_refused() {
    let text: String = (0..5000).map(|i| format!("{{\"id\": {i}}}\n")).collect();
    let packed = gzip(text.as_bytes());
    refused("a.jsonl.gz", &packed[..packed.len() / 2], &[]);
    refused("a.jsonl.gz", text.as_bytes(), &["gzip"]);
    refused("a.jsonl.gz", &[&packed[..], b"rest"].concat(), &[]);
    let zipped = zstd::encode_all(text.as_bytes(), 1).unwrap();
    refused("a.jsonl.zst", &zipped[..zipped.len() / 2], &[]);
    refused("a.jsonl.zst", text.as_bytes(), &[]);
    // Several members, as pigz and bgzip write them, are one text.
    let twice = [gzip(b"{\"a\":1}\n"), gzip(b"{\"a\":2}\n")].concat();
    assert_eq!(rows("a.jsonl.gz", &twice, SMALL), [json!({"a": 1}), json!({"a": 2})]);
}

#[test]
fn a_byte_order_mark_in_pieces_belongs_to_no_column() {
    for cut in 0..4 {
        let text = b"\xef\xbb\xbfid,b\n7,x\n";
        let pieces = [gzip(&text[..cut]), gzip(&text[cut..])].concat();
        assert_eq!(rows("a.csv.gz", &pieces, SMALL), [json!({"id": 7, "b": "x"})], "{cut}");
    }
}

#[test]
fn a_bomb_is_refused_by_its_size() {
    let mut line = vec![b' '; 1 << 20];
    line.push(b'\n');
    let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
    (0..=PLAIN_BYTES_MAX >> 20).for_each(|_| encoder.write_all(&line).unwrap());
    let packed = encoder.finish().unwrap();
    assert!(packed.len() < 1 << 20);
    refused("a.jsonl.zst", &packed, &["more than 268435456 bytes"]);
}

#[test]
fn short_texts_of_many_wide_items_are_refused_before_they_are_decoded() {
    let fields: Vec<String> = (0..2000).map(|at| format!("\"f{at}\":1")).collect();
    let wide = format!("{{\"a\":[{{{}}}]}}", fields.join(","));
    let many = format!("{{\"a\":[{}]}}", vec!["{}"; 100_000].join(","));
    let text = format!("{wide}\n{many}\n");
    let mut archive = ::tar::Builder::new(Vec::new());
    for (name, content) in [("0.json", &wide), ("1.json", &many)] {
        let mut header = ::tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        archive.append_data(&mut header, name, content.as_bytes()).unwrap();
    }
    let archive = archive.into_inner().unwrap();
    for (path, bytes) in
        [("a.jsonl", text.as_bytes()), ("a.jsonl.gz", &gzip(text.as_bytes())[..]), ("a.tar", &archive[..])]
    {
        let error = fuzzing::read_in_groups(path, bytes, Bounds::TEXT).unwrap_err().to_string();
        assert!(error.contains("record_batch_bytes_max"), "{path}: {error}");
    }
}

#[test]
fn wide_compressed_csv_is_decoded_in_parts() {
    let names: Vec<String> = (0..1000).map(|at| format!("c{at}")).collect();
    let mut text = names.join(",") + "\n";
    (0..1100).for_each(|row| text += &format!("{row}{}\n", ",".repeat(999)));
    let (_, batches) = read_in_groups("a.csv.gz", &gzip(text.as_bytes()), SMALL);
    let ids = batches[0].column(0).as_primitive::<Int64Type>();
    assert_eq!(ids.values().to_vec(), (0..1100).collect::<Vec<i64>>());
}

#[test]
fn empty_files_have_no_rows() {
    for (path, bytes) in [
        ("a.jsonl", &b""[..]),
        ("a.jsonl", b"\n\r\n"),
        ("a.csv", b""),
        ("a.csv", b"\n\n"),
        ("a.csv", b"a,b"),
        ("a.csv", BOM),
    ] {
        let scanned = scan_bytes(path, bytes, SMALL).unwrap();
        assert!(scanned.row_groups.is_empty() && scanned.cuts.is_empty(), "{path} {bytes:?}");
    }
    assert_eq!(rows("a.csv", b"\xef\xbb\xbfa\r\n\r\n1\r\n", SMALL), [json!({"a": 1})]);
    assert_eq!(rows("a.csv", b"a\r1\r2", SMALL), [json!({"a": 1}), json!({"a": 2})]);
    assert_eq!(rows("a.jsonl", b"{}\n{\"a\":{}}\n", SMALL), [json!({"a": null}), json!({"a": {}})]);
}

#[test]
fn bytes_that_differ_from_the_scan_are_an_error() {
    let text = b"{\"a\":1}\n{\"a\":2}\n";
    let scanned = scan_bytes("a.jsonl", text, SMALL).unwrap();
    let (schema, _) = scanned.columns.schema(|_| String::new());
    let schema = Arc::new(schema);
    let file = DataFile {
        path: "a.jsonl".to_owned(),
        bytes: text.len() as u64,
        format: FileFormat::JsonLines,
        row_groups: scanned.row_groups,
        cuts: scanned.cuts,
    };
    for body in
        [&b"{\"a\":1}\n{\"a\":"[..], b"{\"a\":\"x\"}\n{\"a\":2}\n", b"\xff\xff", b"{\"a\":1} {} {} {}"]
    {
        let fetched = Fetched { head: Bytes::new(), body: Bytes::copy_from_slice(body) };
        let error = decode(fetched, &file, 0, 2, &schema, &Classes::default(), 1 << 30).unwrap_err();
        assert!(matches!(error, FeedError::Corrupt { .. }), "{error:?}");
    }
    let fetched = Fetched { head: Bytes::new(), body: Bytes::copy_from_slice(text) };
    let error = decode(fetched, &file, 0, 2, &schema, &Classes::default(), 15).unwrap_err();
    assert!(matches!(error, FeedError::Oversized { .. }), "{error:?}");
}
