//! Check of the names: joins inodes with the names that lead to them, tree by tree, and finds directories
//! that no path leads to.

use std::collections::BTreeMap;

use super::fix::Fix;
use super::report::{Findings, ProblemKind};
use super::scan::VolumeFacts;
use super::sorter::Sorted;
use super::tree::{Fact, Whose, parse};
use crate::error::Result;
use crate::meta::keys;
use crate::node::{INO_MAX, ROOT_INO};

/// Facts between two progress reports.
const STEP: u64 = 10_000;
/// Inode numbers above the largest one in use that sessions may have reserved, by the counter as it was.
const RESERVED_MAX: u64 = 1 << 20;

/// Joins all facts.
pub(super) fn check(
    mut facts: Sorted,
    volumes: &BTreeMap<u64, VolumeFacts>,
    findings: &mut Findings<'_>,
) -> Result<()> {
    findings.stage("names");
    let mut tree: Option<Tree> = None;
    let mut group: Option<Group> = None;
    let mut largest: BTreeMap<u64, u64> = volumes.keys().map(|volume| (*volume, 0)).collect();
    let mut done = 0;
    while let Some(record) = facts.next()? {
        let (whose, fact) = parse(&record)?;
        if let Some(largest) = largest.get_mut(&whose.volume) {
            *largest = whose.ino.max(*largest);
        }
        done += 1;
        if done % STEP == 0 {
            findings.step(STEP);
        }
        if group.as_ref().is_none_or(|group| group.whose != whose) {
            if let (Some(group), Some(tree)) = (group.take(), &mut tree) {
                tree.inode(group, findings);
            }
            let same =
                tree.as_ref().is_some_and(|t| (t.volume, t.snapshot) == (whose.volume, whose.snapshot));
            if !same {
                if let Some(tree) = tree.take() {
                    tree.finish(findings);
                }
                let facts = volumes.get(&whose.volume);
                let facts = facts.filter(|facts| !facts.gone.contains(&whose.snapshot));
                tree = facts.map(|facts| Tree::new(whose, facts));
            }
            group = Some(Group::new(whose));
        }
        if let Some(group) = &mut group {
            group.add(fact);
        }
    }
    if let (Some(group), Some(tree)) = (group, &mut tree) {
        tree.inode(group, findings);
    }
    if let Some(tree) = tree {
        tree.finish(findings);
    }
    for (volume, largest) in largest {
        let Some(facts) = volumes.get(&volume).filter(|facts| largest >= facts.next_ino) else { continue };
        let place = format!("inode numbers of volume {}", facts.name);
        let detail = format!("{largest} is in use, {} would be given out next", facts.next_ino);
        let next = largest.saturating_add(1 + RESERVED_MAX).min(INO_MAX);
        let fix = Fix::RaiseCounter { volume, next };
        findings.problem(ProblemKind::WrongCounter, place, detail, Some(fix));
    }
    Ok(())
}

/// All facts about one inode.
struct Group {
    whose: Whose,
    inode: Option<Fact>,
    orphan: bool,
    stray: bool,
    unreadable: bool,
    names: u64,
    /// The first names. More than these are needed one by one only when the inode does not exist.
    listed: Vec<(u64, bool, Vec<u8>)>,
}

/// Most names of an inode that are kept one by one.
const NAMES_LISTED_MAX: usize = 1_000;

impl Group {
    fn new(whose: Whose) -> Group {
        Group {
            whose,
            inode: None,
            orphan: false,
            stray: false,
            unreadable: false,
            names: 0,
            listed: Vec::new(),
        }
    }

    fn add(&mut self, fact: Fact) {
        match fact {
            Fact::Inode { .. } => self.inode = Some(fact),
            Fact::Orphan => self.orphan = true,
            Fact::Stray => self.stray = true,
            Fact::Unreadable => self.unreadable = true,
            Fact::Name { parent, is_folder, record } => {
                self.names += 1;
                if self.listed.len() < NAMES_LISTED_MAX {
                    self.listed.push((parent, is_folder, record));
                }
            }
        }
    }
}

/// The check of one tree, live or of a snapshot.
struct Tree {
    volume: u64,
    snapshot: u64,
    name: String,
    /// Directories with their parents, by inode number.
    folders: Vec<(u64, u64)>,
}

impl Tree {
    fn new(whose: Whose, facts: &VolumeFacts) -> Tree {
        let name = match facts.snapshots.get(&whose.snapshot) {
            Some(snapshot) => format!("{}@{snapshot}", facts.name),
            None => facts.name.clone(),
        };
        Tree { volume: whose.volume, snapshot: whose.snapshot, name, folders: Vec::new() }
    }

    fn place(&self, ino: u64) -> String {
        format!("inode {ino} of {}", self.name)
    }

