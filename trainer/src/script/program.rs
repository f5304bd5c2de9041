//! The program of a script job on this machine: the script, its digest and its interpreter.
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};
use tokio::process::Command;

use super::messages::Program;
use crate::error::{Error, Result};

/// The interpreter of `.py` files when nothing else names one.
const PYTHON: &str = "python3";
/// Names another interpreter.
const ENV_PYTHON: &str = "MILLRACE_PYTHON";

/// A program that can be started here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Runnable {
    /// The interpreter with its first arguments, or the script itself.
    program: PathBuf,
    args: Vec<String>,
}

impl Runnable {
    /// Finds the program here and compares its digest.
    ///
    /// # Errors
    /// [`Error::Script`] for a script that is missing, another one, or not executable, [`Error::Launch`] without an
    /// interpreter.
    pub(crate) fn of(program: &Program) -> Result<Runnable> {
        let wrong = |reason: String| Error::Script { script: program.script.clone(), reason };
        let found = digest(&program.script)?;
        if found != program.sha256 {
            return Err(wrong(format!(
                "its SHA-256 here is {found:.12}…, and {:.12}… is that of the job; copy the coordinator's file, or, if \
                 that has changed since, start the job again",
                program.sha256
            )));
        }
        let path = Path::new(&program.script);
        if is_python(path) {
            let python = std::env::var(ENV_PYTHON).ok().filter(|name| !name.is_empty());
            // The machine's own setting first: paths of interpreters differ between machines.
            let named = python.or_else(|| program.python.clone()).unwrap_or_else(|| PYTHON.to_owned());
            let program_path = find(&named).ok_or_else(|| Error::Launch {
                program: named.clone(),
                reason: format!(
                    "there is no such program on the PATH; install Python, or name one with --python or {ENV_PYTHON}"
                ),
            })?;
            // Without -u, output would stay in Python's buffer until the process ends.
            let args = ["-u".to_owned(), no_option(&program.script)].into_iter();
            let args = args.chain(program.args.iter().cloned());
            return Ok(Runnable { program: program_path, args: args.collect() });
        }
        if !is_executable(path) {
            return Err(wrong(
                "it is not executable; run chmod +x, or give a script for Python the extension .py"
                    .to_owned(),
            ));
        }
        let absolute = std::path::absolute(path).map_err(|e| wrong(e.to_string()))?;
        Ok(Runnable { program: absolute, args: program.args.clone() })
    }

    /// [`Runnable::of`] for a round of a program that this node could run.
    ///
    /// # Errors
    /// Why it does not start now, and whether no later round would start it either.
    pub(crate) fn again(program: &Program) -> Result<Runnable, Unstartable> {
        let unstartable = |error: Error, is_final| Unstartable { reason: error.one_line(), is_final };
        match digest(&program.script) {
            Ok(found) if found != program.sha256 => {
                let reason = format!(
                    "the file has changed since the job began: its SHA-256 was {:.12}… and is {found:.12}…; all rounds of a \
                     job run one script, so start the job again",
                    program.sha256
                );
                Err(unstartable(Error::Script { script: program.script.clone(), reason }, true))
            }
            Ok(_) => Runnable::of(program).map_err(|error| unstartable(error, false)),
            Err(error) => Err(unstartable(error, false)),
        }
    }

    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args);
        command
    }
}

/// Why a round cannot start a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unstartable {
    pub(crate) reason: String,
    /// Whether the program cannot start in a later round either.
    pub(crate) is_final: bool,
}

/// SHA-256 of a script, in hex.
///
/// # Errors
/// [`Error::Script`]
pub(crate) fn digest(script: &str) -> Result<String> {
    let wrong = |reason: String| Error::Script { script: script.to_owned(), reason };
    let unreadable =
        |e: std::io::Error| wrong(format!("it cannot be read here ({e}); every node needs it at this path"));
    let metadata = std::fs::metadata(script).map_err(unreadable)?;
    if !metadata.is_file() {
        return Err(wrong("it is not a file".to_owned()));
    }
    let mut file = std::fs::File::open(script).map_err(unreadable)?;
    let (mut hash, mut buffer) = (Sha256::new(), vec![0; 64 << 10]);
    loop {
        match file.read(&mut buffer).map_err(unreadable)? {
            0 => return Ok(hex::encode(hash.finalize())),
            count => hash.update(&buffer[..count]),
        }
    }
}

