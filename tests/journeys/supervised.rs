//! Tests of supervised mounts, which outlive their daemon.

use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::{Home, Service, copy_program, fuse_permitted, operations, scrape, try_scrape, until};

/// The daemon of a supervised mount.
fn daemon_of(supervisor: &Service) -> Option<i32> {
    let pid = supervisor.pid();
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let children = threads.filter_map(|thread| {
        let children = std::fs::read_to_string(thread.ok()?.path().join("children")).ok()?;
        children.split_whitespace().next()?.parse().ok()
    });
    children.last()
}

/// Has a file open. For each name on its input, makes a file of that name, which takes a daemon, and reads on.
const PROGRAM: &str = r#"exec 3<"$1/file"; while read -r name; do : > "$1/$name"; head -c 200000 <&3; done"#;

/// Starts [`PROGRAM`] in a mount.
fn program_in(at: &Path) -> Child {
    let mut command = Command::new("sh");
    command.args(["-ec", PROGRAM, "sh"]).arg(at).stdin(Stdio::piped()).stdout(Stdio::piped());
    command.spawn().unwrap()
}

/// Has the program go on, and checks what it reads.
fn goes_on(program: &mut Child, name: &str, expected: &[u8]) {
    writeln!(program.stdin.as_mut().unwrap(), "{name}").unwrap();
    let mut read = vec![0; expected.len()];
    program.stdout.as_mut().unwrap().read_exact(&mut read).unwrap();
    assert!(read == expected, "{name}: an open file differs");
}

#[test]
fn open_files_outlive_the_daemons_of_a_supervised_mount() {
    if !fuse_permitted() {
        return;
    }
    let home = Home::new();
    let content: Vec<u8> = (0..250_000_u32).flat_map(u32::to_le_bytes).collect();
    home.ok(["volume", "create", "v"]);
    home.ok(["cp", home.file("content", &content).to_str().unwrap(), "v:/file"]);
    let at = home.dir.path().join("mnt");
    let mut supervisor = home.start(["--json", "mount", "--supervise", "v", at.to_str().unwrap()]);
    supervisor.object();
    let mut program = program_in(&at);
    goes_on(&mut program, "first", &content[..200_000]);
    for (round, part) in content[200_000..].chunks(200_000).enumerate() {
        let daemon = daemon_of(&supervisor).unwrap();
        kill(Pid::from_raw(daemon), Signal::SIGKILL).unwrap();
        // The program waits for the next daemon.
        goes_on(&mut program, &format!("round-{round}"), part);
        assert_ne!(daemon_of(&supervisor), Some(daemon));
    }
    drop(program.stdin.take());
    assert!(program.wait().unwrap().success());
    let socket = home.path().join(format!("run/holder-{}", supervisor.pid()));
    assert!(socket.exists());
    home.ok(["umount", at.to_str().unwrap()]);
    assert_eq!(supervisor.wait(), Some(0));
    assert!(!socket.exists() && std::fs::read_dir(&at).unwrap().count() == 0);
}

