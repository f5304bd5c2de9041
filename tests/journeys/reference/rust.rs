//! A minimal reader of Rust source for declarations: tokens, fields of structs, variants of enums.

/// A piece of source text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Token {
    /// A name, keyword or number.
    Word(String),
    /// The value of a string literal.
    Text(String),
    /// A line of a doc comment.
    Doc(String),
    /// Any other character.
    Mark(char),
}

impl Token {
    pub(super) fn word(&self) -> Option<&str> {
        match self {
            Token::Word(word) => Some(word),
            _ => None,
        }
    }

    pub(super) fn text(&self) -> Option<&str> {
        match self {
            Token::Text(text) => Some(text),
            _ => None,
        }
    }

    pub(super) fn is(&self, mark: char) -> bool {
        *self == Token::Mark(mark)
    }
}

/// A field of a struct or a variant of an enum.
#[derive(Debug, Clone)]
pub(super) struct Member {
    pub(super) name: String,
    /// Its doc comment, on one line.
    pub(super) doc: String,
    /// Its type, or the fields of a variant.
    pub(super) rest: Vec<Token>,
    /// Its attributes, without `#`.
    pub(super) attributes: Vec<Vec<Token>>,
}

/// The tokens of a file, except its tests.
pub(super) fn tokens(source: &str) -> Vec<Token> {
    let source = source.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let chars: Vec<char> = source.chars().collect();
    let mut tokens = Vec::new();
    let mut at = 0;
    while at < chars.len() {
        let c = chars[at];
        let next = chars.get(at + 1).copied().unwrap_or(' ');
        if c == '/' && next == '/' {
            let end = (at..chars.len()).find(|i| chars[*i] == '\n').unwrap_or(chars.len());
            let line: String = chars[at..end].iter().collect();
            if let Some(doc) = line.strip_prefix("///") {
                tokens.push(Token::Doc(doc.trim().to_owned()));
            }
            at = end;
        } else if c == '"' {
            let (text, end) = string(&chars, at + 1);
            tokens.push(Token::Text(text));
            at = end;
        } else if c == '\'' && (next == '\\' || chars.get(at + 2) == Some(&'\'')) {
            // A character literal; otherwise a lifetime, whose name follows as a word.
            let body = at + if next == '\\' { 3 } else { 2 };
            at = (body..chars.len()).find(|i| chars[*i] == '\'').map_or(chars.len(), |end| end + 1);
        } else if c.is_alphanumeric() || c == '_' {
            let end = (at..chars.len()).find(|i| !chars[*i].is_alphanumeric() && chars[*i] != '_');
            let end = end.unwrap_or(chars.len());
            let word: String = chars[at..end].iter().collect();
            at = end;
            let hashes = chars[at..].iter().take_while(|c| **c == '#').count();
            if word == "r" && chars.get(at + hashes) == Some(&'"') {
                let (text, end) = raw_string(&chars, at + hashes + 1, hashes);
                tokens.push(Token::Text(text));
                at = end;
            } else {
                tokens.push(Token::Word(word));
            }
        } else {
            if !c.is_whitespace() {
                tokens.push(Token::Mark(c));
            }
            at += 1;
        }
    }
    tokens
}

/// The value of a literal that begins at `at`, and the position after its closing quote.
fn string(chars: &[char], mut at: usize) -> (String, usize) {
    let mut text = String::new();
    while at < chars.len() && chars[at] != '"' {
        if chars[at] != '\\' {
            text.push(chars[at]);
            at += 1;
            continue;
        }
        match chars.get(at + 1) {
            Some('n') => text.push('\n'),
            Some('\n') => {
                at += 2;
                while chars.get(at).is_some_and(|c| c.is_whitespace()) {
                    at += 1;
                }
                continue;
            }
            Some(other) => text.push(*other),
            None => {}
        }
        at += 2;
    }
    (text, at + 1)
}

fn raw_string(chars: &[char], start: usize, hashes: usize) -> (String, usize) {
    let ends = |at: usize| {
        chars[at] == '"' && chars[at + 1..].iter().take(hashes).filter(|c| **c == '#').count() == hashes
    };
    let end = (start..chars.len()).find(|at| ends(*at)).unwrap_or(chars.len());
    (chars[start..end].iter().collect(), end + 1 + hashes)
}

