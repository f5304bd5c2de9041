//! What every command starts from: how to talk, the home, the configuration, and the engines that
//! these name.

use std::fs::{File, TryLockError};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use millrace_datafs::{Datafs, Name, VolumeSpec, private};
use millrace_streams::broker::{self, Broker};
use millrace_streams::config::KafkaConfig;
use tokio_util::sync::CancellationToken;

use crate::failure::{Exit, fail};
use crate::home::Home;
use crate::idle_cores::{DEFAULT_NANOSECONDS, halting};
use crate::logging::Switch;
use crate::output::Output;
use crate::settings::Loaded;

/// How often a command looks whether it may have, or may stop, the embedded broker.
const BROKER_POLL: Duration = Duration::from_millis(50);
/// How many times it looks for the address of a broker that another command is starting.
const BROKER_POLLS: u32 = 200;

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

    /// Reaches the topics: a Kafka cluster, the broker that already holds this home, or else the
    /// embedded broker, started on a free port for as long as the session lives.
    pub(crate) async fn topics(&self) -> Result<TopicSession> {
        let config = &self.loaded.settings.streams;
        let root = self.home.root();
        if !config.is_embedded() {
            return Ok(TopicSession {
                kafka: config.kafka(root)?,
                broker: None,
                users: None,
                stop: self.stop.clone(),
            });
        }
        let dir = broker::dir(root);
        let users = share(&root.join("topics.lock")).await?;
        let mut polls = 0;
        let broker = loop {
            if broker::running_address(&dir).is_some() {
                break None;
            }
            let mut own = config.broker.clone();
            own.listen.set_port(0);
            match Broker::start(own, &dir, CancellationToken::new()).await {
                Ok(broker) => break Some(broker),
                // Another command was faster, and says in a moment where it listens.
                Err(millrace_streams::Error::HeldByAnother { .. }) if polls < BROKER_POLLS => {
                    polls += 1;
                    tokio::time::sleep(BROKER_POLL).await;
                }
                Err(error) => return Err(error.into()),
            }
        };
        let kafka = match &broker {
            None => config.kafka(root)?,
            Some(broker) => KafkaConfig {
                bootstrap_servers: broker.addr().to_string(),
                properties: config.properties.clone(),
            },
        };
        Ok(TopicSession { kafka, broker, users: Some(users), stop: self.stop.clone() })
    }
}

/// A shared lock on the file: all commands that use the embedded broker of a home hold it, so that
/// the one that started the broker knows when the last of them is done.
async fn share(path: &Path) -> Result<File> {
    let file = private::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .with_context(|| format!("cannot open {}", path.display()))?;
    loop {
        match file.try_lock_shared() {
            Ok(()) => return Ok(file),
            // Held alone only for the moment in which a broker stops.
            Err(TryLockError::WouldBlock) => tokio::time::sleep(BROKER_POLL).await,
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("cannot lock {}", path.display()));
            }
        }
    }
}

/// Topics within reach, and the embedded broker where this command had to start it.
pub(crate) struct TopicSession {
    /// How clients reach them.
    pub(crate) kafka: KafkaConfig,
    broker: Option<Broker>,
    users: Option<File>,
    stop: CancellationToken,
}

impl TopicSession {
    /// Stops what this session started, flushed, once no other command uses it any more. A signal
    /// ends the waiting.
    pub(crate) async fn close(self) -> Result<()> {
        let Some(broker) = self.broker else { return Ok(()) };
        if let Some(users) = &self.users {
            users.unlock()?;
            let mut waiting = false;
            while users.try_lock().is_err() && !self.stop.is_cancelled() {
                if !waiting {
                    waiting = true;
                    tracing::info!("the broker stays until other commands that use it are done");
                }
                tokio::select! {
                    () = tokio::time::sleep(BROKER_POLL) => {}
                    () = self.stop.cancelled() => {}
                }
            }
        }
        Ok(broker.stop().await?)
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
