//! The trace settings: parsed from clients' values, and reported in the same form.

use millrace_serving_core::error::{InferError, quote};

const RATE: u32 = 1_000;
const FILE: &str = "trace.json";
const FILE_BYTES_MAX: usize = 128;

/// The settings in force for a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Settings {
    /// Whether requests are traced.
    pub(super) traces: bool,
    /// One of this many requests is traced.
    pub(super) rate: u32,
    /// Number of traces left; `None` for no limit.
    pub(super) count: Option<u64>,
    /// Traces per file; 0 puts all into one file.
    pub(super) log_frequency: u32,
    /// File name, or the prefix of the file names.
    pub(super) file: String,
}

impl Default for Settings {
    fn default() -> Self {
        Settings { traces: false, rate: RATE, count: None, log_frequency: 0, file: FILE.to_owned() }
    }
}

impl Settings {
    /// The settings under Triton's names.
    pub(super) fn named(&self) -> [(&'static str, Vec<String>); 6] {
        let level = if self.traces { "TIMESTAMPS" } else { "OFF" };
        let count = self.count.map_or_else(|| "-1".to_owned(), |count| count.to_string());
        [
            ("trace_level", vec![level.to_owned()]),
            ("trace_rate", vec![self.rate.to_string()]),
            ("trace_count", vec![count]),
            ("log_frequency", vec![self.log_frequency.to_string()]),
            ("trace_file", vec![self.file.clone()]),
            ("trace_mode", vec!["triton".to_owned()]),
        ]
    }
}

/// The settings of one scope, all models or one model; `None` inherits from the wider scope.
#[derive(Debug, Clone, Default)]
pub(super) struct Scope {
    traces: Option<bool>,
    pub(super) rate: Option<u32>,
    pub(super) count: Option<Option<u64>>,
    log_frequency: Option<u32>,
    file: Option<String>,
    /// Requests counted for this scope's rate.
    pub(super) seen: u64,
}

impl Scope {
    /// Whether this scope enables tracing.
    pub(super) fn traces(&self) -> bool {
        self.traces == Some(true)
    }

    /// These settings, with `wider` for those that are not set.
    pub(super) fn over(&self, wider: Settings) -> Settings {
        Settings {
            traces: self.traces.unwrap_or(wider.traces),
            rate: self.rate.unwrap_or(wider.rate),
            count: self.count.unwrap_or(wider.count),
            log_frequency: self.log_frequency.unwrap_or(wider.log_frequency),
            file: self.file.clone().unwrap_or(wider.file),
        }
    }

    pub(super) fn apply(&mut self, change: &Change) {
        match change {
            Change::Traces(traces) => self.traces = *traces,
            Change::Rate(rate) => (self.rate, self.seen) = (*rate, 0),
            Change::Count(count) => self.count = *count,
            Change::LogFrequency(frequency) => self.log_frequency = *frequency,
            Change::File(file) => self.file.clone_from(file),
            Change::Nothing => {}
        }
    }
}

/// A checked change of one setting; `None` clears it, so that it inherits from the wider scope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Whether requests are traced.
    Traces(Option<bool>),
    /// One of so many requests is traced.
    Rate(Option<u32>),
    /// How many more requests are traced; without a bound if absent.
    Count(Option<Option<u64>>),
    /// Traces in a file; 0 for all in one.
    LogFrequency(Option<u32>),
    /// Name of the file.
    File(Option<String>),
    /// A setting that has no effect here.
    Nothing,
}

