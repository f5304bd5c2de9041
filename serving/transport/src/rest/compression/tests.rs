//! Tests of the parsers for `Accept-Encoding` and `Content-Encoding`.
use axum::http::{HeaderMap, HeaderValue, header};

use super::{Accepted, content_encoding};
use crate::compression::Encoding::{Deflate, Gzip};

fn accepted(values: &[&'static str]) -> Accepted {
    let mut headers = HeaderMap::new();
    for value in values {
        headers.append(header::ACCEPT_ENCODING, HeaderValue::from_static(value));
    }
    Accepted::read(&headers)
}

#[test]
fn encoding_with_the_highest_weight_wins() {
    for (values, expected) in [
        (&[][..], Accepted::Plain),
        (&[""], Accepted::Plain),
        (&["identity"], Accepted::Plain),
        (&["br, zstd"], Accepted::Plain),
        (&["gzip"], Accepted::Preferred(Gzip)),
        (&["GZip"], Accepted::Preferred(Gzip)),
        (&["x-gzip"], Accepted::Preferred(Gzip)),
        (&["deflate"], Accepted::Preferred(Deflate)),
        (&["deflate, gzip"], Accepted::Preferred(Gzip)),
        (&["deflate", "br"], Accepted::Preferred(Deflate)),
        (&["gzip;q=0.5, deflate;q=0.6"], Accepted::Preferred(Deflate)),
        (&["gzip ; q = 0.5 , identity;q=0.6"], Accepted::Plain),
        (&["gzip;q=0.5, identity;q=0.5"], Accepted::Preferred(Gzip)),
        (&["gzip;q=0"], Accepted::Plain),
        (&["*"], Accepted::Preferred(Gzip)),
        (&["*, gzip;q=0"], Accepted::Preferred(Deflate)),
        (&["*;q=0"], Accepted::Nothing),
        (&["identity;q=0"], Accepted::Nothing),
        (&["identity;q=0, br"], Accepted::Nothing),
        (&["*;q=0, identity"], Accepted::Plain),
        (&["*;q=0, gzip"], Accepted::Only(Gzip)),
        (&["identity;q=0, deflate;q=0.1"], Accepted::Only(Deflate)),
        (&["gzip;q=2"], Accepted::Plain),
        (&["gzip;q=NaN"], Accepted::Plain),
        (&["gzip;q"], Accepted::Plain),
        (&["gzip;level=1"], Accepted::Plain),
        (&[";;;,,=,"], Accepted::Plain),
    ] {
        assert_eq!(accepted(values), expected, "{values:?}");
    }
}

#[test]
fn body_with_several_or_unknown_encodings_is_refused() {
    for (value, expected) in [
        ("", Some(None)),
        ("identity", Some(None)),
        ("gzip", Some(Some(Gzip))),
        ("identity, gzip", Some(Some(Gzip))),
        ("Deflate", Some(Some(Deflate))),
        ("gzip, gzip", None),
        ("gzip, deflate", None),
        ("br", None),
        ("gzip;q=1", None),
    ] {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static(value));
        assert_eq!(content_encoding(&headers).ok(), expected, "{value}");
    }
    assert_eq!(content_encoding(&HeaderMap::new()).ok(), Some(None));
}
