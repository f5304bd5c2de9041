//! Reading of metadata tables in pages.

use crate::error::Result;
use crate::meta::engine::{Order, Pair, ReadTxn};
use crate::meta::keys;

/// Records read by one scan.
pub(super) const PAGE: usize = 4_096;

/// Visits all pairs under a prefix.
pub(super) fn each(
    txn: &mut dyn ReadTxn,
    prefix: &[u8],
    mut visit: impl FnMut(&mut dyn ReadTxn, Vec<Pair>) -> Result<()>,
) -> Result<()> {
    let (mut start, end) = (prefix.to_vec(), keys::after_prefix(prefix));
    loop {
        let page = txn.scan(&start, &end, Order::Ascending, PAGE)?;
        let last = (page.len() == PAGE).then(|| page.last().map(|(key, _)| key.clone())).flatten();
        visit(txn, page)?;
        match last {
            Some(key) => start = [key.as_slice(), &[0]].concat(),
            None => return Ok(()),
        }
    }
}
