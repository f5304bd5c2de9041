//! Which records after the last commit were answered already: a crash between the answers and the
//! commit leaves answers behind, and what they answer is not answered again.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use millrace_streams::topic::{self, Consumer, Records};

use super::output::{SOURCE_HEADER, Writer};
use super::progress::Progress;
use super::{CHUNK_BYTES_MAX, CHUNK_ROWS_MAX};
use crate::error::Result;

/// How long one wait for the ends of the topics lasts.
const POLL: Duration = Duration::from_millis(250);
/// How long the ends may stay silent before they count as read: offsets of deleted or control
/// records never come.
const SILENCE_MAX: Duration = Duration::from_secs(5);

/// Places of the input topic, by partition and offset, that were answered since the last commit.
#[derive(Debug, Default)]
pub(super) struct Answered {
    places: HashSet<(i32, i64)>,
}

impl Answered {
    /// Reads the ends of the output and dead-letter topics, as many records as one chunk answers:
    /// there is never more than one chunk between two commits. Sees what the brokers had appended when
    /// it was called.
    pub(super) async fn read(writer: &Writer<'_>, progress: &Progress) -> Result<Answered> {
        let config = writer.config;
        let chunk = i64::try_from(config.batch_rows_max.max(CHUNK_ROWS_MAX)).unwrap_or(i64::MAX);
        let mut start = Vec::new();
        let mut left = 0;
        for name in [config.output.clone(), config.dead_letter_topic()] {
            let ends = match topic::watermarks(&writer.kafka, &name).await {
                // Made when the first record cannot be predicted.
                Err(millrace_streams::Error::UnknownTopic { .. }) => continue,
                ends => ends?,
            };
            for (partition, (low, high)) in ends {
                let from = low.max(high.saturating_sub(chunk));
                if from < high {
                    left += high - from;
                    start.push((name.clone(), partition, from));
                }
            }
        }
        let mut answered = Answered::default();
        if start.is_empty() {
            return Ok(answered);
        }
        let mut consumer = Consumer::assign(&writer.kafka, &start).await?;
        let mut heard = Instant::now();
        while left > 0 && heard.elapsed() < SILENCE_MAX {
            let Some(batch) = consumer.next(CHUNK_ROWS_MAX, CHUNK_BYTES_MAX, POLL).await? else {
                continue;
            };
            heard = Instant::now();
            let records = Records::new(&batch)?;
            for index in 0..records.len() {
                left -= 1;
                let headers = records.headers(index);
                let source = headers.iter().rev().find(|(name, _)| *name == SOURCE_HEADER);
                let place = source.and_then(|(_, value)| place((*value)?, &config.input));
                if let Some((partition, offset)) = place
                    && progress.next(partition).is_none_or(|next| offset >= next)
                {
                    answered.places.insert((partition, offset));
                }
            }
        }
        if !answered.places.is_empty() {
            let records = answered.places.len();
            tracing::info!(
                pipe = config.name,
                records,
                "answered before the last commit was made, not again"
            );
        }
        Ok(answered)
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
