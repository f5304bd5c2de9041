//! Tests of shared memory between ranks: equal bits, room, declined offers, hostile neighbors, a killed process.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::process::{Command, Stdio};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

use super::encrypted::{flip, through_machine};
use super::*;
use crate::collective::frame::Span;
use crate::collective::offer::{self, Offered, SIZE_MAX};
use crate::collective::shared::{PAGE_BYTES, Writer};

/// The memory file of a ring, as the lists of the kernel name it.
const LINK: &str = "/memfd:millrace-ring (deleted)";
const SHRINK_AND_GROW: SealFlag = SealFlag::F_SEAL_SHRINK.union(SealFlag::F_SEAL_GROW);

/// Both sides of a memory with a ring of `size` bytes.
fn pair(size: usize) -> (Writer, Reader) {
    let Offered { offer, writer, file } = offer::create(size).unwrap();
    let reader = offer.open().unwrap();
    drop(file);
    (writer, reader)
}

#[test]
fn sums_have_the_same_bits_with_and_without_shared_memory() {
    // The ring of bytes holds as much as two buckets.
    let bucket = 1 << 14;
    let lengths = [
        1,
        bucket - 1,
        bucket,
        bucket + 1,
        2 * bucket - 1,
        2 * bucket,
        2 * bucket + 1,
        4 * bucket + 1,
        100_000,
    ];
    let options = |shared_memory| Options { bucket_elements_max: bucket, shared_memory, ..around() };
    let sums = |options: &[Options]| {
        on_ranks(options, |rank, mut ring| {
            let mut sum = |length: usize| {
                let integer =
                    |i: usize| (i as i64).wrapping_mul(0x1e37_79b9_7f4a_7c15).rotate_left(rank as u32);
                let mut integers: Vec<i64> = (0..length).map(integer).collect();
                ring.all_reduce(1, &mut integers).unwrap();
                let float = |i: usize| ((i * 7919 + rank * 104_729) % 1_000_003) as f32 * 1e-3;
                let mut floats: Vec<f32> = (0..length).map(float).collect();
                ring.all_reduce(2, &mut floats).unwrap();
                (integers, floats.iter().map(|value| value.to_bits()).collect::<Vec<_>>())
            };
            let sums = lengths.map(&mut sum);
            (sums, ring.shared_bytes())
        })
    };
    for world in [2, 3, 5] {
        let without = sums(&vec![options(false); world]);
        let with = sums(&vec![options(true); world]);
        let mixed: Vec<Options> = (0..world).map(|rank| options(rank != 1)).collect();
        let mixed = sums(&mixed);
        for rank in 0..world {
            let expected = &without[0].0;
            assert!([&without, &with, &mixed].iter().all(|ranks| ranks[rank].0 == *expected));
            assert_eq!(without[rank].1, [None; 2]);
            assert!(with[rank].1.iter().all(|bytes| bytes.is_some_and(|bytes| bytes > 0)));
            // Both sides of a connection must want the memory.
            let neighbors = [(rank + 1) % world, (rank + world - 1) % world];
            let shared = neighbors.map(|neighbor| rank != 1 && neighbor != 1);
            assert_eq!(mixed[rank].1.map(|bytes| bytes.is_some_and(|bytes| bytes > 0)), shared);
        }
    }
}

#[test]
fn ranks_at_the_own_name_of_a_machine_share_memory() {
    // Debian's /etc/hosts leads there; the connection comes from 127.0.0.1.
    let own_name = IpAddr::V4(Ipv4Addr::new(127, 0, 1, 1));
    let shared = on_ranks_at(own_name, &vec![around(); 2], |_, mut ring| {
        ring.all_reduce(1, &mut [1i64; 1 << 14]).unwrap();
        ring.shared_bytes()
    });
    assert!(shared.iter().flatten().all(|bytes| bytes.is_some_and(|bytes| bytes > 0)), "{shared:?}");
}

