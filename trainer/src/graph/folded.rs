//! Tensors that PyTorch's exporter rearranged from parameters ahead, where training them would not train the parameters.
//!
//! A tensor such as `transpose` of a weight takes its place in training: each element stands for one of the weight. That
//! fails if elements of a parameter are twice among the trained tensors, which would move apart: beside the parameter
//! itself, in two tensors, or twice in one.

use std::collections::{HashMap, HashSet};

use super::GraphError;
use super::builder::NodeRef;
use super::initializers::stem;

/// Functions that take a part of a tensor: two of them may hold different elements of one parameter.
const PARTS: &[&str] =
    &["chunk", "getitem", "index", "narrow", "select", "slice", "split", "split_with_sizes", "unbind"];
/// Functions that may hold an element of their operands several times.
const REPEATS: &[&str] = &["cat", "embedding", "expand", "index", "index_select", "repeat", "stack"];

/// A trained tensor.
pub(super) struct Stand<'a> {
    pub(super) name: &'a str,
    pub(super) shape: &'a [usize],
    /// Only of what was rearranged.
    pub(super) elements: Vec<f32>,
    /// Parameters that the exporter rearranged it from; none if it is a parameter.
    pub(super) parameters: Vec<&'a str>,
    /// Functions that did.
    pub(super) functions: Vec<&'a str>,
}

impl Stand<'_> {
    fn is_any(&self, functions: &[&str]) -> bool {
        self.functions.iter().chain([&self.name]).any(|name| functions.contains(&stem(name)))
    }

    /// Hashes of the parts along each axis that hold different elements, all axes in turn. Others tell nothing.
    fn slices(&self) -> Vec<Vec<Vec<u32>>> {
        let mut after = self.elements.len();
        let mut found = Vec::new();
        for &size in self.shape {
            let outer = after;
            after = after.checked_div(size).unwrap_or(0);
            let slice = |at: usize| -> Vec<u32> {
                let parts = self.elements.chunks(outer.max(1));
                parts
                    .filter_map(|part| part.get(at * after..(at + 1) * after))
                    .flatten()
                    .map(|value| value.to_bits())
                    .collect()
            };
            found.push(
                (0..size).map(slice).filter(|slice| slice.iter().any(|value| *value != slice[0])).collect(),
            );
        }
        found
    }

    /// Whether an element stands for the same one of a parameter as another.
    fn repeats(&self) -> bool {
        if !self.is_any(REPEATS) {
            return false;
        }
        if let [size] = *self.shape {
            let bits: Vec<u32> = self.elements.iter().map(|value| value.to_bits()).collect();
            let is_copied = |times: usize| {
                size % times == 0
                    && bits.chunks(size / times).skip(1).all(|part| part == &bits[..size / times])
            };
            return size >= 4
                && bits.iter().any(|value| *value != bits[0])
                && [2, 3, 4].into_iter().any(is_copied);
        }
        self.slices().into_iter().any(|slices| {
            let mut seen = HashSet::new();
            !slices.into_iter().all(|slice| seen.insert(slice))
        })
    }

    /// Whether both may hold an element of a parameter that they share.
    fn overlaps(&self, other: &Stand<'_>) -> bool {
        if !self.is_any(PARTS) || !other.is_any(PARTS) {
            return true;
        }
        let mine: HashSet<Vec<u32>> = self.slices().into_iter().flatten().collect();
        other.slices().into_iter().flatten().any(|slice| mine.contains(&slice))
    }
}

/// Refuses trained tensors of which two elements stand for one of a parameter.
pub(super) fn check(stands: &[Stand<'_>]) -> Result<(), GraphError> {
    let mut holders: HashMap<&str, Vec<&Stand<'_>>> = HashMap::new();
    for stand in stands {
        let site = NodeRef { op: "initializer".to_owned(), node: stand.name.to_owned() };
        let refuse = |parameter: &str, reason: String| {
            Err(site.form(format!(
                "the exporter computed it ahead from the parameter {parameter}, {reason}, and training would move both \
                 apart (export with optimize=False)"
            )))
        };
        if !stand.parameters.is_empty() && stand.repeats() {
            return refuse(&stand.parameters.join(", "), "of which it has elements twice".to_owned());
        }
        for &parameter in &stand.parameters {
            let before = holders.entry(parameter).or_default();
            let is_itself = |other: &&Stand<'_>| other.parameters.is_empty() && other.name == parameter;
            if let Some(other) = stands
                .iter()
                .find(is_itself)
                .or_else(|| before.iter().find(|other| other.overlaps(stand)).copied())
            {
                return refuse(parameter, format!("of which {} holds elements as well", other.name));
            }
            before.push(stand);
        }
    }
    Ok(())
}
