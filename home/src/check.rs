//! All problems of a TOML file at once, each with its line.
//!
//! A parser stops at the first error. [`read`] takes the wrong entry out and goes on, so that one run reports every
//! unknown key and wrong type. [`read_verified`] does so for bounds, too. Other checks of the values follow in the caller,
//! which finds their lines in [`Places`].

use std::collections::BTreeSet;
use std::ops::Range;

use serde::{Serialize, de::DeserializeOwned};
use toml::Spanned;
use toml::de::{DeTable, DeValue, Deserializer};

use crate::settings::{self, without_value};

/// Most wrong entries that are taken out of one file, and most errors of syntax that are reported.
const WRONG_MAX: usize = 50;
/// Most keys and elements of lists in a file.
const ENTRIES_MAX: usize = 20_000;
/// Longest path of a key, in bytes. Each entry keeps its path.
const PATH_BYTES_MAX: usize = 1024;

/// How much a problem matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// A command that uses the setting refuses it.
    Error,
    /// The setting is accepted, but is probably not what was meant.
    Warning,
}

/// A problem of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// The line, from 1; none for a problem without a place.
    pub line: Option<usize>,
    /// The column in bytes, from 1.
    pub column: Option<usize>,
    /// The key, such as `ingest.jobs[0].topic`.
    pub key: Option<String>,
    /// How much it matters.
    pub severity: Severity,
    /// What is wrong, and what to do. Values are left out, which may be misplaced secrets.
    pub message: String,
}

/// A file as far as it could be read.
#[derive(Debug)]
pub struct Checked<S> {
    /// The settings without the wrong entries. None for a file that is no TOML, or whose errors have no entry.
    pub settings: Option<S>,
    /// Problems of the syntax, or of keys and types, in the order of the file.
    pub problems: Vec<Problem>,
    /// The lines of the keys.
    pub places: Places,
}

/// Reads the text of a file as tables of type `S`. Takes time in proportion to the text and to the number of wrong
/// entries, of which at most 50 are reported. A file with more than 20,000 entries, or with names of more than 1,024
/// bytes, is one problem.
pub fn read<S: DeserializeOwned>(text: &str) -> Checked<S> {
    read_verified(text, |_| Ok(()))
}

/// [`read`], then the problems that `verify` finds, one at a time, in messages that begin with a key. That key is taken out
/// as well, so that its default applies, and `verify` is called again. A message that names another key which was taken
/// out is left out, since the value may be right with a right one there. For a key without a default, its table is taken
/// out. Ends at a message without a key of the file, and at a table without a default.
pub fn read_verified<S: DeserializeOwned>(
    text: &str,
    mut verify: impl FnMut(&mut S) -> Result<(), String>,
) -> Checked<S> {
    let unread = |problems: Vec<Problem>| Checked { settings: None, problems, places: Places::default() };
    if let Err((line, reason)) = settings::check_size(text) {
        return unread(vec![Problem::new(line.map(|line| (line, 1)), None, reason)]);
    }
    let (table, errors) = DeTable::parse_recoverable(text);
    let lines = Lines::of(text);
    if !errors.is_empty() {
        // One mistake may fail many times: each line tells each message once.
        let mut told = BTreeSet::new();
        let mut problems = Vec::new();
        let mut more = 0;
        for error in &errors {
            let at = error.span().map(|span| lines.at(span.start));
            let message = without_value(error.message());
            if !told.insert((at.map(|(line, _)| line), message.clone())) {
                continue;
            }
            if problems.len() < WRONG_MAX {
                problems.push(Problem::new(at, None, message));
            } else {
                more += 1;
            }
        }
        sort(&mut problems);
        if more > 0 {
            problems.push(Problem::new(None, None, format!("and {more} more errors of syntax")));
        }
        return unread(problems);
    }
    let table = table.into_inner();
    if let Some((span, reason)) = out_of_bounds(&table, "", &mut 0) {
        return unread(vec![Problem::new(Some(lines.at(span.start)), None, reason)]);
    }
    let (mut wrong, mut problems, mut settings) = (BTreeSet::<String>::new(), Vec::new(), None);
    let mut refused = 0;
    // What was taken out last for `verify`.
    let mut last = String::new();
    let whole = Places::of(&table, &lines, &wrong);
    loop {
        let rest = Spanned::new(0..0, without(&table, "", &wrong));
        match S::deserialize(Deserializer::from(rest)) {
            Ok(mut read) => {
                let verified = verify(&mut read);
                settings = Some(read);
                let Err(message) = verified else { break };
                let places = Places::of(&table, &lines, &wrong);
                let key = key_of(&message);
                let shown = places.shown(key).cloned();
                if !wrong.iter().any(|earlier| names(&message, earlier)) {
                    let problem = if shown.is_some() {
                        places.problem(key, &message)
                    } else {
                        Problem::new(None, None, &message)
                    };
                    problems.push(problem);
                }
                refused += 1;
                match shown {
                    Some(shown) if refused < WRONG_MAX && wrong.insert(shown.clone()) => last = shown,
                    _ => break,
                }
            }
            // The file needs an entry that `verify` has refused, but maybe not the table around it.
            Err(_) if refused > 0 => match table_of(&last) {
                Some(table) => {
                    last = table.to_owned();
                    wrong.insert(last.clone());
                }
                None => break,
            },
            Err(error) => {
                let entry = error.span().and_then(|span| whole.entry_of(&span, &wrong));
                let at = entry.map(|entry| (entry.line, entry.column));
                let key = entry.map(|entry| entry.shown.clone());
                // A field is missing because its value was wrong, which is a problem already.
                let is_taken_out = missing_field(error.message())
                    .is_some_and(|field| wrong.contains(&keyed(key.as_deref().unwrap_or_default(), field)));
                if !is_taken_out {
                    problems.push(Problem::new(at, key.clone(), without_value(error.message())));
                }
                match key {
                    Some(key) if problems.len() < WRONG_MAX && wrong.insert(key.clone()) => {}
                    Some(_) if problems.len() >= WRONG_MAX => {
                        let reason = format!("more may follow after these {WRONG_MAX}: correct them first");
                        problems.push(Problem::new(None, None, reason));
                        break;
                    }
                    _ => break,
                }
            }
        }
    }
    sort(&mut problems);
    let places = Places::of(&table, &lines, &wrong);
    Checked { settings, problems, places }
}

