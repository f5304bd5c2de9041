//! What a local disk does, a mount does: pjdfstest, fsx and everyday programs on live mounts.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::support::{Home, Service, fuse_permitted, program, project};

/// A home with a volume, mounted by processes of their own.
struct Mounted {
    services: Vec<Service>,
    places: Vec<PathBuf>,
    home: Home,
}

impl Mounted {
    /// `None`, and the reason on standard error, where mounting is not permitted.
    fn new(mounts: &[&str]) -> Option<Mounted> {
        if !fuse_permitted() {
            return None;
        }
        let home = Home::new();
        home.ok(["volume", "create", "v"]);
        let places: Vec<PathBuf> = mounts.iter().map(|name| home.dir.path().join(name)).collect();
        let mount = |at: &PathBuf| {
            let mut service = home.start(["--json", "mount", "v", at.to_str().unwrap()]);
            service.object();
            service
        };
        let services = places.iter().map(mount).collect();
        Some(Mounted { services, places, home })
    }

    fn at(&self) -> &Path {
        &self.places[0]
    }

    /// Unmounts, and checks that what is left is sound.
    fn end(self) {
        for service in self.services {
            assert_eq!(service.stop(), 0);
        }
        let report = self.home.json(["fsck", "--scrub"]);
        assert_eq!(report["problems"], 0, "{report}");
    }
}

fn tool(name: &str) -> Command {
    Command::new(project().join(".local/bin").join(name))
}

fn is_root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("skipped: this needs root");
    }
    root
}

/// Runs a shell script in a folder to success.
fn shell(at: &Path, script: &str) -> String {
    program(Command::new("bash").args(["-euo", "pipefail", "-c", script]).current_dir(at))
}

#[test]
#[ignore = "needs pjdfstest: run make conformance"]
fn pjdfstest_passes() {
    if !is_root() {
        return;
    }
    let Some(mounted) = Mounted::new(&["mnt"]) else { return };
    // Two users with groups of their own, as every Debian has them.
    let config = mounted.home.file(
        "pjdfstest.toml",
        "[features]\nposix_fallocate = {}\nutime_now = {}\nutimensat = {}\n\
         [settings]\nnaptime = 0.01\nallow_remount = false\n\
         [dummy_auth]\nentries = [[\"nobody\", \"nogroup\"], [\"daemon\", \"daemon\"]]\n",
    );
    // Other users must reach the mount.
    shell(mounted.home.dir.path(), "chmod 755 . mnt");
    let said = program(tool("pjdfstest").arg("-c").arg(config).arg("-p").arg(mounted.at()));
    eprintln!("{}", said.lines().last().unwrap_or_default());
    mounted.end();
}

fn fsx(at: &Path, config: &Path, seed: u64, operations: u64) -> Child {
    tool("fsx")
        .args(["-S", &seed.to_string(), "-N", &operations.to_string(), "-f"])
        .arg(config)
        .arg("-P")
        .arg(config.parent().unwrap())
        .arg(at)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

const FSX: &str = "flen = 1000000\n[opsize]\nmax = 65536\n[weights]\nclose_open = 1\ninvalidate = 1\n\
                   fsync = 1\nfdatasync = 1\npunch_hole = 5\nposix_fallocate = 5\nsendfile = 5\n\
                   posix_fadvise = 1\ncopy_file_range = 5\n";

fn done(child: Child) {
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}", said.lines().rev().take(30).collect::<Vec<_>>().join("\n"));
}

#[test]
#[ignore = "needs fsx: run make conformance"]
fn fsx_finds_nothing_on_one_mount_and_on_two() {
    let Some(mounted) = Mounted::new(&["mnt", "m"]) else { return };
    let config = mounted.home.file("fsx.toml", FSX);
    let file = |mount: usize, name: &str| mounted.places[mount].join(name);
    done(fsx(&file(0, "one"), &config, 7, 100_000));
    let both = [fsx(&file(0, "first"), &config, 8, 50_000), fsx(&file(1, "second"), &config, 9, 50_000)];
    both.into_iter().for_each(done);
    for name in ["one", "first", "second"] {
        let (here, there) = (std::fs::read(file(0, name)), std::fs::read(file(1, name)));
        assert!(here.unwrap() == there.unwrap(), "{name} differs between the mounts");
    }
    mounted.end();
}

