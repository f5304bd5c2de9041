//! Tests of recursive doubling: equal bits, the limit between both algorithms, missing ranks, frames of partners.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use super::super::DOUBLING_BYTES_MAX;
use super::*;

/// The sum of one element over all ranks, in the order of recursive doubling.
fn doubled(mut values: Vec<f32>) -> f32 {
    let base = 1 << values.len().ilog2();
    let extras = values.split_off(base);
    values.iter_mut().zip(extras).for_each(|(value, extra)| *value += extra);
    while values.len() > 1 {
        values = values.chunks(2).map(|pair| pair[0] + pair[1]).collect();
    }
    values[0]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Any bit pattern is data: infinities, NaN and subnormal numbers.
    #[test]
    fn every_rank_gets_the_same_bits_of_small_float_sums(
        world in 1usize..=9,
        seed in proptest::collection::vec(any::<u32>(), 1..60),
    ) {
        let vectors: Vec<Vec<f32>> = (0..world as u32)
            .map(|rank| seed.iter().map(|v| f32::from_bits(v.wrapping_mul(rank * 2 + 1).rotate_left(rank))).collect())
            .collect();
        let results = on_ring(world, &options(), |rank, mut ring| {
            let mut values = vectors[rank].clone();
            ring.all_reduce(3, &mut values).unwrap();
            values
        });
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        for values in &results {
            prop_assert_eq!(bits(values), bits(&results[0]));
        }
        for (at, sum) in results[0].iter().enumerate() {
            let expected = doubled(vectors.iter().map(|values| values[at]).collect());
            prop_assert!(sum.to_bits() == expected.to_bits() || sum.is_nan() && expected.is_nan());
        }
    }
}

#[test]
fn two_different_nan_have_one_sum_in_either_order() {
    let nan = [0x7fc0_0001, 0xffc0_0002, 0x7f80_0003, u32::MAX].map(f32::from_bits);
    for (one, other) in nan.iter().flat_map(|one| nan.map(|other| (*one, other))) {
        assert_eq!(one.merge(other).to_bits(), other.merge(one).to_bits());
        assert!(one.merge(other).is_nan() && one.merge(1.0).is_nan());
    }
    assert_eq!(f32::INFINITY.merge(1.0), f32::INFINITY);
    assert_eq!((-0.0f32).merge(-0.0).to_bits(), (-0.0f32).to_bits());
}

#[test]
fn sums_below_at_and_above_the_limit_are_equal() {
    for world in 1..=9 {
        let expected = |i: usize| i as i64 * (world * (world + 1) / 2) as i64;
        let results = on_ring(world, &options(), |rank, mut ring| {
            let limit = DOUBLING_BYTES_MAX / 8;
            let lengths = [0, 1, 2, limit - 1, limit, limit + 1];
            lengths.iter().all(|length| {
                let mut sums: Vec<i64> = (0..*length).map(|i| i as i64 * (rank as i64 + 1)).collect();
                ring.all_reduce(1, &mut sums).unwrap();
                // Twice as many of half the size. Their sums are whole numbers below 2^24.
                let mut floats: Vec<f32> = (0..2 * length).map(|i| (i * (rank + 1)) as f32).collect();
                ring.all_reduce(1, &mut floats).unwrap();
                sums.iter().enumerate().all(|(i, sum)| *sum == expected(i))
                    && floats.iter().enumerate().all(|(i, sum)| *sum == expected(i) as f32)
            })
        });
        assert_eq!(results, vec![true; world]);
    }
}

#[test]
fn dead_rank_is_named_by_all_ranks_of_a_small_sum() {
    for (world, victim) in
        [2, 3, 4, 7, 8].into_iter().flat_map(|world| (0..world).map(move |rank| (world, rank)))
    {
        let results = on_ring(world, &options(), |rank, mut ring| {
            let mut values = vec![1i64; 1000];
            if rank == victim {
                ring.all_reduce(0, &mut values).unwrap();
                return None;
            }
            // Some ranks may hear of the dead one before their first sum is complete.
            let error = (0..2).find_map(|step| ring.all_reduce(step, &mut values).err()).unwrap();
            assert!(error.is_retryable(), "{error}");
            assert!(matches!(ring.all_reduce(2, &mut values), Err(Error::Aborted { .. })));
            error.suspect()
        });
        for (rank, named) in results.into_iter().enumerate() {
            assert_eq!(named, (rank != victim).then_some(victim), "rank {rank} of {world}, victim {victim}");
        }
    }
}

