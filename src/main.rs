//! The `millrace` command.
fn main() {}
