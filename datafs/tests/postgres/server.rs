//! A PostgreSQL server for tests: it uses a temporary folder and a unix socket and runs as an unprivileged
//! user. It ends with the last test that uses it, or with the process.
#![allow(clippy::unwrap_used, clippy::print_stderr, dead_code)]

use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// The user of the servers when the tests run as root, which `initdb` refuses.
const NOBODY: u32 = 65_534;
/// The port of a server that listens on its unix socket only.
const PORT: u16 = 5_432;
/// Attempts to find a free port.
const PORTS_TRIED: u32 = 20;
/// Longest wait for a server to start or stop on a busy machine.
const WAIT: Duration = Duration::from_secs(120);

pub(crate) struct Server {
    folder: tempfile::TempDir,
    programs: PathBuf,
    settings: &'static [&'static str],
    /// TCP address in addition to the unix socket.
    address: &'static str,
    port: u16,
    child: Mutex<Option<Child>>,
}

static SHARED: Mutex<Weak<Server>> = Mutex::new(Weak::new());
static SCHEMAS: AtomicU32 = AtomicU32::new(0);

impl Server {
    /// The server that tests share, each with a schema of its own; `None` where PostgreSQL is not installed.
    pub(crate) fn shared() -> Option<Arc<Server>> {
        let mut shared = SHARED.lock().unwrap();
        if let Some(server) = shared.upgrade() {
            return Some(server);
        }
        let server = Arc::new(Server::start(&["fsync=off", "max_connections=200"])?);
        *shared = Arc::downgrade(&server);
        Some(server)
    }

