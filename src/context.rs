//! What every command starts from: how to talk, the home, the configuration, and the engines that
//! these name.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Result;
use millrace_datafs::{Datafs, Name, VolumeSpec};
use millrace_streams::broker;
use millrace_streams::config::KafkaConfig;
use tokio_util::sync::CancellationToken;

use crate::failure::{Exit, Interrupted, fail};
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
            Err(_) => Err(anyhow::Error::new(Interrupted)),
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
        Ok(self.joined(shared_broker::join(self).await?))
    }

    fn joined(&self, (address, share): (SocketAddr, Share)) -> TopicSession {
        let properties = self.loaded.settings.streams.properties.clone();
        let kafka = KafkaConfig { bootstrap_servers: address.to_string(), properties };
        let joined =
            Joined { home: self.home.clone(), address, of_service: AtomicBool::new(false), _share: share };
        joined.look();
        TopicSession { kafka, joined: Some(joined) }
    }

    /// Puts a session with the broker's successor in the place of a lost one, which may wait as long as no service of
    /// this home is there. False when a signal ended the wait.
    pub(crate) async fn rejoin(&self, session: &mut TopicSession) -> Result<bool> {
        let Some(lost) = session.joined.take() else {
            *session = self.topics().await?;
            return Ok(true);
        };
        let of_service = lost.of_service.load(Ordering::Relaxed);
        // With its share a temporary broker would never end, and keep a service from starting.
        drop(lost);
        match shared_broker::rejoin(self, of_service).await? {
            Some(found) => {
                *session = self.joined(found);
                Ok(true)
            }
            None => Ok(false),
        }
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
    home: Home,
    address: SocketAddr,
    /// Whether a service runs it; false for a temporary one.
    of_service: AtomicBool,
    _share: Share,
}

impl Joined {
    /// Notes whether a service runs the broker; whether one waits for the end of a temporary one.
    fn look(&self) -> bool {
        let Some(service) = self.home.service() else { return false };
        let runs = broker::running_pid(&broker::dir(self.home.root())) == Some(service);
        if runs {
            self.of_service.store(true, Ordering::Relaxed);
        }
        !runs
    }
}

impl TopicSession {
    /// Whether the broker of this home has ended, another one has taken its place at another address, or a service of
    /// this home waits for the end of this temporary one. The session is then to be given up: [`Context::rejoin`]
    /// makes a new one. Never so for a cluster, whose clients look for its brokers themselves.
    pub(crate) fn is_lost(&self) -> bool {
        let Some(joined) = &self.joined else { return false };
        joined.look() || !shared_broker::is_at(joined.home.root(), joined.address)
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
