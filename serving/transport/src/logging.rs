//! Log settings in Triton's form, and the trait through which a process lets the server change them.

use millrace_serving_core::error::{InferError, quote};

/// Levels of the logged events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogSettings {
    /// Events of level ERROR.
    pub error: bool,
    /// Events of level WARN.
    pub warning: bool,
    /// Events of level INFO.
    pub info: bool,
    /// 0: no finer events; 1: events of level DEBUG; 2 and more: also events of level TRACE.
    pub verbose_level: u32,
}

/// The switch of a process's log.
pub trait Logging: std::fmt::Debug + Send + Sync {
    /// The settings in force.
    fn settings(&self) -> LogSettings;

    /// Changes the settings atomically, and returns those then in force.
    ///
    /// # Errors
    /// Why the log cannot be switched; the settings are unchanged.
    fn change(&self, change: &dyn Fn(&mut LogSettings)) -> Result<LogSettings, String>;
}

/// The only supported log format.
const FORMAT: &str = "default";

/// A value from a client.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    Bool(bool),
    Number(u64),
    Text(String),
    /// No value, or one of a type that no setting has.
    Other,
}

/// A checked change of one setting.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Change {
    Error(bool),
    Warning(bool),
    Info(bool),
    VerboseLevel(u32),
    /// Sets a setting with only one possible value to that value.
    Nothing,
}

impl Change {
    /// Checks a change that a client requests.
    ///
    /// # Errors
    /// [`InferError::Invalid`] for unknown names, values of another type, and other values for settings with
    /// only one.
    pub(crate) fn parse(name: &str, value: &Value) -> Result<Change, InferError> {
        let switch = || match value {
            Value::Bool(on) => Ok(*on),
            _ => Err(wrong(name, "true or false", value)),
        };
        Ok(match name {
            "log_error" => Change::Error(switch()?),
            "log_warning" => Change::Warning(switch()?),
            "log_info" => Change::Info(switch()?),
            "log_verbose_level" => match value {
                Value::Number(level) if u32::try_from(*level).is_ok() => {
                    Change::VerboseLevel(u32::try_from(*level).unwrap_or(u32::MAX))
                }
                _ => return Err(wrong(name, "a level from 0 to 4294967295", value)),
            },
            "log_file" if *value == Value::Text(String::new()) => Change::Nothing,
            "log_file" => {
                return Err(InferError::invalid(
                    "log_file cannot be set: the process writes its log to standard error, and a call over the network names no files",
                ));
            }
            "log_format" if *value == Value::Text(FORMAT.to_owned()) => Change::Nothing,
            "log_format" => return Err(wrong(name, "\"default\", the only format", value)),
            _ => {
                return Err(InferError::invalid(format!(
                    "{} is not a log setting: the settings are log_file, log_info, log_warning, log_error, log_verbose_level and log_format",
                    quote(name)
                )));
            }
        })
    }

    /// Applies the change.
    pub(crate) fn apply(self, settings: &mut LogSettings) {
        match self {
            Change::Error(on) => settings.error = on,
            Change::Warning(on) => settings.warning = on,
            Change::Info(on) => settings.info = on,
            Change::VerboseLevel(level) => settings.verbose_level = level,
            Change::Nothing => {}
        }
    }
}

fn wrong(name: &str, expected: &str, found: &Value) -> InferError {
    let found = match found {
        Value::Bool(on) => on.to_string(),
        Value::Number(number) => number.to_string(),
        Value::Text(text) => quote(text),
        Value::Other => "no such value".to_owned(),
    };
    InferError::invalid(format!("{name} is {found}, expected is {expected}"))
}

/// The settings under Triton's names.
pub(crate) fn named(settings: LogSettings) -> [(&'static str, Value); 6] {
    [
        ("log_file", Value::Text(String::new())),
        ("log_info", Value::Bool(settings.info)),
        ("log_warning", Value::Bool(settings.warning)),
        ("log_error", Value::Bool(settings.error)),
        ("log_verbose_level", Value::Number(settings.verbose_level.into())),
        ("log_format", Value::Text(FORMAT.to_owned())),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reported_settings_can_be_set_to_their_values() {
        let settings = LogSettings { error: true, warning: false, info: true, verbose_level: 7 };
        let mut copy = LogSettings { error: false, warning: true, info: false, verbose_level: 0 };
        for (name, value) in named(settings) {
            Change::parse(name, &value).unwrap().apply(&mut copy);
        }
        assert_eq!(copy, settings);
    }

    #[test]
    fn invalid_changes_are_refused_by_name() {
        let text = |text: &str| Value::Text(text.to_owned());
        for (name, value, part) in [
            ("log_info", text("true"), "log_info is \"true\""),
            ("log_info", Value::Number(1), "true or false"),
            ("log_error", Value::Other, "log_error"),
            ("log_verbose_level", Value::Bool(true), "a level"),
            ("log_verbose_level", Value::Number(1 << 32), "4294967296"),
            ("log_file", text("/etc/passwd"), "standard error"),
            ("log_file", Value::Other, "standard error"),
            ("log_format", text("ISO8601"), "ISO8601"),
            ("log_colour", Value::Bool(true), "log_colour"),
            ("", Value::Bool(true), "is not a log setting"),
        ] {
            let error = Change::parse(name, &value).unwrap_err();
            assert!(matches!(error, InferError::Invalid { .. }));
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}
