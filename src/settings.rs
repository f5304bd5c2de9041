//! Configuration: built-in defaults, then millrace.toml, then `MILLRACE_…` variables, then flags. Each crate
//! defines its table; this file combines them.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use millrace_datafs::{Name, VolumeSpec};
use millrace_trainer::launch;
use serde::{Deserialize, Serialize};

use crate::failure::{Exit, fail};

/// All tables of millrace.toml.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Settings {
    /// Volumes: metadata engine, object store.
    pub(crate) datafs: millrace_datafs::Config,
    /// Topics and the embedded broker.
    pub(crate) streams: millrace_streams::Config,
    /// Ingest of topics into volumes.
    pub(crate) ingest: millrace_ingest::Config,
    /// Training defaults.
    pub(crate) trainer: millrace_trainer::Config,
    /// The model server and its pipes.
    pub(crate) serving: millrace_serving::Config,
    /// The parts that `millrace up` runs in addition to those of the other tables.
    pub(crate) up: UpConfig,
}

impl Settings {
    /// The settings without the values of secrets, for display.
    pub(crate) fn without_secrets(self) -> Settings {
        Settings {
            datafs: self.datafs.without_secrets(),
            streams: self.streams.without_secrets(),
            serving: self.serving.without_secrets(),
            ..self
        }
    }
}

/// The table `[up]`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct UpConfig {
    /// Volumes that are created when they do not exist.
    pub(crate) volumes: Vec<Name>,
    /// Volumes and snapshots mounted as folders.
    pub(crate) mounts: Vec<MountConfig>,
    /// Address for metrics, at `/metrics`, if no model server serves them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) metrics: Option<SocketAddr>,
    /// Snapshots taken on a schedule.
    pub(crate) snapshots: Vec<SnapshotSchedule>,
    /// Job files to train once their snapshot exists, relative to this file's folder. A job on `VOLUME@latest` trains
    /// again on each newer snapshot.
    pub(crate) train: Vec<PathBuf>,
}

/// One mount of `[up]`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MountConfig {
    /// VOLUME or VOLUME@SNAPSHOT.
    pub(crate) volume: VolumeSpec,
    /// The folder, created when it does not exist; relative to this file's folder.
    pub(crate) path: PathBuf,
}

/// One schedule of `[up]`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SnapshotSchedule {
    /// The volume.
    pub(crate) volume: Name,
    /// The schedule's name, unique for the volume and part of its snapshots' names; `every-Ns` by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<Name>,
    /// Seconds between snapshots, at least 1; counted from 1970-01-01 (UTC), so that 3600 is each hour.
    pub(crate) every_s: u64,
    /// Number of this schedule's snapshots to keep, at least 1; older ones are deleted.
    pub(crate) keep: usize,
}

/// The effective settings, with the folder that relative paths start from.
#[derive(Debug, Clone)]
pub(crate) struct LoadedSettings {
    /// The effective settings.
    pub(crate) settings: Settings,
    /// The file that was read, if any.
    pub(crate) file: Option<PathBuf>,
}

impl LoadedSettings {
    /// A path of the configuration, resolved against the folder of its file.
    pub(crate) fn resolve(&self, path: &Path) -> PathBuf {
        match self.file.as_deref().and_then(Path::parent) {
            Some(parent) => parent.join(path),
            None => path.to_owned(),
        }
    }
}

/// What to do about a name that a table of the configuration lacks, given the names that it has.
pub(crate) fn instead(known: &[&str], table: &str) -> String {
    if known.is_empty() {
        format!("declare it under {table}")
    } else {
        format!("it has {}", known.join(", "))
    }
}

/// Variables that the command line or the tests read; they are not configuration keys.
const RESERVED: [&str; 5] =
    ["MILLRACE_HOME", "MILLRACE_CONFIG", "MILLRACE_LOG", "MILLRACE_REQUIRE", "MILLRACE_SKIPPED"];
/// Variables from a training coordinator to its workers; they are not configuration keys either.
const WORKER: [&str; 4] = [launch::ENV_COORDINATOR, launch::ENV_TOKEN, launch::ENV_SLOT, launch::ENV_LAUNCH];

