//! Generator of the metrics pages, from the declarations in the source.

use super::rust::{Token, close};
use super::{Page, cell, page, source};

/// Pages with their titles and the files that declare their metrics.
const PAGES: [(&str, &str, &[&str]); 3] = [
    (
        "metrics/volumes.md",
        "Metrics: volumes and mounts",
        &["datafs/src/mount/observe/exported.rs", "datafs/src/metrics.rs", "deploy/csi/src/metrics.rs"],
    ),
    (
        "metrics/pipeline.md",
        "Metrics: topics, ingest, training, service",
        &[
            "streams/src/metrics.rs",
            "streams/src/feed/metrics.rs",
            "streams/src/feed/flight/metrics.rs",
            "ingest/src/metrics.rs",
            "trainer/src/metrics.rs",
            "src/service/stage.rs",
        ],
    ),
    (
        "metrics/serving.md",
        "Metrics: the model server",
        &[
            "serving/core/src/metrics.rs",
            "serving/transport/src/scrape/drift.rs",
            "serving/transport/src/scrape/triton.rs",
        ],
    ),
];

const NOTE: &str = "[Monitor with Prometheus](../../how-to/monitor.md) says where they are served. A histogram has the \
                    series `_bucket`, `_sum` and `_count`.";

pub(super) fn pages() -> Vec<Page> {
    let one = |(path, title, files): &(&str, &str, &[&str])| {
        let mut body = format!("{NOTE}\n\n| metric | kind | labels | meaning |\n|---|---|---|---|\n");
        for file in *files {
            let metrics = metrics(&source(file));
            assert!(!metrics.is_empty(), "{file} declares no metric");
            for metric in metrics {
                let labels: Vec<_> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
                let help = metric.help.trim_end_matches('.');
                body += &format!(
                    "| `{}` | {} | {} | {} |\n",
                    metric.name,
                    metric.kind,
                    labels.join(", "),
                    cell(help)
                );
            }
        }
        page(path, title, &body)
    };
    PAGES.iter().map(one).collect()
}

struct Metric {
    name: String,
    help: String,
    kind: &'static str,
    labels: Vec<String>,
}

fn is_name(text: &str) -> bool {
    let plain = text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    plain && ["millrace_", "nv_"].iter().any(|start| text.starts_with(start)) && text.matches('_').count() > 1
}

/// The metrics of a file. Their help text follows the name, or follows a use of the name's constant.
fn metrics(tokens: &[Token]) -> Vec<Metric> {
    let mut found = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        let Some(name) = token.text().filter(|text| is_name(text)) else { continue };
        let used = match constant_named(tokens, at) {
            Some(constant) => {
                let uses = |i: &usize| tokens[*i].word() == Some(constant) && help(tokens, *i).is_some();
                (0..tokens.len()).find(uses)
            }
            None => Some(at),
        };
        let Some((used, (help_at, help))) = used.and_then(|used| Some((used, help(tokens, used)?))) else {
            continue;
        };
        found.push(Metric {
            name: name.to_owned(),
            help: help.to_owned(),
            kind: kind(tokens, used, help_at).unwrap_or("counter"),
            labels: labels(tokens, used, help_at),
        });
    }
    found
}

/// `X` for a literal in `const X: &str = "…"`.
fn constant_named(tokens: &[Token], at: usize) -> Option<&str> {
    let before = tokens.get(at.checked_sub(6)?..at)?;
    let is_constant =
        before[0].word() == Some("const") && before[4].word() == Some("str") && before[5].is('=');
    if is_constant { before[1].word() } else { None }
}

/// The help text after a name, with its position.
fn help(tokens: &[Token], name: usize) -> Option<(usize, &str)> {
    let at = name + 1 + usize::from(tokens.get(name + 1)?.is(','));
    Some((at, tokens.get(at)?.text().filter(|text| !is_name(text))?))
}

fn kind_of(token: &Token) -> Option<&'static str> {
    let word = token.word()?.to_lowercase();
    let kinds = [
        ("histogram", "histogram"),
        ("seconds_vec", "histogram"),
        ("gauge", "gauge"),
        ("counter", "counter"),
    ];
    kinds.into_iter().find(|(part, _)| word.contains(part)).map(|(_, kind)| kind)
}

