//! A worker's way to a coordinator on another machine: connection, proof of the token, assignment.
use std::io;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt as _};
use hyper_util::rt::TokioIo;
use millrace_leaf::error_chain;
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};

use super::proto::coordinator_client::CoordinatorClient;
use super::proto::{self, FromWorker, from_worker, to_worker};
use super::session::{AcceptedSession, MESSAGE_BYTES_MAX};
use crate::error::Error;
use crate::join::{self, ClientTls, Join, PROTOCOL, Token};
use crate::proof::{Nonce, PROOF_BYTES, is_valid, nonce, prove};

/// Deadline for a connection, and for each answer before the assignment.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Deadline for the assignment, whose plan names every file and row group of the dataset.
pub(super) const ASSIGNMENT_TIMEOUT: Duration = Duration::from_secs(120);
/// Deadline for the first bytes of a server that may be another one.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// The first bytes of an HTTP/2 client: the preface and an empty SETTINGS frame.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
/// Purposes of proofs.
const OF_COORDINATOR: &str = "millrace coordinator";
const OF_WORKER: &str = "millrace worker";
const OF_RING: &str = "millrace ring";
const OF_CONNECTION: &str = "millrace connection";
const OF_WELCOME: &str = "millrace welcome";

/// A worker that the coordinator has admitted.
pub(crate) struct Admission {
    pub(crate) session: AcceptedSession,
    /// The assignment as JSON.
    pub(crate) assignment: String,
    /// The secret of the job's rings.
    pub(crate) secret: String,
    /// A secret of this connection, with which messages of script jobs are sealed.
    pub(crate) key: [u8; PROOF_BYTES],
}

/// Why a worker was not admitted.
pub(crate) enum NotAdmitted {
    /// Another attempt may succeed.
    Yet(String),
    /// It never will, unless a setting changes.
    Ever(Error),
}

impl From<Error> for NotAdmitted {
    fn from(error: Error) -> NotAdmitted {
        NotAdmitted::Ever(error)
    }
}

/// The coordinator's proof that it knows the token.
pub(super) fn coordinator_proof(token: &Token, worker: &[u8], own: &Nonce) -> Vec<u8> {
    prove(token.bytes(), OF_COORDINATOR, &[worker, own]).to_vec()
}

/// Whether a worker's proof is valid for both nonces and its ring address.
pub(super) fn is_worker_proof(token: &Token, worker: &[u8], own: &Nonce, ring: &str, proof: &[u8]) -> bool {
    is_valid(token.bytes(), OF_WORKER, &[worker, own, ring.as_bytes()], proof)
}

/// The secret of a job's rings.
pub(super) fn ring_secret(token: &Token, ring_nonce: &[u8]) -> String {
    hex::encode(prove(token.bytes(), OF_RING, &[ring_nonce]))
}

/// A secret of one connection, which only its two sides know.
pub(super) fn connection_key(token: &Token, worker: &[u8], coordinator: &[u8]) -> [u8; PROOF_BYTES] {
    prove(token.bytes(), OF_CONNECTION, &[worker, coordinator])
}

/// The place and the assignment of a worker that has proved the token. They carry a proof, so that no machine on the way
/// can change the job, or turn off the encryption of its rings.
pub(crate) fn welcome(
    key: &[u8; PROOF_BYTES],
    member: u64,
    assignment: String,
    ring_nonce: &[u8],
) -> proto::Welcome {
    // The plan of a large dataset is long; its digest is not copied.
    let digest = Sha256::digest(assignment.as_bytes());
    let proof = prove(key, OF_WELCOME, &[&member.to_le_bytes(), &digest, ring_nonce]).to_vec();
    proto::Welcome { member, assignment, ring_nonce: ring_nonce.to_vec(), proof }
}

fn is_welcome(key: &[u8; PROOF_BYTES], welcome: &proto::Welcome) -> bool {
    let digest = Sha256::digest(welcome.assignment.as_bytes());
    let parts: [&[u8]; 3] = [&welcome.member.to_le_bytes(), &digest, &welcome.ring_nonce];
    is_valid(key, OF_WELCOME, &parts, &welcome.proof)
}

/// Connects to the coordinator, proves the token both ways and receives the assignment. `ring` is the address
/// of this worker's ring for other workers.
pub(crate) fn connect(runtime: &Handle, join: &Join, ring: &str) -> Result<Admission, NotAdmitted> {
    runtime.block_on(async {
        match greet(join, ring).await {
            // Whether the error shows it depends on the order of reads and writes, so this looks for itself.
            Err(NotAdmitted::Yet(_)) if join.tls.is_none() && is_foreign(&join.coordinator).await => {
                Err(foreign(join))
            }
            result => result,
        }
    })
}

