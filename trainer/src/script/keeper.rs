//! The keeper: a process beside each node that leaves no process of a script behind when the node is killed.
//!
//! The kernel kills the direct children of a node with it, not what they have started. Every process of a node
//! inherits a random mark in its environment, and the keeper knows the process groups. When the pipe from the node
//! closes, it kills all processes in these groups or with the mark. The node uses the same mark after each round.
use std::collections::BTreeSet;
use std::io::{self, BufRead as _, Write as _};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use nix::sys::signal::{SigHandler, Signal, kill, killpg, signal};
use nix::unistd::Pid;
use tokio::process::Command;

use super::launch::Launch;
use crate::error::{Error, Result};
use crate::launch::WorkerCommand;

/// The variable with the mark.
pub(crate) const ENV_MARK: &str = "MILLRACE_PROCESS_MARK";
/// Makes a `millrace worker` the keeper of this mark.
pub(crate) const ENV_KEEP: &str = "MILLRACE_KEEPER_MARK";
/// Passes over all processes before a sweep gives up, and the pause between them.
const PASSES: usize = 200;
const PASS_PAUSE: Duration = Duration::from_millis(10);
/// Longest environment of a process that is read; Linux has 6 MiB for arguments and environment.
const ENVIRON_BYTES_MAX: u64 = 8 << 20;

/// Kills all processes of this user with the mark, until there is none. Returns how many it has killed.
///
/// Two seconds at most: a process that the kernel cannot end, as one that waits for a dead mount, is left.
pub(crate) fn sweep(mark: &str) -> usize {
    let variable = format!("{ENV_MARK}={mark}").into_bytes();
    sweep_all(&|found| found == variable)
}

/// Kills all processes of earlier launches of a job, as [`sweep`]. Their coordinators have ended, and their keepers may have
/// been killed with them.
pub(super) fn sweep_earlier(launch: &Launch) -> usize {
    sweep_all(&|found| launch.is_after(found))
}

fn sweep_all(is_wanted: &dyn Fn(&[u8]) -> bool) -> usize {
    let mut killed = BTreeSet::new();
    for _ in 0..PASSES {
        let found = with_variable(is_wanted);
        if found.is_empty() {
            break;
        }
        for pid in found {
            // It may have just ended.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            killed.insert(pid);
        }
        std::thread::sleep(PASS_PAUSE);
    }
    killed.len()
}

/// The processes with such a variable, as `NAME=VALUE`. Those of other users cannot be read.
fn with_variable(is_wanted: &dyn Fn(&[u8]) -> bool) -> Vec<i32> {
    use std::io::Read as _;
    let own = std::process::id();
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| *pid != own)
        .filter(|pid| {
            let mut environ = Vec::new();
            let read = std::fs::File::open(format!("/proc/{pid}/environ"))
                .and_then(|file| file.take(ENVIRON_BYTES_MAX).read_to_end(&mut environ));
            read.is_ok() && environ.split(|byte| *byte == 0).any(is_wanted)
        })
        .map(|pid| pid as i32)
        .collect()
}

/// Whether this process was started as a keeper.
pub fn is_keeper() -> bool {
    std::env::var_os(ENV_KEEP).is_some()
}

/// Runs this process as the keeper of the node that has started it, until that node ends in any way.
///
/// # Errors
/// [`Error::Io`] when signals cannot be ignored, [`Error::Launch`] without a mark.
pub fn keep() -> Result<()> {
    let mark = std::env::var(ENV_KEEP).ok().filter(|mark| mark.len() >= 16).ok_or_else(|| Error::Launch {
        program: "keeper".to_owned(),
        reason: format!("{ENV_KEEP} is not set: millrace train --script starts keepers itself"),
    })?;
    ignore_stop_signals()?;
    let mut groups = BTreeSet::new();
    // The pipe closes when the node ends.
    for line in io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        match line.parse::<i32>() {
            Ok(group) if group > 1 => drop(groups.insert(group)),
            Ok(0) => groups.clear(),
            Ok(group) if group < -1 => drop(groups.remove(&group.saturating_neg())),
            _ => {}
        }
    }
    for group in groups {
        // Most have ended with the node.
        let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
    }
    sweep(&mark);
    Ok(())
}

