//! `millrace config`: the effective configuration, every key with its value and default, or the problems of a file.

mod check;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::output::Output;
use crate::settings::LoadedSettings;

pub(crate) use check::run as check;

/// The pages of `docs/reference/config` for millrace.toml. A test compares them with the source.
const PAGES: [&str; 10] = [
    include_str!("../../docs/reference/config/datafs.md"),
    include_str!("../../docs/reference/config/streams.md"),
    include_str!("../../docs/reference/config/ingest.md"),
    include_str!("../../docs/reference/config/trainer.md"),
    include_str!("../../docs/reference/config/serving.md"),
    include_str!("../../docs/reference/config/serving-limits.md"),
    include_str!("../../docs/reference/config/serving-models.md"),
    include_str!("../../docs/reference/config/feed.md"),
    include_str!("../../docs/reference/config/up.md"),
    include_str!("../../docs/reference/config/cluster.md"),
];

/// Runs the command.
pub(crate) fn run(out: Output, loaded: LoadedSettings, all: bool) -> Result<()> {
    let settings = loaded.settings.without_secrets();
    if !all {
        return if out.is_json() { out.object(&settings) } else { out.raw(&toml::to_string(&settings)?) };
    }
    let keys = keys(&serde_json::to_value(&settings)?)?;
    let values: Vec<_> = keys.iter().map(Key::json).collect();
    let rows = keys.iter().map(Key::row).collect::<Result<Vec<_>>>()?;
    out.table(&values, &["key", "value", "default", "type"], rows)
}

/// One key of one table. A table that the configuration lacks has its keys, without values.
struct Key {
    /// As `serving.grpc`, `ingest.jobs[0].name` or, where the list has no entry, `ingest.jobs[].name`.
    path: String,
    value: Option<Value>,
    default: Absent,
    /// The type, in words.
    kind: String,
    meaning: String,
}

impl Key {
    fn json(&self) -> Value {
        json!({ "key": self.path, "value": self.value, "default": self.default.value(), "type": self.kind,
            "meaning": self.meaning })
    }

    fn row(&self) -> Result<Vec<String>> {
        Ok(vec![
            self.path.clone(),
            shown(self.value.as_ref())?,
            self.default.shown()?,
            self.kind.replace('`', ""),
        ])
    }
}

/// What an absent key means.
enum Absent {
    /// The key must be set.
    Required,
    /// No value; the meaning says what follows.
    Unset,
    Value(Value),
}

impl Absent {
    /// Reads a cell of the column.
    fn parse(cell: &str, kind: &str) -> Result<Absent> {
        Ok(match cell {
            "required" => Absent::Required,
            "unset" => Absent::Unset,
            "none" if kind.starts_with("list") => Absent::Value(json!([])),
            "none" => Absent::Value(json!({})),
            // A number may be followed by its size in another unit.
            cell => {
                let text = cell.split(" (").next().unwrap_or(cell).trim_matches('`');
                let parsed: toml::Table = toml::from_str(&format!("value = {text}"))
                    .with_context(|| format!("read the default {cell:?} of the reference"))?;
                Absent::Value(serde_json::to_value(&parsed["value"])?)
            }
        })
    }

    fn value(&self) -> Option<&Value> {
        match self {
            Absent::Value(value) => Some(value),
            Absent::Required | Absent::Unset => None,
        }
    }

    fn shown(&self) -> Result<String> {
        match self {
            Absent::Required => Ok("required".to_owned()),
            other => shown(other.value()),
        }
    }
}

/// A value in TOML.
fn shown(value: Option<&Value>) -> Result<String> {
    match value {
        None => Ok("unset".to_owned()),
        Some(value) => Ok(toml::Value::try_from(value)?.to_string()),
    }
}

/// All keys in the order of the pages.
fn keys(settings: &Value) -> Result<Vec<Key>> {
    let tables: Vec<&str> = PAGES.iter().flat_map(|page| page.split("\n## `").skip(1)).collect();
    let headings: Vec<&str> = tables.iter().map(|table| heading(table)).collect();
    let mut keys = Vec::new();
    for table in &tables {
        let rows: Vec<Vec<String>> =
            table.lines().filter(|line| line.starts_with("| `")).map(cells).collect();
        for (path, present) in instances(heading(table), settings) {
            for row in &rows {
                let [name, kind, default, meaning] = row.as_slice() else {
                    anyhow::bail!("read the keys of {path}: a row has {} cells instead of 4", row.len());
                };
                let name = name.trim_matches('`');
                // A table with a section of its own has its keys there.
                let full = format!("{}.{name}", section(heading(table)));
                if headings.iter().any(|heading| section(heading) == full) {
                    continue;
                }
                keys.push(Key {
                    path: format!("{path}.{name}"),
                    value: present.and_then(|table| table.get(name)).cloned(),
                    default: Absent::parse(default, kind)?,
                    kind: kind.clone(),
                    meaning: meaning.clone(),
                });
            }
        }
    }
    Ok(keys)
}

