//! Groups, capabilities, signals and system calls of the calling threads, read from `/proc`. A request has only user
//! and first group.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use fuser::Request;

/// Bit of CAP_DAC_OVERRIDE in a capability mask.
pub(super) const CAP_DAC_OVERRIDE: u32 = 1;
/// Bit of CAP_DAC_READ_SEARCH in a capability mask.
pub(super) const CAP_DAC_READ_SEARCH: u32 = 2;
/// Bit of CAP_FOWNER in a capability mask.
pub(super) const CAP_FOWNER: u32 = 3;

/// System calls that have the same numbers on all architectures, and no names in the library on some.
const SYS_FCHMODAT2: libc::c_long = 452;
const SYS_SETXATTRAT: libc::c_long = 463;
const SYS_REMOVEXATTRAT: libc::c_long = 466;

/// How often a thread's system call is read that has sent its request and does not wait for the answer yet.
const CALL_READS_MAX: u32 = 100;

/// How a system call says what it is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallBy {
    /// By a path, which the kernel walks again when the answer is that it is stale.
    Path,
    /// By a descriptor, mostly.
    Other,
    /// It cannot be seen from here.
    Unknown,
}

/// How the system call says what it is about in which a thread waits for an answer.
pub(super) fn call_by(thread: u32) -> CallBy {
    if thread == 0 {
        return CallBy::Unknown;
    }
    for _ in 0..CALL_READS_MAX {
        match fs::read_to_string(format!("/proc/{thread}/syscall")) {
            Ok(call) if call.starts_with("running") => std::thread::yield_now(),
            Ok(call) => return call_by_in(&call),
            Err(_) => return CallBy::Unknown,
        }
    }
    CallBy::Unknown
}

/// Whether a thread may be on its way along a path: it waits in a call by path, or for a processor, or runs. One that
/// cannot be seen from here may.
pub(super) fn may_walk(thread: u32) -> bool {
    match fs::read_to_string(format!("/proc/{thread}/syscall")) {
        Ok(call) => call.starts_with("running") || call_by_in(&call) != CallBy::Other,
        Err(error) => error.kind() == std::io::ErrorKind::PermissionDenied,
    }
}

/// The number of the system call, in decimals, is followed by its arguments as `0x` and hexadecimals. A negative one
/// stands for a thread in no system call.
fn call_by_in(call: &str) -> CallBy {
    // A program of 32 bits has other numbers. Its stack pointer, the last word but one, fits in 32 bits.
    let stack = call.split_whitespace().rev().nth(1).and_then(|word| word.strip_prefix("0x"));
    if stack.is_none_or(|word| u64::from_str_radix(word, 16).is_ok_and(|stack| u32::try_from(stack).is_ok()))
    {
        return CallBy::Unknown;
    }
    let mut words = call.split_whitespace();
    let number = words.next().and_then(|word| word.parse::<libc::c_long>().ok());
    let Some(number) = number.filter(|number| *number >= 0) else { return CallBy::Unknown };
    let mut arguments = words.map(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok());
    let mut argument = |index| arguments.nth(index).flatten();
    let by_path = match number {
        libc::SYS_truncate
        | libc::SYS_fchmodat
        | SYS_FCHMODAT2
        | libc::SYS_fchownat
        | libc::SYS_setxattr
        | libc::SYS_lsetxattr
        | libc::SYS_removexattr
        | libc::SYS_lremovexattr
        | libc::SYS_openat
        | libc::SYS_openat2
        | libc::SYS_readlinkat
        | libc::SYS_faccessat
        | libc::SYS_faccessat2
        | libc::SYS_execve
        | libc::SYS_chdir
        | libc::SYS_statfs
        | libc::SYS_renameat2
        | libc::SYS_linkat
        | libc::SYS_unlinkat
        | libc::SYS_getxattr
        | libc::SYS_lgetxattr
        | libc::SYS_listxattr
        | libc::SYS_llistxattr => true,
        // Without a path it is about the descriptor.
        libc::SYS_utimensat => argument(1) != Some(0),
        // So it is with this flag, and an empty path.
        SYS_SETXATTRAT | SYS_REMOVEXATTRAT | libc::SYS_statx => {
            argument(2).is_none_or(|flags| flags & libc::AT_EMPTY_PATH as u64 == 0)
        }
        libc::SYS_newfstatat => argument(3).is_none_or(|flags| flags & libc::AT_EMPTY_PATH as u64 == 0),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_chmod
        | libc::SYS_chown
        | libc::SYS_lchown
        | libc::SYS_utime
        | libc::SYS_utimes
        | libc::SYS_stat
        | libc::SYS_lstat
        | libc::SYS_readlink
        | libc::SYS_access
        | libc::SYS_rename
        | libc::SYS_link
        | libc::SYS_unlink
        | libc::SYS_rmdir
        | libc::SYS_open
        | libc::SYS_creat => true,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_futimesat => argument(1) != Some(0),
        _ => false,
    };
    if by_path { CallBy::Path } else { CallBy::Other }
}

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

    #[test]
    fn system_calls_by_path_are_told_from_others() {
        let of = |number: libc::c_long, second: u64, third: u64| {
            call_by_in(&format!(
                "{number} 0x3 {second:#x} {third:#x} 0x0 0x0 0x0 0x7ffd9d6068d8 0x7f1a778de503\n"
            ))
        };
        let empty_path = libc::AT_EMPTY_PATH as u64;
        for path in [libc::SYS_truncate, libc::SYS_fchmodat, libc::SYS_setxattr, libc::SYS_utimensat] {
            assert_eq!(of(path, 0x7f00, 0), CallBy::Path, "{path}");
        }
        for other in [libc::SYS_fchmod, libc::SYS_fchown, libc::SYS_fsetxattr, libc::SYS_write] {
            assert_eq!(of(other, 0x7f00, 0), CallBy::Other, "{other}");
        }
        assert_eq!(of(libc::SYS_utimensat, 0, 0), CallBy::Other);
        assert_eq!(of(SYS_SETXATTRAT, 0x7f00, 0), CallBy::Path);
        assert_eq!(of(SYS_SETXATTRAT, 0x7f00, empty_path), CallBy::Other);
        assert_eq!(of(libc::SYS_statx, 0x7f00, 0), CallBy::Path);
        assert_eq!(of(libc::SYS_statx, 0x7f00, empty_path), CallBy::Other);
        assert_eq!(of(libc::SYS_readlinkat, 0x7f00, 0x7f00), CallBy::Path);
        // `chmod` of an x86 program of 32 bits. The number stands for another call in a program of 64 bits.
        let of_32_bits = "15 0x3 0x0 0x0 0x0 0x0 0x0 0xffd068d8 0xf7f78e50\n";
        for unknown in ["-1 0x7ffd9d6068d8 0x7f1a778de503\n", "running\n", "", of_32_bits] {
            assert_eq!(call_by_in(unknown), CallBy::Unknown, "{unknown}");
        }
        assert_eq!(call_by(0), CallBy::Unknown);
        // Of the thread itself: it reads.
        let own = nix::unistd::gettid().as_raw().cast_unsigned();
        assert_ne!(call_by(own), CallBy::Path);
    }

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
