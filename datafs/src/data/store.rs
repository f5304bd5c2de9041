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

/// Checks the URL and the options of the store without connecting to it.
pub(crate) fn check_store(config: &Config) -> Result<()> {
    let Some(url) = &config.store_url else { return Ok(()) };
    match local_path(url)? {
        Some(_) => Ok(()),
        None => open_remote(url, config).map(drop),
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
    let shown = crate::config::redacted(url.to_owned());
    let wrong = |reason: String| Error::Invalid(format!("[datafs] store_url {shown:?}: {reason}"));
    if config.store_timeout_ms == 0 {
        return Err(Error::Invalid("[datafs] store_timeout_ms must be at least 1".into()));
    }
    let (scheme, rest) = url.split_once("://").ok_or_else(|| wrong("it has no scheme".into()))?;
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    if bucket.is_empty() {
        return Err(wrong("it names no bucket".into()));
    }
    let prefix = StorePath::parse(prefix.trim_end_matches('/')).map_err(|e| wrong(e.to_string()))?;
    let mut options = Vec::with_capacity(config.store_options.len());
    for (name, value) in &config.store_options {
        options.push((name.to_ascii_lowercase(), value.text(&format!("[datafs.store_options] {name}"))?));
    }
    // Errors of the libraries contain the refused values, which may be secrets.
    let refused =
        |e: object_store::Error| wrong(Secret::hide_in(config.store_options.values(), e.to_string()));
    let unknown =
        |name: &str| Error::Invalid(format!("[datafs.store_options] {name} is no option of {scheme}"));
    // This crate retries itself: see `retry.rs`.
    let no_retries = RetryConfig { max_retries: 0, ..RetryConfig::default() };
    let connect = ClientConfigKey::ConnectTimeout;
    // Three builders of one shape, without a trait in common.
    macro_rules! build {
        ($builder:ty, $key:ty) => {{
            let mut builder = <$builder>::from_env()
                .with_url(format!("{scheme}://{bucket}"))
                .with_retry(no_retries)
                .with_config(<$key>::Client(connect), CONNECT_TIMEOUT);
            for (name, value) in options {
                let key = name.parse::<$key>().map_err(|_| unknown(&name))?;
                builder = builder.with_config(key, value);
            }
            handles(builder.build().map_err(refused)?)
        }};
    }
    let (objects, parts) = match scheme {
        "s3" | "s3a" => build!(AmazonS3Builder, AmazonS3ConfigKey),
        "gs" => build!(GoogleCloudStorageBuilder, GoogleConfigKey),
        "az" | "azure" | "abfs" | "abfss" => build!(MicrosoftAzureBuilder, AzureConfigKey),
        _ => return Err(wrong("write file://, s3://, gs:// or az://".into())),
    };
    let timeout = Duration::from_millis(config.store_timeout_ms);
    Ok(RemoteStore::new(objects, parts, prefix, shown, timeout))
}

/// Both interfaces of one store.
fn handles<S: ObjectStore + MultipartStore>(store: S) -> (Arc<dyn ObjectStore>, Arc<dyn MultipartStore>) {
    let store = Arc::new(store);
    (Arc::clone(&store) as Arc<dyn ObjectStore>, store)
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
