//! Merge scan: uncommitted records over committed pairs.

use super::engine::{Order, Pair};
use super::layer::Value;
use crate::error::Result;

/// Merges uncommitted records over committed pairs until `found` has `limit` pairs. A missing value hides the
/// committed pair of its key. Both inputs are in `order` and without duplicates. Takes no more committed
/// pairs than it needs.
pub(super) fn merge(
    uncommitted: impl IntoIterator<Item = (Vec<u8>, Value)>,
    committed: &mut dyn FnMut() -> Result<Option<Pair>>,
    order: Order,
    limit: usize,
    found: &mut Vec<Pair>,
) -> Result<()> {
    let mut uncommitted = uncommitted.into_iter().peekable();
    let mut below = None;
    let mut ended = false;
    while found.len() < limit {
        if below.is_none() && !ended {
            below = committed()?;
            ended = below.is_none();
        }
        let first = match (uncommitted.peek(), &below) {
            (None, None) => break,
            (Some(_), None) => true,
            (None, Some(_)) => false,
            (Some((key, _)), Some((committed, _))) => {
                if key == committed {
                    below = None;
                    true
                } else {
                    (key < committed) == (order == Order::Ascending)
                }
            }
        };
        if first {
            let next = uncommitted.next();
            found.extend(next.and_then(|(key, value)| Some((key, value?.to_vec()))));
        } else {
            found.extend(below.take());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Checks all combinations of three keys that are present, removed or absent above and below, in both
    /// orders.
    #[test]
    fn it_is_what_a_map_would_say() {
        let key = |i: usize| vec![i as u8];
        for (case, limit) in (0..3 * 3 * 3 * 8).flat_map(|case| (0..4).map(move |limit| (case, limit))) {
            let (above, below) = (case / 8, case % 8);
            let mut over: Vec<(Vec<u8>, Value)> = Vec::new();
            for i in 0..3 {
                match above / 3usize.pow(i as u32) % 3 {
                    0 => {}
                    1 => over.push((key(i), None)),
                    _ => over.push((key(i), Some([10 + i as u8].into()))),
                }
            }
            let mut base: Vec<Pair> =
                (0..3).filter(|i| below >> i & 1 == 1).map(|i| (key(i), vec![i as u8])).collect();
            let mut all: BTreeMap<Vec<u8>, Vec<u8>> = base.iter().cloned().collect();
            for (key, value) in &over {
                match value {
                    Some(value) => drop(all.insert(key.clone(), value.to_vec())),
                    None => drop(all.remove(key)),
                }
            }
            let mut expected: Vec<Pair> = all.into_iter().collect();
            for order in [Order::Ascending, Order::Descending] {
                let mut taken = base.iter().cloned();
                let mut found = Vec::new();
                merge(over.iter().cloned(), &mut || Ok(taken.next()), order, limit, &mut found).unwrap();
                assert_eq!(found, expected[..limit.min(expected.len())], "case {case}, {order:?}");
                over.reverse();
                base.reverse();
                expected.reverse();
            }
        }
    }
}
