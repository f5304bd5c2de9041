//! Snapshot schedules of `millrace up`: take periodic snapshots and delete old ones.
//!
//! Wall-clock time is divided into slots of `every_s` seconds since 1970-01-01 (UTC). A schedule owns the
//! snapshots `scheduled-NAME-SLOT`, one for each slot. The current slot is due as long as it has no snapshot.
//! A service that was down when the slot began therefore catches up when it starts. Missed slots are skipped:
//! their state is gone. Errors are logged, and the slot is retried.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Result;
use chrono::{DateTime, NaiveDateTime, Utc};
use millrace_datafs::{Datafs, Error, Name};
use millrace_leaf::backoff::Backoff;
use tokio_util::sync::CancellationToken;

use crate::failure::{Exit, fail};
use crate::settings::SnapshotSchedule;

/// Prefix of all scheduled snapshots' names.
const PREFIX: &str = "scheduled-";
/// Format of a slot's time in the name of its snapshot.
const SLOT: &str = "%Y%m%dT%H%M%SZ";
/// Format of the time in snapshots of earlier versions, which had no schedule names.
const UNNAMED: &str = "%Y%m%dT%H%M%S%3fZ";
/// Longest name of a schedule, since it is part of a snapshot's name.
const NAME_BYTES_MAX: usize = 100;
/// Longest sleep before the clock is read again, since it may be set.
const LOOK_AGAIN: Duration = Duration::from_secs(60);
/// First and longest pause after an error.
const RETRY: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);

/// A schedule with its name.
#[derive(Debug, Clone)]
pub(crate) struct Schedule {
    pub(crate) volume: Name,
    pub(crate) name: String,
    every_s: u64,
    keep: usize,
    /// True if the volume has no other schedule: it then owns scheduled snapshots without a schedule's name.
    only: bool,
}

impl Schedule {
    /// The schedules of a configuration. Fails on invalid periods and names.
    pub(crate) fn all(declared: &[SnapshotSchedule]) -> Result<Vec<Schedule>> {
        let (mut schedules, mut names) = (Vec::new(), BTreeSet::new());
        for one in declared {
            let wrong = |what: String| fail(Exit::Usage, format!("up.snapshots of {}: {what}", one.volume));
            if one.every_s == 0 {
                return wrong("every_s must be at least 1".into());
            }
            let name = one.name.as_ref().map_or_else(|| format!("every-{}s", one.every_s), Name::to_string);
            if name.len() > NAME_BYTES_MAX {
                return wrong(format!("the name {name} has more than {NAME_BYTES_MAX} characters"));
            }
            if one.keep == 0 {
                return wrong("keep must be at least 1".into());
            }
            if !names.insert((one.volume.clone(), name.clone())) {
                return wrong(format!("two schedules are called {name}: give each a name of its own"));
            }
            let only = declared.iter().filter(|other| other.volume == one.volume).count() == 1;
            schedules.push(Schedule {
                volume: one.volume.clone(),
                name,
                every_s: one.every_s,
                keep: one.keep,
                only,
            });
        }
        Ok(schedules)
    }

    /// Takes snapshots until `stop` fires. Tells `waiting` whether a snapshot failed and is retried.
    pub(crate) async fn run(self, datafs: Datafs, stop: CancellationToken, waiting: impl Fn(bool)) {
        let mut backoff = Backoff::new(RETRY, RETRY_MAX);
        while !stop.is_cancelled() {
            let (schedule, datafs) = (self.clone(), datafs.clone());
            let now = Utc::now();
            let taken = tokio::task::spawn_blocking(move || schedule.take_due(&datafs, now)).await;
            let taken = taken.map_err(anyhow::Error::from).and_then(|taken| taken);
            waiting(taken.is_err());
            let pause = match taken {
                Ok(()) => {
                    backoff.reset();
                    self.until_next_slot(now).min(LOOK_AGAIN)
                }
                Err(error) => {
                    tracing::warn!(
                        volume = %self.volume, schedule = self.name, error = format!("{error:#}"),
                        "cannot take a scheduled snapshot; retrying"
                    );
                    backoff.pause()
                }
            };
            stop.run_until_cancelled(tokio::time::sleep(pause)).await;
        }
    }