#[test]
fn silent_rank_is_named_by_all_ranks_of_a_small_sum() {
    let options = Options { exchange_timeout: Duration::from_millis(1200), ..options() };
    // With and without another rank's vector, and one of those that give theirs away.
    for (world, silent) in [(2, 1), (4, 2), (5, 0), (5, 3), (5, 4), (8, 5)] {
        let done = Barrier::new(world);
        let results = on_ring(world, &options, |rank, mut ring| {
            let result = (rank != silent).then(|| ring.all_reduce(5, &mut [1i64; 64]).unwrap_err().suspect());
            done.wait();
            result.flatten()
        });
        for (rank, named) in results.into_iter().enumerate() {
            assert_eq!(named, (rank != silent).then_some(silent), "rank {rank} of {world}, silent {silent}");
        }
    }
}

#[test]
fn a_rank_that_dies_between_a_small_and_a_large_sum_is_named() {
    let results = on_ring(4, &options(), |rank, mut ring| {
        let mut large = vec![1i64; DOUBLING_BYTES_MAX];
        if rank == 1 {
            ring.all_reduce(0, &mut [1i64]).unwrap();
            return None;
        }
        let error = (0..2).find_map(|step| {
            let small = ring.all_reduce(step, &mut [1i64]).err();
            small.or_else(|| ring.all_reduce(step, &mut large).err())
        });
        error.unwrap().suspect()
    });
    assert_eq!(results, [Some(1), None, Some(1), Some(1)]);
}

#[test]
fn frames_of_two_ranks_that_do_not_belong_are_refused() {
    let right = Header { kind: Kind::Double, rank: 1, epoch: 7, step: 2, bucket: 0, phase: 1 };
    let frame = |header: Header, payload: &[u8]| [header.encode(payload).as_slice(), payload].concat();
    let payload = [0u8; 16];
    assert_eq!(answer_with(options(), [1i64, 2], &frame(right, &payload)).unwrap(), [1, 2]);
    for (frame, reason) in [
        (frame(Header { phase: 2, ..right }, &payload), "phase: 2"),
        (frame(Header { kind: Kind::Reduce, ..right }, &payload), "Reduce"),
        (frame(Header { kind: Kind::DoubleF32, ..right }, &payload), "DoubleF32"),
        (frame(right, &payload[..8]), "8 bytes, not 16"),
    ] {
        let error = answer_with(options(), [1i64, 2], &frame).unwrap_err();
        assert!(matches!(error, Error::Protocol { rank: 1, .. }), "{error}");
        assert!(error.to_string().contains(reason), "{error} lacks {reason}");
    }
}

/// Connects to rank 1 of three ranks as rank 0, with a first frame of this kind.
fn connect_as_rank_0(to: &str, kind: Kind) -> TcpStream {
    let header = Header { kind, rank: 0, epoch: 7, step: 0, bucket: 1, phase: 3 };
    let mut stream = TcpStream::connect(to).unwrap();
    stream.write_all(&[header.encode(&[9; 32]).as_slice(), &[9; 32]].concat()).unwrap();
    let mut challenge = [0u8; 44 + 64];
    stream.read_exact(&mut challenge).unwrap();
    let prove = match kind {
        Kind::Partner => form::tests_support::partner_proof,
        _ => form::tests_support::connecting_proof,
    };
    let proof = prove(SECRET, (7, 0, 1), &[9; 32], &challenge[44..76]);
    let header = Header { kind: Kind::Proof, ..header };
    stream.write_all(&[header.encode(&proof).as_slice(), &proof].concat()).unwrap();
    let mut welcome = [0u8; 44];
    stream.read_exact(&mut welcome).unwrap();
    if kind == Kind::Hello {
        assert!(!send_offer(&mut stream, header, None));
    }
    stream
}

