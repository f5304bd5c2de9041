//! Topics as Arrow batches, the embedded broker, and the feed from snapshots to trainers.
