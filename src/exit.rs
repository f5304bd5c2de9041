//! Exit codes of errors: the translation of the errors of crates that only the command uses. `millrace_home` has
//! those of the home, volumes, topics and the feed.

use std::error::Error as StdError;

use millrace_home::{Exit, as_type};

use crate::failure::Failure;

/// The exit code of an error: of the first cause with a more specific code than `Failed`.
pub(crate) fn code(error: &anyhow::Error) -> Exit {
    of(error.as_ref())
}

/// [`code`] of a crate's error.
pub(crate) fn of(error: &(dyn StdError + 'static)) -> Exit {
    Exit::of(error, code_of_cause)
}

fn code_of_cause(cause: &(dyn StdError + 'static)) -> Option<Exit> {
    None.or_else(|| as_type(cause).map(Failure::exit))
        .or_else(|| as_type(cause).map(ingest))
        .or_else(|| as_type(cause).map(trainer))
        .or_else(|| as_type(cause).map(bundle))
        .or_else(|| as_type(cause).map(serving))
        .or_else(|| as_type(cause).map(pipe))
        .or_else(|| as_type(cause).map(client))
        .or_else(|| as_type(cause).map(load))
        .or_else(|| as_type(cause).map(csi))
        .or_else(|| Exit::of_cause(cause))
}

fn ingest(error: &millrace_ingest::Error) -> Exit {
    use millrace_ingest::Error as E;
    match error {
        E::InvalidJob { .. } => Exit::Usage,
        E::TopicMissing { .. } | E::VolumeMissing { .. } | E::OffsetLost { .. } | E::TopicShorter { .. } => {
            Exit::NotFound
        }
        E::Fenced { .. }
        | E::SchemaMismatch { .. }
        | E::JobChanged { .. }
        | E::FolderTaken { .. }
        | E::TopicReplaced { .. } => Exit::Conflict,
        E::NoSpace { .. } => Exit::NoSpace,
        E::CorruptState { .. } => Exit::Corrupt,
        _ => Exit::Failed,
    }
}

fn trainer(error: &millrace_trainer::Error) -> Exit {
    use millrace_trainer::Error as E;
    match error {
        E::JobFile { .. } | E::Job { .. } | E::Access { .. } | E::Join { .. } | E::Script { .. } => {
            Exit::Usage
        }
        E::NoColumn { .. } => Exit::NotFound,
        E::Busy { .. } | E::Lease { .. } => Exit::Conflict,
        E::Launch { .. } | E::CoordinatorLost { .. } | E::Outage { .. } | E::NodesMissing { .. } => {
            Exit::Unavailable
        }
        E::Worker { exit_code, .. } | E::WorkersLost { exit_code, .. } => {
            Exit::from_code(i32::from(*exit_code))
        }
        _ => Exit::Failed,
    }
}

fn csi(error: &millrace_csi::Error) -> Exit {
    use millrace_csi::Error as E;
    match error {
        E::Invalid { .. } => Exit::Usage,
        E::Listen { .. } | E::State { .. } => Exit::Unavailable,
        _ => Exit::Failed,
    }
}

fn bundle(error: &millrace_bundle::Error) -> Exit {
    use millrace_bundle::Error as E;
    match error {
        E::NotFound { .. } => Exit::NotFound,
        E::Incomplete { .. } | E::Corrupt { .. } => Exit::Corrupt,
        E::InvalidName { .. } | E::InvalidVersion { .. } | E::InvalidModel { .. } => Exit::Usage,
        E::NewerFormat { .. } | E::Exists { .. } => Exit::Conflict,
        _ => Exit::Failed,
    }
}

fn serving(error: &millrace_serving::Error) -> Exit {
    use millrace_serving::Error as E;
    match error {
        E::RuntimeMissing { .. } | E::RuntimeUnusable { .. } | E::DeviceUnavailable { .. } => {
            Exit::Unavailable
        }
        E::Bind { .. } => Exit::Conflict,
        E::Directory { path, .. } if !path.exists() => Exit::NotFound,
        E::Config { .. } => Exit::Usage,
        _ => Exit::Failed,
    }
}

fn pipe(error: &millrace_serving::pipe::Error) -> Exit {
    use millrace_serving::pipe::Error as E;
    match error {
        E::Server(error) => serving(error),
        E::Fenced { .. } | E::InputChanged { .. } => Exit::Conflict,
        E::Unfit { .. } => Exit::Usage,
        E::Infer(error) => infer(error),
        _ => Exit::Failed,
    }
}

fn infer(error: &millrace_serving::InferError) -> Exit {
    use millrace_serving::InferError as E;
    match error {
        E::Invalid { .. } => Exit::Usage,
        E::NotFound { .. } => Exit::NotFound,
        _ => Exit::Failed,
    }
}

fn client(error: &millrace_serving::client::ClientError) -> Exit {
    use millrace_serving::client::ClientError as E;
    match error {
        E::Unreachable { .. } | E::Tls { .. } => Exit::Unavailable,
        E::Address { .. } | E::Credentials { .. } => Exit::Usage,
        E::Refused { code, .. } if *code == tonic::Code::NotFound => Exit::NotFound,
        E::Refused { code, .. } if *code == tonic::Code::InvalidArgument => Exit::Usage,
        _ => Exit::Failed,
    }
}

fn load(error: &millrace_serving::load::LoadError) -> Exit {
    use millrace_serving::load::LoadError as E;
    match error {
        E::Client(error) => client(error),
        E::Requests(_) | E::Load(_) => Exit::Usage,
        E::Timer(error) => Exit::of_cause(error).unwrap_or(Exit::Failed),
    }
}

#[cfg(test)]
mod tests {

    use millrace_trainer::Error as E;

    use super::{code, of};
    use millrace_home::Exit;

    #[test]
    fn an_error_of_a_training_worker_keeps_its_exit_code() {
        let full = millrace_datafs::Error::NoSpace { place: "/disk".into(), quota: false };
        let met = E::Volume { what: "write checkpoint".into(), source: Box::new(full) };
        assert_eq!(of(&met), Exit::NoSpace);
        let received = E::Worker { message: met.one_line(), exit_code: of(&met) as u8 };
        assert_eq!(code(&anyhow::Error::new(received)), Exit::NoSpace);
    }
}
