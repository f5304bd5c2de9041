//! Homes of volumes: where metadata and file data of a call's volumes are, from the driver's own configuration and
//! the secrets of the call.
//!
//! Without secrets, a call uses the driver's own home. With `meta_url` and `store_url` in its secret, it uses the home
//! of a tenant: the secret then brings all credentials, and none of the driver's own reach it. A secret without these
//! URLs may only add encryption keys to the driver's own home: it changes neither its store nor its keys. A secret is
//! content of a tenant, so it names no files of the node, no variables of the driver and no local sockets.

use std::collections::HashMap;
use std::error::Error as StdError;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use millrace_datafs::{Config, Datafs, MetaUrl, Secret};
use millrace_leaf::private;
use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};
use tonic::{Code, Status};

use crate::caches::Caches;
use crate::keys::Keys;
use crate::refusal::{invalid, refused};
use crate::server_config;

/// Most homes that stay open at the same time.
const OPEN_MAX: usize = 8;
/// Most keys of a secret.
const KEYS_MAX: usize = 64;
/// Longest value of a secret, in bytes.
const VALUE_BYTES_MAX: usize = 64 * 1024;
/// Options of a store that a secret may set.
const STORE_OPTIONS: [&str; 11] = [
    "access_key_id",
    "account_key",
    "account_name",
    "allow_http",
    "endpoint",
    "region",
    "sas_key",
    "secret_access_key",
    "service_account_key",
    "token",
    "virtual_hosted_style_request",
];
/// Options of a metadata URL that a secret may set. Others name files or sockets of the node.
const META_OPTIONS: [&str; 4] = ["application_name", "connect_timeout", "sslmode", "sslrootcert"];
/// Folders of certificates that `sslrootcert` may name.
const CERTIFICATES: [&str; 2] = ["/etc/ssl/", "/etc/millrace/"];

/// Opens the volumes of a home folder.
pub type OpenVolumes =
    dyn Fn(&Path, &Config) -> Result<Datafs, Box<dyn StdError + Send + Sync>> + Send + Sync;

/// The home of a call's volumes.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    /// Its folder.
    pub(crate) root: PathBuf,
    /// Its configuration, with the values of secrets but for encryption keys.
    pub(crate) config: Config,
    /// The encryption keys of the call's secret.
    pub(crate) keys: Keys,
}

/// All homes that the driver knows.
pub(crate) struct Homes {
    own: Place,
    /// The folder for homes of tenants.
    tenants: PathBuf,
    caches: Caches,
    open: Box<OpenVolumes>,
    opened: Mutex<HashMap<String, (Datafs, Instant)>>,
}

impl fmt::Debug for Homes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Homes").field("own", &self.own.root).finish_non_exhaustive()
    }
}

impl Place {
    /// The configuration file of a process that uses this home and takes the encryption keys of the call's secret from the
    /// files of the folder `keys`. It holds other secrets.
    pub(crate) fn config_text(&self, keys: &Path) -> Result<String, Status> {
        text_of(&self.keys.in_files(&self.config, keys))
    }

    /// A number that changes with every setting and every secret.
    pub(crate) fn digest(&self) -> Result<String, Status> {
        let keys = self.keys.reveal();
        let keys = if keys.is_empty() { String::new() } else { format!("\n{keys:?}") };
        let text = format!("{}\n{}{keys}", self.root.display(), text_of(&self.config)?);
        Ok(hex::encode(Sha256::digest(text)))
    }
}

fn text_of(config: &Config) -> Result<String, Status> {
    server_config::text(config).map_err(|_| {
        // The error may repeat a value.
        refused(Code::Internal, "cannot write the configuration of the volumes' home as TOML".into())
    })
}

impl Homes {
    /// The driver's own home at `root`, and the homes of tenants below `tenants`.
    pub(crate) fn new(root: PathBuf, config: Config, tenants: PathBuf, open: Box<OpenVolumes>) -> Homes {
        let caches = Caches::new(&config, &tenants);
        let own = Place { root, config, keys: Keys::default() };
        Homes { own, tenants, caches, open, opened: Mutex::default() }
    }

    /// The caches of tenants.
    pub(crate) fn caches(&self) -> &Caches {
        &self.caches
    }

