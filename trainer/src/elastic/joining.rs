//! A worker's way to a coordinator on another machine: connection, proof of the token, assignment.
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt as _};
use hyper_util::rt::TokioIo;
use millrace_leaf::error_chain;
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};

use super::proto::coordinator_client::CoordinatorClient;
use super::proto::{self, FromWorker, from_worker, to_worker};
use super::session::AcceptedSession;
use crate::error::Error;
use crate::join::tls::{self, Binding, HTTP2};
use crate::join::{self, ClientTls, Join, PROTOCOL, Token};
use crate::proof::{Nonce, is_valid, nonce, prove};

/// Deadline for a connection, and for each answer before the assignment.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Deadline for the assignment, whose plan names every file and row group of the dataset.
pub(super) const ASSIGNMENT_TIMEOUT: Duration = Duration::from_secs(120);
/// Bytes of a part of an assignment.
const PART_BYTES: usize = 8 << 20;
/// Largest message from a coordinator, which may not have proved the token yet.
const MESSAGE_BYTES_MAX: usize = 2 * PART_BYTES;
/// Largest assignment. A plan names every file and row group of its dataset.
const ASSIGNMENT_BYTES_MAX: usize = 2 << 30;
/// Purposes of proofs.
const OF_COORDINATOR: &str = "millrace coordinator";
const OF_WORKER: &str = "millrace worker";
const OF_RING: &str = "millrace ring";

