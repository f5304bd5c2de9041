//! Tests of the dependencies between crates, between the modules of a crate, and of seams inside them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use crate::support::{program, project};

/// Allowed direct dependencies of each crate on other crates, as in ARCHITECTURE.md.
const ALLOWED: [(&str, &[&str]); 18] = [
    ("leaf", &[]),
    ("testing", &[]),
    ("datafs", &["leaf"]),
    ("bundle", &["leaf"]),
    ("streams", &["leaf", "datafs"]),
    ("home", &["leaf", "datafs", "streams"]),
    ("csi", &["leaf", "datafs"]),
    ("ingest", &["leaf", "streams", "datafs"]),
    ("serving-core", &["leaf", "bundle", "datafs"]),
    ("serving-runtime", &["leaf", "serving-core", "bundle"]),
    ("serving-repository", &["leaf", "serving-runtime", "serving-core", "bundle", "datafs"]),
    ("serving-client", &["leaf", "serving-core", "bundle"]),
    (
        "serving-transport",
        &["leaf", "serving-repository", "serving-client", "serving-runtime", "serving-core", "bundle"],
    ),
    ("serving-pipe", &["leaf", "serving-repository", "serving-core", "streams", "datafs"]),
    (
        "serving",
        &[
            "serving-client",
            "serving-core",
            "serving-pipe",
            "serving-repository",
            "serving-runtime",
            "serving-transport",
        ],
    ),
    ("trainer", &["leaf", "bundle", "streams", "datafs"]),
    ("python", &["leaf", "home", "datafs", "streams"]),
    ("fuzz", &["bundle", "datafs", "streams", "ingest", "serving", "trainer"]),
];

#[test]
fn crates_depend_only_on_allowed_crates() {
    let tree = program(Command::new(env!("CARGO")).current_dir(project()).args([
        "tree",
        "--workspace",
        "--offline",
        "--locked",
        "--edges",
        "normal,build",
        "--no-dedupe",
        "--depth",
        "1",
        "--prefix",
        "depth",
        "--format",
        "{p}",
    ]));
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut room = None;
    for line in tree.lines() {
        let Some(package) = line.trim_start_matches(|c: char| c.is_ascii_digit()).split(' ').next() else {
            continue;
        };
        let name = package.strip_prefix("millrace-").map(str::to_owned);
        if line.starts_with('0') {
            room = name;
            if let Some(room) = &room {
                found.entry(room.clone()).or_default();
            }
        } else if let (Some(room), Some(name)) = (&room, name) {
            found.entry(room.clone()).or_default().insert(name);
        }
    }
    assert_eq!(
        found.keys().map(String::as_str).collect::<BTreeSet<_>>(),
        ALLOWED.iter().map(|(room, _)| *room).collect()
    );
    for (room, allowed) in ALLOWED {
        for other in &found[room] {
            assert!(allowed.contains(&other.as_str()), "{room} must not depend on {other}");
        }
    }
}

/// Serving must not depend on Kafka except in its pipe, and volumes must not depend on Parquet.
#[test]
fn crate_sources_do_not_name_forbidden_dependencies() {
    let forbidden = [("serving", "rdkafka", &["pipe"][..]), ("datafs/src", "parquet::", &[])];
    for (folder, word, except) in forbidden {
        for file in crate::support::files_below(&project().join(folder), "rs") {
            let path = file.display().to_string();
            if except.iter().any(|part| path.contains(part)) {
                continue;
            }
            let text = std::fs::read_to_string(&file).unwrap();
            let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
            assert!(!code.into_iter().any(|line| line.contains(word)), "{path} names {word}");
        }
    }
}

#[test]
fn modules_of_each_crate_depend_in_one_direction() {
    for folder in [
        "datafs/src",
        "deploy/csi/src",
        "serving/core/src",
        "serving/runtime/src",
        "serving/repository/src",
        "serving/client/src",
        "serving/transport/src",
        "serving/pipe/src",
    ] {
        no_module_cycles(folder);
    }
}

fn no_module_cycles(folder: &str) {
    let cycles: Vec<String> =
        module_cycles(&project().join(folder)).iter().map(|cycle| cycle.join(" -> ")).collect();
    assert!(cycles.is_empty(), "{folder} has cycles between its modules:\n{}", cycles.join("\n"));
}

