//! Parameters of a trigger: what to measure, and the target of one replica.

use std::collections::HashMap;
use std::str::FromStr;

use millrace_datafs::Name;
use tonic::Status;

use super::protocol::ScaledObjectRef;
use crate::settings::Settings;

/// Most bytes of the metadata of a trigger, names and values together.
pub(crate) const METADATA_BYTES_MAX: usize = 16 << 10;
/// Parameters that KEDA itself reads and passes on.
const OF_KEDA: [&str; 6] =
    ["scalerAddress", "enableTLS", "unsafeSsl", "caCert", "tlsClientCert", "tlsClientKey"];
/// Records of lag for one replica, unless `lagThreshold` says otherwise.
const LAG: u64 = 10_000;
/// Milliseconds of queue time, unless `queueTimeMs` says otherwise.
const QUEUE_TIME_MS: u64 = 50;
/// Seconds over which the queue time is taken, unless `windowSeconds` says otherwise.
const WINDOW_SECONDS: u64 = 30;
/// Most endpoints that a trigger may name; each can resolve to several addresses.
const ENDPOINTS_MAX: usize = 64;
/// Largest number of a parameter: a float holds it exactly.
const NUMBER_MAX: u64 = 1 << 53;

/// A checked trigger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Trigger {
    /// What to measure.
    pub(crate) source: Source,
    /// The value of the metric that one replica is to have.
    pub(crate) target: u64,
    /// The workload is active above this value.
    pub(crate) activation: u64,
    /// Whether there may be more replicas than partitions with records.
    pub(crate) allow_idle_consumers: bool,
}

/// A thing to measure. Triggers with the same source share a measurement.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    /// The lag of an ingest job.
    Job { job: String, topic: String, volume: Name },
    /// The lag of a pipe.
    Pipe { pipe: String, topic: String, output: String, model: String, volume: Name },
    /// The queue time of a model, over a window in seconds, from metrics at endpoints, each `HOST:PORT`.
    Model { model: String, version: Option<u64>, endpoints: Vec<String>, window: u64 },
}

impl Source {
    /// The name of the metric.
    pub(crate) fn metric(&self) -> &'static str {
        match self {
            Source::Job { .. } | Source::Pipe { .. } => "millrace-lag",
            Source::Model { .. } => "millrace-queue-time-ms",
        }
    }

    /// The volume whose offsets it reads.
    pub(crate) fn volume(&self) -> Option<&Name> {
        match self {
            Source::Job { volume, .. } | Source::Pipe { volume, .. } => Some(volume),
            Source::Model { .. } => None,
        }
    }
}

impl Trigger {
    /// Reads the metadata of a trigger; what it leaves out of a job or a pipe comes from the configuration.
    ///
    /// # Errors
    /// INVALID_ARGUMENT with the parameter, what is wrong with it, and what it may be.
    pub(crate) fn read(of: ScaledObjectRef, settings: &Settings) -> Result<Trigger, Status> {
        let bytes: usize = of.scaler_metadata.iter().map(|(name, value)| name.len() + value.len()).sum();
        let mut given = Parameters { object: object(&of), values: of.scaler_metadata };
        if bytes > METADATA_BYTES_MAX {
            return Err(
                given.refused(format!("has {bytes} bytes of metadata, the limit is {METADATA_BYTES_MAX}"))
            );
        }
        for name in OF_KEDA {
            given.values.remove(name);
        }
        let kind = given.text("kind")?;
        let trigger = match kind.as_deref() {
            Some("ingest") => lag(&mut given, settings)?,
            Some("model") => queue_time(&mut given)?,
            Some(kind) => {
                return Err(given.refused(format!("kind {kind:?} is unknown; write ingest or model")));
            }
            None => return Err(given.refused("kind is missing; write ingest or model")),
        };
        given.finish(kind.as_deref().unwrap_or_default())?;
        Ok(trigger)
    }
}

