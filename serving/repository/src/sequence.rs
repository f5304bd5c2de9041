//! Stateful sequences of requests: the server keeps a state for each sequence between its requests. It feeds the
//! state to the graph and takes the next state from the outputs, as Triton's implicit state management does.
//!
//! Requests of one sequence run one after the other, in the order of arrival; requests of different sequences run
//! concurrently or in one batch. A request takes its [`SequencePosition`] when it arrives. Its new state takes
//! effect when its response is ready, so that a failed request changes nothing.

mod idle;
mod live;
mod place;
mod plan;
mod refusals;
mod shown;

pub use live::Sequences;
pub use place::SequencePosition;
pub(crate) use plan::{Control, Declaration, Plan, Signal, StateTensor};
pub use shown::to_json;

#[cfg(test)]
mod tests;
