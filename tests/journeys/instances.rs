//! Tests of several instances on one machine.

use crate::support::{Home, failure};

#[test]
fn two_homes_run_side_by_side() {
    let (first, second) = (Home::new(), Home::new());
    let mut one = first.start(["quickstart", "--keep", "--free-ports", "--json", "--workers", "1"]);
    let mut two = second.start(["quickstart", "--keep", "--free-ports", "--json", "--workers", "1"]);
    let (one_report, two_report) = (one.object(), two.object());
    for name in ["kafka", "grpc", "http", "metrics"] {
        assert_ne!(one_report["addresses"][name], two_report["addresses"][name], "{name}");
    }
    assert_eq!(one_report["model_sha256"], two_report["model_sha256"]);
    assert_eq!((one.stop(), two.stop()), (0, 0));
}

#[test]
fn second_up_on_a_home_names_the_holder() {
    let home = Home::new();
    let config = home.file("m.toml", "[streams.broker]\nlisten = \"127.0.0.1:0\"\n[up]\nvolumes = [\"v\"]\n");
    let config = config.to_str().unwrap();
    let mut up = home.start(["--config", config, "up", "--json"]);
    up.object();
    let output = home.run(["--config", config, "up"]);
    let (code, line) = failure(&output, "a second up");
    assert_eq!(code, 4, "{line}");
    assert!(line.contains(&format!("process {}", up.pid())), "{line}");
    assert!(line.contains("millrace up"), "{line}");
    assert_eq!(up.stop(), 0);
    // The lock file of a dead process blocks no other process.
    let mut again = home.start(["--config", config, "up", "--json"]);
    again.object();
    assert_eq!(again.stop(), 0);
}
