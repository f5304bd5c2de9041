//! Tests of fsck: a sound home has no problems; each kind of damage is found, named, and repaired as far as
//! possible.
use std::ffi::OsStr;
use std::sync::atomic::{AtomicBool, Ordering};

use tempfile::TempDir;

use super::*;
use crate::compact::Compact;
use crate::config::Config;
use crate::fs::tests::setup_with;
use crate::fs::{OpenFlags, Owner, View};
use crate::meta::counting::{self, Counts};
use crate::meta::engine::{Durability, Order, WriteTxn};
use crate::meta::inode::{Dentry, Inode, Timestamp, encode_extent};
use crate::meta::keys;
use crate::meta::references::References;
use crate::meta::versioned::{VolumeRow, Writer, record_of};
use crate::node::{Node, ROOT_INO};
use crate::object::{Extent, ObjectId};
use crate::publish::Publish;

struct Home {
    dir: TempDir,
    datafs: Datafs,
    view: View,
}

impl Home {
    /// Directories, small and large files, links of both kinds, attributes. One snapshot holds files that
    /// were changed and removed since; another one was deleted.
    fn new() -> Home {
        let config = Config { gc_interval_ms: 0, garbage_grace_ms: 0, ..Config::default() };
        let (dir, datafs, view) = setup_with(config);
        let name = "v".parse().unwrap();
        let owner = Owner { uid: 0, gid: 0 };
        view.create_dir_all("a/b/c").unwrap();
        for i in 0..40_usize {
            view.write_file(&format!("a/b/file-{i}"), &vec![i as u8; i * 700]).unwrap();
        }
        view.write_file("a/large", &vec![7; 3 << 20]).unwrap();
        let large = view.stat("a/large").unwrap().node;
        let parent = view.stat("a").unwrap().node;
        view.link(large, parent, OsStr::new("second")).unwrap();
        view.symlink(parent, OsStr::new("link"), OsStr::new("b/file-3"), owner).unwrap();
        datafs.snapshot_create(&name, &"old".parse().unwrap()).unwrap();
        view.write_file("a/b/file-7", &[1; 20_000]).unwrap();
        datafs.snapshot_create(&name, &"kept".parse().unwrap()).unwrap();
        let (_, file) =
            view.create(view.root(), OsStr::new("holes"), 0o644, owner, OpenFlags::READ_WRITE).unwrap();
        file.write_at(900_000, &[9; 10_000]).unwrap();
        file.fsync().unwrap();
        let file = view.open(large, OpenFlags::READ_WRITE).unwrap();
        file.write_at(1 << 20, &[3; 100_000]).unwrap();
        file.fsync().unwrap();
        view.remove_file("a/b/file-9").unwrap();
        view.rename_path("a/b/c", "a/d").unwrap();
        // These are in no snapshot.
        view.write_file("new/file", &[8; 5_000]).unwrap();
        view.create_dir_all("new/folder/inner").unwrap();
        view.symlink(view.root(), OsStr::new("new-link"), OsStr::new("new/file"), owner).unwrap();
        datafs.snapshot_delete(&name, &"old".parse().unwrap()).unwrap();
        datafs.gc().unwrap();
        Home { dir, datafs, view }
    }

    fn check(&self, scrub: bool, repair: bool) -> FsckReport {
        self.datafs.fsck(&FsckOptions { scrub, repair }, &mut |_| {}).unwrap()
    }

    fn assert_sound(&self) {
        let report = self.check(true, false);
        assert!(report.is_sound(), "{:#?}", report.found);
    }

    fn change(&self, mut body: impl FnMut(&mut dyn WriteTxn)) {
        self.datafs
            .shared
            .meta
            .transact(Durability::Durable, |txn| {
                body(txn);
                Ok(())
            })
            .unwrap();
    }

    fn ino(&self, path: &str) -> u64 {
        self.view.stat(path).unwrap().node.ino
    }

    fn live(&self, record: &[u8]) -> Vec<u8> {
        keys::live(self.view.volume, record)
    }

