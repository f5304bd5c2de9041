//! Tests of access rights: a home is private to its owner, also one of an earlier version; its mounts can be
//! shared.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{Home, fuse_permitted, until};

/// The files and folders below `root`, and itself, to which other users have rights.
fn paths_open_to_others(root: &Path) -> Vec<(PathBuf, u32)> {
    let mut found = Vec::new();
    let mut pending = vec![root.to_owned()];
    while let Some(path) = pending.pop() {
        let metadata = fs::symlink_metadata(&path).unwrap();
        if metadata.mode() & 0o077 != 0 {
            found.push((path.clone(), metadata.mode() & 0o7777));
        }
        if metadata.is_dir() {
            pending.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
    }
    found
}

/// A home with most kinds of files that Millrace writes.
fn used() -> Home {
    let home = Home::new();
    let records = home.file("r.jsonl", "{\"id\":1}\n{\"id\":2}\n");
    home.ok(["produce", "t", records.to_str().unwrap()]);
    home.ok(["ingest", "--topic", "t", "--volume", "v"]);
    home.ok(["cp", records.to_str().unwrap(), "v:/r.jsonl"]);
    home.ok(["snapshot", "create", "v@s"]);
    home.ok(["fsck"]);
    home
}

#[test]
fn files_in_a_home_are_accessible_to_their_owner_only() {
    let home = used();
    if fuse_permitted() {
        let at = home.dir.path().join("mnt");
        home.ok(["mount", "--detach", "v", at.to_str().unwrap()]);
        fs::write(at.join("large"), vec![7; 3 << 20]).unwrap();
        fs::write(at.join("small"), "small").unwrap();
        assert!(home.path().join("run").exists() && home.path().join("mount.log").exists());
        assert_eq!(paths_open_to_others(&home.path()), []);
        home.ok(["umount", at.to_str().unwrap()]);
        until("the daemon has ended", || {
            fs::File::open(home.path().join("in-use.lock")).unwrap().try_lock().is_ok()
        });
    }
    let mut broker = home.start(["broker", "--listen", "127.0.0.1:0", "--json"]);
    broker.object();
    assert_eq!(paths_open_to_others(&home.path()), []);
    assert_eq!(broker.stop(), 0);
    home.json(
        ["quickstart", "--free-ports", "--workers", "1", "--home"]
            .into_iter()
            .map(String::from)
            .chain([home.dir.path().join("quick").to_str().unwrap().to_owned()]),
    );
    let mut open = paths_open_to_others(&home.dir.path().join("quick"));
    // The user may share the mount point itself.
    open.retain(|(path, _)| !path.ends_with("mount"));
    assert_eq!(open, []);
}

#[test]
fn home_of_earlier_release_is_made_private_once_with_a_note() {
    let home = used();
    // A home in the state of earlier versions, with a file of the user.
    fs::write(home.path().join("mine.txt"), "of the user").unwrap();
    let opened = Command::new("chmod").args(["-R", "a+rX"]).arg(home.path()).status().unwrap();
    assert!(opened.success() && paths_open_to_others(&home.path()).len() > 10);
    let output = home.run(["volume", "list"]);
    let notes = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{notes}");
    assert!(notes.contains("was open to other users (mode 755)"), "{notes}");
    // The folder protects the user's file, whose mode does not change.
    assert_eq!(paths_open_to_others(&home.path()), [(home.path().join("mine.txt"), 0o644)]);
    let output = home.run(["volume", "list"]);
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    home.ok(["cp", "v:/r.jsonl", "back"]);
    assert_eq!(home.json(["feed", "v:/t", "--dry", "--batch-rows", "2"])["rows"], 2);
}

/// A folder that users share by design keeps its mode; Millrace's files in it are private.
#[test]
fn a_shared_folder_keeps_its_mode() {
    let home = Home::new();
    fs::create_dir(home.path()).unwrap();
    fs::set_permissions(home.path(), fs::Permissions::from_mode(0o1777)).unwrap();
    home.ok(["volume", "create", "v"]);
    assert_eq!(paths_open_to_others(&home.path()), [(home.path(), 0o1777)]);
}

#[test]
fn other_user_reads_through_a_mount_but_not_in_the_home() {
    if !fuse_permitted() {
        return;
    }
    if !nix::unistd::geteuid().is_root() {
        return millrace_testing::skip(millrace_testing::Need::Root, "only root can become another user");
    }
    let home = Home::new();
    fs::set_permissions(home.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    home.ok(["volume", "create", "v"]);
    let at = home.dir.path().join("mnt");
    home.ok(["mount", "--detach", "v", at.to_str().unwrap()]);
    fs::write(at.join("shared"), vec![7; 3 << 20]).unwrap();
    fs::write(at.join("secret"), "secret").unwrap();
    fs::set_permissions(at.join("secret"), fs::Permissions::from_mode(0o600)).unwrap();
    home.ok(["snapshot", "create", "v@s"]);
    let reads = |path: &Path| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "cat"]).arg(path);
        command.output().unwrap()
    };
    // Read through the daemon, and for the snapshot from the backing file.
    for path in ["shared", ".snapshots/s/shared"] {
        let output = reads(&at.join(path));
        assert!(output.status.success() && output.stdout == vec![7; 3 << 20], "{path}: {:?}", output.status);
    }
    assert!(!reads(&at.join("secret")).status.success());
    assert!(!reads(&home.path().join("datafs/meta.sqlite")).status.success());
    home.ok(["umount", at.to_str().unwrap()]);
}

#[test]
fn home_or_store_of_another_user_is_refused_with_owner_and_remedy() {
    if !nix::unistd::geteuid().is_root() {
        return millrace_testing::skip(
            millrace_testing::Need::Root,
            "only root can give files to another user",
        );
    }
    let home = used();
    let give = |path: &Path, user: u32| nix::unistd::chown(path, Some(user.into()), None).unwrap();
    let (objects, metadata) =
        (home.path().join("datafs/objects/store.json"), home.path().join("datafs/meta.sqlite"));
    let listing = ["volume", "list"];
    for (file, what) in [
        (home.path().join("format.json"), format!("home folder {}", home.path().display())),
        (objects, format!("local store {}", home.path().join("datafs/objects").display())),
        (metadata.clone(), format!("metadata file {}", metadata.display())),
    ] {
        home.ok(listing);
        give(&file, 65_534);
        for args in [&listing[..], &["fsck"], &["train", "job.toml"]] {
            home.file(
                "job.toml",
                "name = \"j\"\ndataset = \"v@s:/t\"\nfeatures = \"x\"\nlabel = \"y\"\nmodel = \"m\"\n",
            );
            let (code, line) = home.fails(args);
            assert_eq!(code, 5, "{line}");
            for words in [what.as_str(), "belongs to user 65534", "user 0", "sudo -u", "chown -R 0"] {
                assert!(line.contains(words), "{args:?}: {line} lacks {words}");
            }
        }
        give(&file, 0);
    }
    // The owner of a disk's mount point does not matter; the owner of Millrace's files does.
    give(&home.path(), 65_534);
    home.ok(listing);
    give(&home.path(), 0);
}
