//! Shadow traffic: runs a copy of a fraction of a model's requests on another version after the answer, and
//! compares both outputs. No request waits for it; copies beyond the capacity are dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus::{Histogram, IntCounter};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::model::{Model, Request, infer_with};
use millrace_serving_core::metrics::{SHADOW_DIFFERENCE, SHADOW_REQUESTS, SHADOW_ROWS};
use millrace_serving_core::tensor::{Data, Tensor};

/// Most copies per model that wait or run at once.
const COPIES_MAX: usize = 4;

/// A version that runs copies of requests to other versions.
#[derive(Debug)]
pub(crate) struct Shadow {
    target: Arc<Model>,
    /// The fraction of requests to copy, in units of 2^-64.
    part: u64,
    count: AtomicU64,
    room: Arc<Semaphore>,
    metrics: Metrics,
}

#[derive(Debug)]
struct Metrics {
    compared: IntCounter,
    unlike: IntCounter,
    failed: IntCounter,
    dropped: IntCounter,
    difference: Histogram,
    same: IntCounter,
    other: IntCounter,
}

impl Shadow {
    /// Copies the fraction `share` of the requests, from 0 to 1, to `target`.
    pub(crate) fn new(target: Arc<Model>, share: f64) -> Shadow {
        let version = target.version().to_string();
        let labels = [target.name(), version.as_str()];
        let requests = |outcome| SHADOW_REQUESTS.with_label_values(&[labels[0], labels[1], outcome]);
        let rows = |label| SHADOW_ROWS.with_label_values(&[labels[0], labels[1], label]);
        let metrics = Metrics {
            compared: requests("compared"),
            unlike: requests("unlike"),
            failed: requests("failed"),
            dropped: requests("dropped"),
            difference: SHADOW_DIFFERENCE.with_label_values(&labels),
            same: rows("same"),
            other: rows("other"),
        };
        // The conversion from floating point saturates.
        let part = (share * 2f64.powi(64)) as u64;
        Shadow { target, part, count: AtomicU64::new(0), room: Arc::new(Semaphore::new(COPIES_MAX)), metrics }
    }

    /// Whether [`Shadow::new`] would return an equal shadow.
    pub(crate) fn is_like(&self, other: &Shadow) -> bool {
        Arc::ptr_eq(&self.target, &other.target) && self.part == other.part
    }

    /// The version that runs the copies.
    pub(crate) fn version(&self) -> u64 {
        self.target.version()
    }

    /// A copy of the request if it is selected and capacity is free.
    pub(crate) fn copy(self: &Arc<Self>, request: &Request) -> Option<ShadowRequest> {
        // The same even spread as in the traffic split, see `repository::split`.
        let place = self.count.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        if place >= self.part && self.part != u64::MAX {
            return None;
        }
        let Ok(permit) = Arc::clone(&self.room).try_acquire_owned() else {
            self.metrics.dropped.inc();
            return None;
        };
        Some(ShadowRequest {
            shadow: Arc::clone(self),
            request: request.clone(),
            outputs: Vec::new(),
            _permit: permit,
        })
    }

    fn compare(&self, ours: &[Tensor], theirs: &[Tensor]) {
        let Some(found) = compare(ours, theirs) else { return self.metrics.unlike.inc() };
        self.metrics.difference.observe(found.difference);
        self.metrics.same.inc_by(found.same);
        self.metrics.other.inc_by(found.other);
        // Incremented last, so that a reader that sees it finds the others updated.
        self.metrics.compared.inc();
    }
}

/// An answered request that will run again.
#[derive(Debug)]
pub(crate) struct ShadowRequest {
    shadow: Arc<Shadow>,
    request: Request,
    outputs: Vec<Tensor>,
    _permit: OwnedSemaphorePermit,
}

impl ShadowRequest {
    /// Stores the outputs of the answer.
    pub(crate) fn answered(mut self, outputs: &[Tensor]) -> ShadowRequest {
        self.outputs = outputs.to_vec();
        self
    }

    /// Runs the copy on a blocking thread, so that the current thread writes the response first.
    pub(crate) fn run(self) {
        let runtime = tokio::runtime::Handle::current();
        tokio::task::spawn_blocking(move || {
            let ShadowRequest { shadow, request, outputs, _permit } = self;
            match runtime.block_on(infer_with(&shadow.target, None, request)) {
                Ok((response, ..)) => shadow.compare(&outputs, &response.outputs),
                Err(error) => {
                    shadow.metrics.failed.inc();
                    let model = shadow.target.name();
                    tracing::debug!(model, version = shadow.target.version(), %error, "a shadow run failed");
                }
            }
        });
    }
}

/// The difference of two responses.
#[derive(Debug, PartialEq)]
struct ResponseDifference {
    /// The largest difference of two numbers; infinite where only one of them is a number.
    difference: f64,
    /// Rows with equal labels in both responses, and rows with different ones.
    same: u64,
    other: u64,
}