/// A worker that the coordinator has admitted.
pub(crate) struct Admission {
    pub(crate) session: AcceptedSession,
    /// The assignment as JSON.
    pub(crate) assignment: String,
    /// The secret of the job's rings.
    pub(crate) secret: String,
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

/// The coordinator's proof that it knows the token, for the nonces of the worker and of the coordinator.
pub(super) fn coordinator_proof(token: &Token, binding: &Binding, worker: &[u8], own: &Nonce) -> Vec<u8> {
    prove(token.bytes(), OF_COORDINATOR, &[binding, worker, own]).to_vec()
}

/// Whether a worker's proof is valid for the connection, the nonces of worker and coordinator, and its ring address.
pub(super) fn is_worker_proof(
    token: &Token,
    binding: &Binding,
    (worker, own): (&[u8], &Nonce),
    ring: &str,
    proof: &[u8],
) -> bool {
    is_valid(token.bytes(), OF_WORKER, &[binding, worker, own, ring.as_bytes()], proof)
}

/// The secret of a job's rings.
pub(super) fn ring_secret(token: &Token, ring_nonce: &[u8]) -> String {
    hex::encode(prove(token.bytes(), OF_RING, &[ring_nonce]))
}

/// Sends a worker that has proved the token its assignment and its place. Returns whether the queue took them.
pub(crate) fn send_welcome(
    outbox: &mpsc::Sender<Result<proto::ToWorker, Status>>,
    member: u64,
    assignment: &str,
    ring_nonce: &[u8],
) -> bool {
    let parts = assignment.as_bytes().chunks(PART_BYTES);
    let parts = parts.map(|part| to_worker::Message::Part(proto::Part { assignment: part.to_vec() }));
    let welcome = proto::Welcome { member, ring_nonce: ring_nonce.to_vec(), ..Default::default() };
    parts
        .chain([to_worker::Message::Welcome(welcome)])
        .all(|message| outbox.try_send(Ok(proto::ToWorker { message: Some(message) })).is_ok())
}

/// Connects to the coordinator, proves the token both ways and receives the assignment. `ring` is the address
/// of this worker's ring for other workers.
pub(crate) fn connect(runtime: &Handle, join: &Join, ring: &str) -> Result<Admission, NotAdmitted> {
    runtime.block_on(greet(join, ring))
}

fn foreign(join: &Join) -> NotAdmitted {
    let reason = "what answers there is not a coordinator of millrace train of this version".to_owned();
    NotAdmitted::Ever(Error::Join { coordinator: join.coordinator.clone(), reason })
}

async fn greet(join: &Join, ring: &str) -> Result<Admission, NotAdmitted> {
    let refused =
        |reason: String| NotAdmitted::Ever(Error::Join { coordinator: join.coordinator.clone(), reason });
    let (channel, binding) = open(join).await?;
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
    let binding = binding.get()?;
    if !is_valid(join.token.bytes(), OF_COORDINATOR, &[&binding, &own, &challenge.nonce], &challenge.proof) {
        return Err(refused(
            "it has another token than this worker (copy the coordinator's token file), or a proxy between them ends \
             TLS"
                .to_owned(),
        ));
    }
    let parts: [&[u8]; 4] = [&binding, &own, &challenge.nonce, ring.as_bytes()];
    let proof = prove(join.token.bytes(), OF_WORKER, &parts).to_vec();
    let proof = from_worker::Message::Proof(proto::Proof { proof });
    outgoing.send(from(proof)).await.map_err(gone)?;
    let mut assignment = Vec::new();
    let welcome = loop {
        match answer(join, &mut incoming, ASSIGNMENT_TIMEOUT).await? {
            to_worker::Message::Part(part)
                if assignment.len() + part.assignment.len() <= ASSIGNMENT_BYTES_MAX =>
            {
                assignment.extend_from_slice(&part.assignment);
            }
            to_worker::Message::Welcome(welcome) => break welcome,
            _ => return Err(refused("it sent no assignment".to_owned())),
        }
    };
    let assignment =
        String::from_utf8(assignment).map_err(|_| refused("its assignment is not text".to_owned()))?;
    Ok(Admission {
        session: AcceptedSession::new(join.coordinator.clone(), outgoing, incoming),
        assignment,
        secret: ring_secret(&join.token, &welcome.ring_nonce),
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
async fn open(join: &Join) -> Result<(Channel, LastBinding), NotAdmitted> {
    let wrong = |reason: String| {
        NotAdmitted::Ever(Error::Access { what: format!("connect to {}", join.coordinator), reason })
    };
    let tls = join.tls.clone().map_or_else(ClientTls::of_token, Ok)?;
    let has_authority = tls.has_authority;
    // Half of the limit for a ping to be due, half for its answer.
    let half = join.silence / 2;
    let endpoint = Endpoint::from_shared(format!("https://{}", join.coordinator))
        .map_err(|_| wrong("it is not HOST:PORT".to_owned()))?
        .http2_keep_alive_interval(half)
        .keep_alive_timeout(half)
        .keep_alive_while_idle(true);
    let binding = LastBinding::default();
    let connector = Connector { tls, binding: binding.clone() };
    // A machine that is lost must not keep this worker from the next address.
    let limit = join.silence.min(ANSWER_TIMEOUT);
    let connected = timeout(limit, endpoint.connect_with_connector(connector)).await;
    let Ok(connected) = connected else {
        return Err(NotAdmitted::Yet("it does not answer in TLS".to_owned()));
    };
    let channel = connected.map_err(|error| {
        // What rustls says of a server that breaks the rules of TLS, or has another certificate.
        let breaks_rules = error_chain::causes(&error)
            .filter_map(|cause| cause.downcast_ref::<io::Error>())
            .any(|cause| cause.kind() == io::ErrorKind::InvalidData);
        let reason = error_chain::one_line(&error);
        match (breaks_rules, has_authority) {
            (true, true) => wrong(format!("TLS fails ({reason}); check --ca and the name in --join")),
            (true, false) => foreign(join),
            (false, _) => NotAdmitted::Yet(reason),
        }
    })?;
    Ok((channel, binding))
}

/// The channel binding of the newest connection of a channel.
#[derive(Clone, Default)]
struct LastBinding(Arc<Mutex<Option<Binding>>>);

impl LastBinding {
    fn get(&self) -> Result<Binding, NotAdmitted> {
        let binding = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        binding.ok_or_else(|| NotAdmitted::Yet("the connection broke".to_owned()))
    }
}

/// Connects with TLS.
#[derive(Clone)]
struct Connector {
    tls: ClientTls,
    binding: LastBinding,
}

impl Service<Uri> for Connector {
    type Response = TokioIo<TlsStream<TcpStream>>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let Connector { tls, binding } = self.clone();
        async move {
            let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
            let port = uri.port_u16().unwrap_or_default();
            let addresses = join::resolve("the coordinator", &join::host_port(&host, port)).await;
            let stream = join::dial(&addresses.map_err(io::Error::other)?).await?;
            stream.set_nodelay(true)?;
            let stream =
                TlsConnector::from(tls.config.clone()).connect(tls.server_name(&host)?, stream).await?;
            let connection = stream.get_ref().1;
            if connection.alpn_protocol() != Some(HTTP2) {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "it does not speak HTTP/2"));
            }
            *binding.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(tls::binding(connection)?);
            Ok(TokioIo::new(stream))
        }
        .boxed()
    }
}

/// Connections for tests that speak the protocol themselves.
#[cfg(test)]
pub(crate) mod tests_support {
    use std::net::SocketAddr;