/// Reads the configuration: `flag` names the file; without it ./millrace.toml, then
/// HOME/millrace.toml, then none.
pub(crate) fn load(flag: Option<&Path>, home: &Path) -> Result<LoadedSettings> {
    let file = match flag {
        Some(path) => Some(std::path::absolute(path)?),
        None => [std::path::absolute("millrace.toml")?, home.join("millrace.toml")]
            .into_iter()
            .find(|path| path.is_file()),
    };
    let text = match &file {
        None => String::new(),
        Some(path) => match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) => {
                let exit =
                    if error.kind() == std::io::ErrorKind::NotFound { Exit::NotFound } else { Exit::Usage };
                return fail(exit, format!("cannot read configuration {}: {error}", path.display()));
            }
        },
    };
    let shown = file.as_deref().map_or("configuration".into(), |path| path.display().to_string());
    let settings = parse(&text, &shown, variables()?.into_iter())?;
    let settings = match file.as_deref().and_then(Path::parent) {
        Some(folder) => from_folder(settings, folder)?,
        None => settings,
    };
    Ok(LoadedSettings { settings, file })
}

/// The settings with relative paths of `{ file = … }` resolved against a folder.
fn from_folder(settings: Settings, folder: &Path) -> Result<Settings> {
    let mut value = toml::Value::try_from(&settings)?;
    if anchor(&mut value, folder) { Ok(Settings::deserialize(value)?) } else { Ok(settings) }
}

/// Resolves the paths in a value; returns whether it changed any.
fn anchor(value: &mut toml::Value, folder: &Path) -> bool {
    match value {
        toml::Value::Table(table) => {
            let alone = table.len() == 1;
            match table.get_mut("file") {
                Some(toml::Value::String(path)) if alone => match folder.join(&*path).to_str() {
                    Some(whole) if whole != path => {
                        *path = whole.to_owned();
                        true
                    }
                    _ => false,
                },
                _ => table.iter_mut().fold(false, |changed, (_, value)| anchor(value, folder) | changed),
            }
        }
        toml::Value::Array(values) => {
            values.iter_mut().fold(false, |changed, value| anchor(value, folder) | changed)
        }
        _ => false,
    }
}

/// The variables that may set configuration keys.
fn variables() -> Result<Vec<(String, String)>> {
    let mut variables = Vec::new();
    for (name, value) in std::env::vars_os() {
        // Other variables may hold any bytes.
        let Some(name) = name.to_str().filter(|name| is_key(name)) else { continue };
        let Ok(value) = value.into_string() else {
            return fail(Exit::Usage, format!("environment variable {name} is not UTF-8 text"));
        };
        if is_service_link(name, &value) {
            continue;
        }
        variables.push((name.to_owned(), value));
    }
    Ok(variables)
}

/// Whether a variable's name can be that of a key.
fn is_key(variable: &str) -> bool {
    variable.starts_with("MILLRACE_") && !RESERVED.contains(&variable) && !WORKER.contains(&variable)
}

/// Whether Kubernetes set a variable. It sets these in each container for each service of the namespace:
/// `NAME_SERVICE_HOST`, `NAME_SERVICE_PORT[_PORTNAME]`, `NAME_PORT=tcp://…`,
/// `NAME_PORT_8000_TCP[_PROTO|_PORT|_ADDR]`.
fn is_service_link(variable: &str, value: &str) -> bool {
    let protocols = ["TCP", "UDP", "SCTP"];
    let of_port = |rest: &str| {
        let mut parts = rest.splitn(3, '_');
        let port = parts.next().is_some_and(|port| port.parse::<u16>().is_ok());
        let protocol = parts.next().is_some_and(|name| protocols.contains(&name));
        port && protocol && parts.next().is_none_or(|part| ["PROTO", "PORT", "ADDR"].contains(&part))
    };
    let is_url = || {
        let scheme = value.split_once("://").map(|(scheme, _)| scheme.to_uppercase());
        scheme.is_some_and(|scheme| protocols.contains(&scheme.as_str()))
    };
    variable.ends_with("_SERVICE_HOST")
        || variable.ends_with("_SERVICE_PORT")
        || variable.contains("_SERVICE_PORT_")
        || (variable.ends_with("_PORT") && is_url())
        || variable.match_indices("_PORT_").any(|(at, found)| of_port(&variable[at + found.len()..]))
}

/// Parses a file's text and applies environment variables to it.
fn parse(text: &str, shown: &str, variables: impl Iterator<Item = (String, String)>) -> Result<Settings> {
    // Parsed without variables first, since only then an error can show line and column.
    if let Err(error) = toml::from_str::<Settings>(text) {
        return fail(Exit::Usage, format!("{shown}: {}", one_line(&error, text)));
    }
    let mut merged: toml::Table = toml::from_str(text).context("parsed a moment ago")?;
    let mut names = Vec::new();
    for (variable, value) in variables {
        set(&mut merged, &variable, &value)?;
        names.push(variable);
    }
    match Settings::deserialize(toml::Value::Table(merged)) {
        Ok(settings) => Ok(settings),
        Err(error) => {
            let message = without_value(error.message());
            fail(Exit::Usage, format!("environment ({}): {message}", names.join(", ")))
        }
    }
}