/// The key with which a message begins; empty if it begins with something else.
fn key_of(message: &str) -> &str {
    let is_of_key = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
    message.split(|c: char| !is_of_key(c)).next().unwrap_or_default().trim_end_matches('.')
}

/// The path of the table or list around an entry; none for a key of the file itself.
fn table_of(shown: &str) -> Option<&str> {
    // Keys that are not bare may have any characters.
    if shown.contains('"') {
        return None;
    }
    shown.rfind(['.', '[']).and_then(|at| shown.get(..at))
}

/// The field that a table lacks, by the message of Serde.
fn missing_field(message: &str) -> Option<&str> {
    message.strip_prefix("missing field `")?.strip_suffix('`')
}

/// Whether a message names a key, with or without its tables.
fn names(message: &str, key: &str) -> bool {
    let last = key.rsplit('.').next().unwrap_or(key);
    let is_of_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    message.split(|c: char| !is_of_word(c)).any(|word| word == last)
}

impl Problem {
    /// An error at a line and column, in the entry of a key.
    pub fn new(at: Option<(usize, usize)>, key: Option<String>, message: impl Into<String>) -> Problem {
        Problem {
            line: at.map(|(line, _)| line),
            column: at.map(|(_, column)| column),
            key,
            severity: Severity::Error,
            message: message.into(),
        }
    }

    /// The same as a warning.
    #[must_use]
    pub fn as_warning(self) -> Problem {
        Problem { severity: Severity::Warning, ..self }
    }
}

/// Sorts problems by line and column; those without a line are last.
pub fn sort(problems: &mut [Problem]) {
    problems.sort_by_key(|problem| (problem.line.is_none(), problem.line, problem.column));
}

/// The places of all entries of a file.
#[derive(Debug, Default)]
pub struct Places {
    entries: Vec<Entry>,
}

/// One key, or one element of a list.
#[derive(Debug)]
struct Entry {
    /// Path in the settings, where wrong elements of lists are left out.
    path: String,
    /// Path in the file.
    shown: String,
    line: usize,
    column: usize,
    key: Option<Range<usize>>,
    value: Range<usize>,
}

impl Places {
    fn of(table: &DeTable<'_>, lines: &Lines, wrong: &BTreeSet<String>) -> Places {
        let mut places = Places::default();
        places.enter(table, lines, wrong, "", "");
        places
    }

