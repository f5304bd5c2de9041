//! Metrics scraper of `millrace serve top`: latencies and waiting requests by version, from the Prometheus
//! text format, whose lines `millrace scaler` reads, too.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::Result;
use millrace_leaf::error_chain;

/// Deadline for the metrics request.
const PATIENCE: Duration = Duration::from_secs(5);
/// Largest response, in bytes.
const BYTES_MAX: usize = 64 << 20;
/// Longest line of a response, in bytes.
const LINE_BYTES_MAX: usize = 64 << 10;
/// The histogram of request latencies, in seconds.
const LATENCY: &str = "millrace_serving_request_seconds_bucket";
/// Requests that wait for a session, under Triton's name.
const WAITING: &str = "nv_inference_pending_request_count";

/// Requests metrics from an address.
pub(super) struct Scraper {
    client: reqwest::Client,
    address: String,
}

impl Scraper {
    pub(super) fn new(address: &str) -> Result<Scraper> {
        let client = reqwest::Client::builder().timeout(PATIENCE).no_proxy().build()?;
        Ok(Scraper { client, address: address.to_owned() })
    }

    /// The current metrics, or why they are unavailable.
    pub(super) async fn scrape(&self) -> Result<Scrape, String> {
        let mut scrape = Scrape::default();
        metrics_lines(&self.client, &self.address, BYTES_MAX, |line| scrape.add(line)).await?;
        scrape.sort();
        Ok(scrape)
    }
}

/// Gives each line of a server's metrics to `take`, at most `bytes_max` bytes of them, or says why they are
/// unavailable. Only one line is in memory, of at most 64 KiB, beside the buffer of the connection.
pub(crate) async fn metrics_lines(
    client: &reqwest::Client,
    address: &str,
    bytes_max: usize,
    mut take: impl FnMut(&str),
) -> Result<(), String> {
    let url = format!("http://{address}/metrics");
    let failed = |error: reqwest::Error| {
        // The last cause is the informative one: the others describe the library's internal steps.
        let cause = error_chain::causes(&error).last().map_or(String::new(), |cause| format!(": {cause}"));
        format!("{url} cannot be read{cause}")
    };
    let mut response = client.get(&url).send().await.map_err(failed)?;
    if !response.status().is_success() {
        return Err(format!("{url} answers {}", response.status()));
    }
    let mut lines = LineReader::default();
    let mut bytes = 0_usize;
    while let Some(piece) = response.chunk().await.map_err(failed)? {
        bytes = bytes.saturating_add(piece.len());
        if bytes > bytes_max {
            return Err(format!("{url} gives more than {bytes_max} bytes"));
        }
        if !lines.read(&piece, &mut take) {
            return Err(format!("{url} gives a line of more than {LINE_BYTES_MAX} bytes"));
        }
    }
    lines.end(&mut take);
    Ok(())
}

/// Lines out of pieces of a text.
#[derive(Debug, Default)]
struct LineReader {
    /// The line that has not ended yet.
    begun: Vec<u8>,
}

impl LineReader {
    /// Gives each line that ends in the piece to `take`. False if one is too long.
    fn read(&mut self, piece: &[u8], take: &mut impl FnMut(&str)) -> bool {
        for part in piece.split_inclusive(|byte| *byte == b'\n') {
            if self.begun.len() + part.len() > LINE_BYTES_MAX {
                return false;
            }
            self.begun.extend_from_slice(part);
            if part.ends_with(b"\n") {
                self.end(take);
            }
        }
        true
    }

    /// Gives what is left to `take`.
    fn end(&mut self, take: &mut impl FnMut(&str)) {
        let line = String::from_utf8_lossy(&self.begun);
        let line = line.trim_end_matches(['\n', '\r']);
        if !line.is_empty() {
            take(line);
        }
        self.begun.clear();
    }
}

