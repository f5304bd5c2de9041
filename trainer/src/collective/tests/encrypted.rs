//! Tests of encrypted rings: sums and states, missing ranks, and a machine on the way that listens or changes frames.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Mutex;

use super::*;

fn encrypted() -> Options {
    Options { encrypt: true, ..options() }
}

#[test]
fn encrypted_rings_sum_and_transfer_states() {
    let worlds = [(2, 1, 0), (3, 7, 0), (5, 1 << 18, 0), (2, 1, 1 << 10), (3, 7, 1 << 10), (5, 7, 1 << 10)];
    let cases = worlds.into_iter().flat_map(|world| [(world, true), (world, false)]);
    for ((world, bucket_elements_max, doubling_bytes_max), shared_memory) in cases {
        let state: Vec<u8> = (0..(1 << 20) + 5).map(|i| (i * 31 % 251) as u8).collect();
        let options = Options { bucket_elements_max, doubling_bytes_max, shared_memory, ..encrypted() };
        let results = on_ring(world, &options, |rank, mut ring| {
            let mut sums: Vec<i64> = (0..50).map(|i| i * (rank as i64 + 1)).collect();
            ring.all_reduce(1, &mut sums).unwrap();
            let mut floats = [rank as f32 + 0.5; 3];
            ring.all_reduce(1, &mut floats).unwrap();
            let got = ring.broadcast(2, 1, (rank == 1).then_some(&state[..]), state.len() as u64).unwrap();
            (sums, floats, got)
        });
        let ranks = (world * (world + 1) / 2) as i64;
        for (rank, (sums, floats, got)) in results.into_iter().enumerate() {
            assert!(sums.iter().enumerate().all(|(i, sum)| *sum == i as i64 * ranks));
            assert_eq!(floats, [(world * world) as f32 / 2.0; 3]);
            assert!(rank == 1 || got.as_ref() == Some(&state));
        }
    }
}

#[test]
fn dead_and_silent_ranks_of_encrypted_rings_are_named() {
    let of = |doubling_bytes_max| Options {
        exchange_timeout: Duration::from_millis(1200),
        doubling_bytes_max,
        ..encrypted()
    };
    for (is_dead, options) in [(true, of(0)), (false, of(0)), (true, of(1 << 14)), (false, of(1 << 14))] {
        let done = Barrier::new(4);
        let results = on_ring(4, &options, |rank, mut ring| {
            ring.all_reduce(0, &mut [1i64; 1000]).unwrap();
            let result = match rank {
                2 if is_dead => {
                    drop(ring);
                    None
                }
                2 => None,
                _ => ring.all_reduce(1, &mut [1i64; 1000]).unwrap_err().suspect(),
            };
            done.wait();
            result
        });
        assert_eq!(results, [Some(2), Some(2), None, Some(2)], "dead: {is_dead}");
    }
}

#[test]
fn rings_that_differ_about_encryption_do_not_form() {
    let form_timeout = Duration::from_millis(600);
    let options = [Options { form_timeout, ..encrypted() }, Options { form_timeout, ..options() }];
    let bound = options.each_ref().map(|options| Collective::bind(LOCAL, options.clone()).unwrap());
    let addresses: Vec<String> = bound.iter().map(|member| member.address().to_string()).collect();
    thread::scope(|scope| {
        for (rank, collective) in bound.into_iter().enumerate() {
            let formation = Formation { epoch: 1, rank, addresses: addresses.clone() };
            scope.spawn(move || {
                let error = collective.form(&formation, CancellationToken::new()).unwrap_err();
                assert!(matches!(error, Error::Timeout { .. }), "{error}");
            });
        }
    });
}

/// Bytes that the connecting side of an encrypted ring sends before the first frame: nonce, proof, offer.
pub(super) const HANDSHAKE: usize = 2 * (44 + 32) + 44 + OFFER_BYTES + 16;

