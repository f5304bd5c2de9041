//! Parser of filters.

use super::filter::{Condition, Filter, Literal, Operand};
use super::token::{Token, error, tokens};
use crate::feed::error::{FeedError, Result};

/// Longest text of a filter, in bytes.
const TEXT_BYTES_MAX: usize = 64 << 10;
/// Most parentheses and negations around one comparison: bounds recursion.
const DEPTH_MAX: usize = 64;
/// What stands where a comparison is expected.
const EXAMPLE: &str = "a comparison is expected, for example label != 3";

struct Parser<'a> {
    text: &'a str,
    /// Tokens with their places, in reverse: the next one is the last. [`Token::End`] is never taken.
    tokens: Vec<(usize, Token)>,
    columns: Vec<String>,
    depth: usize,
}

pub(super) fn parse(text: &str) -> Result<Filter> {
    if text.len() > TEXT_BYTES_MAX {
        let bytes = text.len();
        return Err(FeedError::invalid(format!(
            "where: {bytes} bytes; at most {TEXT_BYTES_MAX} are possible"
        )));
    }
    let mut tokens = tokens(text)?;
    tokens.reverse();
    let mut parser = Parser { text, tokens, columns: Vec::new(), depth: 0 };
    let condition = parser.any()?;
    match parser.peek() {
        Token::End => Ok(Filter { columns: parser.columns, condition }),
        _ => Err(parser.error("`and`, `or` or the end is expected")),
    }
}

impl Parser<'_> {
    fn peek(&self) -> &Token {
        self.tokens.last().map_or(&Token::End, |(_, token)| token)
    }

    fn take(&mut self) -> Token {
        match self.tokens.pop() {
            Some((at, Token::End)) => {
                self.tokens.push((at, Token::End));
                Token::End
            }
            Some((_, token)) => token,
            None => Token::End,
        }
    }

    fn error(&self, reason: &str) -> FeedError {
        error(self.text, self.tokens.last().map_or(self.text.len(), |(at, _)| *at), reason)
    }

    /// Whether the next token is a word of the language, which is taken.
    fn word(&mut self, word: &str) -> bool {
        let found = matches!(self.peek(), Token::Word(next) if next.eq_ignore_ascii_case(word));
        if found {
            self.take();
        }
        found
    }

    fn expect(&mut self, token: &Token, reason: &str) -> Result<()> {
        if self.peek() != token {
            return Err(self.error(reason));
        }
        self.take();
        Ok(())
    }

    fn any(&mut self) -> Result<Condition> {
        let mut parts = vec![self.all()?];
        while self.word("or") {
            parts.push(self.all()?);
        }
        let flat = parts.into_iter().flat_map(|part| match part {
            Condition::Any(inner) => inner,
            part => vec![part],
        });
        Ok(joined(flat.collect(), Condition::Any))
    }

    fn all(&mut self) -> Result<Condition> {
        let mut parts = vec![self.one()?];
        while self.word("and") {
            parts.push(self.one()?);
        }
        let flat = parts.into_iter().flat_map(|part| match part {
            Condition::All(inner) => inner,
            part => vec![part],
        });
        Ok(joined(flat.collect(), Condition::All))
    }

    fn one(&mut self) -> Result<Condition> {
        let is_not = self.word("not");
        if !is_not && *self.peek() != Token::Open {
            return self.comparison();
        }
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(
                self.error("too many parentheses and negations inside each other; at most 64 are possible")
            );
        }
        let condition = if is_not {
            Condition::Not(Box::new(self.one()?))
        } else {
            self.take();
            let inner = self.any()?;
            self.expect(&Token::Close, "`)` is expected")?;
            inner
        };
        self.depth -= 1;
        Ok(condition)
    }

    fn comparison(&mut self) -> Result<Condition> {
        let left = self.operand()?;
        if let &Token::Compare(comparison) = self.peek() {
            self.take();
            let right = self.operand()?;
            if matches!((&left, &right), (Operand::Literal(_), Operand::Literal(_))) {
                return Err(self.error(
                    "the comparison names no column; columns are written as they are or in double quotes, texts in \
                     single quotes",
                ));
            }
            return Ok(Condition::Compare(left, comparison, right));
        }
        let Operand::Column(column) = left else {
            return Err(self.error("a comparison with a column is expected, for example = label"));
        };
        if self.word("is") {
            let is_not = self.word("not");
            if !self.word("null") {
                return Err(self.error("`null` is expected; compare other values with = and !="));
            }
            return Ok(negated(is_not, Condition::Null(column)));
        }
        let is_not = self.word("not");
        if self.word("in") {
            return Ok(negated(is_not, Condition::In(column, self.list()?)));
        }
        if is_not {
            return Err(self.error("`in` is expected"));
        }
        Ok(Condition::Flag(column))
    }

    fn list(&mut self) -> Result<Vec<Literal>> {
        self.expect(&Token::Open, "`(` is expected")?;
        let mut literals = Vec::new();
        loop {
            match self.operand()? {
                Operand::Literal(literal) => literals.push(literal),
                Operand::Column(_) => {
                    return Err(self.error("a list has literals only; put texts in single quotes"));
                }
            }
            match self.peek() {
                Token::Comma => self.take(),
                _ => break,
            };
        }
        self.expect(&Token::Close, "`,` or `)` is expected")?;
        Ok(literals)
    }

    fn operand(&mut self) -> Result<Operand> {
        let name = match self.peek().clone() {
            Token::Literal(literal) => {
                self.take();
                return Ok(Operand::Literal(literal));
            }
            Token::Quoted(name) => name,
            Token::Word(word) => match word.to_ascii_lowercase().as_str() {
                flag @ ("true" | "false") => {
                    self.take();
                    return Ok(Operand::Literal(Literal::Flag(flag == "true")));
                }
                "null" => {
                    return Err(self.error("nothing is equal to null; write `is null` or `is not null`"));
                }
                "and" | "or" | "not" | "in" | "is" => return Err(self.error(EXAMPLE)),
                _ => word,
            },
            _ => return Err(self.error(EXAMPLE)),
        };
        self.take();
        let known = self.columns.iter().position(|column| *column == name);
        Ok(Operand::Column(known.unwrap_or_else(|| {
            self.columns.push(name);
            self.columns.len() - 1
        })))
    }
}

fn negated(is_not: bool, condition: Condition) -> Condition {
    if is_not { Condition::Not(Box::new(condition)) } else { condition }
}

fn joined(mut parts: Vec<Condition>, join: fn(Vec<Condition>) -> Condition) -> Condition {
    match parts.pop() {
        Some(only) if parts.is_empty() => only,
        Some(last) => {
            parts.push(last);
            join(parts)
        }
        None => join(parts),
    }
}