fn lag(given: &mut Parameters, settings: &Settings) -> Result<Trigger, Status> {
    let source = match (given.text("job")?, given.text("pipe")?) {
        (Some(job), None) => ingest_job(given, job, settings)?,
        (None, Some(pipe)) => pipe_of(given, pipe, settings)?,
        _ => {
            let what =
                "an ingest trigger needs either job, the name of an ingest job, or pipe, the name of a pipe";
            return Err(given.refused(what));
        }
    };
    Ok(Trigger {
        source,
        target: given.number("lagThreshold", LAG, 1, NUMBER_MAX)?,
        activation: given.number("activationLagThreshold", 0, 0, NUMBER_MAX)?,
        allow_idle_consumers: given.flag("allowIdleConsumers")?,
    })
}

fn ingest_job(given: &mut Parameters, job: String, settings: &Settings) -> Result<Source, Status> {
    given.check_name("job", &job)?;
    let known = settings.ingest.job(&job);
    let place = format!("[[ingest.jobs]] {job:?}");
    let topic = given.text_or("topic", known.map(|job| job.topic.clone()), &place)?;
    let volume = given.text_or("volume", known.map(|job| job.volume.clone()), &place)?;
    given.check_name("topic", &topic)?;
    let volume = given.volume(&volume)?;
    Ok(Source::Job { job, topic, volume })
}

fn pipe_of(given: &mut Parameters, pipe: String, settings: &Settings) -> Result<Source, Status> {
    given.check_name("pipe", &pipe)?;
    let known = settings.serving.pipes.iter().find(|known| known.name == pipe);
    let place = format!("[[serving.pipes]] {pipe:?}");
    let topic = given.text_or("topic", known.map(|known| known.input.clone()), &place)?;
    let output = given.text_or("output", known.map(|known| known.output.clone()), &place)?;
    let model = given.text_or("model", known.map(|known| known.model.clone()), &place)?;
    let volume = known.and_then(|known| known.volume.as_ref().or(settings.serving.volume.as_ref()));
    let volume = given.text_or("volume", volume.map(|spec| spec.volume.as_str().to_owned()), &place)?;
    given.check_name("topic", &topic)?;
    given.check_name("output", &output)?;
    let volume = given.volume(&volume)?;
    Ok(Source::Pipe { pipe, topic, output, model, volume })
}

fn queue_time(given: &mut Parameters) -> Result<Trigger, Status> {
    let Some(model) = given.text("model")? else {
        return Err(given.refused("model is missing; write the name of the model whose queue time counts"));
    };
    let version = match given.text("version")? {
        None => None,
        Some(text) => match text.parse::<u64>() {
            Ok(version) if version > 0 => Some(version),
            _ => return Err(given.refused(format!("version {text:?} is no positive integer"))),
        },
    };
    let hint = "write HOST:PORT of the model server's metrics, several with commas between";
    let Some(metrics) = given.text("metrics")? else {
        return Err(given.refused(format!("metrics is missing; {hint}")));
    };
    let mut endpoints: Vec<String> = metrics.split(',').map(|place| place.trim().to_owned()).collect();
    if let Some(wrong) = endpoints.iter().find(|place| !is_endpoint(place)) {
        return Err(given.refused(format!("metrics: {wrong:?} is no address; {hint}")));
    }
    endpoints.sort_unstable();
    endpoints.dedup();
    if endpoints.len() > ENDPOINTS_MAX {
        let found = endpoints.len();
        return Err(given.refused(format!("metrics names {found} addresses, the limit is {ENDPOINTS_MAX}")));
    }
    let window = given.number("windowSeconds", WINDOW_SECONDS, 1, 600)?;
    Ok(Trigger {
        source: Source::Model { model, version, endpoints, window },
        target: given.number("queueTimeMs", QUEUE_TIME_MS, 1, NUMBER_MAX)?,
        activation: given.number("activationQueueTimeMs", 0, 0, NUMBER_MAX)?,
        allow_idle_consumers: true,
    })
}

/// Whether a text is a name or an IP address with a port, and nothing that could lead a URL elsewhere.
fn is_endpoint(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let is_name = |host: &str| {
        !host.is_empty() && host.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_'))
    };
    let is_ip6 = |host: &str| {
        let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        inner.is_some_and(|inner| inner.parse::<std::net::Ipv6Addr>().is_ok())
    };
    host.len() <= 253 && (is_name(host) || is_ip6(host)) && port.parse::<u16>().is_ok_and(|port| port > 0)
}

