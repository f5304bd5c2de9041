//! `[serving.telemetry]`: the collector of request spans, the sample rate, and the service name.

use std::collections::BTreeMap;
use std::path::PathBuf;

use axum::http::Uri;
use millrace_datafs::Secret;
use serde::{Deserialize, Serialize};
use tonic::metadata::{Ascii, MetadataKey, MetadataMap, MetadataValue};

use crate::error::{Error, Result, quote};

/// Most headers, and most bytes of all of them.
const HEADERS_MAX: usize = 64;
const HEADER_BYTES_MAX: usize = 8 << 10;
/// Longest service name, in bytes.
const NAME_BYTES_MAX: usize = 256;
/// Headers that gRPC itself sends with each call.
const RESERVED: [&str; 5] = ["content-type", "host", "te", "user-agent", "content-length"];

/// Export of request spans to an OpenTelemetry collector, by OTLP over gRPC.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Telemetry {
    /// The collector: `http://HOST:4317` or `https://HOST:4317`.
    pub endpoint: String,
    /// Fraction of requests whose spans are sent, from 0 to 1. The `traceparent` of a request overrides it.
    pub sample_rate: f64,
    /// `service.name` of the spans.
    pub service_name: String,
    /// Headers of each call to the collector, such as `authorization`. Each is a value, or `{ file = "PATH"
    /// }` or `{ env = "NAME" }` with the place of the value.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, Secret>,
    /// PEM file of the authorities for the collector's certificate; without it, the system's authorities.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca: Option<PathBuf>,
}

impl Default for Telemetry {
    fn default() -> Self {
        Telemetry {
            endpoint: String::new(),
            sample_rate: 1.0,
            service_name: "millrace".to_owned(),
            headers: BTreeMap::new(),
            ca: None,
        }
    }
}

impl Telemetry {
    /// The settings for display; the values of headers may be secrets.
    pub(crate) fn without_secrets(&self) -> Telemetry {
        let headers = self.headers.iter().map(|(name, value)| (name.clone(), value.hidden())).collect();
        Telemetry { headers, ..self.clone() }
    }
}

impl Telemetry {
    /// Checks the settings; true if the endpoint uses TLS.
    ///
    /// # Errors
    /// [`Error::Config`] for an invalid setting.
    pub fn check(&self) -> Result<bool> {
        let refuse = |reason: String| Err(Error::Config { reason: format!("telemetry.{reason}") });
        if !(0.0..=1.0).contains(&self.sample_rate) {
            return refuse(format!("sample_rate is {}: take 0 to 1", self.sample_rate));
        }
        let name = &self.service_name;
        if name.is_empty() || name.len() > NAME_BYTES_MAX || name.contains(char::is_control) {
            return refuse(format!(
                "service_name is {}: 1 to {NAME_BYTES_MAX} bytes of text are expected",
                quote(name)
            ));
        }
        let Some(secure) = is_secure(&self.endpoint) else {
            return refuse(format!(
                "endpoint is {}: http://HOST:PORT or https://HOST:PORT is expected",
                quote(&self.endpoint)
            ));
        };
        if self.ca.is_some() && !secure {
            return refuse("ca is set, but endpoint is not an https address".to_owned());
        }
        Ok(secure)
    }

    /// The headers of each call to the collector.
    ///
    /// # Errors
    /// [`Error::Config`] for an invalid header, by its name: values may be secrets.
    pub fn metadata(&self) -> Result<MetadataMap> {
        let refuse = |reason: String| Err(Error::Config { reason: format!("telemetry.headers: {reason}") });
        let mut bytes = 0;
        let mut metadata = MetadataMap::new();
        for (name, value) in &self.headers {
            let shown = quote(name);
            let value = value
                .text(&shown)
                .map_err(|error| Error::Config { reason: format!("telemetry.headers: {error}") })?;
            bytes += name.len() + value.len();
            if self.headers.len() > HEADERS_MAX || bytes > HEADER_BYTES_MAX {
                return refuse(format!("more than {HEADERS_MAX} headers, or than {HEADER_BYTES_MAX} bytes"));
            }
            let Ok(key) = MetadataKey::<Ascii>::from_bytes(name.as_bytes()) else {
                return refuse(format!("{shown} is not a valid name of a text header"));
            };
            if RESERVED.contains(&key.as_str()) || key.as_str().starts_with("grpc-") {
                return refuse(format!("{shown} is reserved for gRPC"));
            }
            let Ok(mut value) = MetadataValue::<Ascii>::try_from(value.as_str()) else {
                return refuse(format!("the value of {shown} has characters that no header may have"));
            };
            value.set_sensitive(true);
            metadata.insert(key, value);
        }
        Ok(metadata)
    }
}

