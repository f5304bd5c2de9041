//! Tests of the inode table.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::meta::inode::Inode;
use crate::node::{FileKind, Node};

/// The stamp of a name, and the thread that is told it.
const NAMED: (u32, u32) = (1, EVERY_THREAD);

fn asker(known: &InodeTable, thread: u32) -> Asker {
    Asker { thread, arrived: known.clock(), arrived_ms: 1, again: false, unlinks: false }
}

fn attr(ino: u64) -> Attr {
    Inode::new(FileKind::File, 0o644, 0, 0).attr(Node { snapshot: 0, ino })
}

#[test]
fn nodes_are_known_until_they_are_forgotten_and_never_too_many() {
    let mut known = InodeTable::default();
    let many = (TABLES * TABLE_MAX) as u64;
    for ino in 0..many {
        assert!(known.note(&attr(ino), Some(NAMED), 7));
    }
    assert!(known.note(&attr(5), Some(NAMED), 8) && !known.was_crowded());
    assert!(!known.note(&attr(many), Some(NAMED), 8) && known.was_crowded());
    assert!(known.get_mut(many).is_none());
    known.forget(5, 1);
    assert_eq!(known.get_mut(5).unwrap().answered_ms, 8);
    for ino in 0..=many {
        known.forget(ino, 1);
    }
    assert_eq!(known.inos().count(), 0);
    let kept: usize = known.tables.iter().map(HashMap::capacity).sum();
    assert!(kept <= 2 * TABLES * SPARE_MAX, "{kept} are kept");
    assert!(known.note(&attr(many), None, 9));
}

/// The kernel forgets nodes and looks others up, many times.
#[test]
fn tables_never_outgrow_their_bound() {
    let mut known = InodeTable::default();
    // All inodes are in one table, to which the bound applies.
    let ino = |number: usize| (number * TABLES) as u64;
    for room in [TABLE_FULL / 2 - 1, TABLE_FULL / 2, TABLE_FULL / 2 + 1, TABLE_MAX] {
        let before = known.inos().count();
        for number in before..room {
            assert!(known.note(&attr(ino(number)), Some(NAMED), 1));
        }
        for number in 0..200_000 {
            known.forget(ino(number), 1);
            assert!(known.note(&attr(ino(number + room)), Some(NAMED), 1));
            assert!(known.tables[0].capacity() <= TABLE_FULL, "{room}: {number}");
        }
        assert_eq!(known.tables[0].len(), room);
        known = InodeTable::default();
    }
    assert!(!known.was_crowded());
}

#[test]
fn removed_nodes_are_kept_until_the_kernel_forgets_them() {
    let mut known = InodeTable::default();
    let removed = |ino| Removed { attr: attr(ino), target: None };
    known.note(&attr(7), Some(NAMED), 1);
    known.note(&attr(8), None, 1);
    (7..10).for_each(|ino| known.remove(removed(ino)));
    assert_eq!([7, 8, 9].map(|ino| known.removed(ino).is_some()), [true, false, false]);
    known.forget(7, 1);
    assert!(known.removed(7).is_none() && known.removed.is_empty());
}