#[test]
fn thousands_of_sums_keep_their_positions() {
    let (sums, elements) = (3000, 1 << 13);
    let options = Options { bucket_elements_max: elements, ..around() };
    let results = on_ring(2, &options, |rank, mut ring| {
        for step in 0..sums {
            let mut values: Vec<i64> =
                (0..elements as i64).map(|i| i + step as i64 * (rank as i64 + 1)).collect();
            ring.all_reduce(step, &mut values).unwrap();
            assert!(values.iter().enumerate().all(|(i, sum)| *sum == 2 * i as i64 + 3 * step as i64));
        }
        ring.shared_bytes()
    });
    // A sum sends half of the vector twice. The neighbor is at most two frames behind, for which there is room.
    let bytes = sums * elements as u64 * 8;
    assert_eq!(results, [[Some(bytes); 2]; 2]);
}

#[test]
fn data_wrap_around_the_end_of_the_ring_of_bytes() {
    let (mut writer, mut reader) = pair(PAGE_BYTES);
    let (mut got, mut written) = (Vec::new(), 0);
    for round in 0..20_000 {
        let bytes = 1 + round * 7919 % PAGE_BYTES;
        let data: Vec<u8> = (0..bytes).map(|i| (i + round) as u8).collect();
        let span = writer.place(&data).unwrap();
        assert_eq!(span, Span { position: written, bytes: bytes as u32 });
        reader.take(span, &mut got).unwrap();
        assert!(got == data, "round {round}");
        written += bytes as u64;
    }
    assert_eq!((writer.written(), reader.copied()), (written, written));
}

#[test]
fn data_without_room_are_not_placed() {
    let (mut writer, mut reader) = pair(PAGE_BYTES);
    let mut got = Vec::new();
    assert_eq!(writer.place(&[0; PAGE_BYTES + 1]), None);
    let first = writer.place(&[1; 3000]).unwrap();
    assert_eq!(writer.place(&[2; 1097]), None);
    let second = writer.place(&[2; 1096]).unwrap();
    assert_eq!(writer.place(&[3]), None);
    reader.take(first, &mut got).unwrap();
    assert_eq!(got, [1; 3000]);
    assert_eq!(writer.place(&[3; 3001]), None);
    let third = writer.place(&[3; 3000]).unwrap();
    reader.take(second, &mut got).unwrap();
    assert_eq!(got, [2; 1096]);
    reader.take(third, &mut got).unwrap();
    assert_eq!(got, [3; 3000]);
    assert_eq!(writer.place(&[4; PAGE_BYTES]).map(|span| span.bytes as usize), Some(PAGE_BYTES));
}

#[test]
fn impossible_positions_of_a_hostile_reader_leave_no_room() {
    let (mut writer, mut reader) = pair(PAGE_BYTES);
    let mut got = Vec::new();
    for _ in 0..3 {
        let span = writer.place(&[1; 3000]).unwrap();
        reader.take(span, &mut got).unwrap();
    }
    let lowest = 9000 - PAGE_BYTES as u64;
    for position in [0, lowest - 1, lowest, 9001, 1 << 63, u64::MAX] {
        reader.claim(position);
        assert_eq!(writer.place(&[2]), None, "position {position}");
    }
    reader.claim(lowest + 1);
    assert_eq!(writer.place(&[2; 2]), None);
    assert_eq!(writer.place(&[2]), Some(Span { position: 9000, bytes: 1 }));
}

#[test]
fn places_that_are_not_the_next_one_are_refused() {
    let (mut writer, mut reader) = pair(PAGE_BYTES);
    let right = writer.place(&[1; 100]).unwrap();
    let mut got = Vec::new();
    for (span, reason) in [
        (Span { position: 1, ..right }, "at position 1 of shared memory, not 0"),
        (Span { position: u64::MAX, ..right }, "at position 18446744073709551615"),
        (Span { bytes: PAGE_BYTES as u32 + 1, ..right }, "4097 bytes in a shared memory of 4096"),
        (Span { bytes: u32::MAX, ..right }, "4294967295 bytes in a shared memory of 4096"),
    ] {
        let error = reader.take(span, &mut got).unwrap_err();
        assert!(error.contains(reason), "{error} lacks {reason}");
        assert_eq!(got.capacity(), 0);
    }
    reader.take(right, &mut got).unwrap();
    assert_eq!(got, [1; 100]);
    let error = reader.take(right, &mut got).unwrap_err();
    assert!(error.contains("at position 0 of shared memory, not 100"), "{error}");
}

