//! Has the cores of a virtual machine wait a moment for work before they halt, as Linux has it by default.
//!
//! Where that is turned off each thread that is woken on another core goes through the hypervisor: a byte
//! over a pipe and back takes 37 us then, and 5 us otherwise (seen on one machine). Figures of programs that
//! talk to each other, controls and ours, are the hypervisor's there.

use std::fs;
use std::path::{Path, PathBuf};

use crate::idle_cores::{DEFAULT_NANOSECONDS, immediate_halt_setting};

/// While it lives, the cores wait. After it they halt at once again, if they did before, unless the process is
/// killed.
#[derive(Debug)]
pub(crate) struct WaitingCores {
    /// The setting that was changed.
    changed: Option<PathBuf>,
}

impl WaitingCores {
    /// Turns it on where it is off, and says so; nothing else is changed.
    pub(crate) fn begin() -> WaitingCores {
        let Some(setting) = immediate_halt_setting(Path::new("/sys")) else {
            return WaitingCores { changed: None };
        };
        if let Err(error) = fs::write(&setting, DEFAULT_NANOSECONDS) {
            eprintln!(
                "idle cores halt at once, which makes each wake-up slow: {}: {error}",
                setting.display()
            );
            return WaitingCores { changed: None };
        }
        eprintln!(
            "idle cores halt at once here: until the end they wait {DEFAULT_NANOSECONDS} ns first, as is the \
             kernel's default (--as-is leaves that alone)"
        );
        WaitingCores { changed: Some(setting) }
    }
}

impl Drop for WaitingCores {
    fn drop(&mut self) {
        if let Some(setting) = &self.changed
            && let Err(error) = fs::write(setting, "0")
        {
            eprintln!("{} stays {DEFAULT_NANOSECONDS}: {error}", setting.display());
        }
    }
}
