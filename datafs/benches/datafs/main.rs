//! The datafs benchmark (`make bench-datafs`): volumes and mounts against the local file system of the same
//! disk, in one run.
//!
//! A child process serves every mount: the process that uses a mount must not be the one that serves it.
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr, missing_docs)]

#[path = "../../../benches/figure.rs"]
mod figure;
mod git;
mod huge;
#[path = "../../../src/idle_cores.rs"]
mod idle_cores;
mod large;
mod names;
#[path = "../../tests/postgres/server.rs"]
mod pg_server;
mod place;
mod served;
mod small;
mod snapshots;
mod stores;
#[path = "../../../benches/waiting_cores.rs"]
mod waiting_cores;

use std::path::Path;

use figure::Figure;
// The allocator of the millrace program.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
use tikv_jemalloc_sys as _;

/// The options of the command line.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    names: Vec<String>,
    /// Fewer and smaller rounds, to check that everything runs and roughly how fast.
    pub(crate) quick: bool,
}

impl Asked {
    /// Whether to measure a figure: its name begins with a given one, or none was given.
    pub(crate) fn wants(&self, figure: &str) -> bool {
        self.names.is_empty() || self.names.iter().any(|name| figure.starts_with(name.as_str()))
    }

    fn wants_any(&self, figures: &[(&str, &str)]) -> bool {
        figures.iter().any(|(name, _)| self.wants(name))
    }

    /// `full` for a full run, `quick` under `--quick`.
    pub(crate) fn sized<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }
}

/// Figures that are measured together, each with its description.
struct Group {
    figures: &'static [(&'static str, &'static str)],
    run: fn(&Asked, &mut dyn FnMut(Figure)),
}

const GROUPS: &[Group] = &[
    Group { figures: large::READS, run: large::reads },
    Group { figures: large::WRITES, run: large::writes },
    Group { figures: small::FIGURES, run: small::run },
    Group { figures: names::FIGURES, run: names::run },
    Group { figures: names::FIGURES_PG, run: names::run_pg },
    Group { figures: git::FIGURES, run: git::run },
    Group { figures: stores::FIGURES, run: stores::run },
    Group { figures: snapshots::FIGURES, run: snapshots::run },
    Group { figures: huge::FIGURES, run: huge::run },
];

/// The command that marks the generated table.
const COMMAND: &str = "make bench-datafs";

fn main() {
    let mut asked = Asked::default();
    let (mut write, mut as_is) = (None, false);
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            served::SERVE => return served::serve(arguments.collect()),
            "--quick" => asked.quick = true,
            "--as-is" => as_is = true,
            "--write" => write = Some(arguments.next().expect("--write takes a file")),
            "--help" | "-h" => return help(),
            name if name.starts_with('-') => panic!("no option {name}: --help lists them"),
            name => asked.names.push(name.trim_start_matches("datafs/").to_owned()),
        }
    }
    for name in &asked.names {
        let known = GROUPS.iter().flat_map(|group| group.figures).any(|(figure, _)| figure.starts_with(name));
        assert!(known, "no figure begins with {name}: --help lists them");
    }
    // Cargo runs this in the folder of the crate; file arguments are relative to the workspace.
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let write = write.map(|file| workspace.join(file));
    if let Some(file) = &write {
        figure::parts(file, COMMAND);
    }
    let _waiting = (!as_is).then(waiting_cores::WaitingCores::begin);
    let mut figures = Vec::new();
    for group in GROUPS.iter().filter(|group| asked.wants_any(group.figures)) {
        (group.run)(&asked, &mut |figure| {
            if asked.wants(figure.name.trim_start_matches("datafs/")) {
                println!("{figure}");
                figures.push(figure);
            }
        });
    }
    if let Some(file) = write {
        figure::write(&file, COMMAND, &figures);
    }
}

fn help() {
    println!(
        "make bench-datafs ARGS=\"[--quick] [--as-is] [--write FILE] [NAME...]\"\n\n\
         Prints `datafs/<figure> <value> <unit> control=<value> ratio=<x>`; more is better, 1.00 is the\n\
         control, which runs in turn with ours on the same disk. A NAME chooses the figures that begin\n\
         with it. --quick measures less. --write replaces the generated table of a Markdown file (from the\n\
         root of the workspace). Dropping the kernel's caches needs root; without it cold figures are\n\
         skipped. In a virtual machine whose idle cores halt at once they wait a moment first while this\n\
         runs, as is the kernel's default; --as-is leaves the machine as it is.\n"
    );
    for (name, what) in GROUPS.iter().flat_map(|group| group.figures) {
        println!("  {name:<24} {what}");
    }
}