/// Metrics by model and version.
#[derive(Debug, Default)]
pub(super) struct Scrape {
    latencies: HashMap<(String, String), Latencies>,
    waiting: HashMap<(String, String), u64>,
}

/// Cumulative request counts by latency bound in seconds, ascending; the last bound is infinite.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Latencies(Vec<(f64, u64)>);

impl Scrape {
    /// Adds a line of the metrics.
    fn add(&mut self, line: &str) {
        let wanted = |name: &str| name == LATENCY || name == WAITING;
        if !line.split_once('{').is_some_and(|(name, _)| wanted(name)) {
            return;
        }
        let Some((name, labels, value)) = sample(line) else { return };
        let label = |wanted: &str| labels.iter().find(|(name, _)| name == wanted).map(|(_, value)| value);
        let (Some(model), Some(version)) = (label("model"), label("version")) else { return };
        let key = (model.clone(), version.clone());
        match (name, label("le").and_then(|bound| bound.parse().ok())) {
            (LATENCY, Some(bound)) => {
                self.latencies.entry(key).or_default().0.push((bound, value as u64));
            }
            (LATENCY, None) => {}
            _ => {
                self.waiting.insert(key, value as u64);
            }
        }
    }

    /// Sorts the bounds of latencies, after the last line.
    fn sort(&mut self) {
        for latencies in self.latencies.values_mut() {
            latencies.0.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        }
    }

    pub(super) fn latencies(&self, key: &(String, String)) -> Option<&Latencies> {
        self.latencies.get(key)
    }

    pub(super) fn waiting(&self, key: &(String, String)) -> Option<u64> {
        self.waiting.get(key).copied()
    }
}

impl Latencies {
    /// The increase since `old`; everything if there is no `old` or the counters restarted.
    pub(super) fn since(&self, old: Option<&Latencies>) -> Latencies {
        let same = old.filter(|old| {
            old.0.len() == self.0.len()
                && self.0.iter().zip(&old.0).all(|(new, old)| new.0 == old.0 && new.1 >= old.1)
        });
        let before = |at: usize| same.map_or(0, |old| old.0[at].1);
        Latencies(
            self.0.iter().enumerate().map(|(at, (bound, count))| (*bound, count - before(at))).collect(),
        )
    }

    /// The latency quantile in seconds, interpolated within a bucket. For the last bucket, which has no upper
    /// bound, its lower bound. None without requests.
    pub(super) fn quantile(&self, share: f64) -> Option<f64> {
        let total = self.0.last()?.1;
        let rank = share * total as f64;
        let mut lower = (0.0, 0);
        for (bound, count) in &self.0 {
            if *count > lower.1 && *count as f64 >= rank {
                if bound.is_infinite() {
                    return Some(lower.0);
                }
                let part = (rank - lower.1 as f64) / (count - lower.1) as f64;
                return Some(lower.0 + (bound - lower.0) * part.clamp(0.0, 1.0));
            }
            lower = (*bound, *count);
        }
        None
    }
}

/// Name, labels and value of a sample.
pub(crate) type Sample<'a> = (&'a str, Vec<(String, String)>, f64);

