//! Tests of copies: trees copied between folders, volumes and buckets keep their content and attributes.
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use object_store::memory::InMemory;
use parking_lot::Mutex;
use tempfile::TempDir;

use super::*;
use crate::config::Config;
use crate::fs::tests::setup_with;

const RECURSIVE: CopyOptions = CopyOptions { recursive: true, parallel: 4 };

struct Home {
    dir: TempDir,
    datafs: Datafs,
    view: View,
}

impl Home {
    fn new() -> Home {
        let (dir, datafs, view) = setup_with(Config::default());
        Home { dir, datafs, view }
    }

    fn local(&self, name: &str) -> Endpoint {
        Endpoint::Local(self.path(name))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn volume(&self, path: &str) -> Endpoint {
        Endpoint::Volume(self.view.clone(), path.into())
    }

    fn copy(&self, from: &Endpoint, to: &Endpoint) -> CopyReport {
        let report = self.datafs.copy(from, to, &RECURSIVE, &|_| true).unwrap();
        assert_eq!(report.failed, []);
        report
    }
}

fn open(path: &Path) -> File {
    File::open(path).unwrap()
}

fn mode_of(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

/// Creates files of many sizes, a hole, links, modes, times, and a name that is not UTF-8.
fn plant(root: &Path) {
    use std::os::unix::ffi::OsStrExt as _;
    fs::create_dir_all(root.join("a/b")).unwrap();
    fs::create_dir(root.join("empty")).unwrap();
    for (i, size) in [0, 1, 4096, 5_000, 100_000, 9 << 20].into_iter().enumerate() {
        let bytes: Vec<u8> = (0..size).map(|at| (at * 7 + i) as u8).collect();
        fs::write(root.join(format!("a/file-{i}")), bytes).unwrap();
    }
    let holes = File::create(root.join("a/b/holes")).unwrap();
    holes.write_all_at(b"begin", 0).unwrap();
    holes.write_all_at(b"middle", 20 << 20).unwrap();
    holes.set_len(30 << 20).unwrap();
    fs::hard_link(root.join("a/file-3"), root.join("a/b/same")).unwrap();
    symlink("../file-3", root.join("a/b/link")).unwrap();
    symlink("nowhere", root.join("dangling")).unwrap();
    fs::write(root.join(OsStr::from_bytes(b"bytes-\xff")), "no text").unwrap();
    fs::set_permissions(root.join("a/file-2"), fs::Permissions::from_mode(0o4751)).unwrap();
    let old = SystemTime::UNIX_EPOCH + Duration::new(1_234_567_890, 987_654_321);
    File::open(root.join("a/file-2")).unwrap().set_modified(old).unwrap();
    File::open(root.join("empty")).unwrap().set_modified(old).unwrap();
    fs::set_permissions(root.join("empty"), fs::Permissions::from_mode(0o500)).unwrap();
}

/// Everything that a copy keeps of each path.
fn all_of(root: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut pending = vec![root.to_owned()];
    while let Some(folder) = pending.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let metadata = fs::symlink_metadata(&path).unwrap();
            let what = if metadata.is_symlink() {
                format!("link to {:?} {:?}", fs::read_link(&path).unwrap(), metadata.modified().unwrap())
            } else if metadata.is_dir() {
                pending.push(path.clone());
                format!("folder {:o} {:?}", metadata.mode(), metadata.modified().unwrap())
            } else {
                let sum = crc32c::crc32c(&fs::read(&path).unwrap());
                let (mode, time) = (metadata.mode(), metadata.modified().unwrap());
                format!("file {mode:o} {time:?} {} {} {sum}", metadata.nlink(), metadata.len())
            };
            found.insert(path.strip_prefix(root).unwrap().to_owned(), what);
        }
    }
    found
}

