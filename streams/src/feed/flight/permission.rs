//! Permissions of callers, which the gRPC server derives from their tokens.

use std::sync::Arc;

use tonic::{Extensions, Status};

/// Tells whether a caller may read a volume, now: a token can be withdrawn while a stream runs.
pub type Permission = Arc<dyn Fn(&str) -> Result<(), Status> + Send + Sync>;

/// Finds the permission of the caller of a request among its extensions.
pub type Callers = Arc<dyn Fn(&Extensions) -> Permission + Send + Sync>;