#[test]
fn two_buckets_up_to_a_limit_are_the_size() {
    let size = |bucket_elements_max, shared_memory| {
        offer::size(&Options { bucket_elements_max, shared_memory, ..options() })
    };
    // No frame of these fits and is large enough.
    assert_eq!([size(0, true), size(1, true), size(1024, true)], [None; 3]);
    assert_eq!(size(1025, true), Some(5 * PAGE_BYTES));
    assert_eq!(size(1 << 18, true), Some(4 << 20));
    assert_eq!([size(1 << 20, true), size(usize::MAX, true)], [Some(SIZE_MAX); 2]);
    assert_eq!(size(1 << 18, false), None);
}

/// The data of the next frame that rank 0 sends, and whether they are in its memory. Gives no place free.
fn next_data(peer: &mut Peer) -> (Vec<u8>, bool) {
    let mut head = [0u8; 44];
    peer.from.read_exact(&mut head).unwrap();
    let received = Header::decode(&head).unwrap();
    let mut payload = vec![0; received.bytes];
    peer.from.read_exact(&mut payload).unwrap();
    match received.is_shared {
        true => (peer.memory.as_ref().unwrap().peek(Span::decode(&payload).unwrap()), true),
        false => (payload, false),
    }
}

/// Rank 0 sends a state of five pieces to a peer that gives no place free. Says which pieces were in its memory of two
/// pieces. `prepare` gets the memory before the first piece.
fn pieces_in_memory(prepare: impl FnOnce(&Reader)) -> [bool; 5] {
    let piece = 1 << 20;
    let options = Options { bucket_elements_max: piece / 8, ..around() };
    let state: Vec<u8> = (0..5 * piece).map(|i| (i * 31 % 251) as u8).collect();
    let state = state.as_slice();
    let (prepared, begin) = mpsc::channel::<()>();
    let send = move |mut ring: Ring<'_>| {
        // The end of the channel.
        begin.recv().unwrap_err();
        ring.broadcast(1, 0, Some(state), u64::MAX).map(drop)
    };
    let mut in_memory = [false; 5];
    let sent = with_peer(options, (true, None), send, |peer| {
        prepare(peer.memory.as_ref().unwrap());
        drop(prepared);
        assert_eq!(next_data(peer), ((state.len() as u64).to_le_bytes().to_vec(), false));
        for (piece, in_memory) in state.chunks(piece).zip(&mut in_memory) {
            let (data, is_shared) = next_data(peer);
            assert!(data == piece);
            *in_memory = is_shared;
        }
    });
    sent.unwrap();
    in_memory
}

#[test]
fn frames_without_room_carry_their_data() {
    assert_eq!(pieces_in_memory(|_| {}), [true, true, false, false, false]);
}

#[test]
fn a_neighbor_with_impossible_positions_gets_the_data_in_frames() {
    for position in [1, 1 << 63, u64::MAX] {
        assert_eq!(pieces_in_memory(|memory| memory.claim(position)), [false; 5], "position {position}");
    }
}

/// The frames of rank 1 in a sum of two numbers over two ranks.
fn two_frames(payloads: [&[u8]; 2], is_shared: bool) -> Vec<u8> {
    let frame = |(kind, payload): (Kind, &[u8])| {
        let header = Header { kind, rank: 1, epoch: 7, step: 2, bucket: 0, phase: 0 };
        [header.encode_as(payload, is_shared).as_slice(), payload].concat()
    };
    [(Kind::Reduce, payloads[0]), (Kind::Gather, payloads[1])].map(frame).concat()
}

/// Rank 0's sum of 1 and 2 with the frames of a peer that offers `offer`.
fn sum_with(offer: Option<&Offer>, is_taken: bool, frames: &[u8]) -> Result<[i64; 2], Error> {
    let sum = |mut ring: Ring<'_>| {
        let mut values = [1, 2];
        ring.all_reduce(2, &mut values).map(|()| values)
    };
    with_peer(around(), (false, offer), sum, |peer| {
        assert_eq!(peer.is_taken, is_taken);
        peer.to.write_all(frames).unwrap();
    })
}