/// `MILLRACE_SERVING__GRPC=…` sets `serving.grpc`: two underscores separate tables from keys.
fn set(table: &mut toml::Table, variable: &str, value: &str) -> Result<()> {
    let path = variable.trim_start_matches("MILLRACE_");
    let mut keys: Vec<&str> = path.split("__").collect();
    let Some(last) = keys.pop() else { return Ok(()) };
    if keys.is_empty() {
        return fail(
            Exit::Usage,
            format!(
                "environment variable {variable} names no table: write MILLRACE_TABLE__KEY, as in MILLRACE_SERVING__GRPC"
            ),
        );
    }
    let mut at = table;
    for key in keys {
        let key = key_in(at, key);
        at = match at.entry(key.clone()).or_insert_with(|| toml::Value::Table(toml::Table::new())) {
            toml::Value::Table(next) => next,
            _ => return fail(Exit::Usage, format!("environment variable {variable}: {key} is not a table")),
        };
    }
    // Numbers, booleans and arrays in TOML syntax; other values are text.
    let parsed = toml::from_str::<toml::Table>(&format!("v = {value}"))
        .ok()
        .and_then(|mut parsed| parsed.remove("v"))
        .unwrap_or_else(|| toml::Value::String(value.to_owned()));
    at.insert(key_in(at, last), parsed);
    Ok(())
}

/// The key for a part of a variable's name. A part with lower-case letters stays unchanged. Otherwise an
/// existing key that differs only in case, or the part in lower case.
fn key_in(table: &toml::Table, part: &str) -> String {
    if part.contains(char::is_lowercase) {
        return part.to_owned();
    }
    match table.keys().find(|key| key.eq_ignore_ascii_case(part)) {
        Some(key) => key.clone(),
        None => part.to_lowercase(),
    }
}

/// The message of a type error without the value that it repeats, which may be a misplaced secret.
fn without_value(message: &str) -> String {
    let message = message.trim().replace('\n', " ");
    for kind in ["invalid type: ", "invalid value: "] {
        if let (Some(value), Some(expected)) = (message.strip_prefix(kind), message.rfind(", expected ")) {
            let named =
                value.split(['"', '`']).next().unwrap_or_default().split(',').next().unwrap_or_default();
            return format!("{kind}{}{}", named.trim(), &message[expected..]);
        }
    }
    message
}

