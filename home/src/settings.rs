//! The configuration file: built-in defaults, then millrace.toml, then `MILLRACE_…` variables. The caller names the
//! tables that it reads.

use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use millrace_leaf::bounded_file;
use millrace_leaf::suggestion::in_plain_words;
use serde::{Serialize, de::DeserializeOwned};

use crate::error::{Error, Result};

/// Longest configuration, in bytes.
pub const FILE_BYTES_MAX: usize = 1 << 20;
/// Most tables in each other that the name of a table or key leads through.
const NESTED_MAX: usize = 64;

/// Effective settings, with the folder that relative paths start from.
#[derive(Debug, Clone)]
pub struct Loaded<S> {
    /// The effective settings.
    pub settings: S,
    /// The file that was read, if any.
    pub file: Option<PathBuf>,
}

impl<S> Loaded<S> {
    /// The file that was read, for another process to read it again.
    ///
    /// # Errors
    /// [`Error::Usage`] for a pipe: the other process would find it empty, and take the defaults.
    pub fn file_to_share(&self) -> Result<Option<&Path>> {
        let file = self.file.as_deref();
        let kind = file.and_then(|file| std::fs::metadata(file).ok()).map(|metadata| metadata.file_type());
        match (file, kind) {
            (Some(file), Some(kind)) if kind.is_fifo() => Err(Error::Usage(format!(
                "cannot hand the configuration {} to another process: a pipe can be read only once; write it to a file",
                file.display()
            ))),
            _ => Ok(file),
        }
    }

    /// A path of the configuration, resolved against the folder of its file.
    pub fn resolve(&self, path: &Path) -> PathBuf {
        match self.file.as_deref().and_then(Path::parent) {
            Some(parent) => parent.join(path),
            None => path.to_owned(),
        }
    }
}

/// Reads the configuration: `flag` names the file; without it ./millrace.toml, then
/// HOME/millrace.toml, then none. Variables for which `is_key` holds override the file.
///
/// # Errors
/// [`Error::NotFound`] for a named file that does not exist, those of [`parse`].
pub fn load<S>(flag: Option<&Path>, home: &Path, is_key: impl Fn(&str) -> bool) -> Result<Loaded<S>>
where
    S: Serialize + DeserializeOwned,
{
    let file = match flag {
        Some(path) => Some(absolute(path)?),
        None => [absolute(Path::new("millrace.toml"))?, home.join("millrace.toml")]
            .into_iter()
            .find(|path| path.is_file()),
    };
    let text = match &file {
        None => String::new(),
        Some(path) => match bounded_file::read_text(path, FILE_BYTES_MAX as u64) {
            Ok(text) => text,
            Err(error) => {
                let message = format!("cannot read configuration {}: {error}", path.display());
                let missing = error.kind() == std::io::ErrorKind::NotFound;
                return Err(if missing { Error::NotFound(message) } else { Error::Usage(message) });
            }
        },
    };
    let shown = file.as_deref().map_or("configuration".into(), |path| path.display().to_string());
    let settings = parse(&text, &shown, variables(is_key)?.into_iter())?;
    let settings = match file.as_deref().and_then(Path::parent) {
        Some(folder) => from_folder(settings, folder)?,
        // Variables alone: a server changes its current folder, and reads files of secrets again.
        None => from_folder(settings, &absolute(Path::new("."))?)?,
    };
    Ok(Loaded { settings, file })
}

/// Checks that a text takes little memory and stack to parse.
///
/// # Errors
/// The line, if there is one, and the reason: more than [`FILE_BYTES_MAX`] bytes, or names of more than 64 tables.
pub fn check_size(text: &str) -> std::result::Result<(), (Option<usize>, String)> {
    if text.len() > FILE_BYTES_MAX {
        return Err((None, format!("the file has more than {FILE_BYTES_MAX} bytes: shorten it")));
    }
    // The parser bounds nested values, but not the dots of a name. A list of numbers has commas, and prose has words.
    let is_nested = |line: &str| {
        let name = line.split_once('=').map_or(line, |(name, _)| name);
        let mut parts = name.split('.').map(|part| part.trim_matches(|c: char| "[] \t\r".contains(c)));
        name.matches('.').count() >= NESTED_MAX
            && !name.contains(',')
            && parts.all(|part| !part.is_empty() && (!part.contains(' ') || part.starts_with(['"', '\''])))
    };
    match text.lines().position(is_nested) {
        Some(at) => Err((Some(at + 1), format!("at most {NESTED_MAX} tables are nested in each other"))),
        None => Ok(()),
    }
}

