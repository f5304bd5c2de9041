//! The metrics of the driver and of its servers, as one text in the Prometheus format.
//!
//! Each server writes its own metrics to everybody who connects to its socket, which lies beside the record of its target,
//! and ends them with [`END`]. A scrape asks all servers of this driver. One that is stopped, dead or talks nonsense is
//! left out and counted, and delays a scrape by at most [`SERVER_MAX`].
//!
//! Every sample of a server gets the labels `volume_handle`, `persistentvolume` and `pod_uid`, or `target` instead of the
//! last two where the target is no folder of a pod.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use prometheus::{IntCounter, IntCounterVec, IntGaugeVec, Opts};
use tokio::io::AsyncReadExt as _;
use tokio::net::UnixStream;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{timeout, timeout_at};
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::NamedService;
use tonic::{Code, Status};

use crate::exposition::Exposition;

/// The last line of a server's metrics: without it they are cut off.
pub const END: &str = "# EOF\n";
/// Longest wait for one server, and for all of them.
const SERVER_MAX: Duration = Duration::from_secs(1);
const ALL_MAX: Duration = Duration::from_secs(4);
/// Most servers that are asked at the same time.
const ASKED_MAX: usize = 64;
/// Longest text of a server, in bytes.
const TEXT_BYTES_MAX: u64 = 1 << 20;
/// Scrapes within this time get the same text.
const FRESH: Duration = Duration::from_millis(500);

/// Registers a collector. A name is never registered twice, as each static is initialized once.
fn registered<C: prometheus::core::Collector + Clone + 'static>(collector: C) -> C {
    if let Err(error) = prometheus::register(Box::new(collector.clone())) {
        tracing::warn!(%error, "a metric is not exported");
    }
    collector
}

fn counter_vec(name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
    // Cannot fail: names and labels are constants of this file, and a test renders them all.
    registered(IntCounterVec::new(Opts::new(name, help), labels).expect("a valid metric"))
}

fn counter(name: &str, help: &str) -> IntCounter {
    registered(IntCounter::new(name, help).expect("a valid metric"))
}

fn gauge_vec(name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
    registered(IntGaugeVec::new(Opts::new(name, help), labels).expect("a valid metric"))
}

/// Answered calls by method and gRPC code. Methods that are not served are `other`.
static CALLS: LazyLock<IntCounterVec> = LazyLock::new(|| {
    counter_vec("millrace_csi_calls_total", "Calls that the driver has answered", &["method", "code"])
});

/// Published volumes: `serving`, or `waiting` for a server that is started again or taken over.
static VOLUMES: LazyLock<IntGaugeVec> = LazyLock::new(|| {
    gauge_vec(
        "millrace_csi_volumes",
        "Published volumes of the node: serving, or waiting for a server",
        &["state"],
    )
});

/// Servers of mounts that died and were started again.
pub(crate) static RESTARTS: LazyLock<IntCounter> = LazyLock::new(|| {
    counter("millrace_csi_server_restarts_total", "Servers of mounts that died and were started again")
});

/// Servers that a scrape left out: `absent` (no socket, as of an earlier version), `unreachable`, `timeout`,
/// `malformed`.
static LEFT_OUT: LazyLock<IntCounterVec> = LazyLock::new(|| {
    counter_vec(
        "millrace_csi_servers_left_out_total",
        "Servers of mounts whose metrics a scrape left out: absent, unreachable, timeout, malformed",
        &["reason"],
    )
});

type ListSources = Arc<dyn Fn() -> Vec<Source> + Send + Sync>;

/// The metrics of a driver. Clones are of the same driver.
#[derive(Clone, Default)]
pub struct Metrics(Arc<Inner>);

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Inner {
    /// Lists the servers to ask; reads files.
    sources: OnceLock<ListSources>,
    /// The newest text.
    newest: tokio::sync::Mutex<Option<(Instant, String)>>,
}

/// A server that a scrape asks.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    pub(crate) volume_id: String,
    pub(crate) target: PathBuf,
    pub(crate) socket: PathBuf,
    pub(crate) is_serving: bool,
}

impl Metrics {
    /// Metrics without servers, until the driver serves.
    pub fn new() -> Metrics {
        // All families are there from the first scrape on.
        LazyLock::force(&CALLS);
        LazyLock::force(&VOLUMES);
        LazyLock::force(&RESTARTS);
        LazyLock::force(&LEFT_OUT);
        Metrics::default()
    }

