//! Server schema of the PostgreSQL engine: tables, one function, and their format.
//!
//! `kv` is the map. `commits` has a row for each commit of the last minutes: its number and the keys that it
//! touched. By the number, a client finds out the outcome of a commit whose answer it never got. By the keys,
//! the other clients invalidate their caches. `clients` has a row for each open process, renewed while it
//! lives. `life` has one row, which a crash of the server removes.

use crate::meta::keys;
use crate::meta::sqlite::FORMAT_VERSION;

/// Oldest supported server, as `server_version_num`.
pub(super) const SERVER_VERSION_MIN: i32 = 150_000;
/// Touched keys that a commit lists. After a commit with more, other clients assume that anything changed.
const TOUCHED_MAX: usize = 512;

/// Channel of notifications about commits. Payload: the client that committed.
pub(super) fn channel(schema: &str) -> String {
    format!("{schema}_commits")
}

/// Settings of every connection. Plans are made once, when tables may still be empty, so plans that read
/// whole tables are disabled. Every query is a lookup by key.
pub(super) fn settings(lock_wait_ms: u64) -> String {
    // The client gives up a little later than the server, so that it gets the server's error.
    let wait_ms = lock_wait_ms.min(i32::MAX as u64 / 2);
    format!(
        "SET default_transaction_isolation = 'read committed'; SET enable_seqscan = off; \
         SET enable_hashjoin = off; SET enable_mergejoin = off; SET enable_bitmapscan = off; SET jit = off; SET max_parallel_workers_per_gather = 0; \
         SET plan_cache_mode = force_generic_plan; SET client_min_messages = warning; \
         SET search_path = pg_catalog; SET lock_timeout = {wait_ms}; \
         SET statement_timeout = {}; SET idle_in_transaction_session_timeout = 60000",
        wait_ms + 1_000
    )
}

/// Query for the version of the server, and whether the table exists, and the function with the life table.
pub(super) fn probe(schema: &str) -> String {
    format!(
        "SELECT current_setting('server_version_num')::int4, to_regclass('{schema}.kv') IS NOT NULL, \
         to_regclass('{schema}.life') IS NOT NULL AND \
         to_regprocedure('{schema}.apply_1(int8, int8, int8[], bool[], bytea[], bytea[], bytea[], bytea[], bool[], int8[], bytea[], bytea[], bytea[], bytea[])') IS NOT NULL"
    )
}

/// Begins a life of the server unless it has one: the table is empty after a crash.
pub(super) fn begin_life(schema: &str) -> String {
    format!(
        "INSERT INTO {schema}.life (id) SELECT (random() * 9e18)::int8 \
         WHERE NOT EXISTS (SELECT FROM {schema}.life) ON CONFLICT DO NOTHING"
    )
}

/// The server's life and its age in milliseconds.
pub(super) fn life(schema: &str) -> String {
    format!("SELECT id, (extract(epoch FROM clock_timestamp() - born) * 1000)::int8 FROM {schema}.life")
}

/// The format record; the table exists.
pub(super) fn format(schema: &str) -> String {
    format!("SELECT v FROM {schema}.kv WHERE k = '\\x{}'", hex(keys::FORMAT))
}

