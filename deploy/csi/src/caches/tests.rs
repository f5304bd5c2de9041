use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::check::MountFlags;
use crate::keys::Keys;
use crate::publication::{FORMAT, Publication};

/// A node's state folder, with the caches of a driver whose own cache is in its home.
struct Node {
    dir: tempfile::TempDir,
    caches: Caches,
    publications: Publications,
}

fn identity(digit: char) -> String {
    digit.to_string().repeat(32)
}

impl Node {
    fn new() -> Node {
        let dir = tempfile::tempdir().unwrap();
        let caches = Caches::new(&Config::default(), &dir.path().join("homes"));
        let publications = Publications::open(dir.path().join("published")).unwrap();
        Node { dir, caches, publications }
    }

    fn target(&self, name: &str) -> PathBuf {
        self.dir.path().join("pods").join(name)
    }

    /// Publishes a volume of a tenant, as a call does.
    fn publish(&self, name: &str, identity: &str) {
        let target = self.target(name);
        let locked = self.publications.lock(&target).unwrap();
        let publication = Publication {
            format: FORMAT,
            volume_id: name.into(),
            spec: "volume".parse().unwrap(),
            target,
            flags: MountFlags::default(),
            home: self.dir.path().join("homes").join(identity),
            config_digest: String::new(),
            driver: String::new(),
            server: None,
        };
        let held = self.caches.hold().unwrap();
        locked.write(&publication).unwrap();
        drop(held);
    }

    fn unpublish(&self, name: &str) {
        self.publications.lock(&self.target(name)).unwrap().remove().unwrap();
    }

    /// Fills the cache of a tenant, as the server of its volume does.
    fn fill(&self, identity: &str) -> PathBuf {
        fill(&self.caches.of(identity))
    }

    fn sweep(&self) -> usize {
        self.caches.sweep(&self.publications, Duration::ZERO).unwrap()
    }
}

fn fill(cache: &Path) -> PathBuf {
    let folder = cache.join("aa");
    fs::create_dir_all(&folder).unwrap();
    let object = folder.join("object");
    fs::write(&object, "bytes").unwrap();
    object
}

#[test]
fn a_cache_is_removed_once_its_tenant_has_had_no_volume_for_long_enough() {
    let node = Node::new();
    let (one, other) = (identity('1'), identity('2'));
    assert_eq!(node.sweep(), 0, "no tenant yet");
    let (kept, left) = (node.fill(&one), node.fill(&other));
    node.publish("a", &one);
    node.publish("b", &one);
    assert_eq!(node.caches.sweep(&node.publications, IDLE_MAX).unwrap(), 0);
    assert!(left.exists(), "the next pod of a job may come");
    assert_eq!(node.sweep(), 1);
    assert!(kept.exists() && !left.exists() && !node.caches.of(&other).exists());
    node.unpublish("a");
    assert_eq!((node.sweep(), kept.exists()), (0, true));
    node.unpublish("b");
    assert_eq!((node.sweep(), kept.exists()), (1, false));
    assert!(folders(&node.caches.folder).unwrap().is_empty());
}

#[test]
fn a_cache_in_use_does_not_age_and_one_of_the_future_ages_from_now() {
    let node = Node::new();
    let (one, other) = (identity('1'), identity('2'));
    node.publish("a", &one);
    for (identity, used) in
        [(&one, SystemTime::now() - IDLE_MAX * 2), (&other, SystemTime::now() + IDLE_MAX * 2)]
    {
        node.fill(identity);
        File::open(node.caches.of(identity)).unwrap().set_modified(used).unwrap();
    }
    assert_eq!(node.sweep(), 0);
    node.unpublish("a");
    assert_eq!(node.caches.sweep(&node.publications, IDLE_MAX).unwrap(), 0);
    for identity in [&one, &other] {
        let used = fs::metadata(node.caches.of(identity)).unwrap().modified().unwrap();
        assert!(SystemTime::now().duration_since(used).unwrap() < IDLE_MAX);
    }
}

#[test]
fn what_a_crash_left_is_removed_and_what_is_no_cache_stays() {
    let node = Node::new();
    let folder = &node.caches.folder;
    let left = fill(&folder.join(format!("{GONE}{}.0", identity('1'))));
    let other = fill(&folder.join("lost+found"));
    // Links as a cache, as one that is being deleted, and within one.
    let victim = fill(&node.dir.path().join("victim"));
    let link = |at: PathBuf| std::os::unix::fs::symlink(node.dir.path().join("victim"), at).unwrap();
    let links = [folder.join(identity('3')), folder.join(format!("{GONE}x"))];
    links.iter().cloned().for_each(link);
    node.fill(&identity('4'));
    link(node.caches.of(&identity('4')).join("bb"));
    assert_eq!(node.sweep(), 1);
    assert!(!left.exists() && !node.caches.of(&identity('4')).exists());
    assert!(other.exists() && victim.exists() && links.iter().all(|link| link.is_symlink()));
}

