//! The tests of the file-system semantics once more, on a metadata engine with faults.

use super::{extended, model, semantics};
use crate::fs::unnamed::tests as unnamed;
use crate::meta::faulty::{self, Fault, Faults, Place};

/// The tests of POSIX semantics, on the engine that the thread's tests use.
pub(super) fn semantics_hold() {
    semantics::bytes_come_back_across_every_border();
    semantics::a_small_file_costs_no_object();
    semantics::append_goes_to_the_end();
    semantics::open_flags_are_kept();
    semantics::an_unlinked_open_file_stays_readable();
    semantics::a_replaced_open_file_stays_readable();
    semantics::renames_keep_the_rules();
    semantics::directories_and_links_keep_the_rules();
    semantics::attributes_keep_nanoseconds();
    semantics::a_cursor_survives_changes_of_the_directory();
    semantics::snapshots_appear_below_the_root();
    semantics::a_publish_is_whole_or_nothing();
    semantics::a_large_unlinked_file_is_freed_in_batches();
    semantics::volumes_come_and_go();
}

/// The tests of extended attributes, holes, copies and exchanges.
pub(super) fn extended_semantics_hold() {
    extended::extended_attributes_are_set_listed_and_removed();
    extended::extended_attributes_have_rules();
    extended::ranges_become_holes_and_holes_are_found();
    extended::small_files_have_holes_too();
    extended::what_cannot_be_allocated_says_so();
    extended::large_ranges_are_copied_by_reference();
    extended::copies_inside_one_file_and_with_holes();
    extended::names_are_exchanged();
    extended::whoever_changes_a_program_takes_its_privileges();
}

fn everything_holds(faults: &std::sync::Arc<Faults>) {
    faulty::with(faults, || {
        semantics_hold();
        extended_semantics_hold();
        unnamed::everything_but_deaths_holds();
        model::some_operations_agree_with_the_model(12);
    });
    assert!(faults.drawn() > 0);
}

#[test]
fn semantics_hold_on_a_faulty_engine() {
    for seed in 31..34 {
        everything_holds(&Faults::new(seed, 6, &Fault::CLEAR, Place::Around));
    }
}

#[test]
fn semantics_hold_whatever_happens_to_commits_of_groups() {
    // The faults after which the commit's outcome is known.
    let kinds = [Fault::Conflict, Fault::Timeout, Fault::LostAfter];
    everything_holds(&Faults::new(32, 3, &kinds, Place::Inside));
}
