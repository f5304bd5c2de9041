//! Entry points of the fuzz targets into the formats of objects. Each panics where a property fails.

use super::checksum::{self, Summer, Sums};
use super::codec::Codec;
use super::encoded::{self, EncodedIndex, Encoder};
use super::index::Index;
use super::keyring::Keyring;
use super::pack::{HEADER_BYTES, Piece, append_pieces};
use crate::object::{Compression, Layout, ObjectId};

/// Longest frame that is decoded: a footer may announce 16 MiB, which is too slow for fuzzing.
const FRAME_BYTES_MAX: u64 = 1 << 20;

/// Parses a framed object. With `seal`, the id and the checksum of its footer are set right first.
pub fn framed(stored: &[u8], seal: bool) {
    const FOOTER_BYTES: usize = checksum::FOOTER_BYTES as usize;
    let id = ObjectId::new(1, 0, Layout::Framed);
    let mut stored = stored.to_vec();
    if let (true, Some(footer_at)) = (seal, stored.len().checked_sub(FOOTER_BYTES)) {
        stored[footer_at + 16..footer_at + 32].copy_from_slice(&id.to_bytes());
        let before =
            checksum::Footer::parse(stored[footer_at..].as_array().unwrap_or(&[0; FOOTER_BYTES]), id);
        let table = before.ok().and_then(|footer| usize::try_from(footer.table_bytes()).ok());
        if let Some(table_at) = table.and_then(|table| footer_at.checked_sub(table)) {
            let sum = crc32c::crc32c(&stored[table_at..footer_at]);
            let sum = crc32c::crc32c_append(sum, &stored[footer_at + 4..]);
            stored[footer_at..footer_at + 4].copy_from_slice(&sum.to_le_bytes());
        }
    }
    let Ok(sums) = Sums::parse_end(&stored, id) else { return };
    assert!(sums.trailer_bytes() <= stored.len() as u64, "the table lies in the object");
    check_index(&Index::Plain(sums));
}

/// Parses an encoded object and decodes its frames. With `seal`, the id and the checksum of its footer are set
/// right first.
pub fn encoded(stored: &[u8], seal: bool) {
    let id = ObjectId::new(1, 0, Layout::Encoded);
    let mut stored = stored.to_vec();
    let Some(footer_at) = stored.len().checked_sub(encoded::FOOTER_BYTES) else { return };
    if seal {
        stored[footer_at + 16..footer_at + 32].copy_from_slice(&id.to_bytes());
    }
    let Some(trailer_at) = trailer_at(&stored) else { return };
    if seal {
        let sum = crc32c::crc32c(&stored[trailer_at..footer_at]);
        let sum = crc32c::crc32c_append(sum, &stored[footer_at + 4..]);
        stored[footer_at..footer_at + 4].copy_from_slice(&sum.to_le_bytes());
    }
    let index = EncodedIndex::parse(&stored[trailer_at..], stored.len() as u64, id, &Keyring::default());
    let Ok(index) = index else { return };
    let index = Index::Encoded(Box::new(index));
    check_index(&index);
    for frame in 0..index.frames() {
        let (at, data) = (index.stored(frame..frame + 1), index.data(frame));
        assert!(at.start <= at.end && at.end <= trailer_at as u64, "a frame lies before the table");
        let len = data.end - data.start;
        if len > FRAME_BYTES_MAX {
            continue;
        }
        let bytes = &stored[at.start as usize..at.end as usize];
        let (mut whole, mut end) = (vec![0; len as usize], vec![0; len.div_ceil(2) as usize]);
        let read = index.deliver(frame, bytes, data.start, &mut whole);
        let read_end = index.deliver(frame, bytes, data.end - end.len() as u64, &mut end);
        assert_eq!(read.is_ok(), read_end.is_ok(), "a frame decodes, or does not");
        assert!(read.is_err() || whole.ends_with(&end), "a part is part of the whole");
    }
}

/// Where the table of an encoded object begins.
fn trailer_at(stored: &[u8]) -> Option<usize> {
    let trailer = encoded::trailer_bytes(stored.last_chunk()?).ok()?;
    stored.len().checked_sub(usize::try_from(trailer).ok()?)
}

/// Encodes data, and reads it back. Then overwrites the byte at `at` (modulo the length) and expects a reader to
/// refuse the object, or to return the data all the same.
pub fn stored(data: &[u8], compression: Compression, at: usize, byte: u8) {
    let id = ObjectId::new(1, 0, Layout::Encoded);
    let codec = Codec { compression, key: None };
    let mut encoder = Encoder::new(&codec, id).expect("no key is derived");
    let mut stored = Vec::new();
    encoder.update(data, &mut stored).expect("without a key, encoding does not fail");
    encoder.finish(&mut stored).expect("without a key, encoding does not fail");
    assert_eq!(read(&stored, id).as_deref(), Ok(data), "an object is read as it was written");
    let at = at % stored.len();
    stored[at] = byte;
    if let Ok(found) = read(&stored, id) {
        assert_eq!(found, data, "damage at byte {at} is found");
    }
    let mut sums = Summer::default();
    sums.update(data);
    let sums = Sums::parse_end(&sums.finish(id), id).expect("a table that was just written");
    let index = Index::Plain(sums);
    assert_eq!((index.data_bytes(), index.first_wrong(0..index.frames(), data)), (data.len() as u64, None));
}

