//! Checks of the tables, each with the functions by which its crate refuses settings.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use millrace_datafs::{Datafs, Secret};
use millrace_serving::host::{Host, HostConfig};
use millrace_serving::{Limits, Tls, pipe, repository};
use millrace_streams::{broker, topic};
use millrace_trainer::job::JobFile;

use super::findings::Findings;
use super::network;
use crate::commands::feed::check_location;
use crate::output::one_line;
use crate::settings::{LoadedSettings, Settings};
use crate::snapshots::Schedule;

/// Longest name of a topic, as of Apache Kafka.
const TOPIC_BYTES_MAX: usize = 249;

/// Whether the configuration has a model server.
pub(super) fn serves(settings: &Settings) -> bool {
    settings.serving.volume.is_some() || settings.serving.directory.is_some()
}

/// Whether the configuration has a feed server.
pub(super) fn feeds(settings: &Settings) -> bool {
    !settings.feed.volumes.is_empty() || !settings.feed.datasets.is_empty()
}

/// `[datafs]`
pub(super) fn volumes(findings: &mut Findings, loaded: &LoadedSettings, root: &Path) {
    let config = &loaded.settings.datafs;
    for (key, secret) in &config.encryption_keys {
        secret_file(findings, &format!("datafs.encryption_keys.{key}"), secret);
    }
    for (key, secret) in &config.store_options {
        secret_file(findings, &format!("datafs.store_options.{key}"), secret);
    }
    for (key, error) in Datafs::problems(root, config) {
        findings.error(&format!("datafs.{key}"), millrace_leaf::error_chain::one_line(&error));
    }
}

/// `[streams]`
pub(super) fn topics(findings: &mut Findings, loaded: &LoadedSettings) {
    let config = &loaded.settings.streams;
    if config.is_embedded() {
        for problem in broker::problems(&config.broker) {
            findings.message("streams", &problem);
        }
    } else {
        network::brokers(findings, "streams.bootstrap_servers", &config.bootstrap_servers);
    }
    for (key, secret) in &config.properties {
        secret_file(findings, &format!("streams.properties.{key:?}"), secret);
    }
    for (key, reason) in topic::wrong_properties(&config.properties) {
        findings.error(&format!("streams.properties.{key:?}"), reason);
    }
    let mut names = BTreeSet::new();
    for (at, declared) in config.topics.iter().enumerate() {
        let key = format!("streams.topics[{at}]");
        is_topic(findings, &format!("{key}.name"), &declared.name);
        if declared.partitions < 1 {
            findings.error(
                &format!("{key}.partitions"),
                format!("partitions is {}; a topic has at least 1", declared.partitions),
            );
        }
        if !names.insert(&declared.name) {
            findings.error(&format!("{key}.name"), format!("topic {} is declared twice", declared.name));
        }
    }
}

/// `[ingest]`
pub(super) fn ingest(findings: &mut Findings, loaded: &LoadedSettings) {
    let settings = &loaded.settings;
    for (at, error) in settings.ingest.problems() {
        let key = format!("ingest.jobs[{at}]");
        match error {
            millrace_ingest::Error::InvalidJob { reason, .. } => findings.message(&key, &reason),
            error => findings.cause(&key, &error),
        }
    }
    for (at, job) in settings.ingest.jobs.iter().enumerate() {
        let key = format!("ingest.jobs[{at}]");
        findings.spelled(&format!("{key}.topic"), &job.topic, &declared_topics(settings), "streams.topics");
        findings.spelled(&format!("{key}.volume"), &job.volume, &declared_volumes(settings), "up.volumes");
    }
}

/// `[trainer]`
pub(super) fn trainer(findings: &mut Findings, loaded: &LoadedSettings) {
    for (key, problem) in loaded.settings.trainer.problems() {
        findings.error(&format!("trainer.{key}"), format!("{key} = {problem}"));
    }
}

