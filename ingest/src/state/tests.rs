//! Tests of claims, fences, and commits with an unknown outcome.

use millrace_datafs::{Config, Datafs};

use super::*;
use crate::config::{DeadLetter, JobConfig};

struct Volume {
    _home: tempfile::TempDir,
    view: View,
    job: Job,
}

impl Volume {
    fn new() -> Self {
        let home = tempfile::tempdir().unwrap();
        let datafs = Datafs::open(home.path(), &Config::default()).unwrap();
        datafs.volume_create(&"records".parse().unwrap()).unwrap();
        Self {
            view: datafs.view(&"records".parse().unwrap()).unwrap(),
            job: JobConfig::new("job", "events", "records", "data").validate().unwrap(),
            _home: home,
        }
    }

    fn claim(&self) -> JobState {
        JobState::claim(&self.view, &self.job).unwrap()
    }

    fn commit(&self, state: &mut JobState, next: i64) -> Result<()> {
        state.commit(&self.view, &self.job, Publish::new(), next_offset(next), None)
    }

    fn offset(&self) -> Option<i64> {
        Some(*offsets(&self.view).unwrap().get("events")?.get(&0)?)
    }

    /// A commit whose outcome the metadata engine could not tell; `made` says whether it took place.
    fn unknown(&self, state: &mut JobState, next: i64, made: bool) -> Result<()> {
        let fence = fence_value(state.owner, state.commits + 1);
        let publish = state.with_keys(&self.job, Publish::new(), &fence, &next_offset(next), None).unwrap();
        if made {
            self.view.publish(publish).unwrap();
        }
        let outcome = Err(millrace_datafs::Error::Metadata {
            place: "meta.sqlite".to_owned(),
            source: "disk I/O error".into(),
        });
        state.conclude(&self.view, &self.job, outcome, fence)
    }
}

/// A commit that moves partition 0 to `next`.
fn next_offset(next: i64) -> PositionUpdate {
    let last = LastRecord { offset: next - 1, digest: format!("digest of {}", next - 1) };
    PositionUpdate { offsets: BTreeMap::from([(0, next)]), last: BTreeMap::from([(0, last)]) }
}

#[test]
fn commits_move_offsets_until_another_owner_claims() {
    let volume = Volume::new();
    let mut first = volume.claim();
    assert_eq!(volume.offset(), None);
    volume.commit(&mut first, 5).unwrap();
    volume.commit(&mut first, 9).unwrap();
    let mut second = volume.claim();
    assert_eq!((&second.offsets, &second.last), (&next_offset(9).offsets, &next_offset(9).last));
    let error = volume.commit(&mut first, 12).unwrap_err();
    assert!(matches!(error, Error::Fenced { .. }), "{error:?}");
    assert_eq!(volume.offset(), Some(9));
    volume.commit(&mut second, 12).unwrap();
    assert_eq!(volume.offset(), Some(12));
}

#[test]
fn unknown_commit_outcome_is_resolved_by_reading_the_volume() {
    let volume = Volume::new();
    let mut state = volume.claim();
    // The commit had taken place: the run continues.
    volume.unknown(&mut state, 5, true).unwrap();
    state.offsets.insert(0, 5);
    volume.commit(&mut state, 8).unwrap();
    assert_eq!(volume.offset(), Some(8));
    // It had not: the error stands, and a new run continues at the committed offset.
    let error = volume.unknown(&mut state, 11, false).unwrap_err();
    assert!(matches!(error, Error::Volume { .. }), "{error:?}");
    assert_eq!(volume.claim().offsets, BTreeMap::from([(0, 8)]));
    // Another owner has claimed the job by now.
    let error = volume.unknown(&mut state, 11, false).unwrap_err();
    assert!(matches!(error, Error::Fenced { .. }), "{error:?}");
}

#[test]
fn concurrent_claims_of_one_folder_admit_one_job() {
    let volume = Volume::new();
    let job = |name: &str, topic: &str, path: &str| {
        JobConfig::new(name, topic, "records", path).validate().unwrap()
    };
    let rival = job("rival", "others", "data");
    // Both jobs prepare their claims before one of them publishes.
    let (first, ..) = JobState::prepare(&volume.view, &volume.job).unwrap();
    let (second, ..) = JobState::prepare(&volume.view, &rival).unwrap();
    volume.view.publish(first).unwrap();
    let error = volume.view.publish(second).unwrap_err();
    assert!(matches!(error, millrace_datafs::Error::Conflict { .. }), "{error:?}");
    let error = JobState::claim(&volume.view, &rival).unwrap_err();
    assert!(matches!(error, Error::FolderTaken { .. }), "{error:?}");
    assert!(error.to_string().contains("data belongs to job job (topic events)"), "{error}");
    volume.claim();
}

#[test]
fn dead_letter_folder_belongs_to_its_job() {
    let volume = Volume::new();
    volume.claim();
    let among = |config: JobConfig| JobState::claim(&volume.view, &config.validate().unwrap());
    let letters = |name: &str, path: &str, directory: &str| JobConfig {
        dead_letter: DeadLetter::Directory(directory.to_owned()),
        ..JobConfig::new(name, "others", "records", path)
    };
    for config in [
        JobConfig::new("b", "others", "records", "dead_letters/job"),
        letters("b", "dead_letters", "letters"),
        JobConfig::new("b", "others", "records", "data/below"),
        letters("b", "elsewhere", "data"),
        letters("b", "elsewhere", "dead_letters/job"),
    ] {
        let error = among(config.clone()).unwrap_err();
        assert!(
            matches!(&error, Error::FolderTaken { owner, .. } if owner.job == "job"),
            "{config:?}: {error:?}"
        );
    }
    among(letters("b", "elsewhere", "dead_letters")).unwrap();
    let error = among(JobConfig::new("c", "others", "records", "elsewhere/c")).unwrap_err();
    assert!(matches!(&error, Error::FolderTaken { owner, .. } if owner.job == "b"), "{error:?}");
}

#[test]
fn job_of_earlier_release_keeps_its_folder() {
    let volume = Volume::new();
    let identity = br#"{"format_version":1,"topic":"events","path":"data"}"#;
    let publish = Publish::new()
        .put_key("ingest/job/job", identity.to_vec())
        .put_key("ingest/job/fence", fence_value(7, 3))
        .put_key("ingest/job/events/0", b"9".to_vec());
    volume.view.publish(publish).unwrap();
    let rival = JobConfig::new("rival", "events", "records", "data/inner").validate().unwrap();
    let error = JobState::claim(&volume.view, &rival).unwrap_err();
    assert!(matches!(error, Error::FolderTaken { .. }), "{error:?}");
    let state = volume.claim();
    assert_eq!((state.offsets[&0], state.last.len()), (9, 0));
}