    /// From here on scrapes ask the servers that `list` finds. It may read files.
    pub(crate) fn of(&self, list: impl Fn() -> Vec<Source> + Send + Sync + 'static) {
        // One driver has one set of servers.
        let _ = self.0.sources.set(Arc::new(list));
    }

    /// The metrics of this process, which `own` gives, and of all servers. Answers within about 5 seconds.
    pub async fn text(&self, own: impl Fn() -> String) -> String {
        let mut newest = self.0.newest.lock().await;
        if let Some((since, text)) = newest.as_ref().filter(|(since, _)| since.elapsed() < FRESH) {
            tracing::trace!(age = ?since.elapsed(), "the metrics of the scrape before");
            return text.clone();
        }
        let sources = match self.0.sources.get().cloned() {
            Some(list) => tokio::task::spawn_blocking(move || list()).await.unwrap_or_default(),
            None => Vec::new(),
        };
        let serving = sources.iter().filter(|source| source.is_serving).count();
        let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        VOLUMES.with_label_values(&["serving"]).set(count(serving));
        VOLUMES.with_label_values(&["waiting"]).set(count(sources.len() - serving));
        let text = gather(sources.into_iter().filter(|source| source.is_serving).collect(), own).await;
        *newest = Some((Instant::now(), text.clone()));
        text
    }
}

/// The texts of all servers, merged behind that of `own`, which sees the counts of this scrape.
async fn gather(sources: Vec<Source>, own: impl Fn() -> String) -> String {
    let until = tokio::time::Instant::now() + ALL_MAX;
    let (places, mut asked) = (Arc::new(Semaphore::new(ASKED_MAX)), JoinSet::new());
    for source in sources {
        let places = Arc::clone(&places);
        asked.spawn(async move {
            let answered = timeout_at(until, async {
                // The semaphore is never closed.
                let _place = places.acquire().await;
                timeout(SERVER_MAX, ask(&source.socket)).await.unwrap_or(Err("timeout"))
            });
            let answered = answered.await.unwrap_or(Err("timeout"));
            (source, answered)
        });
    }
    let mut answers: Vec<(Source, Result<String, &'static str>)> = Vec::new();
    while let Some(answered) = asked.join_next().await {
        answers.extend(answered.ok());
    }
    // Samples keep their order from one scrape to the next.
    answers.sort_by(|(a, _), (b, _)| (&a.volume_id, &a.target).cmp(&(&b.volume_id, &b.target)));
    let mut servers = Exposition::default();
    for (source, answered) in answers {
        let labels = labels(&source);
        let labels: Vec<(&str, &str)> = labels.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let merged = answered.and_then(|text| {
            servers.add(&text, &labels).map(drop).map_err(|error| {
                tracing::debug!(target = %source.target.display(), %error, "the metrics of a server are left out");
                "malformed"
            })
        });
        if let Err(reason) = merged {
            LEFT_OUT.with_label_values(&[reason]).inc();
        }
    }
    let mut all = Exposition::default();
    if let Err(error) = all.add(&own(), &[]) {
        tracing::warn!(%error, "the driver's own metrics cannot be merged");
    }
    all.absorb(servers);
    all.render()
}

/// The metrics of a server, or why there are none.
async fn ask(socket: &Path) -> Result<String, &'static str> {
    let mut stream = UnixStream::connect(socket).await.map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => "absent",
        _ => "unreachable",
    })?;
    let mut text = String::new();
    let read = (&mut stream).take(TEXT_BYTES_MAX).read_to_string(&mut text).await;
    match read {
        Err(error) if error.kind() != std::io::ErrorKind::InvalidData => Err("unreachable"),
        Ok(_) if text.ends_with(&format!("\n{END}")) => Ok(text),
        _ => Err("malformed"),
    }
}

/// The labels that tell the servers of a node apart.
fn labels(source: &Source) -> Vec<(&'static str, String)> {
    let mut labels = vec![("volume_handle", source.volume_id.clone())];
    match of_pod(&source.target) {
        Some((pod, volume)) => {
            labels.extend([("persistentvolume", volume.to_owned()), ("pod_uid", pod.to_owned())]);
        }
        None => labels.push(("target", source.target.display().to_string())),
    }
    labels
}

/// The pod and the PersistentVolume of `…/pods/POD/volumes/kubernetes.io~csi/VOLUME/mount`.
fn of_pod(target: &Path) -> Option<(&str, &str)> {
    let parts: Vec<&str> = target.iter().map(|part| part.to_str()).collect::<Option<_>>()?;
    match parts[..] {
        [.., "pods", pod, "volumes", "kubernetes.io~csi", volume, "mount"] => Some((pod, volume)),
        _ => None,
    }
}

