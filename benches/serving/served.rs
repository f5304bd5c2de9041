//! Servers, each in a process of its own: this program again, until its standard input ends.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use millrace_serving::{Config, Source};
use tokio_util::sync::CancellationToken;

use crate::{Other, control};

/// The argument that makes this program a server.
pub(crate) const SERVE: &str = "--serve";

/// Ticks of a second in `/proc`, the same on all Linux systems that Millrace runs on.
const TICKS: f64 = 100.0;

/// A server that answers. One that was started ends when this is dropped.
pub(crate) struct Served {
    address: String,
    pid: Option<u32>,
    child: Option<Child>,
}

impl Served {
    /// Starts `ours`, or a control, with the models at a path.
    pub(crate) fn start(kind: &str, at: &Path) -> Served {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([SERVE, kind])
            .arg(at)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.ends_with('\n'), "the server {kind} has failed");
        Served { address: line.trim_end().to_owned(), pid: Some(child.id()), child: Some(child) }
    }

    /// A server that runs already.
    pub(crate) fn other(other: &Other) -> Served {
        Served { address: other.address.clone(), pid: other.pid, child: None }
    }

    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Processor time of the process so far, in seconds; `None` where it is not known which one it is.
    pub(crate) fn processor(&self) -> Option<f64> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid?)).unwrap();
        // The name of the program, in parentheses, may hold anything.
        let (_, fields) = stat.rsplit_once(')').unwrap();
        let ticks =
            fields.split_ascii_whitespace().skip(11).take(2).map(|ticks| ticks.parse::<f64>().unwrap());
        Some(ticks.sum::<f64>() / TICKS)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            drop(child.stdin.take());
            let status = child.wait().unwrap();
            if !std::thread::panicking() {
                assert!(status.success(), "the process of the server: {status}");
            }
        }
    }
}

/// The child: serves, says where, and stops when its standard input ends.
pub(crate) fn serve(arguments: Vec<String>) {
    let [kind, at] = arguments.as_slice() else { panic!("{arguments:?}") };
    let stop = CancellationToken::new();
    let stopping = stop.clone();
    std::thread::spawn(move || {
        std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        stopping.cancel();
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        match kind.as_str() {
            "ours" => ours(Path::new(at), stop).await,
            kind => control::serve(kind, Path::new(at), stop).await,
        }
    });
}

/// What `millrace serve` is when nothing is configured, but for the ports.
async fn ours(at: &Path, stop: CancellationToken) {
    let mut config = Config::default();
    for address in [&mut config.grpc, &mut config.http, &mut config.metrics] {
        address.set_port(0);
    }
    let serving = millrace_serving::serve(&config, Source::directory(at).unwrap(), stop).await.unwrap();
    println!("{}", serving.addresses().grpc);
    serving.join().await.unwrap();
}
