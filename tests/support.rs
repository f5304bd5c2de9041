//! Test support: runs the `millrace` program like a user, with temporary homes, and reads its output.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    dead_code,
    missing_docs,
    unreachable_pub,
    clippy::print_stderr
)]

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use millrace_bundle::onnx::{
    GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorShapeProto, TypeProto, ValueInfoProto,
    tensor_proto::DataType, tensor_shape_proto, type_proto,
};
use prost::Message;
use serde_json::Value;

/// Deadline for any condition; generous since two cores run many tests at once.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Copies a program by another process. A file that this one writes could not be run (ETXTBSY) while a process that
/// another test starts still has it open.
pub fn copy_program(from: &Path, to: &Path) {
    assert!(Command::new("cp").args([from, to]).status().unwrap().success());
}

/// The project's root folder.
pub fn project() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// A temporary home and the commands that run on it.
pub struct Home {
    pub dir: tempfile::TempDir,
}

impl Home {
    pub fn new() -> Home {
        Home { dir: tempfile::Builder::new().prefix("millrace-test-").tempdir().unwrap() }
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("home")
    }

    /// Writes a file beside the home; returns its path.
    pub fn file(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    /// The program with this home, ready for arguments. Runs in the folder beside the home.
    pub fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
        command
            .current_dir(self.dir.path())
            .env("MILLRACE_HOME", self.path())
            .env_remove("MILLRACE_CONFIG")
            .stdin(Stdio::null());
        if std::env::var_os("ORT_DYLIB_PATH").is_none() {
            command.env("ORT_DYLIB_PATH", project().join(".local/onnxruntime/libonnxruntime.so"));
        }
        command
    }

    pub fn run<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Output {
        self.command().args(args).output().unwrap()
    }

