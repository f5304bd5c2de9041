//! TLS: the certificates of the gRPC and the REST service, those of clients, and how they are read. The
//! cryptography is ring's, as everywhere in the process.

mod stream;

use std::path::Path;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::{self, PemObject as _};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{self, InconsistentKeys, RootCertStore, ServerConfig};
use tokio_rustls::{Accept, TlsAcceptor};

use crate::config;
use crate::error::Result;
use crate::reload::{Reloaded, read_file, wrong};
pub(crate) use stream::Stream;

/// HTTP/2 as it is agreed on within the handshake.
pub(crate) const HTTP2: &[u8] = b"h2";
/// HTTP/1.1 likewise.
const HTTP1: &[u8] = b"http/1.1";
/// Begins a key that only a passphrase opens, of PKCS #8 and of OpenSSL's older form.
const ENCRYPTED: [&[u8]; 2] = [b"-----BEGIN ENCRYPTED PRIVATE KEY-----", b"Proc-Type: 4,ENCRYPTED"];

/// What cryptography there is.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// The certificates in force, as each service uses them.
#[derive(Debug)]
pub(crate) struct Certificates {
    grpc: Arc<ServerConfig>,
    http: Arc<ServerConfig>,
}

impl Certificates {
    /// Reads them, and reads them again when their files have changed and somebody watches.
    ///
    /// # Errors
    /// [`crate::Error::Config`], which names the file and what is wrong with it.
    pub(crate) fn open(config: &config::Tls) -> Result<Arc<Reloaded<Certificates>>> {
        let paths = [Some(&config.certificate), Some(&config.key), config.client_ca.as_ref()];
        let paths = paths.into_iter().flatten().cloned().collect();
        let config = config.clone();
        Ok(Arc::new(Reloaded::open("certificates", paths, move |_| Certificates::read(&config))?))
    }

    fn read(config: &config::Tls) -> Result<Certificates> {
        let chain = read_certificates("tls.certificate", &config.certificate)?;
        let key = read_key("tls.key", &config.key)?;
        let provider = provider();
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|error| wrong("tls.certificate", &config.certificate, &error.to_string()))?;
        let builder = match &config.client_ca {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let roots = read_roots("tls.client_ca", path)?;
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
                let verifier = verifier.map_err(|error| wrong("tls.client_ca", path, &error.to_string()))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let mut grpc = builder.with_single_cert(chain, key).map_err(|error| match error {
            rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
                let other = format!("is not the key of the certificate in {}", config.certificate.display());
                wrong("tls.key", &config.key, &other)
            }
            rustls::Error::InvalidCertificate(error) => {
                wrong("tls.certificate", &config.certificate, &format!("has a bad certificate: {error:?}"))
            }
            error => wrong("tls.key", &config.key, &format!("cannot be used: {error}")),
        })?;
        let mut http = grpc.clone();
        grpc.alpn_protocols = vec![HTTP2.into()];
        http.alpn_protocols = vec![HTTP2.into(), HTTP1.into()];
        Ok(Certificates { grpc: Arc::new(grpc), http: Arc::new(http) })
    }
}

/// What secures the connections of one service, each by the certificates that are in force when it
/// begins.
#[derive(Debug, Clone)]
pub(crate) struct Securing {
    certificates: Arc<Reloaded<Certificates>>,
    service: fn(&Certificates) -> &Arc<ServerConfig>,
}

impl Securing {
    /// Connections of HTTP/2 alone.
    pub(crate) fn grpc(certificates: &Arc<Reloaded<Certificates>>) -> Securing {
        Securing { certificates: certificates.clone(), service: |certificates| &certificates.grpc }
    }

    /// Connections of HTTP/2 and HTTP/1.1.
    pub(crate) fn http(certificates: &Arc<Reloaded<Certificates>>) -> Securing {
        Securing { certificates: certificates.clone(), service: |certificates| &certificates.http }
    }

    /// The handshake of a connection, which begins when it is polled.
    fn accept(&self, stream: TcpStream) -> Accept<TcpStream> {
        let certificates = self.certificates.get();
        TlsAcceptor::from((self.service)(&certificates).clone()).accept(stream)
    }
}

/// The certificates of a PEM file, at least one.
///
/// # Errors
/// [`crate::Error::Config`].
pub(crate) fn read_certificates(setting: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let content = read_file(setting, path)?;
    let read: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&content).collect();
    let certificates = read.map_err(|error| not_pem(setting, path, &error))?;
    if certificates.is_empty() {
        let reason = "holds no certificate: PEM is expected, which begins with -----BEGIN CERTIFICATE-----";
        return Err(wrong(setting, path, reason));
    }
    Ok(certificates)
}

/// The first private key of a PEM file.
///
/// # Errors
/// [`crate::Error::Config`].
pub(crate) fn read_key(setting: &str, path: &Path) -> Result<PrivateKeyDer<'static>> {
    let content = read_file(setting, path)?;
    let holds = |text: &[u8]| content.windows(text.len()).any(|window| window == text);
    if ENCRYPTED.iter().any(|text| holds(text)) {
        let reason = "is encrypted, and there is nobody to enter its passphrase: write it without one, as openssl pkey does";
        return Err(wrong(setting, path, reason));
    }
    PrivateKeyDer::from_pem_slice(&content).map_err(|error| match error {
        pem::Error::NoItemsFound => {
            wrong(setting, path, "holds no private key: PEM is expected, such as -----BEGIN PRIVATE KEY-----")
        }
        error => not_pem(setting, path, &error),
    })
}

/// The certificates of a PEM file, as those that others are issued by.
///
/// # Errors
/// [`crate::Error::Config`].
pub(crate) fn read_roots(setting: &str, path: &Path) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for certificate in read_certificates(setting, path)? {
        let added = roots.add(certificate);
        added.map_err(|error| wrong(setting, path, &format!("has a bad certificate: {error}")))?;
    }
    Ok(roots)
}

fn not_pem(setting: &str, path: &Path, error: &pem::Error) -> crate::Error {
    // Not the library's words: they repeat lines of the file, which may be those of a key.
    let reason = match error {
        pem::Error::MissingSectionEnd { .. } => "breaks off: a -----END line is missing",
        pem::Error::IllegalSectionStart { .. } => "has a -----BEGIN line that is none of PEM",
        _ => "is no PEM: what is between -----BEGIN and -----END is not base64",
    };
    wrong(setting, path, reason)
}