impl Change {
    /// Checks a change that a client requests. An empty list clears the setting.
    ///
    /// # Errors
    /// [`InferError::Invalid`] for unknown names and invalid values.
    pub fn parse(name: &str, values: &[&str]) -> Result<Change, InferError> {
        if values.len() > 1 && name != "trace_level" {
            return Err(InferError::invalid(format!("{name} has {} values, one is expected", values.len())));
        }
        let value = values.first().copied();
        let wrong = |expected: &str| {
            let shown: Vec<String> = values.iter().take(8).map(|value| quote(value)).collect();
            InferError::invalid(format!("{name} is {}, expected is {expected}", shown.join(", ")))
        };
        Ok(match (name, value) {
            ("trace_level", None) => Change::Traces(None),
            ("trace_level", Some(_)) => match values {
                ["OFF"] => Change::Traces(Some(false)),
                ["TIMESTAMPS"] => Change::Traces(Some(true)),
                _ => return Err(wrong("OFF or TIMESTAMPS")),
            },
            ("trace_rate", None) => Change::Rate(None),
            ("trace_rate", Some(rate)) => {
                let rate = rate.parse().ok().filter(|rate| *rate > 0);
                Change::Rate(Some(rate.ok_or_else(|| wrong("a number from 1 to 4294967295"))?))
            }
            ("trace_count", None) => Change::Count(None),
            ("trace_count", Some("-1")) => Change::Count(Some(None)),
            ("trace_count", Some(count)) => {
                let count = count.parse().map_err(|_| wrong("a number of traces, or -1 for any number"))?;
                Change::Count(Some(Some(count)))
            }
            ("log_frequency", None) => Change::LogFrequency(None),
            ("log_frequency", Some(number)) => Change::LogFrequency(Some(
                number.parse().map_err(|_| wrong("a number from 0 to 4294967295"))?,
            )),
            ("trace_file", None) => Change::File(None),
            ("trace_file", Some(file)) if is_plain(file) => Change::File(Some(file.to_owned())),
            ("trace_file", Some(_)) => {
                return Err(wrong(
                    "the name of a file in the server's folder for traces: 1 to 128 of A-Z a-z 0-9 . _ -, and not '.' first",
                ));
            }
            ("trace_mode", None | Some("triton")) => Change::Nothing,
            ("trace_mode", Some(_)) => return Err(wrong("triton")),
            (name, _) => {
                return Err(InferError::invalid(format!(
                    "{} is not a trace setting: there are trace_level, trace_rate, trace_count, log_frequency, trace_file and trace_mode",
                    quote(name)
                )));
            }
        })
    }
}

impl Change {
    /// Whether the change completes open files.
    pub(super) fn ends_files(&self) -> bool {
        matches!(self, Change::Traces(_) | Change::LogFrequency(_) | Change::File(_))
    }
}

/// Whether a name is a plain file name that cannot leave its directory.
fn is_plain(name: &str) -> bool {
    (1..=FILE_BYTES_MAX).contains(&name.len())
        && !name.starts_with('.')
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_can_be_set() {
        let file = "a.json".to_owned();
        let settings = Settings { traces: true, rate: 3, count: Some(9), log_frequency: 4, file };
        for settings in [settings, Settings::default()] {
            let mut scope = Scope::default();
            for (name, values) in settings.named() {
                let values: Vec<&str> = values.iter().map(String::as_str).collect();
                scope.apply(&Change::parse(name, &values).unwrap());
            }
            let other = Settings { traces: true, rate: 1, count: None, log_frequency: 1, file: "b".into() };
            assert_eq!(scope.over(other.clone()), settings);
            for (name, _) in settings.named() {
                scope.apply(&Change::parse(name, &[]).unwrap());
            }
            assert_eq!(scope.over(other.clone()), other);
        }
    }

    #[test]
    fn values_that_mean_nothing_are_refused_by_name() {
        let long = "f".repeat(FILE_BYTES_MAX + 1);
        for (name, values) in [
            ("trace_level", ["TENSORS"].as_slice()),
            ("trace_level", &["TIMESTAMPS", "TENSORS"]),
            ("trace_level", &["off"]),
            ("trace_rate", &["0"]),
            ("trace_rate", &["-1"]),
            ("trace_rate", &["4294967296"]),
            ("trace_rate", &["1", "2"]),
            ("trace_count", &["-2"]),
            ("trace_count", &["many"]),
            ("log_frequency", &["1.5"]),
            ("trace_file", &[""]),
            ("trace_file", &["/etc/passwd"]),
            ("trace_file", &["../up"]),
            ("trace_file", &[".."]),
            ("trace_file", &["a b"]),
            ("trace_file", &[&long]),
            ("trace_mode", &["opentelemetry"]),
            ("trace_colour", &["red"]),
            ("", &[]),
        ] {
            let error = Change::parse(name, values).unwrap_err();
            assert!(matches!(error, InferError::Invalid { .. }), "{name} {values:?}");
            assert!(error.to_string().contains(name) && error.to_string().len() < 500, "{error}");
        }
    }
}