#[test]
fn a_name_is_told_until_the_node_loses_a_name() {
    let mut known = InodeTable::default();
    let stamp = |name: &str, version| name_stamp(1, OsStr::new(name), version);
    let file = |names_version| Attr { names_version, ..attr(7) };
    let note =
        |known: &mut InodeTable, version, stamp, thread| known.note(&file(version), Some((stamp, thread)), 1);
    let lost = |known: &mut InodeTable, version| known.has_lost_name(&file(version), 1 << 20);
    let told = |known: &InodeTable, stamp, again| {
        let asker = Asker { arrived_ms: 2, again, ..asker(known, 5) };
        known.is_told(7, stamp, &asker) != Told::No
    };
    note(&mut known, 0, stamp("a", 0), 5);
    assert!(told(&known, stamp("a", 0), false) && !told(&known, stamp("b", 0), true));
    assert_eq!(known.is_told(8, stamp("a", 0), &asker(&known, 5)), Told::No, "another node");
    // Another mount has moved the file away and back.
    assert!(!told(&known, stamp("a", 2), true) && lost(&mut known, 2));
    note(&mut known, 2, stamp("a", 2), 6);
    assert!(!told(&known, stamp("a", 2), false), "another thread was told a moment ago");
    assert!(told(&known, stamp("a", 2), true));
    known.moves(7, 3, stamp("b", 3), Told::Surely);
    assert!(told(&known, stamp("b", 3), true) && !lost(&mut known, 3));
    note(&mut known, 2, stamp("a", 2), 5);
    assert!(told(&known, stamp("b", 3), true), "that was read before the move");
    // This mount removes another name of the file, and another mount one more.
    known.loses_name(7, 4);
    assert!(told(&known, stamp("b", 4), true) && !lost(&mut known, 4));
    known.loses_name(7, 6);
    assert!(!told(&known, stamp("b", 6), true) && lost(&mut known, 6));
    note(&mut known, 6, stamp("b", 6), 5);
    known.untell(7);
    assert!(!told(&known, stamp("b", 6), true));
}

#[test]
fn a_name_that_another_thread_was_told_a_moment_ago_is_not_sure() {
    let mut known = InodeTable::default();
    let in_flight_ms = IN_FLIGHT.as_millis() as u32;
    known.note(&attr(7), Some((9, 5)), 1_000);
    let asked = |known: &InodeTable, thread, after_ms| {
        known.is_told(7, 9, &Asker { arrived_ms: 1_000 + after_ms, ..asker(known, thread) })
    };
    assert_eq!(asked(&known, 5, 0), Told::Surely, "it was told itself");
    assert_eq!(asked(&known, 6, 0), Told::No);
    assert_eq!(asked(&known, 6, in_flight_ms - 1), Told::No);
    assert_eq!(asked(&known, 6, in_flight_ms), Told::Likely);
    assert_eq!(asked(&known, 0, 0), Told::Likely, "a thread that is never known to come back");
    let unlinks = Asker { arrived_ms: 1_000, unlinks: true, ..asker(&known, 6) };
    assert_eq!(known.is_told(7, 9, &unlinks), Told::Likely);
    assert_eq!(known.is_told(7, 9, &Asker { arrived: known.clock() - 1, ..unlinks }), Told::No);
    let again = Asker { arrived_ms: 1_000, again: true, ..asker(&known, 6) };
    assert_eq!(known.is_told(7, 9, &again), Told::Likely);
    // The kernel may have moved something else.
    known.moves(7, 1, 10, Told::Likely);
    let moved = |known: &InodeTable| known.is_told(7, 10, &Asker { arrived_ms: 1_000, ..asker(known, 5) });
    assert_eq!(moved(&known), Told::No);
    let moved_attr = Attr { names_version: 1, ..attr(7) };
    known.note(&moved_attr, Some((10, 5)), 1_000);
    assert_eq!(moved(&known), Told::Surely, "it has looked the name up since");
    known.note(&moved_attr, Some((10, EVERY_THREAD)), 1_000);
    known.note(&moved_attr, Some((10, 6)), 1_000);
    assert_eq!(moved(&known), Told::Surely, "the directory was listed");
}

#[test]
fn beyond_the_table_a_thread_of_another_namespace_may_change_names() {
    let mut known = InodeTable::default();
    assert_eq!(known.is_told(7, 9, &asker(&known, 0)), Told::No);
    known.was_crowded = true;
    assert_eq!(known.is_told(7, 9, &asker(&known, 0)), Told::Likely);
    assert_eq!(known.is_told(7, 9, &asker(&known, 5)), Told::No);
    assert_eq!(known.is_told(7, 9, &Asker { again: true, ..asker(&known, 5) }), Told::Likely);
}