/// The data of an encoded object, as a reader checks and decodes it.
fn read(stored: &[u8], id: ObjectId) -> Result<Vec<u8>, String> {
    let trailer_at = trailer_at(stored).ok_or("no footer")?;
    let index = EncodedIndex::parse(&stored[trailer_at..], stored.len() as u64, id, &Keyring::default());
    let index = Index::Encoded(Box::new(index.map_err(|error| error.to_string())?));
    if index.first_wrong(0..index.frames(), &stored[..trailer_at]).is_some() {
        return Err("a frame has a wrong checksum".into());
    }
    let mut data = vec![0; usize::try_from(index.data_bytes()).map_err(|error| error.to_string())?];
    for frame in 0..index.frames() {
        let at = index.stored(frame..frame + 1);
        index.deliver(frame, &stored[at.start as usize..at.end as usize], 0, &mut data)?;
    }
    Ok(data)
}

/// The ranges of frames partition the data.
fn check_index(index: &Index) {
    let bytes = index.data_bytes();
    let frames = index.frames();
    assert_eq!(index.frames_of(0, bytes), 0..frames);
    if let Some(last) = frames.checked_sub(1) {
        assert_eq!(index.data(last).end, bytes, "the last frame ends the data");
        assert!(index.frames_of(bytes - 1, bytes).contains(&last));
        assert_eq!(index.stored(last..frames).end, index.stored(0..frames).end);
    }
}

/// Decodes the header of a piece. With `seal`, its checksum is set right first.
pub fn piece(header: &[u8; HEADER_BYTES], at: u64, seal: bool) {
    let id = ObjectId::new(1, 0, Layout::Pack);
    let mut header = *header;
    if seal {
        let sum = crc32c::crc32c_append(crc32c::crc32c(&id.to_bytes()), &at.to_le_bytes());
        let sum = crc32c::crc32c_append(sum, &header[8..]);
        header[4..8].copy_from_slice(&sum.to_le_bytes());
    }
    if let Some(piece) = Piece::decode(&header, id, at) {
        assert!((1..=super::PIECE_BYTES_MAX).contains(&(piece.len as usize)));
        assert!(Piece::decode(&header, id, at ^ 64).is_none(), "a header holds at its own place alone");
        let _ = piece.verify(0, &header);
    }
}

/// Writes runs of a file (offset and length of each) into a pack at `base`, and reads them back.
pub fn pack(data: &[u8], runs: &[(u64, usize)], base: u64) {
    let id = ObjectId::new(1, 0, Layout::Pack);
    let (mut rest, mut parts) = (data, Vec::new());
    for (offset, len) in runs {
        let (now, after) = rest.split_at((*len).min(rest.len()));
        rest = after;
        if !now.is_empty() {
            parts.push((*offset, now));
        }
    }
    let mut bytes = Vec::new();
    let extents = append_pieces(&mut bytes, (id, base), (1, 2), parts.iter().copied());
    let mut found = extents.iter().flat_map(|extent| {
        let at = (extent.object_offset - base) as usize;
        let header = bytes[at - HEADER_BYTES..at].as_array().expect("64 bytes");
        let piece = Piece::decode(header, id, extent.object_offset - HEADER_BYTES as u64);
        let piece = piece.expect("a piece that was just written");
        let data = &bytes[at..at + extent.len as usize];
        assert_eq!((u64::from(piece.len), piece.file_offset), (extent.len, extent.file_offset));
        assert_eq!(piece.verify(0, data), Ok(()));
        data.iter().zip(extent.file_offset..)
    });
    for (offset, part) in parts {
        for (byte, at) in part.iter().zip(offset..) {
            assert_eq!(found.next(), Some((byte, at)), "each byte has its place in the file");
        }
    }
    assert_eq!(found.next(), None);
}

/// Data as a framed and as an encoded object, for seeds.
pub fn objects(data: &[u8]) -> [Vec<u8>; 2] {
    let mut sums = Summer::default();
    sums.update(data);
    let framed = [data, &sums.finish(ObjectId::new(1, 0, Layout::Framed))].concat();
    let codec = Codec { compression: Compression::Lz4, key: None };
    let mut encoded = Vec::new();
    if let Ok(mut encoder) = Encoder::new(&codec, ObjectId::new(1, 0, Layout::Encoded)) {
        let _ = encoder.update(data, &mut encoded).and_then(|()| encoder.finish(&mut encoded));
    }
    [framed, encoded]
}
