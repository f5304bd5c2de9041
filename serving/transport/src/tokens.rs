//! Bearer tokens: authenticates callers, and limits the models that they may use and control. The server
//! stores only SHA-256 digests; tokens are long and random, so a digest does not reveal its token.

mod file;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::http::header::AUTHORIZATION;
use axum::http::{Extensions, HeaderMap};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::access;
use millrace_serving_core::error::{Error, InferError, Result, quote};
use millrace_serving_core::metrics::CALLERS_REFUSED;
use millrace_serving_core::reload::{ReadResult, Reloaded, read_file};

/// Random bytes in a new token.
const TOKEN_BYTES: usize = 32;

/// A token: its digest and permissions.
#[derive(Debug)]
pub(crate) struct Token {
    name: String,
    digest: [u8; 32],
    /// Patterns of model names, in which `*` matches any characters.
    models: Vec<String>,
    controls: bool,
    /// Set when the token is withdrawn, for calls that began before.
    withdrawn: AtomicBool,
}

impl Token {
    fn is_same(&self, other: &Token) -> bool {
        (&self.name, self.digest, &self.models, self.controls)
            == (&other.name, other.digest, &other.models, other.controls)
    }
}

/// The tokens in force.
pub(crate) type Tokens = Reloaded<Vec<Arc<Token>>>;

/// Reads the tokens of a file. After a reload exactly the valid lines are in force: a token that was removed
/// from the file is refused even if other lines have errors.
///
/// # Errors
/// [`Error::Config`] with the line and its error.
pub(crate) fn open(path: &Path) -> Result<Arc<Tokens>> {
    let file = path.to_owned();
    let read = move |old: Option<&Vec<Arc<Token>>>| {
        let mut read = match read_file("tokens", &file) {
            Ok(content) => file::parse(&file, &content),
            Err(error) => ReadResult { value: Vec::new(), wrong: vec![error] },
        };
        for old in old.into_iter().flatten() {
            match read.value.iter_mut().find(|token| token.is_same(old)) {
                Some(token) => *token = old.clone(),
                None => old.withdrawn.store(true, Ordering::Relaxed),
            }
        }
        Ok(read)
    };
    Ok(Arc::new(Reloaded::open("tokens", vec![path.to_owned()], read)?))
}

/// Authenticates callers, on a server with tokens. Cheap to clone; all clones share the tokens.
#[derive(Debug, Clone, Default)]
pub(crate) struct Guard {
    tokens: Option<Arc<Tokens>>,
}

impl Guard {
    pub(crate) fn new(tokens: Option<Arc<Tokens>>) -> Guard {
        Guard { tokens }
    }

    /// Whether callers need a token.
    pub(crate) fn is_on(&self) -> bool {
        self.tokens.is_some()
    }

    /// Authenticates a request by its token, and records the caller in its extensions.
    ///
    /// # Errors
    /// [`InferError::Unauthenticated`].
    pub(crate) fn admit(&self, headers: &HeaderMap, extensions: &mut Extensions) -> Result<(), InferError> {
        let Some(tokens) = &self.tokens else { return Ok(()) };
        let refused = |reason: &str, text: &str| {
            CALLERS_REFUSED.with_label_values(&[reason]).inc();
            InferError::Unauthenticated { reason: text.to_owned() }
        };
        let mut shown = headers.get_all(AUTHORIZATION).iter();
        let Some(value) = shown.next() else {
            let text = "this server takes calls with a token alone: send authorization: Bearer TOKEN";
            return Err(refused("missing", text));
        };
        let bearer = value
            .to_str()
            .ok()
            .and_then(|value| value.split_once(' '))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
        let (Some((_, token)), None) = (bearer, shown.next()) else {
            return Err(refused("missing", "the authorization header is missing or not one Bearer TOKEN"));
        };
        let digest = Sha256::digest(token.trim());
        // Compares with every token, so that the time taken reveals nothing about them.
        let mut found = None;
        for known in tokens.get().iter() {
            if bool::from(known.digest[..].ct_eq(&digest[..])) {
                found = Some(known.clone());
            }
        }
        let token = found.ok_or_else(|| refused("unknown", "the server does not know the token"))?;
        access::sign(extensions, &token.name);
        extensions.insert(Caller::Bearer(token));
        Ok(())
    }

    /// The caller of an admitted request.
    pub(crate) fn caller(&self, extensions: &Extensions) -> Caller {
        match &self.tokens {
            None => Caller::Anyone,
            Some(_) => extensions.get().cloned().unwrap_or(Caller::Nobody),
        }
    }
}

/// The caller of a request, with its permissions.
#[derive(Debug, Clone)]
pub(crate) enum Caller {
    /// Any caller of a server without tokens; may do everything.
    Anyone,
    /// A caller with a valid token; may do what the token permits.
    Bearer(Arc<Token>),
    /// A caller without a token; may do nothing.
    Nobody,
}