#[test]
fn frames_with_a_wrong_place_are_refused() {
    let mut offered = offer::create(PAGE_BYTES).unwrap();
    let spans = [40i64, 50].map(|value| offered.writer.place(&value.to_le_bytes()).unwrap());
    let (first, second) = (spans[0].encode(), spans[1].encode());
    let offer = Some(&offered.offer);
    assert_eq!(sum_with(offer, true, &two_frames([&first, &second], true)).unwrap(), [50, 42]);
    let moved = |position, bytes| Span { position, bytes }.encode();
    let longer = [first.as_slice(), &[0]].concat();
    for (payloads, reason) in [
        ([&second[..], &second[..]], "at position 8 of shared memory, not 0"),
        ([&moved(u64::MAX, 8), &second], "at position 18446744073709551615"),
        ([&moved(0, 7), &second], "7 bytes in shared memory, not 8"),
        ([&moved(0, u32::MAX), &second], "4294967295 bytes in shared memory, not 8"),
        ([&first[..11], &second], "11 bytes, not 12"),
        ([&longer, &second], "13 bytes, not 12"),
        ([&first, &first], "at position 0 of shared memory, not 8"),
    ] {
        let error = sum_with(offer, true, &two_frames(payloads, true)).unwrap_err();
        assert!(matches!(error, Error::Protocol { rank: 1, .. }), "{error}");
        assert!(error.to_string().contains(reason), "{error} lacks {reason}");
    }
    let error = sum_with(None, false, &two_frames([&first, &second], true)).unwrap_err();
    assert!(matches!(error, Error::Protocol { rank: 1, .. }), "{error}");
    assert!(error.to_string().contains("shared memory, which this connection lacks"), "{error}");
}

/// The page of files of huge pages on x86-64 and on most other machines.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A memory file with these bytes and seals, and the offer of a ring of [`PAGE_BYTES`] in it.
fn memory(name: &str, bytes: usize, seals: SealFlag) -> (File, Offer) {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let file = File::from(memfd_create(name, flags).unwrap());
    file.set_len(bytes as u64).unwrap();
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).unwrap();
    let offer = offer_of(&file);
    (file, offer)
}

/// The offer of a ring of [`PAGE_BYTES`] in this file, which gets the nonce.
fn offer_of(file: &File) -> Offer {
    let offer = offer::create(PAGE_BYTES).unwrap().offer;
    Writer::new(file, PAGE_BYTES, &offer.nonce).unwrap();
    Offer { descriptor: file.as_raw_fd() as u32, ..offer }
}

/// The id of a process that has ended.
fn ended_process() -> u32 {
    let mut child = Command::new("true").spawn().unwrap();
    child.wait().unwrap();
    child.id()
}

#[test]
fn offers_of_another_memory_are_declined() {
    const NAME: &str = "millrace-ring";
    let bytes = 2 * PAGE_BYTES;
    let (right_file, right) = memory(NAME, bytes, SHRINK_AND_GROW);
    right.open().unwrap();
    let mut files = vec![right_file];
    let mut keep = |(file, offer): (File, Offer)| {
        files.push(file);
        offer
    };
    let named = tempfile::tempfile().unwrap();
    named.set_len(bytes as u64).unwrap();
    let offer_of_named = offer_of(&named);
    let mut nonce = right.nonce;
    nonce[31] ^= 1;
    let mut boot = right.boot;
    boot[0] ^= 1;
    let mut cases = vec![
        (Offer { nonce, ..right.clone() }, "is another memory"),
        (Offer { boot, ..right.clone() }, "on another machine"),
        (Offer { process: ended_process(), ..right.clone() }, "read the link /proc/"),
        (Offer { process: 0, ..right.clone() }, "read the link /proc/0/"),
        (Offer { descriptor: u32::MAX, ..right.clone() }, "read the link /proc/"),
        (Offer { size: 0, ..right.clone() }, "it has 0 bytes"),
        (Offer { size: SIZE_MAX as u64 + 1, ..right.clone() }, "it has 16777217 bytes"),
        (Offer { size: u64::MAX, ..right.clone() }, "it has 18446744073709551615 bytes"),
        (Offer { size: right.size - 1, ..right.clone() }, "has 8192 bytes, not 8191"),
        (keep(memory(NAME, bytes - 1, SHRINK_AND_GROW)), "has 8191 bytes, not 8192"),
        (keep(memory(NAME, bytes + 1, SHRINK_AND_GROW)), "has 8193 bytes, not 8192"),
        (keep(memory(NAME, bytes, SealFlag::empty())), "may change its size"),
        (keep(memory(NAME, bytes, SealFlag::F_SEAL_SHRINK)), "may change its size"),
        (keep(memory(NAME, bytes, SealFlag::F_SEAL_GROW)), "may change its size"),
        (keep(memory("millrace-another", bytes, SHRINK_AND_GROW)), "is /memfd:millrace-another"),
        (keep((named, offer_of_named)), " is /"),
    ];
    // Only root can give files away.
    if nix::unistd::geteuid().is_root() {
        let (file, offer) = memory(NAME, bytes, SHRINK_AND_GROW);
        std::os::unix::fs::fchown(&file, Some(65534), None).unwrap();
        cases.push((keep((file, offer)), "belongs to user 65534"));
    }
    // Kernels without huge pages create no such file.
    let huge = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING | MFdFlags::MFD_HUGETLB;
    if let Ok(file) = memfd_create(NAME, huge).map(File::from) {
        file.set_len(HUGE_PAGE_BYTES as u64).unwrap();
        fcntl(&file, FcntlArg::F_ADD_SEALS(SHRINK_AND_GROW)).unwrap();
        // Nothing is written: there may be no page.
        let (size, descriptor) = ((HUGE_PAGE_BYTES - PAGE_BYTES) as u64, file.as_raw_fd() as u32);
        let offer = Offer { size, descriptor, ..right.clone() };
        cases.push((keep((file, offer)), "is not on a file system of memory"));
    }
    let numbers = [40i64, 50].map(i64::to_le_bytes);
    let frames = two_frames([&numbers[0], &numbers[1]], false);
    for (offer, reason) in cases {
        let error = offer.open().unwrap_err();
        assert!(error.contains(reason), "{error} lacks {reason}");
        assert_eq!(sum_with(Some(&offer), false, &frames).unwrap(), [50, 42], "{reason}");
    }
    assert_eq!(sum_with(Some(&right), true, &frames).unwrap(), [50, 42]);
}

