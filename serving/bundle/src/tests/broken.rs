//! Tests of invalid manifests and files.

use bytes::Bytes;
use serde_json::{Value, json};

use super::{bundle, put, store_with};
use crate::{Error, list, load};

pub(super) fn renamed(manifest: &Bytes, name: &str) -> Vec<u8> {
    edited(manifest, |json| json["name"] = json!(name))
}

pub(super) fn edited(manifest: &Bytes, edit: impl FnOnce(&mut Value)) -> Vec<u8> {
    let mut json: Value = serde_json::from_slice(manifest).unwrap();
    edit(&mut json);
    json.to_string().into_bytes()
}

#[tokio::test]
async fn broken_manifests_are_refused_with_a_reason() {
    let bundle = bundle("m", 1);
    let manifest = bundle.files().pop().unwrap().1;
    let edits: Vec<(&str, Vec<u8>)> = vec![
        ("not a manifest", b"{".to_vec()),
        ("not a manifest", Vec::new()),
        ("not a manifest", b"[]".to_vec()),
        ("not a manifest", manifest[..manifest.len() / 2].to_vec()),
        ("not a manifest", edited(&manifest, |m| drop(m.as_object_mut().unwrap().remove("signature")))),
        ("bundle format 2", edited(&manifest, |m| m["format_version"] = json!(2))),
        ("format_version 0", edited(&manifest, |m| m["format_version"] = json!(0))),
        ("describes \"other\"", renamed(&manifest, "other")),
        ("version 2", edited(&manifest, |m| m["version"] = json!(2))),
        ("version 0", edited(&manifest, |m| m["version"] = json!(0))),
        ("not listed", edited(&manifest, |m| m["files"] = json!([]))),
        ("sha256", edited(&manifest, |m| m["files"][0]["sha256"] = json!("abc"))),
        ("bytes where", edited(&manifest, |m| m["files"][0]["bytes"] = json!(1))),
        (
            "twice",
            edited(&manifest, |m| {
                let file = m["files"][0].clone();
                m["files"].as_array_mut().unwrap().push(file);
            }),
        ),
        ("not a plain relative path", with_file(&manifest, "../../etc/passwd")),
        ("not a plain relative path", with_file(&manifest, "/etc/passwd")),
        ("not a plain relative path", with_file(&manifest, "a//b")),
        ("not a plain relative path", with_file(&manifest, "a/./b")),
        ("not a plain relative path", with_file(&manifest, "a\\..\\b")),
        ("not a plain relative path", with_file(&manifest, "a%2F..%2Fb")),
        ("lists itself", with_file(&manifest, "bundle.json")),
        ("marks a version that is being written", with_file(&manifest, "bundle.json.writing")),
        ("file path of 0 bytes", with_file(&manifest, "")),
        ("file path of 300 bytes", with_file(&manifest, &"x".repeat(300))),
        (
            "files, the limit",
            edited(&manifest, |m| {
                let files = (0..100).map(|n| entry(&format!("f{n}"))).collect::<Vec<_>>();
                m["files"].as_array_mut().unwrap().extend(files);
            }),
        ),
        ("0 inputs", edited(&manifest, |m| m["signature"]["inputs"] = json!([]))),
        ("dimension -2", edited(&manifest, |m| m["signature"]["inputs"][0]["shape"] = json!([-2]))),
        ("not a manifest", edited(&manifest, |m| m["signature"]["inputs"][0]["datatype"] = json!("FP31"))),
        ("the limit is 1048576", vec![b' '; (1 << 20) + 1]),
        ("extra.txt is missing", with_file(&manifest, "extra.txt")),
    ];
    for (reason, json) in edits {
        let store = store_with(&[]).await;
        put(store.as_ref(), "models/m/1/model.onnx", bundle.model_onnx().clone()).await;
        put(store.as_ref(), "models/m/1/bundle.json", json).await;
        let error = load(store.as_ref(), "models", "m", 1).await.unwrap_err().to_string();
        assert!(error.contains(reason), "{reason:?} is not in {error:?}");
        assert!(list(store.as_ref(), "models").await.unwrap().is_empty(), "{reason}");
    }
}

fn entry(path: &str) -> Value {
    json!({ "path": path, "bytes": 0, "sha256": "0".repeat(64) })
}

fn with_file(manifest: &Bytes, path: &str) -> Vec<u8> {
    edited(manifest, |m| m["files"].as_array_mut().unwrap().push(entry(path)))
}

#[tokio::test]
async fn every_changed_byte_is_detected() {
    let bundle = bundle("m", 1);
    let store = store_with(std::slice::from_ref(&bundle)).await;
    let model = bundle.model_onnx();
    for position in [0, model.len() / 2, model.len() - 1] {
        let mut bytes = model.to_vec();
        bytes[position] ^= 1;
        put(store.as_ref(), "models/m/1/model.onnx", bytes).await;
        let error = load(store.as_ref(), "models", "m", 1).await.unwrap_err();
        assert!(matches!(error, Error::Corrupt { .. }), "{error}");
        assert!(error.to_string().contains("models/m/1/model.onnx"), "{error}");
    }
    put(store.as_ref(), "models/m/1/model.onnx", model.slice(1..)).await;
    assert!(matches!(load(store.as_ref(), "models", "m", 1).await, Err(Error::Corrupt { .. })));
    put(store.as_ref(), "models/m/1/model.onnx", model.clone()).await;
    load(store.as_ref(), "models", "m", 1).await.unwrap();
}
