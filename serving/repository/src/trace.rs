//! Request traces in Triton's form: selects the requests to trace, and writes the times of their steps to
//! files. Clients change the settings.
//!
//! Tracing is off at first; a request then costs one relaxed load. While any tracing is on, each answered
//! request takes a lock to determine whether it is traced.

mod file;
mod settings;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Instant, SystemTime};

use parking_lot::Mutex;

use file::Traces;
use millrace_serving_core::error::InferError;
use millrace_serving_core::statistics::Times;
pub use settings::Change;
use settings::{Scope, Settings};

/// The trace settings and the open trace files.
#[derive(Debug)]
pub struct Tracer {
    directory: Option<PathBuf>,
    active: AtomicBool,
    next_id: AtomicU64,
    /// An instant with its system time, in nanoseconds since the epoch.
    start: (Instant, u64),
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    all: Scope,
    models: BTreeMap<String, Scope>,
    /// Open files by name.
    files: BTreeMap<String, Traces>,
}

impl State {
    fn settings(&self, model: Option<&str>) -> Settings {
        let own = model.and_then(|model| self.models.get(model));
        let all = self.all.over(Settings::default());
        own.map_or(all.clone(), |own| own.over(all))
    }

    /// Whether to trace the next request of a model. Counts the request in the scope that sets the rate and
    /// the count: the model, or all.
    fn turn(&mut self, model: &str, settings: &Settings) -> bool {
        let State { all, models, .. } = self;
        let mut own = models.get_mut(model);
        let seen = match own.as_deref_mut() {
            Some(own) if own.rate.is_some() => &mut own.seen,
            _ => &mut all.seen,
        };
        *seen = seen.wrapping_add(1);
        if !seen.is_multiple_of(u64::from(settings.rate.max(1))) {
            return false;
        }
        let left = match own {
            Some(own) if own.count.is_some() => &mut own.count,
            _ => &mut all.count,
        };
        match left {
            None | Some(None) => true,
            Some(Some(0)) => false,
            Some(Some(left)) => {
                *left -= 1;
                true
            }
        }
    }
}

impl Tracer {
    /// Writes traces to files in `directory`; without one, tracing is impossible.
    pub fn new(directory: Option<PathBuf>) -> Tracer {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Tracer {
            directory,
            active: AtomicBool::new(false),
            next_id: AtomicU64::new(1),
            start: (Instant::now(), u64::try_from(since.as_nanos()).unwrap_or(0)),
            state: Mutex::default(),
        }
    }

    /// Whether traces can be written.
    pub fn is_possible(&self) -> bool {
        self.directory.is_some()
    }

    /// The settings in force for all models, or for one.
    pub fn settings(&self, model: Option<&str>) -> [(&'static str, Vec<String>); 6] {
        self.state.lock().settings(model).named()
    }

    /// Applies changes atomically. Changes of level, frequency or file name complete the open files.
    ///
    /// # Errors
    /// [`InferError::Invalid`] for TIMESTAMPS without a trace directory.
    pub fn change(&self, model: Option<&str>, changes: &[Change]) -> Result<(), InferError> {
        let mut state = self.state.lock();
        let scope = match model {
            Some(model) => state.models.entry(model.to_owned()).or_default(),
            None => &mut state.all,
        };
        let mut next = scope.clone();
        changes.iter().for_each(|change| next.apply(change));
        if next.traces() && self.directory.is_none() {
            return Err(InferError::invalid(
                "trace_level TIMESTAMPS is refused: this server has no folder for traces, set [serving] trace_directory",
            ));
        }
        *scope = next;
        let active = state.all.traces() || state.models.values().any(Scope::traces);
        self.active.store(active, Ordering::Relaxed);
        if changes.iter().any(Change::ends_files) {
            // Dropping a file completes it.
            state.files.clear();
        }
        Ok(())
    }

    /// Stops tracing and completes every file.
    pub fn finish(&self) {
        self.active.store(false, Ordering::Relaxed);
        self.state.lock().files.clear();
    }

    /// Traces an answered request, if it is selected.
    pub fn answered(&self, model: &str, version: u64, arrived: Instant, times: &Times) {
        if !self.active.load(Ordering::Relaxed) {
            return;
        }
        let Some(directory) = &self.directory else { return };
        let mut state = self.state.lock();
        let settings = state.settings(Some(model));
        if !settings.traces || !state.turn(model, &settings) {
            return;
        }
        let steps = [
            ("REQUEST_START", arrived),
            ("QUEUE_START", times.queued),
            ("COMPUTE_START", times.computing),
            ("COMPUTE_INPUT_END", times.input_end),
            ("COMPUTE_OUTPUT_START", times.output_start),
            ("COMPUTE_END", times.end),
            ("REQUEST_END", times.end),
        ];
        let step = |(name, at): (&str, Instant)| serde_json::json!({ "name": name, "ns": self.nanos(at) });
        // An answer from the response cache has no compute steps.
        let steps = steps.into_iter().filter(|(name, _)| !(times.cached && name.starts_with("COMPUTE")));
        let trace = serde_json::json!({
            "id": self.next_id.fetch_add(1, Ordering::Relaxed),
            "model_name": model,
            "model_version": version,
            "timestamps": steps.map(step).collect::<Vec<_>>(),
        });
        let traces = state.files.entry(settings.file.clone());
        let traces = traces.or_insert_with(|| Traces::new(directory, &settings.file, settings.log_frequency));
        traces.add(&trace.to_string());
        if state.settings(Some(model)).count == Some(0) {
            // The model's count is used up, so this was its last trace.
            if let Some(traces) = state.files.get_mut(&settings.file) {
                traces.end();
            }
        }
    }

    fn nanos(&self, at: Instant) -> u64 {
        let (start, clock) = self.start;
        let since = u64::try_from(at.saturating_duration_since(start).as_nanos()).unwrap_or(u64::MAX);
        clock.saturating_add(since)
    }
}
