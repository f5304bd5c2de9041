//! A journey of a mount whose servers are killed and replaced behind a holder.

use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};

use nix::sys::signal::Signal;

use crate::support::{Home, Service, fuse_permitted};

/// Reads the start of a file, and the rest after each line of its input.
const READER: &str = r#"exec 3<"$1"; head -c 1000 <&3; while read -r line; do head -c 399500 <&3; done"#;

/// The test itself has no file of the mount open: closing one waits for a server, also in a process that is about to
/// become the next server.
#[test]
fn programs_notice_nothing_while_servers_behind_a_holder_come_and_go() {
    if !fuse_permitted() {
        return;
    }
    let home = Home::new();
    let content: Vec<u8> = (0..200_000_u32).flat_map(u32::to_le_bytes).collect();
    home.ok(["volume", "create", "v"]);
    home.ok(["cp", home.file("content", &content).to_str().unwrap(), "v:/file"]);
    home.ok(["snapshot", "create", "v@s"]);
    let at = home.dir.path().join("mnt");
    let at = at.to_str().unwrap();
    let socket = format!("unix://{}", home.dir.path().join("holder.sock").display());
    let mut holder = home.start(["--json", "holder", "--socket", &socket]);
    holder.object();
    let mount = ["--json", "mount", "--holder", &socket, "v@s", at];

    let mut first = home.start(mount);
    first.object();
    let mut reader = Command::new("sh")
        .args(["-c", READER, "sh", &format!("{at}/file")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut go_on, mut read) = (reader.stdin.take().unwrap(), reader.stdout.take().unwrap());
    let mut seen = vec![0; 1_000];
    read.read_exact(&mut seen).unwrap();
    assert!(seen == content[..1_000]);

    // A killed server: the open file goes on with the next one.
    first.signal(Signal::SIGKILL);
    first.wait();
    let mut second = home.start(mount);
    second.object();
    go_on.write_all(b"\n").unwrap();
    seen.resize(399_500, 0);
    read.read_exact(&mut seen).unwrap();
    assert!(seen == content[1_000..400_500], "an open file differs after a crash of its server");
    assert_eq!(std::fs::read_dir(at).unwrap().count(), 1);

    // A newer server takes over from one that lives.
    let mut third = home.start(mount);
    third.object();
    assert_eq!(second.wait(), Some(0));
    go_on.write_all(b"\n").unwrap();
    read.read_exact(&mut seen).unwrap();
    assert!(seen == content[400_500..], "an open file differs after a handover");
    drop(go_on);
    assert!(reader.wait().unwrap().success());

    let (code, error) = home.fails(["umount", "--holder", &socket, home.dir.path().to_str().unwrap()]);
    assert!(code != 0 && error.contains("nothing is mounted"), "{error}");
    home.ok(["umount", "--holder", &socket, at]);
    assert_eq!(third.wait(), Some(0));
    assert_eq!(std::fs::read_dir(at).unwrap().count(), 0);
    assert_eq!(holder.stop(), 0);
}

#[test]
fn servers_end_whatever_has_its_current_folder_in_their_mount() {
    if !fuse_permitted() {
        return;
    }
    let home = Home::new();
    home.ok(["volume", "create", "v"]);
    let at = home.dir.path().join("mnt");
    let socket = format!("unix://{}", home.dir.path().join("holder.sock").display());
    let mut holder = home.start(["--json", "holder", "--socket", &socket]);
    holder.object();
    let mount = ["--json", "mount", "--holder", &socket, "v", at.to_str().unwrap()];
    let mut first = home.start(mount);
    first.object();

    // Its own server, started there.
    let mut second = Service::spawn(home.command().args(mount).current_dir(&at));
    second.object();
    assert_eq!(first.wait(), Some(0));
    home.ok(["umount", "--holder", &socket, at.to_str().unwrap()]);
    assert_eq!(second.wait(), Some(0), "a server keeps its own mount busy");

    // A program, with SIGTERM to the server.
    let mut third = home.start(mount);
    third.object();
    let mut program = Command::new("sh")
        .args(["-c", r#"cd "$1" && echo there && read -r line"#, "sh"])
        .arg(&at)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut there = [0; 6];
    program.stdout.as_mut().unwrap().read_exact(&mut there).unwrap();
    assert_eq!(third.stop(), 0);
    assert!(program.try_wait().unwrap().is_none(), "the program has its folder no more");
    drop(program.stdin.take());
    program.wait().unwrap();
    assert_eq!(holder.stop(), 0);
}

/// The holder refuses a mount point outside its folders; inside, a stopped server unmounts.
#[test]
fn a_holder_mounts_below_its_folders_only() {
    if !fuse_permitted() {
        return;
    }
    let home = Home::new();
    home.ok(["volume", "create", "v"]);
    let [below, inside, outside] = ["below", "below/v", "outside"].map(|name| home.dir.path().join(name));
    std::fs::create_dir_all(&inside).unwrap();
    std::fs::create_dir(&outside).unwrap();
    let socket = format!("unix://{}", home.dir.path().join("holder.sock").display());
    let mut holder =
        home.start(["--json", "holder", "--socket", &socket, "--allow-below", below.to_str().unwrap()]);
    holder.object();
    let (code, error) = home.fails(["mount", "--holder", &socket, "v", outside.to_str().unwrap()]);
    assert!(code != 0 && error.contains("--allow-below"), "{error}");
    let mut server = home.start(["--json", "mount", "--holder", &socket, "v", inside.to_str().unwrap()]);
    server.object();
    std::fs::write(inside.join("file"), b"content").unwrap();
    assert_eq!(server.stop(), 0);
    assert_eq!(std::fs::read_dir(&inside).unwrap().count(), 0);
    assert!(home.ok(["ls", "v:/"]).contains("file"));
    assert_eq!(holder.stop(), 0);
}
