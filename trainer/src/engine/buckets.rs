//! Buckets of a gradient: its parameters in the order in which the reverse pass completes them.
//!
//! The order follows from the graph alone, so all workers of a job have the same buckets. A parameter that several nodes
//! read is complete once the first of them in the order of the graph is differentiated, which is the last one in the
//! reverse pass.

use std::cmp::Reverse;
use std::ops::Range;

use super::EngineError;
use super::products::{Factored, factored};
use crate::graph::{Graph, Source, ValueId};

/// Elements with which a bucket is full: the first one, and each later one. 1 MiB and 25 MiB of f32, as in PyTorch's
/// DistributedDataParallel: a small first bucket leaves early.
const LIMITS: [usize; 2] = [1 << 18, 25 << 18];

/// Takes the elements of a complete bucket. An error ends the computation.
pub(crate) type BucketFn<'a, E> = dyn FnMut(Vec<E>) -> Result<(), EngineError> + 'a;

/// A parameter of a bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Member {
    pub(super) value: ValueId,
    /// Its place in the flat vector.
    pub(super) range: Range<usize>,
}

/// Parameters whose gradients leave the engine together, one after another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bucket {
    pub(super) members: Vec<Member>,
    /// The bucket is complete once this node and all later ones are differentiated.
    pub(super) first_node: usize,
}

impl Bucket {
    /// Elements of all its parameters.
    pub(crate) fn elements(&self) -> usize {
        self.members.iter().map(|member| member.range.len()).sum()
    }

    /// The place of each of its parameters in the flat vector, in order.
    pub(crate) fn places(&self) -> impl Iterator<Item = &Range<usize>> {
        self.members.iter().map(|member| &member.range)
    }

    /// Adds the elements of its parameters in the flat vector `flat` to `values`, a gradient of this bucket.
    pub(crate) fn add_from(&self, flat: &[f32], values: &mut [f32]) {
        let mut start = 0;
        for Member { range, .. } in &self.members {
            let end = start + range.len();
            let own = values[start..end].iter_mut().zip(&flat[range.clone()]);
            own.for_each(|(value, other)| *value += other);
            start = end;
        }
    }

    /// Copies `values`, a gradient of this bucket, to the places of its parameters in the flat vector `flat`.
    pub(crate) fn copy_to(&self, flat: &mut [f32], values: &[f32]) {
        let mut start = 0;
        for Member { range, .. } in &self.members {
            let end = start + range.len();
            flat[range.clone()].copy_from_slice(&values[start..end]);
            start = end;
        }
    }
}

/// The buckets of a gradient, in the order in which they leave the engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Buckets {
    buckets: Vec<Bucket>,
    /// For each node, the matrix whose gradient leaves as factors instead; nothing for nodes behind the end.
    factored: Vec<Option<Factored>>,
    /// Elements of the flat vector, also of parameters in no bucket.
    flat_elements: usize,
}

impl Buckets {
    /// The parameters that `trains` chooses by their places in the flat vector. A bucket is full with the node whose
    /// parameters reach its limit, so a large parameter makes a large bucket.
    pub(crate) fn new(graph: &Graph, trains: impl Fn(&Range<usize>) -> bool) -> Buckets {
        Buckets::with_limits(graph, LIMITS, trains)
    }

    /// [`Buckets::new`] with other limits, in elements: of the first bucket, and of each later one.
    pub(crate) fn with_limits(
        graph: &Graph,
        [first, later]: [usize; 2],
        trains: impl Fn(&Range<usize>) -> bool,
    ) -> Buckets {
        let mut first_reader = vec![graph.nodes().len(); graph.values().len()];
        for (position, node) in graph.nodes().iter().enumerate().rev() {
            for input in &node.inputs {
                first_reader[*input] = position;
            }
        }
        let mut members = members(graph);
        let flat_elements = members.last().map_or(0, |member| member.range.end);
        members.retain(|member| trains(&member.range));
        // Stable, so that parameters of one node keep the order of the flat vector.
        members.sort_by_key(|member| Reverse(first_reader[member.value]));
        let mut buckets: Vec<Bucket> = Vec::new();
        for member in members {
            let first_node = first_reader[member.value];
            let limit = if buckets.len() == 1 { first } else { later };
            let takes = |bucket: &&mut Bucket| bucket.first_node == first_node || bucket.elements() < limit;
            match buckets.last_mut().filter(takes) {
                Some(bucket) => {
                    bucket.first_node = first_node;
                    bucket.members.push(member);
                }
                None => buckets.push(Bucket { members: vec![member], first_node }),
            }
        }
        Buckets { buckets, factored: Vec::new(), flat_elements }
    }

    /// One bucket of the parameters that `trains` chooses, in the order of the flat vector. If `in_factors`, gradients of
    /// weight matrices leave as factors instead ([`super::products`]). Their products are in 32 bits, so formats of 16
    /// bits, which round each gradient, do without.
    pub(crate) fn single(graph: &Graph, in_factors: bool, trains: impl Fn(&Range<usize>) -> bool) -> Buckets {
        let mut members = members(graph);
        let flat_elements = members.last().map_or(0, |member| member.range.end);
        members.retain(|member| trains(&member.range));
        let place_of = |value| {
            let member = members.iter().find(|member| member.value == value)?;
            Some(member.range.clone())
        };
        let factored = if in_factors { factored(graph, place_of) } else { Vec::new() };
        members.retain(|member| factored.iter().flatten().all(|matrix| matrix.range != member.range));
        Buckets { buckets: vec![Bucket { members, first_node: 0 }], factored, flat_elements }
    }

    /// One bucket of all parameters, which is the flat vector.
    pub(super) fn whole(graph: &Graph) -> Buckets {
        let members = members(graph);
        let flat_elements = members.last().map_or(0, |member| member.range.end);
        Buckets { buckets: vec![Bucket { members, first_node: 0 }], factored: Vec::new(), flat_elements }
    }

    /// The matrix whose gradient leaves as factors, and comes from the node at `position`.
    pub(super) fn factored_at(&self, position: usize) -> Option<&Factored> {
        self.factored.get(position)?.as_ref()
    }

    /// The buckets in order.
    pub(crate) fn iter(&self) -> std::slice::Iter<'_, Bucket> {
        self.buckets.iter()
    }

    /// The number of buckets.
    pub(crate) fn count(&self) -> usize {
        self.buckets.len()
    }

    /// Elements of the flat vector, also of parameters in no bucket.
    pub(crate) fn flat_elements(&self) -> usize {
        self.flat_elements
    }
}

/// All parameters, in the order of the flat vector.
pub(super) fn members(graph: &Graph) -> Vec<Member> {
    let mut values = vec![0; graph.params().len()];
    for (id, value) in graph.values().iter().enumerate() {
        if let Source::Param(index) = value.source {
            values[index] = id;
        }
    }
    let mut start = 0;
    let placed = graph.params().iter().zip(values).map(|(spec, value)| {
        let range = start..start + spec.elements();
        start = range.end;
        Member { value, range }
    });
    placed.collect()
}
