//! A mount served by a child process: this program starts itself again, until the child's standard input ends.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use millrace_datafs::mount::{self, MountOptions, Open};
use millrace_datafs::{Config, Datafs};

/// The argument that makes this program a server of a mount.
pub(crate) const SERVE: &str = "--serve";

/// The environment variable with the child's configuration.
const CONFIG: &str = "MILLRACE_BENCH_CONFIG";

/// A mount in a child process; dropping the value ends it.
pub(crate) struct Served {
    child: Child,
    at: PathBuf,
}

impl Served {
    /// Starts the child. The only option is `daemon` (no passthrough).
    pub(crate) fn start(home: &Path, config: &Config, spec: &str, at: &Path, options: &[&str]) -> Served {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .arg(SERVE)
            .args([home.as_os_str(), spec.as_ref(), at.as_os_str()])
            .env(CONFIG, serde_json::to_string(config).unwrap())
            .args(options)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "mounted\n", "the process that serves {spec} has failed");
        Served { child, at: at.to_owned() }
    }

    pub(crate) fn at(&self) -> &Path {
        &self.at
    }

    /// Resident memory of the serving process, in bytes.
    pub(crate) fn resident_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let status = self.child.wait().unwrap();
        if !std::thread::panicking() {
            assert!(status.success(), "the process that served the mount: {status}");
        }
    }
}

/// The child: mounts, prints `mounted`, and serves until its standard input ends.
pub(crate) fn serve(arguments: Vec<String>) {
    let [home, spec, at, options @ ..] = arguments.as_slice() else { panic!("{arguments:?}") };
    let config: Config = serde_json::from_str(&std::env::var(CONFIG).unwrap()).unwrap();
    let datafs = Datafs::open(Path::new(home), &config).unwrap();
    let view = datafs.view(&spec.parse().unwrap()).unwrap();
    let mut mount_options = MountOptions::default();
    for option in options {
        match option.as_str() {
            "daemon" => mount_options.open = Open::Pages,
            other => panic!("no mount option {other}"),
        }
    }
    let mounted = mount::mount(view, Path::new(at), mount_options).unwrap();
    println!("mounted");
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    mounted.unmount().unwrap();
}