#[test]
fn encrypted_rings_share_memory_and_protect_the_places() {
    let options = Options { encrypt: true, ..around() };
    let values = vec![0x5151_5151_5151_5151; 1 << 14];
    let (results, seen) = through_machine(&options, &values, |_, _| {});
    let sums: Vec<i64> = values.iter().map(|value: &i64| value.wrapping_mul(2)).collect();
    assert!(results.into_iter().all(|sum| sum.unwrap() == sums));
    assert!(seen.len() < 1024, "{} bytes went over TCP", seen.len());
    // Position, length and tag.
    for at in [44, 44 + 8, 44 + 12] {
        let (results, _) = through_machine(&options, &values, flip(at));
        let error = results.into_iter().next().unwrap().unwrap_err();
        assert!(matches!(error, Error::Protocol { rank: 1, .. }), "{error}");
        assert!(error.to_string().contains("changed on its way"), "{error}");
    }
}

/// Marks the process that is killed.
const ENV_RANK: &str = "MILLRACE_TEST_RING_RANK";
/// What it writes before its address.
const ADDRESS: &str = "address ";
/// Elements of a sum: three frames of 683 KiB, two times.
const ELEMENTS: usize = 1 << 18;

/// The process that is killed: rank 2 of three ranks, which sums for ever.
#[test]
fn rank_entry() {
    if std::env::var_os(ENV_RANK).is_none() {
        return;
    }
    let collective = Collective::bind(LOCAL, around()).unwrap();
    println!("{ADDRESS}{}", collective.address());
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let addresses = line.split_whitespace().map(str::to_owned).collect();
    let formation = Formation { epoch: 7, rank: 2, addresses };
    let mut ring = collective.form(&formation, CancellationToken::new()).unwrap();
    let mut values = vec![1i64; ELEMENTS];
    for step in 0.. {
        ring.all_reduce(step, &mut values).unwrap();
    }
}

