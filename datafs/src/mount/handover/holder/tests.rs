//! Tests of a holder's rules. They mount, and no server answers: nothing may be opened in the mounts.

#![allow(clippy::unwrap_used)]

use std::io::Read as _;
use std::os::fd::AsFd as _;

use nix::fcntl::open;
use nix::mount::{MntFlags, umount2};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::Mode;
use nix::unistd::chown;

use super::*;
use crate::mount::can_mount;

const USER: Rights = Rights { uid: 65_534, is_trusted: false };

/// A folder with a holder, which permits [`USER`]. The holder ends first: its mounts without a server are in the folder.
struct Fixture {
    holder: Option<Holder>,
    dir: tempfile::TempDir,
}

impl Fixture {
    /// `None`, and the reason on standard error, where mounting is not permitted.
    fn new() -> Option<Fixture> {
        if let Err(reason) = can_mount() {
            millrace_testing::skip(millrace_testing::Need::Fuse, reason);
            return None;
        }
        if !nix::unistd::geteuid().is_root() {
            millrace_testing::skip(millrace_testing::Need::Root, "only root may give a folder away");
            return None;
        }
        let mut fixture = Fixture { holder: None, dir: tempfile::tempdir().unwrap() };
        fixture.start();
        Some(fixture)
    }

    fn start(&mut self) {
        self.holder = None;
        let options = HolderOptions { uid: Some(USER.uid), ..HolderOptions::default() };
        self.holder = Some(Holder::start(&self.dir.path().join("holder.sock"), &options).unwrap());
    }

    fn shared(&self) -> &Shared {
        &self.holder.as_ref().unwrap().shared
    }

    /// A new folder of a user.
    fn folder(&self, name: &str, uid: u32) -> PathBuf {
        let folder = fs::canonicalize(self.dir.path()).unwrap().join(name);
        fs::create_dir(&folder).unwrap();
        chown(&folder, Some(uid.into()), None).unwrap();
        folder
    }
}

fn wish(target: &Path) -> MountWish {
    MountWish {
        spec: "v".into(),
        target: target.to_owned(),
        read_only: false,
        allow_other: true,
        suid: false,
        dev: false,
        noexec: false,
        volume: None,
    }
}

fn is_mounted(target: &Path) -> bool {
    point::find(target).unwrap().is_some()
}

#[test]
fn a_permitted_user_uses_its_own_mounts_only() {
    let Some(fixture) = Fixture::new() else { return };
    let (shared, root) = (fixture.shared(), Rights::own());
    let (of_user, of_root) = (fixture.folder("user", USER.uid), fixture.folder("root", 0));
    assert!(shared.mount(USER, wish(&of_root)).unwrap_err().contains("another user"));
    assert!(shared.mount(USER, MountWish { suid: true, ..wish(&of_user) }).is_err());
    let missing = of_user.join("missing");
    assert!(shared.mount(USER, wish(&missing)).is_err() && !missing.exists());
    for _ in 0..2 {
        shared.mount(USER, wish(&of_user)).unwrap();
        shared.mount(root, wish(&of_root)).unwrap();
    }
    assert!(is_mounted(&of_user) && is_mounted(&of_root));

    assert!(shared.mount(USER, wish(&of_root)).unwrap_err().contains("another user"));
    let peer = Peer::for_test(7, USER);
    assert!(shared.attach(&peer, &of_root, None, &|| false).unwrap_err().contains("another user"));
    assert!(shared.unmount(USER, &of_root).unwrap_err().contains("nothing is mounted"));
    assert_eq!(shared.list(USER).len(), 1);
    assert_eq!(shared.list(root).len(), 2);

    shared.attach(&peer, &of_user, None, &|| false).unwrap();
    shared.unmount(USER, &of_user).unwrap();
    shared.unmount(root, &of_root).unwrap();
    assert!(!is_mounted(&of_user) && !is_mounted(&of_root));
}

#[test]
fn connections_of_a_permitted_user_leave_places_for_trusted_users() {
    let Some(fixture) = Fixture::new() else { return };
    let shared = fixture.shared();
    let [first, ..] = [Share::Permitted, Share::Refused].map(|share| {
        let numbers: Vec<_> = (0..share.connections_max()).map(|_| shared.connects(share).unwrap()).collect();
        assert_eq!(shared.connects(share), None);
        numbers[0]
    });
    let trusted = shared.connects(Share::Trusted).expect("root cannot connect");
    shared.disconnects(first);
    assert!(shared.connects(Share::Permitted).is_some());
    assert_eq!(shared.connects(Share::Permitted), None);
    shared.disconnects(trusted);
}

