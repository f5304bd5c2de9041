//! Output for people and programs: tables or JSON on standard output, progress and notes on standard error.
//! No other file prints.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use comfy_table::{ContentArrangement, Table, presets};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use millrace_leaf::error_chain;
use serde::Serialize;

/// The output mode of this run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    json: bool,
}

impl Output {
    /// Tables for people, or JSON for programs.
    pub(crate) fn new(json: bool) -> Output {
        Output { json }
    }

    /// Whether the output is JSON for a program.
    pub(crate) fn is_json(self) -> bool {
        self.json
    }

    /// Prints one result: `value` for programs, `rows` under `headers` for people.
    pub(crate) fn table<T: Serialize>(
        self,
        value: &T,
        headers: &[&str],
        rows: impl IntoIterator<Item = Vec<String>>,
    ) -> anyhow::Result<()> {
        if self.json {
            return self.object(value);
        }
        print_line(&table(headers, rows))
    }

    /// Prints one JSON object on a line, in either mode.
    pub(crate) fn object<T: Serialize>(self, value: &T) -> anyhow::Result<()> {
        print_line(&serde_json::to_string(value)?)
    }

    /// Prints free text for people; nothing for programs.
    pub(crate) fn text(self, text: &str) -> anyhow::Result<()> {
        if self.json { Ok(()) } else { print_line(text) }
    }

    /// Prints text that is the command's whole result (a script, a configuration).
    pub(crate) fn raw(self, text: &str) -> anyhow::Result<()> {
        print_line(text.trim_end_matches('\n'))
    }

    /// Prints a piece of a long result; false once the reader has closed standard output.
    pub(crate) fn partial(self, text: &str) -> anyhow::Result<bool> {
        write_line(text.trim_end_matches('\n'))
    }

    /// Prints a measurement of a watching command: for programs an object with the time, for people a text
    /// that replaces the previous one if there are several. False once the reader has closed standard output.
    pub(crate) fn sample(
        self,
        mut value: serde_json::Value,
        text: impl FnOnce() -> String,
        again: bool,
    ) -> anyhow::Result<bool> {
        if self.json {
            let now = chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Millis, true);
            value["time"] = now.into();
            return write_line(&value.to_string());
        }
        if again { self.screen(&text()) } else { self.partial(&text()) }
    }

    /// On a terminal, replaces the previous text; otherwise appends. False once the reader has closed
    /// standard output.
    fn screen(self, text: &str) -> anyhow::Result<bool> {
        if std::io::stdout().is_terminal() {
            // Cursor home, the text with the rest of each line cleared, then everything below cleared.
            let lines: String = text.lines().map(|line| format!("{line}\x1b[K\n")).collect();
            return write_line(&format!("\x1b[H{lines}\x1b[J"));
        }
        write_line(&format!("{text}\n"))
    }

    /// Prints a note on standard error, in either mode.
    pub(crate) fn note(self, text: &str) {
        error_output(text);
    }

    /// A progress bar on standard error, for people only, shown once work takes over a second. Without
    /// `total` it is a spinner; an empty `unit` means that it counts nothing.
    pub(crate) fn progress(self, what: &str, unit: &str, total: Option<u64>) -> ProgressBar {
        if self.json || !std::io::stderr().is_terminal() {
            return ProgressBar::hidden();
        }
        let bar = match total {
            Some(total) => ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden()),
            None => ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden()),
        };
        let template = if unit.is_empty() {
            "{msg:<12} {spinner} {elapsed}".to_owned()
        } else if total.is_some() {
            format!("{{msg:<12}} {{bar:30}} {{human_pos}}/{{human_len}} {unit}  {{rate}}  eta {{eta}}")
        } else {
            format!("{{msg:<12}} {{spinner}} {{human_pos}} {unit}  {{rate}}  {{elapsed}}")
        };
        if let Ok(style) = ProgressStyle::with_template(&template) {
            // Whole numbers: the library's default rate has four decimals.
            bar.set_style(style.with_key("rate", |state: &ProgressState, to: &mut dyn std::fmt::Write| {
                write!(to, "{}/s", count(state.per_sec() as u64)).ok();
            }));
        }
        bar.set_message(what.to_owned());
        let shown = bar.downgrade();
        std::thread::spawn(move || {
            // Shows the bar after the first second, so that quick work stays quiet.
            std::thread::sleep(Duration::from_secs(1));
            if let Some(bar) = shown.upgrade()
                && !bar.is_finished()
            {
                bar.set_draw_target(ProgressDrawTarget::stderr());
                bar.enable_steady_tick(Duration::from_millis(200));
            }
        });
        bar
    }
}