#[test]
fn a_tree_goes_into_a_volume_and_comes_back() {
    let home = Home::new();
    let source = home.path("source");
    plant(&source);
    let has_attributes =
        xattr::write(&open(&source.join("a/file-1")), &vec![("user.note".into(), b"kept".to_vec())]).is_ok()
            && !xattr::read(&open(&source.join("a/file-1"))).unwrap().is_empty();
    let report = home.copy(&home.local("source"), &home.volume("deep/copy"));
    assert_eq!((report.files, report.links, report.unchanged), (8, 3, 0));
    assert!(report.bytes < 12 << 20, "holes are not copied: {report:?}");
    let report = home.copy(&home.volume("deep/copy"), &home.local("back"));
    assert_eq!((report.files, report.links, report.left_out), (8, 3, 0));
    assert_eq!(all_of(&home.path("back")), all_of(&source));
    assert!(fs::metadata(home.path("back/a/b/holes")).unwrap().blocks() < 4_096);
    if has_attributes {
        let attributes = xattr::read(&open(&home.path("back/a/file-1"))).unwrap();
        assert_eq!(attributes, [("user.note".into(), b"kept".to_vec())]);
    }
    // Between volumes, from a snapshot.
    let name = "s".parse().unwrap();
    home.datafs.snapshot_create(&"v".parse().unwrap(), &name).unwrap();
    home.datafs.volume_create(&"w".parse().unwrap()).unwrap();
    let snapshot = Endpoint::Volume(home.datafs.view(&"v@s".parse().unwrap()).unwrap(), "/deep/copy".into());
    let other = Endpoint::Volume(home.datafs.view(&"w".parse().unwrap()).unwrap(), "/".into());
    home.copy(&snapshot, &other);
    home.copy(&other, &home.local("again"));
    assert_eq!(all_of(&home.path("again")), all_of(&source));
    let report = home.datafs.fsck(&Default::default(), &mut |_| {}).unwrap();
    assert!(report.is_sound(), "{:?}", report.found);
}

#[test]
fn what_is_there_is_not_copied_again() {
    let home = Home::new();
    let source = home.path("source");
    plant(&source);
    for (from, to) in [(home.local("source"), home.volume("copy")), (home.volume("copy"), home.local("back"))]
    {
        let first = home.copy(&from, &to);
        assert_eq!(first.files, 8);
        let second = home.copy(&from, &to);
        assert_eq!((second.files, second.unchanged, second.bytes), (0, 8, 0));
    }
    // One of the same size but newer, and one of another size.
    fs::write(source.join("a/file-1"), "!").unwrap();
    fs::write(source.join("a/file-4"), "another size").unwrap();
    let report = home.copy(&home.local("source"), &home.volume("copy"));
    assert_eq!((report.files, report.unchanged), (2, 6));
    assert_eq!(home.view.read_file("copy/a/file-1").unwrap()[..], b"!"[..]);
}

#[test]
fn buckets_take_and_give_files() {
    let home = Home::new();
    let source = home.path("source");
    plant(&source);
    fs::remove_file(source.join(OsStr::new("dangling"))).unwrap();
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let bucket = |path: &str| Endpoint::Bucket(Arc::clone(&store), path.into());
    home.copy(&home.local("source"), &home.volume("copy"));
    let report = home.datafs.copy(&home.volume("copy"), &bucket("some/prefix"), &RECURSIVE, &|_| true);
    let report = report.unwrap();
    // The name that is not UTF-8 fails; symbolic links are left out; hard links become separate files.
    assert_eq!((report.files, report.failures, report.left_out), (8, 1, 1), "{report:?}");
    let again = home.datafs.copy(&home.volume("copy"), &bucket("some/prefix"), &RECURSIVE, &|_| true);
    assert_eq!(again.unwrap().unchanged, 8);
    for to in ["one", "two"] {
        let report = home.copy(&bucket("some/prefix"), &home.local(to));
        assert_eq!(report.files, 8);
        for name in ["a/file-0", "a/file-5", "a/b/holes", "a/b/same"] {
            let (ours, theirs) = (fs::read(home.path(to).join(name)), fs::read(source.join(name)));
            assert!(ours.unwrap() == theirs.unwrap(), "{name}");
        }
        assert_eq!(home.copy(&bucket("some/prefix"), &home.local(to)).unchanged, 8);
    }
    // A single object, and a missing one.
    home.copy(&bucket("some/prefix/a/file-4"), &home.volume("single"));
    assert_eq!(home.view.stat("single").unwrap().size, 100_000);
    let missing = home.datafs.copy(&bucket("other"), &home.local("x"), &RECURSIVE, &|_| true);
    assert!(missing.unwrap_err().is_not_found());
}