#[test]
fn a_detached_mount_is_set_aside_and_its_path_mounted_again() {
    let Some(fixture) = Fixture::new() else { return };
    let (shared, root) = (fixture.shared(), Rights::own());
    let at = fixture.folder("at", 0);
    let number = || point::find(&at).unwrap().map(|entry| entry.device);
    shared.mount(root, wish(&at)).unwrap();
    shared.connects(Share::Trusted).unwrap();
    let (_, first_fds) = shared.attach(&Peer::for_test(1, root), &at, None, &|| false).unwrap();
    let first = number().unwrap();
    // By another process, while a program has its folder. Without one, the mount would end, and its number be used again.
    let inside = open(&at, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()).unwrap();
    umount2(&at, MntFlags::MNT_DETACH).unwrap();
    assert!(
        shared
            .attach(&Peer::for_test(2, root), &at, None, &|| false)
            .unwrap_err()
            .contains("nothing is mounted")
    );
    shared.mount(root, wish(&at)).unwrap();
    let second = number().unwrap();
    assert_ne!(first, second);
    drop(inside);
    // The first server still is one, and takes no part in the second mount: when it stops, it unmounts nothing.
    shared.unmount_for(&Peer::for_test(1, root), &at).unwrap();
    assert_eq!(number().as_ref(), Some(&second));
    shared.session(1, 7, None).unwrap();
    assert_eq!(
        shared.list(root),
        [HeldMount { spec: "v".into(), target: at.clone(), servers: 0, is_served: false }]
    );
    shared.connects(Share::Trusted).unwrap();
    let (_, _second_fds) = shared.attach(&Peer::for_test(2, root), &at, None, &|| false).unwrap();
    drop(first_fds);
    shared.disconnects(1);
    assert_eq!(number().as_ref(), Some(&second), "the end of the first server ends the second mount");
    // Through the holder, the control pipe of a server stays open: its closing would mean the holder's end.
    shared.unmount(root, &at).unwrap();
    assert!(!is_mounted(&at) && shared.session(2, 8, None).is_ok());
    shared.disconnects(2);
    assert!(shared.session(2, 8, None).is_err());
}

#[test]
fn a_restarted_holder_adopts_a_device_only_at_its_own_mount() {
    let Some(mut fixture) = Fixture::new() else { return };
    let root = Rights::own();
    let (of_user, of_root) = (fixture.folder("user", USER.uid), fixture.folder("root", 0));
    let peers = [Peer::for_test(1, USER), Peer::for_test(2, root)];
    let [of_user, of_root] = [(USER, of_user), (root, of_root)].map(|(rights, at)| {
        fixture.shared().mount(rights, wish(&at)).unwrap();
        fixture.shared().connects(Share::Trusted).unwrap();
        at
    });
    let (by_user, [user_device, user_journal, _user_control]) =
        fixture.shared().attach(&peers[0], &of_user, None, &|| false).unwrap();
    let (by_root, [root_device, root_journal, _root_control]) =
        fixture.shared().attach(&peers[1], &of_root, None, &|| false).unwrap();
    fixture.start();
    let shared = fixture.shared();
    let fds = |fds: [&OwnedFd; 2]| Vec::from(fds.map(|fd| fd.try_clone().unwrap()));

    // A user gives its own device for the mount of root, and names the number of that mount.
    let refused = shared.adopt(&peers[0], by_root.clone(), fds([&user_device, &user_journal]));
    assert!(refused.unwrap_err().contains("not at"));
    let no_device = shared.adopt(&peers[0], by_user.clone(), fds([&user_journal, &user_journal]));
    assert!(no_device.unwrap_err().contains("is not the device"));
    let _control = shared.adopt(&peers[1], by_root, fds([&root_device, &root_journal])).unwrap();
    assert!(shared.unmount(USER, &of_root).is_err());
    if device::connection(&user_device).is_some() {
        let _control = shared.adopt(&peers[0], by_user, fds([&user_device, &user_journal])).unwrap();
        assert_eq!(shared.list(USER).len(), 1);
    } else {
        assert!(shared.adopt(&peers[0], by_user.clone(), fds([&user_device, &user_journal])).is_err());
        // Nor a mount that is detached.
        umount2(&of_user, MntFlags::MNT_DETACH).unwrap();
        assert!(shared.adopt(&Peer::for_test(3, root), by_user, fds([&user_device, &user_journal])).is_err());
    }
    for at in [&of_user, &of_root] {
        let _ = umount2(at, MntFlags::MNT_DETACH);
    }
}

