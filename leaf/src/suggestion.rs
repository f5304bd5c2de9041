//! Plain words for the messages of configuration parsers, with a suggestion for a misspelled name.

/// Longest name that is compared, in characters.
const NAME_CHARS_MAX: usize = 64;

/// The message of a parser in plain words: Rust's types become "a whole number" and "a number", and an unknown name
/// gets the known one that it resembles.
///
/// ```
/// # use millrace_leaf::suggestion::in_plain_words;
/// let said = in_plain_words("unknown field `epoch_max`, expected one of `seed`, `epochs_max`");
/// assert_eq!(said, "unknown field `epoch_max` (did you mean `epochs_max`?), expected one of `seed`, `epochs_max`");
/// ```
pub fn in_plain_words(message: &str) -> String {
    let message = message.trim().replace('\n', " ");
    if let Some((before, kind)) = message.rsplit_once(", expected ") {
        let words = match kind {
            "usize" | "u64" | "u32" | "u16" | "u8" => "a whole number",
            "isize" | "i64" | "i32" | "i16" | "i8" => "a whole number, which may be negative",
            "f64" | "f32" => "a number",
            _ => return suggested(&message).unwrap_or(message),
        };
        return format!("{before}, expected {words}");
    }
    message
}

/// The message with the known name that an unknown one resembles.
fn suggested(message: &str) -> Option<String> {
    let rest =
        ["unknown field `", "unknown variant `"].iter().find_map(|start| message.strip_prefix(start))?;
    let (unknown, expected) = rest.split_once("`, expected ")?;
    let name = nearest(unknown, expected.split('`').skip(1).step_by(2))?;
    let at = message.len() - expected.len() - ", expected ".len();
    let (said, choices) = (message.get(..at)?, message.get(at..)?);
    Some(format!("{said} (did you mean `{name}`?){choices}"))
}

/// The known name that a misspelled one resembles: at most a third of its letters, or one, were inserted, deleted,
/// replaced or swapped with their neighbor. A known name is its own suggestion; one that resembles none
/// has none.
///
/// ```
/// # use millrace_leaf::suggestion::nearest;
/// assert_eq!(nearest("digist", ["digits", "letters"]), Some("digits"));
/// assert_eq!(nearest("digits", ["digits", "digit"]), Some("digits"));
/// assert_eq!(nearest("images", ["digits", "letters"]), None);
/// ```
pub fn nearest<'n>(unknown: &str, known: impl IntoIterator<Item = &'n str>) -> Option<&'n str> {
    let most = (unknown.chars().count() / 3).max(1);
    let near = known.into_iter().filter_map(|name| Some((distance(unknown, name)?, name))).min()?;
    Some(near).filter(|(distance, _)| *distance <= most).map(|(_, name)| name)
}

/// Letters to insert, delete, replace or swap with their neighbor to get from one name to the other. None for
/// names that are too long to compare.
fn distance(from: &str, to: &str) -> Option<usize> {
    let fits = |name: &str| name.chars().count() <= NAME_CHARS_MAX;
    (fits(from) && fits(to)).then(|| strsim::osa_distance(from, to))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_resemble_a_known_one_are_suggested() {
        for (unknown, known, suggestion) in [
            ("htpp", "`grpc`, `http`", Some("http")),
            ("lr", "`learning_rate`, `betas`", None),
            ("adamq", "`sgd`, `adamw`, `adam`", Some("adam")),
            ("", "`a`", Some("a")),
            ("zz", "`a`, `bcd`", None),
            (&"x".repeat(99), "`a`", None),
        ] {
            let message = format!("unknown field `{unknown}`, expected one of {known}");
            let said = in_plain_words(&message);
            match suggestion {
                Some(name) => {
                    let found = format!(
                        "unknown field `{unknown}` (did you mean `{name}`?), expected one of {known}"
                    );
                    assert_eq!(said, found);
                }
                None => assert_eq!(said, message),
            }
        }
    }

    #[test]
    fn types_are_named_in_words_and_other_messages_stay() {
        let said = in_plain_words("invalid type: string \"96\", expected usize\n");
        assert_eq!(said, "invalid type: string \"96\", expected a whole number");
        assert_eq!(in_plain_words("invalid type: map, expected f64"), "invalid type: map, expected a number");
        for message in [
            "key with no value, expected `=`",
            "missing field `dataset`",
            "unknown field `x`, there are no fields",
            "",
        ] {
            assert_eq!(in_plain_words(message), message);
        }
    }

    #[test]
    fn distance_counts_the_least_changes() {
        for (from, to, changes) in [
            ("", "", 0),
            ("", "ab", 2),
            ("ab", "ba", 1),
            ("abc", "acb", 1),
            ("kitten", "sitting", 3),
            ("where", "where", 0),
        ] {
            assert_eq!(distance(from, to), Some(changes), "{from} {to}");
            assert_eq!(distance(to, from), Some(changes), "{to} {from}");
        }
    }
}
