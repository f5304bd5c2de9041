//! The `mount.millrace` helper: `mount -t millrace` and /etc/fstab run the program under this name. Its
//! arguments become those of `millrace mount --detach`.

use std::ffi::OsString;
use std::path::Path;

use crate::failure::{Exit, fail};

/// The name that mount(8) looks for in /sbin.
const NAME: &str = "mount.millrace";
/// Ignored options: those for mount(8) and systemd, and those for access times, which reads of a volume never
/// change.
const NOT_OURS: [&str; 18] = [
    "auto",
    "noauto",
    "nofail",
    "_netdev",
    "defaults",
    "nouser",
    "async",
    "atime",
    "noatime",
    "relatime",
    "norelatime",
    "strictatime",
    "nostrictatime",
    "diratime",
    "nodiratime",
    "lazytime",
    "nolazytime",
    "silent",
];

/// The options that become flags of `millrace mount`; a later option overrides an earlier one.
#[derive(Debug, Default)]
struct Flags {
    read_only: bool,
    allow_other: bool,
    suid: bool,
    dev: bool,
    noexec: bool,
}

impl Flags {
    /// Applies an option. Returns false if it is not one of these.
    fn apply(&mut self, option: &str) -> bool {
        match option {
            "ro" => self.read_only = true,
            "rw" => self.read_only = false,
            "allow_other" => self.allow_other = true,
            "suid" => self.suid = true,
            "nosuid" => self.suid = false,
            "dev" => self.dev = true,
            "nodev" => self.dev = false,
            "noexec" => self.noexec = true,
            "exec" => self.noexec = false,
            // As mount(8) does for mounts by users.
            "user" | "users" | "owner" | "group" => {
                (self.noexec, self.suid, self.dev) = (true, false, false);
            }
            _ if option.starts_with("user=") => return self.apply("user"),
            _ => return false,
        }
        true
    }

    fn arguments(&self) -> impl Iterator<Item = OsString> {
        let flags = [
            (self.read_only, "--read-only"),
            (self.allow_other, "--allow-other"),
            (self.suid, "--suid"),
            (self.dev, "--dev"),
            (self.noexec, "--noexec"),
        ];
        flags.into_iter().filter(|(given, _)| *given).map(|(_, flag)| flag.into())
    }
}

/// The arguments for clap; those of `mount.millrace` are translated.
pub(crate) fn arguments(given: impl Iterator<Item = OsString>) -> anyhow::Result<Vec<OsString>> {
    let given: Vec<OsString> = given.collect();
    let name = given.first().map(Path::new).and_then(Path::file_name);
    if name.is_none_or(|name| name != NAME) {
        return Ok(given);
    }
    translate(given.into_iter().skip(1))
}

fn translate(given: impl Iterator<Item = OsString>) -> anyhow::Result<Vec<OsString>> {
    let (mut places, mut options) = (Vec::new(), Vec::new());
    let mut given = given;
    while let Some(argument) = given.next() {
        match argument.to_str() {
            Some("-o") => options.extend(given.next()),
            Some("-t" | "-N") => drop(given.next()),
            // mount(8) passes these on: sloppy, fake, no mtab, verbose.
            Some(flag) if flag.starts_with('-') && flag.len() > 1 => {
                if flag.contains('f') {
                    return fail(Exit::Usage, "mount -f is not supported");
                }
            }
            _ => places.push(argument),
        }
    }
    let [what, at] = places.as_slice() else {
        return fail(Exit::Usage, format!("{NAME} takes VOLUME[@SNAPSHOT] PATH [-o OPTIONS]"));
    };
    let mut arguments: Vec<OsString> = vec!["millrace".into()];
    let (mut named, mut flags) = (Vec::<OsString>::new(), Flags::default());
    let mut given = Vec::new();
    for text in &options {
        let Some(text) = text.to_str() else {
            return fail(Exit::Usage, format!("{NAME}: the options are not UTF-8 text: {}", text.display()));
        };
        given.extend(text.split(','));
    }
    for option in given {
        match option.split_once('=') {
            Some(("home", value)) => arguments.extend(["--home".into(), value.into()]),
            Some(("config", value)) => arguments.extend(["--config".into(), value.into()]),
            Some(("open", value)) => named.extend(["--open".into(), value.into()]),
            Some(("comment", _)) => {}
            _ if option == "supervise" => named.push("--supervise".into()),
            _ if option.is_empty() || NOT_OURS.contains(&option) => {}
            _ if option.starts_with("x-") || option.starts_with("X-") => {}
            _ if flags.apply(option) => {}
            _ => {
                let (what, at) = (what.display(), at.display());
                return fail(
                    Exit::Usage,
                    format!(
                        "cannot mount {what} at {at}: {NAME} does not support option {option:?}; remove it \
                         (docs/how-to/mount-at-boot.md lists the options)"
                    ),
                );
            }
        }
    }
    arguments.extend(["mount".into(), "--detach".into()]);
    arguments.append(&mut named);
    arguments.extend(flags.arguments());
    arguments.extend([what.clone(), at.clone()]);
    Ok(arguments)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(text: &str) -> Result<String, String> {
        let given = text.split(' ').map(OsString::from);
        let arguments = arguments(given).map_err(|error| error.to_string())?;
        Ok(arguments.join(" ".as_ref()).to_string_lossy().into_owned())
    }

    #[test]
    fn fstab_options_that_are_not_utf8_are_refused() {
        use std::os::unix::ffi::OsStringExt as _;
        let given = ["mount.millrace", "v", "/mnt", "-o"].map(OsString::from);
        let odd = OsString::from_vec(b"ro,noexec,comment=caf\xe9".to_vec());
        let refused = arguments(given.into_iter().chain([odd]));
        assert!(refused.is_err_and(|error| error.to_string().contains("not UTF-8 text")));
    }

    #[test]
    fn lines_of_fstab_become_mounts() {
        assert_eq!(
            translated("/sbin/mount.millrace v /mnt -o rw,home=/h,open=pages,_netdev,x-systemd.automount"),
            Ok("millrace --home /h mount --detach --open pages v /mnt".into())
        );
        assert_eq!(
            translated("mount.millrace v@s /mnt -n -o ro,supervise"),
            Ok("millrace mount --detach --supervise --read-only v@s /mnt".into())
        );
        for (options, flags) in [
            ("ro,noatime,relatime,nofail", "--read-only "),
            ("user,x-gvfs-show,comment=ours", "--noexec "),
            ("users,exec", ""),
            ("suid,dev,user=anna", "--noexec "),
            ("users,suid,dev,allow_other", "--allow-other --suid --dev --noexec "),
            ("noexec,nosuid,nodev,ro,rw", "--noexec "),
        ] {
            let line = format!("mount.millrace v /mnt -o {options}");
            assert_eq!(translated(&line), Ok(format!("millrace mount --detach {flags}v /mnt")));
        }
        assert_eq!(translated("millrace fsck --scrub"), Ok("millrace fsck --scrub".into()));
        assert!(translated("mount.millrace v /mnt -o sync").is_err_and(|error| error.contains("sync")));
        assert!(translated("mount.millrace v").is_err_and(|error| error.contains("PATH")));
    }
}
