//! A merge of texts in the Prometheus format: one HELP and TYPE for each family, its samples together.
//!
//! Each text is parsed in whole before anything of it is merged, so a half-written or hostile one adds nothing. Labels
//! that tell the texts apart are added to every sample; a text that has one of them itself is refused.
//!
//! Bounds: 16 KiB a line, 1,000 families and 50,000 samples a text, 64 MiB for all texts together.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;

/// Longest line, in bytes.
const LINE_BYTES_MAX: usize = 16 << 10;
/// Most families of a text.
const FAMILIES_MAX: usize = 1_000;
/// Most samples of a text.
const SAMPLES_MAX: usize = 50_000;
/// Most bytes of samples that are merged.
const MERGED_BYTES_MAX: usize = 64 << 20;

/// Why a text was refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Malformed {
    #[error("line {line} is no line of metrics: {reason}")]
    Line { line: usize, reason: &'static str },
    #[error("all texts together have more than 64 MiB")]
    TooLarge,
}

/// Families by name.
#[derive(Debug, Default)]
pub(crate) struct Exposition {
    families: BTreeMap<String, Family>,
    bytes: usize,
}

#[derive(Debug, Default)]
struct Family {
    help: Option<String>,
    kind: Option<String>,
    samples: Vec<Sample>,
}

#[derive(Debug)]
struct Sample {
    name: String,
    /// As they were written, between the braces.
    labels: String,
    value: String,
}

impl Exposition {
    /// Merges a text, with `labels` added to each sample. A family whose kind differs from that of an earlier text is
    /// left out; the number of those is returned.
    ///
    /// # Errors
    /// [`Malformed`], and nothing is merged.
    pub(crate) fn add(&mut self, text: &str, labels: &[(&str, &str)]) -> Result<usize, Malformed> {
        let reserved: Vec<&str> = labels.iter().map(|(name, _)| *name).collect();
        let parsed = parse(text, &reserved)?;
        let added: Vec<String> =
            labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
        let added = added.join(",");
        let size = |sample: &Sample| sample.name.len() + sample.labels.len() + sample.value.len();
        let samples = parsed.values().flat_map(|family| &family.samples);
        let bytes = samples.map(|sample| size(sample) + added.len() + 8).sum::<usize>()
            + parsed.values().filter_map(|family| family.help.as_ref()).map(String::len).sum::<usize>();
        if self.bytes + bytes > MERGED_BYTES_MAX {
            return Err(Malformed::TooLarge);
        }
        self.bytes += bytes;
        let mut left_out = 0;
        for (name, mut family) in parsed {
            for sample in &mut family.samples {
                if !sample.labels.is_empty() && !added.is_empty() {
                    sample.labels.push(',');
                }
                sample.labels.push_str(&added);
            }
            let merged = self.families.entry(name).or_insert_with(|| Family {
                help: family.help.clone(),
                kind: family.kind.clone(),
                samples: Vec::new(),
            });
            if merged.kind == family.kind {
                merged.samples.append(&mut family.samples);
            } else {
                left_out += 1;
            }
        }
        Ok(left_out)
    }

    /// Puts the families of merged texts behind those of this one. A family of another kind is left out.
    pub(crate) fn absorb(&mut self, other: Exposition) {
        self.bytes += other.bytes;
        for (name, mut family) in other.families {
            match self.families.entry(name) {
                Entry::Vacant(place) => drop(place.insert(family)),
                Entry::Occupied(mut place) if place.get().kind == family.kind => {
                    place.get_mut().samples.append(&mut family.samples);
                }
                Entry::Occupied(_) => {}
            }
        }
    }

