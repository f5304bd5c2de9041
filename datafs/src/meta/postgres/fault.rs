//! What goes wrong between the engine and its server, told apart by what is done about it.

use std::fmt;
use std::time::Duration;

use tokio_postgres::error::{Severity, SqlState};

use super::tls;
use crate::error::{Error, in_full};

/// Why a call has no result.
#[derive(Debug, Clone)]
pub(super) enum Fault {
    /// There is no connection, or it broke: whether the call took effect is not known.
    Lost(String),
    /// The same, of a commit, and nobody was there to ask until it was given up.
    Unknown(String),
    /// The server took the call back and may do better when it is repeated.
    TakenBack(String),
    /// The server, or the store that the commit waits for, has no space left; nothing took effect.
    NoSpace {
        /// The full place, if it is not the server.
        store: Option<String>,
        /// It is a quota that is used up.
        quota: bool,
    },
    /// What the commit waits for could not be stored; nothing took effect.
    Store {
        /// The store.
        place: String,
        /// What was being done.
        operation: &'static str,
        /// How long it was tried.
        tried_ms: u64,
        /// What went wrong.
        cause: String,
    },
    /// The server refuses, and will again.
    Refused(String),
    /// The call's transaction had been given up already: another connection took its number.
    Fenced,
}

impl Fault {
    pub(super) fn from_postgres(error: &tokio_postgres::Error) -> Fault {
        let Some(db) = error.as_db_error() else {
            let text = in_full(error);
            return if tls::is_refusal(error) { Fault::Refused(text) } else { Fault::Lost(text) };
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
            // A standby that is being promoted: it writes nothing, and has no unlogged tables.
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

    /// Whether it may help to wait and repeat the call.
    pub(super) fn is_passing(&self) -> bool {
        matches!(self, Fault::Lost(_) | Fault::TakenBack(_))
    }

    /// As an error of the crate, of a call that has been tried for `waited`.
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

/// What the server, or the way to it, said.
#[derive(Debug)]
struct Reason(String);

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Reason {}
