//! The trace context of a request, from its headers (W3C Trace Context, level 1).

use axum::http::{HeaderMap, HeaderValue};

/// Header with the trace and the parent span.
pub(crate) const TRACE_PARENT: &str = "traceparent";
/// Header with vendor data of the trace, passed on unchanged.
const TRACE_STATE: &str = "tracestate";
/// Longest `tracestate` to pass on, in bytes; the least that the recommendation asks for.
const TRACE_STATE_BYTES_MAX: usize = 512;

pub(crate) type TraceId = [u8; 16];
pub(crate) type SpanId = [u8; 8];

/// The caller's span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Parent {
    pub(crate) trace: TraceId,
    pub(crate) span: SpanId,
    /// Whether the caller records its spans.
    pub(crate) sampled: bool,
}

impl Parent {
    /// Parses a `traceparent`: version (2 digits), trace (32), span (16) and flags (2), in lower-case
    /// hexadecimal and separated by `-`. Later versions may append fields.
    pub(crate) fn parse(value: &HeaderValue) -> Option<Parent> {
        let text = value.to_str().ok()?;
        let mut fields = text.split('-');
        let mut digits = |count: usize| {
            let hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
            fields.next().filter(|field| field.len() == count && field.bytes().all(hex))
        };
        let (version, trace, span, flags) = (digits(2)?, digits(32)?, digits(16)?, digits(2)?);
        let whole = version != "ff" && (version != "00" || fields.next().is_none());
        let mut parent = Parent { trace: [0; 16], span: [0; 8], sampled: false };
        hex::decode_to_slice(trace, &mut parent.trace).ok()?;
        hex::decode_to_slice(span, &mut parent.span).ok()?;
        parent.sampled = u8::from_str_radix(flags, 16).ok()? & 1 == 1;
        (whole && parent.trace != [0; 16] && parent.span != [0; 8]).then_some(parent)
    }

    /// The parent of a request; `None` if the header occurs twice.
    pub(crate) fn of(headers: &HeaderMap) -> Option<Parent> {
        Parent::parse(only(headers, TRACE_PARENT)?)
    }
}

/// The `tracestate` of a request; empty if there is none that can be passed on.
pub(crate) fn state(headers: &HeaderMap) -> String {
    let text = only(headers, TRACE_STATE).and_then(|value| value.to_str().ok());
    text.filter(|text| text.len() <= TRACE_STATE_BYTES_MAX).unwrap_or_default().to_owned()
}

fn only<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a HeaderValue> {
    let mut values = headers.get_all(name).iter();
    values.next().filter(|_| values.next().is_none())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

    #[test]
    fn a_trace_is_known_by_a_whole_traceparent_alone() {
        for (text, sampled) in [
            (format!("00-{TRACE}-00f067aa0ba902b7-01"), Some(true)),
            (format!("00-{TRACE}-00f067aa0ba902b7-00"), Some(false)),
            (format!("00-{TRACE}-00f067aa0ba902b7-fe"), Some(false)),
            (format!("00-{TRACE}-00f067aa0ba902b7-ff"), Some(true)),
            (format!("cc-{TRACE}-00f067aa0ba902b7-01-what-comes-later"), Some(true)),
            (format!("00-{TRACE}-00f067aa0ba902b7-01-more"), None),
            (format!("00-{TRACE}-00f067aa0ba902b7-01-"), None),
            (format!("ff-{TRACE}-00f067aa0ba902b7-01"), None),
            (format!("00-{TRACE}-0000000000000000-01"), None),
            (format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32)), None),
            (format!("00-{}-00f067aa0ba902b7-01", TRACE.to_uppercase()), None),
            (format!("00-{TRACE}-00f067aa0ba902b7"), None),
            (format!("00-{TRACE}-00f067aa0ba902b7-0"), None),
            (format!("00-{TRACE}-00f067aa0ba902b7-+1"), None),
            (format!("00-{TRACE}0-00f067aa0ba902b7-01"), None),
            (String::new(), None),
            ("-".repeat(55), None),
            ("-".repeat(60_000), None),
        ] {
            let value = HeaderValue::try_from(&text).unwrap();
            let told = Parent::parse(&value);
            assert_eq!(told.map(|parent| parent.sampled), sampled, "{text}");
            if let Some(parent) = told {
                assert_eq!(hex::encode(parent.trace), TRACE);
                assert_eq!(hex::encode(parent.span), "00f067aa0ba902b7");
            }
        }
        let bytes = HeaderValue::from_bytes(&[0xff; 55]).unwrap();
        assert_eq!(Parent::parse(&bytes), None);
    }

    #[test]
    fn duplicate_and_overlong_headers_are_ignored() {
        let parent = HeaderValue::try_from(format!("00-{TRACE}-00f067aa0ba902b7-01")).unwrap();
        let mut headers = HeaderMap::new();
        assert_eq!((Parent::of(&headers), state(&headers)), (None, String::new()));
        headers.append(TRACE_PARENT, parent.clone());
        headers.append(TRACE_STATE, HeaderValue::from_static("a=1,b=2"));
        assert_eq!(Parent::of(&headers).map(|parent| parent.sampled), Some(true));
        assert_eq!(state(&headers), "a=1,b=2");
        headers.append(TRACE_PARENT, parent);
        headers.append(TRACE_STATE, HeaderValue::from_static("c=3"));
        assert_eq!((Parent::of(&headers), state(&headers)), (None, String::new()));
        headers.insert(TRACE_STATE, HeaderValue::try_from("x".repeat(TRACE_STATE_BYTES_MAX + 1)).unwrap());
        assert_eq!(state(&headers), "");
    }

    proptest! {
        #[test]
        fn written_traceparent_is_read_back(trace in any::<[u8; 16]>(), span in any::<[u8; 8]>(), flags in any::<u8>()) {
            prop_assume!(trace != [0; 16] && span != [0; 8]);
            let text = format!("00-{}-{}-{flags:02x}", hex::encode(trace), hex::encode(span));
            let parent = Parent::parse(&HeaderValue::try_from(text).unwrap());
            prop_assert_eq!(parent, Some(Parent { trace, span, sampled: flags & 1 == 1 }));
        }

        #[test]
        fn arbitrary_headers_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            if let Ok(value) = HeaderValue::from_bytes(&bytes)
                && let Some(parent) = Parent::parse(&value)
            {
                prop_assert!(parent.trace != [0; 16] && parent.span != [0; 8]);
            }
        }
    }
}
