//! Leaf of the crates: small facilities that several crates need, one module for each. Every crate may
//! depend on this one, and it depends on no other crate of Millrace.

#![deny(unsafe_code)]

pub mod atomic_file;
pub mod backoff;
pub mod blocking;
pub mod bounded_file;
pub mod discovery;
pub mod error_chain;
pub mod lease;
pub mod lock_file;
pub mod private;
pub mod quoting;
pub mod random;
pub mod suggestion;
