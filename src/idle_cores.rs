//! Detection of idle cores of a virtual machine that halt immediately, without polling for work first. Part
//! of the program and of the benchmarks.

use std::fs;
use std::path::{Path, PathBuf};

/// Linux's default polling time before a halt, in nanoseconds.
pub(crate) const DEFAULT_NANOSECONDS: &str = "200000";

/// The path of the setting that makes idle cores halt immediately, if it does; `sys` is the mount point of
/// sysfs.
pub(crate) fn immediate_halt_setting(sys: &Path) -> Option<PathBuf> {
    let read = |path: &Path| fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
    let governor = read(&sys.join("devices/system/cpu/cpuidle/current_governor"))?;
    let setting = sys.join("module/haltpoll/parameters/guest_halt_poll_ns");
    (governor == "haltpoll" && read(&setting)? == "0").then_some(setting)
}

#[cfg(test)]
mod tests {
    // Imports are inside the test, because benchmarks include this file without tests and would not use them.
    #[test]
    fn idle_cores_halt_if_the_active_governor_does_not_poll() {
        use super::{Path, fs, immediate_halt_setting};
        let sys = tempfile::tempdir().unwrap();
        assert_eq!(immediate_halt_setting(sys.path()), None, "no governor");
        let governor = sys.path().join("devices/system/cpu/cpuidle/current_governor");
        let setting = sys.path().join("module/haltpoll/parameters/guest_halt_poll_ns");
        let write = |path: &Path, text: &str| {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write(&governor, "haltpoll\n");
        assert_eq!(immediate_halt_setting(sys.path()), None, "no such setting");
        write(&setting, "0\n");
        assert_eq!(immediate_halt_setting(sys.path()).as_ref(), Some(&setting));
        write(&setting, "200000\n");
        assert_eq!(immediate_halt_setting(sys.path()), None);
        write(&setting, "0\n");
        write(&governor, "menu\n");
        assert_eq!(
            immediate_halt_setting(sys.path()),
            None,
            "the setting is of a governor that is not in use"
        );
    }
}