#[test]
fn supervised_mount_moves_to_a_new_program_on_sigusr1() {
    if !fuse_permitted() {
        return;
    }
    let home = Home::new();
    let content: Vec<u8> = (0..150_000_u32).flat_map(u32::to_le_bytes).collect();
    home.ok(["volume", "create", "v"]);
    home.ok(["cp", home.file("content", &content).to_str().unwrap(), "v:/file"]);
    let (at, program) = (home.dir.path().join("mnt"), home.dir.path().join("millrace"));
    copy_program(home.command().get_program().as_ref(), &program);
    let program = std::fs::canonicalize(program).unwrap();
    let mut command = Command::new(&program);
    command.current_dir(home.dir.path()).env("MILLRACE_HOME", home.path()).env_remove("MILLRACE_CONFIG");
    command.args(["--json", "mount", "--supervise", "v", at.to_str().unwrap()]);
    let mut supervisor = Service::spawn(&mut command);
    supervisor.object();
    let mut reader = program_in(&at);
    goes_on(&mut reader, "before", &content[..200_000]);

    let next = home.dir.path().join("next");
    copy_program(&program, &next);
    std::fs::rename(&next, &program).unwrap();
    let file_of = |pid: i32| std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    let first = daemon_of(&supervisor).unwrap();
    assert_ne!(file_of(first), program, "it runs the removed file");
    supervisor.signal(Signal::SIGUSR1);
    until("a daemon of the new program serves alone", || {
        !Path::new(&format!("/proc/{first}")).exists()
            && daemon_of(&supervisor).is_some_and(|now| file_of(now) == program)
    });
    goes_on(&mut reader, "upgraded", &content[200_000..400_000]);

    // A file that is no program changes nothing, also not for the next daemon.
    std::fs::rename(home.file("broken", "#!/bin/false\n"), &program).unwrap();
    let second = daemon_of(&supervisor).unwrap();
    supervisor.signal(Signal::SIGUSR1);
    kill(Pid::from_raw(second), Signal::SIGKILL).unwrap();
    goes_on(&mut reader, "restarted", &content[400_000..]);
    drop(reader.stdin.take());
    assert!(reader.wait().unwrap().success());
    assert_eq!(supervisor.stop(), 0);
}

#[test]
fn supervised_mount_is_restored_after_its_daemon_is_killed() {
    if !fuse_permitted() {
        return;
    }
    let home = Home::new();
    home.ok(["volume", "create", "v"]);
    let at = home.dir.path().join("mnt");
    let socket_path = home.dir.path().join("notify");
    let socket = std::os::unix::net::UnixDatagram::bind(&socket_path).unwrap();
    let mount = ["--json", "mount", "--supervise", "v", at.to_str().unwrap()];
    let mut supervisor = Service::spawn(home.command().args(mount).env("NOTIFY_SOCKET", &socket_path));
    assert_eq!(supervisor.object()["pid"], supervisor.pid());
    let mut message = [0; 20];
    let len = socket.recv(&mut message).unwrap();
    assert_eq!(&message[..len], b"READY=1");
    for round in 0..3u8 {
        let path = at.join(format!("{round}"));
        let mut file = std::fs::File::create(&path).unwrap();
        file.write_all(&[round; 10_000]).unwrap();
        file.sync_all().unwrap();
        drop(file);
        let daemon = daemon_of(&supervisor).unwrap();
        kill(Pid::from_raw(daemon), Signal::SIGKILL).unwrap();
        until("another daemon serves", || {
            daemon_of(&supervisor).is_some_and(|now| now != daemon)
                && std::fs::read(&path).is_ok_and(|bytes| bytes == [round; 10_000])
        });
    }
    home.ok(["umount", at.to_str().unwrap()]);
    assert_eq!(supervisor.wait(), Some(0));
    assert_eq!(std::fs::read_dir(&at).unwrap().count(), 0);
    // A supervisor that is stopped unmounts; so does a mount without a supervisor.
    for mount in [&["--json", "mount", "--supervise"][..], &["--json", "mount"]] {
        let mut service = home.start(mount.iter().copied().chain(["v", at.to_str().unwrap()]));
        service.object();
        assert_eq!(std::fs::read(at.join("2")).unwrap(), [2; 10_000]);
        assert_eq!(service.stop(), 0);
        assert_eq!(std::fs::read_dir(&at).unwrap().count(), 0);
    }
}

/// Like `mv` of a new program over the running one.
#[test]
fn supervised_mount_is_restored_after_the_program_is_replaced() {
    if !fuse_permitted() {
        return;
    }
    let home = Home::new();
    home.ok(["volume", "create", "v"]);
    let (at, program) = (home.dir.path().join("mnt"), home.dir.path().join("millrace"));
    copy_program(home.command().get_program().as_ref(), &program);
    let mut command = std::process::Command::new(&program);
    command.current_dir(home.dir.path()).env("MILLRACE_HOME", home.path()).env_remove("MILLRACE_CONFIG");
    command.args(["--json", "mount", "--supervise", "v", at.to_str().unwrap()]);
    let mut supervisor = Service::spawn(&mut command);
    supervisor.object();
    std::fs::File::create(at.join("file")).unwrap().sync_all().unwrap();
    let next = home.file("next", "#!/bin/false\n");
    std::fs::rename(next, &program).unwrap();
    let daemon = daemon_of(&supervisor).unwrap();
    kill(Pid::from_raw(daemon), Signal::SIGKILL).unwrap();
    until("another daemon serves", || {
        daemon_of(&supervisor).is_some_and(|now| now != daemon) && std::fs::read(at.join("file")).is_ok()
    });
    let name = std::fs::read_to_string(format!("/proc/{}/comm", daemon_of(&supervisor).unwrap())).unwrap();
    assert_eq!(name, "millrace\n");
    assert_eq!(supervisor.stop(), 0);
}