/// Creates what is missing, in one transaction, one process at a time.
pub(super) fn create(schema: &str, lock: i64) -> String {
    let function = apply(schema);
    let (key, value) = (hex(keys::FORMAT), hex(&FORMAT_VERSION.to_be_bytes()));
    format!(
        "BEGIN; SELECT pg_advisory_xact_lock({lock}); \
         DO $make$ BEGIN IF to_regnamespace('{schema}') IS NULL THEN CREATE SCHEMA {schema}; END IF; END $make$; \
         CREATE TABLE IF NOT EXISTS {schema}.kv (k bytea PRIMARY KEY, v bytea NOT NULL) \
           WITH (fillfactor = 85, toast_tuple_target = 8160, autovacuum_vacuum_scale_factor = 0.05); \
         ALTER TABLE {schema}.kv ALTER COLUMN v SET STORAGE EXTERNAL; \
         CREATE TABLE IF NOT EXISTS {schema}.commits (client int8 NOT NULL, n int8 NOT NULL, \
           xid int8 NOT NULL, touched bytea[], PRIMARY KEY (client, n)); \
         CREATE INDEX IF NOT EXISTS commits_xid ON {schema}.commits (xid); \
         CREATE TABLE IF NOT EXISTS {schema}.clients (client int8 PRIMARY KEY, lease_ms int8 NOT NULL, \
           seen timestamptz NOT NULL DEFAULT now()); \
         CREATE UNLOGGED TABLE IF NOT EXISTS {schema}.life (one bool PRIMARY KEY DEFAULT true, \
           id int8 NOT NULL, born timestamptz NOT NULL DEFAULT clock_timestamp()); \
         {function}; \
         INSERT INTO {schema}.kv (k, v) VALUES ('\\x{key}', '\\x{value}') ON CONFLICT (k) DO NOTHING; \
         COMMIT"
    )
}

/// Definition of the function that commits. It checks that the reads of a transaction still hold, then
/// applies its writes; 0 when done, 1 when something has changed. The locks are held until the transaction
/// ends. A statement sees what was committed before it began, so those after the locks see all earlier
/// commits under them.
fn apply(schema: &str) -> String {
    let channel = channel(schema);
    format!(
        "CREATE OR REPLACE FUNCTION {schema}.apply_1(\
           p_client int8, p_n int8, p_locks int8[], p_exclusive bool[], \
           p_read_keys bytea[], p_read_values bytea[], \
           p_starts bytea[], p_ends bytea[], p_descending bool[], p_limits int8[], p_sums bytea[], \
           p_keys bytea[], p_values bytea[], p_deletes bytea[]) \
         RETURNS int4 LANGUAGE plpgsql AS $apply$ \
         DECLARE found_sum bytea; touched_keys bytea[]; \
         BEGIN \
           PERFORM set_config('synchronous_commit', 'off', true); \
           FOR i IN 1 .. cardinality(p_locks) LOOP \
             IF p_exclusive[i] THEN PERFORM pg_advisory_xact_lock(p_locks[i]); \
             ELSE PERFORM pg_advisory_xact_lock_shared(p_locks[i]); END IF; \
           END LOOP; \
           PERFORM FROM unnest(p_read_keys, p_read_values) AS e (k, v) \
             LEFT JOIN {schema}.kv ON kv.k = e.k WHERE kv.v IS DISTINCT FROM e.v; \
           IF FOUND THEN RETURN 1; END IF; \
           FOR i IN 1 .. cardinality(p_starts) LOOP \
             IF p_descending[i] THEN \
               SELECT sha256(coalesce(string_agg(int4send(octet_length(r.k)) || r.k || int4send(octet_length(r.v)) || r.v, '' ORDER BY r.k), '')) \
               INTO found_sum FROM (SELECT kv.k, kv.v FROM {schema}.kv \
                 WHERE kv.k >= p_starts[i] AND kv.k < p_ends[i] ORDER BY kv.k DESC LIMIT p_limits[i]) AS r; \
             ELSE \
               SELECT sha256(coalesce(string_agg(int4send(octet_length(r.k)) || r.k || int4send(octet_length(r.v)) || r.v, '' ORDER BY r.k), '')) \
               INTO found_sum FROM (SELECT kv.k, kv.v FROM {schema}.kv \
                 WHERE kv.k >= p_starts[i] AND kv.k < p_ends[i] ORDER BY kv.k LIMIT p_limits[i]) AS r; \
             END IF; \
             IF found_sum IS DISTINCT FROM p_sums[i] THEN RETURN 1; END IF; \
           END LOOP; \
           IF cardinality(p_keys) + cardinality(p_deletes) = 0 THEN RETURN 0; END IF; \
           PERFORM FROM {schema}.clients WHERE client <> p_client LIMIT 1; \
           IF FOUND THEN \
             PERFORM pg_notify('{channel}', p_client::text); \
             IF cardinality(p_keys) + cardinality(p_deletes) <= {TOUCHED_MAX} THEN \
               touched_keys := p_keys || p_deletes; \
             END IF; \
           END IF; \
           INSERT INTO {schema}.commits (client, n, xid, touched) \
             VALUES (p_client, p_n, pg_current_xact_id()::text::int8, touched_keys); \
           IF cardinality(p_keys) > 0 THEN \
             INSERT INTO {schema}.kv (k, v) SELECT e.k, e.v FROM unnest(p_keys, p_values) AS e (k, v) \
               ON CONFLICT (k) DO UPDATE SET v = excluded.v; \
           END IF; \
           IF cardinality(p_deletes) > 0 THEN DELETE FROM {schema}.kv WHERE k = ANY (p_deletes); END IF; \
           RETURN 0; \
         END $apply$"
    )
}