#[test]
fn a_cycle_between_modules_is_found() {
    let src = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| {
        let path = src.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    write("lib.rs", "mod a;\nmod b;\nmod c;\nmod d;\n\npub use c::{C, deep::Deep};\n");
    write("a.rs", "use crate::{\n    b::B,\n    d,\n};\n");
    write("b.rs", "//! See [`crate::a`].\nmod inner;\n#[cfg(test)]\nmod tests {\n    use crate::a;\n}\n");
    write("b/inner.rs", "#[cfg(test)]\nmod checks;\nfn f(d: &str) -> String {\n    \"crate::a\".into()\n}\n");
    write("b/inner/checks.rs", "use crate::a::A;\n");
    write("c.rs", "use super::d;\n");
    write("d.rs", "");
    assert_eq!(module_cycles(src.path()), Vec::<Vec<String>>::new());
    // A cycle by a path in code, by a path from the parent, and by an item that the root exports.
    write("b/inner.rs", "fn f() {\n    super::super::c::f();\n}\n");
    write("d.rs", "use crate::Deep;\n");
    write("c.rs", "use crate::d;\nuse super::a;\n");
    let cycle = ["a", "b", "c", "a"].map(str::to_owned).to_vec();
    let cycles = module_cycles(src.path());
    assert!(cycles.contains(&cycle), "{cycles:?}");
    assert!(cycles.contains(&["c", "d", "c"].map(str::to_owned).to_vec()), "{cycles:?}");
}

/// For each module below `src` that uses itself through others, one shortest such cycle, first module repeated
/// at the end. Tests are left out: code and modules under `#[cfg(test)]`.
fn module_cycles(src: &Path) -> Vec<Vec<String>> {
    let root = code(&std::fs::read_to_string(src.join("lib.rs")).unwrap());
    let modules: BTreeSet<String> =
        words_after(&root, "mod ").filter(|name| has_source(src, name)).map(str::to_owned).collect();
    let exports = exports(&root, &modules);
    let mut uses: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for module in &modules {
        let used = uses.entry(module).or_default();
        visit(src, &[module], &mut |text, depth| {
            for path in paths(text, depth) {
                let first = path.split("::").next().unwrap_or_default();
                let target = modules.get(first).or_else(|| exports.get(first));
                used.extend(target.map(String::as_str).filter(|target| *target != module));
            }
        });
    }
    let mut cycles: BTreeMap<BTreeSet<&str>, Vec<String>> = BTreeMap::new();
    for module in &modules {
        if let Some(cycle) = shortest_cycle(module, &uses) {
            let names = cycle.iter().copied().collect();
            cycles.entry(names).or_insert_with(|| cycle.iter().map(|name| (*name).to_owned()).collect());
        }
    }
    cycles.into_values().collect()
}

/// The shortest way from a module over its uses back to itself.
fn shortest_cycle<'a>(module: &'a str, uses: &BTreeMap<&'a str, BTreeSet<&'a str>>) -> Option<Vec<&'a str>> {
    let mut seen = BTreeSet::new();
    let mut paths = std::collections::VecDeque::from([vec![module]]);
    while let Some(path) = paths.pop_front() {
        for next in &uses[path[path.len() - 1]] {
            let longer = [path.as_slice(), &[next]].concat();
            if *next == module {
                return Some(longer);
            }
            if seen.insert(*next) {
                paths.push_back(longer);
            }
        }
    }
    None
}

/// Calls `each` with the code of a module and of its submodules, and with their depth below the root.
fn visit(src: &Path, module: &[&str], each: &mut dyn FnMut(&str, usize)) {
    let base = src.join(module.join("/"));
    let Ok(text) = std::fs::read_to_string(base.with_extension("rs")) else { return };
    let text = code(&text);
    each(&text, module.len());
    for child in words_after(&text, "mod ") {
        visit(src, &[module, &[child]].concat(), each);
    }
}

fn has_source(src: &Path, module: &str) -> bool {
    src.join(module).with_extension("rs").exists()
}

/// Rust code without comments, without the contents of strings, and without what is under `#[cfg(test)]`.
fn code(text: &str) -> String {
    let mut code = String::new();
    let mut skipped: Option<String> = None;
    for line in text.lines() {
        let indent = &line[..line.len() - line.trim_start().len()];
        match &skipped {
            // The item under the attribute ends with its line, or with the brace at its indentation.
            Some(outer) => {
                let is_attribute = line.trim_start().starts_with("#[");
                let ends = line.trim_end().ends_with([';', ',']) || line.trim_end().ends_with('}');
                if indent == outer && !is_attribute && ends {
                    skipped = None;
                }
            }
            None if line.trim() == "#[cfg(test)]" => skipped = Some(indent.to_owned()),
            None => {
                let line = line.split("//").next().unwrap_or_default();
                // Every second part is inside quotes.
                code.extend(line.split('"').step_by(2).chain(["\n"]));
            }
        }
    }
    code
}

fn words_after<'a>(text: &'a str, before: &'a str) -> impl Iterator<Item = &'a str> {
    text.lines().filter_map(move |line| {
        let at = line.find(before)?;
        let is_declared = line[..at].is_empty() || line[..at].trim_start().starts_with("pub");
        line[at + before.len()..].strip_suffix(';').filter(|_| is_declared)
    })
}

/// The items that the root exports, with their modules.
fn exports(root: &str, modules: &BTreeSet<String>) -> BTreeMap<String, String> {
    let mut exports = BTreeMap::new();
    for statement in root.split(';').filter_map(|part| part.trim_start().strip_prefix("pub use ")) {
        for path in expanded(statement) {
            let parts: Vec<&str> = path.split("::").collect();
            if let (Some(module), Some(item)) = (modules.get(parts[0]), parts.last()) {
                exports.insert((*item).to_owned(), module.clone());
            }
        }
    }
    exports
}

/// The paths from the root that code at a depth names: those behind `crate`, and behind a `super` for each level.
fn paths(text: &str, depth: usize) -> Vec<String> {
    let root = "super::".repeat(depth);
    let starts = ["crate::", root.as_str()].into_iter().flat_map(|start| {
        text.match_indices(start).filter_map(move |(at, _)| {
            let is_start = !text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':');
            is_start.then_some(&text[at + start.len()..])
        })
    });
    starts.flat_map(expanded).collect()
}

/// The paths of a tree of paths, such as `a::{b, c::{d, e}}`; what follows the tree is ignored.
fn expanded(tree: &str) -> Vec<String> {
    let is_in_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let (head, rest) = tree.split_at(tree.find(|c| !is_in_path(c)).unwrap_or(tree.len()));
    let Some(rest) = rest.strip_prefix('{') else { return vec![head.to_owned()] };
    let mut paths = Vec::new();
    let (mut depth, mut start) = (0, 0);
    for (at, c) in rest.char_indices() {
        match c {
            ',' | '}' if depth == 0 => {
                let inner = expanded(rest[start..at].trim());
                paths
                    .extend(inner.iter().filter(|path| !path.is_empty()).map(|path| format!("{head}{path}")));
                if c == '}' {
                    break;
                }
                start = at + 1;
            }
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
    }
    paths
}
