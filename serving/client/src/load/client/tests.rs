//! Tests of the load client: all kinds of responses, from a server that speaks plain HTTP/2.
use std::collections::BTreeMap;
use std::net::SocketAddr;

use millrace_bundle::Signature;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::*;

/// Response of a server to a request.
#[derive(Debug, Clone, Copy)]
enum Answer {
    /// A message, followed by a status.
    Status(&'static str),
    /// Only a status.
    Alone(&'static str),
    /// A message without a status.
    Cut,
    /// An HTTP status without gRPC.
    Http(u16),
    Reset(h2::Reason),
    /// No response: the connection breaks.
    Breaks,
    /// No response on an open connection.
    Hangs,
}

/// Serves connections one after the other with their responses, until the client closes them; returns the heads of
/// all requests.
async fn serve(connections: Vec<Vec<Answer>>) -> (SocketAddr, JoinHandle<Vec<http::HeaderMap>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let serving = tokio::spawn(async move {
        let mut heads = Vec::new();
        for answers in connections {
            let (stream, _) = listener.accept().await.unwrap();
            let mut connection = h2::server::handshake(stream).await.unwrap();
            let mut hanging = Vec::new();
            let mut breaks = false;
            for answer in answers {
                let (request, mut respond) = connection.accept().await.unwrap().unwrap();
                heads.push(request.headers().clone());
                match answer {
                    Answer::Breaks => breaks = true,
                    Answer::Hangs => hanging.push(respond),
                    Answer::Reset(reason) => respond.send_reset(reason),
                    Answer::Alone(code) => drop(respond.send_response(head(200, Some(code)), true).unwrap()),
                    Answer::Http(status) => drop(respond.send_response(head(status, None), true).unwrap()),
                    Answer::Cut => send(&mut respond, None),
                    Answer::Status(code) => send(&mut respond, Some(code)),
                }
            }
            while !breaks && connection.accept().await.is_some() {}
        }
        heads
    });
    (address, serving)
}

fn head(status: u16, code: Option<&str>) -> http::Response<()> {
    let head = http::Response::builder().status(status);
    code.map(|code| ("grpc-status", code))
        .into_iter()
        .fold(head, |head, (name, value)| head.header(name, value))
        .body(())
        .unwrap()
}

fn send(respond: &mut h2::server::SendResponse<Bytes>, code: Option<&str>) {
    let mut body = respond.send_response(head(200, None), false).unwrap();
    body.send_data(Bytes::from_static(&[0; 5]), code.is_none()).unwrap();
    if code.is_some() {
        body.send_trailers(head(200, code).headers().clone()).unwrap();
    }
}

async fn connection(address: SocketAddr) -> Connection {
    let nothing = Signature { inputs: vec![], outputs: vec![] };
    let requests = Requests::generated("m", None, &nothing, 1, &BTreeMap::new(), 1).unwrap();
    let credentials = Credentials { token: Some("secret".into()), ..Credentials::default() };
    Connection::open(&address.to_string(), &credentials, &requests, 1).await.unwrap().remove(0)
}

#[tokio::test]
async fn every_answer_has_its_status() {
    let answers = [
        (Answer::Status("0"), Ok(())),
        (Answer::Status("8"), Err(Code::ResourceExhausted)),
        (Answer::Alone("5"), Err(Code::NotFound)),
        (Answer::Alone("nonsense"), Err(Code::Unknown)),
        (Answer::Cut, Err(Code::Unknown)),
        (Answer::Http(401), Err(Code::Unauthenticated)),
        (Answer::Http(503), Err(Code::Unavailable)),
        (Answer::Http(418), Err(Code::Unknown)),
        (Answer::Reset(h2::Reason::REFUSED_STREAM), Err(Code::Unavailable)),
        (Answer::Reset(h2::Reason::ENHANCE_YOUR_CALM), Err(Code::ResourceExhausted)),
        (Answer::Status("0"), Ok(())),
    ];
    let (address, serving) = serve(vec![answers.map(|(answer, _)| answer).to_vec()]).await;
    let mut connection = connection(address).await;
    for (answer, expected) in answers {
        assert_eq!(connection.call(0, None).await, expected, "{answer:?}");
    }
    drop(connection);
    for head in serving.await.unwrap() {
        let shown = ["authorization", "te", "content-type"].map(|name| head[name].to_str().unwrap());
        assert_eq!(shown, ["Bearer secret", "trailers", "application/grpc"]);
        assert!(!head.contains_key("grpc-timeout"));
    }
}

#[tokio::test]
async fn broken_connection_is_opened_again() {
    let (address, serving) = serve(vec![
        vec![Answer::Status("0"), Answer::Breaks],
        vec![Answer::Status("0"), Answer::Status("3")],
    ])
    .await;
    let mut connection = connection(address).await;
    let mut clone = connection.clone();
    assert_eq!(connection.call(0, None).await, Ok(()));
    assert_eq!(clone.call(0, None).await, Err(Code::Unavailable));
    assert_eq!(connection.call(0, None).await, Ok(()));
    assert_eq!(clone.call(0, None).await, Err(Code::InvalidArgument));
    drop((connection, clone));
    assert_eq!(serving.await.unwrap().len(), 4);
}

#[tokio::test]
async fn stopped_server_is_unavailable() {
    let (address, serving) = serve(vec![vec![Answer::Breaks]]).await;
    let mut connection = connection(address).await;
    for _ in 0..3 {
        assert_eq!(connection.call(0, None).await, Err(Code::Unavailable));
    }
    serving.await.unwrap();
}

#[tokio::test]
async fn timeout_is_sent_to_the_server() {
    let (address, serving) = serve(vec![vec![Answer::Hangs, Answer::Status("0")]]).await;
    let mut connection = connection(address).await;
    let time = Duration::from_millis(20);
    assert_eq!(connection.call(0, Some(time)).await, Err(Code::DeadlineExceeded));
    assert_eq!(connection.call(0, Some(Duration::from_secs(1000))).await, Ok(()));
    drop(connection);
    let told: Vec<_> = serving.await.unwrap().iter().map(|head| head["grpc-timeout"].clone()).collect();
    for (told, (most, unit)) in told.iter().zip([(20_000, 'u'), (1_000_000, 'm')]) {
        let left: u32 = told.to_str().unwrap().strip_suffix(unit).unwrap().parse().unwrap();
        assert!(left <= most && left > 0, "{told:?}");
    }
}

#[test]
fn times_have_eight_digits_at_most() {
    for (time, expected) in [
        (Duration::ZERO, "0u"),
        (Duration::from_nanos(1999), "1u"),
        (Duration::from_micros(99_999), "99999u"),
        (Duration::from_micros(199_900), "199m"),
        (Duration::from_secs(100), "100000m"),
        (Duration::MAX, "99999999m"),
    ] {
        assert_eq!(shown(time), expected);
    }
}
