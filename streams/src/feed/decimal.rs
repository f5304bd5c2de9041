//! Exact decimal numbers of options, as whole numbers of their smallest unit.

/// Reads a decimal number without sign, for example `0.25`, in units of 10^-`digits`. `None` for another text, for
/// more digits after the point, and for numbers of 10^20 or more.
pub(crate) fn parse(text: &str, digits: usize) -> Option<u128> {
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.len() + part.len() == 0 || !is_number(whole) || !is_number(part) {
        return None;
    }
    let (whole, part) = (whole.trim_start_matches('0'), part.trim_end_matches('0'));
    if part.len() > digits || whole.len() > 20 {
        return None;
    }
    format!("0{whole}{part:0<digits$}").parse().ok()
}

/// The shortest text of a number of units.
pub(crate) fn show(units: u128, digits: usize) -> String {
    let one = 10_u128.pow(digits as u32);
    let text = format!("{}.{:0>digits$}", units / one, units % one);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decimals_are_exact_and_other_texts_are_refused() {
        for (text, units, shown) in [
            ("0.1", 100, "0.1"),
            ("7", 7000, "7"),
            (".250", 250, "0.25"),
            ("00.001", 1, "0.001"),
            ("0", 0, "0"),
        ] {
            assert_eq!(parse(text, 3), Some(units), "{text}");
            assert_eq!(show(units, 3), shown);
        }
        for text in ["", ".", "-1", "1e3", "0.0001", "1.2.3", " 1", "123456789012345678901", "٣"] {
            assert_eq!(parse(text, 3), None, "{text:?}");
        }
    }
}
