//! Tokens of filters.

use std::iter::Peekable;
use std::str::CharIndices;

use super::decimal::Decimal;
use super::filter::{Comparison, Literal};
use crate::feed::error::{FeedError, Result};

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Token {
    /// A column in double quotes.
    Quoted(String),
    /// A column, or a word of the language.
    Word(String),
    Literal(Literal),
    Compare(Comparison),
    Open,
    Close,
    Comma,
    End,
}

/// Characters of a filter that an error shows around its place.
const CHARS_SHOWN: usize = 200;

/// The error at a byte of a filter.
pub(super) fn error(text: &str, byte: usize, reason: &str) -> FeedError {
    let before = text.get(..byte).map_or(0, |before| before.chars().count());
    let first = before.saturating_sub(CHARS_SHOWN / 2);
    let mut rest = text.chars().skip(first);
    let mut shown: String = rest.by_ref().take(CHARS_SHOWN).collect();
    if first > 0 {
        shown.insert(0, '…');
    }
    if rest.next().is_some() {
        shown.push('…');
    }
    FeedError::Filter { text: shown, at: before + 1, reason: reason.to_owned() }
}

/// The tokens of a filter with their places; the last one is [`Token::End`].
pub(super) fn tokens(text: &str) -> Result<Vec<(usize, Token)>> {
    let mut found = Vec::new();
    let mut chars = text.char_indices().peekable();
    while let Some(&(at, first)) = chars.peek() {
        let token = match first {
            _ if first.is_whitespace() => {
                chars.next();
                continue;
            }
            '(' | ')' | ',' => {
                chars.next();
                [('(', Token::Open), (')', Token::Close)]
                    .into_iter()
                    .find_map(|(sign, token)| (sign == first).then_some(token))
                    .unwrap_or(Token::Comma)
            }
            '=' => {
                follows(&mut chars, '=');
                Token::Compare(Comparison::Equal)
            }
            '!' if follows(&mut chars, '=') => Token::Compare(Comparison::Unequal),
            '<' if follows(&mut chars, '=') => Token::Compare(Comparison::AtMost),
            // The sign itself is taken already.
            '<' if chars.next_if(|(_, next)| *next == '>').is_some() => Token::Compare(Comparison::Unequal),
            '<' => Token::Compare(Comparison::Less),
            '>' if follows(&mut chars, '=') => Token::Compare(Comparison::AtLeast),
            '>' => Token::Compare(Comparison::More),
            '\'' => Token::Literal(Literal::Text(quoted(text, &mut chars, '\'')?)),
            '"' => Token::Quoted(quoted(text, &mut chars, '"')?),
            '-' | '+' | '.' | '0'..='9' => Token::Literal(number(text, &mut chars)?),
            _ if first.is_alphabetic() || first == '_' => {
                let is_part = |c: char| c.is_alphanumeric() || c == '_' || c == '.';
                Token::Word(
                    std::iter::from_fn(|| chars.next_if(|(_, c)| is_part(*c))).map(|(_, c)| c).collect(),
                )
            }
            _ => {
                let reason =
                    format!("{first:?} has no meaning here; put column names with signs in double quotes");
                return Err(error(text, at, &reason));
            }
        };
        found.push((at, token));
    }
    found.push((text.len(), Token::End));
    Ok(found)
}

/// Takes a sign, and the one after it if it is `wanted`.
fn follows(chars: &mut Peekable<CharIndices<'_>>, wanted: char) -> bool {
    chars.next();
    chars.next_if(|(_, next)| *next == wanted).is_some()
}

/// What stands between quotes; two quotes stand for one.
fn quoted(text: &str, chars: &mut Peekable<CharIndices<'_>>, quote: char) -> Result<String> {
    let (start, _) = chars.next().unwrap_or((text.len(), quote));
    let mut inside = String::new();
    while let Some((_, next)) = chars.next() {
        if next != quote {
            inside.push(next);
        } else if chars.next_if(|(_, next)| *next == quote).is_some() {
            inside.push(quote);
        } else {
            return Ok(inside);
        }
    }
    Err(error(text, start, &format!("the closing {quote} is missing")))
}

fn number(text: &str, chars: &mut Peekable<CharIndices<'_>>) -> Result<Literal> {
    let start = chars.peek().map_or(text.len(), |(at, _)| *at);
    let mut digits = String::new();
    while let Some((_, next)) = chars.next_if(|(_, next)| {
        let sign = matches!(*next, '-' | '+') && (digits.is_empty() || digits.ends_with(['e', 'E']));
        sign || next.is_ascii_alphanumeric() || matches!(*next, '.' | '_')
    }) {
        digits.push(next);
    }
    // No column has integers of more than 64 bits.
    let integer = digits.parse().ok().filter(|n| (i128::from(i64::MIN)..=i128::from(u64::MAX)).contains(n));
    let is_integer = digits.trim_start_matches(['-', '+']).bytes().all(|byte| byte.is_ascii_digit());
    let float = || digits.parse().ok().filter(|number: &f64| number.is_finite() && !is_integer);
    let of_float = |float| Decimal::new(&digits, float).map_or(Literal::Float(float), Literal::Decimal);
    let literal = integer.map(Literal::Integer).or_else(|| float().map(of_float));
    literal.ok_or_else(|| {
        let digits: String = digits.chars().take(CHARS_SHOWN).collect();
        error(text, start, &format!("{digits:?} is not a number, or beyond 64 bits"))
    })
}
