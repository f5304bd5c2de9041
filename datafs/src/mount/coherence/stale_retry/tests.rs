//! Tests of stale retries.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::meta::inode::Inode;
use crate::node::FileKind;

const NODE: Node = Node { snapshot: 0, ino: 20 };
const OTHER: Node = Node { snapshot: 0, ino: 21 };
/// Above the largest process identifier.
const NO_THREAD: u32 = 5_000_000;

fn found(node: Node) -> Option<Arc<Found>> {
    let attr = Inode::new(FileKind::File, 0o644, 0, 0).attr(node);
    Some(Arc::new(Found { attr, target: None, _file: None }))
}

#[test]
fn an_existing_file_is_held_for_the_thread_that_was_to_create_it() {
    let retries = StaleRetries::default();
    let existing = |node| Found { attr: found(node).unwrap().attr, target: None, _file: None };
    let name = OsStr::new("name");
    retries.refuse_creation(7, NODE, name, existing(OTHER));
    // The kernel looks the parent directories up first.
    retries.keep(7, found(NODE));
    assert_eq!(retries.existing(7, NODE, name).unwrap().attr.node, OTHER);
    assert!(retries.existing(7, NODE, OsStr::new("other")).is_none());
    assert!(retries.existing(7, OTHER, name).is_none() && retries.existing(8, NODE, name).is_none());
    retries.keep(7, retries.existing(7, NODE, name));
    assert!(retries.take(7, OTHER).is_some());
    assert!(retries.existing(7, NODE, name).is_none(), "it was opened");
    retries.refuse_creation(0, NODE, name, existing(OTHER));
    assert!(retries.existing(0, NODE, name).is_none(), "a thread of another namespace");
}

#[test]
fn what_a_thread_has_found_last_is_its_own() {
    let retries = StaleRetries::default();
    assert!(!retries.serves(7));
    retries.keep(7, found(OTHER));
    assert!(retries.take(7, OTHER).is_none(), "it was refused nothing");
    assert!(retries.refuse(7, Refused::Node, NODE) && retries.serves(7));
    retries.keep(7, found(OTHER));
    assert!(retries.take(8, OTHER).is_none() && retries.take(7, NODE).is_none());
    assert!(retries.found(7, OTHER).is_some());
    retries.keep(7, None);
    assert!(retries.found(7, OTHER).is_some(), "as the file of a new link");
    retries.keep(7, found(NODE));
    assert!(retries.take(7, NODE).is_some());
    assert!(retries.take(7, NODE).is_none() && !retries.serves(7));
}

#[test]
fn who_comes_back_with_the_same_has_no_other_way() {
    let retries = StaleRetries::default();
    assert!(retries.refuse(7, Refused::Name, NODE));
    assert!(retries.refuse(8, Refused::Name, NODE));
    assert!(!retries.refuse(7, Refused::Name, NODE));
    assert!(retries.refuse(7, Refused::Name, OTHER));
    retries.keep(7, found(OTHER));
    assert!(retries.refuse(7, Refused::Name, OTHER));
    assert!(!retries.refuse(0, Refused::Name, OTHER), "nobody in particular");
}

#[test]
fn every_thread_that_is_sent_for_a_size_comes_back_for_itself() {
    let retries = StaleRetries::default();
    assert!(retries.refuse(7, Refused::Size, NODE) && retries.refuse(8, Refused::Size, NODE));
    assert!(retries.walks(NODE) && !retries.walks(OTHER));
    retries.keep(7, found(NODE));
    let (arrival, held) = retries.arrive(7, NODE);
    assert!(arrival.found && arrival.sized && held.is_some());
    assert!(retries.walks(NODE), "the other one does");
    let (arrival, held) = retries.arrive(8, NODE);
    assert!(arrival.again && !arrival.found && !arrival.sized && held.is_none(), "without a look-up");
    assert!(!retries.walks(NODE) && retries.arrive(8, NODE).0.again);
    retries.forget(8);
    assert!(!retries.arrive(8, NODE).0.again && !retries.serves(8));
    assert!(!retries.refuse(0, Refused::Size, NODE) && !retries.walks(NODE), "nobody in particular");
}

#[test]
fn a_change_of_names_comes_back_once_and_to_the_same_folder() {
    let retries = StaleRetries::default();
    retries.refuse(7, Refused::Change, NODE);
    assert!(!retries.changes_again(7, OTHER) && !retries.changes_again(8, NODE));
    retries.keep(7, found(OTHER));
    assert!(retries.changes_again(7, NODE));
    assert!(!retries.changes_again(7, NODE) && !retries.serves(7));
    retries.refuse(7, Refused::Node, NODE);
    assert!(!retries.changes_again(7, NODE), "it was refused something else");
}

#[test]
fn a_removal_of_a_name_that_is_gone_on_the_second_way_does_not_come_back() {
    let retries = StaleRetries::default();
    retries.refuse(7, Refused::Removal, NODE);
    assert!(retries.changes_again(7, NODE));
    retries.refuse(7, Refused::Removal, NODE);
    retries.misses(7);
    assert!(!retries.serves(7) && !retries.changes_again(7, NODE));
    // The new name of a rename need not exist.
    retries.refuse(7, Refused::Change, NODE);
    retries.misses(7);
    assert!(retries.changes_again(7, NODE));
    // A creation may follow.
    retries.refuse(7, Refused::Node, NODE);
    retries.misses(7);
    assert!(retries.serves(7));
}

#[test]
fn nothing_is_kept_for_long() {
    let retries = StaleRetries::default();
    assert!(retries.due().is_none());
    retries.refuse(NO_THREAD, Refused::Node, NODE);
    retries.keep(NO_THREAD, found(OTHER));
    let due = retries.due().unwrap();
    assert!(due <= Instant::now() + KEPT);
    retries.give_up(due - Duration::from_millis(1));
    assert!(retries.found(NO_THREAD, OTHER).is_some());
    retries.give_up(due);
    assert!(retries.due().is_none() && retries.take(NO_THREAD, OTHER).is_none());
}

#[test]
fn a_thread_is_expected_for_a_while_and_served_for_as_long_as_that_takes() {
    let retries = StaleRetries::default();
    retries.refuse(NO_THREAD, Refused::Node, NODE);
    retries.give_up(Instant::now() + EXPECTED / 2);
    assert!(retries.serves(NO_THREAD), "on a machine that has much to do");
    retries.give_up(Instant::now() + SERVED / 2);
    retries.keep(NO_THREAD, found(OTHER));
    assert!(retries.take(NO_THREAD, OTHER).is_some(), "whatever finding it took");
    retries.refuse(NO_THREAD, Refused::Node, NODE);
    retries.give_up(Instant::now() + EXPECTED);
    assert!(!retries.serves(NO_THREAD));
}