/// The settings with relative paths of `{ file = … }` resolved against a folder.
///
/// # Errors
/// [`Error::Usage`] for settings that TOML cannot hold.
pub fn from_folder<S: Serialize + DeserializeOwned>(settings: S, folder: &Path) -> Result<S> {
    let mut value = toml::Value::try_from(&settings).map_err(|error| Error::Usage(error.to_string()))?;
    if !anchor(&mut value, folder) {
        return Ok(settings);
    }
    S::deserialize(value).map_err(|error| Error::Usage(error.to_string()))
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
fn variables(is_key: impl Fn(&str) -> bool) -> Result<Vec<(String, String)>> {
    let mut variables = Vec::new();
    for (name, value) in std::env::vars_os() {
        // Other variables may hold any bytes.
        let Some(name) = name.to_str().filter(|name| is_key(name)) else { continue };
        let Ok(value) = value.into_string() else {
            return Err(Error::Usage(format!("environment variable {name} is not UTF-8 text")));
        };
        if is_service_link(name, &value) {
            continue;
        }
        variables.push((name.to_owned(), value));
    }
    Ok(variables)
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

/// Parses a file's text and applies environment variables to it. `shown` names the file in errors.
///
/// # Errors
/// [`Error::Usage`] with line and column, or with the names of the variables. No error repeats a value, which may be
/// a misplaced secret.
pub fn parse<S: DeserializeOwned>(
    text: &str,
    shown: &str,
    variables: impl Iterator<Item = (String, String)>,
) -> Result<S> {
    if let Err((line, reason)) = check_size(text) {
        let line = line.map_or(String::new(), |line| format!(" line {line}:"));
        return Err(Error::Usage(format!("{shown}:{line} {reason}")));
    }
    // Parsed without variables first, since only then an error can show line and column.
    if let Err(error) = toml::from_str::<S>(text) {
        return Err(Error::Usage(format!("{shown}: {}", one_line(&error, text))));
    }
    let mut merged: toml::Table =
        toml::from_str(text).map_err(|error| Error::Usage(one_line(&error, text)))?;
    let mut names = Vec::new();
    for (variable, value) in variables {
        set(&mut merged, &variable, &value)?;
        names.push(variable);
    }
    match S::deserialize(toml::Value::Table(merged)) {
        Ok(settings) => Ok(settings),
        Err(error) => {
            let message = without_value(error.message());
            Err(Error::Usage(format!("environment ({}): {message}", names.join(", "))))
        }
    }
}

/// `MILLRACE_SERVING__GRPC=…` sets `serving.grpc`: two underscores separate tables from keys.
fn set(table: &mut toml::Table, variable: &str, value: &str) -> Result<()> {
    let path = variable.trim_start_matches("MILLRACE_");
    let mut keys: Vec<&str> = path.split("__").collect();
    let Some(last) = keys.pop() else { return Ok(()) };
    if keys.is_empty() {
        return Err(Error::Usage(format!(
            "environment variable {variable} names no table: write MILLRACE_TABLE__KEY, as in MILLRACE_SERVING__GRPC"
        )));
    }
    let mut at = table;
    for key in keys {
        let key = key_in(at, key);
        at = match at.entry(key.clone()).or_insert_with(|| toml::Value::Table(toml::Table::new())) {
            toml::Value::Table(next) => next,
            _ => return Err(Error::Usage(format!("environment variable {variable}: {key} is not a table"))),
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
pub(crate) fn without_value(message: &str) -> String {
    let message = in_plain_words(message);
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
fn one_line(error: &toml::de::Error, text: &str) -> String {
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

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|error| {
        Error::io(format!("cannot resolve the configuration file {}", path.display()), error)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_of_a_type_error_leaves_the_value_out() {
        assert_eq!(
            without_value("invalid type: integer `5`, expected a map"),
            "invalid type: integer, expected a map"
        );
    }

    #[test]
    fn a_configuration_of_a_pipe_is_handed_to_no_other_process() {
        let folder = tempfile::tempdir().unwrap();
        let [pipe, file] = ["pipe", "file"].map(|name| folder.path().join(name));
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        std::fs::write(&file, b"").unwrap();
        let loaded = |file: Option<&Path>| Loaded { settings: (), file: file.map(Path::to_owned) };
        assert_eq!(loaded(Some(&file)).file_to_share().unwrap(), Some(file.as_path()));
        assert_eq!(loaded(None).file_to_share().unwrap(), None);
        let error = loaded(Some(&pipe)).file_to_share().unwrap_err().to_string();
        assert!(error.contains("write it to a file"), "{error}");
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
}
