//! Tests of whole volumes: in a bucket, compressed, encrypted.
use std::fs;
use std::path::Path;

use crate::config::{FromFile, Secret};
use crate::{Config, Datafs, Error, FileKind, Name, OpenFlags, Publish, View, VolumeOptions};
use millrace_testing::s3_server::S3Server;

const MIB: usize = 1024 * 1024;

fn cloud(server: &S3Server) -> Config {
    let options = server.options().into_iter().map(|(k, v)| (k.to_owned(), Secret::Text(v)));
    Config {
        store_url: Some(server.url("home")),
        store_options: options.collect(),
        cache_free_bytes_min: 0,
        gc_interval_ms: 0,
        garbage_grace_ms: 0,
        ..Config::default()
    }
}

fn with_keys(home: &Path, config: Config, keys: &[(&str, u8)]) -> Config {
    let key = |(name, byte): &(&str, u8)| {
        let file = home.join(format!("key-{name}-{byte}"));
        fs::write(&file, [*byte; 32]).unwrap();
        ((*name).to_owned(), Secret::File(FromFile { file }))
    };
    Config { encryption_keys: keys.iter().map(key).collect(), gc_interval_ms: 0, ..config }
}

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

fn view(datafs: &Datafs, spec: &str) -> View {
    datafs.view(&spec.parse().unwrap()).unwrap()
}

/// Text that [`is_found`] can search for.
fn secret_text(len: usize) -> Vec<u8> {
    b"this is the secret of the house; ".iter().copied().cycle().take(len).collect()
}

/// Writes files in all supported ways and reads them back.
fn write_files(live: &View) {
    for len in [10, 3000, 5000, 100_000, 300_000, 3 * MIB] {
        live.write_file(&format!("whole/{len}"), &secret_text(len)).unwrap();
        let mut staged = live.stage().unwrap();
        staged.append(&secret_text(len)).unwrap();
        live.publish(Publish::new().file(format!("staged/{len}"), staged.finish().unwrap())).unwrap();
    }
    live.write_file("open", b"").unwrap();
    let node = live.stat("open").unwrap().node;
    let flags = OpenFlags { read: true, write: true, ..OpenFlags::default() };
    let open = live.open(node, flags).unwrap();
    let bytes = secret_text(12 * MIB);
    for (i, part) in bytes.chunks(MIB).enumerate() {
        open.write_at((i * MIB) as u64, part).unwrap();
        assert!(open.read_at((i * MIB) as u64, MIB).unwrap() == part);
    }
    open.fsync().unwrap();
    open.write_at(1_000_001, b"changed").unwrap();
    assert_eq!(open.read_at(1_000_000, 9).unwrap()[1..8], b"changed"[..]);
    open.flush().unwrap();
    live.write_file("copy", b"").unwrap();
    let copy = live.open(live.stat("copy").unwrap().node, flags).unwrap();
    let mut done = 0;
    while done < bytes.len() as u64 {
        done += open.copy_to(done, &copy, done, bytes.len() as u64 - done).unwrap();
    }
    copy.flush().unwrap();
    check_files(live);
}

fn check_files(view: &View) {
    for len in [10, 3000, 5000, 100_000, 300_000, 3 * MIB] {
        for folder in ["whole", "staged"] {
            assert!(
                view.read_file(&format!("{folder}/{len}")).unwrap() == secret_text(len),
                "{folder} {len}"
            );
        }
    }
    let mut bytes = secret_text(12 * MIB);
    bytes[1_000_001..1_000_008].copy_from_slice(b"changed");
    assert!(view.read_file("open").unwrap() == bytes);
    assert!(view.read_file("copy").unwrap() == bytes);
}

/// Whether any file below a folder holds the text.
fn is_found(folder: &Path, text: &[u8]) -> bool {
    fs::read_dir(folder).unwrap().any(|entry| {
        let path = entry.unwrap().path();
        if path.is_dir() {
            return is_found(&path, text);
        }
        fs::read(&path).is_ok_and(|bytes| bytes.windows(text.len()).any(|window| window == text))
    })
}

