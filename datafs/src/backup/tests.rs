//! Test of a restore whose hold on garbage collection was lost.
use super::*;
use crate::Publish;

#[test]
fn a_restore_whose_hold_was_lost_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let [home, other, folder] = ["home", "other", "backup"].map(|name| dir.path().join(name));
    let config = Config { gc_interval_ms: 0, ..Config::default() };
    let datafs = Datafs::open(&home, &config).unwrap();
    datafs.volume_create(&"v".parse().unwrap()).unwrap();
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    let mut staged = view.stage().unwrap();
    staged.append(&[7; 100_000]).unwrap();
    view.publish(Publish::new().file("f", staged.finish().unwrap())).unwrap();
    datafs.backup(&folder, &|_| true).unwrap();
    drop(Datafs::open(&other, &config).unwrap());
    // As if another process had declared the restoring one dead.
    let lose = |_| {
        let shared = datafs::open_shared(&other, &config).unwrap();
        let mut holds = Vec::new();
        let keep = |key: &[u8], _: &[u8]| {
            holds.push(key.to_vec());
            Ok(())
        };
        shared.meta.each(&keys::holds(), keep).unwrap();
        let forget =
            |txn: &mut dyn crate::meta::engine::WriteTxn| holds.iter().try_for_each(|key| txn.delete(key));
        shared.meta.transact(Durability::Durable, forget).unwrap();
        true
    };
    let error = Datafs::restore(&other, &config, &folder, false, &lose).unwrap_err();
    assert!(matches!(error, Error::Stale { .. }), "{error}");
    let opened = Datafs::open(&other, &config).unwrap();
    assert!(opened.volume_list().unwrap().volumes.is_empty());
}
