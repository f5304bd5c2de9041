//! Replacement of the whole map, in one transaction on the server.

use std::time::{Duration, Instant};

use super::Shared;
use super::batch;
use super::fault::Fault;
use super::pool::block_on;
use super::schema;
use crate::error::{Error, Result};
use crate::failpoint;
use crate::meta::engine::Pairs;

/// Pairs, and their bytes, that are sent in one call.
const PAIRS_MAX: usize = 4_096;
const BYTES_MAX: usize = 4 << 20;
/// Longest single call: it may touch the whole table.
const WAIT: Duration = Duration::from_secs(24 * 3600);

impl Shared {
    /// See [`Engine::replace`](crate::meta::engine::Engine::replace). Uses a separate connection: if it
    /// breaks, the server rolls everything back.
    pub(super) fn replace(&self, check: &mut dyn FnMut() -> Result<()>, pairs: Pairs<'_>) -> Result<()> {
        let name = self.pool.target().schema();
        let fail = |fault: Fault| self.error(fault);
        let client = self.pool.connect_bare(self.pool.deadline()).map_err(fail)?;
        let run = |text: &str| block_on(client.batch_execute(text), Instant::now() + WAIT).map_err(fail);
        run(&schema::begin_replace(batch::lock_of_everything(name)))?;
        let others = schema::others(name, self.client);
        let others = block_on(client.query_one(&others, &[]), self.pool.deadline()).map_err(fail)?;
        let others: i64 = others.try_get(0).map_err(|e| fail(Fault::from_postgres(&e)))?;
        if others > 0 {
            return Err(Error::InUse { place: self.place().to_owned() });
        }
        check()?;
        run(&format!("DELETE FROM {name}.kv"))?;
        failpoint::hit("replace-deleted");
        let insert = block_on(client.prepare(&schema::insert(name)), self.pool.deadline()).map_err(fail)?;
        let mut pairs = pairs.peekable();
        while pairs.peek().is_some() {
            let (mut keys, mut values, mut bytes) = (Vec::new(), Vec::new(), 0);
            while keys.len() < PAIRS_MAX
                && bytes < BYTES_MAX
                && let Some(pair) = pairs.next()
            {
                let (key, value) = pair?;
                bytes += key.len() + value.len();
                keys.push(key);
                values.push(value);
            }
            block_on(client.execute(&insert, &[&keys, &values]), Instant::now() + WAIT).map_err(fail)?;
        }
        failpoint::hit("replace-written");
        run(&schema::end_replace(name))
    }
}
