//! `millrace serve token`: creates a bearer token, which is shown only once, and its line for the server's
//! file.

use anyhow::Result;
use millrace_serving::new_token;

use crate::cli::TokenArgs;
use crate::context::Context;

/// Runs the command.
pub(crate) fn run(context: &Context, args: &TokenArgs) -> Result<()> {
    let (token, line) = new_token(&args.name, &args.models, args.control)?;
    if context.out.is_json() {
        return context.out.object(&serde_json::json!({ "token": token, "line": line }));
    }
    // On standard error, so that >> redirects the line alone.
    context.out.note(&format!("the token of {}, which is not shown again: {token}", args.name));
    context.out.raw(&line)
}
