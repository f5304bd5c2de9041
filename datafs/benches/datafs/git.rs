//! Benchmark: `git clone` of a local repository with many files, on a mount against the local file system.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::Asked;
use crate::figure::{Figure, Kind, median};
use crate::place::{Place, Times, timed};

pub(crate) const FIGURES: &[(&str, &str)] = &[("git_clone", "a local repository of 10k files, packed")];

pub(crate) fn run(asked: &Asked, report: &mut dyn FnMut(Figure)) {
    if Command::new("git").arg("--version").output().is_err() {
        eprintln!("datafs/git_clone: skipped, there is no git");
        return;
    }
    let place = Place::new();
    let source = place.path("source");
    repository(&source, asked.sized(10_000, 2_000));
    let mounted = place.mount("", &[]);
    let mut times = Times::default();
    for round in 0..asked.sized(3, 1) {
        let name = format!("clone-{round}");
        nix::unistd::sync();
        let control = clone(&source, &place.plain().join(&name));
        nix::unistd::sync();
        times.add(clone(&source, &mounted.at().join(&name)), control);
    }
    let (mut ours, mut control) = times.pair();
    report(Figure {
        name: "datafs/git_clone",
        kind: Kind::Time,
        unit: "s",
        value: median(&mut ours),
        control: median(&mut control),
        against: "the same onto the local file system",
    });
}

fn git(at: &Path, arguments: &[&str]) {
    let output = Command::new("git")
        .args(["-c", "user.name=bench", "-c", "user.email=bench@localhost", "-c", "gc.auto=0"])
        .args(arguments)
        .current_dir(at)
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_CONFIG_SYSTEM", "/dev/null")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn repository(at: &Path, files: usize) {
    for i in 0..files {
        let folder = at.join(format!("src/{}/{}", i / 1_000, i / 50));
        if i % 50 == 0 {
            fs::create_dir_all(&folder).unwrap();
        }
        // 1 to 7 KiB, like source files.
        let lines = 20 + i % 120;
        let text: String =
            (0..lines).map(|line| format!("line {line} of file {i}, not like others\n")).collect();
        fs::write(folder.join(format!("file_{i}.txt")), text).unwrap();
    }
    git(at, &["init", "-q"]);
    git(at, &["add", "."]);
    git(at, &["commit", "-q", "-m", "all"]);
    git(at, &["repack", "-q", "-a", "-d"]);
}

fn clone(from: &Path, to: &Path) -> Duration {
    let (from, to) = (from.to_str().unwrap(), to.to_str().unwrap());
    timed(|| git(Path::new("/"), &["clone", "-q", "--no-hardlinks", from, to])).0
}
