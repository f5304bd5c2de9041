//! Tar shards: samples as WebDataset reads them, and members that are refused.

use ::tar::{Builder, EntryType, Header};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn add(builder: &mut Builder<Vec<u8>>, name: &str, content: &[u8]) {
    let mut header = Header::new_gnu();
    header.set_size(content.len() as u64);
    header.set_mode(0o644);
    builder.append_data(&mut header, name, content).unwrap();
}

fn shard(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    members.iter().for_each(|(name, content)| add(&mut builder, name, content));
    builder.into_inner().unwrap()
}

fn refused(members: &[(&str, &[u8])], parts: &[&str]) {
    let error = refusal("a.tar", &shard(members));
    for part in parts {
        assert!(error.contains(part), "{part:?} in {error}");
    }
}

#[test]
fn members_are_columns_of_their_sample() {
    let long = format!("{}/1.jpg", "d".repeat(150));
    let bytes = shard(&[
        ("a/0.jpg", b"\xff\xd8"),
        ("a/0.cls", b"7\n"),
        ("a/0.JSON", b"{\"w\": 1,\n \"tags\": [\"x\"]}"),
        ("a/0.seg.png", b"png"),
        ("__meta__", b"skipped"),
        ("a/.hidden", b"skipped"),
        ("README", b"skipped"),
        ("b/x.cls", b"-3"),
        ("b/x.txt", "für".as_bytes()),
        (&long, b"z"),
    ]);
    let (schema, batches) = read_in_groups("a.tar", &bytes, Bounds::SAMPLES);
    let names: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
    assert_eq!(names, ["__key__", "jpg", "cls", "json", "seg.png", "txt"]);
    let expected = [
        json!({"__key__": "a/0", "jpg": "ffd8", "cls": 7, "json": {"w": 1, "tags": ["x"]}, "seg.png": "706e67", "txt": null}),
        json!({"__key__": "b/x", "jpg": null, "cls": -3, "json": null, "seg.png": null, "txt": "für"}),
        json!({"__key__": long.trim_end_matches(".jpg"), "jpg": "7a", "cls": null, "json": null, "seg.png": null, "txt": null}),
    ];
    assert_eq!(batches.iter().flat_map(super::json).collect::<Vec<_>>(), expected);
    // One sample a row group: long names stay with their member.
    assert_eq!(rows("a.tar", &bytes, Bounds { rows: 1, bytes: 1 }), expected);
}

#[test]
fn posix_attributes_and_archives_without_an_end_are_read() {
    let mut builder = Builder::new(Vec::new());
    let name = format!("{}.cls", "é".repeat(100));
    builder.append_pax_extensions([("path", name.as_bytes()), ("mtime", b"1.5")]).unwrap();
    add(&mut builder, "short.cls", b"1");
    add(&mut builder, "next.cls", b"2");
    let bytes = builder.into_inner().unwrap();
    let key = name.trim_end_matches(".cls");
    let expected = [json!({"__key__": key, "cls": 1}), json!({"__key__": "next", "cls": 2})];
    assert_eq!(rows("a.tar", &bytes, SMALL), expected);
    // Without the two blocks at the end, and without the padding of the last member.
    assert_eq!(rows("a.tar", &bytes[..bytes.len() - 1024], SMALL), expected);
    assert_eq!(rows("a.tar", &bytes[..bytes.len() - 1024 - 511], SMALL), expected);
    let error = refusal("a.tar", &bytes[..bytes.len() - 1024 - 512]);
    assert!(error.contains("byte 2048") && error.contains("ends within"), "{error}");
}

#[test]
fn a_second_archive_behind_the_first_is_refused() {
    let (first, second) = (shard(&[("a.cls", b"1"), ("b.cls", b"2")]), shard(&[("c.cls", b"3")]));
    let error = refusal("a.tar", &[&first[..], &second[..]].concat());
    assert!(error.contains("byte 3072") && error.contains("--concatenate"), "{error}");
    // Tar programs fill the last record with zeros.
    let padded = [&first[..], &[0u8; 10_240][..]].concat();
    assert_eq!(rows("a.tar", &padded, SMALL), rows("a.tar", &first, SMALL));
    assert!(refusal("a.tar", &[&padded[..], b"x"].concat()).contains("byte 13312"));
}

