//! Request dispatch of the broker: one file for each larger request, and the table of request versions that
//! the broker advertises and accepts.
//!
//! Versions stop before the flexible encodings and topic ids where clients do not need them. Every supported
//! client falls back, and fewer encodings mean less code that parses untrusted input.

mod fetch;
mod metadata;
mod offsets;
mod produce;
mod topics;

use bytes::{BufMut, Bytes, BytesMut};
use kafka_protocol::messages::api_versions_response::ApiVersion;
use kafka_protocol::messages::{
    ApiKey, ApiVersionsResponse, InitProducerIdRequest, InitProducerIdResponse, RequestHeader, ResponseHeader,
};
use kafka_protocol::protocol::{Decodable, Encodable};

use super::memory::MemoryReservation;
use super::{BrokerState, code, shape};

/// Request kinds, each with its first and last version.
pub(crate) const SPOKEN: &[(ApiKey, i16, i16)] = &[
    (ApiKey::Produce, 3, 8),
    (ApiKey::Fetch, 4, 11),
    (ApiKey::ListOffsets, 1, 5),
    (ApiKey::Metadata, 0, 8),
    (ApiKey::ApiVersions, 0, 3),
    (ApiKey::CreateTopics, 2, 4),
    (ApiKey::DeleteTopics, 1, 3),
    (ApiKey::InitProducerId, 0, 1),
];

/// The connection's action after a request.
pub(crate) enum Reply {
    /// Send this frame. `reservation` keeps its memory accounted for until it is sent.
    Frame { frame: Bytes, reservation: MemoryReservation },
    /// Send nothing: the client expects no response.
    Nothing,
    /// Close the connection; the reason is for the log.
    Close(String),
}

/// Header fields and connection of a request, for its handler.
pub(crate) struct Context<'a> {
    pub(crate) shared: &'a BrokerState,
    /// The address through which this client reached the broker.
    pub(crate) local: std::net::SocketAddr,
    version: i16,
    correlation_id: i32,
    key: ApiKey,
}

impl Context<'_> {
    fn reply<R: Encodable>(&self, response: &R) -> Reply {
        self.reply_holding(response, MemoryReservation::default())
    }

    fn reply_holding<R: Encodable>(&self, response: &R, reservation: MemoryReservation) -> Reply {
        match encode(self.key, self.version, self.correlation_id, response) {
            Ok(frame) => Reply::Frame { frame, reservation },
            Err(reason) => Reply::Close(reason),
        }
    }
}

/// A request whose header is read and whose shape is checked.
pub(crate) struct Opened {
    pub(crate) key: ApiKey,
    pub(crate) version: i16,
    correlation_id: i32,
}

/// Reason why a request is not opened.
pub(crate) enum Unopened {
    /// The broker does not speak this version of `ApiVersions`, whose answer lists those that it speaks.
    Versions { correlation_id: i32 },
    /// The request is malformed.
    Malformed(String),
}

/// Reads the header of a request frame (without its length prefix), and leaves the body in `frame`.
pub(crate) fn open(frame: &mut Bytes) -> Result<Opened, Unopened> {
    let malformed = |reason: String| Err(Unopened::Malformed(reason));
    let (Some(key), Some(version), Some(correlation)) = (
        frame.first_chunk::<2>(),
        frame.get(2..).and_then(<[u8]>::first_chunk::<2>),
        frame.get(4..).and_then(<[u8]>::first_chunk::<4>),
    ) else {
        return malformed("a request without a header".to_string());
    };
    let (key, version) = (i16::from_be_bytes(*key), i16::from_be_bytes(*version));
    let correlation_id = i32::from_be_bytes(*correlation);
    let spoken = SPOKEN.iter().find(|(spoken, ..)| *spoken as i16 == key);
    let key = match spoken {
        Some((key, low, high)) if (*low..=*high).contains(&version) => *key,
        // ApiVersions must be answered in any version: clients learn the supported versions from it.
        Some((ApiKey::ApiVersions, ..)) => return Err(Unopened::Versions { correlation_id }),
        Some((key, ..)) => {
            return malformed(format!("{key:?} in version {version}, which was not advertised"));
        }
        None => return malformed(format!("request kind {key}, which was not advertised")),
    };
    if let Err(error) = RequestHeader::decode(frame, key.request_header_version(version)) {
        return malformed(format!("malformed header of {key:?}: {error}"));
    }
    if let Err(reason) = shape::check(key, version, frame) {
        return malformed(format!("malformed {key:?} request: {reason}"));
    }
    Ok(Opened { key, version, correlation_id })
}