#[test]
fn a_killed_process_that_shares_memory_is_named() {
    for sums in [1, 2, 3, 5, 8, 13] {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "collective::tests::shared::rank_entry", "--nocapture", "--test-threads", "1"])
            .env(ENV_RANK, "2")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let address = |line: std::io::Result<String>| {
            line.unwrap().split_once(ADDRESS).map(|(_, address)| address.to_owned())
        };
        let address = lines.find_map(address).expect("the process ended by itself");
        let (bound, mut addresses) = bind(2, &around());
        addresses.push(address);
        writeln!(child.stdin.take().unwrap(), "{}", addresses.join(" ")).unwrap();
        let (done, counted) = mpsc::channel();
        thread::scope(|scope| {
            let ranks: Vec<_> = bound
                .into_iter()
                .enumerate()
                .map(|(rank, collective)| {
                    let formation = Formation { epoch: 7, rank, addresses: addresses.clone() };
                    let done = done.clone();
                    scope.spawn(move || {
                        let mut ring = collective.form(&formation, CancellationToken::new()).unwrap();
                        let mut values = vec![1i64; ELEMENTS];
                        let sum = |step: u64| match ring.all_reduce(step, &mut values) {
                            // Rank 0 receives from the process, rank 1 sends to it.
                            Ok(()) => {
                                let _ = done.send(ring.shared_bytes()[1 - rank]);
                                None
                            }
                            Err(error) => Some(error.suspect()),
                        };
                        (0..).find_map(sum).unwrap()
                    })
                })
                .collect();
            drop(done);
            let shared: Vec<Option<u64>> = counted.iter().take(2 * sums).collect();
            // The ranks are in a later sum.
            child.kill().unwrap();
            child.wait().unwrap();
            let named: Vec<Option<usize>> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
            assert_eq!(named, [Some(2); 2], "after {sums} sums");
            assert_eq!(shared.len(), 2 * sums);
            assert!(shared.iter().all(|bytes| bytes.is_some_and(|bytes| bytes > 0)), "{shared:?}");
        });
    }
}

/// The addresses and inodes of all mapped memory files.
fn mapped() -> Vec<(Range<usize>, u64)> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let parse = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (from, to) = fields[0].split_once('-').unwrap();
        let [from, to] = [from, to].map(|text| usize::from_str_radix(text, 16).unwrap());
        (from..to, fields[4].parse().unwrap())
    };
    maps.lines().filter(|line| line.ends_with(LINK)).map(parse).collect()
}

/// The inode of the memory file at this address.
fn inode_at(address: usize) -> u64 {
    mapped().into_iter().find(|(range, _)| range.contains(&address)).unwrap().1
}

/// The inodes of all open memory files.
fn open_files() -> HashSet<u64> {
    let of_entry = |entry: std::io::Result<fs::DirEntry>| {
        // Other tests close theirs meanwhile.
        let path = entry.ok()?.path();
        let is_memory = fs::read_link(&path).ok()?.as_os_str() == LINK;
        fs::metadata(&path).ok().filter(|_| is_memory).map(|file| file.ino())
    };
    fs::read_dir("/proc/self/fd").unwrap().filter_map(of_entry).collect()
}

fn assert_gone(inodes: &HashSet<u64>) {
    assert!(mapped().iter().all(|(_, inode)| !inodes.contains(inode)), "mapped");
    assert!(open_files().is_disjoint(inodes), "open");
}

#[test]
fn a_dropped_ring_leaves_no_mapping_and_no_descriptor() {
    let inodes: Vec<Vec<u64>> =
        on_ring(3, &options(), |_, ring| ring.memory_addresses().into_iter().map(inode_at).collect());
    assert!(inodes.iter().all(|inodes| inodes.len() == 2), "{inodes:?}");
    let inodes: HashSet<u64> = inodes.into_iter().flatten().collect();
    assert_eq!(inodes.len(), 3);
    assert_gone(&inodes);
}

#[test]
fn an_unanswered_offer_ends_at_the_deadline() {
    let options = Options { form_timeout: Duration::from_secs(2), ..options() };
    let mine = Collective::bind(LOCAL, options).unwrap();
    let listener = std::net::TcpListener::bind((LOCAL, 0)).unwrap();
    let addresses = vec![mine.address().to_string(), listener.local_addr().unwrap().to_string()];
    thread::scope(|scope| {
        let rank = scope.spawn(move || {
            let formation = Formation { epoch: 7, rank: 0, addresses };
            mine.form(&formation, CancellationToken::new()).map(drop).unwrap_err()
        });
        let mut from = accept_as_rank_1(&listener);
        let reader = read_offer(&mut from).unwrap().open().unwrap();
        let inode = inode_at(reader.address());
        let error = rank.join().unwrap();
        assert!(matches!(error, Error::Timeout { rank: 1, .. }), "{error}");
        drop(reader);
        assert_gone(&HashSet::from([inode]));
    });
}
