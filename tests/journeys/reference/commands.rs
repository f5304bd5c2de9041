//! Generator of the command pages, from the output of `--help`.

use super::{Page, page, program};
use crate::support::Home;

/// Pages with their titles and commands; a longer command belongs to the page with its longest prefix.
const PAGES: [(&str, &str, &[&str]); 21] = [
    ("cli/service.md", "Commands: the program and its service", &["", "quickstart", "up", "completions"]),
    ("cli/config.md", "Commands: configuration", &["config"]),
    ("cli/volumes.md", "Commands: volumes", &["volume", "snapshot", "ls", "cp"]),
    (
        "cli/upkeep.md",
        "Commands: upkeep of volumes",
        &["backup", "restore", "fsck", "compact", "warmup", "gc"],
    ),
    ("cli/mounts.md", "Commands: mounts", &["mount", "umount", "holder", "stats", "trace"]),
    ("cli/topics.md", "Commands: topics", &["produce", "topic", "ingest", "broker"]),
    ("cli/feed.md", "Commands: feed", &["feed", "feed head"]),
    ("cli/feed-map.md", "Commands: transforming datasets", &["feed map"]),
    ("cli/datasets.md", "Commands: datasets", &["feed plan", "feed stats"]),
    ("cli/feed-verify.md", "Commands: checking and measuring the feed", &["feed verify", "feed bench"]),
    ("cli/feed-serve.md", "Commands: serving the feed", &["feed serve"]),
    ("cli/models.md", "Commands: models", &["model"]),
    ("cli/training.md", "Commands: training", &["train"]),
    ("cli/train-render.md", "Commands: manifests of a training", &["train --render"]),
    ("cli/quantize.md", "Commands: quantizing", &["model quantize"]),
    ("cli/runs.md", "Commands: workers and runs", &["worker", "runs"]),
    ("cli/rollout.md", "Commands: labels, splits, shadows", &["model label", "model split", "model shadow"]),
    ("cli/serving.md", "Commands: serving", &["serve"]),
    ("cli/bench.md", "Commands: measuring a server", &["serve bench"]),
    ("cli/predict.md", "Commands: predicting", &["predict", "pipe"]),
    ("cli/kubernetes.md", "Commands: parts of Kubernetes", &["scaler", "csi"]),
];

/// Groups of flags with a page of their own: command, heading of the group, and name in [`PAGES`].
const GROUPS: [(&str, &str, &str); 1] = [("train", "Manifests:", "train --render")];

/// Flags of every command, documented once for the program.
const GLOBAL: [&str; 5] = ["--home", "--config", "--json", "--log", "--help"];

pub(super) fn pages(home: &Home) -> Vec<Page> {
    let mut bodies = vec![String::new(); PAGES.len()];
    let mut pending = vec![Vec::<String>::new()];
    while let Some(command) = pending.pop() {
        let mut help = help(home, &command);
        for (of, heading, name) in GROUPS.into_iter().filter(|(of, _, _)| *of == command.join(" ")) {
            let group = take_group(&mut help, heading);
            bodies[place(name)] += &format!(
                "## `millrace {name}`\n\nFlags of [`millrace {of}`](training.md) that decide the manifests.\n\n```text\n{group}\n```\n\n"
            );
        }
        let mut below: Vec<_> =
            subcommands(&help).into_iter().map(|name| [&command[..], &[name]].concat()).collect();
        bodies[place(&command.join(" "))] += &section(&command, &help);
        // Reversed, since commands are taken from the end.
        below.reverse();
        pending.extend(below);
    }
    let note = "Every command also takes [the flags of the program](service.md#millrace).\n\n";
    let all = PAGES.iter().zip(bodies);
    all.map(|((path, title, _), body)| page(path, title, &format!("{note}{body}"))).collect()
}

/// The output of `--help`, at a width that does not depend on the terminal.
fn help(home: &Home, command: &[String]) -> String {
    let mut program = program(home);
    program.env_remove("MILLRACE_HOME").env("COLUMNS", "110").args(command).arg("--help");
    let output = program.output().unwrap();
    assert!(output.status.success(), "millrace {command:?} --help: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Removes a group of flags from a help text and returns it.
fn take_group(help: &mut String, heading: &str) -> String {
    let lines: Vec<&str> = help.lines().collect();
    let begin = lines.iter().position(|line| *line == heading);
    let begin = begin.unwrap_or_else(|| panic!("no group {heading} in\n{help}"));
    let within = |line: &&&str| line.is_empty() || line.starts_with(' ');
    let end = begin + 1 + lines[begin + 1..].iter().take_while(within).count();
    let group = lines[begin..end].join("\n").trim_end().to_owned();
    let kept = [&lines[..begin], &lines[end..]].concat().join("\n");
    *help = kept;
    group
}

fn subcommands(help: &str) -> Vec<String> {
    let Some(list) = help.split("\nCommands:\n").nth(1) else { return Vec::new() };
    let lines = list.lines().take_while(|line| line.starts_with("  "));
    let names =
        lines.filter(|line| !line.starts_with("   ")).filter_map(|line| line.split_whitespace().next());
    names.filter(|name| *name != "help").map(str::to_owned).collect()
}

/// The index of a command's page.
fn place(command: &str) -> usize {
    let fits =
        |known: &str| known == command || (!known.is_empty() && command.starts_with(&format!("{known} ")));
    let longest =
        |known: &[&str]| known.iter().filter(|known| fits(known)).map(|known| known.len() + 1).max();
    let best = (0..PAGES.len()).max_by_key(|page| longest(PAGES[*page].2).unwrap_or(0)).unwrap();
    assert!(longest(PAGES[best].2).is_some(), "millrace {command} is on no page: add it to PAGES");
    best
}

fn section(command: &[String], help: &str) -> String {
    let name = [&["millrace".to_owned()], command].concat().join(" ");
    let (about, usage) = help.split_once("\nUsage: ").unwrap_or_else(|| panic!("{name} --help has no usage"));
    let usage = if command.is_empty() { usage.to_owned() } else { without_globals(usage) };
    let about = about.trim();
    let stop = if about.ends_with('.') { "" } else { "." };
    let usage: Vec<_> = usage.lines().map(str::trim_end).collect();
    format!("## `{name}`\n\n{about}{stop}\n\n```text\nUsage: {}\n```\n\n", usage.join("\n").trim_end())
}

/// The help without global flags, and without headings and blank lines that then have no content.
fn without_globals(help: &str) -> String {
    let mut kept: Vec<&str> = Vec::new();
    let mut skipped = false;
    for line in help.lines() {
        let indent = line.len() - line.trim_start().len();
        let flag = line.split_whitespace().find(|word| word.starts_with("--"));
        let begins = (2..=6).contains(&indent) && line.trim_start().starts_with('-');
        if begins {
            skipped = flag.is_some_and(|flag| GLOBAL.contains(&flag));
        } else if !line.trim().is_empty() && indent < 10 {
            skipped = false;
        }
        let blank = line.trim().is_empty();
        let twice = blank && kept.last().is_none_or(|last| last.trim().is_empty());
        if (blank && !twice) || (!blank && !skipped) {
            kept.push(line);
        }
    }
    let text = kept.join("\n");
    // Paragraphs that consist of a heading alone.
    let empty = |paragraph: &&str| paragraph.trim() != "Options:";
    text.split("\n\n").filter(empty).collect::<Vec<_>>().join("\n\n")
}