#[test]
fn caches_in_the_homes_of_tenants_of_earlier_programs_are_removed_too() {
    let node = Node::new();
    let home = |digit| node.dir.path().join("homes").join(identity(digit));
    let [kept, left] = ['1', '2'].map(|digit| fill(&home(digit).join("datafs/cache")));
    node.publish("a", &identity('1'));
    // The server of this volume was started by this program.
    let moved = fill(&home('4').join("datafs/cache"));
    node.publish("b", &identity('4'));
    let locked = node.publications.lock(&node.target("b")).unwrap();
    locked.write_config("[datafs]\ncache_shared_bound = true\n", &Keys::default()).unwrap();
    drop(locked);
    // A link on the way to a cache.
    let victim = fill(&node.dir.path().join("victim/cache"));
    fs::create_dir_all(home('3')).unwrap();
    std::os::unix::fs::symlink(node.dir.path().join("victim"), home('3').join("datafs")).unwrap();
    assert_eq!(node.sweep(), 2);
    assert!(kept.exists() && !left.exists() && !moved.exists() && victim.exists());
    assert!(home('2').join("datafs").exists(), "the home itself stays");
    // A cache outside of the homes is not searched for there.
    for cache_dir in ["../cache", ".", ""] {
        let config = Config { cache_dir: cache_dir.into(), ..Config::default() };
        assert!(Caches::new(&config, &node.dir.path().join("homes")).earlier.is_none(), "{cache_dir}");
    }
}

#[test]
fn caches_of_earlier_programs_below_a_cache_folder_with_a_slash_are_removed_too() {
    let mut node = Node::new();
    for ending in ["/cache/", "/cache"] {
        let cache_dir = format!("{}{ending}", node.dir.path().display());
        let config = Config { cache_dir: cache_dir.into(), ..Config::default() };
        node.caches = Caches::new(&config, &node.dir.path().join("homes"));
        assert_eq!(node.caches.folder(), node.dir.path().join("cache-tenants"));
        let earlier = node.dir.path().join("cache/-tenants");
        let [kept, left, moved] = ['1', '2', '3'].map(|digit| fill(&earlier.join(identity(digit))));
        let own = fill(&node.dir.path().join("cache"));
        for (name, digit, folder) in [("a", '1', &earlier), ("b", '3', &node.caches.folder)] {
            node.publish(name, &identity(digit));
            let dir = toml::Value::from(folder.join(identity(digit)).to_str().unwrap());
            let text = format!("[datafs]\ncache_dir = {dir}\n{SHARED}\n");
            let locked = node.publications.lock(&node.target(name)).unwrap();
            locked.write_config(&text, &Keys::default()).unwrap();
        }
        assert_eq!(node.sweep(), 2);
        assert!(kept.exists() && own.exists() && !left.exists() && !moved.exists(), "{ending}");
        assert_eq!(folders(&earlier).unwrap().len(), 1);
        node.unpublish("a");
        node.unpublish("b");
        assert_eq!((node.sweep(), kept.exists(), own.exists()), (1, false, true));
        assert!(folders(&earlier).unwrap().is_empty());
    }
}

#[test]
fn nothing_is_removed_while_a_record_cannot_be_read() {
    let node = Node::new();
    let kept = node.fill(&identity('1'));
    let record = node.dir.path().join("published/damaged.json");
    fs::write(&record, "{}").unwrap();
    let error = node.caches.sweep(&node.publications, Duration::ZERO).unwrap_err().to_string();
    assert!(error.contains("damaged.json") && kept.exists(), "{error}");
    fs::remove_file(&record).unwrap();
    assert_eq!((node.sweep(), kept.exists()), (1, false));
}

#[test]
fn a_driver_that_is_stopped_with_the_lock_delays_neither_calls_nor_sweeps_for_long() {
    let node = Node::new();
    let kept = node.fill(&identity('1'));
    let stopped = node.caches.open_lock().unwrap();
    stopped.lock().unwrap();
    assert_eq!(node.caches.hold().unwrap_err().kind(), ErrorKind::WouldBlock);
    let error = node.caches.sweep(&node.publications, Duration::ZERO).unwrap_err();
    assert!(error.kind() == ErrorKind::WouldBlock && kept.exists(), "{error}");
    drop(stopped);
    assert_eq!((node.sweep(), kept.exists()), (1, false));
}

#[test]
fn a_mount_below_a_cache_is_not_emptied() {
    let node = Node::new();
    let victim = fill(&node.dir.path().join("victim"));
    let at = node.caches.of(&identity('1')).join("aa");
    fs::create_dir_all(&at).unwrap();
    let flags = nix::mount::MsFlags::MS_BIND;
    let bound =
        nix::mount::mount(Some(&node.dir.path().join("victim")), &at, None::<&str>, flags, None::<&str>);
    if let Err(error) = bound {
        millrace_testing::skip(millrace_testing::Need::Root, format_args!("nothing can be mounted: {error}"));
        return;
    }
    let refused = node.caches.sweep(&node.publications, Duration::ZERO);
    nix::mount::umount(&at).unwrap();
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("unmount it") && victim.exists(), "{error}");
    assert_eq!((node.sweep(), victim.exists()), (1, true));
}

#[test]
fn no_sweep_removes_a_cache_that_is_filled_after_its_volume_was_published() {
    let node = Node::new();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Two drivers during an upgrade.
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Ordering::Acquire) {
                    // Both may remove the same folder, which is no error.
                    node.sweep();
                }
            });
        }
        let publishers = ['1', '2'].map(|digit| {
            let node = &node;
            scope.spawn(move || {
                let (identity, name) = (identity(digit), digit.to_string());
                for _ in 0..40 {
                    node.publish(&name, &identity);
                    let object = node.fill(&identity);
                    for _ in 0..4 {
                        assert!(object.exists(), "a cache in use was removed");
                        std::thread::yield_now();
                    }
                    node.unpublish(&name);
                }
            })
        });
        let ended = publishers.map(|publisher| publisher.join());
        done.store(true, Ordering::Release);
        ended.into_iter().for_each(|ended| ended.unwrap());
    });
    node.sweep();
    assert!(folders(&node.caches.folder).unwrap().is_empty());
}
