//! Child processes of the tests: the test binary starts itself again with a task.
//!
//! A test starts a child by [`spawn`] with the name of a `#[test]` function. That function does nothing unless
//! [`task`] returns a task.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The pause between two looks at a condition, which leaves the processors to the programs that bring it about.
pub(crate) const POLL: Duration = Duration::from_millis(1);

const HOME: &str = "MILLRACE_TEST_HOME";
const ARGUMENT: &str = "MILLRACE_TEST_ARGUMENT";

/// The task of this process: the home and a number, if it is a child.
pub(crate) fn task() -> Option<(PathBuf, u64)> {
    let home = std::env::var_os(HOME)?;
    let argument = std::env::var(ARGUMENT).ok()?.parse().ok()?;
    Some((home.into(), argument))
}

/// Starts a child that runs only the named test function.
pub(crate) fn spawn(function: &str, home: &Path, argument: u64) -> Child {
    command(function, home, argument).spawn().unwrap()
}

/// The command that [`spawn`] starts.
pub(crate) fn command(function: &str, home: &Path, argument: u64) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", function, "--nocapture", "--test-threads=1"])
        .env(HOME, home)
        .env(ARGUMENT, argument.to_string())
        .stdout(Stdio::piped());
    command
}

/// The numbers that a child reports, as `WORD NUMBER` lines among the output of the test harness.
pub(crate) fn reports(child: &mut Child) -> impl Iterator<Item = (String, u64)> + use<> {
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    lines.map_while(Result::ok).filter_map(|line| {
        let (word, number) = line.rsplit_once(' ')?;
        let word = word.rsplit(' ').next()?;
        Some((word.to_owned(), number.parse().ok()?))
    })
}
