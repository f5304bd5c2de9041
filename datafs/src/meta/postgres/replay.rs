//! Replay of commits that a server has lost.
//!
//! Commits are asynchronous, so a server that crashes or is replaced by a standby may lose acknowledged ones.
//! Each process keeps its commits since the last flush. When it meets the server in a new life, it commits
//! those that are missing again, in order and under the same checks. A commit that conflicts with later
//! changes of other clients is lost, and then every call of the process fails.
//!
//! Lives are told apart by an unlogged table. A crash or a promotion empties it; an orderly restart, which
//! loses nothing, does not. The cache is dropped with the old life, because transaction numbers may be
//! assigned again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Shared;
use super::batch::Batch;
use super::fault::Fault;
use super::pool::{Link, block_on};
use super::schema;
use crate::error::{Error, Result};

/// In a new life, clients that know the old one commit nothing new for this long: their commits may depend on
/// those that other clients must replay.
const GRACE: Duration = Duration::from_millis(2_000);
/// How long the replay of a commit waits for other clients to replay what it depends on.
const WAIT: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(20);
/// Bytes of kept commits above which a commit flushes first.
const KEPT_BYTES_MAX: usize = 64 << 20;

/// Commits of this process that the server may lose.
#[derive(Debug, Default)]
pub(super) struct Kept {
    life: Option<i64>,
    /// The life is new and the replay is not finished.
    behind: bool,
    commits: Vec<Commit>,
    /// Place of the newest commit.
    last: u64,
    bytes: usize,
    /// Cause of a loss: every call fails from then on.
    lost: Option<Arc<str>>,
}

#[derive(Debug, Clone)]
struct Commit {
    place: u64,
    /// Its number among the commits of this client.
    number: i64,
    batch: Arc<Batch>,
}

impl Kept {
    /// Keeps a commit that was acknowledged in `life`; `false` if that life is over.
    pub(super) fn keep(&mut self, batch: &Arc<Batch>, number: i64, life: i64) -> bool {
        if self.life != Some(life) {
            return false;
        }
        if !batch.writes.is_empty() {
            self.last += 1;
            self.bytes += batch.bytes;
            self.commits.push(Commit { place: self.last, number, batch: Arc::clone(batch) });
        }
        true
    }

    /// Place of the newest commit.
    pub(super) fn last(&self) -> u64 {
        self.last
    }

    /// Drops the commits up to `place`, which are durable.
    pub(super) fn flushed(&mut self, place: u64) {
        self.commits.retain(|commit| commit.place > place);
        self.bytes = self.commits.iter().map(|commit| commit.batch.bytes).sum();
    }

    pub(super) fn is_empty(&self) -> bool {
        self.commits.is_empty()
    }

    pub(super) fn is_full(&self) -> bool {
        self.bytes > KEPT_BYTES_MAX
    }

    /// The life of the server that the image belongs to.
    pub(super) fn life(&self) -> Option<i64> {
        self.life
    }
}

impl Shared {
    /// Fails if an acknowledged commit is lost.
    pub(super) fn check_lost(&self) -> Result<()> {
        match &self.state.lock().kept.lost {
            None => Ok(()),
            Some(cause) => {
                Err(Error::Failed { place: self.place().to_owned(), cause: cause.as_ref().to_owned() })
            }
        }
    }

    /// Checks the life of the server on a new connection, and replays lost commits in a new one. Returns the
    /// life.
    pub(super) fn meet(&self, link: &Link, deadline: Instant) -> std::result::Result<i64, Fault> {
        let (life, age) = self.ask_life(link, deadline)?;
        let _one = self.meeting.lock();
        let lost = {
            let mut state = self.state.lock();
            let known = state.kept.life;
            if known == Some(life) && !state.kept.behind {
                return Ok(life);
            }
            if known != Some(life) {
                state.kept.life = Some(life);
                if known.is_none() {
                    return Ok(life);
                }
                state.kept.behind = true;
                state.rows.begin_anew();
                state.failures += 1;
            }
            state.kept.commits.clone()
        };
        tracing::warn!(
            place = self.place(),
            commits = lost.len(),
            "the metadata server has crashed or was replaced; what it may have lost is committed again"
        );
        let until = deadline.min(Instant::now() + WAIT);
        for commit in lost {
            self.commit_again(link, &commit, until, deadline)?;
        }
        if let Some(left) = GRACE.checked_sub(age) {
            std::thread::sleep(left);
        }
        self.state.lock().kept.behind = false;
        Ok(life)
    }

    /// The life of the server, and how long it has lasted.
    fn ask_life(&self, link: &Link, deadline: Instant) -> std::result::Result<(i64, Duration), Fault> {
        let name = self.pool.target().schema();
        block_on(link.client.batch_execute(&schema::begin_life(name)), deadline)?;
        let row = block_on(link.client.query_one(&schema::life(name), &[]), deadline)?;
        let read = |column| row.try_get::<_, i64>(column).map_err(|e| Fault::from_postgres(&e));
        Ok((read(0)?, Duration::from_millis(u64::try_from(read(1)?).unwrap_or(0))))
    }

    fn commit_again(
        &self,
        link: &Link,
        commit: &Commit,
        until: Instant,
        deadline: Instant,
    ) -> std::result::Result<(), Fault> {
        let mut number = commit.number;
        loop {
            let fenced = block_on(link.client.query(&link.settle, &[&self.client, &number]), deadline)?;
            if fenced.is_empty() {
                return Ok(());
            }
            number = self.next_commit();
            if let Some(kept) =
                self.state.lock().kept.commits.iter_mut().find(|kept| kept.place == commit.place)
            {
                kept.number = number;
            }
            if self.apply(link, deadline, &commit.batch, number)? == 0 {
                return Ok(());
            }
            if Instant::now() > until {
                let cause = "the server has lost commits that were answered, and others have changed what they rested on";
                tracing::error!(place = self.place(), cause, "metadata was lost");
                self.state.lock().kept.lost = Some(cause.into());
                return Ok(());
            }
            std::thread::sleep(PAUSE);
        }
    }
}