/// Parses a line; `None` if it is malformed.
pub(crate) fn sample(line: &str) -> Option<Sample<'_>> {
    let (name, mut rest) = line.split_once('{')?;
    let mut labels = Vec::new();
    while !rest.starts_with('}') {
        let (label, after) = rest.split_once("=\"")?;
        let mut value = String::new();
        let mut characters = after.char_indices();
        let end = loop {
            match characters.next()? {
                (at, '"') => break at + 1,
                (_, '\\') => value.push(match characters.next()?.1 {
                    'n' => '\n',
                    other => other,
                }),
                (_, character) => value.push(character),
            }
        };
        labels.push((label.trim_start_matches(',').trim().to_owned(), value));
        rest = &after[end..];
    }
    let value = rest.get(1..)?.split_whitespace().next()?.parse().ok()?;
    Some((name, labels, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metric_lines_are_parsed() {
        let (name, labels, value) = sample(r#"a{b="c",d="e\"}\\\n, f"} 1.5 1700000000"#).unwrap();
        assert_eq!((name, value), ("a", 1.5));
        assert_eq!(labels, [("b".into(), "c".into()), ("d".into(), "e\"}\\\n, f".into())]);
        assert!(sample("a{} +Inf").unwrap().2.is_infinite());
        for malformed in ["a 1", "a{b=\"c\"", "a{b=\"c} 1", "a{b} 1", "a{b=\"c\"} x", "a{b=\"\\", "a{}"] {
            assert!(sample(malformed).is_none(), "{malformed}");
        }
    }

    #[test]
    fn latencies_and_queue_lengths_are_split_by_version() {
        let text = "# TYPE x histogram\n\
            millrace_serving_request_seconds_bucket{model=\"m\",version=\"1\",le=\"+Inf\"} 10\n\
            millrace_serving_request_seconds_bucket{model=\"m\",version=\"1\",le=\"0.001\"} 4\n\
            millrace_serving_request_seconds_bucket{model=\"m\",version=\"1\",le=\"0.002\"} 8\n\
            nv_inference_pending_request_count{model=\"m\",version=\"1\"} 3\n\
            nv_inference_pending_request_count{model=\"m\"} 7\n";
        let mut scrape = Scrape::default();
        text.lines().for_each(|line| scrape.add(line));
        scrape.sort();
        let key = ("m".to_owned(), "1".to_owned());
        assert_eq!(scrape.waiting(&key), Some(3));
        let latencies = scrape.latencies(&key).unwrap();
        assert_eq!(latencies.0, [(0.001, 4), (0.002, 8), (f64::INFINITY, 10)]);
        assert_eq!(scrape.latencies(&("m".into(), "2".into())), None);
    }

    #[test]
    fn lines_are_the_same_in_pieces_of_every_length_and_bounded() {
        let text = "a 1\r\n\nb 2\n\u{e9} 3";
        for length in 1..=text.len() {
            let (mut lines, mut reader) = (Vec::new(), LineReader::default());
            let mut take = |line: &str| lines.push(line.to_owned());
            assert!(text.as_bytes().chunks(length).all(|piece| reader.read(piece, &mut take)));
            reader.end(&mut take);
            assert_eq!(lines, ["a 1", "b 2", "\u{e9} 3"], "{length}");
        }
        let mut reader = LineReader::default();
        let refused = (0..=LINE_BYTES_MAX / 1024).find(|_| !reader.read(&[b'x'; 1024], &mut |_: &str| {}));
        assert_eq!(refused, Some(LINE_BYTES_MAX / 1024));
        assert!(reader.begun.len() <= LINE_BYTES_MAX);
    }

    #[test]
    fn quantiles_lie_in_their_buckets() {
        let latencies = |counts: [u64; 3]| {
            Latencies(vec![(1.0, counts[0]), (2.0, counts[1]), (f64::INFINITY, counts[2])])
        };
        let all = latencies([4, 8, 8]);
        assert_eq!([0.0, 0.25, 0.5, 0.75, 1.0].map(|q| all.quantile(q).unwrap()), [0.0, 0.5, 1.0, 1.5, 2.0]);
        // In the last bucket, the result is its lower bound.
        assert_eq!(latencies([4, 8, 10]).quantile(0.99), Some(2.0));
        // Only the increase counts, unless the counters restarted.
        assert_eq!(latencies([4, 9, 9]).since(Some(&all)).quantile(0.5), Some(1.5));
        assert_eq!(latencies([1, 1, 1]).since(Some(&all)), latencies([1, 1, 1]));
        assert_eq!(all.since(None), all);
        assert_eq!(all.since(Some(&all)).quantile(0.5), None);
        assert_eq!(Latencies::default().quantile(0.5), None);
    }
}
