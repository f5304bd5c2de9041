//! Configuration: the tables of all crates, as `millrace_home::settings` reads them. Each crate defines its table; this
//! file combines them.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::Result;
use millrace_datafs::{Name, VolumeSpec};
use millrace_leaf::discovery;
use millrace_serving::Tls;
use millrace_streams::dataset::DatasetSpec;
use millrace_streams::feed::flight::Limits;
use millrace_trainer::launch;
use serde::{Deserialize, Serialize};

/// All tables of millrace.toml.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Settings {
    /// Volumes: metadata engine, object store.
    pub(crate) datafs: millrace_datafs::Config,
    /// Topics and the embedded broker.
    pub(crate) streams: millrace_streams::Config,
    /// Ingest of topics into volumes.
    pub(crate) ingest: millrace_ingest::Config,
    /// Training defaults.
    pub(crate) trainer: millrace_trainer::Config,
    /// The model server and its pipes.
    pub(crate) serving: millrace_serving::Config,
    /// The feed over Arrow Flight, `millrace feed serve`.
    pub(crate) feed: FeedConfig,
    /// The parts that `millrace up` runs in addition to those of the other tables.
    pub(crate) up: UpConfig,
    /// Addresses of the services that commands of this machine use, and how they are found.
    pub(crate) cluster: ClusterConfig,
}

impl Settings {
    /// The settings without the values of secrets, for display.
    pub(crate) fn without_secrets(self) -> Settings {
        Settings {
            datafs: self.datafs.without_secrets(),
            streams: self.streams.without_secrets(),
            serving: self.serving.without_secrets(),
            ..self
        }
    }
}

/// The table `[feed]`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct FeedConfig {
    /// Address of the Flight service; port 0 selects a free port.
    pub(crate) grpc: SocketAddr,
    /// Address of the Prometheus metrics, at `/metrics`; without it the server serves none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) metrics: Option<SocketAddr>,
    /// Volumes, or snapshots of them, that clients may read whole.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) volumes: Vec<VolumeSpec>,
    /// Folders that clients may read, such as `digits:/train` at all snapshots or `digits@v1:/train` at one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) datasets: Vec<DatasetSpec>,
    /// URI under which clients reach this server, such as `grpc+tls://feed-1.example.org:8815`. When absent: its
    /// address, unless that stands for all addresses of the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) advertise: Option<String>,
    /// URIs of other servers that expose the same, to which clients turn when this one is gone.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) peers: Vec<String>,
    /// Certificates of the Flight service, which then accepts only TLS connections. The metrics stay without TLS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tls: Option<Tls>,
    /// File of the bearer tokens, one of which every call must present; a token may read the volumes that its line
    /// names. Without it the server listens on loopback addresses alone, unless `tls.client_ca` is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tokens: Option<PathBuf>,
    /// Interval in milliseconds after which the server checks the files of `tls` and `tokens`, and reads changed ones
    /// again; 0 disables the check.
    pub(crate) reload_ms: u64,
    /// Longest time for running streams after a stop request, in milliseconds. Longer ones end, and their clients go on
    /// at another server.
    pub(crate) drain_ms_max: u64,
    /// Bounds of streams, memory and connections.
    pub(crate) limits: Limits,
}

impl Default for FeedConfig {
    fn default() -> Self {
        FeedConfig {
            grpc: SocketAddr::from((Ipv4Addr::LOCALHOST, 8815)),
            metrics: None,
            volumes: Vec::new(),
            datasets: Vec::new(),
            advertise: None,
            peers: Vec::new(),
            tls: None,
            tokens: None,
            reload_ms: 1_000,
            drain_ms_max: 10_000,
            limits: Limits::default(),
        }
    }
}

/// The table `[up]`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct UpConfig {
    /// Volumes that are created when they do not exist.
    pub(crate) volumes: Vec<Name>,
    /// Volumes and snapshots mounted as folders.
    pub(crate) mounts: Vec<MountConfig>,
    /// Address for metrics, at `/metrics`, if no model server serves them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) metrics: Option<SocketAddr>,
    /// Snapshots taken on a schedule.
    pub(crate) snapshots: Vec<SnapshotSchedule>,
    /// Job files to train once their snapshot exists, relative to this file's folder. A job on `VOLUME@latest` trains
    /// again on each newer snapshot.
    pub(crate) train: Vec<PathBuf>,
}

