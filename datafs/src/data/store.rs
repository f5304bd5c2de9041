//! The store of a pool, from the configuration: a local directory or a bucket.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::multipart::MultipartStore;
use object_store::path::Path as StorePath;
use object_store::{ClientConfigKey, ObjectStore, RetryConfig};

use super::local::LocalStore;
use super::remote::RemoteStore;
use crate::config::{Config, Secret};
use crate::error::{Error, Result};

/// Limit for opening a connection, then it is retried; `[datafs.store_options]` can override it.
const CONNECT_TIMEOUT: &str = "5s";

/// The store of a pool.
#[derive(Debug)]
pub(super) enum Store {
    Local(LocalStore),
    Remote(Arc<RemoteStore>),
}

impl Store {
    /// Opens the store that the configuration names.
    pub(super) fn open(home: &Path, config: &Config) -> Result<Store> {
        match &config.store_url {
            None => Ok(Store::Local(LocalStore::open(&config.store_path(home))?)),
            Some(url) => match local_path(url)? {
                Some(path) => Ok(Store::Local(LocalStore::open(&path)?)),
                None => Ok(Store::Remote(Arc::new(open_remote(url, config)?))),
            },
        }
    }

    /// The directory of a local store; empty for a remote one.
    pub(super) fn root(&self) -> &Path {
        match self {
            Self::Local(local) => local.root(),
            Self::Remote(_) => Path::new(""),
        }
    }

    /// The name of the store in errors.
    pub(super) fn place(&self) -> &str {
        match self {
            Self::Local(local) => local.place(),
            Self::Remote(remote) => remote.place(),
        }
    }
}

/// The problems of the URL and the options of the store, each with its key: first what is wrong of each alone, else what
/// the store refuses of them together. Reads secrets, connects to nothing.
pub(crate) fn problems(config: &Config) -> Vec<(String, Error)> {
    let mut problems = Vec::new();
    let Some(url) = &config.store_url else { return problems };
    let address = match local_path(url) {
        Ok(Some(_)) => return problems,
        Ok(None) => Address::of(url),
        Err(error) => Err(error),
    };
    let mut add = |key: String, checked: Result<()>| problems.extend(checked.err().map(|error| (key, error)));
    add("store_timeout_ms".to_owned(), check_timeout(config));
    for (name, value) in &config.store_options {
        let known = match &address {
            Ok(address) => address.check_option(name),
            Err(_) => Ok(()),
        };
        add(format!("store_options.{name}"), known.and_then(|()| option_text(name, value).map(drop)));
    }
    add("store_url".to_owned(), address.map(drop));
    if problems.is_empty()
        && let Err(error) = open_remote(url, config)
    {
        problems.push(("store_url".to_owned(), error));
    }
    problems
}

fn check_timeout(config: &Config) -> Result<()> {
    match config.store_timeout_ms {
        0 => Err(Error::Invalid("[datafs] store_timeout_ms must be at least 1".into())),
        _ => Ok(()),
    }
}

/// The value of an option, read from where it is kept.
fn option_text(name: &str, value: &Secret) -> Result<String> {
    value.text(&format!("[datafs.store_options] {name}"))
}

/// The kinds of remote stores.
#[derive(Clone, Copy)]
enum Kind {
    S3,
    Google,
    Azure,
}

/// The URL of a remote store.
struct Address<'a> {
    kind: Kind,
    scheme: &'a str,
    bucket: &'a str,
    prefix: StorePath,
    /// The URL without secrets.
    shown: String,
}

impl<'a> Address<'a> {
    fn of(url: &'a str) -> Result<Address<'a>> {
        let shown = crate::config::redacted(url.to_owned());
        let wrong = |reason: &str| Error::Invalid(format!("[datafs] store_url {shown:?}: {reason}"));
        let (scheme, rest) = url.split_once("://").ok_or_else(|| wrong("it has no scheme"))?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err(wrong("it names no bucket"));
        }
        let prefix =
            StorePath::parse(prefix.trim_end_matches('/')).map_err(|error| wrong(&error.to_string()))?;
        let kind = match scheme {
            "s3" | "s3a" => Kind::S3,
            "gs" => Kind::Google,
            "az" | "azure" | "abfs" | "abfss" => Kind::Azure,
            _ => return Err(wrong("write file://, s3://, gs:// or az://")),
        };
        Ok(Address { kind, scheme, bucket, prefix, shown })
    }

    /// Refuses an option that this kind of store does not have.
    fn check_option(&self, name: &str) -> Result<()> {
        let name = name.to_ascii_lowercase();
        let is_known = match self.kind {
            Kind::S3 => name.parse::<AmazonS3ConfigKey>().is_ok(),
            Kind::Google => name.parse::<GoogleConfigKey>().is_ok(),
            Kind::Azure => name.parse::<AzureConfigKey>().is_ok(),
        };
        if is_known { Ok(()) } else { Err(self.unknown(&name)) }
    }

