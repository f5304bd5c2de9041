//! Arguments of `millrace train --render`, with the forms of Kubernetes' names.

use clap::{Args, ValueEnum};

/// Arguments without a place in manifests. Each argument of manifests conflicts with them, too: an argument may be set
/// without the one that it requires where that one conflicts with another that is set.
const UNRENDERED: [&str; 9] = [
    "script",
    "tensorboard",
    "listen",
    "advertise",
    "token_file",
    "tls_cert",
    "tls_key",
    "workers_local",
    "standby",
];

/// A form of manifests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Render {
    /// Objects of Kubernetes as one JSON list, as the Helm chart has them
    Kubernetes,
}

/// Manifests in place of a training.
#[derive(Debug, Args)]
#[command(next_help_heading = "Manifests")]
pub(crate) struct RenderArgs {
    /// Print the manifests of the training instead of running it; needs a job file, --image and --token-secret
    #[arg(long, value_enum, requires_all = ["job", "image", "token_secret"],
          conflicts_with_all = UNRENDERED)]
    pub(crate) render: Option<Render>,
    /// Image with the program
    #[arg(long, requires = "render", conflicts_with_all = UNRENDERED, value_parser = image)]
    pub(crate) image: Option<String>,
    /// Secret whose key `token` has the secret of the job's workers, at least 16 characters
    #[arg(long, value_name = "SECRET", requires = "render", conflicts_with_all = UNRENDERED, value_parser = subdomain)]
    pub(crate) token_secret: Option<String>,
    /// Namespace of the objects
    #[arg(long, default_value = "default", requires = "render", conflicts_with_all = UNRENDERED, value_parser = label)]
    pub(crate) namespace: String,
    /// First part of the objects' names
    #[arg(long, default_value = "millrace", requires = "render", conflicts_with_all = UNRENDERED, value_parser = release)]
    pub(crate) release: String,
    /// Name of the training in the objects' names [default: the job's name]
    #[arg(long, value_name = "NAME", requires = "render", conflicts_with_all = UNRENDERED, value_parser = training)]
    pub(crate) training: Option<String>,
    /// Service account of the pods
    #[arg(long, value_name = "NAME", default_value = "default",
          requires = "render", conflicts_with_all = UNRENDERED, value_parser = subdomain)]
    pub(crate) service_account: String,
    /// Secret with the password of the metadata's server, and its key
    #[arg(long, value_name = "SECRET[:KEY]", requires = "render", conflicts_with_all = UNRENDERED, value_parser = database)]
    pub(crate) database_secret: Option<(String, String)>,
    /// Secret with the credentials of the bucket, and its two keys
    #[arg(long, value_name = "SECRET[:ID_KEY:SECRET_KEY]",
          requires = "render", conflicts_with_all = UNRENDERED, value_parser = store)]
    pub(crate) store_secret: Option<(String, String, String)>,
    /// A variable of the pods from a Secret, for example for { env = "NAME" } of the configuration; may be repeated
    #[arg(long = "env", value_name = "NAME=SECRET:KEY",
          requires = "render", conflicts_with_all = UNRENDERED, value_parser = variable)]
    pub(crate) variables: Vec<(String, String, String)>,
    /// Coordinators that wait to take over
    #[arg(long, value_name = "N", default_value_t = 1, requires = "render", conflicts_with_all = UNRENDERED,
          value_parser = clap::value_parser!(u32).range(..=16))]
    pub(crate) standbys: u32,
    /// Failures of a pod after which the Job gives it up
    #[arg(long, value_name = "N", default_value_t = 6, requires = "render", conflicts_with_all = UNRENDERED,
          value_parser = clap::value_parser!(u32).range(..=10_000))]
    pub(crate) backoff_limit: u32,
    /// Replace pods of a lost node at once; evictions then count as failures
    #[arg(long, requires = "render", conflicts_with_all = UNRENDERED)]
    pub(crate) replace_lost: bool,
    /// Create the Jobs suspended
    #[arg(long, requires = "render", conflicts_with_all = UNRENDERED)]
    pub(crate) suspend: bool,
    /// PriorityClass of the pods
    #[arg(long, value_name = "NAME", requires = "render", conflicts_with_all = UNRENDERED, value_parser = subdomain)]
    pub(crate) priority_class: Option<String>,
    /// LocalQueue of Kueue
    #[arg(long, value_name = "NAME", requires = "render", conflicts_with_all = UNRENDERED, value_parser = label)]
    pub(crate) queue: Option<String>,
    /// What a worker's pod reserves
    #[arg(long, value_name = "RESOURCE=QUANTITY,…", value_delimiter = ',', default_value = "cpu=1,memory=1Gi",
          requires = "render", conflicts_with_all = UNRENDERED, value_parser = quantity)]
    pub(crate) requests: Vec<(String, String)>,
    /// What a worker's pod may use
    #[arg(long, value_name = "RESOURCE=QUANTITY,…", value_delimiter = ',', default_value = "memory=2Gi",
          requires = "render", conflicts_with_all = UNRENDERED, value_parser = quantity)]
    pub(crate) limits: Vec<(String, String)>,
    /// Label of the nodes for all pods; may be repeated
    #[arg(long, value_name = "KEY=VALUE", requires = "render", conflicts_with_all = UNRENDERED, value_parser = node_label)]
    pub(crate) node_selector: Vec<(String, String)>,
    /// Cards of each worker's pod [default: 1 with another flag of cards, else 0]
    #[arg(long, value_name = "N",
          requires = "render", conflicts_with_all = UNRENDERED, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) gpus: Option<u32>,
    /// Cards by their label nvidia.com/gpu.product
    #[arg(long, value_name = "PRODUCT,…", value_delimiter = ',',
          requires = "render", conflicts_with_all = UNRENDERED, value_parser = label_value)]
    pub(crate) gpu_product: Vec<String>,
    /// Also cards of these products that several pods share
    #[arg(long, requires = "gpu_product", conflicts_with_all = UNRENDERED)]
    pub(crate) gpu_shared: bool,
    /// Cards with more memory than this
    #[arg(long, value_name = "MIB",
          requires = "render", conflicts_with_all = UNRENDERED, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) gpu_memory_mib: Option<u32>,
    /// Cards above this major compute capability
    #[arg(long, value_name = "MAJOR",
          requires = "render", conflicts_with_all = UNRENDERED, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) gpu_compute_major: Option<u32>,
    /// Name of the cards' resource, such as nvidia.com/mig-1g.10gb [default: nvidia.com/gpu]
    #[arg(long, value_name = "RESOURCE", requires = "render", conflicts_with_all = UNRENDERED, value_parser = qualified)]
    pub(crate) gpu_resource: Option<String>,
    /// Taint of nodes on which workers may run nevertheless; may be repeated
    #[arg(long, value_name = "KEY", requires = "render", conflicts_with_all = UNRENDERED, value_parser = qualified)]
    pub(crate) tolerate: Vec<String>,
}

