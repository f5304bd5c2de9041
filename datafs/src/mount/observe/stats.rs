//! Statistics of a mount: for each kind of request the count, the duration, the bytes and the failures.
//!
//! Recording takes no lock: most threads write to cells of their own, and a reader adds the cells up. Measured
//! processor time on two busy cores: 30 ns per request, and 93 ns for the two clock reads.

mod latency;
mod report;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

pub use latency::Latency;
use latency::{BUCKETS, bucket};
pub use report::{MountStats, OperationStats, TraceStats};

use crate::metrics::{STRIPES, stripe};
use crate::mount::outcome::Outcome;

macro_rules! operations {
    ($($variant:ident $name:literal,)*) => {
        /// The kinds of requests, with the names of their FUSE operations.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(in crate::mount) enum Op { $($variant,)* }

        impl Op {
            pub(in crate::mount) const ALL: &[Op] = &[$(Op::$variant,)*];

            pub(in crate::mount) fn name(self) -> &'static str {
                match self { $(Op::$variant => $name,)* }
            }
        }
    };
}

operations! {
    Lookup "lookup", Getattr "getattr", Setattr "setattr", Access "access", Forget "forget",
    Readlink "readlink", Mknod "mknod", Mkdir "mkdir", Unlink "unlink", Rmdir "rmdir", Symlink "symlink",
    Rename "rename", Link "link", Create "create", Open "open", Read "read", Write "write", Flush "flush",
    Release "release", Fsync "fsync", Opendir "opendir", Readdir "readdir", Readdirplus "readdirplus",
    Releasedir "releasedir", Fsyncdir "fsyncdir", Statfs "statfs", Setxattr "setxattr",
    Getxattr "getxattr", Listxattr "listxattr", Removexattr "removexattr", Getlk "getlk", Setlk "setlk",
    Bmap "bmap", Ioctl "ioctl", Poll "poll", Fallocate "fallocate", Lseek "lseek",
    CopyFileRange "copy_file_range",
}

/// The counters of a mount, in stripes.
#[derive(Debug, Default)]
pub(in crate::mount) struct Stats {
    stripes: [Stripe; STRIPES],
}

/// The counters of a few threads, mostly one.
#[derive(Debug)]
struct Stripe {
    /// Allocated at the first request of a kind: most mounts see few kinds.
    cells: [OnceLock<Box<Cells>>; Op::ALL.len()],
    /// Files opened that the kernel then served without read requests.
    kernel_served: AtomicU64,
}

impl Default for Stripe {
    fn default() -> Stripe {
        Stripe { cells: [const { OnceLock::new() }; Op::ALL.len()], kernel_served: AtomicU64::new(0) }
    }
}

/// The counters of one kind of request.
#[derive(Debug)]
struct Cells {
    begun: AtomicU64,
    nanos: AtomicU64,
    errors: AtomicU64,
    bytes: AtomicU64,
    buckets: [AtomicU64; BUCKETS],
}

impl Default for Cells {
    fn default() -> Cells {
        let zero = AtomicU64::default;
        Cells {
            begun: zero(),
            nanos: zero(),
            errors: zero(),
            bytes: zero(),
            buckets: [const { AtomicU64::new(0) }; BUCKETS],
        }
    }
}

impl Stats {
    fn cells(&self, op: Op) -> &Cells {
        self.stripes[stripe()].cells[op as usize].get_or_init(Box::default)
    }

    /// Counts a request that begins.
    pub(in crate::mount) fn begin(&self, op: Op) {
        self.cells(op).begun.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a request that was answered, maybe by another thread.
    pub(in crate::mount) fn end(&self, op: Op, nanos: u64, outcome: Outcome) {
        let cells = self.cells(op);
        cells.buckets[bucket(nanos)].fetch_add(1, Ordering::Relaxed);
        cells.nanos.fetch_add(nanos, Ordering::Relaxed);
        if outcome.failed {
            cells.errors.fetch_add(1, Ordering::Relaxed);
        }
        if outcome.bytes > 0 {
            cells.bytes.fetch_add(outcome.bytes, Ordering::Relaxed);
        }
        if outcome.kernel_serves {
            self.stripes[stripe()].kernel_served.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The kinds with at least one request. Not a consistent snapshot: threads go on counting meanwhile.
    pub(in crate::mount) fn operations(&self) -> Vec<OperationStats> {
        Op::ALL.iter().filter_map(|op| self.operation(*op)).collect()
    }

    fn operation(&self, op: Op) -> Option<OperationStats> {
        let mut sum = OperationStats { op: op.name().into(), ..OperationStats::default() };
        let mut begun = 0;
        for cells in self.stripes.iter().filter_map(|stripe| stripe.cells[op as usize].get()) {
            // Ended requests are read first, so that they never exceed the begun ones.
            for (i, count) in cells.buckets.iter().enumerate() {
                sum.latency.add(i, count.load(Ordering::Relaxed));
            }
            sum.latency.nanos += cells.nanos.load(Ordering::Relaxed);
            sum.errors += cells.errors.load(Ordering::Relaxed);
            sum.bytes += cells.bytes.load(Ordering::Relaxed);
            begun += cells.begun.load(Ordering::Relaxed);
        }
        sum.in_flight = begun.saturating_sub(sum.latency.count());
        (begun > 0).then_some(sum)
    }

    /// Files opened that the kernel then served without read requests.
    pub(in crate::mount) fn kernel_served_opens(&self) -> u64 {
        self.stripes.iter().map(|stripe| stripe.kernel_served.load(Ordering::Relaxed)).sum()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Arc;
    use std::time::Instant;

    use super::*;

    #[test]
    fn what_threads_count_adds_up() {
        let stats = Arc::new(Stats::default());
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let stats = Arc::clone(&stats);
                std::thread::spawn(move || {
                    for i in 0..1_000 {
                        let outcome = Outcome { bytes: 10, failed: i % 10 == 0, ..Outcome::default() };
                        stats.begin(Op::Read);
                        stats.end(Op::Read, 5_000, outcome);
                    }
                    stats.begin(Op::Fsync);
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let [read, fsync] = stats.operations().try_into().unwrap();
        assert_eq!((read.op.as_str(), read.latency.count(), read.errors), ("read", 4_000, 400));
        assert_eq!((read.bytes, read.in_flight), (40_000, 0));
        assert_eq!(read.latency.mean().as_micros(), 5);
        assert_eq!((fsync.op.as_str(), fsync.latency.count(), fsync.in_flight), ("fsync", 0, 4));
    }

    /// `cargo test --release -p millrace-datafs what_recording_costs -- --ignored --nocapture`
    #[test]
    #[ignore = "prints a figure; run it alone: cargo test --release -p millrace-datafs --lib what_recording_costs -- --ignored --nocapture"]
    #[allow(clippy::print_stdout)]
    fn what_recording_costs() {
        let stats = Stats::default();
        let rounds = 10_000_000_u32;
        let begin = Instant::now();
        for i in 0..rounds {
            stats.begin(Op::Lookup);
            stats.end(Op::Lookup, u64::from(i % 50_000), Outcome::default());
        }
        let recorded = begin.elapsed();
        let begin = Instant::now();
        for _ in 0..rounds {
            let before = Instant::now();
            std::hint::black_box(before.elapsed());
        }
        println!(
            "a request: {:?}, two looks at the clock: {:?}",
            recorded / rounds,
            begin.elapsed() / rounds
        );
    }
}
