//! What this process, as a client of a model server, shows it: a certificate, a token.

use millrace_serving::client::{ClientError, Credentials};

use crate::cli::ServerArgs;

/// What the flags name; the token is read here.
pub(crate) fn credentials(args: &ServerArgs) -> Result<Credentials, ClientError> {
    let credentials = Credentials {
        ca: args.ca.clone(),
        // Clap asks for both or none.
        identity: args.cert.clone().zip(args.key.clone()),
        token: None,
    };
    match &args.token_file {
        Some(path) => credentials.with_token_file(path),
        None => Ok(credentials),
    }
}
