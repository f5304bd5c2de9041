//! Tests of the object store over a view.
use futures::TryStreamExt as _;
use futures::executor::block_on;
use object_store::{GetRange, ObjectStoreExt as _};
use tempfile::TempDir;

use super::*;
use crate::{Config, Datafs, OpenFlags, Owner, VolumeSpec};

fn volume() -> (TempDir, Datafs, View) {
    let dir = tempfile::tempdir().unwrap();
    let datafs = Datafs::open(dir.path(), &Config::default()).unwrap();
    datafs.volume_create(&"data".parse().unwrap()).unwrap();
    let view = view(&datafs, "data");
    (dir, datafs, view)
}

fn view(datafs: &Datafs, spec: &str) -> View {
    datafs.view(&spec.parse::<VolumeSpec>().unwrap()).unwrap()
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

fn locations(store: &dyn ObjectStore, prefix: Option<&str>) -> Vec<String> {
    let prefix = prefix.map(Path::from);
    let listed: Vec<_> = block_on(store.list(prefix.as_ref()).try_collect()).unwrap();
    let mut names: Vec<String> = listed.into_iter().map(|m| m.location.to_string()).collect();
    names.sort();
    names
}

#[test]
fn what_is_put_is_got_whole_and_in_ranges() {
    let (_dir, _datafs, view) = volume();
    let store = view.object_store();
    for len in [0, 1, 5_000, 3_000_000, 9_000_000] {
        let bytes = pattern(len);
        let path = Path::from(format!("dir/sub/{len}"));
        block_on(store.put(&path, bytes.clone().into())).unwrap();
        assert!(view.read_file(path.as_ref()).unwrap() == bytes);
        let got = block_on(async { store.get(&path).await?.bytes().await }).unwrap();
        assert!(got == bytes, "{len} bytes");
        assert_eq!(block_on(store.head(&path)).unwrap().size, len as u64);
        if len > 100 {
            let ranges = [10..20, 0..1, len as u64 - 5..len as u64, 50..4_097];
            let parts = block_on(store.get_ranges(&path, &ranges)).unwrap();
            for (range, part) in ranges.iter().zip(parts) {
                assert!(part == bytes[range.start as usize..range.end as usize]);
            }
            let suffix = GetOptions { range: Some(GetRange::Suffix(7)), ..GetOptions::default() };
            let result = block_on(store.get_opts(&path, suffix)).unwrap();
            assert_eq!(result.range, len as u64 - 7..len as u64);
            assert!(block_on(result.bytes()).unwrap() == bytes[len - 7..]);
            assert!(block_on(store.get_range(&path, len as u64..len as u64 + 1)).is_err());
            let beyond = [0..1, 0..len as u64 + 1];
            assert!(block_on(store.get_ranges(&path, &beyond)).is_err());
        }
    }
}

#[test]
fn missing_files_and_directories_are_not_found() {
    let (_dir, _datafs, view) = volume();
    let store = view.object_store();
    view.create_dir_all("dir").unwrap();
    for path in ["none", "dir", "dir/none", "none/below"] {
        let path = Path::from(path);
        let error = block_on(store.get(&path)).unwrap_err();
        assert!(matches!(error, object_store::Error::NotFound { .. }), "{error}");
        let error = block_on(store.delete(&path)).unwrap_err();
        assert!(matches!(error, object_store::Error::NotFound { .. }), "{error}");
    }
}

#[test]
fn listings_go_by_prefix_and_leave_snapshots_out() {
    let (_dir, datafs, view) = volume();
    let store = view.object_store();
    for path in ["a/1", "a/b/2", "a/b/3", "ab/4", "top", "with space and ünïcode/5"] {
        view.write_file(path, b"x").unwrap();
    }
    datafs.snapshot_create(&"data".parse().unwrap(), &"v1".parse().unwrap()).unwrap();
    view.write_file("later", b"x").unwrap();
    let all = ["a/1", "a/b/2", "a/b/3", "ab/4", "later", "top", "with space and ünïcode/5"];
    assert_eq!(locations(&store, None), all);
    assert_eq!(locations(&store, Some("a")), ["a/1", "a/b/2", "a/b/3"]);
    assert_eq!(locations(&store, Some("top")), Vec::<String>::new());
    assert_eq!(locations(&store, Some("none")), Vec::<String>::new());

    let level = block_on(store.list_with_delimiter(None)).unwrap();
    let names = |paths: Vec<Path>| paths.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(names(level.common_prefixes), ["a", "ab", "with space and ünïcode"]);
    let objects = level.objects.into_iter().map(|m| m.location).collect();
    assert_eq!(names(objects), ["later", "top"]);

    let snapshot = self::view(&datafs, "data@v1").object_store();
    assert!(!locations(&snapshot, None).contains(&"later".to_owned()));
    let denied = block_on(snapshot.put(&Path::from("x"), "y".into())).unwrap_err();
    assert!(matches!(denied, object_store::Error::PermissionDenied { .. }), "{denied}");
}

#[test]
fn a_listing_of_many_pages_is_complete() {
    let (_dir, _datafs, view) = volume();
    let mut publish = Publish::new();
    let mut expected = Vec::new();
    for i in 0..1_500 {
        let path = format!("d{}/file-{i:04}", i % 3);
        publish = publish.file(&path, view.stage().unwrap().finish().unwrap());
        expected.push(path);
    }
    view.publish(publish).unwrap();
    expected.sort();
    assert_eq!(locations(&view.object_store(), None), expected);
}

#[test]
fn an_upload_appears_at_once_or_not_at_all() {
    let (_dir, _datafs, view) = volume();
    let store = view.object_store();
    let path = Path::from("upload");
    let bytes = pattern(10_000_000);
    block_on(async {
        let mut upload = store.put_multipart(&path).await.unwrap();
        let parts: Vec<_> = bytes.chunks(3_000_000).map(|c| upload.put_part(c.to_vec().into())).collect();
        assert!(store.head(&path).await.is_err(), "not visible yet");
        // Awaited in the wrong order.
        for part in parts.into_iter().rev() {
            part.await.unwrap();
        }
        upload.complete().await.unwrap();
        assert!(store.get(&path).await.unwrap().bytes().await.unwrap() == bytes);
        assert!(upload.complete().await.is_err());

        let mut upload = store.put_multipart(&Path::from("aborted")).await.unwrap();
        upload.put_part("x".into()).await.unwrap();
        upload.abort().await.unwrap();
        let mut upload = store.put_multipart(&Path::from("dropped")).await.unwrap();
        upload.put_part("x".into()).await.unwrap();
    });
    assert_eq!(locations(&store, None), ["upload"]);
}

#[test]
fn files_are_copied_renamed_and_deleted() {
    let (_dir, _datafs, view) = volume();
    let store = view.object_store();
    let (a, b, c) = (Path::from("a"), Path::from("x/b"), Path::from("y/z/c"));
    let bytes = pattern(5_000_000);
    block_on(async {
        store.put(&a, bytes.clone().into()).await.unwrap();
        store.copy(&a, &b).await.unwrap();
        store.rename(&a, &c).await.unwrap();
        assert!(store.head(&a).await.is_err());
        for path in [&b, &c] {
            assert!(store.get(path).await.unwrap().bytes().await.unwrap() == bytes);
        }
        assert!(matches!(
            store.rename_if_not_exists(&b, &c).await,
            Err(object_store::Error::AlreadyExists { .. })
        ));
        assert!(matches!(
            store.copy_if_not_exists(&b, &c).await,
            Err(object_store::Error::AlreadyExists { .. })
        ));
        store.copy_if_not_exists(&b, &a).await.unwrap();
        store.delete(&a).await.unwrap();
        store.delete(&b).await.unwrap();
        store.delete(&c).await.unwrap();
    });
    assert_eq!(locations(&store, None), Vec::<String>::new());
}

#[test]
fn a_stream_never_mixes_two_versions() {
    let (_dir, _datafs, view) = volume();
    let store = view.object_store();
    let path = Path::from("file");
    let old = vec![1u8; 3 * CHUNK_BYTES as usize];
    view.write_file("file", &old).unwrap();
    block_on(async {
        let mut stream = store.get(&path).await.unwrap().into_stream();
        let first = stream.try_next().await.unwrap().unwrap();
        assert_eq!(first, old[..first.len()]);
        view.write_file("file", &vec![2u8; old.len()]).unwrap();
        while let Ok(Some(bytes)) = stream.try_next().await {
            assert!(bytes.iter().all(|b| *b == 1));
        }
    });
}

#[test]
fn conditions_are_checked() {
    let (_dir, _datafs, view) = volume();
    let store = view.object_store();
    let path = Path::from("file");
    let put = block_on(store.put(&path, "one".into())).unwrap();
    let tag = block_on(store.head(&path)).unwrap().e_tag;
    assert_eq!(put.e_tag, tag);
    let unless_changed = GetOptions { if_match: tag.clone(), ..GetOptions::default() };
    block_on(store.get_opts(&path, unless_changed.clone())).unwrap();
    block_on(store.put(&path, "two".into())).unwrap();
    let error = block_on(store.get_opts(&path, unless_changed)).unwrap_err();
    assert!(matches!(error, object_store::Error::Precondition { .. }), "{error}");
    // Absent.
    let put = |path: &Path, mode: PutMode, text: &'static str| {
        block_on(store.put_opts(path, text.into(), PutOptions::from(mode)))
    };
    let error = put(&path, PutMode::Create, "three").unwrap_err();
    assert!(matches!(error, object_store::Error::AlreadyExists { .. }), "{error}");
    let other = Path::from("a/other");
    put(&other, PutMode::Create, "three").unwrap();
    let error = block_on(store.copy_if_not_exists(&other, &path)).unwrap_err();
    assert!(matches!(error, object_store::Error::AlreadyExists { .. }), "{error}");
    block_on(store.copy_if_not_exists(&other, &Path::from("a/third"))).unwrap();
    view.symlink(view.root(), "link".as_ref(), "nowhere".as_ref(), Owner { uid: 0, gid: 0 }).unwrap();
    let error = put(&Path::from("link"), PutMode::Create, "three").unwrap_err();
    assert!(matches!(error, object_store::Error::AlreadyExists { .. }), "{error}");
    // Unchanged.
    let changed = |path: &Path, tag: &Option<String>| {
        let update = UpdateVersion { e_tag: tag.clone(), version: None };
        match put(path, PutMode::Update(update), "four") {
            Ok(put) => Ok(put.e_tag),
            Err(object_store::Error::Precondition { .. }) => Err(()),
            Err(other) => panic!("{other}"),
        }
    };
    assert_eq!(changed(&path, &tag), Err(()));
    assert_eq!(changed(&Path::from("a/nothing"), &tag), Err(()));
    let tag = block_on(store.head(&path)).unwrap().e_tag;
    let tag = changed(&path, &tag).unwrap();
    assert_eq!(tag, block_on(store.head(&path)).unwrap().e_tag);
    let file = view.open(view.stat("file").unwrap().node, OpenFlags::READ_WRITE).unwrap();
    file.write_at(0, b"F").unwrap();
    assert_eq!(changed(&path, &tag), Err(()), "written, and not flushed");
    file.fsync().unwrap();
    assert_eq!(changed(&path, &tag), Err(()));
    assert_eq!(view.read_file("file").unwrap(), b"Four"[..]);
    let error = put(&path, PutMode::Update(UpdateVersion { e_tag: None, version: None }), "").unwrap_err();
    assert!(error.to_string().contains("needs the tag"), "{error}");
}

