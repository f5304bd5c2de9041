//! Chains of errors: an error and its causes, as an iterator and as one line of text.

use std::error::Error;
use std::iter;

/// An error and its causes, the error first.
pub fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    iter::successors(Some(error), |error| (*error).source())
}

/// An error and its causes on one line. A cause that the text already contains is left out: some libraries repeat
/// their source in their own text.
pub fn one_line(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let told = cause.to_string();
        if !text.contains(&told) {
            text.push_str(": ");
            text.push_str(&told);
        }
        source = cause.source();
    }
    text.replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use std::fmt;

    use super::*;

    #[derive(Debug)]
    struct Link(&'static str, Option<Box<Link>>);

    impl fmt::Display for Link {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Link {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_deref().map(|link| link as _)
        }
    }

    fn chain(texts: &[&'static str]) -> Link {
        let (first, rest) = texts.split_first().unwrap();
        Link(first, (!rest.is_empty()).then(|| Box::new(chain(rest))))
    }

    #[test]
    fn causes_begin_with_the_error_and_end_with_the_root() {
        let error = chain(&["open store", "read marker", "permission denied"]);
        let texts: Vec<_> = causes(&error).map(ToString::to_string).collect();
        assert_eq!(texts, ["open store", "read marker", "permission denied"]);
    }

    #[test]
    fn a_line_has_each_cause_once_and_no_line_breaks() {
        assert_eq!(one_line(&chain(&["alone"])), "alone");
        let error = chain(&["open store: read marker", "read marker", "denied\nfor user 7"]);
        assert_eq!(one_line(&error), "open store: read marker: denied for user 7");
    }
}
