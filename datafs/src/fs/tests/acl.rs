//! Tests of access control lists against what ext4 does with the same calls.
use super::*;
use crate::{Config, Datafs, Node, OpenFlags, Owner, SetAttr, SetXattr, View};

const ROOT: Owner = Owner { uid: 0, gid: 0 };

fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    Acl(entries.iter().map(|&(tag, perm, id)| Entry { tag, perm, id }).collect()).encode()
}

fn full() -> Vec<u8> {
    acl(&[(USER_OBJ, 7, 0), (USER, 6, 1000), (GROUP_OBJ, 5, 0), (MASK, 7, 0), (OTHER, 1, 0)])
}

fn volume(home: &std::path::Path) -> (Datafs, View) {
    let datafs = Datafs::open(home, &Config::default()).unwrap();
    datafs.volume_create(&"v".parse().unwrap()).unwrap();
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    (datafs, view)
}

fn file(view: &View, parent: Node, name: &str, mode: u32, umask: u32) -> Node {
    view.create_masked(parent, name.as_ref(), mode, umask, ROOT, OpenFlags::READ_WRITE).unwrap().0.node
}

#[test]
fn lists_that_are_none_are_refused() {
    let base = [(USER_OBJ, 7, 0), (GROUP_OBJ, 5, 0), (OTHER, 1, 0)];
    assert!(Acl::decode(&acl(&base)).unwrap().unwrap().is_mode());
    assert_eq!(Acl::decode(&acl(&[])).unwrap(), None);
    assert_eq!(Acl::decode(&full()).unwrap().unwrap().encode(), full());
    for bad in [
        acl(&base[..2]),
        acl(&[base[1], base[0], base[2]]),
        acl(&[base[0], (USER, 1, 5), base[1], base[2]]),
        acl(&[base[0], (USER, 1, 5), (USER, 2, 5), base[1], (MASK, 7, 0), base[2]]),
        acl(&[base[0], base[1], (OTHER, 8, 0)]),
        acl(&[base[0], base[1], base[2], (0x40, 1, 0)]),
        full()[..full().len() - 1].to_vec(),
        vec![2, 0],
        vec![3, 0, 0, 0],
    ] {
        assert!(Acl::decode(&bad).is_err(), "{bad:?}");
    }
}

#[test]
fn mode_and_list_stay_in_step() {
    let home = tempfile::tempdir().unwrap();
    let (_datafs, view) = volume(home.path());
    let node = file(&view, view.root(), "f", 0o644, 0);
    let mode = || view.getattr(node).unwrap().mode;
    let get = || view.xattr_get(node, ACCESS.as_ref());
    let set = |value: &[u8]| view.xattr_set(node, ACCESS.as_ref(), value, SetXattr::Any).unwrap();
    set(&full());
    assert_eq!((mode(), get().unwrap()), (0o771, full()));
    // chmod changes the mask, not the group's entry.
    let chmod = SetAttr { mode: Some(0o4640), ..SetAttr::default() };
    view.setattr(node, &chmod).unwrap();
    let narrowed = acl(&[(USER_OBJ, 6, 0), (USER, 6, 1000), (GROUP_OBJ, 5, 0), (MASK, 4, 0), (OTHER, 0, 0)]);
    assert_eq!((mode(), get().unwrap()), (0o4640, narrowed));
    assert_eq!(view.xattr_list(node).unwrap(), [ACCESS]);
    // A list that a mode expresses in full is not stored.
    set(&acl(&[(USER_OBJ, 6, 0), (GROUP_OBJ, 2, 0), (OTHER, 4, 0)]));
    assert_eq!(mode(), 0o4624);
    assert!(matches!(get(), Err(Error::NoAttribute { .. })));
    set(&full());
    view.xattr_remove(node, ACCESS.as_ref()).unwrap();
    assert_eq!(mode(), 0o4771);
    assert!(matches!(
        view.xattr_set(node, DEFAULT.as_ref(), &full(), SetXattr::Any),
        Err(Error::NotWritable { .. })
    ));
}

#[test]
fn directories_pass_their_list_on() {
    let home = tempfile::tempdir().unwrap();
    let (_datafs, view) = volume(home.path());
    let dir = view.mkdir_masked(view.root(), "d".as_ref(), 0o777, 0o022, ROOT).unwrap();
    assert_eq!(dir.mode, 0o755);
    view.xattr_set(dir.node, DEFAULT.as_ref(), &full(), SetXattr::Any).unwrap();
    assert_eq!(view.getattr(dir.node).unwrap().mode, 0o755);
    // The default list replaces the umask of the process.
    let made = file(&view, dir.node, "f", 0o666, 0o077);
    assert_eq!(view.getattr(made).unwrap().mode, 0o660);
    let expected = acl(&[(USER_OBJ, 6, 0), (USER, 6, 1000), (GROUP_OBJ, 5, 0), (MASK, 6, 0), (OTHER, 0, 0)]);
    assert_eq!(view.xattr_get(made, ACCESS.as_ref()).unwrap(), expected);
    assert!(view.xattr_get(made, DEFAULT.as_ref()).is_err());
    let below = view.mkdir_masked(dir.node, "e".as_ref(), 0o777, 0o077, ROOT).unwrap();
    assert_eq!(below.mode, 0o771);
    assert_eq!(view.xattr_get(below.node, DEFAULT.as_ref()).unwrap(), full());
    assert_eq!(view.xattr_get(below.node, ACCESS.as_ref()).unwrap(), full());
    // A default list that a mode expresses in full only gives modes.
    let plain = acl(&[(USER_OBJ, 7, 0), (GROUP_OBJ, 5, 0), (OTHER, 0, 0)]);
    view.xattr_set(below.node, DEFAULT.as_ref(), &plain, SetXattr::Any).unwrap();
    let made = file(&view, below.node, "g", 0o666, 0);
    assert_eq!(view.getattr(made).unwrap().mode, 0o640);
    assert!(view.xattr_get(made, ACCESS.as_ref()).is_err());
    assert_eq!(view.symlink(below.node, "l".as_ref(), "x".as_ref(), ROOT).unwrap().mode, 0o777);
}
