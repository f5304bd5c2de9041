//! Which version answers a request that belongs to a sequence.

use std::sync::Arc;

use super::versions::{Asked, Versions};
use super::{Model, Repository, unknown};
use crate::error::InferError;
use crate::sequence::{Sequences, Step};

impl Repository {
    /// The version that answers a request of a sequence, with that id of its own. One that names no version
    /// goes on where its sequence was begun; a sequence that begins is split by its id, as it stays there.
    /// With it come the other versions in which a sequence of this id ends then.
    ///
    /// # Errors
    /// As [`Repository::find`].
    pub(crate) fn route_step(
        &self,
        model: &str,
        asked: Asked<'_>,
        id: &str,
        step: &Step,
    ) -> Result<(Arc<Model>, Vec<Arc<Sequences>>), InferError> {
        let models = self.inner.models.read().clone();
        let Some(versions) = models.models.get(model) else { return Err(unknown(model)) };
        // Models without sequences do not heed what requests say of them.
        if versions.ready.values().all(|model| model.sequences.is_none()) {
            return Ok((self.route(model, asked, id)?, Vec::new()));
        }
        if asked != Asked::Any {
            return Ok((versions.find(model, asked)?, Vec::new()));
        }
        let holding = if step.start { None } else { versions.holding(step) };
        let found = match holding.or_else(|| versions.turn(&step.key())) {
            Some(found) => found,
            None => versions.find(model, asked)?,
        };
        let others = if step.start { versions.others(&found, step) } else { Vec::new() };
        Ok((found, others))
    }
}

impl Versions {
    /// Versions but one in which a sequence is live.
    fn others(&self, found: &Arc<Model>, step: &Step) -> Vec<Arc<Sequences>> {
        let others = self.ready.values().filter(|model| !Arc::ptr_eq(model, found));
        let kept = others.filter_map(|model| model.sequences.as_ref());
        kept.filter(|sequences| sequences.begun(&step.id).is_some()).cloned().collect()
    }

    /// The version in which a sequence is live; of several the one in which it was begun last.
    fn holding(&self, step: &Step) -> Option<Arc<Model>> {
        let begun = |model: &Arc<Model>| model.sequences.as_ref()?.begun(&step.id);
        let held = self.ready.values().filter_map(|model| Some((begun(model)?, model)));
        held.max_by_key(|(order, _)| *order).map(|(_, model)| Arc::clone(model))
    }
}
