//! JSON strings: end of plain text, escapes, base64, timestamps.

use chrono::{DateTime, Timelike};

use super::reject::Fault;

const ONES: u64 = 0x0101_0101_0101_0101;
const HIGH: u64 = 0x8080_8080_8080_8080;

/// Number of bytes before the first quote, backslash or control character, eight at a time.
///
/// Borrows of the subtraction only disturb bytes above the lowest hit, and only the lowest hit is used.
pub(crate) fn plain_len(bytes: &[u8]) -> usize {
    let (chunks, tail) = bytes.as_chunks::<8>();
    for (i, chunk) in chunks.iter().enumerate() {
        let word = u64::from_le_bytes(*chunk);
        let quote = word ^ (ONES * b'"' as u64);
        let backslash = word ^ (ONES * b'\\' as u64);
        let hits = ((quote.wrapping_sub(ONES) & !quote)
            | (backslash.wrapping_sub(ONES) & !backslash)
            | (word.wrapping_sub(ONES * 0x20) & !word))
            & HIGH;
        if hits != 0 {
            return i * 8 + (hits.trailing_zeros() / 8) as usize;
        }
    }
    let plain = |b: &u8| *b != b'"' && *b != b'\\' && *b >= 0x20;
    chunks.len() * 8 + tail.iter().take_while(|b| plain(b)).count()
}

/// Decodes the escape after a backslash: the character and the number of bytes read.
pub(crate) fn escape(bytes: &[u8]) -> Result<(char, usize), &'static str> {
    let char = match bytes.first() {
        Some(b'"') => '"',
        Some(b'\\') => '\\',
        Some(b'/') => '/',
        Some(b'b') => '\u{8}',
        Some(b'f') => '\u{c}',
        Some(b'n') => '\n',
        Some(b'r') => '\r',
        Some(b't') => '\t',
        Some(b'u') => return unicode_escape(bytes),
        _ => return Err("an unknown escape"),
    };
    Ok((char, 1))
}

fn unicode_escape(bytes: &[u8]) -> Result<(char, usize), &'static str> {
    let high = hex4(bytes, 1)?;
    if !(0xd800..=0xdfff).contains(&high) {
        return Ok((char::from_u32(high).ok_or("a lone surrogate")?, 5));
    }
    if high >= 0xdc00 || bytes.get(5) != Some(&b'\\') || bytes.get(6) != Some(&b'u') {
        return Err("a lone surrogate");
    }
    let low = hex4(bytes, 7)?;
    if !(0xdc00..=0xdfff).contains(&low) {
        return Err("a lone surrogate");
    }
    let code = 0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00);
    Ok((char::from_u32(code).ok_or("a lone surrogate")?, 11))
}

fn hex4(bytes: &[u8], at: usize) -> Result<u32, &'static str> {
    let digits = bytes.get(at..at + 4).ok_or("a cut \\u escape")?;
    digits.iter().try_fold(0, |code, digit| {
        let digit = char::from(*digit).to_digit(16).ok_or("a \\u escape without four hexadecimal digits")?;
        Ok(code * 16 + digit)
    })
}

/// Appends the bytes of canonical, padded, standard base64.
pub(crate) fn base64(text: &str, out: &mut Vec<u8>) -> Result<(), Fault> {
    const FAULT: Fault = Fault::Text("base64");
    let bytes = text.as_bytes();
    if !bytes.len().is_multiple_of(4) {
        return Err(FAULT);
    }
    out.reserve(bytes.len() / 4 * 3);
    let (quads, _) = bytes.as_chunks::<4>();
    for (i, quad) in quads.iter().enumerate() {
        let last = i + 1 == quads.len();
        let padding = match quad {
            [_, _, b'=', b'='] if last => 2,
            [_, _, _, b'='] if last => 1,
            _ => 0,
        };
        let mut word = 0u32;
        for &byte in &quad[..4 - padding] {
            word = word << 6 | sextet(byte).ok_or(FAULT)?;
        }
        word <<= 6 * padding;
        let [_, a, b, c] = word.to_be_bytes();
        // Bits that padding hides must be zero, so that every text has one meaning.
        match padding {
            2 if b == 0 && c == 0 => out.push(a),
            1 if c == 0 => out.extend([a, b]),
            0 => out.extend([a, b, c]),
            _ => return Err(FAULT),
        }
    }
    Ok(())
}

fn sextet(byte: u8) -> Option<u32> {
    Some(match byte {
        b'A'..=b'Z' => u32::from(byte - b'A'),
        b'a'..=b'z' => u32::from(byte - b'a') + 26,
        b'0'..=b'9' => u32::from(byte - b'0') + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    })
}

/// Microseconds since 1970 of an RFC 3339 string.
///
/// Refuses a leap second and nonzero digits after the microsecond, which this count cannot hold.
pub(crate) fn timestamp_us(text: &str) -> Result<i64, Fault> {
    let time = DateTime::parse_from_rfc3339(text).map_err(|_| Fault::Text("an RFC 3339 time"))?;
    // The parser drops digits after the nanosecond, so the text itself decides.
    let fraction = text.split_once('.').map_or("", |(_, behind)| behind);
    let mut digits = fraction.bytes().take_while(u8::is_ascii_digit).skip(6);
    if time.nanosecond() >= 1_000_000_000 || digits.any(|digit| digit != b'0') {
        return Err(Fault::Lossy);
    }
    checked_us(time.timestamp_micros())
}

/// Microseconds since 1970 of a number of milliseconds.
pub(crate) fn timestamp_of_ms(ms: i64) -> Result<i64, Fault> {
    checked_us(ms.checked_mul(1000).ok_or(Fault::Range)?)
}

/// Refuses a time outside the range of dates: readers would fail on it.
fn checked_us(us: i64) -> Result<i64, Fault> {
    DateTime::from_timestamp_micros(us).map(|_| us).ok_or(Fault::Range)
}
