//! Model test: random operations of two sessions on one volume, compared with a model in memory that knows
//! nothing of epochs, extents or transactions. In the model, snapshots are copies and files are vectors.
//!
//! A sequence follows from its seed. A failing sequence is run again with fewer and fewer steps. The steps
//! that are left are printed with the command that runs them:
//! `MILLRACE_MODEL_SEED=7 MILLRACE_MODEL_KEEP=3,8,21 cargo test -p millrace-datafs --lib one_sequence`.
//!
//! Some sequences run with maintenance beside them (`beside.rs`). Their result depends on the scheduler too,
//! so a failing one is not reduced: its seed and step are printed.

mod beside;
mod check;
mod files;
mod listing;
mod names;
mod step;
mod world;

use std::cell::Cell;
use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};

use step::{Step, steps};
use world::World;

/// Steps of a sequence.
const LENGTH: usize = 400;
/// Times that a failing sequence is tried with fewer steps.
const ATTEMPTS_MAX: usize = 400;

/// Runs a sequence; `at` is the number of the current step.
fn run(seed: u64, steps: &[(usize, Step)], at: &Cell<usize>) {
    let mut world = World::new(seed);
    for (number, step) in steps {
        at.set(*number);
        world.apply(step);
    }
    at.set(usize::MAX);
    world.finish();
}

/// Runs the sequence of a seed; panics with the shortest failing one that it finds.
fn check(seed: u64, length: usize) {
    let mut kept: Vec<(usize, Step)> = steps(seed, length).into_iter().enumerate().collect();
    let at = Cell::new(0);
    let fails = |steps: &[(usize, Step)]| {
        catch_unwind(AssertUnwindSafe(|| run(seed, steps, &at))).is_err().then(|| at.get())
    };
    let Some(last) = fails(&kept) else { return };
    kept.retain(|(number, _)| *number <= last);
    let (mut chunk, mut attempts) = (kept.len().div_ceil(2), 0);
    loop {
        let mut start = 0;
        while start < kept.len() && attempts < ATTEMPTS_MAX {
            attempts += 1;
            let mut fewer = kept.clone();
            fewer.drain(start..(start + chunk).min(kept.len()));
            if fails(&fewer).is_some() { kept = fewer } else { start += chunk }
        }
        if chunk == 1 || attempts >= ATTEMPTS_MAX {
            break;
        }
        chunk = chunk.div_ceil(2);
    }
    let keep: Vec<String> = kept.iter().map(|(number, _)| number.to_string()).collect();
    let mut story = String::new();
    for (number, Step { actor, op }) in &kept {
        let _ = writeln!(story, "  {number:>4} session {actor}: {op:?}");
    }
    panic!(
        "seed {seed} fails; the steps that are left of it:\n{story}MILLRACE_MODEL_SEED={seed} \
         MILLRACE_MODEL_KEEP={} cargo test -p millrace-datafs --lib one_sequence",
        keep.join(",")
    );
}

/// Runs the sequence of a seed with maintenance beside it.
fn check_beside_maintenance(seed: u64, length: usize) {
    let at = Cell::new(0);
    let run = || {
        let mut world = World::with_maintenance(seed);
        for (number, step) in steps(seed, length).iter().enumerate() {
            at.set(number);
            world.apply(step);
        }
        at.set(usize::MAX);
        world.finish();
    };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(run)) {
        let all = steps(seed, length);
        let step = all.get(at.get()).map_or_else(|| "the end".to_owned(), |step| format!("{step:?}"));
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a text");
        panic!("seed {seed} fails beside maintenance at step {} ({step}): {text}", at.get());
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

#[test]
fn two_sessions_agree_with_the_model() {
    for seed in 0..10 {
        check(seed, LENGTH);
    }
}

#[test]
fn two_sessions_agree_with_the_model_beside_maintenance() {
    for seed in 0..8 {
        check_beside_maintenance(seed, LENGTH / 2);
    }
}

/// Runs the steps of one sequence, as a failure has printed them; nothing without `MILLRACE_MODEL_SEED`.
#[test]
fn one_sequence() {
    let Some(seed) = number("MILLRACE_MODEL_SEED") else { return };
    let keep = std::env::var("MILLRACE_MODEL_KEEP").unwrap_or_default();
    let keep: Vec<usize> = keep.split(',').filter_map(|number| number.parse().ok()).collect();
    let mut all: Vec<(usize, Step)> = steps(seed, LENGTH).into_iter().enumerate().collect();
    if !keep.is_empty() {
        all.retain(|(number, _)| keep.contains(number));
    }
    run(seed, &all, &Cell::new(0));
}

/// Runs as many steps as `MILLRACE_MODEL_STEPS` says, from the sequence `MILLRACE_MODEL_SEED` on, all of them
/// beside maintenance.
#[test]
#[ignore = "takes an hour: cargo test -p millrace-datafs --lib a_million_steps -- --ignored --nocapture"]
#[allow(clippy::print_stderr)]
fn a_million_steps_agree_with_the_model() {
    let count = number("MILLRACE_MODEL_STEPS").unwrap_or(1_000_000);
    let first = number("MILLRACE_MODEL_SEED").unwrap_or(1_000);
    let begin = std::time::Instant::now();
    for i in 0..count.div_ceil(LENGTH as u64) {
        check_beside_maintenance(first + i, LENGTH);
        if i % 100 == 99 {
            let done = (i + 1) * LENGTH as u64;
            eprintln!("{done} of {count} steps agree, {} s", begin.elapsed().as_secs());
        }
    }
}

/// Runs fewer and shorter sequences on the engine that the thread's tests use.
pub(super) fn some_operations_agree_with_the_model(sequences: u64) {
    for seed in 0..sequences {
        check(seed, LENGTH / 4);
    }
}