#[test]
fn a_copy_that_was_stopped_goes_on() {
    let home = Home::new();
    let source = home.path("source");
    fs::create_dir(&source).unwrap();
    for i in 0..200 {
        fs::write(source.join(format!("f{i}")), vec![i as u8; 5_000]).unwrap();
    }
    let told = AtomicU64::new(0);
    let stopped = home.datafs.copy(&home.local("source"), &home.volume("copy"), &RECURSIVE, &|_| {
        told.fetch_add(1, Ordering::Relaxed) < 100
    });
    assert!(matches!(stopped, Err(Error::Invalid(_))));
    let there = home.view.list("copy").unwrap();
    assert!(!there.is_empty() && there.len() < 200);
    for entry in &there {
        assert_eq!(entry.stat.size, 5_000, "{} is not whole", entry.name);
    }
    let report = home.copy(&home.local("source"), &home.volume("copy"));
    assert_eq!(report.files + report.unchanged, 200);
    assert_eq!(report.unchanged, there.len() as u64);
}

#[test]
fn refusals_say_why() {
    let home = Home::new();
    fs::create_dir(home.path("folder")).unwrap();
    let once = CopyOptions::default();
    let refused = home.datafs.copy(&home.local("folder"), &home.volume("x"), &once, &|_| true);
    assert!(matches!(refused, Err(Error::IsADirectory { .. })));
    let missing = home.datafs.copy(&home.volume("nothing"), &home.local("x"), &once, &|_| true);
    assert!(missing.unwrap_err().is_not_found());
    fs::write(home.path("file"), "text").unwrap();
    home.copy(&home.local("file"), &home.volume("sub/file"));
    assert_eq!(home.view.read_file("sub/file").unwrap()[..], b"text"[..]);
    home.copy(&home.volume("sub/file"), &home.local("folder"));
    home.copy(&home.local("folder/file"), &home.volume("/"));
    assert_eq!(home.view.read_file("file").unwrap()[..], b"text"[..]);
    home.datafs.snapshot_create(&"v".parse().unwrap(), &"s".parse().unwrap()).unwrap();
    let snapshot = Endpoint::Volume(home.datafs.view(&"v@s".parse().unwrap()).unwrap(), "new".into());
    let report = home.datafs.copy(&home.local("file"), &snapshot, &once, &|_| true).unwrap();
    assert!(report.failures == 1 && report.failed[0].1.contains("read-only"), "{report:?}");
}

/// A source whose file was truncated by one byte after it was found.
struct Cut<S>(S);

impl<S: tree::Source> tree::Source for Cut<S> {
    fn root(&self) -> Result<tree::Entry> {
        self.0.root().map(|entry| tree::Entry { size: entry.size + 1, ..entry })
    }

    fn list(
        &self,
        path: &Path,
        folder: &tree::Entry,
        visit: &mut dyn FnMut(Vec<tree::Entry>) -> bool,
    ) -> Result<()> {
        self.0.list(path, folder, visit)
    }

    fn look(&self, _: &Path) -> Result<tree::Entry> {
        self.root()
    }

    fn open<'s>(&'s self, path: &Path, file: &tree::Entry) -> Result<Box<dyn tree::ReadFile + 's>> {
        self.0.open(path, file)
    }

    fn target(&self, path: &Path, link: &tree::Entry) -> Result<OsString> {
        self.0.target(path, link)
    }

    fn attributes(&self, path: &Path, entry: &tree::Entry) -> Result<tree::Attributes> {
        self.0.attributes(path, entry)
    }
}

#[test]
fn what_is_cut_while_it_is_copied_is_not_filled_with_zeros() {
    let home = Home::new();
    fs::write(home.path("local"), [7; 10_000]).unwrap();
    home.view.write_file("there", &[7; 10_000]).unwrap();
    let local = Cut(local::LocalTree::new(&home.path("local")));
    let there = Cut(volume::VolumeTree::new(&home.view, Path::new("there")));
    let target = local::LocalTree::new(&home.path("copy"));
    for source in [&local as &dyn tree::Source, &there] {
        let report = walk::run(source, &target, &RECURSIVE, &|_| true).unwrap();
        assert_eq!((report.files, report.failures), (0, 1), "{:?}", report.failed);
        assert!(!home.path("copy").exists());
    }
}