/// The position of the mark that closes the one at `open`.
pub(super) fn close(tokens: &[Token], open: usize) -> usize {
    let mut depth = 0usize;
    for (at, token) in tokens.iter().enumerate().skip(open) {
        match token {
            Token::Mark('(' | '[' | '{') => depth += 1,
            Token::Mark(')' | ']' | '}') => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at;
        }
    }
    panic!("no end of what opens at token {open}: {:?}", &tokens[open..tokens.len().min(open + 8)]);
}

/// The position of the first of `marks` from `from` on, outside brackets; the end if there is none.
fn outside(tokens: &[Token], from: usize, marks: &[char]) -> usize {
    let (mut at, mut angles) = (from, 0i32);
    while at < tokens.len() {
        match &tokens[at] {
            Token::Mark(mark) if angles == 0 && marks.contains(mark) => return at,
            Token::Mark('(' | '[' | '{') => at = close(tokens, at),
            Token::Mark('<') => angles += 1,
            Token::Mark('>') => angles -= 1,
            _ => {}
        }
        at += 1;
    }
    tokens.len()
}

/// The members of `struct NAME { … }` or `enum NAME { … }`.
pub(super) fn members(tokens: &[Token], kind: &str, name: &str) -> Vec<Member> {
    let found =
        tokens.windows(2).position(|pair| pair[0].word() == Some(kind) && pair[1].word() == Some(name));
    let found = found.unwrap_or_else(|| panic!("the source has no {kind} {name}"));
    let open = outside(tokens, found + 2, &['{']);
    members_between(&tokens[open + 1..close(tokens, open)])
}

/// The fields of a variant with braces.
pub(super) fn fields(variant: &Member) -> Vec<Member> {
    members_between(&variant.rest[1..variant.rest.len() - 1])
}

fn members_between(tokens: &[Token]) -> Vec<Member> {
    let (mut found, mut at) = (Vec::new(), 0);
    let (mut docs, mut attributes) = (Vec::new(), Vec::new());
    while at < tokens.len() {
        match &tokens[at] {
            Token::Doc(line) => docs.push(line.clone()),
            Token::Mark('#') => {
                let end = close(tokens, at + 1);
                attributes.push(tokens[at + 2..end].to_vec());
                at = end;
            }
            Token::Word(word) if word == "pub" && tokens[at + 1].is('(') => at = close(tokens, at + 1),
            Token::Word(word) if word == "pub" => {}
            Token::Word(name) => {
                let end = outside(tokens, at + 1, &[',']);
                let start = at + 1 + usize::from(tokens.get(at + 1).is_some_and(|token| token.is(':')));
                found.push(Member {
                    name: name.clone(),
                    doc: std::mem::take(&mut docs).join(" ").trim().to_owned(),
                    rest: tokens[start..end].to_vec(),
                    attributes: std::mem::take(&mut attributes),
                });
                at = end;
            }
            _ => {}
        }
        at += 1;
    }
    found
}

/// Tokens as source text without spaces, except one after each comma.
pub(super) fn shown(tokens: &[Token]) -> String {
    let one = |token: &Token| match token {
        Token::Word(word) => word.clone(),
        Token::Text(text) => format!("{text:?}"),
        Token::Doc(_) => String::new(),
        Token::Mark(',') => ", ".to_owned(),
        Token::Mark(mark) => mark.to_string(),
    };
    tokens.iter().map(one).collect()
}

/// The value of `const NAME: … = INTEGER` or `… = INTEGER << INTEGER`.
pub(super) fn constant(tokens: &[Token], name: &str) -> Option<u64> {
    let at =
        tokens.windows(2).position(|pair| pair[0].word() == Some("const") && pair[1].word() == Some(name))?;
    let start = at + tokens[at..].iter().position(|token| token.is('='))? + 1;
    let integer = |token: &Token| {
        let digits = token.word()?.replace('_', "");
        digits.trim_end_matches(char::is_alphabetic).parse::<u64>().ok()
    };
    let first = integer(&tokens[start])?;
    match tokens.get(start + 1..start + 4) {
        Some([a, b, shift]) if a.is('<') && b.is('<') => Some(first << integer(shift)?),
        _ => Some(first),
    }
}