/// Signals that end all processes of a session leave the keeper alive: it has to be the last one.
#[allow(unsafe_code)]
fn ignore_stop_signals() -> Result<()> {
    for kind in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        // SAFETY: ignoring a signal installs no handler.
        unsafe { signal(kind, SigHandler::SigIgn) }.map_err(|e| Error::io("ignore signals", e.into()))?;
    }
    Ok(())
}

/// A running keeper, seen from its node.
pub(crate) struct Keeper {
    child: tokio::process::Child,
    pipe: Option<std::process::ChildStdin>,
}

impl Keeper {
    /// Starts the keeper in a process group of its own. `command` must end in [`keep`] for a `millrace worker`.
    pub(crate) fn start(command: &WorkerCommand, mark: &str) -> Result<Keeper> {
        let failed = |e: io::Error| Error::io("start the keeper of this node's processes", e);
        let mut child = Command::new(&command.program)
            .args(&command.args)
            .envs(command.env.iter().map(|(key, value)| (key, value)))
            .env(ENV_KEEP, mark)
            // A job inside of a job must outlive the sweep of the outer one long enough to end its own processes.
            .env_remove(ENV_MARK)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let pipe = child.stdin.take().map(|pipe| pipe.into_owned_fd()).transpose().map_err(failed)?;
        Ok(Keeper { child, pipe: pipe.map(Into::into) })
    }

    /// Tells the keeper a process group. A keeper that has died is noticed by [`Keeper::died`].
    pub(crate) fn add(&mut self, group: u32) {
        self.tell(&format!("{group}\n"));
    }

    /// A group has ended: its number may soon be that of another program.
    pub(crate) fn remove(&mut self, group: u32) {
        self.tell(&format!("-{group}\n"));
    }

    /// All groups have ended.
    pub(crate) fn clear(&mut self) {
        self.tell("0\n");
    }

    fn tell(&mut self, text: &str) {
        if let Some(pipe) = &mut self.pipe {
            // A few bytes fit into the pipe.
            drop(pipe.write_all(text.as_bytes()));
        }
    }

    /// Waits until the keeper has died: somebody killed it.
    pub(crate) async fn died(&mut self) -> io::Result<ExitStatus> {
        self.child.wait().await
    }

    /// Ends the keeper; it makes a last sweep.
    pub(crate) async fn end(mut self, limit: Duration) {
        drop(self.pipe.take());
        if tokio::time::timeout(limit, self.child.wait()).await.is_err() {
            tracing::warn!("the keeper of this node's processes does not end");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
    use std::process::Command;

    use super::super::launch::ENV_LAUNCH;
    use super::*;

    #[test]
    fn a_sweep_kills_a_process_that_has_left_its_group_and_no_other() {
        let mark = hex::encode(millrace_leaf::random::bytes::<16>().unwrap());
        let launch = |number| Launch { job: mark.clone(), number };
        let sleep = |name: &str, value: &str| {
            let mut command = Command::new("sleep");
            command.arg("600").env(name, value).process_group(0).spawn().unwrap()
        };
        let mut other = sleep(ENV_MARK, "another");
        let mut later = sleep(ENV_LAUNCH, &launch(3).value());
        let sweeps: [(&str, String, &dyn Fn() -> usize); 2] = [
            (ENV_MARK, mark.clone(), &|| sweep(&mark)),
            (ENV_LAUNCH, launch(2).value(), &|| sweep_earlier(&launch(3))),
        ];
        for (name, value, sweep) in sweeps {
            let variable = format!("{name}={value}").into_bytes();
            let mut own = sleep(name, &value);
            // Between fork and exec a process has the environment of its parent.
            while with_variable(&|found| found == variable).is_empty() {
                std::thread::yield_now();
            }
            assert_eq!(sweep(), 1);
            assert_eq!(own.wait().unwrap().signal(), Some(9));
        }
        assert!(later.try_wait().unwrap().is_none());
        later.kill().unwrap();
        later.wait().unwrap();
        assert!(other.try_wait().unwrap().is_none());
        other.kill().unwrap();
        other.wait().unwrap();
        assert_eq!(sweep(&mark), 0);
    }
}
