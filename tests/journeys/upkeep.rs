//! An operator looks after volumes: checks, repairs, collects, copies.

use crate::support::{Home, failure};

fn landed(home: &Home) {
    let lines: String = (0..500).map(|i| format!("{{\"id\":{i},\"x\":[0.5,{i}]}}\n")).collect();
    let file = home.file("records.jsonl", lines);
    home.ok(["produce", "t", file.to_str().unwrap()]);
    home.ok(["ingest", "--topic", "t", "--volume", "v"]);
    home.ok(["snapshot", "create", "v@s"]);
}

#[test]
fn fsck_finds_what_is_lost_and_says_so() {
    let home = Home::new();
    landed(&home);
    let report = home.json(["fsck", "--scrub"]);
    assert_eq!(report["problems"], 0, "{report}");
    assert!(report["scrubbed_bytes"].as_u64().unwrap() > 1_000, "{report}");
    assert!(home.ok(["fsck"]).contains("problems"));
    assert_eq!(home.json(["warmup", "v@s"])["bytes"], 0);
    home.ok(["compact", "v"]);
    let objects = home.path().join("datafs/objects");
    let below = |folder: &std::path::Path| {
        let entries = std::fs::read_dir(folder).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
    };
    for file in below(&objects).iter().flat_map(|folder| below(folder)) {
        std::fs::remove_file(file).unwrap();
    }
    let output = home.run(["fsck", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["found"][0]["kind"], "missing-object", "{report}");
    let (code, line) = failure(&output, "fsck");
    assert_eq!(code, 6, "{line}");
    // Nothing that a repair could mend is amiss once its volume is gone.
    home.ok(["volume", "delete", "v", "--yes"]);
    home.ok(["gc"]);
    assert_eq!(home.json(["fsck"])["problems"], 0);
}

#[test]
fn trees_are_copied_in_and_out_and_again() {
    let home = Home::new();
    home.ok(["volume", "create", "v"]);
    let source = home.dir.path().join("source");
    std::fs::create_dir_all(source.join("sub")).unwrap();
    for i in 0..20 {
        std::fs::write(source.join(format!("sub/{i}")), vec![i as u8; i * 1_000]).unwrap();
    }
    let (code, line) = home.fails(["cp", "source", "v:/copy"]);
    assert!(line.contains("-r"), "{code}: {line}");
    assert_eq!(home.json(["cp", "-r", "source", "v:/copy"])["files"], 20);
    assert_eq!(home.json(["cp", "-r", "source", "v:/copy"])["unchanged"], 20);
    home.ok(["snapshot", "create", "v@s"]);
    let bucket = format!("file://{}/bucket", home.dir.path().display());
    std::fs::create_dir(home.dir.path().join("bucket")).unwrap();
    home.ok(["cp", "-r", "v@s:/copy", &bucket]);
    home.ok(["cp", "-r", &bucket, "back"]);
    home.ok(["cp", "v:/copy/sub/7", "seven"]);
    assert_eq!(std::fs::read(home.dir.path().join("seven")).unwrap(), vec![7; 7_000]);
    for i in 0..20 {
        let copy = std::fs::read(home.dir.path().join(format!("back/sub/{i}"))).unwrap();
        assert_eq!(copy, vec![i as u8; i * 1_000]);
    }
    let (code, line) = home.fails(["cp", "v:/missing", "x"]);
    assert!(code == 3 && line.contains("missing"), "{line}");
    assert_eq!(home.fails(["cp", "bad name:/x", "y"]).0, 2);
}
