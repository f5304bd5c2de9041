//! The model test's world: two sessions of one volume that share nothing in memory. They run one operation
//! after the other, each on the reference model and on datafs.
//!
//! The rule between the sessions is close-to-open. Only the session that wrote to an open file sees the
//! write, until it flushes, closes or truncates the file. Both sessions see everything else at once.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path as FsPath;

use super::beside::Beside;
use super::check::{assert_sound, check_keys, check_tree};
use super::files::{Handle, Past, Pending};
use super::listing::Listing;
use super::step::SLOTS;
use crate::config::{Config, FromFile, Secret};
use crate::datafs::Datafs;
use crate::error::Result;
use crate::fs::View;
use crate::fs::tests::reference::{NAMES, ROOT, Tree};
use crate::fs::tests::{config, objects, on_postgres, rows};
use crate::name::{Name, VolumeSpec};
use crate::node::Node;
use crate::object::Compression;
use crate::volume::VolumeOptions;

pub(super) struct World {
    home: tempfile::TempDir,
    encrypted: bool,
    pub(super) sessions: [Option<Session>; 2],
    pub(super) tree: Tree,
    pub(super) snapshots: BTreeMap<u8, Tree>,
    /// The node of each inode of the reference.
    nodes: BTreeMap<u64, Node>,
    beside: Option<Beside>,
}

/// One session, like that of a separate process.
pub(super) struct Session {
    pub(super) datafs: Datafs,
    pub(super) view: View,
    pub(super) slots: [Option<Handle>; SLOTS],
    pub(super) past: Option<Past>,
    /// Unflushed writes, by file.
    pub(super) pending: BTreeMap<u64, Pending>,
    pub(super) listing: Option<Listing>,
}

pub(super) fn v() -> Name {
    "v".parse().unwrap()
}

pub(super) fn snapshot_name(n: u8) -> Name {
    format!("s{n}").parse().unwrap()
}

pub(super) fn snapshot(n: u8) -> VolumeSpec {
    VolumeSpec::at(v(), snapshot_name(n))
}

impl World {
    /// Creates the volume; the seed decides how it stores its data.
    pub(super) fn new(seed: u64) -> World {
        let home = tempfile::tempdir().unwrap();
        let encrypted = seed % 8 == 7;
        let compression = match seed % 8 {
            5 => Compression::Lz4,
            6 => Compression::Zstd { level: 1 },
            _ => Compression::None,
        };
        let datafs = open(home.path(), encrypted);
        let options = VolumeOptions { compression, encryption_key: encrypted.then(|| "k".into()) };
        datafs.volume_create_with(&v(), &options).unwrap();
        let sessions = [Some(Session::new(datafs)), Some(Session::new(open(home.path(), encrypted)))];
        World {
            home,
            encrypted,
            sessions,
            tree: Tree::new(),
            snapshots: BTreeMap::new(),
            nodes: BTreeMap::new(),
            beside: None,
        }
    }

    /// [`World::new`] with maintenance during all steps.
    pub(super) fn with_maintenance(seed: u64) -> World {
        let mut world = World::new(seed);
        let [compactor, collector, snapshots] = [(); 3].map(|()| open(world.home.path(), world.encrypted));
        world.beside = Some(Beside::start(compactor, collector, snapshots));
        world
    }

    pub(super) fn session(&mut self, actor: usize) -> &mut Session {
        self.sessions[actor].as_mut().unwrap()
    }

    /// Whether a session has a file open.
    pub(super) fn is_open(&self, ino: u64) -> bool {
        self.sessions.iter().flatten().any(|session| session.has_open(ino))
    }

    /// The reference as a session sees it.
    pub(super) fn seen_by(&self, actor: usize) -> Tree {
        let mut tree = self.tree.clone();
        for (ino, pending) in &self.sessions[actor].as_ref().unwrap().pending {
            if tree.inodes.contains_key(ino) {
                pending.put_over(tree.bytes_mut(*ino));
            }
        }
        tree
    }

    /// Removes a name of a file; a session that has the file open keeps it.
    pub(super) fn drop_link(&mut self, ino: u64) {
        let inode = self.tree.inodes.get_mut(&ino).unwrap();
        inode.nlink -= 1;
        if inode.nlink == 0 && !self.is_open(ino) {
            self.tree.inodes.remove(&ino);
        }
    }