/// Whether a server answers there that does not speak HTTP/2.
async fn is_foreign(address: &str) -> bool {
    let first_frame = async {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(PREFACE).await?;
        let mut header = Vec::new();
        // A server with TLS answers with an alert of 7 bytes and closes the connection, perhaps with an error.
        let _ = stream.take(9).read_to_end(&mut header).await;
        io::Result::Ok(header)
    };
    // An HTTP/2 server begins with a SETTINGS frame (type 4) of stream 0.
    let is_settings =
        |header: &[u8]| header.len() == 9 && header[0] == 0 && header[3] == 4 && header[5..] == [0; 4];
    let answer = timeout(PROBE_TIMEOUT, first_frame).await;
    matches!(answer, Ok(Ok(header)) if !header.is_empty() && !is_settings(&header))
}

fn foreign(join: &Join) -> NotAdmitted {
    let hint = match join.tls {
        Some(_) => "",
        None => "; if it is one with TLS, name its authority with --ca",
    };
    let reason = format!("what answers there is not a coordinator of millrace train{hint}");
    NotAdmitted::Ever(Error::Join { coordinator: join.coordinator.clone(), reason })
}

async fn greet(join: &Join, ring: &str) -> Result<Admission, NotAdmitted> {
    let refused =
        |reason: String| NotAdmitted::Ever(Error::Join { coordinator: join.coordinator.clone(), reason });
    let channel = open(join).await?;
    let mut client = CoordinatorClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
    let (outgoing, messages) = mpsc::channel(64);
    let gone = |_| NotAdmitted::Yet("the connection broke".to_owned());
    let own = nonce()?;
    let hello = proto::Hello {
        pid: std::process::id(),
        ring_address: ring.to_owned(),
        join: Some(proto::Join {
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            host: join::host_name(),
            nonce: own.to_vec(),
        }),
        ..Default::default()
    };
    outgoing.send(from(from_worker::Message::Hello(hello))).await.map_err(gone)?;
    let silent = |_| NotAdmitted::Yet("it accepts connections and does not answer".to_owned());
    let mut incoming = timeout(ANSWER_TIMEOUT, client.session(ReceiverStream::new(messages)))
        .await
        .map_err(silent)?
        .map_err(|status| judge(join, &status))?
        .into_inner();
    let challenge = match answer(join, &mut incoming, ANSWER_TIMEOUT).await? {
        to_worker::Message::Challenge(challenge) => challenge,
        _ => return Err(refused("it did not ask for a proof of the token".to_owned())),
    };
    if challenge.protocol != PROTOCOL {
        return Err(refused(other_version(challenge.protocol, &challenge.version)));
    }
    if !is_valid(join.token.bytes(), OF_COORDINATOR, &[&own, &challenge.nonce], &challenge.proof) {
        return Err(refused(
            "it has another token than this worker: copy the coordinator's token file".to_owned(),
        ));
    }
    let proof = prove(join.token.bytes(), OF_WORKER, &[&own, &challenge.nonce, ring.as_bytes()]).to_vec();
    let proof = from_worker::Message::Proof(proto::Proof { proof });
    outgoing.send(from(proof)).await.map_err(gone)?;
    let welcome = match answer(join, &mut incoming, ASSIGNMENT_TIMEOUT).await? {
        to_worker::Message::Welcome(welcome) => welcome,
        _ => return Err(refused("it sent no assignment".to_owned())),
    };
    let key = connection_key(&join.token, &own, &challenge.nonce);
    if !is_welcome(&key, &welcome) {
        return Err(NotAdmitted::Yet("its assignment was changed on the way".to_owned()));
    }
    Ok(Admission {
        session: AcceptedSession::new(join.coordinator.clone(), outgoing, incoming),
        assignment: welcome.assignment,
        secret: ring_secret(&join.token, &welcome.ring_nonce),
        key,
    })
}

fn from(message: from_worker::Message) -> FromWorker {
    FromWorker { message: Some(message) }
}

/// What is wrong when the other side speaks another protocol, and what to do.
pub(super) fn other_version(protocol: u32, version: &str) -> String {
    format!(
        "it is millrace {version} with protocol {protocol}, this is millrace {} with protocol {PROTOCOL}: install \
         the same version on both machines",
        env!("CARGO_PKG_VERSION")
    )
}

