//! Resume state of a feed: the plan's id, and the number of consumed global batches.

use serde::{Deserialize, Serialize};

use crate::feed::PlanId;

/// A position in the endless sequence of global batches of one plan.
///
/// `step` counts the global batches that were *consumed*: batches that were only prefetched do not
/// move it. Store it with the state it belongs to (a checkpoint), in the same commit.
///
/// Resuming costs O(row groups), never O(rows): nothing is replayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cursor {
    /// The plan whose batches are counted. Another plan refuses the cursor.
    pub plan_id: PlanId,
    /// Number of the next global batch, from 0.
    pub step: u64,
}