/// Namespace and name of a ScaledObject for messages, shortened.
fn object(of: &ScaledObjectRef) -> String {
    let short = |text: &str| text.chars().take(253).collect::<String>();
    format!("ScaledObject {:?}", format!("{}/{}", short(&of.namespace), short(&of.name)))
}

/// The parameters that have not been read yet.
struct Parameters {
    object: String,
    values: HashMap<String, String>,
}

impl Parameters {
    fn refused(&self, what: impl AsRef<str>) -> Status {
        Status::invalid_argument(format!("{}: {}", self.object, what.as_ref()))
    }

    /// A text; none if it is absent.
    fn text(&mut self, name: &str) -> Result<Option<String>, Status> {
        let Some(value) = self.values.remove(name) else { return Ok(None) };
        let value = value.trim();
        if value.is_empty() || value.len() > 4096 || value.chars().any(char::is_control) {
            return Err(self.refused(format!("{name} must be 1 to 4096 bytes without control characters")));
        }
        Ok(Some(value.to_owned()))
    }

    /// A text, or what the configuration says at `place`.
    fn text_or(&mut self, name: &str, known: Option<String>, place: &str) -> Result<String, Status> {
        let given = self.text(name)?.or(known);
        given.ok_or_else(|| {
            self.refused(format!(
                "{name} is missing; set it in the trigger, or in {place} of the scaler's configuration"
            ))
        })
    }

    fn number(&mut self, name: &str, default: u64, min: u64, max: u64) -> Result<u64, Status> {
        let Some(text) = self.text(name)? else { return Ok(default) };
        let number = u64::from_str(&text).ok().filter(|number| (min..=max).contains(number));
        number.ok_or_else(|| self.refused(format!("{name} {text:?} is no integer from {min} to {max}")))
    }

    fn flag(&mut self, name: &str) -> Result<bool, Status> {
        match self.text(name)?.as_deref() {
            None | Some("false") => Ok(false),
            Some("true") => Ok(true),
            Some(text) => Err(self.refused(format!("{name} {text:?} is neither true nor false"))),
        }
    }

    /// Checks the name of a job, a pipe or a topic, which must not contain the separator of keys.
    fn check_name(&self, parameter: &str, name: &str) -> Result<(), Status> {
        let is_valid = name.len() <= 249
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'));
        if is_valid {
            return Ok(());
        }
        Err(self.refused(format!("{parameter} {name:?} is not 1 to 249 of A-Z a-z 0-9 . _ -")))
    }

    fn volume(&self, name: &str) -> Result<Name, Status> {
        name.parse::<Name>().map_err(|error| self.refused(format!("volume {name:?}: {error}")))
    }

