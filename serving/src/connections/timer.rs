//! The time by which connections of HTTP/2 are watched. Hyper asks for it some six times with each request and looks
//! at its alarm three times, so both are cheap: the clock is one that the kernel sets with each of its ticks (3 ns to
//! read, 26 the exact one, of a small model's request that takes 12 us in all), and an alarm that has not gone is not set
//! again.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use hyper::rt;
use nix::time::{ClockId, clock_gettime};

/// The longest tick of a kernel. The clock is behind by up to one, and alarms are late by that, so that none is early.
const TICK_MAX: Duration = Duration::from_millis(10);

/// Tells the time, never ahead of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timer {
    /// The same moment on both clocks; `None` where there is no cheap one.
    same: Option<(Instant, Duration)>,
}

impl Timer {
    pub(super) fn new() -> Timer {
        // In this order, what comes in between makes it later and not ahead.
        let (then, instant) = (cheap(), Instant::now());
        let same = then
            .zip(exact())
            .and_then(|(then, exact)| Some((instant.checked_sub(exact.saturating_sub(then))?, then)));
        Timer { same }
    }
}

/// The clock of the kernel's ticks, which stands between two of them.
fn cheap() -> Option<Duration> {
    #[cfg(target_os = "linux")]
    return clock_gettime(ClockId::CLOCK_MONOTONIC_COARSE).ok().map(Duration::from);
    #[cfg(not(target_os = "linux"))]
    return None;
}

/// The clock that [`Instant`] reads.
fn exact() -> Option<Duration> {
    clock_gettime(ClockId::CLOCK_MONOTONIC).ok().map(Duration::from)
}

impl rt::Timer for Timer {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn rt::Sleep>> {
        self.sleep_until(Instant::now() + duration)
    }

    fn sleep_until(&self, deadline: Instant) -> Pin<Box<dyn rt::Sleep>> {
        Box::pin(Sleep { alarm: Box::pin(tokio::time::sleep_until(late(deadline))), wakes: None })
    }

    fn now(&self) -> Instant {
        let now = self.same.zip(cheap()).map(|((instant, then), now)| instant + now.saturating_sub(then));
        now.unwrap_or_else(Instant::now)
    }

    fn reset(&self, sleep: &mut Pin<Box<dyn rt::Sleep>>, deadline: Instant) {
        match sleep.as_mut().downcast_mut_pin::<Sleep>() {
            Some(sleep) => sleep.get_mut().reset(deadline),
            None => *sleep = rt::Timer::sleep_until(self, deadline),
        }
    }
}

fn late(deadline: Instant) -> tokio::time::Instant {
    (deadline + TICK_MAX).into()
}

/// Ends at a time.
struct Sleep {
    alarm: Pin<Box<tokio::time::Sleep>>,
    /// Whom the alarm wakes.
    wakes: Option<Waker>,
}

impl Sleep {
    fn reset(&mut self, deadline: Instant) {
        self.alarm.as_mut().reset(late(deadline));
        self.wakes = None;
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let is_set = self.wakes.as_ref().is_some_and(|waker| waker.will_wake(cx.waker()));
        // An alarm is over before it wakes anybody.
        if is_set && !self.alarm.is_elapsed() {
            return Poll::Pending;
        }
        let ended = self.alarm.as_mut().poll(cx);
        self.wakes = ended.is_pending().then(|| cx.waker().clone());
        ended
    }
}

impl rt::Sleep for Sleep {}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use hyper::rt::Timer as _;

    use super::*;

    #[test]
    fn the_time_is_right_but_for_ticks() {
        let timer = Timer::new();
        let began = Instant::now();
        // Where the processor is taken away between both, or from the kernel, it looks further behind.
        let behind = (0..100).map(|_| {
            let (told, now) = (timer.now(), Instant::now());
            assert!(told <= now, "{:?} ahead", told - now);
            std::thread::sleep(Duration::from_micros(300));
            now - told
        });
        let behind: Vec<Duration> = behind.collect();
        assert!(behind.iter().any(|behind| *behind <= TICK_MAX), "{behind:?}");
        assert!(timer.now() > began, "it goes on");
        let exact = Timer { same: None };
        let before = Instant::now();
        assert!(exact.now() >= before, "where there is no cheap clock");
    }

    #[tokio::test]
    async fn a_sleep_ends_after_its_time_however_often_it_is_looked_at() {
        let timer = Timer::new();
        let mut sleep = timer.sleep(Duration::ZERO);
        for length in [30, 60].map(Duration::from_millis) {
            // By the time that it tells.
            let deadline = timer.now() + length;
            let began = Instant::now();
            timer.reset(&mut sleep, deadline);
            let mut looks = 0;
            poll_fn(|cx| {
                looks += 1;
                if looks < 100 {
                    // From then on nothing but the alarm wakes this.
                    cx.waker().wake_by_ref();
                }
                sleep.as_mut().poll(cx)
            })
            .await;
            assert!(began.elapsed() >= length, "{:?} of {length:?}", began.elapsed());
        }
    }

    #[tokio::test]
    async fn a_sleep_wakes_who_looked_last() {
        let mut sleep = Timer::new().sleep(Duration::from_millis(20));
        for _ in 0..2 {
            assert!(sleep.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        sleep.await;
    }

    #[tokio::test]
    async fn a_sleep_of_another_timer_is_replaced() {
        let mut sleep = rt::Timer::sleep(&hyper_util::rt::TokioTimer::new(), Duration::from_secs(3600));
        Timer::new().reset(&mut sleep, Instant::now());
        sleep.await;
    }
}
