//! Tests of objects that were replaced in the store of an encrypted volume. The record of the volume decides
//! how an object must be protected, never the object.
use std::path::Path;

use super::config;
use crate::config::{Config, FromFile, Secret};
use crate::data::Codec;
use crate::data::codec_tests::encode;
use crate::datafs::Datafs;
use crate::error::Error;
use crate::fs::View;
use crate::fsck::{FsckOptions, ProblemKind};
use crate::meta::engine::Durability;
use crate::meta::keys;
use crate::meta::versioned::VolumeRow;
use crate::object::{Compression, ObjectId};
use crate::volume::VolumeOptions;

/// A home with the keys `a` and `b`.
fn open(home: &Path) -> Datafs {
    let mut config: Config = config();
    for (name, byte) in [("a", 1), ("b", 2)] {
        let file = home.join(name);
        std::fs::write(&file, [byte; 32]).unwrap();
        config.encryption_keys.insert(name.into(), Secret::File(FromFile { file }));
    }
    Datafs::open(home, &config).unwrap()
}

fn create(datafs: &Datafs, name: &str, key: Option<&str>) -> View {
    let encryption_key = key.map(str::to_owned);
    let options = VolumeOptions { compression: Compression::Lz4, encryption_key };
    datafs.volume_create_with(&name.parse().unwrap(), &options).unwrap();
    view(datafs, name)
}

fn view(datafs: &Datafs, name: &str) -> View {
    datafs.view(&name.parse().unwrap()).unwrap()
}

fn object(view: &View, path: &str) -> ObjectId {
    let file = view.open(view.stat(path).unwrap().node, crate::fs::OpenFlags::READ).unwrap();
    file.objects().unwrap()[0]
}

/// Puts another object of the same id and the same length into the store.
fn replace(home: &Path, datafs: &Datafs, id: ObjectId, key: Option<&str>) {
    let key = key.map(|name| datafs.shared.pool.keys().get(name).unwrap().clone());
    let forged = encode(&Codec { compression: Compression::None, key }, id, &[b'x'; 20_000]);
    std::fs::write(home.join("datafs/objects").join(id.data_name()), forged).unwrap();
}

/// Asserts that a read and a scrub refuse the file of the volume `v`, with an error that contains `word`.
fn assert_refused(home: &Path, word: &str) {
    let datafs = open(home);
    let error = view(&datafs, "v").read_file("f").unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error:?}");
    assert!(error.to_string().contains(word), "{error}");
    let report = datafs.fsck(&FsckOptions { scrub: true, repair: false }, &mut |_| {}).unwrap();
    let [problem] = &report.found[..] else { panic!("{:#?}", report.found) };
    assert_eq!(problem.kind, ProblemKind::DamagedObject);
    assert!(problem.detail.contains(word), "{}", problem.detail);
}

#[test]
fn an_object_whose_encryption_was_stripped_or_exchanged_is_refused() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let datafs = open(home);
    let view = create(&datafs, "v", Some("a"));
    view.write_file("f", &[7; 20_000]).unwrap();
    let id = object(&view, "f");
    drop(view);
    for (key, word) in [(None, "not encrypted"), (Some("b"), "the key \"b\"")] {
        replace(home, &datafs, id, key);
        assert_refused(home, word);
    }
    // The right key: a process that has it may write anything.
    replace(home, &datafs, id, Some("a"));
    assert_eq!(self::view(&open(home), "v").read_file("f").unwrap(), [b'x'; 20_000][..]);
}

#[test]
fn an_object_of_a_volume_without_encryption_is_not_encrypted() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let datafs = open(home);
    let view = create(&datafs, "v", None);
    view.write_file("f", &[7; 20_000]).unwrap();
    replace(home, &datafs, object(&view, "f"), Some("a"));
    assert_refused(home, "the key \"a\"");
}

#[test]
fn a_volume_reads_what_its_former_keys_encrypted_and_open_views_learn_a_new_key() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let datafs = open(home);
    let early = create(&datafs, "v", Some("a"));
    early.write_file("f", &[7; 20_000]).unwrap();
    let other = open(home);
    other.volume_set_key(&"v".parse().unwrap(), "b").unwrap();
    view(&other, "v").write_file("g", &[8; 20_000]).unwrap();
    for view in [&early, &view(&other, "v"), &view(&open(home), "v")] {
        assert_eq!(view.read_file("f").unwrap(), [7; 20_000][..]);
        assert_eq!(view.read_file("g").unwrap(), [8; 20_000][..]);
    }
    replace(home, &datafs, object(&early, "f"), None);
    assert_refused(home, "not encrypted");
}

/// A volume record of an older version, which did not list the former keys.
#[test]
fn an_older_volume_opens_and_its_objects_must_be_encrypted_with_any_key() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let datafs = open(home);
    let view = create(&datafs, "v", Some("b"));
    view.write_file("f", &[7; 20_000]).unwrap();
    datafs.volume_set_key(&"v".parse().unwrap(), "a").unwrap();
    datafs
        .shared
        .meta
        .transact(Durability::Durable, |txn| {
            let row = VolumeRow::get(txn.as_read(), view.volume)?;
            txn.put(&keys::volume(view.volume), &VolumeRow { former_keys: None, ..row }.encode())
        })
        .unwrap();
    assert_eq!(self::view(&open(home), "v").read_file("f").unwrap(), [7; 20_000][..]);
    replace(home, &datafs, object(&view, "f"), None);
    assert_refused(home, "not encrypted");
}