    /// The object of the first extent of a file.
    fn object(&self, path: &str) -> ObjectId {
        let prefix = self.live(&keys::extents(self.ino(path)));
        let end = keys::after_prefix(&prefix);
        let found = self.datafs.shared.meta.view(|txn| txn.scan(&prefix, &end, Order::Ascending, 1)).unwrap();
        crate::meta::inode::decode_extent(0, &found[0].1[8..]).unwrap().object
    }

    /// Asserts that a problem of this kind is found, can be repaired, and is repaired.
    fn mends(&self, kind: ProblemKind) {
        let report = self.check(false, false);
        let kinds: Vec<_> = report.found.iter().map(|problem| problem.kind).collect();
        assert!(kinds.contains(&kind), "{kind:?}: {:#?}", report.found);
        assert!(report.is_damaged() && report.repaired == 0);
        let report = self.check(false, true);
        assert!(!report.is_sound() && !report.is_damaged(), "{:#?}", report.found);
        self.datafs.gc().unwrap();
        self.assert_sound();
    }
}

fn edit(txn: &mut dyn WriteTxn, key: &[u8], change: impl Fn(&mut Inode)) {
    let version = txn.get(key).unwrap().unwrap();
    let mut inode = Inode::decode(&version[8..]).unwrap();
    change(&mut inode);
    txn.put(key, &[&version[..8], &inode.encode()].concat()).unwrap();
}

#[test]
fn a_sound_home_is_sound() {
    let home = Home::new();
    let mut stages = Vec::new();
    let report = home
        .datafs
        .fsck(&FsckOptions { scrub: true, repair: true }, &mut |progress| stages.push(progress.stage))
        .unwrap();
    assert!(report.is_sound() && !report.is_damaged(), "{:#?}", report.found);
    assert_eq!((report.volumes, report.snapshots), (1, 1));
    // Root, a, b, d, new, folder, inner; 39 files, large, link, holes, the new file and link.
    assert_eq!(report.inodes, 7 + 39 + 5);
    assert_eq!(report.names, 6 + 39 + 6);
    assert!(report.extents > 30 && report.objects > 30 && report.scrubbed_bytes > 3 << 20);
    stages.dedup();
    assert_eq!(stages.last(), Some(&"scrub"));
}

#[test]
fn work_under_way_is_no_damage() {
    let home = Home::new();
    // An object that is not published yet, an unlinked file that is open, a deletion that has begun.
    let mut staged = home.view.stage().unwrap();
    staged.append(&[5; 100_000]).unwrap();
    let staged = staged.finish().unwrap();
    let open = home.view.open(home.view.stat("holes").unwrap().node, OpenFlags::READ_WRITE).unwrap();
    home.view.remove_file("holes").unwrap();
    home.datafs.volume_create(&"gone".parse().unwrap()).unwrap();
    let gone = home.datafs.view(&"gone".parse().unwrap()).unwrap();
    gone.write_file("some/file", &[6; 50_000]).unwrap();
    home.datafs.volume_delete(&"gone".parse().unwrap()).unwrap();
    home.assert_sound();
    assert!(home.check(false, false).unclaimed_objects > 0);
    drop((staged, open));
    home.datafs.gc().unwrap();
    home.assert_sound();
    assert_eq!(home.check(false, false).unclaimed_objects, 0);
}

#[test]
fn names_without_inodes_go() {
    let home = Home::new();
    let entry = home.live(&keys::child(home.ino("a"), b"nowhere"));
    let value = Dentry { ino: 999, kind: crate::node::FileKind::File }.encode();
    home.change(|txn| txn.put(&entry, &[&9_u64.to_be_bytes()[..], &value].concat()).unwrap());
    home.mends(ProblemKind::DanglingName);
    assert!(home.view.stat("a/nowhere").is_err());
}

#[test]
fn inodes_without_names_are_found_again() {
    let home = Home::new();
    let (file, folder) = (home.ino("new/file"), home.ino("new/folder"));
    let new = home.ino("new");
    let entries = [home.live(&keys::child(new, b"file")), home.live(&keys::child(new, b"folder"))];
    home.change(|txn| entries.iter().for_each(|entry| txn.delete(entry).unwrap()));
    home.mends(ProblemKind::LostInode);
    assert_eq!(home.view.read_file(&format!("lost+found/#{file}")).unwrap()[..], [8; 5_000]);
    assert_eq!(home.ino(&format!("lost+found/#{folder}")), folder);
    assert!(home.view.stat(&format!("lost+found/#{folder}/inner")).is_ok());
}