/// Kind of a row of a reading statement, in its first column: a pair.
pub(super) const ROW_PAIR: i32 = 0;
/// Kind: a commit of another client, with its transaction and the keys that it touched.
pub(super) const ROW_COMMIT: i32 = 1;
/// Kind: the oldest transaction that may still be running. All before it are visible.
pub(super) const ROW_HORIZON: i32 = 2;

/// Part of every read, as of the same moment: the commits of other clients since the transaction in parameter
/// `xid`.
fn feed(schema: &str, xid: u8) -> String {
    let client = xid + 1;
    format!(
        "UNION ALL SELECT {ROW_COMMIT}, NULL, NULL, c.xid, c.touched FROM {schema}.commits AS c \
           WHERE c.xid >= ${xid} AND c.client <> ${client} \
         UNION ALL SELECT {ROW_HORIZON}, NULL, NULL, pg_snapshot_xmin(pg_current_snapshot())::text::int8, NULL"
    )
}

/// Pairs by key. Parameters: keys, xid, client.
pub(super) fn fetch(schema: &str) -> String {
    let feed = feed(schema, 2);
    format!(
        "SELECT {ROW_PAIR}, kv.k, kv.v, NULL::int8, NULL::bytea[] FROM {schema}.kv WHERE kv.k = ANY ($1::bytea[]) {feed}"
    )
}

/// Pairs of a range. Parameters: start, end, limit, xid, client.
pub(super) fn scan(schema: &str, descending: bool) -> String {
    let (feed, direction) = (feed(schema, 4), if descending { "DESC" } else { "ASC" });
    format!(
        "SELECT {ROW_PAIR}, r.k, r.v, NULL::int8, NULL::bytea[] FROM (SELECT kv.k, kv.v FROM {schema}.kv \
           WHERE kv.k >= $1::bytea AND kv.k < $2::bytea ORDER BY kv.k {direction} LIMIT $3::int8) AS r {feed}"
    )
}

/// Calls [`apply`].
pub(super) fn call(schema: &str) -> String {
    format!("SELECT {schema}.apply_1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)")
}

/// Makes sure that a commit that has not taken place never will, by taking its number. Returns a row if it
/// had not. Parameters: client, number.
pub(super) fn settle(schema: &str) -> String {
    format!(
        "INSERT INTO {schema}.commits (client, n, xid, touched) \
         VALUES ($1, $2, pg_current_xact_id()::text::int8, '{{}}') ON CONFLICT DO NOTHING RETURNING true"
    )
}

/// Writes a small record to the write-ahead log and syncs it, with all that was logged before it.
pub(super) fn flush() -> &'static str {
    "SELECT set_config('synchronous_commit', \
       CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END, true), \
     pg_logical_emit_message(true, 'millrace', '')"
}