/// Answers one request frame (without its length prefix). `reservation` accounts for the frame's memory and is
/// released when the frame is no longer needed.
pub(crate) async fn answer(
    shared: &BrokerState,
    local: std::net::SocketAddr,
    mut frame: Bytes,
    reservation: MemoryReservation,
) -> Reply {
    let Opened { key, version, correlation_id } = match open(&mut frame) {
        Ok(opened) => opened,
        Err(Unopened::Versions { correlation_id }) => {
            return match encode(ApiKey::ApiVersions, 0, correlation_id, &versions(code::UNSUPPORTED_VERSION))
            {
                Ok(frame) => Reply::Frame { frame, reservation: MemoryReservation::default() },
                Err(reason) => Reply::Close(reason),
            };
        }
        Err(Unopened::Malformed(reason)) => return Reply::Close(reason),
    };
    let context = Context { shared, local, version, correlation_id, key };
    let malformed = |error: String| Reply::Close(format!("malformed {key:?} request: {error}"));
    macro_rules! handle {
        ($request:ident) => {
            match kafka_protocol::messages::$request::decode(&mut frame, version) {
                Ok(request) => request,
                Err(error) => return malformed(error.to_string()),
            }
        };
    }
    match key {
        ApiKey::ApiVersions => context.reply(&versions(code::NONE)),
        ApiKey::Metadata => metadata::answer(&context, handle!(MetadataRequest)),
        ApiKey::Produce => {
            let request = handle!(ProduceRequest);
            drop(frame);
            produce::answer(&context, request, reservation).await
        }
        ApiKey::Fetch => {
            let request = handle!(FetchRequest);
            drop(reservation);
            fetch::answer(&context, request).await
        }
        ApiKey::ListOffsets => offsets::answer(&context, handle!(ListOffsetsRequest)),
        ApiKey::CreateTopics => topics::create(&context, handle!(CreateTopicsRequest)),
        ApiKey::DeleteTopics => topics::delete(&context, handle!(DeleteTopicsRequest)),
        ApiKey::InitProducerId => producer_id(&context, handle!(InitProducerIdRequest)),
        _ => Reply::Close(format!("{key:?} has no handler")),
    }
}

fn encode<R: Encodable>(
    key: ApiKey,
    version: i16,
    correlation_id: i32,
    response: &R,
) -> Result<Bytes, String> {
    let header = ResponseHeader::default().with_correlation_id(correlation_id);
    let body_bytes = response.compute_size(version).map_err(|error| error.to_string())?;
    let mut frame = BytesMut::with_capacity(body_bytes + 16);
    frame.put_i32(0);
    header.encode(&mut frame, key.response_header_version(version)).map_err(|error| error.to_string())?;
    response
        .encode(&mut frame, version)
        .map_err(|error| format!("cannot encode a {key:?} answer: {error}"))?;
    let length = i32::try_from(frame.len() - 4).map_err(|_| "an answer beyond 2 GiB".to_string())?;
    frame[..4].copy_from_slice(&length.to_be_bytes());
    Ok(frame.freeze())
}

fn versions(error_code: i16) -> ApiVersionsResponse {
    let keys = SPOKEN.iter().map(|(key, low, high)| {
        ApiVersion::default().with_api_key(*key as i16).with_min_version(*low).with_max_version(*high)
    });
    ApiVersionsResponse::default().with_error_code(error_code).with_api_keys(keys.collect())
}

fn producer_id(context: &Context<'_>, request: InitProducerIdRequest) -> Reply {
    let response = InitProducerIdResponse::default();
    if request.transactional_id.is_some() {
        // Transactional clients first ask for a coordinator and stop without one, so this request is an
        // anomaly.
        return context.reply(
            &response
                .with_error_code(code::INVALID_REQUEST)
                .with_producer_id((-1).into())
                .with_producer_epoch(-1),
        );
    }
    let id = tokio::task::block_in_place(|| context.shared.store.new_producer_id());
    context.reply(&match id {
        Ok(id) => response.with_producer_id(id.into()).with_producer_epoch(0),
        Err(refused) => {
            response.with_error_code(refused.code).with_producer_id((-1).into()).with_producer_epoch(-1)
        }
    })
}