/// A table without lines, at most as wide as the terminal. Control characters are escaped, so that names from files
/// neither command the terminal nor look like rows.
pub(crate) fn table(headers: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    if !headers.is_empty() {
        table.set_header(headers.iter().map(|header| printable(header)));
    }
    for row in rows {
        table.add_row(row.iter().map(|cell| printable(cell)));
    }
    table.to_string()
}

/// Writes a line to standard output; a closed reader (`| head`) is not an error.
fn print_line(text: &str) -> anyhow::Result<()> {
    write_line(text).map(drop)
}

/// [`print_line()`], but returns false when the reader has closed standard output.
fn write_line(text: &str) -> anyhow::Result<bool> {
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        other => Ok(other.map(|()| true)?),
    }
}

/// Writes a line to standard error and ignores failures: a log on a full disk or a closed terminal must not
/// end the work (`eprintln!` would).
fn error_output(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// One line on standard error for an error and its causes, with control characters escaped.
pub(crate) fn error_line(error: &anyhow::Error) {
    error_output(&format!("millrace: {}", printable(&one_line(error))));
}

/// An error and its causes in one line.
pub(crate) fn one_line(error: &anyhow::Error) -> String {
    error_chain::one_line(error.as_ref())
}

impl Output {
    /// Prints a line of a process that this command runs, on the stream that it came from. With JSON for programs,
    /// standard output has results only.
    pub(crate) fn line_of_process(self, text: &str, is_error: bool) {
        // A reader that is gone, or a full disk, must not end the processes.
        if is_error || self.json {
            error_output(text);
        } else {
            print_line(text).ok();
        }
    }
}

/// Formats bytes in binary units.
pub(crate) fn bytes(n: u64) -> String {
    indicatif::HumanBytes(n).to_string()
}

/// A name for a terminal: control characters are escaped.
pub(crate) fn printable(name: &str) -> String {
    let escape = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    name.chars().map(escape).collect()
}

/// Formats a count with thousands separators.
pub(crate) fn count(n: u64) -> String {
    indicatif::HumanCount(n).to_string()
}

/// Formats a duration with three digits.
pub(crate) fn duration(time: Duration) -> String {
    let nanos = time.as_nanos() as f64;
    let (value, unit) = match nanos {
        0.0 => return "0".to_owned(),
        n if n < 1e6 => (n / 1e3, "µs"),
        n if n < 1e9 => (n / 1e6, "ms"),
        n => (n / 1e9, "s"),
    };
    let digits = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.digits$} {unit}")
}

/// Formats a time in UTC.
pub(crate) fn time(at: std::time::SystemTime) -> String {
    chrono::DateTime::<chrono::Utc>::from(at).format("%Y-%m-%d %H:%M:%S").to_string()
}

/// Quotes text for a shell, for commands that people copy.
pub(crate) fn quoted(text: &str) -> String {
    if !text.is_empty() && text.chars().all(|c| c.is_alphanumeric() || "/._-+:@".contains(c)) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::table;

    #[test]
    fn control_characters_of_a_table_are_escaped() {
        let hostile = "a\x1b[31m\n| fake row\r\x07";
        let shown = table(&["name", hostile], [vec![hostile.to_owned(), "é — ñ".to_owned()]]);
        assert_eq!(shown.lines().count(), 2, "{shown}");
        assert!(!shown.contains(['\x1b', '\r', '\x07']) && shown.contains("\\u{1b}"), "{shown}");
        assert!(shown.contains("é — ñ"), "{shown}");
    }
}
