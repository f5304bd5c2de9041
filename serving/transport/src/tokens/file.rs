//! The token file: one line per token, with its name, digest, models and permissions.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::Token;
use millrace_serving_core::error::quote;
use millrace_serving_core::reload::{ReadResult, setting_error};

/// Most tokens: each call is compared with all of them, at about 30 ns each.
const TOKENS_MAX: usize = 1_000;
/// Longest token name and longest model pattern, in bytes.
const NAME_BYTES_MAX: usize = 128;
/// Most model patterns of a token.
const PATTERNS_MAX: usize = 256;
/// Format of a line, for errors.
const FORM: &str = "NAME SHA256 MODEL[,MODEL…] [control] is expected";

/// The tokens of the valid lines of a file, and the errors of the others.
pub(super) fn parse(path: &Path, content: &[u8]) -> ReadResult<Vec<Arc<Token>>> {
    let mut read: ReadResult<Vec<Arc<Token>>> = ReadResult { value: Vec::new(), wrong: Vec::new() };
    let (mut names, mut digests) = (HashSet::new(), HashSet::new());
    for (number, line) in content.split(|byte| *byte == b'\n').enumerate() {
        let mut line_of = || {
            let line = std::str::from_utf8(line).map_err(|_| "is no text".to_owned())?.trim();
            if line.is_empty() || line.starts_with('#') {
                return Ok(None);
            }
            let token = parse_line(line)?;
            if names.contains(&token.name) {
                return Err(format!("{:?} appears twice", token.name));
            }
            if digests.contains(&token.digest) {
                return Err(format!("{:?} is the same as that of another line", token.name));
            }
            if names.len() == TOKENS_MAX {
                return Err(format!("exceeds the limit of {TOKENS_MAX} tokens"));
            }
            names.insert(token.name.clone());
            digests.insert(token.digest);
            Ok(Some(token))
        };
        match line_of() {
            Ok(token) => read.value.extend(token.map(Arc::new)),
            Err(reason) => {
                read.wrong.push(setting_error(
                    "tokens",
                    path,
                    &format!("line {}: the token {reason}", number + 1),
                ));
            }
        }
    }
    if read.value.is_empty() && read.wrong.is_empty() {
        read.wrong.push(setting_error("tokens", path, "has no token, so every call is refused"));
    }
    read
}

/// Parses the token of one line. Errors never repeat the second field: a user who puts the token itself there
/// would otherwise find it in a log.
pub(super) fn parse_line(line: &str) -> std::result::Result<Token, String> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let (name, digest, models, controls) = match fields[..] {
        [name, digest, models] => (name, digest, models, false),
        [name, digest, models, "control"] => (name, digest, models, true),
        [_, _, _, other] => return Err(format!("may do {}: {FORM}", quote(other))),
        _ => return Err(format!("has {} fields: {FORM}", fields.len())),
    };
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    if name.len() > NAME_BYTES_MAX || !name.bytes().all(plain) {
        return Err(format!(
            "has the name {}: at most {NAME_BYTES_MAX} letters, digits, '.', '_' and '-' are expected",
            quote(name)
        ));
    }
    let mut bytes = [0; 32];
    if hex::decode_to_slice(digest, &mut bytes).is_err() {
        return Err(format!(
            "{name:?} has no digest: the 64 hexadecimal digits of its SHA-256 are expected, not the token"
        ));
    }
    let patterns: Vec<String> = models.split(',').map(str::to_owned).collect();
    if patterns.len() > PATTERNS_MAX {
        return Err(format!("{name:?} has {} models, the limit is {PATTERNS_MAX}: use *", patterns.len()));
    }
    let is_pattern = |pattern: &&String| {
        (1..=NAME_BYTES_MAX).contains(&pattern.len())
            && pattern.bytes().all(|byte| plain(byte) || byte == b'*')
    };
    if let Some(pattern) = patterns.iter().find(|pattern| !is_pattern(pattern)) {
        return Err(format!(
            "{name:?} has the model {}: names are expected, in which * stands for any characters",
            quote(pattern)
        ));
    }
    Ok(Token {
        name: name.to_owned(),
        digest: bytes,
        models: patterns,
        controls,
        withdrawn: AtomicBool::new(false),
    })
}
