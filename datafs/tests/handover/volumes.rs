//! Servers of another volume that has the name of a mount's volume are refused.

use std::fs;
use std::path::Path;

use millrace_datafs::mount::{self, MountOptions};
use millrace_datafs::{Config, Datafs};

use super::Held;

/// Tries to take the mount of `held` over with the volume `data` of a home.
fn refusal(held: &Held, datafs: &Datafs) -> String {
    let view = datafs.view(&"data".parse().unwrap()).unwrap();
    let options = MountOptions { allow_other: true, ..MountOptions::default() };
    let error = mount::mount_held(view, &held.at(), options, &held.socket()).unwrap_err();
    std::error::Error::source(&error).map_or_else(|| error.to_string(), |source| format!("{error}: {source}"))
}

fn open(home: &Path) -> Datafs {
    let datafs = Datafs::open(home, &Config::default()).unwrap();
    datafs.volume_create(&"data".parse().unwrap()).unwrap();
    datafs
}

#[test]
fn a_volume_of_another_home_does_not_end_the_running_server() {
    let Some(held) = Held::new() else { return };
    let server = held.server("data");
    fs::write(held.at().join("file"), b"content").unwrap();
    let other = open(&held.dir.path().join("other"));
    let refusal = refusal(&held, &other);
    assert!(refusal.contains("another volume of that name"), "{refusal}");
    assert_eq!(fs::read(held.at().join("file")).unwrap(), b"content");
    let mounts = held.mounts();
    assert!(mounts[0].is_served && mounts[0].servers == 1, "{mounts:?}");
    held.unmount();
    server.ends();
}

#[test]
fn a_new_volume_of_the_same_name_is_not_served_to_the_open_files_of_the_old_one() {
    let Some(held) = Held::new() else { return };
    held.server("data").kill();
    held.datafs.volume_delete(&"data".parse().unwrap()).unwrap();
    held.datafs.volume_create(&"data".parse().unwrap()).unwrap();
    let refusal = refusal(&held, &held.datafs);
    assert!(refusal.contains("another volume of that name"), "{refusal}");
    assert!(!held.mounts()[0].is_served);
    held.holder.borrow().as_ref().unwrap().unmount(&held.at()).unwrap();
    let server = held.server("data");
    held.unmount();
    server.ends();
}
