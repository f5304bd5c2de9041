//! The problems that the checks of a file have found so far.

use std::error::Error as StdError;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use millrace_home::check::{Places, Problem, Severity};
use millrace_leaf::error_chain;
use millrace_leaf::suggestion::nearest;

/// Problems, and the lines of the file's keys.
pub(super) struct Findings {
    places: Places,
    pub(super) problems: Vec<Problem>,
}

impl Findings {
    pub(super) fn new(places: Places, problems: Vec<Problem>) -> Findings {
        Findings { places, problems }
    }

    /// Whether no error was found.
    pub(super) fn is_sound(&self) -> bool {
        self.problems.iter().all(|problem| problem.severity == Severity::Warning)
    }

    /// Adds an error of the entry with a path such as `ingest.jobs[0].topic`.
    pub(super) fn error(&mut self, key: &str, message: impl Into<String>) {
        self.problems.push(self.places.problem(key, message));
    }

    pub(super) fn warning(&mut self, key: &str, message: impl Into<String>) {
        self.problems.push(self.places.problem(key, message).as_warning());
    }

    /// Adds an error whose message may begin with the key, relative to `table`.
    pub(super) fn message(&mut self, table: &str, message: &str) {
        let is_of_key = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
        let word = message.split(|c: char| !is_of_key(c)).next().unwrap_or_default().trim_end_matches('.');
        let key = if table.is_empty() { word.to_owned() } else { format!("{table}.{word}") };
        if !word.is_empty() && self.places.has(&key) {
            self.error(&key, message);
        } else if table.is_empty() {
            self.problems.push(Problem::new(None, None, message));
        } else {
            self.error(table, message);
        }
    }

    /// Adds an error of a crate, with its causes. Messages of the model server name their table in brackets.
    pub(super) fn cause(&mut self, table: &str, error: &(dyn StdError + 'static)) {
        let text = error_chain::one_line(error);
        self.message(table, text.strip_prefix("[serving] ").unwrap_or(&text));
    }

    /// Warns of a name that is not declared but resembles a declared one.
    pub(super) fn spelled(&mut self, key: &str, name: &str, declared: &[&str], table: &str) {
        if declared.contains(&name) {
            return;
        }
        if let Some(near) = nearest(name, declared.iter().copied()) {
            let message = format!("{name:?} is not in {table}, which has {near:?}: is that what is meant?");
            self.warning(key, message);
        }
    }

    /// Checks that a file can be read, and warns of a secret one that every user of the machine may read or change.
    /// Returns whether it can be read.
    pub(super) fn file(&mut self, key: &str, path: &Path, is_secret: bool) -> bool {
        // Asked before opening: opening a FIFO waits for a writer.
        let opened = std::fs::metadata(path).and_then(|metadata| match metadata.is_file() {
            true => std::fs::File::open(path).map(|_| Some(metadata)),
            false => Ok(None),
        });
        let metadata = match opened {
            Ok(Some(metadata)) => metadata,
            Ok(None) => {
                self.error(key, format!("{} is not a file", path.display()));
                return false;
            }
            Err(error) => {
                self.error(key, format!("cannot read {}: {error}", path.display()));
                return false;
            }
        };
        let mode = metadata.mode() & 0o7777;
        if is_secret && mode & 0o007 != 0 {
            let path = path.display();
            self.warning(
                key,
                format!(
                    "every user may read or change the secret {path} (mode {mode:04o}); run chmod 600 {path}"
                ),
            );
        }
        true
    }
}