/// Concurrent writers that extend the value they have read lose no update, also from another open home.
#[test]
fn updates_of_many_are_not_lost() {
    let (dir, _datafs, view) = volume();
    let another = Datafs::open(dir.path(), &Config::default()).unwrap();
    let stores = [view.object_store(), self::view(&another, "data").object_store()];
    let path = Path::from("a/count");
    let add = |store: &dyn ObjectStore| loop {
        let (count, mode) = match block_on(store.get(&path)) {
            Ok(found) => {
                let tag = UpdateVersion { e_tag: found.meta.e_tag.clone(), version: None };
                let text = block_on(found.bytes()).unwrap();
                (std::str::from_utf8(&text).unwrap().parse::<u32>().unwrap(), PutMode::Update(tag))
            }
            Err(object_store::Error::NotFound { .. }) => (0, PutMode::Create),
            Err(error) => panic!("{error}"),
        };
        match block_on(store.put_opts(&path, (count + 1).to_string().into(), mode.into())) {
            Ok(_) => return,
            Err(object_store::Error::Precondition { .. } | object_store::Error::AlreadyExists { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    };
    std::thread::scope(|scope| {
        for writer in 0..4 {
            let (store, add) = (stores[writer % 2].as_ref(), &add);
            scope.spawn(move || (0..10).for_each(|_| add(store)));
        }
    });
    assert_eq!(view.read_file("a/count").unwrap(), b"40"[..]);
}

#[test]
fn works_inside_a_runtime_too() {
    let (_dir, _datafs, view) = volume();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async move {
        let store = view.object_store();
        let path = Path::from("file");
        store.put(&path, pattern(3_000_000).into()).await.unwrap();
        let bytes = store.get(&path).await.unwrap().bytes().await.unwrap();
        assert!(bytes == pattern(3_000_000));
    });
}
