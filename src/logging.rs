//! Log output to standard error: the filter of `--log`, and a switch with which a client of the model server
//! changes it while the process runs.

use std::io::IsTerminal;
use std::sync::Arc;

use anyhow::Result;
use millrace_serving::logging::{LogSettings, Logging};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Filter, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, reload};

use crate::failure::{Exit, failure};

/// Starts the log with a filter.
pub(crate) fn start(filter: &str) -> Result<Arc<LogSwitch>> {
    let base = EnvFilter::try_new(filter)
        .map_err(|error| failure(Exit::Usage, format!("--log {filter:?}: {error}")))?;
    let settings = settings_of(base.max_level_hint());
    let (gate, handle) = reload::Layer::new(LogFilter { base, switched: None });
    let terminal = std::io::stderr().is_terminal();
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(terminal);
    tracing_subscriber::registry().with(lines.with_filter(gate)).try_init()?;
    Ok(Arc::new(LogSwitch { handle, settings: std::sync::Mutex::new(settings) }))
}

/// The settings that correspond to the finest level that a filter passes.
fn settings_of(level: Option<LevelFilter>) -> LogSettings {
    let level = level.unwrap_or(LevelFilter::TRACE);
    LogSettings {
        error: level >= LevelFilter::ERROR,
        warning: level >= LevelFilter::WARN,
        info: level >= LevelFilter::INFO,
        verbose_level: u32::from(level >= LevelFilter::DEBUG) + u32::from(level >= LevelFilter::TRACE),
    }
}

/// Changes this process's log settings.
pub(crate) struct LogSwitch {
    handle: reload::Handle<LogFilter, Registry>,
    settings: std::sync::Mutex<LogSettings>,
}

impl std::fmt::Debug for LogSwitch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LogSwitch").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Logging for LogSwitch {
    fn settings(&self) -> LogSettings {
        *self.settings.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn change(&self, change: &dyn Fn(&mut LogSettings)) -> Result<LogSettings, String> {
        let mut settings = self.settings.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut next = *settings;
        change(&mut next);
        self.handle
            .modify(|gate| gate.switched = Some(next))
            .map_err(|error| format!("the log cannot be switched: {error}"))?;
        *settings = next;
        Ok(next)
    }
}

/// The filter of `--log` until a client switches levels. Then the switched levels decide for this program's
/// events; events of libraries must pass both.
struct LogFilter {
    base: EnvFilter,
    switched: Option<LogSettings>,
}

impl LogFilter {
    /// The switch's decision; `None` if the filter of `--log` decides.
    fn decided(&self, metadata: &Metadata<'_>) -> Option<bool> {
        if is_expected(metadata) {
            return Some(false);
        }
        let settings = self.switched?;
        let on = is_on(&settings, metadata.level());
        (!on || metadata.target().starts_with("millrace")).then_some(on)
    }
}

/// The FUSE library's error when the kernel rejects an answer, mostly to an interrupted system call that the
/// kernel has forgotten. It is harmless.
fn is_expected(metadata: &Metadata<'_>) -> bool {
    metadata.target() == "fuser::reply" && *metadata.level() == Level::ERROR
}

fn is_on(settings: &LogSettings, level: &Level) -> bool {
    match *level {
        Level::ERROR => settings.error,
        Level::WARN => settings.warning,
        Level::INFO => settings.info,
        Level::DEBUG => settings.verbose_level >= 1,
        Level::TRACE => settings.verbose_level >= 2,
    }
}

impl<S: Subscriber> Filter<S> for LogFilter {
    fn enabled(&self, metadata: &Metadata<'_>, context: &Context<'_, S>) -> bool {
        self.decided(metadata).unwrap_or_else(|| Filter::<S>::enabled(&self.base, metadata, context))
    }

