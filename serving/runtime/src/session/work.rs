//! Inference requests that were checked for one model version, and their results.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use millrace_serving_core::error::InferError;
use millrace_serving_core::statistics::Times;
use millrace_serving_core::tensor::TensorHandle;

/// Share of a client's deadline that is reserved for network transit: one tenth.
const TRANSIT_PART: u32 = 10;

/// A checked request.
#[derive(Debug)]
pub struct Work {
    /// The inputs, in the signature's order.
    pub inputs: Vec<TensorHandle>,
    /// The requested outputs, by their indexes in the signature, in the order requested.
    pub outputs: Vec<usize>,
    /// Whether each requested output may stay in the memory of the device, in the same order; missing entries are
    /// false.
    pub stays: Vec<bool>,
    /// Number of rows, if rows are the first dimension of every input and output. Otherwise 0, and the request runs
    /// alone.
    pub rows: usize,
    /// Start of the wait for a session.
    pub queued: Instant,
    /// Latest start of the run.
    pub deadline: Option<Instant>,
    /// Time after which the client does not need the answer.
    pub answer_by: Option<Instant>,
    /// Level of priority; lower levels run first.
    pub level: usize,
    /// Address of the client's connection. Requests without one count as those of a single client.
    pub client: Option<SocketAddr>,
}

impl Work {
    /// Bytes of the inputs.
    pub fn bytes(&self) -> usize {
        self.inputs.iter().fold(0, |sum, input| sum.saturating_add(input.view().bytes()))
    }

    /// Elements of the inputs.
    pub(super) fn elements(&self) -> usize {
        self.inputs.iter().fold(0, |sum, input| sum.saturating_add(input.view().elements()))
    }

    /// Whether the deadline has passed.
    pub(super) fn is_late(&self, now: Instant) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= now)
    }

    /// Moves the deadline forward by the expected run time and network time, so that a request that starts in time is
    /// also answered in time. Otherwise an overloaded server would run requests whose answers arrive just too late.
    pub(super) fn allow_for(&mut self, run: Duration) {
        let start_by = self.answer_by.map(|answer_by| {
            let transit = answer_by.saturating_duration_since(self.queued) / TRANSIT_PART;
            answer_by.checked_sub(run.saturating_add(transit)).unwrap_or(self.queued)
        });
        self.deadline = self.deadline.into_iter().chain(start_by).min();
    }

    /// Rows charged to the client; a request without rows counts as one.
    pub(super) fn cost(&self) -> u64 {
        self.rows.max(1) as u64
    }

    /// Whether both requests can share a batch: they want the same outputs, and their rows have the same shapes.
    pub(super) fn is_like(&self, other: &Work) -> bool {
        self.rows > 0
            && other.rows > 0
            && self.outputs == other.outputs
            && self
                .inputs
                .iter()
                .zip(&other.inputs)
                .all(|(a, b)| a.view().shape().get(1..) == b.view().shape().get(1..))
    }
}

/// The result of one request.
#[derive(Debug)]
pub struct Output {
    /// The requested outputs, in the order requested.
    pub outputs: Vec<TensorHandle>,
    /// Timestamps of the stages.
    pub times: Times,
    /// Rows of the run, set for the one request of a batch that counts it.
    pub run_rows: Option<usize>,
}

/// The error for a request that waited since `queued` and whose deadline passed before its run.
pub(super) fn deadline_error(queued: Instant, now: Instant) -> InferError {
    InferError::DeadlineExceeded {
        reason: format!(
            "the request waited for a session for {} us and could not be answered in time: the least of its parameter \
             timeout, grpc-timeout and batching.timeout_us_max",
            now.saturating_duration_since(queued).as_micros()
        ),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::LazyLock;

    use super::*;
    use millrace_serving_core::tensor::Tensor;

    pub(in crate::session) static BEGIN: LazyLock<Instant> = LazyLock::new(Instant::now);

    pub(in crate::session) fn client(number: u16) -> Option<SocketAddr> {
        Some(SocketAddr::from(([127, 0, 0, 1], number)))
    }

    /// A request of client 1 with `rows` rows of `width` elements, queued `at` microseconds after [`BEGIN`].
    pub(in crate::session) fn work(rows: usize, width: i64, outputs: &[usize], at: u64) -> Work {
        let count = rows.max(1) * width as usize;
        let input = Tensor::fp32("x", vec![rows.max(1) as i64, width], vec![0.0; count]).unwrap();
        Work {
            inputs: vec![TensorHandle::Alone(input)],
            outputs: outputs.to_vec(),
            stays: Vec::new(),
            rows,
            queued: *BEGIN + Duration::from_micros(at),
            deadline: None,
            answer_by: None,
            level: 1,
            client: client(1),
        }
    }

    #[test]
    fn deadline_leaves_time_for_the_run_and_the_network() {
        let at = |millis| *BEGIN + Duration::from_millis(millis);
        for (deadline, answer_by, run, expected) in [
            (None, None, 5, None),
            (Some(30), None, 5, Some(30)),
            (None, Some(30), 5, Some(22)),
            (Some(20), Some(30), 5, Some(20)),
            (Some(30), Some(30), 5, Some(22)),
        ] {
            let (deadline, answer_by) = (deadline.map(at), answer_by.map(at));
            let mut work = Work { deadline, answer_by, ..work(1, 4, &[0], 0) };
            work.allow_for(Duration::from_millis(run));
            assert_eq!(work.deadline, expected.map(at));
        }
        let mut work = Work { answer_by: Some(*BEGIN), ..work(1, 4, &[0], 0) };
        work.allow_for(Duration::MAX);
        assert!(work.is_late(*BEGIN));
    }
}