#[test]
fn link_counts_and_parents_are_corrected() {
    let home = Home::new();
    let attributes = |path| home.live(&keys::attributes(home.ino(path)));
    let (large, a, d) = (attributes("a/large"), attributes("a"), attributes("a/d"));
    home.change(|txn| {
        edit(txn, &large, |inode| inode.nlink = 7);
        edit(txn, &a, |inode| inode.nlink = 2);
    });
    home.mends(ProblemKind::WrongLinks);
    assert_eq!(home.view.stat("a/large").unwrap().nlink, 2);
    home.change(|txn| edit(txn, &d, |inode| inode.parent = ROOT_INO));
    home.mends(ProblemKind::WrongName);
}

#[test]
fn unlinked_inodes_that_nobody_would_free_are_freed() {
    let home = Home::new();
    let ino = home.ino("a/b/file-30");
    let entry = home.live(&keys::child(home.ino("a/b"), b"file-30"));
    let key = home.live(&keys::attributes(ino));
    home.change(|txn| {
        txn.delete(&entry).unwrap();
        edit(txn, &key, |inode| inode.nlink = 0);
    });
    home.mends(ProblemKind::LostOrphan);
    assert!(home.view.getattr(Node { snapshot: 0, ino }).is_err());
}

/// Damage by a compaction of older versions that missed a write: one extent over all of the file, and the
/// write inside it.
#[test]
fn overlapping_extents_are_cut_and_the_inner_one_stays_whole() {
    let home = Home::new();
    let mut content: Vec<u8> =
        (0..1 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    home.view.write_file("f", &content).unwrap();
    let (ino, object) = (home.ino("f"), home.object("f"));
    let file = home.view.open(home.view.stat("f").unwrap().node, OpenFlags::READ_WRITE).unwrap();
    for at in [100_000, 100_500, 700_000] {
        file.write_at(at as u64, &[at as u8; 300]).unwrap();
        content[at..at + 300].fill(at as u8);
        file.flush().unwrap();
    }
    let whole = Extent { file_offset: 0, len: 1 << 20, object, object_offset: 0 };
    home.change(|txn| {
        Writer::run(txn, home.view.volume, home.datafs.shared.session.id(), |writer| {
            for rest in [100_300, 100_800, 700_300] {
                writer.delete(&keys::extent(ino, rest))?;
            }
            writer.put(&keys::extent(ino, 0), &encode_extent(&whole))
        })
        .unwrap();
    });
    let hidden = file.read_at(300_000, 1_000).unwrap();
    assert!(hidden != content[300_000..301_000], "extents that overlap hide bytes");
    let report = home
        .datafs
        .compact(None, &Compact { extents_min: 1, extent_bytes_min: 1 << 30, ..Compact::default() })
        .unwrap();
    assert!(report.conflicts > 0, "a compaction leaves them to fsck: {report:?}");
    home.mends(ProblemKind::WrongExtents);
    assert!(home.view.read_file("f").unwrap() == content);
}

#[test]
fn a_counter_that_would_repeat_is_raised() {
    let home = Home::new();
    let key = keys::next_ino(home.view.volume);
    home.change(|txn| txn.put(&key, &20_u64.to_be_bytes()).unwrap());
    home.mends(ProblemKind::WrongCounter);
}

#[test]
fn history_and_its_lists_are_brought_together() {
    let home = Home::new();
    let prefix = keys::dead_lists(home.view.volume);
    let end = keys::after_prefix(&prefix);
    home.change(|txn| {
        let entries = txn.scan(&prefix, &end, Order::Ascending, 10).unwrap();
        txn.delete(&entries[1].0).unwrap();
        let mut stray = entries[2].0.clone();
        stray.truncate(stray.len() - 1);
        txn.put(&stray, &[]).unwrap();
    });
    home.mends(ProblemKind::WrongHistory);
}

#[test]
fn references_are_counted_anew() {
    let home = Home::new();
    let (one, other) = (home.object("a/b/file-20"), home.object("a/b/file-21"));
    home.change(|txn| {
        let wrong = References { extents: 3, bytes: 7 };
        txn.put(&keys::references(one), &wrong.encode()).unwrap();
        txn.delete(&keys::references(other)).unwrap();
        let now = Timestamp::now().parts();
        let row = crate::meta::codec::Encoder::default().i64(now.0).u32(now.1).finish();
        txn.put(&keys::garbage(other), &row).unwrap();
    });
    home.mends(ProblemKind::GarbageInUse);
    assert_eq!(home.view.read_file("a/b/file-21").unwrap().len(), 21 * 700);
}

#[test]
fn objects_that_nothing_points_at_are_collected() {
    let home = Home::new();
    let object = home.object("a/b/file-22");
    let path = home.dir.path().join("datafs/objects").join(object.data_name());
    let stray = ObjectId::from_bytes([0x42; 16]);
    let stray_path = home.dir.path().join("datafs/objects").join(stray.data_name());
    std::fs::create_dir_all(stray_path.parent().unwrap()).unwrap();
    std::fs::copy(path, &stray_path).unwrap();
    home.mends(ProblemKind::LostObject);
    assert!(!stray_path.exists());
}

#[test]
fn lost_and_damaged_data_is_told_with_its_files() {
    let home = Home::new();
    let path = |file| home.dir.path().join("datafs/objects").join(home.object(file).data_name());
    std::fs::remove_file(path("a/b/file-25")).unwrap();
    let damaged = path("a/b/file-26");
    let mut bytes = std::fs::read(&damaged).unwrap();
    bytes[77] ^= 1;
    std::fs::write(&damaged, bytes).unwrap();
    let report = home.check(true, true);
    let found: Vec<_> = report.found.iter().map(|p| (p.kind, p.remedy)).collect();
    assert_eq!(report.problems, 2, "{:#?}", report.found);
    assert!(found.contains(&(ProblemKind::MissingObject, Remedy::None)));
    assert!(found.contains(&(ProblemKind::DamagedObject, Remedy::None)));
    assert!(report.is_damaged());
    for file in ["a/b/file-25", "a/b/file-26"] {
        let ino = format!("inode {} ", home.ino(file));
        assert!(report.found.iter().any(|p| p.detail.contains(&ino)), "{:#?}", report.found);
    }
}

#[test]
fn damaged_records_and_rings_of_folders_are_told() {
    let home = Home::new();
    let (new, inner) = (home.ino("new"), home.ino("new/folder/inner"));
    let link = home.live(&keys::target(home.ino("new-link")));
    home.change(|txn| txn.put(&link, b"12345678much too long").unwrap());
    let entries = [home.live(&keys::child(ROOT_INO, b"new")), home.live(&keys::child(inner, b"new"))];
    let key = home.live(&keys::attributes(new));
    home.change(|txn| {
        let entry = txn.get(&entries[0]).unwrap().unwrap();
        txn.delete(&entries[0]).unwrap();
        txn.put(&entries[1], &entry).unwrap();
        edit(txn, &key, |inode| inode.parent = inner);
    });
    let report = home.check(false, true);
    let kinds: Vec<_> = report.found.iter().map(|p| p.kind).collect();
    assert!(kinds.contains(&ProblemKind::DamagedRecord), "{:#?}", report.found);
    assert!(report.found.iter().any(|p| p.detail.contains("its own ancestor")), "{:#?}", report.found);
    assert!(report.is_damaged());
}

#[test]
fn versions_that_are_too_short_are_told_and_the_rest_is_checked_and_mended() {
    let home = Home::new();
    home.view.publish(Publish::new().put_key("next", "4")).unwrap();
    let volume = home.view.volume;
    let file = home.ino("new/file");
    let large = home.live(&keys::attributes(home.ino("a/large")));
    let short = [home.live(&keys::attributes(file)), home.live(&keys::application("next"))];
    let prefix = keys::history(volume, &[]);
    let end = keys::after_prefix(&prefix);
    let held = |key: &[u8], version: &[u8]| {
        keys::is_attributes(record_of(key)) && !Inode::decode(&version[8..]).unwrap().is_directory()
    };
    home.change(|txn| {
        short.iter().for_each(|key| txn.put(key, &[1; 7]).unwrap());
        let versions = txn.scan(&prefix, &end, Order::Ascending, usize::MAX).unwrap();
        let (key, _) = versions.iter().find(|(key, version)| held(key, version)).unwrap();
        txn.put(key, b"").unwrap();
        // A key that is too short for the snapshot, and a dead-list entry with a wrong epoch.
        txn.put(&[&prefix[..], b"n"].concat(), &[0; 8]).unwrap();
        let (key, version) = versions.last().unwrap();
        let until = u64::from_be_bytes(*key.last_chunk().unwrap());
        let since = u64::from_be_bytes(*version.first_chunk().unwrap());
        txn.delete(&keys::dead(volume, until, since, record_of(key))).unwrap();
        txn.put(&keys::dead(volume, until, since + 1, record_of(key)), &[]).unwrap();
        edit(txn, &large, |inode| inode.nlink = 7);
    });
    let report = home.check(false, true);
    let damaged = |report: &FsckReport| {
        report
            .found
            .iter()
            .filter(|p| p.kind == ProblemKind::DamagedRecord && p.remedy == Remedy::None)
            .count()
    };
    assert_eq!(damaged(&report), 4, "{:#?}", report.found);
    let others = report.found.iter().filter(|p| p.kind != ProblemKind::DamagedRecord);
    assert!(others.clone().all(|p| p.remedy == Remedy::Repaired), "{:#?}", report.found);
    assert_eq!(others.count(), 3, "{:#?}", report.found);
    for place in [format!("inode {file} of v (Attributes)"), "application key \"next\" of v".into()] {
        assert!(report.found.iter().any(|p| p.place == place), "{:#?}", report.found);
    }
    assert_eq!(home.view.stat("a/large").unwrap().nlink, 2);
    // A damaged record stays as it is, with its name, so that a user can still restore it.
    assert!(matches!(home.view.stat("new/file"), Err(crate::Error::Corrupt { .. })));
    let again = home.check(false, true);
    assert_eq!((damaged(&again), again.problems, again.repaired), (4, 4, 0), "{:#?}", again.found);
}

#[test]
fn damage_that_only_a_snapshot_holds_goes_with_it() {
    let home = Home::new();
    let prefix = keys::history(home.view.volume, &[]);
    let end = keys::after_prefix(&prefix);
    home.change(|txn| {
        let versions = txn.scan(&prefix, &end, Order::Ascending, usize::MAX).unwrap();
        let extents = versions.iter().filter(|(key, _)| keys::is_extent(record_of(key)));
        let changed: Vec<_> = extents.map(|(key, _)| txn.put(key, &[0; 3]).unwrap()).collect();
        assert!(changed.len() > 1);
    });
    assert!(home.check(false, false).is_damaged());
    home.datafs.snapshot_delete(&"v".parse().unwrap(), &"kept".parse().unwrap()).unwrap();
    assert_eq!(home.datafs.gc().unwrap().snapshots, 1);
    let report = home.check(false, true);
    assert!(!report.is_damaged(), "{:#?}", report.found);
    home.datafs.gc().unwrap();
    home.assert_sound();
}

/// A catalog row that a test damages: volume number, key and value.
fn row_of_volume(home: &Home, name: &str) -> (u64, Vec<u8>, Vec<u8>) {
    let id = home.datafs.volume_show(&name.parse().unwrap()).unwrap().id;
    let key = keys::volume(id);
    let row = home.datafs.shared.meta.view(|txn| txn.get(&key)).unwrap().unwrap();
    (id, key, row)
}

fn kinds(report: &FsckReport) -> Vec<(ProblemKind, Remedy)> {
    report.found.iter().map(|problem| (problem.kind, problem.remedy)).collect()
}

#[test]
fn what_a_volume_without_its_row_holds_is_kept() {
    let home = Home::new();
    let name = "other".parse().unwrap();
    home.datafs.volume_create(&name).unwrap();
    let other = home.datafs.view(&"other".parse().unwrap()).unwrap();
    other.write_file("now", &[1; 50_000]).unwrap();
    other.write_file("then", &[2; 60_000]).unwrap();
    home.datafs.snapshot_create(&name, &"s".parse().unwrap()).unwrap();
    other.remove_file("then").unwrap();
    let (id, key, row) = row_of_volume(&home, "other");
    for damage in [Some(&row[..row.len() - 1]), None] {
        home.change(|txn| match damage {
            Some(row) => txn.put(&key, row).unwrap(),
            None => txn.delete(&key).unwrap(),
        });
        let report = home.check(true, true);
        assert_eq!(kinds(&report), [(ProblemKind::DamagedRecord, Remedy::None)], "{:#?}", report.found);
        assert_eq!(report.found[0].place, format!("volume number {id}"));
        assert_eq!((report.volumes, report.unclaimed_objects), (1, 0));
        let _ = home.datafs.gc();
    }
    home.change(|txn| txn.put(&key, &row).unwrap());
    home.assert_sound();
    assert_eq!(other.read_file("now").unwrap()[..], [1; 50_000]);
    let then = home.datafs.view(&"other@s".parse().unwrap()).unwrap();
    assert_eq!(then.read_file("then").unwrap()[..], [2; 60_000]);
}

#[test]
fn a_damaged_volume_keeps_nobody_from_collecting_what_others_gave_up() {
    let home = Home::new();
    for name in ["damaged", "gone"] {
        let name: crate::Name = name.parse().unwrap();
        home.datafs.volume_create(&name).unwrap();
        let view = home.datafs.view(&name.as_str().parse().unwrap()).unwrap();
        view.write_file("file", &[6; 50_000]).unwrap();
    }
    let (_, key, row) = row_of_volume(&home, "damaged");
    home.datafs.volume_delete(&"gone".parse().unwrap()).unwrap();
    home.change(|txn| txn.put(&key, b"damaged").unwrap());
    home.datafs.gc().unwrap();
    home.datafs.compact(None, &crate::Compact::default()).unwrap();
    let report = home.check(false, false);
    assert_eq!((report.problems, report.unclaimed_objects), (1, 0), "{:#?}", report.found);
    let list = home.datafs.volume_list().unwrap();
    assert_eq!(list.volumes.iter().map(|volume| volume.name.as_str()).collect::<Vec<_>>(), ["v"]);
    assert!(
        matches!(&list.damaged[..], [(name, crate::Error::Corrupt { .. })] if name == "damaged"),
        "{list:?}"
    );
    home.change(|txn| txn.put(&key, &row).unwrap());
    home.assert_sound();
}

#[test]
fn names_of_volumes_and_snapshots_lead_to_them_again() {
    let home = Home::new();
    let (id, ..) = row_of_volume(&home, "v");
    home.datafs.volume_create(&"w".parse().unwrap()).unwrap();
    home.change(|txn| {
        txn.delete(&keys::volume_name("v")).unwrap();
        txn.put(&keys::volume_name("w"), &id.to_be_bytes()).unwrap();
        txn.put(&keys::volume_name("nothing"), &77_u64.to_be_bytes()).unwrap();
        txn.put(&keys::volume_name("no number"), b"77").unwrap();
        txn.put(&keys::snapshot_name(id, "nothing"), &1_u64.to_be_bytes()).unwrap();
        txn.delete(&keys::snapshot_name(id, "kept")).unwrap();
    });
    home.mends(ProblemKind::WrongCatalog);
    let list = home.datafs.volume_list().unwrap();
    let volumes: Vec<_> = list.volumes.into_iter().map(|v| v.name).collect();
    assert_eq!(volumes, ["v".parse().unwrap(), "w".parse().unwrap()]);
    assert!(list.damaged.is_empty());
    let kept = home.datafs.view(&"v@kept".parse().unwrap()).unwrap();
    assert_eq!(kept.read_file("a/b/file-7").unwrap()[..], [1; 20_000]);
}

#[test]
fn counters_of_volumes_epochs_and_inodes_are_raised() {
    let home = Home::new();
    let (id, key, row) = row_of_volume(&home, "v");
    let mut wrong = VolumeRow::decode(&row).unwrap();
    (wrong.epoch, wrong.last_snapshot) = (1, 0);
    home.change(|txn| {
        txn.put(&key, &wrong.encode()).unwrap();
        txn.put(keys::LAST_VOLUME, &0_u64.to_be_bytes()).unwrap();
        txn.put(&keys::next_ino(id), b"short").unwrap();
    });
    let report = home.check(false, false);
    assert_eq!(kinds(&report), [(ProblemKind::WrongCounter, Remedy::Repairable); 3], "{:#?}", report.found);
    home.mends(ProblemKind::WrongCounter);
    let (_, _, mended) = row_of_volume(&home, "v");
    assert_eq!(mended, row);
    home.view.write_file("more", b"more").unwrap();
    let other = Datafs::open(home.dir.path(), &Config::default()).unwrap();
    other.view(&"v".parse().unwrap()).unwrap().write_file("from another", b"more").unwrap();
    assert!(home.ino("from another") > home.ino("more") + 1_000, "out of what this process has in reserve");
    home.datafs.volume_create(&"w".parse().unwrap()).unwrap();
    home.assert_sound();
}

#[test]
fn what_a_snapshot_without_its_row_holds_is_kept() {
    let home = Home::new();
    let (id, ..) = row_of_volume(&home, "v");
    let prefix = keys::snapshots(id);
    let end = keys::after_prefix(&prefix);
    let rows = home.datafs.shared.meta.view(|txn| txn.scan(&prefix, &end, Order::Ascending, 9)).unwrap();
    let (key, row) = &rows[0];
    for damage in [Some(&row[..5]), None] {
        home.change(|txn| match damage {
            Some(row) => txn.put(key, row).unwrap(),
            None => txn.delete(key).unwrap(),
        });
        let report = home.check(true, true);
        assert_eq!(kinds(&report), [(ProblemKind::DamagedRecord, Remedy::None)], "{:#?}", report.found);
        assert!(report.found[0].place.ends_with("of v"), "{:#?}", report.found);
    }
    // It still counts as the newest snapshot, so versions that change meanwhile are kept for it.
    home.view.write_file("a/b/file-7", b"later").unwrap();
    home.change(|txn| txn.put(key, row).unwrap());
    home.assert_sound();
    let kept = home.datafs.view(&"v@kept".parse().unwrap()).unwrap();
    assert_eq!(kept.read_file("a/b/file-7").unwrap()[..], [1; 20_000]);
}

#[test]
fn objects_stay_while_extents_are_damaged_that_may_point_at_them() {
    let home = Home::new();
    let prefix = home.live(&keys::extents(home.ino("a/b/file-20")));
    let end = keys::after_prefix(&prefix);
    let extents = home.datafs.shared.meta.view(|txn| txn.scan(&prefix, &end, Order::Ascending, 9)).unwrap();
    for damage in [3, 12] {
        home.change(|txn| extents.iter().for_each(|(key, value)| txn.put(key, &value[..damage]).unwrap()));
        let report = home.check(false, true);
        let found = kinds(&report);
        assert!(found.contains(&(ProblemKind::WrongReferences, Remedy::None)), "{:#?}", report.found);
        assert!(found.iter().all(|(_, remedy)| *remedy == Remedy::None), "{:#?}", report.found);
        home.datafs.gc().unwrap();
    }
    home.change(|txn| extents.iter().for_each(|(key, value)| txn.put(key, value).unwrap()));
    home.assert_sound();
    assert_eq!(home.view.read_file("a/b/file-20").unwrap()[..], [20; 14_000]);
}

#[test]
fn keys_that_are_none_are_told() {
    let home = Home::new();
    let (id, ..) = row_of_volume(&home, "v");
    let tables = [
        keys::sessions(),
        keys::sessions_in_cleanup(),
        keys::volumes(),
        keys::snapshots(id),
        keys::orphans(id),
        keys::all_references(),
        keys::all_garbage(),
    ];
    let wrong: Vec<_> = tables.iter().map(|table| [table.as_slice(), b"\xff\xff?"].concat()).collect();
    home.change(|txn| wrong.iter().for_each(|key| txn.put(key, b"").unwrap()));
    let report = home.check(false, true);
    assert_eq!(kinds(&report), [(ProblemKind::DamagedRecord, Remedy::None); 7], "{:#?}", report.found);
    home.change(|txn| wrong.iter().for_each(|key| txn.delete(key).unwrap()));
    home.assert_sound();
}

#[test]
fn what_is_lost_is_found_again_beside_a_file_of_that_name() {
    let home = Home::new();
    home.view.write_file("lost+found", b"mine").unwrap();
    let file = home.ino("new/file");
    let entry = home.live(&keys::child(home.ino("new"), b"file"));
    home.change(|txn| txn.delete(&entry).unwrap());
    home.mends(ProblemKind::LostInode);
    assert_eq!(home.view.read_file(&format!("lost+found-2/#{file}")).unwrap()[..], [8; 5_000]);
    assert_eq!(home.view.read_file("lost+found").unwrap()[..], *b"mine");
}

#[test]
fn a_damaged_roster_of_sessions_is_written_anew() {
    let home = Home::new();
    home.change(|txn| txn.put(keys::ROSTER, b"some").unwrap());
    let other = Datafs::open(home.dir.path(), &Config::default()).unwrap();
    let mut ids = [&home.datafs, &other].map(|datafs| datafs.shared.session.id());
    ids.sort_unstable();
    let mut listed = home.datafs.shared.meta.view(crate::session::roster).unwrap();
    listed.sort_unstable();
    assert_eq!(listed, ids);
    home.assert_sound();
}

/// Names in several trees: more than one batch each.
#[test]
fn a_sound_home_is_read_in_short_transactions() {
    let counts = std::sync::Arc::<Counts>::default();
    let home = counting::with(&counts, Home::new);
    let owner = Owner { uid: 0, gid: 0 };
    for round in 0..3 {
        for i in 0..1_500 {
            let name = format!("{round}-{i}");
            home.view.symlink(home.view.root(), name.as_ref(), "target".as_ref(), owner).unwrap();
        }
        let name = format!("round-{round}").parse().unwrap();
        home.datafs.snapshot_create(&"v".parse().unwrap(), &name).unwrap();
    }
    counts.longest.store(0, Ordering::Relaxed);
    let report = home.check(true, false);
    assert!(report.is_sound() && report.names > 4_500, "{:?}", report.found);
    let longest = counts.longest.swap(0, Ordering::Relaxed);
    // A batch of a snapshot is merged from pages of 256 records of two tables.
    assert!(longest <= 2 * 4_096 / 256 + 2, "{longest} scans in one transaction");
    home.datafs.fsck_pass(&FsckOptions::default(), Scan::Whole, &mut |_| {}).unwrap();
    assert!(counts.longest.load(Ordering::Relaxed) > 10);
}

/// Concurrent changes look like problems to a reader in batches. None is reported, and damage beside them is.
#[test]
fn changes_during_the_check_are_no_problems_and_damage_beside_them_is() {
    let home = Home::new();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let changes = scope.spawn(|| {
            let mut made = 0_u64;
            while !done.load(Ordering::Relaxed) {
                let name = |i: u64| format!("busy-{}", i % 50);
                home.view.write_file(&name(made), &vec![made as u8; 200 + made as usize % 9_000]).unwrap();
                home.view.rename_path(&name(made), &format!("moved-{}", made % 7)).unwrap();
                let directory = format!("a/directory-{}", made % 5);
                home.view.create_dir_all(&directory).unwrap();
                home.view.remove_dir(&directory).unwrap();
                if made.is_multiple_of(20) {
                    let name = "passing".parse().unwrap();
                    home.datafs.snapshot_create(&"v".parse().unwrap(), &name).unwrap();
                    home.datafs.snapshot_delete(&"v".parse().unwrap(), &name).unwrap();
                    home.datafs.gc().unwrap();
                }
                made += 1;
            }
            made
        });
        for _ in 0..6 {
            let report = home.check(false, false);
            assert!(report.is_sound(), "{:#?}", report.found);
        }
        let large = home.live(&keys::attributes(home.ino("a/large")));
        home.change(|txn| edit(txn, &large, |inode| inode.nlink = 7));
        let report = home.check(false, false);
        // A snapshot that is there for a moment may show it too.
        let is_wrong = |problem: &Problem| problem.kind == ProblemKind::WrongLinks;
        assert!(!report.is_sound() && report.found.iter().all(is_wrong), "{:#?}", report.found);
        assert_eq!(home.check(false, true).repaired, 1);
        done.store(true, Ordering::Relaxed);
        assert!(changes.join().unwrap() > 0);
    });
    home.assert_sound();
}