/// The kind of a metric: from the call that it is an argument of, else from the tokens that follow.
fn kind(tokens: &[Token], name: usize, help: usize) -> Option<&'static str> {
    let before = tokens[..name]
        .iter()
        .rev()
        .take(8)
        .take_while(|token| !matches!(token, Token::Mark(';' | ',' | '}')));
    let after =
        tokens[help..].iter().take(24).take_while(|token| token.text().is_none_or(|text| !is_name(text)));
    before.filter_map(kind_of).next().or_else(|| after.filter_map(kind_of).next())
}

/// The labels of a metric. They are an array after its help text, in the call or in the next statement.
/// Otherwise they come from the closure that the metric is passed to, or from the labels that the file adds
/// to all of its metrics.
fn labels(tokens: &[Token], name: usize, help: usize) -> Vec<String> {
    let callee =
        tokens[..name].iter().rev().find(|token| !token.is('(') && !token.is('!')).and_then(Token::word);
    if let Some(closure) = callee.and_then(|callee| closure(tokens, callee)) {
        return array_in(tokens, closure).unwrap_or_default();
    }
    // To the end of the call; for options that are passed on, to the end of the next statement.
    let statements = if callee == Some("new") { 2 } else { 1 };
    let ends = tokens.iter().enumerate().skip(help).filter(|(_, token)| token.is(';')).map(|(at, _)| at);
    let end = ends.take(statements).last().unwrap_or(tokens.len());
    let next = tokens[help..end].iter().position(|token| token.text().is_some_and(is_name));
    let end = next.map_or(end, |next| help + next);
    if let Some(labels) = array_in(tokens, &tokens[help..end]) {
        return labels;
    }
    let of_file =
        tokens.windows(2).any(|pair| pair[0].word() == Some("const") && pair[1].word() == Some("LABELS"));
    if of_file {
        return array(tokens, "LABELS").unwrap_or_default();
    }
    // Labels that the code adds to each sample: `label("mount", …)`, and `op` for samples that have one.
    let by_hand = |triple: &[Token]| match triple {
        [Token::Word(word), Token::Mark('('), Token::Text(text)] if word == "label" && text != "op" => {
            Some(text.clone())
        }
        _ => None,
    };
    let mut labels: Vec<String> = tokens.windows(3).filter_map(by_hand).collect();
    if !labels.is_empty() && has_op(&tokens[help..end]) {
        labels.push("op".to_owned());
    }
    labels
}

/// Whether a sample is added for an operation: `add(Some(&op.op), …)`.
fn has_op(tokens: &[Token]) -> bool {
    tokens.windows(3).any(|t| t[0].word() == Some("op") && t[1].is('.') && t[2].word() == Some("op"))
}

/// The tokens of `let NAME = |…| …;`.
fn closure<'t>(tokens: &'t [Token], name: &str) -> Option<&'t [Token]> {
    let starts =
        |t: &[Token]| t[0].word() == Some("let") && t[1].word() == Some(name) && t[2].is('=') && t[3].is('|');
    let at = tokens.windows(4).position(starts)?;
    let end = tokens[at..].iter().position(|token| token.is(';'))?;
    Some(&tokens[at..at + end])
}

/// The first array of texts in `part`: `&["a", "b"]`, or the name of a constant array.
fn array_in(tokens: &[Token], part: &[Token]) -> Option<Vec<String>> {
    part.iter().enumerate().filter(|(_, token)| token.is('&')).find_map(|(at, _)| match part.get(at + 1)? {
        Token::Mark('[') => Some(texts(&part[at + 1..=close(part, at + 1)])),
        Token::Word(name) => array(tokens, name),
        _ => None,
    })
}

/// The texts of `const NAME: [&str; N] = […]`.
fn array(tokens: &[Token], name: &str) -> Option<Vec<String>> {
    let at =
        tokens.windows(2).position(|pair| pair[0].word() == Some("const") && pair[1].word() == Some(name))?;
    let start = at + tokens[at..].iter().position(|token| token.is('='))? + 1;
    tokens[start].is('[').then(|| texts(&tokens[start..=close(tokens, start)]))
}

fn texts(tokens: &[Token]) -> Vec<String> {
    tokens.iter().filter_map(Token::text).map(str::to_owned).collect()
}