/// A TOML error as `line L, column C: message`, without the wrong value.
pub(crate) fn one_line(error: &toml::de::Error, text: &str) -> String {
    let message = without_value(error.message());
    match error.span() {
        Some(span) => {
            let before = &text[..span.start.min(text.len())];
            let line = before.matches('\n').count() + 1;
            let column = before.len() - before.rfind('\n').map_or(0, |at| at + 1) + 1;
            format!("line {line}, column {column}: {message}")
        }
        None => message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vars(pairs: &[(&str, &str)]) -> impl Iterator<Item = (String, String)> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect::<Vec<_>>().into_iter()
    }

    #[test]
    fn an_unknown_key_is_refused_with_its_line() {
        let error = parse("[serving]\nhtpp = \"127.0.0.1:1\"\n", "m.toml", vars(&[])).unwrap_err();
        assert!(error.to_string().starts_with("m.toml: line 2, column 1: unknown field `htpp`"), "{error}");
    }

    #[test]
    fn the_environment_wins_over_the_file() {
        let settings = parse(
            "[serving]\ngrpc = \"127.0.0.1:1\"\n",
            "m.toml",
            vars(&[("MILLRACE_SERVING__GRPC", "127.0.0.1:2")]),
        )
        .unwrap();
        assert_eq!(settings.serving.grpc.port(), 2);
        assert!(is_key("MILLRACE_SERVING__GRPC") && is_key("MILLRACE_TRAINER__X"));
        assert!(!is_key("MILLRACE_HOME") && !is_key("MILLRACE_TRAINER_SLOT") && !is_key("HOME"));
    }

    #[test]
    fn errors_do_not_repeat_values() {
        for text in [
            "[streams]\nproperties = \"sasl.password=hunter2, expected\"\n",
            "[datafs]\nencryption_keys = \"hunter2\"\n",
            "[streams.properties]\n\"sasl.password\" = [\"hunter2\"]\n",
            "[serving.telemetry.headers]\nauthorization = { hunter2 = 1 }\n",
            "[serving]\ntokens = 4242\n",
            "[datafs]\nmeta_url = [\"postgres://me:hunter2@host\"]\n",
        ] {
            let error = parse(text, "m.toml", vars(&[])).unwrap_err().to_string();
            assert!(
                error.starts_with("m.toml: line 2, ") || error.starts_with("m.toml: line 3, "),
                "{error}"
            );
            assert!(!error.contains("hunter2") && !error.contains("4242"), "{error}");
        }
        let variables = [("MILLRACE_STREAMS__PROPERTIES", "hunter2"), ("MILLRACE_SERVING__DRIFT", "4242")];
        for variable in variables {
            let error = parse("", "m.toml", vars(&[variable])).unwrap_err().to_string();
            assert!(error.contains(variable.0) && error.contains("expected"), "{error}");
            assert!(!error.contains(variable.1), "{error}");
        }
        assert_eq!(
            without_value("invalid type: integer `5`, expected a map"),
            "invalid type: integer, expected a map"
        );
    }

    #[test]
    fn names_with_capitals_are_set_by_variables() {
        let depth = |text: &str, variable: &str, name: &str| {
            let settings = parse(text, "m.toml", vars(&[(variable, "7")])).unwrap();
            settings.serving.models[name].sessions_max
        };
        assert_eq!(depth("", "MILLRACE_SERVING__MODELS__ResNet__SESSIONS_MAX", "ResNet"), Some(7));
        let declared = "[serving.models.BERT]\n";
        assert_eq!(depth(declared, "MILLRACE_SERVING__MODELS__BERT__SESSIONS_MAX", "BERT"), Some(7));
        assert_eq!(depth("", "MILLRACE_SERVING__MODELS__MLP__SESSIONS_MAX", "mlp"), Some(7));
    }

    #[test]
    fn relative_paths_of_secrets_start_at_the_folder_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.toml");
        std::fs::write(
            &path,
            "[datafs.encryption_keys]\nmain = { file = \"keys/main\" }\nother = { file = \"/k\" }\n",
        )
        .unwrap();
        let loaded = load(Some(&path), folder.path()).unwrap();
        let shown = format!("{:?}", loaded.settings.datafs.encryption_keys);
        assert!(shown.contains(folder.path().join("keys/main").to_str().unwrap()), "{shown}");
        assert!(shown.contains("\"/k\""), "{shown}");
    }

    #[test]
    fn kubernetes_service_links_are_not_configuration_keys() {
        for (name, value) in [
            ("MILLRACE_SERVICE_HOST", "10.0.0.7"),
            ("MILLRACE_SERVING_SERVICE_PORT", "8000"),
            ("MILLRACE_SERVING_SERVICE_PORT_GRPC", "8001"),
            ("MILLRACE_PORT", "tcp://10.0.0.7:8000"),
            ("MILLRACE_SERVING_PORT", "tcp://10.0.0.7:8000"),
            ("MILLRACE_SERVING_PORT_8000_TCP", "tcp://10.0.0.7:8000"),
            ("MILLRACE_SERVING_PORT_8000_TCP_PROTO", "tcp"),
            ("MILLRACE_SERVING_PORT_8000_UDP_PORT", "8000"),
            ("MILLRACE_SERVING_PORT_8000_TCP_ADDR", "10.0.0.7"),
        ] {
            assert!(is_service_link(name, value), "{name}");
        }
        for (name, value) in [
            ("MILLRACE_SERVING_PORT", "8000"),
            ("MILLRACE_GRPC", "1"),
            ("MILLRACE_SERVING__GRPC", "127.0.0.1:1"),
            ("MILLRACE_SERVING_PORT_HIGH", "8000"),
            ("MILLRACE_TRAINER_WORKERS", "4"),
        ] {
            assert!(!is_service_link(name, value), "{name}");
        }
    }

    #[test]
    fn a_variable_without_a_table_and_an_unknown_one_are_refused() {
        assert!(parse("", "m", vars(&[("MILLRACE_GRPC", "1")])).is_err());
        let error = parse("", "m", vars(&[("MILLRACE_TRAINER_WORKERS", "4")])).unwrap_err();
        assert!(error.to_string().contains("MILLRACE_TRAINER_WORKERS"), "{error}");
        assert!(!is_key("MILLRACE_TRAINER_SLOT"));
        let error = parse("", "m", vars(&[("MILLRACE_SERVING__GRCP", "127.0.0.1:2")])).unwrap_err();
        assert!(error.to_string().contains("MILLRACE_SERVING__GRCP"), "{error}");
    }
}