/// Compares responses; `None` if their outputs differ in name, shape or type.
fn compare(ours: &[Tensor], theirs: &[Tensor]) -> Option<ResponseDifference> {
    let mut found = ResponseDifference { difference: 0.0, same: 0, other: 0 };
    if ours.len() != theirs.len() {
        return None;
    }
    for (a, b) in ours.iter().zip(theirs) {
        if a.name != b.name || a.shape != b.shape || a.data.datatype() != b.data.datatype() {
            return None;
        }
        let rows = a.shape.first().and_then(|rows| usize::try_from(*rows).ok()).unwrap_or(1);
        let width = a.data.len().checked_div(rows).unwrap_or(0);
        let (same, other) = match (a.data.to_floats(), b.data.to_floats()) {
            (Some(a), Some(b)) => {
                let apart = a.iter().zip(&b).map(|(a, b)| distance(*a, *b));
                found.difference = apart.fold(found.difference, f64::max);
                agreeing(&a, &b, width)
            }
            // A string is its own label.
            _ => equal(&a.data, &b.data),
        };
        found.same += same;
        found.other += other;
    }
    Some(found)
}

fn distance(a: f64, b: f64) -> f64 {
    match (a - b).abs() {
        _ if a == b || (a.is_nan() && b.is_nan()) => 0.0,
        apart if apart.is_nan() => f64::INFINITY,
        apart => apart,
    }
}

/// Counts rows with equal and with different labels; the label is the index of the largest number. Rows of
/// one number have no label and do not count.
fn agreeing(a: &[f64], b: &[f64], width: usize) -> (u64, u64) {
    if width < 2 {
        return (0, 0);
    }
    let label = |row: &[f64]| {
        let better = |best: usize, place: usize| if row[place] > row[best] { place } else { best };
        (1..row.len()).fold(0, better)
    };
    let rows = a.chunks_exact(width).zip(b.chunks_exact(width));
    let same = rows.clone().filter(|(a, b)| label(a) == label(b)).count() as u64;
    (same, rows.count() as u64 - same)
}

fn equal(a: &Data, b: &Data) -> (u64, u64) {
    let (Data::Bytes(a), Data::Bytes(b)) = (a, b) else { return (0, 0) };
    let same = a.iter().zip(b).filter(|(a, b)| a == b).count() as u64;
    (same, a.len() as u64 - same)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(shape: &[i64], values: &[f32]) -> Tensor {
        Tensor::fp32("y", shape.to_vec(), values.to_vec()).unwrap()
    }

    #[test]
    fn replies_are_compared_by_their_numbers_and_their_labels() {
        let ours = [tensor(&[2, 2], &[1.0, 2.0, 3.0, 0.0])];
        let found = compare(&ours, &ours).unwrap();
        assert_eq!(found, ResponseDifference { difference: 0.0, same: 2, other: 0 });
        let theirs = [tensor(&[2, 2], &[1.0, 2.5, 3.0, 4.0])];
        let found = compare(&ours, &theirs).unwrap();
        assert_eq!(found, ResponseDifference { difference: 4.0, same: 1, other: 1 });
        let nan = [tensor(&[2, 2], &[f32::NAN, 2.0, 3.0, 0.0])];
        assert_eq!(compare(&nan, &nan).unwrap().difference, 0.0);
        assert_eq!(compare(&ours, &nan).unwrap().difference, f64::INFINITY);
        let single = [tensor(&[4], &[1.0, 2.0, 3.0, 0.0])];
        assert_eq!(
            compare(&single, &single).unwrap(),
            ResponseDifference { difference: 0.0, same: 0, other: 0 }
        );
    }

    #[test]
    fn replies_of_another_form_are_not_compared() {
        let ours = [tensor(&[2, 2], &[1.0, 2.0, 3.0, 0.0])];
        assert_eq!(compare(&ours, &[]), None);
        assert_eq!(compare(&ours, &[tensor(&[1, 4], &[1.0, 2.0, 3.0, 0.0])]), None);
        let whole = Tensor::new("y", vec![2, 2], Data::Int32(vec![1, 2, 3, 0])).unwrap();
        assert_eq!(compare(&ours, std::slice::from_ref(&whole)), None);
        let named = Tensor { name: "z".into(), ..ours[0].clone() };
        assert_eq!(compare(&ours, &[named]), None);
        let text = |word: &'static str| {
            [Tensor::new("t", vec![2], Data::Bytes(vec![word.into(), "same".into()])).unwrap()]
        };
        let found = compare(&text("a"), &text("b")).unwrap();
        assert_eq!(found, ResponseDifference { difference: 0.0, same: 1, other: 1 });
        assert_eq!(compare(std::slice::from_ref(&whole), std::slice::from_ref(&whole)).unwrap().same, 2);
    }
}
