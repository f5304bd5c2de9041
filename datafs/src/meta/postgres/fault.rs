//! Faults between the engine and its server, classified by the reaction to them.

use std::fmt;
use std::time::Duration;

use millrace_leaf::error_chain;
use tokio_postgres::error::{Severity, SqlState};

use super::tls;
use crate::error::Error;

/// Why a call has no result.
#[derive(Debug, Clone)]
pub(super) enum Fault {
    /// There is no connection, or it broke: whether the call took effect is unknown.
    Lost(String),
    /// The same for a commit, when no connection was there to find out before the deadline.
    Unknown(String),
    /// The server aborted the call; a repetition may succeed.
    TakenBack(String),
    /// The server, or the store that the commit waits for, has no space; nothing took effect.
    NoSpace {
        /// The full place, if it is not the server.
        store: Option<String>,
        /// Whether a quota is used up.
        quota: bool,
    },
    /// The store of a prerequisite is unavailable; nothing took effect.
    Store {
        /// The store.
        place: String,
        /// The operation on it.
        operation: &'static str,
        /// How long it was tried, in milliseconds.
        tried_ms: u64,
        /// The error.
        cause: String,
    },
    /// The server refuses the call, and would again.
    Refused(String),
    /// Another connection has given up this transaction by taking its number.
    Fenced,
}

impl Fault {
    pub(super) fn from_postgres(error: &tokio_postgres::Error) -> Fault {
        let Some(db) = error.as_db_error() else {
            let text = error_chain::one_line(error);
            // These errors of the library have no type.
            let is_final = ["authentication error", "invalid configuration"];
            let is_refused = tls::is_refusal(error) || is_final.iter().any(|kind| text.starts_with(kind));
            return if is_refused { Fault::Refused(text) } else { Fault::Lost(text) };
        };
        let text = format!("{} ({})", db.message(), db.code().code());
        let code = db.code();
        let fatal = matches!(db.parsed_severity(), Some(Severity::Fatal | Severity::Panic));
        let away = code.code().starts_with("57P")
            || code.code().starts_with("08")
            || *code == SqlState::TOO_MANY_CONNECTIONS;
        if away || (fatal && !code.code().starts_with("28") && *code != SqlState::UNDEFINED_DATABASE) {
            return Fault::Lost(text);
        }
        let repeat = [
            SqlState::T_R_SERIALIZATION_FAILURE,
            SqlState::T_R_DEADLOCK_DETECTED,
            SqlState::LOCK_NOT_AVAILABLE,
            SqlState::QUERY_CANCELED,
            // A standby during its promotion: it accepts no writes, and has no unlogged tables.
            SqlState::READ_ONLY_SQL_TRANSACTION,
            SqlState::FEATURE_NOT_SUPPORTED,
        ];
        if repeat.contains(code) {
            return Fault::TakenBack(text);
        }
        match code {
            c if *c == SqlState::DISK_FULL => Fault::NoSpace { store: None, quota: false },
            c if *c == SqlState::UNIQUE_VIOLATION => Fault::Fenced,
            c if *c == SqlState::INVALID_PASSWORD => {
                Fault::Refused(format!("{text}: see meta_url, PGPASSWORD and the password file"))
            }
            _ => Fault::Refused(text),
        }
    }

    /// Whether a pause and a retry may help.
    pub(super) fn is_passing(&self) -> bool {
        matches!(self, Fault::Lost(_) | Fault::TakenBack(_))
    }

    /// Converts it to an error of the crate, for a call that was tried for `waited`.
    pub(super) fn into_error(self, place: &str, waited: Duration) -> Error {
        let place = place.to_owned();
        let waited_ms = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
        let source = match self {
            Fault::TakenBack(_) => return Error::Busy { place, waited_ms },
            Fault::NoSpace { store, quota } => {
                return Error::NoSpace { place: store.unwrap_or(place), quota };
            }
            Fault::Store { place, operation, tried_ms, cause } => {
                return Error::StoreAway { place, operation, tried_ms, source: cause.into() };
            }
            Fault::Lost(text) => {
                format!(
                    "the server did not answer for {waited_ms} ms, everything goes on when it does: {text}"
                )
            }
            Fault::Unknown(text) => format!(
                "the server was lost during a commit and not reached for {waited_ms} ms: it is not known whether the commit took place, look before you repeat it: {text}"
            ),
            Fault::Refused(text) => text,
            Fault::Fenced => "a transaction was given up and came back".to_owned(),
        };
        Error::Metadata { place, source: Box::new(Reason(source)) }
    }
}

/// Message of the server, or of the connection.
#[derive(Debug)]
struct Reason(String);

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Reason {}
