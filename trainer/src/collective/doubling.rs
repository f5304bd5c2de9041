//! Recursive doubling: the stages of a small sum, and the partners that they need.
//!
//! Of `base` ranks, the largest power of two, each exchanges its sum with the rank that differs in bit 0, then in bit 1
//! and so on. Every rank above them first gives its vector to one of the `base` ranks and at last copies the result.
//! Both sides of an exchange add the same two sums, so all ranks get the same bits.
//!
//! The partner of a later stage may wait for a missing rank itself. Its wait must end first, since it knows the missing
//! rank. So the patience of a stage exceeds that of all waits which the partner may be in by one exchange timeout: ranks
//! begin a sum at most this far apart.

/// One exchange of a rank with a partner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stage {
    pub(super) partner: usize,
    pub(super) action: Action,
    /// Its number among the stages of all ranks.
    pub(super) phase: usize,
    /// How many exchange timeouts this rank waits.
    pub(super) patience: u32,
}

/// The part of a rank in an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Sends its sum.
    Give,
    /// Adds the partner's vector to its own.
    Add,
    /// Sends its sum and adds the partner's.
    Swap,
    /// Replaces its vector by the partner's sum.
    Copy,
}

impl Action {
    pub(super) fn sends(self) -> bool {
        matches!(self, Action::Give | Action::Swap)
    }

    pub(super) fn receives(self) -> bool {
        self != Action::Give
    }
}

/// The stages of `rank` in a ring of `world` ranks, in their order.
pub(super) fn stages(rank: usize, world: usize) -> Vec<Stage> {
    let bits = world.max(1).ilog2();
    let base = 1 << bits;
    // Ranks below this number have another rank's vector to add.
    let extras = world - base;
    let last = bits as usize + 1;
    if rank >= base {
        let partner = rank - base;
        return vec![
            Stage { partner, action: Action::Give, phase: 0, patience: 1 },
            Stage { partner, action: Action::Copy, phase: last, patience: bits + 2 },
        ];
    }
    let mut stages = Vec::with_capacity(last + 1);
    if rank < extras {
        stages.push(Stage { partner: rank + base, action: Action::Add, phase: 0, patience: 1 });
    }
    for bit in 0..bits {
        let partner = rank ^ (1 << bit);
        // In the first stage, only a partner with another rank's vector may wait.
        let may_wait = if bit == 0 { partner < extras } else { extras > 0 };
        let patience = bit + 1 + u32::from(may_wait);
        stages.push(Stage { partner, action: Action::Swap, phase: bit as usize + 1, patience });
    }
    if rank < extras {
        stages.push(Stage { partner: rank + base, action: Action::Give, phase: last, patience: 1 });
    }
    stages
}

/// The ranks to which `rank` needs a connection of its own. Two ranks need none: both are neighbors in both directions.
pub(super) fn partners(rank: usize, world: usize) -> Vec<usize> {
    if world <= 2 {
        return Vec::new();
    }
    let mut partners: Vec<usize> = stages(rank, world).iter().map(|stage| stage.partner).collect();
    partners.sort_unstable();
    partners.dedup();
    partners
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partners_agree_on_each_stage_and_wait_longer_than_each_other() {
        for world in 1..=65 {
            let all: Vec<Vec<Stage>> = (0..world).map(|rank| stages(rank, world)).collect();
            for (rank, stages) in all.iter().enumerate() {
                assert!(stages.windows(2).all(|pair| pair[0].phase < pair[1].phase));
                for stage in stages {
                    let of_partner = &all[stage.partner];
                    let theirs = of_partner.iter().find(|other| other.phase == stage.phase).unwrap();
                    assert_eq!(theirs.partner, rank);
                    assert_eq!(theirs.action.sends(), stage.action.receives());
                    assert_eq!(theirs.action.receives(), stage.action.sends());
                    let earlier = of_partner.iter().filter(|other| other.phase < stage.phase);
                    let longest = earlier.filter(|other| other.action.receives()).map(|other| other.patience);
                    if stage.action.receives() {
                        assert!(longest.max().unwrap_or(0) < stage.patience, "{world} ranks, rank {rank}");
                    }
                }
            }
        }
    }

    #[test]
    fn connections_are_few_and_mutual() {
        assert!(partners(0, 1).is_empty() && partners(1, 2).is_empty());
        assert_eq!([partners(0, 3), partners(1, 3), partners(2, 3)], [vec![1, 2], vec![0], vec![0]]);
        assert_eq!(partners(5, 8), [1, 4, 7]);
        for world in 3..=65usize {
            for rank in 0..world {
                let own = partners(rank, world);
                assert!(own.len() <= world.ilog2() as usize + 1);
                assert!(own.iter().all(|partner| partners(*partner, world).contains(&rank)));
            }
        }
    }
}
