//! TLS to the server: `sslmode` and `sslrootcert` of the URL, with the meaning that libpq gives them.
//!
//! `disable` uses no TLS. `prefer` (the default) and `allow` use TLS if the server offers it; `require`
//! insists on it. None of these checks the certificate, unless `require` comes with an `sslrootcert`.
//! `verify-ca` checks its issuer, `verify-full` also its host name. A Unix socket has no TLS in any mode;
//! other hosts of the same URL keep theirs (see `target.rs`). The certificates in the file of `sslrootcert`
//! are trusted; without one (or with `system`), those that the system trusts. The server's own certificate
//! may be in the file.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

use millrace_leaf::error_chain;
use tokio_postgres::config::SslMode;
use tokio_postgres_rustls::MakeRustlsConnect;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::client::{WebPkiServerVerifier, verify_server_name};
use tokio_rustls::rustls::crypto::CryptoProvider;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::ParsedCertificate;
use tokio_rustls::rustls::{
    self, CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme,
};

use crate::error::{Error, Result};

/// Checks of a server's certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Check {
    Nothing,
    Issuer,
    IssuerAndName,
}

/// TLS options of a URL.
#[derive(Debug, Default)]
pub(super) struct Wanted {
    mode: Option<String>,
    roots: Option<String>,
}

impl Wanted {
    /// Takes the TLS options out of a URL; also returns the rest of the URL.
    pub(super) fn take_from(url: &str) -> (Wanted, String) {
        let mut wanted = Wanted::default();
        let Some((base, options)) = url.split_once('?') else { return (wanted, url.to_owned()) };
        let rest: Vec<&str> = options
            .split('&')
            .filter(|option| {
                let slot = match option.split_once('=') {
                    Some(("sslmode", mode)) => (&mut wanted.mode, mode),
                    Some(("sslrootcert", roots)) => (&mut wanted.roots, roots),
                    _ => return true,
                };
                *slot.0 = Some(decode(slot.1));
                false
            })
            .collect();
        let url = if rest.is_empty() { base.to_owned() } else { format!("{base}?{}", rest.join("&")) };
        (wanted, url)
    }

    /// The TLS connector, and the mode for the protocol.
    pub(super) fn prepare(&self) -> Result<(MakeRustlsConnect, SslMode)> {
        let rooted = self.roots.is_some();
        let (mode, check) = match self.mode.as_deref().unwrap_or("prefer") {
            "disable" => (SslMode::Disable, Check::Nothing),
            "allow" | "prefer" => (SslMode::Prefer, Check::Nothing),
            "require" if rooted => (SslMode::Require, Check::Issuer),
            "require" => (SslMode::Require, Check::Nothing),
            "verify-ca" => (SslMode::Require, Check::Issuer),
            "verify-full" => (SslMode::Require, Check::IssuerAndName),
            other => {
                return Err(invalid(format!(
                    "sslmode {other:?} is none of disable, prefer, require, verify-ca, verify-full"
                )));
            }
        };
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let issuer = match check {
            Check::Nothing => None,
            Check::Issuer | Check::IssuerAndName => Some(self.trusted(&provider)?),
        };
        let verifier = Verifier { check, issuer, provider: Arc::clone(&provider) };
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|e| invalid(format!("TLS cannot be set up: {e}")))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_no_client_auth();
        Ok((MakeRustlsConnect::new(config), mode))
    }

    /// The trusted issuers of server certificates.
    fn trusted(&self, provider: &Arc<CryptoProvider>) -> Result<Trusted> {
        let named = self.roots.as_deref().filter(|roots| *roots != "system");
        let certificates = match named {
            Some(path) => {
                let fail = |e: &dyn fmt::Display| invalid(format!("sslrootcert {path}: {e}"));
                let read: std::result::Result<Vec<_>, _> =
                    CertificateDer::pem_file_iter(Path::new(path)).map_err(|e| fail(&e))?.collect();
                read.map_err(|e| fail(&e))?
            }
            None => rustls_native_certs::load_native_certs().certs,
        };
        let mut store = RootCertStore::empty();
        let (taken, _) = store.add_parsable_certificates(certificates.iter().cloned());
        if taken == 0 {
            let place = named.unwrap_or("the system's folder of certificates");
            return Err(invalid(format!("sslrootcert: {place} holds no certificate in PEM format")));
        }
        let chain = WebPkiServerVerifier::builder_with_provider(Arc::new(store), Arc::clone(provider))
            .build()
            .map_err(|e| invalid(format!("sslrootcert: {e}")))?;
        // Only a named file is searched for a server's own certificate.
        let own = if named.is_some() { certificates } else { Vec::new() };
        Ok(Trusted { chain, own })
    }
}

fn invalid(reason: String) -> Error {
    Error::Invalid(format!("[datafs] meta_url: {reason}"))
}

/// Decodes the value of a URL's option: `%2F` is a slash.
fn decode(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let Some((&byte, after)) = rest.split_first() {
        let digits = after.get(..2).filter(|two| byte == b'%' && two.iter().all(u8::is_ascii_hexdigit));
        let digits = digits.and_then(|two| std::str::from_utf8(two).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(decoded) => {
                bytes.push(decoded);
                rest = &after[2..];
            }
            None => {
                bytes.push(byte);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[derive(Debug)]
struct Trusted {
    chain: Arc<WebPkiServerVerifier>,
    /// Certificates that are accepted as they are: a server's self-signed one has no chain.
    own: Vec<CertificateDer<'static>>,
}

#[derive(Debug)]
struct Verifier {
    check: Check,
    issuer: Option<Trusted>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        server: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        let Some(trusted) = &self.issuer else { return Ok(ServerCertVerified::assertion()) };
        if trusted.own.iter().any(|own| own.as_ref() == server.as_ref()) {
            if self.check == Check::IssuerAndName {
                verify_server_name(&ParsedCertificate::try_from(server)?, name)?;
            }
            return Ok(ServerCertVerified::assertion());
        }
        match trusted.chain.verify_server_cert(server, between, name, ocsp, now) {
            // The verifier checks the name last, so everything else is valid.
            Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) if self.check == Check::Issuer => Ok(ServerCertVerified::assertion()),
            other => other,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        server: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, server, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        server: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, server, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Whether an error means that TLS will always fail, not that the connection was lost.
pub(super) fn is_refusal(error: &(dyn std::error::Error + 'static)) -> bool {
    error_chain::causes(error).any(|cause| {
        let inner = cause.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        // The error of the protocol has no type.
        inner.is_some_and(|inner| inner.is::<rustls::Error>())
            || cause.to_string() == "server does not support TLS"
    })
}