    fn unknown(&self, name: &str) -> Error {
        Error::Invalid(format!("[datafs.store_options] {name} is no option of {}", self.scheme))
    }
}

/// The directory that a `file:` URL names.
fn local_path(url: &str) -> Result<Option<PathBuf>> {
    let Some(path) = url.strip_prefix("file://") else { return Ok(None) };
    if path.starts_with('/') {
        return Ok(Some(PathBuf::from(path)));
    }
    Err(Error::Invalid(format!("[datafs] store_url {url:?}: write file:///PATH with an absolute path")))
}

fn open_remote(url: &str, config: &Config) -> Result<RemoteStore> {
    check_timeout(config)?;
    let address = Address::of(url)?;
    let (scheme, bucket) = (address.scheme, address.bucket);
    let mut options = Vec::with_capacity(config.store_options.len());
    for (name, value) in &config.store_options {
        options.push((name.to_ascii_lowercase(), option_text(name, value)?));
    }
    // Errors of the libraries contain the refused values, which may be secrets.
    let refused = |error: object_store::Error| {
        let reason = Secret::hide_in(config.store_options.values(), error.to_string());
        Error::Invalid(format!("[datafs] store_url {:?}: {reason}", address.shown))
    };
    // This crate retries itself: see `retry.rs`.
    let no_retries = RetryConfig { max_retries: 0, ..RetryConfig::default() };
    let connect = ClientConfigKey::ConnectTimeout;
    let incomplete = |needed: &str| {
        Error::Invalid(format!(
            "[datafs.store_options] have no credentials for store_url {:?}, and store_environment is false: set {needed}",
            address.shown
        ))
    };
    // Three builders of one shape, without a trait in common. Each list names options that are credentials together:
    // without all of one list, the builder would ask the machine's metadata service for some.
    macro_rules! build {
        ($builder:ty, $key:ident, $needed:literal, $([$($option:ident),+]),+) => {{
            let builder = if config.store_environment { <$builder>::from_env() } else { <$builder>::new() };
            let mut builder = builder
                .with_url(format!("{scheme}://{bucket}"))
                .with_retry(no_retries)
                .with_config($key::Client(connect), CONNECT_TIMEOUT);
            for (name, value) in options {
                let key = name.parse::<$key>().map_err(|_| address.unknown(&name))?;
                builder = builder.with_config(key, value);
            }
            let is_set = |key| builder.get_config_value(&key).is_some_and(|value| !value.is_empty());
            let lists = [$([$(is_set($key::$option)),+].iter().all(|is_set| *is_set)),+];
            if !config.store_environment && !lists.contains(&true) {
                return Err(incomplete($needed));
            }
            handles(builder.build().map_err(refused)?)
        }};
    }
    let (objects, parts) = match address.kind {
        Kind::S3 => build!(
            AmazonS3Builder,
            AmazonS3ConfigKey,
            "access_key_id and secret_access_key",
            [AccessKeyId, SecretAccessKey]
        ),
        Kind::Google => build!(
            GoogleCloudStorageBuilder,
            GoogleConfigKey,
            "service_account_key",
            [ServiceAccountKey],
            [ServiceAccount],
            [ApplicationCredentials]
        ),
        Kind::Azure => build!(
            MicrosoftAzureBuilder,
            AzureConfigKey,
            "account_name and account_key",
            [AccountName, AccessKey],
            [AccountName, SasKey],
            [AccountName, Token],
            [AccountName, ClientId, ClientSecret, AuthorityId]
        ),
    };
    let timeout = Duration::from_millis(config.store_timeout_ms);
    Ok(RemoteStore::new(objects, parts, address.prefix, address.shown, timeout))
}

