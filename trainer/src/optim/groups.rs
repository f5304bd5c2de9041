//! Groups of parameters: those that stay as they are, and those without weight decay.

use std::ops::Range;

use super::OptimError;
use crate::engine::ParamLayout;

/// Names that a message lists.
const LISTED: usize = 6;

/// A stretch of the flat vector whose parameters train alike.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stretch {
    pub(super) range: Range<usize>,
    /// Whether the weight decay applies.
    pub(super) decays: bool,
}

/// The parameters of a model that train, and those of them that decay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Groups {
    elements: usize,
    stretches: Vec<Stretch>,
    /// For each state, whether it stays as it is.
    frozen_states: Vec<bool>,
}

impl Groups {
    /// All `elements` weights train and decay.
    pub fn all(elements: usize) -> Groups {
        Groups {
            elements,
            stretches: vec![Stretch { range: 0..elements, decays: true }],
            frozen_states: Vec::new(),
        }
    }

    /// Parameters that a pattern of `freeze` matches do not train, and those that one of `no_decay` matches do
    /// not decay. States that a pattern of `freeze` matches do not move. In a pattern, `*` stands for any characters.
    ///
    /// Fails when a pattern matches no parameter, or when nothing is left to train.
    pub fn new(layout: &ParamLayout, freeze: &[String], no_decay: &[String]) -> Result<Groups, OptimError> {
        for (key, patterns) in [("freeze", freeze), ("no_decay", no_decay)] {
            let states = if key == "freeze" { &layout.states[..] } else { &[] };
            let unmatched = |pattern: &&String| {
                layout.params.iter().chain(states).all(|param| !matches(pattern, &param.name))
            };
            if let Some(pattern) = patterns.iter().find(unmatched) {
                let names: Vec<&str> = layout.params.iter().take(LISTED).map(|p| p.name.as_str()).collect();
                let more = if layout.params.len() > LISTED { ", …" } else { "" };
                let names = names.join(", ");
                let reason = format!("{pattern:?} matches no parameter of the model; it has {names}{more}");
                return Err(OptimError::Pattern { key, reason });
            }
        }
        let any = |patterns: &[String], name: &str| patterns.iter().any(|pattern| matches(pattern, name));
        let mut stretches: Vec<Stretch> = Vec::new();
        for param in layout.params.iter().filter(|param| !any(freeze, &param.name)) {
            let (range, decays) = (param.range.clone(), !any(no_decay, &param.name));
            match stretches.last_mut() {
                Some(last) if last.decays == decays && last.range.end == range.start => {
                    last.range.end = range.end
                }
                _ => stretches.push(Stretch { range, decays }),
            }
        }
        if stretches.is_empty() && !freeze.is_empty() {
            let reason = "the patterns match every parameter of the model, so that nothing is left to train";
            return Err(OptimError::Pattern { key: "freeze", reason: reason.to_owned() });
        }
        let frozen_states = layout.states.iter().map(|state| any(freeze, &state.name)).collect();
        Ok(Groups { elements: layout.elements(), stretches, frozen_states })
    }

    /// Elements of the flat vector.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// For each state of the layout, whether it stays as it is.
    pub fn frozen_states(&self) -> &[bool] {
        &self.frozen_states
    }

    pub(super) fn stretches(&self) -> &[Stretch] {
        &self.stretches
    }

    /// Whether the elements of a parameter train.
    pub(crate) fn trains(&self, range: &Range<usize>) -> bool {
        self.decays(range).is_some()
    }

    /// Whether a parameter decays; none if it does not train.
    pub(crate) fn decays(&self, range: &Range<usize>) -> Option<bool> {
        let holds = |stretch: &&Stretch| stretch.range.start <= range.start && range.end <= stretch.range.end;
        self.stretches.iter().find(holds).map(|stretch| stretch.decays)
    }

    /// Sets the elements of `grad` that do not train to 0.
    pub(crate) fn clear_frozen(&self, grad: &mut [f32]) {
        let mut next = 0;
        for stretch in &self.stretches {
            grad[next..stretch.range.start].fill(0.0);
            next = stretch.range.end;
        }
        grad[next..].fill(0.0);
    }
}

