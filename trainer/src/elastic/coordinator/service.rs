//! The gRPC service that admits workers, and the port for those of other machines.
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::Duration;

use futures::Stream;
use subtle::ConstantTimeEq as _;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use super::{Event, to_worker_message};
use crate::config::Config;
use crate::elastic::joining::{coordinator_proof, is_worker_proof};
use crate::elastic::listener::{self, Contact, Peer};
use crate::elastic::membership::MemberId;
use crate::elastic::proto::coordinator_server::{Coordinator as Service, CoordinatorServer};
use crate::elastic::proto::{self, from_worker, to_worker};
use crate::error::{Error, Result};
use crate::join::{self, Listen, PROTOCOL, ServerTls, Token};
use crate::proof::{NONCE_BYTES, nonce};

/// Deadline for the first message of a connection.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Largest message from a worker of another machine; none of them has long parts.
const MESSAGE_BYTES_MAX: usize = 256 << 10;
/// Streams per connection of a worker of another machine; it needs one.
const STREAMS_MAX: u32 = 4;
/// Longest ring address or host name that a worker may have.
const NAME_BYTES_MAX: usize = 300;
/// Messages queued for one worker. A worker that lets more accumulate counts as lost.
const OUTBOX_MAX: usize = 256;

/// Listens for workers of other machines until `shutdown`; returns the address.
pub(crate) async fn admit(
    listen: &Listen,
    service: CoordinatorService,
    config: &Config,
    shutdown: CancellationToken,
) -> Result<SocketAddr> {
    let what = || format!("listen on {} for workers of other machines", listen.address);
    let listener = TcpListener::bind(listen.address).await.map_err(|e| Error::io(what(), e))?;
    let address = listener.local_addr().map_err(|e| Error::io(what(), e))?;
    let tls = listen.tls.clone().map_or_else(ServerTls::own, Ok)?;
    let half = config.heartbeat_lost() / 2;
    let server = tonic::transport::Server::builder()
        .http2_keepalive_interval(Some(half))
        .http2_keepalive_timeout(Some(half))
        .max_concurrent_streams(STREAMS_MAX)
        .add_service(CoordinatorServer::new(service).max_decoding_message_size(MESSAGE_BYTES_MAX))
        .serve_with_incoming_shutdown(
            listener::accept(listener, tls, listener::PROOF_TIMEOUT),
            shutdown.cancelled_owned(),
        );
    tokio::spawn(async move {
        if let Err(error) = server.await {
            tracing::error!(%address, %error, "the port for workers of other machines failed");
        }
    });
    Ok(address)
}

/// Which workers a port admits.
#[derive(Clone)]
pub(crate) enum Admission {
    /// Those that the coordinator launched; the token reached them in their environment.
    Launched { token: String },
    /// Those of other machines; the token is never sent. One that does not answer for `silence_max` is lost.
    Joining { token: Token, silence_max: Duration },
}

/// The gRPC service that admits workers with the right token.
pub(crate) struct CoordinatorService {
    pub(crate) admission: Admission,
    pub(crate) events: mpsc::Sender<Event>,
}

pub(super) type Outbox = mpsc::Sender<Result<proto::ToWorker, Status>>;

pub(super) fn gone() -> Status {
    Status::unavailable("the job is over")
}

#[tonic::async_trait]
impl Service for CoordinatorService {
    type SessionStream = Pin<Box<dyn Stream<Item = Result<proto::ToWorker, Status>> + Send>>;

    async fn session(
        &self,
        request: Request<Streaming<proto::FromWorker>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let peer = request.extensions().get::<Peer>().cloned();
        let mut messages = request.into_inner();
        let first = tokio::time::timeout(HELLO_TIMEOUT, messages.message())
            .await
            .map_err(|_| Status::deadline_exceeded("no greeting"))??;
        let Some(from_worker::Message::Hello(hello)) = first.and_then(|first| first.message) else {
            return Err(Status::invalid_argument("the first message must be a greeting"));
        };
        let (outbox, outgoing) = mpsc::channel(OUTBOX_MAX);
        let events = self.events.clone();
        match &self.admission {
            Admission::Launched { token } => {
                if !bool::from(hello.token.as_bytes().ct_eq(token.as_bytes())) {
                    return Err(Status::permission_denied("wrong token"));
                }
                let (reply, answer) = oneshot::channel();
                events.send(Event::Joined { hello, outbox, reply }).await.map_err(|_| gone())?;
                let member = answer.await.map_err(|_| gone())?.map_err(Status::failed_precondition)?;
                tokio::spawn(relay(member, messages, events, None));
            }
            Admission::Joining { token, silence_max } => {
                // The worker reads the challenge from the reply, so the reply begins before the proof.
                let (token, silence_max) = (token.clone(), *silence_max);
                let peer = peer.ok_or_else(|| Status::internal("the connection has no TLS"))?;
                tokio::spawn(async move {
                    let refuse = outbox.clone();
                    match challenge(&token, hello, &mut messages, outbox, &peer, &events).await {
                        Ok(member) => {
                            // The stream closes when the coordinator drops its end.
                            drop(refuse);
                            relay(member, messages, events, Some((peer.contact, silence_max))).await;
                        }
                        Err(status) => {
                            tracing::warn!(reason = status.message(), "a worker was not admitted");
                            let _ = refuse.send(Err(status)).await;
                        }
                    }
                });
            }
        }
        Ok(Response::new(Box::pin(ReceiverStream::new(outgoing))))
    }
}