/// The script as an argument of Python, which takes a name with a dash for an option.
fn no_option(script: &str) -> String {
    if script.starts_with('-') { format!("./{script}") } else { script.to_owned() }
}

fn is_python(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "py")
}

fn is_executable(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

/// A program by its path, or by its name on the `PATH`.
fn find(name: &str) -> Option<PathBuf> {
    if name.contains('/') {
        let path = PathBuf::from(name);
        return is_executable(&path).then(|| std::path::absolute(&path).unwrap_or(path));
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|candidate| is_executable(candidate))
}

#[cfg(test)]
mod tests {
    use super::super::launch::Launch;
    use super::*;

    fn program(script: &Path, python: Option<&str>) -> Program {
        Program {
            script: script.to_str().unwrap().to_owned(),
            sha256: digest(script.to_str().unwrap()).unwrap_or_default(),
            args: vec!["--lr".into(), "0.1".into()],
            python: python.map(str::to_owned),
            dataset: None,
            volume: "models".into(),
            grace_ms: 1,
            launch: Launch { job: "f0".repeat(16), number: 1 },
        }
    }

    #[test]
    fn a_python_file_runs_in_the_named_interpreter_and_another_file_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("train.py");
        std::fs::write(&script, "print(1)\n").unwrap();
        let runnable = Runnable::of(&program(&script, Some("/bin/sh"))).unwrap();
        assert_eq!(runnable.program, Path::new("/bin/sh"));
        assert_eq!(runnable.args, ["-u", script.to_str().unwrap(), "--lr", "0.1"]);
        assert_eq!(no_option("-c.py"), "./-c.py");
        let missing = Runnable::of(&program(&script, Some("no-such-python"))).unwrap_err().to_string();
        assert!(missing.contains("no-such-python") && missing.contains("--python"), "{missing}");

        let shell = dir.path().join("train.sh");
        std::fs::write(&shell, "#!/bin/sh\n").unwrap();
        let error = Runnable::of(&program(&shell, None)).unwrap_err().to_string();
        assert!(error.contains("chmod +x"), "{error}");
        std::fs::set_permissions(&shell, std::fs::Permissions::from_mode(0o755)).unwrap();
        let runnable = Runnable::of(&program(&shell, None)).unwrap();
        assert_eq!(
            (runnable.program.as_path(), &runnable.args[..]),
            (shell.as_path(), &program(&shell, None).args[..])
        );
    }

    #[test]
    fn another_file_at_the_path_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("train.py");
        std::fs::write(&script, "print(1)\n").unwrap();
        let wanted = program(&script, Some("/bin/sh"));
        std::fs::write(&script, "print(2)\n").unwrap();
        let error = Runnable::of(&wanted).unwrap_err().to_string();
        assert!(error.contains("SHA-256") && error.contains("copy"), "{error}");
        let changed = Runnable::again(&wanted).unwrap_err();
        assert!(
            changed.is_final && changed.reason.contains("has changed since the job began"),
            "{changed:?}"
        );
        assert!(!changed.reason.contains("copy"), "{changed:?}");
        std::fs::remove_file(&script).unwrap();
        let error = Runnable::of(&wanted).unwrap_err().to_string();
        assert!(error.contains("cannot be read here") && error.contains("train.py"), "{error}");
        // It may come back.
        assert!(!Runnable::again(&wanted).unwrap_err().is_final);
        assert!(Runnable::of(&program(dir.path(), None)).unwrap_err().to_string().contains("not a file"));
    }
}