/// Whether `pattern`, in which `*` stands for any characters, matches the whole `name`.
fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(rest) = name.strip_prefix(parts.next().unwrap_or_default()) else { return false };
    let mut parts: Vec<&str> = parts.collect();
    // Without a star, nothing may be left.
    let Some(last) = parts.pop() else { return rest.is_empty() };
    let mut rest = rest;
    for part in parts {
        match rest.split_once(part) {
            Some((_, behind)) => rest = behind,
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Param;

    fn layout() -> ParamLayout {
        let mut start = 0;
        let params = ["body.0.weight", "body.0.bias", "body.1.weight", "head.weight", "head.bias"]
            .into_iter()
            .map(|name| {
                let range = start..start + 2;
                start = range.end;
                Param { name: name.into(), shape: vec![2], range }
            })
            .collect();
        ParamLayout { params, states: vec![] }
    }

    fn groups(freeze: &[&str], no_decay: &[&str]) -> Result<Vec<(Range<usize>, bool)>, String> {
        let owned = |patterns: &[&str]| patterns.iter().map(|p| (*p).to_owned()).collect::<Vec<_>>();
        let groups = Groups::new(&layout(), &owned(freeze), &owned(no_decay)).map_err(|e| e.to_string())?;
        assert_eq!(groups.elements(), 10);
        Ok(groups.stretches.iter().map(|stretch| (stretch.range.clone(), stretch.decays)).collect())
    }

    #[test]
    fn patterns_select_whole_names() {
        for (pattern, name, expected) in [
            ("body.*", "body.0.weight", true),
            ("body.*", "a.body.0", false),
            ("*.bias", "head.bias", true),
            ("*.bias", "head.bias2", false),
            ("*", "", true),
            ("", "a", false),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c", false),
            ("a*a", "a", false),
            ("head.bias", "head.bias", true),
            ("head", "head.bias", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn stretches_join_neighbours_that_train_alike() {
        assert_eq!(groups(&[], &[]).unwrap(), [(0..10, true)]);
        assert_eq!(groups(&["body.*"], &[]).unwrap(), [(6..10, true)]);
        assert_eq!(
            groups(&["body.1*"], &["*.bias"]).unwrap(),
            [(0..2, true), (2..4, false), (6..8, true), (8..10, false)]
        );
        let groups = Groups::new(&layout(), &["body.0.bias".into(), "head*".into()], &[]).unwrap();
        assert_eq!([0..2, 2..4, 4..6, 6..8].map(|range| groups.trains(&range)), [true, false, true, false]);
        let mut grad = [1.0; 10];
        groups.clear_frozen(&mut grad);
        assert_eq!(grad, [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn patterns_freeze_states_too() {
        let mut layout = layout();
        layout.states = ["body.norm.mean", "head.norm.mean"]
            .into_iter()
            .enumerate()
            .map(|(at, name)| Param { name: name.into(), shape: vec![1], range: at..at + 1 })
            .collect();
        let frozen = |patterns: &[&str]| {
            let owned: Vec<String> = patterns.iter().map(|p| (*p).to_owned()).collect();
            Groups::new(&layout, &owned, &[]).map(|groups| groups.frozen_states().to_vec())
        };
        assert_eq!(frozen(&[]).unwrap(), [false, false]);
        assert_eq!(frozen(&["body.*"]).unwrap(), [true, false]);
        assert_eq!(frozen(&["*.norm.mean"]).unwrap(), [true, true]);
        assert!(Groups::new(&layout, &[], &["*.norm.mean".to_owned()]).is_err());
    }

    #[test]
    fn patterns_that_match_nothing_or_everything_are_refused() {
        let error = groups(&["body.*", "tail.*"], &[]).unwrap_err();
        assert!(error.contains("freeze: \"tail.*\"") && error.contains("body.0.weight"), "{error}");
        assert!(groups(&[], &["bias"]).unwrap_err().contains("no_decay: \"bias\""));
        assert!(groups(&["*"], &[]).unwrap_err().contains("nothing is left to train"));
    }
}
