//! Requirements of tests: the facilities that a test needs from the machine, and the skip or failure without
//! them. With the feature `s3`, also an S3 server.
//!
//! A test that cannot run fails, unless the environment permits the skip. [`skip`] is the only way to leave a test
//! early. It writes one line to standard error, past the capture of the test harness, so that every run shows what it
//! left out. `MILLRACE_REQUIRE=fuse,root` turns the skips of these requirements into failures, `MILLRACE_REQUIRE=all`
//! those of all; `.ci/run` sets it. `MILLRACE_SKIPPED=FILE` also appends each skip to a file, from which `make test`
//! prints its summary.
//!
//! A test that needs ONNX Runtime never skips: `scripts/setup` fetches the library on every machine.
//!
//! ```no_run
//! use millrace_testing::{Need, skip};
//!
//! let permitted = std::path::Path::new("/dev/fuse").exists();
//! if !permitted {
//!     return skip(Need::Fuse, "/dev/fuse is missing");
//! }
//! ```

#[cfg(feature = "s3")]
pub mod s3_server;

use std::fmt::{Display, Formatter, Result};
use std::io::Write as _;

/// Requirements that must be met, separated by commas, or `all`.
const REQUIRE: &str = "MILLRACE_REQUIRE";
/// The file to which skips are appended, one line each.
const SKIPPED: &str = "MILLRACE_SKIPPED";

/// Something that a machine offers to tests or lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// The right to mount FUSE file systems.
    Fuse,
    /// The rights of root: to become another user, to mount with `suid`.
    Root,
    /// A separate small file system: a tmpfs, or an ext4 image on a loop device.
    Disk,
    /// Paths with the property that the test is about: a feature of the file system, folders that other users may enter.
    Filesystem,
    /// The programs `initdb` and `postgres`.
    Postgres,
    /// The program `kcat`.
    Kcat,
    /// The program `openssl`.
    Openssl,
    /// An NVIDIA GPU with its driver, and the CUDA toolkit.
    Gpu,
}

impl Need {
    const ALL: [Need; 8] = [
        Need::Fuse,
        Need::Root,
        Need::Disk,
        Need::Filesystem,
        Need::Postgres,
        Need::Kcat,
        Need::Openssl,
        Need::Gpu,
    ];

    fn name(self) -> &'static str {
        match self {
            Need::Fuse => "fuse",
            Need::Root => "root",
            Need::Disk => "disk",
            Need::Filesystem => "filesystem",
            Need::Postgres => "postgres",
            Need::Kcat => "kcat",
            Need::Openssl => "openssl",
            Need::Gpu => "gpu",
        }
    }
}

impl Display for Need {
    fn fmt(&self, out: &mut Formatter<'_>) -> Result {
        out.write_str(self.name())
    }
}

/// Reports that the calling test leaves early because the machine lacks `need`; the caller returns.
///
/// # Panics
///
/// Where `MILLRACE_REQUIRE` names the requirement or `all`, or holds a word that is no requirement.
pub fn skip(need: Need, reason: impl Display) {
    let required = std::env::var(REQUIRE).unwrap_or_default();
    let test = std::thread::current().name().unwrap_or("main").to_owned();
    match requires(&required, need) {
        Err(word) => {
            panic!("{REQUIRE} holds {word:?}; known are: all, {}", Need::ALL.map(Need::name).join(", "))
        }
        Ok(true) => panic!("{test} cannot run: {reason} ({REQUIRE} requires {need})"),
        Ok(false) => {}
    }
    // One write each, so that lines of tests that run at the same time stay whole. A standard error or a file that
    // cannot be written must not fail a test that is skipped anyway.
    let line = format!("skipped: {test}: {need}: {reason}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
    if let Some(file) = std::env::var_os(SKIPPED)
        && let Ok(mut file) = std::fs::OpenOptions::new().append(true).create(true).open(file)
    {
        let _ = file.write_all(line.as_bytes());
    }
}

/// Whether a list of requirements holds one; the first word that is no requirement otherwise.
fn requires(list: &str, need: Need) -> std::result::Result<bool, &str> {
    let mut found = false;
    for word in list.split(',').map(str::trim).filter(|word| !word.is_empty()) {
        if word != "all" && !Need::ALL.iter().any(|known| known.name() == word) {
            return Err(word);
        }
        found |= word == "all" || word == need.name();
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listed_needs_are_required() {
        assert_eq!(requires("", Need::Fuse), Ok(false));
        assert_eq!(requires("root, fuse", Need::Fuse), Ok(true));
        assert_eq!(requires("root", Need::Fuse), Ok(false));
        assert_eq!(requires("all", Need::Kcat), Ok(true));
    }

    #[test]
    fn a_list_with_an_unknown_word_is_refused() {
        assert_eq!(requires("fuse,posgres", Need::Fuse), Err("posgres"));
    }
}
