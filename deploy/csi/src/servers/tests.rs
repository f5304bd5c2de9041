use std::fs;
use std::process::Command as Program;

use super::*;
use crate::check::MountFlags;
use crate::publication::FORMAT;

/// Longest wait for a restart.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// Writes a program that says that it has mounted, and then runs for a minute. A shell writes it: a file that this process
/// has open, also in a child of another test, cannot be run.
const WRITE_PROGRAM: &str = r#"cat >"$0" <<'END'
#!/bin/sh
echo '{"mount":"/"}'
i=0
while [ "$i" -lt 60 ]; do sleep 1; i=$((i + 1)); done
END
chmod 700 "$0""#;

/// Servers of a driver whose program mounts nothing.
fn servers(dir: &Path) -> Arc<Servers> {
    let program = dir.join("program");
    let written = Program::new("/bin/sh").args(["-c", WRITE_PROGRAM]).arg(&program).status().unwrap();
    assert!(written.success());
    let launch = Launch { program, holder: None, log: None, tenants: dir.join("tenants"), metrics: false };
    let publications = Publications::open(dir.join("published")).unwrap();
    Servers::new(launch, publications, CancellationToken::new()).unwrap()
}

fn publication(at: &Path) -> Publication {
    Publication {
        format: FORMAT,
        volume_id: "mine".into(),
        spec: "mine".parse().unwrap(),
        target: at.to_owned(),
        flags: MountFlags::default(),
        home: "/home".into(),
        config_digest: String::new(),
        driver: String::new(),
        server: None,
    }
}

async fn until(mut is_so: impl FnMut() -> bool) {
    let look = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(WAIT_MAX, look).await.unwrap();
}

fn kill_group(process: Process) {
    killpg(Pid::from_raw(process.pid as i32), Signal::SIGKILL).unwrap();
}

#[tokio::test]
async fn record_of_a_restarted_server_is_written_once_it_can_be() {
    let dir = tempfile::tempdir().unwrap();
    let servers = servers(dir.path());
    let at = dir.path().join("mount");
    let locked = servers.publications.lock(&at).unwrap();
    let config = locked.config();
    assert_eq!(Process::serving(&config), None);
    servers.start(&locked, &publication(&at)).await.unwrap();
    drop(locked);
    let record = || servers.publications.find(&at).unwrap().unwrap();
    let serving = || servers.current(record()).server.unwrap();
    let first = serving();
    assert_eq!(record().server, Some(first));

    // The record cannot be written, as on a full disk.
    let staged = config.with_extension("json-new");
    fs::create_dir(&staged).unwrap();
    kill_group(first);
    until(|| serving() != first).await;
    let second = serving();
    assert_eq!(record().server, Some(first));
    // A driver that is killed now has a successor that finds the server.
    assert_eq!(Process::serving(&config), Some(second));
    kill_group(second);
    until(|| serving() != second).await;
    let third = serving();
    assert_eq!(record().server, Some(first));
    fs::remove_dir(&staged).unwrap();
    until(|| record().server == Some(third)).await;
    // Its end is noticed as before.
    kill_group(third);
    until(|| record().server != Some(third)).await;
    servers.end(&at, None).await.unwrap();
    assert_eq!(Process::serving(&config), None);
}
