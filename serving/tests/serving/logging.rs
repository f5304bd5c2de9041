//! Tests of the log settings over gRPC and REST, and of the extension list that announces them.

use std::sync::{Arc, Mutex};

use millrace_serving::logging::{LogSettings, Logging};
use millrace_serving::wire::inference as pb;
use millrace_serving::{Deps, Source, serve_with};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::support::*;

/// A log that records its settings.
#[derive(Debug)]
struct Log(Mutex<LogSettings>);

impl Logging for Log {
    fn settings(&self) -> LogSettings {
        *self.0.lock().unwrap()
    }

    fn change(&self, change: &dyn Fn(&mut LogSettings)) -> Result<LogSettings, String> {
        let mut settings = self.0.lock().unwrap();
        let mut next = *settings;
        change(&mut next);
        if next.verbose_level > 100 {
            return Err("the log is full".into());
        }
        *settings = next;
        Ok(next)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_log_is_switched_by_calls() {
    let dir = tempfile::tempdir().unwrap();
    let started = LogSettings { error: true, warning: true, info: false, verbose_level: 0 };
    let log = Arc::new(Log(Mutex::new(started)));
    let (cancel, deps) = (CancellationToken::new(), Deps { logging: Some(log.clone()) });
    let source = Source::directory(dir.path()).unwrap();
    let serving = serve_with(&config(), source, deps, cancel.clone()).await.unwrap();
    let server = Server { dir, serving, cancel };
    let mut client = server.triton().await;
    let metadata = server.client().await.server_metadata().await.unwrap();
    assert!(metadata.extensions.contains(&"logging".to_owned()));

    use pb::log_settings_request::setting_value::ParameterChoice as Ask;
    use pb::log_settings_response::setting_value::ParameterChoice as Told;
    let ask = |settings: &[(&str, Option<Ask>)]| pb::LogSettingsRequest {
        settings: settings
            .iter()
            .map(|(name, choice)| {
                let value = pb::log_settings_request::SettingValue { parameter_choice: choice.clone() };
                ((*name).to_owned(), value)
            })
            .collect(),
    };
    let told = client.log_settings(ask(&[])).await.unwrap().into_inner().settings;
    let value = |name: &str| told[name].parameter_choice.clone().unwrap();
    assert_eq!(
        (told.len(), value("log_error"), value("log_info")),
        (6, Told::BoolParam(true), Told::BoolParam(false))
    );
    assert_eq!(value("log_verbose_level"), Told::Uint32Param(0));
    assert_eq!(value("log_format"), Told::StringParam("default".into()));

    let request =
        ask(&[("log_info", Some(Ask::BoolParam(true))), ("log_verbose_level", Some(Ask::Uint32Param(2)))]);
    client.log_settings(request).await.unwrap();
    assert_eq!(log.settings(), LogSettings { info: true, verbose_level: 2, ..started });
    let body = br#"{"log_warning": false, "log_verbose_level": 1, "log_file": "", "log_format": "default"}"#;
    let reply = server.http("POST", "/v2/logging", &[], body).await;
    let changed = LogSettings { warning: false, info: true, verbose_level: 1, ..started };
    assert_eq!((reply.status, log.settings()), (200, changed));
    let shown = json!({
        "log_file": "", "log_info": true, "log_warning": false, "log_error": true,
        "log_verbose_level": 1, "log_format": "default",
    });
    assert_eq!(reply.json(), shown);
    assert_eq!(server.http("GET", "/v2/logging", &[], b"").await.json(), shown);

    // A call with one invalid setting changes none.
    for (body, part) in [
        (r#"{"log_error": false, "log_file": "/etc/passwd"}"#, "log_file"),
        (r#"{"log_error": false, "log_format": "ISO8601"}"#, "ISO8601"),
        (r#"{"log_error": false, "log_verbose_level": -1}"#, "log_verbose_level"),
        (r#"{"log_error": false, "log_verbose_level": 1.5}"#, "log_verbose_level"),
        (r#"{"log_colour": true}"#, "log_colour"),
        ("[1]", "does not fit this call"),
    ] {
        let reply = server.http("POST", "/v2/logging", &[], body.as_bytes()).await;
        assert_eq!(reply.status, 400, "{body}");
        assert!(reply.json()["error"].as_str().unwrap().contains(part), "{body}");
    }
    let request = ask(&[("log_error", Some(Ask::BoolParam(false))), ("log_info", None)]);
    assert_eq!(client.log_settings(request).await.unwrap_err().code(), Code::InvalidArgument);
    let many: Vec<String> = (0..100).map(|number| format!("log_{number}")).collect();
    let many: Vec<_> = many.iter().map(|name| (name.as_str(), Some(Ask::BoolParam(true)))).collect();
    let error = client.log_settings(ask(&many)).await.unwrap_err();
    assert!(error.code() == Code::InvalidArgument && error.message().contains("limit is 64"), "{error}");
    assert_eq!(log.settings(), changed);
    let error =
        client.log_settings(ask(&[("log_verbose_level", Some(Ask::Uint32Param(101)))])).await.unwrap_err();
    assert_eq!((error.code(), error.message()), (Code::Unavailable, "the log is full"));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_changes_are_refused_where_the_process_fixes_its_log() {
    let server = Server::start(config(), &[]).await;
    let error = server.triton().await.log_settings(pb::LogSettingsRequest::default()).await.unwrap_err();
    assert_eq!(error.code(), Code::Unimplemented);
    assert!(error.message().contains("log"), "{error}");
    for method in ["GET", "POST"] {
        assert_eq!(server.http(method, "/v2/logging", &[], b"").await.status, 501);
    }
    let extensions = server.http("GET", "/v2", &[], b"").await.json()["extensions"].clone();
    let extensions: Vec<String> = serde_json::from_value(extensions).unwrap();
    for name in ["binary_tensor_data", "model_configuration", "model_repository", "statistics"] {
        assert!(extensions.iter().any(|extension| extension == name), "{extensions:?}");
    }
    assert!(!extensions.iter().any(|extension| extension == "logging"), "{extensions:?}");
    server.stop().await;
}
