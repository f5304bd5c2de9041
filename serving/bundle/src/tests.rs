//! Round trips, limits and every way in which a bundle can be broken.
#![allow(clippy::unwrap_used)]
