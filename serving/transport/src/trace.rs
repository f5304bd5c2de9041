//! Trace settings of Triton's protocol. The server writes no trace files, so all settings are fixed and tracing is
//! off. `[serving.telemetry]` sends the spans of requests instead.

use millrace_serving_core::error::{InferError, quote};

/// The settings under Triton's names, with their only values.
const SETTINGS: [(&str, &str); 6] = [
    ("trace_level", "OFF"),
    ("trace_rate", "1000"),
    ("trace_count", "-1"),
    ("log_frequency", "0"),
    ("trace_file", ""),
    ("trace_mode", "triton"),
];

/// The settings in force for every model.
pub(crate) fn settings() -> [(&'static str, Vec<String>); 6] {
    SETTINGS.map(|(name, value)| (name, vec![value.to_owned()]))
}

/// Checks a change that a client requests: it must not change anything. An empty list clears a setting.
///
/// # Errors
/// [`InferError::Invalid`] for unknown names and for values other than the fixed one.
pub(crate) fn check(name: &str, values: &[&str]) -> Result<(), InferError> {
    let Some((_, fixed)) = SETTINGS.iter().find(|(known, _)| *known == name) else {
        let names = SETTINGS.map(|(known, _)| known).join(", ");
        return Err(InferError::invalid(format!(
            "{} is not a trace setting, the trace settings are {names}",
            quote(name)
        )));
    };
    if values.is_empty() || values == [*fixed] {
        return Ok(());
    }
    let shown: Vec<String> = values.iter().take(8).map(|value| quote(value)).collect();
    Err(InferError::invalid(format!(
        "cannot set {name} to {}: this server writes no trace files, it sends spans to an OpenTelemetry collector; \
         set [serving.telemetry] in its configuration",
        shown.join(", ")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reported_settings_are_accepted() {
        for (name, values) in settings() {
            let values: Vec<&str> = values.iter().map(String::as_str).collect();
            check(name, &values).unwrap();
            check(name, &[]).unwrap();
        }
    }

    #[test]
    fn changes_are_refused_by_name() {
        let long = "f".repeat(4096);
        for (name, values, part) in [
            ("trace_level", ["TIMESTAMPS"].as_slice(), "[serving.telemetry]"),
            ("trace_level", &["OFF", "TENSORS"], "[serving.telemetry]"),
            ("trace_rate", &["1"], "[serving.telemetry]"),
            ("trace_file", &["own.json"], "[serving.telemetry]"),
            ("trace_file", &[&long], "[serving.telemetry]"),
            ("trace_mode", &["opentelemetry"], "[serving.telemetry]"),
            ("trace_colour", &["red"], "not a trace setting"),
            ("", &[], "not a trace setting"),
        ] {
            let error = check(name, values).unwrap_err();
            assert!(matches!(error, InferError::Invalid { .. }), "{name} {values:?}");
            let error = error.to_string();
            assert!(error.contains(name) && error.contains(part) && error.len() < 500, "{error}");
        }
    }
}
