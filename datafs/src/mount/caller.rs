//! Groups, capabilities and signals of the calling threads, read from `/proc`. A request has only user and first group.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use fuser::Request;

/// Bit of CAP_DAC_OVERRIDE in a capability mask.
pub(super) const CAP_DAC_OVERRIDE: u32 = 1;
/// Bit of CAP_DAC_READ_SEARCH in a capability mask.
pub(super) const CAP_DAC_READ_SEARCH: u32 = 2;
/// Bit of CAP_FOWNER in a capability mask.
pub(super) const CAP_FOWNER: u32 = 3;

/// Whether a thread has a signal that it does not block: it waits in the kernel, which would answer its
/// system call then if the file system did. Threads that cannot be seen from here count as not.
pub(super) fn is_interrupted(thread: u32) -> bool {
    let Some(status) = status(thread) else { return false };
    let mask = |name| mask_in(&status, name);
    (mask("SigPnd") | mask("ShdPnd")) & !mask("SigBlk") & !mask("SigIgn") != 0
}

/// Whether a thread has a capability. Threads that cannot be seen from here count as without.
pub(super) fn has_capability(thread: u32, capability: u32) -> bool {
    is_in_own_user_namespace(thread)
        && status(thread).is_some_and(|status| mask_in(&status, "CapEff") >> capability & 1 == 1)
}

/// Capabilities hold in their own user namespace, and every user can create one with all of them. A namespace that
/// cannot be seen from here counts as another.
fn is_in_own_user_namespace(thread: u32) -> bool {
    let namespace = |task: &str| {
        let found = fs::metadata(format!("/proc/{task}/ns/user")).ok()?;
        Some((found.dev(), found.ino()))
    };
    namespace("self").is_some_and(|own| namespace(&thread.to_string()) == Some(own))
}

/// Whether a caller belongs to a group; `None` where that cannot be seen from here.
pub(super) fn is_in_group(request: &Request, group: u32) -> Option<bool> {
    if request.gid() == group {
        return Some(true);
    }
    let status = status(request.pid())?;
    let groups = line_of(&status, "Groups")?;
    Some(groups.split_whitespace().any(|one| one.parse() == Ok(group)))
}

fn status(thread: u32) -> Option<String> {
    fs::read_to_string(format!("/proc/{thread}/status")).ok()
}

fn line_of<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
}

fn mask_in(status: &str, name: &str) -> u64 {
    line_of(status, name).and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::{BufRead as _, BufReader};
    use std::process::{Command, Stdio};

    use super::*;

    /// A shell that has all capabilities of the namespace that it begins in.
    fn with_shell(program: &str, args: &[&str], look: impl FnOnce(u32)) {
        let mut child = Command::new(program)
            .args(args)
            .args(["sh", "-c", "echo begun; exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "begun\n");
        look(child.id());
        drop(child.stdin.take());
        child.wait().unwrap();
    }

    #[test]
    fn capabilities_of_a_user_namespace_of_the_caller_do_not_count() {
        let own = status(std::process::id()).unwrap();
        with_shell("unshare", &["--user", "--map-root-user"], |shell| {
            let status = status(shell).unwrap();
            assert_eq!(mask_in(&status, "CapEff") >> CAP_FOWNER & 1, 1, "{status}");
            assert!(!has_capability(shell, CAP_FOWNER));
        });
        with_shell("env", &[], |shell| {
            assert_eq!(has_capability(shell, CAP_FOWNER), mask_in(&own, "CapEff") >> CAP_FOWNER & 1 == 1);
        });
    }
}