impl Caller {
    /// Whether the caller may know that a model exists.
    pub(crate) fn may_see(&self, model: &str) -> bool {
        match self {
            Caller::Anyone => true,
            Caller::Bearer(token) => token.models.iter().any(|pattern| matches(pattern, model)),
            Caller::Nobody => false,
        }
    }

    /// Refuses calls about models that the caller may not use, whether or not they exist.
    ///
    /// # Errors
    /// [`InferError::Denied`], [`InferError::Unauthenticated`].
    pub(crate) fn may_use(&self, model: &str) -> Result<(), InferError> {
        let Some(token) = self.token()? else { return Ok(()) };
        if self.may_see(model) {
            return Ok(());
        }
        Err(denied(format!("token {:?} may not use model {}", token.name, quote(model))))
    }

    /// [`Caller::may_use`] for a volume, where the server serves volumes: its name takes the place of a model's.
    ///
    /// # Errors
    /// As [`Caller::may_use`].
    pub(crate) fn may_read(&self, volume: &str) -> Result<(), InferError> {
        let Some(token) = self.token()? else { return Ok(()) };
        if self.may_see(volume) {
            return Ok(());
        }
        Err(denied(format!("token {:?} may not read volume {}", token.name, quote(volume))))
    }

    /// Refuses calls that change how the server serves a model.
    ///
    /// # Errors
    /// As [`Caller::may_use`].
    pub(crate) fn may_control(&self, model: &str) -> Result<(), InferError> {
        self.may_use(model)?;
        match self.token()? {
            Some(token) if !token.controls => Err(no_control(token)),
            _ => Ok(()),
        }
    }

    /// Refuses calls that change the whole server.
    ///
    /// # Errors
    /// As [`Caller::may_use`].
    pub(crate) fn may_control_all(&self) -> Result<(), InferError> {
        match self.token()? {
            Some(token) if !token.controls => Err(no_control(token)),
            Some(token) if !token.models.iter().any(|pattern| pattern == "*") => Err(denied(format!(
                "token {:?} controls its models, and this concerns all: its models would have to be *",
                token.name
            ))),
            _ => Ok(()),
        }
    }

    /// The caller's token; `None` if the server needs none.
    fn token(&self) -> Result<Option<&Token>, InferError> {
        match self {
            Caller::Anyone => Ok(None),
            Caller::Bearer(token) if !token.withdrawn.load(Ordering::Relaxed) => Ok(Some(token)),
            Caller::Bearer(_) => {
                Err(InferError::Unauthenticated { reason: "the token was withdrawn during the call".into() })
            }
            Caller::Nobody => Err(InferError::Unauthenticated { reason: "the call has no token".into() }),
        }
    }
}

fn denied(reason: String) -> InferError {
    CALLERS_REFUSED.with_label_values(&["denied"]).inc();
    InferError::Denied { reason }
}

fn no_control(token: &Token) -> InferError {
    denied(format!(
        "token {:?} may not control the server: its line would have to end with control",
        token.name
    ))
}

/// Whether a pattern matches a name; `*` matches any characters.
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    // Position of the last star, and the position in the name where the rest of the pattern was tried last.
    let (mut at, mut place, mut star) = (0, 0, None);
    while place < name.len() {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at, place));
                at += 1;
            }
            Some(byte) if *byte == name[place] => {
                at += 1;
                place += 1;
            }
            _ => match &mut star {
                Some((last, tried)) => {
                    *tried += 1;
                    (at, place) = (*last + 1, *tried);
                }
                None => return false,
            },
        }
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

/// A new token, and the line that permits it in the token file.
///
/// # Errors
/// [`Error::Config`] for a name or a model that is invalid in the file; [`Error::Service`] if the operating
/// system provides no random numbers.
pub fn new_token(name: &str, models: &[String], controls: bool) -> Result<(String, String)> {
    let wrong = |reason: &str| Error::Config { reason: format!("the token {reason}") };
    let breaks = |text: &str| text.is_empty() || text.contains(|c: char| c.is_whitespace() || c == ',');
    if breaks(name) || models.is_empty() || models.iter().any(|model| breaks(model)) {
        return Err(wrong("has an empty name or model, or one with blanks or commas"));
    }
    let mut bytes = [0; TOKEN_BYTES];
    let random = millrace_serving_core::tls::provider().secure_random;
    random.fill(&mut bytes).map_err(|_| Error::Service {
        service: "random number",
        reason: "the operating system has no random bytes".into(),
    })?;
    let token = hex::encode(bytes);
    let control = if controls { " control" } else { "" };
    let line = format!("{name} {} {}{control}", hex::encode(Sha256::digest(&token)), models.join(","));
    file::parse_line(&line).map_err(|reason| wrong(&reason))?;
    Ok((token, line))
}

#[cfg(test)]
mod tests;