/// Why a connection has ended that the own side has closed, as the peer is suspended or cut off.
fn unanswered(contact: &Contact, limit: Duration) -> Option<String> {
    let silence = contact.silence();
    // The peer was asked for a sign of life after half of the limit, and had as long to answer.
    (silence >= limit / 2).then(|| {
        format!(
            "did not answer for {} ms (heartbeat_lost_ms = {}): it is suspended, or the network is down",
            silence.as_millis(),
            limit.as_millis()
        )
    })
}

/// Lets a worker of another machine prove the token, and makes it a member.
pub(super) async fn challenge(
    token: &Token,
    hello: proto::Hello,
    messages: &mut Streaming<proto::FromWorker>,
    outbox: Outbox,
    peer: &Peer,
    events: &mpsc::Sender<Event>,
) -> Result<MemberId, Status> {
    let Some(join) = &hello.join else {
        return Err(Status::invalid_argument("this port is for workers that join with --join"));
    };
    if join.protocol != PROTOCOL {
        return Err(Status::failed_precondition(format!(
            "the coordinator is millrace {} with protocol {PROTOCOL}, this is millrace {:.20} with protocol {}: install \
             the same version on both machines",
            env!("CARGO_PKG_VERSION"),
            join.version,
            join.protocol
        )));
    }
    if join.nonce.len() != NONCE_BYTES || hello.ring_address.len() > NAME_BYTES_MAX {
        return Err(Status::invalid_argument("the greeting is not one of a millrace worker"));
    }
    let own = nonce().map_err(|error| Status::internal(error.one_line()))?;
    let asked = to_worker::Message::Challenge(proto::Challenge {
        protocol: PROTOCOL,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        nonce: own.to_vec(),
        proof: coordinator_proof(token, &peer.binding, &join.nonce, &own),
    });
    outbox.send(Ok(to_worker_message(asked))).await.map_err(|_| gone())?;
    let answer = tokio::time::timeout(HELLO_TIMEOUT, messages.message())
        .await
        .map_err(|_| Status::deadline_exceeded("no proof of the token"))??;
    let proof = match answer.and_then(|answer| answer.message) {
        Some(from_worker::Message::Proof(proof)) => proof.proof,
        _ => return Err(Status::invalid_argument("no proof of the token")),
    };
    if !is_worker_proof(token, &peer.binding, (&join.nonce, &own), &hello.ring_address, &proof) {
        return Err(Status::permission_denied(
            "the worker has another token than the coordinator (copy the coordinator's token file), or a proxy between \
             them ends TLS",
        ));
    }
    peer.standing.prove();
    if !join::has_port(&hello.ring_address) {
        return Err(Status::invalid_argument("the worker's ring address is not HOST:PORT"));
    }
    // Other workers have to find this one. A name server that does not know it may do so soon.
    join::resolve("--advertise", &hello.ring_address).await.map_err(|error| {
        Status::unavailable(format!("the coordinator's machine does not find the worker: {error}"))
    })?;
    let host: String = join.host.chars().filter(|c| !c.is_control()).take(NAME_BYTES_MAX).collect();
    let (reply, admitted) = oneshot::channel();
    events.send(Event::Admitted { hello, host, outbox, reply }).await.map_err(|_| gone())?;
    admitted.await.map_err(|_| gone())?.ok_or_else(|| {
        Status::resource_exhausted("the job has all the workers that it may have (workers_max)")
    })
}

