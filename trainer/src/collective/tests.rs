//! Tests of the ring: sums, state transfer, missing ranks, unauthorized connections.

mod doubling;
mod encrypted;
mod shared;

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::sync::{Barrier, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use tokio_util::sync::CancellationToken;

use super::frame::{Header, Kind};
use super::offer::{OFFER_BYTES, Offer};
use super::shared::Reader;
use super::{Collective, Element, Error, Formation, Options, Ring, form};

const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const SECRET: &str = "a secret";

fn options() -> Options {
    Options {
        form_timeout: Duration::from_secs(20),
        exchange_timeout: Duration::from_secs(20),
        ..Options::new(SECRET)
    }
}

/// Sums of every size go around the ring.
fn around() -> Options {
    Options { doubling_bytes_max: 0, ..options() }
}

fn bind(world: usize, options: &Options) -> (Vec<Collective>, Vec<String>) {
    let bound: Vec<_> = (0..world).map(|_| Collective::bind(LOCAL, options.clone()).unwrap()).collect();
    let addresses = bound.iter().map(|member| member.address().to_string()).collect();
    (bound, addresses)
}

/// Runs `work` on every rank of a ring, each on its own thread; results in rank order.
fn on_ring<T: Send>(world: usize, options: &Options, work: impl Fn(usize, Ring<'_>) -> T + Sync) -> Vec<T> {
    on_ranks(&vec![options.clone(); world], work)
}

/// As [`on_ring`], with the options of each rank.
fn on_ranks<T: Send>(options: &[Options], work: impl Fn(usize, Ring<'_>) -> T + Sync) -> Vec<T> {
    on_ranks_at(LOCAL, options, work)
}

fn on_ranks_at<T: Send>(
    ip: IpAddr,
    options: &[Options],
    work: impl Fn(usize, Ring<'_>) -> T + Sync,
) -> Vec<T> {
    let bound: Vec<_> =
        options.iter().map(|options| Collective::bind(ip, options.clone()).unwrap()).collect();
    let addresses: Vec<String> = bound.iter().map(|member| member.address().to_string()).collect();
    thread::scope(|scope| {
        let ranks: Vec<_> = bound
            .into_iter()
            .enumerate()
            .map(|(rank, collective)| {
                let formation = Formation { epoch: 7, rank, addresses: addresses.clone() };
                let work = &work;
                scope.spawn(move || {
                    let ring = collective.form(&formation, CancellationToken::new()).unwrap();
                    work(rank, ring)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn every_rank_gets_the_sum(
        world in 1usize..=9,
        bucket_elements_max in 1usize..40,
        doubling_bytes_max in 0usize..960,
        seed in proptest::collection::vec(any::<i64>(), 0..120),
    ) {
        let vectors: Vec<Vec<i64>> = (0..world as i64)
            .map(|rank| seed.iter().map(|v| v.wrapping_mul(rank * 2 + 1).rotate_left(rank as u32)).collect())
            .collect();
        let sum: Vec<i64> = (0..seed.len())
            .map(|i| vectors.iter().fold(0i64, |sum, v| sum.wrapping_add(v[i])))
            .collect();
        let options = Options { bucket_elements_max, doubling_bytes_max, ..options() };
        let results = on_ring(world, &options, |rank, mut ring| {
            let mut values = vectors[rank].clone();
            ring.all_reduce(3, &mut values).unwrap();
            ring.all_reduce(4, &mut [0i64; 0]).unwrap();
            values
        });
        for values in results {
            prop_assert_eq!(&values, &sum);
        }
    }
}

/// The chunk of each element of a bucket, which is also the first rank of its sum.
fn first_rank(at: usize, elements: usize, world: usize) -> usize {
    (0..world).find(|chunk| at < elements * (chunk + 1) / world).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Any bit pattern is data: infinities, NaN and subnormal numbers.
    #[test]
    fn every_rank_gets_the_same_bits_of_float_sums(
        world in 1usize..=5,
        bucket_elements_max in 1usize..40,
        seed in proptest::collection::vec(any::<u32>(), 0..60),
    ) {
        let vectors: Vec<Vec<f32>> = (0..world as u32)
            .map(|rank| seed.iter().map(|v| f32::from_bits(v.wrapping_mul(rank * 2 + 1).rotate_left(rank))).collect())
            .collect();
        let options = Options { bucket_elements_max, ..around() };
        let results = on_ring(world, &options, |rank, mut ring| {
            let mut values = vectors[rank].clone();
            ring.all_reduce(3, &mut values).unwrap();
            let mut counts = [rank as i64];
            ring.all_reduce(3, &mut counts).unwrap();
            (values, counts)
        });
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        for (values, counts) in &results {
            prop_assert_eq!(bits(values), bits(&results[0].0));
            prop_assert_eq!(counts[0], (world * (world - 1) / 2) as i64);
        }
        for (at, sum) in results[0].0.iter().enumerate() {
            let elements = bucket_elements_max.min(seed.len() - at / bucket_elements_max * bucket_elements_max);
            let first = first_rank(at % bucket_elements_max, elements, world);
            let expected = (1..world).fold(vectors[first][at], |sum, next| vectors[(first + next) % world][at] + sum);
            prop_assert!(sum.to_bits() == expected.to_bits() || sum.is_nan() && expected.is_nan());
        }
    }
}

#[test]
fn large_vectors_pass_full_socket_buffers() {
    let elements = 2_000_000;
    let options = Options { shared_memory: false, ..options() };
    let results = on_ring(3, &options, |rank, mut ring| {
        let mut values: Vec<i64> = (0..elements).map(|i| i * (rank as i64 + 1)).collect();
        ring.all_reduce(0, &mut values).unwrap();
        values.iter().enumerate().all(|(i, v)| *v == i as i64 * 6)
    });
    assert_eq!(results, [true; 3]);
}

#[test]
fn every_rank_can_send_its_state() {
    let cases = [(2, 0, 0), (2, 1, 17), (3, 2, 3 << 20), (5, 3, (1 << 20) + 1)];
    for ((world, source, bytes), shared_memory) in
        cases.into_iter().flat_map(|case| [(case, true), (case, false)])
    {
        let state: Vec<u8> = (0..bytes).map(|i| (i * 31 % 251) as u8).collect();
        let options = Options { shared_memory, ..options() };
        let results = on_ring(world, &options, |rank, mut ring| {
            let own = (rank == source).then_some(state.as_slice());
            let got = ring.broadcast(9, source, own, bytes as u64).unwrap();
            let mut values = [1i64];
            ring.all_reduce(9, &mut values).unwrap();
            (got, values[0])
        });
        for (rank, (got, sum)) in results.into_iter().enumerate() {
            assert_eq!(sum, world as i64);
            assert_eq!(got.is_none(), rank == source);
            assert!(got.is_none_or(|got| got == state));
        }
    }
}

#[test]
fn state_over_the_size_limit_is_refused() {
    let results = on_ring(2, &options(), |rank, mut ring| {
        let state = [0u8; 100];
        ring.broadcast(0, 0, (rank == 0).then_some(&state[..]), 99).map(drop)
    });
    assert!(matches!(results[1], Err(Error::TooLarge { bytes: 100, limit: 99 })));
}

#[test]
fn dead_rank_is_named_by_all_ranks() {
    for victim in 0..4 {
        let results = on_ring(4, &around(), |rank, mut ring| {
            let mut values = vec![1i64; 1000];
            ring.all_reduce(0, &mut values).unwrap();
            if rank == victim {
                return Err(None);
            }
            // However far the other ranks get before they notice, no rank completes this sum.
            let error = ring.all_reduce(1, &mut values).unwrap_err();
            assert!(error.is_retryable(), "{error}");
            assert!(matches!(ring.all_reduce(2, &mut values), Err(Error::Aborted { .. })));
            Err::<(), _>(error.suspect())
        });
        for (rank, result) in results.into_iter().enumerate() {
            let named = if rank == victim { None } else { Some(victim) };
            assert_eq!(result, Err(named), "rank {rank}, victim {victim}");
        }
    }
}

#[test]
fn silent_rank_is_named_by_all_ranks() {
    let options = Options { exchange_timeout: Duration::from_millis(1200), ..around() };
    let done = Barrier::new(4);
    let results = on_ring(4, &options, |rank, mut ring| {
        let result = match rank {
            2 => None,
            _ => ring.all_reduce(5, &mut [1i64; 64]).unwrap_err().suspect(),
        };
        done.wait();
        result
    });
    assert_eq!(results, [Some(2), Some(2), None, Some(2)]);
}

#[test]
fn missing_rank_is_named_at_formation() {
    let options = Options { form_timeout: Duration::from_millis(600), ..options() };
    let unheard = std::net::TcpListener::bind((LOCAL, 0)).unwrap().local_addr().unwrap().to_string();
    for missing in [unheard, "no.such.invalid:1".to_owned()] {
        let (bound, mut addresses) = bind(2, &options);
        addresses.push(missing);
        thread::scope(|scope| {
            for (rank, collective) in bound.into_iter().enumerate() {
                let formation = Formation { epoch: 1, rank, addresses: addresses.clone() };
                scope.spawn(move || {
                    let error = collective.form(&formation, CancellationToken::new()).unwrap_err();
                    assert!(matches!(error, Error::Timeout { rank: 2, .. }), "{error}");
                    assert!(error.to_string().contains("rank 2"));
                });
            }
        });
    }
}

#[test]
fn an_aborted_epoch_ends_waiting_at_once() {
    let (mut bound, addresses) = bind(2, &options());
    let silent = bound.pop().unwrap();
    let waiting = bound.pop().unwrap();
    let abort = CancellationToken::new();
    let (formed, seen) = mpsc::channel();
    thread::scope(|scope| {
        let (addresses, abort) = (&addresses, &abort);
        let waiter = scope.spawn(move || {
            let formation = Formation { epoch: 1, rank: 0, addresses: addresses.clone() };
            let mut ring = waiting.form(&formation, abort.clone()).unwrap();
            formed.send(()).unwrap();
            ring.all_reduce(0, &mut [1i64]).unwrap_err()
        });
        let formation = Formation { epoch: 1, rank: 1, addresses: addresses.clone() };
        let _ring = silent.form(&formation, CancellationToken::new()).unwrap();
        seen.recv().unwrap();
        let began = Instant::now();
        abort.cancel();
        let error = waiter.join().unwrap();
        assert!(matches!(error, Error::Aborted { epoch: 1 }), "{error}");
        assert!(began.elapsed() < Duration::from_secs(5));
        // Forming a ring ends at once, too.
        let formation = Formation { epoch: 2, rank: 1, addresses: addresses.clone() };
        let error = silent.form(&formation, abort.clone()).unwrap_err();
        assert!(matches!(error, Error::Aborted { epoch: 2 }), "{error}");
    });
}

/// The first frame of rank 1 to rank 0: a nonce.
fn hello(epoch: u64) -> Vec<u8> {
    first_frame(Kind::Hello, epoch)
}

fn first_frame(kind: Kind, epoch: u64) -> Vec<u8> {
    let header = Header { kind, rank: 1, epoch, step: 0, bucket: 0, phase: 2 };
    [header.encode(&[9; 32]).as_slice(), &[9; 32]].concat()
}

/// Greets `to` as rank 1 of epoch 7, with `secret`; returns the connection after the proof was sent.
fn connect_as_rank_1(to: &str, secret: &str) -> TcpStream {
    let mut stream = TcpStream::connect(to).unwrap();
    stream.write_all(&hello(7)).unwrap();
    let mut challenge = [0u8; 44 + 64];
    stream.read_exact(&mut challenge).unwrap();
    let proof = form::tests_support::connecting_proof(secret, (7, 1, 0), &[9; 32], &challenge[44..76]);
    let header = Header { kind: Kind::Proof, rank: 1, epoch: 7, step: 0, bucket: 0, phase: 2 };
    stream.write_all(&[header.encode(&proof).as_slice(), &proof].concat()).unwrap();
    stream
}

#[test]
fn foreign_connections_do_not_disturb_the_formation() {
    let (mut bound, addresses) = bind(2, &options());
    let mut strangers = Vec::new();
    let greetings = [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: everything there is\r\n\r\n".to_vec(),
        vec![0xff; 44],
        Vec::new(),
        hello(6),
        hello(8),
        // Two ranks have no partners.
        first_frame(Kind::Partner, 7),
    ];
    for greeting in &greetings {
        let mut stranger = TcpStream::connect(&addresses[0]).unwrap();
        stranger.write_all(greeting).unwrap();
        strangers.push(stranger);
    }
    let second = bound.pop().unwrap();
    let first = bound.pop().unwrap();
    let to = addresses[0].clone();
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut stranger = connect_as_rank_1(&to, "another secret");
            stranger.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            let mut answer = Vec::new();
            if stranger.read_to_end(&mut answer).is_ok() {
                assert_eq!(answer, b"", "a wrong proof is answered");
            }
        });
        for (rank, collective) in [first, second].into_iter().enumerate() {
            // The second rank comes later, so that the first one meets the stranger.
            thread::sleep(Duration::from_millis(300 * rank as u64));
            let formation = Formation { epoch: 7, rank, addresses: addresses.clone() };
            scope.spawn(move || {
                let mut ring = collective.form(&formation, CancellationToken::new()).unwrap();
                let mut values = [rank as i64 + 1];
                ring.all_reduce(0, &mut values).unwrap();
                assert_eq!(values, [3]);
            });
        }
    });
    for stranger in &mut strangers {
        stranger.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut answer = Vec::new();
        // Closed without data, or reset because the greeting was unread.
        if stranger.read_to_end(&mut answer).is_ok() {
            assert_eq!(answer, b"");
        }
    }
}

#[test]
fn silent_connections_do_not_keep_the_neighbor_from_its_place() {
    let (mut bound, addresses) = bind(2, &options());
    let second = bound.pop().unwrap();
    let first = bound.pop().unwrap();
    let form = |rank, collective: Collective| {
        let formation = Formation { epoch: 7, rank, addresses: addresses.clone() };
        let mut ring = collective.form(&formation, CancellationToken::new()).unwrap();
        let mut values = [rank as i64 + 1];
        ring.all_reduce(0, &mut values).unwrap();
        assert_eq!(values, [3]);
    };
    thread::scope(|scope| {
        let form = &form;
        scope.spawn(move || form(0, first));
        // Four times as many as there are places. Each of them may be silent for two seconds.
        let strangers: Vec<_> = (0..256).map(|_| TcpStream::connect(&addresses[0]).unwrap()).collect();
        let began = Instant::now();
        form(1, second);
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
        drop(strangers);
    });
}

/// Sends an offer of shared memory, or an empty one; returns whether it was taken.
fn send_offer(stream: &mut TcpStream, header: Header, offer: Option<&Offer>) -> bool {
    let payload = offer.map_or([0; OFFER_BYTES], Offer::encode);
    let header = Header { kind: Kind::Offer, ..header };
    stream.write_all(&[header.encode(&payload).as_slice(), &payload].concat()).unwrap();
    let mut answer = [0u8; 44 + 1];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(Header::decode(answer.first_chunk().unwrap()).unwrap().header.kind, Kind::Answer);
    answer[44] == 1
}

/// The offer of shared memory after the proofs.
fn read_offer(stream: &mut TcpStream) -> Option<Offer> {
    let mut frame = [0u8; 44 + OFFER_BYTES];
    stream.read_exact(&mut frame).unwrap();
    assert_eq!(Header::decode(frame.first_chunk().unwrap()).unwrap().header.kind, Kind::Offer);
    Offer::decode(frame.last_chunk().unwrap())
}

/// Says whether an offer is taken.
fn answer_offer(stream: &mut TcpStream, header: Header, is_taken: bool) {
    let payload = [u8::from(is_taken)];
    let header = Header { kind: Kind::Answer, ..header };
    stream.write_all(&[header.encode(&payload).as_slice(), &payload].concat()).unwrap();
}

/// The header of what rank 1 of two ranks answers to rank 0 while the ring forms.
const ANSWER: Header = Header { kind: Kind::Challenge, rank: 1, epoch: 7, step: 0, bucket: 1, phase: 2 };

/// Accepts rank 0 of two ranks as rank 1, up to its offer.
fn accept_as_rank_1(listener: &std::net::TcpListener) -> TcpStream {
    let (mut from, _) = listener.accept().unwrap();
    let mut greeting = [0u8; 44 + 32];
    from.read_exact(&mut greeting).unwrap();
    let proof = form::tests_support::accepting_proof(SECRET, (7, 0, 1), &greeting[44..], &[8; 32]);
    let answer = [[8; 32], proof].concat();
    from.write_all(&[ANSWER.encode(&answer).as_slice(), &answer].concat()).unwrap();
    from.read_exact(&mut greeting).unwrap();
    from.write_all(&Header { kind: Kind::Welcome, ..ANSWER }.encode(&[])).unwrap();
    from
}

/// Rank 1 of two ranks, which speaks the protocol itself, after the formation.
struct Peer {
    /// What rank 0 sends.
    from: TcpStream,
    /// What rank 0 receives.
    to: TcpStream,
    /// The memory of rank 0, if the peer has taken it.
    memory: Option<Reader>,
    /// Whether rank 0 has taken the memory of the peer.
    is_taken: bool,
}

/// Runs rank 0 against a peer, which takes the memory of rank 0 if `takes` and offers the memory `offer`.
fn with_peer<T: Send>(
    options: Options,
    (takes, offer): (bool, Option<&Offer>),
    rank_0: impl FnOnce(Ring<'_>) -> T + Send,
    act: impl FnOnce(&mut Peer),
) -> T {
    let mine = Collective::bind(LOCAL, options).unwrap();
    let listener = std::net::TcpListener::bind((LOCAL, 0)).unwrap();
    let addresses = vec![mine.address().to_string(), listener.local_addr().unwrap().to_string()];
    let home = addresses[0].clone();
    thread::scope(|scope| {
        let rank = scope.spawn(move || {
            let formation = Formation { epoch: 7, rank: 0, addresses };
            rank_0(mine.form(&formation, CancellationToken::new()).unwrap())
        });
        let mut from = accept_as_rank_1(&listener);
        let offered = read_offer(&mut from).filter(|_| takes);
        let memory = offered.map(|offer| offer.open().unwrap());
        answer_offer(&mut from, ANSWER, memory.is_some());
        let mut to = connect_as_rank_1(&home, SECRET);
        let mut welcome = [0u8; 44];
        to.read_exact(&mut welcome).unwrap();
        let is_taken = send_offer(&mut to, Header { bucket: 0, ..ANSWER }, offer);
        let mut peer = Peer { from, to, memory, is_taken };
        act(&mut peer);
        rank.join().unwrap()
    })
}

/// Runs a peer that greets as the protocol says and then sends `frame`; returns rank 0's sum or error.
fn answer_to<T: Element>(values: [T; 2], frame: &[u8]) -> Result<[T; 2], Error> {
    answer_with(around(), values, frame)
}

fn answer_with<T: Element>(options: Options, values: [T; 2], frame: &[u8]) -> Result<[T; 2], Error> {
    let sum = move |mut ring: Ring<'_>| {
        let mut values = values;
        ring.all_reduce(2, &mut values).map(|()| values)
    };
    with_peer(options, (false, None), sum, |peer| peer.to.write_all(frame).unwrap())
}

#[test]
fn frames_that_do_not_belong_are_refused() {
    let right = Header { kind: Kind::Reduce, rank: 1, epoch: 7, step: 2, bucket: 0, phase: 0 };
    let payload = [0u8; 8];
    let right_f32 = Header { kind: Kind::ReduceF32, ..right };
    let frame = |header: Header, payload: &[u8]| [header.encode(payload).as_slice(), payload].concat();
    let mut corrupt = frame(right, &payload);
    corrupt[44] ^= 1;
    let mut torn_header = frame(right, &payload);
    torn_header[9] ^= 1;
    let cases = [
        (frame(Header { epoch: 6, ..right }, &payload), "epoch: 6"),
        (frame(Header { step: 1, ..right }, &payload), "step: 1"),
        (frame(Header { bucket: 1, ..right }, &payload), "bucket: 1"),
        (frame(Header { kind: Kind::Gather, ..right }, &payload), "Gather"),
        (frame(right, &[0u8; 16]), "16 bytes"),
        (corrupt, "payload checksum"),
        (torn_header, "header checksum"),
        (vec![b'x'; 44], "not a ring frame"),
        (frame(right_f32, &payload), "ReduceF32"),
    ];
    let cases = cases.map(|(frame, reason)| (answer_to([1i64, 2], &frame).unwrap_err(), reason));
    let of_floats = [
        (frame(right_f32, &[0; 3]), "3 bytes, not 4"),
        (frame(right_f32, &[0; 8]), "8 bytes, not 4"),
        (frame(right_f32, &[]), "0 bytes, not 4"),
        (frame(right, &[0; 4]), "sent Header { kind: Reduce,"),
        (frame(Header { kind: Kind::GatherF32, ..right }, &[0; 4]), "GatherF32"),
    ];
    let of_floats = of_floats.map(|(frame, reason)| (answer_to([1f32, 2.0], &frame).unwrap_err(), reason));
    for (error, reason) in cases.into_iter().chain(of_floats) {
        assert!(matches!(error, Error::Protocol { rank: 1, .. }), "{error}");
        assert!(error.to_string().contains(reason), "{error} lacks {reason}");
    }
}

#[test]
fn float_frames_with_any_payload_are_data() {
    for bits in [f32::NAN.to_bits(), 0x7f80_0001, u32::MAX, f32::INFINITY.to_bits(), 1] {
        let (kinds, payload) = ([Kind::ReduceF32, Kind::GatherF32], bits.to_le_bytes());
        let frames: Vec<u8> = kinds
            .iter()
            .flat_map(|kind| {
                let header = Header { kind: *kind, rank: 1, epoch: 7, step: 2, bucket: 0, phase: 0 };
                [header.encode(&payload).as_slice(), &payload].concat()
            })
            .collect();
        let [gathered, reduced] = answer_to([0.0, 0.0], &frames).unwrap();
        assert_eq!(gathered.to_bits(), bits);
        assert!(reduced.to_bits() == bits || reduced.is_nan() && f32::from_bits(bits).is_nan());
    }
}

#[test]
fn invalid_calls_are_refused() {
    let mine = Collective::bind(LOCAL, options()).unwrap();
    for (rank, world) in [(0, 0), (1, 1), (5, 3)] {
        let formation = Formation { epoch: 1, rank, addresses: vec![mine.address().to_string(); world] };
        let error = mine.form(&formation, CancellationToken::new()).unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }), "{error}");
    }
    let formation = Formation { epoch: 1, rank: 0, addresses: vec![mine.address().to_string()] };
    let mut ring = mine.form(&formation, CancellationToken::new()).unwrap();
    assert!(matches!(ring.broadcast(0, 1, None, 10), Err(Error::Invalid { .. })));
    assert!(matches!(ring.broadcast(0, 0, None, 10), Err(Error::Invalid { .. })));
    assert_eq!(ring.broadcast(0, 0, Some(b"alone"), 10).unwrap(), None);
}
