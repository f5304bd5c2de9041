//! The model bundle: the format where trainers and servers meet.
