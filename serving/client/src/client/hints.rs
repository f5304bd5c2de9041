//! Diagnosis of failed connections: the TLS cause, and the command-line flags that fix it.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{self, CertificateError, ClientConfig, ClientConnection, RootCertStore};

use millrace_serving_core::tls::provider;

/// Longest probe of a server.
const LOOK_MAX: Duration = Duration::from_secs(2);
/// rustls' prefix of an alert. The HTTP/2 layer keeps the text of a connection error but not its type.
const ALERT: &str = "received fatal alert: ";
/// Record types of the first byte of a TLS alert and of a TLS handshake.
const RECORDS: [u8; 2] = [21, 22];

/// The TLS cause of a failed connection to `host`; `None` for other causes.
pub(super) fn of_failure(error: &(dyn Error + 'static), host: &str) -> Option<String> {
    let mut cause = Some(error);
    while let Some(inner) = cause {
        if let Some(error) = inner.downcast_ref::<rustls::Error>() {
            return Some(of_tls(error, host));
        }
        let io = inner.downcast_ref::<io::Error>();
        if io.is_some_and(|error| error.kind() == io::ErrorKind::UnexpectedEof && is_handshake(error)) {
            return Some(
                "it closed the connection within the TLS handshake; see that it speaks TLS there (http:// is \
                 without TLS)"
                    .to_owned(),
            );
        }
        if let Some((_, alert)) = inner.to_string().split_once(ALERT) {
            return Some(of_alert(alert));
        }
        // The source of an I/O error that wraps another error is the source of the wrapped error, so the
        // wrapped error itself must be visited.
        cause = match io.and_then(io::Error::get_ref) {
            Some(wrapped) => Some(wrapped),
            None => inner.source(),
        };
    }
    None
}

fn is_handshake(error: &io::Error) -> bool {
    error.to_string().contains("handshake")
}

fn of_tls(error: &rustls::Error, host: &str) -> String {
    use CertificateError as Bad;
    match error {
        rustls::Error::InvalidMessage(_) => {
            "the server does not use TLS on this port: use http://, without --ca and --cert".to_owned()
        }
        rustls::Error::InvalidCertificate(bad) => match bad {
            Bad::UnknownIssuer | Bad::BadSignature => {
                "its certificate was issued by an authority that this client does not trust: name the PEM file of \
                 that authority with --ca"
                    .to_owned()
            }
            Bad::NotValidForName | Bad::NotValidForNameContext { .. } => {
                format!("its certificate is not for {host}: use a name of the certificate as the address ({bad})")
            }
            Bad::Expired | Bad::ExpiredContext { .. } => {
                format!("its certificate has expired by the clock of this machine ({bad})")
            }
            Bad::NotValidYet | Bad::NotValidYetContext { .. } => {
                format!("its certificate is not valid yet by the clock of this machine ({bad})")
            }
            bad => format!("its certificate cannot be used: {bad}"),
        },
        rustls::Error::AlertReceived(alert) => of_alert(&format!("{alert:?}")),
        rustls::Error::NoApplicationProtocol => of_alert("NoApplicationProtocol"),
        error => format!("the TLS handshake failed: {error}"),
    }
}

/// The meaning of an alert from the server, by its name in rustls.
fn of_alert(alert: &str) -> String {
    let name = alert.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap_or_default();
    match name {
        "CertificateRequired" => {
            "it asks for a certificate of the client: show one with --cert and --key".to_owned()
        }
        "UnknownCA"
        | "BadCertificate"
        | "UnsupportedCertificate"
        | "CertificateRevoked"
        | "CertificateExpired"
        | "CertificateUnknown"
        | "AccessDenied"
        | "DecryptError" => {
            format!(
                "it does not accept the client's certificate ({name}): show another one with --cert and --key"
            )
        }
        "NoApplicationProtocol" => "it does not speak HTTP/2 over TLS there: name its gRPC port".to_owned(),
        _ => format!("it ended the TLS handshake ({name})"),
    }
}

/// Whether a server speaks TLS: it answers a ClientHello with a handshake record or an alert.
pub(super) async fn speaks_tls(host: &str, port: u16) -> bool {
    let look = async {
        let mut stream = TcpStream::connect((host, port)).await?;
        stream.write_all(&hello(host)?).await?;
        stream.read_u8().await
    };
    match tokio::time::timeout(LOOK_MAX, look).await {
        Ok(Ok(first)) => RECORDS.contains(&first),
        Ok(Err(_)) | Err(_) => false,
    }
}

/// A ClientHello, for a probe that trusts no certificate.
fn hello(host: &str) -> io::Result<Vec<u8>> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    config.alpn_protocols = vec![millrace_serving_core::tls::HTTP2.into()];
    let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
    let mut connection = ClientConnection::new(Arc::new(config), name).map_err(io::Error::other)?;
    let mut message = Vec::new();
    while connection.wants_write() {
        connection.write_tls(&mut message)?;
    }
    Ok(message)
}

#[cfg(test)]
mod tests {
    use tokio_rustls::rustls::AlertDescription;

    use super::*;

    #[test]
    fn a_cause_is_found_behind_other_errors_and_named_with_its_flag() {
        let certificate = |bad| rustls::Error::InvalidCertificate(bad);
        for (error, words) in [
            (certificate(CertificateError::UnknownIssuer), "--ca"),
            (certificate(CertificateError::NotValidForName), "not for host.example"),
            (certificate(CertificateError::Expired), "expired"),
            (rustls::Error::AlertReceived(AlertDescription::CertificateRequired), "--cert and --key"),
            (rustls::Error::AlertReceived(AlertDescription::UnknownCA), "does not accept"),
        ] {
            let wrapped = io::Error::other(io::Error::new(io::ErrorKind::InvalidData, error));
            let found = of_failure(&wrapped, "host.example").unwrap_or_default();
            assert!(found.contains(words), "{found}");
        }
        let told = io::Error::other("connection error: received fatal alert: CertificateRequired");
        assert!(of_failure(&told, "h").unwrap_or_default().contains("--cert and --key"));
        assert_eq!(of_failure(&io::Error::from(io::ErrorKind::ConnectionRefused), "h"), None);
    }
}
