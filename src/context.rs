//! What every command starts from: how to talk, the home, the configuration, and the engines that
//! these name.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use millrace_datafs::{Datafs, Name, VolumeSpec};
use millrace_streams::config::KafkaConfig;
use tokio_util::sync::CancellationToken;

use crate::failure::{Exit, fail};
use crate::home::Home;
use crate::idle_cores::{DEFAULT_NANOSECONDS, halting};
use crate::logging::Switch;
use crate::output::Output;
use crate::settings::Loaded;
use crate::shared_broker::{self, Share};

/// How often a session looks whether the broker of its home is still there.
const LOST_POLL: Duration = Duration::from_secs(1);

/// What a command runs with.
#[derive(Clone)]
pub(crate) struct Context {
    /// How to talk to the caller.
    pub(crate) out: Output,
    /// The home folder.
    pub(crate) home: Home,
    /// The configuration.
    pub(crate) loaded: Loaded,
    /// What is logged, for processes that are started with the same wish.
    pub(crate) log: String,
    /// What switches this process's log while it runs.
    pub(crate) switch: Arc<Switch>,
    /// Cancelled by the first Ctrl-C or SIGTERM.
    pub(crate) stop: CancellationToken,
}

impl Context {
    /// Opens the volumes of this home.
    pub(crate) fn datafs(&self) -> Result<Datafs> {
        self.home.check_store(&self.loaded.settings.datafs)?;
        Ok(Datafs::open(self.home.root(), &self.loaded.settings.datafs)?)
    }

    /// The same where other work goes on. A signal ends the waiting for a server that does not answer.
    pub(crate) async fn volumes(&self) -> Result<Datafs> {
        let own = self.clone();
        self.apart(move || own.datafs()).await
    }

    /// Tells who runs something that programs talk to many times a second, where idle cores halt at once.
    pub(crate) fn advise_on_cores(&self) {
        if let Some(setting) = halting(Path::new("/sys")) {
            self.out.note(&format!(
                "idle cores of this virtual machine halt at once, and waking one takes longer than most requests do: \
                 `echo {DEFAULT_NANOSECONDS} > {}` sets what Linux has by default",
                setting.display()
            ));
        }
    }

    /// An error where a signal ended work before its end, so that no script takes it for done.
    pub(crate) fn interrupted(&self, what: &str) -> Result<()> {
        if self.stop.is_cancelled() {
            return fail(Exit::Failed, format!("{what} was interrupted; run it again to go on"));
        }
        Ok(())
    }

    /// Runs work on a thread of its own that may be left behind: reading a terminal or a pipe, or waiting for a server,
    /// may take for ever, so a signal ends the waiting.
    pub(crate) async fn apart<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.apart_for(Duration::ZERO, work).await
    }

    /// The same for work that looks at the signal itself, and has so long to end in order.
    pub(crate) async fn apart_for<T: Send + 'static>(
        &self,
        grace: Duration,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (sender, mut receiver) = tokio::sync::oneshot::channel();
        std::thread::Builder::new().name("apart".into()).spawn(move || {
            sender.send(work()).ok();
        })?;
        tokio::select! {
            done = &mut receiver => return done?,
            () = self.stop.cancelled() => {}
        }
        match tokio::time::timeout(grace, receiver).await {
            Ok(done) => done?,
            Err(_) => fail(Exit::Failed, "interrupted"),
        }
    }

    /// Runs blocking work (metadata, files) off the event loop.
    pub(crate) async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        tokio::task::spawn_blocking(work).await?
    }

    /// Reaches the topics: a Kafka cluster, the broker that already holds this home, or else a
    /// temporary one, which ends with the last session that uses it.
    pub(crate) async fn topics(&self) -> Result<TopicSession> {
        let config = &self.loaded.settings.streams;
        let root = self.home.root();
        if !config.is_embedded() {
            return Ok(TopicSession { kafka: config.kafka(root)?, joined: None });
        }
        let (address, share) = shared_broker::join(self).await?;
        let kafka =
            KafkaConfig { bootstrap_servers: address.to_string(), properties: config.properties.clone() };
        Ok(TopicSession { kafka, joined: Some(Joined { home: root.to_owned(), address, _share: share }) })
    }
}

/// Topics within reach, for as long as this lives.
pub(crate) struct TopicSession {
    /// How clients reach them.
    pub(crate) kafka: KafkaConfig,
    /// The broker of this home; a cluster has none.
    joined: Option<Joined>,
}

/// The broker of a home, as a session found it.
struct Joined {
    home: PathBuf,
    address: SocketAddr,
    _share: Share,
}

impl TopicSession {
    /// Whether the broker of this home has ended, or another one has taken its place at another address. The
    /// session then reaches nothing any more: a new one does. Never so for a cluster, whose clients look for its
    /// brokers themselves.
    pub(crate) fn is_lost(&self) -> bool {
        let joined = self.joined.as_ref();
        joined.is_some_and(|joined| !shared_broker::is_at(&joined.home, joined.address))
    }

    /// Waits until [`TopicSession::is_lost`].
    pub(crate) async fn lost(&self) {
        loop {
            tokio::time::sleep(LOST_POLL).await;
            if self.is_lost() {
                return;
            }
        }
    }
}

/// Creates a volume unless it exists.
pub(crate) fn ensure_volume(datafs: &Datafs, name: &Name) -> Result<()> {
    match datafs.volume_create(name) {
        Ok(_) | Err(millrace_datafs::Error::Exists { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The live volume of that name.
pub(crate) fn live(volume: &Name) -> VolumeSpec {
    VolumeSpec { volume: volume.clone(), snapshot: None }
}
