//! POSIX tests of mounts: pjdfstest, fsx and common programs must behave as on a local disk.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::support::{Home, Service, fuse_permitted, program, project};

/// A home with a volume and several mounts, each served by its own process.
struct Mounted {
    services: Vec<Service>,
    places: Vec<PathBuf>,
    home: Home,
}

impl Mounted {
    /// `None`, with the reason on standard error, if mounting is not permitted.
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

    /// Unmounts, and checks that the volume is sound.
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
        millrace_testing::skip(millrace_testing::Need::Root, "this needs root");
    }
    root
}

/// Runs a shell script in a folder; it must succeed.
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
    // Two users with their own groups, which every Debian has.
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
        // Four processes write in turns under the locks of the file.
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

/// Two mounts continue each other's work: each step runs on the mount that did not run the previous step.
#[test]
#[ignore = "needs git, sqlite3, make, a compiler, tar, Python and npm: run make conformance"]
fn two_mounts_take_turns_under_everyday_programs() {
    let Some(mounted) = Mounted::new(&["mnt", "m"]) else { return };
    let turn = |step: usize, script: &str| shell(&mounted.places[step % 2], script);

    turn(
        0,
        "git init -q repo && cd repo && git config user.name a && git config user.email a@localhost && \
         echo 0 > f && git add f && git commit -qm 0",
    );
    turn(1, "sqlite3 db 'create table t(x)'");
    turn(
        0,
        "mkdir made && cd made && printf '%s\\n' 'OBJECTS := $(patsubst %.c,%.o,$(wildcard *.c))' \
         'all: $(OBJECTS)' > Makefile",
    );
    for step in 1..=10 {
        turn(
            step,
            &format!(
                "cd repo && test -z \"$(git status --porcelain)\" && test $(git rev-list --count HEAD) = {step}\n\
                 echo {step} >> f && mkdir d{step} && echo x > d{step}/x && rm -f d{}/x\n\
                 git add -A && git commit -qm {step} && git checkout -q -b b{step}",
                step - 1
            ),
        );
        let said = turn(step, &format!("sqlite3 db 'insert into t values({step}); select count(*) from t'"));
        assert_eq!(said, format!("{step}\n"));
        // Files that are already built are not built again.
        let built = turn(step, &format!("cd made && echo 'int x{step};' > {step}.c && make"));
        assert_eq!(built.lines().filter(|line| line.contains(" -o ")).count(), 1, "{built}");
        turn(step + 1, "cd made && make -q");
        turn(
            step,
            &format!("mkdir tar && tar -C repo -cf tar/{step}.tar . && tar -C tar -xf tar/{step}.tar"),
        );
        turn(step + 1, &format!("tar -C tar -df tar/{step}.tar && tar -C repo -df tar/{step}.tar"));
        turn(step, "rm -r tar");
    }
    for step in 0..2 {
        turn(step, "cd repo && git gc -q && git fsck --no-progress && test -z \"$(git status --porcelain)\"");
        assert_eq!(turn(step, "sqlite3 db 'pragma integrity_check'"), "ok\n");
    }

    // A wheel and a package that need no network.
    turn(
        0,
        "mkdir wheel && cd wheel && python3 - <<'END'\n\
         import zipfile\n\
         info = 'ours-1.0.dist-info/'\n\
         with zipfile.ZipFile('ours-1.0-py3-none-any.whl', 'w') as wheel:\n\
         \x20   for i in range(100): wheel.writestr(f'ours/m{i}.py', f'value = {i}')\n\
         \x20   wheel.writestr('ours/__init__.py', '')\n\
         \x20   wheel.writestr(info + 'METADATA', 'Metadata-Version: 2.1\\nName: ours\\nVersion: 1.0\\n')\n\
         \x20   wheel.writestr(info + 'WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')\n\
         \x20   wheel.writestr(info + 'RECORD', '')\n\
         END\n\
         cd .. && python3 -m venv venv",
    );
    let pip = "venv/bin/python -m pip --disable-pip-version-check -q";
    for step in 0..4 {
        turn(step, &format!("{pip} install --no-index wheel/*.whl"));
        let found = turn(step + 1, "venv/bin/python -c 'import ours.m99; print(ours.m99.value)'");
        assert_eq!(found, "99\n");
        turn(step + 1, &format!("{pip} uninstall -y ours && {pip} check"));
        turn(step, "! venv/bin/python -c 'import ours' 2> /dev/null");
    }
    turn(
        0,
        "mkdir -p theirs app && cd theirs && echo '{\"name\":\"theirs\",\"version\":\"1.0.0\"}' > package.json && \
         for i in $(seq 100); do echo \"module.exports = $i\" > m$i.js; done && \
         cd ../app && echo '{\"name\":\"app\",\"version\":\"1.0.0\"}' > package.json",
    );
    let npm = "npm --cache ../cache --offline --no-audit --no-fund --no-update-notifier --silent";
    turn(1, &format!("cd theirs && {npm} pack > /dev/null && mv theirs-1.0.0.tgz .."));
    for step in 0..4 {
        turn(step, &format!("cd app && {npm} install ../theirs-1.0.0.tgz"));
        assert_eq!(turn(step + 1, "cd app && node -p \"require('theirs/m100')\""), "100\n");
        turn(step + 1, &format!("cd app && {npm} uninstall theirs && test ! -e node_modules/theirs"));
        turn(step, "cd app && ! node -p \"require('theirs/m100')\" 2> /dev/null");
    }
    mounted.end();
}