#[test]
fn rights_of_an_owner_stay_behind_when_the_copy_belongs_to_another() {
    let home = Home::new();
    let us = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
    let root = home.view.root();
    // Set-user-ID and set-group-ID of files that match both, the user, the group, or neither.
    for (name, uid, gid, kept) in [
        ("both", us.0, us.1, 0o6755),
        ("user", us.0, us.1 + 1, 0o4755),
        ("group", us.0 + 1, us.1, 0o2755),
        ("neither", us.0 + 1, us.1 + 1, 0o755),
    ] {
        let owner = crate::fs::Owner { uid, gid };
        let flags = crate::fs::OpenFlags::READ_WRITE;
        let (attr, file) = home.view.create(root, OsStr::new(name), 0o600, owner, flags).unwrap();
        file.write_at(0, b"#!/bin/sh").unwrap();
        file.flush().unwrap();
        let mode = crate::fs::SetAttr { mode: Some(0o6755), ..Default::default() };
        home.view.setattr(attr.node, &mode).unwrap();
        home.copy(&home.volume(name), &home.local(name));
        assert_eq!(mode_of(&home.path(name)), kept, "{name}");
        home.copy(&home.volume(name), &home.volume(&format!("copies/{name}")));
        let folder = home.view.lookup(root, OsStr::new("copies")).unwrap().node;
        assert_eq!(home.view.lookup(folder, OsStr::new(name)).unwrap().mode, kept, "{name}");
    }
    if nix::unistd::geteuid().is_root() {
        std::os::unix::fs::chown(home.path("both"), Some(12_345), Some(12_345)).unwrap();
        fs::set_permissions(home.path("both"), fs::Permissions::from_mode(0o6755)).unwrap();
        home.copy(&home.local("both"), &home.volume("from-local"));
        assert_eq!(home.view.lookup(root, OsStr::new("from-local")).unwrap().mode, 0o755);
    }
}

#[test]
fn links_in_the_target_are_not_followed() {
    let home = Home::new();
    let (source, outside) = (home.path("source"), home.path("outside"));
    fs::create_dir_all(source.join("sub/deep")).unwrap();
    fs::set_permissions(source.join("sub"), fs::Permissions::from_mode(0o777)).unwrap();
    fs::write(source.join("sub/deep/file"), "from the source").unwrap();
    fs::write(source.join("top"), "from the source").unwrap();
    fs::create_dir(&outside).unwrap();
    fs::set_permissions(&outside, fs::Permissions::from_mode(0o700)).unwrap();
    fs::write(outside.join("victim"), "of somebody else").unwrap();
    let target = home.path("target");
    fs::create_dir(&target).unwrap();
    symlink(&outside, target.join("sub")).unwrap();
    symlink(outside.join("victim"), target.join("top")).unwrap();
    let report =
        home.datafs.copy(&home.local("source"), &home.local("target"), &RECURSIVE, &|_| true).unwrap();
    assert_eq!((report.files, report.failures), (1, 1), "{report:?}");
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
    assert_eq!(mode_of(&outside), 0o700);
    assert_eq!(fs::read(outside.join("victim")).unwrap(), b"of somebody else");
    // The link itself was replaced.
    assert!(fs::symlink_metadata(target.join("top")).unwrap().is_file());

    // A link that replaces a folder after everything was copied.
    home.copy(&home.local("source"), &home.local("second"));
    fs::remove_dir_all(home.path("second/sub")).unwrap();
    symlink(&outside, home.path("second/sub")).unwrap();
    let tree = local::LocalTree::new(&home.path("second"));
    let like = tree::Source::look(&local::LocalTree::new(&source), Path::new("sub")).unwrap();
    tree::Target::finish_folder(&tree, Path::new("sub"), &like, &Vec::new()).unwrap_err();
    assert_eq!(mode_of(&outside), 0o700);
    // The target that the caller named is followed.
    fs::create_dir(home.path("real")).unwrap();
    symlink(home.path("real"), home.path("named")).unwrap();
    home.copy(&home.local("source"), &home.local("named"));
    assert_eq!(fs::read(home.path("real/top")).unwrap(), b"from the source");
}

