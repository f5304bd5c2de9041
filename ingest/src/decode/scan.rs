//! A cursor over one JSON record (RFC 8259), strict about what the RFC forbids.

use std::borrow::Cow;
use std::fmt;

use super::number::Number;
use super::reject::{Fault, Reject};
use super::{Limits, text};

/// Kind of a value, told by its first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Null,
    Bool,
    Number,
    String,
    Array,
    Object,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Null => "null",
            Self::Bool => "a boolean",
            Self::Number => "a number",
            Self::String => "a string",
            Self::Array => "an array",
            Self::Object => "an object",
        })
    }
}

/// Reads one record from front to back. After an error it is of no further use.
#[derive(Debug)]
pub(crate) struct Scanner<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
    depth_max: usize,
}

impl<'a> Scanner<'a> {
    /// Checks size and encoding; the scanner starts before the record's object.
    pub(crate) fn of_record(value: &'a [u8], limits: &Limits) -> Result<Self, Reject> {
        if value.len() > limits.record_bytes_max {
            return Err(Reject::too_large(value.len(), limits.record_bytes_max));
        }
        let text = std::str::from_utf8(value).map_err(|e| Reject::not_utf8(e.valid_up_to()))?;
        let mut scanner = Self { text, at: 0, depth: 0, depth_max: limits.depth_max };
        scanner.space();
        Ok(scanner)
    }

    /// The text that was not read yet.
    pub(crate) fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    /// A scanner before the value at the start of `text`.
    pub(crate) fn before_value(text: &'a str, limits: &Limits) -> Self {
        Self { text, at: 0, depth: 0, depth_max: limits.depth_max }
    }

    /// The text of the value at the start of `text`; all of it where that is no value.
    pub(crate) fn value_of(text: &'a str, limits: &Limits) -> &'a str {
        Self::before_value(text, limits).skip_value().unwrap_or(text)
    }

    fn byte(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn space(&mut self) {
        while let Some(b' ' | b'\n' | b'\t' | b'\r') = self.byte() {
            self.at += 1;
        }
    }

    pub(crate) fn fail(&self, what: &'static str) -> Fault {
        Fault::Syntax { at: self.at, what }
    }

    /// The kind of the value here.
    pub(crate) fn kind(&self) -> Result<Kind, Fault> {
        match self.byte() {
            Some(b'n') => Ok(Kind::Null),
            Some(b't' | b'f') => Ok(Kind::Bool),
            Some(b'-' | b'0'..=b'9') => Ok(Kind::Number),
            Some(b'"') => Ok(Kind::String),
            Some(b'[') => Ok(Kind::Array),
            Some(b'{') => Ok(Kind::Object),
            Some(_) => Err(self.fail("expected a value")),
            None => Err(self.fail("the record ends where a value is expected")),
        }
    }

    fn expect_kind(&self, wanted: Kind) -> Result<(), Fault> {
        let found = self.kind()?;
        if found == wanted { Ok(()) } else { Err(Fault::Found(found)) }
    }

    /// Whether `null` is here, which is then consumed.
    pub(crate) fn null(&mut self) -> Result<bool, Fault> {
        if self.byte() != Some(b'n') {
            return Ok(false);
        }
        self.word("null")?;
        Ok(true)
    }

    /// Consumes `true` or `false`.
    pub(crate) fn bool(&mut self) -> Result<bool, Fault> {
        self.expect_kind(Kind::Bool)?;
        let value = self.byte() == Some(b't');
        self.word(if value { "true" } else { "false" })?;
        Ok(value)
    }

    fn word(&mut self, word: &'static str) -> Result<(), Fault> {
        if self.text.as_bytes()[self.at..].starts_with(word.as_bytes()) {
            self.at += word.len();
            Ok(())
        } else {
            Err(self.fail("expected null, true or false"))
        }
    }

    /// Consumes a number.
    pub(crate) fn number(&mut self) -> Result<Number<'a>, Fault> {
        self.expect_kind(Kind::Number)?;
        let rest = &self.text[self.at..];
        match Number::read(rest) {
            Ok(number) => {
                self.at += number.text.len();
                Ok(number)
            }
            Err((behind, what)) => {
                self.at += behind;
                Err(self.fail(what))
            }
        }
    }

    /// Consumes a string, borrowed unless it has escapes.
    pub(crate) fn string(&mut self) -> Result<Cow<'a, str>, Fault> {
        self.expect_kind(Kind::String)?;
        self.at += 1;
        let start = self.at;
        self.at += text::plain_len(&self.text.as_bytes()[start..]);
        match self.byte() {
            Some(b'"') => {
                let string = &self.text[start..self.at];
                self.at += 1;
                Ok(Cow::Borrowed(string))
            }
            Some(b'\\') => {
                let mut string = String::with_capacity(self.at - start + 16);
                string.push_str(&self.text[start..self.at]);
                self.escaped(&mut string)?;
                Ok(Cow::Owned(string))
            }
            Some(_) => Err(self.fail("a control character inside a string")),
            None => Err(self.fail("the record ends inside a string")),
        }
    }