/// Runs ranks 0 and 2 around rank 1. Rank 0 sends `bytes` over the connection of partners; returns rank 1's sum or error.
fn answer_of_partner(bytes: &[u8]) -> Result<[i64; 2], Error> {
    let mine = Collective::bind(LOCAL, options()).unwrap();
    let listener = TcpListener::bind((LOCAL, 0)).unwrap();
    let home = mine.address().to_string();
    let next = listener.local_addr().unwrap().to_string();
    let addresses = vec!["127.0.0.1:9".to_owned(), home.clone(), next];
    thread::scope(|scope| {
        let rank = scope.spawn(move || {
            let formation = Formation { epoch: 7, rank: 1, addresses };
            let mut ring = mine.form(&formation, CancellationToken::new()).unwrap();
            let mut values = [1, 2];
            ring.all_reduce(2, &mut values).map(|()| values)
        });
        let (mut next, _) = listener.accept().unwrap();
        let mut greeting = [0u8; 44 + 32];
        next.read_exact(&mut greeting).unwrap();
        let proof = form::tests_support::accepting_proof(SECRET, (7, 1, 2), &greeting[44..], &[8; 32]);
        let answer = [[8; 32], proof].concat();
        let header = Header { kind: Kind::Challenge, rank: 2, epoch: 7, step: 0, bucket: 2, phase: 3 };
        next.write_all(&[header.encode(&answer).as_slice(), &answer].concat()).unwrap();
        next.read_exact(&mut greeting).unwrap();
        next.write_all(&Header { kind: Kind::Welcome, ..header }.encode(&[])).unwrap();
        assert!(read_offer(&mut next).is_some());
        answer_offer(&mut next, header, false);
        let _prev = connect_as_rank_0(&home, Kind::Hello);
        let mut partner = connect_as_rank_0(&home, Kind::Partner);
        partner.write_all(bytes).unwrap();
        rank.join().unwrap()
    })
}

#[test]
fn frames_of_partners_that_do_not_belong_are_refused() {
    let right = Header { kind: Kind::Double, rank: 0, epoch: 7, step: 2, bucket: 0, phase: 1 };
    let payload = [1i64.to_le_bytes(), 5i64.to_le_bytes()].concat();
    let frame = |header: Header, payload: &[u8]| [header.encode(payload).as_slice(), payload].concat();
    assert_eq!(answer_of_partner(&frame(right, &payload)).unwrap(), [2, 7]);
    let mut corrupt = frame(right, &payload);
    corrupt[44] ^= 1;
    for (frame, reason) in [
        (frame(Header { epoch: 6, ..right }, &payload), "epoch: 6"),
        (frame(Header { step: 1, ..right }, &payload), "step: 1"),
        (frame(Header { phase: 2, ..right }, &payload), "phase: 2"),
        (frame(Header { rank: 2, ..right }, &payload), "rank: 2"),
        (frame(Header { kind: Kind::Reduce, ..right }, &payload), "Reduce"),
        (frame(Header { kind: Kind::DoubleF32, ..right }, &payload), "DoubleF32"),
        (frame(right, &payload[..8]), "8 bytes, not 16"),
        (corrupt, "payload checksum"),
        (vec![b'x'; 44], "not a ring frame"),
    ] {
        let error = answer_of_partner(&frame).unwrap_err();
        assert!(matches!(error, Error::Protocol { rank: 0, .. }), "{error}");
        assert!(error.to_string().contains(reason), "{error} lacks {reason}");
    }
    // Rank 2 is reported missing.
    let abort = Header { kind: Kind::Abort, bucket: 2, phase: 0, ..right };
    let error = answer_of_partner(&abort.encode(&[])).unwrap_err();
    assert!(matches!(error, Error::PeerLost { rank: 2, .. }), "{error}");
}
