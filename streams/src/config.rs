//! The `[streams]` table of `millrace.toml`: brokers and client properties, the embedded broker, declared
//! topics.

use std::collections::BTreeMap;
use std::path::Path;

use millrace_datafs::Secret;
use millrace_leaf::discovery;
use serde::{Deserialize, Serialize};

use crate::broker;
use crate::error::{Error, Result};

/// The value of [`Config::bootstrap_servers`] that means "the broker inside this home".
pub const EMBEDDED: &str = "embedded";

/// Properties of TLS and SASL whose values may be shown. All others of both groups are taken for secrets. The chart's
/// `values.schema.json` has the same list.
pub const PUBLIC_SECURITY_PROPERTIES: [&str; 16] = [
    "sasl.kerberos.principal",
    "sasl.kerberos.service.name",
    "sasl.mechanism",
    "sasl.mechanisms",
    "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.method",
    "sasl.oauthbearer.scope",
    "sasl.username",
    "ssl.ca.location",
    "ssl.certificate.location",
    "ssl.cipher.suites",
    "ssl.crl.location",
    "ssl.curves.list",
    "ssl.endpoint.identification.algorithm",
    "ssl.key.location",
    "ssl.sigalgs.list",
];
/// Words in the names of secrets outside these groups.
const SECRET_WORDS: [&str; 6] = ["password", "passphrase", "secret", "token", "credential", "pem"];

/// Whether the value of this property of librdkafka may be shown in a manifest.
pub fn is_public_property(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    if name.starts_with("sasl.") || name.starts_with("ssl.") {
        return PUBLIC_SECURITY_PROPERTIES.contains(&name.as_str());
    }
    !SECRET_WORDS.iter().any(|word| name.contains(word))
}

/// The `[streams]` table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// `host:port` list of a Kafka cluster separated by commas, where `dnssrv+NAME` stands for the SRV records of
    /// that name, or `"embedded"` for the broker of this home, which `millrace up` and `millrace broker` start.
    pub bootstrap_servers: String,
    /// librdkafka properties for every producer and consumer, for example `security.protocol`. They override
    /// the defaults of this crate, except for the properties that its guarantees need (`enable.idempotence`,
    /// `acks`, `enable.auto.commit`, `enable.auto.offset.store`). A password can come from a file or the
    /// environment: `"sasl.password" = { file = "PATH" }` or `{ env = "NAME" }`.
    pub properties: BTreeMap<String, Secret>,
    /// The embedded broker; ignored when `bootstrap_servers` names a cluster.
    pub broker: broker::Config,
    /// Topics that must exist. Missing ones are created at start; existing ones are never changed.
    pub topics: Vec<TopicConfig>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            bootstrap_servers: EMBEDDED.to_string(),
            properties: BTreeMap::new(),
            broker: broker::Config::default(),
            topics: Vec::new(),
        }
    }
}

impl Config {
    /// A copy for display, with the values of properties hidden: they may be secrets.
    #[must_use]
    pub fn without_secrets(&self) -> Config {
        let hide = |(key, value): (&String, &Secret)| (key.clone(), value.hidden());
        Config { properties: self.properties.iter().map(hide).collect(), ..self.clone() }
    }

    /// Whether topics live in the broker of this home.
    pub fn is_embedded(&self) -> bool {
        self.bootstrap_servers == EMBEDDED
    }

    /// The brokers to connect to. `"embedded"` becomes the address of the broker that holds `home` now, or
    /// else the configured address.
    ///
    /// SRV records are looked up at each call, for at most five seconds.
    ///
    /// # Errors
    /// [`Error::NotRunning`] when no broker holds the home and its configured port is 0, so that
    /// no address can be known. [`Error::Discovery`] for SRV records that cannot be looked up.
    pub fn kafka(&self, home: &Path) -> Result<KafkaConfig> {
        let bootstrap_servers = if !self.is_embedded() {
            discovery::servers_of_list(&self.bootstrap_servers)
                .map_err(|source| Error::Discovery { source })?
        } else {
            let dir = broker::dir(home);
            match broker::running_address(&dir) {
                Some(address) => address.to_string(),
                None if self.broker.listen.port() != 0 => {
                    let mut address = self.broker.listen;
                    if address.ip().is_unspecified() {
                        address.set_ip(std::net::Ipv4Addr::LOCALHOST.into());
                    }
                    address.to_string()
                }
                None => return Err(Error::NotRunning { dir }),
            }
        };
        Ok(KafkaConfig { bootstrap_servers, properties: self.properties.clone() })
    }
}

/// One topic that must exist.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TopicConfig {
    /// Topic name.
    pub name: String,
    /// Number of partitions, at least 1; used when the topic is created.
    #[serde(default = "one")]
    pub partitions: i32,
}

fn one() -> i32 {
    1
}

/// Connection settings of a client: the brokers and the librdkafka properties.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KafkaConfig {
    /// `host:port` list separated by commas; never `"embedded"`.
    pub bootstrap_servers: String,
    /// librdkafka properties, see [`Config::properties`].
    pub properties: BTreeMap<String, Secret>,
}

impl KafkaConfig {
    /// Brokers without further properties.
    pub fn new(bootstrap_servers: impl Into<String>) -> Self {
        Self { bootstrap_servers: bootstrap_servers.into(), properties: BTreeMap::new() }
    }
}
