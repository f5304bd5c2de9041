//! The journeys on two mounts, repeated with the metadata on PostgreSQL.
#![allow(clippy::unwrap_used)]

use std::cell::RefCell;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;

use millrace_datafs::Config;

use super::{Home, coherence, eventually, locking, mount_of, sharing};
use crate::postgres::server::Server;

thread_local! {
    /// The configuration for the homes of this thread's test.
    static CONFIG: RefCell<Option<Config>> = const { RefCell::new(None) };
}

/// The configuration for a home of this thread.
pub(super) fn config() -> Config {
    CONFIG.with_borrow(|config| config.clone().unwrap_or_default())
}

/// Runs journeys with metadata in schemas of one server, where it is installed.
fn on_postgres(journeys: &[fn()]) {
    let Some(server) = Server::shared() else { return };
    for journey in journeys {
        CONFIG.set(Some(Config {
            meta_url: Some(server.url().into()),
            meta_schema: server.new_schema(),
            meta_connections_max: 4,
            ..Config::default()
        }));
        journey();
    }
    CONFIG.set(None);
}

#[test]
fn two_mounts_are_coherent_on_postgres() {
    on_postgres(&[
        coherence::an_open_is_never_stale,
        coherence::a_name_that_was_missing_is_found_once_it_is_there,
        coherence::a_file_that_the_library_names_is_found_whole_where_it_was_missing,
        coherence::what_others_do_is_soon_seen_without_opening,
        coherence::a_reader_with_an_open_file_sees_it_grow,
        coherence::what_the_library_publishes_beside_a_mount_is_seen_through_it,
        sharing::two_mounts_of_one_volume_see_each_others_closed_files,
        sharing::what_was_synced_is_there_for_everybody,
    ]);
}

#[test]
fn two_mounts_lock_each_other_out_on_postgres() {
    on_postgres(&[
        locking::who_locks_sees_what_the_last_holder_wrote_on_another_mount,
        locking::a_database_is_written_alternately_from_two_mounts,
    ]);
}

fn a_file_that_another_mount_has_unlinked_stays_open() {
    let Some(home) = Home::new() else { return };
    let other = home.again();
    let (one, two) = (home.mount("data"), mount_of(&other, "data", &home.at("other")));
    let bytes = vec![7; 300_000];
    fs::write(one.path().join("f"), &bytes).unwrap();
    let open = File::options().read(true).write(true).open(two.path().join("f")).unwrap();
    fs::remove_file(one.path().join("f")).unwrap();
    eventually("the removal", || fs::metadata(two.path().join("f")).is_err());
    let mut read = vec![0; bytes.len()];
    open.read_exact_at(&mut read, 0).unwrap();
    assert!(read == bytes);
    (&open).write_all(b"still there").unwrap();
    open.sync_all().unwrap();
    open.read_exact_at(&mut read[..11], 0).unwrap();
    assert_eq!(&read[..11], b"still there");
}

#[test]
fn unlinked_files_stay_open_on_postgres() {
    on_postgres(&[a_file_that_another_mount_has_unlinked_stays_open]);
}
