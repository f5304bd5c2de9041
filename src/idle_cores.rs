//! Whether the idle cores of a virtual machine wait a moment for work before they halt.

use std::fs;
use std::path::Path;

use crate::output::Output;

/// Tells who runs something that programs talk to many times a second, where the cores halt at once.
pub(crate) fn advise(out: Output) {
    if let Some(advice) = advice(Path::new("/sys")) {
        out.note(&advice);
    }
}

/// What there is to tell; `sys` is where sysfs is mounted.
fn advice(sys: &Path) -> Option<String> {
    let read = |path: &Path| fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
    let governor = read(&sys.join("devices/system/cpu/cpuidle/current_governor"))?;
    let setting = sys.join("module/haltpoll/parameters/guest_halt_poll_ns");
    let halts = governor == "haltpoll" && read(&setting)? == "0";
    halts.then(|| {
        format!(
            "idle cores of this virtual machine halt at once, and waking one takes longer than most requests do: \
             `echo 200000 > {}` sets what Linux has by default",
            setting.display()
        )
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn advice_is_for_machines_whose_cores_halt_at_once() {
        let sys = tempfile::tempdir().unwrap();
        assert_eq!(advice(sys.path()), None, "no governor");
        let file = |path: &str, text: &str| {
            let path = sys.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let governor = "devices/system/cpu/cpuidle/current_governor";
        let setting = "module/haltpoll/parameters/guest_halt_poll_ns";
        file(governor, "haltpoll\n");
        assert_eq!(advice(sys.path()), None, "no such setting");
        file(setting, "0\n");
        assert!(advice(sys.path()).unwrap().contains(setting));
        file(setting, "200000\n");
        assert_eq!(advice(sys.path()), None);
        file(setting, "0\n");
        file(governor, "menu\n");
        assert_eq!(advice(sys.path()), None, "the setting is of a governor that is not in use");
    }
}
