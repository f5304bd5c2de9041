//! Error codes of the Kafka protocol that this broker answers with.

pub(crate) const UNKNOWN_SERVER_ERROR: i16 = -1;
pub(crate) const NONE: i16 = 0;
pub(crate) const OFFSET_OUT_OF_RANGE: i16 = 1;
pub(crate) const CORRUPT_MESSAGE: i16 = 2;
pub(crate) const UNKNOWN_TOPIC_OR_PARTITION: i16 = 3;
pub(crate) const MESSAGE_TOO_LARGE: i16 = 10;
pub(crate) const INVALID_TOPIC: i16 = 17;
pub(crate) const INVALID_REQUIRED_ACKS: i16 = 21;
pub(crate) const UNSUPPORTED_VERSION: i16 = 35;
pub(crate) const TOPIC_ALREADY_EXISTS: i16 = 36;
pub(crate) const INVALID_PARTITIONS: i16 = 37;
pub(crate) const INVALID_REPLICATION_FACTOR: i16 = 38;
pub(crate) const INVALID_REPLICA_ASSIGNMENT: i16 = 39;
pub(crate) const INVALID_CONFIG: i16 = 40;
pub(crate) const INVALID_REQUEST: i16 = 42;
pub(crate) const UNSUPPORTED_FOR_MESSAGE_FORMAT: i16 = 43;
pub(crate) const POLICY_VIOLATION: i16 = 44;
pub(crate) const OUT_OF_ORDER_SEQUENCE_NUMBER: i16 = 45;
pub(crate) const DUPLICATE_SEQUENCE_NUMBER: i16 = 46;
pub(crate) const INVALID_PRODUCER_EPOCH: i16 = 47;
pub(crate) const KAFKA_STORAGE_ERROR: i16 = 56;
pub(crate) const UNKNOWN_PRODUCER_ID: i16 = 59;
pub(crate) const FETCH_SESSION_ID_NOT_FOUND: i16 = 70;
pub(crate) const UNKNOWN_LEADER_EPOCH: i16 = 75;
pub(crate) const UNSUPPORTED_COMPRESSION_TYPE: i16 = 76;
pub(crate) const INVALID_RECORD: i16 = 87;