#[test]
fn a_handover_is_withdrawn_when_the_next_server_has_gone() {
    let Some(fixture) = Fixture::new() else { return };
    let (shared, root) = (fixture.shared(), Rights::own());
    let at = fixture.folder("at", 0);
    shared.mount(root, wish(&at)).unwrap();
    let (_, [_device, _journal, control]) =
        shared.attach(&Peer::for_test(1, root), &at, None, &|| false).unwrap();
    let mut control = File::from(control);
    let mut next = || {
        let mut polled = [PollFd::new(control.as_fd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut polled, PollTimeout::from(30_000_u16)).unwrap(), 1, "nothing is told");
        let mut word = [0];
        control.read_exact(&mut word).unwrap();
        word[0]
    };
    let has_gone = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let attach = scope.spawn(|| {
            let gone = || has_gone.load(std::sync::atomic::Ordering::Acquire);
            shared.attach(&Peer::for_test(2, root), &at, None, &gone).map(drop)
        });
        assert_eq!(next(), REQUEST);
        has_gone.store(true, std::sync::atomic::Ordering::Release);
        assert!(attach.join().unwrap().is_err());
    });
    let mut last = next();
    while last == REQUEST {
        last = next();
    }
    assert_eq!(last, WITHDRAWAL);
    assert!(shared.session(1, 7, None).is_ok(), "the first server still serves");
    shared.unmount(root, &at).unwrap();
}

#[test]
fn a_mount_that_does_not_answer_delays_no_other_path() {
    let Some(mut fixture) = Fixture::new() else { return };
    let root = Rights::own();
    let (silent, other) = (fixture.folder("silent", 0), fixture.folder("other", 0));
    fixture.shared().mount(root, wish(&silent)).unwrap();
    // A server that never answers, and a holder that was started again.
    let (_, fds) = fixture.shared().attach(&Peer::for_test(1, root), &silent, None, &|| false).unwrap();
    fixture.start();
    let shared = fixture.shared();
    let refused = shared.mount(root, wish(&silent)).unwrap_err();
    assert!(refused.contains("has not answered"), "{refused}");
    let turn = shared.turn(&silent).unwrap();
    shared.mount(root, wish(&other)).unwrap();
    shared.unmount(root, &other).unwrap();
    assert!(shared.unmount(root, &silent).unwrap_err().contains("another request"));
    drop(turn);
    // The mount of a dead server is replaced.
    drop(fds);
    shared.mount(root, wish(&silent)).unwrap();
    shared.unmount(root, &silent).unwrap();
    assert!(!is_mounted(&silent));
}

#[test]
fn a_mount_whose_first_server_never_begins_is_taken_off() {
    let Some(fixture) = Fixture::new() else { return };
    let (shared, root) = (fixture.shared(), Rights::own());
    let [gone, served] = ["gone", "served"].map(|name| fixture.folder(name, 0));
    for (number, at) in [(1, &gone), (2, &served)] {
        assert_eq!(shared.connects(Share::Trusted), Some(number));
        shared.mount_for(&Peer::for_test(number, root), wish(at)).unwrap();
    }
    let _fds = shared.attach(&Peer::for_test(2, root), &served, None, &|| false).unwrap();
    shared.disconnects(1);
    shared.disconnects(2);
    assert!(!is_mounted(&gone) && is_mounted(&served), "only a mount that was served waits for a server");
    shared.unmount(root, &served).unwrap();
}

#[test]
fn servers_that_die_in_a_takeover_leave_no_sessions_behind() {
    let Some(fixture) = Fixture::new() else { return };
    let (shared, root) = (fixture.shared(), Rights::own());
    let at = fixture.folder("at", 0);
    shared.mount(root, wish(&at)).unwrap();
    for number in 1..=100 {
        assert_eq!(shared.connects(Share::Trusted), Some(number));
        let peer = Peer::for_test(number, root);
        let (attached, _) = shared.attach(&peer, &at, None, &|| false).unwrap();
        shared.session(number, number, None).unwrap();
        for old in attached.sessions {
            shared.session_ended(number, number, old).unwrap();
        }
        // Its own session stays.
        shared.session_ended(number, number, number).unwrap();
        shared.disconnects(number);
    }
    shared.unmount(root, &at).unwrap();
}

#[test]
fn a_restarted_holder_closes_backing_files_of_the_one_before() {
    let Some(mut fixture) = Fixture::new() else { return };
    let (root, at) = (Rights::own(), fixture.folder("at", 0));
    fixture.shared().mount(root, wish(&at)).unwrap();
    let peer = Peer::for_test(1, root);
    let (attached, [device, journal, _control]) =
        fixture.shared().attach(&peer, &at, None, &|| false).unwrap();
    let unknown = fixture.shared().close_backing(1, 77).unwrap_err();
    assert!(unknown.contains("has no backing file"), "{unknown}");
    fixture.start();
    let _control = fixture.shared().adopt(&peer, attached, vec![device, journal]).unwrap();
    let asked = fixture.shared().close_backing(1, 77).unwrap_err();
    assert!(!asked.contains("has no backing file"), "the kernel was not asked: {asked}");
    fixture.shared().unmount(root, &at).unwrap();
}
