//! The command line of `mount.millrace`, under which name `mount -t millrace` and /etc/fstab start the
//! program, turned into that of `millrace mount --detach`.

use std::ffi::OsString;
use std::path::Path;

use crate::failure::{Exit, fail};

/// The name that mount(8) looks for in /sbin.
const NAME: &str = "mount.millrace";
/// Options for mount(8) and systemd alone.
const NOT_OURS: [&str; 9] =
    ["rw", "auto", "noauto", "nofail", "_netdev", "defaults", "user", "users", "nouser"];

/// The arguments as clap reads them, `mount.millrace`'s translated.
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
            // Sloppy, fake, no mtab, verbose: as mount(8) hands them on.
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
    let (mut flags, mut read_only): (Vec<OsString>, bool) = (Vec::new(), false);
    for option in options.iter().flat_map(|text| text.to_str().unwrap_or_default().split(',')) {
        match option.split_once('=') {
            Some(("home", value)) => arguments.extend(["--home".into(), value.into()]),
            Some(("config", value)) => arguments.extend(["--config".into(), value.into()]),
            Some(("open", value)) => flags.extend(["--open".into(), value.into()]),
            _ if option == "ro" => read_only = true,
            _ if option == "supervise" => flags.push("--supervise".into()),
            _ if option.is_empty() || NOT_OURS.contains(&option) || option.starts_with("x-") => {}
            _ => return fail(Exit::Usage, format!("{NAME} knows no option {option:?}")),
        }
    }
    if read_only && !what.to_string_lossy().contains('@') {
        let message = format!("{} is live and would be writable: mount a snapshot for ro", what.display());
        return fail(Exit::Usage, message);
    }
    arguments.extend(["mount".into(), "--detach".into()]);
    arguments.append(&mut flags);
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
    fn lines_of_fstab_become_mounts() {
        assert_eq!(
            translated("/sbin/mount.millrace v /mnt -o rw,home=/h,open=pages,_netdev,x-systemd.automount"),
            Ok("millrace --home /h mount --detach --open pages v /mnt".into())
        );
        assert_eq!(
            translated("mount.millrace v@s /mnt -n -o ro,supervise"),
            Ok("millrace mount --detach --supervise v@s /mnt".into())
        );
        assert_eq!(translated("millrace fsck --scrub"), Ok("millrace fsck --scrub".into()));
        assert!(translated("mount.millrace v /mnt -o ro").is_err_and(|error| error.contains("snapshot")));
        assert!(translated("mount.millrace v /mnt -o noexec").is_err_and(|error| error.contains("noexec")));
        assert!(translated("mount.millrace v").is_err_and(|error| error.contains("PATH")));
    }
}
