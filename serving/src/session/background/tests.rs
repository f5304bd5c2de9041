//! Which run goes first, on which thread, and what becomes of the others.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::AtomicU64;
use std::sync::mpsc;

use super::*;

#[test]
fn a_model_that_has_run_little_goes_first() {
    let background: &'static Background = Box::leak(Box::new(Background::new(|| true)));
    let (large, small) = (Account::default(), Account::default());
    let (go, gate) = mpsc::channel::<()>();
    let (tell, told) = mpsc::channel();
    let submit = |account: &Account, micros, run: Run| {
        assert!(background.submit(account, micros, 1, run).is_none());
    };
    // Holds the only thread, so that the others wait.
    submit(&large, 10_000, Box::new(move || gate.recv().unwrap()));
    for (account, name, micros, runs) in [(&large, "large", 10_000, 3), (&small, "small", 200, 4)] {
        for run in 0..runs {
            let tell = tell.clone();
            submit(account, micros, Box::new(move || tell.send((name, run)).unwrap()));
        }
    }
    go.send(()).unwrap();
    let order: Vec<_> = (0..7).map(|_| told.recv().unwrap()).collect();
    let small: Vec<_> = (0..4).map(|run| ("small", run)).collect();
    let large: Vec<_> = (0..3).map(|run| ("large", run)).collect();
    assert_eq!(order, [small, large].concat());
}

#[test]
fn a_run_that_panics_leaves_its_thread_to_the_others() {
    let background: &'static Background = Box::leak(Box::new(Background::new(|| true)));
    let account = Account::default();
    let (tell, told) = mpsc::channel();
    background.submit(&account, 1_000_000, 1, Box::new(|| panic!("on purpose")));
    background.submit(&account, 1_000_000, 1, Box::new(move || tell.send(class()).unwrap()));
    let there = told.recv().unwrap();
    assert_eq!(there, of(Way::Idle));
}

#[test]
fn a_model_that_is_used_alone_gives_way_to_nobody() {
    let background: &'static Background = Box::leak(Box::new(Background::new(|| false)));
    let (tell, told) = mpsc::channel();
    let run = Box::new(move || tell.send(class()).unwrap());
    background.submit(&Account::default(), 1, 1, run);
    assert_eq!(told.recv().unwrap(), class());
}

#[tokio::test]
async fn a_run_is_followed_by_one_other_at_most() {
    let account = Account::default();
    let (tell, told) = oneshot::channel();
    assert!(!is_free_next(), "this is not a thread for long runs");
    let own = account.id;
    let first = move || {
        let before = is_free_next();
        follow(&Account { id: own, finish: AtomicU64::new(0) }, 1, move || {
            tell.send(is_free_next()).unwrap()
        });
        Ok((before, is_free_next()))
    };
    assert_eq!(run(&account, 1, 1, first).await.unwrap(), (true, false));
    assert!(told.await.unwrap(), "that one may be followed, too");
}

#[test]
fn who_ends_waits_for_runs_under_way_and_no_more_begin() {
    let background: &'static Background = Box::leak(Box::new(Background::new(|| false)));
    let account = Account::default();
    let (go, gate) = mpsc::channel::<()>();
    let (tell, told) = mpsc::channel();
    let tell_begun = tell.clone();
    let run = move || {
        tell_begun.send("begun").unwrap();
        gate.recv().unwrap();
    };
    background.submit(&account, 1, 1, Box::new(run));
    assert_eq!(told.recv().unwrap(), "begun");
    assert!(!background.end(Duration::from_millis(1)), "it runs");
    background.submit(&account, 1, 1, Box::new(move || tell.send("another").unwrap()));
    go.send(()).unwrap();
    assert!(background.end(Duration::from_secs(60)));
    assert!(told.try_recv().is_err(), "it was to begin no more");
}

#[test]
fn runs_that_starve_are_fed_for_a_while() {
    let background: &'static Background = Box::leak(Box::new(Background::new(|| true)));
    let account = Account::default();
    let (tell, told) = mpsc::channel();
    let class_of_next = |background: &'static Background| {
        let tell = tell.clone();
        background.submit(&account, 1, 1, Box::new(move || tell.send(class()).unwrap()));
        told.recv().unwrap()
    };
    // It gets its time, but as if it had not. The other one waits behind it, for a thread of another kind.
    let slow = STARVING_MIN + Duration::from_millis(1);
    background.submit(&account, 1, 1, Box::new(move || std::thread::sleep(slow)));
    assert_eq!(class_of_next(background), of(Way::Nice));
    assert_eq!(class_of_next(background), of(Way::Nice));
    background.state.lock().fed_until = Some(Instant::now());
    assert_eq!(class_of_next(background), of(Way::Idle));
}

/// How this thread is scheduled: its policy and how nice it is.
fn class() -> (i32, i32) {
    // SAFETY: 0 is the calling thread; no memory is involved.
    (unsafe { libc::sched_getscheduler(0) }, niceness())
}

/// How one is that gives way so. A sandbox may forbid what any Linux allows.
fn of(way: Way) -> (i32, i32) {
    std::thread::spawn(move || {
        let _ = way.give();
        class()
    })
    .join()
    .unwrap()
}
