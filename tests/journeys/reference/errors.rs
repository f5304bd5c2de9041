//! Generator of the pages of exit codes and of the messages that lead to them.

use std::collections::BTreeMap;

use super::rust::{Token, close, members};
use super::{Page, cell, page, source};

/// A page with its title and its tables. A table has a heading, the file and name of the error, and its
/// function in `src/exit.rs` or `home/src/exit.rs`.
type Errors =
    (&'static str, &'static str, &'static [(&'static str, &'static str, &'static str, &'static str)]);

const PAGES: [Errors; 6] = [
    (
        "errors/volumes.md",
        "Errors: volumes",
        &[
            ("Volumes and mounts", "datafs/src/error.rs", "Error", "datafs"),
            ("CSI driver", "deploy/csi/src/error.rs", "Error", "csi"),
        ],
    ),
    ("errors/topics.md", "Errors: topics", &[("Topics", "streams/src/error.rs", "Error", "streams")]),
    ("errors/ingest.md", "Errors: ingest", &[("Ingest", "ingest/src/error.rs", "Error", "ingest")]),
    (
        "errors/datasets.md",
        "Errors: datasets",
        &[("Datasets", "streams/src/feed/error.rs", "FeedError", "feed")],
    ),
    ("errors/training.md", "Errors: training", &[("Training", "trainer/src/error.rs", "Error", "trainer")]),
    (
        "errors/serving.md",
        "Errors: models and serving",
        &[
            ("Model server", "serving/core/src/error.rs", "Error", "serving"),
            ("Pipes", "serving/pipe/src/error.rs", "Error", "pipe"),
            ("Model bundles", "serving/bundle/src/error.rs", "Error", "bundle"),
        ],
    ),
];

const CODES_BEFORE: &str = "\
Every command ends with one of these codes. Messages go to standard error, on one line that begins with `millrace: `.

| code | name in the source | meaning |
|---:|---|---|
| 0 | | Done. |
";

const CODES_AFTER: &str = "\
| 101 | | The program met a bug and says where; please report it. |
| 128 + N | | Ended by signal N, as shells count it: 129 when its terminal closed, 130 by a second Ctrl-C or SIGTERM, 137 \
when it was killed. |

A command that is interrupted before its end has code 1. What runs until it is stopped (`up`, `serve`, `broker`, `scaler`, `mount`, \
`--follow`) ends with 0.

## Messages

| of | page |
|---|---|
";

pub(super) fn pages() -> Vec<Page> {
    let shared = source("home/src/exit.rs");
    let mut body = CODES_BEFORE.to_owned();
    let mut codes = BTreeMap::new();
    for exit in members(&shared, "enum", "Exit") {
        // The number in `Failed = 1`, after the name.
        let code = exit.rest.iter().find_map(Token::word).unwrap_or_default().to_owned();
        body += &format!("| {code} | `{}` | {} |\n", exit.name, cell(&exit.doc));
        codes.insert(exit.name, code);
    }
    body += CODES_AFTER;
    let mut exits = shared;
    exits.extend(source("src/exit.rs"));
    let mut pages = Vec::new();
    for (path, title, tables) in PAGES {
        let file = path.rsplit('/').next().unwrap_or(path);
        body += &format!("| {} | [{title}](errors/{file}) |\n", title.trim_start_matches("Errors: "));
        pages.push(page(path, title, &tables_of(tables, &exits, &codes)));
    }
    pages.push(page("errors.md", "Exit codes", &body));
    pages
}

fn tables_of(
    tables: &[(&'static str, &'static str, &'static str, &'static str)],
    exits: &[Token],
    codes: &BTreeMap<String, String>,
) -> String {
    let mut body =
        "`…` stands for names and figures. [Exit codes](../errors.md) explains the codes.\n".to_owned();
    for (heading, file, name, function) in tables {
        let exit_of = exits_in(exits, function, codes);
        body += &format!("\n## {heading}\n\n| message | code | meaning |\n|---|---|---|\n");
        for variant in members(&source(file), "enum", name) {
            let Some(message) = variant.attributes.iter().find_map(|attribute| message(attribute)) else {
                continue;
            };
            let code = exit_of.get(&variant.name).map_or(codes["Failed"].as_str(), String::as_str);
            body += &format!("| `{}` | {code} | {} |\n", cell(&message), cell(&plain(&variant.doc)));
        }
    }
    body
}

/// The message of `error("…")`, with `…` for inserted values; none if it consists of one alone.
fn message(attribute: &[Token]) -> Option<String> {
    let [Token::Word(name), Token::Mark('('), Token::Text(text), ..] = attribute else { return None };
    if name != "error" {
        return None;
    }
    let mut shown = String::new();
    let mut rest = text.as_str();
    while let Some((before, after)) = rest.split_once('{') {
        shown.push_str(before);
        shown.push('…');
        rest = after.split_once('}').map_or("", |(_, rest)| rest);
    }
    shown.push_str(rest);
    shown.contains(char::is_alphabetic).then_some(shown)
}

/// The exit code of each variant, from the arms of a function's `match`.
fn exits_in(tokens: &[Token], function: &str, codes: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let named = |pair: &[Token]| pair[0].word() == Some("fn") && pair[1].word() == Some(function);
    let at = tokens.windows(2).position(named).unwrap_or_else(|| panic!("exit.rs has no fn {function}"));
    let open = at + tokens[at..].iter().position(|token| token.is('{')).unwrap();
    let body = &tokens[open..close(tokens, open)];
    let mut found = BTreeMap::new();
    let (mut variants, mut guarded) = (Vec::new(), false);
    for (at, token) in body.iter().enumerate() {
        guarded |= token.word() == Some("if");
        let [Token::Mark(':'), Token::Mark(':'), Token::Word(second), rest @ ..] = &body[at + 1..] else {
            continue;
        };
        match token.word() {
            Some("E") => {
                // The inner variant also decides: `Infer(InferError::Invalid { .. })`.
                let nested = matches!(rest, [Token::Mark('('), Token::Word(_), ..]);
                variants.push((second.clone(), nested));
            }
            Some("Exit") => {
                let code = codes.get(second).cloned().unwrap_or_else(|| "that of its cause".to_owned());
                for (variant, nested) in variants.drain(..) {
                    let sure = !nested && !guarded;
                    let code = if sure { code.clone() } else { format!("{code} or {}", codes["Failed"]) };
                    found.entry(variant).or_insert(code);
                }
                guarded = false;
            }
            _ => {}
        }
    }
    found
}

/// A doc comment without rustdoc links.
fn plain(doc: &str) -> String {
    doc.replace("[`", "`").replace("`]", "`")
}
