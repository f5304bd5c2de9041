//! The lineage of a state: a digest of the rings in which its steps were computed.
//!
//! With a strategy whose sums depend on the workers, two groups of workers can reach the same step with different
//! states: one of them followed a coordinator that was replaced, or a checkpoint was read. All members of one ring
//! begin with the same state and apply the same updates. So two states at the same step are equal, bit for bit, if
//! the same rings computed their steps. States that are read again from a checkpoint begin a lineage of their own.
//!
//! Strict sums do not depend on the workers, and their states have no lineage.
use sha2::{Digest, Sha256};

use crate::strategy::Strategy;

/// A state's lineage, and the ring that continues it.
#[derive(Debug)]
pub(crate) struct Lineage {
    is_tracked: bool,
    /// Empty for the first state of a run.
    digest: Vec<u8>,
    /// The ring, until it has changed the state for the first time.
    ring: Option<(String, u64)>,
}

impl Lineage {
    pub(crate) fn new(strategy: Strategy) -> Lineage {
        Lineage { is_tracked: strategy != Strategy::Strict, digest: Vec::new(), ring: None }
    }

    pub(crate) fn is_tracked(&self) -> bool {
        self.is_tracked
    }

    /// What another worker's lineage is compared with; empty where none is tracked.
    pub(crate) fn digest(&self) -> &[u8] {
        &self.digest
    }

    /// Begins with a state that was read.
    pub(crate) fn begin(&mut self, state: &[u8]) {
        self.set(&[b"state", state]);
    }

    /// Takes over the lineage of another worker with its state.
    pub(crate) fn take(&mut self, digest: Vec<u8>) {
        self.digest = if self.is_tracked { digest } else { Vec::new() };
    }

    /// A ring begins: the membership epoch of a coordinator.
    pub(crate) fn enter(&mut self, owner: &str, epoch: u64) {
        self.ring = Some((owner.to_owned(), epoch));
    }

    /// The ring has changed the state.
    pub(crate) fn advance(&mut self) {
        if let Some((owner, epoch)) = self.ring.take() {
            let before = std::mem::take(&mut self.digest);
            self.set(&[b"ring", &before, owner.as_bytes(), &epoch.to_le_bytes()]);
        }
    }

    fn set(&mut self, parts: &[&[u8]]) {
        if !self.is_tracked {
            return;
        }
        let mut hash = Sha256::new();
        for part in parts {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        self.digest = hash.finalize().to_vec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategy::Backend;

    /// The lineage after a step in each of these rings.
    fn after(first: &Lineage, rings: &[(&str, u64)]) -> Lineage {
        let mut lineage = Lineage { is_tracked: first.is_tracked, digest: first.digest.clone(), ring: None };
        for (owner, epoch) in rings {
            lineage.enter(owner, *epoch);
            lineage.advance();
        }
        lineage
    }

    #[test]
    fn states_are_of_one_lineage_if_the_same_rings_computed_their_steps() {
        let first = Lineage::new(Strategy::Allreduce(Backend::Tcp));
        let same = |a: &Lineage, b: &Lineage| a.digest() == b.digest();
        let both = after(&first, &[("a", 1), ("a", 2)]);
        assert!(same(&both, &after(&first, &[("a", 1), ("a", 2)])));
        let others: [&[(&str, u64)]; 5] =
            [&[], &[("a", 1)], &[("a", 2), ("a", 1)], &[("b", 1), ("a", 2)], &[("a", 3)]];
        for rings in others {
            assert!(!same(&both, &after(&first, rings)), "{rings:?}");
        }
        // Later steps of a ring do not change it, nor does a ring without a step.
        let mut later = after(&first, &[("a", 1), ("a", 2)]);
        later.advance();
        later.enter("a", 3);
        assert!(same(&both, &later));
        later.advance();
        assert!(!same(&both, &later));
        // A state that was read, and one that was taken over.
        let mut read = Lineage::new(Strategy::Allreduce(Backend::Tcp));
        read.begin(b"weights");
        assert!(!same(&read, &first) && !same(&read, &both));
        read.take(both.digest().to_vec());
        assert!(same(&read, &both));
    }

    #[test]
    fn strict_states_have_no_lineage() {
        let mut lineage = after(&Lineage::new(Strategy::Strict), &[("a", 1)]);
        lineage.begin(b"weights");
        lineage.take(b"other".to_vec());
        assert!(lineage.digest().is_empty() && !lineage.is_tracked());
    }
}
