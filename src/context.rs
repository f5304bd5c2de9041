//! The context of every command: the output, the home, the configuration, and access to volumes and topics.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Result;
use millrace_datafs::{Datafs, Name, VolumeSpec};
use millrace_home::Home;
use millrace_streams::broker;
use millrace_streams::config::KafkaConfig;
use tokio_util::sync::CancellationToken;

use crate::failure::{Exit, Interrupted, fail};
use crate::idle_cores::{DEFAULT_NANOSECONDS, immediate_halt_setting};
use crate::logging::LogSwitch;
use crate::output::Output;
use crate::settings::LoadedSettings;
use crate::shared_broker::{self, BrokerShare};

/// Interval at which a session checks that its home's broker still runs.
const LOST_POLL: Duration = Duration::from_secs(1);

/// The context of a command.
#[derive(Clone)]
pub(crate) struct Context {
    /// The output to the caller.
    pub(crate) out: Output,
    /// The home folder.
    pub(crate) home: Home,
    /// The configuration.
    pub(crate) loaded: LoadedSettings,
    /// The log filter, passed on to child processes.
    pub(crate) log: String,
    /// The switch that changes this process's log filter while it runs.
    pub(crate) switch: Arc<LogSwitch>,
    /// Cancelled by the first Ctrl-C or SIGTERM.
    pub(crate) stop: CancellationToken,
}

impl Context {
    /// Opens the volumes of this home.
    pub(crate) fn datafs(&self) -> Result<Datafs> {
        Ok(self.home.volumes(&self.loaded.settings.datafs)?)
    }

    /// [`Context::datafs`] for async callers. A signal ends the wait for a server that does not answer.
    pub(crate) async fn volumes(&self) -> Result<Datafs> {
        let own = self.clone();
        self.run_abandonable(move || own.datafs()).await
    }

    /// Warns the operator of a request-serving process if idle cores halt immediately.
    pub(crate) fn advise_on_cores(&self) {
        if let Some(setting) = immediate_halt_setting(Path::new("/sys")) {
            self.out.note(&format!(
                "idle cores of this virtual machine halt at once, and waking one takes longer than most requests do: \
                 `echo {DEFAULT_NANOSECONDS} > {}` sets what Linux has by default",
                setting.display()
            ));
        }
    }

    /// Fails if a signal interrupted the work, so that no script takes it for done.
    pub(crate) fn interrupted(&self, what: &str) -> Result<()> {
        if self.stop.is_cancelled() {
            return fail(Exit::Failed, format!("{what} was interrupted; run it again to continue"));
        }
        Ok(())
    }

    /// Awaits work that changes nothing. A signal abandons it.
    pub(crate) async fn abandonable<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::select! {
            done = work => done,
            () = self.stop.cancelled() => Err(anyhow::Error::new(Interrupted)),
        }
    }

    /// Runs blocking work on a separate thread. Reading a terminal or a pipe, or waiting for a server, may
    /// block forever, so a signal abandons the thread.
    pub(crate) async fn run_abandonable<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.run_abandonable_with_grace(Duration::ZERO, work).await
    }

    /// [`Context::run_abandonable`] for work that observes the signal itself and gets `grace` to finish.
    pub(crate) async fn run_abandonable_with_grace<T: Send + 'static>(
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

    /// Connects to the topics: a Kafka cluster, the running broker of this home, or else a temporary one,
    /// which ends with its last session.
    pub(crate) async fn topics(&self) -> Result<TopicSession> {
        let config = &self.loaded.settings.streams;
        let root = self.home.root();
        if !config.is_embedded() {
            return Ok(TopicSession { kafka: config.kafka(root)?, joined: None });
        }
        Ok(self.joined(shared_broker::join(self).await?))
    }

    fn joined(&self, (address, share): (SocketAddr, BrokerShare)) -> TopicSession {
        let properties = self.loaded.settings.streams.properties.clone();
        let kafka = KafkaConfig { bootstrap_servers: address.to_string(), properties };
        let joined = HomeBroker {
            home: self.home.clone(),
            address,
            of_service: AtomicBool::new(false),
            _share: share,
        };
        joined.update_owner();
        TopicSession { kafka, joined: Some(joined) }
    }

    /// Replaces a lost session by one with the broker's successor. If a service ran the lost broker, this
    /// waits until a service runs again. False when a signal ended the wait.
    pub(crate) async fn rejoin(&self, session: &mut TopicSession) -> Result<bool> {
        let Some(lost) = session.joined.take() else {
            *session = self.topics().await?;
            return Ok(true);
        };
        let of_service = lost.of_service.load(Ordering::Relaxed);
        // While a session holds its share, a temporary broker never ends and a service cannot start.
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

/// A session with the topics; a temporary broker lives as long as one of its sessions.
pub(crate) struct TopicSession {
    /// The client configuration.
    pub(crate) kafka: KafkaConfig,
    /// The broker of this home; none for a cluster.
    joined: Option<HomeBroker>,
}

/// The broker of a home that a session uses.
struct HomeBroker {
    home: Home,
    address: SocketAddr,
    /// Whether a service runs it; false for a temporary one.
    of_service: AtomicBool,
    _share: BrokerShare,
}

impl HomeBroker {
    /// Records whether a service runs the broker. Returns whether a service waits for this temporary one to
    /// end.
    fn update_owner(&self) -> bool {
        let Some(service) = self.home.service() else { return false };
        let runs = broker::running_pid(&broker::dir(self.home.root())) == Some(service);
        if runs {
            self.of_service.store(true, Ordering::Relaxed);
        }
        !runs
    }
}

impl TopicSession {
    /// Whether the broker of this home has ended, has a successor at another address, or is a temporary one
    /// whose end a service awaits. The caller should then drop the session: [`Context::rejoin`] makes a new
    /// one. Always false for a cluster, whose clients find its brokers themselves.
    pub(crate) fn is_lost(&self) -> bool {
        let Some(joined) = &self.joined else { return false };
        joined.update_owner() || !shared_broker::answers_at(joined.home.root(), joined.address)
    }

    /// Waits until the session is lost ([`TopicSession::is_lost`]).
    pub(crate) async fn wait_until_lost(&self) {
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

/// The live volume of a name.
pub(crate) fn live(volume: &Name) -> VolumeSpec {
    VolumeSpec { volume: volume.clone(), snapshot: None }
}
