//! The handle of an open datafs: opens metadata engine and object pool, starts the background collection.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use millrace_leaf::private;

use crate::compact::{self, Compact, CompactReport};
use crate::config::{Config, LOCK_WAIT_MS_MAX};
use crate::data::keyring::Keyring;
use crate::data::{ObjectPool, store_problems};
use crate::deletion_lock;
use crate::error::{Error, Result};
use crate::fs::shared::{InUse, Shared};
use crate::gc::GcReport;
use crate::identity;
use crate::meta::closing::Closing;
use crate::meta::metadata::Metadata;
use crate::meta::postgres::target::Target;
use crate::meta::postgres::{self, Postgres};
use crate::meta::reserve::Reserve;
use crate::meta::sqlite::Sqlite;
use crate::meta_url::MetaUrl;
use crate::metrics;
use crate::name::Name;
use crate::session::{self, Session};
use crate::upkeep;

/// The volumes under one home folder. A clone is another handle to the same state. Every method blocks and
/// may be called from any thread (inside an async runtime, through `spawn_blocking`).
#[derive(Debug, Clone)]
pub struct Datafs {
    // Dropped first.
    pub(crate) in_use: Arc<InUse>,
    pub(crate) shared: Arc<Shared>,
}

impl Datafs {
    /// Opens the state below `home`; creates missing folders and files. Several processes may have the same
    /// home open.
    ///
    /// Fails with [`Error::NewerFormat`] when a newer Millrace has written it, and with
    /// [`Error::NotWritable`] when this process may not write it.
    pub fn open(home: &Path, config: &Config) -> Result<Datafs> {
        let shared = open_shared(home, config)?;
        identity::check(&shared.meta, &shared.pool)?;
        upkeep::start(&shared)?;
        Ok(Datafs { in_use: InUse::of(&shared), shared })
    }
}

/// [`Datafs::open`] without the check of the store's identity and without a collector.
pub(crate) fn open_shared(home: &Path, config: &Config) -> Result<Arc<Shared>> {
    check_lock_wait(config)?;
    metrics::export();
    let sessions_dir = config.sessions_path(home);
    let (meta, session) = match &config.meta_url {
        Some(url) => open_server(home, config, url)?,
        None => open_file(home, config, &sessions_dir)?,
    };
    if config.meta_url.is_some() {
        deletion_lock::forget_ended(&meta, home);
    }
    if config.store_url.is_none() {
        create_dir(&config.store_path(home))?;
    }
    let pool = ObjectPool::open(home, config, session.id()).inspect_err(|_| session.end(&meta))?;
    Ok(Shared::new(home, config, meta, pool, session))
}

impl Datafs {
    /// The settings that [`Datafs::open`] would refuse, each with its key: bounds, URLs, options, and secrets whose files
    /// or variables cannot be read. Reads files, connects to nothing and writes nothing.
    #[must_use]
    pub fn problems(home: &Path, config: &Config) -> Vec<(String, Error)> {
        let mut problems = Vec::new();
        let mut add = |key: &str, checked: Result<()>| {
            if let Err(error) = checked {
                problems.push((key.to_owned(), error));
            }
        };
        add("lock_wait_ms", check_lock_wait(config));
        if let Some(url) = &config.meta_url {
            add("session_lease_ms", check_lease(config));
            add("meta_url", target(home, config, url).map(drop));
        }
        for (name, key) in &config.encryption_keys {
            let encryption_keys = [(name.clone(), key.clone())].into();
            let alone = Config { encryption_keys, ..Config::default() };
            add(&format!("encryption_keys.{name}"), Keyring::open(&alone).map(drop));
        }
        problems.extend(store_problems(config));
        problems
    }

    /// The home folder.
    pub fn home(&self) -> &Path {
        &self.shared.home
    }

    /// Waits for the end of this and all its clones and views; does not keep the metadata open. A process that has
    /// opened volumes must wait for it before it forks.
    pub fn closing(&self) -> Closing {
        self.shared.open_mark.closing()
    }

