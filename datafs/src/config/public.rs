//! The list of store options whose values may be shown: in manifests, ConfigMaps and messages. Every other option is
//! taken for a secret, also one that a later version of the `object_store` crate adds.
//!
//! The chart's `values.schema.json` has the same list; a test of `train --render` compares them.

/// Options of a store that hold no secret, without the prefix of their provider.
pub const PUBLIC_STORE_OPTIONS: [&str; 26] = [
    "account_name",
    "allow_http",
    "bucket",
    "bucket_name",
    "checksum_algorithm",
    "conditional_put",
    "connect_timeout",
    "container_name",
    "copy_if_not_exists",
    "default_region",
    "disable_tagging",
    "endpoint",
    "endpoint_url",
    "http1_only",
    "http2_only",
    "pool_idle_timeout",
    "pool_max_idle_per_host",
    "region",
    "request_payer",
    "s3_express",
    "skip_signature",
    "timeout",
    "unsigned_payload",
    "use_emulator",
    "use_fabric_endpoint",
    "virtual_hosted_style_request",
];

/// Whether a value of this store option may be shown. `value` is the text, if there is one: a URL with a user or a
/// query may hold a secret.
pub fn is_public_store_option(name: &str, value: Option<&str>) -> bool {
    let name = name.to_ascii_lowercase();
    let prefixes = ["aws_", "google_", "azure_storage_", "azure_"];
    let name = prefixes.iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(&name);
    PUBLIC_STORE_OPTIONS.contains(&name) && !value.is_some_and(|value| value.contains(['@', '?']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_are_not_listed_are_secrets() {
        for shown in ["region", "AWS_REGION", "azure_storage_account_name", "endpoint", "allow_http"] {
            assert!(is_public_store_option(shown, Some("http://store:9000/x")), "{shown}");
        }
        for secret in [
            "secret_access_key",
            "access_key_id",
            "token",
            "aws_session_token",
            "account_key",
            "azure_storage_account_key",
            "access_key",
            "master_key",
            "sas_key",
            "sas_token",
            "bearer_token",
            "client_secret",
            "service_account_key",
            "google_service_account_key",
            "sse_customer_key_base64",
            "proxy_url",
            "an_option_of_tomorrow",
            "",
        ] {
            assert!(!is_public_store_option(secret, Some("x")), "{secret}");
        }
        assert!(!is_public_store_option("endpoint", Some("https://user:key@store")));
        assert!(!is_public_store_option("endpoint", Some("https://store/?sig=key")));
        assert!(PUBLIC_STORE_OPTIONS.is_sorted());
    }
}