/// The heading of a table, as `[serving]`, `[[ingest.jobs]]` or `[serving.models.NAME]`.
fn heading(table: &str) -> &str {
    table.split('`').next().unwrap_or_default()
}

/// The path of a heading's table, list of tables or table of tables.
fn section(heading: &str) -> &str {
    let path = heading.trim_matches(['[', ']']);
    path.strip_suffix(".NAME").unwrap_or(path)
}

/// The tables of a heading that the configuration has, with their paths; else one without values.
fn instances<'a>(heading: &str, settings: &'a Value) -> Vec<(String, Option<&'a Value>)> {
    let path = section(heading);
    let found = settings.pointer(&format!("/{}", path.replace('.', "/")));
    let is_list = heading.starts_with("[[");
    let is_named = heading.ends_with(".NAME]");
    if !is_list && !is_named {
        return vec![(path.to_owned(), found)];
    }
    let tables: Vec<_> = match found {
        Some(Value::Array(list)) => {
            list.iter().enumerate().map(|(at, table)| (format!("{path}[{at}]"), Some(table))).collect()
        }
        Some(Value::Object(named)) => {
            named.iter().map(|(name, table)| (format!("{path}.{name}"), Some(table))).collect()
        }
        _ => Vec::new(),
    };
    match (tables.is_empty(), is_list) {
        (false, _) => tables,
        (true, true) => vec![(format!("{path}[]"), None)],
        (true, false) => vec![(format!("{path}.NAME"), None)],
    }
}

/// The cells of a row of a Markdown table.
fn cells(row: &str) -> Vec<String> {
    let mut cells = vec![String::new()];
    let mut chars = row.trim_matches('|').chars().peekable();
    while let (Some(c), Some(cell)) = (chars.next(), cells.last_mut()) {
        match c {
            '\\' if chars.next_if_eq(&'|').is_some() => cell.push('|'),
            '|' => cells.push(String::new()),
            c => cell.push(c),
        }
    }
    cells.into_iter().map(|cell| cell.trim().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Settings;

    /// Paths of all values in a table, with lists of tables entered at their entries.
    fn value_paths(value: &Value, path: &str, found: &mut Vec<String>) {
        match value {
            Value::Object(fields) if !fields.is_empty() && !path.ends_with(".dead_letter") => {
                for (name, value) in fields {
                    value_paths(
                        value,
                        &format!("{path}{}{name}", if path.is_empty() { "" } else { "." }),
                        found,
                    );
                }
            }
            Value::Array(list) if list.iter().any(Value::is_object) => {
                for (at, value) in list.iter().enumerate() {
                    value_paths(value, &format!("{path}[{at}]"), found);
                }
            }
            _ => found.push(path.to_owned()),
        }
    }

    #[test]
    fn every_value_of_a_configuration_has_a_row_and_its_default() {
        let text = "[[ingest.jobs]]\nname = \"a\"\ntopic = \"t\"\nvolume = \"v\"\npath = \"p\"\n\
                    [serving.models.digits]\nsessions_max = 3\n[serving.tls]\ncertificate = \"c\"\nkey = \"k\"\n";
        let settings: Settings = toml::from_str(text).unwrap();
        let value = serde_json::to_value(&settings).unwrap();
        let keys = keys(&value).unwrap();
        let row =
            |path: &str| keys.iter().find(|key| key.path == path).unwrap_or_else(|| panic!("no row {path}"));
        let mut paths = Vec::new();
        value_paths(&value, "", &mut paths);
        assert!(paths.len() > 80, "{paths:?}");
        let listed = ["streams.topics", "serving.pipes", "up.mounts", "up.snapshots"];
        for path in paths.iter().filter(|path| !listed.contains(&path.as_str())) {
            let key = row(path);
            let is_given = text.contains(&format!("{} = ", path.rsplit('.').next().unwrap()));
            assert!(key.default.value() == key.value.as_ref() || is_given, "{path}: {:?}", key.value);
        }
        assert_eq!(row("ingest.jobs[0].name").default.shown().unwrap(), "required");
        assert_eq!(
            row("ingest.jobs[0].dead_letter").default.shown().unwrap(),
            "{ directory = \"dead_letters\" }"
        );
        assert_eq!(row("serving.models.digits.sessions_max").value, Some(json!(3)));
        assert_eq!(row("serving.volume").default.shown().unwrap(), "unset");
        assert_eq!(row("streams.topics[].partitions").default.shown().unwrap(), "1");
        assert_eq!(row("serving.pipes[].batch_rows_max").value, None);
        assert!(keys.iter().all(|key| !key.kind.is_empty() && !key.meaning.is_empty()));
    }
}
