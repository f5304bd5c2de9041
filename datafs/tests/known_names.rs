//! Tests of the name cache between two processes: a process that caches all names of a directory sees the
//! other's changes at once. The processes create, remove, rename and exchange names and directories in turn; a
//! model gives the expected names.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};
use std::io::{BufRead as _, Write as _};
use std::process::{Child, ChildStdin, Stdio};

use millrace_datafs::{Config, Datafs, Node, OpenFlags, Owner, View};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use crate::child;
use crate::close_to_open::number;
use crate::engine::{self, Engine};

const OWNER: Owner = Owner { uid: 0, gid: 0 };
/// Names used in each directory.
const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];
const DIRECTORIES_MAX: usize = 10;
/// Most changes of one process before the other checks.
const CHANGES_MAX: u32 = 3;

fn open(home: &std::path::Path, config: &Config) -> (Datafs, View) {
    let datafs = Datafs::open(home, config).unwrap();
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    (datafs, view)
}

/// A place in the tree: a directory and a name in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place(u64, &'static str);

#[derive(Debug, Clone, Copy)]
enum Change {
    Create(Place),
    Mkdir(Place),
    Unlink(Place),
    Rmdir(Place),
    Rename(Place, Place),
    Exchange(Place, Place),
}

impl Display for Change {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (word, one, two) = match *self {
            Change::Create(one) => ("create", one, one),
            Change::Mkdir(one) => ("mkdir", one, one),
            Change::Unlink(one) => ("unlink", one, one),
            Change::Rmdir(one) => ("rmdir", one, one),
            Change::Rename(one, two) => ("rename", one, two),
            Change::Exchange(one, two) => ("exchange", one, two),
        };
        write!(f, "{word} {} {} {} {}", one.0, one.1, two.0, two.1)
    }
}

/// Runs one line: a change in the format of [`Change`], or a lookup. Returns the number of the created or found
/// node, 1 for other changes, and 0 for a refusal or a missing name.
fn obey(view: &View, line: &str) -> u64 {
    let words: Vec<&str> = line.split_whitespace().collect();
    let node = |i: usize| Node::from_u64(words[i].parse().unwrap());
    let (one, two) = ((node(1), words[2].as_ref()), (node(3), words[4].as_ref()));
    let done = match words[0] {
        "look" => view.lookup(one.0, one.1).map(|attr| attr.node.to_u64()),
        "create" => {
            let flags = OpenFlags { exclusive: true, ..OpenFlags::READ_WRITE };
            view.create(one.0, one.1, 0o644, OWNER, flags).map(|(attr, _)| attr.node.to_u64())
        }
        "mkdir" => view.mkdir(one.0, one.1, 0o755, OWNER).map(|attr| attr.node.to_u64()),
        "unlink" => view.unlink(one.0, one.1).map(|()| 1),
        "rmdir" => view.rmdir(one.0, one.1).map(|()| 1),
        "rename" => view.rename(one.0, one.1, two.0, two.1, false).map(|()| 1),
        "exchange" => view.exchange(one.0, one.1, two.0, two.1).map(|()| 1),
        word => panic!("{word}"),
    };
    done.unwrap_or(0)
}

/// The child: runs the lines from its standard input.
#[test]
fn other() {
    let Some((home, _)) = child::task() else { return };
    let (_datafs, view) = open(&home, &engine::inherited());
    println!("ready 1");
    for line in std::io::stdin().lock().lines() {
        println!("node {}", obey(&view, &line.unwrap()));
    }
}

struct Other {
    child: Child,
    orders: Option<ChildStdin>,
    answers: Box<dyn Iterator<Item = (String, u64)>>,
}

impl Other {
    fn obey(&mut self, lines: &[String]) -> Vec<u64> {
        let text = lines.iter().fold(String::new(), |text, line| text + line + "\n");
        self.orders.as_mut().unwrap().write_all(text.as_bytes()).unwrap();
        lines.iter().map(|_| self.answers.next().unwrap().1).collect()
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        drop(self.orders.take());
        let status = self.child.wait();
        if !std::thread::panicking() {
            assert!(status.unwrap().success());
        }
    }
}

