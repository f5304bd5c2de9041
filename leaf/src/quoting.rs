//! Text of users and of other programs in messages: cut to a length that a message can bear, and quoted.

/// Longest text in [`quote`], in characters.
const QUOTED_MAX: usize = 120;

/// At most `max` characters of a text; `…` follows where it was cut.
pub fn shorten(text: &str, max: usize) -> String {
    let mut short: String = text.chars().take(max).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

/// A text in quotes, with control characters escaped, and at most 120 characters of it.
pub fn quote(text: &str) -> String {
    format!("{:?}", shorten(text, QUOTED_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_within_the_limit_is_unchanged() {
        assert_eq!(shorten("äöü", 3), "äöü");
        assert_eq!(quote("a \"b\"\n"), r#""a \"b\"\n""#);
    }

    #[test]
    fn a_longer_text_ends_with_an_ellipsis() {
        assert_eq!(shorten("äöü", 2), "äö…");
        assert_eq!(quote(&"x".repeat(121)), format!("\"{}…\"", "x".repeat(120)));
    }
}