    fn enter(
        &mut self,
        table: &DeTable<'_>,
        lines: &Lines,
        wrong: &BTreeSet<String>,
        path: &str,
        shown: &str,
    ) {
        for (key, value) in table {
            let shown = keyed(shown, key.get_ref());
            if wrong.contains(&shown) {
                continue;
            }
            let path = keyed(path, key.get_ref());
            self.add(Some(key.span()), value, lines, wrong, path, shown);
        }
    }

    fn add(
        &mut self,
        key: Option<Range<usize>>,
        value: &Spanned<DeValue<'_>>,
        lines: &Lines,
        wrong: &BTreeSet<String>,
        path: String,
        shown: String,
    ) {
        let begin = key.as_ref().map_or(value.span().start, |key| key.start);
        let (line, column) = lines.at(begin);
        match value.get_ref() {
            DeValue::Table(table) => self.enter(table, lines, wrong, &path, &shown),
            DeValue::Array(list) => {
                let mut kept = 0;
                for (at, element) in list.iter().enumerate() {
                    let shown = format!("{shown}[{at}]");
                    if !wrong.contains(&shown) {
                        self.add(None, element, lines, wrong, format!("{path}[{kept}]"), shown);
                        kept += 1;
                    }
                }
            }
            _ => {}
        }
        self.entries.push(Entry { path, shown, line, column, key, value: value.span() });
    }

    /// The entry at which a parser found an error: the one that begins there, else the innermost around it. It had not
    /// seen the wrong ones.
    fn entry_of(&self, span: &Range<usize>, wrong: &BTreeSet<String>) -> Option<&Entry> {
        if span.is_empty() {
            return None;
        }
        let is_at = |entry: &&Entry| entry.key.as_ref() == Some(span) || entry.value == *span;
        // The header of a list of tables is the place of the list and of its first element.
        let is_seen = |entry: &&Entry| !wrong.contains(&entry.shown);
        let at = self.entries.iter().filter(is_seen).filter(is_at).max_by_key(|entry| entry.shown.len());
        at.or_else(|| {
            let holds = |entry: &&Entry| entry.value.start <= span.start && span.end <= entry.value.end;
            self.entries.iter().filter(is_seen).filter(holds).min_by_key(|entry| entry.value.len())
        })
    }

    /// Whether the file has the entry with a path of the settings.
    pub fn has(&self, path: &str) -> bool {
        self.entries.iter().any(|entry| entry.path == path)
    }

    /// The path in the file of the entry with a path of the settings.
    fn shown(&self, path: &str) -> Option<&String> {
        self.entries.iter().find(|entry| entry.path == path).map(|entry| &entry.shown)
    }

    /// A problem of the entry with a path of the settings, such as `ingest.jobs[0].topic`. An absent key has the place
    /// of its table.
    pub fn problem(&self, path: &str, message: impl Into<String>) -> Problem {
        let mut known = path;
        loop {
            if let Some(entry) = self.entries.iter().find(|entry| entry.path == known) {
                let key = format!("{}{}", entry.shown, &path[known.len()..]);
                return Problem::new(Some((entry.line, entry.column)), Some(key), message);
            }
            match known.rfind(['.', '[']) {
                Some(at) => known = &known[..at],
                None => return Problem::new(None, Some(path.to_owned()), message),
            }
        }
    }
}

/// The place and the reason, for a table with more entries or a longer path than are kept. Counts in `entries`.
fn out_of_bounds(table: &DeTable<'_>, path: &str, entries: &mut usize) -> Option<(Range<usize>, String)> {
    table.iter().find_map(|(key, value)| {
        let path = keyed(path, key.get_ref());
        if path.len() > PATH_BYTES_MAX {
            return Some((
                key.span(),
                format!("a key's path has at most {PATH_BYTES_MAX} bytes: shorten it"),
            ));
        }
        value_out_of_bounds(value, &path, entries)
    })
}

fn value_out_of_bounds(
    value: &Spanned<DeValue<'_>>,
    path: &str,
    entries: &mut usize,
) -> Option<(Range<usize>, String)> {
    *entries += 1;
    if *entries > ENTRIES_MAX {
        let reason = format!("a file has at most {ENTRIES_MAX} keys and elements of lists: split it");
        return Some((value.span(), reason));
    }
    match value.get_ref() {
        DeValue::Table(table) => out_of_bounds(table, path, entries),
        DeValue::Array(list) => list.iter().find_map(|value| value_out_of_bounds(value, path, entries)),
        _ => None,
    }
}

