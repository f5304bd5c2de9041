//! TLS for the gRPC and the REST service: loads the server's certificate and the authorities for client
//! certificates, and accepts connections. The cryptography is ring's, as everywhere in the process.

mod stream;
mod validity;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use tokio::net::TcpStream;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::{self, PemObject as _};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::{ClientHello, ResolvesServerCert, WebPkiClientVerifier};
use tokio_rustls::rustls::sign::{CertifiedKey, SingleCertAndKey};
use tokio_rustls::rustls::{self, InconsistentKeys, RootCertStore, ServerConfig};
use tokio_rustls::{Accept, TlsAcceptor};

use crate::config;
use crate::error::{Error, Result};
use crate::metrics::RELOADS;
use crate::reload::{ReadResult, Reloaded, read_file, setting_error};
pub use stream::Stream;

/// HTTP/2 in ALPN.
pub const HTTP2: &[u8] = b"h2";
/// HTTP/1.1 in ALPN.
const HTTP1: &[u8] = b"http/1.1";
/// Most authorities for client certificates.
const CERTIFICATES_MAX: usize = 1_000;
/// Markers of an encrypted key, in PKCS #8 and in OpenSSL's older form.
const ENCRYPTED: [&[u8]; 2] = [b"-----BEGIN ENCRYPTED PRIVATE KEY-----", b"Proc-Type: 4,ENCRYPTED"];

/// The cryptography of the process.
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// The certificates in force, in each service's configuration.
#[derive(Debug)]
pub struct Certificates {
    identity: Arc<CertifiedKey>,
    grpc: Arc<ServerConfig>,
    http: Arc<ServerConfig>,
    /// Earliest expiry in the server's certificate chain.
    ends: Option<SystemTime>,
    /// Whether the expiry was reported.
    end_told: AtomicBool,
}

impl Certificates {
    /// Reads the certificates; [`Reloaded::watch`] reads them again after their files have changed.
    ///
    /// # Errors
    /// [`crate::Error::Config`] with the file and its error.
    pub fn open(config: &config::Tls) -> Result<Arc<Reloaded<Certificates>>> {
        let paths = [Some(&config.certificate), Some(&config.key), config.client_ca.as_ref()];
        let paths = paths.into_iter().flatten().cloned().collect();
        let config = config.clone();
        let read = move |old: Option<&Certificates>| Certificates::read(&config, old);
        Ok(Arc::new(Reloaded::open("certificates", paths, read)?.with_check(Certificates::report_expiry)))
    }

    /// Reads the certificates. If changed files have errors, the server keeps its former certificate, as it
    /// needs one. For client certificates only the valid authorities in `client_ca` count.
    fn read(config: &config::Tls, old: Option<&Certificates>) -> Result<ReadResult<Certificates>> {
        let mut errors = Vec::new();
        let identity = match (read_identity(config), old) {
            (Ok(identity), _) => Arc::new(identity),
            (Err(error), None) => return Err(error),
            (Err(error), Some(old)) => {
                errors.push(error);
                old.identity.clone()
            }
        };
        let provider = provider();
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|error| setting_error("tls.certificate", &config.certificate, &error.to_string()))?;
        let shown: Arc<dyn ResolvesServerCert> = Arc::new(SingleCertAndKey::from(identity.clone()));
        let mut grpc = match &config.client_ca {
            None => builder.with_no_client_auth().with_cert_resolver(shown),
            Some(path) => {
                let (roots, of_roots) = read_good_roots("tls.client_ca", path);
                errors.extend(of_roots);
                match WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build() {
                    Ok(verifier) => builder.with_client_cert_verifier(verifier).with_cert_resolver(shown),
                    Err(error) => {
                        if errors.is_empty() {
                            errors.push(setting_error(
                                "tls.client_ca",
                                path,
                                &format!("cannot be used: {error}"),
                            ));
                        }
                        builder.with_no_client_auth().with_cert_resolver(Arc::new(RefuseAll))
                    }
                }
            }
        };
        let mut http = grpc.clone();
        grpc.alpn_protocols = vec![HTTP2.into()];
        http.alpn_protocols = vec![HTTP2.into(), HTTP1.into()];
        let ends = identity.cert.iter().filter_map(|certificate| validity::not_after(certificate)).min();
        let (grpc, http) = (Arc::new(grpc), Arc::new(http));
        let value = Certificates { identity, grpc, http, ends, end_told: AtomicBool::new(false) };
        Ok(ReadResult { value, wrong: errors })
    }

    /// Reports once that the server's certificate has expired.
    fn report_expiry(&self) {
        let Some(ends) = self.ends.filter(|ends| *ends <= SystemTime::now()) else { return };
        if !self.end_told.swap(true, Ordering::Relaxed) {
            RELOADS.with_label_values(&["certificates", "expired"]).inc();
            let days = ends.elapsed().unwrap_or_default().as_secs() / 86_400;
            tracing::error!(
                days_ago = days,
                "tls.certificate has expired: clients refuse this server until the file has a new one"
            );
        }
    }
}

/// Resolver that fails every handshake: without authorities the server cannot verify clients.
#[derive(Debug)]
struct RefuseAll;