/// One mount of `[up]`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MountConfig {
    /// VOLUME or VOLUME@SNAPSHOT.
    pub(crate) volume: VolumeSpec,
    /// The folder, created when it does not exist; relative to this file's folder.
    pub(crate) path: PathBuf,
}

/// One schedule of `[up]`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SnapshotSchedule {
    /// The volume.
    pub(crate) volume: Name,
    /// The schedule's name, unique for the volume and part of its snapshots' names; `every-Ns` by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<Name>,
    /// Seconds between snapshots, at least 1; counted from 1970-01-01 (UTC), so that 3600 is each hour.
    pub(crate) every_s: u64,
    /// Number of this schedule's snapshots to keep, at least 1; older ones are deleted.
    pub(crate) keep: usize,
}

/// The table `[cluster]`: services of other machines. An address is `HOST:PORT`, or `dnssrv+NAME` for the SRV records
/// of a name.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ClusterConfig {
    /// Coordinators of trainings, separated by commas: what `millrace worker --join` without an address joins.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) coordinator: Option<String>,
    /// The model server for commands without `--grpc`, unless a server of this home runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) server: Option<String>,
    /// Name servers to ask for SRV records, such as `127.0.0.1:8600` for a Consul agent; those of the system when empty.
    pub(crate) nameservers: Vec<SocketAddr>,
}

/// The effective settings of the command.
pub(crate) type LoadedSettings = millrace_home::settings::Loaded<Settings>;

/// What to do about a name that a table of the configuration lacks, given the names that it has.
pub(crate) fn instead(known: &[&str], table: &str) -> String {
    if known.is_empty() {
        format!("declare it under {table}")
    } else {
        format!("it has {}", known.join(", "))
    }
}

/// Variables that the command line or the tests read; they are not configuration keys.
const RESERVED: [&str; 6] = [
    "MILLRACE_HOME",
    "MILLRACE_CONFIG",
    "MILLRACE_LOG",
    "MILLRACE_PYTHON",
    "MILLRACE_REQUIRE",
    "MILLRACE_SKIPPED",
];
/// Variables from a training coordinator to its workers; they are not configuration keys either.
const WORKER: [&str; 6] = [
    launch::ENV_COORDINATOR,
    launch::ENV_TOKEN,
    launch::ENV_SLOT,
    launch::ENV_LAUNCH,
    launch::ENV_RING_LISTEN,
    launch::ENV_RING_ADVERTISE,
];

/// Reads the configuration: `flag` names the file; without it ./millrace.toml, then
/// HOME/millrace.toml, then none.
pub(crate) fn load(flag: Option<&Path>, home: &Path) -> Result<LoadedSettings> {
    let loaded: LoadedSettings = millrace_home::settings::load(flag, home, is_key)?;
    discovery::use_name_servers(loaded.settings.cluster.nameservers.clone());
    Ok(loaded)
}

/// Whether a variable's name can be that of a key.
fn is_key(variable: &str) -> bool {
    let others: [&[&str]; 3] = [&RESERVED, &WORKER, &millrace_trainer::script::ENVIRONMENT];
    variable.starts_with("MILLRACE_") && !others.iter().any(|names| names.contains(&variable))
}

#[cfg(test)]
mod tests {
    use millrace_home::settings;

    use super::*;

    fn parse(
        text: &str,
        shown: &str,
        variables: impl Iterator<Item = (String, String)>,
    ) -> millrace_home::Result<Settings> {
        settings::parse(text, shown, variables)
    }

