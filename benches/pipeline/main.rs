//! `make bench`: figures of every area, each against a control in the same run. Those of `datafs` are a
//! target of that crate, `make bench-datafs`, and those of the model server one of their own,
//! `make bench-serving`.
//!
//! Prints `<area>/<figure> <value> <unit> control=<value> ratio=<x>`. The ratio is ours to the
//! control for rates and the control to ours for times: more is better and 1.00 is the control.
//! Arguments choose areas (`ingest feed trainer`; none means all);
//! `--write FILE` replaces the generated table in that Markdown file.
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr, missing_docs)]

mod feed;
#[allow(dead_code, reason = "all figures here are rates, those of other targets are not")]
#[path = "../figure.rs"]
mod figure;
mod ingest;
mod trainer;
mod turns;

use figure::Figure;
// The allocator that the program has.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
use tikv_jemalloc_sys as _;

/// What the generated table is marked with.
const COMMAND: &str = "make bench";

fn main() {
    let mut areas = Vec::new();
    let mut write = None;
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--write" => write = Some(arguments.next().expect("--write takes a file")),
            _ => areas.push(argument),
        }
    }
    type Bench = fn() -> Vec<Figure>;
    let all: [(&str, Bench); 3] =
        [("ingest", ingest::figures), ("feed", feed::figures), ("trainer", trainer::figures)];
    if let Some(unknown) = areas.iter().find(|area| !all.iter().any(|(name, _)| name == area)) {
        panic!("no area {unknown}: there are ingest, feed and trainer");
    }
    if let Some(file) = &write {
        figure::parts(std::path::Path::new(file), COMMAND);
    }
    let mut figures = Vec::new();
    for (name, bench) in all {
        if areas.is_empty() || areas.iter().any(|area| area == name) {
            for figure in bench() {
                println!("{figure}");
                figures.push(figure);
            }
        }
    }
    if let Some(file) = write {
        figure::write(std::path::Path::new(&file), COMMAND, &figures);
    }
}