/// `[serving]`
pub(super) async fn serving(findings: &mut Findings, loaded: &LoadedSettings) {
    let settings = &loaded.settings;
    let mut config = settings.serving.clone();
    config.resolve_files(|path| loaded.resolve(path));
    if config.volume.is_some() && config.directory.is_some() {
        findings.error("serving.volume", "serving.volume and serving.directory exclude each other");
    }
    if let Some(directory) = config.directory.as_ref().map(|directory| loaded.resolve(directory))
        && !directory.is_dir()
    {
        findings.warning("serving.directory", format!("{} is not a folder here", directory.display()));
    }
    if let Err(error) = config.limits.check() {
        findings.cause("serving", &error);
    }
    for error in repository::problems(&config) {
        findings.cause("serving", &error);
    }
    if let Some(telemetry) = &config.telemetry {
        for error in [telemetry.check().err(), telemetry.metadata().err()].into_iter().flatten() {
            findings.cause("serving", &error);
        }
        for (name, secret) in &telemetry.headers {
            secret_file(findings, &format!("serving.telemetry.headers.{name}"), secret);
        }
        if let Some(ca) = &telemetry.ca {
            findings.file("serving.telemetry.ca", ca, false);
        }
    }
    access(findings, "serving", config.tls.as_ref(), config.tokens.as_ref()).await;
    if config.tokens.is_some() && config.tls.is_none() && !config.is_local() {
        findings.warning(
            "serving.tokens",
            "clients send tokens over connections without TLS, which others may read: set [serving.tls]",
        );
    }
    let volumes = declared_volumes(settings);
    if let Some(spec) = &config.volume {
        findings.spelled("serving.volume", spec.volume.as_str(), &volumes, "up.volumes");
    }
    if !config.pipes.is_empty() && !serves(settings) {
        findings.error("serving.pipes", "serving.pipes need models: set serving.volume or serving.directory");
    }
    let mut names = BTreeSet::new();
    for (at, declared) in config.pipes.iter().enumerate() {
        let key = format!("serving.pipes[{at}]");
        if let Err(error) = pipe::check(declared) {
            findings.cause(&key, &error);
        }
        if !names.insert(&declared.name) {
            findings.error(&format!("{key}.name"), format!("two pipes are called {}", declared.name));
        }
        if declared.volume.is_none() && config.volume.is_none() && serves(settings) {
            findings.error(&key, "the pipe needs a volume for its progress: set volume");
        }
        let input = declared.input.as_str();
        findings.spelled(&format!("{key}.input"), input, &declared_topics(settings), "streams.topics");
    }
}

/// `[feed]`
pub(super) async fn feed(findings: &mut Findings, loaded: &LoadedSettings) {
    let settings = &loaded.settings;
    let config = &settings.feed;
    if let Err(error) = config.limits.check() {
        let text = error.to_string();
        findings.message("feed", text.strip_prefix("feed.").unwrap_or(&text));
    }
    let latest = "name a snapshot, or leave @latest out for all of them";
    for (at, spec) in config.volumes.iter().enumerate() {
        let key = format!("feed.volumes[{at}]");
        if spec.is_latest() {
            findings.error(&key, format!("{spec} is not one snapshot; {latest}"));
        }
        findings.spelled(&key, spec.volume.as_str(), &declared_volumes(settings), "up.volumes");
    }
    for (at, dataset) in config.datasets.iter().enumerate() {
        let key = format!("feed.datasets[{at}]");
        if dataset.source.is_latest() {
            findings.error(&key, format!("{dataset} is not one snapshot; {latest}"));
        }
        findings.spelled(&key, dataset.source.volume.as_str(), &declared_volumes(settings), "up.volumes");
    }
    if let Some(Err(error)) = config.advertise.as_deref().map(check_location) {
        findings.error("feed.advertise", one_line(&error));
    }
    for (at, peer) in config.peers.iter().enumerate() {
        if let Err(error) = check_location(peer) {
            findings.error(&format!("feed.peers[{at}]"), one_line(&error));
        }
    }
    let tls = config.tls.clone().map(|tls| Tls {
        certificate: loaded.resolve(&tls.certificate),
        key: loaded.resolve(&tls.key),
        client_ca: tls.client_ca.map(|path| loaded.resolve(&path)),
    });
    let tokens = config.tokens.as_ref().map(|path| loaded.resolve(path));
    access(findings, "feed", tls.as_ref(), tokens.as_ref()).await;
    let is_local = config.grpc.ip().to_canonical().is_loopback();
    let knows_clients = tls.as_ref().is_some_and(|tls| tls.client_ca.is_some());
    if feeds(settings) && !is_local && tokens.is_none() && !knows_clients {
        findings.error(
            "feed.grpc",
            "every client could read the datasets: set tokens or tls.client_ca in [feed], or listen on 127.0.0.1",
        );
    }
}

