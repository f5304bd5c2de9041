//! The tests of the file-system semantics once more, with the metadata on PostgreSQL.
use std::cell::{Cell, RefCell};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use super::{config, faults, model, objects, open, rows, volume};
use crate::config::Config;
use crate::datafs::Datafs;
use crate::error::Error;
use crate::failpoint;
use crate::fs::unnamed::tests as unnamed;
use crate::meta::faulty::{self, Fault, Faults, Place};
use crate::meta::postgres::tests::server::Server;
use crate::publish::Publish;

thread_local! {
    /// The server that tests of this thread use instead of a file.
    static SERVER: RefCell<Option<Arc<Server>>> = const { RefCell::new(None) };
}

/// Puts a home's metadata on this thread's server, if it has one.
pub(super) fn put_into(config: &mut Config, home: &Path) {
    SERVER.with_borrow(|server| {
        let Some(server) = server else { return };
        config.meta_url = Some(server.url().into());
        config.meta_schema = schema_of(home);
        config.meta_connections_max = 3;
    });
}

/// A schema for each home.
fn schema_of(home: &Path) -> String {
    let mut hash = DefaultHasher::new();
    home.hash(&mut hash);
    format!("h{}_{:x}", std::process::id(), hash.finish())
}

/// Runs tests with metadata on PostgreSQL, where it is installed.
pub(super) fn on_postgres(run: impl FnOnce(&Server)) {
    let Some(server) = Server::shared() else { return };
    SERVER.set(Some(Arc::clone(&server)));
    run(&server);
    SERVER.set(None);
}

#[test]
fn the_model_holds_on_postgres() {
    on_postgres(|_| model::some_operations_agree_with_the_model(8));
}

#[test]
fn semantics_hold_on_postgres() {
    on_postgres(|_| faults::semantics_hold());
}

#[test]
fn extended_semantics_hold_on_postgres() {
    on_postgres(|_| faults::extended_semantics_hold());
}

#[test]
fn semantics_hold_on_bad_connections_to_postgres() {
    on_postgres(|_| {
        let faults = Faults::new(21, 40, &Fault::ALL, Place::Inside);
        faulty::with(&faults, || {
            faults::semantics_hold();
            faults::extended_semantics_hold();
            unnamed::everything_but_deaths_holds();
            model::some_operations_agree_with_the_model(3);
        });
        assert!(faults.drawn() > 3);
    });
}

#[test]
fn unlinked_files_stay_for_others_on_postgres() {
    use crate::fs::orphan::tests;
    on_postgres(|_| {
        tests::a_file_unlinked_elsewhere_stays_until_the_last_close();
        tests::an_orphan_is_opened_as_long_as_it_is_there();
        tests::orphans_are_whole_while_they_are_opened_and_let_go_at_once();
        tests::what_nobody_has_open_goes_when_all_have_answered();
        tests::who_could_open_a_file_can_read_it_while_others_replace_it();
        tests::a_successor_keeps_open_files_that_another_session_removes();
    });
}

#[test]
fn files_without_a_name_hold_on_postgres() {
    on_postgres(|_| unnamed::everything_but_deaths_holds());
}

#[test]
fn a_process_whose_lease_has_lapsed_is_cleaned_up_after() {
    on_postgres(|server| {
        let home = tempfile::tempdir().unwrap();
        let datafs = open(home.path());
        let view = volume(&datafs);
        let dead = open(home.path());
        let its_view = dead.view(&"v".parse().unwrap()).unwrap();
        its_view.write_file("kept", &[1; 10_000]).unwrap();
        let unnamed = unnamed::make(&its_view);
        let mut staged = its_view.stage().unwrap();
        staged.append(&[3; 10_000]).unwrap();
        let staged = staged.finish().unwrap();
        assert_eq!((objects(home.path()), rows(&datafs, b'p'), rows(&datafs, b'o')), (2, 2, 1));
        // While the session's lease holds, the collector leaves it alone.
        assert_eq!(datafs.gc().unwrap().sessions, 0);
        let (schema, session) = (schema_of(home.path()), dead.shared.session.id());
        server.sql(&format!(
            "UPDATE {schema}.clients SET seen = now() - interval '1 hour', lease_ms = 1 WHERE client = {session}"
        ));
        let report = datafs.gc().unwrap();
        assert_eq!((report.sessions, report.objects, report.inodes), (1, 1, 1));
        assert_eq!((objects(home.path()), rows(&datafs, b'p'), rows(&datafs, b'o')), (1, 1, 0));
        assert_eq!(view.read_file("kept").unwrap(), vec![1; 10_000]);
        // The process lives after all, but cannot publish what was collected.
        let late = its_view.publish(Publish::new().file("late", staged));
        assert!(matches!(late, Err(Error::Stale { .. })), "{late:?}");
        assert!(unnamed.link(its_view.root(), "late".as_ref()).unwrap_err().is_not_found());
        assert!(view.stat("late").unwrap_err().is_not_found());
    });
}

/// A statement after which the lease of a handle's session has lapsed.
fn lapse(home: &Path, datafs: &Datafs) -> String {
    let (schema, session) = (schema_of(home), datafs.shared.session.id());
    format!(
        "UPDATE {schema}.clients SET seen = now() - interval '1 hour', lease_ms = 1 WHERE client = {session}"
    )
}

