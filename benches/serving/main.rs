//! `make bench-serving`: the model server against servers that do less, over gRPC, in one run.
//!
//! Every server is a process of its own, so that its processor time is its own; the load comes from this
//! one and runs on the same cores for all of them. Servers take turns within a round, and the best of the
//! rounds counts: whatever else the machine does only ever adds to a time.
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr, missing_docs)]

mod closed;
mod control;
#[allow(dead_code, reason = "the best of the rounds is taken here, not the median")]
#[path = "../figure.rs"]
mod figure;
#[path = "../../src/idle_cores.rs"]
mod idle_cores;
mod mixed;
mod models;
mod overload;
mod served;
#[path = "../waiting_cores.rs"]
mod waiting_cores;

use std::path::{Path, PathBuf};
use std::time::Duration;

use figure::Figure;
use served::Served;
// The allocator that the program has.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
use tikv_jemalloc_sys as _;

/// What was asked for.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    names: Vec<String>,
    /// One short round, to see that everything runs and roughly how fast.
    pub(crate) quick: bool,
    /// A server of somebody else's, which takes the place of the controls.
    pub(crate) other: Option<Other>,
}

/// A server that runs already.
#[derive(Debug, Clone)]
pub(crate) struct Other {
    pub(crate) address: String,
    /// Its process, if it runs on this machine: its processor time is read from there.
    pub(crate) pid: Option<u32>,
}

impl Asked {
    /// Whether a figure is wanted: its name begins with one of those given, or none was given.
    pub(crate) fn wants(&self, figure: &str) -> bool {
        self.names.is_empty() || self.names.iter().any(|name| figure.starts_with(name.as_str()))
    }

    fn wants_any(&self, figures: &[(&str, &str)]) -> bool {
        figures.iter().any(|(name, _)| self.wants(name))
    }

    pub(crate) fn rounds(&self) -> usize {
        if self.quick { 1 } else { 5 }
    }

    /// How long one measurement takes.
    pub(crate) fn window(&self) -> Duration {
        Duration::from_millis(if self.quick { 500 } else { 3000 })
    }
}

/// Figures that are measured together, each with what it is.
struct Group {
    figures: &'static [(&'static str, &'static str)],
    run: fn(&Asked, &Path, &Served, &mut dyn FnMut(Figure)),
    /// Whether the control is another server.
    compares: bool,
}

const GROUPS: &[Group] = &[
    Group { figures: closed::C1_TINY, run: closed::tiny_alone, compares: true },
    Group { figures: closed::C64_TINY, run: closed::tiny, compares: true },
    Group { figures: closed::C1_MEDIUM, run: closed::medium_alone, compares: true },
    Group { figures: closed::C64_MEDIUM, run: closed::medium, compares: true },
    Group { figures: mixed::FIGURES, run: mixed::run, compares: false },
    Group { figures: overload::FIGURES, run: overload::run, compares: false },
];

/// What the generated table is marked with.
const COMMAND: &str = "make bench-serving";

fn main() {
    let mut asked = Asked::default();
    let (mut write, mut as_is) = (None, false);
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            served::SERVE => return served::serve(arguments.collect()),
            "--quick" => asked.quick = true,
            "--as-is" => as_is = true,
            "--write" => write = Some(PathBuf::from(arguments.next().expect("--write takes a file"))),
            "--export" => {
                let folder = arguments.next().expect("--export takes a folder");
                return models::export(Path::new(&folder));
            }
            "--against" => {
                let address = arguments.next().expect("--against takes HOST:PORT");
                asked.other = Some(Other { address, pid: None });
            }
            "--pid" => {
                let pid = arguments.next().and_then(|pid| pid.parse().ok());
                let other = asked.other.as_mut().expect("--pid is of the server that --against names");
                other.pid = Some(pid.expect("--pid takes the number of a process"));
            }
            "--help" | "-h" => return help(),
            name if name.starts_with('-') => panic!("no option {name}: --help lists them"),
            name => asked.names.push(name.trim_start_matches("serving/").to_owned()),
        }
    }
    for name in &asked.names {
        let known = GROUPS.iter().flat_map(|group| group.figures).any(|(figure, _)| figure.starts_with(name));
        assert!(known, "no figure begins with {name}: --help lists them");
    }
    assert!(
        write.is_none() || asked.other.is_none(),
        "--write is for the controls of this program, not for --against"
    );
    if let Some(file) = &write {
        figure::parts(file, COMMAND);
    }
    let _waiting = (!as_is).then(waiting_cores::WaitingCores::begin);
    let folder = tempfile::tempdir().unwrap();
    models::write(folder.path());
    let ours = Served::start("ours", &folder.path().join(models::BUNDLES));
    let mut figures = Vec::new();
    let groups = GROUPS.iter().filter(|group| asked.wants_any(group.figures));
    for group in groups.filter(|group| asked.other.is_none() || group.compares) {
        (group.run)(&asked, folder.path(), &ours, &mut |figure| {
            if asked.wants(figure.name.trim_start_matches("serving/")) {
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
        "make bench-serving ARGS=\"[--quick] [--as-is] [--write FILE] [NAME...]\"\n\n\
         Prints `serving/<figure> <value> <unit> control=<value> ratio=<x>`; more is better, 1.00 is the\n\
         control. A NAME chooses the figures that begin with it. --quick measures one short round.\n\
         --write replaces the generated table of a Markdown file. In a virtual machine whose idle cores\n\
         halt at once they wait a moment first while this runs, as is the kernel's default; --as-is leaves\n\
         the machine as it is.\n\n\
         --against HOST:PORT [--pid PID] puts a server of yours in the place of the controls; it has the\n\
         models that --export DIR writes in Triton's layout (scripts/bench-triton does both). Its\n\
         processor time is measured where --pid names its process on this machine.\n"
    );
    for (name, what) in GROUPS.iter().flat_map(|group| group.figures) {
        println!("  {name:<18} {what}");
    }
}