/// Whether an endpoint uses TLS; `None` for an invalid endpoint.
fn is_secure(endpoint: &str) -> Option<bool> {
    let uri: Uri = endpoint.parse().ok()?;
    let secure = match uri.scheme_str()? {
        "http" => false,
        "https" => true,
        _ => return None,
    };
    let authority = uri.authority()?;
    let bare = uri.path_and_query().is_none_or(|path| path.as_str() == "/");
    let whole = bare && !authority.host().is_empty() && !authority.as_str().contains('@');
    // The parser keeps an invalid port as text.
    let port = authority.as_str().rsplit_once(':').filter(|(_, port)| !port.ends_with(']'));
    let fits = port.is_none_or(|(_, port)| port.parse::<u16>().is_ok_and(|port| port > 0));
    (whole && fits).then_some(secure)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(endpoint: &str) -> Telemetry {
        Telemetry { endpoint: endpoint.to_owned(), ..Telemetry::default() }
    }

    #[test]
    fn an_endpoint_is_a_scheme_and_an_address() {
        for (endpoint, secure) in [
            ("http://127.0.0.1:4317", false),
            ("https://collector.example.org", true),
            ("http://[::1]:4317/", false),
            ("https://[::1]", true),
        ] {
            assert_eq!(at(endpoint).check().unwrap(), secure, "{endpoint}");
        }
        for endpoint in [
            "",
            "localhost:4317",
            "http://",
            "http://:4317",
            "ftp://host:1",
            "grpc://host:4317",
            "http://host:4317/v1/traces",
            "http://host:4317?x=1",
            "http://user:secret@host:4317",
            "http://host:0",
            "http://host:65536",
            "http://host:port",
            "http://a b",
            "//host",
        ] {
            let error = at(endpoint).check().unwrap_err().to_string();
            assert!(error.contains("telemetry.endpoint"), "{endpoint}: {error}");
        }
    }

    #[test]
    fn invalid_values_are_refused_with_their_key() {
        let good = at("http://host:4317");
        for sample_rate in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
            let error = Telemetry { sample_rate, ..good.clone() }.check().unwrap_err().to_string();
            assert!(error.contains("telemetry.sample_rate"), "{error}");
        }
        for service_name in [String::new(), "a\nb".into(), "n".repeat(NAME_BYTES_MAX + 1)] {
            let error = Telemetry { service_name, ..good.clone() }.check().unwrap_err().to_string();
            assert!(error.contains("telemetry.service_name") && error.len() < 400, "{error}");
        }
        let error = Telemetry { ca: Some("ca.pem".into()), ..good }.check().unwrap_err().to_string();
        assert!(error.contains("telemetry.ca"), "{error}");
    }

    #[test]
    fn headers_are_text_and_shown_nowhere() {
        let with = |name: &str, value: &str| Telemetry {
            headers: [(name.to_owned(), value.into())].into(),
            ..at("http://host:4317")
        };
        let good = with("Authorization", "Bearer secret");
        let metadata = good.metadata().unwrap();
        assert_eq!(metadata.get("authorization").unwrap(), "Bearer secret");
        for shown in [format!("{good:?}"), format!("{metadata:?}")] {
            assert!(!shown.contains("secret"), "{shown}");
        }
        for (name, value) in [
            ("", "secret"),
            ("a b", "secret"),
            ("key-bin", "secret"),
            ("grpc-timeout", "secret"),
            ("Content-Type", "secret"),
            ("x", "secret\n"),
            ("x", "secret\0"),
        ] {
            let error = with(name, value).metadata().unwrap_err().to_string();
            assert!(error.contains("telemetry.headers") && !error.contains("secret"), "{error}");
        }
        assert!(with("x", &"v".repeat(HEADER_BYTES_MAX)).metadata().is_err());
        let many = (0..=HEADERS_MAX).map(|n| (format!("x-{n}"), "".into())).collect();
        assert!(Telemetry { headers: many, ..at("http://host:1") }.metadata().is_err());
    }
}
