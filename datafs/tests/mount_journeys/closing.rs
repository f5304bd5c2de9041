//! Objects that another process has deleted: a mount closes their files.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};

use millrace_datafs::{Config, Datafs, OpenFlags, Owner};

use super::{Home, eventually, on_postgres, pattern};

/// What this process has open below a folder, with or without a name.
fn open_below(folder: &Path) -> Vec<PathBuf> {
    let links = fs::read_dir("/proc/self/fd").unwrap();
    // One that is closed meanwhile is not open.
    let paths = links.filter_map(|link| fs::read_link(link.ok()?.path()).ok());
    paths.filter(|path| path.starts_with(folder)).collect()
}

/// The objects in a local store.
fn objects(store: &Path) -> Vec<PathBuf> {
    let folders =
        fs::read_dir(store).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_dir());
    folders.flat_map(|folder| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path())).collect()
}

#[test]
fn a_mount_that_has_read_a_removed_file_closes_its_objects() {
    let Some(home) = Home::new() else { return };
    // As another process: what deletes the objects, and has written the pack that is one of them.
    let config = Config { garbage_grace_ms: 0, gc_interval_ms: 0, ..on_postgres::config() };
    let store = home.dir.path().canonicalize().unwrap().join("home").join(&config.store_dir);
    let others = Datafs::open(&home.dir.path().join("home"), &config).unwrap();
    let view = others.view(&"data".parse().unwrap()).unwrap();
    let owner = Owner { uid: 0, gid: 0 };
    for (name, bytes) in [("large", 1_000_000), ("small", 20_000)] {
        let created = view.create(view.root(), name.as_ref(), 0o644, owner, OpenFlags::READ_WRITE);
        let (_, file) = created.unwrap();
        file.write_at(0, &pattern(bytes, 1)).unwrap();
        file.fsync().unwrap();
    }
    let mount = home.mount("data");
    for (name, bytes) in [("large", 1_000_000), ("small", 20_000)] {
        assert!(fs::read(mount.path().join(name)).unwrap() == pattern(bytes, 1), "{name}");
    }
    // Two that were read, one that is appended to.
    let open = open_below(&store);
    assert!(open.len() >= 3, "{open:?}");
    for name in ["large", "small"] {
        view.remove_file(name).unwrap();
    }
    // Each of the two first says that it does not have them open.
    eventually("the objects are deleted", || {
        others.gc().unwrap();
        objects(&store).is_empty()
    });
    eventually("deleted objects are closed", || open_below(&store).is_empty());
    // Everything goes on.
    view.write_file("next", &pattern(20_000, 2)).unwrap();
    assert!(fs::read(mount.path().join("next")).unwrap() == pattern(20_000, 2));
    mount.unmount().unwrap();
}
