//! Messages between the coordinator of a script job and its nodes, as JSON.
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::launch::Launch;
use super::layout::{Layout, Place};
use crate::elastic::proto;

/// Most lines of output that a report of an end has, and most bytes of each.
pub(crate) const LINES_MAX: usize = 20;
pub(crate) const LINE_BYTES_MAX: usize = 500;

/// What every process of a job runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Program {
    /// The script as the user named it; relative names are relative to the folder in which a node was started.
    pub(crate) script: String,
    /// SHA-256 of the script. Each node compares its own copy.
    pub(crate) sha256: String,
    pub(crate) args: Vec<String>,
    /// The interpreter that the user named.
    pub(crate) python: Option<String>,
    /// The dataset, for the environment.
    pub(crate) dataset: Option<String>,
    /// The volume with the run's record.
    pub(crate) volume: String,
    /// Time between SIGTERM and SIGKILL.
    pub(crate) grace_ms: u64,
    /// Processes of earlier launches may still run. Those of this one fence them off (`python/millrace/rounds.py`).
    pub(crate) launch: Launch,
}

/// The assignment of a joined node, as JSON. Native jobs send another object, without this key.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Assignment {
    pub(crate) script: String,
    pub(crate) job: String,
}

/// From the coordinator to a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Order {
    /// The first order: what the node will run. It answers with [`Report::Ready`] or [`Report::Unfit`].
    Introduce(Box<Program>),
    /// Offer this many free ports.
    Prepare { round: u64, ports: usize },
    /// Start the processes of node `node` of the layout.
    Start { layout: Box<Layout>, node: usize },
    /// End all processes of the round, and say when that is done.
    Stop { round: u64 },
    /// The job is over: with an error, or in order.
    Done { error: Option<String> },
}

/// From a node to the coordinator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Report {
    /// The node can run the program.
    Ready,
    /// The node cannot run the program.
    Unfit {
        reason: String,
    },
    Prepared {
        round: u64,
        ports: Vec<u16>,
    },
    Exited {
        round: u64,
        ended: Ended,
    },
    /// All processes of the round have ended, also those that they had started.
    Stopped {
        round: u64,
    },
    /// The node leaves in order: it ends its processes, says [`Report::Stopped`], and closes the connection.
    Leaving,
}

/// The end of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ended {
    pub(crate) place: Place,
    pub(crate) pid: u32,
    pub(crate) exit: Exit,
    /// Milliseconds since the start of the round's processes on that node.
    pub(crate) at_ms: u64,
    /// Whether the node had asked the process to end.
    pub(crate) was_asked: bool,
    /// Whether a later round would fail alike: the script is another one now.
    #[serde(default)]
    pub(crate) is_final: bool,
    /// Its last lines of output, at most [`LINES_MAX`].
    pub(crate) lines: Vec<String>,
}

/// How a process ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Exit {
    Code(i32),
    Signal(i32),
    /// It did not start, or could not be waited for.
    Failed(String),
}

impl Exit {
    pub(crate) fn is_success(&self) -> bool {
        *self == Exit::Code(0)
    }

    /// For messages.
    pub(crate) fn describe(&self) -> String {
        match self {
            Exit::Code(code) => format!("exited with code {code}"),
            Exit::Signal(number) => match nix::sys::signal::Signal::try_from(*number) {
                Ok(signal) => format!("was killed by signal {number} ({signal})"),
                Err(_) => format!("was killed by signal {number}"),
            },
            Exit::Failed(reason) => reason.clone(),
        }
    }
}

impl From<std::io::Result<std::process::ExitStatus>> for Exit {
    fn from(status: std::io::Result<std::process::ExitStatus>) -> Exit {
        use std::os::unix::process::ExitStatusExt as _;
        match status {
            Ok(status) => match (status.code(), status.signal()) {
                (Some(code), _) => Exit::Code(code),
                (None, Some(signal)) => Exit::Signal(signal),
                (None, None) => Exit::Failed("ended without a status".to_owned()),
            },
            Err(error) => Exit::Failed(format!("could not be waited for: {error}")),
        }
    }
}

/// The message for the network.
pub(crate) fn encode<T: Serialize>(message: &T) -> Result<proto::Script, String> {
    let text = serde_json::to_string(message).map_err(|e| format!("a message cannot be written ({e})"))?;
    Ok(proto::Script { text })
}

/// The message of the network.
pub(crate) fn decode<T: DeserializeOwned>(message: &proto::Script) -> Result<T, String> {
    serde_json::from_str(&message.text).map_err(|e| format!("a message cannot be read ({e})"))
}

/// The last `LINES_MAX` lines, each cut at a character.
pub(crate) fn last_lines<'a>(lines: impl DoubleEndedIterator<Item = &'a str>) -> Vec<String> {
    let mut last: Vec<String> = lines
        .rev()
        .filter(|line| !line.trim().is_empty())
        .take(LINES_MAX)
        .map(|line| {
            let end = line.char_indices().map(|(at, _)| at).take_while(|at| *at <= LINE_BYTES_MAX).last();
            let end = if line.len() > LINE_BYTES_MAX { end.unwrap_or(0) } else { line.len() };
            line.get(..end).unwrap_or_default().chars().filter(|c| !c.is_control() || *c == '\t').collect()
        })
        .collect();
    last.reverse();
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_bounded_and_whole_characters() {
        let long = "é".repeat(LINE_BYTES_MAX);
        let lines: Vec<String> = (0..100).map(|n| format!("line {n}")).chain([String::new(), long]).collect();
        let last = last_lines(lines.iter().map(String::as_str));
        assert_eq!(last.len(), LINES_MAX);
        assert_eq!(last[0], "line 81");
        assert!(last[LINES_MAX - 1].len() <= LINE_BYTES_MAX && last[LINES_MAX - 1].ends_with('é'));
        assert_eq!(last_lines(["a\u{1b}[2Jb"].into_iter()), ["a[2Jb"]);
    }

    #[test]
    fn an_end_names_its_code_or_signal() {
        assert_eq!(Exit::Signal(9).describe(), "was killed by signal 9 (SIGKILL)");
        assert_eq!(Exit::Code(3).describe(), "exited with code 3");
        assert!(Exit::Code(0).is_success() && !Exit::Signal(15).is_success());
    }
}
