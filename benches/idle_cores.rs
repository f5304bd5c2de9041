//! Cores of a virtual machine that wait a moment for work before they halt, as Linux has them by default.
//!
//! Where that is turned off each thread that is woken on another core goes through the hypervisor: a byte
//! over a pipe and back takes 37 us then, and 5 us otherwise (seen on one machine). Figures of programs that
//! talk to each other, controls and ours, are the hypervisor's there.

use std::fs;

const GOVERNOR: &str = "/sys/devices/system/cpu/cpuidle/current_governor";
const NANOSECONDS: &str = "/sys/module/haltpoll/parameters/guest_halt_poll_ns";
/// What the kernel takes where nobody says otherwise.
const DEFAULT: &str = "200000";

/// While it lives, the cores wait. After it they halt at once again, if they did before, unless the process is
/// killed.
#[derive(Debug)]
pub(crate) struct Waiting {
    turned_on: bool,
}

impl Waiting {
    /// Turns it on where it is off, and says so; nothing else is changed.
    pub(crate) fn begin() -> Waiting {
        let read = |path| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        if read(GOVERNOR) != "haltpoll" || read(NANOSECONDS) != "0" {
            return Waiting { turned_on: false };
        }
        let turned_on = fs::write(NANOSECONDS, DEFAULT);
        match &turned_on {
            Ok(()) => eprintln!(
                "idle cores halt at once here: until the end they wait {DEFAULT} ns first, as is the kernel's \
                 default (--as-is leaves that alone)"
            ),
            Err(error) => {
                eprintln!("idle cores halt at once, which makes each wake-up slow: {NANOSECONDS}: {error}");
            }
        }
        Waiting { turned_on: turned_on.is_ok() }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if self.turned_on
            && let Err(error) = fs::write(NANOSECONDS, "0")
        {
            eprintln!("{NANOSECONDS} stays {DEFAULT}: {error}");
        }
    }
}