#[test]
fn a_file_that_became_a_link_or_a_pipe_is_not_read() {
    let home = Home::new();
    let source = home.path("source");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("file"), "harmless").unwrap();
    fs::write(home.path("secret"), "of somebody else").unwrap();
    let tree = local::LocalTree::new(&source);
    let found = tree::Source::look(&tree, Path::new("file")).unwrap();
    fs::remove_file(source.join("file")).unwrap();
    symlink(home.path("secret"), source.join("file")).unwrap();
    let opened = tree::Source::open(&tree, Path::new("file"), &found);
    assert!(matches!(opened.err(), Some(Error::Stale { .. })));
    fs::remove_file(source.join("file")).unwrap();
    nix::unistd::mkfifo(&source.join("file"), nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
    // The open of a pipe does not wait for a writer.
    assert!(matches!(tree::Source::open(&tree, Path::new("file"), &found).err(), Some(Error::Stale { .. })));
}

/// The partial name of `file` in former versions, where it was predictable.
fn former_partial_name(file: &str) -> String {
    use std::hash::{DefaultHasher, Hash as _, Hasher as _};
    let mut hasher = DefaultHasher::new();
    Some(OsStr::new(file)).hash(&mut hasher);
    format!(".millrace-copy-{:016x}", hasher.finish())
}