/// `[up]`
pub(super) fn service(findings: &mut Findings, loaded: &LoadedSettings) {
    let settings = &loaded.settings;
    let up = &settings.up;
    let volumes = declared_volumes(settings);
    let mut folders: Vec<PathBuf> = Vec::new();
    for (at, mount) in up.mounts.iter().enumerate() {
        let key = format!("up.mounts[{at}]");
        let folder = loaded.resolve(&mount.path);
        if folders.contains(&folder) {
            findings.error(&format!("{key}.path"), format!("two mounts are at {}", folder.display()));
        }
        folders.push(folder);
        findings.spelled(&format!("{key}.volume"), mount.volume.volume.as_str(), &volumes, "up.volumes");
    }
    let mut good = Vec::new();
    for (at, schedule) in up.snapshots.iter().enumerate() {
        let key = format!("up.snapshots[{at}]");
        good.push(schedule.clone());
        if let Err(error) = Schedule::all(&good) {
            good.pop();
            findings.error(&key, one_line(&error));
        }
        findings.spelled(&format!("{key}.volume"), schedule.volume.as_str(), &volumes, "up.volumes");
    }
    for (at, job) in up.train.iter().enumerate() {
        if let Err(error) = JobFile::load(&loaded.resolve(job)) {
            findings.error(
                &format!("up.train[{at}]"),
                format!("{}; see millrace config check {}", error_line(&error), job.display()),
            );
        }
    }
    if let Some(address) =
        up.metrics.filter(|address| serves(settings) && *address != settings.serving.metrics)
    {
        findings.warning(
            "up.metrics",
            format!("{address} is not used: the model server exports all metrics at serving.metrics"),
        );
    }
}

/// Checks the certificates and the tokens of a server, each alone, so that both are reported.
async fn access(findings: &mut Findings, table: &str, tls: Option<&Tls>, tokens: Option<&PathBuf>) {
    if let Some(tls) = tls {
        let certificate = findings.file(&format!("{table}.tls.certificate"), &tls.certificate, false);
        let key = findings.file(&format!("{table}.tls.key"), &tls.key, true);
        let ca = tls.client_ca.as_ref();
        let ca = ca.is_none_or(|ca| findings.file(&format!("{table}.tls.client_ca"), ca, false));
        if certificate
            && key
            && ca
            && let Err(error) = Host::open(host(Some(tls.clone()), None)).await
        {
            findings.cause(table, &error);
        }
    }
    if let Some(tokens) = tokens
        && findings.file(&format!("{table}.tokens"), tokens, true)
        && let Err(error) = Host::open(host(None, Some(tokens.clone()))).await
    {
        findings.cause(table, &error);
    }
}

/// A host that only reads its files.
fn host(tls: Option<Tls>, tokens: Option<PathBuf>) -> HostConfig {
    HostConfig {
        service: "check",
        health_name: "check",
        tls,
        tokens,
        reload_ms: 0,
        limits: Limits::default(),
        unread: Duration::ZERO,
    }
}

/// Checks the file of a secret, if it has one.
fn secret_file(findings: &mut Findings, key: &str, secret: &Secret) {
    // A missing file is the error of the value.
    if let Secret::File(from) = secret
        && from.file.is_file()
    {
        findings.file(key, &from.file, true);
    }
}

fn is_topic(findings: &mut Findings, key: &str, name: &str) {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if name.is_empty()
        || name.len() > TOPIC_BYTES_MAX
        || !name.bytes().all(allowed)
        || name == "."
        || name == ".."
    {
        findings.error(key, format!("{name:?} is not a topic name: 1 to {TOPIC_BYTES_MAX} of A-Za-z0-9._-"));
    }
}

fn declared_topics(settings: &Settings) -> Vec<&str> {
    settings.streams.topics.iter().map(|topic| topic.name.as_str()).collect()
}

fn declared_volumes(settings: &Settings) -> Vec<&str> {
    settings.up.volumes.iter().map(|volume| volume.as_str()).collect()
}

fn error_line(error: &millrace_trainer::Error) -> String {
    millrace_leaf::error_chain::one_line(error)
}
