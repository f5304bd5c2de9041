//! Threads that answer clients go before everything else on the machine while several models are in use, where the
//! operator wants it.
//!
//! Long runs are of the kernel's idle class then ([`super::background`]), which others that wake interrupt at
//! once. But a thread that woke a moment earlier, while a third one had the processor, waits behind the idle class
//! all the same when that third one goes to sleep: it has had more than its share of late, the idle class less than
//! its tiny one, and keeps the processor until the next tick of the kernel's clock (Linux 6.6 and later; 4 ms at
//! 250 Hz). Measured on two processors beside a saturated model: ten times a second, which is what one of a hundred
//! requests for a small model meets. Shorter slices for some or all of the threads, and long runs that yield every
//! half a millisecond, changed nothing. The real-time class is not subject to shares.

use std::cell::Cell;
use std::io;

use nix::libc;

use super::mix::Mix;
use crate::error::{Error, Result};

/// The lowest priority of the class: before all of the usual one, behind all else that is of it.
const PRIORITY: libc::c_int = 1;

thread_local! {
    /// Whether this thread is of the real-time class.
    static REALTIME: Cell<bool> = const { Cell::new(false) };
}

/// Whether threads that answer may be of the real-time class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Realtime {
    wanted: bool,
}

impl Realtime {
    /// As configured; tried out where it is wanted.
    ///
    /// # Errors
    /// [`Error::Config`] where the process may not.
    pub(crate) fn new(wanted: bool) -> Result<Realtime> {
        if wanted {
            // On a thread that ends with the trial.
            let tried = std::thread::spawn(|| schedule(true)).join();
            let refused = match tried {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some("it could not be tried".to_owned()),
            };
            if let Some(refused) = refused {
                let reason = format!(
                    "realtime is true, and the kernel does not give this process the real-time class ({refused}): start \
                     it as root, with CAP_SYS_NICE, or with a limit of real-time priority of 1 (ulimit -r 1, \
                     LimitRTPRIO=1 for systemd), or leave it out"
                );
                return Err(Error::Config { reason });
            }
        }
        Ok(Realtime { wanted })
    }

    /// To be asked by threads that answer, whenever they read what a client has sent.
    pub(crate) fn settle(self) {
        if self.wanted {
            change(Mix::is_mixed());
        }
    }
}

/// To be called before this thread does something long.
pub(crate) fn end() {
    change(false);
}

fn change(realtime: bool) {
    if REALTIME.get() == realtime {
        return;
    }
    REALTIME.set(realtime);
    if let Err(error) = schedule(realtime) {
        tracing::warn!(realtime, %error, "the priority of a thread stays as it is");
    }
}

/// Has the kernel schedule this thread as one of the real-time class or of the usual one. Threads that it makes are
/// of the usual one in any case.
fn schedule(realtime: bool) -> io::Result<()> {
    let (policy, priority) = if realtime { (libc::SCHED_RR, PRIORITY) } else { (libc::SCHED_OTHER, 0) };
    let parameter = libc::sched_param { sched_priority: priority };
    // SAFETY: 0 is the calling thread, and the parameter outlives the call.
    match unsafe { libc::sched_setscheduler(0, policy | libc::SCHED_RESET_ON_FORK, &raw const parameter) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::print_stderr)]
    use std::time::Instant;

    use super::super::mix::Account;
    use super::*;

    fn policy() -> libc::c_int {
        // SAFETY: 0 is the calling thread; no memory is involved.
        unsafe { libc::sched_getscheduler(0) }
    }

    #[test]
    fn threads_are_of_the_class_only_while_several_models_are_in_use() {
        let Ok(realtime) = Realtime::new(true) else {
            eprintln!("skipped: this process may not use the real-time class");
            return;
        };
        let (one, other) = (Account::default(), Account::default());
        std::thread::spawn(move || {
            let usual = policy();
            Mix::used(&one, Instant::now());
            Mix::used(&other, Instant::now());
            Realtime::default().settle();
            assert_eq!(policy(), usual, "nobody wants it");
            realtime.settle();
            assert_eq!(policy(), libc::SCHED_RR | libc::SCHED_RESET_ON_FORK);
            assert_eq!(std::thread::spawn(policy).join().unwrap(), usual, "a thread that it makes");
            end();
            assert_eq!(policy() & !libc::SCHED_RESET_ON_FORK, usual);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn who_may_not_is_told_what_is_missing() {
        // On a thread that is nobody's from then on: the system call changes this one alone, unlike the C library's.
        let told = std::thread::spawn(|| {
            // SAFETY: the calls take numbers, and a structure that outlives the call.
            let permitted = unsafe {
                let nobody: libc::uid_t = 65_534;
                libc::syscall(libc::SYS_setresuid, nobody, nobody, nobody);
                let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
                libc::getrlimit(libc::RLIMIT_RTPRIO, &raw mut limit) == 0 && limit.rlim_cur > 0
            };
            (permitted, Realtime::new(true))
        });
        match told.join().unwrap() {
            (true, done) => assert!(done.is_ok(), "{done:?}"),
            (false, Err(Error::Config { reason })) => {
                assert!(reason.contains("realtime is true") && reason.contains("CAP_SYS_NICE"), "{reason}");
            }
            (false, other) => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_not_wanted_is_not_tried() {
        assert_eq!(Realtime::new(false).unwrap(), Realtime::default());
    }
}
