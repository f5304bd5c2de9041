//! Client credentials for a model server: authorities, a client certificate, a bearer token.

use millrace_serving::client::{ClientError, Credentials};

use crate::cli::ServerArgs;

/// The credentials that the flags name; reads the token file.
pub(crate) fn credentials(args: &ServerArgs) -> Result<Credentials, ClientError> {
    let credentials = Credentials {
        ca: args.ca.clone(),
        // Clap requires both or neither.
        identity: args.cert.clone().zip(args.key.clone()),
        token: None,
    };
    match &args.token_file {
        Some(path) => credentials.with_token_file(path),
        None => Ok(credentials),
    }
}