    /// Refuses parameters that no reader took.
    fn finish(self, kind: &str) -> Result<(), Status> {
        match self.values.keys().min() {
            None => Ok(()),
            Some(name) => {
                let name: String = name.chars().take(64).collect();
                Err(self.refused(format!(
                    "{name:?} is no parameter of this trigger of kind {kind}; docs/how-to/autoscale.md lists them"
                )))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(metadata: &[(&str, &str)]) -> Result<Trigger, String> {
        let pairs = metadata.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let of =
            ScaledObjectRef { name: "n".into(), namespace: "s".into(), scaler_metadata: pairs.collect() };
        Trigger::read(of, &Settings::default()).map_err(|status| {
            assert_eq!(status.code(), tonic::Code::InvalidArgument);
            assert!(status.message().starts_with("ScaledObject \"s/n\": "), "{}", status.message());
            status.message().to_owned()
        })
    }

    #[test]
    fn triggers_are_read_with_their_defaults() {
        let place = [("topic", "t"), ("volume", "v"), ("scalerAddress", "scaler:9000")];
        let job = read(&[&[("kind", "ingest"), ("job", "j")][..], &place].concat()).unwrap();
        let source = Source::Job { job: "j".into(), topic: "t".into(), volume: "v".parse().unwrap() };
        assert_eq!(job, Trigger { source, target: LAG, activation: 0, allow_idle_consumers: false });
        let pipe =
            [("kind", "ingest"), ("pipe", "p"), ("output", "o"), ("model", "a/b"), ("lagThreshold", "7")];
        let pipe = read(&[&pipe[..], &place].concat()).unwrap();
        assert_eq!((pipe.target, pipe.source.metric()), (7, "millrace-lag"));
        let model =
            [("kind", "model"), ("model", "m"), ("metrics", "b:2, a:1,[::1]:3,a:1"), ("version", "4")];
        let Source::Model { endpoints, window, version, .. } = read(&model).unwrap().source else { panic!() };
        assert_eq!(
            (endpoints.join(" ").as_str(), window, version),
            ("[::1]:3 a:1 b:2", WINDOW_SECONDS, Some(4))
        );
    }

    #[test]
    fn wrong_parameters_are_refused_by_name() {
        let job = [("kind", "ingest"), ("job", "j"), ("topic", "t"), ("volume", "v")];
        let model = [("kind", "model"), ("model", "m"), ("metrics", "a:1")];
        let many = (0..65).map(|port| format!("a:{}", port + 1)).collect::<Vec<_>>().join(",");
        let long = "x".repeat(METADATA_BYTES_MAX + 1);
        let with = |base: &[(&'static str, &str)], name: &'static str, value: &str| {
            let mut all: Vec<(&str, &str)> =
                base.iter().copied().filter(|(known, _)| *known != name).collect();
            all.push((name, value));
            read(&all).unwrap_err()
        };
        for (error, says) in [
            (read(&[]).unwrap_err(), "kind is missing"),
            (with(&job, "kind", "kafka"), "kind \"kafka\" is unknown"),
            (with(&job, "pipe", "p"), "either job"),
            (with(&job[..1], "topic", "t"), "either job"),
            (with(&job[..2], "topic", "t"), "volume is missing"),
            (with(&job[..2], "volume", "v"), "topic is missing"),
            (with(&job, "job", "a/b"), "job \"a/b\""),
            (with(&job, "topic", "a/b"), "topic \"a/b\""),
            (with(&job, "volume", "../v"), "volume \"../v\""),
            (with(&job, "lagThreshold", "0"), "lagThreshold \"0\""),
            (with(&job, "lagThreshold", "-1"), "lagThreshold \"-1\""),
            (with(&job, "lagThreshold", "99999999999999999999"), "lagThreshold"),
            (with(&job, "activationLagThreshold", "some"), "activationLagThreshold \"some\""),
            (with(&job, "allowIdleConsumers", "yes"), "allowIdleConsumers \"yes\""),
            (with(&job, "lagTreshold", "5"), "\"lagTreshold\" is no parameter"),
            (with(&job, "queueTimeMs", "5"), "\"queueTimeMs\" is no parameter"),
            (with(&job, "job", " "), "job must be"),
            (with(&job, "job", "a\nb"), "job must be"),
            (with(&job, "job", &long), "bytes of metadata"),
            (with(&model[..2], "version", "1"), "metrics is missing"),
            (with(&model, "metrics", "a"), "\"a\" is no address"),
            (with(&model, "metrics", "a:0"), "\"a:0\" is no address"),
            (with(&model, "metrics", "user@a:1"), "is no address"),
            (with(&model, "metrics", "a/b:1"), "is no address"),
            (with(&model, "metrics", "::1:80"), "is no address"),
            (with(&model, "metrics", "a:1,"), "\"\" is no address"),
            (with(&model, "metrics", &many), "65 addresses"),
            (with(&model, "version", "0"), "version \"0\""),
            (with(&model, "windowSeconds", "601"), "windowSeconds \"601\""),
            (with(&model, "queueTimeMs", "1.5"), "queueTimeMs \"1.5\""),
        ] {
            assert!(error.contains(says), "{error:?} does not say {says:?}");
        }
    }
}