impl RenderArgs {
    /// Cards of each worker's pod, with the name of their resource; none without a flag of cards.
    pub(crate) fn cards(&self) -> Option<(&str, u32)> {
        let any = self.gpus.is_some()
            || self.gpu_resource.is_some()
            || !self.gpu_product.is_empty()
            || self.gpu_memory_mib.is_some()
            || self.gpu_compute_major.is_some();
        any.then(|| (self.gpu_resource.as_deref().unwrap_or("nvidia.com/gpu"), self.gpus.unwrap_or(1)))
    }
}

/// Whether a text has 1 to `max` of the bytes, and begins and ends with a letter or digit.
fn is_word(text: &str, max: usize, inner: impl Fn(u8) -> bool) -> bool {
    let edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    bytes.len() <= max && edge(bytes.first()) && edge(bytes.last()) && bytes.iter().all(|byte| inner(*byte))
}

fn is_lower(byte: u8) -> bool {
    byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-'
}

fn is_label(text: &str, max: usize) -> bool {
    is_word(text, max, is_lower)
}

fn is_label_value(text: &str) -> bool {
    is_word(text, 63, |byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

fn is_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(|part| is_label(part, 63))
}

fn is_key(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 253
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
}

fn checked(text: &str, is_valid: bool, form: &str) -> Result<String, String> {
    if is_valid { Ok(text.to_owned()) } else { Err(format!("write {form}")) }
}

/// A DNS-1123 label.
fn label(text: &str) -> Result<String, String> {
    checked(text, is_label(text, 63), "1 to 63 of a-z 0-9 -, with a letter or digit at both ends")
}

/// The name of a training, with room for the other parts of a name.
pub(crate) fn training(text: &str) -> Result<String, String> {
    checked(text, is_label(text, 32), "1 to 32 of a-z 0-9 -, with a letter or digit at both ends")
}

/// The first part of the name of a Service, which begins with a letter.
fn release(text: &str) -> Result<String, String> {
    let begins = text.starts_with(|first: char| first.is_ascii_lowercase());
    checked(text, begins && is_label(text, 40), "1 to 40 of a-z 0-9 -, with a letter first, none of - last")
}

/// A DNS-1123 subdomain.
fn subdomain(text: &str) -> Result<String, String> {
    checked(text, is_subdomain(text), "labels of a-z 0-9 - with points between, at most 253 characters")
}

fn label_value(text: &str) -> Result<String, String> {
    // The suffix -SHARED may follow.
    let is_valid = is_label_value(text) && text.len() <= 56;
    checked(text, is_valid, "1 to 56 of A-Z a-z 0-9 - _ ., with a letter or digit at both ends")
}

/// A name, with or without a domain before it.
fn qualified(text: &str) -> Result<String, String> {
    let is_valid = match text.split_once('/') {
        Some((domain, name)) => is_subdomain(domain) && is_label_value(name),
        None => is_label_value(text),
    };
    checked(text, is_valid, "NAME or DOMAIN/NAME, as nvidia.com/gpu")
}

fn image(text: &str) -> Result<String, String> {
    let is_valid = is_word(text, 512, |b| b.is_ascii_alphanumeric() || b"-_./:@".contains(&b));
    checked(text, is_valid, "an image as REGISTRY/NAME:TAG or NAME@sha256:DIGEST")
}

fn database(text: &str) -> Result<(String, String), String> {
    let (secret, key) = text.split_once(':').unwrap_or((text, "password"));
    checked(text, is_subdomain(secret) && is_key(key), "the name of a Secret, or SECRET:KEY")?;
    Ok((secret.to_owned(), key.to_owned()))
}

fn store(text: &str) -> Result<(String, String, String), String> {
    let parts: Vec<&str> = text.split(':').collect();
    let (secret, id, key) = match parts[..] {
        [secret] => (secret, "access-key-id", "secret-access-key"),
        [secret, id, key] => (secret, id, key),
        _ => ("", "", ""),
    };
    let is_valid = is_subdomain(secret) && is_key(id) && is_key(key);
    checked(text, is_valid, "the name of a Secret, or SECRET:ID_KEY:SECRET_KEY")?;
    Ok((secret.to_owned(), id.to_owned(), key.to_owned()))
}

fn variable(text: &str) -> Result<(String, String, String), String> {
    let (name, from) = text.split_once('=').unwrap_or((text, ""));
    let (secret, key) = from.split_once(':').unwrap_or((from, ""));
    let is_name = !name.is_empty()
        && !name.starts_with(|first: char| first.is_ascii_digit())
        && name.len() <= 253
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    let is_valid = is_name && is_subdomain(secret) && is_key(key);
    checked(text, is_valid, "NAME=SECRET:KEY, as KAFKA_PASSWORD=kafka:password")?;
    Ok((name.to_owned(), secret.to_owned(), key.to_owned()))
}

fn quantity(text: &str) -> Result<(String, String), String> {
    let (name, amount) = text.split_once('=').unwrap_or((text, ""));
    let digits = amount.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let suffix = &amount[digits.len()..];
    let is_number = digits.parse::<f64>().is_ok_and(|number| number > 0.0)
        && digits.bytes().all(|b| b.is_ascii_digit() || b == b'.')
        && digits.len() <= 18;
    let suffixes = ["", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    let is_valid = qualified(name).is_ok() && is_number && suffixes.contains(&suffix);
    checked(text, is_valid, "RESOURCE=QUANTITY, as cpu=500m or memory=2Gi")?;
    Ok((name.to_owned(), amount.to_owned()))
}

fn node_label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').unwrap_or((text, "-"));
    let is_valid = qualified(key).is_ok() && (value.is_empty() || is_label_value(value));
    checked(text, is_valid, "KEY=VALUE, as kubernetes.io/arch=amd64")?;
    Ok((key.to_owned(), value.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_the_forms_of_kubernetes() {
        for name in ["a", "a-1", "0"] {
            assert!(label(name).is_ok() && training(name).is_ok() && subdomain(name).is_ok(), "{name}");
        }
        for name in ["", "-", "a-", "A", "a_b", "a b", "a\n", "a/../b", "é", &"a".repeat(64), "a..b", "{{x}}"]
        {
            assert!(label(name).is_err() && training(name).is_err() && release(name).is_err(), "{name}");
            assert!(subdomain(name).is_err(), "{name}");
        }
        assert!(release("1a").is_err() && release("vision").is_ok() && subdomain("a.b-c").is_ok());
        assert!(label_value("Tesla-T4").is_ok() && label_value("a b").is_err() && label_value("").is_err());
        for name in ["cpu", "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"] {
            assert!(qualified(name).is_ok(), "{name}");
        }
        for name in ["", "/gpu", "nvidia.com/", "a/b/c", "NVIDIA.com/gpu"] {
            assert!(qualified(name).is_err(), "{name}");
        }
        for name in ["millrace", "r.example.org:5000/a/b:0.1.0", "a@sha256:00"] {
            assert!(image(name).is_ok(), "{name}");
        }
        assert!(image("a b").is_err() && image("a\"").is_err() && image("").is_err());
    }

    #[test]
    fn values_with_parts_are_read() {
        let text = |text: &str| text.to_owned();
        assert_eq!(database("d").unwrap(), (text("d"), text("password")));
        assert_eq!(store("s:a:b").unwrap(), (text("s"), text("a"), text("b")));
        assert!(store("s:a").is_err() && database("d:").is_err());
        assert_eq!(variable("A=s:k").unwrap(), (text("A"), text("s"), text("k")));
        assert!(variable("1=s:k").is_err() && variable("A=s").is_err() && variable("A").is_err());
        assert_eq!(quantity("memory=1.5Gi").unwrap(), (text("memory"), text("1.5Gi")));
        for wrong in
            ["memory", "memory=", "memory=-1", "memory=1X", "memory=0", "memory=1e3", "=1", "memory=inf"]
        {
            assert!(quantity(wrong).is_err(), "{wrong}");
        }
        assert_eq!(node_label("a/b=c").unwrap(), (text("a/b"), text("c")));
        assert!(node_label("a=b c").is_err() && node_label("=b").is_err());
    }
}