/// Runs a shell script in a folder as a user without privileges; it must succeed.
fn shell_as(user: u32, at: &Path, script: &str) -> String {
    let user = user.to_string();
    program(
        Command::new("setpriv")
            .args(["--reuid", &user, "--regid", &user, "--clear-groups", "bash", "-euo", "pipefail", "-c"])
            .arg(script)
            .current_dir(at)
            .env("HOME", at),
    )
}

#[test]
#[ignore = "needs git, sqlite3, make, a compiler and setpriv: run make conformance"]
fn another_user_works_beside_root_on_a_shared_mount() {
    if !is_root() {
        return;
    }
    let Some(mounted) = Mounted::new(&["mnt", "m"]) else { return };
    shell(mounted.home.dir.path(), "chmod 755 . mnt m");
    let [one, two] = [&mounted.places[0], &mounted.places[1]];
    let (user, other) = (1_001, 1_002);
    shell(
        one,
        "mkdir -m 700 private && echo secret > private/f && echo secret > closed && chmod 600 closed\n\
         mkdir -m 1777 sticky && echo ours > sticky/root && install -d -o 1001 -g 1001 theirs\n\
         install -d -m 2770 -o 0 -g 1001 group && echo root > group/root && chmod 660 group/root",
    );
    // The user works through both mounts, then root sees and continues the work.
    shell_as(
        user,
        &two.join("theirs"),
        "git init -q repo && cd repo && git config user.name a && git config user.email a@localhost\n\
         for i in $(seq 50); do echo \"int f$i;\" > f$i.c; done\n\
         printf '%s\\n' 'OBJECTS := $(patsubst %.c,%.o,$(wildcard *.c))' 'all: $(OBJECTS)' > Makefile\n\
         make -s -j2 && git add . && git commit -qm all && sqlite3 db 'create table t(x)'",
    );
    shell_as(
        user,
        &one.join("theirs/repo"),
        "make -q && git status > /dev/null && sqlite3 db 'insert into t values(1)'",
    );
    let said = shell(
        two,
        "cat theirs/repo/f1.c && sqlite3 theirs/repo/db 'select x from t' && stat -c %u theirs/repo/f1.o",
    );
    assert_eq!(said, "int f1;\n1\n1001\n");
    shell(one, "echo root >> theirs/repo/f1.c");
    shell_as(
        user,
        &two.join("theirs/repo"),
        "grep -q root f1.c && git checkout -q f1.c && ! grep -q root f1.c",
    );
    // Files closed to the user stay closed on both mounts.
    let no = "no() { if \"$@\" 2> /dev/null; then echo \"allowed: $*\" >&2; exit 1; fi; }";
    for at in [one, two] {
        shell_as(
            user,
            at,
            &format!(
                "{no}\n\
                 for file in closed private/f; do\n\
                   no cat $file; no cp /dev/null $file; no tee -a $file < /dev/null; no rm -f $file; done\n\
                 no ls private; no touch new; no mkdir new; no mv closed new; no ln -s closed new\n\
                 no chmod 666 closed; no chown 1001 closed; no truncate -s 0 closed\n\
                 no mv sticky/root sticky/mine; no rm -f sticky/root\n\
                 echo mine > sticky/mine; no mv -f sticky/mine sticky/root; rm sticky/mine\n\
                 grep -q root group/root; echo more >> group/root\n\
                 touch group/new; test $(stat -c %g group/new) = 1001; rm group/new"
            ),
        );
        shell_as(
            other,
            at,
            &format!(
                "{no}\nno ls group; no cat group/root; test -r theirs; no touch theirs/new; no rm -r theirs/repo"
            ),
        );
        assert_eq!(shell(at, "cat closed private/f sticky/root"), "secret\nsecret\nours\n");
    }
    mounted.end();
}