    fn vars(pairs: &[(&str, &str)]) -> impl Iterator<Item = (String, String)> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect::<Vec<_>>().into_iter()
    }

    #[test]
    fn an_unknown_key_is_refused_with_its_line() {
        let error = parse("[serving]\nhtpp = \"127.0.0.1:1\"\n", "m.toml", vars(&[])).unwrap_err();
        assert!(error.to_string().starts_with("m.toml: line 2, column 1: unknown field `htpp`"), "{error}");
    }

    #[test]
    fn the_environment_wins_over_the_file() {
        let settings = parse(
            "[serving]\ngrpc = \"127.0.0.1:1\"\n",
            "m.toml",
            vars(&[("MILLRACE_SERVING__GRPC", "127.0.0.1:2")]),
        )
        .unwrap();
        assert_eq!(settings.serving.grpc.port(), 2);
        assert!(is_key("MILLRACE_SERVING__GRPC") && is_key("MILLRACE_TRAINER__X"));
        assert!(!is_key("MILLRACE_HOME") && !is_key("MILLRACE_TRAINER_SLOT") && !is_key("HOME"));
        assert!(!is_key("MILLRACE_ROUND") && is_key("MILLRACE_ROUNDS"));
    }

    #[test]
    fn errors_do_not_repeat_values() {
        for text in [
            "[streams]\nproperties = \"sasl.password=hunter2, expected\"\n",
            "[datafs]\nencryption_keys = \"hunter2\"\n",
            "[streams.properties]\n\"sasl.password\" = [\"hunter2\"]\n",
            "[serving.telemetry.headers]\nauthorization = { hunter2 = 1 }\n",
            "[serving]\ntokens = 4242\n",
            "[datafs]\nmeta_url = [\"postgres://me:hunter2@host\"]\n",
        ] {
            let error = parse(text, "m.toml", vars(&[])).unwrap_err().to_string();
            assert!(
                error.starts_with("m.toml: line 2, ") || error.starts_with("m.toml: line 3, "),
                "{error}"
            );
            assert!(!error.contains("hunter2") && !error.contains("4242"), "{error}");
        }
        let variables = [("MILLRACE_STREAMS__PROPERTIES", "hunter2"), ("MILLRACE_SERVING__DRIFT", "4242")];
        for variable in variables {
            let error = parse("", "m.toml", vars(&[variable])).unwrap_err().to_string();
            assert!(error.contains(variable.0) && error.contains("expected"), "{error}");
            assert!(!error.contains(variable.1), "{error}");
        }
    }

    #[test]
    fn names_with_capitals_are_set_by_variables() {
        let depth = |text: &str, variable: &str, name: &str| {
            let settings = parse(text, "m.toml", vars(&[(variable, "7")])).unwrap();
            settings.serving.models[name].sessions_max
        };
        assert_eq!(depth("", "MILLRACE_SERVING__MODELS__ResNet__SESSIONS_MAX", "ResNet"), Some(7));
        let declared = "[serving.models.BERT]\n";
        assert_eq!(depth(declared, "MILLRACE_SERVING__MODELS__BERT__SESSIONS_MAX", "BERT"), Some(7));
        assert_eq!(depth("", "MILLRACE_SERVING__MODELS__MLP__SESSIONS_MAX", "mlp"), Some(7));
    }

    #[test]
    fn relative_paths_of_secrets_start_at_the_folder_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.toml");
        std::fs::write(
            &path,
            "[datafs.encryption_keys]\nmain = { file = \"keys/main\" }\nother = { file = \"/k\" }\n",
        )
        .unwrap();
        let loaded = load(Some(&path), folder.path()).unwrap();
        let shown = format!("{:?}", loaded.settings.datafs.encryption_keys);
        assert!(shown.contains(folder.path().join("keys/main").to_str().unwrap()), "{shown}");
        assert!(shown.contains("\"/k\""), "{shown}");
    }

    #[test]
    fn a_variable_without_a_table_and_an_unknown_one_are_refused() {
        assert!(parse("", "m", vars(&[("MILLRACE_GRPC", "1")])).is_err());
        let error = parse("", "m", vars(&[("MILLRACE_TRAINER_WORKERS", "4")])).unwrap_err();
        assert!(error.to_string().contains("MILLRACE_TRAINER_WORKERS"), "{error}");
        assert!(!is_key("MILLRACE_TRAINER_SLOT"));
        let error = parse("", "m", vars(&[("MILLRACE_SERVING__GRCP", "127.0.0.1:2")])).unwrap_err();
        assert!(error.to_string().contains("MILLRACE_SERVING__GRCP"), "{error}");
    }
}