    /// The repair in the live tree; `None` in a snapshot, which never changes.
    fn live(&self, fix: Fix) -> Option<Fix> {
        (self.snapshot == 0).then_some(fix)
    }

    fn inode(&mut self, group: Group, findings: &mut Findings<'_>) {
        let Whose { volume, ino, .. } = group.whose;
        let place = self.place(ino);
        let Some(Fact::Inode { nlink, parent, folders, is_folder, sum }) = group.inode else {
            // The inode exists. Its names and content stay, so that a user can still restore the attributes.
            if group.unreadable {
                return;
            }
            for (parent, _, record) in &group.listed {
                let place = format!("{:?} in {}", shown(record), self.place(*parent));
                let fix = self.live(Fix::RemoveName { volume, record: record.clone(), ino });
                findings.problem(ProblemKind::DanglingName, place, "it leads to no inode", fix);
            }
            // An inode that is being freed, in batches, is on the orphan list.
            if group.stray && !group.orphan {
                let fix = self.live(Fix::Free { volume, ino });
                findings.problem(ProblemKind::DamagedRecord, place, "it has no attributes", fix);
            }
            return;
        };
        if let Some((_, _, record)) = group.listed.iter().find(|(_, folder, _)| *folder != is_folder) {
            let detail = format!("its name {:?} has another kind", shown(record));
            findings.problem(ProblemKind::WrongName, place.clone(), detail, None);
        }
        let names = group.names + u64::from(ino == ROOT_INO);
        if names == 0 {
            if nlink > 0 {
                let fix = self.live(Fix::Adopt { volume, ino });
                findings.problem(ProblemKind::LostInode, place, "no name leads to it", fix);
            } else if !group.orphan && self.snapshot == 0 {
                let fix = Some(Fix::Free { volume, ino });
                findings.problem(ProblemKind::LostOrphan, place, "nothing would free it", fix);
            }
            return;
        }
        if group.orphan {
            let fix = self.live(Fix::NoOrphan { volume, ino });
            findings.problem(
                ProblemKind::LostOrphan,
                place.clone(),
                "it is to be freed, but has a name",
                fix,
            );
        }
        if is_folder {
            self.folders.push((ino, if ino == ROOT_INO { ROOT_INO } else { parent }));
            if names > 1 {
                let wrong = group.listed.iter().find(|(from, ..)| *from != parent || ino == ROOT_INO);
                let fix = wrong.and_then(|(_, _, record)| {
                    self.live(Fix::RemoveName { volume, record: record.clone(), ino })
                });
                let detail = format!("a folder with {names} names");
                findings.problem(ProblemKind::WrongName, place, detail, fix);
                return;
            }
            if let Some((from, ..)) = group.listed.first()
                && *from != parent
            {
                let detail = format!("its name is in inode {from}, its parent says inode {parent}");
                let fix = self.live(Fix::SetParent { volume, ino, sum, parent: *from });
                findings.problem(ProblemKind::WrongName, place.clone(), detail, fix);
                self.folders.pop();
                self.folders.push((ino, *from));
            }
        }
        let expected = if is_folder { 2 + u64::from(folders) } else { names };
        if u64::from(nlink) != expected {
            let detail = format!("{nlink} links are recorded, {expected} are there");
            let links = u32::try_from(expected).unwrap_or(u32::MAX);
            let fix = self.live(Fix::SetLinks { volume, ino, sum, links });
            findings.problem(ProblemKind::WrongLinks, place, detail, fix);
        }
    }

    /// Follows each directory to the root: a cycle of directories has names, but no path leads to it.
    fn finish(self, findings: &mut Findings<'_>) {
        let folders = &self.folders;
        let index = |ino: u64| folders.binary_search_by_key(&ino, |(ino, _)| *ino).ok();
        if index(ROOT_INO).is_none() {
            let place = self.place(ROOT_INO);
            findings.problem(ProblemKind::LostInode, place, "the tree has no root", None);
        }
        // 0: not visited; else the number of the walk that visited it.
        let mut walks = vec![0_u32; folders.len()];
        for start in 0..folders.len() {
            let walk = start as u32 + 1;
            let mut at = start;
            while walks[at] == 0 {
                walks[at] = walk;
                let (ino, parent) = folders[at];
                if ino == ROOT_INO {
                    break;
                }
                match index(parent) {
                    Some(next) if walks[next] == walk => {
                        let detail = "it is its own ancestor, so that no path leads to it";
                        findings.problem(ProblemKind::LostInode, self.place(folders[next].0), detail, None);
                        break;
                    }
                    Some(next) => at = next,
                    // Reported as a dangling name or a lost inode.
                    None => break,
                }
            }
        }
    }
}

fn shown(record: &[u8]) -> String {
    let name = keys::child_name(record).map(|(_, name)| name).unwrap_or_default();
    String::from_utf8_lossy(name).into_owned()
}