    /// The home that the secrets of a call name.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT`, which names the key and never a value.
    pub(crate) fn place(&self, secrets: &HashMap<String, String>) -> Result<Place, Status> {
        if secrets.len() > KEYS_MAX {
            return Err(invalid(
                "secrets",
                format!("{} keys, at most {KEYS_MAX} are allowed", secrets.len()),
            ));
        }
        let field = |key: &str| format!("secrets[{key:?}]");
        if let Some((key, _)) = secrets.iter().find(|(_, value)| value.len() > VALUE_BYTES_MAX) {
            return Err(invalid(&field(key), format!("is longer than {VALUE_BYTES_MAX} bytes")));
        }
        let of_tenant = secrets.contains_key("meta_url") || secrets.contains_key("store_url");
        let (mut config, mut keys) = (self.own.config.clone(), Keys::default());
        if of_tenant {
            config.store_options.clear();
            config.encryption_keys.clear();
            config.meta_passfile = None;
            config.store_environment = false;
            for needed in ["meta_url", "store_url"] {
                if !secrets.contains_key(needed) {
                    return Err(invalid(&field(needed), "is required: a secret gives both URLs or none"));
                }
            }
        }
        for (key, value) in secrets {
            let wrong = |reason: String| invalid(&field(key), reason);
            // The trailing line break of a file that `kubectl create secret --from-file` read.
            let value = value.trim_end_matches(['\n', '\r']);
            match key.split_once('.') {
                None if key == "meta_url" => {
                    check_meta_url(value).map_err(wrong)?;
                    config.meta_url = Some(MetaUrl::from(value.to_owned()));
                }
                None if key == "store_url" => {
                    check_store_url(value, secrets).map_err(wrong)?;
                    config.store_url = Some(value.to_owned());
                }
                None if key == "meta_schema" && of_tenant => config.meta_schema = value.to_owned(),
                None if key == "meta_schema" => {
                    return Err(wrong("needs meta_url and store_url in the same secret".into()));
                }
                // The driver would sign requests with its own credentials and send them to the tenant's endpoint.
                Some(("store_options", _)) if !of_tenant => {
                    return Err(wrong("needs meta_url and store_url in the same secret".into()));
                }
                Some(("store_options", option)) if STORE_OPTIONS.contains(&option) => {
                    config.store_options.insert(option.to_owned(), Secret::Text(value.to_owned()));
                }
                Some(("encryption_keys", name))
                    if !of_tenant && self.own.config.encryption_keys.contains_key(name) =>
                {
                    return Err(wrong(
                        "is a key of the driver's own configuration: choose another name".into(),
                    ));
                }
                Some(("encryption_keys", name)) if !name.is_empty() => keys.insert(name, value),
                _ => {
                    return Err(wrong(format!(
                        "is not a key of a home: use meta_url, meta_schema, store_url, encryption_keys.NAME or \
                         store_options.OPTION with one of {}",
                        STORE_OPTIONS.join(", ")
                    )));
                }
            }
        }
        if !of_tenant {
            return Ok(Place { root: self.own.root.clone(), config, keys });
        }
        let identity = identity(&config);
        // Files of the driver's own home, by absolute paths, are no tenant's.
        let unset = Config::default();
        (config.meta_file, config.store_dir) = (unset.meta_file, unset.store_dir);
        // The caches of all tenants together have the bound of the driver's own.
        (config.cache_dir, config.cache_shared_bound) = (self.caches.of(&identity), true);
        Ok(Place { root: self.tenants.join(identity), config, keys })
    }