async fn answer(
    join: &Join,
    incoming: &mut Streaming<proto::ToWorker>,
    limit: Duration,
) -> Result<to_worker::Message, NotAdmitted> {
    let message = timeout(limit, incoming.message())
        .await
        .map_err(|_| NotAdmitted::Yet("it stopped answering".to_owned()))?
        .map_err(|status| judge(join, &status))?;
    message
        .and_then(|message| message.message)
        .ok_or_else(|| NotAdmitted::Yet("it closed the connection".to_owned()))
}

/// Whether another attempt may succeed after a call has failed.
fn judge(join: &Join, status: &Status) -> NotAdmitted {
    let ever =
        |reason: String| NotAdmitted::Ever(Error::Join { coordinator: join.coordinator.clone(), reason });
    match status.code() {
        Code::Unimplemented => foreign(join),
        Code::PermissionDenied | Code::FailedPrecondition | Code::InvalidArgument => {
            ever(status.message().to_owned())
        }
        _ => NotAdmitted::Yet(error_chain::one_line(status)),
    }
}

/// Opens the connection.
async fn open(join: &Join) -> Result<Channel, NotAdmitted> {
    let wrong = |reason: String| {
        NotAdmitted::Ever(Error::Access { what: format!("connect to {}", join.coordinator), reason })
    };
    // Half of the limit for a ping to be due, half for its answer.
    let half = join.silence / 2;
    let scheme = if join.tls.is_some() { "https" } else { "http" };
    let endpoint = Endpoint::from_shared(format!("{scheme}://{}", join.coordinator))
        .map_err(|_| wrong("it is not HOST:PORT".to_owned()))?
        // A machine that is lost must not keep this worker from the next address.
        .connect_timeout(join.silence.min(ANSWER_TIMEOUT))
        .tcp_nodelay(true)
        .http2_keep_alive_interval(half)
        .keep_alive_timeout(half)
        .keep_alive_while_idle(true);
    let connected = match &join.tls {
        None => endpoint.connect().await,
        Some(tls) => {
            let connector = Connector { tls: tls.clone() };
            match timeout(ANSWER_TIMEOUT, endpoint.connect_with_connector(connector)).await {
                Ok(connected) => connected,
                Err(_) => return Err(NotAdmitted::Yet("it does not answer in TLS".to_owned())),
            }
        }
    };
    connected.map_err(|error| {
        let untrusted = error_chain::causes(&error)
            .filter_map(|cause| cause.downcast_ref::<io::Error>())
            .any(|cause| cause.kind() == io::ErrorKind::InvalidData);
        let reason = error_chain::one_line(&error);
        match untrusted {
            true => wrong(format!("TLS fails ({reason}); check --ca and the name in --join")),
            false => NotAdmitted::Yet(reason),
        }
    })
}

/// Connects with TLS.
#[derive(Clone)]
struct Connector {
    tls: ClientTls,
}

impl Service<Uri> for Connector {
    type Response = TokioIo<TlsStream<TcpStream>>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connector = TlsConnector::from(self.tls.0.clone());
        async move {
            let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
            let port = uri.port_u16().unwrap_or_default();
            let stream = TcpStream::connect((host.as_str(), port)).await?;
            stream.set_nodelay(true)?;
            let name = ServerName::try_from(host).map_err(io::Error::other)?;
            Ok(TokioIo::new(connector.connect(name, stream).await?))
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_assignment_that_was_changed_on_the_way_is_refused() {
        let key = [7; PROOF_BYTES];
        let sent = welcome(&key, 3, r#"{"job":1,"encrypt_ring":true}"#.to_owned(), b"nonce");
        assert!(is_welcome(&key, &sent));
        assert!(!is_welcome(&[8; PROOF_BYTES], &sent));
        let changes: [fn(&mut proto::Welcome); 5] = [
            |welcome| welcome.member = 4,
            |welcome| welcome.assignment = r#"{"job":1}"#.to_owned(),
            |welcome| welcome.ring_nonce.clear(),
            |welcome| welcome.proof.clear(),
            |welcome| welcome.proof.truncate(31),
        ];
        for change in changes {
            let mut changed = sent.clone();
            change(&mut changed);
            assert!(!is_welcome(&key, &changed), "{changed:?}");
        }
    }
}
