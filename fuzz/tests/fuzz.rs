//! The fuzzer: libFuzzer on the targets of this crate, each in a process of its own.
//!
//! `fuzz [--seconds N] [--jobs N] [--fixed N] [TARGET…]` writes the seeds of each target to its working corpus, runs it,
//! and fails if an input breaks a property. The input is then in a file that the output names. With `--fixed`, N is the
//! number that libFuzzer's choices start from, and the corpus is that of the repository only: a run repeats an earlier
//! one as far as the program under test does, and a new finding is one of the change at hand.
//!
//! `fuzz/rustc` compiles the crates under test with the coverage counters that libFuzzer reads.
#![allow(unsafe_code, clippy::print_stderr)]

use std::collections::VecDeque;
use std::ffi::{CString, c_char, c_int};
use std::fs;
use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Mutex, OnceLock};

use libfuzzer_sys as _;
use millrace_fuzz::{TARGETS, Target};

/// Seconds for one input, which takes microseconds where nothing is wrong.
const TIMEOUT_SECONDS: u64 = 10;
/// MiB of a process; the targets check their own memory more strictly.
const MEMORY_MIB: u64 = 2048;
/// The variable with the target of a child process.
const TARGET: &str = "MILLRACE_FUZZ_TARGET";

unsafe extern "C" {
    /// The main function of libFuzzer, which reads its options from the arguments.
    fn LLVMFuzzerRunDriver(
        count: *mut c_int,
        arguments: *mut *mut *mut c_char,
        run: extern "C" fn(*const u8, usize) -> c_int,
    ) -> c_int;
}

static RUNNING: OnceLock<&Target> = OnceLock::new();

fn main() -> ExitCode {
    match std::env::var(TARGET) {
        Ok(name) => child(&name),
        Err(_) => parent(),
    }
}

/// Runs libFuzzer in this process.
fn child(name: &str) -> ExitCode {
    let target = Target::named(name).expect("the parent names a target");
    RUNNING.get_or_init(|| target);
    millrace_fuzz::print_panics_briefly();
    let arguments = std::env::args().map(|argument| CString::new(argument).expect("an argument without 0"));
    let mut arguments: Vec<*mut c_char> = arguments.map(CString::into_raw).collect();
    let mut count = c_int::try_from(arguments.len()).expect("a few arguments");
    arguments.push(std::ptr::null_mut());
    let mut arguments = arguments.as_mut_ptr();
    // SAFETY: the arguments are a list of C strings that ends with a null pointer, and live as long as the process.
    let code = unsafe { LLVMFuzzerRunDriver(&mut count, &mut arguments, run) };
    ExitCode::from(u8::from(code != 0))
}

extern "C" fn run(input: *const u8, length: usize) -> c_int {
    // SAFETY: libFuzzer passes `length` bytes that stay unchanged during the call; a pointer to none may be null.
    let input = if length == 0 { &[] } else { unsafe { std::slice::from_raw_parts(input, length) } };
    // Panics that the code under test catches are no failures.
    if let Some(target) = RUNNING.get()
        && catch_unwind(AssertUnwindSafe(|| target.check(input))).is_err()
    {
        std::process::abort();
    }
    0
}

/// Runs a child for each target.
fn parent() -> ExitCode {
    let (mut seconds, mut jobs, mut fixed, mut names) = (60, 1, 0, Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let number = match argument.as_str() {
            "--seconds" => &mut seconds,
            "--jobs" => &mut jobs,
            "--fixed" => &mut fixed,
            name => {
                names.push(name.to_owned());
                continue;
            }
        };
        *number =
            arguments.next().and_then(|text| text.parse::<u64>().ok()).expect("a number after the option");
    }
    let unknown: Vec<_> = names.iter().filter(|name| Target::named(name).is_none()).collect();
    if !unknown.is_empty() {
        let known: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
        eprintln!("no such fuzz target: {unknown:?}; use one of {known:?}");
        return ExitCode::FAILURE;
    }
    let wanted =
        TARGETS.iter().filter(|target| names.is_empty() || names.iter().any(|name| name == target.name));
    let waiting = Mutex::new(wanted.collect::<VecDeque<_>>());
    let failed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                while let Some(target) = next(&waiting) {
                    if !fuzz(target, seconds, NonZeroU64::new(fixed)) {
                        failed.lock().expect("no thread panics").push(target.name);
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().expect("no thread panics");
    if failed.is_empty() {
        return ExitCode::SUCCESS;
    }
    eprintln!("fuzz targets that failed: {failed:?}");
    ExitCode::FAILURE
}

fn next(waiting: &Mutex<VecDeque<&'static Target>>) -> Option<&'static Target> {
    waiting.lock().expect("no thread panics").pop_front()
}

/// Fuzzes one target; false if an input fails.
fn fuzz(target: &Target, seconds: u64, fixed: Option<NonZeroU64>) -> bool {
    let work = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fuzz");
    let corpus =
        work.join(if fixed.is_some() { format!("{}-fixed", target.name) } else { target.name.to_owned() });
    if fixed.is_some() && corpus.exists() {
        fs::remove_dir_all(&corpus).expect("the folder of builds gives up the corpus");
    }
    let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
    fs::create_dir_all(&corpus).expect("the folder of builds takes the corpus");
    for (number, seed) in (target.seeds)().into_iter().enumerate() {
        fs::write(corpus.join(format!("seed-{number:03}")), seed)
            .expect("the folder of builds takes the corpus");
    }
    let artifact = work.join(format!("{}-failed-", target.name));
    let log = work.join(format!("{}.log", target.name));
    let output = fs::File::create(&log).expect("the folder of builds takes the log");
    let status = Command::new(std::env::current_exe().expect("the path of this program"))
        .env(TARGET, target.name)
        .arg(format!("-max_total_time={seconds}"))
        .args(fixed.map(|fixed| format!("-seed={fixed}")))
        .arg(format!("-max_len={}", target.bytes_max))
        .arg(format!("-timeout={TIMEOUT_SECONDS}"))
        .arg(format!("-rss_limit_mb={MEMORY_MIB}"))
        .arg(format!("-artifact_prefix={}", artifact.display()))
        .args(["-print_final_stats=1", "-verbosity=1", "-handle_abrt=1"])
        .arg(&corpus)
        .args(Some(committed).filter(|folder| folder.exists()))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(output)
        .status()
        .expect("this program starts again");
    let text = String::from_utf8_lossy(&fs::read(&log).unwrap_or_default()).into_owned();
    let end = |count: usize| {
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(count)..].join("\n")
    };
    let of =
        |name: &str| text.lines().rev().find_map(|line| Some(line.split_once(name)?.1.trim().to_owned()));
    if !status.success() {
        eprintln!("{}: failed after {seconds} s at most; {}\n{}", target.name, log.display(), end(40));
        return false;
    }
    let runs = of("stat::number_of_executed_units:").unwrap_or_default();
    let covered = of(" cov: ").and_then(|rest| Some(rest.split(' ').next()?.to_owned())).unwrap_or_default();
    eprintln!("{}: {runs} inputs in {seconds} s, {covered} edges", target.name);
    true
}