impl ResolvesServerCert for RefuseAll {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        None
    }
}

/// The server's certificate chain and key.
fn read_identity(config: &config::Tls) -> Result<CertifiedKey> {
    let chain = read_certificates("tls.certificate", &config.certificate)?;
    let key = read_key("tls.key", &config.key)?;
    CertifiedKey::from_der(chain, key, &provider()).map_err(|error| match error {
        rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
            let other = format!("is not the key of the certificate in {}", config.certificate.display());
            setting_error("tls.key", &config.key, &other)
        }
        rustls::Error::InvalidCertificate(error) => setting_error(
            "tls.certificate",
            &config.certificate,
            &format!("has a bad certificate: {error:?}"),
        ),
        error => setting_error("tls.key", &config.key, &format!("cannot be used: {error}")),
    })
}

/// TLS of one service: each connection uses the certificates in force when it begins.
#[derive(Debug, Clone)]
pub struct ServiceTls {
    certificates: Arc<Reloaded<Certificates>>,
    service: fn(&Certificates) -> &Arc<ServerConfig>,
}

impl ServiceTls {
    /// For connections with HTTP/2 only.
    pub fn grpc(certificates: &Arc<Reloaded<Certificates>>) -> ServiceTls {
        ServiceTls { certificates: certificates.clone(), service: |certificates| &certificates.grpc }
    }

    /// For connections with HTTP/2 and HTTP/1.1.
    pub fn http(certificates: &Arc<Reloaded<Certificates>>) -> ServiceTls {
        ServiceTls { certificates: certificates.clone(), service: |certificates| &certificates.http }
    }

    /// The handshake of a connection; begins when first polled.
    fn accept(&self, stream: TcpStream) -> Accept<TcpStream> {
        let certificates = self.certificates.get();
        TlsAcceptor::from((self.service)(&certificates).clone()).accept(stream)
    }
}

/// The certificates of a PEM file, at least one.
///
/// # Errors
/// [`crate::Error::Config`].
pub fn read_certificates(setting: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let content = read_file(setting, path)?;
    let read: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&content).collect();
    let certificates = read.map_err(|error| not_pem(setting, path, &error))?;
    if certificates.is_empty() {
        return Err(no_certificate(setting, path));
    }
    Ok(certificates)
}

/// The first private key of a PEM file.
///
/// # Errors
/// [`crate::Error::Config`].
pub fn read_key(setting: &str, path: &Path) -> Result<PrivateKeyDer<'static>> {
    let content = read_file(setting, path)?;
    let holds = |text: &[u8]| content.windows(text.len()).any(|window| window == text);
    if ENCRYPTED.iter().any(|text| holds(text)) {
        let reason =
            "is encrypted, and the server has no passphrase: decrypt it, for example with openssl pkey";
        return Err(setting_error(setting, path, reason));
    }
    PrivateKeyDer::from_pem_slice(&content).map_err(|error| match error {
        pem::Error::NoItemsFound => setting_error(
            setting,
            path,
            "holds no private key: PEM is expected, such as -----BEGIN PRIVATE KEY-----",
        ),
        error => not_pem(setting, path, &error),
    })
}

/// The certificates of a PEM file, as trusted authorities.
///
/// # Errors
/// [`crate::Error::Config`].
pub fn read_roots(setting: &str, path: &Path) -> Result<RootCertStore> {
    let (roots, errors) = read_good_roots(setting, path);
    errors.into_iter().next().map_or(Ok(roots), Err)
}

/// The valid authorities of a PEM file, and the errors of the others.
fn read_good_roots(setting: &str, path: &Path) -> (RootCertStore, Vec<Error>) {
    let (mut roots, mut errors) = (RootCertStore::empty(), Vec::new());
    let content = match read_file(setting, path) {
        Ok(content) => content,
        Err(error) => return (roots, vec![error]),
    };
    for certificate in CertificateDer::pem_slice_iter(&content).take(CERTIFICATES_MAX) {
        let added = certificate.map_err(|error| not_pem(setting, path, &error)).and_then(|certificate| {
            let added = roots.add(certificate);
            added.map_err(|error| setting_error(setting, path, &format!("has a bad certificate: {error}")))
        });
        errors.extend(added.err());
    }
    if roots.is_empty() && errors.is_empty() {
        errors.push(no_certificate(setting, path));
    }
    (roots, errors)
}

fn no_certificate(setting: &str, path: &Path) -> Error {
    let reason = "holds no certificate: PEM is expected, which begins with -----BEGIN CERTIFICATE-----";
    setting_error(setting, path, reason)
}

fn not_pem(setting: &str, path: &Path, error: &pem::Error) -> crate::Error {
    // Not the library's message: it repeats lines of the file, which may belong to a key.
    let reason = match error {
        pem::Error::MissingSectionEnd { .. } => "breaks off: a -----END line is missing",
        pem::Error::IllegalSectionStart { .. } => "has a -----BEGIN line that is not valid PEM",
        _ => "is not PEM: the text between -----BEGIN and -----END is not base64",
    };
    setting_error(setting, path, reason)
}