    use super::*;

    pub(crate) fn join(address: SocketAddr, token: &Token) -> Join {
        Join {
            coordinator: address.to_string(),
            token: token.clone(),
            tls: None,
            listen_ring: None,
            advertise: None,
            wait: Duration::from_secs(10),
            silence: Duration::from_secs(10),
            leaves_on_hangup: false,
        }
    }

    /// A connection to a coordinator, and its channel binding.
    pub(crate) async fn connect(address: SocketAddr, token: &Token) -> (Channel, Binding) {
        let Ok((channel, binding)) = open(&join(address, token)).await else { panic!("no connection") };
        let Ok(binding) = binding.get() else { panic!("no binding") };
        (channel, binding)
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::config::Config;
    use crate::elastic::coordinator::{Admission, CoordinatorService, Event, admit};
    use crate::join::{Listen, ServerTls};

    /// A coordinator's port whose workers get this assignment, and the token.
    async fn coordinator(assignment: String) -> (std::net::SocketAddr, Token, CancellationToken) {
        let token = Token::of("0123456789abcdef");
        let listen = Listen {
            address: "127.0.0.1:0".parse().unwrap(),
            advertise: None,
            token: token.clone(),
            tls: None,
            workers_local: Some(0),
        };
        let (events, mut inbox) = mpsc::channel(8);
        let service = CoordinatorService {
            admission: Admission::Joining {
                token: token.clone(),
                silence_max: Config::default().heartbeat_lost(),
            },
            events,
        };
        let shutdown = CancellationToken::new();
        let address = admit(&listen, service, &Config::default(), shutdown.clone()).await.unwrap();
        tokio::spawn(async move {
            let mut outboxes = Vec::new();
            while let Some(event) = inbox.recv().await {
                if let Event::Admitted { outbox, reply, .. } = event {
                    let sent = send_welcome(&outbox, 7, &assignment, b"nonce");
                    outboxes.push(outbox);
                    reply.send(sent.then_some(7)).unwrap();
                }
            }
        });
        (address, token, shutdown)
    }

    #[tokio::test]
    async fn a_long_assignment_arrives_whole() {
        // Characters of two bytes, one of which is in two parts.
        let sent = format!("a{}", "\u{e9}".repeat(PART_BYTES));
        let (address, token, _stop) = coordinator(sent.clone()).await;
        let Ok(admission) = greet(&tests_support::join(address, &token), "127.0.0.1:1").await else {
            panic!("not admitted")
        };
        assert!(admission.assignment == sent);
        assert_eq!(admission.secret, ring_secret(&token, b"nonce"));
    }

    /// A machine on the way that ends TLS on both sides sees no proof that it could use.
    #[tokio::test]
    async fn a_machine_that_ends_tls_on_the_way_is_noticed() {
        let (address, token, _stop) = coordinator("{}".to_owned()).await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let between = listener.local_addr().unwrap();
        tokio::spawn(async move {
            let acceptor = TlsAcceptor::from(ServerTls::own().unwrap().0);
            let tls = ClientTls::of_token().unwrap();
            let (stream, _) = listener.accept().await.unwrap();
            let mut of_worker = acceptor.accept(stream).await.unwrap();
            let stream = TcpStream::connect(address).await.unwrap();
            let name = tls.server_name("").unwrap();
            let mut of_coordinator = TlsConnector::from(tls.config).connect(name, stream).await.unwrap();
            let _ = tokio::io::copy_bidirectional(&mut of_worker, &mut of_coordinator).await;
        });
        match greet(&tests_support::join(between, &token), "127.0.0.1:1").await {
            Err(NotAdmitted::Ever(error)) => assert!(error.to_string().contains("ends TLS"), "{error}"),
            Err(NotAdmitted::Yet(reason)) => panic!("may try again: {reason}"),
            Ok(_) => panic!("admitted"),
        }
    }
}