/// Forwards what `from` sends, after `change` of it; returns all of it.
fn forward(mut from: TcpStream, mut to: TcpStream, mut change: impl FnMut(usize, &mut [u8])) -> Vec<u8> {
    let (mut seen, mut bytes) = (Vec::new(), vec![0; 1 << 16]);
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        change(seen.len(), &mut bytes[..count]);
        seen.extend_from_slice(&bytes[..count]);
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    to.shutdown(std::net::Shutdown::Both).ok();
    from.shutdown(std::net::Shutdown::Both).ok();
    seen
}

/// Two ranks sum through a machine that changes what rank 1 sends to rank 0. Their results, and what the machine saw.
pub(super) fn through_machine(
    options: &Options,
    values: &[i64],
    change: impl FnMut(usize, &mut [u8]) + Send,
) -> (Vec<Result<Vec<i64>, Error>>, Vec<u8>) {
    let (bound, addresses) = bind(2, options);
    let machine = TcpListener::bind((LOCAL, 0)).unwrap();
    let way = machine.local_addr().unwrap().to_string();
    let seen = Mutex::new(Vec::new());
    let results = thread::scope(|scope| {
        let (seen, home) = (&seen, addresses[0].clone());
        scope.spawn(move || {
            let (from, _) = machine.accept().unwrap();
            let to = TcpStream::connect(home).unwrap();
            let back = (to.try_clone().unwrap(), from.try_clone().unwrap());
            let back = thread::spawn(move || forward(back.0, back.1, |_, _| {}));
            *seen.lock().unwrap() = forward(from, to, change);
            back.join().unwrap();
        });
        let ranks: Vec<_> = bound
            .into_iter()
            .enumerate()
            .map(|(rank, collective)| {
                let mut addresses = addresses.clone();
                if rank == 1 {
                    addresses[0].clone_from(&way);
                }
                scope.spawn(move || {
                    let formation = Formation { epoch: 7, rank, addresses };
                    let mut ring = collective.form(&formation, CancellationToken::new()).unwrap();
                    let mut values = values.to_vec();
                    ring.all_reduce(0, &mut values).map(|()| values)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    (results, seen.into_inner().unwrap())
}

#[test]
fn a_machine_on_the_way_sees_and_changes_nothing() {
    let values = [0x5151_5151_5151_5151i64, 0x5252_5252_5252_5252];
    let sums = values.map(|value| value.wrapping_mul(2));
    for (options, sees) in [(options(), true), (encrypted(), false)] {
        let (results, seen) = through_machine(&options, &values, |_, _| {});
        assert!(results.into_iter().all(|sum| sum.unwrap() == sums));
        assert_eq!(seen.windows(8).any(|part| part == [0x52; 8] || part == [0x51; 8]), sees);
    }
    for at in [44, 44 + 20] {
        let (results, _) = through_machine(&encrypted(), &values, flip(at));
        let error = results.into_iter().next().unwrap().unwrap_err();
        assert!(matches!(error, Error::Protocol { rank: 1, .. }), "{error}");
        assert!(error.to_string().contains("changed on its way"), "{error}");
    }
}

/// Changes a bit of the byte `at` of the first frame after the formation. Checksums are no obstacle: header and payload
/// get new ones.
pub(super) fn flip(at: usize) -> impl FnMut(usize, &mut [u8]) + Send {
    move |from, bytes| {
        if from > HANDSHAKE || from + bytes.len() < HANDSHAKE + at + 1 {
            return;
        }
        let bytes = &mut bytes[HANDSHAKE - from..];
        bytes[at] ^= 1;
        let length = u32::from_le_bytes(bytes[32..36].try_into().unwrap()) as usize;
        let payload = crc32c::crc32c(&bytes[44..44 + length]).to_le_bytes();
        bytes[36..40].copy_from_slice(&payload);
        let header = crc32c::crc32c(&bytes[..40]).to_le_bytes();
        bytes[40..44].copy_from_slice(&header);
    }
}
