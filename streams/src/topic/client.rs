//! Shared client code of producers, consumers and admin calls: librdkafka settings, log capture, and error
//! translation.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_datafs::Secret;
use millrace_leaf::blocking::{self, Stopping};
use parking_lot::Mutex;
use rdkafka::ClientContext;
use rdkafka::client::Client;
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::consumer::ConsumerContext;
use rdkafka::error::KafkaError;
use rdkafka::types::RDKafkaErrorCode as Code;

use crate::config::KafkaConfig;
use crate::error::{Error, Result};

/// How long a call waits for brokers to answer before it gives up.
pub(crate) const ANSWER_WAIT: Duration = Duration::from_secs(10);

/// Facilities of librdkafka's log lines that tell why a broker refused records or a producer id.
const REFUSALS: [&str; 2] = ["BROKERUA", "GETPID"];
/// librdkafka's text for the protocol's KAFKA_STORAGE_ERROR.
const DISK_ERROR: &str = "Disk error when trying to access log file on disk";

/// Callback context of a client: it forwards librdkafka's log and keeps the last errors for error messages.
#[derive(Debug, Default, Clone)]
pub(crate) struct Context {
    last_error: Arc<Mutex<Option<String>>>,
    disk_error: Arc<Mutex<Option<String>>>,
}

impl Context {
    /// The last connection error, or a stand-in.
    pub(crate) fn reason(&self) -> String {
        self.last_error.lock().clone().unwrap_or_else(|| "no connection".to_string())
    }

    /// The disk failure that a broker reported since the last [`Context::delivered`], if any.
    pub(crate) fn disk_error(&self) -> Option<String> {
        self.disk_error.lock().clone()
    }

    /// Clears the disk failure, since a broker accepted a record.
    pub(crate) fn delivered(&self) {
        let mut disk_error = self.disk_error.lock();
        if disk_error.is_some() {
            *disk_error = None;
        }
    }
}

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        // The failing call reports a connection error once, with the remedy. librdkafka repeats it every few
        // seconds, so its lines are logged at debug level.
        if facility == "FAIL" {
            *self.last_error.lock() = Some(plain(message));
        }
        // A record that is retried ends with a time-out that names no cause, so the cause is taken from here.
        if REFUSALS.contains(&facility) && message.contains(DISK_ERROR) {
            *self.disk_error.lock() = Some(DISK_ERROR.to_string());
        }
        match level {
            RDKafkaLogLevel::Emerg | RDKafkaLogLevel::Alert | RDKafkaLogLevel::Critical => {
                tracing::error!(target: "librdkafka", facility, "{message}");
            }
            _ => tracing::debug!(target: "librdkafka", facility, "{message}"),
        }
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(target: "librdkafka", error = %error, "{reason}");
        if error.rdkafka_error_code() != Some(Code::AllBrokersDown) || self.last_error.lock().is_none() {
            *self.last_error.lock() = Some(plain(reason));
        }
    }
}

impl ConsumerContext for Context {}

/// librdkafka's text without its thread prefix and trailing timing notes.
fn plain(reason: &str) -> String {
    let text = reason.rsplit_once("]: ").map_or(reason, |(_, text)| text);
    text.split(" (after ").next().unwrap_or(text).to_string()
}

/// The value of one of the user's properties.
pub(crate) fn property(key: &str, value: &Secret) -> Result<String> {
    let value = value.text(&format!("[streams.properties] {key}"));
    value.map_err(|error| Error::Config { reason: error.to_string() })
}

/// The properties of `[streams.properties]` that librdkafka does not know, whose values it refuses, or whose files and
/// variables cannot be read: the key and the reason, without the value.
#[must_use]
pub fn wrong_properties(properties: &BTreeMap<String, Secret>) -> Vec<(String, String)> {
    let mut wrong = Vec::new();
    for (key, secret) in properties {
        let reason = match property(key, secret) {
            Ok(value) => match ClientConfig::new().set(key, value).create_native_config() {
                Ok(_) => continue,
                Err(KafkaError::ClientConfig(_, reason, ..)) => Secret::hide_in([secret], reason),
                Err(error) => Secret::hide_in([secret], error.to_string()),
            },
            Err(error) => error.to_string(),
        };
        wrong.push((key.clone(), reason));
    }
    wrong
}

