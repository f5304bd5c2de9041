//! Measurements shared between calls: one at a time for each source, fresh for a second.

use std::collections::HashMap;
use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use millrace_datafs::Datafs;
use millrace_home::Exit;
use millrace_serving::PipeConfig;
use millrace_streams::KafkaConfig;
use tokio::sync::{Mutex, OwnedMutexGuard, Semaphore};
use tonic::Status;

use super::lag;
use super::queue_time::{self, History};
use super::trigger::Source;
use crate::context::{Context, TopicSession};
use crate::{exit, output};

/// Most sources that are remembered; the one that was not asked for longest makes room.
pub(crate) const SOURCES_MAX: usize = 256;
/// Most measurements at a time.
pub(crate) const AT_ONCE_MAX: usize = 16;
/// Age up to which a measurement, or its error, answers further calls.
const FRESH: Duration = Duration::from_secs(1);
/// Longest wait of a call for its measurement. Brokers that do not answer take 10 s.
const DEADLINE: Duration = Duration::from_secs(20);

/// A value with what bounds its use.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Measurement {
    /// Records of lag, or milliseconds of queue time.
    pub(crate) value: f64,
    /// Partitions of the topic: more replicas would have nothing to read.
    pub(crate) partitions: Option<u64>,
}

/// What is remembered of a source.
#[derive(Debug, Default)]
struct State {
    last: Option<(Instant, Result<Measurement, Status>)>,
    history: History,
    /// What the last measurement found missing.
    missing: Option<String>,
}

impl State {
    /// Notes what does not exist; true if that is news, and is to be logged.
    fn note_missing(&mut self, missing: Option<String>) -> bool {
        let is_news = missing.is_some() && missing != self.missing;
        self.missing = missing;
        is_news
    }
}

/// Time of the last use, and the state.
type Slot = (Instant, Arc<Mutex<State>>);

/// Measures sources; clones share everything.
#[derive(Clone)]
pub(crate) struct Measurements {
    context: Context,
    datafs: Datafs,
    client: reqwest::Client,
    /// The topics, from the first lag on.
    session: Arc<Mutex<Option<TopicSession>>>,
    slots: Arc<StdMutex<HashMap<Source, Slot>>>,
    at_once: Arc<Semaphore>,
}

impl Measurements {
    /// Measures over open volumes, and the topics and networks of the context.
    pub(crate) fn new(context: Context, datafs: Datafs) -> Result<Measurements> {
        Ok(Measurements {
            context,
            datafs,
            client: queue_time::client()?,
            session: Arc::default(),
            slots: Arc::default(),
            at_once: Arc::new(Semaphore::new(AT_ONCE_MAX)),
        })
    }

    /// The current value of a source, at most a second old.
    ///
    /// # Errors
    /// UNAVAILABLE when brokers, metadata or replicas do not answer, NOT_FOUND, FAILED_PRECONDITION for a topic that
    /// was created again, INVALID_ARGUMENT for a job of another topic, RESOURCE_EXHAUSTED.
    pub(crate) async fn measure(&self, source: &Source) -> Result<Measurement, Status> {
        let state = self.slot(source)?;
        let found = tokio::time::timeout(DEADLINE, async {
            let state = state.lock_owned().await;
            if let Some((at, found)) = &state.last
                && at.elapsed() < FRESH
            {
                return found.clone();
            }
            let permit = Arc::clone(&self.at_once).acquire_owned().await;
            let (own, source) = (self.clone(), source.clone());
            // A caller that gives up does not end the measurement, which holds its place until then.
            let measuring = tokio::spawn(async move {
                let found = own.renew(&source, state).await;
                drop(permit);
                found
            });
            measuring
                .await
                .unwrap_or_else(|error| Err(Status::internal(format!("a measurement failed: {error}"))))
        });
        found.await.unwrap_or_else(|_| {
            let what = source.metric();
            Err(Status::unavailable(format!(
                "{what}: no measurement within {} s; try again",
                DEADLINE.as_secs()
            )))
        })
    }

    /// Ends the session with a broker of this home that is gone, or whose end a service awaits.
    pub(crate) async fn release_lost(&self) {
        let mut session = self.session.lock().await;
        if session.as_ref().is_some_and(TopicSession::is_lost) {
            *session = None;
        }
    }