#[test]
#[ignore = "needs git, make, tar and rsync: run make conformance"]
fn everyday_programs_work_as_on_a_local_disk() {
    let Some(mounted) = Mounted::new(&["mnt"]) else { return };
    let source = mounted.home.dir.path().join("source");
    std::fs::create_dir(&source).unwrap();
    shell(
        &source,
        "mkdir -p src/deep/er; for i in $(seq 1 200); do \
           echo \"int f$i(int x) { return x + $i; }\" > src/deep/f$i.c; done\n\
         printf '%s\\n' 'OBJECTS := $(patsubst %.c,%.o,$(wildcard src/deep/*.c))' 'lib.a: $(OBJECTS)' \
           '\tar rcs $@ $^' > Makefile\n\
         ln -s deep/f1.c src/link; ln src/deep/f2.c src/hard; chmod 751 src/deep/f3.c\n\
         truncate -s 5M src/hole; mkfifo src/pipe; touch -d '2001-02-03 04:05:06.789' src/deep/f4.c\n\
         git init -q . && git add Makefile src/deep src/link && \
           git -c user.name=a -c user.email=a@localhost commit -qm all",
    );
    let at = mounted.at();
    let from = source.display();
    shell(at, &format!("git clone -q --no-hardlinks {from} clone && cd clone && git status --porcelain"));
    let clean = shell(&at.join("clone"), "git fsck --no-progress 2>&1; git status --porcelain");
    assert_eq!(clean, "");
    shell(&at.join("clone"), "make -s -j4 lib.a && test $(ar t lib.a | wc -l) = 200 && git gc -q");
    shell(&at.join("clone"), "make -q lib.a");
    shell(
        at,
        &format!("tar -C {from} -cf a.tar src && mkdir un && tar -C un -xpf a.tar && tar -C un -df a.tar"),
    );
    shell(at, &format!("rsync -aHAX {from}/src/ synced/"));
    let rest = shell(at, &format!("rsync -aHAXcni --delete {from}/src/ synced/"));
    assert_eq!(rest, "", "a second rsync finds nothing to do");
    shell(at, &format!("cp -a {from} copied && diff -r --no-dereference {from}/src/deep copied/src/deep"));
    shell(at, "mv copied moved && find moved -type f | wc -l && rm -rf moved un clone");
    mounted.end();
}

#[test]
#[ignore = "needs sqlite3: run make conformance"]
fn a_database_lives_on_a_mount() {
    let Some(mounted) = Mounted::new(&["mnt"]) else { return };
    let at = mounted.at();
    for mode in ["delete", "truncate"] {
        shell(at, &format!("sqlite3 {mode}.db 'pragma journal_mode={mode}; create table t(x)' > /dev/null"));
        // Four processes take turns under the locks of the file.
        let insert = format!(
            "for i in $(seq 1 50); do echo \"insert into t values($i);\"; done | \
             sqlite3 -cmd '.timeout 60000' {mode}.db"
        );
        let children: Vec<Child> = (0..4)
            .map(|_| Command::new("bash").args(["-c", &insert]).current_dir(at).spawn().unwrap())
            .collect();
        for child in children {
            assert!(child.wait_with_output().unwrap().status.success());
        }
        let said =
            shell(at, &format!("sqlite3 {mode}.db 'select count(*), sum(x) from t; pragma integrity_check'"));
        assert_eq!(said, "200|5100\nok\n");
    }
    mounted.end();
}

#[test]
#[ignore = "needs sqlite3: run make conformance"]
fn a_database_is_written_from_two_mounts() {
    let Some(mounted) = Mounted::new(&["mnt", "m"]) else { return };
    shell(mounted.at(), "sqlite3 both.db 'create table t(x)'");
    let insert =
        "for i in $(seq 1 40); do sqlite3 -cmd '.timeout 60000' both.db \"insert into t values($i)\"; done";
    let children: Vec<Child> = mounted
        .places
        .iter()
        .map(|at| Command::new("bash").args(["-euc", insert]).current_dir(at).spawn().unwrap())
        .collect();
    for child in children {
        assert!(child.wait_with_output().unwrap().status.success());
    }
    for at in &mounted.places {
        let said = shell(at, "sqlite3 both.db 'select count(*), sum(x) from t; pragma integrity_check'");
        assert_eq!(said, "80|1640\nok\n", "{}", at.display());
    }
    mounted.end();
}