#[test]
fn daemon_ends_when_its_supervisor_is_killed() {
    if !fuse_permitted() {
        return;
    }
    let home = Home::new();
    home.ok(["volume", "create", "v"]);
    let at = home.dir.path().join("mnt");
    let mut supervisor = home.start(["--json", "mount", "--supervise", "v", at.to_str().unwrap()]);
    supervisor.object();
    std::fs::write(at.join("file"), b"x").unwrap();
    let daemon = daemon_of(&supervisor).unwrap();
    supervisor.signal(Signal::SIGKILL);
    supervisor.wait();
    // Without a parent that reaps orphans, the process may stay as a zombie.
    let state = || std::fs::read_to_string(format!("/proc/{daemon}/stat")).unwrap_or_default();
    until("the daemon has ended", || state().rsplit_once(") ").is_none_or(|(_, of)| of.starts_with('Z')));
    assert!(!millrace_datafs::mount::is_mounted(&at).unwrap());
    let back = home.dir.path().join("back");
    home.ok(["cp", "v:/file", back.to_str().unwrap()]);
    assert_eq!(std::fs::read(back).unwrap(), b"x");
}

#[test]
fn supervised_mount_keeps_its_metrics_address_across_daemons() {
    if !fuse_permitted() {
        return;
    }
    let home = Home::new();
    home.ok(["volume", "create", "v"]);
    let at = home.dir.path().join("mnt");
    let mount = ["--json", "mount", "--supervise", "--metrics", "127.0.0.1:0", "v", at.to_str().unwrap()];
    let mut supervisor = Service::spawn(home.command().args(mount));
    let address = supervisor.object()["metrics"].as_str().unwrap().to_owned();
    let mut made = 0;
    for files in [7, 3] {
        for _ in 0..files {
            std::fs::write(at.join(made.to_string()), b"x").unwrap();
            made += 1;
        }
        std::fs::File::open(&at).unwrap().sync_all().unwrap();
        // Each daemon has its own counters.
        until("all is counted", || operations(&scrape(&address), &at, "create") == files);
        let daemon = daemon_of(&supervisor).unwrap();
        kill(Pid::from_raw(daemon), Signal::SIGKILL).unwrap();
        until("another daemon serves", || {
            daemon_of(&supervisor).is_some_and(|now| now != daemon)
                && std::fs::read_dir(&at).is_ok_and(|entries| entries.count() == made)
        });
        until("the address answers", || try_scrape(&address).is_some());
    }
    assert_eq!(supervisor.stop(), 0);
    assert!(try_scrape(&address).is_none());
}

#[test]
fn impossible_supervised_mount_is_refused() {
    if !fuse_permitted() {
        return;
    }
    let home = Home::new();
    let at = home.dir.path().join("mnt");
    let (code, line) = home.fails(["mount", "--supervise", "none", at.to_str().unwrap()]);
    assert_eq!(code, 3, "{line}");
    home.ok(["volume", "create", "v"]);
    home.ok(["mount", "--supervise", "--detach", "v", at.to_str().unwrap()]);
    std::fs::write(at.join("file"), b"x").unwrap();
    let (code, line) = home.fails(["mount", "--supervise", "v", at.to_str().unwrap()]);
    assert_eq!(code, 4, "{line}");
    assert_eq!(std::fs::read(at.join("file")).unwrap(), b"x");
    home.ok(["umount", at.to_str().unwrap()]);
}