    /// Takes the snapshot of the current slot unless it exists, and deletes this schedule's oldest beyond
    /// `keep`.
    fn take_due(&self, datafs: &Datafs, now: DateTime<Utc>) -> Result<()> {
        let due = self.due(now);
        let listed = datafs.snapshot_list(&self.volume)?;
        // Oldest first, whatever the clock was when they were taken.
        let mut own: Vec<Name> = listed.into_iter().map(|s| s.name).filter(|name| self.owns(name)).collect();
        if !own.iter().any(|name| name.as_str() == due) {
            let due: Name = due.parse()?;
            match datafs.snapshot_create(&self.volume, &due) {
                // Another service with the same schedule has created it.
                Ok(_) | Err(Error::Exists { .. }) => own.push(due),
                Err(error) => return Err(error.into()),
            }
        }
        let surplus = own.len().saturating_sub(self.keep);
        for name in &own[..surplus] {
            match datafs.snapshot_delete(&self.volume, name) {
                Ok(()) | Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn slot(&self, now: DateTime<Utc>) -> u64 {
        let seconds = u64::try_from(now.timestamp()).unwrap_or(0);
        seconds - seconds % self.every_s
    }

    /// The name of the current slot's snapshot.
    fn due(&self, now: DateTime<Utc>) -> String {
        let slot = i64::try_from(self.slot(now)).ok().and_then(|slot| DateTime::from_timestamp(slot, 0));
        format!("{PREFIX}{}-{}", self.name, slot.unwrap_or(now).format(SLOT))
    }

    fn owns(&self, snapshot: &Name) -> bool {
        let Some(rest) = snapshot.as_str().strip_prefix(PREFIX) else { return false };
        let is_time = |text: &str, format| NaiveDateTime::parse_from_str(text, format).is_ok();
        match rest.strip_prefix(&self.name).and_then(|rest| rest.strip_prefix('-')) {
            Some(time) if is_time(time, SLOT) => true,
            _ => self.only && is_time(rest, UNNAMED),
        }
    }

    fn until_next_slot(&self, now: DateTime<Utc>) -> Duration {
        let next = self.slot(now).saturating_add(self.every_s);
        let since_epoch = now.signed_duration_since(DateTime::UNIX_EPOCH).to_std().unwrap_or_default();
        Duration::from_secs(next).saturating_sub(since_epoch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn declared(name: Option<&str>, every_s: u64, keep: usize) -> SnapshotSchedule {
        let name = name.map(|name| name.parse().unwrap());
        SnapshotSchedule { volume: "v".parse().unwrap(), name, every_s, keep }
    }

    fn volume() -> (tempfile::TempDir, Datafs) {
        let home = tempfile::tempdir().unwrap();
        let datafs = Datafs::open(home.path(), &millrace_datafs::Config::default()).unwrap();
        datafs.volume_create(&"v".parse().unwrap()).unwrap();
        (home, datafs)
    }

    fn names(datafs: &Datafs) -> Vec<String> {
        let listed = datafs.snapshot_list(&"v".parse().unwrap()).unwrap();
        listed.iter().map(|snapshot| snapshot.name.to_string()).collect()
    }

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(1_700_000_000 + seconds, 500_000_000).unwrap()
    }

    #[test]
    fn a_schedule_that_keeps_nothing_is_refused() {
        let error = Schedule::all(&[declared(None, 60, 0)]).unwrap_err().to_string();
        assert!(error.contains("keep must be at least 1"), "{error}");
    }

    #[test]
    fn schedules_of_one_volume_prune_only_their_own_snapshots() {
        let (_home, datafs) = volume();
        let mut manual = Vec::new();
        for name in
            ["monday", "scheduled-x", "scheduled-a-b-20231114T221320Z", "scheduled-20231114T221320000Z"]
        {
            datafs.snapshot_create(&"v".parse().unwrap(), &name.parse().unwrap()).unwrap();
            manual.push(name.to_owned());
        }
        let schedules =
            Schedule::all(&[declared(Some("a"), 10, 2), declared(Some("c"), 10, 3), declared(None, 60, 1)]);
        for second in 0..100 {
            for schedule in schedules.as_ref().unwrap() {
                schedule.take_due(&datafs, at(second)).unwrap();
            }
        }
        let (kept, taken) = names(&datafs).into_iter().partition::<Vec<_>, _>(|name| manual.contains(name));
        assert_eq!(kept, manual, "no schedule deletes what it has not taken");
        let of = |prefix: &str| taken.iter().filter(|name| name.starts_with(prefix)).count();
        assert_eq!((of("scheduled-a-"), of("scheduled-c-"), of("scheduled-every-60s-")), (2, 3, 1));
        for slot in
            ["a-20231114T221440Z", "c-20231114T221430Z", "c-20231114T221450Z", "every-60s-20231114T221400Z"]
        {
            assert!(taken.contains(&format!("scheduled-{slot}")), "{slot}: {taken:?}");
        }
    }

    #[test]
    fn snapshot_slot_missed_during_downtime_is_taken_at_start() {
        let (_home, datafs) = volume();
        let schedule = Schedule::all(&[declared(Some("hourly"), 3_600, 9)]).unwrap().remove(0);
        // Started every ten minutes, and never running for an hour.
        for start in 0..13 {
            schedule.take_due(&datafs, at(start * 600)).unwrap();
        }
        let hours = ["20231114T220000Z", "20231114T230000Z", "20231115T000000Z"];
        assert_eq!(names(&datafs), hours.map(|hour| format!("scheduled-hourly-{hour}")));
        assert_eq!(schedule.until_next_slot(at(0)), Duration::from_millis(2_799_500));
    }

    #[test]
    fn only_schedule_of_a_volume_adopts_snapshots_of_unnamed_schedule() {
        let (_home, datafs) = volume();
        for name in ["scheduled-20231114T221320000Z", "scheduled-20231114T221330000Z", "scheduled-mine"] {
            datafs.snapshot_create(&"v".parse().unwrap(), &name.parse().unwrap()).unwrap();
        }
        let schedule = Schedule::all(&[declared(None, 10, 2)]).unwrap().remove(0);
        schedule.take_due(&datafs, at(30)).unwrap();
        let left =
            ["scheduled-20231114T221330000Z", "scheduled-mine", "scheduled-every-10s-20231114T221350Z"];
        assert_eq!(names(&datafs), left);
    }

    #[tokio::test]
    async fn failed_snapshot_is_retried() {
        let (_home, datafs) = volume();
        let missing = SnapshotSchedule { volume: "late".parse().unwrap(), ..declared(None, 1, 1) };
        let schedule = Schedule::all(&[missing]).unwrap().remove(0);
        let stop = CancellationToken::new();
        let running = tokio::spawn(schedule.clone().run(datafs.clone(), stop.clone(), |_| {}));
        assert!(schedule.take_due(&datafs, Utc::now()).is_err());
        datafs.volume_create(&"late".parse().unwrap()).unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while datafs.snapshot_list(&"late".parse().unwrap()).unwrap().is_empty() {
            assert!(std::time::Instant::now() < deadline && !running.is_finished());
            tokio::task::yield_now().await;
        }
        stop.cancel();
        running.await.unwrap();
    }

    #[test]
    fn two_schedules_of_one_name_are_refused() {
        let error = Schedule::all(&[declared(None, 5, 1), declared(None, 5, 2)]).unwrap_err().to_string();
        assert!(error.contains("every-5s") && error.contains("up.snapshots of v"), "{error}");
        assert!(Schedule::all(&[declared(Some("a"), 5, 1), declared(Some("b"), 5, 2)]).is_ok());
        assert!(Schedule::all(&[declared(None, 0, 1)]).is_err());
        assert!(Schedule::all(&[declared(Some(&"x".repeat(101)), 5, 1)]).is_err());
    }
}