    fn callsite_enabled(&self, metadata: &'static Metadata<'static>) -> Interest {
        // The filter of --log records call sites for its span directives, so it must see all of them.
        let base = Filter::<S>::callsite_enabled(&self.base, metadata);
        match self.decided(metadata) {
            Some(true) => Interest::always(),
            Some(false) => Interest::never(),
            None => base,
        }
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        let base = Filter::<S>::max_level_hint(&self.base);
        let Some(settings) = self.switched else { return base };
        let levels = [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG, Level::TRACE];
        let finest = levels.into_iter().rfind(|level| is_on(&settings, level));
        // Events of disabled levels never pass, so the finest enabled level bounds both filters.
        Some(finest.map_or(LevelFilter::OFF, LevelFilter::from_level))
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        Filter::<S>::on_new_span(&self.base, attributes, id, context);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        Filter::<S>::on_record(&self.base, id, values, context);
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        Filter::<S>::on_enter(&self.base, id, context);
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        Filter::<S>::on_exit(&self.base, id, context);
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        Filter::<S>::on_close(&self.base, id, context);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::sync::Mutex;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    impl Lines {
        /// Takes the words logged since the last call.
        fn take(&self) -> Vec<String> {
            let bytes = std::mem::take(&mut *self.0.lock().unwrap());
            let text = String::from_utf8(bytes).unwrap();
            text.lines().map(|line| line.split_whitespace().next_back().unwrap().to_owned()).collect()
        }
    }

    fn speak() {
        tracing::error!(target: "millrace_serving", "own-error");
        tracing::warn!(target: "millrace_serving", "own-warn");
        tracing::info!(target: "millrace_serving", "own-info");
        tracing::debug!(target: "millrace_serving", "own-debug");
        tracing::trace!(target: "millrace_serving", "own-trace");
        tracing::error!(target: "h2", "other-error");
        tracing::info!(target: "h2", "other-info");
        tracing::error!(target: "fuser::reply", "interrupted");
    }

    #[test]
    fn log_levels_are_switched_individually() {
        let base = EnvFilter::try_new("warn").unwrap();
        let settings = Mutex::new(settings_of(base.max_level_hint()));
        let (gate, handle) = reload::Layer::new(LogFilter { base, switched: None });
        let lines = Lines::default();
        let writer = lines.clone();
        let layer = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(move || writer.clone());
        let switch = LogSwitch { handle, settings };
        let _guard = tracing_subscriber::registry().with(layer.with_filter(gate)).set_default();
        speak();
        assert_eq!(lines.take(), ["own-error", "own-warn", "other-error"]);
        let started = LogSettings { error: true, warning: true, info: false, verbose_level: 0 };
        assert_eq!(switch.settings(), started);

        switch.change(&|settings| settings.info = true).unwrap();
        speak();
        assert_eq!(lines.take(), ["own-error", "own-warn", "own-info", "other-error"]);
        switch.change(&|settings| settings.warning = false).unwrap();
        let changed = switch.change(&|settings| settings.verbose_level = 1).unwrap();
        assert_eq!(changed, LogSettings { warning: false, info: true, verbose_level: 1, ..started });
        speak();
        assert_eq!(lines.take(), ["own-error", "own-info", "own-debug", "other-error"]);
        switch.change(&|settings| settings.error = false).unwrap();
        switch.change(&|settings| settings.verbose_level = 9).unwrap();
        speak();
        assert_eq!(lines.take(), ["own-info", "own-debug", "own-trace"]);
        switch.change(&|settings| (settings.info, settings.verbose_level) = (false, 0)).unwrap();
        speak();
        assert!(lines.take().is_empty());
    }

    #[test]
    fn log_settings_report_the_effective_filter() {
        let of = |filter: &str| settings_of(EnvFilter::try_new(filter).unwrap().max_level_hint());
        let all = LogSettings { error: true, warning: true, info: true, verbose_level: 2 };
        assert_eq!(of("trace"), all);
        assert_eq!(of("debug"), LogSettings { verbose_level: 1, ..all });
        assert_eq!(of("warn,millrace_serving=info"), LogSettings { verbose_level: 0, ..all });
        let none = LogSettings { error: false, warning: false, info: false, verbose_level: 0 };
        assert_eq!(of("off"), none);
    }
}