/// The entries of a table that are not wrong.
fn without<'i>(table: &DeTable<'i>, path: &str, wrong: &BTreeSet<String>) -> DeTable<'i> {
    let mut rest = DeTable::new();
    for (key, value) in table {
        let path = keyed(path, key.get_ref());
        if !wrong.contains(&path) {
            rest.insert(key.clone(), right_part(value, &path, wrong));
        }
    }
    rest
}

/// A value without the wrong entries in it.
fn right_part<'i>(
    value: &Spanned<DeValue<'i>>,
    path: &str,
    wrong: &BTreeSet<String>,
) -> Spanned<DeValue<'i>> {
    let inner = match value.get_ref() {
        DeValue::Table(table) => DeValue::Table(without(table, path, wrong)),
        DeValue::Array(list) => {
            let elements = list.iter().enumerate().map(|(at, value)| (format!("{path}[{at}]"), value));
            let right = elements.filter(|(path, _)| !wrong.contains(path));
            DeValue::Array(right.map(|(path, value)| right_part(value, &path, wrong)).collect())
        }
        other => other.clone(),
    };
    Spanned::new(value.span(), inner)
}

/// The path of a key in a table.
fn keyed(path: &str, key: &str) -> String {
    let is_bare = !key.is_empty() && key.chars().all(|c| c.is_alphanumeric() || "_-".contains(c));
    let key = if is_bare { key.to_owned() } else { format!("{key:?}") };
    if path.is_empty() { key } else { format!("{path}.{key}") }
}

/// The starts of the lines of a text, in bytes.
struct Lines(Vec<usize>);

