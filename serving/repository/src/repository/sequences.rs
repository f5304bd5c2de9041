//! Version routing for requests of a stateful sequence: all requests of a sequence go to the version that keeps
//! its state.

use std::sync::Arc;

use super::versions::{VersionSelector, Versions};
use super::{Repository, unknown};
use crate::model::Model;
use crate::sequence::Sequences;
use millrace_serving_core::error::InferError;
use millrace_serving_core::parameters::Step;

impl Repository {
    /// The version that answers a request of a sequence; `id` is the request's own id, `step` its sequence
    /// parameters. A request that names no version goes to the version that holds its sequence. The traffic
    /// split places a new sequence by the sequence's id, and it stays there. Also returns the other versions in
    /// which a sequence with this id must end, when one begins.
    ///
    /// # Errors
    /// As [`Repository::find`].
    pub(crate) fn route_step(
        &self,
        model: &str,
        asked: VersionSelector<'_>,
        id: &str,
        step: &Step,
    ) -> Result<(Arc<Model>, Vec<Arc<Sequences>>), InferError> {
        let models = self.inner.models.read().clone();
        let Some(versions) = models.models.get(model) else { return Err(unknown(model)) };
        // Models without sequences ignore sequence parameters.
        if versions.ready.values().all(|model| model.sequences.is_none()) {
            return Ok((self.route(model, asked, id)?, Vec::new()));
        }
        if asked != VersionSelector::Any {
            return Ok((versions.find(model, asked)?, Vec::new()));
        }
        let holding = if step.start { None } else { versions.holding(step) };
        let found = match holding.or_else(|| versions.split_target(&step.key())) {
            Some(found) => found,
            None => versions.find(model, asked)?,
        };
        let others = if step.start { versions.other_versions(&found, step) } else { Vec::new() };
        Ok((found, others))
    }
}

impl Versions {
    /// The sequences of the other versions in which this id is live.
    fn other_versions(&self, found: &Arc<Model>, step: &Step) -> Vec<Arc<Sequences>> {
        let others = self.ready.values().filter(|model| !Arc::ptr_eq(model, found));
        let kept = others.filter_map(|model| model.sequences.as_ref());
        kept.filter(|sequences| sequences.start_order(&step.id).is_some()).cloned().collect()
    }

    /// The version in which a sequence is live; the one in which it began last, if several.
    fn holding(&self, step: &Step) -> Option<Arc<Model>> {
        let begun = |model: &Arc<Model>| model.sequences.as_ref()?.start_order(&step.id);
        let held = self.ready.values().filter_map(|model| Some((begun(model)?, model)));
        held.max_by_key(|(order, _)| *order).map(|(_, model)| Arc::clone(model))
    }
}
