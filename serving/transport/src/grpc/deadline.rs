//! The deadline of a call from its `grpc-timeout` header.

use std::time::{Duration, Instant};

use tonic::Request;
use tonic::codegen::http::{Extensions, HeaderMap, HeaderName};

use millrace_serving_core::error::{InferError, quote};

static TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");
/// Most digits of the number in that header, by the gRPC protocol.
const DIGITS_MAX: usize = 8;

/// Arrival time of a call's headers; only calls with a timeout have it.
#[derive(Debug, Clone, Copy)]
struct ArrivalTime(Instant);

/// Records the arrival time of a call that has a timeout, as its message may take long to arrive.
pub(super) fn record_arrival(headers: &HeaderMap, extensions: &mut Extensions) {
    if headers.contains_key(&TIMEOUT) {
        extensions.insert(ArrivalTime(Instant::now()));
    }
}

/// The deadline of a call whose arrival was recorded; `None` if it has none.
///
/// # Errors
/// [`InferError::Invalid`] for a malformed header.
pub(super) fn read<T>(request: &Request<T>) -> Result<Option<Instant>, InferError> {
    let Some(ArrivalTime(arrived)) = request.extensions().get() else { return Ok(None) };
    let Some(value) = request.metadata().get(TIMEOUT.as_str()) else { return Ok(None) };
    let text = String::from_utf8_lossy(value.as_encoded_bytes());
    let timeout = parse(&text).ok_or_else(|| {
        InferError::invalid(format!(
            "grpc-timeout is {}, up to {DIGITS_MAX} digits and one of H, M, S, m, u, n are expected",
            quote(&text)
        ))
    })?;
    Ok(arrived.checked_add(timeout))
}

/// Parses a timeout in the format of gRPC over HTTP/2.
fn parse(text: &str) -> Option<Duration> {
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let digits = number.bytes().all(|byte| byte.is_ascii_digit());
    if !digits || !(1..=DIGITS_MAX).contains(&number.len()) {
        return None;
    }
    let number = number.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grpc_timeout_has_digits_and_a_unit() {
        for (text, nanos) in [
            ("1H", 3_600_000_000_000),
            ("2M", 120_000_000_000),
            ("3S", 3_000_000_000),
            ("4m", 4_000_000),
            ("5u", 5_000),
            ("00000006n", 6),
            ("0m", 0),
        ] {
            assert_eq!(parse(text), Some(Duration::from_nanos(nanos)), "{text}");
        }
        assert_eq!(parse("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        for text in ["", "m", "1", "1x", "-1m", "+1m", " 1m", "1.5S", "123456789n", "1é", "é", "1mm", "1 m"]
        {
            assert_eq!(parse(text), None, "{text:?}");
        }
    }
}