/// Registers a client. Every commit holds the lock shared. So all commits that did not know of the client
/// have ended when it is registered.
pub(super) fn register(schema: &str, lock: i64, client: i64, lease_ms: i64) -> String {
    format!(
        "BEGIN; SELECT pg_advisory_xact_lock({lock}); \
         INSERT INTO {schema}.clients (client, lease_ms) VALUES ({client}, {lease_ms}) \
           ON CONFLICT (client) DO UPDATE SET seen = now(), lease_ms = excluded.lease_ms; COMMIT"
    )
}

/// Unregisters a client.
pub(super) fn unregister(schema: &str, client: i64) -> String {
    format!("DELETE FROM {schema}.clients WHERE client = {client}")
}

/// Renews a client's row. Returns no row if the client is not registered.
pub(super) fn renew(schema: &str, client: i64) -> String {
    format!("UPDATE {schema}.clients SET seen = now() WHERE client = {client} RETURNING true")
}

/// When a client was last heard of, by the clock of the server. While the server was down no client could
/// renew its row, so only the time since it is back counts.
fn heard(schema: &str) -> String {
    format!("greatest(seen, pg_postmaster_start_time(), (SELECT max(born) FROM {schema}.life))")
}

/// Unregisters a client that has not renewed its row in time, see [`heard`]. Returns a row if it is registered still.
/// The statement that deletes the row waits for a renewal that runs, and looks again.
pub(super) fn end_lapsed(schema: &str, client: i64) -> String {
    let heard = heard(schema);
    format!(
        "WITH ended AS (DELETE FROM {schema}.clients \
           WHERE client = {client} AND {heard} <= now() - lease_ms * interval '1 ms' RETURNING client) \
         SELECT 1 FROM {schema}.clients WHERE client = {client} AND NOT EXISTS (SELECT FROM ended)"
    )
}

/// Those of some clients that are registered and have renewed their rows in time, see [`heard`]. Parameter: clients.
pub(super) fn alive(schema: &str) -> String {
    let heard = heard(schema);
    format!(
        "SELECT client FROM {schema}.clients \
         WHERE client = ANY ($1::int8[]) AND {heard} > now() - lease_ms * interval '1 ms'"
    )
}

/// How many other clients are registered and have renewed their rows in time.
pub(super) fn others(schema: &str, client: i64) -> String {
    let heard = heard(schema);
    format!(
        "SELECT count(*) FROM {schema}.clients \
         WHERE client <> {client} AND {heard} > now() - lease_ms * interval '1 ms'"
    )
}

/// Begins the transaction that replaces everything, while no client commits or registers.
pub(super) fn begin_replace(lock: i64) -> String {
    format!(
        "BEGIN; SET LOCAL statement_timeout = 0; SET LOCAL synchronous_commit = on; \
         SELECT pg_advisory_xact_lock({lock})"
    )
}

/// Adds pairs. Parameters: keys, values.
pub(super) fn insert(schema: &str) -> String {
    format!(
        "INSERT INTO {schema}.kv (k, v) SELECT e.k, e.v FROM unnest($1::bytea[], $2::bytea[]) AS e (k, v)"
    )
}

/// Tells every client that anything may have changed, by a commit of a client that does not exist (-1).
/// Commits.
pub(super) fn end_replace(schema: &str) -> String {
    let channel = channel(schema);
    format!(
        "INSERT INTO {schema}.commits (client, n, xid, touched) \
           VALUES (-1, pg_current_xact_id()::text::int8, pg_current_xact_id()::text::int8, NULL); \
         SELECT pg_notify('{channel}', '-1'); COMMIT"
    )
}

/// Deletes commits before `horizon`, and clients that have been gone for long.
pub(super) fn trim(schema: &str, horizon: i64) -> String {
    let heard = heard(schema);
    format!(
        "DELETE FROM {schema}.commits WHERE xid < {horizon}; \
         DELETE FROM {schema}.clients WHERE {heard} < now() - (10 * lease_ms + 600000) * interval '1 ms'"
    )
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
