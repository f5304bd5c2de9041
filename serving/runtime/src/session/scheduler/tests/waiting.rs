//! Scheduler tests of waiting requests: dropped calls, deadlines, and the delay for fuller batches.

use super::*;

#[test]
fn request_of_a_disconnected_caller_does_not_run() {
    let scheduler = scheduler(1, policy());
    drop(pending(&scheduler, rows(1, LONG, 1.0)));
    assert_eq!(rest(&scheduler), (1, 0));
    run_all(&scheduler);
    assert_eq!(runs(), []);
    assert_eq!(rest(&scheduler), (1, 0));
}

#[test]
fn run_of_disconnected_callers_is_ended() {
    for together in [1, 2] {
        for stays in [false, true] {
            let scheduler = scheduler(1, policy());
            let calls: Vec<Call> = (0..together).map(|_| pending(&scheduler, rows(1, LONG, 1.0))).collect();
            let calls = Rc::new(RefCell::new(calls));
            let going = Rc::clone(&calls);
            meanwhile(move || drop(going.borrow_mut().split_off(usize::from(stays))));
            run_all(&scheduler);
            let (ran, mut calls) = (runs(), calls.take());
            if stays {
                assert_eq!((ran, ENDED.get()), (vec![(together, LONG, true)], 0));
                assert_eq!(value(&mut calls[0]), 1.0);
            } else {
                assert_eq!((ran, ENDED.get()), (vec![], 1), "it is not repeated");
            }
            assert_eq!(rest(&scheduler), (1, 0));
        }
    }
}

#[tokio::test]
async fn deadline_that_passes_during_a_long_run_is_honoured() {
    let scheduler = scheduler(1, policy());
    let mut long = pending(&scheduler, rows(1, LONG, 1.0));
    let in_an_hour = Work { deadline: Some(now() + HOUR), ..rows(1, SHORT, 2.0) };
    let in_a_day = Work { deadline: Some(now() + 24 * HOUR), ..rows(1, SHORT, 3.0) };
    let (beside, calls) = (Arc::clone(&scheduler), Rc::new(RefCell::new(Vec::new())));
    let waiting = Rc::clone(&calls);
    meanwhile(move || {
        waiting.replace([in_an_hour, in_a_day].map(|work| pending(&beside, work)).into());
        pass(2 * HOUR);
    });
    run_all(&scheduler);
    assert_eq!(value(&mut long), 1.0);
    let [mut late, mut in_time] = <[Call; 2]>::try_from(calls.take()).ok().unwrap();
    let error = answer(&mut late).unwrap_err();
    assert!(matches!(&error, InferError::DeadlineExceeded { .. }), "{error}");
    assert!(error.to_string().contains("waited for a session for 7200"), "{error}");
    assert_eq!(value(&mut in_time), 3.0);
    assert_eq!(runs(), [(1, LONG, true), (1, SHORT, true)]);
}

#[tokio::test]
async fn deadline_ends_the_wait_without_a_session() {
    let scheduler = scheduler(0, policy());
    // The clock of the test stands still, but the timer of the runtime runs.
    let deadline = Some(Instant::now());
    let error = scheduler.run(Work { deadline, ..rows(1, SHORT, 1.0) }).await.unwrap_err();
    assert!(matches!(&error, InferError::DeadlineExceeded { .. }), "{error}");
    assert_eq!(rest(&scheduler), (0, 0));
    pass(HOUR);
    let error = scheduler.run(Work { deadline, ..rows(1, SHORT, 1.0) }).await.unwrap_err();
    assert!(matches!(&error, InferError::DeadlineExceeded { .. }), "{error}");
}

#[tokio::test]
async fn request_that_runs_at_its_deadline_is_answered() {
    let scheduler = scheduler(0, policy());
    let deadline = Instant::now() + Duration::from_millis(1);
    let submit = |value| {
        let work = Work { deadline: Some(deadline), ..rows(1, SHORT, value) };
        scheduler.submit(work, false, now()).unwrap().0
    };
    let (taken, queued) = (submit(1.0), submit(2.0));
    let job = scheduler.state.lock().queue.pop().unwrap();
    let reply = async {
        tokio::time::sleep_until((deadline + Duration::from_millis(1)).into()).await;
        job.reply.send(Err(InferError::invalid("told"))).unwrap();
    };
    let (told, ()) = tokio::join!(taken.answer(), reply);
    assert!(matches!(told, Err(InferError::Invalid { .. })), "{told:?}");
    let told = queued.answer().await;
    assert!(matches!(told, Err(InferError::DeadlineExceeded { .. })), "{told:?}");
    assert_eq!(scheduler.waiting(), 0);
}

#[tokio::test]
async fn request_that_had_to_wait_goes_on_waiting_for_a_full_batch() {
    for passes in [false, true] {
        let scheduler = scheduler(1, Policy { rows_max: 4, delay: HOUR, ..policy() });
        let mut long = pending(&scheduler, rows(4, LONG, 1.0));
        let mut calls = vec![pending(&scheduler, Work { queued: now(), ..rows(1, SHORT, 0.0) })];
        assert!(run_next(&scheduler));
        assert_eq!(value(&mut long), 1.0);
        run_all(&scheduler);
        assert_eq!((runs(), rest(&scheduler)), (vec![(4, LONG, true)], (1, 1)));
        let expected = if passes {
            pass(2 * HOUR);
            // The request's timer does the same.
            scheduler.change(|_| ());
            1
        } else {
            calls.extend((1..4).map(|number| pending(&scheduler, rows(1, SHORT, number as f32))));
            4
        };
        run_all(&scheduler);
        assert_eq!(runs(), [(expected, SHORT, true)]);
        for (number, call) in calls.iter_mut().enumerate() {
            assert_eq!(value(call), number as f32);
        }
    }
}

#[tokio::test]
async fn request_of_a_low_level_whose_delay_is_over_does_not_wait_behind_lingering_ones() {
    let scheduler = scheduler(1, Policy { rows_max: 4, delay: HOUR, ..policy() });
    let mut long = pending(&scheduler, rows(4, LONG, 1.0));
    let waits = |level, width, value| Work { level, queued: now(), ..rows(1, width, value) };
    let mut low = pending(&scheduler, waits(2, SHORT, 2.0));
    run_all(&scheduler);
    assert_eq!(value(&mut long), 1.0);
    pass(HOUR / 2);
    let mut high = pending(&scheduler, waits(1, SHORT + 1, 3.0));
    run_all(&scheduler);
    assert_eq!((runs(), rest(&scheduler)), (vec![(4, LONG, true)], (1, 2)));
    // The delay of the first request is over; the delay of the request before it in the queue is not.
    pass(HOUR / 2);
    scheduler.change(|_| ());
    run_all(&scheduler);
    assert_eq!((value(&mut low), value(&mut high)), (2.0, 3.0));
}

#[tokio::test]
async fn request_with_a_deadline_before_the_end_of_the_delay_does_not_wait_for_a_full_batch() {
    let scheduler = scheduler(1, Policy { rows_max: 4, delay: 2 * HOUR, ..policy() });
    let mut long = pending(&scheduler, rows(4, LONG, 1.0));
    let work = Work { queued: now(), deadline: Some(now() + HOUR), ..rows(1, SHORT, 2.0) };
    let mut urgent = pending(&scheduler, work);
    run_all(&scheduler);
    assert_eq!((value(&mut long), value(&mut urgent)), (1.0, 2.0));
    assert_eq!(runs(), [(4, LONG, true), (1, SHORT, true)]);
}
