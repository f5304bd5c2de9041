//! An S3 server for tests, over HTTP on a local port, with its data in a temporary folder. Tests can stop and
//! restart it, and inject the faults of networks and servers.
#![allow(clippy::unwrap_used, clippy::missing_panics_doc)]

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt as _;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use s3s::auth::SimpleAuth;
use s3s::dto::*;
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s::{S3, S3Request, S3Response, S3Result, s3_error};
use s3s_fs::FileSystem;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::task::{JoinHandle, JoinSet};

const BUCKET: &str = "bucket";
const KEY: &str = "test";
const SECRET: &str = "test-secret";

/// A fault of one request.
#[derive(Debug, Clone, Copy)]
pub enum Fault {
    /// The server answers with this status: 500 or 503.
    Status(u16),
    /// The response body breaks off after this number of bytes.
    Cut(usize),
    /// The body is this number of bytes shorter, with a matching length header.
    Short(usize),
    /// The byte of the body at this place is changed.
    Flip(usize),
    /// The server waits before it handles the request.
    Late(Duration),
    /// The server executes the request, but responds with an error.
    Lost,
}

/// Request counts by kind, and the planned faults.
#[derive(Debug, Default)]
pub struct Faults {
    planned: Mutex<VecDeque<(&'static str, Fault)>>,
    /// The fault of all requests of one kind, if set.
    always: Mutex<Option<(&'static str, Fault)>>,
    counts: [AtomicU64; KINDS.len()],
    /// Bytes in the answers to requests for objects.
    fetched: AtomicU64,
}

const KINDS: [&str; 9] = ["get", "put", "head", "delete", "list", "begin", "part", "complete", "abort"];

impl Faults {
    /// Injects a fault into the next `times` requests of a kind.
    pub fn next(&self, kind: &'static str, times: usize, fault: Fault) {
        assert!(KINDS.contains(&kind));
        self.planned.lock().unwrap().extend((0..times).map(|_| (kind, fault)));
    }

    /// Injects a fault into all requests of a kind, until it is reset.
    pub fn always(&self, fault: Option<(&'static str, Fault)>) {
        *self.always.lock().unwrap() = fault;
    }

    /// The number of requests of a kind.
    pub fn count(&self, kind: &'static str) -> u64 {
        self.counts[KINDS.iter().position(|k| *k == kind).unwrap()].load(Ordering::SeqCst)
    }

    /// The bytes of objects that were sent, of whole objects or of ranges, before faults.
    pub fn fetched_bytes(&self) -> u64 {
        self.fetched.load(Ordering::SeqCst)
    }

    fn take(&self, kind: &'static str) -> Option<Fault> {
        self.counts[KINDS.iter().position(|k| *k == kind).unwrap()].fetch_add(1, Ordering::SeqCst);
        let mut planned = self.planned.lock().unwrap();
        if let Some(at) = planned.iter().position(|(k, _)| *k == kind) {
            return planned.remove(at).map(|(_, fault)| fault);
        }
        self.always.lock().unwrap().filter(|(k, _)| *k == kind).map(|(_, fault)| fault)
    }

    /// Applies faults before the request is executed; returns a fault to apply afterwards.
    async fn before(&self, kind: &'static str) -> S3Result<Option<Fault>> {
        let fault = self.take(kind);
        match fault {
            Some(Fault::Status(503)) => Err(s3_error!(SlowDown)),
            Some(Fault::Status(_)) => Err(s3_error!(InternalError)),
            Some(Fault::Late(delay)) => {
                tokio::time::sleep(delay).await;
                Ok(None)
            }
            other => Ok(other),
        }
    }
}

/// The server. Dropping it stops it and removes its data.
pub struct S3Server {
    /// Its planned faults.
    pub faults: Arc<Faults>,
    root: TempDir,
    runtime: Option<Runtime>,
    service: S3Service,
    address: SocketAddr,
    serving: Option<JoinHandle<()>>,
}

impl S3Server {
    /// A server at a port of `127.0.0.1`.
    pub fn start() -> S3Server {
        S3Server::start_at("127.0.0.1")
    }

    /// A server at another address of this machine.
    pub fn start_at(address: &str) -> S3Server {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join(BUCKET)).unwrap();
        let faults = Arc::new(Faults::default());
        let files = FileSystem::new(root.path()).unwrap();
        let mut builder = S3ServiceBuilder::new(Faulty { files, faults: Arc::clone(&faults) });
        builder.set_auth(SimpleAuth::from_single(KEY, SECRET));
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("s3-server")
            .enable_all()
            .build()
            .unwrap();
        let mut server = S3Server {
            faults,
            root,
            runtime: Some(runtime),
            service: builder.build(),
            address: SocketAddr::new(address.parse().unwrap(), 0),
            serving: None,
        };
        server.start_again();
        server
    }

    /// Listens again, at the previous address.
    pub fn start_again(&mut self) {
        let runtime = self.runtime.as_ref().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind(self.address)).unwrap();
        self.address = listener.local_addr().unwrap();
        let service = self.service.clone();
        self.serving = Some(runtime.spawn(async move {
            // Dropping the set ends the connection tasks.
            let mut connections = JoinSet::new();
            loop {
                tokio::select! {
                    Ok((socket, _)) = listener.accept() => {
                        let _ = socket.set_nodelay(true);
                        let service = service.clone();
                        connections.spawn(async move {
                            let http = Builder::new(TokioExecutor::new());
                            let _ = http.serve_connection(TokioIo::new(socket), service).await;
                        });
                    }
                    Some(_) = connections.join_next() => {}
                }
            }
        }));
    }

    /// Closes the port and every connection.
    pub fn stop(&mut self) {
        if let Some(serving) = self.serving.take() {
            serving.abort();
            let _ = self.runtime.as_ref().unwrap().block_on(serving);
        }
    }

    /// The `store_url` of a prefix in the bucket.
    pub fn url(&self, prefix: &str) -> String {
        format!("s3://{BUCKET}/{prefix}")
    }

    /// The `store_options`.
    pub fn options(&self) -> Vec<(&'static str, String)> {
        vec![
            ("endpoint", format!("http://{}", self.address)),
            ("allow_http", "true".into()),
            ("region", "us-east-1".into()),
            ("access_key_id", KEY.into()),
            ("secret_access_key", SECRET.into()),
        ]
    }

    /// The folder that holds the bucket's objects as files.
    pub fn folder(&self) -> std::path::PathBuf {
        self.root.path().join(BUCKET)
    }

    /// Names of the objects below a prefix, sorted.
    pub fn names(&self, prefix: &str) -> Vec<String> {
        fn walk(folder: &std::path::Path, base: &std::path::Path, names: &mut Vec<String>) {
            for entry in std::fs::read_dir(folder).into_iter().flatten() {
                let path = entry.unwrap().path();
                match path.is_dir() {
                    true => walk(&path, base, names),
                    false => names.push(path.strip_prefix(base).unwrap().display().to_string()),
                }
            }
        }
        let mut names = Vec::new();
        let base = self.folder().join(prefix);
        walk(&base, &base, &mut names);
        names.sort();
        names
    }

    /// Parts of uploads that were neither completed nor aborted.
    pub fn loose_parts(&self) -> usize {
        let entries = std::fs::read_dir(self.root.path()).unwrap();
        entries.filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().contains(".part-")).count()
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        self.stop();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// The S3 service: files, with injected faults.
#[derive(Debug)]
struct Faulty {
    files: FileSystem,
    faults: Arc<Faults>,
}

/// The response, or an error for a lost one.
fn after<T>(fault: Option<Fault>, answer: S3Result<S3Response<T>>) -> S3Result<S3Response<T>> {
    match fault {
        Some(Fault::Lost) => answer.and_then(|_| Err(s3_error!(InternalError))),
        _ => answer,
    }
}

macro_rules! pass_on {
    ($($method:ident, $input:ty, $output:ty, $kind:literal;)*) => { $(
        fn $method<'l, 'a>(&'l self, req: S3Request<$input>) -> futures::future::BoxFuture<'a, S3Result<S3Response<$output>>>
        where
            'l: 'a,
            Self: 'a,
        {
            Box::pin(async move {
                let fault = self.faults.before($kind).await?;
                after(fault, self.files.$method(req).await)
            })
        }
    )* };
}

impl S3 for Faulty {
    pass_on! {
        put_object, PutObjectInput, PutObjectOutput, "put";
        head_object, HeadObjectInput, HeadObjectOutput, "head";
        delete_object, DeleteObjectInput, DeleteObjectOutput, "delete";
        delete_objects, DeleteObjectsInput, DeleteObjectsOutput, "delete";
        list_objects_v2, ListObjectsV2Input, ListObjectsV2Output, "list";
        create_multipart_upload, CreateMultipartUploadInput, CreateMultipartUploadOutput, "begin";
        upload_part, UploadPartInput, UploadPartOutput, "part";
        complete_multipart_upload, CompleteMultipartUploadInput, CompleteMultipartUploadOutput, "complete";
        abort_multipart_upload, AbortMultipartUploadInput, AbortMultipartUploadOutput, "abort";
    }

    fn get_object<'l, 'a>(
        &'l self,
        req: S3Request<GetObjectInput>,
    ) -> futures::future::BoxFuture<'a, S3Result<S3Response<GetObjectOutput>>>
    where
        'l: 'a,
        Self: 'a,
    {
        Box::pin(async move {
            let fault = self.faults.before("get").await?;
            let mut answer = self.files.get_object(req).await?;
            let sent = answer.output.content_length.and_then(|bytes| u64::try_from(bytes).ok());
            self.faults.fetched.fetch_add(sent.unwrap_or(0), Ordering::SeqCst);
            let Some(fault) = fault else { return Ok(answer) };
            let Some(mut body) = answer.output.body.take() else { return Ok(answer) };
            let mut bytes = Vec::new();
            while let Some(piece) = body.next().await {
                bytes.extend_from_slice(&piece.map_err(|_| s3_error!(InternalError))?);
            }
            let broken = match fault {
                Fault::Cut(at) => {
                    bytes.truncate(at);
                    true
                }
                Fault::Short(less) => {
                    bytes.truncate(bytes.len().saturating_sub(less));
                    answer.output.content_length = Some(bytes.len() as i64);
                    false
                }
                Fault::Flip(at) => {
                    if let Some(byte) = bytes.get_mut(at) {
                        *byte ^= 0x20;
                    }
                    false
                }
                _ => return Err(s3_error!(InternalError)),
            };
            let mut pieces = vec![Ok(bytes::Bytes::from(bytes))];
            if broken {
                pieces.push(Err(std::io::Error::other("cut")));
            }
            answer.output.body = Some(StreamingBlob::wrap(futures::stream::iter(pieces)));
            Ok(answer)
        })
    }
}