/// A gRPC service whose answers are counted.
#[derive(Debug, Clone)]
pub(crate) struct Counted<S>(pub(crate) S);

impl<S: NamedService> NamedService for Counted<S> {
    const NAME: &'static str = S::NAME;
}

impl<S, B, A> Service<http::Request<B>> for Counted<S>
where
    S: Service<http::Request<B>, Response = http::Response<A>>,
    S::Future: Send + 'static,
    S::Error: 'static,
    A: 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<S::Response, S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let path = request.uri().path().to_owned();
        let answered = self.0.call(request);
        Box::pin(async move {
            let answered = answered.await;
            if let Ok(response) = &answered {
                // The status of a call that succeeded comes behind its answer.
                let code =
                    Status::from_header_map(response.headers()).map_or(Code::Ok, |status| status.code());
                count(&path, code);
            }
            answered
        })
    }
}

/// Counts a call. Its path may be anything until the code tells that it is served.
fn count(path: &str, code: Code) {
    let method = path.rsplit('/').next().filter(|_| code != Code::Unimplemented).unwrap_or("other");
    CALLS.with_label_values(&[method, &format!("{code:?}")]).inc();
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixListener;

    use super::*;

    fn source(folder: &Path, name: &str) -> Source {
        Source {
            volume_id: name.to_owned(),
            target: format!("/k/pods/uid-{name}/volumes/kubernetes.io~csi/pv-{name}/mount").into(),
            socket: folder.join(name),
            is_serving: true,
        }
    }

    /// A server that writes this to everybody.
    fn serve(source: &Source, text: String) {
        let listener = UnixListener::bind(&source.socket).unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                // The reader may have had enough.
                stream.unwrap().write_all(text.as_bytes()).ok();
            }
        });
    }

    #[tokio::test]
    async fn servers_that_do_not_answer_or_talk_nonsense_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let names = ["a", "b", "cut", "nonsense", "endless", "gone", "silent", "absent"];
        let sources: Vec<Source> = names.iter().map(|name| source(dir.path(), name)).collect();
        let right = "# HELP m Some.\n# TYPE m gauge\nm{op=\"x\"} 1\n";
        for source in &sources[..2] {
            serve(source, format!("{right}{END}"));
        }
        serve(&sources[2], right.to_owned());
        serve(&sources[3], format!("m 1\n{END}"));
        serve(&sources[4], right.repeat(100_000));
        // Accepts, and never writes.
        let _silent = UnixListener::bind(&sources[6].socket).unwrap();
        let own = || "# TYPE own gauge\nown 1\n".to_owned();
        let before = Instant::now();
        let text = gather(sources, own).await;
        assert!(before.elapsed() < ALL_MAX, "{:?}", before.elapsed());
        let labels = |name: &str| {
            format!("volume_handle=\"{name}\",persistentvolume=\"pv-{name}\",pod_uid=\"uid-{name}\"")
        };
        let expected = format!(
            "# HELP m Some.\n# TYPE m gauge\nm{{op=\"x\",{}}} 1\nm{{op=\"x\",{}}} 1\n# TYPE own gauge\nown 1\n",
            labels("a"),
            labels("b")
        );
        assert_eq!(text, expected);
        for (reason, least) in [("malformed", 3), ("timeout", 1), ("absent", 2)] {
            assert!(LEFT_OUT.with_label_values(&[reason]).get() >= least, "{reason}");
        }
    }

    #[test]
    fn targets_name_their_pod_and_volume() {
        let target = "/var/lib/kubelet/pods/1-2/volumes/kubernetes.io~csi/pvc-3/mount";
        assert_eq!(of_pod(Path::new(target)), Some(("1-2", "pvc-3")));
        for other in ["/mnt", "/pods/1/volumes/kubernetes.io~csi/mount", "/pods/1/volumes/other/2/mount"] {
            assert_eq!(of_pod(Path::new(other)), None);
        }
    }

    #[test]
    fn methods_that_are_not_served_make_no_series() {
        count("/csi.v1.Node/NodePublishVolume", Code::Ok);
        count("/csi.v1.Node/Random123", Code::Unimplemented);
        assert!(CALLS.with_label_values(&["NodePublishVolume", "Ok"]).get() >= 1);
        assert!(CALLS.with_label_values(&["other", "Unimplemented"]).get() >= 1);
        let text = prometheus::TextEncoder::new().encode_to_string(&prometheus::gather()).unwrap();
        assert!(!text.contains("Random123"), "{text}");
    }
}
