//! Tests of several processes and threads that write one volume.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::Path;

use millrace_datafs::{Config, Datafs, Error, Name, OpenFlags, Owner, Publish, View, VolumeSpec};

use crate::child;

const PROCESSES: u64 = 4;
const ROUNDS: u64 = 60;

fn volume() -> Name {
    "v".parse().unwrap()
}

fn open(home: &Path) -> (Datafs, View) {
    let datafs = Datafs::open(home, &Config::default()).unwrap();
    let view = datafs.view(&VolumeSpec::live(volume())).unwrap();
    (datafs, view)
}

/// The key `counter` that processes race for: its value and the number in it.
pub(crate) fn counter(view: &View) -> (Option<Vec<u8>>, u64) {
    let value = view.key_get("counter").unwrap();
    let number = value.as_ref().map_or(0, |v| u64::from_be_bytes(v.as_slice().try_into().unwrap()));
    (value, number)
}

/// Takes the next ticket, a file with the ID of the process that took it. Returns the number of the ticket.
pub(crate) fn take_ticket(view: &View, id: u64) -> u64 {
    loop {
        let (value, number) = counter(view);
        let mut staged = view.stage().unwrap();
        staged.append(&id.to_be_bytes()).unwrap();
        let publish = Publish::new()
            .expect_key("counter", value)
            .put_key("counter", (number + 1).to_be_bytes().to_vec())
            .file(format!("tickets/{number}"), staged.finish().unwrap());
        match view.publish(publish) {
            Ok(()) => return number,
            Err(Error::Conflict { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// The tickets of each process, in order.
pub(crate) fn tickets(view: &View) -> BTreeMap<u64, Vec<u64>> {
    let mut taken = BTreeMap::<u64, Vec<u64>>::new();
    for ticket in view.list("tickets").unwrap() {
        let id = view.read_file(&format!("tickets/{}", ticket.name)).unwrap();
        let id = u64::from_be_bytes(id.as_ref().try_into().unwrap());
        taken.entry(id).or_default().push(ticket.name.parse().unwrap());
    }
    taken.values_mut().for_each(|taken| taken.sort_unstable());
    taken
}

/// The child: takes tickets under a fence, and races for names.
#[test]
fn racer() {
    let Some((home, id)) = child::task() else { return };
    let (_datafs, view) = open(&home);
    for round in 0..ROUNDS {
        take_ticket(&view, id);
        let flags = OpenFlags { exclusive: true, ..OpenFlags::READ_WRITE };
        let (name, owner) = (format!("race-{round}"), Owner { uid: 0, gid: 0 });
        match view.create(view.root(), name.as_ref(), 0o644, owner, flags) {
            Ok((_, file)) => {
                file.write_at(0, &id.to_be_bytes()).unwrap();
                file.flush().unwrap();
                // The winner also moves a shared name.
                view.write_file(&format!("mine-{id}"), &round.to_be_bytes()).unwrap();
                view.rename_path(&format!("mine-{id}"), "shared").unwrap();
            }
            Err(Error::Exists { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn processes_share_a_volume() {
    let dir = tempfile::tempdir().unwrap();
    let datafs = Datafs::open(dir.path(), &Config::default()).unwrap();
    datafs.volume_create(&volume()).unwrap();
    let (_datafs, view) = open(dir.path());
    let children: Vec<_> =
        (0..PROCESSES).map(|id| child::spawn("processes::racer", dir.path(), id)).collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
    assert_eq!(counter(&view).1, PROCESSES * ROUNDS);
    let taken = tickets(&view);
    assert_eq!(taken.len() as u64, PROCESSES);
    assert!(taken.values().all(|taken| taken.len() as u64 == ROUNDS), "{taken:?}");
    for round in 0..ROUNDS {
        assert_eq!(view.read_file(&format!("race-{round}")).unwrap().len(), 8);
    }
    assert_eq!(view.read_file("shared").unwrap().len(), 8);
}

#[test]
fn a_snapshot_never_cuts_a_publish() {
    let dir = tempfile::tempdir().unwrap();
    let datafs = Datafs::open(dir.path(), &Config::default()).unwrap();
    datafs.volume_create(&volume()).unwrap();
    let (_other, writer) = open(dir.path());
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for i in 0u64.. {
                let mut publish = Publish::new().put_key("k", i.to_be_bytes().to_vec());
                for (path, len) in [("small", 1), ("dir/large", 1_000)] {
                    let mut staged = writer.stage().unwrap();
                    staged.append(&i.to_be_bytes().repeat(len)).unwrap();
                    publish = publish.file(path, staged.finish().unwrap());
                }
                writer.publish(publish).unwrap();
                if done.load(std::sync::atomic::Ordering::Relaxed) {
                    return;
                }
            }
        });
        for n in 0..40 {
            let name: Name = format!("s{n}").parse().unwrap();
            datafs.snapshot_create(&volume(), &name).unwrap();
            let at = datafs.view(&VolumeSpec::at(volume(), name)).unwrap();
            let Some(key) = at.key_get("k").unwrap() else { continue };
            assert_eq!(at.read_file("small").unwrap(), key);
            assert_eq!(at.read_file("dir/large").unwrap(), key.repeat(1_000));
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}
