//! What every command starts from: how to talk, the home, the configuration, and the engines that
//! these name.

use anyhow::Result;
use millrace_datafs::{Datafs, Name, VolumeSpec};
use millrace_streams::broker::{self, Broker};
use millrace_streams::config::KafkaConfig;
use tokio_util::sync::CancellationToken;

use crate::home::Home;
use crate::output::Output;
use crate::settings::Loaded;

/// What a command runs with.
#[derive(Clone)]
pub(crate) struct Context {
    /// How to talk to the caller.
    pub(crate) out: Output,
    /// The home folder.
    pub(crate) home: Home,
    /// The configuration.
    pub(crate) loaded: Loaded,
    /// Cancelled by the first Ctrl-C or SIGTERM.
    pub(crate) stop: CancellationToken,
}

impl Context {
    /// Opens the volumes of this home.
    pub(crate) fn datafs(&self) -> Result<Datafs> {
        Ok(Datafs::open(self.home.root(), &self.loaded.settings.datafs)?)
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
        let dir = broker::dir(self.home.root());
        if !config.is_embedded() || broker::running_address(&dir).is_some() {
            return Ok(TopicSession { kafka: config.kafka(self.home.root())?, broker: None });
        }
        let mut own = config.broker.clone();
        own.listen.set_port(0);
        let broker = Broker::start(own, &dir, CancellationToken::new()).await?;
        let kafka = KafkaConfig {
            bootstrap_servers: broker.addr().to_string(),
            properties: config.properties.clone(),
        };
        Ok(TopicSession { kafka, broker: Some(broker) })
    }
}

/// Topics within reach, and the embedded broker where this command had to start it.
pub(crate) struct TopicSession {
    /// How clients reach them.
    pub(crate) kafka: KafkaConfig,
    broker: Option<Broker>,
}

impl TopicSession {
    /// Stops what this session started, flushed.
    pub(crate) async fn close(self) -> Result<()> {
        if let Some(broker) = self.broker {
            broker.stop().await?;
        }
        Ok(())
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