    /// The volumes of a home. Blocks until metadata and store answer.
    ///
    /// # Errors
    /// `UNAVAILABLE` when the home cannot be opened.
    pub(crate) fn volumes(&self, place: &Place) -> Result<Datafs, Status> {
        let digest = place.digest()?;
        if let Some((datafs, used)) = self.opened.lock().get_mut(&digest) {
            *used = Instant::now();
            return Ok(datafs.clone());
        }
        let failed = |reason: &dyn fmt::Display| {
            refused(
                Code::Unavailable,
                format!("cannot open the volumes of the home {}: {reason}", place.root.display()),
            )
        };
        private::create_dir_all(&place.root).map_err(|error| failed(&error))?;
        // Keys are read while the volumes are being opened, and not later.
        let (config, _files) = place.keys.in_memory(&place.config).map_err(|error| failed(&error))?;
        let datafs = (self.open)(&place.root, &config)
            .map_err(|error| failed(&millrace_leaf::error_chain::one_line(error.as_ref())))?;
        let mut opened = self.opened.lock();
        let mut closed = None;
        if opened.len() >= OPEN_MAX
            && let Some(oldest) = opened.iter().min_by_key(|(_, (_, used))| *used).map(|(key, _)| key.clone())
        {
            closed = opened.remove(&oldest);
        }
        opened.insert(digest, (datafs.clone(), Instant::now()));
        drop(opened);
        if let Some(closed) = closed {
            // Closing a home may wait for its server, which is not the server of this call.
            let closing = std::thread::Builder::new().name("csi-close".into()).spawn(move || drop(closed));
            if let Err(error) = closing {
                tracing::warn!(%error, "a home was closed without a thread of its own");
            }
        }
        Ok(datafs)
    }

    /// Whether this is the driver's own home.
    pub(crate) fn is_own(&self, place: &Place) -> bool {
        place.root == self.own.root
    }

    /// Closes a home whose session has ended, so that the next call opens it anew.
    pub(crate) fn forget(&self, place: &Place) {
        if let Ok(digest) = place.digest() {
            let closed = self.opened.lock().remove(&digest);
            drop(closed);
        }
    }
}

/// The name of a tenant's folder. It stays the same when a password or a key changes, so that the cache in it does.
fn identity(config: &Config) -> String {
    let url = config.meta_url.as_ref().map(|url| url.redacted().to_string()).unwrap_or_default();
    let store = config.store_url.as_deref().unwrap_or_default();
    let digest = Sha256::digest(format!("{url}\n{}\n{store}", config.meta_schema));
    hex::encode(&digest[..16])
}

/// Checks the URL of a metadata server that a tenant gives.
fn check_meta_url(url: &str) -> Result<(), String> {
    let rest = url.strip_prefix("postgres://").or_else(|| url.strip_prefix("postgresql://"));
    let rest = rest.ok_or("begins with postgres://")?;
    let (server, options) = rest.split_once('?').unwrap_or((rest, ""));
    let (user, place) =
        server.split_once('@').ok_or("contains user and password: postgres://USER:PASSWORD@…")?;
    match user.split_once(':') {
        // Without one, the client would send a password of the driver.
        Some((user, password)) if !user.is_empty() && !password.is_empty() => {}
        _ => return Err("contains user and password: postgres://USER:PASSWORD@…".into()),
    }
    let host = place.split(['/', ',']).next().unwrap_or_default();
    if host.is_empty() || place.contains('%') || place.contains('@') {
        return Err("names the host of a server; a password with @ is written with %40".into());
    }
    for option in options.split('&').filter(|option| !option.is_empty()) {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        if !META_OPTIONS.contains(&name) {
            return Err(format!("may have only these options: {}", META_OPTIONS.join(", ")));
        }
        let is_allowed = |value: &str| {
            CERTIFICATES.iter().any(|folder| value.starts_with(folder))
                && !value.contains("..")
                && !value.contains('%')
        };
        if name == "sslrootcert" && !is_allowed(value) {
            return Err(format!("sslrootcert names a file below {}", CERTIFICATES.join(" or ")));
        }
    }
    Ok(())
}

/// Checks the URL of a store that a tenant gives, and that its credentials are there.
fn check_store_url(url: &str, secrets: &HashMap<String, String>) -> Result<(), String> {
    let needed: &[&str] = match url.split_once("://") {
        Some(("s3", bucket)) if !bucket.is_empty() => &["access_key_id", "secret_access_key"],
        Some(("gs", bucket)) if !bucket.is_empty() => &["service_account_key"],
        Some(("az", container)) if !container.is_empty() => &["account_name", "account_key"],
        _ => return Err("is s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX".into()),
    };
    for option in needed {
        let key = format!("store_options.{option}");
        if secrets.get(&key).is_none_or(|value| value.trim().is_empty()) {
            return Err(format!(
                "needs {key} in the same secret; credentials of the driver are not used for it"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
