//! Targets for volumes: records of the metadata, objects, and names.

use millrace_datafs::fuzzing::{self, RECORDS};
use millrace_datafs::{Compression, MetaUrl, Name, VolumeSpec};
use millrace_streams::dataset::{DatasetSpec, SourceSpec};

/// A record of the metadata behind one byte that says of which kind, or a key.
pub(crate) fn metadata(input: &[u8]) {
    let Some((kind, record)) = input.split_first() else { return };
    let Some((name, recode)) = RECORDS.get(usize::from(*kind)) else { return fuzzing::key(record) };
    let Some(encoded) = recode(record) else { return };
    assert!(encoded.len() <= record.len(), "{name}: nothing is made up");
    assert_eq!(recode(&encoded).as_deref(), Some(&encoded[..]), "{name}: it is read as it was written");
}

/// Records of zeros of each length that one kind has, and lists.
pub(crate) fn records() -> Vec<Vec<u8>> {
    let mut all: Vec<Vec<u8>> = vec![b"\x0arvolume01\x6einode001ahello".to_vec()];
    for (kind, (_, recode)) in (0u8..).zip(&RECORDS) {
        for first in [0, 1, b'f', b'd'] {
            for len in 1..160 {
                let mut record = vec![0; len];
                record[0] = first;
                if recode(&record).is_some() {
                    all.push([&[kind], &record[..]].concat());
                }
            }
        }
    }
    let entries = [(0x01u16, 7u16), (0x02, 5), (0x04, 5), (0x10, 7), (0x20, 0)];
    let entry = |(tag, perm): (u16, u16)| {
        let id = if tag == 2 { 1000u32 } else { u32::MAX };
        [&tag.to_le_bytes()[..], &perm.to_le_bytes(), &id.to_le_bytes()].concat()
    };
    all.push([&[9, 2, 0, 0, 0][..], &entries.map(entry).concat()].concat());
    all
}

/// An object in one of its layouts, by the first byte: a framed one, an encoded one, the header of a piece; or data
/// to be stored, damaged and read.
pub(crate) fn object(input: &[u8]) {
    let Some(([kind, a, b, c], rest)) = input.split_first_chunk() else { return };
    let seal = a % 2 == 0;
    match kind % 5 {
        0 => fuzzing::framed(rest, seal),
        1 => fuzzing::encoded(rest, seal),
        2 => {
            if let Some((header, _)) = rest.split_first_chunk() {
                fuzzing::piece(header, u64::from(u16::from_le_bytes([*b, *c])) << 8, seal);
            }
        }
        3 => {
            let compression = match a % 3 {
                0 => Compression::None,
                1 => Compression::Lz4,
                _ => Compression::Zstd { level: 1 + a % 7 },
            };
            // Long enough for several frames: a long run, then the input.
            let mut data = vec![*c; usize::from(*b) << 10];
            data.extend_from_slice(rest);
            let at = usize::from(u16::from_le_bytes([*c, *b]));
            fuzzing::stored(&data, compression, at, *c);
        }
        _ => {
            let (mut runs, mut offset) = (Vec::new(), 0);
            for run in rest.chunks_exact(2).take(16) {
                offset += u64::from(run[0]);
                let len = usize::from(run[1]) << (a % 12);
                runs.push((offset, len));
                offset += len as u64;
            }
            let data = vec![*c; usize::from(*b) << 12];
            fuzzing::pack(&data, &runs, u64::from(*c) << 16);
        }
    }
}

/// Objects of each layout.
pub(crate) fn objects() -> Vec<Vec<u8>> {
    let mut all =
        vec![vec![4, 3, 40, 9, 0, 200, 5, 255, 1, 1], vec![3, 1, 70, 7, 1, 2, 3], vec![3, 2, 200, 7, 1]];
    all.push([&[2, 0, 0, 0][..], b"MRpc", &[0; 4], &[5, 0, 0, 0], &[0; 48]].concat());
    for (kind, object) in [0, 1].into_iter().zip(fuzzing::objects(b"the data of a file, the data of a file"))
    {
        all.push([&[kind, 0, 0, 0], &object[..]].concat());
    }
    all
}

/// A name in one of its forms: of a volume, of a dataset, of a compression; or the URL of a metadata server, whose
/// password must not be shown.
pub(crate) fn name(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    if let Ok(name) = text.parse::<Name>() {
        assert_eq!(name.as_str(), text);
    }
    if let Ok(spec) = text.parse::<VolumeSpec>() {
        assert_eq!(spec.to_string(), text);
    }
    if let Ok(spec) = text.parse::<DatasetSpec>() {
        assert_eq!(spec.to_string().parse::<DatasetSpec>().ok().as_ref(), Some(&spec));
        assert!(!spec.path.split('/').any(|part| part == ".."), "a path stays in its volume: {}", spec.path);
    }
    if let Ok(spec) = text.parse::<SourceSpec>() {
        assert_eq!(spec.to_string().parse::<SourceSpec>().ok().as_ref(), Some(&spec));
    }
    if let Ok(compression) = text.parse::<Compression>() {
        assert_eq!(compression.to_string().parse(), Ok(compression));
    }
    let url = MetaUrl::from(text.to_owned());
    let shown = url.to_string();
    assert_eq!(url.redacted().redacted(), url.redacted(), "what is redacted stays so");
    // A password is searched for where it can be told from the rest of the URL.
    if let Some(password) = fuzzing::password(text)
        && let Ok(password) = String::from_utf8(password)
        && password.len() >= 4
        && !password.contains('*')
        && text.matches(&password).count() == 1
        // The text may have escapes, and the same characters elsewhere.
        && fuzzing::password(&text.replacen(&password, "x", 1)).as_deref() == Some(b"x")
    {
        assert!(!shown.contains(&password), "{shown} shows the password");
    }
}

/// Names of each form.
pub(crate) fn names() -> Vec<Vec<u8>> {
    let names = [
        "digits",
        "digits@v1",
        "topic:clicks@2026-11-01..latest?bad=skip&offsets=0:1-5:00112233445566778899aabbccddeeff",
        "digits@latest:/train/a",
        "zstd:19",
        "postgres://me:s3cret@h:1/d?x=1",
        "postgres://me:s3/cr?et@h:1,i:2/d?sslmode=require",
        "postgresql:///d?host=/run&password=s3cret&user=u",
        "postgres://me%40a:p%2Fq%25@[::1]/d?connect_timeout=3",
    ];
    names.map(|name| name.as_bytes().to_vec()).to_vec()
}