    /// Collects garbage now; returns when nothing more can be collected at this time. Runs beside all other
    /// operations; may be stopped (or killed) anywhere.
    pub fn gc(&self) -> Result<GcReport> {
        self.shared.collect()
    }

    /// Rewrites scattered files and mostly dead objects, in one volume or in all. The next garbage collection
    /// ([`Datafs::gc`]) frees the space. May be stopped (or killed) anywhere. Volumes share packs, so packs
    /// are compacted in any case.
    pub fn compact(&self, volume: Option<&Name>, what: &Compact) -> Result<CompactReport> {
        let find = |name: &Name| self.shared.meta.view(|txn| self.find(txn, name));
        compact::compact(&self.shared, volume.map(find).transpose()?, what)
    }
}

/// Opens the metadata file of this machine. On a full disk, releases the reserve until the file opens or nothing
/// is left: a process that takes its own back meanwhile, and the one that fills the disk, may be faster.
fn open_file(home: &Path, config: &Config, sessions_dir: &Path) -> Result<(Metadata, Session)> {
    let meta_path = config.meta_path(home);
    create_dir(meta_path.parent().unwrap_or(home))?;
    let reserve = Reserve::of(&meta_path);
    let mut released = reserve.let_open();
    let open = || {
        let engine = Sqlite::open(&meta_path, Duration::from_millis(config.lock_wait_ms))?;
        let meta = Metadata::grouped(engine)?;
        create_dir(sessions_dir)?;
        let session = Session::start(&meta, sessions_dir)?;
        Ok((meta, session))
    };
    let opened = loop {
        match open() {
            Err(Error::NoSpace { .. }) if reserve.release() => released = true,
            opened => break opened,
        }
    };
    if released || opened.is_ok() {
        reserve.take_back();
    }
    opened
}

fn check_lock_wait(config: &Config) -> Result<()> {
    if (1..=LOCK_WAIT_MS_MAX).contains(&config.lock_wait_ms) {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "[datafs] lock_wait_ms must be 1 to {LOCK_WAIT_MS_MAX}, a day, not {}",
        config.lock_wait_ms
    )))
}

fn check_lease(config: &Config) -> Result<()> {
    if (1_000..=86_400_000).contains(&config.session_lease_ms) {
        return Ok(());
    }
    Err(Error::Invalid("[datafs] session_lease_ms must be 1000 to 86400000, a day".into()))
}

/// The server, schema and password of the metadata.
fn target(home: &Path, config: &Config, url: &MetaUrl) -> Result<Target> {
    let passfile = config.meta_passfile.as_ref().map(|path| home.join(path));
    Target::parse(url.reveal(), &config.meta_schema, passfile.as_deref())
}

/// Opens the metadata on a server, which machines share.
fn open_server(home: &Path, config: &Config, url: &MetaUrl) -> Result<(Metadata, Session)> {
    check_lease(config)?;
    let target = target(home, config, url)?;
    let options = postgres::Options {
        wait: Duration::from_millis(config.lock_wait_ms),
        connections_max: config.meta_connections_max,
        cache_bytes_max: config.meta_cache_bytes_max,
        lease: Duration::from_millis(config.session_lease_ms),
    };
    let id = session::leased_id()?;
    let meta = Metadata::direct(Arc::new(Postgres::open(target, id, &options)?));
    let session = Session::start_leased(&meta, id)?;
    Ok((meta, session))
}

/// Creates a folder and its missing parents durably: everything durable is below it.
fn create_dir(path: &Path) -> Result<()> {
    let missing = path.ancestors().take_while(|folder| !folder.exists()).count();
    private::create_dir_all(path).map_err(|e| Error::io("create folder", path, e))?;
    for parent in path.ancestors().skip(1).take(missing) {
        let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        fs::File::open(parent)
            .and_then(|folder| folder.sync_all())
            .map_err(|e| Error::io("sync folder", parent, e))?;
    }
    Ok(())
}
