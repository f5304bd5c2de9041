//! TLS between a coordinator and the workers of other machines.
//!
//! Every connection is encrypted. With a certificate of the user's, a worker may check it against an authority. Without
//! one, the coordinator makes a certificate for itself, and workers accept any. In both cases the proofs of the token
//! cover the channel binding: a value that only the two ends of one TLS connection have. A machine on the way that
//! ends TLS in their place has another value on each side, so that neither proof is valid.
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls12_signature, verify_tls13_signature,
};
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{
    self, ClientConfig, ConnectionCommon, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme,
};

use crate::error::{Error, Result};

/// HTTP/2 in ALPN.
pub(crate) const HTTP2: &[u8] = b"h2";
/// The name in certificates that coordinators make for themselves. No worker checks it.
const OWN_NAME: &str = "millrace";
/// The label of the channel binding `tls-exporter` (RFC 9266).
const BINDING_LABEL: &[u8] = b"EXPORTER-Channel-Binding";

/// The channel binding of a TLS connection: the same at its two ends, and of no other connection.
pub(crate) type Binding = [u8; 32];

/// The channel binding of a connection whose handshake is done.
pub(crate) fn binding<Data>(connection: &ConnectionCommon<Data>) -> io::Result<Binding> {
    connection.export_keying_material(Binding::default(), BINDING_LABEL, Some(&[])).map_err(io::Error::other)
}

/// A coordinator's certificate and key.
#[derive(Clone)]
pub struct ServerTls(pub(crate) Arc<ServerConfig>);

impl fmt::Debug for ServerTls {
    /// Leaves the key out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ServerTls")
    }
}

impl ServerTls {
    /// Reads the certificate chain and the key, both PEM.
    ///
    /// # Errors
    /// [`Error::Access`] names the file and the problem.
    pub fn read(certificate: &Path, key: &Path) -> Result<ServerTls> {
        let chain = certificates(certificate)?;
        let secret = PrivateKeyDer::from_pem_file(key)
            .map_err(|e| unusable("key", key, &format!("it is not a private key in PEM ({e})")))?;
        ServerTls::new(chain, secret)
            .map_err(|e| unusable("key", key, &format!("it does not fit {} ({e})", certificate.display())))
    }

    /// A certificate that this process makes for itself.
    pub(crate) fn own() -> Result<ServerTls> {
        let fail = |reason: String| Error::Access { what: "make a TLS certificate".to_owned(), reason };
        let made =
            rcgen::generate_simple_self_signed([OWN_NAME.to_owned()]).map_err(|e| fail(e.to_string()))?;
        let key =
            PrivateKeyDer::try_from(made.signing_key.serialize_der()).map_err(|e| fail(e.to_owned()))?;
        ServerTls::new(vec![made.cert.der().clone()], key).map_err(|e| fail(e.to_string()))
    }

    fn new(
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> std::result::Result<ServerTls, rustls::Error> {
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])?
            .with_no_client_auth()
            .with_single_cert(chain, key)?;
        config.alpn_protocols = vec![HTTP2.to_vec()];
        Ok(ServerTls(Arc::new(config)))
    }
}

/// What a worker checks of a coordinator's certificate.
#[derive(Debug, Clone)]
pub struct ClientTls {
    pub(crate) config: Arc<ClientConfig>,
    /// Whether the certificate must be of a known authority, and made for the coordinator's name.
    pub(crate) has_authority: bool,
}

impl ClientTls {
    /// Reads the authorities, PEM.
    ///
    /// # Errors
    /// [`Error::Access`] names the file and the problem.
    pub fn read(authorities: &Path) -> Result<ClientTls> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates(authorities)? {
            roots
                .add(certificate)
                .map_err(|e| unusable("authorities", authorities, &format!("a certificate is bad ({e})")))?;
        }
        let config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|e| unusable("authorities", authorities, &e.to_string()))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(ClientTls::new(config, true))
    }

    /// Accepts any certificate: the proof of the token covers the connection.
    pub(crate) fn of_token() -> Result<ClientTls> {
        let provider = provider();
        let verifier = AnyCertificate(provider.signature_verification_algorithms);
        let config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(|e| Error::Access { what: "set up TLS".to_owned(), reason: e.to_string() })?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_no_client_auth();
        Ok(ClientTls::new(config, false))
    }

    fn new(mut config: ClientConfig, has_authority: bool) -> ClientTls {
        config.alpn_protocols = vec![HTTP2.to_vec()];
        ClientTls { config: Arc::new(config), has_authority }
    }

    /// The name that a certificate must be made for.
    pub(crate) fn server_name(&self, host: &str) -> io::Result<ServerName<'static>> {
        let name = if self.has_authority { host } else { OWN_NAME };
        ServerName::try_from(name.to_owned()).map_err(io::Error::other)
    }
}

/// Accepts the certificate of any server that has its key.
#[derive(Debug)]
struct AnyCertificate(WebPkiSupportedAlgorithms);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signed, &self.0)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.0)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_schemes()
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let bad = |reason: &str| unusable("certificates", path, reason);
    let read = CertificateDer::pem_file_iter(path).map_err(|e| bad(&e.to_string()))?;
    let found: Vec<_> =
        read.collect::<std::result::Result<_, _>>().map_err(|e| bad(&format!("it is not PEM ({e})")))?;
    if found.is_empty() {
        return Err(bad("it holds no certificate: PEM is expected"));
    }
    Ok(found)
}

fn unusable(what: &str, path: &Path, reason: &str) -> Error {
    Error::Access { what: format!("read {what} {}", path.display()), reason: reason.to_owned() }
}
