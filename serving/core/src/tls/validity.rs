//! The expiry time of a certificate, from its DER encoding (RFC 5280, section 4.1).

use std::time::{Duration, SystemTime};

const SEQUENCE: u8 = 0x30;
const VERSION: u8 = 0xa0;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;

/// `notAfter` of a certificate; `None` if the encoding is not that of a certificate.
pub(super) fn not_after(certificate: &[u8]) -> Option<SystemTime> {
    let mut certificate = within(&mut &*certificate, SEQUENCE)?;
    let mut fields = within(&mut certificate, SEQUENCE)?;
    if fields.first() == Some(&VERSION) {
        element(&mut fields)?;
    }
    // Skips the serial number, signature algorithm and issuer.
    for _ in 0..3 {
        element(&mut fields)?;
    }
    let mut validity = within(&mut fields, SEQUENCE)?;
    element(&mut validity)?;
    let (tag, time) = element(&mut validity)?;
    let text = std::str::from_utf8(time).ok()?.strip_suffix('Z')?;
    let (year, rest) = match tag {
        UTC_TIME => {
            let (year, rest) = text.split_at_checked(2)?;
            let year: i64 = year.parse().ok()?;
            (if year < 50 { 2000 + year } else { 1900 + year }, rest)
        }
        GENERALIZED_TIME => {
            let (year, rest) = text.split_at_checked(4)?;
            (year.parse().ok()?, rest)
        }
        _ => return None,
    };
    let number = |at: usize| rest.get(at..at + 2)?.parse::<i64>().ok();
    let day = days_since_1970(year, number(0)?, number(2)?);
    let seconds = ((day * 24 + number(4)?) * 60 + number(6)?) * 60 + number(8)?;
    // Times before 1970 become 1970: only their being past matters.
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds.max(0) as u64))
}

/// The content of the next element, if it has the expected tag.
fn within<'d>(der: &mut &'d [u8], expected: u8) -> Option<&'d [u8]> {
    element(der).filter(|(tag, _)| *tag == expected).map(|(_, content)| content)
}

/// Tag and content of the next element.
fn element<'d>(der: &mut &'d [u8]) -> Option<(u8, &'d [u8])> {
    let (&[tag, short], mut rest) = der.split_first_chunk()?;
    let mut len = usize::from(short);
    if short & 0x80 != 0 {
        let (bytes, after) =
            rest.split_at_checked(usize::from(short & 0x7f)).filter(|(b, _)| b.len() <= 4)?;
        len = bytes.iter().fold(0, |len, byte| len << 8 | usize::from(*byte));
        rest = after;
    }
    let (content, after) = rest.split_at_checked(len)?;
    *der = after;
    Some((tag, content))
}

/// Days since 1970-01-01 in the Gregorian calendar, which repeats every 400 years.
fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    // In years that begin in March the leap day is the last day.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * month + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair, date_time_ymd};

    use super::*;

    #[test]
    fn the_end_of_a_certificate_is_read_in_both_forms_of_time() {
        let key = KeyPair::generate().unwrap();
        // Times from 2050 on have a four-digit year.
        for (year, month, day, seconds) in [
            (1999, 12, 31, 946_598_400_u64),
            (2024, 2, 29, 1_709_164_800),
            (2049, 1, 1, 2_493_072_000),
            (2100, 3, 1, 4_107_542_400),
        ] {
            let mut params = CertificateParams::new(vec!["localhost".into()]).unwrap();
            params.not_before = date_time_ymd(1990, 1, 1);
            params.not_after = date_time_ymd(year, month, day);
            let certificate = params.self_signed(&key).unwrap();
            let end = not_after(certificate.der()).unwrap();
            assert_eq!(end, SystemTime::UNIX_EPOCH + Duration::from_secs(seconds), "{year}-{month}-{day}");
            for cut in 0..certificate.der().len() {
                assert_eq!(not_after(&certificate.der()[..cut]), None);
            }
        }
        assert_eq!(not_after(b""), None);
        assert_eq!(not_after(&[0x30, 0xff]), None);
    }
}