    /// Starts a server for the caller alone.
    pub(crate) fn start(settings: &'static [&'static str]) -> Option<Server> {
        let server = Server::make(settings)?;
        server.resume();
        Some(server)
    }

    /// Starts a server for the caller alone that also listens on `127.0.0.1`.
    pub(crate) fn start_on_tcp(settings: &'static [&'static str]) -> Option<Server> {
        let mut server = Server::make(settings)?;
        server.address = "127.0.0.1";
        for _ in 0..PORTS_TRIED {
            // Another process may take the port before the server does.
            let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            server.port = free.local_addr().unwrap().port();
            drop(free);
            if server.begin() {
                return Some(server);
            }
        }
        panic!("PostgreSQL does not start: {}", server.log());
    }

    fn make(settings: &'static [&'static str]) -> Option<Server> {
        let Some(programs) = programs() else {
            millrace_testing::skip(
                millrace_testing::Need::Postgres,
                "PostgreSQL (initdb, postgres) is neither in /usr/lib/postgresql nor in PATH",
            );
            return None;
        };
        let folder = tempfile::Builder::new().prefix("millrace-pg").tempdir().unwrap();
        if nix::unistd::geteuid().is_root() {
            let (uid, gid) = (NOBODY.into(), NOBODY.into());
            nix::unistd::chown(folder.path(), Some(uid), Some(gid)).unwrap();
        }
        let mut initdb = unprivileged(&programs.join("initdb"));
        initdb.args([
            "--no-sync",
            "--auth=trust",
            "--username=millrace",
            "--encoding=UTF8",
            "--locale=C",
            "-D",
        ]);
        let output = initdb.arg(folder.path().join("data")).current_dir(folder.path()).output().unwrap();
        assert!(output.status.success(), "initdb: {}", String::from_utf8_lossy(&output.stderr));
        Some(Server { folder, programs, settings, address: "", port: PORT, child: Mutex::new(None) })
    }

    /// Starts the server again after [`Server::stop`] or [`Server::kill`].
    pub(crate) fn resume(&self) {
        assert!(self.begin(), "PostgreSQL does not start: {}", self.log());
    }

    /// Starts the server; `false` when it ended at once.
    fn begin(&self) -> bool {
        let mut child = self.child.lock().unwrap();
        assert!(child.is_none());
        // The shell ends the server when its standard input ends, which happens however this process ends.
        let script = "exec 3<&0; \"$@\" </dev/null & server=$!; \
            while read -r how <&3; do kill -s $how $server; done; kill -s INT $server; wait $server";
        let mut command = unprivileged(Path::new("/bin/sh"));
        command.args(["-c", script, "sh"]).arg(self.programs.join("postgres"));
        command.arg("-D").arg(self.folder.path().join("data")).arg("-k").arg(self.folder.path());
        command.arg("-c").arg(format!("listen_addresses={}", self.address));
        command.arg("-p").arg(self.port.to_string());
        for setting in self.settings {
            command.args(["-c", setting]);
        }
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.folder.path().join("log"))
            .unwrap();
        command.stdin(Stdio::piped()).stdout(log.try_clone().unwrap()).stderr(log);
        *child = Some(command.current_dir(self.folder.path()).spawn().unwrap());
        let deadline = Instant::now() + WAIT;
        while !self.answers() {
            if child.as_mut().is_some_and(|child| child.try_wait().unwrap().is_some()) {
                *child = None;
                return false;
            }
            assert!(Instant::now() < deadline, "PostgreSQL does not start: {}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
        true
    }

    fn answers(&self) -> bool {
        let ready = Command::new(self.programs.join("pg_isready"))
            .args(["-q", "-p"])
            .arg(self.port.to_string())
            .arg("-h")
            .arg(self.folder.path())
            .status()
            .unwrap();
        ready.success()
    }

    /// Shuts the server down in order, and ends its connections.
    pub(crate) fn stop(&self) {
        self.end("INT");
    }

    /// Ends the server as a crash would.
    pub(crate) fn kill(&self) {
        self.end("QUIT");
    }

    fn end(&self, signal: &str) {
        use std::io::Write as _;
        let Some(mut child) = self.child.lock().unwrap().take() else { return };
        let mut input = child.stdin.take().unwrap();
        let _ = writeln!(input, "{signal}");
        drop(input);
        child.wait().unwrap();
    }

    fn log(&self) -> String {
        let mut text = String::new();
        let file = std::fs::File::open(self.folder.path().join("log"));
        file.and_then(|mut file| file.read_to_string(&mut text)).ok();
        text
    }

    pub(crate) fn url(&self) -> String {
        format!("postgres:///postgres?host={}&port={}&user=millrace", self.folder.path().display(), self.port)
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// The folder with its socket, log and data; the server may read files in it.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Makes the server's user the owner of a file.
    pub(crate) fn give(&self, path: &Path, mode: u32) {
        use std::os::unix::fs::PermissionsExt as _;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        if nix::unistd::geteuid().is_root() {
            nix::unistd::chown(path, Some(NOBODY.into()), Some(NOBODY.into())).unwrap();
        }
    }

    /// A schema name that is unique in this process.
    pub(crate) fn new_schema(&self) -> String {
        format!("t{}_{}", std::process::id(), SCHEMAS.fetch_add(1, Ordering::Relaxed))
    }

    /// Runs SQL through `psql`.
    pub(crate) fn sql(&self, text: &str) -> String {
        let output = Command::new(self.programs.join("psql"))
            .args(["-qAtX", "-U", "millrace", "-p"])
            .arg(self.port.to_string())
            .arg("-h")
            .arg(self.folder.path())
            .args(["postgres", "-c", text])
            .output()
            .unwrap();
        assert!(output.status.success(), "{text}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

fn unprivileged(program: &Path) -> Command {
    let mut command = Command::new(program);
    if nix::unistd::geteuid().is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    command
}

/// The folder of the newest installed server.
fn programs() -> Option<PathBuf> {
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut installed: Vec<(u32, PathBuf)> = versions
        .filter_map(|entry| {
            let version = entry.file_name().to_str()?.parse().ok()?;
            Some((version, entry.path().join("bin")))
        })
        .filter(|(_, programs)| programs.join("initdb").exists())
        .collect();
    installed.sort();
    installed.pop().map(|(_, programs)| programs).or_else(|| {
        let path = std::env::var_os("PATH")?;
        std::env::split_paths(&path).find(|folder| folder.join("initdb").exists())
    })
}