    /// Runs the program, which must succeed; returns standard output.
    pub fn ok<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> String {
        let args: Vec<_> = args.into_iter().map(|a| a.as_ref().to_owned()).collect();
        let output = self.run(&args);
        assert!(
            output.status.success(),
            "{args:?} ended with {:?}\n{}\n{}",
            output.status.code(),
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs the program with `--json`, which must succeed; returns the object.
    pub fn json<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Value {
        let args = args.into_iter().map(|a| a.as_ref().to_owned()).chain([OsStr::new("--json").to_owned()]);
        let text = self.ok(args);
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// Runs the program, which must fail; returns the exit code and its one error line.
    pub fn fails<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> (i32, String) {
        let args: Vec<_> = args.into_iter().map(|a| a.as_ref().to_owned()).collect();
        failure(&self.run(&args), &format!("{args:?}"))
    }

    /// Starts a model server on free ports with more arguments; returns it, once it answers, with its first
    /// JSON object.
    pub fn serve<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> (Service, Value) {
        let ports = ["--grpc", "--http", "--metrics"].into_iter().flat_map(|flag| [flag, "127.0.0.1:0"]);
        let mut service = Service::spawn(self.command().args(["serve", "--json"]).args(ports).args(args));
        let printed = service.object();
        (service, printed)
    }

    /// Counts the processes with this home. The first thread of one may have ended while others have files open.
    pub fn processes(&self) -> usize {
        let named = format!("MILLRACE_HOME={}", self.path().display());
        let folders = |at: PathBuf| std::fs::read_dir(at).into_iter().flatten().flatten().map(|of| of.path());
        let has_home = |thread: PathBuf| {
            let environment = std::fs::read(thread.join("environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|entry| entry == named.as_bytes())
        };
        folders("/proc".into()).filter(|process| folders(process.join("task")).any(has_home)).count()
    }

    /// Starts the program in the background.
    pub fn start<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Service {
        Service::spawn(self.command().args(args))
    }
}

impl Drop for Home {
    /// Unmounts what a killed process left mounted, so that the folder can be deleted.
    fn drop(&mut self) {
        for name in ["home/mount", "mnt", "m"] {
            millrace_datafs::mount::umount(&self.dir.path().join(name)).ok();
        }
    }
}

/// Checks that a finished command failed with one clear line.
pub fn failure(output: &Output, what: &str) -> (i32, String) {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    let code = output.status.code().unwrap_or_else(|| panic!("{what} was killed: {stderr}"));
    assert_ne!(code, 0, "{what} succeeded: {}", String::from_utf8_lossy(&output.stdout));
    assert_ne!(code, 101, "{what} panicked: {stderr}");
    let lines: Vec<_> = stderr.lines().filter(|line| line.starts_with("millrace: ")).collect();
    assert_eq!(lines.len(), 1, "{what} printed: {stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    (code, lines[0].to_owned())
}

/// A running service; killed when dropped.
pub struct Service {
    child: Child,
    lines: std::sync::mpsc::Receiver<String>,
    seen: Vec<String>,
}

impl Service {
    pub fn spawn(command: &mut Command) -> Service {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
        let stdout = child.stdout.take().unwrap();
        let (sender, lines) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Service { child, lines, seen: Vec::new() }
    }

    /// Waits for the next JSON object that it prints.
    pub fn object(&mut self) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    if let Ok(value @ Value::Object(_)) = serde_json::from_str(&line) {
                        return value;
                    }
                    self.seen.push(line);
                }
                Err(error) => panic!("no JSON object ({error}); it printed {:?}", self.seen),
            }
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    /// Sends SIGTERM and waits; returns the exit code.
    pub fn stop(mut self) -> i32 {
        self.signal(nix::sys::signal::Signal::SIGTERM);
        self.wait().expect("it stops when asked to")
    }

    pub fn wait(&mut self) -> Option<i32> {
        until("the process ends", || self.child.try_wait().unwrap().is_some());
        self.child.wait().unwrap().code()
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Polls a condition until [`PATIENCE`]; the failure names it.
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "waited {PATIENCE:?} until {what}");
        std::thread::park_timeout(Duration::from_millis(20));
    }
}

/// The metrics at an address; `None` if no server answers.
pub fn try_scrape(address: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    assert!(text.starts_with("HTTP/1.1 200 "), "{text}");
    Some(text)
}

/// The metrics at an address; a server must answer.
pub fn scrape(address: &str) -> String {
    try_scrape(address).unwrap_or_else(|| panic!("nobody answers at {address}"))
}

/// A mount's count of one kind of operation, from metrics; 0 if it is absent.
pub fn operations(metrics: &str, mount: &Path, op: &str) -> u64 {
    let (mount, op) = (format!("mount=\"{}\"", mount.display()), format!("op=\"{op}\""));
    let line = metrics.lines().find(|line| {
        line.starts_with("millrace_mount_operations_total{") && line.contains(&mount) && line.contains(&op)
    });
    line.map_or(0, |line| line.rsplit_once(' ').unwrap().1.parse().unwrap())
}

/// Whether the kernel permits mounting; the reason is logged once.
pub fn fuse_permitted() -> bool {
    match millrace_datafs::mount::can_mount() {
        Ok(()) => true,
        Err(reason) => {
            millrace_testing::skip(millrace_testing::Need::Fuse, reason);
            false
        }
    }
}

/// A small file system, unmounted when dropped.
pub struct Tmpfs<'a>(&'a Path);

impl<'a> Tmpfs<'a> {
    pub fn mount(at: &'a Path, size: &str) -> Self {
        std::fs::create_dir_all(at).unwrap();
        let options = format!("size={size}");
        let status = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(at).status();
        assert!(status.unwrap().success(), "cannot mount a tmpfs");
        Self(at)
    }
}

impl Drop for Tmpfs<'_> {
    fn drop(&mut self) {
        Command::new("umount").arg("--lazy").arg(self.0).status().ok();
    }
}

/// Runs a program, which must succeed; returns its standard output.
pub fn program(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{command:?} ended with {:?}\n{text}\n{}",
        output.status.code(),
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

/// Reads a reader to its end.
pub fn text_of(mut reader: impl Read) -> String {
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    text
}

/// Files below a folder with an extension.
pub fn files_below(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == extension) {
                found.push(path);
            }
        }
    }
    found
}

/// A model that returns each of its inputs as `NAME_out`. Dimensions of -1 are the caller's choice.
pub fn echo(values: &[(&str, DataType, &[i64])]) -> Vec<u8> {
    let value = |name: &str, elem_type: DataType, shape: &[i64]| {
        use tensor_shape_proto::dimension::Value as Extent;
        let extent = |extent: &i64| match extent {
            -1 => Extent::DimParam("any".into()),
            extent => Extent::DimValue(*extent),
        };
        let dimension =
            |given| tensor_shape_proto::Dimension { value: Some(extent(given)), ..Default::default() };
        let shape = TensorShapeProto { dim: shape.iter().map(dimension).collect() };
        let tensor = type_proto::Tensor { elem_type: Some(elem_type as i32), shape: Some(shape) };
        let of = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..Default::default() };
        ValueInfoProto { name: Some(name.into()), r#type: Some(of), ..Default::default() }
    };
    let mut graph = GraphProto { name: Some("echo".into()), ..Default::default() };
    for (name, elem_type, shape) in values {
        let out = format!("{name}_out");
        graph.input.push(value(name, *elem_type, shape));
        graph.output.push(value(&out, *elem_type, shape));
        graph.node.push(NodeProto {
            op_type: Some("Identity".into()),
            input: vec![(*name).to_owned()],
            output: vec![out],
            ..Default::default()
        });
    }
    let opset = OperatorSetIdProto { domain: Some(String::new()), version: Some(17) };
    ModelProto { ir_version: Some(8), opset_import: vec![opset], graph: Some(graph), ..Default::default() }
        .encode_to_vec()
}
