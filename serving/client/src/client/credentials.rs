//! The credentials of a client: TLS authorities, a client certificate, a token.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::future::{BoxFuture, FutureExt};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use tonic::metadata::{Ascii, MetadataValue};

use super::ClientError;
use millrace_serving_core::reload::read_file;
use millrace_serving_core::tls::{HTTP2, provider, read_certificates, read_key, read_roots};

/// Credentials of a client; none by default.
#[derive(Clone, Default)]
pub struct Credentials {
    /// PEM file of the authorities for the server's certificate; without it, the system's authorities. If
    /// set, an address without a scheme means `https`.
    pub ca: Option<PathBuf>,
    /// PEM files of the client's certificate and its key, for servers that require one.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// The bearer token.
    pub token: Option<String>,
}

impl fmt::Debug for Credentials {
    /// Leaves the token out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("ca", &self.ca)
            .field("identity", &self.identity)
            .field("token", &self.token.is_some())
            .finish()
    }
}

impl Credentials {
    /// Reads the token from the first line of a file.
    ///
    /// # Errors
    /// [`ClientError::Credentials`].
    pub fn with_token_file(mut self, path: &Path) -> Result<Credentials, ClientError> {
        let wrong = |reason: &str| ClientError::Credentials {
            reason: format!("the token file {} {reason}", path.display()),
        };
        let content = read_file("token", path).map_err(unusable)?;
        let text = String::from_utf8(content).map_err(|_| wrong("is no text"))?;
        let token = text.lines().next().unwrap_or_default().trim();
        if token.is_empty() {
            return Err(wrong("has no token in its first line"));
        }
        self.token = Some(token.to_owned());
        Ok(self)
    }

    /// The `authorization` value of each call.
    pub(super) fn bearer(&self) -> Result<Option<MetadataValue<Ascii>>, ClientError> {
        let Some(token) = &self.token else { return Ok(None) };
        let mut value = MetadataValue::try_from(format!("Bearer {token}")).map_err(|_| {
            ClientError::Credentials { reason: "the token has characters that no header may have".into() }
        })?;
        value.set_sensitive(true);
        Ok(Some(value))
    }

    /// The connector for `https` addresses.
    pub fn connector(&self) -> Result<Connector, ClientError> {
        let roots = match &self.ca {
            Some(path) => read_roots("ca", path).map_err(unusable)?,
            None => {
                let mut roots = RootCertStore::empty();
                let (trusted, _) =
                    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
                if trusted == 0 {
                    let reason = "the system trusts no authority: name the PEM file of the server's authority with --ca";
                    return Err(ClientError::Credentials { reason: reason.into() });
                }
                roots
            }
        };
        let refused = |error: &dyn fmt::Display| ClientError::Credentials { reason: error.to_string() };
        let builder = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| refused(&error))?
            .with_root_certificates(roots);
        let mut config = match &self.identity {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => {
                let chain = read_certificates("certificate", certificate).map_err(unusable)?;
                let key = read_key("key", key).map_err(unusable)?;
                builder.with_client_auth_cert(chain, key).map_err(|error| refused(&error))?
            }
        };
        config.alpn_protocols = vec![HTTP2.into()];
        Ok(Connector { config: Arc::new(config) })
    }
}

/// The error for an unusable file, without the server's `[serving]` prefix.
fn unusable(error: millrace_serving_core::Error) -> ClientError {
    let reason = match error {
        millrace_serving_core::Error::Config { reason } => reason,
        error => error.to_string(),
    };
    ClientError::Credentials { reason }
}

/// Connects with TLS.
#[derive(Debug, Clone)]
pub struct Connector {
    config: Arc<ClientConfig>,
}

impl Service<Uri> for Connector {
    type Response = TokioIo<TlsStream<TcpStream>>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connector = TlsConnector::from(self.config.clone());
        async move {
            let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
            let port = uri.port_u16().unwrap_or(443);
            let stream = TcpStream::connect((host.as_str(), port)).await?;
            stream.set_nodelay(true)?;
            let name = ServerName::try_from(host).map_err(io::Error::other)?;
            Ok(TokioIo::new(connector.connect(name, stream).await?))
        }
        .boxed()
    }
}