    /// Consumes the rest of a string from its first escape on.
    fn escaped(&mut self, string: &mut String) -> Result<(), Fault> {
        loop {
            match self.byte() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(());
                }
                Some(b'\\') => {
                    self.at += 1;
                    let (char, len) =
                        text::escape(&self.text.as_bytes()[self.at..]).map_err(|what| self.fail(what))?;
                    string.push(char);
                    self.at += len;
                }
                Some(0..=0x1f) => return Err(self.fail("a control character inside a string")),
                Some(_) => {
                    let start = self.at;
                    self.at += text::plain_len(&self.text.as_bytes()[start..]);
                    string.push_str(&self.text[start..self.at]);
                }
                None => return Err(self.fail("the record ends inside a string")),
            }
        }
    }

    fn enter(&mut self) -> Result<(), Fault> {
        if self.depth >= self.depth_max {
            return Err(Fault::Deep { max: self.depth_max });
        }
        self.depth += 1;
        self.at += 1;
        self.space();
        Ok(())
    }

    /// Consumes `[`.
    pub(crate) fn begin_array(&mut self) -> Result<(), Fault> {
        self.expect_kind(Kind::Array)?;
        self.enter()
    }

    /// Moves to the next item of the array; `false`: consumed `]`.
    pub(crate) fn next_item(&mut self, first: &mut bool) -> Result<bool, Fault> {
        if !*first {
            self.space();
        }
        match self.byte() {
            Some(b']') => {
                self.at += 1;
                self.depth -= 1;
                return Ok(false);
            }
            _ if *first => *first = false,
            Some(b',') => {
                self.at += 1;
                self.space();
            }
            _ => return Err(self.fail("expected , or ]")),
        }
        Ok(true)
    }

    /// Consumes `{`.
    pub(crate) fn begin_object(&mut self) -> Result<(), Fault> {
        self.expect_kind(Kind::Object)?;
        self.enter()
    }

    /// Moves to the next field's value and returns its name; `None`: consumed `}`.
    pub(crate) fn next_field(&mut self, first: &mut bool) -> Result<Option<Cow<'a, str>>, Fault> {
        if !*first {
            self.space();
        }
        match self.byte() {
            Some(b'}') => {
                self.at += 1;
                self.depth -= 1;
                return Ok(None);
            }
            _ if *first => *first = false,
            Some(b',') => {
                self.at += 1;
                self.space();
            }
            _ => return Err(self.fail("expected , or }")),
        }
        if self.byte() != Some(b'"') {
            return Err(self.fail("expected a field name"));
        }
        let name = self.string()?;
        self.space();
        if self.byte() != Some(b':') {
            return Err(self.fail("expected :"));
        }
        self.at += 1;
        self.space();
        Ok(Some(name))
    }

    /// Consumes any value and returns its text. Recursion is bounded by the depth limit.
    pub(crate) fn skip_value(&mut self) -> Result<&'a str, Fault> {
        let start = self.at;
        match self.kind()? {
            Kind::Null => {
                self.null()?;
            }
            Kind::Bool => {
                self.bool()?;
            }
            Kind::Number => {
                self.number()?;
            }
            Kind::String => {
                self.string()?;
            }
            Kind::Array => {
                self.begin_array()?;
                let mut first = true;
                while self.next_item(&mut first)? {
                    self.skip_value()?;
                }
            }
            Kind::Object => {
                self.begin_object()?;
                let mut first = true;
                while self.next_field(&mut first)?.is_some() {
                    self.skip_value()?;
                }
            }
        }
        Ok(&self.text[start..self.at])
    }

    /// Checks that nothing but space follows.
    pub(crate) fn end(&mut self) -> Result<(), Fault> {
        self.space();
        if self.at == self.text.len() { Ok(()) } else { Err(self.fail("text after the end of the record")) }
    }
}