    /// Checks that an inode always has the same node.
    pub(super) fn meet(&mut self, ino: u64, node: Node) {
        assert_eq!(*self.nodes.entry(ino).or_insert(node), node, "another inode than before");
    }

    pub(super) fn look_at_all(&mut self, actor: usize) {
        let tree = self.seen_by(actor);
        let session = self.session(actor);
        check_tree(&session.view, session.view.root(), &tree, ROOT, session.pending.is_empty());
        check_keys(&session.view, &tree);
    }

    pub(super) fn reopen(&mut self, actor: usize) {
        self.close_all(actor);
        self.sessions[actor] = None;
        self.sessions[actor] = Some(Session::new(open(self.home.path(), self.encrypted)));
    }

    /// Checks that everything is as the model says, and that nothing is left when everything is deleted.
    pub(super) fn finish(mut self) {
        for actor in [0, 1] {
            self.look_at_all(actor);
        }
        for actor in [0, 1] {
            self.close_all(actor);
            self.look_at_all(1 - actor);
        }
        if let Some(beside) = self.beside.take() {
            beside.finish();
        }
        let [one, other] = self.sessions.map(Option::unwrap);
        for session in [&one, &other] {
            check_tree(&session.view, session.view.root(), &self.tree, ROOT, true);
            for (n, tree) in &self.snapshots {
                let view = session.datafs.view(&snapshot(*n)).unwrap();
                check_tree(&view, view.root(), tree, ROOT, true);
                let root = session.view.stat(&format!(".snapshots/s{n}")).unwrap().node;
                check_tree(&session.view, root, tree, ROOT, true);
                check_keys(&view, tree);
            }
        }
        assert_sound(&one.datafs);
        // A session may keep a pack that it has begun and that nothing references.
        drop((one, other));
        let home = self.home.path();
        let [one, other] = [(); 2].map(|()| Session::new(open(home, self.encrypted)));
        for n in self.snapshots.keys() {
            one.datafs.snapshot_delete(&v(), &snapshot_name(*n)).unwrap();
        }
        // Unlinked files are freed once the other session has answered that it does not have them open.
        for session in [&other, &one].into_iter().cycle().take(6) {
            session.datafs.gc().unwrap();
        }
        for table in [b'h', b'd', b's', b't', b'g', b'o', b'q'] {
            assert_eq!(rows(&one.datafs, table), 0, "table {}", char::from(table));
        }
        assert_eq!(rows(&one.datafs, b'j'), objects(home));
        check_tree(&one.view, one.view.root(), &self.tree, ROOT, true);
        assert_sound(&other.datafs);
        one.datafs.volume_delete(&v()).unwrap();
        other.datafs.gc().unwrap();
        for table in [b'r', b'h', b'd', b'j', b'g', b'v', b'n', b'i'] {
            assert_eq!(rows(&other.datafs, table), 0, "table {}", char::from(table));
        }
        assert_eq!(objects(home), 0);
    }
}

impl Session {
    fn new(datafs: Datafs) -> Session {
        let view = datafs.view(&VolumeSpec::live(v())).unwrap();
        let slots = [const { None }; SLOTS];
        Session { datafs, view, slots, past: None, pending: BTreeMap::new(), listing: None }
    }

    pub(super) fn has_open(&self, ino: u64) -> bool {
        self.slots.iter().flatten().any(|handle| handle.ino == ino)
    }
}

fn open(home: &FsPath, encrypted: bool) -> Datafs {
    let mut config: Config = config();
    if encrypted {
        let file = home.join("key");
        std::fs::write(&file, [7; 32]).unwrap();
        let key = Secret::File(FromFile { file });
        config.encryption_keys.insert("k".into(), key);
    }
    on_postgres::put_into(&mut config, home);
    Datafs::open(home, &config).unwrap()
}

pub(super) fn walk(view: &View, parts: &[u8]) -> Result<Node> {
    parts
        .iter()
        .try_fold(view.root(), |at, part| Ok(view.lookup(at, NAMES[usize::from(*part)].as_ref())?.node))
}

pub(super) fn place(view: &View, path: &[u8]) -> Result<(Node, &'static OsStr)> {
    let (name, parents) = path.split_last().unwrap();
    let parent = walk(view, parents)?;
    // Lookup in a non-directory fails; so does this.
    view.readdir(parent, 0, 1)?;
    Ok((parent, NAMES[usize::from(*name)].as_ref()))
}