#[test]
fn what_is_being_copied_is_its_owners_alone_and_has_a_name_of_its_own() {
    let home = Home::new();
    let source = home.path("source");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("secret"), vec![7; 3 * tree::CHUNK]).unwrap();
    fs::set_permissions(source.join("secret"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::set_permissions(&source, fs::Permissions::from_mode(0o755)).unwrap();
    let names = Mutex::new(std::collections::BTreeSet::new());
    for to in ["one", "two"] {
        let target = home.path(to);
        let seen = Mutex::new(Vec::new());
        let look = |progress: CopyProgress| {
            if progress.bytes > 0 && progress.done == 0 {
                seen.lock().push(mode_of(&target));
                for entry in fs::read_dir(&target).unwrap() {
                    let path = entry.unwrap().path();
                    seen.lock().push(mode_of(&path));
                    names.lock().insert(path.file_name().unwrap().to_owned());
                }
            }
            true
        };
        home.datafs.copy(&home.local("source"), &home.local(to), &RECURSIVE, &look).unwrap();
        let seen = seen.into_inner();
        assert!(seen.len() >= 6 && seen.iter().all(|mode| mode & 0o077 == 0), "{seen:?}");
        assert_eq!(mode_of(&target), 0o755);
    }
    assert_eq!(names.lock().len(), 2, "{names:?}");
}

#[test]
fn a_folder_is_not_copied_into_itself() {
    let home = Home::new();
    fs::create_dir_all(home.path("raw/deep")).unwrap();
    fs::write(home.path("raw/file"), "content").unwrap();
    symlink(home.path("raw"), home.path("link")).unwrap();
    home.copy(&home.local("raw"), &home.volume("/raw"));
    let bucket: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let object = |path: &str| Endpoint::Bucket(Arc::clone(&bucket), path.into());
    home.copy(&home.local("raw"), &object("raw"));
    for (from, to) in [
        (home.local("raw"), home.local("raw/deep/new")),
        (home.local("raw"), home.local("link/new")),
        (home.local("link"), home.local("raw/none/../new")),
        (home.volume("/raw"), home.volume("raw/sub")),
        (home.volume("/"), home.volume("/backup")),
        (object("raw"), object("raw/sub")),
    ] {
        let refused = home.datafs.copy(&from, &to, &RECURSIVE, &|_| true).unwrap_err();
        assert!(refused.to_string().contains("into itself"), "{refused}");
    }
    assert_eq!(fs::read_dir(home.path("raw")).unwrap().count(), 2);
    // Beside it, in place, and from the folder to one whose name begins alike.
    for (from, to) in [
        (home.local("raw"), home.local("raw2")),
        (home.local("raw"), home.local("raw")),
        (home.volume("/raw"), home.volume("/raw2")),
        (object("raw"), object("raw2")),
    ] {
        home.copy(&from, &to);
    }
    // A file may go below its own folder.
    home.copy(&home.local("raw/file"), &home.local("raw/deep"));
    assert_eq!(fs::read(home.path("raw/deep/file")).unwrap(), b"content");
    // Names with `..` would lead elsewhere than they read.
    for (from, to) in [
        (home.local("raw/file"), home.volume("/raw/deep/../file")),
        (home.local("raw"), home.volume("/raw/new/..")),
        (home.volume("/raw/deep/../file"), home.local("other")),
        (home.volume("/raw"), home.volume("/raw/deep/../../raw/new")),
    ] {
        let refused = home.datafs.copy(&from, &to, &RECURSIVE, &|_| true).unwrap_err();
        assert!(refused.to_string().contains("'..'"), "{refused}");
    }
}

#[test]
fn a_folder_is_not_copied_into_itself_through_another_mount_of_it() {
    if !nix::unistd::geteuid().is_root() {
        return millrace_testing::skip(millrace_testing::Need::Root, "only root can mount a folder again");
    }
    let home = Home::new();
    let [raw, again] = ["raw", "again"].map(|name| home.path(name));
    fs::create_dir(&raw).unwrap();
    fs::create_dir(&again).unwrap();
    let none = None::<&str>;
    nix::mount::mount(Some(&raw), &again, none, nix::mount::MsFlags::MS_BIND, none).unwrap();
    let refused = home.datafs.copy(&home.local("raw"), &home.local("again/deep/new"), &RECURSIVE, &|_| true);
    nix::mount::umount2(&again, nix::mount::MntFlags::MNT_DETACH).unwrap();
    assert!(refused.unwrap_err().to_string().contains("into itself"));
    assert_eq!(fs::read_dir(raw).unwrap().count(), 0);
}

#[test]
fn leftovers_of_killed_copies_go_and_links_at_their_names_are_not_followed() {
    let home = Home::new();
    let (source, target) = (home.path("source"), home.path("target"));
    fs::create_dir(&source).unwrap();
    fs::write(source.join("file"), "from the source").unwrap();
    fs::create_dir(&target).unwrap();
    fs::write(home.path("victim"), "of somebody else").unwrap();
    symlink(home.path("victim"), target.join(former_partial_name("file"))).unwrap();
    fs::write(target.join(".millrace-copy-00000000000000000000000000000001"), "killed").unwrap();
    let running = target.join(".millrace-copy-00000000000000000000000000000002");
    fs::write(&running, "of a copy that runs").unwrap();
    let lock = open(&running);
    lock.lock().unwrap();
    home.copy(&home.local("source"), &home.local("target"));
    assert_eq!(fs::read(home.path("victim")).unwrap(), b"of somebody else");
    let mut there: Vec<_> = fs::read_dir(&target).unwrap().map(|entry| entry.unwrap().path()).collect();
    there.sort();
    assert_eq!(there, [running, target.join("file")]);
    drop(lock);
    // The copy of a single file also removes leftovers.
    home.copy(&home.local("source/file"), &home.local("target/other"));
    assert_eq!(fs::read_dir(&target).unwrap().count(), 2);
}

/// A source whose listing has names that no folder can have.
struct Hostile;

impl tree::Source for Hostile {
    fn root(&self) -> Result<tree::Entry> {
        Ok(self.entry("root", tree::Kind::Folder))
    }

    fn list(
        &self,
        path: &Path,
        _: &tree::Entry,
        visit: &mut dyn FnMut(Vec<tree::Entry>) -> bool,
    ) -> Result<()> {
        if path.as_os_str().is_empty() {
            let names = ["../evil", "/tmp/millrace-test-evil", "a\0b", "..", ".", "", "a/b"];
            visit(names.iter().map(|name| self.entry(name, tree::Kind::File)).collect());
            visit(vec![self.entry("..", tree::Kind::Folder), self.entry("good", tree::Kind::File)]);
        }
        Ok(())
    }

    fn look(&self, _: &Path) -> Result<tree::Entry> {
        self.root()
    }

    fn open<'s>(&'s self, _: &Path, _: &tree::Entry) -> Result<Box<dyn tree::ReadFile + 's>> {
        Ok(Box::new(Nothing))
    }

    fn target(&self, _: &Path, _: &tree::Entry) -> Result<OsString> {
        Ok(OsString::new())
    }

    fn attributes(&self, _: &Path, _: &tree::Entry) -> Result<tree::Attributes> {
        Ok(Vec::new())
    }
}

