//! Properties of calling threads, read from `/proc`: groups, capabilities, signals and system calls. A FUSE
//! request carries only the user and the primary group.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use fuser::Request;

/// Bit of CAP_DAC_OVERRIDE in a capability mask.
pub(super) const CAP_DAC_OVERRIDE: u32 = 1;
/// Bit of CAP_DAC_READ_SEARCH in a capability mask.
pub(super) const CAP_DAC_READ_SEARCH: u32 = 2;
/// Bit of CAP_FOWNER in a capability mask.
pub(super) const CAP_FOWNER: u32 = 3;

/// System call numbers that all architectures share; `libc` lacks their names on some.
const SYS_FCHMODAT2: libc::c_long = 452;
const SYS_SETXATTRAT: libc::c_long = 463;
const SYS_REMOVEXATTRAT: libc::c_long = 466;

/// Most reads of the system call of a thread that has sent its request and does not wait for the reply yet.
const CALL_READS_MAX: u32 = 100;

/// How a system call names its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallBy {
    /// By a path, which the kernel walks again after ESTALE.
    Path,
    /// Mostly by a descriptor.
    Other,
    /// This process may not read the system call.
    Unknown,
}

/// How the system call in which a thread waits for a reply names its file.
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

/// The format is the decimal number of the system call, then its arguments in hexadecimal with `0x`. A negative
/// number means that the thread is in no system call.
fn call_by_in(call: &str) -> CallBy {
    // A 32-bit program has other numbers. Its stack pointer, the last word but one, fits in 32 bits.
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
        | libc::SYS_openat2 => true,
        // Without a path it names the descriptor.
        libc::SYS_utimensat => argument(1) != Some(0),
        // The same with this flag and an empty path.
        SYS_SETXATTRAT | SYS_REMOVEXATTRAT => {
            argument(2).is_none_or(|flags| flags & libc::AT_EMPTY_PATH as u64 == 0)
        }
        #[cfg(target_arch = "x86_64")]
        libc::SYS_chmod
        | libc::SYS_chown
        | libc::SYS_lchown
        | libc::SYS_utime
        | libc::SYS_utimes
        | libc::SYS_open
        | libc::SYS_creat => true,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_futimesat => argument(1) != Some(0),
        _ => false,
    };
    if by_path { CallBy::Path } else { CallBy::Other }
}

/// Whether a thread has a pending signal that it neither blocks nor ignores. A local file system would
/// interrupt its system call then. A thread that this process may not inspect counts as not interrupted.
pub(super) fn is_interrupted(thread: u32) -> bool {
    let Some(status) = status(thread) else { return false };
    let mask = |name| mask_in(&status, name);
    (mask("SigPnd") | mask("ShdPnd")) & !mask("SigBlk") & !mask("SigIgn") != 0
}

/// Whether a thread has a capability. A thread that this process may not inspect counts as without it.
pub(super) fn has_capability(thread: u32, capability: u32) -> bool {
    is_in_own_user_namespace(thread)
        && status(thread).is_some_and(|status| mask_in(&status, "CapEff") >> capability & 1 == 1)
}

/// Whether a thread is in this process's user namespace. Capabilities hold in one user namespace, and every
/// user can create one with all of them. A namespace that this process may not inspect counts as another.
fn is_in_own_user_namespace(thread: u32) -> bool {
    let namespace = |task: &str| {
        let found = fs::metadata(format!("/proc/{task}/ns/user")).ok()?;
        Some((found.dev(), found.ino()))
    };
    namespace("self").is_some_and(|own| namespace(&thread.to_string()) == Some(own))
}

/// Whether a caller belongs to a group; `None` where this process may not inspect the caller.
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
        // `chmod` of a 32-bit x86 program. Its number means another call in a 64-bit program.
        let of_32_bits = "15 0x3 0x0 0x0 0x0 0x0 0x0 0xffd068d8 0xf7f78e50\n";
        for unknown in ["-1 0x7ffd9d6068d8 0x7f1a778de503\n", "running\n", "", of_32_bits] {
            assert_eq!(call_by_in(unknown), CallBy::Unknown, "{unknown}");
        }
        assert_eq!(call_by(0), CallBy::Unknown);
        // The system call of this thread: it reads.
        let own = nix::unistd::gettid().as_raw().cast_unsigned();
        assert_ne!(call_by(own), CallBy::Path);
    }

    /// Runs a shell with all capabilities of its user namespace, and passes its process ID to `look`.
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
