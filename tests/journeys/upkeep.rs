//! Tests of volume maintenance: check, repair, garbage collection, copy.

use crate::support::{Home, failure, until};

fn ingest_records(home: &Home) {
    let lines: String = (0..500).map(|i| format!("{{\"id\":{i},\"x\":[0.5,{i}]}}\n")).collect();
    let file = home.file("records.jsonl", lines);
    home.ok(["produce", "t", file.to_str().unwrap()]);
    home.ok(["ingest", "--topic", "t", "--volume", "v"]);
    home.ok(["snapshot", "create", "v@s"]);
}

#[test]
fn fsck_reports_lost_data() {
    let home = Home::new();
    ingest_records(&home);
    let report = home.json(["fsck", "--scrub"]);
    assert_eq!(report["problems"], 0, "{report}");
    assert!(report["scrubbed_bytes"].as_u64().unwrap() > 1_000, "{report}");
    assert!(home.ok(["fsck"]).contains("problems"));
    assert_eq!(home.json(["warmup", "v@s"])["bytes"], 0);
    home.ok(["compact", "v"]);
    let objects = home.path().join("datafs/objects");
    let below = |folder: &std::path::Path| {
        let entries = std::fs::read_dir(folder).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
    };
    for file in below(&objects).iter().filter(|path| path.is_dir()).flat_map(|folder| below(folder)) {
        std::fs::remove_file(file).unwrap();
    }
    let output = home.run(["fsck", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["found"][0]["kind"], "missing-object", "{report}");
    let (code, line) = failure(&output, "fsck");
    assert_eq!(code, 6, "{line}");
    // Once the damaged volume is deleted, no damage is left.
    home.ok(["volume", "delete", "v", "--yes"]);
    home.ok(["gc"]);
    assert_eq!(home.json(["fsck"])["problems"], 0);
}

#[test]
fn folders_of_volumes_and_snapshots_are_listed() {
    let home = Home::new();
    home.ok(["volume", "create", "v"]);
    let (code, line) = home.fails(["ls", "v@latest"]);
    assert!(code == 3 && line.contains("a snapshot of volume v"), "{code}: {line}");
    let folder = home.dir.path().join("files");
    std::fs::create_dir_all(folder.join("sub")).unwrap();
    std::fs::write(folder.join("b.txt"), "12345").unwrap();
    std::fs::write(folder.join("a\u{1b}[31m"), "").unwrap();
    std::fs::write(folder.join("sub/c"), "123").unwrap();
    home.ok(["cp", "-r", folder.to_str().unwrap(), "v:/files"]);
    home.ok(["snapshot", "create", "v@one"]);
    let listed = home.ok(["ls", "v:/files"]);
    let lines: Vec<_> = listed.lines().collect();
    assert_eq!(lines.len(), 3, "{listed}");
    assert!(lines[0].ends_with("  a\\u{1b}[31m"), "{listed:?}");
    assert!(
        lines[1].starts_with("-rw-") && lines[1].contains(" 5  ") && lines[1].ends_with("  b.txt"),
        "{listed}"
    );
    assert!(lines[2].starts_with("drwx") && lines[2].ends_with("  sub"), "{listed}");
    home.ok(["cp", "-r", folder.to_str().unwrap(), "v:/later"]);
    let below = |what: &str| -> Vec<(String, u64)> {
        let text = home.ok(["ls", "-r", what, "--json"]);
        let object = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap();
        let entry =
            |of: serde_json::Value| (of["path"].as_str().unwrap().to_owned(), of["size"].as_u64().unwrap());
        text.lines().map(object).filter(|of| of["kind"] == "file").map(entry).collect()
    };
    let expected = [("files/a\u{1b}[31m", 0), ("files/b.txt", 5), ("files/sub/c", 3)];
    assert_eq!(below("v@latest"), expected.map(|(path, size)| (path.to_owned(), size)));
    assert_eq!(below("v").len(), 6);
    home.ok(["snapshot", "create", "v@two"]);
    assert_eq!(below("v@latest").len(), 6, "the newest one");
    assert_eq!(below("v:/files/b.txt"), [("b.txt".to_owned(), 5)]);
    home.ok(["snapshot", "delete", "v@two"]);
    assert_eq!(below("v@latest").len(), 3, "the newest one that is left");
    let (code, line) = home.fails(["snapshot", "create", "v@latest"]);
    assert!(code == 2 && line.contains("newest snapshot"), "{code}: {line}");
    // Links are listed themselves where they lead nowhere.
    let links = home.dir.path().join("links");
    std::fs::create_dir(&links).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", links.join("out")).unwrap();
    home.ok(["cp", "-r", links.to_str().unwrap(), "v:/links"]);
    assert!(home.ok(["ls", "v:/links/out"]).ends_with("  out -> /etc/passwd\n"));
    assert_eq!(home.fails(["ls", "v:/missing"]).0, 3);
    assert_eq!(home.fails(["ls", "v@"]).0, 2);
}

#[test]
fn volumes_are_backed_up_and_restored() {
    let home = Home::new();
    ingest_records(&home);
    let folder = home.dir.path().join("backup");
    let folder = folder.to_str().unwrap();
    let inside = home.path().join("backup");
    assert_eq!(home.fails(["backup", inside.to_str().unwrap()]).0, 2);
    let report = home.json(["backup", folder]);
    assert!(report["objects"].as_u64().unwrap() > 0 && report["missing"] == 0, "{report}");
    home.ok(["volume", "delete", "v", "--yes"]);
    home.ok(["volume", "create", "newer"]);
    home.ok(["gc"]);
    let (code, line) = home.fails(["restore", folder]);
    assert!(code == 2 && line.contains("--yes"), "{code}: {line}");
    assert_eq!(home.fails(["restore", home.dir.path().to_str().unwrap(), "--yes"]).0, 3);
    home.ok(["restore", folder, "--yes"]);
    let listed = home.json(["volume", "list"]);
    assert_eq!((listed[0]["name"].as_str(), listed.as_array().unwrap().len()), (Some("v"), 1), "{listed}");
    let report = home.json(["fsck", "--scrub"]);
    assert!(report["problems"] == 0 && report["scrubbed_bytes"].as_u64().unwrap() > 1_000, "{report}");
}

#[test]
fn older_metadata_copy_is_restored() {
    let home = Home::new();
    home.ok(["volume", "create", "kept"]);
    let (metadata, copy) = (home.path().join("datafs/meta.sqlite"), home.dir.path().join("copy"));
    std::fs::copy(&metadata, &copy).unwrap();
    home.ok(["volume", "create", "lost"]);
    home.ok(["snapshot", "create", "lost@s"]);
    std::fs::copy(&copy, &metadata).unwrap();
    let listed = home.json(["volume", "list"]);
    assert_eq!((listed[0]["name"].as_str(), listed.as_array().unwrap().len()), (Some("kept"), 1), "{listed}");
    home.ok(["volume", "create", "lost"]);
    home.ok(["gc"]);
}

#[test]
fn a_damaged_volume_is_named_and_the_others_are_listed() {
    let home = Home::new();
    home.ok(["volume", "create", "sound"]);
    let damaged = home.json(["volume", "create", "damaged"]);
    let metadata = rusqlite::Connection::open(home.path().join("datafs/meta.sqlite")).unwrap();
    let mut key = vec![b'v'];
    key.extend(damaged[0]["id"].as_u64().unwrap().to_be_bytes());
    assert_eq!(metadata.execute("UPDATE kv SET v = x'00' WHERE k = ?1", [key]).unwrap(), 1);
    drop(metadata);
    let output = home.run(["volume", "list", "--json"]);
    let listed: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(listed.as_array().unwrap().len(), 1, "{listed}");
    assert_eq!(listed[0]["name"], "sound");
    let (code, line) = failure(&output, "volume list");
    assert_eq!(code, 6, "{line}");
    assert!(line.contains("\"damaged\"") && line.contains("millrace fsck"), "{line}");
    let (code, line) = failure(&home.run(["fsck"]), "fsck");
    assert_eq!(code, 6, "{line}");
}

#[test]
fn trees_are_copied_in_out_and_in_again() {
    let home = Home::new();
    home.ok(["volume", "create", "v"]);
    let source = home.dir.path().join("source");
    std::fs::create_dir_all(source.join("sub")).unwrap();
    for i in 0..20 {
        std::fs::write(source.join(format!("sub/{i}")), vec![i as u8; i * 1_000]).unwrap();
    }
    let (code, line) = home.fails(["cp", "source", "v:/copy"]);
    assert!(line.contains("-r"), "{code}: {line}");
    assert_eq!(home.json(["cp", "-r", "source", "v:/copy"])["files"], 20);
    assert_eq!(home.json(["cp", "-r", "source", "v:/copy"])["unchanged"], 20);
    home.ok(["snapshot", "create", "v@s"]);
    let bucket = format!("file://{}/bucket", home.dir.path().display());
    std::fs::create_dir(home.dir.path().join("bucket")).unwrap();
    home.ok(["cp", "-r", "v@s:/copy", &bucket]);
    home.ok(["cp", "-r", &bucket, "back"]);
    home.ok(["cp", "v:/copy/sub/7", "seven"]);
    assert_eq!(std::fs::read(home.dir.path().join("seven")).unwrap(), vec![7; 7_000]);
    for i in 0..20 {
        let copy = std::fs::read(home.dir.path().join(format!("back/sub/{i}"))).unwrap();
        assert_eq!(copy, vec![i as u8; i * 1_000]);
    }
    let (code, line) = home.fails(["cp", "v:/missing", "x"]);
    assert!(code == 3 && line.contains("missing"), "{line}");
    assert_eq!(home.fails(["cp", "bad name:/x", "y"]).0, 2);
}

/// Runs `cp` until some files exist, kills it, and runs it again.
fn killed_and_run_again(home: &Home, from: &str, to: &str, there: &dyn Fn() -> Vec<String>) {
    let mut copy = home.start(["cp", "-r", from, to, "--parallel", "2", "--json"]);
    until("some files are there", || there().len() >= 30 || !copy.is_running());
    if copy.is_running() {
        copy.signal(nix::sys::signal::Signal::SIGKILL);
    }
    copy.wait();
    let whole = there().iter().filter(|name| !name.starts_with('.')).count() as u64;
    assert!(whole >= 20, "{whole}");
    let report = home.json(["cp", "-r", from, to]);
    let (files, unchanged) = (report["files"].as_u64().unwrap(), report["unchanged"].as_u64().unwrap());
    assert_eq!(files + unchanged, FILES, "{report}");
    // Copies only the rest.
    assert!(unchanged >= whole, "{whole} were there: {report}");
    assert_eq!(report["bytes"], files * FILE_BYTES, "{report}");
    // Unfinished files of the killed copy were completed or removed.
    let names = there();
    assert_eq!(names.len() as u64, FILES, "{:?}", names.iter().find(|name| name.starts_with('.')));
}

const FILES: u64 = 1_500;
const FILE_BYTES: u64 = 9_000;

#[test]
fn killed_copy_resumes() {
    let home = Home::new();
    home.ok(["volume", "create", "v"]);
    let folder = |name: &str| home.dir.path().join(name);
    std::fs::create_dir(folder("source")).unwrap();
    for i in 0..FILES {
        std::fs::write(folder("source").join(i.to_string()), vec![i as u8; FILE_BYTES as usize]).unwrap();
    }
    let datafs = millrace_datafs::Datafs::open(&home.path(), &millrace_datafs::Config::default()).unwrap();
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    let in_volume = || match view.list("copy") {
        Ok(entries) => entries.into_iter().map(|entry| entry.name).collect(),
        Err(_) => Vec::new(),
    };
    killed_and_run_again(&home, "source", "v:/copy", &in_volume);
    let in_folder = || match std::fs::read_dir(folder("back")) {
        Ok(entries) => entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect(),
        Err(_) => Vec::new(),
    };
    killed_and_run_again(&home, "v:/copy", "back", &in_folder);
    for i in 0..FILES {
        let copy = std::fs::read(folder("back").join(i.to_string())).unwrap();
        assert!(copy == vec![i as u8; FILE_BYTES as usize], "{i}");
    }
    drop((view, datafs));
    home.ok(["gc"]);
    assert_eq!(home.json(["fsck", "--scrub"])["problems"], 0);
}

#[test]
fn the_key_of_an_encrypted_volume_is_changed() {
    let home = Home::new();
    for (name, byte) in [("old", 1_u8), ("new", 2)] {
        home.file(&format!("{name}.key"), vec![byte; 32]);
    }
    let at = |name: &str| home.dir.path().join(format!("{name}.key")).display().to_string();
    let config = format!(
        "[datafs.encryption_keys]\nold = {{ file = \"{}\" }}\nnew = {{ file = \"{}\" }}\n",
        at("old"),
        at("new")
    );
    home.file("millrace.toml", config);
    home.ok(["volume", "create", "v", "--encrypt", "old"]);
    home.ok(["volume", "create", "plain"]);
    home.file("before", "written with the old key");
    home.file("after", "written with the new key");
    home.ok(["cp", "before", "v:/before"]);
    assert!(home.ok(["volume", "set-key", "v", "new"]).contains("new"));
    home.ok(["cp", "after", "v:/after"]);
    home.ok(["cp", "v:/before", "back"]);
    assert_eq!(std::fs::read(home.dir.path().join("back")).unwrap(), b"written with the old key");
    let (code, line) = home.fails(["volume", "set-key", "v", "other"]);
    assert!(code == 2 && line.contains("other"), "{code}: {line}");
    let (code, line) = home.fails(["volume", "set-key", "plain", "new"]);
    assert!(code == 2 && line.contains("not encrypted"), "{code}: {line}");
    assert_eq!(home.fails(["volume", "set-key", "missing", "new"]).0, 3);
}