#[test]
fn a_process_that_comes_back_before_it_is_ended_keeps_its_session() {
    on_postgres(|server| {
        let home = tempfile::tempdir().unwrap();
        let datafs = open(home.path());
        let view = volume(&datafs);
        let back = open(home.path());
        let its_view = back.view(&"v".parse().unwrap()).unwrap();
        let lapsed = lapse(home.path(), &back);
        let renewed = lapsed.replace("now() - interval '1 hour', lease_ms = 1", "now(), lease_ms = 60000");
        server.sql(&lapsed);
        let shared = Server::shared().unwrap();
        failpoint::suspend_at("gc-session-suspected", move || drop(shared.sql(&renewed)));
        assert_eq!(datafs.gc().unwrap().sessions, 0);
        its_view.write_file("kept", &[1; 10_000]).unwrap();
        assert_eq!(view.read_file("kept").unwrap(), vec![1; 10_000]);
        server.sql(&lapsed);
        assert_eq!(datafs.gc().unwrap().sessions, 1);
        assert!(its_view.write_file("late", &[1; 10_000]).is_err());
    });
}

/// The process that collects garbage is suspended at each step, and its lease lapses. The restore needs the object.
#[test]
fn a_restore_needs_no_object_that_a_suspended_process_may_delete() {
    on_postgres(|_| {
        let places = [
            "gc-garbage-due",
            "gc-deletion-decided",
            "gc-deletion-durable",
            "gc-object-chosen",
            "gc-object-deleted",
        ];
        for place in places {
            let dir = tempfile::tempdir().unwrap();
            let (home, folder) = (dir.path().join("home"), dir.path().join("backup"));
            let suspended = open(&home);
            let view = volume(&suspended);
            view.write_file("file", &[1; 10_000]).unwrap();
            suspended.backup(&folder, &|_| true).unwrap();
            view.remove_file("file").unwrap();
            let mut config = config();
            put_into(&mut config, &home);
            let (lapsed, server) = (lapse(&home, &suspended), Server::shared().unwrap());
            let at = home.clone();
            let restore = move || {
                for _ in 0..100 {
                    // Its threads go on, unlike those of a suspended process.
                    server.sql(&lapsed);
                    match Datafs::restore(&at, &config, &folder, false, &|_| true) {
                        Err(Error::InUse { .. }) => {}
                        restored => return restored,
                    }
                }
                panic!("the lease does not lapse");
            };
            let restore = Rc::new(restore);
            let (meanwhile, restored) = (Rc::clone(&restore), Rc::new(Cell::new(None)));
            let result = Rc::clone(&restored);
            failpoint::suspend_at(place, move || result.set(Some(meanwhile())));
            let collected = suspended.gc();
            let restored = restored.take().unwrap();
            if place == "gc-garbage-due" {
                restored.unwrap();
                assert!(matches!(collected, Err(Error::Stale { .. })), "{collected:?}");
            } else {
                let refused = restored.unwrap_err().to_string();
                assert!(refused.contains("may still delete it"), "{place}: {refused}");
                assert_eq!(collected.unwrap().objects, 1, "{place}");
                restore().unwrap();
            }
            drop((view, suspended));
            let datafs = open(&home);
            let view = datafs.view(&"v".parse().unwrap()).unwrap();
            datafs.gc().unwrap();
            assert_eq!(view.read_file("file").unwrap(), vec![1; 10_000], "{place}");
            assert_eq!(rows(&datafs, b'u'), 0, "{place}");
        }
    });
}

#[test]
fn deletions_stop_on_postgres() {
    use crate::deletion::tests;
    on_postgres(|_| {
        tests::a_decision_expires_while_its_process_is_suspended();
        tests::a_process_that_lost_its_session_decides_nothing();
        tests::a_process_that_lost_its_turn_decides_nothing();
    });
}

#[test]
fn records_of_killed_processes_go_on_postgres() {
    use crate::deletion_lock::tests;
    on_postgres(|_| tests::records_of_a_killed_process_go_when_its_home_is_opened_again());
}

#[test]
fn no_lease_lapses_while_the_server_is_away() {
    let Some(server) = Server::start(&["fsync=off"]) else { return };
    let server = Arc::new(server);
    SERVER.set(Some(Arc::clone(&server)));
    let home = tempfile::tempdir().unwrap();
    let (datafs, other) = (open(home.path()), open(home.path()));
    let its_view = volume(&other);
    let mut staged = its_view.stage().unwrap();
    staged.append(&[3; 10_000]).unwrap();
    let staged = staged.finish().unwrap();
    // The state after an hour without a server, before the other session has reconnected.
    let (schema, session) = (schema_of(home.path()), other.shared.session.id());
    server.sql(&format!(
        "UPDATE {schema}.clients SET seen = now() - interval '1 hour' WHERE client = {session}"
    ));
    server.stop();
    server.resume();
    assert_eq!(datafs.gc().unwrap().sessions, 0);
    its_view.publish(Publish::new().file("kept", staged)).unwrap();
    drop((datafs, its_view, other));
    SERVER.set(None);
}