/// Both interfaces of one store.
fn handles<S: ObjectStore + MultipartStore>(store: S) -> (Arc<dyn ObjectStore>, Arc<dyn MultipartStore>) {
    let store = Arc::new(store);
    (Arc::clone(&store) as Arc<dyn ObjectStore>, store)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;
    use std::process::Command;

    use futures::StreamExt as _;

    use super::*;

    /// Set in the child process of a test.
    const CHILD: &str = "MILLRACE_TEST_VARIABLES";
    /// A token in the variables of that process.
    const PLANTED: &str = "planted-token-of-the-process";

    fn open(url: &str, options: &[(&str, &str)]) -> Result<Store> {
        let options = options.iter().map(|(k, v)| ((*k).to_owned(), Secret::Text((*v).to_owned())));
        let config =
            Config { store_url: Some(url.into()), store_options: options.collect(), ..Config::default() };
        Store::open(Path::new("/nonexistent"), &config)
    }

    #[test]
    fn urls_and_options_are_checked() {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("file://{}/objects", dir.path().display());
        assert!(matches!(open(&url, &[]).unwrap(), Store::Local(_)));
        let s3 = open("s3://bucket/some/prefix", &[("region", "eu-central-1"), ("allow_http", "true")]);
        assert_eq!(s3.unwrap().place(), "s3://bucket/some/prefix");
        assert!(matches!(open("gs://bucket", &[("skip_signature", "true")]).unwrap(), Store::Remote(_)));
        let azure = [("account_name", "me"), ("access_key", "c2VjcmV0")];
        assert!(matches!(open("az://container/p", &azure).unwrap(), Store::Remote(_)));
        for (url, options, word) in [
            ("file://objects", vec![], "absolute"),
            ("bucket/prefix", vec![], "scheme"),
            ("s3:///prefix", vec![], "bucket"),
            ("ftp://bucket", vec![], "s3://"),
            ("s3://bucket", vec![("regoin", "x")], "regoin is no option"),
        ] {
            let error = open(url, &options).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn all_options_that_are_unknown_or_unreadable_are_problems() {
        let missing = |name: &str| Secret::File(crate::FromFile { file: name.into() });
        let options = [
            ("access_key_id", missing("/none/id")),
            ("regoin", Secret::Text("x".into())),
            ("secret_access_key", missing("/none/key")),
            ("region", Secret::Text("eu-central-1".into())),
        ];
        let mut config = Config {
            store_url: Some("s3://bucket".into()),
            store_options: options.map(|(name, value)| (name.to_owned(), value)).into(),
            ..Config::default()
        };
        let keys = |config: &Config| problems(config).into_iter().map(|(key, _)| key).collect::<Vec<_>>();
        let options =
            ["store_options.access_key_id", "store_options.regoin", "store_options.secret_access_key"];
        assert_eq!(keys(&config), options);
        config.store_url = Some("ftp://bucket".into());
        config.store_timeout_ms = 0;
        assert_eq!(keys(&config), ["store_timeout_ms", options[0], options[2], "store_url"]);
        config.store_url = Some("file:///objects".into());
        assert!(keys(&config).is_empty());
    }

    /// The head of the first request that a store sends for a listing.
    fn request(url: &str, options: &[(&str, &str)], store_environment: bool) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let options = [&[("allow_http", "true"), ("endpoint", endpoint.as_str())][..], options].concat();
        let options = options.iter().map(|(k, v)| ((*k).to_owned(), Secret::Text((*v).to_owned())));
        let (store_url, store_options) = (Some(url.to_owned()), options.collect());
        let config = Config { store_url, store_options, store_environment, ..Config::default() };
        let remote = open_remote(url, &config).unwrap();
        let server = std::thread::spawn(move || {
            let (mut connection, _) = listener.accept().unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                connection.read_exact(&mut byte).unwrap();
                head.push(byte[0]);
            }
            let answer = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
            connection.write_all(answer).unwrap();
            String::from_utf8(head).unwrap()
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let listed = runtime.block_on(async { remote.listing(&remote.below(&["x"]), None).next().await });
        assert!(listed.unwrap().is_err());
        server.join().unwrap()
    }

    #[test]
    fn variables_of_the_process_reach_only_stores_that_read_them() {
        if std::env::var_os(CHILD).is_none() {
            // A child, since variables of a process with threads cannot be set.
            let test = "data::store::tests::variables_of_the_process_reach_only_stores_that_read_them";
            let mut child = Command::new(std::env::current_exe().unwrap());
            child.args(["--exact", test, "--nocapture"]).env(CHILD, "1");
            for variable in ["AWS_SESSION_TOKEN", "AZURE_STORAGE_TOKEN", "GOOGLE_SERVICE_ACCOUNT"] {
                child.env(variable, PLANTED);
            }
            assert!(child.status().unwrap().success());
            return;
        }
        let keys = [("access_key_id", "id"), ("secret_access_key", "key"), ("region", "r")];
        let azure = [("account_name", "me"), ("account_key", "c2VjcmV0")];
        for (url, options) in [("s3://bucket/p", &keys[..]), ("az://container/p", &azure[..])] {
            let sent = request(url, options, true);
            assert!(sent.contains(PLANTED), "{url}: {sent}");
            let sent = request(url, options, false);
            assert!(sent.to_ascii_lowercase().contains("authorization: "), "{url}: {sent}");
            assert!(!sent.contains(PLANTED), "{url}: {sent}");
        }
        // Without credentials, the machine's identity would be used.
        for (url, needed) in [
            ("s3://bucket", "secret_access_key"),
            ("gs://bucket", "service_account_key"),
            ("az://container", "account_key"),
        ] {
            let config =
                Config { store_url: Some(url.into()), store_environment: false, ..Config::default() };
            let error = open_remote(url, &config).err().unwrap().to_string();
            assert!(error.contains(needed) && error.contains("store_environment"), "{error}");
        }
    }
}
