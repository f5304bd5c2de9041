//! The report of `millrace model quantize`: sizes, times, differences.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use millrace_serving::comparison::OutputDifference;
use millrace_trainer::quantize::{Kept, Layer};
use serde::Serialize;

use crate::output::{Output, bytes, count, duration};

/// Reasons shown to people; programs get all.
const REASONS_MAX: usize = 8;

/// A quantized version compared with its source.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) model: String,
    /// The source version.
    pub(super) from: u64,
    /// The version that was written; none beyond the limit.
    pub(super) version: Option<u64>,
    pub(super) bytes_before: u64,
    pub(super) bytes_after: u64,
    /// Rows of the runs that were timed.
    pub(super) run_rows: u64,
    /// Median time of a run on one thread, in microseconds.
    pub(super) run_us_before: f64,
    pub(super) run_us_after: f64,
    /// Whether the inputs were random.
    #[serde(skip)]
    pub(super) random: bool,
    /// A description of the inputs that both versions ran on.
    pub(super) sample: String,
    pub(super) records: u64,
    /// Largest mean difference of an output at which the version is written.
    pub(super) limit: f64,
    pub(super) outputs: Vec<OutputDifference>,
    pub(super) layers: Vec<Layer>,
    pub(super) kept: Vec<Kept>,
}

impl Report {
    /// The largest mean difference of an output.
    pub(super) fn worst(&self) -> f64 {
        self.outputs.iter().map(|output| output.mean).fold(0.0, f64::max)
    }

    pub(super) fn is_within_limit(&self) -> bool {
        self.worst() <= self.limit
    }

    /// The metrics of the manifest: the worst of all outputs.
    pub(super) fn metrics(&self) -> BTreeMap<String, f64> {
        let max = self.outputs.iter().map(|output| output.max).fold(0.0, f64::max);
        let agreement = self.outputs.iter().filter_map(|output| output.agreement).reduce(f64::min);
        let mut metrics = BTreeMap::from([
            ("quantization_mean_difference".to_owned(), self.worst()),
            ("quantization_max_difference".to_owned(), max),
        ]);
        metrics.extend(agreement.map(|agreement| ("quantization_agreement".to_owned(), agreement)));
        metrics
    }

    pub(super) fn show(&self, out: Output) -> Result<()> {
        let time = |us: f64| duration(Duration::from_secs_f64(us / 1e6));
        let mut rows = vec![
            vec!["size".to_owned(), change(bytes(self.bytes_before), bytes(self.bytes_after))],
            vec![
                format!("run of {} rows", count(self.run_rows)),
                change(time(self.run_us_before), time(self.run_us_after)),
            ],
            vec!["compared on".to_owned(), format!("{} records: {}", count(self.records), self.sample)],
        ];
        for output in &self.outputs {
            let mut said = format!("mean {}, largest {}", part(output.mean), part(output.max));
            if let Some(agreement) = output.agreement {
                said.push_str(&format!("; the same label in {}", part(agreement)));
            }
            rows.push(vec![format!("{} differs by", output.output), said]);
        }
        rows.push(vec![
            "quantized".to_owned(),
            format!("{} matrix products", count(self.layers.len() as u64)),
        ]);
        for (reason, nodes) in self.reasons().into_iter().take(REASONS_MAX) {
            rows.push(vec!["stays as it was".to_owned(), format!("{reason}: {nodes}")]);
        }
        let title = match self.version {
            Some(version) => format!("{} version {version}, from version {}", self.model, self.from),
            None => format!("{} version {}, nothing written", self.model, self.from),
        };
        out.table(self, &["model", &title], rows)?;
        if self.random {
            out.note("The inputs were random: differences on real ones may be others (--sample FILE compares on those).");
        }
        Ok(())
    }

    /// The reasons for unquantized nodes, the most frequent first, with a count and an example.
    fn reasons(&self) -> Vec<(String, String)> {
        let mut found: BTreeMap<&str, (u64, &Kept)> = BTreeMap::new();
        for kept in &self.kept {
            found.entry(&kept.reason).or_insert((0, kept)).0 += 1;
        }
        let mut found: Vec<_> = found.into_iter().collect();
        found.sort_by_key(|(_, (nodes, _))| std::cmp::Reverse(*nodes));
        let shown = |(reason, (nodes, first)): (&str, (u64, &Kept))| {
            let first = format!("{} {}", first.operator, first.node);
            let others = if nodes > 1 { format!(" and {} more", count(nodes - 1)) } else { String::new() };
            (reason.to_owned(), format!("{first}{others}"))
        };
        found.into_iter().map(shown).collect()
    }
}

/// Formats a share of a whole.
pub(super) fn part(part: f64) -> String {
    if part.is_infinite() {
        return "infinite".to_owned();
    }
    let percent = part * 100.0;
    if percent == 0.0 || percent >= 0.01 { format!("{percent:.2}%") } else { format!("{percent:.1e}%") }
}

fn change(before: String, after: String) -> String {
    format!("{before} → {after}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_are_shown_with_significant_digits() {
        assert_eq!(part(0.0), "0.00%");
        assert_eq!(part(0.0512), "5.12%");
        assert_eq!(part(0.000_001), "1.0e-4%");
        assert_eq!(part(f64::INFINITY), "infinite");
    }
}