/// Hands a member's messages to the coordinator until its stream ends. `contact` tells of a connection that is closed
/// after a silence.
pub(super) async fn relay(
    member: MemberId,
    mut messages: Streaming<proto::FromWorker>,
    events: mpsc::Sender<Event>,
    contact: Option<(Contact, Duration)>,
) {
    let reason = loop {
        match messages.next().await {
            Some(Ok(proto::FromWorker { message: Some(message) })) => {
                if events.send(Event::Message { member, message }).await.is_err() {
                    return;
                }
            }
            Some(Ok(proto::FromWorker { message: None })) => break "sent an unknown message".to_owned(),
            Some(Err(status)) => break format!("lost its connection ({})", status.message()),
            None => break "closed its connection".to_owned(),
        }
    };
    let reason = contact.and_then(|(contact, limit)| unanswered(&contact, limit)).unwrap_or(reason);
    // Once the job is over, the inbox is closed.
    let _ = events.send(Event::Disconnected { member, reason }).await;
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;
    use crate::elastic::joining::tests_support::connect;
    use crate::elastic::proto::coordinator_client::CoordinatorClient;
    use crate::join::tls::Binding;
    use crate::proof::prove;

    fn joining(token: &Token, config: &Config) -> Admission {
        Admission::Joining { token: token.clone(), silence_max: config.heartbeat_lost() }
    }

    /// A worker that was admitted is suspended, or closes its connection: the reason that the coordinator is told.
    async fn reason_of_the_end(is_suspended: bool) -> String {
        let listen = Listen {
            address: "127.0.0.1:0".parse().unwrap(),
            advertise: None,
            token: Token::of("0123456789abcdef"),
            tls: None,
            workers_local: Some(0),
        };
        let config = Config { heartbeat_lost_ms: 1_000, ..Config::default() };
        let (events, mut inbox) = mpsc::channel(8);
        let service = CoordinatorService { admission: joining(&listen.token, &config), events };
        let shutdown = CancellationToken::new();
        let _stop = shutdown.clone().drop_guard();
        let address = admit(&listen, service, &config, shutdown).await.unwrap();
        // What is between the two passes nothing on from then on, and keeps the connections.
        let between = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let place = between.local_addr().unwrap();
        let suspend = CancellationToken::new();
        let suspended = suspend.clone();
        tokio::spawn(async move {
            let (mut of_worker, _) = between.accept().await.unwrap();
            let mut of_coordinator = tokio::net::TcpStream::connect(address).await.unwrap();
            let copied = tokio::io::copy_bidirectional(&mut of_worker, &mut of_coordinator);
            if suspended.run_until_cancelled(copied).await.is_none() {
                std::future::pending::<()>().await;
            }
        });
        let (channel, binding) = connect(place, &listen.token).await;
        let mut client = CoordinatorClient::new(channel);
        let (outgoing, messages) = mpsc::channel(8);
        let send = |message| outgoing.try_send(proto::FromWorker { message: Some(message) }).unwrap();
        send(from_worker::Message::Hello(hello(PROTOCOL)));
        let mut answers = client.session(ReceiverStream::new(messages)).await.unwrap().into_inner();
        let Some(to_worker::Message::Challenge(challenge)) =
            answers.message().await.unwrap().and_then(|answer| answer.message)
        else {
            panic!("no challenge")
        };
        let parts: [&[u8]; 4] = [&binding, &[3; NONCE_BYTES], &challenge.nonce, b"127.0.0.1:1"];
        let proof = prove(b"0123456789abcdef", "millrace worker", &parts).to_vec();
        send(from_worker::Message::Proof(proto::Proof { proof }));
        let Some(Event::Admitted { reply, outbox: _outbox, .. }) = inbox.recv().await else {
            panic!("not admitted")
        };
        reply.send(Some(1)).unwrap();
        if is_suspended {
            suspend.cancel();
        } else {
            drop((outgoing, answers, client));
        }
        match inbox.recv().await {
            Some(Event::Disconnected { member: 1, reason }) => reason,
            _ => panic!("no end"),
        }
    }

    #[tokio::test]
    async fn a_suspended_worker_is_told_from_one_that_closes_its_connection() {
        let reason = reason_of_the_end(true).await;
        assert!(reason.contains("did not answer for") && reason.contains("= 1000"), "{reason}");
        let reason = reason_of_the_end(false).await;
        assert!(reason.contains("its connection"), "{reason}");
    }

    /// What a worker says, and the coordinator's last answer to it.
    async fn told(hello: proto::Hello, proof: impl Fn(&Binding, &proto::Challenge) -> Vec<u8>) -> Status {
        let listen = Listen {
            address: "127.0.0.1:0".parse().unwrap(),
            advertise: None,
            token: Token::of("0123456789abcdef"),
            tls: None,
            workers_local: Some(0),
        };
        let (events, _inbox) = mpsc::channel(8);
        let service = CoordinatorService { admission: joining(&listen.token, &Config::default()), events };
        let shutdown = CancellationToken::new();
        let _stop = shutdown.clone().drop_guard();
        let address = admit(&listen, service, &Config::default(), shutdown).await.unwrap();
        let (channel, binding) = connect(address, &listen.token).await;
        let mut client = CoordinatorClient::new(channel);
        let (outgoing, messages) = mpsc::channel(8);
        let send = |message| outgoing.try_send(proto::FromWorker { message: Some(message) }).unwrap();
        send(from_worker::Message::Hello(hello));
        let mut answers = match client.session(ReceiverStream::new(messages)).await {
            Ok(answers) => answers.into_inner(),
            Err(status) => return status,
        };
        loop {
            match answers.message().await {
                Ok(Some(proto::ToWorker { message: Some(to_worker::Message::Challenge(challenge)) })) => {
                    let proof = proof(&binding, &challenge);
                    send(from_worker::Message::Proof(proto::Proof { proof }));
                }
                Ok(other) => panic!("admitted with {other:?}"),
                Err(status) => return status,
            }
        }
    }

    fn hello(protocol: u32) -> proto::Hello {
        let join =
            proto::Join { protocol, version: "9.9.9".into(), host: "b".into(), nonce: vec![3; NONCE_BYTES] };
        proto::Hello { ring_address: "127.0.0.1:1".into(), join: Some(join), ..Default::default() }
    }

    #[tokio::test]
    async fn workers_without_the_protocol_or_the_token_are_refused() {
        let no_proof = |_: &Binding, _: &proto::Challenge| Vec::new();
        let status = told(hello(PROTOCOL + 1), no_proof).await;
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert!(status.message().contains("9.9.9") && status.message().contains("same version"), "{status}");
        // A worker of this machine, which came to the wrong port.
        let status = told(proto::Hello::default(), no_proof).await;
        assert_eq!(status.code(), Code::InvalidArgument);
        let status = told(hello(PROTOCOL), no_proof).await;
        assert_eq!(status.code(), Code::PermissionDenied);
        // The coordinator's own proof, sent back.
        let status = told(hello(PROTOCOL), |_, challenge| challenge.proof.clone()).await;
        assert_eq!(status.code(), Code::PermissionDenied);
        // The right token for another ring address.
        let elsewhere = |binding: &Binding, challenge: &proto::Challenge| {
            let parts: [&[u8]; 4] = [binding, &[3; NONCE_BYTES], &challenge.nonce, b"10.0.0.9:1"];
            prove(b"0123456789abcdef", "millrace worker", &parts).to_vec()
        };
        assert_eq!(told(hello(PROTOCOL), elsewhere).await.code(), Code::PermissionDenied);
        // The right token on another connection.
        let replayed = |_: &Binding, challenge: &proto::Challenge| {
            let parts: [&[u8]; 4] = [&[0; 32], &[3; NONCE_BYTES], &challenge.nonce, b"127.0.0.1:1"];
            prove(b"0123456789abcdef", "millrace worker", &parts).to_vec()
        };
        assert_eq!(told(hello(PROTOCOL), replayed).await.code(), Code::PermissionDenied);
    }

    #[tokio::test]
    async fn a_worker_that_others_do_not_find_may_come_again() {
        let told_of = async |address: &str| {
            let greeting = proto::Hello { ring_address: address.to_owned(), ..hello(PROTOCOL) };
            let proof = |binding: &Binding, challenge: &proto::Challenge| {
                let parts: [&[u8]; 4] = [binding, &[3; NONCE_BYTES], &challenge.nonce, address.as_bytes()];
                prove(b"0123456789abcdef", "millrace worker", &parts).to_vec()
            };
            told(greeting, proof).await
        };
        // As of a name server that does not answer for a moment.
        let status = told_of("no.such.invalid:1").await;
        assert_eq!(status.code(), Code::Unavailable);
        assert!(status.message().contains("no.such.invalid:1"), "{status}");
        for never in ["no.such.invalid", ":1", "a:b"] {
            assert_eq!(told_of(never).await.code(), Code::InvalidArgument, "{never}");
        }
    }
}