    /// The merged text.
    pub(crate) fn render(&self) -> String {
        let mut text = String::with_capacity(self.bytes + 128 * self.families.len());
        for (name, family) in self.families.iter().filter(|(_, family)| !family.samples.is_empty()) {
            // Writing to a string cannot fail.
            if let Some(help) = &family.help {
                let _ = writeln!(text, "# HELP {name} {help}");
            }
            if let Some(kind) = &family.kind {
                let _ = writeln!(text, "# TYPE {name} {kind}");
            }
            for Sample { name, labels, value } in &family.samples {
                let _ = match labels.as_str() {
                    "" => writeln!(text, "{name} {value}"),
                    labels => writeln!(text, "{name}{{{labels}}} {value}"),
                };
            }
        }
        text
    }
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn parse(text: &str, reserved: &[&str]) -> Result<BTreeMap<String, Family>, Malformed> {
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    let (mut current, mut series, mut samples) = (None::<String>, HashSet::new(), 0);
    for (index, line) in text.lines().enumerate() {
        let malformed = |reason| Malformed::Line { line: index + 1, reason };
        if line.len() > LINE_BYTES_MAX {
            return Err(malformed("it is too long"));
        }
        let described = line
            .strip_prefix("# HELP ")
            .map(|rest| (true, rest))
            .or_else(|| line.strip_prefix("# TYPE ").map(|rest| (false, rest)));
        if let Some((is_help, rest)) = described {
            let (name, said) = rest.split_once(' ').unwrap_or((rest, ""));
            if !is_name(name, true) {
                return Err(malformed("the name of a family is none"));
            }
            if current.as_deref() != Some(name) {
                if families.contains_key(name) {
                    return Err(malformed("its family has ended above"));
                }
                if families.len() == FAMILIES_MAX {
                    return Err(malformed("there are too many families"));
                }
                families.insert(name.to_owned(), Family::default());
                current = Some(name.to_owned());
            }
            let Some(family) = families.get_mut(name) else { continue };
            if !is_help && !["counter", "gauge", "histogram", "summary", "untyped"].contains(&said) {
                return Err(malformed("there is no such type"));
            }
            let place = if is_help { &mut family.help } else { &mut family.kind };
            if place.replace(said.to_owned()).is_some() || !family.samples.is_empty() {
                return Err(malformed("its family is described already"));
            }
            continue;
        }
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        let sample = sample(line, reserved).map_err(malformed)?;
        let Some(name) = current.as_deref() else { return Err(malformed("it belongs to no family")) };
        let Some(family) = families.get_mut(name) else { continue };
        if !belongs(&sample.name, name, family.kind.as_deref()) {
            return Err(malformed("it belongs to another family, or to one without a type"));
        }
        samples += 1;
        if samples > SAMPLES_MAX {
            return Err(malformed("there are too many samples"));
        }
        if !series.insert(format!("{}{{{}", sample.name, sample.labels)) {
            return Err(malformed("the same sample is above"));
        }
        family.samples.push(sample);
    }
    Ok(families)
}

/// Whether a sample of this name is one of the family.
fn belongs(sample: &str, family: &str, kind: Option<&str>) -> bool {
    let Some(ending) = sample.strip_prefix(family) else { return false };
    match kind {
        Some("histogram") => ["_bucket", "_sum", "_count"].contains(&ending),
        Some("summary") => ["", "_sum", "_count"].contains(&ending),
        Some(_) => ending.is_empty(),
        None => false,
    }
}

fn is_name(name: &str, of_metric: bool) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '_' || (of_metric && c == ':');
    !name.is_empty() && name.chars().all(fits) && !name.starts_with(|c: char| c.is_ascii_digit())
}

/// `NAME{LABEL="VALUE",…} NUMBER`, without a time.
fn sample(line: &str, reserved: &[&str]) -> Result<Sample, &'static str> {
    let end = line.find(['{', ' ']).ok_or("it has no value")?;
    let (name, rest) = line.split_at(end);
    if !is_name(name, true) {
        return Err("the name of a sample is none");
    }
    let (labels, value) = match rest.strip_prefix('{') {
        Some(rest) => {
            let length = labels_end(rest, reserved)?;
            (rest[..length].trim_end_matches(','), &rest[length + 1..])
        }
        None => ("", rest),
    };
    let value = value.trim();
    if value.parse::<f64>().is_err() {
        return Err("its value is no number");
    }
    Ok(Sample { name: name.to_owned(), labels: labels.to_owned(), value: value.to_owned() })
}