impl Hostile {
    fn entry(&self, name: &str, kind: tree::Kind) -> tree::Entry {
        tree::Entry {
            name: name.into(),
            kind,
            size: 0,
            mtime: SystemTime::UNIX_EPOCH,
            mode: Some(0o755),
            owner: None,
            identity: None,
            node: None,
            version: None,
        }
    }
}

struct Nothing;

impl tree::ReadFile for Nothing {
    fn next(&mut self) -> Result<Option<(u64, bytes::Bytes)>> {
        Ok(None)
    }

    fn size(&self) -> Result<u64> {
        Ok(0)
    }
}

#[test]
fn names_that_lead_elsewhere_are_refused() {
    let home = Home::new();
    let (folder, volume) = (home.path("a/target"), home.volume("target"));
    fs::create_dir(home.path("a")).unwrap();
    let volume = match &volume {
        Endpoint::Volume(view, path) => volume::VolumeTree::new(view, path),
        _ => unreachable!(),
    };
    let local = local::LocalTree::new(&folder);
    for target in [&local as &dyn tree::Target, &volume] {
        let report = walk::run(&Hostile, target, &RECURSIVE, &|_| true).unwrap();
        assert_eq!((report.files, report.failures), (1, 8), "{report:?}");
    }
    assert_eq!(fs::read_dir(home.path("a")).unwrap().count(), 1);
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
    assert!(!Path::new("/tmp/millrace-test-evil").exists());
    assert_eq!(home.view.list("").unwrap().len(), 1);
    assert_eq!(home.view.list("target").unwrap().len(), 1);
}

/// Several ranges, more than are requested at a time.
const REPLACED_BYTES: usize = 44 << 20;

#[test]
fn an_object_that_is_replaced_while_it_is_copied_is_copied_anew_or_not_at_all() {
    let home = Home::new();
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let runtime = home.datafs.shared.pool.runtime().clone();
    let put = |byte: u8| {
        let store = Arc::clone(&store);
        let payload = object_store::PutPayload::from(vec![byte; REPLACED_BYTES]);
        let put = async move { object_store::ObjectStoreExt::put(&store, &"o".into(), payload).await };
        runtime.wait(put).unwrap().unwrap();
    };
    // Once, and each time that a part of it was copied.
    for (times, files) in [(1, 1), (u64::MAX, 0)] {
        put(0);
        let told = AtomicU64::new(0);
        let copy = |progress: &(dyn Fn(CopyProgress) -> bool + Sync)| {
            let from = Endpoint::Bucket(Arc::clone(&store), "o".into());
            home.datafs.copy(&from, &home.local(&format!("copy-{files}")), &RECURSIVE, progress).unwrap()
        };
        let report = copy(&|progress| {
            if progress.done == 0 {
                let now = told.fetch_add(1, Ordering::Relaxed) + 1;
                if now <= times {
                    put(now as u8);
                }
            }
            true
        });
        assert_eq!((report.files, report.failures), (files, 1 - files), "{:?}", report.failed);
        assert_eq!(report.bytes, files * REPLACED_BYTES as u64);
        match fs::read(home.path(&format!("copy-{files}"))) {
            Ok(bytes) => assert!(files == 1 && bytes == vec![1; REPLACED_BYTES]),
            Err(_) => assert!(files == 0 && report.failed[0].1.contains("version of object o")),
        }
    }
}

#[test]
fn a_folder_of_several_pages_is_copied_whole() {
    let home = Home::new();
    let source = home.path("source");
    fs::create_dir_all(source.join("folder")).unwrap();
    let files = tree::PAGE * 2 + 3;
    for i in 0..files {
        fs::write(source.join(format!("f{i}")), i.to_string()).unwrap();
    }
    symlink("f0", source.join("link")).unwrap();
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let bucket = Endpoint::Bucket(store, "all".into());
    for (from, to, links) in [
        (home.local("source"), home.volume("copy"), 1),
        (home.volume("copy"), home.local("back"), 1),
        (home.volume("copy"), bucket.clone(), 0),
        (bucket, home.local("from-bucket"), 0),
    ] {
        let report = home.copy(&from, &to);
        assert_eq!((report.files, report.links), (files as u64, links));
    }
    assert_eq!(all_of(&home.path("back")), all_of(&source));
    assert_eq!(fs::read_dir(home.path("from-bucket")).unwrap().count(), files);
}
