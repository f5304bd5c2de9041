//! A journey with objects that another process has deleted: a mount closes their files.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};

use millrace_datafs::{Config, Datafs, OpenFlags, Owner};

use super::{Home, eventually, on_postgres, pattern};

/// The files that this process has open below a folder, named or deleted.
fn open_below(folder: &Path) -> Vec<PathBuf> {
    let links = fs::read_dir("/proc/self/fd").unwrap();
    // A descriptor closed meanwhile is skipped.
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
    // In the role of another process, which writes the objects and deletes them.
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
    // Two objects that were read, one that is appended to.
    let open = open_below(&store);
    assert!(open.len() >= 3, "{open:?}");
    for name in ["large", "small"] {
        view.remove_file(name).unwrap();
    }
    // Both sessions must first report that they do not have the files open.
    eventually("the objects are deleted", || {
        others.gc().unwrap();
        objects(&store).is_empty()
    });
    eventually("deleted objects are closed", || open_below(&store).is_empty());
    // The volume still works.
    view.write_file("next", &pattern(20_000, 2)).unwrap();
    assert!(fs::read(mount.path().join("next")).unwrap() == pattern(20_000, 2));
    mount.unmount().unwrap();
}
