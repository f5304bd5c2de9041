//! Tests that the examples of README.md run unchanged.

use std::process::Command;

use crate::support::{Home, fuse_permitted, project};

/// Every `sh` block that follows the comment `<!-- tested -->`, in order, in one empty folder with
/// `millrace` on the path.
#[test]
fn readme_examples_run_unchanged() {
    let readme = std::fs::read_to_string(project().join("README.md")).unwrap();
    let mut script = String::from("set -euo pipefail\n");
    let mut blocks = 0;
    for part in readme.split("<!-- tested -->").skip(1) {
        let block = part.split("```sh\n").nth(1).unwrap().split("```").next().unwrap();
        let needs_fuse = block.contains("millrace mount");
        if needs_fuse && !fuse_permitted() {
            continue;
        }
        script.push_str(block);
        blocks += 1;
    }
    assert!(blocks >= 3, "README.md has {blocks} tested examples");
    let home = Home::new();
    std::os::unix::fs::symlink(project().join("examples"), home.dir.path().join("examples")).unwrap();
    let bin = home.dir.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_millrace"), bin.join("millrace")).unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let mut bash = Command::new("bash");
    bash.arg("-c").arg(&script).current_dir(home.dir.path()).env("PATH", path);
    for (key, value) in home.command().get_envs() {
        if let Some(value) = value {
            bash.env(key, value);
        }
    }
    let output = bash.output().unwrap();
    assert!(
        output.status.success(),
        "{script}\n--- printed\n{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn every_command_has_help_with_an_example() {
    let home = Home::new();
    let mut pending = vec![Vec::<String>::new()];
    let mut seen = 0;
    while let Some(command) = pending.pop() {
        let mut args = command.clone();
        args.push("--help".into());
        let help = home.ok(&args);
        seen += 1;
        if !command.is_empty() {
            assert!(help.contains("Example"), "{command:?} has no example");
        }
        let Some(list) = help.split("Commands:\n").nth(1) else { continue };
        for line in list.lines().take_while(|line| line.starts_with("  ")) {
            let name = line.split_whitespace().next().unwrap();
            if line.starts_with("  ") && !line.starts_with("   ") && name != "help" {
                let mut next = command.clone();
                next.push(name.to_owned());
                pending.push(next);
            }
        }
    }
    assert!(seen > 20, "{seen} commands");
    for shell in ["bash", "zsh", "fish"] {
        assert!(home.ok(["completions", shell]).contains("quickstart"), "{shell}");
    }
}