#[test]
fn a_look_up_under_a_new_name_leaves_the_old_one_in_doubt_for_its_lifetime() {
    let mut known = InodeTable::default();
    let moved = Attr { names_version: 1, ..attr(7) };
    known.note(&attr(7), Some((8, 5)), 1_000);
    assert!(!known.has_lost_name(&attr(7), 1_000));
    known.note(&moved, Some((9, 5)), 2_000);
    let kept_ms = name_lifetime(&moved).as_millis() as u32;
    assert!(known.has_lost_name(&moved, 2_000) && known.has_lost_name(&moved, 1_999 + kept_ms));
    assert!(!known.has_lost_name(&moved, 2_000 + kept_ms) && known.doubted.is_empty());
    known.note(&Attr { names_version: 2, ..moved }, Some((9, 5)), 2_000);
    known.settle_names(&moved);
    assert!(!known.has_lost_name(&Attr { names_version: 2, ..moved }, 2_000));
    known.note(&Attr { names_version: 3, ..moved }, Some((9, 5)), 2_000);
    known.forget(7, 4);
    assert!(known.doubted.is_empty());
}

#[test]
fn a_thread_of_another_namespace_is_expected_with_the_access_that_it_was_refused() {
    let mut known = InodeTable::default();
    known.note(&attr(7), Some(NAMED), 1);
    let [one, other] = [b"one", b"two"].map(|value| list_stamp(value));
    known.tells_list(7, NO_LIST);
    let changed = Attr { mode: attr(7).mode ^ 0o044, names_version: 1, ..attr(7) };
    let access = access_of(&changed);
    let expects = |known: &InodeTable, list| known.get(7).unwrap().expects_access(access, list);
    assert!(!expects(&known, one));
    known.get_mut(7).unwrap().expects(&changed, one);
    // The kernel receives these on the second walk.
    known.note(&changed, Some(NAMED), 2);
    known.tells_list(7, one);
    assert!(expects(&known, one) && !expects(&known, other) && !known.has_lost_name(&changed, 2));
    assert!(known.get(7).unwrap().access_in_doubt, "the daemon decides");
    known.tells_list(7, other);
    assert!(!expects(&known, other), "that was changed since");
    known.get_mut(7).unwrap().expects(&changed, other);
    known.note(&attr(7), None, 3);
    assert!(!known.get(7).unwrap().expects_access(access_of(&attr(7)), other));
}

#[test]
fn an_access_control_list_counts_once_it_was_told() {
    let mut known = InodeTable::default();
    known.note(&attr(7), Some(NAMED), 1);
    let [one, other] = [b"one", b"two"].map(|value| list_stamp(value));
    let differs = |known: &InodeTable, list| known.get(7).unwrap().has_other_list(list);
    assert!(!differs(&known, one) && !differs(&known, NO_LIST));
    known.tells_list(7, one);
    assert!(!differs(&known, one) && differs(&known, other) && differs(&known, NO_LIST));
    assert!(!known.get(7).unwrap().access_in_doubt);
    known.tells_list(7, NO_LIST);
    assert!(differs(&known, one) && !differs(&known, NO_LIST));
    assert!(known.get(7).unwrap().access_in_doubt, "the answers may arrive in the other order");
    known.drops_list(7);
    assert!(!differs(&known, one) && !differs(&known, other));
}

#[test]
fn a_size_is_not_sure_while_an_answer_with_another_one_may_be_under_way() {
    let mut known = InodeTable::default();
    let changed = Attr { data_version: 9, ..attr(7) };
    known.note(&attr(7), Some(NAMED), 1);
    assert!(known.get(7).unwrap().has_size(&attr(7)));
    known.note(&changed, None, 2);
    assert!(!known.get(7).unwrap().has_size(&changed));
    known.get_mut(7).unwrap().settle_size();
    assert!(known.get(7).unwrap().has_size(&changed) && !known.get(7).unwrap().has_size(&attr(7)));
}

#[test]
fn an_account_is_small_and_times_differ() {
    assert_eq!(size_of::<(u64, Known)>(), 64);
    let epoch = SystemTime::UNIX_EPOCH;
    let times = [Duration::ZERO, Duration::from_nanos(1), Duration::from_secs(1 << 33)];
    for (i, time) in times.iter().enumerate() {
        for other in &times[..i] {
            assert_ne!(stamp(epoch + *time), stamp(epoch + *other));
            assert_ne!(stamp(epoch - *time), stamp(epoch + *other));
        }
    }
}
