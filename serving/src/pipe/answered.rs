//! Answers without a commit: a crash between both leaves answers behind. The next run reads them at the
//! ends of the output topics and does not answer their records again.

use std::collections::HashSet;
use std::time::Duration;

use millrace_streams::topic::{self, Consumer, Records};

use super::output::{MODEL_HEADER, PIPE_HEADER, SOURCE_HEADER, Writer, identity};
use super::progress::Progress;
use super::{CHUNK_BYTES_MAX, CHUNK_ROWS_MAX};
use crate::config::PipeConfig;
use crate::error::Result;

/// How long one wait for the ends of the topics lasts.
const POLL: Duration = Duration::from_millis(250);

/// A record at the end of an output topic that answers one of the input.
struct Answer {
    place: (i32, i64),
    /// [`identity`] of the pipe; earlier releases wrote none.
    pipe: Option<String>,
    /// Name of the model; dead letters have none.
    model: Option<String>,
}

/// The ends of the output and dead-letter topics, as many records as one chunk answers: there is never
/// more than one chunk between two commits.
pub(super) struct Tail {
    answers: Vec<Answer>,
}

impl Tail {
    /// Reads what the brokers had appended when it was called.
    pub(super) async fn read(writer: &Writer<'_>) -> Result<Tail> {
        let config = writer.config;
        let chunk = i64::try_from(config.batch_rows_max.max(CHUNK_ROWS_MAX)).unwrap_or(i64::MAX);
        let mut tail = Tail { answers: Vec::new() };
        for name in [config.output.clone(), config.dead_letter_topic()] {
            let ends = match topic::watermarks(&writer.kafka, &name).await {
                // Made when the first record cannot be predicted.
                Err(millrace_streams::Error::UnknownTopic { .. }) => continue,
                ends => ends?,
            };
            if ends.values().all(|(low, high)| low == high) {
                continue;
            }
            let start: Vec<(String, i32, i64)> = ends
                .iter()
                .map(|(partition, (low, high))| (name.clone(), *partition, *low.max(&(high - chunk))))
                .collect();
            let mut consumer = Consumer::assign(&writer.kafka, &start).await?;
            let is_read = |consumer: &Consumer| {
                consumer
                    .positions()
                    .iter()
                    .all(|((_, partition), next)| ends.get(partition).is_none_or(|(_, high)| next >= high))
            };
            while !is_read(&consumer) {
                match consumer.next(CHUNK_ROWS_MAX, CHUNK_BYTES_MAX, POLL).await {
                    Ok(Some(batch)) => tail.add(&Records::new(&batch)?, config),
                    Ok(None) | Err(millrace_streams::Error::Undecodable { .. }) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(tail)
    }

    fn add(&mut self, records: &Records<'_>, config: &PipeConfig) {
        for index in 0..records.len() {
            let headers = records.headers(index);
            let header = |wanted: &str| headers.iter().rev().find(|(name, _)| *name == wanted)?.1;
            let text = |wanted: &str| Some(String::from_utf8_lossy(header(wanted)?).into_owned());
            if let Some(place) = header(SOURCE_HEADER).and_then(|source| place(source, &config.input)) {
                let model = text(MODEL_HEADER).map(|model| match model.rsplit_once('/') {
                    Some((name, _)) => name.to_owned(),
                    None => model,
                });
                self.answers.push(Answer { place, pipe: text(PIPE_HEADER), model });
            }
        }
    }

    /// Whether positions that an earlier release kept by name and input may be those of this pipe: not when
    /// all answers of that release come from other models.
    pub(super) fn allows_adoption(&self, config: &PipeConfig) -> bool {
        let unnamed = self.answers.iter().filter(|answer| answer.pipe.is_none());
        let mut models = unnamed.filter_map(|answer| answer.model.as_deref()).peekable();
        models.peek().is_none() || models.any(|model| model == config.model)
    }
}

/// Places of the input topic, by partition and offset, that this pipe answered since the last commit.
#[derive(Debug, Default)]
pub(super) struct Answered {
    places: HashSet<(i32, i64)>,
}

impl Answered {
    pub(super) fn new(tail: Tail, config: &PipeConfig, progress: &Progress) -> Answered {
        let own = identity(config);
        let by_this_pipe = |answer: &Answer| match &answer.pipe {
            Some(pipe) => *pipe == own,
            None => progress.adopted && answer.model.as_ref().is_none_or(|model| *model == config.model),
        };
        let uncommitted =
            |(partition, offset): (i32, i64)| progress.next(partition).is_none_or(|next| offset >= next);
        let answers = tail.answers.iter().filter(|answer| by_this_pipe(answer));
        let places: HashSet<_> = answers.map(|answer| answer.place).filter(|at| uncommitted(*at)).collect();
        if !places.is_empty() {
            tracing::info!(
                pipe = config.name,
                records = places.len(),
                "answered before the last commit was made, not again"
            );
        }
        Answered { places }
    }

    /// Whether the record was answered; says so once.
    pub(super) fn take(&mut self, partition: i32, offset: i64) -> bool {
        !self.places.is_empty() && self.places.remove(&(partition, offset))
    }
}

/// `topic/partition/offset` of the input topic; `None` for anything else, which another writer put there.
fn place(source: &[u8], input: &str) -> Option<(i32, i64)> {
    let mut parts = std::str::from_utf8(source).ok()?.rsplitn(3, '/');
    let offset = parts.next()?.parse().ok()?;
    let partition = parts.next()?.parse().ok()?;
    (parts.next()? == input).then_some((partition, offset))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_places_of_the_input_count() {
        assert_eq!(place(b"in/3/41", "in"), Some((3, 41)));
        for other in [&b"out/3/41"[..], b"in/3", b"in/x/41", b"in/3/", b"", b"\xff/1/2"] {
            assert_eq!(place(other, "in"), None);
        }
    }
}