/// Settings in rising precedence: `defaults`, the user's properties, `fixed`.
pub(crate) fn client_config(
    kafka: &KafkaConfig,
    defaults: &[(&str, &str)],
    fixed: &[(&str, &str)],
) -> Result<ClientConfig> {
    if kafka.bootstrap_servers.trim().is_empty() || kafka.bootstrap_servers == crate::config::EMBEDDED {
        return Err(Error::Config {
            reason: format!("bootstrap_servers is {:?} where host:port is needed", kafka.bootstrap_servers),
        });
    }
    let mut properties = Vec::with_capacity(kafka.properties.len());
    for (key, value) in &kafka.properties {
        properties.push((key.as_str(), property(key, value)?));
    }
    let mut settings: BTreeMap<&str, &str> = BTreeMap::new();
    settings.insert("client.id", "millrace");
    settings.insert("log.connection.close", "false");
    settings.extend(defaults.iter().copied());
    settings.extend(properties.iter().map(|(key, value)| (*key, value.as_str())));
    settings.extend(fixed.iter().copied());
    settings.insert("bootstrap.servers", &kafka.bootstrap_servers);
    let mut config = ClientConfig::new();
    for (key, value) in settings {
        config.set(key, value);
    }
    config.set_log_level(RDKafkaLogLevel::Info);
    Ok(config)
}

/// The code inside an error, including that of an admin call.
pub(crate) fn code_of(error: &KafkaError) -> Option<Code> {
    match error {
        KafkaError::AdminOp(code) => Some(*code),
        _ => error.rdkafka_error_code(),
    }
}

/// Translates a client library error met while doing `action`.
pub(crate) fn translate(
    kafka: &KafkaConfig,
    context: &Context,
    action: &str,
    waited: Duration,
    source: KafkaError,
) -> Error {
    // librdkafka's messages repeat the refused values, which may be secrets.
    let hide = |reason: &str| Secret::hide_in(kafka.properties.values(), reason.to_owned());
    match (&source, code_of(&source)) {
        (KafkaError::ClientConfig(_, reason, key, _), _) => {
            Error::Config { reason: format!("property {key}: {}", hide(reason)) }
        }
        (KafkaError::ClientCreation(reason), _) => Error::Config { reason: hide(reason) },
        (
            _,
            Some(
                Code::BrokerTransportFailure | Code::AllBrokersDown | Code::OperationTimedOut | Code::Resolve,
            ),
        ) => Error::Unreachable {
            bootstrap_servers: kafka.bootstrap_servers.clone(),
            waited_ms: waited.as_millis() as u64,
            reason: context.reason(),
        },
        (_, Some(Code::KafkaStorageError)) => Error::BrokerDisk {
            action: action.to_string(),
            bootstrap_servers: kafka.bootstrap_servers.clone(),
            reason: DISK_ERROR.to_string(),
        },
        _ => Error::Client {
            action: action.to_string(),
            bootstrap_servers: kafka.bootstrap_servers.clone(),
            source: Box::new(source),
        },
    }
}

/// Partition counts of all topics, or of one; a topic that does not exist is absent.
///
/// Blocks up to [`ANSWER_WAIT`].
pub(crate) fn partitions<C: ClientContext>(
    kafka: &KafkaConfig,
    context: &Context,
    client: &Client<C>,
    topic: Option<&str>,
) -> Result<BTreeMap<String, i32>> {
    let started = Instant::now();
    let metadata = client
        .fetch_metadata(topic, ANSWER_WAIT)
        .map_err(|error| translate(kafka, context, "read topic metadata", started.elapsed(), error))?;
    Ok(metadata
        .topics()
        .iter()
        .filter(|topic| topic.error().is_none())
        .map(|topic| (topic.name().to_string(), topic.partitions().len() as i32))
        .collect())
}

/// Takes the waiting log lines of a client that no other code polls, so that an error can name the cause.
/// Only for clients without an assignment: with one, a record would be lost.
pub(crate) fn poll_log(client: &rdkafka::consumer::BaseConsumer<Context>) {
    // A poll without a wait does not tell whether it met an event, so the loop cannot stop at the last one.
    for _ in 0..64 {
        drop(client.poll(Duration::ZERO));
    }
}

/// Runs a blocking librdkafka call away from the async threads.
pub(crate) async fn blocking<T: Send + 'static>(
    call: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    blocking::run(call).await.unwrap_or_else(|Stopping| Err(Error::Closed { what: "runtime" }))
}
