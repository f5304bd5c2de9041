//! Claims, fences, and commits whose outcome nobody told.
#![allow(clippy::unwrap_used)]

use millrace_datafs::{Config, Datafs};

use super::*;
use crate::config::JobConfig;

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

    fn claim(&self) -> State {
        State::claim(&self.view, &self.job).unwrap()
    }

    fn commit(&self, state: &mut State, next: i64) -> Result<()> {
        let moved = BTreeMap::from([(0, next)]);
        state.commit(&self.view, &self.job, Publish::new(), &moved, None)
    }

    fn offset(&self) -> Option<i64> {
        Some(*offsets(&self.view).unwrap().get("events")?.get(&0)?)
    }

    /// A commit whose outcome the engine could not tell, `made` or not.
    fn unknown(&self, state: &mut State, next: i64, made: bool) -> Result<()> {
        let fence = fence_value(state.owner, state.commits + 1);
        let moved = BTreeMap::from([(0, next)]);
        let publish = state.with_keys(&self.job, Publish::new(), &fence, &moved, None).unwrap();
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

#[test]
fn commits_move_offsets_until_another_owner_claims() {
    let volume = Volume::new();
    let mut first = volume.claim();
    assert_eq!(volume.offset(), None);
    volume.commit(&mut first, 5).unwrap();
    volume.commit(&mut first, 9).unwrap();
    let mut second = volume.claim();
    assert_eq!(second.offsets, BTreeMap::from([(0, 9)]));
    let error = volume.commit(&mut first, 12).unwrap_err();
    assert!(matches!(error, Error::Fenced { .. }), "{error:?}");
    assert_eq!(volume.offset(), Some(9));
    volume.commit(&mut second, 12).unwrap();
    assert_eq!(volume.offset(), Some(12));
}

#[test]
fn an_unknown_outcome_is_resolved_by_the_volume() {
    let volume = Volume::new();
    let mut state = volume.claim();
    // It had taken place: the run goes on.
    volume.unknown(&mut state, 5, true).unwrap();
    state.offsets.insert(0, 5);
    volume.commit(&mut state, 8).unwrap();
    assert_eq!(volume.offset(), Some(8));
    // It had not: the error stands, and a new run goes on at what is committed.
    let error = volume.unknown(&mut state, 11, false).unwrap_err();
    assert!(matches!(error, Error::Volume { .. }), "{error:?}");
    assert_eq!(volume.claim().offsets, BTreeMap::from([(0, 8)]));
    // Somebody else owns the job by now.
    let error = volume.unknown(&mut state, 11, false).unwrap_err();
    assert!(matches!(error, Error::Fenced { .. }), "{error:?}");
}