/// The expected names of each directory.
struct Model(BTreeMap<u64, BTreeMap<&'static str, u64>>);

impl Model {
    fn get(&self, at: Place) -> Option<u64> {
        self.0[&at.0].get(at.1).copied()
    }

    fn is_within(&self, node: u64, of: u64) -> bool {
        node == of
            || self.0.get(&of).is_some_and(|names| names.values().any(|child| self.is_within(node, *child)))
    }

    fn is_directory(&self, node: u64) -> bool {
        self.0.contains_key(&node)
    }

    fn is_empty(&self, node: u64) -> bool {
        self.0[&node].is_empty()
    }

    fn put(&mut self, at: Place, node: Option<u64>) {
        let names = self.0.get_mut(&at.0).unwrap();
        match node {
            Some(node) => drop(names.insert(at.1, node)),
            None => drop(names.remove(at.1)),
        }
    }

    /// Whether a change is possible.
    fn allows(&self, change: Change) -> bool {
        match change {
            Change::Create(at) | Change::Mkdir(at) => self.get(at).is_none(),
            Change::Unlink(at) => self.get(at).is_some_and(|node| !self.is_directory(node)),
            Change::Rmdir(at) => {
                self.get(at).is_some_and(|node| self.is_directory(node) && self.is_empty(node))
            }
            Change::Rename(from, to) => {
                let Some(node) = self.get(from) else { return false };
                let fits = |old: u64| {
                    let (both, neither) = (self.is_directory(old), self.is_directory(node));
                    old == node || (both == neither && (!both || self.is_empty(old)))
                };
                !self.is_within(to.0, node) && self.get(to).is_none_or(fits)
            }
            Change::Exchange(one, two) => {
                let (Some(first), Some(second)) = (self.get(one), self.get(two)) else { return false };
                !self.is_within(two.0, first) && !self.is_within(one.0, second)
            }
        }
    }

    /// Applies a change to the model; `node` is the created node.
    fn apply(&mut self, change: Change, node: u64) {
        match change {
            Change::Create(at) => self.put(at, Some(node)),
            Change::Mkdir(at) => {
                self.put(at, Some(node));
                self.0.insert(node, BTreeMap::new());
            }
            Change::Unlink(at) => self.put(at, None),
            Change::Rmdir(at) => {
                self.0.remove(&self.get(at).unwrap());
                self.put(at, None);
            }
            Change::Rename(from, to) => {
                let node = self.get(from);
                if let Some(old) = self.get(to).filter(|old| Some(*old) != node) {
                    self.0.remove(&old);
                }
                self.put(from, None);
                self.put(to, node);
            }
            Change::Exchange(one, two) => {
                let (first, second) = (self.get(one), self.get(two));
                self.put(one, second);
                self.put(two, first);
            }
        }
    }

    fn random_place(&self, random: &mut StdRng) -> Place {
        let directory = *self.0.keys().nth(random.random_range(0..self.0.len())).unwrap();
        Place(directory, NAMES[random.random_range(0..NAMES.len())])
    }

    fn random_change(&self, random: &mut StdRng) -> Change {
        let (one, two) = (self.random_place(random), self.random_place(random));
        // Half of the second places are in the same directory.
        let two = if random.random() { two } else { Place(one.0, two.1) };
        match random.random_range(0..10) {
            0..3 => Change::Create(one),
            3..5 if self.0.len() < DIRECTORIES_MAX => Change::Mkdir(one),
            5 => Change::Rmdir(one),
            6..8 => Change::Rename(one, two),
            8 => Change::Exchange(one, two),
            _ => Change::Unlink(one),
        }
    }
}

fn both_find_what_the_other_has_done(engine: &Engine, rounds: u32) {
    let home = tempfile::tempdir().unwrap();
    let datafs = Datafs::open(home.path(), &engine.config()).unwrap();
    datafs.volume_create(&"v".parse().unwrap()).unwrap();
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    let mut command = child::command("known_names::other", home.path(), 0);
    engine.tell(&mut command);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let mut answers = child::reports(&mut child);
    assert!(answers.any(|(word, _)| word == "ready"));
    let mut other = Other { orders: child.stdin.take(), child, answers: Box::new(answers) };
    let mut random = StdRng::seed_from_u64(number("MILLRACE_SEED", 11));
    let mut model = Model(BTreeMap::from([(view.root().to_u64(), BTreeMap::new())]));
    let (mut made, mut refused) = (0, 0);
    for round in 0..rounds {
        let other_acts = random.random();
        let mut seen = vec![model.random_place(&mut random).0];
        for _ in 0..random.random_range(1..=CHANGES_MAX) {
            let change = model.random_change(&mut random);
            let line = change.to_string();
            let node = if other_acts { other.obey(&[line])[0] } else { obey(&view, &line) };
            assert_eq!(
                node != 0,
                model.allows(change),
                "round {round}: {change}, by the other: {other_acts}"
            );
            if node == 0 {
                refused += 1;
                continue;
            }
            made += 1;
            model.apply(change, node);
            if let Change::Rename(one, two) | Change::Exchange(one, two) = change {
                seen.extend([one.0, two.0]);
            } else if let Change::Create(at) | Change::Mkdir(at) | Change::Unlink(at) | Change::Rmdir(at) =
                change
            {
                seen.extend([at.0, node]);
            }
        }
        // The process that made no changes checks every name of the directories concerned.
        seen.retain(|directory| model.is_directory(*directory));
        let places: Vec<Place> =
            seen.iter().flat_map(|directory| NAMES.map(|name| Place(*directory, name))).collect();
        let lines: Vec<String> = places.iter().map(|at| format!("look {} {} {0} {1}", at.0, at.1)).collect();
        let found = match other_acts {
            true => lines.iter().map(|line| obey(&view, line)).collect(),
            false => other.obey(&lines),
        };
        for (at, found) in places.into_iter().zip(found) {
            assert_eq!(
                found,
                model.get(at).unwrap_or(0),
                "round {round}: {at:?}, changed by the other: {other_acts}"
            );
        }
    }
    assert!(made > rounds / 4 && refused > rounds / 4, "{made} changes made, {refused} refused");
}

#[test]
fn both_find_what_the_other_has_done_on_sqlite() {
    both_find_what_the_other_has_done(&Engine::sqlite(), 3_000);
}

#[test]
fn both_find_what_the_other_has_done_on_postgres() {
    let Some(engine) = Engine::postgres() else { return };
    both_find_what_the_other_has_done(&engine, 600);
}
