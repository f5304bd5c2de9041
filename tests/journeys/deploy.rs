//! Files of `deploy/` against the program: configurations that it accepts, metrics that it has.

use std::collections::BTreeSet;

use crate::support::{Home, files_below, project};

fn text_of(path: &str) -> String {
    let file = project().join(path);
    std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

/// Names of metrics in a text: words that begin with `millrace_`.
fn metrics_in(text: &str) -> BTreeSet<&str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|word| word.starts_with("millrace_"))
        .collect()
}

/// The block scalars with this key in rendered YAML, without their indentation.
fn blocks(text: &str, key: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        if line.trim() != format!("{key}: |") {
            continue;
        }
        let indent = line.len() - line.trim_start().len() + 2;
        let mut block = String::new();
        while let Some(next) = lines.peek() {
            if !next.trim().is_empty() && next.len() - next.trim_start().len() < indent {
                break;
            }
            block.push_str(next.get(indent..).unwrap_or_default());
            block.push('\n');
            lines.next();
        }
        found.push(block);
    }
    found
}

#[test]
fn configurations_of_rendered_manifests_and_of_compose_are_accepted() {
    let home = Home::new();
    let mut configs: Vec<String> = ["millrace", "stack", "stack-pipeline"]
        .map(|name| text_of(&format!("deploy/compose/{name}.toml")))
        .into();
    for file in files_below(&project().join("deploy/manifests"), "yaml") {
        let text = std::fs::read_to_string(&file).unwrap();
        let found = blocks(&text, "millrace.toml");
        assert!(!found.is_empty(), "{} has no configuration", file.display());
        configs.extend(found);
    }
    for (number, config) in configs.iter().enumerate() {
        // Files of secrets are in the pod only.
        let file = home.file(&format!("config-{number}.toml"), config);
        let output = home
            .command()
            .env("KAFKA_PASSWORD", "a secret")
            .args(["--config", file.to_str().unwrap(), "config"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{config}\n{}", String::from_utf8_lossy(&output.stderr));
    }
    // A key that is wrong is seen.
    let wrong = home.file("wrong.toml", configs[0].replace("bootstrap_servers", "bootstrap_server"));
    assert!(home.fails(["--config", wrong.to_str().unwrap(), "config"]).1.contains("bootstrap_server"));
}

#[test]
fn dashboards_and_rules_name_metrics_that_exist() {
    let known: Vec<String> = files_below(&project().join("docs/reference/metrics"), "md")
        .iter()
        .map(|file| std::fs::read_to_string(file).unwrap())
        .collect();
    let known: BTreeSet<&str> = known.iter().flat_map(|text| metrics_in(text)).collect();
    let exists = |name: &str| {
        let base = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
        known.contains(name) || base.is_some_and(|base| known.contains(base))
    };
    let folder = project().join("deploy/helm/millrace/files");
    let files = [files_below(&folder, "json"), files_below(&folder, "yaml")].concat();
    assert!(files.len() > 3, "{files:?}");
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let names = metrics_in(&text);
        assert!(!names.is_empty(), "{}", file.display());
        for name in names {
            assert!(exists(name), "{} names the metric {name}, which does not exist", file.display());
        }
    }
    // The rules of the chart are those of the docs.
    let rules = text_of("deploy/helm/millrace/files/rules.yaml");
    assert!(text_of("docs/how-to/monitor.md").contains(rules.trim()));
}

#[test]
fn images_use_the_paths_of_the_program() {
    for name in ["deploy/Dockerfile", "deploy/Dockerfile.cuda"] {
        let text = text_of(name);
        assert!(text.contains("USER 10001:10001"), "{name}");
        assert!(text.contains("scripts/setup") && text.contains("cargo build --release --locked"), "{name}");
        for line in text.lines().filter_map(|line| line.strip_prefix("COPY --from=build /build/")) {
            let source = line.split_whitespace().next().unwrap();
            assert!(
                source.starts_with("target/release/") || source.starts_with(".local/"),
                "{name}: {source}"
            );
        }
    }
}