#[test]
fn an_encrypted_volume_leaves_no_bytes_of_its_files_anywhere() {
    let home = tempfile::tempdir().unwrap();
    let config = with_keys(home.path(), Config::default(), &[("main", 1)]);
    let datafs = Datafs::open(home.path(), &config).unwrap();
    for compression in ["none", "lz4", "zstd:5"] {
        let options =
            VolumeOptions { compression: compression.parse().unwrap(), encryption_key: Some("main".into()) };
        let volume = format!("v-{}", &compression[..3]);
        let info = datafs.volume_create_with(&name(&volume), &options).unwrap();
        assert_eq!((info.compression, info.encryption_key), (options.compression, options.encryption_key));
        write_files(&view(&datafs, &volume));
    }
    datafs.gc().unwrap();
    drop(datafs);
    assert!(!is_found(home.path(), b"secret of the house"));
    let datafs = Datafs::open(home.path(), &config).unwrap();
    check_files(&view(&datafs, "v-zst"));
    // Unencrypted text is found, which shows that the search works.
    datafs.volume_create(&name("plain")).unwrap();
    view(&datafs, "plain").write_file("small", &secret_text(10_000)).unwrap();
    drop(datafs);
    assert!(is_found(home.path(), b"secret of the house"));
}

#[test]
fn a_compressed_volume_takes_less_room() {
    let home = tempfile::tempdir().unwrap();
    let config = Config { gc_interval_ms: 0, ..Config::default() };
    let datafs = Datafs::open(home.path(), &config).unwrap();
    let options = VolumeOptions { compression: "zstd".parse().unwrap(), encryption_key: None };
    datafs.volume_create_with(&name("v"), &options).unwrap();
    write_files(&view(&datafs, "v"));
    let mut stored = 0;
    datafs.shared.pool.survey(&mut |_, _, bytes| stored += bytes).unwrap();
    assert!(stored < 3 * MIB as u64, "{stored} bytes");
}

#[test]
fn keys_that_are_missing_or_wrong_are_named_and_keys_are_changed_by_name() {
    let home = tempfile::tempdir().unwrap();
    let config = with_keys(home.path(), Config::default(), &[("old", 1), ("new", 2)]);
    let datafs = Datafs::open(home.path(), &config).unwrap();
    let options = VolumeOptions { encryption_key: Some("old".into()), ..VolumeOptions::default() };
    datafs.volume_create_with(&name("v"), &options).unwrap();
    view(&datafs, "v").write_file("before", &secret_text(9000)).unwrap();
    assert!(matches!(datafs.volume_set_key(&name("v"), "none"), Err(Error::WrongKey { .. })));
    datafs.volume_set_key(&name("v"), "new").unwrap();
    view(&datafs, "v").write_file("after", &secret_text(9000)).unwrap();
    datafs.volume_create(&name("plain")).unwrap();
    assert!(matches!(datafs.volume_set_key(&name("plain"), "new"), Err(Error::Invalid(_))));
    drop(datafs);
    let open = |keys: &[(&str, u8)]| {
        Datafs::open(home.path(), &with_keys(home.path(), Config::default(), keys)).unwrap()
    };
    let datafs = open(&[("old", 1)]);
    let error = datafs.view(&"v".parse().unwrap()).unwrap_err();
    assert!(matches!(&error, Error::WrongKey { key, .. } if key == "new"), "{error}");
    assert!(error.to_string().contains("volume v"), "{error}");
    assert_eq!(datafs.volume_list().unwrap().volumes.len(), 2);
    view(&datafs, "plain");
    drop(datafs);
    let other = with_keys(home.path(), Config::default(), &[("old", 1), ("new", 9)]);
    let error = Datafs::open(home.path(), &other).unwrap_err();
    assert!(matches!(&error, Error::WrongKey { key, .. } if key == "new"), "{error}");
    let datafs = open(&[("new", 2)]);
    assert!(view(&datafs, "v").read_file("after").unwrap() == secret_text(9000));
    assert!(
        matches!(view(&datafs, "v").read_file("before"), Err(Error::WrongKey { key, .. }) if key == "old")
    );
    drop(datafs);
    check_before(&open(&[("old", 1), ("new", 2)]));
}

fn check_before(datafs: &Datafs) {
    assert!(view(datafs, "v").read_file("before").unwrap() == secret_text(9000));
}