/// The place of the brace behind the labels.
fn labels_end(text: &str, reserved: &[&str]) -> Result<usize, &'static str> {
    let mut names = HashSet::new();
    let mut at = 0;
    loop {
        let rest = &text[at..];
        if rest.starts_with('}') {
            return Ok(at);
        }
        let equals = rest.find('=').ok_or("a label has no value")?;
        let name = &rest[..equals];
        if !is_name(name, false) {
            return Err("the name of a label is none");
        }
        if reserved.contains(&name) || !names.insert(name) {
            return Err("a label comes twice");
        }
        let quoted = rest[equals + 1..].strip_prefix('"').ok_or("the value of a label has no quotes")?;
        let mut characters = quoted.char_indices();
        let length = loop {
            match characters.next() {
                None => return Err("the value of a label does not end"),
                Some((end, '"')) => break end,
                Some((_, '\\')) => match characters.next() {
                    Some((_, '\\' | '"' | 'n')) => {}
                    _ => return Err("the value of a label has an unknown escape"),
                },
                Some(_) => {}
            }
        };
        at += equals + 2 + length + 1;
        match text[at..].chars().next() {
            Some(',') => at += 1,
            Some('}') => {}
            _ => return Err("labels are not separated"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ONE: &str = "# HELP a_total Some of a.\n# TYPE a_total counter\na_total{op=\"x\"} 1\na_total 2\n\
                       # HELP h How long.\n# TYPE h histogram\nh_bucket{le=\"1\"} 3\nh_bucket{le=\"+Inf\"} 3\nh_sum 1.5\n\
                       h_count 3\n";

    #[test]
    fn samples_of_one_family_stand_together_below_one_description() {
        let mut all = Exposition::default();
        all.add("# TYPE own gauge\nown 1\n", &[]).unwrap();
        for volume in ["v", "a\"b\\c\nd"] {
            assert_eq!(all.add(ONE, &[("volume_handle", volume), ("pod", "p")]), Ok(0));
        }
        let expected = "# HELP a_total Some of a.\n# TYPE a_total counter\n\
                        a_total{op=\"x\",volume_handle=\"v\",pod=\"p\"} 1\na_total{volume_handle=\"v\",pod=\"p\"} 2\n\
                        a_total{op=\"x\",volume_handle=\"a\\\"b\\\\c\\nd\",pod=\"p\"} 1\n\
                        a_total{volume_handle=\"a\\\"b\\\\c\\nd\",pod=\"p\"} 2\n";
        let text = all.render();
        assert!(text.starts_with(expected), "{text}");
        assert!(text.ends_with("# TYPE own gauge\nown 1\n"), "{text}");
        assert_eq!(text.matches("# TYPE h histogram").count(), 1, "{text}");
        // What is merged can be merged again.
        let mut again = Exposition::default();
        again.add(&text, &[]).unwrap();
        assert_eq!(again.render(), text);
    }

    #[test]
    fn texts_that_are_cut_off_or_hostile_add_nothing() {
        let long = format!("# TYPE a gauge\na{{l=\"{}\"}} 1\n", "x".repeat(LINE_BYTES_MAX));
        let many: String =
            (0..=FAMILIES_MAX).map(|number| format!("# TYPE f{number} gauge\nf{number} 1\n")).collect();
        let texts = [
            "a 1\n",
            "# TYPE a gauge\nb 1\n",
            "# TYPE a gauge\na\n",
            "# TYPE a gauge\na one\n",
            "# TYPE a gauge\na 1 1700000000\n",
            "# TYPE a gauge\na{l=\"x} 1\n",
            "# TYPE a gauge\na{l=\"x\" 1\n",
            "# TYPE a gauge\na{l=\"x\"\"} 1\n",
            "# TYPE a gauge\na{l=x} 1\n",
            "# TYPE a gauge\na{l=\"\\q\"} 1\n",
            "# TYPE a gauge\na{l=\"x\",l=\"y\"} 1\n",
            "# TYPE a gauge\na{volume_handle=\"other\"} 1\n",
            "# TYPE a gauge\na{0=\"x\"} 1\n",
            "# TYPE a gauge\na 1\na 2\n",
            "# TYPE a gauge\na 1\n# TYPE b gauge\nb 1\n# TYPE a gauge\n",
            "# TYPE a gauge\n# TYPE a gauge\n",
            "# TYPE a gauge\na 1\n# HELP a late\n",
            "# TYPE a strange\n",
            "# TYPE a{ gauge\n",
            "# TYPE h histogram\nh 1\n",
            &long,
            &many,
        ];
        let mut all = Exposition::default();
        all.add("# TYPE own gauge\nown 1\n", &[]).unwrap();
        for text in texts {
            let refused = all.add(text, &[("volume_handle", "v")]);
            assert!(matches!(refused, Err(Malformed::Line { .. })), "{text:.80}: {refused:?}");
        }
        assert_eq!(all.render(), "# TYPE own gauge\nown 1\n");
    }

    #[test]
    fn a_family_of_another_kind_is_left_out_alone() {
        let mut all = Exposition::default();
        all.add("# TYPE a gauge\na 1\n", &[]).unwrap();
        let text = "# TYPE a counter\na 2\n# TYPE b gauge\nb 3\n";
        assert_eq!(all.add(text, &[("volume_handle", "v")]), Ok(1));
        assert_eq!(all.render(), "# TYPE a gauge\na 1\n# TYPE b gauge\nb{volume_handle=\"v\"} 3\n");
    }

    proptest! {
        /// Any text, and any cut of a right one, is merged into valid text or refused.
        #[test]
        fn the_result_is_always_valid(text in "(?s).{0,200}", cut in 0..ONE.len(), label in "(?s).{0,20}") {
            for text in [text.as_str(), &ONE[..cut]] {
                let mut all = Exposition::default();
                all.add(ONE, &[("volume_handle", "first")]).unwrap();
                let _ = all.add(text, &[("volume_handle", &label)]);
                let rendered = all.render();
                prop_assert!(Exposition::default().add(&rendered, &[]).is_ok() || label == "first", "{rendered}");
            }
        }
    }
}