impl Lines {
    fn of(text: &str) -> Lines {
        let after = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at + 1);
        Lines(std::iter::once(0).chain(after).collect())
    }

    /// Line and column, from 1.
    fn at(&self, byte: usize) -> (usize, usize) {
        let line = self.0.partition_point(|start| *start <= byte);
        let start = self.0.get(line.saturating_sub(1)).copied().unwrap_or_default();
        (line, byte - start + 1)
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Default, Deserialize)]
    #[serde(deny_unknown_fields, default)]
    struct Tables {
        one: One,
        jobs: Vec<Job>,
    }

    #[derive(Debug, Default, Deserialize)]
    #[serde(deny_unknown_fields, default)]
    struct One {
        number: u32,
        text: String,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Job {
        name: String,
        rows: Option<u32>,
    }

    /// Line, key and message of each problem.
    fn problems(text: &str) -> Vec<(usize, String, String)> {
        let found = read::<Tables>(text).problems.into_iter();
        found.map(|one| (one.line.unwrap(), one.key.unwrap_or_default(), one.message)).collect()
    }

    #[test]
    fn every_unknown_key_and_wrong_type_is_reported_with_its_line() {
        let text = "[one]\nnumbr = 1\ntext = 5\n[two]\nx = 1\n[[jobs]]\nrows = 1\n[[jobs]]\nname = \"a\"\n\
                    rows = \"b\"\n";
        let found = problems(text);
        let places: Vec<(usize, &str)> = found.iter().map(|(line, key, _)| (*line, key.as_str())).collect();
        assert_eq!(
            places,
            [(2, "one.numbr"), (3, "one.text"), (4, "two"), (6, "jobs[0]"), (10, "jobs[1].rows")],
            "{found:?}"
        );
        assert!(found[0].2.contains("did you mean `number`?"), "{found:?}");
        assert!(found[3].2.contains("missing field `name`"), "{found:?}");
    }

    #[test]
    fn settings_keep_what_is_right_and_the_places_of_what_is_left() {
        let text = "[[jobs]]\nrows = 1\n[[jobs]]\nname = \"a\"\nwrong = 1\n[one]\nnumber = 7\n";
        let checked = read::<Tables>(text);
        let settings = checked.settings.unwrap();
        assert_eq!((settings.one.number, settings.one.text.as_str()), (7, ""));
        assert_eq!((settings.jobs.len(), settings.jobs[0].name.as_str()), (1, "a"));
        assert_eq!(settings.jobs[0].rows, None);
        let problem = checked.places.problem("jobs[0].name", "taken");
        assert_eq!((problem.line, problem.key.as_deref()), (Some(4), Some("jobs[1].name")));
        let problem = checked.places.problem("one.limits.rows", "too many");
        assert_eq!((problem.line, problem.key.as_deref()), (Some(6), Some("one.limits.rows")));
        assert_eq!(checked.places.problem("three.x", "unset").line, None);
    }

    #[test]
    fn bounds_are_verified_again_without_the_wrong_entries() {
        // The text may have as many bytes as the number says.
        let verify = |tables: &mut Tables| match &tables.one {
            One { number: 100.., .. } => Err("one.number = 100: allowed are 0 to 99".to_owned()),
            One { number, text } if text.len() > *number as usize => {
                Err(format!("one.text has {} bytes, more than number = {number}", text.len()))
            }
            _ if tables.jobs.iter().any(|job| job.name.is_empty()) => Err("a job has no name".to_owned()),
            _ => Ok(()),
        };
        let keys = |text: &str| {
            let found = read_verified(text, verify).problems.into_iter();
            found.map(|one| (one.line.unwrap_or(0), one.key.unwrap_or_default())).collect::<Vec<_>>()
        };
        let at = |line: usize, key: &str| (line, key.to_owned());
        assert!(keys("[one]\nnumber = 3\ntext = \"abc\"\n").is_empty());
        assert_eq!(keys("[one]\nnumber = 2\ntext = \"abc\"\n"), [at(3, "one.text")]);
        // The text may be right with another number.
        let text = "[[jobs]]\nname = \"\"\n[one]\nnumber = 100\ntext = \"abc\"\nx = 1\n";
        assert_eq!(keys(text), [at(4, "one.number"), at(6, "one.x"), at(0, "")]);
    }

    #[test]
    fn a_required_key_with_a_wrong_value_is_one_problem_and_ends_no_check() {
        let found = problems("[[jobs]]\nname = 5\nrows = \"b\"\n[one]\nnumbr = 1\n");
        let places: Vec<(usize, &str)> = found.iter().map(|(line, key, _)| (*line, key.as_str())).collect();
        assert_eq!(places, [(2, "jobs[0].name"), (3, "jobs[0].rows"), (5, "one.numbr")], "{found:?}");

        #[derive(Default, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        struct Whole {
            part: Option<Part>,
            other: u32,
        }
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Part {
            total: u32,
        }
        let verify = |whole: &mut Whole| match whole {
            Whole { part: Some(Part { total: 0 }), .. } => Err("part.total is 0".to_owned()),
            Whole { other: 7, .. } => Err("other is 7".to_owned()),
            _ => Ok(()),
        };
        let found = read_verified("other = 7\n[part]\ntotal = 0\n", verify).problems;
        let places: Vec<_> = found.iter().map(|one| (one.line, one.key.as_deref())).collect();
        assert_eq!(places, [(Some(1), Some("other")), (Some(3), Some("part.total"))], "{found:?}");
    }

    #[test]
    fn several_errors_of_syntax_are_reported() {
        let found = problems("a = \nb = 1\nc = = 2\n");
        assert!(found.len() >= 2 && found[0].0 == 1 && found.last().unwrap().0 == 3, "{found:?}");
        assert!(read::<Tables>("a = \n").settings.is_none());
    }

    #[test]
    fn hostile_files_are_told_in_a_few_problems() {
        let unknown: String = (0..5_000).map(|n| format!("k{n} = 1\n")).collect();
        let found = read::<Tables>(&unknown).problems;
        assert_eq!(found.len(), WRONG_MAX + 1);
        assert!(found[WRONG_MAX].message.contains("more may follow"), "{:?}", found[WRONG_MAX]);
        let brackets = "[".repeat(5_000);
        assert!(read::<Tables>(&brackets).problems.len() <= WRONG_MAX + 1);
        let lines = "a = = 1\n".repeat(1_000);
        let found = read::<Tables>(&lines).problems;
        assert!(found.len() == WRONG_MAX + 1 && found[WRONG_MAX].message.contains("more errors"));
        let many: String = (0..=ENTRIES_MAX).map(|n| format!("k{n} = 1\n")).collect();
        let nested = format!("[{}x]\n", "a.".repeat(3_000));
        let long = format!("{} = 1\n", "k".repeat(PATH_BYTES_MAX + 1));
        let big = "#".repeat(2 << 20);
        for (text, says) in [(many, "20000"), (nested, "nested"), (long, "1024"), (big, "1048576")] {
            let found = read::<Tables>(&text).problems;
            assert!(found.len() == 1 && found[0].message.contains(says), "{says}: {found:?}");
        }
    }

    #[test]
    fn values_are_not_repeated() {
        for (_, _, message) in problems("[one]\nnumber = \"hunter2\"\ntext = [\"hunter2\"]\n") {
            assert!(!message.contains("hunter2"), "{message}");
        }
    }
}