#[test]
fn a_volume_lives_in_a_bucket() {
    let (server, home) = (S3Server::start(), tempfile::tempdir().unwrap());
    let config = with_keys(home.path(), cloud(&server), &[("main", 1)]);
    let datafs = Datafs::open(home.path(), &config).unwrap();
    datafs.volume_create(&name("v")).unwrap();
    let options = VolumeOptions { compression: "lz4".parse().unwrap(), encryption_key: Some("main".into()) };
    datafs.volume_create_with(&name("sealed"), &options).unwrap();
    for volume in ["v", "sealed"] {
        write_files(&view(&datafs, volume));
        datafs.snapshot_create(&name(volume), &name("s")).unwrap();
    }
    assert!(datafs.shared.pool.space().unwrap().free_bytes > 1 << 40);
    drop(datafs);
    // As another process with an empty cache.
    fs::remove_dir_all(home.path().join("datafs/cache")).unwrap();
    let datafs = Datafs::open(home.path(), &config).unwrap();
    let snapshot = view(&datafs, "v@s");
    let mut told = 0;
    let warm = snapshot.warmup("", &mut |progress| told = progress.bytes).unwrap();
    assert_eq!((warm.files, warm.bytes), (14, told));
    assert!(warm.bytes > 15 * MIB as u64, "{warm:?}");
    let gets = server.faults.count("get");
    assert_eq!(snapshot.warmup("whole", &mut |_| {}).unwrap().files, 6);
    check_files(&snapshot);
    assert_eq!(server.faults.count("get"), gets, "all of it is on this machine");
    let node = snapshot.stat("staged/3145728").unwrap().node;
    let file = snapshot.open(node, OpenFlags { read: true, ..OpenFlags::default() }).unwrap();
    let mut image = Vec::new();
    std::io::Read::read_to_end(&mut file.image().unwrap().unwrap(), &mut image).unwrap();
    assert!(image == secret_text(3 * MIB));
    check_files(&view(&datafs, "sealed@s"));
    assert_eq!(snapshot.stat("whole").unwrap().kind, FileKind::Directory);
    drop(file);
    // Deleting the volumes empties the bucket.
    for volume in ["v", "sealed"] {
        datafs.volume_delete(&name(volume)).unwrap();
    }
    datafs.gc().unwrap();
    datafs.gc().unwrap();
    assert_eq!(server.names("home"), ["store.json"], "nothing but the marker");
}

#[test]
fn what_a_dead_process_left_in_a_bucket_is_collected() {
    let (server, home) = (S3Server::start(), tempfile::tempdir().unwrap());
    let datafs = Datafs::open(home.path(), &cloud(&server)).unwrap();
    datafs.volume_create(&name("v")).unwrap();
    view(&datafs, "v").write_file("kept", &secret_text(2 * MIB)).unwrap();
    let mut staged = view(&datafs, "v").stage().unwrap();
    staged.append(&secret_text(2 * MIB)).unwrap();
    std::mem::forget(staged.finish().unwrap());
    let mut staged = view(&datafs, "v").stage().unwrap();
    staged.append(&secret_text(30 * MIB)).unwrap();
    std::mem::forget(staged);
    assert_eq!(server.names("home/uploads").len(), 1);
    datafs.shared.session.lose_lock();
    let other = Datafs::open(home.path(), &cloud(&server)).unwrap();
    assert_eq!(other.gc().unwrap().sessions, 1);
    assert_eq!(server.names("home/uploads"), Vec::<String>::new());
    assert_eq!(server.names("home/objects").len(), 2, "one object and its checksums");
    assert!(view(&other, "v").read_file("kept").unwrap() == secret_text(2 * MIB));
}

#[test]
fn a_live_view_outlives_its_store() {
    let (mut server, home) = (S3Server::start(), tempfile::tempdir().unwrap());
    let config = Config { store_timeout_ms: 3_000, cache_bytes_max: 0, ..cloud(&server) };
    let datafs = Datafs::open(home.path(), &config).unwrap();
    datafs.volume_create(&name("v")).unwrap();
    let live = view(&datafs, "v");
    live.write_file("before", &secret_text(2 * MIB)).unwrap();
    let flags = OpenFlags { read: true, write: true, ..OpenFlags::default() };
    let open = live.open(live.stat("before").unwrap().node, flags).unwrap();
    server.stop();
    let error = open.read_at(0, 1000).unwrap_err();
    let Error::StoreAway { place, .. } = &error else { panic!("{error}") };
    assert_eq!(place, "s3://bucket/home");
    assert!(error.is_retryable());
    open.write_at(0, &secret_text(100_000)).unwrap();
    assert!(matches!(open.fsync().unwrap_err(), Error::StoreAway { .. }));
    // Names and small files need no store.
    live.write_file("small", b"in the metadata").unwrap();
    server.start_again();
    // On a busy machine the store may be unavailable for another moment.
    let begun = std::time::Instant::now();
    while let Err(error) = open.fsync() {
        assert!(error.is_retryable() && begun.elapsed().as_secs() < 120, "{error}");
    }
    assert!(live.read_file("before").unwrap() == secret_text(2 * MIB));
    assert_eq!(&live.read_file("small").unwrap()[..], b"in the metadata");
}
