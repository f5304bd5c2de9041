//! Tests of monitoring: statistics, metrics and traces of mounts.

use crate::support::{Home, failure, fuse_permitted, project, scrape, until};

#[test]
fn stats_shows_a_mount_until_it_is_killed() {
    if !fuse_permitted() {
        return;
    }
    let home = Home::new();
    home.ok(["volume", "create", "v"]);
    let (code, line) = home.fails(["stats"]);
    assert!(code == 3 && line.contains("millrace mount VOLUME PATH"), "{line}");
    let mnt = home.dir.path().join("mnt");
    let at = mnt.to_str().unwrap();
    let arguments = ["mount", "v", at, "--json", "--metrics", "127.0.0.1:0", "--trace", "at-first"];
    let mut mount = home.start(arguments);
    let announcement = mount.object();
    for i in 0..30 {
        std::fs::write(mnt.join(format!("{i}")), vec![1; 1_000]).unwrap();
    }
    let creates = |stats: &serde_json::Value| {
        let operations = stats["mounts"][0]["operations"].as_array().unwrap();
        operations.iter().find(|operation| operation["op"] == "create").cloned().unwrap_or_default()
    };
    until("all is counted", || creates(&home.json(["stats", "--once"]))["count"] == 30);
    let stats = home.json(["stats", "v", "--once"]);
    assert_eq!(
        (&stats["mounts"][0]["mount"], &stats["mounts"][0]["pid"]),
        (&at.into(), &announcement["pid"])
    );
    let create = creates(&stats);
    assert!(create["p99_us"].as_f64() >= create["p50_us"].as_f64(), "{create}");
    let shown = home.ok(["stats", at, "--once"]);
    assert!(shown.contains(&format!("v at {at}")) && shown.contains("create"), "{shown}");
    let (code, line) = home.fails(["stats", "other"]);
    assert!(code == 3 && line.contains("neither a mount point") && line.contains(at), "{line}");
    assert_eq!(home.run(["stats", "--interval", "0"]).status.code(), Some(2));

    // One object per interval, with its increases.
    let mut following = home.start(["stats", "--json", "--interval", "0.1"]);
    let first = following.object();
    assert!(first["mounts"][0]["seconds"].as_f64().unwrap() < 30.0, "{first}");
    until("an interval shows what was done in it", || {
        std::fs::write(mnt.join("again"), b"x").unwrap();
        let writes = &following.object()["mounts"][0];
        writes["operations"].as_array().unwrap().iter().any(|operation| operation["op"] == "write")
    });
    assert_eq!(following.stop(), 0);

    let text = scrape(announcement["metrics"].as_str().unwrap());
    let total = format!("millrace_mount_operations_total{{mount=\"{at}\",op=\"create\",volume=\"v\"}} 3");
    assert!(text.contains(&total), "{text}");
    let page = "docs/reference/metrics/volumes.md";
    let documented = std::fs::read_to_string(project().join(page)).unwrap();
    let names = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    for name in names.filter(|name| name.contains("_mount_") || name.contains("_datafs_")) {
        assert!(documented.contains(&format!("`{name}`")), "{page} does not tell of {name}");
    }

    // Traced from the start, then to another file, then not at all.
    let first = home.dir.path().join("at-first");
    let lines = |file: &std::path::Path, what: &str| {
        std::fs::read_to_string(file).unwrap().lines().filter(|line| line.contains(what)).count()
    };
    until("all is traced", || lines(&first, " op=create ") >= 30);
    let later = home.dir.path().join("later");
    let now = home.json(["trace", "v", "later"]);
    assert_eq!(now["trace"]["file"], later.to_str().unwrap(), "{now}");
    std::fs::remove_file(mnt.join("7")).unwrap();
    until("it is traced", || lines(&later, " op=unlink ") == 1);
    assert!(home.ok(["trace", at]).contains("later"));
    let on_itself = mnt.join("trace");
    let (code, line) = home.fails(["trace", "v", on_itself.to_str().unwrap()]);
    assert!(code == 2 && line.contains("on the mount that it traces"), "{line}");
    assert!(home.ok(["trace", "v", "--off"]).contains("not traced any more"));
    std::fs::remove_file(mnt.join("8")).unwrap();
    assert_eq!(home.json(["trace", "v"])["trace"], serde_json::Value::Null);
    assert_eq!(lines(&later, " op=unlink "), 1);

    mount.signal(nix::sys::signal::Signal::SIGKILL);
    mount.wait();
    let run = home.path().join("run");
    assert_eq!(std::fs::read_dir(&run).unwrap().count(), 1);
    let output = home.run(["stats"]);
    assert_eq!(failure(&output, "stats").0, 3);
    assert_eq!(std::fs::read_dir(&run).unwrap().count(), 0);
}