    /// The state of a source.
    fn slot(&self, source: &Source) -> Result<Arc<Mutex<State>>, Status> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((used, state)) = slots.get_mut(source) {
            *used = Instant::now();
            return Ok(Arc::clone(state));
        }
        if slots.len() >= SOURCES_MAX {
            let idle = slots.iter().filter(|(_, (_, state))| Arc::strong_count(state) == 1);
            let Some(oldest) = idle.min_by_key(|(_, (used, _))| *used).map(|(source, _)| source.clone())
            else {
                return Err(Status::resource_exhausted(format!(
                    "{SOURCES_MAX} other triggers are being measured; start another scaler"
                )));
            };
            slots.remove(&oldest);
        }
        let state = Arc::<Mutex<State>>::default();
        slots.insert(source.clone(), (Instant::now(), Arc::clone(&state)));
        Ok(state)
    }

    /// Measures, and remembers the outcome.
    async fn renew(&self, source: &Source, mut state: OwnedMutexGuard<State>) -> Result<Measurement, Status> {
        let found = self.take(source, &mut state).await.map_err(|error| {
            tracing::warn!(metric = source.metric(), error = output::one_line(&error), "no measurement");
            status(&error)
        });
        state.last = Some((Instant::now(), found.clone()));
        found
    }

    async fn take(&self, source: &Source, state: &mut State) -> Result<Measurement> {
        match source {
            Source::Job { job, topic, volume } => {
                let datafs = self.datafs.clone();
                let (job, of_topic, volume) = (job.clone(), topic.clone(), volume.clone());
                let read = move || lag::of_job(&datafs, &job, &of_topic, &volume);
                self.behind(topic, self.context.blocking(read).await?, state).await
            }
            Source::Pipe { pipe, topic, output, model, volume } => {
                let config = PipeConfig {
                    name: pipe.clone(),
                    input: topic.clone(),
                    output: output.clone(),
                    model: model.clone(),
                    ..PipeConfig::default()
                };
                let (datafs, volume) = (self.datafs.clone(), volume.clone());
                let read = move || lag::of_pipe(&datafs, &config, &volume);
                self.behind(topic, self.context.blocking(read).await?, state).await
            }
            Source::Model { model, version, endpoints, window } => {
                let (of, window) = ((model.as_str(), *version), Duration::from_secs(*window));
                let value =
                    queue_time::measure(&self.client, &mut state.history, of, endpoints, window).await?;
                Ok(Measurement { value, partitions: None })
            }
        }
    }

    /// The lag of a consumer behind a topic. Logs once what does not exist.
    async fn behind(&self, topic: &str, recorded: lag::Recorded, state: &mut State) -> Result<Measurement> {
        let lag = lag::behind(&self.kafka().await?, topic, &recorded.offsets).await?;
        let missing = recorded.missing.clone().unwrap_or_default();
        if state.note_missing(recorded.missing) {
            tracing::warn!(
                topic,
                missing,
                "the lag is the whole topic: right before the consumer's first commit, else correct the trigger's names"
            );
        }
        Ok(lag.into())
    }

    /// The topics: a cluster, or the broker of this home.
    async fn kafka(&self) -> Result<KafkaConfig> {
        let mut session = self.session.lock().await;
        if session.as_ref().is_some_and(TopicSession::is_lost) {
            *session = None;
        }
        let open = match session.take() {
            Some(open) => open,
            None => self.context.topics().await?,
        };
        Ok(session.insert(open).kafka.clone())
    }
}

impl From<lag::Lag> for Measurement {
    fn from(lag: lag::Lag) -> Measurement {
        Measurement { value: lag.records as f64, partitions: Some(lag.partitions) }
    }
}

/// The status of an error. One without a more specific code is UNAVAILABLE, so that KEDA tries again.
fn status(error: &anyhow::Error) -> Status {
    let message = output::one_line(error);
    match exit::code(error) {
        Exit::Usage => Status::invalid_argument(message),
        Exit::NotFound => Status::not_found(message),
        Exit::Conflict => Status::failed_precondition(message),
        Exit::Corrupt => Status::data_loss(message),
        _ => Status::unavailable(message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_logged_once_until_it_changes() {
        let mut state = State::default();
        let mut note = |missing: Option<&str>| state.note_missing(missing.map(str::to_owned));
        assert!(note(Some("volume a")) && !note(Some("volume a")));
        assert!(note(Some("job j")) && !note(None) && note(Some("job j")));
    }
}
