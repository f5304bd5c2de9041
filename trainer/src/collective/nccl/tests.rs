//! Tests of what needs no GPU: the id's way over the ring, the watchdog, refusals. And one with a GPU and NCCL.

use std::net::{IpAddr, Ipv4Addr};
use std::thread;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::rendezvous::{ID_BYTES, agree};
use super::watchdog::{Cause, Next, Progress, next, watch};
use crate::collective::{Collective, Error, Formation, Options, Ring};

const LIMIT: Duration = Duration::from_secs(60);

fn bind() -> Collective {
    let options = Options {
        form_timeout: Duration::from_secs(20),
        exchange_timeout: Duration::from_secs(20),
        ..Options::new("a secret")
    };
    Collective::bind(IpAddr::V4(Ipv4Addr::LOCALHOST), options).unwrap()
}

/// Runs `work` on every rank of a ring, each on its own thread; results in rank order.
fn on_ring<T: Send>(world: usize, work: impl Fn(usize, Ring<'_>) -> T + Sync) -> Vec<T> {
    let bound: Vec<Collective> = (0..world).map(|_| bind()).collect();
    let addresses: Vec<String> = bound.iter().map(|member| member.address().to_string()).collect();
    thread::scope(|scope| {
        let start = |(rank, collective): (usize, Collective)| {
            let (work, addresses) = (&work, addresses.clone());
            scope.spawn(move || {
                let formation = Formation { epoch: 3, rank, addresses };
                work(rank, collective.form(&formation, CancellationToken::new()).unwrap())
            })
        };
        let ranks: Vec<_> = bound.into_iter().enumerate().map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// An id with every kind of byte, also such as make a lane negative.
fn id() -> [u8; ID_BYTES] {
    std::array::from_fn(|at| (at * 151 + 200) as u8)
}

#[test]
fn the_id_of_rank_0_reaches_all_ranks() {
    for world in 1..=3 {
        let found = on_ring(world, |rank, mut ring| {
            let own = (rank == 0).then(id);
            let found = agree(&mut ring, own.as_ref(), i64::MIN + rank as i64).unwrap();
            // The ring goes on.
            let mut values = [1i64];
            ring.all_reduce(0, &mut values).unwrap();
            (found, values[0])
        });
        assert_eq!(found, vec![(id(), world as i64); world]);
    }
}

#[test]
fn two_ranks_on_one_gpu_are_refused_on_every_rank() {
    let refusals = on_ring(3, |rank, mut ring| {
        let own = (rank == 0).then(id);
        agree(&mut ring, own.as_ref(), [7, 5, 7][rank]).unwrap_err()
    });
    for error in refusals {
        assert!(matches!(error, Error::Invalid { .. }) && !error.is_retryable());
        let text = error.to_string();
        for part in ["collective = \"nccl\"", "ranks 0 and 2", "CUDA_VISIBLE_DEVICES", "collective = \"tcp\""]
        {
            assert!(text.contains(part), "{text} lacks {part}");
        }
    }
}

#[test]
fn the_watchdog_aborts_on_errors_cancellation_and_silence_only() {
    let pending = Ok(Progress::Pending);
    let failed = || Err("ncclRemoteError".to_owned());
    let short = Duration::from_millis(3);
    // Work that is done counts, however late the poll.
    assert_eq!(next(Ok(Progress::Done), LIMIT * 2, LIMIT, true), Next::Return);
    let reason = "ncclRemoteError".to_owned();
    assert_eq!(next(failed(), short, LIMIT, true), Next::Abort(Cause::Failed(reason)));
    assert_eq!(next(pending.clone(), short, LIMIT, true), Next::Abort(Cause::Cancelled));
    assert_eq!(next(pending.clone(), LIMIT, LIMIT, false), Next::Abort(Cause::TimedOut(LIMIT)));
    let pauses = [(0, 10), (160, 10), (3_200, 200), (30_000_000, 1_000)];
    for (waited, pause) in pauses.map(|(waited, pause)| (Duration::from_micros(waited), pause)) {
        let expected = Next::Pause(Duration::from_micros(pause));
        assert_eq!(next(pending.clone(), waited, LIMIT, false), expected, "{waited:?}");
    }
}

#[test]
fn the_watchdog_polls_until_the_work_ends() {
    let abort = CancellationToken::new();
    let mut polls = 0;
    let done = watch(Instant::now(), LIMIT, &abort, || {
        polls += 1;
        Ok(if polls == 4 { Progress::Done } else { Progress::Pending })
    });
    assert_eq!((done, polls), (Ok(()), 4));
    let mut polls = 0;
    let cancelled = watch(Instant::now(), LIMIT, &abort, || {
        polls += 1;
        if polls == 3 {
            abort.cancel();
        }
        Ok(Progress::Pending)
    });
    assert_eq!((cancelled, polls), (Err(Cause::Cancelled), 3));
    let silent = watch(Instant::now(), Duration::ZERO, &CancellationToken::new(), || Ok(Progress::Pending));
    assert_eq!(silent, Err(Cause::TimedOut(Duration::ZERO)));
}

#[test]
fn errors_name_step_and_bucket_and_form_the_next_ring() {
    let what = || "sum bucket 2 of step 17".to_owned();
    let silent = Cause::TimedOut(LIMIT).into_error(5, what());
    assert_eq!(
        silent.to_string(),
        "NCCL did not sum bucket 2 of step 17 in membership epoch 5: no answer within 60s; NCCL does not tell which rank is \
         missing"
    );
    let failed = Cause::Failed("unhandled system error".to_owned()).into_error(5, what());
    for error in [silent, failed] {
        assert!(error.is_retryable() && error.suspect().is_none(), "{error}");
    }
    assert!(matches!(Cause::Cancelled.into_error(5, what()), Error::Aborted { epoch: 5 }));
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_build_without_cuda_refuses_with_the_way_out() {
    let refusals = on_ring(1, |_, mut ring| {
        let connected = super::connect(&mut ring, 0, &Options::new("a secret"), &CancellationToken::new());
        [super::check().err(), connected.err()]
    });
    for error in refusals.into_iter().flatten() {
        let text = error.unwrap().to_string();
        for part in ["strategy.collective = \"nccl\"", "no CUDA", "collective = \"tcp\""] {
            assert!(text.contains(part), "{text} lacks {part}");
        }
    }
}

/// One rank on the first GPU, twice: the second communicator follows an aborted one.
#[cfg(feature = "cuda")]
#[test]
fn nccl_on_a_gpu_sums_again_after_an_abort() {
    use millrace_testing::{Need, skip};

    let member = bind();
    let options = member.options().clone();
    let formation = |epoch| Formation { epoch, rank: 0, addresses: vec![member.address().to_string()] };
    for epoch in [1, 2] {
        let abort = CancellationToken::new();
        let mut ring = member.form(&formation(epoch), abort.clone()).unwrap();
        let connected = super::check().and_then(|()| super::connect(&mut ring, 0, &options, &abort));
        let mut links = match connected {
            Ok(links) => links,
            // No library or no GPU; what NCCL itself reports is a failure.
            Err(error @ Error::Invalid { .. }) => return skip(Need::Gpu, error),
            Err(error) => panic!("epoch {epoch}: {error}"),
        };
        // Also a vector that needs larger buffers.
        for elements in [1000, 3, 2_000_000] {
            let values: Vec<f32> = (0..elements).map(|at| at as f32 - 0.5).collect();
            let mut sum = values.clone();
            links.sum_bucket(4, 0, &mut sum).unwrap();
            assert_eq!(sum, values, "{elements} elements, epoch {epoch}");
        }
        abort.cancel();
        let error = links.sum_bucket(5, 0, &mut [1.0]).unwrap_err();
        assert!(matches!(error, Error::Aborted { epoch: over } if over == epoch), "{error}");
    }
}
