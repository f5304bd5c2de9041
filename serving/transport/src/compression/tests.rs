//! Tests of round trips, bounds, and truncated, corrupt or mislabeled streams.
use proptest::prelude::*;

use super::Encoding;
use millrace_serving_core::error::InferError;

const BYTES_MAX: usize = 1 << 20;

fn refused(encoding: Encoding, body: &[u8]) -> String {
    match encoding.decompress(body, BYTES_MAX) {
        Err(InferError::Invalid { reason }) => reason,
        other => panic!("{encoding:?}: {other:?}"),
    }
}

#[test]
fn compressed_data_round_trips_up_to_the_limit() {
    for encoding in Encoding::ALL {
        for length in [0, 1, 1000, BYTES_MAX] {
            let plain: Vec<u8> = (0..length).map(|index| (index / 7) as u8).collect();
            let packed = encoding.compress(&plain).unwrap();
            assert!(encoding.decompress(&packed, length).unwrap() == plain, "{encoding:?} {length}");
        }
    }
}

#[test]
fn decompression_bomb_is_refused_at_the_limit() {
    for encoding in Encoding::ALL {
        let bomb = encoding.compress(&vec![0; 64 << 20]).unwrap();
        assert!(bomb.len() < BYTES_MAX, "{}", bomb.len());
        for bytes_max in [0, 1, 100, BYTES_MAX] {
            let expected = InferError::TooLarge { bytes: bytes_max as u64 + 1, bytes_max: bytes_max as u64 };
            assert_eq!(encoding.decompress(&bomb, bytes_max).unwrap_err(), expected);
        }
    }
}

#[test]
fn every_truncation_and_wrong_checksum_is_detected() {
    for encoding in Encoding::ALL {
        let packed = encoding.compress(b"some text that is long enough, text that is long enough").unwrap();
        for length in 0..packed.len() {
            assert!(refused(encoding, &packed[..length]).contains(encoding.name()), "{length}");
        }
        let mut wrong = packed.clone();
        let end = wrong.len() - if encoding == Encoding::Gzip { 8 } else { 1 };
        wrong[end] ^= 1;
        assert!(refused(encoding, &wrong).contains("no valid"));
        assert!(refused(encoding, &[packed.as_slice(), b"x"].concat()).contains(encoding.name()));
        assert!(refused(encoding, b"not compressed at all").contains("no valid"));
    }
    let gzip = Encoding::Gzip.compress(b"ab").unwrap();
    assert_eq!(Encoding::Gzip.decompress(&[gzip.clone(), gzip].concat(), 4).unwrap(), b"abab");
}

#[test]
fn encodings_have_their_http_names() {
    assert_eq!(Encoding::named("gzip"), Some(Encoding::Gzip));
    assert_eq!(Encoding::named("GZIP"), Some(Encoding::Gzip));
    assert_eq!(Encoding::named("x-gzip"), Some(Encoding::Gzip));
    assert_eq!(Encoding::named("deflate"), Some(Encoding::Deflate));
    for name in ["", "x-deflate", "x-", "br", "gzip, gzip", "identity"] {
        assert_eq!(Encoding::named(name), None, "{name}");
    }
}

proptest! {
    #[test]
    fn hostile_streams_never_panic(
        mut bytes in proptest::collection::vec(any::<u8>(), 0..200),
        flips in proptest::collection::vec((any::<usize>(), any::<u8>()), 0..4),
        whole in any::<bool>(),
    ) {
        for encoding in Encoding::ALL {
            if whole {
                bytes = encoding.compress(&bytes).unwrap();
            }
            for (place, flip) in &flips {
                let length = bytes.len().max(1);
                if let Some(byte) = bytes.get_mut(place % length) {
                    *byte ^= flip;
                }
            }
            if let Ok(plain) = encoding.decompress(&bytes, 512) {
                prop_assert!(plain.len() <= 512);
            }
        }
    }
}
