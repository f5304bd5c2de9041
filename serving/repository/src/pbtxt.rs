//! The parser of Triton's `config.pbtxt`: a model configuration in protobuf's text format, read within
//! bounds.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use miette::Diagnostic;
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor};

use millrace_serving_core::wire::DESCRIPTORS;
use millrace_serving_core::wire::inference::ModelConfig;

/// Largest file in bytes. Triton's own examples have a few KiB.
pub const BYTES_MAX: u64 = 256 << 10;
/// Deepest nesting of messages, twice that of the schema; the parser recurses.
const DEPTH_MAX: usize = 16;

static SCHEMA: LazyLock<Option<MessageDescriptor>> =
    LazyLock::new(|| DescriptorPool::decode(DESCRIPTORS).ok()?.get_message_by_name("inference.ModelConfig"));

/// The schema of a configuration.
pub(crate) fn schema() -> Option<MessageDescriptor> {
    SCHEMA.clone()
}

/// A configuration with the lines of its fields.
#[derive(Debug)]
pub(crate) struct Parsed {
    pub config: ModelConfig,
    lines: BTreeMap<String, usize>,
}

impl Parsed {
    /// `line 3: `, or empty if the field is not at the top level of the file.
    pub(crate) fn place(&self, field: &str) -> String {
        self.lines.get(field).map(|line| format!("line {line}: ")).unwrap_or_default()
    }
}

/// Parses the text of a configuration.
///
/// # Errors
/// The line and the error there.
pub(crate) fn parse(content: &[u8]) -> Result<Parsed, String> {
    let text = std::str::from_utf8(content)
        .map_err(|error| format!("it is not UTF-8 text from byte {} on", error.valid_up_to()))?;
    let Outline { lines, lists } = outline(text)?;
    let text = with_colons(text, &lists);
    let text = text.as_str();
    let schema = schema().ok_or("this build has no schema of it")?;
    let message = DynamicMessage::parse_text_format(schema, text).map_err(|error| {
        let offset = error.labels().and_then(|mut labels| labels.next()).map_or(text.len(), |it| it.offset());
        let before = text.get(..offset).unwrap_or(text);
        let line = before.matches('\n').count() + 1;
        let reason: String = error.to_string().chars().take(300).collect();
        format!("line {line}: {reason}")
    })?;
    let config = message.transcode_to().map_err(|error| format!("it does not fit its schema: {error}"))?;
    Ok(Parsed { config, lines })
}

/// The result of the scan before parsing.
struct Outline {
    /// First line of each word at the top level, and thereby of each field.
    lines: BTreeMap<String, usize>,
    /// Byte offsets of lists that directly follow a word.
    lists: Vec<usize>,
}

/// Inserts colons before `lists`. Triton's examples write lists of messages directly after the field name
/// (`input [ { … } ]`); the parser requires a colon there.
fn with_colons(text: &str, lists: &[usize]) -> String {
    let mut whole = String::with_capacity(text.len() + lists.len());
    let mut from = 0;
    for list in lists {
        whole.push_str(text.get(from..*list).unwrap_or_default());
        whole.push(':');
        from = *list;
    }
    whole.push_str(text.get(from..).unwrap_or_default());
    whole
}

/// Scans a text for its outline.
///
/// # Errors
/// For nesting deeper than [`DEPTH_MAX`].
fn outline(text: &str) -> Result<Outline, String> {
    let bytes = text.as_bytes();
    let (mut lines, mut lists) = (BTreeMap::new(), Vec::new());
    let (mut at, mut line, mut depth, mut after_word) = (0, 1, 0usize, false);
    while let Some(byte) = bytes.get(at) {
        if *byte == b'[' && after_word {
            lists.push(at);
        }
        // Whitespace and comments may stand between a word and its list.
        if !byte.is_ascii_whitespace() && *byte != b'#' {
            after_word = false;
        }
        match byte {
            b'\n' => line += 1,
            b'#' => {
                let comment = bytes[at..].iter().position(|byte| *byte == b'\n');
                at = comment.map_or(bytes.len(), |length| at + length);
                continue;
            }
            b'"' | b'\'' => at = string_end(bytes, at),
            b'{' | b'<' => depth += 1,
            b'}' | b'>' => depth = depth.saturating_sub(1),
            b'A'..=b'Z' | b'a'..=b'z' | b'_' => {
                let word = bytes[at..].iter().position(|byte| !byte.is_ascii_alphanumeric() && *byte != b'_');
                let end = word.map_or(bytes.len(), |length| at + length);
                if depth == 0
                    && let Some(word) = text.get(at..end)
                {
                    lines.entry(word.to_owned()).or_insert(line);
                }
                at = end;
                after_word = true;
                continue;
            }
            _ => {}
        }
        if depth > DEPTH_MAX {
            return Err(format!("line {line}: messages are nested more than {DEPTH_MAX} deep"));
        }
        at += 1;
    }
    Ok(Outline { lines, lists })
}

/// The end of the string that begins at `start`: its closing quote, or the end of its line if it is not
/// closed.
fn string_end(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'\\' => at += 1,
            b'\n' => return at - 1,
            byte if *byte == bytes[start] => return at,
            _ => {}
        }
        at += 1;
    }
    bytes.len()
}

#[cfg(test)]
mod tests;