#[test]
fn members_that_are_wrong_are_refused_by_name() {
    refused(&[("a.cls", b"1"), ("a.cls", b"2")], &["\"a.cls\"", "another member .cls"]);
    refused(&[("a.jpg", b"1"), ("a.JPG", b"2")], &["\"a.JPG\"", "another"]);
    refused(&[("a.jpg", b"1"), ("b.jpg", b"2"), ("a.cls", b"1")], &["\"a.cls\"", "--sort=name"]);
    refused(&[("a.cls", b"cat")], &["\"a.cls\"", "\"cat\"", "integer"]);
    refused(&[("a.txt", b"\xff")], &["\"a.txt\"", "UTF-8"]);
    refused(&[("a.json", b"{")], &["\"a.json\"", "EOF"]);
    refused(&[("a.__key__", b"x")], &["another member .__key__"]);
}

#[test]
fn links_and_sparse_members_are_refused() {
    for kind in [EntryType::Link, EntryType::Symlink] {
        let mut builder = Builder::new(Vec::new());
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(0);
        header.set_link_name("b.jpg").unwrap();
        builder.append_data(&mut header, "a.jpg", &b""[..]).unwrap();
        let error = refusal("a.tar", &builder.into_inner().unwrap());
        assert!(error.contains("\"a.jpg\"") && error.contains("write the tar"), "{error}");
    }
    let mut builder = Builder::new(Vec::new());
    builder.append_pax_extensions([("GNU.sparse.major", &b"1"[..])]).unwrap();
    add(&mut builder, "a.jpg", b"x");
    let error = refusal("a.tar", &builder.into_inner().unwrap());
    assert!(error.contains("sparse"), "{error}");
}

#[test]
fn damaged_archives_are_refused() {
    let good = shard(&[("a.cls", b"1"), ("b.jpg", &[7; 2000])]);
    let mut broken = good.clone();
    broken[1024 + 10] ^= 1;
    let error = refusal("a.tar", &broken);
    assert!(error.contains("byte 1024") && error.contains("checksum"), "{error}");
    let error = refusal("a.tar", &good[..1024 + 512 + 100]);
    assert!(error.contains("byte 1024"), "{error}");
    assert!(refusal("a.tar", b"not a tar").contains("byte 0"));
    // The size of a long name is that of the file: it is not read into memory.
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::GNULongName);
    header.set_size(1 << 33);
    header.set_path("././@LongLink").unwrap();
    header.set_cksum();
    let endless = io::Cursor::new(header.as_bytes().to_vec()).chain(io::repeat(b'x'));
    let error = tar::scan(Endless(endless, 0), u64::MAX, 0, SMALL).unwrap_err().to_string();
    assert!(error.contains("byte 0") && error.contains("headers are longer"), "{error}");
}

/// A reader without end, and its position: what it skips is like what it reads.
struct Endless<R>(R, u64);

impl<R: Read> Read for Endless<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.0.read(into)?;
        self.1 += read as u64;
        Ok(read)
    }
}

impl<R> io::Seek for Endless<R> {
    fn seek(&mut self, to: io::SeekFrom) -> io::Result<u64> {
        match to {
            io::SeekFrom::Start(position) => self.1 = position,
            io::SeekFrom::Current(bytes) => self.1 = self.1.saturating_add_signed(bytes),
            io::SeekFrom::End(_) => return Err(io::Error::other("no end")),
        }
        Ok(self.1)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn shards_cut_anywhere_read_as_whole(
        samples in prop::collection::vec(
            (prop::option::of(prop::collection::vec(any::<u8>(), 0..1500)), prop::option::of(any::<i64>()), 0..130usize),
            0..20,
        ),
        max_rows in 1..8u64, max_bytes in 1..10_000u64,
    ) {
        let mut builder = Builder::new(Vec::new());
        let mut expected = Vec::new();
        for (number, (jpg, cls, long)) in samples.iter().enumerate() {
            let key = format!("{}{number:03}", "k".repeat(*long));
            if let Some(jpg) = jpg {
                add(&mut builder, &format!("{key}.jpg"), jpg);
            }
            if let Some(cls) = cls {
                add(&mut builder, &format!("{key}.cls"), cls.to_string().as_bytes());
            }
            if jpg.is_some() || cls.is_some() {
                let jpg = jpg.as_ref().map_or(Value::Null, |jpg| json!(hex::encode(jpg)));
                expected.push((json!(key), jpg, cls.map_or(Value::Null, Value::from)));
            }
        }
        let bytes = builder.into_inner().unwrap();
        let read = rows("a.tar", &bytes, Bounds { rows: max_rows, bytes: max_bytes });
        let missing = || Value::Null;
        let read: Vec<_> = read
            .into_iter()
            .map(|row| {
                let cell = |name: &str| row.get(name).cloned().unwrap_or_else(missing);
                (cell("__key__"), cell("jpg"), cell("cls"))
            })
            .collect();
        prop_assert_eq!(read, expected);
    }
}
