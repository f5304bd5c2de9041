//! Measurement of metadata operations: names created, looked up, listed and removed per second, through the
//! library, with eight threads.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::time::Instant;

use millrace_datafs::{FileKind, Node, OpenFlags, Owner, View};

use super::server::Server;
use super::{config, open};

const THREADS: usize = 8;
/// The shape of mdtest: directories below a directory, levels, files in each directory.
const BRANCHES: usize = 6;
const LEVELS: usize = 3;
const FILES: usize = 8;
const OWNER: Owner = Owner { uid: 0, gid: 0 };

/// Runs `work` for each thread's directory and returns how long all took, in seconds.
fn timed(roots: &[Node], work: impl Fn(Node) + Sync) -> f64 {
    let start = Instant::now();
    std::thread::scope(|scope| roots.iter().for_each(|root| drop(scope.spawn(|| work(*root)))));
    start.elapsed().as_secs_f64()
}

fn make(view: &View, parent: Node, level: usize) {
    let flags = OpenFlags { exclusive: true, ..OpenFlags::READ_WRITE };
    for file in 0..FILES {
        view.create(parent, format!("file-{file}").as_ref(), 0o644, OWNER, flags).unwrap();
    }
    if level < LEVELS {
        for branch in 0..BRANCHES {
            let made = view.mkdir(parent, format!("directory-{branch}").as_ref(), 0o755, OWNER).unwrap();
            make(view, made.node, level + 1);
        }
    }
}

fn look_up(view: &View, parent: Node, level: usize) {
    for file in 0..FILES {
        view.lookup(parent, format!("file-{file}").as_ref()).unwrap();
    }
    if level < LEVELS {
        for branch in 0..BRANCHES {
            let found = view.lookup(parent, format!("directory-{branch}").as_ref()).unwrap();
            look_up(view, found.node, level + 1);
        }
    }
}

fn list(view: &View, parent: Node) {
    for (entry, _) in view.readdir_attrs(parent, 0, 1_024).unwrap() {
        if entry.kind == FileKind::Directory && entry.name != "." && entry.name != ".." {
            list(view, entry.node);
        }
    }
}

fn remove(view: &View, parent: Node, level: usize) {
    for file in 0..FILES {
        view.unlink(parent, format!("file-{file}").as_ref()).unwrap();
    }
    if level < LEVELS {
        for branch in 0..BRANCHES {
            let name = format!("directory-{branch}");
            let found = view.lookup(parent, name.as_ref()).unwrap();
            remove(view, found.node, level + 1);
            view.rmdir(parent, name.as_ref()).unwrap();
        }
    }
}

#[test]
#[ignore = "prints figures; run it alone: cargo test --release -p millrace-datafs --test datafs postgres::figures -- --ignored --nocapture"]
fn names_per_second() {
    let Some(server) = Server::start(&[]) else { return };
    let home = tempfile::tempdir().unwrap();
    let datafs = open(home.path(), &config(&server, "figures"));
    datafs.volume_create(&"v".parse().unwrap()).unwrap();
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    let roots: Vec<Node> = (0..THREADS)
        .map(|i| view.mkdir(view.root(), format!("thread-{i}").as_ref(), 0o755, OWNER).unwrap().node)
        .collect();
    let directories: usize = (1..=LEVELS).map(|level| BRANCHES.pow(level as u32)).sum();
    let names = (THREADS * (directories + FILES * (directories + 1))) as f64;
    println!("create {:.0}/s", names / timed(&roots, |root| make(&view, root, 0)));
    println!("stat warm {:.0}/s", names / timed(&roots, |root| look_up(&view, root, 0)));
    let other = open(home.path(), &config(&server, "figures"));
    let cold = other.view(&"v".parse().unwrap()).unwrap();
    println!("stat cold {:.0}/s", names / timed(&roots, |root| look_up(&cold, root, 0)));
    println!("list {:.0} entries/s", names / timed(&roots, |root| list(&cold, root)));
    drop((cold, other));
    println!("remove {:.0}/s", names / timed(&roots, |root| remove(&view, root, 0)));
}
