//! Bearer tokens: who may call, which models they may use, and who may control the server. The server
//! knows SHA-256 digests alone; as tokens are long and random, nobody finds them by their digests.

mod file;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::http::header::AUTHORIZATION;
use axum::http::{Extensions, HeaderMap};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::access;
use crate::error::{Error, InferError, Result, quote};
use crate::metrics::CALLERS_REFUSED;
use crate::reload::{Read, Reloaded, read_file};

/// Random bytes of a new token.
const TOKEN_BYTES: usize = 32;

/// Who may call.
#[derive(Debug)]
pub(crate) struct Token {
    name: String,
    digest: [u8; 32],
    /// Names of models, in which `*` stands for any characters.
    models: Vec<String>,
    controls: bool,
    /// Set when it is in force no more, for calls that began before.
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

/// Reads the tokens of a file. When it is read again, the good lines of it are in force and nothing else: a token
/// that was taken out of the file is refused whatever is wrong with the rest.
///
/// # Errors
/// [`Error::Config`], which names the line and what is wrong with it.
pub(crate) fn open(path: &Path) -> Result<Arc<Tokens>> {
    let file = path.to_owned();
    let read = move |old: Option<&Vec<Arc<Token>>>| {
        let mut read = match read_file("tokens", &file) {
            Ok(content) => file::parse(&file, &content),
            Err(error) => Read { value: Vec::new(), wrong: vec![error] },
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

/// Finds out who calls, where the server has tokens. Cheap to clone; all clones are one.
#[derive(Debug, Clone, Default)]
pub(crate) struct Guard {
    tokens: Option<Arc<Tokens>>,
}

impl Guard {
    pub(crate) fn new(tokens: Option<Arc<Tokens>>) -> Guard {
        Guard { tokens }
    }

    /// Whether callers have to show a token.
    pub(crate) fn is_on(&self) -> bool {
        self.tokens.is_some()
    }

    /// Lets a request in by its token, and notes whose it is among its extensions.
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
            return Err(refused("missing", "authorization is not one Bearer TOKEN"));
        };
        let digest = Sha256::digest(token.trim());
        // All of them are compared, so that the time this takes says nothing of them.
        let mut found = None;
        for known in tokens.get().iter() {
            if bool::from(known.digest[..].ct_eq(&digest[..])) {
                found = Some(known.clone());
            }
        }
        let token = found.ok_or_else(|| refused("unknown", "the token is none of this server's"))?;
        access::sign(extensions, &token.name);
        extensions.insert(Caller::Bearer(token));
        Ok(())
    }

    /// Who sent a request that was let in.
    pub(crate) fn caller(&self, extensions: &Extensions) -> Caller {
        match &self.tokens {
            None => Caller::Anyone,
            Some(_) => extensions.get().cloned().unwrap_or(Caller::Nobody),
        }
    }
}

/// Who calls, and with it what the call may do.
#[derive(Debug, Clone)]
pub(crate) enum Caller {
    /// Whoever reaches a server without tokens: everything.
    Anyone,
    /// Who showed a token: what the token says.
    Bearer(Arc<Token>),
    /// Who showed none: nothing.
    Nobody,
}

impl Caller {
    /// Whether it may know that there is a model.
    pub(crate) fn sees(&self, model: &str) -> bool {
        match self {
            Caller::Anyone => true,
            Caller::Bearer(token) => token.models.iter().any(|pattern| matches(pattern, model)),
            Caller::Nobody => false,
        }
    }

    /// Refuses calls about models that it may not use, whether there are such models or not.
    ///
    /// # Errors
    /// [`InferError::Denied`], [`InferError::Unauthenticated`].
    pub(crate) fn may_use(&self, model: &str) -> Result<(), InferError> {
        let Some(token) = self.token()? else { return Ok(()) };
        if self.sees(model) {
            return Ok(());
        }
        Err(denied(format!("token {:?} may not use model {}", token.name, quote(model))))
    }

    /// Refuses calls that change how a model is served.
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

    /// Its token; none where none is asked for.
    fn token(&self) -> Result<Option<&Token>, InferError> {
        match self {
            Caller::Anyone => Ok(None),
            Caller::Bearer(token) if !token.withdrawn.load(Ordering::Relaxed) => Ok(Some(token)),
            Caller::Bearer(_) => {
                Err(InferError::Unauthenticated { reason: "the token was withdrawn meanwhile".into() })
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

/// Whether a pattern, in which `*` stands for any characters, means a name.
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    // Where the last star was, and where in the name what follows it was tried last.
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

/// A new token, and the line for the file that lets its bearer in.
///
/// # Errors
/// [`Error::Config`] for a name or a model that could not stand in the file; [`Error::Service`] when the
/// system has no random numbers.
pub fn new_token(name: &str, models: &[String], controls: bool) -> Result<(String, String)> {
    let wrong = |reason: &str| Error::Config { reason: format!("the token {reason}") };
    let breaks = |text: &str| text.is_empty() || text.contains(|c: char| c.is_whitespace() || c == ',');
    if breaks(name) || models.is_empty() || models.iter().any(|model| breaks(model)) {
        return Err(wrong("has an empty name or model, or one with blanks or commas"));
    }
    let mut bytes = [0; TOKEN_BYTES];
    let random = crate::tls::provider().secure_random;
    random.fill(&mut bytes).map_err(|_| Error::Service {
        service: "random number",
        reason: "the operating system gives none".into(),
    })?;
    let token = hex::encode(bytes);
    let control = if controls { " control" } else { "" };
    let line = format!("{name} {} {}{control}", hex::encode(Sha256::digest(&token)), models.join(","));
    file::parse_line(&line).map_err(|reason| wrong(&reason))?;
    Ok((token, line))
}

#[cfg(test)]
mod tests;
